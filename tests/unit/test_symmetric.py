"""Symmetric products: the operators, kernels offered to them, and the Triton kernel as far as no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muon_compile.build import symmetric
from muon_compile.build.symmetric import (
    register_symmetric_kernel,
    symmetric_gram,
    symmetric_kernel_name,
    symmetric_product,
)
from tests.reference import JORDAN, gaussian, relative_error

ROOT = Path(__file__).parent.parent.parent
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}


def commuting(count: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A symmetric matrix and a polynomial of it, rounded to ``dtype`` and symmetric to the bit."""
    x = gaussian(count, size, size, seed=3, dtype=torch.float64) / size**0.5
    r = x @ x.mT
    pair = [y.to(dtype) for y in (r, 2 * r - r @ r)]
    a, b = (y.tril() + y.tril(-1).mT for y in pair)
    return a, b


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_gram_matrix(dtype: torch.dtype, count: int) -> None:
    for x in (gaussian(count, 24, 100, seed=1).to(dtype), gaussian(count, 33, 31, seed=2).to(dtype).mT):
        got = symmetric_gram(x)
        assert got.dtype == dtype and got.is_contiguous()
        assert got.shape == (count, x.shape[1], x.shape[1])
        if count:
            assert relative_error(got, x.double() @ x.double().mT) <= DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_product_with_something_added(dtype: torch.dtype, count: int) -> None:
    a, b = commuting(count, 33, dtype)
    nan = torch.full_like(a, torch.nan)
    wide = a.double() @ b.double()
    cases = [
        (symmetric_product(a, b), wide),
        (symmetric_product(a, b, alpha=-2.5), -2.5 * wide),
        (symmetric_product(a, b, beta=3.0), wide),
        (symmetric_product(a, b, nan, alpha=2.0), 2 * wide),
        (symmetric_product(a, b.mT, a, 0.5, 2.0), 2 * wide + 0.5 * a.double()),
    ]
    for got, expected in cases:
        assert got.dtype == dtype and got.is_contiguous() and got.shape == (count, 33, 33)
        assert not count or relative_error(got, expected) <= DTYPES[dtype]


def test_autocast_does_not_narrow_a_product() -> None:
    x = gaussian(2, 24, 40, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        got = symmetric_gram(x), symmetric_product(x, x.mT, symmetric_gram(x), 0.0, 1.0)
    for product in got:
        assert product.dtype == torch.float32
        assert relative_error(product, x.double() @ x.double().mT) <= 1e-6


def test_the_operators_keep_the_rules_of_torch() -> None:
    a, b = commuting(2, 8, torch.float32)
    operators = torch.ops.muon_compile
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operators.symmetric_gram.default, (gaussian(2, 8, 12, seed=1).mT,), test_utils=checks)
    for args in ((a, b, None, 0.0, 1.0), (a, b.mT, a, 0.5, -2.0)):
        torch.library.opcheck(operators.symmetric_product.default, args, test_utils=checks)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: symmetric_gram(x[0]), r"symmetric_gram: x: expected a batch .* got shape \(4, 6\)"),
        (lambda x: symmetric_product(x, x), r"a, b: expected shapes .* got \(2, 4, 6\) and \(2, 4, 6\)"),
        (lambda x: symmetric_product(x, x[:1].mT), r"a, b: expected shapes .* got \(2, 4, 6\) and \(1, 6, 4\)"),
        (lambda x: symmetric_product(x, x.mT, x), r"add: expected shape \(2, 4, 4\), got \(2, 4, 6\)"),
        (lambda x: symmetric_product(x, x.mT.double()), "operands of one dtype, got .*float32, torch.float64"),
    ],
)
def test_operands_that_do_not_fit(call: Callable[[Tensor], Tensor], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(torch.zeros(2, 4, 6))


def mirrored(p: Tensor) -> Tensor:
    return p.tril() + p.tril(-1).mT


def _product(a: Tensor, b: Tensor, add: Tensor | None, beta: float, alpha: float) -> Tensor:
    full = alpha * (a @ b)
    return mirrored(full if add is None else full + beta * add)


@pytest.fixture
def mirroring() -> Iterator[Callable[[], None]]:
    """A kernel that takes 48 rows and mirrors what it computes."""
    withdraw = register_symmetric_kernel(
        "mirroring", is_available=lambda a: a.shape[1] == 48, gram=lambda x: mirrored(x @ x.mT), product=_product
    )
    yield withdraw
    withdraw()


def test_a_kernel_is_asked_before_bmm(mirroring: Callable[[], None]) -> None:
    a = gaussian(1, 48, 48, seed=1)
    assert symmetric_kernel_name(a) == "mirroring"
    assert symmetric_kernel_name(a[:, 1:]) == "bmm"
    assert torch.equal(symmetric_gram(a), symmetric_gram(a).mT)
    product = symmetric_product(a, a, a, 2.0, 0.5)  # not symmetric: it shows the mirroring
    assert torch.equal(product, _product(a, a, a, 2.0, 0.5))
    mirroring()
    assert symmetric_kernel_name(a) == "bmm"
    assert relative_error(symmetric_product(a, a), a @ a) <= 1e-6


@pytest.mark.parametrize("name", ["mirroring", "triton", "bmm"])
def test_a_name_that_is_taken(mirroring: Callable[[], None], name: str) -> None:
    with pytest.raises(ValueError, match=f"expected one not in .*{name}.*, got '{name}'"):
        register_symmetric_kernel(name, is_available=lambda a: False, gram=lambda x: x, product=_product)


@pytest.mark.parametrize("wrong", [lambda x: x[:, :, :4], lambda x: (x @ x.mT).double(), lambda x: (x @ x.mT)[:1]])
def test_a_kernel_is_held_to_shape_and_dtype(wrong: Callable[[Tensor], Tensor]) -> None:
    withdraw = register_symmetric_kernel("wrong", is_available=lambda a: True, gram=wrong, product=_product)
    try:
        with pytest.raises(
            ValueError, match=r"Symmetric kernel 'wrong': expected a result of shape \(2, 5, 5\), torch.f"
        ):
            symmetric_gram(torch.zeros(2, 5, 6))
    finally:
        withdraw()


def test_a_kernel_may_lay_its_result_out_as_it_likes() -> None:
    withdraw = register_symmetric_kernel(
        "columns", is_available=lambda a: True, gram=lambda x: (x @ x.mT).mT, product=_product
    )
    try:
        assert symmetric_gram(gaussian(2, 5, 6, seed=1)).is_contiguous()
    finally:
        withdraw()


def gram_iteration(x: Tensor) -> Tensor:
    """Five steps in one segment, all products through the operator."""
    r = symmetric_gram(x)
    q = torch.eye(x.shape[1], dtype=x.dtype).expand_as(r)
    for a, b, c in JORDAN:
        z = symmetric_product(r, r, r, b, c)
        q = symmetric_product(q, z, q, a)
        p = symmetric_product(r, z, r, a)
        r = symmetric_product(z, p, p, a)
    return q @ x


def test_the_gram_iteration_bears_mirrored_triangles(mirroring: Callable[[], None]) -> None:
    x = gaussian(3, 48, 60, seed=1)
    x = x / x.flatten(1).norm(dim=1)[:, None, None]
    got = gram_iteration(x)
    mirroring()
    full = gram_iteration(x)
    exact = gram_iteration(x.double())
    assert not torch.equal(got, full)
    # Seeds 1 to 5: 2.6e-6 to 3.2e-6 mirrored, 2.9e-6 to 4.1e-6 in full.
    assert relative_error(got, exact) <= 1.2 * relative_error(full, exact) <= 1e-5


@pytest.mark.inductor
def test_both_operators_are_single_nodes_of_a_compiled_graph() -> None:
    graphs = []

    def polynomial(x: Tensor) -> Tensor:
        r = symmetric_gram(x.mT * 2)
        return symmetric_product(r, r.mT, r + 1, 0.5, 2.0) - 1

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, inputs)

    x = gaussian(2, 31, 24, seed=1)
    compiled = torch.compile(polynomial, backend=backend, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), polynomial(x), rtol=1e-5, atol=1e-3)
    (graph,) = graphs
    operators = torch.ops.muon_compile
    own = [node.target for node in graph.graph.nodes if "muon_compile" in str(node.target)]
    assert own in (
        [operators.symmetric_gram, operators.symmetric_product],
        [operators.symmetric_gram.default, operators.symmetric_product.default],
    )
    # Whichever kernel is offered later serves the graph compiled before.
    calls = []
    withdraw = register_symmetric_kernel(
        "late", is_available=lambda a: not calls.append(a.shape), gram=lambda x: mirrored(x @ x.mT), product=_product
    )
    try:
        torch.testing.assert_close(compiled(x), polynomial(x), rtol=1e-5, atol=1e-3)
    finally:
        withdraw()
    assert calls == [(2, 24, 31), (2, 24, 24)] * 2


def test_without_triton_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "muon_compile.kernels.triton_symmetric", None)
    symmetric._triton.cache_clear()
    try:
        with pytest.warns(UserWarning, match="run as torch.bmm, in full: their kernel needs triton") as warned:
            assert [symmetric._triton() for _ in range(2)] == [None, None]
        assert len(warned) == 1
    finally:
        symmetric._triton.cache_clear()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["interpret", "compile"])
def test_the_triton_kernel_without_a_gpu(what: str) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1" if what == "interpret" else "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "unit" / "triton_without_gpu.py"), what]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases are right" in done.stdout
