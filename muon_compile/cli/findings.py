"""What ``doctor`` finds, for people and as JSON."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

State = Literal["ok", "note", "problem"]

_STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}
# Where the output is no terminal.
_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        check: What was.
        state: ``"ok"``; ``"note"``: it works, and there is something to know; ``"problem"``: something does not work.
        found: What there is.
        todo: What to do about it; empty where there is nothing to do.
    """

    check: str
    state: State
    found: str
    todo: str = ""


def ok(check: str, found: str) -> Finding:
    """All is right."""
    return Finding(check=check, state="ok", found=found)


def note(check: str, found: str, todo: str = "") -> Finding:
    """It works, and there is something to know."""
    return Finding(check=check, state="note", found=found, todo=todo)


def problem(check: str, found: str, todo: str) -> Finding:
    """Something does not work."""
    return Finding(check=check, state="problem", found=found, todo=todo)


def count(findings: Sequence[Finding], state: State) -> int:
    """How many are in a state."""
    return sum(finding.state == state for finding in findings)


def to_json(findings: Sequence[Finding]) -> str:
    """All of them, and whether there is no problem."""
    data = {"ok": not count(findings, "problem"), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(data, indent=1)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a line for each, under it what to do, and how many problems there are."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.state, style=_STYLES[finding.state]), Text(finding.check), Text(finding.found))
        if finding.todo:
            table.add_row("", "", Text(f"-> {finding.todo}"))
    problems, notes = count(findings, "problem"), count(findings, "note")
    if sys.stdout.isatty():
        Console(highlight=False).print(table)
    else:
        sink = io.StringIO()
        Console(file=sink, width=_WIDTH, color_system=None).print(table)
        print("\n".join(line.rstrip() for line in sink.getvalue().splitlines()))
    print(f"\n{problems or 'no'} problem{'s' * (problems != 1)}, {notes or 'no'} note{'s' * (notes != 1)}")
