"""Predicted steps against what plans promise and what is counted by hand; the timeline; more is never cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muon_compile as mc
from muon_compile.plan.exchange_cost import groups_of
from muon_compile.plan.hardware import PRESETS, Rates, network_of
from muon_compile.plan.network import Group, Network
from muon_compile.plan.plan import Plan
from muon_compile.plan.planner import make_plan
from muon_compile.plan.step_cost import Event, predict_step
from muon_compile.plan.traffic import CollectiveCost, fastest
from muon_compile.spec import FLOAT_BYTES, MatrixSpec, MeshSpec
from muon_compile.verification.verify import ns_flops

RATE = 1e12
WHOLE = ("all_gather", "all_to_all", "gather_broadcast", "gather_scatter", "hierarchical_all_to_all")
GRAM = ("gram_all_reduce", "gram_scatter")
SHARDED = (*WHOLE, *GRAM)
MESHES = {
    "1-D": MeshSpec(axes=(("shard", 4),)),
    "uneven": MeshSpec(axes=(("shard", 6),)),
    "HSDP": MeshSpec(axes=(("replicate", 2), ("shard", 4))),
    "over nodes": MeshSpec(axes=(("replicate", 3), ("shard", 16))),
}
# Tall or square, so that Grams may be summed too.
SHAPES = ((64, 32), (48, 48), (40, 16))


def machine(device: str = "cuda", **changes: Any) -> mc.Hardware:
    """Every product at ``RATE``; memory and host cost next to nothing unless told otherwise."""
    gemm = tuple(Rates(kernel="graph", dtype=dtype, flops_per_second=(RATE,) * 6) for dtype in ("bfloat16", "float32"))
    network = PRESETS["cpu-2core" if device == "cpu" else "h100"].network
    values: dict[str, Any] = {"name": "made up", "device": device, "gemm": gemm, "network": network}
    values |= {"bytes_per_second": 1e18, "cache_bytes": 1, "op_seconds": 1e-15}
    return mc.Hardware(**(values | changes))


def realistic(device: str = "cuda", **changes: Any) -> mc.Hardware:
    return machine(device, **({"bytes_per_second": 1e12, "op_seconds": 3e-6} | changes))


def matrices(shapes: Sequence[tuple[int, ...]] = SHAPES, count: int = 5, device: str = "cuda") -> list[MatrixSpec]:
    return [MatrixSpec(name=f"{shape}/{i}", shape=shape, device=device) for shape in shapes for i in range(count)]


def plan_of(strategy: str, mesh: MeshSpec, hardware: mc.Hardware, **changes: Any) -> Plan:
    specs = changes.pop("specs", None) or matrices(device=hardware.device)
    values: dict[str, Any] = {"strategy": strategy, "mesh": mesh, "hardware": hardware, "ns": "standard"}
    return make_plan(specs, **(values | changes))


def usable(strategy: str, mesh: MeshSpec) -> bool:
    return strategy != "hierarchical_all_to_all" or mesh.size("shard") in (4, 16)


CASES = [(s, name) for s in SHARDED for name, mesh in MESHES.items() if usable(s, mesh)]


def sent(plan: Plan, network: Network) -> list[CollectiveCost]:
    """Each promised collective, costed by itself."""
    groups: dict[str, Group] = {axis: Group.along(plan.mesh, axis) for axis, _ in plan.mesh.axes}
    for part in plan.parts:
        if part.exchange is not None:
            groups |= groups_of(part.exchange, plan.mesh)
    return [fastest(spec.kind, spec.bytes_per_rank, groups[spec.axis], network) for spec in plan.collectives]


def lane(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event.lane == name]


def assert_one_after_another(events: Sequence[Event]) -> None:
    for before, after in pairwise(events):
        assert after.start >= before.start + before.seconds - 1e-15, (before, after)


# -- predicted against counted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "where"), CASES)
@pytest.mark.parametrize("gather", [2**30, 40_000])
def test_what_is_sent_is_what_the_plan_promises(strategy: str, where: str, gather: int) -> None:
    hardware = realistic()
    plan = plan_of(strategy, MESHES[where], hardware, max_gather_bytes=gather)
    assert gather > 2**20 or len(plan.waves) > 1 or strategy not in ("all_gather", "gather_broadcast")
    cost, costs = predict_step(plan, hardware), sent(plan, network_of(hardware))
    # In the plan's own order, the agreements on gradients first.
    network = lane(cost.events, "network")
    assert [event.name.split()[-1] for event in network] == [spec.kind for spec in plan.collectives]
    assert [event.seconds for event in network] == [one.seconds for one in costs]
    assert plan.collectives[0].kind == "all_reduce" and network[0].name.startswith("agree on gradients")
    assert cost.sent_bytes == tuple(map(sum, zip(*(one.sent_bytes for one in costs), strict=True)))
    assert cost.messages == sum(one.messages for one in costs)
    assert cost.network_seconds == pytest.approx(sum(one.seconds for one in costs))


def test_bytes_of_an_all_to_all_by_hand() -> None:
    hardware = machine()
    plan = plan_of("all_to_all", MESHES["1-D"], hardware, specs=matrices([(64, 32)], 8))
    # There and back: of 8 units' 16 rows of 32 bfloat16 entries three quarters go to other ranks.
    exchanged = 2 * 8 * 16 * 32 * 2 * 3 // 4
    agreement = fastest("all_reduce", 4 * 8, Group(size=4), network_of(hardware)).sent_bytes
    assert predict_step(plan, hardware).sent_bytes == (exchanged + agreement[0], 0)


@pytest.mark.parametrize(("strategy", "where"), CASES)
def test_products_of_the_busiest_rank_by_hand(strategy: str, where: str) -> None:
    """Owned units on the rank with the most; everyone's where all do all; Grams and applications over its own rows."""
    hardware, mesh = machine(), MESHES[where]
    plan = plan_of(strategy, mesh, hardware)
    (wave,) = plan.waves
    expected = [0.0] * mesh.num_ranks
    for index in wave.parts:
        exchange = plan.parts[index].exchange
        assert exchange is not None and exchange.comm_dtype == "bfloat16"
        shards, c = mesh.size("shard"), min(exchange.rows, exchange.cols)
        large, small = 2 * exchange.rows * exchange.cols * c, 2 * c**3
        for rank in range(mesh.num_ranks):
            replica, shard = divmod(rank, shards)
            run = exchange.replica_counts[replica] if exchange.replica_counts else exchange.num_units
            owned = exchange.owned(replica)[shard] if exchange.owner_counts else run
            if strategy in GRAM:
                # Everyone's stages last as long as on the replica with the most units and the rank with the most rows;
                # Q is float32 and X bfloat16, so the application is two products. The polynomial has 17.
                most = max(exchange.replica_counts, default=exchange.num_units)
                expected[rank] += most * 3 * large * max(exchange.sizes) / exchange.rows + owned * 17 * small
            else:
                expected[rank] += owned * 5 * (2 * large + small)
    assert predict_step(plan, hardware).solve.gemm_seconds * RATE == pytest.approx(max(expected))


@pytest.mark.parametrize(("strategy", "where"), [case for case in CASES if case[0] in WHOLE])
@pytest.mark.parametrize("replicas", ["divide", "repeat"])
@pytest.mark.parametrize("ns", ["standard", "gram_half:2,3"])
def test_products_are_those_that_verification_counts(strategy: str, where: str, replicas: str, ns: str) -> None:
    hardware = machine()
    plan = plan_of(strategy, MESHES[where], hardware, replicas=replicas, ns=ns)
    assert len(plan.waves) == 1
    assert predict_step(plan, hardware).solve.gemm_seconds * RATE == pytest.approx(max(ns_flops(plan)))


def test_own_experts_take_no_collective_and_a_share_of_the_products() -> None:
    hardware = machine()
    stack = [MatrixSpec(name="experts", shape=(8, 32, 48), device="cuda")]
    whole = predict_step(make_plan(stack, hardware=hardware, ns="standard"), hardware)
    own = predict_step(make_plan(stack, mesh=MESHES["1-D"], hardware=hardware, ns="standard"), hardware)
    assert own.network_seconds == 0 and not lane(own.events, "network")
    assert whole.solve.gemm_seconds * RATE == pytest.approx(8 * 5 * (4 * 32**2 * 48 + 2 * 32**3))
    assert own.solve.gemm_seconds == pytest.approx(whole.solve.gemm_seconds / 4)


def test_passes_read_and_write_every_tensor_once() -> None:
    numel = 4 * 64 * 32
    hardware = machine(bytes_per_second=1.0)
    specs = [*matrices([(64, 32)], 4), MatrixSpec(name="bias", shape=(64,), algorithm="adamw", device="cuda")]
    spent = predict_step(make_plan(specs, hardware=hardware), hardware).passes
    # Gradient, momentum in and out, direction; update, parameter in and out. AdamW has two moments and float32 updates.
    muon, adamw = numel * (4 + 2 * 4 + 2 + 2 + 2 * 4), 64 * (4 + 4 * 4 + 4 + 4 + 2 * 4)
    assert spent.memory_seconds == pytest.approx(muon + adamw, rel=1e-3)
    assert spent.host_seconds == pytest.approx(2 * 2 * 3 * 1e-15)


# -- the timeline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "where"), CASES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("gather", [2**30, 40_000])
def test_timeline(strategy: str, where: str, device: str, gather: int) -> None:
    hardware = realistic(device)
    specs = [*matrices(device=device), MatrixSpec(name="experts", shape=(12, 32, 48), device=device)]
    plan = plan_of(strategy, MESHES[where], hardware, specs=specs, max_gather_bytes=gather)
    cost = predict_step(plan, hardware)
    compute, network = (lane(cost.events, name) for name in ("compute", "network"))
    assert len(compute) + len(network) == len(cost.events)
    assert_one_after_another(compute)
    assert_one_after_another(network)
    assert cost.seconds == max(event.start + event.seconds for event in cost.events)
    assert sum(event.seconds for event in compute) == pytest.approx(cost.solve.seconds + cost.passes.seconds)
    assert cost.hidden_seconds + cost.exposed_seconds == pytest.approx(cost.network_seconds)
    if device == "cpu":
        # gloo sends with the cores that compute.
        assert_one_after_another(sorted(cost.events, key=lambda event: event.start))
        assert cost.seconds == pytest.approx(cost.solve.seconds + cost.passes.seconds + cost.network_seconds)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_bucket_waits_for_what_it_needs(strategy: str) -> None:
    """Packing, collectives, Newton-Schulz and results of one bucket: each starts when the one before is done."""
    hardware = SLOWER["latency"](realistic())  # so that nothing else would be in the way
    plan = plan_of(strategy, MESHES["HSDP"], hardware)
    cost = predict_step(plan, hardware)
    assert len(plan.waves) == 1 and len(plan.buckets) == len(SHAPES)
    for bucket in plan.buckets:
        mine = [event for event in cost.events if event.name.split()[0] == bucket.name]
        assert {event.lane for event in mine} == {"compute", "network"}
        assert_one_after_another(mine)
    *agreements, first = cost.events[:3]  # on either axis
    last = cost.events[-1]
    assert (first.name, last.name) == ("directions", "updates")
    assert first.start == pytest.approx(sum(event.seconds for event in agreements))
    assert all(event.start + event.seconds <= last.start + 1e-15 for event in cost.events[:-1])


def test_another_buckets_products_hide_collectives() -> None:
    """Two buckets in one wave: the second one's gather runs while the first one computes, unlike on a CPU."""
    slow = replace(realistic(), gemm=(Rates(kernel="graph", dtype="bfloat16", flops_per_second=(1e9,) * 6),))
    cost = predict_step(plan_of("all_gather", MESHES["1-D"], slow, specs=matrices(((64, 32), (48, 48)))), slow)
    assert 0.1 * cost.network_seconds < cost.hidden_seconds < 0.9 * cost.network_seconds
    alone = predict_step(plan_of("all_gather", MESHES["1-D"], slow, specs=matrices(((64, 32),))), slow)
    assert alone.hidden_seconds == pytest.approx(0, abs=1e-12)


# -- more is never less -----------------------------------------------------------------------------------------------

meshes = st.sampled_from(list(MESHES.values()))


@settings(max_examples=40, deadline=None)
@given(
    strategy=st.sampled_from(WHOLE[:4] + GRAM),
    mesh=meshes,
    shape=st.tuples(st.integers(8, 96), st.integers(8, 48)),
    count=st.integers(1, 40),
    more=st.integers(1, 40),
)
def test_more_matrices_take_longer(
    strategy: str, mesh: MeshSpec, shape: tuple[int, int], count: int, more: int
) -> None:
    shape, hardware = (max(shape), min(shape)), realistic()
    few, many = (
        predict_step(plan_of(strategy, mesh, hardware, specs=matrices([shape], size)), hardware)
        for size in (count, count + more)
    )
    assert many.solve.gemm_seconds >= few.solve.gemm_seconds
    if strategy == "all_gather" and mesh in (MESHES["1-D"], MESHES["uneven"]):
        ratio = many.solve.gemm_seconds / few.solve.gemm_seconds
        assert ratio == pytest.approx((count + more) / count)
    assert many.passes.seconds > few.passes.seconds
    if strategy != "gather_broadcast":
        # There enough matrices make one gather of the broadcasts, which may be cheaper.
        assert all(a >= b for a, b in zip(many.sent_bytes, few.sent_bytes, strict=True))
        assert many.seconds >= few.seconds


@settings(max_examples=40, deadline=None)
@given(
    strategy=st.sampled_from(WHOLE[:4] + GRAM),
    mesh=meshes,
    shape=st.tuples(st.integers(8, 96), st.integers(8, 48)),
    factor=st.integers(2, 5),
)
def test_larger_matrices_take_longer(strategy: str, mesh: MeshSpec, shape: tuple[int, int], factor: int) -> None:
    shape, hardware = (max(shape), min(shape)), realistic()
    large = (shape[0] * factor, shape[1] * factor)
    a, b = (
        predict_step(plan_of(strategy, mesh, hardware, specs=matrices([one], 7)), hardware) for one in (shape, large)
    )
    assert b.solve.gemm_seconds > a.solve.gemm_seconds
    assert b.network_seconds > a.network_seconds
    assert b.seconds > a.seconds


SLOWER: dict[str, Any] = {
    "host": lambda hw: replace(hw, op_seconds=10 * hw.op_seconds),
    "memory": lambda hw: replace(hw, bytes_per_second=hw.bytes_per_second / 10),
    "products": lambda hw: replace(
        hw, gemm=tuple(replace(r, flops_per_second=tuple(f / 10 for f in r.flops_per_second)) for r in hw.gemm)
    ),
    "latency": lambda hw: replace(
        hw,
        network=replace(
            hw.network, levels=tuple(replace(x, latency_seconds=10 * x.latency_seconds) for x in hw.network.levels)
        ),
    ),
    "bandwidth": lambda hw: replace(
        hw,
        network=replace(
            hw.network, levels=tuple(replace(x, bytes_per_second=x.bytes_per_second / 10) for x in hw.network.levels)
        ),
    ),
}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("strategy", "where"), CASES)
def test_slower_machines_take_longer(device: str, strategy: str, where: str) -> None:
    hardware = realistic(device)
    plan = plan_of(strategy, MESHES[where], hardware, max_gather_bytes=40_000)
    fast = predict_step(plan, hardware)
    for what, slower in SLOWER.items():
        slow = predict_step(plan, slower(hardware))
        # Collectives may still hide what got slower.
        assert slow.seconds >= fast.seconds, what
        work, before = (one.solve.seconds + one.passes.seconds + one.network_seconds for one in (slow, fast))
        assert work > before, what


def test_momentum_in_less_precision_is_less_to_pass() -> None:
    hardware = realistic(cache_bytes=1)
    wide, narrow = (
        predict_step(make_plan(matrices(), config=mc.MuonConfig(momentum_dtype=dtype), hardware=hardware), hardware)
        for dtype in ("float32", "bfloat16")
    )
    numel = 5 * sum(rows * cols for rows, cols in SHAPES)
    saved = 2 * numel * (FLOAT_BYTES["float32"] - FLOAT_BYTES["bfloat16"]) / hardware.bytes_per_second
    assert wide.passes.seconds - narrow.passes.seconds == pytest.approx(saved, rel=1e-3)
