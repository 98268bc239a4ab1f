"""SQLAlchemy: a handler with a session that works in the very transaction that marks its delivery done (R51, R52).

On PostgreSQL `session_handler` binds a session to the connection that the store lends (psycopg 3); what the session
writes is committed with the completion, or not at all. On SQLite, where the writer is lent to nobody, `in_session`
makes a short function of a session fit for `event.commit`.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final

from oncehook.errors import ConfigError
from oncehook.event import Effect, Event

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine
try:
    import sqlalchemy
    from sqlalchemy.orm import Session
    from sqlalchemy.pool import NullPool
except ImportError as error:
    raise ConfigError("This needs SQLAlchemy.", hint="pip install 'oncehook[sqlalchemy]'") from error

Handler = Callable[..., Any]

_lent: Final[ContextVar[Any]] = ContextVar("oncehook_lent")
"""The connection that the next `connect` of this thread or task is to give."""

# A commit or rollback of the session's is one of its savepoint: the transaction is the store's.
_JOIN: Final = "create_savepoint"


def session_handler(handler: Handler | None = None, *, session: Callable[..., Any] | None = None) -> Any:
    """Give a handler a session instead of a bare connection: `def` a Session, `async def` an AsyncSession.

    It goes under `inbox.on`. `session` makes the session where yours is special: a sessionmaker, or a class. Flushing
    and committing is done for you; `session.commit()` in between only ends a savepoint.

    >>> @inbox.on("orders", "order.paid")
    ... @session_handler
    ... def book(event: Event, session: Session) -> None:
    ...     session.add(Booking(order_id=event.key))
    """
    if handler is None:
        return lambda handler: session_handler(handler, session=session)
    make = _on_the_loop if inspect.iscoroutinefunction(inspect.unwrap(handler)) else _on_a_thread
    return make(handler, session)


def _on_a_thread(handler: Handler, make: Callable[..., Any] | None) -> Handler:
    # Nothing about the server is asked twice: one engine for all attempts, with a connection put under each.
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: _lent.get(), poolclass=NullPool, use_native_hstore=False
    )
    make = make or Session

    @wraps(handler)
    def handle(event: Event, tx: Any) -> Any:
        token = _lent.set(_Lent(tx))
        try:
            connection = engine.connect()
        finally:
            _lent.reset(token)
        with connection, connection.begin(), make(bind=connection, join_transaction_mode=_JOIN) as session:
            returned = handler(event, session)
            session.commit()
        return returned

    return _taking_tx(handle)


def _on_the_loop(handler: Handler, make: Callable[..., Any] | None) -> Handler:
    engine: AsyncEngine | None = None

    @wraps(handler)
    async def handle(event: Event, tx: Any) -> Any:
        nonlocal engine, make
        if engine is None:
            engine, make = _async_engine(), make or _async_session()
        assert make is not None
        connection = engine.connect()
        token = _lent.set(_AsyncLent(tx))
        try:
            await connection.start()
        finally:
            _lent.reset(token)
        try:
            async with connection.begin(), make(bind=connection, join_transaction_mode=_JOIN) as session:
                returned = await handler(event, session)
                await session.commit()
                return returned
        finally:
            await connection.close()

    return _taking_tx(handle)


def _taking_tx(handle: Handler) -> Handler:
    """`inbox.on` reads the parameters, and must see ours, not those of what is wrapped."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("event", "tx")]
    handle.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return handle


def _async_engine() -> AsyncEngine:
    from sqlalchemy.ext.asyncio import create_async_engine

    async def lent() -> Any:
        return _lent.get()

    return create_async_engine(
        "postgresql+psycopg_async://", async_creator=lent, poolclass=NullPool, use_native_hstore=False
    )


def _async_session() -> Callable[..., Any]:
    from sqlalchemy.ext.asyncio import AsyncSession

    return AsyncSession


class _Lent:
    """The store's connection as SQLAlchemy may have it: everything but its beginning and its end."""

    def __init__(self, connection: Any) -> None:
        object.__setattr__(self, "_connection", connection)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._connection, name, value)

    def commit(self) -> None:
        """The store commits."""

    def rollback(self) -> None:
        """The store rolls back."""

    def close(self) -> None:
        """The store keeps it."""

    def add_notice_handler(self, callback: object) -> None:
        """Would be added once more for every attempt."""


class _AsyncLent(_Lent):
    async def commit(self) -> None:  # type: ignore[override]
        """The store commits."""

    async def rollback(self) -> None:  # type: ignore[override]
        """The store rolls back."""

    async def close(self) -> None:  # type: ignore[override]
        """The store keeps it."""


# -- SQLite ------------------------------------------------------------------------------------


def in_session(write: Callable[[Session], object]) -> Effect:
    """A short function of a session, fit for `event.commit` (SQLite): it writes in the transaction that settles.

    It is called after the handler, by the one writer, so it must not wait for anything. What it adds is flushed when
    it returns; to have nothing of it written it raises. Rollbacks and savepoints are not for it.

    >>> event.commit(in_session(lambda session: session.add(Booking(order_id=event.key))))
    """

    def effect(lent: Any) -> None:
        written = _Written(lent)
        token = _lent.set(written)
        try:
            connection = _sqlite_engine().connect()
        finally:
            _lent.reset(token)
        with connection, connection.begin(), Session(bind=connection) as session:
            write(session)
            session.flush()
            written.check()

    return effect


@cache
def _sqlite_engine() -> sqlalchemy.Engine:
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: _lent.get(), poolclass=NullPool)
    # What SQLAlchemy asks of the first connection, pragmas too, is asked of one that is nobody's.
    token = _lent.set(sqlite3.connect(":memory:"))
    try:
        engine.connect().close()
    finally:
        _lent.reset(token)
    return engine


class _Written:
    """What a commit function may write with, in the shape of a connection of sqlite3's."""

    def __init__(self, effect: Any) -> None:
        self._effect = effect
        self._is_open = True

    def cursor(self) -> _Cursor:
        return _Cursor(self._effect)

    def check(self) -> None:
        """Raises when the session has rolled back, which has undone nothing: the transaction is not its own."""
        if not self._is_open:
            raise ConfigError(
                "A commit function cannot roll back: its session's transaction is the store's.",
                hint="Raise to have nothing of it written.",
            )

    def commit(self) -> None:
        """The store commits."""

    def rollback(self) -> None:
        self._is_open = False

    def close(self) -> None:
        """The store keeps it."""

    def create_function(self, *arguments: object, **options: object) -> None:
        """SQLAlchemy's regexp() and floor() stay out of the store's connection."""


class _Cursor:
    """A cursor that is made with its first statement."""

    arraysize = 1

    def __init__(self, effect: Any) -> None:
        self._effect = effect
        self._cursor: Any = None

    def execute(self, statement: str, parameters: Any = ()) -> _Cursor:
        self._cursor = self._effect.execute(statement, parameters)
        return self

    def executemany(self, statement: str, parameters: Iterable[Any]) -> _Cursor:
        self._cursor = self._effect.executemany(statement, parameters)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def close(self) -> None:
        if self._cursor is not None:
            self._cursor.close()
