"""Numbers and short lists for people: how destinations stand, what was counted, who works, what was done.

`PostgresStore` hands these questions of its readers to this. Levels are sums of the counters' signed changes (R68).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import datetime
from typing import Final

from oncehook.model import Audited, DeliveryStatus, Level, StoredWorker
from oncehook.store.postgres.look import Reader
from oncehook.store.postgres.matching import STATUS
from oncehook.store.postgres.opening import rows
from oncehook.store.postgres.wire import Texts, storable

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
