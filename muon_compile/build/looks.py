"""Who wants to know of a step's figures while it runs: probes, and the watch over vanishing momenta."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from torch import Tensor

from muon_compile.build.probes import Tally
from muon_compile.build.vanishing import Vanishing
from muon_compile.plan.plan import Plan

# Hears of a part's matrices: its index, their squared errors, and which of its units they are of.
Watch: TypeAlias = Callable[[int, Tensor, slice], None]


class Looks(NamedTuple):
    """Who wants to know of a step's figures, over all waves."""

    tally: Tally | None
    vanishing: Vanishing | None

    def norms(self, plan: Plan, part: int, mask: Tensor | None) -> Callable[[Tensor, slice], None] | None:
        """Hears the norms of a part's matrices, and which of its units they are of."""
        if self.vanishing is None:
            return None
        vanishing, view = self.vanishing, plan.stretch(part).bucket.view
        assert view is not None
        return lambda norms, units: vanishing.norms(part, norms, of_units(mask, view.stacks, units))


def watcher(plan: Plan, masks: Mapping[int, Tensor | None], tally: Tally) -> Watch:
    """Notes squared errors, by the mask of the units that they are of."""

    def note(index: int, errors: Tensor, units: slice) -> None:
        view = plan.stretch(index).bucket.view
        assert view is not None
        tally.orthogonal(index, errors, of_units(masks[index], view.stacks, units))

    return note


def of_units(mask: Tensor | None, stacks: int, units: slice) -> Tensor | None:
    """The mask of parameters ``[B]`` as that of some of their ``B * stacks`` units."""
    return None if mask is None else mask[:, None].expand(-1, stacks).reshape(-1)[units]
