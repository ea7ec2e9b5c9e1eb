"""The all-to-all over nodes, all ranks in this process: nodes of any number and size, any sizes and owners."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import muon_compile as mc
from muon_compile.build import collectives
from muon_compile.build.strategies import run_exchange
from muon_compile.plan.exchange import Exchange, Place, Strategy, default_node_size
from muon_compile.plan.feasible import feasible
from muon_compile.plan.strategies import collectives as promised_collectives
from muon_compile.plan.strategies import gathered_bytes, sent_bytes
from muon_compile.spec import chunk_sizes

NODES: Strategy = "hierarchical_all_to_all"


class Wire:
    """Stands in for the all-to-alls: what each rank of a group sends in one phase is delivered after it."""

    def __init__(self, ranks: int) -> None:
        self.sent: dict[str, list[tuple[Tensor, list[int], list[int], Tensor]]] = {}
        self.inputs: list[list[int]] = [[] for _ in range(ranks)]
        self.outputs: list[list[int]] = [[] for _ in range(ranks)]
        self.passed_on = [0] * ranks
        self.groups: list[list[str]] = [[] for _ in range(ranks)]
        self.rank = 0

    def all_to_all(self, x: Tensor, came: list[int], gone: list[int], group: str) -> Tensor:
        assert x.numel() == sum(gone) and x.dim() == 1
        made = x.new_empty(sum(came))
        messages = self.sent.setdefault(group, [])
        self.passed_on[self.rank] += 4 * (sum(gone) - gone[len(messages)])
        messages.append((x, came, gone, made))
        self.inputs[self.rank].append(4 * x.numel())
        self.outputs[self.rank].append(4 * made.numel())
        self.groups[self.rank].append(group)
        return made

    def deliver(self) -> None:
        for messages in self.sent.values():
            for me, (_, came, _, made) in enumerate(messages):
                pieces = [x.split(gone)[me] for x, _, gone, _ in messages]
                assert [len(piece) for piece in pieces] == came
                made.copy_(torch.cat(pieces))
        self.sent.clear()


def run(exchange: Exchange, units: Tensor) -> tuple[Tensor, Wire]:
    """What the ranks make of the units together, and what they sent."""
    wire, size = Wire(len(exchange.sizes)), exchange.node_size
    results: dict[int, Tensor] = {}
    with (
        mock.patch.object(collectives, "all_to_all", wire.all_to_all),
        mock.patch.object(collectives, "wait", lambda x: x),
    ):
        parts = []
        for rank, shard in enumerate(units.split(exchange.sizes, dim=1)):
            place = Place(shard_rank=rank, node_group=f"node {rank // size}", peer_group=f"peers {rank % size}")
            parts.append(run_exchange(shard.contiguous(), exchange, place, lambda y: y.cumsum(1)))
        while len(results) < len(parts):
            for wire.rank, part in enumerate(parts):
                try:
                    next(part)
                except StopIteration as end:
                    results[wire.rank] = end.value
            wire.deliver()
    return torch.cat([results[rank] for rank in range(len(parts))], dim=1), wire


def exchange_of(node_size: int, sizes: list[int], owned: list[int], cols: int) -> Exchange:
    return Exchange(
        strategy=NODES,
        num_units=sum(owned),
        rows=sum(sizes),
        cols=cols,
        transposed=False,
        shard_axis="shard",
        sizes=tuple(sizes),
        replica_axis=None,
        replica_counts=(),
        owner_counts=(tuple(owned),),
        comm_dtype="float32",
        form="standard",
        kernel="graph",
        node_size=node_size,
    )


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    """Two to four nodes of two to four ranks; all with the same in half of the cases."""
    nodes, size = draw(st.integers(2, 4)), draw(st.integers(2, 4))

    def counts() -> Any:
        each = st.lists(st.integers(0, 3), min_size=nodes * size, max_size=nodes * size)
        return draw(each | st.integers(0, 3).map(lambda count: [count] * (nodes * size)))

    return exchange_of(size, counts(), counts(), draw(st.integers(1, 3)))


@given(exchanges())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_unit_is_made_whole_once_and_its_rows_come_back(exchange: Exchange) -> None:
    units = torch.randint(-99, 99, (exchange.num_units, exchange.rows, exchange.cols)).float()
    result, _ = run(exchange, units)
    assert torch.equal(result, units.cumsum(1))


@given(exchanges())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_what_is_sent_and_held_is_what_the_plan_says(exchange: Exchange) -> None:
    _, wire = run(exchange, torch.zeros(exchange.num_units, exchange.rows, exchange.cols))
    promised = promised_collectives(exchange)
    if exchange.num_units and exchange.rows:
        assert [max(column) for column in zip(*wire.inputs, strict=True)] == [c.bytes_per_rank for c in promised]
        assert [c.axis for c in promised] == ["shard/node", "shard/peers", "shard/peers", "shard/node"]
    assert wire.passed_on == [sent_bytes(exchange, rank, 0) for rank in range(len(exchange.sizes))]
    assert max(map(max, wire.outputs)) == gathered_bytes(exchange)
    for rank, groups in enumerate(wire.groups):
        node, peers = f"node {rank // exchange.node_size}", f"peers {rank % exchange.node_size}"
        assert groups == [node, peers, peers, node]


def test_every_replica_has_its_own_units() -> None:
    owners = ((3, 0, 0, 0), (0, 0, 1, 1))
    both = dataclasses.replace(
        exchange_of(2, [2, 1, 1, 0], [5, 0, 0, 0], 3),
        replica_axis="replica",
        replica_counts=(3, 2),
        owner_counts=owners,
    )
    for replica, owned in enumerate(owners):
        alone = exchange_of(2, [2, 1, 1, 0], list(owned), 3)
        assert promised_collectives(both, replica)[:4] == promised_collectives(alone)
        for rank, size in enumerate(both.sizes):
            back = 3 * size * 3 * 4  # a gather of two, padded to 3 units
            assert sent_bytes(both, rank, replica) == sent_bytes(alone, rank, 0) + back


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "node_size", "reason"),
    [
        (4, 3, "4 shard ranks do not divide into nodes of 3"),
        (4, 8, "4 shard ranks do not divide into nodes of 8"),
        (7, 0, "7 shard ranks do not divide into nodes of several ranks each"),
        (4, 1, "4 shard ranks in nodes of 1 leave nothing to exchange in one of the two steps"),
        (4, 4, "4 shard ranks in nodes of 4 leave nothing to exchange in one of the two steps"),
        (6, 3, None),
    ],
)
def test_nodes_have_to_divide_the_ranks(ranks: int, node_size: int, reason: str | None) -> None:
    assert (
        feasible(
            NODES,
            rows=64,
            cols=16,
            sizes=chunk_sizes(64, ranks),
            blocks_cut=False,
            relative_eps=False,
            node_size=node_size,
        )
        == reason
    )


def test_nodes_are_taken_so_that_peers_are_fewest() -> None:
    assert [default_node_size(ranks) for ranks in (1, 2, 3, 4, 6, 7, 8, 9, 12, 64, 96)] == [
        *(0, 0, 0, 2, 3, 0),
        *(4, 3, 4, 8, 12),
    ]
    for ranks in range(4, 200):
        size = default_node_size(ranks)
        peers = {g: (g - 1) + (ranks // g - 1) for g in range(2, ranks) if ranks % g == 0}
        assert peers[size] == min(peers.values()) if peers else size == 0


def planned(ranks: int, **options: Any) -> mc.Plan:
    mesh = mc.MeshSpec(axes=(("shard", ranks),))
    return mc.make_plan([mc.MatrixSpec(name="w", shape=(64, 16))], mesh=mesh, strategy=NODES, **options)


def test_a_plan_takes_the_node_size_and_says_why_it_cannot() -> None:
    for ranks, wished, size in ((8, None, 4), (8, 2, 2), (6, 3, 3)):
        made = planned(ranks, node_size=wished).parts[0].exchange
        assert made is not None and (made.strategy, made.node_size) == (NODES, size)
    assert planned(8, node_size=2).digest != planned(8, node_size=4).digest
    assert mc.Plan.from_json(planned(8).to_json()) == planned(8)
    with pytest.raises(ValueError, match=r"'w': strategy 'hierarchical_all_to_all' .* into nodes of 3\. Expected"):
        planned(4, node_size=3)
    with pytest.raises(ValueError, match="'w': .* 5 shard ranks do not divide into nodes of several"):
        planned(5)
    with pytest.raises(ValueError, match="node_size: expected a positive number of ranks, or None, got 0"):
        planned(4, node_size=0)
    # Others know no nodes.
    others = mc.make_plan(
        [mc.MatrixSpec(name="w", shape=(64, 16))],
        mesh=mc.MeshSpec(axes=(("shard", 4),)),
        strategy="all_to_all",
        node_size=3,
    )
    assert others.parts[0].exchange is not None and others.parts[0].exchange.node_size == 0


def test_a_plan_over_nodes_holds_as_much_as_an_all_to_all() -> None:
    specs = [mc.MatrixSpec(name=f"w{i}", shape=(64, 16)) for i in range(8)]
    mesh = mc.MeshSpec(axes=(("shard", 8),))
    held = {name: mc.make_plan(specs, mesh=mesh, strategy=name).temp_bytes for name in (NODES, "all_to_all")}
    assert held[NODES] == held["all_to_all"] < mc.make_plan(specs, mesh=mesh, strategy="all_gather").temp_bytes


def test_a_plan_over_nodes_is_described() -> None:
    text = planned(8).describe()
    line, why = [line for line in text.splitlines() if NODES in line]
    assert "4 all_to_all_single" in line and "asked for" in why and max(map(len, text.splitlines())) <= 120
