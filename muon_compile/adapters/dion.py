"""microsoft/dion's ``Muon``, with its AdamW and Lion groups.

Source: github.com/microsoft/dion, dion/muon.py, dion/megabatch_base.py, dion/scalar_opts.py, dion/polar_express.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from muon_compile.adapters.registry import FamilyAdapter, Group, refuse
from muon_compile.config import AdamWConfig, Config, LionConfig, MuonConfig, Scale, Triple
from muon_compile.spec import Algorithm

# Polar Express for five steps with another margin than its authors' (arXiv 2505.16932; dion/polar_express.py: num_iters
# 5, safety_factor 2e-2, cushion 2). There the norm is multiplied by 1.02 before eps is added and X divided by it.
_POLAR: tuple[Triple, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02
_ORTHOGONALIZERS = {
    "polar_express": "polar_express",
    "polar_express_triton": "polar_express",
    "zeropower_via_newtonschulz5": "you",
    "newton_schulz_triton": "you",
}
_SCALES: dict[Any, Scale] = {"spectral_norm": "spectral_norm", "rms_norm": "rms_norm", None: "none"}


class DionMuonAdapter(FamilyAdapter):
    """Reads it; preset ``dion``."""

    class_paths = ("dion.muon.Muon", "dion.Muon")
    config_keys = (
        "algorithm",
        "epsilon",
        "nesterov",
        "flatten",
        "adjust_lr",
        "num_heads",
        "split_sizes",
        "cautious_wd",
        "orthogonalizer",
    )

    def check(self, optimizer: Optimizer) -> None:
        """See ``Adapter``."""
        _orthogonalizer(optimizer)
        for group in optimizer.param_groups:
            if group.get("num_heads") not in (None, 1):
                found = {tuple(p.shape) for p in group["params"] if len(p.shape) != 2}
                if found or group.get("flatten"):
                    raise ValueError(
                        "dion.Muon: num_heads: expected 2-D parameters in a group with flatten=False, got "
                        f"{sorted(found) or 'flatten=True'}."
                    )

    def groups(self, optimizer: Optimizer) -> Sequence[Group]:
        """See ``Adapter``."""
        orthogonalizer = _orthogonalizer(optimizer)
        return [{**group, "orthogonalizer": orthogonalizer} for group in optimizer.param_groups]

    def algorithm(self, group: Group) -> Algorithm:
        """See ``Adapter``."""
        algorithm: Algorithm = group["algorithm"]
        return algorithm

    def config(self, group: Group) -> Config:
        """See ``Adapter``."""
        refuse("dion.Muon", {"cautious_wd": True} if group.get("cautious_wd") else {}, "cautious_wd=False")
        algorithm, eps = self.algorithm(group), float(group["epsilon"])
        if algorithm == "adamw":
            return AdamWConfig(eps=eps)
        if algorithm == "lion":
            return LionConfig()
        polar = group.get("orthogonalizer", "polar_express") == "polar_express"
        (a, b, c), *others = _POLAR
        heads, blocks = group.get("num_heads"), group.get("split_sizes")
        if group["adjust_lr"] not in _SCALES:
            raise ValueError(f"dion.Muon: adjust_lr: expected one of {list(_SCALES)}, got {group['adjust_lr']!r}.")
        return MuonConfig(
            preset="dion",
            nesterov=bool(group["nesterov"]),
            # X / (1.02 norm + eps), and the polynomial of it, is X / (norm + eps / 1.02) and a polynomial of that.
            coefficients=((a / MARGIN, b / MARGIN**3, c / MARGIN**5), *others) if polar else "you",
            eps=eps / MARGIN if polar else eps,
            scale=_SCALES[group["adjust_lr"]],
            flatten=bool(group["flatten"]),
            num_heads=None if heads == 1 else heads,
            split_sizes=None if blocks is None else tuple(blocks),
        )

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        shared = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        if self.algorithm(group) == "muon":
            return shared | {"momentum": group["mu"]}
        return shared | {"beta1": group["beta1"], "beta2": group["beta2"]}

    def state_names(self, optimizer: Optimizer, group: Group) -> Mapping[str, str]:
        """See ``Adapter``."""
        if self.algorithm(group) == "muon":
            return {"momentum_buffer": "momentum"}
        return {"exp_avg": "momentum", "exp_avg_sq": "variance", "step": "step_dev"}

    def read_state(self, group: Group, state: dict[str, Any]) -> dict[str, Any]:
        """See ``Adapter``; older releases counted AdamW's steps in the group alone."""
        if self.algorithm(group) == "adamw" and "exp_avg" in state and "step" not in state:
            return state | {"step": float(group["step"])}
        return state

    def after_step(self, optimizer: Optimizer) -> None:
        """See ``Adapter``."""
        for group in optimizer.param_groups:
            group["step"] += 1


def _orthogonalizer(optimizer: Any) -> str:
    """The table that the optimizer's own function stands for.

    Raises:
        NotImplementedError: It is somebody else's function.
    """
    given = optimizer._newton_schulz_func
    plain = inspect.unwrap(given) if callable(given) else given
    name, module = getattr(plain, "__name__", repr(plain)), str(getattr(plain, "__module__", ""))
    if name not in _ORTHOGONALIZERS or not module.startswith("dion."):
        refuse(
            "dion.Muon",
            {"newton_schulz_func": f"{module}.{name}"},
            "use_polar_express=True or False, without use_gram_newton_schulz and newton_schulz_func",
        )
    return _ORTHOGONALIZERS[name]
