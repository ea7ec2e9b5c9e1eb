"""Operators that a backend must neither fuse nor reassociate: each is one eager call, a single node in any graph.

Exact mode needs them because Inductor contracts multiply-adds as it likes, so that its bits differ from eager's.
``matrix_norm`` and ``matrix_amax`` are operators so that each backend can lower a reduction its own way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muon_compile.config import Triple

_LIB = torch.library.Library("muon_compile", "FRAGMENT")
_LIB.define("exact_lerp(Tensor start, Tensor end, Tensor weight) -> Tensor")
_LIB.define("exact_normalize(Tensor x, float eps) -> Tensor")
_LIB.define("exact_newton_schulz(Tensor x, float[] coefficients) -> Tensor")
_LIB.define("matrix_norm(Tensor x) -> Tensor")
_LIB.define("matrix_amax(Tensor x) -> Tensor")


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    result: Tensor
    if start.device.type == "cpu" and weight.numel() == 1:
        # As torch.optim passes it: a double, which lerp takes in float32 even for bfloat16 tensors.
        result = torch.lerp(start, end, weight.item())
    elif start.device.type == "cpu":
        rows = zip(start.unbind(0), end.unbind(0), weight.flatten().tolist(), strict=True)
        result = torch.stack([torch.lerp(a, b, w) for a, b, w in rows])
    else:
        result = torch.lerp(start, end, weight.to(start.dtype))
    return result


def _norm(x: Tensor) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return result


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax(dim=(-2, -1), keepdim=True)


def _normalize(x: Tensor, eps: float) -> Tensor:
    result: Tensor = x / _norm(x).clamp(min=eps)
    return result


def _newton_schulz(x: Tensor, coefficients: list[float]) -> Tensor:
    # One matrix at a time, as torch.optim does: for small matrices a batched product is another kernel, and rounds
    # otherwise.
    out = x.new_empty(x.shape)
    for matrix, result in zip(x.unbind(0), out.unbind(0), strict=True):
        y = matrix
        for a, b, c in zip(*[iter(coefficients)] * 3, strict=True):
            gram = y @ y.T
            poly = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            y = torch.addmm(y, poly, y, beta=a)
        result.copy_(y)
    return out


def _like_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _contiguous(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _one_per_matrix(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-2], 1, 1))


for _name, _impl, _fake in (
    ("exact_lerp", _lerp, _like_first),
    ("exact_normalize", _normalize, _like_first),
    ("exact_newton_schulz", _newton_schulz, _contiguous),
    ("matrix_norm", _norm, _one_per_matrix),
    ("matrix_amax", _amax, _one_per_matrix),
):
    _LIB.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"muon_compile::{_name}", _fake, lib=_LIB)


def opaque_lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """``torch.lerp`` of equal shapes ``[B, ...]``; the weight is 0-d or one per row, ``[B, 1, ...]``."""
    result: Tensor = torch.ops.muon_compile.exact_lerp(start, end, weight)
    return result


def opaque_normalize(x: Tensor, eps: float) -> Tensor:
    """Divide each matrix of ``[B, m, n]`` by its clamped norm, every operator rounded to ``x.dtype``."""
    result: Tensor = torch.ops.muon_compile.exact_normalize(x, eps)
    return result


def opaque_newton_schulz(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """Iterate each matrix of ``[B, m, n]`` by itself, with ``torch.optim.Muon``'s own products."""
    flat = [value for triple in coefficients for value in triple]
    result: Tensor = torch.ops.muon_compile.exact_newton_schulz(x, flat)
    return result


def matrix_norm(x: Tensor) -> Tensor:
    """Frobenius norm of each matrix of ``[B, m, n]``, accumulated in float32 or better: ``[B, 1, 1]`` of its dtype."""
    result: Tensor = torch.ops.muon_compile.matrix_norm(x)
    return result


def matrix_amax(x: Tensor) -> Tensor:
    """Largest absolute entry of each matrix of ``[B, m, n]``: ``[B, 1, 1]`` of its dtype."""
    result: Tensor = torch.ops.muon_compile.matrix_amax(x)
    return result
