"""Evolution API v2 and Evolution Go: nothing is signed, tokens travel in the body, and everything comes twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jwt
import pytest
from hypothesis import given

from oncehook import clock
from oncehook.model import Arrival
from tests.presets.messaging import SECRET, counts, ground, json_values, keys, send_as, take_apart
from tests.presets.trial import Trial

JID, OTHER = "5511988880142@s.whatsapp.net", "5511966660177@s.whatsapp.net"
AT = 1790000000
TEXT = SECRET.decode()


# -- Evolution API v2 --------------------------------------------------------------------------


def emission(
    event: str, data: Any, *, instance: str = "sales", when: str = "2026-09-21T10:13:20.000Z"
) -> dict[str, Any]:
    return {
        "event": event,
        "instance": instance,
        "data": data,
        "destination": "https://hooks.example.com/in/evolution",
        "date_time": when,
        "sender": "5511977770100@s.whatsapp.net",
        "server_url": "https://evolution.example.com",
        "apikey": TEXT,
    }


def upsert(wa_id: str, jid: str = JID, **more: Any) -> dict[str, Any]:
    key = {"remoteJid": jid, "fromMe": False, "id": wa_id}
    return {"key": key, "pushName": "Ana", "message": {"conversation": "Olá 🙂"}, "messageTimestamp": AT, **more}


def token(age: float = 0.0, key: str = TEXT, **claims: Any) -> dict[str, str]:
    """As the sender makes it: HS256, ten minutes, made once before its first attempt."""
    made = int(clock.now() - age)
    payload = {"iat": made, "exp": made + 600, "app": "evolution", "action": "webhook", **claims}
    return bearer(payload, key.ljust(64, "."))


LONG = TEXT.ljust(64, ".")
"""pyjwt wants keys that are as long as what they make."""


def bearer(payload: dict[str, Any], key: str = LONG, algorithm: str = "HS256") -> dict[str, str]:
    return {"Authorization": f"Bearer {jwt.encode(payload, key, algorithm=algorithm)}"}


@pytest.mark.parametrize(
    ("event", "data", "key", "subject"),
    [
        ("messages.upsert", upsert("3EB0A"), "sales:messages.upsert:3EB0A", f"sales:{JID}"),
        ("send.message", upsert("3EB0A", status="PENDING"), "sales:send.message:3EB0A", f"sales:{JID}"),
        (
            "messages.update",
            {"keyId": "3EB0A", "remoteJid": JID, "fromMe": True, "status": "READ"},
            "sales:messages.update:3EB0A:READ",
            f"sales:{JID}",
        ),
        (
            "messages.update",
            {"keyId": "3EB0A", "remoteJid": "1@g.us", "participant": JID, "status": "READ"},
            f"sales:messages.update:3EB0A:READ:{JID}",
            "sales:1@g.us",
        ),
        ("messages.delete", {"remoteJid": JID, "id": "3EB0A"}, "sales:messages.delete:3EB0A", f"sales:{JID}"),
        (
            "messages.delete",
            {"id": "cm1database", "key": {"id": "3EB0A", "remoteJid": JID}},
            "sales:messages.delete:3EB0A",
            f"sales:{JID}",
        ),
    ],
)
async def test_key_and_subject(tmp_path: Path, event: str, data: Any, key: str, subject: str) -> None:
    async with ground(tmp_path, "evolution-api") as place:
        kept = await place.keep(emission(event, data))
        assert (kept.type, kept.key, kept.subject) == (event, key, subject)
        # the global webhook brings it too, and after a reconnect it comes at another time
        again = emission(event, data, when="2026-09-21T11:00:00.000Z") | {"destination": "https://other.example.com"}
        assert await place.outcome(again) == "duplicate"
        assert await place.outcome(emission(event, data, instance="support")) == "accepted"


async def test_the_time_is_the_messages_own(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-api") as place:
        event = await place.keep(emission("messages.upsert", upsert("3EB0A")))
        assert event.event_at == datetime.fromtimestamp(AT, UTC)
        # date_time is local time with a Z behind it: not believed
        assert (await place.keep(emission("connection.update", {"state": "open"}))).event_at is None


async def test_statuses_are_ranked_and_messages_are_not(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-api") as place:
        for status in ("SERVER_ACK", "READ", "DELIVERY_ACK", "SOMETHING"):
            await place.send(emission("messages.update", {"keyId": "3EB0A", "remoteJid": JID, "status": status}))
        await place.send(emission("messages.upsert", upsert("3EB0B", status="READ")))
        assert [(event.rank, event.rank_scope) for event in await place.events()] == [
            (1, "sales:3EB0A"),
            (3, "sales:3EB0A"),
            (2, "sales:3EB0A"),
            (None, "sales:3EB0A"),
            (None, None),
        ]


async def test_two_edits_of_one_message(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-api") as place:
        for text, when, outcome in (("A", "1", "accepted"), ("A", "2", "duplicate"), ("B", "2", "accepted")):
            data = {"key": {"id": "3EB0A", "remoteJid": JID}, "editedMessage": {"conversation": text}}
            assert await place.outcome(emission("messages.edited", data, when=when)) == outcome


@pytest.mark.parametrize("event", ["connection.update", "qrcode.updated", "presence.update", "something.new"])
async def test_what_has_no_id_goes_by_its_emission(tmp_path: Path, event: str) -> None:
    """Open, close, open: the third is not the first, though it reads the same."""
    async with ground(tmp_path, "evolution-api") as place:
        for when, destination, outcome in (("1", "a", "accepted"), ("1", "b", "duplicate"), ("2", "a", "accepted")):
            data = emission(event, {"state": "open"}, when=when) | {"destination": destination}
            assert await place.outcome(data) == outcome
        assert {event.subject for event in await place.events()} == {"sales"}


async def test_arrays_are_taken_apart(tmp_path: Path) -> None:
    people = [{"remoteJid": JID, "pushName": "Ana"}, {"remoteJid": OTHER, "pushName": "Rui"}]
    async with ground(tmp_path, "evolution-api") as place:
        assert counts(await place.send(emission("contacts.upsert", people))) == (2, 0, 0)
        events = await place.events()
        assert [event.subject for event in events] == [f"sales:{JID}", f"sales:{OTHER}"]
        assert json.loads(events[1].body) == emission("contacts.upsert", people[1:]) | {"apikey": "[redacted]"}
        assert counts(await place.send(emission("contacts.upsert", people))) == (0, 2, 0)
        assert counts(await place.send(emission("contacts.upsert", [*people, {"remoteJid": "3"}]))) == (1, 2, 0)
        later = emission("contacts.upsert", people, when="later")
        assert counts(await place.send(later)) == (2, 0, 0)


async def test_a_history_is_its_messages(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-api") as place:
        first = emission("messages.set", [upsert("3EB0A"), upsert("3EB0B", OTHER)])
        assert counts(await place.send(first)) == (2, 0, 0)
        assert await keys(place) == ["sales:messages.set:3EB0A", "sales:messages.set:3EB0B"]
        assert [event.event_at for event in await place.events()] == [datetime.fromtimestamp(AT, UTC)] * 2
        after_reconnect = emission("messages.set", [upsert("3EB0B", OTHER), upsert("3EB0C")], when="later")
        assert counts(await place.send(after_reconnect)) == (1, 1, 0)
        assert await place.outcome(emission("messages.set", [upsert("3EB0A")], when="later still")) == "duplicate"


async def test_deleted_chats_are_plain_texts(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-api") as place:
        assert counts(await place.send(emission("chats.delete", [JID, OTHER]))) == (2, 0, 0)
        assert [event.subject for event in await place.events()] == [f"sales:{JID}", f"sales:{OTHER}"]


@pytest.mark.parametrize("odd", [None, 7, "text", {}, [], [None, 7]], ids=repr)
async def test_odd_data_is_kept(tmp_path: Path, odd: Any) -> None:
    async with ground(tmp_path, "evolution-api") as place:
        for event in ("messages.upsert", "messages.update", "contacts.upsert"):
            receipt = await place.send(emission(event, odd))
            assert receipt.reply.status == 200
            assert receipt.outcome == ("accepted" if odd != [] else "ignored")
        assert None not in await keys(place)


@given(json_values(["event", "instance", "data", "key", "id", "status", "keyId", "remoteJid"]))
def test_no_shape_stops_the_rules_of_evolution(data: Any) -> None:
    take_apart("evolution-api", data)
    take_apart("evolution-go", data)
    for event in ("messages.upsert", "messages.update", "messages.edited", "connection.update"):
        take_apart("evolution-api", emission(event, data))
    take_apart("evolution-go", hook("Receipt", data))


# -- Evolution API v2: who sends ---------------------------------------------------------------


@pytest.mark.parametrize("minutes", [0, 9, 11, 25, 55])
async def test_a_retry_with_an_expired_token_is_taken(tmp_path: Path, minutes: int) -> None:
    """Its retries outlive its token, and to a 401 there is no retry: the message would be lost."""
    async with ground(tmp_path, "evolution-api", secret=[LONG.encode()]) as place:
        receipt = await send_as(place, emission("messages.upsert", upsert("3EB0A")), token(age=60 * minutes))
        assert receipt.outcome == "accepted"


@pytest.mark.parametrize(
    "headers",
    [
        dict,
        lambda: {"Authorization": ""},
        lambda: {"Authorization": "Bearer "},
        lambda: {"Authorization": "Bearer a.b.c"},
        lambda: {"jwt_key": LONG},
        lambda: token(age=600 + 3700),
        lambda: token(age=-3700),
        lambda: token(key="another key"),
        lambda: token(app="something else"),
        lambda: token(action="login"),
        lambda: bearer({"app": "evolution", "action": "webhook"}),  # never expires
        lambda: bearer({"exp": 9e9, "app": "evolution", "action": "webhook"}, key="", algorithm="none"),
        lambda: bearer({"exp": 9e9, "app": "evolution", "action": "webhook"}, algorithm="HS512"),
    ],
)
async def test_negative_cases(tmp_path: Path, headers: Callable[[], dict[str, str]]) -> None:
    async with ground(tmp_path, "evolution-api", secret=[LONG.encode()]) as place:
        nothing_inside = emission("messages.upsert", upsert("3EB0A")) | {"apikey": None}
        assert (await send_as(place, nothing_inside, headers())).reply.status == 401
        assert (await send_as(place, nothing_inside | {"apikey": "another"}, headers())).reply.status == 401
        assert await place.events() == []
        assert (await send_as(place, nothing_inside, token())).outcome == "accepted"


@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Bearer {TEXT}"}, {"authorization": f"bearer {TEXT}"}])
async def test_a_fixed_header_or_the_instances_own_token(tmp_path: Path, headers: dict[str, str]) -> None:
    async with ground(tmp_path, "evolution-api") as place:
        body = emission("messages.upsert", upsert("3EB0A")) | ({"apikey": None} if headers else {})
        assert (await send_as(place, body, headers)).outcome == "accepted"


async def test_another_header_is_one_setting_away(tmp_path: Path) -> None:
    from oncehook.verify import from_config

    async with ground(
        tmp_path, "evolution-api", verify=from_config({"scheme": "token", "header": "X-Evolution"})
    ) as place:
        body = emission("messages.upsert", upsert("3EB0A"))
        assert (await send_as(place, body, {})).reply.status == 401
        assert (await send_as(place, body, {"X-Evolution": TEXT})).outcome == "accepted"
        assert SECRET not in place.bytes_on_disk()


async def test_the_event_in_the_path_is_no_other_source(tmp_path: Path) -> None:
    """`webhookByEvents` puts the event behind the address: /in/trial/messages-upsert."""
    async with ground(tmp_path, "evolution-api") as place:
        status = await _post(place, "/trial/messages-upsert", emission("messages.upsert", upsert("3EB0A")))
        assert status == 200
        assert await keys(place) == ["sales:messages.upsert:3EB0A"]


async def _post(place: Trial, path: str, data: Any) -> int:
    told: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(data).encode(), "more_body": False}

    async def send(message: Any) -> None:
        told.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
    }
    await place.inbox.asgi()(scope, receive, send)
    status: int = told[0]["status"]
    return status


# -- Evolution Go ------------------------------------------------------------------------------

INSTANCE = "0d9d2c1e-0000-4000-8000-000000000001"


def hook(event: str, data: Any, **more: Any) -> dict[str, Any]:
    """The token last but not alone, so that a test that looks for it does not depend on its place."""
    return {"event": event, "data": data, "instanceToken": TEXT, "instanceId": INSTANCE, "instanceName": "s", **more}


def info(wa_id: str, chat: str = JID, **more: Any) -> dict[str, Any]:
    about = {"Chat": chat, "Sender": chat, "ID": wa_id, "Timestamp": "2026-09-21T10:13:20-03:00"}
    return {"Info": about, "Message": {"conversation": "Olá 🙂"}, **more}


def receipt(*ids: Any, sender: str = JID) -> dict[str, Any]:
    return {"Chat": JID, "Sender": sender, "MessageIDs": list(ids), "Timestamp": "2026-09-21T10:13:20Z", "Type": "read"}


async def test_go_messages(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-go") as place:
        event = await place.keep(hook("Message", info("3EB0A")))
        assert (event.type, event.key, event.subject) == ("Message", f"{INSTANCE}:Message:3EB0A", f"{INSTANCE}:{JID}")
        assert event.event_at == datetime(2026, 9, 21, 13, 13, 20, tzinfo=UTC)
        assert await place.outcome(hook("Message", info("3EB0A"))) == "duplicate"
        assert await place.outcome(hook("SendMessage", info("3EB0A"))) == "accepted"
        assert await place.outcome(hook("Message", info("3EB0B", IsEdit=True))) == "accepted"


async def test_go_channel_edits_keep_their_id(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-go") as place:
        for edit, outcome in ((None, "accepted"), (1, "accepted"), (2, "accepted"), (1, "duplicate")):
            more = {"NewsletterMeta": {"EditTS": edit}} if edit else {}
            assert await place.outcome(hook("Message", info("3EB0A") | more)) == outcome


async def test_go_receipts_are_one_event_per_message(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-go") as place:
        assert counts(await place.send(hook("Receipt", receipt("A", "B", "C"), state="Read"))) == (3, 0, 0)
        events = await place.events()
        assert [event.key for event in events] == [f"{INSTANCE}:{name}:Read:{JID}" for name in "ABC"]
        assert {event.subject for event in events} == {f"{INSTANCE}:{JID}"}
        assert [(event.rank, event.rank_scope) for event in events[:1]] == [(1, f"{INSTANCE}:A:{JID}")]
        assert json.loads(events[1].body) == hook("Receipt", receipt("B"), state="Read") | {
            "instanceToken": "[redacted]"
        }
        # regrouped by the next attempt
        assert counts(await place.send(hook("Receipt", receipt("C", "D"), state="Read"))) == (1, 1, 0)
        assert await place.outcome(hook("Receipt", receipt("B"), state="Read")) == "duplicate"
        # another state, and another reader in a group, are events of their own
        assert await place.outcome(hook("Receipt", receipt("B"), state="Delivered")) == "accepted"
        assert await place.outcome(hook("Receipt", receipt("B", sender=OTHER), state="Read")) == "accepted"


@pytest.mark.parametrize("redact", [None, []])
async def test_go_regrouped_receipts_are_no_conflict_whatever_is_redacted(
    tmp_path: Path, redact: list[str] | None
) -> None:
    async with ground(tmp_path, "evolution-go", redact=redact) as place:
        await place.send(hook("Receipt", receipt("A", "B"), state="Read"))
        assert await place.outcome(hook("Receipt", receipt("A"), state="Read")) == "duplicate"


async def test_go_what_looks_the_same_every_time(tmp_path: Path) -> None:
    """As long as retries may come it is the same event, and then the next one: not for as long as keys are kept."""
    data = hook("Connected", {"status": "open", "jid": JID})
    async with ground(tmp_path, "evolution-go") as place:
        assert [await place.outcome(data) for _ in range(3)] == ["accepted", "duplicate", "duplicate"]
        assert await place.outcome(hook("Disconnected", {})) == "accepted"
        assert place.source.missing_keep == 600
        assert place.source.settings.keep_keys > 86_400


@pytest.mark.parametrize(
    "data",
    [
        {"event": "Message", "data": info("3EB0A")},
        {"event": "Message", "data": info("3EB0A"), "instanceToken": None},
        {"event": "Message", "data": info("3EB0A"), "instanceToken": ""},
        {"event": "Message", "data": info("3EB0A"), "instanceToken": TEXT + "x"},
        {"event": "Message", "data": info("3EB0A"), "instanceToken": [TEXT]},
        {"event": "Message", "data": {"instanceToken": TEXT}},
        [hook("Message", info("3EB0A"))],
        TEXT,
    ],
)
async def test_go_negative_cases(tmp_path: Path, data: Any) -> None:
    async with ground(tmp_path, "evolution-go") as place:
        body = json.dumps(data).encode()
        taken = await place.take(Arrival("trial", [(b"content-type", b"application/json")], body))
        assert (taken.reply.status, taken.outcome) == (401, "rejected")
        assert await place.events() == []


# -- what must not be kept ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "data"),
    [
        ("evolution-api", emission("messages.upsert", upsert("3EB0A"))),
        ("evolution-api", emission("contacts.upsert", [{"remoteJid": JID}, {"remoteJid": OTHER}])),
        ("evolution-go", hook("Message", info("3EB0A"))),
        ("evolution-go", hook("Receipt", receipt("A", "B"), state="Read")),
    ],
    ids=["api", "api-batch", "go", "go-batch"],
)
async def test_the_token_is_gone_before_anything_is_written(tmp_path: Path, preset: str, data: dict[str, Any]) -> None:
    field = "apikey" if preset == "evolution-api" else "instanceToken"
    async with ground(tmp_path, preset) as place:
        body = json.dumps(data).encode()
        assert (await send_as(place, body, {})).outcome == "accepted"
        assert (await send_as(place, body, {})).outcome == "duplicate"
        # the same event with other bytes is a conflict or a duplicate; neither may bring the token back
        await send_as(place, json.dumps(data | {"instanceName": "renamed", "sender": "x"}, indent=2).encode(), {})
        await send_as(place, {**data, field: "wrong " + TEXT}, {})
        assert all(json.loads(event.body)[field] == "[redacted]" for event in await place.events())
        assert SECRET not in place.bytes_on_disk()
    assert SECRET not in place.bytes_on_disk()


async def test_redaction_can_be_turned_off_by_who_needs_the_token(tmp_path: Path) -> None:
    async with ground(tmp_path, "evolution-go", redact=[]) as place:
        event = await place.keep(json.dumps(hook("Message", info("3EB0A"))).encode())
        assert json.loads(event.body)["instanceToken"] == TEXT
