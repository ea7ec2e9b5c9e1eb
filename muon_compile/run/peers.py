"""Which ranks are gone, where a collective failed: a backend names a socket at most."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Ranks that lost the same connection fail within milliseconds; those that wait for the group's timeout come later.
_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.05
# How often a collective has failed here: each time has keys of its own.
_TIMES: dict[tuple[int, ...], int] = {}


def tell_of_peers(error: BaseException, ranks: Sequence[int]) -> None:
    """Add to the message of a collective that failed which ranks have not failed likewise; other errors stay.

    Ranks leave notes in the store that made the default process group, so nothing is sent through what is broken.

    Args:
        error: What was raised; its message is changed.
        ranks: Who the step exchanges with, this rank among them.
    """
    if len(ranks) < 2 or not _is_of_a_collective(error):
        return
    try:
        missing = _missing(tuple(ranks))
    except Exception as lost:  # the process that held the store is gone as well
        found = (
            f"The store of the default group does not answer ({type(lost).__name__}); look at the rank that holds it."
        )
    else:
        others = (
            f"did not fail likewise within {_PATIENCE_SECONDS:g} s: they are dead, or wait still; look there first."
        )
        found = (
            f"Ranks {missing} {others}" if missing else "All of them failed likewise: none is dead, the network may be."
        )
    error.args = (f"{error}\nThe step was exchanging matrices with ranks {list(ranks)}. {found}",)


def _is_of_a_collective(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _missing(ranks: tuple[int, ...]) -> list[int]:
    """Leave this rank's note; who has left none after a while."""
    number = _TIMES[ranks] = _TIMES.get(ranks, 0) + 1
    prefix = f"muon_compile/failed/{'-'.join(map(str, ranks))}/{number}"
    store = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), "failed")
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        missing = [rank for rank in ranks if not store.check([str(rank)])]
        if not missing or time.monotonic() > end:
            return missing
        time.sleep(_PAUSE_SECONDS)
