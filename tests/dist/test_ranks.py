"""The harness: whatever goes wrong on a rank fails the test, and says what that rank was doing."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.ranks import RankError, Ranks, run_ranks


def add_up(rank: int, number: int) -> torch.Tensor:
    total = torch.tensor([rank + number])
    dist.all_reduce(total)
    return total


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("of rank 1")
    dist.barrier()


def die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def nap_for_long() -> None:
    time.sleep(60)


def hang_on_one(rank: int) -> None:
    if rank == 1:
        nap_for_long()


@pytest.mark.dist
def test_a_failure_says_where_and_the_next_call_works() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(add_up, 10) == [torch.tensor([21])] * 2
        with pytest.raises(RankError, match=r"failed on ranks \[1\](?s:.*)rank 1 raised(?s:.*)of rank 1"):
            ranks.run(fail_on_one)
        assert ranks.run(add_up, 1) == [torch.tensor([3])] * 2
        with pytest.raises(RankError, match=r"not done after 1 s(?s:.*)rank 1 was not done(?s:.*)nap_for_long"):
            ranks.run(hang_on_one, timeout=1)


@pytest.mark.dist
def test_a_dead_rank_is_told() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        run_ranks(die_on_one, 2)
