"""The collectives of a step in order: what the plan promises of each, and beside it what the traced graph holds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from muon_compile.plan.exchange import Place
from muon_compile.plan.plan import Plan
from muon_compile.plan.sharding import Promise, promises, shard_axis
from muon_compile.plan.strategies import NODE, PEERS

if TYPE_CHECKING:
    from muon_compile.lower.trace import TracedStep

Row = dict[str, Any]


def collective_rows(
    plan: Plan, traced: TracedStep | None = None, places: Mapping[int, Place] | None = None
) -> list[Row]:
    """Every collective of a step, in the order in which it is issued.

    Args:
        plan: The plan; with a graph, as its rank runs it (``plan.localize``).
        traced: The rank's graph; None: there are promises alone.
        places: Where the rank stands, for every part with an exchange.

    Returns:
        For each collective ``order``; what is promised, ``kind``, ``axis``, ``role`` of the axis (``"shard"``,
        ``"node"`` or ``"peers"`` within it, ``"replica"``) and ``bytes``, the operator's input on the rank where it is
        largest; ``phase``, ``wave``, ``part`` and ``buckets`` (names). With a graph also ``found``: ``kind``,
        ``axis``, ``role``, ``bytes`` of this rank's input, ``group`` (its name) and ``node``; and ``equal``: kind, axis
        and role are, and this rank's bytes are those promised for the largest share, or fewer. Where there are more of
        the ones than of the others, None stands for what is missing.
    """
    promised = promises(plan, None if traced is None else places or {})
    found = [] if traced is None else _found(plan, traced, places or {})
    rows = []
    for order, (promise, there) in enumerate(zip_longest(promised, found)):
        row = {"order": order, **_promised(plan, promise)}
        rows.append(row if traced is None else row | {"found": there, "equal": _equal(row, there)})
    return rows


def _promised(plan: Plan, promise: Promise | None) -> Row:
    if promise is None:
        return dict.fromkeys(("kind", "axis", "role", "bytes", "phase", "wave", "part", "buckets"))
    return {
        "kind": promise.spec.kind,
        "axis": promise.spec.axis,
        "role": promise.role,
        "bytes": promise.spec.bytes_per_rank,
        "phase": promise.phase,
        "wave": promise.wave,
        "part": promise.part,
        "buckets": [plan.buckets[index].name for index in promise.buckets],
    }


def _found(plan: Plan, traced: TracedStep, places: Mapping[int, Place]) -> list[Row]:
    from muon_compile.lower.check import collective_group, collective_kind

    groups = _groups(plan, places)
    rows = []
    for node in traced.graph.graph.nodes:
        kind = collective_kind(node)
        if kind is None:
            continue
        group = collective_group(node)
        axis, role = groups.get(group, (None, None))
        sent = node.args[0].meta["val"]
        size = sent.numel() * sent.element_size()
        rows.append({"kind": kind, "axis": axis, "role": role, "bytes": size, "group": group, "node": node.name})
    return rows


def _groups(plan: Plan, places: Mapping[int, Place]) -> dict[str, tuple[str, str]]:
    """Axis and role of every process group, by its name."""
    found: dict[str, tuple[str, str]] = {}
    for index, place in places.items():
        part = plan.parts[index]
        layout, exchange = plan.buckets[part.bucket].layout, part.exchange
        assert layout is not None
        shard = shard_axis(plan, exchange, layout) or ""
        found |= {
            place.shard_group: (shard, "shard"),
            place.replica_group: (layout.replica_axis or "", "replica"),
            place.node_group: (shard + NODE, "node"),
            place.peer_group: (shard + PEERS, "peers"),
        }
    return found


def _equal(row: Row, found: Row | None) -> bool:
    if found is None or any(row[name] != found[name] for name in ("kind", "axis", "role")):
        return False
    return bool(found["bytes"] <= row["bytes"])
