"""Upkeep of a SQLite store: retention, counters, watermarks, workers, sessions."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from oncehook.model import (
    ArchivedDelivery,
    ArchivedEvent,
    DeliveryId,
    EventId,
    Pruned,
    StoredMedia,
    StoredSession,
    StoredWorker,
    last_delivery_of,
)
from oncehook.store.base import REJECTED_KEPT, TOKEN_USE_SECONDS, NameIds
from oncehook.store.sqlite.admin import prune_audit
from oncehook.store.sqlite.connection import (
    Micros,
    clean_text,
    count,
    micros,
    moment,
    moment_or_none,
    to_micros,
    write_audit,
)
from oncehook.store.sqlite.definitions import forget_deleted
from oncehook.store.sqlite.intake import forget_event, forget_key

DAY: Final = 86_400_000_000
HOUR: Final = 3_600_000_000
SIZES_KEPT: Final = 40 * DAY
_PAGES: Final = 20
"""Pages that one batch reads at most when it finds nothing to remove."""

_SOURCES: Final = 2000
"""Sources that one batch looks at."""
SOURCES: Final = "SELECT id FROM sources WHERE id > ?1 ORDER BY id LIMIT ?2"

_FENCES_RAISED: Final = 1_000_000
"""Amount by which a restore raises fences: more than may have been issued since the backup."""

OLD_EVENTS: Final = """
SELECT e.id, e.received_at < ?3, e.received_at >= ?3 OR EXISTS (SELECT 1 FROM deliveries d WHERE d.id > e.id
       AND d.id <= CAST(substr(e.id, 1, 13) || x'ffffff' AS BLOB) AND d.status IN ('pending', 'dead'))
       OR EXISTS (SELECT 1 FROM restored r WHERE r.event_id = e.id AND r.until > ?5)
FROM events e WHERE e.source_id = ?1 AND e.id > ?2 ORDER BY e.id LIMIT ?4
"""
EMPTY_REJECTIONS: Final = """
UPDATE rejections SET head = NULL, body = NULL WHERE at < ? AND (head IS NOT NULL OR body IS NOT NULL)
"""
ARCHIVED: Final = """
SELECT e.id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks, e.rank, e.rank_scope, e.body_hash,
  e.key_hash, coalesce(e.head, b.head, x''), e.body, e.account
FROM events e JOIN sources s ON s.id = e.source_id LEFT JOIN batches b ON b.id = e.batch_id WHERE e.id = ?
"""
ARCHIVED_DELIVERIES: Final = """
SELECT t.name, d.subject_key, d.seq, d.status, d.note, d.run, d.attempts, d.options, d.settled_at, d.category,
  d.last_status, d.last_error, d.reason, d.fair
FROM deliveries d JOIN destinations t ON t.id = d.destination_id WHERE d.id > ? AND d.id <= ? ORDER BY d.id
"""
OLD_KEYS: Final = "SELECT rowid, expires_at < ?2, event_id FROM keys WHERE rowid > ?1 ORDER BY rowid LIMIT ?3"
OLD_PROOFS: Final = "SELECT rowid, expires_at < ?2 FROM proofs WHERE rowid > ?1 ORDER BY rowid LIMIT ?3"
ORPHANS: Final = """
SELECT b.id, NOT EXISTS (SELECT 1 FROM events e WHERE e.batch_id = b.id)
       AND NOT EXISTS (SELECT 1 FROM arrivals a WHERE a.batch_id = b.id)
FROM batches b WHERE b.id > ?1 ORDER BY b.id LIMIT ?3
"""
RANKS: Final = """
SELECT destination_id, source_id, scope, seen_at FROM ranks
WHERE (destination_id, source_id, scope) > (?1, ?2, ?3) ORDER BY destination_id, source_id, scope LIMIT ?4
"""
FOLD: Final = """
INSERT INTO counters (minute, source_id, destination_id, what, n)
SELECT minute - minute % ?2, source_id, destination_id, what, sum(n) FROM counters
WHERE minute < ?1 AND minute % ?2 <> 0 GROUP BY 1, 2, 3, 4
ON CONFLICT DO UPDATE SET n = n + excluded.n
"""
FOLDED: Final = "DELETE FROM counters WHERE minute < ?1 AND minute % ?2 <> 0"
NOTE_SIZE: Final = """
INSERT OR IGNORE INTO sizes (hour, bytes) SELECT ?, page_count * page_size FROM pragma_page_count, pragma_page_size
"""


class Pruning:
    """The position of the last batch in each table. Starts over after the end."""

    def __init__(self) -> None:
        self._events: dict[int, bytes] = {}
        self._left_at: dict[str, Any] = {}
        """Position of the last batch, by statement."""
        self._ranks: tuple[int, int, str] = (0, 0, "")
        self._last_source = 0

    def prune(
        self,
        connection: sqlite3.Connection,
        now: Micros,
        keep_events: Mapping[int, float],
        otherwise: float,
        limit: int,
        only: Sequence[bytes] | None = None,
    ) -> Pruned:
        """`only`: remove no other events than these."""
        sources = self._next_sources(connection) if only is None else sorted(_sources_of(connection, only))
        cuts = {number: now - micros(keep_events.get(number, otherwise)) for number in sources}
        cut = now - micros(otherwise)
        spans = (REJECTED_KEPT, otherwise, *keep_events.values())
        events = self._prune_events(connection, now, cuts, limit, only)
        if only is None and events < limit:  # otherwise these have more
            self._last_source = sources[-1] if len(sources) == _SOURCES else 0
        return Pruned(
            events=events,
            keys=self._prune_keys(connection, now, limit),
            batches=self._prune_batches(connection, now, limit),
            others=self._prune_ranks(connection, lambda n: now - micros(keep_events.get(n, otherwise)), limit)
            + _prune_replays(connection, cut, limit)
            + prune_audit(connection, cut, limit)
            + self._prune_proofs(connection, now, limit)
            + forget_deleted(connection, now - DAY)
            + connection.execute("DELETE FROM restored WHERE until <= ?", (now,)).rowcount
            + connection.execute("DELETE FROM sessions WHERE ends_at <= ?", (now,)).rowcount
            + connection.execute("DELETE FROM used_links WHERE ends_at <= ?", (now,)).rowcount
            + connection.execute(EMPTY_REJECTIONS, (now - micros(min(spans)),)).rowcount,
        )

    def _next_sources(self, connection: sqlite3.Connection) -> list[int]:
        """Return the sources whose turn it is: there may be very many, and each costs the writer a look."""
        return [number for (number,) in connection.execute(SOURCES, (self._last_source, _SOURCES)).fetchall()]

    def _prune_events(
        self,
        connection: sqlite3.Connection,
        now: Micros,
        cuts: Mapping[int, Micros],
        limit: int,
        only: Sequence[bytes] | None,
    ) -> int:
        gone: list[bytes] = []
        counts: Counter[tuple[int, int, str]] = Counter()
        for source_id, cut in cuts.items():
            room = limit - len(gone)
            if only is None:
                found = self._old_events(connection, now, source_id, cut, room) if room else []
            else:
                found = [one for one in only if _is_old(connection, now, source_id, cut, one)]
            counts[source_id, 0, "purged"] += len(found)
            gone += found
        for event_id in gone:
            _forget_event(connection, event_id, counts)
        count(connection, now, {where: n for where, n in counts.items() if n})
        return len(gone)

    def _old_events(
        self, connection: sqlite3.Connection, now: Micros, source_id: int, cut: Micros, room: int
    ) -> list[bytes]:
        """Return events of a source that may be removed, from where the last batch stopped."""
        found: list[bytes] = []
        for _ in range(_PAGES):
            at, asked = self._events.get(source_id, b""), room - len(found)
            rows = connection.execute(OLD_EVENTS, (source_id, at, cut, asked, now)).fetchall()
            found += [event_id for event_id, _, stays in rows if not stays]
            # Ids roughly follow the time of arrival: after a page of young events there are no old ones.
            goes_on = len(rows) == asked and any(old for _, old, _ in rows)
            self._events[source_id] = rows[-1][0] if goes_on else b""
            if not goes_on or len(found) == room:
                break
        return found

    def _prune_keys(self, connection: sqlite3.Connection, now: Micros, limit: int) -> int:
        gone = self._find_old(connection, OLD_KEYS, 0, now, limit)
        for row, _, event_id in gone:
            connection.execute("DELETE FROM keys WHERE rowid = ?", (row,))
            forget_key(connection, event_id)
        return len(gone)

    def _prune_proofs(self, connection: sqlite3.Connection, now: Micros, limit: int) -> int:
        gone = self._find_old(connection, OLD_PROOFS, 0, now, limit)
        connection.executemany("DELETE FROM proofs WHERE rowid = ?", [row[:1] for row in gone])
        return len(gone)

    def _prune_batches(self, connection: sqlite3.Connection, now: Micros, limit: int) -> int:
        gone = self._find_old(connection, ORPHANS, b"", now, limit)
        connection.executemany("DELETE FROM batches WHERE id = ?", [row[:1] for row in gone])
        return len(gone)

    def _find_old(
        self, connection: sqlite3.Connection, statement: str, start: Any, now: Micros, limit: int
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a page that may be removed, from where the last batch stopped: the column after the id
        tells."""
        found: list[tuple[Any, ...]] = []
        for _ in range(_PAGES):
            rows = connection.execute(statement, (self._left_at.get(statement, start), now, limit)).fetchall()
            found = [row for row in rows if row[1]]
            self._left_at[statement] = rows[-1][0] if len(rows) == limit else start
            if found or len(rows) < limit:
                break
        return found

    def _prune_ranks(self, connection: sqlite3.Connection, cut_of: Callable[[int], Micros], limit: int) -> int:
        rows = connection.execute(RANKS, (*self._ranks, limit)).fetchall()
        gone = [row[:3] for row in rows if row[3] < cut_of(row[1])]
        self._ranks = rows[-1][:3] if len(rows) == limit else (0, 0, "")
        connection.executemany("DELETE FROM ranks WHERE destination_id = ? AND source_id = ? AND scope = ?", gone)
        return len(gone)


def _sources_of(connection: sqlite3.Connection, events: Sequence[bytes]) -> set[int]:
    found = (connection.execute("SELECT source_id FROM events WHERE id = ?", (one,)).fetchone() for one in events)
    return {row[0] for row in found if row is not None}


def _is_old(connection: sqlite3.Connection, now: Micros, source_id: int, cut: Micros, event_id: bytes) -> bool:
    """Tell whether an event of this source may be removed."""
    before = (int.from_bytes(event_id) - 1).to_bytes(16)
    row = connection.execute(OLD_EVENTS, (source_id, before, cut, 1, now)).fetchone()
    return row is not None and row[0] == event_id and not row[2]


def keep_media(connection: sqlite3.Connection, now: Micros, event_id: bytes, media: StoredMedia) -> bool:
    # 8: Mark.erased
    return (
        connection.execute(
            "INSERT INTO media (event_id, n, digest, size, type, filename, kept_at)"
            " SELECT id, ?2, ?3, ?4, ?5, ?6, ?7 FROM events WHERE id = ?1 AND NOT marks & 8"
            " ON CONFLICT DO UPDATE SET digest = excluded.digest, size = excluded.size, type = excluded.type,"
            " filename = excluded.filename, kept_at = excluded.kept_at",
            (event_id, media.n, media.digest, media.size, clean_text(media.type), media.filename, now),
        ).rowcount
        > 0
    )


def find_prunable(
    connection: sqlite3.Connection, now: Micros, source_id: int, keep: float, after: bytes, limit: int
) -> tuple[list[EventId], bytes | None]:
    rows = connection.execute(OLD_EVENTS, (source_id, after, now - micros(keep), limit, now)).fetchall()
    goes_on = len(rows) == limit and any(old for _, old, _ in rows)
    return [EventId(id_) for id_, _, stays in rows if not stays], rows[-1][0] if goes_on else None


def read_archivable(connection: sqlite3.Connection, ids: Sequence[bytes]) -> list[ArchivedEvent]:
    found: list[ArchivedEvent] = []
    for event_id in ids:
        row = connection.execute(ARCHIVED, (event_id,)).fetchone()
        if row is None:
            continue
        rows = connection.execute(ARCHIVED_DELIVERIES, (event_id, last_delivery_of(event_id))).fetchall()
        deliveries = [
            ArchivedDelivery(
                **dict(
                    zip(ArchivedDelivery.__struct_fields__, (*one[:8], moment_or_none(one[8]), *one[9:]), strict=True)
                )
            )
            for one in rows
        ]
        columns = (str(EventId(row[0])), *row[1:5], moment(row[5]), moment_or_none(row[6]), *row[7:], deliveries)
        found.append(ArchivedEvent(**dict(zip(ArchivedEvent.__struct_fields__, columns, strict=True))))
    return found


def restore(
    connection: sqlite3.Connection,
    now: Micros,
    events: Sequence[ArchivedEvent],
    ids: NameIds,
    keep: float,
    actor: str,
) -> int:
    counts: Counter[tuple[int, int, str]] = Counter()
    restored = 0
    for event in events:
        event_id, source_id = EventId.parse(event.id), ids.sources[event.source]
        is_new = connection.execute(
            "INSERT OR IGNORE INTO events (id, source_id, type, key, subject, received_at, event_at, marks, rank,"
            " rank_scope, body_hash, key_hash, head, body, account) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                *(event_id, source_id, event.type, event.key, event.subject, to_micros(event.received_at)),
                *(None if event.event_at is None else to_micros(event.event_at), event.marks, event.rank),
                *(event.rank_scope, event.body_hash, event.key_hash, event.head, event.body, event.account),
            ),
        ).rowcount
        connection.execute(
            "INSERT INTO restored (event_id, until) VALUES (?,?) ON CONFLICT DO UPDATE SET until = excluded.until",
            (event_id, now + micros(keep)),
        )
        if not is_new:
            continue
        restored += 1
        counts[source_id, 0, "purged"] -= 1
        for one in event.deliveries:
            destination_id = ids.destinations[one.destination]
            connection.execute(
                "INSERT INTO deliveries (id, event_id, destination_id, subject_key, seq, status, note, run, attempts,"
                " options, settled_at, category, last_status, last_error, reason, fair)"
                " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    *(DeliveryId.of(event_id, destination_id), event_id, destination_id, one.subject_key, one.seq),
                    *(one.status, one.note, one.run, one.attempts, one.options),
                    *(None if one.settled_at is None else to_micros(one.settled_at), one.category, one.last_status),
                    *(one.last_error, one.reason, one.fair),
                ),
            )
            counts[0, destination_id, one.status] += 1
            counts[0, destination_id, "purged"] -= 1
    count(connection, now, counts)
    write_audit(connection, now, actor, "restore", "events", {"events": restored})
    return restored


def _forget_event(connection: sqlite3.Connection, event_id: bytes, counts: Counter[tuple[int, int, str]]) -> None:
    of_event = (event_id, last_delivery_of(event_id))
    deliveries = connection.execute(
        "SELECT id, destination_id, status FROM deliveries WHERE id > ? AND id <= ?", of_event
    ).fetchall()
    for delivery_id, destination_id, status in deliveries:
        connection.execute("DELETE FROM attempts WHERE delivery_id = ?", (delivery_id,))
        counts[0, destination_id, status] -= 1
        counts[0, destination_id, "purged"] += 1
    connection.execute("DELETE FROM deliveries WHERE id > ? AND id <= ?", of_event)
    forget_event(connection, event_id)
    connection.execute("DELETE FROM media WHERE event_id = ?", (event_id,))
    connection.execute("DELETE FROM events WHERE id = ?", (event_id,))


def _prune_replays(connection: sqlite3.Connection, cut: Micros, limit: int) -> int:
    """Remove the oldest finished replay with its items, in several batches where there are many."""
    row = connection.execute("SELECT id FROM replays WHERE finished_at < ? ORDER BY id LIMIT 1", (cut,)).fetchone()
    if row is None:
        return 0
    items = connection.execute(
        "DELETE FROM replay_items WHERE replay_id = ?1 AND delivery_id IN"
        " (SELECT delivery_id FROM replay_items WHERE replay_id = ?1 LIMIT ?2)",
        (row[0], limit),
    ).rowcount
    if items < limit:
        connection.execute("DELETE FROM replays WHERE id = ?", row)
    return items + 1


def roll_up(connection: sqlite3.Connection, now: Micros) -> int:
    removed = 0
    for days, step in ((2, HOUR), (9, DAY)):
        before = now - now % DAY - days * DAY
        connection.execute(FOLD, (before, step))
        removed += connection.execute(FOLDED, (before, step)).rowcount
    connection.execute(NOTE_SIZE, (now - now % HOUR,))
    connection.execute("DELETE FROM sizes WHERE hour < ?", (now - SIZES_KEPT,))
    return removed


def mark_watermark(connection: sqlite3.Connection, now: Micros, name: str, crossed: bool) -> bool:
    if crossed:
        changed = connection.execute("INSERT OR IGNORE INTO crossings (name, since) VALUES (?,?)", (name, now)).rowcount
    else:
        changed = connection.execute("DELETE FROM crossings WHERE name = ?", (name,)).rowcount
    return changed == 1


def register_worker(connection: sqlite3.Connection, now: Micros, worker: StoredWorker) -> None:
    connection.execute(
        "INSERT INTO workers (id, host, pid, started_at, seen_at, leases, destinations) VALUES (?1,?2,?3,?4,?4,?5,?6)"
        " ON CONFLICT DO UPDATE SET host = excluded.host, pid = excluded.pid, seen_at = excluded.seen_at,"
        " leases = excluded.leases, destinations = excluded.destinations",
        (worker.id, worker.host, worker.pid, now, worker.leases, json.dumps(list(worker.destinations))),
    )
    connection.execute("DELETE FROM workers WHERE seen_at < ?", (now - DAY,))


def invalidate_leases(connection: sqlite3.Connection, now: Micros) -> int:
    """End all leases after a restore: no worker of the original has any right here (R69)."""
    connection.execute("UPDATE marks SET value = value + ? WHERE name = 'fence'", (_FENCES_RAISED,))
    connection.execute("DELETE FROM sessions")
    connection.execute("DELETE FROM places")
    return connection.execute(
        "UPDATE heads SET leased = 0, alone = 0, carries = NULL, upto = 0, attempts = attempts - 1, due_at = ?"
        " WHERE leased",
        (now,),
    ).rowcount


def begin_session(
    connection: sqlite3.Connection, now: Micros, session: StoredSession, seconds: float, at_most: int
) -> None:
    connection.execute(
        "DELETE FROM sessions WHERE hash IN (SELECT hash FROM sessions WHERE (account IS NULL) = ?"
        " ORDER BY begun_at DESC LIMIT -1 OFFSET ?)",
        (session.account is None, at_most - 1),
    )
    kept = (session.hash, clean_text(session.actor), session.role, session.proof, session.account)
    connection.execute(
        "INSERT INTO sessions (hash, actor, role, proof, account, begun_at, ends_at) VALUES (?,?,?,?,?,?,?)",
        (*kept, now, now + micros(seconds)),
    )


def get_session(connection: sqlite3.Connection, now: Micros, hash: bytes) -> StoredSession | None:
    row = connection.execute(
        "SELECT hash, actor, role, proof, account FROM sessions WHERE hash = ? AND ends_at > ?", (hash, now)
    ).fetchone()
    return None if row is None else StoredSession(*row)


def take_link(connection: sqlite3.Connection, now: Micros, hash: bytes, seconds: float) -> bool:
    taken = connection.execute(
        "INSERT INTO used_links (hash, ends_at) VALUES (?, ?) ON CONFLICT DO NOTHING", (hash, now + micros(seconds))
    )
    return taken.rowcount == 1


def note_token_use(connection: sqlite3.Connection, now: Micros, name: str) -> None:
    connection.execute(
        "INSERT INTO token_uses (name, used_at) VALUES (?1, ?2)"
        " ON CONFLICT DO UPDATE SET used_at = ?2 WHERE used_at <= ?2 - ?3",
        (clean_text(name), now, micros(TOKEN_USE_SECONDS)),
    )
