"""Train a small transformer with probes on, and watch what its optimizer does.

The compiled step leaves a few figures per bucket of parameters on the device; this reads them after every step. It
writes them as CSV, for TensorBoard where that is installed, and as a picture. Run it as

    python examples/watch_training.py
    python examples/watch_training.py --help
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _model import ByteTransformer, loss_of
from _report import progress
from _textdata import random_windows, standard_library_text
from matplotlib.figure import Figure

import muon_compile as mc

MODEL = {"dim": 64, "num_layers": 2, "num_heads": 2, "context": 64}
BATCH_SIZE = 8
MUON = {"lr": 2e-2, "momentum": 0.95, "weight_decay": 0.1}
ADAMW = {"adamw_lr": 3e-3, "betas": (0.9, 0.95), "adamw_weight_decay": 0.01}
WARM_UP_STEPS = 10
COLUMNS = ("step", "bucket", "parameters", "figure", "value")
Write = Callable[[mc.Probes, float], None]


@contextmanager
def csv_writer(path: Path) -> Iterator[Write]:
    """A line per step, bucket and figure."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)

        def write(probes: mc.Probes, loss: float) -> None:
            for bucket in probes.buckets:
                for figure, value in bucket.as_dict().items():
                    writer.writerow([probes.step, bucket.name, " ".join(bucket.params), figure, value])

        yield write


@contextmanager
def tensorboard_writer(folder: Path) -> Iterator[Write | None]:
    """Scalars named ``figure/bucket``, so that TensorBoard puts a figure's buckets side by side; None without it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield None
        return
    with SummaryWriter(str(folder)) as writer:

        def write(probes: mc.Probes, loss: float) -> None:
            writer.add_scalar("loss", loss, probes.step)
            for bucket in probes.buckets:
                for figure, value in bucket.as_dict().items():
                    writer.add_scalar(f"{figure}/{bucket.name}", value, probes.step)

        yield write


def train(
    optimizer: mc.Muon, model: ByteTransformer, num_steps: int, seed: int, writers: list[Write]
) -> list[mc.Probes]:
    """Train and hand every step's figures to the writers."""
    text = standard_library_text()
    batches = torch.Generator().manual_seed(seed)
    rates = [group["lr"] for group in optimizer.param_groups]
    found = []
    with progress("watched", num_steps) as report:
        for step in range(1, num_steps + 1):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, step / WARM_UP_STEPS)
            inputs, targets = random_windows(
                text.train, num=BATCH_SIZE, length=MODEL["context"], generator=batches
            )  # fmt: skip
            loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(optimizer.compiled.probes())
            for write in writers:
                write(found[-1], loss.item())
            report(step, loss.item())
    return found


def save_picture(path: Path, found: list[mc.Probes]) -> None:
    """Weight RMS, update RMS and orthogonality error of every bucket of matrices, over steps."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    panels: Any = figure.subplots(3, 1, sharex=True)
    titles = {"weight_rms": "weight RMS", "update_rms": "update RMS", "orthogonality_error": "orthogonality error"}
    muon = [index for index, bucket in enumerate(found[0].buckets) if bucket.algorithm == "muon"]
    steps = [probes.step for probes in found]
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for index in muon:
            bucket = found[0].buckets[index]
            more = f" and {len(bucket.params) - 1} more" if len(bucket.params) > 1 else ""
            values = [getattr(probes.buckets[index], name) for probes in found]
            axes.plot(steps, values, linewidth=1.4, label=bucket.params[0] + more)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0.0)
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_title("What Muon does to the matrices of a small transformer", fontsize=11)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    panels[-1].set_xlabel("step")
    figure.align_ylabels()
    figure.savefig(path, dpi=150)


def print_last(probes: mc.Probes) -> None:
    """The last step's figures as a table."""
    print(f"\nStep {probes.step}")
    print(
        f"{'bucket':<9}{'parameters':>11}{'orthogonality':>15}{'update':>11}{'weight':>9}{'momentum':>11}{'decay':>8}"
    )
    for bucket in probes.buckets:
        values = bucket.as_dict()
        error = f"{values['orthogonality_error']:.3f}" if "orthogonality_error" in values else "-"
        print(
            f"{bucket.name:<9}{len(bucket.params):>11}{error:>15}{values['update_rms']:>11.2e}"
            f"{values['weight_rms']:>9.4f}{values['momentum_rms']:>11.2e}{values.get('decay_share', 0.0):>8.1%}"
        )


def run(arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    model = ByteTransformer(**MODEL)
    optimizer = mc.Muon(mc.route(model, verbose=False), **MUON, **ADAMW, backend=arguments.backend)
    mc.compile_step(optimizer, backend=arguments.backend, config=mc.CompileConfig(probes=True))
    table, board, picture = out / "watch_training.csv", out / "watch_training-tensorboard", out / "watch_training.png"
    print("The first step compiles, which takes a while.", flush=True)
    with csv_writer(table) as write, tensorboard_writer(board) as show:
        writers = [write] if show is None else [write, show]
        found = train(optimizer, model, arguments.steps, arguments.seed, writers)
    save_picture(picture, found)
    print_last(found[-1])
    print(f"\n{table}: every figure of every step\n{picture}: three of them over the steps")
    if show is None:
        print("Nothing for TensorBoard, which is not installed: pip install tensorboard")
    else:
        print(f"{board}: the same for TensorBoard: tensorboard --logdir {board}")
    print(f"{time.perf_counter() - started:.0f} s in all")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: 100)")
    parser.add_argument(
        "--backend",
        choices=("inductor", "aot_eager"),
        default="inductor",
        help="what compiles the step; aot_eager needs no C++ compiler (default: inductor)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the files (default: out)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="CPU threads")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.threads < 1:
        parser.error("--steps, --threads: expected positive integers")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    try:
        run(arguments)
    except mc.CompileError as error:
        print(f"\nwatch_training: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
