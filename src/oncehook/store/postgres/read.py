"""Numbers and short lists for people: how destinations stand, what was counted, who works, what was done.

`PostgresStore` hands these questions of its readers to this. Levels are sums of the counters' signed changes (R68).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import pq

from oncehook.errors import QueryTooWide, StoreUnavailable, Undecryptable
from oncehook.model import (
    Asked,
    AttemptOutcome,
    Audited,
    Category,
    Cause,
    Check,
    Clause,
    DeliveryStatus,
    Evidence,
    Figures,
    Filter,
    Level,
    ListedDelivery,
    ListedEvent,
    Mark,
    Outcome,
    Page,
    Rejection,
    StoredArrival,
    StoredAttempt,
    StoredDelivery,
    StoredEvent,
    StoredWorker,
    prepare,
    says,
)
from oncehook.store.audit import Ends, Line, check_chain
from oncehook.store.base import MOST_DECRYPTED, MOST_DECRYPTED_BYTES
from oncehook.store.checks import Tally, conservation, encryption
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.connection import (
    SILENCE,
    Connection,
    Id,
    Ids,
    Integers,
    Place,
    Texts,
    connect,
    cut,
    dedup_index_stands,
    is_alive,
    one,
    rows,
    storable,
)

GIVEN: Final = 17
"""Parameters of a filter: `$1` to `$17`, as `parameters` makes them."""

# An id's own time may differ from the time its event was received, by an hour at most: bounds on ids narrow the search,
# received_at decides. What the store's clock is ahead of the server's is taken off (it is not, outside of tests).
ID_SINCE: Final = """
(lpad(to_hex((extract(epoch FROM greatest($15::timestamptz - (now() - transaction_timestamp()) - interval '1 hour',
  'epoch')) * 1000)::bigint), 12, '0') || '00000000000000000000')::uuid
"""
ID_UNTIL: Final = """
(lpad(to_hex((extract(epoch FROM greatest($16::timestamptz + interval '1 hour', 'epoch')) * 1000)::bigint), 12, '0')
  || 'ffffffffffffffffffff')::uuid
"""
# All deliveries of an event are one range of ids.
LAST_OF: Final = "(left(e.id::text, 30) || 'ffffff')::uuid"

STATUS: Final = """
CASE WHEN d.status = 'pending' AND h.leased AND (h.delivery_id = d.id OR h.carries = d.id)
  THEN 'leased' ELSE d.status END
"""
ATTEMPTS: Final = "CASE WHEN h.delivery_id = d.id THEN h.attempts ELSE d.attempts END"

# Of deliveries `d` with their destination `t` and head `h`.
OF_DELIVERY: Final = (
    """
($1::uuid[] IS NULL OR d.id = ANY($1))
AND ($4::integer IS NULL OR d.destination_id = $4)
AND ($5::text IS NULL OR $5 = """
    + STATUS
    + """)
AND ($9::text IS NULL OR d.category = $9)
AND ($10::text IS NULL OR d.note = $10)
AND ($11::text IS NULL OR d.last_status::text LIKE $11)
AND ($12::integer IS NULL OR """
    + ATTEMPTS
    + """ > $12)
AND ($13::integer IS NULL OR """
    + ATTEMPTS
    + """ < $13)
AND ($14::uuid IS NULL OR d.replay_id = $14 OR $14 = '00000000-0000-0000-0000-000000000000' AND d.replay_id IS NOT NULL)
"""
)

# Of events `e` with their source `s`.
OF_EVENT: Final = """
($2::uuid IS NULL OR e.id = $2)
AND ($3::integer[] IS NULL OR e.source_id = ANY($3))
AND ($6::text IS NULL OR e.type LIKE $6)
AND ($7::text IS NULL OR e.subject = $7)
AND ($8::text IS NULL OR e.key = $8)
AND ($15::timestamptz IS NULL OR e.received_at >= $15)
AND ($16::timestamptz IS NULL OR e.received_at < $16)
"""

IN_EVENT: Final = "e.key ILIKE $17 OR e.subject ILIKE $17 OR e.type ILIKE $17"
IN_DELIVERY: Final = "d.last_error ILIKE $17"

MATCHES: Final = OF_EVENT + "AND" + OF_DELIVERY + "AND ($17::text IS NULL OR " + IN_EVENT + " OR " + IN_DELIVERY + ")\n"
"""A delivery that is meant, where `d`, `e`, `s`, `t` and `h` stand together (TOGETHER)."""

TOGETHER: Final = """
JOIN events e ON e.id = d.event_id JOIN sources s ON s.id = e.source_id JOIN destinations t ON t.id = d.destination_id
LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id)
"""


IS_ENCRYPTED: Final = "substring(e.body FROM 1 FOR 5) = '\\xff4f484501'::bytea"
_ENCRYPTED_BODIES: Final = "FROM deliveries d" + TOGETHER + "WHERE " + MATCHES + "AND " + IS_ENCRYPTED
_ENCRYPTED_SIZE: Final = (
    "SELECT count(*), coalesce(sum(size), 0)::bigint FROM (SELECT length(e.body) AS size "
    + _ENCRYPTED_BODIES
    + " LIMIT $18) e"
)
_NEXT_ENCRYPTED: Final = "SELECT d.id, e.id, e.body " + _ENCRYPTED_BODIES + " AND d.id > $18 ORDER BY d.id LIMIT $19"
_AT_ONCE: Final = 500
"""Encrypted bodies that are fetched at once."""

_SAYING: Final = (
    "SELECT d.id FROM deliveries d"
    + TOGETHER
    + "WHERE "
    + MATCHES
    + "AND CASE WHEN "
    + IS_ENCRYPTED
    + " THEN false ELSE body_says(e.body, $18::jsonb) END"
)

_ANY_REPLAY: Final = bytes(16)
"""No replay has this id: it asks for those of any."""

_NOBODY: Final = bytes(16)
"""No delivery has this id. An array of none would be sent as NULL, and mean all."""


def means_nothing(filter: Filter) -> bool:
    """Asked for by ids, and there are none."""
    return filter.ids is not None and not any(filter.ids)


async def parameters(connection: Connection, filter: Filter, cipher: Cipher) -> list[object]:
    """`$1` to `$17`, for all that a filter means, however much: what its body must say has become ids."""
    given = await parameters_without_body(connection, filter)
    if filter.body is None:
        return given
    meant = [row[0] for row in await rows(connection, _SAYING, [*given, asked(filter.body)])]
    if cipher.has_keys:
        meant += await _encrypted_saying(connection, given, filter.body, cipher)
    return [Ids(meant or [_NOBODY]), *given[1:]]


async def _encrypted_saying(
    connection: Connection, given: Sequence[object], clauses: Sequence[Clause], cipher: Cipher
) -> list[bytes]:
    """Return the deliveries whose encrypted bodies say this. Raises QueryTooWide."""
    [(count, size)] = await rows(connection, _ENCRYPTED_SIZE, [*given, MOST_DECRYPTED + 1])
    if count > MOST_DECRYPTED or size > MOST_DECRYPTED_BYTES:
        raise QueryTooWide
    meant: list[bytes] = []
    last = _NOBODY
    while found := await rows(connection, _NEXT_ENCRYPTED, [*given, Id(last), _AT_ONCE]):
        says = set(await saying([row[1:] for row in found], clauses, cipher))
        meant += [row[0] for row in found if row[1] in says]
        last = found[-1][0]
    return meant


async def saying(found: Sequence[Sequence[Any]], clauses: Sequence[Clause], cipher: Cipher) -> list[bytes]:
    """Return the ids, of these pairs of ids and encrypted bodies, where the body says what is asked for."""
    wanted = prepare(clauses)

    def read() -> list[bytes]:
        return [id_ for id_, body in found if _says(id_, body, wanted, cipher)]

    return await asyncio.to_thread(read) if found else []


def _says(event_id: bytes, body: bytes, clauses: Sequence[Asked], cipher: Cipher) -> bool:
    try:
        return says(cipher.decrypt(body, "body", event_id), clauses)
    except Undecryptable:
        return False


def asked(clauses: Sequence[Clause]) -> str:
    """Clauses as the one parameter that `body_says` takes."""
    return json.dumps(
        [
            {
                "path": [storable(step) for step in clause.path],
                "sign": clause.sign,
                "value": storable(clause.value),
                "number": clause.number,
            }
            for clause in clauses
        ]
    )


async def parameters_without_body(connection: Connection, filter: Filter) -> list[object]:
    """`$1` to `$17`. Names become numbers first, so that the plan is made for them; an unknown one is nobody's."""
    return [
        None if filter.ids is None else Ids([one for one in filter.ids if len(one) == 16]),
        _id(filter.event_id),
        await _sources(connection, filter),
        await _number(connection, _DESTINATION, filter.destination),
        None if filter.status is None else str(filter.status),
        None if filter.type is None else _escaped(filter.type).replace("*", "%").replace("?", "_"),
        _text(filter.subject),
        _text(filter.key),
        None if filter.category is None else str(filter.category),
        _text(filter.note),
        None if filter.code is None else _escaped(filter.code).replace("x", "_"),
        filter.attempts_above,
        filter.attempts_below,
        _id(filter.replay_id or (_ANY_REPLAY if filter.is_replayed else None)),
        filter.since,
        filter.until,
        None if filter.text is None else f"%{_escaped(filter.text)}%",
    ]


_SOURCES: Final = "SELECT id FROM sources WHERE name = ANY($1::text[])"
_DESTINATION: Final = "SELECT id FROM destinations WHERE name = $1"


async def _sources(connection: Connection, filter: Filter) -> Integers | None:
    """The numbers of the sources that are meant; one that nobody has where none is known: an array of none is NULL."""
    names = filter.sources if filter.source is None else [filter.source]
    if names is None:
        return None
    found = await rows(connection, _SOURCES, [Texts([storable(name) for name in names])])
    return Integers([number for (number,) in found] or [-1])


async def _number(connection: Connection, statement: str, name: str | None) -> int | None:
    if name is None:
        return None
    found = await rows(connection, statement, [storable(name)])
    return found[0][0] if found else -1


def _id(value: bytes | None) -> Id | None:
    return None if value is None else Id(value)


def _text(value: str | None) -> str | None:
    return None if value is None else storable(value)


def _escaped(text: str) -> str:
    return storable(text).replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


READ_CONNECTIONS: Final = 4
READ_PATIENCE: Final = 2.0
"""Seconds a question waits for its turn."""

_EVENT: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks, coalesce(e.head, b.head, ''), e.body,
  e.batch_id, coalesce(k.copies, 1), e.rank, e.rank_scope, e.same_as
FROM events e JOIN sources s ON s.id = e.source_id
LEFT JOIN batches b ON b.id = e.batch_id
LEFT JOIN keys k ON k.hash = e.key_hash AND k.event_id = e.id
"""
_GET_EVENT: Final = _EVENT + "WHERE e.id = $1"
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
        self._places = asyncio.Semaphore(READ_CONNECTIONS)
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
            await asyncio.wait_for(self._places.acquire(), READ_PATIENCE)
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
        found = await self.rows(_GET_EVENT, [Id(event_id)])
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


LOOKED_AT: Final = 20_000
"""Rows that one page of a list looks at, at most."""

LOOKED_INTO: Final = 32 << 20
"""Bytes of bodies that one page looks into, at most, where the filter asks for what they say."""

COLUMNS: Final = (
    "SELECT d.id, d.event_id, s.name, t.name, e.type, e.key, e.subject, "
    + STATUS
    + ", d.note, d.run, "
    + ATTEMPTS
    + """, d.category, d.last_status, d.last_error,
  CASE WHEN h.delivery_id = d.id AND h.due_at < 'infinity' THEN h.due_at END,
  e.received_at, d.settled_at, d.last_replay_at, d.replay_id, d.reason,
  CASE WHEN h.delivery_id <> d.id THEN h.delivery_id END
"""
)

# -- the ways to get at deliveries, newest first: each looks at `$19` rows ----------------------

_BOUNDS: Final = (
    "($18::uuid IS NULL OR d.id < $18) AND ($15::timestamptz IS NULL OR d.id >= "
    + ID_SINCE
    + ") AND ($16::timestamptz IS NULL OR d.id <= "
    + ID_UNTIL
    + ") AND ($1::uuid[] IS NULL OR d.id = ANY($1))"
)
_EVENT_BOUNDS: Final = (
    "($18::uuid IS NULL OR e.id < $18) AND ($15::timestamptz IS NULL OR e.id >= "
    + ID_SINCE
    + ") AND ($16::timestamptz IS NULL OR e.id <= "
    + ID_UNTIL
    + """) AND ($2::uuid IS NULL OR e.id = $2)
  AND ($1::uuid[] IS NULL OR e.id IN (SELECT (left(i::text, 32) || '0000')::uuid FROM unnest($1) i))"""
)
_ALL: Final = (
    "(SELECT d.* FROM deliveries d WHERE "
    + _BOUNDS
    + " AND ($2::uuid IS NULL OR (d.id > $2 AND d.id <= (left($2::text, 30) || 'ffffff')::uuid))"
    + " ORDER BY d.id DESC LIMIT $19) d"
)
_UNFINISHED: Final = (
    "(SELECT d.* FROM deliveries d WHERE d.status <> 'done' AND d.status = $5 AND "
    + _BOUNDS
    + " ORDER BY d.id DESC LIMIT $19) d"
)
_LEASED: Final = (
    """(SELECT d.* FROM deliveries d WHERE d.id IN (
  SELECT unnest(ARRAY[h.delivery_id, h.carries]) FROM heads h WHERE h.leased) AND """
    + _BOUNDS
    + " ORDER BY d.id DESC LIMIT $19) d"
)
_EVENTS_OF_SUBJECT: Final = (
    "(SELECT e.* FROM events e WHERE e.subject = $7 AND " + _EVENT_BOUNDS + " ORDER BY e.id DESC LIMIT $19) e"
)
_SUBJECT: Final = (
    "(SELECT d.* FROM "
    + _EVENTS_OF_SUBJECT
    + " CROSS JOIN LATERAL (SELECT d.* FROM deliveries d WHERE d.id > e.id AND d.id <= "
    + LAST_OF
    + " AND "
    + _BOUNDS
    + " OFFSET 0) d) d"
)

# What stands beside a delivery, each looked up for its row alone: so the rows stay in their order, and a page that is
# full ends the looking. Joined as tables, all rows that may be looked at would be joined and sorted first.
_BESIDE: Final = """
CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.id = d.event_id LIMIT 1) e
CROSS JOIN LATERAL (SELECT * FROM sources s WHERE s.id = e.source_id LIMIT 1) s
CROSS JOIN LATERAL (SELECT * FROM destinations t WHERE t.id = d.destination_id LIMIT 1) t
LEFT JOIN LATERAL (
  SELECT * FROM heads h WHERE d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id) LIMIT 1
) h ON true
"""
_LIST: Final = _BESIDE + "WHERE " + MATCHES + "ORDER BY d.id DESC LIMIT $20"
_LIST_SAYING: Final = (
    _BESIDE
    + "WHERE "
    + MATCHES
    + "AND CASE WHEN "
    + IS_ENCRYPTED
    + " THEN e.id = ANY($22::uuid[]) ELSE body_says(e.body, $21::jsonb) END ORDER BY d.id DESC LIMIT $20"
)
LISTS: Final = {
    "all": COLUMNS + "FROM " + _ALL + _LIST,
    "unfinished": COLUMNS + "FROM " + _UNFINISHED + _LIST,
    "leased": COLUMNS + "FROM " + _LEASED + _LIST,
    "subject": COLUMNS + "FROM " + _SUBJECT + _LIST,
}
LISTS_SAYING: Final = {
    "all": COLUMNS + "FROM " + _ALL + _LIST_SAYING,
    "unfinished": COLUMNS + "FROM " + _UNFINISHED + _LIST_SAYING,
    "leased": COLUMNS + "FROM " + _LEASED + _LIST_SAYING,
    "subject": COLUMNS + "FROM " + _SUBJECT + _LIST_SAYING,
}
# What a page looks into that only Python can read. The page's own limit is named to give it its type.
_ENCRYPTED: Final = " AND " + IS_ENCRYPTED + " LIMIT greatest($19::bigint, $20::bigint)"
ENCRYPTED: Final = {
    "all": "SELECT e.id, e.body FROM " + _ALL + _BESIDE + "WHERE " + MATCHES + _ENCRYPTED,
    "unfinished": "SELECT e.id, e.body FROM " + _UNFINISHED + _BESIDE + "WHERE " + MATCHES + _ENCRYPTED,
    "leased": "SELECT e.id, e.body FROM " + _LEASED + _BESIDE + "WHERE " + MATCHES + _ENCRYPTED,
    "subject": "SELECT e.id, e.body FROM " + _SUBJECT + _BESIDE + "WHERE " + MATCHES + _ENCRYPTED,
}
# Every parameter has its type, also where nothing is asked of it.
_TYPED: Final = """
WHERE (ROW($1::uuid[], $2::uuid, $3::integer[], $4::integer, $5::text, $6::text, $7::text, $8::text, $9::text,
  $10::text, $11::text, $12::integer, $13::integer, $14::uuid, $15::timestamptz, $16::timestamptz, $17::text, $18::uuid,
  $20::bigint) IS NULL) IN (true, false)
"""
# How far a page looked that found too little: the last row of as many as it may look at, if there are so many.
_LAST_LOOKED: Final = _TYPED + "ORDER BY 1 DESC OFFSET $19 - 1 LIMIT 1"
FAR: Final = {
    "all": "SELECT d.id FROM " + _ALL + _LAST_LOOKED,
    "unfinished": "SELECT d.id FROM " + _UNFINISHED + _LAST_LOOKED,
    "leased": "SELECT d.id FROM " + _LEASED + _LAST_LOOKED,
    "subject": "SELECT e.id FROM " + _EVENTS_OF_SUBJECT + _LAST_LOOKED,
}
# How many rows a way brings, and how many of them before their bodies are more than a page looks into.
_WEIGH: Final = """
SELECT count(*), count(*) FILTER (WHERE upto <= $21::bigint)
FROM (SELECT sum(length(e.body)) OVER (ORDER BY e.id DESC ROWS UNBOUNDED PRECEDING) AS upto FROM
"""
_ITS_EVENT: Final = " CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.id = d.event_id LIMIT 1) e"
_WEIGHED: Final = _TYPED + ") w"
WEIGH: Final = {
    "all": _WEIGH + _ALL + _ITS_EVENT + _WEIGHED,
    "unfinished": _WEIGH + _UNFINISHED + _ITS_EVENT + _WEIGHED,
    "leased": _WEIGH + _LEASED + _ITS_EVENT + _WEIGHED,
    "subject": _WEIGH + _EVENTS_OF_SUBJECT + _WEIGHED,
}

_GET_DELIVERY: Final = COLUMNS + "FROM deliveries d" + TOGETHER + "WHERE d.id = $1"

# -- and at events -----------------------------------------------------------------------------

_LISTED: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks,
  length(e.body) - CASE WHEN substring(e.body FROM 1 FOR 5) = '\\xff4f484501'::bytea THEN 49 ELSE 0 END,
  coalesce(k.copies, 1)
FROM
"""
_EVENTS: Final = "(SELECT e.* FROM events e WHERE " + _EVENT_BOUNDS + " ORDER BY e.id DESC LIMIT $19) e"
_EVENTS_OF_SOURCE: Final = (
    "(SELECT e.* FROM events e WHERE e.source_id = ($3::integer[])[1] AND "
    + _EVENT_BOUNDS
    + " ORDER BY e.id DESC LIMIT $19) e"
)
_EVENTS_UNFINISHED: Final = (
    "(SELECT e.* FROM events e WHERE e.id IN (SELECT d.event_id FROM "
    + _UNFINISHED
    + ") ORDER BY e.id DESC LIMIT $19) e"
)
_EVENTS_LEASED: Final = (
    "(SELECT e.* FROM events e WHERE e.id IN (SELECT d.event_id FROM " + _LEASED + ") ORDER BY e.id DESC LIMIT $19) e"
)
# `$21`: whether anything is asked of its deliveries. The text may stand in the event or in the delivery that meets the
# other conditions.
_EVENT_MATCHES: Final = (
    """
CROSS JOIN LATERAL (SELECT * FROM sources s WHERE s.id = e.source_id LIMIT 1) s
LEFT JOIN LATERAL (SELECT * FROM keys k WHERE k.hash = e.key_hash AND k.event_id = e.id LIMIT 1) k ON true
WHERE """
    + OF_EVENT
    + "AND (($21 IS FALSE AND ($17::text IS NULL OR "
    + IN_EVENT
    + """)) OR EXISTS (
  SELECT FROM deliveries d JOIN destinations t ON t.id = d.destination_id
  LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id)
  WHERE d.id > e.id AND d.id <= """
    + LAST_OF
    + " AND "
    + OF_DELIVERY
    + " AND ($17::text IS NULL OR "
    + IN_EVENT
    + " OR "
    + IN_DELIVERY
    + ")))"
)
_EVENT_LIST: Final = _EVENT_MATCHES + " ORDER BY e.id DESC LIMIT $20"
_EVENT_LIST_SAYING: Final = (
    _EVENT_MATCHES
    + " AND CASE WHEN "
    + IS_ENCRYPTED
    + " THEN e.id = ANY($23::uuid[]) ELSE body_says(e.body, $22::jsonb) END ORDER BY e.id DESC LIMIT $20"
)
EVENT_LISTS: Final = {
    "all": _LISTED + _EVENTS + _EVENT_LIST,
    "source": _LISTED + _EVENTS_OF_SOURCE + _EVENT_LIST,
    "subject": _LISTED + _EVENTS_OF_SUBJECT + _EVENT_LIST,
    "unfinished": _LISTED + _EVENTS_UNFINISHED + _EVENT_LIST,
    "leased": _LISTED + _EVENTS_LEASED + _EVENT_LIST,
}
EVENT_LISTS_SAYING: Final = {
    "all": _LISTED + _EVENTS + _EVENT_LIST_SAYING,
    "source": _LISTED + _EVENTS_OF_SOURCE + _EVENT_LIST_SAYING,
    "subject": _LISTED + _EVENTS_OF_SUBJECT + _EVENT_LIST_SAYING,
    "unfinished": _LISTED + _EVENTS_UNFINISHED + _EVENT_LIST_SAYING,
    "leased": _LISTED + _EVENTS_LEASED + _EVENT_LIST_SAYING,
}
EVENT_ENCRYPTED: Final = {
    "all": "SELECT e.id, e.body FROM " + _EVENTS + _EVENT_MATCHES + _ENCRYPTED,
    "source": "SELECT e.id, e.body FROM " + _EVENTS_OF_SOURCE + _EVENT_MATCHES + _ENCRYPTED,
    "subject": "SELECT e.id, e.body FROM " + _EVENTS_OF_SUBJECT + _EVENT_MATCHES + _ENCRYPTED,
    "unfinished": "SELECT e.id, e.body FROM " + _EVENTS_UNFINISHED + _EVENT_MATCHES + _ENCRYPTED,
    "leased": "SELECT e.id, e.body FROM " + _EVENTS_LEASED + _EVENT_MATCHES + _ENCRYPTED,
}
_DELIVERIES_OF: Final = (
    "SELECT e.id, d.id, t.name, "
    + STATUS
    + ", d.note, d.run, d.replay_id FROM unnest($1::uuid[]) AS e(id) JOIN deliveries d ON d.id > e.id AND d.id <= "
    + LAST_OF
    + """ JOIN destinations t ON t.id = d.destination_id
LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id) ORDER BY d.id
"""
)
EVENT_FAR: Final = {
    "all": "SELECT e.id FROM " + _EVENTS + _LAST_LOOKED,
    "source": "SELECT e.id FROM " + _EVENTS_OF_SOURCE + _LAST_LOOKED,
    "subject": "SELECT e.id FROM " + _EVENTS_OF_SUBJECT + _LAST_LOOKED,
    "unfinished": "SELECT d.event_id FROM " + _UNFINISHED + _LAST_LOOKED,
    "leased": "SELECT d.event_id FROM " + _LEASED + _LAST_LOOKED,
}
EVENT_WEIGH: Final = {
    "all": _WEIGH + _EVENTS + _WEIGHED,
    "source": _WEIGH + _EVENTS_OF_SOURCE + _WEIGHED,
    "subject": _WEIGH + _EVENTS_OF_SUBJECT + _WEIGHED,
    "unfinished": _WEIGH + _UNFINISHED + _ITS_EVENT + _WEIGHED,
    "leased": _WEIGH + _LEASED + _ITS_EVENT + _WEIGHED,
}

_UNFINISHED_STATUSES: Final = (DeliveryStatus.pending, DeliveryStatus.dead, DeliveryStatus.discarded)


class Lists(Reader):
    """Answers every question about deliveries, and lists events."""

    async def get_delivery(self, delivery_id: bytes) -> StoredDelivery | None:
        found = await self.rows(_GET_DELIVERY, [Id(delivery_id)])
        return delivery(found[0]) if found else None

    async def find_deliveries(
        self, filter: Filter, *, before: bytes | None = None, limit: int = 50
    ) -> Page[StoredDelivery]:
        if means_nothing(filter):
            return Page(())
        way = _way_to_deliveries(filter)
        cursor = None if before is None else Id(before)
        async with self.connection() as connection:
            given = [*await parameters_without_body(connection, filter), cursor, LOOKED_AT, limit + 1]
            if filter.body is None:
                found = await rows(connection, LISTS[way], given)
            else:
                given = await _weighed(connection, WEIGH[way], given)
                read = await self._decrypted(connection, ENCRYPTED[way], given, filter.body)
                found = await rows(connection, LISTS_SAYING[way], [*given, asked(filter.body), read])
            if len(found) > limit:
                return Page([delivery(row) for row in found[:limit]], found[limit - 1][0])
            far = await rows(connection, FAR[way], given)
        return Page([delivery(row) for row in found], far[0][0] if far else None)

    async def find_events(self, filter: Filter, *, before: bytes | None = None, limit: int = 50) -> Page[ListedEvent]:
        if means_nothing(filter):
            return Page(())
        way = _way_to_events(filter)
        cursor = None if before is None else Id(before)
        async with self.connection() as connection:
            given = [*await parameters_without_body(connection, filter), cursor, LOOKED_AT, limit + 1]
            asks = _asks_of_deliveries(filter)
            if filter.body is None:
                found = await rows(connection, EVENT_LISTS[way], [*given, asks])
            else:
                given = await _weighed(connection, EVENT_WEIGH[way], given)
                read = await self._decrypted(connection, EVENT_ENCRYPTED[way], [*given, asks], filter.body)
                found = await rows(connection, EVENT_LISTS_SAYING[way], [*given, asks, asked(filter.body), read])
            if len(found) > limit:
                return Page(await _listed(connection, found[:limit]), found[limit - 1][0])
            far = await rows(connection, EVENT_FAR[way], given)
            return Page(await _listed(connection, found), far[0][0] if far else None)

    async def _decrypted(
        self, connection: Connection, statement: str, given: Sequence[object], clauses: Sequence[Clause]
    ) -> Ids:
        """Return the events of a page whose encrypted bodies say what is asked for."""
        if not self.cipher.has_keys:
            return Ids([])
        return Ids(await saying(await rows(connection, statement, given), clauses, self.cipher))

    async def attempts_of(self, delivery_id: bytes) -> list[StoredAttempt]:
        found = await self.rows(
            """
            SELECT delivery_id, fence, run, n, started_at, ended_at, outcome, category, status, error, answer
            FROM attempts WHERE delivery_id = $1 ORDER BY fence
            """,
            [Id(delivery_id)],
        )
        kept = [
            StoredAttempt(*(*row[:6], AttemptOutcome(row[6]), row[7] and Category(row[7]), Evidence(*row[8:])))
            for row in found
        ]
        return [self.cipher.read_attempt(one) for one in kept]

    async def subject_of(self, delivery_id: bytes, around: int = 10) -> list[StoredDelivery]:
        async with self.connection() as connection:
            found = await rows(connection, _GET_DELIVERY, [Id(delivery_id)])
            if not found:
                return []
            near = await rows(connection, _NEIGHBOURS, [Id(delivery_id), Id(found[0][1]), 2 * around + 1])
        ids = [row[0] for row in near]
        if delivery_id not in ids:  # it has no subject
            return [delivery(found[0])]
        place = ids.index(delivery_id)
        return [delivery(row) for row in near[max(place - around, 0) : place + around + 1]]

    async def causes(self, destination: str | None = None, sources: Collection[str] | None = None) -> list[Cause]:
        names = None if sources is None else Texts([storable(name) for name in sources])
        found = await self.rows(_CAUSES, [destination, names])
        return [Cause(*row) for row in found]


# Candidates are found by the subject's index, on both sides; their order is that of commit, which a replay changes.
_NEIGHBOURS: Final = (
    COLUMNS
    + """
FROM deliveries o JOIN events oe ON oe.id = o.event_id CROSS JOIN LATERAL (
  (SELECT e.id FROM events e WHERE e.subject = oe.subject AND e.id <= $2 ORDER BY e.id DESC LIMIT $3)
  UNION ALL
  (SELECT e.id FROM events e WHERE e.subject = oe.subject AND e.id > $2 ORDER BY e.id LIMIT $3)
) n JOIN deliveries d ON d.event_id = n.id
  AND d.id = (left(n.id::text, 32) || right(o.id::text, 4))::uuid
"""
    + TOGETHER
    + "WHERE o.id = $1 AND d.subject_key = o.subject_key ORDER BY d.seq"
)

_CAUSES: Final = """
SELECT t.name, d.cause, count(*), min(d.at), max(d.at), (array_agg(d.id ORDER BY d.id DESC))[1] FROM (
  SELECT d.id, d.destination_id, d.settled_at AS at,
    CASE WHEN d.reason = 'crash' THEN 'crash'
      ELSE coalesce(nullif(split_part(d.last_error, E'\n', 1), ''), 'HTTP ' || d.last_status, 'unknown') END AS cause
  FROM deliveries d
  WHERE d.status <> 'done' AND d.status = 'dead'
    AND ($1::text IS NULL OR d.destination_id = (SELECT id FROM destinations WHERE name = $1))
    AND ($2::text[] IS NULL OR (
      SELECT s.name FROM events e JOIN sources s ON s.id = e.source_id WHERE e.id = d.event_id) = ANY($2))
  ORDER BY d.id DESC LIMIT 10000
) d JOIN destinations t ON t.id = d.destination_id
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2
"""


def _way_to_deliveries(filter: Filter) -> str:
    """Which index serves this filter."""
    if filter.ids is not None or filter.event_id is not None:
        return "all"
    if filter.subject is not None:
        return "subject"
    if filter.status in _UNFINISHED_STATUSES:
        return "unfinished"
    return "leased" if filter.status is DeliveryStatus.leased else "all"


def _way_to_events(filter: Filter) -> str:
    if filter.event_id is not None:
        return "all"
    if filter.subject is not None:
        return "subject"
    if filter.status in _UNFINISHED_STATUSES:
        return "unfinished"
    if filter.status is DeliveryStatus.leased:
        return "leased"
    return "all" if filter.source is None else "source"


def _asks_of_deliveries(filter: Filter) -> bool:
    asked: list[object] = [filter.ids, filter.destination, filter.status, filter.category, filter.note, filter.code]
    asked += [filter.attempts_above, filter.attempts_below, filter.is_replayed, filter.replay_id]
    return any(one is not None for one in asked)


async def _weighed(connection: Connection, statement: str, given: list[object]) -> list[object]:
    """The parameters of a page that looks at fewer rows where their bodies are too large to look into all of them."""
    [(there, fitting)] = await rows(connection, statement, [*given, LOOKED_INTO])
    return given if fitting == there else [*given[:18], max(fitting, 1), *given[19:]]


async def _listed(connection: Connection, found: Sequence[Sequence[Any]]) -> list[ListedEvent]:
    became: dict[bytes, list[ListedDelivery]] = {row[0]: [] for row in found}
    if found:
        for event_id, one, name, status, *rest in await rows(connection, _DELIVERIES_OF, [Ids(list(became))]):
            became[event_id].append(ListedDelivery(one, name, DeliveryStatus(status), *rest))
    return [ListedEvent(*(*row[:7], Mark(row[7]), row[8], row[9], became[row[0]])) for row in found]


def delivery(row: Sequence[Any]) -> StoredDelivery:
    """A row of COLUMNS as it is shown."""
    return StoredDelivery(*(*row[:7], DeliveryStatus(row[7]), *row[8:11], row[11] and Category(row[11]), *row[12:]))


_LEVELS: Final = """
SELECT t.name, coalesce(c.pending, 0), h.leased, coalesce(c.done, 0), coalesce(c.dead, 0), coalesce(c.discarded, 0),
  extract(epoch FROM now() - h.oldest)::float8, s.paused_at, s.paused_by, s.paused_why, coalesce(s.failures, 0),
  s.open_until
FROM destinations t
LEFT JOIN destination_state s ON s.destination_id = t.id
LEFT JOIN (
  SELECT destination_id, sum(n) FILTER (WHERE what = 'pending')::bigint AS pending,
    sum(n) FILTER (WHERE what = 'done')::bigint AS done, sum(n) FILTER (WHERE what = 'dead')::bigint AS dead,
    sum(n) FILTER (WHERE what = 'discarded')::bigint AS discarded
  FROM counters WHERE destination_id <> 0 AND what IN ('pending', 'done', 'dead', 'discarded') GROUP BY 1
) c ON c.destination_id = t.id,
LATERAL (
  SELECT sum(l.leased)::bigint AS leased, min(o.due_at) AS oldest
  FROM unnest('{0,1,2}'::smallint[]) AS turns(turn)
  CROSS JOIN LATERAL (
    SELECT count(*) AS leased FROM heads h
    WHERE h.destination_id = t.id AND h.turn = turns.turn AND h.due_at > now() AND h.leased
  ) l
  LEFT JOIN LATERAL (
    SELECT h.due_at FROM heads h WHERE h.destination_id = t.id AND h.turn = turns.turn AND h.due_at <= now()
    ORDER BY h.due_at LIMIT 1
  ) o ON true
) h
"""

_COUNT_SINCE: Final = (
    "SELECT "
    + STATUS
    + """, count(*)
FROM events e JOIN deliveries d ON d.event_id = e.id
LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id)
WHERE e.received_at >= $1 AND e.id >= (lpad(to_hex((extract(epoch FROM greatest(
    $1::timestamptz - (now() - transaction_timestamp()) - interval '1 hour', 'epoch')) * 1000)::bigint), 12, '0')
  || '00000000000000000000')::uuid
GROUP BY 1
"""
)

_COUNT_OF: Final = (
    "SELECT t.name, "
    + STATUS
    + """, count(*)
FROM sources s JOIN events e ON e.source_id = s.id JOIN deliveries d ON d.event_id = e.id
JOIN destinations t ON t.id = d.destination_id
LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id)
WHERE s.name = ANY($1::text[]) AND ($2::timestamptz IS NULL OR e.received_at >= $2)
GROUP BY 1, 2
"""
)

# Levels are no flows: what became done or dead is counted as succeeded or died too.
_SERIES: Final = """
SELECT what, to_timestamp(floor(extract(epoch FROM minute) / $2::float8) * $2::float8), sum(n)::bigint
FROM counters
WHERE minute >= date_trunc('minute', $1::timestamptz) AND what NOT IN ('pending', 'done', 'dead', 'discarded')
  AND ($3::text IS NULL OR source_id = (SELECT id FROM sources WHERE name = $3))
  AND ($4::text IS NULL OR destination_id = (SELECT id FROM destinations WHERE name = $4))
GROUP BY 1, 2 ORDER BY 1, 2
"""


class Gauges(Reader):
    """Answers every question about numbers."""

    async def levels(self) -> dict[str, Level]:
        return {name: Level(*level) for name, *level in await self.rows(_LEVELS)}

    async def count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        return {DeliveryStatus(status): n for status, n in await self.rows(_COUNT_SINCE, [since])}

    async def count_of(
        self, sources: Collection[str], since: datetime | None = None
    ) -> dict[str, dict[DeliveryStatus, int]]:
        found: dict[str, dict[DeliveryStatus, int]] = {}
        for name, status, n in await self.rows(_COUNT_OF, [Texts([storable(one) for one in sources]), since]):
            found.setdefault(name, {})[DeliveryStatus(status)] = n
        return found

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> dict[str, list[tuple[datetime, int]]]:
        flows: dict[str, list[tuple[datetime, int]]] = {}
        for what, at, n in await self.rows(_SERIES, [since, float(step), source, destination]):
            flows.setdefault(what, []).append((at, n))
        return flows

    async def audit_log(self, *, before: int | None = None, limit: int = 50, actor: str | None = None) -> list[Audited]:
        found = await self.rows(
            """
            SELECT n, at, actor, act, target, detail FROM audit
            WHERE ($1::bigint IS NULL OR n < $1) AND ($3::text IS NULL OR actor = $3) ORDER BY n DESC LIMIT $2
            """,
            [before, limit, None if actor is None else storable(actor)],
        )
        return [Audited(*(*row[:5], json.loads(row[5]))) for row in found]

    async def workers(self) -> list[StoredWorker]:
        found = await self.rows(
            """
            SELECT id, host, pid, started_at, seen_at, leases, destinations FROM workers
            WHERE seen_at > now() - interval '1 minute' ORDER BY started_at, id
            """
        )
        return [StoredWorker(*(*row[:6], json.loads(row[6]))) for row in found]

    async def crossings(self) -> dict[str, datetime]:
        async with self.connection() as connection:
            return dict(await rows(connection, "SELECT name, since FROM crossings"))
