"""Which strategies can make units whole, and why others cannot."""

from __future__ import annotations

from muon_compile.plan.exchange import GRAMS, Strategy


def feasible(
    strategy: Strategy,
    *,
    rows: int,
    cols: int,
    sizes: tuple[int, ...],
    blocks_cut: bool,
    relative_eps: bool,
    node_size: int = 0,
) -> str | None:
    """Why a strategy cannot make these units whole, in words; None where it can.

    Args:
        strategy: Over the shard axis.
        rows: Rows of a whole unit, the dim that is sharded.
        cols: Its columns.
        sizes: Rows that each rank holds.
        blocks_cut: The unit is a fused weight, several matrices whose rows are cut together.
        relative_eps: The norm is scale-invariant (``eps="relative"``).
        node_size: Ranks of a node for hierarchical_all_to_all; 0: none was given, and none divides the ranks.
    """
    sharded = len(sizes) > 1
    if strategy == "local":
        if sharded:
            return (
                f"each of {len(sizes)} ranks holds a part of every unit, and orthogonalizing parts is another algorithm"
            )
        return None
    if not sharded:
        return "every rank holds whole units, so there is nothing to exchange"
    if strategy == "hierarchical_all_to_all":
        return _why_no_nodes(len(sizes), node_size)
    if strategy not in GRAMS:
        return None
    if rows < cols:
        return f"the sharded dim has {rows} entries, the other one {cols}: only along the longer one do Grams add up"
    if blocks_cut:
        return "a fused weight is several matrices, each with a Gram of its own"
    if relative_eps:
        return 'eps="relative" needs the largest entry of a unit before its Gram'
    return None


def _why_no_nodes(ranks: int, node_size: int) -> str | None:
    if node_size == 0 or ranks % node_size:
        return f"{ranks} shard ranks do not divide into nodes of {node_size or 'several ranks each'}"
    if node_size in (1, ranks):
        return f"{ranks} shard ranks in nodes of {node_size} leave nothing to exchange in one of the two steps"
    return None
