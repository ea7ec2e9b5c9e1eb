"""Commands that run something, alone or on the ranks of torchrun: calibrate, verify."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist

from muon_compile.cli.outputs import write_text
from muon_compile.config import MuonConfig
from muon_compile.plan.hardware import SIDES, Hardware


def calibrate(args: argparse.Namespace) -> int:
    """``calibrate``."""
    from muon_compile.run.calibrate import calibrate
    from muon_compile.run.calibrate_group import calibrate_group

    with _process_group() as rank:
        hardware = calibrate_group() if dist.is_available() and dist.is_initialized() else calibrate()
    if rank == 0:
        if args.out is not None:
            write_text(args.out, hardware.to_json())
        print(hardware.to_json() if args.json else _figures(hardware))
    return 0


def _figures(hardware: Hardware) -> str:
    """A machine's figures for people, and what they are of."""
    lines = [hardware.name, f"batched square products of sides {', '.join(map(str, SIDES))}, GFLOP/s:"]
    for rates in hardware.gemm:
        each = ", ".join(f"{rate / 1e9:,.0f}" for rate in rates.flops_per_second)
        lines.append(f"  {rates.kernel} {rates.dtype}: {each}")
    lines += [
        f"copies through memory, read and written: {hardware.bytes_per_second / 1e9:,.1f} GB/s",
        f"largest copy that runs at twice that: {hardware.cache_bytes / 2**20:,.0f} MiB",
        f"one operator called by the host: {hardware.op_seconds * 1e6:,.2f} us",
    ]
    for level in hardware.network.levels if hardware.network is not None else ():
        what = f"{level.latency_seconds * 1e6:,.1f} us a message, {level.bytes_per_second / 1e9:,.2f} GB/s of one rank"
        lines.append(f"network, {level.name} on {level.plane}: {what}")
    if hardware.network is None:
        lines.append("network: not measured; torchrun -m muon_compile calibrate measures it among its ranks")
    return "\n".join(lines)


def verify(args: argparse.Namespace) -> int:
    """``verify``."""
    from muon_compile.lower.compiled import CompileError
    from muon_compile.verification.verify import verify

    with _process_group() as rank:
        try:
            report = verify(
                mesh=args.ranks_axes,
                strategies=args.strategies,
                backends=args.backends,
                config=MuonConfig(ns_dtype=args.dtype),
                seed=args.seed,
            )
        except CompileError as error:
            raise ValueError(f"--backends: {error}") from error
        if rank == 0:
            if args.out is not None:
                write_text(args.out, report.to_json())
            print(report.to_json() if args.json else report)
    return 0 if report.ok else 1


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """This rank's number, in the group that is running or, under torchrun, in one of its own."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    made = dist.is_available() and not dist.is_initialized() and launched
    if made:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if made:
            dist.barrier()  # gloo's threads still send to the others; a process that ends meanwhile may abort
    finally:
        if made:
            dist.destroy_process_group()
