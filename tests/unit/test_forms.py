"""Forms of the iteration: their names and costs, and that each is the same polynomial, rounded as it says."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import muon_compile as mc
from muon_compile.build import native_ops
from muon_compile.build.coefficients import schedule
from muon_compile.build.orthogonalize import _split_segment, apply_gram, gram_product, orthogonalize, symmetric_product
from muon_compile.config import DTypeName
from muon_compile.plan.forms import FORM_NAMES, Form, parse_form
from tests.reference import gaussian, orthogonal, relative_error

SEGMENTED = ("gram:1,1,3", "gram_split:2,3", "gram_split:1,4", "gram_half:1,2,2", "gram_half:1,1,1,2")
EVERY = (*FORM_NAMES, *SEGMENTED)


def spread(rows: int, cols: int, decades: float, seed: int = 0) -> Tensor:
    """One matrix whose singular values are log-spaced over ``decades``: ``[1, m, n]`` float32."""
    small, large = sorted((rows, cols))
    u, _ = torch.linalg.qr(gaussian(small, small, seed=seed, dtype=torch.float64))
    v, _ = torch.linalg.qr(gaussian(large, small, seed=seed + 1, dtype=torch.float64))
    x = (u * torch.logspace(0, -decades, small, dtype=torch.float64)) @ v.T
    return (x if rows <= cols else x.T).float()[None]


# -- names and costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps", "form"),
    [
        ("standard", 3, Form("none", (1, 1, 1))),
        ("gram", 5, Form("float32", (5,))),
        ("gram_restart", 5, Form("float32", (2, 3))),
        ("gram_restart", 2, Form("float32", (2,))),
        ("gram_split", 4, Form("split", (4,))),
        ("gram_split_restart", 5, Form("split", (2, 3))),
        ("gram_half:1,2,2", 5, Form("half", (1, 2, 2))),
    ],
)
def test_a_name_becomes_a_form_and_back(name: str, steps: int, form: Form) -> None:
    assert parse_form(name, steps) == form
    assert form.steps == steps
    assert parse_form(form.name, steps) == form


@pytest.mark.parametrize(
    "name", ["", "fast", "gram_", "gram:", "gram:2,2", "gram:0,5", "gram:5,", "standard:1,4", "standard_restart"]
)
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"ns: expected .*got"):
        parse_form(name, 5)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_flops_count_every_product(shape: tuple[int, int]) -> None:
    m, n = 3, 7
    assert parse_form("standard", 5).flops(*shape) == 5 * (4 * m * m * n + 2 * m**3)
    # Five steps in one segment: X X^T, 17 small products, and Q applied as two halves, once where X is as wide.
    assert parse_form("gram", 5).flops(*shape) == 6 * m * m * n + 34 * m**3
    assert parse_form("gram", 5).flops(*shape, narrow=False) == 4 * m * m * n + 34 * m**3
    assert parse_form("gram_half", 5).flops(*shape) == 4 * m * m * n + 34 * m**3
    assert parse_form("gram_split", 5).flops(*shape) == 6 * m * m * n + 3 * 34 * m**3
    assert parse_form("gram:2,3", 5).flops(*shape, symmetric=True) == 10 * m * m * n + 14 * m**3


# -- the same polynomial ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("coefficients", ["you", "polar_express"])
def test_in_float64_every_form_is_the_polynomial(name: str, coefficients: str) -> None:
    # Every row differs in these tables, so a wrong order or a lost term shows.
    config = mc.MuonConfig(coefficients=coefficients, ns_dtype="float64")  # type: ignore[arg-type]
    x = torch.cat([spread(12, 20, 2), gaussian(2, 12, 20, seed=4)]).double()
    for got, matrix in zip(orthogonalize(x, config, form=name), x, strict=True):
        assert relative_error(got, orthogonal(matrix, schedule(config))) <= 1e-9


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("name", FORM_NAMES)
def test_any_number_of_steps(name: str, steps: int) -> None:
    config = mc.MuonConfig(coefficients="polar_express", ns_steps=steps, ns_dtype="float64")
    x = gaussian(2, 10, 16, seed=steps, dtype=torch.float64)
    for got, matrix in zip(orthogonalize(x, config, form=name), x, strict=True):
        assert relative_error(got, orthogonal(matrix, schedule(config))) <= 1e-9


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_stacks_transposes_and_zeros(name: str, shape: tuple[int, int]) -> None:
    config = mc.MuonConfig(ns_dtype="float32")
    x = gaussian(3, *shape, seed=8)
    x[1] = 0.0
    result = orthogonalize(x, config, form=name)
    assert result.shape == x.shape and result.dtype == torch.float32
    assert torch.equal(result[1], torch.zeros(shape))
    if shape[0] != shape[1]:  # a square one is not turned
        assert torch.equal(orthogonalize(x.mT, config, form=name), result.mT)
    for index in (0, 2):
        assert relative_error(result[index], orthogonal(x[index])) <= 1e-4
    assert orthogonalize(x[:0], config, form=name).shape == (0, *shape)


# -- its rounding -----------------------------------------------------------------------------------------------------

# On these two matrices, five steps of Polar Express; a float32 Gram of a bfloat16 X, and its halves, are no worse than
# the standard form, and bfloat16 small matrices are worse.
SIXTEEN_BITS = ("gram", "gram_restart", "gram_split", "gram_split_restart", "gram_split:1,4")


@pytest.mark.parametrize("name", SIXTEEN_BITS)
@pytest.mark.parametrize("shape", [(64, 64), (48, 192)])
@pytest.mark.parametrize("decades", [1.0, 3.0])
def test_sixteen_bits_or_more_err_no_more_than_the_standard_form(
    name: str, shape: tuple[int, int], decades: float
) -> None:
    config = mc.MuonConfig(coefficients="polar_express")
    x = spread(*shape, decades)
    expected = orthogonal(x[0], schedule(config))
    standard = relative_error(orthogonalize(x, config)[0], expected)
    got = orthogonalize(x, config, form=name)
    assert got.dtype == torch.bfloat16
    assert relative_error(got[0], expected) <= 1.05 * standard


def test_bfloat16_small_matrices_are_not_enough() -> None:
    config = mc.MuonConfig(coefficients="polar_express")
    x = spread(64, 64, 3.0)
    expected = orthogonal(x[0], schedule(config))
    standard = relative_error(orthogonalize(x, config)[0], expected)
    assert relative_error(orthogonalize(x, config, form="gram_half:2,3")[0], expected) > 2 * standard
    assert not relative_error(orthogonalize(x, config, form="gram_half")[0], expected) < 10


def test_single_steps_in_half_precision_are_the_standard_form() -> None:
    x = gaussian(2, 24, 40, seed=3)
    standard = orthogonalize(x, mc.MuonConfig())
    assert torch.equal(orthogonalize(x, mc.MuonConfig(), form="gram_half:1,1,1,1,1"), standard)


def test_two_halves_have_sixteen_bits() -> None:
    config = mc.MuonConfig()
    x = spread(32, 64, 1.0).bfloat16()
    q = {name: orthogonalize(x, config, form=name).float() for name in ("gram", "gram_split", "gram_half")}
    assert 0 < relative_error(q["gram_split"], q["gram"]) < 1e-3 < relative_error(q["gram_half"], q["gram"])
    # What is left of Q beside its high half is a bfloat16 number as well.
    small = _split_segment(x, schedule(config), "graph")
    rest = small - small.bfloat16().float()
    assert small.dtype == torch.float32 and float(rest.abs().max()) > 0
    assert torch.equal(rest, rest.bfloat16().float())


def test_a_wide_q_is_applied_as_two_halves() -> None:
    # Q spans a factor of 400 and X the inverse of it, as at the end of an iteration on a square matrix.
    q, _ = torch.linalg.qr(gaussian(96, 96, seed=1, dtype=torch.float64))
    factors = torch.logspace(0, math.log10(400), 96, dtype=torch.float64)
    wide = ((q * factors) @ q.T).float()[None]
    x = ((q / factors) @ q.T).bfloat16()[None]
    expected = wide[0].double() @ x[0].double()
    assert relative_error(apply_gram(wide, x)[0], expected) <= 2**-8
    assert relative_error(apply_gram(wide.bfloat16(), x)[0], expected) > 2**-5


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["gram", "gram_split"])
def test_inductor_keeps_the_low_half(name: str) -> None:
    # A user's own torch.compile, without this library's options: it drops a cast to bfloat16 and back, so halves that
    # were made by casts became one, and errors three times as large.
    config = mc.MuonConfig()
    x = gaussian(1, 64, 64, seed=1)
    expected = orthogonal(x[0])
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
        compiled = torch.compile(orthogonalize, fullgraph=True)(x, config, form=name)
    torch._dynamo.reset()
    eager = relative_error(orthogonalize(x, config, form=name)[0], expected)
    assert relative_error(compiled[0], expected) <= 1.2 * eager


# -- the operators ----------------------------------------------------------------------------------------------------

PLAIN = {"bmm", "baddbmm", "mul", "add", "sub", "_to_copy", "transpose", "view", "bitwise_and"}
PLAIN |= {"arange", "unsqueeze", "eq"}  # the identity; TorchAir has no converter for eye
PLAIN |= {"matrix_norm", "div", "clamp"}  # of the normalization
PLAIN |= {"detach"}  # make_fx adds it to a view of another dtype


class Names(TorchDispatchMode):
    """The operators that ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", EVERY)
def test_a_form_is_made_of_plain_operators(name: str) -> None:
    config = mc.MuonConfig()
    with torch.no_grad():
        traced = make_fx(lambda x: orthogonalize(x, config, form=name))(gaussian(2, 8, 12, seed=1))
    called = {n.target.overloadpacket.__name__ for n in traced.graph.nodes if n.op == "call_function"}
    assert called <= PLAIN
    assert {"bmm", "baddbmm"} <= called


@pytest.mark.parametrize("name", ["standard", "gram", "gram_split", "gram_half:2,3"])
def test_the_symmetric_kernel_takes_every_product_but_the_applications(name: str) -> None:
    config, x = mc.MuonConfig(), gaussian(2, 24, 40, seed=2)
    form = parse_form(name, 5)
    with Names() as names:
        got = orthogonalize(x, config, form=name, kernel="symmetric")
    inner = sum(4 * steps - 3 for steps in form.segments) * (3 if form.gram == "split" else 1)
    assert names.seen.count("symmetric_gram") == len(form.segments)
    assert names.seen.count("symmetric_product") == inner
    # Nothing but the operators' own calls is left beside the applications.
    plain = orthogonalize(x, config, form=name)
    for a, b, matrix in zip(got, plain, x, strict=True):
        expected = orthogonal(matrix)
        assert relative_error(a, expected) <= 1.1 * relative_error(b, expected) + 1e-3


@pytest.mark.parametrize("kernel", ["graph", "symmetric"])
def test_products(kernel: str) -> None:
    x = gaussian(2, 6, 9, seed=1).bfloat16()
    gram = gram_product(x, torch.float32, kernel)
    assert gram.dtype == torch.float32
    assert relative_error(gram, x.double() @ x.double().mT) <= 1e-6
    assert gram_product(x, torch.bfloat16, kernel).dtype == torch.bfloat16
    product = symmetric_product(gram, gram, kernel, add=gram, beta=-2.0, alpha=0.5)
    assert relative_error(product, -2.0 * gram.double() + 0.5 * gram.double() @ gram.double()) <= 1e-6
    assert relative_error(symmetric_product(gram, gram, kernel, alpha=0.5), 0.5 * gram.double() @ gram.double()) <= 1e-6
    assert relative_error(symmetric_product(gram, gram, kernel), gram.double() @ gram.double()) <= 1e-6


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_native_kernel_is_given_the_update_as_it_is(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], in_place: bool
) -> None:
    calls: list[tuple[tuple[int, ...], mc.MuonConfig, Form, bool]] = []

    def kernel(update: Tensor, config: mc.MuonConfig, form: Form, *, in_place: bool) -> Tensor:
        calls.append((tuple(update.shape), config, form, in_place))
        return update.bfloat16()

    monkeypatch.setattr(native_ops, "native_orthogonalize", kernel)
    config, x = mc.MuonConfig(), gaussian(2, *shape, seed=1)
    result = orthogonalize(x, config, form="gram_split:2,3", kernel="native", in_place=in_place)
    assert calls == [((2, *shape), config, Form("split", (2, 3)), in_place)]
    assert result.dtype == torch.bfloat16 and result.shape == (2, *shape)


@pytest.mark.parametrize("coefficients", ["polar_express", "cans"])
def test_dynamo_traces_every_form_without_a_word(coefficients: str) -> None:
    x = gaussian(1, 6, 8, seed=1)
    torch._dynamo.reset()
    for name in ("standard", "gram", "gram_split:2,3"):
        config = mc.MuonConfig(coefficients=coefficients, ns_dtype="float32")  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = torch.compile(orthogonalize, fullgraph=True, backend="aot_eager")
            got = compiled(x, config, form=name)
        torch.testing.assert_close(got, orthogonalize(x, config, form=name))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_result_has_the_products_dtype(dtype: DTypeName) -> None:
    for name in EVERY:
        assert orthogonalize(gaussian(1, 4, 6, seed=1), mc.MuonConfig(ns_dtype=dtype), form=name).dtype == getattr(
            torch, dtype
        )


def test_what_the_planner_should_have_resolved_is_our_own_fault() -> None:
    x = gaussian(1, 4, 6, seed=1)
    with pytest.raises(AssertionError):
        orthogonalize(x, mc.MuonConfig(ns_dtype="auto"))
    with pytest.raises(AssertionError):
        orthogonalize(x, mc.MuonConfig(), exact=True, form="gram")
    with pytest.raises(AssertionError):
        orthogonalize(x, mc.MuonConfig(), kernel="fast")
