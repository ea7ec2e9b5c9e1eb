"""Predicted timelines as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muon_compile.plan.step_cost import Event

# One thread for each lane of a rank, in this order.
LANES = ("compute", "network")


def timeline(steps: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """Predicted steps in the Trace Event Format, ready for ``json.dump``: a process for each, its lanes as threads.

    Source: Trace Event Format, Google: complete events (``X``) and metadata (``M``), times in microseconds.

    Args:
        steps: The events of each step, by a name for it, such as its strategy.
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
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _metadata(what: str, pid: int, tid: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
