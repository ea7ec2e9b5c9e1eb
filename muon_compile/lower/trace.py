"""Trace the in-place step into one flat FX graph, without touching real memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta, set_stack_trace
from torch.utils._python_dispatch import TorchDispatchMode

from muon_compile.config import MuonConfig
from muon_compile.lower.boundary import apply_, list_squares, momentum_, native_takes, next_wave_, pack, update_, write_
from muon_compile.plan.exchange import Place
from muon_compile.plan.marks import Mark, Phase
from muon_compile.plan.plan import Plan, Stretch

# run_step of muon_compile.build: (plan, boundary, hyper, presence, places) -> None. Passed in, so that this floor and
# the builder's stay apart.
RunStep = Callable[
    [Plan, Any, Sequence[Mapping[str, Tensor]], Sequence[Tensor] | None, Mapping[int, Place] | None], None
]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Order of the graph's flat inputs: parameters, state, agreement, skipped, vanished, probes, hyperparameters,
    gradients, presence.

    Args:
        names: One name per input, for people and for the generated code.
        num_params: Parameters, in the order of ``plan.specs``.
        state: Bucket index and state name of every state input.
        agreement: Device of the 0-d bool that the step leaves its ranks' agreement in; None where none is needed.
        hyper: Device and ``(group, name)`` entries of every hyperparameter input, a float64 vector (float32 on backends
            that have no float64).
        presence: Device and bucket indices of every presence input, a bool vector; empty where all gradients are there.
        skipped: Device of the 0-d int32 that counts steps skipped for a gradient that is not finite; None: none is.
        vanished: Device and bucket indices of the int32 vector that counts matrices whose norm fell under ``eps``;
            None: nobody looks.
        probes: Device and bucket indices of every table that the step leaves its probes' sums in, a row per bucket;
            empty where nobody asked for them.
    """

    names: tuple[str, ...]
    num_params: int
    state: tuple[tuple[int, str], ...]
    agreement: str | None
    hyper: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]
    presence: tuple[tuple[str, tuple[int, ...]], ...]
    probes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    skipped: str | None = None
    vanished: tuple[str, tuple[int, ...]] | None = None

    @property
    def num_static(self) -> int:
        """Leading inputs that keep their addresses from step to step."""
        return self.num_written + len(self.hyper)

    @property
    def num_written(self) -> int:
        """Leading inputs that the step writes."""
        told = (
            (self.agreement is not None) + (self.skipped is not None) + (self.vanished is not None) + len(self.probes)
        )
        return self.num_params + len(self.state) + told


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A traced step: the graph, fake tensors like its inputs, what the inputs are, and what each operator is about.

    The marks, by node name, are kept beside the graph: in it they would be part of what a backend compiles.
    """

    graph: GraphModule
    inputs: tuple[Tensor, ...]
    spec: InputSpec
    fake_mode: FakeTensorMode
    marks: Mapping[str, Mark] = field(default_factory=dict)


class Marker:
    """Notes what every node of the graph that ``make_fx`` is making is about."""

    def __init__(self) -> None:
        self.marks: dict[str, Mark] = {}
        self._now = Mark(phase="inputs")

    def turn_to(self, mark: Mark | None) -> None:
        """Mark what has been made since the last call; what comes is about ``mark``."""
        mode = get_proxy_mode()
        assert mode is not None
        for node in reversed(mode.tracer.graph.nodes):
            if node.name in self.marks:
                break
            self.marks[node.name] = self._now
        self._now = mark or self._now


class InPlaceBoundary:
    """Writes state and parameters where they are; the compiled graph's side of the boundary."""

    in_place = True

    def __init__(
        self,
        plan: Plan,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: Mapping[tuple[int, str], Tensor],
        agreement: Tensor | None = None,
        marker: Marker | None = None,
    ) -> None:
        self._marker = marker
        # Set by ``probe_into``: tables of sums, and whose rows they have.
        self._tables: list[tuple[Tensor, tuple[int, ...]]] = []
        self._skipped: Tensor | None = None
        self._vanished: tuple[Tensor, tuple[int, ...]] | None = None
        self.exact, self.native, self.agreement = plan.exact, plan.native, agreement
        self.params, self.grads = params, grads
        self.state: dict[str, dict[str, Tensor]] = {bucket.name: {} for bucket in plan.buckets}
        for (index, name), tensor in state.items():
            self.state[plan.buckets[index].name][name] = tensor

    @property
    def probing(self) -> bool:
        """Whether there is a table for the probes' sums."""
        return bool(self._tables)

    def count_skips_in(self, skipped: Tensor | None) -> None:
        """Where to count skipped steps."""
        self._skipped = skipped

    def taken(self, finite: Tensor) -> None:
        """Count the step where it was skipped."""
        if self._skipped is not None:
            self._skipped.copy_(self._skipped + torch.where(finite, 0, 1).to(torch.int32))

    def count_vanished_in(self, vector: Tensor | None, buckets: Sequence[int]) -> None:
        """Where to count matrices whose norm fell under ``eps``, and the buckets that its entries are of."""
        self._vanished = None if vector is None else (vector, tuple(buckets))

    def vanished(self, counts: Mapping[int, Tensor]) -> None:
        """Count them where the host will look."""
        if self._vanished is None:
            return
        vector, buckets = self._vanished
        none = torch.zeros((), device=vector.device)
        now = torch.stack([counts.get(index, none) for index in buckets])
        vector.copy_(vector + now.to(vector.dtype))

    def grad_squares(self, part: Stretch) -> Tensor:
        """Sum of the squares of the part's gradients."""
        return list_squares(part.of_params(self.grads)).sum()

    def probe_into(self, tables: Sequence[Tensor], buckets: Sequence[tuple[int, ...]]) -> None:
        """Ask for the probes' sums: a table per device, with a row for each of its buckets."""
        self._tables = list(zip(tables, buckets, strict=True))

    def observe(self, sums: Mapping[int, Tensor]) -> None:
        """Leave the probes' sums where the host will look for them; a bucket that nothing was done for has zeros."""
        for table, buckets in self._tables:
            zeros = torch.zeros_like(table[0])
            table.copy_(torch.stack([sums.get(index, zeros) for index in buckets]))

    def working_on(self, phase: Phase, parts: Sequence[int], batch: int | None = None) -> None:
        """Note it, for those who look at the graph."""
        if self._marker is not None:
            self._marker.turn_to(Mark(phase=phase, parts=tuple(parts), batch=batch))

    def report(self, agreed: Tensor) -> None:
        """Leave the ranks' agreement where the host will look for it."""
        assert self.agreement is not None
        self.agreement.copy_(agreed)

    def next_wave(self, done: Sequence[Stretch], coming: Sequence[Stretch]) -> None:
        """Order two waves."""
        written = [part.of_params(self.params)[0] for part in done]
        next_wave_([*written, *[next(iter(self.load(part).values())) for part in coming]])

    def pack(self, part: Stretch) -> Tensor:
        """The part's gradients, stacked."""
        return pack(part.of_params(self.grads))

    def load(self, part: Stretch) -> Mapping[str, Tensor]:
        """The part's state."""
        return {name: part.of_state(tensor) for name, tensor in self.state[part.whole.name].items()}

    def store(self, part: Stretch, name: str, value: Tensor) -> None:
        """Keep a new state tensor."""
        part.of_state(self.state[part.whole.name][name]).copy_(value)

    def momentum(
        self, part: Stretch, mu: Tensor, mask: Tensor | None, scale: Tensor | None, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """One pass over the part where the CPU kernel takes it: momentum in place, directions returned."""
        grads, config = part.of_params(self.grads), part.bucket.config
        state = part.of_state(self.state[part.whole.name]["momentum_buffer"])
        dtype = torch.float32 if dtype is None else dtype
        if not self.native or not native_takes(grads[0], state.dtype, dtype):
            return None
        assert isinstance(config, MuonConfig)
        if config.momentum_form == "ema_added":
            return None
        ema = config.momentum_form == "ema"
        nesterov, probing = bool(config.nesterov), self.probing
        factors = (mu, mask, scale)
        return momentum_(grads, state, *factors, ema=ema, nesterov=nesterov, dtype=dtype, probing=probing)

    def apply(self, part: Stretch, update: Tensor, decay: Tensor, step_size: Tensor | None) -> Tensor | None:
        """Decay the part's parameters and add the update."""
        params = part.of_params(self.params)
        if self.native and part.bucket.algorithm == "muon" and native_takes(params[0], update.dtype):
            assert step_size is not None
            return update_(params, update, decay, step_size, probing=self.probing)
        squares: Tensor | None = None
        if self.probing:
            dtype = decay.dtype
            squares = torch.stack([list_squares(params).to(dtype), self.row_squares(update).to(dtype)])
        apply_(params, update, decay, step_size, exact=self.exact)
        return squares

    def weights(self, part: Stretch) -> Tensor:
        """The part's parameters, stacked."""
        return pack(part.of_params(self.params))

    def write(self, part: Stretch, new: Tensor) -> None:
        """Write new parameters in place."""
        write_(part.of_params(self.params), new)

    def row_squares(self, x: Tensor) -> Tensor:
        """Sum of the squares of each row of ``[B, ...]``, ``[B]``; the builder has registered the operator."""
        result: Tensor = torch.ops.muon_compile.row_squares(x)
        return result


def flat_step(
    plan: Plan,
    spec: InputSpec,
    run_step: RunStep,
    places: Mapping[int, Place] | None = None,
    boundary: type[InPlaceBoundary] = InPlaceBoundary,
    marker: Marker | None = None,
) -> Callable[..., tuple[()]]:
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
        agreement = take(1)[0] if spec.agreement is not None else None
        skipped = take(1)[0] if spec.skipped is not None else None
        vanished = take(1)[0] if spec.vanished is not None else None
        tables = take(len(spec.probes))
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
        edge = boundary(plan, params, grads, state, agreement, marker)
        edge.count_skips_in(skipped)
        edge.count_vanished_in(vanished, spec.vanished[1] if spec.vanished is not None else ())
        edge.probe_into(tables, [buckets for _, buckets in spec.probes])
        run_step(plan, edge, hyper, presence, places)
        if marker is not None:
            marker.turn_to(None)
        return ()

    return step


class _EmittingLines(TorchDispatchMode):
    """Gives every node the stack that emitted it, as ``meta["stack_trace"]``; make_fx keeps those of modules alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        set_stack_trace(traceback.format_stack()[:-1])
        return func(*args, **(kwargs or {}))


def _fakes(inputs: Sequence[Tensor]) -> tuple[FakeTensorMode, tuple[Tensor, ...]]:
    """Fake tensors like the inputs, and their mode; inputs that are fake already are taken as they are."""
    mode = detect_fake_mode(list(inputs))
    if mode is not None:
        return mode, tuple(inputs)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode, tuple(mode.from_tensor(x.detach(), static_shapes=True) for x in inputs)


def trace_step(
    plan: Plan,
    spec: InputSpec,
    inputs: Sequence[Tensor],
    run_step: RunStep,
    places: Mapping[int, Place] | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    boundary: type[InPlaceBoundary] = InPlaceBoundary,
    stack_traces: bool = False,
) -> TracedStep:
    """Trace the step into aten operators and this library's own.

    Args:
        plan: The plan.
        spec: Order of the inputs.
        inputs: Tensors like those of the step, or fake tensors of one mode; only their shapes, dtypes, strides and
            devices are looked at.
        run_step: The builder's ``run_step``.
        places: Where this rank stands, for every part with an exchange.
        decompositions: Decompositions that the backend wants.
        boundary: The backend's side of the boundary.
        stack_traces: Keep with every node the lines that emitted it.

    Returns:
        The graph. Its parameters and state are written in place; it returns nothing.
    """
    mode, fakes = _fakes(inputs)
    marker = Marker()
    step = flat_step(plan, spec, run_step, places, boundary, marker)
    lines = (preserve_node_meta(), _EmittingLines()) if stack_traces else ()  # type: ignore[no-untyped-call]
    # The user's default device is none of the graph's business.
    with ExitStack() as stack:
        for context in (torch.no_grad(), torch.device("cpu"), mode, *lines):
            stack.enter_context(context)
        graph = make_fx(step, dict(decompositions or {}), tracing_mode="real")(*fakes)
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), spec.names, strict=True):
        node._rename(name)
        node.target = node.name
    graph = GraphModule(graph, graph.graph, class_name="MuonStep")
    operators = [node.name for node in graph.graph.nodes if node.op == "call_function"]
    marks = {name: marker.marks[name] for name in operators if name in marker.marks}
    return TracedStep(graph=graph, inputs=fakes, spec=spec, fake_mode=mode, marks=marks)
