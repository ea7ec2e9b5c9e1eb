"""``torch.optim.AdamW``."""

from __future__ import annotations

from torch import Tensor

from muon_compile.adapters.registry import Group
from muon_compile.config import AdamWConfig
from muon_compile.spec import Algorithm


class TorchAdamWAdapter:
    """Reads ``torch.optim.AdamW`` groups. ``foreach``, ``fused`` and ``capturable`` choose an implementation, not the
    mathematics, so the compiled step stands in for each of them."""

    class_paths = ("torch.optim.AdamW", "torch.optim.adamw.AdamW")
    config_keys = ("eps", "amsgrad", "maximize", "differentiable")

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        return "adamw"

    def config(self, group: Group) -> AdamWConfig:
        """See ``Adapter``."""
        if group.get("differentiable"):
            raise NotImplementedError(
                "torch.optim.AdamW: differentiable=True: a compiled step writes in place and cannot be differentiated; "
                "expected differentiable=False."
            )
        return AdamWConfig(eps=float(group["eps"]), amsgrad=group["amsgrad"], maximize=group["maximize"])

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        beta1, beta2 = group["betas"]
        return {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2}
