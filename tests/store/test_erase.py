"""S37: a subject is erased. Its content goes, wherever it was kept; counts, keys and the audit trail stay."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from oncehook.errors import Erased, NotReplayable, ReplayTooSoon, StoreUnavailable
from oncehook.model import (
    ERASED,
    EraseOrder,
    Erasure,
    Evidence,
    Exchange,
    Filter,
    Mark,
    Options,
    Outcome,
    Priority,
    Rejection,
    ReplayState,
    Settle,
    Settlement,
    subject_hash,
)
from oncehook.store.base import Store
from oncehook.store.sqlite import SqliteStore, engine
from tests.store.conftest import Ground
from tests.store.making import (
    CRM,
    MAIL,
    AdminOnly,
    dead,
    deliver,
    deliver_one,
    done,
    event_of,
    finish,
    intake,
    is_lost,
    item,
    keep,
    look,
    progress,
    record,
    replay,
    replay_all,
    retry,
    settle,
    statuses,
    take,
    take_one,
)

CANARY = "cus_canary_42"
ORDER = EraseOrder(CANARY, actor="ann", reason="asked by letter 7", spelled=CANARY)

TABLES = (
    *("events", "deliveries", "attempts", "arrivals", "batches", "keys", "ranks", "replays", "audit", "heads"),
    "rejections",
)


async def erase(store: Store, order: EraseOrder = ORDER, limit: int = 100) -> Erasure:
    """All of it, batch by batch."""
    total = Erasure()
    while (batch := await store.erase(order, limit)).events:
        total += batch
    return total


def leaks(ground: Ground, *words: str) -> list[str]:
    """Tables in which one of these words can still be found."""
    found = []
    for table in TABLES:
        text = repr([tuple(_plain(value) for value in row) for row in ground.sql(f"SELECT * FROM {table}")])
        found += [table for word in words if word in text]
    return found


def _plain(value: Any) -> Any:
    return bytes(value).decode("latin-1") if isinstance(value, bytes | memoryview) else value


# -- what goes, and what stays -----------------------------------------------------------------


async def test_nothing_of_the_subject_is_left(ground: Ground, store: Store) -> None:
    body, other = b'{"mail": "canary-body"}', b'{"mail": "canary-body", "n": 2}'
    head = b"POST /in/orders?who=canary-head\r\nx: canary-head"
    mine = item("canary-key", subject=CANARY, body=body, to=[CRM, MAIL], rank=3, options=Options.latest_wins)
    [kept] = await keep(store, mine, head=head)
    await keep(store, item("canary-key", subject=CANARY, body=other), head=head)  # a conflict: its body is kept
    await keep(store, item("canary-key", subject=CANARY, body=body), head=head)
    lease = await take_one(store)
    await settle(store, retry(lease, error="canary-error"))
    lease = await take_one(store)
    exchange = Exchange("POST", "https://crm.example", {"Oncehook-Subject": CANARY}, (), b"x: canary-sent").encode()
    await settle(store, Settlement(lease, Settle.done, evidence=Evidence(200, None, b"canary-answer", exchange)))
    await settle(store, dead(await take_one(store, to=2), error="canary-error"))
    rejected = Rejection("orders", datetime.now(UTC), "signature_invalid", "mismatch", "", 9)
    rejected.head, rejected.body = b"POST /in/orders?canary-head", b"canary-body"
    await store.record_rejections([rejected], {})
    await replay_all(store, Filter(subject=CANARY), about={"query": f"subject:{CANARY} since:2h"}, force=True)
    words = (CANARY, "canary-body", "canary-head", "canary-key", "canary-error", "canary-answer", "canary-sent")
    assert set(leaks(ground, *words)) == {*TABLES} - {"keys", "batches", "heads", "audit"}

    assert await store.erasable(ORDER) == Erasure(events=1, deliveries=1, attempts=3, arrivals=2)
    assert await erase(store) == Erasure(events=1, deliveries=1, attempts=3, arrivals=2)
    assert leaks(ground, *words) == []
    assert await store.erasable(ORDER) == Erasure()

    event = await event_of(store, kept)
    assert (event.body, event.request_head, event.key, event.subject) == (b"", b"", None, None)
    assert (event.marks, event.type, event.copies) == (Mark.erased, "order.created", 3)
    assert [(one.outcome, one.request_head) for one in await store.arrivals_of(event.id)] == [
        (Outcome.conflict, b""),
        (Outcome.duplicate, b""),
    ]
    crm, mail = [await look(store, one.id) for one in mine.deliveries]
    assert (crm.status, crm.note, crm.reason) == ("done", ERASED, None)
    assert (mail.status, mail.note, mail.reason, mail.last_error) == ("discarded", ERASED, ORDER.reason, None)
    assert [one.n for one in await store.attempts_of(crm.id)] == [1, 2]  # that they were made, and how they ended


async def test_others_are_left_alone(store: Store) -> None:
    theirs = await deliver(store, "cus_canary_4", "cus_canary_421", None)
    elsewhere = await deliver_one(store, CANARY, source="payments", body=b"another's")
    await deliver(store, CANARY, CANARY)
    assert (await erase(store, EraseOrder(CANARY, 1, "ann", "why"))).events == 2
    assert await statuses(store, [*theirs, elsewhere]) == ["pending"] * 4
    found = await store.find_deliveries(Filter(subject=CANARY))
    assert [one.id for one in found.items] == [elsewhere]


async def test_a_late_copy_is_a_duplicate_and_nothing_of_it_is_kept(ground: Ground, store: Store) -> None:
    [first] = await keep(store, item("k", subject=CANARY, body=b"old"))
    await erase(store)
    [same] = await keep(store, item("k", subject=CANARY, body=b"old"))
    [changed] = await keep(store, item("k", subject=CANARY, body=b"new canary-body"))
    assert {(one.outcome, one.event_id) for one in (same, changed)} == {(Outcome.duplicate, first.event_id)}
    assert leaks(ground, CANARY, "canary-body") == []
    [another] = await keep(store, item("k2", subject=CANARY))  # a new event is a new event
    assert another.outcome is Outcome.accepted


async def test_split_requests_lose_their_raw_bytes(ground: Ground, store: Store) -> None:
    alone = intake(item("a", subject=CANARY), item("b", subject=CANARY), raw=b"[canary-raw 1]", head=b"POST /h1")
    shared = intake(item("c", subject=CANARY), item("d", subject="other"), raw=b"[canary-raw 2]", head=b"POST /h2")
    await record(store, alone, shared)
    # the same batch comes again: its raw bytes are kept a second time, with arrivals that hold nothing
    again = intake(item("a", subject=CANARY), item("b", subject=CANARY), raw=b"[canary-raw 3]", head=b"POST /h3")
    await record(store, again)
    before = len(ground.sql("SELECT id FROM batches"))
    expected = Erasure(events=3, arrivals=2, batches=before, shared_batches=1)
    assert await store.erasable(ORDER) == expected
    assert await erase(store, limit=1) == expected  # each batch is counted once, however many events came in it
    assert leaks(ground, "canary-raw", "/h1", "/h3") == []
    [theirs] = (await store.find_events(Filter(subject="other"))).items
    event = await store.get_event(theirs.id)
    assert event is not None
    assert (event.request_head, event.body) == (b"POST /h2", b'{"id": 1}')


# -- what is open ------------------------------------------------------------------------------


async def test_open_ones_are_discarded_and_the_books_balance(store: Store) -> None:
    waiting = await deliver(store, CANARY, CANARY, CANARY)
    [dead_one] = await deliver(store, CANARY, to=MAIL, options=Options.hold)
    [behind] = await deliver(store, CANARY, to=MAIL)
    await settle(store, dead(await take_one(store, to=2)))  # held: the line stands still
    assert (await erase(store)).deliveries == 5
    assert await statuses(store, [*waiting, dead_one, behind]) == ["discarded"] * 5
    assert await take(store) == []
    assert await take(store, to=2) == []
    fresh = await deliver_one(store, CANARY)  # the line begins anew
    assert (await take_one(store)).delivery.id == fresh


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_a_worker_in_flight_can_settle_nothing(store: Store, limit: int) -> None:
    """STORAGE.md 3.5: a settle that comes late must not promote what was closed, nor write what was said."""
    made = await deliver(store, CANARY, CANARY, CANARY)
    lease = await take_one(store)
    assert store.renew([lease]) == {lease.fence}
    first = await store.erase(ORDER, limit)
    assert first.events == min(limit, 3)
    assert store.renew([lease]) == set()
    late = Settlement(lease, Settle.done, evidence=Evidence(200, answer=b"canary-answer"))
    assert await is_lost(store, late)
    await erase(store, limit=limit)
    assert await is_lost(store, late)
    assert await statuses(store, made) == ["discarded"] * 3
    assert await store.attempts_of(made[0]) == []
    assert await take(store) == []


async def test_an_attempt_that_carries_an_erased_one_is_void(store: Store) -> None:
    """A coalesced attempt is for its newest; a replayed one may stand behind a head that came after it."""
    old = await deliver_one(store, CANARY, options=Options.coalesce_any)
    await settle(store, done(await take_one(store)))
    head = await deliver_one(store, CANARY, options=Options.coalesce_any)
    await replay(store, old, force=True)  # joins the tail: its event is the oldest, and is erased first
    lease = await take_one(store)
    assert (lease.front_id, lease.delivery.id) == (head, old)
    assert (await store.erase(ORDER, 1)).deliveries == 1
    assert await is_lost(store, done(lease))
    assert await statuses(store, [old, head]) == ["discarded", "pending"]
    again = await take_one(store)
    assert (again.delivery.id, again.delivery.attempt) == (head, 1)
    await settle(store, done(again))


async def test_two_erasures_at_once_share_the_work(store: Store) -> None:
    made = await deliver(store, *[CANARY] * 25)
    await take_one(store)
    totals = await asyncio.gather(*[erase(store, limit=2) for _ in range(3)])
    assert sum(totals, Erasure()) == Erasure(events=25, deliveries=25)
    assert await statuses(store, made) == ["discarded"] * 25


async def test_arrivals_and_workers_go_on_meanwhile(store: Store) -> None:
    """What comes while it runs is either worked or erased; nothing is lost in between, and the books balance."""
    made = [one for _ in range(6) for one in await deliver(store, *[CANARY] * 5, *[f"other-{_}"] * 2)]

    async def arrive() -> None:
        for _ in range(20):
            made.extend(await deliver(store, CANARY, "other"))

    async def work() -> None:
        for _ in range(30):
            leases = await take(store, 3)
            await asyncio.sleep(0)
            await store.settle([done(lease) for lease in leases])

    await asyncio.gather(arrive(), work(), erase(store, limit=3), work(), erase(store, limit=3))
    await finish(store)
    assert set(await statuses(store, made)) <= {"done", "discarded"}
    theirs = (await store.find_deliveries(Filter(text="other"), limit=100)).items
    assert {one.status for one in theirs} == {"done"}


async def test_a_replay_at_the_same_moment_gets_it_whole_or_not_at_all(store: Store) -> None:
    """What is replayed while it is erased must not go out empty."""
    made = await deliver(store, *[CANARY] * 30)
    await finish(store)

    await asyncio.gather(erase(store, limit=1), replay_each(store, made), replay_each(store, made[::-1]))
    assert [lease for lease in await take(store) if not lease.event.body] == []
    assert await erase(store) == Erasure()
    assert set(await statuses(store, made)) <= {"done", "discarded"}


async def replay_each(store: Store, made: list[bytes]) -> None:
    for one in made:
        with contextlib.suppress(NotReplayable, ReplayTooSoon):
            await replay(store, one, force=True)


# -- afterwards --------------------------------------------------------------------------------


async def test_what_was_erased_cannot_be_replayed(store: Store) -> None:
    [one] = await deliver(store, CANARY)
    [two] = await deliver(store, CANARY, to=MAIL)
    await settle(store, done(await take_one(store)))
    await settle(store, dead(await take_one(store, to=2)))
    await erase(store)
    for delivery in (one, two):
        for force in (False, True):
            with pytest.raises(Erased) as refused:
                await replay(store, delivery, force=force)
            assert refused.value.code == "erased"
    plan = await store.plan_replay(Filter(ids=[one, two]), force=True)
    assert (plan.total, plan.sample, sum(plan.left_out.values())) == (0, [], 2)
    with pytest.raises(NotReplayable):
        await replay_all(store, Filter(ids=[one, two]), force=True)


async def test_a_replay_of_what_is_erased_ends(store: Store) -> None:
    """Items that were handed out and items that were not are left out; the replay does not wait for them for ever."""
    made = await deliver(store, CANARY, CANARY, "other")
    for _ in range(2):
        await settle(store, *[dead(lease) for lease in await take(store)])
    bulk = await replay_all(store, Filter(ids=made))
    assert await store.feed_replays(1) == 1
    await erase(store)
    await store.feed_replays()
    assert (await progress(store, bulk)).skipped == 2
    await finish(store, priority=Priority.replay)
    await store.feed_replays()
    ended = await progress(store, bulk)
    assert (ended.state, ended.done, ended.skipped) == (ReplayState.done, 1, 2)


async def test_the_audit_trail_names_no_subject(ground: Ground, store: Store) -> None:
    await deliver(store, CANARY, CANARY)
    await settle(store, dead(await take_one(store)))
    await replay_all(store, Filter(subject=CANARY), about={"query": f'subject:{CANARY}0 "x" subject:{CANARY}'})
    await erase(store)
    line = (await store.audit_log())[0]
    assert (line.actor, line.act, line.target) == ("ann", "erase", f"subject {subject_hash(CANARY)}")
    assert (line.detail["reason"], line.detail["events"], line.detail["deliveries"]) == (ORDER.reason, 2, 2)
    [bulk] = (await store.find_replays()).items
    assert bulk.about["query"] == f'subject:{CANARY}0 "x" subject:[erased]'  # another's is another's


async def test_it_goes_on_where_it_stopped(ground: Ground, store: Store) -> None:
    await deliver(store, *[CANARY] * 5)
    assert (await store.erase(ORDER, 2)).events == 2
    assert (await store.erasable(ORDER)).events == 3  # whoever asks again, after a crash too
    assert (await erase(store)).events == 3
    assert await store.erase(ORDER) == Erasure()


async def test_the_files_themselves_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the database nor its log holds the text any more, while the store runs on.

    SQLite leaves what is freed in its pages, unless it is told to overwrite it. Some builds do so by themselves: here
    it is first told not to, as others do. What was freed before the erasure counts, too: an error that another one has
    replaced, and the oldest of many copies.
    """
    connect = sqlite3.connect

    def forgetful(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA secure_delete = OFF")
        return connection

    monkeypatch.setattr(sqlite3, "connect", forgetful)
    store = SqliteStore(tmp_path / "oncehook.db")
    await store.open()
    await store.register_names(["orders"], ["crm"])
    erasing = AdminOnly(store).admin
    for n in range(60):
        whose, word = (CANARY, b"canary") if n % 3 == 0 else (f"cus_{n % 7}", b"others")
        body = word + b"-body " * (1, 40, 900)[n % 4 % 3]
        one = item(f"{word.decode()}-key-{n}", subject=whose, body=body, to=[CRM])
        await keep(store, one, head=b"POST /in/orders?who=" + word)
    for error in ("canary-error at first" * 9, "canary-error", "no answer"):
        await settle(store, *[retry(one, error=error) for one in await take(store) if one.event.subject == CANARY])
    for n in range(30):
        await keep(store, item("canary-key-0", subject=CANARY, body=b"canary-copy %d " % n * 500))
    assert _mentions(tmp_path) > 0
    reader = asyncio.create_task(_read_on(store))
    await erasing.erase(CANARY, actor="ann", reason="asked by letter 7")
    reader.cancel()
    assert _mentions(tmp_path) == 0
    await keep(store, item("later", subject="other"))
    assert _mentions(tmp_path) == 0
    assert (await event_of(store, (await keep(store, item("others-key-1")))[0])).body.startswith(b"others")
    await store.close()


def _mentions(folder: Path) -> int:
    """How often the canary sings, in any file."""
    return sum(file.read_bytes().count(b"canary") for file in folder.iterdir() if file.is_file())


async def _read_on(store: Store) -> None:
    while True:
        await store.find_events(Filter())


async def test_a_log_that_is_being_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "EMPTY_LOG_TRIES", 3)
    store = SqliteStore(tmp_path / "oncehook.db")
    await store.open()
    await store.register_names(["orders"], [])
    await keep(store, item("k", subject=CANARY))
    with contextlib.closing(sqlite3.connect(tmp_path / "oncehook.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM events").fetchone()
        with pytest.raises(StoreUnavailable, match="still in the log"):
            await AdminOnly(store).admin.erase(CANARY, actor="ann", reason="asked by letter 7")
    total, left = await AdminOnly(store).admin.erase(CANARY, actor="ann", reason="asked by letter 7")
    assert (total, left, _mentions(tmp_path)) == (Erasure(), 0, 0)
    await store.close()
