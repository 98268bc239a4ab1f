"""The queue on SQLite: leases, settlements, and what becomes due next.

Workers lease rows of `heads`, never rows of `deliveries`. A head is one (destination, source, subject), so two
deliveries of a subject cannot be leased at once, and what waits behind a front costs a lease nothing. `due_at` is the
next moment at which a worker may take a row: its due time, the end of its lease, or never while it is held.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from oncehook.errors import ConfigError, StoreUnavailable
from oncehook.model import (
    COVERED,
    OPTIONS,
    PRIORITIES,
    Allowance,
    AttemptOutcome,
    BreakerChange,
    DeliveryId,
    Emission,
    EventId,
    Expired,
    Lease,
    LeasedDelivery,
    LeaseRequest,
    LimitRequest,
    Options,
    Outlook,
    Priority,
    ReplayId,
    Settle,
    Settled,
    Settlement,
    StoredEvent,
    Streak,
    count_streaks,
    is_crash,
    was_tried,
)
from oncehook.store.base import AHEAD, MADE_UP_FOR
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite.connection import (
    NEVER,
    SECOND,
    Insert,
    LookUp,
    Micros,
    Update,
    clean_text,
    count,
    micros,
    moment,
    primary_code,
    write_audit,
)
from oncehook.store.sqlite.intake import EVENT_COLUMNS, IntakeGroup, convert_event, find_kept
from oncehook.store.sqlite.writer import EffectFailed

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
# The next value of `fair`, and when something of it is due.
NEXT_FAIR: Final = """
SELECT fair, due_at FROM heads WHERE destination_id = ? AND turn = ? AND fair > ? ORDER BY fair, due_at LIMIT 1
"""
DUE_FAIR: Final = """
SELECT rowid FROM heads WHERE destination_id = ? AND turn = ? AND fair = ? AND due_at <= ? ORDER BY due_at LIMIT ?
"""
IDLE_VALUES: Final = 64
"""Values with nothing due that a round passes by, before it goes by due time."""
HEAD: Final = _HEADS + "WHERE h.rowid = ?"
CARRIED: Final = (
    "SELECT d.run, d.replay_id, r.rank,"
    + EVENT_COLUMNS
    + "FROM heads h JOIN deliveries d ON d.id = ?2 JOIN events e ON e.id = d.event_id"
    + _EVENT_TABLES
    + "WHERE h.rowid = ?1"
)
# The newest delivery behind the head that one attempt may cover: of any type, or of the head's own.
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
    "head, fence, due_at, leased_at, attempts, crashes, deaths, alone, carries, upto, worker",
    "UPDATE heads SET leased = 1, fence = v.fence, due_at = v.due_at, leased_at = v.leased_at, attempts = v.attempts,"
    " crashes = v.crashes, deaths = v.deaths, alone = v.alone, carries = v.carries, upto = v.upto, worker = v.worker"
    " FROM v WHERE heads.rowid = v.head",
)
SET_ASIDE: Final = Update(
    "head, due_at, attempts, crashes, deaths",
    "UPDATE heads SET turn = 4, leased = 0, alone = 0, carries = NULL, upto = 0, due_at = v.due_at,"
    " attempts = v.attempts, crashes = v.crashes, deaths = v.deaths FROM v WHERE heads.rowid = v.head",
)
PROLONG: Final = Update("head, due_at", "UPDATE heads SET due_at = v.due_at FROM v WHERE heads.rowid = v.head")
ATTEMPTS: Final = Insert(
    "INSERT INTO attempts (delivery_id, fence, run, n, started_at, ended_at, outcome, category, status, error, answer)",
    11,
)


class Heartbeats:
    """Ends of leases as renewed: in the owner of the file all of them, in a client those of its own worker.

    Nobody but the owner can take a lease over: that a worker lives need not be written down. It is noted here, from
    heartbeats' own threads, and read when a lease seems to have run out. So a blocked loop or a slow disk cannot lose a
    lease (R32), and short work costs no write.
    """

    def __init__(self) -> None:
        self._until: dict[int, Micros] = {}
        self._lock = threading.Lock()

    def begin(self, fence: int, until: Micros) -> None:
        with self._lock:
            self._until[fence] = until

    def renew(self, seconds: Mapping[int, float], now: Micros) -> set[int]:
        """Prolong these by so many seconds; returns the fences that are still held."""
        with self._lock:
            held = seconds.keys() & self._until.keys()
            self._until.update({fence: now + micros(seconds[fence]) for fence in held})
        return held

    def shorten(self, fences: Iterable[int], until: Micros) -> None:
        """Let these run out, unless they are renewed by then."""
        with self._lock:
            for fence in fences:
                self._until[fence] = min(self._until.get(fence, until), until)

    def until(self, fence: int) -> Micros:
        """Return the time until which a lease is held; 0 for an unknown one."""
        with self._lock:
            return self._until.get(fence, 0)

    def left(self, now: Micros) -> dict[int, float]:
        """Return the fences that are held, and for how many seconds yet."""
        with self._lock:
            return {fence: (until - now) / SECOND for fence, until in self._until.items() if until > now}

    def end(self, fences: Iterable[int]) -> None:
        with self._lock:
            for fence in fences:
                self._until.pop(fence, None)

    def end_all(self) -> None:
        with self._lock:
            self._until.clear()


@dataclass(slots=True)
class QueueRound:
    """One round of work on the queue, inside one transaction."""

    connection: sqlite3.Connection
    now: Micros
    heartbeats: Heartbeats
    cipher: Cipher
    worker: str | None = None
    counts: Counter[tuple[int, int, str]] = field(default_factory=Counter)


Rounds = dict[tuple[int, int], int]
"""Values at which the last rounds ended, by destination and priority."""


@dataclass(slots=True)
class Leasing(QueueRound):
    """One round of leases."""

    rounds: Rounds = field(default_factory=dict)
    taken: list[tuple[Any, ...]] = field(default_factory=list)
    aside: list[tuple[Any, ...]] = field(default_factory=list)
    prolonged: list[tuple[Any, ...]] = field(default_factory=list)
    crashed: list[tuple[Any, ...]] = field(default_factory=list)
    expired: list[Expired] = field(default_factory=list)
    fence: int = field(init=False)
    _first: int = field(init=False)

    def __post_init__(self) -> None:
        (self.fence,) = self.connection.execute("SELECT value FROM marks WHERE name = 'fence'").fetchone()
        self._first = self.fence

    def lease(self, wants: Sequence[LeaseRequest]) -> list[Lease]:
        """Lease what is due for each request, in the order in which it became due."""
        leases = [lease for want in wants for lease in self._lease(want)]
        ATTEMPTS(self.connection, self.crashed)
        count(self.connection, self.now, self.counts)
        self._note_fence()
        return leases

    def lease_heads(self, wants: Sequence[tuple[int, LeaseRequest]]) -> list[Lease]:
        """Lease these rows of `heads` as requested, unless the destination is paused or its breaker is open."""
        leases = []
        for row, want in wants:
            limit, is_probe = self._allow(want)
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
        limit, is_probe = self._allow(want)
        leases = self._lease_in_rounds(want, limit) if want.fair else []
        # Extended or quarantined rows leave the front of the queue; look again, so that the others do not starve.
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
            leases = [replace(lease, failing=True) for lease in leases]
        return leases

    def _lease_in_rounds(self, want: LeaseRequest, limit: int) -> list[Lease]:
        """Lease one of each value of `fair`, beginning behind the value at which the last round ended; more of each
        only where there are fewer values than are wanted.

        A value costs one step, whatever waits under it.
        """
        queue = (want.destination_id, want.priority)
        start = visited = self.rounds.get(queue, -1)
        values: list[int] = []
        has_wrapped = False
        for _ in range(limit + IDLE_VALUES):
            if len(values) == limit:
                break
            found = self.connection.execute(NEXT_FAIR, (*queue, visited)).fetchone()
            if found is None and not has_wrapped:
                has_wrapped, visited = True, -1
                continue
            if found is None or (has_wrapped and found[0] > start):
                break
            visited, due_at = found
            if due_at <= self.now:
                values.append(visited)
        each = -(-limit // len(values)) if values else 0
        rows = [[row for (row,) in self.connection.execute(DUE_FAIR, (*queue, v, self.now, each))] for v in values]
        picked = [
            (value, own[n]) for n in range(each) for value, own in zip(values, rows, strict=True) if n < len(own)
        ][:limit]
        self.rounds[queue] = picked[-1][0] if picked and len(values) < limit else visited
        heads = [self.connection.execute(HEAD, (row,)).fetchone() for _, row in picked]
        leases = [lease for head in heads if (lease := self._take(want, head)) is not None]
        self._write()
        return leases

    def _allow(self, want: LeaseRequest) -> tuple[int, bool]:
        """Return how many to lease, and whether as a probe: none while the destination is paused or its breaker open,
        one when the breaker may close."""
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
            # The holder is gone. Its attempt does not count; the crash counts only if it ran alone, because otherwise
            # another delivery may have caused it (R36).
            self._note_crash(want.destination_id, carries or front_id, fence, attempts, leased_at, worker)
            attempts, crashes, deaths = attempts - 1, crashes + 1, deaths + alone
            if crashes > want.crash_tolerance and want.priority is not Priority.quarantined:
                self.aside.append((row, self.now, attempts, crashes, deaths))
                return None
        carried, upto = None, 0
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
        event_id, run = self.connection.execute(
            "SELECT event_id, run FROM deliveries WHERE id = ?", (delivery_id,)
        ).fetchone()
        self.crashed.append(
            (delivery_id, fence, run, n, leased_at, self.now, AttemptOutcome.crashed, None, None, None, None)
        )
        self.counts[0, destination_id, "crashed"] += 1
        self.heartbeats.end([fence])
        self.expired.append(Expired(DeliveryId(delivery_id), EventId(event_id), destination_id, fence, run, n, worker))

    def _newest(self, queue_key: bytes, seq: int, options: int, type_: str) -> tuple[bytes | None, int]:
        """Find the delivery that a coalesced attempt carries, if it is not the head, and the last number that it
        covers."""
        if options & Options.coalesce_any:
            found = self.connection.execute(LAST_COVERED, (queue_key, seq, COVERED)).fetchone()
            found = found or self.connection.execute(NEWEST_OF_ANY, (queue_key, seq)).fetchone()
        else:
            found = self.connection.execute(NEWEST_OF_TYPE, (queue_key, seq, COVERED, type_)).fetchone()
        return found or (None, 0)


def adopt_leases(connection: sqlite3.Connection, now: Micros, heartbeats: Heartbeats, until: Micros) -> None:
    """Make leases and places from before the file was opened run out, unless their holders come back by then.

    What this process holds itself, as a client of the last owner, it goes on holding.
    """
    ours = heartbeats.left(now)
    for (fence,) in connection.execute("SELECT fence FROM heads WHERE leased"):
        if fence not in ours:
            heartbeats.begin(fence, until)
    connection.execute("UPDATE heads SET due_at = ? WHERE leased", (until,))
    connection.execute("UPDATE places SET until = min(until, ?)", (until,))  # they ask again within a second


def resume_leases(
    connection: sqlite3.Connection, now: Micros, heartbeats: Heartbeats, worker: str, held: Mapping[int, float]
) -> bool:
    """Let a worker that has come back go on with what it holds, and put back what was leased to it in answers that it
    did not get; tells whether there was any."""
    unheard = []
    for row, fence in connection.execute("SELECT rowid, fence FROM heads WHERE leased AND worker = ?", (worker,)):
        if fence in held:
            heartbeats.begin(fence, now + micros(held[fence]))
        else:
            unheard.append((now, row))
            heartbeats.end([fence])
    connection.executemany(
        "UPDATE heads SET leased = 0, alone = 0, carries = NULL, upto = 0, attempts = attempts - 1, due_at = ?"
        " WHERE rowid = ?",
        unheard,
    )
    return bool(unheard)


def expire_leases(connection: sqlite3.Connection, heartbeats: Heartbeats, worker: str, until: Micros) -> None:
    """Make the leases of a worker that has gone run out, unless it comes back by then."""
    rows = connection.execute("SELECT fence FROM heads WHERE leased AND worker = ?", (worker,)).fetchall()
    heartbeats.shorten([fence for (fence,) in rows], until)
    connection.execute("UPDATE heads SET due_at = min(due_at, ?) WHERE leased AND worker = ?", (until, worker))
    connection.execute("UPDATE places SET until = min(until, ?) WHERE worker = ?", (until, worker))


OUTLOOK: Final = """
SELECT s.paused_at, s.open_until,
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 0 ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 1 ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 2 ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 3 ORDER BY due_at LIMIT 1),
       (SELECT due_at FROM heads WHERE destination_id = d.id AND turn = 4 ORDER BY due_at LIMIT 1)
FROM (SELECT ? AS id) d LEFT JOIN destination_state s ON s.destination_id = d.id
"""
BECAME_DUE: Final = "SELECT DISTINCT destination_id, turn FROM heads WHERE due_at > ?1 AND due_at <= ?2"
BECAME_OPEN: Final = "SELECT destination_id FROM destination_state WHERE open_until > ?1 AND open_until <= ?2"


def next_due(
    connection: sqlite3.Connection, now: Micros, destination_ids: Sequence[int], since: Micros | None = None
) -> Outlook:
    """Return which of these have something due, and when the next will have; see `Store.next_due`."""
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
    return Outlook(due, due_in, None if since is None else moment(now))


LEASED: Final = "SELECT worker, fence, due_at FROM heads WHERE leased AND destination_id = ?"
PLACES: Final = "SELECT worker, n, wanted FROM places WHERE destination_id = ? AND until > ?"


@dataclass(slots=True)
class Limiting(QueueRound):
    """One round of allowances, counted over all workers."""

    def allow(self, wants: Sequence[LimitRequest]) -> list[Allowance]:
        allowances = []
        for want in wants:
            slots, first_in = (0, 0.0) if want.rate is None else self._reserve(want, want.rate)
            places = 0 if want.limit is None else self._place(want, want.limit)
            allowances.append(Allowance(want.destination_id, slots, first_in, places))
        return allowances

    def _reserve(self, want: LimitRequest, rate: float) -> tuple[int, float]:
        """Reserve moments, at most AHEAD; of what has passed, MADE_UP_FOR is made up for."""
        row = self.connection.execute(
            "SELECT next_at FROM limits WHERE destination_id = ?", (want.destination_id,)
        ).fetchone()
        starts = max(self.now if row is None else row[0], self.now - micros(MADE_UP_FOR))
        first_in = (starts - self.now) / SECOND
        if first_in > AHEAD:
            return 0, first_in - AHEAD
        slots = min(want.slots, int((AHEAD - first_in) * rate) + 1)
        if slots:
            self.connection.execute(
                "INSERT INTO limits (destination_id, next_at) VALUES (?, ?)"
                " ON CONFLICT DO UPDATE SET next_at = excluded.next_at",
                (want.destination_id, starts + micros(slots / rate)),
            )
        return slots, first_in

    def _place(self, want: LimitRequest, limit: int) -> int:
        """Give a worker the places that others leave, of which each may keep an equal part."""
        rows = self.connection.execute(PLACES, (want.destination_id, self.now)).fetchall()
        others = {worker: (n, wanted) for worker, n, wanted in rows if worker != self.worker}
        held: Counter[str] = Counter()
        for worker, fence, due_at in self.connection.execute(LEASED, (want.destination_id,)).fetchall():
            if worker == self.worker:
                continue
            if max(due_at, self.heartbeats.until(fence)) > self.now:
                held[worker] += 1
            elif others.pop(worker, None) is not None:
                # It is gone, or held up for so long that it begins nothing under its places (R29).
                self.connection.execute(
                    "DELETE FROM places WHERE destination_id = ? AND worker = ?", (want.destination_id, worker)
                )
        taken: int = sum(max(others.get(worker, (0, 0))[0], held[worker]) for worker in {*others, *held})
        part = limit // (1 + sum(wanted > 0 for _, wanted in others.values()))
        claimed: int = sum(min(wanted, part) for _, wanted in others.values())
        places = max(min(want.wanted, limit - claimed, limit - taken), 0)
        if places or want.wanted or want.busy:
            self.connection.execute(
                "INSERT INTO places (destination_id, worker, n, wanted, until) VALUES (?,?,?,?,?)"
                " ON CONFLICT DO UPDATE SET n = excluded.n, wanted = excluded.wanted, until = excluded.until",
                (
                    want.destination_id,
                    self.worker,
                    max(places, want.busy),
                    want.wanted,
                    self.now + micros(2 * want.lease),
                ),
            )
        else:
            self.connection.execute(
                "DELETE FROM places WHERE destination_id = ? AND (worker = ? OR until <= ?)",
                (want.destination_id, self.worker, self.now),
            )
        return places


HELD: Final = LookUp(
    "SELECT rowid, subject_key, delivery_id, fence, run, seq, attempts, upto, turn, replay_id, options, carries"
    " FROM heads WHERE leased AND subject_key IN"
)
GONE: Final = LookUp("DELETE FROM heads WHERE rowid IN")
FINISHED: Final = Update(
    "id, status, note, attempts, fence, category, last_status, last_error, settled_at, reason",
    "UPDATE deliveries SET status = v.status, note = v.note, attempts = v.attempts, fence = v.fence,"
    " category = v.category, last_status = v.last_status, last_error = v.last_error, settled_at = v.settled_at,"
    " reason = v.reason FROM v WHERE deliveries.id = v.id",
)
FAILED: Final = Update(
    "id, attempts, fence, category, last_status, last_error",
    "UPDATE deliveries SET attempts = v.attempts, fence = v.fence, category = v.category,"
    " last_status = v.last_status, last_error = v.last_error FROM v WHERE deliveries.id = v.id",
)
LATER: Final = Update(
    "head, due_at, attempts, turn",
    "UPDATE heads SET leased = 0, alone = 0, carries = NULL, upto = 0, due_at = v.due_at, attempts = v.attempts,"
    " turn = v.turn FROM v WHERE heads.rowid = v.head",
)
SETTLED: Final = "SELECT 1 FROM attempts WHERE delivery_id = ? AND fence = ? AND outcome = ?"
NEXT: Final = """
SELECT id, event_id, seq, run, options, replay_id, fair,
       CASE WHEN (SELECT bulk FROM replays r WHERE r.id = replay_id) THEN 3 WHEN options & 32 THEN 0
       WHEN options & 64 THEN 2 ELSE 1 END
FROM deliveries WHERE subject_key = ?1 AND behind AND status = 'pending' AND seq > ?2 ORDER BY seq LIMIT 1
"""
PROMOTED: Final = Update(
    "head, delivery_id, event_id, seq, run, options, replay_id, fair, turn, due_at",
    "UPDATE heads SET delivery_id = v.delivery_id, event_id = v.event_id, seq = v.seq, run = v.run,"
    " options = v.options, replay_id = v.replay_id, fair = v.fair, turn = v.turn, due_at = v.due_at, leased = 0,"
    " alone = 0, carries = NULL, upto = 0, attempts = 0, crashes = 0, deaths = 0 FROM v WHERE heads.rowid = v.head",
)
COVERED_OF_ANY: Final = """
SELECT id, replay_id FROM deliveries
WHERE subject_key = ?1 AND behind AND status = 'pending' AND seq > ?2 AND seq <= ?3
"""
COVERED_OF_TYPE: Final = """
SELECT d.id, d.replay_id FROM deliveries d CROSS JOIN events e ON e.id = d.event_id
WHERE d.subject_key = ?1 AND d.behind AND d.status = 'pending' AND d.seq > ?2 AND d.seq <= ?3 AND e.type = ?4
"""
COALESCED: Final = Update(
    "id, status, settled_at, finished_by",
    "UPDATE deliveries SET status = v.status, note = 'coalesced', settled_at = v.settled_at,"
    " finished_by = v.finished_by FROM v WHERE deliveries.id = v.id",
)
REPLAYED: Final = Update(
    "replay_id, delivery_id, outcome",
    "UPDATE replay_items SET outcome = v.outcome FROM v"
    " WHERE replay_items.replay_id = v.replay_id AND replay_items.delivery_id = v.delivery_id",
)
FINISH_REPLAY: Final = """
UPDATE replays SET state = 'done', finished_at = ?2 WHERE id = ?1 AND state = 'running'
AND NOT EXISTS (SELECT 1 FROM replay_items WHERE replay_id = ?1 AND outcome IS NULL)
"""
RANKS: Final = Insert(
    "INSERT INTO ranks (destination_id, source_id, scope, rank, seen_at)",
    5,
    "ON CONFLICT DO UPDATE SET rank = max(rank, excluded.rank), seen_at = excluded.seen_at",
)


@dataclass(slots=True)
class Head:
    row: int
    id: bytes
    fence: int
    run: int
    seq: int
    attempts: int
    upto: int
    priority: int
    replay_id: bytes | None
    options: int
    carries: bytes | None

    def __post_init__(self) -> None:
        if self.priority == Priority.quarantined:  # it ran alone and survived, so its quarantine ends
            self.priority = int(PRIORITIES[self.options])


@dataclass(slots=True)
class SettlementRound(QueueRound):
    """One round of settlements."""

    attempts: list[tuple[Any, ...]] = field(default_factory=list)
    finished: list[tuple[Any, ...]] = field(default_factory=list)
    failed: list[tuple[Any, ...]] = field(default_factory=list)
    coalesced: list[tuple[Any, ...]] = field(default_factory=list)
    replayed: list[tuple[Any, ...]] = field(default_factory=list)
    ranks: list[tuple[Any, ...]] = field(default_factory=list)
    later: list[tuple[Any, ...]] = field(default_factory=list)
    replays_done: list[bytes] = field(default_factory=list)
    over: dict[int, tuple[Settlement, Head]] = field(default_factory=dict)
    """Settlements that finished the head of their queue, by row."""
    promoted: dict[int, int] = field(default_factory=dict)
    """Those of them whose queue goes on, with the priority of its next delivery."""
    made_due: set[int] = field(default_factory=set)
    breakers: list[BreakerChange] = field(default_factory=list)

    def settle(self, settlements: Sequence[Settlement]) -> Settled:
        """End these leases; return which were still ours, and leases on the next deliveries where requested."""
        heads = self._heads(settlements)
        ours: list[Settlement] = []
        for settlement in settlements:
            lease = settlement.lease
            head = heads.get(lease.queue_key)
            if head is not None and (head.id, head.fence) == (lease.front_id, lease.fence):
                del heads[lease.queue_key]  # a lease that is named twice ends once
                ours.append(settlement)
                self._settle(settlement, head)
        self._write()
        # After the queues have moved on: an emitted event may join the queue that its delivery has just left.
        emits = [one for settlement in ours for one in settlement.emits]
        keep_emitted(self.connection, self.now, emits, self.cipher)
        for settlement in ours:
            self.made_due |= settlement.emitted_to
        for destination_id, streak in count_streaks(ours).items():
            if (change := _keep_streak(self.connection, self.now, destination_id, streak)) is not None:
                self.breakers.append(change)
                if change.open_until is None:
                    self.made_due.add(destination_id)
        for settlement in ours:
            if settlement.pause is not None:
                pause(self.connection, self.now, settlement.lease.delivery.destination_id, "oncehook", settlement.pause)
        return Settled({settlement.lease.fence for settlement in ours}, self._lease_next())

    def _heads(self, settlements: Sequence[Settlement]) -> dict[bytes, Head]:
        """Return the leased rows among those that are named, by queue."""
        keys = list({settlement.lease.queue_key for settlement in settlements})
        return {key: Head(row, *columns) for row, key, *columns in HELD(self.connection, keys)}

    def recall(self, settlements: Sequence[Settlement], ours: set[int]) -> None:
        """Add to `ours` the fences that were settled before, when their holder did not hear of it."""
        for one in settlements:
            ids = {one.lease.delivery.id, one.lease.front_id}
            about = [(id_, one.lease.fence, one.what) for id_ in ids if one.lease.fence not in ours]
            if any(self.connection.execute(SETTLED, row).fetchone() for row in about):
                ours.add(one.lease.fence)
                kept = find_kept(self.connection, [emission.intake for emission in one.emits])
                for emission, verdicts in zip(one.emits, kept, strict=True):
                    emission.verdict = verdicts[0] if verdicts else None

    def _lease_next(self) -> list[Lease]:
        """Lease the next deliveries where requested, unless a bulk replay would come after live work."""
        wanted = []
        for row, priority in self.promoted.items():
            settlement, head = self.over[row]
            destination_id = settlement.lease.delivery.destination_id
            if settlement.take_next is not None and priority == head.priority:
                wanted.append((row, LeaseRequest(destination_id, 1, settlement.take_next, Priority(priority))))
            else:
                self.made_due.add(destination_id)
        if not wanted:
            return []
        leases = Leasing(self.connection, self.now, self.heartbeats, self.cipher, self.worker).lease_heads(wanted)
        if len(leases) < len(wanted):  # held back: a worker must find out until when
            self.made_due |= {want.destination_id for _, want in wanted} - {
                lease.delivery.destination_id for lease in leases
            }
        return leases

    def _settle(self, settlement: Settlement, head: Head) -> None:
        if settlement.commit is not None:
            run_effect(self.connection, settlement)
        if settlement.what is Settle.release:
            priority = settlement.lease.priority if settlement.lease.priority is Priority.quarantined else head.priority
            self._put_back(settlement, head, head.attempts - 1, priority)
        elif settlement.what is Settle.retry:
            self._retry(settlement, head)
        else:
            self._finish(settlement, head)

    def _put_back(self, settlement: Settlement, head: Head, attempts: int, priority: int) -> None:
        self.later.append((head.row, self.now + micros(settlement.wait), attempts, priority))
        if not settlement.wait:
            self.made_due.add(settlement.lease.delivery.destination_id)

    def _retry(self, settlement: Settlement, head: Head) -> None:
        self._note_attempt(settlement, head, settlement.lease.delivery.id, settlement.lease.delivery.run)
        error = _error(settlement)
        self._put_back(settlement, head, head.attempts, head.priority)
        for delivery_id in {head.id, settlement.lease.delivery.id}:
            self.failed.append(
                (delivery_id, head.attempts, head.fence, settlement.category, settlement.evidence.status, error)
            )
        self.counts[0, settlement.lease.delivery.destination_id, "retry"] += 1

    def _finish(self, settlement: Settlement, head: Head) -> None:
        lease, status = settlement.lease, settlement.what.value
        is_hold = settlement.what is Settle.dead and bool(head.options & Options.hold)
        # Only the head is held, so the attempt is recorded as the head's, whatever it carried.
        finisher, run = (head.id, head.run) if is_hold else (lease.delivery.id, lease.delivery.run)
        tried = was_tried(settlement)
        if tried:
            self._note_attempt(settlement, head, finisher, run)
        self._note_end(settlement, finisher, head.attempts if tried else head.attempts - 1)
        covered = [] if is_hold else self._find_covered(lease, head)
        replay_id = head.replay_id if finisher == head.id else lease.delivery.replay_id
        ended = [(finisher, replay_id), *covered]
        self.coalesced += [(id_, status, self.now, finisher) for id_, _ in covered]
        self.replayed += [(replay, id_, status) for id_, replay in ended if replay is not None]
        self.counts[0, lease.delivery.destination_id, "pending"] -= len(ended)
        self.counts[0, lease.delivery.destination_id, status] += len(ended)
        self.counts[0, lease.delivery.destination_id, "succeeded" if settlement.what is Settle.done else "died"] += 1
        if is_hold:
            self.later.append((head.row, NEVER, head.attempts if tried else head.attempts - 1, head.priority))
        else:
            self.over[head.row] = (settlement, head)
        if settlement.what is Settle.done and settlement.note != "stale":
            self._raise_rank(lease)

    def _note_attempt(self, settlement: Settlement, head: Head, delivery_id: bytes, run: int) -> None:
        evidence = settlement.evidence
        started_at = self.now - micros(settlement.duration)
        answer = self.cipher.encrypt_answer(evidence, delivery_id, head.fence)
        self.attempts.append(
            (
                *(delivery_id, head.fence, run, head.attempts, started_at, self.now, settlement.what.value),
                *(settlement.category, evidence.status, _error(settlement), answer),
            )
        )

    def _note_end(self, settlement: Settlement, delivery_id: bytes, attempts: int) -> None:
        is_done = settlement.what is Settle.done
        category = None if is_done else settlement.category
        error = None if is_done else _error(settlement)
        reason = "crash" if is_crash(settlement) else None
        self.finished.append(
            (
                *(delivery_id, settlement.what.value, settlement.note, attempts, settlement.lease.fence, category),
                *(settlement.evidence.status, error, self.now, reason),
            )
        )

    def _find_covered(self, lease: Lease, head: Head) -> list[tuple[bytes, bytes | None]]:
        """Return what else this attempt covered, with replay ids: the head, if it carried another delivery, and all
        that waited then."""
        if head.carries is None:
            return []
        within = (lease.queue_key, head.seq, head.upto)
        if head.options & Options.coalesce_any:
            found = self.connection.execute(COVERED_OF_ANY, within).fetchall()
        else:
            found = self.connection.execute(COVERED_OF_TYPE, (*within, lease.event.type)).fetchall()
        return [(head.id, head.replay_id), *[row for row in found if row[0] != lease.delivery.id]]

    def _raise_rank(self, lease: Lease) -> None:
        scope = lease.event.subject if lease.event.rank_scope is None else lease.event.rank_scope
        if lease.delivery.options & Options.latest_wins and lease.event.rank is not None and scope is not None:
            self.ranks.append((lease.delivery.destination_id, lease.event.source_id, scope, lease.event.rank, self.now))

    def _write(self) -> None:
        connection = self.connection
        ATTEMPTS(connection, self.attempts)
        FINISHED(connection, self.finished)
        FAILED(connection, self.failed)
        COALESCED(connection, self.coalesced)
        LATER(connection, self.later)
        RANKS(connection, self.ranks)
        over = [(one.lease.queue_key, row, head.seq) for row, (one, head) in self.over.items()]
        self.promoted = go_on(connection, self.now, over)
        self.replays_done = note_replayed(connection, self.now, self.replayed)
        count(connection, self.now, self.counts)


def _error(settlement: Settlement) -> str | None:
    error = settlement.evidence.error
    return None if error is None else clean_text(error)


def go_on(connection: sqlite3.Connection, now: Micros, over: Iterable[tuple[bytes, int, int]]) -> dict[int, int]:
    """Continue queues whose head is finished: the next waiting delivery becomes the head, or the row is deleted.

    `over`: queue, row, and the head's number. Returns the rows that stay, with their priority.
    """
    gone: list[int] = []
    promoted: list[tuple[Any, ...]] = []
    for queue_key, row, seq in over:
        found = connection.execute(NEXT, (queue_key, seq)).fetchone()
        if found is None:
            gone.append(row)
        else:
            promoted.append((row, *found, now))
    PROMOTED(connection, promoted)
    GONE(connection, gone)
    return {one[0]: one[-2] for one in promoted}


def note_replayed(connection: sqlite3.Connection, now: Micros, items: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """Store the outcomes of replay items: (replay, delivery, outcome). Return the replays that ended with them."""
    REPLAYED(connection, items)
    return [one for one in {item[0] for item in items} if finish_replay(connection, now, one)]


def finish_replay(connection: sqlite3.Connection, now: Micros, replay_id: bytes) -> bool:
    """Finish a replay if none of its items is left; return whether it was."""
    return connection.execute(FINISH_REPLAY, (replay_id, now)).rowcount == 1


def keep_emitted(connection: sqlite3.Connection, now: Micros, emits: Sequence[Emission], cipher: Cipher) -> None:
    """Store what handlers emitted, like arrivals."""
    if not emits:
        return
    (seq,) = connection.execute("SELECT value FROM marks WHERE name = 'seq'").fetchone()
    group = IntakeGroup(connection, now, seq, [emission.intake for emission in emits], cipher)
    for emission, (verdict,) in zip(emits, group.write(), strict=True):
        emission.verdict = verdict
    connection.execute("UPDATE marks SET value = ? WHERE name = 'seq'", (group.seq,))


# -- the destination ---------------------------------------------------------------------------


def _keep_streak(
    connection: sqlite3.Connection, now: Micros, destination_id: int, streak: Streak
) -> BreakerChange | None:
    """Store the outcome of a group for its destination: the breaker opens after so many failures in a row.

    Returns what it is now, where it has opened or closed.
    """
    row = connection.execute(
        "SELECT failures, last_failed, open_until FROM destination_state WHERE destination_id = ?", (destination_id,)
    ).fetchone()
    failures, last_failed, open_until = before = row or (0, None, None)
    if streak.reset:
        failures, last_failed, open_until = 0, None, None
    if streak.failures:
        is_the_same = streak.failures == 1 and last_failed == streak.last_failed
        failures += 0 if is_the_same else streak.failures
        last_failed = streak.last_failed
        if failures >= streak.breaker.failures:
            open_until = now + micros(streak.breaker.open)
    if (failures, last_failed, open_until) != before:
        connection.execute(
            "INSERT INTO destination_state (destination_id, failures, last_failed, open_until) VALUES (?,?,?,?)"
            " ON CONFLICT DO UPDATE SET failures = excluded.failures, last_failed = excluded.last_failed,"
            " open_until = excluded.open_until",
            (destination_id, failures, last_failed, open_until),
        )
    if (before[2] is None) == (open_until is None):
        return None
    return BreakerChange(destination_id, None if open_until is None else moment(open_until), failures)


def pause(connection: sqlite3.Connection, now: Micros, destination_id: int, actor: str, why: str) -> None:
    """Pause a destination and audit it, unless it is paused already."""
    changed = connection.execute(
        "INSERT INTO destination_state (destination_id, paused_at, paused_by, paused_why) VALUES (?,?,?,?)"
        " ON CONFLICT DO UPDATE SET paused_at = excluded.paused_at, paused_by = excluded.paused_by,"
        " paused_why = excluded.paused_why WHERE paused_at IS NULL",
        (destination_id, now, clean_text(actor), clean_text(why)),
    ).rowcount
    if changed:
        write_audit(connection, now, actor, "pause", destination_name(connection, destination_id), {"reason": why})


def destination_name(connection: sqlite3.Connection, destination_id: int) -> str:
    row = connection.execute("SELECT name FROM destinations WHERE id = ?", (destination_id,)).fetchone()
    return str(destination_id) if row is None else str(row[0])


# -- a handler's own effect --------------------------------------------------------------------

_LEADING: Final = re.compile(r"(?:[\s;\ufeff]|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*", re.DOTALL)
_ROLLED_BACK: Final = "The commit function has rolled back the store's transaction; nothing of it is written."
_REFUSED: Final = frozenset(
    {"BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "ATTACH", "DETACH", "PRAGMA", "VACUUM"}
)
# Mistakes of the effect itself; any other database error means that the store is in trouble.
_OWN_CODES: Final = frozenset(
    {
        *(None, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG),
        *(sqlite3.SQLITE_RANGE, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_MISUSE),
    }
)


class Effect:
    """The connection for a handler's effect, without control of the transaction, which is the store's."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection: sqlite3.Connection | None = connection

    def execute(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        return self._open(statement).execute(statement, parameters)

    def executemany(self, statement: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
        return self._open(statement).executemany(statement, parameters)

    def _open(self, statement: str) -> sqlite3.Connection:
        if self._connection is None:
            raise ConfigError("This connection was lent for the length of one call, and the call is over.")
        if not self._connection.in_transaction:
            raise StoreUnavailable(_ROLLED_BACK)
        start = _LEADING.match(statement)
        word = re.match(r"[A-Za-z]*", statement[start.end() if start else 0 :])
        if word is not None and word[0].upper() in _REFUSED:
            raise ConfigError(
                f"{word[0].upper()} is not for a commit function: its transaction is the store's.",
                hint="Only write; when the function returns, it is committed together with the delivery.",
            )
        return self._connection

    def close(self) -> None:
        self._connection = None


def run_effect(connection: sqlite3.Connection, settlement: Settlement) -> None:
    """Run a handler's effect in the settling transaction. An error of it undoes only this settlement."""
    assert settlement.commit is not None
    effect = Effect(connection)
    try:
        settlement.commit(effect)
    except BaseException as error:
        if isinstance(error, sqlite3.Error) and primary_code(error) not in _OWN_CODES:
            raise
        # Neither of these can be handed to who waits for the commit: the first would end the loop, the second itself.
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            raise EffectFailed(RuntimeError(f"The commit function raised {error!r}.")) from error
        raise EffectFailed(error) from error
    finally:
        effect.close()
    if not connection.in_transaction:
        raise StoreUnavailable(_ROLLED_BACK)
