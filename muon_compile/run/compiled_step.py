"""The step of live optimizers as one call into one compiled graph."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from muon_compile.adapters import leaves_of
from muon_compile.config import CompileConfig
from muon_compile.kernels import cpu
from muon_compile.layout import replicate_group
from muon_compile.lower.backends import check_backend, hyper_dtype
from muon_compile.plan.hardware import Hardware
from muon_compile.plan.plan import Plan
from muon_compile.run.artifacts import measure, write_artifacts
from muon_compile.run.autocast import own_dtypes
from muon_compile.run.binding import Binding, Replan
from muon_compile.run.counting import count_step, use_up_gradients
from muon_compile.run.hyper import read_hyper
from muon_compile.run.install import Installation, installed_on
from muon_compile.run.loading import LoadHooks
from muon_compile.run.memory import keep_temporaries
from muon_compile.run.outcome import check_agreement, check_skips
from muon_compile.run.peers import tell_of_peers
from muon_compile.run.planning import Wishes, hardware_named, plan_reading
from muon_compile.run.probes import Probes
from muon_compile.run.reading import Names, config_key, find_adapters, live_groups, name_table, read_optimizers
from muon_compile.run.stats import StepStats

Closure = Callable[[], Any]

_LOG = logging.getLogger("muon_compile")


class CompiledStep:
    """The compiled step of one optimizer, or of several joined. Made by ``compile_step``.

    Calling it is ``optimizer.step()``: an optional closure is evaluated first, hooks of every optimizer fire, and its
    loss is returned.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        backend: str,
        strategy: str,
        ns: str,
        names: Names,
        config: CompileConfig,
        check_compiler: bool = True,
        hardware: Hardware | Literal["auto"] | None = None,
        replicate: ProcessGroup | None = None,
        chained: bool = False,
    ) -> None:
        self.chained = chained
        self.optimizers = tuple(optimizers)
        self.config = config
        self.stats = StepStats()
        self._adapters = find_adapters(optimizers)
        self._backend = backend
        self._wishes = Wishes(strategy=strategy, ns=ns, config=config, hardware=hardware, backend=backend)
        self._names, self._replicate = name_table(names), replicate
        self._binding: Binding | None = None
        self._broken: str | None = None
        reading = read_optimizers(self.optimizers, self._adapters, self._names, replicate=replicate)
        devices = {spec.device for spec in reading.specs}
        check_backend(backend, devices if check_compiler else (), config, reading.meshes.groups())
        # What planning refuses is refused here, before anything changes.
        _, self._hardware = plan_reading(reading, self._wishes)
        for one, adapter in zip(self.optimizers, self._adapters, strict=True):
            adapter.collect_state(one)
        if not any(p.device.type == "meta" for p in reading.params):
            self._bind()
        if config.keep_memory and any(spec.device.startswith("cpu") for spec in reading.specs):
            keep_temporaries()
        self._hooks = LoadHooks(self)
        self._installation = Installation(self)

    # -- what people look at ------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the step, made from the live parameters.

        Raises:
            RuntimeError: Parameters are still on the meta device.
        """
        if self._binding is None:
            self._bind()
        assert self._binding is not None
        return self._binding.plan

    def dump(self, directory: str | Path, profile: bool = False) -> list[Path]:
        """Write the step as files: plan, graphs, code, collectives, counts, predicted timeline, and a report.

        Ranks differ in what they run, so each of them writes to a directory of its own; one may do so alone.

        Args:
            directory: Where to; made if need be.
            profile: Also measure a step, on copies of everything that it writes: nothing live changes, but there has to
                be memory for them. The step's collectives run, so then every rank of its meshes has to call.

        Returns:
            The paths written (``inspect.dump.dump_files`` says what is what).

        Raises:
            RuntimeError: The step has not been compiled yet; run one step first. Or with ``profile`` other ranks have
                not called within half a minute.
            OSError: The directory cannot be written to; nothing has been.
        """
        binding = self._binding
        if binding is None or not binding.graphs:
            raise RuntimeError("dump: nothing is compiled yet; the step compiles when it first runs. Run a step first.")
        hyper = [adapter.hyper(group) for adapter, group in live_groups(self.optimizers, self._adapters)]
        with torch.no_grad(), own_dtypes(self.optimizers):
            measured = measure(binding) if profile else None
        hardware = self._hardware
        return write_artifacts(Path(directory), binding, self.stats, hyper, hardware=hardware, measured=measured)

    def probes(self, *, reduce: bool = True) -> Probes:
        """What the last step was like, bucket by bucket; waits for the device. Needs ``CompileConfig(probes=True)``.

        Args:
            reduce: Add up what the ranks of the parameters' meshes hold: every one of them has to call, as it calls a
                collective, where parameters are shared at all. If False, this rank's part alone.

        Raises:
            RuntimeError: The step has no probes, or no step was done since it was last planned.
        """
        if not self.config.probes:
            raise RuntimeError("probes: the step has none; compile it with config=CompileConfig(probes=True).")
        binding = self._binding
        if binding is None or binding.probes is None or binding.probes.step is None:
            raise RuntimeError("probes: no step was done yet, or none since the step was planned anew; run one first.")
        return binding.probes.read(binding.plan, binding.reading.meshes, reduce=reduce)

    @property
    def skipped(self) -> int:
        """Steps that were skipped for a gradient that is not finite (``nonfinite``); waits for the device."""
        binding = self._binding
        return 0 if binding is None or binding.skipped is None else int(binding.skipped)

    # -- stepping -----------------------------------------------------------------------------------------------

    def __call__(self, closure: Closure | None = None) -> Any:
        """Run one step of every optimizer, hooks included. Returns the closure's loss, if there is one."""
        return self._installation.call(closure)

    def around(self, body: Callable[[Closure | None], Any]) -> Any:
        """Run something else that steps, hooks included."""
        return self._installation.call(None, body)

    def run(self, closure: Closure | None = None) -> Any:
        """Run one step without hooks.

        Raises:
            ValueError: A hyperparameter or a gradient that the step cannot take; nothing has changed.
            RuntimeError: An earlier step failed inside its kernels, and no state has been loaded since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), own_dtypes(self.optimizers):
            self._step()
        return loss

    def _step(self) -> None:
        binding, hyper = self.begin()
        try:
            grads = binding.gradients()
        except Replan:
            binding = self._bind()
            grads = binding.gradients()
        if all(grad is None for grad in grads) and not binding.places:
            # Ranks that exchange matrices tell each other, even that they have nothing.
            count_step(self.optimizers, binding, launched=False)
            return
        run, recompile = binding.prepare(grads, self._backend, self.config, self.stats)
        self.stats.recompiles += recompile
        binding.hyper.write(hyper)
        self.stats.host_launches += 1
        try:
            run()
        except BaseException as error:  # Ctrl-C inside a kernel leaves a half-done step, too
            self.break_off(error)
            raise
        self.end(binding)
        use_up_gradients(self.optimizers, binding)

    def begin(self) -> tuple[Binding, list[dict[str, float | Tensor]]]:
        """Check everything but gradients before a step: the binding, and every group's values.

        Raises:
            ValueError: A hyperparameter that the step cannot take.
            RuntimeError: An earlier step failed, or its ranks disagreed.
        """
        if self._broken is not None:
            raise RuntimeError(
                f"An earlier step failed inside its kernels ({self._broken}), so parameters and state may be half "
                "updated. Load parameters and optimizer.load_state_dict() from a checkpoint to go on."
            )
        if self._binding is not None:
            self._binding.check_groups()
        self._check_outcome()
        self.stats.host_launches = 0
        for optimizer, adapter in zip(self.optimizers, self._adapters, strict=True):
            adapter.check(optimizer)
        groups = live_groups(self.optimizers, self._adapters)
        hyper = read_hyper([adapter.hyper(group) for adapter, group in groups])
        return self._bound(groups), hyper

    def break_off(self, error: BaseException) -> None:
        """A step failed inside its kernels: none runs until state is loaded. Says which ranks may be the cause."""
        if self._binding is not None and self._binding.places:
            tell_of_peers(error, self._binding.reading.meshes.ranks())
        self._broken = f"{type(error).__name__}: {error}"

    def end(self, binding: Binding) -> None:
        """A step was launched: count it, and look at its outcome where that is to be done at once."""
        binding.tell_autograd()
        self.stats.steps += 1
        if binding.probes is not None:
            binding.probes.step = self.stats.steps
        self.stats.scratch_bytes = cpu.scratch_held() if binding.plan.native else 0
        if self.config.check == "sync":
            self._check_outcome()
        count_step(self.optimizers, binding)
        if binding.vanishing is not None:
            binding.vanishing.look()

    def _check_outcome(self) -> None:
        if self._binding is not None:
            check_agreement(self._binding)
            if self.config.nonfinite == "raise":
                check_skips(self._binding)

    # -- binding ------------------------------------------------------------------------------------------------

    def _bound(self, groups: Sequence[tuple[Any, Mapping[str, Any]]]) -> Binding:
        """The binding, after checking that it still is one of the live optimizers."""
        binding = self._binding
        if binding is None:
            return self._bind()
        reading = binding.reading
        live = [p for _, group in groups for p in group["params"]]
        same = len(live) == len(reading.params) and all(map(operator.is_, live, reading.params))
        sizes = tuple(len(group["params"]) for _, group in groups)
        keys = tuple(config_key(adapter, group) for adapter, group in groups)
        if not same or sizes != reading.group_sizes or keys != reading.config_keys:
            return self._bind()
        try:
            binding.check_params()
        except Replan:
            return self._bind()
        if not binding.state.is_attached():
            self.adopt(binding.state.current())
        return binding

    @torch.no_grad()
    def _bind(self) -> Binding:
        """Read the optimizers, plan, and take their state over. An unchanged plan keeps its compiled graphs."""
        seen = {} if self._binding is None else self._binding.reading.seen_grad_dtypes
        reading = read_optimizers(self.optimizers, self._adapters, self._names, seen, self._replicate)
        if any(p.device.type == "meta" for p in reading.params):
            raise RuntimeError(
                "The plan needs real parameters, and some are still on the meta device; "
                "materialize the model (model.to_empty(device=...)) first."
            )
        plan, self._hardware = plan_reading(reading, self._wishes)
        binding = Binding(plan, reading, self.optimizers, hyper_dtype(self._backend), self.config.probes)
        before = None if self._binding is None else self._binding.state
        binding.state.adopt(binding.state.begun_anew(before))
        binding.state.attach()
        if self._binding is not None and not self.stats.steps:
            binding.state.forget_departed(self._binding.state)  # zeros that nobody has stepped
        if self._binding is not None:
            binding.take_graphs(self._binding)
            binding.take_counts(self._binding)
        self._binding = binding
        return binding

    def adopt(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Copy per-parameter state in, give the optimizers their views, and forget a failure."""
        assert self._binding is not None
        self._binding.state.adopt(states)
        self._binding.state.attach()
        self._broken = None

    def param_views(self) -> Binding | None:
        """The current binding, for the load hooks; None before the parameters exist."""
        return self._binding

    # -- leaving ------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Make ``optimizer.step()`` of every optimizer the compiled step."""
        self._installation.install()

    def rebind(self) -> None:
        """Plan anew from the live optimizers, keeping their state.

        Raises:
            ValueError, NotImplementedError: Something that the step cannot take; the old plan stays.
        """
        if self._binding is not None:
            self._bind()

    def uninstall(self) -> None:
        """Give the stock optimizers back, each with its state in tensors of its own."""
        self._installation.uninstall()
        self._hooks.remove()
        if self._binding is not None:
            self._binding.state.release()
            self._binding = None
        self._tell_owners(None)

    def _tell_owners(self, step: CompiledStep | None) -> None:
        """An optimizer that shows its compiled step (``muon_compile.Muon``) hears which one it is."""
        for optimizer in self.optimizers:
            accept = getattr(optimizer, "accept_compiled_step", None)
            if accept is not None:
                accept(step)


def compile_step(
    optimizer: Any,
    *more: Any,
    backend: str = "inductor",
    strategy: str = "auto",
    ns: str = "auto",
    install: bool = True,
    names: Names = None,
    groups: Mapping[str, str | ProcessGroup] | None = None,
    config: CompileConfig | None = None,
    hardware: Hardware | str | None = None,
) -> CompiledStep:
    """Compile the whole step of an optimizer into one graph, which ``optimizer.step()`` then runs with one call.

    An optimizer that is wrapped already is taken out of its old step first.

    Args:
        optimizer: ``torch.optim.Muon``, ``torch.optim.AdamW``, ``muon_compile.Muon``, one of another library that an
            adapter knows (docs/migrate.md), or a chain of those (HyperParallel's ``ChainedOptimizer``).
        more: Further optimizers for the same graph. The joint step runs in the first one's ``step()``; the others'
            ``step()`` is then a checked no-op.
        backend: ``"inductor"``; ``"torchair"`` on Ascend NPUs; or ``"aot_eager"`` to run the traced graph uncompiled.
        strategy: How sharded matrices are made whole; on one rank ``"auto"`` and ``"local"`` are the same. An entry
            ``"strategy"`` of a parameter group goes before it.
        ns: Newton-Schulz form: ``"auto"`` takes, batch by batch, the fastest one that is accurate enough; or one's name
            (``make_plan``).
        install: Replace ``optimizer.step``. If False, call the returned step instead.
        names: Parameter names, as pairs (``model.named_parameters()``) or a mapping from tensor to name. Not needed
            where the optimizer was given named parameters.
        groups: ``{"replicate": group}``, a process group or its name, where plain parameters are copies on several
            ranks (DDP): these share the Newton-Schulz work. Sharded parameters bring their groups along.
        config: What is about compiling.
        hardware: Figures that decide strategies, forms and kernels, or a preset's name. None: a CPU is measured once
            (two seconds) and its figures are kept in the cache directory, unless ``MUON_COMPILE_HARDWARE`` names a
            preset or a file; accelerators and networks take the preset of their kind. ``"auto"``: the network among the
            ranks is measured too.

    Returns:
        The step. It compiles when it first runs.

    Raises:
        TypeError: No adapter knows the optimizer.
        ValueError: A parameter, a hyperparameter or an argument that the step cannot take; nothing has changed.
        NotImplementedError: A layout that this version cannot take.
        CompileError: The backend cannot work here (no C++ compiler).
    """
    if config is not None and not isinstance(config, CompileConfig):
        raise TypeError(
            f"compile_step: config: expected a CompileConfig, got {type(config).__name__}; a MuonConfig belongs to the "
            "optimizer (muon_compile.Muon(..., config=...))."
        )
    replicate = replicate_group(groups or {})
    given = (optimizer, *more)
    leaves = [leaf for one in given for leaf in leaves_of(one)]
    find_adapters(leaves)
    replaced = installed_on(leaves) if install else []
    step = CompiledStep(
        leaves,
        backend=backend,
        strategy=strategy,
        ns=ns,
        names=names,
        config=config or CompileConfig(),
        hardware=hardware if hardware is None or isinstance(hardware, Hardware) else hardware_named(hardware),
        replicate=replicate,
        chained=any(not isinstance(one, Optimizer) for one in given),
    )
    for other in replaced:
        other.uninstall()
    step._tell_owners(step)
    if install:
        step.install()
    return step
