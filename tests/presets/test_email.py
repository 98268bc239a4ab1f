"""SendGrid and Mailgun, end to end into a real store, and SendGrid against its own library."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sendgrid.helpers.eventwebhook import EventWebhook  # type: ignore[import-untyped]

from oncehook import clock, presets, samples
from oncehook.errors import ConfigError
from oncehook.model import Mark
from oncehook.sources import build
from tests.presets.trial import trial

FORM = "application/x-www-form-urlencoded"


# -- SendGrid ----------------------------------------------------------------------------------


def told(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "email": "ana@example.com",
        "timestamp": 1795000000 + number,
        "event": "delivered",
        "sg_event_id": f"ev-{number}",
        "sg_message_id": "msg-1",
        **fields,
    }


async def test_sendgrid_batch_becomes_its_events(tmp_path: Path) -> None:
    async with trial(tmp_path, "sendgrid") as on:
        batch = [told(1), told(2, event="open"), told(3, event="bounce", email="rui@example.com")]
        receipt = await on.send(batch)
        assert json.loads(receipt.reply.body) == {
            "status": "accepted",
            "accepted": 3,
            "duplicates": 0,
            "conflicts": 0,
            "event_ids": receipt.event_ids,
        }
        events = await on.kept(receipt)
        assert [(event.key, event.type, event.subject) for event in events] == [
            ("ev-1", "delivered", "msg-1:ana@example.com"),
            ("ev-2", "open", "msg-1:ana@example.com"),
            ("ev-3", "bounce", "msg-1:rui@example.com"),
        ]
        assert [event.event_at for event in events] == [datetime.fromtimestamp(1795000000 + n, UTC) for n in (1, 2, 3)]
        assert [json.loads(event.body) for event in events] == [[item] for item in batch]
        assert len({event.batch_id for event in events}) == 1
        raw = await on.inbox.store.batch_body(events[0].batch_id or b"")
        assert raw is not None
        assert json.loads(raw[1]) == batch


async def test_sendgrid_repeats_in_other_batches_add_only_what_is_new(tmp_path: Path) -> None:
    async with trial(tmp_path, "sendgrid") as on:
        await on.send([told(1), told(2)])
        again = await on.send([told(2), told(3), told(1)])
        answer = json.loads(again.reply.body)
        assert (answer["accepted"], answer["duplicates"], answer["conflicts"]) == (1, 2, 0)
        # alone, in another spelling and order of fields: still the same
        alone = dict(reversed(told(1).items()))
        assert await on.outcome(json.dumps([alone], indent=1)) == "duplicate"
        assert await on.outcome([told(3), told(3)]) == "duplicate"
        assert len(await on.events()) == 3
        assert await on.outcome([told(1, email="someone-else@example.com")]) == "conflict"


async def test_sendgrid_odd_items_lose_nobody(tmp_path: Path) -> None:
    async with trial(tmp_path, "sendgrid") as on:
        nested = told(4, sg_event_id={"not": "a text"})
        receipt = await on.send([told(1), 42, None, ["x"], nested, told(2)])
        assert receipt.outcome == "accepted"
        events = await on.kept(receipt)
        assert [event.key for event in events if event.key and event.key.startswith("ev-")] == ["ev-1", "ev-2"]
        assert [json.loads(event.body) for event in events if event.marks & Mark.unparsed] == [[42], [None], [["x"]]]
        assert len(events) == 6
        # what has no id is known by its content
        assert await on.outcome([42]) == "duplicate"
        assert await on.outcome([nested]) == "duplicate"


@pytest.mark.parametrize("body", ["[]", "{}", "not json", "", '{"event":"delivered"}', "[[[[", "null", '"text"'])
async def test_sendgrid_odd_bodies_are_kept_or_acknowledged(tmp_path: Path, body: str) -> None:
    async with trial(tmp_path, "sendgrid") as on:
        receipt = await on.send(body)
        assert receipt.reply.status == 200
        kept = await on.events()
        assert [event.body for event in kept] == ([] if body == "[]" else [body.encode()])


async def test_sendgrid_signs_what_its_library_verifies(tmp_path: Path) -> None:
    library = EventWebhook()
    async with trial(tmp_path, "sendgrid") as on:
        key = library.convert_public_key_to_ecdsa(on.source.secrets[0].decode())
        signed = samples.sign(on.source, samples.draft(on.source, "batch"))
        headers = {name.decode(): value.decode() for name, value in signed.headers}
        proof = (
            headers["x-twilio-email-event-webhook-signature"],
            headers["x-twilio-email-event-webhook-timestamp"],
        )
        assert library.verify_signature(signed.body.decode(), *proof, key)
        assert not library.verify_signature(signed.body.decode() + " ", *proof, key)


async def test_sendgrid_published_vector(tmp_path: Path) -> None:
    key = (
        "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEEDr2LjtURuePQzplybdC+u4CwrqDqBaWjcMMsTbhdbcwHBcepxo7yAQGhHPTnlvFYPAZFceEu/"
        "1FwCM/QmGUhA=="
    )
    body = '{"category":"example_payload","event":"test_event","message_id":"message_id"}'
    headers = {
        "x-twilio-email-event-webhook-signature": "MEUCIQCtIHJeH93Y+qpYeWrySphQgpNGNr/U+UyUlBkU6n7RAwIg"
        "JTz2C+8a8xonZGi6BpSzoQsbVRamr2nlxFDWYNH2j/0=",
        "x-twilio-email-event-webhook-timestamp": "1588788367",
    }
    async with trial(tmp_path, "sendgrid", secret=[key.encode()], tolerance="off") as on:
        genuine = on.draft(body, headers=headers)
        assert (await on.take(genuine)).outcome == "accepted"
        assert (await on.take(replace(genuine, body=genuine.body + b" "))).reply.status == 401
    (tmp_path / "strict").mkdir()
    async with trial(tmp_path / "strict", "sendgrid", secret=[key.encode()]) as on:
        assert (await on.take(on.draft(body, headers=headers))).reply.status == 401  # stale


async def test_sendgrid_tolerance_outlasts_its_retries(tmp_path: Path) -> None:
    async with trial(tmp_path, "sendgrid") as on:
        assert await on.outcome([told(1)], at=clock.now() - 24 * 3600) == "accepted"
        assert await on.outcome([told(2)], at=clock.now() - 26 * 3600) == "rejected"
        assert await on.outcome([told(2)], at=clock.now() + 26 * 3600) == "rejected"


def test_sendgrid_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="secret"):
        build("mail", preset=presets.load("sendgrid"))
    with pytest.raises(ConfigError, match="P-256"):
        build("mail", preset=presets.load("sendgrid"), secret=[b"not a key"])


# -- Mailgun -----------------------------------------------------------------------------------


def mail(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "signature": {},
        "event-data": {
            "id": f"ev-{number}",
            "event": "delivered",
            "timestamp": 1795000000.123,
            "recipient": "ana@example.com",
            "message": {"headers": {"message-id": "m1@mg.example.com"}},
            **fields,
        },
    }


async def test_mailgun_reads_an_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "mailgun") as on:
        event = await on.keep(mail())
        assert (event.key, event.type, event.subject) == ("ev-1", "delivered", "m1@mg.example.com:ana@example.com")
        assert event.event_at == datetime.fromtimestamp(1795000000.123, UTC)
        bare = await on.keep(mail(2, message=None, event="unsubscribed"))
        assert (bare.key, bare.type, bare.subject) == ("ev-2", "unsubscribed", "ana@example.com")


async def test_mailgun_signed_anew_is_a_duplicate(tmp_path: Path) -> None:
    async with trial(tmp_path, "mailgun") as on:
        await on.keep(mail())
        assert await on.outcome(mail()) == "duplicate"  # another token, another timestamp
        assert await on.outcome(mail(recipient="rui@example.com")) == "conflict"
        assert await on.outcome(mail(2)) == "accepted"


async def test_mailgun_without_an_id_is_kept_unkeyed(tmp_path: Path) -> None:
    async with trial(tmp_path, "mailgun") as on:
        event = await on.keep({"signature": {}, "event-data": {"event": "opened"}})
        assert (event.key, event.type, event.marks) == (None, "opened", Mark.unkeyed)


async def test_mailgun_forwarded_mail_is_a_form(tmp_path: Path) -> None:
    body = "recipient=ana%40example.com&sender=rui%40example.com&subject=Ol%C3%A1&Message-Id=%3Cm7%40mg.example.com%3E"
    async with trial(tmp_path, "mailgun") as on:
        event = await on.keep(body, content_type=FORM)
        assert event.key == "<m7@mg.example.com>:ana@example.com"
        assert event.subject == event.key
        assert event.type == "event"
        other = body.replace("ana", "rui")
        assert await on.outcome(other, content_type=FORM) == "accepted"


async def test_mailgun_signs_its_token_and_nothing_else(tmp_path: Path) -> None:
    async with trial(tmp_path, "mailgun") as on:
        genuine = on.sign(on.draft(mail()))
        data = json.loads(genuine.body)
        for field in ("token", "timestamp", "signature"):
            spoilt = {**data, "signature": {**data["signature"], field: _other(data["signature"][field])}}
            assert (await on.take(replace(genuine, body=json.dumps(spoilt).encode()))).reply.status == 401
        without: list[Any] = [{}, {"signature": {}}, {**data, "signature": None}, []]
        for missing in without:
            assert (await on.take(replace(genuine, body=json.dumps(missing).encode()))).reply.status == 401
        # and this is why the page says: a hint
        data["event-data"]["id"] = "written by somebody else"
        assert (await on.take(replace(genuine, body=json.dumps(data).encode()))).outcome == "accepted"
        assert on.source.preset is not None
        assert not on.source.preset.body_authenticated
        assert not on.source.preset.key_authenticated


def _other(text: str) -> str:
    return ("1" if text[0] != "1" else "2") + text[1:]


async def test_mailgun_takes_the_parents_signature(tmp_path: Path) -> None:
    async with trial(tmp_path, "mailgun") as on:
        data = json.loads(on.sign(on.draft(mail())).body)
        good = data["signature"].pop("signature")
        data["signature"] |= {"signature": "0" * 64, "parent-signature": good}
        assert (await on.take(on.draft(data))).outcome == "accepted"


async def test_mailgun_tolerance_outlasts_its_retries(tmp_path: Path) -> None:
    async with trial(tmp_path, "mailgun") as on:
        assert await on.outcome(mail(1), at=clock.now() - 9 * 3600) == "accepted"
        assert await on.outcome(mail(2), at=clock.now() - 13 * 3600) == "rejected"


async def test_mailgun_is_never_told_to_drop_an_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "mailgun") as on:
        unsigned = await on.take(on.draft(mail()))
        assert 406 not in {unsigned.reply.status, on.source.base.unavailable, on.source.base.accepted}
