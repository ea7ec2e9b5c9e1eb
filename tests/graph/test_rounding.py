"""Updates that are smaller than half a bfloat16 step: float32 masters, and rounding at random."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import muon_compile as mc
from muon_compile.build.mixing import PRIME
from muon_compile.build.rounding import _dice, _round_at_random
from muon_compile.plan.localize import localize
from muon_compile.spec import MeshSpec, ShardLayout

KEPT: dict[str, dict[str, Any]] = {"masters": {"master_weights": True}, "at random": {"rounding": "stochastic"}}
both = pytest.mark.parametrize("kept", KEPT.values(), ids=list(KEPT))
SHAPES = {"a": (16, 24), "b": (16, 24), "tall": (24, 16), "experts": (3, 8, 12), "bias": (40,), "norm": (40,)}
FLOAT32 = mc.MuonConfig(ns_dtype="float32", momentum_dtype="float32", ns_steps=2)


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """Parameters and nothing else; float32 ones have the same values."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, Parameter(numbers(shape, seed).to(torch.bfloat16).to(dtype)))


def optimizer_of(model: nn.Module, lr: float = 1e-3, weight_decay: float = 0.1) -> mc.Muon:
    return mc.Muon(
        mc.route(model, verbose=False),
        lr=lr,
        weight_decay=weight_decay,
        adamw_lr=lr,
        adamw_weight_decay=weight_decay,
        config=FLOAT32,
        backend="aot_eager",
    )


def made(
    kept: dict[str, Any], *, dtype: torch.dtype = torch.bfloat16, backend: str = "aot_eager", **more: Any
) -> tuple[Model, mc.Muon, mc.CompiledStep]:
    model = Model(dtype)
    optimizer = optimizer_of(model)
    step = mc.compile_step(optimizer, backend=backend, ns="standard", config=mc.CompileConfig(**(kept | more)))
    return model, optimizer, step


def give(model: nn.Module, seed: int, missing: Collection[str] = (), scale: float = 1.0) -> None:
    """Gradients that bfloat16 holds, in the parameters' dtype."""
    for number, (name, param) in enumerate(model.named_parameters()):
        grad = (numbers(tuple(param.shape), 100 * (seed + 1) + number) * scale).to(torch.bfloat16)
        param.grad = None if name in missing else grad.to(param.dtype)


def train(model: nn.Module, optimizer: mc.Muon, seeds: Collection[int], missing: Collection[str] = ()) -> None:
    for seed in seeds:
        give(model, seed, missing if seed % 2 else ())
        optimizer.step()


def bits(model: nn.Module, optimizer: mc.Muon) -> list[Tensor]:
    tensors = [p.detach() for p in model.parameters()]
    tensors += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return [t.clone() for t in tensors]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def shrunk(model: nn.Module, start: nn.Module) -> float:
    """By what share the parameters' projection on where they began has become smaller."""
    now = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    was = torch.cat([p.detach().double().reshape(-1) for p in start.parameters()])
    return 1 - float(now @ was / (was @ was))


# -- what they are for -------------------------------------------------------------------------------------------------


def test_a_small_decay_is_lost_without_either() -> None:
    expected = 1 - (1 - 1e-4) ** 100
    found = {}
    for name, kept in ({"nearest": {}} | KEPT).items():
        model, optimizer, _ = made(kept)
        for _ in range(100):
            give(model, 0, scale=0.0)
            optimizer.step()
        found[name] = shrunk(model, Model())
    assert found["nearest"] == 0.0
    # Parameters are rounded to 2^-9 at most, and 1,700 of them together to much less.
    assert found["masters"] == pytest.approx(expected, rel=0.05)
    # The sum of 1,700 x 100 roundings, each off by about 1e-3 of the value: five standard deviations.
    assert found["at random"] == pytest.approx(expected, rel=0.15)


def test_masters_are_the_float32_run() -> None:
    """With the same gradients the masters are what float32 parameters would be, one fused rounding apart."""
    model, optimizer, step = made(KEPT["masters"])
    twin, other, _ = made({}, dtype=torch.float32)
    train(model, optimizer, range(6), missing=("b", "bias"))
    train(twin, other, range(6), missing=("b", "bias"))
    for (name, param), wanted, start in zip(
        model.named_parameters(), twin.parameters(), Model(torch.float32).parameters(), strict=True
    ):
        master = optimizer.state[param]["master_weight"]
        assert master.dtype == torch.float32
        change = (wanted - start).detach().norm()
        assert float((master - wanted).detach().norm()) <= 1e-5 * float(change), name
        assert torch.equal(param.detach(), master.to(torch.bfloat16)), "a parameter is its master, rounded"
    assert step.stats.recompiles == 0


def test_float16_has_masters_too() -> None:
    model, optimizer, _ = made(KEPT["masters"], dtype=torch.float16)
    for _ in range(100):
        give(model, 0, scale=0.0)
        optimizer.step()
    assert shrunk(model, Model()) == pytest.approx(1 - (1 - 1e-4) ** 100, rel=0.05)


@both
def test_wide_parameters_are_as_without(kept: dict[str, Any]) -> None:
    model, optimizer, step = made(kept, dtype=torch.float32)
    twin, other, plain = made({}, dtype=torch.float32)
    train(model, optimizer, range(3))
    train(twin, other, range(3))
    assert same(bits(model, optimizer), bits(twin, other))
    assert step.plan.buckets == plain.plan.buckets


# -- one result, however it is made ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "more", [{"max_temp_bytes": 3000}, {"max_temp_bytes": 900}, {"probes": True}, {"nonfinite": "skip"}], ids=str
)
def test_cutting_and_looking_change_no_bit(kept: dict[str, Any], more: dict[str, Any]) -> None:
    model, optimizer, step = made(kept, **more)
    twin, other, _ = made(kept)
    assert (len(step.plan.waves) > 1) == ("max_temp_bytes" in more)
    train(model, optimizer, range(4), missing=("b", "experts", "bias"))
    train(twin, other, range(4), missing=("b", "experts", "bias"))
    assert same(bits(model, optimizer), bits(twin, other))


@pytest.mark.inductor
@both
def test_inductor_writes_the_same_parameters(kept: dict[str, Any]) -> None:
    """A decay alone, which no product can round otherwise."""
    model, optimizer, _ = made(kept, backend="inductor")
    twin, other, _ = made(kept)
    for seed in range(12):
        for m, o in ((model, optimizer), (twin, other)):
            for group in o.param_groups:
                group["weight_decay"] = 1.0
            give(m, seed, scale=0.0)
            o.step()
    assert same([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])
    assert shrunk(model, Model()) == pytest.approx(1 - 0.999**12, rel=0.2)


@both
def test_the_pure_step_is_the_same(kept: dict[str, Any]) -> None:
    model, optimizer, step = made(kept)
    update = mc.build_step(step.plan)
    params: Any = [p.detach().clone() for p in model.parameters()]
    order = [name for name, _ in model.named_parameters()]
    params = dict(zip(order, params, strict=True))
    params = [params[spec.name] for spec in step.plan.specs]
    state = mc.init_state(step.plan)
    rows = [{"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "beta1": 0.9, "beta2": 0.999}] * step.plan.num_groups
    for group in optimizer.param_groups:
        if group["algorithm"] == "muon":
            rows = [row | {"momentum": group["momentum"]} for row in rows]
        else:
            rows = [row | dict(zip(("beta1", "beta2"), group["betas"], strict=True)) for row in rows]
    for seed in range(4):
        give(model, seed, missing=("b", "bias") if seed % 2 else ())
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        params, state = update(params, state, [grads.get(spec.name) for spec in step.plan.specs], rows)
        optimizer.step()
    live = dict(model.named_parameters())
    for spec, param in zip(step.plan.specs, params, strict=True):
        assert torch.equal(param, live[spec.name]), spec.name


@both
def test_with_the_model_in_the_graph(kept: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4).to(torch.bfloat16)
    step = mc.compile_train_step(
        model, nn.MSELoss(), optimizer_of(model), backend="aot_eager", config=mc.CompileConfig(**kept)
    )
    before = [p.detach().clone() for p in model.parameters()]
    for seed in range(3):
        step(numbers((5, 6), seed).bfloat16(), numbers((5, 4), 50 + seed).bfloat16())
    assert not any(map(torch.equal, before, model.parameters()))
    name = "master_weight" if "master_weights" in kept else "rounding_step"
    for param in model.parameters():
        value = step.step.optimizers[0].state[param][name]
        assert float(value) == 3 if name == "rounding_step" else torch.equal(value.bfloat16(), param)


# -- what stays --------------------------------------------------------------------------------------------------------


@both
def test_without_gradient_or_learning_rate_no_bit_changes(kept: dict[str, Any]) -> None:
    model, optimizer, _ = made(kept)
    train(model, optimizer, range(2))
    with torch.no_grad():
        model.a[0, 0] = -0.0
    give(model, 1, missing=("a",))
    optimizer.step()  # its master follows
    before = dict(zip(SHAPES, bits(model, optimizer), strict=False))
    held = copy.deepcopy({name: dict(optimizer.state[p]) for name, p in model.named_parameters()})
    give(model, 2, missing=("a", "experts", "bias"))
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == (name in ("a", "experts", "bias"))
        if name in ("a", "experts", "bias"):
            assert all(torch.equal(optimizer.state[param][k], v) for k, v in held[name].items())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = dict(zip(SHAPES, bits(model, optimizer), strict=False))
    for seed in (3, 4):
        give(model, seed, missing=("b",))
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert bool(model.a[0, 0].signbit())


def test_a_master_follows_whoever_writes_its_parameter() -> None:
    model, optimizer, _ = made(KEPT["masters"])
    train(model, optimizer, range(3))
    masters = {name: optimizer.state[p]["master_weight"].clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.a.mul_(0.5)  # an average of weights is swapped in, a file is loaded
        model.bias[3] = 7.0
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    give(model, 3)
    optimizer.step()
    now = {name: optimizer.state[p]["master_weight"] for name, p in model.named_parameters()}
    assert torch.equal(now["a"], model.a.detach().float()), "what was written counts"
    assert float(now["bias"][3]) == 7.0
    rest = torch.arange(40) != 3
    assert torch.equal(now["bias"][rest], masters["bias"][rest]), "and what was not is as exact as before"
    assert torch.equal(now["b"], masters["b"])


@both
def test_it_resumes_to_the_bit(kept: dict[str, Any]) -> None:
    model, optimizer, _ = made(kept)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(3, 6))
    again, other, step = made(kept)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(again, other, range(3, 6))
    assert same(bits(again, other), bits(model, optimizer))
    assert step.stats.recompiles == 0


@both
def test_state_of_a_run_without_them_begins_from_the_parameters(kept: dict[str, Any]) -> None:
    first, before, _ = made({})
    train(first, before, range(2))
    model, optimizer, _ = made(kept)
    train(model, optimizer, range(7, 9))  # masters of other parameters
    model.load_state_dict(first.state_dict())
    optimizer.load_state_dict(before.state_dict())
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert all(float(state[k].abs().sum()) == 0 for k in ("master_weight", "rounding_step") if k in state), name
    twin, other, _ = made({})
    twin.load_state_dict(first.state_dict())
    other.load_state_dict(before.state_dict())
    train(model, optimizer, [2])
    train(twin, other, [2])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        # One step from the same parameters: bfloat16 numbers next to each other at most.
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


def test_masters_that_a_plain_optimizer_has_rounded_are_refused() -> None:
    """Its `load_state_dict` casts state to the parameter's dtype, and a rounded master looks like a sound one."""
    for optimizer_class, kept in ((torch.optim.AdamW, KEPT["masters"]), (torch.optim.Muon, KEPT["at random"])):
        params = [Parameter(numbers((4, 6), 0).bfloat16())]
        first = optimizer_class(params, lr=1e-3)
        mc.compile_step(first, backend="aot_eager", config=mc.CompileConfig(**kept))
        params[0].grad = numbers((4, 6), 1).bfloat16()
        first.step()
        second = optimizer_class([Parameter(params[0].detach().clone())], lr=1e-3)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        with pytest.raises(
            ValueError, match=r"expected float32, got torch.bfloat16.*compile_step first and load after"
        ):
            mc.compile_step(second, backend="aot_eager", config=mc.CompileConfig(**kept))


@both
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
def test_stock_goes_on_after_uninstalling(kept: dict[str, Any], kind: type[torch.optim.Optimizer]) -> None:
    param = Parameter(numbers((4, 6), 0).bfloat16())
    optimizer = kind([param], lr=0.1)
    step = mc.compile_step(optimizer, backend="aot_eager", config=mc.CompileConfig(**kept))
    for seed in range(2):
        param.grad = numbers((4, 6), 1 + seed).bfloat16()
        optimizer.step()
    step.uninstall()
    before = param.detach().clone()
    param.grad = numbers((4, 6), 9).bfloat16()
    optimizer.step()
    assert not torch.equal(param, before)


def test_a_missing_gradient_elsewhere_changes_no_throw() -> None:
    """Also where warm-up begins with a learning rate of 0, which moves nothing."""
    ends = []
    for missing in ((), ("b", "bias")):
        model, optimizer, _ = made(KEPT["at random"])
        for seed, lr in enumerate((0.0, 1e-3, 2e-3)):
            for group in optimizer.param_groups:
                group["lr"] = lr
            give(model, seed, missing)
            optimizer.step()
        ends.append(bits(model, optimizer)[0])
    assert torch.equal(*ends)


# -- chance ------------------------------------------------------------------------------------------------------------


def plan_of(count: int, shape: tuple[int, ...], layout: ShardLayout | None = None, **more: Any) -> mc.Plan:
    kind: Any = "muon" if len(shape) > 1 else "adamw"
    like = {"shape": shape, "dtype": "bfloat16", "layout": layout, "algorithm": kind}
    specs = [mc.MatrixSpec(name=f"w{i}", **like) for i in range(count)]
    return mc.make_plan(specs, rounding="stochastic", **more)


def throws(times: int, plan: mc.Plan) -> Tensor:
    part = plan.stretch(0)
    return torch.stack([_dice(part, torch.full((part.bucket.size,), float(n))) for n in range(times)])


def test_dice_are_fair_and_independent() -> None:
    dice = throws(200, plan_of(4, (32, 48)))
    assert int(dice.min()) >= 0 and int(dice.max()) < PRIME
    x = (dice.double() + 0.5) / PRIME - 0.5
    assert abs(float(x.mean())) < 5 / math.sqrt(12 * x.numel())
    variance = float(x.var())
    assert variance == pytest.approx(1 / 12, rel=0.01)
    # Neighbours in time, of other parameters, in rows and in columns: correlations within five standard deviations.
    for a, b in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[:, :, 1:], x[:, :, :-1]), (x[..., 1:], x[..., :-1])):
        assert abs(float((a * b).mean()) / variance) < 5 / math.sqrt(a.numel())
    # What an element has drawn on average, and what a row has: as spread as independent draws are.
    assert float(x.mean(dim=0).std()) == pytest.approx(1 / math.sqrt(12 * 200), rel=0.05)
    assert float(x.mean(dim=3).std()) == pytest.approx(1 / math.sqrt(12 * 48), rel=0.05)
    counts = torch.histc(x.float(), 64)
    chi = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert 20 < chi < 130  # of 63 degrees of freedom


@pytest.mark.parametrize("shape", [(40,), (9, 7), (5, 6, 4), (3, 2, 4, 5)])
def test_a_shard_throws_what_the_whole_does(shape: tuple[int, ...]) -> None:
    mesh = MeshSpec(axes=(("shard", 3),))
    whole = throws(3, plan_of(2, shape))
    for dim in range(len(shape) if len(shape) < 4 else 1):
        length = shape[dim]
        each = -(-length // 3)
        sizes = tuple(max(0, min(each, length - each * rank)) for rank in range(3))
        layout = ShardLayout(mesh=mesh, axis="shard", dim=dim, sizes=sizes)
        plan = plan_of(2, shape, layout, mesh=mesh)
        found = [throws(3, localize(plan, lambda _, at=rank: at)) for rank in range(3)]
        assert torch.equal(torch.cat(found, dim=2 + dim), whole), dim


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1 - 2**-16])
@pytest.mark.parametrize("value", [1.0, -3.0, 2.0**-130, 1e30])
def test_it_rounds_up_as_often_as_what_is_cut_off(value: float, share: float) -> None:
    low = torch.tensor(value, dtype=torch.bfloat16)
    bits_of = low.view(torch.int16).to(torch.int32)
    high = (bits_of + 1).to(torch.int16).view(torch.bfloat16)
    cut = round(share * 2**16)
    x = (low.float().view(torch.int32) + cut).view(torch.float32).expand(PRIME).contiguous()
    found = _round_at_random(x, torch.arange(PRIME, dtype=torch.int32))
    assert set(found.tolist()) <= {float(low), float(high)}
    assert torch.equal(found, found.to(torch.bfloat16).float()), "bfloat16 holds it"
    ups = float((found == high.float()).double().mean())
    assert ups == pytest.approx(cut / 2**16, abs=1 / PRIME)
    if share == 0.0:
        assert ups == 0.0


def test_no_two_parameters_throw_alike() -> None:
    shapes = [(8, 8 + n) for n in range(8) for _ in range(64)]
    specs = [mc.MatrixSpec(name=f"w{i}", shape=shape, dtype="bfloat16") for i, shape in enumerate(shapes)]
    plan = mc.make_plan(specs, rounding="stochastic", max_temp_bytes=2**30)
    found: dict[bytes, int] = {}
    for index in range(len(plan.parts)):
        part = plan.stretch(index)
        for dice in _dice(part, torch.ones(part.bucket.size))[:, :2, :8].contiguous():
            corner = dice.numpy().tobytes()
            found[corner] = found.get(corner, 0) + 1
    assert len(found) == len(shapes) and len(plan.buckets) == 8


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 3.3e38])
    for face in (0, PRIME // 2, PRIME - 1):
        found = _round_at_random(x, torch.full((4,), face, dtype=torch.int32))
        assert float(found[0]) == math.inf and float(found[1]) == -math.inf and math.isnan(found[2])
    full = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # one more is a zero
    assert bool(_round_at_random(full, torch.zeros(2, dtype=torch.int32)).isnan().all())


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused_in_words() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"either master_weights=True or rounding='stochastic', got both"):
        mc.compile_step(optimizer_of(model), config=mc.CompileConfig(master_weights=True, rounding="stochastic"))
    half = Model(torch.float16)
    with pytest.raises(ValueError, match=r"'a'.*expected bfloat16.*got float16; take master_weights=True"):
        mc.compile_step(optimizer_of(half), config=mc.CompileConfig(rounding="stochastic"))
    stock = torch.optim.Muon([Parameter(torch.randn(4, 6).bfloat16())])
    for kept in KEPT.values():
        with pytest.raises(ValueError, match=r"exact=True.*rounds every update to the nearest"):
            mc.compile_step(stock, config=mc.CompileConfig(exact=True, **kept))
    with pytest.raises(ValueError, match="rounding"):
        mc.CompileConfig(rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="master_weights"):
        mc.CompileConfig(master_weights=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected 'nearest' or 'stochastic', got 'up'"):
        mc.make_plan([mc.MatrixSpec(name="w", shape=(2, 2))], rounding="up")  # type: ignore[arg-type]
