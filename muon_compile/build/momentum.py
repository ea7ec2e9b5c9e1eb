"""Momentum and direction of a bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.build.opaque import opaque_lerp
from muon_compile.config import MuonConfig


def direction(grad: Tensor, momentum: Tensor, mu: Tensor, config: MuonConfig) -> tuple[Tensor, Tensor]:
    """Update the momentum and form the direction that will be orthogonalized.

    Args:
        grad: ``[B, ...]``.
        momentum: ``[B, ...]``, in the state's dtype.
        mu: Momentum coefficient, 0-d or broadcastable to ``[B, ...]``, float64.
        config: Its ``momentum_form`` and ``nesterov``.

    Returns:
        New momentum and direction, both in float32 or better; the caller rounds the momentum to the state's dtype.
    """
    wide = torch.promote_types(torch.promote_types(grad.dtype, momentum.dtype), torch.float32)
    g, m = grad.to(wide), momentum.to(wide)
    keep, add = mu.to(wide), (1 - mu).to(wide)
    if config.momentum_form == "ema":
        m = m + add * (g - m)
        return m, (g + keep * (m - g) if config.nesterov else m)
    m = keep * m + g
    return m, (g + keep * m if config.nesterov else m)


def exact_direction(grad: Tensor, momentum: Tensor, mu: Tensor, config: MuonConfig) -> tuple[Tensor, Tensor]:
    """The same by ``torch.optim.Muon``'s two ``lerp`` calls, in the gradient's dtype."""
    new = opaque_lerp(momentum, grad, 1 - mu)
    return new, (opaque_lerp(grad, new, mu) if config.nesterov else new)
