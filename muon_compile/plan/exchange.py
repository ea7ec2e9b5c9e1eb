"""How the matrices of a part are made whole on a mesh, and shared out: plain data, the same on every rank.

A *unit* is what is cut over ranks as one: the trailing two dims of a parameter (a flattened convolution is one unit; a
stack ``[E, m, n]`` is E of them). Units are numbered parameter by parameter, and every division is into consecutive
runs: since all units of a part cost the same, that balances as well as any other assignment, and no rank ever has to
gather single rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, get_args

Strategy = Literal[
    "local",
    "all_gather",
    "all_to_all",
    "gather_broadcast",
    "gather_scatter",
    "gram_all_reduce",
    "gram_scatter",
    "hierarchical_all_to_all",
]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
STRATEGY_NAMES: tuple[str, ...] = STRATEGIES
# Each matrix is orthogonalized by one rank of the shard axis.
OWNED = ("all_to_all", "gather_broadcast", "gather_scatter", "gram_scatter", "hierarchical_all_to_all")
# Every rank gets every whole matrix first, so memory bounds how many at once.
GATHERS = ("all_gather", "gather_broadcast", "gather_scatter")
# No rank sees a whole matrix: Grams are summed.
GRAMS = ("gram_all_reduce", "gram_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChoice:
    """A bucket's strategy and why.

    Args:
        name: The strategy.
        reason: Why, in a few words.
        seconds: Its predicted time for the bucket alone; None where it was asked for.
        runner_up: What would have come next; None where nothing else can be used.
        runner_up_seconds: Its predicted time.
    """

    name: Strategy
    reason: str
    seconds: float | None = None
    runner_up: Strategy | None = None
    runner_up_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How the units of one part are made whole and shared out.

    Args:
        strategy: Over the shard axis; ``"local"`` where every rank holds whole units.
        num_units: Units of the part.
        rows: Rows of a whole unit; the dim that is sharded, so a column-sharded unit counts transposed.
        cols: Its columns.
        transposed: The unit is sharded along its columns in memory.
        shard_axis: Mesh axis that ``rows`` is cut over; None with ``"local"``.
        sizes: Rows that each rank of the shard axis holds; they sum to ``rows``. ``(rows,)`` with ``"local"``.
        replica_axis: Mesh axis whose ranks hold copies of the same shards; None where there is none.
        replica_counts: Units that each replica orthogonalizes, in order, summing to ``num_units``. Empty: every replica
            does all of them.
        owner_counts: For each replica (one row where replicas repeat) the units that each rank of the shard axis owns,
            in order; a row sums to the replica's units. Empty for strategies without owners.
        comm_dtype: dtype of momenta and results on the wire.
        form: Iteration form (``plan.forms``).
        kernel: What runs it (``plan.Batch``).
        blocks: Rows of every matrix of a unit as it lies in memory (heads, blocks of a fused weight); empty: it is one.
        gathers_results: The owners' results of gather_broadcast travel in one gather, padded to the most that a rank
            owns, instead of one broadcast per owner.
        node_size: Consecutive ranks of the shard axis that are a node, g, to hierarchical_all_to_all: rank r has index
            ``r % g`` in node ``r // g``. 0 for other strategies.
    """

    strategy: Strategy
    num_units: int
    rows: int
    cols: int
    transposed: bool
    shard_axis: str | None
    sizes: tuple[int, ...]
    replica_axis: str | None
    replica_counts: tuple[int, ...]
    owner_counts: tuple[tuple[int, ...], ...]
    comm_dtype: str
    form: str
    kernel: str
    blocks: tuple[int, ...] = ()
    gathers_results: bool = False
    node_size: int = 0

    def replica_run(self, replica: int) -> tuple[int, int]:
        """First unit of a replica and the one after its last."""
        return run_of(self.replica_counts, replica) if self.replica_counts else (0, self.num_units)

    def owned(self, replica: int) -> tuple[int, ...]:
        """Units that each rank of the shard axis owns within a replica's run."""
        return self.owner_counts[replica if self.replica_counts else 0]

    @property
    def node_rows(self) -> tuple[int, ...]:
        """Rows that the ranks of each node hold together."""
        size = self.node_size
        return tuple(sum(self.sizes[start : start + size]) for start in range(0, len(self.sizes), size))

    def index_units(self, replica: int) -> tuple[int, ...]:
        """Units that the ranks of each index within their nodes own together, within a replica's run."""
        return tuple(sum(self.owned(replica)[index :: self.node_size]) for index in range(self.node_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands in a part's exchange.

    Args:
        shard_rank: Its index along the shard axis.
        shard_group: Name of the process group of that axis; empty where nothing is sharded.
        replica_rank: Its index along the replica axis.
        replica_group: Name of the process group of that axis; empty where there are no replicas.
        node_group: Name of the process group of its node; empty where the exchange knows no nodes.
        peer_group: Name of the process group of the ranks of its index, one in each node; likewise.
    """

    shard_rank: int = 0
    shard_group: str = ""
    replica_rank: int = 0
    replica_group: str = ""
    node_group: str = ""
    peer_group: str = ""


def run_of(counts: tuple[int, ...], index: int) -> tuple[int, int]:
    """Start and stop of the ``index``-th of consecutive runs."""
    stops = list(itertools.accumulate(counts, initial=0))
    return stops[index], stops[index + 1]


def default_node_size(ranks: int) -> int:
    """The node size g at which a rank has the fewest peers, ``(g - 1) + (ranks / g - 1)``, of two the larger.

    0 where there is none: ``ranks`` has no divisor but 1 and itself.
    """
    sizes = [size for size in range(2, ranks) if ranks % size == 0]
    return min(sizes, key=lambda size: (size + ranks // size, -size), default=0)
