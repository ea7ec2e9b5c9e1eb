"""Strategy ``all_to_all``: each rank is sent the shards of the units that it owns, and sends the results' rows back."""

from __future__ import annotations

import torch
from torch import Tensor

from muon_compile.build import collectives
from muon_compile.build.phases import Phases, Solve
from muon_compile.plan.exchange import Exchange, Place


def all_to_all(x: Tensor, exchange: Exchange, place: Place, whole: Solve) -> Phases:
    """Orthogonalize every unit once, on its owner.

    Args:
        x: Shards ``[num_units, sizes[shard_rank], cols]`` of one replica's units.
        exchange: Sizes and owners.
        place: This rank.
        whole: Whole units ``[k, rows, cols]``, any k, to orthogonalized ones of the same dtype.

    Returns:
        Shards of the orthogonalized units, of ``x``'s shape and dtype.
    """
    units = yield from _send_units(x, exchange, place)
    rows = return_rows(whole(units), exchange, place)
    yield
    return returned_rows(rows, exchange, place)


def _send_units(x: Tensor, exchange: Exchange, place: Place) -> Phases:
    """Shards ``[num_units, sizes[shard_rank], cols]`` to the whole units that this rank owns, ``[k, rows, cols]``."""
    owned, sizes, cols = exchange.owned(0), exchange.sizes, exchange.cols
    mine = owned[place.shard_rank]
    came = [mine * size * cols for size in sizes]
    # An owner's units are consecutive, so its run of x is too.
    gone = [count * sizes[place.shard_rank] * cols for count in owned]
    sent = collectives.all_to_all(x.reshape(-1), came, gone, place.shard_group)
    yield
    flat = collectives.wait(sent)
    if min(sizes) == max(sizes):
        return flat.view(len(sizes), mine, sizes[0], cols).transpose(0, 1).reshape(mine, exchange.rows, cols)
    shards = zip(flat.split(came), sizes, strict=True)
    return torch.cat([shard.view(mine, size, cols) for shard, size in shards if size], dim=1)


def return_rows(y: Tensor, exchange: Exchange, place: Place) -> Tensor:
    """Send every rank its rows of the whole units ``[k, rows, cols]`` that this rank owns; see ``returned_rows``."""
    owned, sizes, cols = exchange.owned(0), exchange.sizes, exchange.cols
    mine, rows = owned[place.shard_rank], sizes[place.shard_rank]
    came = [count * rows * cols for count in owned]
    gone = [mine * size * cols for size in sizes]
    if min(sizes) == max(sizes):
        flat = y.reshape(mine, len(sizes), sizes[0], cols).transpose(0, 1).reshape(-1)
    else:
        flat = torch.cat([shard.reshape(-1) for shard in y.split(sizes, dim=1)])
    return collectives.all_to_all(flat, came, gone, place.shard_group)


def returned_rows(sent: Tensor, exchange: Exchange, place: Place) -> Tensor:
    """What ``return_rows`` brings this rank: its rows of all units, ``[num_units, size, cols]``."""
    # Owners in rank order have the units in their order.
    return collectives.wait(sent).view(exchange.num_units, exchange.sizes[place.shard_rank], exchange.cols)
