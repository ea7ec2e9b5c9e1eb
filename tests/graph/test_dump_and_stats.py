"""What a step tells about itself (dump, describe, stats), and optimizers taught by an adapter."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer

import muon_compile as mc
from muon_compile.adapters import known_optimizers, registry
from tests.graph.twins import EXACT, assert_equal, give, momenta, parameters


def joint(backend: str = "aot_eager") -> tuple[list[Parameter], mc.CompiledStep]:
    params = parameters((8, 12), (8, 12), (16, 8), (8,))
    named = list(zip(("up[a]", "up[b]", "down", "bias"), params, strict=True))
    optimizers = Muon(named[:3], lr=0.1), AdamW(named[3:], lr=0.1)
    return params, mc.compile_step(*optimizers, backend=backend)


# -- dump ---------------------------------------------------------------------------------------------------------


def test_dump_before_anything_is_compiled_says_what_to_do(tmp_path: Path) -> None:
    _, step = joint()
    with pytest.raises(RuntimeError, match="Run a step first"):
        step.dump(tmp_path)
    assert not list(tmp_path.iterdir())


def test_dump_writes_the_plan_the_graph_and_the_code(tmp_path: Path) -> None:
    params, step = joint()
    give(params, seed=1)
    step()
    give(params, seed=2, missing={1})
    step()
    folder = tmp_path / "deep" / "er"
    written = step.dump(str(folder))
    of_graphs = ("graph.py", "graph.json", "graph.dot", "op_counts.json", "op_counts.txt", "aot_eager.py")
    assert {p.relative_to(folder).as_posix() for p in written} == {
        "plan.json",
        "plan.txt",
        "stats.json",
        "collectives.json",
        "predicted.trace.json",
        "report.html",
        *(f"{kind}_gradients/{name}" for kind in ("all", "masked") for name in of_graphs),
    }
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == sorted(written)
    assert mc.Plan.from_json((folder / "plan.json").read_text()) == step.plan
    assert (folder / "plan.txt").read_text().rstrip() == step.plan.describe().rstrip()
    assert json.loads((folder / "stats.json").read_text()) == step.stats.as_dict()
    for kind in ("all", "masked"):
        text = (folder / f"{kind}_gradients" / "graph.py").read_text()
        ast.parse(text)
        assert all(name in text for name in ("param_0", "muon0_momentum_buffer", "grad_3", "bmm", "apply_"))
        assert ("presence_0" in text) == (kind == "masked")
    assert step.dump(folder) == written  # again, over the old files


@pytest.mark.inductor
def test_dump_holds_inductors_code(tmp_path: Path) -> None:
    (param,) = parameters((8, 12))
    optimizer = Muon([param], ns_steps=1)
    step = mc.compile_step(optimizer)
    give([param], seed=1)
    optimizer.step()
    paths = {p.relative_to(tmp_path).as_posix(): p for p in step.dump(tmp_path)}
    code = paths["all_gradients/output_code.py"].read_text()
    ast.parse(code)
    assert "def call" in code and "param_0" in code and "muon0_momentum_buffer" in code


# -- describe -----------------------------------------------------------------------------------------------------


def test_describe_is_a_table_of_buckets_and_batches() -> None:
    _, step = joint()
    text = step.plan.describe()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert step.plan.digest in lines[0] and "4 parameters" in lines[0]
    assert "3 buckets" in lines[0] and "2 Newton-Schulz batches" in lines[0]

    def row(start: str) -> list[str]:
        (line,) = [line for line in lines if line.split()[:1] == [start]]
        return line.split()

    assert row("muon0")[1:7] == ["2", "8x12", "float32", "float32", "cpu", "0"]
    assert " ".join(row("muon0")[7:]) == "up[a], up[b]"
    assert row("adamw2")[1:7] == ["1", "8", "float32", "float32", "cpu", "1"]
    assert row("ns0")[1:5] == ["2", "8", "x", "12"] and "muon0" in row("ns0")
    # 5 steps of 4 m^2 n + 2 m^3, two matrices of 8 x 12 and one of 8 x 16 (transposed).
    flops = 5 * (2 * (4 * 8 * 8 * 12 + 2 * 8**3) + (4 * 8 * 8 * 16 + 2 * 8**3))
    assert sum(batch.flops for batch in step.plan.batches) == flops
    assert mc.make_plan(step.plan.specs).describe() == text


# -- stats --------------------------------------------------------------------------------------------------------


def test_stats_count_what_happened() -> None:
    params, step = joint()
    assert step.stats.as_dict() == mc.StepStats().as_dict()
    give(params, seed=1)
    step()
    first = step.stats.as_dict()
    assert first.pop("compile_seconds") > 0 and first.pop("fx_nodes") > 20
    assert (first.pop("temp_bytes"), first.pop("scratch_bytes")) == (step.plan.temp_bytes, 0)
    assert first == {
        "graphs": 1,
        "graph_breaks": 0,
        "recompiles": 0,
        "compiles": 1,
        "cached": 0,
        "host_launches": 1,
        "steps": 1,
        "collectives": 0,
        "bytes": 0,
        "collectives_by_kind": {},
        "bytes_by_kind": {},
    }
    give(params, seed=2, missing={0})
    step()
    assert (step.stats.graphs, step.stats.compiles, step.stats.recompiles, step.stats.steps) == (2, 2, 0, 2)
    give(params, seed=3, missing=range(4))
    step()  # nothing to do
    assert (step.stats.host_launches, step.stats.steps, step.stats.compiles) == (0, 2, 2)
    step.optimizers[0].param_groups[0]["ns_steps"] = 2
    give(params, seed=4)
    step()
    assert (step.stats.graphs, step.stats.compiles, step.stats.recompiles, step.stats.steps) == (1, 3, 1, 3)


@pytest.mark.inductor
def test_stats_tell_a_cached_compile() -> None:
    def compiled() -> mc.StepStats:
        (param,) = parameters((8, 12))
        optimizer = Muon([param], ns_steps=1)
        step = mc.compile_step(optimizer)
        give([param], seed=1)
        optimizer.step()
        return step.stats

    compiled()
    torch._dynamo.reset()
    assert compiled().cached == 1


# -- adapters -----------------------------------------------------------------------------------------------------


class HouseMuon(Optimizer):
    """Somebody's own Muon, with names of its own in its groups."""

    def __init__(self, params: Any, rate: float = 0.1, beta: float = 0.9, depth: int = 5) -> None:
        super().__init__(params, {"rate": rate, "beta": beta, "depth": depth})

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("the house's own step")


class HouseAdapter:
    """Reads ``HouseMuon``: decay-free Muon."""

    class_paths = (f"{HouseMuon.__module__}.{HouseMuon.__qualname__}",)
    config_keys = ("depth",)

    def algorithm(self, group: Any) -> str:
        return "muon"

    def config(self, group: Any) -> mc.MuonConfig:
        return mc.MuonConfig(ns_steps=group["depth"])

    def hyper(self, group: Any) -> dict[str, float | Tensor]:
        return {"lr": group["rate"], "weight_decay": 0.0, "momentum": group["beta"]}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> HouseAdapter:
    """The adapter, known for one test."""
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    adapter = HouseAdapter()
    mc.register_adapter(adapter)
    return adapter


def test_an_adapter_teaches_an_optimizer(registered: HouseAdapter) -> None:
    assert registered.class_paths[0] in known_optimizers()
    ours, theirs = (parameters((8, 12), (8, 12), (16, 8)) for _ in range(2))
    house, stock = HouseMuon(ours), Muon(theirs, lr=0.1, momentum=0.9, weight_decay=0.0)
    step = mc.compile_step(house, backend="aot_eager", config=EXACT)
    for seed in range(3):
        give(ours, theirs, seed=seed)
        house.step()
        stock.step()
    house.param_groups[0]["rate"] = stock.param_groups[0]["lr"] = 0.03  # read at every step
    give(ours, theirs, seed=3)
    house.step()
    stock.step()
    assert_equal(ours, theirs)
    assert_equal(momenta(house), momenta(stock))
    assert step.stats.compiles == 1

    house.param_groups[0]["depth"] = stock.param_groups[0]["ns_steps"] = 3  # one of config_keys: a new plan
    give(ours, theirs, seed=4)
    house.step()
    stock.step()
    assert_equal(ours, theirs)
    assert (step.stats.recompiles, step.plan.batches[0].config.ns_steps) == (1, 3)
    step.uninstall()
    with pytest.raises(NotImplementedError, match="the house's own step"):
        house.step()


def test_an_optimizer_is_unknown_until_then_and_after() -> None:
    with pytest.raises(TypeError, match=r"no adapter knows .*HouseMuon.*register_adapter"):
        mc.compile_step(HouseMuon(parameters((4, 4))), backend="aot_eager")
    assert not any("HouseMuon" in path for path in known_optimizers())


def test_a_later_adapter_replaces_an_earlier_one(registered: HouseAdapter) -> None:
    class Shallow(HouseAdapter):
        def config(self, group: Any) -> mc.MuonConfig:
            return mc.MuonConfig(ns_steps=1)

    count = len(known_optimizers())
    mc.register_adapter(Shallow())
    assert len(known_optimizers()) == count
    step = mc.compile_step(HouseMuon(parameters((4, 4))), backend="aot_eager")
    assert step.plan.batches[0].config.ns_steps == 1


def test_half_an_adapter_is_refused() -> None:
    class Half:
        class_paths = ("house.Muon",)
        config_keys = ()

        def algorithm(self, group: Any) -> str:
            return "muon"

    known = known_optimizers()
    with pytest.raises(TypeError, match=r"without \['config', 'hyper'\]"):
        mc.register_adapter(Half())  # type: ignore[arg-type]
    assert known_optimizers() == known
