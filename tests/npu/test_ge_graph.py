"""A GE graph's own checks, on graphs made by hand."""

from __future__ import annotations

import sys

import pytest
import torch

from muon_compile.npu import graph as ge
from muon_compile.npu import stand_in
from muon_compile.npu.ops import ConstValue, Edge, ValueType
from tests.npu.handmade import Source, const, data, f32, graph, op

S = f32(2, 2)
P, G = data(0, "p", S), data(1, "g", S)


def hazards(*ops: ge.Op, outputs: list[Source], ref: dict[int, int]) -> list[str]:
    return graph(P, G, *ops, outputs=outputs).hazards(ref)


def test_a_reader_that_comes_before_the_writer_by_data_is_safe() -> None:
    ops = [op("Mul", "m", ["p", "g"], S), op("Sub", "new", ["m", "p"], S)]
    assert hazards(*ops, outputs=["new"], ref={0: 0}) == []


def test_a_reader_that_only_stands_before_the_writer_is_not() -> None:
    ops = [op("Mul", "other", ["p", "g"], S), op("Sub", "new", ["p", "g"], S)]
    assert hazards(*ops, outputs=["new", "other"], ref={0: 0}) == ["other"]
    assert hazards(*ops, outputs=["new", "other"], ref={}) == []
    assert hazards(*ops, outputs=["new", "other"], ref={1: 0, 0: 1}) == ["other", "new"]  # each reads both


def test_a_control_edge_orders_too() -> None:
    ops = [op("Mul", "other", ["p", "g"], S), op("Sub", "new", ["p", "g"], S, controls=["other"])]
    assert hazards(*ops, outputs=["new", "other"], ref={0: 0}) == []


@pytest.mark.parametrize("view", ["Reshape", "Unsqueeze", "Bitcast", "Identity"])
def test_a_reader_through_a_view_reads_the_same_memory(view: str) -> None:
    ops = [op(view, "v", ["p"], S), op("Sub", "new", ["g", "g"], S), op("Neg", "late", ["v"], S)]
    assert hazards(*ops, outputs=["new", "late"], ref={0: 0}) == ["late"]


def test_a_copy_is_read_safely_once_it_was_made() -> None:
    ops = [op("TensorMove", "kept", ["p"], S), op("Neg", "late", ["kept"], S)]
    ops.append(op("Sub", "new", ["g", "g"], S, controls=["kept"]))
    assert hazards(*ops, outputs=["new", "late"], ref={0: 0}) == []


def test_the_writer_is_what_stands_behind_views_of_the_output() -> None:
    """A cast to the same dtype and a reshape have nothing to compute: p is written when ``new`` runs."""
    ops = [op("Sub", "new", ["g", "g"], S), op("Cast", "cast", ["new"], S), op("Reshape", "shaped", ["cast"], S)]
    ops += [op("Neg", "late", ["p"], S), op("Neg", "after", ["shaped"], S)]
    assert hazards(*ops, outputs=["shaped", "late", "after"], ref={0: 0}) == ["late"]
    # Ordered before the views, and yet after the writer.
    ops[1] = op("Cast", "cast", ["new"], S, controls=["late"])
    assert hazards(*ops, outputs=["shaped", "late", "after"], ref={0: 0}) == ["late"]
    ops[0] = op("Sub", "new", ["g", "g"], S, controls=["late"])
    assert hazards(*ops, outputs=["shaped", "late", "after"], ref={0: 0}) == []


@pytest.mark.parametrize(
    ("kind", "late"), [("Neg", []), ("HcomAllReduce", []), ("Transpose", ["new"]), ("Pack", ["new"])]
)
def test_an_operator_may_overwrite_what_it_reads_if_it_works_in_place(kind: str, late: list[str]) -> None:
    assert hazards(op(kind, "new", ["p"], S), outputs=["new"], ref={0: 0}) == late


def test_two_inputs_cannot_be_swapped() -> None:
    assert hazards(outputs=["g", "p"], ref={0: 0, 1: 1}) == ["end"]


def test_two_outputs_written_to_one_input() -> None:
    ops = [op("Neg", "a", ["g"], S), op("Abs", "b", ["g"], S)]
    assert hazards(*ops, outputs=["a", "b"], ref={0: 0, 1: 0}) == ["a", "b"]


def test_hazards_of_many_operators() -> None:
    """A chain as long as that of a large step; far from quadratic in its length."""
    names = [f"n{i}" for i in range(3000)]
    ops = [op("Add", name, [before, "g"], S) for name, before in zip(names, ["p", *names], strict=False)]
    assert hazards(*ops, outputs=[names[-1], names[0]], ref={0: 0}) == []
    assert hazards(*ops, outputs=[names[-1], names[0]], ref={1: 1}) == names[1:]


def test_mixed_dtypes() -> None:
    half = ValueType(dtype="bfloat16", shape=(2, 2))
    found = graph(
        P,
        data(1, "h", half),
        data(2, "c", ValueType(dtype="bool", shape=(2, 2))),
        op("Mul", "mul", ["p", "h"], S),
        op("SelectV2", "select", ["c", "p", "h"], S),
        op("SelectV2", "fine", ["c", "p", "p"], S),
        op("BatchMatMul", "product", ["h", "p"], S),
        op("AxpyV2", "axpy", ["p", "p", "h"], S),
        op("Pack", "pack", ["p", "h"], f32(2, 2, 2)),
        op("ConcatV2", "cat", ["p", "p", "i"], f32(4, 2)),
        const("i", torch.tensor(0)),
        op("Neg", "unknown", ["p"], ValueType(dtype="unknown")),
        op("Add", "not_told", ["unknown", "h"], half),
    )
    assert found.mixed_dtypes() == ["mul", "select", "product", "axpy", "pack"]


def test_wide_dtypes() -> None:
    wide = ValueType(dtype="float64", shape=(2, 2))
    ops = [op("Cast", "to", ["p"], wide), op("Cast", "back", ["to"], S), op("Neg", "n", ["back"], S)]
    assert graph(P, *ops, outputs=["n"]).wide_dtypes() == ["to", "back"]


def test_static() -> None:
    assert graph(P, op("Neg", "n", ["p"], ValueType(dtype="float32"))).is_static()
    assert not graph(P, op("Neg", "n", ["p"], f32(-1, 2))).is_static()


def test_collectives_in_order() -> None:
    counts = {"s": [3, 1], "sd": [0, 3], "r": [2, 2], "rd": [0, 2]}
    group = "tag=ptd:0;rank_list=0,1"
    found = graph(
        P,
        *(const(name, torch.tensor(value)) for name, value in counts.items()),
        op("HcomAllToAllV", "v", ["p", *counts], S, group=group),
        op("HcomBroadcast", "b", ["p"], S, group=group, root_rank=1, fusion=0, fusion_id=-1),
        op("HcomAllReduce", "r2", ["v"], ValueType(dtype="float32"), group=group, reduction="max", fusion=0),
        op("HcomAllGather", "g", ["r2"], f32(8), group=group, rank_size=2, fusion=0),
    )
    to_all, broadcast, reduce, gather = found.collectives()
    assert (to_all.kind, to_all.send_counts, to_all.recv_counts, to_all.elements) == (
        "HcomAllToAllV",
        (3, 1),
        (2, 2),
        4,
    )
    assert (broadcast.kind, broadcast.root, broadcast.elements, broadcast.dtype) == ("HcomBroadcast", 1, 4, "float32")
    assert (reduce.reduction, reduce.group, reduce.root) == ("max", group, None)
    assert (gather.elements, gather.send_counts) == (None, None)
    lines = found.table().splitlines()
    assert "GE graph by hand: 4 operators, 1 inputs, 0 outputs, static" in lines
    assert [line for line in lines if line.lstrip().startswith("Hcom")] == [f"  {one}" for one in found.collectives()]


def test_counts_and_readers() -> None:
    ops = [op("Abs", "a", ["p"], S), op("Neg", "b", ["a"], S), op("Neg", "c", ["a"], S)]
    found = graph(P, *ops, outputs=["c", "a"])
    assert list(found.counts().items()) == [("Neg", 2), ("Abs", 1)]
    assert found.readers("a") == ("b", "c", "end")
    assert found.outputs == (Edge("c", 0), Edge("a", 0))
    assert [(one.index, one.name) for one in found.inputs] == [(0, "p")]


@pytest.mark.parametrize(
    ("ops", "says"),
    [
        ([P, P], "several of"),
        ([op("Neg", "n", ["p"], S)], r"p:0"),
        ([P, op("Neg", "n", [Edge("p", 1)], S)], r"p:1"),
        ([P, op("Neg", "n", ["p"], S, controls=["q"])], "'q'"),
        ([data(1, "p", S)], "numbered from 0"),
        ([op("NetOutput", "other")], "one NetOutput"),
    ],
)
def test_a_graph_that_does_not_hang_together(ops: list[ge.Op], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        graph(*ops)


def test_a_constant_has_the_bytes_of_its_shape() -> None:
    with pytest.raises(ValueError, match="expected 16 bytes for float32\\[4\\], got 12"):
        ConstValue(dtype="float32", shape=(4,), data=bytes(12))
    assert ConstValue(
        dtype="int32", shape=(2,), data=(-3).to_bytes(4, sys.byteorder, signed=True) + bytes(4)
    ).integers() == (
        -3,
        0,
    )
    with pytest.raises(ValueError, match="integers"):
        ConstValue(dtype="float32", shape=(), data=bytes(4)).integers()


def test_attributes_are_of_their_kind() -> None:
    found = op("Pack", "x", axis=1, keep=True)
    assert (found.attr("axis", int), found.attr("keep", bool), found.attr("missing", int, 4)) == (1, True, 4)
    for name, kind in (("axis", bool), ("keep", int), ("missing", int)):
        with pytest.raises(ValueError, match=f"attribute '{name}'"):
            found.attr(name, kind)


def test_without_torchair() -> None:
    assert "torchair" not in sys.modules
    assert stand_in.installed() is None
    with pytest.raises(RuntimeError, match="TorchAir to be loaded"):
        ge.parse(b"")
