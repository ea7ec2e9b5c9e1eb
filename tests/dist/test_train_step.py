"""A training step in one graph under DistributedDataParallel: gradients, buffers and update as in the eager loop."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import muon_compile as mc
from tests.dist.models import mesh_of, raised
from tests.dist.ranks import Ranks
from tests.graph.test_train_step import Model, assert_alike, batch_of, eager_step, model_of, optimizer_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]
WORLD = 2
Values = dict[str, torch.Tensor]
STEPS = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as running:
        yield running


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=True)


def train(rank: int, divide: bool) -> tuple[list[str], int]:
    """Each rank on batches of its own; buffers differ before, the first rank's are taken."""
    start = model_of()
    start.norm.running_mean.fill_(float(rank))
    model, other = wrapped(copy.deepcopy(start)), wrapped(copy.deepcopy(start))
    groups = {"replicate": dist.group.WORLD} if divide else None
    steps = []
    for of in (model, other):
        optimizer = optimizer_of(of.module)
        steps.append(mc.compile_step(optimizer, backend="aot_eager", ns="standard", groups=groups))
    step = mc.compile_train_step(model, nn.CrossEntropyLoss(), steps[0], backend="aot_eager")
    for number in range(STEPS):
        batch = batch_of(WORLD * number + rank)
        loss = step(*batch)
        expected = eager_step(other, steps[1].optimizers[0], batch)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert_alike(model.module, other.module, model_of(seed=0))
    moved = dict(model.module.named_parameters())
    for name, param in moved.items():  # copies stay copies
        everyone = [torch.empty_like(param) for _ in range(WORLD)]
        dist.all_gather(everyone, param.detach())
        assert all(torch.equal(everyone[0], one) for one in everyone), name
    (graph,) = step.graphs
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"], step.step.stats.steps


@pytest.mark.parametrize("divide", [True, False], ids=["replicas divide", "replicas repeat"])
def test_it_is_the_eager_loop(ranks: Ranks, divide: bool) -> None:
    for operators, steps in ranks.run(train, divide, timeout=180):
        assert steps == STEPS
        assert sum("all_reduce" in name for name in operators) >= 1


class Fails(nn.Module):
    """A loss that one rank cannot compute, or that leaves out what the others train."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.how == "batch":
            raise ValueError("no such batch")
        return nn.functional.cross_entropy(output.detach() if self.how == "gradients" else output, target)


def one_rank_differs(rank: int, how: str) -> tuple[str, bool, float]:
    """What is said, whether nothing changed, and how the next, sound call goes."""
    model = wrapped(model_of(seed=0))
    optimizer = optimizer_of(model.module)
    loss_fn = Fails(how if rank == 1 else "")
    step = mc.compile_train_step(model, loss_fn, optimizer, backend="aot_eager")
    failing = mock.patch.object(torch._dynamo, "lookup_backend", return_value=_no_backend)
    before = copy.deepcopy(model.module.state_dict())
    with failing if how == "backend" and rank == 1 else contextlib.nullcontext():
        said = raised(lambda: step(*batch_of(rank)))
    same = all(torch.equal(a, b) for a, b in zip(before.values(), model.module.state_dict().values(), strict=True))
    loss_fn.how = ""
    return said, same, float(step(*batch_of(rank)))


def _no_backend(*_: object) -> None:
    raise RuntimeError("no backend today")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("batch", "no such batch"),
        ("backend", "no backend today"),
        ("gradients", "disagree on the step's gradients and buffers"),
    ],
)
def test_one_rank_that_cannot_compile_or_differs_stops_all_of_them(ranks: Ranks, how: str, why: str) -> None:
    for said, same, loss in ranks.run(one_rank_differs, how, timeout=25):  # under gloo's own timeout
        assert why in said
        assert same
        assert loss > 0


def one_rank_prepares_anew(rank: int, how: str) -> Values:
    """Whoever does so is alone with it, and goes on with the others."""
    model = wrapped(model_of(seed=0))
    step = mc.compile_train_step(model, nn.CrossEntropyLoss(), optimizer_of(model.module), backend="aot_eager")
    step(*batch_of(rank))
    if how == "data" and rank == 0:
        weight = next(model.module.parameters())
        weight.data = weight.data.clone()
    with torch.autocast("cpu", enabled=how == "autocast" and rank == 0):
        step(*batch_of(2 + rank))
    return {name: p.detach() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("how", ["data", "autocast"])
def test_one_rank_may_prepare_anew_by_itself(ranks: Ranks, how: str) -> None:
    first, second = ranks.run(one_rank_prepares_anew, how, timeout=60)
    assert all(torch.equal(first[name], second[name]) for name in first)


def sharded(rank: int) -> str:
    model = Model()
    fully_shard(model, mesh=mesh_of((WORLD,)))
    optimizer = optimizer_of(model)
    return raised(lambda: mc.compile_train_step(model, nn.CrossEntropyLoss(), optimizer, backend="aot_eager"))


def test_a_sharded_model_is_refused_in_words(ranks: Ranks) -> None:
    for said in ranks.run(sharded, timeout=60):
        assert "NotImplementedError" in said
        assert "plain or DistributedDataParallel" in said
