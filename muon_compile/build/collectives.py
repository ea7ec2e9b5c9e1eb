"""The collectives of a step, as functional operators: each returns a new tensor that is still on its way.

``wait`` has to be called on every one of them before it is used: a result that nobody waits for is dropped from the
graph as dead code, on that rank alone, and its peers hang. A group is given by its name, a string constant of the
graph. Every rank of a group must call the same functions in the same order, whatever its share; a share may have no
elements.

On CPUs every collective is waited for where it starts. gloo sends with the cores that compute, so nothing is gained by
more of them in flight; and it does not bear it: that of torch 2.13 corrupted the heap within 300 steps of a 2 x 2 mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Everyone's ``x`` of one shape ``[n, ...]``, in rank order: ``[size * n, ...]``."""
    return _started(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group))


def all_to_all(x: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group: str) -> Tensor:
    """Send each rank its run of ``x``, and join what came.

    Args:
        x: ``[sum(input_sizes), ...]``.
        output_sizes: Rows that come from each rank.
        input_sizes: Rows that go to each rank.
        group: Name of the process group.

    Returns:
        ``[sum(output_sizes), ...]``, in rank order.
    """
    operator = torch.ops._c10d_functional.all_to_all_single
    return _started(operator(x.contiguous(), list(output_sizes), list(input_sizes), group))


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Sum of everyone's ``x``."""
    return _started(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """This rank's run of the sum of everyone's ``x``, ``[size * n, ...]``: ``[n, ...]``."""
    return _started(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def broadcast(x: Tensor, source: int, group: str) -> Tensor:
    """The ``x`` of the rank whose index within the group is ``source``; the others' ``x`` gives the shape only."""
    return _started(torch.ops._c10d_functional.broadcast(x.contiguous(), source, group))


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """``x`` lengthened to ``size`` along ``dim`` with zeros."""
    missing = list(x.shape)
    missing[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(missing)], dim=dim) if missing[dim] else x


def gather_runs(x: Tensor, counts: Sequence[int], group: str) -> Tensor:
    """Everyone's ``x``, a run of ``counts[rank]`` rows, in a gather of runs padded to the longest; see ``joined``.

    Args:
        x: ``[counts[rank], ...]``.
        counts: Rows of each rank.
        group: Name of the process group.
    """
    return all_gather(padded(x, 0, max(counts)), len(counts), group)


def joined(runs: Tensor, counts: Sequence[int]) -> Tensor:
    """What ``gather_runs`` gave, waited for and without its padding: ``[sum(counts), ...]``, contiguous."""
    every, longest = wait(runs), max(counts)
    if min(counts) == longest:
        return every
    starts = range(0, len(counts) * longest, max(longest, 1))
    return torch.cat([every[start : start + count] for start, count in zip(starts, counts, strict=True) if count])


def wait(x: Tensor) -> Tensor:
    """The result of a collective, arrived."""
    return x if x.device.type == "cpu" else _arrived(x)


def _started(x: Tensor) -> Tensor:
    return _arrived(x) if x.device.type == "cpu" else x


def _arrived(x: Tensor) -> Tensor:
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return arrived
