"""The strategies by name, and how a part's units go through one.

Every rank of a group issues the same collectives in the same order, one that owns nothing too. Their number, over the
shard axis: ``all_gather`` and ``gram_all_reduce`` 1, ``gather_scatter``, ``all_to_all`` and ``gram_scatter`` 2,
``hierarchical_all_to_all`` 4, ``gather_broadcast`` 2, or 1 and one per owner that has units; over the replica axis 1
where replicas divide the units.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from muon_compile.build import all_to_all, gather, gram, hierarchical, replicas
from muon_compile.build.phases import Phases, Solve, Tell, unheard
from muon_compile.plan.exchange import Exchange, Place, Strategy

_Run = Callable[[Tensor, Exchange, Place, Solve], Phases]


def _local(x: Tensor, exchange: Exchange, place: Place, whole: Solve) -> Phases:
    yield from ()
    return whole(x)


# What makes units whole, and what never does: the last argument is run_exchange's whole, or its gram.
WHOLE: dict[Strategy, _Run] = {
    "local": _local,
    "all_gather": gather.all_gather,
    "all_to_all": all_to_all.all_to_all,
    "gather_broadcast": gather.gather_broadcast,
    "gather_scatter": gather.gather_scatter,
    "hierarchical_all_to_all": hierarchical.hierarchical_all_to_all,
}
GRAM: dict[Strategy, Callable[[Tensor, Exchange, Place, Solve, Tell], Phases]] = {
    "gram_all_reduce": gram.gram_all_reduce,
    "gram_scatter": gram.gram_scatter,
}


def run_exchange(
    x: Tensor, exchange: Exchange, place: Place, whole: Solve, gram: Solve | None = None, tell: Tell = unheard
) -> Phases:
    """Orthogonalize units that are cut over ranks; called by every rank of the shard and replica axes.

    Args:
        x: This rank's shards ``[num_units, sizes[shard_rank], cols]``, of ``comm_dtype``; any size may be 0.
        exchange: How; the same on every rank.
        place: Which of the ranks this is.
        whole: Orthogonalizes whole units, ``[k, rows, cols]`` to the same shape, for any k. Its results are rounded to
            x's dtype, whether they travel or not: strategies agree.
        gram: For strategies of ``GRAM``: Gram sums ``X^T X``, ``[k, cols, cols]`` of float32 or wider, to ``Q`` of the
            same shape and dtype, with the normalization in it; such as ``gram_polynomial``.
        tell: Hears when orthogonalizing begins and when it is over.

    Returns:
        Phases, whose result is the same shards of the orthogonalized units, contiguous, of x's shape and dtype.
    """
    assert x.shape == (exchange.num_units, exchange.sizes[place.shard_rank], exchange.cols)

    # Nothing is made of nothing: no product with an empty batch in the graph.
    def rounded(y: Tensor) -> Tensor:
        tell("orthogonalize")
        result = whole(y).to(y.dtype) if y.shape[0] else y
        tell("return")
        return result

    def polynomial(r: Tensor) -> Tensor:
        assert gram is not None
        tell("orthogonalize")
        result = gram(r) if r.shape[0] else r
        tell("return")
        return result

    def inside(part: Tensor, alone: Exchange, where: Place) -> Phases:
        if alone.strategy in GRAM:
            return GRAM[alone.strategy](part, alone, where, polynomial, tell)
        return WHOLE[alone.strategy](part, alone, where, rounded)

    result = yield from replicas.over_replicas(x, exchange, place, inside)
    return result.contiguous()
