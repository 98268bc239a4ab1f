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
from itertools import chain
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
    ChartMark,
    Check,
    DefinitionChanges,
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
    Noun,
    Outcome,
    Outlook,
    Page,
    PlannedFor,
    Rejection,
    ReplayId,
    ReplayItem,
    ReplayPlan,
    ReplayState,
    StoredArrival,
    StoredAttempt,
    StoredDefinition,
    StoredDelivery,
    StoredMedia,
    StoredReplay,
    StoredWorker,
    Total,
    count_hours,
    last_delivery_of,
)
from oncehook.store.audit import ChainEntry, Ends, check_chain
from oncehook.store.base import KEPT_ARRIVALS, MOST_DECRYPTED, MOST_DECRYPTED_BYTES, NameIds, Series
from oncehook.store.checks import LEVELS, Tally, conservation, encryption
from oncehook.store.cipher import Cipher
from oncehook.store.filters import (
    LOOKED_AT,
    LOOKED_INTO,
    MOST_COUNTED,
    STATUS,
    UNFINISHED,
    Dialect,
    encode_clauses,
    merge_pages,
)
from oncehook.store.sqlite import definitions
from oncehook.store.sqlite.connection import (
    EPOCH,
    MINUTE,
    NEVER,
    SECOND,
    LookUp,
    Micros,
    moment,
    moment_or_none,
    teach,
    to_micros,
)
from oncehook.store.sqlite.intake import DETAIL_COLUMNS, KEPT, read_details
from oncehook.store.sqlite.queue import next_due

# Walks down the path of each clause that must hold through objects and arrays; negated ones are left to Python. CASE,
# unlike AND, keeps bodies that are not JSON away from functions that would raise, and most bodies away from Python. The
# cast makes text of the bytes, which newer releases would take for their own binary JSON; without the plus, the cast
# would make numbers text. Numbers are compared roughly, so that rather too many match (their digits may be read
# slightly differently), and Python decides. Times 1.0, because abs() of the least integer is an error.
SAYS: Final = """
AND (:clauses IS NULL OR CASE WHEN substr(e.body, 1, 4) = x'ff4f4845' THEN encrypted_says(e.body, e.id, :clauses)
WHEN :required IS NULL THEN body_says(e.body, :clauses)
WHEN NOT json_valid(CAST(e.body AS TEXT)) THEN 0 WHEN (
  WITH RECURSIVE walk (clause, step, kind, value) AS (
    SELECT clause.key, 0, 'object', +CAST(e.body AS TEXT) FROM json_each(:required) clause
    UNION ALL
    SELECT walk.clause, walk.step + 1, member.type, member.value FROM walk, json_each(walk.value) member
    WHERE walk.kind IN ('object', 'array')
      AND CAST(member.key AS TEXT) = json_extract(:required, '$[' || walk.clause || '].path[' || walk.step || ']')
  ), asked (clause, steps, sign, value, number, near) AS (
    SELECT key, json_array_length(value, '$.path'), json_extract(value, '$.sign'), json_extract(value, '$.value'),
      json_extract(value, '$.number'), abs(1.0 * json_extract(value, '$.number')) * 1e-12
    FROM json_each(:required) clause
  )
  SELECT count(DISTINCT asked.clause) FROM asked, walk
  WHERE walk.clause = asked.clause AND walk.step = asked.steps AND CASE
    WHEN walk.kind IN ('object', 'array') THEN 0
    WHEN walk.kind NOT IN ('integer', 'real') THEN
      asked.sign = '=' AND asked.value = CASE walk.kind WHEN 'text' THEN walk.value ELSE walk.kind END
    WHEN asked.sign IN ('>', '>=') THEN walk.value >= asked.number - asked.near
    WHEN asked.sign IN ('<', '<=') THEN walk.value <= asked.number + asked.near
    ELSE abs(1.0 * (walk.value - asked.number)) <= asked.near END
) < json_array_length(:required) THEN 0 ELSE body_says(e.body, :clauses) END)
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
  UNION ALL SELECT substr(head, 1, 9) FROM rejections UNION ALL SELECT substr(body, 1, 9) FROM rejections
) WHERE length(value) > 0 AND substr(value, 1, 5) <> x'ff4f484502' GROUP BY key
"""

# Rows whose body is a reference to an object. Arrivals have no index by id: they are asked only for what is no event's.
_REFERRING: Final = (
    LookUp("SELECT id, substr(body, 1, 5) = x'ff4f484502' FROM events WHERE id IN"),
    LookUp("SELECT id, substr(body, 1, 5) = x'ff4f484502' FROM batches WHERE id IN"),
    LookUp("SELECT id, coalesce(substr(body, 1, 5) = x'ff4f484502', 0) FROM arrivals WHERE id IN"),
)
_REFERENCES: Final = """
SELECT id, body FROM (
  SELECT id, body FROM events WHERE id > ?1 AND substr(body, 1, 5) = x'ff4f484502'
  UNION ALL SELECT id, body FROM batches WHERE id > ?1 AND substr(body, 1, 5) = x'ff4f484502'
  UNION ALL SELECT id, body FROM arrivals WHERE id > ?1 AND substr(body, 1, 5) = x'ff4f484502'
) ORDER BY id LIMIT ?2
"""

_MEDIA: Final = "SELECT n, digest, size, type, filename FROM media WHERE event_id = ? ORDER BY n"
_KEPT_MEDIA: Final = LookUp("SELECT DISTINCT digest FROM media WHERE digest IN")


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
    "left": "SELECT delivery_id AS id FROM replay_items WHERE replay_id = :left_of"
    " AND delivery_id >= :low AND delivery_id < :high ORDER BY delivery_id DESC" + _LOOK,
    "subject": "SELECT w.id FROM events x CROSS JOIN deliveries w ON w.id > x.id"
    " AND w.id <= CAST(substr(x.id, 1, 13) || x'ffffff' AS BLOB)"
    " WHERE x.subject = :subject AND x.id >= :low_event AND x.id < :high AND w.id >= :low AND w.id < :high"
    " ORDER BY w.id DESC" + _LOOK,
    "account": "SELECT w.id FROM events x CROSS JOIN deliveries w ON w.id > x.id"
    " AND w.id <= CAST(substr(x.id, 1, 13) || x'ffffff' AS BLOB)"
    " WHERE x.account = :account AND x.id >= :low_event AND x.id < :high AND w.id >= :low AND w.id < :high"
    " ORDER BY w.id DESC" + _LOOK,
}
_OF_EVENTS: Final = "SELECT CAST(substr(id, 1, 13) || x'000000' AS BLOB) AS id FROM ("
# The last four may return an event more than once; `_distinct` removes the repetitions.
_EVENTS: Final = {
    "all": "SELECT id FROM events WHERE id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "source": "SELECT id FROM events WHERE source_id = :source_id AND id >= :low AND id < :high ORDER BY id DESC"
    + _LOOK,
    "subject": "SELECT id FROM events WHERE subject = :subject AND id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "copies": "SELECT event_id AS id FROM copies WHERE event_id >= :low AND event_id < :high ORDER BY event_id DESC"
    + _LOOK,
    "account": "SELECT id FROM events WHERE account = :account AND id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "unfinished": _OF_EVENTS + _DELIVERIES["unfinished"] + ")",
    "leased": _OF_EVENTS + _DELIVERIES["leased"] + ")",
    "replay": _OF_EVENTS + _DELIVERIES["replay"] + ")",
    "left": _OF_EVENTS + _DELIVERIES["left"] + ")",
}
_FAR: Final = " OFFSET :looked_at - 1"


def encode_accounts(accounts: Sequence[str]) -> str:
    """Encode accounts as one text to search in, between line ends: no id contains one."""
    return "\n" + "\n".join(accounts) + "\n"


# -- what must hold ------------------------------------------------------------------------------

_ARRIVALS: Final = "coalesce((SELECT c.n FROM copies c WHERE c.event_id = e.id), 1)"
_SQL: Final = Dialect(
    {
        "ids": "d.id = :ids",
        "sources": "instr(:sources, ',' || e.source_id || ',')",
        "destinations": "instr(:destinations, ',' || d.destination_id || ',')",
        "accounts": "instr(:accounts, char(10) || e.account || char(10))",
        "type": "e.type GLOB :type",
        "arrivals_above": _ARRIVALS + " > :arrivals_above",
        "arrivals_below": _ARRIVALS + " < :arrivals_below",
        "outcome": "EXISTS (SELECT 1 FROM copies c WHERE c.event_id = e.id"
        " AND CASE :outcome WHEN 'conflict' THEN c.conflict ELSE c.duplicate END IS NOT NULL)",
    },
    "LIKE :text ESCAPE '!'",
    ("json_each(", ") n"),
    negated_words={
        "ids": "hex(d.id) = n.value",
        "event_id": "hex(e.id) = n.value",
        "replay_id": "hex(d.replay_id) = n.value",
    },
    encode_id=bytes,
    encode_text=str,
    encode_type=lambda pattern: pattern.replace("[", "[[]"),
    encode_time=to_micros,
    encode_list=lambda values: json.dumps([one.hex().upper() if isinstance(one, bytes) else one for one in values]),
    encode_accounts=encode_accounts,
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
_EXCLUDED: Final = " AND " + _SQL.NOT_OF_EVENT + " AND " + _SQL.NOT_OF_DELIVERY
_EVENTS_OF: Final = (
    ") f CROSS JOIN events e ON e.id = f.id CROSS JOIN sources s ON s.id = e.source_id"
    + " LEFT JOIN copies c ON c.event_id = e.id WHERE "
    + _SQL.OF_EVENT
)
_ITS_DELIVERIES: Final = "EXISTS (SELECT 1 FROM deliveries d" + _HEAD + " WHERE " + _OF_THIS_EVENT
_SUCH_A_DELIVERY: Final = _ITS_DELIVERIES + " AND " + _SQL.OF_DELIVERY + " AND " + _SQL.DELIVERY_SAYS
_EVENT_MATCHES: Final = (
    _EVENTS_OF
    + " AND (NOT :asks_deliveries AND (:text IS NULL OR "
    + _SQL.EVENT_SAYS
    + ") OR (:asks_deliveries OR :text IS NOT NULL) AND "
    + _SUCH_A_DELIVERY
    + "))"
)
# An event without deliveries is not excluded by a condition on deliveries.
_EVENT_MATCHES_CLOSELY: Final = (
    _EVENTS_OF
    + " AND "
    + _SQL.NOT_OF_EVENT
    + " AND (NOT :asks_deliveries AND (:text IS NULL OR "
    + _SQL.EVENT_SAYS
    + ") AND (NOT :denies_deliveries OR NOT "
    + _ITS_DELIVERIES
    + ")) OR (:asks_deliveries OR :denies_deliveries OR :text IS NOT NULL) AND "
    + _SUCH_A_DELIVERY
    + " AND "
    + _SQL.NOT_OF_DELIVERY
    + "))"
    + SAYS
)

_SHOWN: Final = """
SELECT d.id, d.event_id, s.name, t.name, e.type, e.key, e.subject, d.status, d.note, d.run, d.attempts, d.category,
       d.last_status, d.last_error, e.received_at, d.settled_at, d.last_replay_at, d.replay_id, d.reason,
       h.delivery_id, h.carries, h.leased, h.due_at, h.attempts, d.seq, e.account
FROM (
"""
_SELECTED: Final = "SELECT d.id, d.seq, " + STATUS + ", t.name, e.received_at, d.note, d.category FROM ("
_LISTED: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks,
       CASE substr(e.body, 1, 5) WHEN x'ff4f484501' THEN length(e.body) - 49
         WHEN x'ff4f484502' THEN CAST(CAST(substr(e.body, 38) AS TEXT) AS INTEGER) ELSE length(e.body) END,
       coalesce(c.n, 1), c.conflict IS NOT NULL, e.account
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
    SELECT: str
    """The columns of deliveries that a replay or a discard needs; ids of events, for their number."""


def _list_deliveries(rows: str, closely: str = "") -> ListStatements:
    return ListStatements(
        LIST=_SHOWN + rows + _DELIVERY_MATCHES + closely,
        FAR=rows + _FAR,
        WEIGH=_WEIGH + rows + _WEIGHED,
        SELECT=_SELECTED + rows + _DELIVERY_MATCHES + closely,
    )


def _list_events(rows: str, looked_at: str, matches: str) -> ListStatements:
    return ListStatements(
        LIST=_LISTED + rows + matches,
        FAR=looked_at + _FAR,
        WEIGH=_WEIGH + rows + _WEIGHED,
        SELECT="SELECT e.id FROM (" + rows + matches,
    )


# Separate statements search bodies and exclude, so that other queries do not pay for it.
DELIVERIES: Final = {name: _list_deliveries(rows) for name, rows in _DELIVERIES.items()}
DELIVERIES_CLOSELY: Final = {name: _list_deliveries(rows, _EXCLUDED + SAYS) for name, rows in _DELIVERIES.items()}
_DELIVERIES_LOOKED_AT: Final = {name: _DELIVERIES[name] for name in ("unfinished", "leased", "replay", "left")}
EVENTS: Final = {
    name: _list_events(rows, _DELIVERIES_LOOKED_AT.get(name, rows), _EVENT_MATCHES) for name, rows in _EVENTS.items()
}
EVENTS_CLOSELY: Final = {
    name: _list_events(rows, _DELIVERIES_LOOKED_AT.get(name, rows), _EVENT_MATCHES_CLOSELY)
    for name, rows in _EVENTS.items()
}


@dataclass(slots=True)
class Question:
    """A filter's parameters, and the statements that answer it."""

    way: ListStatements
    values: dict[str, Any]


def _delivery_question(name: str, values: dict[str, Any]) -> Question:
    return Question((DELIVERIES_CLOSELY if values["closely"] else DELIVERIES)[name], values)


def _event_question(name: str, values: dict[str, Any]) -> Question:
    return Question((EVENTS_CLOSELY if values["closely"] else EVENTS)[name], values)


def ask_deliveries(connection: sqlite3.Connection, filter: Filter, before: bytes | None = None) -> Question:
    """Choose the statements for the deliveries of a filter. Its `ids` are queried one by one: see `one_of`."""
    values = _values(connection, filter)
    low, high = _bounds(connection, filter, before)
    if filter.event_id is not None:
        low, high = max(low, filter.event_id), min(high, last_delivery_of(filter.event_id) + b"\x00")
    values |= {"low": low, "low_event": low[:EVENT_BYTES], "high": high, "looked_at": LOOKED_AT}
    if filter.event_id is not None:
        return _delivery_question("all", values)
    # An account has few events among many, while the unfinished deliveries of all accounts may be many.
    if filter.account is not None and filter.subject is None and filter.replay_id is None:
        return _delivery_question("account", values)
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
    if filter.account is not None and filter.replay_id is None:
        return _event_question("account", values)
    way = _way(filter) or ("copies" if filter.came_again else None)
    return _event_question(way or ("source" if filter.source is not None else "all"), values)


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
    if filter.left_of is not None:
        return "left"
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
    return _encode_ids(connection, "SELECT id FROM sources WHERE name = ?", sources)


def _encode_ids(connection: sqlite3.Connection, statement: str, names: Collection[str]) -> str:
    return f",{','.join(str(_find_id(connection, statement, name)) for name in names)},"


def _values(connection: sqlite3.Connection, filter: Filter) -> dict[str, Any]:
    values = _single_values(connection, filter)
    excluded = [_single_values(connection, one) | {"ids": one.ids and one.ids[0]} for one in filter.without or ()]
    required = [clause for clause in filter.body or () if not clause.negated]
    values |= _SQL.exclude(excluded)
    values["required"] = encode_clauses(required, str) if required else None
    values["closely"] = bool(excluded or filter.body)
    return values


def _single_values(connection: sqlite3.Connection, filter: Filter) -> dict[str, Any]:
    return _SQL.values(
        filter,
        _find_id(connection, "SELECT id FROM sources WHERE name = ?", filter.source),
        None if filter.sources is None else encode_sources(connection, filter.sources),
        _find_id(connection, _DESTINATION_ID, filter.destination),
        None if filter.destinations is None else _encode_ids(connection, _DESTINATION_ID, filter.destinations),
    )


_DESTINATION_ID: Final = "SELECT id FROM destinations WHERE name = ?"


def _find_id(connection: sqlite3.Connection, statement: str, name: str | None) -> int | None:
    """Return the id of a name; for an unknown name, an id that nothing has."""
    if name is None:
        return None
    row = connection.execute(statement, (name,)).fetchone()
    return -1 if row is None else int(row[0])


# -- answers -------------------------------------------------------------------------------------


def select_deliveries(
    connection: sqlite3.Connection, filter: Filter, *, decrypts: bool = False
) -> Iterator[tuple[bytes, int, str, str, int, str | None, str | None]]:
    """Yield all deliveries of a filter, however many: id, seq, status, destination, received at, note, category.

    `decrypts`: bodies may be encrypted. Raises QueryTooWide where decrypting would take too long.
    """
    alternatives = filter.alternatives()
    found = (_select_alternative(connection, one, decrypts) for one in alternatives)
    if len(alternatives) == 1:
        yield from next(found)
        return
    seen: set[bytes] = set()
    for row in chain.from_iterable(found):
        if row[0] not in seen:
            seen.add(row[0])
            yield row


def _select_alternative(
    connection: sqlite3.Connection, filter: Filter, decrypts: bool
) -> Iterator[tuple[bytes, int, str, str, int, str | None, str | None]]:
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
    category, last_status, last_error, received_at, settled_at, last_replay_at, replay_id, reason, *rest = rest
    *head, _seq, account = rest
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
        account=account,
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
# The same subject of the same source and account at the same destination: before it, after it, and those waiting now.
EARLIER: Final = """
SELECT d.id, d.seq FROM events e CROSS JOIN deliveries d ON d.id = CAST(substr(e.id, 1, 13) || substr(?1, 14) AS BLOB)
WHERE e.subject = ?2 AND e.id <= ?3 AND e.source_id = ?4 AND e.account IS ?6 ORDER BY e.id DESC LIMIT ?5
"""
LATER: Final = """
SELECT d.id, d.seq FROM events e CROSS JOIN deliveries d ON d.id = CAST(substr(e.id, 1, 13) || substr(?1, 14) AS BLOB)
WHERE e.subject = ?2 AND e.id > ?3 AND e.source_id = ?4 AND e.account IS ?6 ORDER BY e.id LIMIT ?5
"""
DEAD: Final = """
SELECT t.name, d.last_status, d.last_error, d.reason, d.settled_at, d.id,
  coalesce((SELECT min(a.ended_at) FROM attempts a WHERE a.delivery_id = d.id AND a.outcome = 'dead'), d.settled_at)
FROM deliveries d JOIN destinations t ON t.id = d.destination_id
WHERE d.status <> 'done' AND d.status = 'dead' AND (?1 IS NULL OR t.name = ?1)
AND (?3 IS NULL OR (SELECT instr(?3, ',' || e.source_id || ',') FROM events e WHERE e.id = d.event_id))
AND (?4 IS NULL OR (SELECT instr(?4, char(10) || e.account || char(10)) FROM events e WHERE e.id = d.event_id))
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
        ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 3 AND due_at <= ?1 AND NOT leased
        ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 4 AND due_at <= ?1 AND NOT leased
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
COUNT_OF_ACCOUNTS: Final = """
SELECT t.name, CASE WHEN d.status <> 'pending' THEN d.status
       WHEN h.leased AND (h.delivery_id = d.id OR h.carries = d.id) THEN 'leased' ELSE 'pending' END, count(*)
FROM json_each(?4) a CROSS JOIN events e ON e.account = a.value CROSS JOIN sources s ON s.id = e.source_id
CROSS JOIN deliveries d ON d.id > e.id AND d.id <= CAST(substr(e.id, 1, 13) || x'ffffff' AS BLOB)
CROSS JOIN destinations t ON t.id = d.destination_id
LEFT JOIN heads h ON h.subject_key = coalesce(d.subject_key, d.id) AND d.status = 'pending'
WHERE (?1 IS NULL OR s.name IN (SELECT value FROM json_each(?1))) AND e.id >= ?2 AND e.received_at >= ?3 GROUP BY 1, 2
"""
# What arrived for some accounts, by source: the counters are not kept by account.
FIGURES_OF: Final = """
SELECT s.name, count(*), sum(coalesce(c.n, 1) - 1), sum((SELECT count(*) FROM arrivals r WHERE r.event_id = e.id
  AND r.n <= c.conflict AND r.outcome = 'conflict'))
FROM json_each(?4) a CROSS JOIN events e ON e.account = a.value CROSS JOIN sources s ON s.id = e.source_id
LEFT JOIN copies c ON c.event_id = e.id
WHERE (?1 IS NULL OR s.name IN (SELECT value FROM json_each(?1))) AND e.id >= ?2 AND e.received_at >= ?3 GROUP BY 1
"""
SERIES: Final = """
SELECT what, minute / ?2 * ?2, sum(n) FROM counters WHERE minute >= ?1
AND (?3 IS NULL OR source_id = (SELECT id FROM sources WHERE name = ?3))
AND (?4 IS NULL OR destination_id = (SELECT id FROM destinations WHERE name = ?4))
GROUP BY 1, 2 ORDER BY 1, 2
"""

_OF_SOURCE: Final = "SELECT id FROM events WHERE source_id = (SELECT id FROM sources WHERE name = ?1) AND id "
BEFORE: Final = _OF_SOURCE + "< ?2 ORDER BY id DESC LIMIT 1"
AFTER: Final = _OF_SOURCE + "> ?2 ORDER BY id LIMIT 1"
DESTINATION_SERIES: Final = """
SELECT d.name, c.what, c.minute / ?2 * ?2, sum(c.n) FROM counters c JOIN destinations d ON d.id = c.destination_id
WHERE c.minute >= ?1 GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""
_ITEM_OUTCOME: Final = "coalesce(i.outcome, CASE WHEN i.fed_at IS NULL THEN 'left' ELSE 'running' END)"
REPLAY_ITEMS: Final = (
    "SELECT i.n, i.delivery_id, " + _ITEM_OUTCOME + ", e.type, e.subject, e.received_at,"
    " CASE WHEN d.status = 'dead' THEN d.last_error END FROM replay_items i"
    " LEFT JOIN deliveries d ON d.id = i.delivery_id LEFT JOIN events e ON e.id = d.event_id"
    " WHERE i.replay_id = ? AND i.n > ? ORDER BY i.n LIMIT ?"
)
REPLAY_OUTCOMES: Final = (
    "SELECT substr(i.delivery_id, 14), " + _ITEM_OUTCOME + ", count(*) FROM replay_items i"
    " WHERE i.replay_id = ? GROUP BY 1, 2"
)


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

    async def events_beside(self, event_id: bytes, source: str) -> tuple[EventId | None, EventId | None]:
        def read(connection: sqlite3.Connection) -> tuple[EventId | None, EventId | None]:
            asked = (source, event_id)
            before, after = connection.execute(BEFORE, asked).fetchone(), connection.execute(AFTER, asked).fetchone()
            return before and EventId(before[0]), after and EventId(after[0])

        return await self.read(read)

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

    async def find_references(self, ids: Sequence[bytes]) -> dict[bytes, bool]:
        def find(connection: sqlite3.Connection) -> dict[bytes, bool]:
            found: dict[bytes, bool] = {}
            for look_up in _REFERRING:
                left = [id_ for id_ in ids if id_ not in found]
                found |= {id_: bool(refers) for id_, refers in look_up(connection, left)}
            return found

        return await self.read(find)

    async def list_references(self, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        return await self.read(lambda c: c.execute(_REFERENCES, (after, limit)).fetchall())

    async def media_of(self, event_id: bytes) -> list[StoredMedia]:
        rows = await self.read(lambda c: c.execute(_MEDIA, (event_id,)).fetchall())
        return [StoredMedia(*row) for row in rows]

    async def find_media(self, digests: Sequence[bytes]) -> set[bytes]:
        return {digest for (digest,) in await self.read(lambda c: _KEPT_MEDIA(c, digests))}

    async def recent_rejections(self, limit: int = 50, *, before: int | None = None) -> list[Rejection]:
        rows = await self.read(
            lambda c: c.execute(
                "SELECT source, at, code, reason, peer, size, id, head, body, n FROM rejections"
                " WHERE ?1 IS NULL OR n < ?1 ORDER BY n DESC LIMIT ?2",
                (before, limit),
            ).fetchall()
        )
        found = [Rejection(*(r[0], moment(r[1]), *r[2:6], ArrivalId(r[6]), *r[7:])) for r in rows]
        return [self.cipher.read_rejection(one) for one in found]

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
        def find(connection: sqlite3.Connection) -> Page[ListedEvent]:
            pages = [_find_events(connection, one, before, limit) for one in filter.alternatives()]
            return merge_pages(pages, limit)

        return await self.read(find)

    async def count_events(self, filter: Filter) -> Total:
        return await self.read(lambda c: _count_events(c, filter))

    async def get_delivery(self, delivery_id: bytes) -> StoredDelivery | None:
        return await self.read(lambda c: get_delivery(c, delivery_id))

    async def find_deliveries(
        self, filter: Filter, *, before: bytes | None = None, limit: int = 50
    ) -> Page[StoredDelivery]:
        def find(connection: sqlite3.Connection) -> Page[StoredDelivery]:
            pages = [_find_deliveries(connection, one, before, limit) for one in filter.alternatives()]
            return merge_pages(pages, limit)

        return await self.read(find)

    async def attempts_of(self, delivery_id: bytes) -> list[StoredAttempt]:
        rows = await self.read(lambda c: c.execute(ATTEMPTS, (delivery_id,)).fetchall())
        return [self.cipher.read_attempt(_read_attempt(row)) for row in rows]

    async def subject_of(self, delivery_id: bytes, around: int = 10) -> list[StoredDelivery]:
        return await self.read(lambda c: _subject_of(c, delivery_id, around))

    async def causes(
        self,
        destination: str | None = None,
        sources: Collection[str] | None = None,
        accounts: Collection[str] | None = None,
    ) -> list[Cause]:
        def read(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            asked = None if sources is None else encode_sources(connection, sources)
            whose = None if accounts is None else encode_accounts(list(accounts))
            return connection.execute(DEAD, (destination, _CAUSES_OF, asked, whose)).fetchall()

        return _group_causes(await self.read(read), self.now())

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

    async def replay_items(self, replay_id: bytes, *, after: int = 0, limit: int = 50) -> list[ReplayItem]:
        def read(connection: sqlite3.Connection) -> list[ReplayItem]:
            names = {number: name for name, number in read_name_ids(connection).destinations.items()}
            return [
                ReplayItem(
                    *(n, DeliveryId(id_), names.get(DeliveryId(id_).destination_id, "?"), outcome, type_, subject),
                    moment_or_none(received_at),
                    error,
                )
                for n, id_, outcome, type_, subject, received_at, error in connection.execute(
                    REPLAY_ITEMS, (replay_id, after, limit)
                )
            ]

        return await self.read(read)

    async def replay_outcomes(self, replay_id: bytes) -> dict[str, dict[str, int]]:
        def read(connection: sqlite3.Connection) -> dict[str, dict[str, int]]:
            names = {number: name for name, number in read_name_ids(connection).destinations.items()}
            found: defaultdict[str, dict[str, int]] = defaultdict(dict)
            for number, outcome, n in connection.execute(REPLAY_OUTCOMES, (replay_id,)):
                found[names.get(int.from_bytes(number), "?")][outcome] = n
            return dict(found)

        return await self.read(read)

    async def chart_marks(self, since: datetime) -> list[ChartMark]:
        rows = await self.read(
            lambda c: c.execute(
                "SELECT at, text, actor FROM chart_marks WHERE at >= ? ORDER BY n", (to_micros(since),)
            ).fetchall()
        )
        return [ChartMark(moment(at), text, actor) for at, text, actor in rows]

    async def sizes(self) -> list[tuple[datetime, int]]:
        rows = await self.read(lambda c: c.execute("SELECT hour, bytes FROM sizes ORDER BY hour").fetchall())
        return [(moment(hour), size) for hour, size in rows]

    async def next_due(self, destination_ids: Sequence[int], since: datetime | None = None) -> Outlook:
        now = self.now()
        moment = None if since is None else to_micros(since)
        return await self.read(lambda c: next_due(c, now, destination_ids, moment))

    async def find_definitions(self, noun: Noun, names: Collection[str]) -> list[StoredDefinition]:
        return await self.read(lambda c: definitions.find_definitions(c, noun, names))

    async def find_sources(self, addresses: Collection[bytes]) -> list[StoredDefinition]:
        return await self.read(lambda c: definitions.find_sources(c, addresses))

    async def find_routes(self, sources: Collection[str]) -> list[StoredDefinition]:
        return await self.read(lambda c: definitions.find_routes(c, sources))

    async def find_routes_to(self, destinations: Collection[str]) -> list[StoredDefinition]:
        return await self.read(lambda c: definitions.find_routes_to(c, destinations))

    async def find_destinations(self, ids: Collection[int]) -> list[StoredDefinition]:
        return await self.read(lambda c: definitions.find_destinations(c, ids))

    async def find_destination_names(self, ids: Collection[int]) -> dict[int, str]:
        return await self.read(lambda c: definitions.find_destination_names(c, ids))

    async def list_definitions(
        self, noun: Noun, *, account: str | None = None, after: str = "", limit: int = 50
    ) -> list[StoredDefinition]:
        return await self.read(lambda c: definitions.list_definitions(c, noun, account, after, limit))

    async def find_accounts(self, names: Collection[str]) -> dict[str, StoredDefinition]:
        return await self.read(lambda c: definitions.find_accounts(c, names))

    async def aliases_of(self, accounts: Collection[str]) -> dict[str, list[str]]:
        return await self.read(lambda c: definitions.aliases_of(c, accounts))

    async def was_deleted(self, noun: Noun, name: str) -> bool:
        return await self.read(lambda connection: definitions.was_deleted(connection, noun, name))

    async def find_kept_sources(self) -> list[StoredDefinition]:
        return await self.read(definitions.find_kept_sources)

    async def definition_changes(self, since: int) -> DefinitionChanges:
        return await self.read(lambda c: definitions.definition_changes(c, since))

    async def levels(self) -> dict[str, Level]:
        now = self.now()
        return await self.read(lambda c: _levels(c, now))

    async def count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        return await self.read(lambda c: _count_since(c, to_micros(since)))

    async def count_of(
        self,
        sources: Collection[str] | None,
        since: datetime | None = None,
        accounts: Collection[str] | None = None,
    ) -> dict[str, dict[DeliveryStatus, int]]:
        asked = _scope(sources, since)
        found: defaultdict[str, dict[DeliveryStatus, int]] = defaultdict(dict)
        if accounts is None:
            rows = await self.read(lambda c: c.execute(COUNT_OF, asked).fetchall())
        else:
            whose = (*asked, json.dumps(list(accounts)))
            rows = await self.read(lambda c: c.execute(COUNT_OF_ACCOUNTS, whose).fetchall())
        for name, status, n in rows:
            found[name][DeliveryStatus(status)] = n
        return dict(found)

    async def figures_of(
        self, accounts: Collection[str], since: datetime, sources: Collection[str] | None = None
    ) -> Figures:
        asked = (*_scope(sources, since), json.dumps(list(accounts)))
        return Figures.of_events(await self.read(lambda c: c.execute(FIGURES_OF, asked).fetchall()))

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> Series:
        width = max(int(step), 1) * SECOND
        start = to_micros(since) // width * width
        rows = await self.read(lambda c: c.execute(SERIES, (start, width, source, destination)).fetchall())
        flows: defaultdict[str, list[tuple[datetime, int]]] = defaultdict(list)
        for what, at, n in rows:
            if what not in LEVELS:
                flows[what].append((moment(at), n))
        return dict(flows)

    async def destination_series(self, since: datetime, step: float) -> dict[str, Series]:
        width = max(int(step), 1) * SECOND
        start = to_micros(since) // width * width
        found: defaultdict[str, defaultdict[str, list[tuple[datetime, int]]]] = defaultdict(lambda: defaultdict(list))
        for name, what, at, n in await self.read(lambda c: c.execute(DESTINATION_SERIES, (start, width)).fetchall()):
            found[name][what].append((moment(at), n))
        return {name: dict(flows) for name, flows in found.items()}

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


def _count_events(connection: sqlite3.Connection, filter: Filter) -> Total:
    found: set[bytes] = set()
    is_exact = True
    for one in filter.alternatives():
        asked = ask_events(connection, one)
        if one.ids is not None:
            found.update(row[0] for row in _events_of(connection, asked, one.ids))
            continue
        weigh(connection, asked)
        way = asked.way
        for (event_id,) in (cursor := connection.execute(way.SELECT, asked.values)):
            found.add(event_id)
            if len(found) > MOST_COUNTED:
                cursor.close()
                return Total(MOST_COUNTED, is_exact=False)
        is_exact = is_exact and connection.execute(way.FAR, asked.values).fetchone() is None
    return Total(len(found), is_exact)


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
    id_, source, type_, key, subject, received_at, event_at, marks, size, copies, conflicts, account = row
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
        has_conflict=bool(conflicts),
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
        account=account,
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
        "SELECT e.id, e.subject, e.source_id, e.account, d.seq, d.subject_key"
        " FROM deliveries d JOIN events e ON e.id = d.event_id WHERE d.id = ?",
        (delivery_id,),
    ).fetchone()
    if mine is None:
        return []
    event_id, subject, source_id, account, seq, queue_key = mine
    about = (delivery_id, subject, event_id, source_id, _NEIGHBOURS, account)
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


def _scope(sources: Collection[str] | None, since: datetime | None) -> tuple[str | None, bytes, Micros]:
    """Return the parameters of counts that are limited to some sources and a time."""
    start = 0 if since is None else to_micros(since)
    return None if sources is None else json.dumps(list(sources)), id_floor(start // 1000 - SLACK), start


def _group_causes(rows: Sequence[tuple[Any, ...]], now: Micros) -> list[Cause]:
    groups: defaultdict[tuple[str, str], list[tuple[Micros, bytes, Micros]]] = defaultdict(list)
    for destination, status, error, reason, settled_at, id_, first_at in rows:
        groups[destination, _cause(status, error, reason)].append((settled_at, id_, first_at))
    causes = [
        Cause(
            *(destination, cause, len(ones), moment(min(one[2] for one in ones)), moment(max(ones)[0])),
            DeliveryId(max(ones)[1]),
            count_hours((now - one[2]) // (3600 * SECOND) for one in ones),
        )
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
    parts: Counter[tuple[str, DeliveryStatus, bool, bool]] = Counter()
    for row in select_deliveries(connection, filter, decrypts=decrypts):
        is_taken = is_replayable(row[2], force, row[5])
        parts[row[3], DeliveryStatus(row[2]), is_taken, row[6] == Category.permanent] += 1
        if is_taken:
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
        parts=PlannedFor.of((*of, n) for of, n in parts.items()),
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
