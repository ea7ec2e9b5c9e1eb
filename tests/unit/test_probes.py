"""The probes' operators: sums of squares in the kernels' passes, and the estimate of orthogonality."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import muon_compile.lower.boundary  # noqa: F401  (its operators)
from muon_compile.build.gram import gram_polynomial
from muon_compile.build.orthogonalize import orthogonalize
from muon_compile.build.probe_ops import gram_squared_error, row_squares, signs, squared_error
from muon_compile.config import MuonConfig
from muon_compile.kernels import cpu

needs_kernels = pytest.mark.skipif(cpu.why_not() is not None, reason=f"no CPU kernels: {cpu.why_not()}")
FLOAT32 = MuonConfig(ns_dtype="float32")
SHAPES = [(3, 24, 100), (2, 100, 24), (2, 1, 1), (2, 5, 3), (1, 33, 33), (1, 130, 700), (1, 1031, 70), (2, 7, 9001)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_the_same_signs(x: Tensor) -> Tensor:
    x = (x if x.shape[-2] <= x.shape[-1] else x.mT).double()
    v = signs(x.shape[-2], x.device).double()
    return (x @ (x.mT @ v)[..., None] - v[:, None]).square().sum(dim=(1, 2)) / v.numel()


def exact(x: Tensor) -> Tensor:
    x = (x if x.shape[-2] <= x.shape[-1] else x.mT).double()
    return (x @ x.mT - torch.eye(x.shape[-2])).square().sum(dim=(1, 2)) / x.shape[-2]


def test_signs_are_balanced_and_follow_no_short_pattern() -> None:
    v = signs(46_000, torch.device("cpu")).double()
    assert set(v.tolist()) == {1.0, -1.0}
    for lag in (0, *range(1, 65)):
        mean = float((v if lag == 0 else v[lag:] * v[:-lag]).mean())
        assert abs(mean) <= 4 / math.sqrt(v.numel()), lag
    assert abs(float((v[1:33] * v[:32]).mean())) <= 0.75  # small matrices have the first ones only
    assert torch.equal(signs(17, torch.device("cpu")), v[:17].float())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_estimate_by_the_same_signs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (gaussian(*shape) / math.sqrt(max(shape[1:]))).to(dtype)
    torch.testing.assert_close(squared_error(x, native=False).double(), by_the_same_signs(x), rtol=1e-4, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("shape", [*SHAPES, (40, 64, 64), (0, 8, 8)])
def test_the_estimate_by_the_kernel(shape: tuple[int, ...], threads: int) -> None:
    x = (gaussian(*shape) / math.sqrt(max(shape[1:]))).to(torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = squared_error(x, native=True)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.double(), by_the_same_signs(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 64, 256), (40, 256, 64), (20, 96, 96)])
def test_the_estimate_is_of_the_orthogonality_error(shape: tuple[int, ...]) -> None:
    """Of many matrices the mean is within a few percent; of one the root is within about 1 / sqrt(r)."""
    x = orthogonalize(gaussian(*shape), FLOAT32)
    found, wanted = squared_error(x, native=False).double(), exact(x)
    assert float(found.mean()) == pytest.approx(float(wanted.mean()), rel=0.08)
    spread = float((found.sqrt() / wanted.sqrt() - 1).square().mean().sqrt())
    assert spread <= 1.5 / math.sqrt(min(shape[1:]))
    # Jordan's coefficients leave singular values between about 0.7 and 1.2.
    assert 0.15 <= float(wanted.mean().sqrt()) <= 0.4


def test_what_is_orthogonal_has_no_error() -> None:
    q = torch.linalg.qr(gaussian(2, 40, 12).double()).Q
    assert float(squared_error(q, native=False).max()) <= 1e-28
    assert float(squared_error(2 * q, native=False).min()) == pytest.approx(9.0)


def test_the_same_from_the_gram_matrix_alone() -> None:
    x = gaussian(3, 60, 12)
    r = x.mT @ x
    q = gram_polynomial(r, FLOAT32)
    torch.testing.assert_close(gram_squared_error(r, q), squared_error(x @ q, native=False), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 40, 70), (3,), (2, 0, 4), (2, 3_000_000)])
def test_squares(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = gaussian(*shape).to(dtype)
    wanted = x.double().square().reshape(shape[0], -1).sum(dim=1)
    wide = torch.promote_types(dtype, torch.float32)
    for found in (row_squares(x), torch.ops.muon_compile.list_squares(list(x.unbind(0)))):
        assert found.dtype == wide
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0.0)


@needs_kernels
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.bfloat16, torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("numel", [1, 37, 8192, 40_000])
def test_the_passes_sum_squares_and_change_nothing_else(numel: int, dtypes: tuple[torch.dtype, ...]) -> None:
    count, (g, m, o) = 3, dtypes
    grads, params = list(gaussian(count, numel).to(g)), [list(gaussian(count, numel, seed=2).to(g)) for _ in range(2)]
    states = [gaussian(count, numel, seed=1).to(m) for _ in range(2)]
    outs = [torch.empty(count, numel, dtype=o) for _ in range(2)]
    present, mu = torch.tensor([True, False, True]), torch.tensor([0.9, 0.5, 0.8])
    squares = torch.zeros(count, dtype=torch.float64)
    for state, out, sums in zip(states, outs, (None, squares), strict=True):
        cpu.momentum(grads, state, out, mu, present, ema=True, nesterov=True, squares=sums)
    assert torch.equal(*states) and torch.equal(*outs)
    wanted = states[0].double().square().sum(dim=1) * present
    torch.testing.assert_close(squares, wanted, rtol=1e-5, atol=0.0)
    # The second parameter stays: no gradient, or no learning rate.
    decay, size = torch.tensor([0.9, 1.0, 0.8]), torch.tensor([-0.1, 0.0, 0.2])
    before, both = torch.stack(params[0]).double(), torch.zeros(2, count, dtype=torch.float64)
    for listed, sums in zip(params, (None, both), strict=True):
        cpu.update(listed, outs[0], decay, size, sums)
    assert all(torch.equal(a, b) for a, b in zip(*params, strict=True)) and torch.equal(
        params[1][1].double(), before[1]
    )
    torch.testing.assert_close(both[0], before.square().sum(dim=1), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(both[1], outs[0].double().square().sum(dim=1), rtol=1e-5, atol=0.0)


@needs_kernels
def test_the_kernel_refuses_sums_of_another_kind() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="4 float64 sums"):
        cpu.update(list(x), x, torch.ones(()), torch.ones(()), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="a sign per row"):
        cpu.squared_error(x.bfloat16()[None], torch.ones(3), torch.zeros(1, dtype=torch.float64))
