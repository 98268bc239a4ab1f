"""The queue on PostgreSQL: leases, heartbeats, settlements, breakers, and the wake-ups of workers.

Each verb is one call of a function of the schema in autocommit, with columns as arrays: no lock is held across a round
trip, and a process that stops between two packets blocks nobody. Workers lease rows of `heads`, never rows of
`deliveries`, so a deep subject costs a lease nothing. A handler's own transaction ends with the same settle function
(R51), which therefore uses `statement_timestamp()`; emitted events are stored by the statement before (R54).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from hashlib import blake2b
from typing import Any, Final
from uuid import UUID

import psycopg

from oncehook import clock, faults
from oncehook.errors import LeaseLost, StoreError, StoreUnavailable
from oncehook.model import (
    MARKS,
    OPTIONS,
    Allowance,
    BreakerChange,
    DeliveryId,
    EventId,
    Expired,
    Intake,
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
    is_over,
    was_tried,
)
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.connection import (
    WORK_CONNECTIONS,
    Ask,
    Bigs,
    Blobs,
    BlockingStoreConnection,
    Bools,
    Column,
    Database,
    Floats,
    Ids,
    Integers,
    Smalls,
    StoreConnection,
    StorePart,
    Texts,
    WorkPool,
    clean_text,
    connect,
    connect_heartbeat,
    connect_hot,
    cut,
    describe,
    encode_detail,
    is_alive,
    milliseconds,
)
from oncehook.store.postgres.intake import INTAKE, IntakeRows, read_intake_result, verdicts

log = logging.getLogger("oncehook.store")

LEASE: Final = "SELECT * FROM lease($1, $2, $3, $4, $5, $6, $7, $8, $9)"
NEXT_DUE: Final = "SELECT * FROM next_due($1, $2)"
RENEW: Final = "SELECT * FROM renew($1, $2, $3, $4, $5)"
ALLOW: Final = "SELECT * FROM allow($1, $2, $3, $4, $5, $6, $7, $8)"

SOURCE_ID: Final = 13
"""Its position among the columns of `leased`."""

_PRIORITIES: Final = tuple(Priority)


Rounds = dict[tuple[int, int], int]
"""Values at which the last rounds of this process ended, by destination and priority."""


def lease_parameters(
    wants: Sequence[LeaseRequest], slot: int, worker: str | None = None, rounds: Rounds | None = None
) -> list[Column | int | str | None]:
    ended = rounds or {}
    afters = [ended.get((want.destination_id, want.priority), -1) if want.fair else None for want in wants]
    return [
        Integers([want.destination_id for want in wants]),
        Smalls([want.priority for want in wants]),
        Integers([want.limit for want in wants]),
        Floats([want.lease for want in wants]),
        Integers([want.crash_tolerance for want in wants]),
        Floats([want.probe for want in wants]),
        slot,
        worker,
        Bigs(afters),
    ]


def read_lease(row: Sequence[Any], sources: Mapping[int, str], cipher: Cipher) -> Lease:
    """Build a lease from the columns of `leased`; `sources` are names by id."""
    priority, options, source, marks = _PRIORITIES[row[8]], OPTIONS[row[9]], sources[row[SOURCE_ID]], MARKS[row[19]]
    delivery = LeasedDelivery(DeliveryId(row[1]), row[3], row[5], row[6], options, row[10] and ReplayId(row[10]))
    event = StoredEvent(*(EventId(row[12]), row[13], source, *row[14:19], marks, *row[20:22], *row[23:25], row[27]))
    more, failing = row[25:27]
    return cipher.read_lease(
        Lease(delivery, event, row[0], DeliveryId(row[2]), row[4], row[7], priority, row[11], row[22], more, failing)
    )


def read_expired(former: Sequence[Any]) -> Expired:
    """Build the notice of a lease that LEASE found expired."""
    held, event_id, *rest = former
    return Expired(DeliveryId(UUID(held).bytes), EventId(UUID(event_id).bytes), *rest)


def read_next_due(rows: Sequence[tuple[Any, ...]]) -> Outlook:
    due: dict[Priority, set[int]] = {priority: set() for priority in Priority}
    due_in: float | None = None
    looked_at: datetime | None = None
    for destination_id, priority, seconds, moment in rows:
        if destination_id is not None:
            due[_PRIORITIES[priority]].add(destination_id)
        elif moment is not None:
            looked_at = moment
        else:
            due_in = seconds
    return Outlook(due, due_in, looked_at)


def renew_parameters(leases: Sequence[Lease], worker: str | None = None) -> list[Column | str | None]:
    """Return the parameters of RENEW, `$1` to `$5`, sorted, because all statements lock rows in this order."""
    ordered = sorted(leases, key=lambda lease: lease.queue_key)
    return [
        Ids([lease.queue_key for lease in ordered]),
        Ids([lease.front_id for lease in ordered]),
        Bigs([lease.fence for lease in ordered]),
        Floats([lease.seconds for lease in ordered]),
        worker,
    ]


def allow_parameters(worker: str, wants: Sequence[LimitRequest]) -> list[Column | str]:
    return [
        worker,
        Integers([want.destination_id for want in wants]),
        Floats([want.lease for want in wants]),
        Floats([want.rate for want in wants]),
        Integers([want.slots for want in wants]),
        Integers([want.limit for want in wants]),
        Integers([want.busy for want in wants]),
        Integers([want.wanted for want in wants]),
    ]


SETTLE: Final = (
    "SELECT * FROM settle($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20,"
    " $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31)"
)
UPDATE_BREAKERS: Final = "SELECT * FROM update_breakers($1, $2, $3, $4, $5, $6)"

_PAUSE: Final = """
WITH s AS (
  INSERT INTO destination_state AS s (destination_id, paused_at, paused_by, paused_why) VALUES ($1, now(), $2, $3)
  ON CONFLICT (destination_id) DO UPDATE SET paused_at = excluded.paused_at, paused_by = excluded.paused_by,
    paused_why = excluded.paused_why WHERE s.paused_at IS NULL
  RETURNING destination_id
)
INSERT INTO audit (at, actor, act, target, detail)
SELECT now(), $2, 'pause', coalesce((SELECT d.name FROM destinations d WHERE d.id = s.destination_id), $1::text), $4
FROM s
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

# One delivery becomes due: what waits for its retry would keep the trial waiting as well.
_TRY_NOW: Final = """
WITH s AS (
  UPDATE destination_state SET open_until = now() WHERE destination_id = $1 AND open_until > now() RETURNING 1
), h AS (
  UPDATE heads SET due_at = now() WHERE EXISTS (SELECT FROM s) AND subject_key = (
    SELECT h.subject_key FROM heads h WHERE h.destination_id = $1 AND h.turn < 4 AND NOT h.leased
    ORDER BY h.turn, h.due_at LIMIT 1
  ) AND NOT leased AND due_at > now() AND due_at < 'infinity'
)
INSERT INTO audit (at, actor, act, target, detail)
SELECT now(), $2, 'try', coalesce((SELECT name FROM destinations WHERE id = $1), $1::text), '{}' FROM s
RETURNING 1
"""


@dataclass(slots=True)
class SettleResult:
    fences: set[int] = field(default_factory=set)
    """The leases that were still ours."""
    made_due: Collection[int] = ()
    next: Sequence[tuple[Any, ...]] = ()

    def is_whole(self, settlements: Sequence[Settlement]) -> bool:
        """Tell whether all of these leases were ours; otherwise nothing was changed."""
        return self.fences.issuperset(one.lease.fence for one in settlements)


@dataclass(slots=True)
class _Ending:
    """The values of a settlement that SETTLE needs."""

    settlement: Settlement
    lease: Lease
    is_over: bool
    attempted_id: bytes
    """The delivery whose attempt is stored: the front one, if that is held, whichever newer one was covered."""
    run: int | None
    """None: the head's, where that is not the lease's."""
    attempt: int
    duration: float | None
    """None where no attempt is stored."""

    @classmethod
    def of(cls, settlement: Settlement) -> _Ending:
        lease, over, tried = settlement.lease, is_over(settlement), was_tried(settlement)
        is_held = settlement.what is Settle.dead and not over
        return cls(
            settlement,
            lease,
            over,
            attempted_id=lease.front_id if is_held else lease.delivery.id,
            run=None if is_held and lease.front_id != lease.delivery.id else lease.delivery.run,
            attempt=lease.delivery.attempt if tried else lease.delivery.attempt - 1,
            duration=settlement.duration if tried else None,
        )


def settle_parameters(
    settlements: Sequence[Settlement], cipher: Cipher, slot: int, worker: str | None = None
) -> list[Column | int | str | bool | None]:
    """Return the parameters of SETTLE, `$1` to `$31`. A lease that is named twice ends once."""
    rows = sorted({one.lease.fence: one for one in reversed(settlements)}.values(), key=lambda one: one.lease.queue_key)
    ends = [_Ending.of(one) for one in rows]
    leases = [one.lease for one in rows]
    evidence = [one.evidence for one in rows]
    over = [one.lease for one in ends if one.is_over]
    followed = [one.settlement for one in ends if one.is_over and one.lease.more]
    ranked = [one.lease for one in rows if _raises_rank(one)]
    counts = _counts(rows)
    return [
        Ids([lease.queue_key for lease in leases]),
        Ids([lease.front_id for lease in leases]),
        Bigs([lease.fence for lease in leases]),
        Texts([one.what for one in rows]),
        Texts([one.note for one in rows]),
        Floats([one.wait for one in rows]),
        Ids([one.attempted_id for one in ends]),
        Smalls([one.run for one in ends]),
        Smalls([one.attempt for one in ends]),
        Floats([one.duration for one in ends]),
        Texts([one.category for one in rows]),
        Smalls([_small(one.status) for one in evidence]),
        Texts([None if one.error is None else clean_text(one.error) for one in evidence]),
        Blobs(
            [
                cipher.encrypt_answer(one.evidence, end.attempted_id, one.lease.fence)
                for one, end in zip(rows, ends, strict=True)
            ]
        ),
        Texts(["crash" if is_crash(one) else None for one in rows]),
        Ids([lease.queue_key for lease in over if lease.queue_key == lease.front_id]),
        Ids([lease.queue_key for lease in over if lease.queue_key != lease.front_id and not lease.more]),
        Ids([one.lease.queue_key for one in followed]),
        Floats([one.take_next for one in followed]),
        Integers([destination_id for destination_id, _ in counts]),
        Texts([what for _, what in counts]),
        Bigs(list(counts.values())),
        slot,
        worker,
        Integers([lease.delivery.destination_id for lease in ranked]),
        Integers([lease.event.source_id for lease in ranked]),
        Texts([_rank_scope(lease) for lease in ranked]),
        Integers([lease.event.rank for lease in ranked]),
        None if len(over) == len(ends) else Bools([not one.is_over for one in ends]),
        any(lease.delivery.id != lease.front_id for lease in leases),
        any(lease.delivery.replay_id is not None for lease in leases),
    ]


def _counts(settlements: Sequence[Settlement]) -> Counter[tuple[int, str]]:
    """Return the changes of counters by destination; SETTLE itself counts what a lease covered besides."""
    counts: Counter[tuple[int, str]] = Counter()
    for one in settlements:
        if one.what is Settle.release:
            continue
        counts[one.lease.delivery.destination_id, one.what.value] += 1
        if one.what is not Settle.retry:
            counts[one.lease.delivery.destination_id, "succeeded" if one.what is Settle.done else "died"] += 1
            counts[one.lease.delivery.destination_id, "pending"] -= 1
    return counts


def emit_parameters(settlements: Sequence[Settlement], cipher: Cipher, slot: int) -> list[Column | int | str | None]:
    return IntakeRows(_intakes(settlements), cipher).parameters(slot)


def read_emitted(settlements: Sequence[Settlement], rows: Sequence[tuple[Any, ...]]) -> None:
    """Set the verdict of every emission from the rows of INTAKE. It is valid after the commit."""
    emissions = [emission for one in settlements for emission in one.emits]
    for emission, (verdict,) in zip(emissions, verdicts(_intakes(settlements), read_intake_result(rows)), strict=True):
        emission.verdict = verdict


def _intakes(settlements: Sequence[Settlement]) -> list[Intake]:
    return [emission.intake for one in settlements for emission in one.emits]


def _small(status: int | None) -> int | None:
    """Return a status code that fits into `smallint`; None for any other number."""
    return status if status is None or 0 <= status < 1 << 15 else None


def _raises_rank(settlement: Settlement) -> bool:
    lease = settlement.lease
    if lease.event.rank is None or settlement.what is not Settle.done or settlement.note == "stale":
        return False
    return bool(lease.delivery.options & Options.latest_wins) and _rank_scope(lease) is not None


def _rank_scope(lease: Lease) -> str | None:
    return lease.event.subject if lease.event.rank_scope is None else lease.event.rank_scope


async def settle_ours(settlements: Sequence[Settlement], worker: str | None, cipher: Cipher, ask: Ask) -> SettleResult:
    """Settle the leases that are ours. SETTLE changes nothing if one is not; it is then called again without that
    one."""
    while settlements:
        rows = await ask(SETTLE, partial(settle_parameters, settlements, cipher, worker=worker))
        answer = read_settle_result(settlements, rows)
        if answer.is_whole(settlements):
            return answer
        settlements = [one for one in settlements if one.lease.fence in answer.fences]
    return SettleResult()


def read_settle_result(settlements: Sequence[Settlement], rows: Sequence[tuple[Any, ...]]) -> SettleResult:
    (ours, made_due, *_), *taken = rows
    by_queue_key = {one.lease.queue_key: one for one in settlements}
    due = {by_queue_key[key].lease.delivery.destination_id for key in made_due or ()}
    put_back = [one for one in settlements if one.what in (Settle.retry, Settle.release)]
    due |= {one.lease.delivery.destination_id for one in put_back if not one.wait}
    leased = [(*row[2:13], by_queue_key[row[2]].take_next, *row[14:]) for row in taken]
    return SettleResult(set(ours), due, leased)


def select_streaks(
    settlements: Sequence[Settlement], answer: SettleResult, failing: Collection[int]
) -> dict[int, Streak]:
    """Return the streaks of the settlements that were ours, where they would change a breaker.

    `failing`: destinations with recent failures, as far as this process knows.
    """
    ours = [one for one in settlements if one.lease.fence in answer.fences and one.breaker is not None]
    known = {*failing, *(one.lease.delivery.destination_id for one in ours if one.lease.failing)}
    return {
        destination_id: streak
        for destination_id, streak in sorted(count_streaks(ours).items())
        if streak.failures or destination_id in known
    }


def breaker_parameters(found: Mapping[int, Streak]) -> list[Column]:
    streaks = list(found.values())
    return [
        Integers(list(found)),
        Bools([one.reset for one in streaks]),
        Integers([one.failures for one in streaks]),
        Ids([one.last_failed for one in streaks]),
        Integers([one.breaker.failures for one in streaks]),
        Floats([one.breaker.open for one in streaks]),
    ]


# -- heartbeats --------------------------------------------------------------------------------

BEATS_PER_LEASE: Final = 6


class HeartbeatConnection:
    """A blocking connection for the thread on which a worker renews its leases: a blocked loop must not delay it (R32).

    Each try takes at most a sixth of the shortest lease; the next one opens a new connection.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: BlockingStoreConnection | None = None
        self._lock = threading.Lock()

    def renew(self, leases: Sequence[Lease], worker: str | None) -> set[int]:
        if not leases:
            return set()
        limit = max(min(lease.seconds for lease in leases) / BEATS_PER_LEASE, self._database.timeouts.heartbeat)
        with self._lock:
            if self._connection is None:
                self._connection = connect_heartbeat(self._database, limit)
            # The server's own timeouts come first; cutting is for a server that does not answer at all.
            guard = threading.Timer(2 * limit, cut, [self._connection])
            guard.daemon = True
            guard.start()
            try:
                return self._beat(self._connection, renew_parameters(leases, worker), limit)
            except psycopg.Error as error:
                self._drop()
                raise StoreUnavailable(f"The heartbeat got no answer: {describe(error)}") from error
            finally:
                guard.cancel()

    def _beat(self, connection: BlockingStoreConnection, asked: Sequence[object], limit: float) -> set[int]:
        connection.configure({"statement_timeout": milliseconds(limit)})
        found: list[Any] = connection.execute(RENEW, asked, prepare=True, binary=True).fetchall()
        return {row[0] for row in found}

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.pgconn.finish()
            self._connection = None

    def close(self) -> None:
        with self._lock:
            self._drop()


# -- wake-ups ----------------------------------------------------------------------------------

NOTIFY_PAUSE: Final = 0.05
"""Seconds between two notifications."""
MOST_NAMED: Final = 500
"""Destinations that one notification names: PostgreSQL allows less than 8,000 bytes."""
FIRST_WAIT: Final = 0.1
LONGEST_WAIT: Final = 5.0
"""Longest of the seconds between two tries to connect, which double each time."""

_NAMES: Final = "SELECT id, name FROM sources WHERE id = ANY($1::integer[])"
# LISTEN takes no parameters.
LISTEN: Final = """
DO $$ BEGIN EXECUTE format('LISTEN %I', current_setting('oncehook.channel')); END $$
"""
# The comment tells the two apart in pg_stat_activity.
LISTEN_FOR_DEFINITIONS: Final = f"-- definitions\n{LISTEN}"


def notify_channel(schema: str) -> str:
    """Return the notification channel of a schema; short, whatever the schema's name."""
    return f"oncehook_{blake2b(schema.encode(), digest_size=12).hexdigest()}"


def encode_payload(destination_ids: Collection[int] | None) -> str:
    """Encode the destinations of a notification. Empty means any, also where there are too many to name."""
    return "" if destination_ids is None or len(destination_ids) > MOST_NAMED else " ".join(map(str, destination_ids))


def read_payload(text: str) -> set[int] | None:
    """Read the destinations of a notification; anything unexpected means any destination."""
    try:
        return {int(word) for word in text.split()} or None
    except ValueError:
        return None


class Notifier:
    """Wakes workers after a commit: this process at once, the others by NOTIFY.

    NOTIFY has a connection of its own and is sent at most every 50 ms, because inside the commits it would serialise
    them over the whole database. A lost notification costs only time: workers also look by themselves. Lives on one
    event loop.
    """

    def __init__(self, database: Database, wake: Callable[[Collection[int] | None], None]) -> None:
        self._database = database
        self._channel = notify_channel(database.schema)
        self._wake = wake
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender: StoreConnection | None = None
        self._own_pid = 0
        """The server process that sends our notifications, which we ignore."""
        self.sending = False
        self._due: set[int] | None = set()
        """Destinations that other processes are still to be notified of; None: any."""

    def start(self, *, listen: bool) -> None:
        """Start on the running loop; `listen` where there is a worker."""
        self._loop = asyncio.get_running_loop()
        if listen and self._database.listens:
            self._spawn(self._listen())

    async def close(self) -> None:
        self._loop = None
        pending = set(self._tasks)
        while pending:  # cancelled repeatedly, because the driver can lose a cancellation
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.5)
        if self._sender is not None:
            self._sender.pgconn.finish()

    def notify(self, destination_ids: Collection[int] | None) -> None:
        """Wake workers of these destinations (None: of any). Called on the loop."""
        self._wake(destination_ids)
        if destination_ids is None:
            self._due = None
        elif self._due is not None:
            self._due.update(destination_ids)
        if not self.sending and self._loop is not None:
            self.sending = True
            self._spawn(self._send_all())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="oncehook-notifier")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_all(self) -> None:
        """Notify other processes now, and once more after the pause for all that came meanwhile."""
        try:
            while self._due is None or self._due:
                due, self._due = self._due, set()
                await self._send(encode_payload(due))
                await asyncio.sleep(NOTIFY_PAUSE)
        finally:
            self.sending = False

    async def _send(self, payload: str) -> None:
        try:
            connection = await self._open_sender()
            guard = asyncio.get_running_loop().call_later(self._database.timeouts.silence, cut, connection)
            try:
                await connection.execute("SELECT pg_notify($1, $2)", [self._channel, payload])
            finally:
                guard.cancel()
        except (psycopg.Error, OSError, StoreError) as error:
            log.debug("store.notify_failed", extra={"fields": {"error": str(error)}})
            if self._sender is not None:
                self._sender.pgconn.finish()
                self._sender = None
            await asyncio.sleep(FIRST_WAIT)

    async def _open_sender(self) -> StoreConnection:
        if self._sender is None or not is_alive(self._sender):
            self._sender = await connect(self._database)
            # A wake-up need not be durable.
            await self._sender.configure({"synchronous_commit": "off"})
            self._own_pid = self._sender.info.backend_pid
        return self._sender

    async def _listen(self) -> None:
        wait = FIRST_WAIT
        while True:
            try:
                async with await connect(self._database) as connection:
                    if connection.is_pooled:
                        return  # notifications would go to whoever has that session then
                    await connection.configure({"oncehook.channel": self._channel})
                    await connection.execute(LISTEN)
                    wait = FIRST_WAIT
                    self._wake(None)  # notifications may have been missed meanwhile
                    async for notification in connection.notifies():
                        if notification.pid != self._own_pid:
                            self._wake(read_payload(notification.payload))
            except (psycopg.Error, OSError, StoreError) as error:
                log.debug("store.listen_failed", extra={"fields": {"error": str(error)}})
            await asyncio.sleep(wait * clock.chance.uniform(0.5, 1.0))
            wait = min(wait * 2, LONGEST_WAIT)


# -- the queue ---------------------------------------------------------------------------------


class PostgresQueue(StorePart):
    def __init__(self, database: Database, cipher: Cipher) -> None:
        super().__init__(database, cipher)
        self.work = WorkPool(partial(connect_hot, database), WORK_CONNECTIONS, database.timeouts)
        self.notifier = Notifier(database, lambda destination_ids: self.observer.wake(destination_ids))
        self.heartbeat = HeartbeatConnection(database)
        self._failing: set[int] = set()
        """Destinations whose last outcome was a failure, as far as this process knows."""
        self._rounds: Rounds = {}

    def notify_due(self, destination_ids: Collection[int] | None = None) -> None:
        self.notifier.notify(destination_ids)

    async def lease(self, wants: Sequence[LeaseRequest], worker: str | None = None) -> list[Lease]:
        rows = await self.work.ask(LEASE, lambda slot: lease_parameters(wants, slot, worker, self._rounds))
        leased = []
        for former, *row in rows:
            if former is None:
                leased.append(row)
                continue
            found = json.loads(former)
            if len(found) == 3:
                destination_id, priority, ended = found
                self._rounds[destination_id, priority] = ended
            else:
                self.observer.note_expired(read_expired(found))
        return await self._read_leases(leased)

    async def _read_leases(self, rows: Sequence[Sequence[Any]]) -> list[Lease]:
        if unknown := {row[SOURCE_ID] for row in rows} - self.source_names.keys():
            asked = [Integers(list(unknown))]
            self.source_names.update(
                await self.rows("SELECT id, name FROM sources WHERE id = ANY($1::integer[])", asked)
            )
        return [read_lease(row, self.source_names, self.cipher) for row in rows]

    async def next_due(self, destination_ids: Sequence[int], since: datetime | None = None) -> Outlook:
        return read_next_due(await self.work.ask(NEXT_DUE, lambda _: [Integers(destination_ids), since]))

    async def allow(self, wants: Sequence[LimitRequest], worker: str) -> list[Allowance]:
        return [Allowance(*row) for row in await self.work.ask(ALLOW, lambda _: allow_parameters(worker, wants))]

    def renew(self, leases: Sequence[Lease], worker: str | None = None) -> set[int]:
        return self.heartbeat.renew(leases, worker)

    async def settle(self, settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
        if not settlements:
            return Settled()
        faults.point("before_settle")
        if any(one.emits for one in settlements):
            answer = await self._settle_and_emit(settlements, worker)
        else:
            answer = await settle_ours(settlements, worker, self.cipher, self.work.ask)
        faults.point("after_settle")
        await self.follow_up(settlements, [answer])
        return Settled(answer.fences, await self._read_leases(answer.next) if answer.next else ())

    async def _settle_and_emit(self, settlements: Sequence[Settlement], worker: str | None) -> SettleResult:
        """Store emitted events, then end the leases under the fence, in one transaction: both or neither."""
        try:
            async with self.work.transaction() as ask:
                rows = await ask(INTAKE, lambda slot: emit_parameters(settlements, self.cipher, slot))
                faults.point("after_emit")
                answer = await settle_ours(settlements, worker, self.cipher, ask)
                if any(one.emits and one.lease.fence not in answer.fences for one in settlements):
                    raise LeaseLost
                read_emitted(settlements, rows)
                faults.point("before_transaction_commit")
        except LeaseLost:
            return SettleResult()
        return answer

    async def follow_up(self, settlements: Sequence[Settlement], answers: Sequence[SettleResult]) -> None:
        """Update breakers and pauses after a settlement, and wake workers.

        The settlement stands whatever fails here; the next outcome repeats the update.
        """
        for answer in answers:
            try:
                await self._update_breakers(settlements, answer)
            except StoreUnavailable as error:
                log.warning("store.followed_up_late", extra={"fields": {"error": str(error)}})
            due = set(answer.made_due)
            due |= {d for one in settlements if one.lease.fence in answer.fences for d in one.emitted_to}
            if due:
                self.notify_due(due)

    async def _update_breakers(self, settlements: Sequence[Settlement], answer: SettleResult) -> None:
        if streaks := select_streaks(settlements, answer, self._failing):
            for row in await self.work.ask(UPDATE_BREAKERS, lambda _: breaker_parameters(streaks)):
                self.observer.note_breaker(BreakerChange(*row))
            for destination_id, streak in streaks.items():
                if streak.failures:
                    self._failing.add(destination_id)
                else:  # its breaker may have been half open
                    self._failing.discard(destination_id)
                    self.notify_due([destination_id])
        for one in settlements:
            if one.pause is not None and one.lease.fence in answer.fences:
                await self.pause(one.lease.delivery.destination_id, "oncehook", one.pause)

    async def pause(self, destination_id: int, actor: str, why: str) -> None:
        await self.execute(_PAUSE, [destination_id, actor, clean_text(why), encode_detail({"reason": why})])

    async def resume(self, destination_id: int, actor: str) -> None:
        await self.execute(_RESUME, [destination_id, actor])
        self.notify_due()

    async def try_now(self, destination_id: int, actor: str) -> bool:
        tried = bool(await self.rows(_TRY_NOW, [destination_id, clean_text(actor)]))
        if tried:
            self.notify_due([destination_id])
        return tried
