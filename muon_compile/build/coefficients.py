"""Newton-Schulz coefficient tables, each with its source."""

from __future__ import annotations

from muon_compile.config import MuonConfig, Triple

# Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024). Every step the same; the singular
# values of the result lie in about [0.68, 1.13].
JORDAN: Triple = (3.4445, -4.7750, 2.0315)

# You Jiacheng, x.com/YouJiacheng/status/1905861218138804534 (2025). Made for exactly five steps.
YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Amsel, Persson, Musco, Gower, "The Polar Express" (arXiv 2505.16932), appendix A, degree 5: the optimal polynomials
# for singular values in [1e-3, 1]. The last row repeats for any further step.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Section 3.4 there: shrink the argument by 1 % in all but the last polynomial, against rounding in bfloat16.
_SAFETY = 1.01


def _polar_express(steps: int) -> tuple[Triple, ...]:
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]]
    rows = [*safe, _POLAR_EXPRESS[-1]]
    return tuple(rows[min(step, len(rows) - 1)] for step in range(steps))


def schedule(config: MuonConfig) -> tuple[Triple, ...]:
    """One ``(a, b, c)`` per Newton-Schulz step."""
    steps = config.ns_steps
    given = config.coefficients
    if given == "jordan":
        return (JORDAN,) * steps
    if given == "you":
        return YOU  # MuonConfig takes it with five steps only
    if given == "polar_express":
        return _polar_express(steps)
    assert isinstance(given, tuple)
    if isinstance(given[0], tuple):
        return given
    return (given,) * steps
