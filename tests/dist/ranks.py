"""Functions run on several ranks: processes with a gloo group over a file, no ports.

A process takes seconds to import torch, so ``Ranks`` keeps its processes for many calls. Whatever happens on a rank, an
exception, a crash or a hang, fails the calling test and says what that rank was doing.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

# Read when torch is imported, so they are set before a process starts. A lazy gloo group connects to those only that it
# talks to; on the loopback device it does so whatever the machine's name resolves to.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_GLOO_LAZY_INIT": "1"}
if sys.platform == "linux":
    _ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"
_GROUP_TIMEOUT = datetime.timedelta(seconds=30)
# After one rank failed, the others get this long to say whether they failed as well.
_GRACE_S = 1.0


class RankError(AssertionError):
    """A call failed on some ranks; the message has their tracebacks or stacks."""


class Ranks:
    """Processes that call functions together; a context manager.

    Args:
        world: Number of ranks.

    A failed call ends the processes; the next call starts new ones.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Call ``fn(rank, *args)`` on every rank, its default group ready.

        Args:
            fn: A function of an importable module.
            args: Picklable.
            timeout: Seconds for all of it, starting the processes not counted.

        Returns:
            What each rank returned.

        Raises:
            RankError: A rank raised, died, or was not done in time.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((fn, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.world and (left := deadline - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results | failures}
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(5)
                    ok, value = False, f"died with exit code {self._processes[rank].exitcode}"
                (results if ok else failures)[rank] = value
                if not ok:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        hanging = [rank for rank in range(self.world) if rank not in results | failures]
        if failures or hanging:
            stacks = {rank: f"was not done\n{stack}" for rank, stack in self._stacks(hanging).items()}
            self._kill()
            told = "\n".join(f"--- rank {rank} {text}" for rank, text in sorted((stacks | failures).items()))
            name = getattr(fn, "__qualname__", repr(fn))
            what = f"failed on ranks {sorted(failures)}" if failures else f"was not done after {timeout} s"
            raise RankError(f"{name} {what} of {self.world}:\n{told}")
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the processes, which are idle: a clean exit would take each of them seconds."""
        self._kill()

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        with _environment(_ENVIRONMENT):
            for rank in range(self.world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(rank, self.world, self._folder.name, theirs), daemon=True, name=f"rank-{rank}"
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(120):
                self._kill()
                raise RankError(f"rank {rank} of {self.world} did not start within 120 s.")
            try:
                pipe.recv_bytes()
            except EOFError:
                self._kill()
                raise RankError(f"rank {rank} of {self.world} died at its start; its error is on stderr.") from None

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        assert self._folder is not None
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0.0)
        return {rank: _stack_file(self._folder.name, rank).read_text() for rank in ranks}

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call ``fn(rank, *args)`` once on ``world`` new processes; see ``Ranks.run``."""
    with Ranks(world) as ranks:
        return ranks.run(fn, *args, timeout=timeout)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    """A rank's process: one call after the other, until it is killed or the parent is gone."""
    stack = _stack_file(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_GROUP_TIMEOUT)
    pipe.send_bytes(b"ready")
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        # Plain pickle: torch's own would send tensors through shared memory that ends with this process.
        try:
            fn, args = pickle.loads(call)
            answer = pickle.dumps((True, fn(rank, *args)))
        except BaseException:
            answer = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        pipe.send_bytes(answer)
