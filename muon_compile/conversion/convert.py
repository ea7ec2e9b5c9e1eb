"""``convert_state``: a state dict of one optimizer for another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muon_compile.config import MuonConfig
from muon_compile.conversion.formats import FORMATS
from muon_compile.conversion.parts import Entries, Key, Part
from muon_compile.conversion.reading import read_parts
from muon_compile.conversion.writing import merge_moonlight, write_entries, write_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A state dict, and what was done to it.

    Args:
        state_dict: The new one.
        num_params: Parameters in its groups.
        num_states: Those of them that have state.
        factors: How many momenta were multiplied, by factor; 1.0 stands for those that are the same tensors.
    """

    state_dict: dict[str, Any]
    num_params: int
    num_states: int
    factors: dict[float, int]


def convert_state(state_dict: Mapping[str, Any], *, from_: str, to: str) -> dict[str, Any]:
    """The state dict of one optimizer, as another one would have it.

    Names and places of state and of group entries become the other's. Momentum that is kept as a sum
    ``M <- mu M + G`` is that of an average ``M <- mu M + (1 - mu) G`` divided by ``1 - mu``: exact where the group's
    momentum was the same at every step. Learning rates are not changed, though libraries scale updates by shapes in
    their own ways. Of a class's own coefficients, scale and eps the other gets what it can represent, and keeps its own
    otherwise; entries that it has no use for stay in the groups, under their names, so that the way back finds them.

    Args:
        state_dict: As ``optimizer.state_dict()`` makes it, parameters by number or by name. It is not modified. Tensors
            that are not multiplied are the same objects in the result: moments of AdamW, momenta of the same form,
            learning rates.
        from_: Whose it is: ``"torch"`` (Muon, AdamW, or both in one dict), ``"keller"``, ``"moonlight"``, ``"dion"``
            (Polar Express), ``"hyperparallel"`` (Muon, AdamW, or both), ``"heavyball"`` or ``"muon_compile"``.
        to: Whose it shall be. Moonlight has one group for all; torch and HyperParallel have two optimizers,
            whose groups are in one dict then.

    Raises:
        ValueError: A name that is not known, a state dict that is not of ``from_``, or something that ``to`` cannot
            represent and that a user has chosen: nesterov, steps, blocks, Lion, another scale, amsgrad.
    """
    return converted(state_dict, from_=from_, to=to).state_dict


def converted(state_dict: Mapping[str, Any], *, from_: str, to: str) -> Converted:
    """``convert_state``, with what was done."""
    for name, given in (("from_", from_), ("to", to)):
        if given not in FORMATS:
            raise ValueError(f"convert_state: {name}: expected one of {', '.join(map(repr, FORMATS))}, got {given!r}.")
    parts = read_parts(state_dict, from_)
    num_params = sum(len(part.keys) for part in parts)
    num_states = sum(1 for part in parts for state in part.states.values() if state)
    if from_ == to:
        same = {**state_dict, "state": {k: dict(v) for k, v in state_dict["state"].items()}}
        same["param_groups"] = [dict(group) for group in state_dict["param_groups"]]
        return Converted(state_dict=same, num_params=num_params, num_states=num_states, factors={})
    states: dict[Key, Entries] = {}
    groups: list[Entries] = []
    factors: dict[float, int] = {}
    mixed = {part.algorithm for part in parts} == {"muon", "adamw"}
    for index, part in enumerate(parts):
        entries, config = write_entries(part, index, from_, to)
        if to == "keller" and mixed and part.algorithm == "muon":
            entries["use_muon"] = True
        factor = _factor(part, config, index)
        written = write_state(part, entries, config, to, factor)
        states |= written
        if part.algorithm == "muon":
            factors[factor] = factors.get(factor, 0) + sum("momentum_buffer" in s for s in part.states.values())
        names = {} if part.names is None else {"param_names": list(part.names)}
        groups.append({**entries, **names, "params": list(part.keys)})
    if to == "moonlight":
        groups = merge_moonlight(groups, [part.algorithm for part in parts])
    order = {key: number for number, key in enumerate(k for group in groups for k in group["params"])}
    known = {key: states[key] for key in sorted(states, key=order.__getitem__)}
    new = {**state_dict, "state": known, "param_groups": groups}
    return Converted(state_dict=new, num_params=num_params, num_states=num_states, factors=factors)


def _factor(part: Part, config: object, index: int) -> float:
    """What momentum is multiplied by."""
    if not isinstance(config, MuonConfig) or not isinstance(part.config, MuonConfig):
        return 1.0
    was, becomes = part.config.momentum_form == "sum", config.momentum_form == "sum"
    if was == becomes:
        return 1.0
    mu = float(part.numbers["momentum"])
    if mu >= 1:
        raise ValueError(
            f"convert_state: group {index}: momentum: expected less than 1, got {mu}: an average with it holds nothing "
            "of the gradients, so no sum is like it."
        )
    return 1 - mu if was else 1 / (1 - mu)
