"""One training loop on stock, on stock that is wrapped and on our own optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import muon_compile as mc
from tests.graph.twins import EXACT, assert_equal, values

# What a loop leaves behind beside its parameters, to be compared as well.
Loop = Callable[[nn.Module, Optimizer], Sequence[Tensor]]
STEPS = range(5)


def layers() -> nn.Module:
    torch.manual_seed(0)
    sizes = (12, 16, 16, 12)
    linear = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


def batch(seed: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    return (model(batch(seed)) - batch(seed).flip(1)).square().mean()


def optimizer_of(kind: str, params: Any) -> tuple[Optimizer, mc.CompiledStep | None]:
    if kind == "own":
        own = mc.Muon(params, lr=0.05, backend="aot_eager", compile_config=EXACT)
        return own, own.compiled
    optimizer = torch.optim.Muon(params, lr=0.05)
    return optimizer, mc.compile_step(optimizer, backend="aot_eager", config=EXACT) if kind == "wrapped" else None


def state_of(optimizer: Optimizer) -> list[Tensor]:
    return [t for group in optimizer.param_groups for p in group["params"] for t in optimizer.state[p].values()]


def train(forward: Callable[[Tensor], Tensor], optimizer: Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss_of(forward, number).backward()
        optimizer.step()


def compare(loop: Loop, *, make: Callable[[], nn.Module] = layers, compiles: int = 1, recompiles: int = 0) -> None:
    """Run a loop on stock, on stock that is wrapped and on our own optimizer: equal bits, and as many compiles."""
    found: dict[str, list[Tensor]] = {}
    for kind in ("stock", "wrapped", "own"):
        model = make()
        start = values(list(model.parameters()))
        optimizer, step = optimizer_of(kind, model.parameters())
        left = loop(model, optimizer)
        found[kind] = values([*model.parameters(), *left, *state_of(optimizer)])
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
        if step is not None:
            assert (step.stats.compiles, step.stats.recompiles) == (compiles, recompiles), kind
    for kind in ("wrapped", "own"):
        assert_equal(found[kind], found["stock"])
