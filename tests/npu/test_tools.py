"""What people run by hand: tools/lower_npu.py and examples/npu_train.py, from end to end and in their parts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import muon_compile as mc
from muon_compile.npu.wheel import FetchError
from muon_compile.plan.plan import Plan
from muon_compile.run.inputs import rank_plan
from muon_compile.spec import FLOAT_BYTES, MatrixSpec, MeshSpec
from tests.npu.handmade import data, f32, graph, op
from tests.npu.plans import VECTORS, groups_of
from tests.npu.sources import sources

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import _ge_report
import lower_npu

pytestmark = [pytest.mark.npu, pytest.mark.timeout(300)]
ROOT = Path(lower_npu.__file__).parents[1]
ME = "tests.npu.test_tools"
SECONDS = 200
# Float32 products; what differs is how transposed operands round, which Newton-Schulz amplifies.
FROM_EAGER = 1e-3


def small_model() -> list[MatrixSpec]:
    """What the tool is given by the name of this function."""
    shapes = {"even": (8, 6), "even_too": (8, 6), "five": (5, 8), "experts": (4, 6, 5)}
    specs = [MatrixSpec(name=name, shape=shape) for name, shape in shapes.items()]
    return specs + [MatrixSpec(name=n, shape=s, algorithm="adamw", group=1) for n, s in VECTORS.items()]


def planned(mesh: MeshSpec, strategy: str, device: str) -> Plan:
    specs = [
        mc.MatrixSpec(name=s.name, shape=s.shape, algorithm=s.algorithm, group=s.group, device=device)
        for s in small_model()
    ]
    return mc.make_plan(specs, mesh=mesh, strategy=strategy, hardware=mc.Hardware.preset("ascend-910c"))


FOUR = MeshSpec(axes=(("shard", 4),))
TWO_BY_TWO = MeshSpec(axes=(("replicate", 2), ("shard", 2)))


# -- From end to end --------------------------------------------------------------------------------------------------


class Started:
    """A program in a session of its own."""

    def __init__(self, out: Path, command: list[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"PYTHONPATH": str(ROOT)}
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said: tuple[str, str] | None = None

    def result(self, deadline: float) -> tuple[str, str]:
        """What it printed and what it complained of, once it is done; it has to succeed."""
        if self.said is None:
            self.said = self.process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        assert self.process.returncode == 0, self.said[1][-5000:]
        return self.said

    def end(self) -> None:
        """torchrun ends its ranks, which have sessions of their own, when it is asked to end."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Started], float]]:
    """All of them at once, for one process leaves a core idle; and until when they have to be done."""
    for version in ("2.13.0", "2.12.0"):
        sources(version)
    folder = tmp_path_factory.mktemp("tools")
    saved = folder / "plan.json"
    saved.write_text(planned(TWO_BY_TWO, "auto", "cpu").to_json(), encoding="utf-8")
    model, train = ["--model", f"{ME}:small_model"], ["examples/npu_train.py", "--steps"]
    commands = {
        "ranks": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *train, "2"],
        "alone": [*train, "3"],  # whose learning rates differ
        "lower": ["tools/lower_npu.py", *model, "--mesh", "4", "--rank", "1", "--json"],
        "plan": ["tools/lower_npu.py", "--plan", str(saved), "--rank", "3", "--torch-npu", "2.12.0"],
        "audit": ["tools/lower_npu.py", *model, "--kind", "masked", "--audit-only", "--json"],
    }
    commands["lower"] += ["--strategy", "hierarchical_all_to_all", "--ns", "standard"]
    commands["plan"] += ["--option", "experimental_config.frozen_parameter=True"]
    running: dict[str, Started] = {}
    try:
        for name, command in commands.items():
            (folder / name).mkdir()
            (folder / name / "ge_graph.py").write_text("of another run", encoding="utf-8")
            running[name] = Started(folder / name, [*command, "--out", str(folder / name)])
        yield running, time.monotonic() + SECONDS
    finally:
        for one in running.values():
            one.end()


Runs = tuple[dict[str, Started], float]


def result(started: Runs, name: str) -> tuple[str, str, Path]:
    runs, deadline = started
    return *runs[name].result(deadline), runs[name].out


def check_sums(summary: Mapping[str, Any]) -> None:
    ge, total = summary["ge"], summary["ge"]["operators"]
    assert ge["inputs_on"] == ["NPU"]
    assert sum(ge["by_type"].values()) == total > 100
    by_types: Counter[str] = Counter()
    for bucket in summary["buckets"]:
        assert sum(bucket["by_type"].values()) == bucket["operators"]
        by_types.update(bucket["by_type"])
    assert by_types == ge["by_type"]
    assert sum(sum(counts.values()) for counts in summary["by_traced_operator"].values()) == total
    assert summary["by_traced_operator"].keys() & {"several", "none"} == set()
    lists = ge["by_type"].get("Pack", 0) + ge["by_type"].get("Unpack", 0)
    assert ge["per_parameter"] == round((total - lists) / summary["parameters"], 2)
    assert sum(bucket["parameters"] or 0 for bucket in summary["buckets"]) == summary["parameters"]
    for row in summary["collectives"]:
        assert row["before"] + 1 + row["after"] + row["beside"] == total


def check_collectives(summary: Mapping[str, Any], plan: Plan, rank: int) -> None:
    promised = rank_plan(plan, rank, groups_of(plan))[0].collectives
    moving = [spec for spec in promised if spec.bytes_per_rank or spec.kind == "all_to_all_single"]
    assert [(row["kind"], row["axis"]) for row in summary["collectives"]] == [(c.kind, c.axis) for c in moving]
    assert [(row["kind"], row["axis"]) for row in summary["left_out"]] == [
        (spec.kind, spec.axis) for spec in promised if spec not in moving
    ]
    for row, spec in zip(summary["collectives"], moving, strict=True):
        given = row["elements"] * (FLOAT_BYTES | {"int32": 4})[row["dtype"]]
        assert given <= spec.bytes_per_rank  # which is what a rank gives at most
        assert given == spec.bytes_per_rank or spec.kind != "all_reduce"


def test_a_models_graph(started: Runs) -> None:
    said, complaints, out = result(started, "lower")
    summary = json.loads(said)
    assert summary == json.loads((out / "summary.json").read_text())
    assert sorted(path.name for path in out.iterdir()) == sorted(lower_npu.FILES)
    phases = re.findall(r"(\w[\w ]*) \.\.\. [\d.]+ s\n", complaints)
    assert phases == ["plan", "load TorchAir", "trace", "lower", "dump", "check"] == list(summary["seconds"])
    assert len(complaints.splitlines()) == len(phases), complaints
    assert summary["faults"] == []
    assert (summary["torch_npu"], summary["rank"], summary["mesh"]) == ("2.13.0", 1, {"shard": 4})
    check_sums(summary)
    check_collectives(summary, planned(FOUR, "hierarchical_all_to_all", "npu"), 1)
    # Groups are those that hold this rank: its node, and its peers in the other one.
    groups = dict.fromkeys(re.findall(r"Hcom\w+ .*rank_list=(\S+)", (out / "ge_operators.txt").read_text()))
    assert list(groups) == ["0,1,2,3", "0,1", "1,3"]
    # The agreement is of all; every exchange of its bucket alone, and the experts have none.
    owners = [row["bucket"] for row in summary["collectives"]]
    assert owners[0] == "shared" and {"shared", "unused"}.isdisjoint(owners[1:])
    names = {bucket["name"]: bucket for bucket in summary["buckets"]}
    assert set(owners[1:]) == {
        name for name, b in names.items() if any(kind.startswith("Hcom") for kind in b["by_type"])
    } - {"shared"}
    assert all(names[name]["operators"] > 20 for name in names if name.startswith("muon"))
    for text in ("graph.py", "ge_graph.pbtxt", "ge_graph.py", "plan.txt"):
        assert len((out / text).read_text()) > 1000


def test_a_plan_of_elsewhere(started: Runs) -> None:
    said, _, out = result(started, "plan")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["torch_npu"], summary["mesh"]) == ("2.12.0", {"replicate": 2, "shard": 2})
    assert summary["options"] == {"experimental_config.frozen_parameter": True}
    check_sums(summary)
    check_collectives(summary, planned(TWO_BY_TWO, "auto", "cpu"), 3)
    assert f"{summary['ge']['operators']} GE operators" in said
    assert len(summary["left_out"]) == said.count("is left out") == 1
    for name in ("operators by bucket", "collectives in order", "shared", str(out / "ge_graph.pbtxt")):
        assert name in said


def test_without_a_download(started: Runs) -> None:
    said, complaints, out = result(started, "audit")
    summary = json.loads(said)
    assert summary["faults"] == summary["collectives"] == []
    assert (summary["kind"], "presence_0" in (out / "graph.py").read_text()) == ("masked", True)
    assert summary["traced_operators"]["aten.bmm.default"] > 10
    assert sorted(path.name for path in out.iterdir()) == ["graph.py", "plan.txt", "summary.json"]
    assert "TorchAir" not in complaints


@pytest.mark.parametrize(("name", "world", "steps"), [("alone", 1, 3), ("ranks", 4, 2)])
def test_training_without_an_npu(started: Runs, name: str, world: int, steps: int) -> None:
    said, complaints, out = result(started, name)
    assert complaints == "" or name == "ranks", complaints  # torchrun tells of threads
    assert "Warning" not in complaints and "Traceback" not in complaints, complaints
    assert all(words in said for words in ("No NPU here", "real      how it is lowered", "not real  what runs"))
    lines = re.findall(rf"^  compiled  step +(\d+)/{steps}  loss (\d\.\d\d\d)  from eager (\S+)$", said, re.MULTILINE)
    assert [int(number) for number, _, _ in lines] == list(range(1, steps + 1)), said
    assert float(lines[-1][1]) < float(lines[0][1]) < 6
    assert all(0 < float(difference) <= FROM_EAGER for _, _, difference in lines), lines
    statistics = dict(re.findall(r"^(\w+)  +(\S.*)$", said.partition("== Statistics")[2], re.MULTILINE))
    assert [statistics[key] for key in ("graphs", "steps", "recompiles")] == ["1", str(steps), "0"]
    assert (int(statistics["collectives"]) > 1) == (world > 1)
    assert [path.name for path in out.rglob("ge_graph.pbtxt")] == ["ge_graph.pbtxt"]


# -- Their parts ------------------------------------------------------------------------------------------------------


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lower_npu.py", *arguments])
    monkeypatch.setattr(lower_npu, "name_fake_device", lambda: None)
    return lower_npu.main()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of the arguments --model --plan is required"),
        (("--model", "gpt3"), "expected one of gpt2, gpt2-medium"),
        (("--model", "gpt2", "--mesh", "4x4x4"), "expected S or RxS"),
        (("--model", "gpt2", "--mesh", "4", "--rank", "4"), "--rank: expected one of the mesh, 0 to 3, got 4"),
        (("--model", "gpt2", "--rank", "-1"), "0 to 0, got -1"),
        (("--model", "gpt2", "--strategy", "gather"), "expected one of ('auto', 'local'"),
        (("--model", "gpt2", "--ns", "gramm"), "gramm"),
        (("--model", "gpt2", "--hardware", "h100"), "--hardware: expected figures of an NPU, such as ascend-910b"),
        (("--model", "gpt2", "--torch-npu", "2.9.0"), "invalid choice: '2.9.0'"),
        (("--model", "gpt2", "--option", "mode"), "expected name=value, got 'mode'"),
        (("--model", "gpt2", "--audit-only", "--option", "a=1"), "--audit-only: it knows one TorchAir"),
        (("--plan", "nowhere.json"), "nowhere.json: expected a file that can be read"),
        (("--plan", "plan.json", "--mesh", "4", "--ns", "gram"), "--mesh, --ns: expected none of it beside --plan"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        called(monkeypatch, *arguments, "--out", str(tmp_path / "out"))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""
    assert not (tmp_path / "out").exists()


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def offline(*args: object, **more: object) -> Path:
        raise FetchError("its index cannot be reached")

    monkeypatch.setattr(lower_npu, "torchair_sources", offline)
    assert called(monkeypatch, "--model", "gpt2", "--json", "--out", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith(
        "lower_npu: its index cannot be reached\nWithout TorchAir, --audit-only says what it could not lower.\n"
    )


def test_a_fault_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"faults": ["aten.eye.m: no converter"], "traced_operators": {"aten.eye.m": 1}, "collectives": []}
    monkeypatch.setattr(lower_npu, "audited", lambda *args: found)
    assert called(monkeypatch, "--model", "gpt2", "--audit-only", "--out", str(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "fault: aten.eye.m: no converter" in said
    assert "has a converter for each" not in said
    assert json.loads((tmp_path / "summary.json").read_text())["faults"] == found["faults"]


def test_options_are_literals_or_text() -> None:
    assert lower_npu.option("a.b=True") == ("a.b", True)
    assert lower_npu.option("a.b=RDFS") == ("a.b", "RDFS")
    assert lower_npu.option("a=b=c") == ("a", "b=c")


@pytest.mark.parametrize(("mode", "words"), [("max-autotune", "no such option"), ("npugraph_ex", "makes no GE graph")])
def test_options_are_torchairs(
    mode: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def configured(config: object, options: Mapping[str, Any]) -> object:
        assert options == {"mode": mode, "a.b": 3}
        if mode == "max-autotune":
            raise mc.CompileError("no such option")
        return SimpleNamespace(mode=SimpleNamespace(value=mode))

    monkeypatch.setattr(lower_npu, "torchair_sources", lambda *args, **more: tmp_path)
    monkeypatch.setattr(lower_npu.stand_in, "install", lambda folder: None)
    monkeypatch.setattr(lower_npu.backend, "load_torchair", lambda: SimpleNamespace(CompilerConfig=object))
    monkeypatch.setattr(lower_npu, "compiler_config", configured)
    options = ("--option", f"mode={mode}", "--option", "a.b=3")
    assert called(monkeypatch, "--model", "gpt2", *options, "--out", str(tmp_path)) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("rank", range(8))
def test_ranks_of_a_group_hold_this_one(rank: int) -> None:
    mesh = MeshSpec(axes=(("replicate", 2), ("shard", 4)))
    specs = [MatrixSpec(name=name, shape=(8, 6), device="npu") for name in ("a", "b")]
    plan = mc.make_plan(specs, mesh=mesh, strategy="hierarchical_all_to_all", node_size=2)
    found = lower_npu.ranks_by_axis(plan, rank)
    assert found.keys() == groups_of(plan).keys() == {"replicate", "shard", "shard/node", "shard/peers"}
    first, node = rank - rank % 4, rank - rank % 2
    assert found["shard"] == list(range(first, first + 4))
    assert found["replicate"] == [rank % 4, rank % 4 + 4]
    assert found["shard/node"] == [node, node + 1]
    assert found["shard/peers"] == [first + rank % 2, first + rank % 2 + 2]


def test_whose_an_operator_is() -> None:
    """Two buckets' gradients, a mask for both, collectives that only the graph waits for, and a dead operator."""
    made = graph(
        data(0, "grad_a", f32(2)),
        data(1, "grad_b", f32(2)),
        data(2, "mask", f32(2)),
        op("Neg", "both", ["mask"], f32(2)),
        op("Mul", "of_a", ["grad_a", "both"], f32(2)),
        op("Mul", "of_b", ["grad_b", "both"], f32(2)),
        op("Neg", "turned", ["grad_b"], f32(2)),
        op("Muls", "sent", ["turned"], f32(2)),
        op("HcomAllReduce", "kept", ["sent"], f32(2), group="tag=;rank_list=0,1", reduction="sum"),
        op("Abs", "dead", ["grad_a"], f32(2)),
        op("HcomAllReduce", "alone", ["mask"], f32(2), group="tag=;rank_list=0,1", reduction="sum"),
    )
    end = op("NetOutput", "out", ["of_a", "of_b"], controls=["kept", "alone"])
    made = type(made)(name="by hand", ops=(*made.ops[:-1], end))
    order = [one.name for one in made.ops]
    ends: Any = ({"of_a": {"a"}, "of_b": {"b"}}, {"grad_a": {"a"}, "grad_b": {"b"}})
    found = _ge_report.owners(made, order, ends)
    assert {name: found[name] for name in order[3:11]} == {
        "both": "shared",
        "of_a": "a",
        "of_b": "b",
        "turned": "b",
        "sent": "b",
        "kept": "b",
        "dead": "unused",
        "alone": "none",
    }
    types = {one.name: one.type for one in made.ops if one.type not in ("Data", "NetOutput")}
    assert _ge_report.reached(made, order, ["kept", "turned"], types) == (
        {"kept": 2, "turned": 0},
        {"kept": 0, "turned": 2},
    )


def test_what_an_operator_was_made_of() -> None:
    """A step towards the noted operator counts with it."""
    made = graph(
        data(0, "x", f32(2)),
        op("Mul", "first", ["x", "x"], f32(2)),
        op("Cast", "cast", ["first"], f32(2)),
        outputs=["cast"],
    )
    note = SimpleNamespace(s=b"mul_3-aten.mul.Tensor.OUTPUT.0")
    notes = [SimpleNamespace(attr={"_fx_tensor_name": note})]
    protos = [
        SimpleNamespace(name="cast", output_desc=notes),
        SimpleNamespace(name="first", output_desc=[SimpleNamespace(attr={})]),
    ]
    concrete = SimpleNamespace(graph=SimpleNamespace(op=protos))
    types = {"first": "Mul", "cast": "Cast"}
    found = _ge_report.by_traced_operator(made, concrete, [one.name for one in made.ops], types)
    assert found == {"aten.mul.Tensor": {"Mul": 1, "Cast": 1}}
