"""GE's collectives (``Hcom*``), by torch's functional ones. See ``interpret`` for whose reading this is.

The group is found by the name that TorchAir gives it where the default device of its backend is the CPU.
"""

from __future__ import annotations

import math
import re

import torch
import torch.distributed as dist
from torch import Tensor

from muon_compile.npu.ops import Op
from muon_compile.npu.registry import GraphError, integers, operator, wide

# Source: encode_pg_tag_ranklist in TorchAir's hcom_utils.py.
_GROUP = re.compile(r"tag=(.*);rank_list=(\d+(?:,\d+)*)")
_SCHEDULE = ("fusion", "fusion_id")  # which collectives the device may start as one; no value depends on it
_REDUCTIONS = {"sum": "sum", "prod": "product", "min": "min", "max": "max"}


@operator("HcomAllGather", reads=("group", "rank_size"), ignored=_SCHEDULE)
def _all_gather(op: Op, x: Tensor) -> Tensor:
    group, ranks = _sized_group(op)
    return _arrived(torch.ops._c10d_functional.all_gather_into_tensor(x, ranks, group))


@operator("HcomReduceScatter", reads=("group", "rank_size", "reduction"), ignored=_SCHEDULE)
def _reduce_scatter(op: Op, x: Tensor) -> Tensor:
    group, ranks = _sized_group(op)
    if x.dim() == 0 or x.shape[0] % ranks:
        raise GraphError(f"{op}: expected rows that {ranks} ranks share alike, got a tensor of {list(x.shape)}.")
    started = torch.ops._c10d_functional.reduce_scatter_tensor(wide(x), _reduction(op), ranks, group)
    return _arrived(started).to(x.dtype)


@operator("HcomAllReduce", reads=("group", "reduction"), ignored=_SCHEDULE)
def _all_reduce(op: Op, x: Tensor) -> Tensor:
    return _arrived(torch.ops._c10d_functional.all_reduce(wide(x), _reduction(op), _group(op)[0])).to(x.dtype)


@operator("HcomBroadcast", reads=("group", "root_rank"), ignored=_SCHEDULE)
def _broadcast(op: Op, *inputs: Tensor) -> tuple[Tensor, ...]:
    root, group = op.attr("root_rank", int), _group(op)[0]
    return tuple(_arrived(torch.ops._c10d_functional.broadcast(x, root, group)) for x in inputs)


@operator("HcomAllToAll", reads=("group",))
def _all_to_all(op: Op, x: Tensor) -> Tensor:
    group, ranks = _group(op)
    if x.dim() == 0 or x.shape[0] % ranks:
        raise GraphError(f"{op}: expected rows that {ranks} ranks share alike, got a tensor of {list(x.shape)}.")
    counts = [x.shape[0] // ranks] * ranks
    return _arrived(torch.ops._c10d_functional.all_to_all_single(x, counts, counts, group))


@operator("HcomAllToAllV", reads=("group",))
def _all_to_all_counts(op: Op, x: Tensor, sent: Tensor, at: Tensor, received: Tensor, to: Tensor) -> Tensor:
    group, ranks = _group(op)
    sends, receives = integers(op, sent), integers(op, received)
    _check_counts(op, sends, integers(op, at), ranks)
    _check_counts(op, receives, integers(op, to), ranks)
    # What lies behind the last element to send stays here.
    row, arriving = math.prod(x.shape[1:]), sum(receives)
    if sum(sends) > x.numel() or (arriving % row if row else arriving):
        raise GraphError(f"{op}: {sends} elements to send and {receives} to receive do not fit {list(x.shape)}.")
    arrived = _arrived(torch.ops._c10d_functional.all_to_all_single(x.flatten()[: sum(sends)], receives, sends, group))
    return arrived.reshape(arriving // row if row else 0, *x.shape[1:])


def _check_counts(op: Op, counts: list[int], places: list[int], ranks: int) -> None:
    one_after_another = [sum(counts[:rank]) for rank in range(ranks)]
    if len(counts) != ranks or places != one_after_another or min(counts) < 0:
        raise GraphError(f"{op}: expected counts for {ranks} ranks, one after another; got {counts} at {places}.")


def _reduction(op: Op) -> str:
    name = op.attr("reduction", str)
    if name not in _REDUCTIONS:
        raise GraphError(f"{op}: attribute 'reduction': expected one of {list(_REDUCTIONS)}, got {name!r}.")
    return _REDUCTIONS[name]


def _arrived(x: Tensor) -> Tensor:
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return arrived


def _sized_group(op: Op) -> tuple[str, int]:
    group, ranks = _group(op)
    if op.attr("rank_size", int) != ranks:
        raise GraphError(
            f"{op}: attribute 'rank_size' is {op.attr('rank_size', int)}, but its group has {ranks} ranks."
        )
    return group, ranks


def _group(op: Op) -> tuple[str, int]:
    """The group's name in torch.distributed, and its size."""
    name = op.attr("group", str)
    found = _GROUP.fullmatch(name)
    if found is None:
        raise GraphError(
            f"{op}: expected a group named by tag and ranks, got {name!r}, which is a device library's name."
        )
    if not dist.is_initialized():
        raise GraphError(f"{op}: expected torch.distributed to be initialized, with the group {name!r}.")
    ranks = [int(rank) for rank in found[2].split(",")]
    group = dist.distributed_c10d._find_pg_by_ranks_and_tag(found[1], ranks)
    if group is None:
        raise GraphError(f"{op}: this process has no group {name!r}.")
    return group.group_name, len(ranks)
