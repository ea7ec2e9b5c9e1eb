"""Dumps of ranks: collectives beside their promises, phases of every strategy, and a step that is measured together."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import muon_compile as mc
from muon_compile.plan.marks import PHASES
from muon_compile.run import artifacts, together
from tests.dist.models import (
    MATRICES,
    TALL,
    WORLD,
    Job,
    assert_same,
    compiled,
    give,
    momenta_of,
    optimizer_of,
    params_of,
    raised,
    sharded_model,
    train,
)
from tests.dist.ranks import Ranks

pytestmark = pytest.mark.dist

HSDP = (2, 2)
WHOLE = ("all_gather", "all_to_all", "gather_broadcast", "gather_scatter", "hierarchical_all_to_all")
GRAM = ("gram_all_reduce", "gram_scatter")
PRODUCTS = {"aten.bmm.default", "aten.baddbmm.default", "aten.mm.default", "aten.addmm.default"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def stepped(job: Job) -> tuple[Any, mc.Muon, mc.CompiledStep]:
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    give(model, 0)
    optimizer.step()
    return model, optimizer, step


def dump_alone(rank: int, job: Job) -> dict[str, str]:
    """One rank after the other: nothing of it waits for others."""
    _, _, step = stepped(job)
    with tempfile.TemporaryDirectory() as folder:
        paths = step.dump(folder)
        return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def jobs() -> dict[str, Job]:
    small = {name: MATRICES[name] for name in ("even", "even_too", "five", "one", "experts", "vector")}
    made = {name: Job(shapes=small, strategy=name, backend="aot_eager") for name in WHOLE}
    made |= {f"{name} HSDP": Job(shapes=small, strategy=name, mesh=HSDP) for name in WHOLE[:4]}
    made |= {f"{name} {mesh}": Job(shapes=TALL, strategy=name, mesh=mesh) for name in GRAM for mesh in ((4,), HSDP)}
    bound = mc.CompileConfig(max_gather_bytes=3100)
    made["waves"] = Job(shapes={f"m{i}": (16, 12) for i in range(6)}, strategy="all_gather", compile_config=bound)
    return made


@pytest.mark.parametrize("name", jobs())
def test_collectives_are_those_promised_and_phases_tell_them_apart(ranks: Ranks, name: str) -> None:
    """Equal on every rank; and of the shares the largest is what was promised, so the promise is no mere bound."""
    dumps = ranks.run(dump_alone, jobs()[name])
    everywhere = [json.loads(files["collectives.json"]) for files in dumps]
    for files, rows in zip(dumps, everywhere, strict=True):
        plan = mc.Plan.from_json(files["plan.json"])
        assert len(rows) == json.loads(files["stats.json"])["collectives"] > 0
        assert [row["order"] for row in rows] == list(range(len(rows)))
        assert all(row["equal"] is True for row in rows)
        nodes = {node["name"]: node for node in json.loads(files["masked_gradients/graph.json"])}
        for row in rows:
            node = nodes[row["found"]["node"]]
            # Told by the builder on the one side, counted from the plan on the other.
            assert (row["phase"], row["wave"]) == (node["phase"], node["wave"])
            assert row["part"] is None or [row["part"]] == node["parts"]
            assert set(row["buckets"]) <= set(node["buckets"])
            assert row["phase"] == "agree" or row["buckets"] == node["buckets"]
        assert {node["phase"] for node in nodes.values()} <= set(PHASES)
        called = [node for node in nodes.values() if node["op"] == "call_function"]
        exchanging = [node for node in called if node["phase"] in ("send", "return")]
        assert exchanging and not {node["target"] for node in exchanging} & PRODUCTS
        assert {node["phase"] for node in called if node["target"] in PRODUCTS} <= {"orthogonalize"}
        code = files["masked_gradients/graph.py"]
        strategies = {part.exchange.strategy for part in plan.parts if part.exchange is not None}
        assert all(f", strategy {strategy}, form " in code for strategy in strategies)
        assert "# agree; " in code and "# presence_0" in code and "# agreement, on cpu" in code
    # Replicas that own nothing broadcast nothing, so ranks of different replicas may differ in number.
    alike = [rows for rows in everywhere if len(rows) == len(everywhere[0])]
    for same in zip(*alike, strict=True):
        assert max(row["found"]["bytes"] for row in same) == max(row["bytes"] for row in same)


def test_roles_are_those_of_the_groups(ranks: Ranks) -> None:
    shapes = {"even": (16, 12), "even_too": (16, 12)}
    for strategy, mesh, expected in (
        ("hierarchical_all_to_all", (4,), {"shard": "shard", "shard/node": "node", "shard/peers": "peers"}),
        ("all_to_all", HSDP, {"shard": "shard", "replica": "replica"}),
    ):
        for files in ranks.run(dump_alone, Job(shapes=shapes, strategy=strategy, mesh=mesh)):
            rows = json.loads(files["collectives.json"])
            assert {row["axis"]: row["role"] for row in rows} == expected
            assert {row["found"]["axis"]: row["found"]["role"] for row in rows} == expected


# -- a step that is measured ------------------------------------------------------------------------------------------


def profile(rank: int, job: Job) -> dict[str, Any]:
    model, optimizer, step = stepped(job)
    before, momenta, stats = params_of(model), momenta_of(model, optimizer), step.stats.as_dict()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            step.dump(folder, profile=True)
        trace = json.loads((Path(folder) / "timeline.trace.json").read_text())
    assert_same(params_of(model), before)
    assert_same(momenta_of(model, optimizer), momenta)
    assert step.stats.as_dict() == stats
    give(model, 1)
    optimizer.step()
    give(model, 2)
    optimizer.step()  # would raise if the ranks had disagreed in the last one
    return {"params": params_of(model), "trace": trace}


@pytest.mark.parametrize("strategy", ["all_to_all", "hierarchical_all_to_all", "gram_scatter"])
def test_a_step_is_measured_together_and_changes_nothing(ranks: Ranks, strategy: str) -> None:
    job = Job(shapes={"tall": (64, 12), "tall_too": (64, 12), "vector": (9,)}, strategy=strategy)
    expected = ranks.run(train, job)[0].params
    # What the prediction leaves out, or counts for every rank.
    apart = {("inputs", "compute"), ("agree on gradients", "compute"), ("muon0 pack", "compute")}
    everywhere: set[tuple[str, str]] = set()
    for outcome in ranks.run(profile, job):
        assert_same(outcome["params"], expected)
        bars = [event for event in outcome["trace"]["traceEvents"] if event["ph"] == "X"]
        predicted, measured = ({(bar["name"], bar["cat"]) for bar in bars if bar["pid"] == pid} for pid in (1, 2))
        # A rank that owns nothing orthogonalizes nothing.
        assert measured - apart >= predicted - apart - {("muon0 newton-schulz", "compute")}
        everywhere |= measured
    assert everywhere - apart == predicted - apart
    assert {lane for _, lane in everywhere} == {"compute", "network"}


def profile_on(rank: int, asking: list[int]) -> str:
    """Ask for a profile on some ranks only, briefly; then on all of them."""
    _, _, step = stepped(Job(shapes={"even": (16, 12)}))
    with tempfile.TemporaryDirectory() as folder:
        artifacts.ask_together = functools.partial(together.ask_together, seconds=2.0)  # type: ignore[assignment]
        torch.distributed.barrier()
        said = raised(step.dump, folder, rank in asking)
        nothing = not list(Path(folder).iterdir())
        torch.distributed.barrier()
        artifacts.ask_together = together.ask_together
        step.dump(folder, profile=True)
        assert (Path(folder) / "measured.trace.json").exists()
    return f"{nothing} {said}"


@pytest.mark.parametrize("asking", [[0], [2], [0, 1, 3], [1, 2, 3]])
def test_a_rank_that_asks_alone_is_told(ranks: Ranks, asking: list[int]) -> None:
    missing = sorted({0, 1, 2, 3} - set(asking))
    for rank, said in enumerate(ranks.run(profile_on, asking)):
        if rank not in asking:
            assert said == "False "
            continue
        assert said.startswith("True RuntimeError: dump: profile=True runs the step's collectives")
        assert f"{missing if 0 in asking else [0]} did not within about 2 s" in said


def ask_at_odd_times(rank: int) -> list[str]:
    """The ranks come over a time that is nothing, about as long as they wait for each other, or much longer."""
    found = []
    for number, spread in enumerate((0.0, 0.7, 0.8, 0.9, 1.0, 1.1, 4.0)):
        torch.distributed.barrier()
        time.sleep((rank + number) % WORLD / (WORLD - 1) * spread)
        found.append(raised(together.ask_together, f"test {number}", range(WORLD), 0.8)[:12])
    return found


def test_all_go_on_or_none(ranks: Ranks) -> None:
    rounds = list(zip(*ranks.run(ask_at_odd_times), strict=True))
    assert all(len(set(answers)) == 1 for answers in rounds), rounds
    assert (rounds[0][0], rounds[-1][0]) == ("", "RuntimeError"), rounds
