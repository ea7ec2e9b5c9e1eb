"""Optimizer state over ranks: DTensors as the parameters are, saved and loaded as any optimizer's."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import muon_compile as mc
from tests.dist.models import (
    MATRICES,
    WORLD,
    Job,
    Model,
    assert_same,
    compiled,
    give,
    momenta_of,
    optimizer_of,
    params_of,
    raised,
    sharded_model,
    whole,
)
from tests.dist.ranks import Ranks

pytestmark = pytest.mark.dist

JOB = Job(shapes={name: MATRICES[name] for name in ("even", "even_too", "five", "one", "experts", "vector")})
HSDP = Job(shapes=JOB.shapes, mesh=(2, 2))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def started(job: Job, steps: int = 2, first: int = 0) -> tuple[Model, mc.Muon, mc.CompiledStep]:
    """A sharded model, its optimizer and its compiled step after a few steps."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    go_on(model, optimizer, range(first, first + steps))
    return model, optimizer, step


def go_on(model: Model, optimizer: mc.Muon, steps: range) -> None:
    for number in steps:
        give(model, number)
        optimizer.step()


def copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    """With tensors of its own, DTensors kept."""
    state = {
        index: {name: value.clone() if isinstance(value, Tensor) else value for name, value in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def copy_params(source: Model, target: Model) -> None:
    with torch.no_grad():
        for a, b in zip(source.parameters(), target.parameters(), strict=True):
            b.copy_(a)


# -- what the entries are ---------------------------------------------------------------------------------------------


def state_is_dtensors(rank: int, job: Job) -> int:
    model, optimizer, _ = started(job, steps=1)
    seen = 0
    for name, param in model.named_parameters():
        entries = {k: v for k, v in optimizer.state[param].items() if k != "step"}
        assert entries, name
        for value in entries.values():
            assert isinstance(param, DTensor) and isinstance(value, DTensor), name
            assert value.placements == param.placements
            assert value.device_mesh == param.device_mesh
            assert (value.shape, value.stride()) == (param.shape, param.stride())
            assert value._local_tensor.shape == param._local_tensor.shape
            seen += 1
    return seen


@pytest.mark.parametrize("job", [JOB, HSDP], ids=["fsdp", "hsdp"])
def test_state_entries_are_dtensors_as_their_parameters(ranks: Ranks, job: Job) -> None:
    assert ranks.run(state_is_dtensors, job) == [7] * WORLD


# -- state_dict -------------------------------------------------------------------------------------------------------


def round_trip(rank: int, job: Job) -> None:
    model, optimizer, _ = started(job)
    saved = copied(optimizer.state_dict())
    other, other_optimizer, other_step = started(job, steps=1, first=50)
    copy_params(model, other)
    other_optimizer.load_state_dict(saved)
    assert_same(momenta_of(other, other_optimizer), momenta_of(model, optimizer))
    go_on(model, optimizer, range(2, 4))
    go_on(other, other_optimizer, range(2, 4))
    assert_same(params_of(other), params_of(model))
    assert_same(momenta_of(other, other_optimizer), momenta_of(model, optimizer))
    assert (other_step.stats.compiles, other_step.stats.recompiles) == (1, 0)


@pytest.mark.parametrize("job", [JOB, HSDP], ids=["fsdp", "hsdp"])
def test_a_state_dict_goes_round(ranks: Ranks, job: Job) -> None:
    ranks.run(round_trip, job)


def deep_copies(rank: int, job: Job) -> None:
    model, optimizer, _ = started(job, steps=1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copies = [copy.deepcopy(optimizer.state_dict()), torch.load(file, weights_only=False)]
    wanted = momenta_of(model, optimizer)
    go_on(model, optimizer, range(1, 2))
    for saved in copies:
        optimizer.load_state_dict(saved)
        assert_same(momenta_of(model, optimizer), wanted)
        go_on(model, optimizer, range(2, 3))


def test_a_state_dict_can_be_copied_and_pickled(ranks: Ranks) -> None:
    """Entries are views of a bucket, of which torch's own copying must see no offset."""
    ranks.run(deep_copies, JOB)


def whole_state(rank: int, job: Job) -> None:
    """Whole plain tensors, as a checkpoint of one process has them, into a sharded optimizer."""
    model, optimizer, _ = started(job)
    saved = copied(optimizer.state_dict())
    for entry in saved["state"].values():
        for name, value in entry.items():
            entry[name] = whole(value) if isinstance(value, Tensor) else value
    other, other_optimizer, _ = started(job, steps=1, first=50)
    copy_params(model, other)
    other_optimizer.load_state_dict(saved)
    assert_same(momenta_of(other, other_optimizer), momenta_of(model, optimizer))
    for (_, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        for name, value in other_optimizer.state[b].items():
            given = optimizer.state[a][name]
            assert type(value) is type(given)
            if isinstance(value, DTensor):
                assert torch.equal(value._local_tensor, given._local_tensor)
    go_on(model, optimizer, range(2, 3))
    go_on(other, other_optimizer, range(2, 3))
    assert_same(params_of(other), params_of(model))


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_whole_momenta_are_cut_right(ranks: Ranks, mesh: tuple[int, ...]) -> None:
    ranks.run(whole_state, Job(shapes={**JOB.shapes, "cols": MATRICES["cols"]}, mesh=mesh))


def wrong_shape(rank: int, job: Job) -> tuple[str, bool]:
    model, optimizer, _ = started(job, steps=1)
    before = momenta_of(model, optimizer)
    saved = copied(optimizer.state_dict())
    entry = next(entry for entry in saved["state"].values() if tuple(entry["momentum_buffer"].shape) == (5, 8))
    entry["momentum_buffer"] = entry["momentum_buffer"]._local_tensor.clone()
    message = raised(optimizer.load_state_dict, saved)
    after = momenta_of(model, optimizer)
    return message, all(torch.equal(before[name], after[name]) for name in before)


def test_a_shard_without_its_placements_is_refused(ranks: Ranks) -> None:
    for message, unchanged in ranks.run(wrong_shape, Job(shapes={"five": (5, 8)})):
        assert message.startswith("ValueError: State of 'five'")
        assert "expected shape (5, 8)" in message
        assert unchanged


# -- distributed checkpoints ------------------------------------------------------------------------------------------


def checkpoint(rank: int, job: Job, folder: str, fresh: bool) -> None:
    model, optimizer, _ = started(job)
    wanted = momenta_of(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    assert any(isinstance(v, DTensor) for entry in state["optimizer"]["state"].values() for v in entry.values())
    dcp.save(state, checkpoint_id=folder)

    other = sharded_model(job)
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(7.0)
    other_optimizer = optimizer_of(other, job)
    compiled(other_optimizer, job)
    if not fresh:
        go_on(other, other_optimizer, range(70, 71))
    into: dict[str, Any] = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, other_optimizer)}
    dcp.load(into, checkpoint_id=folder)
    other.load_state_dict(into["model"])
    set_optimizer_state_dict(other, other_optimizer, into["optimizer"])
    assert_same(momenta_of(other, other_optimizer), wanted)
    assert_same(params_of(other), params_of(model))

    go_on(model, optimizer, range(2, 4))
    go_on(other, other_optimizer, range(2, 4))
    assert_same(params_of(other), params_of(model))
    assert_same(momenta_of(other, other_optimizer), momenta_of(model, optimizer))


@pytest.mark.parametrize("fresh", [False, True], ids=["after a step", "before any step"])
def test_a_distributed_checkpoint_resumes_exactly(ranks: Ranks, tmp_path: Path, fresh: bool) -> None:
    ranks.run(checkpoint, JOB, str(tmp_path / "saved"), fresh)


def checkpoint_before_a_step(rank: int, job: Job) -> dict[str, Any]:
    """Gradients are there, no step was made: torch's helpers then initialize nothing themselves."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    compiled(optimizer, job)
    give(model, 0)
    found = get_optimizer_state_dict(model, optimizer)["state"]
    return {name: sorted(entry) for name, entry in found.items()}


def test_a_state_is_never_saved_empty(ranks: Ranks) -> None:
    for found in ranks.run(checkpoint_before_a_step, JOB):
        assert found.keys() == JOB.shapes.keys()
        for name, keys in found.items():
            assert ("exp_avg" if name == "vector" else "momentum_buffer") in keys


# -- leaving ----------------------------------------------------------------------------------------------------------


def uninstalled(rank: int, job: Job) -> None:
    model, optimizer, step = started(job)
    wanted = momenta_of(model, optimizer)
    inside = {
        value._local_tensor.untyped_storage().data_ptr()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, DTensor) and value._local_tensor.numel()
    }
    step.uninstall()
    assert_same(momenta_of(model, optimizer), wanted)
    for name, param in model.named_parameters():
        assert optimizer.state[param], name
        for key, value in optimizer.state[param].items():
            if key == "step":
                continue
            assert isinstance(param, DTensor) and isinstance(value, DTensor), name
            assert value.placements == param.placements
            own = value._local_tensor
            assert own.untyped_storage().nbytes() == own.numel() * own.element_size(), name
            assert not own.numel() or own.untyped_storage().data_ptr() not in inside, name
    dist.barrier()


def test_uninstall_leaves_dtensors_of_their_own(ranks: Ranks) -> None:
    ranks.run(uninstalled, JOB)


# -- dtype conversions see no DTensor (a device's cast operator has no sharding rule) ---------------------------------


class Conversions(TorchDispatchMode):
    """Operators that convert dtypes, and whether they were given a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = 0
        self.sharded: list[str] = []
        self.other_sharded: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
        sharded = any(isinstance(a, DTensor) for a in given)
        converts = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to)
        converts |= func is torch.ops.aten.copy_.default and len({a.dtype for a in given}) > 1
        if converts and sharded:
            self.sharded.append(str(func))
        elif converts:
            self.plain += 1
        elif sharded:
            self.other_sharded.append(str(func))
        return func(*args, **(kwargs or {}))


def conversions(rank: int, job: Job) -> tuple[int, list[str], list[str]]:
    model, optimizer, _ = started(job, steps=1)
    give(model, 1)
    with Conversions() as seen:
        optimizer.step()
    with Conversions() as check:  # the mode does see DTensors
        next(model.parameters()).detach().double()
    assert check.sharded
    return seen.plain, seen.sharded, seen.other_sharded


def test_no_conversion_sees_a_dtensor(ranks: Ranks) -> None:
    config = mc.MuonConfig(ns_dtype="float32", momentum_dtype="float32")
    job = Job(shapes=JOB.shapes, config=config, dtype=torch.bfloat16)
    for plain, sharded, other in ranks.run(conversions, job):
        assert plain > 0
        assert (sharded, other) == ([], [])
