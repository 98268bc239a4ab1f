"""Which deliveries and events a `Filter` means: constant statements, one for each way to get at them by an index.

Comes in: a connection and a filter. Goes out: rows, newest first, after a bounded look. Called by `show` for lists, and
by `replay` for what a replay or a discard means.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from oncehook import clock
from oncehook.errors import QueryTooWide
from oncehook.model import (
    EVENT_BYTES,
    DeliveryId,
    DeliveryStatus,
    EventId,
    Filter,
    ReplayId,
    StoredDelivery,
    last_delivery_of,
)
from oncehook.store.base import MOST_DECRYPTED, MOST_DECRYPTED_BYTES
from oncehook.store.sqlite import bodies
from oncehook.store.sqlite.intake import to_micros
from oncehook.store.sqlite.look import moment, moment_or_none
from oncehook.store.sqlite.work import NEVER

LOOKED_AT: Final = 20_000
"""Rows that one page of a list looks at, at most; then it says how far it came."""

LOOKED_INTO: Final = 32 << 20
"""Bytes of bodies that one page looks into, at most, where the filter asks for what they say."""

EVERYTHING: Final = 1 << 62

SLACK: Final = 3_600_000
"""Milliseconds by which an id's own time may differ from the time its event was received, by the store's clock."""

_FIRST: Final = b""
"""Smaller than every id."""

LAST: Final = b"\xff" * 17
"""Greater than every id."""

_UNFINISHED: Final = frozenset({DeliveryStatus.pending, DeliveryStatus.dead, DeliveryStatus.discarded})

# -- ways to get at rows, newest first, between two ids --------------------------------------------

# `status <> 'done'` lets SQLite use the partial index.
_UNFINISHED_ONES: Final = (
    "SELECT id FROM deliveries WHERE status <> 'done' AND status = :kept AND id >= :low AND id < :high ORDER BY id DESC"
)
_LEASED_ONES: Final = (
    "SELECT id FROM (SELECT delivery_id AS id FROM heads WHERE leased UNION"
    " SELECT carries FROM heads WHERE leased AND carries IS NOT NULL) WHERE id >= :low AND id < :high ORDER BY id DESC"
)
_REPLAYED_ONES: Final = (
    "SELECT delivery_id AS id FROM replay_items WHERE replay_id = :replay_id"
    " AND delivery_id >= :low AND delivery_id < :high ORDER BY delivery_id DESC"
)
_LOOK: Final = " LIMIT :looked_at"
_DELIVERIES: Final = {
    "all": "SELECT id FROM deliveries WHERE id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "unfinished": _UNFINISHED_ONES + _LOOK,
    "leased": _LEASED_ONES + _LOOK,
    "replay": _REPLAYED_ONES + _LOOK,
    "subject": "SELECT w.id FROM events x CROSS JOIN deliveries w ON w.id > x.id"
    " AND w.id <= CAST(substr(x.id, 1, 13) || x'ffffff' AS BLOB)"
    " WHERE x.subject = :subject AND x.id >= :low_event AND x.id < :high AND w.id >= :low AND w.id < :high"
    " ORDER BY w.id DESC" + _LOOK,
}
# The last three may name an event more than once; who reads them folds that.
_EVENTS: Final = {
    "all": "SELECT id FROM events WHERE id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "source": "SELECT id FROM events WHERE source_id = :source_id AND id >= :low AND id < :high ORDER BY id DESC"
    + _LOOK,
    "subject": "SELECT id FROM events WHERE subject = :subject AND id >= :low AND id < :high ORDER BY id DESC" + _LOOK,
    "unfinished": "SELECT CAST(substr(id, 1, 14) || x'0000' AS BLOB) AS id FROM (" + _UNFINISHED_ONES + _LOOK + ")",
    "leased": "SELECT CAST(substr(id, 1, 14) || x'0000' AS BLOB) AS id FROM (" + _LEASED_ONES + _LOOK + ")",
    "replay": "SELECT CAST(substr(id, 1, 14) || x'0000' AS BLOB) AS id FROM (" + _REPLAYED_ONES + _LOOK + ")",
}
_FAR: Final = " OFFSET :looked_at - 1"
"""Behind the LIMIT of a way: the last row that it looks at, when it looks at that many."""

# -- what must hold ------------------------------------------------------------------------------

_OF_EVENT: Final = """
    (:source_id IS NULL OR e.source_id = :source_id)
AND (:sources IS NULL OR instr(:sources, ',' || e.source_id || ','))
AND (:type IS NULL OR e.type GLOB :type)
AND (:subject IS NULL OR e.subject = :subject) AND (:key IS NULL OR e.key = :key)
AND (:since IS NULL OR e.received_at >= :since) AND (:until IS NULL OR e.received_at < :until)
"""
_OF_DELIVERY: Final = """
    (:only IS NULL OR d.id = :only) AND (:destination_id IS NULL OR d.destination_id = :destination_id)
AND (:status IS NULL OR :status = CASE WHEN d.status <> 'pending' THEN d.status
     WHEN h.leased AND (h.delivery_id = d.id OR h.carries = d.id) THEN 'leased' ELSE 'pending' END)
AND (:category IS NULL OR d.category = :category) AND (:note IS NULL OR d.note = :note)
AND (:lowest_code IS NULL OR d.last_status BETWEEN :lowest_code AND :highest_code)
AND (:above IS NULL OR CASE WHEN h.delivery_id = d.id THEN h.attempts ELSE d.attempts END > :above)
AND (:below IS NULL OR CASE WHEN h.delivery_id = d.id THEN h.attempts ELSE d.attempts END < :below)
AND (:replay_id IS NULL OR d.replay_id = :replay_id) AND (:replayed IS NULL OR d.replay_id IS NOT NULL)
"""
_EVENT_SAYS: Final = "(e.key LIKE :text ESCAPE '!' OR e.subject LIKE :text ESCAPE '!' OR e.type LIKE :text ESCAPE '!')"
_DELIVERY_SAYS: Final = "(:text IS NULL OR d.last_error LIKE :text ESCAPE '!' OR " + _EVENT_SAYS + ")"
_HEAD: Final = " LEFT JOIN heads h ON h.subject_key = coalesce(d.subject_key, d.id) AND d.status = 'pending'"
_OF_THIS_EVENT: Final = "d.id > e.id AND d.id <= CAST(substr(e.id, 1, 13) || x'ffffff' AS BLOB)"

# CROSS JOIN: in the order written, so that rows come as the way brings them.
_DELIVERY_MATCHES: Final = (
    ") f CROSS JOIN deliveries d ON d.id = f.id CROSS JOIN events e ON e.id = d.event_id"
    + " CROSS JOIN sources s ON s.id = e.source_id CROSS JOIN destinations t ON t.id = d.destination_id"
    + _HEAD
    + " WHERE "
    + _OF_EVENT
    + " AND "
    + _OF_DELIVERY
    + " AND "
    + _DELIVERY_SAYS
)
_EVENT_MATCHES: Final = (
    ") f CROSS JOIN events e ON e.id = f.id CROSS JOIN sources s ON s.id = e.source_id"
    + " LEFT JOIN copies c ON c.event_id = e.id WHERE "
    + _OF_EVENT
    + " AND (NOT :asks_deliveries AND (:text IS NULL OR "
    + _EVENT_SAYS
    + ") OR (:asks_deliveries OR :text IS NOT NULL) AND EXISTS (SELECT 1 FROM deliveries d"
    + _HEAD
    + " WHERE "
    + _OF_THIS_EVENT
    + " AND "
    + _OF_DELIVERY
    + " AND "
    + _DELIVERY_SAYS
    + "))"
)

_SHOWN: Final = """
SELECT d.id, d.event_id, s.name, t.name, e.type, e.key, e.subject, d.status, d.note, d.run, d.attempts, d.category,
       d.last_status, d.last_error, e.received_at, d.settled_at, d.last_replay_at, d.replay_id, d.reason,
       h.delivery_id, h.carries, h.leased, h.due_at, h.attempts, d.seq
FROM (
"""
_MEANT: Final = """
SELECT d.id, d.seq, CASE WHEN d.status = 'pending' AND h.leased AND (h.delivery_id = d.id OR h.carries = d.id)
       THEN 'leased' ELSE d.status END, t.name, e.received_at, d.note
FROM (
"""
_LISTED: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks,
       length(e.body) - CASE WHEN substr(e.body, 1, 5) = x'ff4f484501' THEN 49 ELSE 0 END, coalesce(c.n, 1)
FROM (
"""
SHOW_DELIVERIES: Final = {
    "all": _SHOWN + _DELIVERIES["all"] + _DELIVERY_MATCHES,
    "unfinished": _SHOWN + _DELIVERIES["unfinished"] + _DELIVERY_MATCHES,
    "leased": _SHOWN + _DELIVERIES["leased"] + _DELIVERY_MATCHES,
    "replay": _SHOWN + _DELIVERIES["replay"] + _DELIVERY_MATCHES,
    "subject": _SHOWN + _DELIVERIES["subject"] + _DELIVERY_MATCHES,
    "all, body": _SHOWN + _DELIVERIES["all"] + _DELIVERY_MATCHES + bodies.SAYS,
    "unfinished, body": _SHOWN + _DELIVERIES["unfinished"] + _DELIVERY_MATCHES + bodies.SAYS,
    "leased, body": _SHOWN + _DELIVERIES["leased"] + _DELIVERY_MATCHES + bodies.SAYS,
    "replay, body": _SHOWN + _DELIVERIES["replay"] + _DELIVERY_MATCHES + bodies.SAYS,
    "subject, body": _SHOWN + _DELIVERIES["subject"] + _DELIVERY_MATCHES + bodies.SAYS,
}
MEAN_DELIVERIES: Final = {
    "all": _MEANT + _DELIVERIES["all"] + _DELIVERY_MATCHES,
    "unfinished": _MEANT + _DELIVERIES["unfinished"] + _DELIVERY_MATCHES,
    "leased": _MEANT + _DELIVERIES["leased"] + _DELIVERY_MATCHES,
    "replay": _MEANT + _DELIVERIES["replay"] + _DELIVERY_MATCHES,
    "subject": _MEANT + _DELIVERIES["subject"] + _DELIVERY_MATCHES,
    "all, body": _MEANT + _DELIVERIES["all"] + _DELIVERY_MATCHES + bodies.SAYS,
    "unfinished, body": _MEANT + _DELIVERIES["unfinished"] + _DELIVERY_MATCHES + bodies.SAYS,
    "leased, body": _MEANT + _DELIVERIES["leased"] + _DELIVERY_MATCHES + bodies.SAYS,
    "replay, body": _MEANT + _DELIVERIES["replay"] + _DELIVERY_MATCHES + bodies.SAYS,
    "subject, body": _MEANT + _DELIVERIES["subject"] + _DELIVERY_MATCHES + bodies.SAYS,
}
LIST_EVENTS: Final = {
    "all": _LISTED + _EVENTS["all"] + _EVENT_MATCHES,
    "source": _LISTED + _EVENTS["source"] + _EVENT_MATCHES,
    "subject": _LISTED + _EVENTS["subject"] + _EVENT_MATCHES,
    "unfinished": _LISTED + _EVENTS["unfinished"] + _EVENT_MATCHES,
    "leased": _LISTED + _EVENTS["leased"] + _EVENT_MATCHES,
    "replay": _LISTED + _EVENTS["replay"] + _EVENT_MATCHES,
    "all, body": _LISTED + _EVENTS["all"] + _EVENT_MATCHES + bodies.SAYS,
    "source, body": _LISTED + _EVENTS["source"] + _EVENT_MATCHES + bodies.SAYS,
    "subject, body": _LISTED + _EVENTS["subject"] + _EVENT_MATCHES + bodies.SAYS,
    "unfinished, body": _LISTED + _EVENTS["unfinished"] + _EVENT_MATCHES + bodies.SAYS,
    "leased, body": _LISTED + _EVENTS["leased"] + _EVENT_MATCHES + bodies.SAYS,
    "replay, body": _LISTED + _EVENTS["replay"] + _EVENT_MATCHES + bodies.SAYS,
}
FAR_DELIVERY: Final = {
    "all": _DELIVERIES["all"] + _FAR,
    "unfinished": _DELIVERIES["unfinished"] + _FAR,
    "leased": _DELIVERIES["leased"] + _FAR,
    "replay": _DELIVERIES["replay"] + _FAR,
    "subject": _DELIVERIES["subject"] + _FAR,
}
FAR_EVENT: Final = {
    "all": _EVENTS["all"] + _FAR,
    "source": _EVENTS["source"] + _FAR,
    "subject": _EVENTS["subject"] + _FAR,
    "unfinished": _UNFINISHED_ONES + _LOOK + _FAR,
    "leased": _LEASED_ONES + _LOOK + _FAR,
    "replay": _REPLAYED_ONES + _LOOK + _FAR,
}

# How many rows a way brings, and how many of them before their bodies are more than a page looks into.
_WEIGH: Final = """
SELECT count(*), count(*) FILTER (WHERE upto <= :looked_into)
FROM (SELECT sum(length(e.body)) OVER (ORDER BY f.id DESC ROWS UNBOUNDED PRECEDING) AS upto FROM (
"""
_WEIGHED: Final = ") f CROSS JOIN events e ON e.id = CAST(substr(f.id, 1, 14) || x'0000' AS BLOB))"
WEIGH_DELIVERIES: Final = {
    "all": _WEIGH + _DELIVERIES["all"] + _WEIGHED,
    "unfinished": _WEIGH + _DELIVERIES["unfinished"] + _WEIGHED,
    "leased": _WEIGH + _DELIVERIES["leased"] + _WEIGHED,
    "replay": _WEIGH + _DELIVERIES["replay"] + _WEIGHED,
    "subject": _WEIGH + _DELIVERIES["subject"] + _WEIGHED,
}
WEIGH_EVENTS: Final = {
    "all": _WEIGH + _EVENTS["all"] + _WEIGHED,
    "source": _WEIGH + _EVENTS["source"] + _WEIGHED,
    "subject": _WEIGH + _EVENTS["subject"] + _WEIGHED,
    "unfinished": _WEIGH + _EVENTS["unfinished"] + _WEIGHED,
    "leased": _WEIGH + _EVENTS["leased"] + _WEIGHED,
    "replay": _WEIGH + _EVENTS["replay"] + _WEIGHED,
}


@dataclass(slots=True)
class Question:
    """A filter as parameters, and the way to get at what it means."""

    way: str
    values: dict[str, Any]

    @property
    def statement(self) -> str:
        """Its name among the statements: those that look into bodies are others, and cost the rest nothing."""
        return self.way if self.values["clauses"] is None else f"{self.way}, body"


def ask_deliveries(connection: sqlite3.Connection, filter: Filter, before: bytes | None = None) -> Question:
    """How to find the deliveries that a filter means. Its `ids` are asked for one by one: see `one_of`."""
    values = _values(connection, filter)
    low, high = _bounds(connection, filter, before)
    if filter.event_id is not None:
        low, high = max(low, filter.event_id), min(high, last_delivery_of(filter.event_id) + b"\x00")
    values |= {"low": low, "low_event": low[:EVENT_BYTES], "high": high, "looked_at": LOOKED_AT}
    if filter.event_id is not None:
        return Question("all", values)
    return Question(_way(filter) or ("subject" if filter.subject is not None else "all"), values)


def one_of(question: Question, delivery_id: bytes) -> Question | None:
    """The same question about one delivery; None when that is out of its bounds."""
    if not question.values["low"] <= delivery_id < question.values["high"]:
        return None
    return Question("all", question.values | {"low": delivery_id, "high": delivery_id + b"\x00"})


def ask_events(connection: sqlite3.Connection, filter: Filter, before: bytes | None = None) -> Question:
    """How to find the events that a filter means."""
    values = _values(connection, filter)
    low, high = _bounds(connection, filter, before)
    if filter.event_id is not None:
        low, high = max(low, filter.event_id), min(high, filter.event_id + b"\x00")
    values |= {"low": low, "high": high, "looked_at": LOOKED_AT}
    if filter.event_id is not None:
        return Question("all", values)
    if filter.subject is not None:
        return Question("subject", values)
    return Question(_way(filter) or ("source" if filter.source is not None else "all"), values)


def weigh(connection: sqlite3.Connection, question: Question, statement: str) -> None:
    """Have a page look at fewer rows where their bodies are too large to look into all of them."""
    if question.values["clauses"] is None:
        return
    there, fitting = connection.execute(statement, question.values | {"looked_into": LOOKED_INTO}).fetchone()
    if fitting < there:
        question.values["looked_at"] = max(fitting, 1)


def _way(filter: Filter) -> str | None:
    if filter.status is DeliveryStatus.leased:
        return "leased"
    if filter.replay_id is not None:
        return "replay"
    return "unfinished" if filter.status in _UNFINISHED else None


def _bounds(connection: sqlite3.Connection, filter: Filter, before: bytes | None) -> tuple[bytes, bytes]:
    """Ids begin with their time: between these two is all that the filter can mean."""
    low = _FIRST if filter.since is None else id_floor(to_micros(filter.since) // 1000 - SLACK)
    high = LAST
    if filter.until is not None and ids_keep_time(connection):
        high = id_floor(to_micros(filter.until) // 1000 + SLACK)
    return low, high if before is None else min(high, before)


def ids_keep_time(connection: sqlite3.Connection) -> bool:
    """Whether ids can be believed not to run ahead. They never run back, so they do after a clock was set back."""
    newest = connection.execute("SELECT id FROM events ORDER BY id DESC LIMIT 1").fetchone()
    return newest is None or newest[0] < id_floor(int(clock.now() * 1000) + SLACK)


def id_floor(milliseconds: int) -> bytes:
    """Smaller than every id made at this time or later, and greater than all before."""
    return min(max(milliseconds, 0), (1 << 48) - 1).to_bytes(6)


def numbers_of(connection: sqlite3.Connection, sources: Collection[str]) -> str:
    """The numbers of these sources as one text to look in: `,1,5,`. A list would be a scan in every plan."""
    found = [_number(connection, "SELECT id FROM sources WHERE name = ?", name) for name in sources]
    return f",{','.join(map(str, found))},"


def _values(connection: sqlite3.Connection, filter: Filter) -> dict[str, Any]:
    lowest_code, highest_code = _codes(filter.code)
    values = {
        "source_id": _number(connection, "SELECT id FROM sources WHERE name = ?", filter.source),
        "sources": None if filter.sources is None else numbers_of(connection, filter.sources),
        "destination_id": _number(connection, "SELECT id FROM destinations WHERE name = ?", filter.destination),
        "type": None if filter.type is None else filter.type.replace("[", "[[]"),
        "subject": filter.subject,
        "key": filter.key,
        "since": None if filter.since is None else to_micros(filter.since),
        "until": None if filter.until is None else to_micros(filter.until),
        "only": None,
        "status": filter.status,
        "kept": filter.status,
        "category": filter.category,
        "note": filter.note,
        "lowest_code": lowest_code,
        "highest_code": highest_code,
        "above": filter.attempts_above,
        "below": filter.attempts_below,
        "replay_id": filter.replay_id,
        "replayed": filter.is_replayed or None,
        "text": None if filter.text is None else "%" + _like(filter.text) + "%",
        "clauses": bodies.asked(filter.body),
    }
    of_deliveries = "destination_id status category note lowest_code above below replay_id replayed"
    values["asks_deliveries"] = any(values[name] is not None for name in of_deliveries.split())
    return values


def _number(connection: sqlite3.Connection, statement: str, name: str | None) -> int | None:
    """The number of a name; one that nobody has for a name that is not known."""
    if name is None:
        return None
    row = connection.execute(statement, (name,)).fetchone()
    return -1 if row is None else int(row[0])


def _codes(code: str | None) -> tuple[int | None, int | None]:
    """The status codes that `503` or `5xx` means."""
    if code is None:
        return None, None
    lowest, highest = code.lower().replace("x", "0"), code.lower().replace("x", "9")
    return (int(lowest), int(highest)) if lowest.isdecimal() else (-1, -1)


def _like(text: str) -> str:
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")


# -- answers -------------------------------------------------------------------------------------


def meant(
    connection: sqlite3.Connection, filter: Filter, *, decrypts: bool = False
) -> Iterator[tuple[bytes, int, str, str, int, str | None]]:
    """All deliveries that a filter means, however many: id, seq, status, destination, received at, note.

    `decrypts`: bodies may be encrypted; raises QueryTooWide where that would take too long.
    """
    asked = ask_deliveries(connection, filter)
    if decrypts and asked.values["clauses"] is not None and filter.ids is None:
        look = {"looked_at": MOST_DECRYPTED + 1, "looked_into": MOST_DECRYPTED_BYTES}
        there, fitting = connection.execute(WEIGH_DELIVERIES[asked.way], asked.values | look).fetchone()
        if there > MOST_DECRYPTED or fitting < there:
            raise QueryTooWide
    questions = [asked] if filter.ids is None else [one_of(asked, one) for one in dict.fromkeys(filter.ids)]
    for question in questions:
        if question is not None:
            everything = question.values | {"looked_at": EVERYTHING}
            yield from connection.execute(MEAN_DELIVERIES[question.statement], everything)


def shown(row: tuple[Any, ...]) -> StoredDelivery:
    """A row of `SHOW_DELIVERIES` as it is shown."""
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
