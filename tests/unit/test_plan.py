"""The plan: who shares a bucket, a batch, a wave; its text forms; that it needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import muon_compile as mc

MUON_CONFIGS = (
    None,
    mc.MuonConfig(eps="relative"),
    mc.MuonConfig(eps_mode="add"),
    mc.MuonConfig(coefficients=(3.0, -4.0, 1.5), scale="none"),
    mc.MuonConfig(coefficients=((3.0, -4.0, 1.5), (2.0, -1.5, 0.5)), ns_steps=2, momentum_dtype="float32"),
    mc.MuonConfig(num_heads=2),
    mc.MuonConfig(split_sizes=(4, 2)),
    mc.MuonConfig(split_sizes=(2, 2, 2)),
    mc.MuonConfig(flatten=True),
)
ADAMW_CONFIGS = (None, mc.AdamWConfig(amsgrad=True))


@st.composite
def spec_lists(draw: st.DrawFn) -> list[mc.MatrixSpec]:
    """One to twelve parameters out of few shapes, so that many share a bucket; zero-sized and scalar ones included."""
    specs = []
    for index in range(draw(st.integers(1, 12))):
        muon = draw(st.booleans())
        shapes = [(6, 4), (4, 6), (2, 6, 4), (6, 2, 2, 2), (6, 0)] if muon else [(), (5,), (6, 4), (0,)]
        specs.append(
            mc.MatrixSpec(
                name=f"p{index}",
                shape=draw(st.sampled_from(shapes)),
                dtype=draw(st.sampled_from(["float32", "bfloat16"])),
                grad_dtype=draw(st.sampled_from([None, "float32"])),
                algorithm="muon" if muon else "adamw",
                group=draw(st.integers(0, 2)),
                config=draw(st.sampled_from(MUON_CONFIGS if muon else ADAMW_CONFIGS)),
            )
        )
    return specs


def made(specs: list[mc.MatrixSpec], **kwargs: int) -> mc.Plan | None:
    """The plan, or None where a shape does not divide as its config wants (test_spec.py holds those)."""
    try:
        return mc.make_plan(specs, **kwargs)  # type: ignore[arg-type]
    except ValueError as error:
        if "does not divide" in str(error) or "sum up to" in str(error):
            return None
        raise


def iteration(config: mc.MuonConfig) -> tuple[object, ...]:
    """What Newton-Schulz reads; the rest of a config matters before and after it."""
    return config.ns_dtype, config.ns_steps, config.coefficients, config.eps, config.eps_mode


LISTS = settings(max_examples=80, deadline=None, derandomize=True)


@LISTS
@given(specs=spec_lists())
def test_every_parameter_is_in_one_bucket_of_its_own_kind(specs: list[mc.MatrixSpec]) -> None:
    plan = made(specs)
    if plan is None:
        return
    assert sorted(i for bucket in plan.buckets for i in bucket.params) == list(range(len(specs)))
    keys = []
    for bucket in plan.buckets:
        assert list(bucket.groups) == sorted(specs[i].group for i in bucket.params)
        assert list(bucket.groups) == [specs[i].group for i in bucket.params]
        kinds = {
            (s.algorithm, s.shape, s.dtype, s.grad_dtype, s.config) for s in map(plan.specs.__getitem__, bucket.params)
        }
        kind = (bucket.algorithm, bucket.shape, bucket.dtype, bucket.grad_dtype, bucket.config)
        assert kinds == {kind}
        keys.append(kind)
    # Nothing that could be stacked is kept apart; the group is no reason to.
    assert len(set(keys)) == len(keys)
    assert len({bucket.name for bucket in plan.buckets}) == len(plan.buckets)


@LISTS
@given(specs=spec_lists())
def test_newton_schulz_covers_every_row_once(specs: list[mc.MatrixSpec]) -> None:
    plan = made(specs)
    if plan is None:
        return
    rows: dict[int, list[tuple[int, int]]] = {}
    for batch in plan.batches:
        for piece in batch.pieces:
            bucket = plan.stretch(piece.part).bucket
            assert bucket.view is not None
            assert (piece.rows, bucket.view.cols) == (batch.rows, batch.cols)
            assert piece.num_matrices == bucket.size * bucket.view.stacks
            assert isinstance(bucket.config, mc.MuonConfig)
            assert iteration(bucket.config) == iteration(batch.config)
            rows.setdefault(plan.parts[piece.part].bucket, []).append((piece.start, piece.rows))
    for index, bucket in enumerate(plan.buckets):
        if bucket.view is None or math.prod(bucket.shape) == 0:
            assert index not in rows
            continue
        position = 0
        for (start, count), block in zip(sorted(rows[index]), bucket.view.blocks, strict=True):
            assert (start, count) == (position, block)
            position += count
        assert position == bucket.view.rows
    # Equal work runs together.
    keys = [(b.rows, b.cols, *iteration(b.config)) for b in plan.batches]
    assert len(set(keys)) == len(keys)


@LISTS
@given(specs=spec_lists(), bound=st.sampled_from([1, 300, 1000, 5000, 2**31]))
def test_waves_hold_everything_once_and_keep_the_bound(specs: list[mc.MatrixSpec], bound: int) -> None:
    plan = made(specs, max_temp_bytes=bound)
    if plan is None:
        return
    assert [i for wave in plan.waves for i in wave.parts] == list(range(len(plan.parts)))
    assert [i for wave in plan.waves for i in wave.batches] == list(range(len(plan.batches)))
    covered: dict[int, list[tuple[int, int]]] = {}
    for part in plan.parts:
        for param in range(part.start, part.stop):
            count = (plan.buckets[part.bucket].shape or (1,))[0]
            first, last = part.stack or (0, count)
            covered.setdefault(part.bucket, []).extend((param, i) for i in range(first, last))
    for index, bucket in enumerate(plan.buckets):
        everything = [(p, i) for p in range(bucket.size) for i in range((bucket.shape or (1,))[0])]
        assert covered.get(index, []) == everything  # once each, in order
    for wave in plan.waves:
        for index in wave.batches:
            assert {piece.part for piece in plan.batches[index].pieces} <= set(wave.parts)
        stretches = [plan.stretch(i) for i in wave.parts]
        if wave.temp_bytes > bound:
            # Only what cannot be cut may be too large: one parameter, or one of its stacked matrices.
            (stretch,) = stretches
            view = stretch.bucket.view
            assert stretch.bucket.size == 1
            assert view is None or len(stretch.bucket.shape) != 3 or stretch.bucket.shape[0] == 1
    assert plan.temp_bytes == max(wave.temp_bytes for wave in plan.waves)


def test_a_bucket_too_large_is_cut_into_even_parts() -> None:
    specs = [mc.MatrixSpec(name=f"w{i}", shape=(16, 32)) for i in range(10)]
    whole = mc.make_plan(specs)
    assert [(p.start, p.stop) for p in whole.parts] == [(0, 10)]
    plan = mc.make_plan(specs, max_temp_bytes=whole.temp_bytes // 3)
    assert len(plan.buckets) == 1
    assert [(p.start, p.stop) for p in plan.parts] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert plan.temp_bytes <= whole.temp_bytes // 3
    assert [batch.num_matrices for batch in plan.batches] == [2, 3, 2, 3]


def test_a_stack_too_large_is_cut_between_its_matrices() -> None:
    specs = [mc.MatrixSpec(name=n, shape=(7, 16, 32)) for n in ("a", "b")]
    whole = mc.make_plan(specs)
    plan = mc.make_plan(specs, max_temp_bytes=whole.temp_bytes // 7)
    assert [(p.start, p.stop, p.stack) for p in plan.parts] == [
        (i, i + 1, stack) for i in (0, 1) for stack in ((0, 2), (2, 4), (4, 7))
    ]
    # A convolution is one matrix, whatever its first dim counts.
    conv = [mc.MatrixSpec(name="c", shape=(7, 3, 4, 4))]
    assert [p.stack for p in mc.make_plan(conv, max_temp_bytes=1).parts] == [None]


@LISTS
@given(specs=spec_lists())
def test_json_round_trip(specs: list[mc.MatrixSpec]) -> None:
    plan = made(specs)
    if plan is None:
        return
    again = mc.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    assert again.to_json() == plan.to_json()
    hash(again)


@LISTS
@given(specs=spec_lists())
def test_the_table_fits_120_columns(specs: list[mc.MatrixSpec]) -> None:
    plan = made(specs)
    if plan is None:
        return
    text = plan.describe()
    assert max(map(len, text.splitlines())) <= 120
    assert plan.digest in text
    first_words = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert first_words >= {item.name for item in (*plan.buckets, *plan.batches)}


# -- examples a reader can follow -----------------------------------------------------------------------------------


def test_what_shares_a_bucket_and_what_shares_a_batch() -> None:
    fused = mc.MuonConfig(split_sizes=(8, 4))
    specs = [
        mc.MatrixSpec(name="a", shape=(4, 6)),
        mc.MatrixSpec(name="b", shape=(12, 6), config=fused),
        mc.MatrixSpec(name="c", shape=(4, 6), group=1),
        mc.MatrixSpec(name="d", shape=(3, 4, 6)),
        mc.MatrixSpec(name="e", shape=(4, 2, 3, 1)),
        mc.MatrixSpec(name="f", shape=(4, 6), dtype="bfloat16"),
        mc.MatrixSpec(name="g", shape=(4, 6), algorithm="adamw"),
        mc.MatrixSpec(name="h", shape=(4, 6), device="cuda:0"),
    ]
    plan = mc.make_plan(specs)
    assert [bucket.params for bucket in plan.buckets] == [(0, 2), (1,), (3,), (4,), (5,), (6,), (7,)]
    # The 4 x 6 matrices of the pair, the fused weight's second block, three experts, a convolution, a bfloat16 weight.
    batches = {(b.device, b.rows, b.cols): b for b in plan.batches}
    assert set(batches) == {("cpu", 4, 6), ("cpu", 8, 6), ("cuda:0", 4, 6)}
    assert batches["cpu", 4, 6].num_matrices == 2 + 1 + 3 + 1 + 1
    assert [(plan.parts[p.part].bucket, p.start) for p in batches["cpu", 4, 6].pieces] == [
        (0, 0),
        (1, 8),
        (2, 0),
        (3, 0),
        (4, 0),
    ]
    assert batches["cpu", 8, 6].num_matrices == 1
    assert plan.num_groups == 2
    assert plan.collectives == ()


def test_tall_and_wide_are_two_batches_of_equal_work() -> None:
    plan = mc.make_plan([mc.MatrixSpec(name="a", shape=(4, 6)), mc.MatrixSpec(name="b", shape=(6, 4))])
    assert [(b.rows, b.cols) for b in plan.batches] == [(4, 6), (6, 4)]
    # 5 steps of 4 r^2 c + 2 r^3, r = 4, c = 6.
    assert [b.flops for b in plan.batches] == [5 * (4 * 16 * 6 + 2 * 64)] * 2


def test_the_state_has_its_declared_dtype() -> None:
    def state_dtype(config: mc.MuonConfig | None, algorithm: str = "muon") -> str:
        spec = mc.MatrixSpec(
            name="w",
            shape=(4, 4),
            dtype="bfloat16",
            grad_dtype="float32",
            algorithm=algorithm,  # type: ignore[arg-type]
            config=config,
        )
        return mc.make_plan([spec]).buckets[0].state_dtype

    assert state_dtype(None) == "float32"  # torch.optim.Muon: like the gradient
    assert state_dtype(mc.MuonConfig(momentum_dtype="bfloat16")) == "bfloat16"
    assert state_dtype(None, "adamw") == "bfloat16"  # torch.optim.AdamW: like the parameter


def test_configs_given_to_the_plan_fill_in_where_a_spec_has_none() -> None:
    own = mc.MuonConfig(preset="keller")
    specs = [
        mc.MatrixSpec(name="a", shape=(4, 6)),
        mc.MatrixSpec(name="b", shape=(4, 6), config=own),
        mc.MatrixSpec(name="c", shape=(4,), algorithm="adamw"),
    ]
    default, adamw = mc.MuonConfig(preset="moonlight"), mc.AdamWConfig(eps=1e-6)
    plan = mc.make_plan(specs, config=default, adamw=adamw)
    assert [spec.config for spec in plan.specs] == [default, own, adamw]


def test_the_digest_tells_plans_apart() -> None:
    base = [mc.MatrixSpec(name=f"p{i}", shape=(4, 6)) for i in range(3)]
    plans = [mc.make_plan(base), mc.make_plan(base, exact=True), mc.make_plan(base, max_temp_bytes=1)]
    plans.append(mc.make_plan(base, config=mc.MuonConfig(preset="keller")))
    plans.append(mc.make_plan([*base[:2], mc.MatrixSpec(name="p2", shape=(6, 4))]))
    plans.append(mc.make_plan([dataclasses.replace(base[0], group=1), *base[1:]]))
    plans.append(mc.make_plan([dataclasses.replace(base[0], name="other"), *base[1:]]))
    plans.append(mc.make_plan([base[0], base[2], base[1]]))
    plans.append(mc.make_plan([dataclasses.replace(base[0], grad_dtype="bfloat16"), *base[1:]]))
    plans.append(mc.make_plan(base, ns="gram"))
    digests = [plan.digest for plan in plans]
    assert len(set(digests)) == len(plans)
    # Why a form was chosen is no part of what runs: figures of two machines may give one plan for two reasons.
    (batch,) = plans[0].batches
    other = dataclasses.replace(plans[0], batches=(dataclasses.replace(batch, reason="another"),))
    assert other.digest == digests[0] and other.to_json() != plans[0].to_json()
    assert mc.make_plan(list(base)).digest == digests[0]


def test_unreadable_plans_are_refused_in_words() -> None:
    text = mc.make_plan([mc.MatrixSpec(name="a", shape=(4, 6))]).to_json()
    for broken, words in [
        ("{", "unreadable"),
        ("[1]", "version"),
        ("null", "version"),
        (text.replace('"version": 3', '"version": 99'), "99"),
        ('{"version": 3}', "specs"),
        (text.replace('"ns_steps": 5', '"ns_steps": -5'), "Plan.to_json"),
        (text.replace('"algorithm": "muon"', '"algorithm": "sgd"'), "sgd"),
        (text.replace('"exact": false', '"exact": false, "extra": 1'), "extra"),
    ]:
        assert broken != text
        with pytest.raises(ValueError, match=r"Plan\.from_json: expected") as caught:
            mc.Plan.from_json(broken)
        assert words in str(caught.value)
    assert json.loads(text)["version"] == 3


def test_what_cannot_be_planned_is_refused_by_name() -> None:
    spec = mc.MatrixSpec(name="a", shape=(4, 6))
    with pytest.raises(ValueError, match="at least one"):
        mc.make_plan([])
    with pytest.raises(ValueError, match="'a' twice"):
        mc.make_plan([spec, spec])
    with pytest.raises(NotImplementedError, match="at most two mesh axes"):
        mc.make_plan([spec], mesh=mc.MeshSpec(axes=(("a", 2), ("b", 2), ("c", 2))))
    assert mc.make_plan([spec], mesh=mc.MeshSpec(axes=(("shard", 1),))).mesh.num_ranks == 1
    with pytest.raises(ValueError, match="'a'.*float16.*CPU"):
        mc.make_plan([spec], config=mc.MuonConfig(ns_dtype="float16"))
    cuda = dataclasses.replace(spec, device="cuda:0")
    assert mc.make_plan([cuda], config=mc.MuonConfig(ns_dtype="float16")).batches[0].config.ns_dtype == "float16"


@pytest.mark.parametrize(
    "config",
    [
        mc.MuonConfig(preset="keller"),
        mc.MuonConfig(momentum_form="sum"),
        mc.MuonConfig(ns_dtype="float32"),
        mc.MuonConfig(eps="relative"),
        mc.MuonConfig(momentum_dtype="bfloat16"),
    ],
    ids=["add", "sum", "float32", "relative", "momentum"],
)
def test_exact_refuses_what_stock_does_not_do(config: mc.MuonConfig) -> None:
    with pytest.raises(ValueError, match="'a'.*exact=True reproduces torch.optim.Muon"):
        mc.make_plan([mc.MatrixSpec(name="a", shape=(4, 6), config=config)], exact=True)


# -- in a process of its own ----------------------------------------------------------------------------------------

PLANNING = """
import sys
import muon_compile as mc
import muon_compile.config, muon_compile.spec
import muon_compile.plan.describe, muon_compile.plan.plan, muon_compile.plan.planner
configs = [mc.MuonConfig(), mc.MuonConfig(preset="keller"), mc.MuonConfig(num_heads=2)]
specs = [mc.MatrixSpec(name=f"p{i}", shape=(4 + 2 * (i % 3), 6), config=configs[i % 3], group=i % 2) for i in range(9)]
specs.append(mc.MatrixSpec(name="bias", shape=(4,), algorithm="adamw"))
plan = mc.make_plan(specs, max_temp_bytes=1000)
plan.describe(), mc.Plan.from_json(plan.to_json())
assert not {name for name in sys.modules if name.split(".")[0] == "torch"}, "torch was imported"
print(plan.digest)
"""


def test_planning_imports_no_torch_and_does_not_depend_on_hash_seeds() -> None:
    digests = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", PLANNING],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        digests.append(run.stdout.strip())
    assert digests[0] == digests[1] != ""
