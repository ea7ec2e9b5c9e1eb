"""The commands about plans: what plan, plan diff and simulate print, write and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import muon_compile as mc
from muon_compile import cli
from muon_compile.cli.arguments import num_bytes
from muon_compile.plan.models import model_specs
from muon_compile.plan.simulate import simulate
from tests.unit.commands import output, refusal

EXAMPLE = Path(__file__).parents[2] / "docs/hardware-example.toml"
# A user's own file, which the command finds where it is run.
MINE = """
import torch
from torch import nn
from muon_compile import MatrixSpec

def build():
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8, bias=False), nn.Conv1d(8, 4, 3), nn.Linear(8, 8))

def specs():
    return [MatrixSpec(name="mine", shape=(8, 8))]

def number():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command runs: a folder with a module of the user's."""
    (tmp_path / "users_model.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("users_model", None)


# -- plan -----------------------------------------------------------------------------------------------------------


def test_plan_prints_and_saves_the_plan_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = mc.MeshSpec(axes=(("replicate", 2), ("shard", 4)))
    hardware = mc.Hardware.preset("h200")
    specs = model_specs("gpt2", mesh=mesh, device="cuda")
    options: dict[str, Any] = {"strategy": "gather_broadcast", "ns": "standard", "replicas": "repeat"}
    plan = mc.make_plan(specs, mesh=mesh, hardware=hardware, max_gather_bytes=32 * 2**20, **options)
    path = tmp_path / "new" / "plan.json"
    given = ["plan", "gpt2", "--mesh", "2x4", "--hardware", "h200", "--max-gather-bytes", "32M", "--save", str(path)]
    given += ["--strategy", "gather_broadcast", "--ns", "standard", "--replicas", "repeat"]
    assert output(capsys, *given) == plan.describe() + "\n"
    assert mc.Plan.from_json(path.read_text(encoding="utf-8")) == plan
    assert mc.Plan.from_json(output(capsys, *given, "--json")) == plan
    # Every one of the options counts.
    default = mc.make_plan(specs, mesh=mesh, hardware=hardware)
    assert len({plan.digest, default.digest}) == 2 and len(plan.waves) > len(default.waves)


def test_plan_of_a_module_sorts_its_parameters_as_route_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = mc.Plan.from_json(output(capsys, "plan", "users_model:build", "--mesh", "4", "--json"))
    found = {spec.name: (spec.algorithm, spec.group) for spec in plan.specs}
    matrices, others = ("muon", 0), ("adamw", 1)
    assert found == {
        "1.weight": matrices,
        "3.weight": others,  # the last layer makes logits
        "0.weight": others,
        "2.bias": others,
        "3.bias": others,
        "2.weight": ("muon", 2),
    }
    (conv,) = (bucket for bucket in plan.buckets if bucket.shape == (4, 8, 3))
    assert isinstance(conv.config, mc.MuonConfig) and conv.config.flatten
    assert {spec.device for spec in plan.specs} == {"cuda"} and plan.mesh.num_ranks == 4


def test_plan_of_a_list_of_specs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "mine" in output(capsys, "plan", "users_model:specs", "--hardware", str(EXAMPLE))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("gpt5", "WHAT: expected one of gpt2, gpt2-medium"),
        (":build", "or module:function; got ':build'"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("users_model:nothing", "expected a function of module 'users_model'"),
        ("users_model:number", "to return a torch.nn.Module or a list of MatrixSpec, got int"),
    ],
)
def test_what_cannot_be_planned(what: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan", what], ["simulate", what, "--ranks", "4"]):
        assert says in refusal(capsys, *command)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mesh", "2x2x2"], "--mesh: expected S or RxS"),
        (["--strategy", "nonsense"], "strategy: expected one of"),
        (["--strategy", "local", "--mesh", "4"], "strategy 'local' cannot be used"),
        (["--ns", "nonsense"], "nonsense"),
        (["--replicas", "both"], "--replicas"),
        (["--max-gather-bytes", "1.5G"], "--max-gather-bytes: expected a number of bytes, such as"),
        (["--max-gather-bytes", "0"], "--max-gather-bytes: expected a number of bytes, such as"),
        (["--max-gather-bytes", "5X"], "got '5X'"),
        (["--hardware", "h1000"], "--hardware: expected one of"),
        (["--hardware", "missing.toml"], "missing.toml: expected a file that can be read"),
        (["--save", "/dev/null/plan.json"], "/dev/null: "),
    ],
)
def test_plan_refuses_in_words(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "plan", "gpt2", *arguments)


@pytest.mark.parametrize(
    ("text", "num"), [("1", 1), ("7K", 7 * 2**10), ("512M", 2**29), ("1G", 2**30), ("2g", 2**31), ("1T", 2**40)]
)
def test_bytes_have_units(text: str, num: int) -> None:
    assert num_bytes(text) == num


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("op_seconds = 3e-6", "", "missing @ $.op_seconds"),
        ("cache_bytes = 50_000_000", "cache_bytes = -1", "Hardware.cache_bytes: expected a positive"),
        ("latency_seconds = 14e-6", "latency_seconds = -1.0", "Level.latency_seconds of 'cluster'"),
    ],
)
def test_a_wrong_figure_is_refused_by_its_file_and_field(
    old: str, new: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(EXAMPLE.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    for command in (["plan", "gpt2"], ["simulate", "gpt2", "--ranks", "4"]):
        said = refusal(capsys, *command, "--hardware", str(path))
        assert f"{path}: " in said and says in said


def test_plans_need_no_torch() -> None:
    code = "import sys\nfrom muon_compile.cli import main\n"
    code += "assert main(['plan', 'gpt2', '--mesh', '4']) == 0\n"
    code += "assert main(['simulate', 'gpt2', '--sweep', '4', '8', '--hardware', 'ascend-910c']) == 0\n"
    code += "sys.exit(3 if {'torch', 'matplotlib', 'numpy'} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "muon_compile", "plan", "gpt2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=EXAMPLE.parents[1])
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 1
    process.stderr.close()


# -- plan diff ------------------------------------------------------------------------------------------------------


def test_plan_diff_exits_as_diff_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    output(capsys, "plan", "gpt2", "--save", one)
    output(capsys, "plan", "gpt2", "--mesh", "4", "--save", other)
    assert output(capsys, "plan", "diff", one, one) == ""
    out = output(capsys, "plan", "diff", one, other, code=1)
    assert out.splitlines()[0] == "mesh: one rank -> 4 shard"
    assert json.loads(output(capsys, "plan", "diff", "--json", one, other, code=1)) == {"changes": out.splitlines()}
    assert json.loads(output(capsys, "plan", "diff", one, one, "--json")) == {"changes": []}


def test_plan_diff_refuses_what_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, old = tmp_path / "a.json", tmp_path / "old.json"
    output(capsys, "plan", "gpt2", "--save", str(path))
    data = json.loads(path.read_text(encoding="utf-8"))
    old.write_text(json.dumps(data | {"version": 1}), encoding="utf-8")
    said = refusal(capsys, "plan", "diff", str(path), str(old))
    assert f"{old}: Plan.from_json: expected a plan of version {data['version']}, got 1" in said
    assert "No such file" in refusal(capsys, "plan", "diff", str(path), str(tmp_path / "none.json"))
    old.write_bytes(b"\xff\xfe")
    assert "it is no text" in refusal(capsys, "plan", "diff", str(path), str(old))


# -- simulate -------------------------------------------------------------------------------------------------------


def test_simulate_prints_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = mc.MeshSpec(axes=(("replicate", 2), ("shard", 4)))
    for arguments in (["--ranks", "8", "--mesh", "2x4"], ["--mesh", "2x4"], ["--ranks", "8", "--shard", "4"]):
        found = simulate("gpt2", mesh=mesh, hardware="ascend-910c")
        given = ["simulate", "gpt2", *arguments, "--hardware", "ascend-910c"]
        assert output(capsys, *given) == f"{found}\n"
        assert output(capsys, *given, "--json") == found.to_json() + "\n"
    some = ["auto", "all_gather"]
    out = output(capsys, "simulate", "gpt2", "--ranks", "8", "--strategies", *some)
    assert out == f"{simulate('gpt2', 8, strategies=some)}\n"


def test_simulate_names_what_it_simulates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = output(capsys, "simulate", "users_model:specs", "--ranks", "4", "--json")
    data = json.loads(out)
    assert (data["name"], data["num_elements"], data["mesh"]["axes"]) == ("users_model:specs", 64, [["shard", 4]])


def test_a_sweep_has_a_world_for_every_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["simulate", "gpt2", "--sweep", "16", "4", "8", "16", "--shard", "4", "--strategies", "auto", "local"]
    worlds = json.loads(output(capsys, *given, "--json"))
    axes = [[["shard", 4]], [["replicate", 2], ["shard", 4]], [["replicate", 4], ["shard", 4]]]
    assert [world["mesh"]["axes"] for world in worlds] == axes
    out = output(capsys, *given)
    assert "4 ranks  8 ranks  16 ranks" in out and "local, refused at 4, 8, 16 ranks: Parameter" in out
    for world in worlds:
        assert f"{world['rows'][0]['seconds'] * 1e3:,.2f}" in out
    # On a terminal it shows how far it is, where output to a file does not see it.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main([*given, "--json"]) == 0
    captured = capsys.readouterr()
    assert "simulating" in captured.err and json.loads(captured.out) == worlds


def test_a_trace_has_every_strategy_that_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "trace.json"
    output(capsys, "simulate", "gpt2", "--ranks", "4", "--trace", str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [row.strategy for row in simulate("gpt2", 4).rows if not row.refused] and len(names) > 3


def test_a_sweep_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "scaling.png"
    output(capsys, "simulate", "gpt2", "--sweep", "4", "8", "--strategies", "auto", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected --ranks, --mesh or --sweep"),
        (["--shard", "4"], "expected --ranks, --mesh or --sweep"),
        (["--ranks", "0"], "--ranks: expected a whole number of at least 1"),
        (["--ranks", "8", "--mesh", "3x2"], "--mesh: expected axes whose product is --ranks 8, got 3x2"),
        (["--ranks", "8", "--sweep", "8"], "not allowed with"),
        (["--ranks", "8", "--mesh", "8", "--shard", "8"], "not allowed with"),
        (["--sweep", "8", "12", "--shard", "8"], "--shard: expected a divisor of every world size, got 8"),
        (["--sweep", "8", "--mesh", "8"], "--mesh: it is about one world"),
        (["--sweep", "8", "--trace", "x.json"], "--trace: it is about one world"),
        (["--ranks", "8", "--png", "x.png"], "--png: it draws over world sizes"),
        (["--ranks", "8", "--strategies", "nonsense"], "got 'nonsense'"),
    ],
)
def test_simulate_refuses_in_words(
    arguments: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, "simulate", "gpt2", *arguments)
    assert [path.name for path in folder.iterdir()] == ["users_model.py"]
