"""A browser, houses to look at, and pages that tell when something goes wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from oncehook import clock
from tests.ui.browser import find_browser
from tests.ui.house import HOUR, House, lived_in

PATIENCE = 90_000
"""Milliseconds after which something will never be seen: a machine may be very busy with something else."""

expect.set_options(timeout=PATIENCE)

TROUBLE = """
addEventListener("securitypolicyviolation", (event) => console.error(`policy: ${event.violatedDirective}`));
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The browser's tests come last: its driver keeps a loop running, beside which no asynchronous test could."""
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def opened(folder: Path, **how: Any) -> Iterator[House]:
    house = House(folder, **how)
    try:
        yield house
    finally:
        house.close()


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An inbox with an hour behind it. Tests that change something use what they bring themselves."""
    clock.forward(-HOUR)
    with opened(tmp_path_factory.mktemp("house")) as made:
        lived_in(made)
        yield made


@pytest.fixture
def own_house(tmp_path: Path) -> Iterator[House]:
    """An inbox of one's own: empty, and to be changed at will."""
    with opened(tmp_path) as made:
        yield made


Enter = Callable[..., Page]


@pytest.fixture
def enter(browser: Browser) -> Iterator[Enter]:
    """Opens a page as somebody with a role; at the end nothing may have gone wrong in any of them."""
    contexts: list[BrowserContext] = []
    troubles: list[str] = []

    def trouble(text: str) -> None:
        # An answer of 4xx is no error in a page, nor is a request that ends because somebody goes elsewhere.
        if not text.startswith(("Failed to load resource", "htmx:sendError", "htmx:afterRequest")):
            troubles.append(text)

    def enter_as(house: House, role: str | None = "admin", **how: Any) -> Page:
        context = browser.new_context(base_url=house.url, reduced_motion="reduce", **how)
        contexts.append(context)
        if role is not None:
            name, _, value = house.login(role).partition("=")
            context.add_cookies([{"name": name, "value": value, "url": house.url}])
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        if how.get("java_script_enabled", True):
            page.add_init_script(TROUBLE)
        page.on("console", lambda message: trouble(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: trouble(str(error)))
        return page

    yield enter_as
    for context in contexts:
        context.close()
    assert not troubles, troubles
