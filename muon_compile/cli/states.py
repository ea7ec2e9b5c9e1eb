"""The command about checkpoints: convert-state."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from muon_compile.conversion.convert import Converted, converted

_OWN = ("state", "param_groups")


def convert_state(args: argparse.Namespace) -> int:
    """``convert-state``."""
    if args.output.exists() and args.output.samefile(args.input) and not args.force:
        raise ValueError(f"OUT: expected another file than IN, got {args.output}; name another one, or pass --force.")
    whole = _load(args.input)
    found = converted(_chosen(whole, args), from_=args.from_, to=args.to)
    _save(args.output, found.state_dict if args.key is None else _replaced(whole, _path(whole, args.key), found))
    print(json.dumps(_figures(found, args), indent=1) if args.json else _words(found, args))
    return 0


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{path}: expected a file that torch.load(weights_only=True) reads, from torch.save: {reason}"
        ) from error


def _chosen(whole: Any, args: argparse.Namespace) -> Mapping[str, Any]:
    held = [key for key in whole if _is_state(whole[key])] if isinstance(whole, Mapping) else []
    hint = f"; it has one under {', '.join(map(str, held))}: pass --key {held[0]}" if held else ""
    if args.key is None:
        if not _is_state(whole):
            raise ValueError(
                f"{args.input}: expected an optimizer's state dict, with 'state' and 'param_groups'{hint}."
            )
        return whole  # type: ignore[no-any-return]
    chosen = whole
    try:
        for key in _path(whole, args.key):
            chosen = chosen[key]
    except (KeyError, IndexError, TypeError):
        chosen = None
    if not _is_state(chosen):
        raise ValueError(f"--key: expected where {args.input} has an optimizer's state dict, got {args.key!r}{hint}.")
    return chosen  # type: ignore[no-any-return]


def _path(whole: Any, key: str) -> list[str | int]:
    """A key of the file, or several with dots between them; in a list a number."""
    if isinstance(whole, Mapping) and key in whole:
        return [key]
    return [int(word) if word.isdecimal() else word for word in key.split(".")]


def _replaced(whole: Any, path: Sequence[str | int], found: Converted) -> Any:
    """A copy along the path, with what was converted at its end."""
    if not path:
        return found.state_dict
    held = list(whole) if isinstance(whole, list) else dict(whole)
    held[path[0]] = _replaced(whole[path[0]], path[1:], found)  # type: ignore[index]
    return held


def _is_state(value: object) -> bool:
    return isinstance(value, Mapping) and all(name in value for name in _OWN)


def _save(path: Path, data: Any) -> None:
    """Write a file of another name, which gets its own once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            torch.save(data, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except RuntimeError as error:  # what torch makes of a disk that is full
        raise OSError(f"{path}: it could not be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _figures(found: Converted, args: argparse.Namespace) -> dict[str, Any]:
    momenta = [{"factor": factor, "count": count} for factor, count in found.factors.items() if count]
    names = {"file": str(args.output), "from": args.from_, "to": args.to}
    return {**names, "parameters": found.num_params, "with_state": found.num_states, "momenta": momenta}


def _words(found: Converted, args: argparse.Namespace) -> str:
    lines = [f"{args.output}: {args.from_} to {args.to}, {found.num_params} parameters, {found.num_states} with state"]
    for factor, count in found.factors.items():
        done = "as it was" if factor == 1 else f"times {factor:.6g}"
        lines += [f"momentum of {count}: {done}"] if count else []
    return "\n".join(lines)
