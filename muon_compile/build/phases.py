"""A strategy as phases: each starts collectives, and ends before the first of them is waited for.

While one part's collectives are on their way, another's products can run: the parts of a wave go through their phases
side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from torch import Tensor

from muon_compile.plan.marks import Phase

_T = TypeVar("_T")

# Whole units [k, rows, cols], any k, to as many orthogonalized ones of the same dtype; or Gram sums to Q.
Solve: TypeAlias = Callable[[Tensor], Tensor]
# Hears which phase of the step comes next.
Tell: TypeAlias = Callable[[Phase], None]
# Yields where collectives have been started, and returns the result.
Phases: TypeAlias = Generator[None, None, Tensor]


def unheard(phase: Phase) -> None:
    """A ``Tell`` for those whom nobody listens to."""


def run_side_by_side(parts: Sequence[Phases], meanwhile: Callable[[], _T]) -> tuple[list[Tensor], _T]:
    """Run every part's first phase, then every part's second, and so on; parts with fewer phases end earlier.

    Args:
        parts: The parts.
        meanwhile: Called once, between all first phases and all second ones.

    Returns:
        The parts' results, in order, and that of ``meanwhile``.
    """
    results: dict[int, Tensor] = {}
    _advance(parts, results)
    done = meanwhile()
    while len(results) < len(parts):
        _advance(parts, results)
    return [results[index] for index in range(len(parts))], done


def _advance(parts: Sequence[Phases], results: dict[int, Tensor]) -> None:
    for index, part in enumerate(parts):
        if index not in results:
            try:
                next(part)
            except StopIteration as end:
                results[index] = end.value
