"""GE operators that make tensors, or move what is in them. See ``interpret`` for whose reading this is."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.npu.ops import Op
from muon_compile.npu.registry import GraphError, axis_of, check_count, integers, operator, torch_dtype


@operator("Identity", "TensorMove")
def _same(op: Op, x: Tensor) -> Tensor:
    return x


@operator("Assign", ignored=("use_locking",), fixed={"validate_shape": True})
def _assign(op: Op, ref: Tensor, value: Tensor) -> Tensor:
    if ref.shape != value.shape:
        raise GraphError(f"{op}: expected a value of shape {list(ref.shape)}, got {list(value.shape)}.")
    return ref.copy_(value)


@operator("Bitcast", reads=("type",), fixed={"keep_dim": False})
def _bitcast(op: Op, x: Tensor) -> Tensor:
    dtype = torch_dtype(op, op.attr("type", int))
    if dtype.itemsize != x.element_size():
        raise GraphError(f"{op}: can only be run between dtypes of one size, got {x.dtype} to {dtype}.")
    return x.view(dtype)


@operator("Reshape", fixed={"axis": 0, "num_axes": -1})
def _reshape(op: Op, x: Tensor, shape: Tensor) -> Tensor:
    dims = integers(op, shape)
    if 0 in dims and x.numel():
        raise GraphError(f"{op}: got the shape {dims} for a tensor that is not empty; what 0 means there is not known.")
    return x.reshape(dims)


@operator("Squeeze", reads=("axis",))
def _squeeze(op: Op, x: Tensor) -> Tensor:
    axes = op.attr("axis", tuple, ()) or tuple(dim for dim, size in enumerate(x.shape) if size == 1)
    if any(x.shape[axis] != 1 for axis in axes):
        raise GraphError(f"{op}: expected dims of size 1 at {list(axes)}, got a tensor of shape {list(x.shape)}.")
    return x.squeeze(axes)


@operator("Unsqueeze", reads=("axes",))
def _unsqueeze(op: Op, x: Tensor) -> Tensor:
    axes = op.attr("axes", tuple, ())
    for axis in sorted(axis % (x.dim() + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("ExpandDims")
def _expand_dims(op: Op, x: Tensor, axis: Tensor) -> Tensor:
    return x.unsqueeze(axis_of(op, axis, x.dim() + 1))


@operator("Transpose")
def _transpose(op: Op, x: Tensor, order: Tensor) -> Tensor:
    return x.permute(integers(op, order))


@operator("Pack", reads=("axis", "N"))
def _pack(op: Op, *inputs: Tensor) -> Tensor:
    check_count(op, "N", len(inputs))
    return torch.stack(inputs, op.attr("axis", int, 0))


@operator("Unpack", reads=("axis", "num"))
def _unpack(op: Op, x: Tensor) -> tuple[Tensor, ...]:
    parts = x.unbind(op.attr("axis", int, 0))
    check_count(op, "num", len(parts))
    return parts


@operator("ConcatV2", reads=("N",))
def _concat(op: Op, *inputs: Tensor) -> Tensor:
    *parts, axis = inputs
    check_count(op, "N", len(parts))
    return torch.cat(parts, axis_of(op, axis, parts[0].dim()))


@operator("ConcatD", reads=("concat_dim", "N"))
def _concat_number(op: Op, *inputs: Tensor) -> Tensor:
    check_count(op, "N", len(inputs))
    return torch.cat(inputs, op.attr("concat_dim", int))


@operator("SplitV", reads=("num_split",))
def _split(op: Op, x: Tensor, sizes: Tensor, axis: Tensor) -> tuple[Tensor, ...]:
    dim, parts = axis_of(op, axis, x.dim()), integers(op, sizes)
    if parts.count(-1) == 1:  # the one that takes what is left
        parts[parts.index(-1)] = x.shape[dim] - sum(parts) - 1
    if min(parts, default=0) < 0 or sum(parts) != x.shape[dim]:
        raise GraphError(f"{op}: expected sizes that make up {x.shape[dim]}, got {integers(op, sizes)}.")
    check_count(op, "num_split", len(parts))
    return tuple(torch.split_with_sizes(x, parts, dim))


_MASKS = dict.fromkeys(("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"), 0)


@operator("StridedSliceV2", fixed=_MASKS)
def _slice(
    op: Op, x: Tensor, begin: Tensor, end: Tensor, axes: Tensor | None = None, strides: Tensor | None = None
) -> Tensor:
    starts, stops = integers(op, begin), integers(op, end)
    dims = list(range(len(starts))) if axes is None else integers(op, axes)
    steps = [1] * len(starts) if strides is None else integers(op, strides)
    if not len(starts) == len(stops) == len(dims) == len(steps) or min(steps, default=1) < 1:
        raise GraphError(f"{op}: cannot run a slice from {starts} to {stops} by {steps} on axes {dims}.")
    where = [slice(None)] * x.dim()
    for dim, start, stop, step in zip(dims, starts, stops, steps, strict=True):
        where[dim] = slice(start, stop, step)
    return x[tuple(where)]


@operator("GatherV2", reads=("negative_index_support",), ignored=("is_preprocessed",), fixed={"batch_dims": 0})
def _gather(op: Op, x: Tensor, indices: Tensor, axis: Tensor) -> Tensor:
    return _taken(op, x, indices, axis_of(op, axis, x.dim()))


@operator(
    "Gather",
    reads=("negative_index_support",),
    ignored=("is_preprocessed", "validate_indices"),
    fixed={"batch_dims": 0},
)
def _gather_rows(op: Op, x: Tensor, indices: Tensor) -> Tensor:
    return _taken(op, x, indices, 0)


def _taken(op: Op, x: Tensor, indices: Tensor, dim: int) -> Tensor:
    chosen, size = integers(op, indices), x.shape[dim]
    lowest = -size if op.attr("negative_index_support", bool, False) else 0
    if any(not lowest <= index < size for index in chosen):
        raise GraphError(f"{op}: expected indices from {lowest} to below {size}, got {chosen}.")
    found = x.index_select(dim, torch.tensor([index % size for index in chosen], dtype=torch.int64))
    return found.reshape(*x.shape[:dim], *indices.shape, *x.shape[dim + 1 :])


@operator("BroadcastTo")
def _broadcast(op: Op, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(integers(op, shape))


@operator("Tile")
def _tile(op: Op, x: Tensor, multiples: Tensor) -> Tensor:
    times = integers(op, multiples)
    if len(times) != x.dim():
        raise GraphError(f"{op}: expected {x.dim()} multiples, got {times}.")
    return x.repeat(times)


@operator("PadV3", fixed={"mode": "constant", "paddings_contiguous": True})
def _pad(op: Op, x: Tensor, paddings: Tensor, value: Tensor | None = None) -> Tensor:
    ends = integers(op, paddings)
    if len(ends) != 2 * x.dim() or min(ends, default=0) < 0:
        raise GraphError(f"{op}: expected what to add before and after each of {x.dim()} dims, got {ends}.")
    shape = [ends[2 * dim] + size + ends[2 * dim + 1] for dim, size in enumerate(x.shape)]
    padded = x.new_zeros(shape) if value is None else value.reshape(()).expand(shape).clone()
    inner = padded
    for dim, size in enumerate(x.shape):
        inner = inner.narrow(dim, ends[2 * dim], size)
    inner.copy_(x)
    return padded


@operator("Fill")
def _fill(op: Op, shape: Tensor, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise GraphError(f"{op}: expected one value, got {value.numel()}.")
    return value.reshape(()).expand(integers(op, shape))


@operator("Range")
def _range(op: Op, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(start.dtype, limit.dtype), delta.dtype)
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=dtype)


@operator("ZerosLike")
def _zeros_like(op: Op, x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@operator("OnesLike")
def _ones_like(op: Op, x: Tensor) -> Tensor:
    return torch.ones_like(x)


@operator("Empty", reads=("dtype",), fixed={"init": False})
def _empty(op: Op, shape: Tensor) -> Tensor:
    # Whoever reads it should notice.
    made = torch.empty(integers(op, shape), dtype=torch_dtype(op, op.attr("dtype", int)))
    if made.dtype == torch.bool:
        return made.fill_(True)
    return made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max)


@operator("Shape", reads=("dtype",))
def _shape(op: Op, x: Tensor) -> Tensor:
    return torch.tensor(x.shape, dtype=torch_dtype(op, op.attr("dtype", int, 3)))


@operator("Tril", "Triu", reads=("diagonal",))
def _triangle(op: Op, x: Tensor) -> Tensor:
    function = torch.tril if op.type == "Tril" else torch.triu
    return function(x, op.attr("diagonal", int, 0))


@operator("AsStrided")
def _as_strided(op: Op, x: Tensor, size: Tensor, stride: Tensor, offset: Tensor) -> Tensor:
    (start,) = integers(op, offset)
    return x.contiguous().flatten().as_strided(integers(op, size), integers(op, stride), start)
