"""What the probes ask of a step: sums over each bucket, added up part by part while the step is built.

All of them are plain sums over elements and matrices, so those of parts, and of ranks, add up; the figures that people
read are ratios of them, so what several ranks all count weighs no more for that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muon_compile.plan.plan import Plan

# Sums of squares of the parameters before the step, of what the update adds, of what the decay takes and of the
# momentum after the step; elements that these are of; sum of the matrices' squared errors, and number of matrices.
COLUMNS = ("weight", "update", "decay", "momentum", "elements", "squared_error", "matrices")


class Tally:
    """Sums of one step, noted phase by phase."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._momentum: dict[int, Tensor] = {}
        self._errors: dict[int, list[tuple[Tensor, Tensor | None]]] = {}
        self._rows: dict[int, list[Tensor]] = {}

    def momentum(self, part: int, squares: Tensor) -> None:
        """Note a part's momentum: ``[B]`` sums of squares."""
        self._momentum[part] = squares

    def orthogonal(self, part: int, errors: Tensor, present: Tensor | None) -> None:
        """Note matrices of a part.

        Args:
            part: Index into ``Plan.parts``.
            errors: Squared error of each of them, ``[n]``.
            present: ``[u]`` bool for ``n / u`` matrices each, in order: False for what had no gradient; None: all had.
        """
        if present is not None:
            present = present[:, None].expand(-1, errors.shape[0] // present.shape[0]).reshape(-1)
        self._errors.setdefault(part, []).append((errors, present))

    def update(self, part: int, squares: Tensor, shrink: Tensor, step_size: Tensor | None, mask: Tensor | None) -> None:
        """Note a part's update; it is the last that comes of a part.

        Args:
            part: Index into ``Plan.parts``.
            squares: ``[2, B]``: sums of squares of the parameters, and of the update before ``step_size``.
            shrink: Learning rate times weight decay, 0-d or ``[B]``.
            step_size: 0-d or ``[B]``; None: 1.
            mask: ``[B]`` bool, False where there was no gradient; None: all are there.
        """
        bucket = self._plan.stretch(part).bucket
        weights, updates = squares.to(shrink.dtype).unbind(0)
        updates = updates if step_size is None else updates * (step_size * step_size)
        rows = torch.stack([weights, updates, weights * (shrink * shrink), self._momentum[part].to(shrink.dtype)])
        rows = rows if mask is None else torch.where(mask, rows, 0.0)
        elements = _count(mask, bucket.size, shrink) * math.prod(bucket.shape)
        error, matrices = torch.zeros_like(elements), torch.zeros_like(elements)
        for errors, present in self._errors.pop(part, []):
            errors = errors.to(shrink.dtype)
            error = error + (errors if present is None else torch.where(present, errors, 0.0)).sum()
            matrices = matrices + _count(present, errors.shape[0], shrink)
        row = torch.cat([rows.sum(dim=1), torch.stack([elements, error, matrices])])
        self._rows.setdefault(self._plan.parts[part].bucket, []).append(row)

    def table(self) -> dict[int, Tensor]:
        """``[len(COLUMNS)]`` of every bucket, by its index."""
        found = {}
        for bucket, rows in self._rows.items():
            total = rows[0]
            for row in rows[1:]:
                total = total + row
            found[bucket] = total
        return found


def _count(mask: Tensor | None, size: int, like: Tensor) -> Tensor:
    """How many of ``size`` are there, 0-d of like's dtype."""
    if mask is None:
        return torch.full((), float(size), dtype=like.dtype, device=like.device)
    return mask.to(like.dtype).sum()
