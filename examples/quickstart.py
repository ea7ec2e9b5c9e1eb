"""Train a small byte-level transformer twice, with the compiled Muon step and with torch's own, and compare.

Same seed, same data, same hyperparameters. Prints the plan, the losses, the statistics of the compiled step
and both step times; saves a picture of both loss curves and a dump of what was compiled. Run it as

    python examples/quickstart.py
    python examples/quickstart.py --help
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from _model import ByteTransformer, loss_of
from _report import Curves, progress, save_picture
from _textdata import Text, random_windows, standard_library_text
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import muon_compile as mc

MODEL = {"dim": 128, "num_layers": 4, "num_heads": 4, "context": 128}
BATCH_SIZE = 8
MAX_GRAD_NORM = 1.0
WARM_UP_FRACTION = 0.1
FINAL_LR_FRACTION = 0.05
NUM_EVALUATIONS = 6
NUM_VALIDATION_WINDOWS = 64

# One set of hyperparameters for both runs.
MUON = {"lr": 2e-2, "momentum": 0.95, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.01, "eps": 1e-8}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model with what trains it; `optimizers` are stepped in order."""

    label: str
    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]


def new_model(seed: int) -> ByteTransformer:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return ByteTransformer(**MODEL)


def compiled_training(seed: int, backend: str) -> Training:
    """All that changes in a script: `route` sorts the parameters, `mc.Muon` steps them in one graph."""
    model = new_model(seed)
    optimizer = mc.Muon(
        mc.route(model),
        **MUON,
        config=mc.MuonConfig(preset="torch"),
        adamw_lr=ADAMW["lr"],
        betas=ADAMW["betas"],
        adamw_weight_decay=ADAMW["weight_decay"],
        adamw_config=mc.AdamWConfig(eps=ADAMW["eps"]),
        backend=backend,
    )
    return Training(label="compiled", model=model, optimizers=(optimizer,))


def eager_training(seed: int) -> Training:
    """The same with the optimizers that come with torch."""
    model = new_model(seed)
    hidden, rest = mc.route(model, verbose=False)
    muon = torch.optim.Muon(hidden["params"], **MUON)
    adamw = torch.optim.AdamW(rest["params"], **ADAMW)
    return Training(label="eager", model=model, optimizers=(muon, adamw))


def train(training: Training, text: Text, *, num_steps: int, seed: int) -> Curves:
    """Train with warm-up, cosine decay and gradient clipping; evaluate now and then on the held-out files."""
    model, optimizers = training.model, training.optimizers
    schedulers = [LambdaLR(optimizer, lambda step: lr_factor(step, num_steps)) for optimizer in optimizers]
    batches = torch.Generator().manual_seed(seed)
    interval = max(1, num_steps // NUM_EVALUATIONS)
    curves = Curves(train=[], validation=[], validation_steps=[])
    with progress(training.label, num_steps) as report:
        for step in range(1, num_steps + 1):
            inputs, targets = random_windows(text.train, num=BATCH_SIZE, length=MODEL["context"], generator=batches)
            loss = loss_of(model, inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            curves.train.append(loss.item())
            if step % interval == 0 or step == num_steps:
                curves.validation.append(validation_loss(model, text))
                curves.validation_steps.append(step)
            report(step, curves.train[-1])
    return curves


def lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine down to `FINAL_LR_FRACTION`."""
    num_warm_up = max(1, round(WARM_UP_FRACTION * num_steps))
    if step < num_warm_up:
        return (step + 1) / num_warm_up
    done = (step - num_warm_up) / max(1, num_steps - num_warm_up)
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def validation_loss(model: nn.Module, text: Text) -> float:
    """Loss on one fixed set of windows of the held-out files."""
    windows = random_windows(
        text.validation,
        num=NUM_VALIDATION_WINDOWS,
        length=MODEL["context"],
        generator=torch.Generator().manual_seed(0),
    )
    return loss_of(model, *windows).item()


def step_times_ms(
    first: Training, second: Training, gradients: list[Tensor], *, num_rounds: int = 40, num_warm_up: int = 5
) -> tuple[list[float], list[float]]:
    """Time both optimizers' steps in turn on the same gradients, so that a busy machine slows both alike.

    Steps both models, so it comes last. Who goes first alternates from round to round.
    """
    sides = (first, second)
    times: tuple[list[float], list[float]] = ([], [])
    for side in sides:
        for parameter, gradient in zip(side.model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
    for round_ in range(num_warm_up + num_rounds):
        for index in (0, 1) if round_ % 2 == 0 else (1, 0):
            start = time.perf_counter()
            for optimizer in sides[index].optimizers:
                optimizer.step()
            if round_ >= num_warm_up:
                times[index].append(1e3 * (time.perf_counter() - start))
    return times


def gradients_of(model: nn.Module, text: Text, seed: int) -> list[Tensor]:
    """The gradients of one batch, in the order of `model.parameters()`."""
    batch = random_windows(
        text.train, num=BATCH_SIZE, length=MODEL["context"], generator=torch.Generator().manual_seed(seed)
    )
    return list(torch.autograd.grad(loss_of(model, *batch), list(model.parameters())))


def heading(words: str) -> None:
    print(f"\n== {words}", flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Everything in the order it is printed; compiled goes first, so a missing compiler shows at once."""
    start = time.perf_counter()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    text = standard_library_text()

    heading("Text and parameters")
    print(text.describe())
    compiled = compiled_training(arguments.seed, arguments.backend)
    print(f"{sum(p.numel() for p in compiled.model.parameters()) / 1e6:.2f} M parameters")

    heading("Plan")
    step = compiled.optimizers[0].compiled
    print(step.plan.describe())

    heading(f"Training, {arguments.steps} steps each, seed {arguments.seed}, backend {arguments.backend}")
    print("  The first compiled step compiles, which takes a while.", flush=True)
    compiled_curves = train(compiled, text, num_steps=arguments.steps, seed=arguments.seed)
    eager = eager_training(arguments.seed)
    eager_curves = train(eager, text, num_steps=arguments.steps, seed=arguments.seed)

    heading("Loss, in nats per byte")
    for side, curves in ((eager, eager_curves), (compiled, compiled_curves)):
        print(
            f"{side.label:<8}  training (mean of last 20 steps) {statistics.fmean(curves.train[-20:]):.4f}"
            f"  held-out files {curves.validation[-1]:.4f}"
        )

    heading("Optimizer step alone, in turn on the same gradients")
    times = step_times_ms(eager, compiled, gradients_of(eager.model, text, arguments.seed))
    medians = [statistics.median(side) for side in times]
    for side, median, measured in zip((eager, compiled), medians, times, strict=True):
        print(f"{side.label:<8}  median {median:7.2f} ms  (fastest {min(measured):.2f}, {len(measured)} steps)")
    print(f"eager / compiled = {medians[0] / medians[1]:.2f}")

    heading("Statistics of the compiled step")
    for name, value in step.stats.as_dict().items():
        print(f"{name:<16}  {value}")

    heading("Files")
    picture = out / "quickstart.png"
    save_picture(picture, eager_curves, compiled_curves)
    print(f"{picture}: both loss curves")
    for path in step.dump(out / "quickstart-dump"):
        print(path)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=_positive, default=300, help="training steps of each run (default: 300)")
    parser.add_argument(
        "--backend",
        choices=("inductor", "aot_eager"),
        default="inductor",
        help="what compiles the step; aot_eager needs no C++ compiler (default: inductor)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the files (default: out)")
    parser.add_argument(
        "--threads",
        type=_positive,
        default=min(2, os.cpu_count() or 1),
        help="CPU threads; another number may change the last digits of the losses (default: %(default)s)",
    )
    return parser.parse_args()


def _positive(words: str) -> int:
    number = int(words)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {words}")
    return number


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    try:
        run(arguments)
    except mc.CompileError as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
