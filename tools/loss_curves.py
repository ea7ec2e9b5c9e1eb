"""The same training on one rank, under FSDP, HSDP and whole copies: loss curves in one picture, and where they part.

    python tools/loss_curves.py                 200 steps of the configuration tiny, docs/pictures/loss-layouts.png
    python tools/loss_curves.py --steps 20 --out out/loss-curves

Every run of `examples/train_moe.py` sees the same batches. Sums of other orders differ by a rounding, and a token whose
second and third expert score alike then goes to the other one: from there on losses part, slowly.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).parents[1]
LAYOUTS = {"1": "one rank", "4": "FSDP 4", "2x2": "HSDP 2 x 2", "4x1": "4 copies"}


def train(mesh: str, arguments: argparse.Namespace) -> list[float]:
    """Losses of a run."""
    out = arguments.out / mesh
    ranks = size_of(mesh)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    options = ["--config", arguments.config, "--steps", str(arguments.steps), "--ns-dtype", "float32", "--fresh"]
    options += ["--mesh", mesh, "--backend", arguments.backend, "--out", str(out), "--checkpoint-every", "1000000"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launcher, str(ROOT / "examples" / "train_moe.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{mesh}: ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    with (out / "metrics.csv").open(encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def size_of(mesh: str) -> int:
    """Ranks of a mesh."""
    size = 1
    for part in mesh.split("x"):
        size *= int(part)
    return size


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Losses above, and below how far each layout is from one rank."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(8, 6), layout="constrained")
    above, below = canvas.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = range(1, len(losses["1"]) + 1)
    for index, (mesh, values) in enumerate(losses.items()):
        above.plot(steps, values, "-" if mesh == "1" else "--", color=f"C{index}", linewidth=1.4, label=LAYOUTS[mesh])
        if mesh != "1":
            apart = [max(abs(a - b), 1e-8) for a, b in zip(values, losses["1"], strict=True)]
            below.plot(steps, apart, color=f"C{index}", linewidth=1.2, label=LAYOUTS[mesh])
    above.set_ylabel("loss")
    below.set_ylabel("apart from one rank")
    below.set_yscale("log")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    """Train on every layout, print where losses part, and draw."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny", help="sizes (default: tiny)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="aot_eager")
    parser.add_argument("--out", type=Path, default=Path("out/loss-curves"), help="folder of the runs")
    parser.add_argument("--png", type=Path, default=Path("docs/pictures/loss-layouts.png"))
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps: expected a positive number, got {arguments.steps}")
    losses: dict[str, list[float]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("layouts", total=len(LAYOUTS))
        for mesh in LAYOUTS:
            losses[mesh] = train(mesh, arguments)
            progress.advance(task)
    table = Table("layout", "first loss", "last loss", "apart at most", "first apart by 1e-3")
    for mesh, values in losses.items():
        apart = [abs(a - b) for a, b in zip(values, losses["1"], strict=True)]
        parted = next((step for step, value in enumerate(apart, 1) if value > 1e-3), None)
        row = (
            f"{values[0]:.4f}",
            f"{values[-1]:.4f}",
            f"{max(apart):.1e}",
            "never" if parted is None else f"step {parted}",
        )
        table.add_row(LAYOUTS[mesh], *row)
    Console().print(table)
    draw(losses, arguments.png)
    print(arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
