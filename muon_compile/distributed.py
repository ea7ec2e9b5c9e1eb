"""What a distributed tensor is: torch's DTensor, or another framework's of the same interface, which is never imported.

Another framework's has a callable ``to_local`` and ``device_mesh`` and ``placements``; its ``shape`` is the global one.
What operators do with it is its framework's own matter, so none is ever called on it, only on its local tensor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from muon_compile.spec import chunk_sizes


def is_foreign(tensor: object) -> bool:
    """Whether this is another framework's distributed tensor."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or isinstance(tensor, DTensor) or not isinstance(tensor, Tensor):
        return False
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    return mesh is not None and placements is not None and callable(getattr(tensor, "to_local", None))


def is_distributed(tensor: object) -> bool:
    """Whether a tensor is one rank's part of a larger one, and says so."""
    return isinstance(tensor, DTensor) or is_foreign(tensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's memory of a parameter, gradient or state: the shard of a distributed tensor, or the tensor itself."""
    local: Tensor
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor  # to_local() goes through autograd
    elif is_foreign(tensor):
        local = tensor.to_local()  # type: ignore[attr-defined]
    else:
        return tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A device mesh read into facts, whoever made it.

    Args:
        shape: Ranks along every axis.
        names: Names of the axes.
        ranks: All of its ranks, the last axis counting fastest.
        coordinate: Where this rank is along every axis; None: not in it.
        device_type: Kind of its devices.
        origin: The mesh itself.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    device_type: str
    origin: Any

    def group(self, axis: int) -> ProcessGroup:
        """The process group of an axis that this rank is in.

        Raises:
            TypeError: The mesh has something else there.
        """
        found = self.origin.get_group(axis)
        if not isinstance(found, ProcessGroup):
            raise TypeError(
                f"Axis {self.names[axis]!r} of {self.origin!r}: expected get_group({axis}) to give a torch process "
                f"group, got {found!r}."
            )
        return found

    def line(self, axis: int) -> list[int]:
        """The ranks along an axis that this one is on, by their index along it."""
        assert self.coordinate is not None
        stride = math.prod(self.shape[axis + 1 :])
        at = sum(c * math.prod(self.shape[i + 1 :]) for i, c in enumerate(self.coordinate) if i != axis)
        return [self.ranks[at + stride * index] for index in range(self.shape[axis])]

    def is_same(self, other: Mesh) -> bool:
        """Whether both are equal; of meshes that are not torch's, whether axes, names and ranks are."""
        if self.origin is other.origin or bool(self.origin == other.origin):
            return True
        foreign = not any(isinstance(m.origin, torch.distributed.device_mesh.DeviceMesh) for m in (self, other))
        return foreign and (self.shape, self.names, self.ranks) == (other.shape, other.names, other.ranks)


def read_mesh(mesh: Any) -> Mesh:
    """The facts of a mesh of torch's or of another framework's."""
    shape = getattr(mesh, "mesh_shape", None) or mesh.shape
    ranks = getattr(mesh, "rank_list", None) or mesh.mesh.flatten().tolist()
    at, kind = mesh.get_coordinate(), mesh.device_type
    return Mesh(
        shape=tuple(map(int, shape)),
        names=tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(len(shape)))),
        ranks=tuple(map(int, ranks)),
        coordinate=None if at is None else tuple(map(int, at)),
        device_type=str(kind() if callable(kind) else kind),  # a method in some frameworks
        origin=mesh,
    )


def placements_of(tensor: Any) -> tuple[Any, ...]:
    """Placements as torch's ``Shard`` and ``Replicate``; one that means neither is left as it is."""
    given = tuple(tensor.placements)
    if isinstance(tensor, DTensor):
        return given
    sizes, dims = read_mesh(tensor.device_mesh).shape, len(tensor.shape)
    kinds = [_plain_placement(placement, dims) for placement in given]
    for axis, placement in enumerate(given):
        # Its rows are interleaved only where another axis cuts the same dim.
        others = [k for i, k in enumerate(kinds) if i != axis and (i >= len(sizes) or sizes[i] > 1)]
        if getattr(placement, "split_factor", 1) != 1 and kinds[axis] in others:
            kinds[axis] = placement
    return tuple(kinds)


def _plain_placement(placement: Any, dims: int) -> Any:
    def says(name: str) -> bool:
        method = getattr(placement, name, None)
        return callable(method) and bool(method())

    if says("is_partial") or says("is_ragged_shard"):
        return placement
    if says("is_replicate"):
        return Replicate()
    if says("is_shard"):
        return Shard(placement.dim if placement.dim >= 0 else placement.dim + dims)
    return placement


def same_placements(one: Any, other: Any) -> bool:
    """Whether two distributed tensors of one framework lie alike on their meshes."""
    if tuple(one.placements) == tuple(other.placements):
        return True
    return is_foreign(one) and is_foreign(other) and placements_of(one) == placements_of(other)


def cut(shape: Sequence[int], placements: Sequence[Any], mesh: Mesh) -> list[tuple[int, int, int]]:
    """What this rank has of a shape, cut as ``torch.chunk`` cuts: dim, start and length along it, for every axis."""
    assert mesh.coordinate is not None
    found: list[tuple[int, int, int]] = []
    for size, at, placement in zip(mesh.shape, mesh.coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            sizes = chunk_sizes(shape[placement.dim], size)
            found.append((placement.dim, sum(sizes[:at]), sizes[at]))
            shape = [*shape[: placement.dim], sizes[at], *shape[placement.dim + 1 :]]
    return found


def like_param(local: Tensor, param: Tensor) -> Tensor:
    """This rank's part of a state as the parameter is: distributed alike where that is and has its shape."""
    if not is_distributed(param) or local.shape != local_tensor(param).shape:
        return local
    if is_foreign(param):
        return _like_foreign(local, param)
    assert isinstance(param, DTensor)
    mesh, placements = param.device_mesh, param.placements
    shape, stride = param.shape, param.stride()
    # A wrapper made around a view would keep its storage offset, and could be neither copied nor saved.
    made = DTensor.from_local(torch.empty_like(local), mesh, placements, run_check=False, shape=shape, stride=stride)
    made._local_tensor = local
    return made


def _like_foreign(local: Tensor, param: Any) -> Tensor:
    """By its class's ``from_local``, where that keeps memory and global shape; else the plain local tensor."""
    make = getattr(type(param), "from_local", None)
    if not callable(make):
        return local
    shape = tuple(param.shape)
    # Without it uneven shards would be taken for even ones; not every release has it.
    given = {"shape": shape} if "shape" in inspect.signature(make).parameters else {}
    made: Tensor = make(local, param.device_mesh, param.placements, **given)
    kept = is_foreign(made) and tuple(made.shape) == shape and local_tensor(made).data_ptr() == local.data_ptr()
    return made if kept else local


def own_copy(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in memory of its own, distributed as the value is."""
    if is_foreign(value):
        return like_param(local_tensor(value).detach().clone().to(dtype or value.dtype), value)
    own = value.detach().clone()
    return own if dtype is None else own.to(dtype)


def misfit(value: object, local: Tensor, param: Tensor, view: Tensor) -> str | None:
    """Why a loaded state does not fit, in words; None where it does.

    Args:
        value: What was loaded; a number has no dims.
        local: This rank's memory of the state that it goes to.
        param: Its parameter.
        view: The same state as the optimizer has it.
    """
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    if is_foreign(value) or (is_foreign(param) and isinstance(value, DTensor)):
        if type(value) is not type(param) and not (is_foreign(value) and is_foreign(param)):
            return f"expected a plain tensor or a {type(param).__name__}, got a {type(value).__name__}"
        meshes = [read_mesh(x.device_mesh) for x in (param, value)]  # type: ignore[attr-defined]
        if not meshes[0].is_same(meshes[1]) or not same_placements(value, param):
            return (
                f"expected the parameter's placements {_where(param)}, got {_where(value)}; give a plain tensor, "
                "whole or this rank's part"
            )
        whole = tuple(param.shape)
        return None if shape == whole else f"expected shape {whole}, got {shape}"
    if not is_foreign(param) or local.shape != local_tensor(param).shape:
        words = f"expected shape {tuple(view.shape)}, got {shape}; are the parameters in the saved optimizer's order?"
        return None if shape == tuple(view.shape) else words
    either = (tuple(param.shape), tuple(local.shape))
    return None if shape in either else f"expected shape {either[0]} or this rank's {either[1]}, got {shape}"


def _where(tensor: Any) -> str:
    return f"{tuple(tensor.placements)} on {tensor.device_mesh!r}"


def local_part(value: Tensor, param: Tensor, view: Tensor) -> Tensor:
    """This rank's part of a loaded state that fits: the shard of a distributed tensor, or cut out of a whole one.

    Args:
        value: What was loaded.
        param: Its parameter.
        view: The state that it goes to, as the optimizer has it.
    """
    if is_foreign(param):
        value, shape = local_tensor(value), local_tensor(param).shape
        if value.shape == shape or tuple(value.shape) != tuple(param.shape):
            return value
    elif not isinstance(view, DTensor) or not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    elif isinstance(value, DTensor):
        if value.device_mesh == param.device_mesh and tuple(value.placements) == tuple(param.placements):
            return local_tensor(value)
        return local_tensor(value.redistribute(param.device_mesh, param.placements))
    for dim, start, length in cut(value.shape, placements_of(param), read_mesh(param.device_mesh)):  # type: ignore[attr-defined]
        value = value.narrow(dim, start, length)
    return value
