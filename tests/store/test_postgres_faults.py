"""PostgreSQL: connections that break, servers that restart or fall silent; nothing is lost, nothing happens twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncehook.errors import StoreUnavailable
from oncehook.model import Filter, Outcome
from oncehook.store.postgres import PostgresStore, writer
from oncehook.store.postgres.connection import is_alive
from tests.servers import Postgres
from tests.store.conftest import failed_checks
from tests.store.making import enrolled, intake, item, keep, outcomes, record, record_all
from tests.store.place import Place, patient
from tests.waiting import until

ACCEPTED, DUPLICATE = Outcome.accepted, Outcome.duplicate
CRM = ("crm", 1)


async def insist(store: PostgresStore, key: str) -> Outcome:
    """What a sender does: try again until it gets an answer."""
    while True:
        try:
            [verdict] = await record(store, intake(item(key, to=[CRM])))
            return verdict.outcome
        except StoreUnavailable:
            await asyncio.sleep(0.02)


async def test_a_connection_that_dies_at_rest_costs_nobody_anything(place: Place) -> None:
    """R60"""
    store = await place.open()
    await keep(store, item("k1"))
    await until(lambda: len(place.backends()) == 2)
    before = place.backends()
    for pid in before:
        place.sql(f"SELECT pg_terminate_backend({pid})")
    await until(lambda: len(set(place.backends()) - set(before)) == 2)
    assert outcomes(await keep(store, item("k1"), item("k2"))) == [DUPLICATE, ACCEPTED]


async def test_a_socket_that_takes_the_number_of_one_that_died_harms_nobody(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a server under load the number of a socket that libpq has closed is at once that of the next arrival's."""
    store = await place.open(intake_connections=1)
    await insist(store, "before")
    loop, successors = asyncio.get_running_loop(), []

    def and_somebody_arrives(connection: Any) -> bool:
        number = connection.pgconn.socket
        alive = is_alive(connection)
        if not alive:
            assert not Path(f"/proc/self/fd/{number}").exists()
            arrived = {one.fileno(): one for one in socket.socketpair()}
            while number not in arrived:  # the lowest free number is given next: its turn comes
                arrived |= {one.fileno(): one for one in socket.socketpair()}
            taken = arrived.pop(number)
            successors.extend(arrived.values())
            # Its first step runs before the writer is woken, and makes the number that of a transport.
            successors.append(loop.create_task(loop.create_connection(asyncio.Protocol, sock=taken)))
        return alive

    monkeypatch.setattr(writer, "is_alive", and_somebody_arrives)
    for pid in place.backends():
        place.sql(f"SELECT pg_terminate_backend({pid})")
    await until(lambda: bool(successors))
    transport, _ = await successors.pop()
    monkeypatch.undo()
    assert await insist(store, "after") is Outcome.accepted, "the line is served again"
    assert not transport.is_closing(), "and whoever has the number now keeps it"
    transport.close()
    for one in successors:
        one.close()


async def test_a_reader_never_gets_a_connection_that_died_at_rest(place: Place) -> None:
    store = await place.open()
    [verdict] = await keep(store, item("k"))
    await asyncio.gather(*[store.find_events(Filter()) for _ in range(4)])
    mine = f"FROM pg_stat_activity WHERE application_name = '{place.schema}'"
    before = [pid for (pid,) in place.sql(f"SELECT pid {mine}")]
    place.sql(f"SELECT pg_terminate_backend(pid) {mine}")
    # Not only until nobody lists them: a server process leaves its entry a moment before its socket is closed.
    await until(lambda: not any(Path("/proc", str(pid)).exists() for pid in before))
    assert [event.id for event in (await store.find_events(Filter())).items] == [verdict.event_id]


async def test_connections_that_die_at_work_lose_and_double_nothing(place: Place) -> None:
    """R3, R4, R60"""
    store = await place.open()
    finished = False
    answered = asyncio.Event()

    async def assassin() -> None:
        while not finished:
            for pid in place.backends():
                place.sql(f"SELECT pg_terminate_backend({pid})")
            answered.clear()
            await answered.wait()  # else nobody might ever live long enough to answer, and this would never end
            await asyncio.sleep(random.uniform(0, 0.01))

    async def sender(first: int) -> list[Outcome]:
        got = []
        for n in range(first, first + 40):
            got.append(await insist(store, f"k{n}"))
            answered.set()
        return got

    killing = asyncio.create_task(assassin())
    answers = await asyncio.gather(*[sender(first) for first in range(0, 400, 40)])
    finished = True
    answered.set()
    await killing
    assert all(outcome in (ACCEPTED, DUPLICATE) for one in answers for outcome in one)
    assert place.sql("SELECT count(*), count(DISTINCT key) FROM events") == [(400, 400)]
    assert place.sql("SELECT count(*) FROM deliveries") == [(400,)]
    assert failed_checks(await store.check()) == []


class Cutter:
    """A wire between the store and the server that swallows the server's next answer and breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._serving: list[asyncio.Task[Any] | None] = []
        self.armed = False

    async def __aenter__(self) -> Cutter:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*[task for task in self._serving if task])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.append(asyncio.current_task())
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        ends = [asyncio.create_task(self._pump(reader, to_server, answers=False))]
        ends.append(asyncio.create_task(self._pump(from_server, writer, answers=True)))
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for wire in (writer, to_server):
            wire.close()
            with contextlib.suppress(ConnectionError):
                await wire.wait_closed()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await source.read(1 << 16):
            if answers and self.armed:
                self.armed = False
                return
            sink.write(data)
            await sink.drain()


async def test_an_answer_that_is_lost_after_the_commit(place: Place) -> None:
    """R4, R5: 503, and the truth is decided by the unique index at the next delivery."""
    async with Cutter(place.server.port) as wire:
        url = place.url.replace(f":{place.server.port}/", f":{wire.port}/")
        store = await place.open(url=url, intake_connections=1)
        await keep(store, item("before"))  # the statement is prepared: from here one answer is one commit
        first = item("k", to=[CRM])
        wire.armed = True
        [failure] = await record_all(store, [intake(first)])
        assert isinstance(failure, StoreUnavailable)
        [again] = await keep(store, item("k", to=[CRM]))
        assert (again.outcome, again.event_id) == (DUPLICATE, first.event_id)
        assert place.sql("SELECT count(*) FROM deliveries") == [(1,)]
        await store.close()


@pytest.fixture
def own_server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


def refuses_at_once(store: PostgresStore) -> bool:
    try:
        store.record(intake(item(None))).future.cancel()
    except StoreUnavailable:
        return True
    return False


async def test_a_server_that_restarts(own_server: Postgres) -> None:
    """R60: refused at once while it is away, and well again without anybody's help."""
    store = PostgresStore(own_server.url)
    await store.open()
    await enrolled(store)
    [first] = await keep(store, item("k"))
    await asyncio.to_thread(own_server.stop, immediate=True)
    await until(lambda: refuses_at_once(store))
    with pytest.raises(StoreUnavailable):
        await store.ping()
    await asyncio.to_thread(own_server.start)
    assert await insist(store, "new") is ACCEPTED
    [again] = await keep(store, item("k"))
    assert (again.outcome, again.event_id) == (DUPLICATE, first.event_id)
    await store.ping()
    assert await store.get_event(first.event_id) is not None
    assert failed_checks(await store.check()) == []
    await store.close()


async def test_what_waits_while_the_server_is_away_is_written_when_it_is_back(own_server: Postgres) -> None:
    store = PostgresStore(own_server.url, intake_connections=1)
    await store.open()
    await enrolled(store)
    await keep(store, item("k"))
    pending = [store.record(intake(item(f"k{n}"))) for n in range(100)]
    own_server.stop(immediate=True)  # without giving way to the loop: all of them are still in the line
    await until(lambda: refuses_at_once(store))
    await asyncio.to_thread(own_server.start)
    results = await asyncio.gather(*[one.future for one in pending], return_exceptions=True)
    written = [result for result in results if isinstance(result, list)]
    assert all(isinstance(result, list | StoreUnavailable) for result in results)
    with psycopg.connect(own_server.url) as look:
        kept = look.execute("SELECT count(*) FROM oncehook.events WHERE key LIKE 'k_%'").fetchone()
    assert kept == (len(written),)
    assert len(written) >= 100 - 32  # all but a group that was on its way
    await store.close()


async def test_a_server_that_falls_silent_is_left(place: Place) -> None:
    """R9: a frozen backend still acknowledges packets, so only the silence tells."""
    limits = patient()
    store = await place.open(intake_connections=1, timeouts=limits)
    await keep(store, item("k"))
    [frozen] = place.backends()
    os.kill(frozen, signal.SIGSTOP)
    try:
        limits.silence = 0.3
        [result] = await record_all(store, [intake(item("k2"))])
        assert isinstance(result, StoreUnavailable)
        limits.silence = 60.0  # else k3 could be given up as well, though it is written: then it comes as a duplicate
        assert await insist(store, "k3") is ACCEPTED
    finally:
        os.kill(frozen, signal.SIGCONT)


async def test_close_does_not_wait_for_ever(place: Place) -> None:
    """R56"""
    store = await place.open(intake_connections=1, batch=1, timeouts=patient(close=0.2))
    await keep(store, item("k"))
    [frozen] = place.backends()
    os.kill(frozen, signal.SIGSTOP)
    try:
        pending = [store.record(intake(item(f"k{n}"))) for n in range(3)]
        await asyncio.sleep(0.05)
        await store.close()
        assert all(isinstance(one.future.exception(), StoreUnavailable) for one in pending)
    finally:
        os.kill(frozen, signal.SIGCONT)
