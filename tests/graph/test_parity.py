"""The compiled step against stock optimizers and against float64.

Directions are compared, not parameters: parameters are set to zero before a step of lr 1 without decay, so that what
they hold afterwards is the update itself, rounded once. A small lr would hide any error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer

import muon_compile as mc
from muon_compile.config import Preset
from tests.graph.twins import EXACT, give, parameters
from tests.reference import RULES, muon_step, relative_error

# Wide, tall and square; alone and in buckets of two and three. In smaller ones single roundings of bfloat16 do not
# average out, and one matrix errs by 0.1, in stock and here, each in its own way.
SHAPES = ((64, 64), (24, 100), (24, 100), (100, 24), (100, 24), (100, 24), (48, 33))
# Under 400 multiplications ATen has another kernel for a stack than for single matrices, with other roundings.
TINY_SHAPES = ((2, 16), (2, 16), (2, 16), (6, 8), (6, 8), (6, 8), (8, 6), (1, 1), (1, 7), (5, 1))

# float32 against float64 on Gaussian gradients: five steps enlarge roundings of 6e-8 about a hundredfold.
FLOAT32_NS = 1e-5
# AdamW is a dozen roundings; torch.optim.AdamW makes as many.
FLOAT32_ADAMW = 1e-6


def zero(*lists: Sequence[Parameter]) -> None:
    with torch.no_grad():
        torch._foreach_zero_([p for params in lists for p in params])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All of a step's updates as one vector."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def momentum(optimizer: Optimizer, param: Parameter) -> Tensor:
    buffer: Tensor = optimizer.state[param]["momentum_buffer"]
    return buffer


# -- (a) 20 steps against stock -----------------------------------------------------------------------------------


def check_against_stock(stock: Optimizer, ours: Optimizer, scale: str, *, standard: bool = True) -> None:
    """One step of each from one state: errors against float64, and in the standard form the difference of the two."""
    theirs, mine = stock.param_groups[0]["params"], ours.param_groups[0]["params"]
    before = []
    for p, q in zip(theirs, mine, strict=True):
        if p in stock.state:
            momentum(ours, q).copy_(momentum(stock, p))
        before.append(momentum(ours, q).double())
    zero(theirs, mine)
    stock.step()
    ours.step()
    hyper = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.95}
    rules = dataclasses.replace(RULES["torch"], scale=RULES["torch" if scale == "original" else "moonlight"].scale)
    expected = []
    for p, q, m in zip(theirs, mine, before, strict=True):
        assert p.grad is not None
        update, m = muon_step(torch.zeros_like(p), p.grad, m, rules, hyper)
        expected.append(update)
        # A lerp of float32 numbers of one size.
        assert relative_error(momentum(ours, q), m) <= 5e-7
        # Of the same bfloat16 products. An input that was rounded the other way makes 1e-2 of it. Another form rounds
        # elsewhere, so that all of stock's own error is between them.
        assert relative_error(q, p) <= 2e-2 or not standard
    # Either errs by 1e-2 to 2e-2. Of the whole step: one matrix's error is a matter of luck, theirs and ours.
    assert relative_error(joined(mine), joined(expected)) <= 1.1 * relative_error(joined(theirs), joined(expected))


@pytest.mark.parametrize("ns", ["standard", "auto"])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_20_bfloat16_steps_are_as_good_as_stock(scale: str, ns: str) -> None:
    theirs, mine = parameters(*SHAPES), parameters(*SHAPES)
    stock, ours = (Muon(params, lr=1.0, weight_decay=0.0, adjust_lr_fn=scale) for params in (theirs, mine))
    step = mc.compile_step(ours, backend="aot_eager", ns=ns)
    for number in range(20):
        give(theirs, mine, seed=number)
        check_against_stock(stock, ours, scale, standard=ns == "standard")
    assert step.stats.steps == 20
    assert step.stats.host_launches == 1


def test_20_float32_steps_against_float64() -> None:
    params = parameters(*SHAPES)
    optimizer = mc.Muon(params, lr=1.0, weight_decay=0.0, config=mc.MuonConfig(ns_dtype="float32"), backend="aot_eager")
    hyper = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.95}
    # The reference keeps a momentum of its own through all 20 steps.
    momenta = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for number in range(20):
        give(params, seed=number)
        zero(params)
        optimizer.step()
        for index, p in enumerate(params):
            assert p.grad is not None
            expected, momenta[index] = muon_step(torch.zeros_like(p), p.grad, momenta[index], RULES["torch"], hyper)
            assert relative_error(p, expected) <= FLOAT32_NS


ADAMW_SHAPES = ((), (7,), (7,), (5, 6), (5, 6), (5, 6), (2, 3, 4), (1,))


@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 1e-3}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"fused": True}],
    ids=lambda options: next(iter(options), "default"),
)
def test_20_adamw_steps_against_stock(options: dict[str, Any]) -> None:
    theirs, mine = parameters(*ADAMW_SHAPES), parameters(*ADAMW_SHAPES)
    stock, ours = (AdamW(params, lr=1.0, weight_decay=0.0, **options) for params in (theirs, mine))
    mc.compile_step(ours, backend="aot_eager")
    for number in range(20):
        give(theirs, mine, seed=number, scale=10.0 ** (number % 3))
        for optimizer in (stock, ours):
            group = optimizer.param_groups[0]
            group["lr"] = 1.0 / (1 + number % 4)
            group["betas"] = (0.9 - 0.05 * (number % 3), 0.999 - 0.01 * (number % 2))
        zero(theirs, mine)
        stock.step()
        ours.step()
        # Of the whole step: a single number may be the small rest of large moments, and all rounding noise.
        assert relative_error(joined(mine), joined(theirs)) <= FLOAT32_ADAMW
        for name in ("exp_avg", "exp_avg_sq"):
            got, expected = ([o.state[p][name] for p in params] for o, params in ((ours, mine), (stock, theirs)))
            assert relative_error(joined(got), joined(expected)) <= FLOAT32_ADAMW
        assert {float(ours.state[q]["step"]) for q in mine} == {number + 1}


# -- (b) exact: stock's own bits ------------------------------------------------------------------------------------


def check_exact(theirs: list[Parameter], mine: list[Parameter], optimizers: Sequence[Optimizer], steps: int) -> None:
    """Step both from equal parameters, every number changed at every step; parameters and momenta keep equal bits."""
    stock, ours = optimizers
    for number in range(steps):
        # From large to under eps, where stock's clamp decides.
        give(theirs, mine, seed=number, scale=(1.0, 1e-3, 1e-8)[number % 3])
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                lr = 0.3 / (1 + number + index)
                group["lr"] = torch.tensor(lr, dtype=torch.float64) if number % 2 else lr
                group["momentum"] = 0.95 - 0.07 * ((number + index) % 3)
                group["weight_decay"] = 0.1 * (number + 2 * index)
            optimizer.step()
        for p, q in zip(theirs, mine, strict=True):
            assert torch.equal(momentum(stock, p), momentum(ours, q)), (number, p.shape)
            assert torch.equal(p, q), (number, p.shape)


OPTIONS: list[dict[str, Any]] = [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"ns_steps": 3}]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# Not this pair: stock then normalizes its momentum in place, since .bfloat16() of it is no copy.
CASES = [(d, o) for d in DTYPES for o in OPTIONS if d != torch.bfloat16 or o.get("nesterov", True)]


@pytest.mark.parametrize(("dtype", "options"), CASES, ids=str)
def test_exact_has_the_bits_of_stock(dtype: torch.dtype, options: dict[str, Any]) -> None:
    theirs, mine = (parameters(*SHAPES, *TINY_SHAPES, dtype=dtype) for _ in range(2))
    stock, ours = Muon(theirs, **options), Muon(mine, **options)
    mc.compile_step(ours, backend="aot_eager", config=EXACT)
    check_exact(theirs, mine, (stock, ours), steps=6)


def test_exact_with_several_groups_in_one_bucket() -> None:
    # Odd and even parameters have hyperparameters of their own, so a bucket holds both.
    shapes = [(24, 100)] * 5 + [(100, 24)] * 2 + [(64, 64)]
    theirs, mine = parameters(*shapes), parameters(*shapes)
    stock, ours = (Muon([{"params": p[::2]}, {"params": p[1::2]}]) for p in (theirs, mine))
    step = mc.compile_step(ours, backend="aot_eager", config=EXACT)
    assert [bucket.size for bucket in step.plan.buckets] == [5, 2, 1]
    check_exact(theirs, mine, (stock, ours), steps=6)


@pytest.mark.inductor
def test_exact_has_the_bits_of_stock_on_inductor() -> None:
    # A bucket of two, a bucket of one and a bfloat16 bucket of two, whose matrices run in one batch with the first.
    theirs, mine = (
        [*parameters((24, 40), (24, 40), (40, 24)), *parameters((24, 40), (24, 40), dtype=torch.bfloat16)]
        for _ in range(2)
    )
    stock, ours = Muon(theirs), Muon(mine)
    step = mc.compile_step(ours, backend="inductor", config=EXACT)
    assert len(step.plan.buckets) == 3 and len(step.plan.batches) == 2
    check_exact(theirs, mine, (stock, ours), steps=6)
    assert step.stats.compiles == 1


# -- (c) presets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", RULES)
def test_5_steps_of_a_preset_against_float64(preset: Preset, ns_dtype: Any) -> None:
    # The second parameter's gradients have norms about eps, where adding it and clamping to it part ways.
    shapes, sizes = ((24, 100), (24, 100), (100, 24), (64, 64)), (1.0, 2e-9, 1.0, 1.0)
    params = parameters(*shapes)
    optimizer = mc.Muon(params, config=mc.MuonConfig(preset=preset, ns_dtype=ns_dtype), backend="aot_eager")
    momenta = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for number in range(5):
        give(params, seed=number)
        hyper = {"lr": 0.5 / (1 + number), "weight_decay": 0.2 * number, "momentum": 0.95 - 0.1 * number}
        optimizer.param_groups[0].update(hyper)
        before = [p.detach().clone() for p in params]
        for p, size in zip(params, sizes, strict=True):
            assert p.grad is not None
            p.grad *= size
        optimizer.step()
        for index, (p, old) in enumerate(zip(params, before, strict=True)):
            assert p.grad is not None
            new, momenta[index] = muon_step(old, p.grad, momenta[index], RULES[preset], hyper)
            assert relative_error(momentum(optimizer, p), momenta[index]) <= 1e-6
            # An lr of 0.1 and more: the rounding of the parameters is 1e-6 of the change at most. bfloat16: see above,
            # and You's coefficients err by half as much again as Jordan's.
            assert relative_error(p - old, new - old.double()) <= (FLOAT32_NS if ns_dtype == "float32" else 3e-2)


# -- Muon and AdamW in one Inductor graph -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def joint() -> tuple[Muon, AdamW, mc.CompiledStep]:
    """A compiled joint step; the second and the third matrix share a bucket, as do the two biases."""
    muon = Muon(parameters((48, 16), (24, 40), (24, 40)), lr=1.0, weight_decay=0.0)
    adamw = AdamW(parameters((9,), (9,), (3, 5)), lr=1.0, weight_decay=0.0)
    return muon, adamw, mc.compile_step(muon, adamw, backend="inductor")


@pytest.mark.inductor
def test_joint_inductor_steps_are_as_good_as_stock(joint: tuple[Muon, AdamW, mc.CompiledStep]) -> None:
    muon, adamw, step = joint
    shapes = [tuple(p.shape) for p in (*muon.param_groups[0]["params"], *adamw.param_groups[0]["params"])]
    theirs = parameters(*shapes)
    stock_muon, stock_adamw = Muon(theirs[:3], lr=1.0, weight_decay=0.0), AdamW(theirs[3:], lr=1.0, weight_decay=0.0)
    matrices, rest = muon.param_groups[0]["params"], adamw.param_groups[0]["params"]
    for number in range(4):
        give(theirs, [*matrices, *rest], seed=number)
        zero(theirs[3:], rest)
        check_against_stock(stock_muon, muon, "original")
        stock_adamw.step()
        adamw.step()
        assert relative_error(joined(rest), joined(theirs[3:])) <= FLOAT32_ADAMW
    assert step.stats.compiles == 1


def check_decay(muon: Sequence[Parameter], adamw: Sequence[Parameter]) -> None:
    """lr 0.1 and weight decay 2 bring ones to 0.8, whatever the shape's factor on lr (1.7 for 48 x 16)."""
    for p in (*muon, *adamw):
        torch.testing.assert_close(p.detach(), torch.full_like(p, 0.8), rtol=1e-6, atol=0.0)


def ready_to_decay(*optimizers: Optimizer) -> list[list[Parameter]]:
    """Ones, zero gradients, zero momenta, lr 0.1, weight decay 2."""
    lists = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.1, 2.0
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
                with torch.no_grad():
                    p.fill_(1.0)
                    for value in optimizer.state[p].values():
                        value.zero_()
            lists.append(group["params"])
    return lists


@pytest.mark.inductor
def test_case_a14_weight_decay_on_inductor(joint: tuple[Muon, AdamW, mc.CompiledStep]) -> None:
    muon, adamw, _ = joint
    lists = ready_to_decay(muon, adamw)
    muon.step()
    adamw.step()
    check_decay(*lists)


def test_case_a14_weight_decay_of_wrapped_optimizers() -> None:
    muon = Muon(parameters((48, 16), (24, 40), (24, 40)))
    adamw = AdamW(parameters((9,), (9,), (3, 5)))
    mc.compile_step(muon, adamw, backend="aot_eager")
    lists = ready_to_decay(muon, adamw)
    muon.step()
    adamw.step()
    check_decay(*lists)


@pytest.mark.parametrize("preset", RULES)
def test_case_a14_weight_decay_of_own_muon(preset: Preset) -> None:
    groups = [
        {"params": parameters((48, 16), (24, 40), (24, 40)), "algorithm": "muon"},
        {"params": parameters((9,), (9,), (3, 5)), "algorithm": "adamw"},
    ]
    optimizer = mc.Muon(groups, config=mc.MuonConfig(preset=preset), backend="aot_eager")
    lists = ready_to_decay(optimizer)
    optimizer.step()
    check_decay(*lists)


def test_case_a14_weight_decay_of_the_pure_step() -> None:
    ones = {str(shape): torch.ones(shape) for shape in ((48, 16), (24, 40), (9,))}
    plan = mc.make_plan(mc.inspect_params(ones))
    hyper = {"lr": 0.1, "weight_decay": 2.0, "momentum": 0.95, "beta1": 0.9, "beta2": 0.999}
    grads = {name: torch.zeros_like(p) for name, p in ones.items()}
    params, _ = mc.build_step(plan)(ones, mc.init_state(plan, ones), grads, hyper)
    check_decay([*map(Parameter, params.values())], [])
    assert all(torch.equal(p, torch.ones_like(p)) for p in ones.values())
