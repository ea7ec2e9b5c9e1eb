"""One Muon step and one AdamW step in float64, written from the formulas and not from the package; seeded data.

Everything is one matrix at a time, without batches, casts or compiled code. Sources: torch.optim.Muon and
torch.optim.AdamW (torch 2.13); KellerJordan/Muon; MoonshotAI/Moonlight; microsoft/dion; HyperParallel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Triple = tuple[float, float, float]

# Typed anew on purpose: a slip in the package's tables shows against these.
JORDAN: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),) * 5
YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def scale_original(rows: int, cols: int) -> float:
    """Keller Jordan's factor on lr."""
    return math.sqrt(max(1.0, rows / cols))


def scale_rms(rows: int, cols: int) -> float:
    """Moonlight's factor on lr: the update's RMS is about AdamW's."""
    return 0.2 * math.sqrt(max(rows, cols))


def scale_spectral(rows: int, cols: int) -> float:
    """Dion's factor on lr."""
    return math.sqrt(rows / cols)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The mathematics of one preset."""

    ema: bool
    nesterov: bool
    triples: tuple[Triple, ...]
    add_eps: bool
    scale: Callable[[int, int], float]
    eps: float = 1e-7


RULES: dict[str, Rules] = {
    "torch": Rules(ema=True, nesterov=True, triples=JORDAN, add_eps=False, scale=scale_original),
    "keller": Rules(ema=True, nesterov=True, triples=JORDAN, add_eps=True, scale=scale_original),
    "moonlight": Rules(ema=False, nesterov=True, triples=JORDAN, add_eps=True, scale=scale_rms),
    "dion": Rules(ema=False, nesterov=False, triples=YOU, add_eps=True, scale=scale_spectral),
    "hyperparallel": Rules(ema=False, nesterov=True, triples=YOU, add_eps=True, scale=scale_rms),
}


def orthogonal(u: Tensor, triples: tuple[Triple, ...] = JORDAN, eps: float = 1e-7, *, add_eps: bool = False) -> Tensor:
    """The Newton-Schulz polynomial of one matrix ``[m, n]``, in float64."""
    rows, cols = u.shape
    x = u.double().T if rows > cols else u.double()
    norm = math.sqrt(float((x * x).sum()))
    x = x / (norm + eps if add_eps else max(norm, eps))
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + b * (gram @ x) + c * (gram @ (gram @ x))
    return x.T if rows > cols else x


def momentum_step(grad: Tensor, momentum: Tensor, mu: float, rules: Rules) -> tuple[Tensor, Tensor]:
    """New momentum and the direction that is orthogonalized, in float64."""
    g, m = grad.double(), momentum.double()
    m = mu * m + (1 - mu) * g if rules.ema else mu * m + g
    if not rules.nesterov:
        return m, m
    return m, (1 - mu) * g + mu * m if rules.ema else g + mu * m


def muon_step(
    param: Tensor, grad: Tensor, momentum: Tensor, rules: Rules, hyper: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """New parameter and momentum of one matrix, in float64. ``hyper``: lr, weight_decay, momentum."""
    momentum, u = momentum_step(grad, momentum, hyper["momentum"], rules)
    x = orthogonal(u, rules.triples, rules.eps, add_eps=rules.add_eps)
    lr = hyper["lr"]
    return param.double() * (1 - lr * hyper["weight_decay"]) - lr * rules.scale(*param.shape) * x, momentum


def adamw_step(
    param: Tensor,
    grad: Tensor,
    moments: tuple[Tensor, Tensor],
    step: int,
    hyper: Mapping[str, float],
    eps: float = 1e-8,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """New parameter and moments after step number ``step`` (the first is 1), in float64."""
    beta1, beta2, lr = hyper["beta1"], hyper["beta2"], hyper["lr"]
    g = grad.double()
    first = beta1 * moments[0].double() + (1 - beta1) * g
    second = beta2 * moments[1].double() + (1 - beta2) * g * g
    unbiased = first / (1 - beta1**step)
    root = torch.sqrt(second / (1 - beta2**step))
    return param.double() * (1 - lr * hyper["weight_decay"]) - lr * unbiased / (root + eps), (first, second)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64; 0 where both are zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = float((actual - expected).norm())
    return difference / float(expected.norm()) if difference else 0.0


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal entries; the same ones for the same seed and shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
