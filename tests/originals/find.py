"""Where a test's original comes from.

KellerJordan's and HeavyBall's optimizers are packages, installed with the development tools. Moonlight's is a script
and dion is on no registry: their formulas stand in for them, unless ``MUON_COMPILE_ORIGINALS`` names a folder that
holds ``toy_train.py`` (github.com/MoonshotAI/Moonlight, examples/) and ``dion/`` (github.com/microsoft/dion).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from tests.originals import formulas


def folder() -> Path | None:
    """The folder with the sources that no registry has."""
    named = os.environ.get("MUON_COMPILE_ORIGINALS")
    return Path(named) if named else None


def moonlight(kind: str) -> Any:
    """Moonlight's class; ``kind`` is ``"formula"`` or ``"original"``."""
    if kind == "formula":
        return formulas.MoonlightMuon
    # The script imports what it trains with; only its optimizer is wanted.
    absent = {name: mock.MagicMock() for name in ("loguru", "datasets", "transformers", "tqdm")}
    return _from_folder("toy_train", absent).Muon


def dion(kind: str) -> Any:
    """dion's class; ``kind`` is ``"formula"`` or ``"original"``."""
    return formulas.DionMuon if kind == "formula" else _from_folder("dion.muon", {}).Muon


def _from_folder(name: str, absent: dict[str, Any]) -> ModuleType:
    where = folder()
    if where is None:
        pytest.skip("the original is on no registry: MUON_COMPILE_ORIGINALS names no folder that has it")
    stood_in = [n for n in absent if n not in sys.modules]
    sys.modules.update({n: absent[n] for n in stood_in})
    sys.path.insert(0, str(where))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(where))
        for n in stood_in:
            del sys.modules[n]


@contextmanager
def as_float32(active: bool) -> Iterator[None]:
    """Uncompiled, and with float32 where an original says bfloat16: so its formula shows without its roundings."""
    with torch.compiler.set_stance("force_eager"):
        if not active:
            yield
            return
        tensors = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)
        with mock.patch.object(torch, "bfloat16", torch.float32), tensors:
            yield
