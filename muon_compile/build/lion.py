"""Lion of a bucket (Chen et al., arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def lion_update(
    grad: Tensor, state: Mapping[str, Tensor], hyper: Mapping[str, Tensor], mask: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """New moment, and what is added to the parameters (lr included, decay not).

    Args:
        grad: ``[B, ...]``; zero where the mask is False.
        state: ``exp_avg`` ``[B, ...]``.
        hyper: ``lr``, ``beta1``, ``beta2``: 0-d or ``[B]``.
        mask: ``[B]`` bool; where it is False the moment keeps its value, by its coefficient, and the update is zero.

    Returns:
        The new state and the update ``[B, ...]``, in float32 or better. The caller rounds the moment.
    """
    dims = (-1,) + (1,) * (grad.dim() - 1)
    wide = torch.promote_types(torch.promote_types(grad.dtype, state["exp_avg"].dtype), torch.float32)

    def column(value: Tensor) -> Tensor:
        value = (value if mask is None else torch.where(mask, value, 0.0)).to(wide)
        return value if value.dim() == 0 else value.view(dims)

    g, first = grad.to(wide), state["exp_avg"].to(wide)
    sign = torch.sign(first + column(1 - hyper["beta1"]) * (g - first))
    new = first + column(1 - hyper["beta2"]) * (g - first)
    return {"exp_avg": new}, -column(hyper["lr"]) * sign
