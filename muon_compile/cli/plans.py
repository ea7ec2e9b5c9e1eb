"""Commands about plans, which need no torch: plan, plan diff, simulate."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from muon_compile.cli.inputs import load_hardware, load_plan, load_what, world_mesh
from muon_compile.cli.outputs import write_text
from muon_compile.plan.hardware import Hardware
from muon_compile.plan.models import model_specs
from muon_compile.plan.plan import Plan
from muon_compile.plan.planner import make_plan
from muon_compile.spec import MeshSpec

# What goes into a plan beside parameters, ranks and hardware; make_plan has its own for what is not given.
PLANNING = ("strategy", "ns", "replicas", "max_gather_bytes")


def plan(args: argparse.Namespace) -> int:
    """``plan``."""
    made, _ = planned(args)
    if args.save is not None:
        write_text(args.save, made.to_json())
    print(made.to_json() if args.json else made.describe())
    return 0


def planned(args: argparse.Namespace) -> tuple[Plan, Hardware]:
    """The plan that the arguments ask for, and the figures that it was made with."""
    hardware = load_hardware(args.hardware or "h100")
    what = load_what(args.what, hardware)
    specs = model_specs(what, mesh=args.mesh, device=hardware.device) if isinstance(what, str) else what
    given = {name: value for name in PLANNING if (value := getattr(args, name)) is not None}
    return make_plan(specs, mesh=args.mesh, hardware=hardware, **given), hardware


def plan_diff(args: argparse.Namespace) -> int:
    """``plan diff``."""
    from muon_compile.plan.diff import diff_plans

    changes = diff_plans(load_plan(args.a), load_plan(args.b))
    if args.json:
        print(json.dumps({"changes": changes}, indent=1))
    elif changes:
        print("\n".join(changes))
    return 1 if changes else 0


def simulate(args: argparse.Namespace) -> int:
    """``simulate``."""
    from rich.console import Console
    from rich.progress import track

    from muon_compile.inspect import scaling, trace
    from muon_compile.plan.simulate import simulate

    meshes = _worlds(args)
    if args.png is not None:
        scaling.load_pyplot()  # if it is missing, better now than after the sweep
    hardware = load_hardware(args.hardware or "h100")
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
        write_text(args.trace, json.dumps(trace.timeline(steps)))
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
