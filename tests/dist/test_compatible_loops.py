"""Training loops over ranks, with real gradients: as one process on the whole batch, and as stock under DDP.

Every test is a row of docs/compatibility.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

import muon_compile as mc
from tests.dist.models import FLOAT32, assert_same, mesh_of, momenta_of, params_of
from tests.dist.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

WORLD = 2
STEPS = range(4)
# The whole batch's gradient and the mean of its halves' are sums in another order, and Newton-Schulz in float32 makes
# the most of what is small in them.
BAR = 5e-5
# Stock multiplies in bfloat16, and rounds elsewhere when matrices run as a batch.
STOCK_BAR = 3e-2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


class Layers(nn.Module):
    """Matrices, one of uneven rows on two ranks, and a vector that goes to AdamW."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (12, 16, 13, 12)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))
        self.scale = nn.Parameter(torch.ones(12))
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            called = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            x = torch.tanh(called)
        return x * self.scale


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Of this rank's part of the batch; of all of it in a process of its own."""
    whole = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed))
    part = whole.chunk(WORLD)[dist.get_rank()] if dist.is_initialized() else whole
    loss: Tensor = (model(part) - part.flip(1)).square().mean()
    return loss


def groups_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]


def own(model: nn.Module) -> mc.Muon:
    matrices, rest = groups_of(model)
    return mc.Muon(
        [{"params": matrices}, {"params": rest, "algorithm": "adamw"}],
        lr=0.05,
        adamw_lr=0.05,
        config=FLOAT32,
        backend="aot_eager",
    )


def sharded() -> Layers:
    model = Layers()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_of((WORLD,)))
    return fully_shard(model, mesh=mesh_of((WORLD,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How far parameters went, whole tensors by name, what else the loop made, and compiles and recompiles."""

    changes: dict[str, Tensor]
    left: list[Tensor]
    compiles: tuple[int, int]


Loop = Callable[[Layers, Optimizer], Sequence[Tensor]]


def played(rank: int, loop: Loop) -> Outcome:
    """A loop with the compiled optimizer, sharded where there are ranks."""
    model = sharded() if dist.is_initialized() else Layers()
    optimizer = own(model)
    before = params_of(model)
    left = [t.full_tensor() if isinstance(t, DTensor) else t for t in loop(model, optimizer)]
    stats = optimizer.compiled.stats
    return Outcome(
        changes={name: last - before[name] for name, last in params_of(model).items()},
        left=[t.detach() for t in left],
        compiles=(stats.compiles, stats.recompiles),
    )


def compare(ranks: Ranks, loop: Loop, *, compiles: tuple[int, int] = (1, 0)) -> None:
    """The sharded loop is the single process's."""
    alone = played(0, loop)
    for outcome in ranks.run(played, loop, timeout=90):
        assert outcome.compiles == compiles
        pairs = [(outcome.changes[name], expected) for name, expected in alone.changes.items()]
        for actual, expected in [*pairs, *zip(outcome.left, alone.left, strict=True)]:
            assert expected.norm() > 0
            assert (actual - expected).norm() <= BAR * expected.norm()


def train(model: Layers, optimizer: Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def accumulate(model: Layers, optimizer: Optimizer) -> Sequence[Tensor]:
    for number in STEPS:
        for micro in range(3):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == 2)
            (loss_of(model, 10 * number + micro) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ()


def test_accumulation_without_gradient_sync(ranks: Ranks) -> None:
    compare(ranks, accumulate)


def clip(model: Layers, optimizer: Optimizer) -> Sequence[Tensor]:
    norms = []
    for number in STEPS:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    return norms


def test_clipping_sharded_gradients(ranks: Ranks) -> None:
    compare(ranks, clip)


def scale(model: Layers, optimizer: Optimizer) -> Sequence[Tensor]:
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for number in STEPS:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number)).backward()
        if number == 2 and (not dist.is_initialized() or dist.get_rank() == 1):
            grad = model.layers[1].weight.grad
            assert isinstance(grad, Tensor)
            (grad._local_tensor if isinstance(grad, DTensor) else grad).view(-1)[3] = math.inf  # on one rank alone
        before = [params_of(model), momenta_of(model, optimizer)]
        scaler.step(optimizer)
        scaler.update()
        after = [params_of(model), momenta_of(model, optimizer)]
        for old, new in zip(before, after, strict=True):
            if number == 2:
                assert_same(new, old)
            else:
                assert not any(torch.equal(new[name], old[name]) for name in old)
        scales.append(torch.tensor(scaler.get_scale()))
    return scales


def test_grad_scaler_over_shards(ranks: Ranks) -> None:
    compare(ranks, scale)


def recompute(model: Layers, optimizer: Optimizer) -> Sequence[Tensor]:
    model.recomputes = True
    train(model, optimizer, STEPS)
    return ()


def test_activation_checkpointing_over_shards(ranks: Ranks) -> None:
    compare(ranks, recompute)


def freeze(model: Layers, optimizer: Optimizer) -> Sequence[Tensor]:
    param = model.layers[0].weight
    assert isinstance(param, nn.Parameter)
    for number in range(6):
        param.requires_grad_(number not in (2, 3))
        before = params_of(model)["layers.0.weight"]
        train(model, optimizer, range(number, number + 1))
        assert torch.equal(params_of(model)["layers.0.weight"], before) is (number in (2, 3))
    return ()


def test_frozen_shards(ranks: Ranks) -> None:
    # Over ranks one graph serves all patterns of gradients; alone it is two.
    compare(ranks, freeze)


def average(model: Layers, optimizer: Optimizer) -> Sequence[Tensor]:
    copied = sharded() if dist.is_initialized() else Layers()
    mean = [p.detach() for p in copied.parameters()]
    for number in STEPS:
        train(model, optimizer, range(number, number + 1))
        torch._foreach_lerp_(mean, [p.detach() for p in model.parameters()], 0.1)
    return mean


def test_ema_of_shards(ranks: Ranks) -> None:
    compare(ranks, average)


def schedule(model: Layers, optimizer: Optimizer) -> Sequence[Tensor]:
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    for number in STEPS:
        train(model, optimizer, range(number, number + 1))
        scheduler.step()
    return [torch.tensor(group["lr"]) for group in optimizer.param_groups]


def test_lr_schedulers_over_shards(ranks: Ranks) -> None:
    compare(ranks, schedule)


# -- stock, and DDP ---------------------------------------------------------------------------------------------------


def with_stock(rank: int, compiled: bool) -> Outcome:
    """Accumulation with ``torch.optim.Muon``, wrapped or not, on the matrices alone."""
    model = sharded() if dist.is_initialized() else Layers()
    matrices, _ = groups_of(model)
    optimizer = torch.optim.Muon(matrices, lr=0.05)
    step = mc.compile_step(optimizer, backend="aot_eager", ns="standard") if compiled else None
    before = params_of(model)
    accumulate(model, optimizer)
    stats = (0, 0) if step is None else (step.stats.compiles, step.stats.recompiles)
    changes = {name: last - before[name] for name, last in params_of(model).items() if name != "scale"}
    return Outcome(changes=changes, left=[], compiles=stats)


def test_wrapped_stock_over_shards_is_stock_alone(ranks: Ranks) -> None:
    alone = with_stock(0, False)
    for outcome in ranks.run(with_stock, True):
        assert outcome.compiles == (1, 0)
        for name, expected in alone.changes.items():
            assert (outcome.changes[name] - expected).norm() <= STOCK_BAR * expected.norm()


def replicated(rank: int, compiled: bool) -> Outcome:
    """Accumulation under DDP; the matrices alone are trained, so that nothing but Newton-Schulz rounds."""
    inner = Layers()
    inner.scale.requires_grad_(False)
    model = DistributedDataParallel(inner)
    matrices, _ = groups_of(inner)
    optimizer = torch.optim.Muon(matrices, lr=0.05)
    step = None
    if compiled:
        groups = {"replicate": dist.group.WORLD}
        step = mc.compile_step(
            optimizer, backend="aot_eager", groups=groups, config=mc.CompileConfig(exact=True, replicas="divide")
        )
    before = params_of(inner)
    for number in STEPS:
        with model.no_sync():
            for micro in range(2):
                (loss_of(model, 10 * number + micro) / 3).backward()
        (loss_of(model, 10 * number + 2) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(
        changes={name: last - before[name] for name, last in params_of(inner).items() if name != "scale"},
        left=[],
        compiles=(0, 0) if step is None else (step.stats.compiles, step.stats.recompiles),
    )


def test_ddp_without_sync_is_stock_bit_for_bit(ranks: Ranks) -> None:
    stock = ranks.run(replicated, False)
    for outcome, expected in zip(ranks.run(replicated, True), stock, strict=True):
        assert_same(outcome.changes, expected.changes)
        assert outcome.compiles == (1, 0)
