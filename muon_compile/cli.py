"""The command: ``python -m muon_compile verify``, alone or on the ranks of torchrun."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from muon_compile.config import MuonConfig
from muon_compile.spec import MeshSpec

# torch is imported when there is something to run: --help need not wait for it.

_EXAMPLE = """examples:
  python -m muon_compile verify
  torchrun --standalone --nproc-per-node 4 -m muon_compile verify --ranks-axes 2x2 --dtype bfloat16
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0 where all is right, 1 where it is not, 2 for bad arguments."""
    parser, verify_parser = _parsers()
    args = parser.parse_args(argv)
    try:
        return _verify(args)
    except ValueError as error:
        verify_parser.error(str(error))


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m muon_compile",
        description="The whole Muon optimizer step as one compiled graph.",
        epilog=_EXAMPLE,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "run one step under every strategy on the ranks at hand and compare its directions with the polynomial"
    verify = commands.add_parser("verify", help=text, description=text + ".", epilog=_EXAMPLE, formatter_class=raw)
    verify.add_argument(
        "--ranks-axes",
        type=_axes,
        metavar="RxS",
        help="ranks along the mesh's axes: S that shard, or R replicas of S shards (default: all ranks shard)",
    )
    verify.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the products (default: float32)"
    )
    verify.add_argument(
        "--backends", nargs="+", default=["aot_eager"], metavar="NAME", help="aot_eager (default), inductor"
    )
    verify.add_argument("--strategies", nargs="+", metavar="NAME", help="only these (default: all that can be used)")
    verify.add_argument("--seed", type=int, default=0, help="of the gradients (default: 0)")
    verify.add_argument("--json", type=Path, metavar="PATH", help="also write the report there")
    return parser, verify


def _axes(text: str) -> MeshSpec:
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected S or RxS, such as 4 or 2x2, got {text!r}")
    return MeshSpec(axes=tuple(zip(("replicate", "shard")[-len(parts) :], map(int, parts), strict=True)))


def _verify(args: argparse.Namespace) -> int:
    from muon_compile.verification.verify import verify

    with _process_group() as rank:
        report = verify(
            mesh=args.ranks_axes,
            strategies=args.strategies,
            backends=args.backends,
            config=MuonConfig(ns_dtype=args.dtype),
            seed=args.seed,
        )
        if rank == 0:
            print(report)
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(report.to_json() + "\n", encoding="utf-8")
    return 0 if report.ok else 1


@contextlib.contextmanager
def _process_group() -> Iterator[int]:
    """This rank's number, in the group that is running or, under torchrun, in one of its own."""
    import torch.distributed as dist

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    made = dist.is_available() and not dist.is_initialized() and launched
    if made:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    finally:
        if made:
            dist.destroy_process_group()
