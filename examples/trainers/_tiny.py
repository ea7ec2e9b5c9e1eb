"""What the trainers' examples share: one small model, the same batches in the same order, one optimizer, one report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import muon_compile as mc

NUM_TOKENS, DIM, LENGTH, BATCH_SIZE = 64, 32, 8, 8
ACCUMULATE = 2  # batches for one step
MAX_GRAD_NORM = 1.0


class TinyModel(nn.Module):
    """Tokens `[batch, time]` in, logits `[batch, time, NUM_TOKENS]` out; two hidden matrices for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, NUM_TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.lm_head(self.norm(x + self.down(F.gelu(self.up(x)))))


def new_model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel()


def new_optimizer(model: nn.Module, backend: str) -> mc.Muon:
    """The lines of every trainer: one optimizer for all parameters, one graph for its step and the clipping."""
    return mc.Muon(
        mc.route(model, verbose=False),
        lr=0.02,
        adamw_lr=3e-3,
        config=mc.MuonConfig(preset="torch"),
        backend=backend,
        compile_config=mc.CompileConfig(clip_grad_norm=MAX_GRAD_NORM),
    )


def new_scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Every token is to be followed by the next: `tokens` is `[batch, time + 1]`."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def loader_of(first_step: int, last_step: int) -> DataLoader[tuple[Tensor, ...]]:
    """The batches of steps `first_step` to `last_step - 1`, which do not depend on where a run began."""
    batches = [
        torch.randint(NUM_TOKENS, (BATCH_SIZE, 1), generator=torch.Generator().manual_seed(number))
        + torch.arange(LENGTH + 1)
        for number in range(first_step * ACCUMULATE, last_step * ACCUMULATE)
    ]
    return DataLoader(TensorDataset(torch.cat(batches) % NUM_TOKENS), batch_size=BATCH_SIZE)


def parse_arguments(doc: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="train up to this step (default: %(default)s)")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--checkpoint", type=Path, help="resume from this if it is there, and save to it at the end")
    return parser.parse_args()


def report(trainer: str, losses: Sequence[float], step: mc.CompiledStep, model: nn.Module) -> None:
    """One line of JSON; on several ranks all of them call, one prints."""
    squares = sum(parameter.detach().square().sum() for parameter in model.parameters())
    assert isinstance(squares, Tensor)
    total = squares.full_tensor() if hasattr(squares, "full_tensor") else squares
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        counted = {name: step.stats.as_dict()[name] for name in ("graphs", "compiles", "graph_breaks", "steps")}
        print(json.dumps({"trainer": trainer, "losses": list(losses), "squares": total.item(), **counted}), flush=True)
