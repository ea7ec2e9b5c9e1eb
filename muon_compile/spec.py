"""Plain data about parameters, meshes and collectives. No torch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from muon_compile.config import AdamWConfig, Config, LionConfig, MuonConfig

Algorithm = Literal["muon", "adamw", "lion"]
CONFIGS: dict[Algorithm, type[Config]] = {"muon": MuonConfig, "adamw": AdamWConfig, "lion": LionConfig}
Rounding = Literal["nearest", "stochastic", "master"]
FLOAT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """A device mesh: the name and the size of every axis, outermost first.

    Args:
        axes: Name and size of every axis; a rank's number counts the last one fastest.
        name: Tells meshes of equal axes apart that one plan has parameters on.

    Raises:
        ValueError: An axis has no name, a name twice, or a size below 1.
    """

    axes: tuple[tuple[str, int], ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names) or not all(names):
            raise ValueError(f"MeshSpec.axes: expected a distinct name for every axis, got {names}.")
        for name, size in self.axes:
            if size < 1:
                raise ValueError(f"MeshSpec.axes[{name!r}]: expected a size >= 1, got {size}.")

    @property
    def num_ranks(self) -> int:
        """Ranks in the mesh."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return dict(self.axes)[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of a rank along every axis."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """How a parameter lies on a mesh.

    Args:
        mesh: The mesh.
        axis: Mesh axis that the parameter is cut over; None: every rank holds all of it.
        dim: Dim of the parameter that is cut; None with ``axis``.
        sizes: Length along ``dim`` on every rank of ``axis``, as ``torch.chunk`` cuts it; empty with ``axis``.
        replica_axis: Mesh axis whose ranks hold copies; None where there is none.

    Raises:
        ValueError: An axis that the mesh does not have, or sizes that are not one for every rank.
    """

    mesh: MeshSpec
    axis: str | None = None
    dim: int | None = None
    sizes: tuple[int, ...] = ()
    replica_axis: str | None = None

    def __post_init__(self) -> None:
        known = dict(self.mesh.axes)
        for axis in (self.axis, self.replica_axis):
            if axis is not None and axis not in known:
                raise ValueError(f"ShardLayout: expected axes of {self.mesh.axes}, got {axis!r}.")
        if (self.axis is None) != (self.dim is None) or len(self.sizes) != (known[self.axis] if self.axis else 0):
            raise ValueError(
                f"ShardLayout: expected a dim and one size for every rank of axis {self.axis!r}, got dim {self.dim} "
                f"and sizes {self.sizes}."
            )

    def local_shape(self, shape: tuple[int, ...], coordinate: int) -> tuple[int, ...]:
        """Shape of the shard of the rank at ``coordinate`` along the axis."""
        if self.dim is None:
            return shape
        return (*shape[: self.dim], self.sizes[coordinate], *shape[self.dim + 1 :])


@functools.lru_cache(maxsize=1024)
def chunk_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """What ``torch.chunk`` gives each rank of ``length``: 5 on 4 ranks are 2, 2, 1, 0."""
    each = -(-length // ranks) if length else 0
    return tuple(max(0, min(each, length - each * rank)) for rank in range(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec:
    """One collective that the plan promises and the graph must hold, in order.

    Args:
        kind: The functional operator's name, such as ``all_gather_into_tensor``.
        axis: Mesh axis it runs over; ``"shard/node"`` the ranks of one node of it, ``"shard/peers"`` one rank of each.
        bytes_per_rank: Payload that each rank contributes, in bytes.
    """

    kind: str
    axis: str
    bytes_per_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixSpec:
    """One parameter as the planner sees it.

    Args:
        name: Unique name; owners, digests and errors use it.
        shape: Full shape of the parameter.
        dtype: dtype of the parameter, such as ``"float32"``.
        grad_dtype: dtype of its gradient; ``None`` means the parameter's.
        device: Device, such as ``"cpu"`` or ``"cuda:0"``.
        algorithm: ``"muon"``, ``"adamw"`` or ``"lion"``.
        group: Index of the hyperparameter group it belongs to.
        config: The group's mathematics; ``None`` takes what ``make_plan`` is given.
        layout: How it lies on a mesh; None: this rank alone has it.
        strategy: How its matrices are made whole where they lie on several ranks; None: as all others.

    Raises:
        ValueError: The shape, dtype, strategy or config do not fit the algorithm; the message names the parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    grad_dtype: str | None = None
    device: str = "cpu"
    algorithm: Algorithm = "muon"
    group: int = 0
    config: Config | None = None
    layout: ShardLayout | None = None
    strategy: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(d) for d in self.shape))
        if self.grad_dtype is None:
            object.__setattr__(self, "grad_dtype", self.dtype)
        for what in (self.dtype, self.grad_dtype):
            if what not in FLOAT_BYTES:
                known = ", ".join(FLOAT_BYTES)
                raise ValueError(
                    f"Parameter {self.name!r}: expected a real floating dtype ({known}), got {what}. "
                    "Leave complex, integer and quantized parameters to another optimizer."
                )
        if any(d < 0 for d in self.shape) or self.group < 0:
            raise ValueError(
                f"Parameter {self.name!r}: expected dims and a group index >= 0, "
                f"got shape {self.shape} and group {self.group}."
            )
        if self.algorithm not in CONFIGS:
            known = ", ".join(map(repr, CONFIGS))
            raise ValueError(f"Parameter {self.name!r}: algorithm: expected one of {known}, got {self.algorithm!r}.")
        if self.algorithm == "muon" and len(self.shape) < 2:
            raise ValueError(
                f"Parameter {self.name!r}: Muon takes matrices (2-D) or stacks of them, got shape {self.shape}. "
                "Put it into an AdamW group or optimizer, as muon_compile.route(model) does."
            )
        if self.algorithm != "muon" and self.strategy is not None:
            raise ValueError(
                f"Parameter {self.name!r}: strategy: only Muon exchanges matrices, so it is expected in Muon groups "
                f"alone, got {self.strategy!r} for {self.algorithm!r}."
            )
        expected = CONFIGS[self.algorithm]
        if self.config is not None and not isinstance(self.config, expected):
            raise ValueError(
                f"Parameter {self.name!r}: config: algorithm {self.algorithm!r} takes {expected.__name__}, "
                f"got {type(self.config).__name__}."
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixView:
    """How a parameter reads as matrices: ``[stacks, rows, cols]``, rows cut into blocks.

    Args:
        stacks: Independent matrices along the leading dims (experts, heads).
        rows: Rows of each of them, all blocks together.
        cols: Columns.
        blocks: Row counts of the blocks of a fused weight, in order; their sum is ``rows``.
    """

    stacks: int
    rows: int
    cols: int
    blocks: tuple[int, ...]


def matrix_view(spec: MatrixSpec, config: MuonConfig) -> MatrixView:
    """Read a parameter's shape as matrices, by the group's ``flatten``, ``num_heads`` and ``split_sizes``.

    Raises:
        ValueError: The rows do not divide into the heads or blocks; the message names the parameter.
    """
    shape = spec.shape
    flatten = len(shape) > 3 if config.flatten is None else config.flatten
    if flatten:
        stacks, rows, cols = 1, shape[0], math.prod(shape[1:])
    else:
        stacks, rows, cols = math.prod(shape[:-2]), shape[-2], shape[-1]
    if config.num_heads is not None:
        if rows % config.num_heads:
            raise ValueError(
                f"Parameter {spec.name!r}: num_heads={config.num_heads} does not divide its {rows} rows "
                f"(shape {shape}); expected a divisor."
            )
        stacks, rows = stacks * config.num_heads, rows // config.num_heads
    blocks = config.split_sizes or (rows,)
    if sum(blocks) != rows:
        raise ValueError(
            f"Parameter {spec.name!r}: split_sizes={blocks} sum up to {sum(blocks)}, but it has {rows} rows "
            f"(shape {shape}); expected block sizes that sum up to {rows}."
        )
    return MatrixView(stacks=stacks, rows=rows, cols=cols, blocks=tuple(blocks))
