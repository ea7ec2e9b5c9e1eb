"""Strategy ``hierarchical_all_to_all``: what ``all_to_all`` does, in two steps, within nodes and between them.

A shard that is to go to rank ``(node, index)`` goes to the rank of that index in its own node first, together with what
is for that index in other nodes, and then to its node. A rank so has ``(g - 1) + (W / g - 1)`` peers, for every row
that is sent twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muon_compile.build.all_to_all import Crowd, return_rows, returned_rows, send_units
from muon_compile.build.phases import Phases, Solve
from muon_compile.plan.exchange import Exchange, Place


def hierarchical_all_to_all(x: Tensor, exchange: Exchange, place: Place, whole: Solve) -> Phases:
    """Orthogonalize every unit once, on its owner; arguments and result as ``all_to_all``'s."""
    owned, size, cols = exchange.owned(0), exchange.node_size, exchange.cols
    node, index = divmod(place.shard_rank, size)
    in_node = exchange.sizes[node * size : (node + 1) * size]
    within = Crowd(exchange.index_units(0), in_node, cols, index, place.node_group)
    between = Crowd(owned[index::size], exchange.node_rows, cols, node, place.peer_group)
    rows = yield from send_units(_by_column(x, owned, size), within)
    units = yield from send_units(rows, between)
    sent = return_rows(whole(units), between)
    yield
    sent = return_rows(returned_rows(sent, between), within)
    yield
    by_index = [count for start in range(size) for count in owned[start::size]]
    return _by_column(returned_rows(sent, within), by_index, len(owned) // size)


def _by_column(x: Tensor, counts: Sequence[int], width: int) -> Tensor:
    """Runs of ``x``, of ``counts`` units each, taken as a table ``width`` wide, row after row: column after column.

    Owners are numbered node by node, a table of nodes by indices; its own table undoes it.
    """
    if min(counts) == max(counts):
        table = x.view(len(counts) // width, width, counts[0], *x.shape[1:])
        return table.transpose(0, 1).reshape(x.shape)
    runs = x.split(list(counts))
    return torch.cat([run for column in range(width) for run in runs[column::width] if run.shape[0]])
