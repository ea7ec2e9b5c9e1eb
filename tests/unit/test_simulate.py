"""Steps on ranks that are not there: figures against the plan's, refusals in words, and no torch and little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muon_compile as mc
from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.hardware import network_of
from muon_compile.plan.planner import make_plan
from muon_compile.plan.simulate import BINS, Simulation, histogram, simulate
from muon_compile.plan.step_cost import predict_step
from muon_compile.spec import MatrixSpec, MeshSpec

H100 = mc.Hardware.preset("h100")
HSDP = MeshSpec(axes=(("replicate", 4), ("shard", 16)))


def squares(count: int = 40, side: int = 256) -> list[MatrixSpec]:
    """Every strategy can take square matrices."""
    return [MatrixSpec(name=f"w{i}", shape=(side, side), device="cuda") for i in range(count)]


@pytest.fixture(scope="module")
def small() -> Simulation:
    return simulate(squares(), mesh=HSDP)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_every_strategy_is_a_row_and_local_is_refused_in_words(small: Simulation) -> None:
    assert [row.strategy for row in small.rows] == ["auto", *STRATEGY_NAMES]
    assert [row.strategy for row in small.rows if row.refused] == ["local"]
    refused = small.row("local")
    assert "each of 16 ranks holds a part of every unit" in refused.refused
    assert (refused.seconds, refused.collectives, refused.load_histogram) == (0.0, 0, ())
    assert (small.num_params, small.num_elements, small.hardware) == (40, 40 * 256**2, "h100")
    with pytest.raises(KeyError, match="nobody"):
        small.row("nobody")


def test_figures_are_those_of_the_plan_and_its_predicted_step(small: Simulation) -> None:
    for row in small.rows:
        if row.refused:
            continue
        plan = make_plan(squares(), mesh=HSDP, strategy=row.strategy, hardware=H100)
        cost = predict_step(plan, H100)
        assert row.collectives == len(plan.collectives) == len([e for e in row.events if e.lane == "network"])
        assert (row.seconds, row.sent_bytes, row.messages) == (cost.seconds, cost.sent_bytes, cost.messages)
        parts = (row.solve_seconds, row.memory_seconds, row.launch_seconds, row.exposed_seconds)
        assert sum(parts) == pytest.approx(row.seconds)
        assert row.exposed_seconds + row.hidden_seconds == pytest.approx(cost.network_seconds)
        assert row.temp_bytes == plan.temp_bytes > 0
        # 16 rows of each matrix: parameter, gradient and momentum in float32.
        assert row.state_bytes == 40 * 16 * 256 * 12


def test_auto_is_as_fast_as_the_fastest(small: Simulation) -> None:
    others = [row.seconds for row in small.rows[1:] if not row.refused]
    assert small.row("auto").seconds <= min(others) / 0.97
    assert sum(count for _, count in small.row("auto").taken) == 1


def test_a_divided_replica_has_less_to_do() -> None:
    specs = squares(256)
    alone = simulate(specs, 16, strategies=["all_to_all"]).rows[0]
    shared = simulate(specs, mesh=HSDP, strategies=["all_to_all"]).rows[0]
    assert alone.flops_busiest == 4 * shared.flops_busiest > 0
    assert shared.solve_seconds == pytest.approx(alone.solve_seconds / 4)


def test_a_plan_is_simulated_as_it_is() -> None:
    plan = make_plan(squares(), mesh=HSDP, strategy="gather_broadcast", hardware=H100)
    found = simulate(plan)
    assert [row.strategy for row in found.rows] == ["gather_broadcast"] and plan.digest in found.name
    assert found.rows[0] == simulate(squares(), mesh=HSDP, strategies=["gather_broadcast"]).rows[0]


def test_queue_pairs_of_an_all_to_all_grow_with_the_ranks() -> None:
    found = {}
    for ranks in (64, 512):
        row = simulate(squares(), ranks, strategies=["all_to_all"]).rows[0]
        found[ranks] = dict(row.queue_pairs)["infiniband"]
    # Two for each peer beyond the node of 8.
    assert found[512] - found[64] == 2 * (512 - 64)
    ring = dict(simulate(squares(), 512, strategies=["all_gather"]).rows[0].queue_pairs)["infiniband"]
    assert ring < 20


# -- load -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**18), min_size=1, max_size=50))
def test_histogram_counts_every_rank_once(loads: list[int]) -> None:
    counts = histogram(loads)
    assert len(counts) == BINS and sum(counts) == len(loads)
    # The busiest ranks are in the last bin, where anyone has anything to do.
    assert counts[-1] >= loads.count(max(loads)) or max(loads) == 0


def test_bins_are_of_equal_width() -> None:
    assert histogram([0, 9, 10, 55, 99, 100]) == (2, 1, 0, 0, 0, 1, 0, 0, 0, 2)
    assert histogram([0, 0]) == (2, *[0] * 9)


@pytest.mark.parametrize("mesh", [MeshSpec(axes=(("shard", 100),)), HSDP])
def test_load_histogram_sums_to_the_ranks(mesh: MeshSpec) -> None:
    for row in simulate(squares(42), mesh=mesh, strategies=["all_gather", "all_to_all"]).rows:
        assert sum(row.load_histogram) == mesh.num_ranks
    # All to all: 42 matrices, one for each of 42 ranks; of 4 replicas two have one more.
    assert row.load_histogram == (mesh.num_ranks - 42, *[0] * 8, 42)
    assert row.flops_mean == pytest.approx(row.flops_busiest * 42 / mesh.num_ranks)


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "ranks: expected their number, or a mesh, got neither"),
        ({"ranks": 0}, "ranks: expected a whole number of at least 1, got 0"),
        ({"ranks": 2.5}, "ranks: expected a whole number of at least 1, got 2.5"),
        ({"ranks": 60, "mesh": HSDP}, "mesh: expected one of all 60 ranks, got .* which is 64; leave ranks out"),
        ({"ranks": 8, "hardware": "abacus"}, "Hardware.preset: expected one of 'cpu-2core'.*got 'abacus'"),
        ({"ranks": 8, "strategies": ["ring"]}, "strategy: expected one of .* got 'ring'"),
    ],
)
def test_what_cannot_be_is_said(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(squares(2), **arguments)


def test_models_and_plans_that_do_not_fit_are_said() -> None:
    with pytest.raises(ValueError, match="name: expected one of gpt2, .* got 'gpt5'"):
        simulate("gpt5", 8)
    plan = make_plan(squares(2), mesh=HSDP, hardware=H100)
    with pytest.raises(ValueError, match="expected one of all 8 ranks, got .* which is 64"):
        simulate(plan, 8)
    with pytest.raises(ValueError, match=r"mesh: expected the plan's, .*'replicate', 4.*, got .*'shard', 64"):
        simulate(plan, mesh=MeshSpec(axes=(("shard", 64),)))
    cube = MeshSpec(axes=(("a", 2), ("b", 2), ("c", 2)))
    with pytest.raises(NotImplementedError, match="at most two mesh axes"):
        simulate(squares(2), mesh=cube)
    with pytest.raises(ValueError, match="at least one parameter"):
        simulate([], 8)


def test_ranks_beyond_the_network_are_said() -> None:
    levels = network_of(H100).levels
    closed = replace(network_of(H100), levels=(levels[0], replace(levels[1], ranks=64)))
    with pytest.raises(ValueError, match="expected ranks below 64"):
        simulate(squares(2), 128, hardware=replace(H100, network=closed), strategies=["auto"])


def test_too_many_connections_are_a_refused_row_with_figures() -> None:
    found = simulate(squares(), 4096, strategies=["auto", "all_to_all", "gather_broadcast"])
    refused = found.row("all_to_all").refused
    assert "4,092 connections for each rank on plane 'infiniband' take 8,184 queue pairs" in refused
    assert "max_queue_pairs is 4,092" in refused and "choose a strategy of rings and trees" in refused
    assert not found.row("gather_broadcast").refused and "all_to_all" not in dict(found.row("auto").taken)


def test_table_and_json_hold_every_row(small: Simulation) -> None:
    text, data = str(small), json.loads(small.to_json())
    assert "40 parameters" in text and "4 replicate x 16 shard of h100" in text
    for row in small.rows:
        line = next(line for line in text.splitlines() if line.split()[:1] == [row.strategy])
        assert (f"{row.seconds * 1e3:,.2f}" in line) or "refused" in line
    assert "auto takes " in text and max(map(len, text.splitlines())) <= 160
    assert [row["strategy"] for row in data["rows"]] == [row.strategy for row in small.rows]
    assert data["rows"][1]["refused"] == small.row("local").refused and "events" not in data["rows"][0]


# -- size -------------------------------------------------------------------------------------------------------------

# A process of its own, whose peak of memory is the simulation's.
_ALONE = """
import importlib, json, pkgutil, resource, sys
import muon_compile.plan
for module in pkgutil.iter_modules(muon_compile.plan.__path__):
    importlib.import_module("muon_compile.plan." + module.name)
from muon_compile.plan.simulate import simulate
row = simulate("deepseek-v3", 10_000, hardware="ascend-910c", strategies=["gather_broadcast"]).rows[0]
print(json.dumps({
    "torch": "torch" in sys.modules,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    "ranks": sum(row.load_histogram),
    "seconds": row.seconds,
    "collectives": row.collectives,
}))
"""


def test_ten_thousand_ranks_without_torch_and_within_a_gigabyte() -> None:
    run = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, timeout=110, check=True)
    found = json.loads(run.stdout)
    assert found["torch"] is False
    assert found["peak"] < 2**30
    assert found["ranks"] == 10_000 and found["seconds"] > 0 and found["collectives"] > 100


def test_thousands_of_matrices_on_a_thousand_ranks() -> None:
    specs = [MatrixSpec(name=f"w{i}", shape=(64, 32), device="cuda") for i in range(5000)]
    plan = make_plan(specs, mesh=MeshSpec(axes=(("shard", 1024),)), strategy="all_to_all", hardware=H100)
    (exchange,) = (part.exchange for part in plan.parts)
    assert exchange is not None and exchange.num_units == 5000
    assert sum(exchange.owned(0)) == 5000 and set(exchange.owned(0)) == {4, 5}
    assert [spec.kind for spec in plan.collectives] == ["all_reduce", "all_to_all_single", "all_to_all_single"]
