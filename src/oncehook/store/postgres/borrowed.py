"""Intake in a transaction that the application owns: the event exists if, and when, that commits (the outbox).

`PostgresStore.record_in` hands over the application's connection, or what a framework puts around one. For the length
of one statement the transaction is turned to our schema, and then back: what comes after it finds all as it was.
Workers are called by a NOTIFY that the commit sends. What the driver raises comes out as it is, because the caller's
own code knows what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from oncehook.errors import ConfigError
from oncehook.model import Intake, Verdict
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.intake import INTAKE, Rows, read_answer, verdicts
from oncehook.store.postgres.notify import channel, payload
from oncehook.store.postgres.opening import Place
from oncehook.store.postgres.transactions import slot_of
from oncehook.store.postgres.wire import BlockingConnection, Connection, adapt

C = TypeVar("C", bound="Connection | BlockingConnection")

_OUR_PATH: Final = """
SELECT current_setting('search_path'), set_config('search_path',
  CASE WHEN $1 THEN current_setting('search_path') ELSE coalesce($2, quote_ident($3)) END, true)
"""
_PATH_AND_CALL: Final = "SELECT set_config('search_path', $1, true), pg_notify($2, $3)"


async def record(tx: Any, intake: Intake, here: Place, cipher: Cipher) -> list[Verdict]:
    """Record in the transaction of an asynchronous connection."""
    connection = _driver_connection(tx, psycopg.AsyncConnection)
    cursor = psycopg.AsyncRawCursor(connection, row_factory=tuple_row)
    adapt(cursor)
    try:
        path = (await (await cursor.execute(_OUR_PATH, _path(here))).fetchall())[0][0]
        await cursor.execute(INTAKE, Rows([intake], cipher).parameters(slot_of(connection)), binary=True)
        rows = await cursor.fetchall()
        await cursor.execute(_PATH_AND_CALL, [path, channel(here.schema), payload(_destinations(intake))])
    except psycopg.errors.UndefinedFunction as error:
        raise _elsewhere() from error
    return verdicts([intake], read_answer(rows))[0]


def record_blocking(tx: Any, intake: Intake, here: Place, cipher: Cipher) -> list[Verdict]:
    """Record in the transaction of a blocking connection."""
    connection = _driver_connection(tx, psycopg.Connection)
    cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
    adapt(cursor)
    try:
        path = cursor.execute(_OUR_PATH, _path(here)).fetchall()[0][0]
        cursor.execute(INTAKE, Rows([intake], cipher).parameters(slot_of(connection)), binary=True)
        rows = cursor.fetchall()
        cursor.execute(_PATH_AND_CALL, [path, channel(here.schema), payload(_destinations(intake))])
    except psycopg.errors.UndefinedFunction as error:
        raise _elsewhere() from error
    return verdicts([intake], read_answer(rows))[0]


def _destinations(intake: Intake) -> set[int]:
    return {planned.destination_id for item in intake.items for planned in item.deliveries}


def _path(here: Place) -> Sequence[object]:
    return [here.keeps_path, here.search_path, here.schema]


def _driver_connection(tx: Any, kind: type[C]) -> C:
    """The driver's own connection inside whatever a framework has around it, with a transaction open on it."""
    found = tx
    while not isinstance(found, psycopg.Connection | psycopg.AsyncConnection):
        found = _inside(found)
        if found is None or callable(found):
            raise ConfigError(
                f"{type(tx).__module__}.{type(tx).__qualname__} is no connection of psycopg, nor holds one.",
                hint="Give psycopg's connection, or that of Django or SQLAlchemy with the psycopg driver.",
            )
    if not isinstance(found, kind):
        raise ConfigError("A blocking connection is for emit_in_blocking, an asynchronous one for `await emit_in`.")
    if found.autocommit and found.pgconn.transaction_status == pq.TransactionStatus.IDLE:
        raise ConfigError(
            "No transaction is open on this connection: the event would be kept whatever becomes of your own writes.",
            hint="Open one around both: connection.transaction(), transaction.atomic(), engine.begin().",
        )
    return found


def _inside(found: Any) -> Any:
    """In this order: SQLAlchemy's raw connections, its asynchronous ones, its blocking ones and Django's."""
    for name in ("driver_connection", "sync_connection", "connection"):
        inner = getattr(found, name, None)
        if inner is not None:
            return inner
    return None


def _elsewhere() -> ConfigError:
    return ConfigError("This connection leads to a database in which this inbox has no tables.")
