"""A plan as the plain data that a report's page draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from muon_compile.inspect.graph_nodes import printable
from muon_compile.inspect.report_amounts import Amounts, bucket_amounts, rank_loads
from muon_compile.inspect.report_words import (
    EVERY_RANK,
    KEY_WORDS,
    forms,
    mesh_words,
    part_name,
    placement,
    shape_words,
    solvers,
    strategy_key,
    whole_size,
    why,
)
from muon_compile.plan.assign import imbalance
from muon_compile.plan.exchange import Exchange
from muon_compile.plan.plan import Bucket, Plan
from muon_compile.plan.sharding import promises
from muon_compile.plan.strategies import collectives


def plan_data(plan: Plan, found: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Everything about a plan that is drawn or said, as JSON would have it.

    Args:
        plan: The plan.
        found: What a rank's graph holds of every collective, in the plan's order (``inspect.collectives``); None: there
            is no graph.
    """
    amounts = bucket_amounts(plan)
    exchanges: list[list[Exchange]] = [[] for _ in plan.buckets]
    for part in plan.parts:
        if part.exchange is not None:
            exchanges[part.bucket].append(part.exchange)
    keys = [strategy_key(bucket, own) for bucket, own in zip(plan.buckets, exchanges, strict=True)]
    return {
        "digest": plan.digest,
        "mesh": {"words": mesh_words(plan.mesh), "axes": [list(axis) for axis in plan.mesh.axes]},
        "figures": _figures(plan),
        "settings": _settings(plan),
        "strategies": {key: KEY_WORDS[key] for key in KEY_WORDS if key in keys},
        "buckets": [
            _bucket(plan, index, key, own, amount)
            for index, (key, own, amount) in enumerate(zip(keys, exchanges, amounts, strict=True))
        ],
        "params": _params(plan),
        "collectives": _collectives(plan, found),
        "loads": _loads(plan),
    }


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "params": len(plan.specs),
        "elements": sum(spec.numel for spec in plan.specs),
        "buckets": len(plan.buckets),
        "ranks": plan.mesh.num_ranks,
        "waves": len(plan.waves),
        "batches": len(plan.batches),
        "temp_bytes": plan.temp_bytes,
        "collectives": len(plan.collectives),
        "payload_bytes": sum(spec.bytes_per_rank for spec in plan.collectives),
    }


def _settings(plan: Plan) -> list[list[str]]:
    yes = {True: "yes", False: "no"}
    return [
        ["Mesh", mesh_words(plan.mesh)],
        ["Strategy asked for", plan.strategy],
        ["Exact as stock", yes[plan.exact]],
        ["Native CPU passes", yes[plan.native]],
        ["Hyperparameter groups", str(plan.num_groups)],
        ["Newton-Schulz batches", str(len(plan.batches))],
    ]


def _bucket(plan: Plan, index: int, key: str, exchanges: Sequence[Exchange], amounts: Amounts) -> dict[str, Any]:
    bucket = plan.buckets[index]
    choice = bucket.choice
    return {
        "name": bucket.name,
        "algorithm": bucket.algorithm,
        "count": bucket.size,
        "shape": shape_words(bucket.shape),
        "matrices": _matrices(bucket),
        "dtypes": [bucket.dtype, bucket.grad_dtype, bucket.state_dtype],
        "device": bucket.device,
        "groups": sorted(set(bucket.groups)),
        "placement": placement(bucket),
        "strategy": key,
        "why": why(bucket, key),
        "seconds": choice.seconds if choice else None,
        "runner_up": [choice.runner_up, choice.runner_up_seconds] if choice and choice.runner_up else None,
        "forms": forms(plan, bucket, exchanges),
        "wire": list(dict.fromkeys(exchange.comm_dtype for exchange in exchanges)),
        "config": [[field.name, plain(getattr(bucket.config, field.name))] for field in fields(bucket.config)],
        "amounts": asdict(amounts),
        "parts": _parts(plan, index),
        "params": list(bucket.params),
    }


def _matrices(bucket: Bucket) -> str:
    """How a parameter reads as matrices, in words; empty where it is none or simply one."""
    view = bucket.view
    if view is None or (view.stacks == 1 and len(view.blocks) == 1 and bucket.shape == (view.rows, view.cols)):
        return ""
    blocks = "" if len(view.blocks) == 1 else f", rows in blocks of {', '.join(map(str, view.blocks))}"
    count = "one matrix" if view.stacks == 1 else f"{view.stacks} matrices"
    return f"{count} {shape_words((view.rows, view.cols))}{blocks}"


def _parts(plan: Plan, index: int) -> list[list[Any]]:
    """For every part: name, wave, units, whole size, who owns how many, collectives."""
    waves = {part: number for number, wave in enumerate(plan.waves) for part in wave.parts}
    bucket = plan.buckets[index]
    rows = []
    for number, part in enumerate(plan.parts):
        if part.bucket != index:
            continue
        exchange = part.exchange
        row: list[Any] = [part_name(part, bucket), waves.get(number), None, "", "", ""]
        if exchange is not None:
            kinds = Counter(spec.kind for spec in collectives(exchange))
            calls = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())
            row[2:] = [exchange.num_units, shape_words(whole_size(exchange)), _owners(exchange), calls]
        rows.append(row)
    return rows


def _owners(exchange: Exchange) -> str:
    """How many units each owner has."""
    rows = exchange.owner_counts or ((exchange.replica_counts,) if exchange.replica_counts else ())
    counts = [count for row in rows for count in row]
    if not counts:
        return EVERY_RANK
    low, high = min(counts), max(counts)
    each = str(low) if low == high else f"{low} to {high}"
    return f"{each} on each of {len(counts)} {'ranks' if exchange.owner_counts else 'replicas'}"


def _params(plan: Plan) -> list[list[Any]]:
    """For every parameter: name, bucket, group, and who orthogonalizes it, empty for AdamW's."""
    homes: dict[int, tuple[int, str]] = {}
    for part in plan.parts:
        bucket = plan.buckets[part.bucket]
        ranks = solvers(part, bucket) if bucket.view is not None else [""] * (part.stop - part.start)
        for param, rank in zip(bucket.params[part.start : part.stop], ranks, strict=True):
            homes.setdefault(param, (part.bucket, rank))
    # A name that would not be seen, or that would turn its surroundings around, is written as escapes.
    names = [printable(spec.name) or repr(spec.name) for spec in plan.specs]
    return [[names[i], homes[i][0], spec.group, homes[i][1]] for i, spec in enumerate(plan.specs)]


def _collectives(plan: Plan, found: Sequence[Mapping[str, Any]] | None) -> list[list[Any]]:
    """For every collective: kind, axis, bytes, phase, wave, buckets, and in words what a dump found in the graph."""
    rows = [[p.spec.kind, p.spec.axis, p.spec.bytes_per_rank, p.phase, p.wave, list(p.buckets)] for p in promises(plan)]
    if found is None:
        return [[*row, None] for row in rows]
    if len(found) < len(rows):
        raise ValueError(f"collectives: expected one for each of the plan's {len(rows)}, got {len(found)}.")
    for given in found[len(rows) :]:
        there = given.get("found") or given
        rows.append([there.get("kind") or "", there.get("axis") or "", 0, "", None, []])
    return [[*row, _found(given)] for row, given in zip(rows, found, strict=True)]


def _found(given: Mapping[str, Any]) -> Any:
    """What a rank's graph holds of a promise: its bytes where it is as promised, else words."""
    there = given.get("found")
    if there is None:
        return "missing" if "equal" in given else "not on this rank"
    if not given.get("equal", True):
        return f"differs: {there.get('kind')} over {there.get('axis')}, {there.get('bytes')} bytes"
    return there.get("bytes")


def _loads(plan: Plan) -> dict[str, Any]:
    """Ranks' loads; of thousands of ranks most are alike, so each pair is kept once."""
    loads = rank_loads(plan)
    pairs: dict[tuple[int, int], int] = {}
    which = [pairs.setdefault(pair, len(pairs)) for pair in zip(loads.exchanged, loads.own, strict=True)]
    totals = [a + b for a, b in zip(loads.exchanged, loads.own, strict=True)]
    return {
        "pairs": [list(pair) for pair in pairs],
        "which": which,
        "busiest": max(totals),
        "mean": sum(totals) / len(totals),
        "imbalance": imbalance(totals),
        "left_out": list(loads.left_out),
    }


def plain(value: Any) -> Any:
    """A value as JSON can hold it, and people read it: other objects as their text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)
