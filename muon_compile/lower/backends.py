"""Backends by name. To add one: one file beside this, one row here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from muon_compile.config import CompileConfig
from muon_compile.kernels import cpu
from muon_compile.lower import inductor, plain_boundary, torchair
from muon_compile.lower.check import check_graph
from muon_compile.lower.compiled import CompiledGraph, CompileError
from muon_compile.lower.eager import compile_eager
from muon_compile.lower.trace import InPlaceBoundary, InputSpec, RunStep, TracedStep, trace_step
from muon_compile.plan.exchange import Place
from muon_compile.plan.plan import Plan

BACKENDS = ("inductor", "aot_eager", "torchair")


def hyper_dtype(backend: str) -> torch.dtype:
    """dtype of the hyperparameter inputs: NPUs have no float64 worth using."""
    return torch.float32 if backend == "torchair" else torch.float64


def check_backend(
    backend: str, devices: Iterable[str], config: CompileConfig, groups: Sequence[ProcessGroup] = ()
) -> None:
    """Refuse a backend that is unknown or cannot work here.

    Args:
        backend: Name.
        devices: Where parameters are.
        config: What is about compiling.
        groups: Process groups of the step's collectives.

    Raises:
        ValueError: Unknown name, or one that does not go with the other arguments.
        CompileError: Something it needs is missing.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}.")
    if backend == "inductor" and any(device.startswith("cpu") for device in devices):
        inductor.check_compiler()
    if backend == "torchair":
        if config.exact:
            raise ValueError(
                "backend='torchair': expected exact=False, got True: exact reproduces the roundings of "
                "torch.optim.Muon's own kernels, and a GE graph has GE's. Take 'inductor' or 'aot_eager' for it."
            )
        torchair.check_torchair(sorted(set(devices)), groups)
        torchair.check_options(config.torchair_options)
    elif config.torchair_options:
        raise ValueError(f"torchair_options: expected none beside backend={backend!r}, got {config.torchair_options}.")


def check_kernels() -> None:
    """Refuse a plan for the CPU kernels where there are none.

    Raises:
        CompileError: They are not available; says why.
    """
    reason = cpu.why_not()
    if reason is not None:
        raise CompileError(
            f"The plan is for this library's CPU kernels, and they are not available here: {reason}. Make the plan for "
            "this machine: compile_step measures it unless hardware= or MUON_COMPILE_HARDWARE say otherwise."
        )


def trace_for(
    backend: str,
    plan: Plan,
    spec: InputSpec,
    inputs: Sequence[Tensor],
    run_step: RunStep,
    places: Mapping[int, Place],
    *,
    stack_traces: bool = False,
) -> TracedStep:
    """Trace the step in a backend's own operators, and hold it against its plan. Needs nothing of the backend's but
    Inductor's table of decompositions.

    Raises:
        CompileError: The plan is for kernels that the backend has not.
    """
    table: Mapping[Any, Any] = {}
    boundary = InPlaceBoundary
    if backend == "torchair":
        _check_plain(plan)
        table, boundary = plain_boundary.decompositions(), plain_boundary.PlainBoundary
    elif plan.native or any(batch.kernel == "native" for batch in plan.batches):
        check_kernels()
    if backend == "inductor":
        table = inductor.decompositions()
    traced = trace_step(plan, spec, inputs, run_step, places, table, boundary, stack_traces)
    check_graph(plan, traced)
    return traced


def lower_step(
    plan: Plan,
    spec: InputSpec,
    inputs: Sequence[Tensor],
    run_step: RunStep,
    places: Mapping[int, Place],
    backend: str,
    config: CompileConfig,
) -> tuple[TracedStep, CompiledGraph]:
    """Trace the step, hold it against its plan, and compile it.

    Raises:
        CompileError: The plan needs something that is not here, or the backend failed.
    """
    traced = trace_for(backend, plan, spec, inputs, run_step, places)
    if backend == "aot_eager":
        return traced, compile_eager(traced)
    if backend == "torchair":
        return traced, torchair.compile_torchair(traced, plan.collectives, config.torchair_options, inputs)
    compiled = inductor.compile_inductor(
        traced,
        route=config.inductor_route,
        options=config.inductor_options,
        cuda_graphs=config.cuda_graphs,
    )
    return traced, compiled


def _check_plain(plan: Plan) -> None:
    exchanges = [part.exchange.kernel for part in plan.parts if part.exchange is not None]
    kernels = {*(batch.kernel for batch in plan.batches), *exchanges} - {"graph"}
    if plan.native or kernels:
        raise CompileError(
            f"The plan is for kernels that TorchAir has not ({', '.join(sorted(kernels)) or 'native'}); expected one "
            "for an NPU: leave hardware= out, give a preset such as 'ascend-910c', or figures with native=False and "
            "symmetric=False."
        )
