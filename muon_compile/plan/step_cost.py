"""Predicted time of a whole step, from the plan and the very list of collectives that the graph is held to.

A rank has two lanes, one that computes and one that sends; on a CPU they are one, since gloo sends with the same cores.
The parts of a wave go through their phases side by side, as the graph has them (``build.phases``), so that one part's
collectives run while another's products do. Waves follow one another.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muon_compile.config import MuonConfig
from muon_compile.plan.cost import Cost, Work, beyond_cache, predict
from muon_compile.plan.exchange import GRAMS, Exchange
from muon_compile.plan.exchange_cost import NOTHING, ExchangeCost, add, exchange_cost, owned_units
from muon_compile.plan.forms import parse_form
from muon_compile.plan.hardware import Hardware, network_of
from muon_compile.plan.localize import local_bucket
from muon_compile.plan.network import Group, Network
from muon_compile.plan.plan import Bucket, Plan, Wave, resolve_part
from muon_compile.plan.sharding import agreement_collectives
from muon_compile.plan.traffic import CollectiveCost, fastest, open_connections
from muon_compile.spec import FLOAT_BYTES, CollectiveSpec, MeshSpec

# Operators of a bucket's pass over gradients and momentum, and of its update.
_PASS_OPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One bar of the predicted timeline.

    Args:
        name: What runs.
        lane: ``"compute"`` or ``"network"``.
        start: When it starts, in seconds.
        seconds: How long it takes.
    """

    name: str
    lane: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A predicted step, on the rank with the most to do.

    Args:
        seconds: From its start to its end.
        solve: Newton-Schulz and what lies around its collectives.
        passes: Gradients, momentum, updates, and AdamW.
        network_seconds: Of all collectives, whether something else runs meanwhile or not.
        sent_bytes: Bytes that a rank sends, by level of the network, innermost first.
        messages: Messages that it sends one after the other.
        connections: Peers that it stays connected with, by level.
        events: The timeline.
    """

    seconds: float
    solve: Cost
    passes: Cost
    network_seconds: float
    sent_bytes: tuple[int, ...]
    messages: int
    connections: tuple[int, ...]
    events: tuple[Event, ...]

    @property
    def exposed_seconds(self) -> float:
        """Of the network's time what nothing else covers."""
        return max(0.0, self.seconds - self.solve.seconds - self.passes.seconds)

    @property
    def hidden_seconds(self) -> float:
        """Of the network's time what runs beside products."""
        return max(0.0, self.network_seconds - self.exposed_seconds)


def predict_step(plan: Plan, hardware: Hardware) -> StepCost:
    """Predict a step of the plan, on a machine whose ranks all have this hardware."""
    lanes = _Lanes(hardware.device != "cpu")
    step = _Step(plan, hardware, network_of(hardware), lanes)
    for spec, mesh in agreement_collectives(plan):
        cost = fastest(spec.kind, spec.bytes_per_rank, Group.along(mesh, spec.axis), step.network)
        step.send("agree on gradients", mesh, [(spec, cost)], 0.0)
        lanes.wait()
    for wave in plan.waves:
        step.wave(wave)
    return StepCost(
        seconds=lanes.compute,
        solve=step.solve,
        passes=step.passes,
        network_seconds=sum(cost.seconds for _, cost in step.sent),
        sent_bytes=_by_level([cost.sent_bytes for _, cost in step.sent], step.network),
        messages=sum(cost.messages for _, cost in step.sent),
        connections=open_connections(step.sent, step.network),
        events=tuple(lanes.events),
    )


class _Lanes:
    """When each lane is free next."""

    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap
        self.compute = self.network = 0.0
        self.events: list[Event] = []

    def run(self, name: str, seconds: float, ready: float = 0.0) -> float:
        """Compute, as soon as the lane is free and what it needs is ready; returns when it is done."""
        start = max(self.compute, ready)
        self.compute = start + seconds
        if seconds:
            self.events.append(Event(name=name, lane="compute", start=start, seconds=seconds))
        return self.compute

    def send(self, name: str, seconds: float, ready: float) -> float:
        """Send, in the order of the calls; returns when it has arrived."""
        start = max(self.network, ready)
        self.network = start + seconds
        if not self.overlap:
            self.compute = self.network
        self.events.append(Event(name=name, lane="network", start=start, seconds=seconds))
        return self.network

    def wait(self) -> None:
        """Nothing starts before all that was sent has arrived."""
        self.compute = self.network = max(self.compute, self.network)


class _Step:
    """The walk through a plan's waves."""

    def __init__(self, plan: Plan, hardware: Hardware, network: Network, lanes: _Lanes) -> None:
        self.plan, self.hardware, self.network, self.lanes = plan, hardware, network, lanes
        self.solve = self.passes = NOTHING
        # Each with the communicator that it runs on: axes of two meshes may share a name.
        self.sent: list[tuple[str, CollectiveCost]] = []

    def send(
        self, name: str, mesh: MeshSpec, phase: Iterable[tuple[CollectiveSpec, CollectiveCost]], ready: float
    ) -> float:
        for spec, cost in phase:
            ready = self.lanes.send(f"{name} {spec.kind}", cost.seconds, ready)
            self.sent.append((f"{mesh.name}/{spec.axis}", cost))
        return ready

    def wave(self, wave: Wave) -> None:
        """Directions; every part's phases, the batches without communication between the first ones; updates."""
        plan, lanes = self.plan, self.lanes
        shares = {i: resolve_part(plan.buckets, plan.parts[i]).bucket for i in wave.parts}
        exchanges = {i: exchange for i in wave.parts if (exchange := plan.parts[i].exchange) is not None}
        shared = list(exchanges)
        costs = {i: self._exchange(exchange, shares[i]) for i, exchange in exchanges.items()}
        owned = _busiest([(costs[i], owned_units(exchange)) for i, exchange in exchanges.items()])
        self._pass("directions", [_direction_bytes(share) for share in shares.values()])
        ready = dict.fromkeys(shared, 0.0)
        for number in range(max((len(cost.stages) for cost in costs.values()), default=0)):
            for index, mine in zip(shared, owned, strict=True):
                cost = costs[index]
                if number < len(cost.stages):
                    ready[index] = self._stage(index, cost, number, mine, ready[index])
            if number == 0:
                self._batches(wave)
        if not shared:
            self._batches(wave)
        self._pass("updates", [_update_bytes(share) for share in shares.values()])
        lanes.wait()

    def _exchange(self, exchange: Exchange, share: Bucket) -> ExchangeCost:
        assert share.layout is not None and isinstance(share.config, MuonConfig)
        return exchange_cost(exchange, share.config, share.layout.mesh, self.hardware)

    def _stage(self, index: int, cost: ExchangeCost, number: int, owned: int, ready: float) -> float:
        part, stage = self.plan.parts[index], cost.stages[number]
        bucket = self.plan.buckets[part.bucket]
        assert bucket.layout is not None and part.exchange is not None
        name, spent = bucket.name, stage.of(owned)
        self.solve = add(self.solve, spent)
        solves = stage.by_owned or part.exchange.strategy in GRAMS
        done = self.lanes.run(f"{name} newton-schulz" if solves else f"{name} pack", spent.seconds, ready)
        return self.send(name, bucket.layout.mesh, cost.phases[number], done) if number < len(cost.phases) else done

    def _batches(self, wave: Wave) -> None:
        for index in wave.batches:
            batch = self.plan.batches[index]
            if not batch.num_matrices:
                continue
            work = Work(num_matrices=batch.num_matrices, rows=batch.rows, cols=batch.cols, dtype=batch.config.ns_dtype)
            form = parse_form(batch.form, batch.config.ns_steps)
            spent = predict(work, form, batch.kernel, self.hardware)
            self.solve = add(self.solve, spent)
            self.lanes.run(f"{batch.name} newton-schulz", spent.seconds)

    def _pass(self, name: str, sizes: Sequence[int]) -> None:
        total = sum(sizes)
        # Gradients, momenta and parameters of the whole step pass by between two steps, so no cache keeps them.
        spent = Cost(
            gemm_seconds=0.0,
            memory_seconds=total * beyond_cache(2 * total, self.hardware) / self.hardware.bytes_per_second,
            host_seconds=_PASS_OPS * len(sizes) * self.hardware.op_seconds,
        )
        self.passes = add(self.passes, spent)
        self.lanes.run(name, spent.seconds)


def _busiest(parts: Sequence[tuple[ExchangeCost, list[tuple[int, ...]]]]) -> list[int]:
    """For every part the units owned by one rank: the one with the most to do over all of them.

    Parts that lie on meshes of other shapes have ranks of their own numbering: of those each shape's busiest counts.
    """
    worlds: dict[tuple[int, int], list[float]] = {}
    for cost, rows in parts:
        shape = (len(rows), len(rows[0]))
        seconds = {count: sum(s.of(count).seconds for s in cost.stages) for count in set().union(*rows)}
        own = [seconds[count] for row in rows for count in row] if len(seconds) > 1 else [0.0] * math.prod(shape)
        worlds[shape] = list(map(operator.add, worlds[shape], own)) if shape in worlds else own
    busiest = {shape: loads.index(max(loads)) for shape, loads in worlds.items()}
    found = []
    for _, rows in parts:
        replica, shard = divmod(busiest[len(rows), len(rows[0])], len(rows[0]))
        found.append(rows[replica][shard])
    return found


def local_numel(share: Bucket) -> int:
    """Elements that the first rank has: none has more."""
    return share.size * math.prod(local_bucket(share, lambda _: 0).shape)


def _direction_bytes(share: Bucket) -> int:
    """Gradient read, momentum read and written, direction written; AdamW: the whole update of its moments."""
    numel, state = local_numel(share), FLOAT_BYTES[share.state_dtype]
    if not isinstance(share.config, MuonConfig):
        return numel * (FLOAT_BYTES[share.grad_dtype] + 4 * state + FLOAT_BYTES["float32"])
    return numel * (FLOAT_BYTES[share.grad_dtype] + 2 * state + FLOAT_BYTES[share.config.ns_dtype])


def _update_bytes(share: Bucket) -> int:
    """Update read, parameter read and written, and its master."""
    master = 2 * FLOAT_BYTES["float32"] if share.rounding == "master" else 0
    update = share.config.ns_dtype if isinstance(share.config, MuonConfig) else "float32"
    return local_numel(share) * (2 * FLOAT_BYTES[share.dtype] + FLOAT_BYTES[update] + master)


def _by_level(rows: Sequence[tuple[int, ...]], network: Network) -> tuple[int, ...]:
    return tuple(map(sum, zip((0,) * len(network.levels), *rows, strict=True)))
