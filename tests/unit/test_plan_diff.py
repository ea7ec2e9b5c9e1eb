"""What changed between two plans, by the parameters' names."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

import muon_compile as mc
from muon_compile.plan.diff import diff_plans

# w0 to w5 are one bucket, v0 to v3 another; n is AdamW's.
SHAPES = {f"w{i}": (64, 32) for i in range(6)} | {f"v{i}": (48, 32) for i in range(4)}


def specs(**changes: Any) -> list[mc.MatrixSpec]:
    """The parameters, each field changed for those that ``changes`` names."""
    made = [mc.MatrixSpec(name=name, shape=shape) for name, shape in SHAPES.items()]
    made.append(mc.MatrixSpec(name="n", shape=(64,), algorithm="adamw"))
    return [replace(spec, **changes.get(spec.name, {})) for spec in made]


def mesh(**axes: int) -> mc.MeshSpec:
    return mc.MeshSpec(axes=tuple(axes.items()))


def plan(params: Iterable[mc.MatrixSpec] | None = None, **options: Any) -> mc.Plan:
    return mc.make_plan(specs() if params is None else params, **{"mesh": mesh(shard=4)} | options)


def line(lines: list[str], start: str) -> str:
    """The only line that starts so."""
    (found,) = (text for text in lines if text.startswith(start))
    return found


def starts(lines: list[str]) -> set[str]:
    return {text.partition(":")[0].partition(" of ")[0] for text in lines}


def test_equal_plans_have_no_difference() -> None:
    assert diff_plans(plan(), plan()) == []
    assert diff_plans(plan(), mc.Plan.from_json(plan().to_json())) == []


def test_parameters_added_and_removed() -> None:
    lines = diff_plans(plan(), plan([*specs()[2:], mc.MatrixSpec(name="new", shape=(64, 32))]))
    assert line(lines, "added") == "added: 'new'"
    assert line(lines, "removed") == "removed: 2 parameters ('w0', 'w1')"
    lines = diff_plans(plan(), plan(specs()[5:]))
    assert line(lines, "removed") == "removed: 5 parameters ('w0', 'w1', ... 3 more)"


def test_parameters_in_another_order() -> None:
    lines = diff_plans(plan(), plan(specs()[::-1]))
    assert line(lines, "order") == "order: 11 parameters ('w0', 'w1', ... 9 more) come in another order"


def test_placement_and_mesh() -> None:
    lines = diff_plans(plan(), plan(mesh=mesh(replicate=2, shard=2)))
    assert line(lines, "mesh") == "mesh: 4 shard -> 2 replicate x 2 shard"
    text = "dim 0 over 4 ranks of 'shard' -> dim 0 over 2 ranks of 'shard', 2 copies"
    assert line(lines, "placement") == f"placement of 11 parameters ('w0', 'w1', ... 9 more): {text}"
    lines = diff_plans(plan(), plan(mesh=None))
    assert line(lines, "placement").endswith("dim 0 over 4 ranks of 'shard' -> on each rank its own")
    # Another cut over the same ranks.
    layout = plan().specs[0].layout
    assert layout is not None
    uneven = replace(layout, sizes=(40, 24, 0, 0))
    lines = diff_plans(plan(), plan(specs(w3={"layout": uneven})))
    assert line(lines, "placement") == "placement of 'w3': dim 0 over 4 ranks of 'shard', cut otherwise"


def test_strategies_have_their_reasons_and_owners_their_units() -> None:
    a, b = plan(strategy="all_gather"), plan(strategy="all_to_all")
    lines = diff_plans(a, b)
    assert line(lines, "strategy asked for") == "strategy asked for: all_gather -> all_to_all"
    text = "10 parameters ('w0', 'w1', ... 8 more): all_gather (asked for) -> all_to_all (asked for)"
    assert line(lines, "strategy of") == f"strategy of {text}"
    owners = [text for text in lines if text.startswith("owners")]
    units = {name: sum(counts) for name, counts in (("w", (2, 2, 1, 1)), ("v", (1, 1, 1, 1)))}
    assert len(owners) == 2
    for text, name in zip(owners, "wv", strict=True):
        before, _, after = text.partition(f"'{name}1', ... ")[2].partition(": ")[2].partition(" -> ")
        assert before == "every rank" and after.endswith(" units by rank")
        assert sum(map(int, after.split()[0].split("/"))) == units[name]
    choice = plan(strategy="auto").buckets[0].choice
    assert choice is not None and f"({choice.reason}) -> all_to_all (asked for)" in "\n".join(diff_plans(plan(), b))


def test_owners_on_many_ranks_are_summarized() -> None:
    a, b = (plan(mesh=mesh(shard=ranks), strategy="all_to_all") for ranks in (4, 16))
    found = [text for text in diff_plans(a, b) if text.startswith("owners of 6")]
    assert found[0].endswith("units by rank -> 0 to 1 units on each of 16 ranks")
    even = [mc.MatrixSpec(name=f"w{i}", shape=(64, 32)) for i in range(16)]
    a, b = (plan(even, mesh=mesh(shard=ranks), strategy="all_to_all") for ranks in (4, 16))
    assert line(diff_plans(a, b), "owners").endswith("4/4/4/4 units by rank -> 1 units on each of 16 ranks")
    assert "owners" not in starts(diff_plans(a, plan(even, strategy="gather_broadcast")))


def test_replicas_that_divide_the_units() -> None:
    on = mesh(replicate=2, shard=2)
    a, b = (plan(mesh=on, strategy="all_to_all", replicas=how) for how in ("repeat", "divide"))
    found = [text for text in diff_plans(a, b) if text.startswith("owners of 6")]
    assert ": 3/3 units by rank -> " in found[0] and found[0].count("; ") == 1


def test_form_mathematics_group_device_and_dtype() -> None:
    form = line(diff_plans(plan(ns="standard"), plan(ns="gram")), "form")
    assert "standard by graph (asked for" in form and "-> gram by graph (asked for" in form
    lines = diff_plans(plan(), plan(config=mc.MuonConfig(ns_steps=6, nesterov=False)))
    found = {text.partition(" more): ")[2] for text in lines if text.startswith("mathematics")}
    assert found == {"ns_steps 5 -> 6", "nesterov True -> False"}
    lines = diff_plans(plan(), plan(specs(w1={"group": 1}, w2={"dtype": "bfloat16"}, w3={"device": "cuda"})))
    assert line(lines, "group") == "group of 'w1': 0 -> 1"
    assert line(lines, "dtype of 'w2'").endswith("-> bfloat16, gradient float32, state float32")
    assert line(lines, "device") == "device of 'w3': cpu -> cuda"
    lines = diff_plans(plan(), plan(specs(v0={"algorithm": "adamw"})))
    assert line(lines, "algorithm") == "algorithm of 'v0': muon -> adamw"
    assert line(diff_plans(plan(), plan(specs(n={"shape": (8,)}))), "shape") == "shape of 'n': 64 -> 8"
    assert line(diff_plans(plan(), plan(comm_dtype="float32")), "wire").endswith("more): bfloat16 -> float32")


def test_totals_are_those_of_the_plans() -> None:
    a = plan(strategy="all_gather")
    b = plan(strategy="all_to_all", max_gather_bytes=8192, config=mc.MuonConfig(ns_steps=6))
    lines = diff_plans(a, b)
    gathers = [c.bytes_per_rank for c in a.collectives if c.kind == "all_gather_into_tensor"]
    text = f"collectives, all_gather_into_tensor: {len(gathers)} of {sum(gathers):,} bytes per rank -> none"
    assert gathers and text in lines
    exchanges = [c.bytes_per_rank for c in b.collectives if c.kind == "all_to_all_single"]
    text = f"collectives, all_to_all_single: none -> {len(exchanges)} of {sum(exchanges):,} bytes per rank"
    assert exchanges and text in lines
    # The agreement on gradients is the same.
    assert not any("all_reduce" in text for text in lines)
    assert f"waves: {len(a.waves)} -> {len(b.waves)}" in lines and len(a.waves) < len(b.waves)
    assert f"temporaries: {a.temp_bytes / 2**20:,.1f} MiB -> {b.temp_bytes / 2**20:,.1f} MiB" in lines
    # 4 products of m m n and m m m, 2 FLOPs each: every rank does all matrices in five steps.
    assert line(lines, "Newton-Schulz on the busiest rank").split()[5] == f"{rank_gflop(a):,.3f}"


def rank_gflop(of: mc.Plan) -> float:
    """Newton-Schulz of one rank that does every matrix, in the standard form on the shorter side."""
    steps = 5
    total = 0
    for spec in of.specs:
        if spec.algorithm == "muon":
            long, short = max(spec.shape), min(spec.shape)
            total += steps * (4 * short * short * long + 2 * short**3)
    return total / 1e9


def test_a_difference_elsewhere_is_not_lost() -> None:
    a = plan()
    assert diff_plans(a, replace(a, parts=a.parts[::-1])) == ["elsewhere: parts are composed otherwise"]
    waves = tuple(replace(wave, parts=wave.parts[::-1]) for wave in a.waves)
    assert diff_plans(a, replace(a, waves=waves)) == ["elsewhere: waves are composed otherwise"]
    assert diff_plans(a, replace(a, native=True)) == ["native passes: False -> True"]
    assert diff_plans(a, replace(a, exact=True)) == ["exact: False -> True"]


def test_another_reason_alone_is_no_change() -> None:
    a = plan()
    choices = tuple(replace(choice, reason="another") for choice in a.choices)
    buckets = tuple(replace(b, choice=b.choice and replace(b.choice, reason="another")) for b in a.buckets)
    b = replace(a, choices=choices, buckets=buckets)
    assert a != b and a.digest == b.digest
    assert diff_plans(a, b) == []


@pytest.mark.parametrize("shapes", [1, 500])
def test_five_thousand_parameters_take_seconds_at_most(shapes: int) -> None:
    a = plan([mc.MatrixSpec(name=f"p{i}", shape=(8 + i % shapes, 4)) for i in range(5000)], strategy="all_to_all")
    b = replace(a, buckets=tuple(replace(bucket, strategy="all_gather", choice=None) for bucket in a.buckets))
    start = time.thread_time()
    lines = diff_plans(a, b)
    # Comparing every bucket with every other takes far longer. The CPU's own time: other load does not count.
    assert time.thread_time() - start < 3
    (text,) = lines
    assert text.endswith("4998 more): all_to_all (asked for) -> all_gather")
