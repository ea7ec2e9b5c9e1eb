"""Moonlight's ``Muon``.

Source: github.com/MoonshotAI/Moonlight, examples/toy_train.py. It is a script, so everybody has a copy: register yours
by ``register_adapter(MoonlightAdapter("my_package.my_module.Muon"))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from muon_compile.adapters.registry import FamilyAdapter, Group, part_of
from muon_compile.config import AdamWConfig, Config, MuonConfig
from muon_compile.spec import Algorithm


class MoonlightAdapter(FamilyAdapter):
    """Reads it; preset ``moonlight``. One group holds Muon's and AdamW's parameters, told apart by their state."""

    class_paths = ("toy_train.Muon", "examples.toy_train.Muon")
    config_keys = ("algorithm", "nesterov", "ns_steps", "adamw_eps")

    def groups(self, optimizer: Optimizer) -> Sequence[Group]:
        """See ``Adapter``."""
        muon = {id(p) for p, state in optimizer.state.items() if state.get("use_muon")}
        parts: list[Group | None] = []
        for group in optimizer.param_groups:
            parts.append(part_of(group, lambda p: id(p) in muon, algorithm="muon"))
            parts.append(part_of(group, lambda p: id(p) not in muon, algorithm="adamw"))
        return [part for part in parts if part is not None]

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        algorithm: Algorithm = group.get("algorithm", "muon")
        return algorithm

    def config(self, group: Group) -> Config:
        """See ``Adapter``."""
        if self.algorithm(group) == "adamw":
            return AdamWConfig(eps=float(group["adamw_eps"]), corrected_eps=True)
        nesterov, steps = bool(group["nesterov"]), group["ns_steps"]
        return MuonConfig(preset="moonlight", nesterov=nesterov, ns_steps=steps, flatten=False)

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        shared = {"lr": group["lr"], "weight_decay": group["wd"]}
        if self.algorithm(group) == "muon":
            return shared | {"momentum": group["momentum"]}
        beta1, beta2 = group["adamw_betas"]
        return shared | {"beta1": beta1, "beta2": beta2}

    def state_names(self, optimizer: Optimizer, group: Group) -> Mapping[str, str]:
        """See ``Adapter``."""
        return {"exp_avg": "moment1", "exp_avg_sq": "moment2"}

    def read_state(self, group: Group, state: dict[str, Any]) -> dict[str, Any]:
        """See ``Adapter``."""
        return {name: value for name, value in state.items() if name != "use_muon"}

    def write_state(self, optimizer: Optimizer, group: Group, state: dict[str, Any]) -> None:
        """See ``Adapter``; steps are counted in an int there."""
        if "step" in state:
            state["step"] = int(state["step"])
