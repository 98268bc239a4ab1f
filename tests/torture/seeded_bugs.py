"""Eighteen mistakes that others have made, each ready to be made again (T13): `seed(name)` makes one in this process.

They are put over the product from outside, as a careless change would, so that the product itself has no switch to turn
them on. `seeded` starts our own tests with one of them in every process, and expects red.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from oncehook import clock, ingest, model
from oncehook.claims import postgres as postgres_claims
from oncehook.claims import redis as redis_claims
from oncehook.claims import sqlite as sqlite_claims
from oncehook.http_client import HttpAnswer, addresses
from oncehook.http_client.client import HttpClient
from oncehook.http_client.connection import Connection
from oncehook.ingest import Receiver
from oncehook.model import Arrival, Intake, Item, Lease, LeaseRequest, Mark, Outcome, Planned, Settlement, Verdict
from oncehook.sources import Source
from oncehook.store import base, migrate
from oncehook.store.base import Pending
from oncehook.store.cipher import Cipher
from oncehook.store.postgres import queue as postgres_queue
from oncehook.store.postgres import upkeep as postgres_upkeep
from oncehook.store.sqlite import SqliteStore, admin, connection, queue, upkeep
from oncehook.store.sqlite.connection import Update
from oncehook.store.sqlite.intake import IntakeGroup
from oncehook.store.sqlite.writer import Writer

DAY: Final = 86400.0
TEN_SECONDS: Final = 10_000_000

SEEDS: Final[dict[str, Callable[[], None]]] = {}


def seed(name: str) -> None:
    """Make this mistake, from now on."""
    SEEDS[name]()


def mistake(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(function: Callable[[], None]) -> Callable[[], None]:
        SEEDS[name] = function
        return function

    return keep


def everywhere(old: object, new: object) -> None:
    """Put something in the place of something else, under whatever name a module of ours has it."""
    hits = [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "oncehook"
        for name, value in list(vars(module).items())
        if value is old
    ]
    assert hits, old
    for module, name in hits:
        setattr(module, name, new)


def reword(statement: str, *changes: tuple[str, str]) -> None:
    """Change the text of a statement everywhere."""
    text = statement
    for old, new in changes:
        assert old in text, f"the product has changed; where is now: {old}"
        text = text.replace(old, new)
    everywhere(statement, text)


def reword_function(name: str, *changes: tuple[str, str]) -> None:
    """Change the text of a function of the queue on PostgreSQL, before a migration makes it."""
    known = migrate.migrations

    def reworded(engine: model.Engine) -> list[migrate.Migration]:
        return [replace(step, sql=_reword_function(step.sql, name, changes)) for step in known(engine)]

    assert any(f"CREATE FUNCTION {name}(" in step.sql for step in known(model.Engine.postgres))
    everywhere(known, reworded)


def _reword_function(sql: str, name: str, changes: Sequence[tuple[str, str]]) -> str:
    before, begins, rest = sql.partition(f"CREATE FUNCTION {name}(")
    text, ends, after = rest.partition("\n$$;\n")
    if not begins:
        return sql
    for old, new in changes:
        assert old in text, f"the product has changed; where is now: {old}"
        text = text.replace(old, new)
    return before + begins + text + ends + after


# -- deduplication -----------------------------------------------------------------------------


def is_committed(path: Path, key_hash: bytes) -> bool:
    """What anybody can see of a key."""
    connection = sqlite3.connect(path)
    try:
        return connection.execute("SELECT 1 FROM keys WHERE hash = ?", (key_hash,)).fetchone() is not None
    finally:
        connection.close()


def look_first(is_known: Callable[[Path, bytes], bool], let_go: Callable[[bytes], None]) -> None:
    """Whether an event is new is decided by a look before it is written; the unique index has no say any more."""
    record, write = Writer.record, IntakeGroup.write
    believed_new: dict[bytes, bytes] = {}

    def looking(self: Writer, intake: Intake) -> Pending:
        for item in intake.items:
            if item.key_hash is not None and not is_known(self._path, item.key_hash):
                believed_new[item.event_id], item.key_hash = item.key_hash, None
        return record(self, intake)

    def setting(self: IntakeGroup) -> list[list[Verdict]]:
        new = [(i, item) for i in self.batch for item in i.items if item.event_id in believed_new]
        self.connection.executemany(
            "INSERT OR REPLACE INTO keys VALUES (?,?,?,?,?,?,?,?)",
            [
                (
                    *(believed_new[item.event_id], item.event_id, item.body_hash, i.source_id, 1),
                    *(self.now, self.now, self.now + int(item.keep * 1_000_000)),
                )
                for i, item in new
            ],
        )
        verdicts = write(self)
        for _, item in new:
            let_go(believed_new.pop(item.event_id))
        return verdicts

    Writer.record, IntakeGroup.write = looking, setting  # type: ignore[method-assign]


@mistake("GET-then-SET")
def get_then_set() -> None:
    """Ask whether the key is there; if not, set it. Whoever asks meanwhile is told the same."""
    look_first(is_committed, lambda key_hash: None)
    reword_function(
        "intake",
        ("FROM k WHERE NOT k.fresh AND k.event_id <> ALL($1)", "FROM k WHERE k.hash IN (SELECT o.hash FROM keys o)"),
    )


@mistake("claim held 24 h")
def claim_held_24_h() -> None:
    """SET NX EX 86400 before the work: whoever dies then has made sure that the retry is refused for a day."""
    for module in (sqlite_claims, redis_claims, postgres_claims):
        _hold_for_a_day(module.BACKEND)
    record = Writer.record

    def claiming(self: Writer, intake: Intake) -> Pending:
        claims = sqlite3.connect(f"{self._path}-claims", isolation_level=None)
        claims.execute("CREATE TABLE IF NOT EXISTS claims (hash BLOB PRIMARY KEY, until REAL)")
        claims.execute("DELETE FROM claims WHERE until < ?", (clock.now(),))
        taken = [
            claims.execute("INSERT OR IGNORE INTO claims VALUES (?,?)", (item.key_hash, clock.now() + DAY)).rowcount
            for item in intake.items
        ]
        claims.close()
        if all(taken):
            return record(self, intake)
        refused = Pending(intake, self._loop)
        verdicts = [Verdict(Outcome.duplicate, item.event_id) for item in intake.items]
        self._loop.call_soon(refused.answer, verdicts)
        return refused

    Writer.record = claiming  # type: ignore[method-assign]


def _hold_for_a_day(backend: Any) -> None:
    claim, renew = backend.claim, backend.renew
    backend.claim = lambda self, key, token, payload, ttl: claim(self, key, token, payload, DAY)
    backend.renew = lambda self, key, token, ttl: renew(self, key, token, DAY)


@mistake("key cleared before commit")
def key_cleared_before_commit() -> None:
    """A lock on the key, let go inside the transaction: between that and the commit there is neither lock nor row."""
    locked: set[bytes] = set()

    def is_known(path: Path, key_hash: bytes) -> bool:
        if key_hash in locked or is_committed(path, key_hash):
            return True
        locked.add(key_hash)
        return False

    look_first(is_known, locked.discard)


@mistake("key concatenation")
def key_concatenation() -> None:
    """The parts of a key, one after the other."""
    everywhere(model.key_hash, lambda source, parts: model.digest(f"{source}{''.join(parts)}".encode()))


@mistake("missing key ignored")
def missing_key_ignored() -> None:
    """The key is not where the rule looks: then there is none, and nobody is told."""
    make = Receiver._item

    def ignoring(self: Receiver, source: Source, *rest: Any) -> Item | None:
        lenient = copy(source)
        lenient.on_missing_key = "accept"
        item = make(self, lenient, *rest)
        if item is not None:
            item.marks &= ~Mark.unkeyed
        return item

    Receiver._item = ignoring  # type: ignore[method-assign]


@mistake("dedup forgotten at purge")
def dedup_forgotten_at_purge() -> None:
    """The key goes with its event."""
    forget = upkeep._forget_event

    def forgetting(connection: sqlite3.Connection, event_id: bytes, counts: Any) -> None:
        connection.execute("DELETE FROM keys WHERE event_id = ?", (event_id,))
        forget(connection, event_id, counts)

    everywhere(forget, forgetting)
    reword(
        postgres_upkeep.PRUNE,
        ("), a AS (\n", "), forgotten AS (\n  DELETE FROM keys k USING v WHERE k.event_id = v.id\n), a AS (\n"),
    )


@mistake("retry header means duplicate")
def retry_header_means_duplicate() -> None:
    """The sender says that it sends again: so it is a duplicate."""
    begin = Receiver.begin

    def believing(self: Receiver, source: Source | None, arrival: Arrival) -> ingest.Begun | ingest.Receipt:
        if source is not None and any(b"retry" in name for name, _ in arrival.headers):
            return ingest.Receipt(ingest._answer(source, arrival, {"status": "duplicate"}), "duplicate", [])
        return begin(self, source, arrival)

    Receiver.begin = believing  # type: ignore[method-assign]


# -- acknowledgement ---------------------------------------------------------------------------


@mistake("ack before commit")
def ack_before_commit() -> None:
    """It is as good as written."""
    insert = Writer._insert

    def hasty(self: Writer, intakes: Sequence[Pending], calls: Sequence[Any]) -> Any:
        inserted = insert(self, intakes, calls)
        base.answer(inserted.intakes, inserted.verdicts)
        return inserted

    Writer._insert = hasty  # type: ignore[method-assign]


@mistake("synchronous=NORMAL")
def synchronous_normal() -> None:
    """Twice as fast."""
    connect = connection.connect

    def faster(path: Path, cipher: Cipher) -> sqlite3.Connection:
        connection = connect(path, cipher)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    everywhere(connect, faster)


@mistake("4xx on storage error")
def client_error_on_storage_error() -> None:
    """Something went wrong with this request: 400."""
    put_off = Receiver.put_off
    Receiver.put_off = lambda self, source, error: structs.replace(put_off(self, source, error), status=400)  # type: ignore[method-assign]


# -- leases ------------------------------------------------------------------------------------


@mistake("completion by id only")
def completion_by_id_only() -> None:
    """UPDATE … WHERE id = ?"""
    look = queue.SettlementRound._heads

    def trusting(self: queue.SettlementRound, settlements: Sequence[Settlement]) -> dict[bytes, queue.Head]:
        heads = look(self, settlements)
        for settlement in settlements:
            if (head := heads.get(settlement.lease.queue_key)) is not None:
                settlement.lease.fence = head.fence
        return heads

    queue.SettlementRound._heads = trusting  # type: ignore[method-assign]
    reword_function("settle", ("SELECT h.fence FROM", "SELECT i.fence FROM"), (" AND h.fence = i.fence AND", " AND"))


@mistake("reaper by id only")
def reaper_by_id_only() -> None:
    """A list of leases and when they end, made when they were given; who is on it then is set free, by its id."""
    give = queue.Leasing.lease
    ends: dict[bytes, int] = {}

    def reaping(self: queue.Leasing, wants: Sequence[LeaseRequest]) -> list[Lease]:
        for head_id in [head_id for head_id, at in ends.items() if at <= self.now]:
            del ends[head_id]
            self.connection.execute(
                "UPDATE heads SET leased = 0, due_at = ? WHERE delivery_id = ?", (self.now, head_id)
            )
        given = give(self, wants)
        ends.update({lease.front_id: self.now + queue.micros(lease.seconds) for lease in given})
        return given

    queue.Leasing.lease = reaping  # type: ignore[method-assign]
    reword_function("lease", ("AND h.due_at <= now()", "AND least(h.due_at, h.leased_at + interval '10 s') <= now()"))


@mistake("attempt counted at completion")
def attempt_counted_at_completion() -> None:
    """What counts is written down when the attempt is over; of one that never is, nothing is."""
    at_lease = "line, fence, due_at, leased_at, attempts, crashes, deaths, alone, carries, upto, worker"
    everywhere(
        queue.TAKE,
        Update(
            at_lease,
            "UPDATE heads SET leased = 1, fence = v.fence, due_at = v.due_at, leased_at = v.leased_at, alone = v.alone,"
            " carries = v.carries, upto = v.upto FROM v WHERE heads.rowid = v.line",
        ),
    )
    make = queue.Head.__post_init__

    def counting(self: queue.Head) -> None:
        make(self)
        self.attempts += 1

    queue.Head.__post_init__ = counting  # type: ignore[method-assign]
    reword_function("lease", ("attempts = h.attempts + 1", "attempts = h.attempts"))
    reword_function(
        "take_over",
        ("attempts = h.attempts - 1", "attempts = h.attempts"),
        ("deaths = h.deaths + g.alone::integer", "deaths = h.deaths"),
    )


@mistake("zero-winner rival check")
def zero_winner_rival_check() -> None:
    """Say that one is there; if somebody else has said so in the last ten seconds, leave it to them."""
    give = SqliteStore.lease
    here: dict[object, int] = {}

    async def polite(self: SqliteStore, wants: Sequence[LeaseRequest], worker: str | None = None) -> list[Lease]:
        me = object()
        here[me] = self.now()
        await asyncio.sleep(0)
        if any(other is not me and self.now() - at < TEN_SECONDS for other, at in here.items()):
            return []
        return await give(self, wants, worker)

    SqliteStore.lease = polite  # type: ignore[method-assign]


@mistake("worker clock for expiry")
def worker_clock_for_expiry() -> None:
    """The time by which leases end is the worker's own."""
    own = "(now() + make_interval(secs => current_setting('seeded.clock')::float8))"
    reword_function("lease", ("now()", own))
    reword(postgres_queue.LEASE, ("$8", "CASE WHEN set_config('seeded.clock', $10, false) <> '' THEN $8 END"))
    want = postgres_queue.lease_parameters

    def by_own_clock(*asked: Any) -> list[Any]:
        return [*want(*asked), str(clock.now() - time.time())]

    everywhere(want, by_own_clock)


# -- replay ------------------------------------------------------------------------------------


@mistake("replay by insert")
def replay_by_insert() -> None:
    """The event once more, as if it had just come: with its key."""

    def inserting(self: admin.Replaying, d: admin.ReplayedDelivery, *rest: Any) -> None:
        source_id, *columns, head, body = self.connection.execute(
            "SELECT source_id, type, key, key_hash, subject, body_hash, head, body FROM events WHERE id = ?",
            (d.event_id,),
        ).fetchone()
        kind, key, key_hash, subject, body_hash = columns
        event_id = model.new_id()
        item = Item(event_id, kind, key, key_hash, 30 * DAY, subject, body, body_hash)
        item.deliveries = [Planned(model.DeliveryId.of(event_id, d.destination_id), d.destination_id, d.subject_key)]
        again = Intake(event_id, source_id, head, [item], None)
        group = IntakeGroup(self.connection, self.now, self.seq, [again], Cipher())
        group.write()
        self.seq = group.seq

    admin.Replaying._run = inserting  # type: ignore[method-assign]


# -- the way out -------------------------------------------------------------------------------


@mistake("redirect followed")
def redirect_followed() -> None:
    """As every HTTP client does unless it is told not to."""
    call, on_header = HttpClient.request, Connection.on_header
    places: list[str] = []

    def listening(self: Connection, name: bytes, value: bytes) -> None:
        if name.lower() == b"location":
            places.append(value.decode())
        on_header(self, name, value)

    async def following(self: HttpClient, method: str, url: str, *rest: Any, **options: Any) -> HttpAnswer:
        answer = await call(self, method, url, *rest, **options)
        if not 300 <= answer.status < 400:
            return answer
        return await call(self, method, places.pop(), *rest, **options)

    Connection.on_header = listening  # type: ignore[method-assign]
    HttpClient.request = following  # type: ignore[method-assign]


@mistake("is_global as filter")
def is_global_as_filter() -> None:
    """The standard library knows what is private."""
    look = addresses.find_denial
    # In our own words, so that only what it lets through can tell it from our table.
    everywhere(look, lambda address: None if address.is_global else look(address) or "private")
