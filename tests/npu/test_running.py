"""Layer C: TorchAir's graph, run by this library's reading of GE's operators, is the eager step."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import muon_compile as mc
from tests.dist.models import MATRICES, TALL, Job
from tests.dist.ranks import Ranks
from tests.npu.plans import ROUNDED, SHARDED, STEPS, WORLD
from tests.npu.running import Run, alone, captured, shared
from tests.npu.sources import sources

pytestmark = [pytest.mark.npu, pytest.mark.timeout(900)]
VERSION = "2.13.0"
# TorchAir transposes where eager passes strides, and products of transposed operands round otherwise; 5 steps.
FLOAT32 = 1e-5
SHAPES = {name: MATRICES[name] for name in ("even", "even_too", "five")}
VECTOR = {"vector": MATRICES["vector"]}
# Gradients of these jobs have a norm of about 15.
GUARD = mc.CompileConfig(clip_grad_norm=1.0, nonfinite="skip", probes=True)


def job(strategy: str, ns: str, dtype: str, **more: object) -> Job:
    config = mc.MuonConfig(ns_dtype=dtype, ns_steps=STEPS)  # type: ignore[arg-type]
    shapes = TALL if strategy.startswith("gram") else SHAPES
    given = {"strategy": strategy, "ns": ns, "config": config, "shapes": shapes, "dtype": getattr(torch, dtype)}
    given |= {"steps": 2}
    return Job(**(given | more))  # type: ignore[arg-type]


ALONE = {
    f"{ns} {dtype}": job("local", ns, dtype, steps=5, shapes=SHAPES | VECTOR)
    for ns in ("standard", "gram", "gram_restart", "gram_split:2,1", "gram_half")
    for dtype in ("float32", "bfloat16")
} | {
    "keller": job("local", "standard", "float32", config=mc.MuonConfig(preset="keller", ns_dtype="float32")),
    "relative eps": job("local", "standard", "float32", config=mc.MuonConfig(eps="relative", ns_dtype="float32")),
    "experts": job("local", "auto", "float32", shapes={"experts": (6, 8, 12), **VECTOR}),
    "waves": job("local", "standard", "float32", compile_config=mc.CompileConfig(max_temp_bytes=700)),
    "guarded": job("local", "standard", "float32", shapes=SHAPES | VECTOR, compile_config=GUARD),
}
ALONE |= {
    f"{name} bfloat16": job(
        "local", "standard", "bfloat16", shapes=SHAPES | VECTOR, compile_config=mc.CompileConfig(**kept)
    )
    for name, kept in ROUNDED.items()
}
CAPTURED = ("standard bfloat16", "gram_split:2,1 float32")
SHARED = {
    f"{strategy} {ns} {dtype}": job(strategy, ns, dtype)
    for strategy in SHARDED
    for ns in ("standard", "gram")
    for dtype in ("float32", "bfloat16")
} | {
    name: job("auto", "standard", "float32", mesh=(2, 2), shapes=SHAPES | VECTOR | {"experts": (4, 6, 5)}, **more)
    for name, more in {"hsdp": {}, "hsdp guarded": {"compile_config": GUARD}}.items()
}
SHARED |= {
    f"hsdp {name} bfloat16": job(
        "auto",
        "standard",
        "bfloat16",
        mesh=(2, 2),
        shapes=SHAPES | VECTOR | {"experts": (4, 6, 5)},
        compile_config=mc.CompileConfig(**kept),
    )
    for name, kept in ROUNDED.items()
}


@functools.cache
def _alone(folder: str) -> dict[str, Run]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(alone, folder, ALONE).result(timeout=840)


@functools.cache
def _captured(folder: str) -> dict[str, Run]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(captured, folder, {name: ALONE[name] for name in CAPTURED}).result(timeout=840)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def check(run: Run, name: str) -> None:
    assert all(count > 0 for count in run.runs), name
    assert run.stats["recompiles"] == 0, name
    assert run.stats["host_launches"] == 1, name
    if "bfloat16" in name:
        assert run.bits, name
        assert all(run.bits), f"{name}: GE's graph and the traced one write other bits in steps {run.bits}"
    else:
        assert run.error <= FLOAT32, f"{name}: {run.error:.1e}"


@pytest.mark.parametrize("name", ALONE)
def test_one_rank(name: str) -> None:
    run = _alone(sources(VERSION))[name]
    check(run, name)
    assert run.graphs == (
        2 if ALONE[name].steps > 2 and "vector" in ALONE[name].shapes else 1
    )  # one gradient was missing
    assert sum(run.runs) == ALONE[name].steps


@pytest.mark.parametrize("name", CAPTURED)
def test_the_mode_that_records_kernels_up_to_the_recording(name: str) -> None:
    run = _captured(sources(VERSION))[name]
    assert run.bits
    assert all(run.bits)
    assert run.graphs == 0  # no GE graph
    assert run.stats["recompiles"] == 0


@pytest.mark.parametrize("name", SHARED)
def test_four_ranks(ranks: Ranks, name: str) -> None:
    runs = [every[name] for every in ranks.run(shared, sources(VERSION), {name: SHARED[name]}, timeout=400)]
    sequences: dict[str, list[str]] = {}
    for run in runs:
        check(run, name)
        assert run.graphs == 1
        assert run.runs == (SHARED[name].steps,)
        for group in {group for _, group in run.collectives}:
            of_group = [kind for kind, among in run.collectives if among == group]
            assert sequences.setdefault(group, of_group) == of_group
    assert sequences


def test_a_wrong_graph_is_noticed(ranks: Ranks) -> None:
    """The comparison can fail: a job is not equal to another's eager run."""
    name = "all_to_all standard float32"
    run = dataclasses.replace(
        ranks.run(shared, sources(VERSION), {name: SHARED[name]}, timeout=400)[0][name], error=2e-5
    )
    with pytest.raises(AssertionError, match="2.0e-05"):
        check(run, name)
