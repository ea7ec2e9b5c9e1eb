"""Parameters of torch's DTensor, of the stand-in and of the real HyperParallel, trained alike."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import muon_compile as mc
from muon_compile.distributed import local_tensor
from tests.dist import foreign
from tests.dist.models import mesh_of as torch_mesh
from tests.reference import gaussian

SOURCE = "HYPER_PARALLEL_SOURCE"
# On 4 ranks 5 rows are 2, 2, 1, 0, and one row is 1, 0, 0, 0. Names with "cols" are cut along their columns; vectors
# and what is called "table" go to AdamW.
EVEN = {"even": (16, 12), "even_too": (16, 12), "wide": (8, 20), "cols": (6, 16), "table": (8, 4), "vector": (8,)}
UNEVEN = {"five": (5, 8), "three": (3, 8), "one": (1, 8), "nine": (9, 6), "odd_cols": (6, 15), "odd_vector": (9,)}
SHAPES = EVEN | UNEVEN
MESHES = [(2, (2,)), (4, (4,)), (4, (2, 2))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Parameters on a mesh, and how they are trained.

    Args:
        kind: Whose tensors: ``"torch"``, ``"foreign"`` (the stand-in) or ``"hyper_parallel"`` (the real ones).
        mesh: Sizes of its axes: 1-D shards, 2-D replicates along its first.
        grads: ``"plain"`` local tensors, or ``"alike"``, distributed as the parameters are.
    """

    kind: str = "foreign"
    mesh: tuple[int, ...] = (4,)
    strategy: str = "auto"
    grads: str = "plain"
    shapes: tuple[str, ...] = tuple(SHAPES)
    steps: int = 3


@functools.cache
def real() -> Any:
    """The real package's classes; or why there are none, as text."""
    os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")
    found: dict[str, Any] = {}
    before = list(sys.path)
    sys.path += [os.environ[SOURCE]] if SOURCE in os.environ else []
    try:
        for module in ("dtensor", "device_mesh", "placement_types"):
            try:
                found |= vars(importlib.import_module(f"hyper_parallel.core.dtensor.{module}"))
            except ModuleNotFoundError:  # an older release
                found |= vars(importlib.import_module(f"hyper_parallel.core.{module}"))
    except ImportError as error:
        return f"no HyperParallel here ({error}); name its source tree by {SOURCE}"
    finally:
        sys.path[:] = before  # the tree has a package called tests, which would hide this one
    return types.SimpleNamespace(**found)


@functools.cache
def mesh_of(kind: str, sizes: tuple[int, ...]) -> Any:
    names = ("shard",) if len(sizes) == 1 else ("replica", "shard")
    if kind == "torch":
        return torch_mesh(sizes)
    ranks = torch.arange(torch.Size(sizes).numel()).reshape(sizes).tolist()
    return (foreign if kind == "foreign" else real()).DeviceMesh("cpu", ranks, mesh_dim_names=names)


def distributed(whole: Tensor, case: Case, placements: Sequence[Any], mesh: Any = None) -> Any:
    """A tensor of the case's kind; ``placements`` are torch's."""
    mesh = mesh_of(case.kind, case.mesh) if mesh is None else mesh
    local = whole
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            parts, at = local.chunk(case.mesh[axis], placement.dim), torch_mesh(case.mesh).get_local_rank(axis)
            local = parts[at] if at < len(parts) else local.narrow(placement.dim, 0, 0)
    local = local.clone().contiguous()
    if case.kind == "torch":
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    family: Any = foreign if case.kind == "foreign" else real()
    own = [family.Shard(p.dim) if isinstance(p, Shard) else family.Replicate() for p in placements]
    shape = {"shape": tuple(whole.shape)} if "shape" in inspect.signature(family.DTensor.from_local).parameters else {}
    return family.DTensor.from_local(local, mesh, own, **shape)


def placed(name: str, case: Case) -> list[Any]:
    shard = Shard(1 if "cols" in name else 0)
    return [shard] if len(case.mesh) == 1 else [Replicate(), shard]


def make(case: Case) -> dict[str, Any]:
    return {
        name: nn.Parameter(distributed(gaussian(*SHAPES[name], seed=number), case, placed(name, case)))
        for number, name in enumerate(case.shapes)
    }


def optimizers(params: dict[str, Any]) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    rest = {name for name in params if "vector" in name or name == "table"}
    muon = torch.optim.Muon([(n, p) for n, p in params.items() if n not in rest], lr=0.1, weight_decay=0.1)
    return muon, torch.optim.AdamW([(n, p) for n, p in params.items() if n in rest], lr=0.1)


def wrapped(case: Case, params: dict[str, Any], **more: Any) -> tuple[Any, Any, mc.CompiledStep]:
    muon, adamw = optimizers(params)
    return muon, adamw, mc.compile_step(muon, adamw, backend="aot_eager", strategy=case.strategy, **more)


def give(params: dict[str, Any], case: Case, step: int, scale: float = 1.0) -> None:
    for number, (name, param) in enumerate(params.items()):
        whole = gaussian(*SHAPES[name], seed=1000 * (step + 1) + number) * scale
        grad = distributed(whole, case, placed(name, case))
        param.grad = grad if case.grads == "alike" or case.kind == "torch" else local_tensor(grad)


def go_on(case: Case, params: dict[str, Any], muon: Any, adamw: Any, steps: range) -> None:
    for step in steps:
        give(params, case, step)
        muon.step()
        adamw.step()


def locals_of(params: dict[str, Any], muon: Any, adamw: Any) -> dict[str, Tensor]:
    """This rank's part of parameters and of their state."""
    found = {name: local_tensor(p).detach().clone() for name, p in params.items()}
    for name, p in params.items():
        entry = muon.state.get(p) or adamw.state.get(p) or {}
        found |= {f"{name} {k}": local_tensor(v).detach().clone() for k, v in entry.items()}
    return found


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


real_only = pytest.mark.skipif(isinstance(real(), str), reason=str(real()))
