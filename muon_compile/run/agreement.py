"""What ranks that exchange matrices must agree on, compared in words before anything could hang."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from muon_compile.distributed import is_distributed, read_mesh
from muon_compile.lower.compiled import CompileError


def check_groups(params: Iterable[Tensor]) -> None:
    """Refuse a mesh whose groups have other ranks than it says: it knows them by name, and they were made anew.

    Raises:
        RuntimeError: Names the group, and the ranks.
        NotImplementedError: A group has the ranks in another order than the mesh, so in which order shards are.
    """
    for origin in {id(p.device_mesh): p.device_mesh for p in params if is_distributed(p)}.values():  # type: ignore[attr-defined]
        mesh = read_mesh(origin)
        for axis, size in enumerate(mesh.shape if mesh.coordinate is not None else ()):
            if size == 1:
                continue
            line, group = mesh.line(axis), mesh.group(axis)
            ranks = dist.get_process_group_ranks(group)
            if sorted(ranks) != sorted(line):
                raise RuntimeError(
                    f"The process group {group.group_name!r} of a parameter's mesh was made anew: expected ranks "
                    f"{line}, got {ranks}; nothing has changed. Make mesh, model and optimizer anew."
                )
            if ranks != line:
                raise NotImplementedError(
                    f"Axis {mesh.names[axis]!r} of a parameter's mesh: expected its process group "
                    f"{group.group_name!r} to have the ranks in the mesh's order {line}, got {ranks}; make the mesh "
                    "of ranks that ascend."
                )


def from_first_rank(value: Any, groups: Sequence[ProcessGroup]) -> Any:
    """The value of the rank that is first in every group: figures that decide a plan must be the same everywhere."""
    for group in reversed(groups):
        box = [value]
        with _told(group):
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
        value = box[0]
    return value


@contextmanager
def _told(group: ProcessGroup) -> Iterator[None]:
    """Say what ranks were doing when talking about the plan failed; a backend knows of sockets only."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"Planning the step with ranks {dist.get_process_group_ranks(group)} failed; nothing has changed here. "
            "A rank is gone, or did not plan as well: what changes a plan (a parameter, a dtype, a config) must change "
            f"on all ranks before the same step. {type(error).__name__}: {error}"
        ) from error


def compare(what: str, mine: str, detail: Sequence[str], groups: Sequence[ProcessGroup]) -> None:
    """Compare a digest over all groups; every rank of every group that is affected raises.

    Args:
        what: What is compared, for the message.
        mine: This rank's digest.
        detail: Lines behind the digest, of which the first that differs is named.
        groups: The groups, in an order that all ranks share.

    Raises:
        RuntimeError: Some ranks differ; names the first difference.
    """
    problem: str | None = None
    for group in groups:
        rows: list[Any] = [None] * dist.get_world_size(group)
        with _told(group):
            dist.all_gather_object(rows, (mine, problem, list(detail) if problem is None else []), group=group)
        # A problem found in one group travels on, so that nobody is left waiting in the next one.
        known = next((row[1] for row in rows if row[1] is not None), None)
        problem = problem or known or _difference(what, rows, group)
    if problem is not None:
        raise RuntimeError(problem)


def _difference(what: str, rows: Sequence[tuple[str, Any, list[str]]], group: ProcessGroup) -> str | None:
    first = rows[0]
    for rank, row in enumerate(rows):
        if row[0] == first[0]:
            continue
        a, b = dist.get_global_rank(group, 0), dist.get_global_rank(group, rank)
        pairs = zip([*first[2], ""], [*row[2], ""], strict=False)
        one, other = next(((x, y) for x, y in pairs if x != y), (first[0], row[0]))
        return (
            f"Ranks {a} and {b} disagree on the step's {what}; expected the same on all ranks of their group. "
            f"Rank {a} has {one!r}, rank {b} has {other!r}. Nothing has changed."
        )
    return None


def exchange_outcomes(
    error: Exception | None,
    sequences: Mapping[str, Sequence[str]],
    groups: Sequence[ProcessGroup],
    what: str = "order of collectives",
) -> None:
    """Tell the other ranks whether compiling worked, and compare the order of collectives, or ``what`` is given.

    Raises:
        CompileError: It failed here, or on another rank; or the sequences differ.
    """
    mine = None if error is None else f"{type(error).__name__}: {error}"
    problem = None if mine is None else f"rank {dist.get_rank()} failed to compile its step: {mine}"
    for group in groups:
        sequence = sequences.get(group.group_name, [])
        digest = hashlib.sha256("\n".join(sequence).encode()).hexdigest()
        rows: list[Any] = [None] * dist.get_world_size(group)
        with _told(group):
            dist.all_gather_object(rows, (digest, problem, list(sequence)), group=group)
        known = next((row[1] for row in rows if row[1] is not None), None)
        problem = problem or known or _difference(what, rows, group)
    if error is not None:
        raise error
    if problem is not None:
        raise CompileError(f"The step cannot run: {problem}")
