"""Who orthogonalizes what: units shared out over ranks so that their FLOPs balance, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# Units of a part, and FLOPs of one of them.
Job = tuple[int, int]


def assign_runs(jobs: Sequence[Job], ranks: int) -> list[tuple[int, ...]]:
    """Share the units of all jobs out over ranks, longest processing time first (R. L. Graham, 1969).

    The heaviest units go first, equal ones in the jobs' order; each to the rank with the least FLOPs so far, of equal
    ranks the lowest. The units of a job are alike, so only their number counts, and every rank's are a consecutive run.

    Args:
        jobs: ``(num_units, flops_per_unit)`` of every part, in order.
        ranks: Ranks that share them.

    Returns:
        For each job the units of each rank; a rank's run starts where the one before it ends.
    """
    assert ranks >= 1 and all(units >= 0 and flops >= 0 for units, flops in jobs)
    counts = [[0] * ranks for _ in jobs]
    heap = [(0, rank) for rank in range(ranks)]
    # Sorting is stable, so equal units stay in the jobs' order.
    for job in sorted(range(len(jobs)), key=lambda index: -jobs[index][1]):
        units, flops = jobs[job]
        mine = counts[job]
        for _ in range(units):
            load, rank = heap[0]
            mine[rank] += 1
            heapq.heapreplace(heap, (load + flops, rank))
    return [tuple(row) for row in counts]


def assign_grid(
    jobs: Sequence[Job], replicas: int, shards: int, *, divide: bool
) -> tuple[list[tuple[int, ...]], list[tuple[tuple[int, ...], ...]]]:
    """Share units out over replicas and, within each replica, over the ranks of its shard group.

    Divided, all ranks of the world share at once: a replica's run is what its ranks own together, so that owners' runs
    are consecutive within it. Of equally busy ranks the lowest of the shard axis comes first, then the lowest replica,
    so that a few units spread over replicas: their runs travel padded to the longest. Parts without owners are shared
    with ``shards=1``.

    Args:
        jobs: ``(num_units, flops_per_unit)`` of every part, in order.
        replicas: Ranks of the replica axis; 1 where there is none.
        shards: Ranks of the shard axis; 1 where there is none.
        divide: Each unit is orthogonalized by one replica; else all of them by every replica.

    Returns:
        For each job ``Exchange.replica_counts``, empty where nothing is divided, and ``Exchange.owner_counts``, one row
        per replica, or a single one.
    """
    assert replicas >= 1 and shards >= 1
    if not divide or replicas == 1:
        return [() for _ in jobs], [(row,) for row in assign_runs(jobs, shards)]
    owners = [
        tuple(cells[replica::replicas] for replica in range(replicas)) for cells in assign_runs(jobs, replicas * shards)
    ]
    return [tuple(map(sum, rows)) for rows in owners], owners


def loads(jobs: Sequence[Job], counts: Sequence[Sequence[int]]) -> list[int]:
    """FLOPs of every rank, given each job's units per rank."""
    totals = [0] * max(map(len, counts), default=0)
    for (_, flops), row in zip(jobs, counts, strict=True):
        for rank, units in enumerate(row):
            totals[rank] += units * flops
    return totals


def imbalance(loads: Sequence[int]) -> float:
    """How much more than the mean the busiest rank has: 0.1 is 10 % more; 0 where there is nothing to do."""
    total = sum(loads)
    return max(loads) * len(loads) / total - 1 if total else 0.0
