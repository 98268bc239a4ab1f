"""SQLAlchemy: a handler with a session that works in the very transaction that marks its delivery done (R51, R52).

On PostgreSQL `session_handler` binds a session to the connection that the store lends (psycopg 3); what the session
writes is committed with the completion, or not at all. On SQLite, where the writer is not lent, `in_session` makes a
short function of a session usable for `event.commit`.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Final

from oncehook.errors import ConfigError, ExtraMissing
from oncehook.event import Effect, Event

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine
try:
    import sqlalchemy
    from sqlalchemy.orm import Session
    from sqlalchemy.pool import NullPool
except ImportError as error:
    raise ExtraMissing("A handler with a session", "sqlalchemy") from error

Handler = Callable[..., Any]

_lent: Final[ContextVar[Any]] = ContextVar("oncehook_lent")
"""The connection that the next `connect` of this thread or task returns."""

# The session's commit or rollback ends its savepoint only: the transaction is the store's.
_JOIN: Final = "create_savepoint"


def session_handler(handler: Handler | None = None, *, session: Callable[..., Any] | None = None) -> Any:
    """Give a handler a session instead of a bare connection: `def` a Session, `async def` an AsyncSession.

    It goes under `inbox.on`. `session` is a sessionmaker or a class of your own. Flushing and committing is done for
    you; `session.commit()` in between only ends a savepoint.

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
    # One engine for all attempts, each on its own connection, so that the server is inspected once.
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

    return _declare_tx(handle)


def _on_the_loop(handler: Handler, make: Callable[..., Any] | None) -> Handler:
    engine: AsyncEngine | None = None

    @wraps(handler)
    async def handle(event: Event, tx: Any) -> Any:
        nonlocal engine, make
        if engine is None:
            from sqlalchemy.ext.asyncio import AsyncSession

            engine, make = _async_engine(), make or AsyncSession
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

    return _declare_tx(handle)


def _declare_tx(handle: Handler) -> Handler:
    """Set a signature with `tx`, which `inbox.on` reads, instead of the wrapped handler's."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("event", "tx")]
    handle.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return handle


def _async_engine() -> AsyncEngine:
    from sqlalchemy.ext.asyncio import create_async_engine

    async def connect() -> Any:
        return _lent.get()

    return create_async_engine(
        "postgresql+psycopg_async://", async_creator=connect, poolclass=NullPool, use_native_hstore=False
    )


class _Lent:
    """The store's connection without commit, rollback and close, which are the store's."""

    def __init__(self, connection: Any) -> None:
        object.__setattr__(self, "_connection", connection)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._connection, name, value)

    def commit(self) -> None:
        """Leave it to the store."""

    def rollback(self) -> None:
        """Leave it to the store."""

    def close(self) -> None:
        """Leave it to the store."""

    def add_notice_handler(self, callback: object) -> None:
        """Ignore it: it would be added again at every attempt."""


class _AsyncLent(_Lent):
    async def commit(self) -> None:  # type: ignore[override]
        """Leave it to the store."""

    async def rollback(self) -> None:  # type: ignore[override]
        """Leave it to the store."""

    async def close(self) -> None:  # type: ignore[override]
        """Leave it to the store."""


# -- SQLite ------------------------------------------------------------------------------------


def in_session(write: Callable[[Session], object]) -> Effect:
    """Wrap a short function of a session for `event.commit` (SQLite): it writes in the transaction that settles.

    It is called after the handler, by the one writer, so it must not wait for anything. What it adds is flushed when
    it returns; if it raises, nothing is written. Rollbacks and savepoints are not available.

    >>> event.commit(in_session(lambda session: session.add(Booking(order_id=event.key))))
    """

    def effect(lent: Any) -> None:
        writer = _EffectConnection(lent)
        token = _lent.set(writer)
        try:
            connection = _sqlite_engine().connect()
        finally:
            _lent.reset(token)
        with connection, connection.begin(), Session(bind=connection) as session:
            write(session)
            session.flush()
            writer.check()

    return effect


@cache
def _sqlite_engine() -> sqlalchemy.Engine:
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: _lent.get(), poolclass=NullPool)
    # SQLAlchemy inspects its first connection with pragmas, so we give it an empty database first.
    token = _lent.set(sqlite3.connect(":memory:"))
    try:
        engine.connect().close()
    finally:
        _lent.reset(token)
    return engine


class _EffectConnection:
    """The writer of a commit function, in the shape of a sqlite3 connection."""

    def __init__(self, effect: Any) -> None:
        self._effect = effect
        self._is_open = True

    def cursor(self) -> _Cursor:
        return _Cursor(self._effect)

    def check(self) -> None:
        """Refuse the session's rollback, which undid nothing: the transaction is the store's."""
        if not self._is_open:
            raise ConfigError(
                "A commit function cannot roll back: its session's transaction is the store's.",
                hint="Raise to have nothing of it written.",
            )

    def commit(self) -> None:
        """Leave it to the store."""

    def rollback(self) -> None:
        self._is_open = False

    def close(self) -> None:
        """Leave it to the store."""

    def create_function(self, *arguments: object, **options: object) -> None:
        """Keep SQLAlchemy's regexp() and floor() out of the store's connection."""


class _Cursor:
    """A cursor that opens at its first statement."""

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
