"""The story of a trigger that a person makes in the browser, as its README tells it, with a server of its own."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.contrib.running import Database, Example, Program, database, post
from tests.ui.conftest import PATIENCE
from tests.ui.test_pages import axed

__all__ = ["database"]


@contextmanager
def looking_at(browser: Browser, server: Program) -> Iterator[Page]:
    """A browser that has followed the link that the server prints; nothing may go wrong in it."""
    link = re.search(r"http://\S+\?token=\w+", server.log.read_text())
    assert link is not None, server.log.read_text()
    context = browser.new_context(base_url=server.url, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(link[0])
    yield page
    context.close()
    assert not troubles


def make_trigger(page: Page) -> tuple[str, str]:
    """Make it as the README says; return its address and its secret."""
    page.get_by_role("link", name="Sources", exact=True).click()
    page.get_by_role("link", name="New source…").click()
    page.get_by_role("link", name="n8n, Zapier, Make").click()
    page.get_by_label("Name", exact=True).fill("lead")
    expect(page.locator("#choices-to option")).to_have_count(1)
    page.get_by_label("Send to").fill("agnt")
    page.get_by_role("button", name="Create source").click()
    expect(page.locator("#wrong-to")).to_contain_text('there is no destination "agnt"; did you mean "agent"?')
    assert axed(page) == []
    page.get_by_label("Send to").fill("agent")
    page.get_by_role("button", name="Create source").click()
    expect(page.get_by_role("heading", name="lead is ready")).to_be_visible()
    expect(page.get_by_text("Its events go to agent.")).to_be_visible()
    address, secret = page.locator(".sheet.page .cmd code").all_inner_texts()
    return address, secret


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_a_trigger_made_in_the_browser_fails_and_is_replayed_there(
    tmp_path: Path, database: Database, browser: Browser, engine: str
) -> None:
    env = {"ONCEHOOK_SECRET_KEY": base64.b64encode(os.urandom(32)).decode()}
    env |= {"STORE": database.url} if engine == "postgres" else {}
    with Example("stories/trigger_product", tmp_path, env) as example:
        server = example.start("oncehook serve app:inbox --port 8000").wait_for("dashboard  ")
        with looking_at(browser, server) as page:
            address, secret = make_trigger(page)
            assert address == f"{server.url}/in/lead"
            trigger, bearer = {"data": {"idempotency_key": "lead-42"}}, {"authorization": f"Bearer {secret}"}
            assert post(address, trigger, {"authorization": "Bearer forged"}).status == 401
            first = post(address, trigger, bearer)
            assert first.said == (200, "accepted")

            page.get_by_role("link", name=re.compile("^Dead letters")).first.click()
            expect(page.locator("#groups .c-cause")).to_contain_text("no agent is set up")
            assert example.read("ran.txt") == []
            (example.folder / "agent.txt").touch()
            page.get_by_role("link", name="Replay…", exact=True).click()
            dialog = page.get_by_role("dialog")
            dialog.get_by_role("button", name="Replay 1 delivery to agent").click()
            expect(page.locator(".toast")).to_contain_text("Replay started")
            assert example.wait_for_lines("ran.txt", 1) == ["lead lead-42 run 2"]

            copy = post(address, trigger, bearer)
            assert copy.said == (200, "duplicate")
            assert copy.json["event_id"] == first.json["event_id"]
            page.goto(f"/events/{first.json['event_id']}")
            expect(page.locator(".moments")).to_contain_text("Replay by")
        assert "Traceback" not in server.stop()
        assert example.read("ran.txt") == ["lead lead-42 run 2"]
