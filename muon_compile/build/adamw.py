"""AdamW of a bucket (``torch.optim.AdamW``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from muon_compile.config import AdamWConfig


def adamw_update(
    grad: Tensor,
    state: Mapping[str, Tensor],
    hyper: Mapping[str, Tensor],
    config: AdamWConfig,
    mask: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """New moments, and what is added to the parameters (lr included, decay not).

    Args:
        grad: ``[B, ...]``; zero where the mask is False.
        state: ``exp_avg`` and ``exp_avg_sq`` ``[B, ...]``, ``step`` ``[B]`` (steps done), with amsgrad also
            ``max_exp_avg_sq``.
        hyper: ``lr``, ``beta1``, ``beta2``: 0-d or ``[B]``, float64; float32 on devices that have no float64.
        config: The mathematics.
        mask: ``[B]`` bool; where it is False the state keeps its value, by its coefficients, and the update is zero
            (``shared_steps`` counts all the same).

    Returns:
        The new state and the update ``[B, ...]``, in float32 or better. The caller rounds the moments.
    """
    dims = (-1,) + (1,) * (grad.dim() - 1)
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    step = state["step"] + (1 if mask is None or config.shared_steps else mask.to(state["step"].dtype))
    wide = torch.promote_types(torch.promote_types(grad.dtype, state["exp_avg"].dtype), torch.float32)

    def column(value: Tensor, absent: float) -> Tensor:
        value = value if mask is None else torch.where(mask, value, absent)
        value = value.to(wide)
        return value if value.dim() == 0 else value.view(dims)

    g = grad.to(wide)
    g = -g if config.maximize else g
    first = state["exp_avg"].to(wide)
    first = first + column(1 - beta1, 0.0) * (g - first)
    second = column(beta2, 1.0) * state["exp_avg_sq"].to(wide) + column(1 - beta2, 0.0) * (g * g)
    new = {"exp_avg": first, "exp_avg_sq": second, "step": step}
    if config.amsgrad:
        second = torch.maximum(state["max_exp_avg_sq"].to(wide), second)
        new["max_exp_avg_sq"] = second
    # Bias corrections depend on each parameter's own step count: [B], in the hyperparameters' precision.
    count = step.to(beta1.dtype)
    size = hyper["lr"] / _complement(beta1, count)
    root = _complement(beta2, count).sqrt()
    if config.corrected_eps:
        update = -column(size * root, 0.0) * (first / (second.sqrt() + config.eps))
    else:
        update = -column(size, 0.0) * (first / (second.sqrt() / column(root, 1.0) + config.eps))
    return new, update


def _complement(beta: Tensor, count: Tensor) -> Tensor:
    """``1 - beta ** count``, also in float32, where the plain difference loses four digits of beta2's first steps."""
    if beta.dtype == torch.float64:
        return 1 - beta**count
    return -torch.expm1(count * torch.log(beta))
