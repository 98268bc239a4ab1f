"""What people and programs do to deliveries on SQLite: replay, retry, discard, pause. Called inside the writer.

Every act changes what it changes and writes its line into the audit log in one transaction. A replay adds a run to the
same delivery: no event is made, no key touched (R46).
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from oncehook.errors import Erased, NotFound, NotReplayable, NotWaiting, PlanChanged, ReplayTooSoon
from oncehook.model import (
    ERASED,
    NOTHING_TO_REPLAY,
    NOTHING_TO_REPLAY_HINT,
    REPLAY_PAUSE,
    DeliveryId,
    Filter,
    Options,
    PlanSnapshot,
    Priority,
    ReplayCommand,
    ReplayId,
    ReplayState,
    StoredReplay,
)
from oncehook.store.sqlite import find
from oncehook.store.sqlite.audit import kept, write_audit
from oncehook.store.sqlite.intake import Insert, Micros, count
from oncehook.store.sqlite.look import micros_at
from oncehook.store.sqlite.settle import destination_name, finish_replay, go_on
from oncehook.store.sqlite.show import get_replay, is_replayable
from oncehook.store.sqlite.work import NEVER, SECOND, micros

_BURST: Final = SECOND
"""A replay that was not fed for a while catches up with this much time at most."""

_ACTS: Final = {ReplayState.paused: "pause", ReplayState.running: "resume", ReplayState.aborted: "abort"}

ITEMS: Final = Insert("INSERT INTO replay_items (replay_id, n, delivery_id)", 3)
STANDING: Final = """
SELECT id, event_id, destination_id, subject_key, status, run, seq, options, last_replay_at, note
FROM deliveries WHERE id = ?
"""
DEAD: Final = """
SELECT d.id, d.destination_id, h.subject_key, h.rowid, h.seq FROM deliveries d LEFT JOIN heads h
  ON h.subject_key = coalesce(d.subject_key, d.id) AND h.delivery_id = d.id
WHERE d.id = ? AND d.status = 'dead' AND d.settled_at <= ?
"""
# What was fed comes first, because items are fed in their order.
OPEN: Final = """
SELECT delivery_id, fed_at FROM replay_items WHERE replay_id = ? AND outcome IS NULL ORDER BY n LIMIT ?
"""


@dataclass(slots=True)
class Standing:
    """A delivery as a replay finds it."""

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

    def rests_for(self, now: Micros) -> float:
        """Seconds until it may be replayed again."""
        if self.last_replay_at is None:
            return 0.0
        return REPLAY_PAUSE - (now - self.last_replay_at) / SECOND


class Replaying:
    """New runs of deliveries, inside one transaction. `seq` counts on from the last one ever given."""

    def __init__(self, connection: sqlite3.Connection, now: Micros) -> None:
        self.connection = connection
        self.now = now
        (self.seq,) = connection.execute("SELECT value FROM marks WHERE name = 'seq'").fetchone()
        self.counts: Counter[tuple[int, int, str]] = Counter()
        self.finished: list[bytes] = []

    # -- making ------------------------------------------------------------------------------------

    def make(self, replay_id: bytes, order: ReplayCommand, meant: Sequence[bytes] | None) -> StoredReplay:
        """Write a replay down. `meant`: the deliveries of a bulk one, found before; a single one is found here."""
        if (known := self._known(order)) is not None:
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
        return _told(self.connection, replay_id)

    def _known(self, order: ReplayCommand) -> StoredReplay | None:
        if order.request_key is None:
            return None
        row = self.connection.execute("SELECT id FROM replays WHERE request_key = ?", (order.request_key,)).fetchone()
        return None if row is None else get_replay(self.connection, row[0])

    def _single(self, order: ReplayCommand) -> Standing:
        matching = [row[0] for _, row in zip(range(2), find.meant(self.connection, order.filter), strict=False)]
        if len(matching) != 1:
            raise NotFound if not matching else NotReplayable("More than one delivery is meant; order a bulk replay.")
        single = Standing(*self.connection.execute(STANDING, matching).fetchone())
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
                *(
                    replay_id,
                    ReplayState.running,
                    order.request_key,
                    json.dumps(order.about, default=str),
                    kept(order.actor),
                ),
                *(
                    kept(order.reason),
                    int(options),
                    order.force,
                    order.rate,
                    order.bulk,
                    len(meant),
                    self.now,
                    self.now,
                ),
            ),
        )
        ITEMS(self.connection, [(replay_id, n, delivery_id) for n, delivery_id in enumerate(meant, 1)])
        target = str(ReplayId(replay_id))
        write_audit(self.connection, self.now, order.actor, "replay", target, order.audited(len(meant)))

    # -- feeding -----------------------------------------------------------------------------------

    def feed(self, open_at_most: int) -> int:
        """Hand the next items of running replays to workers, and finish those of which nothing is left."""
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
                self._put_off(replay_id, start + micros(len(handed) / rate))
            fed += len(handed)
            if finish_replay(self.connection, self.now, replay_id):
                self.finished.append(replay_id)
        self._write()
        return fed

    def _feed(self, replay_id: bytes, delivery_id: bytes, options: int, force: bool) -> bool:
        row = self.connection.execute(STANDING, (delivery_id,)).fetchone()
        standing = None if row is None else Standing(*row)
        is_left = standing is None or not is_replayable(standing.status, force, standing.note)
        if standing is None or is_left or standing.rests_for(self.now) > 0:
            self.connection.execute(
                "UPDATE replay_items SET outcome = 'skipped' WHERE replay_id = ? AND delivery_id = ?",
                (replay_id, delivery_id),
            )
            return False
        self._run(standing, replay_id, Priority.replay, bool(options & Options.fresh_id))
        self.connection.execute(
            "UPDATE replay_items SET fed_at = ? WHERE replay_id = ? AND delivery_id = ?",
            (self.now, replay_id, delivery_id),
        )
        return True

    def _put_off(self, replay_id: bytes, next_at: Micros) -> None:
        self.connection.execute("UPDATE replays SET next_at = ? WHERE id = ?", (next_at, replay_id))

    # -- a new run -----------------------------------------------------------------------------------

    def _run(self, d: Standing, replay_id: bytes, priority: Priority, fresh_id: bool) -> None:
        """One more run: at its place when it is a held head, else at the tail of its subject."""
        line = d.subject_key or d.id
        options = d.options & ~Options.fresh_id | (Options.fresh_id if fresh_id else 0)
        row = self.connection.execute("SELECT delivery_id FROM heads WHERE subject_key = ?", (line,)).fetchone()
        head_id = None if row is None else row[0]
        if head_id == d.id:
            self._wake_held(line, options, replay_id, priority)
            seq, behind = d.seq, None
        else:
            self.seq += 1
            seq, behind = self.seq, head_id is not None
            if behind:
                self._join(line, priority)
            else:
                self._lead(line, d, options, replay_id, priority)
        self.connection.execute(
            "UPDATE deliveries SET status = 'pending', run = run + 1, attempts = 0, seq = ?2, options = ?3,"
            " behind = coalesce(?4, behind), replay_id = ?5, last_replay_at = ?6, settled_at = NULL, note = NULL,"
            " finished_by = NULL, reason = NULL WHERE id = ?1",
            (d.id, seq, options, behind, replay_id, self.now),
        )
        self.counts[0, d.destination_id, d.status] -= 1
        self.counts[0, d.destination_id, "pending"] += 1
        self.counts[0, d.destination_id, "replays"] += 1

    def _wake_held(self, line: bytes, options: int, replay_id: bytes, priority: Priority) -> None:
        self.connection.execute(
            "UPDATE heads SET due_at = ?2, run = run + 1, attempts = 0, crashes = 0, deaths = 0, options = ?3,"
            " replay_id = ?4, turn = CASE WHEN turn = 2 THEN 2 ELSE min(turn, ?5) END WHERE subject_key = ?1",
            (line, self.now, options, replay_id, priority),
        )

    def _join(self, line: bytes, priority: Priority) -> None:
        self.connection.execute(
            "UPDATE heads SET turn = CASE WHEN turn = 2 THEN 2 ELSE min(turn, ?2) END WHERE subject_key = ?1",
            (line, priority),
        )

    def _lead(self, line: bytes, d: Standing, options: int, replay_id: bytes, priority: Priority) -> None:
        self.connection.execute(
            "INSERT INTO heads (subject_key, destination_id, turn, due_at, delivery_id, event_id, seq, run, options,"
            " replay_id) VALUES (?,?,?,?,?,?,?,?,?,?)",
            (line, d.destination_id, priority, self.now, d.id, d.event_id, self.seq, d.run + 1, options, replay_id),
        )

    def _write(self) -> None:
        self.connection.execute("UPDATE marks SET value = ? WHERE name = 'seq'", (self.seq,))
        count(self.connection, self.now, self.counts)


def _allowance(passed: Micros, rate: float) -> int:
    """How many may be fed after so much time; at least one, once it is time at all."""
    return 0 if passed < 0 else max(1, int(passed / SECOND * rate))


def bulk_meant(connection: sqlite3.Connection, order: ReplayCommand, *, decrypts: bool) -> list[bytes]:
    """The deliveries a bulk replay means, in order of commit."""
    found = find.meant(connection, order.filter, decrypts=decrypts)
    rows = [row for row in found if is_replayable(row[2], order.force, row[5])]
    return [row[0] for row in sorted(rows, key=lambda row: row[1])]


def _told(connection: sqlite3.Connection, replay_id: bytes) -> StoredReplay:
    replay = get_replay(connection, replay_id)
    assert replay is not None
    return replay


# -- other acts --------------------------------------------------------------------------------------


def steer(
    connection: sqlite3.Connection, now: Micros, replay_id: bytes, state: ReplayState, actor: str
) -> StoredReplay:
    """Pause, resume or abort a replay."""
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
    return _told(connection, replay_id)


def retry_now(connection: sqlite3.Connection, now: Micros, delivery_id: bytes, actor: str) -> None:
    """Make a delivery that waits for its next attempt due at once."""
    known = connection.execute(
        "SELECT status, coalesce(subject_key, id) FROM deliveries WHERE id = ?", (delivery_id,)
    ).fetchone()
    if known is None:
        raise NotFound
    status, line = known
    changed = connection.execute(
        "UPDATE heads SET due_at = min(due_at, ?3) WHERE subject_key = ?1 AND delivery_id = ?2 AND NOT leased"
        " AND due_at < ?4",
        (line, delivery_id, now, NEVER),
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
    """Close those of these that are dead letters, and were so when they were seen; a held subject goes on."""
    by = NEVER if seen is None else micros_at(seen.at)
    dead = [row for one in ids if (row := connection.execute(DEAD, (one, by)).fetchone()) is not None]
    if seen is not None and len(dead) > seen.count:
        raise PlanChanged(f"The plan said {seen.count}, now it would be {len(dead)}.")
    counts: Counter[tuple[int, int, str]] = Counter()
    over: list[tuple[Any, ...]] = []
    for delivery_id, destination_id, line, *held in dead:
        connection.execute(
            "UPDATE deliveries SET status = 'discarded', reason = ?2 WHERE id = ?1", (delivery_id, kept(reason))
        )
        if line is not None:
            over.append((line, *held))
        counts[0, destination_id, "dead"] -= 1
        counts[0, destination_id, "discarded"] += 1
    if dead:
        go_on(connection, now, over)
        count(connection, now, counts)
        target = str(DeliveryId(dead[0][0])) if len(dead) == 1 else f"{len(dead)} deliveries"
        write_audit(connection, now, actor, "discard", target, {"reason": reason, "count": len(dead)})
    return len(dead)


def dead_ones(connection: sqlite3.Connection, filter: Filter, *, decrypts: bool) -> list[bytes]:
    """The dead letters that a filter means, in order of commit."""
    rows = [row for row in find.meant(connection, filter, decrypts=decrypts) if row[2] == "dead"]
    return [row[0] for row in sorted(rows, key=lambda row: row[1])]


def resume(connection: sqlite3.Connection, now: Micros, destination_id: int, actor: str) -> None:
    """Let a destination go on; its breaker starts anew."""
    connection.execute(
        "UPDATE destination_state SET paused_at = NULL, paused_by = NULL, paused_why = NULL, failures = 0,"
        " last_failed = NULL, open_until = NULL WHERE destination_id = ?",
        (destination_id,),
    )
    write_audit(connection, now, actor, "resume", destination_name(connection, destination_id), {})
