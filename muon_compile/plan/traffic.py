"""What one collective costs on a network: seconds, messages, bytes and connections of one rank.

A message of ``n`` bytes takes ``a + n b`` seconds at a level: its latency ``a`` and ``b = 1 / bytes_per_second``
(Hockney 1994). On one level, with ``W`` ranks, ``n`` bytes of input for each and ``d = ceil(log2 W)``::

    ring          all_gather       (W - 1) (a + n b)
                  reduce_scatter   (W - 1) (a + n/W b)
                  all_reduce     2 (W - 1) (a + n/W b)
                  broadcast        (W - 2 + k) (a + n/k b), in k chunks along a chain
    tree          broadcast        (d - 1 + k) (a + n/k b), in k chunks down two binary trees
                  all_reduce     2 (d - 1 + k) (a + n/k b), up and down again
    pairwise      all_to_all       (W - 1) (a + n/W b)
    hierarchical  as the rings, level by level; a broadcast scatters and gathers: (d + W - 1) a + 2 (W - 1) n/W b

(Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH; the two trees, in
which an inner rank of one is a leaf of the other and so nobody sends more than ``n``, as in NCCL: Sanders, Speck and
Traff 2009.) Additions of a reduction are not counted: memory takes them faster than a network brings them.

On several levels a ring or a tree visits the units in order. Libraries lay one for every network device, so that the
traffic that crosses a unit's edge is shared by all of the unit's ranks; it is bounded by the slowest level, and on a
ring of many ranks by the latencies of all levels along it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from muon_compile.plan.network import Group, Level, Network, fullest, nearby, peers_by_level, units

Algorithm = Literal["ring", "tree", "pairwise", "hierarchical"]

# What each functional collective may be made of; of equally fast ones the first is chosen.
ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "all_gather_into_tensor": ("ring", "hierarchical"),
    "reduce_scatter_tensor": ("ring", "hierarchical"),
    "all_reduce": ("ring", "tree", "hierarchical"),
    "broadcast": ("ring", "tree", "hierarchical"),
    "all_to_all_single": ("pairwise",),
}

# Most peers of a rank: before and behind it on a ring; a parent and two children in one tree, a parent in the other.
_RING_PEERS, _TREE_PEERS = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What one collective costs the rank that it costs most; figures by level are innermost first.

    Args:
        algorithm: How it is done.
        seconds: Predicted time, a lower bound: peak bandwidths, an idle network.
        messages: Messages that the rank sends one after the other.
        sent_bytes: Bytes that it sends, by level.
        connections: Peers that it holds a connection with, by level.
    """

    algorithm: Algorithm
    seconds: float
    messages: int
    sent_bytes: tuple[int, ...]
    connections: tuple[int, ...]


@functools.lru_cache(maxsize=65536)
def collective_cost(
    kind: str, bytes_per_rank: int, group: Group, network: Network, algorithm: Algorithm
) -> CollectiveCost:
    """Predict one collective done by one algorithm.

    Args:
        kind: A functional collective, as in ``CollectiveSpec``.
        bytes_per_rank: The operator's input, in bytes; a broadcast's is its owner's.
        group: Who takes part.
        network: What joins them.
        algorithm: One of ``ALGORITHMS[kind]``.

    Raises:
        ValueError: No such collective, another's algorithm, or a group that the network does not hold.
    """
    if algorithm not in _algorithms(kind):
        raise ValueError(f"algorithm: expected one of {ALGORITHMS[kind]} for {kind}, got {algorithm!r}.")
    if group.size == 1:
        none = (0,) * len(network.levels)
        return CollectiveCost(algorithm=algorithm, seconds=0.0, messages=0, sent_bytes=none, connections=none)
    made = _MODELS[algorithm](kind, bytes_per_rank, _Span.of(network, group))
    return CollectiveCost(
        algorithm=algorithm,
        seconds=made.seconds,
        messages=made.messages,
        sent_bytes=tuple(map(round, made.sent)),
        connections=tuple(made.connections),
    )


def fastest(kind: str, bytes_per_rank: int, group: Group, network: Network) -> CollectiveCost:
    """The collective done by its fastest algorithm; of equally fast ones by the first of ``ALGORITHMS[kind]``.

    Raises:
        ValueError: No such collective, or a group that the network does not hold.
    """
    costs = [collective_cost(kind, bytes_per_rank, group, network, algorithm) for algorithm in _algorithms(kind)]
    return min(costs, key=lambda cost: cost.seconds)


def open_connections(opened: Iterable[tuple[str, CollectiveCost]], network: Network) -> tuple[int, ...]:
    """Connections of one rank that a whole step holds open, by level: they stay for their communicator's life.

    Args:
        opened: Every collective's axis and cost. Those over one axis and by one algorithm share their connections;
            other algorithms of the same communicator only where the network says so, and other axes none.
        network: The network of those costs.
    """
    held: dict[tuple[str, str], tuple[int, ...]] = {}
    for axis, cost in opened:
        key = (axis, "" if network.shares_connections else cost.algorithm)
        held[key] = tuple(map(max, held.get(key, cost.connections), cost.connections))
    return tuple(map(sum, zip((0,) * len(network.levels), *held.values(), strict=True)))


def queue_pairs(connections: Sequence[int], network: Network) -> dict[str, int]:
    """Queue pairs that one rank's device holds on every plane, from its connections by level."""
    held = dict.fromkeys((plane.name for plane in network.planes), 0)
    for level, peers in zip(network.levels, connections, strict=True):
        held[level.plane] += peers * network.plane(level.plane).queue_pairs_per_connection
    return held


def over_limit(connections: Sequence[int], network: Network) -> str | None:
    """Why a device cannot hold these connections by level, with the figures and what to do; None where it can."""
    for name, pairs in queue_pairs(connections, network).items():
        plane = network.plane(name)
        if plane.max_queue_pairs is not None and pairs > plane.max_queue_pairs:
            each = plane.queue_pairs_per_connection
            return (
                f"{pairs // each:,} connections for each rank on plane {name!r} take {pairs:,} queue pairs at {each} "
                f"each, and max_queue_pairs is {plane.max_queue_pairs:,}: choose a strategy of rings and trees instead "
                "of an all-to-all, shard over fewer ranks, or declare what a device really holds, such as the max_qp "
                "of ibv_devinfo -v"
            )
    return None


def _algorithms(kind: str) -> tuple[Algorithm, ...]:
    if kind not in ALGORITHMS:
        raise ValueError(f"kind: expected one of {', '.join(ALGORITHMS)}, got {kind!r}.")
    return ALGORITHMS[kind]


class _Span(NamedTuple):
    """A group laid over a network; all by level, innermost first.

    Args:
        size: The group's.
        levels: The network's.
        peers: The last rank's, first met there.
        reach: The first rank's.
        branches: Parts of the fullest unit that have members.
        hops: Of the ring's longest path, ``size - 1`` hops.
        shares: Of the bytes that each rank of a ring or tree passes on, the part that crosses here.
        even: All units that have members have equally many.
    """

    size: int
    levels: tuple[Level, ...]
    peers: tuple[int, ...]
    reach: tuple[int, ...]
    branches: tuple[int, ...]
    hops: tuple[int, ...]
    shares: tuple[float, ...]
    even: bool

    @staticmethod
    def of(network: Network, group: Group) -> _Span:
        """Lay a group of two ranks or more over a network."""
        most, touched = (1, *fullest(network, group)), units(network, group)
        # One hop leaves each unit, and is shared by its members; a ring within one unit leaves none.
        edges = (group.size, *(count if count > 1 else 0 for count in touched))
        beyond = (1.0, *(bool(edge) / held for edge, held in zip(edges[1:], nearby(network, group), strict=True)))
        hops = [inner - outer for inner, outer in pairwise(edges)]
        # The longest path around leaves out one hop only, of the innermost level that has any.
        hops[next(i for i, count in enumerate(hops) if count)] -= 1
        return _Span(
            size=group.size,
            levels=network.levels,
            peers=peers_by_level(network, group),
            reach=tuple(outer - inner for inner, outer in pairwise(most)),
            branches=tuple(-(-outer // inner) for inner, outer in pairwise(most)),
            hops=tuple(hops),
            shares=tuple(inner - outer for inner, outer in pairwise(beyond)),
            even=all(count * held == group.size for count, held in zip(touched, most[1:], strict=True)),
        )


class _Made(NamedTuple):
    """A cost before its figures are rounded."""

    seconds: float
    messages: int
    sent: Sequence[float]
    connections: Sequence[int]


def _ring(kind: str, num_bytes: int, span: _Span) -> _Made:
    connections = [min(_RING_PEERS, peers) for peers in span.reach]
    if kind == "broadcast":
        seconds, chunks = _pipelined(num_bytes, span.hops, span)
        return _Made(seconds, chunks, [num_bytes * share for share in span.shares], connections)
    rounds = 2 if kind == "all_reduce" else 1
    passed = rounds * (span.size - 1) * _shard(kind, num_bytes, span)
    latency = rounds * sum(count * level.latency_seconds for count, level in zip(span.hops, span.levels, strict=True))
    seconds = latency + passed * _slowest(span)
    return _Made(seconds, rounds * (span.size - 1), [passed * share for share in span.shares], connections)


def _tree(kind: str, num_bytes: int, span: _Span) -> _Made:
    rounds = 2 if kind == "all_reduce" else 1
    seconds, chunks = _pipelined(num_bytes, [_depth(count) for count in span.branches], span)
    sent = [rounds * num_bytes * share for share in span.shares]
    return _Made(rounds * seconds, rounds * chunks, sent, [min(_TREE_PEERS, peers) for peers in span.reach])


def _pairwise(kind: str, num_bytes: int, span: _Span) -> _Made:
    each = num_bytes / span.size
    seconds = sum(
        count * (level.latency_seconds + each / level.bytes_per_second)
        for count, level in zip(span.peers, span.levels, strict=True)
    )
    return _Made(seconds, span.size - 1, [count * each for count in span.peers], span.peers)


def _hierarchical(kind: str, num_bytes: int, span: _Span) -> _Made:
    """Scatter or reduce-scatter from the innermost level outwards, all-gather back inwards: rings of the units' parts.

    A rank meets only its likes in other parts, so that the outer levels carry the least. Where units are not filled
    alike some ranks have no likes, and it is a ring.
    """
    if not span.even:
        return _ring(kind, num_bytes, span)
    seconds, messages, sent, connections = 0.0, 0, [], []
    size = _shard(kind, num_bytes, span) * span.size
    for count, level in zip(span.branches, span.levels, strict=True):
        size /= count
        tree = _depth(count) if kind == "broadcast" else 0
        rounds = 2 if kind in ("all_reduce", "broadcast") else 1
        steps = count - 1 + (tree or (rounds - 1) * (count - 1))
        sent.append(rounds * (count - 1) * size)
        seconds += steps * level.latency_seconds + sent[-1] / level.bytes_per_second
        messages += steps
        connections.append(min(count - 1, _RING_PEERS + tree))
    return _Made(seconds, messages, sent, connections)


_MODELS: dict[Algorithm, Callable[[str, int, _Span], _Made]] = {
    "ring": _ring,
    "tree": _tree,
    "pairwise": _pairwise,
    "hierarchical": _hierarchical,
}


def _shard(kind: str, num_bytes: int, span: _Span) -> float:
    """What each rank contributes to a gather or gets from a scatter."""
    return num_bytes if kind == "all_gather_into_tensor" else num_bytes / span.size


def _slowest(span: _Span) -> float:
    """Seconds for each byte that every rank passes on around a ring or down a tree, on the level that is busiest."""
    return max(share / level.bytes_per_second for share, level in zip(span.shares, span.levels, strict=True))


def _pipelined(num_bytes: int, hops: Sequence[int], span: _Span) -> tuple[float, int]:
    """Seconds and chunks of a message that is passed on along a path, in the best number of equal chunks.

    The path takes the first chunk; each further one follows after one hop, of the slowest latency and the slowest
    bandwidth on the path. With ``h`` hops on one level: ``(h - 1 + k) (a + n/k b)``, least at
    ``k = sqrt((h - 1) n b / a)``.
    """
    path = [(count, level, share) for count, level, share in zip(hops, span.levels, span.shares, strict=True) if count]
    latency = max(level.latency_seconds for _, level, _ in path)
    each_byte = _slowest(span)
    more_latency = sum(count * level.latency_seconds for count, level, _ in path) - latency
    more_each_byte = sum(count * share / level.bytes_per_second for count, level, share in path) - each_byte
    more_transfer = max(0.0, more_each_byte) * num_bytes
    chunks = max(1.0, math.sqrt(more_transfer / latency))
    return more_latency + chunks * latency + more_transfer / chunks + num_bytes * each_byte, math.ceil(chunks)


def _depth(ranks: int) -> int:
    """Levels of a binary tree of so many ranks below its root."""
    return (ranks - 1).bit_length()
