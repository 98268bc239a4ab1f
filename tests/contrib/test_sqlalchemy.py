"""SQLAlchemy: what a session writes commits with the completion, under the fence, or not at all (R51, R52)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import JSON, create_engine, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from oncehook import Event, GiveUp, Inbox
from oncehook.contrib.sqlalchemy import in_session, session_handler
from oncehook.errors import ConfigError
from oncehook.model import Category, DeliveryStatus, EventId, Filter, StoredDelivery
from tests.contrib.running import Database, Example, database, post

__all__ = ["database"]


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "entries"
    id: Mapped[int] = mapped_column(primary_key=True)
    payment: Mapped[str]
    once: Mapped[str | None] = mapped_column(unique=True)
    details: Mapped[dict[str, Any] | None] = mapped_column(JSON)


@pytest.fixture
async def inbox(database: Database) -> AsyncIterator[Inbox]:
    engine = create_engine(database.url.replace("postgresql:", "postgresql+psycopg:"))
    Base.metadata.create_all(engine)
    engine.dispose()
    made = Inbox(database.url)
    yield made
    if not made.draining:
        await made.store.close()


async def deliver(inbox: Inbox, *, key: str = "p1") -> StoredDelivery:
    """Emit one event, and look at its delivery when all is done."""
    event_id = await inbox.emit("app", "payment", {"id": key}, key=key)
    await inbox.drain()
    page = await inbox.store.find_deliveries(Filter(event_id=EventId.parse(event_id)))
    return page.items[0]


def entries(database: Database) -> list[str]:
    return [payment for (payment,) in database.rows("SELECT payment FROM entries ORDER BY id")]


Add = Callable[[Event, Any, Callable[[], None]], Any]


@pytest.fixture(params=["def", "async def"])
def on(request: pytest.FixtureRequest, inbox: Inbox) -> Callable[[Add], None]:
    """Register a handler in both forms: it is given the event and a session that `add`s, `flush`es and so on."""

    def register(handler: Callable[[Event, Session], Any]) -> None:
        if request.param == "def":
            inbox.on("app", name="book", retry=["0.02s"])(session_handler(handler))
            return

        @inbox.on("app", name="book", retry=["0.02s"])
        @session_handler
        async def book(event: Event, session: AsyncSession) -> Any:
            return await session.run_sync(lambda sync: handler(event, sync))

    return register


async def test_what_a_session_adds_is_committed_with_the_completion(inbox: Inbox, database: Database, on: Any) -> None:
    """R51"""

    def book(event: Event, session: Session) -> dict[str, str | None]:
        session.add(Entry(payment=event.key, details={"attempt": event.attempt}))  # flushed and committed for us
        return {"booked": event.key}

    on(book)
    async with inbox.running():
        for n in range(40):  # more than there are connections: they are lent again
            await inbox.emit("app", "payment", {}, key=f"p{n}")
        delivery = await deliver(inbox, key="last")
        [attempt] = await inbox.store.attempts_of(delivery.id)
        assert attempt.result == b'{"booked":"last"}'
        assert not [check for check in await inbox.store.check() if not check.ok]
    assert delivery.status is DeliveryStatus.done
    assert sorted(entries(database)) == sorted([*(f"p{n}" for n in range(40)), "last"])
    assert database.rows("SELECT DISTINCT details->>'attempt' FROM entries") == [("1",)]


async def test_what_a_handler_raises_takes_everything_back(inbox: Inbox, database: Database, on: Any) -> None:
    """R51: also what it thinks it has committed."""

    def book(event: Event, session: Session) -> None:
        session.add(Entry(payment=f"attempt {event.attempt}"))
        session.commit()
        assert session.scalars(select(Entry.payment)).all() == [f"attempt {event.attempt}"]
        if event.attempt == 1:
            raise RuntimeError("first")

    on(book)
    async with inbox.running():
        delivery = await deliver(inbox)
    assert (delivery.status, delivery.attempts) == (DeliveryStatus.done, 2)
    assert entries(database) == ["attempt 2"]


async def test_an_error_of_the_database_is_the_attempts_and_the_connection_lives_on(
    inbox: Inbox, database: Database, on: Any
) -> None:
    def book(event: Event, session: Session) -> None:
        session.add(Entry(payment=event.key, once="only one"))
        if event.attempt > 1:
            raise GiveUp("enough")

    on(book)
    database.do("INSERT INTO entries (payment, once) VALUES ('before', 'only one')")
    async with inbox.running():
        delivery = await deliver(inbox)
        assert (delivery.status, delivery.category) == (DeliveryStatus.dead, Category.permanent)
        attempts = await inbox.store.attempts_of(delivery.id)
    assert "IntegrityError" in str(attempts[0].evidence.error)
    assert entries(database) == ["before"]


async def test_a_rollback_is_one_of_the_sessions_own_savepoint(inbox: Inbox, database: Database, on: Any) -> None:
    def book(event: Event, session: Session) -> None:
        session.add(Entry(payment="kept"))
        session.commit()
        session.add(Entry(payment="undone", once="x"))
        session.add(Entry(payment="undone", once="x"))
        with pytest.raises(IntegrityError):
            session.flush()
        session.rollback()
        session.add(Entry(payment="after"))

    on(book)
    async with inbox.running():
        assert (await deliver(inbox)).status is DeliveryStatus.done
    assert entries(database) == ["kept", "after"]


async def test_a_lost_fence_takes_everything_back(inbox: Inbox, database: Database, on: Any) -> None:
    """R52: somebody else has the lease by now, and nothing of ours is written."""

    def book(event: Event, session: Session) -> None:
        session.add(Entry(payment=f"fence {event.fence}"))
        session.flush()
        if not fences:  # as when this worker was silent for too long
            database.do(f"UPDATE {HEADS} SET leased = false, fence = nextval('oncehook.fences'), due_at = now()")
        fences.append(event.fence)

    fences: list[int] = []
    on(book)
    async with inbox.running():
        delivery = await deliver(inbox)
        attempts = await inbox.store.attempts_of(delivery.id)
    assert delivery.status is DeliveryStatus.done
    assert len(fences) == 2
    assert [str(one.outcome) for one in attempts] == ["done"]
    assert entries(database) == [f"fence {fences[1]}"]


HEADS = "oncehook.heads"


async def test_a_handler_that_takes_too_long_is_ended_and_taken_back(inbox: Inbox, database: Database) -> None:
    @inbox.on("app", retry=["0.02s"] * 100, timeout="0.5s")
    @session_handler
    async def book(event: Event, session: AsyncSession) -> None:
        session.add(Entry(payment=f"attempt {event.attempt}"))
        await session.flush()
        if event.attempt == 1:
            await session.execute(text("SELECT pg_sleep(60)"))

    async with inbox.running():
        delivery = await deliver(inbox)
        attempts = await inbox.store.attempts_of(delivery.id)
    # Half a second is not always enough for the second one either.
    *ended, last = [(str(one.outcome), one.category) for one in attempts]
    assert set(ended) == {("retry", Category.transient)}
    assert last == ("done", None)
    assert entries(database) == [f"attempt {len(attempts)}"]


async def test_a_session_of_ones_own_making(inbox: Inbox, database: Database) -> None:
    class Named(Session):
        pass

    seen = []

    @inbox.on("app")
    @session_handler(session=sessionmaker(class_=Named, expire_on_commit=False))
    def book(event: Event, session: Named) -> None:
        seen.append(type(session))
        session.execute(text("INSERT INTO entries (payment) VALUES (:p)"), {"p": event.key})

    async with inbox.running():
        await deliver(inbox)
    assert [issubclass(kind, Named) for kind in seen] == [True]
    assert entries(database) == ["p1"]


async def test_the_transaction_cannot_be_ended_from_within(inbox: Inbox, database: Database) -> None:
    @inbox.on("app", retry=["0.02s"])
    @session_handler
    def book(event: Event, session: Session) -> None:
        session.add(Entry(payment=event.key))
        session.connection().commit()
        raise GiveUp("and yet nothing is committed")

    async with inbox.running():
        assert (await deliver(inbox)).status is DeliveryStatus.dead
    assert entries(database) == []


# -- killed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["before_tx_settle:1", "before_transaction_commit:1", "after_effect:1", ""])
def test_the_ledger_has_each_payment_once_wherever_the_process_is_killed(
    tmp_path: Path, database: Database, fault: str
) -> None:
    """R51: the example as its README starts it; the second process finds what the first one left."""
    with Example("sqlalchemy_ledger", tmp_path, {"STORE": database.url}) as example:
        example.run("python app.py")
        first = example.start("oncehook serve app:inbox --port 8000", env={"ONCEHOOK_FAULT": fault}).wait_for("ready")
        payment = {"id": "p1", "type": "payment.received", "account": "a1", "cents": 995}
        assert post(f"{first.url}/in/payments", payment).said == (200, "accepted")
        if fault:
            assert first.wait() == -9
            assert database.rows("SELECT count(*) FROM ledger") == [(int(fault.startswith("after")),)]
            database.let_leases_lapse()
            second = example.start("oncehook serve app:inbox --port 8000").wait_for("ready")
            assert post(f"{second.url}/in/payments", payment).said == (200, "duplicate")
        database.wait_for(f"SELECT count(*) FROM {HEADS}", [(0,)])
        assert database.rows("SELECT payment, cents FROM ledger") == [("p1", 995)]


# -- SQLite ------------------------------------------------------------------------------------


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[Inbox]:
    engine = create_engine(f"sqlite:///{tmp_path / 'inbox.db'}")
    Base.metadata.create_all(engine)
    engine.dispose()
    made = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    yield made
    if not made.draining:
        await made.store.close()


def written(inbox: Inbox) -> list[str]:
    engine = create_engine(f"sqlite:///{inbox.store.path}")  # type: ignore[attr-defined]
    with Session(engine) as session:
        found = list(session.scalars(select(Entry.payment).order_by(Entry.id)))
    engine.dispose()
    return found


async def test_on_sqlite_a_short_function_of_a_session_commits_with_the_completion(small: Inbox) -> None:
    """R51"""

    @small.on("app", retry=["0.02s"])
    async def book(event: Event) -> None:
        def write(session: Session) -> None:
            session.add(Entry(payment=f"attempt {event.attempt}", details={"a": [1]}))
            session.add_all([Entry(payment="more"), Entry(payment="and more")])
            session.flush()
            assert session.scalars(select(Entry.details)).first() == {"a": [1]}
            if event.attempt == 1:
                raise RuntimeError("first")

        event.commit(in_session(write))

    async with small.running():
        delivery = await deliver(small)
    assert (delivery.status, delivery.attempts) == (DeliveryStatus.done, 2)
    assert written(small) == ["attempt 2", "more", "and more"]


async def test_on_sqlite_a_session_cannot_roll_back_what_is_the_stores(small: Inbox) -> None:
    @small.on("app", retry=["0.02s"])
    async def book(event: Event) -> None:
        def write(session: Session) -> None:
            session.add(Entry(payment="half"))
            session.commit()
            session.add(Entry(payment="other half"))
            if event.key == "p1":
                session.flush()
                session.rollback()

        event.commit(in_session(write))

    async with small.running():
        delivery = await deliver(small)
        assert delivery.status is DeliveryStatus.dead
        assert "the store's" in str(delivery.last_error)
        assert (await deliver(small, key="p2")).status is DeliveryStatus.done
    assert written(small) == ["half", "other half"]


async def test_on_sqlite_a_handler_with_a_session_is_refused_with_advice(small: Inbox) -> None:
    with pytest.raises(ConfigError) as refused:

        @small.on("app")
        @session_handler
        def book(event: Event, session: Session) -> None: ...

    assert "event.commit" in refused.value.hint
