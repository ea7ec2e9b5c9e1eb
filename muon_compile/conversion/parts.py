"""Groups of a state dict in no library's words, and how far two of them are the same mathematics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muon_compile.config import JORDAN, YOU, AdamWConfig, Config, MuonConfig
from muon_compile.spec import Algorithm

Key = int | str
Entries = dict[str, Any]

# What a user chooses. A class's own table, scale and eps give way to the next class's own where that has no other.
_CHOSEN = ("nesterov", "ns_steps", "num_heads", "split_sizes")
_OWN = ("coefficients", "scale", "eps", "momentum_form")


@dataclass(slots=True, kw_only=True)
class Part:
    """Parameters of one group and one algorithm.

    Args:
        algorithm: Theirs.
        keys: What the state dict calls them: numbers or names.
        names: Their names, where the group has them.
        configs: Each one's mathematics, by key.
        defaults: The same, of a group that its class makes by itself.
        numbers: ``lr``, ``weight_decay``, and ``momentum`` or ``beta1``, ``beta2``.
        states: Each one's state under this library's names, by key; empty where there is none.
        entries: The group's entries that its class knows.
        rest: Those that it does not.
    """

    algorithm: Algorithm
    keys: list[Key]
    names: list[str] | None
    configs: dict[Key, Config]
    defaults: dict[Key, Config]
    numbers: Entries
    states: dict[Key, Entries]
    entries: Entries = field(default_factory=dict)
    rest: Entries = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """That of the first parameter."""
        return self.configs[self.keys[0]]

    @property
    def shapes(self) -> dict[Key, tuple[int, ...]]:
        """Of the parameters that have state."""
        held = {key: state.get("momentum_buffer") for key, state in self.states.items()}
        return {key: tuple(tensor.shape) for key, tensor in held.items() if isinstance(tensor, Tensor)}


def same(a: object, b: object) -> bool:
    """Equal, numbers up to rounding; a list is a tuple, and a one-element tensor its number."""
    a, b = (x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for x in (a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, bool) or isinstance(b, bool) or not (_is_number(a) and _is_number(b)):
        return a is b or (type(a) is type(b) and a == b)
    return math.isclose(a, b, rel_tol=1e-9)  # type: ignore[arg-type]


def lost(part: Part, key: Key, other: Config, *, own: bool = True) -> tuple[str, object] | None:
    """The first field of a parameter's config that another one does not keep, and its value.

    Where ``own``, a field of ``_OWN`` may become the other's if it is as the part's class has it by itself.
    """
    config, default = part.configs[key], part.defaults[key]
    if type(config) is not type(other):
        return "algorithm", part.algorithm
    ours, theirs, usual = _facts(config), _facts(other), _facts(default)
    for name, value in ours.items():
        if same(value, theirs[name]) or (own and name in _OWN and same(value, usual[name])):
            continue
        return name, value
    shape = part.shapes.get(key, ())
    if len(shape) < 3 or not isinstance(config, MuonConfig) or not isinstance(other, MuonConfig):
        return None
    one = _is_one(config, shape)
    return None if _is_one(other, shape) == one else ("flatten", one)


def _facts(config: Config) -> Entries:
    """What lies in the mathematics. Dtypes, the place of eps and the counting of steps are each class's own."""
    if isinstance(config, AdamWConfig):
        return {name: getattr(config, name) for name in ("eps", "amsgrad", "maximize")}
    if not isinstance(config, MuonConfig):
        return {}
    facts: Entries = {name: getattr(config, name) for name in _CHOSEN}
    scale: object = "rms" if config.scale in ("match_rms_adamw", "rms_norm") else config.scale
    scale = 1.0 if scale == "none" else scale
    form = "ema_added" if config.momentum_form == "ema_added" else "usual"
    return facts | {
        "coefficients": _table(config),
        "scale": ("rms", config.rms) if scale == "rms" else scale,
        "eps": config.eps,
        "momentum_form": form,
    }


def _table(config: MuonConfig) -> object:
    given: Any = config.coefficients
    if given == "jordan":
        given = JORDAN
    if given == "you":
        return YOU
    if isinstance(given, str) or isinstance(given[0], tuple):
        return given
    return (given,) * config.ns_steps


def _is_one(config: MuonConfig, shape: tuple[int, ...]) -> bool:
    """Whether a parameter of three or more dims is one matrix."""
    return len(shape) > 3 if config.flatten is None else config.flatten


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
