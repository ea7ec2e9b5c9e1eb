"""The Triton kernel on a GPU: its results, inside a compiled graph and a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muon_compile.build.symmetric import symmetric_gram, symmetric_kernel_name, symmetric_product
from tests.reference import gaussian, relative_error

pytestmark = pytest.mark.device
if not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs an NVIDIA GPU of compute capability 8.0 or later", allow_module_level=True)

# One rounding to the dtype; float32 products, and sums of 1,000 terms in float32, on top.
DTYPES = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def polynomial(x: Tensor) -> Tensor:
    r = symmetric_gram(x)
    return symmetric_product(r, r, r, -0.5, 2.0)


def unit_rows(count: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return (gaussian(count, rows, cols, seed=1) / cols**0.5).to("cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 80, 144), (1, 512, 512), (2, 640, 1008), (1, 2048, 2048)])
@pytest.mark.parametrize("transposed", [False, True])
def test_results(dtype: torch.dtype, shape: tuple[int, int, int], transposed: bool) -> None:
    x = unit_rows(*shape, dtype)
    x = x.mT.contiguous().mT if transposed else x
    assert symmetric_kernel_name(x) == "triton"
    r = symmetric_gram(x)
    assert torch.equal(r, r.mT) and r.is_contiguous()
    assert relative_error(r, x.double() @ x.double().mT) <= DTYPES[dtype]
    z = symmetric_product(r, r, r, -0.5, 2.0)
    assert torch.equal(z, z.mT)
    assert relative_error(z, 2 * r.double() @ r.double() - 0.5 * r.double()) <= DTYPES[dtype]


@pytest.mark.parametrize("size", [1, 31, 100, 129, 577])
def test_ragged_sizes_by_the_kernel_itself(size: int) -> None:
    from muon_compile.kernels import triton_symmetric

    for dtype, tolerance in DTYPES.items():
        x = unit_rows(2, size, size + 3, dtype)
        got = triton_symmetric.gram(x)
        assert torch.equal(got, got.mT)
        assert relative_error(got, x.double() @ x.double().mT) <= tolerance


def test_operands_past_two_to_the_31_elements() -> None:
    # 66,000 columns of a view that strides over 32,768 rows: its last elements lie 2^31 behind the first.
    from muon_compile.kernels import triton_symmetric

    base = torch.zeros(66_000, 32_768, dtype=torch.bfloat16, device="cuda")
    x = base[:, :80].T[None]
    base[:, :80] = unit_rows(1, 66_000, 80, torch.bfloat16)[0]
    got = triton_symmetric.gram(x)
    assert relative_error(got, x.double() @ x.double().mT) <= DTYPES[torch.bfloat16]


def test_inside_a_cuda_graph() -> None:
    x = unit_rows(2, 256, 512, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        polynomial(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = polynomial(x)
    x.copy_(unit_rows(2, 256, 512, torch.bfloat16).flip(1))
    graph.replay()
    assert torch.equal(out, polynomial(x))


@pytest.mark.inductor
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inside_a_compiled_graph(mode: str) -> None:
    compiled = torch.compile(polynomial, fullgraph=True, mode=mode)
    x = unit_rows(2, 256, 512, torch.bfloat16)
    for _ in range(3):
        assert torch.equal(compiled(x), polynomial(x))
