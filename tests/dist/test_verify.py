"""``verify`` on 4 ranks: it finds every strategy right, and a fault in the exchange wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import muon_compile as mc
from muon_compile.build import gather, sharded
from muon_compile.build.phases import Phases
from muon_compile.plan.exchange import Place, run_of
from muon_compile.run.binding import Binding
from muon_compile.spec import MatrixSpec, MeshSpec
from muon_compile.verification.report import Report
from tests.dist.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]
WORLD = 4
HSDP = MeshSpec(axes=(("replicate", 2), ("shard", 2)))
SHARED = {"all_gather", "all_to_all", "gather_broadcast", "gather_scatter", "gram_all_reduce", "gram_scatter"}
# As many matrices as ranks, and as many rows on each: whatever is exchanged wrongly still has the right size.
EVEN = [MatrixSpec(name=f"m{i}", shape=(16, 8)) for i in range(WORLD)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as ranks:
        yield ranks


def check(rank: int, options: dict[str, Any], fault: str | None = None) -> Report:
    """The report of this rank, with a fault in the library if one is named."""
    dtype = options.pop("dtype", "float32")
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return mc.verify(config=mc.MuonConfig(ns_dtype=dtype), **options)


def next_owners_units() -> Any:
    """Every rank orthogonalizes the units of the next one, and hands them on as its own."""

    def run(counts: tuple[int, ...], index: int) -> tuple[int, int]:
        return run_of(counts, (index + 1) % len(counts))

    return mock.patch.object(gather, "run_of", run)


def swapped_shards() -> Any:
    """Ranks 0 and 1 each take the other's rows of every result."""
    right: Callable[[Binding], dict[int, Place]] = Binding._places

    def places(binding: Binding) -> dict[int, Place]:
        swap = {0: 1, 1: 0}
        found = right(binding)
        return {i: dataclasses.replace(p, shard_rank=swap.get(p.shard_rank, p.shard_rank)) for i, p in found.items()}

    return mock.patch.object(Binding, "_places", places)


def one_replica_wrong() -> Any:
    """The ranks of the second replica move against everything: no shard of the first one shows it."""
    if dist.get_rank() < WORLD // 2:
        return contextlib.nullcontext()
    right: Callable[..., Phases] = sharded.run_exchange

    def negated(*args: Any) -> Phases:
        result = yield from right(*args)
        return -result

    return mock.patch.object(sharded, "run_exchange", negated)


FAULTS: dict[str, Callable[[], Any]] = {
    "owners": next_owners_units,
    "shards": swapped_shards,
    "one replica": one_replica_wrong,
}


@pytest.mark.parametrize(("mesh", "dtype"), [(None, "bfloat16"), (HSDP, "float32")])
def test_every_strategy_is_right(ranks: Ranks, mesh: MeshSpec | None, dtype: str) -> None:
    reports = ranks.run(check, {"mesh": mesh, "dtype": dtype}, timeout=150)
    report = reports[0]
    assert all(other == report for other in reports), "ranks must agree"
    assert report.ok, str(report)
    # Two shard ranks of each replica are no two nodes.
    strategies = SHARED | ({"hierarchical_all_to_all"} if mesh is None else set())
    assert {row.strategy for row in report.rows} == strategies | {"auto", "local"}
    rows = {row.strategy: row for row in report.rows}
    assert rows["auto"].num_params == report.num_params
    for name in strategies:
        row = rows[name]
        assert 0 < row.num_params < report.num_params and row.collectives > 1 and row.sent_bytes > 0, name
        assert row.busiest_over_mean >= 1.0
    assert rows["local"].collectives == (0 if mesh is None else 2)
    assert rows["gram_scatter"].form == "gram" and rows["all_gather"].num_params > rows["gram_scatter"].num_params
    if dtype == "float32":
        assert all(0 < row.mean_error <= row.worst_error < 1e-4 for row in report.rows)
    else:
        assert rows["all_gather"].worst_error > 1e-3


@pytest.mark.parametrize(
    ("fault", "strategy", "dtype"),
    [
        ("owners", "gather_scatter", "float32"),
        ("shards", "all_gather", "float32"),
        ("shards", "gather_broadcast", "bfloat16"),
    ],
)
def test_a_fault_in_the_exchange_is_found(ranks: Ranks, fault: str, strategy: str, dtype: str) -> None:
    options = {"specs": EVEN, "strategies": [strategy, "gram_all_reduce"], "dtype": dtype}
    for report in ranks.run(check, options, fault):
        wrong, right = report.rows
        assert not report.ok and not wrong.ok and wrong.worst_error > 0.1, str(report)
        assert right.ok, "Grams are summed, so no rank takes another's rows"
        assert "NOT OK" in str(report)


def test_a_fault_on_one_replica_is_known_to_all_ranks(ranks: Ranks) -> None:
    options = {"specs": EVEN, "strategies": ["all_gather"], "mesh": HSDP}
    for report in ranks.run(check, options, "one replica"):
        assert not report.ok and report.rows[0].worst_error > 1.9


def test_layouts_that_specs_bring_are_kept(ranks: Ranks) -> None:
    found = ranks.run(on_columns)
    assert all(found)


def on_columns(rank: int) -> bool:
    from muon_compile.spec import ShardLayout

    mesh = MeshSpec(axes=(("shard", WORLD),))
    layout = ShardLayout(mesh=mesh, axis="shard", dim=1, sizes=(2, 2, 1, 0))
    specs = [MatrixSpec(name=f"m{i}", shape=(3, 5), layout=layout) for i in range(2)]
    report = mc.verify(specs, mesh=mesh, config=mc.MuonConfig(ns_dtype="float32"))
    (row,) = [row for row in report.rows if row.strategy == "gather_scatter"]
    # 2 columns of 3 float32, of 2 units, to all ranks; an owner's whole unit; 4 bytes for each of the two presences.
    return report.ok and row.bytes_per_rank == 2 * 3 * 4 * 2 + 3 * 5 * 4 + 2 * 4


def test_report_is_text_of_120_columns_and_json(ranks: Ranks) -> None:
    report = ranks.run(check, {"specs": EVEN, "strategies": ["gather_scatter"]})[0]
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 120 and any("gather_scatter" in line for line in lines)
    assert "…" not in str(report)
    data = json.loads(report.to_json())
    assert data["ok"] is True and data["rows"][0]["strategy"] == "gather_scatter"
    assert data["axes"] == [["shard", WORLD]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mesh": MeshSpec(axes=(("shard", 2),))}, "all 4 running"),
        ({"strategies": ["nonsense"]}, "'nonsense'"),
        ({"backends": ["nonsense"]}, "'nonsense'"),
        ({"specs": EVEN, "strategies": ["local"]}, "no parameter of specs can take 'local'"),
        ({"specs": [MatrixSpec(name="bias", shape=(4,), algorithm="adamw")]}, "'bias'"),
    ],
)
def test_bad_arguments_are_refused_in_words(ranks: Ranks, options: dict[str, Any], says: str) -> None:
    for text in ranks.run(refusal, options):
        assert text.startswith(("verify: ", "Parameter ")) and says in text


def refusal(rank: int, options: dict[str, Any]) -> str:
    try:
        mc.verify(**options)
    except ValueError as error:
        return str(error)
    return "nothing was refused"
