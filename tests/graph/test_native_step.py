"""The whole step on the CPU kernels: against stock and against the graph's own operators, in parts, and its memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

import muon_compile as mc
from muon_compile.kernels import cpu

pytestmark = pytest.mark.skipif(cpu.why_not() is not None, reason=f"no CPU kernels: {cpu.why_not()}")

GRAPH = mc.Hardware.preset("cpu-2core")


def native_hardware() -> mc.Hardware:
    """The preset with a CPU kernel a thousand times as fast as its products: what can be native is."""
    (rates,) = [r for r in GRAPH.gemm if (r.kernel, r.dtype) == ("graph", "bfloat16")]
    fast = tuple(1000 * rate for rate in rates.flops_per_second)
    gemm = (*GRAPH.gemm, dataclasses.replace(rates, kernel="native", flops_per_second=fast))
    return dataclasses.replace(GRAPH, name="native", gemm=gemm, native=True)


NATIVE = native_hardware()


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [Parameter((torch.randn(s, generator=generator)).to(dtype)) for s in shapes]


def give(params: list[Parameter], seed: int, missing: set[int] | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if missing and index in missing else grad


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def kernels(step: mc.CompiledStep) -> set[str]:
    return {batch.kernel for batch in step.plan.batches}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_twenty_steps_against_stock(backend: str) -> None:
    """lr 1, no decay, zeroed parameters: what is compared is the direction. Some gradients are missing at the end."""
    shapes = [(24, 40), (24, 40), (40, 24), (64, 64), (8, 200), (64, 64), (24, 40)]
    mine, theirs = parameters(shapes), parameters(shapes)
    ours = torch.optim.Muon([{"params": mine[:4], "lr": 1.0}, {"params": mine[4:], "lr": 0.5}], weight_decay=0.0)
    stock = torch.optim.Muon([{"params": theirs[:4], "lr": 1.0}, {"params": theirs[4:], "lr": 0.5}], weight_decay=0.0)
    step = mc.compile_step(ours, backend=backend, hardware=NATIVE)
    for index in range(20):
        missing = {1, 4, 6} if index in (15, 17) else None
        for params in (mine, theirs):
            give(params, index, missing)
            for param in params:
                param.data.zero_()
        ours.step()
        stock.step()
        for a, b in zip(mine, theirs, strict=True):
            if b.grad is None:
                assert torch.equal(a, b)
            else:
                assert relative(a, b) <= 4e-2  # two bfloat16 iterations, each within 2e-2 of the exact one
    for a, b in zip(mine, theirs, strict=True):
        assert relative(ours.state[a]["momentum_buffer"], stock.state[b]["momentum_buffer"]) <= 1e-6
    assert kernels(step) == {"native"} and step.plan.native
    assert step.stats.compiles == 2
    nodes = {str(n.target) for n in step._binding.graphs["all"][0].graph.graph.nodes if n.op == "call_function"}
    assert {f"muon_compile.{n}.default" for n in ("momentum_", "native_newton_schulz_", "update_")} <= nodes
    assert not any("bmm" in name or "pack" in name or "apply_" in name for name in nodes)


CONFIGS = {
    "torch": mc.MuonConfig(),
    "keller": mc.MuonConfig(preset="keller"),
    "moonlight": mc.MuonConfig(preset="moonlight"),
    "dion": mc.MuonConfig(preset="dion"),
    "relative": mc.MuonConfig(eps="relative"),
    "blocks": mc.MuonConfig(split_sizes=(8, 16)),
    "heads": mc.MuonConfig(num_heads=3),
    "momentum in bfloat16": mc.MuonConfig(momentum_dtype="bfloat16"),
    "no nesterov": mc.MuonConfig(nesterov=False),
    "float32 products": mc.MuonConfig(ns_dtype="float32"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_as_the_graphs_own_operators(name: str, dtype: torch.dtype) -> None:
    shapes = [(24, 40), (24, 40), (3, 24, 20), (2, 24, 2, 3), (2, 24, 2, 3)]
    shapes = [s if len(s) < 4 else (24, *s[1:]) for s in shapes]
    results = []
    for hardware in (GRAPH, NATIVE):
        params = parameters(shapes, dtype)
        optimizer = mc.Muon(params, lr=0.5, momentum=0.9, weight_decay=0.1, config=CONFIGS[name], backend="aot_eager")
        step = mc.compile_step(optimizer, backend="aot_eager", hardware=hardware, ns="standard")
        starts = []
        for index in range(3):
            give(params, index, {1} if index == 1 else None)
            starts = [p.detach().clone() for p in params]
            optimizer.step()
        moved = [p.detach().double() - s.double() for p, s in zip(params, starts, strict=True)]
        results.append((moved, [optimizer.state[p]["momentum_buffer"] for p in params], kernels(step)))
    (moved_1, momenta_1, kernels_1), (moved_2, momenta_2, kernels_2) = results
    assert kernels_1 == {"graph"}
    assert kernels_2 == ({"graph"} if name == "float32 products" else {"native"})
    narrow = dtype == torch.bfloat16 or name == "momentum in bfloat16"
    for a, b in zip(moved_1, moved_2, strict=True):
        # The same roundings, but sums in another order; a bfloat16 parameter takes its update to 2^-9 of itself.
        assert relative(a, b) <= (3e-2 if dtype == torch.float32 else 6e-2)
    for a, b in zip(momenta_1, momenta_2, strict=True):
        assert relative(a, b) <= (4e-3 if narrow else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clipping_stays_on_the_kernels(dtype: torch.dtype) -> None:
    shapes = [(24, 40), (24, 40), (64, 64)]
    results = []
    for hardware in (GRAPH, NATIVE):
        params = parameters(shapes, dtype)
        optimizer = mc.Muon(params, lr=0.5, momentum=0.9, weight_decay=0.1, backend="aot_eager")
        config = mc.CompileConfig(clip_grad_norm=0.5, nonfinite="skip", probes=True)
        step = mc.compile_step(optimizer, backend="aot_eager", hardware=hardware, ns="standard", config=config)
        for index in range(4):
            give(params, index, {1} if index == 1 else None)
            if index == 2:
                assert params[0].grad is not None
                params[0].grad[0, 0] = torch.inf
            optimizer.step()
        assert step.skipped == 1
        nodes = {str(n.target) for n in step._binding.graphs["all"][0].graph.graph.nodes if n.op == "call_function"}
        assert ("muon_compile.momentum_.default" in nodes) == (hardware is NATIVE)
        results.append((params, [optimizer.state[p]["momentum_buffer"] for p in params], step.probes().scalars()))
    (params_1, momenta_1, probes_1), (params_2, momenta_2, probes_2) = results
    for a, b, start in zip(params_1, params_2, parameters(shapes, dtype), strict=True):
        change = (a - start).detach().double().norm()
        assert float((a - b).detach().double().norm()) <= (3e-2 if dtype == torch.float32 else 6e-2) * float(change)
    for a, b in zip(momenta_1, momenta_2, strict=True):
        assert relative(a, b) <= (1e-6 if dtype == torch.float32 else 4e-3)
    assert probes_1.keys() == probes_2.keys()


@pytest.mark.parametrize("hardware", [GRAPH, NATIVE], ids=["graph", "native"])
def test_cut_into_parts_it_gives_the_same(hardware: mc.Hardware) -> None:
    shapes = [(24, 40)] * 5 + [(6, 24, 40)] * 2 + [(40, 24)]
    results = []
    for bound in (2**31, 6000):
        params = parameters(shapes)
        groups = [{"params": params[:3], "lr": 0.5}, {"params": params[3:], "lr": 0.25}]
        optimizer = mc.Muon(groups, weight_decay=0.1, backend="aot_eager")
        config = mc.CompileConfig(max_temp_bytes=bound)
        step = mc.compile_step(optimizer, backend="aot_eager", config=config, hardware=hardware, ns="standard")
        for index in range(3):
            give(params, index, {1, 5} if index == 1 else None)
            optimizer.step()
        results.append((params, [optimizer.state[p]["momentum_buffer"] for p in params], len(step.plan.waves)))
    (params_1, momenta_1, waves_1), (params_2, momenta_2, waves_2) = results
    assert waves_1 == 1 and waves_2 >= 7
    for a, b in zip(momenta_1, momenta_2, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(params_1, params_2, strict=True):
        # A matrix's products do not depend on its batch in the kernel; a small bmm's sums may.
        assert torch.equal(a, b) if hardware is NATIVE else relative(a, b) <= 1e-2


@pytest.mark.parametrize(
    ("hardware", "backend"),
    [(NATIVE, "aot_eager"), pytest.param(GRAPH, "inductor", marks=pytest.mark.inductor)],
    ids=["native", "graph"],
)
@pytest.mark.parametrize("bound", [2**31, 2**20])
def test_temporaries_stay_within_what_the_plan_says(hardware: mc.Hardware, backend: str, bound: int) -> None:
    """Peak of what a step allocates, as the profiler sees it, against ``plan.temp_bytes``."""
    params = parameters([(64, 256)] * 20 + [(8, 64, 128)])
    optimizer = mc.Muon(params, backend=backend)
    config = mc.CompileConfig(max_temp_bytes=bound)
    step = mc.compile_step(optimizer, backend=backend, config=config, hardware=hardware, ns="standard")
    give(params, 0)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as profiler:
        optimizer.step()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert step.stats.temp_bytes == step.plan.temp_bytes <= bound
    assert (step.stats.scratch_bytes > 0) == (hardware is NATIVE)
    assert 0 < peak <= 1.1 * step.plan.temp_bytes + 64 * 1024


def test_a_plan_for_kernels_that_are_not_there_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters([(8, 12)])
    optimizer = torch.optim.Muon(params)
    step = mc.compile_step(optimizer, backend="aot_eager", hardware=NATIVE)
    give(params, 0)
    before = params[0].detach().clone()
    monkeypatch.setattr(cpu, "_load", lambda: (None, "said for this test"))
    with pytest.raises(mc.CompileError, match="not available here: said for this test"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert step.stats.steps == 0


@pytest.mark.parametrize("hardware", [GRAPH, NATIVE], ids=["graph", "native"])
@pytest.mark.parametrize("ns", ["standard", "gram"])
def test_autocast_around_the_step_changes_nothing(hardware: mc.Hardware, ns: str) -> None:
    results = []
    for enabled in (False, True):
        params = parameters([(8, 200), (16, 16)])
        optimizer = torch.optim.Muon(params)
        mc.compile_step(optimizer, backend="aot_eager", hardware=hardware, ns=ns)
        give(params, 0)
        with torch.autocast("cpu", enabled=enabled):
            optimizer.step()
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
