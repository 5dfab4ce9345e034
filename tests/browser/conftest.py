"""A real Chromium, once for all tests of this folder, and tabs in it that must stay without errors.

The browser is $SHMSERVE_CHROMIUM, or chromium or google-chrome of the PATH, or Playwright's own. $SHMSERVE_SCREENSHOTS keeps the pictures.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HTTP_TESTS = str(Path(__file__).resolve().parents[1] / "http")
if HTTP_TESTS not in sys.path:
    sys.path.insert(0, HTTP_TESTS)

from serving import Server  # noqa: E402

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = os.environ.get("SHMSERVE_CHROMIUM") or shutil.which("chromium")
    found = found or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        # Its sandbox needs what containers do not give; the only pages that it sees are ours.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = os.environ.get("SHMSERVE_SCREENSHOTS")
    path = Path(folder) if folder else tmp_path_factory.mktemp("pictures")
    path.mkdir(parents=True, exist_ok=True)
    return path


class Tab:
    """A tab with the page of a server. `troubles` is what its console called an error, and what no script caught."""

    def __init__(self, browser: Any, server: Server, **options: Any) -> None:
        self.server = server
        self.context = browser.new_context(
            **{"viewport": DESKTOP, "color_scheme": "light"} | options
        )
        self.context.set_default_timeout(20_000)
        self.page = self.context.new_page()
        self.troubles: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.troubles.append(f"uncaught: {error}"))
        self.page.goto(f"http://127.0.0.1:{server.port}/")

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(message.text)

    def wait_ready(self) -> Tab:
        self.page.wait_for_selector('#state[data-kind="good"]')
        return self

    def set(self, **settings: str) -> None:
        """Fill in the settings, by the names of their fields, as a person does."""
        self.page.click("#open-settings")
        for name, value in settings.items():
            self.page.fill(f"#set-{name.replace('_', '-')}", value)
        self.page.click("#close-settings")

    def send(self, text: str = "Why is the sky blue?") -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def pieces(self, answer: int = -1) -> Any:
        """The pieces of an answer; the last one's if none is named."""
        return self.page.locator(".of-model").nth(answer).locator(".tok")

    def wait_pieces(self, least: int) -> None:
        self.page.wait_for_function(
            "least => [...document.querySelectorAll('.of-model')].at(-1)?.querySelectorAll('.tok').length >= least",
            arg=least,
        )

    def wait_over(self) -> None:
        """The answer has ended, however."""
        self.page.wait_for_selector("#stop", state="hidden")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """open_tab(server, **options of the context): the page in a tab of its own. At the end it must not have had any trouble."""
    tabs: list[Tab] = []

    def one(server: Server, **options: Any) -> Tab:
        tabs.append(Tab(browser, server, **options))
        return tabs[-1]

    yield one
    for tab in tabs:
        tab.close()
    assert [tab.troubles for tab in tabs if tab.troubles] == []


@pytest.fixture(scope="module")
def start(
    default_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """start(*flags): a simulated server of the module's own."""
    servers: list[Server] = []

    def one(*flags: str) -> Server:
        name = f"test-browser-{os.getpid()}-{len(servers)}"
        servers.append(
            Server(tmp_path_factory.mktemp("server"), name, "--runner=simulated", *flags)
        )
        return servers[-1].wait_ready()

    yield one
    for server in servers:
        server.stop()
