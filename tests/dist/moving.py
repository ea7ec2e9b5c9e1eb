"""A run that saves itself in mid-training, and one that goes on from the files, on whatever ranks there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import muon_compile as mc
from tests.dist.models import MATRICES, Job, Model, compiled, give, momenta_of, optimizer_of, params_of, sharded_model

# Uneven rows, columns, experts, vectors; the idle ones get no gradient before the save, nor soon after it.
IDLE = ("idle", "idle_vector")
SHAPES = {
    **{name: MATRICES[name] for name in ("even", "even_too", "five", "one", "wide", "cols", "experts", "vector")},
    "idle": (7, 6),
    "idle_vector": (5,),
}
SAVED_AFTER, WAKES, STEPS = 3, 6, 13
# "flat": one entry per parameter and number, which needs no equal groups; what torchtitan saves.
OPTIONS = {"flat": StateDictOptions(flatten_optimizer_state_dict=True)}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run held at the checkpoint and at its end, whole tensors by name."""

    params: dict[str, Tensor]
    momenta: dict[str, Tensor]
    last: dict[str, Tensor]
    compiles: tuple[int, int]
    strategies: dict[str, str]

    @property
    def changes(self) -> dict[str, Tensor]:
        """How far every parameter went since the checkpoint."""
        return {name: (last - self.params[name]).double() for name, last in self.last.items()}


def made(job: Job) -> tuple[Model, mc.Muon, mc.CompiledStep]:
    """Model, optimizer and step: sharded where there are ranks, plain in a process of its own."""
    model = sharded_model(job) if dist.is_initialized() else Model(job)
    optimizer = optimizer_of(model, job)
    return model, optimizer, compiled(optimizer, job)


def go(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        give(model, number, missing=IDLE if number < WAKES else ())
        optimizer.step()


def live(model: Model, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = None) -> dict[str, Any]:
    """What a distributed checkpoint holds."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def finished(model: Model, step: mc.CompiledStep, params: dict[str, Tensor], momenta: dict[str, Tensor]) -> Run:
    """The run that ends here and had these values at the checkpoint."""
    return Run(
        params=params,
        momenta=momenta,
        last=params_of(model),
        compiles=(step.stats.compiles, step.stats.recompiles),
        strategies={
            step.plan.specs[index].name: part.exchange.strategy
            for part in step.plan.parts
            if part.exchange is not None
            for index in step.plan.buckets[part.bucket].params
        },
    )


def save_and_go_on(rank: int, job: Job, way: str, folder: str) -> Run:
    """Train, save by one of the ways, and train on without a break."""
    model, optimizer, step = made(job)
    go(model, optimizer, range(SAVED_AFTER))
    params, momenta = params_of(model), momenta_of(model, optimizer)
    writing = None
    if way in ("dcp", "flat"):
        dcp.save(live(model, optimizer, OPTIONS.get(way)), checkpoint_id=folder)
    elif way == "shards":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / f"{rank}.pt")
    elif way == "async":
        # A group of its own: the writing thread's collectives must not meet the step's.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        writing = dcp.async_save(live(model, optimizer), checkpoint_id=folder, process_group=group)
    else:
        whole = {
            "model": get_model_state_dict(model, options=WHOLE),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=WHOLE),
        }
        if rank == 0:
            torch.save(whole, Path(folder) / "whole.pt")
    go(model, optimizer, range(SAVED_AFTER, STEPS))
    if writing is not None:
        writing.result()
    return finished(model, step, params, momenta)


def resume(rank: int, job: Job, way: str, folder: str, started: bool = False) -> Run:
    """Go on from the files, in a model whose values are others; ``started``: its optimizer has stepped before."""
    model, optimizer, step = made(job)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)
    if started:
        give(model, 70)
        optimizer.step()
    if way == "file":
        whole = torch.load(Path(folder) / "whole.pt", weights_only=True)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, whole["model"], options=options)
        set_optimizer_state_dict(model, optimizer, whole["optimizer"], options=options)
    elif way == "shards":
        own = torch.load(Path(folder) / f"{rank}.pt", weights_only=True)
        model.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
    else:
        into = live(model, optimizer, OPTIONS.get(way))
        dcp.load(into, checkpoint_id=folder)
        set_model_state_dict(model, into["model"])
        set_optimizer_state_dict(model, optimizer, into["optimizer"], options=OPTIONS.get(way))
    params, momenta = params_of(model), momenta_of(model, optimizer)
    go(model, optimizer, range(SAVED_AFTER, STEPS))
    return finished(model, step, params, momenta)


def furthest(run: Run, reference: Run) -> tuple[float, str]:
    """The largest relative difference of a parameter's change since the checkpoint, and whose it is."""
    found = []
    for name, expected in reference.changes.items():
        assert expected.norm() > 0, name
        found.append((float((run.changes[name] - expected).norm() / expected.norm()), name))
    return max(found)
