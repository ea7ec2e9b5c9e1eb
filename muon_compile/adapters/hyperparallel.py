"""HyperParallel's ``Muon`` and ``AdamW``, alone or in its ``ChainedOptimizer``.

Source: github.com/mindspore-ai/hyper-parallel, hyper_parallel/core/optimizer/{muon,adamw,optimizer}.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from muon_compile.adapters.registry import FamilyAdapter, Group, part_of, refuse
from muon_compile.config import YOU, AdamWConfig, MuonConfig, Triple
from muon_compile.spec import Algorithm

_CALLBACKS = ("zeropower_fn", "momentum_update_fn", "reshape_fn", "ns_transform_fn", "post_update_fn")
# Of releases without the group entry "ns_epsilon".
_OLD_EPS = 1e-7


class _HyperParallelAdapter(FamilyAdapter):
    grad_names = ("grad", "main_grad")

    def collect_state(self, optimizer: Optimizer) -> None:
        """See ``Adapter``; what loads into a group loads what is there, so the count is."""
        for group in optimizer.param_groups:
            group.setdefault("step", 0)

    def after_step(self, optimizer: Optimizer) -> None:
        """See ``Adapter``."""
        for group in optimizer.param_groups:
            group["step"] = (group.get("step") or 0) + 1


class HyperParallelMuonAdapter(_HyperParallelAdapter):
    """Reads its ``Muon``; preset ``hyperparallel``. A convolution ``[o, 1, k]`` is one matrix, other parameters of
    three and more dims are stacks of them."""

    class_paths = ("hyper_parallel.core.optimizer.muon.Muon",)
    config_keys = (
        "flatten",
        "nesterov",
        "ns_steps",
        "ns_variant",
        "ns_coefficients",
        "ns_epsilon",
        "matched_adamw_rms",
        "zero_rms_scale_mode",
    )

    def check(self, optimizer: Optimizer) -> None:
        """See ``Adapter``."""
        given = {name: getattr(optimizer, name, None) for name in _CALLBACKS}
        refuse("HyperParallel's Muon", {n: v for n, v in given.items() if v is not None}, "no callbacks")

    def groups(self, optimizer: Optimizer) -> Sequence[Group]:
        """See ``Adapter``."""
        found: list[Group] = []
        for group in optimizer.param_groups:
            if not any(_is_convolution(p) for p in group["params"]):
                found.append(group)
                continue
            parts = [
                part_of(group, lambda p: not _is_convolution(p)),
                part_of(group, _is_convolution, flatten=True),
            ]
            found += [part for part in parts if part is not None]
        return found

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        return "muon"

    def config(self, group: Group) -> MuonConfig:
        """See ``Adapter``."""
        variant = group.get("ns_variant", "asym5")
        if variant not in ("legacy", "asym5", "custom") or (variant == "custom" and not group.get("ns_coefficients")):
            raise ValueError(
                "HyperParallel's Muon: ns_variant: expected 'legacy', 'asym5', or 'custom' with ns_coefficients, got "
                f"{variant!r} with {group.get('ns_coefficients')!r}."
            )
        rms, steps = float(group["matched_adamw_rms"]), group["ns_steps"]
        scale: Any = "match_rms_adamw"
        if rms == 0:
            scale = 1.0 if group.get("zero_rms_scale_mode", "zero") == "use_lr" else 0.0
        return MuonConfig(
            preset="hyperparallel",
            nesterov=bool(group["nesterov"]),
            ns_steps=steps if variant == "legacy" else len(_coefficients(group)),
            coefficients="jordan" if variant == "legacy" else _coefficients(group),
            eps=float(group.get("ns_epsilon", _OLD_EPS)),
            scale=scale,
            rms=rms or 0.2,
            flatten=bool(group.get("flatten", False)),
        )

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        return {"lr": group["lr"], "weight_decay": group["weight_decay"], "momentum": _momentum(group)}

    def collect_state(self, optimizer: Optimizer) -> None:
        """See ``Adapter``: of copies of a parameter one has its momentum, which it sends before saving, too."""
        super().collect_state(optimizer)
        stepped = any(group.get("step") for group in optimizer.param_groups)
        send = getattr(optimizer, "_broadcast_state_fused_for_ckpt", None)
        if stepped and send is not None:
            send()


class HyperParallelAdamWAdapter(_HyperParallelAdapter):
    """Reads its ``AdamW``, whose groups have one count of steps for all of their parameters."""

    class_paths = ("hyper_parallel.core.optimizer.adamw.AdamW",)
    config_keys = ("eps", "amsgrad", "maximize")

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        return "adamw"

    def config(self, group: Group) -> AdamWConfig:
        """See ``Adapter``."""
        amsgrad, maximize = bool(group.get("amsgrad", False)), bool(group.get("maximize", False))
        return AdamWConfig(eps=float(group["eps"]), amsgrad=amsgrad, maximize=maximize, shared_steps=True)

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        beta1, beta2 = group["betas"]
        return {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2}

    def read_state(self, group: Group, state: dict[str, Any]) -> dict[str, Any]:
        """See ``Adapter``."""
        return state | {"step": float(group.get("step") or 0)}

    def state_version(self, group: Group) -> object:
        """See ``Adapter``."""
        return group.get("step") or 0

    def write_state(self, optimizer: Optimizer, group: Group, state: dict[str, Any]) -> None:
        """See ``Adapter``."""
        state.pop("step", None)


def _is_convolution(param: Tensor) -> bool:
    return len(param.shape) == 3 and param.shape[1] == 1


def _momentum(group: Group) -> float | Tensor:
    """Of the direction and of the buffer, which newer releases have apart: here they are one."""
    given = group["momentum"]
    values: list[float | Tensor] = list(given) if isinstance(given, (tuple, list)) else [given]
    if any(value is not values[0] and value != values[0] for value in values):
        refuse("HyperParallel's Muon", {"momentum": given}, "one momentum, or two equal ones")
    return values[0]


def _coefficients(group: Group) -> tuple[Triple, ...]:
    """Those of the steps that there are: a table of five ends there, whatever ``ns_steps`` is."""
    table = group["ns_coefficients"] if group.get("ns_variant", "asym5") == "custom" else YOU
    return tuple((float(a), float(b), float(c)) for a, b, c in table[: group["ns_steps"]])
