"""Upkeep on PostgreSQL: pruning, old counters, workers, watermarks, sessions, and the checks of `doctor`.

Any process may call any of it at any time; the second finds less to do. Only pruning takes more than one statement,
because it must not run while a replay is being made (`StorePart.hold_lock`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncehook.human import count
from oncehook.model import (
    ArchivedDelivery,
    ArchivedEvent,
    Check,
    DeliveryId,
    EventId,
    Id,
    Pruned,
    StoredMedia,
    StoredSession,
    StoredWorker,
)
from oncehook.store.audit import ChainEntry, Ends, check_chain
from oncehook.store.base import REJECTED_KEPT, TOKEN_USE_SECONDS
from oncehook.store.checks import Tally, conservation, encryption
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.connection import (
    AUDIT,
    PRUNING,
    Bigs,
    Connection,
    Database,
    Floats,
    Ids,
    Integers,
    StoreConnection,
    StorePart,
    Texts,
    clean_text,
    encode_detail,
    fetch_all,
    fetch_one,
    has_dedup_index,
)
from oncehook.store.postgres.read import LAST_OF

LOOKED_AT: Final = 5000
"""Split requests that one batch reads."""

FIRST: Final = bytes(16)

# `$1`, `$2`: seconds per source, `$3`: for the others; `$4`, `$5`: where the last batch stopped per source; `$6`: how
# many. Bounds on ids narrow the search, received_at decides; see `ID_SINCE` in `read`.
_FIND_OLD: Final = (
    """
WITH v AS MATERIALIZED (
  SELECT v.* FROM (
    SELECT s.id, coalesce(k.keep, $3::float8) AS keep,
      coalesce(f.left_at, '00000000-0000-0000-0000-000000000000') AS left_at
    FROM sources s LEFT JOIN unnest($1::integer[], $2::float8[]) AS k(id, keep) ON k.id = s.id
      LEFT JOIN unnest($4::integer[], $5::uuid[]) AS f(id, left_at) ON f.id = s.id
  ) s, LATERAL (
    SELECT e.id, e.source_id FROM events e
    WHERE e.source_id = s.id AND e.id > s.left_at AND e.received_at < now() - make_interval(secs => s.keep)
      AND e.id < (lpad(to_hex((extract(epoch FROM greatest(
        now() - make_interval(secs => s.keep) + interval '1 hour', 'epoch')) * 1000)::bigint), 12, '0')
        || '00000000000000000000')::uuid
      AND NOT EXISTS (SELECT FROM deliveries d WHERE d.id > e.id AND d.id <= """
    + LAST_OF
    + """ AND d.status IN ('pending', 'dead'))
      AND NOT EXISTS (SELECT FROM restored r WHERE r.event_id = e.id AND r.until > now())
    ORDER BY e.id LIMIT $6
  ) v LIMIT $6
"""
)
# `$1` to `$3`: as above; `$4`: the events.
_CHECK_OLD: Final = (
    """
WITH v AS MATERIALIZED (
  SELECT e.id, e.source_id FROM events e LEFT JOIN unnest($1::integer[], $2::float8[]) AS k(id, keep)
    ON k.id = e.source_id
  WHERE e.id = ANY($4::uuid[]) AND e.received_at < now() - make_interval(secs => coalesce(k.keep, $3::float8))
    AND NOT EXISTS (SELECT FROM deliveries d WHERE d.id > e.id AND d.id <= """
    + LAST_OF
    + """ AND d.status IN ('pending', 'dead'))
    AND NOT EXISTS (SELECT FROM restored r WHERE r.event_id = e.id AND r.until > now())
"""
)
_REMOVE: Final = (
    """
), d AS (
  DELETE FROM deliveries d USING v e WHERE d.id > e.id AND d.id <= """
    + LAST_OF
    + """ RETURNING d.id, d.destination_id, d.status
), a AS (
  DELETE FROM attempts a USING d WHERE a.delivery_id = d.id
), r AS (
  DELETE FROM arrivals r USING v WHERE r.event_id = v.id
), m AS (
  DELETE FROM media m USING v WHERE m.event_id = v.id
), c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), 0::smallint, source_id, destination_id, what, n FROM (
    SELECT source_id, 0, 'purged', count(*) FROM v GROUP BY source_id
    UNION ALL
    SELECT 0, destination_id, 'purged', count(*) FROM d GROUP BY destination_id
    UNION ALL
    SELECT 0, destination_id, status, -count(*) FROM d GROUP BY destination_id, status
  ) AS n(source_id, destination_id, what, n)
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
DELETE FROM events e USING v WHERE e.id = v.id RETURNING e.id, e.source_id
"""
)
PRUNE: Final = _FIND_OLD + _REMOVE
_PRUNE_THESE: Final = _CHECK_OLD + _REMOVE

# `$1`: the source, `$2`: seconds, `$3`: where the last page ended, `$4`: how many.
_PRUNABLE: Final = (
    """
SELECT e.id, e.received_at < now() - make_interval(secs => $2::float8), NOT EXISTS (
    SELECT FROM deliveries d WHERE d.id > e.id AND d.id <= """
    + LAST_OF
    + """ AND d.status IN ('pending', 'dead'))
  AND NOT EXISTS (SELECT FROM restored r WHERE r.event_id = e.id AND r.until > now())
FROM events e WHERE e.source_id = $1 AND e.id > $3 ORDER BY e.id LIMIT $4
"""
)
_ARCHIVED: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks, e.rank, e.rank_scope, e.body_hash,
  e.key_hash, coalesce(e.head, b.head, ''), e.body, e.account
FROM events e JOIN sources s ON s.id = e.source_id LEFT JOIN batches b ON b.id = e.batch_id
WHERE e.id = ANY($1::uuid[]) ORDER BY e.id
"""
_ARCHIVED_DELIVERIES: Final = (
    """
SELECT e.id, t.name, d.subject_key, d.seq, d.status, d.note, d.run, d.attempts, d.options, d.settled_at, d.category,
  d.last_status, d.last_error, d.reason, d.fair
FROM unnest($1::uuid[]) AS e(id) JOIN deliveries d ON d.id > e.id AND d.id <= """
    + LAST_OF
    + """ JOIN destinations t ON t.id = d.destination_id ORDER BY d.id
"""
)
# 8: Mark.erased
_KEEP_MEDIA: Final = """
INSERT INTO media (event_id, n, digest, size, type, filename)
SELECT e.id, $2, $3, $4, $5, $6 FROM events e WHERE e.id = $1 AND e.marks & 8 = 0
ON CONFLICT (event_id, n) DO UPDATE SET digest = excluded.digest, size = excluded.size, type = excluded.type,
  filename = excluded.filename, kept_at = now()
RETURNING 1
"""
_RESTORE_EVENT: Final = """
WITH r AS (
  INSERT INTO restored (event_id, until) VALUES ($1, now() + make_interval(secs => $16::float8))
  ON CONFLICT (event_id) DO UPDATE SET until = excluded.until
)
INSERT INTO events (id, source_id, type, key, subject, received_at, event_at, marks, rank, rank_scope, body_hash,
  key_hash, head, body, account)
SELECT $1, s.id, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15 FROM sources s WHERE s.name = $2
ON CONFLICT (id) DO NOTHING RETURNING source_id
"""
_RESTORE_DELIVERY: Final = """
INSERT INTO deliveries (id, event_id, destination_id, subject_key, seq, status, note, run, attempts, options,
  settled_at, category, last_status, last_error, reason, fair)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
"""
_COUNT_RESTORED: Final = """
INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
SELECT date_trunc('minute', now()), 0::smallint, n.* FROM unnest($1::integer[], $2::integer[], $3::text[], $4::bigint[])
  AS n(source_id, destination_id, what, n)
ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
"""

# A batch is a few rows of large tables. A plan that reads one of them whole takes fifty times as long, and statistics
# of a store that has just been filled suggest it.
BY_INDEX: Final = """
SELECT set_config(name, 'off', true) FROM unnest(ARRAY['enable_hashjoin', 'enable_mergejoin', 'enable_seqscan']) AS name
"""

# Copies whose event is gone are removed with their key.
_PRUNE_KEYS: Final = """
WITH k AS (
  DELETE FROM keys WHERE hash IN (
    SELECT hash FROM keys WHERE expires_at < now() ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED)
  RETURNING event_id
), r AS (
  DELETE FROM arrivals r USING k WHERE r.event_id = k.event_id AND NOT EXISTS (SELECT FROM events WHERE id = k.event_id)
)
SELECT count(*) FROM k
"""

# Split requests without any event or later arrival. `$1`: where the last batch ended.
_PRUNE_BATCHES: Final = """
WITH b AS MATERIALIZED (
  SELECT id FROM batches WHERE id > $1 AND received_at < now() - make_interval(secs => $2::float8) ORDER BY id LIMIT $3
), x AS (
  DELETE FROM batches x USING b WHERE x.id = b.id
    AND NOT EXISTS (SELECT FROM events e WHERE e.batch_id = b.id)
    AND NOT EXISTS (SELECT FROM arrivals a WHERE a.batch_id = b.id)
  RETURNING x.id
)
SELECT (SELECT count(*) FROM x), (SELECT count(*) FROM b), (SELECT id FROM b ORDER BY id DESC LIMIT 1)
"""

# `$1`: seconds after which they are removed, `$2`: how many of each, `$3`: seconds of a rejected arrival's bytes.
_PRUNE_OTHERS: Final = """
WITH m AS MATERIALIZED (
  SELECT now() - make_interval(secs => $1::float8) AS before
), k AS (
  DELETE FROM ranks WHERE ctid = ANY(ARRAY(SELECT ctid FROM ranks WHERE seen_at < (SELECT before FROM m) LIMIT $2))
  RETURNING 1
), r AS (
  DELETE FROM replays WHERE id IN (
    SELECT id FROM replays WHERE finished_at < (SELECT before FROM m) ORDER BY id LIMIT $2) RETURNING id
), i AS (
  DELETE FROM replay_items i USING r WHERE i.replay_id = r.id
), s AS (
  DELETE FROM sessions WHERE ends_at <= now() RETURNING 1
), l AS (
  DELETE FROM used_links WHERE ends_at <= now() RETURNING 1
), e AS (
  UPDATE rejections SET head = NULL, body = NULL
  WHERE at < now() - make_interval(secs => $3::float8) AND (head IS NOT NULL OR body IS NOT NULL) RETURNING 1
), b AS (
  DELETE FROM restored WHERE until <= now() RETURNING 1
), p AS (
  DELETE FROM proofs WHERE hash IN (
    SELECT hash FROM proofs WHERE expires_at < now() ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED) RETURNING 1
)
SELECT (SELECT count(*) FROM k) + (SELECT count(*) FROM r) + (SELECT count(*) FROM s) + (SELECT count(*) FROM p)
  + (SELECT count(*) FROM e) + (SELECT count(*) FROM b) + (SELECT count(*) FROM l)
"""

# Entries are removed from the oldest on, until one is too young; `audit_delete` allows what this marks as pruned.
# Every process has learnt of these long ago.
_FORGET_DELETED: Final = "DELETE FROM definitions WHERE deleted AND changed_at < now() - interval '1 day'"
_MARK_AUDIT: Final = """
WITH o AS MATERIALIZED (
  SELECT n, hash, at < now() - make_interval(secs => $1::float8) AS is_old FROM audit ORDER BY n LIMIT $2
)
UPDATE audit_chain SET pruned = o.n, pruned_hash = coalesce(o.hash, pruned_hash) FROM o
WHERE o.n = (SELECT max(n) FROM o WHERE n < coalesce((SELECT min(n) FROM o WHERE NOT is_old), 9223372036854775807))
"""
_PRUNE_AUDIT: Final = "DELETE FROM audit WHERE n <= (SELECT pruned FROM audit_chain)"

_ROLL_UP: Final = """
WITH d AS (
  DELETE FROM counters WHERE minute < date_trunc('day', now()) - interval '2 days'
    AND NOT (slot = 0 AND minute = date_trunc(
      CASE WHEN minute < date_trunc('day', now()) - interval '9 days' THEN 'day' ELSE 'hour' END, minute))
  RETURNING *,
    date_trunc(CASE WHEN minute < date_trunc('day', now()) - interval '9 days' THEN 'day' ELSE 'hour' END, minute) AS at
), s AS (
  INSERT INTO sizes (hour, bytes) SELECT date_trunc('hour', now()), $1::bigint ON CONFLICT DO NOTHING
), o AS (
  DELETE FROM sizes WHERE hour < now() - interval '40 days'
), c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT at, 0, source_id, destination_id, what, sum(n) FROM d GROUP BY 1, 3, 4, 5
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
SELECT count(*) FROM d
"""

# Fences that the original issued after the backup are lower than all from here on.
_INVALIDATE: Final = """
WITH s AS MATERIALIZED (
  SELECT setval('fences', nextval('fences') + 1000000)
), u AS (
  UPDATE heads SET leased = false, alone = false, upto = 0, carries = NULL, fence = nextval('fences'), due_at = now(),
    attempts = attempts - 1
  WHERE leased AND (SELECT count(*) FROM s) > 0 RETURNING 1
), e AS (
  DELETE FROM sessions
), p AS (
  DELETE FROM places
)
SELECT (SELECT count(*) FROM s), count(*) FROM u
"""

# -- sessions ------------------------------------------------------------------------------------

# `$6`: how many may remain beside the new one.
_BEGIN: Final = """
WITH old AS (
  DELETE FROM sessions WHERE hash IN (
    SELECT hash FROM sessions WHERE (account IS NULL) = ($7::text IS NULL) ORDER BY begun_at DESC OFFSET $6::bigint)
)
INSERT INTO sessions (hash, actor, role, proof, account, begun_at, ends_at)
VALUES ($1, $2, $3, $4, $7, now(), now() + make_interval(secs => $5::float8))
"""
_GET: Final = "SELECT hash, actor, role, proof, account FROM sessions WHERE hash = $1 AND ends_at > now()"
_TAKE_LINK: Final = """
INSERT INTO used_links (hash, ends_at) VALUES ($1, now() + make_interval(secs => $2::float8))
ON CONFLICT DO NOTHING RETURNING 1
"""
_NOTE_USE: Final = """
INSERT INTO token_uses AS t (name, used_at) VALUES ($1, now())
ON CONFLICT (name) DO UPDATE SET used_at = now() WHERE t.used_at <= now() - make_interval(secs => $2::float8)
"""

# -- checks --------------------------------------------------------------------------------------

_BAD_KEYS: Final = "SELECT count(*) FROM keys WHERE copies < 1 AND body_hash <> '00000000-0000-0000-0000-000000000000'"

# The ids of the keys under which values are encrypted.
_KEY_IDS: Final = """
SELECT CASE WHEN substring(value FROM 1 FOR 5) = '\\xff4f484501'::bytea THEN substring(value FROM 6 FOR 4) END AS key,
  count(*)
FROM (
  SELECT unnest(ARRAY[substring(body FROM 1 FOR 9), substring(head FROM 1 FOR 9)]) AS value FROM events
  UNION ALL SELECT unnest(ARRAY[substring(body FROM 1 FOR 9), substring(head FROM 1 FOR 9)]) FROM arrivals
  UNION ALL SELECT unnest(ARRAY[substring(body FROM 1 FOR 9), substring(head FROM 1 FOR 9)]) FROM batches
  UNION ALL SELECT substring(answer FROM 1 FOR 9) FROM attempts
  UNION ALL SELECT substring(head FROM 1 FOR 9) FROM rejections
  UNION ALL SELECT substring(body FROM 1 FOR 9) FROM rejections
) v WHERE length(value) > 0 AND substring(value FROM 1 FOR 5) <> '\\xff4f484502'::bytea GROUP BY key
"""
_CHAINED: Final = """
SELECT n, (extract(epoch FROM at) * 1000000)::bigint, actor, act, target, detail, coalesce(hash, '') FROM audit
WHERE n > $1 ORDER BY n LIMIT $2
"""
CHAINED: Final = 10_000
"""Entries of the audit log that are read at once."""


class PostgresUpkeep(StorePart):
    def __init__(self, database: Database, cipher: Cipher) -> None:
        super().__init__(database, cipher)
        self._pruned_to: dict[int, bytes] = {}
        """Position of the last batch per source, so that events that stay are read once, not with every batch."""
        self._batches_to = FIRST

    async def prune(
        self,
        keep_events: Mapping[int, float],
        otherwise: float,
        limit: int = 500,
        only: Sequence[EventId] | None = None,
    ) -> Pruned:
        spans = [otherwise, *keep_events.values()]
        async with self.hold_lock(PRUNING) as connection:
            await connection.execute(BY_INDEX)
            events = await self._prune_events(connection, keep_events, otherwise, limit, only)
            batches = await self._prune_batches(connection, min(spans))
            (keys,) = await fetch_one(connection, _PRUNE_KEYS, [limit])
            # Not with every batch, because none of these tables has an index by age.
            others = 0 if events or keys else await self._prune_others(connection, spans, limit)
        return Pruned(events, keys, batches, others)

    async def _prune_events(
        self,
        connection: Connection,
        keep_events: Mapping[int, float],
        otherwise: float,
        limit: int,
        only: Sequence[EventId] | None,
    ) -> int:
        left = self._pruned_to
        wanted = [Integers(list(keep_events)), Floats(list(keep_events.values())), otherwise]
        if only is not None:
            return len(await fetch_all(connection, _PRUNE_THESE, [*wanted, Ids(only)])) if only else 0
        gone = await fetch_all(connection, PRUNE, [*wanted, Integers(list(left)), Ids(list(left.values())), limit])
        if not gone:
            left.clear()
        for event_id, source_id in gone:
            left[source_id] = max(left.get(source_id, FIRST), event_id)
        return len(gone)

    async def _prune_batches(self, connection: Connection, age: float) -> int:
        gone, looked, last = await fetch_one(connection, _PRUNE_BATCHES, [Id(self._batches_to), age, LOOKED_AT])
        self._batches_to = last if looked == LOOKED_AT else FIRST
        return int(gone)

    async def _prune_others(self, connection: Connection, spans: Sequence[float], limit: int) -> int:
        age = max(spans)
        (others,) = await fetch_one(connection, _PRUNE_OTHERS, [age, limit, min(REJECTED_KEPT, *spans)])
        await connection.execute(_FORGET_DELETED)
        await connection.execute(_MARK_AUDIT, [age, limit])
        return int(others) + (await connection.execute(_PRUNE_AUDIT)).rowcount

    async def keep_media(self, event_id: EventId, media: StoredMedia) -> bool:
        filename = None if media.filename is None else clean_text(media.filename)
        row = [Id(event_id), media.n, media.digest, media.size, clean_text(media.type), filename]
        return bool(await self.rows(_KEEP_MEDIA, row))

    async def find_prunable(
        self, source_id: int, keep: float, after: bytes, limit: int
    ) -> tuple[list[EventId], bytes | None]:
        rows = await self.rows(_PRUNABLE, [source_id, keep, Id(after or FIRST), limit])
        goes_on = len(rows) == limit and any(is_old for _, is_old, _ in rows)
        found = [EventId(id_) for id_, is_old, is_over in rows if is_old and is_over]
        return found, bytes(rows[-1][0]) if goes_on else None

    async def read_archivable(self, ids: Sequence[EventId]) -> list[ArchivedEvent]:
        events = await self.rows(_ARCHIVED, [Ids(ids)])
        deliveries: dict[bytes, list[ArchivedDelivery]] = {}
        for event_id, *columns in await self.rows(_ARCHIVED_DELIVERIES, [Ids(ids)]):
            named = dict(zip(ArchivedDelivery.__struct_fields__, columns, strict=True))
            deliveries.setdefault(bytes(event_id), []).append(ArchivedDelivery(**named))
        found: list[ArchivedEvent] = []
        for event_id, *columns in events:
            values = (str(EventId(event_id)), *columns, deliveries.get(bytes(event_id), []))
            found.append(ArchivedEvent(**dict(zip(ArchivedEvent.__struct_fields__, values, strict=True))))
        return found

    async def restore(self, events: Sequence[ArchivedEvent], keep: float, actor: str) -> int:
        counts: Counter[tuple[int, int, str]] = Counter()
        restored = 0
        async with self.hold_lock(PRUNING) as connection:
            ids = dict(await fetch_all(connection, "SELECT name, id FROM destinations"))
            for event in events:
                event_id = EventId.parse(event.id)
                found = await fetch_all(connection, _RESTORE_EVENT, [event_id, *_event_values(event), keep])
                if not found:
                    continue
                restored += 1
                counts[found[0][0], 0, "purged"] -= 1
                for one in event.deliveries:
                    destination_id = ids[one.destination]
                    delivery_id = DeliveryId.of(event_id, destination_id)
                    row = [delivery_id, event_id, destination_id, *_delivery_values(one)]
                    await connection.execute(_RESTORE_DELIVERY, row)
                    counts[0, destination_id, one.status] += 1
                    counts[0, destination_id, "purged"] -= 1
            columns = [
                Integers([source_id for source_id, _, _ in counts]),
                Integers([destination_id for _, destination_id, _ in counts]),
                Texts([what for _, _, what in counts]),
                Bigs(list(counts.values())),
            ]
            if counts:
                await connection.execute(_COUNT_RESTORED, columns)
            detail = encode_detail({"events": restored})
            await connection.execute(AUDIT, [clean_text(actor), "restore", "events", detail])
        return restored

    async def roll_up(self) -> int:
        return int((await self.rows(_ROLL_UP, [await self.size()]))[0][0])

    async def mark_watermark(self, name: str, crossed: bool) -> bool:
        async with self.connection() as connection:
            if crossed:
                done = await connection.execute(
                    "INSERT INTO crossings (name, since) VALUES ($1, now()) ON CONFLICT DO NOTHING", [name]
                )
            else:
                done = await connection.execute("DELETE FROM crossings WHERE name = $1", [name])
            return done.rowcount > 0

    async def invalidate_leases(self) -> int:
        ended = int((await self.rows(_INVALIDATE))[0][1])
        self.notify_due()
        return ended

    async def register_worker(self, worker: StoredWorker) -> None:
        await self.execute(
            """
            WITH old AS (DELETE FROM workers WHERE seen_at < now() - interval '1 day' AND id <> $1)
            INSERT INTO workers (id, host, pid, started_at, seen_at, leases, destinations)
            VALUES ($1, $2, $3, now(), now(), $4, $5)
            ON CONFLICT (id) DO UPDATE SET host = excluded.host, pid = excluded.pid, seen_at = excluded.seen_at,
              leases = excluded.leases, destinations = excluded.destinations
            """,
            [worker.id, worker.host, worker.pid, worker.leases, json.dumps(list(worker.destinations))],
        )

    async def dismiss_worker(self, worker_id: str) -> None:
        await self.execute(
            "WITH p AS (DELETE FROM places WHERE worker = $1) DELETE FROM workers WHERE id = $1", [worker_id]
        )

    # -- sessions ------------------------------------------------------------------------------

    async def begin_session(self, session: StoredSession, seconds: float, at_most: int = 1000) -> None:
        kept = [session.hash, clean_text(session.actor), session.role, session.proof]
        await self.execute(_BEGIN, [*kept, seconds, at_most - 1, session.account])

    async def get_session(self, hash: bytes) -> StoredSession | None:
        found = await self.rows(_GET, [hash])
        return StoredSession(*found[0]) if found else None

    async def end_session(self, hash: bytes) -> None:
        await self.execute("DELETE FROM sessions WHERE hash = $1", [hash])

    async def take_link(self, hash: bytes, seconds: float) -> bool:
        return bool(await self.rows(_TAKE_LINK, [hash, seconds]))

    async def note_token_use(self, name: str) -> None:
        await self.execute(_NOTE_USE, [clean_text(name), TOKEN_USE_SECONDS])

    async def inbox_number(self) -> int:
        return int((await self.rows("SELECT value FROM marks WHERE name = 'inbox'"))[0][0])

    # -- doctor --------------------------------------------------------------------------------

    async def check(self) -> list[Check]:
        """Check the conservation laws over one snapshot, and what the server promises."""
        async with self.snapshot(math.inf) as connection:
            await connection.execute("SELECT set_config('statement_timeout', '0', true)")
            return [
                _way(connection),
                await _durability(connection),
                await _dedup_index(connection, self.database),
                *conservation(await _tally(connection)),
                await _copies(connection),
                await _references(connection),
                *encryption(await fetch_all(connection, _KEY_IDS), self.cipher),
                await _audit_chain(connection),
            ]

    async def size(self) -> int:
        found = await self.rows(
            """
            SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE n.nspname = $1 AND c.relkind IN ('r', 'S')
            """,
            [self.database.schema],
        )
        return int(found[0][0])


def _event_values(event: ArchivedEvent) -> list[Any]:
    """Return the columns of an archived event after its id."""
    texts = [clean_text(event.type), event.key, event.subject, event.received_at, event.event_at]
    hashes = [Id(event.body_hash), None if event.key_hash is None else Id(event.key_hash)]
    ranks = [event.marks, event.rank, event.rank_scope]
    return [event.source, *texts, *ranks, *hashes, event.head, event.body, event.account]


def _delivery_values(one: ArchivedDelivery) -> list[Any]:
    """Return the columns of an archived delivery after its ids."""
    kept = [None if one.subject_key is None else Id(one.subject_key), one.seq, one.status, one.note, one.run]
    last = [one.category, one.last_status, one.last_error, one.reason, one.fair]
    return [*kept, one.attempts, one.options, one.settled_at, *last]


async def _tally(connection: Connection) -> Tally:
    counted = await fetch_all(
        connection, "SELECT source_id, destination_id, what, sum(n)::bigint FROM counters GROUP BY 1, 2, 3"
    )
    events = await fetch_all(connection, "SELECT source_id, count(*) FROM events GROUP BY 1")
    statuses = await fetch_all(connection, "SELECT destination_id, status, count(*) FROM deliveries GROUP BY 1, 2")
    (bad_keys,) = await fetch_one(connection, _BAD_KEYS)
    # A head with a dead delivery is held. One without a delivery is looked up by the next lease.
    lone, misplaced = await fetch_one(
        connection,
        """
        SELECT coalesce(sum(p.n) FILTER (WHERE h.subject_key IS NULL), 0)::bigint,
          count(*) FILTER (WHERE h.delivery_id IS NOT NULL
            AND (h.seq IS DISTINCT FROM h.own_seq OR p.first < h.seq OR NOT h.is_pending AND h.due_at < 'infinity'))
        FROM (
          SELECT coalesce(subject_key, id) AS queue_key, count(*) AS n, min(seq) AS first
          FROM deliveries WHERE status = 'pending' GROUP BY 1
        ) p
        FULL JOIN (
          SELECT h.subject_key, h.delivery_id, h.due_at, h.seq, d.seq AS own_seq, d.status = 'pending' AS is_pending
          FROM heads h LEFT JOIN deliveries d ON d.id = h.delivery_id
        ) h ON h.subject_key = p.queue_key
        """,
    )
    counts = {(destination_id, status): n for destination_id, status, n in statuses}
    return Tally(counted, dict(events), counts, bad_keys, lone, misplaced)


async def _audit_chain(connection: Connection) -> Check:
    ends = Ends(*await fetch_one(connection, "SELECT n, hash, pruned, pruned_hash, since FROM audit_chain"))
    entries: list[ChainEntry] = []
    while found := await fetch_all(connection, _CHAINED, [entries[-1].n if entries else ends.before_first, CHAINED]):
        entries += map(ChainEntry._make, found)
    return check_chain(ends, entries)


async def _copies(connection: Connection) -> Check:
    """Check that every arrival is a copy of some key, or an event without key, for sources that have pruned nothing
    yet."""
    (wrong, looked) = await fetch_one(
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
    detail = f"received = copies of keys + events without key, for {count(looked, 'source')} that forgot nothing yet"
    return Check("copies", wrong == 0, detail if wrong == 0 else f"does not hold: {detail}")


async def _references(connection: Connection) -> Check:
    """Check references, for which there are no foreign keys."""
    (deliveries, heads) = await fetch_one(
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
    detail = f"{deliveries:,} pending deliveries without event, {heads:,} split events without their request"
    return Check("references", False, detail, "Keep a copy of the store and open an issue.")


async def _dedup_index(connection: Connection, database: Database) -> Check:
    if await has_dedup_index(connection, database):
        return Check("dedup index", True, "the index that makes keys unique exists and is valid")
    return Check(
        "dedup index",
        False,
        "the index that makes keys unique is missing or invalid",
        "REINDEX INDEX CONCURRENTLY keys_pkey",
    )


def _way(connection: StoreConnection) -> Check:
    if not connection.is_pooled:
        return Check("connection", True, "leads straight to the server; workers are notified of what becomes due")
    return Check(
        "connection", True, "leads through a pooler: settings in every transaction, workers look once a second"
    )


async def _durability(connection: Connection) -> Check:
    committed, synced, whole = await fetch_one(
        connection,
        "SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes')",
    )
    safe = committed in ("on", "remote_write", "remote_apply") and synced == "on" and whole == "on"
    detail = f"synchronous_commit = {committed}, fsync = {synced}, full_page_writes = {whole}"
    return Check("durability", safe, detail, "" if safe else "Set all three to on.")
