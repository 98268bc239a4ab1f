"""Leases that run out: whoever takes one over says so (UX.md 9), suspects wait for each other in turn (DESIGN.md 8.3),
and the lease of a thread that lives does not run out at all (DESIGN.md 8.16).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from oncehook import Event, Inbox
from oncehook.model import Filter, LeaseRequest
from oncehook.worker import TIMEOUTS
from tests.acceptance.conftest import Engine
from tests.acceptance.test_crashes import LONG, end_leases
from tests.torture.fleet import HANG, Fleet, Process, until
from tests.torture.proxy import Proxy


@pytest.fixture
def fleets() -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(engine: Engine, **settings: str) -> Fleet:
        made.append(Fleet(engine, **settings))
        return made[-1]

    yield make
    for fleet in made:
        fleet.end()


def check_told(fleet: Fleet, victim: int, lost: set[int], survivors: list[Process]) -> None:
    lines = [(survivor, line) for survivor in survivors for line in survivor.said("lease.expired")]
    assert sorted(line["fence"] for _, line in lines) == sorted(lost), "each once"
    ids = [id_ for (id_,) in fleet.engine.rows("SELECT id FROM deliveries")]
    known = {f"dlv_{id_.hex() if isinstance(id_, bytes) else id_.hex}" for id_ in ids}
    for survivor, line in lines:
        assert (line["level"], line["destination"], line["attempt"], line["run"]) == ("warning", "note", 1, 1)
        assert line["former_worker"].split(":")[-2] == str(victim)
        assert line["worker"].split(":")[-2] in map(str, survivor.pids)
        assert line["delivery_id"] in known
        assert line["event_id"][4:32] == line["delivery_id"][4:32]


async def test_the_survivors_say_whose_work_they_took_over(postgres: Engine, fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(postgres, lease=LONG, handlers="note")
    gate = fleet.gate()
    await fleet.fill({"id": f"o{n}", "gate": str(gate)} for n in range(6))
    victim = fleet.worker("victim").start()
    until(lambda: len(fleet.ledger.entries()) == 6, "all at work")
    survivors = [fleet.worker(name).start() for name in ("heir", "other")]
    victim.kill()
    lost = set(fleet.held_until())
    assert len(lost) == 6
    end_leases(postgres)
    gate.touch()
    fleet.finish()
    assert [survivor.stop() for survivor in survivors] == [0, 0]
    check_told(fleet, victim.pid, lost, survivors)


async def test_a_server_on_sqlite_says_what_its_own_last_life_left(
    sqlite: Engine, fleets: Callable[..., Fleet]
) -> None:
    fleet = fleets(sqlite, lease=LONG, handlers="note")
    gate = fleet.gate()
    await fleet.fill({"id": f"o{n}", "gate": str(gate)} for n in range(3))
    server = fleet.server().start()
    until(lambda: len(fleet.ledger.entries()) == 3, "all at work")
    server.kill()
    victim, lost = server.pid, set(fleet.held_until())
    gate.touch()
    server.start()
    fleet.finish()
    assert server.stop() == 0
    check_told(fleet, victim, lost, [server])


# -- suspects ----------------------------------------------------------------------------------


async def test_a_destination_full_of_suspects_starves_nobody(engine: Engine) -> None:
    """Its worker died with many of one destination and one of another: they are run alone, in turn."""
    order: list[str] = []

    def shop() -> Inbox:
        made = Inbox(engine.url)
        for name in ("first", "second", "last"):

            async def work(event: Event) -> None:
                order.append(event.destination)

            made.on(name, name=name)(work)
        return made

    gone = shop()
    async with gone.running(work=False):
        for name, many in (("first", 6), ("second", 6), ("last", 1)):
            for n in range(many):
                await gone.emit(name, "t", {}, key=str(n))
        wants = [LeaseRequest(destination.id, 10, 0.2) for destination in gone.destinations.values()]
        assert len(await gone.store.lease(wants, "gone")) == 13
    await asyncio.sleep(0.3)
    heir = shop()
    async with heir.running():
        await heir.drain()
    assert len(order) == 13
    assert order.index("last") < 3, order


async def test_a_suspect_runs_alone_beside_hot_subjects(engine: Engine) -> None:
    """Lines that go on by themselves make room for it too."""
    under_way, beside = 0, []

    def shop() -> Inbox:
        made = Inbox(engine.url)

        async def work(event: Event) -> None:
            nonlocal under_way
            under_way += 1
            for _ in range(20 if event.key == "suspect" else 2):
                await asyncio.sleep(0.001)
                if event.key == "suspect":
                    beside.append(under_way)
            under_way -= 1

        made.on("orders", name="shop")(work)
        return made

    gone = shop()
    async with gone.running(work=False):
        await gone.emit("orders", "t", {}, key="suspect", subject="suspect")
        wants = [LeaseRequest(destination.id, 10, 0.2) for destination in gone.destinations.values()]
        assert len(await gone.store.lease(wants, "gone")) == 1
        for n in range(300):
            await gone.emit("orders", "t", {}, key=str(n), subject=f"hot{n % 3}")
    await asyncio.sleep(0.3)
    heir = shop()
    async with heir.running():
        await heir.drain()
    assert beside == [1] * 20


# -- threads -----------------------------------------------------------------------------------


async def attempts(inbox: Inbox) -> list[str]:
    (delivery,) = (await inbox.store.find_deliveries(Filter())).items
    return [str(attempt.outcome) for attempt in await inbox.store.attempts_of(delivery.id)]


def lease_ends(engine: Engine) -> float:
    """When the one lease there is ends, in seconds of the store's own time."""
    seconds = "due_at / 1000000.0" if engine.name == "sqlite" else "extract(epoch FROM due_at)::float8"
    ((end,),) = engine.rows(f"SELECT {seconds} FROM heads WHERE leased")
    return float(end)


async def kept_for(seconds: float, engine: Engine) -> None:
    """Until the lease was renewed for the last time so long after now, or after it was given out: it is kept, then."""
    first = lease_ends(engine)
    while lease_ends(engine) <= first + seconds:
        await asyncio.sleep(0.05)


async def test_a_thread_that_never_yields_keeps_its_lease_beyond_its_time_limit(engine: Engine) -> None:
    begun, may_end = [], threading.Event()
    inbox = Inbox(engine.url)

    @inbox.on("app", lease="4s", timeout=0.1)
    def work(event: Event) -> None:
        begun.append(event.fence)
        spins = 0
        while not may_end.is_set():  # it never yields of its own accord
            spins += 1

    async with inbox.running():
        try:
            await inbox.emit("app", "t", {}, key="1")
            while not begun:
                await asyncio.sleep(0.01)
            await kept_for(0.1 + TIMEOUTS.grace, engine)
            assert len(begun) == 1
        finally:
            may_end.set()
        await inbox.drain()
        assert await attempts(inbox) == ["done"]
    assert len(begun) == 1


@contextlib.asynccontextmanager
async def proxied(postgres: Engine) -> AsyncIterator[tuple[Proxy, Inbox]]:
    """A network that can be cut, and an inbox behind it."""
    port = int(postgres.url.partition("?")[0].rpartition(":")[2].partition("/")[0])
    async with Proxy(port, lambda kind: None, lambda: None).open() as proxy:
        yield proxy, Inbox(postgres.url.replace(f":{port}/", f":{proxy.port}/"))


async def fall_silent(proxy: Proxy, postgres: Engine) -> None:
    """Cut the network until the one lease there is has lapsed, and mend it."""
    proxy.target, there = 1, proxy.target  # nobody listens there
    for link in list(proxy.links):
        link.abort(reset=True)
    lapsed = "SELECT count(*) FROM heads WHERE leased AND due_at < now() - interval '0.5 seconds'"
    while postgres.rows(lapsed) != [(1,)]:
        await asyncio.sleep(0.05)
    proxy.target = there


class Work:
    """A handler on a thread, which ends when it may."""

    def __init__(self, *inboxes: Inbox) -> None:
        self.begun: list[int] = []
        self.may_end = threading.Event()
        for inbox in inboxes:
            inbox.on("app", name="work", lease="3s")(self)

    def __call__(self, event: Event) -> None:
        self.begun.append(event.fence)
        self.may_end.wait(HANG)

    async def begin(self, inbox: Inbox) -> None:
        await inbox.emit("app", "t", {}, key="1")
        while not self.begun:
            await asyncio.sleep(0.01)


async def test_a_thread_keeps_its_lease_over_a_silence_of_the_store(postgres: Engine) -> None:
    """Nobody has taken it meanwhile: when the store is back, it is still ours, and nobody begins beside the thread."""
    async with proxied(postgres) as (proxy, inbox):
        rival = Inbox(postgres.url)
        work = Work(inbox, rival)
        async with inbox.running():
            await work.begin(inbox)
            await fall_silent(proxy, postgres)
            while postgres.rows("SELECT count(*) FROM heads WHERE due_at > now()") != [(1,)]:
                await asyncio.sleep(0.05)
            async with rival.running():
                await kept_for(1.0, postgres)
                assert len(work.begun) == 1
                work.may_end.set()
                await rival.drain()
            assert await attempts(inbox) == ["done"]
        assert len(work.begun) == 1


async def test_a_worker_that_finds_the_store_again_takes_nothing_from_its_own_threads(postgres: Engine) -> None:
    """It looks for work before the next heartbeat is due: what its threads hold has lapsed, and is not to be taken."""
    async with proxied(postgres) as (proxy, inbox):
        work = Work(inbox)
        async with inbox.running():
            assert inbox.worker is not None
            inbox.worker.heartbeat._interval = 3600.0  # from the next beat on there is none of its own accord
            await work.begin(inbox)
            await fall_silent(proxy, postgres)
            while postgres.rows("SELECT count(*) FROM heads WHERE due_at > now() OR turn = 4") != [(1,)]:
                await asyncio.sleep(0.02)
            assert postgres.rows("SELECT fence, turn FROM heads WHERE leased") == [(work.begun[0], 1)]
            work.may_end.set()
            await inbox.drain()
