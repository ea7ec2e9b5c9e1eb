"""New values of parameters that are narrower than float32: kept beside float32 masters, or rounded at random.

A decay of 1e-4 per step is less than half of the distance between two bfloat16 numbers, so rounding to the nearest one
takes it back, every time. A master keeps what was lost; a random rounding takes it on average.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.build.mixing import OTHER_PRIME, PRIME, mixed
from muon_compile.plan.plan import Stretch

MASTER, STEPS = "master_weight", "rounding_step"
_LOW_BITS = 0xFFFF


def advance(
    part: Stretch,
    old: Tensor,
    kept: Tensor,
    update: Tensor,
    decay: Tensor,
    step_size: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``P * decay + update * step_size`` in float32, and what becomes of parameters and masters.

    Args:
        part: The part, with this rank's shapes; its bucket's ``rounding`` is ``"master"`` or ``"stochastic"``.
        old: Parameters ``[B, *shape]``, bfloat16 or float16.
        kept: Masters ``[B, *shape]`` float32, which only count where they round to the parameter: one that somebody
            else has written is taken as it is, and so is every one of a state that begins with zeros. Or ``[B]``
            float32, the number of roundings with this one (``counted``).
        update: ``[B, *shape]``.
        decay: 0-d or ``[B]``.
        step_size: 0-d or ``[B]``, 0 where there is no gradient; None: 1.

    Returns:
        Values before the step ``[B, *shape]`` float32, new parameters in their dtype, and new masters if there are any.
    """
    dims = (-1,) + (1,) * (old.dim() - 1)

    def column(value: Tensor) -> Tensor:
        value = value.to(torch.float32)
        return value if value.dim() == 0 else value.view(dims)

    base = old.to(torch.float32)
    if part.bucket.rounding == "master":
        # Compared by their bits: a compiler may leave out a cast to a narrower dtype and back.
        same = kept.to(old.dtype).view(torch.int16) == old.view(torch.int16)
        base = torch.where(same, kept, base)
    delta = update.to(torch.float32)
    new = base * column(decay) + (delta if step_size is None else delta * column(step_size))
    if step_size is not None and step_size.dim() == 1:  # a mask may be in it
        new = torch.where(column(step_size) != 0, new, base)
    if part.bucket.rounding == "master":
        return base, new.to(old.dtype), new
    return base, _round_at_random(new, _dice(part, kept)).to(old.dtype), None


def counted(steps: Tensor, mask: Tensor | None) -> Tensor:
    """Roundings ``[B]`` with this one; a parameter without a gradient (``mask`` ``[B]``, False) is not rounded."""
    return steps + (1.0 if mask is None else mask.to(steps.dtype))


def _round_at_random(x: Tensor, dice: Tensor) -> Tensor:
    """float32 values that bfloat16 holds: the next one further from zero with the probability of what is cut off.

    Args:
        x: float32.
        dice: As many integers from 0 to ``PRIME - 1``, evenly distributed.
    """
    bits = x.view(torch.int32)
    low = bits & _LOW_BITS
    # low / 2^16 is cut off; the half puts the thresholds between the faces, so that 0 never moves.
    up = (dice.to(torch.float32) + 0.5) * ((_LOW_BITS + 1) / PRIME) < low.to(torch.float32)
    cut = (bits - low).view(torch.float32)
    next_one = (bits - low + (_LOW_BITS + 1)).view(torch.float32)
    return torch.where(up & torch.isfinite(x), next_one, cut)


def _dice(part: Stretch, steps: Tensor) -> Tensor:
    """Integers from 0 to ``PRIME - 1`` for every element, the same wherever its shard lies: ``[B, *shape]`` int32.

    By place in the plan (bucket and row), step and position within the whole parameter; plain arithmetic that every
    backend has.
    """
    bucket, layout, first = part.bucket, part.whole.layout, part.whole.first
    shape = bucket.shape or (1,)
    starts = [0] * len(shape)
    if layout is not None and layout.dim is not None:
        starts[layout.dim] = first
    if part.part.stack is not None:
        starts[0] += part.part.stack[0]
    whole = list(shape)
    if layout is not None and layout.dim is not None:
        whole[layout.dim] = sum(layout.sizes)
    device = steps.device

    def along(dim: int) -> Tensor:
        index = torch.arange(shape[dim], dtype=torch.int32, device=device)
        return index + starts[dim]

    rows = torch.zeros((1,), dtype=torch.int32, device=device)
    for dim in range(len(shape) - 1):
        rows = (rows.reshape(-1, 1) * whole[dim] + along(dim)).reshape(-1)
    numbers = torch.arange(bucket.size, dtype=torch.int32, device=device) + part.part.start
    counted = steps.to(torch.int32)
    name = sum(byte * 257**i for i, byte in enumerate(bucket.name.encode()))
    key = mixed(mixed(numbers % PRIME) + name % PRIME)
    key = mixed(mixed(key + counted % PRIME) + counted % OTHER_PRIME)
    # Two parameters whose rows have one key have other columns.
    other = mixed(mixed(numbers % OTHER_PRIME + 1) + name % OTHER_PRIME)
    by_row = mixed(mixed(mixed(rows % PRIME)[None] + key[:, None]) + (rows % OTHER_PRIME)[None])
    columns = along(len(shape) - 1)
    by_column = mixed(mixed(columns % PRIME)[None] + mixed(key + other)[:, None] + (columns % OTHER_PRIME)[None])
    both = by_row[:, :, None] + by_column[:, None, :]
    return mixed(both).reshape(bucket.size, *bucket.shape)
