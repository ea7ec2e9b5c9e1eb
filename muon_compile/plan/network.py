"""What joins the ranks of a machine, as plain data: levels nested in one another, and the planes that they lie on."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from muon_compile.spec import MeshSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a network: units of ``ranks`` ranks whose parts, the units of the level below, it joins.

    Args:
        name: A unit's name, such as ``"node"``.
        ranks: How many ranks one unit holds; None: all there are, which only the outermost level may say.
        latency_seconds: What a message of no bytes takes between two parts of a unit, software included.
        bytes_per_second: What one rank sends, one way, while all of the unit's ranks send at once.
        plane: Name of the plane that it lies on.

    Raises:
        ValueError: A figure is not positive.
    """

    name: str
    ranks: int | None = None
    latency_seconds: float
    bytes_per_second: float
    plane: str

    def __post_init__(self) -> None:
        if self.ranks is not None:
            _check_count(f"Level.ranks of {self.name!r}", self.ranks)
        for field in ("latency_seconds", "bytes_per_second"):
            _check_rate(f"Level.{field} of {self.name!r}", getattr(self, field))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One physical network that levels lie on, and how many connections one of its devices can hold.

    Args:
        name: Such as ``"infiniband"``.
        max_queue_pairs: Most queue pairs that one rank's device holds open; None: no limit is known, or there are none.
        queue_pairs_per_connection: Queue pairs that the library opens on each side for a pair of ranks that talk.

    Raises:
        ValueError: A count is not positive.
    """

    name: str
    max_queue_pairs: int | None = None
    queue_pairs_per_connection: int = 1

    def __post_init__(self) -> None:
        if self.max_queue_pairs is not None:
            _check_count(f"Plane.max_queue_pairs of {self.name!r}", self.max_queue_pairs)
        _check_count(f"Plane.queue_pairs_per_connection of {self.name!r}", self.queue_pairs_per_connection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A machine's network: ranks are numbered so that rank ``r`` sits in unit ``r // level.ranks`` of each level.

    Args:
        levels: Innermost first; each level's units are made of whole units of the one before.
        planes: The planes that they lie on.
        shares_connections: All collectives of a group use the same connections, whatever their algorithm, as gloo's do;
            else each algorithm opens its own, as NCCL's do.

    Raises:
        ValueError: Levels do not nest, or planes are unknown or twice there.
    """

    levels: tuple[Level, ...]
    planes: tuple[Plane, ...]
    shares_connections: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        object.__setattr__(self, "planes", tuple(self.planes))
        if not self.levels:
            raise ValueError("Network.levels: expected at least one Level, innermost first, got none.")
        _check_names("Network.levels", [level.name for level in self.levels])
        planes = [plane.name for plane in self.planes]
        _check_names("Network.planes", planes)
        for level in self.levels:
            if level.plane not in planes:
                raise ValueError(
                    f"Level.plane of {level.name!r}: expected one of Network.planes, {planes}, got {level.plane!r}."
                )
        for inner, outer in pairwise(self.levels):
            _check_nested(inner, outer)

    def plane(self, name: str) -> Plane:
        """The plane of that name, which a level of this network has."""
        return next(plane for plane in self.planes if plane.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks ``0, stride, 2 stride, ...`` along one axis of a row-major mesh, whose last axis has stride 1.

    Args:
        size: How many ranks.
        stride: From one to the next.

    Raises:
        ValueError: One of them is not positive.
    """

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        _check_count("Group.size", self.size)
        _check_count("Group.stride", self.stride)

    @staticmethod
    def along(mesh: MeshSpec, axis: str) -> Group:
        """The ranks along one axis of a mesh, the first of its groups."""
        names = [name for name, _ in mesh.axes]
        inner = [size for _, size in mesh.axes[names.index(axis) + 1 :]]
        return Group(size=dict(mesh.axes)[axis], stride=math.prod(inner))

    @property
    def last(self) -> int:
        """Its last rank's number."""
        return (self.size - 1) * self.stride


def peers_by_level(network: Network, group: Group) -> tuple[int, ...]:
    """Of one rank's ``size - 1`` peers, how many are first met at each level, innermost first.

    The rank is the last one: where a group fills its last unit only in part, nobody has fewer peers nearby.

    Raises:
        ValueError: The group has ranks beyond the network's outermost level.
    """
    return _steps(nearby(network, group))


def nearby(network: Network, group: Group) -> tuple[int, ...]:
    """Members of the group in the last one's own unit of each level, itself included."""
    _check_held(network, group)
    firsts = [group.last // level.ranks * level.ranks if level.ranks else 0 for level in network.levels]
    return tuple(group.size - -(-first // group.stride) for first in firsts)


def fullest(network: Network, group: Group) -> tuple[int, ...]:
    """Most members of the group that one unit of each level holds: those in the first one's."""
    _check_held(network, group)
    return tuple(
        min(group.size, -(-level.ranks // group.stride)) if level.ranks else group.size for level in network.levels
    )


def units(network: Network, group: Group) -> tuple[int, ...]:
    """How many units of each level the group has members in."""
    _check_held(network, group)
    return tuple(min(group.size, group.last // level.ranks + 1) if level.ranks else 1 for level in network.levels)


def _steps(counts: tuple[int, ...]) -> tuple[int, ...]:
    """What each level adds to the one before, from one rank on."""
    return tuple(count - before for before, count in pairwise((1, *counts)))


def _check_held(network: Network, group: Group) -> None:
    outermost = network.levels[-1]
    if outermost.ranks is not None and group.last >= outermost.ranks:
        raise ValueError(
            f"Group: expected ranks below {outermost.ranks}, which is all that level {outermost.name!r} of the network "
            f"holds, got {group.size} ranks with stride {group.stride}; leave that level's ranks out for any number."
        )


def _check_nested(inner: Level, outer: Level) -> None:
    if inner.ranks is None:
        raise ValueError(
            f"Level.ranks of {inner.name!r}: expected a number, since level {outer.name!r} lies outside it, got None."
        )
    if outer.ranks is not None and (outer.ranks <= inner.ranks or outer.ranks % inner.ranks):
        raise ValueError(
            f"Level.ranks of {outer.name!r}: expected a multiple of the {inner.ranks} ranks of level {inner.name!r}, "
            f"got {outer.ranks}; list the levels innermost first."
        )


def _check_names(field: str, names: Collection[str]) -> None:
    if len(set(names)) != len(names) or not all(names):
        raise ValueError(f"{field}: expected different names, none of them empty, got {list(names)}.")


def _check_count(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field}: expected a positive whole number, got {value!r}.")


def _check_rate(field: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{field}: expected a positive finite number, got {value!r}.")
