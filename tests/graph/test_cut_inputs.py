"""Inputs that waves take stretches of, cut into an input per stretch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import muon_compile as mc
from muon_compile.lower.check import written_inputs
from muon_compile.lower.cut_inputs import cut_inputs
from muon_compile.lower.functional import functional_graph
from muon_compile.lower.trace import TracedStep
from muon_compile.plan.plan import Plan
from muon_compile.run.inputs import trace_plan
from tests.npu.plans import make

# Makes a new whole of a part and of what is around it.
REMAKING = (torch.ops.aten.slice_scatter.default, torch.ops.aten.cat.default, torch.ops.aten.select_scatter.default)

# No mesh: there a parameter is cut between its matrices.
STACKS = [mc.MatrixSpec(name=f"experts{i}", shape=(4, 6, 5), dtype="float32") for i in range(2)]


def waves(bound: int, **more: object) -> Plan:
    plan = (
        mc.make_plan(more["specs"], max_temp_bytes=bound)
        if "specs" in more
        else make("one", "local", max_temp_bytes=bound, **more)
    )  # type: ignore[arg-type]
    assert len(plan.waves) > 1
    return plan


def real_inputs(traced: TracedStep) -> list[Tensor]:
    """Numbers like the step's inputs, the first on memory that begins elsewhere, as a sharded parameter's may."""
    made = []
    for number, x in enumerate(traced.inputs):
        values = torch.randn(x.shape, generator=torch.Generator().manual_seed(number)).abs().to(x.dtype)
        if number == 0:
            whole = torch.zeros(values.numel() + 3, dtype=values.dtype)
            values = whole[3:].view(values.shape).copy_(values)
        made.append(values)
    return made


@pytest.mark.parametrize(
    ("bound", "more", "cut"),
    [
        (700, {}, ["muon0_momentum_buffer[0:48]", "muon0_momentum_buffer[48:96]"]),
        (300, {"specs": STACKS}, ["param_0[0:30]", "param_0[90:120]", "muon0_momentum_buffer[90:120]"]),
        (64, {"adamw": mc.AdamWConfig()}, ["adamw2_step[0:1]", "adamw2_step[1:2]", "adamw2_exp_avg[8:16]"]),
    ],
    ids=["matrices", "experts", "adamw"],
)
def test_a_cut_step_writes_the_same(bound: int, more: dict[str, object], cut: list[str]) -> None:
    _, traced = trace_plan(waves(bound, **more), backend="torchair", kind="masked")
    new, views_of = cut_inputs(traced)
    assert set(cut) <= set(new.spec.names)
    assert written_inputs(new) == {
        node.name for node in list(new.graph.graph.find_nodes(op="placeholder"))[: new.spec.num_written]
    }
    expected, actual = real_inputs(traced), real_inputs(traced)
    traced.graph(*expected)
    views = views_of(actual)
    assert [(x.shape, x.dtype) for x in views] == [(x.shape, x.dtype) for x in new.inputs]
    new.graph(*views)
    for name, before, a, b in zip(traced.spec.names, real_inputs(traced), actual, expected, strict=True):
        assert torch.equal(a, b), name
        assert not name.startswith("muon") or not torch.equal(before, a), "a step moves its state"


@pytest.mark.parametrize(("bound", "more"), [(700, {}), (300, {"specs": STACKS}), (64, {"adamw": mc.AdamWConfig()})])
def test_no_wave_makes_a_new_whole(bound: int, more: dict[str, object]) -> None:
    _, traced = trace_plan(waves(bound, **more), backend="torchair")

    def remade(step: TracedStep) -> list[str]:
        return [node.name for node in functional_graph(step).graph.nodes if node.target in REMAKING]

    assert remade(traced), "nothing to be seen without the cut"
    assert remade(cut_inputs(traced)[0]) == []


def test_what_is_taken_whole_stays() -> None:
    _, traced = trace_plan(make("one", "local"), backend="torchair")
    same, views_of = cut_inputs(traced)
    inputs = real_inputs(traced)
    assert same is traced
    assert all(a is b for a, b in zip(views_of(inputs), inputs, strict=True))


@pytest.mark.parametrize("stretches", [((0, 3), (2, 4)), ((0, 2), None)], ids=["overlap", "a stretch and everything"])
def test_stretches_that_share_memory_stay_one_input(stretches: tuple[tuple[int, int] | None, ...]) -> None:
    _, traced = trace_plan(make("one", "local"), backend="torchair")
    graph = Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(traced.inputs))]
    with traced.fake_mode:
        for stretch in stretches:
            view = nodes[0]
            if stretch is not None:
                view = graph.call_function(torch.ops.aten.slice.Tensor, (nodes[0], 0, *stretch))
                view.meta["val"] = traced.inputs[0][slice(*stretch)]
            graph.call_function(torch.ops.aten.mul_.Scalar, (view, 2.0))
    for node, fake in zip(nodes, traced.inputs, strict=True):
        node.meta["val"] = fake
    graph.output(())
    step = replace(traced, graph=GraphModule(torch.nn.Module(), graph))
    assert cut_inputs(step)[0] is step
