"""What only SQLite has to promise of the way out: heartbeats in memory, effects inside the writer, a full disk."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from oncehook.errors import ConfigError, MigrationNeeded, StoreUnavailable
from oncehook.model import (
    DeliveryId,
    DeliveryStatus,
    Filter,
    LeaseRequest,
    Options,
    Priority,
    Settle,
    Settled,
    Settlement,
    new_id,
)
from oncehook.store import migrate
from oncehook.store.sqlite import SqliteStore, connection, read
from tests.store.conftest import SqliteGround, failed_checks
from tests.store.making import (
    CRM,
    deliver,
    deliver_one,
    done,
    enrolled,
    ids,
    intake,
    item,
    keep,
    look,
    outcomes,
    record,
    retry,
    take,
    take_one,
)
from tests.store.making import dead as dead_end
from tests.store.making import replay as replay_one
from tests.store.making import settle as settle_all
from tests.store.place import patient


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[SqliteGround]:
    made = SqliteGround(tmp_path)
    yield made
    made.remove()


@pytest.fixture
async def inbox(ground: SqliteGround, tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "inbox.db", timeouts=patient(full_disk=0.05))
    await store.open()
    await enrolled(store)
    yield store
    failed = failed_checks(await store.check())
    await store.close()
    assert failed == []


def rows(store: SqliteStore, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(store.path, timeout=60, isolation_level=None)) as connection:
        return connection.execute(statement, parameters).fetchall()


# -- heartbeats --------------------------------------------------------------------------------------


async def test_a_heartbeat_writes_nothing(inbox: SqliteStore) -> None:
    await deliver_one(inbox)
    lease = await take_one(inbox)
    with closing(sqlite3.connect(inbox.path)) as beside:
        (before,) = beside.execute("PRAGMA data_version").fetchone()
        assert await asyncio.to_thread(inbox.renew, [lease]) == {lease.fence}
        assert beside.execute("PRAGMA data_version").fetchone() == (before,)


async def test_a_blocked_loop_loses_no_lease(ground: SqliteGround, inbox: SqliteStore) -> None:
    """R32: the heartbeat comes from a thread, and nobody but this process could take the lease."""
    await deliver(inbox, None, None)
    first, second = await take(inbox, lease=100.0)

    def beat() -> None:
        for _ in range(3):
            ground.forward(60)
            inbox.renew([first])

    thread = threading.Thread(target=beat)
    thread.start()
    thread.join()  # the loop stands still, longer than the lease
    assert await take(inbox) == []  # the one without heartbeat is a suspect now
    assert ids(await take(inbox, priority=Priority.quarantined)) == [second.delivery.id]
    await settle_all(inbox, done(first))
    assert not (await inbox.settle([done(second)])).ours


async def test_renewed_leases_do_not_stand_in_the_way(ground: SqliteGround, inbox: SqliteStore) -> None:
    """They are the first in the queue, and more than are asked for: those behind them are found all the same."""
    await deliver(inbox, *[None] * 30)
    held = await take(inbox, lease=100.0)
    ground.forward(101)
    waiting = await deliver(inbox, None, None)
    assert len(inbox.renew([structs.replace(lease, seconds=600.0) for lease in held])) == 30
    assert ids(await take(inbox, limit=1)) == waiting[:1]
    assert ids(await take(inbox, limit=5)) == waiting[1:]
    next_due = await inbox.next_due([1])
    assert next_due.due_in is not None
    assert next_due.due_in > 10
    await settle_all(inbox, *[done(lease) for lease in held])


async def test_a_lease_that_is_over_is_forgotten(ground: SqliteGround, inbox: SqliteStore) -> None:
    await deliver(inbox, None, None, None)
    one, two, three = await take(inbox, lease=10.0)
    await settle_all(inbox, done(one))
    ground.forward(11)
    await take(inbox)
    assert inbox.renew([one, two, three]) == set()
    assert inbox._heartbeats._until == {}


async def test_leases_nobody_waits_for_any_more_are_given_back(inbox: SqliteStore) -> None:
    """R37: a worker that is stopped while it asks has not crashed."""
    made = await deliver(inbox, None, "s")
    asking = asyncio.create_task(take(inbox, lease=3600.0))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    while rows(inbox, "SELECT max(fence), max(leased) FROM heads") != [(2, 0)]:
        await asyncio.sleep(0.01)
    leases = await take(inbox)
    assert sorted(ids(leases)) == sorted(made)
    assert [lease.delivery.attempt for lease in leases] == [1, 1]
    assert await inbox.attempts_of(made[0]) == []


async def test_a_closed_store_cannot_tell(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "inbox.db")
    with pytest.raises(StoreUnavailable):
        store.renew([])


# -- a process that is gone --------------------------------------------------------------------------


async def test_work_is_taken_over_at_once_when_the_file_is_opened_again(inbox: SqliteStore, tmp_path: Path) -> None:
    """What a killed process leaves is the file and its log: no lease must run out, no fence is given twice (R25)."""
    made = await deliver(inbox, "s", "s", None)
    leases = await take(inbox, lease=3600.0)
    left = tmp_path / "left"
    left.mkdir()
    for name in ("inbox.db", "inbox.db-wal"):
        shutil.copy(tmp_path / name, left / name)
    heir = SqliteStore(left / "inbox.db")
    await heir.open()
    try:
        assert await take(heir) == []  # set aside: any of them may have killed the process
        again = await take(heir, priority=Priority.quarantined)
        assert sorted(ids(again)) == sorted([made[0], made[2]])
        assert min(lease.fence for lease in again) > max(lease.fence for lease in leases)
        for lease in again:
            assert lease.delivery.attempt == 1
            assert [one.outcome for one in await heir.attempts_of(lease.delivery.id)] == ["crashed"]
        assert (await heir.settle([done(lease) for lease in leases])).ours == set()
        assert failed_checks(await heir.check()) == []
    finally:
        await heir.close()
    await settle_all(inbox, *[done(lease) for lease in leases])


async def test_leases_outlive_a_database_that_had_to_be_reopened(inbox: SqliteStore) -> None:
    """R59: the process lives, so its leases do too."""
    await deliver_one(inbox)
    lease = await take_one(inbox, lease=3600.0)
    await asyncio.to_thread(inbox._writer._reopen)
    assert await take(inbox) == []
    assert inbox.renew([lease]) == {lease.fence}
    await settle_all(inbox, done(lease))


async def test_an_older_store_is_brought_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R65: what waited before a later step of the schema is worked off after it; steps run once, in order."""
    path = tmp_path / "inbox.db"
    store = SqliteStore(path)
    await store.open()
    await enrolled(store)
    mine = await deliver_one(store)
    await store.close()
    steps = [
        *migrate.migrations(SqliteStore.engine),
        migrate.Migration(2, "tags", "ALTER TABLE events ADD COLUMN tag TEXT;\nCREATE TABLE tags (name TEXT);\n"),
        migrate.Migration(
            3, "tagged", "INSERT INTO tags SELECT hex(id) FROM events;\nUPDATE events SET tag = 'old';\n"
        ),
    ]
    monkeypatch.setattr(migrate, "migrations", lambda engine: steps)
    store = SqliteStore(path)
    with pytest.raises(MigrationNeeded):
        await store.open(migrate=False)
    await store.open()
    try:
        assert (await store.schema_state()).current == 3
        assert rows(store, "SELECT tag FROM events") == [("old",)]
        assert len(rows(store, "SELECT name FROM tags")) == 1
        lease = await take_one(store)
        assert (lease.delivery.id, lease.delivery.options) == (mine, Options.none)
        await settle_all(store, done(lease))
        assert failed_checks(await store.check()) == []
    finally:
        await store.close()


# -- numbers -----------------------------------------------------------------------------------------


async def test_replays_and_arrivals_draw_from_one_sequence(inbox: SqliteStore) -> None:
    """R42: the tail that a replay joins is the same that an arrival joins."""
    [first] = await deliver(inbox, "s")
    await settle_all(inbox, dead_end(await take_one(inbox)))
    second = await deliver_one(inbox, "s")
    await asyncio.gather(replay_one(inbox, first), record(inbox, intake(item("k", subject="s", to=[CRM]))))
    await deliver_one(inbox, "s")
    numbers = [seq for (seq,) in rows(inbox, "SELECT seq FROM deliveries ORDER BY seq")]
    assert numbers == [2, 3, 4, 5]
    assert rows(inbox, "SELECT value FROM marks WHERE name = 'seq'") == [(5,)]
    assert (await take_one(inbox)).delivery.id == second


async def test_a_page_says_how_far_it_looked(inbox: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    scarce = await deliver_one(inbox, "s", type_="scarce")
    await deliver(inbox, *[None] * 25)
    monkeypatch.setattr(read, "LOOKED_AT", 10)
    for one_page in (inbox.find_deliveries, inbox.find_events):
        found, sizes, before = [], [], None
        while True:
            page = await one_page(Filter(type="scarce"), before=before, limit=5)
            found += [one.id for one in page.items]
            sizes.append(len(page.items))
            before = page.next
            if before is None:
                break
        assert [one[:14] for one in found] == [scarce[:14]]
        assert sizes == [0, 0, 1]


async def test_lists_hold_when_ids_run_ahead(inbox: SqliteStore) -> None:
    """R64: after a clock was set forward and back, ids say a later time than the store; nothing is missed for it."""
    ahead = (int.from_bytes(new_id()[:6]) + 86_400_000).to_bytes(6) + new_id()[6:]
    await keep(inbox, item(event_id=ahead, to=[CRM]))
    early, late = DeliveryId.of(ahead, 1), await deliver_one(inbox)
    border = (await look(inbox, late)).received_at
    assert [one.id for one in (await inbox.find_deliveries(Filter(until=border))).items] == [early]
    assert [one.id for one in (await inbox.find_deliveries(Filter(since=border))).items] == [late]
    assert await inbox.count_since(border) == {DeliveryStatus.pending: 1, DeliveryStatus.leased: 0}


async def test_the_highest_rank_stands_whoever_is_settled_last(inbox: SqliteStore) -> None:
    """Two of one scope at work at once: the lower one ends later, and what comes between them is stale all the same."""
    about: dict[str, Any] = {"rank_scope": "wamid", "options": Options.latest_wins}
    for rank in (1, 3):
        await deliver_one(inbox, f"s{rank}", rank=rank, **about)
    low, high = await take(inbox)
    await settle_all(inbox, done(high))
    await settle_all(inbox, done(low))
    await deliver_one(inbox, "s", rank=2, **about)
    assert (await take_one(inbox)).is_stale


# -- who is woken --------------------------------------------------------------------------------------


async def test_what_may_be_due_wakes(inbox: SqliteStore) -> None:
    woken: list[object] = []
    inbox.observer.wake = woken.append

    async def wakes(act: Any) -> bool:
        woken.clear()
        await act
        return bool(woken)

    assert not await wakes(keep(inbox, item("nobody's")))
    assert await wakes(keep(inbox, item("k", to=[CRM])))
    assert not await wakes(keep(inbox, item("k", to=[CRM])))
    assert not await wakes(inbox.ping())
    woken.clear()
    lease = await take_one(inbox)
    assert not woken
    assert not await wakes(inbox.settle([retry(lease, 9999.0)]))  # whoever settles knows when it is due
    assert await wakes(inbox.retry_now(lease.delivery.id, "ann"))
    await settle_all(inbox, dead_end(await take_one(inbox)))
    assert await wakes(replay_one(inbox, lease.delivery.id))
    assert await wakes(inbox.feed_replays())
    assert await wakes(inbox.resume(1, "ann"))


# -- a handler's effect (R51, R52) -----------------------------------------------------------------------


@pytest.fixture(params=["owner", "client"])
async def ledger(inbox: SqliteStore, request: pytest.FixtureRequest) -> AsyncIterator[SqliteStore]:
    """The store whose effects are looked at: the one that owns the file, or a client that borrows the write lock."""
    rows(inbox, "CREATE TABLE ledger (n INTEGER PRIMARY KEY, what TEXT)")
    if request.param == "owner":
        yield inbox
        return
    client = SqliteStore(inbox.path, timeouts=patient(full_disk=0.05))
    await client.open()
    assert not client.owns
    yield client
    await client.close()


def is_sound(store: SqliteStore) -> bool:
    return store._writer.broken is None or not store.owns


def written(store: SqliteStore) -> list[str]:
    return [what for (what,) in rows(store, "SELECT what FROM ledger ORDER BY n")]


async def test_effect_and_completion_are_one_commit(ledger: SqliteStore) -> None:
    made = await deliver_one(ledger)
    lease = await take_one(ledger)

    def effect(connection: Any) -> None:
        connection.execute("INSERT INTO ledger (what) VALUES (?)", ("paid",))
        connection.executemany("INSERT INTO ledger (what) VALUES (?)", [("a",), ("b",)])
        assert connection.execute("SELECT count(*) FROM ledger").fetchone() == (3,)

    await settle_all(ledger, done(lease, commit=effect))
    assert written(ledger) == ["paid", "a", "b"]
    assert (await look(ledger, made)).status == "done"
    assert (await ledger.settle([done(lease, commit=effect)])).ours == set()  # no longer ours: not even called
    assert len(written(ledger)) == 3


class Own(Exception):
    pass


@pytest.mark.parametrize(
    "fault",
    [Own("mine"), ValueError("mine"), KeyError("mine"), sqlite3.OperationalError("mine"), StoreUnavailable("x")],
)
async def test_a_failing_effect_takes_only_itself_back(ledger: SqliteStore, fault: Exception) -> None:
    made = await deliver(ledger, None, None)
    bad, good = await take(ledger)

    def effect(connection: Any) -> None:
        connection.execute("INSERT INTO ledger (what) VALUES ('half')")
        raise fault

    refused, kept_, settled = await asyncio.gather(
        ledger.settle([done(bad, commit=effect)]),
        record(ledger, intake(item("beside"))),
        ledger.settle([done(good, commit=lambda c: c.execute("INSERT INTO ledger (what) VALUES ('whole')"))]),
        return_exceptions=True,
    )
    assert refused is fault
    assert not isinstance(kept_, BaseException)
    assert outcomes(kept_) == ["accepted"]
    assert isinstance(settled, Settled)
    assert settled.ours == {good.fence}
    assert written(ledger) == ["whole"]
    assert (await look(ledger, made[0])).status == "leased"
    await settle_all(ledger, done(bad))
    assert is_sound(ledger)


async def test_a_wrong_statement_is_the_effects_own_mistake(ledger: SqliteStore) -> None:
    await deliver_one(ledger)
    lease = await take_one(ledger)
    for wrong in ("SELECT * FROM nowhere", "INSERT INTO ledger (n) VALUES ('x')", "nonsense", "INSERT INTO ledger"):
        with pytest.raises(sqlite3.Error):
            await ledger.settle([done(lease, commit=lambda c, text=wrong: c.execute(text))])
    with pytest.raises(sqlite3.Error):
        await ledger.settle([done(lease, commit=lambda c: c.execute("SELECT ?"))])
    assert is_sound(ledger)
    await settle_all(ledger, done(lease))


@pytest.mark.parametrize(
    "statement",
    [
        *("COMMIT", "commit", " \n\tEND", "BEGIN", "ROLLBACK", "SAVEPOINT x", "RELEASE call", "VACUUM"),
        *("ATTACH 'x.db' AS x", "DETACH x", "PRAGMA synchronous = OFF", "; COMMIT", "\ufeffCOMMIT"),
        *("-- just\nCOMMIT", "/* a */ /* b */COMMIT", "/* ; */ -- x\n  rollback to call"),
    ],
)
async def test_an_effect_cannot_touch_the_transaction(ledger: SqliteStore, statement: str) -> None:
    await deliver_one(ledger)
    lease = await take_one(ledger)
    for call in (lambda c: c.execute(statement), lambda c: c.executemany(statement, [()])):
        with pytest.raises(ConfigError, match="not for a commit function"):
            await ledger.settle([done(lease, commit=call)])
    await settle_all(ledger, done(lease))


async def test_a_connection_is_lent_for_one_call(ledger: SqliteStore) -> None:
    await deliver_one(ledger)
    borrowed: list[Any] = []
    await settle_all(ledger, done(await take_one(ledger), commit=borrowed.append))
    with pytest.raises(ConfigError, match="lent"):
        borrowed[0].execute("SELECT 1")


async def test_an_effect_that_rolls_everything_back_writes_nothing(ledger: SqliteStore) -> None:
    """`OR ROLLBACK` ends the whole transaction, whoever swallows the error: then nothing of the group may be kept."""
    await deliver_one(ledger)
    lease = await take_one(ledger)
    rows(ledger, "INSERT INTO ledger VALUES (1, 'there')")

    def effect(connection: Any) -> None:
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute("INSERT OR ROLLBACK INTO ledger VALUES (1, 'again')")

    with pytest.raises(StoreUnavailable):
        await ledger.settle([done(lease, commit=effect)])
    while not is_sound(ledger):
        await asyncio.sleep(0.01)
    assert await ledger.attempts_of(lease.delivery.id) == []
    await settle_all(ledger, done(lease))


async def test_what_ends_a_program_does_not_end_the_writer(ledger: SqliteStore) -> None:
    await deliver_one(ledger)
    lease = await take_one(ledger)
    for fault in (SystemExit(1), StopIteration()):

        def effect(connection: Any, fault: BaseException = fault) -> None:
            raise fault

        with pytest.raises(RuntimeError, match="commit function raised"):
            await ledger.settle([done(lease, commit=effect)])
    await settle_all(ledger, done(lease))


# -- a full disk (R58) -----------------------------------------------------------------------------------


async def test_the_reserve_is_there(inbox: SqliteStore) -> None:
    about = inbox.path.with_name("inbox.db-reserve").stat()
    assert (about.st_size, stat.S_IMODE(about.st_mode)) == (connection.SIZE, 0o600)
    assert about.st_blocks * 512 >= connection.SIZE


async def test_on_a_full_disk_pruning_goes_on_and_intake_waits(
    inbox: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = inbox.path.with_name("inbox.db-reserve")
    allocate = os.posix_fallocate

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    await keep(inbox, *[item(body=b"x" * 50_000) for _ in range(20)])
    connection = inbox._writer._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 4}")
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    waiting = [inbox.record(intake(item(body=b"x" * 100_000))).future for _ in range(300)]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    assert not file.exists()
    with pytest.raises(StoreUnavailable, match="disk is full"):
        inbox.record(intake(item()))
    with pytest.raises(StoreUnavailable, match="disk is full"):
        await inbox.ping()  # who takes nothing in is not ready
    assert (await inbox.prune({}, -1.0, limit=5)).events == 5  # what makes room has its way
    with pytest.raises(StoreUnavailable, match="disk is full"):
        inbox.record(intake(item()))  # little room is left to what needs it
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    connection.execute("PRAGMA max_page_count = 1073741823")
    while inbox._writer._is_full:
        await asyncio.sleep(0.01)
    assert file.exists()
    assert outcomes(await keep(inbox, item())) == ["accepted"]


async def test_room_inside_the_file_is_space_too(inbox: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await keep(inbox, *[item(body=b"x" * 500_000) for _ in range(12)])

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    inbox._writer._run_dry()
    with pytest.raises(StoreUnavailable, match="disk is full"):
        inbox.record(intake(item()))
    assert (await inbox.prune({}, -1.0)).events == 12
    assert outcomes(await keep(inbox, item())) == ["accepted"]


# -- many at once ----------------------------------------------------------------------------------------


async def test_large_rounds_are_whole(inbox: SqliteStore) -> None:
    """Rounds that do not divide evenly into the statements' dozens; each outcome where it belongs."""
    made = await deliver(inbox, *[None if n % 3 else f"s{n % 7}" for n in range(517)])
    seen: list[bytes] = []
    whats = [Settle.done, Settle.retry, Settle.dead, Settle.release]
    for round_ in range(40):
        leases = await inbox.lease([LeaseRequest(1, 173, 30.0)])
        if not leases:
            break
        chosen = [whats[(n + round_) % 4] if round_ < 6 else Settle.done for n in range(len(leases))]
        settlements = [Settlement(lease, what) for lease, what in zip(leases, chosen, strict=True)]
        assert (await inbox.settle(settlements)).ours == {lease.fence for lease in leases}
        seen += [lease.delivery.id for lease, what in zip(leases, chosen, strict=True) if what in ("done", "dead")]
    assert sorted(seen) == sorted(made)
    assert rows(inbox, "SELECT count(*) FROM heads") == [(0,)]
    assert rows(inbox, "SELECT count(*) FROM deliveries WHERE status NOT IN ('done', 'dead')") == [(0,)]


# -- hot subjects ------------------------------------------------------------------------------


async def test_a_subject_that_goes_on_waits_for_one_commit_and_not_for_two(inbox: SqliteStore) -> None:
    """Arrivals that gathered during a commit do not leave the settlement behind that follows from it."""
    commits = 0

    def count(operation: str, seconds: float) -> None:
        nonlocal commits
        commits += operation == "commit"

    async def keep_arriving() -> None:
        while not is_over:
            pending.append(inbox.record(intake(item())).future)
            await asyncio.sleep(0.0001)

    await deliver(inbox, *["hot"] * 41)
    [lease] = await take(inbox)
    is_over, pending = False, []
    arrivals = asyncio.create_task(keep_arriving())
    inbox.observer.note_commit = count
    for _ in range(40):
        [lease] = (await inbox.settle([Settlement(lease, Settle.done, take_next=30.0)], "w")).next
    assert 40 <= commits <= 50
    is_over = True
    await asyncio.gather(arrivals, *pending)
