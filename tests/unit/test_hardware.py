"""A machine's figures: what they must be, how they are read between the sides, their text, the presets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import muon_compile as mc
from muon_compile.plan.hardware import HARDWARE_VERSION, PRESETS, SIDES, Rates, default_hardware

EXAMPLE = (Path(__file__).parents[2] / "docs/hardware-example.toml").read_text()
FIGURES = tuple(float(10**power) for power in range(6, 12))


def rates(kernel: Any = "graph", dtype: str = "bfloat16", figures: Any = FIGURES) -> Rates:
    return Rates(kernel=kernel, dtype=dtype, flops_per_second=figures)


def made(**changes: Any) -> mc.Hardware:
    values: dict[str, Any] = {
        "name": "made up",
        "device": "cpu",
        "gemm": (rates(), rates("native"), rates(dtype="float32", figures=(5.0,) * 6)),
        "bytes_per_second": 1e9,
        "cache_bytes": 2**20,
        "op_seconds": 1e-6,
    }
    return mc.Hardware(**(values | changes))


def test_between_the_sides_rates_are_linear_on_a_log_scale_and_constant_outside() -> None:
    row = rates(figures=(10.0, 20.0, 40.0, 80.0, 80.0, 100.0))
    assert [row.at(side) for side in SIDES] == list(row.flops_per_second)
    assert row.at(1) == row.at(0) == row.at(24) == 10.0
    assert row.at(5000) == 100.0
    # Half way from 64 to 128 on a log scale is 64 * sqrt(2) = 90.5.
    assert row.at(90) == pytest.approx(30.0, rel=0.01)
    assert row.at(300) == 80.0


def test_a_rate_that_is_not_there_has_a_stand_in() -> None:
    hardware = made()
    assert hardware.rate("native", "bfloat16", 32) == 1e6
    assert hardware.rate("symmetric", "bfloat16", 1024) == 1e11
    assert hardware.rate("native", "float32", 64) == 5.0
    assert hardware.rate("graph", "float64", 64) == 2.5
    assert hardware.rate("graph", "float16", 32) == 1e6
    assert hardware.find("graph", "float16") is None


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_names_and_survive_their_text(name: str) -> None:
    hardware = mc.Hardware.preset(name)
    assert hardware.name == name
    again = mc.Hardware.from_json(hardware.to_json())
    assert again == hardware
    assert hash(again) == hash(hardware)
    assert again.to_json() == hardware.to_json()


def test_an_unknown_preset_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Hardware\.preset: expected one of .*'ascend-910c'.*got 'h1000'") as caught:
        mc.Hardware.preset("h1000")
    assert all(repr(name) in str(caught.value) for name in PRESETS)


def test_a_device_without_figures_has_one_preset() -> None:
    assert default_hardware("cpu") == default_hardware("mps") == mc.Hardware.preset("cpu-2core")
    assert not default_hardware("cpu").native
    assert default_hardware("cuda:3") == mc.Hardware.preset("h100")
    assert default_hardware("npu:0") == mc.Hardware.preset("ascend-910b")


def test_data_sheet_presets_keep_their_ratios() -> None:
    h100, h200 = mc.Hardware.preset("h100"), mc.Hardware.preset("h200")
    assert h100.rate("graph", "bfloat16", 1024) == 989e12
    assert h100.rate("graph", "bfloat16", 32) == 989e12 / 2  # half of a tile of 64 rows
    assert h200.bytes_per_second / h100.bytes_per_second == pytest.approx(4.8 / 3.35)
    one, two = mc.Hardware.preset("ascend-910b"), mc.Hardware.preset("ascend-910c")
    assert two.rate("graph", "bfloat16", 512) == 752e12 / 2 > one.rate("graph", "bfloat16", 512)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "tpu"}, ("device", "'cpu'", "'tpu'")),
        ({"bytes_per_second": 0}, ("bytes_per_second", "positive", "0")),
        ({"cache_bytes": -1}, ("cache_bytes", "-1")),
        ({"op_seconds": float("nan")}, ("op_seconds", "nan")),
        ({"op_seconds": float("inf")}, ("op_seconds", "inf")),
        ({"gemm": ()}, ("gemm", "'graph'", "[]")),
        ({"gemm": (rates("native"),)}, ("gemm", "'graph'", "native")),
        ({"gemm": (rates(), rates())}, ("gemm", "one for each", "bfloat16")),
        ({"native": True, "gemm": (rates(),)}, ("native", "Rates for kernel 'native'")),
        ({"native": True, "device": "cuda"}, ("native", "device='cpu'", "'cuda'")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_impossible_figures_are_refused(change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^Hardware\.") as caught:
        made(**change)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rates(figures=(1.0,) * 5), ("flops_per_second", "6")),
        (lambda: rates(figures=(1.0,) * 5 + (0.0,)), ("flops_per_second", "positive")),
        (lambda: rates(figures=(1.0,) * 5 + (True,)), ("flops_per_second", "positive")),
        (lambda: rates("fast"), ("kernel", "'native'", "'fast'")),
    ],
    ids=["count", "zero", "bool", "kernel"],
)
def test_impossible_rates_are_refused(call: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^Rates\.") as caught:
        call()
    assert all(word in str(caught.value) for word in words)


def test_unreadable_figures_are_refused_in_words() -> None:
    text = made().to_json()
    for broken, words in [
        ("{", "unreadable"),
        ("[1]", "version"),
        ("null", "version"),
        (text.replace(f'"version": {HARDWARE_VERSION}', '"version": 7'), "7"),
        (text.replace('"name"', '"nome"'), "name"),
        (text.replace('"op_seconds": 1e-06', '"op_seconds": -1'), "op_seconds"),
        (text.replace('"op_seconds": 1e-06', '"op_seconds": "soon"'), "op_seconds"),
        (text.replace('"kernel": "graph"', '"kernel": "other"'), "other"),
        (text.replace('"native": false', '"native": "false"'), "native"),
        (text.replace('"network": null', '"network": {"levels": []}'), "planes"),
        (f'{{"version": {HARDWARE_VERSION}}}', "name"),
    ]:
        assert broken != text
        with pytest.raises(ValueError, match=r"Hardware\.from_json: expected") as caught:
            mc.Hardware.from_json(broken)
        assert words in str(caught.value)
    assert json.loads(text)["version"] == HARDWARE_VERSION


def test_the_example_file_is_a_preset_under_another_name() -> None:
    hardware = mc.Hardware.from_toml(EXAMPLE)
    assert dataclasses.replace(hardware, name="h200") == mc.Hardware.preset("h200")
    assert mc.Hardware.from_json(hardware.to_json()) == hardware
    assert mc.Hardware.from_toml(EXAMPLE.partition("[[network")[0]).network is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("op_seconds = 3e-6", "", "missing @ $.op_seconds"),
        ("op_seconds = 3e-6", "op_second = 3e-6", "op_second)"),
        ("op_seconds = 3e-6", "op_seconds = -3e-6", "Hardware.op_seconds: expected a positive"),
        ("cache_bytes = 50_000_000", "cache_bytes = 0.5", "expected int, got 0.5 @ $.cache_bytes"),
        ("[494.5e12, ", "[-494.5e12, ", "Rates.flops_per_second: expected 6 positive"),
        ("latency_seconds = 14e-6", "", "missing @ $.network.levels[1].latency_seconds"),
        ("latency_seconds = 14e-6", "latency_seconds = 0", "Level.latency_seconds of 'cluster': expected a positive"),
        ("bytes_per_second = 450e9", "bytes_per_second = -1", "Level.bytes_per_second of 'node': expected a positive"),
        ("ranks = 8", "ranks = 8.5", "expected int, got 8.5 @ $.network.levels[0].ranks"),
        ("ranks = 8", "", "Level.ranks of 'node': expected a number"),
        ('plane = "infiniband"', "", "missing @ $.network.levels[1].plane"),
        ('plane = "infiniband"', 'plane = "ib"', "Level.plane of 'cluster': expected one of"),
        ("max_queue_pairs = 4092", "max_queue_pairs = -1", "Plane.max_queue_pairs of 'infiniband'"),
        ('device = "cuda"', "device = ", "unreadable text"),
    ],
)
def test_a_wrong_figure_in_a_file_is_refused_by_its_field(old: str, new: str, words: str) -> None:
    assert old in EXAMPLE
    with pytest.raises(ValueError, match=r"^Hardware\.from_toml: expected") as caught:
        mc.Hardware.from_toml(EXAMPLE.replace(old, new))
    assert words in str(caught.value)


def test_a_preset_has_a_network_and_a_measurement_has_none() -> None:
    assert all(hardware.network is not None for hardware in PRESETS.values())
    assert made().network is None


def test_figures_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        made().name = "other"  # type: ignore[misc]
