"""One plan bound to live parameters: checks, flat inputs, compiled graphs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

from muon_compile.build.step import run_step
from muon_compile.config import CompileConfig
from muon_compile.distributed import is_distributed, local_tensor, same_placements
from muon_compile.layout import dtype_name
from muon_compile.lower.backends import lower_step
from muon_compile.lower.check import collective_lines
from muon_compile.lower.compiled import CompiledGraph
from muon_compile.lower.trace import InputSpec, TracedStep
from muon_compile.plan.exchange import Place
from muon_compile.plan.localize import localize
from muon_compile.plan.plan import Plan
from muon_compile.plan.sharding import promised_collectives, shard_axis
from muon_compile.run.agreement import exchange_outcomes
from muon_compile.run.hyper import HostVector, HyperVectors
from muon_compile.run.inputs import buckets_by_device, input_spec
from muon_compile.run.nodes import node_groups
from muon_compile.run.probes import ProbeTables
from muon_compile.run.progress import compiling
from muon_compile.run.reading import Reading, live_gradient
from muon_compile.run.state import StateStore
from muon_compile.run.stats import StepStats
from muon_compile.run.vanishing import VanishingWatch
from muon_compile.spec import ShardLayout

_LOG = logging.getLogger("muon_compile")


class Replan(Exception):
    """The live parameters or gradients no longer fit the plan; it must be made again."""


class Binding:
    """A plan, its state, and its compiled graphs over the live parameters of a reading."""

    def __init__(
        self,
        plan: Plan,
        reading: Reading,
        optimizers: Sequence[Optimizer],
        hyper_dtype: torch.dtype = torch.float64,
        probes: bool = False,
    ) -> None:
        self.plan, self.reading = plan, reading
        self._groups = [(group.group_name, group) for group in reading.meshes.groups()]
        self.places = self._places()
        local = localize(plan, self._coordinate)
        self.local = replace(local, collectives=promised_collectives(local, self.places))
        self.state = StateStore(self.local, reading, optimizers)
        self.hyper = HyperVectors(plan, hyper_dtype)
        self.graphs: dict[str, tuple[TracedStep, CompiledGraph]] = {}
        self.compiled_kinds: set[str] = set()
        self._params = [local_tensor(p).detach() for p in reading.params]
        self._addresses = [p.data_ptr() for p in self._params]
        self._sharded = any(map(is_distributed, reading.params))
        # Ranks that exchange matrices agree first on which gradients are there; the graph leaves the outcome here.
        self.agreement: Tensor | None = None
        if self.plan.exchanges:
            self.agreement = torch.ones((), dtype=torch.bool, device=self._params[0].device)
        # Steps skipped for a gradient that is not finite; the graph counts them.
        self.skipped: Tensor | None = None
        if self.plan.skip_nonfinite:
            self.skipped = torch.zeros((), dtype=torch.int32, device=self._params[0].device)
        self.skips_told = self.skips_counted = 0
        self.vanishing = VanishingWatch(plan) if plan.watched_norms() else None
        vanished = None if self.vanishing is None else self.vanishing.counts
        told = [tensor for tensor in (self.agreement, self.skipped, vanished) if tensor is not None]
        self._by_device = buckets_by_device(plan)
        self.probes = ProbeTables(self._by_device, hyper_dtype) if probes else None
        tables = [] if self.probes is None else self.probes.tensors
        self._static = [*self._params, *(t for _, t in self.state.inputs), *told, *tables, *self.hyper.tensors]
        self._grad_facts = [
            (p.shape, getattr(torch, s.grad_dtype or s.dtype)) for p, s in zip(self._params, reading.specs, strict=True)
        ]
        self._param_facts = [(p.shape, p.dtype) for p in self._params]
        self._presence: list[HostVector] = []
        self._absent: dict[int, Tensor] = {}
        owners = [reading.adapter(i) for i in range(len(reading.params))]
        zero = [a.missing_gradient(o) == "zero" for o, a in zip(optimizers, reading.adapters, strict=True)]
        self.zero_missing = {i for i, owner in enumerate(reading.owners) if zero[owner]}
        self._elsewhere = {i: a.grad_names for i, a in enumerate(owners) if tuple(a.grad_names) != ("grad",)}
        self._bucket_of = {i: b for b, bucket in enumerate(plan.buckets) for i in bucket.params}

    def _coordinate(self, layout: ShardLayout) -> int:
        assert layout.axis is not None
        return self.reading.meshes.coordinate(layout.mesh, layout.axis)

    def _places(self) -> dict[int, Place]:
        """Where this rank stands, for every part with an exchange; of a guarded step, for every part on a mesh."""
        places: dict[int, Place] = {}
        meshes = self.reading.meshes
        for index, part in enumerate(self.plan.parts):
            layout, exchange = self.plan.buckets[part.bucket].layout, part.exchange
            if layout is None or (exchange is None and not self.plan.guarded):
                continue
            shard, replica = shard_axis(self.plan, exchange, layout), layout.replica_axis
            if shard is None and replica is None:
                continue
            cut, nodes = None if exchange is None else exchange.shard_axis, ("", "")
            if exchange is not None and exchange.node_size and shard:
                nodes = node_groups(meshes.group(layout.mesh, shard), exchange.node_size)
            places[index] = Place(
                shard_rank=meshes.coordinate(layout.mesh, cut) if cut else 0,
                shard_group=meshes.group(layout.mesh, shard).group_name if shard else "",
                replica_rank=meshes.coordinate(layout.mesh, replica) if replica else 0,
                replica_group=meshes.group(layout.mesh, replica).group_name if replica else "",
                node_group=nodes[0],
                peer_group=nodes[1],
            )
        return places

    def check_groups(self) -> None:
        """Refuse groups made anew: a graph knows them by name, and the name may be other ranks' by now.

        Raises:
            RuntimeError: Some name is no longer that of the group that was bound.
        """
        for name, group in self._groups:
            try:
                found = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]
            except (RuntimeError, LookupError, ValueError):
                found = None
            if found is not group:
                raise RuntimeError(
                    f"The process group {name!r} is gone or was made anew since this step was planned; nothing has "
                    "changed. Where the parameters' mesh is still right call rebind() of the compiled step; else make "
                    "mesh, model and step anew."
                )

    def check_params(self) -> None:
        """Compare the live parameters with what was bound.

        Raises:
            Replan: A parameter's memory, shape, strides or dtype is another.
        """
        params = self.reading.params
        live = [local_tensor(p) for p in params] if self._sharded else params
        for param, address, (shape, dtype) in zip(live, self._addresses, self._param_facts, strict=True):
            if param.data_ptr() != address or param.shape != shape or param.dtype != dtype or not param.is_contiguous():
                raise Replan

    def gradients(self) -> list[Tensor | None]:
        """The parameters' gradients, checked; None where there is none.

        Raises:
            ValueError: A gradient is sparse or not of its parameter's shape or device; names the parameter.
            Replan: A gradient has another dtype than was planned for.
        """
        grads: list[Tensor | None] = []
        for index, (param, (shape, dtype)) in enumerate(zip(self.reading.params, self._grad_facts, strict=True)):
            grad = param.grad if index not in self._elsewhere else live_gradient(param, self._elsewhere[index])
            if grad is None and index in self.zero_missing:
                grad = self._absent_grad(index)
            if self._sharded and grad is not None and is_distributed(grad):
                grad = self._local_grad(index, grad)
            if grad is not None and (
                grad.layout is not torch.strided
                or grad.dtype is not dtype
                or grad.shape != shape
                or not grad.is_contiguous()
            ):
                grad = self._settle(index, grad)
            grads.append(grad)
        return grads

    def _local_grad(self, index: int, grad: Any) -> Tensor:
        param: Any = self.reading.params[index]
        if not is_distributed(param) or not same_placements(grad, param):
            placements = tuple(param.placements) if is_distributed(param) else ()
            raise ValueError(
                f"Gradient of {self.reading.specs[index].name!r}: expected the parameter's placements {placements}, "
                f"got {tuple(grad.placements)}; reduce it before the step (fully_shard does)."
            )
        return local_tensor(grad)

    def _settle(self, index: int, grad: Tensor) -> Tensor:
        spec = self.reading.specs[index]
        if grad.layout is not torch.strided:
            raise ValueError(
                f"Gradient of {spec.name!r}: expected a dense tensor, got layout {grad.layout}. "
                "Build the layer with sparse=False, or leave this parameter to another optimizer."
            )
        shape = tuple(self._grad_facts[index][0])
        if tuple(grad.shape) != shape:
            raise ValueError(f"Gradient of {spec.name!r}: expected shape {shape}, got {tuple(grad.shape)}.")
        if dtype_name(grad.dtype) != spec.grad_dtype:
            raise Replan
        return grad.contiguous()

    def prepare(
        self, grads: Sequence[Tensor | None], backend: str, config: CompileConfig, stats: StepStats
    ) -> tuple[Callable[[], object], bool]:
        """Compile if need be, and gather the inputs of one step.

        Returns:
            A call that runs the graph once hyperparameters are written, and whether this was a recompile. Nothing that
            the optimizers hold has changed.
        """
        kind = "masked" if self.places or any(g is None for g in grads) else "all"
        if kind == "masked":
            self._write_presence(grads)
        inputs = [*self._static, *(self._absent_grad(i) if g is None else g for i, g in enumerate(grads))]
        if kind == "masked":
            inputs += [vector.tensor for vector in self._presence]
        recompile = False
        if kind not in self.graphs:
            recompile = kind in self.compiled_kinds
            self._compile(kind, inputs, backend, config, stats)
        graph = self.graphs[kind][1]

        return lambda: graph.run(inputs), recompile

    def tell_autograd(self) -> None:
        """Kernels write behind autograd's back; a graph that saved these parameters must notice."""
        torch.autograd.graph.increment_version(self._params)

    @property
    def static_inputs(self) -> list[Tensor]:
        """The leading inputs of every graph: parameters, state, what the graph tells, hyperparameters."""
        return list(self._static)

    def copies(self, kind: str) -> list[Tensor]:
        """Inputs of a graph that share no memory with the live ones: gradients are noise, and all of them are there."""
        noise: dict[torch.device, torch.Generator] = {}
        made = [x.detach().clone() for x in self._static]
        for param, (shape, dtype) in zip(self._params, self._grad_facts, strict=True):
            device = param.device
            generator = noise.setdefault(device, torch.Generator(device).manual_seed(0))
            made.append(torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype))
        if kind == "masked":
            made += [torch.ones_like(vector.tensor) for vector in self._presence]
        return made

    def take_graphs(self, other: Binding) -> None:
        """Reuse the graphs of an equal plan."""
        self.compiled_kinds |= other.compiled_kinds
        if other.plan != self.plan:
            return
        moved = [x.data_ptr() for x in self._static] != [x.data_ptr() for x in other._static]
        self.graphs = {kind: made for kind, made in other.graphs.items() if not (moved and made[1].fixed_addresses)}

    def take_counts(self, other: Binding) -> None:
        """Go on counting where another binding of the same optimizers left off."""
        if self.skipped is not None and other.skipped is not None:
            self.skipped.copy_(other.skipped)
            self.skips_told, self.skips_counted = other.skips_told, other.skips_counted
        if self.vanishing is not None and other.vanishing is not None:
            self.vanishing.told |= other.vanishing.told

    def _compile(self, kind: str, inputs: list[Tensor], backend: str, config: CompileConfig, stats: StepStats) -> None:
        started = time.perf_counter()
        count, buckets = len(self.plan.specs), len(self.plan.buckets)
        what = f"the step ({kind} gradients): {count} parameters, {buckets} buckets, {backend}"
        _LOG.info("compiling %s", what)
        with compiling(what) as done:
            traced, compiled = self._lower(kind, inputs, backend, config)
            done(compiled.cached)
        seconds = time.perf_counter() - started
        self.graphs[kind] = (traced, compiled)
        self.compiled_kinds.add(kind)
        stats.compiles += 1
        stats.cached += compiled.cached
        stats.compile_seconds += seconds
        stats.graphs = len(self.graphs)
        promised = self.local.collectives
        stats.collectives, stats.bytes = len(promised), sum(c.bytes_per_rank for c in promised)
        stats.collectives_by_kind = dict(Counter(c.kind for c in promised))
        stats.bytes_by_kind = {
            kind: sum(c.bytes_per_rank for c in promised if c.kind == kind) for kind in stats.collectives_by_kind
        }
        stats.fx_nodes = len(traced.graph.graph.nodes)
        stats.temp_bytes = self.plan.temp_bytes
        _LOG.info("compiled in %.1f s%s", seconds, " (from the disk cache)" if compiled.cached else "")

    def _lower(
        self, kind: str, inputs: list[Tensor], backend: str, config: CompileConfig
    ) -> tuple[TracedStep, CompiledGraph]:
        spec, groups = self.input_spec(kind), self.reading.meshes.groups()
        if not self.places:  # no collective, so which graph a rank needs, and when, is its own matter
            return lower_step(self.local, spec, inputs, run_step, self.places, backend, config)
        failure: Exception | None = None
        made: tuple[TracedStep, CompiledGraph] | None = None
        try:
            made = lower_step(self.local, spec, inputs, run_step, self.places, backend, config)
        except Exception as error:  # told to the others, who would wait in the first collective, and raised there
            failure = error
        lines = {} if made is None else collective_lines(made[0], list(self.places.values()))
        exchange_outcomes(failure, lines, groups)
        assert made is not None
        return made

    def input_spec(self, kind: str) -> InputSpec:
        """Order and names of the graph's flat inputs."""
        agreement = None if self.agreement is None else str(self.agreement.device)
        return input_spec(self.local, kind, agreement, self.probes is not None)

    def _write_presence(self, grads: Sequence[Tensor | None]) -> None:
        if not self._presence:
            self._presence = self._vectors()
        self._fill(self._presence, [grad is not None for grad in grads])

    def presence(self, present: Sequence[bool]) -> list[Tensor]:
        """The graph's presence inputs, kept apart from those of the live gradients."""
        vectors = self._vectors()
        self._fill(vectors, present)
        return [vector.tensor for vector in vectors]

    def _vectors(self) -> list[HostVector]:
        sizes = {d: sum(self.plan.buckets[i].size for i in buckets) for d, buckets in self._by_device.items()}
        return [HostVector(size, torch.bool, device) for device, size in sizes.items()]

    def _fill(self, vectors: Sequence[HostVector], present: Sequence[bool]) -> None:
        for vector, buckets in zip(vectors, self._by_device.values(), strict=True):
            vector.write([present[i] for b in buckets for i in self.plan.buckets[b].params])

    def _absent_grad(self, index: int) -> Tensor:
        """A zero stand-in for a missing gradient, one per bucket."""
        bucket = self._bucket_of[index]
        if bucket not in self._absent:
            shape, dtype = self._grad_facts[index]
            self._absent[bucket] = torch.zeros(shape, dtype=dtype, device=self._params[index].device)
        return self._absent[bucket]
