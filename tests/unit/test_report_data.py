"""What a report counts and says about a plan, against the plan itself."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from dataclasses import replace

import pytest

import muon_compile as mc
from muon_compile.inspect.report_amounts import bucket_amounts, rank_loads
from muon_compile.inspect.report_data import plain, plan_data
from muon_compile.inspect.report_words import KEY_WORDS, STRATEGY_WORDS, part_name, placement, solvers
from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.localize import localize
from muon_compile.plan.plan import Plan
from muon_compile.plan.sharding import rank_flops
from muon_compile.spec import ShardLayout
from tests.pages import many, mesh, model_plan, one_matrix, several_strategies

PLANS = {
    "one matrix": one_matrix,
    "gpt2": lambda: model_plan("gpt2"),
    "hsdp": several_strategies,
    "exchanged": lambda: mc.make_plan([mc.MatrixSpec(name="w", shape=(64, 32))], mesh=mesh(shard=4)),
    "many": lambda: many(60, on=mesh(shard=3)),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def uneven_experts(ranks: int = 4) -> Plan:
    """Stacks that ranks hold different numbers of, beside matrices that they exchange and copies that all have."""
    specs = [mc.MatrixSpec(name="experts", shape=(6, 48, 32)), mc.MatrixSpec(name="w", shape=(64, 32))]
    whole = ShardLayout(mesh=mesh(shard=ranks))
    return mc.make_plan([*specs, mc.MatrixSpec(name="copy", shape=(32, 32), layout=whole)], mesh=mesh(shard=ranks))


# -- amounts ----------------------------------------------------------------------------------------------------------


def test_payloads_are_those_of_the_promised_collectives(plan: Plan) -> None:
    agreed = sum(row[2] for row in plan_data(plan)["collectives"] if row[3] == "agree")
    amounts = bucket_amounts(plan)
    sent = sum(amount.send_bytes + amount.return_bytes for amount in amounts)
    assert agreed + sent == sum(spec.bytes_per_rank for spec in plan.collectives)
    assert (sent > 0) == any(part.exchange is not None for part in plan.parts)


def test_flops_are_those_of_all_ranks_on_average(plan: Plan) -> None:
    total = sum(amount.solve_flops for amount in bucket_amounts(plan))
    loads = rank_loads(plan)
    assert total == pytest.approx((sum(loads.exchanged) + sum(loads.own)) / plan.mesh.num_ranks)
    assert total > 0


def test_phases_of_every_strategy() -> None:
    counted: dict[str, Counter[str]] = {}
    plan = several_strategies()
    for kind, axis, _, phase, _, buckets, _ in plan_data(plan)["collectives"]:
        if phase != "agree":
            name = plan.buckets[buckets[0]].strategy or "local"
            counted.setdefault(name, Counter())[f"{phase} {axis.partition('/')[0]}"] += 1
            assert kind
    replicas = {"return replicate": 1}
    assert {name: dict(found) for name, found in counted.items()} == {
        "local": replicas,
        "all_gather": {"send shard": 1} | replicas,
        "all_to_all": {"send shard": 1, "return shard": 1} | replicas,
        "gather_broadcast": {"send shard": 1, "return shard": 1} | replicas,
        "gather_scatter": {"send shard": 1, "return shard": 1} | replicas,
        "gram_all_reduce": {"send shard": 1} | replicas,
        "gram_scatter": {"send shard": 1, "return shard": 1} | replicas,
        "hierarchical_all_to_all": {"send shard": 2, "return shard": 2} | replicas,
    }


def test_bytes_in_memory_are_one_ranks() -> None:
    specs = [
        mc.MatrixSpec(name="w", shape=(64, 32), dtype="float32", grad_dtype="bfloat16"),
        mc.MatrixSpec(name="b", shape=(6,), dtype="bfloat16", algorithm="adamw"),
        mc.MatrixSpec(name="c", shape=(10,), algorithm="adamw", config=mc.AdamWConfig(amsgrad=True)),
    ]
    muon, adamw, amsgrad = bucket_amounts(mc.make_plan(specs, mesh=mesh(shard=4)))
    # 16 of 64 rows: a bfloat16 gradient and as wide a momentum.
    assert (muon.momentum_bytes, muon.update_bytes) == (16 * 32 * (2 + 2), 16 * 32 * 4)
    # The first rank has 2 of 6 and 3 of 10.
    assert (adamw.momentum_bytes, adamw.update_bytes) == (2 * (2 + 2 * 2), 2 * 2)
    assert (amsgrad.momentum_bytes, amsgrad.update_bytes) == (3 * (4 + 3 * 4), 3 * 4)
    assert adamw.solve_flops == adamw.send_bytes == adamw.return_bytes == 0


# -- loads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4, 5])
def test_own_loads_are_those_of_every_ranks_own_batches(ranks: int) -> None:
    plan = uneven_experts(ranks)
    loads = rank_loads(plan)
    for rank in range(ranks):
        own = localize(plan, lambda layout, at=rank: at)  # type: ignore[misc]
        assert loads.own[rank] == sum(batch.flops for batch in own.batches)
    assert list(loads.exchanged) == rank_flops(plan)
    assert len(set(loads.own)) == (1 if ranks == 1 else 2)


def test_loads_of_meshes_of_the_same_ranks_add_up() -> None:
    both = ShardLayout(mesh=mesh(expert=8), axis="expert", dim=0, sizes=(1,) * 8)
    other = ShardLayout(mesh=mesh(few=2), axis="few", dim=0, sizes=(32, 32))
    specs = [mc.MatrixSpec(name=f"w{i}", shape=(64, 32)) for i in range(3)]
    alone = rank_loads(mc.make_plan(specs, mesh=mesh(replicate=2, shard=4)))
    specs.append(mc.MatrixSpec(name="experts", shape=(8, 32, 16), layout=both))
    specs.append(mc.MatrixSpec(name="elsewhere", shape=(64, 16), layout=other))
    flat = ShardLayout(mesh=mesh(flat=8), axis="flat", dim=0, sizes=(8,) * 8)
    specs.append(mc.MatrixSpec(name="flat", shape=(64, 24), layout=flat))
    plan = mc.make_plan(specs, mesh=mesh(replicate=2, shard=4))
    loads = rank_loads(plan)
    (each,) = set(loads.own)
    assert each > 0 and set(alone.own) == {0}
    there = rank_flops(replace(plan, mesh=mesh(flat=8)))
    assert sum(there) > 0
    assert list(loads.exchanged) == [a + b for a, b in zip(rank_flops(plan), there, strict=True)]
    assert loads.left_out == ("2 few",) and alone.left_out == ()


def test_ten_thousand_ranks_stay_a_small_page() -> None:
    plan = model_plan("gpt2", mesh(replicate=40, shard=250))
    begin = time.perf_counter()
    data = plan_data(plan)
    assert time.perf_counter() - begin < 5
    loads = data["loads"]
    assert len(loads["which"]) == 10_000 and len(loads["pairs"]) < 100
    totals = [sum(loads["pairs"][index]) for index in loads["which"]]
    assert totals == rank_flops(plan) and loads["busiest"] == max(totals)
    assert len(json.dumps(data)) < 300_000


# -- words ------------------------------------------------------------------------------------------------------------


def test_every_strategy_is_explained() -> None:
    assert set(STRATEGY_WORDS) == set(STRATEGY_NAMES)
    assert all(words.endswith(".") for words in KEY_WORDS.values())
    keys = {bucket["strategy"] for bucket in plan_data(several_strategies())["buckets"]}
    assert keys == {*STRATEGY_NAMES, "adamw"}
    assert set(plan_data(several_strategies())["strategies"]) == keys


def test_the_reason_and_the_runner_up_are_the_plans() -> None:
    plan = model_plan("qwen3-30b-a3b", mesh(replicate=2, shard=8))
    chosen = [bucket for bucket in plan.buckets if bucket.choice is not None]
    assert len(chosen) >= 4
    data = {bucket["name"]: bucket for bucket in plan_data(plan)["buckets"]}
    for bucket in chosen:
        choice, shown = bucket.choice, data[bucket.name]
        assert choice is not None
        assert (shown["strategy"], shown["why"], shown["seconds"]) == (bucket.strategy, choice.reason, choice.seconds)
        assert shown["runner_up"] == [choice.runner_up, choice.runner_up_seconds] and choice.runner_up is not None


@pytest.mark.parametrize(
    ("spec", "on", "options", "expected"),
    [
        ({}, None, {}, "this rank alone has these parameters"),
        ({"algorithm": "adamw"}, None, {}, "AdamW works element by element, so nothing has to be made whole"),
        ({}, mesh(shard=1), {}, "there is one rank"),
        ({"shape": (8, 64, 32)}, mesh(shard=4), {}, "the cut runs between matrices, so every rank holds whole ones"),
        ({"layout": ShardLayout(mesh=mesh(shard=4))}, None, {}, "every rank holds all of it and does all of it"),
        (
            {"layout": ShardLayout(mesh=mesh(replicate=4), replica_axis="replicate")},
            None,
            {},
            "whole matrices with copies on several ranks: the replicas share the work",
        ),
        ({}, mesh(shard=4), {"strategy": "all_gather"}, "asked for"),
    ],
)
def test_why(spec: dict[str, object], on: mc.MeshSpec | None, options: dict[str, str], expected: str) -> None:
    made = mc.MatrixSpec(**{"name": "w", "shape": (64, 32)} | spec)  # type: ignore[arg-type]
    (bucket,) = plan_data(mc.make_plan([made], mesh=on, **options))["buckets"]  # type: ignore[arg-type]
    assert bucket["why"].startswith(expected)


def test_placement_says_who_has_which_rows() -> None:
    def placed(shape: tuple[int, ...], on: mc.MeshSpec | None) -> str:
        return placement(mc.make_plan([mc.MatrixSpec(name="w", shape=shape)], mesh=on).buckets[0])

    assert placed((64, 32), None) == "whole, on this rank alone"
    assert placed((64, 32), mesh(shard=4)) == "dim 0 cut over 4 ranks of axis shard: 16 each"
    assert placed((5, 32), mesh(shard=4)) == "dim 0 cut over 4 ranks of axis shard: 2, 2, 1, 0"
    assert placed((65, 32), mesh(shard=16)) == "dim 0 cut over 16 ranks of axis shard: 0 to 5 each"
    both = "dim 0 cut over 4 ranks of axis shard: 16 each; copies on 2 ranks of axis replicate"
    assert placed((64, 32), mesh(replicate=2, shard=4)) == both
    assert placed((64, 32), mesh(shard=1)) == "whole, on one rank"


def test_parameters_are_orthogonalized_by_their_owners() -> None:
    plan = several_strategies()
    for part in plan.parts:
        bucket, exchange = plan.buckets[part.bucket], part.exchange
        found = Counter(solvers(part, bucket)) if bucket.view is not None else Counter()
        if exchange is None:
            assert not found
        elif exchange.owner_counts:
            owned = enumerate(exchange.owner_counts)
            counts = {f"replicate {r}, shard {s}": n for r, row in owned for s, n in enumerate(row) if n}
            assert found == counts and sum(counts.values()) == bucket.size
        elif exchange.strategy != "local":
            counts = {f"replicate {r}": n for r, n in enumerate(exchange.replica_counts) if n}
            assert found == counts
    named = {name: rank for name, _, _, rank in plan_data(plan)["params"]}
    assert named["bias"] == "" and named["experts"] == "replicate 0 to replicate 1"


def test_a_parameter_of_several_units_may_have_several_owners() -> None:
    specs = [mc.MatrixSpec(name=f"w{i}", shape=(3, 64, 32)) for i in range(3)]
    layout = ShardLayout(mesh=mesh(shard=4), axis="shard", dim=1, sizes=(16,) * 4)
    plan = mc.make_plan([replace(spec, layout=layout) for spec in specs], strategy="all_to_all")
    assert plan.parts[0].exchange is not None and plan.parts[0].exchange.owner_counts == ((3, 2, 2, 2),)
    ranks = [rank for _, _, _, rank in plan_data(plan)["params"]]
    assert ranks == ["shard 0", "shard 1 to shard 2", "shard 2 to shard 3"]
    # Without owners everyone does everything, and where nothing is exchanged whoever holds it.
    everyone = mc.make_plan([replace(spec, layout=layout) for spec in specs], strategy="all_gather")
    assert {rank for _, _, _, rank in plan_data(everyone)["params"]} == {"every rank"}
    assert {rank for _, _, _, rank in plan_data(one_matrix())["params"]} == {"this rank"}


def test_forms_have_their_reasons() -> None:
    shown = {bucket["strategy"]: bucket["forms"] for bucket in plan_data(several_strategies())["buckets"]}
    plan = several_strategies()
    assert shown["adamw"] == []
    (gram,) = shown["gram_scatter"]
    assert (gram["form"], gram["kernel"], gram["of"]) == ("gram", "graph", "832 × 64")
    assert gram["reason"] == "gram_scatter iterates on sums of Grams, so this is its only form"
    (own,) = shown["all_to_all"]
    choice = next(choice for choice in plan.choices if choice.rows == 576)
    assert own == {"form": choice.form, "kernel": choice.kernel, "reason": choice.reason, "of": "576 × 64"}
    fused = mc.MuonConfig(split_sizes=(64, 32, 32))
    (bucket,) = plan_data(mc.make_plan([mc.MatrixSpec(name="qkv", shape=(128, 64), config=fused)]))["buckets"]
    assert [form["of"] for form in bucket["forms"]] == ["64 × 64", "32 × 64"]
    assert bucket["matrices"] == "one matrix 128 × 64, rows in blocks of 64, 32, 32"


def test_parts_have_their_waves_units_and_owners() -> None:
    plan = model_plan("qwen3-30b-a3b", mesh(replicate=2, shard=8))
    data = plan_data(plan)
    names = [row[0] for bucket in data["buckets"] for row in bucket["parts"]]
    assert len(names) == len(set(names)) == len(plan.parts) and "muon6[0:8]" in names
    order = {part_name(part, plan.buckets[part.bucket]): index for index, part in enumerate(plan.parts)}
    for name, wave, units, size, owners, calls in (row for bucket in data["buckets"] for row in bucket["parts"]):
        bucket = next(bucket for bucket in plan.buckets if bucket.name == name.partition("[")[0])
        assert order[name] in plan.waves[wave].parts
        assert (units is None) == (bucket.view is None)
        if name == "muon1":
            row = (48, "4096 × 2048", "3 on each of 16 ranks", "2 all_to_all_single, all_gather_into_tensor")
            assert (units, size, owners, calls) == row
    assert len({row[1] for bucket in data["buckets"] for row in bucket["parts"]}) == len(plan.waves) > 10


def test_columns_of_transposed_units_come_last() -> None:
    layout = ShardLayout(mesh=mesh(shard=4), axis="shard", dim=1, sizes=(8,) * 4)
    plan = mc.make_plan([mc.MatrixSpec(name="w", shape=(64, 32), layout=layout)], strategy="all_to_all")
    assert plan.parts[0].exchange is not None and plan.parts[0].exchange.transposed
    (bucket,) = plan_data(plan)["buckets"]
    assert bucket["parts"][0][3] == "64 × 32" and bucket["forms"][0]["of"] == "64 × 32"


# -- what a dump adds -------------------------------------------------------------------------------------------------


def test_collectives_carry_what_the_graph_holds() -> None:
    plan = mc.make_plan([mc.MatrixSpec(name="w", shape=(64, 32))], mesh=mesh(shard=4), strategy="all_to_all")
    assert [row[6] for row in plan_data(plan)["collectives"]] == [None, None, None]
    there = {"kind": "all_to_all_single", "axis": "shard", "bytes": 77}
    rows = [
        {"kind": "all_reduce", "found": None},
        {"kind": "all_to_all_single", "found": there, "equal": True},
        {"kind": "all_to_all_single", "found": there | {"kind": "broadcast"}, "equal": False},
        {"kind": None, "axis": None, "found": there, "equal": False},
    ]
    shown = plan_data(plan, rows)["collectives"]
    found = [row[6] for row in shown]
    assert found[:2] == ["not on this rank", 77]
    assert found[2] == "differs: broadcast over shard, 77 bytes"
    assert shown[3][:3] == ["all_to_all_single", "shard", 0] and found[3].startswith("differs")
    missing = [{"kind": "all_reduce", "found": None, "equal": False}, *rows[1:3]]
    assert plan_data(plan, missing)["collectives"][0][6] == "missing"
    with pytest.raises(ValueError, match="collectives: expected one for each of the plan's 3, got 2"):
        plan_data(plan, rows[:2])


def test_plain_values_are_json() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    given = {"a": (1, 2.5, float("nan")), "b": {"c": Odd(), 3: None}, "d": True, "e": float("-inf")}
    assert plain(given) == {"a": [1, 2.5, "nan"], "b": {"c": "odd", "3": None}, "d": True, "e": "-inf"}
    json.dumps(plain(given), allow_nan=False)


def test_every_parameter_is_there_once(plan: Plan) -> None:
    data = plan_data(plan)
    assert [row[0] for row in data["params"]] == [spec.name for spec in plan.specs]
    assert [row[2] for row in data["params"]] == [spec.group for spec in plan.specs]
    for index, bucket in enumerate(data["buckets"]):
        assert [data["params"][param][1] for param in bucket["params"]] == [index] * bucket["count"]
    assert sorted(itertools.chain(*(bucket["params"] for bucket in data["buckets"]))) == list(range(len(plan.specs)))
