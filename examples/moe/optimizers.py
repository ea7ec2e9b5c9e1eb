"""What trains the model: this library's step, Muon as it is written first, or AdamW for everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

import muon_compile as mc

from .decoder import MoeConfig

BETAS, EPS, NS_EPS = (0.9, 0.95), 1e-8, 1e-7
COEFFICIENTS, NS_STEPS = (3.4445, -4.7750, 2.0315), 5
KINDS = ("muon", "naive", "adamw")


class NaiveMuon(Optimizer):
    """Muon without this library: every rank gathers every matrix and repeats all of the work, one matrix at a time.

    The mathematics is `torch.optim.Muon`'s; stacks `[experts, out, in]` are matrices of their own.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                momentum = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(momentum, group["momentum"])
                whole = update.full_tensor() if isinstance(update, DTensor) else update
                matrices = whole.reshape(-1, *whole.shape[-2:]).unbind(0)
                made = torch.stack([orthogonalized(matrix) for matrix in matrices]).view_as(whole).to(param.dtype)
                if isinstance(param, DTensor):
                    mesh = param.device_mesh
                    copies = DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)
                    made = copies.redistribute(mesh, param.placements)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(made, alpha=-group["lr"] * max(1.0, whole.shape[-2] / whole.shape[-1]) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Newton-Schulz of one matrix, in bfloat16, by `torch.optim.Muon`'s operators."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=NS_EPS)
    a, b, c = COEFFICIENTS
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices for Muon, the rest for AdamW, and routers too.

    Adding the same to all of a token's scores changes no probability, so the rows of a router's gradient add up to
    zero: one of its singular values is nothing but rounding, and Muon would make as much of that as of the others.
    """
    routers = [name for name, _ in model.named_parameters() if "router" in name]
    return mc.route(model, adamw=routers, verbose=False)


class Together(Optimizer):
    """Two optimizers that are stepped one after the other, with their groups and state as those of one."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for optimizer in optimizers:
            optimizer.state = self.state

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state


def optimizer_of(
    model: nn.Module,
    config: MoeConfig,
    kind: str,
    *,
    strategy: str = "auto",
    backend: str = "inductor",
    ns_dtype: str = "auto",
    compile_config: mc.CompileConfig | None = None,
) -> Optimizer:
    """An optimizer of all the model's parameters; `kind` is one of `KINDS`."""
    adamw = {"lr": config.adamw_lr, "weight_decay": config.weight_decay, "betas": BETAS}
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), eps=EPS, **adamw)
    groups = groups_of(model)
    muon = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
    if kind == "naive":
        params = {group["algorithm"]: [p for _, p in group["params"]] for group in groups}
        return Together(NaiveMuon(params["muon"], **muon), torch.optim.AdamW(params["adamw"], eps=EPS, **adamw))
    optimizer = mc.Muon(
        groups,
        **muon,
        config=mc.MuonConfig(ns_dtype=ns_dtype),
        adamw_lr=config.adamw_lr,
        adamw_weight_decay=config.weight_decay,
        betas=BETAS,
        adamw_config=mc.AdamWConfig(eps=EPS),
        backend=backend,
    )
    mc.compile_step(optimizer, backend=backend, strategy=strategy, config=compile_config)
    return optimizer
