"""What every rank has to ask for: known before anything is sent, so that one that asks alone is told, and hangs not."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

_ASKS, _LEFT, _TAKEN, _GO, _NO = "asks", "left", "taken", "go", "no "
_PAUSE_SECONDS = 0.02
# Of the time that the first rank waits, what others wait: they are there still when it says who was missing.
_LONGER = 1.5
# How often these ranks have gone on together, by what they asked for: each time has keys of its own.
_TIMES: dict[tuple[object, ...], int] = {}


def ask_together(what: str, ranks: Sequence[int], seconds: float = 30.0) -> None:
    """Return once every rank has asked for the same. No collective is called, whatever the group's backend.

    Ranks leave notes in the store that made the default process group. A rank's own note goes from ``asks`` to ``left``
    by itself, or by the first of the ranks to ``taken`` and then ``go`` or ``no``; both compare it as they change it,
    so nobody leaves whom the others count on.

    Args:
        what: What is asked for, such as ``"profile"``.
        ranks: Who has to ask, ascending; this rank among them.
        seconds: How long the others are waited for, at most half as long again on ranks that wait for the first one.

    Raises:
        RuntimeError: Some have not asked; names them, and nothing is to be done.
    """
    key = (what, *ranks)
    prefix = f"muon_compile/{what}/{'-'.join(map(str, ranks))}/{_TIMES.get(key, 0)}"
    store = PrefixStore(prefix, distributed_c10d._get_default_store())
    me = dist.get_rank()
    store.set(str(me), _ASKS)
    missing = _lead(store, ranks, seconds) if me == ranks[0] else _follow(store, ranks[0], me, seconds * _LONGER)
    if missing:
        raise RuntimeError(
            f"dump: {what}=True runs the step's collectives, so every rank of {list(ranks)} has to ask for it at the "
            f"same time; {missing} did not within about {seconds:g} s. Nothing was run or written here. Call it on all "
            f"of them, or leave {what}=True out."
        )
    _TIMES[key] = _TIMES.get(key, 0) + 1


def _lead(store: Store, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait for all, take everybody's note or nobody's, and answer; returns who is missing."""
    end = time.monotonic() + seconds
    while missing := [rank for rank in ranks if _note(store, rank) != _ASKS]:
        if time.monotonic() > end:
            break
        time.sleep(_PAUSE_SECONDS)
    taken = [rank for rank in ranks if _change(store, rank, _TAKEN)]
    missing = [rank for rank in ranks if rank not in taken]
    for rank in taken:
        store.set(str(rank), _NO + ",".join(map(str, missing)) if missing else _GO)
    return missing


def _follow(store: Store, first: int, me: int, seconds: float) -> list[int]:
    """Wait for the first rank's answer; returns who is missing."""
    end = time.monotonic() + seconds
    while True:
        note = _note(store, me)
        if note == _GO:
            return []
        if note.startswith(_NO):
            return [int(rank) for rank in note.removeprefix(_NO).split(",")]
        late = time.monotonic() - end
        # A first rank that died with this one's note in its hand runs nothing either.
        if late > 0 and (_change(store, me, _LEFT) or late > seconds):
            return [first]
        time.sleep(_PAUSE_SECONDS)


def _change(store: Store, rank: int, note: str) -> bool:
    """Change a note from ``asks``; whether that was what it said."""
    return _note(store, rank) == _ASKS and store.compare_set(str(rank), _ASKS, note) == note.encode()


def _note(store: Store, rank: int) -> str:
    return store.get(str(rank)).decode() if store.check([str(rank)]) else ""
