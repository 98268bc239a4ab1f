"""Leasing on SQLite: what a worker may take now, and what it may expect. Called by the engine inside the writer.

Workers lease rows of `heads`, never rows of `deliveries`: one row stands for one (destination, source, subject), so two
deliveries of a subject cannot be leased at once, and what waits behind a head costs a lease nothing. `due_at` is the
next moment a worker may take a row: its due time, the end of its lease, or never while it is held.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from oncehook.model import (
    COVERED,
    OPTIONS,
    AttemptOutcome,
    DeliveryId,
    EventId,
    Expired,
    Lease,
    LeasedDelivery,
    LeaseRequest,
    Options,
    Outlook,
    Priority,
    ReplayId,
    StoredEvent,
)
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite.intake import Insert, Micros, Update, count
from oncehook.store.sqlite.look import EVENT_COLUMNS, convert_event, moment

NEVER: Final = 1 << 62
"""Due at this moment: held until somebody replays or discards the dead letter at the head."""

SECOND: Final = 1_000_000

_EVENT_TABLES: Final = """
JOIN sources s ON s.id = e.source_id
LEFT JOIN batches b ON b.id = e.batch_id
LEFT JOIN ranks r ON h.options & 4 AND r.destination_id = h.destination_id AND r.source_id = e.source_id
     AND r.scope = coalesce(e.rank_scope, e.subject)
"""
_HEADS: Final = (
    "SELECT h.rowid, h.subject_key, h.delivery_id, h.leased, h.fence, h.run, h.attempts, h.crashes, h.deaths, h.alone,"
    " h.options, h.replay_id, h.carries, h.leased_at, h.seq, h.worker, EXISTS (SELECT 1 FROM deliveries d"
    " WHERE d.subject_key = h.subject_key AND d.behind AND d.status = 'pending' AND d.seq > h.seq), r.rank,"
    + EVENT_COLUMNS
    + "FROM heads h JOIN events e ON e.id = h.event_id"
    + _EVENT_TABLES
)
DUE: Final = _HEADS + "WHERE h.destination_id = ? AND h.turn = ? AND h.due_at <= ? ORDER BY h.due_at LIMIT ?"
HEAD: Final = _HEADS + "WHERE h.rowid = ?"
CARRIED: Final = (
    "SELECT d.run, d.replay_id, r.rank,"
    + EVENT_COLUMNS
    + "FROM heads h JOIN deliveries d ON d.id = ?2 JOIN events e ON e.id = d.event_id"
    + _EVENT_TABLES
    + "WHERE h.rowid = ?1"
)
# The newest of those that wait behind the head, as far as one attempt may cover: of every type, or of the head's own.
NEWEST_OF_ANY: Final = """
SELECT id, seq FROM deliveries WHERE subject_key = ?1 AND behind AND status = 'pending' AND seq > ?2
ORDER BY seq DESC LIMIT 1
"""
LAST_COVERED: Final = """
SELECT id, seq FROM deliveries WHERE subject_key = ?1 AND behind AND status = 'pending' AND seq > ?2
ORDER BY seq LIMIT 1 OFFSET ?3 - 1
"""
NEWEST_OF_TYPE: Final = """
SELECT w.id, w.seq FROM (
  SELECT id, seq, event_id FROM deliveries WHERE subject_key = ?1 AND behind AND status = 'pending' AND seq > ?2
  ORDER BY seq LIMIT ?3
) w CROSS JOIN events e ON e.id = w.event_id WHERE e.type = ?4 ORDER BY w.seq DESC LIMIT 1
"""
TAKE: Final = Update(
    "line, fence, due_at, leased_at, attempts, crashes, deaths, alone, carries, upto, worker",
    "UPDATE heads SET leased = 1, fence = v.fence, due_at = v.due_at, leased_at = v.leased_at, attempts = v.attempts,"
    " crashes = v.crashes, deaths = v.deaths, alone = v.alone, carries = v.carries, upto = v.upto, worker = v.worker"
    " FROM v WHERE heads.rowid = v.line",
)
SET_ASIDE: Final = Update(
    "line, due_at, attempts, crashes, deaths",
    "UPDATE heads SET turn = 2, leased = 0, alone = 0, carries = NULL, upto = 0, due_at = v.due_at,"
    " attempts = v.attempts, crashes = v.crashes, deaths = v.deaths FROM v WHERE heads.rowid = v.line",
)
PROLONG: Final = Update("line, due_at", "UPDATE heads SET due_at = v.due_at FROM v WHERE heads.rowid = v.line")
ATTEMPTS: Final = Insert(
    "INSERT INTO attempts (delivery_id, fence, run, n, started_at, ended_at, outcome, category, status, error, answer)",
    11,
)


class Heartbeats:
    """How far the leases that this process gave out are prolonged.

    One process writes the file, so nobody else can take its leases: that a worker lives need not be written down. It is
    noted here, from the heartbeat's own thread, and read when a lease seems to have run out. So a blocked loop or a
    slow disk cannot lose a lease (R32), and short work costs no write.
    """

    def __init__(self) -> None:
        self._until: dict[int, Micros] = {}
        self._lock = threading.Lock()

    def begin(self, fence: int, until: Micros) -> None:
        """A lease was given out."""
        with self._lock:
            self._until[fence] = until

    def renew(self, leases: Sequence[Lease], now: Micros) -> set[int]:
        """Prolong these; returns the fences that are still held."""
        with self._lock:
            held = {lease.fence for lease in leases if lease.fence in self._until}
            self._until.update({one.fence: now + micros(one.seconds) for one in leases if one.fence in held})
        return held

    def until(self, fence: int) -> Micros:
        """Up to when this one is held; 0 for a lease that is not known here."""
        with self._lock:
            return self._until.get(fence, 0)

    def end(self, fences: Iterable[int]) -> None:
        """These are over."""
        with self._lock:
            for fence in fences:
                self._until.pop(fence, None)

    def end_all(self) -> None:
        """Every lease is void."""
        with self._lock:
            self._until.clear()


class Leasing:
    """One round of leases, inside one transaction."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        now: Micros,
        heartbeats: Heartbeats,
        cipher: Cipher,
        worker: str | None = None,
    ) -> None:
        self.connection = connection
        self.cipher = cipher
        self.now = now
        self.heartbeats = heartbeats
        self.worker = worker
        (self.fence,) = connection.execute("SELECT value FROM marks WHERE name = 'fence'").fetchone()
        self._first = self.fence
        self.counts: Counter[tuple[int, int, str]] = Counter()
        self.taken: list[tuple[Any, ...]] = []
        self.aside: list[tuple[Any, ...]] = []
        self.prolonged: list[tuple[Any, ...]] = []
        self.crashed: list[tuple[Any, ...]] = []
        self.expired: list[Expired] = []

    def lease(self, wants: Sequence[LeaseRequest]) -> list[Lease]:
        """What each want may have now, in the order in which it became due."""
        leases = [lease for want in wants for lease in self._lease(want)]
        ATTEMPTS(self.connection, self.crashed)
        count(self.connection, self.now, self.counts)
        self._note_fence()
        return leases

    def lease_heads(self, wants: Sequence[tuple[int, LeaseRequest]]) -> list[Lease]:
        """Lease these rows of `heads`, each as its want says, unless its destination is paused or its breaker open."""
        leases = []
        for row, want in wants:
            limit, is_probe = self._allowed(want)
            if limit and not is_probe:
                found = self.connection.execute(HEAD, (row,)).fetchone()
                if (lease := self._take(want, found)) is not None:
                    leases.append(lease)
        self._write()
        self._note_fence()
        return leases

    def _note_fence(self) -> None:
        if self.fence != self._first:
            self.connection.execute("UPDATE marks SET value = ? WHERE name = 'fence'", (self.fence,))

    def _lease(self, want: LeaseRequest) -> list[Lease]:
        limit, is_probe = self._allowed(want)
        leases: list[Lease] = []
        # Rows that are prolonged or set aside leave the front of the queue: look again, so that they starve nobody.
        while (room := limit - len(leases)) > 0:
            found = self.connection.execute(DUE, (want.destination_id, want.priority, self.now, room)).fetchall()
            leases += [lease for row in found if (lease := self._take(want, row)) is not None]
            self._write()
            if len(found) < room:
                break
        if is_probe and leases:
            self.connection.execute(
                "UPDATE destination_state SET open_until = ? WHERE destination_id = ?",
                (self.now + micros(want.probe), want.destination_id),
            )
        return leases

    def _allowed(self, want: LeaseRequest) -> tuple[int, bool]:
        """How many, and whether that is a probe: nothing while the destination is paused or its breaker open, and one,
        to see, when the breaker may close."""
        row = self.connection.execute(
            "SELECT paused_at, open_until FROM destination_state WHERE destination_id = ?", (want.destination_id,)
        ).fetchone()
        paused_at, open_until = row or (None, None)
        if paused_at is not None:
            return 0, False
        if open_until is None:
            return want.limit, False
        return (min(want.limit, 1), True) if open_until <= self.now else (0, False)

    def _write(self) -> None:
        for statement, rows in ((TAKE, self.taken), (SET_ASIDE, self.aside), (PROLONG, self.prolonged)):
            statement(self.connection, rows)
            rows.clear()

    def _take(self, want: LeaseRequest, found: tuple[Any, ...]) -> Lease | None:
        row, queue_key, front_id, leased, fence, run, attempts, crashes, deaths, alone, options, *rest = found
        replay_id, carries, leased_at, seq, worker, more, highest_rank, *event = rest
        if leased:
            until = self.heartbeats.until(fence)
            if until > self.now:
                self.prolonged.append((row, until))
                return None
            # Its holder is gone. The attempt is given back, and only a crash while it ran alone is held against it: in
            # company any of them may have been the one (DESIGN.md 8.3).
            self._note_crash(want.destination_id, carries or front_id, fence, attempts, leased_at, worker)
            attempts, crashes, deaths = attempts - 1, crashes + 1, deaths + alone
            if crashes > want.crash_tolerance and want.priority is not Priority.quarantined:
                self.aside.append((row, self.now, attempts, crashes, deaths))
                return None
        carried, upto = (None, 0)
        if more and options & (Options.coalesce_type | Options.coalesce_any):
            carried, upto = self._newest(queue_key, seq, options, event[3])
        if carried is not None:
            run, replay_id, highest_rank, *event = self.connection.execute(CARRIED, (row, carried)).fetchone()
        self.fence += 1
        until = self.now + max(micros(want.lease), 1)
        is_alone = want.priority is Priority.quarantined
        held = (self.fence, until, self.now, attempts + 1, crashes, deaths, is_alone, carried, upto, self.worker)
        self.taken.append((row, *held))
        self.heartbeats.begin(self.fence, until)
        front = DeliveryId(front_id)
        delivery = LeasedDelivery(
            front if carried is None else DeliveryId(carried),
            want.destination_id,
            run,
            attempts + 1,
            OPTIONS[options],
            replay_id and ReplayId(replay_id),
        )
        lease = Lease(
            delivery,
            StoredEvent(*convert_event(event)),
            queue_key,
            front,
            self.fence,
            deaths,
            want.priority,
            want.lease,
            highest_rank,
            bool(more),
        )
        return self.cipher.read_lease(lease)

    def _note_crash(
        self, destination_id: int, delivery_id: bytes, fence: int, n: int, leased_at: Micros, worker: str | None
    ) -> None:
        found = self.connection.execute("SELECT event_id, run FROM deliveries WHERE id = ?", (delivery_id,)).fetchone()
        event_id, run = found
        self.crashed.append(
            (delivery_id, fence, run, n, leased_at, self.now, AttemptOutcome.crashed, None, None, None, None)
        )
        self.counts[0, destination_id, "crashed"] += 1
        self.heartbeats.end([fence])
        self.expired.append(Expired(DeliveryId(delivery_id), EventId(event_id), destination_id, fence, run, n, worker))

    def _newest(self, queue_key: bytes, seq: int, options: int, type_: str) -> tuple[bytes | None, int]:
        """Find the delivery that a coalesced attempt carries, if not the head, and the last number that it covers."""
        if options & Options.coalesce_any:
            found = self.connection.execute(LAST_COVERED, (queue_key, seq, COVERED)).fetchone()
            found = found or self.connection.execute(NEWEST_OF_ANY, (queue_key, seq)).fetchone()
        else:
            found = self.connection.execute(NEWEST_OF_TYPE, (queue_key, seq, COVERED, type_)).fetchone()
        return found or (None, 0)


def abandon_leases(connection: sqlite3.Connection, now: Micros, heartbeats: Heartbeats) -> None:
    """Whoever held a lease when the file was opened is gone: it is due at once, and taken over as from a crash."""
    heartbeats.end_all()
    for (fence,) in connection.execute("SELECT fence FROM heads WHERE leased"):
        heartbeats.begin(fence, now)
    connection.execute("UPDATE heads SET due_at = ? WHERE leased", (now,))


def micros(seconds: float) -> Micros:
    """Seconds as the store counts them."""
    return int(seconds * SECOND)


OUTLOOK: Final = """
SELECT s.paused_at, s.open_until,
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 0 ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 1 ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 2 ORDER BY due_at LIMIT 1)
FROM (SELECT ? AS id) d LEFT JOIN destination_state s ON s.destination_id = d.id
"""
BECAME_DUE: Final = "SELECT DISTINCT destination_id, turn FROM heads WHERE due_at > ?1 AND due_at <= ?2"
BECAME_OPEN: Final = "SELECT destination_id FROM destination_state WHERE open_until > ?1 AND open_until <= ?2"


def next_due(
    connection: sqlite3.Connection, now: Micros, destination_ids: Sequence[int], since: Micros | None = None
) -> Outlook:
    """Tell which of these have something to be leased now, and when the next will; see `Store.outlook`."""
    due: dict[Priority, set[int]] = {priority: set() for priority in Priority}
    first = NEVER
    for destination_id in destination_ids:
        paused_at, open_until, *turns = connection.execute(OUTLOOK, (destination_id,)).fetchone()
        if paused_at is not None:
            continue
        for priority, due_at in zip(Priority, turns, strict=True):
            due_from = max(NEVER if due_at is None else due_at, open_until or 0)
            if due_from <= now:
                due[priority].add(destination_id)
            else:
                first = min(first, due_from)
    if since is not None:
        for destination_id, priority in connection.execute(BECAME_DUE, (since, now)):
            due[Priority(priority)].add(destination_id)
        due[Priority.live].update(row[0] for row in connection.execute(BECAME_OPEN, (since, now)))
    due_in = None if first >= NEVER else (first - now) / SECOND
    return Outlook(
        due[Priority.live],
        due[Priority.replay],
        due[Priority.quarantined],
        due_in,
        None if since is None else moment(now),
    )
