"""The soak with faults: what it counts, and a small run of it from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import soak_faults


def test_bits_that_differ_the_second_time_are_counted() -> None:
    tally = soak_faults.Tally()
    for digest in ("a", "a", "b"):
        tally.hear(0, "step", 7, digest)
    tally.hear(1, "step", 7, "another rank's")
    tally.hear(0, "loaded", 7, "c")
    assert tally.bad == {"hangs": 0, "corrupted": 1, "silent": 1}
    assert tally.problems[0] == "silent: rank 0, step 7: other bits than before"
    assert tally.events["steps"] == 3 and tally.furthest == 7


@pytest.mark.parametrize("kind", ["silent", "corrupted"])
def test_what_a_rank_found_is_counted(kind: str) -> None:
    tally = soak_faults.Tally()
    tally.hear(2, kind, 5, "words")
    assert tally.bad[kind] == 1 and tally.problems == [f"{kind}: rank 2, step 5: words"]


def test_kills_are_seeded_and_of_both_moments() -> None:
    kills = soak_faults.kills_of(100, 20, 4, seed=3)
    assert kills == soak_faults.kills_of(100, 20, 4, seed=3) != soak_faults.kills_of(100, 20, 4, seed=4)
    assert min(kills) > 20 and [moment for _, moment in kills.values()] == ["step", "save"] * 2


@pytest.mark.dist
@pytest.mark.timeout(400)
def test_a_few_steps_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    command = [sys.executable, soak_faults.__file__, "--steps", "60", "--every", "10", "--kills", "1"]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [found[kind] for kind in soak_faults.BAD] == [0, 0, 0]
    events = found["events"]
    assert events["kill"] == 1 and events["raised beside a killed rank"] == soak_faults.WORLD - 1
    assert events["steps"] >= 60 and events["saved"] >= 6 and events["loaded"] >= 1
    assert min(events[kind] for kind in ("nan", "nothing", "one rank")) >= 1
