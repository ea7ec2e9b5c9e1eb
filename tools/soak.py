"""A thousand sharded steps on 4 gloo ranks, and what must hold all along.

    python tools/soak.py --steps 1000
    python tools/soak.py --steps 1000 --mesh hsdp --strategy auto gather_broadcast all_to_all
    python tools/soak.py --steps 200 --backend inductor --minutes 5

Uneven shapes: empty shards, one row, experts that do not divide, a replicated matrix. Gradients are random and
missing at random, the same ones on all ranks; the learning rate follows a schedule with restarts. Every ``--every``
steps and at the end: copies on several ranks are equal bit for bit, everything is finite and has moved, live tensors
take as many bytes as at the first look, and nothing was recompiled. A rank that makes no progress for ``--hang``
seconds is shown with its stack, and all are ended.

fsdp  4 shards
hsdp  2 replicas of 2 shards

Exit status: 0 all steps were made and all held; 1 something did not hold; 2 out of time; 3 a rank died or hung.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _soak_rank import MESHES, WORLD, Look, Run, rank_main

# Read when torch is imported; gloo on the loopback device works whatever the machine's name resolves to.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
OUTCOMES = {0: "held", 1: "FAILED", 2: "out of time", 3: "died or hung"}


def watch(run: Run, hang_s: float, progress: Any) -> tuple[str, list[list[Look]]]:
    """Start the ranks and follow them to the end; what became of them in a few words (empty: well), and their looks."""
    import torch.multiprocessing

    os.environ.update(ENVIRONMENT)
    context = torch.multiprocessing.get_context("spawn")
    task = progress.add_task(f"{run.mesh}, {run.strategy}", total=run.steps)
    looks: list[list[Look]] = [[] for _ in range(WORLD)]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        processes, pipes = [], {}
        for rank in range(WORLD):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=rank_main, args=(rank, folder, run, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        try:
            verdict = _follow(pipes, looks, hang_s, lambda n: progress.update(task, completed=n))
            if verdict == "died":
                processes[0].join(1.0)  # the others hear of it at once, and end as well
                codes = {rank: process.exitcode for rank, process in enumerate(processes)}
                verdict = f"a rank died; exit codes by rank: {codes}"
            if verdict == "hung":
                for rank in pipes.values():
                    os.kill(processes[rank].pid, signal.SIGUSR1)
                time.sleep(1.0)
                stacks = (Path(folder, f"stack-{rank}.txt").read_text(encoding="utf-8") for rank in pipes.values())
                told = "\n".join(f"--- rank {r}\n{s}" for r, s in zip(pipes.values(), stacks, strict=True))
                verdict = f"no progress for {hang_s:g} s\n{told}"
        finally:
            for process in processes:
                process.kill()
                process.join()
    return verdict, looks


def _follow(pipes: dict[Any, int], looks: list[list[Look]], hang_s: float, made: Any) -> str:
    """Read what ranks send until all are done; those that are done leave ``pipes``."""
    while pipes:
        ready = wait(list(pipes), hang_s)
        if not ready:
            return "hung"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                said = pipe.recv()
            except EOFError:
                return "died"
            if said is None:
                del pipes[pipe]
            elif isinstance(said, Look):
                looks[rank].append(said)
            elif rank == 0:
                made(said)
    return ""


def judge(run: Run, verdict: str, looks: Sequence[Sequence[Look]]) -> tuple[int, str]:
    """Exit status and a line for people."""
    problems = [f"rank {r}, step {x.steps}: {p}" for r, found in enumerate(looks) for x in found for p in x.problems]
    made = min((found[-1].steps for found in looks if found), default=0)
    if problems:
        return 1, "; ".join(problems)
    if verdict:
        return 3, f"after step {made} or later: {verdict}"
    if made < run.steps:
        return 2, f"out of time after {made} of {run.steps} steps; all held until then"
    return 0, "held"


def print_results(results: Sequence[dict[str, Any]]) -> None:
    """A table of all runs."""
    from rich.console import Console
    from rich.table import Table

    title = f"{WORLD} gloo ranks, one thread each; live and resident memory of the worst rank"
    table = Table(
        "mesh",
        "strategy",
        "steps",
        "looks",
        "live KiB",
        "RSS growth KiB",
        "compiles",
        "recompiles",
        "s",
        "",
        title=title,
    )
    for result in results:
        ends = [(found[0], found[-1]) for found in result["looks"] if found]
        live = max((last["live_bytes"] for _, last in ends), default=0)
        growth = max((last["rss"] - first["rss"] for first, last in ends), default=0)
        table.add_row(
            result["mesh"],
            result["strategy"],
            str(min((last["steps"] for _, last in ends), default=0)),
            str(min(len(found) for found in result["looks"])),
            f"{live / 1024:.0f}",
            f"{growth / 1024:.0f}",
            *(str(max((last[key] for _, last in ends), default=0)) for key in ("compiles", "recompiles")),
            f"{result['seconds']:.0f}",
            OUTCOMES[result["status"]],
        )
    Console(width=140).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    assert __doc__ is not None
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=1000, help="per mesh and strategy (default: 1000)")
    parser.add_argument("--every", type=int, default=100, metavar="STEPS", help="between looks (default: 100)")
    parser.add_argument("--mesh", nargs="+", choices=sorted(MESHES), default=["fsdp", "hsdp"])
    parser.add_argument("--strategy", nargs="+", default=["auto"], metavar="NAME")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="aot_eager")
    parser.add_argument("--minutes", type=float, default=15.0, help="for everything (default: 15)")
    parser.add_argument("--hang", type=float, default=120.0, metavar="SECONDS", help="without progress (default: 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all looks there")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.every < 1:
        parser.error(f"--steps and --every: expected 1 or more, got {args.steps} and {args.every}")
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    deadline = time.time() + 60 * args.minutes
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    results, status = [], 0
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        for mesh in args.mesh:
            for strategy in args.strategy:
                begun = time.time()
                facts = {"mesh": mesh, "strategy": strategy, "backend": args.backend, "steps": args.steps}
                run = Run(every=args.every, seed=args.seed, deadline=deadline, **facts)
                verdict, looks = watch(run, args.hang, progress)
                code, says = judge(run, verdict, looks)
                status = max(status, code)
                print(f"{mesh}, {strategy}: {says}", file=sys.stderr)
                seen = [[asdict(look) for look in found] for found in looks]
                results.append(facts | {"status": code, "says": says, "seconds": time.time() - begun, "looks": seen})
    print_results(results)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"world": WORLD, "runs": results}, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
