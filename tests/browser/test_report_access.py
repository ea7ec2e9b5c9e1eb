"""Reports by keyboard, in both themes, and in windows of every width."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.browser.chromium import DOWN, END, ENTER, ESCAPE, HOME, TAB, UP, Tab
from tests.pages import PLANS

pytestmark = pytest.mark.browser


# -- keyboard --------------------------------------------------------------------------------------------------------


def test_the_flow_goes_by_keyboard(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("qwen"))
    seen = []
    for _ in range(30):
        tab.press(TAB)
        seen.append(tab.focused())
        if seen[-1]["role"] == "button":
            break
    # The search comes before, and a link that skips what comes before the step is the first.
    assert seen[0]["text"] == "Skip to the step" and any(one["id"] == "search" for one in seen)
    first = seen[-1]["label"]
    assert "Newton–Schulz" in first and "local" in first
    tab.press(DOWN)
    second = tab.focused()
    assert second["label"] != first and second["seen"]
    line = "return getComputedStyle(document.activeElement.querySelector('.hit')).stroke"
    colour = "return getComputedStyle(document.querySelector('nav a')).color"
    assert tab.run(line) not in ("none", tab.run(colour))
    tab.press(UP, ENTER)
    assert tab.texts("#panel .eyebrow") == ["Bucket"] and tab.focused()["id"] == "panel-title"
    tab.press(ESCAPE)
    assert tab.run("return document.getElementById('panel').hidden") is True
    assert tab.focused()["label"] == first


def test_tables_go_by_keyboard(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("thousand"))
    tab.run("document.querySelector('#buckets [role=row][tabindex=\"0\"]').focus()")
    tab.press(DOWN, DOWN)
    buckets = PLANS["thousand"]().buckets
    assert tab.focused()["text"].startswith(buckets[2].name)
    tab.press(END)
    last = tab.focused()
    assert last["seen"] and last["text"].startswith(buckets[-1].name)
    tab.press(HOME, ENTER)
    assert tab.texts("#panel-title") == [buckets[0].name]
    tab.press(ESCAPE)
    assert tab.focused()["text"].startswith(buckets[0].name)


def test_a_table_is_sorted_by_its_headings(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("gpt2"))
    column = "#buckets .body [role=gridcell]:nth-child(3)"
    heading = next(i for i, text in enumerate(tab.texts("#buckets .sort")) if text == "Count")

    def counts() -> list[int]:
        return [int(text) for text in tab.texts(column)]

    before = counts()
    tab.click("#buckets .sort", heading)
    assert counts() == sorted(before, reverse=True) != before
    assert tab.texts("#buckets [aria-sort=descending]") == ["Count"]
    tab.click("#buckets .sort", heading)
    assert counts() == sorted(before)


# -- themes and windows ----------------------------------------------------------------------------------------------


def brightness(tab: Tab, selector: str, what: str) -> float:
    code = """const [r, g, b] = getComputedStyle(document.querySelector(arguments[0]))[arguments[1]].match(/[\\d.]+/g);
    return (Number(r) + Number(g) + Number(b)) / 3"""
    return float(tab.run(code, selector, what))


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_is_the_systems_until_one_is_chosen(tab: Tab, pages: Callable[[str], str], dark: bool) -> None:
    tab.open(pages("qwen"), dark=dark)
    tab.run("localStorage.clear()")
    tab.open(pages("qwen"), dark=dark)

    def is_dark() -> bool:
        paper, ink = brightness(tab, "html", "backgroundColor"), brightness(tab, "body", "color")
        assert abs(paper - ink) > 150
        assert (brightness(tab, ".flow .value", "fill") < 128) == (ink < 128)
        return paper < 128

    assert is_dark() is dark and tab.texts("#theme") == ["Theme: auto"]
    tab.click("#theme")
    assert is_dark() is False and tab.texts("#theme") == ["Theme: light"]
    tab.click("#theme")
    assert is_dark() is True and tab.texts("#theme") == ["Theme: dark"]
    # It is remembered.
    tab.open(pages("qwen"), dark=dark)
    assert is_dark() is True
    tab.click("#theme")
    assert is_dark() is dark and tab.texts("#theme") == ["Theme: auto"]


BOXES = """const svg = document.querySelectorAll('.flow')[arguments[0]];
const outer = svg.getBoundingClientRect();
return [...svg.querySelectorAll('text')].map((node) => {
  const box = node.getBoundingClientRect();
  return [node.textContent, box.left, box.top, box.right, box.bottom,
          box.left >= outer.left - 1 && box.right <= outer.right + 1 && box.bottom <= outer.bottom + 1];
})"""


@pytest.mark.parametrize("width", [1920, 1280, 900, 640, 360])
@pytest.mark.parametrize("name", [*PLANS, "comparison"])
def test_labels_stand_apart_and_inside(tab: Tab, pages: Callable[[str], str], name: str, width: int) -> None:
    tab.open(pages(name), width=width)
    for number in range(tab.count(".flow")):
        boxes = tab.run(BOXES, number)
        assert len(boxes) > 3 and [text for text, *_, inside in boxes if not inside] == []
        for (one, *a), (other, *b) in itertools.combinations(boxes, 2):
            apart = a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 3 or b[3] <= a[1] + 3
            assert apart, (one, other)
    # Nothing is wider than the window, whatever scrolls within itself.
    assert tab.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_in_a_narrow_window_the_panel_covers_the_page(tab: Tab, pages: Callable[[str], str]) -> None:
    tab.open(pages("qwen"), width=400)
    tab.click(".flow .lane", 2)
    state = """const panel = document.getElementById('panel'); const box = panel.getBoundingClientRect();
    return [panel.getAttribute('role'), document.querySelector('main').inert, box.width >= innerWidth - 20]"""
    assert tab.run(state) == ["dialog", True, True]
    tab.press(ESCAPE)
    assert tab.run(state)[1] is False
    tab.open(pages("qwen"), width=1280)
    tab.click(".flow .lane", 2)
    assert tab.run(state) == ["complementary", False, False]
    # There the picture stays in sight beside it.
    right = "return Math.max(...[...document.querySelectorAll('.flow')].map((n) => n.getBoundingClientRect().right))"
    assert tab.run(right) <= tab.run("return document.getElementById('panel').getBoundingClientRect().left")


def test_what_is_pressed_has_a_name(tab: Tab, pages: Callable[[str], str]) -> None:
    for name in ("qwen", "comparison"):
        tab.open(pages(name))
        tab.click(".flow .lane", 1)
        code = """const what = 'button, a, input, [role=button], [role=img], [role=grid], [role=table]';
        const name = (node) => node.getAttribute('aria-label') || node.textContent.trim();
        return [...document.querySelectorAll(what)].filter((node) => !name(node)).map((node) => node.outerHTML)"""
        assert tab.run(code) == []
        levels = [
            int(level)
            for level in tab.run("return [...document.querySelectorAll('h1,h2,h3')].map((n) => n.tagName[1])")
        ]
        assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))
        ids = tab.run("return [...document.querySelectorAll('[id]')].map((node) => node.id)")
        assert len(ids) == len(set(ids))
