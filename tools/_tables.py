"""The benchmark's report as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from _rounds import DEFAULT, OURS, STOCK
from rich.console import Console
from rich.table import Table


def peers_of(report: Mapping[str, Any]) -> list[str]:
    """Everyone but ours who ran in any set, stock first."""
    found: dict[str, None] = {}
    for row in report["rows"]:
        found |= dict.fromkeys(name for name in row["steps"] if name != OURS)
    return sorted(found, key=lambda name: (name != STOCK, name != DEFAULT))


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def spread(entry: Mapping[str, float]) -> str:
    """Median, and the quartiles below it."""
    return f"{digits(entry['median'])}\n{digits(entry['low'])}-{digits(entry['high'])}"


def forms(row: Mapping[str, Any]) -> str:
    """What runs the iteration of a set's batches: ``standard graph``, each with its number where there are several."""
    counts = Counter(f"{batch['form']} {batch['kernel']}" for batch in row["batches"])
    return "\n".join(f"{name} x{n}" if len(row["batches"]) > 1 else name for name, n in counts.items())


def ratio_table(report: Mapping[str, Any]) -> Table:
    """Times of ours and ratios to it."""
    peers = peers_of(report)
    table = Table(
        "set", "shapes", "ours ms", *peers, "rounds", title="time of the other / time of ours", show_lines=True
    )
    for row in report["rows"]:
        steps = row["steps"]
        ratios = [spread(steps[name]["ratio"]) if name in steps else "-" for name in peers]
        table.add_row(row["set"], row["shapes"], spread(steps[OURS]["ms"]), *ratios, str(row["rounds"]))
    return table


def facts_table(report: Mapping[str, Any]) -> Table:
    """What ours is and what it costs."""
    table = Table(title="ours: form, compiling, share of the machine's limits; allocations and page faults per step")
    for name in ("set", "form, kernel", "plan", "compile s"):
        table.add_column(name)
    for name in (
        "ideal ms",
        "share",
        "allocations\nours / stock",
        "MiB\nours / stock",
        "faults\nours / stock\n/ default",
    ):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        limits, counted, steps = row["roofline"], row["allocations"], row["steps"]
        mib = [f"{counted[name]['bytes'] / 2**20:.1f}" for name in (OURS, STOCK)]
        faults = [f"{steps[name]['faults']:.0f}" if name in steps else "-" for name in (OURS, STOCK, DEFAULT)]
        table.add_row(
            row["set"],
            forms(row),
            row["plan"][:8],
            f"{row['compile_seconds']:.1f}{' cached' if row['cached'] else ''}",
            f"{digits(limits['ideal_ms_sum'])} ({digits(limits['ideal_ms_max'])})",
            f"{limits['share_sum']:.0%} ({limits['share_max']:.0%}), {limits['share_sum_fastest']:.0%}",
            " / ".join(str(counted[name]["count"]) for name in (OURS, STOCK)),
            " / ".join(mib),
            " / ".join(faults),
        )
    return table


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print both tables and the notes under them."""
    console.print(ratio_table(report))
    console.print(facts_table(report))
    console.print(
        "A cell is the median and, below it, the quartiles of all rounds. Ideal is bytes over the measured bandwidth "
        "plus FLOPs over the measured bfloat16 rate (the best of each seen), in brackets the larger of the two; share "
        "is ideal over the median step, then over the fastest. "
        "Bytes: gradient read, momentum and parameter read and written, X and the result written and read in bfloat16.",
        highlight=False,
    )
    for row in report["rows"]:
        limits = row["roofline"]
        console.print(
            f"{row['set']}: {limits['bytes_per_second'] / 1e9:.1f} GB/s (triad), "
            f"{limits['flops_per_second'] / 1e9:.0f} GFLOP/s ({limits['rate_measured_with']}); "
            f"{limits['bytes'] / 2**20:.0f} MiB, {limits['flops'] / 1e9:.2f} GFLOP a step",
            highlight=False,
        )
    notes: dict[str, list[str]] = {}
    for row in report["rows"]:
        for name, note in row["notes"].items():
            notes.setdefault(f"{name}: {note}", []).append(row["set"])
    for note, sets in notes.items():
        where = "" if len(sets) == len(report["rows"]) else f" ({', '.join(sets)})"
        console.print(f"{note}{where}", highlight=False, markup=False)
