"""Keep the stacked state through ``load_state_dict`` of the live optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.optim import Optimizer

from muon_compile.adapters import Adapter, find_adapter
from muon_compile.adapters.registry import class_path
from muon_compile.distributed import is_foreign

if TYPE_CHECKING:
    from muon_compile.run.compiled_step import CompiledStep


# What wrappers put into names: torch.compile, activation checkpointing, DDP.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")

Group = Mapping[str, Any]


def check_groups(optimizer: Optimizer, adapter: Adapter, saved: Sequence[Group]) -> None:
    """Refuse groups of another optimizer class or of other parameters; there are as many as live ones.

    Raises:
        ValueError: An entry is missing, the algorithm is another, or names differ.
    """
    kind = class_path(type(optimizer))
    for index, (group, live) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        try:
            algorithm = _read(adapter, group)
        except KeyError:
            try:
                algorithm = _read(adapter, _completed(optimizer, group))
            except KeyError as error:
                raise ValueError(
                    f"load_state_dict: group {index}: expected a state dict of {kind}, whose groups have {error}, got "
                    f"one with {sorted(k for k in group if k != 'params')}; nothing has changed. Of another library's "
                    "optimizer? See muon_compile.convert_state."
                ) from error
        if algorithm != adapter.algorithm(live):
            raise ValueError(
                f"load_state_dict: group {index}: expected algorithm {adapter.algorithm(live)!r}, got {algorithm!r}; "
                "nothing has changed."
            )
        alien = [name for name in adapter.config_keys if name in group and name not in live]
        if alien and adapter.config(group) != adapter.config({k: v for k, v in group.items() if k not in alien}):
            raise ValueError(
                f"load_state_dict: group {index}: expected a state dict of {kind}, whose groups have no {alien}, got "
                f"{[group[name] for name in alien]} for them; nothing has changed. Of another library's optimizer? See "
                "muon_compile.convert_state."
            )
        _check_names(index, group, live)


def _read(adapter: Adapter, group: Group) -> str:
    adapter.config(group)
    adapter.hyper(group)
    return adapter.algorithm(group)


def _completed(optimizer: Optimizer, group: Group) -> Group:
    """A group as its class completes those of older releases."""
    probe = object.__new__(type(optimizer))
    probe.__setstate__({"defaults": {}, "state": {}, "param_groups": [{**group, "params": []}]})
    (completed,) = probe.param_groups
    return completed


def _check_names(index: int, saved: Group, live: Group) -> None:
    """State goes by position where parameters have numbers; distributed checkpoints have already put it in order."""
    given, expected = saved.get("param_names"), live.get("param_names")
    if not given or not expected or not all(isinstance(i, int) for i in saved["params"]):
        return
    for name, wanted in zip(given, expected, strict=True):
        if _bare(name) != _bare(wanted):
            raise ValueError(
                f"load_state_dict: group {index}: expected the state of {wanted!r}, got that of {name!r}; nothing has "
                "changed. Where only names differ, remove 'param_names' from the state dict's groups."
            )


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _at_home(live: Group, saved: Group) -> dict[str, Any]:
    """A saved group with what belongs to this run: how matrices are made whole here, and the parameters' names."""
    group = {name: value for name, value in saved.items() if name != "strategy"}
    return group | {name: live[name] for name in ("strategy", "param_names") if name in live}


class LoadHooks:
    """Checks a state dict before anything changes, and copies it into the stacked state afterwards.

    The base class casts loaded state to the parameter's dtype, which would round a float32 momentum of a bfloat16
    parameter; the values are therefore taken from the state dict itself.
    """

    def __init__(self, step: CompiledStep) -> None:
        self._step = ref(step)
        self._pending: dict[int, Mapping[int, Any]] = {}
        self._handles = []
        for optimizer in step.optimizers:
            self._handles.append(optimizer.register_load_state_dict_pre_hook(self._before))
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._after))

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        step = self._step()
        binding = None if step is None else step.param_views()
        if step is None or binding is None:
            return None
        state, saved = state_dict.get("state"), state_dict.get("param_groups")
        if not isinstance(state, Mapping) or not isinstance(saved, list):
            raise ValueError("load_state_dict: expected a dict with 'state' and 'param_groups', as state_dict() makes.")
        live = optimizer.param_groups
        if [len(g["params"]) for g in saved] != [len(g["params"]) for g in live]:
            return None  # the base class refuses this in its own words, before it changes anything
        check_groups(optimizer, find_adapter(optimizer), saved)
        ids = [i for group in saved for i in group["params"]]
        index_of = {id(p): i for i, p in enumerate(binding.reading.params)}
        params = [p for group in live for p in group["params"]]
        own = [group for group in saved for _ in group["params"]]
        by_index = {
            index_of[id(p)]: binding.state.read(index_of[id(p)], group, state.get(i) or {})
            for i, p, group in zip(ids, params, own, strict=True)
            if id(p) in index_of
        }
        for index, given in by_index.items():
            binding.state.check(index, given)
        self._pending[id(optimizer)] = by_index
        # The base class asks a parameter by an operator whether it is a floating one, which a foreign tensor may not
        # answer; what is taken from the state dict itself is kept from it.
        state = dict(state)
        for i, p in zip(ids, params, strict=True):
            if id(p) in index_of and i in state and is_foreign(p):
                known = binding.state.their_names(index_of[id(p)])
                state[i] = {name: value for name, value in state[i].items() if name not in known}
        return {
            **state_dict,
            "state": state,
            "param_groups": [_at_home(old, new) for old, new in zip(live, saved, strict=True)],
        }

    def _after(self, optimizer: Optimizer) -> None:
        step = self._step()
        pending = self._pending.pop(id(optimizer), None)
        binding = None if step is None else step.param_views()
        if step is None or binding is None or pending is None:
            return
        current = binding.state.views
        adapter = find_adapter(optimizer)
        if adapter.owners_save_alone(optimizer):
            adapter.collect_state(optimizer)
            held = binding.state.current()
            pending = {index: held[index] for index in pending}
        step.adopt([pending.get(i, current[i]) for i in range(len(current))])
