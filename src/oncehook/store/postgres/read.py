"""Reads on PostgreSQL: the deliveries and events of a filter, lists of them, single rows, and counts.

A filter is constant text and parameters (R76), planned each time with the actual values, so that unused conditions
vanish. A list reads a bounded number of rows, in the order of the best index, and returns how far it came. Conditions
on bodies are separate: merely naming their function would forbid parallel plans.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from oncehook.errors import QueryTooWide, Undecryptable
from oncehook.model import (
    MARKS,
    ArrivalId,
    AttemptOutcome,
    Audited,
    Category,
    Cause,
    ChartMark,
    Clause,
    DeliveryId,
    DeliveryStatus,
    EventDetails,
    EventId,
    Evidence,
    Figures,
    Filter,
    Id,
    Level,
    ListedDelivery,
    ListedEvent,
    Outcome,
    Page,
    Rejection,
    ReplayId,
    StoredArrival,
    StoredAttempt,
    StoredDelivery,
    StoredMedia,
    StoredWorker,
    Total,
    count_hours,
    says,
)
from oncehook.store.base import MOST_DECRYPTED, MOST_DECRYPTED_BYTES, Series
from oncehook.store.cipher import Cipher
from oncehook.store.filters import (
    ATTEMPTS,
    LOOKED_AT,
    LOOKED_INTO,
    MOST_COUNTED,
    STATUS,
    TYPES,
    UNFINISHED,
    Dialect,
    escape_like,
    merge_pages,
)
from oncehook.store.postgres.connection import Blobs, Connection, Ids, Integers, StorePart, Texts, clean_text, fetch_all
from oncehook.store.postgres.intake import DETAIL_COLUMNS, read_details

# -- filters -------------------------------------------------------------------------------------

_NAMED: Final = re.compile(r"(?<!:):([a-z_]+)")
_TYPES: Final = {
    **TYPES,
    **dict.fromkeys(("before", "after", "replay"), "uuid"),
    **dict.fromkeys(("looked_at", "looked_into", "limit"), "bigint"),
    "matching": "uuid[]",
    "force": "boolean",
}


class Statement:
    """A statement with named parameters, of which the driver gets those it uses, by number and with their types."""

    __slots__ = ("TEXT", "names")

    def __init__(self, text: str) -> None:
        self.names = list(dict.fromkeys(_NAMED.findall(text)))
        self.TEXT = _NAMED.sub(lambda found: f"${self.names.index(found[1]) + 1}::{_TYPES[found[1]]}", text)

    def parameters(self, values: Mapping[str, object]) -> list[object]:
        return [values[name] for name in self.names]


async def select(connection: Connection, named: Statement, values: Mapping[str, object]) -> list[Any]:
    return await fetch_all(connection, named.TEXT, named.parameters(values))


# An id's own time may differ from its event's received_at, by an hour at most: bounds on ids narrow the search,
# received_at decides. The offset of the store's clock from the server's is subtracted (0 outside tests).
ID_SINCE: Final = """
(lpad(to_hex((extract(epoch FROM greatest(:since - (now() - transaction_timestamp()) - interval '1 hour',
  'epoch')) * 1000)::bigint), 12, '0') || '00000000000000000000')::uuid
"""
ID_UNTIL: Final = """
(lpad(to_hex((extract(epoch FROM greatest(:until + interval '1 hour', 'epoch')) * 1000)::bigint), 12, '0')
  || 'ffffffffffffffffffff')::uuid
"""
# The ids of an event's deliveries are one range: the destination's id is in the last three bytes.
LAST_OF: Final = "(left(e.id::text, 30) || 'ffffff')::uuid"


def _encode_list(values: Sequence[Any]) -> object:
    if isinstance(values[0], bytes):
        return Ids(values)
    return Integers(values) if isinstance(values[0], int) else Texts(values)


_TIMES_ARRIVED: Final = "coalesce((SELECT k.copies FROM keys k WHERE k.hash = e.key_hash AND k.event_id = e.id), 1)"
_SQL: Final = Dialect(
    {
        "ids": "d.id = ANY(:ids)",
        "sources": "e.source_id = ANY(:sources)",
        "destinations": "d.destination_id = ANY(:destinations)",
        "accounts": "e.account = ANY(:accounts)",
        "type": "e.type LIKE :type ESCAPE '!'",
        "arrivals_above": _TIMES_ARRIVED + " > :arrivals_above",
        "arrivals_below": _TIMES_ARRIVED + " < :arrivals_below",
        "outcome": "EXISTS (SELECT 1 FROM arrivals a WHERE a.event_id = e.id AND a.outcome = :outcome)",
    },
    "ILIKE :text ESCAPE '!'",
    ("unnest(", ") n(value)"),
    negated_words={"ids": "d.id = n.value"},
    encode_id=Id,
    encode_text=clean_text,
    encode_type=lambda pattern: escape_like(clean_text(pattern)).replace("*", "%").replace("?", "_"),
    encode_time=lambda moment: moment,
    encode_list=_encode_list,
    encode_accounts=lambda accounts: Texts(accounts or [""]),  # an empty array would become NULL
)
MATCHES: Final = _SQL.MATCHES + " AND " + _SQL.NOT_OF_EVENT + " AND " + _SQL.NOT_OF_DELIVERY + " "
"""Conditions on deliveries, where `d`, `e`, `s`, `t` and `h` are joined (TOGETHER)."""

TOGETHER: Final = """
JOIN events e ON e.id = d.event_id JOIN sources s ON s.id = e.source_id JOIN destinations t ON t.id = d.destination_id
LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id)
"""

_IS_ENCRYPTED: Final = "substring(e.body FROM 1 FOR 5) = '\\xff4f484501'::bytea"
_ENCRYPTED_BODIES: Final = "FROM deliveries d" + TOGETHER + "WHERE " + MATCHES + "AND " + _IS_ENCRYPTED
_ENCRYPTED_SIZE: Final = Statement(
    "SELECT count(*), coalesce(sum(size), 0)::bigint"
    " FROM (SELECT length(e.body) AS size " + _ENCRYPTED_BODIES + " LIMIT :limit) e"
)
_NEXT_ENCRYPTED: Final = Statement(
    "SELECT d.id, e.id, e.body " + _ENCRYPTED_BODIES + " AND d.id > :after ORDER BY d.id LIMIT :limit"
)
_AT_ONCE: Final = 500
"""Encrypted bodies that are fetched at once."""

_MATCHING_BODY: Final = Statement(
    "SELECT d.id FROM deliveries d" + TOGETHER + "WHERE " + MATCHES + "AND CASE WHEN " + _IS_ENCRYPTED + " THEN false"
    " ELSE body_says(e.body, :clauses) END"
)
_NOBODY: Final = bytes(16)
"""No delivery has this id. An empty array would be sent as NULL, and mean all."""


def selects_nothing(filter: Filter) -> bool:
    """Tell whether a filter has an empty list of ids."""
    return filter.ids is not None and not any(filter.ids)


_MATCHING: Final = Statement("SELECT d.id FROM deliveries d" + TOGETHER + "WHERE " + MATCHES)


async def read_values(connection: Connection, filter: Filter, cipher: Cipher) -> dict[str, Any]:
    """Return the values of a filter, with bodies and alternatives resolved to ids. Raises QueryTooWide."""
    alternatives = filter.alternatives()
    if len(alternatives) == 1:
        return await _read_alternative(connection, alternatives[0], cipher)
    found: set[bytes] = set()
    for one in alternatives:
        if not selects_nothing(one):
            values = await _read_alternative(connection, one, cipher)
            found.update(row[0] for row in await select(connection, _MATCHING, values))
    return await values_without_body(connection, Filter()) | {"ids": Ids(sorted(found) or [_NOBODY])}


async def _read_alternative(connection: Connection, filter: Filter, cipher: Cipher) -> dict[str, Any]:
    values = await values_without_body(connection, filter)
    if filter.body is None:
        return values
    found = [row[0] for row in await select(connection, _MATCHING_BODY, values)]
    if cipher.has_keys:
        found += await _match_encrypted(connection, values, filter.body, cipher)
    return values | {"ids": Ids(found or [_NOBODY])}


async def _match_encrypted(
    connection: Connection, values: Mapping[str, object], clauses: Sequence[Clause], cipher: Cipher
) -> list[bytes]:
    """Return the deliveries whose encrypted bodies match. Raises QueryTooWide."""
    [(count, size)] = await select(connection, _ENCRYPTED_SIZE, {**values, "limit": MOST_DECRYPTED + 1})
    if count > MOST_DECRYPTED or size > MOST_DECRYPTED_BYTES:
        raise QueryTooWide
    matching: list[bytes] = []
    last = _NOBODY
    while found := await select(connection, _NEXT_ENCRYPTED, {**values, "after": Id(last), "limit": _AT_ONCE}):
        events = set(await _match_bodies([row[1:] for row in found], clauses, cipher))
        matching += [row[0] for row in found if row[1] in events]
        last = found[-1][0]
    return matching


async def _match_bodies(found: Sequence[Sequence[Any]], clauses: Sequence[Clause], cipher: Cipher) -> list[bytes]:
    """Return those ids whose body matches, out of pairs of ids and encrypted bodies."""

    def read() -> list[bytes]:
        return [id_ for id_, body in found if _matches(id_, body, clauses, cipher)]

    return await asyncio.to_thread(read) if found else []


def _matches(event_id: bytes, body: bytes, clauses: Sequence[Clause], cipher: Cipher) -> bool:
    try:
        return says(cipher.decrypt(body, "body", event_id), clauses)
    except Undecryptable:
        return False


async def values_without_body(connection: Connection, filter: Filter) -> dict[str, Any]:
    """Return the values of a filter. Names become ids, so that the plan fits them; an unknown name selects nothing."""
    values = await _single_values(connection, filter)
    excluded = [
        await _single_values(connection, one) | {"ids": one.ids and Id(one.ids[0])} for one in filter.without or ()
    ]
    return values | _SQL.exclude(excluded)


async def _single_values(connection: Connection, filter: Filter) -> dict[str, Any]:
    source_id = await _find_id(connection, "SELECT id FROM sources WHERE name = $1", filter.source)
    sources = await _find_ids(connection, "SELECT id FROM sources WHERE name = ANY($1::text[])", filter.sources)
    destination_id = await _find_id(connection, "SELECT id FROM destinations WHERE name = $1", filter.destination)
    destinations = await _find_ids(
        connection, "SELECT id FROM destinations WHERE name = ANY($1::text[])", filter.destinations
    )
    values = _SQL.values(filter, source_id, sources, destination_id, destinations)
    if filter.ids is not None:
        values["ids"] = Ids([one for one in filter.ids if len(one) == 16])
    return values


async def _find_ids(connection: Connection, statement: str, names: Sequence[str] | None) -> Integers | None:
    if names is None:
        return None
    found = await fetch_all(connection, statement, [Texts([clean_text(name) for name in names])])
    return Integers([id_ for (id_,) in found] or [-1])  # an empty array would become NULL


async def _find_id(connection: Connection, statement: str, name: str | None) -> int | None:
    if name is None:
        return None
    found = await fetch_all(connection, statement, [clean_text(name)])
    return found[0][0] if found else -1


# -- ways to deliveries, newest first --------------------------------------------------------------

COLUMNS: Final = (
    ("SELECT d.id, d.event_id, s.name, t.name, e.type, e.key, e.subject, " + STATUS + ", d.note, d.run, " + ATTEMPTS)
    + """, d.category, d.last_status, d.last_error,
  CASE WHEN h.delivery_id = d.id AND h.due_at < 'infinity' THEN h.due_at END,
  e.received_at, d.settled_at, d.last_replay_at, d.replay_id, d.reason,
  CASE WHEN h.delivery_id <> d.id THEN h.delivery_id END, e.account
"""
)

_BOUNDS: Final = (
    "(:before IS NULL OR d.id < :before) AND (:since IS NULL OR d.id >= " + ID_SINCE + ")"
    " AND (:until IS NULL OR d.id <= " + ID_UNTIL + ") AND (:ids IS NULL OR d.id = ANY(:ids))"
)
_EVENT_BOUNDS: Final = (
    "(:before IS NULL OR e.id < :before) AND (:since IS NULL OR e.id >= " + ID_SINCE + ")"
    " AND (:until IS NULL OR e.id <= " + ID_UNTIL + ") AND (:event_id IS NULL OR e.id = :event_id)"
    " AND (:ids IS NULL OR e.id IN (SELECT (left(i::text, 30) || '000000')::uuid FROM unnest(:ids) i))"
)
_ALL: Final = (
    "(SELECT d.* FROM deliveries d WHERE " + _BOUNDS + " AND (:event_id IS NULL OR (d.id > :event_id"
    " AND d.id <= (left(:event_id::text, 30) || 'ffffff')::uuid)) ORDER BY d.id DESC LIMIT :looked_at) d"
)
_UNFINISHED: Final = (
    "(SELECT d.* FROM deliveries d WHERE d.status <> 'done' AND d.status = :status AND " + _BOUNDS + ""
    " ORDER BY d.id DESC LIMIT :looked_at) d"
)
_LEASED: Final = (
    "(SELECT d.* FROM deliveries d WHERE d.id IN (SELECT unnest(ARRAY[h.delivery_id, h.carries]) FROM heads h"
    " WHERE h.leased) AND " + _BOUNDS + " ORDER BY d.id DESC LIMIT :looked_at) d"
)
_EVENTS_OF_SUBJECT: Final = (
    "(SELECT e.* FROM events e WHERE e.subject = :subject AND "
    + _EVENT_BOUNDS
    + " ORDER BY e.id DESC LIMIT :looked_at) e"
)
# Events that came again have arrivals, of which the index on events and slots finds each event once.
_EVENTS_AGAIN: Final = (
    "(SELECT e.* FROM (SELECT DISTINCT a.event_id AS id FROM arrivals a WHERE (:before IS NULL OR a.event_id < :before)"
    " AND (:since IS NULL OR a.event_id >= " + ID_SINCE + ") ORDER BY 1 DESC) a"
    " CROSS JOIN LATERAL (SELECT e.* FROM events e WHERE e.id = a.id LIMIT 1) e WHERE " + _EVENT_BOUNDS + ""
    " ORDER BY a.id DESC LIMIT :looked_at) e"
)
_THEIR_DELIVERIES: Final = (
    " CROSS JOIN LATERAL (SELECT d.* FROM deliveries d WHERE d.id > e.id"
    " AND d.id <= " + LAST_OF + " AND " + _BOUNDS + " OFFSET 0) d) d"
)
_SUBJECT: Final = "(SELECT d.* FROM " + _EVENTS_OF_SUBJECT + _THEIR_DELIVERIES
_EVENTS_OF_ACCOUNT: Final = (
    "(SELECT e.* FROM events e WHERE e.account = :account AND "
    + _EVENT_BOUNDS
    + " ORDER BY e.id DESC LIMIT :looked_at) e"
)
_ACCOUNT: Final = "(SELECT d.* FROM " + _EVENTS_OF_ACCOUNT + _THEIR_DELIVERIES

# Tables beside a delivery are looked up row by row, so that rows keep their order and a full page ends the search. With
# plain joins, all candidate rows would be joined and sorted first.
_BESIDE: Final = """
CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.id = d.event_id LIMIT 1) e
CROSS JOIN LATERAL (SELECT * FROM sources s WHERE s.id = e.source_id LIMIT 1) s
CROSS JOIN LATERAL (SELECT * FROM destinations t WHERE t.id = d.destination_id LIMIT 1) t
LEFT JOIN LATERAL (
  SELECT * FROM heads h WHERE d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id) LIMIT 1
) h ON true
WHERE """
_WITH_BODY: Final = (
    "AND CASE WHEN " + _IS_ENCRYPTED + " THEN e.id = ANY(:matching) ELSE body_says(e.body, :clauses) END"
)
# The encrypted bodies of a page, which only Python can read.
_WITH_ENCRYPTED_BODY: Final = " AND " + _IS_ENCRYPTED + " LIMIT :looked_at"
# The last row that a page without enough matches looked at, if it looked at as many as it may.
_LAST_LOOKED: Final = " ORDER BY 1 DESC OFFSET :looked_at - 1 LIMIT 1"
# The number of rows of a page, and how many of them fit into the total size of bodies that it may search.
_WEIGH: Final = """
SELECT count(*), count(*) FILTER (WHERE upto <= :looked_into)
FROM (SELECT sum(length(e.body)) OVER (ORDER BY e.id DESC ROWS UNBOUNDED PRECEDING) AS upto FROM
"""
_ITS_EVENT: Final = " CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.id = d.event_id LIMIT 1) e"
_WEIGHED: Final = ") w"


@dataclass(slots=True, frozen=True)
class Way:
    """The statements of a list that uses one index."""

    LIST: Statement
    LIST_BY_BODY: Statement
    ENCRYPTED: Statement
    FAR: Statement
    """The last row that a page read."""
    WEIGH: Statement
    COUNT: Statement | None = None
    """The events of a list, for their number."""
    COUNT_BY_BODY: Statement | None = None


def _way_to_deliveries(rows: str, events: str | None = None) -> Way:
    """Build the statements of a list of deliveries. `events`: their events, where the index is on events."""
    return Way(
        LIST=Statement(COLUMNS + "FROM " + rows + _BESIDE + MATCHES + "ORDER BY d.id DESC LIMIT :limit"),
        LIST_BY_BODY=Statement(
            COLUMNS + "FROM " + rows + _BESIDE + MATCHES + _WITH_BODY + " ORDER BY d.id DESC LIMIT :limit"
        ),
        ENCRYPTED=Statement("SELECT e.id, e.body FROM " + rows + _BESIDE + MATCHES + _WITH_ENCRYPTED_BODY),
        FAR=Statement(("SELECT e.id FROM " + events if events else "SELECT d.id FROM " + rows) + _LAST_LOOKED),
        WEIGH=Statement(_WEIGH + (events or rows + _ITS_EVENT) + _WEIGHED),
    )


_DELIVERIES: Final = _way_to_deliveries(_ALL)
_DELIVERIES_UNFINISHED: Final = _way_to_deliveries(_UNFINISHED)
_DELIVERIES_LEASED: Final = _way_to_deliveries(_LEASED)
_DELIVERIES_OF_SUBJECT: Final = _way_to_deliveries(_SUBJECT, _EVENTS_OF_SUBJECT)
_DELIVERIES_OF_ACCOUNT: Final = _way_to_deliveries(_ACCOUNT, _EVENTS_OF_ACCOUNT)

_GET_DELIVERY: Final = COLUMNS + "FROM deliveries d" + TOGETHER + "WHERE d.id = $1"

# -- ways to events ------------------------------------------------------------------------------

_LISTED: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks,
  CASE substring(e.body FROM 1 FOR 5) WHEN '\\xff4f484501'::bytea THEN length(e.body) - 49
    WHEN '\\xff4f484502'::bytea THEN
      coalesce(substring(encode(substring(e.body FROM 38), 'escape') FROM '^[0-9]{1,9}$')::integer, 0)
    ELSE length(e.body) END,
  coalesce(k.copies, 1), EXISTS (SELECT FROM arrivals a WHERE a.event_id = e.id AND a.slot >= 20), e.account
FROM
"""
# The text may be in the event, or in the delivery that meets the other conditions on deliveries.
_EVENT_MATCHES: Final = (
    """
CROSS JOIN LATERAL (SELECT * FROM sources s WHERE s.id = e.source_id LIMIT 1) s
LEFT JOIN LATERAL (SELECT * FROM keys k WHERE k.hash = e.key_hash AND k.event_id = e.id LIMIT 1) k ON true
WHERE """
    + (_SQL.OF_EVENT + " AND " + _SQL.NOT_OF_EVENT)
    + (" AND ((:asks_deliveries IS FALSE AND (:text IS NULL OR " + _SQL.EVENT_SAYS + ")")
    # An event without deliveries is not excluded by a condition on deliveries.
    + (" AND (:denies_deliveries IS FALSE OR NOT EXISTS (SELECT FROM deliveries d WHERE d.id > e.id AND d.id <= ")
    + (LAST_OF + "))) OR EXISTS (")
    + """
  SELECT FROM deliveries d JOIN destinations t ON t.id = d.destination_id
  LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id)
  WHERE d.id > e.id AND d.id <= """
    + (LAST_OF + " AND " + _SQL.OF_DELIVERY + " AND " + _SQL.NOT_OF_DELIVERY + " AND " + _SQL.DELIVERY_SAYS + "))")
)
_EVENT_WITH_BODY: Final = (
    " AND CASE WHEN " + _IS_ENCRYPTED + " THEN e.id = ANY(:matching) ELSE body_says(e.body, :clauses) END"
)


def _way_to_events(rows: str, deliveries: str | None = None) -> Way:
    """Build the statements of a list of events. `deliveries`: their deliveries, where the index is on deliveries."""
    return Way(
        LIST=Statement(_LISTED + rows + _EVENT_MATCHES + " ORDER BY e.id DESC LIMIT :limit"),
        LIST_BY_BODY=Statement(_LISTED + rows + _EVENT_MATCHES + _EVENT_WITH_BODY + " ORDER BY e.id DESC LIMIT :limit"),
        COUNT=Statement("SELECT e.id FROM " + rows + _EVENT_MATCHES + " LIMIT :limit"),
        COUNT_BY_BODY=Statement("SELECT e.id FROM " + rows + _EVENT_MATCHES + _EVENT_WITH_BODY + " LIMIT :limit"),
        ENCRYPTED=Statement("SELECT e.id, e.body FROM " + rows + _EVENT_MATCHES + _WITH_ENCRYPTED_BODY),
        FAR=Statement(
            ("SELECT d.event_id FROM " + deliveries if deliveries else "SELECT e.id FROM " + rows) + _LAST_LOOKED
        ),
        WEIGH=Statement(_WEIGH + (deliveries + _ITS_EVENT if deliveries else rows) + _WEIGHED),
    )


_EVENTS: Final = _way_to_events(
    "(SELECT e.* FROM events e WHERE " + _EVENT_BOUNDS + " ORDER BY e.id DESC LIMIT :looked_at) e"
)
_EVENTS_BY_SOURCE: Final = _way_to_events(
    "(SELECT e.* FROM events e WHERE e.source_id = :source_id AND " + _EVENT_BOUNDS + ""
    " ORDER BY e.id DESC LIMIT :looked_at) e"
)
_EVENTS_BY_SUBJECT: Final = _way_to_events(_EVENTS_OF_SUBJECT)
_EVENTS_THAT_CAME_AGAIN: Final = _way_to_events(_EVENTS_AGAIN)
_EVENTS_BY_ACCOUNT: Final = _way_to_events(_EVENTS_OF_ACCOUNT)
_EVENTS_UNFINISHED: Final = _way_to_events(
    "(SELECT e.* FROM events e WHERE e.id IN (SELECT d.event_id FROM " + _UNFINISHED + ")"
    " ORDER BY e.id DESC LIMIT :looked_at) e",
    _UNFINISHED,
)
_EVENTS_LEASED: Final = _way_to_events(
    "(SELECT e.* FROM events e WHERE e.id IN (SELECT d.event_id FROM "
    + _LEASED
    + ") ORDER BY e.id DESC LIMIT :looked_at) e",
    _LEASED,
)
_DELIVERIES_OF_EVENTS: Final = (
    "SELECT e.id, d.id, t.name, " + STATUS + ", d.note, d.run, d.replay_id"
    " FROM unnest($1::uuid[]) AS e(id) JOIN deliveries d ON d.id > e.id AND d.id <= " + LAST_OF + ""
    " JOIN destinations t ON t.id = d.destination_id"
    " LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id) ORDER BY d.id"
)


def way_to_deliveries(filter: Filter) -> Way:
    if filter.ids is not None or filter.event_id is not None:
        return _DELIVERIES
    if filter.subject is not None:
        return _DELIVERIES_OF_SUBJECT
    # An account has few events among many, while the unfinished deliveries of all accounts may be many.
    if filter.account is not None:
        return _DELIVERIES_OF_ACCOUNT
    if filter.status in UNFINISHED:
        return _DELIVERIES_UNFINISHED
    return _DELIVERIES_LEASED if filter.status is DeliveryStatus.leased else _DELIVERIES


def way_to_events(filter: Filter) -> Way:
    if filter.event_id is not None:
        return _EVENTS
    if filter.subject is not None:
        return _EVENTS_BY_SUBJECT
    if filter.account is not None:
        return _EVENTS_BY_ACCOUNT
    if filter.status in UNFINISHED:
        return _EVENTS_UNFINISHED
    if filter.status is DeliveryStatus.leased:
        return _EVENTS_LEASED
    if filter.came_again:
        return _EVENTS_THAT_CAME_AGAIN
    return _EVENTS if filter.source is None else _EVENTS_BY_SOURCE


def read_delivery(row: Sequence[Any]) -> StoredDelivery:
    fields = list(row)
    fields[0], fields[1] = DeliveryId(row[0]), EventId(row[1])
    fields[7], fields[11] = DeliveryStatus(row[7]), row[11] and Category(row[11])
    fields[18], fields[20] = row[18] and ReplayId(row[18]), row[20] and DeliveryId(row[20])
    return StoredDelivery(*fields)


def _names(names: Collection[str] | None) -> Texts | None:
    """Return the parameter for a list of names. None: no condition; an empty list selects nothing."""
    return None if names is None else Texts([clean_text(name) for name in names] or [""])


# -- single rows ---------------------------------------------------------------------------------

_GET_EVENT: Final = (
    "SELECT"
    + DETAIL_COLUMNS
    + """
FROM events e JOIN sources s ON s.id = e.source_id
LEFT JOIN batches b ON b.id = e.batch_id
LEFT JOIN keys k ON k.hash = e.key_hash AND k.event_id = e.id
WHERE e.id = $1
"""
)
_ARRIVALS_OF: Final = """
SELECT a.id, a.event_id, a.outcome, a.at, coalesce(a.head, b.head), a.body, a.batch_id
FROM arrivals a LEFT JOIN batches b ON b.id = a.batch_id WHERE a.event_id = $1 ORDER BY a.at, a.id
"""
_ATTEMPTS: Final = """
SELECT delivery_id, fence, run, n, started_at, ended_at, outcome, category, status, error, answer
FROM attempts WHERE delivery_id = $1 ORDER BY fence
"""
# Candidates come from the subject's index, on both sides; their order is that of commit, which a replay changes.
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
    + (TOGETHER + "WHERE o.id = $1 AND d.subject_key = o.subject_key ORDER BY d.seq")
)

# -- numbers -------------------------------------------------------------------------------------

_CAUSES: Final = """
SELECT t.name, d.cause, count(*), min(coalesce(d.first_at, d.at)), max(d.at), (array_agg(d.id ORDER BY d.id DESC))[1],
  array_agg(least(floor(extract(epoch FROM now() - coalesce(d.first_at, d.at)) / 3600), 24)::bigint)
FROM (
  SELECT d.id, d.destination_id, d.settled_at AS at,
    (SELECT min(a.ended_at) FROM attempts a WHERE a.delivery_id = d.id AND a.outcome = 'dead') AS first_at,
    CASE WHEN d.reason = 'crash' THEN 'crash'
      ELSE coalesce(nullif(split_part(d.last_error, E'\n', 1), ''), 'HTTP ' || d.last_status, 'unknown') END AS cause
  FROM deliveries d
  WHERE d.status <> 'done' AND d.status = 'dead'
    AND ($1::text IS NULL OR d.destination_id = (SELECT id FROM destinations WHERE name = $1))
    AND ($2::text[] IS NULL OR (
      SELECT s.name FROM events e JOIN sources s ON s.id = e.source_id WHERE e.id = d.event_id) = ANY($2))
    AND ($3::text[] IS NULL OR (SELECT e.account FROM events e WHERE e.id = d.event_id) = ANY($3))
  ORDER BY d.id DESC LIMIT 10000
) d JOIN destinations t ON t.id = d.destination_id
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2
"""
_FIGURES: Final = """
SELECT s.name, d.name, c.what, sum(c.n)::bigint FROM counters c
LEFT JOIN sources s ON s.id = c.source_id LEFT JOIN destinations d ON d.id = c.destination_id
WHERE $1::timestamptz IS NULL OR c.minute >= date_trunc('minute', $1) GROUP BY 1, 2, 3
"""
# Levels are sums of the counters' signed changes (R68).
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
  FROM unnest('{0,1,2,3,4}'::smallint[]) AS turns(turn)
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
_STATUS_COUNT: Final = STATUS + ", count(*) FROM "
_ITS_HEAD: Final = " LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id) WHERE "
_COUNT_SINCE: Final = (
    ("SELECT " + _STATUS_COUNT + "events e JOIN deliveries d ON d.event_id = e.id" + _ITS_HEAD)
    + """
e.received_at >= $1 AND e.id >= (lpad(to_hex((extract(epoch FROM greatest(
    $1::timestamptz - (now() - transaction_timestamp()) - interval '1 hour', 'epoch')) * 1000)::bigint), 12, '0')
  || '00000000000000000000')::uuid
GROUP BY 1
"""
)
_COUNT_OF: Final = (
    "SELECT t.name, " + _STATUS_COUNT + "sources s JOIN events e ON e.source_id = s.id"
    " JOIN deliveries d ON d.event_id = e.id JOIN destinations t ON t.id = d.destination_id" + _ITS_HEAD + ""
    "($1::text[] IS NULL OR s.name = ANY($1::text[])) AND ($2::timestamptz IS NULL OR e.received_at >= $2)"
    " AND ($3::text[] IS NULL OR e.account = ANY($3::text[])) GROUP BY 1, 2"
)
# What arrived for some accounts, by source: the counters are not kept by account.
_FIGURES_OF: Final = """
SELECT s.name, count(*), coalesce(sum(k.copies - 1), 0)::bigint, coalesce(sum(r.conflicts), 0)::bigint
FROM events e JOIN sources s ON s.id = e.source_id
LEFT JOIN keys k ON k.hash = e.key_hash AND k.event_id = e.id
LEFT JOIN LATERAL (
  SELECT count(*) AS conflicts FROM arrivals a WHERE k.copies > 1 AND a.event_id = e.id AND a.outcome = 'conflict'
) r ON true
WHERE e.account = ANY($3::text[]) AND ($1::text[] IS NULL OR s.name = ANY($1::text[])) AND e.received_at >= $2
GROUP BY 1
"""
# Levels are no flows: what became done or dead is counted as succeeded or died, too.
_SERIES: Final = """
SELECT what, to_timestamp(floor(extract(epoch FROM minute) / $2::float8) * $2::float8), sum(n)::bigint
FROM counters
WHERE minute >= date_trunc('minute', $1::timestamptz) AND what NOT IN ('pending', 'done', 'dead', 'discarded')
  AND ($3::text IS NULL OR source_id = (SELECT id FROM sources WHERE name = $3))
  AND ($4::text IS NULL OR destination_id = (SELECT id FROM destinations WHERE name = $4))
GROUP BY 1, 2 ORDER BY 1, 2
"""
_OF_SOURCE: Final = "SELECT id FROM events WHERE source_id = (SELECT id FROM sources WHERE name = $1) AND id "
_BEFORE: Final = _OF_SOURCE + "< $2 ORDER BY id DESC LIMIT 1"
_AFTER: Final = _OF_SOURCE + "> $2 ORDER BY id LIMIT 1"
_DESTINATION_SERIES: Final = """
SELECT d.name, c.what, to_timestamp(floor(extract(epoch FROM c.minute) / $2::float8) * $2::float8), sum(c.n)::bigint
FROM counters c JOIN destinations d ON d.id = c.destination_id
WHERE c.minute >= date_trunc('minute', $1::timestamptz) GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""
_AUDIT_LOG: Final = """
SELECT n, at, actor, act, target, detail FROM audit
WHERE ($1::bigint IS NULL OR n < $1) AND ($3::text IS NULL OR actor = $3) ORDER BY n DESC LIMIT $2
"""
_WORKERS: Final = """
SELECT id, host, pid, started_at, seen_at, leases, destinations FROM workers
WHERE seen_at > now() - interval '1 minute' ORDER BY started_at, id
"""
# Rows whose body is a reference to an object. Arrivals have no index by id: they are asked only for what is no event's.
_EVENTS_REFERRING: Final = """
SELECT id, substring(body FROM 1 FOR 5) = '\\xff4f484502'::bytea FROM events WHERE id = ANY($1::uuid[])
UNION ALL SELECT id, substring(body FROM 1 FOR 5) = '\\xff4f484502'::bytea FROM batches WHERE id = ANY($1::uuid[])
"""
_ARRIVALS_REFERRING: Final = """
SELECT id, coalesce(substring(body FROM 1 FOR 5) = '\\xff4f484502'::bytea, false) FROM arrivals
WHERE id = ANY($1::uuid[])
"""
_REFERENCES: Final = """
SELECT id, body FROM (
  SELECT id, body FROM events WHERE id > $1 AND substring(body FROM 1 FOR 5) = '\\xff4f484502'::bytea
  UNION ALL SELECT id, body FROM batches WHERE id > $1 AND substring(body FROM 1 FOR 5) = '\\xff4f484502'::bytea
  UNION ALL SELECT id, body FROM arrivals WHERE id > $1 AND substring(body FROM 1 FOR 5) = '\\xff4f484502'::bytea
) r ORDER BY id LIMIT $2
"""
_MEDIA: Final = "SELECT n, digest, size, type, filename FROM media WHERE event_id = $1 ORDER BY n"
_KEPT_MEDIA: Final = "SELECT DISTINCT digest FROM media WHERE digest = ANY($1::bytea[])"
_REJECTIONS: Final = """
SELECT source, at, code, reason, peer, size, id, head, body, n FROM rejections
WHERE $1::bigint IS NULL OR n < $1 ORDER BY n DESC LIMIT $2
"""


class PostgresRead(StorePart):
    """Events, deliveries, lists and numbers, as they are shown."""

    async def get_event(self, event_id: bytes) -> EventDetails | None:
        found = await self.rows(_GET_EVENT, [Id(event_id)])
        return self.cipher.read_event(read_details(found[0])) if found else None

    async def events_beside(self, event_id: bytes, source: str) -> tuple[EventId | None, EventId | None]:
        asked = [source, Id(event_id)]
        before, after = await self.rows(_BEFORE, asked), await self.rows(_AFTER, asked)
        return EventId(before[0][0]) if before else None, EventId(after[0][0]) if after else None

    async def arrivals_of(self, event_id: bytes) -> list[StoredArrival]:
        found = await self.rows(_ARRIVALS_OF, [Id(event_id)])
        kept = [
            StoredArrival(ArrivalId(id_), EventId(of), Outcome(outcome), at, head, body, batch and ArrivalId(batch))
            for id_, of, outcome, at, head, body, batch in found
        ]
        return [self.cipher.read_arrival(arrival) for arrival in kept]

    async def batch_body(self, batch_id: bytes) -> tuple[bytes, bytes] | None:
        found = await self.rows("SELECT head, body FROM batches WHERE id = $1", [Id(batch_id)])
        return self.cipher.read_batch(batch_id, found[0][0], found[0][1]) if found else None

    async def find_references(self, ids: Sequence[bytes]) -> dict[bytes, bool]:
        found = {bytes(id_): bool(refers) for id_, refers in await self.rows(_EVENTS_REFERRING, [Ids(ids)])}
        left = [id_ for id_ in ids if id_ not in found]
        later = await self.rows(_ARRIVALS_REFERRING, [Ids(left)]) if left else []
        return found | {bytes(id_): bool(refers) for id_, refers in later}

    async def list_references(self, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        found = await self.rows(_REFERENCES, [Id(after or bytes(16)), limit])
        return [(bytes(id_), bytes(body)) for id_, body in found]

    async def media_of(self, event_id: bytes) -> list[StoredMedia]:
        return [StoredMedia(*row) for row in await self.rows(_MEDIA, [Id(event_id)])]

    async def find_media(self, digests: Sequence[bytes]) -> set[bytes]:
        return {bytes(digest) for (digest,) in await self.rows(_KEPT_MEDIA, [Blobs(digests)])}

    async def get_delivery(self, delivery_id: bytes) -> StoredDelivery | None:
        found = await self.rows(_GET_DELIVERY, [Id(delivery_id)])
        return read_delivery(found[0]) if found else None

    async def attempts_of(self, delivery_id: bytes) -> list[StoredAttempt]:
        kept = [
            StoredAttempt(
                DeliveryId(row[0]),
                *(*row[1:6], AttemptOutcome(row[6]), row[7] and Category(row[7]), Evidence(*row[8:])),
            )
            for row in await self.rows(_ATTEMPTS, [Id(delivery_id)])
        ]
        return [self.cipher.read_attempt(attempt) for attempt in kept]

    async def subject_of(self, delivery_id: bytes, around: int = 10) -> list[StoredDelivery]:
        async with self.connection() as connection:
            found = await fetch_all(connection, _GET_DELIVERY, [Id(delivery_id)])
            if not found:
                return []
            near = await fetch_all(connection, _NEIGHBOURS, [Id(delivery_id), Id(found[0][1]), 2 * around + 1])
        ids = [row[0] for row in near]
        if delivery_id not in ids:  # it has no subject
            return [read_delivery(found[0])]
        place = ids.index(delivery_id)
        return [read_delivery(row) for row in near[max(place - around, 0) : place + around + 1]]

    # -- lists ---------------------------------------------------------------------------------

    async def find_deliveries(
        self, filter: Filter, *, before: bytes | None = None, limit: int = 50
    ) -> Page[StoredDelivery]:
        pages = []
        async with self.connection() as connection:
            for one in filter.alternatives():
                if not selects_nothing(one):
                    found, further = await self._find(connection, way_to_deliveries(one), one, before, limit)
                    pages.append(Page([read_delivery(row) for row in found], further))
        return merge_pages(pages, limit)

    async def find_events(self, filter: Filter, *, before: bytes | None = None, limit: int = 50) -> Page[ListedEvent]:
        async with self.connection() as connection:
            pages = [
                await self._find_events(connection, one, before, limit)
                for one in filter.alternatives()
                if not selects_nothing(one)
            ]
        return merge_pages(pages, limit)

    async def _find_events(
        self, connection: Connection, filter: Filter, before: bytes | None, limit: int
    ) -> Page[ListedEvent]:
        found, further = await self._find(connection, way_to_events(filter), filter, before, limit)
        deliveries: dict[bytes, list[ListedDelivery]] = {row[0]: [] for row in found}
        if found:
            listed = await fetch_all(connection, _DELIVERIES_OF_EVENTS, [Ids(list(deliveries))])
            for event_id, id_, name, status, note, run, replay_id in listed:
                replay = replay_id and ReplayId(replay_id)
                one = ListedDelivery(DeliveryId(id_), name, DeliveryStatus(status), note, run, replay)
                deliveries[event_id].append(one)
        listed = [
            ListedEvent(
                *(EventId(row[0]), *row[1:7], MARKS[row[7]], row[8], row[9], row[10], deliveries[row[0]], row[11])
            )
            for row in found
        ]
        return Page(listed, further)

    async def count_events(self, filter: Filter) -> Total:
        found: set[bytes] = set()
        is_exact = True
        async with self.connection() as connection:
            for one in filter.alternatives():
                if selects_nothing(one):
                    continue
                way = way_to_events(one)
                assert way.COUNT is not None
                assert way.COUNT_BY_BODY is not None
                values = await self._ask(connection, way, one, None, MOST_COUNTED + 1)
                counted = way.COUNT if one.body is None else way.COUNT_BY_BODY
                found.update(row[0] for row in await select(connection, counted, values))
                if len(found) > MOST_COUNTED:
                    return Total(MOST_COUNTED, is_exact=False)
                is_exact = is_exact and not await select(connection, way.FAR, values)
        return Total(len(found), is_exact)

    async def _find(
        self, connection: Connection, way: Way, filter: Filter, before: bytes | None, limit: int
    ) -> tuple[Sequence[Sequence[Any]], bytes | None]:
        """Return the rows of a page, and where the next one begins."""
        values = await self._ask(connection, way, filter, before, limit + 1)
        found = await select(connection, way.LIST if filter.body is None else way.LIST_BY_BODY, values)
        if len(found) > limit:
            return found[:limit], found[limit - 1][0]
        far = await select(connection, way.FAR, values)
        return found, far[0][0] if far else None

    async def _ask(
        self, connection: Connection, way: Way, filter: Filter, before: bytes | None, most: int
    ) -> dict[str, Any]:
        """Return the values of a filter for the statements of a list."""
        values = await values_without_body(connection, filter)
        values |= {"before": None if before is None else Id(before), "looked_at": LOOKED_AT, "limit": most}
        if filter.body is not None:
            # Read fewer rows where their bodies are too large to search them all.
            [(rows, fitting)] = await select(connection, way.WEIGH, {**values, "looked_into": LOOKED_INTO})
            if fitting < rows:
                values["looked_at"] = max(fitting, 1)
            encrypted = await select(connection, way.ENCRYPTED, values) if self.cipher.has_keys else ()
            values["matching"] = Ids(await _match_bodies(encrypted, filter.body, self.cipher))
        return values

    # -- numbers -------------------------------------------------------------------------------

    async def causes(
        self,
        destination: str | None = None,
        sources: Collection[str] | None = None,
        accounts: Collection[str] | None = None,
    ) -> list[Cause]:
        found = await self.rows(_CAUSES, [destination, _names(sources), _names(accounts)])
        return [Cause(*(*cause, DeliveryId(sample), count_hours(ages))) for *cause, sample, ages in found]

    async def recent_rejections(self, limit: int = 50, *, before: int | None = None) -> list[Rejection]:
        rows = await self.rows(_REJECTIONS, [before, limit])
        return [self.cipher.read_rejection(Rejection(*(*row[:6], ArrivalId(row[6]), *row[7:]))) for row in rows]

    async def figures(self, since: datetime | None = None) -> Figures:
        return Figures.of(await self.rows(_FIGURES, [since]))

    async def levels(self) -> dict[str, Level]:
        return {name: Level(*level) for name, *level in await self.rows(_LEVELS)}

    async def count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        return {DeliveryStatus(status): n for status, n in await self.rows(_COUNT_SINCE, [since])}

    async def count_of(
        self,
        sources: Collection[str] | None,
        since: datetime | None = None,
        accounts: Collection[str] | None = None,
    ) -> dict[str, dict[DeliveryStatus, int]]:
        found: dict[str, dict[DeliveryStatus, int]] = {}
        for name, status, n in await self.rows(_COUNT_OF, [_names(sources), since, _names(accounts)]):
            found.setdefault(name, {})[DeliveryStatus(status)] = n
        return found

    async def figures_of(
        self, accounts: Collection[str], since: datetime, sources: Collection[str] | None = None
    ) -> Figures:
        return Figures.of_events(await self.rows(_FIGURES_OF, [_names(sources), since, _names(accounts)]))

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> Series:
        flows: Series = {}
        for what, at, n in await self.rows(_SERIES, [since, float(step), source, destination]):
            flows.setdefault(what, []).append((at, n))
        return flows

    async def destination_series(self, since: datetime, step: float) -> dict[str, Series]:
        found: dict[str, Series] = {}
        for name, what, at, n in await self.rows(_DESTINATION_SERIES, [since, float(step)]):
            found.setdefault(name, {}).setdefault(what, []).append((at, n))
        return found

    async def chart_marks(self, since: datetime) -> list[ChartMark]:
        found = await self.rows("SELECT at, text, actor FROM chart_marks WHERE at >= $1 ORDER BY n", [since])
        return [ChartMark(*row) for row in found]

    async def sizes(self) -> list[tuple[datetime, int]]:
        return [(hour, size) for hour, size in await self.rows("SELECT hour, bytes FROM sizes ORDER BY hour")]

    async def audit_log(self, *, before: int | None = None, limit: int = 50, actor: str | None = None) -> list[Audited]:
        found = await self.rows(_AUDIT_LOG, [before, limit, None if actor is None else clean_text(actor)])
        return [Audited(*(*row[:5], json.loads(row[5]))) for row in found]

    async def workers(self) -> list[StoredWorker]:
        return [StoredWorker(*(*row[:6], json.loads(row[6]))) for row in await self.rows(_WORKERS)]

    async def crossings(self) -> dict[str, datetime]:
        return dict(await self.rows("SELECT name, since FROM crossings"))

    async def token_uses(self) -> dict[str, datetime]:
        return dict(await self.rows("SELECT name, used_at FROM token_uses"))
