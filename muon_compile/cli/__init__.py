"""The command ``muon-compile``, which ``python -m muon_compile`` is too, alone or on the ranks of torchrun."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from muon_compile.cli.arguments import parse
from muon_compile.config import MuonConfig
from muon_compile.spec import MeshSpec

if TYPE_CHECKING:
    from muon_compile.plan.hardware import Hardware

# What a command needs is imported when it runs: --help need not wait for it, and plans need no torch.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 where all is right, 1 where it is not, 2 for bad arguments."""
    args, parser = parse(list(sys.argv[1:] if argv is None else argv))
    commands = {
        "plan": _plan,
        "plan diff": _plan_diff,
        "simulate": _simulate,
        "calibrate": _calibrate,
        "verify": _verify,
    }
    try:
        code = commands[args.command](args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as head, has seen enough. What is left must not fail again when Python exits: the recipe of
        # the note on SIGPIPE in the documentation of signal.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, NotImplementedError, ModuleNotFoundError) as error:
        parser.error(str(error))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _plan(args: argparse.Namespace) -> int:
    from muon_compile.cli.inputs import load_hardware, load_what
    from muon_compile.plan.models import model_specs
    from muon_compile.plan.planner import make_plan

    hardware = load_hardware(args.hardware)
    what = load_what(args.what, hardware)
    plan = make_plan(
        model_specs(what, mesh=args.mesh, device=hardware.device) if isinstance(what, str) else what,
        mesh=args.mesh,
        strategy=args.strategy,
        ns=args.ns,
        replicas=args.replicas,
        max_gather_bytes=args.max_gather_bytes,
        hardware=hardware,
    )
    if args.save is not None:
        _write(args.save, plan.to_json())
    print(plan.to_json() if args.json else plan.describe())
    return 0


def _plan_diff(args: argparse.Namespace) -> int:
    from muon_compile.cli.inputs import load_plan
    from muon_compile.plan.diff import diff_plans

    changes = diff_plans(load_plan(args.a), load_plan(args.b))
    if args.json:
        print(json.dumps({"changes": changes}, indent=1))
    elif changes:
        print("\n".join(changes))
    return 1 if changes else 0


def _simulate(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import track

    from muon_compile.cli.inputs import load_hardware, load_what
    from muon_compile.inspect import scaling, trace
    from muon_compile.plan.simulate import simulate

    meshes = _worlds(args)
    if args.png is not None:
        scaling.load_pyplot()  # if it is missing, better now than after the sweep
    hardware = load_hardware(args.hardware)
    what = load_what(args.what, hardware)
    console = Console(stderr=True)
    hidden = len(meshes) == 1 or not console.is_terminal
    progress = track(meshes, "simulating", console=console, transient=True, disable=hidden)
    found = [
        replace(simulate(what, mesh=mesh, hardware=hardware, strategies=args.strategies), name=args.what)
        for mesh in progress
    ]
    if args.trace is not None:
        steps = {row.strategy: row.events for row in found[0].rows if not row.refused}
        _write(args.trace, json.dumps(trace.timeline(steps)))
    if args.png is not None:
        args.png.parent.mkdir(parents=True, exist_ok=True)
        scaling.draw([scaling.beyond_limits(what, each, hardware) for each in found], hardware, args.png)
    if args.json:
        data = [json.loads(each.to_json()) for each in found]
        print(json.dumps(data if args.sweep else data[0], indent=1))
    elif args.sweep:
        print(scaling.scaling_table(found))
    else:
        print(found[0])
    return 0


def _worlds(args: argparse.Namespace) -> list[MeshSpec]:
    """The meshes to simulate, by growing size."""
    from muon_compile.cli.inputs import world_mesh

    if args.sweep is None and args.png is not None:
        raise ValueError("--png: it draws over world sizes; expected --sweep, such as --sweep 8 64 512, beside it.")
    if args.sweep is not None and (args.mesh is not None or args.trace is not None):
        flag = "--mesh" if args.mesh is not None else "--trace"
        raise ValueError(f"{flag}: it is about one world; expected --ranks instead of --sweep beside it.")
    if args.mesh is None:
        sizes = args.sweep or [args.ranks]
        if None in sizes:
            raise ValueError("expected --ranks, --mesh or --sweep: how many ranks there are.")
        return [world_mesh(ranks, args.shard) for ranks in sorted(set(sizes))]
    if args.ranks not in (None, args.mesh.num_ranks):
        axes = "x".join(str(size) for _, size in args.mesh.axes)
        raise ValueError(f"--mesh: expected axes whose product is --ranks {args.ranks}, got {axes}.")
    return [args.mesh]


def _calibrate(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    from muon_compile.run.calibrate import calibrate
    from muon_compile.run.calibrate_group import calibrate_group

    with _process_group() as rank:
        hardware = calibrate_group() if dist.is_available() and dist.is_initialized() else calibrate()
    if rank == 0:
        if args.out is not None:
            _write(args.out, hardware.to_json())
        print(hardware.to_json() if args.json else _figures(hardware))
    return 0


def _figures(hardware: Hardware) -> str:
    """A machine's figures for people, and what they are of."""
    from muon_compile.plan.hardware import SIDES

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


def _verify(args: argparse.Namespace) -> int:
    from muon_compile.verification.verify import verify

    with _process_group() as rank:
        report = verify(
            mesh=args.ranks_axes,
            strategies=args.strategies,
            backends=args.backends,
            config=MuonConfig(ns_dtype=args.dtype),
            seed=args.seed,
        )
        if rank == 0:
            print(report)
            if args.json is not None:
                _write(args.json, report.to_json())
    return 0 if report.ok else 1


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """This rank's number, in the group that is running or, under torchrun, in one of its own."""
    import torch.distributed as dist

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    made = dist.is_available() and not dist.is_initialized() and launched
    if made:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    finally:
        if made:
            dist.destroy_process_group()
