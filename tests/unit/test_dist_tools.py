"""The tools that run ranks: their judgement, and a small run of each from end to end."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import _soak_rank
import gather_memory
import soak

TOOLS = Path(soak.__file__).parent
RUN = soak.Run(mesh="fsdp", strategy="auto", backend="aot_eager", steps=20, every=10, seed=0, deadline=0.0)
LOOK = soak.Look(steps=10, live_bytes=100, live_tensors=3, rss=2**20, recompiles=0, compiles=1, problems=())
LAST = dataclasses.replace(LOOK, steps=20)


# -- soak -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "last", "status", "says"),
    [
        ("", LAST, 0, "held"),
        ("", dataclasses.replace(LAST, problems=("copies of even differ",)), 1, "rank 1, step 20: copies of even"),
        ("", LOOK, 2, "out of time after 10 of 20"),
        ("no progress for 5 s", LOOK, 3, "after step 10 or later: no progress"),
    ],
)
def test_a_soak_is_judged(verdict: str, last: soak.Look, status: int, says: str) -> None:
    code, words = soak.judge(RUN, verdict, [[LOOK, LAST], [LOOK, last]])
    assert code == status and words.startswith(says)


def test_growth_is_a_problem_and_resident_slack_is_not() -> None:
    slack = _soak_rank.RSS_SLACK
    assert _soak_rank.grown(LOOK, dataclasses.replace(LAST, rss=LOOK.rss + slack)) == []
    (grew,) = _soak_rank.grown(LOOK, dataclasses.replace(LAST, rss=LOOK.rss + slack + 1))
    assert "resident" in grew
    for other in ({"live_bytes": 104}, {"live_tensors": 4}):
        (grew,) = _soak_rank.grown(LOOK, dataclasses.replace(LAST, **other))
        assert grew.startswith("live memory was 100 bytes in 3 tensors")


def test_live_memory_counts_a_storage_once() -> None:
    gc.collect()
    gc.disable()  # what other tests left behind would go meanwhile
    try:
        before = _soak_rank.live_memory()
        tensor = torch.zeros(1000)
        views = [tensor[:10], tensor.view(10, 100)]
        after = _soak_rank.live_memory()
    finally:
        gc.enable()
    assert (after[0] - before[0], after[1] - before[1]) == (4000, 1 + len(views))


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_soak_of_20_steps(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "soak.py"), "--steps", "20", "--every", "10", "--mesh", "hsdp"]
    command += ["--strategy", "gather_scatter", "--json", str(tmp_path / "soak.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))["runs"]
    assert [[look["steps"] for look in looks] for looks in run["looks"]] == [[10, 20]] * soak.WORLD
    assert run["status"] == 0 and "held" in done.stdout


# -- memory of what is gathered ---------------------------------------------------------------------------------------


def test_live_bytes_of_a_step_are_counted() -> None:
    known = torch.zeros(100)
    with gather_memory.live_mode()([known], 800) as mode:
        known.add_(1.0)
        assert mode.now == 0
        first = known + 1.0
        view = first.view(10, 10)
        second = view * 2.0
        assert mode.now == mode.peak == 800
        del first, second
        assert mode.now == 400, "a view keeps its storage"
        del view
    assert (mode.now, mode.peak, mode.peak_gathered) == (0, 800, 0)


def test_what_another_thread_lets_go_of_in_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = gather_memory.live_mode()([], 400)
    held = [torch.zeros(100)]
    mode._add(held[0], gathered=True)
    monkeypatch.setattr(gather_memory, "wait_until", lambda holds: holds() or held.clear())
    second = torch.zeros(100)
    mode._add(second, gathered=True)
    assert (mode.now_gathered, mode.peak_gathered) == (400, 400)
    monkeypatch.setattr(gather_memory, "wait_until", lambda holds: None)
    third = torch.zeros(100)
    mode._add(third, gathered=True)
    assert mode.peak_gathered == 800, "what nobody lets go of counts"


def test_a_bound_is_kept_or_not() -> None:
    live = {"peak": 30, "gathered": 10, "at_peak": 10, "left": 0}
    assert gather_memory.within({"bound": 10, "live": live})
    assert not gather_memory.within({"bound": 9, "live": live})


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_what_is_gathered_follows_its_bound(tmp_path: Path) -> None:
    """Ten times more on the wire than the bound, 1.25 MiB against 128 KiB; and a bound that holds all of it."""
    command = [sys.executable, str(TOOLS / "gather_memory.py"), "--matrices", "20", "--rows", "64", "--cols", "512"]
    command += ["--bounds", "0.125", "4", "--json", str(tmp_path / "memory.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "memory.json").read_text(encoding="utf-8"))["results"]
    for strategy in gather_memory.STRATEGIES:
        tight, loose = (r for r in results if r["strategy"] == strategy)
        assert tight["wire"] == loose["wire"] >= 10 * tight["bound"]
        assert 0 < tight["live"]["gathered"] <= tight["bound"]
        assert loose["live"]["gathered"] > 5 * tight["live"]["gathered"] and loose["waves"] == 1
        assert tight["live"]["left"] == 0, "a step leaves nothing behind"
