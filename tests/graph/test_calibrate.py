"""Measuring this machine: what is kept of it, when it is measured anew, and which figures a compiled step takes."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import muon_compile as mc
from muon_compile.kernels import cpu
from muon_compile.plan.hardware import SIDES, Rates
from muon_compile.run import calibrate as module
from muon_compile.run import planning
from muon_compile.run.calibrate import calibrate, local_hardware


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    yield
    module._calibrated.cache_clear()
    module._say_once.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own, and no override."""
    monkeypatch.setenv("MUON_COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(module.HARDWARE_VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "available", lambda: False)
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[mc.Hardware]:
    """What was measured, in order: made up, each time another bandwidth."""
    done: list[mc.Hardware] = []

    def measure(name: str) -> mc.Hardware:
        done.append(made(bytes_per_second=1e9 * (1 + len(done))))
        return done[-1]

    monkeypatch.setattr(module, "_measure", measure)
    return done


def made(**changes: Any) -> mc.Hardware:
    # bfloat16 products a hundred times slower than float32 ones.
    gemm = tuple(
        Rates(kernel="graph", dtype=dtype, flops_per_second=(rate,) * len(SIDES))
        for dtype, rate in (("bfloat16", 1e9), ("float32", 1e11))
    )
    values: dict[str, Any] = {"name": "made up", "device": "cpu", "gemm": gemm, "bytes_per_second": 1e9}
    return mc.Hardware(**(values | {"cache_bytes": 2**20, "op_seconds": 1e-6} | changes))


def again() -> mc.Hardware:
    """As a new process would have it."""
    module._calibrated.cache_clear()
    return calibrate()


# -- the file -------------------------------------------------------------------------------------------------------


def test_a_measurement_is_kept_for_the_process_and_for_the_next(folder: Path, measured: list[mc.Hardware]) -> None:
    assert calibrate() == calibrate() == again() == measured[0]
    assert len(measured) == 1
    (path,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert path.suffix == ".json"
    assert json.loads(path.read_text())["key"] == module.machine_key()


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 7),
        lambda patch: patch.setattr(torch, "__version__", "9.9"),
        lambda patch: patch.setattr(cpu, "source_hash", lambda: "other"),
        lambda patch: patch.setattr(cpu, "cpu_flags", lambda: frozenset({"fma"})),
        lambda patch: patch.setattr(module, "_cpu_model", lambda: "Other CPU"),
        lambda patch: patch.setattr(module, "_FORMAT", 99),
        lambda patch: (patch.setattr(cpu, "available", lambda: True), patch.setattr(cpu, "isa", lambda: "amx")),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ],
    ids=["threads", "torch", "kernels", "flags", "cpu", "format", "native", "onednn"],
)
def test_another_machine_is_measured_beside_it(
    folder: Path, measured: list[mc.Hardware], monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    first = calibrate()
    with monkeypatch.context() as patch:
        change(patch)
        assert calibrate() != first
    assert calibrate() == again() == first
    assert len(measured) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: "{",
        lambda data: "[]",
        lambda data: json.dumps(data | {"key": data["key"] | {"cpu": "Other CPU"}}),
        lambda data: json.dumps(data | {"hardware": {}}),
        lambda data: json.dumps(data | {"hardware": data["hardware"] | {"bytes_per_second": -1}}),
        lambda data: json.dumps({"key": data["key"]}),
        lambda data: b"\xff\xfe",
    ],
    ids=["cut", "list", "foreign", "empty", "negative", "missing", "bytes"],
)
def test_a_spoilt_file_is_measured_anew_and_mended(
    folder: Path, measured: list[mc.Hardware], caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    calibrate()
    (path,) = folder.iterdir()
    spoilt = spoil(json.loads(path.read_text()))
    path.write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    with caplog.at_level(logging.WARNING, "muon_compile"):
        assert again() == measured[1]
        assert again() == measured[1]
    assert [record.message for record in caplog.records if str(path) in record.message and "anew" in record.message]
    assert len(caplog.records) == 1
    assert list(folder.iterdir()) == [path]


def test_a_directory_that_cannot_be_made_is_said_once(
    tmp_path: Path, measured: list[mc.Hardware], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MUON_COMPILE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "muon_compile"):
        assert calibrate() == calibrate() == measured[0]
        assert again() == measured[1]
    assert len(caplog.records) == 1
    assert "no cache directory" in caplog.text


def test_a_file_that_cannot_be_written_is_said_once(
    folder: Path, measured: list[mc.Hardware], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING, "muon_compile"):
        assert calibrate() == measured[0]
        assert again() == measured[1]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text and "MUON_COMPILE_CACHE_DIR" in caplog.text
    assert list(folder.iterdir()) == []


def test_only_a_cpu_is_measured() -> None:
    with pytest.raises(ValueError, match=r"device: expected 'cpu', got 'cuda'; .*Hardware\.preset"):
        calibrate("cuda")


# -- measuring ------------------------------------------------------------------------------------------------------


def test_measuring_gives_plausible_figures_and_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIMIT_SECONDS", 0.1)
    monkeypatch.setattr(module, "_ROUND_SECONDS", 1e-4)
    monkeypatch.setattr(cpu, "available", lambda: True)

    def rate(side: int, *, seconds: float) -> float:
        torch.randn(4)
        assert torch.get_num_threads() == 1 and not torch.is_grad_enabled()
        return float(side)

    monkeypatch.setattr(cpu, "rate", rate)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        hardware = module._measure("here")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert hardware.device == "cpu" and hardware.native and hardware.name == "here, 2 threads"
    native = hardware.find("native", "bfloat16")
    assert native is not None and native.flops_per_second == tuple(2.0 * side for side in SIDES)
    for dtype in ("bfloat16", "float32"):
        found = hardware.find("graph", dtype)
        # From a software bfloat16 on a busy core to a large server.
        assert found is not None and all(1e7 < figure < 1e15 for figure in found.flops_per_second)
    assert 1e7 < hardware.bytes_per_second < 1e13
    assert 1e-8 < hardware.op_seconds < 1e-3
    assert mc.Hardware.from_json(hardware.to_json()) == hardware
    monkeypatch.setattr(cpu, "available", lambda: False)
    without = module._measure("here")
    assert not without.native and without.find("native", "bfloat16") is None


def test_the_best_of_the_rounds_counts_and_rounds_end_when_nothing_gets_better() -> None:
    seen = {"a": [1.0, 5.0, 2.0, 2.0, 2.0], "b": [3.0, 1.0, 3.1, 1.0, 1.0]}
    taken = {"a": 0, "b": 0}

    def call(name: str) -> Any:
        def measure(seconds: float) -> float:
            taken[name] += 1
            return seen[name][taken[name] - 1]

        return measure

    best = module._best_figures({(name, "", 0): call(name) for name in seen})
    assert best == {("a", "", 0): 5.0, ("b", "", 0): 3.1}
    # Two rounds after the second one's 5.0; 3.1 is no better than 3.0 by a tenth.
    assert taken == {"a": 4, "b": 4}


def test_slow_products_are_measured_once_and_stand_for_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.0)
    calls = module._products(torch.float32)
    assert list(calls) == list(SIDES)
    assert len({call(1e-3) for call in calls.values()}) == 1


# -- which figures a step takes -------------------------------------------------------------------------------------


def muon() -> torch.optim.Muon:
    torch.manual_seed(0)
    return torch.optim.Muon([Parameter(torch.randn(24, 2048)) for _ in range(3)], lr=0.02)


def test_a_preset_or_a_file_goes_before_measuring(
    folder: Path, measured: list[mc.Hardware], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_hardware() == measured[0]
    monkeypatch.setenv(module.HARDWARE_VARIABLE, "cpu-2core-native")
    assert local_hardware() == mc.Hardware.preset("cpu-2core-native")
    path = tmp_path / "mine.json"
    path.write_text(made(name="mine").to_json())
    monkeypatch.setenv(module.HARDWARE_VARIABLE, str(path))
    assert local_hardware() == made(name="mine")
    assert len(measured) == 1
    monkeypatch.setenv(module.HARDWARE_VARIABLE, str(tmp_path / "absent.json"))
    with pytest.raises(ValueError, match=r"MUON_COMPILE_HARDWARE: expected a preset \(cpu-2core, .*absent\.json"):
        local_hardware()
    path.write_text("{")
    monkeypatch.setenv(module.HARDWARE_VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"Hardware\.from_json"):
        local_hardware()


def test_a_step_on_the_cpu_is_planned_with_its_figures(
    monkeypatch: pytest.MonkeyPatch, measured: list[mc.Hardware], folder: Path
) -> None:
    step = mc.compile_step(muon(), backend="aot_eager")
    assert measured and step.plan == mc.make_plan(step.plan.specs, hardware=measured[0])
    # The variable decides, and before it the argument.
    monkeypatch.setenv(module.HARDWARE_VARIABLE, "cpu-2core-native")
    assert mc.compile_step(muon(), backend="aot_eager").plan.batches[0].kernel == "native"
    given = mc.compile_step(muon(), backend="aot_eager", hardware=mc.Hardware.preset("cpu-2core"))
    assert given.plan.batches[0].kernel == "graph"
    named = mc.compile_step(muon(), backend="aot_eager", ns="gram_split:2,3").plan.batches[0]
    assert (named.form, named.kernel) == ("gram_split:2,3", "native")
    assert len(measured) == 1


def test_auto_dtype_follows_the_steps_figures() -> None:
    params = [Parameter(torch.ones(8, 16))]
    optimizer = mc.Muon(params, config=mc.MuonConfig(ns_dtype="auto"))
    plan = mc.compile_step(optimizer, backend="aot_eager", hardware=made()).plan
    assert plan.batches[0].config.ns_dtype == "float32"


def test_a_step_without_a_choice_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> mc.Hardware:
        raise AssertionError("measured")

    monkeypatch.setattr(planning, "local_hardware", fail)
    mc.compile_step(muon(), backend="aot_eager", config=mc.CompileConfig(exact=True))
    mc.compile_step(torch.optim.AdamW([Parameter(torch.ones(4))]), backend="aot_eager")
    with pytest.raises(AssertionError, match="measured"):
        mc.compile_step(muon(), backend="aot_eager")
