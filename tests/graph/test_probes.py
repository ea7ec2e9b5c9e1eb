"""Probes: their figures against float64, that they cost a step without them nothing, and how they are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import muon_compile as mc
from muon_compile.build import sharded, step
from muon_compile.build.orthogonalize import shape_scale
from muon_compile.build.probe_ops import signs
from muon_compile.kernels import cpu
from muon_compile.lower.check import check_graph
from muon_compile.lower.functional import functional_graph
from muon_compile.lower.trace import TracedStep
from muon_compile.npu.audit import audit
from muon_compile.run.inputs import trace_plan
from tests.graph.test_native_step import GRAPH, NATIVE
from tests.graph.twins import give
from tests.npu.plans import DTYPES, SHARDED, groups_of, make

PROBES = mc.CompileConfig(probes=True)
SHAPES = [(24, 40), (24, 40), (24, 40), (40, 24), (24, 24), (3, 24, 20)]
VECTORS = [(9,), (9,), ()]
MATRICES_LR, LAST_LR, VECTORS_LR, DECAY = 0.5, 0.25, 0.125, 0.1
inductor = pytest.mark.inductor
needs_kernels = pytest.mark.skipif(cpu.why_not() is not None, reason=f"no CPU kernels: {cpu.why_not()}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Matrices in two groups, whose buckets so have hyperparameters per matrix, and vectors for AdamW."""

    params: list[Parameter]
    lr: list[float]
    optimizer: mc.Muon
    step: mc.CompiledStep


def training(
    config: mc.MuonConfig,
    *,
    backend: str = "aot_eager",
    ns: str = "standard",
    hardware: mc.Hardware = GRAPH,
    compile_config: mc.CompileConfig = PROBES,
) -> Training:
    generator = torch.Generator().manual_seed(3)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in (*SHAPES, *VECTORS)]
    count = len(SHAPES)
    groups: list[dict[str, Any]] = [
        {"params": [(f"w{i}", params[i]) for i in range(2)], "lr": MATRICES_LR, "weight_decay": DECAY},
        {"params": [(f"w{i}", params[i]) for i in range(2, count)], "lr": LAST_LR, "weight_decay": 2 * DECAY},
        {"params": [(f"v{i}", p) for i, p in enumerate(params[count:])], "algorithm": "adamw", "lr": VECTORS_LR},
    ]
    groups[2]["weight_decay"] = DECAY
    optimizer = mc.Muon(groups, config=config, backend=backend)
    step = mc.compile_step(optimizer, backend=backend, ns=ns, hardware=hardware, config=compile_config)
    lr = [group["lr"] for group in optimizer.param_groups for _ in group["params"]]
    return Training(params=params, lr=lr, optimizer=optimizer, step=step)


def estimate(x: Tensor) -> float:
    """``||X X^T v - v||^2 / r`` in float64, by the same v."""
    x = x.double() if x.shape[0] <= x.shape[1] else x.double().T
    v = signs(x.shape[0], x.device).double()
    return float((x @ (x.T @ v) - v).square().sum()) / x.shape[0]


def rms(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors) / sum(t.numel() for t in tensors))


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def matrices(update: Tensor, lr: float, config: mc.MuonConfig) -> list[Tensor]:
    """The orthogonalized matrices of an update, one after the other."""
    found = []
    for unit in update.reshape(-1, *update.shape[-2:]):
        blocks = config.split_sizes or (unit.shape[0],)
        for block in unit.split(list(blocks)):
            found.append(block / (-lr * shape_scale(config, *block.shape)))
    return found


def step_and_compare(run: Training, config: mc.MuonConfig, seed: int, missing: Collection[int] = ()) -> mc.Probes:
    """One step, whose figures have to be those of what it did to parameters and state."""
    give(run.params, seed=seed, missing=missing)
    old = [p.detach().clone() for p in run.params]
    run.optimizer.step()
    decays = [lr * g["weight_decay"] for g in run.optimizer.param_groups for lr in [g["lr"]] for _ in g["params"]]
    probes, names = run.step.probes(), run.step.plan.specs
    index_of = {spec.name: i for i, spec in enumerate(names)}
    assert sorted(name for bucket in probes.buckets for name in bucket.params) == sorted(index_of)
    for bucket in probes.buckets:
        there = [i for i in map(index_of.__getitem__, bucket.params) if i not in missing]
        if not there:
            assert bucket.as_dict() == {}
            continue
        moved = {i: run.params[i].detach().double() - old[i].double() * (1 - decays[i]) for i in there}
        key = "momentum_buffer" if bucket.algorithm == "muon" else "exp_avg"
        state = [run.optimizer.state[run.params[i]][key] for i in there]
        decayed, update = norm([old[i] * decays[i] for i in there]), norm(list(moved.values()))
        wanted = {
            "update_rms": rms(list(moved.values())),
            "weight_rms": rms([old[i] for i in there]),
            "momentum_rms": rms(state),
            "decay_share": decayed / (decayed + update),
        }
        if bucket.algorithm == "muon":
            errors = [estimate(x) for i in there for x in matrices(moved[i], run.lr[i], config)]
            wanted["orthogonality_error"] = math.sqrt(sum(errors) / len(errors))
        assert bucket.as_dict() == pytest.approx(wanted, rel=2e-4), bucket
    return probes


CONFIGS = {
    "float32": mc.MuonConfig(ns_dtype="float32"),
    "bfloat16": mc.MuonConfig(),
    "momentum in bfloat16": mc.MuonConfig(momentum_dtype="bfloat16"),
    "keller": mc.MuonConfig(preset="keller"),
    "relative": mc.MuonConfig(eps="relative"),
    "blocks": mc.MuonConfig(split_sizes=(8, 16), flatten=None),
}


@pytest.mark.parametrize("hardware", [GRAPH, pytest.param(NATIVE, marks=needs_kernels)], ids=["graph", "native"])
@pytest.mark.parametrize("ns", ["standard", "gram"])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_figures_of_a_step(name: str, ns: str, hardware: mc.Hardware) -> None:
    run = training(CONFIGS[name], ns=ns, hardware=hardware)
    for seed in range(2):
        probes = step_and_compare(run, CONFIGS[name], seed)
        assert probes.step == seed + 1 and probes.reduced
    # Missing gradients: some of a bucket, and all of a bucket.
    step_and_compare(run, CONFIGS[name], 2, missing={1, 3, 7})
    assert run.step.stats.compiles == 2


@pytest.mark.parametrize("hardware", [GRAPH, pytest.param(NATIVE, marks=needs_kernels)], ids=["graph", "native"])
@pytest.mark.parametrize("bound", [2**31, 6000], ids=["whole", "waves"])
@pytest.mark.parametrize("name", CONFIGS)
def test_figures_of_every_kind_of_step(name: str, bound: int, hardware: mc.Hardware) -> None:
    config = CONFIGS[name]
    shapes = [s for s in SHAPES if s[-2] == 24]
    compile_config = dataclasses.replace(PROBES, max_temp_bytes=bound)
    generator = torch.Generator().manual_seed(3)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = mc.Muon([(f"w{i}", p) for i, p in enumerate(params)], lr=0.5, weight_decay=0.1, config=config)
    step = mc.compile_step(optimizer, backend="aot_eager", ns="standard", hardware=hardware, config=compile_config)
    assert (len(step.plan.waves) > 1) == (bound < 2**31)
    run = Training(params=params, lr=[0.5] * len(params), optimizer=optimizer, step=step)
    for seed, missing in enumerate([(), {1, 4}, ()]):
        step_and_compare(run, config, seed, missing)


@inductor
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "bound", "hardware", "gaps"),
    [
        ("bfloat16", 2**31, GRAPH, [()]),
        ("float32", 9000, GRAPH, [{1, 4}]),
        pytest.param("bfloat16", 9000, NATIVE, [{1, 4}, ()], marks=needs_kernels),
    ],
    ids=["whole", "waves", "native"],
)
def test_figures_through_inductor(name: str, bound: int, hardware: mc.Hardware, gaps: list[Collection[int]]) -> None:
    compile_config = dataclasses.replace(PROBES, max_temp_bytes=bound)
    run = training(CONFIGS[name], backend="inductor", hardware=hardware, compile_config=compile_config)
    assert (len(run.step.plan.waves) > 1) == (bound < 2**31)
    for seed, missing in enumerate(gaps * 2):
        step_and_compare(run, CONFIGS[name], seed, missing)


def test_exact_mode_has_them_too() -> None:
    params = [Parameter(torch.randn(s)) for s in ((8, 12), (8, 12), (16, 8))]
    optimizer = torch.optim.Muon([(f"w{i}", p) for i, p in enumerate(params)], lr=0.5)
    step = mc.compile_step(optimizer, backend="aot_eager", config=mc.CompileConfig(probes=True, exact=True))
    give(params, seed=0)
    before = norm([p.detach().clone() for p in params[:2]]) / math.sqrt(2 * 8 * 12)
    optimizer.step()
    first = step.probes().buckets[0]
    assert first.weight_rms == pytest.approx(before, rel=1e-6) and first.orthogonality_error is not None


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("hardware", [GRAPH, pytest.param(NATIVE, marks=needs_kernels)], ids=["graph", "native"])
def test_the_step_itself_is_bit_for_bit_the_same(hardware: mc.Hardware, exact: bool) -> None:
    ends = []
    for probes in (False, True):
        config = mc.CompileConfig(probes=probes, exact=exact)
        run = training(mc.MuonConfig(), hardware=hardware, compile_config=config)
        for seed, missing in enumerate([(), {1, 3}, ()]):
            give(run.params, seed=seed, missing=missing)
            run.optimizer.step()
        ends.append(run.params)
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)


# -- nothing where they are off ----------------------------------------------------------------------------------------


def text(traced: TracedStep) -> str:
    return "\n".join(node.format_node() or "" for node in traced.graph.graph.nodes)


def off_and_on() -> list[tuple[str, Callable[..., TracedStep]]]:
    plans = {
        "one": make("one", "local", "standard", "bfloat16", adamw=mc.AdamWConfig()),
        "waves": make("one", "local", "standard", "float32", max_temp_bytes=700),
        "gram": make("four", "gram_scatter"),
        "four": make("four", "all_to_all", adamw=mc.AdamWConfig()),
    }

    def of(plan: mc.Plan, backend: str) -> Callable[..., TracedStep]:
        return lambda **more: trace_plan(plan, backend=backend, groups=groups_of(plan), **more)[1]

    backends = ("aot_eager", "inductor", "torchair")
    return [(f"{name} {backend}", of(plan, backend)) for name, plan in plans.items() for backend in backends]


CASES = off_and_on()


@pytest.mark.parametrize(("name", "trace"), CASES, ids=[name for name, _ in CASES])
def test_off_the_builder_never_comes_near_them(
    name: str, trace: Callable[..., TracedStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trace()
    assert not any(word in text(before) for word in ("probe", "squares", "squared_error"))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a step without probes came by")

    for module in (step, sharded):
        for attribute in ("Tally", "row_squares", "squared_error", "gram_squared_error"):
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, refuse)
    assert text(trace()) == text(before)
    with pytest.raises(AssertionError, match="came by"):
        trace(probes=True)


def operators_of(traced: TracedStep) -> list[str]:
    """In order. An NPU's graph copies even one parameter where the probes read it besides: a stack of one is a view."""
    found = []
    for node in traced.graph.graph.nodes:
        if node.op == "call_function":
            alone = node.target is torch.ops.aten.stack.default and len(node.args[0]) == 1
            found.append("aten.unsqueeze.default" if alone else str(node.target))
    return found


@pytest.mark.parametrize(("name", "trace"), CASES, ids=[name for name, _ in CASES])
def test_on_they_are_added_and_nothing_else_changes(name: str, trace: Callable[..., TracedStep]) -> None:
    """With the write of its table taken away, and what nothing uses then, the graph is that without probes."""
    off, on = trace(), trace(probes=True)
    assert off.spec.probes == () and on.spec.num_written == off.spec.num_written + 1
    table = next(node for node in on.graph.graph.nodes if node.name == "probes_0")
    (write,) = table.users if len(table.users) == 1 else [u for u in table.users if "copy" in str(u.target)]
    on.graph.graph.erase_node(write)
    for traced in (off, on):  # the builder takes views that nobody uses
        traced.graph.graph.eliminate_dead_code()
    assert not [user for user in table.users if user.users]
    assert operators_of(on) == operators_of(off)


@inductor
def test_off_is_the_same_entry_of_inductors_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cached = []
    for config in (mc.CompileConfig(), mc.CompileConfig(probes=False), PROBES, PROBES):
        params = [Parameter(torch.randn(8, 12)) for _ in range(2)]
        give(params, seed=0)
        optimizer = torch.optim.Muon(params)
        handle = mc.compile_step(optimizer, config=config)
        optimizer.step()
        cached.append(handle.stats.cached)
    assert cached == [0, 1, 0, 1]


# -- the graph with them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all", "masked"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torchair_knows_every_operator(dtype: str, kind: str) -> None:
    plan = make("one", "local", dtype=dtype, adamw=mc.AdamWConfig(), max_temp_bytes=2000)
    local, traced = trace_plan(plan, backend="torchair", kind=kind, probes=True)
    check_graph(local, traced)
    assert audit(functional_graph(traced)) == []


@pytest.mark.parametrize("strategy", SHARDED)
def test_torchair_knows_every_operator_of_every_strategy(strategy: str) -> None:
    plan = make("four", strategy, dtype="bfloat16")
    for rank in (0, 3):
        _, traced = trace_plan(plan, backend="torchair", rank=rank, groups=groups_of(plan), probes=True)
        assert audit(functional_graph(traced)) == []


@inductor
def test_one_compile_whatever_the_learning_rate() -> None:
    run = training(CONFIGS["float32"], backend="inductor")
    for seed in range(4):
        for group in run.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
        run.lr[:] = [group["lr"] for group in run.optimizer.param_groups for _ in group["params"]]
        step_and_compare(run, CONFIGS["float32"], seed)
    assert run.step.stats.compiles == 1 and run.step.stats.host_launches == 1


def test_a_learning_rate_of_zero_still_tells_the_weights() -> None:
    for hardware in (GRAPH, NATIVE) if cpu.why_not() is None else (GRAPH,):
        run = training(CONFIGS["bfloat16"], hardware=hardware)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        give(run.params, seed=0)
        run.optimizer.step()
        first = run.step.probes().buckets[0]
        assert first.weight_rms == pytest.approx(rms(list(run.params[:3])), rel=1e-5)
        assert first.update_rms == 0.0 and first.decay_share is None and first.orthogonality_error is not None


def test_a_matrix_of_zeros_is_as_far_from_orthogonal_as_can_be() -> None:
    run = training(CONFIGS["float32"])
    give(run.params, seed=0, scale=0.0)
    run.optimizer.step()
    assert run.step.probes().buckets[0].orthogonality_error == pytest.approx(1.0)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_reading_what_is_not_there_says_why() -> None:
    off = training(mc.MuonConfig(), compile_config=mc.CompileConfig())
    with pytest.raises(RuntimeError, match=r"CompileConfig\(probes=True\)"):
        off.step.probes()
    on = training(mc.MuonConfig())
    with pytest.raises(RuntimeError, match="no step was done yet"):
        on.step.probes()
    give(on.params, seed=0)
    on.optimizer.step()
    assert on.step.probes().step == 1
    on.step.uninstall()
    with pytest.raises(RuntimeError, match="no step was done yet"):
        on.step.probes()


def test_what_was_read_stays_and_is_named() -> None:
    run = training(mc.MuonConfig())
    give(run.params, seed=0)
    run.optimizer.step()
    first, again = run.step.probes(), run.step.probes()
    give(run.params, seed=1)
    run.optimizer.step()
    assert first == again and run.step.probes() != first
    scalars = first.scalars()
    assert set(scalars) == {f"{bucket.name}/{figure}" for bucket in first.buckets for figure in bucket.as_dict()}
    assert [b.algorithm for b in first.buckets].count("adamw") == 2
    assert all((b.orthogonality_error is None) == (b.algorithm == "adamw") for b in first.buckets)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.step = 3  # type: ignore[misc]


def test_a_flag_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="probes"):
        mc.CompileConfig(probes=None)  # type: ignore[arg-type]
