"""State dicts converted between libraries: names, values, entries, and trainings that go on."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import muon_compile as mc
from muon_compile.adapters import find_adapter
from muon_compile.build.orthogonalize import shape_scale
from muon_compile.config import MuonConfig
from tests.graph.twins import give, parameters, values
from tests.originals import find
from tests.originals.training import MU, PRESETS, Dict, Made, eager_heavyball, load, make, saved, train
from tests.reference import relative_error

PAIRS = list(itertools.permutations(PRESETS, 2))
# float32 in another order, and eps added to a norm of about 30 instead of clamping it: 1e-7 / 30.
FLOAT32 = 1e-5
ROUNDING = 1e-6
# Their momentum is a sum; heavyball's as made here.
SUMS = ("moonlight", "dion", "hyperparallel", "heavyball")
NAMES = {"dion": "momentum", "heavyball": "nesterov_momentum_momentum_2"}


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    with eager_heavyball():
        yield


def trained(preset: str, *, adamw: bool = True) -> tuple[Made, Dict]:
    made = make(preset, adamw=adamw)
    train(made, range(3))
    return made, saved(made[1])


def assert_same(actual: Any, expected: Any, where: str = "", *, within: float = 0.0) -> None:
    """The same names, types and numbers; tensors up to rounding, where that is said."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor) and actual.dtype == expected.dtype, where
        assert relative_error(actual, expected) <= within, where
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for name in expected:
            assert_same(actual[name], expected[name], f"{where}/{name}", within=within)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, f"{where}/{index}", within=within)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-12), where
    else:
        assert type(actual) is type(expected) and actual == expected, where


def is_sum(preset: str, other: str) -> bool:
    """Whether momentum is a sum there; muon_compile has what it is converted of."""
    return (other if preset == "muon_compile" and other in SUMS else preset) in SUMS


def tensors_of(tree: Any) -> list[Tensor]:
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in tensors_of(value)]
    if isinstance(tree, (list, tuple)):
        return [t for value in tree for t in tensors_of(value)]
    return [tree] if isinstance(tree, Tensor) else []


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("from_", "to"), PAIRS)
def test_the_way_back_leads_to_the_same(from_: str, to: str) -> None:
    _, before = trained(from_, adamw="heavyball" not in (from_, to))
    for group in before["param_groups"]:
        group |= {"strategy": "all_gather", "param_names": [f"model.{key}" for key in group["params"]]}
        group |= {"initial_lr": 0.5, "mask": torch.arange(3)}
    given = copy.deepcopy(before)
    there = mc.convert_state(before, from_=from_, to=to)
    assert_same(before, given)  # nothing of the input has changed
    for group in there["param_groups"]:
        assert group["initial_lr"] == 0.5 and group["strategy"] == "all_gather"
        assert group["param_names"] == [f"model.{key}" for key in group["params"]]
    back = mc.convert_state(there, from_=to, to=from_)
    if (from_, to) == ("muon_compile", "moonlight"):
        assert back["param_groups"][1]["config"].pop("corrected_eps")  # its place of eps
        del given["param_groups"][1]["config"]["corrected_eps"]
    scaled = is_sum(from_, "") != is_sum(to, from_)
    assert_same(back, given, within=ROUNDING if scaled else 0.0)
    held = {id(t) for t in tensors_of(before["state"])}
    shared = [id(t) in held for t in tensors_of(there["state"]) if t.dim() > 1]
    assert not any(shared) if scaled else all(shared)


@pytest.mark.parametrize(("from_", "to"), PAIRS)
def test_names_and_values_are_the_others(from_: str, to: str) -> None:
    adamw = "heavyball" not in (from_, to)
    _, before = trained(from_, adamw=adamw)
    after = mc.convert_state(before, from_=from_, to=to)
    _, theirs = trained(to, adamw=adamw)
    assert after["state"].keys() == theirs["state"].keys()
    for key, entry in theirs["state"].items():
        assert set(flat(after["state"][key])) == set(flat(entry)) - ({"step"} if to == "heavyball" else set()), key
    for after_group, group in zip(after["param_groups"], theirs["param_groups"], strict=True):
        made = {"param_count", "is_preconditioning", "base_lr", "step_count", "step", "prev_lr"}  # by a first step
        assert set(group) - set(after_group) <= (made if to == "heavyball" else {"step"})
    sums = is_sum(from_, ""), is_sum(to, from_)
    factor = {(False, True): 1 / (1 - MU), (True, False): 1 - MU}.get(sums, 1.0)
    for key in range(3):
        old = flat(before["state"][key])[NAMES.get(from_, "momentum_buffer")]
        new = flat(after["state"][key])[NAMES.get(to, "momentum_buffer")]
        assert relative_error(new, factor * old) <= ROUNDING


def flat(entry: Dict) -> Dict:
    """Heavyball's state lies one level deeper."""
    inner: Dict = entry.get(0, entry)
    return inner


@pytest.mark.parametrize(
    ("from_", "to", "entry", "value"),
    [
        ("moonlight", "torch", "adjust_lr_fn", "match_rms_adamw"),
        ("moonlight", "dion", "adjust_lr", "rms_norm"),
        ("moonlight", "hyperparallel", "matched_adamw_rms", 0.2),
        ("hyperparallel", "torch", "adjust_lr_fn", "match_rms_adamw"),
        ("keller", "torch", "adjust_lr_fn", None),
        ("keller", "dion", "adjust_lr", "spectral_norm"),
        ("keller", "hyperparallel", "ns_variant", "legacy"),
        ("hyperparallel", "torch", "eps", 1e-10),
        ("dion", "torch", "eps", 1e-8 / 1.02),
        ("torch", "dion", "epsilon", 1.02e-7),
    ],
)
def test_of_a_classs_own_the_other_gets_what_it_can_represent(from_: str, to: str, entry: str, value: Any) -> None:
    _, before = trained(from_)
    found = mc.convert_state(before, from_=from_, to=to)["param_groups"][0][entry]
    assert found == (pytest.approx(value, rel=1e-12, abs=0) if isinstance(value, float) else value)


# -- trainings go on --------------------------------------------------------------------------------------------------


def updates(made: Made, seed: int) -> list[Tensor]:
    """What a step adds to parameters that are zero."""
    with torch.no_grad():
        torch._foreach_zero_(made[0])
    train(made, range(seed, seed + 1))
    return values(made[0])


def config_of(optimizers: list[Any]) -> MuonConfig:
    optimizer = optimizers[0]
    adapter = find_adapter(optimizer)
    config = adapter.config(adapter.groups(optimizer)[0])
    assert isinstance(config, MuonConfig)
    return config


# Pairs whose coefficients differ: torch's, Keller's and Moonlight's are one table, heavyball's and dion's their own.
JORDAN = {"torch", "keller", "moonlight"}
OTHER_TABLES = {
    *itertools.product({*JORDAN, "muon_compile", "hyperparallel"}, {"dion", "heavyball"}),
    *itertools.product({"dion", "heavyball", "hyperparallel"}, JORDAN),
    ("dion", "heavyball"),
    ("heavyball", "dion"),
} - {("hyperparallel", "heavyball")}


@pytest.mark.parametrize(("from_", "to"), [pair for pair in PAIRS if "heavyball" not in pair])
def test_the_next_updates_are_those_of_the_original_going_on(from_: str, to: str) -> None:
    old, before = trained(from_)
    new = make(to)
    load(new[1], mc.convert_state(before, from_=from_, to=to))
    configs = config_of(old[1]), config_of(new[1])
    assert (configs[0].coefficients != configs[1].coefficients) is ((from_, to) in OTHER_TABLES)
    for seed in range(3, 6):
        expected, found = updates(old, seed), updates(new, seed)
        for a, e in zip(found[3:], expected[3:], strict=True):
            assert relative_error(a, e) <= FLOAT32  # AdamW's
        if (from_, to) in OTHER_TABLES:
            continue
        for a, e in zip(found[:3], expected[:3], strict=True):
            ratio = shape_scale(configs[1], *e.shape) / shape_scale(configs[0], *e.shape)
            assert relative_error(a, ratio * e) <= FLOAT32
    # The momenta are the original's at any rate, after steps of both.
    assert_momenta(saved(old[1]), from_, saved(new[1]), to)


def assert_momenta(old: Dict, from_: str, new: Dict, to: str) -> None:
    converted = mc.convert_state(old, from_=from_, to=to)
    for key in range(3):
        name = NAMES.get(to, "momentum_buffer")
        assert relative_error(flat(new["state"][key])[name], flat(converted["state"][key])[name]) <= FLOAT32


@pytest.mark.parametrize(("from_", "to"), [pair for pair in PAIRS if "heavyball" in pair])
def test_momenta_of_heavyball_go_on(from_: str, to: str) -> None:
    """Theirs rounds products to bfloat16 at random, so that its momentum shows the conversion, and no update does."""
    old, before = trained(from_, adamw=False)
    new = make(to, adamw=False)
    load(new[1], mc.convert_state(before, from_=from_, to=to))
    train(old, range(3, 5))
    train(new, range(3, 5))
    assert_momenta(saved(old[1]), from_, saved(new[1]), to)


def test_heavyballs_training_goes_on_in_ours() -> None:
    """In float64, which theirs does not round."""
    old, new = (make(preset, adamw=False, dtype=torch.float64) for preset in ("heavyball", "muon_compile"))
    train(old, range(3))
    load(new[1], mc.convert_state(saved(old[1]), from_="heavyball", to="muon_compile"))
    for seed in range(3, 6):
        for a, e in zip(updates(new, seed), updates(old, seed), strict=True):
            assert relative_error(a, e) <= FLOAT32  # it keeps its momentum in float32


@pytest.mark.parametrize("compiled", [False, True])
def test_kellers_training_goes_on_in_torch(compiled: bool) -> None:
    import muon

    ours, theirs = parameters((24, 64), (64, 24)), parameters((24, 64), (64, 24))
    original = muon.SingleDeviceMuon(theirs, lr=0.02, weight_decay=0.1)
    train((theirs, [original]), range(3))
    optimizer = torch.optim.Muon(ours, lr=1.0)
    with torch.no_grad():
        torch._foreach_copy_(ours, theirs)
    if compiled:
        mc.compile_step(optimizer, backend="aot_eager", config=mc.CompileConfig(ns_dtype="float32"))
    optimizer.load_state_dict(mc.convert_state(saved([original]), from_="keller", to="torch"))
    assert optimizer.param_groups[0]["lr"] == 0.02
    for seed in range(3, 8):
        give(ours, theirs, seed=seed)
        before = values(ours), values(theirs)
        with find.as_float32(True):
            original.step()
            optimizer.step()
        for a, e, x, y in zip(ours, theirs, *before, strict=True):
            assert relative_error(a - x, e - y) <= FLOAT32


@pytest.mark.parametrize("to", ["keller", "moonlight", "dion", "hyperparallel"])
def test_a_wrapped_optimizer_takes_converted_state(to: str) -> None:
    from_ = "keller" if to == "moonlight" else "torch"
    _, before = trained(from_)
    new, plain = make(to), make(to)
    mc.compile_step(*new[1], backend="aot_eager", config=mc.CompileConfig(ns_dtype="float32"))
    for made in (new, plain):
        load(made[1], mc.convert_state(before, from_=from_, to=to))
    for a, e in zip(updates(new, 3), updates(plain, 3), strict=True):
        assert relative_error(a, e) <= FLOAT32
    assert_momenta(saved(new[1]), to, saved(plain[1]), to)


def test_what_is_compiled_of_a_converted_state_is_the_preset() -> None:
    """muon_compile.Muon gets the source's mathematics, whatever its own config was."""
    for preset in ("keller", "moonlight", "dion", "hyperparallel"):
        _, before = trained(preset)
        groups = mc.convert_state(before, from_=preset, to="muon_compile")["param_groups"]
        assert groups[0]["config"]["preset"] == preset
        assert [group["algorithm"] for group in groups] == ["muon", "adamw"]


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "muon_compile"])
def test_state_of_a_wrapped_optimizer_is_that_of_the_plain_one(preset: str) -> None:
    plain, wrapped = make(preset), make(preset)
    mc.compile_step(*wrapped[1], backend="aot_eager", config=mc.CompileConfig(ns_dtype="float32"))
    for made in (plain, wrapped):
        train(made, range(3))
    found, expected = (mc.convert_state(saved(made[1]), from_=preset, to="muon_compile") for made in (wrapped, plain))
    assert_same(found["state"], expected["state"], within=FLOAT32)
    for group, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert group["config"] == other["config"] and group["params"] == other["params"]


def test_parameters_may_go_by_name() -> None:
    """As torch.distributed.checkpoint has them."""
    _, before = trained("keller")
    named = {
        "state": {f"w.{key}": entry for key, entry in before["state"].items()},
        "param_groups": [{**g, "params": [f"w.{key}" for key in g["params"]]} for g in before["param_groups"]],
    }
    numbered = mc.convert_state(before, from_="keller", to="dion")
    found = mc.convert_state(named, from_="keller", to="dion")
    assert_same(found["state"], {f"w.{key}": entry for key, entry in numbered["state"].items()})
    assert found["param_groups"][1]["params"] == ["w.3", "w.4"]


def test_moonlights_one_group_is_divided_and_made_one_again() -> None:
    made = make("moonlight")
    train(made, range(1))
    found = mc.convert_state(saved(made[1]), from_="moonlight", to="keller")
    assert [g["params"] for g in found["param_groups"]] == [[0, 1, 2], [3, 4]]
    assert [g["use_muon"] for g in found["param_groups"]] == [True, False]
    turned = {**found, "param_groups": found["param_groups"][::-1]}
    (group,) = mc.convert_state(turned, from_="keller", to="moonlight")["param_groups"]
    assert group["params"] == [0, 1, 2, 3, 4]  # Muon's first, as its class has them


def test_parameters_without_state_stay_so() -> None:
    params = parameters((8, 12), (8, 12))
    muon = torch.optim.Muon(params, lr=0.02)
    params[0].grad = torch.ones_like(params[0])
    muon.step()
    found = mc.convert_state(muon.state_dict(), from_="torch", to="moonlight")
    assert set(found["state"][0]) == {"use_muon", "momentum_buffer"} and found["state"][1] == {"use_muon": True}
    assert set(mc.convert_state(found, from_="moonlight", to="torch")["state"]) == {0}


def test_convolutions_of_keller_keep_their_scale() -> None:
    found = mc.convert_state(convolutions((5, 3), (5, 3)), from_="keller", to="muon_compile")
    config = found["param_groups"][0]["config"]
    assert config["flatten"] is True and config["scale"] == pytest.approx(math.sqrt(5 / 3))
    with pytest.raises(ValueError, match=r"group 0: scale: .*muon_compile"):
        mc.convert_state(convolutions((5, 3), (7, 3)), from_="keller", to="muon_compile")


def convolutions(*kernels: tuple[int, int]) -> Dict:
    params = [Parameter(torch.ones(4, 2, *kernel)) for kernel in kernels]
    state = {index: {"momentum_buffer": param.detach()} for index, param in enumerate(params)}
    group = {"lr": 0.02, "weight_decay": 0, "momentum": 0.95, "params": list(range(len(params)))}
    return {"state": state, "param_groups": [group]}
