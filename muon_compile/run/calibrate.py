"""Measure this machine for the cost model, once: the figures are kept in the user's cache directory."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from muon_compile.kernels import cpu
from muon_compile.kernels.cache import cache_dir
from muon_compile.plan.forms import Kernel
from muon_compile.plan.hardware import PRESETS, SIDES, Hardware, Rates

_LOG = logging.getLogger("muon_compile")
HARDWARE_VARIABLE = "MUON_COMPILE_HARDWARE"
# A change of what is measured, or how, is a new format.
_FORMAT = 2

# Every figure is taken in rounds over all of them, and its best counts: other load rarely meets the same one each time.
# It is over when two rounds in a row have bettered nothing by more than the step, or time is up.
_LIMIT_SECONDS, _QUIET_ROUNDS, _STEP = 2.0, 2, 1.1
_ROUND_SECONDS = 3e-3
# A product slower than this is not repeated, and larger ones are taken to run at its rate.
_SLOW_SECONDS = 0.15
# Calls are kept shorter than a scheduler's time slice, or other load is part of all of them.
_FLOP_PER_CALL, _MOST_FLOP_PER_CALL = 2e7, 3e8
_COPY_BYTES = tuple(2**power for power in range(20, 27))


def local_hardware() -> Hardware:
    """This machine's figures: those that ``MUON_COMPILE_HARDWARE`` names, else measured (``calibrate``).

    The variable holds a preset's name (``Hardware.preset``) or the path of a file from ``Hardware.to_json``.

    Raises:
        ValueError: The variable names neither a preset nor a readable file.
    """
    given = os.environ.get(HARDWARE_VARIABLE)
    if not given:
        return calibrate()
    if given in PRESETS:
        return PRESETS[given]
    try:
        text = Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{HARDWARE_VARIABLE}: expected a preset ({', '.join(PRESETS)}) or the path of a file from "
            f"Hardware.to_json, got {given!r} ({error.strerror}); unset it to have this machine measured."
        ) from error
    return Hardware.from_json(text)


def calibrate(device: str = "cpu") -> Hardware:
    """Figures of this machine, measured once for each CPU, thread count, torch and kernel, then read from disk.

    They are kept in ``MUON_COMPILE_CACHE_DIR``, else ``$XDG_CACHE_HOME/muon_compile``, else ``~/.cache/muon_compile``.

    Args:
        device: ``"cpu"``; accelerators take ``Hardware.preset``.

    Raises:
        ValueError: Another device.
    """
    if device != "cpu":
        raise ValueError(
            f"calibrate: device: expected 'cpu', got {device!r}; an accelerator's figures are Hardware.preset(name) or "
            "a Hardware of your own."
        )
    try:
        directory = str(cache_dir())
    except OSError as error:
        _say_once(f"every process measures this machine anew, for there is no cache directory: {error}")
        directory = ""
    return _calibrated(directory, json.dumps(machine_key(), sort_keys=True))


def machine_key() -> dict[str, object]:
    """Everything that a measurement depends on."""
    return {
        "format": _FORMAT,
        "cpu": _cpu_model(),
        # Virtual machines share a model's name and differ in what they show of it.
        "flags": hashlib.sha256(" ".join(sorted(cpu.cpu_flags())).encode()).hexdigest()[:16],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": cpu.source_hash(),
        "native": cpu.isa() if cpu.available() else "",
    }


# -- the file -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _calibrated(directory: str, key_text: str) -> Hardware:
    key = json.loads(key_text)
    path = Path(directory) / f"hardware-{hashlib.sha256(key_text.encode()).hexdigest()[:16]}.json"
    kept = _read(path, key) if directory else None
    if kept is not None:
        return kept
    start = time.perf_counter()
    hardware = _measure(key["cpu"])
    _LOG.info("measured this machine for the cost model in %.1f s", time.perf_counter() - start)
    if directory:
        _write(path, key, hardware)
    return hardware


def _read(path: Path, key: dict[str, object]) -> Hardware | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _LOG.warning("%s cannot be read (%s); this machine is measured anew", path, error)
        return None
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("key") != key:
            raise ValueError("it is about another machine")
        return Hardware.from_json(json.dumps(data.get("hardware")))
    except ValueError as error:
        _LOG.warning("%s is no measurement of this machine (%s); it is measured anew", path, error)
        return None


def _write(path: Path, key: dict[str, object], hardware: Hardware) -> None:
    text = json.dumps({"key": key, "hardware": json.loads(hardware.to_json())}, indent=1)
    temporary = None
    try:
        # Written whole, then renamed: whoever reads sees the old file or the new one.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _say_once(
            f"every process measures this machine anew, for {path.parent} cannot be written to: {error.strerror}; "
            "MUON_COMPILE_CACHE_DIR names another directory"
        )


@functools.lru_cache(maxsize=8)
def _say_once(message: str) -> None:
    _LOG.warning(message)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else platform.processor() or platform.machine()


# -- measuring ------------------------------------------------------------------------------------------------------


def _measure(name: str) -> Hardware:
    """Measure. Products run on one thread and count for all: on a busy machine threads mostly wait for each other."""
    threads = torch.get_num_threads()
    with _one_undisturbed_thread():
        figures = _best_figures(_calls(threads))
    measured: tuple[tuple[Kernel, str], ...] = (("graph", "bfloat16"), ("graph", "float32"), ("native", "bfloat16"))
    rates = [
        Rates(kernel=kernel, dtype=dtype, flops_per_second=tuple(threads * figures[kernel, dtype, s] for s in SIDES))
        for kernel, dtype in measured
        if (kernel, dtype, SIDES[0]) in figures
    ]
    copies = {size: figures["copy", "", size] for size in _COPY_BYTES}
    alone = copies[_COPY_BYTES[-1]]
    return Hardware(
        name=f"{name}, {threads} threads",
        device="cpu",
        gemm=tuple(rates),
        bytes_per_second=max(alone, figures["copy by all", "", _COPY_BYTES[-1]]),
        # In cache is where copies run at twice memory's rate or more.
        cache_bytes=max((size for size in _COPY_BYTES if copies[size] >= 2 * alone), default=_COPY_BYTES[0]),
        op_seconds=1 / figures["op", "", 0],
        native=any(rate.kernel == "native" for rate in rates),
    )


@contextmanager
def _one_undisturbed_thread() -> Iterator[None]:
    """One thread; and the caller's random numbers, autograd and threads are as before when it is over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


_Figure = tuple[str, str, int]
# Measures for about the given seconds; more is better.
_Call = Callable[[float], float]


def _best_figures(calls: dict[_Figure, _Call]) -> dict[_Figure, float]:
    best = dict.fromkeys(calls, 0.0)
    end, quiet = time.perf_counter() + _LIMIT_SECONDS, 0
    while quiet < _QUIET_ROUNDS:
        quiet += 1
        for figure, call in calls.items():
            rate = call(_ROUND_SECONDS)
            if rate > best[figure] * _STEP:
                quiet = 0
            best[figure] = max(best[figure], rate)
            # Nothing is left out of the first round, however slow the machine.
            if time.perf_counter() > end and all(best.values()):
                return best
    return best


def _calls(threads: int) -> dict[_Figure, _Call]:
    calls: dict[_Figure, _Call] = {}
    for dtype in ("bfloat16", "float32"):
        for side, call in _products(getattr(torch, dtype)).items():
            calls["graph", dtype, side] = call
    if cpu.available():
        for side in SIDES:
            calls["native", "bfloat16", side] = functools.partial(_native_rate, side)
    source = torch.zeros(_COPY_BYTES[-1] // 8, dtype=torch.float32, device="cpu")
    target = torch.zeros_like(source)
    for size in _COPY_BYTES:
        copy = functools.partial(target[: size // 8].copy_, source[: size // 8])
        calls["copy", "", size] = functools.partial(_per_second, copy, size)
    calls["copy by all", "", _COPY_BYTES[-1]] = functools.partial(_copy_by_all, source, target, threads)
    tiny = torch.zeros(1, 4, 4, dtype=torch.float32, device="cpu")
    calls["op", "", 0] = functools.partial(_per_second, functools.partial(_many_products, tiny), 100)
    return calls


def _products(dtype: torch.dtype) -> dict[int, _Call]:
    """FLOP/s of ``bmm`` by side."""
    calls: dict[int, _Call] = {}
    slow: _Call | None = None
    for side in SIDES:
        if slow is not None:
            calls[side] = slow
            continue
        num = max(1, min(256, int(_FLOP_PER_CALL / (2 * side**3))))
        # Of a large square the first rows alone.
        rows = min(side, int(_MOST_FLOP_PER_CALL / (2 * side**2)))
        x = torch.full((num, side, side), 0.5, dtype=dtype, device="cpu")
        top = x[:, :rows].contiguous()
        product = functools.partial(torch.bmm, top, x, out=torch.empty_like(top))
        flop = 2 * num * rows * side**2
        product()  # the first call of a shape sets its kernel up
        start = time.perf_counter()
        product()
        seconds = time.perf_counter() - start
        if seconds > _SLOW_SECONDS:
            slow = functools.partial(_known, flop / seconds)
        calls[side] = slow or functools.partial(_per_second, product, flop)
    return calls


def _known(rate: float, _: float) -> float:
    return rate


def _per_second(call: Callable[[], object], amount: float, seconds: float) -> float:
    """``amount`` over the shortest of the calls that fit into ``seconds``, at least one."""
    best, spent = float("inf"), 0.0
    while spent < seconds:
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return amount / best


def _copy_by_all(source: Tensor, target: Tensor, threads: int, seconds: float) -> float:
    """Bytes/s, read and written, of all threads together."""
    torch.set_num_threads(threads)
    try:
        return _per_second(functools.partial(target.copy_, source), 2 * source.nbytes, seconds)
    finally:
        torch.set_num_threads(1)


def _many_products(x: Tensor) -> None:
    for _ in range(100):
        torch.bmm(x, x)


def _native_rate(side: int, seconds: float = _ROUND_SECONDS) -> float:
    """FLOP/s of the native kernel in bfloat16."""
    return cpu.rate(side, seconds=seconds)
