"""Step time against eager torch.optim.Muon, interleaved in one process.

    python tools/bench_step.py --sets tiny thin wide --json out/bench.json

Both optimizers step in turn on the same gradients; a row gives the median of each and the median of the ratios of
neighbouring steps. Stock takes a stack of experts as one matrix each, since it knows no 3-D parameters.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from _shapes import SHAPE_SETS, describe, make_params

import muon_compile as mc


def timed(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call, device work included."""
    started = time.perf_counter()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def bench_set(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape set."""
    shapes = SHAPE_SETS[name]
    ours = make_params(shapes, device=args.device)
    stock = make_params(
        [s[1:] for s in shapes for _ in range(s[0])] if len(shapes[0]) == 3 else shapes, device=args.device
    )
    options = {"lr": 1e-3, "weight_decay": 0.1}
    reference = torch.optim.Muon(stock, **options)
    if len(shapes[0]) == 3:
        optimizer: torch.optim.Optimizer = mc.Muon(ours, **options, backend=args.backend)
        step = mc.compile_step(optimizer, backend=args.backend)
    else:
        optimizer = torch.optim.Muon(ours, **options)
        step = mc.compile_step(optimizer, backend=args.backend)
    for call in (reference.step, optimizer.step, reference.step, optimizer.step):
        call()
    pairs: list[tuple[float, float]] = []
    deadline = time.perf_counter() + args.seconds
    while len(pairs) < 5 or (time.perf_counter() < deadline and len(pairs) < args.max_pairs):
        pairs.append((timed(reference.step, args.device), timed(optimizer.step, args.device)))
    ratios = sorted(a / b for a, b in pairs)
    return {
        "set": name,
        "shapes": describe(shapes),
        "stock_ms": statistics.median(a for a, _ in pairs) * 1e3,
        "ours_ms": statistics.median(b for _, b in pairs) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
        "pairs": len(pairs),
        "compile_seconds": step.stats.compile_seconds,
        "cached": bool(step.stats.cached),
        "plan": step.plan.digest,
    }


def header(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        revision = commit.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"
    device = platform.processor() or platform.machine()
    if args.device != "cpu":
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else args.device
    return {
        "commit": revision,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "device": device,
        "backend": args.backend,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=[*SHAPE_SETS, "all"], default=["all"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--seconds", type=float, default=6.0, help="time per set, in seconds")
    parser.add_argument("--max-pairs", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    console = Console(width=120)
    facts = header(args)
    console.print(", ".join(f"{k} {v}" for k, v in facts.items()), highlight=False)
    names = list(SHAPE_SETS) if "all" in args.sets else args.sets
    table = Table("set", "shapes", "stock ms", "ours ms", "ratio (quartiles)", "pairs", "compile s")
    rows = []
    with console.status("") as status:
        for name in names:
            status.update(f"{name}: {describe(SHAPE_SETS[name])}")
            row = bench_set(name, args)
            rows.append(row)
            spread = f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
            seconds = f"{row['compile_seconds']:.1f}{' cached' if row['cached'] else ''}"
            times = (f"{row['stock_ms']:.1f}", f"{row['ours_ms']:.1f}")
            table.add_row(name, row["shapes"], *times, spread, str(row["pairs"]), seconds)
    console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"header": facts, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
