"""A Muon of one's own, compiled: the adapter says what its groups mean and what it calls its state.

    python examples/own_muon.py [--backend aot_eager]

Two copies of a layer train on the same gradients, one eagerly and one compiled; the largest difference is printed.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import muon_compile as mc

STEPS = 10


class OwnMuon(torch.optim.Optimizer):
    """As many people have one: momentum as a sum, one table of coefficients, updates of AdamW's size."""

    def __init__(self, params: Any, lr: float = 0.02, mu: float = 0.95, decay: float = 0.1, steps: int = 5) -> None:
        super().__init__(params, {"lr": lr, "mu": mu, "decay": decay, "steps": steps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("velocity", torch.zeros_like(p))
                m.mul_(group["mu"]).add_(p.grad)
                x = (p.grad + group["mu"] * m).bfloat16()
                x = x.mT if x.size(0) > x.size(1) else x
                x = x / (x.norm() + 1e-7)
                for _ in range(group["steps"]):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.mT if p.size(0) > p.size(1) else x
                p.mul_(1 - group["lr"] * group["decay"]).add_(x, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


class OwnMuonAdapter(mc.Adapter):
    class_paths = (f"{OwnMuon.__module__}.OwnMuon",)  # "my_package.optim.OwnMuon"
    config_keys = ("steps",)

    def algorithm(self, group: Mapping[str, Any]) -> Any:
        return "muon"

    def config(self, group: Mapping[str, Any]) -> mc.MuonConfig:
        return mc.MuonConfig(preset="moonlight", ns_steps=group["steps"], flatten=False)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        return {"lr": group["lr"], "weight_decay": group["decay"], "momentum": group["mu"]}

    def state_names(self, optimizer: Any, group: Mapping[str, Any]) -> Mapping[str, str]:
        return {"momentum_buffer": "velocity"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="inductor")
    backend = parser.parse_args().backend
    torch.manual_seed(0)
    eager = nn.Linear(48, 32, bias=False)
    compiled = copy.deepcopy(eager)
    optimizers = [OwnMuon(model.parameters()) for model in (eager, compiled)]
    mc.register_adapter(OwnMuonAdapter())
    step = mc.compile_step(optimizers[1], backend=backend)
    start = eager.weight.detach().clone()
    for _ in range(STEPS):
        grad = torch.randn_like(eager.weight)
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            model.weight.grad = grad.clone()
            optimizer.step()
    moved, apart = (eager.weight - start).norm(), (eager.weight - compiled.weight).norm()
    print(f"{STEPS} steps, {step.stats.compiles} compile; compiled and eager differ by {(apart / moved).item():.1e}")


if __name__ == "__main__":
    main()
