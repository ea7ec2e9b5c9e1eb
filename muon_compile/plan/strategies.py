"""What every strategy asks of a part, puts on the wire, holds in memory and computes: one row each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from muon_compile.plan.exchange import GRAMS, OWNED, Exchange, Strategy
from muon_compile.spec import FLOAT_BYTES, CollectiveSpec

# What of the shard axis a collective of hierarchical_all_to_all runs over, in ``CollectiveSpec.axis``.
NODE, PEERS = "/node", "/peers"


class _Run(NamedTuple):
    """One replica's units of an exchange, seen by one rank of its shard group."""

    exchange: Exchange
    units: int
    owned: tuple[int, ...]
    broadcasters: tuple[int, ...]
    rank: int
    replica: int

    @property
    def ranks(self) -> int:
        return len(self.exchange.sizes)

    @property
    def row_bytes(self) -> int:
        """One row of one unit on the wire."""
        return self.exchange.cols * FLOAT_BYTES[self.exchange.comm_dtype]

    @property
    def unit_bytes(self) -> int:
        return self.exchange.rows * self.row_bytes

    @property
    def triangle_bytes(self) -> int:
        return triangle_bytes(self.exchange.cols, self.exchange.comm_dtype)

    @property
    def most_owned(self) -> int:
        return max(self.owned, default=0)


class _Transfer(NamedTuple):
    """One collective: what this rank sends, and the operator's input and output on the rank where they are largest.

    ``within`` is what of the axis it runs over: all of it, the ranks of a node, or one rank of each node.
    """

    kind: str
    input_bytes: int
    sent_bytes: int
    output_bytes: int
    within: str = ""


def _gather(ranks: int, input_bytes: int) -> _Transfer:
    """All-gather around a ring: every rank passes on each block but one."""
    return _Transfer("all_gather_into_tensor", input_bytes, (ranks - 1) * input_bytes, ranks * input_bytes)


def _gather_rows(run: _Run) -> _Transfer:
    """Every rank gets all units whole; rows are padded to the largest shard."""
    return _gather(run.ranks, run.units * max(run.exchange.sizes) * run.row_bytes)


def _to_owners(run: _Run) -> _Transfer:
    """Every rank sends its rows of each unit to the unit's owner."""
    sizes = run.exchange.sizes
    sent = (run.units - run.owned[run.rank]) * sizes[run.rank] * run.row_bytes
    held = run.most_owned * run.unit_bytes
    return _Transfer("all_to_all_single", run.units * max(sizes) * run.row_bytes, sent, held)


def _from_owners(run: _Run) -> _Transfer:
    """Every owner sends each rank its rows of the results."""
    others = run.exchange.rows - run.exchange.sizes[run.rank]
    sent = run.owned[run.rank] * others * run.row_bytes
    largest = run.most_owned * run.unit_bytes
    return _Transfer("all_to_all_single", largest, sent, run.units * max(run.exchange.sizes) * run.row_bytes)


def _over_nodes(run: _Run) -> list[list[_Transfer]]:
    """All-to-all in two steps and back: to the owner's index in the own node, then to its node; and the reverse."""
    exchange, mine = run.exchange, run.owned[run.rank]
    node, index = divmod(run.rank, exchange.node_size)
    node_rows, index_units = exchange.node_rows, exchange.index_units(run.replica)
    rows, units = node_rows[node], index_units[index]
    shards, between = run.units * max(exchange.sizes), max(index_units) * max(node_rows)
    whole, size = run.most_owned * exchange.rows, exchange.sizes[run.rank]

    def step(before: int, sent: int, after: int, within: str) -> list[_Transfer]:
        each = run.row_bytes
        return [_Transfer("all_to_all_single", before * each, sent * each, after * each, within)]

    return [
        step(shards, (run.units - units) * size, between, NODE),
        step(between, (units - mine) * rows, whole, PEERS),
        step(whole, mine * (exchange.rows - rows), between, PEERS),
        step(between, units * (rows - size), shards, NODE),
    ]


def _results(run: _Run) -> list[_Transfer]:
    """Every owner sends all of its results to everyone: one padded gather, or a flat buffer for each owner."""
    if run.exchange.gathers_results:
        return [_gather(run.ranks, run.most_owned * run.unit_bytes)]
    made = []
    for owner in run.broadcasters:
        flat = run.owned[owner] * run.unit_bytes
        made.append(_Transfer("broadcast", flat, (run.ranks - 1) * flat if owner == run.rank else 0, flat))
    return made


def _sum_grams(run: _Run) -> _Transfer:
    """Everyone gets all sums: a ring's reduce-scatter, then its all-gather."""
    total = run.units * run.exchange.cols**2 * gram_bytes(run.exchange.comm_dtype)
    return _Transfer("all_reduce", total, 2 * (run.ranks - 1) * -(-total // run.ranks), total)


def _scatter_grams(run: _Run) -> _Transfer:
    """Every owner gets the sums of its own; units are padded to as many on every rank."""
    chunk = run.most_owned * run.triangle_bytes
    return _Transfer("reduce_scatter_tensor", run.ranks * chunk, (run.ranks - 1) * chunk, chunk)


def _gather_q(run: _Run) -> _Transfer:
    return _gather(run.ranks, run.most_owned * run.triangle_bytes)


# Every strategy's collectives over the shard axis, in order; those of one phase are issued together, and waited for in
# the next one.
_PHASES: dict[Strategy, Callable[[_Run], list[list[_Transfer]]]] = {
    "local": lambda run: [],
    "all_gather": lambda run: [[_gather_rows(run)]],
    "all_to_all": lambda run: [[_to_owners(run)], [_from_owners(run)]],
    "gather_broadcast": lambda run: [[_gather_rows(run)], _results(run)],
    "gather_scatter": lambda run: [[_gather_rows(run)], [_from_owners(run)]],
    "gram_all_reduce": lambda run: [[_sum_grams(run)]],
    "gram_scatter": lambda run: [[_scatter_grams(run)], [_gather_q(run)]],
    "hierarchical_all_to_all": _over_nodes,
}


def gathers_results(owner_counts: Sequence[Sequence[int]]) -> bool:
    """Whether owners' results travel better in one padded gather than in a broadcast for each owner.

    They do where padding at most doubles them: the gather is one collective whatever the number of owners, and all
    ranks send at once (on 4 gloo ranks both took the same CPU time). With fewer units than ranks padding would grow
    with the ranks.

    Args:
        owner_counts: ``Exchange.owner_counts``.
    """
    return all(len(counts) * max(counts) <= 2 * sum(counts) for counts in owner_counts)


def gram_bytes(comm_dtype: str) -> int:
    """Bytes of an entry of a Gram or a Q: float32 or wider, since a half-precision Gram loses small singular values."""
    return max(FLOAT_BYTES["float32"], FLOAT_BYTES[comm_dtype])


def triangle_bytes(side: int, comm_dtype: str) -> int:
    """A symmetric ``side x side`` Gram or Q on the wire: its lower triangle with the diagonal."""
    return side * (side + 1) // 2 * gram_bytes(comm_dtype)


def _run(exchange: Exchange, replica: int, rank: int) -> _Run:
    units = exchange.replica_counts[replica] if exchange.replica_counts else exchange.num_units
    owned = exchange.owned(replica) if exchange.strategy in OWNED else ()
    broadcasts = exchange.strategy == "gather_broadcast" and not exchange.gathers_results
    broadcasters = tuple(i for i, units in enumerate(owned) if units) if broadcasts else ()
    return _Run(exchange, units, owned, broadcasters, rank, replica)


def _phases(run: _Run) -> list[list[_Transfer]]:
    return _PHASES[run.exchange.strategy](run)


def _transfers(run: _Run) -> list[_Transfer]:
    return [transfer for phase in _phases(run) for transfer in phase]


def _between_replicas(exchange: Exchange, size: int) -> list[_Transfer]:
    """The all-gather of each replica's results, ``size`` rows of them, padded to the longest run."""
    counts = exchange.replica_counts
    each = size * exchange.cols * FLOAT_BYTES[exchange.comm_dtype]
    return [_gather(len(counts), max(counts) * each)] if counts else []


def _runs(exchange: Exchange) -> list[_Run]:
    """Every replica's run, or the one that they share."""
    return [_run(exchange, replica, 0) for replica in range(max(1, len(exchange.replica_counts)))]


def _unlike_runs(exchange: Exchange) -> list[_Run]:
    """One of each kind of run: of a thousand replicas most own alike."""
    kinds = exchange.owner_counts if exchange.strategy in OWNED else exchange.replica_counts
    first: dict[object, int] = {}
    for replica, kind in enumerate(kinds if exchange.replica_counts else [None]):
        first.setdefault(kind, replica)
    return [_run(exchange, replica, 0) for replica in first.values()]


def phases(exchange: Exchange, replica: int | None = None) -> list[tuple[CollectiveSpec, ...]]:
    """The collectives of a part, phase by phase in the order in which they are issued.

    ``bytes_per_rank`` is the operator's input, on the rank where it is largest; a broadcast's is its owner's. A part
    without entries has none. The last phase is the replica axis's, where replicas divide the units.

    Args:
        exchange: The part's.
        replica: What the ranks of this replica issue; None: the most that any replica does. They differ in bytes, and
            where a shard rank owns nothing in some of the replicas in their number of broadcasts.
    """
    if exchange.num_units * exchange.rows * exchange.cols == 0:
        return []
    runs = _unlike_runs(exchange) if replica is None else [_run(exchange, replica, 0)]
    broadcasters = tuple(sorted({owner for run in runs for owner in run.broadcasters}))
    everyone = [_phases(run._replace(broadcasters=broadcasters)) for run in runs]
    made = [_most(same, exchange.shard_axis) for same in zip(*everyone, strict=True)]
    across = _between_replicas(exchange, max(exchange.sizes))
    return [*made, _most([across], exchange.replica_axis)] if across else made


def phases_before(strategy: Strategy) -> int:
    """Of a part's phases those before its iteration."""
    return {"local": 0, "hierarchical_all_to_all": 2}.get(strategy, 1)


def role_of(axis: str, exchange: Exchange) -> str:
    """What the axis of a part's collective is to it: ``"shard"``, ``"node"`` or ``"peers"`` of it, or ``"replica"``."""
    whole = exchange.shard_axis or ""
    roles = {whole: "shard", whole + NODE: "node", whole + PEERS: "peers"}
    return roles.get(axis, "replica")


def _most(everyone: Sequence[Sequence[_Transfer]], axis: str | None) -> tuple[CollectiveSpec, ...]:
    """One phase as all replicas together promise it."""
    return tuple(
        CollectiveSpec(
            kind=same[0].kind, axis=f"{axis or ''}{same[0].within}", bytes_per_rank=max(t.input_bytes for t in same)
        )
        for same in zip(*everyone, strict=True)
    )


def moved_bytes(exchange: Exchange) -> list[int]:
    """What every phase's collectives read and write on the rank where that is most: their inputs and outputs."""
    if exchange.num_units * exchange.rows * exchange.cols == 0:
        return []
    across = _between_replicas(exchange, max(exchange.sizes))
    everyone = [[*_phases(run), across] if across else _phases(run) for run in _unlike_runs(exchange)]
    return [
        max(sum(t.input_bytes + t.output_bytes for t in phase) for phase in same)
        for same in zip(*everyone, strict=True)
    ]


def collectives(exchange: Exchange, replica: int | None = None) -> tuple[CollectiveSpec, ...]:
    """All of ``phases``, in order."""
    return tuple(spec for phase in phases(exchange, replica) for spec in phase)


def sent_bytes(exchange: Exchange, shard_rank: int, replica_rank: int) -> int:
    """Bytes that one rank sends, padding included.

    Counted for ring algorithms and pairwise exchanges; a broadcast is the owner's, once for every other rank. With
    even shards, full runs and k units: ``k m n s (W-1) / W`` for a gather of rows, twice that over W for all_to_all.
    Over nodes of g ranks every row travels twice: ``2 k m n s ((g-1) / g + (W/g - 1) / (W/g)) / W``, to fewer peers.
    """
    within = _transfers(_run(exchange, replica_rank, shard_rank))
    across = _between_replicas(exchange, exchange.sizes[shard_rank])
    return sum(transfer.sent_bytes for transfer in (*within, *across))


def gathered_bytes(exchange: Exchange) -> int:
    """Most memory that what one collective gathers, whole units, Grams or results, takes on a rank, in bytes."""
    within = [transfer for run in _unlike_runs(exchange) for transfer in _transfers(run)]
    across = _between_replicas(exchange, max(exchange.sizes))
    return max((transfer.output_bytes for transfer in (*within, *across)), default=0)


def owned_flops(exchange: Exchange, unit_flops: int) -> int:
    """Of a unit's FLOPs those that one rank does for all: with a Gram the small products, else everything.

    The Gram and ``X <- Q X`` are done by every rank for the rows that it holds: ``4 m n^2``, or ``6 m n^2`` where X is
    narrower than Q, which is then applied as two halves.
    """
    if exchange.strategy not in GRAMS:
        return unit_flops
    products = 4 if FLOAT_BYTES[exchange.comm_dtype] >= FLOAT_BYTES["float32"] else 6
    return unit_flops - min(unit_flops, products * exchange.rows * exchange.cols**2)


def flops_by_rank(exchange: Exchange, unit_flops: int) -> list[list[int]]:
    """FLOPs of the iteration, where a whole unit takes ``unit_flops``: of every shard rank, a row per replica.

    A single row where replicas repeat the work.
    """
    own = owned_flops(exchange, unit_flops)
    shards, rows = len(exchange.sizes), max(exchange.rows, 1)
    shared = [0] * shards
    if own != unit_flops:
        # Cut where the rows are cut, so that the ranks' shares sum to the whole.
        ends = [(unit_flops - own) * end // rows for end in itertools.accumulate(exchange.sizes, initial=0)]
        shared = [last - first for first, last in itertools.pairwise(ends)]
    made = []
    for run in _runs(exchange):
        whole = run.owned or (run.units,) * shards
        made.append([units * own + run.units * each for units, each in zip(whole, shared, strict=True)])
    return made
