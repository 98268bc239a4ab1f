"""A captured request that comes back altered where nobody signs: a copy, a conflict, or an event that says so.

Whoever relays or logs a request holds it whole, with its signature. For every preset, everything is changed that the
signature does not cover, and what becomes of it is looked at.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oncehook import presets, samples
from oncehook.model import Arrival, EventId, Mark
from oncehook.sources import Source
from tests.presets.test_every import SAMPLES, Running, running

TYPES = (
    b"text/plain",
    b"multipart/form-data; boundary=x",
    b"application/x-www-form-urlencoded",
    b"application/json",
    b"",
)


def altered(source: Source, arrival: Arrival) -> Iterator[Arrival]:
    """Everything one can do to a captured request without touching what is signed."""
    others = [pair for pair in arrival.headers if pair[0] != b"content-type"]
    for media_type in TYPES:
        yield replace(arrival, headers=[*others, (b"content-type", media_type)])
    yield replace(arrival, headers=others)
    for place, (name, value) in enumerate(arrival.headers):
        if name not in source.scheme.signed_headers:
            kept = [*arrival.headers[:place], *list(arrival.headers)[place + 1 :]]
            yield replace(arrival, headers=kept)
            yield replace(arrival, headers=[*kept, (name, value[:-1] + bytes([value[-1] ^ 1]))])
    for name in (b"idempotency-key", b"x-request-id", b"webhook-id", b"x-retry"):
        yield replace(arrival, headers=[*arrival.headers, (name, b"another")])
    yield replace(arrival, query=arrival.query + b"&id=1" if arrival.query else b"id=1")


@pytest.mark.parametrize(("name", "kind"), SAMPLES)
async def test_it_never_becomes_another_event_unseen(tmp_path: Path, name: str, kind: str) -> None:
    async with running(tmp_path, name) as on:
        if not on.source.body_authenticated:
            return  # who holds one request of these can write any other: `doctor` says so
        captured = on.sample(kind)
        first = await on.take(captured)
        events = await on.kept(first)
        for one in altered(on.source, captured):
            receipt = await on.take(one)
            if receipt.outcome != "accepted":
                continue
            assert not on.source.key_authenticated or not all(event.key for event in events), one
            for event in await on.kept(receipt):
                assert on.source.proof is None or event.same_as == events[0].id
                assert on.source.proof is not None or event.marks & Mark.unkeyed


def with_header(arrival: Arrival, name: bytes, value: bytes) -> Arrival:
    assert any(key == name for key, _ in arrival.headers)
    return replace(arrival, headers=[(key, value if key == name else old) for key, old in arrival.headers])


async def same_bodies(on: Running) -> float:
    lines = (await on.inbox.metrics()).decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("oncehook_same_bodies_total"))


@pytest.mark.parametrize(
    ("name", "kind", "header"),
    [("github", "push", b"x-github-delivery"), ("shopify", "orders/create", b"x-shopify-webhook-id")],
)
async def test_an_unsigned_id_makes_another_event_that_is_marked(
    tmp_path: Path, name: str, kind: str, header: bytes
) -> None:
    async with running(tmp_path, name) as on:
        captured = on.sample(kind)
        first = await on.take(captured)
        receipt = await on.take(with_header(captured, header, b"another"))
        assert receipt.outcome == "accepted"
        [event] = await on.kept(receipt)
        assert Mark.same_body in event.marks
        assert event.same_as == EventId.parse(first.event_ids[0])
        assert await same_bodies(on) == 1
        shown = await on.inbox.admin.event(event.id)
        assert (shown.body_authenticated, shown.key_authenticated) == (True, False)
        await on.take(with_header(captured, header, b"another"))
        assert await same_bodies(on) == 1, "its copy is no event"


@pytest.mark.parametrize(
    ("name", "kind", "header"),
    [
        ("linear", "Issue.create", b"linear-delivery"),
        ("jira", "jira:issue_created", b"x-atlassian-webhook-identifier"),
    ],
)
async def test_where_the_body_has_a_time_of_its_own_it_is_a_copy(
    tmp_path: Path, name: str, kind: str, header: bytes
) -> None:
    async with running(tmp_path, name) as on:
        captured = on.sample(kind)
        first = await on.take(captured)
        again = await on.take(with_header(captured, header, b"another"))
        assert (again.outcome, again.event_ids) == ("duplicate", first.event_ids)
        assert await same_bodies(on) == 0


async def test_two_reschedules_with_the_same_bytes_are_two_events(tmp_path: Path) -> None:
    async with running(tmp_path, "acuity") as on:
        first, second = await on.take(on.sample("rescheduled")), await on.take(on.sample("rescheduled"))
        assert (first.outcome, second.outcome) == ("accepted", "accepted")
        [event] = await on.kept(second)
        assert event.same_as == EventId.parse(first.event_ids[0])


async def test_other_borders_between_the_fields_are_marked(tmp_path: Path) -> None:
    async with running(tmp_path, "twilio") as on:
        captured = on.sample("message.received")
        first = await on.take(captured)
        body = captured.body.replace(b"MessageSid=SM", b"MessageSidS=M", 1)
        assert body != captured.body
        receipt = await on.take(replace(captured, body=body))
        assert receipt.outcome == "accepted", "what is signed is the same"
        [event] = await on.kept(receipt)
        assert event.same_as == EventId.parse(first.event_ids[0])


async def test_a_command_that_is_called_something_else_is_marked(tmp_path: Path) -> None:
    async with running(tmp_path, "slack") as on:
        body = b"command=%2Fdeploy&text=now&team_id=T1&channel_id=C1&trigger_id=13345224609.738474920"
        form = [(b"content-type", b"application/x-www-form-urlencoded")]
        captured = on.signed(Arrival("slack", form, body))
        first = await on.take(captured)
        receipt = await on.take(with_header(captured, b"content-type", b"text/plain"))
        [event] = await on.kept(receipt)
        assert event.same_as == EventId.parse(first.event_ids[0])


# -- PayPal --------------------------------------------------------------------------------------


def forged(body: bytes, checksum: int) -> bytes:
    """Append four bytes that give a body this CRC-32."""
    table = [0] * 256
    for n in range(256):
        value = n
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        table[n] = value
    wanted = checksum ^ 0xFFFFFFFF
    indexes = []
    for _ in range(4):
        index = next(n for n in range(256) if table[n] >> 24 == wanted >> 24)
        indexes.append(index)
        wanted = (wanted ^ table[index]) << 8 & 0xFFFFFFFF
    state, tail = zlib.crc32(body) ^ 0xFFFFFFFF, bytearray()
    for index in reversed(indexes):
        tail.append((state ^ index) & 0xFF)
        state = state >> 8 ^ table[index]
    return body + bytes(tail)


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":"WH-forged","event_type":"PAYMENT.CAPTURE.COMPLETED","resource":{"id":"1"}} ',
        b'{"event_type":"PAYMENT.CAPTURE.COMPLETED"} ',
        b"",
    ],
    ids=["another key", "no key", "nothing"],
)
async def test_another_body_under_one_transmission_is_a_conflict(tmp_path: Path, body: bytes) -> None:
    async with running(tmp_path, "paypal") as on:
        captured = on.sample("PAYMENT.CAPTURE.COMPLETED")
        first = await on.take(captured)
        fake = forged(body, zlib.crc32(captured.body))
        assert zlib.crc32(fake) == zlib.crc32(captured.body)
        again = await on.take(replace(captured, body=fake))
        assert (again.outcome, again.event_ids) == ("conflict", first.event_ids)
        assert (await on.take(captured)).outcome == "duplicate"
        assert not on.source.body_authenticated
        assert not on.source.key_authenticated


async def test_a_retry_in_a_new_transmission_is_a_copy(tmp_path: Path) -> None:
    async with running(tmp_path, "paypal") as on:
        draft = samples.draft(on.source, "PAYMENT.CAPTURE.COMPLETED")
        first, again = await on.take(on.signed(draft)), await on.take(on.signed(draft))
        assert (again.outcome, again.event_ids) == ("duplicate", first.event_ids)


def test_what_is_said_of_a_preset_holds_while_its_rules_do(tmp_path: Path) -> None:
    """Who brings another key or another check is not told what the preset's own would prove."""
    from oncehook.inbox import Inbox
    from oncehook.verify import Hmac, Token

    inbox = Inbox(f"sqlite:{tmp_path}/a.db")
    by_body = inbox.source("a", preset="github", secret="long enough", key="$.head_commit.id")
    assert (by_body.body_authenticated, by_body.key_authenticated, by_body.proof) == (True, True, None)
    by_token = inbox.source("b", preset="github", secret="long enough", verify=Token(place="header:X-Token"))
    assert (by_token.body_authenticated, by_token.key_authenticated, by_token.proof) == (False, False, None)
    own = inbox.source("c", verify=Hmac(header="X-Sign"), secret="long enough", key=["header:X-Id", "$.id"])
    assert (own.body_authenticated, own.key_authenticated) == (True, False)
    assert own.proof is not None
    assert presets.load("github").key_authenticated is False
