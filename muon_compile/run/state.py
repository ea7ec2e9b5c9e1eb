"""Stacked optimizer state, and its per-parameter views in ``optimizer.state``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muon_compile.adapters import Group
from muon_compile.build.pure import init_state
from muon_compile.build.rounding import MASTER, STEPS
from muon_compile.distributed import like_param, local_part, local_tensor, misfit, own_copy
from muon_compile.plan.plan import Plan
from muon_compile.run.reading import Reading, live_groups

ParamState = Mapping[str, Any]


class Begun(dict[str, Any]):
    """The state of a parameter that has none yet, beside what its optimizer knows of it: zeros but for that."""


class StateStore:
    """The state of a plan, bound to the parameters of a reading.

    ``optimizer.state[p]`` holds views: what the graph writes is seen there at once, and in-place changes there are seen
    by the graph.
    """

    def __init__(self, plan: Plan, reading: Reading, optimizers: Sequence[Optimizer]) -> None:
        self.plan, self.reading, self.optimizers = plan, reading, list(optimizers)
        self.stacked = init_state(plan, [local_tensor(p) for p in reading.params])
        # What optimizers are given, distributed as the parameters are; and this rank's memory of the same.
        self.views: list[dict[str, Tensor]] = [{} for _ in reading.params]
        self._local: list[dict[str, Tensor]] = [{} for _ in reading.params]
        for bucket in plan.buckets:
            for name, tensor in self.stacked[bucket.name].items():
                for index, view in zip(bucket.params, tensor.unbind(0), strict=True):
                    self._local[index][name] = view
                    self.views[index][name] = like_param(view, reading.params[index])
        groups = [group for _, group in live_groups(optimizers, reading.adapters)]
        # What the optimizers call each of them.
        self._names: list[Mapping[str, str]] = [
            reading.adapter(index).state_names(self.optimizers[reading.owners[index]], groups[spec.group])
            for index, spec in enumerate(reading.specs)
        ]
        self._given: list[dict[Any, Any]] = []
        self._versions: list[object] | None = None

    @property
    def inputs(self) -> tuple[tuple[tuple[int, str], Tensor], ...]:
        """Bucket index, state name and tensor of every stacked tensor, in a fixed order."""
        return tuple(
            ((index, name), tensor)
            for index, bucket in enumerate(self.plan.buckets)
            for name, tensor in self.stacked[bucket.name].items()
        )

    def is_attached(self) -> bool:
        """Whether ``optimizer.state`` still holds the very views that were put there."""
        if self._versions != self._live_versions():
            return False
        states = [optimizer.state for optimizer in self.optimizers]
        for param, owner, given, views, names in zip(
            self.reading.params, self.reading.owners, self._given, self.views, self._names, strict=True
        ):
            entry = states[owner].get(param)
            if entry is not given:
                return False
            held = self.reading.adapters[owner].state_of(entry)
            for name, view in views.items():
                if held.get(names.get(name, name)) is not view:
                    return False
        return True

    def _live_versions(self) -> list[object]:
        return [a.state_version(group) for a, group in live_groups(self.optimizers, self.reading.adapters)]

    def note_versions(self) -> None:
        """What groups say of state is what the step has."""
        self._versions = self._live_versions()

    def read_again(self) -> None:
        """The step and the groups went apart: before the next step state is read anew."""
        self._versions = None

    def their_names(self, index: int) -> set[str]:
        """What the optimizer calls a parameter's state."""
        return {self._names[index].get(name, name) for name in self.views[index]}

    def read(self, index: int, group: Group, entry: ParamState) -> ParamState:
        """A parameter's state, as its optimizer has or had it beside a group, under this library's names."""
        adapter, names = self.reading.adapter(index), self._names[index]
        if not entry:
            return Begun(adapter.read_state(group, {}))
        state = dict(adapter.state_of(dict(entry)))
        for ours, theirs in names.items():
            if theirs in state:
                state[ours] = state.pop(theirs)
        return adapter.read_state(group, state)

    def check(self, index: int, given: ParamState) -> None:
        """Refuse state (``read``) that does not fit a parameter.

        Raises:
            ValueError: A shape differs, or an entry is missing; names the parameter.
        """
        spec = self.reading.specs[index]
        if not given or isinstance(given, Begun):
            return
        for name, view in self.views[index].items():
            if name not in given and name in (MASTER, STEPS):
                continue  # of a run without them: begun anew from the parameter
            if name not in given:
                hint = "missing entries are only taken as zero when all of them are missing."
                raise ValueError(f"State of {spec.name!r}: expected {list(self.views[index])}, got no {name!r}; {hint}")
            value = given[name]
            if name in (MASTER, STEPS) and isinstance(value, Tensor) and value.dtype != torch.float32:
                raise ValueError(
                    f"State of {spec.name!r}: {name}: expected float32, got {value.dtype}: a plain optimizer's "
                    "load_state_dict casts state to the parameter's dtype. Call compile_step first and load after it; "
                    f"or remove {name!r} from the state, to begin anew from the parameter."
                )
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
            if name in ("step", STEPS) and shape in ((), (1,)):
                continue
            wrong = misfit(value, self._local[index][name], self.reading.params[index], view)
            if wrong is not None:
                raise ValueError(f"State of {spec.name!r}: {name}: {wrong}.")

    @torch.no_grad()
    def adopt(self, states: Sequence[ParamState]) -> None:
        """Copy per-parameter state (``read``) into the stacked tensors; a parameter without any starts from zero.

        Raises:
            ValueError: Something does not fit; nothing has been copied then.
        """
        for index, given in enumerate(states):
            self.check(index, given)
        for index, (views, given) in enumerate(zip(self.views, states, strict=True)):
            for name, view in views.items():
                value, local = given.get(name), self._local[index][name]
                if value is None:
                    local.zero_()
                elif isinstance(value, Tensor):
                    if value is not view:
                        local.copy_(local_part(value, self.reading.params[index], view).reshape(local.shape))
                else:
                    local.fill_(float(value))

    def current(self) -> list[ParamState]:
        """What the optimizers hold now, by parameter, under this library's names."""
        groups = [group for _, group in live_groups(self.optimizers, self.reading.adapters)]
        found = []
        for index, (param, owner) in enumerate(zip(self.reading.params, self.reading.owners, strict=True)):
            entry = self.optimizers[owner].state.get(param) or {}
            found.append(self.read(index, groups[self.reading.specs[index].group], entry))
        return found

    def begun_anew(self, before: StateStore | None) -> list[ParamState]:
        """``current``, without the states of parameters that another algorithm takes over, unless it was there once."""
        states = self.current()
        if before is None:
            return states
        old = before.reading
        algorithms = {id(p): spec.algorithm for p, spec in zip(old.params, old.specs, strict=True)}
        for index, (param, spec) in enumerate(zip(self.reading.params, self.reading.specs, strict=True)):
            changed = algorithms.get(id(param), spec.algorithm) != spec.algorithm
            if changed and not any(name in states[index] for name in self.views[index]):
                states[index] = {}
        return states

    def attach(self) -> None:
        """Give the optimizers the views, keeping entries of theirs that the step does not know."""
        self._given = []
        self.note_versions()
        for index, (param, owner) in enumerate(zip(self.reading.params, self.reading.owners, strict=True)):
            state, names = self.optimizers[owner].state, self._names[index]
            named = {names.get(name, name): view for name, view in self.views[index].items()}
            entry = dict(state.get(param, {}))
            held = self.reading.adapters[owner].state_of(entry)
            others = {k: v for k, v in held.items() if k not in named}
            held.clear()
            held.update(named | others)
            state[param] = entry
            self._given.append(entry)

    def forget_departed(self, before: StateStore) -> None:
        """Drop what an earlier store gave to parameters that the optimizers no longer have; a trainer that shards a
        model replaces them all."""
        live = {id(p) for p in self.reading.params}
        for param, owner, given in zip(before.reading.params, before.reading.owners, before._given, strict=True):
            state = before.optimizers[owner].state
            if id(param) not in live and state.get(param) is given:
                del state[param]

    @torch.no_grad()
    def release(self) -> None:
        """Give the optimizers tensors of their own, as the stock optimizer would have made them.

        Moments that were float32 beside masters get the parameter's dtype, without which stock AdamW cannot go on;
        masters stay, and count again where the parameter is still theirs.
        """
        beside = {i for b in self.plan.buckets if b.rounding == "master" for i in b.params}
        groups = [group for _, group in live_groups(self.optimizers, self.reading.adapters)]
        for index, (param, owner) in enumerate(zip(self.reading.params, self.reading.owners, strict=True)):
            entry = self.optimizers[owner].state.get(param)
            if not entry:
                continue
            adapter, names = self.reading.adapters[owner], self._names[index]
            group = groups[self.reading.specs[index].group]
            on_device = bool(group.get("capturable") or group.get("fused"))
            held = adapter.state_of(entry)
            moments = {names.get(name, name) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
            for name, value in list(held.items()):
                if not isinstance(value, Tensor):
                    continue
                own = own_copy(value, param.dtype if index in beside and name in moments else None)
                held[name] = own.cpu() if name == "step" and not on_device else own
            adapter.write_state(self.optimizers[owner], group, held)
