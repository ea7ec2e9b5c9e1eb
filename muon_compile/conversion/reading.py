"""State dicts read into parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muon_compile.config import Config
from muon_compile.conversion.formats import FORMATS, Kind, stand_in
from muon_compile.conversion.parts import Entries, Key, Part
from muon_compile.spec import Algorithm

# In a group, and no class's own.
_OF_TORCH = ("params", "param_names")
_MOMENTS: dict[Algorithm, tuple[str, ...]] = {
    "muon": ("momentum_buffer",),
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
    "lion": ("exp_avg",),
}


def read_parts(state_dict: Mapping[str, Any], from_: str) -> list[Part]:
    """The parts of a state dict, in the order of its groups.

    Raises:
        ValueError: It is no state dict, or not of ``from_``; or a group asks for what the compiled step has not.
    """
    state, groups = (state_dict.get(name) if isinstance(state_dict, Mapping) else None for name in _BOTH)
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"convert_state: expected a dict with 'state' and 'param_groups', got {got}.")
    parts: list[Part] = []
    for index, group in enumerate(groups):
        try:
            parts += _read_group(group, state, from_)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise ValueError(f"convert_state: group {index}: {error}") from error
    if any(part.algorithm == "adamw" for part in parts):
        for part in parts:
            part.rest.pop("use_muon", None)  # keller's; its writer knows when it is needed
    return parts


_BOTH = ("state", "param_groups")


def _read_group(group: Entries, state: Mapping[Key, Any], from_: str) -> list[Part]:
    found = FORMATS[from_].algorithm(group)
    got = f"got a group with {sorted(k for k in group if k not in _OF_TORCH)}"
    if found not in FORMATS[from_].kinds:
        shapes = "; or ".join(", ".join(sorted(kind.needed)) for kind in FORMATS[from_].kinds.values())
        raise ValueError(f"expected a state dict of {from_!r}, whose groups have {shapes}; {got}.")
    keys: list[Key] = list(group.get("params", ()))
    names = group.get("param_names")
    by_algorithm: dict[Algorithm, list[Key]] = {found: keys}  # type: ignore[dict-item]
    if from_ == "moonlight":
        flags = {key: (state.get(key) or {}).get("use_muon") for key in keys}
        unknown = [key for key, flag in flags.items() if not isinstance(flag, bool)]
        if unknown:
            raise ValueError(
                f"expected a state dict of 'moonlight', whose state has 'use_muon'; {unknown[0]!r} has none."
            )
        by_algorithm = {"muon": [k for k in keys if flags[k]], "adamw": [k for k in keys if not flags[k]]}
    parts = []
    for algorithm, chosen in by_algorithm.items():
        if not chosen:
            continue
        kind = FORMATS[from_].kinds[algorithm]
        _check_shape(group, kind, algorithm, from_, got)
        held = {key: state.get(key) or {} for key in chosen}
        own = None if not names else [names[keys.index(key)] for key in chosen]
        parts.append(_read_part(group, kind, algorithm, held, own, from_))
    if from_ == "moonlight":
        _divide(group, parts)
    return parts


def _check_shape(group: Entries, kind: Kind, algorithm: Algorithm, from_: str, got: str) -> None:
    missing = [name for name in kind.needed if name not in group]
    if missing:
        raise ValueError(f"expected a state dict of {from_!r}, whose groups have {', '.join(missing)}; {got}.")
    for name, other in FORMATS.items():
        like = other.kinds.get(algorithm)
        if name == from_ or like is None or not set(kind.needed) < set(like.needed) <= set(group):
            continue
        if set(like.needed) - set(kind.known):
            raise ValueError(f"expected a state dict of {from_!r}, got what looks like one of {name!r}; {got}.")


def _read_part(
    group: Entries, kind: Kind, algorithm: Algorithm, held: Mapping[Key, Entries], names: list[str] | None, from_: str
) -> Part:
    entries = {name: value for name, value in group.items() if name in kind.known}
    rest = {name: value for name, value in group.items() if name not in kind.known and name not in _OF_TORCH}
    states = {key: _read_state(key, entries | rest, kind, algorithm, entry, from_) for key, entry in held.items()}
    tensors = tensors_of(states)
    defaults = dict(kind.defaults)
    if from_ == "muon_compile":
        preset = group["config"].get("preset") if isinstance(group["config"], Mapping) else None
        defaults["config"] = {"preset": preset} if preset else {}
    if from_ == "heavyball" and int(group.get("step_count") or 0) < int(group["warmup_steps"]):
        entries["warming"] = True
    return Part(
        algorithm=algorithm,
        keys=list(held),
        names=names,
        configs=configs_of(kind, algorithm, entries, tensors),
        defaults=configs_of(kind, algorithm, defaults, tensors),
        numbers=numbers_of(kind, algorithm, entries | rest),
        states=states,
        entries=entries,
        rest=rest,
    )


def _read_state(
    key: Key, group: Entries, kind: Kind, algorithm: Algorithm, entry: dict[Any, Any], from_: str
) -> Entries:
    """A parameter's state under this library's names."""
    if from_ == "heavyball" and set(entry) - {0}:
        raise ValueError(
            f"parameter {key!r}: expected state of whole parameters, under 0, got {sorted(map(str, entry))}."
        )
    if not entry or set(entry) == {"use_muon"}:
        return {}
    form = ""
    if from_ == "heavyball":
        form = next((name for name in entry[0] if "_momentum_" in name), "")
    optimizer = stand_in(group, {}, form)
    if from_ == "hyperparallel" and "step" in entry and not group.get("step"):  # a compiled step keeps both
        raise ValueError(f"parameter {key!r}: expected state of 'hyperparallel', which counts steps in its groups.")
    state = dict(kind.adapter.state_of(dict(entry)))
    given = sorted(map(str, state))
    for ours, theirs in kind.adapter.state_names(optimizer, {**group, "algorithm": algorithm}).items():
        if theirs in state:
            state[ours] = state.pop(theirs)
    state = kind.adapter.read_state({**group, "algorithm": algorithm}, state)
    missing = [name for name in _MOMENTS[algorithm] if name not in state]
    if missing:
        raise ValueError(f"parameter {key!r}: expected state of {from_!r}, with its {missing[0]}, got {given}.")
    return state


def tensors_of(states: Mapping[Key, Entries]) -> dict[Key, Tensor]:
    """What stands in for each parameter: a tensor of its shape, or an empty one where it has no state."""
    nothing = torch.empty(0, 0)
    held = {key: state.get("momentum_buffer", state.get("exp_avg")) for key, state in states.items()}
    return {key: nothing.detach() if tensor is None else tensor.detach() for key, tensor in held.items()}


def configs_of(kind: Kind, algorithm: Algorithm, entries: Entries, tensors: Mapping[Key, Tensor]) -> dict[Key, Config]:
    """Each parameter's mathematics in a group of these entries."""
    group = {**entries, "params": list(tensors.values())}
    flags = {tensor: {"use_muon": algorithm == "muon"} for tensor in tensors.values()}
    keys = {id(tensor): key for key, tensor in tensors.items()}
    found: dict[Key, Config] = {}
    for part in kind.adapter.groups(stand_in(group, flags)):
        config = kind.adapter.config(part)
        found |= {keys[id(tensor)]: config for tensor in part["params"]}
    return {key: found[key] for key in tensors}


def numbers_of(kind: Kind, algorithm: Algorithm, entries: Entries) -> Entries:
    """What may change every step, the learning rate as it is in the group."""
    numbers: Entries = {**kind.adapter.hyper({**entries, "algorithm": algorithm}), "lr": entries["lr"]}
    for name, value in numbers.items():
        ok = isinstance(value, Tensor) and value.numel() == 1
        ok = ok or (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0)
        if not ok:
            raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}.")
    return numbers


def known_to_some(algorithm: Algorithm) -> set[str]:
    """Entries that any library has for an algorithm."""
    kinds = [each.kinds[algorithm] for each in FORMATS.values() if algorithm in each.kinds]
    return {name for kind in kinds for name in kind.known}


def _divide(group: Entries, parts: list[Part]) -> None:
    """Moonlight's one group has the entries of both algorithms: a part keeps the other's where there is no other, and
    of other libraries' those that they have for its algorithm."""
    for part in parts:
        for algorithm, kind in FORMATS["moonlight"].kinds.items():
            if algorithm == part.algorithm:
                continue
            for name in (known_to_some(algorithm) - known_to_some(part.algorithm)) & set(part.rest) - set(kind.known):
                del part.rest[name]
            for name in set(kind.known) & set(part.rest):
                value = part.rest.pop(name)
                if len(parts) == 1 and value != kind.defaults.get(name):
                    part.entries[name] = value
