"""Replays on PostgreSQL: a new run of the same delivery, one at once or many behind live traffic (R46-R49).

An order goes in, a durable record comes out. The items of a bulk replay are fixed when it is made; any process feeds
them to workers, batch by batch, each batch in a transaction of its own. Making and feeding hold the lock that keeps
prune away. `PostgresStore` hands its replays to this.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from oncehook.errors import Erased, NotFound, NotReplayable, NotWaiting, PlanChanged, ReplayTooSoon
from oncehook.model import (
    ERASED,
    NOTHING_TO_REPLAY,
    NOTHING_TO_REPLAY_HINT,
    REPLAY_PAUSE,
    DeliveryId,
    DeliveryStatus,
    Filter,
    Id,
    Options,
    Page,
    Priority,
    ReplayCommand,
    ReplayId,
    ReplayPlan,
    ReplayState,
    StoredReplay,
)
from oncehook.store.base import StoreObserver
from oncehook.store.postgres.acts import AUDIT, said
from oncehook.store.postgres.look import LONG, REPLAYING, Reader
from oncehook.store.postgres.matching import MATCHES, STATUS, TOGETHER, means_nothing, parameters
from oncehook.store.postgres.opening import one, rows
from oncehook.store.postgres.recipients import CHANGED
from oncehook.store.postgres.show import COLUMNS, delivery
from oncehook.store.postgres.wire import Connection, Ids, storable

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
_OPEN: Final = """
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

    observer: StoreObserver

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
        await connection.execute(AUDIT, [order.actor, "replay", str(ReplayId(replay_id)), detail])
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
            is_open = await rows(connection, _OPEN, [Id(replay_id), open_at_most])
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
            self.observer.note_finished(ended)
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
        target = str(ReplayId(replay_id))
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
            self.observer.note_finished(steered)
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
        raise NotFound(f"There is no delivery {DeliveryId(delivery_id)}.")
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
    return StoredReplay(ReplayId(row[0]), ReplayState(row[1]), json.loads(row[2]), *row[3:])
