"""The flat inputs of a step's graph: their order and names, and fake ones where there are no live parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from muon_compile.build.probes import COLUMNS
from muon_compile.build.pure import bucket_state_shapes, rank_places
from muon_compile.build.step import run_step
from muon_compile.lower.backends import hyper_dtype, trace_for
from muon_compile.lower.trace import InputSpec, TracedStep
from muon_compile.plan.exchange import Place
from muon_compile.plan.localize import localize
from muon_compile.plan.plan import Plan
from muon_compile.plan.sharding import promised_collectives
from muon_compile.run.hyper import hyper_entries


def buckets_by_device(plan: Plan) -> dict[str, list[int]]:
    """Bucket indices by device, in the order in which presence vectors list them."""
    found: dict[str, list[int]] = {}
    for index, bucket in enumerate(plan.buckets):
        found.setdefault(bucket.device, []).append(index)
    return found


def input_spec(plan: Plan, kind: str, agreement: str | None, probes: bool = False) -> InputSpec:
    """Order and names of the graph's flat inputs.

    Args:
        plan: The plan, as a rank runs it.
        kind: ``"all"``: every gradient is there; ``"masked"``: a mask says which are.
        agreement: Device of the bool that the ranks' agreement is left in; None where nothing is exchanged.
        probes: The step leaves its probes' sums in a table per device.
    """
    numbers = range(len(plan.specs))
    state = tuple((i, name) for i, bucket in enumerate(plan.buckets) for name in bucket_state_shapes(bucket))
    hyper = tuple(hyper_entries(plan).items())
    by_device = tuple((d, tuple(b)) for d, b in buckets_by_device(plan).items())
    presence, tables = by_device if kind == "masked" else (), by_device if probes else ()
    names = [f"param_{i}" for i in numbers]
    names += [f"{plan.buckets[index].name}_{name}" for index, name in state]
    names += [] if agreement is None else ["agreement"]
    skipped = plan.buckets[0].device if plan.skip_nonfinite else None
    names += [] if skipped is None else ["skipped"]
    watched = plan.watched_norms()
    names += ["vanished"] if watched else []
    names += [f"probes_{i}" for i in range(len(tables))]
    names += [f"hyper_{i}" for i in range(len(hyper))]
    names += [f"grad_{i}" for i in numbers] + [f"presence_{i}" for i in range(len(presence))]
    return InputSpec(
        names=tuple(names),
        num_params=len(plan.specs),
        state=state,
        agreement=agreement,
        hyper=hyper,
        presence=presence,
        probes=tables,
        skipped=skipped,
        vanished=(plan.buckets[watched[0]].device, watched) if watched else None,
    )


def fake_inputs(plan: Plan, spec: InputSpec, hyper: torch.dtype) -> tuple[Tensor, ...]:
    """Fake tensors like a rank's inputs, for tracing a plan whose parameters are nowhere.

    Args:
        plan: The plan, as the rank runs it.
        spec: Order of the inputs.
        hyper: dtype of the hyperparameter vectors.
    """

    def empty(shape: tuple[int, ...], dtype: str, device: str) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    bucket_of = {i: bucket for bucket in plan.buckets for i in bucket.params}
    params = [bucket_of[i] for i in range(len(plan.specs))]
    with FakeTensorMode(shape_env=ShapeEnv()):
        made = [empty(bucket.shape, bucket.dtype, bucket.device) for bucket in params]
        for index, name in spec.state:
            shape, dtype = bucket_state_shapes(plan.buckets[index])[name]
            made.append(empty(shape, dtype, plan.buckets[index].device))
        made += [] if spec.agreement is None else [empty((), "bool", spec.agreement)]
        made += [] if spec.skipped is None else [empty((), "int32", spec.skipped)]
        made += [] if spec.vanished is None else [empty((len(spec.vanished[1]),), "int32", spec.vanished[0])]
        made += [
            torch.empty((len(buckets), len(COLUMNS)), dtype=hyper, device=device) for device, buckets in spec.probes
        ]
        made += [torch.empty(len(entries), dtype=hyper, device=device) for device, entries in spec.hyper]
        made += [empty(bucket.shape, bucket.grad_dtype, bucket.device) for bucket in params]
        for device, buckets in spec.presence:
            made.append(empty((sum(plan.buckets[i].size for i in buckets),), "bool", device))
    return tuple(made)


def trace_plan(
    plan: Plan,
    *,
    backend: str,
    rank: int = 0,
    groups: Mapping[str, str] | None = None,
    kind: str | None = None,
    stack_traces: bool = False,
    probes: bool = False,
) -> tuple[Plan, TracedStep]:
    """Trace a rank's step of a plan without its parameters: to look at its graph where it could not run.

    Args:
        plan: The plan.
        backend: Name; of ``"torchair"`` nothing need be installed.
        rank: Rank within the plan's mesh.
        groups: Name of that rank's process group, by mesh axis that matrices are exchanged over.
        kind: ``"all"`` or ``"masked"``; None: the one that a step with every gradient runs.
        stack_traces: Keep with every node the lines that emitted it.
        probes: With the probes.

    Returns:
        The plan as the rank runs it, and the traced step.
    """
    local, places = rank_plan(plan, rank, groups or {})
    agreement = local.buckets[0].device if local.exchanges else None
    spec = input_spec(local, kind or ("masked" if places else "all"), agreement, probes)
    inputs = fake_inputs(local, spec, hyper_dtype(backend))
    return local, trace_for(backend, local, spec, inputs, run_step, places, stack_traces=stack_traces)


def rank_plan(plan: Plan, rank: int, groups: Mapping[str, str]) -> tuple[Plan, dict[int, Place]]:
    """The plan as one rank runs it, and where that rank stands in every part that is exchanged."""
    places = rank_places(plan, rank, groups)
    local = localize(plan, lambda layout: layout.mesh.coordinates(rank)[layout.axis or ""])
    return replace(local, collectives=promised_collectives(local, places)), places
