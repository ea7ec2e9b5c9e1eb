"""What ``CompiledStep.probes()`` reads: sums that the step left on its devices, made into figures for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from muon_compile.build.probes import COLUMNS
from muon_compile.layout import Meshes
from muon_compile.plan.plan import Bucket, Plan
from muon_compile.spec import Algorithm, MeshSpec

FIGURES = ("orthogonality_error", "update_rms", "weight_rms", "momentum_rms", "decay_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketProbes:
    """The health of one bucket in one step, over those of its parameters that had a gradient.

    All but the names are None where there is nothing to say: no parameter had a gradient.

    Args:
        name: The bucket's name in the plan.
        algorithm: ``"muon"`` or ``"adamw"``.
        params: Names of all of its parameters.
        orthogonality_error: ``||X X^T - I||_F / sqrt(r)`` of the orthogonalized directions X with r rows, r the shorter
            side; root of the mean square over matrices, estimated. None with AdamW.
        update_rms: Root mean square of what the update added, learning rate and scale included, decay not.
        weight_rms: The same of the parameters before the step.
        momentum_rms: The same of the momentum after the step; with AdamW of the first moment.
        decay_share: ``|decay| / (|decay| + |update|)`` in Frobenius norms; None where both are 0.
    """

    name: str
    algorithm: Algorithm
    params: tuple[str, ...]
    orthogonality_error: float | None
    update_rms: float | None
    weight_rms: float | None
    momentum_rms: float | None
    decay_share: float | None

    def as_dict(self) -> dict[str, float]:
        """The figures that there are, by name."""
        return {name: value for name in FIGURES if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What one step was like.

    Args:
        step: Steps that the compiled step had done with this one.
        reduced: The figures are of whole parameters; else of what this rank holds of them and orthogonalized itself.
        buckets: One entry per bucket of the plan, in its order.
    """

    step: int
    reduced: bool
    buckets: tuple[BucketProbes, ...]

    def scalars(self) -> dict[str, float]:
        """The figures by ``bucket/figure``, for a writer of logs."""
        return {f"{b.name}/{name}": value for b in self.buckets for name, value in b.as_dict().items()}


class ProbeTables:
    """The tensors that a step leaves its sums in, one per device, ``[buckets, len(COLUMNS)]``."""

    def __init__(self, by_device: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        self._buckets = list(by_device.values())
        self.tensors = [
            torch.zeros((len(buckets), len(COLUMNS)), dtype=dtype, device=device)
            for device, buckets in by_device.items()
        ]
        # Steps that were done with the one that the tables are of; None before the first.
        self.step: int | None = None

    def read(self, plan: Plan, meshes: Meshes, *, reduce: bool) -> Probes:
        """Wait for the device, and for the other ranks where ``reduce`` asks them, and make figures of the sums."""
        assert self.step is not None
        rows: dict[int, Tensor] = {}
        for table, buckets in zip(self.tensors, self._buckets, strict=True):
            rows.update(zip(buckets, table.clone().unbind(0), strict=True))
        shared = _shared(plan)
        for (mesh, axes), members in shared.items() if reduce else ():
            total = torch.stack([rows[index] for index in members])
            for axis in axes:
                dist.all_reduce(total, group=meshes.group(mesh, axis))
            rows.update(zip(members, total.unbind(0), strict=True))
        values = {index: row.tolist() for index, row in rows.items()}
        figures = tuple(_figures(plan, bucket, values[index]) for index, bucket in enumerate(plan.buckets))
        return Probes(step=self.step, reduced=reduce or not shared, buckets=figures)


def _shared(plan: Plan) -> dict[tuple[MeshSpec, tuple[str, ...]], list[int]]:
    """Buckets that ranks share, by mesh and axes, in an order that is the same on every rank.

    Replicas are added up too: each may have orthogonalized some of the matrices. What they all count stays a ratio.
    """
    found: dict[tuple[MeshSpec, tuple[str, ...]], list[int]] = {}
    for index, bucket in enumerate(plan.buckets):
        layout = bucket.layout
        if layout is not None:
            axes = tuple(axis for axis in (layout.axis, layout.replica_axis) if axis is not None)
            found.setdefault((layout.mesh, axes), []).append(index)
    return {key: members for key, members in found.items() if key[1]}


def _figures(plan: Plan, bucket: Bucket, sums: Sequence[float]) -> BucketProbes:
    of = dict(zip(COLUMNS, sums, strict=True))
    elements, moved = of["elements"], math.sqrt(of["decay"]) + math.sqrt(of["update"])

    def root_mean(name: str, count: float) -> float | None:
        return math.sqrt(of[name] / count) if count else None

    return BucketProbes(
        name=bucket.name,
        algorithm=bucket.algorithm,
        params=tuple(plan.specs[index].name for index in bucket.params),
        orthogonality_error=root_mean("squared_error", of["matrices"]),
        update_rms=root_mean("update", elements),
        weight_rms=root_mean("weight", elements),
        momentum_rms=root_mean("momentum", elements),
        decay_share=math.sqrt(of["decay"]) / moved if moved else None,
    )
