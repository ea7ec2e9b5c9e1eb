"""The benchmark's pure functions, and one small run of it from end to end."""

from __future__ import annotations

import copy
import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_compile.plan.planner import make_plan
from muon_compile.spec import MatrixSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import _peers
import _roofline
import _rounds
import _shapes
import _tables
import compare
import device_check
from _rounds import Sample

TOOLS = Path(compare.__file__).parent

# -- shapes -----------------------------------------------------------------------------------------------------------


def test_copies_of_a_stack_are_its_matrices_with_their_gradients() -> None:
    params = _shapes.make_params([(3, 4, 6), (5, 2)])
    copies = _shapes.copy_params(params, split_stacks=True)
    assert [tuple(p.shape) for p in copies] == [(4, 6)] * 3 + [(5, 2)]
    for index in range(3):
        assert params[0].grad is not None
        assert torch.equal(copies[index], params[0][index])
        assert torch.equal(copies[index].grad, params[0].grad[index])
    copies[0].data.zero_()
    copies[0].grad.zero_()
    assert params[0][0].abs().sum() > 0 and params[0].grad[0].abs().sum() > 0


def test_whole_copies_keep_stacks() -> None:
    copies = _shapes.copy_params(_shapes.make_params([(3, 4, 6)]), split_stacks=False)
    assert [tuple(p.shape) for p in copies] == [(3, 4, 6)]


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_order_rotates_and_every_round_is_whole() -> None:
    log: list[str] = []

    def runner(name: str) -> Any:
        return lambda: (log.append(name), Sample(1.0, 0))[1]

    done: list[int] = []
    samples = _rounds.run_rounds({n: runner(n) for n in "abc"}, seconds=0.0, max_rounds=1, between=done.append)
    assert "".join(log) == "abc" + "bca" + "cab" + "abc" + "bca"
    assert done == [1, 2, 3, 4, 5]
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys("abc", 5)


def test_max_rounds_ends_a_long_run() -> None:
    samples = _rounds.run_rounds({"a": lambda: Sample(1.0, 0)}, seconds=60.0, max_rounds=7, between=lambda _: None)
    assert len(samples["a"]) == 7


def test_ratios_are_of_the_same_round() -> None:
    """The machine is busy at first; only ratios round by round do not see that."""
    load = [9.0, 3.0, 1.0, 1.0, 1.0]
    result = _rounds.summarize(
        {
            "ours": [Sample(0.010 * x, 5) for x in load],
            "stock": [Sample(0.040 * x, n) for n, x in enumerate(load)],
        }
    )
    assert result["stock"]["ratio"] == pytest.approx({"median": 4.0, "low": 4.0, "high": 4.0})
    assert result["ours"]["ms"] == pytest.approx({"median": 10.0, "low": 10.0, "high": 30.0})
    assert "ratio" not in result["ours"]
    assert (result["ours"]["faults"], result["stock"]["faults"]) == (5, 2)


def test_quartiles_by_rank() -> None:
    assert _rounds.quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert _rounds.quartiles([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0}


def test_page_faults_of_a_step_are_counted() -> None:
    pages = 256

    def step() -> None:
        with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                memory.madvise(mmap.MADV_NOHUGEPAGE)
            for page in range(pages):
                memory[page * mmap.PAGESIZE] = 1

    sample = _rounds.timed(step, "cpu")
    assert sample.faults >= pages and sample.seconds > 0


def test_allocations_are_those_of_one_step() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.append(torch.empty(1000))
        kept.append(torch.empty(500, dtype=torch.float64))
        torch.empty(250)  # freed at once: an allocation like the others

    assert _rounds.allocations(step, "cpu") == {"count": 3, "bytes": 9000}


# -- peers ------------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "heavyball", None)
    params = _shapes.make_params([(4, 6)])
    with pytest.raises(_peers.Missing, match="not importable: .*heavyball"):
        _peers.make_checked(lambda: _peers.make_heavyball(params, 9), params, 1)


def test_another_module_named_muon_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "muon.py"
    path.write_text("x = 1", encoding="utf-8")
    with pytest.raises(_peers.Missing, match="has no SingleDeviceMuon"):
        _peers.make_keller([], path)
    with pytest.raises(_peers.Missing, match=r"expected the file muon\.py"):
        _peers.make_keller([], tmp_path / "absent.py")


def test_a_peer_that_moves_nothing_or_fails_is_no_peer() -> None:
    params = _shapes.make_params([(4, 6)])
    with pytest.raises(_peers.Missing, match="moved no parameter"):
        _peers.make_checked(lambda: lambda: None, params, 2)
    with pytest.raises(_peers.Missing, match="failed: ZeroDivisionError"):
        _peers.make_checked(lambda: lambda: 1 / 0, params, 2)
    _peers.make_checked(lambda: _peers.make_stock(params), params, 2)


def test_peers_that_unroll_are_refused_beyond_the_limit() -> None:
    params = _shapes.make_params([(4, 6)] * 3)
    _peers.check_count(params, 3)
    with pytest.raises(_peers.Missing, match="--max-compiled 3 runs it"):
        _peers.make_stock_compiled(params, "aot_eager", 2)


# -- roofline ---------------------------------------------------------------------------------------------------------


def test_work_of_a_plan_written_out() -> None:
    specs = [MatrixSpec(name=f"p{i}", shape=(16, 32), dtype="float32", grad_dtype="bfloat16") for i in range(3)]
    plan = make_plan([*specs, MatrixSpec(name="bias", shape=(32,), algorithm="adamw")], ns="standard")
    work = _roofline.work_of(plan)
    # Gradient 2; momentum 2 twice, in the gradient's dtype; parameter 4 twice; X and the result in bfloat16, 2 twice.
    assert work.bytes == 3 * 16 * 32 * (2 + 2 * 2 + 2 * 4 + 2 * 2 + 2 * 2)
    # Five steps of X X^T, A A and B X.
    assert work.flops == 3 * 5 * (2 * 16 * 16 * 32 + 2 * 16**3 + 2 * 16 * 16 * 32)


def test_ideal_seconds_are_the_sum_and_the_larger() -> None:
    work = _roofline.Work(bytes=100, flops=3000)
    assert work.seconds(bandwidth=50.0, rate=1000.0) == (5.0, 3.0)


def test_standard_flops_of_shapes() -> None:
    one = 5 * (4 * 2 * 2 * 3 + 2 * 2**3)
    assert _roofline.standard_flops([(2, 3)]) == _roofline.standard_flops([(3, 2)]) == one
    assert _roofline.standard_flops([(7, 2, 3), (2, 3)]) == 8 * one


def test_meter_takes_the_best_seen() -> None:
    meter = _roofline.Meter("cpu", triad_bytes=2**16)
    for _ in range(3):
        meter.sample()
    meter._bandwidths = [1.0, 9.0, 2.0]
    meter._rates = {"one": [5.0, 1.0, 4.0], "other": [3.0, 9.0, 3.0]}
    assert meter.bandwidth == 9.0
    assert meter.rate == (9.0, "other")


# -- comparing reports ------------------------------------------------------------------------------------------------


def report(median: float, low: float, high: float) -> dict[str, Any]:
    ratio = {"median": median, "low": low, "high": high}
    steps = {"ours": {"ms": {"median": 1.0}}, "stock": {"ms": {"median": 2.0}, "ratio": ratio}}
    header = {"device": "cpu", "cpu": "x", "threads": 2, "torch": "2", "backend": "inductor"}
    return {"header": header, "rows": [{"set": "tiny", "steps": steps}]}


def run_compare(folder: Path, old: object, new: object, *options: str) -> subprocess.CompletedProcess[str]:
    for name, value in (("old", old), ("new", new)):
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    command = [sys.executable, str(TOOLS / "compare.py"), str(folder / "old"), str(folder / "new"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_change_in_percent_and_beyond_the_spread() -> None:
    (change,) = compare.changes(report(4.0, 3.9, 4.1), report(3.0, 2.9, 3.8))
    assert change.percent == pytest.approx(-25.0)
    assert change.beyond_spread
    (change,) = compare.changes(report(4.0, 3.7, 4.1), report(3.8, 3.6, 3.8))
    assert not change.beyond_spread


def test_warnings_name_what_differs() -> None:
    other = copy.deepcopy(report(4.0, 3.9, 4.1))
    other["header"]["threads"] = 8
    other["rows"][0]["set"] = "wide"
    found = list(compare.warnings(report(4.0, 3.9, 4.1), other))
    assert len(found) == 2
    assert "threads: 2 and 8" in found[0]
    assert "tiny: stock" in found[1] and "wide: stock" in found[1]
    assert list(compare.warnings(report(4.0, 3.9, 4.1), report(1.0, 1.0, 1.0))) == []


def test_compare_fails_only_on_request_and_only_beyond_the_limit(tmp_path: Path) -> None:
    old, new = report(4.0, 3.9, 4.1), report(3.5, 3.4, 3.6)
    assert run_compare(tmp_path, old, new).returncode == 0
    assert run_compare(tmp_path, old, new, "--fail-over", "13").returncode == 0
    fallen = run_compare(tmp_path, old, new, "--fail-over", "12")
    assert fallen.returncode == 1
    assert "fell by more than 12 %: tiny: stock" in fallen.stderr
    assert run_compare(tmp_path, new, old, "--fail-over", "1").returncode == 0


def test_compare_refuses_what_is_no_report(tmp_path: Path) -> None:
    done = run_compare(tmp_path, {"header": {}, "rows": [{"set": "tiny", "stock_ms": 1}]}, report(1.0, 1.0, 1.0))
    assert done.returncode == 2
    assert "expected a report of bench_step.py" in done.stderr


# -- the device check -------------------------------------------------------------------------------------------------


def test_device_check_reports_every_missed_bar() -> None:
    good = {
        "parity": {"muon": 1e-2, "adamw": 1e-7},
        "forms": {"standard": {"error": 1e-2}, "gram": {"refused": "no"}},
        "symmetric": None,
        "launches": {"replays": 1.0, "stray_kernels": 2.0},
    }
    assert device_check.missed(good) == []
    bad = {
        "parity": {"muon": float("nan"), "adamw": 1e-7},
        "forms": {"standard": {"error": float("nan")}, "gram": {"error": 1e-2}},
        "symmetric": 1.0,
        "launches": {"replays": 2.0, "stray_kernels": 2.0},
    }
    assert device_check.missed(bad) == ["parity", "form standard", "symmetric", "launches"]


def test_forms_and_symmetric_products_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "FORM_SHAPES", [(24, 96), (96, 24), (24, 96)])
    found = device_check.forms("cpu", "aot_eager")
    assert list(found) == list(device_check.FORM_BARS)
    assert "error" in found["standard"]
    facts = {"parity": {"muon": 0.0, "adamw": 0.0}, "forms": found, "symmetric": device_check.symmetric("cpu")}
    assert device_check.missed(facts) == []


def test_device_check_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(TOOLS / "device_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "expected a CUDA GPU" in done.stderr


# -- end to end -------------------------------------------------------------------------------------------------------


def test_three_digits_without_exponents() -> None:
    assert [_tables.digits(v) for v in (0.01234, 1.0, 12.34, 123.4, 1234.6)] == ["0.0123", "1", "12.3", "123", "1235"]


def test_benchmark_from_end_to_end(tmp_path: Path) -> None:
    keller = tmp_path / "muon.py"
    keller.write_text("import torch\nclass SingleDeviceMuon(torch.optim.Muon): pass\n", encoding="utf-8")
    command = [sys.executable, str(TOOLS / "bench_step.py"), "--sets", "smoke", "--backend", "aot_eager"]
    command += ["--seconds", "0", "--threads", "1", "--peers", "stock-compiled", "keller", "--keller", str(keller)]
    command += ["--json", str(tmp_path / "bench.json"), "--png", str(tmp_path / "bench.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 140
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    (row,) = found["rows"]
    peers = {"stock", "stock, default process", "stock-compiled", "keller"}
    assert set(row["steps"]) == peers | {"ours"}
    assert row["rounds"] == 5 and row["notes"] == {}
    assert all(row["steps"][peer]["ratio"]["median"] > 0 for peer in peers)
    assert row["allocations"]["stock"]["count"] > 0
    assert [batch["shape"] for batch in row["batches"]] == [[3, 16, 32], [2, 16, 24]]
    limits = row["roofline"]
    assert 0 < limits["share_max"] <= limits["share_sum"] <= limits["share_sum_fastest"]
    assert found["header"]["threads"] == 1 and found["header"]["plans"] == {"smoke": row["plan"]}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    compare.read_report(tmp_path / "bench.json")
