"""The list-to-bucket boundary of a compiled step: the only nodes that see a list of parameters.

Each is a single operator, so the graph does not grow with the number of parameters. In a plan for the CPU kernels
``momentum_`` and ``update_`` do all of a bucket's work on either side of Newton-Schulz, reading and writing
everything once. Elsewhere ``pack`` and ``apply_`` move between list and bucket, and the arithmetic is the backend's to
fuse; there a bucket of one needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muon_compile.kernels import cpu

_LIB = torch.library.Library("muon_compile", "FRAGMENT")
_LIB.define("pack(Tensor[] tensors) -> Tensor")
_LIB.define(
    "momentum_(Tensor[] grads, Tensor(a!) momentum, Tensor mu, Tensor? present, Tensor? scale, bool ema, "
    "bool nesterov, ScalarType dtype, bool probing) -> (Tensor, Tensor)"
)
_LIB.define("update_(Tensor(a!)[] params, Tensor update, Tensor decay, Tensor step_size) -> ()")
_LIB.define("update_probed_(Tensor(a!)[] params, Tensor update, Tensor decay, Tensor step_size) -> Tensor")
_LIB.define("list_squares(Tensor[] tensors) -> Tensor")
_LIB.define("next_wave_(Tensor(a!)[] tensors) -> ()")
_LIB.define("write_(Tensor(a!)[] params, Tensor new) -> ()")
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


def _momentum(
    grads: list[Tensor],
    momentum: Tensor,
    mu: Tensor,
    present: Tensor | None,
    scale: Tensor | None,
    ema: bool,
    nesterov: bool,
    dtype: torch.dtype,
    probing: bool,
) -> tuple[Tensor, Tensor]:
    out = torch.empty(momentum.shape, dtype=dtype, device="cpu")
    squares = torch.zeros(len(grads) if probing else 0, dtype=torch.float64, device="cpu")
    wanted = squares if probing else None
    cpu.momentum(grads, momentum, out, mu, present, scale, ema=ema, nesterov=nesterov, squares=wanted)
    return out, squares


def _momentum_fake(grads: list[Tensor], momentum: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype, probing = rest[-2:]
    squares = torch.empty(len(grads) if probing else 0, dtype=torch.float64, device=momentum.device)
    return torch.empty(momentum.shape, dtype=dtype, device=momentum.device), squares


def _update(params: list[Tensor], update: Tensor, decay: Tensor, step_size: Tensor) -> None:
    cpu.update(params, update.contiguous(), decay, step_size)


def _update_probed(params: list[Tensor], update: Tensor, decay: Tensor, step_size: Tensor) -> Tensor:
    squares = torch.zeros((2, len(params)), dtype=torch.float64, device="cpu")
    cpu.update(params, update.contiguous(), decay, step_size, squares)
    return squares


def _update_probed_fake(params: list[Tensor], update: Tensor, decay: Tensor, step_size: Tensor) -> Tensor:
    return torch.empty((2, len(params)), dtype=torch.float64, device=update.device)


def _list_squares(tensors: list[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].numel() >= _LARGE_NUMEL:
        rows: list[Tensor] = [torch.ops.muon_compile.row_squares(tensor.unsqueeze(0)) for tensor in tensors]
        return torch.cat(rows)
    norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=wide))
    return norms * norms


def _list_squares_fake(tensors: list[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return tensors[0].new_empty((len(tensors),), dtype=wide)


def _write(params: list[Tensor], new: Tensor) -> None:
    torch._foreach_copy_(params, list(new.unbind(0)))


def _next_wave(tensors: list[Tensor]) -> None:
    """Nothing: what comes before it is done before what comes after it begins."""


def _nothing(*_: object) -> None:
    """What an operator that only writes in place returns."""


_LIB.impl("pack", _pack, "CompositeExplicitAutograd")
_LIB.impl("apply_", _apply_device, "CompositeExplicitAutograd")
_LIB.impl("apply_", _apply_cpu, "CPU")
_LIB.impl("write_", _write, "CompositeExplicitAutograd")
_LIB.impl("momentum_", _momentum, "CPU")
_LIB.impl("update_", _update, "CPU")
_LIB.impl("update_probed_", _update_probed, "CPU")
_LIB.impl("list_squares", _list_squares, "CompositeExplicitAutograd")
_LIB.impl("next_wave_", _next_wave, "CompositeExplicitAutograd")
torch.library.register_fake("muon_compile::pack", _pack_fake, lib=_LIB)
torch.library.register_fake("muon_compile::momentum_", _momentum_fake, lib=_LIB)
torch.library.register_fake("muon_compile::update_probed_", _update_probed_fake, lib=_LIB)
torch.library.register_fake("muon_compile::list_squares", _list_squares_fake, lib=_LIB)
for _name in ("apply_", "update_", "write_", "next_wave_"):
    torch.library.register_fake(f"muon_compile::{_name}", _nothing, lib=_LIB)


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


def write_(params: Sequence[Tensor], new: Tensor) -> None:
    """Make B tensors of one shape the rows of ``new``, ``[B, *shape]``."""
    if len(params) == 1:
        params[0].copy_(new.squeeze(0))
        return
    torch.ops.muon_compile.write_(list(params), new)


def native_takes(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether the CPU kernels know the tensor's place and dtype, and the other dtypes."""
    return tensor.device.type == "cpu" and cpu.takes(tensor.dtype, *dtypes)


def momentum_(
    grads: Sequence[Tensor],
    momentum: Tensor,
    mu: Tensor,
    present: Tensor | None,
    scale: Tensor | None,
    *,
    ema: bool,
    nesterov: bool,
    dtype: torch.dtype,
    probing: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Update a bucket's momentum in place, in one pass; see ``kernels.cpu.momentum``.

    Returns:
        The directions, ``[B, *shape]`` of ``dtype``; zero where there is no gradient. Where it is probing also the new
        momentum's sums of squares, ``[B]``.
    """
    factors, flags = (mu, present, scale), (ema, nesterov, dtype, probing)
    made: tuple[Tensor, Tensor] = torch.ops.muon_compile.momentum_(list(grads), momentum, *factors, *flags)
    return made[0], made[1] if probing else None


def update_(
    params: Sequence[Tensor], update: Tensor, decay: Tensor, step_size: Tensor, *, probing: bool = False
) -> Tensor | None:
    """Write ``p <- p * decay + update * step_size`` into every parameter, in one pass; see ``kernels.cpu.update``.

    Returns:
        Where it is probing, sums of squares of the parameters before and of ``update``: ``[2, B]``.
    """
    if probing:
        squares: Tensor = torch.ops.muon_compile.update_probed_(list(params), update, decay, step_size)
        return squares
    torch.ops.muon_compile.update_(list(params), update, decay, step_size)
    return None


def list_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of each of B tensors of one shape: ``[B]`` of float32 or their wider dtype."""
    result: Tensor = torch.ops.muon_compile.list_squares(list(tensors))
    return result


def next_wave_(tensors: Sequence[Tensor]) -> None:
    """Keep a backend from starting a wave before the last one is over, for its temporaries would then be alive with it.

    Args:
        tensors: Of every part of the last wave one that it has written, of every part of the next one that it reads.
    """
    torch.ops.muon_compile.next_wave_(list(tensors))
