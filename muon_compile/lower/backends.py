"""Backends by name. To add one: one file beside this, one row here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from muon_compile.config import CompileConfig
from muon_compile.kernels import cpu
from muon_compile.lower import inductor
from muon_compile.lower.check import check_graph
from muon_compile.lower.compiled import CompiledGraph, CompileError
from muon_compile.lower.eager import compile_eager
from muon_compile.lower.trace import InputSpec, RunStep, TracedStep, trace_step
from muon_compile.plan.exchange import Place
from muon_compile.plan.plan import Plan

BACKENDS = ("inductor", "aot_eager")


def check_backend(backend: str, devices: Iterable[str]) -> None:
    """Refuse a backend that is unknown or cannot work here.

    Raises:
        ValueError: Unknown name.
        CompileError: Something it needs is missing.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {BACKENDS}, got {backend!r}.")
    if backend == "inductor" and any(device.startswith("cpu") for device in devices):
        inductor.check_compiler()


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
    if plan.native or any(batch.kernel == "native" for batch in plan.batches):
        check_kernels()
    table: Mapping[Any, Any] = inductor.decompositions() if backend == "inductor" else {}
    traced = trace_step(plan, spec, inputs, run_step, places, table)
    check_graph(plan, traced)
    if backend == "aot_eager":
        return traced, compile_eager(traced)
    compiled = inductor.compile_inductor(
        traced,
        route=config.inductor_route,
        options=config.inductor_options,
        cuda_graphs=config.cuda_graphs,
    )
    return traced, compiled
