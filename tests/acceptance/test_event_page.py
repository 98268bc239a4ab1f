"""What is taken away from an event's page: the command, the test and the JSON (UX.md 4)."""

from __future__ import annotations

import html
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.applications import Starlette

from oncehook import Inbox
from tests.acceptance.desk_house import Answer, call

BODY = b'{"id": 1, "note": "\\"\'</button><script>alert(1)</script>"}'


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    made = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    made.source("orders", verify="none", key="$.id")
    async with made.running(work=False):
        yield made


async def look(inbox: Inbox, path: str, role: str | None = "viewer") -> Answer:
    desk = inbox.dashboard(authorize=cast("Any", lambda request: role))
    return await call(cast("Starlette", desk), "GET", path, b"", {"host": "127.0.0.1:4020"}, "127.0.0.1")


def copied(page: Answer) -> list[str]:
    """What the buttons beside the body copy."""
    found = re.findall(r'data-copy="([^"]*)"[^>]*>.{0,400}?Copy as', page.body.decode(), re.DOTALL)
    return [html.unescape(one) for one in found]


async def sent(inbox: Inbox) -> str:
    receipt = await inbox.receive("orders", {"content-type": "application/json"}, BODY)
    return receipt.event_ids[0]


async def run(fixture: str, calls: list[tuple[Any, ...]]) -> None:
    """Run a test that was copied, with an inbox that only writes down what it is asked."""

    class Recorded:
        async def send(self, source: str, *, body: bytes) -> None:
            calls.append(("send", source, body))

        async def emit(self, source: str, type: str, payload: bytes, *, key: str, subject: str) -> None:
            calls.append(("emit", source, type, payload, key, subject))

        async def drain(self) -> None:
            calls.append(("drain",))

    names: dict[str, Any] = {}
    exec(fixture, names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    await test(Recorded())


async def test_an_event_is_copied_as_a_test_with_its_very_bytes(inbox: Inbox) -> None:
    calls: list[tuple[Any, ...]] = []
    page = await look(inbox, f"/events/{await sent(inbox)}")
    await run(copied(page)[-1], calls)
    assert calls == [("send", "orders", BODY), ("drain",)]
    assert b"<script>alert" not in page.body


async def test_an_event_of_ones_own_is_emitted_by_its_test_and_has_no_command(inbox: Inbox) -> None:
    event_id = await inbox.emit("app", "order.paid", {"id": 1}, key="k'1", subject="o1")
    calls: list[tuple[Any, ...]] = []
    (fixture,) = copied(await look(inbox, f"/events/{event_id}"))
    await run(fixture, calls)
    assert calls == [("emit", "app", "order.paid", b'{"id":1}', "k'1", "o1"), ("drain",)]


async def test_an_event_is_opened_as_json_that_no_browser_takes_for_a_page(inbox: Inbox) -> None:
    event_id = await sent(inbox)
    answer = await look(inbox, f"/events/{event_id}/json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    told = json.loads(answer.body)
    assert (told["id"], told["source"], told["key"], told["deliveries"]) == (event_id, "orders", "1", [])
    assert f'/events/{event_id}/json"' in (await look(inbox, f"/events/{event_id}")).body.decode()
    assert (await look(inbox, f"/events/{event_id}/json", None)).status != 200
