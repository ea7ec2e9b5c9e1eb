"""``aot_eager``: the traced graph, run operator by operator. Needs no compiler; for debugging and tests."""

from __future__ import annotations

from torch import Tensor

from muon_compile.lower.compiled import CompiledGraph
from muon_compile.lower.trace import TracedStep


def compile_eager(traced: TracedStep) -> CompiledGraph:
    """Wrap the traced graph as it is."""
    graph = traced.graph

    def run(inputs: list[Tensor]) -> object:
        return graph(*inputs)

    return CompiledGraph(run=run, code={"aot_eager.py": graph.code}, backend="aot_eager", cached=False)
