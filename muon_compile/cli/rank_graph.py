"""The graph of a rank that is not there: traced from a plan, without parameters."""

from __future__ import annotations

import importlib.util

import torch

from muon_compile.inspect.dump import Compiled
from muon_compile.lower.backends import BACKENDS
from muon_compile.lower.compiled import CompiledGraph, CompileError
from muon_compile.plan.plan import Plan
from muon_compile.plan.strategies import NODE, PEERS
from muon_compile.run.inputs import rank_plan, trace_plan


def rank_graph(plan: Plan, rank: int, backend: str | None) -> Compiled:
    """What there is of a rank's step but the backend's code: the graph that it compiles when every gradient is there.

    Args:
        plan: The plan, of all ranks.
        rank: Rank within the plan's mesh.
        backend: Whose operators the graph is in; None: TorchAir's for NPUs, else Inductor's.

    Raises:
        ValueError: No such rank or backend, devices that this torch does not know, or kernels that are not here.
    """
    if rank >= plan.mesh.num_ranks:
        raise ValueError(f"--rank: expected one of the plan's {plan.mesh.num_ranks}, counted from 0, got {rank}.")
    devices = {bucket.device.split(":")[0] for bucket in plan.buckets}
    backend = backend or ("torchair" if "npu" in devices else "inductor")
    if backend not in BACKENDS:
        raise ValueError(f"--backend: expected one of {', '.join(BACKENDS)}, got {backend!r}.")
    if "npu" in devices and importlib.util.find_spec("torch_npu") is None:
        from muon_compile.npu.fake_device import name_fake_device

        name_fake_device()
    if "cuda" in devices and not torch.backends.cuda.is_built():
        raise ValueError(
            "--rank: expected a plan for devices that this torch knows, got one for 'cuda', and this torch is built "
            "without; install one for CUDA, leave --rank out, or plan with --hardware cpu-2core."
        )
    groups = {axis: axis for axis in _axes(plan)}
    try:
        local, traced = trace_plan(plan, backend=backend, rank=rank, groups=groups)
    except CompileError as error:
        raise ValueError(f"--rank: {error}") from error
    _, places = rank_plan(plan, rank, groups)
    nothing = CompiledGraph(run=lambda inputs: None, code={}, backend=backend, cached=False)
    return Compiled(graphs={"masked" if places else "all": (traced, nothing)}, plan=local, places=places)


def _axes(plan: Plan) -> list[str]:
    """Mesh axes that matrices are exchanged over, those within and between nodes among them."""
    axes: dict[str, None] = {}
    for part in plan.parts:
        exchange, layout = part.exchange, plan.buckets[part.bucket].layout
        if exchange is None or layout is None:
            continue
        within = (f"{exchange.shard_axis}{step}" for step in (NODE, PEERS)) if exchange.node_size else ()
        axes |= dict.fromkeys(axis for axis in (exchange.shard_axis, layout.replica_axis, *within) if axis)
    return list(axes)
