"""House: the store opens only what it can trust, numbers names once, and notices when its books are wrong."""

from __future__ import annotations

import pytest

from oncehook.errors import MigrationNeeded, SchemaTooNew, StoreError
from oncehook.store.base import NameIds, Store
from tests.store.conftest import Ground, failed_checks
from tests.store.making import intake, item, keep, record

CRM = ("crm", 1)


# -- names and numbers -------------------------------------------------------------------------


async def test_a_name_keeps_its_number(ground: Ground) -> None:
    store = ground.make()
    await store.open()
    before = await store.register_names(["orders"], ["crm"])
    after = await store.register_names(["aaa", "orders", "aaa"], ["zzz", "crm"])
    assert after.sources["orders"] == before.sources["orders"]
    assert after.destinations["crm"] == before.destinations["crm"]
    assert len(set(after.sources.values())) == len(after.sources)
    await store.close()
    again = ground.make()
    await again.open()
    assert await again.register_names([], []) == after
    await again.close()


async def test_enrolling_again_uses_up_no_numbers(store: Store) -> None:
    for _ in range(50):
        await store.register_names(["orders", "payments"], ["crm", "mail"])
    numbers = await store.register_names(["new"], ["new"])
    assert numbers == NameIds({"orders": 1, "payments": 2, "new": 3}, {"crm": 1, "mail": 2, "new": 3})


# -- schema ------------------------------------------------------------------------------------


async def test_the_schema_before_and_after(ground: Ground) -> None:
    """R65"""
    ground.make_bare()
    store = ground.make()
    before = await store.schema_state()
    assert (before.current, len(before.pending)) == (0, before.target)
    await store.open()
    after = await store.schema_state()
    assert (after.current, after.pending) == (before.target, [])
    await store.close()


async def test_an_old_schema_is_refused_when_told_not_to_migrate(ground: Ground) -> None:
    ground.make_bare()
    store = ground.make()
    with pytest.raises(MigrationNeeded):
        await store.open(migrate=False)
    store = ground.make()
    assert (await store.schema_state()).current == 0
    await store.open()
    await store.close()
    store = ground.make()
    await store.open(migrate=False)
    await store.close()


async def test_a_newer_schema_is_refused(ground: Ground) -> None:
    store = ground.make()
    await store.open()
    await store.close()
    ground.sql("UPDATE migrations SET version = 999 WHERE version = (SELECT max(version) FROM migrations)")
    store = ground.make()
    with pytest.raises(SchemaTooNew):
        await store.open()


async def test_closing_what_did_not_open_is_harmless(ground: Ground) -> None:
    ground.make_bare()
    store = ground.make()
    await store.close()
    with pytest.raises(MigrationNeeded):
        await store.open(migrate=False)
    await store.close()
    await store.close()


async def test_a_store_without_its_judge_is_refused(ground: Ground) -> None:
    """R66"""
    store = ground.make()
    await store.open()
    await store.close()
    if ground.engine == "postgres":
        ground.sql("ALTER TABLE keys DROP CONSTRAINT keys_pkey")
    else:
        ground.sql("ALTER TABLE keys RENAME TO old")
        ground.sql("CREATE TABLE keys AS SELECT * FROM old")
    store = ground.make()
    with pytest.raises(StoreError, match="unique index"):
        await store.open()


async def test_reading_beside_the_writer(ground: Ground, store: Store) -> None:
    [verdict] = await keep(store, item("k"))
    reader = ground.make()
    await reader.open(write=False)
    assert await reader.get_event(verdict.event_id) is not None
    with pytest.raises(StoreError):
        reader.record(intake(item("x")))
    await reader.close()


# -- health ------------------------------------------------------------------------------------


async def test_ping_commits(store: Store) -> None:
    await store.ping()
    await store.ping()


async def test_ping_of_a_closed_store(ground: Ground) -> None:
    store = ground.make()
    await store.open()
    await store.close()
    with pytest.raises(StoreError):
        await store.ping()


async def test_size_grows(store: Store) -> None:
    before = await store.size()
    await keep(store, item("k", body=b"x" * 500_000))
    assert await store.size() >= before + 400_000


async def mixed_traffic(store: Store) -> None:
    await record(store, *[intake(item(f"k{n % 7}", body=b"%d" % (n % 3), subject="s", to=[CRM])) for n in range(40)])
    await record(store, intake(item("a"), item("b", subject="t", to=[CRM]), item("a"), raw=b"raw"), intake(item()))
    await keep(store, item("p", source="payments", to=[("mail", 2)]), source_id=2)


async def test_the_books_balance(store: Store) -> None:
    """R68"""
    await mixed_traffic(store)
    checks = await store.check()
    assert failed_checks(checks) == []
    assert {"arrivals", "events", "keys", "deliveries", "subjects", "heads"} <= {check.name for check in checks}
    assert all(check.detail for check in checks)


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        ("UPDATE counters SET n = n + 1 WHERE what = 'received'", "arrivals"),
        ("DELETE FROM events WHERE key = 'p'", "events"),
        ("UPDATE keys SET copies = 0", "keys"),
        ("UPDATE counters SET n = n - 1 WHERE what = 'pending'", "deliveries"),
        ("UPDATE deliveries SET status = 'done' WHERE NOT behind", "heads"),
        ("UPDATE deliveries SET seq = seq - 1000 WHERE behind", "heads"),
        ("UPDATE heads SET seq = seq + 1", "heads"),
        ("DELETE FROM heads", "subjects"),
    ],
)
async def test_a_law_that_is_broken_is_noticed(ground: Ground, store: Store, damage: str, law: str) -> None:
    await mixed_traffic(store)
    ground.damage(damage)
    assert law in failed_checks(await store.check())
