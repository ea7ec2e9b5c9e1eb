"""Keep the stacked state through ``load_state_dict`` of the live optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.optim import Optimizer

if TYPE_CHECKING:
    from muon_compile.run.compiled_step import CompiledStep


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

    def _before(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        step = self._step()
        binding = None if step is None else step.param_views()
        if binding is None:
            return
        state, groups = state_dict.get("state"), state_dict.get("param_groups")
        if not isinstance(state, Mapping) or not isinstance(groups, list):
            raise ValueError("load_state_dict: expected a dict with 'state' and 'param_groups', as state_dict() makes.")
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
            return  # the base class refuses this in its own words, before it changes anything
        ids = [i for group in groups for i in group["params"]]
        index_of = {id(p): i for i, p in enumerate(binding.reading.params)}
        live = [p for group in optimizer.param_groups for p in group["params"]]
        by_index = {index_of[id(p)]: state.get(i) or {} for i, p in zip(ids, live, strict=True) if id(p) in index_of}
        for index, given in by_index.items():
            binding.state.check(index, given)
        self._pending[id(optimizer)] = by_index

    def _after(self, optimizer: Optimizer) -> None:
        step = self._step()
        pending = self._pending.pop(id(optimizer), None)
        binding = None if step is None else step.param_views()
        if step is None or binding is None or pending is None:
            return
        current = binding.state.views
        step.adopt([pending.get(i, current[i]) for i in range(len(current))])
