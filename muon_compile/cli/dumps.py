"""Saved plans, and dumps read back from their folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muon_compile.cli.inputs import load_plan, read_text
from muon_compile.inspect.dump import _in_plan_order
from muon_compile.inspect.graph_nodes import operator_counts
from muon_compile.plan.plan import Plan

# Folder of a graph in a dump: its kind, "all" or "masked", before this.
GRAPHS = "_gradients"

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What lies in a dump's folder; of a plan's file, the plan alone.

    Args:
        plan: The plan, of all ranks.
        graphs: Nodes of every traced graph, by its kind (``inspect.graph_nodes.graph_rows``).
        collectives: What a rank's graph holds of each collective, in the plan's order; None where there is no graph.
        stats: Counters by name.
    """

    plan: Plan
    graphs: Mapping[str, Rows] = field(default_factory=dict)
    collectives: Rows | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)

    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """How often each graph calls each operator, by phase."""
        return {kind: operator_counts(rows) for kind, rows in self.graphs.items()}


def load_dump(path: Path) -> Dump:
    """A plan from ``plan --save``, or what a dump has written into a folder.

    Raises:
        ValueError: No plan's file, no dump's folder, or one whose files do not fit together.
    """
    if not path.is_dir():
        return Dump(plan=load_plan(path))
    if not (path / "plan.json").exists():
        raise ValueError(
            f"{path}: expected the folder of a dump, with a plan.json, or a file from plan --save; of a step that was "
            "dumped by ranks, name one rank's folder."
        )
    plan = load_plan(path / "plan.json")
    graphs = {
        folder.name.removesuffix(GRAPHS): _rows(folder / "graph.json") for folder in sorted(path.glob(f"*{GRAPHS}"))
    }
    collectives: Rows | None = None
    if graphs:
        rows = _rows(path / "collectives.json")
        collectives = _in_plan_order(plan, rows)
    stats = _json(path / "stats.json", dict) if (path / "stats.json").exists() else {}
    return Dump(plan=plan, graphs=graphs, collectives=collectives, stats=stats)


def _rows(path: Path) -> Rows:
    rows: Rows = _json(path, list)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a list of objects, as a dump writes it.")
    return rows


def _json(path: Path, kind: type) -> Any:
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON, as a dump writes it: {error}.") from error
    if not isinstance(data, kind):
        raise ValueError(f"{path}: expected a JSON {kind.__name__}, as a dump writes it, got {type(data).__name__}.")
    return data


def diff_operators(old: Dump, new: Dump) -> list[str]:
    """Operators that graphs of one kind call another number of times: a line for each, by phase."""
    lines = []
    before, after = old.counts(), new.counts()
    for kind in before.keys() & after.keys():
        for phase in dict.fromkeys((*before[kind], *after[kind])):
            was, now = (counts[kind].get(phase, {}) for counts in (before, after))
            lines += [
                f"operators, {kind} gradients, {phase}: {name} {was.get(name, 0)} -> {now.get(name, 0)}"
                for name in dict.fromkeys((*was, *now))
                if was.get(name, 0) != now.get(name, 0)
            ]
    return lines
