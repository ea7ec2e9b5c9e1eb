"""Predicted against measured step times on this machine: every strategy and form, on 1, 2 and 4 gloo ranks.

    python tools/check_planner.py
    python tools/check_planner.py --sets square thin-tall --worlds 1 4 --json out/planner.json

For every number of ranks the machine and the network among its ranks are measured once (``calibrate_group``), then
every case is predicted and timed: wall time from a barrier to the end of the slowest rank, the median over rounds in
which the cases of a set take turns. Printed are, for each set and number of ranks, the rank correlation (Spearman) of
both over its cases, the median error, and how much slower what ``auto`` picks is than the fastest case of those that it
may pick: with float32 products these are the standard form's, since no Gram form is as accurate there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})

Shape = tuple[int, int]

# The sets of semantics, with as few matrices as four ranks can share out and two cores can do in seconds.
SETS: dict[str, list[Shape]] = {
    "mlp": [(1536, 384)] * 8,
    "square": [(384, 384)] * 12,
    "gpt": [(576, 192), (192, 192), (768, 192), (192, 768)] * 6,
    "thin-tall": [(2048, 64)] * 32,
    "wide": [(192, 1536)] * 8,
    "tiny": [(64, 64)] * 100,
}
SMOKE: dict[str, list[Shape]] = {"smoke": [(32, 16)] * 4}
STRATEGIES = ("all_gather", "all_to_all", "gather_broadcast", "gather_scatter", "gram_all_reduce", "gram_scatter")
FORMS = ("standard", "gram")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way of doing a set's step."""

    set_name: str
    strategy: str
    form: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A case's step time in seconds, as predicted and as measured; the strategies that its buckets took."""

    world: int
    set_name: str
    strategy: str
    form: str
    predicted: float
    measured: float
    taken: tuple[str, ...]


def cases(names: Sequence[str], world: int) -> list[Case]:
    """Everything that a set can take on so many ranks, and what is chosen."""
    found = []
    for name in names:
        shapes = (SETS | SMOKE)[name]
        for strategy in STRATEGIES if world > 1 else ("local",):
            gram = strategy.startswith("gram")
            if gram and any(rows < cols for rows, cols in shapes):
                continue
            found += [Case(set_name=name, strategy=strategy, form=f) for f in (("standard",) if gram else FORMS)]
        found.append(Case(set_name=name, strategy="auto", form="auto"))
    return found


class Contestant:
    """A case's compiled step on this rank."""

    def __init__(self, case: Case, world: int, hardware: Any) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        import muon_compile as mc
        from muon_compile.plan.step_cost import predict_step

        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)) if world > 1 else None
        generator = torch.Generator().manual_seed(0)
        params = []
        for shape in (SETS | SMOKE)[case.set_name]:
            value, grad = (torch.randn(shape, generator=generator) for _ in range(2))
            if mesh is not None:
                value, grad = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (value, grad))
            param = torch.nn.Parameter(value * 0.02)
            param.grad = grad
            params.append(param)
        self.optimizer = mc.Muon(params, config=mc.MuonConfig(ns_dtype="float32"), backend="aot_eager")
        strategy = "auto" if case.strategy == "local" else case.strategy
        self.step = mc.compile_step(
            self.optimizer, backend="aot_eager", strategy=strategy, ns=case.form, hardware=hardware
        )
        self.predicted = predict_step(self.step.plan, hardware).seconds
        chosen = (bucket.strategy or "local" for bucket in self.step.plan.buckets)
        self.taken = tuple(sorted(set(chosen)))

    def seconds(self, world: int) -> float:
        """One step, on the slowest rank."""
        import torch
        import torch.distributed as dist

        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        self.optimizer.step()
        taken = torch.tensor(time.perf_counter() - start)
        if world > 1:
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)


def rank_main(rank: int, world: int, folder: str, names: Sequence[str], rounds: int) -> None:
    """One rank: every set's cases, in turn."""
    import torch
    import torch.distributed as dist

    from muon_compile.run.calibrate_group import calibrate_group

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / f"store{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    hardware = calibrate_group()
    results = []
    for name in names:
        wanted = cases([name], world)
        contestants = [Contestant(case, world, hardware) for case in wanted]
        taken: list[list[float]] = [[] for _ in wanted]
        for number in range(rounds + 1):
            for index, contestant in enumerate(contestants):
                seconds = contestant.seconds(world)
                if number:  # the first one compiles
                    taken[index].append(seconds)
        for case, contestant, seconds_of in zip(wanted, contestants, taken, strict=True):
            fields = asdict(case) | {"predicted": contestant.predicted, "measured": statistics.median(seconds_of)}
            results.append(Result(world=world, taken=contestant.taken, **fields))
        if rank == 0:
            print(f"{world} rank(s): {name} done", file=sys.stderr, flush=True)
    if rank == 0:
        text = json.dumps({"hardware": json.loads(hardware.to_json()), "results": [asdict(r) for r in results]})
        Path(folder, f"results{world}.json").write_text(text, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation, without ties; 1 for fewer than two values."""
    if len(a) < 2:
        return 1.0
    ranks = [[sorted(values).index(value) for value in values] for values in (a, b)]
    gaps = sum((x - y) ** 2 for x, y in zip(*ranks, strict=True))
    return 1 - 6 * gaps / (len(a) * (len(a) ** 2 - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How well one set's cases on so many ranks were predicted.

    Args:
        world: Ranks.
        set_name: The set.
        num_cases: Named cases.
        correlation: Spearman's, over them.
        error: Median of ``|predicted / measured - 1|``.
        auto_excess: Measured time of what ``auto`` picked over that of the fastest case that it may pick, minus 1.
        picked: What it picked.
        fastest: The fastest case that it may pick.
    """

    world: int
    set_name: str
    num_cases: int
    correlation: float
    error: float
    auto_excess: float
    picked: str
    fastest: str


def judge(results: Sequence[Result]) -> list[Verdict]:
    """A verdict for every set and number of ranks."""
    verdicts = []
    for world, name in dict.fromkeys((r.world, r.set_name) for r in results):
        mine = [r for r in results if (r.world, r.set_name) == (world, name)]
        named, (auto,) = [r for r in mine if r.strategy != "auto"], [r for r in mine if r.strategy == "auto"]
        allowed = [r for r in named if r.form == "standard" and not r.strategy.startswith("gram")]
        best = min(allowed, key=lambda r: r.measured)
        # The same step under its own name, where there is one, was measured in the same turns as the others.
        picked = next((r.measured for r in allowed if (r.strategy,) == auto.taken), auto.measured)
        verdicts.append(
            Verdict(
                world=world,
                set_name=name,
                num_cases=len(named),
                correlation=spearman([r.predicted for r in named], [r.measured for r in named]),
                error=statistics.median(abs(r.predicted / r.measured - 1) for r in named),
                auto_excess=picked / best.measured - 1,
                picked=", ".join(auto.taken),
                fastest=f"{best.strategy}, {best.form}",
            )
        )
    return verdicts


def print_verdicts(results: Sequence[Result]) -> None:
    """All cases, then a line for every set, and the bottom line."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    table = Table("ranks", "set", "strategy", "form", title="ms per step")
    for head in ("predicted", "measured", "ratio"):
        table.add_column(head, justify="right")
    for r in results:
        ms = (f"{r.predicted * 1e3:.2f}", f"{r.measured * 1e3:.2f}", f"{r.predicted / r.measured:.2f}")
        table.add_row(str(r.world), r.set_name, r.strategy, r.form, *ms)
    console.print(table)
    lines = Table("ranks", "set", "cases", "Spearman", "median error", "auto over fastest", "auto picks", "fastest")
    verdicts = judge(results)
    for v in verdicts:
        figures = (f"{v.correlation:.2f}", f"{v.error:.0%}", f"{v.auto_excess:+.0%}")
        lines.add_row(str(v.world), v.set_name, str(v.num_cases), *figures, v.picked, v.fastest)
    console.print(lines)
    errors = [abs(r.predicted / r.measured - 1) for r in results if r.strategy != "auto"]
    near = sum(v.auto_excess <= 0.1 for v in verdicts)
    sets = dict.fromkeys(r.set_name for r in results)
    pooled = {n: [r for r in results if r.set_name == n and r.strategy != "auto"] for n in sets}
    whole = [spearman([r.predicted for r in rs], [r.measured for r in rs]) for rs in pooled.values()]
    console.print(
        f"Spearman within a set, all ranks together: {min(whole):.2f} to {max(whole):.2f}; median error "
        f"{statistics.median(errors):.0%}; auto within 10 % of the fastest in {near} of {len(verdicts)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and compare."""
    assert __doc__ is not None
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--sets", nargs="+", choices=sorted(SETS | SMOKE), default=list(SETS), metavar="SET")
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each case (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    args = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT)
    import torch.multiprocessing

    results, hardware = [], {}
    with tempfile.TemporaryDirectory(prefix="check-planner-") as folder:
        for world in args.worlds:
            torch.multiprocessing.spawn(rank_main, args=(world, folder, args.sets, args.rounds), nprocs=world)
            found = json.loads(Path(folder, f"results{world}.json").read_text(encoding="utf-8"))
            hardware[world] = found["hardware"]
            results += [Result(**(r | {"taken": tuple(r["taken"])})) for r in found["results"]]
    assert all(math.isfinite(r.predicted) for r in results)
    print_verdicts(results)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"results": [asdict(r) for r in results], "hardware": hardware}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
