"""A million deliveries in all (R44): neither a lease nor a list looks at more pages for it.

On PostgreSQL, where plans depend on what is there. SQLite keeps no statistics here: its plans are the same whatever the
tables hold, and `test_sqlite_plans` looks at them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from oncehook.model import DeliveryStatus, Filter, Id, LeaseRequest, new_id
from oncehook.store.cipher import Cipher
from oncehook.store.postgres import read
from oncehook.store.postgres.connection import Database, session
from oncehook.store.postgres.queue import LEASE, lease_parameters
from oncehook.store.postgres.read import read_values
from tests.store.making import deliver
from tests.store.place import Place
from tests.store.test_postgres_plans import pages

SUBJECTS = 100
LISTS = {
    "pending": Filter(status=DeliveryStatus.pending),
    "dead": Filter(status=DeliveryStatus.dead),
    "one subject": Filter(subject="s7"),
    "all": Filter(),
}


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    yield made
    await made.remove()


def add(place: Place, count: int) -> None:
    """So many more that wait, spread over the subjects, their ids in the order of time; one in a hundred is dead."""
    place.sql(
        f"""
        INSERT INTO deliveries (id, event_id, destination_id, subject_key, behind, status)
        SELECT lpad(to_hex({count}::bigint * 1000 + n * {SUBJECTS} + d.seq), 32, '0')::uuid, d.event_id, 1,
          d.subject_key, true, CASE WHEN n % 100 = 0 THEN 'dead' ELSE 'pending' END
        FROM generate_series(1, {count // SUBJECTS}) n, (SELECT * FROM deliveries WHERE NOT behind LIMIT {SUBJECTS}) d
        """
    )


async def pages_of_a_lease(place: Place) -> int:
    async with session(Database.parse(place.url, place.schema)) as connection:
        asked = lease_parameters([LeaseRequest(1, 10, 30.0)], 1)
        await pages(connection, LEASE, asked)  # plans are made
        return await pages(connection, LEASE, asked)


async def pages_of_lists(place: Place) -> dict[str, int]:
    async with session(Database.parse(place.url, place.schema)) as connection:
        found = {}
        for name, wanted in LISTS.items():
            values = await read_values(connection, wanted, Cipher())
            values |= {"before": Id(new_id()), "looked_at": read.LOOKED_AT, "limit": 51}
            named = read.way_to_deliveries(wanted).LIST
            explain = f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) {named.TEXT}"
            cursor = await connection.execute(explain, named.parameters(values))
            plan = "\n".join(str(line) for (line,) in await cursor.fetchall())
            assert "Seq Scan on deliveries" not in plan, plan
            top = plan.split("\n")[1]
            found[name] = sum(int(number) for number in re.findall(r"(?:hit|read)=(\d+)", top))
        return found


@pytest.mark.timeout(300)
async def test_a_million_deliveries_cost_a_lease_and_a_list_nothing(place: Place) -> None:
    store = await place.open()
    await deliver(store, *[f"s{n}" for n in range(SUBJECTS)])
    add(place, 100_000)
    place.tidy("VACUUM ANALYZE")
    lease, lists = await pages_of_a_lease(place), await pages_of_lists(place)
    place.sql("SELECT set_config('statement_timeout', '0', false)")
    add(place, 1_000_000)
    place.tidy("VACUUM ANALYZE")
    assert place.sql("SELECT count(*) > 1000000 FROM deliveries") == [(True,)]
    assert await pages_of_a_lease(place) <= lease + 10
    for name, looked_at in (await pages_of_lists(place)).items():
        # a bounded look: as many rows as before, though each on a page of its own in the worst case
        assert looked_at <= 2 * lists[name] + 50, name
