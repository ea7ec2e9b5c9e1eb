"""Commands that write pages to look at: dump, report."""

from __future__ import annotations

import argparse
import json
import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muon_compile.cli.dumps import GRAPHS, Dump, diff_operators, load_dump
from muon_compile.cli.inputs import load_hardware
from muon_compile.cli.outputs import write_text
from muon_compile.cli.plans import PLANNING, planned
from muon_compile.inspect.dump import dump_files, write_files
from muon_compile.inspect.report import render_comparison, render_report
from muon_compile.inspect.report_data import plan_data
from muon_compile.plan.diff import diff_plans
from muon_compile.plan.hardware import Hardware
from muon_compile.plan.models import MODELS
from muon_compile.plan.plan import Plan


def dump(args: argparse.Namespace) -> int:
    """``dump``."""
    older = sorted(path.name for path in args.out.glob(f"*{GRAPHS}"))
    if older:
        raise ValueError(
            f"--out: expected a folder without the graphs of another dump, got {args.out}, which has "
            f"{', '.join(older)}; name another one, or remove it first."
        )
    plan, hardware = _given_plan(args) if _is_saved(args.what) else planned(args)
    paths = write_files(args.out, _files(plan, hardware, args))
    if args.json:
        print(json.dumps({"plan": plan.digest, "files": [str(path) for path in paths]}, indent=1))
    else:
        print("\n".join(map(str, paths)))
    return 0


def _files(plan: Plan, hardware: Hardware | None, args: argparse.Namespace) -> dict[str, str]:
    if args.rank is None:
        if args.backend is not None:
            raise ValueError("--backend: it is about a rank's graph; expected --rank N beside it.")
        return dump_files(plan, hardware=hardware)
    from muon_compile.cli.rank_graph import rank_graph

    files = dump_files(plan, rank_graph(plan, args.rank, args.backend), hardware=hardware)
    del files["stats.json"]  # nothing ran
    return files


def _is_saved(what: str) -> bool:
    """Whether it is meant as a saved plan: a file or folder, or the name of one that is not there."""
    return what not in MODELS and (what.endswith(".json") or os.sep in what or Path(what).exists())


def _given_plan(args: argparse.Namespace) -> tuple[Plan, Hardware | None]:
    given = [name for name in ("mesh", *PLANNING) if getattr(args, name) is not None]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"{flags}: {args.what} is a plan and has its own; leave it out, or name a model as WHAT.")
    plan = load_dump(Path(args.what)).plan
    if args.hardware is None:
        return plan, None
    hardware = load_hardware(args.hardware)
    device = plan.buckets[0].device.split(":")[0]
    if hardware.device != device:
        raise ValueError(
            f"--hardware: expected figures of the plan's device, {device!r}, got {args.hardware}, which has those of "
            f"{hardware.device!r}; leave it out, or plan anew for that machine."
        )
    return plan, hardware


def report(args: argparse.Namespace) -> int:
    """``report``."""
    if args.out is None and not args.json:
        raise ValueError("expected --out PATH, where the page goes to, or --json.")
    if args.open and args.out is None:
        raise ValueError("--open: expected --out PATH beside it: the page that is opened.")
    old = load_dump(args.a)
    new = None if args.b is None else load_dump(args.b)
    changes = [] if new is None else [*diff_plans(old.plan, new.plan), *diff_operators(old, new)]
    if args.out is not None:
        write_text(args.out, _page(old) if new is None else render_comparison(old.plan, new.plan))
    file = None if args.out is None else str(args.out)
    if args.json:
        data = _figures(old) if new is None else {"old": _figures(old), "new": _figures(new), "changes": changes}
        print(json.dumps({"file": file, **data}, indent=1))
    else:
        print("\n".join([str(file), *changes]))
    if args.open:
        _open(args.out)
    return 1 if changes else 0


def _page(dump: Dump) -> str:
    return render_report(
        dump.plan,
        graphs=dump.graphs,
        collectives=dump.collectives,
        stats=dump.stats,
        title=f"muon_compile step, plan {dump.plan.digest}",
    )


def _figures(dump: Dump) -> Mapping[str, Any]:
    """What is counted of a plan and, of a dump, of its graphs."""
    data = plan_data(dump.plan)
    figures = {name: data[name] for name in ("digest", "mesh", "figures")}
    return {**figures, "operators": dump.counts(), "stats": dump.stats}


def _open(path: Path) -> None:
    """Open a page in a browser, or say why not: without a display it could only be one for terminals."""
    shown = sys.platform == "darwin" or any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    if not shown or not webbrowser.open(path.resolve().as_uri()):
        why = "no browser was found" if shown else "there is no display (DISPLAY and WAYLAND_DISPLAY are not set)"
        print(f"--open: {why}; open {path} yourself.", file=sys.stderr)
