"""Ranks as forks of one process that has imported torch and has no threads: dozens of them are cheap.

Linux only; what a rank has open is read from /proc.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import resource
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

GROUP_TIMEOUT_S = 30
# After a rank failed, the others get this long to fail as well; who is left is only waiting for it.
GRACE_S = 3.0

Job = Callable[[int, int], float]
Status = Literal["ran", "raised", "died", "waiting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Ranks to start.

    Args:
        ranks: How many.
        limit: Open files per rank; None: as this process.
        lazy: Connect to a rank only when there is something to tell it.
        timeout: Seconds for all of it.
    """

    ranks: int
    limit: int | None = None
    lazy: bool = True
    timeout: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """How a rank ended; ``connections`` and ``files`` were counted only where its job ran."""

    status: Status
    text: str = ""
    error: float = 0.0
    connections: int = 0
    files: int = 0


def launch(job: Job, how: Launch) -> list[Rank]:
    """Run a job on new ranks, and end them all."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("This process has threads, which a fork would lose; start the tool in a process of its own.")
    told, go = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="exhaust-") as folder:
        pids = []
        for rank in range(how.ranks):
            pid = os.fork()
            if pid == 0:
                os.close(told[0])
                os.close(go[1])
                _rank_main(rank, job, how, Path(folder), (told[1], go[0]))
            pids.append(pid)
        os.close(told[1])
        os.close(go[0])
        try:
            return _follow(pids, how, told[0], Path(folder))
        finally:
            os.close(told[0])
            os.close(go[1])
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _rank_main(rank: int, job: Job, how: Launch, folder: Path, pipes: tuple[int, int]) -> None:
    """A rank, from its fork to its end; a rank that is done waits until all are, with its connections open."""
    try:
        with (folder / f"stderr-{rank}").open("w") as stderr:
            os.dup2(stderr.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if how.limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (how.limit, how.limit))
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1" if how.lazy else "0"
        import torch.distributed as dist

        seconds = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        store = dist.FileStore(str(folder / "store"), how.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=how.ranks, timeout=seconds)
        # Shorter than PIPE_BUF, so lines of several ranks do not mix.
        os.write(pipes[0], f"{json.dumps([rank, 'ran', job(rank, how.ranks)])}\n".encode())
        os.read(pipes[1], 1)
    except BaseException as error:
        traceback.print_exc()
        os.write(pipes[0], f"{json.dumps([rank, 'raised', f'{type(error).__name__}: {error}'[-1000:]])}\n".encode())
    finally:
        os._exit(0)


def _follow(pids: Sequence[int], how: Launch, told: int, folder: Path) -> list[Rank]:
    """Wait for the ranks; count what those that are done have open."""
    ended: dict[int, Rank] = {}
    deadline, unread = time.monotonic() + how.timeout, b""
    while len(ended) < len(pids) and (left := deadline - time.monotonic()) > 0:
        ready = select.select([told], [], [], min(left, 0.1))[0]
        chunk = os.read(told, 1 << 16) if ready else b""
        *lines, unread = (unread + chunk).split(b"\n")
        for rank, status, value in map(json.loads, lines):
            ended[rank] = Rank(status="ran", error=value) if status == "ran" else Rank(status="raised", text=value)
        if not chunk:  # whoever is gone by now had told all that it had to tell
            for rank in [rank for rank, pid in enumerate(pids) if rank not in ended and _is_gone(pid)]:
                ended[rank] = Rank(status="died", text=_uncaught(folder, rank) or "")
        if any(rank.status != "ran" for rank in ended.values()):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    done = [rank for rank in ended if ended[rank].status == "ran"]
    for rank, (connections, files) in zip(done, _count([pids[rank] for rank in done]), strict=True):
        ended[rank] = replace(ended[rank], connections=connections, files=files)
    for rank, pid in enumerate(pids):  # to die of an error takes seconds on a busy machine
        if rank not in ended or (ended[rank].status == "ran" and _is_gone(pid)):
            text = _uncaught(folder, rank)
            ended[rank] = Rank(status="waiting" if text is None and not _is_gone(pid) else "died", text=text or "")
    return [ended[rank] for rank in range(len(pids))]


def _uncaught(folder: Path, rank: int) -> str | None:
    """What a rank's C++ threads threw and nobody caught."""
    path = folder / f"stderr-{rank}"
    found = re.search(r"what\(\): +(.*)", path.read_text(errors="replace")) if path.exists() else None
    return found and found[1]


def _is_gone(pid: int) -> bool:
    """Whether a child has ended; it is not reaped, so nobody else can get its number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _count(pids: Sequence[int]) -> list[tuple[int, int]]:
    """Established TCP connections and other open files of each process."""
    deadline = time.monotonic() + 2.0
    while True:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        # Columns of proc_net_tcp: [3] state, 01 is established; [9] inode, 0 until the peer has accepted.
        established = {f"socket:[{row[9]}]" for row in rows if row[3] == "01"}
        if "socket:[0]" not in established or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    found = []
    for pid in pids:
        files = []
        with contextlib.suppress(OSError):  # the process is gone
            files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        connections = sum(file in established for file in files)
        found.append((connections, len(files) - connections))
    return found
