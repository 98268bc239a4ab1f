"""Encryption at rest: nothing of a payload can be read from the files, and all of it through the store (S37)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncehook.errors import QueryTooWide, Undecryptable
from oncehook.model import (
    Emission,
    Evidence,
    Exchange,
    Filter,
    Intake,
    Outcome,
    Priority,
    Rejection,
    Settle,
    Settlement,
)
from oncehook.query import parse
from oncehook.store.base import Store
from oncehook.store.cipher import MAGIC, Cipher
from oncehook.store.postgres import PostgresStore
from oncehook.store.postgres import read as postgres_read
from oncehook.store.sqlite import read
from tests.store.conftest import Ground, PostgresGround, SqliteGround
from tests.store.making import (
    CRM,
    dead_letters,
    deliver_one,
    done,
    enrolled,
    event_of,
    finish,
    intake,
    item,
    keep,
    outcomes,
    record,
    replay,
    replay_all,
    retry,
    settle,
    statuses,
    take,
    take_one,
)
from tests.store.test_bodies import BODIES, NOW, QUESTIONS

CANARY = b"c4nary"
NEW, OLD = bytes(range(32)), bytes(range(100, 132))


def body(n: int, text: str = "c4nary-body") -> bytes:
    return b'{"n": %d, "said": "%s"}' % (n, text.encode())


@asynccontextmanager
async def opened(ground: Ground, *keys: bytes, decrypt_only: bool = False) -> AsyncIterator[Store]:
    store = ground.make(cipher=Cipher(keys, decrypt_only=decrypt_only))
    await store.open()
    try:
        await enrolled(store)
        yield store
    finally:
        await store.close()


def raw_bytes(ground: Ground) -> bytes:
    """All that the store's files hold; of PostgreSQL all rows of all tables, as a dump in binary has them."""
    if isinstance(ground, SqliteGround):
        return b"".join(file.read_bytes() for file in sorted(Path(ground.path).parent.iterdir()) if file.is_file())
    assert isinstance(ground, PostgresGround)
    tables = ground.sql("SELECT tablename FROM pg_tables WHERE schemaname = $1", ground.schema)
    held = b""
    for (table,) in tables:
        dump = f"COPY {ground.schema}.{table} TO STDOUT (FORMAT binary)".encode()
        with psycopg.connect(ground.url) as connection, connection.cursor().copy(dump) as copy:
            held += b"".join(bytes(piece) for piece in copy)
    return held


async def everything(store: Store) -> dict[str, Any]:
    """Keep a payload in every way there is, and read it back in every way."""
    head = b"POST /in/orders?token=c4nary-query\r\nx-card: c4nary-head"
    [first, copy, conflict] = await keep(
        store,
        item("k", body=body(1), to=[CRM]),
        item("k", body=body(1)),
        item("k", body=body(2)),
        head=head,
    )
    assert outcomes([first, copy, conflict]) == [Outcome.accepted, Outcome.duplicate, Outcome.conflict]
    split = intake(item("a", body=body(3)), item("b", body=body(4)), head=head, raw=b"[c4nary-raw]")
    [part, _] = await record(store, split)
    again = intake(item("a", body=body(5)), item("b", body=body(4)), head=head, raw=b"[c4nary-again]")
    assert outcomes(await record(store, again)) == [Outcome.conflict, Outcome.duplicate]
    # several of one key in one group: PostgreSQL sends a body once where it can
    group = [intake(item("k", body=body(6)), head=head) for _ in range(3)]
    assert outcomes(await record(store, *group)) == [Outcome.conflict] * 3
    lease = await take_one(store)
    emission = Emission(
        intake(item("e", body=body(7), source="payments"), source_id=2, head=head), lambda verdict: None
    )
    exchange = Exchange("POST", "https://c4nary-url", {"x": "c4nary-sent"}, (), b"x: c4nary-got").encode()
    await settle(store, Settlement(lease, Settle.retry, evidence=Evidence(500, "HTTP 500", b"c4nary-answer", exchange)))
    await settle(store, done(await take_one(store), evidence=Evidence(200, None, b"c4nary-ok"), emits=[emission]))
    rejected = Rejection("orders", datetime.now(UTC), "signature_invalid", "mismatch", "", 9)
    rejected.head, rejected.body = b"POST /?c4nary-rejected-head", b"c4nary-rejected-body"
    await store.record_rejections([rejected], {})
    [kept] = await store.recent_rejections(1)
    assert (kept.head, kept.body) == (b"POST /?c4nary-rejected-head", b"c4nary-rejected-body")
    assert emission.verdict is not None
    seen = {
        "event": await event_of(store, first),
        "part": await event_of(store, part),
        "emitted": await event_of(store, emission.verdict),
        "later": await store.arrivals_of(first.event_id),
        "later of part": await store.arrivals_of(part.event_id),
        "batch": await store.batch_body(split.arrival_id),
        "leased": (lease.event.request_head, lease.event.body),
        "attempts": await store.attempts_of(lease.delivery.id),
        "listed": (await store.find_events(Filter())).items,
    }
    assert seen["event"].body == body(1)
    assert seen["event"].request_head == seen["part"].request_head == seen["emitted"].request_head == head
    assert (seen["part"].body, seen["emitted"].body) == (body(3), body(7))
    assert [one.body for one in seen["later"]] == [None, body(2), body(6), body(6), body(6)]
    assert {one.request_head for one in seen["later"]} == {head}
    [later] = seen["later of part"]
    assert (later.request_head, later.body, later.batch_id) == (head, body(5), again.arrival_id)
    assert seen["batch"] == (head, b"[c4nary-raw]")
    assert seen["leased"] == (head, body(1))
    assert [one.evidence.answer for one in seen["attempts"]] == [b"c4nary-answer", b"c4nary-ok"]
    assert [one.evidence.exchange for one in seen["attempts"]] == [exchange, None]
    assert {one.size for one in seen["listed"]} == {len(body(1))}
    return seen


async def test_nothing_of_a_payload_is_in_the_files(ground: Ground) -> None:
    """The control: without keys each of them is found, so the search does see them."""
    async with opened(ground, NEW) as store:
        await everything(store)
        assert CANARY not in raw_bytes(ground)
    assert CANARY not in raw_bytes(ground)


async def test_what_is_not_encrypted_is_found_in_the_files(ground: Ground) -> None:
    async with opened(ground) as store:
        await everything(store)
        held = raw_bytes(ground)
    pieces = (b"-body", b"-query", b"-head", b"-raw", b"-again", b"-answer", b"-ok", b"-url", b"-sent", b"-got")
    for piece in (*pieces, b"-rejected-head", b"-rejected-body"):
        assert CANARY + piece in held, piece


async def test_rows_of_every_age_are_read_side_by_side(ground: Ground) -> None:
    """Plain, then encrypted, then under another key, then plain again: all of it stays readable, and copies of all of
    it are recognised."""
    kept = []
    stages: list[tuple[tuple[bytes, ...], bool]] = [
        ((), False),
        ((OLD,), False),
        ((NEW, OLD), False),
        ((NEW, OLD), True),
    ]
    for n, (keys, decrypt_only) in enumerate(stages):
        async with opened(ground, *keys, decrypt_only=decrypt_only) as store:
            kept += await keep(store, item(f"k{n}", body=body(n), to=[CRM]))
            for m, verdict in enumerate(kept):
                assert (await event_of(store, verdict)).body == body(m)
                same, other = await keep(store, item(f"k{m}", body=body(m)), item(f"k{m}", body=body(99)))
                assert outcomes([same, other]) == [Outcome.duplicate, Outcome.conflict]
            assert [check.name for check in await store.check() if not check.ok] == []
    held = raw_bytes(ground)
    assert [CANARY in row[0] for row in ground.sql("SELECT body FROM events ORDER BY id")] == [True, False, False, True]
    assert Cipher([OLD]).key_ids[0] in held.hex()
    assert Cipher([NEW]).key_ids[0] in held.hex()
    async with opened(ground, NEW, OLD) as store:
        assert [lease.event.body for lease in await take(store)] == [body(n) for n in range(4)]


async def test_a_missing_key_is_told_of_its_row_alone(ground: Ground) -> None:
    async with opened(ground, OLD) as store:
        [lost] = await keep(store, item("k", body=body(1), to=[CRM]))
        await keep(store, item("k", body=body(2)))
        lease = await take_one(store)
        await settle(store, Settlement(lease, Settle.retry, evidence=Evidence(500, "HTTP 500", b"c4nary-answer")))
    async with opened(ground, NEW) as store:
        [fine] = await keep(store, item("j", body=body(3), to=[CRM]))
        await keep(store, item("k", body=body(4)))
        with pytest.raises(Undecryptable, match=Cipher([OLD]).key_ids[0]) as caught:
            await store.get_event(lost.event_id)
        assert caught.value.code == "undecryptable"
        assert "encrypt.key" in caught.value.hint
        assert (await event_of(store, fine)).body == body(3)
        assert len((await store.find_events(Filter())).items) == 2
        assert [one.id for one in (await store.find_events(parse("body.n:>0", NOW))).items] == [fine.event_id]
        unreadable, readable = await store.arrivals_of(lost.event_id)
        assert (unreadable.body, unreadable.request_head, readable.body) == (None, b"", body(4))
        assert isinstance(unreadable.unreadable, Undecryptable)
        [attempt] = await store.attempts_of(lease.delivery.id)
        assert attempt.evidence.answer is not None
        assert b"not given" in attempt.evidence.answer
        leases = {one.event.id: one for one in await take(store)}
        assert (leases[lost.event_id].event.body, leases[fine.event_id].event.body) == (b"", body(3))
        assert "not given" in str(leases[lost.event_id].unreadable)
        assert leases[fine.event_id].unreadable is None
        await settle(store, *[retry(one) for one in leases.values()])
        [check] = [check for check in await store.check() if check.name == "encryption"]
        assert not check.ok
        assert f"{Cipher([OLD]).key_ids[0]} (not given)" in check.detail
    async with opened(ground, NEW, OLD) as store:
        assert {one.event.body for one in await take(store)} == {body(1), body(3)}


async def test_doctor_tells_which_keys_are_needed(ground: Ground) -> None:
    async def told(*keys: bytes) -> tuple[bool, str] | None:
        async with opened(ground, *keys) as store:
            checks = [check for check in await store.check() if check.name == "encryption"]
            return (checks[0].ok, checks[0].detail) if checks else None

    assert await told() is None
    new, old = Cipher([NEW]).key_ids[0], Cipher([OLD]).key_ids[0]
    async with opened(ground, NEW) as store:
        await keep(store, item("k", body=body(1)))
    assert await told(NEW) == (True, f"values encrypted: 2 under the key {new}; plain: 0")
    assert await told(NEW, OLD) == (
        True,
        f"values encrypted: 2 under the key {new}; plain: 0; no longer needed: {old}",
    )
    assert await told() == (False, f"values encrypted: 2 under the key {new} (not given); plain: 0")


def change(ground: Ground, statement: str, *values: bytes) -> None:
    ground.sql(statement.replace("$", "?") if ground.engine == "sqlite" else statement, *values)


@pytest.mark.parametrize("column", ["body", "head"])
async def test_a_value_that_was_moved_to_another_event_is_not_believed(ground: Ground, column: str) -> None:
    async with opened(ground, NEW) as store:
        kept = await keep(store, item("a", body=body(1)), item("b", body=body(2)))
        [one, two] = ground.sql(f"SELECT id, {column} FROM events ORDER BY id")
        change(ground, f"UPDATE events SET {column} = $1 WHERE id = $2", one[1], two[0])
        change(ground, f"UPDATE events SET {column} = $1 WHERE id = $2", two[1], one[0])
        for verdict in kept:
            with pytest.raises(Undecryptable, match="moved"):
                await store.get_event(verdict.event_id)


@pytest.mark.parametrize("moved", ["head", "(SELECT a.body FROM arrivals a)"])
async def test_a_value_that_was_moved_to_another_column_is_not_believed(ground: Ground, moved: str) -> None:
    """A head is no body, and the body of a conflict is not the event's."""
    async with opened(ground, NEW) as store:
        [one] = await keep(store, item("a", body=body(1)))
        await keep(store, item("a", body=body(3)))
        ground.sql(f"UPDATE events SET body = {moved}")
        with pytest.raises(Undecryptable, match="moved"):
            await store.get_event(one.event_id)


async def test_one_changed_bit_is_noticed(ground: Ground) -> None:
    async with opened(ground, NEW) as store:
        [one] = await keep(store, item("a", body=body(1)))
        [(kept,)] = ground.sql("SELECT body FROM events")
        for changed in (kept[:-1] + bytes([kept[-1] ^ 1]), kept[:40], kept[:4] + b"\x02" + kept[5:]):
            change(ground, "UPDATE events SET body = $1", changed)
            with pytest.raises(Undecryptable):
                await store.get_event(one.event_id)


async def test_the_same_body_never_looks_the_same(ground: Ground) -> None:
    async with opened(ground, NEW) as store:
        await keep(store, *[item(body=body(1)) for _ in range(20)])
    assert len({row[0][9:33] for row in ground.sql("SELECT body FROM events")}) == 20
    assert len({row[0][33:] for row in ground.sql("SELECT body FROM events")}) == 20


async def test_a_body_that_looks_encrypted_comes_back_as_it_was(ground: Ground) -> None:
    """With or without keys: nobody can send what would be taken for an encrypted value."""
    forged = [Cipher([NEW]).encrypt(b"x", "body", bytes(16)), MAGIC, MAGIC + b"\x00", MAGIC + b"\x07" + os.urandom(60)]
    for keys in ((), (NEW,)):
        async with opened(ground, *keys) as store:
            verdicts = await keep(store, *[item(body=one, to=[CRM]) for one in forged])
            assert [(await event_of(store, verdict)).body for verdict in verdicts] == forged
            assert [lease.event.body for lease in await take(store)] == forged


# -- what bodies say -----------------------------------------------------------------------------


async def test_queries_find_in_encrypted_bodies_what_they_find_in_plain_ones(ground: Ground) -> None:
    async with opened(ground) as store:
        await keep(store, *[item(type_=name, to=[CRM], body=one) for name, one in list(BODIES.items())[::2]])
    async with opened(ground, NEW) as store:
        await keep(store, *[item(type_=name, to=[CRM], body=one) for name, one in list(BODIES.items())[1::2]])
        for text, answer in QUESTIONS:
            asked = parse(text, NOW)
            events = [one.type for one in (await store.find_events(asked, limit=100)).items]
            assert sorted(events) == sorted(answer), text
            deliveries = [one.type for one in (await store.find_deliveries(asked, limit=100)).items]
            assert sorted(deliveries) == sorted(answer), text


async def test_every_way_to_a_list_looks_into_encrypted_bodies(ground: Ground) -> None:
    async with opened(ground, NEW) as store:
        await deliver_one(store, "s", body=body(1))
        one = await deliver_one(store, "s", body=body(2))
        for text in ("", "subject:s", "status:pending", "source:orders", "destination:crm", "since:1h"):
            asked = parse(f"body.n:2 {text}", NOW) if "since" not in text else parse("body.n:2", NOW)
            assert [found.id for found in (await store.find_deliveries(asked)).items] == [one], text
            assert [found.id[:14] for found in (await store.find_events(asked)).items] == [one[:14]], text
        await take(store)
        leased = parse("body.n:>0 status:leased", NOW)
        assert len((await store.find_deliveries(leased)).items) == len((await store.find_events(leased)).items) == 1


async def test_a_replay_and_a_discard_mean_what_encrypted_bodies_say(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_read, "_AT_ONCE", 1)
    async with opened(ground, NEW) as store:
        [one] = await dead_letters(store, None, body=body(1))
        [two] = await dead_letters(store, None, body=body(2))
        [three] = await dead_letters(store, None, body=body(3))
        planned = await store.plan_replay(parse("body.n:2", NOW), force=False)
        assert (planned.total, [sample.id for sample in planned.sample]) == (1, [two])
        assert await store.discard(parse("body.n:>2", NOW), "ann", "too much") == 1
        assert (await replay_all(store, parse("body.n:<2", NOW), expected=1)).planned == 1
        await store.feed_replays()
        assert await statuses(store, [one, two, three]) == ["pending", "dead", "discarded"]
        assert (await take_one(store, priority=Priority.replay)).event.body == body(1)


async def test_a_page_looks_into_so_many_bytes_and_says_how_far_it_came(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (read, postgres_read):
        monkeypatch.setattr(module, "LOOKED_INTO", 3000)
    async with opened(ground, NEW) as store:
        wanted = await deliver_one(store, "s", body=body(1))
        for _ in range(7):
            await deliver_one(store, "s", body=body(0, "x" * 980))
        for look in (store.find_events, store.find_deliveries):
            assert await walk(look, parse("body.n:1", NOW)) == [[], [], [], [wanted[:14]]]


async def walk(look: Callable[..., Any], asked: Filter) -> list[list[bytes]]:
    seen, before = [], None
    while not seen or before is not None:
        page = await look(asked, before=before)
        seen.append([one.id[:14] for one in page.items])
        before = page.next
    return seen


@pytest.mark.parametrize(("name", "most"), [("MOST_DECRYPTED", 2), ("MOST_DECRYPTED_BYTES", 200)])
async def test_what_would_decrypt_too_much_is_refused(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    for module in (read, postgres_read):
        monkeypatch.setattr(module, name, most)
    asked = parse("body.n:1", NOW)
    async with opened(ground, NEW) as store:
        dead = await dead_letters(store, None, None, None, body=body(1))
        orders: list[Callable[[], Any]] = [
            lambda: store.plan_replay(asked, force=False),
            lambda: replay_all(store, asked),
            lambda: store.discard(asked, "ann", ""),
        ]
        for order in orders:
            with pytest.raises(QueryTooWide) as caught:
                await order()
            assert caught.value.code == "query_too_wide"
        assert await statuses(store, dead) == ["dead"] * 3
        await store.discard(Filter(ids=dead[:2], body=asked.body), "ann", "")
        assert await statuses(store, dead) == ["discarded", "discarded", "dead"]


# -- the ways in and out that only one engine has --------------------------------------------------


async def test_a_replayed_delivery_is_decrypted_again(ground: Ground) -> None:
    async with opened(ground, NEW) as store:
        [one] = await dead_letters(store, "s", body=body(1))
        await replay(store, one)
        lease = await take_one(store)
        assert (lease.event.body, lease.delivery.run) == (body(1), 2)
        await settle(store, done(lease))
        waiting = [await deliver_one(store, "t", body=body(n)) for n in (2, 3)]
        assert (await store.settle([done(await take_one(store), take_next=30.0)])).next[0].event.body == body(3)
        assert await statuses(store, waiting) == ["done", "leased"]


async def test_what_is_kept_in_a_foreign_transaction_is_encrypted(ground: Ground) -> None:
    if not isinstance(ground, PostgresGround):
        return  # SQLite lends its transaction to nobody
    async with opened(ground, NEW) as store:
        assert isinstance(store, PostgresStore)
        made: list[Intake] = [intake(item("o", body=body(1))), intake(item("p", body=body(2)))]
        async with await psycopg.AsyncConnection.connect(ground.url) as connection:
            [first] = await store.record_in(connection, made[0])
        with psycopg.connect(ground.url) as blocking:
            [second] = store.record_in_blocking(blocking, made[1])
        await deliver_one(store, body=body(3))
        lease = await take_one(store)
        emission = Emission(intake(item("e", body=body(4)), source_id=2), lambda verdict: None)
        async with store.transaction() as transaction:
            answered = Evidence(200, None, b"c4nary-answer")
            await transaction.settle(done(lease, evidence=answered, emits=[emission]))
        await deliver_one(store, body=body(5))
        with store.blocking_transaction() as transaction:
            transaction.settle(done(await take_one(store), evidence=answered))
        assert emission.verdict is not None
        kept = [(await event_of(store, one)).body for one in (first, second, emission.verdict)]
        assert kept == [body(1), body(2), body(4)]
        [attempt] = await store.attempts_of(lease.delivery.id)
        assert attempt.evidence.answer == b"c4nary-answer"
        await finish(store)
        assert CANARY not in raw_bytes(ground)
