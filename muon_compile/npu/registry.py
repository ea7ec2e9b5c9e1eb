"""The table of GE operators that can be run, and what their functions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muon_compile.npu.ops import GE_DTYPES, Attr, Op

# Takes the operator and its inputs, None for one left out; gives one tensor or a tuple of them.
Run = Callable[..., Tensor | tuple[Tensor, ...]]


class GraphError(RuntimeError):
    """A graph that cannot be run as it stands: names the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """How one type of operator is run.

    Args:
        run: Its function.
        reads: Attributes that the function reads.
        ignored: Attributes that change no value, such as how a collective is scheduled.
        fixed: Attributes that may only have this value, since others would mean what the function does not do.
    """

    run: Run
    reads: frozenset[str]
    ignored: frozenset[str]
    fixed: Mapping[str, Attr]

    def check(self, op: Op) -> None:
        """Refuse attributes that the function does not know, or does not handle.

        Raises:
            GraphError: There is one.
        """
        for name, value in op.attrs.items():
            if name in self.fixed and value != self.fixed[name]:
                raise GraphError(f"{op}: attribute {name!r}: only {self.fixed[name]!r} can be run, got {value!r}.")
            if name not in self.reads | self.ignored | self.fixed.keys():
                raise GraphError(f"{op}: attribute {name!r} of value {value!r} is not known.")


OPERATORS: dict[str, Operator] = {}


def operator(
    *types: str, reads: tuple[str, ...] = (), ignored: tuple[str, ...] = (), fixed: Mapping[str, Attr] | None = None
) -> Callable[[Run], Run]:
    """Register a function for these types of operator; see ``Operator``."""

    def register(run: Run) -> Run:
        for name in types:
            assert name not in OPERATORS
            OPERATORS[name] = Operator(
                run=run, reads=frozenset(reads), ignored=frozenset(ignored), fixed=dict(fixed or {})
            )
        return run

    return register


def wide(x: Tensor) -> Tensor:
    """In float32 if its elements are of 16 bits: what units of 16 bits accumulate in."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def check_floating(op: Op, *inputs: Tensor) -> None:
    """Refuse inputs of other than floating dtypes."""
    found = [str(x.dtype) for x in inputs if not x.is_floating_point()]
    if found:
        raise GraphError(f"{op}: expected floating inputs, got {', '.join(found)}.")


def check_boolean(op: Op, *inputs: Tensor) -> None:
    """Refuse inputs of other dtypes than bool."""
    found = [str(x.dtype) for x in inputs if x.dtype != torch.bool]
    if found:
        raise GraphError(f"{op}: expected bool, got {', '.join(found)}.")


def check_count(op: Op, name: str, count: int) -> None:
    """Hold an attribute that says how many there are against how many there are."""
    if op.attr(name, int) != count:
        raise GraphError(f"{op}: attribute {name!r} is {op.attr(name, int)}, but there are {count}.")


def integers(op: Op, x: Tensor) -> list[int]:
    """Elements of an input of integers, such as a shape; a lone number is a list of one."""
    if x.dtype not in (torch.int64, torch.int32):
        raise GraphError(f"{op}: expected int32 or int64 for a shape, an axis or an index, got {x.dtype}.")
    found: list[int] = x.flatten().tolist()
    return found


def axis_of(op: Op, x: Tensor, ndim: int) -> int:
    """An axis given as an input, from 0.

    Raises:
        GraphError: It is not one number, or not one of ``ndim`` dims.
    """
    found = integers(op, x)
    if len(found) != 1 or not -ndim <= found[0] < ndim:
        raise GraphError(f"{op}: expected one axis of {ndim} dims, got {found}.")
    return found[0] % ndim


def torch_dtype(op: Op, number: Any) -> torch.dtype:
    """The dtype of that number in GE.

    Raises:
        GraphError: torch has none.
    """
    name = GE_DTYPES.get(number, "")
    found = getattr(torch, name, None) if name else None
    if not isinstance(found, torch.dtype):
        raise GraphError(f"{op}: GE's dtype {number!r} has no counterpart in torch.")
    return found
