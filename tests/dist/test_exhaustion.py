"""Ranks under a limit of open files: all-to-all runs out of them, a ring does not. The tool's own small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import exhaust_connections as exhaust

# It takes 20 s on two idle cores, and several times as long on busy ones.
pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

RANKS, WORLD = 10, 6


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process of its own: it forks, and this one may have threads."""
    path = tmp_path_factory.mktemp("exhaustion") / "report.json"
    command = [sys.executable, exhaust.__file__, "--timeout", "60", "--json", str(path)]
    command += ["--ranks", str(RANKS), "--worlds", str(WORLD)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert path.exists(), ran.stderr
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_kinds_open_as_many_connections_as_their_formulas_say(report: dict[str, Any]) -> None:
    most = {row["kind"]: row["most"] for row in report["kinds"]}
    assert most == {kind: formula(WORLD) for kind, formula in exhaust.FORMULAS.items()}
    assert (most["all_gather_into_tensor"], most["broadcast"], most["all_to_all_single"]) == (2, 3, 5)


def test_all_to_all_runs_out_where_the_picked_strategy_runs(report: dict[str, Any]) -> None:
    story = report["story"]
    wrap, pairwise, picked, connected = story["tries"]
    assert story["picked"] == "all_gather"
    assert pairwise["outcome"] == "fails" and pairwise["exhausted"] > 0, pairwise
    assert picked["statuses"] == {"ran": RANKS} and picked["error"] < exhaust.TOLERANCE, picked
    assert wrap["connections"] <= picked["connections"] <= exhaust.tree_and_ring(RANKS)
    assert connected["outcome"] == "fails" and connected["exhausted"] > 0, connected


@pytest.mark.parametrize(
    ("formula", "counts"),
    [
        (exhaust.ring, [1, 2, 2, 2]),
        (exhaust.tree, [1, 2, 3, 4]),
        (exhaust.trees, [1, 2, 4, 7]),
        (exhaust.tree_and_ring, [1, 2, 4, 5]),
        (exhaust.pairwise, [1, 2, 5, 15]),
    ],
)
def test_formulas(formula: Any, counts: list[int]) -> None:
    assert [formula(ranks) for ranks in (2, 3, 6, 16)] == counts


def test_the_planner_picks_what_sends_least_of_what_fits() -> None:
    assert [exhaust.pick(limit, 16) for limit in (15, 14, 5)] == ["all_to_all", "hierarchical_all_to_all", "all_gather"]
    with pytest.raises(ValueError, match="--limit leaves 4 connections per rank, expected at least 5"):
        exhaust.pick(4, 16)
