"""Probes over ranks: the figures of whole parameters are those of one process, whoever holds or solves what."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import muon_compile as mc
from muon_compile.run.probes import FIGURES
from tests.dist.models import MATRICES, TALL, WORLD, Job, Model, compiled, give, optimizer_of, sharded_model
from tests.dist.ranks import Ranks

pytestmark = pytest.mark.dist

HSDP = (2, 2)
# Figures by the names of a bucket's parameters.
Read = dict[tuple[str, ...], dict[str, float]]
PROBES = mc.CompileConfig(probes=True)
WHOLE = ("all_gather", "all_to_all", "gather_broadcast", "gather_scatter", "hierarchical_all_to_all")
SOME = {name: MATRICES[name] for name in ("even", "even_too", "five", "three", "one", "experts", "vector")}
# Sums in another order, of what float32 products in other batches give.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def read(probes: mc.Probes) -> Read:
    return {tuple(sorted(bucket.params)): bucket.as_dict() for bucket in probes.buckets}


def train(rank: int, job: Job, missing: tuple[str, ...] = ()) -> dict[str, Any]:
    """Figures of the last step: of whole parameters, and of this rank alone."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    for number in range(job.steps):
        give(model, number, missing=missing)
        optimizer.step()
    alone = step.probes(reduce=False)
    whole = step.probes()
    assert whole.reduced and whole.step == job.steps
    strategies = {part.exchange.strategy for part in step.plan.parts if part.exchange is not None}
    kinds = tuple(collective.kind for collective in step.plan.collectives)
    return {"whole": read(whole), "alone": read(alone), "strategies": strategies, "kinds": kinds}


def train_alone(job: Job, missing: tuple[str, ...] = ()) -> Read:
    """The same in one process."""
    model = Model(job)
    optimizer = optimizer_of(model, job)
    step = mc.compile_step(optimizer, backend="aot_eager", ns=job.ns, config=PROBES)
    for number in range(job.steps):
        give(model, number, missing=missing)
        optimizer.step()
    return read(step.probes())


def check(found: Read, expected: Read, bounds: Mapping[str, float] | None = None) -> None:
    assert {name for names in found for name in names} == {name for names in expected for name in names}
    for names, figures in found.items():
        # A bucket of ranks may be a part of one process's, where parameters are laid out otherwise.
        (wanted,) = [of for others, of in expected.items() if set(names) <= set(others)]
        assert figures.keys() == wanted.keys(), names
        for figure, value in figures.items():
            assert value == pytest.approx(wanted[figure], rel=(bounds or {}).get(figure, CLOSE)), (names, figure)


def job_of(strategy: str, mesh: tuple[int, ...], **more: Any) -> Job:
    shapes = TALL if strategy.startswith("gram") else SOME
    return Job(**{"shapes": shapes, "mesh": mesh, "strategy": strategy, "steps": 2, "compile_config": PROBES, **more})


# Two shard ranks make no nodes.
EVERYWHERE = [*WHOLE, "gram_all_reduce", "gram_scatter"]
PAIRS = [(name, mesh) for name in EVERYWHERE for mesh in ((4,), HSDP) if mesh != HSDP or "hierarchical" not in name]


@pytest.mark.parametrize(("strategy", "mesh"), PAIRS)
def test_whole_figures_are_those_of_one_process(ranks: Ranks, strategy: str, mesh: tuple[int, ...]) -> None:
    """Uneven shards, a rank that holds nothing, whole experts, and AdamW are among them."""
    job = job_of(strategy, mesh)
    expected = train_alone(job)
    outcomes = ranks.run(train, job)
    for outcome in outcomes:
        assert strategy in outcome["strategies"]
        check(outcome["whole"], expected)
        assert outcome["whole"] == outcomes[0]["whole"]


@pytest.mark.parametrize("replicas", ["divide", "repeat"])
@pytest.mark.parametrize("strategy", ["all_to_all", "gram_scatter"])
def test_replicas_count_once(ranks: Ranks, strategy: str, replicas: Any) -> None:
    job = job_of(strategy, HSDP, compile_config=dataclasses.replace(PROBES, replicas=replicas))
    expected = train_alone(job)
    for outcome in ranks.run(train, job):
        check(outcome["whole"], expected)


@pytest.mark.parametrize("strategy", ["all_to_all", "all_gather", "gram_all_reduce"])
def test_missing_gradients_do_not_count(ranks: Ranks, strategy: str) -> None:
    missing = ("tall_too",) if strategy.startswith("gram") else ("even_too", "three")
    job = job_of(strategy, (4,))
    expected = train_alone(job, missing)
    for outcome in ranks.run(train, job, missing):
        check(outcome["whole"], expected)


def test_bfloat16_and_columns(ranks: Ranks) -> None:
    shapes = {"cols": (6, 16), "cols_too": (6, 16), "wide": (13, 40), "tall": (64, 20)}
    job = job_of("all_to_all", (4,), shapes=shapes, config=mc.MuonConfig())
    # Two roundings to bfloat16 of the same directions: of sums in another order.
    bounds = {"orthogonality_error": 2e-2, "update_rms": 1e-2, "decay_share": 1e-2, "weight_rms": 1e-3}
    expected = train_alone(job)
    for outcome in ranks.run(train, job):
        check(outcome["whole"], expected, bounds)


def test_a_rank_by_itself_has_its_own_part(ranks: Ranks) -> None:
    job = job_of("all_to_all", (4,), shapes={"five": MATRICES["five"], "even": MATRICES["even"]})
    outcomes = ranks.run(train, job)
    solved = [{names for names, of in o["alone"].items() if "orthogonality_error" in of} for o in outcomes]
    # Each matrix has one owner, and rank 3 holds no row of "five".
    assert sorted(names for found in solved for names in found) == [("even",), ("five",)]
    assert outcomes[3]["alone"][("five",)].keys() <= {"orthogonality_error"}
    assert len({o["alone"][("even",)]["weight_rms"] for o in outcomes}) == WORLD


def test_the_steps_collectives_stay_as_they_are(ranks: Ranks) -> None:
    job = job_of("auto", (4,))
    off = ranks.run(kinds_of, dataclasses.replace(job, compile_config=mc.CompileConfig()))
    on = ranks.run(kinds_of, job)
    assert on == off and all(on)


def kinds_of(rank: int, job: Job) -> tuple[str, ...]:
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    give(model, 0)
    optimizer.step()
    return tuple(collective.kind for collective in step.plan.collectives)


def test_every_figure_is_there(ranks: Ranks) -> None:
    outcome = ranks.run(train, job_of("auto", (4,)))[0]
    assert outcome["whole"][("even", "even_too")].keys() == set(FIGURES)
