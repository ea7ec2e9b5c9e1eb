"""A rank's own share of a plan: local shapes, and the Newton-Schulz batches that need no communication."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from muon_compile.config import MuonConfig
from muon_compile.plan.plan import (
    Batch,
    Bucket,
    FormChoice,
    Part,
    Piece,
    Plan,
    Wave,
    find_choice,
    iteration_key,
    resolve_part,
)
from muon_compile.spec import MatrixView, ShardLayout

# Index of this rank along the axis that a layout is cut over.
CoordinateOf = Callable[[ShardLayout], int]


def localize(plan: Plan, coordinate_of: CoordinateOf) -> Plan:
    """The plan as one rank runs it. Names, parts, waves and exchanges stay; shapes, views and batches are its own."""
    if all(bucket.layout is None or bucket.layout.axis is None for bucket in plan.buckets):
        return plan
    buckets = tuple(local_bucket(bucket, coordinate_of) for bucket in plan.buckets)
    batches: list[Batch] = []
    waves: list[Wave] = []
    for wave in plan.waves:
        made = make_batches(buckets, plan.parts, wave.parts, plan.choices, len(batches))
        which = tuple(range(len(batches), len(batches) + len(made)))
        waves.append(replace(wave, batches=which))
        batches += made
    return replace(plan, buckets=buckets, batches=tuple(batches), waves=tuple(waves))


def local_bucket(bucket: Bucket, coordinate_of: CoordinateOf) -> Bucket:
    """The bucket with one rank's shapes; its view is that of the whole matrices there, or of the shard as one block."""
    layout = bucket.layout
    if layout is None or layout.axis is None:
        return bucket
    coordinate = coordinate_of(layout)
    shape, first = layout.local_shape(bucket.shape, coordinate), sum(layout.sizes[:coordinate])
    if bucket.view is None:
        return replace(bucket, shape=shape, first=first)
    return replace(bucket, shape=shape, first=first, view=_local_view(bucket, layout, coordinate))


def needs_exchange(bucket: Bucket) -> bool:
    """Whether some matrix of the bucket lies on more than one rank."""
    layout = bucket.layout
    if bucket.view is None or layout is None or layout.dim is None:
        return False
    return not (cut_between_stacks(bucket, layout) or _cut_between_blocks(bucket, layout))


def is_flat(bucket: Bucket) -> bool:
    """Whether a parameter is read as one flat matrix ``o x (i ...)``."""
    assert isinstance(bucket.config, MuonConfig)
    return len(bucket.shape) > 3 if bucket.config.flatten is None else bucket.config.flatten


def cut_between_stacks(bucket: Bucket, layout: ShardLayout) -> bool:
    """Whether ranks hold different matrices of a stack (experts)."""
    assert layout.dim is not None
    return not is_flat(bucket) and layout.dim < len(bucket.shape) - 2


def all_blocks(bucket: Bucket) -> tuple[int, ...]:
    """Row counts of all matrices of the trailing two dims, heads and blocks, in order."""
    assert bucket.view is not None and isinstance(bucket.config, MuonConfig)
    return bucket.view.blocks * (bucket.config.num_heads or 1)


def _cut_between_blocks(bucket: Bucket, layout: ShardLayout) -> bool:
    row_dim = 0 if is_flat(bucket) else len(bucket.shape) - 2
    if layout.dim != row_dim:
        return False
    ends = {0, *itertools.accumulate(all_blocks(bucket))}
    return all(end in ends for end in itertools.accumulate(layout.sizes))


def _local_view(bucket: Bucket, layout: ShardLayout, coordinate: int) -> MatrixView:
    view = bucket.view
    assert view is not None and isinstance(bucket.config, MuonConfig)
    if cut_between_stacks(bucket, layout):
        assert layout.dim is not None
        length = bucket.shape[layout.dim]
        return replace(view, stacks=view.stacks // max(1, length) * layout.sizes[coordinate])
    shape = layout.local_shape(bucket.shape, coordinate)
    rows, cols = (shape[0], math.prod(shape[1:])) if is_flat(bucket) else shape[-2:]
    units = 1 if is_flat(bucket) else math.prod(shape[:-2])
    if not _cut_between_blocks(bucket, layout):
        return MatrixView(stacks=units, rows=rows, cols=cols, blocks=(rows,))
    start = sum(layout.sizes[:coordinate])
    blocks, position = [], 0
    for block in all_blocks(bucket):
        if start <= position < start + rows:
            blocks.append(block)
        position += block
    return MatrixView(stacks=units, rows=rows, cols=cols, blocks=tuple(blocks))


def make_batches(
    buckets: Sequence[Bucket],
    parts: Sequence[Part],
    wave: Sequence[int],
    choices: Sequence[FormChoice],
    first: int,
) -> list[Batch]:
    """The batches of one wave's parts, those apart that are exchanged; named from ``first`` on."""
    found: dict[tuple[object, ...], list[Piece]] = {}
    for index in wave:
        bucket = resolve_part(buckets, parts[index]).bucket
        if bucket.view is None or parts[index].exchange is not None or math.prod(bucket.shape) == 0:
            continue
        assert isinstance(bucket.config, MuonConfig)
        start = 0
        for rows in bucket.view.blocks:
            piece = Piece(part=index, start=start, rows=rows, num_matrices=bucket.size * bucket.view.stacks)
            key = (rows, bucket.view.cols, bucket.device, iteration_key(bucket.config))
            found.setdefault(key, []).append(piece)
            start += rows
    batches = []
    for number, pieces in enumerate(found.values(), start=first):
        bucket = buckets[parts[pieces[0].part].bucket]
        choice = find_choice(choices, bucket, pieces[0].rows)
        batches.append(
            Batch(
                name=f"ns{number}",
                rows=choice.rows,
                cols=choice.cols,
                device=choice.device,
                config=choice.config,
                pieces=tuple(pieces),
                form=choice.form,
                kernel=choice.kernel,
                reason=choice.reason,
            )
        )
    return batches
