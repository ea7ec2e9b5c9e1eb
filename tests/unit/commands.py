"""Run the command in this process."""

from __future__ import annotations

import pytest

from muon_compile import cli


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints."""
    assert cli.main(arguments) == code
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Last line of what a command says that refuses its arguments."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("usage: python -m muon_compile")
    return captured.err.splitlines()[-1]
