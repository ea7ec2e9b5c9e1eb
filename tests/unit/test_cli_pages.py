"""The commands dump and report: what they write of plans and dumps, print, and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest
import torch

import muon_compile as mc
from muon_compile import cli
from muon_compile.inspect.dump import dump_files
from muon_compile.plan.models import model_specs
from tests.unit.commands import output, refusal

PLAN_FILES = ["plan.json", "plan.txt", "collectives.json", "predicted.trace.json", "report.html"]
GRAPH_FILES = ["graph.py", "graph.json", "graph.dot", "op_counts.json", "op_counts.txt"]
HSDP = mc.MeshSpec(axes=(("replicate", 2), ("shard", 4)))
MINE = """
from muon_compile import MatrixSpec

def specs():
    return [MatrixSpec(name=f"m{i}", shape=(64, 32)) for i in range(3)] + [
        MatrixSpec(name="v", shape=(64,), algorithm="adamw")
    ]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs."""
    (tmp_path / "users_specs.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "users_specs", raising=False)
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def small_dump(capsys: pytest.CaptureFixture[str], out: str, *more: str) -> str:
    """Dump four parameters on a mesh of ranks of two CPUs."""
    return output(capsys, "dump", "users_specs:specs", "--hardware", "cpu-2core", "--out", out, *more)


# -- dump -----------------------------------------------------------------------------------------------------------


def test_dump_writes_what_can_be_said_of_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["dump", "gpt2", "--mesh", "2x4", "--hardware", "h200", "--ns", "standard", "--replicas", "repeat"]
    given += ["--strategy", "gather_broadcast", "--max-gather-bytes", "32M"]
    assert output(capsys, *given, "--out", "out").splitlines() == [f"out/{name}" for name in PLAN_FILES]
    hardware = mc.Hardware.preset("h200")
    options: dict[str, Any] = {"strategy": "gather_broadcast", "ns": "standard", "replicas": "repeat"}
    specs = model_specs("gpt2", mesh=HSDP, device="cuda")
    plan = mc.make_plan(specs, mesh=HSDP, hardware=hardware, max_gather_bytes=32 * 2**20, **options)
    for name, text in dump_files(plan, hardware=hardware).items():
        assert (folder / "out" / name).read_text(encoding="utf-8") == text
    data = json.loads(output(capsys, *given, "--json", "--out", "out"))
    assert data == {"plan": plan.digest, "files": [f"out/{name}" for name in PLAN_FILES]}


def test_a_saved_plan_is_dumped_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output(capsys, "plan", "gpt2", "--mesh", "2x4", "--save", "plan.json")
    for what, out in (("plan.json", "a"), ("./a", "b")):
        output(capsys, "dump", what, "--out", out)
        assert (folder / out / "plan.json").read_bytes() == (folder / "plan.json").read_bytes()[:-1]
        assert "predicted for h100" in (folder / out / "predicted.trace.json").read_text(encoding="utf-8")
    output(capsys, "dump", "b", "--hardware", "h200", "--out", "c")
    assert "predicted for h200" in (folder / "c/predicted.trace.json").read_text(encoding="utf-8")
    # A model's name is the model's, whatever folders there are.
    (folder / "gpt2").mkdir()
    output(capsys, "dump", "gpt2", "--out", "d")
    assert "is a plan" not in refusal(capsys, "dump", "gpt2", "--mesh", "2x", "--out", "d")


@pytest.mark.parametrize(
    ("mesh", "rank", "backend", "kind"),
    [("2x4", "5", "aot_eager", "masked"), ("4", "3", "inductor", "masked"), (None, "0", None, "all")],
)
def test_dump_has_a_ranks_graph(
    mesh: str | None, rank: str, backend: str | None, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*(["--mesh", mesh] if mesh else []), "--rank", rank, *(["--backend", backend] if backend else [])]
    files = small_dump(capsys, "out", *more).splitlines()
    graph = [f"out/{kind}_gradients/{name}" for name in GRAPH_FILES]
    assert files == [f"out/{name}" for name in (*PLAN_FILES[:2],)] + graph + [f"out/{name}" for name in PLAN_FILES[2:]]
    assert {path.relative_to(folder).as_posix() for path in (folder / "out").rglob("*") if path.is_file()} == set(files)
    plan = mc.Plan.from_json((folder / "out/plan.json").read_text(encoding="utf-8"))
    rows = json.loads((folder / "out/collectives.json").read_text(encoding="utf-8"))
    assert bool(plan.collectives) is bool(mesh) and rows == [row for row in rows if row["equal"]]
    assert {row["found"]["kind"] for row in rows} == {spec.kind for spec in plan.collectives}
    counts = json.loads((folder / f"out/{kind}_gradients/op_counts.json").read_text(encoding="utf-8"))
    # Inductor's decompositions are its own.
    assert any("prims" in name for phase in counts.values() for name in phase) is (backend != "aot_eager")


def test_an_npus_graph_needs_no_npu(folder: Path) -> None:
    """In a process of its own: it names torch's spare device."""
    given = ["dump", "users_specs:specs", "--mesh", "4", "--hardware", "ascend-910c", "--rank", "3", "--out", "out"]
    run = subprocess.run([sys.executable, "-m", "muon_compile", *given], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "# agreement, on npu: " in (folder / "out/masked_gradients/graph.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpt2"], "the following arguments are required: --out"),
        (["gpt2", "--out", "out", "--rank", "-1"], "--rank: expected a whole number from 0 on, got '-1'"),
        (["gpt2", "--out", "out", "--rank", "1"], "--rank: expected one of the plan's 1, counted from 0, got 1"),
        (["gpt2", "--out", "out", "--rank", "0"], "got one for 'cuda', and this torch is built without"),
        (["gpt2", "--out", "out", "--backend", "inductor"], "--backend: it is about a rank's graph"),
        (["gpt2", "--out", "out", "--rank", "0", "--backend", "x"], "--backend: expected one of inductor, aot_eager"),
        (["p.json", "--out", "out", "--mesh", "4", "--ns", "gram"], "--mesh, --ns: p.json is a plan and has its own"),
        (["p.json", "--out", "out", "--hardware", "cpu-2core"], "expected figures of the plan's device, 'cuda'"),
        (["none.json", "--out", "out"], "none.json: expected a file that can be read: No such file"),
        (["./none", "--out", "out"], "none: expected a file that can be read: No such file"),
        (["none", "--out", "out"], "WHAT: expected one of gpt2"),
        (["gpt2", "--out", "users_specs.py"], "users_specs.py"),
    ],
)
def test_dump_refuses_in_words(
    arguments: list[str],
    says: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    output(capsys, "plan", "gpt2", "--save", "p.json")
    assert says in refusal(capsys, "dump", *arguments)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"users_specs.py", "p.json"}


def test_graphs_of_another_dump_are_not_taken_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_dump(capsys, "out", "--rank", "0")
    before = (folder / "out/plan.json").read_bytes()
    assert "without the graphs of another dump, got out, which has all_gradients" in refusal(
        capsys, "dump", "gpt2", "--out", "out"
    )
    assert (folder / "out/plan.json").read_bytes() == before


# -- report ---------------------------------------------------------------------------------------------------------


def test_the_report_of_a_dump_is_the_dumps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_dump(capsys, "out", "--mesh", "2x4", "--rank", "1")
    assert output(capsys, "report", "out", "--out", "new/page.html") == "new/page.html\n"
    page = (folder / "new/page.html").read_text(encoding="utf-8")
    assert page == (folder / "out/report.html").read_text(encoding="utf-8") + "\n"
    # The same without the graph is shorter, and of the plan alone.
    assert output(capsys, "report", "out/plan.json", "--out", "plan.html") == "plan.html\n"
    assert "_c10d_functional.all_reduce" in page
    assert "_c10d_functional.all_reduce" not in (folder / "plan.html").read_text(encoding="utf-8")


def test_counters_of_a_dump_are_in_its_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_dump(capsys, "out")
    (folder / "out/stats.json").write_text('{"recompiles": 12345}', encoding="utf-8")
    data = json.loads(output(capsys, "report", "out", "--json", "--out", "page.html"))
    assert data["stats"] == {"recompiles": 12345} and data["file"] == "page.html"
    assert '"recompiles":12345' in (folder / "page.html").read_text(encoding="utf-8")
    assert json.loads(output(capsys, "report", "out/plan.json", "--json"))["stats"] == {}


def test_report_says_what_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_dump(capsys, "a", "--mesh", "4", "--rank", "0")
    small_dump(capsys, "b", "--mesh", "4", "--rank", "0", "--strategy", "gather_broadcast")
    assert output(capsys, "report", "a", "a", "--out", "same.html") == "same.html\n"
    out = output(capsys, "report", "a", "b", "--out", "page.html", code=1).splitlines()
    assert out[0] == "page.html" and any(line.startswith("strategy asked for: auto -> ") for line in out)
    plans = [mc.Plan.from_json((folder / name / "plan.json").read_text(encoding="utf-8")) for name in ("a", "b")]
    assert all(plan.digest in (folder / "page.html").read_text(encoding="utf-8") for plan in plans)
    # Every rank did all of the work; now owners send their results.
    assert "operators, masked gradients, return: _c10d_functional.all_gather_into_tensor.default 0 -> 1" in out
    data = json.loads(output(capsys, "report", "a", "b", "--json", code=1))
    assert data["file"] is None and data["changes"] == out[1:]
    assert [data[side]["digest"] for side in ("old", "new")] == [plan.digest for plan in plans]
    assert data["old"]["figures"]["params"] == 4 and data["new"]["operators"]["masked"]["send"]
    # Of plans alone no operators are counted.
    data = json.loads(output(capsys, "report", "a/plan.json", "b/plan.json", "--json", code=1))
    assert data["changes"] == [line for line in out[1:] if not line.startswith("operators, ")]


def test_the_same_plan_compiled_otherwise_has_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for backend in ("aot_eager", "inductor"):
        small_dump(capsys, backend, "--rank", "0", "--backend", backend)
    changes = json.loads(output(capsys, "report", "aot_eager", "inductor", "--json", code=1))["changes"]
    assert changes and all(line.startswith("operators, all gradients, ") for line in changes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: A"),
        (["p.json"], "expected --out PATH, where the page goes to, or --json"),
        (["p.json", "--json", "--open"], "--open: expected --out PATH beside it"),
        (["none.json", "--json"], "none.json: expected a file that can be read"),
        (["p.json", "none.json", "--json"], "none.json: expected a file that can be read"),
        (["empty", "--json"], "empty: expected the folder of a dump, with a plan.json"),
        (["torn", "--json"], "graph.json: expected JSON, as a dump writes it: "),
        (["wrong", "--json"], "graph.json: expected a JSON list, as a dump writes it, got dict"),
        (["rows", "--json"], "graph.json: expected a list of objects, as a dump writes it"),
        (["other", "--out", "page.html"], "graphs: node 'n': expected buckets of the plan"),
        (["p.json", "--out", "p.json/page.html"], "p.json: "),
    ],
)
def test_report_refuses_in_words(
    arguments: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output(capsys, "plan", "gpt2", "--save", "p.json")
    (folder / "empty").mkdir()
    node = {"name": "n", "op": "call_function", "target": "t", "phase": "send", "buckets": ["muon99"]}
    for name, text in (("torn", "["), ("wrong", "{}"), ("rows", "[1]"), ("other", json.dumps([node]))):
        (folder / name / "all_gradients").mkdir(parents=True)
        (folder / name / "plan.json").write_bytes((folder / "p.json").read_bytes())
        (folder / name / "collectives.json").write_text("[]", encoding="utf-8")
        (folder / name / "all_gradients/graph.json").write_text(text, encoding="utf-8")
    assert says in refusal(capsys, "report", *arguments)
    assert not (folder / "page.html").exists()


def test_open_needs_a_display_or_a_browser(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    found = True

    def fake(url: str) -> bool:
        opened.append(url)
        return found

    monkeypatch.setattr(webbrowser, "open", fake)
    monkeypatch.setattr(sys, "platform", "linux")
    output(capsys, "plan", "gpt2", "--save", "p.json")
    given = ["report", "p.json", "--out", "page.html", "--open"]
    assert cli.main(given) == 0 and not opened
    captured = capsys.readouterr()
    assert captured.out == "page.html\n" and "there is no display" in captured.err and "page.html" in captured.err
    monkeypatch.setenv("DISPLAY", ":0")
    assert cli.main(given) == 0 and capsys.readouterr().err == ""
    assert opened == [(folder / "page.html").as_uri()]
    found = False
    assert cli.main(given) == 0
    assert "no browser was found; open page.html yourself" in capsys.readouterr().err
