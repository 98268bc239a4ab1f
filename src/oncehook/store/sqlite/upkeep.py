"""Upkeep of a SQLite store: retention, counters, watermarks, workers, sessions."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from oncehook.model import Pruned, StoredSession, StoredWorker, last_delivery_of
from oncehook.store.base import TOKEN_USE_SECONDS
from oncehook.store.sqlite.admin import prune_audit
from oncehook.store.sqlite.connection import Micros, clean_text, count, micros
from oncehook.store.sqlite.intake import forget_event, forget_key

DAY: Final = 86_400_000_000
_PAGES: Final = 20
"""Pages that one batch reads at most when it finds nothing to remove."""

_FENCES_RAISED: Final = 1_000_000
"""Amount by which a restore raises fences: more than may have been issued since the backup."""

OLD_EVENTS: Final = """
SELECT e.id, e.received_at < ?3, e.received_at >= ?3 OR EXISTS (SELECT 1 FROM deliveries d WHERE d.id > e.id
       AND d.id <= CAST(substr(e.id, 1, 13) || x'ffffff' AS BLOB) AND d.status IN ('pending', 'dead'))
FROM events e WHERE e.source_id = ?1 AND e.id > ?2 ORDER BY e.id LIMIT ?4
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


class Pruning:
    """The position of the last batch in each table. Starts over after the end."""

    def __init__(self) -> None:
        self._events: dict[int, bytes] = {}
        self._left_at: dict[str, Any] = {}
        """Position of the last batch, by statement."""
        self._ranks: tuple[int, int, str] = (0, 0, "")

    def prune(
        self,
        connection: sqlite3.Connection,
        now: Micros,
        keep_events: Mapping[int, float],
        otherwise: float,
        limit: int,
    ) -> Pruned:
        sources = [number for (number,) in connection.execute("SELECT id FROM sources").fetchall()]
        cuts = {number: now - micros(keep_events.get(number, otherwise)) for number in sources}
        cut = now - micros(otherwise)
        return Pruned(
            events=self._prune_events(connection, now, cuts, limit),
            keys=self._prune_keys(connection, now, limit),
            batches=self._prune_batches(connection, now, limit),
            others=self._prune_ranks(connection, cuts, cut, limit)
            + _prune_replays(connection, cut, limit)
            + prune_audit(connection, cut, limit)
            + self._prune_proofs(connection, now, limit)
            + connection.execute("DELETE FROM sessions WHERE ends_at <= ?", (now,)).rowcount,
        )

    def _prune_events(self, connection: sqlite3.Connection, now: Micros, cuts: Mapping[int, Micros], limit: int) -> int:
        gone: list[bytes] = []
        counts: Counter[tuple[int, int, str]] = Counter()
        for source_id, cut in cuts.items():
            room = limit - len(gone)
            found = self._old_events(connection, source_id, cut, room) if room else []
            counts[source_id, 0, "purged"] += len(found)
            gone += found
        for event_id in gone:
            _forget_event(connection, event_id, counts)
        count(connection, now, {where: n for where, n in counts.items() if n})
        return len(gone)

    def _old_events(self, connection: sqlite3.Connection, source_id: int, cut: Micros, room: int) -> list[bytes]:
        """Return events of a source that may be removed, from where the last batch stopped."""
        found: list[bytes] = []
        for _ in range(_PAGES):
            at, asked = self._events.get(source_id, b""), room - len(found)
            rows = connection.execute(OLD_EVENTS, (source_id, at, cut, asked)).fetchall()
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

    def _prune_ranks(self, connection: sqlite3.Connection, cuts: Mapping[int, Micros], cut: Micros, limit: int) -> int:
        rows = connection.execute(RANKS, (*self._ranks, limit)).fetchall()
        gone = [row[:3] for row in rows if row[3] < cuts.get(row[1], cut)]
        self._ranks = rows[-1][:3] if len(rows) == limit else (0, 0, "")
        connection.executemany("DELETE FROM ranks WHERE destination_id = ? AND source_id = ? AND scope = ?", gone)
        return len(gone)


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
    before = now - now % DAY - 2 * DAY
    connection.execute(FOLD, (before, DAY))
    return connection.execute("DELETE FROM counters WHERE minute < ?1 AND minute % ?2 <> 0", (before, DAY)).rowcount


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
    return connection.execute(
        "UPDATE heads SET leased = 0, alone = 0, carries = NULL, upto = 0, attempts = attempts - 1, due_at = ?"
        " WHERE leased",
        (now,),
    ).rowcount


def begin_session(
    connection: sqlite3.Connection, now: Micros, session: StoredSession, seconds: float, at_most: int
) -> None:
    connection.execute(
        "DELETE FROM sessions WHERE hash IN (SELECT hash FROM sessions ORDER BY begun_at DESC LIMIT -1 OFFSET ?)",
        (at_most - 1,),
    )
    connection.execute(
        "INSERT INTO sessions (hash, actor, role, proof, begun_at, ends_at) VALUES (?,?,?,?,?,?)",
        (session.hash, clean_text(session.actor), session.role, session.proof, now, now + micros(seconds)),
    )


def get_session(connection: sqlite3.Connection, now: Micros, hash: bytes) -> StoredSession | None:
    row = connection.execute(
        "SELECT hash, actor, role, proof FROM sessions WHERE hash = ? AND ends_at > ?", (hash, now)
    ).fetchone()
    return None if row is None else StoredSession(*row)


def note_token_use(connection: sqlite3.Connection, now: Micros, name: str) -> None:
    connection.execute(
        "INSERT INTO token_uses (name, used_at) VALUES (?1, ?2)"
        " ON CONFLICT DO UPDATE SET used_at = ?2 WHERE used_at <= ?2 - ?3",
        (clean_text(name), now, micros(TOKEN_USE_SECONDS)),
    )
