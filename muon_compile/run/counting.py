"""What optimizers of other libraries do besides a step: they count, and some use gradients up."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from muon_compile.adapters.registry import counts_steps
from muon_compile.run.binding import Binding


def count_step(optimizers: Sequence[Optimizer], binding: Binding, *, launched: bool = True) -> None:
    """Let the optimizers do what their own steps do besides, unless the step was skipped.

    Args:
        optimizers: Those of the binding.
        binding: What has been stepped.
        launched: Whether its graph ran; it does not where no parameter has a gradient.
    """
    pairs = zip(optimizers, binding.reading.adapters, strict=True)
    counting = [(optimizer, adapter) for optimizer, adapter in pairs if counts_steps(adapter)]
    if not counting:
        return
    if binding.skipped is not None:
        skipped = int(binding.skipped)
        if skipped > binding.skips_counted:
            binding.skips_counted = skipped
            binding.state.read_again()
            return
    for optimizer, adapter in counting:
        adapter.after_step(optimizer)
    if launched:
        binding.state.note_versions()
    else:
        binding.state.read_again()


def use_up_gradients(optimizers: Sequence[Optimizer], binding: Binding) -> None:
    """Set gradients to None where the optimizer's own step does."""
    for optimizer, adapter in zip(optimizers, binding.reading.adapters, strict=True):
        if adapter.uses_up_gradients(optimizer):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None
