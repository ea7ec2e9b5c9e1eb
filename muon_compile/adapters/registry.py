"""What an adapter is, and which ones there are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from muon_compile.config import AdamWConfig, MuonConfig
from muon_compile.spec import Algorithm

Group = Mapping[str, Any]


class Adapter(Protocol):
    """How an optimizer's parameter groups are read. Every method takes one live ``param_groups`` entry."""

    @property
    def class_paths(self) -> tuple[str, ...]:
        """Module path and name of the optimizer's class, as ``cls.__module__`` has it in any release."""

    @property
    def config_keys(self) -> tuple[str, ...]:
        """Group entries that shape the graph; when one changes, the step is planned anew."""

    def algorithm(self, group: Group) -> Algorithm:
        """``"muon"`` or ``"adamw"``."""

    def config(self, group: Group) -> MuonConfig | AdamWConfig:
        """The group's mathematics. Raises ValueError or NotImplementedError for what the step cannot do."""

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """What may change every step: ``lr``, ``weight_decay``, ``momentum`` (Muon) or ``beta1``, ``beta2`` (AdamW)."""


_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(adapter: Adapter) -> None:
    """Make an optimizer class known to ``compile_step``; an adapter for the same class is replaced.

    Raises:
        TypeError: A member of the protocol is missing.
    """
    members = ("class_paths", "config_keys", "algorithm", "config", "hyper")
    missing = [name for name in members if not hasattr(adapter, name)]
    if missing:
        raise TypeError(f"register_adapter: expected an adapter with {members}, got one without {missing}.")
    for path in adapter.class_paths:
        _ADAPTERS[path] = adapter


def known_optimizers() -> list[str]:
    """Class paths of the optimizers that an adapter knows."""
    return sorted(_ADAPTERS)


def class_path(cls: type) -> str:
    """Module path and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def find_adapter(optimizer: Optimizer) -> Adapter:
    """The adapter of an optimizer: that of its class, or of a base whose ``step`` it has not overridden.

    Raises:
        TypeError: No adapter knows the class; the message lists those that are known.
    """
    cls = type(optimizer)
    for base in cls.__mro__:
        adapter = _ADAPTERS.get(class_path(base))
        if adapter is None or not issubclass(base, Optimizer):
            continue
        if inspect.unwrap(cls.step) is not inspect.unwrap(base.step):
            break
        return adapter
    known = ", ".join(known_optimizers())
    raise TypeError(
        f"compile_step: no adapter knows {class_path(cls)}, or it overrides step(). Known: {known}. "
        "Teach it with muon_compile.register_adapter(adapter)."
    )
