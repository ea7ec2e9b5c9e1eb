"""Says, once for each bucket, that matrices have become so small that Newton-Schulz no longer sees their norm."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from muon_compile.plan.plan import Plan


class VanishingWatch:
    """Looks at what the graph counts, without ever waiting for the device.

    Where that is the host, counts are read after every step; elsewhere a copy follows the step on its stream, and is
    read when it has come. It stops looking once there is nothing left to tell.

    Args:
        plan: Its ``watched_norms`` are the buckets.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._buckets = plan, plan.watched_norms()
        device = plan.buckets[self._buckets[0]].device
        self.counts: Tensor = torch.zeros(len(self._buckets), dtype=torch.int32, device=device)
        # Names of the buckets that have been told of.
        self.told: set[str] = set()
        self._copy: Tensor | None = None
        self._arrived: torch.Event | None = None

    def look(self) -> None:
        """Warn of buckets that are new among those counted."""
        if len(self.told) < len(self._buckets):
            counts = self._arrived_counts()
            if counts is not None and bool(counts.any()):
                self._tell(counts.tolist())

    def _arrived_counts(self) -> Tensor | None:
        """Counts of some step that is done; None where none has come yet."""
        if self.counts.device.type == "cpu":
            return self.counts
        if self._arrived is not None and not self._arrived.query():
            return None
        arrived = None if self._arrived is None or self._copy is None else self._copy.clone()
        if self._copy is None:
            self._copy = torch.zeros_like(self.counts, device="cpu", pin_memory=True)
        self._copy.copy_(self.counts, non_blocking=True)
        self._arrived = torch.Event(self.counts.device.type)
        self._arrived.record()
        return arrived

    def _tell(self, counts: list[int]) -> None:
        new = [i for i, count in zip(self._buckets, counts, strict=True) if count]
        named = [bucket for i in new if (bucket := self._plan.buckets[i]).name not in self.told]
        self.told.update(bucket.name for bucket in named)
        if not named:
            return
        params = [self._plan.specs[i].name for i in named[0].params]
        which = ", ".join(map(repr, params[:3])) + (" and others" if len(params) > 3 else "")
        also = f" and in {[bucket.name for bucket in named[1:]]}" if named[1:] else ""
        config = named[0].config
        message = (
            f"The momentum of a matrix in {named[0].name!r} (of {which}){also} has a norm under eps "
            f"({getattr(config, 'eps', 0.0):g}), so it gets less than its step; expected norms well above eps. "
            f"Use MuonConfig(eps='relative'), which has no floor; or where clipping did it, raise clip_grad_norm "
            f"({self._plan.clip_grad_norm:g})."
        )
        warnings.warn(message, stacklevel=2)
