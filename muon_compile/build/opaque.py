"""Operators of exact mode that a backend must neither fuse nor reassociate.

Inductor evaluates a chain of pointwise operators in float32 and contracts multiply-adds as it likes, so its bits differ
from eager's. Each operator here is one eager call, a single node in any graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIB = torch.library.Library("muon_compile", "FRAGMENT")
_LIB.define("exact_lerp(Tensor start, Tensor end, Tensor weight) -> Tensor")
_LIB.define("exact_normalize(Tensor x, float eps) -> Tensor")


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = torch.lerp(start, end, weight.to(start.dtype))
    return result


def _normalize(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    result: Tensor = x / norm.clamp(min=eps)
    return result


def _like_first(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


_LIB.impl("exact_lerp", _lerp, "CompositeExplicitAutograd")
_LIB.impl("exact_normalize", _normalize, "CompositeExplicitAutograd")
torch.library.register_fake("muon_compile::exact_lerp", _like_first, lib=_LIB)
torch.library.register_fake("muon_compile::exact_normalize", _like_first, lib=_LIB)


def opaque_lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """``torch.lerp`` of equal shapes with a 0-d weight, cast to their dtype."""
    result: Tensor = torch.ops.muon_compile.exact_lerp(start, end, weight)
    return result


def opaque_normalize(x: Tensor, eps: float) -> Tensor:
    """Divide each matrix of ``[B, m, n]`` by its clamped norm, every operator rounded to ``x.dtype``."""
    result: Tensor = torch.ops.muon_compile.exact_normalize(x, eps)
    return result
