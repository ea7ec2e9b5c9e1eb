"""The line about compiling: where it shows, what it says, and where nothing is said."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import muon_compile as mc
from muon_compile.run import progress
from muon_compile.run.progress import VARIABLE, compiling

LOG = logging.getLogger("muon_compile")
WHAT = "the step (all gradients): 4 parameters, 1 buckets, aot_eager"
SHOWN = re.compile(rf"\d s compiling {re.escape(WHAT)}")
DONE = re.compile(rf"muon_compile: compiled {re.escape(WHAT)} in \d+\.\d s \((from the disk cache|not cached)\)")


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """Standard error as a terminal of 200 columns; the result reads what was written there, once it is over."""
    main, end = pty.openpty()
    subprocess.run(["stty", "cols", "200"], stdin=end, check=True)
    chunks: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunk = os.read(main, 2**16)
            except OSError:
                return
            if not chunk:
                return
            chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    before, sys.stderr = sys.stderr, os.fdopen(end, "w")

    def written() -> str:
        if not sys.stderr.closed:
            sys.stderr.close()
        reader.join(30)
        return b"".join(chunks).decode()

    try:
        yield written
    finally:
        written()
        sys.stderr = before
        os.close(main)


@pytest.fixture(autouse=True)
def somebody_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing but the terminal decides."""
    for name in (VARIABLE, "CI", "RANK", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(progress, "_warned", set())
    level = LOG.level
    LOG.setLevel(logging.WARNING)
    yield
    LOG.setLevel(level)


def compile_once(cached: bool | None = False) -> None:
    with compiling(WHAT) as done:
        if cached is not None:
            done(cached)


@pytest.mark.parametrize("cached", [False, True])
def test_a_terminal_is_told(cached: bool) -> None:
    before = sys.stdout
    with terminal() as written:
        compile_once(cached)
        assert sys.stdout is before
        text = written()
    shown, done = SHOWN.search(text), DONE.search(text)
    assert shown and done and shown.end() < done.start()
    assert done[1] == ("from the disk cache" if cached else "not cached")
    # What moved is gone at the end: the line is cleared, and the cursor is back.
    assert "\x1b[2K" in text[shown.end() : done.start()] and text.endswith("\r\n")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_the_time_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as written:
        with compiling(WHAT) as done:
            threading.Event().wait(1.3)
            done(False)
        text = written()
    assert [seconds for seconds in re.findall(r"(\d) s compiling", text) if seconds == "1"]
    assert " in 1." in text


def silent(change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as written:
        change(monkeypatch)
        compile_once()
        assert written() == ""


@pytest.mark.parametrize(
    ("name", "value"), [("CI", "true"), ("CI", "1"), ("RANK", "3"), ("TERM", "dumb"), (VARIABLE, "0")]
)
def test_nothing_is_said_where_nobody_looks(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    silent(lambda patch: patch.setenv(name, value), monkeypatch)


def test_other_ranks_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        silent(lambda patch: None, monkeypatch)
    finally:
        dist.destroy_process_group()


def test_a_log_that_says_it_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    silent(lambda patch: LOG.setLevel(logging.INFO), monkeypatch)
    # At INFO with no handler the lines go nowhere.
    monkeypatch.setattr(LOG, "hasHandlers", lambda: False)
    with terminal() as written:
        compile_once()
        assert DONE.search(written())


def test_no_terminal_is_told_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_once()
    assert capsys.readouterr() == ("", "")
    # Nor is one that rich is told to take for a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    compile_once()
    assert capsys.readouterr() == ("", "")


def test_plain_lines_anywhere_if_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("RANK", "3")
    compile_once(True)
    out, err = capsys.readouterr()
    first, last = err.splitlines()
    assert out == "" and first == f"muon_compile: compiling {WHAT}" and DONE.fullmatch(last)


def test_another_value_is_warned_about_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    compile_once()
    compile_once()
    assert capsys.readouterr().err == ""
    assert [record.getMessage() for record in caplog.records] == [
        f"{VARIABLE}: expected 0 or 1, got 'yes', which is as if it were not set"
    ]


def test_a_failure_takes_the_line_away_and_is_raised() -> None:
    with terminal() as written:
        with pytest.raises(RuntimeError, match="odd"), compiling(WHAT):
            raise RuntimeError("odd")
        text = written()
    assert SHOWN.search(text) and not DONE.search(text)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_a_terminal_that_goes_away_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal() as written, compiling(WHAT) as done:
        done(False)
        written()  # closes it
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setenv(VARIABLE, "1")
    compile_once()
    assert capsys.readouterr().out == ""


def test_a_step_says_what_it_compiles() -> None:
    params = [torch.nn.Parameter(torch.ones(8, 4)) for _ in range(4)]
    muon = torch.optim.Muon(params)
    mc.compile_step(muon, backend="aot_eager")
    for param in params:
        param.grad = torch.ones_like(param)
    with terminal() as written:
        muon.step()
        muon.step()  # finds the graph
        text = written()
    assert SHOWN.search(text) and len(DONE.findall(text)) == 1
