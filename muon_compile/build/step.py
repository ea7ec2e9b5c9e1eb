"""The step of a plan, phase by phase, over stacked tensors; and its pure form over lists of tensors.

Within a wave every bucket goes through a phase before any bucket goes on to the next: gradients and momentum, then
Newton-Schulz, then the update. A backend then fuses a phase's pointwise work across buckets, and (later) one bucket's
communication can overlap another's products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from muon_compile.build.adamw import adamw_update
from muon_compile.build.momentum import direction, exact_direction
from muon_compile.build.orthogonalize import orthogonalize, shape_scale
from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.plan.plan import Bucket, Plan, Wave

Hyper = Sequence[Mapping[str, Tensor]]
BucketState = Mapping[str, Tensor]


class Boundary(Protocol):
    """Where stacked tensors meet lists of parameters. One implementation is pure, one per backend writes in place."""

    def pack(self, bucket: Bucket) -> Tensor:
        """The bucket's gradients as ``[B, *shape]``."""

    def load(self, bucket: Bucket) -> BucketState:
        """The bucket's stacked state."""

    def store(self, bucket: Bucket, name: str, value: Tensor) -> None:
        """Keep a new state tensor, rounded to the state's dtype."""

    def apply(self, bucket: Bucket, update: Tensor, decay: Tensor, step_size: Tensor | None) -> None:
        """``P <- P * decay + update * step_size`` for every parameter of the bucket (``step_size`` None: 1)."""


def run_step(plan: Plan, boundary: Boundary, hyper: Hyper, presence: Sequence[Tensor] | None = None) -> None:
    """Run every wave of the plan against a boundary.

    Args:
        plan: The plan.
        boundary: Gives gradients and state, takes new state and updates.
        hyper: One mapping of 0-d tensors per hyperparameter group.
        presence: ``[B]`` bool per bucket, False where a parameter has no gradient; None: all are there.
    """
    for wave in plan.waves:
        _run_wave(plan, wave, boundary, hyper, presence)


def _run_wave(plan: Plan, wave: Wave, boundary: Boundary, hyper: Hyper, presence: Sequence[Tensor] | None) -> None:
    views: dict[int, Tensor] = {}
    updates: dict[int, Tensor] = {}
    for index in wave.buckets:
        bucket = plan.buckets[index]
        mask = None if presence is None else presence[index]
        grad, state = boundary.pack(bucket), boundary.load(bucket)
        if bucket.algorithm == "muon":
            views[index] = _muon_direction(plan, bucket, boundary, grad, state, hyper, mask)
        else:
            updates[index] = _adamw(bucket, boundary, grad, state, hyper, mask)
    orthogonal = _orthogonalize_wave(plan, wave, views)
    for index in wave.buckets:
        bucket = plan.buckets[index]
        mask = None if presence is None else presence[index]
        decay = 1 - _column(hyper, bucket, "lr") * _column(hyper, bucket, "weight_decay")
        step_size: Tensor | None = None
        update = updates.get(index)
        if bucket.algorithm == "muon":
            update, step_size = _muon_update(bucket, orthogonal.get(index, []), hyper)
        assert update is not None
        if mask is not None:
            decay = torch.where(mask, decay, 1.0)
            step_size = torch.where(mask, 1.0 if step_size is None else step_size, 0.0).to(decay.dtype)
        boundary.apply(bucket, update, decay, step_size)


def _muon_direction(
    plan: Plan,
    bucket: Bucket,
    boundary: Boundary,
    grad: Tensor,
    state: BucketState,
    hyper: Hyper,
    mask: Tensor | None,
) -> Tensor:
    config, view = bucket.config, bucket.view
    assert isinstance(config, MuonConfig) and view is not None
    old = state["momentum_buffer"]
    mu = _column(hyper, bucket, "momentum")
    form = exact_direction if plan.exact else direction
    new, update = form(grad, old, _columns(mu, grad), config, None if mask is None else _columns(mask, grad))
    if config.eps != "relative" and config.ns_dtype != "float16":
        # Rounded before the store, so that a backend reads momentum and gradient once for both.
        update = update.to(getattr(torch, config.ns_dtype))
    boundary.store(bucket, "momentum_buffer", new)
    return update.reshape(bucket.size * view.stacks, view.rows, view.cols)


def _adamw(
    bucket: Bucket,
    boundary: Boundary,
    grad: Tensor,
    state: BucketState,
    hyper: Hyper,
    mask: Tensor | None,
) -> Tensor:
    assert isinstance(bucket.config, AdamWConfig)
    values = {name: _column(hyper, bucket, name) for name in ("lr", "beta1", "beta2")}
    new, update = adamw_update(grad, state, values, bucket.config, mask)
    for name, value in new.items():
        boundary.store(bucket, name, value)
    return update


def _orthogonalize_wave(plan: Plan, wave: Wave, views: Mapping[int, Tensor]) -> dict[int, list[Tensor]]:
    """Newton-Schulz over every batch of the wave; per bucket the blocks of the result, in row order."""
    inputs = []
    for index in wave.batches:
        batch = plan.batches[index]
        parts = [views[p.bucket].narrow(1, p.start, p.rows) for p in batch.pieces]
        inputs.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    outputs: dict[tuple[int, int], Tensor] = {}
    for index, x in zip(wave.batches, inputs, strict=True):
        batch = plan.batches[index]
        result = orthogonalize(x, batch.config, exact=plan.exact)
        counts = [p.num_matrices for p in batch.pieces]
        parts = [result] if len(counts) == 1 else list(result.split(counts))
        for piece, part in zip(batch.pieces, parts, strict=True):
            outputs[piece.bucket, piece.start] = part
    blocks: dict[int, list[Tensor]] = {}
    for bucket_index, start in sorted(outputs):
        blocks.setdefault(bucket_index, []).append(outputs[bucket_index, start])
    return blocks


def _muon_update(bucket: Bucket, blocks: Sequence[Tensor], hyper: Hyper) -> tuple[Tensor, Tensor]:
    """The bucket's update ``[B, *shape]`` and its step size ``-lr * scale``."""
    config, view = bucket.config, bucket.view
    assert isinstance(config, MuonConfig) and view is not None
    lr = _column(hyper, bucket, "lr")
    if not blocks:
        # No elements: nothing was orthogonalized, and there is nothing to move.
        dtype: torch.dtype = getattr(torch, config.ns_dtype)
        return torch.zeros((bucket.size, *bucket.shape), dtype=dtype, device=bucket.device), -lr
    scales = [shape_scale(config, rows, view.cols) for rows in view.blocks]
    if len(set(scales)) == 1:
        whole = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=1)
        return whole.reshape(bucket.size, *bucket.shape), -(lr * scales[0])
    scaled = [block.float() * scale for block, scale in zip(blocks, scales, strict=True)]
    return torch.cat(scaled, dim=1).reshape(bucket.size, *bucket.shape), -lr


def _column(hyper: Hyper, bucket: Bucket, name: str) -> Tensor:
    """A hyperparameter for a bucket: 0-d where one group owns the bucket, else ``[B]``."""
    runs: list[tuple[int, int]] = []
    for group in bucket.groups:
        if runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1] + 1)
        else:
            runs.append((group, 1))
    if len(runs) == 1:
        return hyper[runs[0][0]][name]
    return torch.cat([hyper[group][name].reshape(1).expand(count) for group, count in runs])


def _columns(value: Tensor, like: Tensor) -> Tensor:
    """Shape ``[B]`` so that it broadcasts over ``[B, ...]``; 0-d stays."""
    return value if value.dim() == 0 or like.dim() <= 1 else value.view(-1, *(1,) * (like.dim() - 1))
