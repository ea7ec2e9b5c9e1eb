"""Inductor's disk cache: what it must remember, and what it must forget."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

import muon_compile as mc
from muon_compile.lower import inductor

pytestmark = pytest.mark.inductor


class UsersPass(CustomGraphPass):
    """A pass of the user's own."""

    def __call__(self, graph: Any) -> None:
        return None

    def uuid(self) -> str:
        return "a user's"


def compile_once(**options: Any) -> mc.CompiledStep:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(8, 12)) for _ in range(2)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.Muon(params)
    step = mc.compile_step(optimizer, config=mc.CompileConfig(inductor_options=options))
    optimizer.step()
    return step


def test_other_operators_are_another_cache_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compile_once().stats.cached == 0
    assert compile_once().stats.cached == 1
    # An upgrade that changes what an operator does keeps its name: the key has to see it.
    monkeypatch.setattr(inductor, "operators_fingerprint", lambda: b"operators of another version")
    assert compile_once().stats.cached == 0


def test_a_pass_of_the_users_does_not_displace_the_fingerprint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = {"post_grad_custom_pre_pass": UsersPass()}
    assert [compile_once(**options).stats.cached for _ in range(2)] == [0, 1]
    monkeypatch.setattr(inductor, "operators_fingerprint", lambda: b"operators of another version")
    assert compile_once(**options).stats.cached == 0
    with pytest.raises(mc.CompileError, match="at most one of"):
        compile_once(post_grad_custom_post_pass=UsersPass(), **options)


def test_the_fingerprint_follows_the_files() -> None:
    assert inductor.operators_fingerprint() == inductor.operators_fingerprint()
    assert len(inductor.operators_fingerprint()) == 32


def test_a_failure_of_inductor_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("buf7")

    monkeypatch.setattr(inductor, "_inner", fails)
    with pytest.raises(mc.CompileError, match=r"KeyError: 'buf7'(.|\n)*backend='aot_eager'"):
        compile_once()


RESUMED = """
import sys
from pathlib import Path
import torch
import muon_compile as mc

file = Path(sys.argv[1])
torch.manual_seed(0 if file.exists() else 1)
model = torch.nn.Linear(12, 8, bias=False)
optimizer = mc.Muon(model.parameters(), lr=0.1)
if file.exists():
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for number in range(2):
    model.weight.grad = torch.full_like(model.weight, number + 1.0)
    optimizer.step()
    # Loading into a live run compiles nothing.
    optimizer.load_state_dict(optimizer.state_dict())
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
stats = optimizer.compiled.stats
print(stats.compiles, stats.recompiles, stats.cached)
"""


def test_a_process_that_resumes_compiles_from_the_disk(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    said = [
        subprocess.run(
            [sys.executable, "-c", RESUMED, str(tmp_path / "saved.pt")],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    ]
    assert said == ["1 0 0\n", "1 0 1\n"]
