"""Reading a PostgreSQL store: a few connections of its own, with the planner's ordinary settings.

A read never waits for an intake and never holds one up; a slow one is ended by the server after five seconds,
because a long query keeps dead rows of `heads` alive. `PostgresStore` hands every question of its readers to this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import pq

from oncehook.errors import StoreUnavailable
from oncehook.model import Check, Figures, Mark, Outcome, Rejection, StoredArrival, StoredEvent
from oncehook.store.audit import Ends, Line, check_chain
from oncehook.store.checks import Tally, conservation, encryption
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.opening import SILENCE, Place, connect, cut, dedup_index_stands, is_alive, one, rows
from oncehook.store.postgres.wire import Connection, Id

CONNECTIONS: Final = 4

_EVENT: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks, coalesce(e.head, b.head, ''), e.body,
  e.batch_id, coalesce(k.copies, 1), e.rank, e.rank_scope, e.same_as
FROM events e JOIN sources s ON s.id = e.source_id
LEFT JOIN batches b ON b.id = e.batch_id
LEFT JOIN keys k ON k.hash = e.key_hash AND k.event_id = e.id
"""
_GET: Final = _EVENT + "WHERE e.id = $1"
_BAD_KEYS: Final = "SELECT count(*) FROM keys WHERE copies < 1 AND body_hash <> '00000000-0000-0000-0000-000000000000'"

# Prune decides on its snapshot, so a replay that commits meanwhile could lose its event: whoever makes a replay holds
# this lock with others like him, whoever prunes holds it alone, and both take it before the statement that looks.
REPLAYING: Final = """
SELECT pg_advisory_xact_lock_shared(hashtext('oncehook.prune'), hashtext($1)),
  set_config('idle_in_transaction_session_timeout', '5s', true)
"""
PRUNING: Final = """
SELECT pg_advisory_xact_lock(hashtext('oncehook.prune'), hashtext($1)),
  set_config('idle_in_transaction_session_timeout', '5s', true)
"""

# The ids of the keys under which values are encrypted.
_KEY_IDS: Final = """
SELECT CASE WHEN substring(value FROM 1 FOR 5) = '\\xff4f484501'::bytea THEN substring(value FROM 6 FOR 4) END AS key,
  count(*)
FROM (
  SELECT unnest(ARRAY[substring(body FROM 1 FOR 9), substring(head FROM 1 FOR 9)]) AS value FROM events
  UNION ALL SELECT unnest(ARRAY[substring(body FROM 1 FOR 9), substring(head FROM 1 FOR 9)]) FROM arrivals
  UNION ALL SELECT unnest(ARRAY[substring(body FROM 1 FOR 9), substring(head FROM 1 FOR 9)]) FROM batches
  UNION ALL SELECT substring(answer FROM 1 FOR 9) FROM attempts
) v WHERE length(value) > 0 GROUP BY key
"""
_CHAINED: Final = """
SELECT n, (extract(epoch FROM at) * 1000000)::bigint, actor, act, target, detail, coalesce(hash, '') FROM audit
WHERE n > $1 ORDER BY n LIMIT $2
"""
CHAINED: Final = 10_000
"""Lines of the audit log that are read at once."""

LONG: Final = 60.0
"""Seconds that an order over very many deliveries may take."""


class Reader:
    """Answers every question about what is kept."""

    def __init__(self, here: Place, cipher: Cipher) -> None:
        self._here = here
        self.cipher = cipher
        self._free: list[Connection] = []
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._opened = False

    def start_reading(self) -> None:
        """Begin; connections are made when they are first needed."""
        self._opened = True

    async def stop_reading(self) -> None:
        """Let go of all connections."""
        self._opened = False
        while self._free:
            await self._free.pop().close()

    @contextlib.asynccontextmanager
    async def connection(self, silence: float | None = SILENCE) -> AsyncIterator[Connection]:
        """A connection for one question; what the driver says becomes StoreUnavailable.

        A server that does not answer for `silence` seconds is left.
        """
        if not self._opened:
            raise StoreUnavailable("The store is not open.")
        async with self._place():
            connection = await self._take()
            guard = silence and asyncio.get_running_loop().call_later(silence, cut, connection)
            try:
                yield connection
            except psycopg.Error as error:
                raise StoreUnavailable(f"PostgreSQL did not answer: {str(error).strip()}") from error
            finally:
                if guard:
                    guard.cancel()
                await self._give_back(connection)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        try:
            await asyncio.wait_for(self._places.acquire(), self._here.timeouts.turn)
        except TimeoutError as error:
            raise StoreUnavailable("Too many questions wait for an answer already.") from error
        try:
            yield
        finally:
            self._places.release()

    async def _take(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if is_alive(connection):  # not one that a restart of the server left behind
                return connection
            await connection.close()
        return await connect(self._here)

    async def _give_back(self, connection: Connection) -> None:
        if self._opened and connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
            self._free.append(connection)
        else:
            await connection.close()

    async def rows(self, statement: str, parameters: Sequence[object] = ()) -> list[Any]:
        """All rows of one statement."""
        async with self.connection() as connection:
            return await rows(connection, statement, parameters)

    async def execute(self, statement: str, parameters: Sequence[object] = ()) -> None:
        """Run one statement that answers nothing."""
        async with self.connection() as connection:
            await connection.execute(statement, parameters)

    @contextlib.asynccontextmanager
    async def prudent(self, statement: str) -> AsyncIterator[Connection]:
        """A transaction under the lock between replay and prune: REPLAYING or PRUNING."""
        async with self.connection(LONG) as connection, connection.transaction():
            await connection.execute(statement, [self._here.schema])
            yield connection

    def made_due(self, destination_ids: Collection[int] | None = None) -> None:
        """Something may have become due for these destinations (None: for any): the engine tells those who wait."""

    # -- events --------------------------------------------------------------------------------

    async def get_event(self, event_id: bytes) -> StoredEvent | None:
        found = await self.rows(_GET, [Id(event_id)])
        return self.cipher.read_event(_event(found[0])) if found else None

    async def arrivals_of(self, event_id: bytes) -> list[StoredArrival]:
        found = await self.rows(
            """
            SELECT a.id, a.event_id, a.outcome, a.at, coalesce(a.head, b.head), a.body, a.batch_id
            FROM arrivals a LEFT JOIN batches b ON b.id = a.batch_id WHERE a.event_id = $1 ORDER BY a.at, a.id
            """,
            [Id(event_id)],
        )
        kept = [StoredArrival(r[0], r[1], Outcome(r[2]), r[3], r[4], r[5], r[6]) for r in found]
        return [self.cipher.read_arrival(one) for one in kept]

    async def batch_body(self, batch_id: bytes) -> tuple[bytes, bytes] | None:
        found = await self.rows("SELECT head, body FROM batches WHERE id = $1", [Id(batch_id)])
        return self.cipher.read_batch(batch_id, found[0][0], found[0][1]) if found else None

    # -- numbers -------------------------------------------------------------------------------

    async def recent_rejections(self, limit: int = 50) -> list[Rejection]:
        found = await self.rows(
            "SELECT source, at, code, reason, peer, size FROM rejections ORDER BY n DESC LIMIT $1", [limit]
        )
        return [Rejection(*row) for row in found]

    async def figures(self, since: datetime | None = None) -> Figures:
        found = await self.rows(
            """
            SELECT s.name, d.name, c.what, sum(c.n)::bigint FROM counters c
            LEFT JOIN sources s ON s.id = c.source_id LEFT JOIN destinations d ON d.id = c.destination_id
            WHERE $1::timestamptz IS NULL OR c.minute >= date_trunc('minute', $1) GROUP BY 1, 2, 3
            """,
            [since],
        )
        return Figures.of(found)

    async def size(self) -> int:
        found = await self.rows(
            """
            SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = $1 AND c.relkind IN ('r', 'S')
            """,
            [self._here.schema],
        )
        return int(found[0][0])

    # -- doctor --------------------------------------------------------------------------------

    async def check(self) -> list[Check]:
        """The conservation laws over one snapshot, and what the server promises."""
        async with self.connection(silence=None) as connection, connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            await connection.execute("SELECT set_config('statement_timeout', '0', true)")
            return [
                await _durability(connection),
                await _dedup_index(connection, self._here),
                *conservation(await _tally(connection)),
                await _copies(connection),
                await _references(connection),
                *encryption(await rows(connection, _KEY_IDS), self.cipher),
                await _audit_chain(connection),
            ]


async def _tally(connection: Connection) -> Tally:
    counted = await rows(
        connection, "SELECT source_id, destination_id, what, sum(n)::bigint FROM counters GROUP BY 1, 2, 3"
    )
    events = await rows(connection, "SELECT source_id, count(*) FROM events GROUP BY 1")
    statuses = await rows(connection, "SELECT destination_id, status, count(*) FROM deliveries GROUP BY 1, 2")
    (bad_keys,) = await one(connection, _BAD_KEYS)
    # A head whose delivery is dead is held on purpose. One without delivery is looked up by the next lease.
    lone, misplaced = await one(
        connection,
        """
        SELECT coalesce(sum(p.n) FILTER (WHERE h.subject_key IS NULL), 0)::bigint,
          count(*) FILTER (WHERE h.delivery_id IS NOT NULL
            AND (h.seq IS DISTINCT FROM h.own_seq OR p.first < h.seq OR NOT h.is_pending AND h.due_at < 'infinity'))
        FROM (
          SELECT coalesce(subject_key, id) AS line, count(*) AS n, min(seq) AS first
          FROM deliveries WHERE status = 'pending' GROUP BY 1
        ) p
        FULL JOIN (
          SELECT h.subject_key, h.delivery_id, h.due_at, h.seq, d.seq AS own_seq, d.status = 'pending' AS is_pending
          FROM heads h LEFT JOIN deliveries d ON d.id = h.delivery_id
        ) h ON h.subject_key = p.line
        """,
    )
    stand = {(destination_id, status): n for destination_id, status, n in statuses}
    return Tally(counted, dict(events), stand, bad_keys, lone, misplaced)


async def _audit_chain(connection: Connection) -> Check:
    ends = Ends(*await one(connection, "SELECT n, hash, pruned, pruned_hash, since FROM audit_chain"))
    lines: list[Line] = []
    while found := await rows(connection, _CHAINED, [lines[-1].n if lines else ends.before_first, CHAINED]):
        lines += map(Line._make, found)
    return check_chain(ends, lines)


async def _copies(connection: Connection) -> Check:
    """Every arrival is a copy of some key, or an event without key; told only of sources that never forgot anything."""
    (wrong, looked) = await one(
        connection,
        """
        SELECT count(*) FILTER (WHERE received <> copies + unkeyed), count(*) FROM (
          SELECT s.id,
            (SELECT coalesce(sum(n), 0) FROM counters c WHERE c.source_id = s.id AND c.what = 'received') AS received,
            (SELECT coalesce(sum(copies), 0) FROM keys k WHERE k.source_id = s.id) AS copies,
            (SELECT count(*) FROM events e WHERE e.source_id = s.id AND e.key_hash IS NULL) AS unkeyed
          FROM sources s
          WHERE NOT EXISTS (SELECT FROM counters c WHERE c.source_id = s.id AND c.what = 'purged')
            AND NOT EXISTS (SELECT FROM events e LEFT JOIN keys k ON k.hash = e.key_hash AND k.event_id = e.id
              WHERE e.source_id = s.id AND e.key_hash IS NOT NULL AND k.hash IS NULL)
        ) AS sources
        """,
    )
    detail = f"received = copies of keys + events without key, for {looked} sources that forgot nothing yet"
    return Check("copies", wrong == 0, detail if wrong == 0 else f"does not hold: {detail}")


async def _references(connection: Connection) -> Check:
    """What foreign keys would say, had we any."""
    (deliveries, heads) = await one(
        connection,
        """
        SELECT
          (SELECT count(*) FROM deliveries d WHERE d.status = 'pending'
            AND NOT EXISTS (SELECT FROM events e WHERE e.id = d.event_id)),
          (SELECT count(*) FROM events e WHERE e.head IS NULL
            AND NOT EXISTS (SELECT FROM batches b WHERE b.id = e.batch_id))
        """,
    )
    if deliveries == heads == 0:
        return Check("references", True, "every pending delivery has its event, every split event its request")
    detail = f"{deliveries} pending deliveries without event, {heads} split events without their request"
    return Check("references", False, detail, "Keep a copy of the store and open an issue.")


async def _dedup_index(connection: Connection, here: Place) -> Check:
    if await dedup_index_stands(connection, here):
        return Check("dedup index", True, "the index that makes keys unique exists and is valid")
    return Check(
        "dedup index",
        False,
        "the index that makes keys unique is missing or invalid",
        "REINDEX INDEX CONCURRENTLY keys_pkey",
    )


async def _durability(connection: Connection) -> Check:
    committed, synced, whole = await one(
        connection,
        "SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes')",
    )
    safe = committed in ("on", "remote_write", "remote_apply") and synced == "on" and whole == "on"
    detail = f"synchronous_commit = {committed}, fsync = {synced}, full_page_writes = {whole}"
    return Check("durability", safe, detail, "" if safe else "Set all three to on.")


def _event(row: Sequence[Any]) -> StoredEvent:
    return StoredEvent(
        id=row[0],
        source=row[1],
        type=row[2],
        key=row[3],
        subject=row[4],
        received_at=row[5],
        event_at=row[6],
        marks=Mark(row[7]),
        head=row[8],
        body=row[9],
        batch_id=row[10],
        copies=row[11],
        rank=row[12],
        rank_scope=row[13],
        same_as=row[14],
    )
