"""The inbox in PostgreSQL: any number of processes on any number of machines, one database as the judge.

Intake goes through a few connections of its own (`commit`), work through others (`hot`), reading through a pool
(`look`), so none waits for another. Intake, lease, heartbeat and settle are one call of a function each in autocommit
(migration 0007): no lock is held across a round trip, and a process that is stopped between two packets blocks nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from typing import Any, Final

from oncehook import faults
from oncehook.deliveries import Expired, Lease, Outlook, Settled, Settlement, Want
from oncehook.errors import ConfigError, LeaseLost, StoreUnavailable
from oncehook.model import (
    Engine,
    Intake,
    Rejection,
    SchemaState,
    Verdict,
)
from oncehook.replays import StoredReplay
from oncehook.store import migrate as migrations
from oncehook.store.base import (
    KEPT_REJECTIONS,
    BlockingTransaction,
    Notice,
    Numbers,
    Pending,
    Taker,
    Timeouts,
    Transaction,
    Wake,
    Watch,
    unheeded,
    unnoticed,
    unwatched,
)
from oncehook.store.cipher import Cipher

try:
    import psycopg as psycopg
except ImportError as missing:
    raise ConfigError(
        "PostgreSQL needs a driver that is not installed.", hint="Run: pip install 'oncehook[postgres]'"
    ) from missing

from oncehook.store.postgres import borrowed, opening, rights
from oncehook.store.postgres.acts import Acts
from oncehook.store.postgres.commit import GroupCommit
from oncehook.store.postgres.erase import Erasing
from oncehook.store.postgres.gauges import Gauges
from oncehook.store.postgres.heartbeat import Heartbeat
from oncehook.store.postgres.hot import HotConnections
from oncehook.store.postgres.intake import INTAKE
from oncehook.store.postgres.lease import (
    LEASE,
    OUTLOOK,
    SOURCE_ID,
    lease_parameters,
    read_expired,
    read_lease,
    read_outlook,
)
from oncehook.store.postgres.notify import Bell
from oncehook.store.postgres.recipients import Recipients
from oncehook.store.postgres.replay import Replays
from oncehook.store.postgres.sessions import Sessions
from oncehook.store.postgres.settle import (
    JUDGE,
    Answer,
    emit_parameters,
    judge_parameters,
    read_emitted,
    settle_ours,
    streaks_to_tell,
)
from oncehook.store.postgres.show import Lists
from oncehook.store.postgres.sweep import Sweep
from oncehook.store.postgres.transactions import JoinedTransaction, Transactions
from oncehook.store.postgres.wire import Bigs, BlockingConnection, Connection, Integers, Texts, Times, storable

log = logging.getLogger("oncehook.store")

# Known names are left out first, because every row that meets a conflict burns a number. The
# conflict is for the race: it waits for the rival's commit, and the SELECT then sees it.
_ENROLL: Final = """
WITH s AS (
  INSERT INTO sources (name) SELECT DISTINCT name FROM unnest($1::text[]) AS i(name)
  WHERE NOT EXISTS (SELECT FROM sources s WHERE s.name = i.name) ORDER BY name ON CONFLICT DO NOTHING
)
INSERT INTO destinations (name) SELECT DISTINCT name FROM unnest($2::text[]) AS i(name)
WHERE NOT EXISTS (SELECT FROM destinations d WHERE d.name = i.name) ORDER BY name ON CONFLICT DO NOTHING
"""
_SOURCES: Final = "SELECT name, id FROM sources"
_DESTINATIONS: Final = "SELECT name, id FROM destinations"


class PostgresStore(Lists, Gauges, Replays, Acts, Erasing, Recipients, Sweep, Sessions):
    """See `Store`. `url` is what the driver takes, plus `?schema=`; the schema is made when it is not there.

    `search_path` replaces the schema as the path on which names are found; `unsafe` accepts a server that may lose
    acknowledged events (fsync or synchronous_commit off), and is for tests and benchmarks.
    """

    engine = Engine.postgres

    def __init__(
        self,
        url: str,
        *,
        schema: str = "oncehook",
        cipher: Cipher | None = None,
        intake_connections: int = 2,
        max_waiting: int = 5000,
        max_waiting_bytes: int = 64 << 20,
        batch: int = 32,
        search_path: str | None = None,
        unsafe: bool = False,
        timeouts: Timeouts | None = None,
    ) -> None:
        super().__init__(opening.place(url, schema, search_path, timeouts), cipher or Cipher())
        self._unsafe = unsafe
        self.watch: Watch = unwatched
        self.wake: Wake = unheeded
        self.taker: Taker | None = None
        self.expired: Notice[Expired] = unnoticed
        self.finished: Notice[StoredReplay] = unnoticed
        self._source_names: dict[int, str] = {}
        self._commit = GroupCommit(
            self._connect_hot,
            self.cipher,
            lambda operation, seconds: self.watch(operation, seconds),
            self.made_due,
            lambda: self.taker,
            self._source_names,
            timeouts=self._here.timeouts,
            connections=intake_connections,
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
            batch=batch,
        )
        self._hot = HotConnections(self._connect_hot, self._here.timeouts)
        self._bell = Bell(self._here, lambda destination_ids: self.wake(destination_ids))
        self._heartbeat = Heartbeat(self._here)
        self._transactions = Transactions(self._here, self.cipher, self._follow_up)
        self._failing: set[int] = set()
        """Destinations whose last outcome, as far as this process knows, was a failure."""

    # -- opening and closing -------------------------------------------------------------------

    async def open(self, *, migrate: bool = True, write: bool = True) -> None:
        async with opening.session(self._here) as connection:
            if write:
                await rights.check_rights(connection, self._here)
            await opening.prove(connection, self._here, unsafe=self._unsafe)
            await opening.migrate(connection, self._here, migrate=migrate and write)
            await opening.prove(connection, self._here, unsafe=self._unsafe)
        self.start_reading()
        if write:
            self._commit.start()
            self._hot.start()
            self._transactions.start()
            self._bell.start(listen=self.wake is not unheeded)

    async def close(self) -> None:
        await self._commit.close()
        await self._bell.close()
        await self._hot.close()
        await self._transactions.close()
        self._heartbeat.close()
        await self.stop_reading()

    def made_due(self, destination_ids: Collection[int] | None = None) -> None:
        self._bell.ring(destination_ids)

    async def _connect_hot(self) -> tuple[Connection, int]:
        return await opening.connect_hot(self._here, unsafe=self._unsafe)

    # -- intake --------------------------------------------------------------------------------

    def record(self, intake: Intake) -> Pending:
        return self._commit.record(intake)

    async def record_rejections(self, rejections: Sequence[Rejection], counts: Mapping[tuple[int, str], int]) -> None:
        latest = rejections[-KEPT_REJECTIONS:]  # one statement may touch a slot of the ring once
        async with self.connection() as connection:
            # The number decides who stays: of two processes that meet in a slot, the one that drew the later number.
            await connection.execute(
                """
                WITH c AS (
                  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
                  SELECT date_trunc('minute', now()), 0, source_id, 0, what, n
                  FROM unnest($1::integer[], $2::text[], $3::bigint[]) AS c(source_id, what, n)
                  ORDER BY source_id, what
                  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
                )
                INSERT INTO rejections AS r (slot, n, source, at, code, reason, peer, size)
                SELECT n % $4, n, source, at, code, reason, peer, size FROM (
                  SELECT nextval('rejection_seq') AS n, i.*
                  FROM unnest($5::text[], $6::timestamptz[], $7::text[], $8::text[], $9::text[], $10::bigint[])
                    AS i(source, at, code, reason, peer, size)
                ) AS i
                ON CONFLICT (slot) DO UPDATE SET n = excluded.n, source = excluded.source, at = excluded.at,
                  code = excluded.code, reason = excluded.reason, peer = excluded.peer, size = excluded.size
                WHERE r.n < excluded.n
                """,
                [
                    Integers([source_id for source_id, _ in counts]),
                    Texts([what for _, what in counts]),
                    Bigs(list(counts.values())),
                    KEPT_REJECTIONS,
                    Texts([storable(r.source) for r in latest]),
                    Times([r.at for r in latest]),
                    Texts([storable(r.code) for r in latest]),
                    Texts([storable(r.reason) for r in latest]),
                    Texts([storable(r.peer) for r in latest]),
                    Bigs([r.size for r in latest]),
                ],
            )

    # -- work ----------------------------------------------------------------------------------

    async def lease(self, wants: Sequence[Want], worker: str | None = None) -> list[Lease]:
        rows = await self._hot.rows(LEASE, lambda slot: lease_parameters(wants, slot, worker))
        leased = []
        for former, *row in rows:
            if former is None:
                leased.append(row)
            else:
                self.expired(read_expired(former))
        return await self._leases(leased)

    async def _leases(self, rows: Sequence[Sequence[Any]]) -> list[Lease]:
        if any(row[SOURCE_ID] not in self._source_names for row in rows):
            self._source_names.update(await self.rows("SELECT id, name FROM sources"))
        return [read_lease(row, self._source_names, self.cipher) for row in rows]

    async def outlook(self, destination_ids: Sequence[int], since: datetime | None = None) -> Outlook:
        return read_outlook(await self._hot.rows(OUTLOOK, lambda _: [Integers(destination_ids), since]))

    def renew(self, leases: Sequence[Lease]) -> set[int]:
        return self._heartbeat.renew(leases)

    async def settle(self, settlements: Sequence[Settlement], worker: str | None = None) -> Settled:
        if not settlements:
            return Settled()
        faults.point("before_settle")
        if any(one.emits for one in settlements):
            answer = await self._settle_and_emit(settlements, worker)
        else:
            answer = await settle_ours(settlements, worker, self.cipher, self._hot.rows)
        faults.point("after_settle")
        await self._follow_up(settlements, [answer])
        return Settled(answer.fences, await self._leases(answer.next) if answer.next else ())

    async def _settle_and_emit(self, settlements: Sequence[Settlement], worker: str | None) -> Answer:
        """A short transaction: what handlers emitted, then the end of their leases under the fence, or neither."""
        try:
            async with self._hot.transaction() as ask:
                rows = await ask(INTAKE, lambda slot: emit_parameters(settlements, self.cipher, slot))
                faults.point("after_emit")
                answer = await settle_ours(settlements, worker, self.cipher, ask)
                if any(one.emits and one.lease.fence not in answer.fences for one in settlements):
                    raise LeaseLost
                read_emitted(settlements, rows)
                faults.point("before_transaction_commit")
        except LeaseLost:
            return Answer()
        return answer

    async def _follow_up(self, settlements: Sequence[Settlement], answers: Sequence[Answer]) -> None:
        """Do what a settle leaves to be done at once: breakers, pauses, and the wake-up.

        It is settled whatever becomes of this; what fails here the next outcome makes good.
        """
        for answer in answers:
            try:
                await self._tell(settlements, answer)
            except StoreUnavailable as error:
                log.warning("store.followed_up_late", extra={"fields": {"error": str(error)}})
            due = set(answer.made_due)
            due |= {d for one in settlements if one.lease.fence in answer.fences for d in one.reached}
            if due:
                self.made_due(due)

    async def _tell(self, settlements: Sequence[Settlement], answer: Answer) -> None:
        if streaks := streaks_to_tell(settlements, answer, self._failing):
            await self._hot.rows(JUDGE, lambda _: judge_parameters(streaks))
            for destination_id, streak in streaks.items():
                if streak.failures:
                    self._failing.add(destination_id)
                else:  # its breaker may have been half open
                    self._failing.discard(destination_id)
                    self.made_due([destination_id])
        for one in settlements:
            if one.pause is not None and one.lease.fence in answer.fences:
                await self.pause(one.lease.destination_id, "oncehook", one.pause)

    async def record_in(self, tx: Any, intake: Intake) -> list[Verdict]:
        return await borrowed.record(tx, intake, self._here, self.cipher)

    def record_in_blocking(self, tx: Any, intake: Intake) -> list[Verdict]:
        return borrowed.record_blocking(tx, intake, self._here, self.cipher)

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        return self._transactions.begin()

    def blocking_transaction(self) -> AbstractContextManager[BlockingTransaction]:
        return self._transactions.begin_blocking()

    def join_transaction(self, connection: BlockingConnection) -> JoinedTransaction:
        """Settle in a transaction that its owner has begun on a connection to this very database, and will commit."""
        return self._transactions.join(connection)

    # -- house ---------------------------------------------------------------------------------

    async def enroll(self, sources: Iterable[str], destinations: Iterable[str]) -> Numbers:
        async with self.connection() as connection:
            await connection.execute(_ENROLL, [Texts(list(sources)), Texts(list(destinations))])
            numbers = Numbers(
                dict(await opening.rows(connection, _SOURCES)), dict(await opening.rows(connection, _DESTINATIONS))
            )
        self._source_names.update({number: name for name, number in numbers.sources.items()})
        return numbers

    def enroll_blocking(self, sources: Iterable[str], destinations: Iterable[str]) -> Numbers:
        with opening.blocking_session(self._here) as cursor:
            cursor.execute(_ENROLL, [Texts(list(sources)), Texts(list(destinations))])
            return Numbers(dict(cursor.execute(_SOURCES).fetchall()), dict(cursor.execute(_DESTINATIONS).fetchall()))

    async def ping(self) -> None:
        await self.execute("UPDATE marks SET value = value + 1 WHERE name = 'ping'")

    async def schema_state(self) -> SchemaState:
        async with opening.session(self._here) as connection:
            return migrations.state(self.engine, await opening.version(connection, self._here))
