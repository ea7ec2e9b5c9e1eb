"""The arguments of every command. Nothing here imports torch: help and refusals need not wait for it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from muon_compile import __version__
from muon_compile.conversion import NAMES
from muon_compile.spec import MeshSpec

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = {
    "plan": """
  muon-compile plan llama-7b --mesh 4x8 --hardware h200 --save plan.json
  muon-compile plan my_package.model:build --mesh 8 --strategy all_to_all --max-gather-bytes 512M""",
    "plan diff": """
  muon-compile plan diff before.json after.json""",
    "simulate": """
  muon-compile simulate moe-100b --ranks 512 --mesh 8x64 --hardware ascend-910c --trace step.json
  muon-compile simulate moe-100b --sweep 8 64 512 --png scaling.png""",
    "dump": """
  muon-compile dump llama-7b --mesh 4x8 --hardware h200 --out out/llama
  muon-compile dump gpt2 --mesh 4 --hardware cpu-2core --rank 0 --out out/gpt2""",
    "report": """
  muon-compile report plan.json --out plan.html
  muon-compile report before.json after.json --out changes.html --open""",
    "calibrate": """
  muon-compile calibrate --out hardware.json
  torchrun --standalone --nproc-per-node 4 -m muon_compile calibrate --out hardware.json""",
    "verify": """
  muon-compile verify --backends aot_eager --dtype float32 --out verified.json
  torchrun --standalone --nproc-per-node 4 -m muon_compile verify --ranks-axes 2x2 --dtype bfloat16""",
    "convert-state": """
  muon-compile convert-state keller.pt torch.pt --from keller --to torch
  muon-compile convert-state checkpoint.pt new.pt --from dion --to muon_compile --key optimizer""",
    "doctor": """
  muon-compile doctor
  muon-compile doctor --json""",
    "completion": """
  muon-compile completion bash > ~/.local/share/bash-completion/completions/muon-compile
  muon-compile completion zsh > ~/.zfunc/_muon-compile
  muon-compile completion fish > ~/.config/fish/completions/muon-compile.fish""",
}

EXIT_CODES = """exit codes:
  0  all is right
  1  a problem or a difference was found
  2  arguments that cannot be, or a file that cannot be read or written"""

_WHAT = """WHAT is a public model's name, such as llama-7b or moe-100b, or module:function: a function without arguments
that returns a torch.nn.Module, on the meta device if you like, sorted as muon_compile.route sorts it, or a list of
MatrixSpec."""

SHELLS = ("bash", "zsh", "fish")

_BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse(argv: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """The arguments and the parser of their command, for its errors. Exits with 2 where they cannot be."""
    name = "muon-compile" if Path(sys.argv[0]).stem == "muon-compile" else "python -m muon_compile"
    parser, parsers = make_parser(name)
    # A command of two words: argparse knows single ones, so it gets them as one.
    args = parser.parse_args(["plan diff", *argv[2:]] if argv[:2] == ["plan", "diff"] else argv)
    return args, parsers[args.command]


def make_parser(
    prog: str, *, two_words: bool = True
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and those of its commands by name.

    Args:
        prog: What the command is called.
        two_words: With ``"plan diff"`` as a command, which argparse takes for one word.
    """
    examples = "".join(text for name, text in EXAMPLES.items() if name != "completion")
    parser = argparse.ArgumentParser(
        prog=prog,
        description="The whole Muon optimizer step as one compiled graph.",
        epilog=f"examples:{examples}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"muon-compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    makers = {
        "plan": _plan,
        "plan diff": _plan_diff,
        "simulate": _simulate,
        "dump": _dump,
        "report": _report,
        "calibrate": _calibrate,
        "verify": _verify,
        "convert-state": _convert_state,
        "doctor": _doctor,
        "completion": _completion,
    }
    return parser, {name: make(commands) for name, make in makers.items() if two_words or name != "plan diff"}


def _command(commands: _Commands, name: str, text: str, notes: str = "") -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=f"{text}.\n\n{notes}".rstrip(),
        epilog=f"examples:{EXAMPLES[name]}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _plan(commands: _Commands) -> argparse.ArgumentParser:
    parser = _command(commands, "plan", "show what a step will do", _WHAT)
    parser.add_argument("what", metavar="WHAT", help=_WHAT_HELP)
    _add_planning(parser)
    _add_json(parser)
    parser.add_argument("--save", type=Path, metavar="PATH", help="also write the plan there, as JSON")
    return parser


def _plan_diff(commands: _Commands) -> argparse.ArgumentParser:
    text = "what changed between two saved plans; exits with 1 if anything did"
    parser = _command(commands, "plan diff", text)
    for name in ("a", "b"):
        parser.add_argument(name, type=Path, metavar=f"{name.upper()}.json", help="a file from plan --save")
    _add_json(parser)
    return parser


def _simulate(commands: _Commands) -> argparse.ArgumentParser:
    parser = _command(commands, "simulate", "predict a step on ranks that are not there, under every strategy", _WHAT)
    parser.add_argument("what", metavar="WHAT", help=_WHAT_HELP)
    worlds = parser.add_mutually_exclusive_group()
    worlds.add_argument("--ranks", type=count, metavar="N", help="world size")
    worlds.add_argument("--sweep", type=count, nargs="+", metavar="N", help="several world sizes")
    axes = parser.add_mutually_exclusive_group()
    axes.add_argument("--mesh", type=mesh, metavar="RxS", help=_MESH.format(_ALL))
    axes.add_argument("--shard", type=count, metavar="S", help="S ranks shard, the rest of each world are replicas")
    _add_hardware(parser)
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="only these (default: auto and all others)")
    _add_json(parser)
    parser.add_argument("--png", type=Path, metavar="PATH", help="of a sweep: draw step times and queue pairs")
    text = "of one world: write the predicted timelines for ui.perfetto.dev"
    parser.add_argument("--trace", type=Path, metavar="PATH", help=text)
    return parser


def _dump(commands: _Commands) -> argparse.ArgumentParser:
    notes = f"""Writes plan.json, plan.txt, collectives.json, predicted.trace.json for ui.perfetto.dev and report.html;
with --rank also that rank's graph. No ranks and no parameters are needed. step.dump() of a compiled step adds its code.

{_WHAT}
Or it is a plan: a file from plan --save, or a folder from dump. Such a plan is what it is: of the options that plan,
only --hardware goes with it, and only for the predicted times."""
    parser = _command(commands, "dump", "write all that can be said of a step before it runs", notes)
    parser.add_argument("what", metavar="WHAT", help=f"{_WHAT_HELP}, a plan's file or a dump's folder")
    _add_planning(parser)
    parser.add_argument("--rank", type=index, metavar="N", help="also trace the graph of this rank, counted from 0")
    text = "of --rank: whose operators the graph is in (default: torchair on NPUs, else inductor)"
    parser.add_argument("--backend", metavar="NAME", help=text)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="where to; made if need be")
    _add_json(parser)
    return parser


def _report(commands: _Commands) -> argparse.ArgumentParser:
    notes = """A and B are files from plan --save, or folders from dump or step.dump(). Of one folder the report has the
graphs, collectives and counters that lie there; the page needs no network. With B the command exits with 1 if anything
changed, in the plans or in how often their graphs call which operator."""
    parser = _command(commands, "report", "one page about a step, or about what changed from A to B", notes)
    for name, nargs in (("a", None), ("b", "?")):
        parser.add_argument(
            name, type=Path, nargs=nargs, metavar=name.upper(), help="a plan's file, or a dump's folder"
        )
    parser.add_argument("--out", type=Path, metavar="PATH", help="write the page there, such as report.html")
    parser.add_argument("--open", action="store_true", help="also open it in a browser, where there is a display")
    parser.add_argument("--json", action="store_true", help="print the figures and changes as JSON instead of text")
    return parser


def _calibrate(commands: _Commands) -> argparse.ArgumentParser:
    notes = """The CPU's products, copies and operators are measured once and kept in the user's cache directory; under
torchrun the network among the ranks is measured too. plan, simulate and dump take the file as --hardware."""
    parser = _command(commands, "calibrate", "measure this machine for the planner", notes)
    _add_json(parser)
    parser.add_argument("--out", type=Path, metavar="PATH", help="also write the figures there, as JSON")
    return parser


def _verify(commands: _Commands) -> argparse.ArgumentParser:
    text = "run one step under every strategy on the ranks at hand and compare its directions with the polynomial"
    parser = _command(commands, "verify", text)
    parser.add_argument("--ranks-axes", type=mesh, metavar="RxS", help=_MESH.format(_ALL))
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the products (default: float32)"
    )
    parser.add_argument(
        "--backends", nargs="+", default=["aot_eager"], metavar="NAME", help="aot_eager (default), inductor"
    )
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="only these (default: all that can be used)")
    parser.add_argument("--seed", type=int, default=0, help="of the gradients (default: 0)")
    _add_json(parser)
    parser.add_argument("--out", type=Path, metavar="PATH", help="also write the report there, as JSON")
    return parser


def _convert_state(commands: _Commands) -> argparse.ArgumentParser:
    notes = """Reads IN with torch.load(weights_only=True), onto the CPU, and writes OUT once it is whole. What it does
with names, momentum and group entries, and what it refuses, is in docs/migrate.md; learning rates are not changed."""
    text = "make the optimizer's state in a checkpoint that of another library's optimizer"
    parser = _command(commands, "convert-state", text, notes)
    parser.add_argument("input", type=Path, metavar="IN", help="a file from torch.save")
    parser.add_argument("output", type=Path, metavar="OUT", help="where to; folders are made if need be")
    for flag, dest, words in (("--from", "from_", "whose state it is"), ("--to", "to", "whose it shall be")):
        names = f"{words}: {', '.join(NAMES)}"
        parser.add_argument(flag, dest=dest, choices=NAMES, metavar="NAME", required=True, help=names)
    text = "where in the file the optimizer's state is, such as optimizer or optimizer_states.0; the rest stays"
    parser.add_argument("--key", metavar="KEY", help=text)
    parser.add_argument("--force", action="store_true", help="let OUT be IN")
    _add_json(parser)
    return parser


def _doctor(commands: _Commands) -> argparse.ArgumentParser:
    notes = """Looks at torch, the compiler, the CPU kernels, backends, devices, process groups, caches, threads, the
allocator and the environment. Each line is ok, a note, or a problem with what to do about it; exits with 1 if there is
any problem. Beside small files to try the compiler on, it makes nothing but the CPU kernels in their cache."""
    parser = _command(commands, "doctor", "say what of this machine a compiled step would stumble over", notes)
    _add_json(parser)
    return parser


def _completion(commands: _Commands) -> argparse.ArgumentParser:
    parser = _command(commands, "completion", "print a script that completes this command in a shell")
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    return parser


_MESH = "ranks along the mesh's axes: S that shard, or R replicas of S shards (default: {})"
_ALL = "all ranks shard"
_WHAT_HELP = "a model's name, or module:function"


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """What goes into a plan; None where it is not given."""
    parser.add_argument("--mesh", type=mesh, metavar="RxS", help=_MESH.format("one rank"))
    _add_hardware(parser)
    parser.add_argument("--strategy", metavar="NAME", help="for all matrices (default: auto)")
    parser.add_argument("--ns", metavar="FORM", help="form of the iteration (default: auto)")
    text = "ranks that hold copies share the work, or each does it (default: divide)"
    parser.add_argument("--replicas", choices=("divide", "repeat"), help=text)
    text = "bound on what is gathered at once, such as 512M (default: 1G)"
    parser.add_argument("--max-gather-bytes", type=num_bytes, metavar="N", help=text)


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    text = "a preset, a .toml or .json file, or auto: this machine, measured (default: h100)"
    parser.add_argument("--hardware", metavar="NAME", help=text)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def mesh(text: str) -> MeshSpec:
    """A mesh from ``"S"`` or ``"RxS"``."""
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected S or RxS, such as 4 or 2x2, got {text!r}")
    return MeshSpec(axes=tuple(zip(("replicate", "shard")[-len(parts) :], map(int, parts), strict=True)))


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def index(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def num_bytes(text: str) -> int:
    """Bytes from a whole number, with K, M, G or T behind it in units of 1024."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in _BYTE_UNITS or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of bytes, such as 1048576, 512M or 1G, got {text!r}")
    return int(number) * _BYTE_UNITS[unit]
