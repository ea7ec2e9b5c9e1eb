"""The command completion: scripts made by shtab, which knows how each shell completes."""

from __future__ import annotations

import argparse

import shtab

from muon_compile.cli.arguments import make_parser
from muon_compile.plan.exchange import STRATEGY_NAMES
from muon_compile.plan.forms import FORM_NAMES
from muon_compile.plan.hardware import PRESETS
from muon_compile.plan.models import MODELS

# Those of lower.backends, which needs torch; a test compares them.
_BACKENDS = ("inductor", "aot_eager", "torchair")
_WORDS = {
    "--hardware": (*PRESETS, "auto"),
    "--strategy": ("auto", *STRATEGY_NAMES),
    "--strategies": ("auto", *STRATEGY_NAMES),
    "--ns": ("auto", *FORM_NAMES),
    "--backend": _BACKENDS,
    "--backends": _BACKENDS,
}
_MODELS = " ".join(MODELS)
# Models or files: none of the shells' own kinds is both.
_MODELS_AND_FILES = {
    "bash": "_muon_compile_what",
    "zsh": "_muon_compile_what",
    "fish": f"{_MODELS} (__fish_complete_path (commandline -ct))",
    "preamble": {
        "bash": f'_muon_compile_what() {{\n  compgen -W "{_MODELS}" -- "$1"\n  compgen -f -- "$1"\n}}',
        "zsh": f"_muon_compile_what() {{\n  compadd -- {_MODELS}\n  _files\n}}",
    },
}


def completion(args: argparse.Namespace) -> int:
    """``completion``."""
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """The script that completes ``muon-compile`` in a shell, one of ``arguments.SHELLS``."""
    parser, parsers = make_parser("muon-compile", two_words=False)
    # To a shell, plan diff is a WHAT of plan, and two files behind it.
    for name in ("a", "b"):
        parsers["plan"].add_argument(name, nargs="?", help="of plan diff: a file from plan --save")
    for command, each in parsers.items():
        for action in each._actions:
            _complete(action, command)
    return str(shtab.complete(parser, shell=shell))


def _complete(action: argparse.Action, command: str) -> None:
    """Say what an argument's value may be, where it does not say so itself."""
    flag = next(iter(action.option_strings), "")
    if flag in _WORDS:
        action.choices = _WORDS[flag]
    elif action.dest == "what" and command == "dump":
        action.complete = _MODELS_AND_FILES  # type: ignore[attr-defined]
    elif action.dest == "what":
        action.choices = (*MODELS, "diff") if command == "plan" else tuple(MODELS)
    elif (command, flag) == ("dump", "--out"):
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif flag in ("--save", "--out", "--png", "--trace") or action.dest in ("a", "b", "input", "output"):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
