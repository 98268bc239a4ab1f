"""Deliveries, attempts and lists of events, as they are shown.

Filters go in, pages come out, newest first. A list looks at a bounded number of rows, in the order of the index that
serves it best, and then says how far it came. `PostgresStore` hands the questions of its readers to this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from oncehook.model import (
    AttemptOutcome,
    Category,
    Cause,
    Clause,
    DeliveryId,
    DeliveryStatus,
    EventId,
    Evidence,
    Filter,
    Id,
    ListedDelivery,
    ListedEvent,
    Mark,
    Page,
    ReplayId,
    StoredAttempt,
    StoredDelivery,
)
from oncehook.store.postgres.look import Reader
from oncehook.store.postgres.matching import (
    ATTEMPTS,
    ID_SINCE,
    ID_UNTIL,
    IN_DELIVERY,
    IN_EVENT,
    IS_ENCRYPTED,
    LAST_OF,
    MATCHES,
    OF_DELIVERY,
    OF_EVENT,
    STATUS,
    TOGETHER,
    asked,
    means_nothing,
    parameters_without_body,
    saying,
)
from oncehook.store.postgres.opening import rows
from oncehook.store.postgres.wire import Connection, Ids, Texts, storable

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
  AND ($1::uuid[] IS NULL OR e.id IN (SELECT (left(i::text, 30) || '000000')::uuid FROM unnest($1) i))"""
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

_GET: Final = COLUMNS + "FROM deliveries d" + TOGETHER + "WHERE d.id = $1"

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
        found = await self.rows(_GET, [Id(delivery_id)])
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
            StoredAttempt(
                DeliveryId(delivery_id),
                *(fence, run, n, started_at, ended_at, AttemptOutcome(outcome), category and Category(category)),
                Evidence(*evidence),
            )
            for delivery_id, fence, run, n, started_at, ended_at, outcome, category, *evidence in found
        ]
        return [self.cipher.read_attempt(one) for one in kept]

    async def subject_of(self, delivery_id: bytes, around: int = 10) -> list[StoredDelivery]:
        async with self.connection() as connection:
            found = await rows(connection, _GET, [Id(delivery_id)])
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
        return [
            Cause(destination, cause, count, first_at, last_at, DeliveryId(sample))
            for destination, cause, count, first_at, last_at, sample in found
        ]


# Candidates are found by the subject's index, on both sides; their order is that of commit, which a replay changes.
_NEIGHBOURS: Final = (
    COLUMNS
    + """
FROM deliveries o JOIN events oe ON oe.id = o.event_id CROSS JOIN LATERAL (
  (SELECT e.id FROM events e WHERE e.subject = oe.subject AND e.id <= $2 ORDER BY e.id DESC LIMIT $3)
  UNION ALL
  (SELECT e.id FROM events e WHERE e.subject = oe.subject AND e.id > $2 ORDER BY e.id LIMIT $3)
) n JOIN deliveries d ON d.event_id = n.id
  AND d.id = (left(n.id::text, 30) || right(o.id::text, 6))::uuid
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
        for event_id, one, name, status, note, run, replay_id in await rows(
            connection, _DELIVERIES_OF, [Ids(list(became))]
        ):
            listed = ListedDelivery(
                DeliveryId(one), name, DeliveryStatus(status), note, run, replay_id and ReplayId(replay_id)
            )
            became[event_id].append(listed)
    return [ListedEvent(*(EventId(row[0]), *row[1:7], Mark(row[7]), row[8], row[9], became[row[0]])) for row in found]


def delivery(row: Sequence[Any]) -> StoredDelivery:
    """A row of COLUMNS as it is shown."""
    fields = list(row)
    fields[0], fields[1] = DeliveryId(row[0]), EventId(row[1])
    fields[7], fields[11] = DeliveryStatus(row[7]), row[11] and Category(row[11])
    fields[18], fields[20] = row[18] and ReplayId(row[18]), row[20] and DeliveryId(row[20])
    return StoredDelivery(*fields)
