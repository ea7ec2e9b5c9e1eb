"""Checkpoints that a crash cannot spoil: saved into a new folder, which gets its name once it is complete.

    from checkpoints import latest, load, save

    found = latest(root)
    first = load(found, model, optimizer) if found else 0
    ...
    save(root, number, model, optimizer)

Every rank calls these together; without a process group they serve one process. `python examples/checkpoints.py` shows
them at work.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

import muon_compile as mc


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def save(root: Path, number: int, model: nn.Module, optimizer: Optimizer) -> Path:
    """Write `root/step-<number>`; whatever happens meanwhile, complete checkpoints stay and load."""
    folder, partial = root / f"step-{number:08d}", root / f"partial-{number:08d}"
    if folder.exists():
        raise FileExistsError(f"{folder} is a complete checkpoint; remove it first.")
    together()
    if is_first():
        shutil.rmtree(partial, ignore_errors=True)  # what a run that was killed has left
        partial.mkdir(parents=True)
    together()
    dcp.save(state_of(model, optimizer) | {"number": number}, checkpoint_id=partial)
    if is_first():
        os.replace(partial, folder)
    together()
    return folder


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint; None where there is none."""
    return max(root.glob("step-*"), default=None)


def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Load a checkpoint and return its number; what cannot be read whole changes nothing.

    `dcp.load` writes into the tensors that it is given, and these are the live ones unless they are copied.
    """
    state = copy.deepcopy(state_of(model, optimizer)) | {"number": 0}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])  # checks before it changes anything
    set_model_state_dict(model, state["model"])
    return int(state["number"])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = mc.Muon(mc.route(model), lr=0.02, backend="aot_eager")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(1, 31):
            batch = torch.randn(16, 32)
            loss = nn.functional.mse_loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 0:
                save(root, number, model, optimizer)
                print(f"step {number}: loss {loss.item():.4f}, saved")
        found = latest(root)
        assert found is not None
        print(f"went back to step {load(found, model, optimizer)}, from {found.name}")
        print(f"compiles: {optimizer.compiled.stats.compiles}")


if __name__ == "__main__":
    main()
