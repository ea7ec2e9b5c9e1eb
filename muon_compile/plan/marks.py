"""What a node of a step's graph is about, as plain data: its phase, and the parts of the plan that it works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["inputs", "agree", "momentum", "send", "orthogonalize", "return", "update"]
# In the order in which a part goes through them.
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the builder was about when it made a node.

    Args:
        phase: ``"inputs"``: taking the graph's inputs apart; ``"agree"``: on which gradients are there, on their norm
            and on whether they are finite; ``"momentum"``: gradients to directions, and AdamW's moments; ``"send"``:
            directions on their way to whoever orthogonalizes them; ``"orthogonalize"``: all of Newton-Schulz, Grams
            too; ``"return"``: results on their way back; ``"update"``: decay and the new parameters.
        parts: Indices into ``Plan.parts``; empty for ``"inputs"``.
        batch: Index into ``Plan.batches``, where the node is one batch's.
    """

    phase: Phase
    parts: tuple[int, ...] = ()
    batch: int | None = None
