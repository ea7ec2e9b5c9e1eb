"""What flows through a step, in numbers: bytes and FLOPs of every bucket by phase, and the loads of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

from muon_compile.config import AdamWConfig
from muon_compile.plan.localize import local_bucket, make_batches
from muon_compile.plan.network import Group
from muon_compile.plan.plan import Bucket, Part, Plan, numel_bytes
from muon_compile.plan.sharding import promises, rank_flops, unit_flops
from muon_compile.plan.step_cost import local_numel
from muon_compile.plan.strategies import flops_by_rank
from muon_compile.spec import MeshSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What of a bucket goes through each phase of a step.

    Args:
        momentum_bytes: Its gradients and its momentum, or AdamW's moments, on the rank with the most of them.
        send_bytes: Payload of the collectives before Newton-Schulz, of the rank with the largest.
        solve_flops: Newton-Schulz FLOPs of a rank, on average over all.
        return_bytes: Payload of the collectives after Newton-Schulz.
        update_bytes: Its parameters, on the rank with the most of them.
    """

    momentum_bytes: int
    send_bytes: int
    solve_flops: float
    return_bytes: int
    update_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Newton-Schulz FLOPs of every rank of the plan's mesh.

    Args:
        exchanged: Of matrices that ranks share out.
        own: Of matrices that lie whole on the rank.
        left_out: Names of meshes of another size, whose ranks these are not.
    """

    exchanged: tuple[int, ...]
    own: tuple[int, ...]
    left_out: tuple[str, ...]


def bucket_amounts(plan: Plan) -> list[Amounts]:
    """What of every bucket goes through each phase."""
    payload = {(bucket, kind): 0 for bucket in range(len(plan.buckets)) for kind in ("send", "return")}
    for promise in promises(plan):
        if promise.part is not None:
            payload[plan.parts[promise.part].bucket, promise.phase] += promise.spec.bytes_per_rank
    flops = [_mean(table) for table in _own_flops(plan)]
    for part in plan.parts:
        if part.exchange is not None:
            rows = flops_by_rank(part.exchange, unit_flops(part.exchange, plan.buckets[part.bucket]))
            flops[part.bucket] += _mean([value for row in rows for value in row])
    made = []
    for index, bucket in enumerate(plan.buckets):
        numel = local_numel(bucket)
        master = numel_bytes(numel, "float32") if bucket.rounding == "master" else 0
        state = _states(bucket) * numel_bytes(numel, bucket.state_dtype)
        made.append(
            Amounts(
                momentum_bytes=numel_bytes(numel, bucket.grad_dtype) + state,
                send_bytes=payload[index, "send"],
                solve_flops=flops[index],
                return_bytes=payload[index, "return"],
                update_bytes=numel_bytes(numel, bucket.dtype) + master,
            )
        )
    return made


def _states(bucket: Bucket) -> int:
    """State tensors of a parameter's size: momentum, or AdamW's moments."""
    return 2 + bucket.config.amsgrad if isinstance(bucket.config, AdamWConfig) else 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _own_flops(plan: Plan) -> list[list[int]]:
    """For every bucket the FLOPs of matrices that are not exchanged, by index along the axis that it is cut over."""
    exchanged = {part.bucket for part in plan.parts if part.exchange is not None}
    tables: list[list[int]] = []
    for index, bucket in enumerate(plan.buckets):
        if index in exchanged or bucket.view is None:
            tables.append([])
            continue
        known: dict[object, int] = {}
        table = []
        for coordinate in range(len(bucket.layout.sizes) if bucket.layout and bucket.layout.axis else 1):
            local = local_bucket(bucket, lambda _, at=coordinate: at)  # type: ignore[misc]
            alike = (local.shape, local.view)
            if alike not in known:
                whole = Part(bucket=0, start=0, stop=local.size)
                known[alike] = sum(b.flops for b in make_batches([local], [whole], [0], plan.choices, 0))
            table.append(known[alike])
        tables.append(table)
    return tables


def rank_loads(plan: Plan) -> Loads:
    """Newton-Schulz FLOPs of every rank of the plan's mesh; meshes of as many ranks number them alike."""
    mesh, ranks = plan.mesh, plan.mesh.num_ranks
    meshes = dict.fromkeys(bucket.layout.mesh for bucket in plan.buckets if bucket.layout is not None)
    exchanged, own = [0] * ranks, [0] * ranks
    for other in dict.fromkeys((mesh, *meshes)):
        if other.num_ranks == ranks:
            exchanged = list(map(add, exchanged, rank_flops(replace(plan, mesh=other))))
    for bucket, table in zip(plan.buckets, _own_flops(plan), strict=True):
        on = bucket.layout.mesh if bucket.layout is not None else mesh
        if not table or on.num_ranks != ranks:
            continue
        axis = bucket.layout.axis if bucket.layout is not None else None
        stride = Group.along(on, axis).stride if axis is not None else 1
        own = [load + table[rank // stride % len(table)] for rank, load in enumerate(own)]
    left_out = tuple(_mesh_words(other) for other in meshes if other.num_ranks != ranks)
    return Loads(exchanged=tuple(exchanged), own=tuple(own), left_out=left_out)


def _mesh_words(mesh: MeshSpec) -> str:
    return mesh.name or " x ".join(f"{size} {axis}" for axis, size in mesh.axes)
