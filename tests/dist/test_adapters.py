"""Other libraries' optimizers on several ranks: state that only owners have, copies, shards, and a whole model."""

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
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

import muon_compile as mc
from tests.dist.models import mesh_of
from tests.dist.ranks import Ranks
from tests.graph.twins import give, parameters
from tests.originals import find, formulas
from tests.reference import relative_error

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from moe.decoder import MoeConfig, MoeDecoder, losses_of
from moe.optimizers import groups_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]
# Two formulas of one function in float32.
FLOAT32 = 1e-5
CONFIG = mc.CompileConfig(ns_dtype="float32")
# Equal in pairs: gloo gathers tensors of one shape alone.
MATRICES = ((24, 64), (24, 64), (64, 24), (64, 24))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


# -- copies whose owners alone have the momentum ----------------------------------------------------------------------


def keller(rank: int, divide: bool, own_steps: int) -> tuple[float, int, int]:
    """Original, compiled, original on two ranks, against the one for a single device throughout."""
    import muon

    mine, theirs = parameters(*MATRICES), parameters(*MATRICES)
    ours = muon.Muon(mine, lr=0.05, weight_decay=0.1, momentum=0.9)
    stock = muon.SingleDeviceMuon(theirs, lr=0.05, weight_decay=0.1, momentum=0.9)
    groups = {"replicate": dist.group.WORLD} if divide else None
    step: mc.CompiledStep | None = None
    worst, owned = 0.0, 0
    for number in range(own_steps + 5):
        if number == own_steps:
            owned = len(ours.state)
            step = mc.compile_step(ours, backend="aot_eager", config=CONFIG, groups=groups)
        if number == own_steps + 3:
            assert step is not None
            step.uninstall()
        give(mine, theirs, seed=number)
        with find.as_float32(True):
            stock.step()
            if not own_steps <= number < own_steps + 3:
                ours.step()
        if own_steps <= number < own_steps + 3:
            ours.step()
        worst = max([worst, *(relative_error(a, e) for a, e in zip(mine, theirs, strict=True))])
    assert step is not None
    return worst, owned, step.stats.collectives


@pytest.mark.parametrize("own_steps", [0, 2])
@pytest.mark.parametrize("divide", [False, True], ids=["repeat", "divide"])
def test_keller_for_several_ranks_is_compiled_in_the_middle(ranks: Ranks, divide: bool, own_steps: int) -> None:
    for worst, owned, collectives in ranks.run(keller, divide, own_steps, timeout=120):
        assert worst <= FLOAT32
        assert owned == (len(MATRICES) // 2 if own_steps else 0), "each rank has half of the momenta before"
        assert (collectives > 0) == divide


class OwnersMuon(formulas.HyperParallelMuon):
    """As HyperParallel's on copies: one rank steps a parameter and sends it; momenta are sent before saving only."""

    sent = 0

    def step_group(self, group: dict[str, Any]) -> None:
        params, rank, world = group["params"], dist.get_rank(), dist.get_world_size()
        group["params"] = [p for index, p in enumerate(params) if index % world == rank]
        super().step_group(group)
        group["params"] = params
        for index, p in enumerate(params):
            dist.broadcast(p.detach(), index % world)

    def _broadcast_state_fused_for_ckpt(self) -> None:
        self.sent += 1
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                buffer = self.state[p].setdefault("momentum_buffer", torch.full_like(p, torch.nan))
                dist.broadcast(buffer, index % dist.get_world_size())


OwnersMuon.__qualname__ = OwnersMuon.__name__ = "Muon"
OwnersMuon.__module__ = formulas.HyperParallelMuon.__module__


def owners(rank: int, own_steps: int) -> tuple[float, int]:
    mine, theirs = parameters(*MATRICES), parameters(*MATRICES)
    ours, stock = OwnersMuon(mine, lr=0.05), formulas.HyperParallelMuon(theirs, lr=0.05)
    worst = 0.0
    for number in range(own_steps + 3):
        if number == own_steps:
            mc.compile_step(ours, backend="aot_eager", config=CONFIG, groups={"replicate": dist.group.WORLD})
        give(mine, theirs, seed=number)
        with find.as_float32(True):
            stock.step()
            if number < own_steps:
                ours.step()
        if number >= own_steps:
            ours.step()
        worst = max([worst, *(relative_error(a, e) for a, e in zip(mine, theirs, strict=True))])
    sent = ours.sent
    ours._broadcast_state_fused_for_ckpt()  # as before saving: everybody has everything already
    for p, q in zip(mine, theirs, strict=True):
        worst = max(worst, relative_error(ours.state[p]["momentum_buffer"], stock.state[q]["momentum_buffer"]))
    return worst, sent


@pytest.mark.parametrize("own_steps", [0, 2])
def test_owners_send_their_momenta_before_the_step_takes_over(ranks: Ranks, own_steps: int) -> None:
    for worst, sent in ranks.run(owners, own_steps, timeout=120):
        assert worst <= FLOAT32 and sent == (own_steps > 0)
