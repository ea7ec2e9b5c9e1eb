"""Layer C's work on a rank: the same job eagerly and through TorchAir's graph, and what differs."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

import muon_compile as mc
from muon_compile.npu import stand_in
from muon_compile.run import binding
from tests.dist import models
from tests.dist.models import Job, compiled, give, optimizer_of, sharded_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a job through TorchAir gave on one rank.

    Args:
        error: Largest relative difference of a parameter's change from the eager run's.
        bits: For every step, whether it wrote the bits that the traced graph writes when run node by node.
        graphs: Graphs that TorchAir loaded.
        runs: Runs of each.
        stats: The step's counters.
        collectives: The last graph's collectives in order, kind and group.
        promised: Those of the plan.
    """

    error: float
    bits: tuple[bool, ...]
    graphs: int
    runs: tuple[int, ...]
    stats: dict[str, Any]
    collectives: tuple[tuple[str, str], ...]
    promised: tuple[str, ...]


def alone(folder: str, jobs: dict[str, Job]) -> dict[str, Run]:
    """Jobs in one process without a mesh."""
    _install(folder)
    return {name: _run(job, models.Model) for name, job in jobs.items()}


class _Recorded:
    """Stands for what records kernels on an NPU: TorchAir's graph after all of its passes, run node by node."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, graph: GraphModule, inputs: Any) -> Any:
        from torchair import npu_fx_compiler
        from torchair._utils.graph_transform_observer import GraphTransformObserver

        observer = GraphTransformObserver(graph, inputs, self.config)
        optimized = npu_fx_compiler._optimize_fx(copy.deepcopy(graph), self.config, observer)

        def run(*args: Tensor) -> object:
            return optimized(*args)

        run.runner = types.SimpleNamespace(fx_graph=optimized)  # type: ignore[attr-defined]
        return run


def captured(folder: str, jobs: dict[str, Job]) -> dict[str, Run]:
    """Jobs in one process in the mode that records kernels, up to the recording."""
    _install(folder)
    import torchair

    config = mc.CompileConfig(torchair_options={"mode": "npugraph_ex"})
    with mock.patch.object(torchair, "get_compiler", _Recorded):
        return {name: _run(replace(job, compile_config=config), models.Model) for name, job in jobs.items()}


def shared(rank: int, folder: str, jobs: dict[str, Job]) -> dict[str, Run]:
    """Jobs over the ranks."""
    _install(folder)
    return {name: _run(job, sharded_model) for name, job in jobs.items()}


def _install(folder: str) -> None:
    warnings.filterwarnings("ignore", message=".*_get_pg_default_device.*")
    if stand_in.installed() is None:
        stand_in.install(Path(folder))


def _run(job: Job, model_of: Callable[[Job], models.Model]) -> Run:
    record = stand_in.installed()
    assert record is not None
    bits: list[bool] = []
    lower_step = binding.lower_step

    def watched(*args: Any) -> Any:
        traced, graph = lower_step(*args)

        def run(inputs: list[Tensor]) -> object:
            copies = [x.clone() for x in inputs]
            traced.graph(*copies)
            written = inputs[: traced.spec.num_written]
            result = graph.run(inputs)
            bits.append(all(torch.equal(a, b) for a, b in zip(written, copies, strict=False)))
            return result

        return traced, replace(graph, run=run)

    eager = replace(job, backend="aot_eager", compile_config=replace(job.compile_config, torchair_options={}))
    _, expected, _ = _train(eager, model_of)
    first = len(record.graphs)
    with mock.patch.object(binding, "lower_step", watched):
        step, found, promised = _train(replace(job, backend="torchair"), model_of)
    made = record.graphs[first:]
    return Run(
        error=max(_relative(found[name], change) for name, change in expected.items()),
        bits=tuple(bits),
        graphs=len(made),
        runs=tuple(graph.runs for graph in made),
        stats=step,
        collectives=tuple((c.kind, c.group) for c in made[-1].graph.collectives()) if made else (),
        promised=promised,
    )


def _train(
    job: Job, model_of: Callable[[Job], models.Model]
) -> tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]:
    """Counters, how every parameter changed, and the plan's collectives."""
    model = model_of(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    before = models.params_of(model)
    for number in range(job.steps):
        for group in optimizer.param_groups:  # no value of it may compile anew
            group["lr"], group["weight_decay"] = job.lr / (number + 1), job.weight_decay * number
        give(model, number, missing=("vector",) if number == 2 else ())
        optimizer.step()
    changes = {name: new.double() - before[name].double() for name, new in models.params_of(model).items()}
    return step.stats.as_dict(), changes, tuple(c.kind for c in step.plan.collectives)


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12)) if expected.numel() else 0.0
