"""Other libraries' optimizers, compiled, against themselves: 20 steps of both with the same gradients.

Parameters are set to zero before a step, so that what they hold afterwards is the update itself. Each side keeps its
own state through all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import muon_compile as mc
from tests.graph.twins import give, parameters, values
from tests.originals import find, formulas
from tests.reference import relative_error

# Two formulas of one function in float32: five steps enlarge roundings of 6e-8 about a hundredfold.
FLOAT32 = 1e-5
# Two orders of bfloat16 roundings; a step's updates together.
BFLOAT16 = 2e-2
STEPS = 20

MATRICES = ((24, 64), (64, 24), (32, 32), (24, 64))
VECTORS = ((24,), (64,), (5, 7))
CONVOLUTIONS = ((8, 3, 3, 3), (32, 2, 3, 3), (16, 4, 5, 3), (6, 4, 3, 3))

Made = tuple[list[Parameter], Optimizer]
Make = Callable[[], Made]


def named(optimizer: Any) -> Made:
    return [p for group in optimizer.param_groups for p in group["params"]], optimizer


# -- the originals ----------------------------------------------------------------------------------------------------


def keller_single() -> Made:
    import muon

    return named(muon.SingleDeviceMuon(parameters(*MATRICES, (3, 16, 24)), lr=0.02, weight_decay=0.1))


def keller_convolutions() -> Made:
    import muon

    # The release on PyPI cannot add a flattened update to a convolution; its later source reshapes it.
    class Reshaping(muon.SingleDeviceMuon):  # type: ignore[misc, name-defined]
        pass

    return named(Reshaping(parameters(*CONVOLUTIONS), lr=0.02, weight_decay=0.1))


def keller_with_adam() -> Made:
    import muon

    groups = [
        {"params": parameters(*MATRICES), "lr": 0.05, "momentum": 0.9, "weight_decay": 0.05, "use_muon": True},
        {"params": parameters(*VECTORS, seed=1), "lr": 0.03, "betas": (0.8, 0.95), "use_muon": False},
    ]
    return named(muon.SingleDeviceMuonWithAuxAdam(groups))


def moonlight(kind: str, **options: Any) -> Made:
    cls = find.moonlight(kind)
    muon, adamw = parameters(*MATRICES), parameters(*VECTORS, seed=1)
    return named(cls(muon_params=muon, adamw_params=adamw, lr=0.02, wd=0.1, **options))


def dion(kind: str, **options: Any) -> Made:
    cls = find.dion(kind)
    split = {"split_sizes": (16, 8)}, {"num_heads": 4}
    groups = [
        {"params": parameters(*MATRICES, (3, 16, 24))},
        {"params": parameters((24, 40), (24, 40), seed=1), **split[0]},
        {"params": parameters((32, 40), seed=2), **split[1]},
        {"params": parameters((8, 4, 3, 3), seed=3), "flatten": True},
        {"params": parameters(*VECTORS, seed=4), "algorithm": "adamw", "lr": 0.003},
        {"params": parameters(*VECTORS, seed=5), "algorithm": "lion", "lr": 0.004, "weight_decay": 0.2},
    ]
    return named(cls(groups, lr=0.02, weight_decay=0.1, **options))


def hyperparallel(**options: Any) -> Made:
    shapes = (*MATRICES, (3, 16, 24), (16, 1, 9), (2, 3, 8, 12))
    return named(formulas.HyperParallelMuon(parameters(*shapes), lr=0.02, **options))


def hyperparallel_adamw() -> Made:
    return named(formulas.HyperParallelAdamW(parameters(*VECTORS), lr=0.02, weight_decay=0.1))


def heavyball(**options: Any) -> Made:
    module = pytest.importorskip("heavyball")
    shapes = (*MATRICES, (3, 16, 24))
    return named(module.Muon(parameters(*shapes), lr=0.02, weight_decay=0.1, betas=(0.9, 0.99), **options))


ORIGINALS: dict[str, Make] = {
    "keller": keller_single,
    "keller with Adam": keller_with_adam,
    "moonlight": lambda: moonlight("formula"),
    "moonlight, original": lambda: moonlight("original"),
    "moonlight, plain momentum, 3 steps": lambda: moonlight("formula", nesterov=False, ns_steps=3),
    "dion": lambda: dion("formula"),
    "dion, original": lambda: dion("original"),
    "dion, nesterov, rms, other table": lambda: dion(
        "formula", nesterov=True, adjust_lr="rms_norm", use_polar_express=False
    ),
    "dion, original, nesterov, rms, other table": lambda: dion(
        "original", nesterov=True, adjust_lr="rms_norm", use_polar_express=False
    ),
    "dion, unscaled": lambda: dion("formula", adjust_lr=None),
    "hyperparallel": hyperparallel,
    "hyperparallel, legacy, plain momentum": lambda: hyperparallel(ns_variant="legacy", nesterov=False, ns_steps=4),
    "hyperparallel, custom, unscaled": lambda: hyperparallel(
        ns_variant="custom",
        ns_coefficients=[(2.0, -1.5, 0.5)] * 6,
        matched_adamw_rms=0.0,
        zero_rms_scale_mode="use_lr",
    ),
    "hyperparallel, three of five": lambda: hyperparallel(ns_steps=3, matched_adamw_rms=0.3),
    "hyperparallel AdamW": hyperparallel_adamw,
}
# Theirs rounds to bfloat16 at random, so only float64 shows the formula: it keeps it.
HEAVYBALL: dict[str, Make] = {
    "average": heavyball,
    "sum": lambda: heavyball(heavyball_momentum=True),
    "plain sum": lambda: heavyball(heavyball_momentum=True, nesterov=False),
    "warm-up": lambda: heavyball(warmup_steps=7),
}


@pytest.fixture(autouse=True)
def eager_heavyball() -> Iterator[None]:
    """HeavyBall compiles its pieces: not here."""
    try:
        import heavyball.utils
    except ImportError:
        yield
        return
    before, heavyball.utils.compile_mode = heavyball.utils.compile_mode, None
    yield
    heavyball.utils.compile_mode = before


def twins(make: Make, *, ns_dtype: Any = "float32") -> tuple[Made, Made, mc.CompiledStep]:
    """The original, and one of the same kind that is compiled."""
    theirs, ours = make(), make()
    step = mc.compile_step(ours[1], backend="aot_eager", config=mc.CompileConfig(ns_dtype=ns_dtype))
    return theirs, ours, step


def update_of(params: Sequence[Tensor], step: Callable[[], Any]) -> list[Tensor]:
    """What a step adds to parameters that are zero."""
    with torch.no_grad():
        torch._foreach_zero_(list(params))
    step()
    return values(params)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


# -- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORIGINALS)
def test_20_float32_steps_are_those_of_the_original(name: str) -> None:
    (theirs, stock), (mine, ours), step = twins(ORIGINALS[name])
    for number in range(STEPS):
        give(theirs, mine, seed=number)
        for optimizer in (stock, ours):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (number + 1)  # a schedule
        with find.as_float32(True):
            expected = update_of(theirs, stock.step)
        for a, e in zip(update_of(mine, ours.step), expected, strict=True):
            assert relative_error(a, e) <= FLOAT32, (number, tuple(a.shape))
    assert (step.stats.steps, step.stats.compiles, step.stats.recompiles) == (STEPS, 1, 0)
