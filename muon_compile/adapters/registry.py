"""What an adapter is, and which ones there are."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Literal, Protocol, cast

from torch import Tensor
from torch.optim import Optimizer

from muon_compile.config import Config
from muon_compile.spec import Algorithm

Group = Mapping[str, Any]


class Adapter(Protocol):
    """How an optimizer is read: what its parameter groups mean, and what it calls its state.

    ``class_paths``, ``config_keys``, ``algorithm``, ``config`` and ``hyper`` are needed; the others have defaults that
    fit an optimizer which keeps its state as torch's do. Inherit from this class or not, as you like. Methods take a
    live ``param_groups`` entry and are called every step, so that schedulers go on working. An optimizer that counts
    AdamW's steps in its groups needs ``read_state``, ``state_version`` and ``after_step``.
    """

    @property
    def class_paths(self) -> tuple[str, ...]:
        """Module path and name of the optimizer's class, as ``cls.__module__`` has it in any release."""

    @property
    def config_keys(self) -> tuple[str, ...]:
        """Group entries that shape the graph; when one changes, the step is planned anew."""

    def algorithm(self, group: Group) -> Algorithm:
        """``"muon"``, ``"adamw"`` or ``"lion"``."""

    def config(self, group: Group) -> Config:
        """The group's mathematics: a ``MuonConfig``, ``AdamWConfig`` or ``LionConfig``. Raises ValueError or
        NotImplementedError for what the step cannot do."""

    def hyper(self, group: Group) -> dict[str, float | Tensor]:
        """What may change every step: ``lr``, ``weight_decay``, and ``momentum`` (Muon) or ``beta1``, ``beta2``."""

    grad_names: tuple[str, ...] = ("grad",)
    """Attributes of a parameter that may hold its gradient, the first that is not None counts."""

    def check(self, optimizer: Optimizer) -> None:
        """Refuse what is not in the groups: callbacks, modes. Called before every step. Raises NotImplementedError."""
        return

    def missing_gradient(self, optimizer: Optimizer) -> Literal["skip", "zero"]:
        """What a parameter without a gradient does: nothing, or a step with a gradient of zeros."""
        return "skip"

    def groups(self, optimizer: Optimizer) -> Sequence[Group]:
        """The groups; one that holds two algorithms' parameters is given as two (``part_of``)."""
        return optimizer.param_groups

    def state_names(self, optimizer: Optimizer, group: Group) -> Mapping[str, str]:
        """What the optimizer calls ``momentum_buffer``, ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq`` and ``step``,
        where it has another name for them."""
        return {}

    def state_of(self, entry: dict[Any, Any]) -> dict[str, Any]:
        """Where in a parameter's ``optimizer.state`` entry those are."""
        return entry

    def read_state(self, group: Group, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state under this library's names, completed by what the optimizer keeps elsewhere; of a
        parameter that has none yet, nothing or ``step`` alone."""
        return state

    def state_version(self, group: Group) -> object:
        """What of a group ``read_state`` looks at: where somebody else changes it, state is read again."""
        return None

    def write_state(self, optimizer: Optimizer, group: Group, state: dict[str, Any]) -> None:
        """The step is taken out: make a parameter's state, under the optimizer's names and in place, what it can go on
        from."""
        return

    def collect_state(self, optimizer: Optimizer) -> None:
        """Called once, on every rank, before state is read: give each rank the state that only its owner has."""
        return

    def owners_save_alone(self, optimizer: Optimizer) -> bool:
        """Whether each rank's checkpoint has its own parameters' state alone, so that state is collected after loading
        too. Every rank loads then."""
        return False

    def after_step(self, optimizer: Optimizer) -> None:
        """What the optimizer's own step does besides: count steps in its groups, say. Also where no parameter has a
        gradient; not for a step that is skipped (``nonfinite``), so then every step waits to know."""
        return

    def uses_up_gradients(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's own step sets ``.grad`` to None."""
        return False


class FamilyAdapter(Adapter):
    """An adapter of classes that people copy into their own code.

    Args:
        class_paths: Module path and name of your copy; none: those of the original.
    """

    class_paths: tuple[str, ...] = ()
    config_keys: tuple[str, ...] = ()

    def __init__(self, *class_paths: str) -> None:
        if class_paths:
            self.class_paths = class_paths


_NEEDED = ("class_paths", "config_keys", "algorithm", "config", "hyper")
_ADAPTERS: dict[str, Adapter] = {}


class _Completed:
    """An adapter that does not inherit, with the defaults for what it leaves out."""

    def __init__(self, adapter: object) -> None:
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._adapter, name):
            return getattr(self._adapter, name)
        default = getattr(Adapter, name)
        return MethodType(default, self._adapter) if inspect.isfunction(default) else default


def counts_steps(adapter: Adapter) -> bool:
    """Whether ``after_step`` does anything."""
    made = adapter._adapter if isinstance(adapter, _Completed) else adapter
    return getattr(type(made), "after_step", Adapter.after_step) is not Adapter.after_step


def leaves_of(optimizer: Any) -> list[Any]:
    """The optimizers that a chain of them holds by name (HyperParallel's ``ChainedOptimizer``), or itself."""
    held = getattr(optimizer, "optimizers_dict", None)
    if isinstance(optimizer, Optimizer) or not isinstance(held, Mapping):
        return [optimizer]
    return list(held.values())


def refuse(optimizer: str, given: Mapping[str, object], expected: str) -> None:
    """Refuse options that the step does not have.

    Raises:
        NotImplementedError: There are any; names them.
    """
    if given:
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise NotImplementedError(
            f"{optimizer}: {listed}: the compiled step has no such thing; expected {expected}. Leave it to the "
            "optimizer's own step."
        )


def part_of(group: Group, chosen: Callable[[Tensor], bool], **entries: Any) -> Group | None:
    """A group of some of a group's parameters, with entries of its own; None where there are none."""
    names = group.get("param_names") or [None] * len(group["params"])
    kept = [(p, n) for p, n in zip(group["params"], names, strict=True) if chosen(p)]
    if not kept:
        return None
    part = {**group, **entries, "params": [p for p, _ in kept]}
    return part | ({"param_names": [n for _, n in kept]} if group.get("param_names") else {})


def register_adapter(adapter: object) -> None:
    """Make an optimizer class known to ``compile_step``; an adapter for the same class is replaced.

    Args:
        adapter: See ``Adapter``.

    Raises:
        TypeError: A member of the protocol is missing.
    """
    if isinstance(adapter, type):
        raise TypeError(f"register_adapter: expected an adapter, got the class {adapter.__name__}; call it.")
    missing = [name for name in _NEEDED if getattr(type(adapter), name, None) is getattr(Adapter, name)]
    missing += [name for name in _NEEDED if not hasattr(adapter, name)]
    if missing:
        raise TypeError(f"register_adapter: expected an adapter with {_NEEDED}, got one without {missing}.")
    paths = cast(Adapter, adapter).class_paths
    if isinstance(paths, str) or not all(isinstance(path, str) and "." in path for path in paths):
        raise TypeError(
            f"register_adapter: class_paths: expected a tuple of paths such as ('my_package.Muon',), got {paths!r}."
        )
    for path in paths:
        _ADAPTERS[path] = complete(adapter)


def complete(adapter: object) -> Adapter:
    """An adapter with all members of the protocol."""
    return cast(Adapter, adapter if Adapter in type(adapter).__mro__ else _Completed(adapter))


# What a subclass may have of its own: it decides nothing about a step.
_HARMLESS = {"state_dict", "load_state_dict", "zero_grad", "add_param_group", "step"}


def _overridden(cls: type, base: type) -> set[str]:
    """Methods of a class's base that it has in another form."""
    own = cls.__mro__[: cls.__mro__.index(base)]
    names = {name for one in own for name in vars(one) if not name.startswith("__")} - _HARMLESS
    return {name for name in names if callable(getattr(base, name, None)) and not hasattr(Optimizer, name)}


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
        NotImplementedError: The optimizer does something that the step does not.
    """
    cls = type(optimizer)
    for base in cls.__mro__:
        adapter = _ADAPTERS.get(class_path(base))
        if adapter is None or not issubclass(base, Optimizer):
            continue
        if inspect.unwrap(cls.step) is not inspect.unwrap(base.step):
            break
        changed = sorted(_overridden(cls, base))
        if changed:
            raise TypeError(
                f"compile_step: {class_path(cls)} overrides {', '.join(changed)} of {class_path(base)}, which the "
                "compiled step would not call. Teach it with muon_compile.register_adapter(adapter)."
            )
        adapter.check(optimizer)
        return adapter
    raise TypeError(f"compile_step: {_unknown(cls)}")


def _unknown(cls: type) -> str:
    """Why no adapter stands for a class, and what to do."""
    path, paths = class_path(cls), known_optimizers()
    bases = [class_path(base) for base in cls.__mro__[1:] if class_path(base) in _ADAPTERS]
    if bases:
        why = f"{path} overrides step() of {bases[0]}, which the compiled step would not call."
    else:
        near = difflib.get_close_matches(path, paths, n=1, cutoff=0.8)
        why = f"no adapter knows {path}" + (f"; {near[0]} is known." if near else ".")
    return (
        f"{why} A copy of a known optimizer is registered by its path, "
        f'muon_compile.register_adapter(muon_compile.adapters.KellerAdapter("{path}")) for one; another one by an '
        f"adapter of its own (docs/migrate.md). Known: {', '.join(paths)}."
    )
