"""The weight-decay study: its figures of a run, that it goes on where it was stopped, and its pictures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import weight_decay_study as study


def test_half_a_step_is_where_bfloat16_rounds() -> None:
    x = torch.tensor([1.0, 1.5, -3.0, 0.007, 1e-20, 256.0]).to(torch.bfloat16).float()
    half = study.half_ulp(x)
    moved = x + torch.sign(x) * half * 1.01
    kept = x + torch.sign(x) * half * 0.99
    assert torch.equal(kept.to(torch.bfloat16).float(), x)
    assert bool((moved.to(torch.bfloat16).float() != x).all())


def test_weights_are_grouped_by_block_and_kind() -> None:
    names = {
        "blocks.0.attention.query.weight": "block 0 attention",
        "blocks.1.feed.gate": "block 1 feed",
        "blocks.1.feed.shared.up.weight": "block 1 shared",
        "blocks.1.feed.router.weight": None,
        "blocks.1.attention_norm.weight": None,
        "embedding.weight": None,
        "lm_head.weight": None,
    }
    assert {name: study.group_of(name) for name in names} == names


def test_a_look_sees_weights_changes_and_activations() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block()])

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feed = nn.Linear(2, 2, bias=False)
            nn.init.constant_(self.feed.weight, 2.0)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            return self.feed(x), 0.0

    model = Model()
    look = study.Look(model)
    model.blocks[0](torch.ones(1, 2))
    with torch.no_grad():
        model.blocks[0].feed.weight[0] += 1.0  # seen
        model.blocks[0].feed.weight[1] += 1e-4  # lost in bfloat16
    found = look.figures()
    assert found["activation RMS/block 0"] == pytest.approx(4.0)
    assert found["weight RMS/block 0 feed"] == found["weight RMS/all"] == pytest.approx(((9 + 4) / 2) ** 0.5, rel=1e-4)
    assert found["below half a bf16 step"] == 0.5


def test_the_best_rate_is_known_once_its_sweep_is_done(tmp_path: Path) -> None:
    runs = [run for run in study.sweep(50) if (run.optimizer, run.decay) == ("muon", 0.1)]
    for loss, run in enumerate(reversed(runs)):
        assert study.best("muon", 0.1, 50, tmp_path) is None
        (tmp_path / f"{run.key}.csv").write_text(f"step,figure,value\n10,held-out loss,{loss + 1}\n")
    assert study.best("muon", 0.1, 50, tmp_path) == runs[-1].rate
    (tmp_path / f"{runs[0].key}.csv").write_text("step,figure,value\n10,held-out loss,nan\n")  # it diverged
    assert study.best("muon", 0.1, 50, tmp_path) == runs[-1].rate
    planned = list(study.long_runs(50, tmp_path))
    assert {run.decay for run in planned} == {0.1} and {run.rate for run in planned} == {runs[-1].rate}
    assert len(planned) == len({run.key for run in planned}) == 3 * len(study.PRECISIONS) + 1


def test_a_run_leaves_its_file_and_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = study.Run(optimizer="muon", decay=0.1, rate=0.01, seed=0, steps=2)
    words = ["--steps", "2", "--out", str(tmp_path), "--backend", "aot_eager", "--only", "runs", "--jobs", "1"]
    monkeypatch.setattr(study, "sweep", lambda steps: [run])
    monkeypatch.setattr(study, "long_runs", lambda steps, folder: [])
    assert study.main(words) == 0
    found = study.read(run, tmp_path)
    assert found is not None and found["loss"][-1][0] == 2
    assert {"held-out loss", "weight RMS/all", "activation RMS/block 2", "below half a bf16 step"} <= found.keys()
    monkeypatch.setattr(study, "launch", lambda *_: pytest.fail("made again"))
    assert study.main(words) == 0


def test_a_run_that_fails_is_told(tmp_path: Path) -> None:
    run = study.Run(optimizer="muon", decay=-1.0, rate=0.01, seed=0, steps=1)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch, pytest.raises(RuntimeError, match=r"decay-1.*status 1"):
        patch.setattr(study, "sweep", lambda steps: [run])
        study.main(["--steps", "1", "--out", str(tmp_path), "--backend", "aot_eager", "--only", "runs"])
    assert not list(tmp_path.glob("*.csv"))
