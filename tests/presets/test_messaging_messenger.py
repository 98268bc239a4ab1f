"""Messenger and Instagram: messages, receipts, echoes and changes, in every envelope that Meta writes them in."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.presets.messaging import (
    JUNK,
    counts,
    ground,
    is_unparsed,
    json_values,
    keys,
    meta_signature,
    send_as,
    take_apart,
)

PAGE, ANA, RUI = "108077611888514", "7114203988", "7114203999"
AT = 1790000000123


def item(sender: str = ANA, at: int = AT, **what: Any) -> dict[str, Any]:
    return {"sender": {"id": sender}, "recipient": {"id": PAGE}, "timestamp": at, **what}


def message(mid: str, sender: str = ANA, **more: Any) -> dict[str, Any]:
    return item(sender, message={"mid": mid, "text": "Olá 🙂", **more})


def echo(mid: str, recipient: str = ANA) -> dict[str, Any]:
    own = message(mid, PAGE, is_echo=True, app_id=1)
    return {**own, "recipient": {"id": recipient}}


def entry(*items: Any, name: str = "messaging", time: int = AT) -> dict[str, Any]:
    return {"id": PAGE, "time": time, name: list(items)}


def document(*entries: Any, kind: str = "page") -> dict[str, Any]:
    return {"object": kind, "entry": list(entries)}


COMMENT = {
    "id": "17865799348089039",
    "from": {"id": "232323232", "username": "ana"},
    "text": "Que lindo 😍",
    "media": {"id": "17887498072083520", "media_product_type": "FEED"},
}
BATCH = document(
    entry(message("m_1"), message("m_2", RUI), item(read={"watermark": AT})),
    {"id": "2", "time": AT, "changes": [{"field": "feed", "value": {"post_id": "2_7", "verb": "add", "item": "post"}}]},
    entry(message("m_3"), name="standby"),
)


# -- keys, types, subjects ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "kind", "key", "subject"),
    [
        (message("m_1"), "message", f"{PAGE}:message:m_1", f"{PAGE}:{ANA}"),
        (echo("m_1"), "message.echo", f"{PAGE}:message.echo:m_1", f"{PAGE}:{ANA}"),
        (message("m_1", is_deleted=True), "message.deleted", f"{PAGE}:message.deleted:m_1", f"{PAGE}:{ANA}"),
        (item(read={"watermark": 17}), "read", f"{PAGE}:read:{ANA}:17", f"{PAGE}:{ANA}"),
        (item(read={"mid": "m_1"}), "read", f"{PAGE}:read:{ANA}:m_1", f"{PAGE}:{ANA}"),
        (item(delivery={"watermark": 17}), "delivery", f"{PAGE}:delivery:{ANA}:17", f"{PAGE}:{ANA}"),
        (
            item(delivery={"watermark": 17, "mids": ["m_1", "m_2"]}),
            "delivery",
            f"{PAGE}:delivery:{ANA}:17:m_1:m_2",
            f"{PAGE}:{ANA}",
        ),
        (
            item(postback={"mid": "m_1", "title": "Go", "payload": "GO"}),
            "postback",
            f"{PAGE}:postback:{ANA}:m_1:{AT}",
            f"{PAGE}:{ANA}",
        ),
        (
            item(reaction={"mid": "m_1", "action": "react", "emoji": "❤"}),
            "reaction",
            f"{PAGE}:reaction:{ANA}:m_1:{AT}",
            f"{PAGE}:{ANA}",
        ),
        (item(optin={"type": "x"}), "optin", f"{PAGE}:optin:{ANA}::{AT}", f"{PAGE}:{ANA}"),
        (item(something_new={"a": 1}), "something_new", f"{PAGE}:something_new:{ANA}::{AT}", f"{PAGE}:{ANA}"),
    ],
)
async def test_messaging(tmp_path: Path, data: Any, kind: str, key: str, subject: str) -> None:
    async with ground(tmp_path, "messenger") as place:
        event = await place.keep(document(entry(data)))
        assert (event.type, event.key, event.subject) == (kind, key, subject)
        assert event.event_at == datetime.fromtimestamp(AT / 1000, UTC)
        assert await place.outcome(document(entry(data, time=AT + 5000))) == "duplicate"


async def test_standby_is_told_apart(tmp_path: Path) -> None:
    async with ground(tmp_path, "messenger") as place:
        event = await place.keep(document(entry(message("m_1"), name="standby")))
        assert event.type == "standby.message"


async def test_an_unsent_message_is_not_a_copy_of_the_one_that_was_sent(tmp_path: Path) -> None:
    async with ground(tmp_path, "messenger") as place:
        await place.send(document(entry(message("m_1"))))
        assert await place.outcome(document(entry(message("m_1", is_deleted=True)))) == "accepted"


async def test_a_reaction_taken_back_and_given_again(tmp_path: Path) -> None:
    async with ground(tmp_path, "messenger") as place:
        for at, action in enumerate(("react", "unreact", "react"), AT):
            event = document(entry(item(at=at, reaction={"mid": "m_1", "action": action})))
            assert await place.outcome(event) == "accepted"
            assert await place.outcome(event) == "duplicate"


@pytest.mark.parametrize(
    "what",
    [
        {"message": {"text": "no mid"}},
        {"message": {"mid": None}},
        {"message": {"mid": ""}},
        {"message": 7},
        {"read": {}},
        {"read": {"watermark": None}},
        {"postback": "x", "timestamp": None},
        {"postback": {"mid": "m_1"}, "timestamp": None},
        {},
    ],
)
async def test_without_an_id_the_content_decides(tmp_path: Path, what: dict[str, Any]) -> None:
    async with ground(tmp_path, "messenger") as place:
        for sender, outcome in ((ANA, "accepted"), (RUI, "accepted"), (ANA, "duplicate")):
            assert await place.outcome(document(entry({**item(sender), **what}))) == outcome
        assert all((key or "").startswith("body_hash:") for key in await keys(place))


# -- Instagram ---------------------------------------------------------------------------------

BUSINESS_LOGIN = {"id": PAGE, "time": AT, "field": "comments", "value": COMMENT}
PAGE_LOGIN = {"id": PAGE, "time": AT, "changes": [{"field": "comments", "value": COMMENT}]}


@pytest.mark.parametrize("around", [BUSINESS_LOGIN, PAGE_LOGIN], ids=["business-login", "changes"])
@pytest.mark.parametrize("wrapped", [True, False])
async def test_instagram_comments(tmp_path: Path, around: dict[str, Any], wrapped: bool) -> None:
    async with ground(tmp_path, "messenger") as place:
        for time, outcome in ((AT, "accepted"), (AT + 9, "duplicate")):
            data = document({**around, "time": time}, kind="instagram")
            assert await place.outcome([data] if wrapped else data) == outcome
        [event] = await place.events()
        assert (event.type, event.subject) == ("comments", f"{PAGE}:17887498072083520")
        changed = document({**BUSINESS_LOGIN, "value": {**COMMENT, "id": "2"}}, kind="instagram")
        assert await place.outcome([changed] if wrapped else changed) == "accepted"


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("shape", ["messaging", "business-login", "test-button"])
async def test_instagram_messages(tmp_path: Path, wrapped: bool, shape: str) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "messaging": {"messaging": [message("m_1")]},
        "business-login": {"field": "messages", "value": message("m_1")},
        "test-button": {"changes": [{"field": "messages", "value": message("m_1")}]},
    }
    data = document({"id": PAGE, "time": AT, **shapes[shape]}, kind="instagram")
    async with ground(tmp_path, "messenger") as place:
        event = await place.keep([data] if wrapped else data)
        assert (event.type, event.key, event.subject) == ("message", f"{PAGE}:message:m_1", f"{PAGE}:{ANA}")
        assert event.event_at == datetime.fromtimestamp(AT / 1000, UTC)


async def test_a_wrapped_batch_stays_wrapped(tmp_path: Path) -> None:
    data = [
        document(entry(message("m_1"), message("m_2")), kind="instagram"),
        document(BUSINESS_LOGIN, kind="instagram"),
    ]
    async with ground(tmp_path, "messenger") as place:
        assert counts(await place.send(data)) == (3, 0, 0)
        assert [json.loads(event.body) for event in await place.events()] == [
            [document(entry(message("m_1")), kind="instagram")],
            [document(entry(message("m_2")), kind="instagram")],
            [document(BUSINESS_LOGIN, kind="instagram")],
        ]
        assert counts(await place.send(data)) == (0, 3, 0)
        alone = [document(entry(message("m_2"), time=AT + 7), kind="instagram")]
        assert await place.outcome(alone) == "duplicate"


# -- batches -----------------------------------------------------------------------------------


async def test_a_batch_of_everything(tmp_path: Path) -> None:
    body = json.dumps(BATCH).encode()
    async with ground(tmp_path, "messenger") as place:
        assert counts(await send_as(place, body, meta_signature(body))) == (5, 0, 0)
        events = await place.events()
        assert [event.type for event in events] == ["message", "message", "read", "feed", "standby.message"]
        assert [event.subject for event in events] == [
            f"{PAGE}:{ANA}",
            f"{PAGE}:{RUI}",
            f"{PAGE}:{ANA}",
            "2:2_7",
            f"{PAGE}:{ANA}",
        ]
        assert json.loads(events[1].body) == document(entry(message("m_2", RUI)))
        assert json.loads(events[4].body) == document(entry(message("m_3"), name="standby"))


async def test_a_partly_repeated_batch(tmp_path: Path) -> None:
    async with ground(tmp_path, "messenger") as place:
        await place.send(BATCH)
        later = document(entry(message("m_2", RUI), message("m_9"), time=AT + 60_000))
        assert counts(await place.send(later)) == (1, 1, 0)
        assert await place.outcome(document(entry(message("m_1"), time=AT + 90_000))) == "duplicate"


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("where", ["item", "entry", "change", "document"])
async def test_one_odd_item_costs_its_neighbours_nothing(tmp_path: Path, junk: Any, where: str) -> None:
    data: Any = copy.deepcopy(BATCH)
    if where == "item":
        data["entry"][0]["messaging"].insert(1, junk)
    elif where == "entry":
        data["entry"].insert(0, junk)
    elif where == "change":
        data["entry"][1]["changes"].insert(0, junk)
    else:
        data = [junk, data]
    async with ground(tmp_path, "messenger") as place:
        assert counts(await place.send(data)) == (6, 0, 0)
        found = await keys(place)
        assert {f"{PAGE}:message:m_1", f"{PAGE}:message:m_2", f"{PAGE}:standby.message:m_3"} <= set(found)
        if junk != {} or where in ("entry", "document"):
            assert [is_unparsed(event) for event in await place.events()].count(True) == 1
        assert counts(await place.send(data)) == (0, 6, 0)


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null", b"[[]]", b'{"entry":[]}', b'{"entry":[{"id":"1"}]}', b"{"])
async def test_what_is_no_document_is_kept_as_it_came(tmp_path: Path, body: bytes) -> None:
    async with ground(tmp_path, "messenger") as place:
        event = await place.keep(body)
        assert (event.body, is_unparsed(event)) == (body, True)


NAMES = ["entry", "messaging", "standby", "changes", "field", "value", "sender", "recipient", "id", "message", "read"]


@given(json_values(NAMES))
def test_no_shape_stops_the_splitter_or_the_rules(data: Any) -> None:
    assert take_apart("messenger", data)
    for part in (entry(data), entry(item(message=data)), {"id": PAGE, "field": data, "value": data}):
        assert take_apart("messenger", document(part))
