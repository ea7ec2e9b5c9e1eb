"""Timelines, predicted and measured, as traces that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muon_compile.plan.marks import Mark
from muon_compile.plan.plan import Plan
from muon_compile.plan.step_cost import Event

# One thread for each lane of a rank, in this order.
LANES = ("compute", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step that was measured, on copies of everything that it writes.

    Args:
        events: Its timeline: the traced graph, operator by operator.
        compiled_seconds: The compiled call, which is one for the whole step; None where it was not run.
        notes: What was measured, and how, in sentences.
    """

    events: tuple[Event, ...]
    compiled_seconds: float | None
    notes: tuple[str, ...]


def timeline(steps: Mapping[str, Sequence[Event]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Steps in the Trace Event Format, ready for ``json.dump``: a process for each, its lanes as threads.

    Source: Trace Event Format, Google: complete events (``X``) and metadata (``M``), times in microseconds.

    Args:
        steps: The events of each step, by a name for it, such as its strategy.
        notes: Sentences about them, which go along as the trace's metadata.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, bars) in enumerate(steps.items(), start=1):
        events.append(_metadata("process_name", pid, 0, {"name": name}))
        events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        for tid, lane in enumerate(LANES, start=1):
            events.append(_metadata("thread_name", pid, tid, {"name": lane}))
            events.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
        for bar in bars:
            # Both ends are rounded alike, so that bars which touch do not overlap; a trace's resolution is 1 ns.
            start, end = (round(seconds * 1e6, 3) for seconds in (bar.start, bar.start + bar.seconds))
            place = {"pid": pid, "tid": 1 + LANES.index(bar.lane), "ts": start, "dur": round(end - start, 3)}
            events.append({"ph": "X", "name": bar.name, "cat": bar.lane} | place)
    made: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": events}
    return made | {"otherData": {"notes": list(notes)}} if notes else made


def _metadata(what: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def bar_of(plan: Plan, mark: Mark | None, collective: str | None) -> tuple[str, str]:
    """Name and lane of the bar that an operator is part of: those that the prediction has for the same work.

    Args:
        plan: The plan.
        mark: What the operator is about.
        collective: The functional collective that it starts or waits for; None where it computes.
    """
    lane = "compute" if collective is None else "network"
    if mark is None or mark.phase == "inputs":
        return "inputs", lane
    if mark.phase == "agree":
        return "agree on gradients" if collective is None else f"agree on gradients {collective}", lane
    if mark.phase in ("momentum", "update"):
        return {"momentum": "directions", "update": "updates"}[mark.phase], lane
    if mark.batch is not None:
        return f"{plan.batches[mark.batch].name} newton-schulz", lane
    work = "newton-schulz" if mark.phase == "orthogonalize" else "pack"
    return f"{plan.buckets[plan.parts[mark.parts[0]].bucket].name} {collective or work}", lane
