"""Read live optimizers into specs: parameters, names, algorithms, configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from muon_compile.adapters import Adapter, Group, find_adapter
from muon_compile.build.pure import HYPER_NAMES
from muon_compile.layout import Meshes, check_overlap, check_tensor, dtype_name
from muon_compile.run.hyper import check_value
from muon_compile.spec import MatrixSpec

Names = Mapping[Tensor, str] | Iterable[tuple[str, Tensor]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the optimizers hold at one moment, in a fixed order: optimizer, group, parameter.

    Args:
        params: The parameters.
        owners: Index of the optimizer of each.
        specs: Their specs, by index.
        config_keys: Values of every group's graph-shaping entries, by group.
        group_sizes: Parameters per group.
        seen_grad_dtypes: dtype of every gradient seen so far, by identity of its parameter.
        meshes: The device meshes of the sharded ones.
        adapters: One per optimizer.
    """

    params: tuple[Tensor, ...]
    owners: tuple[int, ...]
    specs: tuple[MatrixSpec, ...]
    config_keys: tuple[tuple[object, ...], ...]
    group_sizes: tuple[int, ...]
    seen_grad_dtypes: dict[int, str]
    meshes: Meshes
    adapters: tuple[Adapter, ...]

    def adapter(self, index: int) -> Adapter:
        """The adapter of a parameter's optimizer."""
        return self.adapters[self.owners[index]]


def live_groups(optimizers: Sequence[Optimizer], adapters: Sequence[Adapter]) -> list[tuple[Adapter, Group]]:
    """Every group of every optimizer with its adapter, in order."""
    return [(a, group) for o, a in zip(optimizers, adapters, strict=True) for group in a.groups(o)]


def live_gradient(param: Tensor, names: Sequence[str]) -> Tensor | None:
    """A parameter's gradient, wherever its framework keeps it."""
    for name in names:
        grad: Tensor | None = getattr(param, name, None)
        if grad is not None:
            return grad
    return None


def config_key(adapter: Adapter, group: Mapping[str, Any]) -> tuple[object, ...]:
    """The group's graph-shaping entries, for a cheap comparison every step."""
    return tuple(_frozen(group.get(name)) for name in (*adapter.config_keys, "strategy"))


def _frozen(value: object) -> object:
    """A list as it is now."""
    return tuple(map(_frozen, value)) if type(value) is list else value


def name_table(names: Names) -> dict[int, str]:
    """Names by tensor identity."""
    if names is None:
        return {}
    pairs = [(name, tensor) for tensor, name in names.items()] if isinstance(names, Mapping) else list(names)
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                "compile_step: names: expected pairs of name and parameter (model.named_parameters()), or a mapping "
                f"from parameter to name, got {pair!r}."
            )
    return {id(tensor): name for name, tensor in pairs}


def find_adapters(optimizers: Sequence[object]) -> list[Adapter]:
    """One adapter per optimizer.

    Raises:
        TypeError: Something is no optimizer, or no adapter knows it.
        ValueError: One optimizer is given twice.
    """
    adapters = []
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"compile_step: expected torch optimizers, got {type(optimizer).__name__}.")
        if any(optimizer is other for other in optimizers[:index]):
            raise ValueError("compile_step: expected distinct optimizers, got one of them twice.")
        adapters.append(find_adapter(optimizer))
    return adapters


def read_optimizers(
    optimizers: Sequence[Optimizer],
    adapters: Sequence[Adapter],
    names: dict[int, str],
    seen_grad_dtypes: Mapping[int, str] | None = None,
    replicate: ProcessGroup | None = None,
) -> Reading:
    """Read and check everything that decides the plan.

    Args:
        optimizers: The optimizers.
        adapters: One per optimizer.
        names: Parameter names by identity, for groups without their own.
        seen_grad_dtypes: Those of an earlier reading, for parameters that have no gradient now.
        replicate: The ranks that hold copies of plain parameters.

    Raises:
        TypeError, ValueError, NotImplementedError: Something that the step cannot take; the message names the
            parameter or the group.
    """
    params: list[Tensor] = []
    owners: list[int] = []
    specs: list[MatrixSpec] = []
    keys: list[tuple[object, ...]] = []
    sizes: list[int] = []
    seen: dict[int, str] = {}
    meshes = Meshes(replicate)
    group_index = 0
    live = [adapter.groups(optimizer) for optimizer, adapter in zip(optimizers, adapters, strict=True)]
    seen_dtypes = _seen_grad_dtypes(adapters, live, seen_grad_dtypes or {})
    alike: dict[torch.dtype, set[str]] = {}
    for param in (p for groups in live for group in groups for p in group["params"]):
        if id(param) in seen_dtypes:
            alike.setdefault(param.dtype, set()).add(seen_dtypes[id(param)])
    for owner, (groups, adapter) in enumerate(zip(live, adapters, strict=True)):
        for group in groups:
            try:
                algorithm, config, hyper = adapter.algorithm(group), adapter.config(group), adapter.hyper(group)
            except KeyError as error:
                raise ValueError(
                    f"Group {group_index}: expected entries as {type(adapter).__name__} reads them, got none called "
                    f"{error} among {sorted(k for k in group if k != 'params')}. Was a state dict of another library's "
                    "optimizer loaded? muon_compile.convert_state makes it one of this optimizer's."
                ) from error
            if set(HYPER_NAMES[algorithm]) - set(hyper):
                raise ValueError(
                    f"Group {group_index}: expected {HYPER_NAMES[algorithm]} of {type(adapter).__name__}.hyper for "
                    f"{algorithm!r}, got {tuple(hyper)}."
                )
            for name, value in hyper.items():
                check_value(group_index, name, value, read_tensor=True)
            given = group.get("param_names")
            for index, param in enumerate(group["params"]):
                name = given[index] if given else names.get(id(param), f"{group_index}/{index}")
                if id(param) in seen:
                    raise ValueError(
                        f"Parameter {name!r} is in the optimizers twice (first as {seen[id(param)]!r}); "
                        "expected every parameter once."
                    )
                seen[id(param)] = name
                check_tensor(name, param, algorithm)
                specs.append(
                    MatrixSpec(
                        name=name,
                        shape=tuple(param.shape),
                        dtype=dtype_name(param.dtype),
                        grad_dtype=_grad_dtype(param, alike, seen_dtypes),
                        device=str(param.device),
                        algorithm=algorithm,
                        group=group_index,
                        config=config,
                        layout=meshes.layout(param),
                        strategy=group.get("strategy"),
                    )
                )
                params.append(param)
                owners.append(owner)
            keys.append(config_key(adapter, group))
            sizes.append(len(group["params"]))
            group_index += 1
    check_overlap([(spec.name, param) for spec, param in zip(specs, params, strict=True)])
    return Reading(
        params=tuple(params),
        owners=tuple(owners),
        specs=tuple(specs),
        config_keys=tuple(keys),
        group_sizes=tuple(sizes),
        seen_grad_dtypes=seen_dtypes,
        meshes=meshes,
        adapters=tuple(adapters),
    )


def _seen_grad_dtypes(
    adapters: Sequence[Adapter], live: Sequence[Sequence[Group]], earlier: Mapping[int, str]
) -> dict[int, str]:
    found: dict[int, str] = {}
    for adapter, groups in zip(adapters, live, strict=True):
        for param in (p for group in groups for p in group["params"]):
            grad = live_gradient(param, adapter.grad_names)
            if grad is not None:
                found[id(param)] = dtype_name(grad.dtype)
            elif id(param) in earlier:
                found[id(param)] = earlier[id(param)]
    return found


def _grad_dtype(param: Tensor, alike: Mapping[torch.dtype, set[str]], seen: Mapping[int, str]) -> str:
    """What dtype a parameter's gradient has or will have: the one it had, that of its like, or the parameter's."""
    if id(param) in seen:
        return seen[id(param)]
    found = alike.get(param.dtype, set())
    return next(iter(found)) if len(found) == 1 else dtype_name(param.dtype)
