"""What a rank does in ``soak_faults.py``: steps, faults at seeded steps, and word of what they did."""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import math
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _soak_rank import WORLD, Run, Soaked

GROUP_TIMEOUT_S = 20.0
# Shares of all steps; the other faults are the parent's to place.
NAN, NOTHING, ONE_RANK, RELOAD = 0.03, 0.03, 0.03, 0.01
# Matrices that are exchanged: a gradient of theirs that one rank lacks concerns all.
EXCHANGED = ("even", "wide", "tall", "cols")
KEPT = 2  # complete checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A run with faults.

    Args:
        run: Mesh, strategy, seed and so on; ``every`` is between checkpoints.
        kills: At these steps a rank is killed, by step: the rank, and whether in mid-step or while it saves.
        furthest: The last step that a group before this one began; what was done up to it is not done again.
    """

    run: Run
    kills: dict[int, tuple[int, str]]
    furthest: int


class Story:
    """One rank's run: what it holds, and how it tells the parent."""

    def __init__(self, rank: int, faults: Faults, root: Path, pipe: Connection) -> None:
        import torch

        import muon_compile as mc

        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from examples import checkpoints

        self.rank, self.faults, self.root, self.pipe = rank, faults, root, pipe
        self.checkpoints = checkpoints
        self.soaked = Soaked(faults.run, mc.CompileConfig(nonfinite="skip", check="sync"))
        self.optimizer = self.soaked.optimizer
        self.model = torch.nn.Module()
        for name, param in self.soaked.params.items():
            self.model.register_parameter(name, param)
        self.furthest = faults.furthest

    def say(self, kind: str, number: int, text: str = "") -> None:
        self.pipe.send((kind, number, text))

    def digest(self) -> str:
        """Of this rank's part of parameters and state."""
        tensors = [t for name in self.soaked.params for t in self.soaked.local(name)]
        return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()

    def load(self) -> int:
        """Go back to the last checkpoint; its step, or 0 where there is none."""
        found = self.checkpoints.latest(self.root)
        if found is None:
            return 0
        number = int(found.name.removeprefix("step-"))
        try:
            told = self.checkpoints.load(found, self.model, self.optimizer)
        except BaseException as error:  # a CheckpointException is no Exception
            self.say("corrupted", number, f"{type(error).__name__}: {error}")
            raise SystemExit(1) from error
        if told != number:
            self.say("corrupted", number, f"{found.name} says that it is of step {told}")
        self.say("loaded", number, self.digest())
        return number

    def save(self, number: int) -> None:
        if (self.root / f"step-{number:08d}").exists():
            return  # from before it went back
        self.checkpoints.save(self.root, number, self.model, self.optimizer)
        if self.rank == 0:
            for old in sorted(self.root.glob("step-*"))[:-KEPT]:
                shutil.rmtree(old)
            self.say("saved", number)

    def unchanged(self, kind: str, number: int, step: Callable[[], Any]) -> None:
        """Make a step that must leave every bit as it was."""
        before = self.digest()
        step()
        if self.digest() != before:
            self.say("silent", number, f"{kind}: something changed")
        if self.rank == 0:
            self.say(kind, number)

    def one(self, number: int) -> int:
        """Step ``number``, with the fault that it has; the step that was made in the end."""
        # The same on every rank, and whenever this step is made again.
        draw = random.Random(f"{self.faults.run.seed} {number}")
        kind, victim = draw.random(), draw.randrange(WORLD)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (1.001 + math.cos(math.pi * (number % 50) / 50))
        self.soaked.give(draw)
        new, self.furthest = number > self.furthest, max(number, self.furthest)
        if new and number in self.faults.kills:
            self.die(number, *self.faults.kills[number])
        params, step = self.soaked.params, self.optimizer.step
        if new and draw.random() < RELOAD:
            if self.rank == 0:
                self.say("reload", number)
            return self.load()
        if kind < NAN:
            grad = self.soaked.grads["even"][0].clone()
            if self.rank == victim:
                getattr(grad, "_local_tensor", grad)[0, 0] = draw.choice((math.nan, math.inf, -math.inf))
            params["even"].grad = grad
            before = self.soaked.step.skipped
            self.unchanged("nan", number, step)
            if self.soaked.step.skipped != before + 1:
                self.say("silent", number, "nan: the step was not counted as skipped")
        elif kind < NAN + NOTHING:
            for param in params.values():
                param.grad = None
            self.unchanged("nothing", number, step)
        elif kind < NAN + NOTHING + ONE_RANK:
            name = draw.choice(EXCHANGED)
            params[name].grad = None if self.rank == victim else self.soaked.grads[name][0]
            self.unchanged("one rank", number, lambda: self.disagree(number))
        else:
            before = self.digest()
            step()
            if params["even"].grad is not None and self.digest() == before:
                self.say("silent", number, "a step with gradients changed nothing")
        return number

    def disagree(self, number: int) -> None:
        try:
            self.optimizer.step()
        except RuntimeError as error:
            if "Ranks disagree" not in str(error):
                raise
        else:
            self.say("silent", number, "a gradient was missing on one rank, and this one did not raise")

    def die(self, number: int, victim: int, moment: str) -> None:
        """A rank is killed; the others have to raise in time, after which this group is over."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        self.say("last", number)
        if moment == "save":
            if self.rank == victim:
                FileSystemWriter.write_data = _killed  # type: ignore[method-assign]
            self.checkpoints.save(self.root, number, self.model, self.optimizer)
        elif self.rank == victim:
            with _killer():
                self.optimizer.step()
        else:
            self.optimizer.step()
            self.checkpoints.together()  # where its own part of the step needed nothing of the dead one
        if self.rank == victim:
            _killed()
        self.say("silent", number, f"rank {victim} was killed, and this one did not raise")
        raise SystemExit(1)


def _killed(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _killer() -> Any:
    """Ends the process where it would send for the second time."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Killer(TorchDispatchMode):
        sent = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.sent += func.namespace == "_c10d_functional" and "wait_tensor" not in str(func)
            return _killed() if self.sent == 2 else func(*args, **(kwargs or {}))

    return Killer()


def rank_main(rank: int, folder: str, faults: Faults, root: str, pipe: Connection) -> None:
    """One rank: sends what it does, step by step, and how that ended."""
    stack = Path(folder, f"stack-{rank}.txt").open("w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
    number = faults.furthest
    try:
        story = Story(rank, faults, Path(root), pipe)
        number = story.load()
        while number < faults.run.steps:
            number = story.one(number + 1)
            story.say("step", number, story.digest())
            if number % faults.run.every == 0:
                story.save(number)
        dist.barrier()
        story.say("done", number)
    except BaseException as error:  # a CheckpointException is no Exception
        pipe.send(("raised", number, f"{type(error).__name__}: {error}"))
    os._exit(0)  # a group with a dead rank does not end in peace
