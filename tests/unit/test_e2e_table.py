"""The end-to-end table: one small run of it, and what it predicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import e2e_table


def test_predictions_get_better_change_by_change() -> None:
    rows = e2e_table.predictions("100b")
    times = [row["ms"] for row in rows]
    assert times[0] > times[1] > times[2] > times[3] and times[-1] == min(times)
    # One graph saves the host's launches, which the device hides where they are shorter than its own work.
    assert rows[4]["host"] < rows[3]["host"] / 10
    assert rows[3]["products"] == rows[4]["products"]
    naive, local = rows[0], rows[1]
    assert naive["network"] > 10 * local["network"], "gathered experts are what travels most"


def test_a_run_of_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e2e.json"
    words = ["--config", "tiny", "--mesh", "1", "--steps", "2", "--backend", "aot_eager", "--strategies", "auto"]
    assert e2e_table.main([*words, "--json", str(path)]) == 0
    told = capsys.readouterr().out
    assert "naive" in told and "muon, auto" in told and "planner's choice" in told
    runs = {run["name"]: run for run in json.loads(path.read_text(encoding="utf-8"))["runs"]}
    assert runs.keys() == {"naive", "adamw", "auto"}
    assert all(run["optimizer_cpu_seconds"] > 0 and run["tokens_per_second"] > 0 for run in runs.values())


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(SystemExit):
        e2e_table.main(["--steps", "1"])
    with pytest.raises(RuntimeError, match=r"(?s)nonsense: the run ended with status 1.*nonsense"):
        words = ["--config", "tiny", "--mesh", "1", "--backend", "aot_eager", "--strategies", "nonsense"]
        e2e_table.main([*words, "--steps", "2"])
