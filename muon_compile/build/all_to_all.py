"""Strategy ``all_to_all``: each rank is sent the shards of the units that it owns, and sends the results' rows back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muon_compile.build import collectives
from muon_compile.plan.exchange import Exchange, Place


def all_to_all(x: Tensor, exchange: Exchange, place: Place, whole: Callable[[Tensor], Tensor]) -> Tensor:
    """Orthogonalize every unit once, on its owner.

    Args:
        x: Shards ``[num_units, sizes[shard_rank], cols]`` of one replica's units.
        exchange: Sizes and owners.
        place: This rank.
        whole: Whole units ``[k, rows, cols]``, any k, to orthogonalized ones of the same dtype.

    Returns:
        Shards of the orthogonalized units, of ``x``'s shape and dtype.
    """
    return return_rows(whole(send_units(x, exchange, place)), exchange, place)


def send_units(x: Tensor, exchange: Exchange, place: Place) -> Tensor:
    """Shards ``[num_units, sizes[shard_rank], cols]`` to the whole units that this rank owns, ``[k, rows, cols]``."""
    owned, sizes, cols = exchange.owned(0), exchange.sizes, exchange.cols
    mine = owned[place.shard_rank]
    came = [mine * size * cols for size in sizes]
    # An owner's units are consecutive, so its run of x is too.
    gone = [count * sizes[place.shard_rank] * cols for count in owned]
    flat = collectives.all_to_all(x.reshape(-1), came, gone, place.shard_group)
    if min(sizes) == max(sizes):
        return flat.view(len(sizes), mine, sizes[0], cols).transpose(0, 1).reshape(mine, exchange.rows, cols)
    shards = zip(flat.split(came), sizes, strict=True)
    return torch.cat([shard.view(mine, size, cols) for shard, size in shards if size], dim=1)


def return_rows(y: Tensor, exchange: Exchange, place: Place) -> Tensor:
    """Whole units ``[k, rows, cols]`` that this rank owns to every rank's rows of all, ``[num_units, size, cols]``."""
    owned, sizes, cols = exchange.owned(0), exchange.sizes, exchange.cols
    mine, rows = owned[place.shard_rank], sizes[place.shard_rank]
    came = [count * rows * cols for count in owned]
    gone = [mine * size * cols for size in sizes]
    if min(sizes) == max(sizes):
        flat = y.reshape(mine, len(sizes), sizes[0], cols).transpose(0, 1).reshape(-1)
    else:
        flat = torch.cat([shard.reshape(-1) for shard in y.split(sizes, dim=1)])
    # Owners in rank order have the units in their order.
    return collectives.all_to_all(flat, came, gone, place.shard_group).view(exchange.num_units, rows, cols)
