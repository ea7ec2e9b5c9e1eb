"""Operators of the probes: sums of squares by row, and how far matrices are from orthogonal.

The error of a matrix X of r rows, r the shorter side, is ``||X X^T - I||_F / sqrt(r)``. It is estimated without that
product: for a vector v of signs, ``||X (X^T v) - v||^2`` has the expectation ``||X X^T - I||_F^2`` over v.
Source: Hutchinson, A stochastic estimator of the trace of the influence matrix, 1990.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.build.mixing import mixed
from muon_compile.kernels import cpu

_LIB = torch.library.Library("muon_compile", "FRAGMENT")
_LIB.define("row_squares(Tensor x) -> Tensor")
_LIB.define("squared_error(Tensor x, Tensor signs, bool native) -> Tensor")

# Elements of one norm: on CPUs torch adds up float32 squares one after the other, and of 20 million 2e-3 goes missing.
_NORM_NUMEL = 1 << 16
# Elements that are widened at once where nothing fuses the widening into the product.
_WIDEN_NUMEL = 1 << 20


def signs(length: int, device: torch.device) -> Tensor:
    """The vector v of all matrices whose shorter side is ``length``: ``[length]`` float32 of 1 and -1.

    Low bits of cubes modulo a prime: a fixed pattern, computed where it is used, by operators that every backend has.
    """
    index = torch.arange(length, dtype=torch.int32, device=device)
    return (1 - 2 * (mixed(index) & 1)).to(torch.float32)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _row_squares(x: Tensor) -> Tensor:
    # In the order of memory: a transposed update would be copied otherwise.
    order = sorted(range(1, x.dim()), key=x.stride, reverse=True)
    flat = x.permute(0, *order).reshape(x.shape[0], -1)
    whole = flat.shape[1] // _NORM_NUMEL * _NORM_NUMEL
    runs = flat[:, :whole].unflatten(1, (-1, _NORM_NUMEL)) if whole else flat.unsqueeze(1)
    norms = torch.linalg.vector_norm(runs, dim=2, dtype=_wide(x))
    if whole and whole < flat.shape[1]:
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True, dtype=_wide(x))
        norms = torch.cat([norms, rest], dim=1)
    squares: Tensor = (norms * norms).sum(dim=1)
    return squares


def _row_squares_fake(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0],), dtype=_wide(x))


def _squared_error(x: Tensor, signs: Tensor, native: bool) -> Tensor:
    if native:
        out = torch.empty(x.shape[0], dtype=torch.float64, device="cpu")
        cpu.squared_error(x.contiguous(), signs.contiguous(), out)
        return out.to(torch.float32)
    if x.numel() == 0:
        return x.new_zeros((x.shape[0],), dtype=_wide(x))
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    count = max(1, _WIDEN_NUMEL // (x.shape[-2] * x.shape[-1]))
    return torch.cat([_by_products(part.to(_wide(x)), signs) for part in x.split(count)])


def _by_products(x: Tensor, signs: Tensor) -> Tensor:
    v = signs[:, None].to(x.dtype)
    return _mean_square(torch.bmm(x, torch.matmul(x.mT, v)), v)


def _squared_error_fake(x: Tensor, signs: Tensor, native: bool) -> Tensor:
    return x.new_empty((x.shape[0],), dtype=_wide(x))


def _mean_square(product: Tensor, v: Tensor) -> Tensor:
    left = product - v
    return (left * left).sum(dim=[1, 2]) / v.shape[0]


_LIB.impl("row_squares", _row_squares, "CompositeExplicitAutograd")
_LIB.impl("squared_error", _squared_error, "CompositeExplicitAutograd")
torch.library.register_fake("muon_compile::row_squares", _row_squares_fake, lib=_LIB)
torch.library.register_fake("muon_compile::squared_error", _squared_error_fake, lib=_LIB)


def row_squares(x: Tensor) -> Tensor:
    """Sum of the squares of each row of ``[B, ...]``: ``[B]`` of float32 or x's wider dtype."""
    result: Tensor = torch.ops.muon_compile.row_squares(x)
    return result


def squared_error(x: Tensor, *, native: bool) -> Tensor:
    """Estimates of ``||X X^T - I||_F^2 / r`` of ``[B, m, n]``: ``[B]`` of float32 or x's wider dtype.

    Args:
        x: Orthogonalized matrices.
        native: By the CPU kernel; x is bfloat16.
    """
    result: Tensor = torch.ops.muon_compile.squared_error(x, signs(min(x.shape[-2:]), x.device), native)
    return result


def gram_squared_error(r: Tensor, q: Tensor) -> Tensor:
    """The same of ``X Q`` where only the Gram matrices ``R = X^T X`` are known: ``Q^T R Q`` against I.

    Args:
        r: ``[k, n, n]``, float32 or wider; X has at least as many rows as columns.
        q: The same.

    Returns:
        ``[k]`` of r's dtype.
    """
    v = signs(r.shape[-1], r.device)[:, None].to(r.dtype)
    once = torch.bmm(r, torch.bmm(q, v.expand(r.shape[0], *v.shape)))
    return _mean_square(torch.bmm(q.mT, once), v)
