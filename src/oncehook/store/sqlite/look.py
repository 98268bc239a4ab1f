"""Reading a SQLite store, beside the writer and in any process: its own connections, on threads of their own.

A read never waits for a commit and never holds one up; each sees the store as of one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

from oncehook import clock
from oncehook.errors import StoreUnavailable
from oncehook.model import MARKS, ArrivalId, Check, EventDetails, EventId, Figures, Outcome, Rejection, StoredArrival
from oncehook.store.audit import check_chain
from oncehook.store.base import KEPT_ARRIVALS, NameIds
from oncehook.store.checks import Tally, conservation, encryption
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite import bodies
from oncehook.store.sqlite.audit import chain_ends, chained
from oncehook.store.sqlite.copies import KEPT
from oncehook.store.sqlite.intake import MINUTE, Micros

T = TypeVar("T")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

EVENT_COLUMNS: Final = """
       e.id, e.source_id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks, e.rank, e.rank_scope,
       coalesce(e.head, b.head, x''), e.body
"""
_EVENT: Final = (
    "SELECT"
    + EVENT_COLUMNS
    + """
       , e.batch_id, coalesce(c.n, 1), e.same_as
FROM events e JOIN sources s ON s.id = e.source_id
LEFT JOIN batches b ON b.id = e.batch_id
LEFT JOIN copies c ON c.event_id = e.id
WHERE e.id = ?
"""
)

# A held head is rightly dead; every other head is pending, and none of its line comes before it.
MISPLACED: Final = """
SELECT count(*) FROM heads h LEFT JOIN deliveries d ON d.id = h.delivery_id LEFT JOIN (
  SELECT coalesce(subject_key, id) AS line, min(seq) AS first FROM deliveries WHERE status = 'pending' GROUP BY 1
) p ON p.line = h.subject_key
WHERE h.seq IS NOT d.seq OR p.first < h.seq OR d.status IS NOT 'pending' AND h.due_at < 1 << 62
"""


# The ids of the keys under which values are encrypted.
_KEY_IDS: Final = """
SELECT CASE WHEN substr(value, 1, 5) = x'ff4f484501' THEN substr(value, 6, 4) END AS key, count(*) FROM (
  SELECT substr(body, 1, 9) AS value FROM events UNION ALL SELECT substr(head, 1, 9) FROM events
  UNION ALL SELECT substr(body, 1, 9) FROM arrivals UNION ALL SELECT substr(head, 1, 9) FROM arrivals
  UNION ALL SELECT substr(body, 1, 9) FROM batches UNION ALL SELECT substr(head, 1, 9) FROM batches
  UNION ALL SELECT substr(answer, 1, 9) FROM attempts
) WHERE length(value) > 0 GROUP BY key
"""


class Reader:
    """A few threads, each with a read-only connection, opened when first needed."""

    def __init__(self, path: Path, cipher: Cipher, *, threads: int = 2) -> None:
        self.path = path
        self.cipher = cipher
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="oncehook-reader")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []

    async def read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call a function with a connection, on a reading thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, function)

    def stop_reading(self) -> None:
        """Finish what runs and close the connections."""
        self._threads.shutdown(wait=True)
        for connection in self._connections:
            connection.close()

    def _call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with _snapshot(self._connection()) as connection:
                return function(connection)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"The store could not be read: {error}") from error

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(
                f"{self.path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
            )
            bodies.teach(connection, self.cipher)
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    async def numbers(self) -> NameIds:
        """The numbers of all names that have one."""
        return await self.read(numbers)

    async def get_event(self, event_id: bytes) -> EventDetails | None:
        row = await self.read(lambda c: c.execute(_EVENT, (event_id,)).fetchone())
        if row is None:
            return None
        *columns, batch_id, copies, same_as = row
        batch_id, same_as = batch_id and ArrivalId(batch_id), same_as and EventId(same_as)
        event = EventDetails(*convert_event(columns), batch_id=batch_id, copies=copies, same_as=same_as)
        return self.cipher.read_event(event)

    def now(self) -> Micros:
        """The time by which windows are measured. Who only reads has no better one than this machine's."""
        return int(clock.now() * 1_000_000)

    async def arrivals_of(self, event_id: bytes) -> list[StoredArrival]:
        rows = await self.read(lambda c: c.execute(KEPT, (event_id, KEPT_ARRIVALS)).fetchall())
        kept = [
            StoredArrival(
                ArrivalId(id_), EventId(of), Outcome(outcome), moment(at), head, body, batch and ArrivalId(batch)
            )
            for id_, of, outcome, at, head, body, batch in rows
        ]
        return [self.cipher.read_arrival(one) for one in kept]

    async def batch_body(self, batch_id: bytes) -> tuple[bytes, bytes] | None:
        row: tuple[bytes, bytes] | None = await self.read(
            lambda c: c.execute("SELECT head, body FROM batches WHERE id = ?", (batch_id,)).fetchone()
        )
        return None if row is None else self.cipher.read_batch(batch_id, *row)

    async def recent_rejections(self, limit: int = 50) -> list[Rejection]:
        rows = await self.read(
            lambda c: c.execute(
                "SELECT source, at, code, reason, peer, size FROM rejections ORDER BY n DESC LIMIT ?", (limit,)
            ).fetchall()
        )
        return [Rejection(r[0], moment(r[1]), *r[2:]) for r in rows]

    async def figures(self, since: datetime | None = None) -> Figures:
        start = 0 if since is None else int((since - EPOCH).total_seconds() * 1_000_000) // MINUTE * MINUTE
        rows = await self.read(
            lambda c: c.execute(
                "SELECT s.name, d.name, c.what, sum(c.n) FROM counters c LEFT JOIN sources s ON s.id = c.source_id"
                " LEFT JOIN destinations d ON d.id = c.destination_id WHERE c.minute >= ? GROUP BY 1, 2, 3",
                (start,),
            ).fetchall()
        )
        return Figures.of(rows)

    async def check(self) -> list[Check]:
        """The conservation laws over one snapshot, and the file's own integrity."""
        return await self.read(lambda c: [*_check(c), *encryption(c.execute(_KEY_IDS), self.cipher)])


def numbers(connection: sqlite3.Connection) -> NameIds:
    """The numbers of all names that have one."""
    return NameIds(
        dict(connection.execute("SELECT name, id FROM sources")),
        dict(connection.execute("SELECT name, id FROM destinations")),
    )


@contextlib.contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All that is read in here is of one moment."""
    connection.execute("BEGIN")
    try:
        yield connection
    finally:
        connection.execute("COMMIT")


def _check(connection: sqlite3.Connection) -> list[Check]:
    def rows(statement: str) -> list[tuple[Any, ...]]:
        return connection.execute(statement).fetchall()

    tally = Tally(
        counted=rows("SELECT source_id, destination_id, what, sum(n) FROM counters GROUP BY 1, 2, 3"),
        events=dict(rows("SELECT source_id, count(*) FROM events GROUP BY 1")),
        statuses={
            (d, s): n for d, s, n in rows("SELECT destination_id, status, count(*) FROM deliveries GROUP BY 1, 2")
        },
        bad_keys=rows(
            "SELECT count(*) FROM keys k LEFT JOIN copies c ON c.event_id = k.event_id"
            " WHERE coalesce(c.n, k.copies) < 1 AND body_hash <> zeroblob(16)"
        )[0][0],
        lone_pending=rows(
            "SELECT count(*) FROM deliveries d WHERE d.status = 'pending'"
            " AND NOT EXISTS (SELECT 1 FROM heads h WHERE h.subject_key = coalesce(d.subject_key, d.id))"
        )[0][0],
        misplaced_heads=rows(MISPLACED)[0][0],
    )
    (integrity,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    intact = Check(
        "file",
        integrity == "ok",
        "the database file is intact" if integrity == "ok" else str(integrity),
        "Restore a backup.",
    )
    ends = chain_ends(connection)
    return [intact, *conservation(tally), check_chain(ends, chained(connection, ends))]


def moment(micros: int) -> datetime:
    """A stored time as an aware datetime."""
    return EPOCH + timedelta(microseconds=micros)


def micros_at(moment: datetime) -> Micros:
    """The same time as it is stored, to the microsecond."""
    return (moment - EPOCH) // timedelta(microseconds=1)


def moment_or_none(micros: int | None) -> datetime | None:
    """The same, of a time that may not be there."""
    return None if micros is None else moment(micros)


def convert_event(columns: list[Any]) -> list[Any]:
    """Convert EVENT_COLUMNS, in place, to the fields of a StoredEvent."""
    columns[0] = EventId(columns[0])
    columns[6] = moment(columns[6])
    columns[7] = moment_or_none(columns[7])
    columns[8] = MARKS[columns[8]]
    return columns
