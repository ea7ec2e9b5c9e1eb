"""Which matrices are so small that ``eps``, and no longer their norm, is what Newton-Schulz divides by.

Such a matrix gets less than its step; gradients clipped to very little do that, and nothing else tells.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from muon_compile.config import MuonConfig
from muon_compile.plan.plan import Plan


class Vanishing:
    """Counts them over one step, bucket by bucket. What is all zero or has no gradient does not count."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._watched = plan, plan.watched_norms()
        self._counts: dict[int, list[Tensor]] = {}

    def norms(self, part: int, norms: Tensor, present: Tensor | None) -> None:
        """Note the norms ``[n, 1, 1]`` of some of a part's matrices.

        ``present`` is False for what had no gradient: ``[u]`` for ``n / u`` matrices each, in order; None: all had.
        """
        bucket = self._plan.parts[part].bucket
        if bucket not in self._watched:
            return
        config = self._plan.buckets[bucket].config
        assert isinstance(config, MuonConfig) and isinstance(config.eps, float)
        norms = norms.to(torch.promote_types(norms.dtype, torch.float32))
        norms = norms.reshape(-1)
        small = (norms > 0.0) & (norms < config.eps)
        if present is not None:
            small = small & present[:, None].expand(-1, norms.shape[0] // max(1, present.shape[0])).reshape(-1)
        self._counts.setdefault(bucket, []).append(torch.where(small, 1.0, 0.0).sum())

    def table(self) -> Mapping[int, Tensor]:
        """Number of them, 0-d, by index of the bucket; without those that this rank orthogonalizes nothing of."""
        return {
            bucket: counts[0] if len(counts) == 1 else torch.stack(counts).sum()
            for bucket, counts in self._counts.items()
        }
