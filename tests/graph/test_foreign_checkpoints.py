"""Files that are cut short or another's: refused before anything changes. And state that stock and ours hand over."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import muon_compile as mc
from tests.graph.twins import EXACT, SHAPES, assert_equal, give, parameters, values

VECTORS = ((8,), (5,), (3, 4))


def named(params: list[Parameter], prefix: str = "") -> list[tuple[str, Parameter]]:
    return [(f"{prefix}layer{i}", p) for i, p in enumerate(params)]


def make(kind: str, params: list[Parameter], prefix: str = "") -> Optimizer:
    """A compiled optimizer of a kind, with named parameters."""
    if kind == "own":
        return mc.Muon(named(params, prefix), lr=0.1, backend="aot_eager", compile_config=EXACT)
    optimizer = stock(kind, params, prefix)
    mc.compile_step(optimizer, backend="aot_eager", config=EXACT)
    return optimizer


def stock(kind: str, params: list[Parameter], prefix: str = "") -> Optimizer:
    classes: dict[str, Any] = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    more = {"momentum": 0.9} if kind == "sgd" else {}
    optimizer: Optimizer = classes[kind](named(params, prefix), lr=0.1, **more)
    return optimizer


def train(params: list[Parameter], optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        give(params, seed=seed)
        optimizer.step()


def everything(optimizer: Optimizer) -> list[Tensor]:
    """Copies of parameters and all state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return values([*params, *(t for p in params for t in optimizer.state[p].values())])


def hyper(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def filed(thing: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


# -- interchange with stock -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("into", ["ours", "stock", "both ours"])
def test_adamw_goes_on_from_the_others_file(into: str, amsgrad: bool) -> None:
    first, second = parameters(*VECTORS), parameters(*VECTORS, seed=9)
    source = torch.optim.AdamW(first, lr=0.1, amsgrad=amsgrad)
    target = torch.optim.AdamW(second, lr=0.3, amsgrad=amsgrad)
    steps = [mc.compile_step(o, backend="aot_eager") for o in (source, target) if o is target or into != "ours"]
    if into == "stock":
        steps.pop().uninstall()
    train(first, source, range(3))
    train(second, target, range(50, 51))
    before = [(s.stats.compiles, s.stats.recompiles) for s in steps]
    with torch.no_grad():
        for p, q in zip(second, first, strict=True):
            p.copy_(q)
    target.load_state_dict(torch.load(filed(source.state_dict()), weights_only=True))
    loaded = values(second)
    assert_equal(everything(target), everything(source))
    train(first, source, range(3, 8))
    train(second, target, range(3, 8))
    for p, q, old in zip(second, first, loaded, strict=True):
        # Both compute in float32, in another order: roundings of parameters of size 1 that move by 0.1 a step.
        assert (p - q).norm() <= 1e-5 * (q - old).norm()
        assert (q - old).norm() > 0.1
    assert [float(target.state[p]["step"]) for p in second] == [8.0] * len(VECTORS)
    assert [(s.stats.compiles, s.stats.recompiles) for s in steps] == before


# -- refused, with nothing changed ----------------------------------------------------------------------------------


def other_names(kind: str) -> dict[str, Any]:
    params = parameters(*SHAPES, seed=3)
    swapped = make(kind, [params[1], params[0], params[2]])
    names = swapped.param_groups[0]["param_names"]
    swapped.param_groups[0]["param_names"] = [names[1], names[0], names[2]]
    return swapped.state_dict()


def other_shapes(kind: str) -> dict[str, Any]:
    return make(kind, parameters((8, 12), (8, 12), (16, 9), seed=3)).state_dict()


def fewer_parameters(kind: str) -> dict[str, Any]:
    return make(kind, parameters(*SHAPES[:2], seed=3)).state_dict()


def another_group(kind: str) -> dict[str, Any]:
    optimizer = make(kind, parameters(*SHAPES, seed=3))
    optimizer.add_param_group({"params": [("more", *parameters((8, 12), seed=4))]})
    return optimizer.state_dict()


def another_class(kind: str) -> dict[str, Any]:
    params = parameters(*SHAPES, seed=3)
    optimizer = stock("muon" if kind == "adamw" else "adamw", params)
    train(params, optimizer, range(2))
    return optimizer.state_dict()


def another_class_without_state(kind: str) -> dict[str, Any]:
    return stock("muon" if kind == "adamw" else "adamw", parameters(*SHAPES, seed=3)).state_dict()


def sgd(kind: str) -> dict[str, Any]:
    """Its state has Muon's names and shapes."""
    params = parameters(*SHAPES, seed=3)
    optimizer = stock("sgd", params)
    train(params, optimizer, range(2))
    return optimizer.state_dict()


def another_algorithm(kind: str) -> dict[str, Any]:
    made = mc.Muon([{"params": named(parameters(*SHAPES, seed=3)), "algorithm": "adamw"}], backend="aot_eager")
    return {**made.state_dict(), "state": {}}


FOREIGN: tuple[Callable[[str], dict[str, Any]], ...] = (
    other_names,
    other_shapes,
    fewer_parameters,
    another_group,
    another_class,
    another_class_without_state,
    sgd,
    another_algorithm,
)


@pytest.mark.parametrize("kind", ["muon", "adamw", "own"])
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.__name__)
def test_a_foreign_state_dict_changes_nothing(kind: str, foreign: Callable[[str], dict[str, Any]]) -> None:
    params = parameters(*SHAPES)
    optimizer = make(kind, params)
    train(params, optimizer, range(2))
    before, numbers = everything(optimizer), hyper(optimizer)
    twin = copy.deepcopy(optimizer)
    state_dict = foreign(kind)
    with pytest.raises(ValueError, match=r"State|state|group"):
        optimizer.load_state_dict(state_dict)
    assert_equal(everything(optimizer), before)
    assert hyper(optimizer) == numbers
    copies = [p for group in twin.param_groups for p in group["params"]]
    make_compiled(twin)
    train(params, optimizer, range(2, 4))
    train(copies, twin, range(2, 4))
    assert_equal(params, copies)


def make_compiled(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, mc.Muon):
        mc.compile_step(optimizer, backend="aot_eager", config=EXACT)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_truncated_file_changes_nothing(kept: float) -> None:
    params = parameters(*SHAPES)
    optimizer = make("own", params)
    train(params, optimizer, range(2))
    file = filed(optimizer.state_dict()).getvalue()
    train(params, optimizer, range(2, 3))
    before = everything(optimizer)
    with pytest.raises(RuntimeError):
        optimizer.load_state_dict(torch.load(io.BytesIO(file[: int(len(file) * kept)]), weights_only=True))
    assert_equal(everything(optimizer), before)


# -- what belongs to the run, not to the file -----------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_names_that_a_wrapper_gave_are_the_same_parameters(prefix: str) -> None:
    ours, resumed = parameters(*SHAPES), parameters(*SHAPES, seed=9)
    first, optimizer = make("muon", ours, prefix), make("muon", resumed)
    train(ours, first, range(2))
    optimizer.load_state_dict(first.state_dict())
    assert_equal(everything(optimizer)[len(SHAPES) :], everything(first)[len(SHAPES) :])
    assert optimizer.param_groups[0]["param_names"] == ["layer0", "layer1", "layer2"]


def test_names_can_be_left_out_where_a_model_was_renamed() -> None:
    ours, resumed = parameters(*SHAPES), parameters(*SHAPES, seed=9)
    first, optimizer = make("muon", ours, "before."), make("muon", resumed, "after.")
    train(ours, first, range(2))
    state_dict = first.state_dict()
    with pytest.raises(ValueError, match=r"'after\.layer0'.*'before\.layer0'.*remove 'param_names'"):
        optimizer.load_state_dict(state_dict)
    del state_dict["param_groups"][0]["param_names"]
    optimizer.load_state_dict(state_dict)
    assert_equal(everything(optimizer)[len(SHAPES) :], everything(first)[len(SHAPES) :])


@pytest.mark.parametrize("live", [None, "all_gather"])
def test_a_strategy_is_the_runs_and_not_the_files(live: str | None) -> None:
    params = parameters(*SHAPES)
    optimizer = make("own", params)
    if live is not None:
        optimizer.param_groups[0]["strategy"] = live
    train(params, optimizer, range(1))
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0]["strategy"] = "gather_scatter"
    assert isinstance(optimizer, mc.Muon)
    before = optimizer.compiled.stats.compiles
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0].get("strategy") == live
    train(params, optimizer, range(1, 2))
    assert optimizer.compiled.stats.compiles == before


def test_groups_of_an_older_release_are_completed_as_stock_does() -> None:
    ours, theirs = parameters(*VECTORS), parameters(*VECTORS)
    optimizer, reference = make("adamw", ours), stock("adamw", theirs)
    state_dict = reference.state_dict()
    for name in ("maximize", "foreach", "capturable", "differentiable", "fused"):
        del state_dict["param_groups"][0][name]
    for each in (optimizer, reference):
        each.load_state_dict(copy.deepcopy(state_dict))
    assert optimizer.param_groups[0].keys() == reference.param_groups[0].keys()
    train(ours, optimizer, range(2))
    train(theirs, reference, range(2))
    assert_equal(ours, theirs, atol=1e-6)
