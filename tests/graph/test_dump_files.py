"""A dump's timelines, predicted and measured, and how its files are written."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_compile.lower import inductor
from muon_compile.run import profiling
from tests.graph.dumps import dump, optimizer, stepped, traced_of
from tests.graph.twins import assert_equal, give, values

# -- timelines --------------------------------------------------------------------------------------------------------


def bars(text: str, pid: int = 1) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]


def processes(text: str) -> list[str]:
    return [event["args"]["name"] for event in json.loads(text)["traceEvents"] if event["name"] == "process_name"]


def test_the_prediction_is_a_timeline(tmp_path: Path) -> None:
    opt = stepped()
    files = dump(opt, tmp_path)
    assert processes(files["predicted.trace.json"]) == ["predicted for cpu-2core"]
    names = [bar["name"] for bar in bars(files["predicted.trace.json"])]
    assert names == ["directions", *(f"ns{i} newton-schulz" for i in range(3)), "updates"]
    assert "measured.trace.json" not in files and "timeline.trace.json" not in files


def test_a_measured_step_changes_nothing_and_has_the_predictions_names(tmp_path: Path) -> None:
    params, opt = optimizer(max_temp_bytes=2000)
    give(params, seed=1, missing=(1,))
    opt.step()
    give(params, seed=2)
    opt.step()
    state = [value for p in params for value in opt.state[p].values()]
    live = [*params, *state, *(p.grad for p in params if p.grad is not None)]
    binding, stats = opt.compiled._binding, opt.compiled.stats.as_dict()
    assert binding is not None
    live += binding.hyper.tensors
    before, versions, random = values(live), [t._version for t in live], torch.get_rng_state()
    files = dump(opt, tmp_path, profile=True)
    assert_equal(live, before)
    assert versions == [t._version for t in live] and torch.equal(torch.get_rng_state(), random)
    assert opt.compiled.stats.as_dict() == stats and opt.compiled._binding is binding

    predicted, both = files["predicted.trace.json"], files["timeline.trace.json"]
    assert processes(both) == ["predicted for cpu-2core", "measured, operator by operator"]
    assert processes(files["measured.trace.json"])[1] == "measured, the compiled call"
    assert bars(both, 1) == bars(predicted)
    assert bars(both, 2) == [bar | {"pid": 2} for bar in bars(files["measured.trace.json"])]
    assert {bar["name"] for bar in bars(both, 2)} - {"inputs"} == {bar["name"] for bar in bars(both, 1)}
    order = [bar["name"] for bar in bars(both, 2)]
    first = [order.index(name) for name in ("inputs", "directions", "ns0 newton-schulz", "updates")]
    assert first == sorted(first)
    waves = len(opt.compiled.plan.waves)
    assert waves > 1 and order.count("directions") == order.count("updates") == waves
    ends = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars(both, 2)]
    assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(ends)) and ends[0][0] == 0
    (whole,) = bars(files["measured.trace.json"], 2)
    assert whole["name"] == "compiled step" and whole["dur"] > 0
    notes = json.loads(both)["otherData"]["notes"]
    assert any("It is not the compiled code" in note for note in notes)
    assert any(note.startswith("The compiled call (aot_eager)") for note in notes)


def test_a_profile_runs_without_gradients_and_not_under_autocast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    params, opt = optimizer()
    seen: list[bool] = []
    length = profiling._length
    monkeypatch.setattr(profiling, "_length", lambda e: seen.append(torch.is_autocast_enabled("cpu")) or length(e))
    give(params, seed=1)
    opt.step()
    opt.zero_grad()
    with torch.autocast("cpu"):
        files = dump(opt, tmp_path, profile=True)
    assert seen and not any(seen)
    assert {bar["name"] for bar in bars(files["measured.trace.json"])} == {
        "inputs",
        "directions",
        "updates",
        *(f"ns{i} newton-schulz" for i in range(3)),
    }


def test_bars_are_the_run_of_median_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A clock that ticks once a reading, and by more in some runs: what is measured is its ticks."""
    opt = stepped(((8, 12),))
    now, readings = 0.0, 0

    def clock() -> float:
        nonlocal now, readings
        # Two edges of bars more than there are bars, for inputs of the graph and its end.
        run, readings = readings // 6, readings + 1
        now += (1.0, 5.0, 3.0, 2.0)[run] if run < 4 else 5.0
        return now

    monkeypatch.setattr(profiling.time, "perf_counter", clock)
    files = dump(opt, tmp_path, profile=True)
    assert [(bar["name"], bar["ts"], bar["dur"]) for bar in bars(files["measured.trace.json"])] == [
        ("inputs", 0.0, 3e6),
        ("directions", 3e6, 3e6),
        ("ns0 newton-schulz", 6e6, 3e6),
        ("updates", 9e6, 3e6),
    ]
    assert bars(files["measured.trace.json"], 2)[0]["dur"] == 5e6


@pytest.mark.inductor
def test_inductors_step_is_measured_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    params, opt = optimizer(((8, 12), (16, 8)), backend="inductor")
    give(params, seed=1)
    opt.step()
    before = values(params)
    files = dump(opt, tmp_path, profile=True)
    assert_equal(params, before)
    assert len(bars(files["measured.trace.json"], 2)) == 1
    assert "def call" in files["all_gradients/output_code.py"]
    # A step that replays a recording of the live tensors' addresses is not run on others.
    binding = opt.compiled._binding
    assert binding is not None
    _, compiled = binding.graphs["all"]
    object.__setattr__(compiled, "any_addresses", False)
    files = dump(opt, tmp_path, profile=True)
    assert processes(files["measured.trace.json"]) == ["measured, operator by operator"]
    assert "was not run" in files["measured.trace.json"]


def test_cuda_graphs_know_no_other_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    _, traced = traced_of(stepped(((8, 12),)))
    monkeypatch.setattr(inductor, "_inner", lambda *_: (None, {}))
    plain, replayed = (
        inductor.compile_inductor(traced, route="inner", options={"triton.cudagraphs": on}, cuda_graphs=on)
        for on in (False, True)
    )
    assert (plain.any_addresses, replayed.any_addresses) == (True, False)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_in_the_directorys_place_is_said_in_words(tmp_path: Path) -> None:
    opt = stepped(((8, 12),))
    (tmp_path / "taken").write_text("mine")
    for target in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(OSError, match="dump: expected a directory that can be written to, got .*; choose another"):
            opt.compiled.dump(target)
    assert (tmp_path / "taken").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_failure_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opt = stepped(((8, 12),))
    old = tmp_path / "old"
    before = {path: path.read_bytes() for path in opt.compiled.dump(old)}
    write = Path.write_text

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        if self.name == "op_counts.txt":
            write(self, "half of")
            raise OSError(28, "No space left on device", str(self))
        return write(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    for folder in (old, tmp_path / "new" / "below"):
        with pytest.raises(OSError, match="No space left on device.*or make room"):
            opt.compiled.dump(folder)
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == [old]


def test_a_directory_in_a_files_place_is_said_before_anything_is_written(tmp_path: Path) -> None:
    opt = stepped(((8, 12),))
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html: there is a directory of this name"):
        opt.compiled.dump(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "report.html"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    opt = stepped(((8, 12),))
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="dump: expected a directory that can be written to"):
            opt.compiled.dump(tmp_path / "out")
    finally:
        tmp_path.chmod(0o700)


def test_three_hundred_parameters_take_seconds(tmp_path: Path) -> None:
    opt = stepped(tuple((8 + 4 * (i % 10), 12) for i in range(300)))
    started = time.perf_counter()
    files = dump(opt, tmp_path)
    assert time.perf_counter() - started <= 5
    assert len(files["report.html"].encode()) <= 3 * 2**20
