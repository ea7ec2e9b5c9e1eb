"""Step time against other Muons, interleaved, with the share of the machine's limits that ours reaches.

    python tools/bench_step.py --sets tiny thin wide --json out/bench.json --png out/bench.png

A round is one step of everyone, in an order that rotates; a ratio is the other's time over ours in the same round, so
load on the machine meets both. "default process" is stock alone in a process of its own, where nothing of ours has
touched the allocator; the others share one process with ours. Allocations are those of torch's allocator in one step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _peers import (
    OPTIONS,
    Missing,
    Step,
    make_checked,
    make_dion,
    make_heavyball,
    make_keller,
    make_stock,
    make_stock_compiled,
)
from _rounds import DEFAULT, MIN_ROUNDS, OURS, STOCK, Sample, allocations, run_rounds, summarize, timed
from _shapes import SHAPE_SETS, SMOKE_SETS, copy_params, describe, make_params

ALL_SETS = SHAPE_SETS | SMOKE_SETS
PEERS = ["stock-compiled", "dion", "keller", "heavyball"]
# Idle OpenMP threads spin for some milliseconds; a step of the other process is not to share its cores with them.
SETTLE_SECONDS = 0.005


class DefaultProcess:
    """Stock alone in a process of its own, which runs one step per line that it is sent."""

    def __init__(self, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--only-stock", "--sets", name, "--threads", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> list[str]:
        """The words of the process's next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that runs stock alone ended with exit code {self._process.wait()}.")
        return line.split()

    def step(self) -> Sample:
        """Run one step there."""
        assert self._process.stdin is not None
        time.sleep(SETTLE_SECONDS)
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        seconds, faults = self.read()
        time.sleep(SETTLE_SECONDS)
        return Sample(float(seconds), int(faults))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def serve_stock(name: str) -> None:
    """Be the process of ``DefaultProcess``."""
    params = make_params(ALL_SETS[name])
    params = copy_params(params, split_stacks=True)
    step = make_checked(lambda: make_stock(params), params, 2)
    print("ready", flush=True)
    for _ in sys.stdin:
        sample = timed(step, "cpu")
        print(sample.seconds, sample.faults, flush=True)


def make_ours(params: list[torch.nn.Parameter], args: argparse.Namespace) -> tuple[Step, Any]:
    """Our step of stock's optimizer, or of our own where there are stacks of experts; and its handle."""
    import muon_compile as mc

    stacks = any(param.dim() == 3 for param in params)
    kind: Any = mc.Muon if stacks else torch.optim.Muon
    optimizer = kind(params, **OPTIONS, **({"backend": args.backend} if stacks else {}))
    handle = mc.compile_step(optimizer, backend=args.backend, ns=args.ns)
    return optimizer.step, handle


def make_all(base: list[torch.nn.Parameter], args: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    """Every optimizer of the set that runs here, warmed up: steps, seconds to the steady state, notes, our handle."""
    warmup = 2 if args.device == "cpu" else 4  # CUDA graphs warm up, record, then replay
    makers: dict[str, Callable[[list[torch.nn.Parameter]], Step]] = {
        STOCK: make_stock,
        "stock-compiled": lambda params: make_stock_compiled(params, args.backend, args.max_compiled),
        "dion": make_dion,
        "keller": lambda params: make_keller(params, args.keller),
        "heavyball": lambda params: make_heavyball(params, args.max_compiled),
    }
    made: dict[str, Any] = {"steps": {}, "setup": {}, "notes": {}}
    tell("compiling ours")
    params = copy_params(base, split_stacks=False)
    step, made["handle"] = make_ours(params, args)
    made["steps"][OURS] = make_checked(lambda: step, params, warmup)
    for name in [STOCK, *args.peers]:
        tell(f"warming up {name}")
        started = time.perf_counter()
        params = copy_params(base, split_stacks=True)
        try:
            made["steps"][name] = make_checked(lambda name=name, params=params: makers[name](params), params, warmup)
        except Missing as reason:
            made["notes"][name] = str(reason)
        else:
            made["setup"][name] = time.perf_counter() - started
    return made


@contextlib.contextmanager
def default_process(name: str, args: argparse.Namespace) -> Iterator[DefaultProcess | None]:
    """Stock's own process, or None where it is not wanted; it starts while the caller compiles."""
    if not args.default_process:
        yield None
        return
    process = DefaultProcess(name, torch.get_num_threads())
    try:
        yield process
    finally:
        process.close()


def bench_set(name: str, args: argparse.Namespace, meter: Any, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure one shape set."""
    from _roofline import work_of

    torch.compiler.reset()  # or the shapes of the sets before would count against the limit of recompiles
    base = make_params(ALL_SETS[name], device=args.device)
    with default_process(name, args) as other:
        made = make_all(base, args, tell)
        runs = {
            key: (lambda step=step: timed(step, args.device)) for key, step in made["steps"].items()
        }  # fmt: skip
        if other is not None:
            tell("waiting for stock's own process")
            other.read()
            runs[DEFAULT] = other.step
        meter.reset()

        def between(done: int) -> None:
            tell(f"round {done}")
            if done <= MIN_ROUNDS or done % 10 == 0:
                meter.sample()

        samples = run_rounds(runs, args.seconds, args.max_rounds, between)
    tell("counting allocations")
    counted = {key: allocations(made["steps"][key], args.device) for key in (OURS, STOCK)}
    plan, stats = made["handle"].plan, made["handle"].stats
    row = {
        "set": name,
        "shapes": describe(ALL_SETS[name]),
        "rounds": len(samples[OURS]),
        "steps": summarize(samples),
        "setup_seconds": made["setup"],
        "notes": made["notes"],
        "allocations": counted,
        "compile_seconds": stats.compile_seconds,
        "cached": bool(stats.cached),
        "plan": plan.digest,
        "batches": [
            {"shape": [b.num_matrices, b.rows, b.cols], "form": b.form, "kernel": b.kernel, "reason": b.reason}
            for b in plan.batches
        ],
    }
    row["roofline"] = roofline(work_of(plan), meter, [sample.seconds for sample in samples[OURS]])
    return row


def roofline(work: Any, meter: Any, taken: list[float]) -> dict[str, Any]:
    """The median step, and the fastest, against the machine's measured limits; ``taken`` in seconds."""
    seconds = statistics.median(taken)
    rate, measured_with = meter.rate
    total, larger = work.seconds(meter.bandwidth, rate)
    return {
        "bytes": work.bytes,
        "flops": work.flops,
        "bytes_per_second": meter.bandwidth,
        "flops_per_second": rate,
        "rate_measured_with": measured_with,
        "ideal_ms_sum": total * 1e3,
        "ideal_ms_max": larger * 1e3,
        "share_sum": total / seconds,
        "share_max": larger / seconds,
        "share_sum_fastest": total / min(taken),
    }


def estimated_seconds(name: str, seconds: float, num_optimizers: int, rate: float) -> float:
    """A guess of a set's time: compiling, then warm-up and rounds of everyone at half of the measured rate."""
    from _roofline import standard_flops

    one_round = num_optimizers * 2 * standard_flops(ALL_SETS[name]) / rate
    return 15 + 2 * one_round + max(seconds, MIN_ROUNDS * one_round)


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def header(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"
    return {
        "commit": revision,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cpu": cpu_model(),
        "device": "cpu" if args.device == "cpu" else torch.cuda.get_device_name(),
        "backend": args.backend,
        "ns": args.ns,
        "command": " ".join(["python", "tools/bench_step.py", *sys.argv[1:]]),
    }


def choose_sets(names: list[str]) -> list[str]:
    """The sets of the command line, ``all`` written out."""
    return list(SHAPE_SETS) if "all" in names else names


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=[*ALL_SETS, "all"], default=["all"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--ns", default="auto", help="Newton-Schulz form of ours, as compile_step takes it")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="whom to run besides stock")
    parser.add_argument("--keller", type=Path, help="muon.py of KellerJordan/Muon, where no module muon is installed")
    parser.add_argument("--max-compiled", type=int, default=32, help="most parameters for peers that unroll them")
    parser.add_argument("--seconds", type=float, default=6.0, help="time for a set's rounds; at least 5 rounds run")
    parser.add_argument("--minutes", type=float, help="skip sets that look as if they would end later than this")
    parser.add_argument("--max-rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, help="threads of torch; its own default if not given")
    parser.add_argument(
        "--default-process",
        action=argparse.BooleanOptionalAction,
        help="also run stock alone in a process of its own; the default on a CPU",
    )
    parser.add_argument("--only-stock", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--png", type=Path, help="draw the ratios there")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device: expected 'cpu', or a CUDA GPU and a CUDA build of torch, got {args.device!r}")
    if args.default_process is None:
        args.default_process = args.device == "cpu"
    elif args.default_process and args.device != "cpu":
        parser.error("--default-process: the allocator of the C library matters on a CPU only; leave it out")
    return args


def run_sets(names: list[str], args: argparse.Namespace, report: dict[str, Any], console: Any) -> None:
    """Measure the sets in turn into the report, as far as the time allows."""
    from _roofline import Meter

    meter = Meter(args.device)
    started = time.perf_counter()
    report["skipped"] = []
    with console.status("") as status:
        for number, name in enumerate(names, 1):
            label = f"{number}/{len(names)} {name}, {describe(ALL_SETS[name])}"
            num_optimizers = len(report["rows"][-1]["steps"]) if report["rows"] else len(args.peers) + 3
            guess = estimated_seconds(name, args.seconds, num_optimizers, meter.rate[0])
            spent = time.perf_counter() - started
            if args.minutes is not None and spent + guess > 60 * args.minutes:
                report["skipped"].append(name)
                console.print(f"{label}: skipped, {spent:.0f} + about {guess:.0f} s pass --minutes", highlight=False)
                continue
            row = bench_set(name, args, meter, lambda text, label=label: status.update(f"{label}: {text}"))
            report["rows"].append(row)
            spent = time.perf_counter() - started
            console.print(f"{label}: {row['rounds']} rounds; {spent:.0f} s since the start", highlight=False)


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.WARNING)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.only_stock:
        serve_stock(args.sets[0])
        return
    from _tables import print_report
    from rich.console import Console

    console = Console(width=140)
    report: dict[str, Any] = {"header": header(args), "rows": []}
    console.print(", ".join(f"{k} {v}" for k, v in report["header"].items()), highlight=False)
    run_sets(choose_sets(args.sets), args, report, console)
    report["header"]["plans"] = {row["set"]: row["plan"] for row in report["rows"]}
    if report["skipped"]:
        console.print(f"skipped for lack of time; alone: --sets {' '.join(report['skipped'])}", highlight=False)
    if not report["rows"]:
        sys.exit("bench_step: expected time for at least one set, got --minutes too small for any.")
    print_report(report, console)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if args.png:
        from _plot import draw

        args.png.parent.mkdir(parents=True, exist_ok=True)
        draw(report, args.png)


if __name__ == "__main__":
    main()
