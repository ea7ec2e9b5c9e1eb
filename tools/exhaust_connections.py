"""Ranks that run out of connections, for real, and the strategy that still runs; gloo, on this machine.

    python tools/exhaust_connections.py
    python tools/exhaust_connections.py --ranks 48 --worlds 8 16 32 48 --json out/exhaustion.json
    python tools/exhaust_connections.py --ranks 16 --limit 20 --worlds

count   connections that a rank opens per kind of collective: sockets of its process, each kind in new processes, at
        the world sizes --worlds, against a formula. A connection is one open file on each of its two ranks; collectives
        of one group share them, groups do not. A group alone opens 4 (epoll, both ends of a pipe, a listening socket).
story   every rank's limit of open files (RLIMIT_NOFILE) is set to what gather_broadcast needs, which is less than
        all_to_all does. The compiled step over DTensors then runs with all_to_all, with the strategy that ``pick``
        names for this limit, and with that one again where gloo connects everyone at its start.

The ranks are forks of one process that has imported torch and has no threads, which makes 48 of them cheap. A rank's
updates are compared with those of the same matrices in one process. Exits with 1 where anything was unexpected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _forked_ranks import Job, Launch, Rank, launch

# Read when torch is imported: threads would not survive a fork. The planner's machine is named, so nothing is measured.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MUON_COMPILE_HARDWARE": "cpu-2core"}
# Files that Python and the FileStore open for moments only; steps of 8 ranks ran with none to spare, too.
SPARE_FILES = 2
# Relative to the largest entry of the update; float32 products in another batch differ by 1e-6.
TOLERANCE = 1e-4
COLS = 8
EXHAUSTED = "Too many open files"

# -- formulas: distinct peers of a rank, from the ranks that gloo's algorithms talk to, as distances around the ring ---


def _peers(ranks: int, distances: Sequence[int]) -> int:
    return len({distance % ranks for distance in distances} - {0})


def _powers(ranks: int) -> list[int]:
    return [1 << i for i in range((ranks - 1).bit_length())]


def ring(ranks: int) -> int:
    """Both neighbours. Source: gloo/allgather.cc, gloo/allreduce.cc."""
    return _peers(ranks, [1, -1])


def tree(ranks: int) -> int:
    """A broadcast's root, which has the most: ceil(log2 W). Source: gloo/broadcast.cc."""
    return _peers(ranks, _powers(ranks))


def trees(ranks: int) -> int:
    """Broadcasts from every rank, or a barrier: +-2^i, so 2 log2 W - 1 at powers of two. Source: gloo/barrier.cc."""
    return _peers(ranks, [sign * power for power in _powers(ranks) for sign in (1, -1)])


def tree_and_ring(ranks: int) -> int:
    """What wrapping compares plans with, on the first rank: one broadcast of objects and gathers of objects."""
    return _peers(ranks, [*_powers(ranks), -1])


def pairwise(ranks: int) -> int:
    """Everyone. Source: gloo/alltoallv.cc."""
    return ranks - 1


WORDS: dict[Callable[[int], int], str] = {
    ring: "2, a ring",
    tree: "ceil(log2 W), a tree's root",
    trees: "<= 2 ceil(log2 W) - 1, trees",
    pairwise: "W - 1, everyone",
}
FORMULAS: dict[str, Callable[[int], int]] = {
    "all_gather_into_tensor": ring,
    "all_reduce": ring,
    "reduce_scatter_tensor": ring,
    "broadcast": tree,
    "broadcast from every rank": trees,
    "all_to_all_single": pairwise,
    "barrier": trees,
    "all_gather_object": ring,
    "broadcast_object_list": tree,
}


def pick(connections: int, ranks: int) -> str:
    """The planner's strategy on a network that holds so many connections for each rank, and where bytes decide."""
    import muon_compile as mc
    from muon_compile.plan.network import Level, Network, Plane
    from muon_compile.spec import ShardLayout

    if connections < tree_and_ring(ranks):
        raise ValueError(
            f"--limit leaves {connections} connections per rank, expected at least {tree_and_ring(ranks)}; raise it."
        )
    network = Network(
        levels=(Level(name="all", latency_seconds=1e-9, bytes_per_second=1e6, plane="gloo"),),
        planes=(Plane(name="gloo", max_queue_pairs=connections),),
        shares_connections=True,
    )
    mesh = mc.MeshSpec(axes=(("shard", ranks),))
    layout = ShardLayout(mesh=mesh, axis="shard", dim=1, sizes=(2,) * ranks)
    spec = mc.MatrixSpec(name="stack", shape=(ranks, 2 * ranks, COLS), layout=layout)
    hardware = replace(mc.Hardware.preset("cpu-2core"), network=network)
    plan = mc.make_plan([spec], config=mc.MuonConfig(ns_dtype="float32"), hardware=hardware)
    (bucket,) = plan.buckets
    assert bucket.strategy is not None
    return bucket.strategy


# -- what a rank does --------------------------------------------------------------------------------------------------


def call(kind: str, rank: int, ranks: int) -> None:
    """One kind of collective, its default group ready."""
    import torch
    import torch.distributed as dist

    ops = torch.ops._c10d_functional
    x, group, even = torch.ones(ranks), dist.group.WORLD.group_name, [1] * ranks
    calls: dict[str, Callable[[], Any]] = {
        "all_gather_into_tensor": lambda: ops.all_gather_into_tensor(x, ranks, group),
        "all_reduce": lambda: ops.all_reduce(x, "sum", group),
        "reduce_scatter_tensor": lambda: ops.reduce_scatter_tensor(x, "sum", ranks, group),
        "broadcast": lambda: ops.broadcast(x, 0, group),
        "broadcast from every rank": lambda: [ops.wait_tensor(ops.broadcast(x, i, group)) for i in range(ranks)],
        "all_to_all_single": lambda: ops.all_to_all_single(x, even, even, group),
        "barrier": dist.barrier,
        "all_gather_object": lambda: dist.all_gather_object([None] * ranks, rank),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], src=0),
    }
    result = calls[kind]()
    if isinstance(result, torch.Tensor):
        ops.wait_tensor(result)


def collective(kind: str) -> Job:
    """A job of one kind of collective."""

    def job(rank: int, ranks: int) -> float:
        call(kind, rank, ranks)
        return 0.0

    return job


def matrices(ranks: int, mesh: Any = None) -> Any:
    """A stack of as many matrices as ranks with a gradient, two rows of each on every rank of a mesh; or whole."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    generator = torch.Generator().manual_seed(0)
    value, grad = (torch.randn((ranks, 2 * ranks, COLS), generator=generator) for _ in range(2))
    if mesh is not None:
        value, grad = (distribute_tensor(t, mesh, [Shard(1)], src_data_rank=None) for t in (value, grad))
    param = torch.nn.Parameter(value)
    param.grad = grad
    return param


def update(param: Any, *, strategy: str = "auto", steps: int = 1) -> Any:
    """How compiled steps change this rank's shard; without a step nothing but wrapping is done."""
    import muon_compile as mc

    local = getattr(param.detach(), "to_local", param.detach)()
    before = local.clone()
    optimizer = mc.Muon([param], lr=0.1, config=mc.MuonConfig(ns_dtype="float32"), backend="aot_eager")
    mc.compile_step(optimizer, backend="aot_eager", strategy=strategy)
    for _ in range(steps):
        optimizer.step()
    return local - before


def stepping(strategy: str, expected: Any, steps: int = 1) -> Job:
    """A job of the compiled step; returns its update's largest error, relative to the largest entry."""

    def job(rank: int, ranks: int) -> float:
        from torch.distributed.device_mesh import init_device_mesh

        found = update(matrices(ranks, init_device_mesh("cpu", (ranks,))), strategy=strategy, steps=steps)
        wrong = found - expected[:, 2 * rank : 2 * rank + 2]
        return float(wrong.abs().max() / expected.abs().max()) if steps else 0.0

    return job


# -- the two parts -----------------------------------------------------------------------------------------------------


def note(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def count_kinds(worlds: Sequence[int], timeout: float) -> list[dict[str, Any]]:
    """Connections per rank of each kind, the least and the most over the ranks, and what the formula says."""
    rows = []
    for ranks in worlds:
        for kind, formula in FORMULAS.items():
            ended = launch(collective(kind), Launch(ranks=ranks, timeout=timeout))
            if failed := [rank for rank in ended if rank.status != "ran"]:
                raise RuntimeError(f"{kind} on {ranks} ranks: {failed[0]}")
            counts = [rank.connections for rank in ended]
            row = {"kind": kind, "ranks": ranks, "least": min(counts), "most": max(counts), "formula": formula(ranks)}
            rows.append(row)
            note(f"{ranks} ranks, {kind}: {row['least']} to {row['most']} connections, formula {row['formula']}")
    return rows


def story(ranks: int, limit: int | None, timeout: float) -> dict[str, Any]:
    """The step under a limit of open files, and what was to be expected of it."""
    expected = update(matrices(ranks))
    own = min(rank.files for rank in launch(lambda rank, ranks: 0.0, Launch(ranks=ranks, timeout=timeout)))
    if limit is None:
        limit = own + SPARE_FILES + tree_and_ring(ranks)
    picked = pick(limit - own - SPARE_FILES, ranks)
    note(f"{limit} open files per rank, {own} of them before any connection; picked {picked}")
    everyone = "runs" if pairwise(ranks) <= limit - own - SPARE_FILES else "fails"
    tries = [
        ("wrapping alone", stepping(picked, expected, steps=0), True, "runs"),
        ("step, all_to_all", stepping("all_to_all", expected), True, everyone),
        (f"step, {picked}", stepping(picked, expected), True, "runs"),
        (f"step, {picked}, all connected at start", stepping(picked, expected), False, everyone),
    ]
    rows = []
    for name, job, lazy, wanted in tries:
        begun = time.monotonic()
        ended = launch(job, Launch(ranks=ranks, limit=limit, lazy=lazy, timeout=timeout))
        rows.append({"name": name, "wanted": wanted, "seconds": time.monotonic() - begun} | summary(ended))
        note(f"{name}: {rows[-1]['outcome']}")
    return {"ranks": ranks, "limit": limit, "own_files": own, "picked": picked, "tries": rows}


def summary(ended: Sequence[Rank]) -> dict[str, Any]:
    """What became of the ranks, in words and numbers."""
    ran = [rank for rank in ended if rank.status == "ran"]
    exhausted = [rank for rank in ended if EXHAUSTED in rank.text]
    error = max((rank.error for rank in ran), default=0.0)
    outcome = "fails" if exhausted else "runs" if len(ran) == len(ended) and error < TOLERANCE else "something else"
    return {
        "outcome": outcome,
        "error": error,
        "connections": max((rank.connections for rank in ran), default=None),
        "statuses": dict(Counter(rank.status for rank in ended)),
        "exhausted": len(exhausted),
        "causes": dict(Counter(cause(rank) for rank in ended if rank.status != "ran")),
    }


def cause(rank: Rank) -> str:
    """Why a rank did not finish, without what differs between ranks."""
    if rank.status == "waiting":
        return "waited for the others, ended"
    if EXHAUSTED in rank.text:
        found = re.findall(rf"(\w+): {EXHAUSTED}", rank.text)
        return f"{rank.status}: {found[0] + ': ' if found else ''}{EXHAUSTED}"
    return f"{rank.status}: {re.sub(r'[0-9]+', '#', rank.text.split('] ')[-1])[:70]}"


# -- for people --------------------------------------------------------------------------------------------------------


def print_kinds(rows: Sequence[dict[str, Any]]) -> None:
    """Kinds against world sizes."""
    from rich.console import Console
    from rich.table import Table

    worlds = sorted({row["ranks"] for row in rows})
    table = Table("collective", "formula", title="connections opened per rank: the most of all ranks, measured")
    for ranks in worlds:
        table.add_column(f"{ranks} ranks", justify="right")
    for kind, formula in FORMULAS.items():
        cells = []
        for row in (row for row in rows if row["kind"] == kind):
            differs = row["most"] != row["formula"]
            cells.append(f"{row['most']} [red]not {row['formula']}[/]" if differs else str(row["most"]))
        table.add_row(kind, WORDS[formula], *cells)
    Console(width=140).print(table)


def print_story(told: dict[str, Any]) -> None:
    """Every try, and what became of its ranks."""
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{told['ranks']} ranks, {told['limit']} open files each, of which {told['own_files']} are open before any "
        f"connection; strategy for this limit: {told['picked']}"
    )
    table = Table("try", "expected", "outcome", "connections", "ranks", "error of update", "s", title=title)
    for row in told["tries"]:
        good = row["outcome"] == row["wanted"]
        ranks = [f"{count} {status}" for status, count in row["statuses"].items() if status == "ran"]
        ranks += [f"{count} {text}" for text, count in sorted(row["causes"].items(), key=lambda item: -item[1])]
        ran = row["outcome"] == "runs"
        table.add_row(
            row["name"],
            row["wanted"],
            f"[{'green' if good else 'red'}]{row['outcome']}[/]",
            str(row["connections"]) if ran else "-",
            "\n".join(ranks),
            f"{row['error']:.0e}" if ran else "-",
            f"{row['seconds']:.0f}",
        )
    Console(width=140).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Count, then tell the story."""
    assert __doc__ is not None
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, default=32, help="of the story; 0: only count (default: 32)")
    parser.add_argument(
        "--limit", type=int, metavar="FILES", help="open files per rank (default: what gather_broadcast needs)"
    )
    parser.add_argument("--worlds", type=int, nargs="*", default=[8, 16, 32], metavar="RANKS", help="to count at")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for one start of ranks")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    args = parser.parse_args(argv)
    if sys.platform != "linux":
        parser.error("counts what a process has open in /proc, so it needs Linux")
    os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(1)
    kinds = count_kinds(args.worlds, args.timeout)
    if kinds:
        print_kinds(kinds)
    told = story(args.ranks, args.limit, args.timeout) if args.ranks else None
    if told is not None:
        print_story(told)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"kinds": kinds, "story": told}, indent=1) + "\n", encoding="utf-8")
    expected = all(row["most"] == row["formula"] for row in kinds)
    return 0 if expected and all(row["outcome"] == row["wanted"] for row in (told or {"tries": []})["tries"]) else 1


if __name__ == "__main__":
    sys.exit(main())
