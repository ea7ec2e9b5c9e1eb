"""What is said of a plan alone, without torch, ranks or a graph; and a rank's collectives in the plan's order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import muon_compile as mc
from muon_compile.inspect import dump
from muon_compile.inspect.collectives import _promised, collective_rows
from muon_compile.inspect.dump import dump_files, dump_plan
from muon_compile.inspect.trace import bar_of
from muon_compile.plan.exchange import STRATEGY_NAMES, Place
from muon_compile.plan.marks import Mark
from muon_compile.plan.plan import Plan
from muon_compile.plan.planner import make_plan
from muon_compile.plan.sharding import promised_collectives
from muon_compile.plan.step_cost import predict_step
from muon_compile.spec import MatrixSpec, MeshSpec

# What comes back is what every rank has made itself.
ONE_WAY = ("all_gather", "gram_all_reduce")
MESH = MeshSpec(axes=(("replicate", 2), ("shard", 4)))


def plan_on(mesh: MeshSpec | None = MESH, strategy: str = "auto", count: int = 3, device: str = "cpu") -> Plan:
    specs = [MatrixSpec(name=f"m{i}", shape=(64, 32), device=device) for i in range(count)]
    specs.append(MatrixSpec(name="v", shape=(64,), algorithm="adamw", device=device))
    return make_plan(specs, mesh=mesh, strategy=strategy)


def test_a_plan_alone_has_the_files_that_need_no_graph(tmp_path: Path) -> None:
    plan = plan_on()
    paths = dump_plan(plan, tmp_path / "out")
    names = ["plan.json", "plan.txt", "collectives.json", "predicted.trace.json", "report.html"]
    assert [path.relative_to(tmp_path / "out").as_posix() for path in paths] == names
    assert all(path.stat().st_size > 0 for path in paths)
    assert Plan.from_json(paths[0].read_text()) == plan
    assert paths[1].read_text().rstrip() == plan.describe().rstrip()
    rows = json.loads(paths[2].read_text())
    assert [(row["kind"], row["axis"], row["bytes"]) for row in rows] == [
        (spec.kind, spec.axis, spec.bytes_per_rank) for spec in plan.collectives
    ]
    assert all("found" not in row and "equal" not in row for row in rows)
    assert plan.digest in paths[4].read_text()


@pytest.mark.parametrize("strategy", STRATEGY_NAMES[1:])
@pytest.mark.parametrize("mesh", [MESH, MeshSpec(axes=(("shard", 4),))])
def test_every_promise_has_its_phase_and_role(strategy: str, mesh: MeshSpec) -> None:
    plan = plan_on(mesh, strategy)
    rows = collective_rows(plan)
    assert [row["kind"] for row in rows] == [spec.kind for spec in plan.collectives]
    phases = [row["phase"] for row in rows]
    assert phases == sorted(phases, key=["agree", "send", "return"].index)
    assert phases.count("send") == (2 if strategy == "hierarchical_all_to_all" else 1)
    assert "agree" in phases and ("return" in phases) is (strategy not in ONE_WAY or mesh is MESH)
    for row in rows:
        nodes = {"shard/node": "node", "shard/peers": "peers", "shard": "shard", "replicate": "replica"}
        assert row["role"] == nodes[row["axis"]]
        assert (row["wave"], row["part"] is None) == ((None, True) if row["phase"] == "agree" else (0, False))
        assert row["buckets"] == ["muon0"] or row["phase"] == "agree"


def test_the_prediction_counts_with_the_hardware_that_is_given() -> None:
    plan = plan_on()
    for given, counted in (
        (None, "cpu-2core"),
        (mc.Hardware.preset("h100"), "cpu-2core"),  # of another device
        (mc.Hardware.preset("cpu-2core"), "cpu-2core"),
    ):
        trace = json.loads(dump_files(plan, hardware=given)["predicted.trace.json"])
        assert trace["traceEvents"][0]["args"] == {"name": f"predicted for {counted}"}
    trace = json.loads(dump_files(plan_on(device="cuda"), hardware=mc.Hardware.preset("h200"))["predicted.trace.json"])
    assert trace["traceEvents"][0]["args"] == {"name": "predicted for h200"}
    seconds = predict_step(plan, mc.Hardware.preset("cpu-2core")).seconds
    assert (
        f": {seconds * 1e3:,.3f} ms." in json.loads(dump_files(plan)["predicted.trace.json"])["otherData"]["notes"][0]
    )


def test_no_torch_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys, muon_compile as mc\n"
        "from muon_compile.inspect.dump import dump_plan\n"
        f"dump_plan(mc.make_plan(mc.model_specs('gpt2')), {str(tmp_path)!r})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    assert (tmp_path / "report.html").exists()


def replica_rows(plan: Plan, replica: int) -> list[dict[str, object]]:
    """A rank's collectives as a dump has them, but for what was found."""
    places = {i: Place(replica_rank=replica) for i, part in enumerate(plan.parts) if part.exchange is not None}
    assert len(promised_collectives(plan, places)) == len(dump.promises(plan, places))
    return [_promised(plan, promise) | {"found": number} for number, promise in enumerate(dump.promises(plan, places))]


def test_a_rank_of_fewer_broadcasts_keeps_the_plans_order() -> None:
    """Three matrices for two replicas: one of them has two owners, the other one."""
    specs = [MatrixSpec(name=f"m{i}", shape=(64, 32)) for i in range(3)]
    plan = make_plan(specs, mesh=MESH, strategy="gather_broadcast")
    (part,) = [part for part in plan.parts if part.exchange is not None]
    assert part.exchange is not None and not part.exchange.gathers_results
    most, fewest = (replica_rows(plan, replica) for replica in (0, 1))
    assert len(most) == len(plan.collectives) > len(fewest)
    assert dump._in_plan_order(plan, most) == most
    made = dump._in_plan_order(plan, fewest)
    assert [(row["kind"], row["axis"]) for row in made] == [(spec.kind, spec.axis) for spec in plan.collectives]
    found = [row["found"] for row in made]
    assert found.count(None) == len(most) - len(fewest)
    assert [number for number in found if number is not None] == list(range(len(fewest)))
    # What nobody promised stays, at the end.
    extra = {"kind": None, "axis": None, "phase": None, "wave": None, "part": None, "found": {"kind": "broadcast"}}
    assert dump._in_plan_order(plan, [*most, extra])[-1] == extra


def test_bars_are_named_as_the_prediction_names_them() -> None:
    plan = plan_on(strategy="gram_scatter")
    part = next(i for i, part in enumerate(plan.parts) if part.exchange is not None)
    marks = {
        phase: Mark(phase=phase, parts=(part,)) for phase in ("agree", "momentum", "send", "orthogonalize", "return")
    }
    named = {
        bar_of(plan, marks["agree"], "all_reduce"),
        bar_of(plan, marks["momentum"], None),
        bar_of(plan, marks["send"], "reduce_scatter_tensor"),
        bar_of(plan, marks["orthogonalize"], None),
        bar_of(plan, marks["return"], "all_gather_into_tensor"),
        bar_of(plan, Mark(phase="update", parts=(part,)), None),
    }
    predicted = predict_step(plan, mc.Hardware.preset("cpu-2core")).events
    assert named == {(event.name, event.lane) for event in predicted}
    assert bar_of(plan, marks["send"], None) == ("muon0 pack", "compute")
    assert bar_of(plan, Mark(phase="inputs"), None) == bar_of(plan, None, None) == ("inputs", "compute")
    alone = plan_on(mesh=None)
    assert bar_of(alone, Mark(phase="orthogonalize", parts=(0,), batch=0), None)[0] == "ns0 newton-schulz"
