"""The check between tracing and compiling catches a graph that breaks one of its plan's promises."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # registers the operators
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import Parameter

import muon_compile as mc
from muon_compile.lower import backends
from muon_compile.lower.check import check_graph, collective_lines, found_collectives, written_inputs
from muon_compile.lower.trace import TracedStep
from muon_compile.plan.exchange import Place

aten = torch.ops.aten
c10d = torch.ops._c10d_functional  # no process group is needed to name its operators


@pytest.fixture(scope="module")
def step() -> mc.CompiledStep:
    """Two parameters in one bucket (written by one operator), one on its own, and a vector for AdamW."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape)) for shape in ((4, 6), (4, 6), (6, 4), (5,))]
    groups = [{"params": params[:3]}, {"params": params[3:], "algorithm": "adamw"}]
    optimizer = mc.Muon(groups, config=mc.MuonConfig(ns_steps=1), backend="aot_eager")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.compiled


@pytest.fixture
def traced(step: mc.CompiledStep) -> TracedStep:
    """A copy of the traced graph, to tamper with."""
    assert step._binding is not None
    original, _ = step._binding.graphs["all"]
    return dataclasses.replace(original, graph=copy.deepcopy(original.graph))


def inputs(graph: Graph) -> dict[str, Node]:
    return {node.name: node for node in graph.nodes if node.op == "placeholder"}


def add(traced: TracedStep, build: Callable[[Graph, dict[str, Node]], Any]) -> TracedStep:
    """Let ``build`` add nodes at the end of the graph."""
    graph = traced.graph.graph
    with graph.inserting_before(graph.output_node()):
        build(graph, inputs(graph))
    graph.lint()
    traced.graph.recompile()
    return traced


def test_a_sound_graph_passes(step: mc.CompiledStep, traced: TracedStep) -> None:
    assert check_graph(step.plan, traced) == ()
    names = set(traced.spec.names[: traced.spec.num_written])
    assert written_inputs(traced) == names
    assert {"param_0", "param_1", "param_2", "param_3", "muon0_momentum_buffer", "adamw2_step"} <= names


@pytest.mark.parametrize("name", ["param_2", "muon0_momentum_buffer", "adamw2_exp_avg_sq", "adamw2_step"])
def test_a_parameter_or_state_that_is_not_written(step: mc.CompiledStep, traced: TracedStep, name: str) -> None:
    graph = traced.graph.graph
    target = inputs(graph)[name]
    writes = [n for n in target.users if n.args and n.args[0] is target and n.target is aten.copy_.default]
    assert writes
    for node in writes:
        graph.erase_node(node)
    with pytest.raises(RuntimeError, match=rf"Not written: \['{name}'\]; not promised: \[\]"):
        check_graph(step.plan, traced)


def test_a_parameter_left_out_of_a_buckets_write(step: mc.CompiledStep, traced: TracedStep) -> None:
    (apply,) = [n for n in traced.graph.graph.nodes if n.target is torch.ops.muon_compile.apply_.default]
    apply.args = (apply.args[0][:1], *apply.args[1:])
    with pytest.raises(RuntimeError, match=r"Not written: \['param_1'\]"):
        check_graph(step.plan, traced)


@pytest.mark.parametrize("name", ["grad_0", "hyper_0"])
def test_another_input_that_is_written(step: mc.CompiledStep, traced: TracedStep, name: str) -> None:
    add(traced, lambda graph, given: graph.call_function(aten.mul_.Tensor, (given[name], 2.0)))
    with pytest.raises(RuntimeError, match=rf"not promised: \['{name}'\]"):
        check_graph(step.plan, traced)


def test_another_input_that_is_written_through_a_view(step: mc.CompiledStep, traced: TracedStep) -> None:
    def build(graph: Graph, given: dict[str, Node]) -> None:
        view = graph.call_function(aten.unsqueeze.default, (given["grad_2"], 0))
        graph.call_function(aten.mul_.Tensor, (view, 2.0))

    with pytest.raises(RuntimeError, match=r"not promised: \['grad_2'\]"):
        check_graph(step.plan, add(traced, build))


def test_another_input_that_is_written_as_an_out_argument(step: mc.CompiledStep, traced: TracedStep) -> None:
    def build(graph: Graph, given: dict[str, Node]) -> None:
        graph.call_function(aten.mul.out, (given["grad_1"], given["grad_0"]), {"out": given["grad_0"]})

    with pytest.raises(RuntimeError, match=r"not promised: \['grad_0'\]"):
        check_graph(step.plan, add(traced, build))


def test_another_input_that_is_written_in_a_list(step: mc.CompiledStep, traced: TracedStep) -> None:
    def build(graph: Graph, given: dict[str, Node]) -> None:
        graph.call_function(aten._foreach_mul_.Scalar, ([given["param_0"], given["grad_1"]], 2.0))

    with pytest.raises(RuntimeError, match=r"not promised: \['grad_1'\]"):
        check_graph(step.plan, add(traced, build))


HOST_READS = {
    "item": aten._local_scalar_dense.default,
    "nonzero": aten.nonzero.default,
    "is_nonzero": aten.is_nonzero.default,
}


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS)
def test_a_value_read_on_the_host(step: mc.CompiledStep, traced: TracedStep, read: Any) -> None:
    add(traced, lambda graph, given: graph.call_function(read, (given["hyper_0"],)))
    with pytest.raises(RuntimeError, match=r"reads a value on the host \(aten\."):
        check_graph(step.plan, traced)


def test_a_read_that_tracing_itself_would_record() -> None:
    """The operator that ``.item()`` leaves in a traced graph is one that the check knows."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        graph = make_fx(lambda x: x * x.sum().item(), tracing_mode="real")(torch.ones(3))
    assert aten._local_scalar_dense.default in {node.target for node in graph.graph.nodes}


def with_collective(traced: TracedStep, *, wait: bool = True) -> TracedStep:
    def build(graph: Graph, given: dict[str, Node]) -> None:
        reduced = graph.call_function(c10d.all_reduce.default, (given["grad_0"], "sum", "0"))
        if wait:
            graph.call_function(c10d.wait_tensor.default, (reduced,))

    return add(traced, build)


def promise(step: mc.CompiledStep, *kinds: str) -> mc.Plan:
    collectives = tuple(mc.CollectiveSpec(kind=kind, axis="shard", bytes_per_rank=96) for kind in kinds)
    return dataclasses.replace(step.plan, collectives=collectives)


@pytest.mark.parametrize("wait", [True, False])
def test_a_collective_that_nobody_promised(step: mc.CompiledStep, traced: TracedStep, wait: bool) -> None:
    with pytest.raises(RuntimeError, match=r"Promised \[\], found \['all_reduce'\]"):
        check_graph(step.plan, with_collective(traced, wait=wait))


def test_a_collective_that_is_missing_or_another(step: mc.CompiledStep, traced: TracedStep) -> None:
    with pytest.raises(RuntimeError, match=r"Promised \['all_reduce'\], found \[\]"):
        check_graph(promise(step, "all_reduce"), traced)
    with_collective(traced)
    assert found_collectives(traced) == ["all_reduce"]
    assert check_graph(promise(step, "all_reduce"), traced) == promise(step, "all_reduce").collectives
    with pytest.raises(RuntimeError, match=r"Promised \['all_gather_into_tensor'\], found \['all_reduce'\]"):
        check_graph(promise(step, "all_gather_into_tensor"), traced)
    with pytest.raises(RuntimeError, match=r"Promised \['all_reduce', 'all_reduce'\], found \['all_reduce'\]"):
        check_graph(promise(step, "all_reduce", "all_reduce"), traced)


def test_the_order_of_collectives_counts(step: mc.CompiledStep, traced: TracedStep) -> None:
    def gather(graph: Graph, given: dict[str, Node]) -> None:
        gathered = graph.call_function(c10d.all_gather_into_tensor.default, (given["grad_0"], 2, "0"))
        graph.call_function(c10d.wait_tensor.default, (gathered,))

    add(with_collective(traced), gather)
    assert check_graph(promise(step, "all_reduce", "all_gather_into_tensor"), traced)
    with pytest.raises(RuntimeError, match="differ from the plan's"):
        check_graph(promise(step, "all_gather_into_tensor", "all_reduce"), traced)


def test_collectives_over_nodes_are_compared_over_the_whole_shard_group(traced: TracedStep) -> None:
    def build(graph: Graph, given: dict[str, Node]) -> None:
        for group in ("mine", "others", "all"):
            sent = graph.call_function(c10d.all_to_all_single.default, (given["grad_0"], [2, 2], [2, 2], group))
            graph.call_function(c10d.wait_tensor.default, (sent,))

    place = Place(shard_group="all", node_group="mine", peer_group="others")
    ((group, lines),) = collective_lines(add(traced, build), [Place(shard_group="all"), place]).items()
    assert group == "all"
    kinds = [f"all_to_all_single {where}" for where in ("within the node", "between nodes", "")]
    assert [" ".join(line.replace("None", "").split()) for line in lines] == [kind.strip() for kind in kinds]
    assert set(collective_lines(traced)) == {"mine", "others", "all"}


def test_the_check_stands_between_tracing_and_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tampered trace never reaches the backend, and the optimizer is left as it was."""
    honest = backends.trace_step

    def forgetful(*args: Any) -> TracedStep:
        traced = honest(*args)
        graph: GraphModule = traced.graph
        for node in graph.graph.find_nodes(op="call_function", target=aten.copy_.default):
            graph.graph.erase_node(node)
        return traced

    monkeypatch.setattr(backends, "trace_step", forgetful)
    param = Parameter(torch.ones(4, 6))
    optimizer = torch.optim.Muon([param])
    compiled = mc.compile_step(optimizer, backend="aot_eager")
    param.grad = torch.ones(4, 6)
    with pytest.raises(RuntimeError, match="Not written: .*'param_0'"):
        optimizer.step()
    assert torch.equal(param, torch.ones(4, 6)) and not optimizer.state[param]["momentum_buffer"].any()
    monkeypatch.undo()
    optimizer.step()
    assert compiled.stats.steps == 1
