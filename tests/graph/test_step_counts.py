"""How often a step is compiled, and what the host does for each step."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import muon_compile as mc
from muon_compile.lower import trace
from muon_compile.run import binding
from tests.graph.twins import EXACT, SHAPES, assert_equal, give, parameters, values, wrap


class HostWork(TorchDispatchMode):
    """Counts compiles, calls into compiled code, and operators that the host dispatches outside those calls."""

    def __init__(self) -> None:
        super().__init__()
        self.compiles = 0
        self.launches = 0
        self.operators: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside:
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))

    def watch(self, lower_step: Callable[..., Any]) -> Callable[..., Any]:
        """``lower_step`` whose graphs report when they run."""

        def watched(*args: Any) -> Any:
            traced, compiled = lower_step(*args)

            def run(inputs: list[Tensor]) -> object:
                self.launches += 1
                self._inside = True
                try:
                    return compiled.run(inputs)
                finally:
                    self._inside = False

            return traced, dataclasses.replace(compiled, run=run)

        return watched


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostWork:
    """Counters that do not rely on ``step.stats``."""
    work = HostWork()
    make_fx = trace.make_fx

    def counted(*args: Any, **kwargs: Any) -> Any:
        work.compiles += 1
        return make_fx(*args, **kwargs)

    monkeypatch.setattr(trace, "make_fx", counted)
    monkeypatch.setattr(binding, "lower_step", work.watch(binding.lower_step))
    return work


def as_float(value: float) -> float:
    return value


def as_tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def alternating() -> Callable[[float], float | Tensor]:
    kinds = itertools.cycle([as_float, as_tensor, as_tensor, as_float, as_float])
    return lambda value: next(kinds)(value)


# -- compiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [as_float, as_tensor, alternating()], ids=["floats", "0-d tensors", "both in turn"])
def test_fifty_different_steps_compile_once(host: HostWork, kind: Callable[[float], Any]) -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, stock = torch.optim.Muon(ours), torch.optim.Muon(theirs)
    step = wrap(optimizer)
    held = []
    for number in range(50):
        hyper = {"lr": 0.1 / (1 + number), "weight_decay": 0.01 * number, "momentum": 0.5 + 0.009 * number}
        optimizer.param_groups[0].update({name: kind(value) for name, value in hyper.items()})
        stock.param_groups[0].update(hyper)
        give(ours, theirs, seed=number)
        held.append([p.grad for p in ours])  # so that every gradient has an address of its own
        if number == 20:
            saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(stock.state_dict())
        if number == 30:
            optimizer.load_state_dict(saved[0])
            stock.load_state_dict(saved[1])
            optimizer.param_groups[0].update({name: kind(value) for name, value in hyper.items()})
            stock.param_groups[0].update(hyper)
        optimizer.step()
        stock.step()
        assert_equal(ours, theirs)
    assert host.compiles == 1, "lr, weight decay, momentum, gradient addresses or loaded state made it compile again"
    assert host.launches == 50
    stats = step.stats
    assert (stats.compiles, stats.graphs, stats.recompiles, stats.graph_breaks) == (1, 1, 0, 0)
    assert (stats.steps, stats.host_launches) == (50, 1)


@pytest.mark.parametrize("first", [(), (1,)], ids=["all present first", "one missing first"])
def test_missing_gradients_compile_one_more_graph(host: HostWork, first: tuple[int, ...]) -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, stock = torch.optim.Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    step = wrap(optimizer)
    patterns = [first, *itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in range(4))]
    for number, missing in enumerate(patterns + patterns[::-1]):
        give(ours, theirs, seed=number, missing=missing)
        optimizer.param_groups[0]["lr"] = stock.param_groups[0]["lr"] = 0.1 / (1 + number)
        before = values(ours)
        optimizer.step()
        stock.step()
        assert_equal(ours, theirs)
        assert_equal([ours[i] for i in missing], [before[i] for i in missing])
        assert step.stats.host_launches == (0 if len(missing) == 3 else 1)
    assert host.compiles == 2, "a pattern of missing gradients made it compile again"
    assert (step.stats.compiles, step.stats.graphs, step.stats.recompiles) == (2, 2, 0)


def test_missing_gradients_of_another_dtype_compile_one_more_graph(host: HostWork) -> None:
    ours = parameters(*SHAPES, dtype=torch.bfloat16)
    for param in ours:
        param.grad_dtype = torch.float32
    optimizer = torch.optim.Muon(ours, lr=0.1)
    wrap(optimizer)
    for number, missing in enumerate([(0,), (1,), (), (2,), (0, 1), ()]):
        give(ours, seed=number, missing=missing)
        optimizer.step()
    assert host.compiles == 2, "a missing gradient was planned in another dtype than those that are there"


def test_a_frozen_parameter_costs_no_further_graph(host: HostWork) -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    optimizer, stock = torch.optim.Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    wrap(optimizer)
    ours[0].requires_grad_(False)
    before = values(ours[:1])
    for number in range(3):
        give(ours[1:], theirs[1:], seed=number)
        optimizer.step()
        stock.step()
    assert_equal(ours, theirs)
    assert_equal(ours[:1], before)
    assert host.compiles == 1


def test_case_a04_any_learning_rate_compiles_once(host: HostWork) -> None:
    for kind in (as_float, as_tensor):
        host.compiles = 0
        ours, theirs = parameters((6, 4), (6, 4)), parameters((6, 4), (6, 4))
        optimizer, stock = torch.optim.Muon(ours), torch.optim.Muon(theirs)
        mc.compile_step(optimizer, backend="aot_eager")
        for number in range(7):
            optimizer.param_groups[0]["lr"] = kind(0.7 - 0.1 * number)
            stock.param_groups[0]["lr"] = 0.7 - 0.1 * number
            give(ours, theirs, seed=number)
            before = values(ours), values(theirs)
            optimizer.step()
            stock.step()
            for p, old, q, old_q in zip(ours, before[0], theirs, before[1], strict=True):
                moved, expected = p.detach() - old, q.detach() - old_q
                # Two bf16 iterations of a matrix this small differ by up to 3e-2; another lr would by 0.1 and more.
                assert (moved - expected).norm() <= 4e-2 * expected.norm()
        assert host.compiles == 1


@pytest.mark.parametrize("missing", [(0, 1, 2, 3), (0, 2)], ids=["all None", "one of two None"])
def test_case_a05_a_step_without_gradients_is_not_remembered(host: HostWork, missing: tuple[int, ...]) -> None:
    shapes = (*SHAPES[:2], (8,), (8,))
    ours, theirs = parameters(*shapes), parameters(*shapes)
    optimizers = [(torch.optim.Muon(p[:2], lr=0.1), torch.optim.AdamW(p[2:], lr=0.1)) for p in (ours, theirs)]
    wrap(*optimizers[0])
    counted = []
    for number in range(6):
        absent = missing if number == 3 else ()
        give(ours, theirs, seed=number, missing=absent)
        before = values(ours)
        for optimizer in itertools.chain(*optimizers):
            optimizer.step()
        assert_equal(ours[:2], theirs[:2])
        assert_equal(ours[2:], theirs[2:], atol=1e-6)
        assert_equal([ours[i] for i in absent], [before[i] for i in absent])
        counted.append(int(optimizers[0][1].state[ours[2]]["step"]))
    assert counted == [1, 2, 3, 3, 4, 5]
    assert host.compiles == (1 if len(missing) == 4 else 2)


# -- the host's share of a step -------------------------------------------------------------------------------------


def joint_step(count: int) -> tuple[list[Any], tuple[torch.optim.Optimizer, torch.optim.Optimizer]]:
    params = parameters(*[(8, 12)] * count, *[(8,)] * count)
    pair = torch.optim.Muon(params[:count]), torch.optim.AdamW(params[count:])
    mc.compile_step(*pair, backend="aot_eager")
    give(params, seed=0)
    for optimizer in pair:
        optimizer.step()
    return params, pair


def host_operators(host: HostWork, count: int, kind: Callable[[float], Any], missing: tuple[int, ...]) -> list[str]:
    params, (muon, adamw) = joint_step(count)
    for _ in range(2):  # the second one is counted: a graph for missing gradients is compiled in the first
        give(params, seed=1, missing=missing)
        muon.param_groups[0].update(lr=kind(0.03), weight_decay=kind(0.2), momentum=kind(0.9))
        adamw.param_groups[0].update(lr=kind(0.04), weight_decay=kind(0.3), betas=(kind(0.8), kind(0.95)))
        host.launches, host.operators = 0, []
        with host:
            muon.step()
            adamw.step()
    assert host.launches == 1
    return host.operators


@pytest.mark.parametrize("kind", [as_float, as_tensor], ids=["floats", "0-d tensors"])
@pytest.mark.parametrize("missing", [(), (1, 3)], ids=["all present", "some missing"])
def test_host_operators_do_not_follow_the_parameters(
    host: HostWork, kind: Callable[[float], Any], missing: tuple[int, ...]
) -> None:
    few = host_operators(host, 5, kind, missing)
    many = host_operators(host, 150, kind, missing)
    assert few == many
    assert len(many) <= 10, many


def test_host_operators_are_counted_and_the_compiled_call_is_not(host: HostWork) -> None:
    params = parameters(*SHAPES)
    stock = torch.optim.Muon(params)
    give(params, seed=0)
    with host:
        stock.step()
    assert len(host.operators) > 50
    wrap(stock)
    host.operators = []
    with host:
        stock.step()  # compiles, which the host does operator by operator
        compiling, host.operators = len(host.operators), []
        stock.step()
    assert compiling > 10 >= len(host.operators)


def test_fx_nodes_grow_by_the_inputs_only() -> None:
    nodes = {}
    for count in (2, 3, 40):
        params = parameters(*[(8, 12)] * count, *[(16, 8)] * count)
        optimizer = torch.optim.Muon(params)
        step = mc.compile_step(optimizer, backend="aot_eager")
        for kind, missing in (("all", ()), ("masked", (0,))):
            give(params, seed=0, missing=missing)
            optimizer.step()
            nodes[kind, count] = step.stats.fx_nodes - 2 * len(params)  # a parameter and a gradient each
    for kind in ("all", "masked"):
        assert nodes[kind, 2] == nodes[kind, 3] == nodes[kind, 40]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_nothing_is_kept_from_step_to_step() -> None:
    params = parameters(*[(48, 48)] * 12, *[(64,)] * 4)
    muon, adamw = torch.optim.Muon(params[:12]), torch.optim.AdamW(params[12:])
    mc.compile_step(muon, adamw, backend="aot_eager")

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    seen = []
    for number in range(201):
        muon.param_groups[0]["lr"] = as_tensor(0.01 / (1 + number))
        give(params, seed=number, missing=(number % 12, 12 + number % 4) if number % 2 else ())
        muon.step()
        adamw.step()
        if number in (5, 200):
            for param in params:
                param.grad = None
            seen.append((live_tensors(), resident_bytes()))
    (tensors, resident), (tensors_later, resident_later) = seen
    assert tensors_later == tensors
    # A gradient set or a temporary kept per step would be 108 KiB each, 20 MiB in all.
    assert resident_later - resident < 8 * 2**20


@pytest.mark.inductor
def test_inductor_compiles_once_and_is_launched_once(host: HostWork, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    compile_fx_inner, lowered = compile_fx.compile_fx_inner, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        lowered.append(args[0])
        return compile_fx_inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", counted)
    shapes = (*SHAPES[:2], (8,))
    ours, theirs = parameters(*shapes), parameters(*shapes)
    (muon, adamw), stocks = [(torch.optim.Muon(p[:2]), torch.optim.AdamW(p[2:])) for p in (ours, theirs)]
    step = mc.compile_step(muon, adamw, config=EXACT)
    kind = alternating()
    for number in range(12):
        give(ours, theirs, seed=number)
        lr, weight_decay = 0.1 / (1 + number), 0.01 * number
        muon.param_groups[0].update(lr=kind(lr), weight_decay=kind(weight_decay))
        stocks[0].param_groups[0].update(lr=lr, weight_decay=weight_decay)
        if number == 6:
            muon.load_state_dict(copy.deepcopy(muon.state_dict()))
        host.operators = []
        before = host.compiles
        with host:
            muon.step()
            adamw.step()
        assert host.compiles > before or len(host.operators) <= 10
        for stock in stocks:
            stock.step()
    assert_equal(ours, theirs, atol=3e-3)
    assert (host.compiles, len(lowered), host.launches) == (1, 1, 12)
    assert (step.stats.compiles, step.stats.recompiles, step.stats.host_launches) == (1, 0, 1)
