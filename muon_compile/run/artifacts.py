"""Write what a step is made of as files, for tools and for reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from muon_compile.lower.compiled import CompiledGraph
from muon_compile.lower.trace import TracedStep
from muon_compile.plan.plan import Plan
from muon_compile.run.stats import StepStats


def write_artifacts(
    directory: Path, plan: Plan, graphs: Mapping[str, tuple[TracedStep, CompiledGraph]], stats: StepStats
) -> list[Path]:
    """Write ``plan.json``, ``plan.txt``, ``stats.json`` and, per graph, its FX code and the backend's code.

    Returns:
        The paths written.
    """
    texts = {
        "plan.json": plan.to_json(),
        "plan.txt": plan.describe() + "\n",
        "stats.json": json.dumps(stats.as_dict(), indent=1),
    }
    for kind, (traced, compiled) in graphs.items():
        texts[f"{kind}_gradients/graph.py"] = traced.graph.print_readable(print_output=False)
        for name, code in compiled.code.items():
            texts[f"{kind}_gradients/{name}"] = code
    written = []
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
