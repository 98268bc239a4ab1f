"""Twilio: forms signed with their address, checked against Twilio's own library, and an answer it can read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from urllib.parse import urlencode
from xml.etree import ElementTree as ET

import pytest
from twilio.request_validator import RequestValidator  # type: ignore[import-untyped]

from tests.presets.messaging import FORM, SECRET, ground, keys, send_as
from tests.presets.trial import URL

LIBRARY = RequestValidator(SECRET.decode())
INBOUND = {"MessageSid": "SM1", "SmsStatus": "received", "From": "+15550100142", "To": "+15550100100", "Body": "Olá 🙂"}


def callback(status: str, sid: str = "SM1", **more: str) -> dict[str, str]:
    return {"MessageSid": sid, "MessageStatus": status, "SmsSid": sid, "SmsStatus": status, **more}


def signed(form: dict[str, str], url: str = URL) -> dict[str, str]:
    """As Twilio's own library does it."""
    return {"X-Twilio-Signature": LIBRARY.compute_signature(url, form)}


# -- the signature -----------------------------------------------------------------------------


async def test_what_the_library_signs_is_taken(tmp_path: Path) -> None:
    async with ground(tmp_path, "twilio") as place:
        for content_type in (FORM, FORM + "; charset=UTF-8"):
            taken = await send_as(place, urlencode(INBOUND), signed(INBOUND), content_type=content_type)
            assert taken.reply.status == 200
        assert await keys(place) == ["SM1"]


async def test_what_we_sign_the_library_takes(tmp_path: Path) -> None:
    async with ground(tmp_path, "twilio") as place:
        ours = place.sign(place.draft(urlencode(INBOUND), content_type=FORM))
        signature = dict(ours.headers)[b"x-twilio-signature"].decode()
        assert LIBRARY.validate(URL, INBOUND, signature)
        assert not LIBRARY.validate(URL + "x", INBOUND, signature)


async def test_json_is_covered_by_its_hash_in_the_address(tmp_path: Path) -> None:
    body = b'{"hello": "world"}'
    query = "bodySHA256=" + hashlib.sha256(body).hexdigest()
    signature = {"X-Twilio-Signature": LIBRARY.compute_signature(f"{URL}?{query}", {})}
    async with ground(tmp_path, "twilio") as place:
        assert (await send_as(place, body + b" ", signature, query=query)).reply.status == 401
        assert (await send_as(place, body, signature, query=query)).outcome == "accepted"
        assert (await send_as(place, body, signature, query=query)).outcome == "duplicate"


@pytest.mark.parametrize(
    ("form", "headers"),
    [
        (INBOUND, {}),
        (INBOUND, {"X-Twilio-Signature": ""}),
        (INBOUND | {"Body": "Other"}, signed(INBOUND)),
        (INBOUND | {"Extra": "1"}, signed(INBOUND)),
        (INBOUND, signed(INBOUND, "https://hooks.example.com/in/another")),
        (INBOUND, {"X-Twilio-Signature": RequestValidator("another").compute_signature(URL, INBOUND)}),
        (INBOUND, {**signed(INBOUND), "X-Twilio-Webhooks-Signature-Settings": "key=1,algorithm=HMAC_MD5"}),
    ],
)
async def test_negative_cases(tmp_path: Path, form: dict[str, str], headers: dict[str, str]) -> None:
    async with ground(tmp_path, "twilio") as place:
        assert (await send_as(place, urlencode(form), headers, content_type=FORM)).reply.status == 401
        assert await place.events() == []


# -- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "kind", "key", "subject"),
    [
        (INBOUND, "message.received", "SM1", "SM1"),
        ({"MessageSid": "SM1", "Body": "x"}, "message.received", "SM1", "SM1"),
        (callback("sent"), "message.sent", "SM1:sent", "SM1"),
        (callback("failed", ErrorCode="30003"), "message.failed", "SM1:failed:30003", "SM1"),
        (
            {"CallSid": "CA1", "CallStatus": "completed", "SequenceNumber": "3"},
            "call.completed",
            "CA1:completed:3",
            "CA1",
        ),
    ],
)
async def test_key_type_and_subject(tmp_path: Path, form: dict[str, str], kind: str, key: str, subject: str) -> None:
    async with ground(tmp_path, "twilio") as place:
        event = await place.keep(urlencode(form), content_type=FORM)
        assert (event.type, event.key, event.subject, event.event_at) == (kind, key, subject, None)
        assert event.body == urlencode(form).encode()
        assert await place.outcome(urlencode(form), content_type=FORM) == "duplicate"


async def test_each_status_of_a_message_is_an_event_and_has_its_rank(tmp_path: Path) -> None:
    async with ground(tmp_path, "twilio") as place:
        for status in ("delivered", "queued", "sent", "undelivered"):
            assert await place.outcome(urlencode(callback(status)), content_type=FORM) == "accepted"
        await place.send(urlencode(INBOUND), content_type=FORM)
        ranks = [(event.type, event.rank, event.rank_scope) for event in await place.events()]
        assert [rank for _, rank, _ in ranks] == [5, 2, 4, None, None]
        assert {scope for _, _, scope in ranks} == {"SM1"}


async def test_a_call_may_ask_any_number_of_times(tmp_path: Path) -> None:
    """Each press of a key asks anew under one sid and one status: none of them is a copy of another."""
    async with ground(tmp_path, "twilio") as place:
        for digits, outcome in (("1", "accepted"), ("2", "accepted"), ("1", "duplicate")):
            form = {"CallSid": "CA1", "CallStatus": "in-progress", "Digits": digits}
            assert await place.outcome(urlencode(form), content_type=FORM) == outcome


async def test_conversations_have_several_events_for_one_message(tmp_path: Path) -> None:
    async with ground(tmp_path, "twilio") as place:
        for kind, body in (("onMessageAdded", "a"), ("onMessageUpdated", "b"), ("onMessageUpdated", "c")):
            form = {"EventType": kind, "ConversationSid": "CH1", "MessageSid": "IM1", "Body": body}
            event = await place.keep(urlencode(form), content_type=FORM)
            assert (event.type, event.subject) == (kind, "IM1")


@pytest.mark.parametrize("body", ["MessageSid=SM1&MessageSid=SM2", "MessageSid=", "a=b", "%FF=%FF"])
async def test_odd_forms_go_by_their_bytes(tmp_path: Path, body: str) -> None:
    async with ground(tmp_path, "twilio") as place:
        event = await place.keep(body, content_type=FORM)
        assert (event.key or "").startswith("body_hash:")
        assert event.type == "event"


# -- what is answered --------------------------------------------------------------------------


async def test_the_answer_says_do_nothing_in_twilios_language(tmp_path: Path) -> None:
    async with ground(tmp_path, "twilio") as place:
        for form in (INBOUND, INBOUND, INBOUND | {"Body": "Another"}):
            receipt = await place.send(urlencode(form), content_type=FORM)
            assert (receipt.reply.status, dict(receipt.reply.headers)[b"content-type"]) == (200, b"text/xml")
            answer = ET.fromstring(receipt.reply.body)
            assert (answer.tag, len(answer), answer.text) == ("Response", 0, None)
        assert receipt.outcome == "conflict"


async def test_a_refusal_is_still_ours(tmp_path: Path) -> None:
    async with ground(tmp_path, "twilio") as place:
        receipt = await send_as(place, urlencode(INBOUND), {}, content_type=FORM)
        assert json.loads(receipt.reply.body)["code"] == "signature_invalid"
