"""What each library's state dicts look like, as far as its adapter does not know. Sources: those of the adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from muon_compile.adapters.dion import MARGIN, DionMuonAdapter
from muon_compile.adapters.heavyball import HeavyBallMuonAdapter
from muon_compile.adapters.hyperparallel import HyperParallelAdamWAdapter, HyperParallelMuonAdapter
from muon_compile.adapters.keller import KellerAdapter
from muon_compile.adapters.moonlight import MoonlightAdapter
from muon_compile.adapters.own import OwnMuonAdapter
from muon_compile.adapters.registry import Adapter, FamilyAdapter, complete
from muon_compile.adapters.torch_adamw import TorchAdamWAdapter
from muon_compile.adapters.torch_muon import TorchMuonAdapter
from muon_compile.config import JORDAN, AdamWConfig, Config, MuonConfig
from muon_compile.conversion.parts import Entries
from muon_compile.spec import Algorithm

Writer = Callable[[Any, Mapping[str, Any]], Entries]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A library's groups of one algorithm.

    Args:
        adapter: Reads them.
        defaults: Their entries, as the class makes them.
        needed: Those that every release has.
        write: Entries from a config and numbers, laid over the defaults.
        others: Entries that a group may have as well.
    """

    adapter: Adapter
    defaults: Entries
    needed: tuple[str, ...]
    write: Writer
    others: tuple[str, ...] = ()

    @property
    def known(self) -> frozenset[str]:
        """Entries of the class."""
        return frozenset((*self.defaults, *self.others))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A library's optimizers.

    Args:
        kinds: By algorithm.
        algorithm: That of a group; None where its entries belong to no kind.
    """

    kinds: Mapping[Algorithm, Kind]
    algorithm: Callable[[Mapping[str, Any]], Algorithm | None]


def stand_in(group: Mapping[str, Any], flags: Mapping[Tensor, Entries], form: str = "") -> Any:
    """An optimizer, as far as adapters look at one."""
    average = "nesterov_ema"
    if group.get("heavyball_momentum") or group.get("nesterov") is False:
        plain = "heavyball_momentum" if group.get("heavyball_momentum") else "exp_avg"
        average = "nesterov_momentum" if group.get("heavyball_momentum") and group.get("nesterov") else plain
    return SimpleNamespace(
        param_groups=[group],
        state=flags,
        # Not in a state dict: dion's default, and what heavyball makes of its arguments.
        _newton_schulz_func=SimpleNamespace(__name__="polar_express", __module__="dion.polar_express"),
        fns=[SimpleNamespace(fn_name=average), SimpleNamespace(fn_name="orthogonalize_update")],
        _find_val_name=lambda name: form,
    )


# -- what each class makes of a config --------------------------------------------------------------------------------


def _betas(numbers: Mapping[str, Any]) -> tuple[Any, Any]:
    return numbers["beta1"], numbers["beta2"]


def _shared(numbers: Mapping[str, Any]) -> Entries:
    return {"lr": numbers["lr"], "weight_decay": numbers["weight_decay"]}


def _with_momentum(numbers: Mapping[str, Any]) -> Entries:
    return {**_shared(numbers), "momentum": numbers["momentum"]}


def _is_rms(config: MuonConfig) -> bool:
    return config.scale in ("match_rms_adamw", "rms_norm")


def _torch_muon(config: MuonConfig, numbers: Mapping[str, Any]) -> Entries:
    given = JORDAN if config.coefficients == "jordan" else config.coefficients
    entries = _with_momentum(numbers) | {"nesterov": config.nesterov, "ns_steps": config.ns_steps}
    if isinstance(given, tuple) and not isinstance(given[0], tuple):
        entries["ns_coefficients"] = given
    if isinstance(config.eps, float):
        entries["eps"] = config.eps
    return entries | {"adjust_lr_fn": "match_rms_adamw" if _is_rms(config) and config.rms == 0.2 else None}


def _adamw(config: AdamWConfig, numbers: Mapping[str, Any]) -> Entries:
    chosen = {"eps": config.eps, "amsgrad": config.amsgrad, "maximize": config.maximize}
    return {**_shared(numbers), "betas": _betas(numbers), **chosen}


def _keller_muon(config: MuonConfig, numbers: Mapping[str, Any]) -> Entries:
    return _with_momentum(numbers)


def _keller_adam(config: AdamWConfig, numbers: Mapping[str, Any]) -> Entries:
    return {**_shared(numbers), "betas": _betas(numbers), "eps": config.eps, "use_muon": False}


def _moonlight_muon(config: MuonConfig, numbers: Mapping[str, Any]) -> Entries:
    chosen = {"momentum": numbers["momentum"], "nesterov": config.nesterov, "ns_steps": config.ns_steps}
    return {"lr": numbers["lr"], "wd": numbers["weight_decay"], **chosen}


def _moonlight_adamw(config: AdamWConfig, numbers: Mapping[str, Any]) -> Entries:
    shared = {"lr": numbers["lr"], "wd": numbers["weight_decay"]}
    return {**shared, "adamw_betas": _betas(numbers), "adamw_eps": config.eps}


def _dion_muon(config: MuonConfig, numbers: Mapping[str, Any]) -> Entries:
    scales = {"spectral_norm": "spectral_norm", "none": None, 1.0: None}
    entries = _shared(numbers) | {"mu": numbers["momentum"], "nesterov": config.nesterov, "algorithm": "muon"}
    if isinstance(config.eps, float):
        entries["epsilon"] = config.eps * MARGIN
    if _is_rms(config) or config.scale in scales:
        entries["adjust_lr"] = "rms_norm" if _is_rms(config) else scales[config.scale]
    for name in ("num_heads", "split_sizes"):
        if getattr(config, name) is not None:
            entries[name] = getattr(config, name)
    return entries | {"flatten": bool(config.flatten)}


def _dion_adamw(config: AdamWConfig, numbers: Mapping[str, Any]) -> Entries:
    return _dion_lion(config, numbers) | {"epsilon": config.eps, "algorithm": "adamw"}


def _dion_lion(config: Config, numbers: Mapping[str, Any]) -> Entries:
    return {**_shared(numbers), "beta1": numbers["beta1"], "beta2": numbers["beta2"], "algorithm": "lion"}


def _hyper_muon(config: MuonConfig, numbers: Mapping[str, Any]) -> Entries:
    mu, given = numbers["momentum"], config.coefficients
    entries = _shared(numbers) | {"momentum": (mu, mu), "nesterov": config.nesterov, "ns_steps": config.ns_steps}
    if given == "jordan":
        entries["ns_variant"] = "legacy"
    elif isinstance(given, tuple):
        rows = given if isinstance(given[0], tuple) else (given,) * config.ns_steps
        entries |= {"ns_variant": "custom", "ns_coefficients": [list(row) for row in rows]}
    if isinstance(config.eps, float):
        entries["ns_epsilon"] = config.eps
    if _is_rms(config):
        entries["matched_adamw_rms"] = config.rms
    elif config.scale in (0.0, 1.0, "none"):
        mode = "zero" if config.scale == 0 else "use_lr"
        entries |= {"matched_adamw_rms": 0.0, "zero_rms_scale_mode": mode}
    return entries | ({"flatten": True} if config.flatten else {})


def _heavyball_muon(config: MuonConfig, numbers: Mapping[str, Any]) -> Entries:
    added = config.momentum_form == "ema_added"
    stored = {"storage_dtype": config.momentum_dtype} if config.momentum_dtype else {}
    betas = (numbers["momentum"], HEAVYBALL["betas"][1])
    form = {"nesterov": config.nesterov, "heavyball_momentum": not added}
    return {**_shared(numbers), "betas": betas, **form, **stored}


def _own_muon(config: MuonConfig, numbers: Mapping[str, Any]) -> Entries:
    return {**_with_momentum(numbers), "algorithm": "muon", "config": dataclasses.asdict(config)}


def _own_adamw(config: AdamWConfig, numbers: Mapping[str, Any]) -> Entries:
    named = {"algorithm": "adamw", "config": dataclasses.asdict(config)}
    return {**_shared(numbers), "betas": _betas(numbers), **named}


# -- what each class makes by itself ----------------------------------------------------------------------------------

# heavyball.Muon with its own defaults, before a step.
HEAVYBALL: Entries = {"lr": 0.0025, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0, "warmup_steps": 0}
HEAVYBALL |= {"cautious_weight_decay": False, "multi_tensor": True, "storage_dtype": "float32", "mars": False}
HEAVYBALL |= {"caution": False, "mars_gamma": 0.0025, "beta2_scale": 0.8, "nesterov": True}
HEAVYBALL |= {"heavyball_momentum": False, "ecc": None, "param_ecc": None}

_DION: Entries = {"lr": 0.01, "mu": 0.95, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "cautious_wd": False}
_DION |= {"algorithm": "muon", "step": 0, "epsilon": 1e-8, "nesterov": False, "flatten": False}
_DION |= {"adjust_lr": "spectral_norm"}

_HYPER: Entries = {"lr": 2e-2, "weight_decay": 0.1, "matched_adamw_rms": 0.2, "momentum": (0.95, 0.95)}
_HYPER |= {"nesterov": True, "ns_steps": 5, "ns_variant": "asym5", "ns_coefficients": None, "ns_epsilon": 1e-10}
_HYPER |= {"zero_rms_scale_mode": "zero", "apply_lr_in_update": False}

_KELLER: Entries = {"lr": 0.02, "weight_decay": 0, "momentum": 0.95}
_KELLER_ADAM: Entries = {"lr": 3e-4, "weight_decay": 0, "betas": (0.9, 0.95), "eps": 1e-10, "use_muon": False}
_MOONLIGHT: Entries = {"lr": 1e-3, "wd": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
_MOONLIGHT_ADAMW: Entries = {"lr": 1e-3, "wd": 0.1, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
_ADAMW_SHAPE = ("lr", "weight_decay", "betas", "eps", "amsgrad", "maximize")
_HYPER_ADAMW: Entries = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_HYPER_ADAMW |= {"amsgrad": False, "maximize": False, "step": 0}
_OWN: Entries = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "algorithm": "muon"}
_OWN_ADAMW: Entries = {"lr": 1e-3, "momentum": 0.95, "betas": (0.9, 0.999), "weight_decay": 1e-2}
_OWN_ADAMW |= {"algorithm": "adamw"}


def _torch_defaults(cls: Any) -> Entries:
    """Of the torch that is here."""
    return dict(cls([torch.nn.Parameter(torch.empty(1, 1))]).defaults)


def _kind(adapter: Any, write: Writer, defaults: Entries, *needed: str, others: tuple[str, ...] = ()) -> Kind:
    return Kind(
        adapter=complete(adapter), defaults=defaults, needed=needed or tuple(defaults), write=write, others=others
    )


def _dion_kind(write: Writer, algorithm: str, *needed: str) -> Kind:
    both = ("lr", "weight_decay", "algorithm", "epsilon", *needed)
    blocks = ("num_heads", "split_sizes")
    return _kind(_DION_ADAPTER, write, _DION | {"algorithm": algorithm}, *both, others=blocks)


_DION_ADAPTER = DionMuonAdapter()
_HYPER_NEEDED = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "matched_adamw_rms")
_HEAVYBALL_NEEDED = ("lr", "weight_decay", "betas", "nesterov", "heavyball_momentum", "warmup_steps")


def _torch_algorithm(group: Mapping[str, Any]) -> Algorithm | None:
    return "muon" if "ns_coefficients" in group else "adamw" if "amsgrad" in group else None


def _named_algorithm(group: Mapping[str, Any]) -> Algorithm | None:
    return group.get("algorithm")


class _Own(FamilyAdapter):
    """``OwnMuonAdapter`` of groups with configs as plain dicts."""

    def __init__(self) -> None:
        self._live = OwnMuonAdapter()

    def config(self, group: Mapping[str, Any]) -> Config:
        """See ``Adapter``."""
        config, kind = group["config"], MuonConfig if group["algorithm"] == "muon" else AdamWConfig
        return kind(**config) if isinstance(config, Mapping) else config

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """See ``Adapter``."""
        return self._live.algorithm(group)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        """See ``Adapter``."""
        return self._live.hyper(group)


FORMATS: dict[str, Format] = {
    "torch": Format(
        kinds={
            "muon": _kind(TorchMuonAdapter(), _torch_muon, _torch_defaults(torch.optim.Muon)),
            "adamw": _kind(TorchAdamWAdapter(), _adamw, _torch_defaults(torch.optim.AdamW), *_ADAMW_SHAPE),
        },
        algorithm=_torch_algorithm,
    ),
    "keller": Format(
        kinds={
            "muon": _kind(KellerAdapter(), _keller_muon, _KELLER),
            "adamw": _kind(KellerAdapter(), _keller_adam, _KELLER_ADAM),
        },
        algorithm=lambda group: "muon" if group.get("use_muon", True) else "adamw",
    ),
    "moonlight": Format(
        kinds={
            "muon": _kind(MoonlightAdapter(), _moonlight_muon, _MOONLIGHT),
            "adamw": _kind(MoonlightAdapter(), _moonlight_adamw, _MOONLIGHT_ADAMW),
        },
        algorithm=lambda group: group.get("algorithm", "muon"),
    ),
    "dion": Format(
        kinds={
            "muon": _dion_kind(_dion_muon, "muon", "mu", "nesterov", "flatten", "adjust_lr"),
            "adamw": _dion_kind(_dion_adamw, "adamw", "beta1", "beta2"),
            "lion": _dion_kind(_dion_lion, "lion", "beta1", "beta2"),
        },
        algorithm=_named_algorithm,
    ),
    "hyperparallel": Format(
        kinds={
            "muon": _kind(HyperParallelMuonAdapter(), _hyper_muon, _HYPER, *_HYPER_NEEDED, others=("flatten",)),
            "adamw": _kind(HyperParallelAdamWAdapter(), _adamw, _HYPER_ADAMW, "lr", "weight_decay", "betas", "eps"),
        },
        algorithm=lambda group: "muon" if "matched_adamw_rms" in group else "adamw" if "betas" in group else None,
    ),
    "heavyball": Format(
        kinds={"muon": _kind(HeavyBallMuonAdapter(), _heavyball_muon, HEAVYBALL, *_HEAVYBALL_NEEDED, others=("beta",))},
        algorithm=lambda group: "muon",
    ),
    "muon_compile": Format(
        kinds={
            "muon": _kind(_Own(), _own_muon, _OWN | {"config": {}}),
            "adamw": _kind(_Own(), _own_adamw, _OWN_ADAMW | {"config": {}}),
        },
        algorithm=_named_algorithm,
    ),
}
# heavyball's momentum, by its form and whether the direction is Nesterov's: the function, what it keeps, and its place.
HEAVYBALL_NAMES = {
    ("ema_added", True): "nesterov_ema_momentum_2",
    ("sum", True): "nesterov_momentum_momentum_2",
    ("sum", False): "heavyball_momentum_momentum_2",
}
