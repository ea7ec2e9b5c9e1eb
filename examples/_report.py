"""What the quickstart shows while it trains and draws when it is done."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

NUM_PLAIN_LINES = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Loss in nats per byte: `train[i]` before step i, `validation` at the steps `validation_steps`."""

    train: list[float]
    validation: list[float]
    validation_steps: list[int]


@contextlib.contextmanager
def progress(label: str, num_steps: int) -> Iterator[Callable[[int, float], None]]:
    """Yield `report(step, loss)`: a bar on a terminal, a few plain lines anywhere else."""
    if not sys.stdout.isatty():
        interval = max(1, num_steps // NUM_PLAIN_LINES)

        def report(step: int, loss: float) -> None:
            if step == 1 or step % interval == 0 or step == num_steps:
                print(f"  {label:<8}  step {step:>4}/{num_steps}  loss {loss:.3f}", flush=True)

        yield report
        return
    columns = (
        TextColumn("  {task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(label, total=num_steps, loss=math.nan)
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


def save_picture(path: Path, eager: Curves, compiled: Curves) -> None:
    """Both loss curves, and below them their difference."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, gap = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    light, dark = "#f2a65a", "#1b3a5c"
    steps = range(1, len(eager.train) + 1)
    losses.plot(steps, eager.train, color=light, linewidth=4.5, label="eager torch.optim.Muon + AdamW, training")
    losses.plot(steps, compiled.train, color=dark, linewidth=1.0, label="compiled muon_compile.Muon, training")
    losses.plot(
        eager.validation_steps,
        eager.validation,
        "o",
        color=light,
        markersize=11,
        label="eager, held-out files",
    )
    losses.plot(
        compiled.validation_steps,
        compiled.validation,
        "D",
        color=dark,
        markersize=4,
        label="compiled, held-out files",
    )
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title("One training, two optimizer steps: Python's standard library, byte by byte", fontsize=11)
    losses.legend(frameon=False)
    gap.axhline(0.0, color="0.6", linewidth=0.8)
    gap.plot(steps, [c - e for c, e in zip(compiled.train, eager.train, strict=True)], color=dark, linewidth=1.0)
    gap.set_ylabel("compiled\nminus eager")
    gap.set_xlabel("step")
    for axes in (losses, gap):
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    figure.savefig(path, dpi=150)
