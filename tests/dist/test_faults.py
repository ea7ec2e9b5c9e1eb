"""Ranks that die, hang, plan anew alone or find their groups gone: an error in time, in words, and no wrong step."""

from __future__ import annotations

import datetime
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import muon_compile as mc
from examples.checkpoints import latest, load, save
from tests.dist import ranks as harness
from tests.dist.models import (
    MATRICES,
    WORLD,
    Job,
    Model,
    assert_same,
    compiled,
    give,
    mesh_of,
    optimizer_of,
    params_of,
    raised,
    sharded_model,
    train_alone,
)
from tests.dist.ranks import Ranks, run_ranks

pytestmark = pytest.mark.dist

JOB = Job(shapes={"even": (16, 12), "five": (5, 8), "vector": (9,)}, strategy="gather_scatter")
HSDP = replace(JOB, mesh=(2, 2))
TIMEOUT_S = 4.0
# A step of these takes milliseconds; on a busy machine more.
SLACK_S = 10.0
# Machines are busy; this ends a test that hangs, and no other.
LONG_S = 100.0
REFUSES = "RuntimeError: An earlier step failed inside its kernels"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def join(rank: int, store: str, world: int = WORLD) -> None:
    """A default group in place of the harness's."""
    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    mesh_of.cache_clear()


def started(job: Job) -> tuple[Model, mc.Muon, mc.CompiledStep]:
    """A sharded model, its optimizer and its compiled step after one step; from then on ranks wait briefly."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    give(model, 0)
    optimizer.step()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT_S))
    return model, optimizer, step


def shards(model: Model) -> dict[str, Tensor]:
    """What this rank holds."""
    return {
        name: (p._local_tensor if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def timed(step: Any) -> tuple[str, float]:
    begun = time.monotonic()
    return raised(step), time.monotonic() - begun


# -- a rank that dies, or never comes ---------------------------------------------------------------------------------


class Dies(TorchDispatchMode):
    """Kills the process where it would issue its second collective: the others have the first one behind them."""

    issued = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait_tensor" not in str(func):
            self.issued += 1
            if self.issued == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


def die(store: str, root: Path) -> None:
    """The last rank's process, outside the harness, which ends all ranks once one has died."""
    torch.set_num_threads(1)
    join(WORLD - 1, store)
    model, optimizer, _ = started(JOB)
    save(root, 1, model, optimizer)
    give(model, 1)
    with Dies():
        optimizer.step()


def survive(rank: int, store: str, root: Path) -> tuple[list[tuple[str, float]], dict[str, Tensor]]:
    join(rank, store)
    model, optimizer, _ = started(JOB)
    save(root, 1, model, optimizer)
    saved = optimizer.state_dict()
    found = []
    for number in (1, 2):
        give(model, number)
        found.append(timed(optimizer.step))
    optimizer.load_state_dict(saved)
    found.append(timed(optimizer.step))
    return found, resume(rank, store + "-again", root)


def resume(rank: int, store: str, root: Path) -> dict[str, Tensor]:
    """The remaining ranks go on from the last checkpoint, in a group of their own."""
    join(rank, store, WORLD - 1)
    job = replace(JOB, mesh=(WORLD - 1,))
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    compiled(optimizer, job)
    last = latest(root)
    assert last is not None
    for number in range(load(last, model, optimizer), JOB.steps):
        give(model, number)
        optimizer.step()
    return params_of(model)


def test_a_rank_that_dies_in_mid_step_is_an_error_on_the_others(tmp_path: Path) -> None:
    store, root = str(tmp_path / "store"), tmp_path / "checkpoints"
    with harness._environment(harness._ENVIRONMENT):
        victim = torch.multiprocessing.get_context("spawn").Process(target=die, args=(store, root), daemon=True)
        victim.start()
    try:
        results = run_ranks(survive, WORLD - 1, store, root, timeout=LONG_S)
        victim.join(10)
        assert victim.exitcode == -signal.SIGKILL
    finally:
        victim.kill()
        victim.join()
    alone = train_alone(JOB).params
    for ((first, seconds), (second, _), (third, _)), params in results:
        assert first.startswith("RuntimeError") and not first.startswith(REFUSES)
        assert seconds < TIMEOUT_S + SLACK_S
        assert second.startswith(REFUSES) and "load_state_dict" in second
        # Loaded, it is willing again, and finds the group as broken as it was.
        assert third and not third.startswith(REFUSES)
        named = re.search(r"with ranks \[0, 1, 2, 3\]\. Ranks \[(.*)\] did not fail likewise", first)
        assert named is not None, first
        assert str(WORLD - 1) in named[1]
        assert_same(params, alone)
    # Who waited for the timeout has seen all others fail.
    assert any(f"Ranks [{WORLD - 1}] did" in first for ((first, _), *_), _ in results)


def never_comes(rank: int, store: str, done: str) -> list[tuple[str, float]]:
    join(rank, store)
    model, optimizer, _ = started(JOB)
    give(model, 1)
    if rank == WORLD - 1:
        while len(list(Path(done).iterdir())) < WORLD - 1:
            time.sleep(0.05)
        return [timed(optimizer.step)]
    found = [timed(optimizer.step), timed(optimizer.step)]
    Path(done, str(rank)).touch()
    return found


def test_a_rank_that_never_comes_is_an_error_after_the_timeout(ranks: Ranks, tmp_path: Path) -> None:
    done = tmp_path / "done"
    done.mkdir()
    *others, late = ranks.run(never_comes, str(tmp_path / "store"), str(done), timeout=LONG_S)
    for (first, seconds), (second, _) in others:
        assert first.startswith("RuntimeError") and not first.startswith(REFUSES)
        assert seconds < TIMEOUT_S + SLACK_S
        assert second.startswith(REFUSES)
    assert max(seconds for (_, seconds), _ in others) >= TIMEOUT_S
    # The late one finds nobody to talk to.
    assert late[0][0].startswith("RuntimeError") and late[0][1] < TIMEOUT_S + SLACK_S


# -- groups whose names come to mean other ranks ----------------------------------------------------------------------


def group_ranks(model: Model) -> list[list[int]]:
    """What the mesh of the parameters takes for its groups."""
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    found: list[list[int]] = []
    for axis in range(mesh.ndim):
        try:
            found.append(dist.get_process_group_ranks(mesh.get_group(axis)))
        except (RuntimeError, LookupError, ValueError):  # this rank is in no group of that name any more
            found.append([])
    return found


def renamed(rank: int, store: str, lines: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Groups end and are made anew along ``lines``; the names of the mesh's four are those of the first four."""
    join(rank, store + "-1")
    model, optimizer, step = started(HSDP)
    ranks = group_ranks(model)
    join(rank, store + "-2")
    for line in lines:
        dist.new_group(line, timeout=datetime.timedelta(seconds=TIMEOUT_S))
    give_local(model)
    before = shards(model)
    message, seconds = timed(optimizer.step)
    unchanged = all(torch.equal(value, before[name]) for name, value in shards(model).items())
    same = group_ranks(model) == ranks
    rebound = raised(step.rebind)
    if not rebound:
        optimizer.step()
    params = {} if rebound else params_of(model)
    return {
        "message": message,
        "seconds": seconds,
        "unchanged": unchanged,
        "same": same,
        "rebound": rebound,
        "params": params,
    }


def give_local(model: Model) -> None:
    """New gradients without a word to other ranks: every entry of a parameter the same."""
    for number, param in enumerate(model.parameters()):
        grad = param.grad
        assert grad is not None
        (grad._local_tensor if isinstance(grad, DTensor) else grad).fill_(1.0 + number)


# How init_device_mesh makes the groups of a 2x2 mesh: replicas first.
AS_BEFORE = ([0, 2], [1, 3], [0, 1], [2, 3])


@pytest.mark.parametrize(
    "lines",
    [AS_BEFORE[2:] + AS_BEFORE[:2], ([0, 3], [1, 2], [0, 1], [2, 3]), ([0, 1, 2, 3],)],
    ids=["axes swapped", "other pairs", "fewer groups"],
)
def test_case_a07_names_of_other_ranks_are_refused(
    ranks: Ranks, tmp_path: Path, lines: Sequence[Sequence[int]]
) -> None:
    for found in ranks.run(renamed, str(tmp_path / "store"), lines, timeout=LONG_S):
        assert "process group" in found["message"] and "nothing has changed" in found["message"]
        assert found["seconds"] < TIMEOUT_S / 2
        assert found["unchanged"]
        if len(lines) == WORLD:
            assert not found["same"], "the names mean what they meant: nothing was tested"
        assert found["rebound"]


def test_case_a07_a_step_that_is_bound_again_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    model = Model(HSDP)
    optimizer = optimizer_of(model, HSDP)
    mc.compile_step(optimizer, backend="aot_eager", ns="standard")
    give(model, 0)
    optimizer.step()
    give_local(model)
    optimizer.step()
    for found in ranks.run(renamed, str(tmp_path / "store"), AS_BEFORE, timeout=LONG_S):
        assert "rebind()" in found["message"] and found["unchanged"] and found["same"]
        assert found["rebound"] == ""
        assert_same(found["params"], params_of(model))


# -- one rank that plans anew -----------------------------------------------------------------------------------------


def plans_alone(rank: int, store: str) -> dict[str, Any]:
    join(rank, store)
    model, optimizer, _ = started(JOB)
    if rank == 1:
        param = next(model.parameters())
        assert isinstance(param, DTensor)
        param._local_tensor = param._local_tensor.clone()  # as module.to() moves it
    give(model, 1)
    before = shards(model)
    message, seconds = timed(optimizer.step)
    unchanged = all(torch.equal(value, before[name]) for name, value in shards(model).items())
    return {"message": message, "seconds": seconds, "unchanged": unchanged, "then": raised(optimizer.step)}


def test_planning_anew_on_one_rank_is_an_error_in_time(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(plans_alone, str(tmp_path / "store"), timeout=LONG_S)
    for rank, found in enumerate(results):
        assert found["message"].startswith("RuntimeError") and found["seconds"] < TIMEOUT_S + SLACK_S
        assert found["unchanged"], "what a step exchanges first is the agreement on gradients"
        assert found["then"].startswith("RuntimeError: Planning" if rank == 1 else REFUSES)
    assert "did not plan as well" in results[1]["message"]


# -- gradients on one replica only ------------------------------------------------------------------------------------

# On shards of 2: an uneven stack, which every replica repeats, and AdamW's; none of them is exchanged.
APART = {"odd_experts": (3, 8, 12), "vector": (9,)}
SYNC = mc.CompileConfig(check="sync")


def one_replica_only(rank: int, store: str, job: Job, gone: Sequence[str]) -> tuple[list[str], dict[str, bool]]:
    """What two steps raised, of which the first had gradients missing on the second replica; which copies agree."""
    join(rank, store)
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    compiled(optimizer, job)
    messages = []
    for number, missing in enumerate((gone if rank >= WORLD // 2 else (), ())):
        give(model, number, missing=missing)
        messages.append(raised(optimizer.step))
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, shards(model))
    half = WORLD // 2
    alike = {
        name: all(torch.equal(everyone[i][name], everyone[i + half][name]) for i in range(half)) for name in job.shapes
    }
    return messages, alike


def check_replicas(ranks: Ranks, folder: Path, job: Job, gone: Sequence[str]) -> None:
    for messages, alike in ranks.run(one_replica_only, str(folder / "store"), job, gone, timeout=LONG_S):
        assert messages[0].startswith("RuntimeError: Ranks disagree on which parameters have a gradient")
        assert messages[1] == ""
        assert all(alike.values()), alike


def test_a_gradient_on_one_replica_only_is_told_on_all(ranks: Ranks, tmp_path: Path) -> None:
    check_replicas(
        ranks, tmp_path, Job(shapes={"even": (16, 12), **APART}, mesh=(2, 2), compile_config=SYNC), ("even",)
    )


@pytest.mark.parametrize("gone", list(APART))
def test_a_gradient_that_is_not_exchanged_is_agreed_on_too(ranks: Ranks, tmp_path: Path, gone: str) -> None:
    check_replicas(ranks, tmp_path, Job(shapes={"even": (16, 12), **APART}, mesh=(2, 2), compile_config=SYNC), (gone,))


@pytest.mark.parametrize("plain", ["plain", "plain_experts"])
def test_a_plain_parameter_is_its_rank_s_own_business(ranks: Ranks, tmp_path: Path, plain: str) -> None:
    """Nothing says that other ranks have copies of it (``groups=`` would): it moves where it has a gradient."""
    shapes = {"even": (16, 12), "plain": (6, 8), "plain_experts": (2, 8, 12), "vector": (9,)}
    job = Job(shapes=shapes, mesh=(2, 2), plain=("plain", "plain_experts"), compile_config=SYNC)
    for messages, alike in ranks.run(one_replica_only, str(tmp_path / "store"), job, (plain,)):
        assert messages == ["", ""]
        assert alike == {name: name != plain for name in shapes}


def test_without_exchanges_no_rank_waits_for_another(ranks: Ranks, tmp_path: Path) -> None:
    """Which gradients are there then decides alone which graphs a rank compiles, and when."""
    shapes = {name: MATRICES[name] for name in ("experts", "vector")}
    job = Job(shapes=shapes, mesh=(2, 2), compile_config=mc.CompileConfig(replicas="repeat"))
    for messages, alike in ranks.run(one_replica_only, str(tmp_path / "store"), job, ("vector",)):
        assert messages == ["", ""] and alike["experts"]
