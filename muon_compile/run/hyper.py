"""Hyperparameters as the graph's inputs: one vector per device, float64 where there is one, kept at one address."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muon_compile.build.pure import HYPER_NAMES
from muon_compile.plan.plan import Plan

_ROUNDING = 1e-12

Entries = tuple[tuple[int, str], ...]


def check_value(group: int, name: str, value: object, *, read_tensor: bool = False) -> None:
    """Refuse what would poison every parameter.

    Args:
        group: Group index, for the message.
        name: ``lr``, ``weight_decay``, ``momentum``, ``beta1`` or ``beta2``.
        value: A number or a one-element tensor; a tensor is only read where ``read_tensor``.
        read_tensor: At wrap time: a synchronization is allowed, and not even a rounding below zero is.

    Raises:
        ValueError: NaN, infinite, negative, or a beta of 1 or more.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"Group {group}: {name}: expected one element, got a tensor of shape {tuple(value.shape)}."
            )
        if not read_tensor or value.device.type == "meta":
            return
        value = value.item()
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    # A schedule that ends at zero may end a rounding below it, as torch's LinearLR does; stock carries on then.
    lowest = 0.0 if read_tensor else -_ROUNDING
    if isinstance(value, str) or not math.isfinite(number) or number < lowest:
        raise ValueError(f"Group {group}: {name}: expected a finite number >= 0, got {value!r}.")
    if name.startswith("beta") and number >= 1:
        raise ValueError(f"Group {group}: {name}: expected a number in [0, 1), got {value!r}.")


def hyper_entries(plan: Plan) -> dict[str, Entries]:
    """Per device, the ``(group, name)`` entries that its buckets need, in a fixed order."""
    needed: dict[str, dict[tuple[int, str], None]] = {}
    for bucket in plan.buckets:
        entries = needed.setdefault(bucket.device, {})
        for group in sorted(set(bucket.groups)):
            for name in HYPER_NAMES[bucket.algorithm]:
                entries[group, name] = None
    return {device: tuple(entries) for device, entries in needed.items()}


class HostVector:
    """A small vector that Python writes without dispatching an operator, mirrored on a device where it must be.

    The host side is pageable memory on purpose: a copy to the device has taken it over when the call returns, so the
    next step may overwrite it while the device still works on the last one.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: str) -> None:
        kinds: dict[torch.dtype, Any] = {
            torch.float64: ctypes.c_double,
            torch.float32: ctypes.c_float,
            torch.bool: ctypes.c_bool,
        }
        self._host = torch.zeros(size, dtype=dtype, device="cpu")  # whatever the default device is
        self._cells = (kinds[dtype] * size).from_address(self._host.data_ptr())
        on_host = torch.device(device).type == "cpu"
        self.tensor = self._host if on_host else torch.zeros(size, dtype=dtype, device=device)
        self._last: list[float | bool] | None = None

    def write(self, values: Sequence[float | bool]) -> None:
        """Make the vector hold ``values``; nothing is done where it does already."""
        listed = list(values)
        if listed == self._last:
            return
        self._cells[:] = listed
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)
        self._last = listed

    def forget(self) -> None:
        """Somebody else wrote to the tensor: write again next time."""
        self._last = None


class HyperVectors:
    """The hyperparameter inputs of a plan, float64 or what the backend has instead."""

    def __init__(self, plan: Plan, dtype: torch.dtype = torch.float64) -> None:
        self.entries = hyper_entries(plan)
        self._vectors = {d: HostVector(len(e), dtype, d) for d, e in self.entries.items()}
        self._cells = {d: v.tensor.split(1) for d, v in self._vectors.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """One vector per device, in the order of ``entries``."""
        return [vector.tensor for vector in self._vectors.values()]

    def write(self, groups: Sequence[Mapping[str, float | Tensor]]) -> None:
        """Take over every group's values (see ``read_hyper``); a device tensor is copied there, never aliased."""
        for device, entries in self.entries.items():
            vector = self._vectors[device]
            values = [groups[group][name] for group, name in entries]
            pairs = [(cell, v) for cell, v in zip(self._cells[device], values, strict=True) if isinstance(v, Tensor)]
            if pairs:
                vector.forget()
            vector.write([0.0 if isinstance(v, Tensor) else float(v) for v in values])
            if pairs:
                torch._foreach_copy_([cell for cell, _ in pairs], [value for _, value in pairs], non_blocking=True)


def read_hyper(groups: Sequence[Mapping[str, float | Tensor]]) -> list[dict[str, float | Tensor]]:
    """Every group's values, checked: host numbers and host tensors as floats, device tensors as they are.

    Raises:
        ValueError: See ``check_value``.
    """
    result: list[dict[str, float | Tensor]] = []
    for index, values in enumerate(groups):
        row: dict[str, float | Tensor] = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
                value = _host_value(value)
            check_value(index, name, value)
            row[name] = value
        result.append(row)
    return result


def _host_value(value: Tensor) -> float:
    """A host tensor's one element, read without dispatching an operator."""
    kinds: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
    kind = kinds.get(value.dtype)
    if kind is None or type(value) not in (Tensor, torch.nn.Parameter):
        return float(value.item())
    return float(kind.from_address(value.data_ptr()).value)
