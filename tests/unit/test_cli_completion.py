"""The command completion: scripts that shells take, and what they complete."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from muon_compile.cli import completion
from muon_compile.cli.arguments import EXAMPLES, SHELLS, make_parser
from muon_compile.lower.backends import BACKENDS
from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.hardware import PRESETS
from muon_compile.plan.models import MODELS
from tests.unit.commands import output, refusal

COMMANDS = [name for name in EXAMPLES if name != "plan diff"]
FILES = ["mine.json", "more.json"]
CASES = {
    "": COMMANDS,
    "plan llama-3": ["llama-3.2-1b"],
    "plan d": ["deepseek-v3", "diff"],
    "plan diff m": FILES,
    "plan diff mine.json mo": ["more.json"],
    "simulate d": ["deepseek-v3"],
    "dump m": ["moe-100b", *FILES],
    "dump gpt2 --o": ["--out"],
    "dump gpt2 --hardware h": ["h100", "h200"],
    "dump gpt2 --strategy gram": ["gram_all_reduce", "gram_scatter"],
    "plan gpt2 --replicas ": ["divide", "repeat"],
    "report m": FILES,
    "report mine.json mo": ["more.json"],
    "verify --backends t": ["torchair"],
    "convert-state m": FILES,
    "convert-state mine.json mo": ["more.json"],
    "convert-state mine.json more.json --to t": ["torch"],
    "completion ": list(SHELLS),
}


def test_words_are_those_that_the_commands_know() -> None:
    assert completion._BACKENDS == BACKENDS
    _, parsers = make_parser("muon-compile", two_words=False)
    flags = {flag for parser in parsers.values() for action in parser._actions for flag in action.option_strings}
    assert set(completion._WORDS) <= flags
    assert "plan diff" not in parsers and list(parsers) == COMMANDS


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = output(capsys, "completion", shell)
    words = [*COMMANDS, *MODELS, *PRESETS, *STRATEGY_NAMES, "diff", "max-gather-bytes", "muon-compile"]
    assert not [word for word in words if word not in script]
    path = tmp_path / "script"
    path.write_text(script, encoding="utf-8")
    if shutil.which(shell):  # bash is; the others are checked where they are installed
        run = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, timeout=30)
        assert run.returncode == 0 and run.stderr == ""


def test_other_shells_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'tcsh'" in refusal(capsys, "completion", "tcsh")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where files are completed."""
    for name in FILES:
        (tmp_path / name).touch()
    return tmp_path


def test_bash_completes(folder: Path) -> None:
    """What bash's own function offers for the last word of each line."""
    lines = [completion.script("bash"), 'reply() { COMP_WORDS=(muon-compile "$@"); COMP_CWORD=$#; COMPREPLY=()']
    lines += ["_shtab_muon_compile; printf '%s ' \"${COMPREPLY[@]}\"; echo; }"]
    lines += [f"reply {text} ''" if text.endswith(" ") or not text else f"reply {text}" for text in CASES]
    run = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, cwd=folder, timeout=30)
    found = [sorted(line.split()) for line in run.stdout.splitlines()]
    assert dict(zip(CASES, found, strict=True)) == {text: sorted(words) for text, words in CASES.items()}


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(folder: Path) -> None:
    (folder / ".script").write_text(completion.script("fish"), encoding="utf-8")
    lines = ["source .script", *(f"complete -C 'muon-compile {text}'; echo ==" for text in CASES)]
    run = subprocess.run(["fish", "-c", "\n".join(lines)], capture_output=True, text=True, cwd=folder, timeout=30)
    parts = run.stdout.split("==\n")[:-1]
    found = [sorted(line.split("\t")[0] for line in part.splitlines()) for part in parts]
    assert dict(zip(CASES, found, strict=True)) == {text: sorted(words) for text, words in CASES.items()}
