"""Two reports of bench_step.py side by side: how each ratio to ours changed.

    python tools/compare.py out/before.json out/after.json --fail-over 10

A change is beyond the spread where the quartiles of the two reports do not overlap. Exit code 1 where a ratio fell by
more than --fail-over percent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a ratio depends on: reports that differ there are not of one machine.
COMPARABLE = ("device", "cpu", "threads", "torch", "backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One ratio in both reports.

    Args:
        name: The set.
        peer: The other optimizer.
        old: Its ratio to ours before: median, low and high quartile.
        new: And after.
    """

    name: str
    peer: str
    old: Mapping[str, float]
    new: Mapping[str, float]

    @property
    def percent(self) -> float:
        """Change of the median; negative where ours lost."""
        return (self.new["median"] / self.old["median"] - 1) * 100

    @property
    def beyond_spread(self) -> bool:
        """Whether the quartiles do not overlap."""
        return self.new["low"] > self.old["high"] or self.new["high"] < self.old["low"]


def read_report(path: Path) -> dict[str, Any]:
    """A report of bench_step.py.

    Raises:
        ValueError: The file is none.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        for row in report["rows"]:
            for entry in row["steps"].values():
                entry["ms"]["median"]
        report["header"]["torch"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected a report of bench_step.py --json, got {type(error).__name__}: {error}; "
            "write it anew with this version's bench_step.py."
        ) from error
    return dict(report)


def ratios(report: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, float]]:
    """Ratios by set and peer."""
    return {
        (row["set"], peer): entry["ratio"]
        for row in report["rows"]
        for peer, entry in row["steps"].items()
        if "ratio" in entry
    }


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every ratio that both reports have."""
    before, after = ratios(old), ratios(new)
    return [
        Change(name=name, peer=peer, old=before[name, peer], new=after[name, peer])
        for name, peer in before
        if (name, peer) in after
    ]


def warnings(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """What keeps the reports from being comparable, and what only one of them has."""
    for key in COMPARABLE:
        before, after = old["header"].get(key), new["header"].get(key)
        if before != after:
            yield f"the reports differ in {key}: {before!r} and {after!r}; their ratios are not of one machine"
    only = sorted(set(ratios(old)) ^ set(ratios(new)))
    if only:
        yield "only in one report: " + ", ".join(f"{name}: {peer}" for name, peer in only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--fail-over", type=float, metavar="PERCENT", help="exit 1 where a ratio fell by more")
    args = parser.parse_args()
    try:
        old, new = read_report(args.old), read_report(args.new)
    except ValueError as error:
        parser.error(str(error))
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    for warning in warnings(old, new):
        console.print(f"warning: {warning}", highlight=False, markup=False)
    table = Table("set", "the other", "old ratio (quartiles)", "new ratio (quartiles)", "change", "beyond the spread")
    found = changes(old, new)
    for change in found:
        cells = [f"{r['median']:.3g} ({r['low']:.3g}-{r['high']:.3g})" for r in (change.old, change.new)]
        mark = "yes" if change.beyond_spread else ""
        table.add_row(change.name, change.peer, *cells, f"{change.percent:+.1f} %", mark)
    console.print(table)
    if not found:
        sys.exit("compare: expected reports with a set and a peer in common, got none.")
    fell = [c for c in found if args.fail_over is not None and c.percent < -args.fail_over]
    if fell:
        sys.exit(f"compare: fell by more than {args.fail_over:g} %: " + ", ".join(f"{c.name}: {c.peer}" for c in fell))


if __name__ == "__main__":
    main()
