"""Which forms of the iteration are accurate enough for ``ns="auto"``: a rule, from what docs/numerics.md measures.

Accurate enough means: no worse than the standard form with bfloat16 products, on every kind of matrix of that page.
With float32 products no Gram form is as accurate as the standard one, and who asks for them asks for accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

from muon_compile.config import MuonConfig
from muon_compile.plan.forms import Form, GramPrecision, parse_form

_NAMED = ("jordan", "you", "polar_express", "cans")
_NARROW = ("bfloat16", "float16")
# What rounding does to R grows by the square of what a segment's steps enlarge small singular values by. So long and
# steep schedules restart; CANS, which fails in one segment of five steps even in float32, is the steepest of them.
_RESTARTED = ((3,), (2, 2), (2, 3), (3, 2), (3, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Forms that are accurate enough, and where.

    Args:
        ns_dtypes: dtypes of the products.
        coefficients: Named tables.
        gram: Precision of the small matrices.
        segments: Each a form; it applies where the schedule has as many steps.
        min_aspect: Least long side over short side.
    """

    ns_dtypes: tuple[str, ...]
    coefficients: tuple[str, ...]
    gram: GramPrecision
    segments: tuple[tuple[int, ...], ...]
    min_aspect: float = 1.0


RULES = (
    Rule(ns_dtypes=_NARROW, coefficients=("jordan", "you", "polar_express"), gram="float32", segments=((4,), (5,))),
    Rule(ns_dtypes=_NARROW, coefficients=("jordan",), gram="split", segments=((4,), (5,))),
    Rule(ns_dtypes=_NARROW, coefficients=("polar_express",), gram="split", segments=((4,),)),
    Rule(ns_dtypes=_NARROW, coefficients=_NAMED, gram="float32", segments=_RESTARTED),
    Rule(ns_dtypes=_NARROW, coefficients=_NAMED, gram="split", segments=_RESTARTED),
    # float16 has three more bits than bfloat16: enough for R, Z, Q and P, with restarts. (In bfloat16 such a form errs
    # by 1.2 to 30 times as much as the standard one.)
    Rule(ns_dtypes=("float16",), coefficients=_NAMED, gram="half", segments=((2, 1, 2),)),
    Rule(ns_dtypes=("float16",), coefficients=_NAMED[:3], gram="half", segments=((2, 3),), min_aspect=2.0),
)


def auto_forms(rows: int, cols: int, config: MuonConfig) -> tuple[Form, ...]:
    """Forms that ``ns="auto"`` may choose from for an ``m x n`` matrix, the standard one first.

    Custom coefficients, and numbers of steps that were not measured, have the standard form only.

    Args:
        rows: m.
        cols: n.
        config: Its iteration, with ``ns_dtype`` resolved.
    """
    assert config.ns_dtype != "auto"
    aspect = max(rows, cols) / max(1, min(rows, cols))
    forms = [parse_form("standard", config.ns_steps)]
    for rule in RULES:
        if config.ns_dtype in rule.ns_dtypes and config.coefficients in rule.coefficients and aspect >= rule.min_aspect:
            forms += [Form(rule.gram, segments) for segments in rule.segments if sum(segments) == config.ns_steps]
    return tuple(forms)
