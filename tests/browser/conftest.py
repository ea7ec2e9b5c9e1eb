"""Reports in Chromium: one browser for all tests, and the addresses of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import muon_compile as mc
from muon_compile.inspect.report import render_comparison, render_report
from tests.browser.chromium import Tab, open_chromium
from tests.pages import HYPER, PLANS, STATS, compared, graph_of


@pytest.fixture(scope="session")
def tab() -> Iterator[Tab]:
    with open_chromium() as driver:
        yield Tab(driver)


def report(plan: mc.Plan) -> str:
    return render_report(plan, graphs={"all": graph_of(plan)}, stats=STATS, hyper=HYPER)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The address of a plan's report, or of the comparison of two."""
    folder: Path = tmp_path_factory.mktemp("pages")

    def url(name: str) -> str:
        path = folder / f"{name}.html"
        if not path.exists():
            text = render_comparison(*compared()) if name == "comparison" else report(PLANS[name]())
            path.write_text(text, encoding="utf-8")
        return path.as_uri()

    return url
