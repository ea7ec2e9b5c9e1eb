"""The README's code runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon_compile as mc
from muon_compile.cli import main

PAGE = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def around() -> dict[str, Any]:
    """What the README takes for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 11))
    batches = [torch.randint(0, 11, (4, 5)) for _ in range(2)]
    params = [p.detach() for p in model.parameters()]
    return {
        "torch": torch,
        "mc": mc,
        "model": model,
        "batches": batches,
        "loss_fn": lambda m, x: nn.functional.cross_entropy(m(x).flatten(0, 1), x.flatten()),
        "params": params,
        "grads": [torch.randn_like(p) for p in params],
        "hyper": {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "beta1": 0.9, "beta2": 0.99},
    }


@pytest.mark.inductor
def test_wrapping_as_the_readme_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = around()
    before = [p.detach().clone() for p in names["model"].parameters()]
    exec(BLOCKS[0], names)
    assert all(not torch.equal(p, q) for p, q in zip(names["model"].parameters(), before, strict=True))
    assert (tmp_path / "out" / "plan.txt").exists()
    assert names["step"].stats.steps == 2


def test_the_other_blocks_of_the_readme() -> None:
    assert len(BLOCKS) == 3
    names = around()
    exec(BLOCKS[1], names)
    assert isinstance(names["opt"], mc.Muon)
    names = around()
    old = list(names["params"])
    exec(BLOCKS[2], names)
    assert all(not torch.equal(p, q) for p, q in zip(names["params"], old, strict=True))


COMMANDS = re.findall(r"^muon-compile (.*?) *(?:#.*)?$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    assert [path.name for path in tmp_path.rglob("*.png")] == (["scaling.png"] if "--png" in command else [])


def test_there_are_commands_in_the_readme() -> None:
    assert len(COMMANDS) == 3
