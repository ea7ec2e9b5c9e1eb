"""Hugging Face Accelerate: `prepare` keeps the compiled step, accumulation calls it when gradients are complete.

Run it as

    python examples/trainers/on_accelerate.py --checkpoint out/accelerate
"""

from __future__ import annotations

from pathlib import Path

import torch
from _tiny import ACCUMULATE, loader_of, loss_of, new_model, new_optimizer, new_scheduler, parse_arguments, report
from accelerate import Accelerator


def main() -> None:
    arguments = parse_arguments(__doc__)
    checkpoint: Path | None = arguments.checkpoint
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)

    model = new_model().to(accelerator.device)  # before the optimizer, which plans for where parameters are
    inner = new_optimizer(model, arguments.backend)
    model, optimizer, scheduler = accelerator.prepare(model, inner, new_scheduler(inner))

    if checkpoint is not None and checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    first = scheduler.scheduler.last_epoch
    loader = accelerator.prepare(loader_of(first, arguments.steps))

    losses: list[float] = []
    total = torch.zeros((), device=accelerator.device)
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens)
            accelerator.backward(loss)  # divides by the number of batches
            total += loss.detach() / ACCUMULATE
            optimizer.step()  # clips as well; does nothing before the last batch of a step
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses.append(total.item())
            total.zero_()

    if checkpoint is not None:
        accelerator.save_state(str(checkpoint))
    report("accelerate", losses, inner.compiled, model)


if __name__ == "__main__":
    main()
