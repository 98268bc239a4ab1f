"""Telegram: every kind of update has its chat, its type is the field beside `update_id`, and a token lets it in."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.presets.messaging import SECRET, ground, json_values, keys, send_as, take_apart

AT = 1790000000
USER = {"id": 7, "is_bot": False, "first_name": "Ana"}
CHAT = {"id": -1001, "type": "supergroup", "title": "Team"}
MESSAGE = {"message_id": 1, "from": USER, "chat": CHAT, "date": AT, "text": "Olá 🙂"}
TOKEN = "X-Telegram-Bot-Api-Secret-Token"


@pytest.mark.parametrize(
    ("kind", "what", "subject"),
    [
        ("message", MESSAGE, "-1001"),
        ("edited_message", MESSAGE | {"edit_date": AT + 60}, "-1001"),
        ("channel_post", MESSAGE, "-1001"),
        ("business_message", MESSAGE, "-1001"),
        ("callback_query", {"id": "1", "from": USER, "message": MESSAGE, "data": "x"}, "-1001"),
        ("callback_query", {"id": "1", "from": USER, "inline_message_id": "2", "data": "x"}, "7"),
        ("message_reaction", {"chat": CHAT, "message_id": 1, "user": USER, "date": AT}, "-1001"),
        ("my_chat_member", {"chat": CHAT, "from": USER, "date": AT}, "-1001"),
        ("chat_join_request", {"chat": CHAT, "from": USER, "user_chat_id": 7, "date": AT}, "-1001"),
        ("business_connection", {"id": "b", "user": USER, "user_chat_id": 70, "date": AT}, "70"),
        ("inline_query", {"id": "1", "from": USER, "query": "x"}, "7"),
        ("pre_checkout_query", {"id": "1", "from": USER}, "7"),
        ("poll", {"id": "9000", "question": "?"}, "9000"),
        ("poll_answer", {"poll_id": "9000", "user": USER, "option_ids": [0]}, "7"),
        ("something_new", {"a": 1}, None),
    ],
)
async def test_every_kind_of_update(tmp_path: Path, kind: str, what: dict[str, Any], subject: str | None) -> None:
    async with ground(tmp_path, "telegram") as place:
        event = await place.keep({"update_id": 10000, kind: what})
        assert (event.type, event.key, event.subject, event.marks) == (kind, "10000", subject, 0)
        moment = what.get("edit_date") or what.get("date")
        assert event.event_at == (datetime.fromtimestamp(moment, UTC) if moment else None)
        assert await place.outcome({"update_id": 10000, kind: what}) == "duplicate"


async def test_a_smaller_id_is_not_an_older_update(tmp_path: Path) -> None:
    async with ground(tmp_path, "telegram") as place:
        for update in (10002, 10001, 3):
            assert await place.outcome({"update_id": update, "message": MESSAGE}) == "accepted"
        assert await keys(place) == ["10002", "10001", "3"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {TOKEN: ""},
        {TOKEN: "another"},
        {TOKEN: SECRET.decode().upper()},
        {TOKEN: f"Bearer {SECRET.decode()}"},
        {"X_Telegram_Bot_Api_Secret_Token": SECRET.decode()},
        {TOKEN: SECRET.decode(), "X_Telegram_Bot_Api_Secret_Token": SECRET.decode()},
    ],
)
async def test_negative_cases(tmp_path: Path, headers: dict[str, str]) -> None:
    async with ground(tmp_path, "telegram") as place:
        assert (await send_as(place, {"update_id": 1, "message": MESSAGE}, headers)).reply.status == 401
        assert await place.events() == []


async def test_the_token_lets_it_in_and_is_not_kept(tmp_path: Path) -> None:
    async with ground(tmp_path, "telegram") as place:
        taken = await send_as(place, {"update_id": 1, "message": MESSAGE}, {TOKEN: SECRET.decode()})
        assert taken.outcome == "accepted"
        [event] = await place.events()
        assert b"x-telegram-bot-api-secret-token: [masked]" in event.request_head
        assert SECRET not in place.bytes_on_disk()


@pytest.mark.parametrize("body", [{}, {"message": MESSAGE}, {"update_id": None, "message": MESSAGE}, [], "text"])
async def test_without_an_id_the_body_decides(tmp_path: Path, body: Any) -> None:
    async with ground(tmp_path, "telegram") as place:
        assert await place.outcome(body if body != "text" else b'"text"') == "accepted"
        assert await place.outcome(body if body != "text" else b'"text"') == "duplicate"
        assert all((key or "").startswith("body_hash:") for key in await keys(place))


@given(json_values(["update_id", "message", "chat", "from", "id", "date"]))
def test_no_shape_stops_the_rules(data: Any) -> None:
    take_apart("telegram", data)
