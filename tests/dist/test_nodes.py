"""The process groups of nodes, on 4 ranks: found again, of the right ranks, and made whatever groups a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from muon_compile.build.collectives import all_to_all, wait
from muon_compile.run.nodes import node_groups
from tests.dist.ranks import Ranks

pytestmark = pytest.mark.dist
WORLD = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def members(name: str) -> list[int]:
    return dist.get_process_group_ranks(distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]


def talk(name: str) -> list[float]:
    """The ranks of a group of two, as each is told by its members."""
    mine = torch.full((2,), float(dist.get_rank()))
    return wait(all_to_all(mine, [1, 1], [1, 1], name)).tolist()


def make_groups(rank: int, lonely: tuple[int, ...]) -> tuple[list[list[int]], list[list[float]]]:
    if rank in lonely:  # a group that some ranks alone know of
        dist.new_group(list(lonely), use_local_synchronization=True)
    made = node_groups(dist.group.WORLD, 2)
    count = len(distributed_c10d._world.pg_names)
    assert node_groups(dist.group.WORLD, 2) == made
    assert len(distributed_c10d._world.pg_names) == count
    # Of other groups of the same ranks there are others.
    again = node_groups(dist.new_group(list(range(WORLD))), 2)
    assert not {*again} & {*made}
    return [members(name) for name in (*made, *again)], [talk(name) for name in (*made, *again)]


@pytest.mark.parametrize("lonely", [(), (1, 2), (3,)], ids=str)
def test_groups_of_nodes_are_made_once(ranks: Ranks, lonely: tuple[int, ...]) -> None:
    for rank, (ranks_of, told) in enumerate(ranks.run(make_groups, lonely)):
        node, peers = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
        assert ranks_of == [node, peers] * 2
        assert told == ranks_of


def descending(rank: int) -> str:
    with mock.patch.object(dist, "get_process_group_ranks", return_value=[3, 2, 1, 0]):
        try:
            node_groups(dist.new_group(list(range(WORLD))), 2)
        except NotImplementedError as error:
            return str(error)
    return "was made"


def test_ranks_that_do_not_ascend_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(descending):
        assert "whose ranks ascend" in message and "[3, 2, 1, 0]" in message
