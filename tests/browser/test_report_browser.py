"""Reports in a real browser: they open, are found through, and unfold."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from muon_compile.inspect.report import render_comparison, render_report
from tests.browser.chromium import DOWN, ENTER, ESCAPE, UP, Tab
from tests.pages import HOSTILE, PLANS, graph_of, many, mesh, one_matrix, qwen, several_strategies

pytestmark = pytest.mark.browser


# -- opening ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PLANS, "comparison"])
def test_a_page_opens_quickly_and_without_a_word_in_the_console(
    tab: Tab, pages: Callable[[str], str], name: str
) -> None:
    url = pages(name)
    tab.open(url)
    timing = tab.run("return performance.getEntriesByType('navigation')[0].toJSON()")
    assert 0 < timing["loadEventEnd"] < 2000
    assert tab.errors() == []
    assert tab.run("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    assert tab.count("h1") == 1 and tab.count("main") == 1 and tab.count(".flow .lane") > 0
    # Every part of the page unfolds without one, too.
    for selector in ("details summary", ".table .sort", ".legend button", ".filters button"):
        for number in range(min(3, tab.count(selector))):
            tab.click(selector, number)
    assert tab.errors() == []


def test_names_are_shown_as_they_are(tab: Tab, tmp_path: Path) -> None:
    plan = many(40, prefix=HOSTILE, on=mesh(shard=2))
    page = render_report(
        plan, graphs={"all": graph_of(plan)}, hyper=[{HOSTILE: 1}], stats={HOSTILE: HOSTILE}, title=HOSTILE
    )
    for name, text in (("report", page), ("comparison", render_comparison(plan, one_matrix(HOSTILE)))):
        path = tmp_path / f"{name}.html"
        path.write_text(text, encoding="utf-8")
        tab.open(path.as_uri())
        tab.click("#search")
        tab.press("onerror")
        assert any(HOSTILE in text for text in tab.texts("#results .name"))
        tab.press(ENTER)
        assert HOSTILE in tab.texts("#panel-title")[0]
        assert tab.count("img") == 0 and tab.run("return window.pwned") is None and tab.count("script") == 2
        assert tab.errors() == []
    tab.open((tmp_path / "report.html").as_uri())
    assert tab.texts("h1") == [HOSTILE] and tab.run("return document.title") == HOSTILE


def test_the_page_cannot_reach_the_network(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("one"))
    code = """const done = arguments[0];
    const image = new Image(); image.src = 'https://example.invalid/x.png';
    const script = document.createElement('script'); script.textContent = 'window.pwned = 1';
    document.body.append(script);
    fetch('https://example.invalid/').then(() => done('reached'), () => done(window.pwned || 'refused'))"""
    assert tab.driver.execute_async_script(code) == "refused"
    said = " ".join(tab.errors())
    for directive in ("img-src", "script-src", "connect-src"):
        assert directive in said
    assert said.count("Content Security Policy") >= 3


# -- finding ---------------------------------------------------------------------------------------------------------


def test_one_search_finds_a_parameters_strategy_and_its_reason(tab: Tab, pages: Callable[[str], str]) -> None:
    plan = qwen()
    name = "model.layers.7.self_attn.q_proj.weight"
    bucket = next(b for b in plan.buckets if any(plan.specs[i].name == name for i in b.params))
    assert bucket.choice is not None and bucket.choice.runner_up is not None
    tab.open(pages("qwen"))
    tab.press("/", "layers.7 q_proj")
    assert tab.texts("#results .kind")[0].startswith("Parameters") and tab.texts("#results .name") == [name]
    assert tab.texts("#results .about") == [f"{bucket.name} · {bucket.strategy} · standard"]
    assert tab.texts("#results .why") == [bucket.choice.reason]
    tab.press(ENTER)
    assert tab.texts("#panel-title") == [name]
    shown = tab.texts("#panel")[0]
    reason = bucket.choice.reason
    for words in (bucket.strategy, reason[1:], bucket.choice.runner_up, "4096 × 2048", "dim 0 cut over 8 ranks"):
        assert words in shown
    assert "Orthogonalized byreplicate 0, shard 2" in shown
    # Its row among the bucket's is in sight, and marked.
    assert tab.texts("#panel [aria-selected=true] bdi") == [name]


@pytest.mark.parametrize(
    ("text", "kind", "first", "title"),
    [
        ("muon3", "Buckets", "muon3", "muon3"),
        ("2048x4096", "Buckets", "muon3", "muon3"),
        ("all_to_all", "Strategies", "all_to_all", "all_to_all"),
        ("no exchange", None, None, None),
        ("gram_", "Nodes", None, None),
        ("aten.bmm", "Nodes", None, None),
    ],
)
def test_the_search_finds(
    tab: Tab, pages: Callable[[str], str], text: str, kind: str | None, first: str | None, title: str | None
) -> None:
    tab.open(pages("qwen"))
    tab.press("/", text)
    kinds = [words.rstrip("0123456789,") for words in tab.texts("#results .kind")]
    if kind is None:
        assert kinds == [] and tab.texts("#results") == ["Nothing has that name."]
        return
    assert kind in kinds
    if first is not None:
        group = f"#results [aria-label={kind}] .name"
        assert tab.texts(group)[0] == first
        tab.click(group)
        assert tab.texts("#panel-title") == [title]


def test_the_search_box_goes_by_keyboard(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("qwen"))
    tab.press("/", "layers.1")
    options = tab.texts("#results .option .name")
    assert len(options) > 4
    marked = "#results [aria-selected=true] .name"
    assert tab.texts(marked) == options[:1]
    tab.press(DOWN, DOWN)
    assert tab.texts(marked) == options[2:3]
    active = tab.run("return document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))")
    assert options[2] in active.text
    tab.press(UP)
    assert tab.texts(marked) == options[1:2]
    tab.press(UP, UP)
    assert tab.texts(marked)[0] == tab.texts("#results .option")[-1][: len(tab.texts(marked)[0])]
    tab.press(ESCAPE)
    assert tab.run("return [document.getElementById('search').value, document.getElementById('results').hidden]") == [
        "",
        True,
    ]
    assert tab.focused()["id"] == "search"


def test_nodes_of_a_search_are_shown_in_the_graph(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("qwen"))
    tab.press("/", "aten.bmm")
    tab.click("#results [aria-label=Nodes] .more")
    wanted = sum(node["target"] == "aten.bmm.default" for node in graph_of(qwen()))
    assert wanted > 10
    assert any(text.startswith(f"{wanted} of ") for text in tab.texts("#graph [aria-live]"))
    tab.click("#graph .row-of button")
    assert not any(" of " in text for text in tab.texts("#graph [aria-live]"))


# -- unfolding -------------------------------------------------------------------------------------------------------


def test_a_click_on_a_lane_unfolds_its_bucket(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("qwen"))
    lane = next(i for i, text in enumerate(tab.texts(".flow .lane")) if "muon1 ·" in text)
    tab.click(".flow .lane", lane)
    assert tab.texts("#panel-title") == ["muon1"]
    titles = tab.texts("#panel h3")
    for title in (
        "Why this strategy",
        "Where it lies",
        "Through the step",
        "Parts",
        "48\u00a0parameters",
        "Mathematics",
    ):
        assert title in titles
    assert "Subgraph: all gradients present" in titles
    # The subgraph has the bucket's operators, in order, with their rails.
    assert tab.texts("#panel .rails .body [role=gridcell]:nth-child(2)")[:4] == [
        "momentum_",
        "all_to_all_single",
        "bmm",
        "baddbmm",
    ]
    assert tab.count("#panel .rails .rail circle") > 10
    assert tab.run("return document.querySelectorAll('.flow .lane[aria-pressed=true]').length") == 1
    # From there to a parameter, a node, and back.
    tab.click("#panel [aria-label='Parameters of muon1'] .body [role=row]", 3)
    assert tab.texts("#panel-title") == ["model.layers.3.self_attn.q_proj.weight"]
    tab.driver.back()
    tab.settle()
    assert tab.texts("#panel-title") == ["muon1"]
    tab.click("#panel .rails .body [role=row]", 2)
    assert tab.texts("#panel-title")[0].startswith("gram_") and "aten.bmm.default" in tab.texts("#panel")[0]


def test_small_buckets_share_a_lane_and_are_listed(tab: Tab, pages: Callable[[str], str]) -> None:
    plan = PLANS["thousand"]()
    assert len(plan.buckets) > 200
    tab.open(pages("thousand"))
    lanes = tab.texts(".flow .lane .label")
    assert len(lanes) == 16
    muon = sum(bucket.algorithm == "muon" for bucket in plan.buckets)
    assert lanes[14:] == [f"{muon - 14} more Muon buckets", f"{len(plan.buckets) - muon} more AdamW buckets"]
    tab.click(".flow .lane", 14)
    assert tab.texts("#panel-title") == [f"{muon - 14}\u00a0buckets"]
    tab.click("#panel .body [role=row]", 2)
    assert tab.texts("#panel .eyebrow") == ["Bucket"]


def test_an_address_opens_what_it_names(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("qwen") + "#param/0/model.layers.2.mlp.gate.weight")
    assert tab.texts("#panel-title") == ["model.layers.2.mlp.gate.weight"]
    for wrong in ("#bucket/0/none", "#bucket/7/muon1", "#node/all/none", "#param/0/%", "#buckets/0/999"):
        tab.open(pages("qwen") + wrong)
        assert tab.run("return document.getElementById('panel').hidden") is True
        assert tab.errors() == []


def test_every_bucket_strategy_and_node_opens(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("strategies"))
    plan = several_strategies()
    addresses = [f"#bucket/0/{bucket.name}" for bucket in plan.buckets]
    addresses += [f"#strategy/0/{key}" for key in {bucket.strategy or "adamw" for bucket in plan.buckets}]
    addresses += [f"#node/all/{node['name']}" for node in graph_of(plan)[::7]]
    for address in addresses:
        tab.run("location.hash = arguments[0]", address)
        tab.settle()
        assert tab.texts("#panel-title") not in ([], [""])
    assert len(addresses) > 30 and tab.errors() == []


# -- many nodes ------------------------------------------------------------------------------------------------------


def test_five_thousand_nodes_stay_quick(tab: Tab, pages: Callable[[str], str]) -> None:
    nodes = graph_of(PLANS["thousand"]())
    assert len(nodes) > 5000
    tab.open(pages("thousand"))
    rows = "#graph .body [role=row]"
    assert 10 < tab.count(rows) < 60
    tab.run("const node = document.querySelector('#graph .table'); node.scrollTop = node.scrollHeight")
    tab.settle()
    assert nodes[-1]["name"] in tab.texts(rows)[-1] and tab.count(rows) < 60
    begin = time.perf_counter()
    name = next(node["name"] for node in nodes[3000:] if node["name"].startswith("x_"))
    tab.press("/", name)
    assert time.perf_counter() - begin < 2
    assert name in tab.texts("#results .name")
    cost = """const begin = performance.now(); filterGraph('all', {text: '_4', phase: 'orthogonalize', bucket: ''});
    return performance.now() - begin"""
    assert tab.run(cost) < 200
    wanted = sum("_4" in node["name"] and node["phase"] == "orthogonalize" for node in nodes)
    assert any(text.startswith(f"{wanted:,} of ") for text in tab.texts("#graph [aria-live]"))
