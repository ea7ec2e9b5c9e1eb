"""A training step in one graph under DistributedDataParallel: gradients, buffers and update as in the eager loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator

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


def sharded(rank: int) -> str:
    model = Model()
    fully_shard(model, mesh=mesh_of((WORLD,)))
    optimizer = optimizer_of(model)
    return raised(lambda: mc.compile_train_step(model, nn.CrossEntropyLoss(), optimizer, backend="aot_eager"))


def test_a_sharded_model_is_refused_in_words(ranks: Ranks) -> None:
    for said in ranks.run(sharded, timeout=60):
        assert "NotImplementedError" in said
        assert "plain or DistributedDataParallel" in said
