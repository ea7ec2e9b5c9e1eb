"""Which form of the iteration a batch takes, on which kernel, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from muon_compile.config import MuonConfig
from muon_compile.plan.accuracy import auto_forms
from muon_compile.plan.cost import Cost, Work, predict
from muon_compile.plan.forms import Form, parse_form
from muon_compile.plan.hardware import Hardware

# Predictions err by more than this; within it the standard form's simplicity decides.
NEAR_TIE = 0.03
# The native kernel keeps small matrices in bfloat16, whole or as two halves; it has no float32 products.
_NATIVE_GRAMS = ("none", "split", "half")


class Choice(NamedTuple):
    """A batch's form, its kernel, and the reason in a few words."""

    form: str
    kernel: str
    reason: str


class _Candidate(NamedTuple):
    form: Form
    kernel: str
    cost: Cost


def choose_form(
    dims: tuple[int, int, int], config: MuonConfig, hardware: Hardware, ns: str = "auto", *, exact: bool = False
) -> Choice:
    """Choose a batch's form and kernel: by name, or the ones predicted to be fastest.

    Args:
        dims: ``(B, m, n)``.
        config: Its iteration, with ``ns_dtype`` resolved.
        hardware: The figures of the machine that will run it.
        ns: ``"auto"``: the fastest of the forms that are accurate enough here, ``"standard"`` where it is within
            ``NEAR_TIE`` of that; else the form of that name, on the fastest kernel that has it.
        exact: Stock operators: the standard form on the graph.

    Raises:
        ValueError: No form of that name.
    """
    num, rows, cols = dims
    if exact:
        return Choice("standard", "graph", "exact: stock's operators")
    work = Work(num_matrices=num, rows=rows, cols=cols, dtype=config.ns_dtype)
    if ns != "auto":
        best = _fastest([parse_form(ns, config.ns_steps)], work, hardware)
        return Choice(best.form.name, best.kernel, f"asked for; {best.cost.regime}-bound")
    standard = _fastest([parse_form("standard", config.ns_steps)], work, hardware)
    others = [form for form in auto_forms(rows, cols, config) if form.name != "standard"]
    if not others:
        return Choice("standard", standard.kernel, f"{standard.cost.regime}-bound; no other form is as accurate")
    other = _fastest(others, work, hardware)
    ratio = other.cost.seconds / standard.cost.seconds
    if ratio * (1 + NEAR_TIE) < 1:
        reason = f"{other.cost.regime}-bound; {1 / ratio:.1f}x faster than standard"
        return Choice(other.form.name, other.kernel, reason)
    what = "is no faster" if ratio <= 1 + NEAR_TIE else f"at {ratio:.1f}x the time"
    return Choice("standard", standard.kernel, f"{standard.cost.regime}-bound; next {other.form.name} {what}")


def choose_dtype(rows: int, cols: int, hardware: Hardware) -> Literal["bfloat16", "float32"]:
    """What ``ns_dtype="auto"`` is for an ``m x n`` matrix.

    ``"bfloat16"`` where products of that side are at least as fast as in float32, or nothing is known about one of
    them; else ``"float32"``. Accelerators have bfloat16 units, so only a CPU's figures are asked.
    """
    if hardware.device != "cpu" or not all(hardware.find("graph", dtype) for dtype in ("bfloat16", "float32")):
        return "bfloat16"
    side = min(rows, cols)

    def rate(dtype: str) -> float:
        return max(hardware.rate(kernel, dtype, side) for kernel in available_kernels(dtype, hardware))

    return "bfloat16" if rate("bfloat16") >= rate("float32") else "float32"


def available_kernels(dtype: str, hardware: Hardware) -> tuple[str, ...]:
    """Kernels that a batch with products in ``dtype`` can take, the plainest first."""
    kernels = ["graph"]
    if hardware.symmetric:
        kernels.append("symmetric")
    if hardware.device == "cpu" and hardware.native and dtype == "bfloat16":
        kernels.append("native")
    return tuple(kernels)


def _fastest(forms: Iterable[Form], work: Work, hardware: Hardware) -> _Candidate:
    """The cheapest pair of form and kernel; of equal ones the first, so that the choice is the same everywhere."""
    candidates = [
        _Candidate(form, kernel, predict(work, form, kernel, hardware))
        for form in forms
        for kernel in available_kernels(work.dtype, hardware)
        if kernel != "native" or form.gram in _NATIVE_GRAMS
    ]
    return min(candidates, key=lambda candidate: candidate.cost.seconds)
