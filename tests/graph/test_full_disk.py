"""A disk that is full while a run saves or dumps: the last checkpoint stays whole, and the run goes on."""

from __future__ import annotations

import copy
import errno
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon_compile as mc
from examples.checkpoints import latest, load, save

ROOT = Path(__file__).resolve().parents[2]
SIZE = 64
DISK_BYTES = 2**20
# Less than a checkpoint, or a report, takes.
LIMIT_BYTES = 8192
# A mount of one's own, which some machines refuse.
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def made() -> tuple[nn.Sequential, mc.Muon]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    optimizer = mc.Muon(mc.route(model, verbose=False), lr=0.1, backend="aot_eager")
    return model, optimizer


def go(model: nn.Module, optimizer: mc.Muon, steps: range) -> None:
    for number in steps:
        draw = torch.Generator().manual_seed(number)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=draw)
        optimizer.step()


def held(model: nn.Module, optimizer: mc.Muon) -> Any:
    return copy.deepcopy([(p.detach(), dict(optimizer.state[p])) for p in model.parameters()])


def assert_held(model: nn.Module, optimizer: mc.Muon, before: Any) -> None:
    torch.testing.assert_close(held(model, optimizer), before, rtol=0, atol=0)


@contextmanager
def short_files(_: Path) -> Iterator[None]:
    """No file may grow beyond a few blocks."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Nothing is left of a small disk."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    try:
        yield
    finally:
        filler.unlink()


def error_of(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:  # a CheckpointException is no Exception
        return error
    raise AssertionError("it did not fail: the disk was not full")


def story(root: Path, full: Callable[[Path], Any]) -> None:
    """A run whose disk is full for a while."""
    model, optimizer = made()
    go(model, optimizer, range(2))
    first = save(root, 2, model, optimizer)
    saved = held(model, optimizer)
    go(model, optimizer, range(2, 4))
    before = held(model, optimizer)
    with full(root):
        error = error_of(lambda: save(root, 4, model, optimizer))
        assert any(words in str(error) for words in ("No space left", "File too large")), error
        assert latest(root) == first
        assert_held(model, optimizer, before)
        dumped = error_of(lambda: optimizer.compiled.dump(root / "dump"))
        assert isinstance(dumped, OSError) and "make room" in str(dumped), dumped
        assert not (root / "dump").exists()
        assert_held(model, optimizer, before)
        go(model, optimizer, range(4, 5))
        again = made()
        assert load(first, *again) == 2
        assert_held(*again, saved)
    twin = made()
    go(*twin, range(5))
    assert_held(model, optimizer, held(*twin))
    assert optimizer.compiled.stats.compiles == 1
    assert optimizer.compiled.dump(root / "dump")
    shutil.rmtree(root / "dump")
    # What was left half-done is in nobody's way.
    assert latest(root) == first and save(root, 4, model, optimizer) == latest(root)


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    story(tmp_path, short_files)


def test_a_disk_of_a_megabyte_that_is_full(tmp_path: Path) -> None:
    """In a process that has a mount of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)]
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, *mount], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk of their own")
    told = "import sys; from tests.graph.test_full_disk import main; main(sys.argv[1])"
    shell = f'{shlex.join(mount)} && exec "$@"'
    command = [*NAMESPACE, "sh", "-c", shell, "sh", sys.executable, "-c", told, str(disk)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert list(disk.iterdir()) == [], "it was not a disk of its own"


def main(folder: str) -> None:
    torch.set_num_threads(1)
    story(Path(folder), filled)
