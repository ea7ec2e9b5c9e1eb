"""What every backend returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


class CompileError(RuntimeError):
    """The step cannot be compiled here; the message says what is missing and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """A callable graph.

    Args:
        run: Takes the flat inputs as a list (which it may clear) and writes parameters and state in place.
        code: The backend's generated code, by file name.
        backend: Name of the backend.
        cached: Whether the backend found it in its disk cache.
        fixed_addresses: Whether parameters and state must stay where they were when it was compiled.
        any_addresses: Whether ``run`` takes tensors at other addresses than before, as cheaply.
    """

    run: Callable[[list[Tensor]], object]
    code: dict[str, str]
    backend: str
    cached: bool
    fixed_addresses: bool = False
    any_addresses: bool = True
