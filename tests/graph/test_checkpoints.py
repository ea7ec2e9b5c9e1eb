"""State dicts: out of the compiled step, into it, and to and from stock."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter
from torch.optim import Optimizer

import muon_compile as mc
from tests.graph.twins import SHAPES, assert_equal, give, momenta, pair, parameters, run_both, values, wrap

FLOAT32_MOMENTUM = mc.MuonConfig(momentum_dtype="float32")


def saved(optimizer: Optimizer) -> Any:
    """The state dict as it comes back from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(params: list[Parameter], optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        give(params, seed=seed)
        optimizer.step()


def own(params: list[Parameter], config: mc.MuonConfig | None = None) -> mc.Muon:
    return mc.Muon(
        params, lr=0.1, config=config, backend="aot_eager", compile_config=mc.CompileConfig(exact=config is None)
    )


def make(kind: str, params: list[Parameter]) -> Optimizer:
    if kind == "own":
        return own(params)
    optimizer = torch.optim.Muon(params, lr=0.1)
    if kind == "wrapped":
        wrap(optimizer)
    return optimizer


# -- interchange ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "had stepped"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("wrapped", "stock"), ("stock", "wrapped"), ("wrapped", "wrapped"), ("own", "own")],
)
def test_training_resumes_from_a_file(source: str, target: str, started: bool) -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, stock = make(source, ours), torch.optim.Muon(theirs, lr=0.1)
    optimizer.param_groups[0]["lr"] = stock.param_groups[0]["lr"] = 0.25
    run_both(ours, optimizer, theirs, stock, range(3))
    state_dict = saved(optimizer)

    resumed = parameters(*SHAPES, seed=9)
    other = make(target, resumed)
    if started:
        train(resumed, other, range(2))
    with torch.no_grad():
        for p, q in zip(resumed, ours, strict=True):
            p.copy_(q)
    other.load_state_dict(state_dict)
    assert other.param_groups[0]["lr"] == 0.25
    assert_equal(momenta(other), momenta(optimizer))
    run_both(resumed, other, theirs, stock, range(3, 8))


def test_state_dict_looks_as_on_stock() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    a, b = optimizer.state_dict(), stock.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert list(a["state"]) == list(b["state"])
    for index, entry in b["state"].items():
        assert list(a["state"][index]) == list(entry)
        for name, value in entry.items():
            assert torch.equal(a["state"][index][name], value)
            assert a["state"][index][name].dtype == value.dtype


def test_loading_copies_values_and_keeps_addresses() -> None:
    ours, optimizer, _, _ = pair()
    step = wrap(optimizer)
    train(ours, optimizer, range(2))
    views = [optimizer.state[p]["momentum_buffer"] for p in ours]
    addresses = [view.data_ptr() for view in views]
    early, state_dict = momenta(optimizer), copy.deepcopy(optimizer.state_dict())
    given = [entry["momentum_buffer"] for entry in state_dict["state"].values()]
    train(ours, optimizer, range(2, 4))
    optimizer.load_state_dict(state_dict)
    now = [optimizer.state[p]["momentum_buffer"] for p in ours]
    assert_equal(now, early)
    assert [view.data_ptr() for view in now] == addresses
    train(ours, optimizer, range(4, 5))
    assert_equal(given, early)  # the caller's tensors are theirs
    assert not torch.equal(now[0], early[0])
    assert step.stats.compiles == 1


def test_loading_empty_state_starts_from_zero() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    fresh = {"state": {}, "param_groups": copy.deepcopy(stock.state_dict()["param_groups"])}
    run_both(ours, optimizer, theirs, stock, range(2))
    for each in (optimizer, stock):
        each.load_state_dict(copy.deepcopy(fresh))
    assert_equal(momenta(optimizer), [torch.zeros(shape) for shape in SHAPES])
    run_both(ours, optimizer, theirs, stock, range(2, 4))


def test_config_in_the_state_dict_takes_effect() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    for each in (optimizer, stock):
        state_dict = copy.deepcopy(each.state_dict())
        state_dict["param_groups"][0].update(nesterov=False, adjust_lr_fn="match_rms_adamw", lr=0.02)
        each.load_state_dict(state_dict)
    run_both(ours, optimizer, theirs, stock, range(2, 4))


def test_loading_after_a_group_was_added() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    state_dicts = []
    for params, each in ((ours, optimizer), (theirs, stock)):
        params += parameters((8, 12), seed=1)
        each.add_param_group({"params": params[-1:]})
        state_dict = copy.deepcopy(each.state_dict())
        state_dict["state"][3] = {"momentum_buffer": torch.full((8, 12), 0.5)}
        state_dicts.append(state_dict)
    for each, state_dict in zip((optimizer, stock), state_dicts, strict=True):
        each.load_state_dict(state_dict)
    run_both(ours, optimizer, theirs, stock, range(2, 4))


# -- refused, with nothing changed ----------------------------------------------------------------------------------


def wrong_shape(state_dict: dict[str, Any]) -> None:
    state_dict["state"][2]["momentum_buffer"] = torch.ones(8, 16)


def missing_entry(state_dict: dict[str, Any]) -> None:
    state_dict["state"][2] = {"exp_avg": torch.ones(16, 8)}


def missing_group(state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["params"].pop()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_shape, r"'0/2'.*momentum_buffer.*\(16, 8\).*\(8, 16\)"),
        (missing_entry, "'0/2'.*momentum_buffer"),
        (missing_group, "size of optimizer's group"),
    ],
)
def test_state_that_does_not_fit_is_refused(spoil: Any, message: str) -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    run_both(ours, optimizer, theirs, stock, range(2))
    state_dict = copy.deepcopy(optimizer.state_dict())
    for entry in state_dict["state"].values():
        entry["momentum_buffer"].fill_(7.0)
    state_dict["param_groups"][0]["lr"] = 123.0
    spoil(state_dict)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.1
    run_both(ours, optimizer, theirs, stock, range(2, 4))


# -- cases ----------------------------------------------------------------------------------------------------------


def one_layer() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(12, 8, bias=False)


@pytest.mark.parametrize("kind", ["wrapped", "own"])
@pytest.mark.parametrize("gradient", [True, False], ids=["gradient present", "no gradient"])
def test_case_a11_saving_a_fresh_optimizer_is_never_empty(kind: str, gradient: bool) -> None:
    model = one_layer()
    optimizer = make(kind, list(model.parameters()))
    if gradient:
        model(torch.ones(2, 12)).sum().backward()
    before = values(list(model.parameters()))
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert torch.equal(state["weight"]["momentum_buffer"], torch.zeros(8, 12))
    assert_equal(list(model.parameters()), before)


@pytest.mark.parametrize("kind", ["wrapped", "own"])
@pytest.mark.parametrize("gradient", [True, False], ids=["gradient present", "no gradient"])
def test_case_a11_loading_into_a_fresh_optimizer_restores_values(kind: str, gradient: bool) -> None:
    model, resumed = one_layer(), one_layer()
    first = make(kind, list(model.parameters()))
    train(list(model.parameters()), first, range(2))
    state_dict = copy.deepcopy(get_optimizer_state_dict(model, first))
    resumed.load_state_dict(model.state_dict())

    optimizer = make(kind, list(resumed.parameters()))
    if gradient:
        resumed(torch.ones(2, 12)).sum().backward()
    set_optimizer_state_dict(resumed, optimizer, state_dict)
    assert_equal(momenta(optimizer), momenta(first))
    for each, params in ((first, model), (optimizer, resumed)):
        train(list(params.parameters()), each, range(2, 4))
    assert_equal(list(resumed.parameters()), list(model.parameters()))


def in_float32(state_dict: dict[str, Any]) -> dict[str, Any]:
    for entry in state_dict["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"].float()
    return state_dict


def test_case_a12_float32_momentum_in_the_file_meets_bfloat16_parameters() -> None:
    ours, resumed = parameters(*SHAPES, dtype=torch.bfloat16), parameters(*SHAPES, dtype=torch.bfloat16)
    first, optimizer = torch.optim.Muon(ours, lr=0.1), torch.optim.Muon(resumed, lr=0.1)
    wrap(first)
    step = wrap(optimizer)
    train(resumed, optimizer, range(1))
    train(ours, first, range(3))
    with torch.no_grad():
        for p, q in zip(resumed, ours, strict=True):
            p.copy_(q)
    optimizer.load_state_dict(in_float32(saved(first)))
    assert_equal(momenta(optimizer), momenta(first))
    assert {m.dtype for m in momenta(optimizer)} == {torch.bfloat16}
    train(ours, first, range(3, 5))
    train(resumed, optimizer, range(3, 5))
    assert_equal(resumed, ours)
    assert step.stats.compiles == 1


@pytest.mark.parametrize("started", [False, True], ids=["fresh", "had stepped"])
def test_case_a12_a_chosen_float32_momentum_survives_a_load(started: bool) -> None:
    ours, resumed = parameters(*SHAPES, dtype=torch.bfloat16), parameters(*SHAPES, dtype=torch.bfloat16)
    first, optimizer = own(ours, FLOAT32_MOMENTUM), own(resumed, FLOAT32_MOMENTUM)
    train(ours, first, range(3))
    if started:
        train(resumed, optimizer, range(1))
    with torch.no_grad():
        for p, q in zip(resumed, ours, strict=True):
            p.copy_(q)
    rounded = [m.bfloat16().float() for m in momenta(first)]
    assert not any(torch.equal(m, r) for m, r in zip(momenta(first), rounded, strict=True))
    optimizer.load_state_dict(saved(first))
    train(ours, first, range(3, 5))
    train(resumed, optimizer, range(3, 5))
    assert {m.dtype for m in momenta(optimizer)} == {torch.float32}
    assert_equal(momenta(optimizer), momenta(first))
    assert_equal(resumed, ours)
    assert optimizer.compiled.stats.compiles == 1


def test_a_float32_momentum_survives_bfloat16_in_the_file() -> None:
    params = parameters(*SHAPES, dtype=torch.bfloat16)
    optimizer = own(params, FLOAT32_MOMENTUM)
    train(params, optimizer, range(2))
    state_dict = saved(optimizer)
    expected: list[Tensor] = []
    for entry in state_dict["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"].bfloat16()
        expected.append(entry["momentum_buffer"].float())
    optimizer.load_state_dict(state_dict)
    assert {m.dtype for m in momenta(optimizer)} == {torch.float32}
    assert_equal(momenta(optimizer), expected)


def test_own_optimizer_saves_its_configs_as_plain_data() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    config = mc.MuonConfig(preset="moonlight", ns_steps=3, coefficients=((4.0, -6.0, 3.0),) * 3)
    optimizer = mc.Muon(mc.route(model), lr=0.1, config=config, backend="aot_eager")
    train(list(model.parameters()), optimizer, range(2))
    state_dict = saved(optimizer)
    other = mc.Muon(mc.route(copy.deepcopy(model)), lr=0.3, backend="aot_eager")
    other.load_state_dict(state_dict)
    assert [g["config"] for g in other.param_groups] == [g["config"] for g in optimizer.param_groups]
    assert [g["algorithm"] for g in other.param_groups] == ["muon", "adamw"]
    assert optimizer.param_groups[0]["config"] is config
    assert_equal(
        [t for p in other.param_groups for q in p["params"] for t in other.state[q].values()],
        [t for p in optimizer.param_groups for q in p["params"] for t in optimizer.state[q].values()],
    )
