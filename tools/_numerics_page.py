"""The tables of ``numerics.py``, for the terminal and for docs/numerics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Forms in the tables of distances from the polar factor, where the polynomial's own distance is most of every row.
_SHORT = ("exact", "standard", "gram:2,3", "gram_split:2,3", "gram_half:1,2,2")

TableText = tuple[str, list[str], list[list[str]]]

INTRO = """# How accurate each form of the iteration is

The Newton-Schulz iteration can run as the standard form or on Gram matrices, whole or with restarts, with its small
matrices in float32 (`gram`), in two bfloat16 halves (`gram_split`) or in the products' dtype (`gram_half`); numbers
after the name are the steps of each segment. All of them compute the same polynomial, and round differently.

Every figure below was printed, on a CPU, by

```bash
{command}
```

An error is the relative error, in the Frobenius norm, of the direction of a matrix, as a mean over {count} matrices
of each shape. The input is float32; the reference is the float64 polynomial of the same coefficients, of that input
before it is normalized or rounded to the products' dtype. "cond 1e5" has singular values evenly spaced on a log scale
down to 1e-5; "clustered" half of them 1 and half 1e-3; "one large" one of 1 and the others 1e-2; "half zero" and
"rank one" have singular values that are zero; "tiny" has entries of 1e-20, normalized with `eps="relative"`, and
"tiny, clamped" the same with the default eps, where the result stays tiny. All have five steps.

What to see:

- Most of the error on ill-conditioned matrices is no form's fault: the input rounded to bfloat16 has other small
  singular values, and the iteration enlarges them several hundredfold. Only float32 products avoid it.
- The polynomial itself is far from the polar factor wherever singular values are small or, with Jordan's coefficients,
  everywhere: the last tables.
- A Gram form whose small matrices have 16 bits or more, and which applies Q as two halves, errs no more than the
  standard form, as long as it restarts. Five steps in one segment need more: with CANS float32 is not enough, and two
  halves are enough with Jordan's coefficients only (with You's and Polar Express it is the CPU kernel, `--kernel
  native`, and the smallest matrices that show it).
- A Gram form whose small matrices are bfloat16 is worse than the standard form with any restart, and without one it
  explodes.
- With float32 products, the Gram form with a restart errs by up to forty times what the standard form does, which is
  still a hundredth of what bfloat16 products do.

`muon_compile/plan/accuracy.py` turns this into the forms that `ns="auto"` may choose from. A test measures again, with
the CPU kernel as well, that none of them is worse than the standard form with bfloat16 products.

CANS is the published recurrence with Polar Express's safety factor of 1.01 in all steps but the last. Without it, a
singular value that rounding lifts above 1 is thrown out further by every step, up to overflow.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The tables, and the page around them."""

    tables: list[TableText]
    matrices: int

    def markdown(self, command: str) -> str:
        """The page, with the command that prints it."""
        parts = [INTRO.format(command=command, count=self.matrices)]
        for title, header, lines in self.tables:
            parts.append(f"## {title}\n")
            rows = [header, ["---" if name in ("coefficients", "form") else "--:" for name in header], *lines]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
        return "\n".join(parts)


def page(rows: Sequence[Any], kernel: str, matrices: int) -> Document:
    """Tables of the rows of ``numerics.measure``."""
    names = _unique(row.coefficients for row in rows)
    what = "distance from the float64 polynomial, mean over shapes"
    tables = [_ratios(rows, kernel)]
    for name in names:
        part = [row for row in rows if row.coefficients == name and row.form != "exact"]
        tables.append(_table(part, f"{name}: {what}", lambda row: row.mean))
    for name in names:
        part = [row for row in rows if row.coefficients == name and row.form in _SHORT]
        tables.append(_table(part, f"{name}: distance from the polar factor, mean over shapes", lambda r: r.polar_mean))
    return Document(tables=tables, matrices=matrices)


def _unique(names: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(names))


def _label(dtype: str, form: str) -> str:
    return form if form == "exact" or dtype == "bfloat16" else f"{form}, {dtype}"


def _ratios(rows: Sequence[Any], kernel: str) -> TableText:
    """Worst ratio, over spectra, of a form's error to the standard form's with bfloat16 products."""
    cell = {(r.coefficients, r.rows, r.cols, r.spectrum, r.dtype, r.form): r.mean for r in rows}
    shapes = _unique((r.rows, r.cols) for r in rows)
    lines = []
    for name, dtype, form in _unique((r.coefficients, r.dtype, r.form) for r in rows):
        if form in ("exact", "standard") or dtype == "float32":
            continue
        worst = []
        for m, n in shapes:
            ratios = [
                value / cell[name, m, n, key[3], "bfloat16", "standard"]
                for key, value in cell.items()
                if key[:3] == (name, m, n) and key[4:] == (dtype, form)
            ]
            worst.append(_ratio(max(ratios)))
        lines.append([name, _label(dtype, form), *worst])
    title = "Error over that of the standard form with bfloat16 products, on the worst spectrum"
    title = title if kernel == "graph" else f"{title}, {kernel} kernel"
    return title, ["coefficients", "form", *[f"{m}x{n}" for m, n in shapes]], lines


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 100 else "> 100"


def _number(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if value < 1e4 else "> 1e4"


def _table(rows: Sequence[Any], title: str, read: Callable[[Any], float]) -> TableText:
    """Forms down, spectra across."""
    spectra = _unique(r.spectrum for r in rows)
    lines = []
    for dtype, form in _unique((r.dtype, r.form) for r in rows):
        line = [_label(dtype, form)]
        for spectrum in spectra:
            values = [read(r) for r in rows if (r.dtype, r.form, r.spectrum) == (dtype, form, spectrum)]
            line.append(_number(sum(values) / len(values)))
        lines.append(line)
    return title, ["form", *spectra], lines
