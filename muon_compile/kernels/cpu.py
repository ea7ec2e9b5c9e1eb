"""The CPU kernels: compiled with g++ when first needed, kept in the cache directory, called through ctypes.

They need x86-64 with AVX512-BF16 (AMX-BF16 is used where the CPU has it), Linux, g++ and a torch that runs on GNU
OpenMP, whose threads they share. ``MUON_COMPILE_NATIVE=0`` turns them off; ``MUON_COMPILE_CPU_ISA=avx512_bf16`` leaves
AMX alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from muon_compile.kernels.cache import cache_or_temporary_dir

_LOG = logging.getLogger("muon_compile")
_HERE = Path(__file__).parent
SOURCES = ("elementwise.cpp", "newton_schulz.cpp", "probes.cpp", "tiles.h")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w")
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")
_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_ISAS = {1: "avx512_bf16", 2: "amx_bf16"}

_long, _int, _float, _pointer = ctypes.c_long, ctypes.c_int, ctypes.c_float, ctypes.c_void_p


def source_hash() -> str:
    """Hex digest of the kernels' source."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((_HERE / name).read_bytes())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """What Linux says this CPU can do; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def why_not() -> str | None:
    """Why the kernels cannot be used here, or None where they can; compiles them if need be."""
    return _load()[1]


def available() -> bool:
    """Whether the kernels can be used here; compiles them if need be (about two seconds, once per machine)."""
    return _load()[0] is not None


@functools.lru_cache(maxsize=1)
def isa() -> str:
    """The instruction set in use: ``"amx_bf16"`` or ``"avx512_bf16"``."""
    return _ISAS[_library().mc_isa()]


@functools.lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("MUON_COMPILE_NATIVE") == "0":
        return None, "MUON_COMPILE_NATIVE=0"
    missing = [flag for flag in _NEEDED if flag not in cpu_flags()]
    if platform.system() != "Linux" or platform.machine() != "x86_64" or missing:
        return None, f"expected Linux on x86-64 with {', '.join(_NEEDED)}, got a machine without {missing}"
    if "libgomp" not in Path("/proc/self/maps").read_text(encoding="utf-8"):
        return None, "this torch does not run on GNU OpenMP, whose threads the kernels share"
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    try:
        told = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
        if "Free Software Foundation" not in told:
            return None, f"expected GNU g++, got {told.splitlines()[0] if told else compiler}"
        return _declare(ctypes.CDLL(str(_compile(compiler, told)))), None
    except FileNotFoundError:
        return None, f"no C++ compiler: {compiler[0]!r} was not found"
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        _LOG.warning("the CPU kernels cannot be used, the step runs without them: %s", detail)
        return None, f"compiling or loading them failed: {detail}"


def _compile(compiler: Sequence[str], version: str) -> Path:
    """Path of the shared library for this source, compiler and CPU."""
    key = hashlib.sha256("\n".join([source_hash(), *_FLAGS, version, *sorted(cpu_flags())]).encode()).hexdigest()[:16]
    folder = cache_or_temporary_dir()
    path, proof = folder / f"kernels-{key}.so", folder / f"kernels-{key}.sha256"
    if not _is_whole(path, proof):
        units = [str(_HERE / name) for name in SOURCES if name.endswith(".cpp")]
        # Elsewhere first, so that no process ever loads half a file; the proof last.
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / "kernels.so"
            command = [*compiler, *_FLAGS, *units, "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            digest = Path(place) / "digest"
            digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="utf-8")
            os.replace(made, path)
            os.replace(digest, proof)
    return path


def _is_whole(path: Path, proof: Path) -> bool:
    """Whether a library is there as it was made: loading a damaged one would end the process."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == proof.read_text(encoding="utf-8")
    except OSError:
        return False


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.mc_newton_schulz.argtypes = [
        *(_pointer, _pointer, _long, _long, _long, _pointer, _pointer, _int, _int, _float, _int, _int)
    ]
    library.mc_momentum.argtypes = [
        *(_pointer, _pointer, _pointer, _long, _long, _pointer, _long, _pointer, _int, _int, _int, _int, _int, _int),
        *(_pointer, _pointer),
    ]
    library.mc_update.argtypes = [
        *(_pointer, _pointer, _long, _long, _pointer, _long, _pointer, _long, _int, _int, _int, _pointer)
    ]
    library.mc_squared_error.argtypes = [_pointer, _long, _long, _long, _pointer, _pointer, _int]
    library.mc_scratch_held.restype = _long
    return library


def _library() -> ctypes.CDLL:
    library, reason = _load()
    if library is None:
        raise RuntimeError(
            f"The CPU kernels are not available here: {reason}. The plan was made where they are; make it again here, "
            "or with a Hardware whose native is False."
        )
    return library


def takes(*dtypes: torch.dtype) -> bool:
    """Whether the elementwise kernels know all of these dtypes."""
    return all(dtype in _TYPES for dtype in dtypes)


def newton_schulz(
    x: Tensor,
    out: Tensor,
    coefficients: Sequence[float],
    segments: Sequence[int],
    *,
    split: bool,
    eps: float,
    eps_add: bool,
) -> None:
    """Normalize and orthogonalize every matrix of ``x`` into ``out``, which may be ``x`` itself.

    Args:
        x: ``[B, m, n]`` bfloat16, contiguous.
        out: The same.
        coefficients: Three per step.
        segments: Steps of each segment (``plan.forms``).
        split: Small matrices as two halves.
        eps: Guard of the norm.
        eps_add: Add it to the norm instead of clamping the norm to it.
    """
    _check(x, out)
    if x.dtype != torch.bfloat16 or out.dtype != torch.bfloat16 or x.shape != out.shape or x.dim() != 3:
        raise ValueError(f"expected bfloat16 [B, m, n] twice, got {x.dtype} {x.shape} and {out.dtype} {out.shape}.")
    values = (ctypes.c_double * len(coefficients))(*coefficients)
    counts = (ctypes.c_int64 * len(segments))(*segments)
    batch, rows, cols = x.shape
    shape = (x.data_ptr(), out.data_ptr(), batch, rows, cols)
    form = (ctypes.addressof(values), ctypes.addressof(counts), len(segments), 2 if split else 1)
    if _library().mc_newton_schulz(*shape, *form, eps, int(eps_add), torch.get_num_threads()):
        raise MemoryError(f"Newton-Schulz of {tuple(x.shape)}: out of memory for its scratch.")


def scratch_held() -> int:
    """Bytes of scratch memory that the kernels hold in this process; 0 where they have not been used."""
    return int(_library().mc_scratch_held()) if _load.cache_info().currsize and available() else 0


def _check(*tensors: Tensor) -> None:
    """Refuse memory that a kernel cannot read; a wrong pointer would end the process."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"expected contiguous tensors on the CPU, got {tuple(tensor.shape)} with strides {tensor.stride()} on "
                f"{tensor.device}."
            )


def _scalars(value: Tensor) -> tuple[Tensor, int]:
    """float64 values and their stride: 0 where one value serves all rows."""
    value = value.to(torch.float64)
    if value.numel() == 1:
        return value, 0
    return value.contiguous(), 1


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_pointer * len(tensors))(*[t.data_ptr() for t in tensors])


def momentum(
    grads: Sequence[Tensor],
    state: Tensor,
    out: Tensor,
    mu: Tensor,
    present: Tensor | None,
    scale: Tensor | None = None,
    *,
    ema: bool,
    nesterov: bool,
    squares: Tensor | None = None,
) -> None:
    """Update the momentum of B matrices in place and write their directions to ``out``.

    Args:
        grads: B tensors of one shape, contiguous; float32 or bfloat16, like the two below.
        state: Momentum ``[B, ...]``, contiguous.
        out: Directions ``[B, ...]``, contiguous; zero where there is no gradient.
        mu: Momentum coefficient, 0-d or ``[B]``.
        present: ``[B]`` bool, False where there is no gradient; None: all are there.
        scale: 0-d factor on every gradient; None: 1.
        ema: ``M <- M + (1 - mu)(G - M)`` instead of ``M <- mu M + G``.
        nesterov: Use the Nesterov direction.
        squares: ``[B]`` float64 zeros, for the sums of squares of the new momentum where there is a gradient.
    """
    _check(*grads, state, out)
    mus, stride = _scalars(mu)
    mask = None if present is None else present.contiguous()
    factor = None if scale is None else scale.to(torch.float64)
    listed = _pointers(grads)
    memory = (ctypes.addressof(listed), state.data_ptr(), out.data_ptr(), len(grads), grads[0].numel())
    scalars = (mus.data_ptr(), stride, None if mask is None else mask.data_ptr(), int(ema), int(nesterov))
    types = (_TYPES[grads[0].dtype], _TYPES[state.dtype], _TYPES[out.dtype])
    extra = (_sums(squares, len(grads)), None if factor is None else factor.data_ptr())
    _library().mc_momentum(*memory, *scalars, *types, torch.get_num_threads(), *extra)


def _sums(squares: Tensor | None, numel: int) -> int | None:
    if squares is None:
        return None
    _check(squares)
    if squares.dtype != torch.float64 or squares.numel() != numel:
        raise ValueError(f"expected {numel} float64 sums, got {squares.dtype} {tuple(squares.shape)}.")
    return squares.data_ptr()


def squared_error(x: Tensor, signs: Tensor, out: Tensor) -> None:
    """Estimate how far matrices are from orthogonal (``build.probe_ops``).

    Args:
        x: ``[B, m, n]`` bfloat16, contiguous.
        signs: ``[min(m, n)]`` float32 of 1 and -1.
        out: ``[B]`` float64, for ``||X X^T v - v||^2 / r``.
    """
    _check(x, signs, out)
    if x.dtype != torch.bfloat16 or x.dim() != 3 or signs.dtype != torch.float32 or out.dtype != torch.float64:
        raise ValueError(
            f"expected bfloat16 [B, m, n], float32 and float64, got {x.dtype} {x.shape}, {signs.dtype}, {out.dtype}."
        )
    if signs.numel() != min(x.shape[1:]) or out.numel() != x.shape[0]:
        raise ValueError(
            f"expected a sign per row and a sum per matrix of {tuple(x.shape)}, got {signs.shape} and {out.shape}."
        )
    memory = (x.data_ptr(), *x.shape, signs.data_ptr(), out.data_ptr())
    _library().mc_squared_error(*memory, torch.get_num_threads())


def update(
    params: Sequence[Tensor], direction: Tensor, decay: Tensor, size: Tensor, squares: Tensor | None = None
) -> None:
    """Write ``p <- p * decay + direction * size`` into every parameter, in float32, rounded once.

    Args:
        params: B tensors of one shape, contiguous, float32 or bfloat16.
        direction: ``[B, ...]``, contiguous, float32 or bfloat16.
        decay: 0-d or ``[B]``.
        size: 0-d or ``[B]``; a parameter with decay 1 and size 0 is left alone.
        squares: ``[2, B]`` float64 zeros, for the sums of squares of the parameters before and of the directions.
    """
    _check(*params, direction)
    decays, decay_stride = _scalars(decay)
    sizes, size_stride = _scalars(size)
    listed = _pointers(params)
    memory = (ctypes.addressof(listed), direction.data_ptr(), len(params), params[0].numel())
    scalars = (decays.data_ptr(), decay_stride, sizes.data_ptr(), size_stride)
    types = (_TYPES[params[0].dtype], _TYPES[direction.dtype])
    _library().mc_update(*memory, *scalars, *types, torch.get_num_threads(), _sums(squares, 2 * len(params)))


def rate(side: int, *, seconds: float = 0.05) -> float:
    """Measured FLOP/s of the standard iteration on square bfloat16 matrices, symmetric products counted as half.

    Args:
        side: m = n.
        seconds: Time to spend; the best repetition counts.
    """
    steps = 5 if side <= 256 else 2
    batch = max(torch.get_num_threads(), (1 << 18) // side**2)
    x = torch.full((batch, side, side), 0.01, dtype=torch.bfloat16, device="cpu")
    out = torch.empty_like(x)
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < seconds or best == float("inf"):
        begun = time.perf_counter()
        newton_schulz(x, out, (3.4445, -4.7750, 2.0315) * steps, (1,) * steps, split=False, eps=1e-7, eps_add=False)
        best = min(best, time.perf_counter() - begun)
    return batch * steps * 4 * side**3 / best
