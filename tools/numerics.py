"""How far each form of the Newton-Schulz iteration is from the exact polynomial, and from the true polar factor.

python tools/numerics.py                              the tables, on the CPU
python tools/numerics.py --quick                      fewer shapes and matrices
python tools/numerics.py --kernel native              the same through this library's CPU kernel
python tools/numerics.py --markdown docs/numerics.md  writes the page

Each error is a mean over matrices with the same spectrum (the worst is in --json) of a direction's relative error in
the Frobenius norm: against the polynomial of the same coefficients in float64, applied to the input before any
rounding; or against the polar factor U V^T of that input, in the directions whose singular value is not zero.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _numerics_page import page

import muon_compile as mc
from muon_compile.build.coefficients import schedule
from muon_compile.build.orthogonalize import orthogonalize

# Singular values of m rows, largest first; None is a matrix of normal entries. "tiny" has entries of 1e-20.
SPECTRA: dict[str, Callable[[int], Tensor] | None] = {
    "gaussian": None,
    **{f"cond 1e{power}": lambda m, power=power: torch.logspace(0, -power, m).double() for power in (0, 1, 2, 3, 5, 8)},
    "clustered": lambda m: torch.cat([torch.ones(m - m // 2), torch.full((m // 2,), 1e-3)]).double(),
    "one large": lambda m: torch.cat([torch.ones(1), torch.full((m - 1,), 1e-2)]).double(),
    "half zero": lambda m: torch.cat([torch.logspace(0, -1, m - m // 2), torch.zeros(m // 2)]).double(),
    "rank one": lambda m: torch.cat([torch.ones(1), torch.zeros(m - 1)]).double(),
    "tiny": None,
    "tiny, clamped": None,
}
COEFFICIENTS = ("jordan", "you", "polar_express", "cans")
SHAPES = ((64, 64), (48, 64), (64, 128), (64, 256), (32, 256), (32, 512), (16, 1024), (16, 6400))
FORMS: dict[str, tuple[str, ...]] = {
    "bfloat16": (
        "standard",
        "gram",
        "gram:2,3",
        "gram_split",
        "gram_split:2,3",
        "gram_split:3,2",
        "gram_half:1,1,1,2",
        "gram_half:1,2,2",
        "gram_half:2,3",
        "gram_half",
    ),
    "float16": ("standard", "gram:2,3", "gram_split:2,3", "gram_half:2,1,2", "gram_half:2,3"),
    "float32": ("standard", "gram", "gram:2,3"),
    "float64": ("standard",),
}
# The native kernel has no float32 products.
NATIVE_FORMS = {
    "bfloat16": tuple(name for name in FORMS["bfloat16"] if not name.startswith("gram:") and name != "gram")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Matrices of one spectrum, with what they should become.

    Args:
        x: ``[B, m, n]`` float32.
        settings: Fields of ``MuonConfig`` that belong to the spectrum.
        left: ``[B, m, r]`` float64, the left singular vectors of nonzero singular values.
        right: ``[B, n, r]``, the right ones.
    """

    x: Tensor
    settings: dict[str, Any]
    left: Tensor
    right: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: relative errors, worst and mean over the matrices of a case."""

    coefficients: str
    rows: int
    cols: int
    spectrum: str
    dtype: str
    form: str
    worst: float
    mean: float
    polar_worst: float
    polar_mean: float


def _basis(count: int, rows: int, cols: int, generator: torch.Generator) -> Tensor:
    q: Tensor = torch.linalg.qr(torch.randn(count, rows, cols, generator=generator, dtype=torch.float64))[0]
    return q


@cache
def make_case(spectrum: str, rows: int, cols: int, count: int, seed: int = 0) -> Case:
    """``count`` random matrices of a spectrum, the same ones for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    values = SPECTRA[spectrum]
    if values is None:
        x = torch.randn(count, rows, cols, generator=generator)
        x = x * 1e-20 if spectrum.startswith("tiny") else x
        rank = min(rows, cols)
    else:
        sigma = values(rows)
        rank = int((sigma > 0).sum())
        basis = _basis(count, rows, rows, generator), _basis(count, cols, rows, generator)
        x = ((basis[0] * sigma) @ basis[1].mT).float()
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    settings = {"eps": "relative"} if spectrum == "tiny" else {}
    return Case(x=x, settings=settings, left=u[..., :rank], right=vh.mT[..., :rank])


def polynomial(x: Tensor, config: mc.MuonConfig) -> Tensor:
    """The schedule's polynomial of each normalized matrix, in float64."""
    x = x.double()
    norm = x.norm(dim=(-2, -1), keepdim=True)
    x = x / (norm if config.eps == "relative" else norm.clamp(min=float(config.eps or 0.0)))
    for a, b, c in schedule(config):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def errors(got: Tensor, expected: Tensor) -> Tensor:
    """Relative error of each matrix, ``[B]``."""
    difference = got.double() - expected
    return difference.norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))


def polar_errors(got: Tensor, case: Case) -> Tensor:
    """Relative distance of each matrix from its polar factor, within the nonzero singular directions: ``[B]``."""
    inside = case.left.mT @ got.double() @ case.right
    return errors(inside, torch.eye(inside.shape[-1], dtype=torch.float64).expand_as(inside))


def measure(
    coefficients: Sequence[str], shapes: Sequence[tuple[int, int]], count: int, forms: dict[str, Any], kernel: str
) -> Iterator[Row]:
    """Every combination, one row each; the float64 polynomial itself counts as the form ``"exact"``."""
    for name in coefficients:
        for rows, cols in shapes:
            for spectrum in SPECTRA:
                case = make_case(spectrum, rows, cols, count)
                base = mc.MuonConfig(coefficients=name, **case.settings)  # type: ignore[arg-type]
                exact = polynomial(case.x, base)
                results = [("float64", "exact", exact)]
                for dtype, names in forms.items():
                    config = mc.MuonConfig(coefficients=name, ns_dtype=dtype, **case.settings)  # type: ignore[arg-type]
                    results += [
                        (dtype, form, orthogonalize(case.x, config, form=form, kernel=kernel)) for form in names
                    ]
                for dtype, form, got in results:
                    error, polar = errors(got, exact), polar_errors(got, case)
                    yield Row(
                        coefficients=name,
                        rows=rows,
                        cols=cols,
                        spectrum=spectrum,
                        dtype=dtype,
                        form=form,
                        worst=float(error.max()),
                        mean=float(error.mean()),
                        polar_worst=float(polar.max()),
                        polar_mean=float(polar.mean()),
                    )


def show(tables: Sequence[tuple[str, list[str], list[list[str]]]]) -> None:
    """Print (title, header, lines) tables."""
    console = Console(width=170)
    for title, header, lines in tables:
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for column in header:
            words = column in ("coefficients", "form")
            table.add_column(column, justify="left" if words else "right", no_wrap=words)
        for line in lines:
            table.add_row(*line)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes, 4 matrices each")
    parser.add_argument("--coefficients", nargs="+", choices=COEFFICIENTS, default=COEFFICIENTS)
    parser.add_argument("--dtypes", nargs="+", choices=list(FORMS), default=["float32"], help="beside bfloat16")
    parser.add_argument("--kernel", choices=["graph", "symmetric", "native"], default="graph")
    parser.add_argument("--count", type=int, default=8, help="matrices of each spectrum and shape (default 8)")
    parser.add_argument("--json", type=Path, help="write every row there")
    parser.add_argument("--markdown", type=Path, help="write the page there")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the matrices are small
    shapes = ((64, 64), (64, 128), (32, 512)) if args.quick else SHAPES
    count = min(args.count, 4) if args.quick else args.count
    dtypes = dict.fromkeys(("bfloat16", *args.dtypes))  # every ratio is to bfloat16
    forms = NATIVE_FORMS if args.kernel == "native" else {dtype: FORMS[dtype] for dtype in dtypes}
    total = len(args.coefficients) * len(shapes) * len(SPECTRA) * (1 + sum(map(len, forms.values())))
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        rows = list(
            progress.track(
                measure(args.coefficients, shapes, count, forms, args.kernel), total, description="measuring"
            )
        )
    document = page(rows, args.kernel, count)
    show(document.tables)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(document.markdown(" ".join(["python tools/numerics.py", *sys.argv[1:]])))


if __name__ == "__main__":
    main()
