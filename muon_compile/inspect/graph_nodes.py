"""A traced graph for people and tools: a row for every node, the code with comments, and counts of operators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from muon_compile.plan.exchange import GRAMS
from muon_compile.plan.marks import PHASES, Mark
from muon_compile.plan.plan import Plan

if TYPE_CHECKING:
    from torch.fx import Node

    from muon_compile.lower.trace import InputSpec, TracedStep

Row = dict[str, Any]

# Names of a bucket's parameters that are written out.
_SHOWN = 3
_INPUTS = Mark(phase="inputs")


def printable(text: str) -> str:
    """The text on one line: what is no visible character as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def graph_rows(plan: Plan, traced: TracedStep) -> list[Row]:
    """Every input and operator of the graph, in its order; what it returns is nothing, and has no row.

    Args:
        plan: The plan that was traced.
        traced: The traced step.

    Returns:
        For each node ``name``; ``op`` (``"placeholder"`` or ``"call_function"``); ``target``; ``inputs``, the names of
        nodes; ``shape`` and ``dtype``, None where it is no tensor; ``phase`` (``plan.marks``); ``wave``, an index into
        ``Plan.waves`` or None; ``parts``, indices into ``Plan.parts``; ``buckets``, their names.
    """
    given = _input_buckets(plan, traced.spec)
    waves = {index: number for number, wave in enumerate(plan.waves) for index in wave.parts}
    rows = []
    for node in traced.graph.graph.nodes:
        if node.op == "output":
            continue
        mark = _INPUTS if node.op == "placeholder" else traced.marks.get(node.name)
        parts: Sequence[int] = () if mark is None else mark.parts
        if node.op == "placeholder":
            parts = [i for i, part in enumerate(plan.parts) if part.bucket in given[node.name]]
        value = node.meta.get("val")
        shape = getattr(value, "shape", None)
        own = {waves[i] for i in parts} if mark is not None and mark.phase not in ("inputs", "agree") else set()
        rows.append(
            {
                "name": node.name,
                "op": node.op,
                "target": target_name(node),
                "inputs": [source.name for source in node.all_input_nodes],
                "shape": None if shape is None else [int(size) for size in shape],
                "dtype": None if shape is None else str(value.dtype).removeprefix("torch."),
                "phase": None if mark is None else mark.phase,
                "wave": own.pop() if len(own) == 1 else None,
                "parts": list(parts),
                "buckets": _bucket_names(plan, parts),
            }
        )
    return rows


def target_name(node: Node) -> str:
    """``"aten.bmm.default"``; an input's is its name."""
    target = node.target
    if isinstance(target, str) or hasattr(target, "_schema"):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}".removeprefix("_")


def _input_buckets(plan: Plan, spec: InputSpec) -> dict[str, set[int]]:
    """Buckets that every input of the graph belongs to, by the input's name."""
    of_param = {index: number for number, bucket in enumerate(plan.buckets) for index in bucket.params}
    each = [{of_param[i]} for i in range(spec.num_params)]
    everywhere = set(range(len(plan.buckets)))
    found = [*each, *({index} for index, _ in spec.state), *([everywhere] if spec.agreement is not None else [])]
    found += [everywhere] if spec.skipped is not None else []
    found += [set(spec.vanished[1])] if spec.vanished is not None else []
    found += [set(buckets) for _, buckets in spec.probes]
    for _, entries in spec.hyper:
        groups = {group for group, _ in entries}
        found.append({i for i, bucket in enumerate(plan.buckets) if groups & set(bucket.groups)})
    found += [*each, *(set(buckets) for _, buckets in spec.presence)]
    return dict(zip(spec.names, found, strict=True))


def _bucket_names(plan: Plan, parts: Sequence[int]) -> list[str]:
    return list(dict.fromkeys(plan.buckets[plan.parts[i].bucket].name for i in parts))


# -- the code ---------------------------------------------------------------------------------------------------------


def commented_code(plan: Plan, traced: TracedStep) -> str:
    """The graph as Python code: what its inputs are, and above every run of operators what they are about.

    Args:
        plan: The plan that was traced.
        traced: The traced step.
    """
    code = traced.graph.print_readable(print_output=False)
    lines = [*_about_inputs(plan, traced.spec), ""]
    names = {node.name for node in traced.graph.graph.nodes if node.op == "call_function"}
    before: str | None = None
    for line in code.splitlines():
        if line.strip().startswith("# No stacktrace found"):
            continue
        found = re.match(r"( +)(\w+)(?:: \"[^\"]*\")? = ", line)
        if found is not None and found[2] in names:
            mark = traced.marks.get(found[2])
            comment = "of no known phase" if mark is None else describe_mark(plan, mark)
            if comment != before:
                lines += [*([""] if before is not None else []), f"{found[1]}# {comment}"]
            before = comment
            line += f"  # {'' if mark is None else ' '.join([mark.phase, *_bucket_names(plan, mark.parts)[:_SHOWN]])}"
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def _about_inputs(plan: Plan, spec: InputSpec) -> Iterator[str]:
    """Comments: which parameter is which input, and where hyperparameters lie."""
    yield "# Inputs of the step:"
    for number, bucket in enumerate(plan.buckets):
        shape = " x ".join(map(str, bucket.shape)) or "scalar"
        shard = "" if bucket.layout is None or bucket.layout.axis is None else " here, a shard of each"
        dtypes = f"{bucket.dtype} (gradients {bucket.grad_dtype})"
        yield f"# {bucket.name}, {bucket.size} of shape {shape}{shard}, {dtypes}:"
        for row, index in enumerate(bucket.params):
            yield f"#   param_{index}, grad_{index}: {printable(plan.specs[index].name)}, row {row} of the state"
        states = [name for i, name in spec.state if i == number]
        yield f"#   state: {', '.join(f'{bucket.name}_{name}' for name in states)}"
    for number, (device, entries) in enumerate(spec.hyper):
        each = ", ".join(f"{name} of group {group}" for group, name in entries)
        yield f"# hyper_{number}, on {device}: {each}"
    for number, (device, buckets) in enumerate(spec.presence):
        each = ", ".join(plan.buckets[i].name for i in buckets)
        yield f"# presence_{number}, on {device}: whether there is a gradient, by the rows of {each}"
    if spec.agreement is not None:
        yield f"# agreement, on {spec.agreement}: whether the ranks agreed on that"
    if spec.skipped is not None:
        yield f"# skipped, on {spec.skipped}: steps skipped for a gradient that is not finite"
    if spec.vanished is not None:
        each = ", ".join(plan.buckets[i].name for i in spec.vanished[1])
        yield f"# vanished, on {spec.vanished[0]}: matrices whose norm fell under eps, by bucket: {each}"
    for number, (device, buckets) in enumerate(spec.probes):
        each = ", ".join(plan.buckets[i].name for i in buckets)
        yield f"# probes_{number}, on {device}: what the step was like, by the rows of {each}"


def describe_mark(plan: Plan, mark: Mark) -> str:
    """Phase, wave, buckets with their parameters, strategy and form, on one line."""
    if mark.phase == "inputs":
        return "inputs: hyperparameters and presence taken apart"
    wave = next((number for number, wave in enumerate(plan.waves) if set(mark.parts) <= set(wave.parts)), None)
    words = [mark.phase if wave is None or mark.phase == "agree" else f"{mark.phase}, wave {wave}"]
    if mark.batch is not None:
        batch = plan.batches[mark.batch]
        words.append(f"{batch.name}: {batch.num_matrices} of {batch.rows} x {batch.cols}")
        words.append(f"form {batch.form}, kernel {batch.kernel}")
    # Of many parts, the first ones.
    words += [_describe_part(plan, index, mark) for index in mark.parts[:_SHOWN]]
    if len(mark.parts) > _SHOWN:
        words.append(f"and {len(mark.parts) - _SHOWN} parts more")
    return "; ".join(words)


def _describe_part(plan: Plan, index: int, mark: Mark) -> str:
    part, bucket = plan.stretch(index).part, plan.stretch(index).bucket
    names = [printable(plan.specs[i].name) for i in bucket.params]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    stretch = "" if part.stack is None else f", matrices {part.stack[0]} to {part.stack[1] - 1}"
    text = f"{bucket.name} ({', '.join(names[:_SHOWN])}{more}{stretch})"
    exchange = part.exchange
    if exchange is not None and mark.phase in ("send", "orthogonalize", "return"):
        form = "of Grams" if exchange.strategy in GRAMS else exchange.form
        text += f", strategy {exchange.strategy}, form {form}, kernel {exchange.kernel}"
    return text


# -- counts -----------------------------------------------------------------------------------------------------------


def operator_counts(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """How often each operator is called, by phase, the most frequent first."""
    found = {phase: Counter(row["target"] for row in rows if _called_in(row, phase)) for phase in PHASES}
    return {phase: dict(counts.most_common()) for phase, counts in found.items() if counts}


def _called_in(row: Row, phase: str) -> bool:
    return bool(row["op"] == "call_function" and row["phase"] == phase)


def counts_table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Operators by phases as text, with sums."""
    totals: Counter[str] = Counter()
    for phase in counts.values():
        totals.update(phase)
    names = sorted(totals, key=lambda name: (-totals[name], name))
    width = max(map(len, [*names, "operator"]))
    columns = [*counts, "all"]
    lines = [_line("operator", columns, width, columns)]
    for name in names:
        cells = [str(counts[phase].get(name, "")) for phase in counts]
        lines.append(_line(name, [*cells, str(totals[name])], width, columns))
    sums = [str(sum(phase.values())) for phase in counts.values()]
    lines.append(_line("all", [*sums, str(sum(totals.values()))], width, columns))
    return "\n".join(lines) + "\n"


def _line(head: str, cells: Sequence[str], width: int, columns: Sequence[str]) -> str:
    padded = (cell.rjust(max(len(column), 5)) for cell, column in zip(cells, columns, strict=True))
    return "  ".join([head.ljust(width), *padded]).rstrip()
