"""Models of a few matrices, trained alone and over ranks with the same gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muon_compile as mc
from tests.reference import gaussian

WORLD = 4
FLOAT32 = mc.MuonConfig(ns_dtype="float32")
Shapes = Mapping[str, tuple[int, ...]]

# On 4 ranks: even rows; 2, 2, 1, 0; 1, 1, 1, 0; 1, 0, 0, 0. Names with "cols" are sharded along their columns.
MATRICES: Shapes = {
    "even": (16, 12),
    "even_too": (16, 12),
    "five": (5, 8),
    "three": (3, 8),
    "one": (1, 8),
    "wide": (8, 20),
    "cols": (6, 16),
    "experts": (6, 8, 12),
    "even_experts": (8, 8, 12),
    "vector": (9,),
}
TALL: Shapes = {"tall": (64, 12), "tall_too": (64, 12), "tall_uneven": (37, 8)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, its optimizer and how many steps it makes.

    Args:
        shapes: Names and shapes; a vector goes to AdamW, so does what ``adamw`` names.
        mesh: Sizes of the mesh's axes: 1-D shards, 2-D replicates along its first.
        plain: Parameters that stay whole on every rank.
        strategies: Of parameters in groups of their own, by name.
        compile_config: For the compiled step.
    """

    shapes: Shapes = field(default_factory=lambda: dict(MATRICES))
    mesh: tuple[int, ...] = (WORLD,)
    strategy: str = "auto"
    ns: str = "standard"
    config: mc.MuonConfig = FLOAT32
    compile_config: mc.CompileConfig = mc.CompileConfig()
    backend: str = "aot_eager"
    adamw: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    strategies: Mapping[str, str] = field(default_factory=dict)
    lr: float = 0.1
    weight_decay: float = 0.1
    steps: int = 3
    ones: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a job left on one rank, whole tensors by name."""

    params: dict[str, Tensor]
    momenta: dict[str, Tensor]
    collectives: tuple[str, ...]
    operators: tuple[str, ...]
    strategies: dict[str, str]
    waves: int
    stats: dict[str, Any]


class Model(nn.Module):
    """Named parameters and nothing else."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(job.shapes.items()):
            value = torch.ones(shape) if job.ones else gaussian(*shape, seed=number)
            self.register_parameter(name, nn.Parameter(value.to(job.dtype)))


@functools.cache
def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """One mesh per shape: every call would make new groups."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("shard",) if len(sizes) == 1 else ("replica", "shard"))


def sharded_model(job: Job) -> Model:
    """The model under ``fully_shard``; equal on all ranks before."""
    model = Model(job)
    by_columns = {id(p) for name, p in model.named_parameters() if "cols" in name}
    plain = {p for name, p in model.named_parameters() if name in job.plain}
    fully_shard(
        model,
        mesh=mesh_of(job.mesh),
        shard_placement_fn=lambda p: Shard(1) if id(p) in by_columns else Shard(0),
        ignored_params=plain,
    )
    return model


def optimizer_of(model: Model, job: Job) -> mc.Muon:
    """Muon for matrices, AdamW for the rest."""
    groups: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    apart: list[dict[str, Any]] = []
    for name, param in model.named_parameters():
        if name in job.strategies:
            apart.append({"params": [(name, param)], "strategy": job.strategies[name]})
        else:
            groups[param.dim() > 1 and name not in job.adamw].append((name, param))
    given: list[dict[str, Any]] = [{"params": groups[True]}] if groups[True] else []
    given += apart
    if groups[False]:
        given.append({"params": groups[False], "algorithm": "adamw"})
    return mc.Muon(
        given,
        lr=job.lr,
        weight_decay=job.weight_decay,
        adamw_lr=job.lr,
        adamw_weight_decay=job.weight_decay,
        config=job.config,
        backend="aot_eager",
    )


def compiled(optimizer: mc.Muon, job: Job) -> mc.CompiledStep:
    """The job's compiled step, installed."""
    return mc.compile_step(optimizer, backend=job.backend, strategy=job.strategy, ns=job.ns, config=job.compile_config)


def give(model: nn.Module, step: int, *, missing: Sequence[str] = (), scale: float = 1.0) -> None:
    """New gradients, the same whole ones on every rank; none for the parameters in ``missing``."""
    for number, (name, param) in enumerate(model.named_parameters()):
        whole = (gaussian(*param.shape, seed=1000 * (step + 1) + number) * scale).to(param.dtype)
        if name in missing:
            param.grad = None
        elif isinstance(param, DTensor):
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        else:
            param.grad = whole


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def momenta_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every state tensor of the optimizer, whole: momenta, and AdamW's moments."""
    return {
        f"{name} {key}": whole(value)
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


def operators_of(step: mc.CompiledStep) -> tuple[str, ...]:
    """Targets of the graph's calls, in order."""
    assert step._binding is not None
    return tuple(
        str(node.target)
        for traced, _ in step._binding.graphs.values()
        for node in traced.graph.graph.nodes
        if node.op == "call_function"
    )


def finish(model: Model, optimizer: mc.Muon, step: mc.CompiledStep) -> Outcome:
    """Everything a test looks at."""
    plan = step.plan
    strategies = {
        plan.specs[index].name: part.exchange.strategy
        for part in plan.parts
        if part.exchange is not None
        for index in plan.buckets[part.bucket].params
    }
    return Outcome(
        params=params_of(model),
        momenta=momenta_of(model, optimizer),
        collectives=tuple(collective.kind for collective in plan.collectives),
        operators=operators_of(step),
        strategies=strategies,
        waves=len(plan.waves),
        stats=step.stats.as_dict(),
    )


def train(rank: int, job: Job) -> Outcome:
    """A job over the ranks."""
    model = sharded_model(job)
    optimizer = optimizer_of(model, job)
    step = compiled(optimizer, job)
    for number in range(job.steps):
        give(model, number, scale=0.0 if job.ones else 1.0)
        optimizer.step()
    return finish(model, optimizer, step)


_ALONE: dict[str, Outcome] = {}


def train_alone(job: Job) -> Outcome:
    """The same job in one process, without a mesh; nothing that is about ranks matters to it."""
    given = job.compile_config
    config = mc.CompileConfig(master_weights=given.master_weights, rounding=given.rounding)
    job = replace(job, mesh=(WORLD,), strategy="auto", backend="aot_eager", compile_config=config, plain=())
    if repr(job) not in _ALONE:
        _ALONE[repr(job)] = _train_alone(job)
    return _ALONE[repr(job)]


def _train_alone(job: Job) -> Outcome:
    model = Model(job)
    optimizer = optimizer_of(model, job)
    step = mc.compile_step(optimizer, backend="aot_eager", ns=job.ns, config=job.compile_config)
    for number in range(job.steps):
        give(model, number, scale=0.0 if job.ones else 1.0)
        optimizer.step()
    return finish(model, optimizer, step)


def raised(fn: Any, *args: Any) -> str:
    """The error that a call raises, as text; empty where it raises none."""
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal names and equal bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (actual[name].double() - tensor.double()).abs().max() if tensor.numel() else 0.0
        assert torch.equal(actual[name], tensor), f"{name}: differs by up to {float(difference):.1e}"
