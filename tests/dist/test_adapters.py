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
from tests.dist import foreign
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


def keller_loads(rank: int) -> list[float]:
    """Each rank's own checkpoint into a wrapped one; how far off two more steps are, and from rank 0."""
    import muon

    theirs, mine = parameters(*MATRICES), parameters(*MATRICES)
    stock, ours = (muon.Muon(params, lr=0.05, weight_decay=0.1, momentum=0.9) for params in (theirs, mine))
    for number in range(3):
        give(theirs, seed=number)
        with find.as_float32(True):
            stock.step()
    mc.compile_step(ours, backend="aot_eager", config=CONFIG)
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(mine, theirs)
    for number in (3, 4):
        give(theirs, mine, seed=number)
        with find.as_float32(True):
            stock.step()
        ours.step()
    firsts = [p.detach().clone() for p in mine]
    for p in firsts:
        dist.broadcast(p, 0)
    off = [relative_error(a, e) for a, e in zip(mine, theirs, strict=True)]
    return off + [float((a - e).detach().abs().max()) for a, e in zip(mine, firsts, strict=True)]


def test_owners_checkpoints_are_collected_when_they_are_loaded(ranks: Ranks) -> None:
    for off in ranks.run(keller_loads, timeout=120):
        assert max(off) <= FLOAT32


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


# -- a mixture of experts under HyperParallel's optimizers ------------------------------------------------------------

TINY = MoeConfig.named("tiny")
MOE_STEPS = 3


def batch(step: int) -> tuple[Tensor, Tensor]:
    windows = torch.randint(256, (8, TINY.context + 1), generator=torch.Generator().manual_seed(step))
    return windows[:, :-1], windows[:, 1:]


def model_of() -> MoeDecoder:
    torch.manual_seed(0)
    return MoeDecoder(TINY)


def chain_of(groups: list[dict[str, Any]], params: dict[str, Parameter]) -> formulas.ChainedOptimizer:
    """Muon for matrices and AdamW for the rest, by the names that the groups have."""
    chosen = {group["algorithm"]: [params[name] for name, _ in group["params"]] for group in groups}
    # AdamW's first updates are signs of gradients, which rounding can turn where they are nearly 0.
    adamw = formulas.HyperParallelAdamW(chosen["adamw"], lr=TINY.adamw_lr, weight_decay=0.1, eps=1e-3)
    muon = formulas.HyperParallelMuon(chosen["muon"], lr=TINY.lr)
    return formulas.ChainedOptimizer(None, {"adamw": adamw, "muon": muon}, flatten=True)


def alone() -> list[dict[str, Tensor]]:
    """Parameters after every step of the eager formulas in one process."""
    model = model_of()
    chain = chain_of(groups_of(model), dict(model.named_parameters()))
    found = []
    for number in range(MOE_STEPS):
        losses_of(model, *batch(number), TINY.balance)[0].backward()
        with find.as_float32(True):
            chain.step()
        chain.zero_grad()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def together(rank: int, kept: list[dict[str, Tensor]]) -> tuple[list[float], int, int, bool]:
    """The same on a 2 x 2 mesh: its own DTensors over the shards that the model computes with, gradients in
    ``main_grad``, one compiled step for the chain. Largest relative difference of an update, for every step."""
    model, mesh = model_of(), mesh_of((2, 2))
    groups = groups_of(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    other = foreign.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replica", "shard"))
    held: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        where = [foreign.Replicate(), foreign.Shard(param.placements[1].dim)]
        held[name] = foreign.DTensor.from_local(param.to_local().detach(), other, where, shape=tuple(param.shape))
    chain = chain_of(groups, held)
    step = mc.compile_step(chain, backend="aot_eager", ns="standard", config=CONFIG, names=list(held.items()))
    worst = []
    before = {name: p.detach().clone() for name, p in model_of().named_parameters()}
    for number, wanted in enumerate(kept):
        inputs, targets = (part.chunk(4)[rank] for part in batch(number))
        losses_of(model, inputs, targets, TINY.balance)[0].backward()
        for name, param in model.named_parameters():
            assert isinstance(param.grad, DTensor)
            held[name].main_grad, param.grad = param.grad.to_local(), None
        chain.step()
        errors = []
        for name, param in model.named_parameters():
            change = wanted[name] - before[name]
            difference = param.detach().full_tensor() - wanted[name]
            # A weight of 1 rounds by 6e-8, more than that part of its small change.
            off = max(0.0, float(difference.norm() - 6e-8 * wanted[name].norm()))
            errors.append(off / float(change.norm()))
            with torch.no_grad():  # both go on from one place
                local = wanted[name].chunk(2, param.placements[1].dim)[mesh.get_local_rank(1)]
                param.to_local().copy_(local)
        before = wanted
        worst.append(max(errors))
    state = chain.optimizers_dict["muon"].state
    alike = all(type(state[p]["momentum_buffer"]) is foreign.DTensor for p in state)
    return worst, step.stats.collectives, step.stats.recompiles, alike


def test_a_mixture_of_experts_goes_through_hyperparallel(four: Ranks) -> None:
    for worst, collectives, recompiles, alike in four.run(together, alone(), timeout=150):
        assert max(worst) <= FLOAT32, worst
        assert collectives and not recompiles and alike
