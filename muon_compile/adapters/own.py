"""``muon_compile.Muon``: groups of ``algorithm="muon"``, ``"adamw"`` and ``"lion"``."""

from __future__ import annotations

from torch import Tensor

from muon_compile.adapters.registry import Group
from muon_compile.config import Config
from muon_compile.spec import Algorithm


class OwnMuonAdapter:
    """Reads ``muon_compile.Muon`` groups."""

    class_paths = ("muon_compile.optim.Muon",)
    config_keys = ("algorithm", "config")

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        algorithm: Algorithm = group["algorithm"]
        return algorithm

    def config(self, group: Group) -> Config:
        """See ``Adapter``."""
        config: Config = group["config"]
        return config

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        if group["algorithm"] == "muon":
            return {name: group[name] for name in ("lr", "weight_decay", "momentum")}
        beta1, beta2 = group["betas"]
        return {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2}
