"""The figures of correctness, compiles, host work and memory that the README states.

python tools/figures.py parity counts memory nodes

parity   20 steps against eager torch.optim.Muon and AdamW: worst error of a step's direction, per set of matrices
counts   compiles, graphs, host calls and host operators over 50 steps in which every hyperparameter changes
memory   live tensors and resident memory between step 5 and step 200
nodes    FX nodes against the number of parameters at ten shapes
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

from _shapes import TEN_SHAPES, make_params

import muon_compile as mc

JORDAN = (3.4445, -4.7750, 2.0315)
PARITY_SETS = {
    "square": [(64, 64), (64, 64), (256, 256)],
    "wide": [(48, 256), (24, 1024)],
    "tall": [(256, 64), (384, 96), (384, 96)],
}
CONSOLE = Console(width=120)


def reference_direction(update: Tensor, eps: float = 1e-7, steps: int = 5) -> Tensor:
    """The Newton-Schulz polynomial of one matrix in float64."""
    x = update.double()
    x = x.mT if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp(min=eps)
    a, b, c = JORDAN
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if update.shape[0] > update.shape[1] else x


def error(got: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


class Directions:
    """Recovers each step's direction from the change of parameters that start every step from zero."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.params = make_params(list(shapes))

    def of_step(self, step: Callable[[], Any], grads: Sequence[Tensor], lr: float) -> list[Tensor]:
        with torch.no_grad():
            for param, grad in zip(self.params, grads, strict=True):
                param.zero_()
                param.grad = grad.clone()
        step()
        return [-p.detach() / lr for p in self.params]


def parity(backend: str) -> None:
    """Errors of 20 steps' directions."""
    table = Table(
        "matrices", "mode", "worst error, ours", "worst error, stock", "ours / stock (mean)", "differs from stock by"
    )
    for name, shapes in PARITY_SETS.items():
        for mode in ("bf16, standard form", "bf16, ns='auto'", "float32", "exact"):
            table.add_row(name, mode, *_parity_row(shapes, mode, backend))
    CONSOLE.print(f"Muon, 20 steps, {backend}: relative error of a step's direction against the float64 polynomial")
    CONSOLE.print(table)
    _adamw_parity(backend)


def _parity_row(shapes: Sequence[tuple[int, ...]], mode: str, backend: str) -> list[str]:
    ours, stock = Directions(shapes), Directions(shapes)
    options: dict[str, Any] = {"lr": 1.0, "momentum": 0.95, "weight_decay": 0.0}
    config = mc.MuonConfig(ns_dtype="float32" if mode == "float32" else "bfloat16")
    optimizer = mc.Muon(ours.params, config=config, backend=backend, **options)
    if mode in ("exact", "bf16, standard form"):
        exact = mc.CompileConfig(exact=mode == "exact")
        mc.compile_step(optimizer, backend=backend, ns="standard", config=exact)
    reference = torch.optim.Muon(stock.params, **options)
    generator = torch.Generator().manual_seed(1)
    momenta = [torch.zeros(s, dtype=torch.float64) for s in shapes]
    worst = {"ours": 0.0, "stock": 0.0, "between": 0.0}
    ratios = []
    for _ in range(20):
        grads = [torch.randn(s, generator=generator) for s in shapes]
        got = ours.of_step(optimizer.step, grads, 1.0)
        base = stock.of_step(reference.step, grads, 1.0)
        for i, grad in enumerate(grads):
            momenta[i].lerp_(grad.double(), 0.05)
            scale = math.sqrt(max(1.0, shapes[i][0] / shapes[i][1]))
            expected = reference_direction(torch.lerp(grad.double(), momenta[i], 0.95)) * scale
            mine, theirs = error(got[i], expected), error(base[i], expected)
            ratios.append(mine / theirs)
            worst["ours"] = max(worst["ours"], mine)
            worst["stock"] = max(worst["stock"], theirs)
            worst["between"] = max(worst["between"], error(got[i], base[i]))
    mean = sum(ratios) / len(ratios)
    same = "0 (bit-equal)" if worst["between"] == 0 else f"{worst['between']:.1e}"
    return [f"{worst['ours']:.1e}", f"{worst['stock']:.1e}", f"{mean:.3f}, worst {max(ratios):.3f}", same]


def _adamw_parity(backend: str) -> None:
    shapes = [(64,), (64,), (300, 32), (7, 5, 3), ()]
    ours, stock = Directions(shapes), Directions(shapes)
    optimizer = torch.optim.AdamW(ours.params, lr=1.0, weight_decay=0.0)
    mc.compile_step(optimizer, backend=backend)
    reference = torch.optim.AdamW(stock.params, lr=1.0, weight_decay=0.0)
    generator = torch.Generator().manual_seed(2)
    worst = 0.0
    for _ in range(20):
        grads = [torch.randn(s, generator=generator) for s in shapes]
        got, expected = (d.of_step(o.step, grads, 1.0) for d, o in ((ours, optimizer), (stock, reference)))
        worst = max(worst, *(error(a, b) for a, b in zip(got, expected, strict=True)))
    CONSOLE.print(f"AdamW, 20 steps, {backend}: worst relative difference from torch.optim.AdamW {worst:.1e}\n")


class HostOperators(TorchDispatchMode):
    """Counts operators that the host dispatches while the compiled graph is not running."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.inside = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.inside
        return func(*args, **(kwargs or {}))


def host_operators(optimizer: torch.optim.Optimizer, step: mc.CompiledStep) -> int:
    """Operators dispatched by the host in one step, outside the one call into the graph."""
    binding = step._binding
    assert binding is not None
    mode = HostOperators()
    originals = dict(binding.graphs)
    for kind, (traced, compiled) in originals.items():

        def run(inputs: list[Tensor], inner: Callable[[list[Tensor]], object] = compiled.run) -> object:
            mode.inside = True
            try:
                return inner(inputs)
            finally:
                mode.inside = False

        binding.graphs[kind] = (traced, type(compiled)(run=run, code={}, backend="", cached=False))
    with mode:
        optimizer.step()
    binding.graphs.update(originals)
    return mode.count


def counts(backend: str) -> None:
    """Compiles and host work over 50 steps."""
    table = Table(
        "parameters",
        "hyperparameters",
        "compiles",
        "then, gradients missing",
        "recompiles",
        "calls per step",
        "graph breaks",
        "host operators",
    )
    for number in (10, 300):
        for kind in ("floats", "tensors"):
            params = make_params([TEN_SHAPES[i % 10] for i in range(number)])
            optimizer = torch.optim.Muon(params)
            step = mc.compile_step(optimizer, backend=backend)
            for index in range(50):
                values = {"lr": 1e-3 * (index + 1), "weight_decay": 0.001 * index, "momentum": 0.9 + index * 1e-3}
                for name, value in values.items():
                    optimizer.param_groups[0][name] = value if kind == "floats" else torch.tensor(value)
                for param in params:
                    param.grad = torch.randn_like(param)
                if index == 25:
                    optimizer.load_state_dict(optimizer.state_dict())
                optimizer.step()
            compiles = step.stats.compiles
            operators = host_operators(optimizer, step)
            for index in range(10):
                for offset, param in enumerate(params):
                    param.grad = None if (offset + index) % 3 == 0 else torch.randn_like(param)
                optimizer.step()
            stats = step.stats
            more = stats.compiles - compiles
            cells = (compiles, f"+{more}", stats.recompiles, stats.host_launches, stats.graph_breaks, operators)
            table.add_row(str(number), kind, *map(str, cells))
    CONSOLE.print(f"50 steps, {backend}: lr, weight decay and momentum change each step, load_state_dict at step 25")
    CONSOLE.print(table)


def memory(backend: str) -> None:
    """Live tensors and resident memory."""
    params = make_params([TEN_SHAPES[i % 10] for i in range(100)])
    optimizer = torch.optim.Muon(params)
    mc.compile_step(optimizer, backend=backend)
    page = resource.getpagesize()
    seen = {}
    for index in range(1, 201):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.param_groups[0]["lr"] = 1e-3 / index
        optimizer.step()
        if index in (5, 50, 200):
            gc.collect()
            tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            seen[index] = (tensors, resident)
    table = Table("after step", "live tensors", "resident MiB")
    for index, (tensors, resident) in seen.items():
        table.add_row(str(index), str(tensors), f"{resident / 2**20:.1f}")
    CONSOLE.print(f"memory, 100 parameters in 10 shapes, {backend}")
    CONSOLE.print(table)


def nodes(backend: str) -> None:
    """FX nodes against parameters."""
    table = Table("parameters", "FX nodes", "of them inputs", "per-parameter nodes besides inputs")
    before = None
    for number in (20, 100, 300):
        params = make_params([TEN_SHAPES[i % 10] for i in range(number)])
        optimizer = torch.optim.Muon(params)
        step = mc.compile_step(optimizer, backend="aot_eager")
        optimizer.step()
        assert step._binding is not None
        graph = step._binding.graphs["all"][0].graph.graph
        inputs = sum(node.op == "placeholder" for node in graph.nodes)
        inner = len(graph.nodes) - inputs
        growth = "" if before is None else f"{(inner - before[1]) / (number - before[0]):.3f}"
        before = (number, inner)
        table.add_row(str(number), str(len(graph.nodes)), str(inputs), growth)
    CONSOLE.print("graph size at ten shapes")
    CONSOLE.print(table)


FIGURES = {"parity": parity, "counts": counts, "memory": memory, "nodes": nodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="which; all if none is named")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager"])
    args = parser.parse_args()
    torch.manual_seed(0)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    for name in args.figures or FIGURES:
        FIGURES[name](args.backend)


if __name__ == "__main__":
    main()
