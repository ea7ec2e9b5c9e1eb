"""Measure this machine together with the network among the ranks of a process group."""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from muon_compile.plan.hardware import Hardware, Rates
from muon_compile.plan.network import Level, Network, Plane
from muon_compile.run.agreement import from_first_rank
from muon_compile.run.calibrate import local_hardware

# Elements of the gathers that are timed: of the first one only the messages' latency counts, of the second their bytes.
_SMALL, _LARGE = 16, 2**19
_ROUNDS, _WARM = 9, 2


def calibrate_group(group: ProcessGroup | None = None) -> Hardware:
    """Figures of this machine's CPU and of the network among a group's ranks; every rank of it calls, all get the same.

    Where ranks share a machine they share its cores: products, copies and operators then run at the ranks' part of what
    one rank alone has. The network counts as one level, whose latency and bandwidth are those of all-gathers around a
    ring while all ranks take part; a gathering of machines with faster links inside needs figures of its own.

    Args:
        group: The ranks; None: all.

    Raises:
        ValueError: No process group is running.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("calibrate_group: expected a running process group; start with torchrun, or call calibrate().")
    ranks = group or dist.group.WORLD
    assert ranks is not None
    size = dist.get_world_size(ranks)
    mine = local_hardware() if dist.get_rank(ranks) == 0 else None
    alone: Hardware = from_first_rank(mine, [ranks])
    if size == 1:
        return alone
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, (socket.gethostname(), _cores(), torch.get_num_threads()), group=ranks)
    host, cores, threads = hosts[0]
    here = sum(other[0] == host for other in hosts)
    shared = _slowed(alone, min(1.0, cores / (here * threads)))
    small, large = (_gather_seconds(torch.zeros(count), size, ranks) for count in (_SMALL, _LARGE))
    latency, rate = latency_and_rate(small, large, size)
    level = Level(name="group", latency_seconds=latency, bytes_per_second=rate, plane=dist.get_backend(ranks))
    network = Network(levels=(level,), planes=(Plane(name=level.plane),), shares_connections=level.plane == "gloo")
    measured: Hardware = from_first_rank(replace(shared, network=network), [ranks])
    return measured


def latency_and_rate(small: float, large: float, size: int) -> tuple[float, float]:
    """Seconds of a message without content, and bytes per second of its content, of two gathers' seconds.

    On a busy machine the small gather may take as long as the large one; no more than half of that counts as latency.
    """
    latency = max(min(small, large / 2) / (size - 1), 1e-9)
    return latency, 4 * _LARGE / max(large / (size - 1) - latency, 1e-9)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _slowed(hardware: Hardware, part: float) -> Hardware:
    """The figures of one rank that has only a part of the cores."""
    if part == 1.0:
        return hardware
    gemm = tuple(
        Rates(kernel=r.kernel, dtype=r.dtype, flops_per_second=tuple(rate * part for rate in r.flops_per_second))
        for r in hardware.gemm
    )
    return replace(
        hardware,
        name=f"{hardware.name}, {part:.2g} of its cores for each rank",
        gemm=gemm,
        bytes_per_second=hardware.bytes_per_second * part,
        op_seconds=hardware.op_seconds / part,
    )


def _gather_seconds(x: Tensor, size: int, group: ProcessGroup) -> float:
    """Median time of an all-gather of everyone's ``x``."""
    out = x.new_empty(size * x.numel())
    taken = []
    for _ in range(_WARM + _ROUNDS):
        dist.barrier(group=group)
        start = time.perf_counter()
        dist.all_gather_into_tensor(out, x, group=group)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[_WARM:])
