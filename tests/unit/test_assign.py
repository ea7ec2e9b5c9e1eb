"""Units shared out over ranks: nothing lost, balanced, the same every time, and fast at ten thousand ranks."""

from __future__ import annotations

import functools
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_compile.plan.assign import Job, assign_grid, assign_runs, imbalance, loads
from muon_compile.plan.forms import parse_form

jobs_of = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 1000)), max_size=6)
small_jobs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=3)


def units(count: int, rows: int, cols: int) -> Job:
    return count, parse_form("standard", 5).flops(rows, cols)


GPT2_SMALL = [units(12, 2304, 768), units(12, 768, 768), units(12, 3072, 768), units(12, 768, 3072)]
# 24 layers: four attention matrices, a router, and 64 experts of three matrices.
MOE = [
    units(24 * 2, 2048, 2048),
    units(24 * 2, 512, 2048),
    units(24, 64, 2048),
    units(24 * 64 * 2, 1408, 2048),
    units(24 * 64, 2048, 1408),
]


def one_by_one(jobs: list[Job], ranks: int) -> list[tuple[int, ...]]:
    """Longest processing time first as it is written down, unit by unit."""
    counts = [[0] * ranks for _ in jobs]
    totals = [0] * ranks
    queue = sorted((-flops, job) for job, (number, flops) in enumerate(jobs) for _ in range(number))
    for flops, job in queue:
        rank = totals.index(min(totals))
        totals[rank] -= flops
        counts[job][rank] += 1
    return [tuple(row) for row in counts]


def best_makespan(jobs: list[Job], ranks: int) -> int:
    """The smallest load of the busiest rank, over all assignments."""
    states = {(0,) * ranks}
    for number, flops in jobs:
        for _ in range(number):
            states = {tuple(sorted((*s[:i], s[i] + flops, *s[i + 1 :]))) for s in states for i in range(ranks)}
    return min(max(state) for state in states)


@given(jobs_of, st.integers(1, 9))
def test_every_unit_has_a_rank_and_ties_go_to_the_lower_one(jobs: list[Job], ranks: int) -> None:
    counts = assign_runs(jobs, ranks)
    assert [sum(row) for row in counts] == [number for number, _ in jobs]
    assert counts == one_by_one(jobs, ranks)


def test_equal_units_go_in_the_order_of_their_jobs() -> None:
    # 3 + 2 equal units on 2 ranks: the first job's third unit opens rank 0's second round, not the second job's.
    assert assign_runs([(3, 5), (2, 5)], 2) == [(2, 1), (1, 1)]
    assert assign_runs([(1, 1), (2, 5)], 2) == [(1, 0), (1, 1)]
    assert assign_runs([(1, 4), (1, 9)], 3) == [(0, 1, 0), (1, 0, 0)]


@given(small_jobs, st.integers(1, 3))
def test_the_busiest_rank_has_at_most_four_thirds_of_the_best_possible(jobs: list[Job], ranks: int) -> None:
    busiest = max(loads(jobs, assign_runs(jobs, ranks)), default=0)
    # Graham's bound, 4/3 - 1/(3m), in whole numbers.
    assert 3 * ranks * busiest <= (4 * ranks - 1) * best_makespan(jobs, ranks)


@given(jobs_of, st.integers(1, 9))
def test_ranks_differ_by_at_most_one_unit(jobs: list[Job], ranks: int) -> None:
    totals = loads(jobs, assign_runs(jobs, ranks)) or [0]
    heaviest = max((flops for number, flops in jobs if number), default=0)
    assert max(totals) - min(totals) <= heaviest
    assert max(totals) * ranks <= sum(totals) + (ranks - 1) * heaviest


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("jobs", [GPT2_SMALL, MOE], ids=["gpt2-small", "moe"])
def test_models_are_balanced_within_a_tenth(jobs: list[Job], ranks: int) -> None:
    assert imbalance(loads(jobs, assign_runs(jobs, ranks))) <= 0.10


@pytest.mark.parametrize("ranks", [64, 1024])
def test_beyond_its_units_a_model_is_bound_by_the_heaviest_one(ranks: int) -> None:
    totals = loads(GPT2_SMALL, assign_runs(GPT2_SMALL, ranks))
    assert sum(number for number, _ in GPT2_SMALL) == 48 < ranks
    assert max(totals) == max(flops for _, flops in GPT2_SMALL)
    assert totals.count(0) == ranks - 48


@pytest.mark.parametrize("ranks", [64, 1024])
def test_many_experts_are_balanced_on_many_ranks(ranks: int) -> None:
    assert imbalance(loads(MOE, assign_runs(MOE, ranks))) <= 0.10


@pytest.mark.parametrize(("ranks", "seconds"), [(1024, 1.0), (10_000, 5.0)])
def test_a_hundred_thousand_units_are_assigned_at_once(ranks: int, seconds: float) -> None:
    jobs = [(1000, 10_000 + 37 * i) for i in range(100)]
    start = time.process_time()
    counts = assign_runs(jobs, ranks)
    assert time.process_time() - start < seconds
    assert sum(map(sum, counts)) == 100_000
    assert imbalance(loads(jobs, counts)) <= 0.10


def test_loads_and_imbalance() -> None:
    assert loads([(3, 5), (1, 7)], [(2, 1), (0, 1)]) == [10, 12]
    assert loads([], []) == []
    assert imbalance([10, 12, 8]) == pytest.approx(0.2)
    assert imbalance([3, 0]) == 1.0
    assert imbalance([]) == imbalance([0, 0]) == 0.0


# -- replicas x shards ----------------------------------------------------------------------------------------------


@given(jobs_of, st.integers(1, 4), st.integers(1, 4))
def test_a_replicas_run_is_what_its_ranks_own(jobs: list[Job], replicas: int, shards: int) -> None:
    replica_counts, owner_counts = assign_grid(jobs, replicas, shards, divide=True)
    assert len(replica_counts) == len(owner_counts) == len(jobs)
    for (number, _), runs, rows in zip(jobs, replica_counts, owner_counts, strict=True):
        assert len(rows) == replicas and all(len(row) == shards for row in rows)
        assert sum(map(sum, rows)) == number
        assert runs == (tuple(map(sum, rows)) if replicas > 1 else ())


@given(jobs_of, st.integers(2, 4), st.integers(1, 4))
def test_divided_units_balance_over_the_whole_world(jobs: list[Job], replicas: int, shards: int) -> None:
    _, owner_counts = assign_grid(jobs, replicas, shards, divide=True)
    # Ties go along the replicas first.
    world = [tuple(itertools.chain(*zip(*rows, strict=True))) for rows in owner_counts]
    assert world == assign_runs(jobs, replicas * shards)


def test_few_units_spread_over_replicas_before_shards() -> None:
    replica_counts, owner_counts = assign_grid([(6, 1)], 2, 4, divide=True)
    assert replica_counts == [(3, 3)]
    assert owner_counts == [((1, 1, 1, 0), (1, 1, 1, 0))]


@given(jobs_of, st.integers(1, 4), st.integers(1, 4))
def test_undivided_every_replica_does_the_same(jobs: list[Job], replicas: int, shards: int) -> None:
    replica_counts, owner_counts = assign_grid(jobs, replicas, shards, divide=False)
    assert replica_counts == [()] * len(jobs)
    assert owner_counts == [(row,) for row in assign_runs(jobs, shards)]


def test_without_shards_units_are_divided_over_replicas() -> None:
    replica_counts, owner_counts = assign_grid([(5, 1), (2, 3)], 2, 1, divide=True)
    assert replica_counts == [(3, 2), (1, 1)]
    assert owner_counts == [((3,), (2,)), ((1,), (1,))]


@pytest.mark.parametrize(
    "bad",
    [
        functools.partial(assign_runs, [(1, 1)], 0),
        functools.partial(assign_runs, [(-1, 1)], 2),
        functools.partial(assign_grid, [(1, 1)], 0, 2, divide=False),
    ],
)
def test_nonsense_is_our_own_bug(bad: functools.partial[object]) -> None:
    with pytest.raises(AssertionError):
        bad()
