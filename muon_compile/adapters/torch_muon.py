"""``torch.optim.Muon`` (torch 2.9 and later)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from muon_compile.adapters.registry import Group
from muon_compile.config import MuonConfig, Scale
from muon_compile.spec import Algorithm


class TorchMuonAdapter:
    """Reads ``torch.optim.Muon`` groups; preset ``torch``."""

    class_paths = ("torch.optim.Muon", "torch.optim._muon.Muon")
    config_keys = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        return "muon"

    def config(self, group: Group) -> MuonConfig:
        """See ``Adapter``."""
        scales: dict[Any, Scale] = {None: "original", "original": "original", "match_rms_adamw": "match_rms_adamw"}
        adjust = group["adjust_lr_fn"]
        if adjust not in scales:
            raise ValueError(f"torch.optim.Muon: adjust_lr_fn: expected one of {list(scales)}, got {adjust!r}.")
        given = group["ns_coefficients"]
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            raise ValueError(f"torch.optim.Muon: ns_coefficients: expected three numbers, got {given!r}.")
        a, b, c = given
        return MuonConfig(
            preset="torch",
            nesterov=bool(group["nesterov"]),
            ns_steps=group["ns_steps"],
            coefficients=(float(a), float(b), float(c)),
            eps=float(group["eps"]),
            scale=scales[adjust],
        )

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        return {name: group[name] for name in ("lr", "weight_decay", "momentum")}
