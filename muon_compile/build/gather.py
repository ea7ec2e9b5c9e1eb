"""Strategies that first give every rank every whole unit: ``all_gather``, ``gather_broadcast``, ``gather_scatter``.

All take the directions' shards ``[num_units, sizes[shard_rank], cols]`` of one replica's units, and return the
orthogonalized directions' shards, of the same shape and dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.build import collectives
from muon_compile.build.all_to_all import return_rows, returned_rows, shard_crowd
from muon_compile.build.phases import Phases, Solve
from muon_compile.plan.exchange import Exchange, Place, run_of


def all_gather(x: Tensor, exchange: Exchange, place: Place, whole: Solve) -> Phases:
    """Every rank orthogonalizes every unit and keeps its own rows: one collective, no division of the work."""
    start, stop = run_of(exchange.sizes, place.shard_rank)
    units = yield from _gather_units(x, exchange, place)
    return whole(units)[:, start:stop]


def gather_broadcast(x: Tensor, exchange: Exchange, place: Place, whole: Solve) -> Phases:
    """Each owner orthogonalizes its units and sends them whole to everyone; every rank cuts its rows."""
    units = yield from _gather_units(x, exchange, place)
    owned = exchange.owned(0)
    first, last = run_of(owned, place.shard_rank)
    own = whole(units[first:last])
    start, stop = run_of(exchange.sizes, place.shard_rank)
    if exchange.gathers_results:
        runs = collectives.gather_runs(own, owned, place.shard_group)
        yield
        return collectives.joined(runs, owned)[:, start:stop]
    sent = []
    for owner, count in enumerate(owned):
        if count:
            buffer = own if owner == place.shard_rank else x.new_empty((count, exchange.rows, exchange.cols))
            sent.append(collectives.broadcast(buffer, owner, place.shard_group))
    yield
    return torch.cat([collectives.wait(result)[:, start:stop] for result in sent]) if sent else x


def gather_scatter(x: Tensor, exchange: Exchange, place: Place, whole: Solve) -> Phases:
    """Each owner orthogonalizes its units and sends each rank its rows of them."""
    units = yield from _gather_units(x, exchange, place)
    first, last = run_of(exchange.owned(0), place.shard_rank)
    crowd = shard_crowd(exchange, place)
    rows = return_rows(whole(units[first:last]), crowd)
    yield
    return returned_rows(rows, crowd)


def _gather_units(x: Tensor, exchange: Exchange, place: Place) -> Phases:
    """Whole units ``[num_units, rows, cols]`` of their shards, in one gather of shards padded to the longest."""
    sizes, longest = exchange.sizes, max(exchange.sizes)
    sent = collectives.all_gather(collectives.padded(x, 1, longest)[None], len(sizes), place.shard_group)
    yield
    every = collectives.wait(sent)
    if min(sizes) == longest:
        return every.transpose(0, 1).reshape(exchange.num_units, exchange.rows, exchange.cols)
    shards = zip(every.unbind(0), sizes, strict=True)
    return torch.cat([shard[:, :size] for shard, size in shards if size], dim=1)
