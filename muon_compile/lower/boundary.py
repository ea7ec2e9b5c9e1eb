"""The list-to-bucket boundary of a compiled step: the only nodes that see a list of parameters.

``pack`` and ``apply_`` are single operators, so the graph does not grow with the number of parameters. A bucket of one
needs neither: its work is left to the backend to fuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LIB = torch.library.Library("muon_compile", "FRAGMENT")
_LIB.define("pack(Tensor[] tensors) -> Tensor")
_LIB.define("apply_(Tensor(a!)[] params, Tensor update, Tensor decay, Tensor? step_size) -> ()")

# From this many elements on a parameter is worth its own two calls, which leave it in cache in between.
_LARGE_NUMEL = 32_768


def _pack(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors)


def _pack_fake(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((len(tensors), *tensors[0].shape))


def _factors(value: Tensor, count: int) -> list[float]:
    listed = value.tolist()
    return listed if isinstance(listed, list) else [listed] * count


def _apply_cpu(params: list[Tensor], update: Tensor, decay: Tensor, step_size: Tensor | None) -> None:
    """As ``torch.optim`` writes it: ``p.mul_(decay); p.add_(update, alpha=step_size)``, hyperparameters as doubles."""
    rows = list(update.unbind(0))
    decays = _factors(decay, len(params))
    sizes = [1.0] * len(params) if step_size is None else _factors(step_size, len(params))
    # The list operators round a factor to the parameters' dtype first; mul_ and add_ take it in float32.
    wide = params[0].dtype in (torch.float32, torch.float64)
    if wide and params[0].numel() < _LARGE_NUMEL and len(set(decays)) == 1 and len(set(sizes)) == 1:
        torch._foreach_mul_(params, decays[0])
        torch._foreach_add_(params, rows, alpha=sizes[0])
        return
    for param, row, factor, size in zip(params, rows, decays, sizes, strict=True):
        if factor == 1.0 and size == 0.0:
            continue  # nothing to do: no gradient, or lr 0; not even the sign of a zero may change
        param.mul_(factor).add_(row, alpha=size)


def _apply_device(params: list[Tensor], update: Tensor, decay: Tensor, step_size: Tensor | None) -> None:
    """On a device nothing is read back: the graph has scaled the update already, in the parameters' dtype."""
    assert step_size is None
    if decay.dim() == 0:
        torch._foreach_mul_(params, decay)
    else:
        torch._foreach_mul_(params, list(decay.unbind(0)))
    torch._foreach_add_(params, list(update.unbind(0)))


def _apply_fake(params: list[Tensor], update: Tensor, decay: Tensor, step_size: Tensor | None) -> None:
    return None


_LIB.impl("pack", _pack, "CompositeExplicitAutograd")
_LIB.impl("apply_", _apply_device, "CompositeExplicitAutograd")
_LIB.impl("apply_", _apply_cpu, "CPU")
torch.library.register_fake("muon_compile::pack", _pack_fake, lib=_LIB)
torch.library.register_fake("muon_compile::apply_", _apply_fake, lib=_LIB)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack equal shapes into ``[B, *shape]``; one tensor is viewed as ``[1, *shape]``."""
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)
    result: Tensor = torch.ops.muon_compile.pack(list(tensors))
    return result


def apply_(params: Sequence[Tensor], update: Tensor, decay: Tensor, step_size: Tensor | None, *, exact: bool) -> None:
    """Write ``p <- p * decay + update * step_size`` into every parameter.

    Args:
        params: B tensors of one shape.
        update: ``[B, *shape]``.
        decay: 0-d or ``[B]``.
        step_size: 0-d or ``[B]``; None means 1.
        exact: Keep the two roundings of ``torch.optim``, even for a bucket of one.
    """
    first = params[0]
    on_cpu = first.device.type == "cpu"
    if on_cpu and (exact or len(params) > 1):
        torch.ops.muon_compile.apply_(list(params), update, decay, step_size)
        return
    wide = torch.promote_types(first.dtype, torch.float32)
    delta = update.to(wide)
    if step_size is not None:
        size = step_size.to(wide)
        delta = delta * (size if size.dim() == 0 else size.view(-1, *(1,) * first.dim()))
    if len(params) == 1:
        factor = decay.reshape(()).to(wide)
        new = first.to(wide) * factor + delta.squeeze(0)
        if step_size is not None and step_size.dim() == 1:  # a mask is in it: 0 where there is no gradient
            new = torch.where((step_size != 0).reshape(()), new, first.to(wide))
        first.copy_(new)
        return
    torch.ops.muon_compile.apply_(list(params), delta.to(first.dtype), decay.to(wide), None)
