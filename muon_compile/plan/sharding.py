"""Give the parts whose matrices lie on several ranks their exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import add

from muon_compile.config import MuonConfig
from muon_compile.plan.assign import assign_grid
from muon_compile.plan.exchange import (
    GATHERS,
    GRAMS,
    OWNED,
    STRATEGIES,
    STRATEGY_NAMES,
    Exchange,
    Place,
    StrategyChoice,
    default_node_size,
)
from muon_compile.plan.forms import parse_form
from muon_compile.plan.hardware import Hardware, network_of
from muon_compile.plan.localize import all_blocks, cut_between_stacks, is_flat, needs_exchange
from muon_compile.plan.marks import Phase
from muon_compile.plan.network import Group
from muon_compile.plan.plan import Bucket, FormChoice, NormSum, Part, Plan, find_choice, resolve_part
from muon_compile.plan.select import Surroundings, rank_by_time, why_not, with_strategy
from muon_compile.plan.strategies import (
    flops_by_rank,
    gathers_results,
    owned_flops,
    phases,
    phases_before,
    role_of,
)
from muon_compile.spec import FLOAT_BYTES, CollectiveSpec, MeshSpec, ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decides a plan beside its buckets.

    Args:
        strategy: ``"auto"``, or one for all buckets that name none.
        divide: Replicas share the work instead of repeating it.
        comm_dtype: dtype on the wire; None: that of the products.
        max_temp_bytes: Bound on the temporaries that are alive at once.
        max_gather_bytes: Bound on what is gathered at once.
        node_size: Shard ranks of a node, for hierarchical_all_to_all; None: the network's, else ``default_node_size``.
        hardware_of: The machine's figures, by device.
        name_of: A bucket's name for errors.
    """

    strategy: str
    divide: bool
    comm_dtype: str | None
    max_temp_bytes: int
    max_gather_bytes: int
    node_size: int | None
    hardware_of: Callable[[str], Hardware]
    name_of: Callable[[Bucket], str]


def rank_strategies(
    buckets: Sequence[Bucket], choices: Sequence[FormChoice], rules: Rules
) -> dict[int, tuple[StrategyChoice, ...]]:
    """For every bucket whose matrices lie on several ranks the strategies that it can take, the best one first.

    Raises:
        ValueError: The strategy that was asked for cannot make a bucket's matrices whole, or the network can hold none;
            says which and why.
        NotImplementedError: A layout that no strategy knows.
    """
    drafts: dict[int, Exchange] = {}
    for index, bucket in enumerate(buckets):
        if not needs_exchange(bucket):
            continue
        assert bucket.layout is not None
        if is_flat(bucket) and bucket.layout.dim != 0:
            raise NotImplementedError(
                f"Parameter {rules.name_of(bucket)!r}: expected a parameter that is read as one flat matrix to be "
                f"sharded along dim 0, got dim {bucket.layout.dim} of {bucket.shape}."
            )
        draft = _draft(replace(bucket, strategy="all_gather"), choices, rules)
        if draft is not None:
            drafts[index] = draft
    totals: dict[MeshSpec, int] = {}
    for index, draft in drafts.items():
        mesh = _mesh_of(buckets[index])
        totals[mesh] = totals.get(mesh, 0) + draft.num_units * unit_flops(draft, buckets[index])
    shares = {i: unit_flops(draft, buckets[i]) / max(1, totals[_mesh_of(buckets[i])]) for i, draft in drafts.items()}
    return {i: _rank(buckets[i], draft, shares[i], rules) for i, draft in drafts.items()}


def _rank(bucket: Bucket, cut: Exchange, share: float, rules: Rules) -> tuple[StrategyChoice, ...]:
    config, param, wanted = bucket.config, rules.name_of(bucket), bucket.strategy or rules.strategy
    assert isinstance(config, MuonConfig)
    nodes = node_size_of(len(cut.sizes), bucket, rules)
    for name in STRATEGIES:
        if name != wanted:
            continue
        reason = why_not(cut, config, name, nodes)
        if reason is not None:
            raise ValueError(
                f"Parameter {param!r}: strategy {name!r} cannot be used: {reason}. Expected another of "
                f"{STRATEGY_NAMES}, or 'auto'."
            )
        return (StrategyChoice(name=name, reason="asked for"),)
    mesh = _mesh_of(bucket)
    around = Surroundings(
        mesh=mesh,
        node_size=nodes,
        names_nodes=rules.node_size is not None,
        replicas=mesh.size(cut.replica_axis) if rules.divide and cut.replica_axis else 1,
        hardware=rules.hardware_of(bucket.device),
        max_gather_bytes=rules.max_gather_bytes,
        share=share,
    )
    try:
        return rank_by_time(cut, config, around)
    except ValueError as error:
        raise ValueError(f"Parameter {param!r}: {error}") from error


def node_size_of(ranks: int, bucket: Bucket, rules: Rules) -> int:
    """Shard ranks of a node: as asked for, else the outermost units of the network that divide the axis evenly."""
    if rules.node_size is not None:
        return rules.node_size
    assert bucket.layout is not None and bucket.layout.axis is not None
    stride, network = (
        Group.along(bucket.layout.mesh, bucket.layout.axis).stride,
        network_of(rules.hardware_of(bucket.device)),
    )
    # Nodes so small that a device could not hold the peers between them are none.
    limits = [
        p.max_queue_pairs // p.queue_pairs_per_connection for p in network.planes if p.max_queue_pairs is not None
    ]
    most = min(limits, default=ranks)
    for level in reversed(network.levels):
        size = (level.ranks or 0) // stride
        if 1 < size < ranks and ranks % size == 0 and ranks // size <= most:
            return size
    return default_node_size(ranks)


def _mesh_of(bucket: Bucket) -> MeshSpec:
    assert bucket.layout is not None
    return bucket.layout.mesh


def plan_exchanges(
    buckets: Sequence[Bucket],
    parts: Sequence[Part],
    choices: Sequence[FormChoice],
    rules: Rules,
) -> tuple[Part, ...]:
    """The parts with their exchanges, and owners that balance Newton-Schulz work over all of them.

    Args:
        buckets: The plan's buckets, with whole shapes and their strategies chosen.
        parts: Their parts.
        choices: Form and kernel of every kind of matrix.
        rules: What else decides.
    """
    drafts: dict[int, Exchange] = {}
    for index, part in enumerate(parts):
        bucket = resolve_part(buckets, part).bucket
        draft = _draft(bucket, choices, rules)
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
        shared = rules.divide and replicas > 1
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


def _draft(bucket: Bucket, choices: Sequence[FormChoice], rules: Rules) -> Exchange | None:
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
        comm_dtype=rules.comm_dtype or config.ns_dtype,
        form=form,
        kernel=kernel,
        blocks=blocks if len(blocks) > 1 else (),
    )
    if not needs_exchange(bucket):
        stacks = layout.dim is not None and cut_between_stacks(bucket, layout)
        alike = layout.dim is None or (stacks and len(set(layout.sizes)) == 1)
        if not rules.divide or layout.replica_axis is None or not alike:
            return None
        return replace(own, num_units=units // len(layout.sizes)) if stacks else own
    assert not is_flat(bucket) or layout.dim == 0
    transposed = not is_flat(bucket) and layout.dim == len(bucket.shape) - 1
    cut = replace(own, transposed=transposed, shard_axis=layout.axis, sizes=layout.sizes)
    cut = replace(cut, rows=cols, cols=rows) if transposed else cut
    name = next(name for name in STRATEGIES if name == bucket.strategy)
    return with_strategy(cut, name, node_size_of(len(layout.sizes), bucket, rules))


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
    # Grams multiply what travels, in its dtype.
    dtype = exchange.comm_dtype if exchange.strategy in GRAMS else bucket.config.ns_dtype
    symmetric, narrow = exchange.kernel != "graph", FLOAT_BYTES[dtype] < FLOAT_BYTES["float32"]
    return sum(form.flops(block, cols, symmetric=symmetric, narrow=narrow) for block in exchange.blocks or (rows,))


def _owner_flops(exchange: Exchange, bucket: Bucket) -> int:
    """What the owner of a unit does for all."""
    return max(1, owned_flops(exchange, unit_flops(exchange, bucket)))


def exchanged_bytes(bucket: Bucket, comm_dtype: str | None) -> int:
    """About what a bucket's whole matrices take on one rank while they are exchanged, in bytes."""
    if not needs_exchange(bucket) or bucket.strategy in GRAMS:
        return 0
    assert isinstance(bucket.config, MuonConfig) and bucket.layout is not None
    total = bucket.size * math.prod(bucket.shape) * FLOAT_BYTES[comm_dtype or bucket.config.ns_dtype]
    return 2 * total if bucket.strategy in GATHERS else 2 * total // len(bucket.layout.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One collective that a plan promises, and whose it is.

    Args:
        spec: What is promised.
        role: What its axis is to the part: ``"shard"``, ``"node"`` and ``"peers"`` within it, or ``"replica"``.
        phase: ``"agree"``, ``"send"`` before the iteration, ``"return"`` after it.
        wave: Index into ``Plan.waves``; None: before the first one.
        part: Index into ``Plan.parts``; None: it is about all ``buckets``.
        buckets: Indices into ``Plan.buckets``.
    """

    spec: CollectiveSpec
    role: str
    phase: Phase
    wave: int | None = None
    part: int | None = None
    buckets: tuple[int, ...]


def shard_axis(plan: Plan, exchange: Exchange | None, layout: ShardLayout) -> str | None:
    """The axis that cuts a part and that its step sends something over: matrices, or where it is guarded sums."""
    return layout.axis if exchange is None or plan.guarded else exchange.shard_axis


def agreement_collectives(plan: Plan) -> list[tuple[CollectiveSpec, MeshSpec]]:
    """What ranks agree on gradients with, and on their norm, before anything else; each with its mesh."""
    return [(promise.spec, _mesh_of(plan.buckets[promise.buckets[0]])) for promise in _agreements(plan)]


def _agreements(plan: Plan) -> Iterator[Promise]:
    for axes, buckets in plan.agreements():
        num_bytes = 4 * sum(plan.buckets[i].size for i in buckets)
        for axis, _, sharded in axes:
            spec = CollectiveSpec(kind="all_reduce", axis=axis, bytes_per_rank=num_bytes)
            yield Promise(spec=spec, role="shard" if sharded else "replica", phase="agree", buckets=buckets)
    for total in plan.norm_sums():
        num_bytes = FLOAT_BYTES["float32"] * norm_numbers(plan, total)
        spec = CollectiveSpec(kind="all_reduce", axis=total.axis, bytes_per_rank=num_bytes)
        yield Promise(spec=spec, role="shard" if total.sharded else "replica", phase="agree", buckets=total.buckets)


def norm_numbers(plan: Plan, total: NormSum) -> int:
    """float32 numbers that one of a guarded step's sums is of."""
    return int(total.sharded) + int(plan.skip_nonfinite)


def promises(plan: Plan, places: Mapping[int, Place] | None = None) -> list[Promise]:
    """Every collective of a step, in order: the agreements on gradients, then wave by wave, phase by phase.

    Args:
        plan: The plan.
        places: Where a rank stands, for every part with an exchange: the promise for that rank. None: for all, as if
            every rank's replica owned whatever one of them owns.
    """
    made = list(_agreements(plan))
    for number, wave in enumerate(plan.waves):
        rows = []
        for index in wave.parts:
            exchange = plan.parts[index].exchange
            if exchange is not None:
                found = phases(exchange, None if places is None else places[index].replica_rank)
                rows.append([(index, exchange, at, specs) for at, specs in enumerate(found)])
        # The parts of a wave go through their phases side by side.
        for index, exchange, at, specs in (item for same in zip_longest(*rows) for item in same if item is not None):
            phase: Phase = "send" if at < phases_before(exchange.strategy) else "return"
            for spec in specs:
                role, bucket = role_of(spec.axis, exchange), plan.parts[index].bucket
                made.append(Promise(spec=spec, role=role, phase=phase, wave=number, part=index, buckets=(bucket,)))
    return made


def promised_collectives(plan: Plan, places: Mapping[int, Place] | None = None) -> tuple[CollectiveSpec, ...]:
    """The collectives of ``promises``."""
    return tuple(promise.spec for promise in promises(plan, places))


def rank_flops(plan: Plan) -> list[int]:
    """Newton-Schulz FLOPs of every rank of the plan's mesh, for the parts that are exchanged there."""
    mesh = plan.mesh
    # A rank's index along an axis: its number over the stride, in turn over the axis.
    strides = {axis: Group.along(mesh, axis).stride for axis, _ in mesh.axes}
    tables: dict[tuple[str | None, str | None], list[list[int]]] = {}
    for part in plan.parts:
        exchange, layout = part.exchange, plan.buckets[part.bucket].layout
        if exchange is None or layout is None or layout.mesh != mesh:
            continue
        rows = flops_by_rank(exchange, unit_flops(exchange, plan.buckets[part.bucket]))
        axes = (exchange.replica_axis, exchange.shard_axis)
        before = tables.get(axes)
        tables[axes] = rows if before is None else [list(map(add, a, b)) for a, b in zip(before, rows, strict=True)]
    loads = [0] * mesh.num_ranks
    for (replica_axis, shard_axis), rows in tables.items():
        for rank in range(mesh.num_ranks):
            replica, shard = (
                rank // strides[axis] % mesh.size(axis) if axis else 0 for axis in (replica_axis, shard_axis)
            )
            loads[rank] += rows[replica][shard]
    return loads
