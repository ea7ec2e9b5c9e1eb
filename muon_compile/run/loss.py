"""A model and its loss as one function of parameters, and what that function does to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only


class LossModule(nn.Module):
    """A model with its loss, so that ``functional_call`` reaches the model's parameters.

    Args:
        model: The model.
        loss_fn: ``loss_fn(output, target)``; ``loss_fn(model, *batch)`` where its first parameter is called ``model``;
            None: the model returns its loss, or something that has it as ``.loss``.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = [loss_fn]  # not a submodule, should it be one: its parameters are nobody's
        self._takes_model = loss_fn is not None and _first_parameter(loss_fn) == "model"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, a scalar."""
        (loss_fn,) = self._loss_fn
        if loss_fn is None:
            output = self.model(*args, **kwargs)
            return output if isinstance(output, Tensor) else output.loss
        if self._takes_model:
            return loss_fn(self.model, *args, **kwargs)
        return loss_fn(self.model(*args[:-1], **kwargs), args[-1])


def _first_parameter(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):
        return None


def look(
    loss: LossModule, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[frozenset[str], tuple[str, ...]]:
    """Run forward and backward on fake tensors: nothing is computed, and nothing changes.

    Args:
        loss: The model and its loss.
        names: Parameters that are to be trained.
        args: A batch.
        kwargs: A batch.

    Returns:
        Names of those that the loss depends on, and of the buffers that the model writes.

    Raises:
        ValueError: The loss is not one number.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(x: Tensor) -> Tensor:
        return mode.from_tensor(x.detach(), static_shapes=True)

    tensors = {name: fake(p) for name, p in loss.named_parameters()}
    buffers = {name: fake(b) for name, b in loss.named_buffers()}
    leaves = [tensors[name].requires_grad_() for name in names]
    batch = tree_map_only(Tensor, fake, (args, dict(kwargs)))
    before = {name: b._version for name, b in buffers.items()}
    with mode, torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        result = functional_call(loss, {**tensors, **buffers}, *batch)
        if not isinstance(result, Tensor) or result.numel() != 1:
            what = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"compile_train_step: expected the loss to be one number, got {what}; take its mean.")
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if leaves and result.requires_grad:
            grads = torch.autograd.grad(result.reshape(()), leaves, allow_unused=True)
    used = frozenset(name for name, grad in zip(names, grads, strict=True) if grad is not None)
    return used, tuple(name for name, b in buffers.items() if b._version != before[name])
