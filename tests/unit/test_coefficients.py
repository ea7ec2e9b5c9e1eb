"""Coefficient tables: what their derivations give, what was published, and where they send singular values."""

from __future__ import annotations

import itertools
import math
import time
from typing import Literal

import pytest

import muon_compile as mc
from muon_compile.build.coefficients import (
    CANS_DELTA,
    LIMIT,
    cans,
    cans_interval,
    composition,
    nearest_quintic,
    polar_express,
    polynomial,
    schedule,
)
from muon_compile.config import Triple

# arXiv 2505.16932, algorithm 1: the table, without its safety factor.
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# arXiv 2506.10935, appendix: degree 5, 4 iterations, eps = 0.3. Its search for the interval stopped early.
CANS_OF_FOUR: tuple[Triple, ...] = (
    (8.420293602126344, -24.910491192120688, 18.472094206318726),
    (4.101228661246281, -3.0518555467946813, 0.5741241025302702),
    (3.6809819251109155, -2.75396502307162, 0.5401902781108926),
    (2.7280916801566666, -2.0315492757300913, 0.45866431681858805),
)
# The table named "cans" of NVIDIA's Transformer Engine and Emerging Optimizers.
CANS_OF_FIVE: tuple[Triple, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)


def safe(row: Triple) -> Triple:
    """A polynomial of an argument that is 1 % smaller."""
    return row[0] / 1.01, row[1] / 1.01**3, row[2] / 1.01**5


def grid(low: float, high: float, points: int = 20001) -> list[float]:
    """Evenly spaced on a log scale."""
    return [low * (high / low) ** (i / (points - 1)) for i in range(points)]


def run(rows: tuple[Triple, ...], x: float) -> float:
    for row in rows:
        x = polynomial(row, x)
    return x


@pytest.mark.parametrize("ratio", [1e-9, 1e-3, 0.02, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("high", [1.0, 1.9, 0.01])
def test_the_nearest_quintic_alternates_between_four_extremes(ratio: float, high: float) -> None:
    # Chebyshev: an odd quintic that reaches its greatest error four times in turn, with changing sign, is the best.
    row = nearest_quintic(ratio * high, high)
    difference = [polynomial(row, x) - 1 for x in grid(ratio * high, high)]
    greatest = max(map(abs, difference))
    tolerance = 1e-4 * greatest + 1e-13  # the grid passes the inner extremes at a distance
    touched = [math.copysign(1, d) for d in difference if abs(d) >= greatest - tolerance]
    assert [sign for sign, _ in itertools.groupby(touched)] == [-1, 1, -1, 1]


def test_close_to_a_point_the_nearest_quintic_is_the_limit() -> None:
    row = nearest_quintic(1 - 1e-6, 1.0)
    assert row == LIMIT
    assert nearest_quintic(2 * (1 - 1e-6), 2.0) == pytest.approx((LIMIT[0] / 2, LIMIT[1] / 8, LIMIT[2] / 32), rel=1e-12)
    # The exchange is still right where it is last used.
    assert nearest_quintic(1 - 1e-5, 1.0) == pytest.approx(LIMIT, rel=1e-4)


def test_polar_express_is_the_published_table() -> None:
    rows, _ = composition(1e-3, 8, 0.02407327424182761)
    for index, (row, expected) in enumerate(zip(rows, POLAR_EXPRESS, strict=True)):
        assert row == pytest.approx(expected, rel=1e-6), index
    # Against rounding in bfloat16 the argument shrinks by 1 % in all but the last row of the table, which repeats.
    given = schedule(mc.MuonConfig(coefficients="polar_express", ns_steps=11))
    assert given == (*map(safe, rows[:7]), *(((1.875, -1.25, 0.375),) * 4))
    for steps in range(1, 9):
        assert polar_express(steps) == given[:steps]


@pytest.mark.parametrize(("published", "relative"), [(CANS_OF_FOUR, 2e-3), (CANS_OF_FIVE, 5e-5)], ids=["4", "5"])
def test_cans_is_the_published_table(published: tuple[Triple, ...], relative: float) -> None:
    steps = len(published)
    rows, _ = composition(cans_interval(steps)[0], steps)
    for row, expected in zip(rows, published, strict=True):
        assert row == pytest.approx(expected, rel=relative, abs=5.1e-5)
    assert schedule(mc.MuonConfig(coefficients="cans", ns_steps=steps)) == (*map(safe, rows[:-1]), rows[-1])


@pytest.mark.parametrize("steps", range(1, 9))
def test_cans_maps_its_interval_into_one_give_or_take_its_error(steps: int) -> None:
    low, error = cans_interval(steps)
    rows, _ = composition(low, steps)
    values = [run(rows, x) for x in grid(low, 1.0)]
    assert min(values) >= 1 - error - 1e-9 and max(values) <= 1 + error + 1e-9
    # And the error is reached, so that the interval is as wide as it says.
    assert min(values) == pytest.approx(1 - error, abs=1e-6)
    if steps < 5:
        assert error == pytest.approx(CANS_DELTA, abs=1e-9)
        assert composition(low * 0.999, steps)[1] > CANS_DELTA
    else:
        assert low == 1e-3 and error < CANS_DELTA


@pytest.mark.parametrize("steps", range(2, 9))
def test_the_safety_factor_holds_what_rounding_lifts_above_one(steps: int) -> None:
    low, error = cans_interval(steps)
    plain, _ = composition(low, steps)
    values = [run(cans(steps), x) for x in grid(1.01 * low, 1.01)]
    # A little is lost at the low end, and 1 % above 1 the published polynomials are already far out.
    assert min(values) > 1 - 1.25 * error - 0.005 and max(values) < 1 + error + 1e-3
    assert run(plain, 1.01) > 1 + error + 0.01


@pytest.mark.parametrize(
    ("coefficients", "steps", "low", "high"),
    [
        ("jordan", 5, 0.65, 1.25),
        ("you", 5, 0.7, 1.25),
        ("polar_express", 5, 0.7, 1.25),
        ("polar_express", 8, 0.98, 1.02),
        ("cans", 4, 0.68, 1.3),
        ("cans", 5, 0.86, 1.12),
        ("cans", 8, 0.98, 1.02),
    ],
)
def test_a_table_brings_singular_values_to_about_one(
    coefficients: Literal["jordan", "you", "polar_express", "cans"], steps: int, low: float, high: float
) -> None:
    rows = schedule(mc.MuonConfig(coefficients=coefficients, ns_steps=steps))
    values = [run(rows, x) for x in grid(1e-2, 1.0, 2000)]
    assert low < min(values) < max(values) < high


def test_cans_is_steeper_at_zero_than_polar_express() -> None:
    # What it is for: small singular values grow as fast as a bounded error lets them.
    slopes = {name: math.prod(a for a, _, _ in table(5)) for name, table in (("cans", cans), ("pe", polar_express))}
    assert slopes["cans"] > slopes["pe"]


def test_triples_of_ones_own_are_taken_as_they_are() -> None:
    one, two = (3.0, -4.0, 2.0), (2.0, -1.5, 0.5)
    assert schedule(mc.MuonConfig(coefficients=one, ns_steps=3)) == (one,) * 3
    assert schedule(mc.MuonConfig(coefficients=(one, two), ns_steps=2)) == (one, two)


@pytest.mark.parametrize("name", ["polar_express", "cans"])
@pytest.mark.parametrize("steps", [4, 5, 99])
def test_tables_are_computed_once_and_quickly(name: Literal["polar_express", "cans"], steps: int) -> None:
    config = mc.MuonConfig(coefficients=name, ns_steps=steps)
    seconds = []
    for _ in range(3):
        for cached in (cans, cans_interval, polar_express):
            cached.cache_clear()
        start = time.perf_counter()
        rows = schedule(config)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05
    assert len(rows) == steps and schedule(config) is rows
