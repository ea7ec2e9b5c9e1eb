"""Live parameters to plain specs; ``distributed`` says what kind of tensor a parameter is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.tensor import Replicate, Shard

from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.distributed import Mesh, cut, is_distributed, local_tensor, placements_of, read_mesh
from muon_compile.spec import Algorithm, MatrixSpec, MeshSpec, ShardLayout, chunk_sizes

# The mesh axis of plain parameters that several ranks hold copies of, in compile_step's groups=.
REPLICATE = "replicate"


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``, and so on."""
    return str(dtype).removeprefix("torch.")


def _check_placements(name: str, tensor: Any) -> None:
    """Refuse placements that the step does not know, and shards of other sizes than ``torch.chunk`` makes.

    Raises:
        TypeError: The local tensor is none.
        NotImplementedError: Names the parameter, its placements and its shard.
    """
    local, mesh, given = local_tensor(tensor), read_mesh(tensor.device_mesh), tuple(tensor.placements)
    if not isinstance(local, Tensor) or is_distributed(local):
        raise TypeError(f"Parameter {name!r}: expected to_local() to give a plain tensor, got {type(local).__name__}.")
    reason, placements = None, placements_of(tensor)
    wide = [p for p, size in zip(placements, mesh.shape, strict=False) if size > 1]
    kinds = [type(p) for p in wide]
    if len(placements) != len(mesh.shape):
        reason = f"expected {len(mesh.shape)} placements, one for every mesh axis"
    elif any(kind not in (Shard, Replicate) for kind in kinds):
        reason = "expected Shard and Replicate placements"
    elif kinds.count(Shard) > 1 or kinds.count(Replicate) > 1:
        reason = "expected at most one sharded and one replicated mesh axis"
    elif local.device.type not in (mesh.device_type, "meta"):
        reason = f"expected shards on {mesh.device_type}, the mesh's device (CPU offload is not in this version)"
    elif mesh.coordinate is not None:
        shape = list(tensor.shape)
        for dim, _, length in cut(shape, [p if type(p) is Shard else Replicate() for p in placements], mesh):
            shape[dim] = length
        if tuple(shape) != tuple(local.shape):
            reason = f"expected a local shape of {tuple(shape)}, as torch.chunk cuts {tuple(tensor.shape)} here"
    if reason is not None:
        raise NotImplementedError(
            f"Parameter {name!r}: {reason}, got {given} on a mesh of {mesh.shape}, shard of {tuple(local.shape)} on "
            f"{local.device}."
        )


class Meshes:
    """The device meshes that parameters lie on, by the names that specs know them by.

    Args:
        replicate: The ranks that hold copies of plain parameters, as under DDP; None: a plain parameter is this rank's
            own.
    """

    def __init__(self, replicate: ProcessGroup | None = None) -> None:
        self._known: list[tuple[Mesh, MeshSpec]] = []
        self._replicate = replicate

    @property
    def _plain(self) -> MeshSpec | None:
        if self._replicate is None or self._replicate.size() == 1:
            return None
        return MeshSpec(axes=((REPLICATE, self._replicate.size()),), name="plain")

    def spec(self, mesh: Any) -> MeshSpec:
        """The mesh as plain data; equal meshes have one name."""
        for known, spec in self._known:
            if known.origin is mesh:
                return spec
        read = read_mesh(mesh)
        for known, spec in self._known:
            if known.is_same(read):
                return spec
        spec = MeshSpec(axes=tuple(zip(read.names, read.shape, strict=True)), name=f"mesh{len(self._known)}")
        self._known.append((read, spec))
        return spec

    def layout(self, tensor: Any) -> ShardLayout | None:
        """How a parameter lies on its mesh; None where this rank alone has it."""
        if not is_distributed(tensor):
            plain = self._plain
            return None if plain is None else ShardLayout(mesh=plain, replica_axis=REPLICATE)
        spec = self.spec(tensor.device_mesh)
        axis: str | None = None
        dim: int | None = None
        sizes: tuple[int, ...] = ()
        replica: str | None = None
        for (name, size), placement in zip(spec.axes, placements_of(tensor), strict=True):
            if size > 1 and isinstance(placement, Shard):
                axis, dim, sizes = name, placement.dim, chunk_sizes(tensor.shape[placement.dim], size)
            elif size > 1:
                replica = name
        return ShardLayout(mesh=spec, axis=axis, dim=dim, sizes=sizes, replica_axis=replica)

    def group(self, mesh: MeshSpec, axis: str) -> ProcessGroup:
        """The process group of an axis that this rank is in."""
        if mesh == self._plain:
            assert self._replicate is not None
            return self._replicate
        (found,) = [known for known, spec in self._known if spec == mesh]
        return found.group(found.names.index(axis))

    def groups(self) -> list[ProcessGroup]:
        """The process groups of all meshes, each once, in an order that their ranks share."""
        found = [] if self._replicate is None or self._plain is None else [self._replicate]
        for mesh, _ in self._known:
            for axis, size in enumerate(mesh.shape):
                if size > 1 and mesh.group(axis) not in found:
                    found.append(mesh.group(axis))
        return found

    def ranks(self) -> list[int]:
        """All ranks of all meshes, ascending."""
        found = set() if self._replicate is None else set(dist.get_process_group_ranks(self._replicate))
        for mesh, _ in self._known:
            found |= set(mesh.ranks)
        return sorted(found)

    def coordinate(self, mesh: MeshSpec, axis: str) -> int:
        """This rank's index along an axis."""
        return dist.get_rank(self.group(mesh, axis))


def check_tensor(name: str, tensor: object, algorithm: str) -> None:
    """Refuse a parameter that the step cannot update in place.

    Raises:
        TypeError: It is no tensor.
        ValueError: It is complex, integer, sparse, non-contiguous or overlaps itself.
        NotImplementedError: It is sharded in a way that the step does not know.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"Parameter {name!r}: expected a torch.Tensor, got {type(tensor).__name__}.")
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"Parameter {name!r}: expected a parameter with a shape, got a lazy one; run the model once before."
        )
    if is_distributed(tensor):
        _check_placements(name, tensor)
        tensor = local_tensor(tensor)
    elif getattr(tensor, "placements", None) is not None:
        raise NotImplementedError(
            f"Parameter {name!r}: expected a plain tensor, a DTensor or one with to_local() and device_mesh, "
            f"got a {type(tensor).__name__} with placements {getattr(tensor, 'placements', None)}."
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"Parameter {name!r}: expected a dense tensor, got layout {tensor.layout}.")
    if not tensor.is_floating_point():
        hint = "Leave it to another optimizer."
        raise ValueError(f"Parameter {name!r}: expected a real floating dtype, got {tensor.dtype}. {hint}")
    if algorithm == "muon" and tensor.dim() < 2:
        raise ValueError(
            f"Parameter {name!r}: Muon takes matrices (2-D) or stacks of them, got shape {tuple(tensor.shape)}. "
            "Put it into an AdamW group or optimizer, as muon_compile.route(model) does."
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"Parameter {name!r}: expected contiguous memory, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; replace it by param.data = param.data.contiguous() before wrapping."
        )


def check_overlap(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that share memory; views of one flat buffer that do not overlap are fine.

    Raises:
        ValueError: Two parameters overlap; names both.
    """
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in named:
        tensor = local_tensor(tensor)
        if tensor.device.type == "meta" or tensor.numel() == 0:
            continue
        start = tensor.data_ptr()
        span = (start, start + tensor.numel() * tensor.element_size(), name)
        spans.setdefault(str(tensor.device), []).append(span)
    for found in spans.values():
        found.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(found):
            if start < end:
                raise ValueError(
                    f"Parameters {first!r} and {second!r} overlap in memory; expected distinct memory. "
                    "Give tied weights once."
                )


def inspect_params(
    named: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    *,
    config: MuonConfig | AdamWConfig | None = None,
    algorithm: Algorithm | None = None,
    group: int = 0,
) -> list[MatrixSpec]:
    """Read parameters into specs.

    Args:
        named: Pairs of name and parameter, such as ``model.named_parameters()``. A gradient that is there gives the
            gradient's dtype; otherwise it is the parameter's.
        config: The mathematics, for every one of them; None leaves it to ``make_plan``.
        algorithm: ``"muon"`` or ``"adamw"`` for every one of them; None takes Muon for two and more dims and AdamW
            for the rest (``route`` is finer: it knows embeddings and heads).
        group: Hyperparameter group of every one of them.

    Raises:
        TypeError, ValueError, NotImplementedError: A parameter that the step cannot take; names it.
    """
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    meshes, specs = Meshes(), []
    for name, tensor in pairs:
        if isinstance(config, MuonConfig):
            which: Algorithm = "muon"
        elif isinstance(config, AdamWConfig):
            which = "adamw"
        else:
            which = algorithm or ("muon" if isinstance(tensor, Tensor) and tensor.ndim >= 2 else "adamw")
        check_tensor(name, tensor, which)
        grad = tensor.grad
        specs.append(
            MatrixSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                grad_dtype=dtype_name(tensor.dtype if grad is None else grad.dtype),
                device=str(tensor.device),
                algorithm=which,
                group=group,
                config=config,
                layout=meshes.layout(tensor),
            )
        )
    check_overlap(pairs)
    return specs


def replicate_group(groups: Mapping[str, str | ProcessGroup]) -> ProcessGroup | None:
    """The process group of plain parameters' copies.

    Raises:
        ValueError: Another axis than ``"replicate"``, or no such group.
    """
    if not groups:
        return None
    if set(groups) != {REPLICATE}:
        raise ValueError(
            f"compile_step: groups: expected {{{REPLICATE!r}: group}} or none (sharded parameters know theirs), got "
            f"{dict(groups)}."
        )
    given = groups[REPLICATE]
    if isinstance(given, ProcessGroup):
        return given
    try:
        group: ProcessGroup = distributed_c10d._resolve_process_group(given)  # type: ignore[attr-defined,arg-type]
        return group
    except (RuntimeError, LookupError, ValueError, TypeError) as error:
        raise ValueError(
            f"compile_step: groups: expected a process group or the name of one, got {given!r}: {error}"
        ) from error
