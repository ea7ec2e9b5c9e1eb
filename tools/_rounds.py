"""Rounds in which every optimizer steps once, and what is counted and computed from them."""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], object]

OURS, STOCK, DEFAULT = "ours", "stock", "stock, default process"
MIN_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed step: wall seconds and minor page faults."""

    seconds: float
    faults: int


def timed(call: Step, device: str) -> Sample:
    """One call, device work included."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    started = time.perf_counter()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    return Sample(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def run_rounds(
    peers: Mapping[str, Callable[[], Sample]], seconds: float, max_rounds: int, between: Callable[[int], None]
) -> dict[str, list[Sample]]:
    """Run whole rounds until the time is over, at least ``MIN_ROUNDS``; the order rotates by one per round.

    Args:
        peers: What runs one step of each.
        seconds: Time for all rounds.
        max_rounds: Most rounds.
        between: Called with the number of rounds done after each.
    """
    names = list(peers)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    deadline = time.perf_counter() + seconds
    done = 0
    while done < MIN_ROUNDS or (done < max_rounds and time.perf_counter() < deadline):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(peers[name]())
        done += 1
        between(done)
    return samples


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, by ranks."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "low": ordered[len(ordered) // 4],
        "high": ordered[-1 - len(ordered) // 4],
    }


def summarize(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Per optimizer the step in ms, faults per step and, for the others, the ratio of each round to ours."""
    ours = [sample.seconds for sample in samples[OURS]]
    result = {}
    for name, taken in samples.items():
        times = [sample.seconds for sample in taken]
        entry: dict[str, Any] = {
            "ms": quartiles([t * 1e3 for t in times]),
            "faults": statistics.median(sample.faults for sample in taken),
        }
        if name != OURS:
            entry["ratio"] = quartiles([theirs / mine for theirs, mine in zip(times, ours, strict=True)])
        result[name] = entry
    return result


def allocations(step: Step, device: str) -> dict[str, int]:
    """Count and bytes of what one step takes from torch's allocator; memory that a kernel keeps for itself is not."""
    if device != "cpu":
        before = torch.cuda.memory_stats()
        step()
        torch.accelerator.synchronize()
        after = torch.cuda.memory_stats()
        keys = {"count": "allocation.all.allocated", "bytes": "allocated_bytes.all.allocated"}
        return {name: after[key] - before[key] for name, key in keys.items()}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
    sizes = [size for size in sizes if size > 0]
    return {"count": len(sizes), "bytes": sum(sizes)}
