"""Symmetric products on a GPU: a Triton kernel for one triangle of ``alpha a b + beta add``; it imports triton.

Tiles are square. With ``T = ceil(m / tile)`` tiles per side it computes ``T (T + 1) / 2`` of the ``T^2`` tiles of a
full product: all of them for T = 1, 10 of 16 for T = 4, half as T grows. What that can be worth:

- It halves the arithmetic, and the reads from cache with it (a tile reads its own rows and columns), but not the memory
  traffic: inputs are read once and all of the result is written, as before. A full Gram of ``s``-byte numbers does
  ``2 m^2 k`` operations on ``s (m k + m^2)`` bytes: ``m / s`` per byte for k = m, up to ``2 m / s`` for k far above m.
  Halving helps only where that exceeds the device's own ratio, and in full from twice that on. The ratio of an H100 SXM
  (NVIDIA's data sheet: 989e12 dense bfloat16 operations and 3.35e12 bytes per second) is 295: m = 590 and 1180 for
  square bfloat16 inputs, 295 and 590 for long ones. ``a b + add`` of four square matrices moves twice the bytes.
- It needs tiles enough: full product and triangle both take one wave while ``B T^2`` is no more than the tiles that the
  device works on at once. With one per multiprocessor (132 there) and m = 512, T = 4: 8 matrices are 128 tiles or 80,
  one wave either way; 32 are 512 or 320, 4 waves or 3; 128 are 2048 or 1280, 16 or 10, the full three eighths.

These are counts, not measurements. What was tried without a GPU: results in Triton's interpreter, and compiling for
capabilities 8.0, 9.0, 10.0 and 12.0 (``tests/unit/triton_without_gpu.py``).

Tiles are chosen by shape and dtype and never by timing, which may choose otherwise on each rank and so round replicas
of one parameter apart. ``MUON_COMPILE_TUNE_SYMMETRIC=1`` lets Triton time the few configurations anyway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# (tile, tile_k, warps, stages). 128 x 64 bfloat16 twice in three stages are 96 KiB of shared memory; a block may have
# 99 KiB on the smallest of these devices (CUDA C++ Programming Guide, Technical Specifications: 8.6, 8.9, 12.0).
_LARGE = (128, 64, 8, 3)
_SMALL = (64, 64, 4, 3)
_FLOAT32 = (64, 32, 4, 3)
_FLOAT32_SMALL = (32, 32, 4, 3)
# Rows from which a tile of 128 still skips three eighths of the product (T = 4: 10 of 16 tiles).
_LARGE_ROWS = 512

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _symmetric_tile(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    add_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    a_batch: tl.tensor,
    a_row: tl.tensor,
    a_col: tl.tensor,
    b_batch: tl.tensor,
    b_row: tl.tensor,
    b_col: tl.tensor,
    add_batch: tl.tensor,
    add_row: tl.tensor,
    add_col: tl.tensor,
    alpha: tl.tensor,
    beta: tl.tensor,
    HAS_ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
) -> None:
    """One tile on or below the diagonal and its mirror; ``out`` is contiguous ``[B, m, m]``."""
    program = tl.program_id(0)
    side = tl.cdiv(m, TILE)
    tiles = side * (side + 1) // 2
    batch = (program // tiles).to(tl.int64)
    index = program % tiles
    # Tiles are numbered row by row: row i begins at i (i + 1) / 2. The root is rounded, so step back or forth by one.
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    col = index - row * (row + 1) // 2

    # 64 bits: a row times its stride may pass 2^31 elements.
    rows = (row * TILE + tl.arange(0, TILE)).to(tl.int64)
    cols = (col * TILE + tl.arange(0, TILE)).to(tl.int64)
    depth = tl.arange(0, TILE_K).to(tl.int64)
    a_ptrs = a_ptr + batch * a_batch + rows[:, None] * a_row + depth[None, :] * a_col
    b_ptrs = b_ptr + batch * b_batch + depth[:, None] * b_row + cols[None, :] * b_col
    acc = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, k, TILE_K):
        left = depth < k - start
        a = tl.load(a_ptrs, mask=(rows < m)[:, None] & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & (cols < m)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += TILE_K * a_col
        b_ptrs += TILE_K * b_row

    inside = (rows < m)[:, None] & (cols < m)[None, :]
    acc = acc * alpha
    if HAS_ADD:
        add_ptrs = add_ptr + batch * add_batch + rows[:, None] * add_row + cols[None, :] * add_col
        acc += beta * tl.load(add_ptrs, mask=inside, other=0.0).to(tl.float32)
    result = acc.to(out_ptr.dtype.element_ty)
    # A tile on the diagonal is mirrored in itself: the result is symmetric to the bit.
    if row == col:
        result = tl.where(rows[:, None] >= cols[None, :], result, tl.trans(result))
    out_ptr += batch * m * m
    tl.store(out_ptr + rows[:, None] * m + cols[None, :], result, mask=inside)
    if row != col:
        tl.store(out_ptr + cols[None, :] * m + rows[:, None], result, mask=inside)


_KERNEL = triton.jit(_symmetric_tile)


def _configuration(m: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    if dtype == torch.float32:
        return _FLOAT32 if m >= _LARGE_ROWS // 2 else _FLOAT32_SMALL
    return _LARGE if m >= _LARGE_ROWS else _SMALL


def fits(a: Tensor) -> bool:
    """Whether a product with ``a``, ``[B, m, k]``, is one that this kernel is for.

    That is where there are tiles to skip, and m and k are multiples of 16: Triton sees that in its arguments and reads
    and writes 16 bytes at once, but single numbers otherwise.
    """
    m, k = a.shape[1:]
    return a.dtype in DTYPES and m > _configuration(m, a.dtype)[0] and m % 16 == 0 and k % 16 == 0


def _tuned() -> Any:
    configs = [
        triton.Config({"TILE": tile, "TILE_K": tile_k}, num_warps=warps, num_stages=stages)
        for tile, tile_k, warps, stages in (_LARGE, _SMALL, _FLOAT32, _FLOAT32_SMALL)
    ]
    return triton.autotune(configs=configs, key=["m", "k", "a_col", "b_col"])(_KERNEL)


# The first product of a shape is timed, so it may not be one that a CUDA graph is being captured from.
_TUNED = _tuned() if os.environ.get("MUON_COMPILE_TUNE_SYMMETRIC") == "1" else None


def product(a: Tensor, b: Tensor, add: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """``alpha a b + beta add``, of which only the lower triangle is computed, and mirrored.

    float32 products take the precision that ``torch.backends.cuda.matmul.fp32_precision`` gives torch's own.

    Args:
        a: ``[B, m, k]`` of one of ``DTYPES``, any strides.
        b: ``[B, k, m]``, as ``a``.
        add: ``[B, m, m]``, symmetric, as ``a``; not read where ``beta`` is 0.
        beta: Factor of ``add``.
        alpha: Factor of the product.

    Returns:
        ``[B, m, m]``, contiguous, of the inputs' dtype, accumulated in float32, symmetric to the bit.
    """
    num, m, k = a.shape
    out = a.new_empty((num, m, m))
    if out.numel() == 0:
        return out
    added = add if beta != 0.0 else None
    add_strides = (0, 0, 0) if added is None else added.stride()
    tf32 = a.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    tile, tile_k, warps, stages = _configuration(m, a.dtype)
    chosen = {"TILE": tile, "TILE_K": tile_k, "num_warps": warps, "num_stages": stages} if _TUNED is None else {}

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        side = -(-m // meta["TILE"])
        return (num * (side * (side + 1) // 2),)

    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(a):
        (_TUNED or _KERNEL)[grid](
            *(a, b, a if added is None else added, out),
            *(m, k, *a.stride(), *b.stride(), *add_strides),
            *(float(alpha), float(beta)),
            HAS_ADD=added is not None,
            PRECISION="tf32" if tf32 else "ieee",
            **chosen,
        )
    return out


def gram(x: Tensor) -> Tensor:
    """``x x^T`` of ``[B, m, k]``: ``product(x, x.mT)``."""
    return product(x, x.mT)
