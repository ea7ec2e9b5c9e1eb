"""Two thousand sharded steps on 4 gloo ranks with seeded faults, and what none of them may do: hang, corrupt or change.

    python tools/soak_faults.py --steps 2000
    python tools/soak_faults.py --steps 300 --kills 2 --every 20 --seed 7 --json out/faults.json

Faults: a gradient that is not finite (``nonfinite="skip"``); no gradient anywhere; a gradient that one rank lacks (all
must raise); going back to the last checkpoint; a rank that is killed in mid-step or while it saves, after which the
others must raise within the group's timeout and a new group goes on from the last checkpoint.

Steps are drawn from the seed and their number alone, so a step that is made again, after going back or in a new group,
must leave the same bits. Counted, and expected to be 0: hangs; corrupted checkpoints (they do not load, or not to the
bits that were saved); silent changes (bits that change where nothing may, or a step that ends otherwise the second
time).

Exit status: 0 all steps were made and all counts are 0; 1 some are not; 2 out of time; 3 a rank died by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _faults_rank import GROUP_TIMEOUT_S, Faults, rank_main
from _soak_rank import MESHES, WORLD, Run
from soak import ENVIRONMENT

BAD = ("hangs", "corrupted", "silent")
FAULTS = ("kill", "nan", "nothing", "one rank", "reload")
# Beyond the group's timeout, on a busy machine.
SLACK_S = 40.0
# From a process to its first step, which is compiled.
START_S = 240.0


class Tally:
    """What the ranks have told, over all groups."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.bad = dict.fromkeys(BAD, 0)
        self.problems: list[str] = []
        self.digests: dict[tuple[int, int], str] = {}
        self.furthest = 0

    def problem(self, kind: str, text: str) -> None:
        self.bad[kind] += 1
        self.problems.append(f"{kind}: {text}")

    def hear(self, rank: int, kind: str, number: int, text: str) -> None:
        """One message of a rank."""
        where = f"rank {rank}, step {number}"
        if kind in ("step", "loaded"):
            known = self.digests.setdefault((rank, number), text)
            if known != text:
                self.problem("silent" if kind == "step" else "corrupted", f"{where}: other bits than before")
            if rank == 0:
                self.events["steps" if kind == "step" else kind] += 1
        elif kind in ("silent", "corrupted"):
            self.problem(kind, f"{where}: {text}")
        elif kind not in ("last", "raised", "done"):
            self.events[kind] += 1
        self.furthest = max(self.furthest, number)


def one_group(faults: Faults, root: Path, tally: Tally, deadline: float, made: Any) -> str:
    """Start ranks and hear them out: ``"done"``, ``"killed"``, ``"late"``, ``"hung"``, or how a rank died unasked."""
    import torch.multiprocessing

    os.environ.update(ENVIRONMENT)
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        processes, pipes = [], {}
        for rank in range(WORLD):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=rank_main, args=(rank, folder, faults, str(root), theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        try:
            verdict = _hear(pipes, faults, tally, deadline, made)
            if verdict == "hung":
                waiting = sorted(pipes.values())
                for rank in waiting:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(processes[rank].pid, signal.SIGUSR1)
                time.sleep(1.0)
                told = "\n".join(Path(folder, f"stack-{r}.txt").read_text(encoding="utf-8") for r in waiting)
                tally.problem("hangs", f"ranks {waiting} after step {tally.furthest}\n{told}")
        finally:
            for process in processes:
                process.kill()
                process.join()
    return verdict


def _hear(pipes: dict[Any, int], faults: Faults, tally: Tally, deadline: float, made: Any) -> str:
    """Read what ranks send until each has ended; those that have leave ``pipes``."""
    last = 0
    unasked = ""
    stepping = False
    while pipes:
        ready = wait(list(pipes), GROUP_TIMEOUT_S + SLACK_S if stepping else START_S)
        if not ready:
            return "hung"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                kind, number, text = pipe.recv()
            except EOFError:
                kind, number, text = "gone", tally.furthest, ""
                del pipes[pipe]
            stepping = stepping or kind == "step"
            if kind == "last":
                last = number
            elif kind == "raised" and not last:
                unasked = unasked or f"rank {rank}, step {number}: {text}"
            elif kind == "raised":
                tally.events["raised beside a killed rank"] += 1
            elif kind == "gone" and not last and not unasked and (rank, faults.run.steps) not in tally.digests:
                unasked = f"rank {rank} died after step {number}"
            if kind != "gone":
                tally.hear(rank, kind, number, text)
            if kind == "step" and rank == 0:
                made(number)
        if time.time() > deadline:
            return "late"
    tally.events["kill"] += bool(last)
    return unasked or ("killed" if last else "done")


def kills_of(steps: int, every: int, count: int, seed: int) -> dict[int, tuple[int, str]]:
    """Steps at which a rank is killed, after the first checkpoint: the rank, and when."""
    draw = random.Random(f"{seed} kills")
    at = sorted(draw.sample(range(every + 1, steps), count))
    return {step: (draw.randrange(WORLD), ("step", "save")[i % 2]) for i, step in enumerate(at)}


def soak(run: Run, kills: int, root: Path, progress: Any) -> tuple[int, str, Tally]:
    """Groups one after the other until all steps are made: exit status, words, and the tally."""
    tally = Tally()
    placed = kills_of(run.steps, run.every, kills, run.seed)
    task = progress.add_task(f"{run.mesh}, {run.strategy}", total=run.steps)

    def made(number: int) -> None:
        told = ", ".join(f"{kind} {count}" for kind, count in tally.bad.items())
        progress.update(task, completed=number, description=f"{run.mesh}, {run.strategy}: {told}")

    verdict = "killed"
    while verdict == "killed" and not any(tally.bad.values()):
        faults = Faults(run=run, kills=placed, furthest=tally.furthest)
        verdict = one_group(faults, root, tally, run.deadline, made)
    if any(tally.bad.values()):
        return 1, "; ".join(tally.problems), tally
    if verdict == "late":
        return 2, f"out of time after step {tally.furthest} of {run.steps}; all held until then", tally
    if verdict != "done":
        return 3, verdict, tally
    return 0, "held", tally


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for."""
    assert __doc__ is not None
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=2000, help="default: 2000")
    parser.add_argument("--every", type=int, default=50, metavar="STEPS", help="between checkpoints (default: 50)")
    parser.add_argument("--kills", type=int, default=6, help="ranks that are killed (default: 6)")
    parser.add_argument("--mesh", choices=sorted(MESHES), default="fsdp")
    parser.add_argument("--strategy", default="auto", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the counts there")
    args = parser.parse_args(argv)
    room = args.steps - args.every - 1
    if args.every < 1 or not 0 <= args.kills <= room:
        parser.error(
            f"--every and --kills: expected 1 or more, and at most {room} kills, got {args.every}, {args.kills}"
        )
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    begun = time.time()
    facts = {"mesh": args.mesh, "strategy": args.strategy, "steps": args.steps, "every": args.every, "seed": args.seed}
    run = Run(backend="aot_eager", deadline=begun + 60 * args.minutes, **facts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    folder = tempfile.TemporaryDirectory(prefix="soak-faults-")
    with folder as root, Progress(*columns, console=Console(stderr=True)) as progress:
        status, says, tally = soak(run, args.kills, Path(root), progress)
    found = {"status": status, "says": says, **tally.bad, "events": dict(tally.events), "seconds": time.time() - begun}
    print(f"{args.mesh}, {args.strategy}, seed {args.seed}: {says}")
    print(f"  steps made, again included, and faults: {dict(sorted(tally.events.items()))}")
    print(f"  faults in all: {sum(tally.events[kind] for kind in FAULTS)}")
    print(f"  {', '.join(f'{kind}: {count}' for kind, count in tally.bad.items())}; {found['seconds']:.0f} s")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"world": WORLD, **facts, **found}, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
