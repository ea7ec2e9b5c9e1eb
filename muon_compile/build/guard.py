"""What a step does to all gradients before it begins: clip their norm, or do nothing where one is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muon_compile.build.collectives import all_reduce, wait
from muon_compile.plan.exchange import Place
from muon_compile.plan.plan import NormSum, Plan, Stretch

# torch.nn.utils.clip_grad_norm_'s.
_CLIP_EPS = 1e-6


class Guard(NamedTuple):
    """What becomes of every gradient.

    Args:
        scale: 0-d factor; None: 1.
        finite: 0-d bool, False where the step is skipped; None: it never is.
    """

    scale: Tensor | None
    finite: Tensor | None

    def of(self, grad: Tensor) -> Tensor:
        """The gradient that the step takes, in float32 or wider where it is scaled; zero where the step is skipped."""
        if self.finite is not None:
            grad = torch.where(self.finite, grad, 0.0)
        if self.scale is not None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            grad = grad.to(wide) * self.scale.to(wide)
        return grad


def look_at_gradients(
    plan: Plan, squares: Callable[[Stretch], Tensor], presence: Sequence[Tensor] | None, places: Mapping[int, Place]
) -> tuple[Guard, list[Tensor] | None]:
    """Form the norm of all gradients, over all shards, and decide together whether the step is taken.

    Args:
        plan: The plan, as this rank runs it.
        squares: Sum of the squares of this rank's gradients of a part, 0-d; zeros where there is none.
        presence: ``[B]`` bool per bucket.
        places: Where this rank stands, for every part of a bucket that lies on a mesh.

    Returns:
        What becomes of the gradients; and presence, all False where the step is skipped.
    """
    own: dict[int, Tensor] = {}
    for part in (plan.stretch(index) for index in range(len(plan.parts))):
        bucket, here = part.part.bucket, squares(part).to(torch.float32)
        own[bucket] = own[bucket] + here if bucket in own else here
    bad = None
    if plan.skip_nonfinite:
        bad = torch.where(torch.isfinite(_sum(list(own.values()))), 0.0, 1.0)
    total = [own[i] for i, bucket in enumerate(plan.buckets) if bucket.layout is None or bucket.layout.axis is None]
    for one in plan.norm_sums():
        numbers = [_sum([own[i] for i in one.buckets])] if one.sharded else []
        numbers += [] if bad is None else [bad]
        summed = wait(all_reduce(torch.stack(numbers), _group(plan, one, places))).unbind(0)
        if one.sharded:
            total.append(summed[0])
        bad = None if bad is None else summed[-1]
    finite = None if bad is None else bad == 0.0
    scale = None
    if plan.clip_grad_norm is not None:
        norm = _sum(total).sqrt()
        scale = torch.clamp(plan.clip_grad_norm / (norm + _CLIP_EPS), max=1.0)
    if finite is not None:
        scale = None if scale is None else torch.where(finite, scale, 1.0)  # zero times NaN is none
        everything = [finite.reshape(1).expand(bucket.size) for bucket in plan.buckets]
        presence = everything if presence is None else [mask & finite for mask in presence]
    return Guard(scale, finite), None if presence is None else list(presence)


def _sum(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum()


def _group(plan: Plan, one: NormSum, places: Mapping[int, Place]) -> str:
    for index, place in places.items():
        layout = plan.buckets[plan.parts[index].bucket].layout
        if layout is None or layout.mesh != one.mesh:
            continue
        if (layout.axis if one.sharded else layout.replica_axis) == one.axis:
            return place.shard_group if one.sharded else place.replica_group
    raise AssertionError(f"no part lies on {one.axis}")
