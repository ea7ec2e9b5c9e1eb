"""The command ``muon-compile``, which ``python -m muon_compile`` is too, alone or on the ranks of torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from muon_compile.cli.arguments import parse

# Module and function of every command. They are imported when they run: --help need not wait, and plans need no torch.
_COMMANDS = {
    "plan": ("plans", "plan"),
    "plan diff": ("plans", "plan_diff"),
    "simulate": ("plans", "simulate"),
    "dump": ("pages", "dump"),
    "report": ("pages", "report"),
    "calibrate": ("measures", "calibrate"),
    "verify": ("measures", "verify"),
    "convert-state": ("states", "convert_state"),
    "doctor": ("doctor", "doctor"),
    "completion": ("completion", "completion"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 where all is right, 1 where it is not, 2 for bad arguments."""
    args, parser = parse(list(sys.argv[1:] if argv is None else argv))
    module, function = _COMMANDS[args.command]
    try:
        code: int = getattr(import_module(f"muon_compile.cli.{module}"), function)(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as head, has seen enough. What is left must not fail again when Python exits: the recipe of
        # the note on SIGPIPE in the documentation of signal.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, NotImplementedError, ModuleNotFoundError) as error:
        parser.error(str(error))
