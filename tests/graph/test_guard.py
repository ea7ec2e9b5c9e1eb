"""Clipping and skipping inside the graph, held against ``clip_grad_norm_`` and against nothing at all."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muon_compile as mc
from muon_compile.lower.cut_inputs import cut_inputs
from muon_compile.lower.functional import functional_graph
from muon_compile.npu.audit import audit
from muon_compile.run.inputs import trace_plan
from muon_compile.run.vanishing import VanishingWatch
from tests.npu.plans import make

# float32 throughout: what differs is the order of a sum, which Newton-Schulz enlarges a little.
TOLERANCE = 1e-5
SHAPES = {"a": (8, 6), "b": (8, 6), "c": (5, 8), "experts": (3, 6, 4), "bias": (8,), "norm": (6,)}


class Model(nn.Module):
    """Parameters and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(numbers(shape, number)))


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def optimizer_of(model: nn.Module) -> mc.Muon:
    config = mc.MuonConfig(ns_dtype="float32", ns_steps=2)
    rest = {"adamw_lr": 0.02, "adamw_config": mc.AdamWConfig(eps=0.1), "backend": "aot_eager"}
    return mc.Muon(mc.route(model, verbose=False), lr=0.1, weight_decay=0.1, config=config, **rest)


def give(model: nn.Module, step: int, scale: float = 1.0, missing: tuple[str, ...] = ()) -> None:
    for number, (name, param) in enumerate(model.named_parameters()):
        grad = numbers(tuple(param.shape), 100 * (step + 1) + number) * scale
        param.grad = None if name in missing else grad.to(param.dtype)


def pair(backend: str = "aot_eager", **config: Any) -> tuple[Model, mc.Muon, mc.CompiledStep, Model, mc.Muon]:
    """A guarded one, and its like without a guard."""
    model, other = Model(), Model()
    optimizer = optimizer_of(model)
    step = mc.compile_step(optimizer, backend=backend, config=mc.CompileConfig(**config))
    return model, optimizer, step, other, optimizer_of(other)


def assert_alike(model: nn.Module, other: nn.Module) -> None:
    for (name, a), b, start in zip(model.named_parameters(), other.parameters(), Model().parameters(), strict=True):
        change = (b - start).detach().double()
        assert float((a - b).detach().double().norm()) <= TOLERANCE * float(change.norm()), name


@pytest.mark.parametrize("bound", [{}, {"max_temp_bytes": 600}], ids=["one wave", "waves"])
def test_it_clips_as_torch_does(bound: dict[str, int]) -> None:
    model, optimizer, step, other, reference = pair(clip_grad_norm=1.0, **bound)
    assert (len(step.plan.waves) > 1) == bool(bound)
    for number, (scale, missing) in enumerate(((10.0, ()), (1e-3, ()), (3.0, ("a", "bias")), (0.1, ()))):
        for m in (model, other):
            give(m, number, scale, missing)
        kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        reference.step()
        for before, param in zip(kept, model.parameters(), strict=True):
            assert (before is None) == (param.grad is None)
            assert before is None or torch.equal(before, param.grad), ".grad stays as it is"
    assert_alike(model, other)
    assert step.stats.compiles == 2 and step.stats.recompiles == 0


def test_clipping_changes_the_step() -> None:
    """Muon's own direction has no scale, but momentum weighs a clipped gradient less, and AdamW's second moment too."""
    model, optimizer, _, other, reference = pair(clip_grad_norm=1.0)
    for number, scale in enumerate((100.0, 1.0)):
        for m in (model, other):
            give(m, number, scale)
        optimizer.step()
        reference.step()
    with pytest.raises(AssertionError):
        assert_alike(model, other)


@pytest.mark.inductor
def test_clipping_and_skipping_on_inductor() -> None:
    model, optimizer, step, other, reference = pair("inductor", clip_grad_norm=1.0, nonfinite="skip")
    for number, scale in enumerate((10.0, math.nan, 1e-3)):
        give(model, number, scale)
        optimizer.step()
        if not math.isnan(scale):
            give(other, number, scale)
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            reference.step()
    assert step.skipped == 1
    assert_alike(model, other)


SMALL = "norm under eps"


def tiny(model: nn.Module, name: str, scale: float) -> None:
    grad = dict(model.named_parameters())[name].grad
    assert grad is not None
    grad.mul_(scale)


@pytest.mark.parametrize("eps_mode", ["clamp", "add"])
@pytest.mark.parametrize("ns", ["standard", "gram"])
@pytest.mark.parametrize("bound", [{}, {"max_temp_bytes": 600}], ids=["one wave", "waves"])
def test_a_momentum_under_eps_is_told_once(bound: dict[str, int], ns: str, eps_mode: Any) -> None:
    model = Model()
    config = mc.MuonConfig(ns_dtype="float32", ns_steps=2, eps_mode=eps_mode)
    optimizer = mc.Muon(mc.route(model, verbose=False), lr=0.1, config=config, backend="aot_eager")
    step = mc.compile_step(optimizer, backend="aot_eager", ns=ns, config=mc.CompileConfig(clip_grad_norm=1e-3, **bound))
    for number, small in enumerate(((), ("experts",), ("experts",), ("a", "experts"), ("a", "c"), ())):
        give(model, number)
        for name in small:
            tiny(model, name, 1e-12)
        if number in (1, 3, 4):  # the momentum of the steps before would be in the way
            for param in model.parameters():
                optimizer.state[param]["momentum_buffer" if param.dim() > 1 else "exp_avg"].zero_()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.step()
        said = [str(w.message) for w in told if SMALL in str(w.message)]
        if number == 1:
            assert len(said) == 1 and "'experts'" in said[0] and "raise clip_grad_norm (0.001)" in said[0]
        elif number == 3:  # a new bucket; of the one that was told of nothing more
            assert len(said) == 1 and "'a', 'b'" in said[0] and "'experts'" not in said[0]
        elif number == 4:
            assert len(said) == 1 and "'c'" in said[0] and "'a'" not in said[0]
        else:
            assert not said, number
    assert step.stats.compiles == 1


def test_what_is_zero_or_missing_or_without_a_floor_is_no_small_momentum() -> None:
    for eps, told in ((1e-7, 1), ("relative", 0), (0.0, 0)):
        model = Model()
        config = mc.MuonConfig(ns_dtype="float32", ns_steps=2, eps=eps)  # type: ignore[arg-type]
        optimizer = mc.Muon(mc.route(model, verbose=False), lr=0.1, config=config, backend="aot_eager")
        step = mc.compile_step(optimizer, backend="aot_eager", config=mc.CompileConfig(clip_grad_norm=1.0))
        assert bool(step.plan.watched_norms()) == bool(told)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            give(model, 0, missing=("b",))
            tiny(model, "a", 0.0)
            optimizer.step()
        give(model, 1, 1e-12)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for param in model.parameters():
                optimizer.state[param]["momentum_buffer" if param.dim() > 1 else "exp_avg"].zero_()
            optimizer.step()
        assert sum(SMALL in str(w.message) for w in found) == told


def test_a_small_momentum_without_a_gradient_takes_no_step_and_is_not_told_of() -> None:
    model, optimizer, _, _, _ = pair(clip_grad_norm=1.0)
    for name in ("b", "experts"):
        optimizer.state[dict(model.named_parameters())[name]]["momentum_buffer"].fill_(1e-12)
    give(model, 0, missing=("b", "experts"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_small_momenta_are_told_of_where_the_model_is_in_the_graph_and_survive_a_new_plan() -> None:
    model = nn.Linear(6, 4)
    config = mc.CompileConfig(clip_grad_norm=1e-9)
    optimizer = optimizer_of(model)
    step = mc.compile_train_step(model, nn.MSELoss(), optimizer, backend="aot_eager", config=config)
    with pytest.warns(UserWarning, match=SMALL):
        step(numbers((5, 6), 0), numbers((5, 4), 50))
    optimizer.add_param_group({"params": [("extra", nn.Parameter(numbers((4, 4), 9)))]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        give(model, 1)
        optimizer.step()


@pytest.mark.inductor
def test_small_momenta_on_inductor() -> None:
    model, optimizer, step, _, _ = pair("inductor", clip_grad_norm=1e-9)
    give(model, 0)
    with pytest.warns(UserWarning, match=SMALL):
        optimizer.step()
    assert step.stats.host_launches == 1


class _Slow:
    """Stands for an accelerator: what is on it arrives when it is told to."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def record(self) -> None:
        self.done = False


def test_a_device_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts on an accelerator are copied behind the step and read when they have come."""
    plan = mc.make_plan([mc.MatrixSpec(name="w", shape=(4, 6))], clip_grad_norm=1.0)
    watch = VanishingWatch(plan)
    watch.counts = torch.zeros(1, dtype=torch.int32, device="meta")
    event, copies = _Slow(), []
    monkeypatch.setattr(torch, "Event", lambda kind: event)
    host = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(torch, "zeros_like", lambda *a, **k: host)
    monkeypatch.setattr(Tensor, "copy_", lambda self, *a, **k: copies.append(k), raising=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.look()  # the first copy is sent
        host.fill_(1)
        watch.look()  # it has not come
    assert copies == [{"non_blocking": True}]
    event.done = True
    with pytest.warns(UserWarning, match=SMALL):
        watch.look()
    watch.look()
    assert len(copies) == 2, "nothing is left to tell"


def spoil(model: nn.Module, name: str, value: float) -> None:
    grad = dict(model.named_parameters())[name].grad
    assert grad is not None
    grad.view(-1)[1] = value


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy([list(model.state_dict().values()), [dict(optimizer.state[p]) for p in model.parameters()]])


def assert_same(now: Any, before: Any) -> None:
    torch.testing.assert_close(now, before, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["a", "c", "experts", "bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_skipped_step_changes_no_bit(where: str, value: float, clip: float | None) -> None:
    model, optimizer, step, other, reference = pair(nonfinite="skip", clip_grad_norm=clip)
    for number in range(3):
        give(model, number)
        if number == 1:
            spoil(model, where, value)
            before = held(model, optimizer)
            optimizer.step()
            assert_same(held(model, optimizer), before)
            continue
        give(other, number)
        if clip is not None:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        optimizer.step()
        reference.step()
    assert step.skipped == 1
    assert_alike(model, other)
    assert step.stats.compiles == 1, "neither a value nor a skip compiles anew"


def test_missing_gradients_and_a_skip() -> None:
    model, optimizer, step, _, _ = pair(nonfinite="skip")
    give(model, 0, missing=("b", "norm"))
    spoil(model, "a", math.inf)
    before = held(model, optimizer)
    optimizer.step()
    assert_same(held(model, optimizer), before)
    assert step.skipped == 1


@pytest.mark.parametrize("check", ["sync", "async"])
def test_raising_names_the_parameter_and_changes_nothing(check: Any) -> None:
    model, optimizer, step, _, _ = pair(nonfinite="raise", check=check)
    give(model, 0)
    optimizer.step()
    before = held(model, optimizer)
    give(model, 1)
    spoil(model, "c", math.nan)
    if check == "async":
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"A gradient is not finite.*\['c'\].*changed nothing"):
        optimizer.step()
    assert_same(held(model, optimizer), before)
    give(model, 2)
    optimizer.step()
    assert step.skipped == 1
    with pytest.raises(AssertionError):
        assert_same(held(model, optimizer), before)


def test_without_a_guard_it_is_let_through_and_costs_nothing() -> None:
    model, optimizer, step, _, _ = pair()
    give(model, 0)
    spoil(model, "bias", math.nan)
    optimizer.step()
    assert bool(model.bias.isnan().any())
    assert step.skipped == 0
    assert "muon_compile.list_squares" not in str(step._binding.graphs["all"][0].graph.graph)  # type: ignore[union-attr]


def test_counts_survive_a_new_plan() -> None:
    model, optimizer, step, _, _ = pair(nonfinite="skip")
    give(model, 0)
    spoil(model, "a", math.nan)
    optimizer.step()
    extra = nn.Parameter(numbers((4, 4), 9))
    optimizer.add_param_group({"params": [("extra", extra)]})
    give(model, 1)
    optimizer.step()
    assert step.skipped == 1


def test_in_one_graph_with_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    other = copy.deepcopy(model)
    config = mc.CompileConfig(clip_grad_norm=0.1, nonfinite="skip")
    step = mc.compile_train_step(model, nn.MSELoss(), optimizer_of(model), backend="aot_eager", config=config)
    reference = optimizer_of(other)
    for number in range(3):
        x, y = numbers((5, 6), number), numbers((5, 4), 50 + number)
        if number == 1:
            x = x * math.inf
        step(x, y)
        if number != 1:
            other.zero_grad()
            nn.functional.mse_loss(other(x), y).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            reference.step()
    assert step.step.skipped == 1
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_dump_names_what_the_step_tells(tmp_path: Path) -> None:
    model, optimizer, step, _, _ = pair(nonfinite="skip", clip_grad_norm=1.0, probes=True)
    give(model, 0)
    optimizer.step()
    step.dump(tmp_path)
    text = "".join(path.read_text() for path in tmp_path.rglob("*.py"))
    assert "# skipped, on cpu" in text and "# probes_0, on cpu" in text
    assert "agree" in (tmp_path / "all_gradients" / "op_counts.json").read_text()


def test_probes_in_one_graph_with_the_model() -> None:
    model = nn.Linear(6, 4)
    config = mc.CompileConfig(probes=True, nonfinite="skip")
    step = mc.compile_train_step(model, nn.MSELoss(), optimizer_of(model), backend="aot_eager", config=config)
    step(numbers((5, 6), 0), numbers((5, 4), 1))
    (bucket,) = [b for b in step.step.probes().buckets if b.algorithm == "muon"]
    assert bucket.orthogonality_error is not None and bucket.update_rms is not None and bucket.update_rms > 0


@pytest.mark.parametrize("kind", ["all", "masked"])
@pytest.mark.parametrize("mesh", ["one", "hsdp"])
def test_an_npu_has_every_operator_of_it(mesh: str, kind: str) -> None:
    guard = {"clip_grad_norm": 1.0, "skip_nonfinite": True}
    plan = make(mesh, dtype="bfloat16", adamw=mc.AdamWConfig(), **guard)
    groups = {axis: axis for axis in ("replica", "shard")} if mesh == "hsdp" else {}
    _, traced = trace_plan(plan, backend="torchair", rank=0, groups=groups, kind="masked" if groups else kind)
    assert audit(functional_graph(cut_inputs(traced)[0])) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"clip_grad_norm": 0.0}, "clip_grad_norm"),
        ({"clip_grad_norm": math.inf}, "clip_grad_norm"),
        ({"nonfinite": "ignore"}, "nonfinite"),
    ],
)
def test_what_makes_no_sense_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mc.CompileConfig(**config)


def test_exact_neither_clips_nor_skips() -> None:
    config = mc.CompileConfig(exact=True, nonfinite="skip")
    with pytest.raises(ValueError, match="exact=True reproduces"):
        mc.compile_step(torch.optim.Muon([nn.Parameter(torch.ones(4, 4))]), backend="aot_eager", config=config)
