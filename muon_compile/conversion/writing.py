"""Parts written as another library's groups and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muon_compile.config import Config, MuonConfig
from muon_compile.conversion.formats import FORMATS, HEAVYBALL_NAMES, Kind, stand_in
from muon_compile.conversion.parts import Entries, Key, Part, lost, same
from muon_compile.conversion.reading import configs_of, known_to_some, numbers_of, tensors_of

_MISSING = object()


def write_entries(part: Part, index: int, from_: str, to: str) -> tuple[Entries, Config]:
    """A part's group entries, as another class has them, and the mathematics that they are there.

    Raises:
        ValueError: Something that was chosen cannot be represented.
    """
    where = f"convert_state: group {index}"
    kind = FORMATS[to].kinds.get(part.algorithm)
    if kind is None:
        has = " and ".join(FORMATS[to].kinds)
        raise ValueError(f"{where}: expected groups that {to!r} has, {has}, got one of {part.algorithm!r}.")
    if part.entries.pop("warming", False):
        raise ValueError(
            f"{where}: warmup_steps={part.entries['warmup_steps']}: expected a warm-up that is over: {to!r} has none."
        )
    _check_dims(part, where, to)
    entries = _finished({**kind.defaults, **kind.write(part.config, part.numbers)}, part, to)
    # Whatever it is, this library's own Muon can represent it; of several in one group the first would be all.
    problem = _problem(part, kind, entries, own=to != "muon_compile")
    for name, value in part.rest.items():
        counts = name == "step" and (part.algorithm == "adamw" or value is None)
        if name in entries and not counts and _problem(part, kind, {**entries, name: value}) is None:
            entries[name], problem = value, None
    if problem is not None:
        name, value = problem
        raise ValueError(
            f"{where}: {name}: expected what {to!r} can represent, got {value!r} of {from_!r}; nothing was converted. "
            "Change it before, or go on with muon_compile.Muon."
        )
    config = next(iter(configs_of(kind, part.algorithm, entries, tensors_of(part.states)).values()))
    back = FORMATS[from_].kinds[part.algorithm]
    returned = back.defaults | back.write(config, numbers_of(kind, part.algorithm, entries))
    returned = _finished(returned, part, from_)
    for name, value in part.entries.items():
        unused = from_ == "heavyball" and name == "eps"  # by its Muon, and another's eps by its name
        if name not in entries and not unused and not same(returned.get(name, _MISSING), value):
            entries[name] = value
    entries |= {name: value for name, value in part.rest.items() if name not in entries}
    if to == "heavyball" and "step_count" in entries:
        entries.setdefault("step", None)  # it has a value within a step only
    return entries, config


def _check_dims(part: Part, where: str, to: str) -> None:
    for key, shape in part.shapes.items():
        if to == "torch" and len(shape) != 2:
            raise ValueError(f"{where}: parameter {key!r}: torch.optim.Muon takes two dims, got shape {shape}.")


def _finished(entries: Entries, part: Part, to: str) -> Entries:
    """With the count of steps that some have in their groups, and without what is of no consequence."""
    if "flatten" in entries and all(len(part.shapes.get(key, ())) == 2 for key in part.keys):
        default = FORMATS[to].kinds[part.algorithm].defaults
        entries = {name: default.get(name) if name == "flatten" else value for name, value in entries.items()}
        entries = {name: value for name, value in entries.items() if name != "flatten" or name in default}
    counts = {float(state["step"]) for state in part.states.values() if "step" in state}
    if part.algorithm == "adamw" and to == "hyperparallel":
        if len(counts) > 1:
            raise ValueError(
                f"convert_state: step: expected one count for all parameters of a group, as 'hyperparallel' "
                f"has it, got {sorted(map(int, counts))}."
            )
        if not counts:
            return {name: value for name, value in entries.items() if name != "step"}
    if "step" in entries and part.algorithm == "adamw":
        return entries | {"step": int(max(counts, default=0))}
    return entries


def _problem(part: Part, kind: Kind, entries: Entries, *, own: bool = True) -> tuple[str, object] | None:
    """What of a part these entries do not keep."""
    try:
        configs = configs_of(kind, part.algorithm, entries, tensors_of(part.states))
        numbers = numbers_of(kind, part.algorithm, entries)
    except (ValueError, TypeError, NotImplementedError) as error:
        return "entries", str(error)
    for name, value in part.numbers.items():
        if not same(numbers[name], value):
            return name, value
    return next((found for key in part.keys if (found := lost(part, key, configs[key], own=own)) is not None), None)


def write_state(part: Part, entries: Entries, config: Config, to: str, factor: float) -> dict[Key, Entries]:
    """A part's state under the other's names."""
    adapter = FORMATS[to].kinds[part.algorithm].adapter
    group: Mapping[str, Any] = {**entries, "algorithm": part.algorithm}
    form = ""
    if to == "heavyball" and isinstance(config, MuonConfig):
        form = HEAVYBALL_NAMES[config.momentum_form or "", bool(config.nesterov)]
    optimizer = stand_in(group, {}, form)
    names = adapter.state_names(optimizer, group)
    written: dict[Key, Entries] = {}
    for key, state in part.states.items():
        new: Entries = {}
        for name, value in state.items():
            value = value * factor if name == "momentum_buffer" and factor != 1 else value
            new[names.get(name, name)] = _as_count(value) if name == "step" else value
        if new:
            adapter.write_state(optimizer, group, new)
        if new and to == "heavyball":
            new["is_initialized"] = {0, 1, 2}  # its transforms
            if "step_count" in entries and not written:
                new["step"] = entries["step_count"]
            new = {0: new}  # type: ignore[dict-item]
        if to == "moonlight":
            new = {"use_muon": part.algorithm == "muon"} | new
        if new:
            written[key] = new
    return written


def _as_count(value: object) -> Tensor:
    """As torch keeps it."""
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() == 0:
        return value
    return torch.tensor(float(value), dtype=torch.float32)  # type: ignore[arg-type]


def merge_moonlight(groups: Sequence[Entries], algorithms: Sequence[str]) -> list[Entries]:
    """One group of all, Muon's parameters first.

    Raises:
        ValueError: What the one group would have once differs.
    """
    known = {name for kind in FORMATS["moonlight"].kinds.values() for name in kind.known}
    ordered = sorted(zip(algorithms, groups, strict=True), key=lambda pair: pair[0] != "muon")
    libraries = known_to_some("muon") & known_to_some("adamw")
    merged: Entries = {}
    for algorithm, group in ordered:
        own = FORMATS["moonlight"].kinds[algorithm].known  # type: ignore[index]
        for name, value in group.items():
            if name in ("params", "param_names") or (name in known and name not in own and name in merged):
                continue
            if name in merged and not same(merged[name], value):
                if name not in own and name in libraries:
                    continue  # kept for the way back, to a class that has it for both algorithms
                raise ValueError(
                    f"convert_state: {name}: moonlight has one group for all parameters: expected one value, got "
                    f"{merged[name]!r} and {value!r}."
                )
            merged[name] = value
    named = [group.get("param_names") for _, group in ordered]
    if any(named) and not all(named):
        raise ValueError("convert_state: param_names: expected them in all groups or in none: moonlight has one group.")
    defaults = {name: value for kind in FORMATS["moonlight"].kinds.values() for name, value in kind.defaults.items()}
    names = {"param_names": [name for each in named for name in each or ()]} if all(named) else {}
    return [{**defaults, **merged, **names, "params": [key for _, group in ordered for key in group["params"]]}]
