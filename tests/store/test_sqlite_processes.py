"""Several processes on one SQLite file: an owner, its clients, and who takes over (R61, S38)."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oncehook.errors import NotFound, ReplayTooSoon, StoreError, StoreHeld, StoreUnavailable
from oncehook.model import Emission, Lease, LeaseRequest, Mark
from oncehook.store.base import StoreObserver, Timeouts
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite import SqliteStore, engine, wire
from oncehook.store.sqlite.connection import Presence, holder
from oncehook.store.sqlite.wire import VERBS, CallFailure, Greeting, socket_path
from tests.effort import effort, first_seed
from tests.store.conftest import SqliteGround, failed_checks
from tests.store.making import (
    CRM,
    deliver,
    deliver_one,
    done,
    enrolled,
    intake,
    item,
    look,
    outcomes,
    record,
    settle,
    statuses,
    take_one,
)
from tests.store.place import patient
from tests.torture.members import OWNED_WITHIN, Run
from tests.waiting import until

KEYS = [bytes(range(n, n + 32)) for n in (0, 100)]


@pytest.fixture
def ground(tmp_path: Path) -> SqliteGround:
    return SqliteGround(tmp_path)


@asynccontextmanager
async def opened(path: Path, observer: StoreObserver | None = None, **options: Any) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, **{"timeouts": patient(takeover=0.3), **options})
    await store.open(observer)
    try:
        await enrolled(store)
        yield store
    finally:
        await store.close()


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with opened(tmp_path / "inbox.db") as store:
        assert store.owns
        yield store


@pytest.fixture
async def client(tmp_path: Path, owner: SqliteStore) -> AsyncIterator[SqliteStore]:
    async with opened(tmp_path / "inbox.db") as store:
        assert not store.owns
        yield store
        failed = failed_checks(await store.check())
    assert failed == []


async def die(store: SqliteStore) -> None:
    """Go as a process does that is killed: nothing is finished, and nobody is told."""
    assert store.server is not None
    assert store.hold is not None
    store.server._accepting.cancel()
    store.server._listening.close()
    for served in list(store.server._clients):
        served._is_taking = False
        assert served._transport is not None
        served._transport.abort()
    for connected in list(store.server._heartbeats):
        connected.close()
    store.server = None
    store._writer._closing = True
    assert store._writer._thread is not None
    store._writer._commits.put(None)
    await asyncio.to_thread(store._writer._thread.join)
    store._writer._thread = None
    store._let_go()


async def lease(store: SqliteStore, worker: str | None = None, limit: int = 100, seconds: float = 30.0) -> list[Lease]:
    return await store.lease([LeaseRequest(CRM[1], limit, seconds, crash_tolerance=5)], worker)


def connected_to(path: Path) -> socket.socket:
    return wire.connect(path, 5.0)


def greeting(**fields: Any) -> Greeting:
    return Greeting(
        **{"protocol": wire.PROTOCOL, "schema": 1, "version": "x", "key": "", "pid": 1, "role": "client", **fields}
    )


# -- the socket --------------------------------------------------------------------------------


async def test_the_socket_is_for_the_same_user_only(
    owner: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = socket_path(tmp_path / "inbox.db")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(wire, "_peer_user", lambda connected: os.geteuid() + 1)
    with pytest.raises(PermissionError):
        connected_to(tmp_path / "inbox.db")
    monkeypatch.chdir(tmp_path)  # the whole path may be too long for an address
    with closing(socket.socket(socket.AF_UNIX)) as stranger:
        stranger.connect(path.name)
        stranger.setblocking(False)
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(stranger, 1), 10) == b""
    monkeypatch.undo()
    connected_to(tmp_path / "inbox.db").close()


async def test_a_socket_at_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["a folder with quite a long name"] * 6)
    async with opened(folder / "inbox.db") as first, opened(folder / "inbox.db") as second:
        assert (first.owns, second.owns) == (True, False)
        assert outcomes(await record(second, intake(item("a")))) == ["accepted"]


async def test_a_name_that_no_socket_can_have_leaves_the_owner_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / ("x" * 150)
    async with opened(path) as first:
        assert outcomes(await record(first, intake(item("a")))) == ["accepted"]
        assert "store.no_clients" in caplog.text
        second = SqliteStore(path, timeouts=Timeouts(connect=1))
        with pytest.raises(StoreHeld, match="takes no clients"):
            await second.open()


async def test_the_socket_of_a_dead_owner_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    wire.listen(path).close()
    async with opened(path) as first, opened(path) as second:
        assert (first.owns, second.owns) == (True, False)


# -- who may be a client ------------------------------------------------------------------------


async def test_a_client_with_another_key_is_refused(tmp_path: Path) -> None:
    """Its payloads would be kept under a key that is not its own, or under none."""
    path = tmp_path / "inbox.db"
    for mine, theirs in (([], KEYS[:1]), (KEYS[:1], []), (KEYS[:1], KEYS[1:])):
        async with opened(path, cipher=Cipher(mine)):
            other = SqliteStore(path, cipher=Cipher(theirs), timeouts=Timeouts(connect=1))
            with pytest.raises(StoreHeld, match="another key"):
                await other.open()
            async with opened(path, cipher=Cipher([*mine, *theirs] if mine else [])) as same:
                assert not same.owns


async def test_a_command_needs_no_key_and_takes_nobodys_place(tmp_path: Path) -> None:
    class Command(StoreObserver):
        acts_only = True

    owner = SqliteStore(tmp_path / "inbox.db", cipher=Cipher(KEYS[:1]), timeouts=patient())
    await owner.open()
    command = SqliteStore(tmp_path / "inbox.db", timeouts=Timeouts(connect=1))
    await command.open(Command())
    await enrolled(command)
    await command.pause(1, "ann", "why not")
    await die(owner)
    with pytest.raises(StoreUnavailable, match="No process owns"):
        await command.resume(1, "ann")
    assert holder(tmp_path / "inbox.db") is None
    await command.close()
    owner.stop_reading()


@pytest.mark.parametrize("other", [{"protocol": wire.PROTOCOL + 1}, {"schema": 999}])
async def test_a_client_of_another_version_is_refused(
    owner: SqliteStore, tmp_path: Path, other: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = SqliteStore(tmp_path / "inbox.db", timeouts=Timeouts(connect=1))
    monkeypatch.setattr(second, "_greeting", lambda: greeting(**{"schema": owner.server._schema, **other}))  # type: ignore[union-attr]
    with pytest.raises(StoreHeld, match="another version"):
        await second.open()


# -- frames that lie ----------------------------------------------------------------------------


def call(number: int, verb: str, arguments: object) -> bytes:
    return bytes(wire.encode((number, verb, arguments)))


NONSENSE = {
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge": b"\xff\xff\xff\xff" + b"x" * 1000,
    "half": call(1, "pause", (1, "a", "b"))[:-3],
    "no msgpack": b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1",
    "no call": bytes(wire.encode({"a": 1})),
    "no such verb": call(1, "close", ()),
    "a private one": call(1, "_own", (True,)),
    "no intakes": call(1, "record", (False, [{"arrival_id": 1}])),
    "an id that is none": call(
        1, "record", (False, [{"arrival_id": b"short", "source_id": 1, "headers": b"", "items": []}])
    ),
    "a loan that is none": call(1, "give_back", "x"),
}


@pytest.mark.parametrize("sent", NONSENSE.values(), ids=NONSENSE.keys())
@pytest.mark.parametrize("greets", [True, False])
async def test_who_sends_nonsense_harms_only_itself(
    owner: SqliteStore, client: SqliteStore, tmp_path: Path, sent: bytes, greets: bool
) -> None:
    liar = await asyncio.to_thread(connected_to, tmp_path / "inbox.db")
    with closing(liar):
        if greets:
            schema = owner.server._schema  # type: ignore[union-attr]
            await asyncio.to_thread(wire.greet, liar, greeting(schema=schema))
        liar.sendall(sent)
        liar.shutdown(socket.SHUT_WR)
        await asyncio.to_thread(read_all, liar)
    assert outcomes(await record(client, intake(item("a")))) == ["accepted"]
    assert outcomes(await record(owner, intake(item("a")))) == ["duplicate"]
    assert owner.server is not None
    await until(lambda: owner.server is not None and owner.server.clients == 1)


def read_all(connected: socket.socket) -> None:
    while connected.recv(65536):
        pass


async def test_wrong_arguments_are_answered(owner: SqliteStore, client: SqliteStore) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        await client.pause("crm", "ann", "why")  # type: ignore[arg-type]
    await client.pause(1, "ann", "why")


async def test_a_client_that_does_not_read_is_cut_off(
    owner: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncehook.store.sqlite.owner.UNREAD_BYTES", 1 << 20)
    assert owner.server is not None
    deaf = await asyncio.to_thread(connected_to, tmp_path / "inbox.db")
    with closing(deaf):
        await asyncio.to_thread(wire.greet, deaf, greeting(schema=owner.server._schema, works=True))
        await until(lambda: owner.server is not None and owner.server.clients == 1)
        for _ in range(2000):
            owner.server.wake(range(1000))
        await until(lambda: owner.server is not None and owner.server.clients == 0)
    assert outcomes(await record(owner, intake(item("a")))) == ["accepted"]


# -- verbs --------------------------------------------------------------------------------------


def test_every_verb_has_types_that_travel() -> None:
    for verb in VERBS.values():
        assert verb.arguments
        assert verb.result
    assert {"settle_leases", "lease_due", "make_replay", "pause", "discard", "erase_batch"} <= VERBS.keys()


@pytest.mark.parametrize("error", [NotFound("nothing"), ReplayTooSoon(12.0), StoreUnavailable("x", hint="y")])
def test_an_error_comes_back_as_itself(error: StoreError) -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(CallFailure.of(error)), type=CallFailure).build()
    assert type(again) is type(error)
    assert (str(again), again.hint, again.code) == (str(error), error.hint, error.code)
    assert getattr(again, "retry_after", None) == getattr(error, "retry_after", None)


async def test_arrivals_of_one_turn_are_one_frame(owner: SqliteStore, client: SqliteStore) -> None:
    before = client.client._number
    await record(client, *(intake(item(f"k{n}")) for n in range(40)))
    assert client.client._number == before + 1


async def test_a_client_is_woken(owner: SqliteStore, tmp_path: Path) -> None:
    class Woken(StoreObserver):
        works = True
        times = 0

        def wake(self, destination_ids: object) -> None:
            self.times += 1

    observer = Woken()
    async with opened(tmp_path / "inbox.db", observer):
        before = observer.times
        await record(owner, intake(item("a", to=[CRM])))
        await until(lambda: observer.times > before)


# -- when the owner goes -------------------------------------------------------------------------


async def test_a_client_takes_over_from_an_owner_that_stops(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    first = SqliteStore(path, timeouts=patient())
    await first.open()
    async with opened(path) as second, opened(path) as third:
        sent = [second.record(intake(item(f"k{n}"))) for n in range(300)]
        await asyncio.gather(first.close(), *(pending.future for pending in sent))
        await until(lambda: second.owns or third.owns)
        assert outcomes(await record(second, intake(item("later")))) == ["accepted"]
        assert outcomes(await record(third, intake(item("later")))) == ["duplicate"]
        assert len(await look_at_all(third)) == 301
    assert not path.with_name("inbox.db-wal").exists()
    assert not socket_path(path).exists()


async def look_at_all(store: SqliteStore) -> list[tuple[Any, ...]]:
    return await store.read(lambda c: c.execute("SELECT id FROM events").fetchall())


async def test_what_was_not_answered_is_kept_once(tmp_path: Path) -> None:
    """Keyed, unkeyed, split, a copy: committed by an owner that dies before it can say so."""
    path = tmp_path / "inbox.db"
    owner = SqliteStore(path, timeouts=patient())
    await owner.open()
    async with opened(path) as client, opened(path) as other:
        first = await record(client, intake(item("known")))
        assert owner.server is not None
        for served in owner.server._clients:
            served.send = lambda frame: None  # type: ignore[method-assign]
        sent = [
            intake(item("new")),
            intake(item(marks=Mark.unkeyed)),
            intake(item("known")),
            intake(item("known", body=b"another")),
            intake(item("part", body=b"1"), item(body=b"2"), item("known"), raw=b"all of it"),
        ]
        pending = [client.record(one) for one in sent]
        await until_committed(client, 5)
        await die(owner)
        verdicts = [await one.future for one in pending]
        assert [outcomes(one) for one in verdicts] == [
            ["accepted"],
            ["accepted"],
            ["duplicate"],
            ["conflict"],
            ["accepted", "accepted", "duplicate"],
        ]
        assert verdicts[2][0].event_id == first[0].event_id
        assert len(await look_at_all(other)) == 5
        assert await other.read(lambda c: c.execute("SELECT count(*) FROM batches").fetchone()) == (1,)
        assert len(await other.arrivals_of(first[0].event_id)) == 3
        assert failed_checks(await other.check()) == []
    owner.stop_reading()


async def until_committed(store: SqliteStore, events: int) -> None:
    async with asyncio.timeout(30):
        while len(await look_at_all(store)) < events:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_held", [True, False], ids=["another has the lock", "it gets the lock"])
async def test_a_client_that_closes_while_it_tries_to_take_over(
    owner: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    began, goes_on = threading.Event(), threading.Event()
    client = SqliteStore(tmp_path / "inbox.db", timeouts=patient())
    await client.open()
    prepare = client._prepare

    def prepare_slowly(migrate: bool) -> Any:
        began.set()
        goes_on.wait()
        return prepare(migrate)

    monkeypatch.setattr(client, "_prepare", prepare_slowly)
    assert client.client._transport is not None
    client.client._transport.abort()
    await until(began.is_set)
    if not is_held:
        await owner.close()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0.05)
    goes_on.set()
    async with asyncio.timeout(30):
        await closing
    assert client.hold is None
    if not is_held:
        async with opened(tmp_path / "inbox.db") as next_owner:
            assert next_owner.owns


async def test_a_client_that_closes_while_it_connects_leaves_no_connection(
    owner: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on = threading.Event(), threading.Event()
    made: list[socket.socket] = []
    client = SqliteStore(tmp_path / "inbox.db", timeouts=patient())
    await client.open()
    connect = engine.connect_to_owner

    def connect_slowly(*arguments: Any) -> Any:
        began.set()
        goes_on.wait()
        connected, welcome = connect(*arguments)
        made.append(connected)
        return connected, welcome

    monkeypatch.setattr(engine, "connect_to_owner", connect_slowly)
    assert client.client._transport is not None
    client.client._transport.abort()
    await until(began.is_set)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0.05)
    goes_on.set()
    async with asyncio.timeout(30):
        await closing
    await until(lambda: made and made[0].fileno() == -1)


async def test_what_was_never_written_is_written_by_the_next_owner(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    owner = SqliteStore(path, timeouts=patient())
    await owner.open()
    async with opened(path) as client:
        assert owner.server is not None
        for served in owner.server._clients:
            served._take = lambda call: None  # type: ignore[method-assign]
        pending = [client.record(intake(item(f"k{n}"))) for n in range(400)]
        acts = [
            asyncio.create_task(client.pause(1, "ann", "x")),
            asyncio.create_task(client.audit("ann", "a", "b", {})),
        ]
        await until(lambda: client.client._sent)
        await die(owner)
        assert [outcomes(await one.future) for one in pending] == [["accepted"]] * 400
        await acts[0]
        with pytest.raises(StoreUnavailable, match="may have been done or not"):
            await acts[1]
        assert client.owns
    owner.stop_reading()


async def test_a_settlement_that_was_not_answered_counts(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    owner = SqliteStore(path, timeouts=patient())
    await owner.open()
    async with opened(path) as client:
        made = await deliver_one(client)
        taken = await take_one(client)
        assert owner.server is not None
        for served in owner.server._clients:
            served.send = lambda frame: None  # type: ignore[method-assign]
        emitted = Emission(intake(item("emitted")), lambda verdict: None)
        settling = asyncio.create_task(client.settle([done(taken, emits=[emitted])]))
        await until_committed(client, 2)
        await die(owner)
        assert (await settling).ours == {taken.fence}
        assert emitted.verdict is not None
        assert emitted.verdict.outcome == "accepted"
        assert (await look(client, made)).status == "done"
        assert len(await client.attempts_of(made)) == 1
    owner.stop_reading()


async def test_while_nobody_owns_it_arrivals_wait_and_then_fail(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    owner = SqliteStore(path, timeouts=patient())
    await owner.open()
    client = SqliteStore(path, timeouts=Timeouts(connect=1))
    await client.open()
    await enrolled(client)
    assert owner.server is not None
    owner.server._accepting.cancel()  # it hangs: it keeps the lock, and answers nothing
    for served in list(owner.server._clients):
        served._transport.abort()  # type: ignore[union-attr]
    await until(lambda: not client.client.is_connected)
    pending = client.record(intake(item("a")))
    with pytest.raises(StoreUnavailable, match="No process owns"):
        await asyncio.wait_for(pending.future, 30)
    with pytest.raises(StoreUnavailable, match="No process owns"):
        client.record(intake(item("a")))
    await client.close()
    await owner.close()


# -- leases --------------------------------------------------------------------------------------


async def test_leases_outlive_their_owner(tmp_path: Path) -> None:
    """Of two workers one lives: it goes on, and what the other held is taken over after a moment."""
    path = tmp_path / "inbox.db"
    owner = SqliteStore(path, timeouts=patient(takeover=0.3))
    await owner.open()
    async with opened(path) as client, opened(path) as third:
        made = await deliver(client, "a", "b")
        [mine] = await lease(client, "host:1:mine", 1)
        [gone] = await lease(owner, "host:2:gone", 1)
        await die(owner)
        await until(lambda: client.owns or third.owns)
        await until(lambda: client.owns or client.client.is_connected)
        assert sorted(await statuses(third, made)) == ["leased", "leased"]
        async with asyncio.timeout(30):
            while not (again := await lease(third, "host:3:new")):
                await asyncio.sleep(0.02)
        assert [one.delivery.id for one in again] == [gone.delivery.id]
        assert await asyncio.to_thread(client.renew, [mine]) == {mine.fence}
        assert (await client.settle([done(mine)])).ours == {mine.fence}
        assert (await client.settle([done(gone)])).ours == set()
        await settle(third, done(again[0]))
        assert await statuses(third, made) == ["done", "done"]
    owner.stop_reading()


async def test_a_heartbeat_that_is_faster_than_its_greeting_counts(tmp_path: Path) -> None:
    """R32: a new owner knows the leases of everybody, whoever has come back by then."""
    path = tmp_path / "inbox.db"
    owner = SqliteStore(path, timeouts=patient())
    await owner.open()
    async with opened(path) as client:
        await deliver(client, "a")
        [mine] = await lease(client, "host:1:mine", 1)
        assert client._standby is not None
        client._standby.cancel()  # it notices nothing yet
        await die(owner)
        async with opened(path) as third:
            assert third.owns
            assert third.renew_fences({mine.fence: 30.0, mine.fence + 1: 30.0}) == {mine.fence}
    owner.stop_reading()


async def test_leases_in_an_answer_that_was_lost_are_put_back(tmp_path: Path) -> None:
    """Nobody began them: no crash, and no attempt."""
    path = tmp_path / "inbox.db"
    owner = SqliteStore(path, timeouts=patient())
    await owner.open()
    async with opened(path) as client:
        made = await deliver_one(client)
        assert owner.server is not None
        for served in owner.server._clients:
            served.send = lambda frame: None  # type: ignore[method-assign]
        taking = asyncio.create_task(lease(client, "host:1:mine"))
        async with asyncio.timeout(30):
            while await statuses(client, [made]) != ["leased"]:
                await asyncio.sleep(0.005)
        for served in list(owner.server._clients):
            served._transport.abort()  # type: ignore[union-attr]
        [taken] = await taking
        assert (taken.delivery.attempt, await client.attempts_of(made)) == (1, [])
        await settle(client, done(taken))
    await owner.close()


async def test_a_client_that_dies_is_taken_over_from(owner: SqliteStore, tmp_path: Path) -> None:
    mortal = SqliteStore(tmp_path / "inbox.db", timeouts=patient())
    await mortal.open()
    await enrolled(mortal)
    made = await deliver_one(mortal)
    await lease(mortal, "host:1:mortal", seconds=600.0)
    assert mortal._standby is not None
    mortal._standby.cancel()
    mortal.client._transport.abort()  # type: ignore[union-attr]
    async with asyncio.timeout(30):
        while not (again := await lease(owner)):
            await asyncio.sleep(0.02)
    assert [one.delivery.id for one in again] == [made]
    await settle(owner, done(again[0]))
    mortal.client.close()
    mortal._let_go()
    mortal.stop_reading()


async def test_a_lone_process_takes_its_own_leases_over_at_once(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    first = SqliteStore(path, timeouts=patient())
    await first.open()
    await enrolled(first)
    await deliver_one(first)
    await lease(first, seconds=600.0)
    await die(first)
    first.stop_reading()
    async with opened(path, timeouts=patient(takeover=600)) as again:
        assert len(await lease(again)) == 1


async def test_a_new_owner_waits_for_workers_that_may_live(tmp_path: Path) -> None:
    path = tmp_path / "inbox.db"
    first = SqliteStore(path, timeouts=patient())
    await first.open()
    await enrolled(first)
    made = await deliver_one(first)
    await lease(first, seconds=600.0)
    beside = Presence(path)
    await die(first)
    first.stop_reading()
    async with opened(path, timeouts=patient(takeover=1.0)) as again:
        assert await lease(again) == []
        async with asyncio.timeout(30):
            while not (taken := await lease(again)):
                await asyncio.sleep(0.05)
        assert [one.delivery.id for one in taken] == [made]
    beside.release()


def test_who_is_alone(tmp_path: Path) -> None:
    first = Presence(tmp_path / "inbox.db")
    assert first.is_alone()
    second = Presence(tmp_path / "inbox.db")
    assert not first.is_alone()
    second.release()
    assert first.is_alone()
    first.release()


# -- the write lock, lent ------------------------------------------------------------------------


async def test_a_loan_that_lapsed_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client slept for longer than the lock was lent, and others have written since."""
    path = tmp_path / "inbox.db"
    async with opened(path, timeouts=patient(loan=0.05)) as owner, opened(path) as client:
        await client.read(lambda c: None)
        made = await deliver_one(client)
        taken = await take_one(client)
        called: list[int] = []
        write = client._write_lent

        def late(*arguments: Any) -> Any:
            future = asyncio.run_coroutine_threadsafe(record_one(owner), loop)
            future.result(30)
            return write(*arguments)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(client, "_write_lent", late)
        with pytest.raises(StoreUnavailable, match="too short"):
            await client.settle([done(taken, commit=lambda c: called.append(1))])
        assert called == []
        monkeypatch.undo()
        assert (await client.settle([done(taken, commit=lambda c: called.append(1))])).ours == {taken.fence}
        assert called == [1]
        assert (await look(client, made)).status == "done"


async def record_one(store: SqliteStore) -> None:
    await record(store, intake(item(marks=Mark.unkeyed)))


async def test_numbers_go_on_behind_what_a_client_wrote(tmp_path: Path) -> None:
    """Also when its transaction outlasts the loan."""
    path = tmp_path / "inbox.db"
    async with opened(path, timeouts=patient(loan=0.05)) as owner, opened(path) as client:
        made = await deliver(client, "s", "s")
        taken = await take_one(client)
        emitted = [Emission(intake(item(subject="s", to=[CRM])), lambda verdict: None) for _ in range(3)]

        def slow(connection: Any) -> None:
            import threading

            threading.Event().wait(0.3)

        settling = asyncio.create_task(client.settle([done(taken, commit=slow, emits=emitted, take_next=30.0)]))
        await asyncio.sleep(0.15)
        await record(owner, intake(item(subject="s", to=[CRM])))
        settled = await settling
        assert settled.ours == {taken.fence}
        assert [one.delivery.id for one in settled.next] == made[1:]
        assert await asyncio.to_thread(client.renew, settled.next) == {settled.next[0].fence}
        numbers = await client.read(lambda c: c.execute("SELECT seq FROM deliveries ORDER BY seq").fetchall())
        assert len(set(numbers)) == len(numbers) == 6
        assert failed_checks(await client.check()) == []


# -- a fork --------------------------------------------------------------------------------------


async def test_a_forked_child_keeps_neither_lock_nor_sockets(tmp_path: Path) -> None:
    """Else its parent's death would go unnoticed for as long as the child lives."""
    path = tmp_path / "inbox.db"
    async with opened(path) as owner, opened(path):
        assert owner.hold is not None
        assert owner.server is not None
        numbers = [
            owner.hold._descriptor,
            owner._presence._descriptor,  # type: ignore[union-attr]
            owner.server._listening.fileno(),
            *(served._transport.get_extra_info("socket").fileno() for served in owner.server._clients),  # type: ignore[union-attr]
        ]
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, b"".join(b"1" if is_open(number) else b"0" for number in numbers))
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        assert os.read(reading, 100) == b"0" * len(numbers)
        os.close(reading)
        assert all(map(is_open, numbers))
        assert outcomes(await record(owner, intake(item("a")))) == ["accepted"]


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


# -- real processes, killed at random --------------------------------------------------------------


@pytest.mark.timeout(3600)
def test_nothing_is_lost_when_processes_are_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, first_seed())
    try:
        run.strike(seconds=3000, kills=effort("MEMBER_KILLS", 6))
        run.end()
        found = run.check()
    finally:
        run.stop()
    assert found["acknowledged"] > 0
    assert run.longest_without < OWNED_WITHIN, f"seed {run.seed}"
