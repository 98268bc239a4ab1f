"""Acts of people on a SQLite store, each with its entry in the audit log: replay, retry, discard, erase, pause."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from msgspec.structs import asdict

from oncehook.errors import Erased, NotFound, NotReplayable, NotWaiting, PlanChanged, ReplayTooSoon
from oncehook.model import (
    ERASED,
    NOTHING_TO_REPLAY,
    NOTHING_TO_REPLAY_HINT,
    REPLAY_PAUSE,
    ChartMark,
    DeliveryId,
    EraseOrder,
    Erasure,
    Filter,
    Options,
    PlanSnapshot,
    Priority,
    ReplayCommand,
    ReplayId,
    ReplayState,
    StoredReplay,
    last_delivery_of,
    mention_of,
    without_mention,
)
from oncehook.store.audit import changed_settings
from oncehook.store.base import KEPT_MARKS, UNSEEN
from oncehook.store.sqlite.connection import (
    NEVER,
    SECOND,
    Insert,
    Micros,
    clean_text,
    count,
    micros,
    moment,
    to_micros,
    write_audit,
)
from oncehook.store.sqlite.intake import CHAINS
from oncehook.store.sqlite.queue import destination_name, finish_replay, go_on, note_replayed
from oncehook.store.sqlite.read import get_replay, is_replayable, select_deliveries

_BURST: Final = SECOND
"""Time that a replay catches up with at most after it was not fed for a while."""

_ACTS: Final = {ReplayState.paused: "pause", ReplayState.running: "resume", ReplayState.aborted: "abort"}

ITEMS: Final = Insert("INSERT INTO replay_items (replay_id, n, delivery_id)", 3)
DELIVERY: Final = """
SELECT id, event_id, destination_id, subject_key, status, run, seq, options, last_replay_at, note, fair
FROM deliveries WHERE id = ?
"""
DEAD: Final = """
SELECT d.id, d.destination_id, h.subject_key, h.rowid, h.seq FROM deliveries d LEFT JOIN heads h
  ON h.subject_key = coalesce(d.subject_key, d.id) AND h.delivery_id = d.id
WHERE d.id = ? AND d.status = 'dead' AND d.settled_at <= ?
"""
# Items are fed in order, so open items that were fed come first.
OPEN: Final = """
SELECT delivery_id, fed_at FROM replay_items WHERE replay_id = ? AND outcome IS NULL ORDER BY n LIMIT ?
"""


@dataclass(slots=True)
class ReplayedDelivery:
    """A delivery as a replay reads it."""

    id: bytes
    event_id: bytes
    destination_id: int
    subject_key: bytes | None
    status: str
    run: int
    seq: int
    options: int
    last_replay_at: Micros | None
    note: str | None
    fair: int | None

    def rests_for(self, now: Micros) -> float:
        """Return the seconds until it may be replayed again."""
        if self.last_replay_at is None:
            return 0.0
        return REPLAY_PAUSE - (now - self.last_replay_at) / SECOND


class Replaying:
    """New runs of deliveries, inside one transaction. `seq` continues from the last number ever used."""

    def __init__(self, connection: sqlite3.Connection, now: Micros) -> None:
        self.connection = connection
        self.now = now
        (self.seq,) = connection.execute("SELECT value FROM marks WHERE name = 'seq'").fetchone()
        self.counts: Counter[tuple[int, int, str]] = Counter()
        self.finished: list[bytes] = []

    # -- making ------------------------------------------------------------------------------------

    def make(self, replay_id: bytes, order: ReplayCommand, meant: Sequence[bytes] | None) -> StoredReplay:
        """Store a replay. `meant`: the deliveries of a bulk one; a single one is looked up here."""
        if (known := self._find_known(order)) is not None:
            return known
        if meant is not None:
            if order.expected is not None and order.expected != len(meant):
                raise PlanChanged(f"The plan said {order.expected}, now it would be {len(meant)}.")
            if not meant:
                raise NotReplayable(NOTHING_TO_REPLAY, hint=NOTHING_TO_REPLAY_HINT)
            self._insert(replay_id, order, meant)
        else:
            single = self._single(order)
            self._insert(replay_id, order, [single.id])
            self._run(single, replay_id, Priority.live, order.fresh_id)
            self.connection.execute("UPDATE replay_items SET fed_at = ? WHERE replay_id = ?", (self.now, replay_id))
        self._write()
        return _get_replay(self.connection, replay_id)

    def _find_known(self, order: ReplayCommand) -> StoredReplay | None:
        if order.request_key is None:
            return None
        row = self.connection.execute("SELECT id FROM replays WHERE request_key = ?", (order.request_key,)).fetchone()
        return None if row is None else get_replay(self.connection, row[0])

    def _single(self, order: ReplayCommand) -> ReplayedDelivery:
        matching = [row[0] for row in islice(select_deliveries(self.connection, order.filter), 2)]
        if len(matching) != 1:
            raise NotFound if not matching else NotReplayable("More than one delivery is meant; order a bulk replay.")
        single = ReplayedDelivery(*self.connection.execute(DELIVERY, matching).fetchone())
        if single.note == ERASED:
            raise Erased
        if not is_replayable(single.status, order.force, single.note):
            is_done = single.status == "done"
            raise NotReplayable(hint="It is done; order it with `force`." if is_done else "It is being worked on.")
        if (rest := single.rests_for(self.now)) > 0:
            raise ReplayTooSoon(rest)
        return single

    def _insert(self, replay_id: bytes, order: ReplayCommand, meant: Sequence[bytes]) -> None:
        options = Options.fresh_id if order.fresh_id else Options.none
        self.connection.execute(
            "INSERT INTO replays (id, state, request_key, about, actor, reason, options, force, rate, bulk, planned,"
            " next_at, created_at) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                *(replay_id, ReplayState.running, order.request_key, json.dumps(order.about, default=str)),
                *(clean_text(order.actor), clean_text(order.reason), int(options), order.force, order.rate),
                *(order.bulk, len(meant), self.now, self.now),
            ),
        )
        ITEMS(self.connection, [(replay_id, n, delivery_id) for n, delivery_id in enumerate(meant, 1)])
        target = str(ReplayId(replay_id))
        write_audit(self.connection, self.now, order.actor, "replay", target, order.audit_detail(len(meant)))

    # -- feeding -----------------------------------------------------------------------------------

    def feed(self, open_at_most: int) -> int:
        """Hand the next items of running replays to workers, and finish replays without remaining items."""
        fed = 0
        for replay_id, options, force, rate, next_at in self.connection.execute(
            "SELECT id, options, force, rate, next_at FROM replays WHERE state = 'running' ORDER BY id"
        ).fetchall():
            found = self.connection.execute(OPEN, (replay_id, open_at_most)).fetchall()
            waiting = [delivery_id for delivery_id, fed_at in found if fed_at is None]
            start = max(next_at, self.now - _BURST)
            if rate is not None:
                waiting = waiting[: _allowance(self.now - start, rate)]
            handed = [one for one in waiting if self._feed(replay_id, one, options, bool(force))]
            if rate is not None and handed:
                next_at = start + micros(len(handed) / rate)
                self.connection.execute("UPDATE replays SET next_at = ? WHERE id = ?", (next_at, replay_id))
            fed += len(handed)
            if finish_replay(self.connection, self.now, replay_id):
                self.finished.append(replay_id)
        self._write()
        return fed

    def _feed(self, replay_id: bytes, delivery_id: bytes, options: int, force: bool) -> bool:
        row = self.connection.execute(DELIVERY, (delivery_id,)).fetchone()
        d = None if row is None else ReplayedDelivery(*row)
        if d is None or not is_replayable(d.status, force, d.note) or d.rests_for(self.now) > 0:
            self.connection.execute(
                "UPDATE replay_items SET outcome = 'skipped' WHERE replay_id = ? AND delivery_id = ?",
                (replay_id, delivery_id),
            )
            return False
        self._run(d, replay_id, Priority.replay, bool(options & Options.fresh_id))
        self.connection.execute(
            "UPDATE replay_items SET fed_at = ? WHERE replay_id = ? AND delivery_id = ?",
            (self.now, replay_id, delivery_id),
        )
        return True

    # -- a new run -----------------------------------------------------------------------------------

    def _run(self, d: ReplayedDelivery, replay_id: bytes, priority: Priority, fresh_id: bool) -> None:
        """Start a new run: in place for a held head, otherwise at the tail of its subject."""
        queue_key = d.subject_key or d.id
        options = d.options & ~Options.fresh_id | (Options.fresh_id if fresh_id else 0)
        row = self.connection.execute("SELECT delivery_id FROM heads WHERE subject_key = ?", (queue_key,)).fetchone()
        head_id = None if row is None else row[0]
        if head_id == d.id:
            self._wake_held(queue_key, options, replay_id, priority)
            seq, behind = d.seq, None
        else:
            self.seq += 1
            seq, behind = self.seq, head_id is not None
            if behind:
                self._join(queue_key, priority)
            else:
                self._lead(queue_key, d, options, replay_id, priority)
        self.connection.execute(
            "UPDATE deliveries SET status = 'pending', run = run + 1, attempts = 0, seq = ?2, options = ?3,"
            " behind = coalesce(?4, behind), replay_id = ?5, last_replay_at = ?6, settled_at = NULL, note = NULL,"
            " finished_by = NULL, reason = NULL WHERE id = ?1",
            (d.id, seq, options, behind, replay_id, self.now),
        )
        self.counts[0, d.destination_id, d.status] -= 1
        self.counts[0, d.destination_id, "pending"] += 1
        self.counts[0, d.destination_id, "replays"] += 1

    def _wake_held(self, queue_key: bytes, options: int, replay_id: bytes, priority: Priority) -> None:
        self.connection.execute(
            "UPDATE heads SET due_at = ?2, run = run + 1, attempts = 0, crashes = 0, deaths = 0, options = ?3,"
            " replay_id = ?4, turn = CASE WHEN turn = 4 THEN 4 ELSE min(turn, ?5) END WHERE subject_key = ?1",
            (queue_key, self.now, options, replay_id, priority),
        )

    def _join(self, queue_key: bytes, priority: Priority) -> None:
        self.connection.execute(
            "UPDATE heads SET turn = CASE WHEN turn = 4 THEN 4 ELSE min(turn, ?2) END WHERE subject_key = ?1",
            (queue_key, priority),
        )

    def _lead(self, queue_key: bytes, d: ReplayedDelivery, options: int, replay_id: bytes, priority: Priority) -> None:
        self.connection.execute(
            "INSERT INTO heads (subject_key, destination_id, turn, due_at, delivery_id, event_id, seq, run, options,"
            " replay_id, fair) VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            (
                *(queue_key, d.destination_id, priority, self.now, d.id, d.event_id),
                *(self.seq, d.run + 1, options, replay_id, d.fair),
            ),
        )

    def _write(self) -> None:
        self.connection.execute("UPDATE marks SET value = ? WHERE name = 'seq'", (self.seq,))
        count(self.connection, self.now, self.counts)


def _allowance(passed: Micros, rate: float) -> int:
    """Return how many may be fed after this time; at least one, once it is time."""
    return 0 if passed < 0 else max(1, int(passed / SECOND * rate))


def select_replayed(connection: sqlite3.Connection, order: ReplayCommand, *, decrypts: bool) -> list[bytes]:
    """Return the deliveries of a bulk replay, in order of commit."""
    found = select_deliveries(connection, order.filter, decrypts=decrypts)
    rows = [row for row in found if is_replayable(row[2], order.force, row[5])]
    return [row[0] for row in sorted(rows, key=lambda row: row[1])]


def _get_replay(connection: sqlite3.Connection, replay_id: bytes) -> StoredReplay:
    replay = get_replay(connection, replay_id)
    assert replay is not None
    return replay


# -- other acts --------------------------------------------------------------------------------------


def set_replay_state(
    connection: sqlite3.Connection, now: Micros, replay_id: bytes, state: ReplayState, actor: str
) -> StoredReplay:
    row = connection.execute("SELECT state FROM replays WHERE id = ?", (replay_id,)).fetchone()
    if row is None:
        raise NotFound
    if row[0] in (ReplayState.done, ReplayState.aborted) or state not in _ACTS:
        raise NotWaiting(f"This replay is {row[0]}.")
    finished_at = now if state is ReplayState.aborted else None
    connection.execute(
        "UPDATE replays SET state = ?2, next_at = max(next_at, ?3), finished_at = ?4 WHERE id = ?1",
        (replay_id, state, now, finished_at),
    )
    write_audit(connection, now, actor, _ACTS[state], str(ReplayId(replay_id)), {})
    return _get_replay(connection, replay_id)


def retry_now(connection: sqlite3.Connection, now: Micros, delivery_id: bytes, actor: str) -> None:
    known = connection.execute(
        "SELECT status, coalesce(subject_key, id) FROM deliveries WHERE id = ?", (delivery_id,)
    ).fetchone()
    if known is None:
        raise NotFound
    status, queue_key = known
    changed = connection.execute(
        "UPDATE heads SET due_at = min(due_at, ?3) WHERE subject_key = ?1 AND delivery_id = ?2 AND NOT leased"
        " AND due_at < ?4",
        (queue_key, delivery_id, now, NEVER),
    ).rowcount
    if status != "pending" or not changed:
        raise NotWaiting("It is tried just now, waits behind another, or is finished.")
    write_audit(connection, now, actor, "retry", str(DeliveryId(delivery_id)), {})


def discard(
    connection: sqlite3.Connection,
    now: Micros,
    ids: Sequence[bytes],
    actor: str,
    reason: str,
    seen: PlanSnapshot | None,
) -> int:
    """Close the dead letters among these that were dead when they were seen; a held subject goes on."""
    by = NEVER if seen is None else to_micros(seen.at)
    dead = [row for one in ids if (row := connection.execute(DEAD, (one, by)).fetchone()) is not None]
    if seen is not None and len(dead) > seen.count:
        raise PlanChanged(f"The plan said {seen.count}, now it would be {len(dead)}.")
    counts: Counter[tuple[int, int, str]] = Counter()
    over: list[tuple[Any, ...]] = []
    for delivery_id, destination_id, queue_key, *held in dead:
        connection.execute(
            "UPDATE deliveries SET status = 'discarded', reason = ?2 WHERE id = ?1", (delivery_id, clean_text(reason))
        )
        if queue_key is not None:
            over.append((queue_key, *held))
        counts[0, destination_id, "dead"] -= 1
        counts[0, destination_id, "discarded"] += 1
    if dead:
        go_on(connection, now, over)
        count(connection, now, counts)
        target = str(DeliveryId(dead[0][0])) if len(dead) == 1 else f"{len(dead)} deliveries"
        write_audit(connection, now, actor, "discard", target, {"reason": reason, "count": len(dead)})
    return len(dead)


def select_dead(connection: sqlite3.Connection, filter: Filter, *, decrypts: bool) -> list[bytes]:
    """Return the dead letters of a filter, in order of commit."""
    rows = [row for row in select_deliveries(connection, filter, decrypts=decrypts) if row[2] == "dead"]
    return [row[0] for row in sorted(rows, key=lambda row: row[1])]


def resume(connection: sqlite3.Connection, now: Micros, destination_id: int, actor: str) -> None:
    connection.execute(
        "UPDATE destination_state SET paused_at = NULL, paused_by = NULL, paused_why = NULL, failures = 0,"
        " last_failed = NULL, open_until = NULL WHERE destination_id = ?",
        (destination_id,),
    )
    write_audit(connection, now, actor, "resume", destination_name(connection, destination_id), {})


def try_now(connection: sqlite3.Connection, now: Micros, destination_id: int, actor: str) -> bool:
    changed = connection.execute(
        "UPDATE destination_state SET open_until = ?2 WHERE destination_id = ?1 AND open_until > ?2",
        (destination_id, now),
    ).rowcount
    if not changed:
        return False
    connection.execute(
        "UPDATE heads SET due_at = ?2 WHERE rowid = (SELECT rowid FROM heads WHERE destination_id = ?1 AND turn < 4"
        " AND NOT leased ORDER BY turn, due_at LIMIT 1) AND due_at > ?2 AND due_at < ?3",
        (destination_id, now, NEVER),
    )
    write_audit(connection, now, actor, "try", destination_name(connection, destination_id), {})
    return True


def add_mark(connection: sqlite3.Connection, now: Micros, text: str, actor: str) -> ChartMark:
    made = ChartMark(moment(now), clean_text(text), clean_text(actor))
    connection.execute("INSERT INTO chart_marks (at, text, actor) VALUES (?,?,?)", (now, made.text, made.actor))
    connection.execute("DELETE FROM chart_marks WHERE n <= (SELECT max(n) FROM chart_marks) - ?", (KEPT_MARKS,))
    write_audit(connection, now, actor, "mark", made.text, {})
    return made


_OF_SUBJECT: Final = (
    " FROM events WHERE subject = ?1 AND (?2 IS NULL OR source_id = ?2) AND (?4 IS NULL OR account = ?4)"
)
# 8: Mark.erased. An event that is erased has no subject any more, and keeps its account.
_OF_ACCOUNT: Final = (
    " FROM events WHERE account = ?4 AND (?2 IS NULL OR source_id = ?2) AND NOT marks & 8 AND ?1 IS NULL"
)
EVENTS: Final = "SELECT id, key_hash, batch_id" + _OF_SUBJECT + " ORDER BY id LIMIT ?3"
EMPTY_REJECTIONS: Final = """
UPDATE rejections SET head = NULL, body = NULL WHERE (head IS NOT NULL OR body IS NOT NULL)
AND (?1 IS NULL OR source = (SELECT name FROM sources WHERE id = ?1))
"""
EVENTS_OF_ACCOUNT: Final = "SELECT id, key_hash, batch_id" + _OF_ACCOUNT + " ORDER BY id LIMIT ?3"
DELIVERIES: Final = """
SELECT id, destination_id, status, coalesce(subject_key, id), replay_id FROM deliveries WHERE id > ?1 AND id <= ?2
"""
WAITING: Final = """
SELECT id, destination_id, status, coalesce(subject_key, id), replay_id FROM deliveries
WHERE status <> 'done' AND status IN ('pending', 'dead') AND destination_id = ?1 AND id < ?2 ORDER BY id LIMIT ?3
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
# Tells whether a split request still contains events of other subjects: then its head stays.
BATCH: Final = """
SELECT length(b.body), EXISTS (
    SELECT 1 FROM events e WHERE e.batch_id = b.id AND NOT e.marks & 8
      AND (?2 IS NOT NULL AND e.subject IS NOT ?2 OR ?3 IS NOT NULL AND e.account IS NOT ?3)
  ) OR EXISTS (
    SELECT 1 FROM arrivals a JOIN events e ON e.id = a.event_id
    WHERE a.batch_id = b.id AND NOT e.marks & 8
      AND (?2 IS NOT NULL AND e.subject IS NOT ?2 OR ?3 IS NOT NULL AND e.account IS NOT ?3))
FROM batches b WHERE b.id = ?1
"""
EMPTY_BATCH: Final = "UPDATE batches SET body = x'', head = CASE WHEN ?2 THEN head ELSE x'' END WHERE id = ?1"
# An attempt that carried an erased delivery is invalid and does not count; the head stays.
VOID: Final = """
UPDATE heads SET leased = 0, attempts = attempts - 1, due_at = ?2, alone = 0, upto = 0, carries = NULL WHERE rowid = ?1
"""


@dataclass(slots=True)
class ErasedBatch:
    erased: Erasure = field(default_factory=Erasure)
    fences: list[int] = field(default_factory=list)
    """Fences of invalidated leases."""
    finished: list[bytes] = field(default_factory=list)
    """Replays without remaining items."""


class ClosingRound:
    """Open deliveries and dead letters that are discarded, inside one transaction; their queues go on without them."""

    def __init__(self, connection: sqlite3.Connection, now: Micros, reason: str) -> None:
        self.connection, self.now, self.reason = connection, now, reason
        self.closed: defaultdict[bytes, dict[bytes, str]] = defaultdict(dict)
        """Closed deliveries with their former status, by queue."""
        self.counts: Counter[tuple[int, int, str]] = Counter()
        self.replayed: list[tuple[bytes, bytes, str]] = []
        self.fences: list[int] = []

    def discard_waiting(self, destination_id: int, before: bytes, limit: int) -> ErasedBatch:
        """Discard what waits for a destination, and its dead letters, with a lower id than `before`."""
        self.close(self.connection.execute(WAITING, (destination_id, before, limit)).fetchall())
        finished = self.go_on()
        count(self.connection, self.now, self.counts)
        return ErasedBatch(Erasure(deliveries=sum(map(len, self.closed.values()))), self.fences, finished)

    def close(self, deliveries: Sequence[Any]) -> None:
        """Close those of these rows (`DELIVERIES`) that are open or dead."""
        for delivery_id, destination_id, status, queue_key, replay_id in deliveries:
            if status not in ("pending", "dead"):
                continue
            self.connection.execute(CLOSE, (delivery_id, clean_text(self.reason), self.now))
            self.closed[queue_key][delivery_id] = status
            self.counts[0, destination_id, status] -= 1
            self.counts[0, destination_id, "discarded"] += 1
            if status == "pending" and replay_id is not None:
                self.replayed.append((replay_id, delivery_id, "skipped"))

    def go_on(self) -> list[bytes]:
        """Let the queues go on; return the replays that have ended with it."""
        for queue_key, closed in self.closed.items():
            self._go_on_without(queue_key, closed)
        return note_replayed(self.connection, self.now, self.replayed)

    def _go_on_without(self, queue_key: bytes, closed: dict[bytes, str]) -> None:
        found = self.connection.execute(HEAD, (queue_key,)).fetchone()
        if found is None:  # the queue has continued without these dead letters
            return
        row, head_id, leased, fence, seq, carries = found
        is_void = bool(leased) and (head_id in closed or carries in closed)
        if is_void:
            self.fences.append(fence)
        if head_id in closed:
            go_on(self.connection, self.now, [(queue_key, row, seq)])
        elif is_void:
            self.connection.execute(VOID, (row, self.now))


class ErasureRound(ClosingRound):
    """One batch of an erasure, inside one transaction."""

    def __init__(self, connection: sqlite3.Connection, now: Micros, order: EraseOrder) -> None:
        super().__init__(connection, now, order.reason)
        self.order = order
        self.batches: set[bytes] = set()
        self.attempts = self.arrivals = 0

    def erase(self, limit: int) -> ErasedBatch:
        order = self.order
        # Nobody can tell whose bytes a rejected arrival has, so all go.
        self.connection.execute(EMPTY_REJECTIONS, (order.source_id,))
        events = find_erasable(self.connection, order, limit)
        if not events:
            return ErasedBatch()
        for event in events:
            self.close(self._deliveries(event[0]))
        finished = self.go_on()
        for event_id, key_hash, batch_id in events:
            self._empty(event_id, key_hash, batch_id)
        shared = self._empty_batches()
        forget_mentions(self.connection, order)
        count(self.connection, self.now, self.counts)
        closed_in_all = sum(map(len, self.closed.values()))
        erased = Erasure(len(events), closed_in_all, self.attempts, self.arrivals, len(shared), sum(shared))
        detail = {"reason": order.reason, **asdict(erased)}
        write_audit(self.connection, self.now, order.actor, "erase", order.target, detail)
        return ErasedBatch(erased, self.fences, finished)

    def _deliveries(self, event_id: bytes) -> list[Any]:
        return self.connection.execute(DELIVERIES, _range(event_id)).fetchall()

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
        self.connection.execute("DELETE FROM media WHERE event_id = ?", (event_id,))
        self.connection.execute(EMPTY_EVENT, (event_id, UNSEEN))
        self.batches.update([batch_id] if batch_id else [])

    def _empty_batches(self) -> list[bool]:
        """Empty split requests; return, for each that still had its bytes, whether other subjects were in it."""
        shared = []
        for batch_id in self.batches:
            found = self.connection.execute(BATCH, (batch_id, self.order.subject, self.order.account)).fetchone()
            if found is not None:
                self.connection.execute(EMPTY_BATCH, (batch_id, found[1]))
                shared += [bool(found[1])] if found[0] else []
        return shared


def _range(event_id: bytes) -> tuple[bytes, bytes]:
    """Return the lowest and the highest id of its deliveries."""
    return event_id, last_delivery_of(event_id)


def forget_mentions(connection: sqlite3.Connection, order: EraseOrder) -> None:
    """Remove the subject from queries stored with replays and in the audit log."""
    if order.subject is None:
        return
    asked = (mention_of(order),)
    for replay_id, about in connection.execute("SELECT id, about FROM replays WHERE instr(about, ?)", asked).fetchall():
        changed = (without_mention(about, order), replay_id)
        connection.execute("UPDATE replays SET about = ? WHERE id = ?", changed)
    # Entries of the chain contain no subject (`ReplayCommand.noted`).
    old = "SELECT n, detail FROM audit WHERE hash IS NULL AND instr(detail, ?)"
    for n, detail in connection.execute(old, asked).fetchall():
        connection.execute("UPDATE audit SET detail = ? WHERE n = ?", (without_mention(detail, order), n))


def find_erasable(connection: sqlite3.Connection, order: EraseOrder, limit: int) -> list[Any]:
    """Return the events that an order means, at most so many; -1: all of them."""
    asked = (order.subject, order.source_id, limit, order.account)
    if order.subject is None:
        return connection.execute(EVENTS_OF_ACCOUNT, asked).fetchall()
    return connection.execute(EVENTS, asked).fetchall()


def erasable(connection: sqlite3.Connection, order: EraseOrder) -> Erasure:
    found = Erasure()
    batches: set[bytes] = set()
    for event_id, _, batch_id in find_erasable(connection, order, -1):
        open_, attempts = connection.execute(_COUNTED, _range(event_id)).fetchone()
        later = connection.execute(ARRIVALS, (event_id,)).fetchall()
        batches.update(one for one in (batch_id, *(came_in for _, came_in in later)) if one)
        found += Erasure(1, open_, attempts, len(later))
    found_batches = [connection.execute(BATCH, (one, order.subject, order.account)).fetchone() for one in batches]
    shared = [bool(row[1]) for row in found_batches if row is not None and row[0]]
    return found + Erasure(batches=len(shared), shared_batches=sum(shared))


_COUNTED: Final = """
SELECT count(*) FILTER (WHERE status IN ('pending', 'dead')),
  coalesce(sum((SELECT count(*) FROM attempts a WHERE a.delivery_id = d.id)), 0)
FROM deliveries d WHERE d.id > ?1 AND d.id <= ?2
"""


def prune_audit(connection: sqlite3.Connection, cut: Micros, limit: int) -> int:
    """Remove the oldest entries of the log until one is younger than `cut`; the hash of the last one removed is
    kept."""
    gone: tuple[int, bytes | None] | None = None
    count = 0
    for n, at, hashed in connection.execute("SELECT n, at, hash FROM audit ORDER BY n LIMIT ?", (limit,)).fetchall():
        if at >= cut:
            break
        gone, count = (n, hashed), count + 1
    if gone is not None:
        connection.execute("UPDATE audit_chain SET pruned = ?1, pruned_hash = coalesce(?2, pruned_hash)", gone)
        connection.execute("DELETE FROM audit WHERE n <= ?", gone[:1])
    return count


def note_settings(connection: sqlite3.Connection, now: Micros, place: str, digests: Mapping[str, str]) -> None:
    """Store the digests of this start's settings, and audit the differences from the last start."""
    row = connection.execute("SELECT digests FROM settings_seen WHERE place = ?", (clean_text(place),)).fetchone()
    connection.execute(
        "INSERT INTO settings_seen (place, digests) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET digests = ?2",
        (clean_text(place), json.dumps(dict(digests))),
    )
    changes = {} if row is None else changed_settings(json.loads(row[0]), digests)
    if changes:
        write_audit(connection, now, "oncehook", "settings", place, changes)


LATEST: Final = "SELECT address FROM recipients WHERE destination_id = ? ORDER BY since DESC LIMIT 1"


def note_recipients(connection: sqlite3.Connection, now: Micros, addresses: Mapping[int, bytes]) -> None:
    """Store the destinations' addresses, writing changes only."""
    for destination_id, address in addresses.items():
        if connection.execute(LATEST, (destination_id,)).fetchone() != (address,):
            connection.execute(
                "INSERT OR REPLACE INTO recipients (destination_id, since, address) VALUES (?,?,?)",
                (destination_id, now, address),
            )
