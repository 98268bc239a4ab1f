"""What people do to deliveries and destinations: retry now, discard, pause, resume; each leaves its line in the audit.

Each is one statement, or a transaction of few where a filter is looked up first. `PostgresStore` hands its acts on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from oncehook.errors import NotFound, NotWaiting, PlanChanged
from oncehook.model import DeliveryId, Filter, Id, PlanSnapshot, new_id
from oncehook.store.audit import changed_settings
from oncehook.store.postgres.look import REPLAYING, Reader
from oncehook.store.postgres.matching import MATCHES, TOGETHER, means_nothing, parameters
from oncehook.store.postgres.opening import one, rows
from oncehook.store.postgres.settle import PAUSE
from oncehook.store.postgres.wire import Ids, storable

AUDIT: Final = "INSERT INTO audit (at, actor, act, target, detail) VALUES (now(), $1, $2, $3, $4)"

_RETRY: Final = """
WITH u AS (
  UPDATE heads h SET due_at = now() FROM deliveries d
  WHERE d.id = $1 AND d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id) AND h.delivery_id = d.id
    AND NOT h.leased
  RETURNING 1
), a AS (
  INSERT INTO audit (at, actor, act, target, detail) SELECT now(), $2, 'retry', $3, '{}' FROM u
)
SELECT (SELECT count(*) FROM u), (SELECT count(*) FROM deliveries WHERE id = $1)
"""

_DEAD: Final = (
    "SELECT d.id FROM deliveries d" + TOGETHER + "WHERE d.status <> 'done' AND d.status = 'dead' AND " + MATCHES
)

# Only dead rows are locked before their heads, which no settle touches: no deadlock.
_DISCARD: Final = """
WITH i AS MATERIALIZED (
  SELECT d.id, d.destination_id, coalesce(d.subject_key, d.id) AS line FROM deliveries d
  WHERE d.id = ANY($1) AND d.status = 'dead' AND ($3::timestamptz IS NULL OR d.settled_at <= $3)
  ORDER BY d.id FOR UPDATE
), u AS (
  UPDATE deliveries d SET status = 'discarded', reason = $2, settled_at = now() FROM i WHERE d.id = i.id
), c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), (-1 - pg_backend_pid() % 32000)::smallint, 0, i.destination_id, w.what,
    w.sign * count(*)
  FROM i, (VALUES ('dead', -1), ('discarded', 1)) AS w(what, sign) GROUP BY i.destination_id, w.what, w.sign
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
SELECT id, line FROM i
"""
# A dead letter that is still the head of its subject is held: when it is closed, the line goes on as after a settle.
_HELD: Final = """
SELECT subject_key FROM heads WHERE subject_key = ANY($1::uuid[]) AND delivery_id = ANY($2::uuid[])
ORDER BY subject_key FOR UPDATE
"""
GO_ON: Final = "SELECT go_on($1)"

# Sorted, as intake locks them; what has lapsed is taken over, what stands is left alone.
_REMEMBER: Final = """
WITH k AS (
  INSERT INTO keys AS k (hash, event_id, body_hash, source_id, copies, first_seen, last_seen, expires_at)
  SELECT hash, event_id, '00000000-0000-0000-0000-000000000000', $3, 0, now(), now(), now() + make_interval(secs => $4)
  FROM unnest($1::uuid[], $2::uuid[]) AS i(hash, event_id) ORDER BY hash
  ON CONFLICT (hash) DO UPDATE SET event_id = excluded.event_id, body_hash = excluded.body_hash,
    source_id = excluded.source_id, copies = 0, first_seen = now(), last_seen = now(), expires_at = excluded.expires_at
  WHERE k.expires_at <= now()
  RETURNING 1
), a AS (
  INSERT INTO audit (at, actor, act, target, detail)
  SELECT now(), $5, 'import', (SELECT name FROM sources WHERE id = $3),
    json_build_object('keys', cardinality($1::uuid[]), 'new', (SELECT count(*) FROM k))::text
)
SELECT count(*) FROM k
"""

_RESUME: Final = """
WITH s AS (
  UPDATE destination_state SET paused_at = NULL, paused_by = NULL, paused_why = NULL, failures = 0, last_failed = NULL,
    open_until = NULL
  WHERE destination_id = $1 RETURNING 1
)
INSERT INTO audit (at, actor, act, target, detail)
SELECT now(), $2, 'resume', coalesce((SELECT name FROM destinations WHERE id = $1), $1::text), '{}'
"""

_PLACE: Final = "INSERT INTO settings_seen (place, digests) VALUES ($1, '') ON CONFLICT DO NOTHING"


class Acts(Reader):
    """Does what people ask for."""

    async def retry_now(self, delivery_id: bytes, actor: str) -> None:
        target = str(DeliveryId(delivery_id))
        async with self.connection() as connection:
            made_due, known = await one(connection, _RETRY, [Id(delivery_id), actor, target])
        if not known:
            raise NotFound(f"There is no delivery {target}.")
        if not made_due:
            raise NotWaiting("This delivery does not wait for its next attempt.")
        self.made_due()

    async def discard(self, filter: Filter, actor: str, reason: str, seen: PlanSnapshot | None = None) -> int:
        if means_nothing(filter):
            return 0
        by = None if seen is None else seen.at
        async with self.prudent(REPLAYING) as connection:
            meant = [row[0] for row in await rows(connection, _DEAD, await parameters(connection, filter, self.cipher))]
            if not meant:
                return 0
            closed = await rows(connection, _DISCARD, [Ids(meant), storable(reason), by])
            if seen is not None and len(closed) > seen.count:
                raise PlanChanged(f"The plan said {seen.count}, now it would be {len(closed)}.")
            if not closed:
                return 0
            ids, lines = zip(*closed, strict=True)
            if held := await rows(connection, _HELD, [Ids(lines), Ids(ids)]):
                await connection.execute(GO_ON, [Ids([line for (line,) in held])])
            target = str(DeliveryId(ids[0])) if len(ids) == 1 else f"{len(ids)} deliveries"
            await connection.execute(AUDIT, [actor, "discard", target, said({"count": len(ids), "reason": reason})])
        self.made_due()
        return len(closed)

    async def pause(self, destination_id: int, actor: str, why: str) -> None:
        await self.execute(PAUSE, [destination_id, actor, storable(why), said({"reason": why})])

    async def resume(self, destination_id: int, actor: str) -> None:
        await self.execute(_RESUME, [destination_id, actor])
        self.made_due()

    async def import_keys(self, source_id: int, hashes: Sequence[bytes], keep: float, actor: str) -> int:
        meant = list(dict.fromkeys(hashes))  # one statement may touch a row once
        asked = [Ids(meant), Ids([new_id() for _ in meant]), source_id, keep, storable(actor)]
        async with self.connection() as connection:
            (added,) = await one(connection, _REMEMBER, asked)
        return int(added)

    async def audit(self, actor: str, act: str, target: str, detail: Mapping[str, object]) -> None:
        await self.execute(AUDIT, [storable(actor), storable(act), storable(target), said(detail)])

    async def note_settings(self, place: str, digests: Mapping[str, str]) -> None:
        async with self.connection() as connection, connection.transaction():
            # Of two processes of a place that start together, the second compares with the first.
            here = storable(place)
            await connection.execute(_PLACE, [here])
            [(seen,)] = await rows(connection, "SELECT digests FROM settings_seen WHERE place = $1 FOR UPDATE", [here])
            await connection.execute("UPDATE settings_seen SET digests = $2 WHERE place = $1", [here, said(digests)])
            changes = changed_settings(json.loads(seen), digests) if seen else {}
            if changes:
                await connection.execute(AUDIT, ["oncehook", "settings", here, said(changes)])


def said(detail: Mapping[str, object]) -> str:
    """A detail as it is kept; JSON escapes what PostgreSQL does not take as text."""
    return json.dumps(detail, default=str)
