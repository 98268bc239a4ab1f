"""The query on the list of events: what is offered, what is dropped, and what is new since (UX.md 4)."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
from starlette.applications import Starlette

from oncehook import Inbox, clock
from oncehook.model import Filter
from tests.acceptance.admin_house import call


@pytest.fixture
async def inbox(tmp_path: Path) -> AsyncIterator[Inbox]:
    made = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    made.source("orders", verify="none", key="$.id")
    async with made.running(work=False):
        yield made


async def look(inbox: Inbox, path: str) -> str:
    admin = inbox.dashboard(authorize=cast("Any", lambda request: "viewer"))
    answer = await call(cast("Starlette", admin), "GET", path, b"", {"host": "127.0.0.1:4020"}, "127.0.0.1")
    assert answer.status == 200, answer.body
    return html.unescape(answer.body.decode())


async def sent(inbox: Inbox, body: bytes) -> str:
    return (await inbox.receive("orders", {}, body)).event_ids[0]


@pytest.mark.parametrize(("begun", "offered"), [("bo", ["body."]), ("status:dead b", ["body."]), ("body.", [])])
async def test_places_in_the_body_are_offered(inbox: Inbox, begun: str, offered: list[str]) -> None:
    page = await look(inbox, f"/events/complete?query={quote(begun)}")
    assert re.findall(r'data-add="([^"]*)"', page) == offered


async def test_a_place_with_a_space_is_one_word(inbox: Inbox) -> None:
    event = await sent(inbox, b'{"id": 1, "first name": "Ann B"}')
    page = await look(inbox, "/events?query=" + quote('source:orders body."first name":"Ann B"'))
    assert event in page
    assert 'aria-label="Drop body."first name": "Ann B""' in page


async def test_what_is_new_is_counted(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without walking what was there before."""
    first = await sent(inbox, b'{"id": 1, "amount": 5}')
    query = quote("body.amount:>=5")
    assert "new event" not in await look(inbox, f"/events/fresh?query={query}&after={first}")
    await sent(inbox, b'{"id": 2, "amount": 5}')
    await sent(inbox, b'{"id": 3, "amount": 4}')
    assert "1 new event matches" in await look(inbox, f"/events/fresh?query={query}&after={first}")
    for odd, count in (("0" * 32, "2 new events"), ("f" * 32, ""), ("e677d21fdbff" + "0" * 20, "")):
        page = await look(inbox, f"/events/fresh?query={query}&after=evt_{odd}")
        assert (count in page) if count else ("new event" not in page)
    asked: list[Filter] = []
    find = inbox.store.find_events

    async def watched(filter: Filter, **more: Any) -> Any:
        asked.append(filter)
        return await find(filter, **more)

    monkeypatch.setattr(inbox.store, "find_events", watched)
    await look(inbox, f"/events/fresh?query={query}&after={first}")
    assert all(one.since is not None for one in asked if one.body)
    assert any(one.body for one in asked)


async def test_what_is_new_is_counted_after_a_clock_was_set_right(inbox: Inbox) -> None:
    """Ids go on from where a clock that ran a day ahead had brought them; the store's times do not."""
    clock.forward(86_400)
    first = await sent(inbox, b'{"id": 1}')
    clock.forward(-86_400)
    await sent(inbox, b'{"id": 2}')
    assert "1 new event matches" in await look(inbox, f"/events/fresh?query=&after={first}")
