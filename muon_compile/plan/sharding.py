"""Give the parts whose matrices lie on several ranks their exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from muon_compile.config import MuonConfig
from muon_compile.plan.assign import assign_grid
from muon_compile.plan.exchange import OWNED, STRATEGIES, STRATEGY_NAMES, Exchange, Place, Strategy, default_node_size
from muon_compile.plan.forms import parse_form
from muon_compile.plan.localize import all_blocks, cut_between_stacks, is_flat, needs_exchange
from muon_compile.plan.plan import Bucket, FormChoice, Part, Plan, find_choice, resolve_part
from muon_compile.plan.strategies import (
    choose_strategy,
    feasible,
    flops_of_rank,
    gathers_results,
    owned_flops,
    phases,
)
from muon_compile.spec import FLOAT_BYTES, CollectiveSpec, MeshSpec

# Gram strategies iterate on Grams alone: float32, all steps in one segment.
_GRAM_FORM = "gram"


class _Wishes(NamedTuple):
    """What was asked for, for all parts; ``plan_exchanges`` has the meanings."""

    strategy: str
    divide: bool
    comm_dtype: str | None
    node_size: int | None


def plan_exchanges(
    buckets: Sequence[Bucket],
    parts: Sequence[Part],
    choices: Sequence[FormChoice],
    *,
    strategy: str,
    divide: bool,
    comm_dtype: str | None,
    name_of: Callable[[Bucket], str],
    node_size: int | None = None,
) -> tuple[Part, ...]:
    """The parts with their exchanges: a strategy each, and owners that balance Newton-Schulz work over all of them.

    Args:
        buckets: The plan's buckets, with whole shapes.
        parts: Their parts.
        choices: Form and kernel of every kind of matrix.
        strategy: ``"auto"``, or one for all matrices that lie on several ranks and whose bucket names none.
        divide: Replicas share the work instead of repeating it.
        comm_dtype: dtype on the wire; None: that of the products.
        name_of: A bucket's name for errors.
        node_size: Ranks of a node, for hierarchical_all_to_all; None: ``default_node_size`` of the shard axis.

    Raises:
        ValueError: The strategy cannot make a bucket's matrices whole; says which and why.
    """
    wishes = _Wishes(strategy, divide, comm_dtype, node_size)
    drafts: dict[int, Exchange] = {}
    for index, part in enumerate(parts):
        bucket = resolve_part(buckets, part).bucket
        draft = _draft(bucket, choices, wishes, name_of)
        if draft is not None:
            drafts[index] = draft
    worlds: dict[tuple[MeshSpec, str | None, str | None], list[int]] = {}
    for index, draft in drafts.items():
        layout = buckets[parts[index].bucket].layout
        assert layout is not None
        worlds.setdefault((layout.mesh, draft.shard_axis, draft.replica_axis), []).append(index)
    result = list(parts)
    for (mesh, shard_axis, replica_axis), indices in worlds.items():
        shards = mesh.size(shard_axis) if shard_axis else 1
        replicas = mesh.size(replica_axis) if replica_axis else 1
        jobs = [(drafts[i].num_units, _owner_flops(drafts[i], buckets[parts[i].bucket])) for i in indices]
        shared = divide and replicas > 1
        runs, owners = assign_grid(jobs, replicas, shards, divide=shared)
        for i, run, owned in zip(indices, runs, owners, strict=True):
            draft, owners_of = drafts[i], tuple(owned) if drafts[i].strategy in OWNED else ()
            exchange = replace(
                draft,
                replica_counts=tuple(run) if shared else (),
                owner_counts=owners_of,
                replica_axis=replica_axis if shared else None,
                gathers_results=draft.strategy == "gather_broadcast" and gathers_results(owners_of),
            )
            result[i] = replace(parts[i], exchange=exchange)
    return tuple(result)


def _draft(
    bucket: Bucket, choices: Sequence[FormChoice], wishes: _Wishes, name_of: Callable[[Bucket], str]
) -> Exchange | None:
    """A part's exchange but for its owners; None where it needs none."""
    layout, config, view = bucket.layout, bucket.config, bucket.view
    if layout is None or view is None or math.prod(bucket.shape) == 0:
        return None
    assert isinstance(config, MuonConfig)
    rows, cols = (bucket.shape[0], math.prod(bucket.shape[1:])) if is_flat(bucket) else bucket.shape[-2:]
    units = bucket.size * (1 if is_flat(bucket) else math.prod(bucket.shape[:-2]))
    blocks = all_blocks(bucket)
    form, kernel = _form_of(bucket, choices)
    own = Exchange(
        strategy="local",
        num_units=units,
        rows=rows,
        cols=cols,
        transposed=False,
        shard_axis=None,
        sizes=(rows,),
        replica_axis=layout.replica_axis,
        replica_counts=(),
        owner_counts=(),
        comm_dtype=wishes.comm_dtype or config.ns_dtype,
        form=form,
        kernel=kernel,
        blocks=blocks if len(blocks) > 1 else (),
    )
    if not needs_exchange(bucket):
        stacks = layout.dim is not None and cut_between_stacks(bucket, layout)
        alike = layout.dim is None or (stacks and len(set(layout.sizes)) == 1)
        if not wishes.divide or layout.replica_axis is None or not alike:
            return None
        return replace(own, num_units=units // len(layout.sizes)) if stacks else own
    if is_flat(bucket) and layout.dim != 0:
        raise NotImplementedError(
            f"Parameter {name_of(bucket)!r}: expected a parameter that is read as one flat matrix to be sharded along "
            f"dim 0, got dim {layout.dim} of {bucket.shape}."
        )
    transposed = not is_flat(bucket) and layout.dim == len(bucket.shape) - 1
    cut = replace(own, transposed=transposed, shard_axis=layout.axis, sizes=layout.sizes)
    cut = replace(cut, rows=cols, cols=rows) if transposed else cut
    nodes = default_node_size(len(layout.sizes)) if wishes.node_size is None else wishes.node_size
    name = _strategy_of(cut, config, bucket.strategy or wishes.strategy, nodes, name_of(bucket))
    made = replace(cut, strategy=name, node_size=nodes if name == "hierarchical_all_to_all" else 0)
    return replace(made, form=_GRAM_FORM, kernel="graph") if name in ("gram_all_reduce", "gram_scatter") else made


def _strategy_of(cut: Exchange, config: MuonConfig, strategy: str, node_size: int, param: str) -> Strategy:
    """The strategy for units that are cut over ranks: chosen, or the one that was asked for.

    Raises:
        ValueError: That one cannot make them whole; names a parameter and says why.
    """
    rows, cols, sizes = cut.rows, cut.cols, cut.sizes
    blocks_cut, relative_eps = bool(cut.blocks), config.eps == "relative"
    for name in STRATEGIES:
        if name != strategy:
            continue
        reason = feasible(
            name,
            rows=rows,
            cols=cols,
            sizes=sizes,
            blocks_cut=blocks_cut,
            relative_eps=relative_eps,
            node_size=node_size,
        )
        if reason is not None:
            raise ValueError(
                f"Parameter {param!r}: strategy {strategy!r} cannot be used: {reason}. Expected another of "
                f"{STRATEGY_NAMES}, or 'auto'."
            )
        return name
    return choose_strategy(
        rows=rows,
        cols=cols,
        sizes=sizes,
        num_units=cut.num_units,
        comm_dtype=cut.comm_dtype,
        blocks_cut=blocks_cut,
        relative_eps=relative_eps,
        native=cut.kernel == "native",
    ).name


def _form_of(bucket: Bucket, choices: Sequence[FormChoice]) -> tuple[str, str]:
    """Form and kernel of a unit: those of its blocks where they agree."""
    assert bucket.view is not None
    found = {(c.form, c.kernel) for c in (find_choice(choices, bucket, rows) for rows in bucket.view.blocks)}
    return found.pop() if len(found) == 1 else ("standard", "graph")


def unit_flops(exchange: Exchange, bucket: Bucket) -> int:
    """FLOPs of one unit's iteration, all of its blocks."""
    assert isinstance(bucket.config, MuonConfig)
    form = parse_form(exchange.form, bucket.config.ns_steps)
    rows, cols = (exchange.cols, exchange.rows) if exchange.transposed else (exchange.rows, exchange.cols)
    symmetric, narrow = exchange.kernel != "graph", FLOAT_BYTES[bucket.config.ns_dtype] < FLOAT_BYTES["float32"]
    return sum(form.flops(block, cols, symmetric=symmetric, narrow=narrow) for block in exchange.blocks or (rows,))


def _owner_flops(exchange: Exchange, bucket: Bucket) -> int:
    """What the owner of a unit does for all."""
    return max(1, owned_flops(exchange.strategy, exchange.rows, exchange.cols, unit_flops(exchange, bucket)))


def exchanged_bytes(bucket: Bucket, strategy: str, comm_dtype: str | None) -> int:
    """About what a bucket's whole matrices take on one rank while they are exchanged, in bytes."""
    if not needs_exchange(bucket) or strategy.startswith("gram"):
        return 0
    assert isinstance(bucket.config, MuonConfig) and bucket.layout is not None
    total = bucket.size * math.prod(bucket.shape) * FLOAT_BYTES[comm_dtype or bucket.config.ns_dtype]
    return 2 * total // len(bucket.layout.sizes) if strategy.endswith("all_to_all") else 2 * total


def promised_collectives(plan: Plan, places: Mapping[int, Place] | None = None) -> tuple[CollectiveSpec, ...]:
    """Every collective of a step, in order: the agreements on gradients, then wave by wave, phase by phase.

    Args:
        plan: The plan.
        places: Where a rank stands, for every part with an exchange: the promise for that rank. None: for all, as if
            every rank's replica owned whatever one of them owns.
    """
    made: list[CollectiveSpec] = []
    for axes, buckets in plan.agreements():
        count = sum(plan.buckets[i].size for i in buckets)
        made += [CollectiveSpec(kind="all_reduce", axis=axis, bytes_per_rank=4 * count) for axis, _, _ in axes]
    for wave in plan.waves:
        shared = [(i, exchange) for i in wave.parts if (exchange := plan.parts[i].exchange) is not None]
        parts = [phases(exchange, None if places is None else places[i].replica_rank) for i, exchange in shared]
        # The parts of a wave go through their phases side by side.
        made += [spec for same in zip_longest(*parts, fillvalue=()) for phase in same for spec in phase]
    return tuple(made)


def rank_flops(plan: Plan) -> list[int]:
    """Newton-Schulz FLOPs of every rank of the plan's mesh, for the parts that are exchanged there."""
    mesh = plan.mesh
    loads = [0] * mesh.num_ranks
    for part in plan.parts:
        exchange, layout = part.exchange, plan.buckets[part.bucket].layout
        if exchange is None or layout is None or layout.mesh != mesh:
            continue
        each = unit_flops(exchange, plan.buckets[part.bucket])
        for rank in range(mesh.num_ranks):
            at = mesh.coordinates(rank)
            shard = at[exchange.shard_axis] if exchange.shard_axis else 0
            replica = at[exchange.replica_axis] if exchange.replica_axis else 0
            loads[rank] += flops_of_rank(exchange, each, shard, replica)
    return loads
