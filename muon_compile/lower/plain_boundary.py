"""The list-to-bucket boundary in operators that every graph compiler knows, for backends that take no others.

A list becomes a bucket by one ``stack`` and comes back by one ``unbind``, which TorchAir lowers to one ``Pack`` and one
``Unpack``; a bucket of one needs neither. What lies between them sees stacked tensors only, so the graph does not grow
with the number of parameters, beside a node for each parameter that is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muon_compile.lower.trace import InPlaceBoundary
from muon_compile.plan.plan import Stretch


class PlainBoundary(InPlaceBoundary):
    """Writes state and parameters where they are, by ``stack``, ``unbind`` and ``copy_``."""

    in_place = False

    def next_wave(self, done: Sequence[Stretch], coming: Sequence[Stretch]) -> None:
        """Nothing: a compiler that keeps the order of nodes needs no more."""

    def pack(self, part: Stretch) -> Tensor:
        """The part's gradients, stacked."""
        return _stacked(part.of_params(self.grads))

    def grad_squares(self, part: Stretch) -> Tensor:
        """Sum of the squares of the part's gradients."""
        return _row_squares(self.pack(part)).sum()

    def store(self, part: Stretch, name: str, value: Tensor) -> None:
        """Keep a new state tensor."""
        state = part.of_state(self.state[part.whole.name][name])
        state.copy_(value.to(state.dtype))

    def momentum(
        self, part: Stretch, mu: Tensor, mask: Tensor | None, scale: Tensor | None, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """None: the builder's own operators do it."""
        return None

    def weights(self, part: Stretch) -> Tensor:
        """The part's parameters, stacked; copied where the probes might read them after they are overwritten."""
        params = part.of_params(self.params)
        return torch.stack(params) if self.probing else _stacked(params)

    def write(self, part: Stretch, new: Tensor) -> None:
        """Write new parameters in place."""
        params = part.of_params(self.params)
        for param, row in zip(params, [new.squeeze(0)] if len(params) == 1 else new.unbind(0), strict=True):
            param.copy_(row)

    def apply(self, part: Stretch, update: Tensor, decay: Tensor, step_size: Tensor | None) -> Tensor | None:
        """Decay the part's parameters and add the update."""
        params = part.of_params(self.params)
        dtype, dims = params[0].dtype, (-1,) + (1,) * params[0].dim()
        wide = torch.promote_types(dtype, torch.float32)

        def column(value: Tensor) -> Tensor:
            value = value.to(wide)
            return value if value.dim() == 0 else value.view(dims)

        # The probes read it as well, and might after it was overwritten: then even one parameter is copied.
        stacked = torch.stack(params) if self.probing else _stacked(params)
        old, delta = stacked.to(wide), update.to(wide)
        squares = torch.stack([_row_squares(old), _row_squares(delta)]) if self.probing else None
        if step_size is not None:
            delta = delta * column(step_size)
        new = old * column(decay) + delta
        if step_size is not None and step_size.dim() == 1:  # a mask may be in it: 0 where there is no gradient
            new = torch.where(column(step_size) != 0, new, old)
        new = new.to(dtype)
        rows = [new.squeeze(0)] if len(params) == 1 else new.unbind(0)
        for param, row in zip(params, rows, strict=True):
            param.copy_(row)
        return squares


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _row_squares(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * wide).sum(dim=list(range(1, x.dim()))) if x.dim() > 1 else wide * wide


def _squared_error(x: Tensor, signs: Tensor, native: bool) -> Tensor:
    assert not native
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    column = signs[:, None].expand(x.shape[0], -1, -1)
    # Batched products of one column, in x's dtype: a product of wider operands would need x anew.
    product = torch.bmm(x, torch.bmm(x.mT, column.to(x.dtype)))
    return _row_squares(product.to(column.dtype) - column) / signs.shape[0]


def _matrix_norm(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    norm: Tensor = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    return norm.to(x.dtype)


def _matrix_amax(x: Tensor) -> Tensor:
    return x.abs().flatten(-2).max(dim=-1, keepdim=True).values.unsqueeze(-1)


def _baddbmm(add: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    # Factors stay numbers: where they become tensors they are rounded to the operands' dtype, or the sum is mixed.
    product = torch.bmm(a, b)
    product = product if alpha == 1 else product * alpha
    return (add if beta == 1 else add * beta) + product


def _and(x: Tensor, mask: int) -> Tensor:
    return torch.bitwise_and(x, torch.full((), mask, dtype=x.dtype, device=x.device))


def _rsub(x: Tensor, other: float, alpha: float = 1) -> Tensor:
    # TorchAir's own way is an operator of three inputs, Sxpy, that no other converter uses.
    return -(x if alpha == 1 else x * alpha) + other


def _arange(end: int, *, dtype: torch.dtype, device: torch.device, **rest: Any) -> Tensor:
    # With its ends in the result's dtype; of an end alone TorchAir makes a Range of mixed ones.
    result: Tensor = torch.ops.aten.arange.start_step(0, end, 1, dtype=dtype, device=device)
    return result


def library_operators() -> Mapping[Any, Any]:
    """This library's operators in plain ones."""
    operators = torch.ops.muon_compile
    return {
        operators.matrix_norm.default: _matrix_norm,
        operators.matrix_amax.default: _matrix_amax,
        operators.row_squares.default: _row_squares,
        operators.squared_error.default: _squared_error,
    }


def decompositions() -> Mapping[Any, Any]:
    """This library's operators, and those with factors, in plain ones; for ``trace_step``."""
    return {
        **library_operators(),
        torch.ops.aten.baddbmm.default: _baddbmm,
        torch.ops.aten.arange.default: _arange,
        torch.ops.aten.bitwise_and.Scalar: _and,
        torch.ops.aten.rsub.Scalar: _rsub,
    }
