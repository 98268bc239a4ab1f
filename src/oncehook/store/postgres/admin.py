"""Acts of people on PostgreSQL: retry now, discard, replay and erase; each writes its audit entry in its own commit.

A replay is a new run of the same delivery, a single one at once or many with a lower priority than live ones (R46-R49).
A bulk replay's items are fixed when it is made; any process feeds them to workers in batches, each in its own
transaction. Making and feeding hold the lock that keeps prune away. An erasure takes one short batch of a subject's
events (S37). It closes open deliveries first: their queues are locked and continue without them, so a worker that holds
one can settle nothing. Locks are taken in the order keys, heads, deliveries, as everywhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec.structs import asdict

from oncehook.errors import Erased, NotFound, NotReplayable, NotWaiting, PlanChanged, ReplayTooSoon
from oncehook.model import (
    ERASED,
    NOTHING_TO_REPLAY,
    NOTHING_TO_REPLAY_HINT,
    REPLAY_PAUSE,
    ChartMark,
    DeliveryId,
    DeliveryStatus,
    EraseOrder,
    Erasure,
    Filter,
    Id,
    Options,
    Page,
    PlannedFor,
    PlanSnapshot,
    Priority,
    ReplayCommand,
    ReplayId,
    ReplayItem,
    ReplayPlan,
    ReplayState,
    StoredReplay,
    mention_of,
    without_mention,
)
from oncehook.store.audit import changed_settings
from oncehook.store.base import KEPT_MARKS
from oncehook.store.filters import STATUS
from oncehook.store.postgres.connection import (
    AUDIT,
    LONG,
    PRUNING,
    REPLAYING,
    Bools,
    Connection,
    Ids,
    Integers,
    StorePart,
    clean_text,
    encode_detail,
    fetch_all,
    fetch_one,
)
from oncehook.store.postgres.read import (
    COLUMNS,
    LAST_OF,
    MATCHES,
    TOGETHER,
    Statement,
    read_delivery,
    read_values,
    select,
    selects_nothing,
)

T = TypeVar("T")

# Tells whether a delivery `d` was first sent to another address than today's. A destination with one address costs no
# look-up.
_CHANGED: Final = """
(SELECT count(*) FROM recipients r WHERE r.destination_id = d.destination_id) > 1 AND coalesce((
    SELECT r.address FROM recipients r WHERE r.destination_id = d.destination_id
      AND r.since <= (SELECT a.started_at FROM attempts a WHERE a.delivery_id = d.id ORDER BY a.fence LIMIT 1)
    ORDER BY r.since DESC LIMIT 1
  ) <> (
    SELECT r.address FROM recipients r WHERE r.destination_id = d.destination_id ORDER BY r.since DESC LIMIT 1
  ), false)
"""
_NOTE_RECIPIENTS: Final = """
INSERT INTO recipients (destination_id, since, address)
SELECT i.id, now(), i.address FROM unnest($1::integer[], $2::uuid[]) AS i(id, address)
WHERE i.address IS DISTINCT FROM (
  SELECT r.address FROM recipients r WHERE r.destination_id = i.id ORDER BY r.since DESC LIMIT 1)
ON CONFLICT DO NOTHING
"""
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

_DEAD: Final = Statement(
    "SELECT d.id FROM deliveries d" + TOGETHER + "WHERE d.status <> 'done' AND d.status = 'dead' AND " + MATCHES
)

# Dead rows are locked before their heads; no settlement touches dead rows, so this cannot deadlock.
_DISCARD: Final = """
WITH i AS MATERIALIZED (
  SELECT d.id, d.destination_id, coalesce(d.subject_key, d.id) AS queue_key FROM deliveries d
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
SELECT id, queue_key FROM i
"""
# A dead letter that is still the head of its subject is held: when it is closed, its queue continues as after a
# settlement.
_HELD: Final = """
SELECT subject_key FROM heads WHERE subject_key = ANY($1::uuid[]) AND delivery_id = ANY($2::uuid[])
ORDER BY subject_key FOR UPDATE
"""
CONTINUE_QUEUES: Final = "SELECT continue_queues($1)"

_PLACE: Final = "INSERT INTO settings_seen (place, digests) VALUES ($1, '') ON CONFLICT DO NOTHING"
_DIGESTS: Final = "SELECT digests FROM settings_seen WHERE place = $1 FOR UPDATE"
_KEEP_DIGESTS: Final = "UPDATE settings_seen SET digests = $2 WHERE place = $1"

# Parameters: deliveries in the order in which they join, their priority, the replay, whether to include done ones,
# options of the new run, seconds since the last replay.
RUN_AGAIN: Final = "SELECT * FROM run_again($1, $2, $3, $4, $5, $6)"

# The deliveries of a filter and a replay; with `force` also done ones.
_REPLAYED: Final = (
    " FROM deliveries d" + TOGETHER + "WHERE (d.status IN ('dead', 'discarded') OR :force AND d.status = 'done')"
    " AND d.note IS DISTINCT FROM 'erased' AND "
)
_MAKE: Final = """
INSERT INTO replays (id, state, request_key, about, actor, reason, options, force, rate, bulk, planned, next_at,
  created_at)
VALUES ($1, 'running', $2, $3, $4, $5, $6, $7, $8, $9, $10, now(), now())
ON CONFLICT (request_key) DO NOTHING RETURNING id
"""

_ITEMS: Final = Statement(
    "INSERT INTO replay_items (replay_id, n, delivery_id) SELECT :replay, row_number() OVER (ORDER BY d.seq), d.id"
    + _REPLAYED
    + MATCHES
)

# Items are fed in order, so the open items begin with those that are fed and not finished.
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

_PLAN: Final = Statement(
    ("SELECT " + STATUS + " AS status, t.name, count(*), min(e.received_at), max(e.received_at),")
    + (" d.note IS NOT DISTINCT FROM 'erased', " + _CHANGED + ", d.category IS NOT DISTINCT FROM 'permanent'")
    + (" FROM deliveries d" + TOGETHER + "WHERE " + MATCHES + "GROUP BY 1, 2, 6, 7, 8")
)
_SAMPLE: Final = Statement(COLUMNS + _REPLAYED + MATCHES + "ORDER BY d.seq LIMIT 5")

_ITEM_OUTCOME: Final = "coalesce(i.outcome, CASE WHEN i.fed_at IS NULL THEN 'left' ELSE 'running' END)"
_REPLAY_ITEMS: Final = (
    "SELECT i.n, i.delivery_id, " + _ITEM_OUTCOME + ", e.type, e.subject, e.received_at,"
    " CASE WHEN d.status = 'dead' THEN d.last_error END FROM replay_items i"
    " LEFT JOIN deliveries d ON d.id = i.delivery_id LEFT JOIN events e ON e.id = d.event_id"
    " WHERE i.replay_id = $1 AND i.n > $2 ORDER BY i.n LIMIT $3"
)
_REPLAY_OUTCOMES: Final = (
    "SELECT right(i.delivery_id::text, 6), " + _ITEM_OUTCOME + ", count(*) FROM replay_items i"
    " WHERE i.replay_id = $1 GROUP BY 1, 2"
)
_ADD_MARK: Final = """
WITH m AS (
  INSERT INTO chart_marks (at, text, actor) VALUES (now(), $1, $2) RETURNING n, at
), o AS (
  DELETE FROM chart_marks WHERE n <= (SELECT n FROM m) - $3::bigint
), a AS (
  INSERT INTO audit (at, actor, act, target, detail) SELECT at, $2, 'mark', $1, '{}' FROM m
)
SELECT at FROM m
"""

_LATEST: Final = """
SELECT status, extract(epoch FROM last_replay_at + make_interval(secs => $2::float8) - now())::float8, note
FROM deliveries WHERE id = $1
"""

_REPLAYABLE: Final = (DeliveryStatus.dead, DeliveryStatus.discarded)
_LONG_TRANSACTION: Final = "SELECT now(), set_config('statement_timeout', '55s', true)"

_FEEDABLE: Final = """
SELECT rate, options, force, next_at <= now() FROM replays WHERE id = $1 AND state = 'running' FOR UPDATE SKIP LOCKED
"""
_WAIT: Final = "UPDATE replays SET next_at = now() + make_interval(secs => $2::float8) WHERE id = $1"
_FINISH: Final = "UPDATE replays SET state = 'done', finished_at = now() WHERE id = $1"
_SET_STATE: Final = """
UPDATE replays SET state = $2, finished_at = CASE WHEN $2 = 'aborted' THEN now() END WHERE id = $1
"""
_STATE_ACTS: Final = {ReplayState.running: "resume", ReplayState.paused: "pause", ReplayState.aborted: "abort"}


async def _refuse_replay(connection: Connection, delivery_id: bytes, force: bool) -> None:
    found = await fetch_all(connection, _LATEST, [Id(delivery_id), REPLAY_PAUSE])
    if not found:
        raise NotFound(f"There is no delivery {DeliveryId(delivery_id)}.")
    [(status, left, note)] = found
    if note == ERASED:
        raise Erased
    if status == DeliveryStatus.done and not force:
        raise NotReplayable("This delivery is done.", hint="Say force to run it again all the same.")
    if status == DeliveryStatus.pending:
        raise NotReplayable("This delivery is being worked on, or waits for its next attempt.")
    raise ReplayTooSoon(max(left or 0.0, 1.0))


def _is_replayed(row: Sequence[Any], force: bool) -> bool:
    """Tell whether a row of the plan would be replayed; erased ones never are."""
    return not row[5] and (row[0] in _REPLAYABLE or (force and row[0] == DeliveryStatus.done))


def _sum(pairs: Iterable[tuple[T, int]]) -> dict[T, int]:
    sums = Counter[T]()
    for name, n in pairs:
        sums[name] += n
    return dict(sums)


def _replay_options(order: ReplayCommand) -> int:
    return int(Options.fresh_id if order.fresh_id else Options.none)


def _read_replay(row: Sequence[Any]) -> StoredReplay:
    return StoredReplay(ReplayId(row[0]), ReplayState(row[1]), json.loads(row[2]), *row[3:])


_OF_SUBJECT: Final = (
    " FROM events WHERE subject = $1 AND ($2::integer IS NULL OR source_id = $2)"
    " AND ($3::text IS NULL OR account = $3) "
)
# 8: Mark.erased. An event that is erased has no subject any more, and keeps its account.
_OF_ACCOUNT: Final = (
    " FROM events WHERE $1::text IS NULL AND account = $3 AND ($2::integer IS NULL OR source_id = $2)"
    " AND marks & 8 = 0 "
)
_EVENTS: Final = "SELECT id, key_hash, batch_id" + _OF_SUBJECT + "ORDER BY id LIMIT $4 FOR UPDATE"
_EVENTS_OF_ACCOUNT: Final = "SELECT id, key_hash, batch_id" + _OF_ACCOUNT + "ORDER BY id LIMIT $4 FOR UPDATE"
_KEYS: Final = "SELECT hash FROM keys WHERE hash = ANY($1::uuid[]) ORDER BY hash FOR UPDATE"
_OF_EVENTS: Final = (
    " FROM events e JOIN deliveries d ON d.id > e.id AND d.id <= " + LAST_OF + " WHERE e.id = ANY($1::uuid[]) "
)
_HEADS: Final = (
    "SELECT subject_key, delivery_id, carries, leased FROM heads WHERE subject_key IN (SELECT"
    " coalesce(d.subject_key, d.id)" + _OF_EVENTS + "AND d.status IN ('pending', 'dead'))"
    " ORDER BY subject_key FOR UPDATE"
)
# Locking the heads keeps others from closing or settling these; their statuses are read first.
_OPEN_DELIVERIES: Final = (
    "SELECT d.id, d.status, d.replay_id" + _OF_EVENTS + "AND d.status IN ('pending', 'dead')"
    " ORDER BY d.id FOR UPDATE OF d"
)
_HEADS_OF: Final = """
SELECT subject_key, delivery_id, carries, leased FROM heads
WHERE subject_key IN (SELECT coalesce(d.subject_key, d.id) FROM deliveries d WHERE d.id = ANY($1::uuid[]))
ORDER BY subject_key FOR UPDATE
"""
_OPEN_OF: Final = """
SELECT id, status, replay_id FROM deliveries WHERE id = ANY($1::uuid[]) AND status IN ('pending', 'dead') ORDER BY id
FOR UPDATE
"""
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
# An attempt that carried an erased delivery is invalid and does not count; the head stays.
_INVALIDATE: Final = """
UPDATE heads h SET leased = false, attempts = h.attempts - 1, alone = false, due_at = now(), upto = 0, carries = NULL,
  fence = nextval('fences')
WHERE h.subject_key = ANY($1::uuid[])
"""
_EMPTY_REJECTIONS: Final = """
UPDATE rejections SET head = NULL, body = NULL WHERE (head IS NOT NULL OR body IS NOT NULL)
  AND ($1::integer IS NULL OR source = (SELECT name FROM sources WHERE id = $1))
"""
# Empties everything stored about these events. `$1`: the events, `$2`: their keys.
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
), m AS (
  DELETE FROM media WHERE event_id = ANY($1::uuid[])
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
# The split requests of these events, and whether they contain events of other subjects: then the head stays.
_BATCHES: Final = """
SELECT b.id, length(b.body) > 0, EXISTS (
    SELECT FROM events e WHERE e.batch_id = b.id AND e.marks & 8 = 0 AND (
      ($2::text IS NOT NULL AND e.subject IS DISTINCT FROM $2)
      OR ($3::text IS NOT NULL AND e.account IS DISTINCT FROM $3))
  ) OR EXISTS (
    SELECT FROM arrivals a JOIN events e ON e.id = a.event_id
    WHERE a.batch_id = b.id AND e.marks & 8 = 0 AND (
      ($2::text IS NOT NULL AND e.subject IS DISTINCT FROM $2)
      OR ($3::text IS NOT NULL AND e.account IS DISTINCT FROM $3)))
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
_COUNT_ARRIVALS: Final = "SELECT count(*) FROM arrivals WHERE event_id = ANY($1::uuid[])"
_MENTIONING_REPLAYS: Final = "SELECT id, about FROM replays WHERE position($1::text IN about) > 0"


async def _close(connection: Connection, events: Ids, reason: str) -> int:
    """Discard open and dead deliveries of events, so that their queues continue without them; return how many."""
    heads = await fetch_all(connection, _HEADS, [events])
    return await _close_found(connection, heads, await fetch_all(connection, _OPEN_DELIVERIES, [events]), reason)


async def close_deliveries(connection: Connection, ids: Ids, reason: str) -> int:
    """Discard those of these deliveries that are open or dead; return how many."""
    heads = await fetch_all(connection, _HEADS_OF, [ids])
    return await _close_found(connection, heads, await fetch_all(connection, _OPEN_OF, [ids]), reason)


async def _close_found(connection: Connection, heads: list[Any], found: list[Any], reason: str) -> int:
    if not found:
        return 0
    await connection.execute(_CLOSE, [Ids([row[0] for row in found]), reason])
    replayed = [row for row in found if row[1] == "pending" and row[2] is not None]
    if replayed:
        await connection.execute(_SKIP, [Ids([row[2] for row in replayed]), Ids([row[0] for row in replayed])])
    closed = {row[0] for row in found}
    # A head without a delivery is looked up by the next lease, and may have waited for one of these.
    if ended := [key for key, head_id, _, _ in heads if head_id is None or head_id in closed]:
        await connection.execute(CONTINUE_QUEUES, [Ids(ended)])
    void = [key for key, _, covered, leased in heads if key not in ended and leased and covered in closed]
    if void:
        await connection.execute(_INVALIDATE, [Ids(void)])
    return len(found)


async def _empty_batches(connection: Connection, events: Ids, order: EraseOrder) -> list[bool]:
    """Empty the split requests of these events. Return, for each that still had its bytes, whether other subjects were
    in it."""
    found = await fetch_all(connection, _BATCHES, [events, *_whose(order)])
    if found:
        await connection.execute(_EMPTY_BATCHES, [Ids([row[0] for row in found]), Bools([row[2] for row in found])])
    return [shared for _, is_there, shared in found if is_there]


def _whose(order: EraseOrder) -> list[str | None]:
    return [None if text is None else clean_text(text) for text in (order.subject, order.account)]


async def _forget_mentions(connection: Connection, order: EraseOrder) -> None:
    """Remove the subject from stored queries of replays; the audit log contains no subject."""
    if order.subject is None:
        return
    asked = [clean_text(mention_of(order))]
    for replay_id, about in await fetch_all(connection, _MENTIONING_REPLAYS, asked):
        cleaned = [without_mention(about, order), Id(replay_id)]
        await connection.execute("UPDATE replays SET about = $1 WHERE id = $2", cleaned)


class PostgresAdmin(StorePart):
    async def retry_now(self, delivery_id: bytes, actor: str) -> None:
        target = str(DeliveryId(delivery_id))
        async with self.connection() as connection:
            made_due, known = await fetch_one(connection, _RETRY, [Id(delivery_id), actor, target])
        if not known:
            raise NotFound(f"There is no delivery {target}.")
        if not made_due:
            raise NotWaiting("This delivery does not wait for its next attempt.")
        self.notify_due()

    async def discard(self, filter: Filter, actor: str, reason: str, seen: PlanSnapshot | None = None) -> int:
        if selects_nothing(filter):
            return 0
        by = None if seen is None else seen.at
        async with self.hold_lock(REPLAYING) as connection:
            values = await read_values(connection, filter, self.cipher)
            meant = [row[0] for row in await select(connection, _DEAD, values)]
            if not meant:
                return 0
            closed = await fetch_all(connection, _DISCARD, [Ids(meant), clean_text(reason), by])
            if seen is not None and len(closed) > seen.count:
                raise PlanChanged(f"The plan said {seen.count}, now it would be {len(closed)}.")
            if not closed:
                return 0
            ids, queue_keys = zip(*closed, strict=True)
            if held := await fetch_all(connection, _HELD, [Ids(queue_keys), Ids(ids)]):
                await connection.execute(CONTINUE_QUEUES, [Ids([key for (key,) in held])])
            target = str(DeliveryId(ids[0])) if len(ids) == 1 else f"{len(ids)} deliveries"
            detail = encode_detail({"count": len(ids), "reason": reason})
            await connection.execute(AUDIT, [actor, "discard", target, detail])
        self.notify_due()
        return len(closed)

    async def audit(self, actor: str, act: str, target: str, detail: Mapping[str, object]) -> None:
        await self.execute(AUDIT, [clean_text(actor), clean_text(act), clean_text(target), encode_detail(detail)])

    async def note_settings(self, place: str, digests: Mapping[str, str]) -> None:
        async with self.connection() as connection, connection.transaction():
            # The lock makes the second of two processes that start together compare with the first.
            here = clean_text(place)
            await connection.execute(_PLACE, [here])
            [(seen,)] = await fetch_all(connection, _DIGESTS, [here])
            await connection.execute(_KEEP_DIGESTS, [here, encode_detail(digests)])
            changes = changed_settings(json.loads(seen), digests) if seen else {}
            if changes:
                await connection.execute(AUDIT, ["oncehook", "settings", here, encode_detail(changes)])

    async def note_recipients(self, addresses: Mapping[int, bytes]) -> None:
        if addresses:
            await self.execute(_NOTE_RECIPIENTS, [Integers(list(addresses)), Ids(list(addresses.values()))])

    # -- replays -------------------------------------------------------------------------------

    async def make_replay(self, replay_id: bytes, order: ReplayCommand) -> StoredReplay:
        async with self.hold_lock(REPLAYING) as connection:
            await connection.execute(_LONG_TRANSACTION)
            known = await self._find_known(connection, order)
            if known is None:
                planned = await self._plan_items(connection, replay_id, order)
                known = await self._keep(connection, replay_id, order, planned)
        if not order.bulk:
            self.notify_due()
        return known

    async def _find_known(self, connection: Connection, order: ReplayCommand) -> StoredReplay | None:
        """Return the replay that the same request made before (R47)."""
        if order.request_key is None:
            return None
        # Two clicks at the same moment: the second waits here for the first one's commit, then sees its replay.
        key = clean_text(order.request_key)
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext('oncehook.replay'), hashtext($1))", [key])
        found = await fetch_all(connection, _BY_KEY, [key])
        return _read_replay(found[0]) if found else None

    async def _plan_items(self, connection: Connection, replay_id: bytes, order: ReplayCommand) -> int:
        if not order.bulk:
            await self._run_one(connection, replay_id, order)
            return 1
        planned = 0
        if not selects_nothing(order.filter):
            values = await read_values(connection, order.filter, self.cipher)
            values |= {"force": order.force, "replay": Id(replay_id)}
            planned = (await connection.execute(_ITEMS.TEXT, _ITEMS.parameters(values))).rowcount
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
        options = _replay_options(order)
        asked = [Ids([delivery_id]), Priority.live.value, Id(replay_id), order.force, options, REPLAY_PAUSE]
        if not await fetch_all(connection, RUN_AGAIN, asked):
            await _refuse_replay(connection, delivery_id, order.force)
        await connection.execute(
            "INSERT INTO replay_items (replay_id, n, delivery_id, fed_at) VALUES ($1, 1, $2, now())",
            [Id(replay_id), Id(delivery_id)],
        )

    async def _keep(self, connection: Connection, replay_id: bytes, order: ReplayCommand, planned: int) -> StoredReplay:
        key = None if order.request_key is None else clean_text(order.request_key)
        request = [Id(replay_id), key, encode_detail(order.about), order.actor, clean_text(order.reason)]
        terms = [_replay_options(order), order.force, order.rate, order.bulk, planned]
        await connection.execute(_MAKE, [*request, *terms])
        detail = encode_detail(order.audit_detail(planned))
        await connection.execute(AUDIT, [order.actor, "replay", str(ReplayId(replay_id)), detail])
        return _read_replay(await fetch_one(connection, _GET, [Id(replay_id)]))

    # -- feeding -------------------------------------------------------------------------------

    async def feed_replays(self, open_at_most: int = 500) -> int:
        running = await self.rows("SELECT id FROM replays WHERE state = 'running' ORDER BY id")
        fed = sum([await self._feed(replay_id, open_at_most) for (replay_id,) in running])
        if fed:
            self.notify_due()
        return fed

    async def _feed(self, replay_id: bytes, open_at_most: int) -> int:
        ended: StoredReplay | None = None
        fed = 0
        async with self.hold_lock(REPLAYING) as connection:
            # One process feeds at a time; the others skip.
            mine = await fetch_all(connection, _FEEDABLE, [Id(replay_id)])
            if not mine:
                return 0
            [(rate, options, force, is_due)] = mine
            is_open = await fetch_all(connection, _OPEN_ITEMS, [Id(replay_id), open_at_most])
            waiting = [delivery_id for delivery_id, was_fed in is_open if not was_fed]
            if not is_open:
                await connection.execute(_FINISH, [Id(replay_id)])
                ended = _read_replay(await fetch_one(connection, _GET, [Id(replay_id)]))
            elif waiting and is_due:
                if rate is not None:
                    waiting = waiting[: max(1, int(rate))]
                    await connection.execute(_WAIT, [Id(replay_id), len(waiting) / rate])
                fed = await self._feed_batch(connection, replay_id, waiting, options, force)
        if ended is not None:
            self.observer.note_finished(ended)
        return fed

    async def _feed_batch(
        self, connection: Connection, replay_id: bytes, batch: Sequence[bytes], options: int, force: bool
    ) -> int:
        asked = [Ids(batch), Priority.replay.value, Id(replay_id), force, options, REPLAY_PAUSE]
        fed = [row[0] for row in await fetch_all(connection, RUN_AGAIN, asked)]
        # an empty array is sent as NULL: then all of them are skipped
        await connection.execute(_FED, [Id(replay_id), Ids(batch), Ids(fed)])
        return len(fed)

    async def set_replay_state(self, replay_id: bytes, state: ReplayState, actor: str) -> StoredReplay:
        target = str(ReplayId(replay_id))
        async with self.hold_lock(REPLAYING) as connection:
            found = await fetch_all(connection, "SELECT state FROM replays WHERE id = $1 FOR UPDATE", [Id(replay_id)])
            if not found:
                raise NotFound(f"There is no replay {target}.")
            if found[0][0] in (ReplayState.done, ReplayState.aborted) or state is ReplayState.done:
                raise NotWaiting("This replay is over already.")
            await connection.execute(_SET_STATE, [Id(replay_id), state.value])
            await connection.execute(AUDIT, [actor, _STATE_ACTS[state], target, "{}"])
            changed = _read_replay(await fetch_one(connection, _GET, [Id(replay_id)]))
        if state is ReplayState.aborted:
            self.observer.note_finished(changed)
        return changed

    # -- plans ---------------------------------------------------------------------------------

    async def plan_replay(self, filter: Filter, *, force: bool) -> ReplayPlan:
        async with self.snapshot(LONG) as connection:
            [at, _] = await fetch_one(connection, _LONG_TRANSACTION)
            if selects_nothing(filter):
                return ReplayPlan(0, at)
            values = await read_values(connection, filter, self.cipher)
            found = await select(connection, _PLAN, values)
            sample = await select(connection, _SAMPLE, values | {"force": force})
        meant = [row for row in found if _is_replayed(row, force)]
        return ReplayPlan(
            total=sum(row[2] for row in meant),
            at=at,
            by_destination=_sum((row[1], row[2]) for row in meant),
            by_status=_sum((DeliveryStatus(row[0]), row[2]) for row in meant),
            left_out=_sum((DeliveryStatus(row[0]), row[2]) for row in found if not _is_replayed(row, force)),
            oldest=min((row[3] for row in meant), default=None),
            newest=max((row[4] for row in meant), default=None),
            changed=_sum((row[1], row[2]) for row in meant if row[6]),
            sample=[read_delivery(row) for row in sample],
            parts=PlannedFor.of(
                (row[1], DeliveryStatus(row[0]), _is_replayed(row, force), row[7], row[2]) for row in found
            ),
        )

    async def get_replay(self, replay_id: bytes) -> StoredReplay | None:
        found = await self.rows(_GET, [Id(replay_id)])
        return _read_replay(found[0]) if found else None

    async def find_replays(self, *, before: bytes | None = None, limit: int = 50) -> Page[StoredReplay]:
        found = await self.rows(_LIST, [None if before is None else Id(before), limit + 1])
        is_more = len(found) > limit
        return Page([_read_replay(row) for row in found[:limit]], found[limit - 1][0] if is_more else None)

    async def replay_items(self, replay_id: bytes, *, after: int = 0, limit: int = 50) -> list[ReplayItem]:
        names = dict(await self.rows("SELECT id, name FROM destinations"))
        return [
            ReplayItem(n, DeliveryId(id_), names.get(DeliveryId(id_).destination_id, "?"), *rest)
            for n, id_, *rest in await self.rows(_REPLAY_ITEMS, [Id(replay_id), after, limit])
        ]

    async def replay_outcomes(self, replay_id: bytes) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        names = dict(await self.rows("SELECT id, name FROM destinations"))
        for number, outcome, n in await self.rows(_REPLAY_OUTCOMES, [Id(replay_id)]):
            found.setdefault(names.get(int(number, 16), "?"), {})[outcome] = n
        return found

    # -- marks ---------------------------------------------------------------------------------

    async def add_mark(self, text: str, actor: str) -> ChartMark:
        [(at,)] = await self.rows(_ADD_MARK, [clean_text(text), clean_text(actor), KEPT_MARKS])
        return ChartMark(at, clean_text(text), clean_text(actor))

    # -- erasures ------------------------------------------------------------------------------

    async def erase(self, order: EraseOrder, limit: int = 100) -> Erasure:
        async with self.hold_lock(PRUNING) as connection:
            # Nobody can tell whose bytes a rejected arrival has, so all go.
            await connection.execute(_EMPTY_REJECTIONS, [order.source_id])
            subject, account = _whose(order)
            asked = [subject, order.source_id, account, limit]
            if order.subject is None:
                events = await fetch_all(connection, _EVENTS_OF_ACCOUNT, asked)
            else:
                events = await fetch_all(connection, _EVENTS, asked)
            if not events:
                return Erasure()
            ids = Ids([row[0] for row in events])
            keys = Ids([row[1] for row in events if row[1] is not None])
            await connection.execute(_KEYS, [keys])
            closed = await _close(connection, ids, clean_text(order.reason))
            batches = await _empty_batches(connection, ids, order)
            attempts, arrivals = await fetch_one(connection, _EMPTY, [ids, keys])
            erased = Erasure(len(events), closed, attempts, arrivals, len(batches), sum(batches))
            await _forget_mentions(connection, order)
            detail = encode_detail({"reason": order.reason, **asdict(erased)})
            await connection.execute(AUDIT, [clean_text(order.actor), "erase", order.target, detail])
        self.notify_due()
        return erased

    async def empty_log(self) -> None:
        """Do nothing: the log is the server's, and only VACUUM FULL overwrites what was freed."""

    async def erasable(self, order: EraseOrder) -> Erasure:
        subject, account = _whose(order)
        async with self.snapshot(LONG) as connection:
            await connection.execute("SELECT set_config('statement_timeout', '55s', true)")
            if order.subject is None:
                found = await fetch_all(connection, "SELECT id" + _OF_ACCOUNT, [subject, order.source_id, account])
            else:
                found = await fetch_all(connection, "SELECT id" + _OF_SUBJECT, [subject, order.source_id, account])
            ids = Ids([row[0] for row in found])
            open_, attempts = await fetch_one(connection, _COUNTED, [ids])
            (later,) = await fetch_one(connection, _COUNT_ARRIVALS, [ids])
            found_batches = await fetch_all(connection, _BATCHES, [ids, subject, account])
        batches = [shared for _, is_there, shared in found_batches if is_there]
        return Erasure(len(found), open_, attempts, later, len(batches), sum(batches))
