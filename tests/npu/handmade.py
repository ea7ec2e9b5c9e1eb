"""Graphs made by hand, without TorchAir."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muon_compile.npu.graph import GeGraph
from muon_compile.npu.ops import Attr, ConstValue, Edge, Op, ValueType

Source = str | Edge | None


def edge(source: Source) -> Edge | None:
    return Edge(source, 0) if isinstance(source, str) else source


def of(x: Tensor) -> ValueType:
    return ValueType(dtype=str(x.dtype).removeprefix("torch."), shape=tuple(x.shape))


def f32(*shape: int) -> ValueType:
    return ValueType(dtype="float32", shape=shape)


def op(
    kind: str,
    name: str,
    inputs: Sequence[Source] = (),
    outputs: ValueType | Sequence[ValueType] = (),
    controls: Sequence[str] = (),
    **attrs: Attr,
) -> Op:
    given = (outputs,) if isinstance(outputs, ValueType) else tuple(outputs)
    edges = tuple(edge(source) for source in inputs)
    return Op(name=name, type=kind, inputs=edges, controls=tuple(controls), attrs=attrs, outputs=given)


def data(index: int, name: str, value: ValueType) -> Op:
    return op("Data", name, (), value, index=index)


def const(name: str, x: Tensor) -> Op:
    content = x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)
    value = ConstValue(dtype=of(x).dtype, shape=tuple(x.shape), data=bytes(content.flatten().tolist()))
    return op("Const", name, (), of(x), value=value)


def graph(*ops: Op, outputs: Sequence[Source] = ()) -> GeGraph:
    return GeGraph(name="by hand", ops=(*ops, op("NetOutput", "end", outputs)))
