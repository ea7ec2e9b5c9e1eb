"""The page on training in one graph, and its example, run as they stand."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon_compile as mc

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "graph-mode.md").read_text(), flags=re.DOTALL)


def around(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page takes for granted; nothing is compiled by Inductor."""
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kw: compile_function(*args, **{"backend": "aot_eager", **kw}))
    monkeypatch.setattr(mc, "compile_train_step", functools.partial(mc.compile_train_step, backend="aot_eager"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Linear(8, 5, bias=False))
    optimizer = mc.Muon(list(model.parameters()), lr=0.02, backend="aot_eager")
    return {
        "torch": torch,
        "nn": nn,
        "mc": mc,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        "batches": [(torch.randn(4, 6), torch.randint(0, 5, (4,))) for _ in range(2)],
    }


def test_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    names = around(monkeypatch)
    before = names["model"][0].weight.detach().clone()
    exec(BLOCKS[0], names)
    assert not torch.equal(names["model"][0].weight, before)
    assert names["train_step"].step.stats.steps == 2 and len(names["train_step"].graphs) == 1


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    names = around(monkeypatch)
    assert len(BLOCKS) == 2
    exec(BLOCKS[1], names)
    assert not torch.equal(names["params"]["0.weight"], names["model"][0].weight)
    assert float(names["loss"]) > 0


SMALL = ("--steps", "3", "--backend", "aot_eager", "--dim", "32", "--layers", "1", "--context", "16")


def check(told: str) -> None:
    found = re.search(r"largest difference between the two losses: (\S+) nats", told)
    assert found is not None, told
    assert float(found[1]) <= 1e-5
    assert "graphs: 1" in told


def test_three_steps_of_the_example() -> None:
    command = [sys.executable, "examples/graph_mode.py", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_three_steps_of_the_example_on_two_ranks() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "examples/graph_mode.py", *SMALL], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)
