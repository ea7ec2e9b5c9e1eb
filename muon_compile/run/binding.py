"""One plan bound to live parameters: checks, flat inputs, compiled graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from muon_compile.build.step import run_step
from muon_compile.config import CompileConfig
from muon_compile.kernels import cpu
from muon_compile.layout import dtype_name
from muon_compile.lower.backends import lower_step
from muon_compile.lower.compiled import CompiledGraph
from muon_compile.lower.trace import InputSpec, TracedStep
from muon_compile.plan.forms import parse_form
from muon_compile.plan.plan import Batch, Plan
from muon_compile.run.hyper import HostVector, HyperVectors
from muon_compile.run.reading import Reading
from muon_compile.run.state import StateStore
from muon_compile.run.stats import StepStats

_LOG = logging.getLogger("muon_compile")


class Replan(Exception):
    """The live parameters or gradients no longer fit the plan; it must be made again."""


class Binding:
    """A plan, its state, and its compiled graphs over the live parameters of a reading."""

    def __init__(self, plan: Plan, reading: Reading, optimizers: Sequence[Optimizer]) -> None:
        self.plan, self.reading = plan, reading
        self.state = StateStore(plan, reading, optimizers)
        self.hyper = HyperVectors(plan)
        self.graphs: dict[str, tuple[TracedStep, CompiledGraph]] = {}
        self.compiled_kinds: set[str] = set()
        self._params = [p.detach() for p in reading.params]
        self._addresses = [p.data_ptr() for p in reading.params]
        self._static = [*self._params, *(t for _, t in self.state.inputs), *self.hyper.tensors]
        self._grad_facts = [
            (p.shape, getattr(torch, s.grad_dtype or s.dtype))
            for p, s in zip(reading.params, reading.specs, strict=True)
        ]
        self._param_facts = [(p.shape, p.dtype) for p in reading.params]
        self._presence: list[HostVector] = []
        self._absent: dict[int, Tensor] = {}
        self._by_device: dict[str, list[int]] = {}
        for index, bucket in enumerate(plan.buckets):
            self._by_device.setdefault(bucket.device, []).append(index)
        self._bucket_of = {i: b for b, bucket in enumerate(plan.buckets) for i in bucket.params}

    def check_params(self) -> None:
        """Compare the live parameters with what was bound.

        Raises:
            Replan: A parameter's memory, shape, strides or dtype is another.
        """
        for param, address, (shape, dtype) in zip(self.reading.params, self._addresses, self._param_facts, strict=True):
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
            grad = param.grad
            if grad is not None and (
                grad.layout is not torch.strided
                or grad.dtype is not dtype
                or grad.shape != shape
                or not grad.is_contiguous()
            ):
                grad = self._settle(index, grad)
            grads.append(grad)
        return grads

    def _settle(self, index: int, grad: Tensor) -> Tensor:
        spec = self.reading.specs[index]
        if grad.layout is not torch.strided:
            raise ValueError(
                f"Gradient of {spec.name!r}: expected a dense tensor, got layout {grad.layout}. "
                "Build the layer with sparse=False, or leave this parameter to another optimizer."
            )
        if tuple(grad.shape) != spec.shape:
            raise ValueError(f"Gradient of {spec.name!r}: expected shape {spec.shape}, got {tuple(grad.shape)}.")
        if dtype_name(grad.dtype) != spec.grad_dtype:
            raise Replan
        return grad.contiguous()

    def prepare(
        self, grads: Sequence[Tensor | None], backend: str, config: CompileConfig, stats: StepStats
    ) -> tuple[Callable[[], None], bool]:
        """Compile if need be, and gather the inputs of one step.

        Returns:
            A call that runs the graph once hyperparameters are written, and whether this was a recompile. Nothing that
            the optimizers hold has changed.
        """
        kind = "masked" if any(g is None for g in grads) else "all"
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

        def run() -> None:
            graph.run(inputs)
            # Kernels write behind autograd's back; a graph that saved these parameters must notice.
            torch.autograd.graph.increment_version(self._params)

        return run, recompile

    def take_graphs(self, other: Binding) -> None:
        """Reuse the graphs of an equal plan."""
        self.compiled_kinds |= other.compiled_kinds
        if other.plan == self.plan:
            self.graphs = other.graphs

    def _compile(self, kind: str, inputs: list[Tensor], backend: str, config: CompileConfig, stats: StepStats) -> None:
        started = time.perf_counter()
        count, buckets = len(self.plan.specs), len(self.plan.buckets)
        _LOG.info("compiling the step (%s gradients): %d parameters, %d buckets, %s", kind, count, buckets, backend)
        traced, compiled = lower_step(self.plan, self.input_spec(kind), inputs, run_step, backend, config)
        seconds = time.perf_counter() - started
        self.graphs[kind] = (traced, compiled)
        self.compiled_kinds.add(kind)
        stats.compiles += 1
        stats.cached += compiled.cached
        stats.compile_seconds += seconds
        stats.graphs = len(self.graphs)
        stats.collectives = len(self.plan.collectives)
        stats.bytes = sum(c.bytes_per_rank for c in self.plan.collectives)
        stats.fx_nodes = len(traced.graph.graph.nodes)
        stats.temp_bytes, stats.scratch_bytes = self.plan.temp_bytes, _scratch_bytes(self.plan)
        _LOG.info("compiled in %.1f s%s", seconds, " (from the disk cache)" if compiled.cached else "")

    def input_spec(self, kind: str) -> InputSpec:
        """Order and names of the graph's flat inputs."""
        state = tuple(key for key, _ in self.state.inputs)
        presence = tuple((d, tuple(b)) for d, b in self._by_device.items()) if kind == "masked" else ()
        numbers = range(len(self.plan.specs))
        names = [f"param_{i}" for i in numbers]
        names += [f"{self.plan.buckets[index].name}_{name}" for index, name in state]
        names += [f"hyper_{i}" for i in range(len(self.hyper.entries))]
        names += [f"grad_{i}" for i in numbers] + [f"presence_{i}" for i in range(len(presence))]
        return InputSpec(
            names=tuple(names),
            num_params=len(self.plan.specs),
            state=state,
            hyper=tuple(self.hyper.entries.items()),
            presence=presence,
        )

    def _write_presence(self, grads: Sequence[Tensor | None]) -> None:
        if not self._presence:
            for device, buckets in self._by_device.items():
                size = sum(self.plan.buckets[i].size for i in buckets)
                self._presence.append(HostVector(size, torch.bool, device))
        for vector, buckets in zip(self._presence, self._by_device.values(), strict=True):
            order = [i for b in buckets for i in self.plan.buckets[b].params]
            vector.write([grads[i] is not None for i in order])

    def _absent_grad(self, index: int) -> Tensor:
        """A zero stand-in for a missing gradient, one per bucket."""
        bucket = self._bucket_of[index]
        if bucket not in self._absent:
            shape, dtype = self._grad_facts[index]
            self._absent[bucket] = torch.zeros(shape, dtype=dtype, device=self._params[index].device)
        return self._absent[bucket]


def _scratch_bytes(plan: Plan) -> int:
    """What the CPU kernel needs for the largest batch that it will be given."""
    native = [batch for batch in plan.batches if batch.kernel == "native"]
    threads = torch.get_num_threads()

    def needed(batch: Batch) -> int:
        split = parse_form(batch.form, batch.config.ns_steps).gram == "split"
        return cpu.scratch_bytes(batch.num_matrices, batch.rows, batch.cols, split=split, threads=threads)

    return max((needed(batch) for batch in native), default=0)
