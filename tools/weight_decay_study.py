"""What weight decay does to Muon over a long training: losses, weights, activations, and what bfloat16 cannot hold.

    python tools/weight_decay_study.py                       every run that is not done yet, then the figures
    python tools/weight_decay_study.py --steps 300 --out out/study-short
    python tools/weight_decay_study.py --only figures

Trains the configuration `study` of `examples/train_moe.py` (148 thousand parameters) on far more bytes than 20 per
parameter: Muon with five decays and AdamW with two, each at the best of a few learning rates, which one seed and a
third of the steps decide; then three seeds of each. The same again with bfloat16 parameters (plain, with float32
masters, rounded at random), and on two ranks. Every run leaves a CSV, and one that has is not made again: it can be
stopped and started at any time. Hours on two cores.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_moe
from moe.decoder import MoeConfig

DECAYS, ADAMW_DECAYS = (0.0, 0.01, 0.05, 0.1, 0.3), (0.0, 0.1)
RATES = {"muon": (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04), "adamw": (0.001, 0.002, 0.004, 0.008)}
SEEDS = (0, 1, 2)
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"dtype": "bfloat16"},
    "bf16-masters": {"dtype": "bfloat16", "master_weights": True},
    "bf16-random": {"dtype": "bfloat16", "rounding": "stochastic"},
}
PRECISION_DECAY, LOOKS, SWEEP_SHARE = 0.1, 60, 3
FIELDS = ("step", "figure", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training.

    Args:
        optimizer: ``"muon"`` or ``"adamw"``.
        decay: Weight decay of all parameters.
        rate: Muon's learning rate, or AdamW's.
        seed: Of weights and batches.
        steps: How many.
        precision: One of ``PRECISIONS``.
        ranks: That shard it.
    """

    optimizer: str
    decay: float
    rate: float
    seed: int
    steps: int
    precision: str = "float32"
    ranks: int = 1

    @property
    def key(self) -> str:
        """The name of its file."""
        parts = (self.optimizer, f"decay{self.decay:g}", f"lr{self.rate:g}", f"seed{self.seed}", f"{self.steps}steps")
        return "-".join((*parts, self.precision, f"{self.ranks}rank"))


# -- one run -----------------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float()


def group_of(name: str) -> str | None:
    """Which weights are looked at together: by block and kind; None: vectors, embedding, head."""
    parts = name.split(".")
    if parts[0] != "blocks" or "norm" in name or "router" in name:
        return None
    kind = "attention" if "attention" in parts else "shared" if "shared" in parts else "feed"
    return f"block {parts[1]} {kind}"


def half_ulp(x: Tensor) -> Tensor:
    """Half the distance between the bfloat16 numbers around each value: a change of less is lost."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 9)


class Look:
    """Figures of one step: weights before it, what the step changed, and activations on the way."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.before = {name: local(p).clone() for name, p in model.named_parameters() if group_of(name)}
        self.activations: dict[str, float] = {}
        self._hooks = [
            block.register_forward_hook(lambda _, __, out, i=index: self._see(i, out[0]))
            for index, block in enumerate(model.blocks)
        ]

    def _see(self, index: int, out: Tensor) -> None:
        self.activations[f"activation RMS/block {index}"] = float(out.detach().float().square().mean().sqrt())

    def figures(self) -> dict[str, float]:
        """What there is to say after the step."""
        for hook in self._hooks:
            hook.remove()
        squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        lost, count = 0.0, 0
        for name, param in self._model.named_parameters():
            group = group_of(name)
            if group is None:
                continue
            now = local(param)
            squares[group][0] += float(now.double().square().sum())
            squares[group][1] += now.numel()
            change = (now - self.before[name]).abs()
            lost += float((change < half_ulp(self.before[name])).sum())
            count += now.numel()
        found = {f"weight RMS/{group}": (total / n) ** 0.5 for group, (total, n) in squares.items()}
        total, n = (sum(values) for values in zip(*squares.values(), strict=True))
        return found | self.activations | {"weight RMS/all": (total / n) ** 0.5, "below half a bf16 step": lost / count}


def execute(run: Run, folder: Path, backend: str) -> None:
    """Train, and write the run's file when it is done."""
    config = MoeConfig.named("study")
    rates = {"lr": run.rate, "adamw_lr": config.adamw_lr if run.optimizer == "muon" else run.rate}
    arguments = train_moe.arguments_of(
        ["--config", "study", "--optimizer", run.optimizer, "--seed", str(run.seed), "--backend", backend]
    )
    for name, value in PRECISIONS[run.precision].items():
        setattr(arguments, name, value)
    torch.set_num_threads(1)
    world = train_moe.World((run.ranks,), "cpu")
    training = train_moe.Training(arguments, world, replace(config, weight_decay=run.decay, **rates))
    scheduler = train_moe.schedule_of(training.optimizer, config.warm_up)
    every, rows, losses = max(1, run.steps // LOOKS), [], []
    for number in range(1, run.steps + 1):
        look = Look(training.model) if number % every == 0 or number == run.steps else None
        losses.append(training.step(number).loss)
        scheduler.step()
        if look is not None:
            figures = look.figures() | {"loss": statistics.fmean(losses), "held-out loss": training.validation_loss(64)}
            rows += [(number, name, value) for name, value in figures.items()]
            losses = []
    if world.rank == 0:
        partial = folder / f".{run.key}.partial"
        with partial.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(FIELDS)
            table.writerows((step, name, f"{value:.6g}") for step, name, value in rows)
        os.replace(partial, folder / f"{run.key}.csv")


# -- all of them -------------------------------------------------------------------------------------------------------


def read(run: Run, folder: Path) -> dict[str, list[tuple[int, float]]] | None:
    """Figures of a run over its steps; None where it is not done."""
    path = folder / f"{run.key}.csv"
    if not path.exists():
        return None
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["figure"]].append((int(row["step"]), float(row["value"])))
    return dict(found)


def last(run: Run, folder: Path, figure: str) -> float | None:
    found = read(run, folder)
    return None if found is None else found[figure][-1][1]


def kinds() -> list[tuple[str, float]]:
    return [*(("muon", decay) for decay in DECAYS), *(("adamw", decay) for decay in ADAMW_DECAYS)]


def sweep(steps: int) -> list[Run]:
    short = max(1, steps // SWEEP_SHARE)
    return [
        Run(optimizer=optimizer, decay=decay, rate=rate, seed=SEEDS[0], steps=short)
        for optimizer, decay in kinds()
        for rate in RATES[optimizer]
    ]


def best(optimizer: str, decay: float, steps: int, folder: Path) -> float | None:
    """The learning rate whose short run ended best on held-out files; None while some are missing."""
    runs = [run for run in sweep(steps) if (run.optimizer, run.decay) == (optimizer, decay)]
    ends = [(last(run, folder, "held-out loss"), run.rate) for run in runs]
    if any(loss is None for loss, _ in ends):
        return None
    return min((loss, rate) for loss, rate in ends if loss is not None and math.isfinite(loss))[1]


def long_runs(steps: int, folder: Path) -> Iterator[Run]:
    """Three seeds of everything, what matters most first; the rates are known by then."""
    found: list[Run] = []
    for optimizer, decay in kinds():
        rate = best(optimizer, decay, steps, folder)
        if rate is not None:
            found += [Run(optimizer=optimizer, decay=decay, rate=rate, seed=seed, steps=steps) for seed in SEEDS]
    yield from found
    chosen = [run for run in found if (run.optimizer, run.decay) == ("muon", PRECISION_DECAY)]
    narrow = [[replace(run, precision=name) for name in PRECISIONS if name != "float32"] for run in chosen]
    yield from (run for runs in narrow[:1] for run in runs)
    yield from (replace(run, ranks=2) for run in chosen[:1])
    yield from (run for runs in narrow[1:] for run in runs)


def launch(run: Run, arguments: argparse.Namespace) -> None:
    """In a process of its own: a run does not see what another one left."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)] if run.ranks > 1 else []
    words = [
        f"{run.optimizer}",
        f"{run.decay}",
        f"{run.rate}",
        f"{run.seed}",
        f"{run.steps}",
        run.precision,
        str(run.ranks),
    ]
    command = [
        sys.executable,
        *ranks,
        __file__,
        "--out",
        str(arguments.out),
        "--backend",
        arguments.backend,
        "--one",
        *words,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{run.key}: ended with status {done.returncode}:\n{done.stderr[-2000:]}")


def make(runs: Callable[[], Iterable[Run]], what: str, arguments: argparse.Namespace) -> None:
    """Make the runs that are missing, a few at a time; the first that fails ends it."""
    left = [run for run in runs() if not (arguments.out / f"{run.key}.csv").exists()]
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(arguments.jobs) as pool:
        task = progress.add_task(what, total=len(left))
        waiting = {pool.submit(launch, run, arguments): run for run in left}
        for done in as_completed(waiting):
            if done.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            done.result()
            progress.console.print(waiting[done].key)
            progress.advance(task)


def run_of(words: Sequence[str]) -> Run:
    optimizer, decay, rate, seed, steps, precision, ranks = words
    return Run(
        optimizer=optimizer,
        decay=float(decay),
        rate=float(rate),
        seed=int(seed),
        steps=int(steps),
        precision=precision,
        ranks=int(ranks),
    )


# -- figures -----------------------------------------------------------------------------------------------------------


def band(runs: Sequence[Run], folder: Path, figure: str) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, mean, least and most over the seeds that are there."""
    found = [values[figure] for run in runs if (values := read(run, folder)) is not None]
    steps = [step for step, _ in found[0]] if found else []
    columns = [[values[i][1] for values in found] for i in range(len(steps))]
    return steps, [statistics.fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def draw(steps: int, folder: Path) -> list[Path]:
    """The study's pictures, from the files that there are."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    runs = [run for run in long_runs(steps, folder) if (folder / f"{run.key}.csv").exists()]
    alone = [run for run in runs if run.ranks == 1]
    made = []
    series = [(f"Muon, decay {d:g}" if o == "muon" else f"AdamW, decay {d:g}", o, d) for o, d in kinds()]
    shades = {d: colormaps["viridis"](0.9 * i / (len(DECAYS) - 1)) for i, d in enumerate(DECAYS)}
    for name, figure in (
        ("held-out-loss", "held-out loss"),
        ("weight-rms", "weight RMS/all"),
        ("activation-rms", "activation RMS/block 2"),
        ("below-half-a-step", "below half a bf16 step"),
    ):
        canvas = Figure(figsize=(8, 5), layout="constrained")
        axes = canvas.subplots()
        for label, optimizer, decay in series:
            own = [r for r in alone if (r.optimizer, r.decay, r.precision) == (optimizer, decay, "float32")]
            at, mean, low, high = band(own, folder, figure)
            if not at:
                continue
            colour = shades[decay] if optimizer == "muon" else ("#d1495b" if decay else "#f2a65a")
            style = "-" if optimizer == "muon" else "--"
            axes.plot(at, mean, style, color=colour, linewidth=1.6, label=label)
            axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        if name == "activation-rms":
            axes.set_yscale("log")
        finish(axes, figure.replace("/all", "").replace("/block 2", ", last block"))
        made.append(save(canvas, folder / f"{name}.png"))
    canvas = Figure(figsize=(8, 7), layout="constrained")
    for axes, figure in zip(canvas.subplots(2, 1, sharex=True), ("held-out loss", "weight RMS/all"), strict=True):
        for name in PRECISIONS:
            own = [r for r in alone if (r.optimizer, r.decay, r.precision) == ("muon", PRECISION_DECAY, name)]
            at, mean, low, high = band(own, folder, figure)
            if at:
                (line,) = axes.plot(at, mean, linewidth=1.6, label=name)
                axes.fill_between(at, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        both = [r for r in runs if r.ranks == 2]
        at, mean, _, _ = band(both, folder, figure)
        if at:
            axes.plot(at, mean, ":", color="0.2", linewidth=1.6, label="float32, 2 ranks")
        finish(axes, figure.replace("/all", ""))
    made.append(save(canvas, folder / "precision.png"))
    made.append(draw_layers(alone, folder))
    return made


def draw_layers(runs: Sequence[Run], folder: Path) -> Path:
    """Weights and activations by layer, without decay and with."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(10, 7), layout="constrained")
    grid = canvas.subplots(2, 2, sharex=True, sharey="row")
    for column, decay in enumerate((0.0, PRECISION_DECAY)):
        own = [r for r in runs if (r.optimizer, r.decay, r.precision) == ("muon", decay, "float32")]
        found = [values for run in own[:1] if (values := read(run, folder)) is not None]
        for row, what in enumerate(("weight RMS", "activation RMS")):
            names = [name for values in found for name in values if name.startswith(f"{what}/block")]
            axes = grid[row][column]
            for name in names:
                at, mean, low, high = band(own, folder, name)
                (line,) = axes.plot(at, mean, linewidth=1.4, label=name.split("/")[1])
                axes.fill_between(at, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set_yscale("log")
            axes.set_title(f"Muon, decay {decay:g}")
            finish(axes, what)
    return save(canvas, folder / "layers.png")


# -- the table ---------------------------------------------------------------------------------------------------------


def summary(steps: int, folder: Path) -> Table:
    """Ends of the long runs: means, and least to most over the seeds that are there."""
    columns = ("held-out loss", "training loss", "weight RMS: a third", "end", "activation RMS, last block", "lost")
    table = Table("run", "lr", "seeds", *columns)
    kinds_of = dict.fromkeys(replace(run, seed=0) for run in long_runs(steps, folder))
    for kind in kinds_of:
        own = [replace(kind, seed=seed) for seed in SEEDS]
        found = [values for run in own if (values := read(run, folder)) is not None]
        if not found:
            continue
        name = f"{'Muon' if kind.optimizer == 'muon' else 'AdamW'}, decay {kind.decay:g}"
        name += f", {kind.precision}" if kind.precision != "float32" else ""
        name += f", {kind.ranks} ranks" if kind.ranks > 1 else ""
        third = len(found[0]["loss"]) // 3
        ends = [
            spread([values[figure][at][1] for values in found])
            for figure, at in (
                ("held-out loss", -1),
                ("loss", -1),
                ("weight RMS/all", third - 1),
                ("weight RMS/all", -1),
                ("activation RMS/block 2", -1),
                ("below half a bf16 step", -1),
            )
        ]
        table.add_row(name, f"{kind.rate:g}", str(len(found)), *ends)
    return table


def spread(values: Sequence[float]) -> str:
    """``mean (least to most)``, in three or four digits."""
    mean = f"{statistics.fmean(values):.4g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4g} to {max(values):.4g})"


def finish(axes: Any, label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2)


def save(canvas: Any, path: Path) -> Path:
    canvas.savefig(path, dpi=130)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing, then draw."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6_000, help="of the long runs (default: 6000)")
    parser.add_argument("--out", type=Path, default=Path("docs/weight-decay"), help="folder of the files")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each (default: 2)")
    parser.add_argument("--only", choices=("runs", "figures"), help="default: both")
    parser.add_argument("--one", nargs=7, metavar="WORD", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.jobs < 1:
        parser.error(f"--steps, --jobs: expected positive numbers, got {arguments.steps}, {arguments.jobs}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        execute(run_of(arguments.one), arguments.out, arguments.backend)
        return 0
    if arguments.only != "figures":
        make(lambda: sweep(arguments.steps), "sweep", arguments)
        make(lambda: long_runs(arguments.steps, arguments.out), "runs", arguments)
    if arguments.only != "runs":
        Console(width=200).print(summary(arguments.steps, arguments.out))
        for path in draw(arguments.steps, arguments.out):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
