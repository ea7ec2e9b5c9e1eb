"""One step of a mixture of experts from the same snapshots on 1 rank, FSDP, HSDP and DDP: the same update."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import muon_compile as mc
from tests.dist.models import mesh_of
from tests.dist.ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from moe.decoder import MoeConfig, MoeDecoder, losses_of
from moe.optimizers import groups_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]
TINY = MoeConfig.named("tiny")
WORLD, SNAPSHOTS = 4, 3
# Float32 gradients, summed in another order, and Newton-Schulz in float32 of them.
BAR = 1e-5
Values = dict[str, Tensor]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def batch(step: int) -> tuple[Tensor, Tensor]:
    windows = torch.randint(256, (8, TINY.context + 1), generator=torch.Generator().manual_seed(step))
    return windows[:, :-1], windows[:, 1:]


def new_model() -> MoeDecoder:
    torch.manual_seed(0)
    return MoeDecoder(TINY)


def optimizer_of(model: torch.nn.Module) -> mc.Muon:
    config = mc.MuonConfig(ns_dtype="float32")
    rates = {"lr": TINY.lr, "weight_decay": 0.1, "adamw_lr": TINY.adamw_lr, "adamw_weight_decay": 0.1}
    # AdamW's first updates are signs of gradients, which rounding can turn where they are nearly 0.
    return mc.Muon(
        groups_of(model),
        **rates,
        config=config,
        adamw_config=mc.AdamWConfig(eps=1e-3),
        backend="aot_eager",
    )


def train(model: torch.nn.Module, optimizer: mc.Muon, step: int, rank: int = 0, world: int = 1) -> None:
    inputs, targets = (part.chunk(world)[rank] for part in batch(step))
    losses_of(model, inputs, targets, TINY.balance)[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshots() -> list[tuple[Values, list[Values], Values]]:
    """Along a run in one process: parameters, state by parameter, and how the next step changes the parameters."""
    model = new_model()
    optimizer = optimizer_of(model)
    mc.compile_step(optimizer, backend="aot_eager", ns="standard")
    found = []
    for number in range(SNAPSHOTS):
        for extra in range(2):
            train(model, optimizer, 10 * number + extra)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        state = [copy.deepcopy(dict(optimizer.state[p])) for p in model.parameters()]
        train(model, optimizer, 10 * number + 2)
        found.append((before, state, {name: p.detach() - before[name] for name, p in model.named_parameters()}))
    return found


def like(value: Tensor, param: Tensor) -> Tensor:
    if isinstance(param, DTensor) and value.shape == param.shape:
        return distribute_tensor(value, param.device_mesh, param.placements)
    return value


def one_step(rank: int, layout: str, strategy: str, kept: list[Any]) -> list[float]:
    """Largest relative difference of an update, for every snapshot."""
    model: torch.nn.Module = new_model()
    groups = None
    if layout == "ddp":
        model, groups = DistributedDataParallel(model), {"replicate": dist.group.WORLD}
    else:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh_of((4,) if layout == "fsdp" else (2, 2)))
        fully_shard(model, mesh=mesh_of((4,) if layout == "fsdp" else (2, 2)))
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = optimizer_of(inner)
    step = mc.compile_step(optimizer, backend="aot_eager", ns="standard", strategy=strategy, groups=groups)
    worst = []
    for number, (before, state, changes) in enumerate(kept):
        with torch.no_grad():
            for (name, param), values in zip(inner.named_parameters(), state, strict=True):
                param.copy_(like(before[name], param))
                for key, value in values.items():
                    optimizer.state[param][key].copy_(like(value, param) if value.dim() else value)
        train(model, optimizer, 10 * number + 2, rank, WORLD)
        errors = []
        for name, param in inner.named_parameters():
            whole = param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()
            errors.append(float((whole - before[name] - changes[name]).norm() / changes[name].norm()))
        worst.append(max(errors))
    assert step.stats.recompiles == 0
    return worst


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [("fsdp", "auto"), ("fsdp", "gather_scatter"), ("hsdp", "auto"), ("hsdp", "all_gather"), ("ddp", "auto")],
)
def test_an_update_is_that_of_one_process(ranks: Ranks, layout: str, strategy: str) -> None:
    kept = snapshots()
    for worst in ranks.run(one_step, layout, strategy, kept, timeout=120):
        assert max(worst) <= BAR, worst
