"""The step as a pure function: ``(params, state, grads, hyper) -> (params, state)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muon_compile.build.rounding import MASTER, STEPS
from muon_compile.build.step import BucketState, run_step
from muon_compile.config import AdamWConfig
from muon_compile.plan.exchange import Place
from muon_compile.plan.localize import localize
from muon_compile.plan.marks import Phase
from muon_compile.plan.plan import Bucket, Plan, Stretch
from muon_compile.plan.sharding import shard_axis
from muon_compile.plan.strategies import NODE, PEERS
from muon_compile.spec import Algorithm

State = dict[str, dict[str, Tensor]]
Tensors = Sequence[Tensor] | Mapping[str, Tensor]
HYPER_NAMES: dict[Algorithm, tuple[str, ...]] = {
    "muon": ("lr", "weight_decay", "momentum"),
    "adamw": ("lr", "weight_decay", "beta1", "beta2"),
    "lion": ("lr", "weight_decay", "beta1", "beta2"),
}


def bucket_state_shapes(bucket: Bucket) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name, shape and dtype of every stacked state tensor of a bucket."""
    stacked = (bucket.size, *bucket.shape)
    more: dict[str, tuple[tuple[int, ...], str]] = {}
    if bucket.rounding == "master":
        more[MASTER] = (stacked, "float32")
    elif bucket.rounding == "stochastic":
        more[STEPS] = ((bucket.size,), "float32")
    if bucket.algorithm == "muon":
        return {"momentum_buffer": (stacked, bucket.state_dtype)} | more
    if not isinstance(bucket.config, AdamWConfig):
        return {"exp_avg": (stacked, bucket.state_dtype)} | more
    names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if bucket.config.amsgrad else [])
    return {"step": ((bucket.size,), "float32")} | dict.fromkeys(names, (stacked, bucket.state_dtype)) | more


def init_state(plan: Plan, params: Tensors | None = None) -> State:
    """All-zero state of a plan.

    Args:
        plan: The plan.
        params: If given, its tensors' devices are used instead of the plan's (under fake or meta tensors, say).

    Returns:
        By bucket name, the stacked tensors: ``momentum_buffer`` ``[B, *shape]`` for Muon; ``step`` ``[B]`` float32,
        ``exp_avg`` and ``exp_avg_sq`` (with amsgrad ``max_exp_avg_sq``) ``[B, *shape]`` for AdamW, ``exp_avg`` for
        Lion; where the plan says so ``master_weight`` ``[B, *shape]`` float32, which zeros leave to the parameters, or
        ``rounding_step`` ``[B]``.
    """
    listed = None if params is None else _as_list(plan, params, "params")
    state: State = {}
    for bucket in plan.buckets:
        device = torch.device(bucket.device) if listed is None else listed[bucket.params[0]].device
        state[bucket.name] = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for name, (shape, dtype) in bucket_state_shapes(bucket).items()
        }
    return state


class _PureBoundary:
    """Packs by ``stack`` and collects what the step makes, leaving every argument alone."""

    in_place = False
    probing = False

    def __init__(self, params: Sequence[Tensor], state: Mapping[str, BucketState], grads: Sequence[Tensor]) -> None:
        self.params, self.state, self.grads = params, state, grads
        self._params: dict[int, list[Tensor]] = {}
        self._state: dict[tuple[str, str], list[list[Tensor]]] = {}

    def new_params(self) -> list[Tensor]:
        """The parameters after the step; one that was cut is put together again."""
        return [_join(self._params[i], 0) if i in self._params else p for i, p in enumerate(self.params)]

    def new_state(self) -> State:
        """The state after the step."""
        result: State = {name: dict(tensors) for name, tensors in self.state.items()}
        for (bucket, name), rows in self._state.items():
            result[bucket][name] = _join([_join(row, 1) for row in rows], 0)
        return result

    def working_on(self, phase: Phase, parts: Sequence[int], batch: int | None = None) -> None:
        """Nothing: nobody looks at a pure step's graph here."""

    def report(self, agreed: Tensor) -> None:
        """Keep whether the ranks agreed."""
        self.agreed = agreed

    def next_wave(self, done: Sequence[Stretch], coming: Sequence[Stretch]) -> None:
        """Nothing: a pure step is scheduled by whoever compiles it."""

    def pack(self, part: Stretch) -> Tensor:
        """The part's gradients, stacked."""
        return torch.stack(part.of_params(self.grads))

    def load(self, part: Stretch) -> BucketState:
        """The part's state."""
        return {name: part.of_state(tensor) for name, tensor in self.state[part.whole.name].items()}

    def store(self, part: Stretch, name: str, value: Tensor) -> None:
        """Keep a new state tensor."""
        rows = self._state.setdefault((part.whole.name, name), [])
        if part.part.stack is None or part.part.stack[0] == 0:
            rows.append([])
        rows[-1].append(value.to(self.state[part.whole.name][name].dtype))

    def momentum(
        self, part: Stretch, mu: Tensor, mask: Tensor | None, scale: Tensor | None, dtype: torch.dtype | None
    ) -> None:
        """Nothing: the pure form has no operator of its own."""

    def apply(self, part: Stretch, update: Tensor, decay: Tensor, step_size: Tensor | None) -> None:
        """Decay the part's parameters and add the update."""
        bucket = part.bucket
        delta = update if step_size is None else scaled(update, step_size, bucket.dtype)
        decays = decay.unbind(0) if decay.dim() else (decay,) * bucket.size
        olds = part.of_params(self.params)
        for index, old, row, factor in zip(bucket.params, olds, delta.unbind(0), decays, strict=True):
            self._params.setdefault(index, []).append((old * factor.to(row.dtype) + row).to(old.dtype))

    def weights(self, part: Stretch) -> Tensor:
        """The part's parameters, stacked."""
        return torch.stack(part.of_params(self.params))

    def write(self, part: Stretch, new: Tensor) -> None:
        """Keep new parameters."""
        for index, row in zip(part.bucket.params, new.unbind(0), strict=True):
            self._params.setdefault(index, []).append(row)

    def grad_squares(self, part: Stretch) -> Tensor:
        """Sum of the squares of the part's gradients."""
        grads = torch.stack(part.of_params(self.grads))
        return (wide := grads.to(torch.promote_types(grads.dtype, torch.float32))).mul(wide).sum()

    def taken(self, finite: Tensor) -> None:
        """Keep whether all gradients were finite."""
        self.finite = finite

    def vanished(self, counts: Mapping[int, Tensor]) -> None:
        """Nothing: the pure form returns parameters and state alone."""

    def observe(self, sums: Mapping[int, Tensor]) -> None:
        """Nothing: the pure form returns parameters and state alone."""


def _join(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def scaled(update: Tensor, step_size: Tensor, dtype: str) -> Tensor:
    """``update * step_size`` in float32 or the parameters' wider dtype; ``step_size`` is 0-d or ``[B]``."""
    wide = torch.promote_types(getattr(torch, dtype), torch.float32)
    size = step_size.to(wide)
    size = size if size.dim() == 0 else size.view(-1, *(1,) * (update.dim() - 1))
    return update.to(wide) * size


def build_step(plan: Plan, rank: int = 0, groups: Mapping[str, str] | None = None) -> Callable[..., tuple[Any, State]]:
    """Build the pure step of a plan.

    The result is traced by ``make_fx`` and ``torch.func.functionalize``, and inlined by ``torch.compile``.

    Args:
        plan: The plan.
        rank: Rank within the plan's mesh whose part is built; it takes and returns that rank's shards.
        groups: Name of this rank's process group, by mesh axis that matrices are exchanged over.

    Returns:
        ``update(params, state, grads, hyper) -> (params, state)``. ``params`` and ``grads`` are sequences in the order
        of ``plan.specs``, or mappings by name; ``state`` is that of ``init_state``; ``hyper`` is one mapping for all
        groups or a sequence of one mapping per group, of floats or 0-d tensors: ``lr``, ``weight_decay`` and
        ``momentum`` (Muon) or ``beta1`` and ``beta2`` (AdamW); float64 keeps ``1 - beta2`` exact. A gradient that is
        None, or missing from a mapping, leaves its parameter and state as they are. No argument is written to.

    Raises:
        ValueError: ``rank`` or ``groups`` do not fit the plan's mesh.
    """
    if not 0 <= rank < plan.mesh.num_ranks:
        raise ValueError(f"build_step: rank: expected 0 <= rank < {plan.mesh.num_ranks}, got {rank}.")
    places = rank_places(plan, rank, groups or {})
    plan = localize(plan, lambda layout: layout.mesh.coordinates(rank)[layout.axis or ""])

    def update(params: Any, state: Mapping[str, BucketState], grads: Any, hyper: Any) -> tuple[Any, State]:
        listed = _as_list(plan, params, "params")
        gradients = _as_list(plan, grads, "grads", optional=True)
        presence = None
        if places or any(g is None for g in gradients):
            presence = [
                torch.tensor([gradients[i] is not None for i in b.params], device=listed[b.params[0]].device)
                for b in plan.buckets
            ]
            gradients = [
                torch.zeros_like(p, dtype=getattr(torch, s.grad_dtype or s.dtype)) if g is None else g
                for p, g, s in zip(listed, gradients, plan.specs, strict=True)
            ]
        _check_state(plan, state)
        boundary = _PureBoundary(listed, state, gradients)
        run_step(plan, boundary, _as_hyper(plan, hyper, listed[0].device), presence, places)
        if isinstance(params, Mapping):
            names = [spec.name for spec in plan.specs]
            return dict(zip(names, boundary.new_params(), strict=True)), boundary.new_state()
        return boundary.new_params(), boundary.new_state()

    return update


def rank_places(plan: Plan, rank: int, groups: Mapping[str, str]) -> dict[int, Place]:
    """Where a rank stands, for every part with an exchange.

    Raises:
        ValueError: A group is missing, or one is given for an axis that nothing is exchanged over.
    """
    shared = [(i, part.exchange, plan.buckets[part.bucket].layout) for i, part in enumerate(plan.parts)]
    stands = {
        i: (exchange, layout)
        for i, exchange, layout in shared
        if layout is not None
        and (exchange is not None or (plan.guarded and (layout.axis is not None or layout.replica_axis is not None)))
    }
    axes: set[str] = set()
    for exchange, layout in stands.values():
        axes |= {axis for axis in (shard_axis(plan, exchange, layout), layout.replica_axis) if axis is not None}
        if exchange is not None and exchange.node_size:
            axes |= {f"{exchange.shard_axis}{within}" for within in (NODE, PEERS)}
    if axes != set(groups):
        raise ValueError(
            f"build_step: groups: expected the name of a process group for every axis of {sorted(axes)} (those that "
            f"the plan exchanges matrices over), got {dict(groups)}."
        )
    places = {}
    for index, (exchange, layout) in stands.items():
        at, shard, replica = layout.mesh.coordinates(rank), shard_axis(plan, exchange, layout), layout.replica_axis
        places[index] = Place(
            shard_rank=at[exchange.shard_axis] if exchange is not None and exchange.shard_axis else 0,
            shard_group=groups[shard] if shard else "",
            replica_rank=at[replica] if replica else 0,
            replica_group=groups[replica] if replica else "",
            node_group=groups.get(f"{shard}{NODE}", ""),
            peer_group=groups.get(f"{shard}{PEERS}", ""),
        )
    return places


def _as_list(plan: Plan, given: Any, what: str, *, optional: bool = False) -> list[Any]:
    if isinstance(given, Mapping):
        missing = [] if optional else [spec.name for spec in plan.specs if spec.name not in given]
        if missing:
            raise ValueError(f"{what}: expected a tensor for every parameter of the plan, got none for {missing}.")
        listed = [given.get(spec.name) for spec in plan.specs]
    else:
        listed = list(given)
    if len(listed) != len(plan.specs):
        raise ValueError(f"{what}: expected {len(plan.specs)} tensors (one per plan.specs), got {len(listed)}.")
    shapes = {index: bucket.shape for bucket in plan.buckets for index in bucket.params}
    for index, (spec, tensor) in enumerate(zip(plan.specs, listed, strict=True)):
        if tensor is not None and tuple(tensor.shape) != shapes[index]:
            raise ValueError(f"{what}: {spec.name!r}: expected shape {shapes[index]}, got {tuple(tensor.shape)}.")
    return listed


def _check_state(plan: Plan, state: Mapping[str, BucketState]) -> None:
    for bucket in plan.buckets:
        given = state.get(bucket.name)
        for name, (shape, _) in bucket_state_shapes(bucket).items():
            got = None if given is None or name not in given else tuple(given[name].shape)
            if got != shape:
                raise ValueError(
                    f"state: {bucket.name!r}: {name}: expected a tensor of shape {shape}, got {got}; "
                    "make the state with init_state(plan)."
                )


def _as_hyper(plan: Plan, given: Any, device: torch.device) -> list[dict[str, Tensor]]:
    rows = [given] * plan.num_groups if isinstance(given, Mapping) else list(given)
    if len(rows) != plan.num_groups:
        raise ValueError(f"hyper: expected one mapping per group ({plan.num_groups}), got {len(rows)}.")
    result: list[dict[str, Tensor]] = [{} for _ in rows]
    for bucket in plan.buckets:
        for group in set(bucket.groups):
            for name in HYPER_NAMES[bucket.algorithm]:
                if name not in rows[group]:
                    raise ValueError(
                        f"hyper: group {group} ({bucket.algorithm}): expected "
                        f"{HYPER_NAMES[bucket.algorithm]}, got no {name!r}."
                    )
                value = rows[group][name]
                if not isinstance(value, Tensor):
                    value = torch.tensor(float(value), dtype=torch.float64, device=device)
                result[group][name] = value
    return result
