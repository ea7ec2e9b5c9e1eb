"""Equal parameters for a stock optimizer and a compiled one, and equal gradients for both."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import muon_compile as mc

# Bit-equal to torch.optim.Muon on aot_eager, so nothing hides behind a tolerance.
EXACT = mc.CompileConfig(exact=True)

# Muon shapes of the tests: two parameters share a bucket, one is alone; wide and tall.
SHAPES = ((8, 12), (8, 12), (16, 8))


def parameters(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Standard normal parameters; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give(*twins: Sequence[Parameter], seed: int, missing: Collection[int] = (), scale: float = 1.0) -> None:
    """Set the same new gradients on each list of parameters; None at the indices in ``missing``."""
    for params in twins:
        generator = torch.Generator().manual_seed(1000 + seed)
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator) * scale
            wanted = getattr(param, "grad_dtype", None) or param.dtype
            param.grad = None if index in missing else grad.to(wanted)


def wrap(optimizer: Optimizer, *more: Optimizer, install: bool = True) -> mc.CompiledStep:
    """Compile in exact mode, on the backend that needs no compiler."""
    return mc.compile_step(optimizer, *more, backend="aot_eager", install=install, config=EXACT)


def values(params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors, to compare with later."""
    return [p.detach().clone() for p in params]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor], *, atol: float = 0.0) -> None:
    """Lists of tensors are equal, bit for bit unless ``atol`` says otherwise."""
    assert len(actual) == len(expected)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(a.detach(), e.detach(), rtol=0.0, atol=atol, msg=lambda m, i=index: f"[{i}] {m}")


def momenta(optimizer: Optimizer) -> list[Tensor]:
    """Copies of every parameter's momentum, in the order of the groups."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return values([optimizer.state[p]["momentum_buffer"] for p in params])


def pair(*shapes: tuple[int, ...], lr: float = 0.1) -> tuple[list[Parameter], Optimizer, list[Parameter], Optimizer]:
    """Parameters and optimizer to wrap, and the stock reference."""
    ours, theirs = parameters(*(shapes or SHAPES)), parameters(*(shapes or SHAPES))
    return ours, torch.optim.Muon(ours, lr=lr), theirs, torch.optim.Muon(theirs, lr=lr)


def run_both(
    ours: list[Parameter], optimizer: Optimizer, theirs: list[Parameter], stock: Optimizer, seeds: range
) -> None:
    """Some steps with equal gradients, equal after each."""
    for seed in seeds:
        give(ours, theirs, seed=seed)
        optimizer.step()
        stock.step()
        assert_equal(ours, theirs)
        assert_equal(momenta(optimizer), momenta(stock))
