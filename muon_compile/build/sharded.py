"""Parts whose matrices lie on several ranks: the agreement on gradients, and units made whole and cut again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from muon_compile.build.collectives import all_reduce, wait
from muon_compile.build.gram import gram_polynomial
from muon_compile.build.orthogonalize import Norms, orthogonalize, shape_scale
from muon_compile.build.phases import Phases, Tell, unheard
from muon_compile.build.probe_ops import gram_squared_error, squared_error
from muon_compile.build.strategies import run_exchange
from muon_compile.config import MuonConfig
from muon_compile.plan.exchange import Exchange, Place, run_of
from muon_compile.plan.plan import Plan, Stretch


def agree_on_presence(
    plan: Plan, presence: Sequence[Tensor], places: Mapping[int, Place]
) -> tuple[list[Tensor], Tensor]:
    """Let the ranks that exchange matrices agree on which gradients are there, before anything else is sent.

    Returns:
        Presence per bucket, all False where ranks disagree; and whether they agreed, 0-d bool.
    """
    masks = list(presence)
    agreed: Tensor | None = None
    for axes, buckets in plan.agreements():
        place = _place(plan, axes, buckets[0], places)
        total = torch.cat([presence[i].to(torch.int32) for i in buckets])
        ranks = 1
        for _, size, sharded in axes:
            total = wait(all_reduce(total, place.shard_group if sharded else place.replica_group))
            ranks *= size
        everywhere = total == ranks
        ok = (everywhere | (total == 0)).all()
        agreed = ok if agreed is None else agreed & ok
        parts = everywhere.split([plan.buckets[i].size for i in buckets])
        masks = [parts[buckets.index(i)] if i in buckets else mask for i, mask in enumerate(masks)]
    assert agreed is not None
    return [mask & agreed for mask in masks], agreed


def _place(plan: Plan, axes: Sequence[tuple[str, int, bool]], bucket: int, places: Mapping[int, Place]) -> Place:
    """Where this rank stands on the axes of a bucket's mesh: the place of some part that is exchanged there."""
    layout = plan.buckets[bucket].layout
    for index, place in places.items():
        part = plan.parts[index]
        exchange, other = part.exchange, plan.buckets[part.bucket].layout
        if exchange is None:  # of a guarded step
            continue
        assert other is not None and layout is not None
        known = all(axis == (exchange.shard_axis if sharded else other.replica_axis) for axis, _, sharded in axes)
        if other.mesh == layout.mesh and known:
            return place
    raise AssertionError(f"no part is exchanged over {axes}")


def exchange_part(
    part: Stretch,
    update: Tensor,
    place: Place,
    *,
    exact: bool = False,
    tell: Tell = unheard,
    watch: Callable[[Tensor, slice], None] | None = None,
    norms: Callable[[Tensor, slice], None] | None = None,
) -> Phases:
    """Orthogonalize a part over the ranks that share it, in phases.

    Args:
        part: The part, its bucket with this rank's shapes.
        update: Directions ``[units, rows, cols]``, as far as this rank has them.
        place: Where this rank stands.
        exact: Take ``torch.optim.Muon``'s own operators and roundings.
        tell: Hears when orthogonalizing begins and when it is over; what comes before is ``"send"``.
        watch: Hears the squared errors of the matrices that this rank orthogonalizes (``build.probe_ops``), and which
            of the part's units they are of.
        norms: Hears the norms of those matrices, and of which units they are.

    Returns:
        Phases, whose result is the update ``[B, *shape]``, this rank's shard; ``exchanged_scale`` has yet to scale it.
    """
    exchange, config = part.part.exchange, part.bucket.config
    assert exchange is not None and isinstance(config, MuonConfig)
    x = update.to(getattr(torch, exchange.comm_dtype))
    x = (x.mT if exchange.transposed else x).contiguous()
    blocks, scales = _blocks(exchange, config)
    common = exchanged_scale(part)
    units_here = slice(*_solved_units(exchange, place))

    heard: Norms | None = None if norms is None else lambda found: norms(found, units_here)

    def solve(y: Tensor) -> Tensor:
        result = orthogonalize(y, config, exact=exact, form=exchange.form, kernel=exchange.kernel, norms=heard)
        if watch is not None:
            watch(squared_error(result, native=exchange.kernel == "native"), units_here)
        return result

    def whole(y: Tensor) -> Tensor:
        units = y.mT.contiguous() if exchange.transposed else y  # the sums in the order of whole memory
        result = _solve_blocks(units, blocks, [scale / common for scale in scales], solve)
        return result.mT if exchange.transposed else result

    def gram(r: Tensor) -> Tensor:
        q = gram_polynomial(r, config, norms=heard)
        if watch is not None:
            watch(gram_squared_error(r, q), units_here)
        return q

    result = yield from run_exchange(x, exchange, place, whole, gram, tell)
    result = result.mT if exchange.transposed else result
    return result.reshape(part.bucket.size, *part.bucket.shape)


def _solved_units(exchange: Exchange, place: Place) -> tuple[int, int]:
    """First of the part's units that this rank orthogonalizes and the one after the last."""
    first, last = exchange.replica_run(place.replica_rank)
    if exchange.owner_counts:
        start, stop = run_of(exchange.owned(place.replica_rank), place.shard_rank)
        first, last = first + start, first + stop
    return first, last


def exchanged_scale(part: Stretch) -> float:
    """What scales the whole update of an exchanged part: its matrices' common scale, 1 where theirs differ."""
    exchange, config = part.part.exchange, part.bucket.config
    assert exchange is not None and isinstance(config, MuonConfig)
    _, scales = _blocks(exchange, config)
    return scales[0] if len(set(scales)) == 1 else 1.0


def _blocks(exchange: Exchange, config: MuonConfig) -> tuple[tuple[int, ...], list[float]]:
    """Rows of a unit's blocks as they lie in memory, and their scales."""
    rows, cols = (exchange.cols, exchange.rows) if exchange.transposed else (exchange.rows, exchange.cols)
    blocks = exchange.blocks or (rows,)
    return blocks, [shape_scale(config, block, cols) for block in blocks]


def _solve_blocks(
    units: Tensor, blocks: Sequence[int], scales: Sequence[float], solve: Callable[[Tensor], Tensor]
) -> Tensor:
    """Orthogonalize the row blocks of units ``[k, rows, cols]``, each a matrix of its own with its own scale."""
    if len(blocks) == 1:
        return solve(units)
    count, rows, cols = units.shape
    if len(set(blocks)) == 1:
        return solve(units.reshape(count * len(blocks), rows // len(blocks), cols)).reshape(count, rows, cols)
    parts = []
    for block, scale in zip(units.split(list(blocks), dim=1), scales, strict=True):
        result = solve(block)
        parts.append(result if scale == 1.0 else (result.float() * scale).to(result.dtype))
    return torch.cat(parts, dim=1)
