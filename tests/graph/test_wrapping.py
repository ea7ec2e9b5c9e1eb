"""The wrapped optimizer behaves as the stock one in everything that a training script does with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import muon_compile as mc
from tests.graph.twins import SHAPES, assert_equal, give, momenta, pair, parameters, run_both, values, wrap

# -- schedulers -----------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=6),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.3, total_steps=8),  # momentum moves too
}


def scheduled(make: Callable[[Optimizer], Any], order: str) -> tuple[list[Parameter], Any, mc.CompiledStep]:
    ours, optimizer, theirs, stock = pair()
    scheduler = make(optimizer) if order == "scheduler first" else None
    step = wrap(optimizer)
    scheduler, reference = scheduler or make(optimizer), make(stock)
    for seed in range(6):
        give(ours, theirs, seed=seed)
        for each, its in ((optimizer, scheduler), (stock, reference)):
            each.step()
            its.step()
        assert scheduler.last_epoch == reference.last_epoch == seed + 1
        assert scheduler.get_last_lr() == reference.get_last_lr()
        assert_equal(ours, theirs)
    return ours, scheduler, step


@pytest.mark.parametrize("order", ["scheduler first", "wrapped first"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_case_a06_schedulers_made_before_and_after(name: str, order: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, step = scheduled(SCHEDULERS[name], order)
    assert step.stats.compiles == 1


@pytest.mark.parametrize("install", [True, False])
def test_calling_the_step_itself_counts_for_a_scheduler(install: bool) -> None:
    ours, optimizer, _, _ = pair()
    step = wrap(optimizer, install=install)
    scheduler = SCHEDULERS["LambdaLR"](optimizer)
    give(ours, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        scheduler.step()


def test_scheduler_counts_the_missing_step_as_on_stock() -> None:
    _, optimizer, _, _ = pair()
    wrap(optimizer)
    scheduler = SCHEDULERS["LambdaLR"](optimizer)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()


# -- one training step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_loop_with_zero_grad(set_to_none: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(3)]))
    optimizers = [torch.optim.Muon(model.parameters(), lr=0.05) for model in models]
    wrap(optimizers[0])
    for seed in range(5):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            unused = seed == 3  # zeros, or no gradient at all
            layers = model[:2] if unused else model
            layers(batch).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert_equal(*[list(model.parameters()) for model in models])


def test_closure_runs_once_with_gradients_enabled_and_its_loss_comes_back() -> None:
    ours, optimizer, theirs, stock = pair()
    step = wrap(optimizer)
    calls = []

    def closure_of(params: list[Parameter]) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            loss = sum((p * p).sum() for p in params)
            for p in params:
                p.grad = None
            loss.backward()
            return loss

        return closure

    runs = [lambda c: optimizer.step(c), lambda c: optimizer.step(closure=c), step, lambda c: step(closure=c)]
    for run in runs:
        with torch.no_grad():
            assert torch.equal(run(closure_of(ours)), stock.step(closure_of(theirs)))
        assert_equal(ours, theirs)
    assert calls == [True] * (2 * len(runs))
    assert optimizer.step() is None


def test_failing_closure_changes_nothing() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(1))

    def closure() -> None:
        raise KeyError("the loss failed")

    with pytest.raises(KeyError, match="the loss failed"):
        optimizer.step(closure)
    run_both(ours, optimizer, theirs, stock, range(1, 3))


@pytest.fixture
def heard() -> Iterator[list[tuple[str, int]]]:
    """What global hooks hear: the event and the number of the optimizer's parameters."""
    log: list[tuple[str, int]] = []

    def say(event: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: log.append((event, len(optimizer.param_groups[0]["params"])))

    handles = [register_optimizer_step_pre_hook(say("pre")), register_optimizer_step_post_hook(say("post"))]
    yield log
    for handle in handles:
        handle.remove()


def test_hooks_fire_as_on_stock(heard: list[tuple[str, int]]) -> None:
    ours, optimizer, theirs, stock = pair()
    step = wrap(optimizer)
    runs: list[Callable[[], object]] = [stock.step, optimizer.step, step, lambda: optimizer.step(lambda: 1.0)]
    logs = []
    for run in runs:
        each = stock if run is runs[0] else optimizer

        def double(o: Optimizer, args: Any, kwargs: Any) -> None:
            heard.append(("own pre", len(args)))
            for p in o.param_groups[0]["params"]:
                p.grad.mul_(2.0)

        handles = [
            each.register_step_pre_hook(double),
            each.register_step_post_hook(lambda o, args, kwargs: heard.append(("own post", 0))),
        ]
        give(ours, theirs, seed=0)
        run()
        for handle in handles:
            handle.remove()
        if run is runs[1]:
            assert_equal(ours, theirs)  # what the pre-hook did to the gradients took effect
        logs.append([event for event, _ in heard])
        heard.clear()
    assert logs == [["pre", "own pre", "own post", "post"]] * 4


def test_hooks_of_joined_optimizers_fire_once_each(heard: list[tuple[str, int]]) -> None:
    params = parameters((8, 12), (8,), (8,))
    muon, adamw = torch.optim.Muon(params[:1]), torch.optim.AdamW(params[1:])
    step = wrap(muon, adamw)
    give(params, seed=0)
    muon.step()
    adamw.step()
    assert heard == [("pre", 1), ("post", 1), ("pre", 2), ("post", 2)]
    heard.clear()
    step()
    assert sorted(heard) == [("post", 1), ("post", 2), ("pre", 1), ("pre", 2)]


def test_autograd_notices_the_step() -> None:
    ours, optimizer, _, _ = pair()
    wrap(optimizer)
    for seed in range(2):
        loss = sum((p * p).sum() for p in ours)
        versions = [p._version for p in ours]
        give(ours, seed=seed)
        optimizer.step()
        assert all(p._version > before for p, before in zip(ours, versions, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# -- parameters and gradients that change ---------------------------------------------------------------------------


def test_added_group_gets_a_new_plan_and_momentum_is_kept() -> None:
    ours, optimizer, theirs, stock = pair()
    step = wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    plan = step.plan
    for params, each in ((ours, optimizer), (theirs, stock)):
        params += parameters((8, 12), (12, 12), seed=1)
        each.add_param_group({"params": params[-2:], "lr": 0.3, "momentum": 0.5})
    run_both(ours, optimizer, theirs, stock, range(2, 5))
    assert step.plan.digest != plan.digest
    assert len(step.plan.specs) == len(plan.specs) + 2
    assert (step.stats.compiles, step.stats.recompiles) == (2, 1)


def test_changed_config_gets_a_new_plan_and_momentum_is_kept() -> None:
    ours, optimizer, theirs, stock = pair()
    step = wrap(optimizer)
    for seeds, change in ((range(2), {}), (range(2, 4), {"nesterov": False}), (range(4, 6), {"ns_steps": 3})):
        for each in (optimizer, stock):
            each.param_groups[0].update(change)
        run_both(ours, optimizer, theirs, stock, seeds)
    assert step.stats.compiles == 3


def test_swapped_memory_is_followed_without_a_compile() -> None:
    ours, optimizer, theirs, stock = pair()
    step = wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    old = ours[0].data
    ours[0].data = theirs[0].data.clone()
    frozen = old.clone()
    run_both(ours, optimizer, theirs, stock, range(2, 4))
    assert torch.equal(old, frozen)
    assert step.stats.compiles == 1


def test_a_parameter_that_becomes_strided_is_refused() -> None:
    (param,) = parameters((12, 12))
    optimizer = torch.optim.Muon([param])
    wrap(optimizer)
    give([param], seed=0)
    optimizer.step()
    param.data = param.data.t()  # same address, shape and dtype
    before = values([param])
    with pytest.raises(ValueError, match="contiguous"):
        optimizer.step()
    assert_equal([param], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_stock_bit_for_bit(dtype: torch.dtype) -> None:
    ours, theirs = [parameters(*SHAPES, dtype=dtype) for _ in range(2)]
    optimizer, stock = torch.optim.Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(3))


def mixed_pair() -> tuple[list[Parameter], Optimizer, list[Parameter], Optimizer]:
    """As ``pair``, with bfloat16 parameters and float32 gradients."""
    ours, theirs = [parameters(*SHAPES, dtype=torch.bfloat16) for _ in range(2)]
    for param in ours + theirs:
        param.grad_dtype = torch.float32
    optimizers = [torch.optim.Muon(params, lr=0.1, weight_decay=0.0) for params in (ours, theirs)]
    return ours, optimizers[0], theirs, optimizers[1]


def test_bfloat16_parameters_with_float32_gradients() -> None:
    ours, optimizer, theirs, stock = mixed_pair()
    step = wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(3))
    assert {m.dtype for m in momenta(optimizer)} == {torch.float32}
    assert (step.stats.compiles, step.stats.recompiles) == (1, 0)


def test_momentum_keeps_its_dtype_when_a_new_plan_meets_a_missing_gradient() -> None:
    ours, optimizer, theirs, stock = mixed_pair()
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    ours[1].data = ours[1].data.clone()
    give(ours, theirs, seed=2, missing=(0,))
    optimizer.step()
    stock.step()
    assert_equal(momenta(optimizer), momenta(stock))


def test_gradient_dtype_may_change_later() -> None:
    ours = parameters(*SHAPES, dtype=torch.bfloat16)
    optimizer = torch.optim.Muon(ours, lr=0.1)
    step = wrap(optimizer)
    give(ours, seed=0)
    optimizer.step()
    for param in ours:
        param.grad = None
        param.grad_dtype = torch.float32
    give(ours, seed=1)
    expected = [(m.float() * 0.95 + 0.05 * p.grad) for m, p in zip(momenta(optimizer), ours, strict=True)]
    optimizer.step()
    assert_equal([m.float() for m in momenta(optimizer)], expected, atol=1e-6)
    assert step.stats.recompiles == 1


def test_strided_gradient() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    for seed in range(2):
        give(ours, theirs, seed=seed)
        for params in (ours, theirs):
            params[1].grad = params[1].grad.t().contiguous().t()
            params[2].grad = params[2].grad.repeat_interleave(2, dim=1)[:, ::2]
        assert not ours[1].grad.is_contiguous()
        assert not ours[2].grad.is_contiguous()
        optimizer.step()
        stock.step()
        assert_equal(ours, theirs)


def test_meta_parameters_at_wrap_time() -> None:
    real, _, theirs, stock = pair()
    ours = [Parameter(torch.empty(p.shape, device="meta")) for p in real]
    optimizer = torch.optim.Muon(ours, lr=0.1)
    step = wrap(optimizer)
    with pytest.raises(RuntimeError, match="meta"):
        _ = step.plan
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()
    for param, value in zip(ours, real, strict=True):
        torch.utils.swap_tensors(param, value)
    assert [spec.device for spec in step.plan.specs] == ["cpu"] * 3
    run_both(ours, optimizer, theirs, stock, range(3))
