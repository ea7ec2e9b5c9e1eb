"""Before and after, end to end: the same training with naive Muon, AdamW and this library's step under each strategy.

    python tools/e2e_table.py --config small --mesh 2x2 --json out/e2e.json
    python tools/e2e_table.py --predict

Runs `examples/train_moe.py` once per row, one after the other: same seed, same batches, same model. Figures are medians
of the second half of a run's steps. "step CPU s" is CPU time of the optimizer's step, summed over ranks, which is what
ranks that share cores can be compared by. Then what the planner predicts for the configuration `100b` on 512 dies,
change by change; nothing in it is measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))

from field_ratios import EAGER_EXCHANGE_OPS, all_gathered, device_seconds, eager_host_seconds, step
from moe.decoder import MoeConfig, MoeDecoder, names
from moe.optimizers import groups_of

import muon_compile as mc
from muon_compile.plan.planner import default_layout
from muon_compile.plan.step_cost import StepCost

ROOT = Path(__file__).parents[1]
NAIVE, ADAMW = "naive", "adamw"
STRATEGIES = ("auto", "all_gather", "all_to_all", "gather_broadcast", "gather_scatter")
FIGURES = (
    "loss",
    "seconds",
    "optimizer_seconds",
    "optimizer_cpu_seconds",
    "tokens_per_second",
    "mfu",
    "memory_mb",
)
MACHINE, REPLICAS, SHARDS = "ascend-910c", 8, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run: its optimizer, or the strategy of this library's, and medians of the second half of its steps."""

    name: str
    figures: dict[str, float]
    sent_bytes: int | None


# -- measured ----------------------------------------------------------------------------------------------------------


def measure(name: str, arguments: argparse.Namespace) -> Measured:
    """Train with one optimizer.

    Raises:
        RuntimeError: The run failed; has the end of what it said.
    """
    how = ["--optimizer", name] if name in (NAIVE, ADAMW) else ["--optimizer", "muon", "--strategy", name]
    how += ["--config", arguments.config, "--mesh", arguments.mesh, "--steps", str(arguments.steps), "--fresh"]
    how += ["--backend", arguments.backend, "--checkpoint-every", str(arguments.steps)]
    ranks = 1
    for part in arguments.mesh.split("x"):
        ranks *= int(part)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory(prefix="e2e-") as folder:
        command = [sys.executable, *launch, str(ROOT / "examples" / "train_moe.py"), *how, "--out", folder]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise RuntimeError(f"{name}: the run ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        with (Path(folder) / "metrics.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    late = rows[len(rows) // 2 :]
    figures = {figure: statistics.median(float(row[figure]) for row in late) for figure in FIGURES}
    figures["loss"] = float(rows[-1]["loss"])
    sent = [line for line in done.stdout.splitlines() if line.startswith("sent ")]
    return Measured(name=name, figures=figures, sent_bytes=int(sent[0].split()[1]) if sent else None)


def measured_table(runs: Sequence[Measured], title: str) -> Table:
    """Side by side, naive Muon first."""
    by_name = {run.name: run.figures for run in runs}
    table = Table(title=title, box=SIMPLE_HEAD)
    for head in ("optimizer", "step CPU s", "naive / it", "step ms", "share", "iteration ms", "tokens/s", "MFU", "MB"):
        table.add_column(head, justify="left" if head == "optimizer" else "right")
    for head in ("sent MB", "loss"):
        table.add_column(head, justify="right")
    for run in runs:
        f = run.figures
        ratio = by_name[NAIVE]["optimizer_cpu_seconds"] / f["optimizer_cpu_seconds"] if NAIVE in by_name else None
        table.add_row(
            run.name if run.name in (NAIVE, ADAMW) else f"muon, {run.name}",
            f"{f['optimizer_cpu_seconds']:.3f}",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{1e3 * f['optimizer_seconds']:.0f}",
            f"{f['optimizer_seconds'] / f['seconds']:.0%}",
            f"{1e3 * f['seconds']:.0f}",
            f"{f['tokens_per_second']:.0f}",
            f"{f['mfu']:.1%}",
            f"{f['memory_mb']:.0f}",
            "-" if run.sent_bytes is None else f"{run.sent_bytes / 1e6:.1f}",
            f"{f['loss']:.3f}",
        )
    return table


# -- predicted ---------------------------------------------------------------------------------------------------------


def specs_of(name: str, machine: mc.Hardware) -> list[mc.MatrixSpec]:
    """The configuration's parameters under HSDP, in float32 as fully_shard keeps them."""
    import torch

    with torch.device("meta"):
        model = MoeDecoder(MoeConfig.named(name))
    mesh = mc.MeshSpec(axes=(("replica", REPLICAS), ("shard", SHARDS)))
    found = []
    for index, group in enumerate(groups_of(model)):
        for param_name, param in group["params"]:
            like = {"shape": tuple(param.shape), "device": machine.device, "group": index}
            spec = mc.MatrixSpec(name=param_name, algorithm=group["algorithm"], **like)
            found.append(replace(spec, layout=default_layout(spec, mesh)))
    return found


def predictions(name: str) -> list[dict[str, Any]]:
    """Milliseconds by component, change by change, on the rank with the most to do."""
    machine = mc.Hardware.preset(MACHINE)
    specs = specs_of(name, machine)
    stacks = [spec for spec in specs if len(spec.shape) == 3]
    rest = [spec for spec in specs if len(spec.shape) != 3]
    host = eager_host_seconds(specs, machine, EAGER_EXCHANGE_OPS)

    def row(what: str, costs: Sequence[StepCost], eager: float | None) -> dict[str, Any]:
        device = sum(device_seconds(cost, machine) for cost in costs)
        launch = sum(cost.solve.host_seconds + cost.passes.host_seconds for cost in costs)
        seconds = device + launch if eager is None else max(device, eager)
        products = sum(cost.solve.gemm_seconds for cost in costs)
        network = sum(cost.network_seconds for cost in costs)
        return {
            "what": what,
            "ms": 1e3 * seconds,
            "products": 1e3 * products,
            "network": 1e3 * network,
            "host": 1e3 * (launch if eager is None else eager),
        }

    def one(strategy: str, replicas: str = "divide") -> tuple[StepCost]:
        return (step(specs, machine, strategy, replicas=replicas),)

    everywhere = step(rest, machine, "all_gather", replicas="repeat"), all_gathered(stacks, SHARDS, machine)
    return [
        row("naive: all on every rank, one by one", everywhere, host),
        row("experts stay on their ranks", one("all_gather", "repeat"), host),
        row("owners, results broadcast", one("gather_broadcast", "repeat"), host),
        row("replicas divide the matrices", one("gather_broadcast"), host),
        row("one static graph", one("gather_broadcast"), None),
        row("the planner's choice", one("auto"), None),
    ]


def predicted_table(rows: Sequence[dict[str, Any]], name: str) -> Table:
    """Each row has what the rows before it have."""
    title = f"predicted: {name}, HSDP {REPLICAS} x {SHARDS} of {MACHINE}"
    table = Table(title=title, box=SIMPLE_HEAD)
    for head in ("", "step ms", "before / it", "products", "network", "host"):
        table.add_column(head, justify="right" if head else "left")
    for row in rows:
        figures = [f"{row[key]:.0f}" for key in ("products", "network", "host")]
        table.add_row(row["what"], f"{row['ms']:.0f}", f"{rows[0]['ms'] / row['ms']:.1f}", *figures)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, predict, print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=names(), default="small")
    parser.add_argument("--mesh", default="2x2", help="ranks, or replicas x shards (default: 2x2)")
    parser.add_argument("--steps", type=int, default=12, help="per run (default: 12)")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="NAME")
    parser.add_argument("--predict", action="store_true", help="only predict")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures there")
    arguments = parser.parse_args(argv)
    if arguments.steps < 2:
        parser.error(f"--steps: expected 2 or more, got {arguments.steps}")
    console, runs = Console(width=None if sys.stdout.isatty() else 130), []
    if not arguments.predict:
        rows = (NAIVE, ADAMW, *arguments.strategies)
        for name in track(rows, description="runs", console=Console(stderr=True)):
            runs.append(measure(name, arguments))
        console.print(measured_table(runs, f"{arguments.config}, {arguments.mesh}, {arguments.steps} steps each"))
    predicted = predictions("100b")
    console.print(predicted_table(predicted, "100b"))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        kept = [{"name": run.name, "sent_bytes": run.sent_bytes, **run.figures} for run in runs]
        facts = {"config": arguments.config, "mesh": arguments.mesh, "steps": arguments.steps}
        arguments.json.write_text(json.dumps({**facts, "runs": kept, "predicted": predicted}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
