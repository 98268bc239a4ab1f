"""Reads from a SQLite store: events, deliveries, attempts, replays, levels, charts; on threads beside the writer.

A read never waits for a commit and never delays one; each sees one snapshot of the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from oncehook import clock
from oncehook.errors import QueryTooWide, StoreUnavailable
from oncehook.model import (
    ERASED,
    EVENT_BYTES,
    ArrivalId,
    AttemptOutcome,
    Audited,
    Category,
    Cause,
    Check,
    DeliveryId,
    DeliveryStatus,
    EventDetails,
    EventId,
    Evidence,
    Figures,
    Filter,
    Level,
    ListedDelivery,
    ListedEvent,
    Mark,
    Outcome,
    Outlook,
    Page,
    Rejection,
    ReplayId,
    ReplayPlan,
    ReplayState,
    StoredArrival,
    StoredAttempt,
    StoredDelivery,
    StoredReplay,
    StoredWorker,
    last_delivery_of,
)
from oncehook.store.audit import ChainEntry, Ends, check_chain
from oncehook.store.base import KEPT_ARRIVALS, MOST_DECRYPTED, MOST_DECRYPTED_BYTES, NameIds
from oncehook.store.checks import LEVELS, Tally, conservation, encryption
from oncehook.store.cipher import Cipher
from oncehook.store.filters import LOOKED_AT, LOOKED_INTO, STATUS, UNFINISHED, Dialect
from oncehook.store.sqlite.connection import (
    EPOCH,
    MINUTE,
    NEVER,
    SECOND,
    Micros,
    moment,
    moment_or_none,
    teach,
    to_micros,
)
from oncehook.store.sqlite.intake import DETAIL_COLUMNS, KEPT, read_details
from oncehook.store.sqlite.queue import next_due

# Walks down the path of each clause through objects and arrays. CASE, unlike AND, keeps bodies that are not JSON away
# from functions that would raise, and most bodies away from Python. The cast makes text of the bytes, which newer
# releases would take for their own binary JSON; without the plus, the cast would make numbers text. Numbers are
# compared roughly, so that rather too many match (their digits may be read slightly differently), and Python decides.
# Times 1.0, because abs() of the least integer is an error.
SAYS: Final = """
AND CASE WHEN substr(e.body, 1, 4) = x'ff4f4845' THEN encrypted_says(e.body, e.id, :clauses)
WHEN NOT json_valid(CAST(e.body AS TEXT)) THEN 0 WHEN (
  WITH RECURSIVE walk (clause, step, kind, value) AS (
    SELECT clause.key, 0, 'object', +CAST(e.body AS TEXT) FROM json_each(:clauses) clause
    UNION ALL
    SELECT walk.clause, walk.step + 1, member.type, member.value FROM walk, json_each(walk.value) member
    WHERE walk.kind IN ('object', 'array')
      AND CAST(member.key AS TEXT) = json_extract(:clauses, '$[' || walk.clause || '].path[' || walk.step || ']')
  ), asked (clause, steps, sign, value, number, near) AS (
    SELECT key, json_array_length(value, '$.path'), json_extract(value, '$.sign'), json_extract(value, '$.value'),
      json_extract(value, '$.number'), abs(1.0 * json_extract(value, '$.number')) * 1e-12
    FROM json_each(:clauses) clause
  )
  SELECT count(DISTINCT asked.clause) FROM asked, walk
  WHERE walk.clause = asked.clause AND walk.step = asked.steps AND CASE
    WHEN walk.kind IN ('object', 'array') THEN 0
    WHEN walk.kind NOT IN ('integer', 'real') THEN
      asked.sign = '=' AND asked.value = CASE walk.kind WHEN 'text' THEN walk.value ELSE walk.kind END
    WHEN asked.sign IN ('>', '>=') THEN walk.value >= asked.number - asked.near
    WHEN asked.sign IN ('<', '<=') THEN walk.value <= asked.number + asked.near
    ELSE abs(1.0 * (walk.value - asked.number)) <= asked.near END
) < json_array_length(:clauses) THEN 0 ELSE body_says(e.body, :clauses) END
"""


T = TypeVar("T")

_EVENT: Final = (
    "SELECT"
    + DETAIL_COLUMNS
    + """
FROM events e JOIN sources s ON s.id = e.source_id
LEFT JOIN batches b ON b.id = e.batch_id
LEFT JOIN copies c ON c.event_id = e.id
WHERE e.id = ?
"""
)

# A dead head is held, which is right; every other head is pending and the first of its queue.
MISPLACED: Final = """
SELECT count(*) FROM heads h LEFT JOIN deliveries d ON d.id = h.delivery_id LEFT JOIN (
  SELECT coalesce(subject_key, id) AS queue_key, min(seq) AS first FROM deliveries WHERE status = 'pending' GROUP BY 1
) p ON p.queue_key = h.subject_key
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


def read_name_ids(connection: sqlite3.Connection) -> NameIds:
    return NameIds(
        dict(connection.execute("SELECT name, id FROM sources")),
        dict(connection.execute("SELECT name, id FROM destinations")),
    )


@contextlib.contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Read everything inside the block from one snapshot."""
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
    ends = Ends(*connection.execute("SELECT n, hash, pruned, pruned_hash, since FROM audit_chain").fetchone())
    return [intact, *conservation(tally), check_chain(ends, read_chain(connection, ends))]


EVERYTHING: Final = 1 << 62

SLACK: Final = 3_600_000
"""Milliseconds by which an id's own time may differ from the received time of its event."""

_FIRST: Final = b""
"""Smaller than every id."""

LAST: Final = b"\xff" * 17
"""Greater than every id."""

# -- ways to get at rows, newest first, between two ids --------------------------------------------

_LOOK: Final = " LIMIT :looked_at"
_DELIVERIES: Final = {
    "all": "SELECT id FROM deliveries WHERE id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    # `status <> 'done'` lets SQLite use the partial index.
    "unfinished": "SELECT id FROM deliveries WHERE status <> 'done' AND status = :status AND id >= :low AND id < :high"
    " ORDER BY id DESC" + _LOOK,
    "leased": "SELECT id FROM (SELECT delivery_id AS id FROM heads WHERE leased UNION SELECT carries FROM heads"
    " WHERE leased AND carries IS NOT NULL) WHERE id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "replay": "SELECT delivery_id AS id FROM replay_items WHERE replay_id = :replay_id"
    " AND delivery_id >= :low AND delivery_id < :high ORDER BY delivery_id DESC" + _LOOK,
    "subject": "SELECT w.id FROM events x CROSS JOIN deliveries w ON w.id > x.id"
    " AND w.id <= CAST(substr(x.id, 1, 13) || x'ffffff' AS BLOB)"
    " WHERE x.subject = :subject AND x.id >= :low_event AND x.id < :high AND w.id >= :low AND w.id < :high"
    " ORDER BY w.id DESC" + _LOOK,
}
_OF_EVENTS: Final = "SELECT CAST(substr(id, 1, 13) || x'000000' AS BLOB) AS id FROM ("
# The last three may return an event more than once; `_distinct` removes the repetitions.
_EVENTS: Final = {
    "all": "SELECT id FROM events WHERE id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "source": "SELECT id FROM events WHERE source_id = :source_id AND id >= :low AND id < :high ORDER BY id DESC"
    + _LOOK,
    "subject": "SELECT id FROM events WHERE subject = :subject AND id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "unfinished": _OF_EVENTS + _DELIVERIES["unfinished"] + ")",
    "leased": _OF_EVENTS + _DELIVERIES["leased"] + ")",
    "replay": _OF_EVENTS + _DELIVERIES["replay"] + ")",
}
_FAR: Final = " OFFSET :looked_at - 1"

# -- what must hold ------------------------------------------------------------------------------

_SQL: Final = Dialect(
    {
        "ids": "d.id = :ids",
        "sources": "instr(:sources, ',' || e.source_id || ',')",
        "type": "e.type GLOB :type",
    },
    "LIKE :text ESCAPE '!'",
    encode_id=bytes,
    encode_text=str,
    encode_type=lambda pattern: pattern.replace("[", "[[]"),
    encode_time=to_micros,
)
_HEAD: Final = " LEFT JOIN heads h ON h.subject_key = coalesce(d.subject_key, d.id) AND d.status = 'pending'"
_OF_THIS_EVENT: Final = "d.id > e.id AND d.id <= CAST(substr(e.id, 1, 13) || x'ffffff' AS BLOB)"

# CROSS JOIN keeps the order of tables, and so the order of rows.
_DELIVERY_MATCHES: Final = (
    ") f CROSS JOIN deliveries d ON d.id = f.id CROSS JOIN events e ON e.id = d.event_id"
    + " CROSS JOIN sources s ON s.id = e.source_id CROSS JOIN destinations t ON t.id = d.destination_id"
    + _HEAD
    + " WHERE "
    + _SQL.MATCHES
)
_EVENT_MATCHES: Final = (
    ") f CROSS JOIN events e ON e.id = f.id CROSS JOIN sources s ON s.id = e.source_id"
    + " LEFT JOIN copies c ON c.event_id = e.id WHERE "
    + _SQL.OF_EVENT
    + " AND (NOT :asks_deliveries AND (:text IS NULL OR "
    + _SQL.EVENT_SAYS
    + ") OR (:asks_deliveries OR :text IS NOT NULL) AND EXISTS (SELECT 1 FROM deliveries d"
    + _HEAD
    + " WHERE "
    + _OF_THIS_EVENT
    + " AND "
    + _SQL.OF_DELIVERY
    + " AND "
    + _SQL.DELIVERY_SAYS
    + "))"
)

_SHOWN: Final = """
SELECT d.id, d.event_id, s.name, t.name, e.type, e.key, e.subject, d.status, d.note, d.run, d.attempts, d.category,
       d.last_status, d.last_error, e.received_at, d.settled_at, d.last_replay_at, d.replay_id, d.reason,
       h.delivery_id, h.carries, h.leased, h.due_at, h.attempts, d.seq
FROM (
"""
_SELECTED: Final = "SELECT d.id, d.seq, " + STATUS + ", t.name, e.received_at, d.note FROM ("
_LISTED: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks,
       length(e.body) - CASE WHEN substr(e.body, 1, 5) = x'ff4f484501' THEN 49 ELSE 0 END, coalesce(c.n, 1)
FROM (
"""

# The number of rows of a page, and how many of them fit into the total size of bodies that it may search.
_WEIGH: Final = """
SELECT count(*), count(*) FILTER (WHERE upto <= :looked_into)
FROM (SELECT sum(length(e.body)) OVER (ORDER BY f.id DESC ROWS UNBOUNDED PRECEDING) AS upto FROM (
"""
_WEIGHED: Final = ") f CROSS JOIN events e ON e.id = CAST(substr(f.id, 1, 13) || x'000000' AS BLOB))"


@dataclass(slots=True, frozen=True)
class ListStatements:
    """The statements of a list that uses one index."""

    LIST: str
    FAR: str
    """The last row that a page read, if it read as many as it may."""
    WEIGH: str
    SELECT: str = ""
    """The columns of deliveries that a replay or a discard needs."""


def _list_deliveries(rows: str, says: str = "") -> ListStatements:
    return ListStatements(
        LIST=_SHOWN + rows + _DELIVERY_MATCHES + says,
        FAR=rows + _FAR,
        WEIGH=_WEIGH + rows + _WEIGHED,
        SELECT=_SELECTED + rows + _DELIVERY_MATCHES + says,
    )


def _list_events(rows: str, looked_at: str, says: str = "") -> ListStatements:
    return ListStatements(
        LIST=_LISTED + rows + _EVENT_MATCHES + says, FAR=looked_at + _FAR, WEIGH=_WEIGH + rows + _WEIGHED
    )


# Separate statements search bodies, so that other queries do not pay for it.
DELIVERIES: Final = {name: _list_deliveries(rows) for name, rows in _DELIVERIES.items()}
DELIVERIES_BY_BODY: Final = {name: _list_deliveries(rows, SAYS) for name, rows in _DELIVERIES.items()}
_DELIVERIES_LOOKED_AT: Final = {name: _DELIVERIES[name] for name in ("unfinished", "leased", "replay")}
EVENTS: Final = {name: _list_events(rows, _DELIVERIES_LOOKED_AT.get(name, rows)) for name, rows in _EVENTS.items()}
EVENTS_BY_BODY: Final = {
    name: _list_events(rows, _DELIVERIES_LOOKED_AT.get(name, rows), SAYS) for name, rows in _EVENTS.items()
}


@dataclass(slots=True)
class Question:
    """A filter's parameters, and the statements that answer it."""

    way: ListStatements
    values: dict[str, Any]


def _delivery_question(name: str, values: dict[str, Any]) -> Question:
    return Question((DELIVERIES if values["clauses"] is None else DELIVERIES_BY_BODY)[name], values)


def _event_question(name: str, values: dict[str, Any]) -> Question:
    return Question((EVENTS if values["clauses"] is None else EVENTS_BY_BODY)[name], values)


def ask_deliveries(connection: sqlite3.Connection, filter: Filter, before: bytes | None = None) -> Question:
    """Choose the statements for the deliveries of a filter. Its `ids` are queried one by one: see `one_of`."""
    values = _values(connection, filter)
    low, high = _bounds(connection, filter, before)
    if filter.event_id is not None:
        low, high = max(low, filter.event_id), min(high, last_delivery_of(filter.event_id) + b"\x00")
    values |= {"low": low, "low_event": low[:EVENT_BYTES], "high": high, "looked_at": LOOKED_AT}
    if filter.event_id is not None:
        return _delivery_question("all", values)
    return _delivery_question(_way(filter) or ("subject" if filter.subject is not None else "all"), values)


def one_of(question: Question, delivery_id: bytes) -> Question | None:
    """Return the same question for one delivery; None when that is out of bounds."""
    if not question.values["low"] <= delivery_id < question.values["high"]:
        return None
    return _delivery_question("all", question.values | {"low": delivery_id, "high": delivery_id + b"\x00"})


def ask_events(connection: sqlite3.Connection, filter: Filter, before: bytes | None = None) -> Question:
    values = _values(connection, filter)
    low, high = _bounds(connection, filter, before)
    if filter.event_id is not None:
        low, high = max(low, filter.event_id), min(high, filter.event_id + b"\x00")
    values |= {"low": low, "high": high, "looked_at": LOOKED_AT}
    if filter.event_id is not None:
        return _event_question("all", values)
    if filter.subject is not None:
        return _event_question("subject", values)
    return _event_question(_way(filter) or ("source" if filter.source is not None else "all"), values)


def weigh(connection: sqlite3.Connection, question: Question) -> None:
    """Have a page read fewer rows where their bodies are too large to search them all."""
    if question.values["clauses"] is None:
        return
    way = question.way
    there, fitting = connection.execute(way.WEIGH, question.values | {"looked_into": LOOKED_INTO}).fetchone()
    if fitting < there:
        question.values["looked_at"] = max(fitting, 1)


def _way(filter: Filter) -> str | None:
    if filter.status is DeliveryStatus.leased:
        return "leased"
    if filter.replay_id is not None:
        return "replay"
    return "unfinished" if filter.status in UNFINISHED else None


def _bounds(connection: sqlite3.Connection, filter: Filter, before: bytes | None) -> tuple[bytes, bytes]:
    """Return the bounds of ids that a filter can match: ids begin with their time."""
    low = _FIRST if filter.since is None else id_floor(to_micros(filter.since) // 1000 - SLACK)
    high = LAST
    if filter.until is not None and ids_keep_time(connection):
        high = id_floor(to_micros(filter.until) // 1000 + SLACK)
    return low, high if before is None else min(high, before)


def ids_keep_time(connection: sqlite3.Connection) -> bool:
    """Tell whether ids do not run ahead of the clock. They never go back, so they do after the clock was set back."""
    newest = connection.execute("SELECT id FROM events ORDER BY id DESC LIMIT 1").fetchone()
    return newest is None or newest[0] < id_floor(int(clock.now() * 1000) + SLACK)


def id_floor(milliseconds: int) -> bytes:
    """Return a bound that is smaller than every id made at this time or later, and greater than all earlier ones."""
    return min(max(milliseconds, 0), (1 << 48) - 1).to_bytes(6)


def encode_sources(connection: sqlite3.Connection, sources: Collection[str]) -> str:
    """Encode the ids of these sources as one text to search in: `,1,5,`. A list would be a scan in every plan."""
    found = [_find_id(connection, "SELECT id FROM sources WHERE name = ?", name) for name in sources]
    return f",{','.join(map(str, found))},"


def _values(connection: sqlite3.Connection, filter: Filter) -> dict[str, Any]:
    return _SQL.values(
        filter,
        _find_id(connection, "SELECT id FROM sources WHERE name = ?", filter.source),
        None if filter.sources is None else encode_sources(connection, filter.sources),
        _find_id(connection, "SELECT id FROM destinations WHERE name = ?", filter.destination),
    )


def _find_id(connection: sqlite3.Connection, statement: str, name: str | None) -> int | None:
    """Return the id of a name; for an unknown name, an id that nothing has."""
    if name is None:
        return None
    row = connection.execute(statement, (name,)).fetchone()
    return -1 if row is None else int(row[0])


# -- answers -------------------------------------------------------------------------------------


def select_deliveries(
    connection: sqlite3.Connection, filter: Filter, *, decrypts: bool = False
) -> Iterator[tuple[bytes, int, str, str, int, str | None]]:
    """Yield all deliveries of a filter, however many: id, seq, status, destination, received at, note.

    `decrypts`: bodies may be encrypted. Raises QueryTooWide where decrypting would take too long.
    """
    asked = ask_deliveries(connection, filter)
    if decrypts and asked.values["clauses"] is not None and filter.ids is None:
        look = {"looked_at": MOST_DECRYPTED + 1, "looked_into": MOST_DECRYPTED_BYTES}
        way = asked.way
        there, fitting = connection.execute(way.WEIGH, asked.values | look).fetchone()
        if there > MOST_DECRYPTED or fitting < there:
            raise QueryTooWide
    questions = [asked] if filter.ids is None else [one_of(asked, one) for one in dict.fromkeys(filter.ids)]
    for question in questions:
        if question is not None:
            way = question.way
            yield from connection.execute(way.SELECT, question.values | {"looked_at": EVERYTHING})


def read_delivery(row: tuple[Any, ...]) -> StoredDelivery:
    id_, event_id, source, destination, type_, key, subject, status, note, run, attempts, *rest = row
    category, last_status, last_error, received_at, settled_at, last_replay_at, replay_id, reason, *head, _seq = rest
    head_id, carries, leased, due_at, head_attempts = head
    is_under_way = bool(leased) and id_ in (head_id, carries)
    is_next = id_ == head_id or is_under_way
    return StoredDelivery(
        id=DeliveryId(id_),
        event_id=EventId(event_id),
        source=source,
        destination=destination,
        type=type_,
        key=key,
        subject=subject,
        status=DeliveryStatus.leased if is_under_way else DeliveryStatus(status),
        note=note,
        run=run,
        attempts=head_attempts if is_next else attempts,
        category=category,
        last_status=last_status,
        last_error=last_error,
        due_at=moment(due_at) if is_next and due_at < NEVER else None,
        received_at=moment(received_at),
        settled_at=moment_or_none(settled_at),
        last_replay_at=moment_or_none(last_replay_at),
        replay_id=replay_id and ReplayId(replay_id),
        reason=reason,
        blocked_by=None if is_next or head_id is None else DeliveryId(head_id),
    )


_CAUSES_OF: Final = 10_000
_NEIGHBOURS: Final = 500
_HEARD_OF: Final = 60_000_000

ATTEMPTS: Final = """
SELECT delivery_id, fence, run, n, started_at, ended_at, outcome, category, status, error, answer
FROM attempts WHERE delivery_id = ? ORDER BY fence
"""
EVENT_OF: Final = "SELECT event_id FROM deliveries WHERE id = ?"
DELIVERIES_OF_EVENT: Final = """
SELECT d.id, t.name, d.status, d.note, d.run, d.replay_id, h.leased AND (h.delivery_id = d.id OR h.carries = d.id)
FROM deliveries d JOIN destinations t ON t.id = d.destination_id
LEFT JOIN heads h ON h.subject_key = coalesce(d.subject_key, d.id) AND d.status = 'pending'
WHERE d.id > ? AND d.id <= ? ORDER BY d.id
"""
# The same subject of the same source at the same destination: before it, after it, and those waiting now.
EARLIER: Final = """
SELECT d.id, d.seq FROM events e CROSS JOIN deliveries d ON d.id = CAST(substr(e.id, 1, 13) || substr(?1, 14) AS BLOB)
WHERE e.subject = ?2 AND e.id <= ?3 AND e.source_id = ?4 ORDER BY e.id DESC LIMIT ?5
"""
LATER: Final = """
SELECT d.id, d.seq FROM events e CROSS JOIN deliveries d ON d.id = CAST(substr(e.id, 1, 13) || substr(?1, 14) AS BLOB)
WHERE e.subject = ?2 AND e.id > ?3 AND e.source_id = ?4 ORDER BY e.id LIMIT ?5
"""
DEAD: Final = """
SELECT t.name, d.last_status, d.last_error, d.reason, d.settled_at, d.id
FROM deliveries d JOIN destinations t ON t.id = d.destination_id
WHERE d.status <> 'done' AND d.status = 'dead' AND (?1 IS NULL OR t.name = ?1)
AND (?3 IS NULL OR (SELECT instr(?3, ',' || e.source_id || ',') FROM events e WHERE e.id = d.event_id))
ORDER BY d.id DESC LIMIT ?2
"""
REPLAY: Final = """
SELECT r.id, r.state, r.about, r.actor, r.reason, r.bulk, r.rate, r.planned, r.created_at, r.finished_at,
       (SELECT count(*) FROM replay_items WHERE replay_id = r.id AND outcome IS NULL),
       (SELECT count(*) FROM replay_items WHERE replay_id = r.id AND outcome IS NULL AND fed_at IS NULL),
       (SELECT count(*) FROM replay_items WHERE replay_id = r.id AND outcome IN ('dead', 'skipped')
        AND outcome = 'dead'),
       (SELECT count(*) FROM replay_items WHERE replay_id = r.id AND outcome IN ('dead', 'skipped')
        AND outcome = 'skipped')
FROM replays r
"""
LEVELS_OF: Final = """
SELECT d.name, s.paused_at, s.paused_by, s.paused_why, coalesce(s.failures, 0), s.open_until,
       (SELECT count(*) FROM heads WHERE leased AND destination_id = d.id),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 0 AND due_at <= ?1 AND NOT leased
        ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 1 AND due_at <= ?1 AND NOT leased
        ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 2 AND due_at <= ?1 AND NOT leased
        ORDER BY due_at LIMIT 1)
FROM destinations d LEFT JOIN destination_state s ON s.destination_id = d.id
"""
# Ids begin with the receiver's time: only near the bound the event itself must be read.
COUNT_SINCE: Final = """
SELECT status, count(*) FROM deliveries WHERE id >= ?2 GROUP BY 1 UNION ALL
SELECT d.status, count(*) FROM deliveries d CROSS JOIN events e ON e.id = d.event_id
WHERE d.id >= ?1 AND d.id < ?2 AND e.received_at >= ?3 GROUP BY 1
"""
LEASED_SINCE: Final = """
SELECT count(*) FROM (SELECT delivery_id AS id FROM heads WHERE leased UNION SELECT carries FROM heads WHERE leased) l
CROSS JOIN deliveries d ON d.id = l.id CROSS JOIN events e ON e.id = d.event_id WHERE e.received_at >= ?
"""
COUNT_OF: Final = """
SELECT t.name, CASE WHEN d.status <> 'pending' THEN d.status
       WHEN h.leased AND (h.delivery_id = d.id OR h.carries = d.id) THEN 'leased' ELSE 'pending' END, count(*)
FROM sources s CROSS JOIN events e ON e.source_id = s.id
CROSS JOIN deliveries d ON d.id > e.id AND d.id <= CAST(substr(e.id, 1, 13) || x'ffffff' AS BLOB)
CROSS JOIN destinations t ON t.id = d.destination_id
LEFT JOIN heads h ON h.subject_key = coalesce(d.subject_key, d.id) AND d.status = 'pending'
WHERE s.name IN (SELECT value FROM json_each(?1)) AND e.id >= ?2 AND e.received_at >= ?3 GROUP BY 1, 2
"""
SERIES: Final = """
SELECT what, minute / ?2 * ?2, sum(n) FROM counters WHERE minute >= ?1
AND (?3 IS NULL OR source_id = (SELECT id FROM sources WHERE name = ?3))
AND (?4 IS NULL OR destination_id = (SELECT id FROM destinations WHERE name = ?4))
GROUP BY 1, 2 ORDER BY 1, 2
"""


class SqliteReader:
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
            teach(connection, self.cipher)
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    async def name_ids(self) -> NameIds:
        return await self.read(read_name_ids)

    async def get_event(self, event_id: bytes) -> EventDetails | None:
        row = await self.read(lambda c: c.execute(_EVENT, (event_id,)).fetchone())
        return None if row is None else self.cipher.read_event(read_details(row))

    def now(self) -> Micros:
        """Return the current time. A process that only reads has no clock of the store, and uses this machine's."""
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
        """Check the conservation laws over one snapshot, and the file's own integrity."""
        return await self.read(lambda c: [*_check(c), *encryption(c.execute(_KEY_IDS), self.cipher)])

    # -- work ----------------------------------------------------------------------------------

    async def find_events(self, filter: Filter, *, before: bytes | None = None, limit: int = 50) -> Page[ListedEvent]:
        return await self.read(lambda c: _find_events(c, filter, before, limit))

    async def get_delivery(self, delivery_id: bytes) -> StoredDelivery | None:
        return await self.read(lambda c: get_delivery(c, delivery_id))

    async def find_deliveries(
        self, filter: Filter, *, before: bytes | None = None, limit: int = 50
    ) -> Page[StoredDelivery]:
        return await self.read(lambda c: _find_deliveries(c, filter, before, limit))

    async def attempts_of(self, delivery_id: bytes) -> list[StoredAttempt]:
        rows = await self.read(lambda c: c.execute(ATTEMPTS, (delivery_id,)).fetchall())
        return [self.cipher.read_attempt(_read_attempt(row)) for row in rows]

    async def subject_of(self, delivery_id: bytes, around: int = 10) -> list[StoredDelivery]:
        return await self.read(lambda c: _subject_of(c, delivery_id, around))

    async def causes(self, destination: str | None = None, sources: Collection[str] | None = None) -> list[Cause]:
        def read(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            asked = None if sources is None else encode_sources(connection, sources)
            return connection.execute(DEAD, (destination, _CAUSES_OF, asked)).fetchall()

        return _group_causes(await self.read(read))

    async def plan_replay(self, filter: Filter, *, force: bool) -> ReplayPlan:
        at = self.now()  # taken first, so that what dies meanwhile does not count as seen
        return await self.read(lambda c: _plan(c, at, filter, force, self.cipher.has_keys))

    async def get_replay(self, replay_id: bytes) -> StoredReplay | None:
        return await self.read(lambda c: get_replay(c, replay_id))

    async def find_replays(self, *, before: bytes | None = None, limit: int = 50) -> Page[StoredReplay]:
        rows = await self.read(
            lambda c: c.execute(
                REPLAY + "WHERE ?1 IS NULL OR r.id < ?1 ORDER BY r.id DESC LIMIT ?2", (before, limit + 1)
            ).fetchall()
        )
        return _make_page([_read_replay(row) for row in rows], limit)

    async def next_due(self, destination_ids: Sequence[int], since: datetime | None = None) -> Outlook:
        now = self.now()
        moment = None if since is None else to_micros(since)
        return await self.read(lambda c: next_due(c, now, destination_ids, moment))

    async def levels(self) -> dict[str, Level]:
        now = self.now()
        return await self.read(lambda c: _levels(c, now))

    async def count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        return await self.read(lambda c: _count_since(c, to_micros(since)))

    async def count_of(
        self, sources: Collection[str], since: datetime | None = None
    ) -> dict[str, dict[DeliveryStatus, int]]:
        start = 0 if since is None else to_micros(since)
        asked = (json.dumps(list(sources)), id_floor(start // 1000 - SLACK), start)
        found: defaultdict[str, dict[DeliveryStatus, int]] = defaultdict(dict)
        for name, status, n in await self.read(lambda c: c.execute(COUNT_OF, asked).fetchall()):
            found[name][DeliveryStatus(status)] = n
        return dict(found)

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> dict[str, list[tuple[datetime, int]]]:
        width = max(int(step), 1) * SECOND
        start = to_micros(since) // width * width
        rows = await self.read(lambda c: c.execute(SERIES, (start, width, source, destination)).fetchall())
        flows: defaultdict[str, list[tuple[datetime, int]]] = defaultdict(list)
        for what, at, n in rows:
            if what not in LEVELS:
                flows[what].append((moment(at), n))
        return dict(flows)

    async def audit_log(self, *, before: int | None = None, limit: int = 50, actor: str | None = None) -> list[Audited]:
        rows = await self.read(
            lambda c: c.execute(
                "SELECT n, at, actor, act, target, detail FROM audit WHERE (?1 IS NULL OR n < ?1)"
                " AND (?3 IS NULL OR actor = ?3) ORDER BY n DESC LIMIT ?2",
                (before, limit, actor),
            ).fetchall()
        )
        return [
            Audited(n, moment(at), actor, act, target, json.loads(detail)) for n, at, actor, act, target, detail in rows
        ]

    async def token_uses(self) -> dict[str, datetime]:
        rows = await self.read(lambda c: c.execute("SELECT name, used_at FROM token_uses").fetchall())
        return {name: moment(at) for name, at in rows}

    async def workers(self) -> list[StoredWorker]:
        heard_of = self.now() - _HEARD_OF
        rows = await self.read(
            lambda c: c.execute(
                "SELECT id, host, pid, started_at, seen_at, leases, destinations FROM workers WHERE seen_at > ?"
                " ORDER BY started_at, id",
                (heard_of,),
            ).fetchall()
        )
        return [
            StoredWorker(id_, host, pid, moment(started), moment(seen), leases, json.loads(destinations))
            for id_, host, pid, started, seen, leases, destinations in rows
        ]

    async def crossings(self) -> dict[str, datetime]:
        rows = await self.read(lambda c: c.execute("SELECT name, since FROM crossings").fetchall())
        return {name: moment(since) for name, since in rows}


# -- deliveries and events -------------------------------------------------------------------------


def get_delivery(connection: sqlite3.Connection, delivery_id: bytes) -> StoredDelivery | None:
    page = _find_deliveries(connection, Filter(ids=[DeliveryId(delivery_id)]), None, 1)
    return page.items[0] if page.items else None


def _find_deliveries(
    connection: sqlite3.Connection, filter: Filter, before: bytes | None, limit: int
) -> Page[StoredDelivery]:
    asked = ask_deliveries(connection, filter, before)
    if filter.ids is not None:
        ones = [one_of(asked, one) for one in sorted(set(filter.ids), reverse=True)]
        found = [one for question in ones if question is not None for one in _list(connection, question, 1)]
        return _make_page(found[: limit + 1], limit)
    weigh(connection, asked)
    found = _list(connection, asked, limit + 1)
    far, way = None, asked.way
    if len(found) <= limit:
        far = connection.execute(way.FAR, asked.values).fetchone()
    return _make_page(found, limit, None if far is None else far[0])


def _list(connection: sqlite3.Connection, asked: Question, most: int) -> list[StoredDelivery]:
    way = asked.way
    return [read_delivery(row) for row in connection.execute(way.LIST, asked.values).fetchmany(most)]


def _find_events(connection: sqlite3.Connection, filter: Filter, before: bytes | None, limit: int) -> Page[ListedEvent]:
    asked = ask_events(connection, filter, before)
    far, way = None, asked.way
    if filter.ids is not None:
        found = list(_events_of(connection, asked, filter.ids))[: limit + 1]
    else:
        weigh(connection, asked)
        found = list(_distinct(connection, asked, limit + 1))
        if len(found) <= limit:
            far = connection.execute(way.FAR, asked.values).fetchone()
    listed = [_read_event(connection, row) for row in found]
    return _make_page(listed, limit, None if far is None else DeliveryId(far[0]).event_id)


def _events_of(connection: sqlite3.Connection, asked: Question, ids: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
    """Yield events with a matching delivery among these."""
    seen: set[bytes] = set()
    way = _event_question("all", asked.values).way
    for delivery_id in sorted(set(ids), reverse=True):
        (event_id,) = connection.execute(EVENT_OF, (delivery_id,)).fetchone() or (None,)
        if event_id is None or event_id in seen or not asked.values["low"] <= event_id < asked.values["high"]:
            continue
        bounds = {"low": event_id, "high": event_id + b"\x00", "ids": delivery_id, "asks_deliveries": True}
        for row in connection.execute(way.LIST, asked.values | bounds).fetchall():
            seen.add(event_id)
            yield row


def _distinct(connection: sqlite3.Connection, asked: Question, most: int) -> list[tuple[Any, ...]]:
    """Return each event once: an index on deliveries returns it once per delivery, in adjacent rows."""
    found: list[tuple[Any, ...]] = []
    way = asked.way
    for row in (cursor := connection.execute(way.LIST, asked.values)):
        if not found or found[-1][0] != row[0]:
            found.append(row)
        if len(found) == most:
            break
    cursor.close()
    return found


def _read_event(connection: sqlite3.Connection, row: tuple[Any, ...]) -> ListedEvent:
    id_, source, type_, key, subject, received_at, event_at, marks, size, copies = row
    deliveries = connection.execute(DELIVERIES_OF_EVENT, (id_, last_delivery_of(id_))).fetchall()
    return ListedEvent(
        id=EventId(id_),
        source=source,
        type=type_,
        key=key,
        subject=subject,
        received_at=moment(received_at),
        event_at=moment_or_none(event_at),
        marks=Mark(marks),
        size=size,
        copies=copies,
        deliveries=[
            ListedDelivery(
                DeliveryId(one),
                name,
                DeliveryStatus.leased if leased else DeliveryStatus(status),
                note,
                run,
                replay_id and ReplayId(replay_id),
            )
            for one, name, status, note, run, replay_id, leased in deliveries
        ],
    )


def _make_page(found: Sequence[Any], limit: int, far: bytes | None = None) -> Page[Any]:
    """Build a page from up to one row more than it holds; `far` is how far the search came when it found fewer."""
    if len(found) > limit:
        return Page(found[:limit], found[limit - 1].id)
    return Page(found, far)


def _read_attempt(row: tuple[Any, ...]) -> StoredAttempt:
    delivery_id, fence, run, n, started_at, ended_at, outcome, category, *evidence = row
    return StoredAttempt(
        DeliveryId(delivery_id),
        *(fence, run, n, moment(started_at), moment(ended_at), AttemptOutcome(outcome)),
        None if category is None else Category(category),
        Evidence(*evidence),
    )


def _subject_of(connection: sqlite3.Connection, delivery_id: bytes, around: int) -> list[StoredDelivery]:
    mine = connection.execute(
        "SELECT e.id, e.subject, e.source_id, d.seq, d.subject_key FROM deliveries d JOIN events e ON e.id = d.event_id"
        " WHERE d.id = ?",
        (delivery_id,),
    ).fetchone()
    if mine is None:
        return []
    event_id, subject, source_id, seq, queue_key = mine
    about = (delivery_id, subject, event_id, source_id, _NEIGHBOURS)
    # Replays join the tail, so what waits may have arrived long ago.
    waiting = connection.execute(
        "SELECT id, seq FROM deliveries WHERE subject_key = ? AND behind AND status = 'pending' ORDER BY seq LIMIT ?",
        (queue_key, _NEIGHBOURS),
    ).fetchall()
    found = {*connection.execute(EARLIER, about), *connection.execute(LATER, about), *waiting, (delivery_id, seq)}
    ordered = sorted(found, key=lambda one: one[1])
    place = ordered.index((delivery_id, seq))
    near = ordered[max(place - around, 0) : place + around + 1]
    shown = [get_delivery(connection, id_) for id_, _ in near]
    return [one for one in shown if one is not None]


def _group_causes(rows: Sequence[tuple[Any, ...]]) -> list[Cause]:
    groups: defaultdict[tuple[str, str], list[tuple[Micros, bytes]]] = defaultdict(list)
    for destination, status, error, reason, settled_at, id_ in rows:
        groups[destination, _cause(status, error, reason)].append((settled_at, id_))
    causes = [
        Cause(destination, cause, len(ones), moment(min(ones)[0]), moment(max(ones)[0]), DeliveryId(max(ones)[1]))
        for (destination, cause), ones in groups.items()
    ]
    return sorted(causes, key=lambda cause: (-cause.count, cause.destination, cause.cause))


def _cause(status: int | None, error: str | None, reason: str | None) -> str:
    if reason is not None:
        return reason
    if error:
        return error.splitlines()[0]
    return "unknown" if status is None else f"HTTP {status}"


# -- replays ---------------------------------------------------------------------------------------


def _plan(connection: sqlite3.Connection, at: Micros, filter: Filter, force: bool, decrypts: bool) -> ReplayPlan:
    taken, left_out = [], Counter[DeliveryStatus]()
    for row in select_deliveries(connection, filter, decrypts=decrypts):
        if is_replayable(row[2], force, row[5]):
            taken.append(row)
        else:
            left_out[DeliveryStatus(row[2])] += 1
    taken.sort(key=lambda row: row[1])
    times = [row[4] for row in taken]
    sample = [get_delivery(connection, row[0]) for row in taken[:5]]
    return ReplayPlan(
        total=len(taken),
        at=moment(at),
        by_destination=dict(Counter(row[3] for row in taken)),
        by_status=dict(Counter(DeliveryStatus(row[2]) for row in taken)),
        left_out=dict(left_out),
        oldest=moment(min(times)) if times else None,
        newest=moment(max(times)) if times else None,
        changed=_count_moved(connection, ((row[0], row[3]) for row in taken)),
        sample=[one for one in sample if one is not None],
    )


def is_replayable(status: str, force: bool, note: str | None) -> bool:
    """Tell whether a replay would run it again: dead and discarded ones, with `force` done ones; never erased ones."""
    if note == ERASED:
        return False
    return status in (DeliveryStatus.dead, DeliveryStatus.discarded) or (force and status == DeliveryStatus.done)


def get_replay(connection: sqlite3.Connection, replay_id: bytes) -> StoredReplay | None:
    row = connection.execute(REPLAY + "WHERE r.id = ?", (replay_id,)).fetchone()
    return None if row is None else _read_replay(row)


def _read_replay(row: tuple[Any, ...]) -> StoredReplay:
    id_, state, about, actor, reason, bulk, rate, planned, created_at, finished_at, open_, unfed, dead, skipped = row
    return StoredReplay(
        id=ReplayId(id_),
        state=ReplayState(state),
        about=json.loads(about),
        actor=actor,
        reason=reason,
        bulk=bool(bulk),
        rate=rate,
        planned=planned,
        fed=planned - unfed - skipped,
        done=planned - open_ - dead - skipped,
        dead=dead,
        skipped=skipped,
        created_at=moment(created_at),
        finished_at=moment_or_none(finished_at),
    )


# -- numbers ---------------------------------------------------------------------------------------


def _levels(connection: sqlite3.Connection, now: Micros) -> dict[str, Level]:
    counted: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name, what, n in connection.execute(
        "SELECT d.name, c.what, sum(c.n) FROM counters c JOIN destinations d ON d.id = c.destination_id GROUP BY 1, 2"
    ):
        counted[name][what] = n
    return {row[0]: _level(row, counted[row[0]], now) for row in connection.execute(LEVELS_OF, (now,)).fetchall()}


def _level(row: tuple[Any, ...], counted: dict[str, int], now: Micros) -> Level:
    _, paused_at, paused_by, paused_why, failures, open_until, leased, *due = row
    oldest = min((at for at in due if at is not None), default=None)
    return Level(
        pending=counted.get("pending", 0),
        leased=leased,
        done=counted.get("done", 0),
        dead=counted.get("dead", 0),
        discarded=counted.get("discarded", 0),
        oldest_due=None if oldest is None else (now - oldest) / SECOND,
        paused_at=moment_or_none(paused_at),
        paused_by=paused_by,
        paused_why=paused_why,
        failures=failures,
        open_until=moment_or_none(open_until),
    )


def _count_since(connection: sqlite3.Connection, since: Micros) -> dict[DeliveryStatus, int]:
    low, high = id_floor(since // 1000 - SLACK), LAST
    if ids_keep_time(connection):
        high = id_floor(since // 1000 + SLACK)
    counts = Counter[DeliveryStatus]()
    for status, n in connection.execute(COUNT_SINCE, (low, high, since)):
        counts[DeliveryStatus(status)] += n
    (leased,) = connection.execute(LEASED_SINCE, (since,)).fetchone()
    counts[DeliveryStatus.leased] = leased
    counts[DeliveryStatus.pending] -= leased
    return dict(counts)


def read_chain(connection: sqlite3.Connection, ends: Ends) -> Iterator[ChainEntry]:
    found = connection.execute(
        "SELECT n, at, actor, act, target, detail, coalesce(hash, x'') FROM audit WHERE n > ? ORDER BY n",
        (ends.before_first,),
    )
    return map(ChainEntry._make, found)


HISTORY: Final = """
SELECT t.name, r.since, r.address FROM recipients r JOIN destinations t ON t.id = r.destination_id ORDER BY r.since
"""
FIRST: Final = "SELECT started_at FROM attempts WHERE delivery_id = ? ORDER BY fence LIMIT 1"


def _count_moved(connection: sqlite3.Connection, deliveries: Iterable[tuple[bytes, str]]) -> dict[str, int]:
    """Count, by destination, the deliveries among these that first went to another address."""
    history: defaultdict[str, list[tuple[Micros, bytes]]] = defaultdict(list)
    for name, since, address in connection.execute(HISTORY):
        history[name].append((since, address))
    moved = {name: addresses for name, addresses in history.items() if len(addresses) > 1}
    found: Counter[str] = Counter()
    for delivery_id, name in deliveries if moved else ():
        first = connection.execute(FIRST, (delivery_id,)).fetchone() if name in moved else None
        place = 0 if first is None else bisect_right(moved[name], first[0], key=lambda one: one[0])
        if place and moved[name][place - 1][1] != moved[name][-1][1]:
            found[name] += 1
    return dict(found)
