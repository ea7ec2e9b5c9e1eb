"""Loss curves of all layouts: what is printed and drawn of the runs' losses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import loss_curves


def test_it_says_where_layouts_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [5.0, 4.0, 3.0, 2.5]
    apart = {"1": 0.0, "4": 1e-5, "2x2": 2e-3, "4x1": 0.0}
    monkeypatch.setattr(
        loss_curves, "train", lambda mesh, _: [value + (apart[mesh] if i >= 2 else 0.0) for i, value in enumerate(base)]
    )
    assert loss_curves.main(["--steps", "4", "--png", str(tmp_path / "made" / "curves.png")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    told = {layout: next(line for line in lines if layout in line) for layout in ("FSDP 4", "HSDP 2 x 2", "4 copies")}
    assert "1.0e-05" in told["FSDP 4"] and "never" in told["FSDP 4"]
    assert "2.0e-03" in told["HSDP 2 x 2"] and "step 3" in told["HSDP 2 x 2"]
    assert "0.0e+00" in told["4 copies"]
    assert (tmp_path / "made" / "curves.png").stat().st_size > 10_000


def test_a_run_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)1: ended with status 2.*--config: invalid choice"):
        loss_curves.main(["--config", "nothing", "--steps", "1", "--out", str(tmp_path)])


def test_ranks_of_a_mesh() -> None:
    assert [loss_curves.size_of(mesh) for mesh in loss_curves.LAYOUTS] == [1, 4, 4, 4]
