"""What strategies ask, send, hold and compute, against formulas written out here and the operators' own shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muon_compile as mc
from muon_compile.plan import strategies
from muon_compile.plan.assign import assign_grid
from muon_compile.plan.exchange import OWNED, STRATEGY_NAMES, Exchange, default_node_size
from muon_compile.plan.feasible import feasible
from muon_compile.plan.strategies import (
    collectives,
    flops_by_rank,
    gathered_bytes,
    gathers_results,
    owned_flops,
    sent_bytes,
    triangle_bytes,
)
from muon_compile.spec import chunk_sizes

SHARDED = STRATEGY_NAMES[1:]


def flops_of_rank(made: Exchange, unit_flops: int, shard: int, replica: int) -> int:
    rows = flops_by_rank(made, unit_flops)
    return rows[replica if made.replica_counts else 0][shard]


GRAM = ("gram_all_reduce", "gram_scatter")
NODES = "hierarchical_all_to_all"


def exchange(strategy: str, shape: tuple[int, int, int], ranks: int, **changes: Any) -> Exchange:
    """Units ``(num_units, rows, cols)`` over even shards, in nodes where needed; ``replicas=`` divides them."""
    num, rows, cols = shape
    replicas = changes.pop("replicas", 1)
    owned = strategy in OWNED
    replica_counts, owner_counts = assign_grid([(num, 1)], replicas, ranks if owned else 1, divide=replicas > 1)
    values: dict[str, Any] = {
        "strategy": strategy,
        "num_units": num,
        "rows": rows,
        "cols": cols,
        "transposed": False,
        "shard_axis": "shard" if strategy != "local" else None,
        "sizes": chunk_sizes(rows, ranks),
        "replica_axis": "replica" if replicas > 1 else None,
        "replica_counts": replica_counts[0],
        "owner_counts": owner_counts[0] if owned else (),
        "comm_dtype": "bfloat16",
        "form": "standard",
        "kernel": "graph",
        "node_size": default_node_size(ranks) if strategy == NODES else 0,
    }
    return Exchange(**(values | changes))


def promised(made: Exchange, replica: int | None = None) -> list[tuple[str, str, int]]:
    return [(c.kind, c.axis, c.bytes_per_rank) for c in collectives(made, replica)]


def sent_by_all(made: Exchange) -> int:
    return sum(sent_bytes(made, rank, 0) for rank in range(len(made.sizes)))


# -- feasible -------------------------------------------------------------------------------------------------------


def why_not(strategy: Any, **changes: Any) -> str | None:
    values: dict[str, Any] = {"rows": 64, "cols": 16, "sizes": (32, 32), "blocks_cut": False, "relative_eps": False}
    return feasible(strategy, **(values | changes))


def test_what_is_feasible_and_why_not() -> None:
    assert "another algorithm" in str(why_not("local"))
    assert why_not("local", sizes=(64,)) is None
    for strategy in SHARDED:
        assert why_not(strategy, sizes=(16, 16, 16, 16), node_size=2) is None
        assert why_not(strategy, sizes=(40, 24, 0, 0), node_size=2) is None
        assert "nothing to exchange" in str(why_not(strategy, sizes=(64,), node_size=2))
    for strategy in SHARDED[:-1]:
        assert why_not(strategy) is why_not(strategy, sizes=(40, 24, 0)) is None
    for strategy in ("all_gather", "all_to_all", "gather_broadcast", "gather_scatter", NODES):
        limits = {"sizes": (16, 16, 16, 16), "node_size": 2}
        assert why_not(strategy, cols=65, blocks_cut=True, relative_eps=True, **limits) is None
    for strategy in GRAM:
        assert why_not(strategy, cols=64) is None
        assert "64 entries, the other one 65" in str(why_not(strategy, cols=65))
        assert "fused" in str(why_not(strategy, blocks_cut=True))
        assert "relative" in str(why_not(strategy, relative_eps=True))


# -- collectives ----------------------------------------------------------------------------------------------------


def test_collectives_in_their_order_with_the_operators_input() -> None:
    # 6 units of [10, 3] on 4 ranks: 3, 3, 3, 1 rows each, owners of 2, 2, 1, 1; bfloat16.
    made = {name: exchange(name, (6, 10, 3), 4) for name in SHARDED}
    gathered = ("all_gather_into_tensor", "shard", 6 * 3 * 3 * 2)
    whole = 10 * 3 * 2
    assert promised(made["all_gather"]) == [gathered]
    assert promised(made["gather_broadcast"]) == [
        gathered,
        *(("broadcast", "shard", owned * whole) for owned in (2, 2, 1, 1)),
    ]
    together = dataclasses.replace(made["gather_broadcast"], gathers_results=True)
    assert promised(together) == [gathered, ("all_gather_into_tensor", "shard", 2 * whole)]
    assert promised(made["gather_scatter"]) == [gathered, ("all_to_all_single", "shard", 2 * whole)]
    assert promised(made["all_to_all"]) == [
        ("all_to_all_single", "shard", 6 * 3 * 3 * 2),
        ("all_to_all_single", "shard", 2 * whole),
    ]
    # Nodes of 6 and 4 rows; 3 units for the ranks of either index.
    assert promised(made[NODES]) == [
        ("all_to_all_single", "shard/node", 6 * 3 * 3 * 2),
        ("all_to_all_single", "shard/peers", 3 * 6 * 3 * 2),
        ("all_to_all_single", "shard/peers", 2 * whole),
        ("all_to_all_single", "shard/node", 3 * 6 * 3 * 2),
    ]
    assert promised(made["gram_all_reduce"]) == [("all_reduce", "shard", 6 * 3 * 3 * 4)]
    # Triangles of 6 entries; two units for each of 4 ranks.
    assert promised(made["gram_scatter"]) == [
        ("reduce_scatter_tensor", "shard", 4 * 2 * 6 * 4),
        ("all_gather_into_tensor", "shard", 2 * 6 * 4),
    ]


@pytest.mark.parametrize(
    ("owners", "gathered"),
    [
        (((2, 2, 1, 1),), True),
        (((1, 1, 0, 0),), True),
        (((1, 0, 0, 0),), False),
        (((2, 0, 1, 0),), False),
        (((1, 1), (1, 0)), True),
        (((1, 1), (3, 0), (0, 0)), True),
        (((2, 1), (5, 0, 0)), False),
    ],
)
def test_results_are_gathered_where_padding_at_most_doubles_them(
    owners: tuple[tuple[int, ...], ...], gathered: bool
) -> None:
    assert gathers_results(owners) is gathered


def test_the_number_of_collectives_does_not_grow_with_the_ranks() -> None:
    for ranks in (4, 64, 1024):
        mesh = mc.MeshSpec(axes=(("shard", ranks),))
        for count in (12, 2 * ranks):
            specs = [mc.MatrixSpec(name=f"m{i}", shape=(8 * ranks, 16)) for i in range(count)]
            plan = mc.make_plan(specs, mesh=mesh, strategy="gather_broadcast")
            assert len(plan.collectives) <= 2 + 12  # the agreement, the gather, and at most one for each of 12 units


def test_owners_without_units_broadcast_nothing() -> None:
    kinds = [kind for kind, _, _ in promised(exchange("gather_broadcast", (3, 8, 8), 5))]
    assert kinds == ["all_gather_into_tensor", "broadcast", "broadcast", "broadcast"]


def test_grams_are_as_wide_as_what_is_sent_and_at_least_float32() -> None:
    assert triangle_bytes(3, "bfloat16") == triangle_bytes(3, "float32") == 24
    assert triangle_bytes(3, "float64") == 48
    made = exchange("gram_all_reduce", (2, 8, 4), 2, comm_dtype="float64")
    assert promised(made) == [("all_reduce", "shard", 2 * 16 * 8)]


def test_divided_units_come_back_over_the_replica_axis() -> None:
    # 5 units, 3 for the first replica and 2 for the second; 4 rows of the 7 at most.
    made = exchange("all_gather", (5, 7, 3), 2, replicas=2, replica_counts=(3, 2))
    assert promised(made) == [
        ("all_gather_into_tensor", "shard", 3 * 4 * 3 * 2),
        ("all_gather_into_tensor", "replica", 3 * 4 * 3 * 2),
    ]
    assert promised(made, 1)[0] == ("all_gather_into_tensor", "shard", 2 * 4 * 3 * 2)
    assert promised(made, 1)[1] == promised(made)[1]
    grams = exchange("gram_all_reduce", (5, 7, 3), 2, replicas=2)
    assert promised(grams)[0] == ("all_reduce", "shard", 3 * 9 * 4)


def test_replicas_may_differ_in_their_broadcasts_alone() -> None:
    made = exchange("gather_broadcast", (4, 4, 4), 2, replicas=2, replica_counts=(3, 1), owner_counts=((3, 0), (0, 1)))
    unit = 4 * 4 * 2
    back = ("all_gather_into_tensor", "replica", 3 * unit // 2)
    first, second = ("all_gather_into_tensor", "shard", 3 * unit // 2), ("all_gather_into_tensor", "shard", unit // 2)
    assert promised(made, 0) == [first, ("broadcast", "shard", 3 * unit), back]
    assert promised(made, 1) == [second, ("broadcast", "shard", unit), back]
    assert promised(made) == [first, ("broadcast", "shard", 3 * unit), ("broadcast", "shard", unit), back]


def test_local_units_are_sent_only_where_replicas_divide_them() -> None:
    assert promised(exchange("local", (5, 4, 3), 1)) == []
    divided = exchange("local", (5, 4, 3), 1, replicas=2)
    assert promised(divided) == [("all_gather_into_tensor", "replica", 3 * 4 * 3 * 2)]
    assert sent_bytes(divided, 0, 0) == 3 * 4 * 3 * 2 == gathered_bytes(divided) // 2


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_part_without_entries_sends_nothing(strategy: str) -> None:
    for shape in ((0, 4, 4), (2, 4, 0), (2, 0, 0)):
        assert promised(exchange(strategy, shape, 4)) == []
        assert sent_bytes(exchange(strategy, shape, 4), 0, 0) == 0


# -- bytes ----------------------------------------------------------------------------------------------------------

# Bytes that a rank sends, with k units of [m, n], a wire of s bytes, W ranks; f = (W - 1) / W; nodes of SIZES[W].
SIZES = {4: 2, 8: 4}
PAYLOAD = {
    "all_gather": lambda k, m, n, s, f, ranks: k * m * n * s * f,
    "all_to_all": lambda k, m, n, s, f, ranks: 2 * k * m * n * s * f / ranks,
    "gather_broadcast": lambda k, m, n, s, f, ranks: 2 * k * m * n * s * f,
    "gather_scatter": lambda k, m, n, s, f, ranks: k * m * n * s * f * (1 + 1 / ranks),
    NODES: lambda k, m, n, s, f, ranks: 2 * k * m * n * s / ranks * (2 - 1 / SIZES[ranks] - SIZES[ranks] / ranks),
    "gram_all_reduce": lambda k, m, n, s, f, ranks: 2 * k * n * n * 4 * f,
    "gram_scatter": lambda k, m, n, s, f, ranks: 2 * k * n * (n + 1) / 2 * 4 * f,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("strategy", "ranks"), [(name, ranks) for name in SHARDED for ranks in (2, 4, 8) if name != NODES or ranks in SIZES]
)
def test_even_shares_send_what_the_table_says(strategy: str, ranks: int, dtype: str) -> None:
    made = exchange(strategy, (16, 64, 24), ranks, comm_dtype=dtype)
    expected = PAYLOAD[strategy](16, 64, 24, 2 if dtype == "bfloat16" else 4, (ranks - 1) / ranks, ranks)
    assert {sent_bytes(made, rank, 0) for rank in range(ranks)} == {expected}


def test_uneven_shares_send_what_their_messages_hold() -> None:
    made = exchange("all_to_all", (6, 10, 3), 4)
    owned, sizes = made.owned(0), made.sizes
    there = [[owned[to] * sizes[me] * 3 * 2 * (to != me) for to in range(4)] for me in range(4)]
    back = [[owned[me] * sizes[to] * 3 * 2 * (to != me) for to in range(4)] for me in range(4)]
    assert [sent_bytes(made, me, 0) for me in range(4)] == [sum(there[me]) + sum(back[me]) for me in range(4)]
    scatter = dataclasses.replace(made, strategy="gather_scatter")
    assert [sent_bytes(scatter, me, 0) for me in range(4)] == [3 * 6 * 3 * 3 * 2 + sum(back[me]) for me in range(4)]
    broadcast = dataclasses.replace(made, strategy="gather_broadcast")
    everyone = [3 * owned[me] * 10 * 3 * 2 for me in range(4)]
    assert [sent_bytes(broadcast, me, 0) for me in range(4)] == [3 * 6 * 3 * 3 * 2 + everyone[me] for me in range(4)]


def test_dividing_over_replicas_sends_less_within_them() -> None:
    whole, divided = (exchange("gather_scatter", (16, 64, 24), 4, replicas=n) for n in (1, 2))
    back = 8 * (64 // 4) * 24 * 2
    assert sent_bytes(divided, 1, 1) == sent_bytes(whole, 1, 0) // 2 + back


@pytest.mark.parametrize(
    ("shape", "dtype", "bound"),
    [
        ((6, 3072, 768), "float32", 1 / 4),
        # Momenta of half the width double the ratio: 769 / (2 * 3072). 6 units take the room of 8: 2 on each rank.
        ((8, 3072, 768), "bfloat16", 0.2504),
        ((6, 3072, 768), "bfloat16", 0.3339),
        ((32, 2048, 64), "float32", 1 / 10),
        ((32, 2048, 64), "bfloat16", 1 / 10),
    ],
)
def test_grams_send_a_fraction_of_momenta(shape: tuple[int, int, int], dtype: str, bound: float) -> None:
    grams, momenta = (exchange(name, shape, 4, comm_dtype=dtype) for name in ("gram_scatter", "gather_broadcast"))
    assert sent_by_all(grams) <= bound * sent_by_all(momenta)


def test_what_is_held_at_once() -> None:
    held = {name: gathered_bytes(exchange(name, (6, 10, 3), 4)) for name in SHARDED}
    padded = 6 * 12 * 3 * 2
    assert held["all_gather"] == held["gather_broadcast"] == held["gather_scatter"] == padded
    assert held["all_to_all"] == 2 * 10 * 3 * 2
    assert held[NODES] == 2 * 10 * 3 * 2
    # Between the steps, 4 units of the 6 rows of a node.
    assert gathered_bytes(exchange(NODES, (6, 10, 3), 4, owner_counts=((2, 1, 2, 1),))) == 4 * 6 * 3 * 2
    assert held["gram_all_reduce"] == 6 * 9 * 4
    assert held["gram_scatter"] == 4 * 2 * 6 * 4
    assert gathered_bytes(exchange("local", (6, 10, 3), 1)) == 0
    # A rank that has every row gets every result.
    assert gathered_bytes(exchange("all_to_all", (6, 10, 3), 2, sizes=(10, 0))) == 6 * 10 * 3 * 2
    # The longer of two replicas' runs counts, and the results of both.
    assert gathered_bytes(exchange("all_gather", (5, 8, 3), 2, replicas=2)) == 3 * 8 * 3 * 2
    assert gathered_bytes(exchange("all_to_all", (5, 8, 3), 2, replicas=2)) == 2 * 3 * 4 * 3 * 2


# -- work -----------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(SHARDED),
    st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 20)),
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_owned_work_is_done_once(
    strategy: str, shape: tuple[int, int, int], ranks: int, replicas: int, unit_flops: int
) -> None:
    made = exchange(strategy, shape, ranks, replicas=replicas)
    own = owned_flops(made, unit_flops)
    assert own >= 0
    times = 1 if strategy in OWNED else ranks
    total = sum(flops_of_rank(made, unit_flops, rank, copy) for rank in range(ranks) for copy in range(replicas))
    assert total == shape[0] * (own * times + unit_flops - own)


def test_work_of_a_rank() -> None:
    shape, flops = (6, 8, 4), 1000
    wide = functools.partial(exchange, comm_dtype="float32")
    assert [flops_of_rank(exchange("all_gather", shape, 4), flops, rank, 0) for rank in (0, 3)] == [6000, 6000]
    assert [flops_of_rank(exchange("gather_scatter", shape, 4), flops, rank, 0) for rank in (0, 3)] == [2000, 1000]
    # Products with X are 4 * 8 * 4^2 = 512 of a unit's FLOPs, a quarter of them on each rank.
    assert owned_flops(wide("gram_scatter", shape, 4), flops) == 488
    assert [flops_of_rank(wide("gram_scatter", shape, 4), flops, rank, 0) for rank in (0, 3)] == [
        2 * 488 + 6 * 128,
        488 + 6 * 128,
    ]
    assert flops_of_rank(wide("gram_all_reduce", shape, 4), flops, 3, 0) == 6 * (488 + 128)
    assert flops_of_rank(wide("gram_all_reduce", shape, 4, replicas=2), flops, 3, 1) == 3 * (488 + 128)
    # A Q that is wider than X is applied as two halves.
    assert owned_flops(exchange("gram_scatter", shape, 4), flops) == 1000 - 6 * 8 * 4**2


def test_every_strategy_has_its_phases() -> None:
    assert tuple(strategies._PHASES) == STRATEGY_NAMES
