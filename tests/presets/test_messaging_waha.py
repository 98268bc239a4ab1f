"""WAHA: HMAC-SHA512, an event id where there is one, and the message's id where there is none."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.presets.messaging import SECRET, ground, json_values, keys, send_as, take_apart

CHAT, GROUP, AT = "5511988880142@c.us", "120363000000000001@g.us", 1790000000
ID = f"false_{CHAT}_3EB0A"


def event(name: str, payload: Any, event_id: str | None = "evt_1", **more: Any) -> dict[str, Any]:
    about = {"event": name, "session": "default", "engine": "NOWEB", "payload": payload, **more}
    return {"id": event_id, **about} if event_id else about


def message(message_id: str = ID, **more: Any) -> dict[str, Any]:
    return {"id": message_id, "timestamp": AT, "from": CHAT, "fromMe": False, "body": "Olá 🙂", "ack": 1, **more}


def signature(body: bytes, algorithm: str = "sha512", secret: bytes = SECRET) -> dict[str, str]:
    return {"X-Webhook-Hmac": hmac.new(secret, body, algorithm).hexdigest(), "X-Webhook-Hmac-Algorithm": algorithm}


async def test_signed_with_sha512(tmp_path: Path) -> None:
    body = json.dumps(event("message", message())).encode()
    async with ground(tmp_path, "waha") as place:
        headers = {**signature(body), "X-Webhook-Request-Id": "1", "X-Webhook-Timestamp": "1790000000000"}
        assert (await send_as(place, body, headers)).outcome == "accepted"
        assert (await send_as(place, body, {**headers, "X-Webhook-Request-Id": "2"})).outcome == "duplicate"


@pytest.mark.parametrize("algorithm", ["sha256", "sha1", "md5"])
async def test_the_header_does_not_choose_the_algorithm(tmp_path: Path, algorithm: str) -> None:
    async with ground(tmp_path, "waha") as place:
        assert (await send_as(place, b"{}", signature(b"{}", algorithm))).reply.status == 401
        right = hmac.new(SECRET, b"{}", hashlib.sha512).hexdigest()
        lying = {"X-Webhook-Hmac": right, "X-Webhook-Hmac-Algorithm": algorithm}
        assert (await send_as(place, b"{}", lying)).reply.status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Webhook-Hmac": ""},
        signature(b"{} "),
        signature(b"{}", secret=b"another"),
        {"X-Webhook-Hmac": "sha512=" + signature(b"{}")["X-Webhook-Hmac"]},
        {**signature(b"{}"), "X_Webhook_Hmac": signature(b"{}")["X-Webhook-Hmac"]},
    ],
)
async def test_negative_cases(tmp_path: Path, headers: dict[str, str]) -> None:
    async with ground(tmp_path, "waha") as place:
        assert (await send_as(place, b"{}", headers)).reply.status == 401
        assert await place.events() == []


@pytest.mark.parametrize(
    ("payload", "subject"),
    [
        (message(), f"default:{CHAT}"),
        (message(f"true_{CHAT}_3EB0A", fromMe=True, **{"from": "5511977770100@c.us"}), f"default:{CHAT}"),
        (message(f"false_{GROUP}_3EB0A_{CHAT}", **{"from": GROUP}), f"default:{GROUP}"),
        (message("3EB0A"), f"default:{CHAT}"),
        (message("a_b_c"), f"default:{CHAT}"),
        ({"status": "WORKING"}, "default"),
    ],
)
async def test_subject_is_the_chat(tmp_path: Path, payload: dict[str, Any], subject: str) -> None:
    async with ground(tmp_path, "waha") as place:
        kept = await place.keep(event("message.any", payload))
        assert (kept.type, kept.key, kept.subject) == ("message.any", "evt_1", subject)


async def test_the_time_is_the_messages_or_the_events(tmp_path: Path) -> None:
    async with ground(tmp_path, "waha") as place:
        first = await place.keep(event("message", message(), timestamp=(AT + 9) * 1000))
        second = await place.keep(event("session.status", {"status": "WORKING"}, "evt_2", timestamp=AT * 1000))
        assert first.event_at == second.event_at == datetime.fromtimestamp(AT, UTC)


async def test_versions_without_an_event_id(tmp_path: Path) -> None:
    async with ground(tmp_path, "waha") as place:
        for name, payload, outcome in (
            ("message", message(), "accepted"),
            ("message", message(), "duplicate"),
            ("message.any", message(), "accepted"),
            ("message", message(f"false_{CHAT}_3EB0B"), "accepted"),
            ("message.ack", message(ack=1), "accepted"),
            ("message.ack", message(ack=3), "accepted"),
            ("message.ack", message(ack=3), "duplicate"),
            ("message.ack", message(ack=3, participant="1@c.us"), "accepted"),
        ):
            assert await place.outcome(event(name, payload, None)) == outcome
        assert (await keys(place))[:2] == [f"default:message:{ID}", f"default:message.any:{ID}"]
        assert f"default:message.ack:{ID}:3:1@c.us" in await keys(place)


async def test_a_chats_id_is_not_taken_for_a_messages(tmp_path: Path) -> None:
    """Without an event id, two presences of one chat would else be one event for a month."""
    async with ground(tmp_path, "waha") as place:
        for state, outcome in (("typing", "accepted"), ("typing", "duplicate"), ("paused", "accepted")):
            data = event("presence.update", {"id": CHAT, "presences": [{"lastKnownPresence": state}]}, None)
            assert await place.outcome(data) == outcome
        assert place.source.missing_keep == 600


async def test_only_acknowledgements_are_ranked(tmp_path: Path) -> None:
    async with ground(tmp_path, "waha") as place:
        await place.send(event("message", message(ack=4), "evt_1"))
        await place.send(event("message.ack", message(ack=3), "evt_2"))
        await place.send(event("message.ack", message(ack=-1), "evt_3"))
        assert [one.rank for one in await place.events()] == [None, 3, -1]
        assert (await place.events())[1].rank_scope == f"default:{ID}"


@given(json_values(["id", "event", "session", "payload", "from", "ack"]))
def test_no_shape_stops_the_rules(data: Any) -> None:
    take_apart("waha", data)
    take_apart("waha", event("message.ack", data, None))
