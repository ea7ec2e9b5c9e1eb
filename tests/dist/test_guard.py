"""Clipping and skipping over ranks: one norm of all shards, one decision."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import muon_compile as mc
from tests.dist.models import Job, compiled, give, optimizer_of, params_of, raised, sharded_model
from tests.dist.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]
# float32 products; the order of sums differs.
TOLERANCE = 1e-5
CONFIG = mc.MuonConfig(ns_dtype="float32", ns_steps=2)
SHAPES = {"even": (8, 6), "five": (5, 8), "cols": (6, 4), "experts": (6, 4, 5), "vector": (7,)}
STRATEGIES = ("all_gather", "all_to_all", "gather_scatter", "gram_scatter")
MESHES = {"4": (4,), "2x2": (2, 2)}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as running:
        yield running


def job_of(mesh: tuple[int, ...], strategy: str = "all_to_all", shapes: Any = SHAPES, **config: Any) -> Job:
    shapes = {"tall": (40, 5), "uneven": (37, 4)} if strategy.startswith("gram") else shapes
    compile_config = mc.CompileConfig(**config)
    return Job(mesh=mesh, shapes=shapes, config=CONFIG, strategy=strategy, compile_config=compile_config, ns="standard")


def local(grad: Any) -> torch.Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def clipped(rank: int, job: Job) -> float:
    """The worst difference of a change from that of ``clip_grad_norm_`` and a step without clipping."""
    model, other = sharded_model(job), sharded_model(job)
    first = params_of(model)
    optimizer, reference = optimizer_of(model, job), optimizer_of(other, job)
    step = compiled(optimizer, job)
    compiled(reference, replace(job, compile_config=mc.CompileConfig()))
    for number, scale in enumerate((10.0, 1e-3, 1.0)):
        for m in (model, other):
            give(m, number, scale=scale)
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        reference.step()
    kinds = [c.kind for c in step.plan.collectives]
    assert kinds.count("all_reduce") >= 1
    assert step.stats.recompiles == 0
    found, wanted = params_of(model), params_of(other)
    return max(float((found[n] - wanted[n]).norm() / (wanted[n] - first[n]).norm().clamp(min=1e-12)) for n in found)


@pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_is_that_of_all_shards(ranks: Ranks, mesh: tuple[int, ...], strategy: str) -> None:
    assert max(ranks.run(clipped, job_of(mesh, strategy, clip_grad_norm=1.0))) <= TOLERANCE


@pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))
def test_parameters_that_nobody_exchanges_are_clipped_together(ranks: Ranks, mesh: tuple[int, ...]) -> None:
    """Experts that are whole on a rank, and vectors: no exchange, but one norm."""
    job = job_of(mesh, shapes={"experts": (6, 4, 5), "vector": (7,)}, clip_grad_norm=1.0, replicas="repeat")
    assert max(ranks.run(clipped, job)) <= TOLERANCE


def told_small(rank: int, job: Job) -> tuple[list[str], list[str]]:
    """What a rank says of momenta that clipping made tiny, and the names of all buckets of matrices."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    said: list[str] = []
    for number in range(2):
        give(model, number)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
        said += [str(w.message) for w in found if "norm under eps" in str(w.message)]
    assert step.stats.recompiles == 0
    return said, [bucket.name for bucket in step.plan.buckets if bucket.algorithm == "muon"]


@pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_orthogonalizes_a_small_momentum_says_so(ranks: Ranks, mesh: tuple[int, ...], strategy: str) -> None:
    each = ranks.run(told_small, job_of(mesh, strategy, clip_grad_norm=1e-9))
    for name in each[0][1]:
        assert any(f"'{name}'" in line for lines, _ in each for line in lines)
        assert all(sum(f"'{name}'" in line for line in lines) <= 1 for lines, _ in each), "once"
    assert not any(lines for lines, _ in ranks.run(told_small, job_of(mesh, strategy, clip_grad_norm=1.0)))


def skipped(rank: int, job: Job, name: str, culprit: int) -> tuple[int, bool, bool]:
    """Skips counted, whether the skipped step changed nothing, and whether the next one did."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    give(model, 0)
    optimizer.step()

    def held() -> list[torch.Tensor]:
        tensors = [*model.parameters(), *(v for p in model.parameters() for v in optimizer.state[p].values())]
        return [local(t.detach()).clone() for t in tensors if isinstance(t, torch.Tensor)]

    before = held()
    give(model, 1)
    if rank == culprit:
        grad = local(dict(model.named_parameters())[name].grad)
        assert grad.numel(), "there is something to spoil here"
        grad.view(-1)[0] = math.nan
    optimizer.step()
    same = all(map(torch.equal, before, held()))
    give(model, 2)
    optimizer.step()
    return step.skipped, same, any(not torch.equal(a, b) for a, b in zip(before, held(), strict=True))


@pytest.mark.parametrize("mesh", list(MESHES.values()), ids=list(MESHES))
@pytest.mark.parametrize("name", ["even", "experts", "vector"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_s_overflow_skips_the_step_on_all(
    ranks: Ranks, mesh: tuple[int, ...], name: str, culprit: int
) -> None:
    for found in ranks.run(skipped, job_of(mesh, nonfinite="skip"), name, culprit):
        assert found == (1, True, True)


def test_without_any_exchange_it_is_decided_together_too(ranks: Ranks) -> None:
    job = job_of((2, 2), shapes={"experts": (4, 4, 5)}, nonfinite="skip", replicas="repeat", clip_grad_norm=1.0)
    for found in ranks.run(skipped, job, "experts", 3):
        assert found == (1, True, True)


def told(rank: int, job: Job) -> str:
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    compiled(optimizer, job)
    give(model, 0)
    if rank == 2:
        local(dict(model.named_parameters())["even"].grad).view(-1)[0] = math.inf
    return raised(optimizer.step)


def test_raising_is_told_on_every_rank(ranks: Ranks) -> None:
    said = ranks.run(told, job_of((4,), nonfinite="raise", check="sync"))
    assert all("A gradient is not finite" in one for one in said)
    assert "'even'" in said[2] and "'even'" not in said[0]


def alone(rank: int, job: Job) -> bool:
    """Rank 1 has no gradient at all: of a guarded step it takes part all the same."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    give(model, 0, missing=tuple(SHAPES) if rank == 1 else ())
    before = copy.deepcopy([local(p.detach()) for p in model.parameters()])
    optimizer.step()
    assert step.stats.steps == 1
    return all(torch.equal(a, local(p.detach())) for a, p in zip(before, model.parameters(), strict=True))


def test_a_rank_without_gradients_does_not_hang_the_others(ranks: Ranks) -> None:
    job = job_of((4,), shapes={"experts": (4, 4, 5), "vector": (8,)}, clip_grad_norm=1.0, nonfinite="skip")
    assert ranks.run(alone, job) == [False, True, False, False]
