"""What lower_npu counts in a GE graph, and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from muon_compile.lower.trace import InputSpec
from muon_compile.npu.graph import Collective, GeGraph
from muon_compile.npu.ops import Op
from muon_compile.plan.plan import Plan
from muon_compile.spec import CollectiveSpec

SILENT = ("Data", "RefData", "Const", "NetOutput")  # what GeGraph.counts leaves out
SHARED, NONE, UNUSED = "shared", "none", "unused"
LISTS = ("Pack", "Unpack")


def ge_report(graph: GeGraph, concrete: Any, plan: Plan, spec: InputSpec) -> dict[str, Any]:
    """Counts of a lowered graph.

    Args:
        graph: The graph.
        concrete: TorchAir's own, which knows its inputs and what is written to them.
        plan: The plan, as the rank runs it.
        spec: Order of the step's inputs, as ``cut_inputs`` left it.
    """
    counts, types = graph.counts(), {op.name: op.type for op in graph.ops if op.type not in SILENT}
    order = list(TopologicalSorter({op.name: before(op) for op in graph.ops}).static_order())
    bucket_of = owners(graph, order, bucket_ends(graph, concrete, plan, spec))
    total = sum(counts.values())
    return {
        "ge": {
            "operators": total,
            "per_parameter": round((total - sum(counts.get(name, 0) for name in LISTS)) / len(plan.specs), 2),
            "without_work": sum(graph.is_view(op) for op in graph.ops),
            "inputs": len(graph.inputs),
            "inputs_on": sorted({info.device_type for info in concrete._input_info_list}),
            "outputs": len(graph.outputs),
            "constants": sum(op.type == "Const" for op in graph.ops),
            "by_type": counts,
        },
        "buckets": by_bucket(types, bucket_of, plan),
        "collectives": by_collective(graph, order, types, bucket_of, plan),
        "left_out": [{"kind": c.kind, "axis": c.axis} for c in plan.collectives if gives_nothing(c)],
        "by_traced_operator": by_traced_operator(graph, concrete, order, types),
    }


def before(op: Op) -> set[str]:
    """Operators that one has to wait for."""
    return {*op.controls, *(edge.op for edge in op.inputs if edge is not None)}


def owners(
    graph: GeGraph, order: Sequence[str], ends: tuple[Mapping[str, set[str]], Mapping[str, set[str]]]
) -> dict[str, str]:
    """By operator the one bucket that its result goes into, or where it goes into none that it comes from.

    SHARED: there are several. NONE: there is none; on a rank that neither sends nor receives, a collective is of none.
    UNUSED: the graph does not wait for it.

    Args:
        graph: The graph.
        order: Names of its operators, each behind those that it waits for.
        ends: Names of buckets by operator: whose parameters and state its result becomes; whose it gives.
    """
    into: dict[str, frozenset[str]] = {}
    come: dict[str, frozenset[str]] = {}
    used = {op.name for op in graph.ops if op.type == "NetOutput"}
    for name in reversed(order):
        op = graph.op(name)
        used |= before(op) if name in used else set()
        into[name] = into.get(name, frozenset()) | ends[0].get(name, set())
        for edge in () if op.type == "NetOutput" else op.inputs:
            if edge is not None:
                into[edge.op] = into.get(edge.op, frozenset()) | into[name]
    for name in order:
        read = [come[edge.op] for edge in graph.op(name).inputs if edge is not None]
        come[name] = frozenset(ends[1].get(name, ())).union(*read)
    return {name: _owner(name in used, into[name] or come[name]) for name in order}


def _owner(used: bool, buckets: frozenset[str]) -> str:
    if not used or not buckets:
        return NONE if used else UNUSED
    return next(iter(buckets)) if len(buckets) == 1 else SHARED


def bucket_ends(
    graph: GeGraph, concrete: Any, plan: Plan, spec: InputSpec
) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Names of the buckets whose parameters or state an operator's result becomes, and whose inputs it is."""
    names = {f"param_{i}": bucket.name for bucket in plan.buckets for i in bucket.params}
    names |= {f"grad_{i}": bucket.name for bucket in plan.buckets for i in bucket.params}
    names |= {f"{plan.buckets[i].name}_{state}": plan.buckets[i].name for i, state in spec.state}
    # Of an input that waves take stretches of, "name[start:stop]".
    inputs = [name.partition("[")[0] for name in spec.names]
    given = [names.get(inputs[info.func.fx_input_idx]) for info in concrete._input_info_list]
    results: dict[str, set[str]] = {}
    for output, index in concrete._graph_output_ref_input.items():
        bucket = given[index]
        if bucket is not None:  # else it is the ranks' agreement
            results.setdefault(graph.outputs[output].op, set()).add(bucket)
    return results, {one.name: {bucket} for one in graph.inputs if (bucket := given[one.index]) is not None}


def by_bucket(types: Mapping[str, str], bucket_of: Mapping[str, str], plan: Plan) -> list[dict[str, Any]]:
    """Operators of every bucket, then those of several, then those whose results nobody reads."""
    counts = {bucket.name: Counter[str]() for bucket in plan.buckets}
    for name, kind in types.items():
        counts.setdefault(bucket_of[name], Counter())[kind] += 1
    sizes = {bucket.name: bucket.size for bucket in plan.buckets}
    return [
        {"name": name, "parameters": sizes.get(name), "operators": count.total(), "by_type": dict(count.most_common())}
        for name, count in counts.items()
    ]


def by_collective(
    graph: GeGraph, order: Sequence[str], types: Mapping[str, str], bucket_of: Mapping[str, str], plan: Plan
) -> list[dict[str, Any]]:
    """The collectives in order: what each moves, and how many operators it waits for, wait for it, or do neither."""
    found = graph.collectives()
    promised = [(spec.kind, spec.axis) for spec in plan.collectives if not gives_nothing(spec)]
    promised = promised if len(promised) == len(found) else [("?", "?")] * len(found)
    ahead, behind = reached(graph, order, [one.name for one in found], types)
    rows = []
    for one, (kind, axis) in zip(found, promised, strict=True):
        waits_for, waiting = ahead[one.name], behind[one.name]
        rows.append(
            {
                "kind": kind,
                "operator": one.kind,
                "axis": axis,
                "elements": elements(one),
                "dtype": one.dtype,
                "bucket": bucket_of[one.name],
                "before": waits_for,
                "after": waiting,
                "beside": len(types) - 1 - waits_for - waiting,
            }
            | ({} if one.root is None else {"root": one.root})
        )
    return rows


def gives_nothing(spec: CollectiveSpec) -> bool:
    """Whether a promised collective moves nothing on any rank: TorchAir leaves such a one out."""
    return not spec.bytes_per_rank and spec.kind != "all_to_all_single"


def elements(one: Collective) -> int | None:
    """Elements that this rank gives: of an all-to-all what it is told to send, for its tensor may be longer."""
    return one.elements if one.send_counts is None else sum(one.send_counts)


def reached(
    graph: GeGraph, order: Sequence[str], marks: Sequence[str], types: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, int]]:
    """For each marked operator, how many others it has to wait for, and how many have to wait for it."""
    bit = {name: 1 << index for index, name in enumerate(marks)}
    counts = []
    after: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in before(op):
            after.setdefault(name, []).append(op.name)
    # Marks behind each operator, going back; then those ahead of it, going on.
    for names, following in ((reversed(order), after), (order, {op.name: before(op) for op in graph.ops})):
        seen: dict[str, int] = {}
        for name in names:
            seen[name] = 0
            for other in following.get(name, ()):
                seen[name] |= seen[other] | bit.get(other, 0)
        counts.append({mark: sum(bool(seen[name] & bit[mark]) for name in types) for mark in marks})
    return counts[0], counts[1]


def by_traced_operator(
    graph: GeGraph, concrete: Any, order: Sequence[str], types: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    """Operators by that of the functional graph that they were made of.

    TorchAir notes it on the operator that gives a node's result (``_fx_tensor_name``, in torch_npu 2.10 to 2.14); those
    without a note are steps towards the one that reads them.
    """
    of: dict[str, str] = {}
    for proto in concrete.graph.op:
        notes = [
            desc.attr["_fx_tensor_name"].s.decode() for desc in proto.output_desc if "_fx_tensor_name" in desc.attr
        ]
        if notes:  # such as add_3-aten.add.Tensor.OUTPUT.0
            of[proto.name] = notes[0].partition("-")[2].rpartition(".OUTPUT.")[0]
    readers: dict[str, set[str]] = {}
    for name in reversed(order):
        if name not in of:
            found = readers.get(name, set())
            of[name] = next(iter(found)) if len(found) == 1 else "several" if found else "none"
        for edge in graph.op(name).inputs:
            if edge is not None:
                readers.setdefault(edge.op, set()).add(of[name])
    counts: dict[str, Counter[str]] = {}
    for name, kind in types.items():
        counts.setdefault(of[name], Counter())[kind] += 1
    ordered = sorted(counts.items(), key=lambda item: -item[1].total())
    return {name: dict(count.most_common()) for name, count in ordered}


def print_report(summary: Mapping[str, Any], files: Sequence[Path]) -> None:
    """A summary for people, and which of the files there are."""
    console = Console(width=120, highlight=False, soft_wrap=True)
    axes = "x".join(str(size) for size in summary["mesh"].values()) or "1"
    console.print(
        f"{summary['model']}: {summary['parameters']} parameters, mesh {axes}, rank {summary['rank']}, "
        f"{summary['kind']} gradients, {summary['waves']} wave(s)"
    )
    if "ge" in summary:
        _print_graph(console, summary)
    else:
        calls = summary["traced_operators"]
        console.print(f"{sum(calls.values())} operators of the functional graph:")
        console.print(_in_words(calls))
        rows = ((row["kind"], row["axis"], f"{row['bytes']:,}") for row in summary["collectives"])
        console.print(_table("collectives, in order", ("kind", "axis", "bytes"), rows))
        if not summary["faults"]:
            console.print("TorchAir has a converter for each of them.")
    for fault in summary["faults"]:
        console.print(f"fault: {fault}")
    console.print("files: " + ", ".join(str(path) for path in files if path.is_file()))


def _print_graph(console: Console, summary: Mapping[str, Any]) -> None:
    ge = summary["ge"]
    console.print(
        f"{ge['operators']} GE operators, of which {ge['without_work']} may be views, without work; "
        f"{ge['per_parameter']} per parameter outside {' and '.join(LISTS)}"
    )
    where = " and ".join(ge["inputs_on"])
    console.print(f"{ge['inputs']} inputs on {where}, {ge['outputs']} outputs, {ge['constants']} constants")
    console.print(_in_words(ge["by_type"]))
    rows = (
        (row["name"], row["parameters"] or "", row["operators"], _in_words(row["by_type"], 5))
        for row in summary["buckets"]
    )
    console.print(_table("operators by bucket", ("bucket", "B", "operators", "most of them"), rows))
    if not summary["collectives"]:
        console.print("collectives: none")
        return
    names = ("kind", "axis", "elements", "dtype", "bucket", "before", "after", "beside")
    cells = ([row[name] for name in names] for row in summary["collectives"])
    title = "collectives in order, and the operators each waits for, that wait for it, and that do neither"
    console.print(_table(title, names, cells))
    for row in summary["left_out"]:
        console.print(f"{row['kind']} over {row['axis']} is left out, since it would move nothing on any rank")


def _in_words(counts: Mapping[str, int], most: int | None = None) -> str:
    items = list(counts.items())
    shown = ", ".join(f"{name} {count}" for name, count in items[:most])
    return shown + (", ..." if most is not None and len(items) > most else "")


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        numbers = name in ("B", "operators", "elements", "bytes", "before", "after", "beside")
        table.add_column(name, justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else "?" if cell is None else str(cell) for cell in row))
    return table
