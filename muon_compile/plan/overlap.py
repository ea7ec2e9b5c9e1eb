"""The order of parts, so that what one sends is covered by another's products; and the connections that all hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muon_compile.config import MuonConfig
from muon_compile.plan.exchange_cost import exchange_cost, groups_of
from muon_compile.plan.hardware import Hardware, network_of
from muon_compile.plan.network import Group
from muon_compile.plan.plan import Bucket, Part, Plan
from muon_compile.plan.strategies import collectives
from muon_compile.plan.traffic import CollectiveCost, fastest, open_connections, over_limit


def order_parts(
    buckets: Sequence[Bucket], parts: Sequence[Part], hardware_of: Callable[[str], Hardware]
) -> tuple[Part, ...]:
    """The parts without exchanges, then the others by Johnson's rule.

    What a part sends first and what it computes then are two machines of a flow shop: the shortest total time has the
    parts that send for less time than they compute first, by the time they send, and then the others, by the time that
    they compute, the longest first (S. M. Johnson, 1954, Optimal two- and three-stage production schedules).
    """
    keys = [_key(buckets[part.bucket], part, hardware_of) for part in parts]
    return tuple(part for _, part in sorted(zip(keys, parts, strict=True), key=lambda item: item[0]))


def _key(bucket: Bucket, part: Part, hardware_of: Callable[[str], Hardware]) -> tuple[int, float]:
    exchange, layout = part.exchange, bucket.layout
    if exchange is None or layout is None:
        return 0, 0.0
    assert isinstance(bucket.config, MuonConfig)
    cost = exchange_cost(exchange, bucket.config, layout.mesh, hardware_of(bucket.device))
    sends = sum(sent.seconds for _, sent in cost.phases[0]) if cost.phases else 0.0
    computes = sum(
        max(stage.of(count).seconds for count in stage.by_owned) if stage.by_owned else stage.everyone.seconds
        for stage in cost.stages[1:]
    )
    return (1, sends) if sends < computes else (2, -computes)


def check_connections(plan: Plan, hardware_of: Callable[[str], Hardware]) -> None:
    """Refuse a plan whose collectives need more connections than the network's devices hold.

    Raises:
        ValueError: With the figures and what to do.
    """
    opened: dict[str, list[tuple[str, CollectiveCost]]] = {}
    for part in plan.parts:
        layout, device = plan.buckets[part.bucket].layout, plan.buckets[part.bucket].device
        if part.exchange is None or layout is None:
            continue
        network, groups = network_of(hardware_of(device)), groups_of(part.exchange, layout.mesh)
        for spec in collectives(part.exchange):
            cost = fastest(spec.kind, spec.bytes_per_rank, groups[spec.axis], network)
            opened.setdefault(device, []).append((f"{layout.mesh.name}/{spec.axis}", cost))
    for axes, indices in plan.agreements():
        bucket = plan.buckets[indices[0]]
        assert bucket.layout is not None
        mesh, device, network = bucket.layout.mesh, bucket.device, network_of(hardware_of(bucket.device))
        num_bytes = 4 * sum(plan.buckets[index].size for index in indices)
        for axis, _, _ in axes:
            cost = fastest("all_reduce", num_bytes, Group.along(mesh, axis), network)
            opened.setdefault(device, []).append((f"{mesh.name}/{axis}", cost))
    for device, costs in opened.items():
        network = network_of(hardware_of(device))
        problem = over_limit(open_connections(costs, network), network)
        if problem is not None:
            names = sorted({p.exchange.strategy for p in plan.parts if p.exchange is not None})
            raise ValueError(f"make_plan: strategies {', '.join(names)} on mesh {plan.mesh.axes}: {problem}.")
