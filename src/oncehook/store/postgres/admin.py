"""Erasing a subject on PostgreSQL, one short batch of events in a transaction of its own (S37).

What is open is closed first: its line is locked and goes on without it, so a worker that holds it can settle nothing
any more. Locks are taken as everybody takes them: keys, then heads, then deliveries; the lock between replay and prune
keeps replays and other erasures away. `PostgresStore` hands its erasures to this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

from oncehook.errors import Erased, NotFound, NotReplayable, NotWaiting, PlanChanged, ReplayTooSoon
from oncehook.model import (
    ERASED,
    NOTHING_TO_REPLAY,
    NOTHING_TO_REPLAY_HINT,
    REPLAY_PAUSE,
    DeliveryStatus,
    EraseOrder,
    Erasure,
    Filter,
    Kind,
    Options,
    Page,
    PlanSnapshot,
    Priority,
    ReplayCommand,
    ReplayPlan,
    ReplayState,
    StoredReplay,
    needle,
    new_id,
    show_id,
    subject_hash,
    without_mention,
)
from oncehook.store.audit import changed_settings
from oncehook.store.base import Notice
from oncehook.store.postgres.connection import Bools, Connection, Id, Ids, Integers, one, rows, storable
from oncehook.store.postgres.queue import PAUSE
from oncehook.store.postgres.read import (
    COLUMNS,
    LAST_OF,
    LONG,
    MATCHES,
    PRUNING,
    REPLAYING,
    STATUS,
    TOGETHER,
    Reader,
    delivery,
    means_nothing,
    parameters,
)

# Of a delivery `d`. A destination that has never moved is not looked at any further.
CHANGED: Final = """
(SELECT count(*) FROM recipients r WHERE r.destination_id = d.destination_id) > 1 AND coalesce((
    SELECT r.address FROM recipients r WHERE r.destination_id = d.destination_id
      AND r.since <= (SELECT a.started_at FROM attempts a WHERE a.delivery_id = d.id ORDER BY a.fence LIMIT 1)
    ORDER BY r.since DESC LIMIT 1
  ) <> (
    SELECT r.address FROM recipients r WHERE r.destination_id = d.destination_id ORDER BY r.since DESC LIMIT 1
  ), false)
"""
_NOTE: Final = """
INSERT INTO recipients (destination_id, since, address)
SELECT i.id, now(), i.address FROM unnest($1::integer[], $2::uuid[]) AS i(id, address)
WHERE i.address IS DISTINCT FROM (
  SELECT r.address FROM recipients r WHERE r.destination_id = i.id ORDER BY r.since DESC LIMIT 1)
ON CONFLICT DO NOTHING
"""


class Recipients(Reader):
    """Remembers whom destinations reach."""

    async def note_recipients(self, addresses: Mapping[int, bytes]) -> None:
        if addresses:
            await self.execute(_NOTE, [Integers(list(addresses)), Ids(list(addresses.values()))])


AUDIT: Final = "INSERT INTO audit (at, actor, act, target, detail) VALUES (now(), $1, $2, $3, $4)"

_RETRY: Final = """
WITH u AS (
  UPDATE heads h SET due_at = now() FROM deliveries d
  WHERE d.id = $1 AND d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id) AND h.delivery_id = d.id
    AND NOT h.leased
  RETURNING 1
), a AS (
  INSERT INTO audit (at, actor, act, target, detail) SELECT now(), $2, 'retry', $3, '{}' FROM u
)
SELECT (SELECT count(*) FROM u), (SELECT count(*) FROM deliveries WHERE id = $1)
"""

_DEAD: Final = (
    "SELECT d.id FROM deliveries d" + TOGETHER + "WHERE d.status <> 'done' AND d.status = 'dead' AND " + MATCHES
)

# Only dead rows are locked before their heads, which no settle touches: no deadlock.
_DISCARD: Final = """
WITH i AS MATERIALIZED (
  SELECT d.id, d.destination_id, coalesce(d.subject_key, d.id) AS line FROM deliveries d
  WHERE d.id = ANY($1) AND d.status = 'dead' AND ($3::timestamptz IS NULL OR d.settled_at <= $3)
  ORDER BY d.id FOR UPDATE
), u AS (
  UPDATE deliveries d SET status = 'discarded', reason = $2, settled_at = now() FROM i WHERE d.id = i.id
), c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), (-1 - pg_backend_pid() % 32000)::smallint, 0, i.destination_id, w.what,
    w.sign * count(*)
  FROM i, (VALUES ('dead', -1), ('discarded', 1)) AS w(what, sign) GROUP BY i.destination_id, w.what, w.sign
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
SELECT id, line FROM i
"""
# A dead letter that is still the head of its subject is held: when it is closed, the line goes on as after a settle.
_HELD: Final = """
SELECT subject_key FROM heads WHERE subject_key = ANY($1::uuid[]) AND delivery_id = ANY($2::uuid[])
ORDER BY subject_key FOR UPDATE
"""
GO_ON: Final = "SELECT go_on($1)"

# Sorted, as intake locks them; what has lapsed is taken over, what stands is left alone.
_REMEMBER: Final = """
WITH k AS (
  INSERT INTO keys AS k (hash, event_id, body_hash, source_id, copies, first_seen, last_seen, expires_at)
  SELECT hash, event_id, '00000000-0000-0000-0000-000000000000', $3, 0, now(), now(), now() + make_interval(secs => $4)
  FROM unnest($1::uuid[], $2::uuid[]) AS i(hash, event_id) ORDER BY hash
  ON CONFLICT (hash) DO UPDATE SET event_id = excluded.event_id, body_hash = excluded.body_hash,
    source_id = excluded.source_id, copies = 0, first_seen = now(), last_seen = now(), expires_at = excluded.expires_at
  WHERE k.expires_at <= now()
  RETURNING 1
), a AS (
  INSERT INTO audit (at, actor, act, target, detail)
  SELECT now(), $5, 'import', (SELECT name FROM sources WHERE id = $3),
    json_build_object('keys', cardinality($1::uuid[]), 'new', (SELECT count(*) FROM k))::text
)
SELECT count(*) FROM k
"""

_RESUME: Final = """
WITH s AS (
  UPDATE destination_state SET paused_at = NULL, paused_by = NULL, paused_why = NULL, failures = 0, last_failed = NULL,
    open_until = NULL
  WHERE destination_id = $1 RETURNING 1
)
INSERT INTO audit (at, actor, act, target, detail)
SELECT now(), $2, 'resume', coalesce((SELECT name FROM destinations WHERE id = $1), $1::text), '{}'
"""

_PLACE: Final = "INSERT INTO settings_seen (place, digests) VALUES ($1, '') ON CONFLICT DO NOTHING"


class Acts(Reader):
    """Does what people ask for."""

    async def retry_now(self, delivery_id: bytes, actor: str) -> None:
        target = show_id(Kind.delivery, delivery_id)
        async with self.connection() as connection:
            made_due, known = await one(connection, _RETRY, [Id(delivery_id), actor, target])
        if not known:
            raise NotFound(f"There is no delivery {target}.")
        if not made_due:
            raise NotWaiting("This delivery does not wait for its next attempt.")
        self.made_due()

    async def discard(self, filter: Filter, actor: str, reason: str, seen: PlanSnapshot | None = None) -> int:
        if means_nothing(filter):
            return 0
        by = None if seen is None else seen.at
        async with self.prudent(REPLAYING) as connection:
            meant = [row[0] for row in await rows(connection, _DEAD, await parameters(connection, filter, self.cipher))]
            if not meant:
                return 0
            closed = await rows(connection, _DISCARD, [Ids(meant), storable(reason), by])
            if seen is not None and len(closed) > seen.count:
                raise PlanChanged(f"The plan said {seen.count}, now it would be {len(closed)}.")
            if not closed:
                return 0
            ids, lines = zip(*closed, strict=True)
            if held := await rows(connection, _HELD, [Ids(lines), Ids(ids)]):
                await connection.execute(GO_ON, [Ids([line for (line,) in held])])
            target = show_id(Kind.delivery, ids[0]) if len(ids) == 1 else f"{len(ids)} deliveries"
            await connection.execute(AUDIT, [actor, "discard", target, said({"count": len(ids), "reason": reason})])
        self.made_due()
        return len(closed)

    async def pause(self, destination_id: int, actor: str, why: str) -> None:
        await self.execute(PAUSE, [destination_id, actor, storable(why), said({"reason": why})])

    async def resume(self, destination_id: int, actor: str) -> None:
        await self.execute(_RESUME, [destination_id, actor])
        self.made_due()

    async def import_keys(self, source_id: int, hashes: Sequence[bytes], keep: float, actor: str) -> int:
        meant = list(dict.fromkeys(hashes))  # one statement may touch a row once
        asked = [Ids(meant), Ids([new_id() for _ in meant]), source_id, keep, storable(actor)]
        async with self.connection() as connection:
            (added,) = await one(connection, _REMEMBER, asked)
        return int(added)

    async def audit(self, actor: str, act: str, target: str, detail: Mapping[str, object]) -> None:
        await self.execute(AUDIT, [storable(actor), storable(act), storable(target), said(detail)])

    async def note_settings(self, place: str, digests: Mapping[str, str]) -> None:
        async with self.connection() as connection, connection.transaction():
            # Of two processes of a place that start together, the second compares with the first.
            here = storable(place)
            await connection.execute(_PLACE, [here])
            [(seen,)] = await rows(connection, "SELECT digests FROM settings_seen WHERE place = $1 FOR UPDATE", [here])
            await connection.execute("UPDATE settings_seen SET digests = $2 WHERE place = $1", [here, said(digests)])
            changes = changed_settings(json.loads(seen), digests) if seen else {}
            if changes:
                await connection.execute(AUDIT, ["oncehook", "settings", here, said(changes)])


def said(detail: Mapping[str, object]) -> str:
    """A detail as it is kept; JSON escapes what PostgreSQL does not take as text."""
    return json.dumps(detail, default=str)


T = TypeVar("T")

# Deliveries in the order in which they are to join, their turn, the replay, whether done ones too, options of the new
# run, seconds since the last replay.
REPLAY: Final = "SELECT * FROM run_again($1, $2, $3, $4, $5, $6)"

_MAKE: Final = """
INSERT INTO replays (id, state, request_key, about, actor, reason, options, force, rate, bulk, planned, next_at,
  created_at)
VALUES ($1, 'running', $2, $3, $4, $5, $6, $7, $8, $9, $10, now(), now())
ON CONFLICT (request_key) DO NOTHING RETURNING id
"""

_ITEMS: Final = (
    """
INSERT INTO replay_items (replay_id, n, delivery_id)
SELECT $18, row_number() OVER (ORDER BY d.seq), d.id FROM deliveries d
"""
    + TOGETHER
    + "WHERE (d.status IN ('dead', 'discarded') OR $19 AND d.status = 'done') AND d.note IS DISTINCT FROM 'erased' AND "
    + MATCHES
)

# Items not fed yet come behind those that are, so the first of the open ones tell how many are under way.
_OPEN_ITEMS: Final = """
SELECT delivery_id, fed_at IS NOT NULL FROM replay_items WHERE replay_id = $1 AND outcome IS NULL ORDER BY n LIMIT $2
"""
_FED: Final = """
UPDATE replay_items SET fed_at = now(),
  outcome = CASE WHEN delivery_id = ANY($3::uuid[]) THEN NULL ELSE 'skipped' END
WHERE replay_id = $1 AND delivery_id = ANY($2::uuid[])
"""

_REPLAYS: Final = """
SELECT r.id, r.state, r.about, r.actor, r.reason, r.bulk, r.rate, r.planned, r.planned - o.unfed - s.skipped,
  r.planned - o.unfed - o.fed - s.dead - s.skipped, s.dead, s.skipped, r.created_at, r.finished_at
FROM replays r, LATERAL (
  SELECT count(*) FILTER (WHERE fed_at IS NULL) AS unfed, count(*) FILTER (WHERE fed_at IS NOT NULL) AS fed
  FROM replay_items i WHERE i.replay_id = r.id AND i.outcome IS NULL
) o, LATERAL (
  SELECT count(*) FILTER (WHERE outcome = 'dead') AS dead, count(*) FILTER (WHERE outcome = 'skipped') AS skipped
  FROM replay_items i WHERE i.replay_id = r.id AND i.outcome IN ('dead', 'skipped')
) s
"""
_GET: Final = _REPLAYS + "WHERE r.id = $1"
_BY_KEY: Final = _REPLAYS + "WHERE r.request_key = $1"
_LIST: Final = _REPLAYS + "WHERE $1::uuid IS NULL OR r.id < $1 ORDER BY r.id DESC LIMIT $2"

_PLAN: Final = (
    "SELECT "
    + STATUS
    + " AS status, t.name, count(*), min(e.received_at), max(e.received_at), d.note IS NOT DISTINCT FROM 'erased', "
    + CHANGED
    + " FROM deliveries d"
    + TOGETHER
    + "WHERE "
    + MATCHES
    + "GROUP BY 1, 2, 6, 7"
)
_SAMPLE: Final = (
    COLUMNS
    + "FROM deliveries d"
    + TOGETHER
    + "WHERE (d.status IN ('dead', 'discarded') OR $18 AND d.status = 'done') AND d.note IS DISTINCT FROM 'erased' AND "
    + MATCHES
    + "ORDER BY d.seq LIMIT 5"
)

_LATEST: Final = """
SELECT status, extract(epoch FROM last_replay_at + make_interval(secs => $2::float8) - now())::float8, note
FROM deliveries WHERE id = $1
"""

_REPLAYABLE: Final = (DeliveryStatus.dead, DeliveryStatus.discarded)


class Replays(Reader):
    """Makes replays, feeds them, and tells how far they are."""

    finished: Notice[StoredReplay]

    async def make_replay(self, replay_id: bytes, order: ReplayCommand) -> StoredReplay:
        async with self.prudent(REPLAYING) as connection:
            await connection.execute(_PATIENTLY)
            known = await self._known(connection, order)
            if known is None:
                planned = await self._plan_items(connection, replay_id, order)
                known = await self._keep(connection, replay_id, order, planned)
        if not order.bulk:
            self.made_due()
        return known

    async def _known(self, connection: Connection, order: ReplayCommand) -> StoredReplay | None:
        """The replay that this very request made before (R47)."""
        if order.request_key is None:
            return None
        # Two clicks at the same moment: the second waits here for the first one's commit, and then sees it.
        key = storable(order.request_key)
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext('oncehook.replay'), hashtext($1))", [key])
        found = await rows(connection, _BY_KEY, [key])
        return _replay(found[0]) if found else None

    async def _plan_items(self, connection: Connection, replay_id: bytes, order: ReplayCommand) -> int:
        if not order.bulk:
            await self._run_one(connection, replay_id, order)
            return 1
        planned = 0
        if not means_nothing(order.filter):
            asked = [*await parameters(connection, order.filter, self.cipher), Id(replay_id), order.force]
            planned = (await connection.execute(_ITEMS, asked)).rowcount
        if order.expected is not None and order.expected != planned:
            raise PlanChanged(f"The plan said {order.expected} deliveries; now it would be {planned}.")
        if not planned:
            raise NotReplayable(NOTHING_TO_REPLAY, hint=NOTHING_TO_REPLAY_HINT)
        return planned

    async def _run_one(self, connection: Connection, replay_id: bytes, order: ReplayCommand) -> None:
        meant = order.filter.ids or ()
        if len(meant) != 1:
            raise NotFound("One delivery is replayed at once, by its id.")
        [delivery_id] = meant
        asked = [Ids([delivery_id]), Priority.live.value, Id(replay_id), order.force, _options(order), REPLAY_PAUSE]
        if not await rows(connection, REPLAY, asked):
            await _say_why_not(connection, delivery_id, order.force)
        await connection.execute(
            "INSERT INTO replay_items (replay_id, n, delivery_id, fed_at) VALUES ($1, 1, $2, now())",
            [Id(replay_id), Id(delivery_id)],
        )

    async def _keep(self, connection: Connection, replay_id: bytes, order: ReplayCommand, planned: int) -> StoredReplay:
        key = None if order.request_key is None else storable(order.request_key)
        reason = storable(order.reason)
        about = said(order.about)
        kept = [Id(replay_id), key, about, order.actor, reason, _options(order), order.force, order.rate, order.bulk]
        await connection.execute(_MAKE, [*kept, planned])
        detail = said(order.audited(planned))
        await connection.execute(AUDIT, [order.actor, "replay", show_id(Kind.replay, replay_id), detail])
        return _replay(await one(connection, _GET, [Id(replay_id)]))

    # -- feeding -------------------------------------------------------------------------------

    async def feed_replays(self, open_at_most: int = 500) -> int:
        running = await self.rows("SELECT id FROM replays WHERE state = 'running' ORDER BY id")
        fed = sum([await self._feed(replay_id, open_at_most) for (replay_id,) in running])
        if fed:
            self.made_due()
        return fed

    async def _feed(self, replay_id: bytes, open_at_most: int) -> int:
        ended: StoredReplay | None = None
        fed = 0
        async with self.prudent(REPLAYING) as connection:
            # One feeder at a time; the others leave it to him.
            mine = await rows(connection, _FEEDABLE, [Id(replay_id)])
            if not mine:
                return 0
            [(rate, options, force, is_due)] = mine
            is_open = await rows(connection, _OPEN_ITEMS, [Id(replay_id), open_at_most])
            waiting = [delivery_id for delivery_id, was_fed in is_open if not was_fed]
            if not is_open:
                await connection.execute(_FINISH, [Id(replay_id)])
                ended = _replay(await one(connection, _GET, [Id(replay_id)]))
            elif waiting and is_due:
                if rate is not None:
                    waiting = waiting[: max(1, int(rate))]
                    await connection.execute(_WAIT, [Id(replay_id), len(waiting) / rate])
                fed = await self._feed_batch(connection, replay_id, waiting, options, force)
        if ended is not None:
            self.finished(ended)
        return fed

    async def _feed_batch(
        self, connection: Connection, replay_id: bytes, batch: Sequence[bytes], options: int, force: bool
    ) -> int:
        asked = [Ids(batch), Priority.replay.value, Id(replay_id), force, options, REPLAY_PAUSE]
        fed = [row[0] for row in await rows(connection, REPLAY, asked)]
        # NULL stands for no array at all: then all of them are left out
        await connection.execute(_FED, [Id(replay_id), Ids(batch), Ids(fed)])
        return len(fed)

    async def set_replay_state(self, replay_id: bytes, state: ReplayState, actor: str) -> StoredReplay:
        target = show_id(Kind.replay, replay_id)
        async with self.prudent(REPLAYING) as connection:
            found = await rows(connection, "SELECT state FROM replays WHERE id = $1 FOR UPDATE", [Id(replay_id)])
            if not found:
                raise NotFound(f"There is no replay {target}.")
            if found[0][0] in (ReplayState.done, ReplayState.aborted) or state is ReplayState.done:
                raise NotWaiting("This replay is over already.")
            await connection.execute(_STEER, [Id(replay_id), state.value])
            await connection.execute(AUDIT, [actor, _ACTS[state], target, "{}"])
            steered = _replay(await one(connection, _GET, [Id(replay_id)]))
        if state is ReplayState.aborted:
            self.finished(steered)
        return steered

    # -- looking -------------------------------------------------------------------------------

    async def plan_replay(self, filter: Filter, *, force: bool) -> ReplayPlan:
        async with self.connection(LONG) as connection, connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            [at, _] = await one(connection, _PATIENTLY)
            if means_nothing(filter):
                return ReplayPlan(0, at)
            asked = await parameters(connection, filter, self.cipher)
            found = await rows(connection, _PLAN, asked)
            sample = await rows(connection, _SAMPLE, [*asked, force])
        meant = [row for row in found if _is_meant(row, force)]
        return ReplayPlan(
            total=sum(row[2] for row in meant),
            at=at,
            by_destination=_sums((row[1], row[2]) for row in meant),
            by_status=_sums((DeliveryStatus(row[0]), row[2]) for row in meant),
            left_out=_sums((DeliveryStatus(row[0]), row[2]) for row in found if not _is_meant(row, force)),
            oldest=min((row[3] for row in meant), default=None),
            newest=max((row[4] for row in meant), default=None),
            changed=_sums((row[1], row[2]) for row in meant if row[6]),
            sample=[delivery(row) for row in sample],
        )

    async def get_replay(self, replay_id: bytes) -> StoredReplay | None:
        found = await self.rows(_GET, [Id(replay_id)])
        return _replay(found[0]) if found else None

    async def find_replays(self, *, before: bytes | None = None, limit: int = 50) -> Page[StoredReplay]:
        found = await self.rows(_LIST, [None if before is None else Id(before), limit + 1])
        is_more = len(found) > limit
        return Page([_replay(row) for row in found[:limit]], found[limit - 1][0] if is_more else None)


_PATIENTLY: Final = "SELECT now(), set_config('statement_timeout', '55s', true)"

_FEEDABLE: Final = """
SELECT rate, options, force, next_at <= now() FROM replays WHERE id = $1 AND state = 'running' FOR UPDATE SKIP LOCKED
"""
_WAIT: Final = "UPDATE replays SET next_at = now() + make_interval(secs => $2::float8) WHERE id = $1"
_FINISH: Final = "UPDATE replays SET state = 'done', finished_at = now() WHERE id = $1"
_STEER: Final = """
UPDATE replays SET state = $2, finished_at = CASE WHEN $2 = 'aborted' THEN now() END WHERE id = $1
"""
_ACTS: Final = {
    ReplayState.running: "resume",
    ReplayState.paused: "pause",
    ReplayState.aborted: "abort",
}


async def _say_why_not(connection: Connection, delivery_id: bytes, force: bool) -> None:
    found = await rows(connection, _LATEST, [Id(delivery_id), REPLAY_PAUSE])
    if not found:
        raise NotFound(f"There is no delivery {show_id(Kind.delivery, delivery_id)}.")
    [(status, left, note)] = found
    if note == ERASED:
        raise Erased
    if status == DeliveryStatus.done and not force:
        raise NotReplayable("This delivery is done.", hint="Say force to run it again all the same.")
    if status == DeliveryStatus.pending:
        raise NotReplayable("This delivery is being worked on, or waits for its next attempt.")
    raise ReplayTooSoon(max(left or 0.0, 1.0))


def _is_meant(row: Sequence[Any], force: bool) -> bool:
    """Of a row of the plan; what was erased is not."""
    return not row[5] and (row[0] in _REPLAYABLE or (force and row[0] == DeliveryStatus.done))


def _sums(pairs: Iterable[tuple[T, int]]) -> dict[T, int]:
    sums: dict[T, int] = {}
    for name, n in pairs:
        sums[name] = sums.get(name, 0) + n
    return sums


def _options(order: ReplayCommand) -> int:
    return int(Options.fresh_id if order.fresh_id else Options.none)


def _replay(row: Sequence[Any]) -> StoredReplay:
    return StoredReplay(row[0], ReplayState(row[1]), json.loads(row[2]), *row[3:])


_OF_SUBJECT: Final = " FROM events WHERE subject = $1 AND ($2::integer IS NULL OR source_id = $2) "
_EVENTS: Final = "SELECT id, key_hash, batch_id" + _OF_SUBJECT + "ORDER BY id LIMIT $3 FOR UPDATE"
_KEYS: Final = "SELECT hash FROM keys WHERE hash = ANY($1::uuid[]) ORDER BY hash FOR UPDATE"
_OF_EVENTS: Final = (
    " FROM events e JOIN deliveries d ON d.id > e.id AND d.id <= " + LAST_OF + " WHERE e.id = ANY($1::uuid[]) "
)
_HEADS: Final = (
    "SELECT subject_key, delivery_id, carries, leased FROM heads WHERE subject_key IN ("
    "SELECT coalesce(d.subject_key, d.id)"
    + _OF_EVENTS
    + "AND d.status IN ('pending', 'dead')) ORDER BY subject_key FOR UPDATE"
)
# With the lines locked nobody else closes or settles these; only their statuses are read before.
_OPEN_DELIVERIES: Final = (
    "SELECT d.id, d.status, coalesce(d.subject_key, d.id), d.replay_id"
    + _OF_EVENTS
    + "AND d.status IN ('pending', 'dead') ORDER BY d.id FOR UPDATE OF d"
)
_CLOSE: Final = """
WITH u AS (
  UPDATE deliveries d SET status = 'discarded', reason = $2, settled_at = now() FROM deliveries o
  WHERE d.id = ANY($1::uuid[]) AND o.id = d.id RETURNING d.destination_id, o.status
)
INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
SELECT date_trunc('minute', now()), (-1 - pg_backend_pid() % 32000)::smallint, 0, destination_id, what, n
FROM (
  SELECT destination_id, status, -count(*) FROM u GROUP BY 1, 2
  UNION ALL
  SELECT destination_id, 'discarded', count(*) FROM u GROUP BY 1
) AS n(destination_id, what, n)
ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
"""
_SKIP: Final = """
UPDATE replay_items i SET outcome = 'skipped' FROM unnest($1::uuid[], $2::uuid[]) AS s(replay_id, delivery_id)
WHERE i.replay_id = s.replay_id AND i.delivery_id = s.delivery_id AND i.outcome IS NULL
"""
# An attempt that carried an erased delivery is void, and given back; the head stays.
_VOID: Final = """
UPDATE heads h SET leased = false, attempts = h.attempts - 1, alone = false, due_at = now(), upto = 0, carries = NULL,
  fence = nextval('fences')
WHERE h.subject_key = ANY($1::uuid[])
"""
# Everything that was said about these events. `$1` the events, `$2` their keys.
_EMPTY: Final = (
    """
WITH d AS MATERIALIZED (
  SELECT d.id, d.destination_id, e.source_id, coalesce(e.rank_scope, e.subject) AS scope"""
    + _OF_EVENTS
    + """
), u AS (
  UPDATE deliveries x SET note = 'erased', last_error = NULL FROM d WHERE x.id = d.id
), t AS (
  UPDATE attempts t SET error = NULL, answer = NULL FROM d WHERE t.delivery_id = d.id RETURNING 1
), a AS (
  UPDATE arrivals SET head = '', body = CASE WHEN body IS NOT NULL THEN ''::bytea END
  WHERE event_id = ANY($1::uuid[]) RETURNING 1
), r AS (
  DELETE FROM ranks r USING d
  WHERE r.destination_id = d.destination_id AND r.source_id = d.source_id AND r.scope = d.scope
), k AS (                            -- UNSEEN: no later copy is a conflict, so no body of one is kept
  UPDATE keys SET body_hash = '00000000-0000-0000-0000-000000000000'
  WHERE hash = ANY($2::uuid[]) AND event_id = ANY($1::uuid[])
), e AS (                            -- 8: Mark.erased
  UPDATE events SET subject = NULL, key = NULL, rank_scope = NULL, head = '', body = '', marks = marks | 8::smallint,
    body_hash = '00000000-0000-0000-0000-000000000000'
  WHERE id = ANY($1::uuid[])
)
SELECT (SELECT count(*) FROM t), (SELECT count(*) FROM a)
"""
)
# Split requests in which these events came, and whether others are in them: then their head stays.
_BATCHES: Final = """
SELECT b.id, length(b.body) > 0, EXISTS (
    SELECT FROM events e WHERE e.batch_id = b.id AND e.marks & 8 = 0 AND e.subject IS DISTINCT FROM $2
  ) OR EXISTS (
    SELECT FROM arrivals a JOIN events e ON e.id = a.event_id
    WHERE a.batch_id = b.id AND e.marks & 8 = 0 AND e.subject IS DISTINCT FROM $2)
FROM batches b WHERE b.id IN (
  SELECT e.batch_id FROM events e WHERE e.id = ANY($1::uuid[])
  UNION SELECT a.batch_id FROM arrivals a WHERE a.event_id = ANY($1::uuid[]))
"""
_EMPTY_BATCHES: Final = """
UPDATE batches b SET body = '', head = CASE WHEN i.shared THEN b.head ELSE ''::bytea END
FROM unnest($1::uuid[], $2::boolean[]) AS i(id, shared) WHERE b.id = i.id
"""
_COUNTED: Final = (
    "SELECT count(*) FILTER (WHERE d.status IN ('pending', 'dead')),"
    " coalesce(sum((SELECT count(*) FROM attempts t WHERE t.delivery_id = d.id)), 0)::bigint" + _OF_EVENTS
)
_MENTIONING_REPLAYS: Final = "SELECT id, about FROM replays WHERE position($1::text IN about) > 0"
# Lines of the chain name no subject (`ReplayCommand.noted`).
_MENTIONING_AUDIT: Final = "SELECT n, detail FROM audit WHERE hash IS NULL AND position($1::text IN detail) > 0"


class Erasing(Reader):
    """Erases subjects."""

    async def erase(self, order: EraseOrder, limit: int = 100) -> Erasure:
        async with self.prudent(PRUNING) as connection:
            asked = [storable(order.subject), order.source_id, limit]
            events = await rows(connection, _EVENTS, asked)
            if not events:
                return Erasure()
            ids = Ids([row[0] for row in events])
            keys = Ids([row[1] for row in events if row[1] is not None])
            await connection.execute(_KEYS, [keys])
            closed = await _close(connection, ids, storable(order.reason))
            batches = await _empty_batches(connection, ids, storable(order.subject))
            attempts, arrivals = await one(connection, _EMPTY, [ids, keys])
            erased = Erasure(len(events), closed, attempts, arrivals, len(batches), sum(batches))
            await _forget_mentions(connection, order)
            detail = said({"reason": order.reason, **asdict(erased)})
            target = f"subject {subject_hash(order.subject)}"
            await connection.execute(AUDIT, [storable(order.actor), "erase", target, detail])
        self.made_due()
        return erased

    async def empty_log(self) -> None:
        """Do nothing: the log is the server's, and what it frees is only overwritten by VACUUM FULL."""

    async def erasable(self, order: EraseOrder) -> Erasure:
        subject = storable(order.subject)
        async with self.connection(LONG) as connection, connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            await connection.execute("SELECT set_config('statement_timeout', '55s', true)")
            found = await rows(connection, "SELECT id" + _OF_SUBJECT, [subject, order.source_id])
            ids = Ids([row[0] for row in found])
            open_, attempts = await one(connection, _COUNTED, [ids])
            (later,) = await one(connection, "SELECT count(*) FROM arrivals WHERE event_id = ANY($1::uuid[])", [ids])
            batches = [shared for _, is_there, shared in await rows(connection, _BATCHES, [ids, subject]) if is_there]
        return Erasure(len(found), open_, attempts, later, len(batches), sum(batches))


async def _close(connection: Connection, events: Ids, reason: str) -> int:
    """Discard what is open or dead; the lines go on without it."""
    heads = await rows(connection, _HEADS, [events])
    found = await rows(connection, _OPEN_DELIVERIES, [events])
    if not found:
        return 0
    await connection.execute(_CLOSE, [Ids([row[0] for row in found]), reason])
    replayed = [row for row in found if row[1] == "pending" and row[3] is not None]
    if replayed:
        await connection.execute(_SKIP, [Ids([row[3] for row in replayed]), Ids([row[0] for row in replayed])])
    closed = {row[0] for row in found}
    # A head that is to be looked up may have waited for one of these.
    if ended := [line for line, head_id, _, _ in heads if head_id is None or head_id in closed]:
        await connection.execute(GO_ON, [Ids(ended)])
    void = [line for line, _, carries, leased in heads if line not in ended and leased and carries in closed]
    if void:
        await connection.execute(_VOID, [Ids(void)])
    return len(found)


async def _empty_batches(connection: Connection, events: Ids, subject: str) -> list[bool]:
    """Of each split request that still had its bytes: whether others were in it."""
    found = await rows(connection, _BATCHES, [events, subject])
    if found:
        await connection.execute(_EMPTY_BATCHES, [Ids([row[0] for row in found]), Bools([row[2] for row in found])])
    return [shared for _, is_there, shared in found if is_there]


async def _forget_mentions(connection: Connection, order: EraseOrder) -> None:
    """Queries that named the subject, as replays and the audit log have kept them."""
    asked = [storable(needle(order))]
    for replay_id, about in await rows(connection, _MENTIONING_REPLAYS, asked):
        changed = [without_mention(about, order), Id(replay_id)]
        await connection.execute("UPDATE replays SET about = $1 WHERE id = $2", changed)
    for n, detail in await rows(connection, _MENTIONING_AUDIT, asked):
        await connection.execute("UPDATE audit SET detail = $1 WHERE n = $2", [without_mention(detail, order), n])
