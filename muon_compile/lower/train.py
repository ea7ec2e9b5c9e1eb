"""The update as a part of somebody else's graph: traced in plain operators, for ``torch.compile`` to take in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from muon_compile.lower import inductor, plain_boundary
from muon_compile.lower.check import check_graph
from muon_compile.lower.trace import InputSpec, RunStep, TracedStep, trace_step
from muon_compile.plan.exchange import Place
from muon_compile.plan.plan import Plan

TRAIN_BACKENDS = ("inductor", "aot_eager")


def trace_update(
    plan: Plan, spec: InputSpec, inputs: Sequence[Tensor], run_step: RunStep, places: Mapping[int, Place]
) -> TracedStep:
    """Trace the step without this library's CPU kernels, which write in place where only a step by itself may."""
    plain = without_kernels(plan)
    table = plain_boundary.library_operators()
    traced = trace_step(plain, spec, inputs, run_step, places, table, plain_boundary.PlainBoundary)
    check_graph(plain, traced)
    return traced


def without_kernels(plan: Plan) -> Plan:
    """The same plan, on the graph where this library's CPU kernels would run."""

    def graph(what: Any) -> Any:
        return replace(what, kernel="graph") if what is not None and what.kernel == "native" else what

    parts = tuple(replace(part, exchange=graph(part.exchange)) for part in plan.parts)
    return replace(plan, native=False, parts=parts, batches=tuple(map(graph, plan.batches)))


def train_compiler(
    backend: str, options: Mapping[str, Any], compiled: Callable[[GraphModule], None]
) -> Callable[..., Any]:
    """What ``torch.compile(backend=...)`` takes.

    Args:
        backend: One of ``TRAIN_BACKENDS``.
        options: Laid over this library's options of Inductor.
        compiled: Is given every graph once it is compiled, and may still refuse it.
    """

    def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        if backend == "aot_eager":
            made = torch._dynamo.lookup_backend("aot_eager")(graph, list(inputs))
        else:
            made = inductor.compile_function(graph, inputs, options)
        compiled(graph)
        return made

    return compile_graph
