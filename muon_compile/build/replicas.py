"""Replicas hold copies of the same shards: they repeat the work, or each does its run of the units and sends the rest.

Dividing adds one gather over the replica axis to the shard axis's own collectives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from muon_compile.build import collectives
from muon_compile.build.phases import Phases
from muon_compile.plan.exchange import Exchange, Place


def over_replicas(
    x: Tensor, exchange: Exchange, place: Place, inside: Callable[[Tensor, Exchange, Place], Phases]
) -> Phases:
    """Run ``inside`` over the units of this rank's replica.

    Args:
        x: Shards ``[num_units, size, cols]``.
        exchange: Replicas and owners.
        place: This rank.
        inside: ``(x, exchange, place) -> Phases``, over the shard axis. Its exchange is of its replica alone: no
            ``replica_counts``, and one row of owners.

    Returns:
        What ``inside`` made, of all units: ``[num_units, size, cols]``.
    """
    if not exchange.replica_counts:
        return (yield from inside(x, exchange, place))
    first, last = exchange.replica_run(place.replica_rank)
    alone = dataclasses.replace(
        exchange,
        num_units=last - first,
        replica_counts=(),
        owner_counts=(exchange.owned(place.replica_rank),) if exchange.owner_counts else (),
    )
    own = yield from inside(x[first:last], alone, place)
    runs = collectives.gather_runs(own, exchange.replica_counts, place.replica_group)
    yield
    return collectives.joined(runs, exchange.replica_counts)
