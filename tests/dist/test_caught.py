"""Four mutations of the exchange that must never go unseen: the ranks' comparisons catch two, ``verify`` the others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import muon_compile as mc
from muon_compile.build import collectives, gather, step
from muon_compile.plan import sharding
from muon_compile.plan.exchange import run_of
from muon_compile.plan.plan import Plan, Wave
from muon_compile.spec import MatrixSpec
from tests.dist.models import WORLD, Job, compiled, give, optimizer_of, params_of, raised, sharded_model
from tests.dist.ranks import Ranks

pytestmark = pytest.mark.dist

# Two parts, so that there is an order; not as many matrices as ranks, so that it matters who owns how many.
JOB = Job(shapes={**{f"a{i}": (16, 12) for i in range(5)}, **{f"b{i}": (8, 20) for i in range(2)}})
# Equal shares of rows and of units: whatever is swapped still has the right size.
EVEN = [MatrixSpec(name=f"m{i}", shape=(16, 8)) for i in range(WORLD)]
ODD_RANK = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


# -- a difference on one rank: every rank raises, before the first step -----------------------------------------------


def other_order() -> Any:
    """The parts of a wave go through it in another order than the plan says."""
    right: Callable[..., None] = step._run_wave

    def backwards(plan: Plan, wave: Wave, *rest: Any) -> None:
        right(plan, dataclasses.replace(wave, parts=wave.parts[::-1]), *rest)

    return mock.patch.object(step, "_run_wave", backwards)


def other_owners() -> Any:
    """Every matrix belongs to the next rank."""
    right: Callable[..., Any] = sharding.assign_grid

    def rotated(*args: Any, **named: Any) -> Any:
        runs, owners = right(*args, **named)
        return runs, [tuple((*row[1:], row[0]) for row in part) for part in owners]

    return mock.patch.object(sharding, "assign_grid", rotated)


MUTATIONS: dict[str, Callable[[], Any]] = {"order": other_order, "owners": other_owners}


def mutated(rank: int, job: Job, what: str, on: Sequence[int]) -> tuple[str, int]:
    """What building and stepping raised, with a mutation on some ranks, and how many steps were made."""
    model = sharded_model(job)
    before = params_of(model)
    steps = 0

    def build_and_step() -> None:
        nonlocal steps
        optimizer = optimizer_of(model, job)
        compiled(optimizer, job)
        give(model, 0)
        optimizer.step()
        steps += 1

    with MUTATIONS[what]() if rank in on else contextlib.nullcontext():
        message = raised(build_and_step)
    after = params_of(model)
    assert steps or all(torch.equal(before[name], after[name]) for name in before)
    return message, steps


@pytest.mark.parametrize("strategy", ["gather_scatter", "gather_broadcast"])
@pytest.mark.parametrize(
    ("what", "says"), [("order", "order of collectives"), ("owners", "disagree on the step's plan")]
)
def test_a_difference_on_one_rank_is_told_on_all(ranks: Ranks, strategy: str, what: str, says: str) -> None:
    job = dataclasses.replace(JOB, strategy=strategy)
    for message, steps in ranks.run(mutated, job, what, [ODD_RANK]):
        assert says in message and steps == 0


@pytest.mark.parametrize("what", list(MUTATIONS))
def test_the_same_on_all_ranks_is_no_difference(ranks: Ranks, what: str) -> None:
    """It is the comparison that raised, and not the mutation: where all ranks have it there is nothing to tell."""
    found = ranks.run(mutated, JOB, what, list(range(WORLD)))
    assert found == [("", 1)] * WORLD


# -- a fault that all ranks share: they agree, and are wrong ----------------------------------------------------------


def swapped_shards() -> Any:
    """Units are put together with the shards of the first two ranks in each other's place."""
    right: Callable[..., Tensor] = collectives.all_gather

    def swapped(x: Tensor, size: int, group: str) -> Tensor:
        first, second, *others = right(x, size, group).chunk(size)
        return torch.cat([second, first, *others])

    return mock.patch.object(collectives, "all_gather", swapped)


def swapped_rows() -> Any:
    """Every rank cuts the next one's rows out of a whole result."""

    def run(counts: tuple[int, ...], index: int) -> tuple[int, int]:
        return run_of(counts, (index + 1) % len(counts)) if counts == (4, 4, 4, 4) else run_of(counts, index)

    return mock.patch.object(gather, "run_of", run)


def wrong_root() -> Any:
    """What an owner should broadcast is taken from the rank after it, whose buffer is empty."""
    right: Callable[..., Tensor] = collectives.broadcast

    def other(x: Tensor, source: int, group: str) -> Tensor:
        # What a buffer holds where nobody wrote to it is not said; here it is zero.
        mine = x if source == dist.get_rank() else torch.zeros_like(x)
        return right(mine, (source + 1) % WORLD, group)

    return mock.patch.object(collectives, "broadcast", other)


FAULTS: dict[str, Callable[[], Any]] = {"shards": swapped_shards, "rows": swapped_rows, "root": wrong_root}


def verified(rank: int, specs: Sequence[MatrixSpec], strategy: str, fault: str | None) -> tuple[bool, float]:
    """Whether ``verify`` finds the strategy right, and its worst error."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        report = mc.verify(specs, strategies=[strategy], config=mc.MuonConfig(ns_dtype="float32"))
    return report.ok, report.rows[0].worst_error


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        ("all_gather", "shards"),
        ("gather_scatter", "shards"),
        ("gather_broadcast", "rows"),
        ("gather_broadcast", "root"),
    ],
)
def test_a_fault_of_all_ranks_is_far_from_the_reference(ranks: Ranks, strategy: str, fault: str) -> None:
    # The results of a single owner are broadcast; those of several may travel in one gather.
    specs = EVEN[:1] if fault == "root" else EVEN
    for ok, error in ranks.run(verified, specs, strategy, fault):
        assert not ok and error > 0.5
    for ok, error in ranks.run(verified, specs, strategy, None):
        assert ok and error < 1e-5
