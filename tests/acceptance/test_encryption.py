"""An inbox that encrypts: given by settings or by a program, worked as ever, and honest where a key is missing."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest

from oncehook import Event, Inbox
from oncehook.model import ArrivalId, DeliveryStatus, EventId, Filter
from oncehook.settings import load
from oncehook.settings.build import Encrypt
from oncehook.store.cipher import Cipher
from tests.acceptance.admin_house import admin_house
from tests.acceptance.conftest import Engine
from tests.acceptance.test_event_page import look
from tests.store.making import CRM, item, keep
from tests.store.test_encryption import NEW, OLD
from tests.wire import Answer

ONE, TWO = base64.b64encode(NEW).decode(), OLD.hex()
SETTINGS = """
store = "STORE"
encrypt = { key = KEY }
"""


def shop(engine: Engine, encrypt: Encrypt | None, seen: list[bytes]) -> Inbox:
    inbox = Inbox(engine.url, encrypt=encrypt)

    @inbox.on("app", name="ship", retry=["0.05s"], breaker={"failures": 1, "open": "1h"})
    async def ship(event: Event) -> dict[str, str]:
        seen.append(event.body)
        return {"shipped": "c4nary-answer"}

    return inbox


async def test_a_handler_gets_what_was_sent_and_the_store_holds_nothing_of_it(engine: Engine) -> None:
    seen: list[bytes] = []
    inbox = shop(engine, ONE, seen)
    async with inbox.running():
        event_id = await inbox.emit("app", "order.paid", {"card": "c4nary"}, key="1")
        await inbox.drain()
        shown = await inbox.admin.event(EventId.parse(event_id))
    assert seen == [b'{"card":"c4nary"}'] == [shown.event.body]
    held = [bytes(body) for (body,) in engine.rows("SELECT body FROM events UNION ALL SELECT answer FROM attempts")]
    assert len(held) == 2
    assert all(b"c4nary" not in value and value.startswith(b"\xffOHE\x01") for value in held)


async def test_a_key_that_is_missing_fails_that_delivery_and_no_other(engine: Engine) -> None:
    """It is tried again as any failure is, holds nobody else up, and opens no breaker: the key may be given in time."""
    receiver = Inbox(engine.url, encrypt=TWO)
    receiver.route("app", "ship")
    receiver.add_destination(shop(engine, None, []).destinations["ship"])
    async with receiver.running(work=False):
        lost = await receiver.emit("app", "order.paid", {"n": 1}, key="1")
    seen: list[bytes] = []
    inbox = shop(engine, ONE, seen)
    async with inbox.running():
        fine = await inbox.emit("app", "order.paid", {"n": 2}, key="2")
        async with asyncio.timeout(60):  # an open breaker would hold the other one up for an hour
            await inbox.drain()
        page = await inbox.admin.deliveries(Filter())
        by_event = {str(one.event_id): one for one in page.items}
        levels = await inbox.admin.levels()
    assert seen == [b'{"n":2}']
    assert by_event[fine].status is DeliveryStatus.done
    assert by_event[lost].status is DeliveryStatus.dead
    assert str(by_event[lost].last_error).startswith("undecryptable: ")
    assert levels["ship"].open_until is None
    inbox = shop(engine, [ONE, TWO], seen)
    async with inbox.running():
        await inbox.admin.replay_one(by_event[lost].id, actor="ann")
        await inbox.drain()
    assert seen == [b'{"n":2}', b'{"n":1}']


@pytest.mark.parametrize("form", ["text", "file"])
async def test_settings_name_the_key(engine: Engine, tmp_path: Path, form: str) -> None:
    (tmp_path / "inbox.key").write_text(ONE + "\n")
    reference = '{ env = "INBOX_KEY" }' if form == "text" else '[{ file = "inbox.key" }, { env = "OLD_KEY" }]'
    path = tmp_path / "oncehook.toml"
    path.write_text(SETTINGS.replace("STORE", engine.url).replace("KEY", reference, 1))
    loaded = load(path, {"INBOX_KEY": ONE, "OLD_KEY": TWO})
    inbox = Inbox.from_loaded(loaded)
    async with inbox.running(work=False):
        event_id = await inbox.emit("app", "order.paid", {"card": "c4nary"}, key="1")
        assert (await inbox.admin.body(EventId.parse(event_id))) == b'{"card":"c4nary"}'
    [(body,)] = engine.rows("SELECT body FROM events")
    assert b"c4nary" not in bytes(body)


async def test_the_api_says_what_cannot_be_decrypted(tmp_path: Path) -> None:
    """The event answers 409 with code and hint, a conflict likewise; lists and everything else are as ever."""
    async with admin_house(tmp_path, cipher=Cipher([OLD])) as house:
        [fine] = await keep(house.store, item("k2", body=b'{"n": 3}', to=[CRM]))
    async with admin_house(tmp_path, cipher=Cipher([NEW])) as house:
        [lost] = await keep(house.store, item("k", body=b'{"n": 1}', to=[CRM]))
        conflict = item("k2", body=b'{"n": 4}')
        await keep(house.store, conflict)
    async with admin_house(tmp_path, cipher=Cipher([OLD])) as house:
        lost_id, fine_id = str(lost.event_id), str(fine.event_id)
        assert len((await house.get("/events"))["items"]) == 2
        for path in (f"/events/{lost_id}", f"/events/{lost_id}/body", f"/events/{lost_id}/arrivals"):
            assert await house.refused("GET", path) == (409, "undecryptable")
        answer: Answer = await house.ask("GET", f"/events/{lost_id}")
        assert "encrypt.key" in json.loads(answer.body)["hint"]
        assert (await house.ask("GET", f"/events/{fine_id}/body")).body == b'{"n": 3}'
        arrivals = (await house.get(f"/events/{fine_id}/arrivals"))["items"]
        assert [one["outcome"] for one in arrivals] == ["accepted", "conflict"]
        arrival_id = str(ArrivalId(conflict.event_id))
        assert await house.refused("GET", f"/events/{fine_id}/arrivals/{arrival_id}/body") == (409, "undecryptable")
        assert [one["status"] for one in (await house.get("/deliveries"))["items"]] == ["pending", "pending"]


async def test_the_page_of_an_event_stands_where_a_conflict_cannot_be_read(engine: Engine) -> None:
    """The event under the old key, its conflict under a new one that the dashboard is not given."""
    for key, n in ((TWO, 1), (ONE, 2)):
        inbox = Inbox(engine.url, encrypt=key)
        async with inbox.running(work=False):
            event_id = await inbox.emit("app", "order.paid", {"n": n}, key="1")
    inbox = Inbox(engine.url, encrypt=TWO)
    async with inbox.running(work=False):
        page = await look(inbox, f"/events/{event_id}?tab=arrivals")
        assert page.status == 200
        assert b"differs" in page.body
    inbox = Inbox(engine.url, encrypt=ONE)
    async with inbox.running(work=False):
        assert (await look(inbox, "/events")).status == 200
        page = await look(inbox, f"/events/{event_id}")
        assert page.status == 409
        assert b"which is not given here" in page.body
