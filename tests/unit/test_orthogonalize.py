"""The standard form: against the float64 polynomial, at the edges of the range, in stacks."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz

import muon_compile as mc
from muon_compile.build.coefficients import schedule
from muon_compile.build.orthogonalize import normalize, orthogonalize
from muon_compile.config import DTypeName, EpsMode
from tests.reference import JORDAN, YOU, Triple, gaussian, orthogonal, relative_error

# Relative error of the direction of a Gaussian matrix, five steps. The iteration enlarges what is rounded away about a
# hundredfold, whatever the precision: units of 2^-8, 2^-11, 2^-24 and 2^-53 come back as the second column.
TOLERANCE: dict[DTypeName, float] = {
    "bfloat16": 3e-2,  # 1.1e-2 to 2.1e-2 measured, as torch.optim.Muon's own
    "float16": 5e-3,
    "float32": 1e-5,
    "float64": 1e-13,
}
# Fewer rows than this and single roundings no longer average out in bfloat16.
SHAPES = [(24, 24), (24, 100), (100, 24), (64, 256), (64, 64)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gaussian_matrix(dtype: DTypeName, shape: tuple[int, int]) -> None:
    x = gaussian(2, *shape, seed=1)
    result = orthogonalize(x, mc.MuonConfig(ns_dtype=dtype))
    assert result.dtype == getattr(torch, dtype)
    assert result.shape == x.shape
    for got, matrix in zip(result, x, strict=True):
        assert relative_error(got, orthogonal(matrix)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("coefficients", "triples"), [("jordan", JORDAN), ("you", YOU)])
def test_an_ill_conditioned_matrix_in_float32(
    coefficients: Literal["jordan", "you"], triples: tuple[Triple, ...]
) -> None:
    # Singular values log-spaced over five decades: small ones are enlarged most (by 4.08 * 3.95 * ... = 492), and their
    # rounding errors with them: 1e-6 to 3e-6 measured.
    u, _ = torch.linalg.qr(gaussian(48, 48, seed=1, dtype=torch.float64))
    v, _ = torch.linalg.qr(gaussian(48, 48, seed=2, dtype=torch.float64))
    x = (u * torch.logspace(0, -5, 48, dtype=torch.float64)) @ v
    config = mc.MuonConfig(coefficients=coefficients, ns_dtype="float32")
    got = orthogonalize(x.float()[None], config)[0]
    assert relative_error(got, orthogonal(x.float(), triples)) <= 1e-5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 40),
    count=st.integers(0, 4),
    seed=st.integers(0, 1000),
    eps_mode=st.sampled_from(["clamp", "add"]),
    coefficients=st.sampled_from(["jordan", "you"]),
)
def test_any_shape_and_any_number_of_matrices(
    rows: int, cols: int, count: int, seed: int, eps_mode: EpsMode, coefficients: Literal["jordan", "you"]
) -> None:
    # float32: in bfloat16 a matrix of a few elements errs by 0.1, which would hide a wrong coefficient.
    x = gaussian(count, rows, cols, seed=seed)
    config = mc.MuonConfig(ns_dtype="float32", eps_mode=eps_mode, coefficients=coefficients)
    result = orthogonalize(x, config)
    assert result.shape == x.shape
    triples = {"jordan": JORDAN, "you": YOU}[coefficients]
    for got, matrix in zip(result, x, strict=True):
        expected = orthogonal(matrix, triples, add_eps=eps_mode == "add")
        assert relative_error(got, expected) <= TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_singular_values_come_to_about_one(dtype: DTypeName) -> None:
    # What the iteration is for; a step that skipped it would keep the spread of the input, 0.02 to 0.35 here.
    x = gaussian(1, 64, 256, seed=3)
    assert float(torch.linalg.svdvals(x[0] / x[0].norm()).max()) < 0.4
    values = torch.linalg.svdvals(orthogonalize(x, mc.MuonConfig(ns_dtype=dtype))[0].float())
    assert 0.6 < float(values.min()) < float(values.max()) < 1.25


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("given_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_any_input_dtype_with_any_dtype_of_the_products(dtype: DTypeName, given_dtype: torch.dtype) -> None:
    x = gaussian(2, 32, 48, seed=5, dtype=given_dtype)
    result = orthogonalize(x, mc.MuonConfig(ns_dtype=dtype))
    for got, matrix in zip(result, x, strict=True):
        # float64 products of a narrower input: its norm may still be float32's.
        tolerance = TOLERANCE[dtype] if given_dtype == torch.float64 else max(TOLERANCE[dtype], TOLERANCE["float32"])
        assert relative_error(got, orthogonal(matrix)) <= tolerance


@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_exact_has_the_bits_of_stock(scale: float) -> None:
    # Under 400 multiplications ATen multiplies stacks by another kernel, which rounds otherwise once in 300 matrices.
    different = []
    for rows, cols in itertools.product(range(1, 14), range(1, 20)):
        x = gaussian(12, rows, cols, seed=rows * cols) * scale
        expected = torch.stack([_zeropower_via_newtonschulz(m, JORDAN[0], 5, 1e-7) for m in x])
        if not torch.equal(orthogonalize(x, mc.MuonConfig(), exact=True), expected):
            different.append((rows, cols))
    assert not different


# -- the normalization ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1e-20, 1e-3, 0.5, 1.0, 2.0, 1e3, 1e20])
@pytest.mark.parametrize("eps_mode", ["clamp", "add"])
def test_clamp_and_add_around_eps(ratio: float, eps_mode: EpsMode) -> None:
    eps = 1e-7
    x = gaussian(1, 20, 30, seed=6, dtype=torch.float64)
    x = x / x.norm() * (ratio * eps)
    norm = float(normalize(x, mc.MuonConfig(eps=eps, eps_mode=eps_mode), torch.float64).norm())
    expected = min(ratio, 1.0) if eps_mode == "clamp" else ratio / (ratio + 1)
    assert norm == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-8, 1.0, 1e10, 1e37])
@pytest.mark.parametrize("eps_mode", ["clamp", "add"])
def test_relative_normalization_does_not_see_the_scale(scale: float, eps_mode: EpsMode) -> None:
    # Squares of these leave float32's range on either side; 1e-5 leaves room for denormal entries at 1e-38.
    x = gaussian(1, 20, 30, seed=7)
    config = mc.MuonConfig(eps="relative", eps_mode=eps_mode, ns_dtype="float32")
    result = normalize(x * scale, config, torch.float32)
    assert relative_error(result, normalize(x, config, torch.float32)) <= 1e-5
    assert float(result.norm()) == pytest.approx(1.0, rel=1e-5)
    narrow = orthogonalize((x * scale).bfloat16(), mc.MuonConfig(eps="relative", eps_mode=eps_mode))
    assert relative_error(narrow[0], orthogonal(x[0])) <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"eps_mode": "add"},
        {"eps": "relative"},
        {"eps": "relative", "eps_mode": "add"},
        {"eps": 0.0},
        {"eps": 0.0, "eps_mode": "add"},
        {"preset": "dion"},
    ],
    ids=["clamp", "add", "relative", "relative add", "clamp 0", "add 0", "dion"],
)
def test_a_zero_matrix_stays_zero_and_spoils_no_neighbour(config: dict[str, object], dtype: DTypeName) -> None:
    x = gaussian(3, 24, 40, seed=8)
    x[1] = 0.0
    made = mc.MuonConfig(ns_dtype=dtype, **config)  # type: ignore[arg-type]
    result = orthogonalize(x, made)
    assert torch.equal(result[1], torch.zeros_like(result[1]))
    for index in (0, 2):
        expected = orthogonal(x[index], schedule(made))
        assert relative_error(result[index], expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_float16_is_normalized_before_the_cast(scale: float) -> None:
    # 1e-6 is below float16's normal numbers and 1e5 above its largest; norms and Grams of either are out of range.
    x = gaussian(2, 24, 40, seed=9)
    result = orthogonalize(x * scale, mc.MuonConfig(ns_dtype="float16"))
    for got, matrix in zip(result, x, strict=True):
        assert relative_error(got, orthogonal(matrix)) <= TOLERANCE["float16"]


def test_the_norm_accumulates_in_float32() -> None:
    # 4096 equal entries: a running sum in bfloat16 stops growing at 256 times an entry's square.
    x = torch.full((1, 32, 128), 3.0, dtype=torch.bfloat16)
    norm = float(normalize(x, mc.MuonConfig(), torch.bfloat16).double().norm())
    assert norm == pytest.approx(1.0, rel=2**-8)


def test_every_row_of_a_schedule_is_used_in_order() -> None:
    rows = ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5), (1.5, -0.5, 0.0))
    x = gaussian(1, 24, 40, seed=10)
    got = orthogonalize(x, mc.MuonConfig(coefficients=rows, ns_steps=3, ns_dtype="float32"))
    assert relative_error(got[0], orthogonal(x[0], rows)) <= TOLERANCE["float32"]
    assert relative_error(got[0], orthogonal(x[0], rows[::-1])) > 1e-2
