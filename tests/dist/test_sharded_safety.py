"""What goes wrong on some ranks is told on all of them, in words, and never hangs."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import muon_compile as mc
from muon_compile.run import binding
from tests.dist.models import (
    MATRICES,
    WORLD,
    Job,
    Model,
    Outcome,
    assert_same,
    compiled,
    finish,
    give,
    mesh_of,
    momenta_of,
    optimizer_of,
    params_of,
    raised,
    sharded_model,
    train,
    train_alone,
)
from tests.dist.ranks import Ranks, run_ranks

pytestmark = pytest.mark.dist

JOB = Job(shapes={name: MATRICES[name] for name in ("even", "even_too", "five", "experts", "vector")}, steps=1)
SYNC = mc.CompileConfig(check="sync")
HSDP = (2, 2)
MESHES = pytest.mark.parametrize("mesh", [(4,), HSDP], ids=["fsdp", "hsdp"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def snapshot(model: Model, optimizer: mc.Muon) -> dict[str, Any]:
    return params_of(model) | momenta_of(model, optimizer)


# -- gradients that are missing ---------------------------------------------------------------------------------------


def missing_everywhere(rank: int, job: Job) -> None:
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    compiled(optimizer, job)
    give(model, 0)
    optimizer.step()
    before = snapshot(model, optimizer)
    gone = ("five", "even_too", "vector", "experts")
    give(model, 1, missing=gone)
    optimizer.step()
    after = snapshot(model, optimizer)
    for name, value in before.items():
        assert torch.equal(value, after[name]) is name.startswith(gone), name
    give(model, 2, missing=tuple(job.shapes))
    optimizer.step()
    assert_same(snapshot(model, optimizer), after)


@MESHES
def test_a_gradient_missing_everywhere_leaves_its_parameter_alone(ranks: Ranks, mesh: tuple[int, ...]) -> None:
    ranks.run(missing_everywhere, replace(JOB, mesh=mesh))


def missing_on_one(rank: int, job: Job, gone: Sequence[str]) -> tuple[list[str], Outcome]:
    """What each step raised: the one with a gradient missing on rank 3, and the one after."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    before = snapshot(model, optimizer)
    messages = []
    give(model, 5, missing=gone if rank == 3 else ())
    messages.append(raised(optimizer.step))
    assert_same(snapshot(model, optimizer), before)
    if job.compile_config.check == "async":
        give(model, 6)
        messages.append(raised(optimizer.step))
        assert_same(snapshot(model, optimizer), before)
    give(model, 0)
    optimizer.step()
    return messages, finish(model, optimizer, step)


def check_disagreement(ranks: Ranks, job: Job, gone: Sequence[str]) -> None:
    expected = train_alone(job)
    for messages, outcome in ranks.run(missing_on_one, job, gone):
        if job.compile_config.check == "async":
            assert messages[0] == ""
        assert messages[-1].startswith("RuntimeError: Ranks disagree on which parameters have a gradient")
        assert_same(outcome.params, expected.params)
        assert_same(outcome.momenta, expected.momenta)


@MESHES
@pytest.mark.parametrize("check", ["sync", "async"])
def test_a_gradient_missing_on_one_rank_is_told_on_all(ranks: Ranks, mesh: tuple[int, ...], check: Any) -> None:
    job = replace(JOB, mesh=mesh, compile_config=mc.CompileConfig(check=check))
    check_disagreement(ranks, job, ("five",))


def test_a_rank_without_any_gradient_is_told_on_all(ranks: Ranks) -> None:
    check_disagreement(ranks, replace(JOB, compile_config=SYNC), tuple(JOB.shapes))


def test_replicas_that_repeat_hear_of_each_other_too(ranks: Ranks) -> None:
    job = replace(JOB, mesh=HSDP, compile_config=mc.CompileConfig(check="sync", replicas="repeat"))
    check_disagreement(ranks, job, ("five",))


# -- plans that differ ------------------------------------------------------------------------------------------------


def renamed(model: Model, job: Job) -> mc.Muon:
    named = [(f"{name}_other" if name == "five" else name, p) for name, p in model.named_parameters() if p.dim() > 1]
    return mc.Muon([{"params": named}], config=job.config, backend="aot_eager")


def reordered(model: Model, job: Job) -> mc.Muon:
    named = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    return mc.Muon([{"params": named[::-1]}], config=job.config, backend="aot_eager")


def differing_plans(rank: int, job: Job, what: str) -> str:
    model = sharded_model(job)
    before = params_of(model)

    def build() -> None:
        if rank == 2 and what == "ns_steps":
            optimizer_of(model, replace(job, config=mc.MuonConfig(ns_dtype="float32", ns_steps=4)))
        elif rank == 2 and what == "names":
            renamed(model, job)
        elif rank == 2 and what == "order":
            reordered(model, job)
        else:
            optimizer_of(model, job)

    # Planned, and compared, before anything is compiled.
    with mock.patch.object(binding, "lower_step", side_effect=AssertionError("compiled")):
        message = raised(build)
    assert_same(params_of(model), before)
    return message


@MESHES
@pytest.mark.parametrize("what", ["ns_steps", "names", "order"])
def test_plans_that_differ_are_told_before_compiling(ranks: Ranks, mesh: tuple[int, ...], what: str) -> None:
    word = {"ns_steps": "ns_steps", "names": "five_other", "order": "even"}[what]
    for message in ranks.run(differing_plans, replace(JOB, mesh=mesh), what):
        assert message.startswith("RuntimeError: Ranks ")
        assert "disagree on the step's plan" in message
        assert word in message


def lr_of_its_own(rank: int, job: Job) -> Outcome:
    return train(rank, replace(job, lr=0.1 * (1 + rank)))


def test_an_lr_of_its_own_is_a_rank_s_own_business(ranks: Ranks) -> None:
    outcomes = ranks.run(lr_of_its_own, JOB)
    assert all(outcome.stats["steps"] == 1 for outcome in outcomes)
    assert_same(outcomes[0].momenta, train_alone(JOB).momenta)


# -- compiling that fails ---------------------------------------------------------------------------------------------


def compiling_fails(rank: int, job: Job, what: str) -> tuple[str, Outcome]:
    real = binding.collective_lines

    def backwards(traced: Any, places: Any) -> dict[str, list[str]]:
        return {group: lines[::-1] for group, lines in real(traced, places).items()}

    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    before = snapshot(model, optimizer)
    give(model, 0)
    with contextlib.ExitStack() as patches:
        if rank == 1 and what == "compiler":
            error = mc.CompileError("the compiler is on strike")
            patches.enter_context(mock.patch.object(binding, "lower_step", side_effect=error))
        elif rank == 1:
            patches.enter_context(mock.patch.object(binding, "collective_lines", backwards))
        message = raised(optimizer.step)
    assert_same(snapshot(model, optimizer), before)
    optimizer.step()
    return message, finish(model, optimizer, step)


@MESHES
def test_a_compile_failure_on_one_rank_is_told_on_all(ranks: Ranks, mesh: tuple[int, ...]) -> None:
    expected = train_alone(JOB)
    for rank, (message, outcome) in enumerate(ranks.run(compiling_fails, replace(JOB, mesh=mesh), "compiler")):
        assert message.startswith("CompileError")
        assert "on strike" in message
        assert rank == 1 or "rank 1 failed to compile" in message
        assert_same(outcome.params, expected.params)


@MESHES
def test_another_order_of_collectives_is_caught(ranks: Ranks, mesh: tuple[int, ...]) -> None:
    expected = train_alone(JOB)
    for message, outcome in ranks.run(compiling_fails, replace(JOB, mesh=mesh), "order"):
        assert message.startswith("CompileError")
        assert "order of collectives" in message
        assert_same(outcome.params, expected.params)


# -- layouts that are refused -----------------------------------------------------------------------------------------


def build_with(placements: Sequence[Placement], mesh: tuple[int, ...]) -> str:
    local = torch.ones(4, 4)
    weight = DTensor.from_local(local, mesh_of(mesh), placements, run_check=False)
    return raised(lambda: mc.Muon([("layer.weight", nn.Parameter(weight))], backend="aot_eager"))


def refused(rank: int) -> dict[str, str]:
    messages = {
        "partial": build_with([Partial()], (4,)),
        "two dims": build_with([Shard(0), Shard(1)], HSDP),
        "one dim twice": build_with([Shard(0), Shard(0)], HSDP),
        "partial replicas": build_with([Partial(), Shard(0)], HSDP),
        "two replicas": build_with([Replicate(), Replicate()], HSDP),
    }
    dist.barrier()
    return messages


def test_unknown_placements_are_refused_by_name(ranks: Ranks) -> None:
    for messages in ranks.run(refused):
        for what, message in messages.items():
            assert message.startswith("NotImplementedError: Parameter 'layer.weight'"), what
            assert "on a mesh of" in message


def partial_gradient(rank: int) -> str:
    job = Job(shapes={"even": (16, 12)})
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    compiled(optimizer, job)
    before = params_of(model)
    with mock.patch.object(DTensor, "grad", DTensor.from_local(torch.ones(16, 12), mesh_of((4,)), [Partial()])):
        message = raised(optimizer.step)
    assert_same(params_of(model), before)
    return message


def test_a_gradient_that_is_not_reduced_is_refused_by_name(ranks: Ranks) -> None:
    for message in ranks.run(partial_gradient):
        assert message.startswith("ValueError: Gradient of 'even'")
        assert "placements" in message


# -- groups that come and go ------------------------------------------------------------------------------------------


def groups_made_anew(rank: int, job: Job, store: str) -> tuple[str, dict[str, Any], Outcome]:
    """A model goes on after the groups it was made with are gone; a new one is made on the new groups."""
    world = dist.get_world_size()
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    compiled(optimizer, job)
    give(model, 0)
    optimizer.step()
    dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    mesh_of.cache_clear()
    for number, param in enumerate(model.parameters()):
        assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
        param.grad._local_tensor.fill_(1.0 + number)
    message = raised(optimizer.step)
    shards = [param._local_tensor.clone() for param in model.parameters() if isinstance(param, DTensor)]
    other = train(rank, job)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, shards)
    old = {name: torch.cat([g[i] for g in gathered]) for i, name in enumerate(job.shapes)}
    return message, old, other


def test_groups_made_anew_give_an_error_or_a_right_result(tmp_path: Path) -> None:
    job = Job(shapes={"even": (16, 12), "five": (5, 8)}, mesh=(2,), steps=1)
    model = Model(job)
    optimizer = optimizer_of(model, job)
    mc.compile_step(optimizer, backend="aot_eager", ns="standard")
    give(model, 0)
    optimizer.step()
    before = params_of(model)
    for number, param in enumerate(model.parameters()):
        assert param.grad is not None
        param.grad.fill_(1.0 + number)
    optimizer.step()
    for message, old, new in run_ranks(groups_made_anew, 2, job, str(tmp_path / "store")):
        assert_same(old, before if message else params_of(model))
        assert not message or "group" in message
        assert_same(new.params, train_alone(job).params)
