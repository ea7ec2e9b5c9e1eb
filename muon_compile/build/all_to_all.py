"""Strategy ``all_to_all``: each rank is sent the shards of the units that it owns, and sends the results' rows back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muon_compile.build import collectives
from muon_compile.build.phases import Phases, Solve
from muon_compile.plan.exchange import Exchange, Place


class Crowd(NamedTuple):
    """Ranks that trade rows of units for units.

    Args:
        owned: Units that each of them gets, in order.
        sizes: Rows of every unit that each of them has.
        cols: Columns of a unit.
        rank: Which of them this is.
        group: Name of their process group.
    """

    owned: tuple[int, ...]
    sizes: tuple[int, ...]
    cols: int
    rank: int
    group: str


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
    crowd = shard_crowd(exchange, place)
    units = yield from send_units(x, crowd)
    rows = return_rows(whole(units), crowd)
    yield
    return returned_rows(rows, crowd)


def shard_crowd(exchange: Exchange, place: Place) -> Crowd:
    """All ranks of the shard axis, over one replica's units."""
    return Crowd(exchange.owned(0), exchange.sizes, exchange.cols, place.shard_rank, place.shard_group)


def send_units(x: Tensor, crowd: Crowd) -> Phases:
    """Rows ``[sum(owned), sizes[rank], cols]`` of all units to all rows of the own ones.

    Returns:
        Phases, whose result is ``[owned[rank], sum(sizes), cols]``.
    """
    owned, sizes, cols = crowd.owned, crowd.sizes, crowd.cols
    mine = owned[crowd.rank]
    came = [mine * size * cols for size in sizes]
    # An owner's units are consecutive, so its run of x is too.
    gone = [count * sizes[crowd.rank] * cols for count in owned]
    sent = collectives.all_to_all(x.reshape(-1), came, gone, crowd.group)
    yield
    flat = collectives.wait(sent)
    if min(sizes) == max(sizes):
        return flat.view(len(sizes), mine, sizes[0], cols).transpose(0, 1).reshape(mine, sum(sizes), cols)
    shards = zip(flat.split(came), sizes, strict=True)
    return torch.cat([shard.view(mine, size, cols) for shard, size in shards if size], dim=1)


def return_rows(y: Tensor, crowd: Crowd) -> Tensor:
    """Send everyone its rows of the own units ``[owned[rank], sum(sizes), cols]``; see ``returned_rows``."""
    owned, sizes, cols = crowd.owned, crowd.sizes, crowd.cols
    mine, rows = owned[crowd.rank], sizes[crowd.rank]
    came = [count * rows * cols for count in owned]
    gone = [mine * size * cols for size in sizes]
    if min(sizes) == max(sizes):
        flat = y.reshape(mine, len(sizes), sizes[0], cols).transpose(0, 1).reshape(-1)
    else:
        flat = torch.cat([shard.reshape(-1) for shard in y.split(sizes, dim=1)])
    return collectives.all_to_all(flat, came, gone, crowd.group)


def returned_rows(sent: Tensor, crowd: Crowd) -> Tensor:
    """What ``return_rows`` brings this rank: its rows of all units, ``[sum(owned), sizes[rank], cols]``."""
    # Owners in rank order have the units in their order.
    return collectives.wait(sent).view(sum(crowd.owned), crowd.sizes[crowd.rank], crowd.cols)
