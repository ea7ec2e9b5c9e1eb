"""The example that watches a training writes what it says, and the cost of probes can be measured."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from muon_compile.run.probes import FIGURES

ROOT = Path(__file__).parents[2]


def run(*words: str, timeout: float = 100) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_three_steps_of_the_example(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ("--steps", "3", "--backend", "aot_eager", "--threads", "1", "--out", str(tmp_path))
    told = run("examples/watch_training.py", *words)
    with (tmp_path / "watch_training.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["step"] for row in rows} == {"1", "2", "3"} and {row["figure"] for row in rows} == set(FIGURES)
    assert any("qkv.weight" in row["parameters"] for row in rows)
    assert all(float(row["value"]) > 0 for row in rows if row["figure"] == "update_rms")
    assert (tmp_path / "watch_training.png").stat().st_size > 10_000
    if importlib.util.find_spec("tensorboard") is None:
        assert "pip install tensorboard" in told
    else:
        assert list((tmp_path / "watch_training-tensorboard").iterdir())


def test_the_cost_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "probes.json"
    words = ("--sets", "smoke", "--backend", "aot_eager", "--seconds", "0.1", "--max-rounds", "6", "--json", str(path))
    told = run("tools/bench_probes.py", *words)
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert "on / off" in told and row["rounds"] >= 5 and row["ratio"]["median"] > 0
    assert any(name.endswith("orthogonality_error") for name in row["figures"])
