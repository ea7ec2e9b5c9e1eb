"""``Muon``: a ``torch.optim.Optimizer`` whose step is compiled from the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from muon_compile.config import AdamWConfig, CompileConfig, MuonConfig
from muon_compile.layout import check_tensor
from muon_compile.run.compiled_step import CompiledStep, compile_step
from muon_compile.run.hyper import check_value

_CONFIGS: dict[str, type[MuonConfig] | type[AdamWConfig]] = {"muon": MuonConfig, "adamw": AdamWConfig}


class Muon(Optimizer):
    """Muon for hidden matrices and AdamW for the rest, one compiled graph for both.

    Args:
        params: Parameters, or groups as ``muon_compile.route(model)`` makes them. A group's ``algorithm`` is ``"muon"``
            (default) or ``"adamw"``; it may carry its own ``lr``, ``weight_decay``, ``momentum`` (Muon), ``betas``
            (AdamW) and ``config``.
        lr: Learning rate of Muon groups.
        momentum: Momentum coefficient of Muon groups.
        weight_decay: Decoupled weight decay of Muon groups.
        config: The mathematics of Muon groups.
        adamw_lr: Learning rate of AdamW groups.
        betas: AdamW's coefficients.
        adamw_weight_decay: Decoupled weight decay of AdamW groups.
        adamw_config: AdamW's eps, amsgrad, maximize.
        backend: ``"inductor"`` or ``"aot_eager"``.
        compile_config: What is about compiling.

    Raises:
        ValueError: A parameter or a number that the step cannot take; names the parameter.

    Source: defaults are those of ``torch.optim.Muon`` and ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.95,
        weight_decay: float | Tensor = 0.1,
        *,
        config: MuonConfig | None = None,
        adamw_lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        adamw_weight_decay: float | Tensor = 1e-2,
        adamw_config: AdamWConfig | None = None,
        backend: str = "inductor",
        compile_config: CompileConfig | None = None,
    ) -> None:
        self._group_defaults: dict[str, dict[str, Any]] = {
            "muon": {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "config": config or MuonConfig(),
            },
            "adamw": {
                "lr": adamw_lr,
                "betas": betas,
                "weight_decay": adamw_weight_decay,
                "config": adamw_config or AdamWConfig(),
            },
        }
        self._backend, self._compile_config = backend, compile_config
        self._compiled: CompiledStep | None = None
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.register_state_dict_post_hook(_plain_configs)
        self.register_load_state_dict_pre_hook(_real_configs)

    @property
    def compiled(self) -> CompiledStep:
        """The compiled step: its ``plan``, ``stats`` and ``dump``."""
        if self._compiled is None:
            self._compiled = compile_step(self, backend=self._backend, install=False, config=self._compile_config)
        return self._compiled

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step; compiles at the first call. Returns the closure's loss, if there is one."""
        return self.compiled.run(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its numbers and parameters are checked before anything changes."""
        group = dict(param_group)
        algorithm = group.setdefault("algorithm", "muon")
        if algorithm not in self._group_defaults:
            raise ValueError(f"Muon: algorithm: expected 'muon' or 'adamw', got {algorithm!r}.")
        for name, default in self._group_defaults[algorithm].items():
            group.setdefault(name, default)
        expected = _CONFIGS[algorithm]
        if not isinstance(group["config"], expected):
            raise ValueError(
                f"Muon: a group of algorithm={algorithm!r} takes config={expected.__name__}(...), "
                f"got {type(group['config']).__name__}."
            )
        if "flatten" in group:
            group["config"] = dataclasses.replace(group["config"], flatten=group.pop("flatten"))
        index = len(self.param_groups)
        numbers: dict[str, Any] = {n: group[n] for n in ("lr", "weight_decay", "momentum") if n in group}
        if algorithm == "adamw":
            numbers["beta1"], numbers["beta2"] = group["betas"]
        for name, value in numbers.items():
            check_value(index, name, value, read_tensor=True)
        params = group["params"]
        group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
        for number, entry in enumerate(params):
            named = isinstance(entry, tuple)
            name, tensor = entry if named else (f"{index}/{number}", entry)
            check_tensor(name, tensor, algorithm)
        super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle compiles anew: graphs belong to the parameters they were bound to.
        names = ("defaults", "state", "param_groups", "_group_defaults", "_backend", "_compile_config")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_compiled", None)


def _plain_configs(_: Optimizer, state_dict: dict[str, Any]) -> None:
    """Configs as plain dicts, so that a state dict holds nothing that ``torch.load(weights_only=True)`` refuses."""
    for group in state_dict["param_groups"]:
        if dataclasses.is_dataclass(group.get("config")):
            group["config"] = dataclasses.asdict(group["config"])


def _real_configs(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = []
    for group in state_dict["param_groups"]:
        config = group.get("config")
        if isinstance(config, dict):
            group = {**group, "config": _CONFIGS[group["algorithm"]](**config)}
        groups.append(group)
    return {**state_dict, "param_groups": groups}
