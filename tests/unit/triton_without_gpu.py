"""What can be tried of the Triton kernel without a GPU; it needs triton (pip install triton), but no CUDA torch.

    TRITON_INTERPRET=1 python tests/unit/triton_without_gpu.py interpret   # results, against float64
    python tests/unit/triton_without_gpu.py compile                        # PTX and shared memory of each device

Both end with 0 if all is well, and are run by test_symmetric.py where triton can be imported.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from muon_compile.kernels import triton_symmetric

SIZES = (1, 24, 31, 64, 100, 129)
# Depth, and whether x is a transposed view.
INPUTS = ((1, False), (80, False), (65, True))
# One rounding, and what float32 accumulation adds. The interpreter rounds bfloat16 towards zero: 2^-7.
TOLERANCE = {torch.float32: 3e-7, torch.bfloat16: 8e-3, torch.float16: 5e-4}
# Shared memory that one block may have, in bytes: CUDA C++ Programming Guide, Technical Specifications.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Tensor cores, by what each generation calls them in PTX.
TENSOR_CORES = {80: "mma.sync", 86: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


def widen_bfloat16_products() -> None:
    """The interpreter keeps bfloat16 as bit patterns, and its tl.dot (3.9) multiplies those."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, wide(a), wide(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def check(what: str, got: Tensor, expected: Tensor) -> None:
    assert got.is_contiguous() and got.shape == expected.shape, f"{what}: {got.shape}, {got.stride()}"
    assert torch.equal(got, got.mT), f"{what}: not symmetric"
    error = float((got.double() - expected).norm() / expected.norm()) if expected.norm() > 0 else float(got.norm())
    assert error <= TOLERANCE[got.dtype], f"{what}: relative error {error:.1e}"


def interpret() -> int:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    widen_bfloat16_products()
    cases = list(itertools.product(SIZES, (0, 1, 3), TOLERANCE))
    for m, num, dtype in cases:
        for k, transposed in INPUTS:
            x = torch.randn(num, k, m).mT if transposed else torch.randn(num, m, k)
            x = x.to(dtype)
            check(f"gram {num}x{m}x{k} {dtype} {transposed}", triton_symmetric.gram(x), x.double() @ x.double().mT)
        # Commuting symmetric operands, of which b and add are views of something larger, with odd strides.
        r = torch.randn(num, m, m, dtype=torch.float64) / m**0.5
        r = (r @ r.mT).to(dtype)
        r = r.tril() + r.tril(-1).mT
        large = torch.full((2 * num, m, 2 * m + 3), torch.nan, dtype=dtype)
        large[::2, :, 1 : 2 * m : 2] = r
        view = large[::2, :, 1 : 2 * m : 2]
        square = r.double() @ r.double()
        what = f"product {num}x{m} {dtype}"
        check(what, triton_symmetric.product(r, view, None, 3.0, -2.0), -2 * square)
        check(f"{what} add", triton_symmetric.product(r, view, view.mT, 0.5, 2.0), 2 * square + 0.5 * r.double())
        nan = torch.full_like(r, torch.nan)
        check(f"{what} beta 0", triton_symmetric.product(r, view, nan, 0.0, 1.0), square)
    x = torch.randn(1, 520, 65).bfloat16()  # five of the large tiles to a side
    check("gram 1x520x65", triton_symmetric.gram(x), x.double() @ x.double().mT)
    return len(cases) + 1


def compile_one(capability: int, dtype: torch.dtype, m: int, given: Mapping[str, Any]) -> Any:
    tile, tile_k, warps, stages = triton_symmetric._configuration(m, dtype)
    names = triton_symmetric._KERNEL.arg_names
    pointer = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    constants: dict[str, Any] = {"HAS_ADD": True, "PRECISION": "ieee", "TILE": tile, "TILE_K": tile_k}
    constants |= {
        "a_col": 1,
        "b_row": 1,
        "add_col": 1,
    } | given  # a Gram matrix of rows: Triton makes every 1 a constant
    kinds = {"alpha": "fp32", "beta": "fp32", "a_batch": "i64"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, pointer if name.endswith("_ptr") else "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kinds.get(n) in (None, "i64")}
    source = ASTSource(
        triton_symmetric._KERNEL,
        signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": warps, "num_stages": stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_all() -> int:
    cases = list(itertools.product(SHARED_BYTES, triton_symmetric.DTYPES, (256, 1024)))
    for capability, dtype, m in cases:
        kernel = compile_one(capability, dtype, m, {})
        what = f"{capability} {dtype} m={m}"
        assert kernel.metadata.shared <= SHARED_BYTES[capability], f"{what}: {kernel.metadata.shared} bytes shared"
        ptx = kernel.asm["ptx"]
        assert dtype == torch.float32 or TENSOR_CORES[capability] in ptx, f"{what}: no tensor cores"
        assert "cp.async.cg.shared.global" in ptx and "st.global.v4" in ptx, f"{what}: narrow loads or stores"
        assert "st.global.b16" not in ptx and "st.global.b32" not in ptx, f"{what}: stores of single numbers"
    variants: list[dict[str, Any]] = [{"m": 1, "k": 1, "b_col": 1}, {"HAS_ADD": False}, {"PRECISION": "tf32"}]
    for given in variants:
        kernel = compile_one(90, torch.float32, 1024, given)
        assert ("wgmma" in kernel.asm["ptx"]) == ("PRECISION" in given), f"{given}: tf32 where it was not asked for"
    return len(cases) + len(variants)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("interpret", "compile"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print({"interpret": interpret, "compile": compile_all}[parser.parse_args().what](), "cases are right")
