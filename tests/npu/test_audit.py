"""Layer A: every graph has only operators that TorchAir lowers. Needs neither TorchAir nor a download."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import muon_compile as mc
from muon_compile.build import momentum, step
from muon_compile.lower.cut_inputs import cut_inputs
from muon_compile.lower.functional import functional_graph
from muon_compile.npu.audit import Finding, audit, real_converters
from muon_compile.plan.plan import Plan
from muon_compile.run.inputs import trace_plan
from tests.npu.plans import DTYPES, FORMS, ROUNDED, SHARDED, WORLD, groups_of, make


def findings(plan: Plan, rank: int = 0, kind: str | None = None) -> list[Finding]:
    found: list[Finding] = []
    for lines in (False, True):  # the lines that emitted an operator cost time: only once there is something to say
        _, traced = trace_plan(
            plan, backend="torchair", rank=rank, groups=groups_of(plan), kind=kind, stack_traces=lines
        )
        found = audit(functional_graph(cut_inputs(traced)[0]))
        if not found:
            break
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["all", "masked"])
def test_every_form_on_one_rank(form: str, dtype: str, kind: str) -> None:
    assert findings(make("one", "local", form, dtype), kind=kind) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_every_strategy_on_four_ranks(strategy: str, form: str, dtype: str) -> None:
    rank = 0 if dtype == DTYPES[0] else WORLD - 1  # whose shards are others
    assert findings(make("four", strategy, form, dtype), rank) == []


@pytest.mark.parametrize("strategy", ["all_to_all", "gather_broadcast", "gram_scatter"])
def test_replicas_that_divide_the_work(strategy: str) -> None:
    assert findings(make("hsdp", strategy, "standard", "bfloat16"), rank=3) == []


@pytest.mark.parametrize(
    "config",
    [
        mc.MuonConfig(preset="keller"),
        mc.MuonConfig(preset="moonlight"),
        mc.MuonConfig(preset="hyperparallel"),
        mc.MuonConfig(eps="relative"),
        mc.MuonConfig(nesterov=False, coefficients="polar_express"),
        mc.MuonConfig(momentum_dtype="float32", ns_dtype="bfloat16", scale="rms_norm"),
    ],
    ids=lambda config: str(config.preset),
)
def test_every_kind_of_mathematics(config: mc.MuonConfig) -> None:
    for dtype in DTYPES:
        assert findings(make("one", "local", "standard", dtype, config=config)) == []


@pytest.mark.parametrize("adamw", [mc.AdamWConfig(), mc.AdamWConfig(amsgrad=True, maximize=True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all", "masked"])
def test_adamw(kind: str, dtype: str, adamw: mc.AdamWConfig) -> None:
    assert findings(make("one", "local", dtype=dtype, adamw=adamw), kind=kind) == []
    if kind == "masked":
        assert findings(make("four", "auto", dtype=dtype, adamw=adamw, experts=True), rank=1) == []


@pytest.mark.parametrize("kept", ROUNDED.values(), ids=list(ROUNDED))
@pytest.mark.parametrize("kind", ["all", "masked"])
def test_small_updates_that_hold(kind: str, kept: dict[str, Any]) -> None:
    adamw = mc.AdamWConfig()
    assert findings(make("one", "local", dtype="bfloat16", adamw=adamw, **kept), kind=kind) == []
    if kind == "masked":
        assert findings(make("hsdp", "auto", dtype="bfloat16", adamw=adamw, experts=True, **kept), rank=3) == []


def test_waves_and_parts_of_buckets() -> None:
    plan = make("one", "local", "standard", "float32", max_temp_bytes=700)
    assert len(plan.waves) > 1
    assert findings(plan) == []


def test_an_operator_without_converter_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_eye(*args: object) -> object:
        new, update = momentum.direction(*args)  # type: ignore[arg-type]
        return new, update + torch.eye(update.shape[-2], update.shape[-1])

    monkeypatch.setattr(step, "direction", with_eye)
    found = findings(make("one", "local", "standard"))
    assert {finding.operator for finding in found} == {"aten.eye.m"}
    assert all("has no converter" in str(finding) and "build/step.py" in finding.where for finding in found)


def test_float64_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(*args: object) -> object:
        new, update = momentum.direction(*args)  # type: ignore[arg-type]
        return new, (update.double() * 2).float()

    monkeypatch.setattr(step, "direction", wide)
    found = findings(make("one", "local", "standard"))
    assert found
    assert all("torch.float64" in finding.reason for finding in found)


def test_the_shipped_list_has_no_operators_that_are_known_to_raise() -> None:
    for name in ("aten.eye.default", "aten.amax.default", "aten.lerp.Tensor", "aten.bitwise_and.Scalar"):
        assert name not in real_converters()
    assert len(real_converters()) > 300
