"""Momentum and direction of a bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.build.opaque import opaque_lerp
from muon_compile.config import MuonConfig


def direction(
    grad: Tensor, momentum: Tensor, mu: Tensor, config: MuonConfig, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Update the momentum and form the direction that will be orthogonalized.

    Args:
        grad: ``[B, ...]``; zero where the mask is False.
        momentum: ``[B, ...]``, in the state's dtype.
        mu: Momentum coefficient, 0-d or broadcastable to ``[B, ...]``, float64.
        config: Its ``momentum_form`` and ``nesterov``.
        mask: Bool, broadcastable likewise; where it is False the momentum keeps its value, by its coefficients, and the
            direction is finite but without meaning.

    Returns:
        New momentum and direction, both in float32 or better; the caller rounds the momentum to the state's dtype.
    """
    wide = torch.promote_types(torch.promote_types(grad.dtype, momentum.dtype), torch.float32)
    g, m, look = grad.to(wide), momentum.to(wide), mu.to(wide)
    if config.momentum_form != "sum":
        add = _where(mask, 1 - mu, 0.0).to(wide)
        m = m + add * (g - m)
        ahead = g + m if config.momentum_form == "ema_added" else g + look * (m - g)
        return m, (ahead if config.nesterov else m)
    m = _where(mask, mu, 1.0).to(wide) * m + g
    return m, (g + look * m if config.nesterov else m)


def exact_direction(
    grad: Tensor, momentum: Tensor, mu: Tensor, config: MuonConfig, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same by ``torch.optim.Muon``'s two ``lerp`` calls, in the gradient's dtype."""
    new = opaque_lerp(momentum, grad, _where(mask, 1 - mu, 0.0))
    return new, (opaque_lerp(grad, new, mu) if config.nesterov else new)


def _where(mask: Tensor | None, value: Tensor, otherwise: float) -> Tensor:
    return value if mask is None else torch.where(mask, value, otherwise)
