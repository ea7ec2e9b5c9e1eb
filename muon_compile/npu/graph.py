"""A GE graph as plain data: what TorchAir hands to the graph engine, parsed, and the checks that need no run.

TorchAir notes dtype and shape of what an operator of the traced graph gives; where that is read through a view, the
shape noted may be the view's. Of what lies between those operators the dtype is inferred by their prototypes, as the
graph engine does, and the shape is None.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

from muon_compile.npu.ops import (
    IN_PLACE,
    INPUTS,
    PROTO_DTYPES,
    UNKNOWN,
    VIEWS,
    Attr,
    ConstValue,
    Edge,
    Op,
    ValueType,
    inferred_dtype,
)

_PROTO_MODULE = "torchair._ge_concrete_graph.ge_ir_pb2"
# For an NPU these have no fast units, if any at all.
_WIDE = frozenset({"float64", "complex32", "complex64", "complex128"})
# TorchAir's note of a traced value's type; its shape may hold symbols.
_META = re.compile(r"Tensor\(dtype=torch\.\w+, shape=torch\.Size\(\[(.*)\]\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective of a graph.

    Args:
        name: Name of its operator.
        kind: GE's operator type, such as ``"HcomAllGather"``.
        group: Name of its group.
        elements: Elements that this rank gives; None if their shape is not declared.
        dtype: Their dtype.
        reduction: ``"sum"`` and so on, of one that reduces.
        root: Rank within the group that a broadcast comes from.
        send_counts: Elements to each rank, of an all-to-all whose counts are constants.
        recv_counts: Elements from each rank, likewise.
    """

    name: str
    kind: str
    group: str
    elements: int | None
    dtype: str
    reduction: str | None = None
    root: int | None = None
    send_counts: tuple[int, ...] | None = None
    recv_counts: tuple[int, ...] | None = None

    def __str__(self) -> str:
        parts = [self.kind, "?" if self.elements is None else str(self.elements), self.dtype, self.group]
        parts += [self.reduction] if self.reduction is not None else []
        parts += [f"from {self.root}"] if self.root is not None else []
        parts += [f"sends {list(self.send_counts)}"] if self.send_counts is not None else []
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """An input of a graph."""

    index: int
    name: str
    type: ValueType


@dataclass(frozen=True, slots=True, kw_only=True)
class GeGraph:
    """A GE graph.

    Args:
        name: Name.
        ops: Operators, in the order in which TorchAir made them.
        inputs: What it is given, by index; found.
        outputs: What it gives, in order; found.

    Raises:
        ValueError: Two operators of one name, an edge from nowhere, inputs not numbered from 0, or several NetOutputs.
    """

    name: str
    ops: tuple[Op, ...]
    inputs: tuple[GraphInput, ...] = field(init=False)
    outputs: tuple[Edge, ...] = field(init=False)
    _by_name: Mapping[str, Op] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {op.name: op for op in self.ops}
        if len(by_name) != len(self.ops):
            twice = [name for name, count in Counter(op.name for op in self.ops).items() if count > 1]
            raise ValueError(f"ops: expected one operator of each name, got several of {twice}.")
        for op in self.ops:
            nowhere = [name for name in op.controls if name not in by_name]
            for edge in op.inputs:
                if edge is not None and (edge.op not in by_name or edge.output >= len(by_name[edge.op].outputs)):
                    nowhere.append(f"{edge.op}:{edge.output}")
            if nowhere:
                raise ValueError(f"ops: {op} reads what no operator gives: {nowhere}.")
        given = [
            GraphInput(index=op.attr("index", int), name=op.name, type=op.outputs[0])
            for op in self.ops
            if op.type in INPUTS
        ]
        given.sort(key=lambda one: one.index)
        if [one.index for one in given] != list(range(len(given))):
            raise ValueError(f"ops: expected inputs numbered from 0, got {[one.index for one in given]}.")
        ends = [op for op in self.ops if op.type == "NetOutput"]
        if len(ends) > 1:
            raise ValueError(f"ops: expected one NetOutput, got {[op.name for op in ends]}.")
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "inputs", tuple(given))
        object.__setattr__(self, "outputs", tuple(edge for op in ends for edge in op.inputs if edge is not None))

    def op(self, name: str) -> Op:
        """The operator of that name; KeyError if there is none."""
        return self._by_name[name]

    def type_of(self, edge: Edge) -> ValueType:
        """Type of what an operator gives."""
        return self._by_name[edge.op].outputs[edge.output]

    def counts(self) -> dict[str, int]:
        """Number of operators by type, the most frequent first; inputs, constants and NetOutput apart."""
        silent = (*INPUTS, "Const", "NetOutput")
        return dict(Counter(op.type for op in self.ops if op.type not in silent).most_common())

    def collectives(self) -> tuple[Collective, ...]:
        """The collectives, in the graph's order."""
        return tuple(self._collective(op) for op in self.ops if op.type.startswith("Hcom"))

    def is_static(self) -> bool:
        """Whether every declared shape is known before the graph runs."""
        return all(dim >= 0 for op in self.ops for value in op.outputs for dim in value.shape or ())

    def readers(self, name: str) -> tuple[str, ...]:
        """Names of the operators that read what that one gives, NetOutput too."""
        return tuple(op.name for op in self.ops if any(edge is not None and edge.op == name for edge in op.inputs))

    def source(self, edge: Edge) -> Edge:
        """The value in whose memory this one may lie: it, or what it is a view of."""
        op = self._by_name[edge.op]
        while self.is_view(op) and op.inputs[0] is not None:
            edge = op.inputs[0]
            op = self._by_name[edge.op]
        return edge

    def is_view(self, op: Op) -> bool:
        """Whether the result of ``op`` may lie in its input's memory, for there is nothing to compute."""
        if op.type == "Cast" and op.inputs[0] is not None:
            return self.type_of(op.inputs[0]).dtype == op.outputs[0].dtype
        return op.type in VIEWS

    def hazards(self, ref_outputs: Mapping[int, int]) -> list[str]:
        """Operators that may read an input after it was overwritten.

        The memory of an input that an output is written to changes as soon as that output's operator runs. So whatever
        reads the input, itself or through a view, has to be an ancestor of this operator, by data or by control; or
        this operator itself, if it is one that may work in place.

        Args:
            ref_outputs: For the index of each output that is written to an input's memory, the index of that input.

        Returns:
            Names of the operators, in the graph's order; all writers of an input that several outputs are written to.
        """
        writers: dict[int, set[Edge]] = {}
        for output, given in ref_outputs.items():
            writers.setdefault(given, set()).add(self.source(self.outputs[output]))
        late = {edge.op for edges in writers.values() if len(edges) > 1 for edge in edges}
        bit = {op.name: 1 << position for position, op in enumerate(self.ops)}
        ancestors, readers = self._ancestors(bit), self._readers_through_views()
        for given, edges in writers.items():
            memory = self.inputs[given].name
            for writer in {edge.op for edge in edges} - {memory}:
                for reader in readers.get(memory, ()):
                    in_place = reader == writer and self._by_name[reader].type in IN_PLACE
                    if not in_place and not ancestors[writer] & bit[reader]:
                        late.add(reader)
        return [op.name for op in self.ops if op.name in late]

    def mixed_dtypes(self) -> list[str]:
        """Names of operators whose inputs must be of one dtype and are not."""
        return [op.name for op in self.ops if len({self.type_of(e).dtype for e in op.alike()} - {UNKNOWN}) > 1]

    def wide_dtypes(self) -> list[str]:
        """Names of operators that take or give float64 or complex numbers."""

        found = []
        for op in self.ops:
            types = (*op.outputs, *(self.type_of(edge) for edge in op.inputs if edge is not None))
            found += [op.name] if _WIDE & {value.dtype for value in types} else []
        return found

    def table(self) -> str:
        """The graph as text: its size, operators by type, collectives, and a line for every operator."""
        counts, collectives = self.counts(), self.collectives()
        size = f"{sum(counts.values())} operators, {len(self.inputs)} inputs, {len(self.outputs)} outputs"
        lines = [f"GE graph {self.name}: {size}, {'static' if self.is_static() else 'not static'}"]
        lines += ["", "Operators by type:", *(f"{count:8}  {name}" for name, count in counts.items())]
        lines += ["", "Collectives:" if collectives else "Collectives: none", *(f"  {one}" for one in collectives)]
        lines += ["", "Operators (~: as TorchAir notes it, for the value or for a view of it):"]
        width = max((len(op.name) for op in self.ops), default=0)
        for op in self.ops:
            reads = ["-" if edge is None else f"{edge.op}:{edge.output}" for edge in op.inputs]
            after = f"  after {', '.join(op.controls)}" if op.controls else ""
            gives = "" if op.type == "NetOutput" else f" -> {', '.join(map(str, op.outputs))}"
            lines.append(f"  {op.name:{width}}  {op.type}({', '.join(reads)}){gives}{after}")
        return "\n".join(lines)

    def _collective(self, op: Op) -> Collective:
        value = ValueType(dtype=UNKNOWN) if op.inputs[0] is None else self.type_of(op.inputs[0])
        counts = op.type == "HcomAllToAllV"
        return Collective(
            name=op.name,
            kind=op.type,
            group=op.attr("group", str),
            elements=value.elements,
            dtype=value.dtype,
            reduction=op.attr("reduction", str) if "reduction" in op.attrs else None,
            root=op.attr("root_rank", int) if "root_rank" in op.attrs else None,
            send_counts=self._integers(op.inputs[1]) if counts else None,
            recv_counts=self._integers(op.inputs[3]) if counts else None,
        )

    def _integers(self, edge: Edge | None) -> tuple[int, ...] | None:
        value = None if edge is None else self._by_name[edge.op].attrs.get("value")
        return value.integers() if isinstance(value, ConstValue) else None

    def _ancestors(self, bit: Mapping[str, int]) -> dict[str, int]:
        """Each operator's ancestors, as the sum of their bits."""
        before = {op.name: {*op.controls, *(edge.op for edge in op.inputs if edge is not None)} for op in self.ops}
        ancestors: dict[str, int] = {}
        for name in TopologicalSorter(before).static_order():
            ancestors[name] = 0
            for other in before[name]:
                ancestors[name] |= ancestors[other] | bit[other]
        return ancestors

    def _readers_through_views(self) -> dict[str, list[str]]:
        """Operators that read each one's memory; views themselves read nothing."""
        readers: dict[str, list[str]] = {}
        for op in self.ops:
            if not self.is_view(op):
                for name in {self.source(edge).op for edge in op.inputs if edge is not None}:
                    readers.setdefault(name, []).append(op.name)
        return readers


def parse(serialized: bytes) -> GeGraph:
    """The one graph of a serialized ``ModelDef``.

    Raises:
        RuntimeError: TorchAir is not loaded, so there is nothing to read it with.
        ValueError: It is not one graph, or one of parts that this does not know.
    """
    module = sys.modules.get(_PROTO_MODULE)
    if module is None:
        raise RuntimeError(f"expected TorchAir to be loaded, since {_PROTO_MODULE} reads its graphs; load it first.")
    model = module.ModelDef()
    model.ParseFromString(serialized)
    if len(model.graph) != 1:
        raise ValueError(f"serialized: expected one graph, got {len(model.graph)}; subgraphs are not read.")
    ops: dict[str, Op] = {}
    for proto in model.graph[0].op:
        if proto.subgraph_name:
            raise ValueError(f"serialized: {proto.name} ({proto.type}) runs a subgraph; those are not read.")
        ops[proto.name] = _op(proto, ops)
    return GeGraph(name=model.graph[0].name, ops=tuple(ops.values()))


def _op(proto: Any, earlier: Mapping[str, Op]) -> Op:
    inputs: list[Edge | None] = []
    controls = []
    for text in proto.input:
        name, _, index = text.rpartition(":")
        if index == "-1":
            controls.append(name)
        else:
            inputs.append(Edge(name, int(index)) if text else None)
    attrs = {name: _attr(value) for name, value in proto.attr.items() if name[0] != "_" and value.WhichOneof("value")}
    if proto.type == "NetOutput":
        outputs = tuple(_value_type(desc) for desc in proto.input_desc)
    else:
        # An operator further down, or none: TorchAir lists operators as it makes them, so nobody reads those.
        known = [
            earlier[edge.op].outputs[edge.output].dtype if edge and edge.op in earlier else UNKNOWN for edge in inputs
        ]
        inferred = [inferred_dtype(proto.type, attrs, known, index) for index in range(len(proto.output_desc))]
        outputs = tuple(_value_type(desc, dtype) for desc, dtype in zip(proto.output_desc, inferred, strict=True))
        if proto.type in (*INPUTS, "Const", "ConstPlaceHolder"):
            outputs = tuple(ValueType(dtype=_dtype(d), shape=tuple(d.shape.dim)) for d in proto.output_desc)
    return Op(
        name=proto.name,
        type=proto.type,
        inputs=tuple(inputs),
        controls=tuple(controls),
        attrs=attrs,
        outputs=outputs,
    )


def _value_type(desc: Any, inferred: str = UNKNOWN) -> ValueType:
    """As noted from the traced value, else as inferred: the descriptor's dtype is float32 where nobody set it."""
    meta = _META.match(desc.attr["_meta"].s.decode()) if "_meta" in desc.attr else None
    if meta is None:
        return ValueType(dtype=inferred)
    dims = [dim.strip() for dim in meta[1].split(",") if dim.strip()]
    return ValueType(dtype=_dtype(desc), shape=tuple(int(d) if d.isdecimal() else -1 for d in dims), exact=False)


def _dtype(desc: Any) -> str:
    return PROTO_DTYPES.get(desc.dtype, UNKNOWN)


def _attr(value: Any) -> Attr:
    kind = value.WhichOneof("value")
    content = getattr(value, kind)
    if kind == "s":
        return _text(content)
    if kind == "t":
        desc = content.desc
        return ConstValue(dtype=_dtype(desc), shape=tuple(desc.shape.dim), data=content.data)
    if kind == "list":
        filled = [name for name in ("s", "i", "f", "b", "bt", "dt") if getattr(content, name)]
        items = getattr(content, filled[0]) if filled else ()
        return tuple(_text(item) if isinstance(item, bytes) else item for item in items)
    if kind == "list_list_int":
        return tuple(tuple(row.list_i) for row in content.list_list_i)
    if kind == "list_list_float":
        return tuple(tuple(row.list_f) for row in content.list_list_f)
    return content if kind in ("i", "f", "b", "bt", "dt") else str(content)


def _text(content: bytes) -> str | bytes:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content
