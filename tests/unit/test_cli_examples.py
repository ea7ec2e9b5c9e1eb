"""Every example of the help, and every command of docs/command.md, works as it stands."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import muon_compile as mc
from muon_compile import cli
from muon_compile.cli.arguments import EXAMPLES
from muon_compile.run import calibrate as calibrate_module

PAGE = (Path(__file__).parents[2] / "docs/command.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
MODEL = """
import torch
from torch import nn

def build():
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 16))
"""
# What else than 0 a command may exit with.
DIFFERENT = ("plan diff before.json", "report before.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: with the files that they name."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").touch()
    (tmp_path / "my_package/model.py").write_text(MODEL, encoding="utf-8")
    for name, ranks in (("plan", 4), ("before", 4), ("after", 8)):
        mesh = mc.MeshSpec(axes=(("shard", ranks),))
        plan = mc.make_plan(mc.model_specs("gpt2", mesh=mesh), mesh=mesh)
        (tmp_path / f"{name}.json").write_text(plan.to_json(), encoding="utf-8")
    state = {"state": {}, "param_groups": [{"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "params": [0]}]}
    torch.save(state, tmp_path / "keller.pt")
    ours = mc.convert_state(state, from_="keller", to="dion")
    torch.save({"model": {}, "optimizer": ours}, tmp_path / "checkpoint.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    # The measurement takes seconds.
    monkeypatch.setattr(calibrate_module, "calibrate", lambda: mc.Hardware.preset("cpu-2core"))
    return tmp_path


def run(line: str) -> None:
    """Run a line of a shell, up to where it hands its output on."""
    words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    assert words[0] == "muon-compile"
    code = cli.main(words[1:])
    wanted = {1} if " ".join(words[1:]).startswith(DIFFERENT) else {0, 1} if words[1] == "doctor" else {0}
    assert code in wanted


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_examples_of_help_work(command: str, folder: Path) -> None:
    lines = [line.strip() for line in EXAMPLES[command].strip().splitlines()]
    here = [line for line in lines if not line.startswith("torchrun ")]
    assert here and all(line.startswith(f"muon-compile {command}") for line in here)
    for line in here:
        run(line)
    for flag, name in re.findall(r"--(out|save|trace|png) (\S+)", EXAMPLES[command]):
        assert (folder / name).exists(), flag


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_commands_of_the_page_work(block: int, folder: Path) -> None:
    for line in BLOCKS[block].splitlines():
        run(line)
    assert len(BLOCKS) == 5


def test_the_page_names_every_command() -> None:
    rows = re.findall(r"^\| `([a-z][a-z -]*[a-z])", PAGE, flags=re.MULTILINE)
    assert [row.strip().removesuffix(" bash") for row in rows] == list(EXAMPLES)
