"""GE operators that compute: element by element, reductions, products. See ``interpret`` for whose reading this is.

bfloat16 and float16 are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muon_compile.npu.ops import Op
from muon_compile.npu.registry import (
    GraphError,
    axis_of,
    check_boolean,
    check_floating,
    integers,
    operator,
    torch_dtype,
    wide,
)


def _functions(pairs: str) -> dict[str, Callable[..., Tensor]]:
    """Functions of torch by GE's operator type, from pairs such as ``RealDiv=true_divide``."""
    names = dict(pair.split("=") for pair in pairs.split())
    return {op_type: getattr(torch, name) for op_type, name in names.items()}


_ANY = _functions("Add=add Sub=sub Mul=mul Pow=pow Neg=neg Abs=abs Sign=sign Square=square")
_ANY |= _functions("Maximum=maximum Minimum=minimum FloorMod=remainder")
_FLOATING = _functions(
    "RealDiv=true_divide Reciprocal=reciprocal Sqrt=sqrt Rsqrt=rsqrt Lerp=lerp Floor=floor Ceil=ceil"
)
_FLOATING |= _functions("Exp=exp Expm1=expm1 Log=log Log1p=log1p")
_COMPARISONS = _functions("Equal=eq NotEqual=ne Less=lt LessEqual=le Greater=gt GreaterEqual=ge")
_COMPARISONS |= _functions("IsNan=isnan IsInf=isinf IsFinite=isfinite")
_LOGICAL = _functions("LogicalAnd=logical_and LogicalOr=logical_or LogicalNot=logical_not")
_BITWISE = _functions("BitwiseAnd=bitwise_and BitwiseOr=bitwise_or BitwiseXor=bitwise_xor Invert=bitwise_not")
_REDUCTIONS = _functions("ReduceSum=sum ReduceMean=mean")
_EXTREMES = _functions("ReduceMax=amax ReduceMin=amin")
# LpNormV2's p is a number; the ends of int32 stand for infinity. Source: TorchAir's converter of linalg_vector_norm.
_INT32 = torch.iinfo(torch.int32)


def _rounded(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return function(*map(wide, inputs)).to(inputs[0].dtype)


@operator(*_ANY)
def _any(op: Op, *inputs: Tensor) -> Tensor:
    if inputs[0].dtype == torch.bool:
        raise GraphError(f"{op}: expected numbers, got bool.")
    return _rounded(_ANY[op.type], *inputs)


# The defaults of Exp and Log: base e, and nothing before it.
@operator(*_FLOATING, fixed={"base": -1.0, "scale": 1.0, "shift": 0.0})
def _floating(op: Op, *inputs: Tensor) -> Tensor:
    check_floating(op, *inputs)
    return _rounded(_FLOATING[op.type], *inputs)


@operator(*_COMPARISONS)
def _comparison(op: Op, *inputs: Tensor) -> Tensor:
    return _COMPARISONS[op.type](*inputs)


@operator(*_LOGICAL)
def _logical(op: Op, *inputs: Tensor) -> Tensor:
    check_boolean(op, *inputs)
    return _LOGICAL[op.type](*inputs)


@operator(*_BITWISE)
def _bitwise(op: Op, *inputs: Tensor) -> Tensor:
    if inputs[0].is_floating_point() or inputs[0].dtype == torch.bool:
        raise GraphError(f"{op}: expected integers, got {inputs[0].dtype}.")
    return _BITWISE[op.type](*inputs)


@operator("Muls", "Adds", reads=("value",))
def _with_number(op: Op, x: Tensor) -> Tensor:
    check_floating(op, x)
    value = op.attr("value", float)
    return _rounded((lambda y: y * value) if op.type == "Muls" else (lambda y: y + value), x)


@operator("AxpyV2", "Sxpy")
def _axpy(op: Op, x: Tensor, y: Tensor, alpha: Tensor | None = None) -> Tensor:
    sign = 1 if op.type == "AxpyV2" else -1
    factor = torch.ones((), dtype=x.dtype) if alpha is None else alpha
    return _rounded(lambda a, b, c: a + sign * (b * c), x, y, factor)


@operator("Addcmul", "Addcdiv")
def _add_combined(op: Op, x: Tensor, a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    if op.type == "Addcmul":
        return _rounded(lambda base, p, q, factor: base + factor * p * q, x, a, b, value)
    check_floating(op, x)
    return _rounded(lambda base, p, q, factor: base + factor * p / q, x, a, b, value)


@operator("Axpy", reads=("alpha",))
def _axpy_number(op: Op, x: Tensor, y: Tensor) -> Tensor:
    alpha = op.attr("alpha", float)
    check_floating(op, x)
    return _rounded(lambda a, b: a + b * alpha, x, y)


@operator("ClipByValueV2")
def _clip(op: Op, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, low), high)


@operator("Select", "SelectV2")
def _select(op: Op, condition: Tensor, then: Tensor, other: Tensor) -> Tensor:
    check_boolean(op, condition)
    return torch.where(condition, then, other)


@operator("MaskedFill")
def _masked_fill(op: Op, x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    check_boolean(op, mask)
    return torch.where(mask, value, x)


@operator("Cast", reads=("dst_type",))
def _cast(op: Op, x: Tensor) -> Tensor:
    return x.to(torch_dtype(op, op.attr("dst_type", int)))


@operator(*_REDUCTIONS, reads=("keep_dims",), ignored=("noop_with_empty_axes",))
def _reduce(op: Op, x: Tensor, axes: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        raise GraphError(f"{op}: expected numbers, got bool.")
    if op.type == "ReduceMean":
        check_floating(op, x)
    dims, keep = _axes(op, x, axes), op.attr("keep_dims", bool, False)
    return _rounded(lambda y: _REDUCTIONS[op.type](y, dim=dims, keepdim=keep), x) if dims else x


@operator(*_EXTREMES, reads=("keep_dims",))
def _extreme(op: Op, x: Tensor, axes: Tensor) -> Tensor:
    dims = _axes(op, x, axes)
    return _EXTREMES[op.type](x, dim=dims, keepdim=op.attr("keep_dims", bool, False)) if dims else x


@operator("ReduceAll", "ReduceAny", reads=("keep_dims",))
def _reduce_logical(op: Op, x: Tensor, axes: Tensor) -> Tensor:
    check_boolean(op, x)
    dims, keep = tuple(_axes(op, x, axes)), op.attr("keep_dims", bool, False)
    if not dims:
        return x
    return x.all(dim=dims, keepdim=keep) if op.type == "ReduceAll" else x.any(dim=dims, keepdim=keep)


@operator("ArgMaxWithValue", "ArgMinWithValue", reads=("dimension", "keep_dims"))
def _extreme_with_index(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    function = torch.max if op.type == "ArgMaxWithValue" else torch.min
    values, indices = function(x, dim=op.attr("dimension", int), keepdim=op.attr("keep_dims", bool, False))
    return indices.to(torch.int32), values


@operator("LpNormV2", reads=("p", "axes", "keepdim"), fixed={"epsilon": 0.0})
def _norm(op: Op, x: Tensor) -> Tensor:
    check_floating(op, x)
    p, dims, keep = op.attr("p", float), op.attr("axes", tuple) or None, op.attr("keepdim", bool, False)
    p = float("inf") if p >= _INT32.max else float("-inf") if p <= _INT32.min else p
    return _rounded(lambda y: torch.linalg.vector_norm(y, p, dims, keep), x)


@operator("MatMul", reads=("transpose_x1", "transpose_x2"))
@operator("MatMulV2", reads=("transpose_x1", "transpose_x2"), fixed={"offset_x": 0})
@operator("BatchMatMul", reads=("adj_x1", "adj_x2"))
@operator("BatchMatMulV2", reads=("adj_x1", "adj_x2"), fixed={"offset_x": 0})
def _product(op: Op, a: Tensor, b: Tensor, bias: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
    batched = op.type.startswith("Batch")
    if offset is not None or a.dim() != b.dim() or (a.dim() < 2 if batched else a.dim() != 2):
        raise GraphError(f"{op}: cannot run it on {list(a.shape)} and {list(b.shape)}, or with an offset.")
    left, right = ("adj_x1", "adj_x2") if batched else ("transpose_x1", "transpose_x2")
    x, y = wide(a), wide(b)
    x, y = x.mT if op.attr(left, bool, False) else x, y.mT if op.attr(right, bool, False) else y
    product = x @ y
    return (product if bias is None else product + wide(bias)).to(a.dtype)


def _axes(op: Op, x: Tensor, axes: Tensor) -> list[int]:
    """Dims to reduce; none for a tensor of one element and no dims."""
    dims = integers(op, axes)
    if not dims and x.dim():
        raise GraphError(f"{op}: expected axes, got none: GE's operators differ in whether that means all or none.")
    return [axis_of(op, torch.tensor(dim), x.dim()) for dim in dims]
