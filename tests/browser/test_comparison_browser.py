"""Comparisons of two plans in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import muon_compile as mc
from muon_compile.inspect.report import render_comparison
from muon_compile.plan.diff import diff_plans
from tests.browser.chromium import DOWN, ENTER, Tab
from tests.pages import compared, mesh

pytestmark = pytest.mark.browser


def test_a_comparison_shows_every_change(tab: Tab, pages: Callable[[str], str]) -> None:
    old, new = compared()
    tab.open(pages("comparison"))
    assert tab.texts("#changes li") == diff_plans(old, new)
    assert tab.count(".flow") == 2
    labels = [tab.run("return [...document.querySelectorAll('.flow')][arguments[0]].textContent", at) for at in (0, 1)]
    assert all("model.layers.*.mlp.experts.down_proj" in text for text in labels)
    code = "return [...document.querySelectorAll('#figures tr')].map((r) => [...r.children].map((c) => c.textContent))"
    figures = {name: cells for name, *cells in tab.run(code)}
    assert figures["Waves"][:2] == [str(len(old.waves)), str(len(new.waves))]
    assert figures["Ranks"] == ["16", "16", "same"]
    tab.press("/", "layers.7 q_proj")
    assert [text.split(" · ")[0] for text in tab.texts("#results .about")] == ["before: muon1", "after: muon1"]
    tab.press(DOWN, ENTER)
    assert tab.texts("#panel .eyebrow") == ["Parameter, after"] and "Asked for." in tab.texts("#panel")[0]


def test_a_comparison_lists_parameters_that_changed(tab: Tab, tmp_path: Path) -> None:
    specs = [mc.MatrixSpec(name=f"w{i}", shape=(64, 32)) for i in range(4)]
    other = [*specs[1:], mc.MatrixSpec(name="new", shape=(64, 32))]
    other[0] = mc.MatrixSpec(name="w1", shape=(64, 32), strategy="all_gather")
    pair = [mc.make_plan(these, mesh=mesh(shard=4), strategy="all_to_all") for these in (specs, other)]
    path = tmp_path / "page.html"
    path.write_text(render_comparison(*pair), encoding="utf-8")
    tab.open(path.as_uri())
    rows = "#params .body [role=row]"
    cells = "return [...document.querySelectorAll(arguments[0])].map((r) => [...r.children].map((c) => c.textContent))"
    assert tab.run(cells, rows) == [
        ["w0", "all_to_all · standard on graph", "not there", "removed"],
        ["w1", "all_to_all · standard on graph", "all_gather · standard on graph", "strategy or form"],
        ["new", "not there", "all_to_all · standard on graph", "added"],
    ]
    tab.click("#params .filters button", 1)
    assert len(tab.run(cells, rows)) == 5
    path.write_text(render_comparison(pair[0], pair[0]), encoding="utf-8")
    tab.open(path.as_uri())
    assert tab.texts("#changes h2") == ["No change"] and tab.errors() == []
