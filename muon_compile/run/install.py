"""Make ``optimizer.step`` the compiled step, for one optimizer or for several that share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muon_compile.distributed import local_tensor

if TYPE_CHECKING:
    from muon_compile.run.compiled_step import CompiledStep

Closure = Callable[[], Any]


class Installation:
    """How the optimizers' ``step`` reach the compiled step.

    The installed ``step`` is a bound method, so schedulers can be made before or after. It fires the optimizer's hooks,
    and falls back to the class's own ``step`` once uninstalled, whoever still holds it.
    """

    def __init__(self, step: CompiledStep) -> None:
        self._step: CompiledStep | None = step
        self._replaced: list[tuple[Optimizer, Any, MethodType]] = []
        self._amp_flags: list[tuple[Optimizer, bool]] = []
        self.active = False
        # Calls of each further optimizer's step() that no joint step has answered yet (-1: a joint step waits for it).
        self._balance = [0] * len(step.optimizers)
        # With a GradScaler: (grad_scale, found_inf) of every optimizer that has been stepped.
        self._scaled: dict[int, tuple[Tensor | None, Tensor]] = {}

    @property
    def _live(self) -> CompiledStep:
        if self._step is None:
            raise RuntimeError("This compiled step was uninstalled; wrap the optimizer again with compile_step().")
        return self._step

    def install(self) -> None:
        """Replace ``step`` on every optimizer."""
        if self.active:
            return
        self.active = True
        for index, optimizer in enumerate(self._live.optimizers):
            before = optimizer.__dict__.get("step")
            method = MethodType(self._make_step(index, hasattr(before, "_wrapped_by_lr_sched")), optimizer)
            self._replaced.append((optimizer, before, method))
            optimizer.step = method  # type: ignore[method-assign]
            if len(self._live.optimizers) > 1:
                # The scaler then leaves skipping to us, and one optimizer's overflow can skip all.
                had = "_step_supports_amp_scaling" in optimizer.__dict__
                self._amp_flags.append((optimizer, getattr(optimizer, "_step_supports_amp_scaling", False) and had))
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def uninstall(self) -> None:
        """Give every optimizer its own ``step`` back."""
        self.active = False
        for optimizer, before, method in self._replaced:
            if optimizer.__dict__.get("step") is method:
                if before is None:
                    del optimizer.__dict__["step"]
                else:
                    optimizer.step = before  # type: ignore[method-assign]
        for optimizer, flag in self._amp_flags:
            if flag:
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            else:
                optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        self._replaced, self._amp_flags = [], []
        # The step and its installation hold each other; let go, so that memory is free without a garbage collection.
        self._step = None

    def call(self, closure: Closure | None, body: Callable[[Closure | None], Any] | None = None) -> Any:
        """One joint step, or ``body`` in its place, with the hooks of every optimizer, outermost first."""
        optimizers, body = self._live.optimizers, body or self._live.run

        def run(index: int, given: Closure | None) -> Any:
            if index == len(optimizers):
                return body(given)
            optimizers[index]._opt_called = True  # type: ignore[attr-defined]  # what LRScheduler looks at
            inner = Optimizer.profile_hook_step(lambda _, closure=None: run(index + 1, closure))
            return inner(optimizers[index], *(() if given is None else (given,)))

        return run(0, closure)

    def _make_step(self, index: int, scheduled: bool) -> Callable[..., Any]:
        """The function behind an installed ``step``. A scheduler made before it is replaced with what it wrapped; one
        made later wraps it in turn, and stays when it goes."""
        installation = self

        def step(optimizer: Optimizer, closure: Closure | None = None) -> Any:
            if not installation.active:
                return type(optimizer).step(optimizer, closure)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what LRScheduler looks at
            try:
                return hooked(optimizer, closure) if closure is not None else hooked(optimizer)
            except BaseException:
                installation._balance[index] = 0  # a hook may have raised: this iteration is over for it
                raise

        def body(optimizer: Optimizer, closure: Closure | None = None) -> Any:
            return installation._run(index, optimizer, closure)

        hooked = Optimizer.profile_hook_step(body)
        step.hooked = True  # type: ignore[attr-defined]
        step.installation = installation  # type: ignore[attr-defined]
        if scheduled:
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # it sets _opt_called itself
        return step

    # -- one optimizer's step() ---------------------------------------------------------------------------------

    def _run(self, index: int, optimizer: Optimizer, closure: Closure | None) -> Any:
        if closure is not None and self._live.chained:
            raise ValueError(
                "A chain gives its closure to every optimizer, and the joint step runs in the first one: expected no "
                "closure. Evaluate it first, then call step()."
            )
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            return self._run_scaled(index, getattr(optimizer, "grad_scale", None), found_inf)
        if index > 0:
            if closure is not None:
                raise ValueError("A closure goes to the first optimizer's step(), which runs the joint step.")
            self._balance[index] += 1
            if self._balance[index] > 1:
                self._balance[index] = 1
                raise RuntimeError(
                    f"step() of joined optimizer {index} was called twice for one joint step; the joint step runs in "
                    "the first optimizer's step(). Call every joined optimizer's step() once per iteration."
                )
            return None
        for other in range(1, len(self._balance)):
            if self._balance[other] < 0:
                raise RuntimeError(
                    f"step() of joined optimizer {other} was not called since the last joint step. Call every joined "
                    "optimizer's step() once per iteration, or call the compiled step itself instead of theirs."
                )
        try:
            result = self._live.run(closure)
        except BaseException:
            self._balance = [0] * len(self._balance)  # the iteration is over for all of them; a retry starts anew
            raise
        for other in range(1, len(self._balance)):
            self._balance[other] -= 1
        return result

    def _run_scaled(self, index: int, grad_scale: Tensor | None, found_inf: Tensor) -> None:
        """Under a GradScaler the joint step runs once every optimizer has been stepped: only then is every overflow
        known. An overflow anywhere skips all of them."""
        if index in self._scaled:
            self._scaled.clear()
            raise RuntimeError(
                "scaler.step() was called twice for one optimizer before it was called for every joined one. "
                "Call scaler.step() once for each of them, then scaler.update()."
            )
        self._scaled[index] = (grad_scale, found_inf.detach().clone())
        if len(self._scaled) < len(self._live.optimizers):
            return
        pending, self._scaled = self._scaled, {}
        if any(bool(found.item()) for _, found in pending.values()):
            return
        with torch.no_grad():
            for which, (scale, _) in pending.items():
                if scale is not None:
                    _unscale(self._live.optimizers[which], scale)
        self._live.run(None)


def installed_on(optimizers: Sequence[Optimizer]) -> list[CompiledStep]:
    """The compiled steps that these optimizers' ``step`` reach, to be taken out for another one.

    Raises:
        ValueError: One is of several optimizers, not all of which are given: the others would be left with half of it.
    """
    found: list[CompiledStep] = []
    for optimizer in optimizers:
        method = getattr(optimizer.__dict__.get("step"), "__func__", None)
        installation = getattr(method, "installation", None)
        if installation is None or not installation.active or installation._live in found:
            continue
        step = installation._live
        if any(all(other is not one for one in optimizers) for other in step.optimizers):
            raise ValueError(
                "compile_step: an optimizer is wrapped already, together with one that is not given; expected both, or "
                "uninstall() of that step first."
            )
        found.append(step)
    return found


def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divide the gradients by the scale, as ``GradScaler.unscale_`` does; they are known to be finite."""
    grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                grads.setdefault((param.grad.device, param.grad.dtype), []).append(local_tensor(param.grad))
    inverse = scale.double().reciprocal().float()
    for (device, _), tensors in grads.items():
        found = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse.to(device))
