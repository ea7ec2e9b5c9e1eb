"""A stand-in for another framework's distributed tensors: HyperParallel's interface, written from what it documents.

What each name mirrors, in ``hyper_parallel/core`` (``dtensor``, ``device_mesh``, ``placement_types``) and
``platform/torch/dtensor``; no code of it is here, and ``test_foreign_tensors`` compares names and parameters with it:

- ``DTensor``: a ``torch.Tensor`` made by ``Tensor._make_subclass`` over the local tensor's memory.
  ``from_local`` (static; ``run_check``, ``shape`` and ``stride`` in newer releases), ``to_local`` (the very local
  tensor), ``device_mesh``, ``placements``; ``shape``, ``size``, ``numel`` (global); ``local_shape``, ``ndim``,
  ``dtype``, ``device``, ``data_ptr``, ``is_leaf``, ``retains_grad``, ``grad_fn`` (the local tensor's); ``grad`` (the
  local tensor's, to read and to set), ``requires_grad`` and ``requires_grad_`` (both tensors'), ``detach`` and ``to``
  (made anew around the local result), ``layout`` (an object of its own, not torch's), ``__torch_function__`` (its own
  operators; here all of them are refused, so that calling one is caught).
- ``DeviceMesh``: ``mesh``, ``mesh_shape``, ``mesh_dim_names``, ``rank_list``, ``ndim``, ``device_type`` (a method in
  older releases), ``size``, ``get_coordinate``, ``get_group`` (a torch process group). Compared by identity.
- ``Placement``: ``is_shard``, ``is_replicate``, ``is_partial``, ``is_ragged_shard`` (newer), ``==`` and ``hash``.
  ``Shard.dim``, ``StridedShard.split_factor`` (newer), ``Partial.reduce_op``, ``RaggedShard.dims`` and
  ``.local_units`` (newer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

# What older releases have not.
NEWER = {"StridedShard", "RaggedShard", "is_ragged_shard", "run_check", "shape", "stride"}


class Placement:
    """How a tensor lies on one mesh axis."""

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False

    def is_ragged_shard(self) -> bool:
        return False


class Shard(Placement):
    def __init__(self, dim: int) -> None:
        self._dim = dim

    @property
    def dim(self) -> int:
        return self._dim

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or self._dim == dim

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return self._dim

    def __repr__(self) -> str:
        return f"Shard(dim={self._dim})"


class StridedShard(Shard):
    def __init__(self, dim: int, split_factor: int) -> None:
        super().__init__(dim)
        self._split_factor = split_factor

    @property
    def split_factor(self) -> int:
        return self._split_factor

    def __repr__(self) -> str:
        return f"StridedShard(dim={self._dim}, split_factor={self._split_factor})"


class Replicate(Placement):
    def is_replicate(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return -1

    def __repr__(self) -> str:
        return "Replicate()"


class Partial(Placement):
    def __init__(self, reduce_op: str = "sum") -> None:
        self._reduce_op = reduce_op

    @property
    def reduce_op(self) -> str:
        return self._reduce_op

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or self._reduce_op == reduce_op

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partial) and self._reduce_op == other.reduce_op

    def __hash__(self) -> int:
        return hash(self._reduce_op)

    def __repr__(self) -> str:
        return f"Partial(reduce_op={self._reduce_op!r})"


class RaggedShard(Placement):
    def __init__(self, dims: tuple[int, ...], local_units: tuple[int, ...]) -> None:
        self._dims, self._local_units = dims, local_units

    @property
    def dims(self) -> tuple[int, ...]:
        return self._dims

    @property
    def local_units(self) -> tuple[int, ...]:
        return self._local_units

    def is_ragged_shard(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self._dims, self._local_units))

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self._dims}, local_units={self._local_units})"


class DeviceMesh:
    """Ranks in an array, with a group along every axis longer than 1; every rank makes the same meshes in order."""

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        _init_backend: bool = True,
    ) -> None:
        self.device_type = device_type
        self.mesh = torch.tensor(mesh, dtype=torch.int32)
        self.mesh_dim_names = tuple(mesh_dim_names) if mesh_dim_names else None
        self._at = tuple((self.mesh == dist.get_rank()).nonzero()[0].tolist())
        self._groups = [self._make_group(axis) for axis in range(self.ndim)] if _init_backend else []

    def _make_group(self, axis: int) -> Any:
        mine = None
        for line in self.mesh.movedim(axis, -1).reshape(-1, self.mesh.shape[axis]).tolist():
            if len(line) > 1:
                group = dist.new_group(sorted(line))
                mine = group if dist.get_rank() in line else mine
        return mine

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    @property
    def rank_list(self) -> tuple[int, ...]:
        return tuple(self.mesh.flatten().tolist())

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        return self.mesh.numel() if mesh_dim is None else self.mesh.shape[mesh_dim]

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self._at

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        assert isinstance(mesh_dim, int) and self._groups[mesh_dim] is not None
        return self._groups[mesh_dim]

    def __repr__(self) -> str:
        return f"DeviceMesh({self.mesh_shape}, {self.mesh_dim_names}, {self.rank_list})"


class DTensor(Tensor):
    """One rank's part of a larger tensor."""

    _local_tensor: Tensor

    def __new__(
        cls,
        local_tensor: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: tuple[int, ...] | None = None,
    ) -> DTensor:
        made = Tensor._make_subclass(cls, local_tensor, local_tensor.requires_grad)
        made._local_tensor = local_tensor
        made._device_mesh, made._placements = device_mesh, tuple(placements)
        even = list(local_tensor.shape)
        for size, placement in zip(device_mesh.mesh_shape, made._placements, strict=False):
            if isinstance(placement, Shard):
                even[placement.dim] *= size
        made._global_shape = tuple(even if shape is None else shape)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on a foreign tensor; expected to_local() first")

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        run_check: bool = False,
        shape: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> DTensor:
        return DTensor(local_tensor, device_mesh, placements, shape)

    def _again(self, local: Tensor) -> DTensor:
        return DTensor(local, self._device_mesh, self._placements, self._global_shape)

    def to_local(self) -> Tensor:
        return self._local_tensor

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._placements

    @property
    def layout(self) -> object:  # type: ignore[override]
        return "a layout of its own"

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._global_shape

    def size(self, dim: int | None = None) -> Any:
        return self._global_shape if dim is None else self._global_shape[dim]

    def numel(self) -> int:
        return math.prod(self._global_shape)

    @property
    def local_shape(self) -> torch.Size:
        return self._local_tensor.shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self._local_tensor.ndim

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._local_tensor.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._local_tensor.device

    def data_ptr(self) -> int:
        return self._local_tensor.data_ptr()

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._local_tensor.is_leaf

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local_tensor.retains_grad

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self._local_tensor.grad_fn

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return self._local_tensor.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._local_tensor.grad = value

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._local_tensor.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        self._local_tensor.requires_grad_(requires_grad)
        with DisableTorchFunctionSubclass():
            super().requires_grad_(requires_grad)
        return self

    def detach(self) -> DTensor:
        return self._again(self._local_tensor.detach())

    def to(self, *args: Any, **kwargs: Any) -> DTensor:
        return self._again(self._local_tensor.to(*args, **kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DTensor({self._local_tensor}, {self._device_mesh}, {self._placements})"
