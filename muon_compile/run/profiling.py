"""Measure one step, on copies of everything that it writes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from muon_compile.inspect.trace import Measured, bar_of
from muon_compile.lower.check import collective_kind
from muon_compile.lower.compiled import CompiledGraph
from muon_compile.lower.trace import TracedStep
from muon_compile.plan.plan import Plan
from muon_compile.plan.step_cost import Event

# Runs, of which the first one warms up and the one of median length counts.
_RUNS = 4


def measure_step(plan: Plan, traced: TracedStep, compiled: CompiledGraph, inputs: Sequence[Tensor]) -> Measured:
    """Run a step's graph operator by operator with a clock, then its compiled form as a whole.

    What a backend fuses has no parts that could be told apart, so parts are measured on the traced graph, which is what
    the backend was given. The step's collectives run: every rank of its groups has to call.

    Args:
        plan: The plan as this rank runs it.
        traced: The traced step.
        compiled: What the backend made of it.
        inputs: Flat inputs to run on, which are written to.
    """
    sync = _synchronize(inputs)
    devices = sorted({x.device.type for x in inputs})
    alone = _Clocked(plan, traced, sync)
    runs = []
    for _ in range(_RUNS):
        alone.run(*inputs)
        runs.append(alone.taken())
    events = sorted(runs[1:], key=_length)[(_RUNS - 1) // 2]
    seconds = None
    if compiled.any_addresses:
        taken = []
        for _ in range(_RUNS):
            sync()
            start = time.perf_counter()
            compiled.run(list(inputs))
            sync()
            taken.append(time.perf_counter() - start)
        seconds = statistics.median(taken[1:])
    return Measured(events=events, compiled_seconds=seconds, notes=tuple(_notes(compiled, events, seconds, devices)))


def _notes(
    compiled: CompiledGraph, events: Sequence[Event], seconds: float | None, devices: Sequence[str]
) -> list[str]:
    notes = [
        "Measured on copies of parameters, state and hyperparameters, with gradients of noise for every parameter.",
        f"Measured operator by operator: the traced graph, called from Python on {', '.join(devices)}, the median of "
        f"{_RUNS - 1} runs after one to warm up: {_length(events) * 1e3:,.3f} ms. It is not the compiled code: nothing "
        "is fused, and the host's time for every operator is part of its bar.",
    ]
    if set(devices) != {"cpu"}:
        notes.append("The devices were waited for between bars, so nothing runs beside anything else.")
    if seconds is None:
        notes.append(f"The compiled call ({compiled.backend}) was not run: it knows no tensors but the live ones.")
    else:
        notes.append(
            f"The compiled call ({compiled.backend}), one for the whole step and the median of as many runs: "
            f"{seconds * 1e3:,.3f} ms."
        )
    return notes


def _length(events: Sequence[Event]) -> float:
    return events[-1].start + events[-1].seconds if events else 0.0


def _synchronize(inputs: Sequence[Tensor]) -> Callable[[], None]:
    """What waits for the devices of tensors; nothing where all are on the CPU."""
    devices = {x.device for x in inputs if x.device.type != "cpu"}

    def wait() -> None:
        for device in devices:
            torch.accelerator.synchronize(device)

    return wait


class _Clocked(Interpreter):
    """Runs a traced step node by node; consecutive ones of one bar are timed together."""

    def __init__(self, plan: Plan, traced: TracedStep, sync: Callable[[], None]) -> None:
        super().__init__(traced.graph)
        self._sync = sync
        self._bars: dict[Node, tuple[str, str]] = {}
        for node in traced.graph.graph.nodes:
            if node.op == "call_function":
                kind = collective_kind(node) or _waits_for(node)
                self._bars[node] = bar_of(plan, traced.marks.get(node.name), kind)
        self._now: tuple[str, str] | None = None
        self._edges: list[tuple[tuple[str, str] | None, float]] = []

    def run_node(self, n: Node) -> Any:
        bar = self._bars.get(n)
        if bar != self._now or not self._edges:
            self._sync()
            self._edges.append((bar, time.perf_counter()))
            self._now = bar
        return super().run_node(n)

    def taken(self) -> tuple[Event, ...]:
        """The bars of the last run, its inputs and its end apart."""
        edges, self._edges, self._now = self._edges, [], None
        pairs = [(bar, start, stop) for (bar, start), (_, stop) in itertools.pairwise(edges) if bar]
        first = pairs[0][1] if pairs else 0.0
        return tuple(
            Event(name=bar[0], lane=bar[1], start=start - first, seconds=stop - start) for bar, start, stop in pairs
        )


def _waits_for(node: Node) -> str | None:
    """The collective that a node waits for."""
    source = node.args[0] if node.args else None
    waits = str(node.target).startswith("_c10d_functional.wait_tensor")
    return collective_kind(source) if waits and isinstance(source, Node) else None
