"""Predicted time of one exchanged part: what it computes between its collectives, and the collectives themselves.

A part is a row of stages and phases, in turn: ``compute, send, compute, send, ..., compute``. Where an owner computes,
every rank waits for the one that owns the most, so a stage's time is given by the number of units that a rank owns.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from muon_compile.config import MuonConfig
from muon_compile.plan.cost import Cost, Work, beyond_cache, predict
from muon_compile.plan.exchange import GRAMS, OWNED, Exchange
from muon_compile.plan.forms import parse_form
from muon_compile.plan.hardware import Hardware, network_of
from muon_compile.plan.network import Group
from muon_compile.plan.strategies import NODE, PEERS, moved_bytes, phases
from muon_compile.plan.traffic import CollectiveCost, fastest
from muon_compile.spec import FLOAT_BYTES, CollectiveSpec, MeshSpec

# Operators around one collective: packing, the call, the wait, unpacking.
_EXCHANGE_OPS = 4
# Operators of a Gram with its packing and the norm from its trace; of one application.
_GRAM_OPS, _APPLY_OPS = 6, 3

NOTHING = Cost(gemm_seconds=0.0, memory_seconds=0.0, host_seconds=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a rank computes before a phase of collectives, or after the last one.

    Args:
        everyone: What every rank does: packing, unpacking, products over its own rows.
        by_owned: What it does besides, by the number of units that it owns; one entry is for all of the part's.
    """

    everyone: Cost = NOTHING
    by_owned: Mapping[int, Cost]

    def of(self, owned: int) -> Cost:
        """All of it, on a rank that owns so many units."""
        return add(self.everyone, self.by_owned.get(owned, NOTHING))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """One part's stages, and the phases of collectives between them: one stage more than phases.

    Args:
        stages: What is computed.
        phases: Each collective, its axis and its cost, by phase.
    """

    stages: tuple[Stage, ...]
    phases: tuple[tuple[tuple[CollectiveSpec, CollectiveCost], ...], ...]


def add(*costs: Cost) -> Cost:
    """The sum of costs."""
    return Cost(
        gemm_seconds=sum(cost.gemm_seconds for cost in costs),
        memory_seconds=sum(cost.memory_seconds for cost in costs),
        host_seconds=sum(cost.host_seconds for cost in costs),
    )


@functools.lru_cache(maxsize=4096)
def exchange_cost(exchange: Exchange, config: MuonConfig, mesh: MeshSpec, hardware: Hardware) -> ExchangeCost:
    """Predict a part's stages and collectives.

    Args:
        exchange: The part's.
        config: Its mathematics, ``ns_dtype`` resolved.
        mesh: The ranks.
        hardware: What a rank computes with, and what joins them.
    """
    network, groups = network_of(hardware), groups_of(exchange, mesh)
    sent: list[tuple[tuple[CollectiveSpec, CollectiveCost], ...]] = [
        tuple((spec, fastest(spec.kind, spec.bytes_per_rank, groups[spec.axis], network)) for spec in phase)
        for phase in phases(exchange)
    ]
    copies = [
        _cost(0.0, moved, len(phase) * _EXCHANGE_OPS // 2, hardware)
        for moved, phase in zip(moved_bytes(exchange), sent, strict=True)
    ]
    gram = exchange.strategy in GRAMS
    own = _gram_stages(exchange, config, hardware) if gram else _whole_stages(exchange, config, hardware)
    own += [Stage(by_owned={})] * (len(sent) + 1 - len(own))
    # Packing lies before a phase, unpacking after it: inputs and outputs are read and written once each.
    before, after = [*copies, NOTHING], [NOTHING, *copies]
    stages = [
        replace(stage, everyone=add(stage.everyone, b, a)) for stage, b, a in zip(own, before, after, strict=True)
    ]
    return ExchangeCost(stages=tuple(stages), phases=tuple(sent))


def groups_of(exchange: Exchange, mesh: MeshSpec) -> dict[str, Group]:
    """The ranks of every axis that a part's collectives run over: the mesh's, and the two that nodes make of one."""
    groups = {axis: Group.along(mesh, axis) for axis, _ in mesh.axes}
    if exchange.node_size and exchange.shard_axis is not None:
        whole = groups[exchange.shard_axis]
        between = Group(size=whole.size // exchange.node_size, stride=whole.stride * exchange.node_size)
        groups[exchange.shard_axis + NODE] = Group(size=exchange.node_size, stride=whole.stride)
        groups[exchange.shard_axis + PEERS] = between
    return groups


def owned_units(exchange: Exchange) -> list[tuple[int, ...]]:
    """Units that each rank of the shard axis computes with, a row per replica, or one row for all of them."""
    if exchange.strategy in OWNED:
        return list(exchange.owner_counts)
    shards = len(exchange.sizes)
    runs = exchange.replica_counts or (exchange.num_units,)
    return [(units,) * shards for units in runs]


def _whole_stages(exchange: Exchange, config: MuonConfig, hardware: Hardware) -> list[Stage]:
    """Whole units, after the first phase where they are cut over ranks."""
    solve = Stage(by_owned={count: _whole(exchange, count, config, hardware) for count in _counts(exchange)})
    return [solve] if exchange.strategy == "local" else [Stage(by_owned={}), solve]


def _whole(exchange: Exchange, units: int, config: MuonConfig, hardware: Hardware) -> Cost:
    if not units:
        return NOTHING
    form = parse_form(exchange.form, config.ns_steps)
    rows, cols = (exchange.cols, exchange.rows) if exchange.transposed else (exchange.rows, exchange.cols)
    blocks = exchange.blocks or (rows,)
    alike = {block: blocks.count(block) for block in blocks}
    return add(
        *(
            predict(
                Work(num_matrices=units * count, rows=block, cols=cols, dtype=config.ns_dtype),
                form,
                exchange.kernel,
                hardware,
            )
            for block, count in alike.items()
        )
    )


def _gram_stages(exchange: Exchange, config: MuonConfig, hardware: Hardware) -> list[Stage]:
    """Grams of the rank's own rows; the iteration, on the units that it owns; Q applied to its rows."""
    units = max(exchange.replica_counts, default=exchange.num_units)
    rows, cols, narrow = max(exchange.sizes), exchange.cols, FLOAT_BYTES[exchange.comm_dtype] < FLOAT_BYTES["float32"]
    wide = exchange.comm_dtype if not narrow else "float32"
    large = units * rows * cols
    flops, side = 2.0 * large * cols, min(rows, cols)
    rate, own_rate = hardware.rate("graph", wide, side), hardware.rate("graph", exchange.comm_dtype, side)
    gram = _cost(flops / rate, large * (FLOAT_BYTES[exchange.comm_dtype] + (8 if narrow else 0)), _GRAM_OPS, hardware)
    apply = _cost(
        flops * (2 if narrow else 1) / own_rate, 3 * large * FLOAT_BYTES[exchange.comm_dtype], _APPLY_OPS, hardware
    )
    small = {count: _small_products(count, cols, wide, config, hardware) for count in _counts(exchange)}
    first = Stage(everyone=gram, by_owned={})
    if exchange.strategy == "gram_all_reduce":
        return [first, Stage(everyone=apply, by_owned=small)]
    return [first, Stage(by_owned=small), Stage(everyone=apply, by_owned={})]


def _small_products(units: int, side: int, dtype: str, config: MuonConfig, hardware: Hardware) -> Cost:
    if not units:
        return NOTHING
    products, _ = parse_form("gram", config.ns_steps).products()
    seconds = units * products * 2.0 * side**3 / hardware.rate("graph", dtype, side)
    return _cost(seconds, units * products * 4 * side**2 * FLOAT_BYTES[dtype], products, hardware)


def _cost(gemm_seconds: float, num_bytes: int, operators: int, hardware: Hardware) -> Cost:
    traffic = num_bytes * beyond_cache(num_bytes, hardware)
    return Cost(
        gemm_seconds=gemm_seconds,
        memory_seconds=traffic / hardware.bytes_per_second,
        host_seconds=operators * hardware.op_seconds,
    )


def _counts(exchange: Exchange) -> set[int]:
    return {exchange.num_units}.union(*owned_units(exchange))
