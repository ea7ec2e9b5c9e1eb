"""What the wrapped optimizer holds, what it gives back, and what becomes of copies."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import ExponentialLR

import muon_compile as mc
from muon_compile.run import binding
from tests.graph.twins import SHAPES, assert_equal, give, momenta, pair, parameters, run_both, values, wrap

# -- state ----------------------------------------------------------------------------------------------------------


def test_state_holds_live_views_from_the_start() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    held = [optimizer.state[p]["momentum_buffer"] for p in ours]
    assert [tuple(m.shape) for m in held] == list(SHAPES)
    assert held[0].untyped_storage().data_ptr() == held[1].untyped_storage().data_ptr()  # stacked in one bucket
    addresses = [m.data_ptr() for m in held]
    run_both(ours, optimizer, theirs, stock, range(2))
    assert_equal(held, momenta(stock))
    assert [m.data_ptr() for m in held] == addresses
    for each, params in ((optimizer, ours), (stock, theirs)):
        each.state[params[0]]["momentum_buffer"].zero_()
    run_both(ours, optimizer, theirs, stock, range(2, 4))


def test_parameters_that_a_trainer_replaces_leave_no_state_behind() -> None:
    """As a trainer that shards a model after the optimizer was made: torch's state-dict helpers look at every entry."""
    old = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizer = mc.Muon(old, lr=0.1, backend="aot_eager")
    assert optimizer.compiled.plan is not None and set(optimizer.state) == set(old)
    new = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizer.param_groups[0]["params"] = new
    for param in new:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert set(optimizer.state) == set(new)
    kept = optimizer.state[new[1]]
    optimizer.param_groups[0]["params"] = new[:1]
    optimizer.step()
    assert optimizer.state[new[1]] is kept, "what has been stepped is the user's to drop"


@pytest.mark.parametrize("how", ["whole state", "one parameter", "one entry"])
def test_state_that_a_script_replaces_takes_effect(how: str) -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    for each, params in ((optimizer, ours), (stock, theirs)):
        if how == "whole state":
            each.state.clear()
        elif how == "one parameter":
            each.state[params[0]] = {"momentum_buffer": torch.ones(SHAPES[0])}
        else:
            each.state[params[0]]["momentum_buffer"] = torch.ones(SHAPES[0])
    run_both(ours, optimizer, theirs, stock, range(2, 4))


def test_wrapping_in_mid_training_adopts_the_momentum() -> None:
    ours, optimizer, theirs, stock = pair()
    run_both(ours, optimizer, theirs, stock, range(3))
    wrap(optimizer)
    assert_equal(momenta(optimizer), momenta(stock))
    run_both(ours, optimizer, theirs, stock, range(3, 6))


def test_a_step_that_failed_inside_its_kernels_goes_on_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_step, failing = binding.lower_step, []

    def fragile(*args: Any) -> Any:
        traced, compiled = lower_step(*args)

        def run(inputs: list[torch.Tensor]) -> object:
            if failing:
                raise OSError("a peer is gone")
            return compiled.run(inputs)

        return traced, dataclasses.replace(compiled, run=run)

    monkeypatch.setattr(binding, "lower_step", fragile)
    ours, optimizer, theirs, stock = pair()
    step = wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    state_dict = copy.deepcopy(optimizer.state_dict())
    failing.append(True)
    with pytest.raises(OSError, match="a peer is gone"):
        optimizer.step()
    failing.clear()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a peer is gone.*load_state_dict"):
            optimizer.step()
    assert step.stats.steps == 2
    optimizer.load_state_dict(state_dict)
    run_both(ours, optimizer, theirs, stock, range(2, 4))


# -- leaving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["no scheduler", "scheduler first", "wrapped first"])
def test_uninstall_gives_stock_back_with_its_state(order: str) -> None:
    ours, optimizer, theirs, stock = pair()
    before = len(optimizer._optimizer_load_state_dict_pre_hooks), len(optimizer._optimizer_load_state_dict_post_hooks)
    scheduler = ExponentialLR(optimizer, 0.5) if order == "scheduler first" else None
    original = optimizer.__dict__.get("step")
    step = wrap(optimizer)
    if order == "wrapped first":
        scheduler = ExponentialLR(optimizer, 0.5)
    reference = ExponentialLR(stock, 0.5) if scheduler else None
    held = optimizer.step
    run_both(ours, optimizer, theirs, stock, range(2))
    step.uninstall()
    if order == "wrapped first":  # as on stock: the scheduler's own wrapper stays, and now reaches the stock step
        assert hasattr(optimizer.step, "_wrapped_by_lr_sched")
    else:
        assert optimizer.__dict__.get("step") is original
    assert type(optimizer) is torch.optim.Muon
    hooks = len(optimizer._optimizer_load_state_dict_pre_hooks), len(optimizer._optimizer_load_state_dict_post_hooks)
    assert hooks == before
    storages = {m.untyped_storage().data_ptr() for m in (optimizer.state[p]["momentum_buffer"] for p in ours)}
    assert len(storages) == len(ours)  # no longer views of a stack
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2, 5):
            give(ours, theirs, seed=seed)
            (held if seed == 4 else optimizer.step)()  # whoever held the method gets stock as well
            stock.step()
            if scheduler and reference:
                scheduler.step()
                reference.step()
            assert_equal(ours, theirs)
    assert step.stats.steps == 2


def test_install_false_leaves_the_optimizer_alone() -> None:
    ours, optimizer, theirs, stock = pair()
    step = wrap(optimizer, install=False)
    assert "step" not in optimizer.__dict__
    for seed in range(6):
        give(ours, theirs, seed=seed)
        (step if seed % 3 else optimizer.step)()  # the stock step works on the same state
        stock.step()
        assert_equal(ours, theirs)
    assert step.stats.steps == 4
    step.uninstall()
    run_both(ours, optimizer, theirs, stock, range(6, 8))


def test_wrapping_twice_keeps_one_state() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    second = wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2, 4))
    second.uninstall()
    run_both(ours, optimizer, theirs, stock, range(4, 6))
    assert "step" not in vars(optimizer), "the first one is out as well"


def test_wrapping_one_of_two_that_are_wrapped_together_is_refused() -> None:
    ours, optimizer, theirs, stock = pair()
    vector, twin = parameters((8,)), parameters((8,))
    adamw, other = torch.optim.AdamW(vector), torch.optim.AdamW(twin)
    wrap(optimizer, adamw)
    with pytest.raises(ValueError, match="wrapped already, together with one that is not given"):
        wrap(adamw)
    for seed in range(2):
        give(ours, theirs, seed=seed)
        give(vector, twin, seed=seed)
        for one in (optimizer, adamw, stock, other):
            one.step()
    assert_equal(ours, theirs)
    second = wrap(adamw, optimizer)
    give(ours, theirs, seed=2)
    give(vector, twin, seed=2)
    for one in (adamw, optimizer, stock, other):
        one.step()
    assert_equal(ours, theirs)
    assert second.stats.steps == 1


def test_wrapping_an_own_optimizer_is_what_compiled_shows() -> None:
    params = parameters(*SHAPES)
    optimizer = mc.Muon(params, backend="aot_eager")
    step = wrap(optimizer)
    give(params, seed=0)
    optimizer.step()
    assert optimizer.compiled is step


# -- copies ---------------------------------------------------------------------------------------------------------


def pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def own(params: list[Parameter]) -> mc.Muon:
    return mc.Muon(params, lr=0.1, backend="aot_eager")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["wrapped", "own"])
def test_a_copy_goes_on_alone(duplicate: Callable[[Any], Any], kind: str) -> None:
    ours, optimizer, theirs, stock = pair()
    if kind == "own":
        optimizer, stock = own(ours), own(theirs)
    else:
        wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    twin, copied = duplicate((ours, optimizer))
    before = values(ours), momenta(optimizer)
    run_both(twin, copied, theirs, stock, range(2, 4))
    assert_equal(ours, before[0])
    assert_equal(momenta(optimizer), before[1])
    # The copy is an optimizer like the first: stock where that was wrapped, with a state dict that files accept.
    assert type(copied) is type(optimizer)
    file = io.BytesIO()
    torch.save(copied.state_dict(), file)
    file.seek(0)
    copied.load_state_dict(torch.load(file, weights_only=True))
    run_both(twin, copied, theirs, stock, range(4, 6))
