"""The inbox in one SQLite file, behind the verbs of `Store`: `writer` writes, `look` reads, `hold` guards the file."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from oncehook.errors import StoreUnavailable
from oncehook.model import (
    Engine,
    Intake,
    Rejection,
    SchemaState,
)
from oncehook.store import migrate as migrations
from oncehook.store.base import (
    KEPT_REJECTIONS,
    Numbers,
    Pending,
    Watch,
    unwatched,
)
from oncehook.store.sqlite import opening
from oncehook.store.sqlite.hold import Hold
from oncehook.store.sqlite.intake import Micros, count, to_micros
from oncehook.store.sqlite.look import Reader
from oncehook.store.sqlite.writer import Writer

log = logging.getLogger("oncehook.store")
T = TypeVar("T")


class SqliteStore(Reader):
    """See `Store`. `path` is the database file; its folder is made when it is not there."""

    engine = Engine.sqlite

    def __init__(self, path: str | Path, *, max_waiting: int = 5000, max_waiting_bytes: int = 64 << 20) -> None:
        super().__init__(Path(path))
        self.watch: Watch = unwatched
        self.hold: Hold | None = None
        self._writer = Writer(
            self.path,
            lambda operation, seconds: self.watch(operation, seconds),
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
        )

    # -- opening and closing -------------------------------------------------------------------

    async def open(self, *, migrate: bool = True, write: bool = True) -> None:
        if write:
            await asyncio.to_thread(self._prepare, migrate)
            self._writer.start()
        elif not self.path.exists():
            raise StoreUnavailable(f"There is no store at {self.path} yet.", hint="Start `oncehook serve` once.")

    def _prepare(self, migrate: bool) -> None:
        opening.prepare_folder(self.path)
        if warning := opening.warn_of_old_library():
            log.warning("store.old_library", extra={"fields": {"warning": warning}})
        self.hold = Hold(self.path)
        try:
            self._writer.prepare(migrate=migrate)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self.hold is not None:
            self.hold.release()
            self.hold = None

    async def close(self) -> None:
        # Readers first: the last connection to close tidies up the log, and that must be the one that writes.
        await asyncio.to_thread(self.stop_reading)
        await self._writer.close()
        self._let_go()

    # -- intake --------------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        return self._writer.record(intake)

    async def record_rejections(self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, str], int]) -> None:
        def write(connection: sqlite3.Connection, now: Micros) -> None:
            (last,) = connection.execute("SELECT value FROM marks WHERE name = 'rejection'").fetchone()
            connection.executemany(
                "INSERT OR REPLACE INTO rejections (slot, n, source, at, code, reason, peer, size)"
                " VALUES (?,?,?,?,?,?,?,?)",
                [
                    (n % KEPT_REJECTIONS, n, r.source, to_micros(r.at), r.code, r.reason, r.peer, r.size)
                    for n, r in enumerate(rejections, last + 1)
                ],
            )
            connection.execute("UPDATE marks SET value = ? WHERE name = 'rejection'", (last + len(rejections),))
            count(connection, now, {(source_id, 0, what): n for (source_id, what), n in counts.items()})

        await self._writer.call(write)

    def now(self) -> Micros:
        return self._writer.now() if self._writer.is_started else super().now()

    # -- house -----------------------------------------------------------------------------------

    async def enroll(self, sources: Iterable[str], destinations: Iterable[str]) -> Numbers:
        source_names, destination_names = list(sources), list(destinations)

        def write(connection: sqlite3.Connection, now: Micros) -> Numbers:
            connection.executemany("INSERT OR IGNORE INTO sources (name) VALUES (?)", [(n,) for n in source_names])
            connection.executemany(
                "INSERT OR IGNORE INTO destinations (name) VALUES (?)", [(n,) for n in destination_names]
            )
            return Numbers(
                dict(connection.execute("SELECT name, id FROM sources")),
                dict(connection.execute("SELECT name, id FROM destinations")),
            )

        return await self._writer.call(write)

    async def ping(self) -> None:
        if not self._writer.is_started:
            raise StoreUnavailable("The store is not open for writing.")
        await self._writer.call(lambda connection, now: None)

    async def schema_state(self) -> SchemaState:
        if not self.path.exists():
            return migrations.state(self.engine, 0)
        return await self.read(lambda connection: migrations.state(Engine.sqlite, opening.version(connection)))

    async def size(self) -> int:
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())
