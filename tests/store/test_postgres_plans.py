"""PostgreSQL: what the queue costs does not depend on what the planner believes, nor on how much there is (R44).

Plans are made once, under statistics of our choice, and kept by the session. Then the tables are filled, and a call may
touch no more pages than before. A sequential scan of a table of one page is no fault; what it costs later is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from oncehook.model import (
    Breaker,
    Category,
    Id,
    Intake,
    Lease,
    LeaseRequest,
    LimitRequest,
    Options,
    Priority,
    Settle,
    Settlement,
    count_streaks,
    new_id,
)
from oncehook.store.cipher import Cipher
from oncehook.store.postgres import PostgresStore
from oncehook.store.postgres.admin import CONTINUE_QUEUES, RUN_AGAIN
from oncehook.store.postgres.connection import Connection, Database, Floats, Ids, Integers, connect
from oncehook.store.postgres.intake import INTAKE, IntakeRows
from oncehook.store.postgres.queue import (
    ALLOW,
    LEASE,
    NEXT_DUE,
    RENEW,
    SETTLE,
    UPDATE_BREAKERS,
    allow_parameters,
    breaker_parameters,
    lease_parameters,
    renew_parameters,
    settle_parameters,
)
from oncehook.store.postgres.upkeep import BY_INDEX, PRUNE
from tests.store.making import CRM, dead, deliver, intake, item, keep, record, settle, take, take_one
from tests.store.place import Place

TABLES = (
    *("arrivals", "attempts", "batches", "counters", "deliveries", "destination_state", "events", "heads", "keys"),
    *("limits", "places", "ranks", "replay_items", "replays"),
)

# So many rows of everything, that nothing here refers to: subjects with a head and some that wait, dead letters, done
# ones, keys, copies, states of destinations, replays.
_FILL = """
INSERT INTO destinations (id, name) OVERRIDING SYSTEM VALUE
  SELECT n, 'destination-' || n FROM generate_series(1000 + {first}, 1000 + {last}) n;
INSERT INTO destination_state (destination_id, failures, open_until)
  SELECT n, 1, now() + interval '1 hour' FROM generate_series(1000 + {first}, 1000 + {last}) n;
INSERT INTO keys SELECT md5('key' || n)::uuid, md5('event' || n)::uuid, md5('body' || n)::uuid, 1, 1, now(), now(),
  now() + interval '1 day' FROM generate_series({first}, {last}) n;
INSERT INTO events (id, source_id, type, subject, marks, body_hash, head, body)
  SELECT md5('event' || n)::uuid, 1, 'order.created', 'filling', 0, md5('body' || n)::uuid, '', 'x'
  FROM generate_series({first}, {last}) n;
INSERT INTO batches (id, source_id, head, body) SELECT md5('batch' || n)::uuid, 1, '', ''
  FROM generate_series({first}, {last}) n;
INSERT INTO arrivals (event_id, slot, id, outcome) SELECT md5('event' || n)::uuid, 0, md5('arrival' || n)::uuid,
  'duplicate' FROM generate_series({first}, {last}) n;
INSERT INTO deliveries (id, event_id, destination_id, subject_key, behind, status)
  SELECT md5('delivery' || n)::uuid, md5('event' || n)::uuid, 1000 + n, md5('subject' || n / 4)::uuid, n % 4 > 0,
    CASE n % 7 WHEN 0 THEN 'done' WHEN 1 THEN 'dead' ELSE 'pending' END
  FROM generate_series({first}, {last}) n;
INSERT INTO heads (subject_key, destination_id, due_at, delivery_id, event_id, leased, fair)
  SELECT md5('subject' || n / 4)::uuid, 1000 + n, now() + interval '1 hour', md5('delivery' || n)::uuid,
    md5('event' || n)::uuid, n % 8 = 0, CASE WHEN n % 16 = 0 THEN n END
  FROM generate_series({first}, {last}) n WHERE n % 4 = 0;
INSERT INTO limits SELECT 1000 + n, now() FROM generate_series({first}, {last}) n;
INSERT INTO places SELECT 1000 + n, 'w', 1, 1, 10.0, now() FROM generate_series({first}, {last}) n;
INSERT INTO attempts (delivery_id, fence, run, n, started_at, ended_at, outcome)
  SELECT md5('delivery' || n)::uuid, n, 1, 1, now(), now(), 'done' FROM generate_series({first}, {last}) n;
INSERT INTO ranks SELECT 1000 + n, 1, 'scope-' || n, 1, now() FROM generate_series({first}, {last}) n;
INSERT INTO replays (id, state, about, actor, reason, bulk, planned)
  SELECT md5('replay' || n)::uuid, 'done', '{{}}', '', '', true, 1 FROM generate_series({first}, {last}) n;
INSERT INTO replay_items SELECT md5('replay' || n)::uuid, 1, md5('delivery' || n)::uuid, now(), 'done'
  FROM generate_series({first}, {last}) n;
INSERT INTO counters SELECT now() - make_interval(mins => n), 1, 1, 0, 'received', 1
  FROM generate_series({first}, {last}) n;
"""
_EMPTY = "TRUNCATE " + ", ".join(TABLES)


def fill(place: Place, first: int, last: int) -> None:
    place.sql(_FILL.format(first=first, last=last))


# -- what the planner believes -----------------------------------------------------------------


def never_analysed(place: Place) -> None:
    """As a store that was just made."""


def empty(place: Place) -> None:
    place.tidy()


def tiny(place: Place) -> None:
    fill(place, 1, 40)
    place.tidy()


def huge(place: Place) -> None:
    """What was there when statistics were made, and is gone."""
    fill(place, 1, 5000)
    place.tidy()
    place.sql(
        "UPDATE pg_class SET reltuples = 50000000, relpages = 1000000"
        f" WHERE relnamespace = '{place.schema}'::regnamespace AND relkind = 'r'"
    )
    place.sql(_EMPTY)


def lying(place: Place) -> None:
    """Everything was of one subject and one destination, was pending, had no key: as a queue may look one day."""
    fill(place, 1, 3000)
    place.sql(
        "UPDATE deliveries SET status = 'pending', behind = true, destination_id = 1, subject_key = md5('one')::uuid"
    )
    place.sql("DELETE FROM heads WHERE ctid <> (SELECT min(ctid) FROM heads)")
    place.sql("DELETE FROM keys")
    place.sql("DELETE FROM attempts")
    place.tidy()
    place.sql(_EMPTY)


BELIEFS = [never_analysed, empty, tiny, huge, lying]


# -- what is asked -----------------------------------------------------------------------------


@dataclass
class Scene:
    """Deliveries in every state that a call may meet, made anew for each measuring."""

    store: PostgresStore
    plain: list[Lease]
    followed: list[Lease]
    covering: list[Lease]
    failing: list[Lease]
    dead: list[bytes]


async def set_scene(store: PostgresStore, n: int) -> Scene:
    async def leased(*subjects: str | None, **about: Any) -> list[Lease]:
        await deliver(store, *subjects, **about)
        return await take(store)

    for k in range(5):
        await deliver(store, None, None, fair=f"{k}", options=Options.high)
    dying = await leased(*[f"dead-{n}-{k}" for k in range(5)])
    await settle(store, *[dead(lease) for lease in dying])
    return Scene(
        store,
        plain=await leased(*[f"plain-{n}-{k}" for k in range(5)], None),
        followed=await leased(*[f"followed-{n}-{k % 5}" for k in range(15)]),
        covering=await leased(*[f"covering-{n}-{k % 5}" for k in range(15)], options=Options.coalesce_type),
        failing=await leased(*[f"failing-{n}-{k}" for k in range(5)], rank=1, options=Options.latest_wins),
        dead=[lease.delivery.id for lease in dying],
    )


def ends(leases: Sequence[Lease], what: Settle, **about: Any) -> list[object]:
    return settle_parameters([Settlement(one, what, breaker=Breaker(), **about) for one in leases], Cipher(), 1, "w")


def fails(leases: Sequence[Lease]) -> list[Settlement]:
    return [Settlement(one, Settle.retry, category=Category.transient, breaker=Breaker()) for one in leases]


def arrivals(*items: Any) -> list[object]:
    batch: list[Intake] = [intake(one) for one in items]
    return list(IntakeRows(batch, Cipher()).parameters(1))


CALLS: dict[str, tuple[str, Callable[[Scene], list[object]]]] = {
    "intake, new": (
        INTAKE,
        lambda s: arrivals(*[item(f"{new_id().hex()}", subject=f"{n}", to=[CRM]) for n in range(5)]),
    ),
    "intake, joined": (
        INTAKE,
        lambda s: arrivals(*[item(new_id().hex(), subject=s.followed[n].event.subject, to=[CRM]) for n in range(5)]),
    ),
    "intake, copies": (INTAKE, lambda s: arrivals(*[item("known", subject="s", to=[CRM]) for _ in range(3)])),
    "lease": (
        LEASE,
        lambda s: lease_parameters([LeaseRequest(1, 10, 30.0), LeaseRequest(1, 3, 30.0, Priority.replay)], 1, "w"),
    ),
    "lease, in rounds": (
        LEASE,
        lambda s: lease_parameters([LeaseRequest(1, 10, 30.0, Priority.high, fair=True)], 1, "w"),
    ),
    "allow": (ALLOW, lambda s: list(allow_parameters("w", [LimitRequest(1, 10.0, 50.0, 5, 16, 0, 16)]))),
    "renew": (RENEW, lambda s: list(renew_parameters([*s.plain, *s.followed]))),
    "outlook": (NEXT_DUE, lambda s: [Integers([1, 2]), None]),
    "settle, plain": (SETTLE, lambda s: ends(s.plain, Settle.done)),
    "settle, next": (SETTLE, lambda s: ends(s.followed, Settle.done, take_next=30.0)),
    "settle, covering": (SETTLE, lambda s: ends(s.covering, Settle.done)),
    "settle, retry": (SETTLE, lambda s: ends(s.failing, Settle.retry, wait=5.0)),
    "settle, dead": (SETTLE, lambda s: ends(s.failing, Settle.dead)),
    "settle, ranked": (SETTLE, lambda s: ends(s.failing, Settle.done)),
    "replay": (RUN_AGAIN, lambda s: [Ids(s.dead), 0, Id(new_id()), False, 0, 0.0]),
    "judge": (UPDATE_BREAKERS, lambda s: list(breaker_parameters(count_streaks(fails(s.failing))))),
    "go on": (CONTINUE_QUEUES, lambda s: [Ids([lease.queue_key for lease in s.followed])]),
}


async def pages(connection: Connection, statement: str, parameters: Sequence[object]) -> int:
    """Pages that a call touches, with everything that happens inside its function; it is rolled back."""
    await connection.execute("BEGIN")
    try:
        explained = f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) {statement}"
        cursor = await connection.execute(explained, parameters, prepare=False)
        plan = "\n".join(str(line) for (line,) in await cursor.fetchall())
    finally:
        await connection.execute("ROLLBACK")
    [top] = re.findall(r"^ +Buffers: shared(.*)$", plan.partition("Planning")[0], re.MULTILINE)[:1]
    return sum(int(number) for number in re.findall(r"(?:hit|read)=(\d+)", top))


async def cost(connection: Connection, scene: Scene) -> dict[str, int]:
    found = {}
    for name, (statement, parameters) in CALLS.items():
        await pages(connection, statement, parameters(scene))  # the first time it may find entries to be tidied up
        found[name] = await pages(connection, statement, parameters(scene))
    return found


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place(apart=True)
    yield made
    await made.remove()


@pytest.fixture
async def session(place: Place) -> AsyncIterator[tuple[PostgresStore, Connection]]:
    """A store, and one session that keeps its plans as long as nothing tells it to make them anew."""
    store = await place.open()
    for table in TABLES:
        place.sql(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
    connection = await connect(Database.parse(place.url, place.schema))
    async with connection:
        yield store, connection


@pytest.mark.parametrize("belief", BELIEFS, ids=[belief.__name__ for belief in BELIEFS])
async def test_no_call_costs_more_where_there_is_more(
    place: Place, session: tuple[PostgresStore, Connection], belief: Callable[[Place], None]
) -> None:
    """R44"""
    store, connection = session
    belief(place)
    await keep(store, item("known", subject="s", to=[CRM]))
    await deliver(store, *[f"due-{n}" for n in range(15)])
    await cost(connection, await set_scene(store, 0))  # plans are made now, and stay
    fill(place, 10_000, 12_000)
    small = await cost(connection, await set_scene(store, 1))
    fill(place, 20_000, 50_000)
    large = await cost(connection, await set_scene(store, 2))
    # An index that is one level deeper has a page more on each way down.
    grown = {name: (small[name], large[name]) for name in CALLS if large[name] > 1.5 * small[name] + 20}
    assert not grown


async def test_the_test_sees_a_plan_that_was_turned_round(
    place: Place, session: tuple[PostgresStore, Connection]
) -> None:
    """Without a function's own settings a table that seemed empty is walked from end to end."""
    store, connection = session
    place.sql("ALTER FUNCTION renew RESET ALL")
    place.sql("ALTER FUNCTION renew SET plan_cache_mode = force_generic_plan")
    empty(place)
    lease = await only_lease(store)
    await pages(connection, RENEW, list(renew_parameters([lease])))
    fill(place, 10_000, 40_000)
    assert await pages(connection, RENEW, list(renew_parameters([lease]))) > 100


async def tables_read_whole(connection: Connection, first: str) -> set[str]:
    """Tables that a batch of what is pruned would read from end to end."""
    every = [Integers([]), Floats([]), 0.0, Integers([]), Ids([]), 500]
    await connection.execute("BEGIN")
    try:
        if first:
            await connection.execute(first)
        cursor = await connection.execute(f"EXPLAIN (COSTS OFF) {PRUNE}", every, prepare=False)
        plan = "\n".join(str(line) for (line,) in await cursor.fetchall())
    finally:
        await connection.execute("ROLLBACK")
    return set(re.findall(r"Seq Scan on (events|deliveries|attempts|arrivals|media)", plan))


async def test_a_batch_of_what_is_pruned_reads_no_table_whole(
    place: Place, session: tuple[PostgresStore, Connection]
) -> None:
    """As a plan does that was made without its settings."""
    _, connection = session
    fill(place, 10_000, 12_000)
    place.tidy()
    assert await tables_read_whole(connection, "")
    assert await tables_read_whole(connection, BY_INDEX) == set()


async def only_lease(store: PostgresStore) -> Lease:
    await deliver(store, "s")
    return await take_one(store)


# -- deep subjects, many destinations -------------------------------------------------------------


async def test_a_deep_subject_costs_a_lease_nothing(place: Place, session: tuple[PostgresStore, Connection]) -> None:
    """R44: 100,000 that wait behind one head, in no index that a lease reads."""
    store, connection = session
    await deliver(store, "deep", *[f"s{n}" for n in range(100)])
    asked = lease_parameters([LeaseRequest(1, 10, 30.0)], 1)
    before = await pages(connection, LEASE, asked)
    place.sql(
        """
        INSERT INTO deliveries (id, event_id, destination_id, subject_key, behind)
        SELECT md5(n::text)::uuid, d.event_id, 1, d.subject_key, true
        FROM generate_series(1, 100000) n, (SELECT * FROM deliveries ORDER BY seq LIMIT 1) d
        """
    )
    assert await pages(connection, LEASE, asked) <= before + 20


async def test_a_value_with_many_waiting_costs_a_round_nothing(
    place: Place, session: tuple[PostgresStore, Connection]
) -> None:
    """100,000 of one customer, due for longer than what the others have; as many customers with nothing due."""
    store, connection = session
    for n in range(50):
        await deliver(store, *[None] * 10, fair=f"v{n}")
    asked = lease_parameters([LeaseRequest(1, 16, 30.0, fair=True)], 1)
    await pages(connection, LEASE, asked)
    before = await pages(connection, LEASE, asked)
    add = """
        INSERT INTO heads (subject_key, destination_id, due_at, delivery_id, event_id, fair)
        SELECT md5({0} || n::text)::uuid, 1, now() {1}, h.delivery_id, h.event_id, {2}
        FROM generate_series(1, 100000) n, (SELECT * FROM heads LIMIT 1) h
        """
    place.sql(add.format("'big'", "- interval '1 hour'", 1 << 62))
    place.sql("ANALYZE heads")  # now there seems to be one value only
    await pages(connection, LEASE, asked)
    big = await pages(connection, LEASE, asked)
    assert big <= 1.5 * before + 20, "an index that is one level deeper has a page more on each way down"
    owners = Counter(lease.event.id for lease in await store.lease([LeaseRequest(1, 16, 30.0, fair=True)]))
    assert len(owners) >= 15, "no more than one of them is the large customer's"
    place.sql(add.format("'idle'", "+ interval '1 hour'", "n * 92233720368547"))
    assert await pages(connection, LEASE, asked) <= 2 * before, "a bounded number of steps, and then by due time"


async def test_a_lease_costs_the_same_with_many_destinations(
    place: Place, session: tuple[PostgresStore, Connection]
) -> None:
    """An inbox may have 100,000, each with something that waits."""
    store, connection = session
    await deliver(store, *[f"s{n}" for n in range(20)])
    asked = lease_parameters([LeaseRequest(1, 10, 30.0)], 1)
    [(now,)] = place.sql("SELECT now()")
    few = await pages(connection, LEASE, asked), await pages(connection, NEXT_DUE, [Integers([1, 2]), now])
    place.sql(
        """
        INSERT INTO heads (subject_key, destination_id, due_at, delivery_id, event_id)
        SELECT md5(n::text)::uuid, 1000 + n, now() - interval '1 day', md5(n::text)::uuid, md5(n::text)::uuid
        FROM generate_series(1, 100000) n
        """
    )
    many = await pages(connection, LEASE, asked), await pages(connection, NEXT_DUE, [Integers([1, 2]), now])
    assert many[0] <= few[0] + 10
    assert many[1] <= few[1] + 10


# -- hot subjects ------------------------------------------------------------------------------


async def test_a_hot_subject_leaves_nothing_behind_that_is_walked_through(
    place: Place, session: tuple[PostgresStore, Connection]
) -> None:
    """Thousands arrive at one subject and are settled, one after the other, while nobody vacuums."""
    store, connection = session
    costs: list[dict[str, int]] = []
    await deliver(store, "hot", "hot")
    [lease] = await take(store)
    for _ in range(40):
        await record(store, *[intake(item(subject="hot", to=[CRM])) for _ in range(50)])
        for _ in range(50):
            [lease] = (await store.settle([Settlement(lease, Settle.done, take_next=30.0)], "w")).next
        costs.append(
            {
                "intake": await pages(connection, INTAKE, arrivals(item(subject="hot", to=[CRM]))),
                "settle": await pages(connection, SETTLE, ends([lease], Settle.done, take_next=30.0)),
                "renew": await pages(connection, RENEW, list(renew_parameters([lease]))),
            }
        )
    first, last = costs[1], costs[-1]
    assert {name: (first[name], last[name]) for name in first if last[name] > 1.3 * first[name]} == {}
    # each settlement makes a version of the subject's row; on its page, without new entries in any index
    [(updated, hot)] = place.sql(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
        f" WHERE schemaname = '{place.schema}' AND relname = 'heads'"
    )
    assert hot > 0.9 * updated
