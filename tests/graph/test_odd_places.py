"""Odd but legal surroundings: default devices, schedules that end below zero, odd numbers, odd shapes, gc."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

import muon_compile as mc
from tests.graph.twins import assert_equal, give, pair, parameters, run_both, wrap


@pytest.mark.parametrize("missing", [(), (0,)], ids=["all gradients", "one missing"])
def test_the_default_device_is_none_of_the_steps_business(missing: tuple[int, ...]) -> None:
    ours, optimizer, theirs, stock = pair()
    give(ours, theirs, seed=0, missing=missing)
    torch.set_default_device("meta")
    try:
        wrap(optimizer)
        optimizer.step()
    finally:
        torch.set_default_device(None)
    stock.step()
    assert_equal(ours, theirs)


def test_a_schedule_may_end_a_rounding_below_zero() -> None:
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    schedulers = [LinearLR(o, start_factor=1 / 3, end_factor=0.0, total_iters=5) for o in (optimizer, stock)]
    for seed in range(8):
        run_both(ours, optimizer, theirs, stock, range(seed, seed + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == stock.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = -1e-3
    with pytest.raises(ValueError, match=r"lr: expected a finite number >= 0"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["float32", "array", "int", "bool"])
def test_numbers_of_other_kinds(kind: str) -> None:
    value: Any = {"float32": numpy.float32(0.5), "array": numpy.array(0.5), "int": 1, "bool": True}[kind]
    ours, optimizer, theirs, stock = pair()
    wrap(optimizer)
    optimizer.param_groups[0]["lr"], stock.param_groups[0]["lr"] = value, float(value)
    run_both(ours, optimizer, theirs, stock, range(2))


@pytest.mark.parametrize("shape", [(5, 0), (0, 5), (0, 0)], ids=str)
def test_a_matrix_without_elements(shape: tuple[int, ...]) -> None:
    params = [*parameters(shape, shape), *parameters((8, 12))]
    optimizer = torch.optim.Muon(params)
    mc.compile_step(optimizer, backend="aot_eager")
    give(params, seed=0)
    before = params[2].detach().clone()
    optimizer.step()
    assert not torch.equal(params[2], before)


def test_exact_refuses_what_it_cannot_reproduce() -> None:
    params = parameters((8, 12), dtype=torch.bfloat16)
    optimizer = torch.optim.Muon(params, nesterov=False)
    with pytest.raises(ValueError, match="normalizes its momentum buffer in place"):
        mc.compile_step(optimizer, backend="aot_eager", config=mc.CompileConfig(exact=True))
    mc.compile_step(optimizer, backend="aot_eager")


def test_a_hook_that_raises_ends_the_iteration_for_both() -> None:
    matrices, rest = parameters((8, 12)), parameters((6,))
    muon, adamw = torch.optim.Muon(matrices), torch.optim.AdamW(rest)
    mc.compile_step(muon, adamw, backend="aot_eager")

    def angry(*_: object) -> None:
        raise OSError("a hook")

    handle = adamw.register_step_pre_hook(angry)
    give(matrices, rest, seed=0)
    muon.step()
    with pytest.raises(OSError, match="a hook"):
        adamw.step()
    handle.remove()
    for _ in range(2):
        muon.step()
        adamw.step()


def test_uninstalling_frees_memory_at_once() -> None:
    params = parameters((8, 12))
    optimizer = torch.optim.Muon(params)
    step = mc.compile_step(optimizer, backend="aot_eager")
    give(params, seed=0)
    optimizer.step()
    step.uninstall()
    alive = weakref.ref(params[0])
    gc.collect()
    gc.disable()
    try:
        del step, optimizer, params
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.inductor
def test_relative_eps_with_several_groups_and_missing_gradients_on_inductor() -> None:
    # torch 2.13's C++ backend cannot fuse a reduction with the in-place write of such a momentum.
    params = parameters((12, 8), (12, 8), (8, 12), (8, 12), (4, 6))
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    config = mc.MuonConfig(eps="relative", ns_dtype="float32")
    optimizers = [
        mc.Muon([{"params": p[::2], "lr": 0.1}, {"params": p[1::2], "lr": 0.2}], config=config, backend=backend)
        for p, backend in ((params, "inductor"), (twins, "aot_eager"))
    ]
    for seed, missing in enumerate([(), (0,), (3, 4)]):
        give(params, twins, seed=seed, missing=missing)
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(params, twins, strict=True):
            # float32 products in another order: a few roundings over three steps.
            assert (p - q).norm() <= 1e-5 * q.norm()
