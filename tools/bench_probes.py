"""What probes cost: step time with them over step time without, interleaved in one run.

    python tools/bench_probes.py --sets mlp --json out/bench-probes.json

A round is one step of each, in an order that alternates; a ratio is of the two steps of one round, so load on the
machine meets both. Reading the figures is not part of a step and is timed by itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _peers import OPTIONS
from _rounds import Sample, quartiles, run_rounds, timed
from _shapes import SHAPE_SETS, SMOKE_SETS, Params, copy_params, describe, make_params

OFF, ON = "off", "on"
WARM_UP = 3


def make(base: Params, args: argparse.Namespace, probes: bool) -> tuple[Callable[[], object], Any]:
    """A compiled step over copies of the parameters, warmed up; and its handle."""
    import muon_compile as mc

    params = copy_params(base, split_stacks=False)
    optimizer = mc.Muon(params, **OPTIONS, config=mc.MuonConfig(ns_dtype=args.ns_dtype), backend=args.backend)
    config = mc.CompileConfig(probes=probes)
    handle = mc.compile_step(optimizer, backend=args.backend, ns=args.ns, config=config)
    for _ in range(WARM_UP):
        optimizer.step()
    return optimizer.step, handle


def bench(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one shape set."""
    shapes = (SHAPE_SETS | SMOKE_SETS)[name]
    base = make_params(shapes, device=args.device)
    made = {OFF: make(base, args, False), ON: make(base, args, True)}

    def one(key: str) -> Callable[[], Sample]:
        return lambda: timed(made[key][0], args.device)

    samples = run_rounds({key: one(key) for key in made}, args.seconds, args.max_rounds, lambda done: None)
    taken = {key: [sample.seconds for sample in found] for key, found in samples.items()}
    ratios = [on / off for on, off in zip(taken[ON], taken[OFF], strict=True)]
    handle = made[ON][1]
    started = time.perf_counter()
    probes = handle.probes()
    read_ms = 1e3 * (time.perf_counter() - started)
    return {
        "set": name,
        "shapes": describe(shapes),
        "rounds": len(ratios),
        "ratio": quartiles(ratios),
        "ratio_of_fastest": min(taken[ON]) / min(taken[OFF]),
        "off_ms": 1e3 * statistics.median(taken[OFF]),
        "on_ms": 1e3 * statistics.median(taken[ON]),
        "read_ms": read_ms,
        "compile_seconds": {key: step.stats.compile_seconds for key, (_, step) in made.items()},
        "native": handle.plan.native,
        "figures": probes.scalars(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=[*SHAPE_SETS, *SMOKE_SETS], default=["mlp"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--ns", default="auto", help="Newton-Schulz form, as compile_step takes it")
    parser.add_argument("--ns-dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the products")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for a set's rounds; at least 5 rounds run")
    parser.add_argument("--max-rounds", type=int, default=300)
    parser.add_argument("--threads", type=int, help="threads of torch; its own default if not given")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.device}, {args.backend}", flush=True)
    for name in args.sets:
        row = bench(name, args)
        rows.append(row)
        ratio = row["ratio"]
        print(
            f"{name}, {row['shapes']}: on / off = {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}), "
            f"{row['rounds']} rounds; off {row['off_ms']:.2f} ms, on {row['on_ms']:.2f} ms, reading "
            f"{row['read_ms']:.2f} ms; {'CPU kernels' if row['native'] else 'no CPU kernels'}",
            flush=True,
        )
    if args.json:
        header = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
            "backend": args.backend,
            "ns_dtype": args.ns_dtype,
            "command": " ".join(["python", "tools/bench_probes.py", *sys.argv[1:]]),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
