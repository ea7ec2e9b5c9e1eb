"""Forms of the Newton-Schulz iteration: which products, in which space and precision.

The iteration is a polynomial in ``R = X X^T``. A *segment* of ``s`` steps runs on the small matrix alone and is then
applied to ``X`` once: ``X <- Q X``. The standard iteration is one step per segment; the Gram iteration is one segment
of all steps; a restart cuts it in two, so that what rounding did to ``R`` is forgotten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

GramPrecision = Literal["none", "float32", "split", "half"]
Kernel = Literal["graph", "symmetric", "native"]

# What ``ns=`` takes, beside "auto" and names with segments of their own ("gram_split:2,3").
FORM_NAMES = (
    "standard",
    "gram",
    "gram_restart",
    "gram_split",
    "gram_split_restart",
    "gram_half",
    "gram_half_restart",
)
_RESTART_AFTER = 2
_PRECISIONS: dict[str, GramPrecision] = {"gram": "float32", "gram_split": "split", "gram_half": "half"}


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the iteration.

    Args:
        gram: Precision of the small matrices R, Z, Q and P within a segment. ``"float32"``; ``"split"``: two bfloat16
            halves, high and low, 16 bits of mantissa, three products for one; ``"half"``: the products' own dtype;
            ``"none"``: the standard iteration, whose segments are single steps in the products' dtype.
        segments: Steps of each segment; they sum to the schedule's steps.
    """

    gram: GramPrecision
    segments: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Steps of the schedule."""
        return sum(self.segments)

    @property
    def name(self) -> str:
        """The form's name, readable by ``parse_form``: ``"standard"``, ``"gram"``, ``"gram_split:2,3"``."""
        if self.gram == "none":
            return "standard"
        base = "gram" if self.gram == "float32" else f"gram_{self.gram}"
        return base if len(self.segments) == 1 else f"{base}:{','.join(map(str, self.segments))}"

    def flops(self, rows: int, cols: int, *, symmetric: bool = False, narrow: bool = True) -> int:
        """Floating point operations for one ``rows x cols`` matrix, all products that run counted.

        Args:
            rows: m.
            cols: n.
            symmetric: A product known to be symmetric is computed in one triangle only.
            narrow: X has half precision: a split product is then three, and a Q of more precision than X is applied as
                two halves.
        """
        small, large = self.products()
        r, c = sorted((rows, cols))
        half = 2 if symmetric else 1
        weight = 3 if self.gram == "split" and narrow else 1
        large *= 2 if self.gram in ("float32", "split") and narrow else 1
        gram = len(self.segments) * 2 * r * r * c // half
        inner = small * weight * 2 * r**3 // half
        apply = large * 2 * r * r * c
        return gram + inner + apply

    def products(self) -> tuple[int, int]:
        """Number of ``m x m x m`` products and of ``m x m x n`` applications, the Grams ``X X^T`` apart.

        A segment of s steps needs s squares, s - 1 updates of Q and 2 (s - 1) of R.
        """
        return sum(4 * s - 3 for s in self.segments), len(self.segments)


def parse_form(name: str, steps: int) -> Form:
    """Read a form's name.

    Args:
        name: One of ``FORM_NAMES``, or one with its segments: ``"gram_split:2,3"``.
        steps: Steps of the schedule.

    Raises:
        ValueError: Unknown name, or segments that do not sum to ``steps``.
    """
    match = re.fullmatch(r"(standard|gram(?:_(?:split|half))?)(_restart)?(?::(\d+(?:,\d+)*))?", name)
    base = match[1] if match else ""
    if match is None or (base == "standard" and (match[2] or match[3])) or (match[2] and match[3]):
        raise ValueError(
            f"ns: expected 'auto', one of {', '.join(map(repr, FORM_NAMES))}, or a Gram form with its segments such as "
            f"'gram_split:2,3', got {name!r}."
        )
    if base == "standard":
        return Form("none", (1,) * steps)
    gram = _PRECISIONS[base]
    if match[3]:
        segments = tuple(int(s) for s in match[3].split(","))
        if sum(segments) != steps or 0 in segments:
            raise ValueError(f"ns: expected segments of at least 1 that sum to ns_steps={steps}, got {name!r}.")
        return Form(gram, segments)
    if match[2] and steps > _RESTART_AFTER:
        return Form(gram, (_RESTART_AFTER, steps - _RESTART_AFTER))
    return Form(gram, (steps,))
