"""A line on the terminal about what is being compiled, where no log says so."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch.distributed as dist

VARIABLE = "MUON_COMPILE_PROGRESS"

_LOG = logging.getLogger("muon_compile")
_warned: set[str] = set()


@contextmanager
def compiling(what: str) -> Iterator[Callable[[bool], None]]:
    """Say on standard error that something is being compiled: while it is, for how long; after it, in one line.

    It is said on an interactive terminal, by rank 0, where the logger ``muon_compile`` does not say it already.
    ``MUON_COMPILE_PROGRESS=1`` has it said anywhere, ``0`` nowhere. Nothing is said after a failure.

    Args:
        what: What is being compiled, in words.

    Yields:
        A function to call once it is compiled, with whether the disk cache had it.
    """
    cached: list[bool] = []
    line = _line(what)
    if line is None:
        yield cached.append
        return
    started = time.perf_counter()
    with suppress(OSError, ValueError):  # a terminal that went away is no reason to fail
        line.start()
    try:
        yield cached.append
    finally:
        with suppress(OSError, ValueError):
            line.stop()
    seconds = time.perf_counter() - started
    if cached:
        found = "from the disk cache" if cached[-1] else "not cached"
        with suppress(OSError, ValueError):
            print(f"muon_compile: compiled {what} in {seconds:.1f} s ({found})", file=sys.stderr, flush=True)


class _Line(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class _Plain:
    """A line for what is no terminal; nothing moves."""

    def __init__(self, text: str) -> None:
        self._text = text

    def start(self) -> None:
        print(self._text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        pass


def _line(what: str) -> _Line | None:
    """The line to show; None where it is not to be shown."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0", "1") and wish not in _warned:
        _warned.add(wish)
        _LOG.warning("%s: expected 0 or 1, got %r, which is as if it were not set", VARIABLE, wish)
    terminal = _is_terminal()
    if sys.stderr is None or wish == "0" or (wish != "1" and not (terminal and _rank() == 0 and not _is_logged())):
        return None
    text = f"compiling {what}"
    return _moving(text) if terminal else _Plain(f"muon_compile: {text}")


def _is_terminal() -> bool:
    """Whether standard error is a terminal on which a line can be written over, and somebody looks at it."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false") or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _is_logged() -> bool:
    """Whether the log has lines about it that go somewhere."""
    return _LOG.isEnabledFor(logging.INFO) and _LOG.hasHandlers()


def _moving(text: str) -> _Line:
    """A spinner, the time since, and the text as far as it fits into the line, which vanish at the end."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    started, spinner = time.monotonic(), Spinner("dots")

    def shown() -> Text:
        now = time.monotonic()
        frame = spinner.render(now)
        return Text.assemble(str(frame), f" {now - started:.0f} s ", text, no_wrap=True, overflow="ellipsis")

    # What the program itself prints is left alone.
    return Live(
        get_renderable=shown,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
    )
