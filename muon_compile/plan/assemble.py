"""From buckets with their strategies to a plan: parts, owners, order, batches and waves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from muon_compile.plan.exchange import STRATEGIES, Strategy, StrategyChoice
from muon_compile.plan.hardware import network_of
from muon_compile.plan.localize import local_bucket, make_batches, needs_exchange
from muon_compile.plan.overlap import order_parts
from muon_compile.plan.plan import Batch, Bucket, Plan, Wave, find_choice, resolve_part
from muon_compile.plan.sharding import Rules, exchanged_bytes, plan_exchanges, promised_collectives
from muon_compile.plan.step_cost import predict_step
from muon_compile.plan.traffic import over_limit
from muon_compile.plan.waves import cut_buckets, exchanged_temp_bytes, fill_waves, part_temp_bytes

# Another set of strategies has to make the whole step so much faster: predictions are not better than that.
_WORTH = 0.97


def best_plan(start: Plan, rankings: Mapping[int, Sequence[StrategyChoice]], rules: Rules) -> Plan:
    """The plan whose step is predicted to be fastest: each bucket's own best strategy, or one for all that can take it.

    A bucket's prediction does not know what else is sent, computed and gathered in its wave; the whole step's does.

    Args:
        start: Specs, buckets and forms.
        rankings: For every bucket whose matrices lie on several ranks its strategies, the best first.
        rules: What else decides.

    Raises:
        ValueError: The plan needs more connections than the network's devices hold.
    """
    own = assemble(_taking(start, {index: ranking[0] for index, ranking in rankings.items()}), rules)
    exchanged = next((part.bucket for part in own.parts if part.exchange is not None), None)
    if exchanged is None:
        return own
    hardware = rules.hardware_of(own.buckets[exchanged].device)
    cost = predict_step(own, hardware)
    refused = over_limit(cost.connections, network_of(hardware))
    best, seconds = (own, cost.seconds) if refused is None else (None, math.inf)
    candidates = {choice.name for ranking in rankings.values() for choice in ranking}
    for name in (name for name in STRATEGIES if name in candidates and len(candidates) > 1):
        plan = assemble(_taking(start, {index: _common(ranking, name) for index, ranking in rankings.items()}), rules)
        other = predict_step(plan, hardware)
        if other.seconds < seconds * _WORTH and over_limit(other.connections, network_of(hardware)) is None:
            best, seconds = plan, other.seconds
    if best is None:
        names = sorted({part.exchange.strategy for part in own.parts if part.exchange is not None})
        raise ValueError(f"make_plan: strategies {', '.join(names)} on mesh {own.mesh.axes}: {refused}.")
    if best is own:
        return own
    why = f"; the whole step is predicted {cost.seconds / seconds:.2f}x as fast as with each bucket's own best"
    return replace(best, buckets=tuple(_reworded(bucket, why) for bucket in best.buckets))


def _taking(start: Plan, taken: Mapping[int, StrategyChoice]) -> Plan:
    buckets = [
        replace(bucket, strategy=taken[i].name, choice=taken[i]) if i in taken else bucket
        for i, bucket in enumerate(start.buckets)
    ]
    return replace(start, buckets=tuple(buckets))


def _common(ranking: Sequence[StrategyChoice], name: Strategy) -> StrategyChoice:
    return next((choice for choice in ranking if choice.name == name), ranking[0])


def _reworded(bucket: Bucket, why: str) -> Bucket:
    choice = bucket.choice
    return bucket if choice is None else replace(bucket, choice=replace(choice, reason=choice.reason + why))


def assemble(start: Plan, rules: Rules) -> Plan:
    """Cut the buckets of a plan into parts, give these owners, batches and waves, and promise the collectives."""
    buckets, choices, native = start.buckets, start.choices, start.native

    def kernel_of(bucket: Bucket, rows: int) -> tuple[str, str]:
        choice = find_choice(choices, bucket, rows)
        return choice.form, choice.kernel

    local = tuple(local_bucket(bucket, lambda _: 0) for bucket in buckets)  # the first rank has the most

    def gather_bytes(index: int, share: Bucket) -> int:
        return exchanged_bytes(replace(buckets[index], params=share.params), rules.comm_dtype)

    def temp_bytes(index: int, share: Bucket) -> int:
        # What the CPU kernels' passes take; other dtypes go through the graph.
        known = {share.dtype, share.grad_dtype, share.state_dtype} <= {"float32", "bfloat16"}
        on_cpu = native and known and share.device.startswith("cpu")
        if needs_exchange(buckets[index]):
            return exchanged_temp_bytes(share, on_cpu) + gather_bytes(index, share)
        return part_temp_bytes(share, kernel_of, on_cpu)

    def weight(index: int, share: Bucket) -> int:
        # Two bounds as one: what is gathered counts by how much more precious it is.
        return max(
            temp_bytes(index, share), gather_bytes(index, share) * rules.max_temp_bytes // rules.max_gather_bytes
        )

    cut = cut_buckets(local, rules.max_temp_bytes, weight)
    parts = plan_exchanges(buckets, cut, choices, rules)
    parts = order_parts(buckets, parts, rules.hardware_of)
    stretches = [resolve_part(local, part).bucket for part in parts]
    sizes = [temp_bytes(part.bucket, share) for part, share in zip(parts, stretches, strict=True)]
    weights = [weight(part.bucket, share) for part, share in zip(parts, stretches, strict=True)]
    batches: list[Batch] = []
    waves: list[Wave] = []
    for wave in fill_waves(weights, rules.max_temp_bytes):
        made = make_batches(local, parts, wave, choices, len(batches))
        which = tuple(range(len(batches), len(batches) + len(made)))
        waves.append(Wave(parts=wave, batches=which, temp_bytes=sum(sizes[i] for i in wave)))
        batches += made
    plan = replace(start, parts=parts, batches=tuple(batches), waves=tuple(waves))
    return replace(plan, collectives=promised_collectives(plan))
