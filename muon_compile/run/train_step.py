"""Forward, backward and the optimizer's step in one ``torch.compile`` graph."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from muon_compile.build.collectives import all_reduce, broadcast, wait
from muon_compile.build.step import run_step
from muon_compile.config import CompileConfig
from muon_compile.distributed import is_distributed
from muon_compile.lower.backends import check_backend
from muon_compile.lower.compiled import CompileError
from muon_compile.lower.train import TRAIN_BACKENDS, trace_update, train_compiler
from muon_compile.plan.plan import Plan
from muon_compile.run.autocast import own_dtypes
from muon_compile.run.binding import Binding
from muon_compile.run.compiled_step import CompiledStep, compile_step
from muon_compile.run.first_call import FirstCall
from muon_compile.run.inputs import fake_inputs
from muon_compile.run.loss import LossModule, look

Values = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """The compiled function of one binding.

    Args:
        binding: The binding.
        settings: What else it was compiled for: whether each parameter is differentiated, and autocast.
        call: The function.
        presence: What the update's graph is told of gradients; nothing where all are there.
        first: Its first call, which the copies of the model make together.
    """

    binding: Binding
    settings: tuple[object, ...]
    call: Callable[..., Tensor]
    presence: tuple[Tensor, ...]
    first: FirstCall


class TrainStep:
    """A whole training step in one graph. Made by ``compile_train_step``.

    Called with a batch it runs forward, backward and the optimizer's step, and returns the loss from before the step: a
    detached scalar that nothing has waited for. ``.grad`` stays as it is.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, step: CompiledStep, backend: str) -> None:
        self.step = step
        self.graphs: list[GraphModule] = []
        """What was compiled, one graph for every kind of batch: forward, backward and update as Dynamo saw them."""
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._loss = LossModule(module, loss_fn)
        self._backend = backend
        self._kind = next(p.device.type for p in module.parameters())
        self._prepared: _Prepared | None = None
        self._agreed = False
        self._names_of(step.param_views())

    @property
    def plan(self) -> Plan:
        """The plan of the optimizer's step."""
        return self.step.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on one batch. Hooks of the optimizers fire around it.

        Raises:
            ValueError: A hyperparameter that the step cannot take, or a loss that is no scalar; nothing has changed.
            RuntimeError: An earlier step failed inside its kernels, and no state has been loaded since.
        """
        loss: Tensor = self.step.around(lambda _: self._run(args, kwargs))
        return loss

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        binding, hyper = self.step.begin()
        kind = self._kind
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        settings = (*autocast, *(p.requires_grad for p in binding.reading.params))
        ready, self._prepared = self._prepared, None
        if ready is None or ready.binding is not binding or ready.settings != settings:
            # Only until one has gone well: later a rank may prepare anew by itself, for its own batch or autocast.
            alone = self._ddp is None or self._agreed
            first = FirstCall(None if alone or self._ddp is None else self._ddp.process_group)
            with first.watching():
                ready = self._prepare(binding, settings, args, kwargs, first)
        binding.hyper.write(hyper)
        others = dict(self._loss.named_buffers())
        try:
            with ready.first.watching(), own_dtypes(self.step.optimizers):
                loss = ready.call(binding.static_inputs, ready.presence, others, args, dict(kwargs))
        except torch._dynamo.exc.TorchDynamoException as error:  # raised before anything runs
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, CompileError):
                raise inner from None
            raise
        except BaseException as error:
            self.step.break_off(error)
            raise
        self._prepared, self._agreed = ready, True
        self.step.end(binding)
        return loss

    def _names_of(self, binding: Binding | None) -> list[str]:
        """The model's names of the binding's parameters.

        Raises:
            ValueError: The optimizer has a parameter that the model has not.
        """
        known = {id(p): name for name, p in self._loss.named_parameters()}
        if binding is None:
            return []
        reading = binding.reading
        alien = [spec.name for spec, p in zip(reading.specs, reading.params, strict=True) if id(p) not in known]
        if alien:
            raise ValueError(
                f"compile_train_step: expected an optimizer of the model's parameters, got one that also has {alien}, "
                "which are not the model's."
            )
        return [known[id(p)] for p in reading.params]

    def _prepare(
        self,
        binding: Binding,
        settings: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        first: FirstCall,
    ) -> _Prepared:
        names, plan = self._names_of(binding), binding.local
        trained = [name for name, p in zip(names, binding.reading.params, strict=True) if p.requires_grad]
        used, written = look(self._loss, trained, args, kwargs)
        present = [name in used or index in binding.zero_missing for index, name in enumerate(names)]
        kind = "masked" if binding.places or not all(present) else "all"
        spec = binding.input_spec(kind)
        hyper = binding.hyper.tensors[0].dtype
        with own_dtypes(self.step.optimizers):
            update = trace_update(plan, spec, fake_inputs(plan, spec, hyper), run_step, binding.places)
        presence = tuple(binding.presence(present)) if kind == "masked" else ()
        own = [i for i, name in enumerate(names) if name in used]
        train = self._function(names, own, written, update.graph, settings[:2])
        alike = [f"a gradient of {name}" for name in names if name in used] + [f"a new {name}" for name in written]

        def compiled(graph: GraphModule) -> None:
            first.compiled(alike)
            self.graphs.append(graph)

        compiler = train_compiler(self._backend, self.step.config.inductor_options, compiled)
        call = torch.compile(train, fullgraph=True, backend=compiler)
        return _Prepared(binding=binding, settings=settings, call=call, presence=presence, first=first)

    def _function(
        self,
        names: Sequence[str],
        used: Sequence[int],
        written: Sequence[str],
        update: GraphModule,
        autocast: tuple[bool, torch.dtype],
    ) -> Callable[..., Tensor]:
        """What is compiled: in place on parameters, state and buffers."""
        loss, average, share = self._loss, self._average(), self._share()
        kind, (enabled, dtype) = self._kind, autocast
        dtypes = [getattr(torch, spec.grad_dtype or spec.dtype) for spec in self.step.plan.specs]

        def train(
            static: Sequence[Tensor], presence: Sequence[Tensor], buffers: Values, args: Any, kwargs: Any
        ) -> Tensor:
            with torch.no_grad():
                params = static[: len(names)]
                frozen = {name: params[i] for i, name in enumerate(names) if i not in used}
                share(buffers)

                def of(trained: list[Tensor]) -> tuple[Tensor, Values]:
                    own = {name: b.clone() if name in written else b for name, b in buffers.items()}
                    values = {names[i]: p for i, p in zip(used, trained, strict=True)}
                    # As around the call; backward and update are never under it.
                    with torch.autocast(kind, dtype, enabled):
                        result = functional_call(loss, {**frozen, **values, **own}, args, kwargs)
                    return result.reshape(()), {name: own[name] for name in written}

                trained, (result, new) = grad_and_value(of, has_aux=True)([params[i] for i in used])
                averaged = dict(zip(used, average(trained), strict=True))
                grads = [averaged[i] if i in averaged else torch.zeros_like(p) for i, p in enumerate(params)]
                update(*static, *(g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)), *presence)
                for name in written:
                    buffers[name].copy_(new[name])
                value: Tensor = result.detach()
                return value

        # A code object of its own: by that Dynamo counts graphs, and after a few of one function it gives up.
        code, names_of = train.__code__.replace(), train.__globals__
        return types.FunctionType(code, names_of, "train", None, train.__closure__)

    def _share(self) -> Callable[[Values], None]:
        """What DistributedDataParallel does before a forward: the first rank's buffers are everyone's."""
        ddp = self._ddp
        if ddp is None or not ddp.broadcast_buffers or ddp.process_group.size() == 1:
            return lambda buffers: None
        group = ddp.process_group.group_name

        def share(buffers: Values) -> None:
            for b in buffers.values():
                b.copy_(wait(broadcast(b, 0, group)))

        return share

    def _average(self) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """What it does with gradients, all of a dtype at once: there is no backward to hide pieces behind."""
        ddp = self._ddp
        if ddp is None or ddp.process_group.size() == 1:
            return lambda grads: grads
        group, world = ddp.process_group.group_name, ddp.process_group.size()

        def average(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            result = list(grads)
            for dtype in dict.fromkeys(g.dtype for g in grads):
                mine = [i for i, g in enumerate(grads) if g.dtype == dtype]
                flat = torch.cat([grads[i].reshape(-1) for i in mine]) / world
                pieces = wait(all_reduce(flat, group)).split([grads[i].numel() for i in mine])
                for i, piece in zip(mine, pieces, strict=True):
                    result[i] = piece.view(grads[i].shape)
            return result

        return average


def compile_train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Optimizer | CompiledStep,
    *,
    backend: str = "inductor",
    config: CompileConfig | None = None,
) -> TrainStep:
    """Compile forward, backward and the optimizer's step into one graph: ``loss = train_step(*batch)``.

    Args:
        model: The model, plain or in ``DistributedDataParallel``, whose averaging of gradients and sharing of buffers
            are then in the graph.
        loss_fn: ``loss_fn(output, target)``: the model gets all of a batch but its last entry. A function whose first
            parameter is called ``model`` is ``loss_fn(model, *batch)``. None: the model returns its loss, or something
            that has it as ``.loss``. Keyword arguments of the call go to the model, or to such a function.
        optimizer: One optimizer, or the compiled step of one or several (``compile_step(muon, adamw)``). Schedulers,
            hooks, state and checkpoints are as ever; ``optimizer.step()`` still steps on ``.grad``.
        backend: ``"inductor"`` or ``"aot_eager"``.
        config: What is about compiling (``max_temp_bytes`` and what it bounds are then the backend's own matter); an
            optimizer that is compiled already brings its own.

    Returns:
        The training step. It compiles at its first batch, and once more for batches of other shapes.

    Raises:
        ValueError: The optimizer has parameters that the model has not, or an argument that does not fit.
        NotImplementedError: The model is sharded (``fully_shard`` works by hooks, outside of any one graph).
        CompileError: The backend cannot work here (no C++ compiler).
    """
    if backend not in TRAIN_BACKENDS:
        raise ValueError(f"compile_train_step: backend: expected one of {TRAIN_BACKENDS}, got {backend!r}.")
    sharded = [name for name, p in model.named_parameters() if is_distributed(p)]
    if sharded:
        raise NotImplementedError(
            f"compile_train_step: expected a plain or DistributedDataParallel model, got sharded parameters "
            f"({sharded[0]!r} and others). Leave forward and backward as they are, and wrap the optimizer with "
            "compile_step()."
        )
    step = optimizer if isinstance(optimizer, CompiledStep) else _compiled(optimizer, backend, config)
    if step is optimizer and config is not None:
        raise ValueError("compile_train_step: config: expected it in compile_step(), which made the optimizer's step.")
    if step.config.exact:
        raise ValueError(
            "compile_train_step: expected exact=False, got True: it reproduces torch.optim.Muon operator by operator, "
            "and in one graph with the model everything is fused anew."
        )
    check_backend(backend, {str(p.device) for p in model.parameters()}, CompileConfig())
    return TrainStep(model, loss_fn, step, backend)


def _compiled(optimizer: Optimizer, backend: str, config: CompileConfig | None) -> CompiledStep:
    own = getattr(optimizer, "compiled", None)
    if isinstance(own, CompiledStep) and config is None:
        return own
    return compile_step(optimizer, backend=backend, config=config)
