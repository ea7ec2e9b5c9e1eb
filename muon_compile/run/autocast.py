"""The step computes in dtypes of its own, whatever autocast the caller is under."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.optim import Optimizer


def own_dtypes(optimizers: Sequence[Optimizer]) -> ExitStack:
    """Autocast switched off until the result's end: under it the step's float32 products would run in halves."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    kinds = {param.device.type for group in groups for param in group["params"][:1]}
    stack = ExitStack()
    for kind in kinds:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
