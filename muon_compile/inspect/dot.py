"""A graph as Graphviz DOT, clustered by phase and bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from muon_compile.inspect.graph_nodes import Row, printable
from muon_compile.plan.marks import PHASES

# With more nodes than this Graphviz takes minutes, and nobody finds anything in the picture.
MAX_NODES = 2000
# Fills of the clusters, told apart by people with any colour vision. Source: Tol, 2021, Colour schemes, pale.
_FILLS = ("#DDDDDD", "#EEEEBB", "#BBCCEE", "#FFCCCC", "#CCDDAA", "#CCEEFF", "#EEDDFF")
_COLOURS: dict[str, str] = dict(zip(PHASES, _FILLS, strict=True))

# Phase, wave and buckets of a cluster; of an input the wave is None.
_Home = tuple[str, int | None, tuple[str, ...]]


def graph_dot(rows: Sequence[Row], name: str = "step") -> str:
    """The graph as text for ``dot``: a cluster for every phase of a wave, in it one for every bucket.

    Of more than ``MAX_NODES`` nodes there is one for all of a bucket's in a phase.

    Args:
        rows: The graph's nodes (``graph_rows``).
        name: The graph's name.
    """
    body = _whole(rows) if len(rows) <= MAX_NODES else _collapsed(rows)
    head = [
        f"digraph {quoted(name)} {{",
        "  rankdir=TB; compound=true; fontname=sans;",
        "  node [shape=box, style=filled, fillcolor=white, fontname=sans, fontsize=10];",
    ]
    return "\n".join([*head, *body, "}"]) + "\n"


def quoted(*lines: str) -> str:
    """A double-quoted string of DOT, in which only quotes and backslashes mean anything."""
    escaped = (printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


def _home(row: Row) -> _Home:
    return row["phase"] or "", row["wave"], tuple(row["buckets"]) if row["op"] != "placeholder" else ()


def _whole(rows: Sequence[Row]) -> Iterator[str]:
    homes: dict[_Home, list[Row]] = {}
    for row in rows:
        homes.setdefault(_home(row), []).append(row)
    members = {home: [f"{quoted(row['name'])} [label={_label(row)}];" for row in own] for home, own in homes.items()}
    yield from _clusters(members)
    for row in rows:
        for source in row["inputs"]:
            yield f"  {quoted(source)} -> {quoted(row['name'])};"


def _label(row: Row) -> str:
    what = row["name"] if row["op"] == "placeholder" else row["target"]
    return quoted(what) if row["shape"] is None else quoted(what, f"{row['dtype']}{row['shape']}")


def _collapsed(rows: Sequence[Row]) -> Iterator[str]:
    homes = {row["name"]: _home(row) for row in rows}
    counts = Counter(homes.values())
    ids = {home: f"n{number}" for number, home in enumerate(counts)}
    members = {home: [f"{ids[home]} [label={quoted(f'{count} nodes')}];"] for home, count in counts.items()}
    yield from _clusters(members)
    edges = Counter(
        (homes[source], homes[row["name"]])
        for row in rows
        for source in row["inputs"]
        if homes[source] != homes[row["name"]]
    )
    for (source, target), count in edges.items():
        yield f"  {ids[source]} -> {ids[target]} [label={quoted(str(count))}];"


def _clusters(members: dict[_Home, list[str]]) -> Iterator[str]:
    """Clusters of phases in clusters of nothing, each with its buckets'."""
    phases: dict[tuple[str, int | None], list[_Home]] = {}
    for home in members:
        phases.setdefault(home[:2], []).append(home)
    for number, ((phase, wave), homes) in enumerate(phases.items()):
        title = phase or "of no known phase"
        yield f"  subgraph cluster_{number} {{"
        yield f"    label={quoted(title if wave is None else f'{title}, wave {wave}')}; style=filled;"
        yield f"    color={quoted(_COLOURS.get(phase, '#FFFFFF'))};"
        for inner, home in enumerate(homes):
            yield f"    subgraph cluster_{number}_{inner} {{"
            yield f"      label={quoted(', '.join(home[2]))}; color={quoted('#888888')};"
            yield from (f"      {line}" for line in members[home])
            yield "    }"
        yield "  }"
