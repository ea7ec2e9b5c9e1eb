"""A machine measured together with the network among its ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import muon_compile as mc
from muon_compile.plan.hardware import PRESETS, Hardware
from muon_compile.run.calibrate_group import calibrate_group, latency_and_rate
from tests.dist.models import Job, give, optimizer_of, sharded_model
from tests.dist.ranks import Ranks

WORLD = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def measured(rank: int) -> tuple[str, int]:
    """On a machine of one core, whatever this one has."""
    with mock.patch.object(sys.modules["muon_compile.run.calibrate_group"], "_cores", return_value=1):
        return calibrate_group().to_json(), torch.get_num_threads()


@pytest.mark.dist
def test_all_ranks_get_the_same_figures(ranks: Ranks) -> None:
    (text, threads), (other, _) = ranks.run(measured)
    assert text == other
    hardware = Hardware.from_json(text)
    assert hardware.network is not None
    (level,) = hardware.network.levels
    # Between shared memory's microseconds and a hung network's second.
    assert 1e-7 < level.latency_seconds < 1 and 1e5 < level.bytes_per_second < 1e12
    assert level.plane == "gloo" and hardware.network.shares_connections
    # Ranks share the cores of the machine that the first one has alone (the tests name its preset).
    part, alone = 1 / (WORLD * threads), PRESETS["cpu-2core"]
    for rates, before in zip(hardware.gemm, alone.gemm, strict=True):
        assert rates.flops_per_second == pytest.approx([rate * part for rate in before.flops_per_second])
    assert hardware.bytes_per_second == pytest.approx(alone.bytes_per_second * part)
    assert hardware.op_seconds == pytest.approx(alone.op_seconds / part)


def step_with_auto(rank: int) -> tuple[str, str]:
    job = Job(shapes={"even": (16, 12), "even_too": (16, 12)}, mesh=(WORLD,), steps=1)
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = mc.compile_step(optimizer, backend="aot_eager", hardware="auto")
    give(model, 0)
    optimizer.step()
    choice = step.plan.buckets[0].choice
    return step.plan.digest, "" if choice is None else choice.reason


@pytest.mark.dist
def test_a_step_plans_with_what_was_measured(ranks: Ranks) -> None:
    (digest, reason), (other, same) = ranks.run(step_with_auto)
    assert digest == other and reason == same and reason.startswith("predicted ")


def test_without_ranks_there_is_no_network_to_measure() -> None:
    with pytest.raises(ValueError, match="expected a running process group"):
        calibrate_group()


def test_hardware_by_name() -> None:
    param = torch.nn.Parameter(torch.ones(8, 4))
    step = mc.compile_step(mc.Muon([param], backend="aot_eager"), backend="aot_eager", hardware="cpu-2core")
    assert step.plan.batches
    with pytest.raises(TypeError, match=r"hardware: expected a Hardware, 'auto' or one of 'cpu-2core'.*got 'h300'"):
        mc.compile_step(mc.Muon([param], backend="aot_eager"), backend="aot_eager", hardware="h300")


def test_a_busy_machine_gives_no_figure_out_of_this_world() -> None:
    latency, rate = latency_and_rate(small=4e-3, large=4.1e-3, size=2)  # most of either gather was waiting
    assert latency == pytest.approx(2.05e-3)
    assert rate < 1e10
    latency, rate = latency_and_rate(small=1e-4, large=1e-2, size=2)
    assert latency == pytest.approx(1e-4)
    assert rate == pytest.approx(4 * 2**19 / 9.9e-3)
