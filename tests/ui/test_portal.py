"""The portal in a browser: a customer makes a destination, sees what it got and answered, and replays a dead letter."""

from __future__ import annotations

import base64
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from oncehook.model import EventId
from oncehook.web.dashboard.portal import portal_routes
from tests.ui.conftest import Enter
from tests.ui.house import House
from tests.ui.test_pages import PHONE, WIDE, axed


class Around(BaseHTTPRequestHandler):
    """The page of a product, with the portal in a frame."""

    link = ""

    def do_GET(self) -> None:
        body = (
            f'<!doctype html><title>Shop</title><iframe src="{self.link}" width="1200" height="800"></iframe>'.encode()
        )
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


class PortalHouse(House):
    """A house with a portal for customers, which the page of a product may frame."""

    def _app(self) -> Starlette:
        self.around = ThreadingHTTPServer(("127.0.0.1", 0), type("Shop", (Around,), {}))
        threading.Thread(target=self.around.serve_forever, daemon=True).start()
        app = super()._app()
        sites = [f"http://127.0.0.1:{self.around.server_port}"]
        app.routes.insert(0, Mount("/portal", routes=portal_routes(self.inbox, self.stream, frame_ancestors=sites)))
        return app

    def close(self) -> None:
        super().close()
        self.around.shutdown()
        self.around.server_close()

    def link(self, account: int = 42) -> str:
        return self.inbox.portal_link(account, name="ana", url=self.url)

    def emit(self, key: str, account: int = 42) -> str:
        made = self.do(self.inbox.emit("app", "order.paid", {"order": key}, key=key, account=account))
        self.settle()
        return made


@pytest.fixture
def portal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PortalHouse]:
    monkeypatch.setenv("ONCEHOOK_SECRET_KEY", base64.b64encode(os.urandom(32)).decode())
    house = PortalHouse(tmp_path)
    try:
        yield house
    finally:
        house.close()


def make_destination(portal: PortalHouse, page: Page) -> str:
    """Fill in the form; the server's own people then let the destination be on this machine, as a test must."""
    name = page.get_by_label("Name", exact=True).input_value()
    assert re.fullmatch(r"webhook-[0-9a-f]{8}", name)
    expect(page.get_by_label("Account")).to_have_count(0)
    expect(page.get_by_label("Subscribe to")).to_have_value("*")
    page.get_by_label("URL").fill(f"http://127.0.0.1:{portal.theirs.server_port}/ana")
    page.get_by_label("Subscribe to").fill("order.*")
    page.get_by_role("button", name="Create destination").click()
    expect(page.get_by_role("heading", name=f"{name} is ready")).to_be_visible()
    expect(page.locator("#secret")).to_contain_text("whsec_")
    portal.do(portal.inbox.define.change("destination", name, allow_private=True))
    return name


def filmed(page: Page, name: str) -> None:
    """Keep a picture where somebody wants to look at it."""
    if folder := os.environ.get("PORTAL_PICTURES"):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.screenshot(
                path=Path(folder) / f"{name}-{page.viewport_size['width']}-{scheme}.png",
            )  # type: ignore[index]
        page.emulate_media(color_scheme="light")


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_customer_makes_a_destination_sees_its_delivery_and_replays_a_dead_letter(
    portal: PortalHouse, enter: Enter, size: Any
) -> None:
    wrong: dict[str, list[str]] = {}

    def look(name: str) -> None:
        wrong[name] = axed(page)
        filmed(page, name)

    page = enter(portal, None, viewport=size)
    page.goto(portal.link())
    expect(page.get_by_role("heading", name="Destinations", exact=True)).to_be_visible()
    assert page.url == portal.url + "/portal/destinations"
    expect(page.get_by_role("heading", name="No destination")).to_be_visible()
    look("empty")
    page.get_by_role("link", name="New destination…").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    look("new")
    name = make_destination(portal, page)
    look("made")
    page.get_by_role("link", name="Send test…").click()
    page.get_by_role("button", name=f"Send 1 test to {name}").click()
    expect(page.get_by_role("heading", name=f"{name} answered 200")).to_be_visible()

    well = portal.emit("o-1")
    portal.emit("o-2", account=43)
    portal.moods["/ana"] = (404, b"no such page here")
    broken = portal.emit("o-3")
    page.goto(portal.url + "/portal/events")
    expect(page.locator("#list tbody tr")).to_have_count(2)
    look("events")
    page.goto(portal.url + f"/portal/events/{well}?tab=deliveries")
    deliveries = page.locator("#detail")
    expect(deliveries).to_contain_text("200")
    page.locator("#detail details summary").first.click()
    expect(deliveries).to_contain_text("thank you")
    expect(deliveries).to_contain_text("webhook-signature")
    look("event")

    page.goto(portal.url + "/portal/dead")
    expect(page.locator("#groups")).to_contain_text(name)
    look("dead")
    page.goto(portal.url + f"/portal/events/{broken}?tab=deliveries")
    page.locator("#detail details summary").first.click()
    expect(deliveries).to_contain_text("no such page here")
    portal.moods["/ana"] = (200, b"thank you")
    page.locator("#head").get_by_role("link", name="Replay…").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    look("plan")
    page.get_by_role("button", name=re.compile("^Replay 1 delivery")).click()
    page.wait_for_url(re.compile("/portal/"))
    portal.settle()
    page.goto(portal.url + "/portal/replays")
    look("replays")
    page.goto(portal.url + "/portal/destinations")
    expect(page.locator(f"#{name}")).to_contain_text("order.*")
    look("destinations")
    (delivery,) = portal.do(portal.inbox.admin.event(EventId(bytes.fromhex(broken[4:])))).deliveries
    assert (delivery.status, delivery.run) == ("done", 2)
    page.goto(portal.url + "/portal/sources")
    expect(page.get_by_role("heading", name="There is no page at this address.")).to_be_visible()
    look("absent")
    page.context.clear_cookies()
    page.goto(portal.url + "/portal/")
    expect(page.get_by_role("heading", name="You are not in, or no longer.")).to_be_visible()
    look("closed")
    assert not {name: found for name, found in wrong.items() if found}


def test_without_script_a_click_lets_in(portal: PortalHouse, enter: Enter) -> None:
    page = enter(portal, None, java_script_enabled=False)
    page.goto(portal.link())
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("heading", name="Destinations", exact=True)).to_be_visible()


def test_the_page_of_a_named_site_shows_the_portal_in_a_frame(portal: PortalHouse, enter: Enter) -> None:
    page = enter(portal, None)
    portal.around.RequestHandlerClass.link = portal.link()  # type: ignore[attr-defined]
    page.goto(f"http://127.0.0.1:{portal.around.server_port}/")
    frame = page.frame_locator("iframe")
    expect(frame.get_by_role("heading", name="Destinations", exact=True)).to_be_visible()
    frame.get_by_role("link", name="New destination…").click()
    frame.get_by_label("URL").fill("https://ana.example/hooks")
    frame.get_by_role("button", name="Create destination").click()
    expect(frame.locator("#secret")).to_contain_text("whsec_")


def test_another_site_cannot_frame_it(portal: PortalHouse, browser: Browser) -> None:
    stranger = ThreadingHTTPServer(("127.0.0.1", 0), type("Stranger", (Around,), {"link": portal.link()}))
    threading.Thread(target=stranger.serve_forever, daemon=True).start()
    try:
        page = browser.new_page()
        with page.expect_console_message(lambda message: "frame-ancestors" in message.text):
            page.goto(f"http://127.0.0.1:{stranger.server_port}/")
        assert not any("/portal/destinations" in frame.url for frame in page.frames)
        page.close()
    finally:
        stranger.shutdown()
        stranger.server_close()
