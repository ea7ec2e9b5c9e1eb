"""How strategies scale: a model simulated at several world sizes, as a table and as a picture."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.hardware import Hardware, network_of
from muon_compile.plan.network import Network, Plane
from muon_compile.plan.simulate import Row, Simulation, simulate
from muon_compile.spec import MatrixSpec

# Of the strategies in their order, told apart by people with any colour vision; auto is black. Sources: grey; Okabe and
# Ito, 2008, without yellow, which white paper swallows; wine from Tol, 2021, Colour schemes.
_COLOURS = ("#888888", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#882255")
_WIDTH = 120
# Least distance of two labels, as a part of the panel's height.
_LABEL_GAP = 0.055

# World size and value of a strategy's points: those that can be used, and those beyond what the network holds.
_Curve = tuple[list[tuple[int, float]], list[tuple[int, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A simulation of one world size, and what was refused there for lack of queue pairs.

    Args:
        simulation: Every strategy's row.
        beyond: Rows of refused strategies as they would be if devices held any number of queue pairs.
    """

    simulation: Simulation
    beyond: tuple[Row, ...] = ()

    @property
    def ranks(self) -> int:
        """World size."""
        return self.simulation.mesh.num_ranks


def beyond_limits(what: str | Sequence[MatrixSpec], simulation: Simulation, hardware: Hardware) -> World:
    """Add to a simulation what its refused strategies would take on a network without limits, where that is why.

    Args:
        what: What was simulated.
        simulation: The simulation.
        hardware: Its hardware.
    """
    refused = [row.strategy for row in simulation.rows if row.refused]
    network = network_of(hardware)
    planes = tuple(replace(plane, max_queue_pairs=None) for plane in network.planes)
    free = replace(hardware, network=replace(network, planes=planes))
    rows = simulate(what, mesh=simulation.mesh, hardware=free, strategies=refused).rows if refused else ()
    return World(simulation=simulation, beyond=tuple(row for row in rows if not row.refused))


def scaling_table(simulations: Sequence[Simulation]) -> str:
    """Milliseconds of a step by strategy and world size, and why strategies were refused, as text."""
    first = simulations[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("ms a step", no_wrap=True)
    for simulation in simulations:
        table.add_column(f"{simulation.mesh.num_ranks:,} ranks", justify="right", no_wrap=True)
    reasons: dict[str, tuple[list[str], str]] = {}
    for index, row in enumerate(first.rows):
        cells = [simulation.rows[index] for simulation in simulations]
        table.add_row(row.strategy, *("refused" if cell.refused else f"{cell.seconds * 1e3:,.2f}" for cell in cells))
        for simulation, cell in zip(simulations, cells, strict=True):
            if cell.refused:
                worlds, _ = reasons.get(cell.strategy, ([], ""))
                reasons[cell.strategy] = ([*worlds, f"{simulation.mesh.num_ranks:,}"], cell.refused)
    sink = io.StringIO()
    console = Console(file=sink, width=_WIDTH, color_system=None, highlight=False)
    console.print(Text(f"{first.name} on {first.hardware}; predicted, on the rank with the most to do"))
    console.print(table)
    for strategy, (worlds, reason) in reasons.items():
        console.print(Text(f"{strategy}, refused at {', '.join(worlds)} ranks: {reason}"))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())


def load_pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files.

    Raises:
        ModuleNotFoundError: It is not installed; says how to install it.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Drawing needs matplotlib, which is not installed: pip install 'muon-compile[demo]'."
        ) from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def draw(worlds: Sequence[World], hardware: Hardware, path: Path) -> None:
    """Draw step times and queue pairs over world sizes, both on logarithmic axes.

    Args:
        worlds: Of one model, by growing size.
        hardware: The hardware that was simulated.
        path: The picture; its suffix says which kind, such as ``.png``.

    Raises:
        ModuleNotFoundError: Matplotlib is not installed.
    """
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained", sharex=True)
    plane = _scarcest(network_of(hardware))
    _panel(left, worlds, _curves(worlds, lambda row: row.seconds * 1e3))
    left.set_title("predicted time of a step, ms", loc="left", fontsize=10)
    limit = plane.max_queue_pairs
    _panel(right, worlds, _curves(worlds, lambda row: dict(row.queue_pairs)[plane.name]), limit)
    right.set_title(f"queue pairs of one rank on {plane.name}", loc="left", fontsize=10)
    first = worlds[0].simulation
    figure.suptitle(
        f"{first.name} on {first.hardware}: {first.num_elements / 1e9:,.3g} billion parameters", fontsize=12
    )
    figure.supxlabel("\n".join(("ranks", *_notes(worlds))), fontsize=9)
    figure.savefig(path, dpi=150, facecolor="white")
    pyplot.close(figure)


def _scarcest(network: Network) -> Plane:
    """The outermost plane that has a limit; where none has, the outermost."""
    planes = [network.plane(level.plane) for level in reversed(network.levels)]
    return next((plane for plane in planes if plane.max_queue_pairs is not None), planes[0])


def _colour(strategy: str) -> str:
    return "#000000" if strategy == "auto" else _COLOURS[STRATEGY_NAMES.index(strategy) % len(_COLOURS)]


def _curves(worlds: Sequence[World], value: Callable[[Row], float]) -> dict[str, _Curve]:
    """Every strategy's points, those without a value left out: a logarithmic axis has no place for 0."""
    curves: dict[str, _Curve] = {}
    for world in worlds:
        for rows, which in ((world.simulation.rows, 0), (world.beyond, 1)):
            for row in rows:
                if not row.refused and value(row) > 0:
                    curves.setdefault(row.strategy, ([], []))[which].append((world.ranks, value(row)))
    return curves


def _notes(worlds: Sequence[World]) -> list[str]:
    """What the picture's marks mean, and which strategies have no curve."""
    notes = []
    if any(world.beyond for world in worlds):
        notes.append("crosses: refused, since a device does not hold that many queue pairs")
    rows = zip(*(world.simulation.rows for world in worlds), strict=True)
    if never := [same[0].strategy for same in rows if all(row.refused for row in same)]:
        drawn = {row.strategy for world in worlds for row in world.beyond}
        if without := [name for name in never if name not in drawn]:
            notes.append(f"cannot be used for this model: {', '.join(without)}")
    return notes


def _panel(axes: Any, worlds: Sequence[World], curves: Mapping[str, _Curve], limit: int | None = None) -> None:
    """Curves on logarithmic axes, each with its name at its right end, and the limit as a line."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, (usable, refused) in curves.items():
        look = {"color": _colour(name), "linewidth": 3.2 if name == "auto" else 1.6}
        # Auto lies under the curve of what it took.
        axes.plot(*zip(*usable, strict=True), marker="o", markersize=4, zorder=2 if name == "auto" else 3, **look)
        if refused:
            axes.plot(*zip(*(usable[-1:] + refused), strict=True), linestyle=":", zorder=3, **look)
            axes.plot(*zip(*refused, strict=True), "x", markersize=8, markeredgewidth=2, zorder=4, **look)
    if limit is not None:
        axes.axhline(limit, color="#CC0000", linewidth=1, linestyle="--", zorder=1)
        place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(f"limit {limit:,}", (0.01, limit), color="#CC0000", fontsize=8.5, **place)
    axes.set_xticks([world.ranks for world in worlds], [_tick(world) for world in worlds])
    axes.yaxis.set_major_locator(importlib.import_module("matplotlib.ticker").LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _label(axes, curves, worlds[-1].ranks)


def _tick(world: World) -> str:
    sizes = [size for _, size in world.simulation.mesh.axes]
    return f"{world.ranks:,}" + (f"\n{' x '.join(map(str, sizes))}" if len(sizes) > 1 else "")


def _label(axes: Any, curves: Mapping[str, _Curve], last: int) -> None:
    """Names at the right edge, pushed apart, of the curves that reach it; those of others beside their end."""
    low, high = (math.log(edge) for edge in axes.get_ylim())
    ends = {name: max(usable + refused) for name, (usable, refused) in curves.items()}
    right = sorted((name for name in ends if ends[name][0] == last), key=lambda name: ends[name][1])
    heights: list[float] = []
    for name in right:
        wanted = (math.log(ends[name][1]) - low) / (high - low)
        heights.append(max([wanted, *(height + _LABEL_GAP for height in heights[-1:])]))
    for place in range(len(right)):
        # From the top down: nothing stands above the panel.
        heights[-1 - place] = min(heights[-1 - place], 1.0 - place * _LABEL_GAP)
    line = {"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.7, "relpos": (0.0, 0.5)}
    for name, height in zip(right, heights, strict=True):
        look = {"color": _colour(name), "fontsize": 8.5, "va": "center", "arrowprops": line}
        axes.annotate(name, ends[name], xytext=(1.03, height), textcoords="axes fraction", **look)
    short = [name for name in ends if name not in right]
    for end in dict.fromkeys(ends[name] for name in short):
        names = ", ".join(name for name in short if ends[name] == end)
        axes.annotate(names, end, xytext=(6, 6), textcoords="offset points", fontsize=8.5, color="#555555")
