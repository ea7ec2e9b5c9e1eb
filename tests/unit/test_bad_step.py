"""A step that fails before its kernels changes nothing; one that fails inside them says so until state is loaded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer

import muon_compile as mc
from muon_compile.run import binding as binding_module
from tests.unit.untouched import refused

EXACT = mc.CompileConfig(exact=True)


def muon(*shape: int) -> tuple[Parameter, Muon]:
    param = Parameter(torch.randn(shape or (8, 12), generator=torch.Generator().manual_seed(0)))
    return param, Muon([("block.weight", param)], lr=0.5)


def step(optimizer: Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


# -- before the kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense_first", [False, True])
def test_a_sparse_gradient(dense_first: bool) -> None:
    layer = nn.Embedding(6, 4, sparse=True)
    optimizer = AdamW([("table", layer.weight)], lr=0.5)
    compiled = mc.compile_step(optimizer, backend="aot_eager")
    if dense_first:
        step(optimizer)
        layer.weight.grad = None
    layer(torch.tensor([1, 3])).sum().backward()
    with refused(ValueError, "'table'", "dense", "sparse_coo", "sparse=False", by=[optimizer]):
        optimizer.step()
    assert compiled.stats.steps == int(dense_first)
    step(optimizer)
    assert compiled.stats.steps == 1 + int(dense_first)


def test_a_sparse_gradient_of_a_matrix_for_muon() -> None:
    param, optimizer = muon()
    mc.compile_step(optimizer, backend="aot_eager")
    param.grad = torch.randn(8, 12).to_sparse()
    with refused(ValueError, "'block.weight'", "dense", "sparse_coo", by=[optimizer]):
        optimizer.step()


def test_a_complex_gradient() -> None:
    param, optimizer = muon()
    mc.compile_step(optimizer, backend="aot_eager")
    step(optimizer)
    param.grad = None
    param.grad_dtype = None  # torch then takes a gradient of any dtype
    param.grad = torch.randn(8, 12, dtype=torch.complex64)
    with refused(ValueError, "'block.weight'", "real floating", "complex64", by=[optimizer]):
        optimizer.step()


@pytest.mark.parametrize("shape", [(8, 12), (8, 8)])
def test_a_parameter_that_was_transposed_in_place(shape: tuple[int, int]) -> None:
    param, optimizer = muon(*shape)
    mc.compile_step(optimizer, backend="aot_eager")
    step(optimizer)
    param.grad = None
    param.data = param.data.t()
    param.grad = torch.randn(param.shape)
    with refused(ValueError, "'block.weight'", "contiguous", by=[optimizer]):
        optimizer.step()


def test_a_parameter_that_became_a_vector() -> None:
    param, optimizer = muon()
    mc.compile_step(optimizer, backend="aot_eager")
    step(optimizer)
    param.grad = None
    param.data = param.data.flatten()
    param.grad = torch.randn(param.shape)
    with refused(ValueError, "'block.weight'", "2-D", "(96,)", by=[optimizer]):
        optimizer.step()


def test_a_group_that_was_added_with_a_vector() -> None:
    _, optimizer = muon()
    compiled = mc.compile_step(optimizer, backend="aot_eager")
    step(optimizer)
    optimizer.add_param_group({"params": [("block.bias", Parameter(torch.randn(5)))]})
    with refused(ValueError, "'block.bias'", "2-D", "(5,)", "AdamW", by=[optimizer]):
        optimizer.step()
    del optimizer.param_groups[1]
    step(optimizer)
    assert compiled.stats.steps == 2 and compiled.stats.compiles == 1


def test_state_that_does_not_fit() -> None:
    param, optimizer = muon()
    optimizer.state[param]["momentum_buffer"] = torch.zeros(8, 6)
    with refused(ValueError, "'block.weight'", "momentum_buffer", "(8, 12)", "(8, 6)", by=[optimizer]):
        mc.compile_step(optimizer, backend="aot_eager")
    del optimizer.state[param]
    mc.compile_step(optimizer, backend="aot_eager")
    step(optimizer)
    other = muon(8, 6)[1]
    step(other)
    with refused(ValueError, "'block.weight'", "momentum_buffer", "(8, 12)", "(8, 6)", by=[optimizer]):
        optimizer.load_state_dict(other.state_dict())
    with refused(ValueError, "'state' and 'param_groups'", by=[optimizer]):
        optimizer.load_state_dict({})


def test_a_failed_compile_changes_nothing_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    param, optimizer = muon()
    stepper = mc.compile_step(optimizer, backend="aot_eager", config=EXACT)
    twin, stock = muon()
    step(stock)

    def out_of_disk(*_: Any) -> Any:
        raise OSError("no space left on device")

    param.grad = torch.ones_like(param)
    with monkeypatch.context() as patch:
        patch.setattr(binding_module, "lower_step", out_of_disk)
        with refused(OSError, "no space left", by=[optimizer]):
            optimizer.step()
    step(optimizer)
    assert torch.equal(param, twin) and stepper.stats.steps == 1


# -- inside the kernels -------------------------------------------------------------------------------------------


def break_kernels(compiled: mc.CompiledStep, error: BaseException) -> list[int]:
    """Let every compiled graph ruin its first input, then fail. Returns a list that grows with each attempt."""
    attempts: list[int] = []

    def run(inputs: list[Tensor]) -> object:
        attempts.append(len(inputs))
        inputs[0].mul_(float("nan"))
        raise error

    assert compiled._binding is not None
    graphs = compiled._binding.graphs
    assert graphs
    for kind, (traced, graph) in list(graphs.items()):
        graphs[kind] = (traced, dataclasses.replace(graph, run=run))
    return attempts


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which would end the test run when the test fails."""


@pytest.mark.parametrize("error", [RuntimeError("peer is gone"), Interrupt("by the user")], ids=["error", "interrupt"])
def test_a_failure_inside_the_kernels_stops_the_step_until_state_is_loaded(error: BaseException) -> None:
    param, optimizer = muon()
    twin, stock = muon()
    compiled = mc.compile_step(optimizer, backend="aot_eager", config=EXACT)
    for one in (optimizer, stock):
        step(one, seed=1)
    saved, weights = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
    assert compiled._binding is not None
    graphs = dict(compiled._binding.graphs)

    attempts = break_kernels(compiled, error)
    with pytest.raises(type(error), match=str(error)):
        optimizer.step()
    with refused(RuntimeError, "failed inside its kernels", str(error), "load_state_dict", by=[optimizer]):
        optimizer.step()
    with refused(RuntimeError, "failed inside its kernels", by=[optimizer]):
        compiled()
    assert len(attempts) == 1 and compiled.stats.steps == 1

    compiled._binding.graphs.update(graphs)
    with refused(RuntimeError, "failed inside its kernels", by=[optimizer]):
        optimizer.step()
    with torch.no_grad():
        param.copy_(weights)
    optimizer.load_state_dict(saved)
    for one in (optimizer, stock):
        step(one, seed=2)
    assert torch.equal(param, twin) and compiled.stats.compiles == 1


def test_a_broken_joint_step_stops_both_optimizers_however_it_is_called() -> None:
    _, first = muon()
    second = AdamW([("bias", Parameter(torch.randn(4)))])
    compiled = mc.compile_step(first, second, backend="aot_eager")
    for group in (*first.param_groups, *second.param_groups):
        group["params"][0].grad = torch.ones_like(group["params"][0])
    compiled()
    break_kernels(compiled, RuntimeError("peer is gone"))
    with pytest.raises(RuntimeError, match="peer is gone"):
        compiled()
    with refused(RuntimeError, "failed inside its kernels", by=[first, second]):
        compiled()
    with refused(RuntimeError, "failed inside its kernels", by=[first, second]):
        first.step()
    first.add_param_group({"params": [("more", Parameter(torch.randn(3, 3)))]})
    with refused(RuntimeError, "failed inside its kernels", by=[first, second]):
        compiled()


# -- state that was replaced behind the step's back ---------------------------------------------------------------


def test_a_replaced_state_entry_is_taken_over() -> None:
    """As the stock optimizer does; a step that goes on with hidden state would save something else than it uses."""
    param, optimizer = muon()
    twin, stock = muon()
    mc.compile_step(optimizer, backend="aot_eager", config=EXACT)
    for one, weight in ((optimizer, param), (stock, twin)):
        step(one, seed=1)
        one.state[weight]["momentum_buffer"] = torch.zeros(8, 12)
        step(one, seed=2)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], stock.state[twin]["momentum_buffer"])
    assert torch.equal(param, twin)


def test_wrapping_twice_keeps_one_state() -> None:
    param, optimizer = muon()
    twin, stock = muon()
    step(stock, seed=1)
    first = mc.compile_step(optimizer, backend="aot_eager", config=EXACT)
    step(optimizer, seed=1)
    second = None
    with contextlib.suppress(ValueError):  # to refuse is as good as to take over
        second = mc.compile_step(optimizer, backend="aot_eager", config=EXACT)
    if second is not None:
        first.uninstall()
    for one in (optimizer, stock):
        step(one, seed=2)
    assert torch.equal(optimizer.state[param]["momentum_buffer"], stock.state[twin]["momentum_buffer"])
    for one in (optimizer, stock):
        step(one, seed=3)
    assert torch.equal(param, twin)
