"""Slack: the challenge, events, commands and buttons, checked against Slack's own library."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from slack_sdk.signature import SignatureVerifier

from oncehook import clock
from tests.presets.messaging import FORM, SECRET, ask, ground, json_values, keys, send_as, take_apart

LIBRARY = SignatureVerifier(SECRET.decode())
AT = 1790000000


def event(event_id: str = "Ev1", app: str | None = "A1", **what: Any) -> dict[str, Any]:
    inner = {"type": "message", "channel": "C1", "user": "U1", "text": "Olá 🙂", "event_ts": f"{AT}.000200", **what}
    about = {"team_id": "T1", "event": inner, "type": "event_callback", "event_id": event_id, "event_time": AT + 1}
    return {**about, "api_app_id": app} if app else about


def signed(body: bytes, at: float | None = None) -> dict[str, str]:
    """As Slack's own library does it."""
    timestamp = str(int(clock.now() if at is None else at))
    signature = LIBRARY.generate_signature(timestamp=timestamp, body=body)
    assert signature is not None
    return {"X-Slack-Request-Timestamp": timestamp, "X-Slack-Signature": signature}


# -- the signature -----------------------------------------------------------------------------


async def test_what_the_library_signs_is_taken(tmp_path: Path) -> None:
    body = json.dumps(event()).encode()
    async with ground(tmp_path, "slack") as place:
        assert (await send_as(place, body, signed(body))).outcome == "accepted"
        # R10: the retry's own words decide nothing; only the key does
        retry = {**signed(body), "X-Slack-Retry-Num": "1", "X-Slack-Retry-Reason": "http_timeout"}
        assert (await send_as(place, body, retry)).outcome == "duplicate"
        other = json.dumps(event("Ev2")).encode()
        assert (await send_as(place, other, {**signed(other), "X-Slack-Retry-Num": "1"})).outcome == "accepted"


async def test_what_we_sign_the_library_takes(tmp_path: Path) -> None:
    async with ground(tmp_path, "slack") as place:
        ours = place.sign(place.draft(event()))
        headers = {name.decode(): value.decode() for name, value in ours.headers}
        assert LIBRARY.is_valid_request(ours.body, headers)
        assert not LIBRARY.is_valid_request(ours.body + b" ", headers)


@pytest.mark.parametrize("age", [290, -290])
async def test_inside_the_window(tmp_path: Path, age: int) -> None:
    async with ground(tmp_path, "slack") as place:
        assert (await send_as(place, b"{}", signed(b"{}", clock.now() - age))).reply.status == 200


@pytest.mark.parametrize(
    "headers",
    [
        dict,
        lambda: signed(b"{}", clock.now() - 310),
        lambda: signed(b"{}", clock.now() + 310),
        lambda: {"X-Slack-Signature": signed(b"{}")["X-Slack-Signature"]},
        lambda: {**signed(b"{}"), "X-Slack-Request-Timestamp": str(int(clock.now()) - 60)},
        lambda: {**signed(b"{}"), "X-Slack-Signature": signed(b"{}")["X-Slack-Signature"].replace("v0=", "v1=")},
        lambda: signed(b"{} "),
    ],
)
async def test_negative_cases(tmp_path: Path, headers: Callable[[], dict[str, str]]) -> None:
    async with ground(tmp_path, "slack") as place:
        assert (await send_as(place, b"{}", headers())).reply.status == 401
        assert await place.events() == []


# -- the challenge -----------------------------------------------------------------------------


async def test_the_challenge_comes_back_and_is_no_event(tmp_path: Path) -> None:
    async with ground(tmp_path, "slack") as place:
        asked = {
            "token": "x",
            "challenge": "3eZbrw1aBm2rZgRNFdxV2595E9CY3gmdALWMmHkvFXO7tYXAYM8P",
            "type": "url_verification",
        }
        receipt = await place.send(asked)
        assert (receipt.reply.status, receipt.outcome) == (200, "handshake")
        assert json.loads(receipt.reply.body) == {"challenge": asked["challenge"]}
        assert await place.events() == []


async def test_a_challenge_that_slack_did_not_sign(tmp_path: Path) -> None:
    async with ground(tmp_path, "slack") as place:
        asked = {"challenge": "<script>", "type": "url_verification"}
        receipt = await send_as(place, asked, {})
        assert receipt.reply.status == 401
        assert b"script" not in receipt.reply.body
        assert ask(place, b"type=url_verification&challenge=x").status == 401


@pytest.mark.parametrize(
    "data",
    [
        event(text="url_verification"),
        event(type="url_verification"),
        [{"type": "url_verification"}],
        b'"url_verification"',
        b"url_verification",
    ],
)
async def test_who_writes_the_word_asks_no_question(tmp_path: Path, data: Any) -> None:
    async with ground(tmp_path, "slack") as place:
        assert await place.outcome(data) == "accepted"


# -- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "kind", "subject"),
    [
        ({}, "message", "T1:C1"),
        ({"subtype": "bot_message"}, "message.bot_message", "T1:C1"),
        ({"type": "app_mention"}, "app_mention", "T1:C1"),
        ({"type": "channel_created", "channel": {"id": "C2", "name": "x"}}, "channel_created", "T1:C2"),
        ({"type": "reaction_added", "channel": None, "item": {"channel": "C3"}}, "reaction_added", "T1:C3"),
        ({"type": "user_change", "channel": None, "user": {"id": "U2"}}, "user_change", "T1:U2"),
        ({"type": "team_join", "channel": None, "user": None}, "team_join", None),
    ],
)
async def test_events(tmp_path: Path, what: dict[str, Any], kind: str, subject: str | None) -> None:
    async with ground(tmp_path, "slack") as place:
        kept = await place.keep(event(**what))
        assert (kept.type, kept.key, kept.subject) == (kind, "A1:Ev1", subject)
        assert kept.event_at == datetime.fromtimestamp(AT + 0.0002, UTC)
        assert await place.outcome(event(**what)) == "duplicate"


async def test_two_apps_at_one_address(tmp_path: Path) -> None:
    async with ground(tmp_path, "slack") as place:
        for app, outcome in (("A1", "accepted"), ("A2", "accepted"), ("A1", "duplicate"), (None, "accepted")):
            assert await place.outcome(event(app=app)) == outcome
        assert await keys(place) == ["A1:Ev1", "A2:Ev1", "Ev1"]


async def test_commands(tmp_path: Path) -> None:
    form = urlencode({"command": "/deploy", "team_id": "T1", "channel_id": "C1", "text": "olá", "trigger_id": "1.2.3"})
    async with ground(tmp_path, "slack") as place:
        kept = await place.keep(form, content_type=FORM)
        assert (kept.type, kept.key, kept.subject) == ("command./deploy", "1.2.3", "T1:C1")


async def test_buttons(tmp_path: Path) -> None:
    async with ground(tmp_path, "slack") as place:
        for trigger in ("1", "2"):
            pressed = {"type": "block_actions", "trigger_id": trigger, "team": {"id": "T1"}, "channel": {"id": "C1"}}
            kept = await place.keep(urlencode({"payload": json.dumps(pressed)}), content_type=FORM)
            assert kept.type == "interaction.block_actions"


async def test_rate_limits_have_no_id(tmp_path: Path) -> None:
    async with ground(tmp_path, "slack") as place:
        told = {"type": "app_rate_limited", "team_id": "T1", "minute_rate_limited": 1790000000, "api_app_id": "A1"}
        kept = await place.keep(told)
        assert (kept.type, (kept.key or "").partition(":")[0]) == ("app_rate_limited", "body_hash")
        assert await place.outcome(told) == "duplicate"


@pytest.mark.parametrize("body", ["payload=%7B", "payload=", "ssl_check=1", "payload=%5B1%5D"])
async def test_odd_forms_are_kept(tmp_path: Path, body: str) -> None:
    async with ground(tmp_path, "slack") as place:
        assert (await place.keep(body, content_type=FORM)).type == "event"


@given(json_values(["type", "event", "subtype", "channel", "user", "id", "team_id", "event_id"]))
def test_no_shape_stops_the_rules(data: Any) -> None:
    take_apart("slack", data)
