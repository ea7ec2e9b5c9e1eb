"""Refusals that change nothing: one snapshot of all that a live optimizer holds, and one way to expect an error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer


def _frozen(value: Any) -> Any:
    """A copy that shares no memory with ``value``; tensors with address, strides and version beside their values."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return ("sparse", value.layout, value.detach().to_dense().clone())
        address = value.data_ptr() if value.device.type != "meta" else 0
        return (address, value.stride(), value._version, value.detach().clone())
    if isinstance(value, Mapping):
        return {id(key) if isinstance(key, Tensor) else key: _frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_frozen(item) for item in value]
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return _same(list(a), list(b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return a is b or (dataclasses.is_dataclass(a) and a == b) or (type(a) is type(b) and bool(a == b))


def _held(optimizer: Optimizer) -> dict[str, Any]:
    """Everything that an optimizer holds: attributes and ``step``, hooks, groups, parameters, gradients, state."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        # LRScheduler's mark that step() was called; torch's own wrapper sets it before a step that fails, too.
        "attributes": sorted(optimizer.__dict__.keys() - {"_opt_called"}),
        "step": id(optimizer.__dict__.get("step")),
        "hooks": {n: list(v) for n, v in optimizer.__dict__.items() if "hook" in n and isinstance(v, Mapping)},
        "groups": _frozen(optimizer.param_groups),
        "gradients": _frozen([p.grad for p in params]),
        "state": _frozen(optimizer.state),
        "state objects": {id(p): {n: id(v) for n, v in held.items()} for p, held in optimizer.state.items()},
        "state dict": _frozen(optimizer.state_dict()),
    }


@contextmanager
def refused(
    error: type[BaseException], *words: str, by: Sequence[Optimizer] = (), tensors: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Expect ``error`` with every one of ``words`` in its message, and nothing changed by it.

    Args:
        error: The exact type.
        words: Parts of the message: the parameter's or the argument's name, what was expected, what came.
        by: Optimizers that must hold afterwards what they held before.
        tensors: Further tensors, such as parameters of an optimizer that could not be made.
    """
    before = [_held(optimizer) for optimizer in by]
    kept = _frozen(list(tensors))
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in the message: {caught.value}"
    for index, (optimizer, held) in enumerate(zip(by, before, strict=True)):
        now = _held(optimizer)
        changed = [name for name in held if not _same(held[name], now[name])]
        assert not changed, f"optimizer {index}: {changed} changed although it was refused"
    assert _same(kept, _frozen(list(tensors))), "a tensor changed although it was refused"
