"""The order of parts, so that what one sends is covered by another's products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muon_compile.config import MuonConfig
from muon_compile.plan.exchange_cost import exchange_cost
from muon_compile.plan.hardware import Hardware
from muon_compile.plan.plan import Bucket, Part


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
