"""Hold a traced graph against what its plan promises, before any backend sees it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from muon_compile.lower.trace import TracedStep
from muon_compile.plan.exchange import Place
from muon_compile.plan.plan import Plan
from muon_compile.spec import CollectiveSpec

# Operators that read a tensor's value on the host, or whose shapes depend on values: each would synchronize every step.
_HOST_READS = ("aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.equal", "aten.is_nonzero")


def collective_kind(node: Node) -> str | None:
    """The functional collective that a node issues; None where it issues none, or waits for one."""
    namespace, _, name = str(node.target).partition(".")
    if node.op != "call_function" or namespace != "_c10d_functional" or name.startswith("wait_tensor"):
        return None
    return name.split(".")[0]


def collective_group(node: Node) -> str:
    """Name of the process group that a collective's node runs over."""
    (group,) = [arg for arg in node.args if isinstance(arg, str) and arg != "sum"]
    return group


def found_collectives(traced: TracedStep) -> list[str]:
    """Kinds of the functional collectives in the graph, in order, waits apart."""
    return [kind for node in traced.graph.graph.nodes if (kind := collective_kind(node)) is not None]


def collective_lines(traced: TracedStep, places: Sequence[Place] = ()) -> dict[str, list[str]]:
    """The graph's collectives by group name, a line each: kind, elements where all ranks have as many, dtype, root.

    Those of a node, or of one rank of each node, are lines of the shard group that divides into nodes: all of its ranks
    issue alike ones.
    """
    parts = {place.node_group: (place.shard_group, " within the node") for place in places}
    parts |= {place.peer_group: (place.shard_group, " between nodes") for place in places}
    lines: dict[str, list[str]] = {}
    for node in traced.graph.graph.nodes:
        kind, value = collective_kind(node), node.meta.get("val")
        if kind is None:
            continue
        same = "" if value is None or kind == "all_to_all_single" else f" {value.numel()}"
        root = f" from {node.args[1]}" if kind == "broadcast" else ""
        group = collective_group(node)
        whole, where = parts.get(group, (group, ""))
        lines.setdefault(whole, []).append(f"{kind}{same} {getattr(value, 'dtype', '')}{root}{where}")
    return lines


def written_inputs(traced: TracedStep) -> set[str]:
    """Names of the inputs that the graph writes, directly, through a view, or by ``out=``."""
    roots: dict[Node, Node] = {}
    written: set[str] = set()
    for node in traced.graph.graph.nodes:
        if node.op == "placeholder":
            roots[node] = node
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # operator.getitem of a list of views
            first = node.args[0] if node.args else None
            if isinstance(first, Node) and first in roots:
                roots[node] = roots[first]
            continue
        returns_alias = any(result.alias_info is not None for result in schema.returns)
        for position, argument in enumerate(schema.arguments):
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if argument.alias_info is None or value is None:
                continue
            for target in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(target, Node) or target not in roots:
                    continue
                if argument.alias_info.is_write:
                    written.add(roots[target].name)
                if returns_alias:
                    roots[node] = roots[target]
    return written


def check_graph(plan: Plan, traced: TracedStep) -> tuple[CollectiveSpec, ...]:
    """Check that the graph writes all it should and nothing else, reads nothing back, and keeps its collectives.

    Returns:
        The plan's collectives, now known to be the graph's.

    Raises:
        RuntimeError: The graph breaks a promise; a defect of this library, never of the caller's input.
    """
    for node in traced.graph.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith(_HOST_READS):
            raise RuntimeError(
                f"The traced step reads a value on the host ({node.target}), expected none; please report."
            )
    expected = set(traced.spec.names[: traced.spec.num_written])
    written = written_inputs(traced)
    if written != expected:
        raise RuntimeError(
            "The traced step writes other inputs than the plan promises; please report. "
            f"Not written: {sorted(expected - written)}; not promised: {sorted(written - expected)}."
        )
    promised = [collective.kind for collective in plan.collectives]
    found = found_collectives(traced)
    if promised != found:
        raise RuntimeError(
            f"The traced step's collectives differ from the plan's; please report. Promised {promised}, found {found}."
        )
    return plan.collectives
