"""HeavyBall's ``Muon``.

Source: heavyball 3.2.1, heavyball/__init__.py, chainable.py, utils.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from muon_compile.adapters.registry import FamilyAdapter, Group, refuse
from muon_compile.config import DTypeName, MomentumForm, MuonConfig
from muon_compile.spec import Algorithm

_OFF = ("caution", "cautious_weight_decay", "mars", "palm", "ecc", "param_ecc")
# What its transforms of that name do with a gradient. The one left out takes the bias out of its average.
_AVERAGES: dict[str, tuple[MomentumForm, bool]] = {
    "nesterov_ema": ("ema_added", True),
    "nesterov_momentum": ("sum", True),
    "heavyball_momentum": ("sum", False),
}
# The key of a parameter's state that is not cut into several.
_WHOLE = 0


class HeavyBallMuonAdapter(FamilyAdapter):
    """Reads it. It takes matrices alone here; theirs moves vectors along their momentum.

    With ``nesterov`` its direction is ``G + M`` of an average M, with ``heavyball_momentum`` too it is the usual one of
    a sum. A parameter of more than two dims is one matrix of its first dim and the rest. Theirs rounds to bfloat16 at
    random: for bfloat16 parameters pass ``CompileConfig(rounding="stochastic")``.
    """

    class_paths = ("heavyball.Muon",)
    config_keys = ("average", "storage_dtype", *_OFF)

    def check(self, optimizer: Optimizer) -> None:
        """See ``Adapter``."""
        mode = getattr(sys.modules.get("heavyball.utils"), "zeroth_power_mode", "newtonschulz")
        given: dict[str, object] = {} if mode == "newtonschulz" else {"heavyball.utils.zeroth_power_mode": mode}
        names = _transforms(optimizer)
        if len(names) != 2 or names[0] not in _AVERAGES or names[1] != "orthogonalize_update":
            given["transforms"] = names
        if getattr(optimizer, "use_ema", False):
            given["use_ema"] = True
        if getattr(optimizer, "_orig_shapes", None) is not None:
            given["orig_shapes"] = "..."
        refuse("heavyball.Muon", given, "nesterov=True or heavyball_momentum=True, without clipping")

    def groups(self, optimizer: Optimizer) -> Sequence[Group]:
        """See ``Adapter``; the flags in a group say nothing once the optimizer is made."""
        return [{**group, "average": _transforms(optimizer)[0]} for group in optimizer.param_groups]

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        return "muon"

    def config(self, group: Group) -> MuonConfig:
        """See ``Adapter``."""
        refuse("heavyball.Muon", {name: group[name] for name in _OFF if group.get(name)}, "all of them off")
        form, nesterov = _AVERAGES[group.get("average", "nesterov_ema")]
        stored: DTypeName = group.get("storage_dtype", "float32")
        return MuonConfig(
            momentum_form=form,
            momentum_dtype=stored,
            nesterov=nesterov,
            coefficients="you",
            eps=1e-7,
            eps_mode="clamp",
            scale="original",
            flatten=True,
        )

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``; the learning rate warms up here."""
        step = _steps(group) + 1
        warm = step / max(step, group["warmup_steps"] + 1)
        beta = group["beta"] if group.get("beta") is not None else group["betas"][0]
        return {"lr": group["lr"] * warm, "weight_decay": group["weight_decay"], "momentum": beta}

    def state_names(self, optimizer: Optimizer, group: Group) -> Mapping[str, str]:
        """See ``Adapter``."""
        return {"momentum_buffer": optimizer._find_val_name("momentum")}  # type: ignore[attr-defined]

    def state_of(self, entry: dict[Any, Any]) -> dict[str, Any]:
        """See ``Adapter``."""
        held: dict[str, Any] = entry.setdefault(_WHOLE, {})
        return held

    def read_state(self, group: Group, state: dict[str, Any]) -> dict[str, Any]:
        """See ``Adapter``."""
        return {name: value for name, value in state.items() if name not in ("is_initialized", "step")}

    def after_step(self, optimizer: Optimizer) -> None:
        """See ``Adapter``."""
        for group in optimizer.param_groups:
            group["step_count"] = _steps(group) + 1

    def uses_up_gradients(self, optimizer: Optimizer) -> bool:
        """See ``Adapter``."""
        return bool(getattr(optimizer, "consume_grad", True))


def _transforms(optimizer: Optimizer) -> list[str]:
    return [str(getattr(transform, "fn_name", transform)) for transform in getattr(optimizer, "fns", ())]


def _steps(group: Group) -> int:
    """Steps done; an int after the first reading, so that no device is waited for."""
    count = group.get("step_count")
    return 0 if count is None else int(count)
