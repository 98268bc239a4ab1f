"""PostgreSQL schemas with our tables in them, built once and emptied after each test.

To build the tables takes twenty times as long as to empty them. A schema goes back to the shelf only if nobody changed
the shape of anything in it: a test that drops an index or grants a right has used its schema up.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from oncehook.store.postgres import PostgresStore
from tests.servers import fresh_schema, shared_postgres

CLOCKS = ("now", "statement_timestamp", "clock_timestamp")

_CATALOGS = """
SELECT 'n', oid::bigint, xmin::text FROM pg_namespace WHERE oid = to_regnamespace(%(schema)s)
UNION ALL SELECT 'c', oid::bigint, xmin::text FROM pg_class WHERE relnamespace = to_regnamespace(%(schema)s)
UNION ALL SELECT 'p', oid::bigint, xmin::text FROM pg_proc WHERE pronamespace = to_regnamespace(%(schema)s)
UNION ALL SELECT 'o', oid::bigint, xmin::text FROM pg_constraint WHERE connamespace = to_regnamespace(%(schema)s)
UNION ALL SELECT 'a', attrelid::bigint * 1000 + attnum, a.xmin::text
  FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid WHERE relnamespace = to_regnamespace(%(schema)s)
UNION ALL SELECT 'i', indexrelid::bigint, i.xmin::text
  FROM pg_index i JOIN pg_class c ON c.oid = indexrelid WHERE relnamespace = to_regnamespace(%(schema)s)
UNION ALL SELECT 't', t.oid::bigint, t.xmin::text
  FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid WHERE relnamespace = to_regnamespace(%(schema)s)
ORDER BY 1, 2
"""
"""Which transaction wrote each row of the catalogs about a schema: to change a shape is to write one of them."""

_TABLES = """
SELECT quote_ident(relname), pg_relation_size(oid) FROM pg_class
WHERE relnamespace = to_regnamespace(%(schema)s) AND relkind = 'r' AND pg_relation_size(oid) > 0
"""
_MUCH = 64 << 10
"""Bytes of a table from which on it is cheaper to begin a new file than to mark its rows as gone."""
_REWIND = """
SELECT setval(seqrelid, seqstart, false)
FROM pg_sequence JOIN pg_class c ON c.oid = seqrelid WHERE relnamespace = to_regnamespace(%(schema)s)
"""
_NAMED_AFTER_IT = """
SELECT format('DROP SCHEMA %%I CASCADE', nspname) FROM pg_namespace WHERE starts_with(nspname, %(schema)s || '_')
UNION ALL SELECT format('DROP TABLE IF EXISTS %%s CASCADE', oid::regclass) FROM pg_class
WHERE relkind = 'r' AND relnamespace <> to_regnamespace(%(schema)s) AND strpos(relname, %(schema)s) > 0
"""
"""Drops what a test has made beside the schema, under a name that nobody else had."""
_AT_WORK = """
SELECT count(*) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid() AND backend_start >= %(since)s
"""
_LOOKS = 200
_FORGET_STATISTICS = """
DELETE FROM pg_statistic WHERE starelid IN
  (SELECT oid FROM pg_class WHERE relnamespace = to_regnamespace(%(schema)s))
"""


@dataclass
class Built:
    """One schema with our tables."""

    name: str
    contents: dict[str, bytes]
    """Rows that migrations write, by table."""
    catalogs: list[Any]


_shelf: defaultdict[bool, list[Built]] = defaultdict(list)


@contextmanager
def built_schema(*, movable_clock: bool = False) -> Iterator[str]:
    """The name of a schema with our tables, as after the first start. `movable_clock` is for `tests.store`."""
    shelf = _shelf[movable_clock]
    built = shelf.pop() if shelf else _build(movable_clock=movable_clock)
    [(since,)] = _connection().execute("SELECT now()").fetchall()
    yield built.name
    if _is_left_alone(since) and _is_as_before(built):
        shelf.append(built)


def drop_tables(name: str, *, movable_clock: bool) -> None:
    """Take all tables of ours out of a schema that a test holds."""
    _connection().execute(f"DROP SCHEMA {name} CASCADE")
    if movable_clock:
        _make_clock(name)


@functools.cache
def _connection() -> psycopg.Connection[Any]:
    connection = psycopg.connect(shared_postgres().url, autocommit=True)
    connection.execute("SET lock_timeout = '5s'")
    connection.execute("SET session_replication_role = replica")  # triggers let nobody empty the audit log
    atexit.register(connection.close)
    return connection


def _build(*, movable_clock: bool) -> Built:
    name, connection = fresh_schema(), _connection()
    if movable_clock:
        _make_clock(name)
    with ThreadPoolExecutor(1) as beside:  # there may be a loop in this thread
        beside.submit(asyncio.run, _make_tables(name)).result()
    connection.execute(f"SET search_path = {name}")
    tables = [table for table, _ in connection.execute(_TABLES, {"schema": name})]
    return Built(name, {table: _read(connection, table) for table in tables}, _catalogs(name))


async def _make_tables(name: str) -> None:
    store = PostgresStore(shared_postgres().url, schema=name, search_path=f"{name}, pg_catalog")
    await store.open()
    await store.close()


def _make_clock(name: str) -> None:
    """Functions that tell the time in front of the server's own: its time, or one at which it stands, moved by some."""
    connection = _connection()
    connection.execute(f"CREATE SCHEMA {name}")
    connection.execute(f"CREATE TABLE {name}.shift (by interval NOT NULL, stands_at timestamptz)")
    connection.execute(f"INSERT INTO {name}.shift VALUES ('0')")
    for function in CLOCKS:
        connection.execute(
            f"CREATE FUNCTION {name}.{function}() RETURNS timestamptz LANGUAGE sql STABLE AS"
            f" $$SELECT coalesce(stands_at, pg_catalog.{function}()) + by FROM {name}.shift$$"
        )


def _is_left_alone(since: Any) -> bool:
    """Wait for the last statements of processes that were killed: the server notices their end when it is done."""
    for _ in range(_LOOKS):
        [(at_work,)] = _connection().execute(_AT_WORK, {"since": since}).fetchall()
        if not at_work:
            return True
        time.sleep(0.01)
    return False


def _is_as_before(built: Built) -> bool:
    """Put everything back, unless somebody changed a shape or still holds a table: then it is dropped, or left."""
    connection = _connection()
    try:
        for (drop,) in connection.execute(_NAMED_AFTER_IT, {"schema": built.name}).fetchall():
            connection.execute(drop)
        if _catalogs(built.name) != built.catalogs:
            connection.execute(f"DROP SCHEMA IF EXISTS {built.name} CASCADE")
            return False
        connection.execute(f"SET search_path = {built.name}")
        with connection.transaction():
            for table, size in connection.execute(_TABLES, {"schema": built.name}).fetchall():
                connection.execute(f"DELETE FROM {table}" if size < _MUCH else f"TRUNCATE {table} CASCADE")
            for table, rows in built.contents.items():
                with connection.cursor().copy(f"COPY {table} FROM STDIN") as copy:
                    copy.write(rows)
            connection.execute(_REWIND, {"schema": built.name})
            connection.execute(_FORGET_STATISTICS, {"schema": built.name})
    except psycopg.errors.LockNotAvailable:
        return False
    built.catalogs = _catalogs(built.name)
    return True


def _read(connection: psycopg.Connection[Any], table: str) -> bytes:
    with connection.cursor().copy(f"COPY {table} TO STDOUT") as copy:
        return b"".join(bytes(piece) for piece in copy)


def _catalogs(name: str) -> list[Any]:
    return _connection().execute(_CATALOGS, {"schema": name}).fetchall()
