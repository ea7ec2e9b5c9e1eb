"""A plain loop as torchtitan has it: fully_shard, accumulation, a schedule, clipping in the step, DCP checkpoints.

Run it as

    python examples/trainers/plain.py
    torchrun --standalone --nproc-per-node 2 examples/trainers/plain.py --checkpoint out/plain
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _tiny import ACCUMULATE, loader_of, loss_of, new_model, new_optimizer, new_scheduler, parse_arguments, report
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # names and not positions, as torchtitan keeps them


class Training(Stateful):
    """All that a checkpoint holds; `dcp.save` and `dcp.load` ask it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state_dict["optimizer"], options=FLAT)
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.step = state_dict["step"]


def train(training: Training, last_step: int) -> list[float]:
    """Train up to `last_step`; the losses, which are the means over all ranks."""
    model, rank, world = training.model, 0, 1
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    losses: list[float] = []
    total = torch.zeros(())
    for number, (tokens,) in enumerate(loader_of(training.step, last_step), start=1):
        is_last = number % ACCUMULATE == 0
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        loss = loss_of(model, tokens.chunk(world)[rank]) / ACCUMULATE
        loss.backward()
        total += loss.detach()
        if is_last:
            training.optimizer.step()  # clips as well
            training.scheduler.step()
            training.optimizer.zero_grad()
            training.step += 1
            if world > 1:
                dist.all_reduce(total)
            losses.append(total.item() / world)
            total.zero_()
    return losses


def main() -> None:
    arguments = parse_arguments(__doc__)
    checkpoint: Path | None = arguments.checkpoint
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    model = new_model()
    if distributed:
        for layer in (model.up, model.down):
            fully_shard(layer)
        fully_shard(model)
    optimizer = new_optimizer(model, arguments.backend)  # after sharding: it plans for the parameters it is given
    training = Training(model, optimizer, new_scheduler(optimizer))
    if checkpoint is not None and (checkpoint / ".metadata").exists():
        dcp.load({"training": training}, checkpoint_id=checkpoint)
    losses = train(training, arguments.steps)
    if checkpoint is not None:
        dcp.save({"training": training}, checkpoint_id=checkpoint)
    report("plain", losses, optimizer.compiled, model)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
