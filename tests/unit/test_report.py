"""A report's page as text: what it embeds, and that nothing in it leaves the page or runs."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import muon_compile as mc
from muon_compile.inspect import report
from muon_compile.inspect.report import render_comparison, render_report
from muon_compile.inspect.report_graph import graph_data
from muon_compile.inspect.report_words import KEY_WORDS
from muon_compile.plan.diff import diff_plans
from muon_compile.plan.marks import PHASES
from tests.pages import HOSTILE, HYPER, STATS, data_of, graph_of, many, mesh, model_plan, one_matrix

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "muon_compile" / "inspect" / "templates"


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text inside each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.texts:
            self._inside = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data

    @property
    def policy(self) -> str:
        (found,) = (a["content"] for tag, a in self.elements if a.get("http-equiv") == "Content-Security-Policy")
        assert found is not None
        return found


def pages() -> dict[str, str]:
    plan = many(30, prefix=HOSTILE, on=mesh(shard=2))
    made = render_report(plan, graphs={"all": graph_of(plan)}, stats=STATS, hyper=HYPER, title=HOSTILE)
    return {"report": made, "comparison": render_comparison(plan, many(20, prefix=HOSTILE))}


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_no_name_becomes_markup(kind: str) -> None:
    plain = {"report": render_report(one_matrix()), "comparison": render_comparison(one_matrix(), one_matrix("v"))}
    hostile, harmless = Page(pages()[kind]), Page(plain[kind])
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert not any(name.startswith("on") for _, attributes in hostile.elements for name in attributes)
    assert hostile.texts["script"][1] == harmless.texts["script"][1]
    # A parser may end a script at less than a whole tag, so the data have no part of one.
    assert not {"<", ">", "&"} & set(hostile.texts["script"][0])
    data = data_of(pages()[kind])
    assert any(param[0].startswith(HOSTILE) for param in data["plans"][0]["params"])
    if kind == "report":
        assert hostile.texts["title"] == [HOSTILE] and data["title"] == HOSTILE


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_the_policy_allows_this_script_and_style_alone(kind: str) -> None:
    page = Page(pages()[kind])

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    (style,) = page.texts["style"]
    assert rules == {
        "default-src": "'none'",
        "script-src": source(page.texts["script"][1]),
        "style-src": source(style),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_nothing_is_loaded(kind: str) -> None:
    page = Page(pages()[kind])
    links = [attributes.get(name) for _, attributes in page.elements for name in ("src", "href", "action", "data")]
    assert [link for link in links if link is not None] == ["data:,"]
    code = page.texts["script"][1] + page.texts["style"][0]
    # The one address is the name of a namespace.
    assert set(re.findall(r"https?://[\w./]+", code)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(|innerHTML|\beval\b", code)


def test_a_name_that_cannot_be_seen_or_kept_is_written_as_escapes() -> None:
    page = render_report(one_matrix("lone \ud800"), title="lone \ud800")
    page.encode()
    assert data_of(page)["plans"][0]["params"][0][0] == "lone \\ud800"
    for name, shown in (("\u202ee\nx", "\\u202ee\\nx"), ("", "''"), ("名前", "名前")):
        assert data_of(render_report(one_matrix(name)))["plans"][0]["params"][0][0] == shown


def test_the_page_has_what_it_is_given() -> None:
    plan = model_plan("gpt2")
    nodes = graph_of(plan)
    page = render_report(plan, graphs={"all": nodes, "masked": nodes[:10]}, stats=STATS, hyper=HYPER, title="My step")
    data = data_of(page)
    assert data["mode"] == "report" and data["title"] == "My step" and data["phases"] == list(PHASES)
    assert data["hyper"] == HYPER and data["stats"] == STATS
    assert {kind: len(graph["name"]) for kind, graph in data["graphs"].items()} == {"all": len(nodes), "masked": 10}
    assert data["plans"][0]["digest"] == plan.digest
    alone = data_of(render_report(plan))
    assert alone["graphs"] == alone["stats"] == {} and alone["hyper"] == []
    assert alone["title"] == "muon_compile step"


def test_a_comparison_has_every_change() -> None:
    old, new = many(20, on=mesh(shard=4)), many(22, on=mesh(replicate=2, shard=2))
    data = data_of(render_comparison(old, new))
    assert data["changes"] == diff_plans(old, new) and len(data["changes"]) > 4
    assert [plan["digest"] for plan in data["plans"]] == [old.digest, new.digest]
    assert data_of(render_comparison(old, old))["changes"] == []


def test_three_hundred_parameters_are_small() -> None:
    plan = many(300, on=mesh(shard=4))
    nodes = (graph_of(plan) * 3)[:5000]
    nodes = [node | {"name": f"{node['name']}_{i}", "inputs": []} for i, node in enumerate(nodes)]
    page = render_report(plan, graphs={"all": nodes}, stats=STATS, hyper=HYPER)
    assert len(nodes) == 5000 and len(page.encode()) < 3 * 2**20


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_nodes_become_columns() -> None:
    nodes: list[dict[str, Any]] = [
        {"name": "x", "op": "placeholder", "target": "x", "shape": [], "dtype": "float32", "buckets": ["b"]},
        {"name": "y", "inputs": ["x", "x"], "shape": [2, 3], "dtype": "float32", "buckets": [1], "wave": 0},
        {"name": "z", "inputs": ["y"], "phase": None, "parts": [4], "shape": None},
    ]
    data = graph_data(nodes, ["a", "b"])

    def text(column: str) -> list[str]:
        return [data["texts"][index] for index in data[column]]

    assert data["name"] == ["x", "y", "z"] and data["inputs"] == [[], [0, 0], [1]]
    assert data["buckets"] == [[1], [1], []] and data["parts"] == [[], [], [4]] and data["wave"] == [None, 0, None]
    assert text("shape") == ["[]", "[2, 3]", ""] and text("dtype") == ["float32", "float32", ""]
    assert text("op") == ["placeholder", "", ""] and text("phase") == ["", "", ""]
    assert len(data["texts"]) == len(set(data["texts"]))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"name": "x"}, {"name": "x"}], "a name of its own for every node, got 'x' for node 1"),
        ([{"op": "output"}], "a name of its own for every node, got None"),
        ([{"name": "x", "inputs": ["y"]}], "node 'x': expected names of nodes as inputs, got 'y'"),
        ([{"name": "x", "buckets": ["c"]}], r"node 'x': expected buckets of the plan, \['a', 'b'\], got 'c'"),
        ([{"name": "x", "buckets": [2]}], "expected buckets of the plan"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(nodes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph_data(nodes, ["a", "b"])


# -- the files --------------------------------------------------------------------------------------------------------


def test_every_file_is_on_the_page_and_in_the_package() -> None:
    names = {path.name for path in TEMPLATES.iterdir()}
    assert names == {"page.html", *report._SCRIPTS, *report._STYLES}
    packed = re.search(r'^"muon_compile.inspect" = \["templates/(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert packed is not None and all(fnmatch.fnmatch(name, packed[1]) for name in names)


def test_no_file_ends_its_own_element() -> None:
    for path in TEMPLATES.glob("*.[jc]s*"):
        assert not re.search(r"</(script|style)|<!--", path.read_text(encoding="utf-8"), re.I), path.name


def test_every_strategy_has_a_colour() -> None:
    style = (TEMPLATES / "pictures.css").read_text()
    for key in (*KEY_WORDS, "mixed"):
        assert re.search(rf"\.s-{key}\b", style), key


def luminance(colour: str) -> float:
    """Source: WCAG 2.2, relative luminance."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out(theme: str) -> None:
    style = (TEMPLATES / "base.css").read_text()
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    colours = {name: light if theme == "light" else dark for name, light, dark in found}
    for behind in ("paper", "card", "raised", "accent-soft"):
        for text in ("ink", "soft"):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
        assert contrast(colours["accent"], colours[behind]) >= 4.5, behind
    # Edges of what is pressed: WCAG 1.4.11. What is drawn has its name or its number beside it.
    drawn = [name for name in colours if name.startswith("c-")]
    assert len(drawn) == 11
    assert contrast(colours["edge"], colours["card"]) >= 3
    assert min(contrast(colours[name], colours["card"]) for name in drawn) >= 2


def test_config_of_a_bucket_is_shown() -> None:
    config = mc.MuonConfig(ns_steps=3, coefficients=(1.5, -0.5, 0.25), eps="relative")
    plan = mc.make_plan([mc.MatrixSpec(name="w", shape=(64, 32), config=config)])
    (bucket,) = data_of(render_report(plan))["plans"][0]["buckets"]
    shown = dict(bucket["config"])
    assert shown["ns_steps"] == 3 and shown["coefficients"] == [1.5, -0.5, 0.25] and shown["eps"] == "relative"
