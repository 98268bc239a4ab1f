"""Erasing a subject on SQLite, one short batch of events at a time. Called by the engine inside the writer.

What is open is closed first, and a line whose head goes is handed on as after a settle: a worker that holds it finds
its lease gone. The rows stay, without content, so every count and every key still holds; an erased event has no subject
any more, so the next batch, or the same order given again, goes on where this one ended.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from oncehook.model import (
    EraseOrder,
    Erasure,
    last_delivery_of,
    needle,
    subject_hash,
    without_mention,
)
from oncehook.store.base import UNSEEN
from oncehook.store.sqlite.audit import kept, write_audit
from oncehook.store.sqlite.copies import CHAINS
from oncehook.store.sqlite.intake import Micros, count
from oncehook.store.sqlite.settle import go_on, note_replayed

_OF_SUBJECT: Final = " FROM events WHERE subject = ?1 AND (?2 IS NULL OR source_id = ?2)"
EVENTS: Final = "SELECT id, key_hash, batch_id" + _OF_SUBJECT + " ORDER BY id LIMIT ?3"
ALL_EVENTS: Final = "SELECT id, batch_id" + _OF_SUBJECT
DELIVERIES: Final = """
SELECT id, destination_id, status, coalesce(subject_key, id), replay_id FROM deliveries WHERE id > ?1 AND id <= ?2
"""
HEAD: Final = "SELECT rowid, delivery_id, leased, fence, seq, carries FROM heads WHERE subject_key = ?"
CLOSE: Final = "UPDATE deliveries SET status = 'discarded', reason = ?2, settled_at = ?3 WHERE id = ?1"
EMPTY_DELIVERY: Final = "UPDATE deliveries SET note = 'erased', last_error = NULL WHERE id = ?1"
EMPTY_ATTEMPTS: Final = "UPDATE attempts SET error = NULL, answer = NULL WHERE delivery_id = ?1"
ARRIVALS: Final = CHAINS + " SELECT a.n, a.batch_id FROM chain c JOIN arrivals a ON a.n = c.n"
EMPTY_ARRIVAL: Final = "UPDATE arrivals SET head = x'', body = CASE WHEN body IS NOT NULL THEN x'' END WHERE n = ?"
EMPTY_KEY: Final = "UPDATE keys SET body_hash = ?3 WHERE hash = ?1 AND event_id = ?2"
RANKS: Final = """
DELETE FROM ranks WHERE (destination_id, source_id, scope) IN (
  SELECT d.destination_id, e.source_id, coalesce(e.rank_scope, e.subject)
  FROM events e JOIN deliveries d ON d.id > ?1 AND d.id <= ?2 WHERE e.id = ?1)
"""
# 8: Mark.erased
EMPTY_EVENT: Final = """
UPDATE events SET subject = NULL, key = NULL, rank_scope = NULL, head = x'', body = x'', body_hash = ?2,
  marks = marks | 8 WHERE id = ?1
"""
# Whether a split request still holds something of others: then its head stays theirs.
BATCH: Final = """
SELECT length(b.body), EXISTS (
    SELECT 1 FROM events e WHERE e.batch_id = b.id AND NOT e.marks & 8 AND e.subject IS NOT ?2
  ) OR EXISTS (
    SELECT 1 FROM arrivals a JOIN events e ON e.id = a.event_id
    WHERE a.batch_id = b.id AND NOT e.marks & 8 AND e.subject IS NOT ?2)
FROM batches b WHERE b.id = ?1
"""
EMPTY_BATCH: Final = "UPDATE batches SET body = x'', head = CASE WHEN ?2 THEN head ELSE x'' END WHERE id = ?1"
# An attempt that carried an erased delivery is void, and given back; the head stays.
VOID: Final = """
UPDATE heads SET leased = 0, attempts = attempts - 1, due_at = ?2, alone = 0, upto = 0, carries = NULL WHERE rowid = ?1
"""


@dataclass(slots=True)
class Batch:
    """What one batch did, for the engine to pass on."""

    erased: Erasure = field(default_factory=Erasure)
    fences: list[int] = field(default_factory=list)
    """Leases that are void now."""
    finished: list[bytes] = field(default_factory=list)
    """Replays of which nothing is left."""


class Erasing:
    """One batch, inside one transaction."""

    def __init__(self, connection: sqlite3.Connection, now: Micros, order: EraseOrder) -> None:
        self.connection, self.now, self.order = connection, now, order
        self.closed: defaultdict[bytes, dict[bytes, str]] = defaultdict(dict)
        """By line: what was closed, and how it stood."""
        self.counts: Counter[tuple[int, int, str]] = Counter()
        self.replayed: list[tuple[bytes, bytes, str]] = []
        self.batches: set[bytes] = set()
        self.attempts = self.arrivals = 0
        self.fences: list[int] = []

    def erase(self, limit: int) -> Batch:
        """Erase at most so many events; none is left when it says so."""
        order = self.order
        events = self.connection.execute(EVENTS, (order.subject, order.source_id, limit)).fetchall()
        if not events:
            return Batch()
        for event in events:
            self._close(event[0])
        for line, closed in self.closed.items():
            self._go_on_without(line, closed)
        finished = note_replayed(self.connection, self.now, self.replayed)
        for event_id, key_hash, batch_id in events:
            self._empty(event_id, key_hash, batch_id)
        shared = self._empty_batches()
        forget_mentions(self.connection, order)
        count(self.connection, self.now, self.counts)
        closed_in_all = sum(map(len, self.closed.values()))
        erased = Erasure(len(events), closed_in_all, self.attempts, self.arrivals, len(shared), sum(shared))
        target = f"subject {subject_hash(order.subject)}"
        write_audit(self.connection, self.now, order.actor, "erase", target, {"reason": order.reason, **asdict(erased)})
        return Batch(erased, self.fences, finished)

    # -- closing -------------------------------------------------------------------------------

    def _close(self, event_id: bytes) -> None:
        for delivery_id, destination_id, status, line, replay_id in self._deliveries(event_id):
            if status not in ("pending", "dead"):
                continue
            self.connection.execute(CLOSE, (delivery_id, kept(self.order.reason), self.now))
            self.closed[line][delivery_id] = status
            self.counts[0, destination_id, status] -= 1
            self.counts[0, destination_id, "discarded"] += 1
            if status == "pending" and replay_id is not None:
                self.replayed.append((replay_id, delivery_id, "skipped"))

    def _deliveries(self, event_id: bytes) -> list[Any]:
        return self.connection.execute(DELIVERIES, _range(event_id)).fetchall()

    def _go_on_without(self, line: bytes, closed: dict[bytes, str]) -> None:
        found = self.connection.execute(HEAD, (line,)).fetchone()
        if found is None:  # dead letters of a line that went on without them
            return
        row, head_id, leased, fence, seq, carries = found
        is_void = bool(leased) and (head_id in closed or carries in closed)
        if is_void:
            self.fences.append(fence)
        if head_id in closed:
            go_on(self.connection, self.now, [(line, row, seq)])
        elif is_void:
            self.connection.execute(VOID, (row, self.now))

    # -- emptying ------------------------------------------------------------------------------

    def _empty(self, event_id: bytes, key_hash: bytes | None, batch_id: bytes | None) -> None:
        for delivery_id, *_ in self._deliveries(event_id):
            self.connection.execute(EMPTY_DELIVERY, (delivery_id,))
            self.attempts += self.connection.execute(EMPTY_ATTEMPTS, (delivery_id,)).rowcount
        for n, came_in in self.connection.execute(ARRIVALS, (event_id,)).fetchall():
            self.connection.execute(EMPTY_ARRIVAL, (n,))
            self.arrivals += 1
            self.batches.update([came_in] if came_in else [])
        if key_hash is not None:
            self.connection.execute(EMPTY_KEY, (key_hash, event_id, UNSEEN))
        self.connection.execute(RANKS, _range(event_id))
        self.connection.execute(EMPTY_EVENT, (event_id, UNSEEN))
        self.batches.update([batch_id] if batch_id else [])

    def _empty_batches(self) -> list[bool]:
        """Of each that still had its bytes: whether others were in it."""
        shared = []
        for batch_id in self.batches:
            found = self.connection.execute(BATCH, (batch_id, self.order.subject)).fetchone()
            if found is not None:
                self.connection.execute(EMPTY_BATCH, (batch_id, found[1]))
                shared += [bool(found[1])] if found[0] else []
        return shared


def _range(event_id: bytes) -> tuple[bytes, bytes]:
    """Bounds of the ids of its deliveries."""
    return event_id, last_delivery_of(event_id)


def forget_mentions(connection: sqlite3.Connection, order: EraseOrder) -> None:
    """Queries that named the subject, as replays and the audit log have kept them."""
    asked = (needle(order),)
    for replay_id, about in connection.execute("SELECT id, about FROM replays WHERE instr(about, ?)", asked).fetchall():
        changed = (without_mention(about, order), replay_id)
        connection.execute("UPDATE replays SET about = ? WHERE id = ?", changed)
    # Lines of the chain name no subject (`ReplayCommand.noted`).
    old = "SELECT n, detail FROM audit WHERE hash IS NULL AND instr(detail, ?)"
    for n, detail in connection.execute(old, asked).fetchall():
        connection.execute("UPDATE audit SET detail = ? WHERE n = ?", (without_mention(detail, order), n))


# -- looking -----------------------------------------------------------------------------------


def erasable(connection: sqlite3.Connection, order: EraseOrder) -> Erasure:
    """What is there to be erased. Nothing happens."""
    asked = (order.subject, order.source_id)
    found = Erasure()
    batches: set[bytes] = set()
    for event_id, batch_id in connection.execute(ALL_EVENTS, asked).fetchall():
        open_, attempts = connection.execute(_COUNTED, _range(event_id)).fetchone()
        later = connection.execute(ARRIVALS, (event_id,)).fetchall()
        batches.update(one for one in (batch_id, *(came_in for _, came_in in later)) if one)
        found += Erasure(1, open_, attempts, len(later))
    standing = [connection.execute(BATCH, (one, order.subject)).fetchone() for one in batches]
    shared = [bool(row[1]) for row in standing if row is not None and row[0]]
    return found + Erasure(batches=len(shared), shared_batches=sum(shared))


_COUNTED: Final = """
SELECT count(*) FILTER (WHERE status IN ('pending', 'dead')),
  coalesce(sum((SELECT count(*) FROM attempts a WHERE a.delivery_id = d.id)), 0)
FROM deliveries d WHERE d.id > ?1 AND d.id <= ?2
"""
