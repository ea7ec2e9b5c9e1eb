"""A plan, and with it a dump's graphs and counters, as one HTML page that needs no network; and two plans compared."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from string import Template
from typing import Any

from muon_compile.inspect.report_data import plain, plan_data
from muon_compile.inspect.report_graph import graph_data
from muon_compile.plan.diff import diff_plans
from muon_compile.plan.marks import PHASES
from muon_compile.plan.plan import Plan

# One script and one style sheet, of files that each are about one thing; later ones use earlier ones.
_SCRIPTS = (
    "words.js",
    "dom.js",
    "table.js",
    "flow.js",
    "charts.js",
    "rail.js",
    "panel.js",
    "views.js",
    "search.js",
    "sections.js",
    "comparison.js",
    "main.js",
)
_STYLES = ("base.css", "search.css", "pictures.css", "tables.css", "panel.css")


def render_report(
    plan: Plan,
    *,
    graphs: Mapping[str, list[dict[str, Any]]] | None = None,
    collectives: list[dict[str, Any]] | None = None,
    stats: Mapping[str, Any] | None = None,
    hyper: Sequence[Mapping[str, Any]] | None = None,
    title: str = "muon_compile step",
) -> str:
    """A step as one self-contained HTML page: what it does, on which rank, and why.

    Args:
        plan: The plan.
        graphs: Nodes of each traced graph by its kind, ``"all"`` or ``"masked"`` (``report_graph.graph_data``).
        collectives: What a rank's graph holds of each promised collective, in the plan's order: rows of
            ``inspect.collectives``.
        stats: Counters by name.
        hyper: Hyperparameters by name, of every group.
        title: The page's title.

    Raises:
        ValueError: Nodes or collectives that do not fit together, or not the plan.
    """
    names = [bucket.name for bucket in plan.buckets]
    data = {
        "mode": "report",
        "title": title,
        "plans": [plan_data(plan, collectives)],
        "graphs": {kind: graph_data(nodes, names) for kind, nodes in (graphs or {}).items()},
        "stats": plain(stats or {}),
        "hyper": [plain(group) for group in hyper or ()],
    }
    return _page(title, data)


def render_comparison(old: Plan, new: Plan) -> str:
    """What changed from one plan to another, as one self-contained HTML page.

    Args:
        old: The plan before.
        new: The plan after.
    """
    title = f"muon_compile: plan {old.digest} to {new.digest}"
    data = {"mode": "comparison", "title": title, "plans": [plan_data(old), plan_data(new)]}
    return _page(title, {**data, "changes": diff_plans(old, new)})


def _page(title: str, data: Mapping[str, Any]) -> str:
    page, style, script = _templates()
    return page.substitute(
        # A lone surrogate could not be written to a file.
        title=html.escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        style=style,
        script=script,
        data=_embedded({**data, "phases": PHASES}),
        style_hash=_csp_hash(style),
        script_hash=_csp_hash(script),
    )


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: no name can end it. Source: HTML Standard, 4.12.1.3."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@lru_cache(maxsize=1)
def _templates() -> tuple[Template, str, str]:
    """The page with its places, its style sheet and its script."""
    folder = files("muon_compile.inspect") / "templates"

    def joined(names: Sequence[str]) -> str:
        return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)

    return Template(joined(["page.html"])), joined(_STYLES), joined(_SCRIPTS)


def _csp_hash(text: str) -> str:
    """A Content-Security-Policy source that allows this very text alone."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
