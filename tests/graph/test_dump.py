"""What a dump says of a graph: phases of every operator, comments, counts and pictures."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import muon_compile as mc
from muon_compile.inspect import dot
from muon_compile.inspect.graph_nodes import graph_rows
from muon_compile.lower import trace
from muon_compile.plan.marks import PHASES
from tests.graph.dumps import dump, stepped, traced_of

PRODUCTS = {"aten.bmm.default", "aten.baddbmm.default", "aten.mm.default", "aten.addmm.default"}
# Of names whatever could end a comment, a string or an element.
NAMES = ('a"b', "line\nbreak", "</script><b>", "back\\slash", "\ud800", "null\0")


# -- phases -----------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], mc.Muon]] = {
    "joint": stepped,
    "masked": lambda: stepped(missing=(1, 4)),
    "waves": lambda: stepped(max_temp_bytes=2000),
    "masked waves": lambda: stepped(max_temp_bytes=2000, missing=(1,)),
    "a cut stack": lambda: stepped(((9, 8, 6), (4, 4)), max_temp_bytes=2000),
    "exact": lambda: stepped(exact=True, config=mc.MuonConfig()),
    "relative": lambda: stepped(((8, 12), (8, 12)), config=mc.MuonConfig(eps="relative", ns_dtype="float32")),
    "blocks": lambda: stepped(((12, 8), (12, 8)), config=mc.MuonConfig(split_sizes=(4, 8), ns_dtype="float32")),
    "empty": lambda: stepped(((0, 8), (4, 4))),
    "adamw alone": lambda: stepped(((8,), (5,))),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_operator_has_its_phase(name: str) -> None:
    opt = KINDS[name]()
    plan, traced = traced_of(opt, "masked" if "masked" in name else "all")
    rows = graph_rows(plan, traced)
    nodes = [node for node in traced.graph.graph.nodes if node.op != "output"]
    assert [row["name"] for row in rows] == [node.name for node in nodes]
    called = [row for row in rows if row["op"] == "call_function"]
    assert called and all(row["phase"] in PHASES for row in called)
    assert {row["phase"] for row in rows if row["op"] == "placeholder"} == {"inputs"}
    # Only taking vectors apart comes before the first phase.
    apart = {"aten.unbind.int", "aten.split.Tensor", "aten.split_with_sizes.default", "operator.getitem"}
    assert {row["target"] for row in called if row["phase"] == "inputs"} <= apart
    for row in called:
        if row["phase"] == "inputs":
            assert (row["wave"], row["parts"], row["buckets"]) == (None, [], [])
            continue
        assert row["parts"] and row["wave"] is not None
        assert set(row["parts"]) <= set(plan.waves[row["wave"]].parts)
        assert row["buckets"] == list(dict.fromkeys(plan.buckets[plan.parts[i].bucket].name for i in row["parts"]))
    # Phases of one wave follow one another; waves do.
    order = [(row["wave"], PHASES.index(row["phase"])) for row in called if row["phase"] != "inputs"]
    assert order == sorted(order)
    assert {row["target"] for row in called if row["phase"] != "orthogonalize"}.isdisjoint(PRODUCTS)


def test_phases_are_what_operators_do() -> None:
    plan, traced = traced_of(stepped())
    of = {row["name"]: row for row in graph_rows(plan, traced)}
    written = {
        row["inputs"][0]: (row["phase"], row["buckets"]) for row in of.values() if row["target"] == "aten.copy_.default"
    }
    assert written["muon0_momentum_buffer"] == ("momentum", ["muon0"])
    assert written["adamw3_exp_avg_sq"] == ("momentum", ["adamw3"])
    assert written["param_2"] == ("update", ["muon1"])
    (apply,) = [row for row in of.values() if row["target"] == "muon_compile.apply_.default"]
    assert (apply["phase"], apply["buckets"], apply["inputs"][:2]) == ("update", ["muon0"], ["param_0", "param_1"])
    products = [row for row in of.values() if row["target"] in PRODUCTS]
    assert {tuple(row["buckets"]) for row in products} == {("muon0",), ("muon1",), ("muon2",)}
    assert (of["param_0"]["shape"], of["param_0"]["dtype"], of["param_0"]["buckets"]) == ([8, 12], "float32", ["muon0"])
    assert of["grad_5"]["buckets"] == ["adamw4"] and of["adamw4_step"]["parts"] == [4]
    assert of["hyper_0"]["buckets"] == ["muon0", "muon1", "muon2", "adamw3", "adamw4"]
    assert (of["unbind"]["shape"], of["unbind"]["dtype"], of["unbind"]["inputs"]) == (None, None, ["hyper_0"])
    for row in of.values():
        assert all(list(of).index(name) < list(of).index(row["name"]) for name in row["inputs"])


def code_and_meta(opt: mc.Muon) -> tuple[str, list[tuple[str, list[str]]]]:
    _, traced = traced_of(opt)
    return traced.graph.code, [(node.name, sorted(node.meta)) for node in traced.graph.graph.nodes]


def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace.InPlaceBoundary, "working_on", lambda *_: None)
    monkeypatch.setattr(trace.Marker, "turn_to", lambda *_: None)


def test_marks_leave_the_graph_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with_marks = code_and_meta(stepped())
    unmarked(monkeypatch)
    opt = stepped()
    assert not traced_of(opt)[1].marks
    assert code_and_meta(opt) == with_marks


@pytest.mark.inductor
def test_marks_are_no_part_of_the_compile_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        unmarked(patch)
        first = stepped(((8, 12),), backend="inductor")
    again = stepped(((8, 12),), backend="inductor")
    assert not traced_of(first)[1].marks and traced_of(again)[1].marks
    assert (first.compiled.stats.cached, again.compiled.stats.cached) == (0, 1)
    codes = [opt.compiled._binding.graphs["all"][1].code for opt in (first, again)]  # type: ignore[union-attr]
    assert codes[0] == codes[1] != {}


# -- the code ---------------------------------------------------------------------------------------------------------


def test_the_code_says_what_every_operator_is_about(tmp_path: Path) -> None:
    opt = stepped(names=("a", "b", "c", "d", "e", "f"), max_temp_bytes=5000)
    code = dump(opt, tmp_path)["all_gradients/graph.py"]
    ast.parse(code)
    plan, traced = traced_of(opt)
    calls = dict(re.findall(r"^ +(\w+)(?:: \"[^\"]*\")? = .*  # (\w+)", code, re.MULTILINE))
    named = {node.name for node in traced.graph.graph.nodes if node.op == "call_function"}
    assert calls == {row["name"]: row["phase"] for row in graph_rows(plan, traced) if row["name"] in named}
    assert "#   param_1, grad_1: b, row 1 of the state" in code
    assert "# hyper_0, on cpu: lr of group 0, weight_decay of group 0, momentum of group 0, lr of group 1" in code
    assert "        # momentum, wave 0; muon0 (a, b)\n" in code
    last = len(plan.waves) - 1
    assert last > 0 and f"        # update, wave {last}; " in code
    batch = plan.batches[0]
    assert (
        f"        # orthogonalize, wave 0; {batch.name}: 2 of 8 x 12; form standard, kernel graph; muon0 (a, b)" in code
    )
    assert "No stacktrace" not in code


def test_of_many_parameters_the_first_ones_are_named(tmp_path: Path) -> None:
    code = dump(stepped(((8, 4),) * 7), tmp_path)["all_gradients/graph.py"]
    assert "# momentum, wave 0; muon0 (p0, p1, p2 and 4 more)\n" in code
    assert "#   param_6, grad_6: p6, row 6 of the state\n" in code


def test_whatever_a_parameter_is_called(tmp_path: Path) -> None:
    opt = stepped(names=NAMES)
    files = dump(opt, tmp_path)
    assert json.loads(files["plan.json"])["specs"][1]["name"] == NAMES[1]
    code = files["all_gradients/graph.py"]
    ast.parse(code)
    comments = [line for line in code.splitlines() if line.lstrip().startswith("#")]
    for name in ('a"b', r"line\nbreak", "</script><b>", r"back\slash", r"\ud800", r"null\x00"):
        assert any(name in line for line in comments), name
    assert all(NAMES[2] not in text for name, text in files.items() if name.endswith((".html", ".dot")))


# -- counts and pictures ----------------------------------------------------------------------------------------------


def test_operators_are_counted_by_phase(tmp_path: Path) -> None:
    opt = stepped()
    files = dump(opt, tmp_path)
    counts = json.loads(files["all_gradients/op_counts.json"])
    _, traced = traced_of(opt)
    called = [node for node in traced.graph.graph.nodes if node.op == "call_function"]
    total: Counter[str] = sum((Counter(phase) for phase in counts.values()), Counter())
    assert sum(total.values()) == len(called)
    # A batch of each of the three shapes, five steps of three products each.
    assert counts["orthogonalize"]["aten.bmm.default"] == 15 and counts["orthogonalize"]["aten.baddbmm.default"] == 30
    assert list(counts) == ["inputs", "momentum", "orthogonalize", "update"]
    table = [line.split() for line in files["all_gradients/op_counts.txt"].splitlines()]
    assert table[0] == ["operator", *counts, "all"]
    assert ["aten.baddbmm.default", "30", "30"] in table
    assert table[-1] == ["all", *(str(sum(phase.values())) for phase in counts.values()), str(len(called))]


def edges_of(text: str) -> list[tuple[str, str]]:
    return re.findall(r'^  "?([\w]+)"? -> "?([\w]+)"?', text, re.MULTILINE)


def check_dot(text: str) -> None:
    """Strings are closed, braces too, and there are no two nodes or clusters of a name."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert '"' not in bare.replace('""', "") and bare.count("{") == bare.count("}")
    clusters = re.findall(r"subgraph (\w+) {", text)
    assert len(set(clusters)) == len(clusters) > 0


def test_the_picture_has_every_node_in_its_cluster(tmp_path: Path) -> None:
    opt = stepped(max_temp_bytes=2000)
    text = dump(opt, tmp_path)["all_gradients/graph.dot"]
    check_dot(text)
    rows = graph_rows(*traced_of(opt))
    inner = re.findall(r"subgraph cluster_\d+_\d+ {\n(.*?)    }\n", text, re.DOTALL)
    labels = [re.findall(r'label="([^"]*)"; color', block)[0] for block in inner]
    members = list(zip(labels, (re.findall(r'^ +"(\w+)" \[', block, re.MULTILINE) for block in inner), strict=True))
    assert sorted(name for _, names in members for name in names) == sorted(row["name"] for row in rows)
    of = {row["name"]: row for row in rows}
    for label, names in members:
        homes = {(of[n]["phase"], of[n]["wave"], ", ".join(of[n]["buckets"])) for n in names if n in of}
        assert len({home[:2] for home in homes}) == 1
        assert of[names[0]]["op"] == "placeholder" or {home[2] for home in homes} == {label}
    assert Counter(edges_of(text)) == Counter((source, row["name"]) for row in rows for source in row["inputs"])
    assert 'label="orthogonalize, wave 0"' in text and r'[label="param_0\nfloat32[8, 12]"]' in text


def test_a_large_picture_is_buckets_by_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = stepped()
    rows = graph_rows(*traced_of(opt))
    monkeypatch.setattr(dot, "MAX_NODES", len(rows))
    assert '"param_0"' in dot.graph_dot(rows)
    monkeypatch.setattr(dot, "MAX_NODES", len(rows) - 1)
    text = dot.graph_dot(rows)
    check_dot(text)
    assert '"param_0"' not in text
    homes = {(row["phase"], tuple(row["buckets"]) if row["op"] == "call_function" else ()) for row in rows}
    counts = [int(count) for count in re.findall(r'label="(\d+) nodes"', text)]
    assert len(counts) == len(homes) and sum(counts) == len(rows)
    assert all(source != target for source, target in edges_of(text)) and edges_of(text)


def test_dot_strings_are_quoted() -> None:
    assert dot.quoted('a"b\\c\n', "d") == r'"a\"b\\c\\n\nd"'
