"""The optimizers that the benchmark runs beside ours, each made from parameters with gradients.

Every peer gets the same matrices and gradients, five Newton-Schulz steps and the hyperparameters of ``OPTIONS``. Stock
and KellerJordan/Muon use the coefficients (3.4445, -4.7750, 2.0315); dion and heavyball offer no choice but their own
five triples, which cost the same products. Products are bfloat16 everywhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Step = Callable[[], object]

OPTIONS: dict[str, float] = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1}


class Missing(Exception):
    """A peer that does not run here, with the reason."""


def make_stock(params: list[torch.nn.Parameter]) -> Step:
    """``torch.optim.Muon``, eager."""
    return torch.optim.Muon(params, **OPTIONS).step


def make_stock_compiled(params: list[torch.nn.Parameter], backend: str, most: int) -> Step:
    """``torch.optim.Muon`` under ``torch.compile``; lr is a tensor, since a float would recompile when it changes."""
    check_count(params, most)
    optimizer = torch.optim.Muon(params, **OPTIONS | {"lr": torch.tensor(OPTIONS["lr"])})
    return torch.compile(optimizer.step, backend=backend)


def check_count(params: list[torch.nn.Parameter], most: int) -> None:
    """Refuse a peer that compiles a list of parameters by unrolling it, where that would take minutes.

    Raises:
        Missing: There are more than ``most`` parameters.
    """
    if len(params) > most:
        raise Missing(
            f"not run: it unrolls its {len(params)} parameters when it compiles, which takes minutes; "
            f"--max-compiled {len(params)} runs it"
        )


def make_dion(params: list[torch.nn.Parameter]) -> Step:
    """``dion.Muon`` (microsoft/dion), which compiles parts of itself; its Newton-Schulz in place of Polar Express."""
    muon = _attribute(_import("dion"), "Muon")
    return muon(
        params,
        lr=OPTIONS["lr"],
        mu=OPTIONS["momentum"],
        weight_decay=OPTIONS["weight_decay"],
        nesterov=True,
        use_polar_express=False,
        use_triton=params[0].is_cuda,
    ).step


def make_keller(params: list[torch.nn.Parameter], path: Path | None = None) -> Step:
    """``SingleDeviceMuon`` of KellerJordan/Muon, from its file or from an installed module ``muon``."""
    module = _import("muon") if path is None else _load(path)
    return _attribute(module, "SingleDeviceMuon")(params, **OPTIONS).step


def make_heavyball(params: list[torch.nn.Parameter], most: int) -> Step:
    """``heavyball.Muon``, which compiles parts of itself."""
    muon = _attribute(_import("heavyball"), "Muon")
    check_count(params, most)
    betas = (OPTIONS["momentum"], 0.99)
    optimizer = muon(params, lr=OPTIONS["lr"], betas=betas, weight_decay=OPTIONS["weight_decay"])
    optimizer.consume_grad = False  # its default drops the gradients, and the next step would have nothing to do
    return optimizer.step


def make_checked(make: Callable[[], Step], params: list[torch.nn.Parameter], warmup: int) -> Step:
    """Make a peer and run it until it is in its steady state.

    Args:
        make: Makes the peer of ``params``.
        params: Its parameters.
        warmup: Steps to run.

    Raises:
        Missing: It cannot be imported or fails, or a step of it moves nothing.
    """
    try:
        step = make()
        for _ in range(warmup):
            before = params[-1].detach().clone()
            step()
            moved = not torch.equal(before, params[-1].detach())
    except Missing:
        raise
    except Exception as error:
        raise Missing(f"failed: {_first_line(error)}") from error
    if not moved:
        raise Missing("failed: its last step moved no parameter")
    return step


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that raises when imported is as good as none
        raise Missing(f"not importable: {_first_line(error)}") from error


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("keller_muon", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise Missing(f"not importable: expected the file muon.py of KellerJordan/Muon, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise Missing(f"not importable: the module {module.__name__!r} that was found has no {name}")
    return getattr(module, name)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]
