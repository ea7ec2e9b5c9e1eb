"""Other libraries' optimizers in the ways people use them: resumed, skipped, without gradients, subclassed, changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter
from torch.optim import Optimizer

import muon_compile as mc
from muon_compile.adapters import FamilyAdapter, registry
from tests.graph.twins import give, parameters, values
from tests.originals import find, formulas
from tests.originals.training import eager_heavyball
from tests.reference import relative_error

# Two formulas of one function in float32.
FLOAT32 = 1e-5
CONFIG = mc.CompileConfig(ns_dtype="float32")
MATRICES, VECTORS = ((24, 64), (64, 24)), ((24,), (5, 7))


def wrap(optimizer: Any, **options: Any) -> mc.CompiledStep:
    config = mc.CompileConfig(ns_dtype="float32", **options)
    return mc.compile_step(optimizer, backend="aot_eager", config=config)


def own_step(optimizer: Optimizer) -> None:
    with find.as_float32(True):
        optimizer.step()


def alike(mine: list[Parameter], theirs: list[Parameter]) -> None:
    for a, e in zip(mine, theirs, strict=True):
        assert relative_error(a, e) <= FLOAT32, tuple(a.shape)


def hyper_adamw() -> tuple[list[Parameter], Optimizer]:
    params = parameters(*VECTORS, (3,))
    return params, formulas.HyperParallelAdamW(params, lr=0.02, weight_decay=0.1)


def hyper_muon() -> tuple[list[Parameter], Optimizer]:
    params = parameters(*MATRICES)
    return params, formulas.HyperParallelMuon(params, lr=0.02)


def dion_all() -> tuple[list[Parameter], Optimizer]:
    groups = [
        {"params": parameters(*MATRICES)},
        {"params": parameters(*VECTORS, seed=1), "algorithm": "adamw", "lr": 0.01},
        {"params": parameters(*VECTORS, seed=2), "algorithm": "lion", "lr": 0.01},
    ]
    return [p for group in groups for p in group["params"]], formulas.DionMuon(groups, lr=0.02)  # type: ignore[attr-defined]


def heavy(**options: Any) -> tuple[list[Parameter], Optimizer]:
    module = pytest.importorskip("heavyball")
    params = [Parameter(p.detach().double()) for p in parameters(*MATRICES)]
    return params, module.Muon(params, lr=0.02, **options)


COUNTING: dict[str, Callable[[], tuple[list[Parameter], Optimizer]]] = {
    "hyperparallel AdamW": hyper_adamw,
    "hyperparallel": hyper_muon,
    "dion": dion_all,
    "heavyball": lambda: heavy(warmup_steps=5),
}


@pytest.fixture(autouse=True)
def heavyball_is_eager() -> Iterator[None]:
    with eager_heavyball():
        yield


def counts(optimizer: Optimizer) -> list[int]:
    return [int(group.get("step_count") or group.get("step") or 0) for group in optimizer.param_groups]


# -- steps that do nothing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTING)
def test_a_step_without_any_gradient_counts_as_in_the_original(name: str) -> None:
    (theirs, stock), (mine, ours) = COUNTING[name](), COUNTING[name]()
    mc.compile_step(ours, backend="aot_eager", config=mc.CompileConfig(ns_dtype="float64" if "heavy" in name else None))
    everything = range(len(mine))
    for number in range(6):
        give(theirs, mine, seed=number, missing=everything if number % 2 else ())
        own_step(stock)
        ours.step()
    assert counts(ours) == counts(stock) == [6] * len(ours.param_groups)
    if "AdamW" in name or "heavy" in name:  # whose updates depend on the count
        alike(mine, theirs)


@pytest.mark.parametrize("name", COUNTING)
def test_a_skipped_step_counts_nothing_and_changes_nothing(name: str) -> None:
    """The original beside it is not stepped at all, as a GradScaler does it."""
    (theirs, stock), (mine, ours) = COUNTING[name](), COUNTING[name]()
    step = mc.compile_step(
        ours,
        backend="aot_eager",
        config=mc.CompileConfig(ns_dtype="float64" if "heavy" in name else "float32", nonfinite="skip"),
    )
    for number in range(6):
        give(theirs, mine, seed=number)
        if number in (0, 2, 3):
            assert mine[0].grad is not None
            mine[0].grad.view(-1)[0] = torch.nan
            before = values(mine)
            ours.step()
            assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
            continue
        own_step(stock)
        ours.step()
        alike(mine, theirs)
    assert step.skipped == 3
    assert counts(ours) == counts(stock) == [3] * len(ours.param_groups)


# -- HyperParallel's one count for a group ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wrapped midway", "loaded"])
def test_a_late_parameter_starts_at_the_count_of_its_group(how: str) -> None:
    (theirs, stock), (mine, ours) = hyper_adamw(), hyper_adamw()
    for number in range(3):
        give(theirs, mine, seed=number, missing=(2,))
        own_step(stock)
        own_step(ours)
    if how == "loaded":
        saved, (fresh, another) = copy.deepcopy(ours.state_dict()), hyper_adamw()
        with torch.no_grad():
            torch._foreach_copy_(fresh, mine)
        mine, ours = fresh, another
        wrap(ours)
        ours.load_state_dict(saved)
    else:
        wrap(ours)
    for number in (4, 5):
        give(theirs, mine, seed=number)
        own_step(stock)
        ours.step()
        alike(mine, theirs)


def test_a_count_that_somebody_sets_is_taken() -> None:
    (theirs, stock), (mine, ours) = hyper_adamw(), hyper_adamw()
    wrap(ours)
    for number in range(4):
        if number == 2:
            stock.param_groups[0]["step"] = ours.param_groups[0]["step"] = 40
        give(theirs, mine, seed=number)
        own_step(stock)
        ours.step()
    alike(mine, theirs)


def test_a_flat_checkpoint_of_a_chain_resumes_in_a_fresh_wrapped_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = parameters((24, 64), (64,))

    def make() -> tuple[Two, dict[str, Optimizer]]:
        model = Two()
        muon, adamw = formulas.HyperParallelMuon([model.weight]), formulas.HyperParallelAdamW([model.bias])
        return model, {"adamw": adamw, "muon": muon}

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    (model, leaves), (other, fresh) = make(), make()
    wrap(formulas.ChainedOptimizer(model, leaves))
    wrap(formulas.ChainedOptimizer(other, fresh))
    for number in range(5):
        give(list(model.parameters()), seed=number)
        for leaf in leaves.values():
            leaf.step()
    merged: dict[str, Any] = {}
    for leaf in leaves.values():
        merged |= get_optimizer_state_dict(model, leaf, options=options)
    other.load_state_dict(model.state_dict())
    for leaf in fresh.values():
        set_optimizer_state_dict(other, leaf, optim_state_dict=copy.deepcopy(merged), options=options)
    assert [leaf.param_groups[0]["step"] for leaf in fresh.values()] == [5, 5]
    give(list(model.parameters()), list(other.parameters()), seed=9)
    for leaf in (*leaves.values(), *fresh.values()):
        leaf.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_chain_refuses_a_closure_before_anything_changes() -> None:
    muon, adamw = parameters(*MATRICES), parameters(*VECTORS, seed=1)
    leaves = {"adamw": formulas.HyperParallelAdamW(adamw), "muon": formulas.HyperParallelMuon(muon)}
    chain = formulas.ChainedOptimizer(None, leaves)  # type: ignore[arg-type]
    wrap(chain)
    give(muon, adamw, seed=0)
    before = values(muon + adamw)
    with pytest.raises(ValueError, match="Evaluate it first"):
        chain.step(lambda: 0.0)
    assert all(torch.equal(a, b) for a, b in zip(muon + adamw, before, strict=True))
    chain.step()
    assert not torch.equal(muon[0], before[0])


# -- other releases, subclasses, changes in the middle ----------------------------------------------------------------


class OlderKeller(Optimizer):
    """KellerJordan's first release for one device: Nesterov and the number of steps are in its groups."""

    def __init__(self, params: Any, **entries: Any) -> None:
        super().__init__(params, {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95} | entries)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                raise NotImplementedError


OlderKeller.__qualname__ = OlderKeller.__name__ = "Muon"
OlderKeller.__module__ = "muon"


def test_older_releases_of_keller_keep_their_entries_and_skip() -> None:
    (params, others) = parameters(*MATRICES), parameters(*MATRICES)
    optimizer = OlderKeller(params, nesterov=False, ns_steps=3)
    step = wrap(optimizer)
    config = step.plan.buckets[0].config
    assert isinstance(config, mc.MuonConfig) and (config.nesterov, config.ns_steps) == (False, 3)
    give(params, seed=0)
    optimizer.step()  # from here on there is momentum to go on
    before = values(params)
    give(params, seed=1, missing=(1,))
    optimizer.step()
    assert torch.equal(params[1], before[1]) and not torch.equal(params[0], before[0])
    with pytest.raises(NotImplementedError, match="adamw_lr"):
        wrap(OlderKeller(others, adamw_lr=0.1))


def test_a_subclass_that_changes_more_than_its_constructor_is_refused() -> None:
    class Farther(formulas.MoonlightMuon):
        def __init__(self, params: Any) -> None:
            super().__init__(muon_params=params, lr=0.1)

    class Other(Farther):
        def step_group(self, group: dict[str, Any]) -> None:
            raise NotImplementedError

    assert wrap(Farther(parameters((8, 4)))).plan.buckets
    with pytest.raises(TypeError, match="overrides step_group of toy_train.Muon"):
        wrap(Other(parameters((8, 4))))


def test_somebody_elses_function_of_the_same_name_is_refused() -> None:
    import muon

    with pytest.raises(NotImplementedError, match=r"muon\.zeropower_via_newtonschulz5"):
        wrap(formulas.DionMuon(parameters((8, 4)), newton_schulz_func=muon.zeropower_via_newtonschulz5))
    optimizer = formulas.DionMuon(parameters((8, 4)))
    wrap(optimizer)
    optimizer._newton_schulz_func = lambda x, epsilon: x
    give(optimizer.param_groups[0]["params"], seed=0)
    with pytest.raises(NotImplementedError, match="newton_schulz_func"):
        optimizer.step()


def test_moonlight_parameters_change_sides() -> None:
    """As the original does it: the other algorithm begins anew, and goes on where it was when it comes back."""

    def make() -> tuple[list[Parameter], Optimizer]:
        params = parameters(*MATRICES)
        return params, formulas.MoonlightMuon(muon_params=params, lr=0.02, adamw_eps=1e-3)

    (theirs, stock), (mine, ours) = make(), make()
    wrap(ours)
    for number in range(9):
        if number in (3, 6):
            for params, optimizer in ((theirs, stock), (mine, ours)):
                optimizer.state[params[0]]["use_muon"] = number == 6
        give(theirs, mine, seed=number)
        own_step(stock)
        ours.step()
        alike(mine, theirs)


def test_heavyball_goes_by_what_it_was_made_with() -> None:
    (theirs, stock), (mine, ours) = heavy(), heavy()
    mc.compile_step(ours, backend="aot_eager", config=mc.CompileConfig(ns_dtype="float64"))
    for number in range(4):
        if number == 2:
            for optimizer in (stock, ours):
                optimizer.param_groups[0].update(nesterov=False, heavyball_momentum=True)
        give(theirs, mine, seed=number)
        own_step(stock)
        ours.step()
    alike(mine, theirs)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("ns_variant.*asym7", lambda: formulas.HyperParallelMuon(parameters((8, 4)), ns_variant="asym7")),
        ("ns_variant.*custom", lambda: formulas.HyperParallelMuon(parameters((8, 4)), ns_variant="custom")),
        ("adjust_lr.*bogus", lambda: formulas.DionMuon(parameters((8, 4)), adjust_lr="bogus")),
        (
            "num_heads.*flatten=True",
            lambda: formulas.DionMuon([{"params": parameters((8, 4)), "num_heads": 2, "flatten": True}]),
        ),
        ("num_heads.*2, 8, 4", lambda: formulas.DionMuon([{"params": parameters((2, 8, 4)), "num_heads": 2}])),
    ],
)
def test_what_the_original_refuses_is_refused(words: str, make: Callable[[], Optimizer]) -> None:
    with pytest.raises(ValueError, match=words):
        wrap(make())


def test_coefficients_that_change_in_place_are_a_new_plan() -> None:
    table = [[2.0, -1.5, 0.5], [2.0, -1.5, 0.5]]
    params = parameters(*MATRICES)
    optimizer = formulas.HyperParallelMuon(params, ns_variant="custom", ns_coefficients=table, ns_steps=2)  # type: ignore[arg-type]
    step = wrap(optimizer)
    give(params, seed=0)
    optimizer.step()
    table[0][0] = 1.9
    optimizer.step()
    config = step.plan.buckets[0].config
    assert isinstance(config, mc.MuonConfig) and config.coefficients[0] == (1.9, -1.5, 0.5)


# -- the whole iteration in one graph ---------------------------------------------------------------------------------


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(12, 8, bias=False), nn.Linear(6, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean()


def test_a_train_step_moves_what_keller_moves_without_a_gradient() -> None:
    import muon

    torch.manual_seed(0)
    model = Unused()
    other = copy.deepcopy(model)
    optimizer, stock = (muon.SingleDeviceMuon(list(m.parameters()), lr=0.1, weight_decay=0.5) for m in (model, other))
    train = mc.compile_train_step(model, None, optimizer, backend="aot_eager", config=CONFIG)
    for number in range(3):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(number))
        train(x)
        stock.zero_grad()
        other(x).backward()
        other.idle.weight.grad = torch.zeros_like(other.idle.weight)
        own_step(stock)
    alike(list(model.parameters()), list(other.parameters()))


def test_a_train_step_leaves_gradients_that_lie_about() -> None:
    module = pytest.importorskip("heavyball")
    model = Unused()
    optimizer = module.Muon(list(model.parameters()), lr=0.1)
    train = mc.compile_train_step(model, None, optimizer, backend="aot_eager")
    model.used.weight.grad = torch.ones_like(model.used.weight)
    train(torch.ones(4, 12))
    assert model.used.weight.grad is not None and int(optimizer.param_groups[0]["step_count"]) == 1


# -- adapters of one's own --------------------------------------------------------------------------------------------


class Plain(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


class PlainAdapter(FamilyAdapter):
    class_paths = (f"{Plain.__module__}.{Plain.__qualname__}",)

    def algorithm(self, group: Any) -> Any:
        return "muon"

    def config(self, group: Any) -> mc.MuonConfig:
        return mc.MuonConfig()

    def hyper(self, group: Any) -> dict[str, float | Tensor]:
        return {"lr": group["lr"], "momentum": 0.9}


def test_half_made_adapters_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    before = registry.known_optimizers()
    with pytest.raises(TypeError, match="got the class PlainAdapter; call it"):
        mc.register_adapter(PlainAdapter)
    with pytest.raises(TypeError, match="class_paths: expected a tuple"):
        mc.register_adapter(type("Text", (PlainAdapter,), {"class_paths": "mine.Plain"})())
    assert registry.known_optimizers() == before
    mc.register_adapter(PlainAdapter())
    with pytest.raises(ValueError, match=r"weight_decay.*PlainAdapter\.hyper"):
        wrap(Plain(parameters((8, 4))))


# -- words ------------------------------------------------------------------------------------------------------------


def test_a_misspelt_path_is_told_of_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))
    adapter = PlainAdapter(f"{Plain.__module__}.Plian")
    mc.register_adapter(adapter)
    with pytest.raises(TypeError, match=r"no adapter knows \S+\.Plain; \S+\.Plian is known\. A copy"):
        wrap(Plain(parameters((8, 4))))


def test_another_librarys_state_is_refused_with_the_way_out() -> None:
    import muon

    def keller() -> Optimizer:
        optimizer: Optimizer = muon.SingleDeviceMuon(parameters(*MATRICES))
        return optimizer

    stock = torch.optim.Muon(parameters(*MATRICES), nesterov=False, ns_steps=3)
    wrapped, plain = keller(), keller()
    wrap(wrapped)
    with pytest.raises(ValueError, match=r"muon\.SingleDeviceMuon, whose groups have no .*nesterov.*convert_state"):
        wrapped.load_state_dict(stock.state_dict())
    moonlight = formulas.MoonlightMuon(muon_params=parameters(*MATRICES))
    with pytest.raises(ValueError, match=r"weight_decay.*convert_state"):
        wrapped.load_state_dict(moonlight.state_dict())
    plain.load_state_dict(torch.optim.AdamW(parameters(*MATRICES)).state_dict())  # which nobody checks
    with pytest.raises(ValueError, match=r"Group 0: expected entries as KellerAdapter.*convert_state"):
        wrap(plain)
