"""A real browser, for tests: Chromium, without a window."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import ENOUGH
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "needs a browser: apt-get install chromium chromium-driver"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip
POLL = 0.02
"""Seconds between two looks at what a page is to become. (Selenium's own are half a second.)"""


class Browser:
    """A window, and what is asked of it in these tests."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, *, width: int = 1000, height: int = 900, **media: str) -> None:
        """Show a page in a window of this size, where these features of the media have these
        values."""
        self.resize(width=width, height=height, **media)
        self.driver.get_log("performance"), self.driver.get_log("browser")
        self.driver.get(page.as_uri())

    def resize(self, *, width: int = 1000, height: int = 900, **media: str) -> None:
        """Show the same page in a window of this size, with these features."""
        features = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in media.items()
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def clear(self) -> None:
        """Show nothing, and forget what has been asked for and complained of."""
        self.driver.get("about:blank")
        self.requests(), self.complaints()

    def ask(self, script: str, *arguments: object) -> Any:
        """What this script returns."""
        return self.driver.execute_script(script, *arguments)

    def ask_later(self, script: str) -> Any:
        """What this script calls `done` with."""
        return self.driver.execute_async_script(f"const done = arguments[0]; {script}")

    def wait_for(self, selector: str, text: str) -> None:
        """Wait until this text stands there."""
        WebDriverWait(self.driver, ENOUGH, POLL).until(lambda _: text in self.text(selector))

    def until(self, script: str) -> None:
        """Wait until this script returns something true."""
        WebDriverWait(self.driver, ENOUGH, POLL).until(lambda _: self.ask(script))

    def press(self, *keys: str) -> None:
        """Press these keys, one after another, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def text(self, selector: str) -> str:
        return str(self.ask("return document.querySelector(arguments[0]).innerText", selector))

    def requests(self) -> list[str]:
        """Everything the page has asked for since it was opened."""
        logged = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        return [
            each["params"]["request"]["url"]
            for each in logged
            if each["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What has been written to the console since it was opened: errors, and whatever the policy
        forbade."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(ENOUGH)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
