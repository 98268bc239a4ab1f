"""Discord: PINGs of both kinds, interactions and webhook events, with the payloads of its documentation."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from oncehook import clock
from oncehook.ingest import Receipt
from tests.presets.trial import Trial, trial

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex().encode()
APP = "1234560123453231555"


def signed(body: bytes, *, at: float | None = None) -> dict[str, str]:
    """As the documentation has it: hex of the signature over the timestamp's text and the raw body."""
    timestamp = str(int(clock.now() if at is None else at))
    signature = KEY.sign(timestamp.encode() + body).hex()
    return {"X-Signature-Ed25519": signature, "X-Signature-Timestamp": timestamp}


async def send(on: Trial, data: Any, **how: Any) -> Receipt:
    body = json.dumps(data).encode()
    return await on.take(on.draft(body, headers=signed(body, **how)))


def interaction(number: int, data: Any = None, **more: Any) -> dict[str, Any]:
    made = {"id": "786008729715212338", "application_id": APP, "type": number, "token": "A_UNIQUE_TOKEN", "version": 1}
    return {**made, **({} if data is None else {"data": data, "channel_id": "645027906669510667"}), **more}


def event(kind: str, data: Any, at: str = "2024-10-18T14:42:53.064834") -> dict[str, Any]:
    return {"version": 1, "application_id": APP, "type": 1, "event": {"type": kind, "timestamp": at, "data": data}}


async def test_pings_of_both_kinds_are_answered_and_not_kept(tmp_path: Path) -> None:
    async with trial(tmp_path, "discord", secret=[PUBLIC]) as on:
        pong = await send(on, interaction(1))
        assert (pong.outcome, pong.reply.status, pong.reply.body) == ("handshake", 200, b'{"type":1}')
        empty = await send(on, {"version": 1, "application_id": APP, "type": 0})
        assert (empty.outcome, empty.reply.status, empty.reply.body) == ("handshake", 204, b"")
        assert (b"content-type", b"application/json") in empty.reply.headers
        assert await on.events() == []


async def test_wrong_signatures_are_refused_as_discord_tests_it(tmp_path: Path) -> None:
    async with trial(tmp_path, "discord", secret=[PUBLIC]) as on:
        body = json.dumps(interaction(1)).encode()
        good = signed(body)
        moved = str(int(good["X-Signature-Timestamp"]) + 1)
        for wrong in (
            {},
            {"X-Signature-Ed25519": good["X-Signature-Ed25519"]},
            {**good, "X-Signature-Timestamp": moved},
            {**good, "X-Signature-Ed25519": "00" * 64},
            {**good, "X-Signature-Ed25519": good["X-Signature-Ed25519"][:-2]},
            {**good, "X-Signature-Ed25519": "zz" * 64},
            signed(body, at=clock.now() - 1000),
            signed(body, at=clock.now() + 1000),
        ):
            assert (await on.take(on.draft(body, headers=wrong))).reply.status == 401, wrong
        assert (await on.take(on.draft(body, headers=good))).reply.status == 200
        # A webhook event that is tried again for ten minutes may carry its first signature.
        assert (await on.take(on.draft(body, headers=signed(body, at=clock.now() - 620)))).reply.status == 200


@pytest.mark.parametrize(
    ("sent", "kind", "said"),
    [
        (interaction(2, {"id": "1", "name": "cardsearch", "type": 1}), "command.cardsearch", {"type": 5}),
        (interaction(3, {"custom_id": "click_one", "component_type": 2}), "component", {"type": 6}),
        (interaction(5, {"custom_id": "cool_modal", "components": []}), "modal", {"type": 5}),
    ],
)
async def test_an_interaction_is_kept_once_and_answered_as_deferred(
    tmp_path: Path, sent: dict[str, Any], kind: str, said: dict[str, Any]
) -> None:
    async with trial(tmp_path, "discord", secret=[PUBLIC]) as on:
        first, again = await send(on, sent), await send(on, sent)
        assert [first.outcome, again.outcome] == ["accepted", "duplicate"]
        for receipt in (first, again):
            assert (receipt.reply.status, json.loads(receipt.reply.body)) == (200, said)
        [kept] = await on.events()
        assert (kept.type, kept.key, kept.subject) == (kind, f"{APP}:786008729715212338", "645027906669510667")


async def test_suggestions_are_answered_with_none_and_not_kept(tmp_path: Path) -> None:
    async with trial(tmp_path, "discord", secret=[PUBLIC]) as on:
        receipt = await send(on, interaction(4, {"id": "1", "name": "airhorn", "type": 1}))
        assert (receipt.outcome, receipt.reply.status) == ("ignored", 200)
        assert json.loads(receipt.reply.body) == {"type": 8, "data": {"choices": []}}
        assert await on.events() == []


async def test_webhook_events_are_answered_with_an_empty_204(tmp_path: Path) -> None:
    entitlement = {"application_id": APP, "id": "1234505980407808808", "type": 4, "user_id": "111178765189277770"}
    deleted = {"id": "1402406637632884857", "lobby_id": "1402399883394285659"}
    async with trial(tmp_path, "discord", secret=[PUBLIC]) as on:
        for sent in (
            event("APPLICATION_AUTHORIZED", {"integration_type": 1, "scopes": [], "user": {"id": "1"}}),
            event("APPLICATION_AUTHORIZED", {"integration_type": 1, "scopes": [], "user": {"id": "2"}}),
            event("ENTITLEMENT_CREATE", entitlement, "2024-10-18T18:41:21.109604"),
            event("LOBBY_MESSAGE_DELETE", deleted, "2025-08-05T21:44:09.412957"),
        ):
            for outcome in ("accepted", "duplicate"):
                receipt = await send(on, sent)
                assert (receipt.outcome, receipt.reply.status, receipt.reply.body) == (outcome, 204, b"")
        kept = await on.events()
        assert [(one.type, one.subject) for one in kept] == [
            ("APPLICATION_AUTHORIZED", "1"),
            ("APPLICATION_AUTHORIZED", "2"),
            ("ENTITLEMENT_CREATE", "111178765189277770"),
            ("LOBBY_MESSAGE_DELETE", "1402399883394285659"),
        ]
        assert kept[2].event_at == datetime(2024, 10, 18, 18, 41, 21, 109604, UTC)


@pytest.mark.parametrize(
    "sent",
    [[], 1, None, "x", {}, {"type": []}, {"id": 1, "type": {}}, {"type": 1, "event": 3}, {"id": "1", "type": 99}],
)
async def test_a_shape_that_nobody_documented_is_kept(tmp_path: Path, sent: Any) -> None:
    async with trial(tmp_path, "discord", secret=[PUBLIC]) as on:
        receipt = await send(on, sent)
        assert (receipt.outcome, receipt.reply.status) == ("accepted", 204)
        broken = b"{"
        assert (await on.take(on.draft(broken, headers=signed(broken)))).reply.status == 204
