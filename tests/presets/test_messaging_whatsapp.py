"""WhatsApp Cloud API: batches taken apart, statuses, repeats that came in other company, text escaped on the wire."""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncehook.model import Arrival
from oncehook.payload import BodyHash
from oncehook.presets import whatsapp_cloud
from oncehook.sources import Odd
from tests.presets.messaging import (
    JUNK,
    SECRET,
    ask,
    counts,
    ground,
    is_unparsed,
    json_values,
    keys,
    meta_signature,
    send_as,
    take_apart,
)
from tests.presets.trial import Trial

NUMBER, ANA, RUI = "106540352242922", "5511988880142", "5511966660177"
AT = 1790000000


def message(wamid: str, sender: str = ANA, text: str = "Olá 🙂", **more: Any) -> dict[str, Any]:
    return {"from": sender, "id": wamid, "timestamp": str(AT), "type": "text", "text": {"body": text}, **more}


def status(wamid: str, word: str, recipient: str = ANA, **more: Any) -> dict[str, Any]:
    return {"id": wamid, "status": word, "timestamp": str(AT + 1), "recipient_id": recipient, **more}


def value(number: str = NUMBER, **lists: Any) -> dict[str, Any]:
    about = {"display_phone_number": "15550783881", "phone_number_id": number}
    return {"messaging_product": "whatsapp", "metadata": about, **lists}


def change(number: str = NUMBER, field: str = "messages", **lists: Any) -> dict[str, Any]:
    return {"value": value(number, **lists), "field": field}


def document(*changes: Any, **more: Any) -> dict[str, Any]:
    entry = {"id": "102290129340398", "changes": list(changes), **more}
    return {"object": "whatsapp_business_account", "entry": [entry]}


def contact(number: str, name: str = "Ana") -> dict[str, Any]:
    return {"profile": {"name": name}, "wa_id": number}


BATCH = document(
    change(contacts=[contact(ANA), contact(RUI, "Rui")], messages=[message("wamid.A"), message("wamid.B", RUI)]),
    change(statuses=[status("wamid.C", word) for word in ("sent", "delivered", "read")]),
)


# -- taking apart ------------------------------------------------------------------------------


async def test_two_messages_and_three_statuses_are_five_events(tmp_path: Path) -> None:
    body = json.dumps(BATCH).encode()
    async with ground(tmp_path, "whatsapp-cloud") as place:
        receipt = await send_as(place, body, meta_signature(body))
        assert receipt.reply.status == 200
        assert json.loads(receipt.reply.body)["status"] == "accepted"
        assert counts(receipt) == (5, 0, 0)
        events = await place.events()
        assert [(event.type, event.key) for event in events] == [
            ("message.text", f"{NUMBER}:wamid.A"),
            ("message.text", f"{NUMBER}:wamid.B"),
            ("status.sent", f"{NUMBER}:wamid.C:sent"),
            ("status.delivered", f"{NUMBER}:wamid.C:delivered"),
            ("status.read", f"{NUMBER}:wamid.C:read"),
        ]
        assert [event.subject for event in events] == [f"{NUMBER}:{who}" for who in (ANA, RUI, ANA, ANA, ANA)]
        assert [event.event_at for event in events[1:3]] == [
            datetime.fromtimestamp(AT, UTC),
            datetime.fromtimestamp(AT + 1, UTC),
        ]
        assert [(event.rank, event.rank_scope) for event in events] == [
            (None, None),
            (None, None),
            (0, "wamid.C"),
            (1, "wamid.C"),
            (2, "wamid.C"),
        ]


async def test_each_event_is_the_envelope_with_that_one_item(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        await place.send(BATCH)
        bodies = [json.loads(event.body) for event in await place.events()]
        assert bodies[1] == document(change(contacts=[contact(RUI, "Rui")], messages=[message("wamid.B", RUI)]))
        assert bodies[3] == document(change(statuses=[status("wamid.C", "delivered")]))


async def test_the_request_itself_is_kept_once(tmp_path: Path) -> None:
    body = json.dumps(BATCH, indent=1).encode()
    async with ground(tmp_path, "whatsapp-cloud") as place:
        await place.send(body)
        [batch] = {event.batch_id for event in await place.events()}
        assert batch is not None
        kept = await place.inbox.store.batch_body(batch)
        assert kept is not None
        assert kept[1] == body
        assert place.bytes_on_disk().count(body[-200:]) == 1  # its end: the whole lies in several pages


async def test_a_thousand_in_one_request(tmp_path: Path) -> None:
    many = [message(f"wamid.{number}", f"55119{number:08}") for number in range(1000)]
    people = [contact(one["from"]) for one in many]
    async with ground(tmp_path, "whatsapp-cloud") as place:
        assert counts(await place.send(document(change(contacts=people, messages=many)))) == (1000, 0, 0)
        # each with its own contact and not with all of them, or a batch would grow with its square
        assert max(len(event.body) for event in await place.events()) < 1000


async def test_twice_in_one_request_is_one_event(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        twice = document(change(messages=[message("wamid.A"), message("wamid.A")]))
        assert counts(await place.send(twice)) == (1, 1, 0)


# -- repeats -----------------------------------------------------------------------------------


async def test_a_partly_repeated_batch_adds_only_what_is_new(tmp_path: Path) -> None:
    later = document(
        change(statuses=[status("wamid.C", "read"), status("wamid.D", "sent")]),
        change(contacts=[contact(RUI, "Rui Novo")], messages=[message("wamid.B", RUI), message("wamid.E", RUI)]),
        time=AT + 99,
    )
    async with ground(tmp_path, "whatsapp-cloud") as place:
        assert counts(await place.send(BATCH)) == (5, 0, 0)
        receipt = await place.send(later)
        assert counts(receipt) == (2, 2, 0)
        assert json.loads(receipt.reply.body)["status"] == "accepted"
        assert (await keys(place))[5:] == [f"{NUMBER}:wamid.D:sent", f"{NUMBER}:wamid.E"]
        again = await place.send(BATCH)
        assert (counts(again), again.outcome) == ((0, 5, 0), "duplicate")


@pytest.mark.parametrize("alone_first", [True, False])
async def test_alone_and_in_company_it_is_the_same_event(tmp_path: Path, alone_first: bool) -> None:
    """A retry is sent to all apps, and grouped anew."""
    alone = document(change(contacts=[contact(ANA)], messages=[message("wamid.A")]), time=AT)
    together = document(
        change(contacts=[contact(RUI), contact(ANA)], messages=[message("wamid.B", RUI), message("wamid.A")]),
        time=AT + 7,
    )
    async with ground(tmp_path, "whatsapp-cloud") as place:
        first, second = (alone, together) if alone_first else (together, alone)
        await place.send(first)
        receipt = await place.send(second)
        assert receipt.outcome == ("accepted" if alone_first else "duplicate")
        assert sorted(filter(None, await keys(place))) == [f"{NUMBER}:wamid.A", f"{NUMBER}:wamid.B"]
        assert "conflict" not in {a.outcome for event in await place.events() for a in await _arrivals(place, event.id)}


async def _arrivals(place: Trial, event_id: bytes) -> list[Any]:
    return list(await place.inbox.store.arrivals_of(event_id))


async def test_another_text_under_a_known_id_is_a_conflict(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        await place.send(document(change(messages=[message("wamid.A")])))
        assert await place.outcome(document(change(messages=[message("wamid.A", text="Other")]))) == "conflict"
        other = document(change(messages=[message("wamid.A", text="Third"), message("wamid.B")]))
        assert counts(await place.send(other)) == (1, 0, 1)


async def test_the_same_id_under_two_numbers_is_two_events(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        await place.send(document(change("1", messages=[message("wamid.A")])))
        assert await place.outcome(document(change("2", messages=[message("wamid.A")]))) == "accepted"


async def test_three_statuses_of_one_message_in_any_order(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        for word in ("read", "sent", "delivered", "failed", "read"):
            await place.send(document(change(statuses=[status("wamid.A", word)])))
        events = await place.events()
        assert [(event.type, event.rank) for event in events] == [
            ("status.read", 2),
            ("status.sent", 0),
            ("status.delivered", 1),
            ("status.failed", None),
        ]


async def test_in_a_group_everybody_reads_for_themselves(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        seen = [
            status("wamid.A", "read", "GROUP", recipient_type="group", recipient_participant_id=who)
            for who in (ANA, RUI)
        ]
        unnamed = status(
            "wamid.A", "read", "GROUP", recipient_type="group", recipient_participant_user_id="BR.1349120865"
        )
        assert counts(await place.send(document(change(statuses=[*seen, unnamed])))) == (3, 0, 0)
        events = await place.events()
        assert {event.subject for event in events} == {f"{NUMBER}:GROUP"}
        assert [event.rank_scope for event in events] == [f"wamid.A:{who}" for who in (ANA, RUI, "BR.1349120865")]


# -- what is on the wire -----------------------------------------------------------------------


async def test_text_is_escaped_on_the_wire_and_the_signature_is_over_that(tmp_path: Path) -> None:
    data = document(change(contacts=[contact(ANA, "Ána")], messages=[message("wamid.A", text="Olá 🙂 ção")]))
    wire = json.dumps(data, separators=(",", ":")).encode()
    assert rb"Ol\u00e1 \ud83d\ude42 \u00e7\u00e3o" in wire
    async with ground(tmp_path, "whatsapp-cloud") as place:
        rewritten = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
        assert (await send_as(place, rewritten, meta_signature(wire))).reply.status == 401
        assert (await send_as(place, wire.replace(rb"\u00e1", rb"\u00E1"), meta_signature(wire))).reply.status == 401
        assert await place.events() == []
        assert (await send_as(place, wire, meta_signature(wire))).outcome == "accepted"
        [event] = await place.events()
        assert event.body == wire  # R6: so that the signature can be checked again
        assert await place.outcome(wire) == "duplicate"


async def test_a_batch_with_escaped_text(tmp_path: Path) -> None:
    wire = json.dumps(BATCH).encode()
    async with ground(tmp_path, "whatsapp-cloud") as place:
        assert counts(await send_as(place, wire, meta_signature(wire))) == (5, 0, 0)
        first = (await place.events())[0]
        assert json.loads(first.body)["entry"][0]["changes"][0]["value"]["messages"] == [message("wamid.A")]
        # the same message alone, as its sender escapes it, is no conflict with what we wrote
        alone = json.dumps(document(change(messages=[message("wamid.A")]))).encode()
        assert (await send_as(place, alone, meta_signature(alone))).outcome == "duplicate"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Hub-Signature-256": ""},
        {"X-Hub-Signature-256": "sha256="},
        {"X-Hub-Signature-256": hmac.new(SECRET, b"{}", hashlib.sha256).hexdigest()},
        {"X-Hub-Signature": "sha1=" + hmac.new(SECRET, b"{}", hashlib.sha1).hexdigest()},
        {**meta_signature(b"{}"), "X_Hub_Signature_256": "sha256=00"},
        meta_signature(b"{} "),
        meta_signature(b"{}", b"another secret"),
    ],
)
async def test_negative_cases(tmp_path: Path, headers: dict[str, str]) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        receipt = await send_as(place, b"{}", headers)
        assert (receipt.reply.status, receipt.outcome) == (401, "rejected")
        assert (await send_as(place, b"{}", meta_signature(b"{}"))).reply.status == 200


# -- what has no message in it -----------------------------------------------------------------


@pytest.mark.parametrize("field", ["account_update", "message_template_status_update", "phone_number_quality_update"])
async def test_other_changes_go_by_their_content(tmp_path: Path, field: str) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        for reason, time, outcome in (("A", 1, "accepted"), ("A", 2, "duplicate"), ("B", 2, "accepted")):
            data = document({"field": field, "value": {"event": "X", "reason": reason}}, time=time)
            assert await place.outcome(data) == outcome
        assert {(event.type, event.subject) for event in await place.events()} == {(field, "102290129340398")}
        assert all((key or "").startswith("body_hash:") for key in await keys(place))


async def test_errors_without_a_message(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        event = await place.keep(document(change(errors=[{"code": 130429, "title": "Rate limit hit"}])))
        assert (event.type, event.marks) == ("messages", 0)


async def test_a_message_of_a_kind_nobody_knows_yet(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        odd = {"from": ANA, "id": "wamid.A", "timestamp": str(AT), "type": "hologram", "hologram": {"w": [1, {}]}}
        event = await place.keep(document(change(messages=[odd])))
        assert (event.type, event.key) == ("message.hologram", f"{NUMBER}:wamid.A")


async def test_people_without_a_phone_number(tmp_path: Path) -> None:
    person = "BR.13491208655302741918"
    new = {key: text for key, text in message("wamid.A").items() if key != "from"} | {"from_user_id": person}
    read = {key: text for key, text in status("wamid.B", "read").items() if key != "recipient_id"}
    read |= {"recipient_user_id": person}
    contacts = [contact(RUI), {"profile": {"name": "Ana", "username": "@ana"}, "user_id": person}]
    async with ground(tmp_path, "whatsapp-cloud") as place:
        await place.send(document(change(contacts=contacts, messages=[new], statuses=[read])))
        events = await place.events()
        assert {event.subject for event in events} == {f"{NUMBER}:{person}"}
        for event in events:
            assert json.loads(event.body)["entry"][0]["changes"][0]["value"]["contacts"] == contacts[1:]


async def test_what_the_business_writes_on_its_own_phone(tmp_path: Path) -> None:
    echoes = [{**message(f"wamid.{name}", "15550783881"), "to": ANA} for name in "AB"]
    async with ground(tmp_path, "whatsapp-cloud") as place:
        await place.send(document(change(field="smb_message_echoes", message_echoes=echoes)))
        events = await place.events()
        assert [(event.type, event.key, event.subject) for event in events] == [
            ("echo.text", f"{NUMBER}:wamid.{name}", f"{NUMBER}:{ANA}") for name in "AB"
        ]


# -- odd shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", JUNK, ids=repr)
async def test_an_odd_message_costs_its_neighbours_nothing(tmp_path: Path, junk: Any) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        data = document(
            change(messages=[message("wamid.A"), junk, message("wamid.B")], statuses=[junk, status("wamid.C", "sent")])
        )
        assert counts(await place.send(data)) == (5, 0, 0)
        good = [event.key for event in await place.events() if not (event.key or "").startswith("body_hash")]
        assert good == [f"{NUMBER}:wamid.A", f"{NUMBER}:wamid.B", f"{NUMBER}:wamid.C:sent"]
        odd = [event for event in await place.events() if is_unparsed(event)]
        if junk != {}:  # an object without an id is a message without a key
            assert [json.loads(event.body) for event in odd] == [
                document(change(messages=[junk])),
                document(change(statuses=[junk])),
            ]
        assert counts(await place.send(data)) == (0, 5, 0)


@pytest.mark.parametrize("junk", JUNK, ids=repr)
@pytest.mark.parametrize("where", ["entry", "change", "value", "list", "contact", "metadata"])
async def test_odd_surroundings_cost_nothing_either(tmp_path: Path, junk: Any, where: str) -> None:
    data: dict[str, Any] = copy.deepcopy(document(change(messages=[message("wamid.A")])))
    other = change(statuses=[status("wamid.B", "read")], contacts=[contact(ANA)])
    if where == "entry":
        data["entry"][:0] = [junk]
    elif where == "change":
        data["entry"][0]["changes"][:0] = [junk]
    elif where == "value":
        other["value"] = junk
    elif where == "contact":
        other["value"]["contacts"] = [junk, contact(ANA), contact(RUI)]
    else:
        other["value"]["messages" if where == "list" else "metadata"] = junk
    data["entry"].append({"id": "7", "changes": [other]})
    async with ground(tmp_path, "whatsapp-cloud") as place:
        receipt = await place.send(data)
        assert (receipt.reply.status, receipt.outcome) == (200, "accepted")
        found = await keys(place)
        assert f"{NUMBER}:wamid.A" in found
        if where not in ("value", "metadata"):
            assert f"{NUMBER}:wamid.B:read" in found
        assert None not in found


WHOLE = [b"[]", b"{}", b"null", b'"text"', b"7", b'{"entry":[]}', b'{"entry":{}}', b'{"object":"x","entry":[{}]}']


@pytest.mark.parametrize("body", [*WHOLE, b"", b"{", b"\xff", b'{"entry":[{"changes":[{"value":"\\ud83d"}]}]}'])
async def test_what_is_no_document_is_kept_as_it_came(tmp_path: Path, body: bytes) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        event = await place.keep(body)
        assert event.body == body
        assert is_unparsed(event)
        assert (event.key or "").startswith("body_hash:")
        assert await place.outcome(body) == "duplicate"


async def test_a_batch_that_would_grow_too_large_is_kept_whole(tmp_path: Path) -> None:
    """Each part repeats the envelope. The whole is not its first message, which is known already."""
    large = document(change(messages=[message(f"wamid.{number}") for number in range(1000)], errors=["x" * 40_000]))
    async with ground(tmp_path, "whatsapp-cloud") as place:
        await place.send(document(change(messages=[message("wamid.0")])))
        event = await place.keep(large)
        assert is_unparsed(event)
        assert json.loads(event.body) == large


NAMES = ["entry", "changes", "value", "messages", "statuses", "contacts", "metadata", "id", "from", "status"]
NAMES += ["data", "history", "threads", "context", "calls", "state_sync", "contact", "user_preferences", "user_id"]


@given(json_values(NAMES))
def test_no_shape_stops_the_splitter_or_the_rules(data: Any) -> None:
    assert take_apart("whatsapp-cloud", data)
    assert take_apart("whatsapp-cloud", document(change(messages=[data], contacts=data)))


@given(st.lists(st.sampled_from([message("wamid.1"), message("wamid.2"), *JUNK]), min_size=1, max_size=8))
def test_as_many_parts_as_items(items: list[Any]) -> None:
    parts = list(whatsapp_cloud.split(document(change(messages=items)), Arrival("here", [], b"")))
    assert len(parts) == len(items)
    for item, part in zip(items, parts, strict=True):
        assert isinstance(part, Odd) == (not isinstance(item, dict))
        whole = part.part if isinstance(part, Odd) else part
        assert whole == document(change(messages=[item]))


def test_contacts_are_looked_up_and_not_searched() -> None:
    many = [message(f"wamid.{number}", f"55119{number:08}") for number in range(8000)]
    batch = document(change(contacts=[contact(one["from"]) for one in many], messages=many))
    before = time.perf_counter()
    assert sum(1 for _ in whatsapp_cloud.split(batch, Arrival("here", [], b""))) == 8000
    assert time.perf_counter() - before < 5  # a search for each of them takes a minute


def test_the_batch_is_left_as_it_was() -> None:
    before = copy.deepcopy(BATCH)
    list(whatsapp_cloud.split(BATCH, Arrival("here", [], b"")))
    assert before == BATCH


def test_time_and_contacts_are_no_difference() -> None:
    hashed = BodyHash(whatsapp_cloud.PRESET.settings.volatile)
    one = document(change(messages=[message("wamid.A")], contacts=[contact(ANA)]), time=1)
    other = document(change(messages=[message("wamid.A")]), time=2)
    assert hashed(b"", one) == hashed(b"", other)


# -- the handshake -----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["whatsapp-cloud", "messenger"])
async def test_handshake(tmp_path: Path, preset: str) -> None:
    async with ground(tmp_path, preset) as place:
        asked = b"hub.mode=subscribe&hub.verify_token=our%20verify%20token&hub.challenge=1158201444"
        reply = ask(place, asked)
        assert (reply.status, reply.body) == (200, b"1158201444")
        hostile = ask(place, asked.replace(b"1158201444", b"%3Cscript%3E"))
        assert hostile.body == b"<script>"
        assert dict(hostile.headers) == {b"content-type": b"text/plain", b"x-content-type-options": b"nosniff"}
        assert await place.events() == []


@pytest.mark.parametrize(
    "query",
    [
        b"",
        b"hub.mode=subscribe&hub.challenge=1",
        b"hub.mode=subscribe&hub.verify_token=&hub.challenge=1",
        b"hub.mode=subscribe&hub.verify_token=another&hub.challenge=1",
        b"hub.mode=subscribe&hub.verify_token=%F0%9F%99%82&hub.challenge=1",
        b"hub.mode=subscribe&hub.verify_token=\xff&hub.challenge=1",
        b"hub.mode=unsubscribe&hub.verify_token=our%20verify%20token&hub.challenge=1",
        b"hub.verify_token=our%20verify%20token&hub.challenge=1",
    ],
)
async def test_handshake_with_the_wrong_words(tmp_path: Path, query: bytes) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        reply = ask(place, query)
        expected = 403 if b"hub.verify_token" in query else 401
        assert (reply.status, b"signature_invalid" in reply.body) == (expected, True)
        nobody = place.inbox.receiver.greet(None, Arrival("nobody", [], b"", query, method="GET"))
        assert (nobody.status, nobody.body) == (reply.status, reply.body), "as for a source that does not exist"


async def test_a_verify_token_outside_ascii(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud", verify_token="olá 🙂".encode()) as place:
        reply = ask(place, b"hub.mode=subscribe&hub.verify_token=ol%C3%A1%20%F0%9F%99%82&hub.challenge=7")
        assert (reply.status, reply.body) == (200, b"7")


async def test_no_handshake_opens_the_way_for_a_post(tmp_path: Path) -> None:
    async with ground(tmp_path, "whatsapp-cloud") as place:
        query = b"hub.mode=subscribe&hub.verify_token=our%20verify%20token&hub.challenge=1"
        assert (await place.take(Arrival("trial", [], b"{}", query))).reply.status == 401
