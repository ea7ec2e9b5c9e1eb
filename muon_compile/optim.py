"""``Muon``: a ``torch.optim.Optimizer`` whose step is compiled from the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from muon_compile.config import AdamWConfig, CompileConfig, Config, LionConfig, MuonConfig
from muon_compile.layout import check_tensor
from muon_compile.run.compiled_step import CompiledStep
from muon_compile.run.hyper import check_value
from muon_compile.spec import CONFIGS


class Muon(Optimizer):
    """Muon for hidden matrices and AdamW for the rest, one compiled graph for both.

    Args:
        params: Parameters, or groups as ``muon_compile.route(model)`` makes them. A group's ``algorithm`` is ``"muon"``
            (default), ``"adamw"`` or ``"lion"``; it may carry its own ``lr``, ``weight_decay``, ``momentum`` (Muon),
            ``betas`` (AdamW, Lion) and ``config``. A Lion group has an lr and betas of its own.
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
            "lion": {"betas": (0.9, 0.99), "weight_decay": adamw_weight_decay, "config": LionConfig()},
        }
        self._backend, self._compile_config = backend, compile_config
        self._compiled: CompiledStep | None = None
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._register_config_hooks()
        self._check()

    def _register_config_hooks(self) -> None:
        self.register_state_dict_post_hook(_plain_configs)
        self.register_load_state_dict_pre_hook(_real_configs)

    def _check(self) -> None:
        """Plan right away where the parameters exist, so that bad input is refused here and state is there to save."""
        if not any(p.device.type == "meta" for group in self.param_groups for p in group["params"]):
            _ = self.compiled

    @property
    def compiled(self) -> CompiledStep:
        """The compiled step: its ``plan``, ``stats`` and ``dump``."""
        if self._compiled is None:
            # Whether a compiler is there is asked when it is needed: compile_step may still choose another backend.
            self._compiled = CompiledStep(
                (self,),
                backend=self._backend,
                strategy="auto",
                ns="auto",
                names=None,
                config=self._compile_config or CompileConfig(),
                check_compiler=False,
            )
        return self._compiled

    def accept_compiled_step(self, step: CompiledStep | None) -> None:
        """Take a step that ``compile_step`` made for this optimizer; None: make one of its own when next needed."""
        self._compiled = step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step; compiles at the first call. Returns the closure's loss, if there is one."""
        return self.compiled.run(closure)

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer``'s; complete from the start, with configs as plain dicts."""
        self._check()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer``'s, but momentum keeps its configured dtype."""
        self._check()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its numbers and parameters are checked before anything changes."""
        group = dict(param_group)
        algorithm = group.setdefault("algorithm", "muon")
        if algorithm not in self._group_defaults:
            raise ValueError(f"Muon: algorithm: expected 'muon', 'adamw' or 'lion', got {algorithm!r}.")
        if algorithm == "lion" and "lr" not in group:
            raise ValueError(
                "Muon: a group of algorithm='lion' takes an lr of its own: Lion's is another than AdamW's."
            )
        for name, default in self._group_defaults[algorithm].items():
            group.setdefault(name, default)
        expected: type[Config] = CONFIGS[algorithm]
        if not isinstance(group["config"], expected):
            raise ValueError(
                f"Muon: a group of algorithm={algorithm!r} takes config={expected.__name__}(...), "
                f"got {type(group['config']).__name__}."
            )
        if "flatten" in group and algorithm != "muon":
            raise ValueError(
                f"Muon: flatten: expected in groups of algorithm='muon' only, got it in one of {algorithm!r}."
            )
        if "flatten" in group:
            group["config"] = dataclasses.replace(group["config"], flatten=group.pop("flatten"))
        index = len(self.param_groups)
        numbers: dict[str, Any] = {n: group[n] for n in ("lr", "weight_decay", "momentum") if n in group}
        if algorithm != "muon":
            betas = group["betas"]
            if not isinstance(betas, (tuple, list)) or len(betas) != 2:
                raise ValueError(f"Muon: betas: expected two numbers, got {betas!r}.")
            numbers["beta1"], numbers["beta2"] = betas
        for name, value in numbers.items():
            check_value(index, name, value, read_tensor=True)
        taken = {id(p): n for g in self.param_groups for p, n in zip(g["params"], _names(g), strict=True)}
        params = group["params"]
        group["params"] = params = [params] if isinstance(params, Tensor) else list(params)
        for number, entry in enumerate(params):
            named = isinstance(entry, tuple)
            name, tensor = entry if named else (f"{index}/{number}", entry)
            check_tensor(name, tensor, algorithm)
            if id(tensor) in taken:
                raise ValueError(
                    f"Parameter {name!r} is given twice (first as {taken[id(tensor)]!r}); expected it once."
                )
            taken[id(tensor)] = name
        super().add_param_group(group)
        if self._compiled is not None:
            try:
                self._compiled.rebind()
            except BaseException:
                self.param_groups.pop()
                raise

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle compiles anew: graphs belong to the parameters they were bound to.
        names = ("defaults", "state", "param_groups", "_group_defaults", "_backend", "_compile_config")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_compiled" not in self.__dict__:  # a copy or a pickle; load_state_dict comes by here too
            self._compiled = None
            self._register_config_hooks()


def _names(group: dict[str, Any]) -> list[str]:
    names: list[str] = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return names


def _plain_configs(_: Optimizer, state_dict: dict[str, Any]) -> None:
    """Configs as plain dicts, so that a state dict holds nothing that ``torch.load(weights_only=True)`` refuses."""
    for group in state_dict["param_groups"]:
        if dataclasses.is_dataclass(group.get("config")):
            group["config"] = dataclasses.asdict(group["config"])


def _real_configs(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = []
    for group in state_dict["param_groups"]:
        config = group.get("config")
        if group.get("algorithm") not in CONFIGS or config is None:
            raise ValueError(
                "Muon.load_state_dict: expected a state dict of muon_compile.Muon, whose groups have 'algorithm' and "
                f"'config', got a group with {sorted(k for k in group if k != 'params')}."
            )
        if isinstance(config, dict):
            group = {**group, "config": CONFIGS[group["algorithm"]](**config)}
        groups.append(group)
    return {**state_dict, "param_groups": groups}
