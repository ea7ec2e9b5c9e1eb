"""Coefficients of the Newton-Schulz iteration, each with its source: tables, and tables computed from their recurrence.

A step maps a singular value x to ``a x + b x^3 + c x^5``. Polar Express and CANS take, step by step, the odd quintic
that is nearest to 1 on the interval ``[low, high]`` that holds the singular values, and follow the interval.
"""

from __future__ import annotations

import math
from functools import cache

from muon_compile.config import JORDAN, YOU, MuonConfig, Triple

# The quintic that is 1 at 1 with two zero derivatives there: what the nearest one tends to as the interval shrinks to
# [1, 1] (Amsel et al., arXiv 2505.16932, section 3). Closer than _POINT to that, exchange loses its digits.
LIMIT: Triple = (15 / 8, -10 / 8, 3 / 8)
_POINT = 5e-6

# What the tables below shrink the argument of a polynomial by, against rounding in bfloat16: a singular value that
# rounding lifts above the interval's end is thrown out further by every next step (arXiv 2505.16932, section 3.4).
_SAFETY = 1.01

# Amsel, Persson, Musco, Gower, "The Polar Express" (arXiv 2505.16932): singular values in [1e-3, 1] (section 4). A
# polynomial's interval starts no lower than _CUSHION of its high end (section 3.4 and the appendix's code). The table
# has seven polynomials, made safe; from the eighth step on it is the limit.
_POLAR_LOW = 1e-3
_CUSHION = 0.02407327424182761
_POLAR_STEPS = 7

# Grishina, Smirnov, Rakhuba, "Accelerating Newton-Schulz iteration for orthogonalization via Chebyshev-type
# polynomials" (arXiv 2506.10935). For Muon it takes delta = 0.3 and four quintics (its appendix has their table).
CANS_DELTA = 0.3
# Where the steps would reach lower than this the interval starts here, as it does in the five-step table of NVIDIA's
# Transformer Engine: below it a bfloat16 matrix of norm 1 holds little but rounding.
_CANS_LOW = 1e-3


def schedule(config: MuonConfig) -> tuple[Triple, ...]:
    """One ``(a, b, c)`` per Newton-Schulz step."""
    steps = config.ns_steps
    given = config.coefficients
    if given == "jordan":
        return (JORDAN,) * steps
    if given == "you":
        return YOU  # MuonConfig takes it with five steps only
    if isinstance(given, str):
        return _table(given, steps)
    assert isinstance(given, tuple)
    if isinstance(given[0], tuple):
        return given
    return (given,) * steps


def polynomial(triple: Triple, x: float) -> float:
    """``a x + b x^3 + c x^5``."""
    a, b, c = triple
    return x * (a + x * x * (b + x * x * c))


def nearest_quintic(low: float, high: float) -> Triple:
    """The odd quintic nearest to 1 on ``[low, high]`` in the maximum norm, by Remez exchange.

    The error alternates at four points: the two ends, and the two extremes q < r between them. ``p(low) = p(r)`` and
    ``p(q) = p(high)`` fix ``a : b : c``, the derivative's zeros are the next q and r.

    Args:
        low: Lower end, positive.
        high: Upper end.

    Source: arXiv 2505.16932, appendix; arXiv 2506.10935, theorem 1.
    """
    ratio = low / high
    if ratio > 1 - _POINT:
        a, b, c = LIMIT
        return a / high, b / high**3, c / high**5
    # On [ratio, 1]. The first q and r are where the extremes lie for a short interval.
    q, r = (3 * ratio + 1) / 4, (ratio + 3) / 4
    for _ in range(50):
        b1, c1 = _divided(ratio, r)
        b2, c2 = _divided(q, 1.0)
        a, b, c = b1 * c2 - b2 * c1, c1 - c2, b2 - b1
        root = math.sqrt(9 * b * b - 20 * a * c)
        # Twice the smaller zero's square is written without a difference of nearly equal numbers.
        inner, outer = math.sqrt(2 * a / (-3 * b + root)), math.sqrt((-3 * b + root) / (10 * c))
        moved = abs(inner - q) + abs(outer - r)
        q, r = inner, outer
        if moved < 1e-15:
            break
    scale = 2 / (polynomial((a, b, c), ratio) + polynomial((a, b, c), 1.0))
    return a * scale / high, b * scale / high**3, c * scale / high**5


def _divided(x: float, y: float) -> tuple[float, float]:
    """``(x^3 - y^3) / (x - y)`` and ``(x^5 - y^5) / (x - y)``."""
    return x * x + x * y + y * y, x**4 + x**3 * y + x * x * y * y + x * y**3 + y**4


def composition(low: float, steps: int, cushion: float = 0.0) -> tuple[tuple[Triple, ...], float]:
    """Nearest quintics, one after the other, for singular values in ``[low, 1]``.

    Args:
        low: Lower end, positive.
        steps: Polynomials.
        cushion: No polynomial's interval starts below this part of its upper end. Such a polynomial is centred on too
            short an interval, so it is scaled until its values at both ends of the whole one lie evenly around 1.

    Returns:
        The polynomials, and the final error: singular values end in ``[1 - error, 1 + error]``.

    Source: arXiv 2505.16932, algorithm 1 and appendix; with no cushion arXiv 2506.10935, algorithm 1.
    """
    rows: list[Triple] = []
    high = 1.0
    for _ in range(steps):
        a, b, c = nearest_quintic(max(low, cushion * high), high)
        scale = 2 / (polynomial((a, b, c), low) + polynomial((a, b, c), high))
        rows.append((a * scale, b * scale, c * scale))
        low = polynomial(rows[-1], low)
        high = 2 - low
    return tuple(rows), 1 - low


def _safe(rows: tuple[Triple, ...]) -> tuple[Triple, ...]:
    return tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in rows)


@cache
def polar_express(steps: int) -> tuple[Triple, ...]:
    """Polar Express, made safe as its authors do."""
    rows, _ = composition(_POLAR_LOW, min(steps, _POLAR_STEPS), _CUSHION)
    return _safe(rows) + (LIMIT,) * (steps - len(rows))


@cache
def cans_interval(steps: int) -> tuple[float, float]:
    """CANS's interval ``[low, 1]``, as low, and the error that its singular values end with.

    Delta-orthogonalization: the lowest end from which ``steps`` polynomials still reach ``[0.7, 1.3]``, so that the
    slope at zero is largest; but not below 1e-3.

    Source: arXiv 2506.10935, section 3.3 and algorithm 2.
    """
    error = composition(_CANS_LOW, steps)[1]
    if error <= CANS_DELTA:
        return _CANS_LOW, error
    low, high = math.log(_CANS_LOW), 0.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if composition(math.exp(middle), steps)[1] > CANS_DELTA:
            low = middle
        else:
            high = middle
    return math.exp(high), composition(math.exp(high), steps)[1]


@cache
def cans(steps: int) -> tuple[Triple, ...]:
    """CANS for singular values in ``[cans_interval(steps)[0], 1]``, made safe in all steps but the last.

    The paper bounds the singular values by 1 and leaves no margin: a value of 1.01 would end at 1e100.
    """
    rows, _ = composition(cans_interval(steps)[0], steps)
    return _safe(rows[:-1]) + rows[-1:]


def _table(name: str, steps: int) -> tuple[Triple, ...]:
    return {"polar_express": polar_express, "cans": cans}[name](steps)


# Dynamo would look behind the caches, warn, and trace the exchange itself; so marked, it calls the function as it is.
# This is all that torch.compiler.assume_constant_result does, after it has imported Dynamo, for seconds.
vars(_table)["_dynamo_marked_constant"] = True
