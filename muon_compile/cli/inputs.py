"""What commands work on: a model or a function of the user's, a machine's figures, saved plans."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from muon_compile.config import MuonConfig
from muon_compile.plan.hardware import PRESETS, Hardware
from muon_compile.plan.models import MODELS
from muon_compile.plan.plan import Plan
from muon_compile.spec import MatrixSpec, MeshSpec


def load_what(what: str, hardware: Hardware) -> str | list[MatrixSpec]:
    """A model's name as it is; of a ``module:function`` the parameters, on the hardware's device.

    Raises:
        ValueError: No such model, module or function, or one that returns something else.
    """
    if what in MODELS:
        return what
    module_name, _, function_name = what.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"WHAT: expected one of {', '.join(MODELS)}, or module:function; got {what!r}.")
    made = _call(what, module_name, function_name)
    specs = made if _are_specs(made) else _module_specs(what, made)
    # The plan is for the hardware that was asked for, wherever the model was built.
    return [replace(spec, device=hardware.device) for spec in specs]


def _call(what: str, module_name: str, function_name: str) -> Any:
    # The user's own modules lie where the command is run, which a console script does not search.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"WHAT: expected a module that can be imported from here, got {what!r}: {error}.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"WHAT: expected a function of module {module_name!r}, got {what!r}, which is {function!r}.")
    return function()


def _are_specs(made: object) -> bool:
    return isinstance(made, (list, tuple)) and bool(made) and all(isinstance(item, MatrixSpec) for item in made)


def _module_specs(what: str, made: Any) -> list[MatrixSpec]:
    from torch import nn

    from muon_compile.layout import inspect_params
    from muon_compile.routing import route

    if not isinstance(made, nn.Module):
        raise ValueError(
            f"WHAT: expected {what!r} to return a torch.nn.Module or a list of MatrixSpec, got {type(made).__name__}."
        )
    specs: list[MatrixSpec] = []
    for index, group in enumerate(route(made, verbose=False)):
        config = MuonConfig(flatten=True) if group.get("flatten") else None
        specs += inspect_params(group["params"], algorithm=group["algorithm"], config=config, group=index)
    return specs


def load_hardware(name: str) -> Hardware:
    """A preset, the figures in a ``.toml`` or ``.json`` file, or with ``"auto"`` this machine's.

    Raises:
        ValueError: None of these, or a file whose figures cannot be; it names the field.
    """
    if name in PRESETS:
        return PRESETS[name]
    if name == "auto":
        from muon_compile.run.calibrate import calibrate

        return calibrate()
    readers = {".toml": Hardware.from_toml, ".json": Hardware.from_json}
    if Path(name).suffix not in readers:
        raise ValueError(
            f"--hardware: expected one of {', '.join(PRESETS)}, auto, or a .toml or .json file, got {name!r}."
        )
    text = read_text(Path(name))
    try:
        return readers[Path(name).suffix](text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def load_plan(path: Path) -> Plan:
    """A plan from ``plan --save``.

    Raises:
        ValueError: No such file, no plan, or one of another version.
    """
    text = read_text(path)
    try:
        return Plan.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        ValueError: It cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"{path}: expected a file that can be read: {reason}.") from error


def world_mesh(ranks: int, shard: int | None) -> MeshSpec:
    """A world's mesh: ``shard`` ranks that shard and the rest replicas; None: all of them shard.

    Raises:
        ValueError: ``shard`` does not divide the world.
    """
    if shard is None or shard == ranks:
        return MeshSpec(axes=(("shard", ranks),))
    if ranks % shard:
        raise ValueError(
            f"--shard: expected a divisor of every world size, got {shard}, which does not divide {ranks}."
        )
    return MeshSpec(axes=(("replicate", ranks // shard), ("shard", shard)))
