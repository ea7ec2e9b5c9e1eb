"""Our reading of GE's operators: what TorchAir makes of small functions runs like eager; all else is refused."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muon_compile.npu.interpret import GraphError, run
from muon_compile.npu.ops import ConstValue, Edge, Op, ValueType
from tests.dist.ranks import Ranks
from tests.npu import lowered
from tests.npu.handmade import const, data, f32, graph, of, op
from tests.npu.sources import sources

# bfloat16 is what takes the most conversions; the oldest and the middle TorchAir are there for what differs.
VERSIONS = {"2.13.0": lowered.DTYPES, "2.12.0": ("bfloat16",), "2.10.0": ("bfloat16",)}
# Of the largest element. Eager keeps Python's numbers wide; TorchAir rounds all but factors to the tensor's dtype.
TOLERANCES = {"float32": 1e-6, "bfloat16": 8e-3}
REFUSED = {"baddbmm": "expected inputs of one dtype"}
NO_CONVERTER = {("2.10.0", "bits"): "view.dtype ge_converter is not implemented"}

Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    """What ``tests.npu.lowered`` finds with each TorchAir, all at the same time."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as scratch:
        started: dict[str, subprocess.Popen[str]] = {}
        for version, folder in {version: sources(version) for version in VERSIONS}.items():
            command = [sys.executable, "-m", "tests.npu.lowered", folder, f"{scratch}/{version}.json"]
            started[version] = subprocess.Popen(
                [*command, *VERSIONS[version]],
                cwd=root,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )

        @functools.cache
        def result(version: str) -> dict[str, Any]:
            said, _ = started[version].communicate()
            assert started[version].returncode == 0, said[-3000:]
            loaded: dict[str, Any] = json.loads(Path(scratch, f"{version}.json").read_text(encoding="utf-8"))
            return loaded | {"said": said}

        yield result
        for process in started.values():
            process.kill()
            process.wait()


@pytest.mark.npu
@pytest.mark.timeout(300)  # the first time every TorchAir is fetched, and Python compiles it
@pytest.mark.parametrize("name", lowered.CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_torchair_lowers_runs_like_eager(found: Found, version: str, name: str) -> None:
    for dtype, case in found(version)["cases"][name].items():
        refusal = REFUSED.get(name) or NO_CONVERTER.get((version, name))
        if refusal:
            assert refusal in case["error"]
            assert bool(case["mixed"]) == (name in REFUSED)
            continue
        assert "error" not in case, case["error"]
        assert case["graphs"] == [1, 1, 1]  # loaded, compiled, run
        assert case["faults"] == []
        if name == "read_after_write":
            assert case["difference"] > 0.1
            assert len(case["hazards"]) == 1
        else:
            assert case["difference"] <= TOLERANCES[dtype]
            assert case["hazards"] == []


@pytest.mark.npu
@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_leaves_the_process_alone(found: Found, version: str) -> None:
    seen = found(version)
    assert seen["said"].endswith("done\n")  # nothing is said at exit
    assert seen["handlers_kept"]
    assert seen["options"]["ge.exec.staticMemoryPolicy"] == "2"


@pytest.mark.npu
@pytest.mark.parametrize("version", VERSIONS)
def test_operators_and_collectives_of_a_lowered_graph(found: Found, version: str) -> None:
    cases = found(version)["cases"]
    assert cases["newton_schulz"]["bfloat16"]["operators"]["BatchMatMul"] == 3
    kinds = [line.split()[0] for line in cases["collectives"]["bfloat16"]["collectives"]]
    assert kinds == ["HcomAllGather", "HcomReduceScatter", "HcomAllReduce", "HcomBroadcast", "HcomAllToAllV"]
    assert all(line.split()[1:3] == ["24", "bfloat16"] for line in cases["collectives"]["bfloat16"]["collectives"])


# -- Refusals ----------------------------------------------------------------------------------------------------------

S = f32(2, 2)
P, G = data(0, "p", S), data(1, "g", S)
X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
Y = torch.tensor([[0.5, 0.25], [-1.0, 2.0]])


def one(*ops: Op, inputs: tuple[Tensor, ...] = (X, Y), last: str = "x") -> Tensor:
    given = [data(index, "pg"[index], of(x)) for index, x in enumerate(inputs)]
    return run(graph(*given, *ops, outputs=[last]), inputs)[0]


@pytest.mark.parametrize(
    ("ops", "says"),
    [
        ([op("Conjure", "x", ["p"], S)], r"^x \(Conjure\): this operator is not known"),
        ([op("Neg", "x", ["p"], S, mode="fast")], r"^x \(Neg\): attribute 'mode'"),
        ([op("Log", "x", ["p"], S, base=2.0)], r"attribute 'base': only -1.0"),
        ([op("LpNormV2", "x", ["p"], f32(), p=2.0, epsilon=1e-12)], r"attribute 'epsilon'"),
        ([op("Pack", "x", ["p", "g"], f32(2, 2, 2), N=3)], r"attribute 'N' is 3, but there are 2"),
        ([op("Cast", "x", ["p"], S, dst_type=99)], r"dtype 99"),
        ([op("Cast", "b", ["p"], of(X.bfloat16()), dst_type=27), op("Mul", "x", ["p", "b"], S)], r"\(Mul\).*one dtype"),
        ([op("Neg", "x", ["p"], ValueType(dtype="bfloat16"))], r"declares bfloat16\[\?\], but this is float32\[2, 2\]"),
        ([op("Neg", "x", ["p"], f32(4, 1))], r"declares float32\[4, 1\]"),
        ([op("Neg", "x", ["p"], ValueType(dtype="float32", shape=(3, 1), exact=False))], r"declares float32~\[3, 1\]"),
        ([op("Neg", "x", ["p"], [S, S])], r"declares 2 outputs, got 1"),
        ([op("Neg", "x", ["later"], S), op("Neg", "later", ["p"], S)], r"later:0 before it is there"),
        ([op("LogicalNot", "x", ["p"], S)], r"expected bool"),
        ([op("BitwiseAnd", "x", ["p", "p"], S)], r"expected integers"),
        ([op("MatMul", "x", ["p", "g"], S, transpose_x1=1)], r"transpose_x1.*expected bool"),
        ([const("a", torch.tensor([0.5])), op("ReduceSum", "x", ["p", "a"], f32(2))], r"expected int32 or int64"),
        ([const("a", torch.tensor([], dtype=torch.int64)), op("ReduceSum", "x", ["p", "a"], S)], r"expected axes"),
        (
            [const("a", torch.tensor(2)), op("ExpandDims", "x", ["p", "a"], f32(2, 2, 1)), op("Neg", "y", ["x"])],
            r"y \(",
        ),
        ([const("a", torch.tensor(3)), op("ExpandDims", "x", ["p", "a"], f32(2, 2, 1))], r"one axis of 3 dims"),
        ([const("a", torch.tensor([4, 0])), op("Reshape", "x", ["p", "a"], S)], r"what 0 means"),
        ([const("a", torch.tensor([3, 2])), op("Reshape", "x", ["p", "a"], S)], r"^x \(Reshape\): failed on"),
        ([op("Bitcast", "x", ["p"], S, type=27)], r"dtypes of one size"),
        ([op("HcomAllReduce", "x", ["p"], S, group="hccl_world", reduction="sum")], r"named by tag and ranks"),
        ([op("HcomAllReduce", "x", ["p"], S, group="tag=;rank_list=0", reduction="sum")], r"to be initialized"),
    ],
)
def test_what_is_not_known_is_refused(ops: list[Op], says: str) -> None:
    with pytest.raises(GraphError, match=says):
        one(*ops)


def test_inputs_are_held_against_what_the_graph_declares() -> None:
    whole = graph(P, G, op("Sub", "x", ["p", "g"], S), outputs=["x"])
    for wrong, says in (
        ([X], "2 inputs"),
        ([X, Y[0]], r"g \(Data\): declares float32\[2, 2\]"),
        ([X, Y.double()], r"g \(Data\)"),
        ([X, Y.mT], r"g \(Data\): expected a contiguous"),
        ([X, Y.to("meta")], r"on the CPU"),
    ):
        with pytest.raises(GraphError, match=says):
            run(whole, wrong)
    assert torch.equal(run(whole, [X, Y])[0], X - Y)


# -- Memory ------------------------------------------------------------------------------------------------------------


def test_an_input_is_written_as_soon_as_the_operator_has_run() -> None:
    ops = [op("Mul", "new", ["p", "p"], S), op("Sub", "late", ["p", "g"], S)]
    p = X.clone()
    new, late = run(graph(P, G, *ops, outputs=["new", "late"]), [p, Y], [p, None])
    assert new is p
    assert torch.equal(p, X * X)
    assert torch.equal(late, X * X - Y)
    (_, late) = run(graph(P, G, *ops, outputs=["new", "late"]), [X.clone(), Y])
    assert torch.equal(late, X - Y)


def test_it_is_written_by_the_operator_behind_the_views() -> None:
    shape = const("shape", torch.tensor([4]))
    back = const("back", torch.tensor([2, 2]))
    ops = [shape, back, op("Reshape", "flat", ["g", "shape"], f32(4)), op("Neg", "new", ["flat"], f32(4))]
    ops += [op("Sub", "late", ["p", "g"], S), op("Reshape", "end_of_it", ["new", "back"], S)]
    p = X.clone()
    _, late = run(graph(P, G, *ops, outputs=["end_of_it", "late"]), [p, Y], [p, None])
    assert torch.equal(p, -Y)
    assert torch.equal(late, -Y - Y)


def test_of_two_inputs_that_are_swapped_one_is_lost() -> None:
    p, g = X.clone(), Y.clone()
    run(graph(P, G, outputs=["g", "p"]), [p, g], [p, g])
    assert torch.equal(p, g)


def test_a_value_that_lies_in_the_memory_of_an_input_changes_with_it() -> None:
    ops = [op("Neg", "first", ["g"], S), op("Abs", "second", ["g"], S), op("Neg", "late", ["first"], S)]
    p = X.clone()
    late = run(graph(P, G, *ops, outputs=["first", "second", "late"]), [p, Y], [p, p, None])[2]
    assert torch.equal(late, -Y.abs())


def test_a_copy_does_not_change_with_what_it_was_made_of() -> None:
    ops = [op("TensorMove", "kept", ["p"], S), op("Neg", "new", ["g"], S), op("Neg", "late", ["kept"], S)]
    p = X.clone()
    late = run(graph(P, G, *ops, outputs=["new", "late"]), [p, Y], [p, None])[1]
    assert torch.equal(late, -X)
    assert torch.equal(p, -Y)


def test_outputs_have_memory_of_their_own() -> None:
    p = X.clone()
    same, moved = run(graph(P, op("Identity", "i", ["p"], S), op("TensorMove", "m", ["p"], S), outputs=["i", "m"]), [p])
    p.zero_()
    assert torch.equal(same, X)
    assert torch.equal(moved, X)


def test_a_value_of_another_size_is_not_written() -> None:
    p = X.clone()
    half = op("Cast", "x", ["p"], ValueType(dtype="bfloat16"), dst_type=27)
    with pytest.raises(GraphError, match=r"x \(Cast\): writes torch.bfloat16"):
        run(graph(P, half, outputs=["x"]), [p], [p])
    assert torch.equal(p, X)


# -- Numbers -----------------------------------------------------------------------------------------------------------


def test_sums_and_products_of_bfloat16_are_accumulated_in_float32() -> None:
    """In bfloat16 a sum of ones stops at 256."""
    ones = torch.ones(1, 4096, dtype=torch.bfloat16)
    half = ValueType(dtype="bfloat16")
    axis = const("axis", torch.tensor([1]))
    assert one(axis, op("ReduceSum", "x", ["p", "axis"], half, keep_dims=False), inputs=(ones,)).item() == 4096
    product = op("MatMul", "x", ["p", "p"], half, transpose_x1=False, transpose_x2=True)
    assert one(product, inputs=(ones,)).item() == 4096
    norm = op("LpNormV2", "x", ["p"], half, p=2.0, axes=(), keepdim=False, epsilon=0.0)
    assert one(norm, inputs=(ones,)).item() == 64


def test_bfloat16_is_rounded_once() -> None:
    """(1 + 2^-7)^2 - (1 + 2^-6) is 2^-14, and 0 if the product is rounded before."""
    x, y = torch.tensor([-1 - 2.0**-6]).bfloat16(), torch.tensor([1 + 2.0**-7]).bfloat16()
    assert one(op("AxpyV2", "x", ["p", "g", "g"], of(x)), inputs=(x, y)).item() == 2.0**-14


def test_a_factor_is_not_rounded_to_the_dtype_of_the_tensor() -> None:
    x = torch.tensor([3.0], dtype=torch.bfloat16)
    factor = 1.0 + 2.0**-8  # in bfloat16 it would be 1
    assert one(op("Muls", "x", ["p"], of(x), value=factor), inputs=(x,)).item() == 3.0 + 2.0**-6


def test_infinite_norms_are_given_as_the_ends_of_int32() -> None:
    for p, expected in ((2147483648.0, 4.0), (-2147483648.0, 1.0)):
        norm = op("LpNormV2", "x", ["p"], f32(), p=p, axes=(), keepdim=False, epsilon=0.0)
        assert one(norm, inputs=(X,)).item() == expected


def test_memory_that_nobody_filled_is_not_a_number() -> None:
    shape = const("shape", torch.tensor([3], dtype=torch.int32))
    assert one(shape, op("Empty", "x", ["shape"], f32(3), dtype=0), inputs=()).isnan().all()


def test_a_constant_is_its_bytes() -> None:
    value = ConstValue(dtype="float32", shape=(2,), data=bytes(torch.tensor([1.5, -2.0]).view(torch.uint8).tolist()))
    assert one(op("Const", "x", (), f32(2), value=value), inputs=()).tolist() == [1.5, -2.0]


# -- Collectives -------------------------------------------------------------------------------------------------------

WORLD = 3
SENT = ((2, 0, 1), (1, 0, 1), (0, 0, 3))  # rows from each rank to each; the second rank keeps its last


def _collectives(rank: int) -> None:
    """All of them on three ranks, in float32 and bfloat16, against what they mean."""
    world = dist.group.WORLD
    assert world is not None
    name = f"tag={dist.distributed_c10d._get_group_tag(world)};rank_list=0,1,2"
    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.arange(6.0).reshape(3, 2).add(10 * other).to(dtype) for other in range(WORLD)]
        x, value = given[rank], of(given[0])
        received = [SENT[other][rank] for other in range(WORLD)]
        elements = {"s": SENT[rank], "r": received}
        counts = [const(key, torch.tensor([2 * n for n in rows])) for key, rows in elements.items()]
        places = [
            const(f"{key}d", torch.tensor([2 * sum(rows[:at]) for at in range(WORLD)]))
            for key, rows in elements.items()
        ]
        shapes = {"v": (sum(received), 2), "gather": (9, 2), "scatter": (1, 2)}
        of_shape = {key: ValueType(dtype=value.dtype, shape=shape) for key, shape in shapes.items()}
        whole = graph(
            data(0, "p", value),
            *counts,
            *places,
            op("HcomAllGather", "gather", ["p"], of_shape["gather"], group=name, rank_size=3, fusion=0, fusion_id=-1),
            op("HcomReduceScatter", "scatter", ["p"], of_shape["scatter"], group=name, rank_size=3, reduction="sum"),
            op("HcomAllReduce", "largest", ["p"], value, group=name, reduction="max", fusion=0),
            op("HcomBroadcast", "b", ["p", "largest"], [value, value], group=name, root_rank=2),
            op("HcomAllToAll", "even", ["p"], value, group=name),
            op("HcomAllToAllV", "v", ["p", "s", "sd", "r", "rd"], of_shape["v"], group=name),
            outputs=["gather", "scatter", "largest", "b", Edge("b", 1), "even", "v"],
        )
        starts = [sum(SENT[other][:rank]) for other in range(WORLD)]
        expected = [
            torch.cat(given),
            sum(given[1:], given[0])[rank : rank + 1],
            given[2],
            given[2],
            given[2],
            torch.stack([other[rank] for other in given]),
            torch.cat([given[o][starts[o] : starts[o] + SENT[o][rank]] for o in range(WORLD)]),
        ]
        for got, wanted in zip(run(whole, [x]), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        _refused(name, value, x)


def _refused(name: str, value: ValueType, x: Tensor) -> None:
    for attrs, says in (
        ({"group": name, "rank_size": 2}, "has 3 ranks"),
        ({"group": name, "rank_size": 3, "reduction": "avg"}, "'avg'"),
        ({"group": name.replace("0,1,2", "0,1"), "rank_size": 2, "reduction": "sum"}, "no group"),
    ):
        kind = "HcomReduceScatter" if "reduction" in attrs else "HcomAllGather"
        with pytest.raises(GraphError, match=says):
            run(graph(data(0, "p", value), op(kind, "x", ["p"], value, **attrs), outputs=["x"]), [x])
    counts = [const(key, torch.tensor(rows)) for key, rows in (("s", [2, 2, 2]), ("sd", [0, 4, 2]))]
    swapped = op("HcomAllToAllV", "x", ["p", "s", "sd", "s", "sd"], value, group=name)
    with pytest.raises(GraphError, match="one after another"):
        run(graph(data(0, "p", value), *counts, swapped, outputs=["x"]), [x])


@pytest.mark.dist
def test_collectives_of_three_ranks() -> None:
    with Ranks(WORLD) as ranks:
        ranks.run(_collectives)
