"""Transactions for handlers: effect and completion are one commit under the fence, on the driver's own connection."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from oncehook.errors import LeaseLost, StoreUnavailable
from oncehook.model import Breaker, DeliveryStatus, Lease, Settle, Settlement
from oncehook.store.postgres import PostgresStore
from tests.store.conftest import failed_checks
from tests.store.making import (
    dead,
    deliver,
    deliver_one,
    done,
    failed,
    ids,
    look,
    release,
    retry,
    settle,
    take,
    take_one,
)
from tests.store.place import Place
from tests.waiting import until

Handler = Callable[[PostgresStore, Lease, list[str], Settlement | None], Awaitable[None]]


async def on_the_loop(store: PostgresStore, lease: Lease, statements: list[str], end: Settlement | None) -> None:
    async with store.transaction() as transaction:
        for statement in statements:
            await transaction.connection.execute(statement)
        if end is not None:
            await transaction.settle(end)


async def on_a_thread(store: PostgresStore, lease: Lease, statements: list[str], end: Settlement | None) -> None:
    def handle() -> None:
        with store.blocking_transaction() as transaction:
            for statement in statements:
                transaction.connection.execute(statement)
            if end is not None:
                transaction.settle(end)

    await asyncio.to_thread(handle)


both = pytest.mark.parametrize("handle", [on_the_loop, on_a_thread])


class Ledger:
    """A table of the application's own, on its role's own search path."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.table = f"effects_{place.schema}"
        place.sql(f"CREATE TABLE public.{self.table} (what text NOT NULL)")

    def write(self, what: str) -> str:
        return f"INSERT INTO {self.table} VALUES ('{what}')"

    def read(self) -> list[str]:
        return [what for (what,) in self.place.sql(f"SELECT what FROM public.{self.table} ORDER BY 1")]


@pytest.fixture
async def ledger(place: Place) -> Any:
    made = Ledger(place)
    yield made
    place.sql(f"DROP TABLE public.{made.table} CASCADE")


@both
async def test_effect_and_completion_commit_together(place: Place, ledger: Ledger, handle: Handler) -> None:
    """R51"""
    store = await place.open()
    made = await deliver_one(store)
    lease = await take_one(store)
    await handle(store, lease, [ledger.write("paid")], done(lease))
    assert ledger.read() == ["paid"]
    assert (await look(store, made)).status is DeliveryStatus.done
    assert [one.n for one in await store.attempts_of(made)] == [1]
    assert failed_checks(await store.check()) == []


@both
async def test_what_a_handler_raises_rolls_everything_back(place: Place, ledger: Ledger, handle: Handler) -> None:
    """R51: its own error comes out as it is, and neither effect nor completion stays."""
    store = await place.open()
    made = await deliver_one(store)
    lease = await take_one(store)
    with pytest.raises(psycopg.errors.DivisionByZero):
        await handle(store, lease, [ledger.write("paid"), "SELECT 1 / 0"], done(lease))
    assert ledger.read() == []
    assert (await look(store, made)).status is DeliveryStatus.leased
    await settle(store, retry(lease))


async def test_an_error_after_the_settle_takes_it_back(place: Place, ledger: Ledger) -> None:
    store = await place.open()
    made = await deliver_one(store)
    lease = await take_one(store)

    async def handle() -> None:
        async with store.transaction() as transaction:
            await transaction.connection.execute(ledger.write("paid"))
            await transaction.settle(done(lease))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await handle()
    assert ledger.read() == []
    assert (await look(store, made)).status is DeliveryStatus.leased
    assert await store.attempts_of(made) == []


@both
async def test_a_lost_fence_rolls_everything_back(place: Place, ledger: Ledger, handle: Handler) -> None:
    """R52"""
    store = await place.open()
    made = await deliver_one(store)
    lost = await take_one(store)
    await settle(store, release(lost))
    held = await take_one(store)
    with pytest.raises(LeaseLost):
        await handle(store, lost, [ledger.write("paid twice")], done(lost))
    assert ledger.read() == []
    assert (await look(store, made)).status is DeliveryStatus.leased
    await handle(store, held, [ledger.write("paid")], done(held))
    assert ledger.read() == ["paid"]


@both
async def test_a_transaction_that_settles_nothing_is_the_handlers_own(
    place: Place, ledger: Ledger, handle: Handler
) -> None:
    store = await place.open()
    await deliver_one(store)
    lease = await take_one(store)
    await handle(store, lease, [ledger.write("seen")], None)
    assert ledger.read() == ["seen"]
    await settle(store, done(lease))


@both
async def test_a_killed_connection_leaves_nothing(place: Place, ledger: Ledger, handle: Handler) -> None:
    """R51: the server ends it in the middle; the lease is as it was, and the next try gets a new connection."""
    store = await place.open()
    await deliver_one(store)
    lease = await take_one(store)
    with pytest.raises((psycopg.OperationalError, StoreUnavailable)):
        await handle(store, lease, [ledger.write("x"), "SELECT pg_terminate_backend(pg_backend_pid())"], done(lease))
    assert ledger.read() == []
    await handle(store, lease, [ledger.write("paid")], done(lease))
    assert ledger.read() == ["paid"]


async def test_a_commit_that_fails_cannot_tell(place: Place, ledger: Ledger) -> None:
    """A deferred constraint says no at the very end: no effect, and the lease is still held."""
    store = await place.open()
    place.sql(f"ALTER TABLE public.{ledger.table} ADD UNIQUE (what) DEFERRABLE INITIALLY DEFERRED")
    made = await deliver_one(store)
    lease = await take_one(store)
    with pytest.raises(StoreUnavailable):
        await on_the_loop(store, lease, [ledger.write("same"), ledger.write("same")], done(lease))
    assert ledger.read() == []
    assert (await look(store, made)).status is DeliveryStatus.leased


# -- the handler's own world -------------------------------------------------------------------


async def test_names_are_the_handlers_own(place: Place, ledger: Ledger) -> None:
    """Its tables are found by its role's path, before and after the settle, though ours have the same names."""
    store = await place.open()
    place.sql("CREATE TABLE public.heads (what text)")
    try:
        await deliver_one(store)
        lease = await take_one(store)
        async with store.transaction() as transaction:
            connection = transaction.connection
            [(path,)] = await (await connection.execute("SHOW search_path")).fetchall()
            await connection.execute("INSERT INTO heads VALUES ('mine')")
            await transaction.settle(done(lease))
            assert await (await connection.execute("SELECT what FROM heads")).fetchall() == [("mine",)]
            assert await (await connection.execute("SHOW search_path")).fetchall() == [(path,)]
        assert place.sql("SELECT what FROM public.heads") == [("mine",)]
    finally:
        place.sql("DROP TABLE public.heads")


async def test_values_and_plans_are_the_handlers_own(place: Place) -> None:
    """Parameters, types and planner settings are the driver's, the next time too."""
    store = await place.open()
    for _ in range(2):
        await deliver_one(store)
        lease = await take_one(store)
        one = uuid.uuid4()
        async with store.transaction() as transaction:
            found = await transaction.connection.execute(
                "SELECT %s::uuid, current_setting('enable_seqscan')", [one], binary=True
            )
            assert await found.fetchone() == (one, "on")
            await transaction.settle(done(lease))


@both
async def test_a_handler_that_commits_by_itself(place: Place, ledger: Ledger, handle: Handler) -> None:
    """Its own fault: effect and completion come apart. The fence is asked all the same."""
    store = await place.open()
    await deliver(store, None)
    lost = await take_one(store)
    await settle(store, release(lost))
    held = await take_one(store)
    with pytest.raises(LeaseLost):
        await handle(store, lost, [ledger.write("early"), "COMMIT"], done(lost))
    await handle(store, held, [ledger.write("late"), "COMMIT"], done(held))
    assert ledger.read() == ["early", "late"]
    assert (await look(store, held.delivery.id)).status is DeliveryStatus.done
    await settle_next(store, ledger, handle)


async def settle_next(store: PostgresStore, ledger: Ledger, handle: Handler) -> None:
    """The connection that comes back is fit for the next handler."""
    made = await deliver_one(store)
    lease = await take_one(store)
    await handle(store, lease, [ledger.write("next")], done(lease))
    assert (await look(store, made)).status is DeliveryStatus.done


async def test_commit_by_the_drivers_method_is_refused(place: Place) -> None:
    store = await place.open()
    with pytest.raises(psycopg.ProgrammingError):
        async with store.transaction() as transaction:
            await transaction.connection.commit()


# -- what follows ------------------------------------------------------------------------------


@both
async def test_the_next_of_the_subject_is_due_after_the_commit(place: Place, ledger: Ledger, handle: Handler) -> None:
    store = await place.open()
    woken = asyncio.Event()
    store.observer.wake = lambda _: woken.set()
    made = await deliver(store, "s", "s")
    lease = await take_one(store)
    woken.clear()
    await handle(store, lease, [ledger.write("first")], done(lease))
    await woken.wait()
    assert ids(await take(store)) == made[1:]


async def test_an_arrival_waits_only_for_the_settle(place: Place, ledger: Ledger) -> None:
    """STORAGE.md 9.6: while the handler runs nobody is held up; the settle comes last."""
    store = await place.open()
    await deliver_one(store, "s")
    lease = await take_one(store)
    async with store.transaction() as transaction:
        await transaction.connection.execute(ledger.write("slow"))
        behind = await deliver_one(store, "s")
        await transaction.settle(done(lease))
    assert ids(await take(store)) == [behind]


async def test_a_wait_begins_when_it_is_settled(place: Place) -> None:
    """STORAGE.md 9.11: not when the transaction began."""
    store = await place.open()
    await deliver_one(store)
    lease = await take_one(store)
    async with store.transaction() as transaction:
        [(began,)] = await (await transaction.connection.execute("SELECT now()")).fetchall()
        await asyncio.sleep(0.3)
        await transaction.settle(retry(lease, 0.0))
    [(due_at,)] = place.sql("SELECT due_at FROM heads")
    assert (due_at - began).total_seconds() >= 0.3


@both
async def test_a_success_closes_the_breaker(place: Place, ledger: Ledger, handle: Handler) -> None:
    store = await place.open()
    await deliver(store, None, None)
    [one, other] = await take(store)
    breaker = Breaker(failures=5)
    await settle(store, failed(one, breaker))
    assert (await store.levels())["crm"].failures == 1
    await handle(store, other, [], Settlement(other, Settle.done, breaker=breaker))
    await until(lambda: place.sql("SELECT failures FROM destination_state") == [(0,)])


async def test_a_dead_letter_in_a_transaction(place: Place) -> None:
    store = await place.open()
    made = await deliver_one(store)
    lease = await take_one(store)
    await on_the_loop(store, lease, [], dead(lease))
    assert (await look(store, made)).status is DeliveryStatus.dead
    assert failed_checks(await store.check()) == []


async def test_many_at_once(place: Place, ledger: Ledger) -> None:
    """R51, R68: as many transactions as there are handlers; each effect once, and the books balance."""
    store = await place.open()
    await deliver(store, *[None] * 20, *[f"s{n}" for n in range(10)])
    leases = await take(store)
    ways = (on_the_loop, on_a_thread)
    await asyncio.gather(
        *[ways[n % 2](store, one, [ledger.write(f"{n:02}")], done(one)) for n, one in enumerate(leases)]
    )
    assert ledger.read() == [f"{n:02}" for n in range(30)]
    assert place.sql("SELECT count(*) FROM heads") == [(0,)]
    assert failed_checks(await store.check()) == []


async def test_a_store_that_is_closed_lends_nothing(place: Place) -> None:
    store = await place.open()
    await store.close()
    with pytest.raises(StoreUnavailable):
        async with store.transaction():
            pass
    with pytest.raises(StoreUnavailable), store.blocking_transaction():
        pass
