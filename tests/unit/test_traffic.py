"""Collectives on a network: textbook formulas on one level, bounds on several, connections and their limits."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muon_compile as mc
from muon_compile.plan.network import Group, Level, Network, Plane, peers_by_level
from muon_compile.plan.traffic import (
    ALGORITHMS,
    Algorithm,
    CollectiveCost,
    collective_cost,
    fastest,
    open_connections,
    over_limit,
    queue_pairs,
)
from tests.unit.test_network import groups, network, networks

A, B = 2e-6, 1 / 50e9  # latency; seconds for each byte
FLAT = Network(
    levels=(Level(name="all", latency_seconds=A, bytes_per_second=1 / B, plane="p"),), planes=(Plane(name="p"),)
)
PAIRS: list[tuple[str, Algorithm]] = [
    (kind, algorithm) for kind, algorithms in ALGORITHMS.items() for algorithm in algorithms
]
payloads = st.integers(0, 2**33)
pairs = st.sampled_from(PAIRS)
EXAMPLES = settings(max_examples=80, deadline=None, derandomize=True)


def preset(name: str) -> Network:
    net = mc.Hardware.preset(name).network
    assert net is not None
    return net


def chain(hops: int, n: int) -> float:
    """Pipelined in the best number of chunks, found by trying: to within the grid's step."""
    return min((hops - 1 + k) * (A + n / k * B) for k in (1.0, *(1.01**i for i in range(1500))))


@pytest.mark.parametrize("w", [2, 3, 8, 100])
@pytest.mark.parametrize("n", [0, 1000, 2**20, 2**30])
def test_on_one_level_costs_are_the_textbook_s(w: int, n: int) -> None:
    d = math.ceil(math.log2(w))
    expected = {
        ("all_gather_into_tensor", "ring"): (w - 1) * (A + n * B),
        ("all_gather_into_tensor", "hierarchical"): (w - 1) * (A + n * B),
        ("reduce_scatter_tensor", "ring"): (w - 1) * (A + n / w * B),
        ("reduce_scatter_tensor", "hierarchical"): (w - 1) * (A + n / w * B),
        ("all_reduce", "ring"): 2 * (w - 1) * (A + n / w * B),
        ("all_reduce", "tree"): 2 * chain(d, n),
        ("all_reduce", "hierarchical"): 2 * (w - 1) * (A + n / w * B),
        ("broadcast", "ring"): chain(w - 1, n),
        ("broadcast", "tree"): chain(d, n),
        ("broadcast", "hierarchical"): (d + w - 1) * A + 2 * (w - 1) * n / w * B,
        ("all_to_all_single", "pairwise"): (w - 1) * (A + n / w * B),
    }
    assert set(expected) == set(PAIRS)
    for (kind, algorithm), seconds in expected.items():
        found = collective_cost(kind, n, Group(size=w, stride=3), FLAT, algorithm).seconds
        # The grid of chunk counts is 1 % coarse, and an optimum is flat.
        chunked = algorithm == "tree" or (kind, algorithm) == ("broadcast", "ring")
        assert found == pytest.approx(seconds, rel=1e-4 if chunked else 1e-12), (kind, algorithm)


@pytest.mark.parametrize(
    ("kind", "messages", "sent"),
    [
        ("all_gather_into_tensor", 7, 7 * 800),
        ("reduce_scatter_tensor", 7, 700),
        ("all_reduce", 14, 1400),
        ("all_to_all_single", 7, 700),
    ],
)
def test_on_one_level_messages_and_bytes_are_the_textbook_s(kind: str, messages: int, sent: int) -> None:
    algorithm: Algorithm = "pairwise" if kind == "all_to_all_single" else "ring"
    cost = collective_cost(kind, 800, Group(size=8), FLAT, algorithm)
    assert (cost.messages, cost.sent_bytes) == (messages, (sent,))


def test_two_nodes_by_hand() -> None:
    """16 ranks, 8 to a node: 4e11 bytes/s and 1 us inside, 5e10 bytes/s and 10 us between."""
    net, group, n = network(), Group(size=16), 2**20
    ring = collective_cost("all_gather_into_tensor", n, group, net, "ring")
    # 16 hops around, 2 of them between the nodes; the longest path has 15. Each node's one flow out is shared by 8.
    assert ring.seconds == pytest.approx(13 * 1e-6 + 2 * 1e-5 + 15 * n * max(7 / 8 / 4e11, 1 / 8 / 5e10))
    assert ring.sent_bytes == (15 * n * 7 // 8, 15 * n // 8)
    assert ring.connections == (2, 2)
    nested = collective_cost("all_gather_into_tensor", n, group, net, "hierarchical")
    # Between two likes first, one block; then around the node, two blocks at a time.
    assert nested.seconds == pytest.approx((1e-5 + n / 5e10) + 7 * (1e-6 + 2 * n / 4e11))
    assert (nested.sent_bytes, nested.messages, nested.connections) == ((7 * 2 * n, n), 8, (2, 1))
    mesh = collective_cost("all_to_all_single", n, group, net, "pairwise")
    assert mesh.seconds == pytest.approx(7 * (1e-6 + n / 16 / 4e11) + 8 * (1e-5 + n / 16 / 5e10))
    assert (mesh.sent_bytes, mesh.connections) == ((7 * n // 16, 8 * n // 16), (7, 8))
    tree = collective_cost("broadcast", 0, group, net, "tree")
    assert tree.seconds == pytest.approx(3 * 1e-6 + 1e-5)
    assert tree.connections == (4, 4)


def test_one_rank_to_a_node_uses_the_outer_level_alone() -> None:
    group = Group(size=8, stride=8)
    for kind, algorithm in PAIRS:
        cost = collective_cost(kind, 2**20, group, network(), algorithm)
        assert cost.sent_bytes[0] == cost.connections[0] == 0
        assert cost.seconds == pytest.approx(
            collective_cost(kind, 2**20, Group(size=8), network(levels=network().levels[1:]), algorithm).seconds
        )


def test_units_that_are_not_filled_alike_have_no_hierarchy() -> None:
    ring, nested = (
        collective_cost("all_gather_into_tensor", 2**20, Group(size=9), network(), algorithm)
        for algorithm in ("ring", "hierarchical")
    )
    assert dataclasses.replace(nested, algorithm="ring") == ring
    # The last rank is alone in its node: all that it passes on, it sends outside.
    assert ring.sent_bytes == (0, 8 * 2**20)


@EXAMPLES
@given(pairs, groups, networks(), payloads, payloads)
def test_more_bytes_never_cost_less(
    pair: tuple[str, Algorithm], group: Group, net: Network, one: int, other: int
) -> None:
    less, more = (collective_cost(pair[0], n, group, net, pair[1]) for n in sorted((one, other)))
    assert less.seconds <= more.seconds * (1 + 1e-12)
    assert all(a <= b for a, b in zip(less.sent_bytes, more.sent_bytes, strict=True))
    assert less.connections == more.connections


@EXAMPLES
@given(pairs, st.integers(1, 3000), st.integers(1, 3000), payloads)
def test_more_ranks_never_cost_less_on_one_level(pair: tuple[str, Algorithm], one: int, other: int, n: int) -> None:
    fewer, more = (collective_cost(pair[0], n, Group(size=w), FLAT, pair[1]).seconds for w in sorted((one, other)))
    assert fewer <= more * (1 + 1e-12)


@pytest.mark.parametrize("name", ["h200", "ascend-910b", "ascend-910c"])
@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_more_full_units_never_cost_less(name: str, kind: str, algorithm: Algorithm) -> None:
    for n in (100, 2**20, 2**30):
        # From one package to two a die sends over two planes at once, and many bytes cost less.
        sizes = [4, 8, 768, 7680] if name == "ascend-910c" else [2, 4, 8, 16, 64, 1024, 8192]
        seconds = [collective_cost(kind, n, Group(size=w), preset(name), algorithm).seconds for w in sizes]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0


@EXAMPLES
@given(groups, networks(), payloads)
def test_what_a_rank_sends_and_whom_it_meets_adds_up(group: Group, net: Network, n: int) -> None:
    w = group.size
    levels = len(net.levels)
    mesh = collective_cost("all_to_all_single", n, group, net, "pairwise")
    assert mesh.connections == peers_by_level(net, group)
    assert sum(mesh.sent_bytes) == pytest.approx(n * (w - 1) / w, abs=levels)
    ring = collective_cost("all_gather_into_tensor", n, group, net, "ring")
    assert sum(ring.sent_bytes) == pytest.approx(n * (w - 1), abs=levels)
    tree = collective_cost("all_reduce", n, group, net, "tree")
    assert sum(tree.sent_bytes) == pytest.approx(2 * n if w > 1 else 0, abs=levels)
    for cost, most in ((ring, 2), (tree, 4)):
        assert max(cost.connections) <= most
        assert (sum(cost.connections) == 0) is (w == 1)
        assert sum(cost.connections) <= w - 1
    for kind, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            cost = collective_cost(kind, n, group, net, algorithm)
            assert (cost.seconds == 0) is (cost.messages == 0) is (w == 1)


@EXAMPLES
@given(st.sampled_from(list(ALGORITHMS)), groups, networks(), payloads)
def test_the_fastest_is_the_least_and_of_equals_the_first(kind: str, group: Group, net: Network, n: int) -> None:
    costs = [collective_cost(kind, n, group, net, algorithm) for algorithm in ALGORITHMS[kind]]
    found = fastest(kind, n, group, net)
    assert found in costs
    assert all(found.seconds < cost.seconds for cost in costs[: costs.index(found)])
    assert all(found.seconds <= cost.seconds for cost in costs)


def test_few_bytes_take_trees_and_many_take_rings() -> None:
    group = Group(size=64)
    assert fastest("all_reduce", 1000, group, preset("h200")).algorithm == "tree"
    assert fastest("all_reduce", 2**34, group, preset("h200")).algorithm in ("ring", "hierarchical")
    assert fastest("reduce_scatter_tensor", 1000, group, preset("h200")).algorithm == "hierarchical"
    assert fastest("reduce_scatter_tensor", 1000, group, FLAT).algorithm == "ring"


def cost(algorithm: Algorithm, *connections: int) -> CollectiveCost:
    return CollectiveCost(algorithm=algorithm, seconds=1.0, messages=1, sent_bytes=(1, 1), connections=connections)


def test_connections_are_shared_by_an_axis_and_an_algorithm() -> None:
    net = network()
    gather = ("shard", cost("ring", 2, 1))
    assert open_connections([gather, gather, gather], net) == (2, 1)
    assert open_connections([gather, ("shard", cost("ring", 1, 2))], net) == (2, 2)
    assert open_connections([gather, ("shard", cost("tree", 4, 0))], net) == (6, 1)
    assert open_connections([gather, ("replica", cost("ring", 0, 2)), gather], net) == (2, 3)
    assert open_connections([], net) == (0, 0)
    shared = dataclasses.replace(net, shares_connections=True)
    assert open_connections([gather, ("shard", cost("tree", 4, 0))], shared) == (4, 1)
    assert open_connections([gather, ("replica", cost("ring", 0, 2)), gather], shared) == (2, 3)


def test_queue_pairs_are_counted_by_plane() -> None:
    net = network()
    assert queue_pairs((7, 8), net) == {"link": 7, "nic": 16}
    one_plane = network(levels=tuple(dataclasses.replace(level, plane="nic") for level in net.levels))
    assert queue_pairs((7, 8), one_plane) == {"link": 0, "nic": 30}


def test_a_limit_is_broken_by_one_and_said_with_its_figures() -> None:
    net = network()  # 100 queue pairs for "nic", 2 to a connection
    assert over_limit((10**6, 50), net) is None
    words = over_limit((0, 51), net)
    assert words is not None
    for figure in ("51 connections", "'nic'", "102 queue pairs", "at 2 each", "max_queue_pairs is 100", "fewer ranks"):
        assert figure in words


@pytest.mark.parametrize(("name", "plane", "pairs"), [("h200", "infiniband", 2 * 9992), ("ascend-910c", "roce", 9984)])
def test_ten_thousand_ranks_hold_rings_and_no_full_mesh(name: str, plane: str, pairs: int) -> None:
    net, group = preset(name), Group(size=10_000)
    mesh = fastest("all_to_all_single", 2**20, group, net).connections
    assert queue_pairs(mesh, net)[plane] == pairs
    words = over_limit(mesh, net)
    assert words is not None
    assert f"{pairs:,} queue pairs" in words
    rings = [("shard", fastest(kind, 2**20, group, net)) for kind in ALGORITHMS if kind != "all_to_all_single"]
    assert over_limit(open_connections(rings, net), net) is None


def test_one_rank_costs_nothing() -> None:
    for kind, algorithm in PAIRS:
        found = collective_cost(kind, 2**20, Group(size=1, stride=5), network(), algorithm)
        assert (found.seconds, found.messages, found.sent_bytes, found.connections) == (0.0, 0, (0, 0), (0, 0))


def test_other_collectives_and_algorithms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kind: expected one of all_gather_into_tensor, .*got 'all_gather'"):
        fastest("all_gather", 1, Group(size=2), FLAT)
    with pytest.raises(ValueError, match=r"algorithm: expected one of \('pairwise',\) .*got 'ring'"):
        collective_cost("all_to_all_single", 1, Group(size=2), FLAT, "ring")
