"""Optimizers of other libraries by their published formulas: NOT their code, which the tests take where they can.

Each has the class name, the constructor, the group entries and the state of the original, so that an adapter sees no
difference. They are plain on purpose: one matrix at a time. Sources beside each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.reference import JORDAN, YOU, Triple

# github.com/microsoft/dion, dion/polar_express.py; the norm is multiplied by 1.02 there.
DION_POLAR: tuple[Triple, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def newton_schulz(u: Tensor, triples: Sequence[Triple], eps: float, margin: float = 1.0) -> Tensor:
    """Of a stack of matrices in bfloat16, as all of these do it; the tests make that float32."""
    x = u.to(torch.bfloat16)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * margin + eps)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def adam_direction(grad: Tensor, moments: tuple[Tensor, Tensor], betas: Sequence[float]) -> None:
    """The two moments of Adam, in place."""
    moments[0].mul_(betas[0]).add_(grad, alpha=1 - betas[0])
    moments[1].mul_(betas[1]).add_(grad * grad, alpha=1 - betas[1])


class _Stepping(Optimizer):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self.step_group(group)
        return loss

    def step_group(self, group: dict[str, Any]) -> None:
        """One step of a group."""
        raise NotImplementedError


class MoonlightMuon(_Stepping):
    """github.com/MoonshotAI/Moonlight, examples/toy_train.py; Liu et al., "Muon is scalable for LLM training" (arXiv
    2502.16982)."""

    def __init__(
        self,
        lr: float = 1e-3,
        wd: float = 0.1,
        muon_params: Iterable[Tensor] = (),
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adamw_params: Iterable[Tensor] = (),
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
    ) -> None:
        muon, adamw = list(muon_params), list(adamw_params)
        names = {"lr": lr, "wd": wd, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(muon + adamw, names | {"adamw_betas": adamw_betas, "adamw_eps": adamw_eps})
        for params, flag in ((muon, True), (adamw, False)):
            for p in params:
                self.state[p]["use_muon"] = flag

    def step_group(self, group: dict[str, Any]) -> None:
        """One step of a group."""
        lr, mu = group["lr"], group["momentum"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if state["use_muon"]:
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.mul_(mu).add_(p.grad)
                direction = p.grad + mu * buffer if group["nesterov"] else buffer
                x = newton_schulz(direction, JORDAN[:1] * group["ns_steps"], 1e-7)
                p.mul_(1 - lr * group["wd"]).add_(x, alpha=-lr * 0.2 * math.sqrt(max(p.shape)))
                continue
            first = state.setdefault("moment1", torch.zeros_like(p.grad))
            second = state.setdefault("moment2", torch.zeros_like(p.grad))
            state["step"] = step = state.get("step", 0) + 1
            beta1, beta2 = group["adamw_betas"]
            adam_direction(p.grad, (first, second), (beta1, beta2))
            size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
            p.mul_(1 - lr * group["wd"]).addcdiv_(first, second.sqrt() + group["adamw_eps"], value=-size)


MoonlightMuon.__qualname__ = MoonlightMuon.__name__ = "Muon"
MoonlightMuon.__module__ = "toy_train"


def polar_express(u: Tensor, epsilon: float) -> Tensor:
    """dion's default."""
    return newton_schulz(u, DION_POLAR, float(epsilon), margin=1.02)


def zeropower_via_newtonschulz5(u: Tensor, epsilon: float) -> Tensor:
    """dion's other one."""
    return newton_schulz(u, YOU, float(epsilon))


polar_express.__module__ = zeropower_via_newtonschulz5.__module__ = "dion.muon"


class DionMuon(_Stepping):
    """github.com/microsoft/dion, dion/muon.py, dion/megabatch_base.py, dion/scalar_opts.py: on one rank."""

    def __init__(
        self,
        params: Any,
        distributed_mesh: object = None,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float | Tensor = 0.01,
        cautious_wd: bool = False,
        epsilon: float = 1e-8,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        flatten: bool = False,
        use_polar_express: bool = True,
        newton_schulz_func: Callable[..., Tensor] | None = None,
    ) -> None:
        defaults = {"lr": lr, "mu": mu, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay}
        defaults |= {"cautious_wd": cautious_wd, "algorithm": "muon", "step": 0, "epsilon": epsilon}
        defaults |= {"nesterov": nesterov, "flatten": flatten, "adjust_lr": adjust_lr}
        super().__init__(params, defaults)
        known = polar_express if use_polar_express else zeropower_via_newtonschulz5
        self._newton_schulz_func = newton_schulz_func or known
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)
                if group["algorithm"] == "adamw":
                    self.state[p]["variance"] = torch.zeros_like(p)
                    self.state[p]["step_dev"] = torch.zeros(())

    def step_group(self, group: dict[str, Any]) -> None:
        """One step of a group."""
        group["step"] += 1
        lr = float(group["lr"])
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if group["algorithm"] == "muon":
                update = self._muon(group, p.grad, state["momentum"])
            elif group["algorithm"] == "lion":
                update = torch.sign(torch.lerp(state["momentum"], p.grad, 1 - group["beta1"]))
                state["momentum"].lerp_(p.grad, 1 - group["beta2"])
            else:
                state["step_dev"] += 1
                adam_direction(p.grad, (state["momentum"], state["variance"]), (group["beta1"], group["beta2"]))
                steps = float(state["step_dev"])
                root = (state["variance"] / (1 - group["beta2"] ** steps)).sqrt()
                update = state["momentum"] / (1 - group["beta1"] ** steps) / (root + group["epsilon"])
            p.mul_(1 - lr * float(group["weight_decay"])).sub_(lr * update.reshape(p.shape))

    def _muon(self, group: dict[str, Any], grad: Tensor, momentum: Tensor) -> Tensor:
        momentum.mul_(group["mu"]).add_(grad)
        direction = grad + group["mu"] * momentum if group["nesterov"] else momentum
        shape = direction.shape
        if group["flatten"] and direction.dim() > 2:
            direction = direction.flatten(1)
        heads = group.get("num_heads") or 1
        blocks = group.get("split_sizes") or [direction.size(-2) // heads] * heads
        done = []
        for block in direction.split(list(blocks), dim=-2):
            rows, cols = block.shape[-2:]
            factors = {"spectral_norm": math.sqrt(rows / cols), "rms_norm": 0.2 * math.sqrt(max(rows, cols)), None: 1.0}
            done.append(self._newton_schulz_func(block, epsilon=group["epsilon"]) * factors[group["adjust_lr"]])
        return torch.cat(done, dim=-2).reshape(shape)


DionMuon.__qualname__ = DionMuon.__name__ = "Muon"
DionMuon.__module__ = "dion.muon"


class HyperParallelMuon(_Stepping):
    """github.com/mindspore-ai/hyper-parallel, hyper_parallel/core/optimizer/muon.py: on one rank."""

    def __init__(
        self,
        params: Any,
        lr: float = 2e-2,
        weight_decay: float = 0.1,
        matched_adamw_rms: float = 0.2,
        momentum: float | Sequence[float] = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_variant: str = "asym5",
        ns_coefficients: Sequence[Triple] | None = None,
        ns_epsilon: float = 1e-10,
        zero_rms_scale_mode: str = "zero",
        **callbacks: object,
    ) -> None:
        pair = list(momentum) if isinstance(momentum, (list, tuple)) else [momentum]
        defaults = {"lr": lr, "weight_decay": weight_decay, "matched_adamw_rms": matched_adamw_rms}
        defaults |= {"momentum": (pair[0], pair[-1]), "nesterov": nesterov, "ns_steps": ns_steps}
        defaults |= {"ns_variant": ns_variant, "ns_coefficients": ns_coefficients, "ns_epsilon": ns_epsilon}
        defaults |= {"zero_rms_scale_mode": zero_rms_scale_mode, "apply_lr_in_update": False}
        super().__init__(params, defaults)
        self.is_muon = True
        for name in ("reshape_fn", "zeropower_fn", "momentum_update_fn", "ns_transform_fn", "post_update_fn"):
            setattr(self, name, callbacks.get(name))

    def step_group(self, group: dict[str, Any]) -> None:
        """One step of a group."""
        group["step"] = (group.get("step") or 0) + 1
        lr, (mu1, mu2) = group["lr"], group["momentum"]
        tables = {"asym5": YOU, "legacy": JORDAN[:1] * group["ns_steps"], "custom": group["ns_coefficients"]}
        triples = tables[group["ns_variant"]][: group["ns_steps"]]
        for p in group["params"]:
            if p.grad is None:
                continue
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
            direction = p.grad + mu1 * buffer
            buffer.mul_(mu2).add_(p.grad)
            direction = p.grad + mu1 * direction if group["nesterov"] else direction
            shape = direction.shape
            matrices = direction.squeeze(1) if len(shape) == 3 and shape[1] == 1 else direction
            matrices = matrices.reshape(-1, *matrices.shape[-2:])
            x = newton_schulz(matrices, triples, group["ns_epsilon"]).reshape(shape)
            rms = group["matched_adamw_rms"]
            scale = rms * math.sqrt(max(matrices.shape[-2:]))
            if not rms:
                scale = 1.0 if group["zero_rms_scale_mode"] == "use_lr" else 0.0
            p.mul_(1 - lr * group["weight_decay"]).add_(x, alpha=-lr * scale)


HyperParallelMuon.__qualname__ = HyperParallelMuon.__name__ = "Muon"
HyperParallelMuon.__module__ = "hyper_parallel.core.optimizer.muon"


class HyperParallelAdamW(_Stepping):
    """github.com/mindspore-ai/hyper-parallel, hyper_parallel/core/optimizer/adamw.py: one count of steps per group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"amsgrad": False, "maximize": False})

    def step_group(self, group: dict[str, Any]) -> None:
        """One step of a group."""
        group["step"] = step = (group.get("step") or 0) + 1
        (beta1, beta2), lr = group["betas"], group["lr"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            first = state.setdefault("exp_avg", torch.zeros_like(p.grad))
            second = state.setdefault("exp_avg_sq", torch.zeros_like(p.grad))
            adam_direction(p.grad, (first, second), (beta1, beta2))
            root = (second / (1 - beta2**step)).sqrt() + group["eps"]
            p.mul_(1 - lr * group["weight_decay"]).addcdiv_(first, root, value=-lr / (1 - beta1**step))


HyperParallelAdamW.__qualname__ = HyperParallelAdamW.__name__ = "AdamW"
HyperParallelAdamW.__module__ = "hyper_parallel.core.optimizer.adamw"


class ChainedOptimizer:
    """github.com/mindspore-ai/hyper-parallel, hyper_parallel/core/optimizer/optimizer.py: optimizers by name."""

    def __init__(self, model: object, optimizers: dict[str, Optimizer], flatten: bool = False) -> None:
        self.optimizers_dict, self.chained_optimizers = optimizers, list(optimizers.values())
        self.model, self.flatten = model, flatten

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step each of them, in order."""
        for optimizer in self.chained_optimizers:
            optimizer.step(closure=closure)  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for optimizer in self.chained_optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all of them."""
        return [group for optimizer in self.chained_optimizers for group in optimizer.param_groups]
