"""Newton-Schulz by this library's CPU kernel, as one operator of the graph: ``[B, m, n]`` in, ``[B, m, n]`` out."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.build.coefficients import schedule
from muon_compile.build.opaque import matrix_amax
from muon_compile.config import MuonConfig
from muon_compile.kernels import cpu
from muon_compile.plan.forms import Form

_LIB = torch.library.Library("muon_compile", "FRAGMENT")
_ARGS = "float[] coefficients, int[] segments, bool split, float eps, bool eps_add"
_LIB.define(f"native_newton_schulz(Tensor x, {_ARGS}) -> Tensor")
_LIB.define(f"native_newton_schulz_(Tensor(a!) x, {_ARGS}) -> ()")

# With eps="relative" the largest entry is 1 already: a norm below this belongs to a matrix of zeros.
_RELATIVE_EPS = 1e-30


def _newton_schulz(
    x: Tensor, coefficients: list[float], segments: list[int], split: bool, eps: float, eps_add: bool
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    cpu.newton_schulz(x.contiguous(), out, coefficients, segments, split=split, eps=eps, eps_add=eps_add)
    return out


def _newton_schulz_(
    x: Tensor, coefficients: list[float], segments: list[int], split: bool, eps: float, eps_add: bool
) -> None:
    cpu.newton_schulz(x, x, coefficients, segments, split=split, eps=eps, eps_add=eps_add)


def _fake(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_(x: Tensor, *_: object) -> None:
    return None


_LIB.impl("native_newton_schulz", _newton_schulz, "CPU")
_LIB.impl("native_newton_schulz_", _newton_schulz_, "CPU")
torch.library.register_fake("muon_compile::native_newton_schulz", _fake, lib=_LIB)
torch.library.register_fake("muon_compile::native_newton_schulz_", _fake_, lib=_LIB)


def native_orthogonalize(update: Tensor, config: MuonConfig, form: Form, *, in_place: bool = False) -> Tensor:
    """Normalize and orthogonalize each matrix of a stack by the CPU kernel.

    Args:
        update: ``[B, m, n]``, any floating dtype; either of m and n may be the larger.
        config: The group's mathematics, with bfloat16 products.
        form: ``"none"``, ``"half"`` or ``"split"`` small matrices, any segments.
        in_place: ``update`` may be overwritten.

    Returns:
        ``[B, m, n]`` bfloat16.
    """
    assert config.ns_dtype == "bfloat16" and form.gram in ("none", "half", "split")
    eps = config.eps
    if eps == "relative":
        wide = update.float()
        largest = matrix_amax(wide)
        update, eps = wide / torch.where(largest > 0, largest, 1.0), _RELATIVE_EPS
    assert isinstance(eps, float)
    flat = [value for triple in schedule(config) for value in triple]
    add = config.eps_mode == "add" and config.eps != "relative"
    x = update.to(torch.bfloat16).contiguous()
    arguments = (flat, list(form.segments), form.gram == "split", eps, add)
    if in_place:
        torch.ops.muon_compile.native_newton_schulz_(x, *arguments)
        return x
    result: Tensor = torch.ops.muon_compile.native_newton_schulz(x, *arguments)
    return result
