"""What convert_state refuses, in words: state dicts of others, and what a user chose that another class has not."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from typing import Any

import pytest
import torch

import muon_compile as mc
from muon_compile.conversion.parts import same
from tests.originals.training import PRESETS, Dict, eager_heavyball, make, saved, train

Change = dict[str, Any]


@functools.cache
def state_of(preset: str, adamw: bool) -> Dict:
    with eager_heavyball():
        made = make(preset, adamw=adamw)
        train(made, range(2))
        return saved(made[1])


def trained(preset: str, *, adamw: bool = False, group: int = 0, **entries: Any) -> Dict:
    found = copy.deepcopy(state_of(preset, adamw))
    found["param_groups"][group] |= entries
    return found


@pytest.mark.parametrize("adamw", [False, True])
@pytest.mark.parametrize(("preset", "from_"), list(itertools.permutations(PRESETS, 2)))
def test_a_state_dict_of_another_is_refused(preset: str, from_: str, adamw: bool) -> None:
    words = rf"^convert_state: group \d: .*expected .*'{from_}'"
    to = "keller" if from_ != "keller" else "torch"
    given = trained(preset, adamw=adamw)
    with pytest.raises(ValueError, match=words):
        mc.convert_state(given, from_=from_, to=to)


@pytest.mark.parametrize("from_", ["torch", "hyperparallel"])
def test_adamw_alone_of_another_is_refused(from_: str) -> None:
    """Their groups have the same entries; steps are counted elsewhere."""
    other = "hyperparallel" if from_ == "torch" else "torch"
    whole = trained(other, adamw=True)
    given = {**whole, "param_groups": whole["param_groups"][1:]}
    with pytest.raises(ValueError, match=rf"parameter 3: expected state of '{from_}'"):
        mc.convert_state(given, from_=from_, to="keller")


def test_names_that_are_not_known() -> None:
    given = trained("keller")
    for names, words in (
        ({"from_": "kellers", "to": "torch"}, "from_: expected one of 'torch', 'keller'.*got 'kellers'"),
        ({"from_": "keller", "to": "adam"}, "to: expected one of 'torch', 'keller'.*got 'adam'"),
    ):
        with pytest.raises(ValueError, match=words):
            mc.convert_state(given, **names)


@pytest.mark.parametrize("given", [{}, {"state": {}}, {"state": {}, "param_groups": {}}, [1]])
def test_what_is_no_state_dict(given: Any) -> None:
    with pytest.raises(ValueError, match="convert_state: expected a dict with 'state' and 'param_groups', got"):
        mc.convert_state(given, from_="keller", to="torch")


ODD = ((2.0, -1.5, 0.5), (3.0, -2.0, 0.5))
# What a user chose, in which class: who cannot represent it, and what the message names.
CHOSEN: list[tuple[str, Change, str, str]] = [
    ("torch", {"nesterov": False}, "keller", "nesterov: .*got False of 'torch'"),
    ("torch", {"ns_steps": 3}, "keller dion heavyball", "ns_steps: .*got 3 of"),
    ("torch", {"ns_coefficients": ODD[0]}, "keller moonlight dion heavyball", "coefficients"),
    ("torch", {"adjust_lr_fn": "match_rms_adamw"}, "keller heavyball", "scale"),
    ("torch", {"eps": 1e-3}, "keller moonlight heavyball", "eps: .*got 0.001"),
    ("moonlight", {"ns_steps": 6}, "keller dion heavyball", "ns_steps"),
    ("moonlight", {"nesterov": False}, "keller", "nesterov"),
    ("dion", {"nesterov": False}, "keller", "nesterov"),
    ("dion", {"adjust_lr": None}, "torch keller moonlight heavyball", "scale"),
    ("dion", {"adjust_lr": "rms_norm"}, "keller heavyball", "scale"),
    ("dion", {"num_heads": 2}, "torch keller moonlight hyperparallel heavyball", "num_heads"),
    ("dion", {"split_sizes": (12, 12)}, "torch keller moonlight hyperparallel heavyball", "split_sizes"),
    ("dion", {"cautious_wd": True}, "torch muon_compile", "cautious_wd=True"),
    ("hyperparallel", {"momentum": (0.9, 0.95)}, "torch", "two equal ones"),
    ("hyperparallel", {"matched_adamw_rms": 0.3}, "torch keller moonlight", "scale"),
    (
        "hyperparallel",
        {"ns_variant": "custom", "ns_coefficients": list(ODD), "ns_steps": 2},
        "torch dion",
        "ns_steps|coefficients",
    ),
    ("hyperparallel", {"ns_variant": "custom", "ns_coefficients": [*ODD, *ODD, ODD[0]]}, "torch dion", "coefficients"),
    ("heavyball", {"caution": True}, "torch", "caution=True"),
    ("heavyball", {"warmup_steps": 5}, "torch muon_compile", "warmup_steps=5"),
    ("muon_compile", {"config": {"preset": "dion", "nesterov": True, "scale": "none"}}, "keller", "scale"),
    ("muon_compile", {"config": {"preset": "torch", "momentum_form": "ema_added"}}, "torch", "momentum_form"),
]


@pytest.mark.parametrize(
    ("from_", "entries", "to", "words"),
    [(f, entries, to, words) for f, entries, all_to, words in CHOSEN for to in all_to.split()],
)
def test_what_a_user_chose_is_not_dropped(from_: str, entries: Change, to: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^convert_state: group 0: .*(?:{words})"):
        mc.convert_state(trained(from_, **entries), from_=from_, to=to)


@pytest.mark.parametrize(
    ("from_", "entries"), [(f, e) for f, e, to, _ in CHOSEN if "muon_compile" not in (f, *to.split())]
)
def test_muon_of_this_library_can_represent_it(from_: str, entries: Change) -> None:
    if entries in ({"momentum": (0.9, 0.95)}, {"caution": True}):
        return  # but not that
    given = trained(from_, **entries)
    there = mc.convert_state(given, from_=from_, to="muon_compile")
    back = mc.convert_state(there, from_="muon_compile", to=from_)
    for name, value in entries.items():
        assert same(back["param_groups"][0][name], value)


@pytest.mark.parametrize("from_", ["torch", "hyperparallel"])
@pytest.mark.parametrize("to", ["keller", "moonlight", "dion"])
@pytest.mark.parametrize("entry", ["amsgrad", "maximize"])
def test_adamws_choices_are_not_dropped(from_: str, to: str, entry: str) -> None:
    given = trained(from_, adamw=True, group=1, **{entry: True})
    with pytest.raises(ValueError, match=f"group 1: {entry}: expected what '{to}' can represent, got True"):
        mc.convert_state(given, from_=from_, to=to)
    other = "hyperparallel" if from_ == "torch" else "torch"
    assert mc.convert_state(given, from_=from_, to=other)["param_groups"][1][entry] is True


@pytest.mark.parametrize("to", [p for p in PRESETS if p != "dion"])
def test_lion_is_dions_alone(to: str) -> None:
    given = trained("dion", algorithm="lion")
    with pytest.raises(ValueError, match=f"group 0: expected groups that '{to}' has, .*got one of 'lion'"):
        mc.convert_state(given, from_="dion", to=to)
    assert mc.convert_state(given, from_="dion", to="dion") == given


def test_heavyballs_muon_has_no_adamw() -> None:
    with pytest.raises(ValueError, match="group 1: expected groups that 'heavyball' has, muon, got one of 'adamw'"):
        mc.convert_state(trained("keller", adamw=True), from_="keller", to="heavyball")


def test_one_group_of_moonlight_has_one_of_everything() -> None:
    given = trained("keller", adamw=True, lr=0.05)
    with pytest.raises(
        ValueError, match=re.escape("lr: moonlight has one group for all parameters: expected one value")
    ):
        mc.convert_state(given, from_="keller", to="moonlight")
    given = trained("keller", adamw=True, initial_lr=0.05)
    given["param_groups"][1]["initial_lr"] = 0.1
    with pytest.raises(ValueError, match="initial_lr: moonlight has one group"):
        mc.convert_state(given, from_="keller", to="moonlight")
    given = trained("keller", adamw=True, param_names=["a", "b", "c"])
    with pytest.raises(ValueError, match="param_names: expected them in all groups or in none"):
        mc.convert_state(given, from_="keller", to="moonlight")


def test_one_group_of_hyperparallel_has_one_count_of_steps() -> None:
    given = trained("keller", adamw=True)
    given["state"][4]["step"] = 7
    with pytest.raises(ValueError, match=r"step: expected one count for all parameters of a group.*got \[2, 7\]"):
        mc.convert_state(given, from_="keller", to="hyperparallel")


def test_a_momentum_of_one_has_no_sum() -> None:
    with pytest.raises(ValueError, match=r"group 0: momentum: expected less than 1, got 1\.0"):
        mc.convert_state(trained("keller", momentum=1.0), from_="keller", to="dion")


@pytest.mark.parametrize("value", [None, "0.9", float("nan"), -1.0, (0.9, 0.9)])
def test_numbers_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match=r"group 0: momentum: expected a finite number >= 0, got"):
        mc.convert_state(trained("keller", momentum=value), from_="keller", to="dion")


def test_parameters_of_more_than_two_dims() -> None:
    stack = trained("keller")
    stack["state"][0]["momentum_buffer"] = torch.ones(2, 24, 64)
    with pytest.raises(ValueError, match=r"parameter 0: torch.optim.Muon takes two dims, got shape \(2, 24, 64\)"):
        mc.convert_state(stack, from_="keller", to="torch")
    with pytest.raises(ValueError, match="flatten: expected what 'heavyball' can represent, got False of 'keller'"):
        mc.convert_state(stack, from_="keller", to="heavyball")
    assert mc.convert_state(stack, from_="keller", to="muon_compile")["param_groups"][0]["config"]["flatten"] is False
    flat = trained("heavyball")
    (name,) = (name for name in flat["state"][0][0] if "_momentum_" in name)
    flat["state"][0][0][name] = torch.ones(2, 24, 64)
    assert mc.convert_state(flat, from_="heavyball", to="dion")["param_groups"][0]["flatten"] is True


def test_state_that_is_not_whole() -> None:
    given = trained("keller", adamw=True)
    del given["state"][3]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"group 1: parameter 3: expected state of 'keller', with its exp_avg_sq, got"):
        mc.convert_state(given, from_="keller", to="torch")
    unknown = trained("moonlight", adamw=True)
    del unknown["state"][1]["use_muon"]
    with pytest.raises(
        ValueError, match="group 0: expected a state dict of 'moonlight', whose state has 'use_muon'; 1 has"
    ):
        mc.convert_state(unknown, from_="moonlight", to="torch")
    cut = trained("heavyball")
    cut["state"][0][1] = cut["state"][0][0]
    with pytest.raises(ValueError, match="parameter 0: expected state of whole parameters"):
        mc.convert_state(cut, from_="heavyball", to="torch")
