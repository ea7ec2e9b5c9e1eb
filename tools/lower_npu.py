"""The GE graph of a model's step on Ascend NPUs, on a machine without one: TorchAir's own Python lowers it.

    python tools/lower_npu.py --model gpt2 --mesh 4
    python tools/lower_npu.py --model my_package.model:build --mesh 2x4 --rank 5 --out out/rank5 --json
    python tools/lower_npu.py --plan plan.json --audit-only

A rank's step is planned, traced over fake tensors, lowered, and held against what the plan promises. Into --out go
TorchAir's own dumps (ge_graph.pbtxt, ge_graph.py), the table of GE's operators (ge_operators.txt), the traced graph
(graph.py), plan.txt and summary.json. TorchAir's Python is fetched from the wheel of torch_npu once, 44 MB, and kept;
--audit-only needs no download: it looks for operators that TorchAir has no converter for.

An operator belongs to a bucket if its result goes into that bucket's parameters and state alone, and is shared if it
goes into several; where it goes into none on this rank, the bucket that it comes from counts. (TorchAir notes which
node of the graph that it was handed an operator gives, whence the counts by traced operator; a node knows no bucket.)
What GE's own passes then make of the graph, and how fast it is, only a device can tell.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muon_compile.cli.arguments import mesh
from muon_compile.cli.inputs import load_hardware, load_plan, load_what
from muon_compile.lower import torchair as backend
from muon_compile.lower.compiled import CompileError
from muon_compile.lower.cut_inputs import cut_inputs
from muon_compile.lower.functional import functional_graph
from muon_compile.lower.torchair_options import compiler_config
from muon_compile.lower.trace import TracedStep
from muon_compile.npu import stand_in
from muon_compile.npu.audit import audit
from muon_compile.npu.fake_device import name_fake_device
from muon_compile.npu.graph import parse
from muon_compile.npu.wheel import VERSIONS, FetchError, torchair_sources
from muon_compile.plan.models import model_specs
from muon_compile.plan.plan import Plan
from muon_compile.plan.planner import make_plan
from muon_compile.plan.strategies import NODE, PEERS
from muon_compile.run.inputs import trace_plan
from muon_compile.spec import MeshSpec

sys.path.insert(0, str(Path(__file__).parent))

from _ge_report import ge_report, print_report

VERSION = "2.13.0"
FILES = ("plan.txt", "graph.py", "ge_graph.pbtxt", "ge_graph.py", "ge_operators.txt", "summary.json")
# What decides a plan that is made here, and is settled in one that is read; by option, with what it is if not given.
PLANNING: Mapping[str, Any] = {"mesh": None, "strategy": "auto", "ns": "auto", "hardware": "ascend-910c"}


def wished_plan(args: argparse.Namespace) -> Plan:
    """The plan, everything of it on NPUs.

    Raises:
        ValueError: No such model, plan or figures, or arguments that do not fit together.
    """
    if args.audit_only and (args.option or args.torch_npu):
        raise ValueError("--audit-only: it knows one TorchAir, without options; expected no --option and --torch-npu.")
    plan = new_plan(args) if args.plan is None else read_plan(args)
    if not 0 <= args.rank < plan.mesh.num_ranks:
        raise ValueError(f"--rank: expected one of the mesh, 0 to {plan.mesh.num_ranks - 1}, got {args.rank}.")
    return plan


def read_plan(args: argparse.Namespace) -> Plan:
    settled = [f"--{name}" for name in PLANNING if getattr(args, name) is not None]
    if settled:
        raise ValueError(f"{', '.join(settled)}: expected none of it beside --plan, since {args.plan} says it.")
    plan = load_plan(args.plan)

    def moved(items: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(replace(item, device="npu") for item in items)

    devices = {"specs": moved(plan.specs), "buckets": moved(plan.buckets), "choices": moved(plan.choices)}
    return replace(plan, **devices, batches=moved(plan.batches))


def new_plan(args: argparse.Namespace) -> Plan:
    given = {name: getattr(args, name) for name in PLANNING}
    wishes = {name: PLANNING[name] if value is None else value for name, value in given.items()}
    hardware = load_hardware(wishes["hardware"])
    if hardware.device != "npu":
        raise ValueError(
            f"--hardware: expected figures of an NPU, such as ascend-910b, ascend-910c or a file that says device npu, "
            f"got {wishes['hardware']}, which is about {hardware.device}."
        )
    what = load_what(args.model, hardware)
    specs = model_specs(what, mesh=wishes["mesh"], device="npu") if isinstance(what, str) else what
    return make_plan(specs, **(wishes | {"hardware": hardware}))


def ranks_by_axis(plan: Plan, rank: int) -> dict[str, list[int]]:
    """The ranks that one exchanges matrices with, itself too, by axis; also those of its node, and its peers."""
    found: dict[str, list[int]] = {}
    for part in plan.parts:
        layout, exchange = plan.buckets[part.bucket].layout, part.exchange
        if layout is None or exchange is None:
            continue
        for axis in (exchange.shard_axis, layout.replica_axis):
            if axis is not None:
                found[axis] = along(layout.mesh, axis, rank)
        shard, size = exchange.shard_axis, exchange.node_size
        if shard is not None and size:
            at = found[shard].index(rank)
            found[shard + NODE] = found[shard][at - at % size :][:size]
            found[shard + PEERS] = found[shard][at % size :: size]
    return found


def along(mesh: MeshSpec, axis: str, rank: int) -> list[int]:
    """The ranks that differ from one at most in their index along an axis, in its order."""
    names = [name for name, _ in mesh.axes]
    stride = math.prod(size for _, size in mesh.axes[names.index(axis) + 1 :])
    first = rank - stride * mesh.coordinates(rank)[axis]
    return [first + stride * index for index in range(mesh.size(axis))]


@contextlib.contextmanager
def phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """Say on stderr what is being done, and how long it took."""
    started = time.perf_counter()
    print(f"{name} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        seconds[name] = round(time.perf_counter() - started, 2)
        print(f" {seconds[name]:.1f} s", file=sys.stderr, flush=True)


def run(args: argparse.Namespace, plan: Plan, seconds: dict[str, float]) -> dict[str, Any]:
    """Trace, and audit or lower; the files are written, and what is in summary.json is returned."""
    members = ranks_by_axis(plan, args.rank)
    summary = {
        "model": args.model or str(args.plan),
        "torch": torch.__version__,
        "plan": plan.digest,
        "mesh": dict(plan.mesh.axes),
        "rank": args.rank,
        "kind": args.kind or ("masked" if members else "all"),
        "parameters": len(plan.specs),
        "waves": len(plan.waves),
        "seconds": seconds,
    }
    write(args.out, {"plan.txt": plan.describe()})
    found = audited(args, plan, members, seconds) if args.audit_only else lowered(args, plan, members, seconds)
    write(args.out, {"summary.json": json.dumps(summary | found, indent=1)})
    return summary | found


def clear(folder: Path) -> None:
    """An empty place for the files: those of another run would pass for this one's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def write(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def trace(
    args: argparse.Namespace, plan: Plan, groups: Mapping[str, str], stack_traces: bool = False
) -> tuple[Plan, TracedStep]:
    """The rank's plan and its traced step, which is also written."""
    local, traced = trace_plan(
        plan, backend="torchair", rank=args.rank, groups=groups, kind=args.kind, stack_traces=stack_traces
    )
    write(args.out, {"graph.py": traced.graph.print_readable(print_output=False)})
    return local, traced


def audited(
    args: argparse.Namespace, plan: Plan, members: Mapping[str, Sequence[int]], seconds: dict[str, float]
) -> dict[str, Any]:
    """What needs no TorchAir: the functional graph, and what of it TorchAir cannot lower."""
    # A group is no more than its name to a graph that does not run; the lines that emitted each node come for nothing.
    with phase("trace", seconds):
        local, traced = trace(args, plan, {axis: axis for axis in members}, stack_traces=True)
    with phase("functionalize", seconds):
        graph = functional_graph(cut_inputs(traced)[0])
    with phase("audit", seconds):
        found = [str(finding) for finding in audit(graph)]
    calls = Counter(str(node.target) for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return {
        "faults": found,
        "traced_operators": dict(calls.most_common()),
        "collectives": [
            {"kind": spec.kind, "axis": spec.axis, "bytes": spec.bytes_per_rank} for spec in local.collectives
        ],
    }


def lowered(
    args: argparse.Namespace, plan: Plan, members: Mapping[str, Sequence[int]], seconds: dict[str, float]
) -> dict[str, Any]:
    """TorchAir's graph, counted; it is written before it is held against the plan's promises."""
    version = args.torch_npu or VERSION
    with phase("load TorchAir", seconds):
        sources = torchair_sources(version, progress=lambda line: print(f"\n{line}", file=sys.stderr, flush=True))
        try:
            stand_in.install(sources)
        except RuntimeError as error:  # torch_npu itself is here, or a package that TorchAir needs is not
            raise CompileError(str(error)) from error
        torchair = backend.load_torchair()
    config = compiler_config(torchair.CompilerConfig(), dict(args.option))
    if config.mode.value != "max-autotune":
        raise CompileError(
            f"--option mode: expected max-autotune, got {config.mode.value}: it records the kernels of a run, which "
            "takes a device, and makes no GE graph."
        )
    with fake_groups(members, plan.mesh.num_ranks, args.rank) as groups:
        with phase("trace", seconds):
            local, traced = trace(args, plan, groups)
        with phase("lower", seconds):
            traced, _ = cut_inputs(traced)
            try:
                concrete = backend._lower(torchair, traced, config).runner
            except CompileError:
                raise
            except Exception as error:
                raise CompileError(backend._failure(error)) from error
    with phase("dump", seconds):
        write(args.out, backend._dumps(concrete))
        graph = parse(concrete.graph.SerializeToString())
        write(args.out, {"ge_operators.txt": graph.table()})
    faults = []
    with phase("check", seconds):
        try:
            backend._checked(concrete, traced, local.collectives)
        except CompileError as error:
            faults.append(str(error))
        report = ge_report(graph, concrete, local, traced.spec)
    return {"torch_npu": version, "options": dict(args.option), "faults": faults} | report


@contextlib.contextmanager
def fake_groups(members: Mapping[str, Sequence[int]], world: int, rank: int) -> Iterator[dict[str, str]]:
    """Names of process groups of these ranks, by axis. They send nothing: of the other ranks there is none."""
    if not members:
        yield {}
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield {axis: dist.new_group(list(ranks)).group_name for axis, ranks in members.items()}
    finally:
        dist.destroy_process_group()


def option(text: str) -> tuple[str, object]:
    """``name=value``; the value a Python literal, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", metavar="WHAT", help="a public model's name, or module:function, as muon-compile takes it"
    )
    what.add_argument(
        "--plan", type=Path, metavar="PATH", help="a plan from muon-compile plan --save, or Plan.to_json()"
    )
    made.add_argument(
        "--mesh", type=mesh, metavar="RxS", help="S ranks that shard, or R replicas of S (default: one rank)"
    )
    made.add_argument("--strategy", metavar="NAME", help="for all matrices (default: auto)")
    made.add_argument("--ns", metavar="FORM", help="form of the iteration (default: auto)")
    made.add_argument("--hardware", metavar="NAME", help="a preset, or a .toml or .json file (default: ascend-910c)")
    made.add_argument("--rank", type=int, default=0, metavar="N", help="whose graph (default: 0)")
    text = "all gradients there, or a mask that says which (default: what a step with all of them runs)"
    made.add_argument("--kind", choices=("all", "masked"), help=text)
    made.add_argument(
        "--torch-npu", choices=tuple(VERSIONS), metavar="VERSION", help=f"whose TorchAir (default: {VERSION})"
    )
    text = "an entry of CompileConfig.torchair_options; may be repeated"
    made.add_argument("--option", type=option, action="append", default=[], metavar="NAME=VALUE", help=text)
    made.add_argument("--audit-only", action="store_true", help="do what needs no download")
    made.add_argument(
        "--out", type=Path, default=Path("out/npu"), metavar="DIR", help="for the files (default: out/npu)"
    )
    made.add_argument("--json", action="store_true", help="print summary.json instead of tables")
    return made


def main() -> int:
    """Returns 0, 1 where something cannot be lowered or the graph breaks a promise, 2 for bad arguments."""
    arguments = parser()
    args = arguments.parse_args()
    # TorchAir asks torch for the device of a group in a way of old; of a fake group torch says that there are several.
    for message in (".*_get_pg_default_device", "Multiple backends are registered"):
        warnings.filterwarnings("ignore", message=message)
    seconds: dict[str, float] = {}
    try:
        with phase("plan", seconds):
            plan = wished_plan(args)
        clear(args.out)
    except (ValueError, NotImplementedError, ModuleNotFoundError, OSError) as error:
        arguments.error(str(error))
    try:
        name_fake_device()
        summary = run(args, plan, seconds)
    except FetchError as error:
        print(f"lower_npu: {error}\nWithout TorchAir, --audit-only says what it could not lower.", file=sys.stderr)
        return 1
    except CompileError as error:
        print(f"lower_npu: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        print_report(summary, [args.out / name for name in FILES])
    return 1 if summary["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
