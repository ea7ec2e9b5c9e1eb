"""Which operators of a functional graph TorchAir cannot lower, without TorchAir.

``converters.txt`` lists the operators whose converter in the torch_npu 2.13 wheel does more than raise;
``tools/list_converters.py`` writes it, and the tests that have the wheel hold it against the wheel.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

# TorchAir decomposes it before it looks for converters.
_DECOMPOSED = frozenset({"_c10d_functional.all_to_all_single.default"})
# Wide floating dtypes: NPUs have no arithmetic for them worth using, and torch_npu may round them without a word.
_WIDE = frozenset({torch.float64, torch.complex64, torch.complex128})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A node that TorchAir cannot lower, or should not.

    Args:
        operator: The operator, such as ``"aten.eye.default"``.
        reason: What is wrong with it.
        node: Name of the node.
        where: The line of this library that emitted it; empty where the graph does not say.
    """

    operator: str
    reason: str
    node: str
    where: str

    def __str__(self) -> str:
        return f"{self.operator} ({self.node}{', from ' + self.where if self.where else ''}): {self.reason}"


@functools.lru_cache(maxsize=1)
def real_converters() -> frozenset[str]:
    """Operators with a converter that works."""
    text = (Path(__file__).parent / "converters.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


def audit(graph: GraphModule) -> list[Finding]:
    """What TorchAir cannot lower of a functional graph (``lower.functional.functional_graph``), in its order."""
    found = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operator = str(node.target)
        where = emitted_by(node)
        if operator not in real_converters() | _DECOMPOSED:
            reason = "TorchAir has no converter for it"
            found.append(Finding(operator=operator, reason=reason, node=node.name, where=where))
        wide = sorted({str(x.dtype) for x in _values(node) if x.dtype in _WIDE})
        if wide:
            reason = f"it works in {', '.join(wide)}, which NPUs have not"
            found.append(Finding(operator=operator, reason=reason, node=node.name, where=where))
    return found


def emitted_by(node: Node) -> str:
    """The innermost line of the builder or the boundary that emitted a node, as ``file:line function``."""
    trace = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]*)", line (\d+), in (\S+)', trace)
    ours = [frame for frame in frames if re.search(r"muon_compile/(build|lower)/", frame[0])]
    if not ours:
        return ""
    file, line, function = ours[-1]
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"


def _values(node: Node) -> Iterator[Tensor]:
    for source in (node, *node.all_input_nodes):
        value = source.meta.get("val")
        yield from (x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor))
