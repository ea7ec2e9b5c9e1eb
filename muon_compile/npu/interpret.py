"""Run a GE graph on CPU tensors, collectives by torch.distributed.

The reading of GE's operators is this library's own, from what TorchAir's converters make of aten's and from the
prototypes in TorchAir's ``ge_apis``; it is not CANN's. It shows what a device computes that keeps to the prototypes. It
does not show whether GE accepts a graph, what GE's own passes make of it, in which order a device runs it, or how its
kernels round.

It is strict: an operator, an attribute or a mixture of dtypes that it does not know is an error, and every result is
held against the dtype and the shape that the graph declares.

An output that is written to an input's memory is written as soon as its operator has run, the earliest that a device
may: a graph that reads the input afterwards gives wrong numbers here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from muon_compile.npu import arithmetic, communicate, rearrange
from muon_compile.npu.graph import GeGraph
from muon_compile.npu.ops import INPUTS, UNKNOWN, ConstValue, Edge, Op, ValueType
from muon_compile.npu.registry import OPERATORS, GraphError

__all__ = ["GraphError", "run"]

# Importing them fills the table.
_TABLES = (arithmetic, communicate, rearrange)


@torch.no_grad()
def run(graph: GeGraph, inputs: Sequence[Tensor], assigned: Sequence[Tensor | None] | None = None) -> list[Tensor]:
    """Run a graph once.

    Args:
        graph: The graph.
        inputs: Its inputs, by index, contiguous and on the CPU.
        assigned: For each output the input that it is written to, which is then also what is returned, or None.

    Returns:
        Its outputs.

    Raises:
        GraphError: It cannot be run, or breaks what it declares; names the operator.
    """
    return _Run(graph, inputs, assigned).outputs()


class _Run:
    def __init__(self, graph: GeGraph, inputs: Sequence[Tensor], assigned: Sequence[Tensor | None] | None) -> None:
        targets = list(assigned or [None] * len(graph.outputs))
        if len(inputs) != len(graph.inputs) or len(targets) != len(graph.outputs):
            raise GraphError(
                f"{graph.name}: expected {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, got "
                f"{len(inputs)} and {len(targets)}."
            )
        self.graph = graph
        self.inputs = inputs
        self.targets = targets
        self.values: dict[Edge, Tensor] = {}
        # Memory to write as soon as the value is there.
        self.writes: dict[Edge, list[Tensor]] = {}
        for edge, target in zip(graph.outputs, targets, strict=True):
            if target is not None:
                self.writes.setdefault(graph.source(edge), []).append(target)
        self.uses = Counter(edge for op in graph.ops for edge in op.inputs if edge is not None)

    def outputs(self) -> list[Tensor]:
        given = [one.name for one in self.graph.inputs]
        for name, x in zip(given, self.inputs, strict=True):
            self._keep(self.graph.op(name), (_checked_input(self.graph.op(name), x),))
        for name in given:
            self._write(self.graph.op(name))
        for op in self.graph.ops:
            if op.type not in (*INPUTS, "NetOutput"):
                self._keep(op, self._results(op))
                self._write(op)
                self._forget(op)
        return [self._output(edge, target) for edge, target in zip(self.graph.outputs, self.targets, strict=True)]

    def _output(self, edge: Edge, target: Tensor | None) -> Tensor:
        value = self._value(edge, "the graph's outputs")
        if target is not None:
            if target.shape != value.shape:
                raise GraphError(f"{edge.op}: expected {list(target.shape)} to write, got {list(value.shape)}.")
            return target
        return value.clone() if any(_same_memory(value, x) for x in self.inputs) else value

    def _results(self, op: Op) -> tuple[Tensor, ...]:
        if op.type == "Const":
            return (_const(op),)
        known = OPERATORS.get(op.type)
        if known is None:
            raise GraphError(f"{op}: this operator is not known; add it to muon_compile/npu, or lower without it.")
        known.check(op)
        inputs = [None if edge is None else self._value(edge, str(op)) for edge in op.inputs]
        dtypes = {str(self._value(edge, str(op)).dtype) for edge in op.alike()}
        if len(dtypes) > 1:
            raise GraphError(f"{op}: expected inputs of one dtype, got {sorted(dtypes)}.")
        try:
            result = known.run(op, *inputs)
        except GraphError:
            raise
        except Exception as error:
            shapes = [None if x is None else f"{x.dtype}{list(x.shape)}" for x in inputs]
            raise GraphError(f"{op}: failed on {shapes}: {type(error).__name__}: {error}") from error
        results = result if isinstance(result, tuple) else (result,)
        shared = self.graph.is_view(op) or op.type == "Assign"
        return tuple(_own(y, () if shared else inputs) for y in results)

    def _keep(self, op: Op, results: tuple[Tensor, ...]) -> None:
        if len(results) != len(op.outputs):
            raise GraphError(f"{op}: declares {len(op.outputs)} outputs, got {len(results)}.")
        for index, (value, declared) in enumerate(zip(results, op.outputs, strict=True)):
            _check(op, value, declared)
            self.values[Edge(op.name, index)] = value

    def _write(self, op: Op) -> None:
        for index in range(len(op.outputs)):
            edge = Edge(op.name, index)
            for target in self.writes.get(edge, ()):
                value = self.values[edge]
                # Views between the operator and the output change shape, or dtype by Bitcast, and no byte.
                there = target.view(value.dtype) if target.element_size() == value.element_size() else target
                if there.dtype != value.dtype or there.numel() != value.numel():
                    came, fits = f"{value.dtype}{list(value.shape)}", f"{target.dtype}{list(target.shape)}"
                    raise GraphError(f"{op}: writes {came} to an input of {fits}.")
                there = there.view(value.shape)
                self.values[edge] = there.copy_(value)

    def _forget(self, op: Op) -> None:
        # NetOutput's own reads are among the uses, so what the graph gives stays.
        for edge in op.inputs:
            if edge is not None:
                self.uses[edge] -= 1
                if not self.uses[edge]:
                    del self.values[edge]

    def _value(self, edge: Edge, reader: str) -> Tensor:
        if edge not in self.values:
            raise GraphError(
                f"{reader}: reads {edge.op}:{edge.output} before it is there; expected operators in order."
            )
        return self.values[edge]


def _checked_input(op: Op, x: Tensor) -> Tensor:
    if x.device.type != "cpu" or not x.is_contiguous():
        raise GraphError(
            f"{op}: expected a contiguous tensor on the CPU, got one on {x.device} of strides {x.stride()}."
        )
    return x.detach()


def _own(y: Tensor, inputs: Sequence[Tensor | None]) -> Tensor:
    """Contiguous, and in memory of its own."""
    y = y.contiguous()
    return y.clone() if any(x is not None and _same_memory(x, y) for x in inputs) else y


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() != 0


def _check(op: Op, value: Tensor, declared: ValueType) -> None:
    dtype, dims = str(value.dtype).removeprefix("torch."), declared.shape
    if dims is None:
        fits = True
    elif declared.exact:
        fits = len(dims) == value.dim() and all(d in (-1, size) for d, size in zip(dims, value.shape, strict=True))
    else:
        fits = declared.elements in (None, value.numel())
    if not fits or declared.dtype not in (dtype, UNKNOWN):
        raise GraphError(f"{op}: declares {declared}, but this is {dtype}{list(value.shape)}.")


def _const(op: Op) -> Tensor:
    value = op.attr("value", ConstValue)
    dtype = getattr(torch, value.dtype)
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=dtype).reshape(value.shape)
