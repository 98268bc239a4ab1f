"""What became of the work, as people see it: deliveries, attempts, replays, levels, charts. Reads only.

Comes in: a filter or an id. Goes out: the values of `deliveries`. Called by the engine's faces through `Store`.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from oncehook.model import (
    ERASED,
    AttemptOutcome,
    Audited,
    Category,
    Cause,
    DeliveryId,
    DeliveryStatus,
    EventId,
    Evidence,
    Filter,
    Level,
    ListedDelivery,
    ListedEvent,
    Mark,
    Outlook,
    Page,
    ReplayId,
    ReplayPlan,
    ReplayState,
    StoredAttempt,
    StoredDelivery,
    StoredReplay,
    StoredWorker,
    last_delivery_of,
)
from oncehook.store.checks import LEVELS
from oncehook.store.sqlite import find, recipients, work
from oncehook.store.sqlite.intake import Micros, to_micros
from oncehook.store.sqlite.look import Reader, moment, moment_or_none

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
# The same subject of the same source at the same destination: before it, after it, and what waits now.
EARLIER: Final = """
SELECT d.id, d.seq FROM events e CROSS JOIN deliveries d ON d.id = CAST(substr(e.id, 1, 14) || substr(?1, 15) AS BLOB)
WHERE e.subject = ?2 AND e.id <= ?3 AND e.source_id = ?4 ORDER BY e.id DESC LIMIT ?5
"""
LATER: Final = """
SELECT d.id, d.seq FROM events e CROSS JOIN deliveries d ON d.id = CAST(substr(e.id, 1, 14) || substr(?1, 15) AS BLOB)
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
STANDING: Final = """
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
# Ids begin with their time, by the receiver's clock: only near the border must the event itself be asked.
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


class WorkReader(Reader):
    """The verbs of `Store` that only look at the work."""

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
        return [self.cipher.read_attempt(_attempt(*row)) for row in rows]

    async def subject_of(self, delivery_id: bytes, around: int = 10) -> list[StoredDelivery]:
        return await self.read(lambda c: _subject_of(c, delivery_id, around))

    async def causes(self, destination: str | None = None, sources: Collection[str] | None = None) -> list[Cause]:
        def read(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            numbers = None if sources is None else find.numbers_of(connection, sources)
            return connection.execute(DEAD, (destination, _CAUSES_OF, numbers)).fetchall()

        rows = await self.read(read)
        return _causes(rows)

    async def plan_replay(self, filter: Filter, *, force: bool) -> ReplayPlan:
        at = self.now()  # before it looks: what dies meanwhile was not seen
        return await self.read(lambda c: _plan(c, at, filter, force, self.cipher.has_keys))

    async def get_replay(self, replay_id: bytes) -> StoredReplay | None:
        return await self.read(lambda c: get_replay(c, replay_id))

    async def find_replays(self, *, before: bytes | None = None, limit: int = 50) -> Page[StoredReplay]:
        rows = await self.read(
            lambda c: c.execute(
                REPLAY + "WHERE ?1 IS NULL OR r.id < ?1 ORDER BY r.id DESC LIMIT ?2", (before, limit + 1)
            ).fetchall()
        )
        return _page([_replay(*row) for row in rows], limit)

    async def next_due(self, destination_ids: Sequence[int], since: datetime | None = None) -> Outlook:
        now = self.now()
        moment = None if since is None else to_micros(since)
        return await self.read(lambda c: work.next_due(c, now, destination_ids, moment))

    async def levels(self) -> dict[str, Level]:
        now = self.now()
        return await self.read(lambda c: _levels(c, now))

    async def count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        return await self.read(lambda c: _count_since(c, to_micros(since)))

    async def count_of(
        self, sources: Collection[str], since: datetime | None = None
    ) -> dict[str, dict[DeliveryStatus, int]]:
        start = 0 if since is None else to_micros(since)
        asked = (json.dumps(list(sources)), find.id_floor(start // 1000 - find.SLACK), start)
        found: defaultdict[str, dict[DeliveryStatus, int]] = defaultdict(dict)
        for name, status, n in await self.read(lambda c: c.execute(COUNT_OF, asked).fetchall()):
            found[name][DeliveryStatus(status)] = n
        return dict(found)

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> dict[str, list[tuple[datetime, int]]]:
        width = max(int(step), 1) * work.SECOND
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
    """One delivery."""
    page = _find_deliveries(connection, Filter(ids=[DeliveryId(delivery_id)]), None, 1)
    return page.items[0] if page.items else None


def _find_deliveries(
    connection: sqlite3.Connection, filter: Filter, before: bytes | None, limit: int
) -> Page[StoredDelivery]:
    asked = find.ask_deliveries(connection, filter, before)
    if filter.ids is not None:
        ones = [find.one_of(asked, one) for one in sorted(set(filter.ids), reverse=True)]
        found = [find.shown(row) for one in ones if one is not None for row in _rows(connection, one, 1)]
        return _page(found[: limit + 1], limit)
    find.weigh(connection, asked, find.WEIGH_DELIVERIES[asked.way])
    found = [find.shown(row) for row in _rows(connection, asked, limit + 1)]
    far = None
    if len(found) <= limit:
        far = connection.execute(find.FAR_DELIVERY[asked.way], asked.values).fetchone()
    return _page(found, limit, None if far is None else far[0])


def _rows(connection: sqlite3.Connection, asked: find.Question, most: int) -> list[Any]:
    return connection.execute(find.SHOW_DELIVERIES[asked.statement], asked.values).fetchmany(most)


def _find_events(connection: sqlite3.Connection, filter: Filter, before: bytes | None, limit: int) -> Page[ListedEvent]:
    asked = find.ask_events(connection, filter, before)
    far = None
    if filter.ids is not None:
        found = list(_events_of(connection, asked, filter.ids))[: limit + 1]
    else:
        find.weigh(connection, asked, find.WEIGH_EVENTS[asked.way])
        found = list(_distinct(connection, asked, limit + 1))
        if len(found) <= limit:
            far = connection.execute(find.FAR_EVENT[asked.way], asked.values).fetchone()
    listed = [_listed(connection, row) for row in found]
    return _page(listed, limit, None if far is None else DeliveryId(far[0]).event_id)


def _events_of(connection: sqlite3.Connection, asked: find.Question, ids: Sequence[bytes]) -> Iterator[tuple[Any, ...]]:
    """Events that match by one of these deliveries."""
    seen: set[bytes] = set()
    one_by_one = find.Question("all", asked.values).statement
    for delivery_id in sorted(set(ids), reverse=True):
        (event_id,) = connection.execute(EVENT_OF, (delivery_id,)).fetchone() or (None,)
        if event_id is None or event_id in seen or not asked.values["low"] <= event_id < asked.values["high"]:
            continue
        bounds = {"low": event_id, "high": event_id + b"\x00", "only": delivery_id, "asks_deliveries": True}
        for row in connection.execute(find.LIST_EVENTS[one_by_one], asked.values | bounds).fetchall():
            seen.add(event_id)
            yield row


def _distinct(connection: sqlite3.Connection, asked: find.Question, most: int) -> list[tuple[Any, ...]]:
    """Rows of events, each once: a way through deliveries brings an event for each of them, one after the other."""
    found: list[tuple[Any, ...]] = []
    for row in (cursor := connection.execute(find.LIST_EVENTS[asked.statement], asked.values)):
        if not found or found[-1][0] != row[0]:
            found.append(row)
        if len(found) == most:
            break
    cursor.close()
    return found


def _listed(connection: sqlite3.Connection, row: tuple[Any, ...]) -> ListedEvent:
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


def _page(found: Sequence[Any], limit: int, far: bytes | None = None) -> Page[Any]:
    """A page out of one row more than it may hold; `far` is how far a look came that found less."""
    if len(found) > limit:
        return Page(found[:limit], found[limit - 1].id)
    return Page(found, far)


def _attempt(
    delivery_id: bytes,
    fence: int,
    run: int,
    n: int,
    started_at: Micros,
    ended_at: Micros,
    outcome: str,
    category: str | None,
    status: int | None,
    error: str | None,
    answer: bytes | None,
) -> StoredAttempt:
    return StoredAttempt(
        DeliveryId(delivery_id),
        fence,
        run,
        n,
        moment(started_at),
        moment(ended_at),
        AttemptOutcome(outcome),
        None if category is None else Category(category),
        Evidence(status, error, answer),
    )


def _subject_of(connection: sqlite3.Connection, delivery_id: bytes, around: int) -> list[StoredDelivery]:
    mine = connection.execute(
        "SELECT e.id, e.subject, e.source_id, d.seq, d.subject_key FROM deliveries d JOIN events e ON e.id = d.event_id"
        " WHERE d.id = ?",
        (delivery_id,),
    ).fetchone()
    if mine is None:
        return []
    event_id, subject, source_id, seq, line = mine
    about = (delivery_id, subject, event_id, source_id, _NEIGHBOURS)
    # Replays join the tail: what waits may have come long ago.
    waiting = connection.execute(
        "SELECT id, seq FROM deliveries WHERE subject_key = ? AND behind AND status = 'pending' ORDER BY seq LIMIT ?",
        (line, _NEIGHBOURS),
    ).fetchall()
    found = {*connection.execute(EARLIER, about), *connection.execute(LATER, about), *waiting, (delivery_id, seq)}
    line_up = sorted(found, key=lambda one: one[1])
    place = line_up.index((delivery_id, seq))
    near = line_up[max(place - around, 0) : place + around + 1]
    shown = [get_delivery(connection, id_) for id_, _ in near]
    return [one for one in shown if one is not None]


def _causes(rows: Sequence[tuple[Any, ...]]) -> list[Cause]:
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
    for row in find.meant(connection, filter, decrypts=decrypts):
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
        changed=recipients.changed(connection, ((row[0], row[3]) for row in taken)),
        sample=[one for one in sample if one is not None],
    )


def is_replayable(status: str, force: bool, note: str | None) -> bool:
    """Dead and discarded ones, done ones when that is asked for; never what is being worked on, or was erased."""
    if note == ERASED:
        return False
    return status in (DeliveryStatus.dead, DeliveryStatus.discarded) or (force and status == DeliveryStatus.done)


def get_replay(connection: sqlite3.Connection, replay_id: bytes) -> StoredReplay | None:
    """One replay and how far it is."""
    row = connection.execute(REPLAY + "WHERE r.id = ?", (replay_id,)).fetchone()
    return None if row is None else _replay(*row)


def _replay(
    id_: bytes,
    state: str,
    about: str,
    actor: str,
    reason: str,
    bulk: int,
    rate: float | None,
    planned: int,
    created_at: Micros,
    finished_at: Micros | None,
    open_: int,
    unfed: int,
    dead: int,
    skipped: int,
) -> StoredReplay:
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
    return {row[0]: _level(row, counted[row[0]], now) for row in connection.execute(STANDING, (now,)).fetchall()}


def _level(row: tuple[Any, ...], counted: dict[str, int], now: Micros) -> Level:
    _, paused_at, paused_by, paused_why, failures, open_until, leased, *due = row
    oldest = min((at for at in due if at is not None), default=None)
    return Level(
        pending=counted.get("pending", 0),
        leased=leased,
        done=counted.get("done", 0),
        dead=counted.get("dead", 0),
        discarded=counted.get("discarded", 0),
        oldest_due=None if oldest is None else (now - oldest) / work.SECOND,
        paused_at=moment_or_none(paused_at),
        paused_by=paused_by,
        paused_why=paused_why,
        failures=failures,
        open_until=moment_or_none(open_until),
    )


def _count_since(connection: sqlite3.Connection, since: Micros) -> dict[DeliveryStatus, int]:
    low, high = find.id_floor(since // 1000 - find.SLACK), find.LAST
    if find.ids_keep_time(connection):
        high = find.id_floor(since // 1000 + find.SLACK)
    counts = Counter[DeliveryStatus]()
    for status, n in connection.execute(COUNT_SINCE, (low, high, since)):
        counts[DeliveryStatus(status)] += n
    (leased,) = connection.execute(LEASED_SINCE, (since,)).fetchone()
    counts[DeliveryStatus.leased] = leased
    counts[DeliveryStatus.pending] -= leased
    return dict(counts)
