"""The benchmark's ratios as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _rounds import OURS
from _tables import digits, peers_of

# Told apart by people with any colour vision. Source: Okabe and Ito, 2008.
COLOURS = ["#0072B2", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7"]
BAR_INCHES, GAP_INCHES, MARGIN_INCHES = 0.2, 0.16, 1.7


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Horizontal bars, per set one for every optimizer that ran: its time over ours, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    peers = peers_of(report)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(peers)}
    ratios = [
        (row, [(name, row["steps"][name]["ratio"]) for name in peers if name in row["steps"]]) for row in report["rows"]
    ]
    height = sum(len(bars) * BAR_INCHES + GAP_INCHES for _, bars in ratios) + MARGIN_INCHES
    figure, axes = pyplot.subplots(figsize=(9, height), layout="constrained")
    axes.set_xscale("log")
    position, ticks, seen = 0.0, [], set()
    for row, bars in ratios:
        start = position
        for name, ratio in bars:
            label = None if name in seen else name
            seen.add(name)
            middle = position + BAR_INCHES / 2
            # Bars begin at 1, so that a slower ours points to the left.
            axes.barh(middle, ratio["median"] - 1, left=1, height=BAR_INCHES * 0.9, color=colours[name], label=label)
            axes.plot([ratio["low"], ratio["high"]], [middle, middle], color="#333333", linewidth=1)
            axes.annotate(
                digits(ratio["median"]),
                (max(1.0, ratio["high"], ratio["median"]), middle),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
            position += BAR_INCHES
        ticks.append(
            ((start + position) / 2, f"{row['set']}\n{row['shapes']}, {digits(row['steps'][OURS]['ms']['median'])} ms")
        )
        position += GAP_INCHES
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.set_ylim(position, -GAP_INCHES)
    highest = max(ratio["high"] for _, bars in ratios for _, ratio in bars)
    lowest = min(ratio["low"] for _, bars in ratios for _, ratio in bars)
    axes.set_xlim(min(0.8, lowest / 1.1), max(2.0, highest * 1.25))
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("time of the other's step / time of ours (line: quartiles); left of 1 ours is slower")
    facts = report["header"]
    where = facts["cpu"] if facts["device"] == "cpu" else facts["device"]
    axes.set_title(f"{where}, {facts['threads']} threads, torch {facts['torch']}, {facts['commit']}", fontsize=9)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, facecolor="white")
    pyplot.close(figure)
