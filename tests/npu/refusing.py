"""What the backend refuses, asked for in a process where TorchAir is loaded; each answer is the error's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import muon_compile as mc
from muon_compile.npu import stand_in
from tests.dist import models
from tests.dist.models import Job

STANDARD = mc.MuonConfig(ns_dtype="float32", ns_steps=1)


def _step(options: Mapping[str, Any] | None = None, **more: Any) -> tuple[mc.CompiledStep, list[torch.nn.Parameter]]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    optimizer = mc.Muon([{"params": params}], lr=0.1, config=STANDARD)
    config = mc.CompileConfig(torchair_options=options or {}, **more)
    step = mc.compile_step(optimizer, backend="torchair", config=config)
    for param in params:
        param.grad = torch.randn_like(param)
    return step, params


def _text(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _refused(options: Mapping[str, Any]) -> str:
    return _text(lambda: _step(options))


def _after_another(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    step, _ = _step(first)
    step()
    return _text(lambda: _step(second)[0]())


def _failing_engine() -> dict[str, object]:
    """GE refuses the graph: nothing has changed, and the step works once GE does."""
    step, params = _step()
    before = [param.detach().clone() for param in params]
    from torchair.core._backend import TorchNpuGraph

    with mock.patch.object(TorchNpuGraph, "compile", side_effect=RuntimeError("EZ9999: no kernel for this")):
        said = _text(step)
    same = all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    step()
    moved = not any(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    return {"said": said, "same": same, "moved": moved}


def _frozen() -> dict[str, object]:
    record = stand_in.installed()
    assert record is not None
    step, params = _step({"experimental_config.frozen_parameter": True})
    step()
    first = record.graphs[-1]
    graphs = len(record.graphs)
    with torch.no_grad():
        params[0].data = params[0].detach().clone()  # the same values elsewhere
    params[0].grad = torch.ones_like(params[0])
    step()
    return {"frozen": first.options["frozenInput"], "more_graphs": len(record.graphs) - graphs}


def _dumped(folder: Path) -> dict[str, str]:
    step, _ = _step()
    step()
    return {str(path.relative_to(folder)): path.read_text() for path in step.dump(folder)}


def answers(torchair: str, folder: str) -> dict[str, Any]:
    """Everything that the tests ask, in an order in which GE's options fit."""
    stand_in.install(Path(torchair))
    found: dict[str, Any] = {
        "unknown option": _refused({"experimental_config.frozen_parameters": True}),
        "unknown section": _refused({"ge.oo_level": "O1"}),
        "wrong value": _refused({"ge_config.oo_level": "O2"}),
        "wrong mode": _refused({"mode": "fast"}),
        "views": _refused({"experimental_config.enable_view_optimize": True}),
        "order": _refused({"experimental_config.topology_sorting_strategy": "BFS"}),
        "mutations": _refused({"experimental_config.keep_inference_input_mutations": False}),
        "eager": _refused({"debug.run_eagerly": True}),
        "captured": _text(lambda: _step({"mode": "npugraph_ex"})[0]()),
        "exact": _text(lambda: _step(exact=True)),
        "native": _text(lambda: _native()),
        "other backend": _text(
            lambda: mc.compile_step(
                mc.Muon([{"params": [torch.nn.Parameter(torch.randn(4, 6))]}], lr=0.1, config=STANDARD),
                backend="aot_eager",
                config=mc.CompileConfig(torchair_options={"mode": "max-autotune"}),
            )
        ),
        "failing engine": _failing_engine(),
        "frozen": _frozen(),
        "dumped": _dumped(Path(folder)),
        "once": _after_another({}, {"ge_config.enable_single_stream": True}),
    }
    return found


def _native() -> None:
    param = torch.nn.Parameter(torch.randn(4, 6))
    param.grad = torch.randn(4, 6)
    optimizer = mc.Muon([{"params": [param]}], lr=0.1, config=mc.MuonConfig(ns_dtype="bfloat16"))
    mc.compile_step(optimizer, backend="torchair", hardware="cpu-2core-native")()


def one_rank_fails(rank: int, torchair: str) -> str:
    """GE refuses one rank's graph: every rank raises, before the first collective."""
    if stand_in.installed() is None:
        stand_in.install(Path(torchair))
    job = Job(shapes={"even": (8, 6)}, backend="torchair", strategy="all_gather", config=STANDARD)
    model = models.sharded_model(job)
    step = models.compiled(models.optimizer_of(model, job), job)
    models.give(model, 0)
    from torchair.core._backend import TorchNpuGraph

    error = RuntimeError("EZ9999: no kernel for this")
    with mock.patch.object(TorchNpuGraph, "compile", side_effect=error if rank == 2 else None):
        said = _text(step)
    dist.barrier()
    return said
