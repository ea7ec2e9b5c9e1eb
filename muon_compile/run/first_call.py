"""The first call of what copies of a model compile: all of them hear how it went before any collective begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import ProcessGroup

from muon_compile.run.agreement import exchange_outcomes


class FirstCall:
    """Tells the ranks of a group, once, whether compiling worked, and compares what they compiled.

    Args:
        group: The copies; None where there is one alone.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._groups = [] if group is None or group.size() == 1 else [group]
        self._told = not self._groups

    def compiled(self, lines: Sequence[str]) -> None:
        """It worked here; ``lines`` are what must be the same on all ranks. Later calls do nothing.

        Raises:
            CompileError: It failed elsewhere, or ranks differ in a line.
        """
        if not self._told:
            self._told = True
            each: dict[str, Sequence[str]] = {group.group_name: lines for group in self._groups}
            exchange_outcomes(None, each, self._groups, what="gradients and buffers")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tell the others where the body raises before it has compiled."""
        try:
            yield
        except Exception as error:
            if not self._told:
                self._told = True
                exchange_outcomes(error, {}, self._groups)
            raise
