"""Process groups of the nodes of a group: the ranks of this one, and the ranks of one index in all of them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

# Names by node size of what was made of a group; a later wrap of its parameters takes them again.
_MADE: WeakKeyDictionary[ProcessGroup, dict[int, tuple[str, str]]] = WeakKeyDictionary()


def node_groups(group: ProcessGroup, node_size: int) -> tuple[str, str]:
    """Names of this rank's node group and peer group, made when they are first asked for; all ranks of a group ask.

    Args:
        group: The group that divides into nodes of consecutive ranks.
        node_size: Ranks of a node; divides the group's size.

    Raises:
        NotImplementedError: The group's ranks are not in ascending order.
    """
    made = _MADE.setdefault(group, {})
    if node_size not in made:
        made[node_size] = _make(group, node_size)
    return made[node_size]


def _make(group: ProcessGroup, node_size: int) -> tuple[str, str]:
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    if ranks != sorted(ranks):
        raise NotImplementedError(
            "hierarchical_all_to_all: expected a shard group whose ranks ascend (torch sorts those of the groups that "
            f"are made of it), got ranks {ranks}; use 'all_to_all'."
        )
    start = rank - rank % node_size
    _make_as_many(group)
    # Ranks outside of the shard group, those of other pipeline stages, take no part.
    node, peers = (
        dist.new_group(members, backend=dist.get_backend(group), use_local_synchronization=True)
        for members in (ranks[start : start + node_size], ranks[rank % node_size :: node_size])
    )
    return node.group_name, peers.group_name


def _make_as_many(group: ProcessGroup) -> None:
    """Groups of this rank alone, until every rank of the group is in as many.

    torch makes the name under which a group's members find each other of their ranks and of the number of groups that
    each of them is in (``distributed_c10d._hash_ranks_to_str``): another number, and they never meet.
    """
    counts: list[int] = [0] * dist.get_world_size(group)
    mine = len(distributed_c10d._world.pg_names)
    dist.all_gather_object(counts, mine, group=group)
    for _ in range(max(counts) - mine):
        dist.new_group([dist.get_rank()], backend=dist.get_backend(group), use_local_synchronization=True)
