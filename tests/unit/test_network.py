"""Networks: what they must be, and where the ranks of a group meet on them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muon_compile as mc
from muon_compile.plan.network import Group, Level, Network, Plane, fullest, nearby, peers_by_level, units
from muon_compile.spec import MeshSpec

NODE = Level(name="node", ranks=8, latency_seconds=1e-6, bytes_per_second=4e11, plane="link")
CLUSTER = Level(name="cluster", latency_seconds=1e-5, bytes_per_second=5e10, plane="nic")
NIC = Plane(name="nic", max_queue_pairs=100, queue_pairs_per_connection=2)


def network(**changes: Any) -> Network:
    return Network(**({"levels": (NODE, CLUSTER), "planes": (Plane(name="link"), NIC)} | changes))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Up to three levels, the outermost without a bound."""
    sizes: list[int | None] = []
    for factor in draw(st.lists(st.integers(2, 5), max_size=2)):
        sizes.append(factor * (sizes[-1] or 1) if sizes else factor)
    levels = tuple(
        Level(
            name=f"level {i}",
            ranks=size,
            latency_seconds=draw(st.floats(1e-7, 1e-3)),
            bytes_per_second=draw(st.floats(1e8, 1e12)),
            plane=draw(st.sampled_from(["even", "odd"])),
        )
        for i, size in enumerate([*sizes, None])
    )
    return Network(levels=levels, planes=(Plane(name="even"), Plane(name="odd", queue_pairs_per_connection=3)))


groups = st.builds(Group, size=st.integers(1, 60), stride=st.integers(1, 30))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(networks(), groups)
def test_ranks_meet_where_their_units_are_the_same(net: Network, group: Group) -> None:
    ranks = [i * group.stride for i in range(group.size)]
    in_unit = [[rank // (level.ranks or 10**9) for rank in ranks] for level in net.levels]
    first_met = [
        next(level for level, of_rank in enumerate(in_unit) if of_rank[i] == of_rank[-1]) for i in range(len(ranks) - 1)
    ]
    assert peers_by_level(net, group) == tuple(first_met.count(level) for level in range(len(net.levels)))
    assert sum(peers_by_level(net, group)) == group.size - 1
    assert nearby(net, group) == tuple(of_rank.count(of_rank[-1]) for of_rank in in_unit)
    assert fullest(net, group) == tuple(max(map(of_rank.count, of_rank)) for of_rank in in_unit)
    assert units(net, group) == tuple(len(set(of_rank)) for of_rank in in_unit)


def test_the_last_of_a_partly_filled_unit_has_the_fewest_peers_nearby() -> None:
    assert peers_by_level(network(), Group(size=16)) == (7, 8)
    assert peers_by_level(network(), Group(size=9)) == (0, 8)
    assert peers_by_level(network(), Group(size=4, stride=8)) == (0, 3)
    assert peers_by_level(network(), Group(size=8, stride=2)) == (3, 4)


def test_a_group_runs_along_an_axis_of_a_mesh() -> None:
    mesh = MeshSpec(axes=(("replica", 4), ("shard", 6), ("expert", 2)))
    assert Group.along(mesh, "replica") == Group(size=4, stride=12)
    assert Group.along(mesh, "shard") == Group(size=6, stride=2)
    assert Group.along(mesh, "expert") == Group(size=2, stride=1)
    shard = [rank for rank in range(48) if mesh.coordinates(rank)["replica"] == mesh.coordinates(rank)["expert"] == 0]
    assert shard == [0, 2, 4, 6, 8, 10]


def test_a_bounded_network_holds_its_ranks_and_no_more() -> None:
    small = network(levels=(NODE,))
    assert peers_by_level(small, Group(size=8)) == (7,)
    for group in (Group(size=9), Group(size=3, stride=4)):
        with pytest.raises(ValueError, match=r"Group: expected ranks below 8, .*'node'.* got \d ranks with stride"):
            peers_by_level(small, group)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: dataclasses.replace(NODE, ranks=0), "Level.ranks of 'node'"),
        (lambda: dataclasses.replace(NODE, ranks=8.0), "Level.ranks of 'node'"),
        (lambda: dataclasses.replace(NODE, latency_seconds=0.0), "Level.latency_seconds of 'node'"),
        (lambda: dataclasses.replace(NODE, latency_seconds=float("nan")), "Level.latency_seconds of 'node'"),
        (lambda: dataclasses.replace(NODE, bytes_per_second=-1.0), "Level.bytes_per_second of 'node'"),
        (lambda: dataclasses.replace(NODE, bytes_per_second=float("inf")), "Level.bytes_per_second of 'node'"),
        (lambda: dataclasses.replace(NODE, bytes_per_second="fast"), "Level.bytes_per_second of 'node'"),
        (lambda: dataclasses.replace(NIC, max_queue_pairs=0), "Plane.max_queue_pairs of 'nic'"),
        (lambda: dataclasses.replace(NIC, queue_pairs_per_connection=0), "Plane.queue_pairs_per_connection of 'nic'"),
        (
            lambda: dataclasses.replace(NIC, queue_pairs_per_connection=True),
            "Plane.queue_pairs_per_connection of 'nic'",
        ),
        (lambda: network(levels=()), "Network.levels"),
        (lambda: network(levels=(NODE, NODE)), "Network.levels"),
        (lambda: network(planes=(NIC, NIC)), "Network.planes"),
        (lambda: network(planes=(NIC, Plane(name=""))), "Network.planes"),
        (lambda: network(planes=(NIC,)), "Level.plane of 'node'"),
        (lambda: network(levels=(CLUSTER, NODE)), "Level.ranks of 'cluster'"),
        (lambda: network(levels=(NODE, dataclasses.replace(CLUSTER, ranks=12))), "Level.ranks of 'cluster'"),
        (lambda: network(levels=(NODE, dataclasses.replace(CLUSTER, ranks=8))), "Level.ranks of 'cluster'"),
        (lambda: Group(size=0), "Group.size"),
        (lambda: Group(size=2, stride=0), "Group.stride"),
    ],
)
def test_impossible_networks_are_refused_by_field(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got ") as caught:
        call()
    assert str(caught.value).startswith(words + ":")


def test_preset_networks_have_their_published_figures() -> None:
    figures = {
        name: [(level.name, level.ranks, level.bytes_per_second / 1e9, level.plane) for level in net.levels]
        for name in ("h100", "h200", "ascend-910b", "ascend-910c", "cpu-2core")
        if (net := mc.Hardware.preset(name).network) is not None
    }
    assert figures["h100"] == figures["h200"]
    assert figures["h200"] == [("node", 8, 450.0, "nvlink"), ("cluster", None, 50.0, "infiniband")]
    assert figures["ascend-910b"] == [("node", 8, 196.0, "hccs"), ("cluster", None, 25.0, "roce")]
    assert figures["ascend-910c"] == [
        ("package", 2, 270.0, "sio"),
        ("super-node", 768, 196.0, "ub"),
        ("cluster", None, 25.0, "roce"),
    ]
    assert [level[0] for level in figures["cpu-2core"]] == ["loopback"]
