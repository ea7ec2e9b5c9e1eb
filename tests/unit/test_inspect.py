"""Pictures and traces of simulations, read back as far as that can be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import muon_compile as mc
from muon_compile.inspect import scaling
from muon_compile.inspect.scaling import World, beyond_limits, draw, load_pyplot, scaling_table
from muon_compile.inspect.trace import timeline
from muon_compile.plan.network import Level, Network, Plane
from muon_compile.plan.simulate import simulate
from muon_compile.plan.step_cost import Event

H100 = mc.Hardware.preset("h100")
# A network that refuses an all-to-all of 16 ranks, two in a node: 12 connections are held on the wire, and it takes 14,
# beside 4 of the tree that agrees on gradients.
SMALL = replace(
    H100,
    network=Network(
        levels=(
            Level(name="node", ranks=2, latency_seconds=1e-6, bytes_per_second=1e11, plane="inner"),
            Level(name="cluster", latency_seconds=1e-5, bytes_per_second=1e10, plane="wire"),
        ),
        planes=(Plane(name="inner"), Plane(name="wire", max_queue_pairs=12)),
    ),
)
NAMES = ("auto", "local", "all_gather", "all_to_all")


def worlds(*sizes: int) -> list[World]:
    return [beyond_limits("gpt2", simulate("gpt2", n, hardware=SMALL, strategies=NAMES), SMALL) for n in sizes]


# -- the trace ------------------------------------------------------------------------------------------------------


def bars(trace: dict[str, Any], pid: int) -> list[tuple[Any, ...]]:
    found = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]
    return [(event["name"], event["cat"], event["tid"], event["ts"], event["dur"]) for event in found]


def test_steps_are_processes_and_lanes_are_threads() -> None:
    steps = {
        "first": [
            Event(name="pack", lane="compute", start=0.0, seconds=1e-3),
            Event(name="gather", lane="network", start=1e-3, seconds=2.5e-6),
        ],
        "second": [Event(name="update", lane="compute", start=0.5, seconds=0.25)],
    }
    trace = json.loads(json.dumps(timeline(steps)))
    assert bars(trace, 1) == [("pack", "compute", 1, 0.0, 1000.0), ("gather", "network", 2, 1000.0, 2.5)]
    assert bars(trace, 2) == [("update", "compute", 1, 500000.0, 250000.0)]
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and "name" in event["args"]
    }
    lanes = {("thread_name", pid, tid): lane for pid in (1, 2) for tid, lane in ((1, "compute"), (2, "network"))}
    assert named == lanes | {("process_name", 1, 0): "first", ("process_name", 2, 0): "second"}


def test_bars_of_a_lane_do_not_overlap() -> None:
    found = simulate("gpt2", 16, hardware=H100)
    trace = timeline({row.strategy: row.events for row in found.rows})
    busy = 0
    for pid, row in enumerate(found.rows, start=1):
        for tid in (1, 2):
            lane = sorted((ts, dur) for _, _, thread, ts, dur in bars(trace, pid) if thread == tid)
            ends = [round(ts + dur, 3) for ts, dur in lane]
            assert all(end <= start for end, (start, _) in zip(ends, lane[1:], strict=False))
            assert not ends or max(ends) <= row.seconds * 1e6 + 1e-3
            busy += len(lane)
    assert busy == sum(len(row.events) for row in found.rows) > 50


# -- scaling --------------------------------------------------------------------------------------------------------


def test_beyond_the_limit_are_only_those_refused_for_it() -> None:
    few, many = worlds(8, 16)
    assert few.simulation.row("all_to_all").refused == "" and few.beyond == ()
    assert "12" in many.simulation.row("all_to_all").refused and many.simulation.row("local").refused
    (row,) = many.beyond
    assert row.strategy == "all_to_all" and dict(row.queue_pairs)["wire"] == 18 and row.seconds > 0
    assert many.ranks == 16
    nothing = simulate("gpt2", 16, hardware=SMALL, strategies=["auto"])
    assert beyond_limits("gpt2", nothing, SMALL) == World(simulation=nothing)


def test_the_table_has_times_and_reasons() -> None:
    few, many = (world.simulation for world in worlds(8, 16))
    lines = scaling_table([few, many]).splitlines()
    assert lines[0].startswith("gpt2 on h100; predicted") and max(map(len, lines)) <= 120
    assert lines[2].split() == ["ms", "a", "step", "8", "ranks", "16", "ranks"]
    cells = {line.split()[0]: line.split()[1:] for line in lines[4:8]}
    assert cells["local"] == ["refused", "refused"]
    assert cells["all_to_all"] == [f"{few.row('all_to_all').seconds * 1e3:,.2f}", "refused"]
    assert cells["all_gather"] == [f"{each.row('all_gather').seconds * 1e3:,.2f}" for each in (few, many)]
    assert any(line.startswith("all_to_all, refused at 16 ranks: make_plan: ") for line in lines)
    assert any(line.startswith("local, refused at 8, 16 ranks: Parameter ") for line in lines)


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Keeps the figures that are drawn, to look into them."""
    kept: list[Any] = []
    close = load_pyplot().close
    monkeypatch.setattr(load_pyplot(), "close", kept.append)
    yield kept
    for each in kept:
        close(each)


def test_the_picture_shows_times_queue_pairs_and_refusals(tmp_path: Path, figure: list[Any]) -> None:
    few, many = worlds(8, 16)
    draw([few, many], SMALL, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    times, pairs = figure[0].axes
    drawn = [[tuple(map(float, point)) for point in line.get_xydata()] for line in times.get_lines()]
    usable, beyond = many.simulation.row("all_gather"), many.beyond[0]
    assert [(8.0, few.simulation.row("all_gather").seconds * 1e3), (16.0, usable.seconds * 1e3)] in drawn
    crosses = [line for line in times.get_lines() if line.get_marker() == "x"]
    assert [tuple(line.get_xydata()[0]) for line in crosses] == [(16.0, beyond.seconds * 1e3)]
    for axes in (times, pairs):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert [text.get_text() for text in axes.get_xticklabels()] == ["8", "16"]
    texts = [text.get_text() for text in pairs.texts]
    assert "limit 12" in texts and {"auto", "all_gather", "all_to_all"} <= set(texts)
    assert [tuple(line.get_ydata()) for line in pairs.get_lines() if line.get_linestyle() == "--"] == [(12, 12)]
    assert (16.0, 18.0) in [tuple(line.get_xydata()[0]) for line in pairs.get_lines() if line.get_marker() == "x"]
    note = figure[0].get_supxlabel()
    assert "crosses: refused" in note and "cannot be used for this model: local" in note


def test_labels_stand_apart_and_inside(tmp_path: Path, figure: list[Any]) -> None:
    # Within one node every strategy has as many peers, so all labels would stand at one height.
    found = [World(simulation=simulate("gpt2", n, hardware="cpu-2core")) for n in (2, 4)]
    draw(found, mc.Hardware.preset("cpu-2core"), tmp_path / "scaling.png")
    # And at the top, where they have to make room downwards.
    top, high = load_pyplot().subplots()
    figure.append(top)
    scaling._panel(high, found, {name: ([(2, 1.0), (4, 10.0)], []) for name in ("auto", *scaling.STRATEGY_NAMES[:4])})
    for axes in (*figure[0].axes, high):
        heights = sorted(text.xyann[1] for text in axes.texts if text.xyann[0] == 1.03)
        assert len(heights) > 4
        assert all(b - a > scaling._LABEL_GAP - 1e-9 for a, b in pairwise(heights))
        assert heights[-1] <= 1
    # No plane of it has a limit.
    assert not any("limit" in text.get_text() for text in figure[0].axes[1].texts)


def test_replicas_are_named_under_their_world(tmp_path: Path, figure: list[Any]) -> None:
    mesh = mc.MeshSpec(axes=(("replicate", 2), ("shard", 4)))
    found = [
        World(simulation=simulate("gpt2", mesh=on, hardware=H100)) for on in (mc.MeshSpec(axes=(("shard", 4),)), mesh)
    ]
    draw(found, H100, tmp_path / "scaling.png")
    assert [text.get_text() for text in figure[0].axes[0].get_xticklabels()] == ["4", "8\n2 x 4"]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(scaling.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'muon-compile\[demo\]'"):
        load_pyplot()


def test_colours_of_strategies_differ() -> None:
    names = ("auto", *scaling.STRATEGY_NAMES[: len(scaling._COLOURS)])
    assert len({scaling._colour(name) for name in names}) == len(names)
