"""The command convert-state: what it writes, prints and refuses."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import muon_compile as mc
from muon_compile.conversion import NAMES
from muon_compile.conversion.formats import FORMATS
from tests.unit.commands import output, refusal


def keller(mu: float = 0.95) -> dict[str, Any]:
    """Two matrices, one without state, and a vector of Adam."""
    entry = {"momentum_buffer": torch.arange(6.0).reshape(2, 3)}
    adam = {"exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3), "step": 4}
    shared = {"lr": 0.02, "weight_decay": 0.0}
    groups = [
        {**shared, "momentum": mu, "use_muon": True, "params": [0, 1]},
        {**shared, "betas": (0.9, 0.95), "eps": 1e-10, "use_muon": False, "params": [2]},
    ]
    return {"state": {0: entry, 2: adam}, "param_groups": groups}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs."""
    torch.save(keller(), tmp_path / "in.pt")
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": keller(), "step": 7}, tmp_path / "whole.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_names_are_those_of_the_formats() -> None:
    assert tuple(FORMATS) == NAMES


def test_a_file_is_converted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "convert-state", "in.pt", "new/out.pt", "--from", "keller", "--to", "dion")
    assert out.splitlines() == ["new/out.pt: keller to dion, 3 parameters, 2 with state", "momentum of 1: times 20"]
    expected = mc.convert_state(keller(), from_="keller", to="dion")
    found = load(folder / "new/out.pt")
    assert_equal(found["state"], expected["state"])
    assert found["param_groups"] == expected["param_groups"]
    assert_equal(load(folder / "in.pt")["state"], keller()["state"])
    assert sorted(os.listdir(folder / "new")) == ["out.pt"]


def test_json_has_the_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("convert-state", "in.pt", "out.pt", "--from", "keller", "--json", "--to")
    figures = {"file": "out.pt", "from": "keller", "parameters": 3, "with_state": 2}
    data = json.loads(output(capsys, *given, "torch"))
    assert data == {**figures, "to": "torch", "momenta": [{"factor": 1.0, "count": 1}]}
    (momenta,) = json.loads(output(capsys, *given, "moonlight"))["momenta"]
    assert momenta == {"factor": pytest.approx(20.0), "count": 1}
    assert json.loads(output(capsys, *given, "keller"))["momenta"] == []


def test_the_rest_of_a_checkpoint_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("convert-state", "whole.pt", "out.pt", "--from", "keller", "--to", "torch", "--key", "optimizer")
    out = output(capsys, *given)
    assert out.splitlines()[1] == "momentum of 1: as it was"
    found = load(folder / "out.pt")
    assert list(found) == ["model", "optimizer", "step"] and found["step"] == 7
    assert_equal(found["model"], {"w": torch.ones(2)})
    assert found["optimizer"]["param_groups"][0]["ns_steps"] == 5


def test_a_key_may_lead_further_down(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Lightning has it."""
    torch.save({"optimizer_states": [{"x": 1}, keller()], "loops": {"fit": 3}}, folder / "lightning.pt")
    end = ("--from", "keller", "--to", "torch", "--key")
    output(capsys, "convert-state", "lightning.pt", "out.pt", *end, "optimizer_states.1")
    found = load(folder / "out.pt")
    assert found["loops"] == {"fit": 3} and found["optimizer_states"][0] == {"x": 1}
    assert found["optimizer_states"][1]["param_groups"][0]["ns_steps"] == 5
    for key in ("optimizer_states.0", "optimizer_states.2", "optimizer_states.x", "loops.fit.3"):
        assert f"got '{key}'." in refusal(capsys, "convert-state", "lightning.pt", "out.pt", *end, key)


def test_a_file_is_not_its_own_result_unless_forced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "link.pt").symlink_to("in.pt")
    before = (folder / "in.pt").read_bytes()
    for name in ("in.pt", "./in.pt", "link.pt"):
        given = ("convert-state", "in.pt", name, "--from", "keller", "--to", "dion")
        assert f"OUT: expected another file than IN, got {name.removeprefix('./')}" in refusal(capsys, *given)
    assert (folder / "in.pt").read_bytes() == before
    output(capsys, "convert-state", "in.pt", "in.pt", "--from", "keller", "--to", "dion", "--force")
    assert "mu" in load(folder / "in.pt")["param_groups"][0]


def test_a_write_that_fails_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out.pt").write_bytes(b"before")

    def half(data: object, file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("no space left")

    monkeypatch.setattr(torch, "save", half)
    says = refusal(capsys, "convert-state", "in.pt", "out.pt", "--from", "keller", "--to", "dion")
    assert "out.pt: it could not be written: no space left" in says
    assert (folder / "out.pt").read_bytes() == b"before"
    assert sorted(os.listdir(folder)) == ["in.pt", "out.pt", "whole.pt"]


def test_files_that_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text.pt").write_text("no checkpoint", encoding="utf-8")
    torch.save([1], folder / "list.pt")
    torch.save(test_files_that_cannot_be, folder / "code.pt")
    (folder / "cut.pt").write_bytes((folder / "in.pt").read_bytes()[:400])
    end = ("out.pt", "--from", "keller", "--to", "torch")
    reads = "expected a file that torch.load(weights_only=True) reads"
    for name, says in (
        ("text.pt", reads),
        ("cut.pt", reads),
        ("code.pt", reads),
        ("none.pt", "none.pt: No such file"),
        ("list.pt", "list.pt: expected an optimizer's state dict, with 'state' and 'param_groups'."),
        ("whole.pt", "it has one under optimizer: pass --key optimizer"),
    ):
        assert says in refusal(capsys, "convert-state", name, *end), name
    says = refusal(capsys, "convert-state", "whole.pt", *end, "--key", "model")
    assert (
        "--key: expected where whole.pt has an optimizer's state dict, got 'model'; it has one under optimizer" in says
    )
    says = refusal(capsys, "convert-state", "list.pt", *end, "--key", "optimizer")
    assert "--key: expected where list.pt has" in says
    assert not (folder / "out.pt").exists()


def test_what_convert_state_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = refusal(capsys, "convert-state", "in.pt", "out.pt", "--from", "moonlight", "--to", "torch")
    assert "expected a state dict of 'moonlight'" in says
    says = refusal(capsys, "convert-state", "in.pt", "out.pt", "--from", "kellers", "--to", "torch")
    assert "argument --from: invalid choice: 'kellers'" in says
    says = refusal(capsys, "convert-state", "in.pt", "out.pt", "--to", "torch")
    assert "the following arguments are required: --from" in says


def test_the_given_dict_is_not_written_to() -> None:
    given = keller()
    before = copy.deepcopy(given)
    mc.convert_state(given, from_="keller", to="muon_compile")
    assert_equal(given["state"], before["state"])
    assert given["param_groups"] == before["param_groups"]
