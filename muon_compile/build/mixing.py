"""Numbers without a pattern, by int32 arithmetic that every backend has: no shifts, no overflow, no generator."""

from __future__ import annotations

from torch import Tensor

# The largest prime whose square fits int32; cubes modulo it are a permutation, for it is 2 modulo 3.
PRIME = 46_337
# Another one: what numbers are modulo both tells any two apart, up to 2.1e9.
OTHER_PRIME = 46_327
# Of no meaning: without them small numbers stay small.
_FACTOR, _OFFSET = 20_011, 7_919


def mixed(x: Tensor) -> Tensor:
    """A permutation of 0 to ``PRIME - 1``, of what ``x``, int32 of any shape and not negative, is modulo that."""
    x = (x % PRIME * _FACTOR + _OFFSET) % PRIME
    return x * x % PRIME * x % PRIME
