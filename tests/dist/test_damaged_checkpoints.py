"""Folders that are incomplete or another model's change nothing; a save that is killed leaves the last one whole."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from examples.checkpoints import latest, load, save
from tests.dist.models import Job, assert_same, momenta_of, params_of, raised
from tests.dist.moving import go, made
from tests.dist.ranks import RankError, Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

SHAPES = {"even": (16, 12), "five": (5, 8), "experts": (3, 4, 6), "vector": (9,)}
JOB = Job(shapes=SHAPES, mesh=(2,), strategy="all_to_all")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def written(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint's folder."""
    root = tmp_path_factory.mktemp("written")
    two.run(write, JOB, root, 2)
    found = latest(root)
    assert found is not None
    return found


def write(rank: int, job: Job, root: Path, steps: int) -> None:
    model, optimizer, _ = made(job)
    go(model, optimizer, range(steps))
    save(root, steps, model, optimizer)


# -- damaged ----------------------------------------------------------------------------------------------------------


def refused(rank: int, job: Job, folder: Path) -> str:
    """The error of loading a folder, which changed nothing: the run goes on as one that never tried."""
    model, optimizer, step = made(job)
    twin, twin_optimizer, _ = made(job)
    for each in ((model, optimizer), (twin, twin_optimizer)):
        go(*each, range(20, 22))
    params, momenta = params_of(model), momenta_of(model, optimizer)
    message = ""
    try:
        load(folder, model, optimizer)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        message = f"{type(error).__name__}: {error}"
    assert_same(params_of(model), params)
    assert_same(momenta_of(model, optimizer), momenta)
    for each in ((model, optimizer), (twin, twin_optimizer)):
        go(*each, range(22, 24))
    assert_same(params_of(model), params_of(twin))
    assert step.stats.compiles == 1
    return message


def without_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.distcp"))[-1].unlink()


def cut_short(folder: Path) -> None:
    file = sorted(folder.glob("*.distcp"))[-1]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


DAMAGES: tuple[Callable[[Path], None], ...] = (without_a_shard, cut_short, without_metadata)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_folder_changes_nothing(
    two: Ranks, written: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(written, folder)
    damage(folder)
    assert all(two.run(refused, JOB, folder))
    assert refused(0, Job(shapes=SHAPES), folder)


@pytest.mark.parametrize(
    "shapes",
    [
        {**SHAPES, "more": (4, 4)},
        {**SHAPES, "five": (7, 8)},
        {name: SHAPES[name] for name in ("five", "even", "vector")} | {"other": (3, 4, 6)},
    ],
    ids=["a further parameter", "another shape", "another name"],
)
def test_a_folder_of_another_model_changes_nothing(two: Ranks, written: Path, shapes: dict[str, Any]) -> None:
    assert all(two.run(refused, Job(shapes=shapes, mesh=(2,), strategy="all_to_all"), written))
    assert refused(0, Job(shapes=shapes), written)


def whole_of_another(rank: int, job: Job, other: Job) -> str:
    source, source_optimizer, _ = made(other)
    go(source, source_optimizer, range(2))
    options = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(source, source_optimizer, options=options)
    model, optimizer, _ = made(job)
    go(model, optimizer, range(2))
    params, momenta = params_of(model), momenta_of(model, optimizer)
    message = raised(lambda: set_optimizer_state_dict(model, optimizer, whole, options=options))
    assert_same(params_of(model), params)
    assert_same(momenta_of(model, optimizer), momenta)
    return message


def test_a_whole_file_of_another_model_changes_nothing(two: Ranks) -> None:
    other = Job(shapes={**SHAPES, "five": (7, 8)}, mesh=(2,), strategy="all_to_all")
    for message in two.run(whole_of_another, JOB, other):
        assert "five" in message


# -- killed -----------------------------------------------------------------------------------------------------------


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, job: Job, root: Path, moment: str) -> None:
    """Save once in peace, then die on one rank while a second checkpoint is being written."""
    model, optimizer, _ = made(job)
    go(model, optimizer, range(2))
    save(root, 2, model, optimizer)
    go(model, optimizer, range(2, 4))
    if moment == "write" and rank == 1:
        FileSystemWriter.write_data = die  # type: ignore[method-assign,assignment]
    if moment == "metadata":
        FileSystemWriter.finish = die  # type: ignore[method-assign]
    if moment == "rename":
        os.replace = die  # type: ignore[assignment]
    save(root, 4, model, optimizer)


def go_on_from(rank: int, job: Job, root: Path) -> bool:
    model, optimizer, _ = made(job)
    found = latest(root)
    assert found is not None
    first = load(found, model, optimizer)
    go(model, optimizer, range(first, 6))
    save(root, 6, model, optimizer)
    reference, reference_optimizer, _ = made(job)
    go(reference, reference_optimizer, range(6))
    assert_same(params_of(model), params_of(reference))
    if dist.is_initialized():
        dist.barrier()
    return first == 2


@pytest.mark.parametrize("moment", ["write", "metadata", "rename"])
def test_a_save_that_is_killed_leaves_the_one_before(two: Ranks, tmp_path: Path, moment: str) -> None:
    with pytest.raises(RankError, match="exit code -9"):
        two.run(killed, JOB, tmp_path, moment)
    assert len(list(tmp_path.glob("partial-*"))) == 1  # it was in mid-save
    assert two.run(go_on_from, JOB, tmp_path) == [True] * 2
