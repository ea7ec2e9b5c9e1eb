"""Which strategy is chosen, on machines made up for the purpose, and what the whole step makes of it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muon_compile as mc
from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.hardware import Hardware
from muon_compile.plan.network import Level, Network, Plane
from muon_compile.plan.plan import Plan
from muon_compile.plan.step_cost import predict_step


def machine(latency: float, bandwidth: float, limit: int | None = None, preset: str = "h100") -> Hardware:
    """An accelerator on a network of one level."""
    level = Level(name="all", latency_seconds=latency, bytes_per_second=bandwidth, plane="wire")
    network = Network(levels=(level,), planes=(Plane(name="wire", max_queue_pairs=limit),))
    return dataclasses.replace(Hardware.preset(preset), network=network)


FREE, SLOW_START, NARROW = machine(1e-9, 1e15), machine(1e-2, 1e15), machine(1e-9, 1e8)


def specs_of(*shapes: tuple[int, ...], **changes: Any) -> list[mc.MatrixSpec]:
    return [mc.MatrixSpec(name=f"m{i}", shape=shape, device="cuda", **changes) for i, shape in enumerate(shapes)]


def plan_of(*shapes: tuple[int, ...], ranks: int, hardware: Hardware, **options: Any) -> Plan:
    return mc.make_plan(specs_of(*shapes), mesh=mc.MeshSpec(axes=(("shard", ranks),)), hardware=hardware, **options)


def chosen(plan: Plan) -> list[str | None]:
    return [bucket.choice.name if bucket.choice else None for bucket in plan.buckets]


def test_what_is_sent_decides_where_the_network_is_slow() -> None:
    many = [(1024, 1024)] * 64
    # A slow start: the fewest messages, those of a tree; few bytes per second: the fewest bytes.
    assert chosen(plan_of(*many, ranks=16, hardware=SLOW_START)) == ["gram_all_reduce"]
    assert chosen(plan_of(*many, ranks=16, hardware=NARROW)) == ["all_to_all"]
    assert chosen(plan_of(*[(65536, 64)] * 64, ranks=16, hardware=NARROW)) == ["gram_scatter"]


def test_work_decides_where_the_network_is_free() -> None:
    shared = plan_of(*[(1024, 1024)] * 64, ranks=16, hardware=FREE)
    assert chosen(shared)[0] in ("all_to_all", "gather_broadcast", "gather_scatter")
    # One wide unit: whoever owns it, the others only wait.
    assert chosen(plan_of((1024, 1536), ranks=16, hardware=SLOW_START)) == ["all_gather"]


def test_grams_are_chosen_only_where_their_form_is_accurate_enough() -> None:
    tall = [(65536, 64)] * 64
    for config, accurate in (
        (mc.MuonConfig(ns_dtype="bfloat16"), True),
        (mc.MuonConfig(ns_dtype="float32"), False),
        (mc.MuonConfig(ns_dtype="bfloat16", coefficients="cans"), False),
        (mc.MuonConfig(ns_dtype="bfloat16", eps="relative"), False),
    ):
        plan = plan_of(*tall, ranks=16, hardware=NARROW, config=config)
        assert chosen(plan) == ["gram_scatter" if accurate else "all_to_all"], config


def test_many_single_matrices_are_shared_out_like_one_bucket() -> None:
    """Alone, none of them gains by an owner; together their owners do a sixteenth each."""
    shapes = [(1024, 1024 + 16 * i) for i in range(16)]
    assert set(chosen(plan_of(*shapes, ranks=16, hardware=FREE))) & {"all_gather", "gram_all_reduce"} == set()


def test_the_reason_and_the_runner_up_are_recorded() -> None:
    plan = plan_of(*[(1024, 1024)] * 64, ranks=16, hardware=NARROW)
    (choice,) = [bucket.choice for bucket in plan.buckets]
    assert choice is not None
    assert choice.runner_up is not None
    assert choice.seconds is not None
    assert choice.runner_up_seconds is not None
    assert 0 < choice.seconds <= choice.runner_up_seconds
    assert choice.reason.startswith("predicted ")
    assert choice.runner_up in choice.reason
    assert Plan.from_json(plan.to_json()) == plan
    named = plan_of(*[(1024, 1024)] * 64, ranks=16, hardware=NARROW, strategy="gather_scatter")
    assert [bucket.choice.reason for bucket in named.buckets if bucket.choice] == ["asked for"]


def test_reasons_are_no_part_of_the_digest() -> None:
    plan = plan_of((64, 64), ranks=4, hardware=NARROW)
    (bucket,) = plan.buckets
    assert bucket.choice is not None
    other = dataclasses.replace(bucket, choice=dataclasses.replace(bucket.choice, reason="none", seconds=1.0))
    assert dataclasses.replace(plan, buckets=(other,)).digest == plan.digest


# -- limits -----------------------------------------------------------------------------------------------------------


def test_what_the_network_cannot_hold_is_skipped_and_refused_by_name() -> None:
    many = [(1024, 1024)] * 64
    held = machine(1e-9, 1e8, limit=14)
    plan = plan_of(*many, ranks=16, hardware=held)
    assert chosen(plan)[0] not in ("all_to_all", "gather_scatter")
    assert "over a limit: all_to_all, gather_scatter" in plan.buckets[0].choice.reason  # type: ignore[union-attr]
    for name in ("all_to_all", "gather_scatter"):
        with pytest.raises(ValueError, match=rf"{name}.*17 connections.*max_queue_pairs is 14.*choose a strategy"):
            plan_of(*many, ranks=16, hardware=held, strategy=name)
    assert chosen(plan_of(*many, ranks=16, hardware=machine(1e-9, 1e8, limit=17))) == ["all_to_all"]


def test_a_network_that_holds_nothing_is_an_error_that_names_the_parameter() -> None:
    with pytest.raises(ValueError, match=r"Parameter 'm0': no strategy can be used here: all_gather: 2 connections"):
        plan_of((64, 64), ranks=4, hardware=machine(1e-9, 1e8, limit=1))


# -- whole steps ------------------------------------------------------------------------------------------------------


def test_auto_is_predicted_to_be_no_slower_than_any_single_strategy() -> None:
    shapes = [(1024, 1024)] * 12 + [(4096, 1024)] * 6 + [(2048, 64)] * 32 + [(512, 2048)] * 3
    for hardware in (FREE, SLOW_START, NARROW, Hardware.preset("h100")):
        auto = predict_step(plan_of(*shapes, ranks=16, hardware=hardware), hardware).seconds
        nodes = predict_step(plan_of(*shapes, ranks=16, hardware=hardware, node_size=4), hardware).seconds
        for name in STRATEGY_NAMES[1:]:
            try:
                plan = plan_of(*shapes, ranks=16, hardware=hardware, strategy=name, node_size=4)
            except ValueError:  # a Gram strategy on wide matrices
                continue
            best = nodes if name == "hierarchical_all_to_all" else auto
            assert best <= predict_step(plan, hardware).seconds * 1.05, name


def test_nodes_are_used_where_they_are_named_or_nothing_else_is_left() -> None:
    many = [(1024, 1024)] * 64
    starts_slowly = machine(1e-4, 1e12)
    assert chosen(plan_of(*many, ranks=64, hardware=starts_slowly, node_size=8)) == ["hierarchical_all_to_all"]
    assert chosen(plan_of(*many, ranks=64, hardware=starts_slowly)) != ["hierarchical_all_to_all"]
    # 7 peers within the node, 7 between nodes, and 2 on the ring of the agreement on gradients: 16 in all.
    narrow = machine(1e-9, 1e8, limit=16)
    assert chosen(plan_of(*many, ranks=64, hardware=narrow)) == ["hierarchical_all_to_all"]
    assert chosen(plan_of(*many, ranks=64, hardware=machine(1e-9, 1e8, limit=15))) != ["hierarchical_all_to_all"]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 96), st.integers(1, 96)), min_size=1, max_size=8),
    st.integers(2, 9),
    st.randoms(use_true_random=False),
)
def test_the_plan_does_not_depend_on_the_order_of_the_parameters(
    shapes: list[tuple[int, int]], ranks: int, shuffled: random.Random
) -> None:
    specs = specs_of(*shapes)
    mesh = mc.MeshSpec(axes=(("shard", ranks),))

    def facts(given: list[mc.MatrixSpec]) -> dict[str, Any]:
        plan = mc.make_plan(given, mesh=mesh, hardware=NARROW)
        found: dict[str, Any] = {}
        for bucket in plan.buckets:
            for index in bucket.params:
                found[plan.specs[index].name] = bucket.choice and bucket.choice.name
        return found

    other = list(specs)
    shuffled.shuffle(other)
    assert facts(specs) == facts(other)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(2, 40), st.integers(1, 40)), min_size=1, max_size=12),
    st.sampled_from([(2, 1), (4, 1), (7, 1), (2, 2), (3, 2)]),
    st.sampled_from(["auto", "all_to_all", "gather_broadcast", "gather_scatter"]),
)
def test_every_matrix_is_owned_exactly_once(
    shapes: list[tuple[int, int]], mesh: tuple[int, int], strategy: str
) -> None:
    shards, replicas = mesh
    axes = (("replicate", replicas), ("shard", shards)) if replicas > 1 else (("shard", shards),)
    plan = mc.make_plan(specs_of(*shapes), mesh=mc.MeshSpec(axes=axes), strategy=strategy, hardware=FREE)
    exchanged = 0
    for part in plan.parts:
        exchange = part.exchange
        if exchange is None:
            continue
        assert sum(exchange.replica_counts or (exchange.num_units,)) == exchange.num_units
        if exchange.owner_counts:
            assert sum(map(sum, exchange.owner_counts)) == exchange.num_units
        exchanged += exchange.num_units
    assert exchanged == len(shapes)
