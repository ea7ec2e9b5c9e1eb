"""Chromium, driven by the tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# What WebDriver calls keys that are no characters. Source: W3C WebDriver, 17.4.2.
DOWN, UP, ENTER, ESCAPE, TAB, HOME, END = "\ue015", "\ue013", "\ue007", "\ue00c", "\ue004", "\ue011", "\ue010"
# Without a display, a sandbox or a network of its own: nothing but the page is loaded.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
)


def _missing(what: str) -> NoReturn:
    """Skip; where CI runs the tests nothing may be left out, so fail."""
    reason = f"{what} is missing: run tools/install_chromium.sh and make setup"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextlib.contextmanager
def open_chromium() -> Iterator[Any]:
    """A driver with a profile of its own, which is left behind by nobody."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        _missing("chromium" if browser is None else "chromedriver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ModuleNotFoundError:
        _missing("selenium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        chromium = webdriver.Chrome(options=options, service=Service(driver))
        try:
            yield chromium
        finally:
            chromium.quit()


class Tab:
    """A page that is open, and what the tests do with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Load a page anew, in a window of that size and a system of that theme; what was stored is forgotten."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        self.driver.get("about:blank")
        self.errors()
        self.driver.get(url)
        self.settle()

    def run(self, code: str, *arguments: Any) -> Any:
        """What a piece of script returns."""
        return self.driver.execute_script(code, *arguments)

    def settle(self) -> None:
        """Let the page draw: two frames, since a picture is drawn once its width is known."""
        wait = (
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20)))"
        )
        self.driver.execute_async_script(wait)

    def errors(self) -> list[str]:
        """What the console has said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver, duration=0)
        for key in keys:
            actions.send_keys(key)
        actions.perform()
        self.settle()

    def click(self, selector: str, number: int = 0) -> None:
        """Click what a selector finds, in the middle of what is seen of it."""
        from selenium.webdriver import ActionChains

        node = self.driver.find_elements("css selector", selector)[number]
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", node)
        self.settle()
        ActionChains(self.driver, duration=0).move_to_element(node).click().perform()
        self.settle()

    def texts(self, selector: str) -> list[str]:
        """The text of everything that a selector finds."""
        code = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
        found: list[str] = self.run(code, selector)
        return found

    def count(self, selector: str) -> int:
        """How many elements a selector finds."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def focused(self) -> dict[str, Any]:
        """What has the focus: id, role, label, text, and whether it is in sight."""
        code = """const node = document.activeElement; const box = node.getBoundingClientRect();
        return {id: node.id, role: node.getAttribute('role'), label: node.getAttribute('aria-label') || '',
                text: node.textContent, seen: box.width > 0 && box.top >= 0 && box.bottom <= innerHeight + 1}"""
        found: dict[str, Any] = self.run(code)
        return found
