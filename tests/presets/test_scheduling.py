"""Acuity, Calendly, Typeform and Zoom, end to end into a real store.

None of them publishes a signature to test with, or a Python library that makes one: these are made here, by hand.
"""

from __future__ import annotations

import base64
import hmac
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oncehook import clock, presets
from oncehook.model import Arrival, Mark
from tests.presets.trial import Trial, trial, try_sample

NAMES = ("acuity", "calendly", "typeform", "zoom")
SAMPLES = [(name, kind) for name in NAMES for kind in presets.load(name).samples]


@pytest.mark.parametrize(("preset", "kind"), SAMPLES)
async def test_every_sample(tmp_path: Path, preset: str, kind: str) -> None:
    [event] = await try_sample(tmp_path, preset, kind)
    assert event.subject
    if preset != "acuity":
        assert event.event_at is not None
        assert abs(event.event_at.timestamp() - clock.now()) < 60


# -- Acuity ------------------------------------------------------------------------------------

FORM = "application/x-www-form-urlencoded"


def acuity(action: str, about: str = "4242") -> dict[str, Any]:
    return {"body": f"action={action}&id={about}&calendarID=1&appointmentTypeID=2", "content_type": FORM}


@pytest.mark.parametrize("action", ["scheduled", "canceled", "order.completed"])
async def test_what_happens_once_to_an_object_has_a_key(tmp_path: Path, action: str) -> None:
    async with trial(tmp_path, "acuity") as on:
        event = await on.keep(**acuity(action))
        assert (event.key, event.type, event.subject) == (f"4242:{action}", action, "4242")
        assert event.event_at is None
        assert await on.outcome(**acuity(action)) == "duplicate"
        assert await on.outcome(**acuity(action, "4243")) == "accepted"


@pytest.mark.parametrize("action", ["rescheduled", "changed", "something.new"])
async def test_what_may_happen_again_is_kept_every_time(tmp_path: Path, action: str) -> None:
    """Two reschedules are the same bytes as one reschedule sent twice; taking the second for a copy would lose it."""
    async with trial(tmp_path, "acuity") as on:
        assert on.source.preset is not None
        assert on.source.preset.coalesce is True
        for marks in (Mark.unkeyed, Mark.unkeyed | Mark.same_body):
            event = await on.keep(**acuity(action))
            assert (event.key, event.marks) == (None, marks)
            assert (event.type, event.subject) == (action, "4242")


async def test_static_and_dynamic_names_are_one(tmp_path: Path) -> None:
    async with trial(tmp_path, "acuity") as on:
        event = await on.keep(**acuity("appointment.scheduled"))
        assert (event.key, event.type) == ("4242:scheduled", "scheduled")
        await on.send(**acuity("scheduled"))
        assert len(await on.events()) == 1
        assert (await on.keep(**acuity("appointment.rescheduled"))).type == "rescheduled"


async def test_changed_can_be_ignored(tmp_path: Path) -> None:
    async with trial(tmp_path, "acuity", ignore=["changed"]) as on:
        for action in ("changed", "appointment.changed"):
            receipt = await on.send(**acuity(action))
            assert (receipt.outcome, receipt.reply.status) == ("ignored", 200)
        assert await on.outcome(**acuity("scheduled")) == "accepted"
        assert len(await on.events()) == 1


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("action=scheduled", FORM),
        ("action=scheduled&id=", FORM),
        ("action=scheduled&id=1&id=2", FORM),
        ("", FORM),
        ('{"action":"scheduled","id":1}', "application/json"),
    ],
)
async def test_an_odd_acuity_body_is_kept_without_a_key(tmp_path: Path, body: str, content_type: str) -> None:
    async with trial(tmp_path, "acuity") as on:
        event = await on.keep(body, content_type=content_type)
        assert (event.key, event.subject) == (None, None)
        assert event.body == body.encode()


async def test_an_acuity_signature_is_base64_of_the_bytes(tmp_path: Path) -> None:
    async with trial(tmp_path, "acuity", secret=[b"api key"]) as on:
        draft = on.draft(**acuity("scheduled"))
        digest = hmac.digest(b"api key", draft.body, "sha256")
        good = base64.b64encode(digest)
        assert (await on.take(with_header(draft, "x-acuity-signature", good))).outcome == "accepted"
        reordered = replace(draft, body=b"&".join(reversed(draft.body.split(b"&"))))
        assert (await on.take(with_header(reordered, "x-acuity-signature", good))).reply.status == 401
        for wrong in (digest.hex().encode(), good[:-2], b"sha256=" + good, b""):
            assert (await on.take(with_header(draft, "x-acuity-signature", wrong))).reply.status == 401


def with_header(arrival: Arrival, name: str, value: bytes) -> Arrival:
    kept = [(key, old) for key, old in arrival.headers if key != name.encode()]
    return replace(arrival, headers=[*kept, (name.encode(), value)])


# -- Calendly ----------------------------------------------------------------------------------

INVITEE = "https://api.calendly.com/scheduled_events/GBGB/invitees/ICCC"


def calendly(event: str, created_at: str = "2026-11-20T16:00:00.000000Z", **fields: Any) -> dict[str, Any]:
    return {
        "event": event,
        "created_at": created_at,
        "created_by": "https://api.calendly.com/users/AAAA",
        "payload": {"uri": INVITEE, "name": "Zoë", "no_show": None, **fields},
    }


async def test_a_calendly_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "calendly") as on:
        event = await on.keep(calendly("invitee.created"))
        assert event.key == "invitee.created:" + INVITEE.replace(":", "\\:")
        assert (event.type, event.subject) == ("invitee.created", INVITEE)
        assert event.event_at is not None
        assert event.event_at.isoformat() == "2026-11-20T16:00:00+00:00"


@pytest.mark.parametrize("kind", ["invitee.created", "invitee.canceled", "routing_form_submission.created"])
async def test_what_happens_to_an_invitee_once_is_one_event_whenever_it_comes(tmp_path: Path, kind: str) -> None:
    async with trial(tmp_path, "calendly") as on:
        assert await on.outcome(calendly(kind)) == "accepted"
        assert await on.outcome(calendly(kind)) == "duplicate"
        assert await on.outcome(calendly(kind, "2026-11-20T17:00:00Z")) == "conflict"
        assert len(await on.events()) == 1


@pytest.mark.parametrize("kind", ["invitee_no_show.created", "invitee_no_show.deleted", "event_type.updated"])
async def test_what_may_happen_again_is_told_apart_by_its_time(tmp_path: Path, kind: str) -> None:
    async with trial(tmp_path, "calendly") as on:
        assert await on.outcome(calendly(kind)) == "accepted"
        assert await on.outcome(calendly(kind)) == "duplicate"
        assert await on.outcome(calendly(kind, "2026-11-20T17:00:00Z")) == "accepted"


async def test_a_reschedule_is_two_events(tmp_path: Path) -> None:
    new = INVITEE + "-NEW"
    async with trial(tmp_path, "calendly") as on:
        assert await on.outcome(calendly("invitee.canceled", rescheduled=True, new_invitee=new)) == "accepted"
        assert await on.outcome(calendly("invitee.created", uri=new, old_invitee=INVITEE)) == "accepted"


@pytest.mark.parametrize(
    "body",
    [
        {"event": "invitee.created"},
        {"event": ["odd"], "payload": {"uri": "x"}},
        {"payload": []},
        [],
        "not json",
        "null",
    ],
)
async def test_an_odd_calendly_body_is_keyed_by_its_hash(tmp_path: Path, body: object) -> None:
    async with trial(tmp_path, "calendly") as on:
        event = await on.keep(body)
        assert event.key is not None
        assert event.key.startswith("body_hash:")
        assert await on.outcome(body) == "duplicate"


async def test_which_calendly_signatures_count(tmp_path: Path) -> None:
    async with trial(tmp_path, "calendly", secret=[b"signing key"]) as on:
        draft = on.draft(calendly("invitee.created"))

        def signed(key: bytes, at: float) -> Arrival:
            stamp = str(int(at)).encode()
            digest = hmac.digest(key, stamp + b"." + draft.body, "sha256").hex().encode()
            return with_header(draft, "calendly-webhook-signature", b"t=" + stamp + b",v1=" + digest)

        now = clock.now()
        for arrival in (
            draft,
            signed(b"other", now),
            signed(b"signing key", now - 301),
            signed(b"signing key", now + 330),
        ):
            assert (await on.take(arrival)).reply.status == 401
        assert (await on.take(signed(b"signing key", now))).outcome == "accepted"


# -- Typeform ----------------------------------------------------------------------------------


def typeform(event_id: str = "LtWXD3crgy", **fields: Any) -> dict[str, Any]:
    response = {
        "form_id": "lT4Z3j",
        "token": "a3a12ec67a1365927098a606107fac15",
        "submitted_at": "2026-01-18T18:17:02Z",
        "landed_at": "2026-01-18T18:07:02Z",
        "answers": [{"type": "text", "text": "João"}],
    }
    return {"event_id": event_id, "event_type": "form_response", "form_response": {**response, **fields}}


async def test_a_typeform_response(tmp_path: Path) -> None:
    async with trial(tmp_path, "typeform") as on:
        event = await on.keep(typeform())
        assert (event.key, event.type) == ("LtWXD3crgy", "form_response")
        assert event.subject == "lT4Z3j:a3a12ec67a1365927098a606107fac15"
        assert event.event_at is not None
        assert event.event_at.isoformat() == "2026-01-18T18:17:02+00:00"
        unfinished = await on.keep(typeform("2", submitted_at=None, token=None))
        assert unfinished.subject == "lT4Z3j"
        assert unfinished.event_at is not None
        assert unfinished.event_at.isoformat() == "2026-01-18T18:07:02+00:00"


@pytest.mark.parametrize("body", [{"event_type": "form_response"}, {"event_id": {}}, [], "not json"])
async def test_an_odd_typeform_body_is_kept_without_a_key(tmp_path: Path, body: object) -> None:
    async with trial(tmp_path, "typeform") as on:
        assert Mark.unkeyed in (await on.keep(body)).marks


async def test_a_typeform_signature_is_base64_behind_its_prefix(tmp_path: Path) -> None:
    async with trial(tmp_path, "typeform", secret=[b"secret"]) as on:
        draft = on.draft(typeform())
        digest = hmac.digest(b"secret", draft.body, "sha256")
        good = base64.b64encode(digest)
        assert (await on.take(with_header(draft, "typeform-signature", b"sha256=" + good))).outcome == "accepted"
        for wrong in (good, b"sha256=" + digest.hex().encode(), b"sha1=" + good, b"sha256="):
            receipt = await on.take(with_header(draft, "typeform-signature", wrong))
            # 404 and 410 would switch the webhook off
            assert receipt.reply.status == 401


# -- Zoom --------------------------------------------------------------------------------------


def zoom(event: str = "meeting.started", at: int = 1_790_000_000_123, **fields: Any) -> dict[str, Any]:
    about = {"id": "1234567890", "uuid": "4444AAAiAAAAAiAiAiiAii==", "topic": "Reunião"}
    return {"event": event, "event_ts": at, "payload": {"account_id": "AAAAAABBBB", "object": {**about, **fields}}}


async def test_a_zoom_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "zoom") as on:
        event = await on.keep(zoom())
        assert event.key == "meeting.started:1790000000123:4444AAAiAAAAAiAiAiiAii==::::"
        assert (event.type, event.subject) == ("meeting.started", "4444AAAiAAAAAiAiAiiAii==")
        assert event.event_at is not None
        assert event.event_at.timestamp() == 1_790_000_000.123
        assert await on.outcome(zoom()) == "duplicate"
        assert await on.outcome(zoom(at=1_790_000_000_124)) == "accepted"
        assert await on.outcome(zoom("meeting.ended")) == "accepted"


async def test_two_who_join_in_the_same_millisecond_are_two_events(tmp_path: Path) -> None:
    async with trial(tmp_path, "zoom") as on:
        for who in ("16778240", "16778241"):
            joined = zoom("meeting.participant_joined", participant={"user_id": who, "user_name": "Ana"})
            event = await on.keep(joined)
            assert event.subject == "4444AAAiAAAAAiAiAiiAii=="
            assert await on.outcome(joined) == "duplicate"


async def test_a_zoom_event_about_something_else(tmp_path: Path) -> None:
    """A user has an id and no uuid; a call has neither, and is told apart by all that it says."""
    async with trial(tmp_path, "zoom") as on:
        user = await on.keep(zoom("user.updated", uuid=None, id="z8yCxTTTTSiw02QgCAp8uQ"))
        assert user.subject == "z8yCxTTTTSiw02QgCAp8uQ"
        assert user.key is not None
        assert user.key.startswith("user.updated:")
        call = zoom("phone.callee_ringing", uuid=None, id=None, call_id="6998252509084512241")
        ringing = await on.keep(call)
        assert ringing.subject == "6998252509084512241"
        assert ringing.key is not None
        assert ringing.key.startswith("body_hash:")
        assert await on.outcome(call) == "duplicate"
        call["payload"]["object"]["callee"] = {"extension_number": 1002}
        assert await on.outcome(call) == "accepted"
        gone = {"event": "app_deauthorized", "payload": {"account_id": "AAAAAABBBB", "user_id": "u"}}
        assert (await on.keep(gone)).subject == "AAAAAABBBB"


@pytest.mark.parametrize("body", [{"event": "x"}, {"payload": "endpoint.url_validation"}, [], "not json", "7"])
async def test_an_odd_zoom_body_is_kept(tmp_path: Path, body: object) -> None:
    async with trial(tmp_path, "zoom") as on:
        event = await on.keep(body)
        assert event.key is not None
        assert await on.outcome(body) == "duplicate"


def challenge(plain: object = "qgg8vlvZRS6UYooatFL8Aw") -> dict[str, Any]:
    return {"payload": {"plainToken": plain}, "event_ts": 1654503849680, "event": "endpoint.url_validation"}


def proof(secret: bytes, plain: str = "qgg8vlvZRS6UYooatFL8Aw") -> dict[str, str]:
    return {"plainToken": plain, "encryptedToken": hmac.digest(secret, plain.encode(), "sha256").hex()}


async def test_zoom_asks_for_proof_and_gets_it(tmp_path: Path) -> None:
    async with trial(tmp_path, "zoom", secret=[b"secret token"]) as on:
        receipt = await on.send(challenge())
        assert (receipt.outcome, receipt.reply.status) == ("handshake", 200)
        assert json.loads(receipt.reply.body) == proof(b"secret token")
        assert await on.events() == []


async def test_the_proof_is_made_with_the_secret_that_zoom_knows(tmp_path: Path) -> None:
    async with trial(tmp_path, "zoom", secret=[b"old", b"new"], signing=b"new") as on:
        assert json.loads((await on.send(challenge())).reply.body) == proof(b"new")
        on.source.signing = b"old"
        assert json.loads((await on.send(challenge())).reply.body) == proof(b"old")


async def test_nobody_but_zoom_gets_a_proof(tmp_path: Path) -> None:
    """A proof for a token of one's choice would be a signature: `v0:time:body` is just such a token."""
    async with trial(tmp_path, "zoom", secret=[b"secret token"]) as on:
        forged = json.dumps(zoom())
        wanted = f"v0:{int(clock.now())}:{forged}"
        for body in (challenge(), challenge(wanted)):
            draft = on.draft(body)
            wrong = on.source.scheme.sign(draft, b"another", at=clock.now())
            for arrival in (draft, wrong, on.sign(draft, at=clock.now() - 301)):
                refused = await on.take(arrival)
                assert refused.reply.status == 401
                assert b"encryptedToken" not in refused.reply.body
            for method in ("GET", "PUT", "OPTIONS", "HEAD"):
                for arrival in (draft, on.sign(draft)):
                    greeting = on.inbox.receiver.greet(on.source, replace(arrival, method=method))
                    assert greeting.status == 401
                    assert b"encryptedToken" not in greeting.body
        # even signed: such a token is no question about the address
        receipt = await on.send(challenge(wanted))
        assert (receipt.outcome, receipt.reply.status) == ("accepted", 200)
        assert proof(b"secret token", wanted)["encryptedToken"].encode() not in receipt.reply.body


@pytest.mark.parametrize("plain", ["", None, 7, {"a": 1}, "x" * 1000, "olá", "a b", "a:b"])
async def test_an_odd_challenge_is_kept_as_an_event(tmp_path: Path, plain: object) -> None:
    async with trial(tmp_path, "zoom") as on:
        assert (await on.keep(challenge(plain))).type == "endpoint.url_validation"


async def test_words_in_a_topic_are_no_challenge(tmp_path: Path) -> None:
    async with trial(tmp_path, "zoom") as on:
        event = await on.keep({**zoom(topic="endpoint.url_validation"), "plainToken": "x"})
        assert event.type == "meeting.started"


CANARY = "eyJhbGciOiJIUzUxMiJ9-a-token-for-downloads"


async def kept_bytes(on: Trial) -> bytes:
    """What is in the database and its log, while it is open."""
    [event] = await on.events()
    return event.body + b"".join(arrival.body or b"" for arrival in await on.inbox.store.arrivals_of(event.id))


async def test_the_download_token_never_reaches_the_store(tmp_path: Path) -> None:
    async with trial(tmp_path, "zoom") as on:
        recording = {**zoom("recording.completed", recording_files=[{"id": "r1"}]), "download_token": CANARY}
        event = await on.keep(recording)
        assert json.loads(event.body) == {**recording, "download_token": "[redacted]"}
        # a retry with another token is the same event, and no conflict
        assert await on.outcome({**recording, "download_token": CANARY + "-2"}) == "duplicate"
        # neither is what differs kept in clear
        assert await on.outcome({**recording, "extra": 1}) == "conflict"
        assert CANARY.encode() not in await kept_bytes(on)
        assert CANARY.encode() not in on.bytes_on_disk()
        assert b"recording.completed" in on.bytes_on_disk()
    assert CANARY.encode() not in on.bytes_on_disk()


async def test_who_needs_the_download_token_can_have_it(tmp_path: Path) -> None:
    async with trial(tmp_path, "zoom", redact=[]) as on:
        body = json.dumps({**zoom("recording.completed"), "download_token": CANARY}).encode()
        assert (await on.keep(body)).body == body


async def test_which_zoom_signatures_count(tmp_path: Path) -> None:
    async with trial(tmp_path, "zoom", secret=[b"secret token"]) as on:
        draft = on.draft(zoom())

        def signed(key: bytes, at: float, prefix: bytes = b"v0") -> Arrival:
            stamp = str(int(at)).encode()
            digest = hmac.digest(key, prefix + b":" + stamp + b":" + draft.body, "sha256").hex().encode()
            timed = with_header(draft, "x-zm-request-timestamp", stamp)
            return with_header(timed, "x-zm-signature", prefix + b"=" + digest)

        now = clock.now()
        good = signed(b"secret token", now)
        late, early = signed(b"secret token", now - 301), signed(b"secret token", now + 330)
        # a new time over an old signature
        renewed = with_header(late, "x-zm-request-timestamp", str(int(now)).encode())
        for arrival in (draft, signed(b"other", now), signed(b"secret token", now, b"v1"), late, early, renewed):
            assert (await on.take(arrival)).reply.status == 401
        assert (await on.take(good)).outcome == "accepted"
