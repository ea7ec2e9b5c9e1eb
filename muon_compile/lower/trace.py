"""Trace the in-place step into one flat FX graph, without touching real memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from muon_compile.lower.boundary import apply_, pack
from muon_compile.plan.plan import Bucket, Plan

# run_step of muon_compile.build: (plan, boundary, hyper, presence) -> None. Passed in, so that this floor and the
# builder's stay apart.
RunStep = Callable[[Plan, Any, Sequence[Mapping[str, Tensor]], Sequence[Tensor] | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Order of the graph's flat inputs: parameters, state, hyperparameters, gradients, presence.

    Args:
        names: One name per input, for people and for the generated code.
        num_params: Parameters, in the order of ``plan.specs``.
        state: Bucket index and state name of every state input.
        hyper: Device and ``(group, name)`` entries of every hyperparameter input, a float64 vector.
        presence: Device and bucket indices of every presence input, a bool vector; empty where all gradients are there.
    """

    names: tuple[str, ...]
    num_params: int
    state: tuple[tuple[int, str], ...]
    hyper: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
    presence: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def num_static(self) -> int:
        """Leading inputs that keep their addresses from step to step."""
        return self.num_params + len(self.state) + len(self.hyper)

    @property
    def num_written(self) -> int:
        """Leading inputs that the step writes."""
        return self.num_params + len(self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A traced step: the graph, fake tensors like its inputs, and what the inputs are."""

    graph: GraphModule
    inputs: tuple[Tensor, ...]
    spec: InputSpec
    fake_mode: FakeTensorMode


class InPlaceBoundary:
    """Writes state and parameters where they are; the compiled graph's side of the boundary."""

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: Mapping[tuple[int, str], Tensor],
    ) -> None:
        self.exact = plan.exact
        self.params, self.grads = params, grads
        self.state: dict[str, dict[str, Tensor]] = {bucket.name: {} for bucket in plan.buckets}
        for (index, name), tensor in state.items():
            self.state[plan.buckets[index].name][name] = tensor

    def pack(self, bucket: Bucket) -> Tensor:
        """The bucket's gradients, stacked."""
        return pack([self.grads[i] for i in bucket.params])

    def load(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """The bucket's state."""
        return self.state[bucket.name]

    def store(self, bucket: Bucket, name: str, value: Tensor) -> None:
        """Keep a new state tensor."""
        self.state[bucket.name][name].copy_(value)

    def apply(self, bucket: Bucket, update: Tensor, decay: Tensor, step_size: Tensor | None) -> None:
        """Decay the bucket's parameters and add the update."""
        apply_([self.params[i] for i in bucket.params], update, decay, step_size, exact=self.exact)


def flat_step(plan: Plan, spec: InputSpec, run_step: RunStep) -> Callable[..., tuple[()]]:
    """The in-place step as a function of flat tensors in the order of ``spec``."""
    num_hyper = len(spec.hyper)

    def step(*flat: Tensor) -> tuple[()]:
        rest = list(flat)

        def take(count: int) -> list[Tensor]:
            taken = rest[:count]
            del rest[:count]
            return taken

        params = take(spec.num_params)
        state = dict(zip(spec.state, take(len(spec.state)), strict=True))
        hyper: list[dict[str, Tensor]] = [{} for _ in range(plan.num_groups)]
        for (_, entries), vector in zip(spec.hyper, take(num_hyper), strict=True):
            for (group, name), value in zip(entries, vector.unbind(0), strict=True):
                hyper[group][name] = value
        grads = take(spec.num_params)
        masks: dict[int, Tensor] = {}
        for (_, buckets), vector in zip(spec.presence, take(len(spec.presence)), strict=True):
            parts = vector.split([plan.buckets[i].size for i in buckets])
            masks.update(zip(buckets, parts, strict=True))
        presence = [masks[i] for i in range(len(plan.buckets))] if masks else None
        run_step(plan, InPlaceBoundary(plan, params, grads, state), hyper, presence)
        return ()

    return step


def trace_step(
    plan: Plan,
    spec: InputSpec,
    inputs: Sequence[Tensor],
    run_step: RunStep,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> TracedStep:
    """Trace the step into aten operators and this library's own.

    Args:
        plan: The plan.
        spec: Order of the inputs.
        inputs: Tensors like those of the step; only their shapes, dtypes, strides and devices are looked at.
        run_step: The builder's ``run_step``.
        decompositions: Decompositions that the backend wants.

    Returns:
        The graph. Its parameters and state are written in place; it returns nothing.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = tuple(mode.from_tensor(x.detach(), static_shapes=True) for x in inputs)
    step = flat_step(plan, spec, run_step)
    # The user's default device is none of the graph's business.
    with torch.no_grad(), torch.device("cpu"), mode:
        graph = make_fx(step, tracing_mode="real", decomposition_table=dict(decompositions or {}))(*fakes)
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), spec.names, strict=True):
        node._rename(name)
        node.target = node.name
    graph = GraphModule(graph, graph.graph, class_name="MuonStep")
    return TracedStep(graph=graph, inputs=fakes, spec=spec, fake_mode=mode)
