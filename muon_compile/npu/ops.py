"""GE operators as plain data, and what of their prototypes the checks of a graph need.

Source: the prototypes in TorchAir's ``_ge_concrete_graph/ge_apis.py``, and ``ge_ir.proto``, of which its ``ge_ir_pb2``
holds the classes.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

# dtypes by their number in ge_ir.proto's DataType, which tensor descriptors use ...
PROTO_DTYPES: Mapping[int, str] = (
    {1: "float32", 2: "float16", 3: "int8", 4: "uint8", 5: "int16", 6: "uint16", 7: "int32", 8: "int64"}
    | {9: "uint32", 10: "uint64", 11: "bool", 12: "float64", 16: "complex64", 17: "complex128", 27: "bfloat16"}
    | {32: "complex32", 34: "float8_e5m2", 35: "float8_e4m3fn"}
)
# ... and in GE's own DataType, which attributes use. Source: DataType in TorchAir's ge/_ge_graph.py.
GE_DTYPES: Mapping[int, str] = (
    {0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16", 8: "uint32"}
    | {9: "int64", 10: "uint64", 11: "float64", 12: "bool", 16: "complex64", 17: "complex128", 27: "bfloat16"}
    | {33: "complex32", 35: "float8_e5m2", 36: "float8_e4m3fn"}
)
UNKNOWN = "unknown"

INPUTS = ("Data", "RefData")
# Their result may lie in the memory of their first input: the graph engine need not run anything for them.
VIEWS = frozenset({"Bitcast", "ExpandDims", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
_COMPARISONS = frozenset({"Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"})
_LOGICAL = frozenset({"LogicalAnd", "LogicalOr", "LogicalNot"})
_TESTS = frozenset({"IsFinite", "IsInf", "IsNan"})
_BINARY = frozenset(
    {"Add", "Sub", "Mul", "RealDiv", "FloorDiv", "FloorMod", "TruncateDiv", "Maximum", "Minimum", "Pow"}
)
_BINARY |= _COMPARISONS | frozenset({"LogicalAnd", "LogicalOr", "BitwiseAnd", "BitwiseOr", "BitwiseXor"})
_MORE = frozenset({"Addcdiv", "Addcmul", "AxpyV2", "ClipByValueV2", "Lerp", "Sxpy"})
_UNARY = frozenset({"Abs", "Adds", "Cast", "Ceil", "Exp", "Expm1", "Floor", "Invert", "Log", "Log1p", "LogicalNot"})
_UNARY |= frozenset({"Muls", "Neg", "Reciprocal", "Rsqrt", "Sign", "Sqrt", "Square", "TensorMove"}) | _TESTS
_SELECTS = frozenset({"Select", "SelectV2"})
_PRODUCTS = frozenset({"BatchMatMul", "BatchMatMulV2", "MatMul", "MatMulV2"})
# They may write their result over an input of its size: element by element, or in place by design.
IN_PLACE = _BINARY | _MORE | _UNARY | _SELECTS | VIEWS | {"Axpy", "HcomAllReduce", "HcomBroadcast", "MaskedFill"}
# Which inputs must be of one dtype.
_SAME_DTYPE: Mapping[str, slice] = {
    **dict.fromkeys(_BINARY | _PRODUCTS | {"Assign", "Axpy"}, slice(0, 2)),
    **dict.fromkeys(_MORE | {"ConcatD", "Pack"}, slice(0, None)),
    **dict.fromkeys(_SELECTS, slice(1, 3)),
    **dict.fromkeys(("MaskedFill", "PadV3"), slice(0, 3, 2)),
    "ConcatV2": slice(0, -1),
}
_BOOLEAN = _COMPARISONS | _LOGICAL | _TESTS | {"ReduceAll", "ReduceAny"}
# The dtype of a result is an attribute's, or that of the second input; else that of the first.
_DTYPE_ATTRS = {"Bitcast": "type", "Cast": "dst_type", **dict.fromkeys(("Empty", "Eye", "Shape", "ShapeN"), "dtype")}
_LIKE_SECOND = _SELECTS | {"Fill"}
# ArgMaxWithValue gives indices first, then values.
_INDEXED = frozenset({"ArgMaxWithValue", "ArgMinWithValue"})

_T = TypeVar("_T")
_Kind: TypeAlias = type[_T]  # within Op ``type`` is a field


class Edge(NamedTuple):
    """An output of an operator."""

    op: str
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """dtype and shape of a tensor.

    Args:
        dtype: dtype, such as ``"float32"``, or UNKNOWN.
        shape: Shape, with -1 for a dim that is not static; None: not declared.
        exact: Whether the shape is the tensor's own; else it may be that of a view, of as many elements.
    """

    dtype: str
    shape: tuple[int, ...] | None = None
    exact: bool = True

    @property
    def elements(self) -> int | None:
        """Number of elements; None where that is not known."""
        return None if self.shape is None or min(self.shape, default=0) < 0 else math.prod(self.shape)

    def __str__(self) -> str:
        shape = "[?]" if self.shape is None else str(list(self.shape))
        return f"{self.dtype}{'' if self.exact else '~'}{shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstValue:
    """The tensor of a Const operator.

    Raises:
        ValueError: There are more or fewer bytes than the shape asks for.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * item_size(self.dtype)
        if len(self.data) != expected:
            raise ValueError(
                f"data: expected {expected} bytes for {self.dtype}{list(self.shape)}, got {len(self.data)}."
            )

    def integers(self) -> tuple[int, ...]:
        """The elements of a tensor of integers, flat.

        Raises:
            ValueError: It is of another dtype.
        """
        if not self.dtype.lstrip("u").startswith("int"):
            raise ValueError(f"expected a tensor of integers, got {self.dtype}.")
        size, signed = item_size(self.dtype), not self.dtype.startswith("u")
        runs = (self.data[at : at + size] for at in range(0, len(self.data), size))
        return tuple(int.from_bytes(run, sys.byteorder, signed=signed) for run in runs)


Attr = bool | int | float | str | bytes | ConstValue | tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator.

    Args:
        name: Unique within the graph.
        type: GE's operator type, such as ``"MatMul"``.
        inputs: What it reads, in the prototype's order; None for an optional input that is left out.
        controls: Operators that it must follow.
        attrs: Attributes by name. TorchAir's own notes, whose names start with ``_``, are left out.
        outputs: Types of what it gives; of NetOutput, types of what it is given.
    """

    name: str
    type: str
    inputs: tuple[Edge | None, ...] = ()
    controls: tuple[str, ...] = ()
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    outputs: tuple[ValueType, ...] = ()

    def attr(self, name: str, kind: _Kind[_T], default: _T | None = None) -> _T:
        """An attribute.

        Raises:
            ValueError: It is missing and has no default, or it is of another kind.
        """
        value = self.attrs.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{self}: attribute {name!r}: expected {kind.__name__}, got {value!r}.")
        return value

    def alike(self) -> tuple[Edge, ...]:
        """Those inputs that must be of one dtype."""
        return tuple(edge for edge in self.inputs[_SAME_DTYPE.get(self.type, slice(0))] if edge is not None)

    def __str__(self) -> str:
        return self.name if self.name == self.type else f"{self.name} ({self.type})"


def item_size(dtype: str) -> int:
    """Bytes of an element.

    Raises:
        ValueError: The dtype is unknown.
    """
    bits = re.search(r"\d+", dtype)
    if bits is None and dtype != "bool":
        raise ValueError(f"dtype: expected one of {sorted(GE_DTYPES.values())}, got {dtype!r}.")
    return 1 if bits is None else int(bits[0]) // 8


def inferred_dtype(op_type: str, attrs: Mapping[str, Attr], inputs: Sequence[str], index: int) -> str:
    """dtype of an output by its operator's prototype.

    Args:
        op_type: The operator's type.
        attrs: Its attributes.
        inputs: dtypes of its inputs; of one left out, UNKNOWN.
        index: Index of the output.
    """
    if op_type in _BOOLEAN:
        return "bool"
    if op_type in _INDEXED and index == 0:
        return "int32"
    if op_type in _DTYPE_ATTRS:
        number = attrs.get(_DTYPE_ATTRS[op_type])
        return GE_DTYPES.get(number, UNKNOWN) if isinstance(number, int) else UNKNOWN
    if op_type == "Range" and len(set(inputs)) > 1:
        return UNKNOWN
    at = 1 if op_type in _LIKE_SECOND else 0
    return inputs[at] if at < len(inputs) else UNKNOWN
