"""Newton-Schulz orthogonalization of a stack of matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muon_compile.build.coefficients import schedule
from muon_compile.build.opaque import matrix_amax, matrix_norm, opaque_newton_schulz, opaque_normalize
from muon_compile.config import MuonConfig

# Below this a Frobenius norm of float32 entries has lost its digits to underflow (squares under 1e-38).
_TINY = 1e-30


def shape_scale(config: MuonConfig, rows: int, cols: int) -> float:
    """Factor on lr for a ``rows x cols`` matrix (``semantics``: scale(m, n))."""
    if config.scale == "original":
        return math.sqrt(max(1.0, rows / cols))
    if config.scale in ("match_rms_adamw", "rms_norm"):
        return 0.2 * math.sqrt(max(rows, cols))
    if config.scale == "spectral_norm":
        return math.sqrt(rows / cols)
    return 1.0


def normalize(x: Tensor, config: MuonConfig, dtype: torch.dtype) -> Tensor:
    """Divide each matrix by its Frobenius norm, accumulated in float32 or better, and cast.

    Args:
        x: ``[B, m, n]``, any floating dtype.
        config: Its ``eps`` and ``eps_mode``.
        dtype: dtype of the result.

    Returns:
        ``[B, m, n]`` of ``dtype``, each matrix of norm at most 1; an all-zero matrix stays zero.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if config.eps == "relative":
        largest = matrix_amax(x).to(wide)
        x = x.to(wide) / torch.where(largest > 0, largest, 1.0)
    # Round once, here: both passes below then read the narrow tensor, and the norm is of what the products see. float16
    # has too little range for that.
    x = x if dtype == torch.float16 else x.to(dtype)
    norm = matrix_norm(x)
    if config.eps == "relative":
        norm = norm.clamp(min=_TINY)
    else:
        assert isinstance(config.eps, float)
        norm = norm.clamp(min=config.eps) if config.eps_mode == "clamp" else norm + config.eps
        if config.eps == 0.0:
            norm = torch.where(norm > 0, norm, 1.0)
    result: Tensor = (x / norm).to(dtype)
    return result


def newton_schulz(x: Tensor, config: MuonConfig) -> Tensor:
    """Iterate ``A = X X^T; X <- a X + (b A + c A A) X`` over the schedule.

    Args:
        x: ``[B, m, n]`` with m <= n, normalized, in the products' dtype.
        config: Its ``coefficients`` and ``ns_steps``.

    Returns:
        ``[B, m, n]`` of the same dtype.
    """
    for a, b, c in schedule(config):
        gram = torch.bmm(x, x.mT)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x


def orthogonalize(update: Tensor, config: MuonConfig, *, exact: bool = False) -> Tensor:
    """Orthogonalize each matrix of a stack.

    Args:
        update: ``[B, m, n]``, any floating dtype.
        config: The group's mathematics.
        exact: Take ``torch.optim.Muon``'s own operators and roundings.

    Returns:
        ``[B, m, n]`` of the products' dtype.
    """
    dtype: torch.dtype = getattr(torch, config.ns_dtype)
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    if exact:
        assert isinstance(config.eps, float)
        x = opaque_newton_schulz(opaque_normalize(x.to(dtype), config.eps), schedule(config))
    else:
        x = newton_schulz(normalize(x, config, dtype), config)
    return x.mT if tall else x
