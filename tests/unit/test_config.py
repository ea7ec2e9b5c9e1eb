"""Configuration: presets, what the fields take, and what they become."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import pytest
import torch

import muon_compile as mc
from muon_compile.build.coefficients import schedule
from muon_compile.build.orthogonalize import shape_scale
from muon_compile.config import PRESETS, YOU, CoefficientName, DTypeName, Preset
from tests.reference import RULES


@pytest.mark.parametrize("preset", get_args(Preset))
def test_a_preset_is_whose_name_it_bears(preset: Preset) -> None:
    config, rules = mc.MuonConfig(preset=preset), RULES[preset]
    assert (config.momentum_form == "ema") is rules.ema
    assert config.nesterov is rules.nesterov
    assert (config.eps_mode == "add") is rules.add_eps
    assert config.eps == rules.eps
    assert schedule(config) == rules.triples
    # Wide, square and tall: the three scale rules differ on each of them.
    for rows, cols in [(16, 64), (32, 32), (512, 27)]:
        assert shape_scale(config, rows, cols) == pytest.approx(rules.scale(rows, cols), rel=1e-15)


def test_the_default_is_stock_muon() -> None:
    assert mc.MuonConfig() == mc.MuonConfig(preset="torch")
    assert mc.MuonConfig().ns_dtype == "bfloat16"
    assert mc.MuonConfig().ns_steps == 5


def test_a_field_wins_over_its_preset_and_leaves_the_others() -> None:
    # A value for each field that no preset below has, False among them: only None means "the preset's".
    given: dict[str, Any] = {
        "momentum_form": "ema",
        "nesterov": False,
        "coefficients": (3.0, -4.0, 2.0),
        "eps": 0.0,
        "eps_mode": "clamp",
        "scale": "none",
    }
    base = mc.MuonConfig(preset="moonlight")
    for name, value in given.items():
        config = mc.MuonConfig(preset="moonlight", **{name: value})
        assert getattr(config, name) == value != getattr(base, name)
        for other in given.keys() - {name}:
            assert getattr(config, other) == getattr(base, other)


def test_every_preset_and_every_pair_of_presets_is_its_own() -> None:
    assert set(PRESETS) == set(RULES) == set(get_args(Preset))
    for one, two in itertools.combinations(PRESETS, 2):
        assert PRESETS[one] != PRESETS[two]


@pytest.mark.parametrize("eps", [0, 1, 1e-7, 0.0])
def test_eps_is_a_number(eps: float) -> None:
    config = mc.MuonConfig(eps=eps)
    assert config.eps == eps
    # A digest is a hash of JSON, which tells 0 from 0.0: equal configs must be written alike.
    assert isinstance(config.eps, float)


def test_coefficients_become_tuples_of_floats() -> None:
    assert mc.MuonConfig(coefficients=[3, -4, 2]).coefficients == (3.0, -4.0, 2.0)  # type: ignore[arg-type]
    rows = [[3, -4, 2], [2, -1.5, 0.5]]
    config = mc.MuonConfig(coefficients=rows, ns_steps=2)  # type: ignore[arg-type]
    assert config.coefficients == ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))
    assert mc.MuonConfig(split_sizes=[2, 3]).split_sizes == (2, 3)  # type: ignore[arg-type]
    hash(config)


@pytest.mark.parametrize("name", get_args(CoefficientName))
def test_a_named_table_has_a_row_for_every_step(name: CoefficientName) -> None:
    assert len(schedule(mc.MuonConfig(coefficients=name))) == 5


def test_the_products_dtype_may_be_left_to_the_planner() -> None:
    config = mc.MuonConfig(ns_dtype="auto")
    assert config.ns_dtype == "auto" and config != mc.MuonConfig()
    assert "auto" not in get_args(DTypeName)
    with pytest.raises(ValueError, match=r"ns_dtype: expected one of 'auto', 'bfloat16', .*got 'half'"):
        mc.MuonConfig(ns_dtype="half")  # type: ignore[arg-type]
    # A buffer has to have one dtype.
    with pytest.raises(ValueError, match=r"momentum_dtype: expected one of None, 'bfloat16'.*got 'auto'"):
        mc.MuonConfig(momentum_dtype="auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -2, 2.0, True, "2"])
def test_a_node_has_a_number_of_ranks(size: Any) -> None:
    assert mc.CompileConfig(node_size=8).node_size == 8 and mc.CompileConfig().node_size is None
    with pytest.raises(
        ValueError, match=r"CompileConfig\.node_size: expected a positive number of ranks, or None, got"
    ):
        mc.CompileConfig(node_size=size)


def test_triples_are_taken_as_they_come() -> None:
    one, two = (3.0, -4.0, 2.0), (2.0, -1.5, 0.5)
    assert schedule(mc.MuonConfig(coefficients=one, ns_steps=3)) == (one, one, one)
    assert schedule(mc.MuonConfig(coefficients=(one, two), ns_steps=2)) == (one, two)


@pytest.mark.parametrize(
    "config",
    [mc.MuonConfig(), mc.AdamWConfig(), mc.CompileConfig()],
    ids=lambda config: type(config).__name__,
)
def test_a_config_is_frozen_and_takes_only_names(config: Any) -> None:
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, getattr(config, field))
    with pytest.raises(TypeError):
        type(config)(getattr(config, field))
    assert dataclasses.replace(config) == config


def test_configs_compare_and_hash_by_value() -> None:
    assert mc.MuonConfig(preset="keller") != mc.MuonConfig()
    assert len({mc.MuonConfig(), mc.MuonConfig(nesterov=True), mc.MuonConfig(nesterov=False)}) == 2
    assert len({mc.AdamWConfig(), mc.AdamWConfig(eps=1e-8), mc.AdamWConfig(amsgrad=True)}) == 2


def test_numbers_of_a_known_table_are_that_table() -> None:
    jordan = (3.4445, -4.7750, 2.0315)
    assert mc.MuonConfig(coefficients=jordan) == mc.MuonConfig(coefficients="jordan")
    assert mc.MuonConfig(coefficients=(jordan,) * 5).coefficients == "jordan"
    assert mc.MuonConfig(coefficients=YOU) == mc.MuonConfig(coefficients="you")
    other = (3.4445, -4.7750, 2.0316)
    assert mc.MuonConfig(coefficients=other).coefficients == other
    wrapped = mc.compile_step(torch.optim.Muon([torch.nn.Parameter(torch.ones(4, 6))]), backend="aot_eager")
    assert wrapped.plan.batches[0].config.coefficients == "jordan"
