"""Cut buckets into parts that fit a bound on temporary memory, and parts into waves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from muon_compile.config import MuonConfig
from muon_compile.plan.localize import is_flat
from muon_compile.plan.plan import Bucket, Part, numel_bytes, resolve_part

# Form and kernel of a block of a bucket's matrices, ``rows x cols``.
KernelOf = Callable[[Bucket, int], tuple[str, str]]


def cut_buckets(buckets: Sequence[Bucket], bound: int, temp_bytes: Callable[[int, Bucket], int]) -> tuple[Part, ...]:
    """Cut every bucket into as few parts as keep each within ``bound`` bytes of temporaries, of even sizes.

    ``temp_bytes`` is given a bucket's index and a stretch of it. A part is at least one parameter, or where a parameter
    is a stack of matrices ``[E, m, n]`` one of those.
    """
    parts: list[Part] = []
    for index, bucket in enumerate(buckets):
        whole = Part(bucket=index, start=0, stop=bucket.size)
        for start, stop in _even(bucket.size, bound, temp_bytes(index, bucket)):
            part = Part(bucket=index, start=start, stop=stop)
            alone = resolve_part(buckets, part).bucket
            if stop - start > 1 or not _is_stack(bucket) or temp_bytes(index, alone) <= bound:
                parts.append(part if (start, stop) != (0, bucket.size) else whole)
                continue
            stacks = _even(bucket.shape[0], bound, temp_bytes(index, alone))
            parts += [Part(bucket=index, start=start, stop=stop, stack=stack) for stack in stacks]
    return tuple(parts)


def fill_waves(sizes: Sequence[int], bound: int) -> list[tuple[int, ...]]:
    """Consecutive parts whose sizes sum to at most ``bound``; a larger one is a wave of its own."""
    waves: list[list[int]] = []
    used = 0
    for index, size in enumerate(sizes):
        if waves and used + size <= bound:
            waves[-1].append(index)
            used += size
        else:
            waves.append([index])
            used = size
    return [tuple(wave) for wave in waves]


def _is_stack(bucket: Bucket) -> bool:
    """Whether the first dim of a parameter counts independent matrices."""
    if bucket.view is None or len(bucket.shape) < 3:
        return False
    # On a mesh the ranks' stacks may differ in length; a part is the same on all of them.
    return bucket.layout is None and not is_flat(bucket)


def _even(count: int, bound: int, total: int) -> list[tuple[int, int]]:
    """Cut ``count`` equal items of ``total`` bytes into runs of at most ``bound`` bytes whose lengths differ by 1."""
    if count == 0 or total <= bound:
        return [(0, count)]
    each = max(1, bound * count // total)
    runs = -(-count // each)
    return [(count * i // runs, count * (i + 1) // runs) for i in range(runs)]


def part_temp_bytes(bucket: Bucket, kernel_of: KernelOf, native: bool) -> int:
    """Bytes that a part's temporaries take at once; ``bucket`` is the part as a bucket of its own.

    Native: the directions, orthogonalized where they lie; with ``eps="relative"`` also their float32 form. On the
    graph: the stacked gradients, the directions, and the iteration's own: X, its successor and the small matrices.
    """
    numel = bucket.size * math.prod(bucket.shape)
    packed = numel_bytes(numel, bucket.grad_dtype) if bucket.size > 1 else 0
    if bucket.view is None:
        rounded = numel_bytes(numel, "float32") if bucket.rounding != "nearest" else 0
        return packed + numel_bytes(numel, "float32") + rounded
    config = bucket.config
    assert isinstance(config, MuonConfig)
    wide = numel_bytes(numel, "float32") if config.eps == "relative" else 0
    own = 0
    for rows in bucket.view.blocks:
        form, kernel = kernel_of(bucket, rows)
        count = bucket.size * bucket.view.stacks
        if kernel != "native":
            own += count * _iteration_bytes(rows, bucket.view.cols, form, config.ns_dtype)
        elif len(bucket.view.blocks) > 1:  # blocks are copied together, and back
            own += 2 * numel_bytes(count * rows * bucket.view.cols, config.ns_dtype)
    directions = numel_bytes(numel, config.ns_dtype)
    return (0 if native else packed) + wide + directions + own


def exchanged_temp_bytes(bucket: Bucket, native: bool) -> int:
    """The same for a part whose matrices are exchanged, but for what is gathered: the directions and their results."""
    numel = bucket.size * math.prod(bucket.shape)
    assert isinstance(bucket.config, MuonConfig)
    packed = numel_bytes(numel, bucket.grad_dtype) if bucket.size > 1 and not native else 0
    return packed + 3 * numel_bytes(numel, bucket.config.ns_dtype)


def _iteration_bytes(rows: int, cols: int, form: str, dtype: str) -> int:
    r, c = sorted((rows, cols))
    if form == "standard":
        return numel_bytes(r * c + 2 * r * r, dtype)
    # X and its successor; R, Z, Q, P and their halves or casts, and X as the Gram's wider operand.
    return numel_bytes(2 * r * c, dtype) + numel_bytes(r * c + 6 * r * r, "float32")
