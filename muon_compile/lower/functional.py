"""The traced step without mutations: what AOTAutograd hands to TorchAir, and what an audit looks at."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from muon_compile.lower.compiled import CompileError
from muon_compile.lower.trace import TracedStep

Compiler = Callable[[GraphModule, Sequence[Any]], Any]


def functionalize(traced: TracedStep, compiler: Compiler, decompositions: Mapping[Any, Any] | None = None) -> Any:
    """Make a traced step functional, with one ``copy_`` at its end for every input it writes, and compile that.

    Args:
        traced: The step.
        compiler: Takes the one graph and its fake inputs; returns a callable.
        decompositions: Those of the compiler.

    Returns:
        What ``compiler`` returned.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, tracing

    made: list[Any] = []

    def compile_inference(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        _simplify(gm)
        made.append(compiler(gm, example_inputs))
        return made[-1]

    graph = GraphModule(traced.graph, copy.deepcopy(traced.graph.graph))
    with tracing(TracingContext(traced.fake_mode)), torch.no_grad():
        aot_module_simplified(
            graph,
            list(traced.inputs),
            fw_compiler=compile_inference,
            inference_compiler=compile_inference,
            decompositions=dict(decompositions or {}),
            keep_inference_input_mutations=True,
        )
    if len(made) != 1:
        raise CompileError(f"AOTAutograd made {len(made)} graphs of the step, expected one; please report.")
    return made[0]


def functional_graph(traced: TracedStep) -> GraphModule:
    """The functional graph of a traced step; its nodes keep the ``stack_trace`` of those they come from."""
    found: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(graph)
        return graph.forward

    functionalize(traced, keep)
    return found[0]


def _simplify(graph: GraphModule) -> None:
    """Take out what mutations leave behind, and compute each scalar once: a compiler may make an operator of each.

    These are aliases, slices of everything, copies of what has the shape and dtype already, and the hyperparameters'
    arithmetic, which every bucket does anew.
    """
    aten, seen = torch.ops.aten, dict[tuple[object, ...], Node]()
    for node in list(graph.graph.nodes):
        same: Node | None = None
        if node.target in (aten.detach.default, aten.alias.default):
            same = node.args[0]
        elif node.target is aten.copy.default and _type(node.args[0]) == _type(node.args[1]):
            same = node.args[1]
        elif node.target is aten.slice.Tensor and _type(node.args[0]) == _type(node):
            same = node.args[0]
        elif _is_scalar_arithmetic(node):
            same = seen.setdefault((node.target, node.args, tuple(sorted(node.kwargs.items()))), node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
    for node in reversed(graph.graph.nodes):  # what such a copy would have overwritten
        if not node.users and _is_pure(node):
            graph.graph.erase_node(node)
    graph.recompile()


def _type(node: Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return value.shape, value.dtype, value.device


def _is_pure(node: Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace == "aten" and not target._schema.is_mutable


def _is_scalar_arithmetic(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim():
        return False
    return _is_pure(node) and not any(isinstance(argument, (list, dict)) for argument in node.args)
