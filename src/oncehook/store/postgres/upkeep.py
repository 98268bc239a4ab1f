"""Housekeeping on PostgreSQL: what has outlived its time, old counters, workers, watermarks.

Called by the sweep, by any process at any time; whoever comes second finds less to do. Only pruning takes more than a
statement, because it must not meet a replay that is being made (`Reader.prudent`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from oncehook.model import Pruned, StoredSession, StoredWorker
from oncehook.store.base import TOKEN_USE_SECONDS
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.connection import Connection, Floats, Id, Ids, Integers, Place, one, rows, storable
from oncehook.store.postgres.read import LAST_OF, PRUNING, Reader

# `$6`: how many may be left beside the new one.
_BEGIN: Final = """
WITH old AS (
  DELETE FROM sessions WHERE hash IN (SELECT hash FROM sessions ORDER BY begun_at DESC OFFSET $6::bigint)
)
INSERT INTO sessions (hash, actor, role, proof, begun_at, ends_at)
VALUES ($1, $2, $3, $4, now(), now() + make_interval(secs => $5::float8))
"""
_GET: Final = "SELECT hash, actor, role, proof FROM sessions WHERE hash = $1 AND ends_at > now()"
_NOTE_USE: Final = """
INSERT INTO token_uses AS t (name, used_at) VALUES ($1, now())
ON CONFLICT (name) DO UPDATE SET used_at = now() WHERE t.used_at <= now() - make_interval(secs => $2::float8)
"""


class Sessions(Reader):
    """Who has come in."""

    async def begin_session(self, session: StoredSession, seconds: float, at_most: int = 1000) -> None:
        kept = [session.hash, storable(session.actor), session.role, session.proof]
        await self.execute(_BEGIN, [*kept, seconds, at_most - 1])

    async def get_session(self, hash: bytes) -> StoredSession | None:
        found = await self.rows(_GET, [hash])
        return StoredSession(*found[0]) if found else None

    async def end_session(self, hash: bytes) -> None:
        await self.execute("DELETE FROM sessions WHERE hash = $1", [hash])

    async def note_token_use(self, name: str) -> None:
        await self.execute(_NOTE_USE, [storable(name), TOKEN_USE_SECONDS])

    async def token_uses(self) -> dict[str, datetime]:
        return dict(await self.rows("SELECT name, used_at FROM token_uses"))

    async def inbox_number(self) -> int:
        return int((await self.rows("SELECT value FROM marks WHERE name = 'inbox'"))[0][0])


LOOKED_AT: Final = 5000
"""Split requests that one batch looks at."""

FIRST: Final = bytes(16)

# `$1`, `$2`: seconds per source, `$3` for the others; `$4`, `$5`: where each source was left; `$6`: how many.
# Bounds on ids narrow the search, received_at decides; see ID_SINCE.
_PRUNE: Final = (
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
    ORDER BY e.id LIMIT $6
  ) v LIMIT $6
), d AS (
  DELETE FROM deliveries d USING v e WHERE d.id > e.id AND d.id <= """
    + LAST_OF
    + """ RETURNING d.id, d.destination_id, d.status
), a AS (
  DELETE FROM attempts a USING d WHERE a.delivery_id = d.id
), r AS (
  DELETE FROM arrivals r USING v WHERE r.event_id = v.id
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

# Copies that came when the event had gone already go with the key that made them copies.
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

# Split requests that no event and no later arrival names any more. `$1`: where the last look ended.
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

# `$1`: seconds after which nothing of it is kept any more, `$2`: how many of each.
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
), p AS (
  DELETE FROM proofs WHERE hash IN (
    SELECT hash FROM proofs WHERE expires_at < now() ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED) RETURNING 1
)
SELECT (SELECT count(*) FROM k) + (SELECT count(*) FROM r) + (SELECT count(*) FROM s) + (SELECT count(*) FROM p)
"""

# Lines go from the front, until one is younger; `audit_delete` lets go of what this has marked as pruned.
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
    AND NOT (slot = 0 AND minute = date_trunc('day', minute))
  RETURNING *
), c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('day', minute), 0, source_id, destination_id, what, sum(n) FROM d GROUP BY 1, 3, 4, 5
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
SELECT count(*) FROM d
"""

# Fences that the original gave out after the backup was made are lower than any from here on.
_VOID: Final = """
WITH s AS MATERIALIZED (
  SELECT setval('fences', nextval('fences') + 1000000)
), u AS (
  UPDATE heads SET leased = false, alone = false, upto = 0, carries = NULL, fence = nextval('fences'), due_at = now(),
    attempts = attempts - 1
  WHERE leased AND (SELECT count(*) FROM s) > 0 RETURNING 1
), e AS (
  DELETE FROM sessions
)
SELECT (SELECT count(*) FROM s), count(*) FROM u
"""


class Sweep(Reader):
    """Looks after the store."""

    def __init__(self, here: Place, cipher: Cipher) -> None:
        super().__init__(here, cipher)
        self._pruned_to: dict[int, bytes] = {}
        """Where each source was left: what stays is passed once, not with every batch."""
        self._batches_to = FIRST

    async def prune(self, keep_events: Mapping[int, float], otherwise: float, limit: int = 500) -> Pruned:
        spans = [otherwise, *keep_events.values()]
        async with self.prudent(PRUNING) as connection:
            events = await self._prune_events(connection, keep_events, otherwise, limit)
            batches = await self._prune_batches(connection, min(spans))
            (keys,) = await one(connection, _PRUNE_KEYS, [limit])
            # Not with every batch: nothing there has an index by age.
            others = 0 if events or keys else await self._prune_others(connection, max(spans), limit)
        return Pruned(events, keys, batches, others)

    async def _prune_events(
        self, connection: Connection, keep_events: Mapping[int, float], otherwise: float, limit: int
    ) -> int:
        left = self._pruned_to
        wanted = [Integers(list(keep_events)), Floats(list(keep_events.values())), otherwise]
        gone = await rows(connection, _PRUNE, [*wanted, Integers(list(left)), Ids(list(left.values())), limit])
        if not gone:
            left.clear()
        for event_id, source_id in gone:
            left[source_id] = max(left.get(source_id, FIRST), event_id)
        return len(gone)

    async def _prune_batches(self, connection: Connection, age: float) -> int:
        gone, looked, last = await one(connection, _PRUNE_BATCHES, [Id(self._batches_to), age, LOOKED_AT])
        self._batches_to = last if looked == LOOKED_AT else FIRST
        return int(gone)

    async def _prune_others(self, connection: Connection, age: float, limit: int) -> int:
        (others,) = await one(connection, _PRUNE_OTHERS, [age, limit])
        await connection.execute(_MARK_AUDIT, [age, limit])
        return int(others) + (await connection.execute(_PRUNE_AUDIT)).rowcount

    async def roll_up(self) -> int:
        return int((await self.rows(_ROLL_UP))[0][0])

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
        ended = int((await self.rows(_VOID))[0][1])
        self.made_due()
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
        await self.execute("DELETE FROM workers WHERE id = $1", [worker_id])
