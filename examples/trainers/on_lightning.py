"""Lightning: `configure_optimizers` returns `muon_compile.Muon`; the Trainer steps it with a closure.

Run it as

    python examples/trainers/on_lightning.py --checkpoint out/lightning.ckpt
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _tiny import ACCUMULATE, loader_of, loss_of, new_model, new_optimizer, new_scheduler, parse_arguments, report
from lightning import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

import muon_compile as mc

EPOCH_STEPS = 100  # so that a run ends, and resumes, in the middle of an epoch


class ResumableLoader:
    """A loader that Lightning asks for its place; of any other, a resumed epoch gets the first batches again."""

    def __init__(self, loader: DataLoader[tuple[Tensor, ...]]) -> None:
        self.loader, self.place = loader, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        first = self.place
        for number, batch in enumerate(self.loader):
            if number >= first:
                self.place = number + 1
                yield batch
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


class TinyModule(LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.model, self.backend = new_model(), backend
        self.batch_losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch[0])
        self.batch_losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = new_optimizer(self.model, self.backend)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": new_scheduler(optimizer), "interval": "step"},
        }


def main() -> None:
    arguments = parse_arguments(__doc__)
    checkpoint: Path | None = arguments.checkpoint
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    module = TinyModule(arguments.backend)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=arguments.steps,
        accumulate_grad_batches=ACCUMULATE,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    resumed = checkpoint is not None and checkpoint.exists()
    loader = ResumableLoader(loader_of(0, max(EPOCH_STEPS, arguments.steps)))
    trainer.fit(module, loader, ckpt_path=checkpoint if resumed else None, weights_only=True)
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint)

    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, mc.Muon)
    batches = module.batch_losses
    losses = [sum(batches[i : i + ACCUMULATE]) / ACCUMULATE for i in range(0, len(batches), ACCUMULATE)]
    report("lightning", losses, optimizer.compiled, module)


if __name__ == "__main__":
    main()
