"""Predicted speed-ups beside reported ones: their arithmetic, the tool's output, and the page that quotes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import muon_compile as mc
from muon_compile.plan.network import Group
from muon_compile.plan.planner import make_plan
from muon_compile.plan.traffic import fastest
from muon_compile.spec import MatrixSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import _queue_pairs
import field_ratios
from field_ratios import Ratio

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
DIE = mc.Hardware.preset("ascend-910c")
H100 = mc.Hardware.preset("h100")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert field_ratios.main(arguments) == 0
    return capsys.readouterr().out


# -- the page ---------------------------------------------------------------------------------------------------------


def test_page_has_the_ratios_that_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--markdown") in PAGE


def test_page_has_the_queue_pairs_that_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--queue-pairs") in PAGE


def test_table_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    data, text = json.loads(printed(capsys, "--json")), printed(capsys)
    assert data["machine"] == "ascend-910c"
    assert len(data["ratios"]) == 6 and len(data["elsewhere"]) == len(field_ratios.elsewhere())
    for row in data["ratios"]:
        assert row["before_seconds"] > row["after_seconds"] > 0
        assert row["within"] is (abs(row["predicted"] / row["reported"] - 1) <= 0.3)
        assert f"{row['deviation']:+.0%}" in text and row["setting"] in text
    assert [row["reported"] for row in data["ratios"]] == pytest.approx(
        [485 / 129, 4.9 / 1.1, 74 / 2.4, 7, 2, 2700 / 450]
    )


# -- ratios -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "deviation", "within"), [(13.0, 0.3, True), (13.1, 0.31, False), (7.0, -0.3, True), (6.9, -0.31, False)]
)
def test_deviation(before: float, deviation: float, within: bool) -> None:
    ratio = Ratio(what="", setting="", reported=(20, 2), before=before, after=1.0)
    assert ratio.goal == 10 and ratio.factor == before
    assert ratio.deviation == pytest.approx(deviation)
    assert ratio.within is (within if abs(deviation) != 0.3 else abs(before / 10 - 1) <= 0.3)
    assert field_ratios.cells(ratio)[-1] == ("yes" if ratio.within else "no")


def test_sizes_are_those_of_the_reports_and_of_public_models() -> None:
    elements = sum(spec.numel for spec in mc.model_specs(field_ratios.MODEL))
    assert elements == pytest.approx(100e9, rel=0.02)
    assert field_ratios.hsdp().num_ranks == field_ratios.DIES == 512
    # The smallest power of two that holds parameter, gradient and momentum in half of 64 GB.
    half = 64e9 / 2
    assert elements * 12 / field_ratios.SHARDS <= half < elements * 12 / (field_ratios.SHARDS // 2)
    assert (field_ratios.SMALL, field_ratios.SMALL_COUNT) == ((24, 10240), 74)


def test_experts_before_are_one_gather_and_everything_everywhere() -> None:
    """Of one layer of Qwen3-30B-A3B on 4 dies."""
    ratio = field_ratios.experts(DIE)
    r, c, count = 768, 2048, 3 * 128
    products = count * 5 * (4 * r * r * c + 2 * r**3) / 376e12
    network = DIE.network
    assert network is not None
    gathers = 3 * fastest("all_gather_into_tensor", 128 // 4 * r * c * 2, Group(size=4), network).seconds
    assert products + gathers < ratio.before < 2.5 * (products + gathers)  # and its memory
    assert products / 4 < ratio.after < ratio.before / 3


def test_small_matrices_before_are_an_operator_at_a_time() -> None:
    # Momentum and update are three operators each; norm and division; three products for each step.
    operators = 3 + 3 + 2 + 5 * 3
    assert field_ratios.small(DIE).before == pytest.approx(74 * operators * field_ratios.EAGER_OP_SECONDS)
    # As many operators for all of them, and products and passes at the data sheet's figures.
    after = field_ratios.small(DIE).after
    assert after > operators * DIE.op_seconds
    assert after < operators * DIE.op_seconds + 74 * 24 * 10240 * 24 / DIE.bytes_per_second + 1e-4


# -- queue pairs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["all_to_all", "hierarchical_all_to_all"])
def test_first_refused_is_refused_and_the_one_before_is_not(strategy: str) -> None:
    first = _queue_pairs.first_refused(strategy, H100)
    each = 8 if strategy == "hierarchical_all_to_all" else 1
    # The last rank has a node of its own as soon as there is one more than fill the others; two queue pairs to a peer,
    # and to the 4 of the tree that agrees on gradients.
    outside = {1: lambda ranks: (ranks - 1) // 8 * 8 + 4, 8: lambda ranks: ranks // 8 - 1 + 4}[each]
    assert first == next(ranks for ranks in range(each, 20_000, each) if 2 * outside(ranks) > 4092)
    specs = [MatrixSpec(name="w", shape=(4096, 4096), device="cuda")]

    def plan(ranks: int) -> None:
        make_plan(specs, mesh=_queue_pairs.shards(ranks), strategy=strategy, node_size=8, hardware=H100)

    with pytest.raises(ValueError, match="max_queue_pairs is 4,092"):
        plan(first)
    plan(first - each)


def test_rings_are_never_refused_and_other_errors_are_no_refusals() -> None:
    assert _queue_pairs.first_refused("all_gather", DIE) is None
    with pytest.raises(ValueError, match="do not divide into nodes"):
        _queue_pairs.refused("hierarchical_all_to_all", _queue_pairs.shards(12), H100)
