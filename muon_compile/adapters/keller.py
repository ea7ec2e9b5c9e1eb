"""KellerJordan/Muon: ``Muon``, ``SingleDeviceMuon``, ``MuonWithAuxAdam``, ``SingleDeviceMuonWithAuxAdam``.

Source: github.com/KellerJordan/Muon, muon.py (on PyPI as muon-optimizer).
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from muon_compile.adapters.registry import FamilyAdapter, Group, part_of, refuse
from muon_compile.config import AdamWConfig, Config, MuonConfig
from muon_compile.spec import Algorithm


@functools.cache
def _skips(cls: type) -> bool:
    """Whether its step leaves a parameter without a gradient out."""
    try:
        source = inspect.getsource(inspect.unwrap(cls.step))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return False
    return re.search(r"p\.grad is None:\s*\n\s*continue", source) is not None


class KellerAdapter(FamilyAdapter):
    """Reads them; preset ``keller``. A parameter without a gradient steps with one of zeros, as theirs does.

    A convolution ``[o, i, kh, kw]`` is one matrix ``o x (i kh kw)``, but scaled by ``sqrt(max(1, kh / kw))``: that is
    what ``grad.size(-2) / grad.size(-1)`` is there.
    """

    class_paths = (
        "muon.Muon",
        "muon.SingleDeviceMuon",
        "muon.MuonWithAuxAdam",
        "muon.SingleDeviceMuonWithAuxAdam",
    )
    config_keys = ("use_muon", "eps", "kernel", "nesterov", "ns_steps")

    def check(self, optimizer: Optimizer) -> None:
        """See ``Adapter``; the first releases told parameters apart by their state."""
        old = {name: value for group in optimizer.param_groups for name, value in group.items() if "adamw_" in name}
        refuse("KellerJordan's Muon", old, "a release whose groups say use_muon")

    def missing_gradient(self, optimizer: Optimizer) -> Literal["skip", "zero"]:
        """See ``Adapter``; between two releases that step with zeros there is one that skips."""
        cls: Any = type(optimizer)
        return "skip" if _skips(cls) else "zero"

    def groups(self, optimizer: Optimizer) -> Sequence[Group]:
        """See ``Adapter``; convolutions by the sides of their kernels."""
        found: list[Group] = []
        for group in optimizer.param_groups:
            kernels = sorted({tuple(p.shape[2:]) for p in group["params"] if len(p.shape) == 4})
            if not kernels or not group.get("use_muon", True):
                found.append(group)
                continue
            parts = [part_of(group, lambda p: len(p.shape) != 4)]
            for kernel in kernels:
                parts.append(part_of(group, lambda p, k=kernel: tuple(p.shape[2:]) == k, kernel=kernel))  # type: ignore[misc]
            found += [part for part in parts if part is not None]
        return found

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        return "muon" if group.get("use_muon", True) else "adamw"

    def config(self, group: Group) -> Config:
        """See ``Adapter``."""
        if not group.get("use_muon", True):
            return AdamWConfig(eps=float(group["eps"]))
        kernel, steps = group.get("kernel"), group.get("ns_steps", 5)
        nesterov = bool(group.get("nesterov", True))
        scale = None if kernel is None else math.sqrt(max(1.0, kernel[0] / kernel[1]))
        flatten = kernel is not None
        return MuonConfig(preset="keller", nesterov=nesterov, ns_steps=steps, flatten=flatten, scale=scale)

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        if group.get("use_muon", True):
            return {name: group[name] for name in ("lr", "weight_decay", "momentum")}
        beta1, beta2 = group["betas"]
        return {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2}

    def write_state(self, optimizer: Optimizer, group: Group, state: dict[str, Any]) -> None:
        """See ``Adapter``; steps are counted in an int there."""
        if "step" in state:
            state["step"] = int(state["step"])

    def owners_save_alone(self, optimizer: Optimizer) -> bool:
        """See ``Adapter``."""
        alone = type(optimizer).__name__.startswith("SingleDevice")
        return not alone and dist.is_initialized() and dist.get_world_size() > 1

    @torch.no_grad()
    def collect_state(self, optimizer: Optimizer) -> None:
        """See ``Adapter``: in the classes for several ranks every one has the momenta of its own parameters alone."""
        if not self.owners_save_alone(optimizer):
            return
        world = dist.get_world_size()
        owned = [
            (param, index % world)
            for group in optimizer.param_groups
            if group.get("use_muon", True)
            for index, param in enumerate(group["params"])
        ]
        if not owned:
            return
        held = [param for param, _ in owned if "momentum_buffer" in optimizer.state.get(param, {})]
        stepped = torch.tensor(float(bool(held)), device=owned[0][0].device)
        dist.all_reduce(stepped, dist.ReduceOp.MAX)
        if not stepped.item():
            return
        for param, owner in owned:
            state = optimizer.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            dist.broadcast(state["momentum_buffer"], owner)
