"""Erasing a subject on PostgreSQL, one short batch of events in a transaction of its own (S37).

What is open is closed first: its line is locked and goes on without it, so a worker that holds it can settle nothing
any more. Locks are taken as everybody takes them: keys, then heads, then deliveries; the lock between replay and prune
keeps replays and other erasures away. `PostgresStore` hands its erasures to this.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from oncehook.model import EraseOrder, Erasure, Id, needle, subject_hash, without_mention
from oncehook.store.postgres.acts import AUDIT, GO_ON, said
from oncehook.store.postgres.look import LONG, PRUNING, Reader
from oncehook.store.postgres.matching import LAST_OF
from oncehook.store.postgres.opening import one, rows
from oncehook.store.postgres.wire import Bools, Connection, Ids, storable

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
_OPEN: Final = (
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
    found = await rows(connection, _OPEN, [events])
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
