"""CPU seconds, bytes and FLOPs of a sharded step, one way of exchanging matrices against another, on 4 gloo ranks.

    python tools/bench_dist.py
    python tools/bench_dist.py --pair all_gather gather_broadcast --sets mlp square --json out/dist.json
    python tools/bench_dist.py --experts --hsdp --gram

pair     two strategies on row-sharded sets of tools/_shapes.py
experts  stacks sharded between experts, which stay where they are, against the same matrices sharded by rows under
         all_gather: no strategy can be forced on a rank's own experts
hsdp     2 replicas of 2 shards: replicas that repeat the work against replicas that divide it; and every rank doing all
gram     gather_broadcast against gram_scatter, on tall matrices

The ranks share this machine's cores, so wall time would say little: what is compared is user and system time of all
ranks over whole steps, one thread each. Repetitions of both sides alternate. Payload is what a rank puts into its
collectives per step, as the plan promises and the graph holds; sent is the most that a rank sends with ring algorithms.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))

from _shapes import SHAPE_SETS, SMOKE_SETS, Shape, describe

WORLD = 4
# Read when torch is imported; gloo on the loopback device works whatever the machine's name resolves to.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
SETS = SHAPE_SETS | SMOKE_SETS
# An expert's matrices are square here, so that one and the same matrix is sharded either way.
EXPERTS: list[Shape] = [(8, 768, 768)] * 4
SMALL_GRAMS: list[Shape] = [(2048, 64)] * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way of doing a step."""

    label: str
    shapes: tuple[Shape, ...]
    strategy: str
    axes: tuple[tuple[str, int], ...] = (("shard", WORLD),)
    replicas: Literal["divide", "repeat"] = "divide"


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """Two ways of doing the same step; the ratio is the first one's over the second's."""

    name: str
    sides: tuple[Side, Side]


def duels(args: argparse.Namespace) -> list[Duel]:
    """What was asked for; all of it where nothing was."""
    everything = not (args.pair or args.experts or args.hsdp or args.gram)
    found = []
    if args.pair or everything:
        for name in args.sets:
            sides = [
                Side(label=s, shapes=tuple(SETS[name]), strategy=s)
                for s in args.pair or ("all_gather", "gather_broadcast")
            ]
            found.append(Duel(name=f"{name}: {describe(SETS[name])}", sides=(sides[0], sides[1])))
    if args.experts or everything:
        rows = tuple(shape[1:] for shape in EXPERTS for _ in range(shape[0]))
        gathered = Side(label="all_gather, rows sharded", shapes=rows, strategy="all_gather")
        local = Side(label="experts sharded", shapes=tuple(EXPERTS), strategy="auto")
        found.append(Duel(name=f"experts: {describe(EXPERTS)}", sides=(gathered, local)))
    if args.hsdp or everything:
        axes = (("replicate", 2), ("shard", WORLD // 2))
        for name in args.sets:
            shapes = tuple(SETS[name])
            repeat = Side(label="repeat", shapes=shapes, strategy=args.hsdp_strategy, axes=axes, replicas="repeat")
            divide = Side(label="divide", shapes=shapes, strategy=args.hsdp_strategy, axes=axes)
            found.append(Duel(name=f"2x2, {args.hsdp_strategy}, {name}", sides=(repeat, divide)))
            plain = replace(repeat, label="all_gather, repeat", strategy="all_gather")
            found.append(Duel(name=f"2x2, no division at all, {name}", sides=(plain, divide)))
    if args.gram or everything:
        for shapes in (SETS["smoke"][:1] * 4,) if args.sets == ["smoke"] else (SETS["mlp"], SMALL_GRAMS):
            tall = tuple((max(shape), min(shape)) for shape in shapes)
            sides = [Side(label=s, shapes=tall, strategy=s) for s in ("gather_broadcast", "gram_scatter")]
            found.append(Duel(name=f"gram: {describe(list(tall))}", sides=(sides[0], sides[1])))
    return found


class Contestant:
    """A side's optimizer on this rank."""

    def __init__(self, side: Side, backend: str, dtype: Any) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        import muon_compile as mc

        names, sizes = zip(*side.axes, strict=True)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        placements = [Shard(0) if name == "shard" else Replicate() for name in names]
        generator = torch.Generator().manual_seed(0)
        params = []
        for shape in side.shapes:
            # Every rank has the same values and cuts its own, as fully_shard does.
            whole = [torch.randn(shape, generator=generator) for _ in range(2)]
            value, grad = (distribute_tensor(t, mesh, placements, src_data_rank=None) for t in whole)
            param = torch.nn.Parameter(value * 0.02)
            param.grad = grad
            params.append(param)
        self.optimizer = mc.Muon(params, config=mc.MuonConfig(ns_dtype=dtype), backend=backend)
        config = mc.CompileConfig(replicas=side.replicas)
        self.step = mc.compile_step(self.optimizer, backend=backend, strategy=side.strategy, config=config)

    def cpu_seconds(self, steps: int) -> float:
        """User and system time of this rank per step."""
        import torch.distributed as dist

        dist.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(steps):
            self.optimizer.step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / steps

    def facts(self) -> dict[str, Any]:
        """What the plan says, the same on every rank."""
        from muon_compile.verification.verify import ns_flops, sent_by_rank

        plan = self.step.plan
        exchanges = [part.exchange for part in plan.parts if part.exchange is not None]
        forms = {exchange.form for exchange in exchanges} | {batch.form for batch in plan.batches}
        return {
            "strategies": sorted({exchange.strategy for exchange in exchanges}),
            "form": ", ".join(sorted(forms)),
            "kernel": ", ".join(sorted({x.kernel for x in (*exchanges, *plan.batches)})),
            "payload": sum(spec.bytes_per_rank for spec in plan.collectives),
            "collectives": len(plan.collectives),
            "sent": sent_by_rank(plan),
            "flops": ns_flops(plan),
        }


def rank_main(rank: int, folder: str, wanted: Sequence[Duel], args: argparse.Namespace) -> None:
    """One rank: every duel, one after the other; the first rank writes what all of them measured."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    results = []
    for duel in wanted:
        contestants = [Contestant(side, args.backend, args.dtype) for side in duel.sides]
        for contestant in contestants:  # compiles
            contestant.cpu_seconds(1)
        samples: list[list[float]] = [[], []]
        for repetition in range(args.repetitions):
            for index in (0, 1) if repetition % 2 == 0 else (1, 0):
                samples[index].append(contestants[index].cpu_seconds(args.steps))
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, samples)
        totals = [[sum(r[side][i] for r in everyone) for i in range(args.repetitions)] for side in (0, 1)]
        if rank == 0:
            print(f"done: {duel.name}", file=sys.stderr, flush=True)
            results.append({"facts": [c.facts() for c in contestants], "cpu_seconds": totals})
            Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(wanted: Sequence[Duel], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks, and sum up what they found."""
    os.environ.update(ENVIRONMENT)
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(prefix="bench-dist-") as folder:
        torch.multiprocessing.spawn(rank_main, args=(folder, wanted, args), nprocs=WORLD)
        found = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    return [summary(duel, result) for duel, result in zip(wanted, found, strict=True)]


def summary(duel: Duel, result: dict[str, Any]) -> dict[str, Any]:
    """A duel's figures: per side, and the first side's over the second's."""
    sides = []
    for side, facts, seconds in zip(duel.sides, result["facts"], result["cpu_seconds"], strict=True):
        flops = facts["flops"]
        sides.append(
            asdict(side)
            | facts
            | {"cpu_seconds": statistics.median(seconds), "all_cpu_seconds": seconds}
            | {"busiest_over_mean": max(flops) * len(flops) / max(1, sum(flops))}
        )
    first, second = result["cpu_seconds"]
    ratios = {
        "cpu_seconds": statistics.median(a / b for a, b in zip(first, second, strict=True)),
        "payload": _ratio(sides[0]["payload"], sides[1]["payload"]),
        "sent": _ratio(max(sides[0]["sent"]), max(sides[1]["sent"])),
        "flops": _ratio(sum(sides[0]["flops"]), sum(sides[1]["flops"])),
    }
    return {"name": duel.name, "sides": sides, "ratios": ratios}


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def print_results(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """A table of all duels."""
    from rich.console import Console
    from rich.table import Table

    heads = ("CPU s", "payload MiB", "sent MiB", "calls", "GFLOP busiest", "GFLOP mean")
    title = f"{WORLD} gloo ranks, one thread each; {args.backend}, {args.dtype}; per step, median of {args.repetitions}"
    table = Table("what", "side", "form, kernel", title=title)
    for head in heads:
        table.add_column(head, justify="right")
    for result in results:
        for number, side in enumerate(result["sides"]):
            flops = side["flops"]
            numbers = (side["payload"] / 2**20, max(side["sent"]) / 2**20)
            table.add_row(
                result["name"] if number == 0 else "",
                side["label"],
                f"{side['form']}, {side['kernel']}",
                f"{side['cpu_seconds']:.3f}",
                *(f"{value:.2f}" for value in numbers),
                str(side["collectives"]),
                f"{max(flops) / 1e9:.2f}",
                f"{sum(flops) / len(flops) / 1e9:.2f}",
            )
        shown = {name: "-" if value is None else f"{value:.2f}" for name, value in result["ratios"].items()}
        cells = (shown["cpu_seconds"], shown["payload"], shown["sent"], "", "", shown["flops"])
        table.add_row("", "first / second", "", *cells, end_section=True)
    Console(width=140).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    assert __doc__ is not None
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--pair", nargs=2, metavar="STRATEGY", help="two strategies to compare")
    parser.add_argument("--sets", nargs="+", choices=sorted(SETS), default=["mlp", "square"], metavar="SET")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--hsdp", action="store_true")
    parser.add_argument("--hsdp-strategy", default="gather_scatter", metavar="STRATEGY")
    parser.add_argument("--gram", action="store_true")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the products")
    parser.add_argument("--steps", type=int, default=2, help="per repetition (default: 2)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each side, alternating (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    args = parser.parse_args(argv)
    results = measure(duels(args), args)
    print_results(results, args)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"world": WORLD, "backend": args.backend, "dtype": args.dtype, "steps": args.steps, "duels": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
