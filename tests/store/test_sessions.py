"""Sessions of the dashboard in the store: known to every server, ended for all, and never for longer than they last."""

from __future__ import annotations

import asyncio

from oncehook.model import StoredSession
from oncehook.store.base import Store
from oncehook.web.auth import hash_of
from oncehook.web.session import DashboardSessions
from tests.store.conftest import Ground
from tests.store.making import opened

HOUR = 3600.0


def session(name: str) -> StoredSession:
    return StoredSession(hash_of(name), "ann", "operator", b"proof")


async def test_a_session_lasts_until_it_ends(ground: Ground, store: Store) -> None:
    await store.begin_session(session("a"), HOUR)
    assert await store.get_session(hash_of("a")) == session("a")
    assert await store.get_session(hash_of("b")) is None
    ground.forward(HOUR + 1)
    assert await store.get_session(hash_of("a")) is None


async def test_ending_one_leaves_the_others(store: Store) -> None:
    for name in ("a", "b"):
        await store.begin_session(session(name), HOUR)
    await store.end_session(hash_of("a"))
    await store.end_session(hash_of("a"))
    assert await store.get_session(hash_of("a")) is None
    assert await store.get_session(hash_of("b")) == session("b")


async def test_the_sweep_removes_what_is_over(ground: Ground, store: Store) -> None:
    await store.begin_session(session("short"), HOUR)
    await store.begin_session(session("long"), 3 * HOUR)
    assert not await store.prune({}, 30 * 24 * HOUR)
    ground.forward(2 * HOUR)
    assert (await store.prune({}, 30 * 24 * HOUR)).others == 1
    assert ground.sql("SELECT count(*) FROM sessions") == [(1,)]
    assert not await store.prune({}, 30 * 24 * HOUR)


async def test_the_oldest_make_room(ground: Ground, store: Store) -> None:
    for n in range(5):
        await store.begin_session(session(f"{n}"), HOUR, at_most=3)
        ground.forward(1)
    found = [await store.get_session(hash_of(f"{n}")) is not None for n in range(5)]
    assert found == [False, False, True, True, True]


async def test_sessions_of_customers_push_out_nobody_else(ground: Ground, store: Store) -> None:
    await store.begin_session(session("operator"), HOUR, at_most=2)
    for n in range(4):
        ground.forward(1)
        customer = StoredSession(hash_of(f"{n}"), "portal 42", "admin", b"proof", "42")
        await store.begin_session(customer, HOUR, at_most=2)
    found = [await store.get_session(hash_of(name)) is not None for name in ("operator", "0", "1", "2", "3")]
    assert found == [True, False, False, True, True]
    kept = await store.get_session(hash_of("3"))
    assert kept is not None
    assert kept.account == "42"


async def test_a_link_is_taken_once_and_forgotten_after_its_end(ground: Ground, store: Store) -> None:
    assert await store.take_link(b"a" * 32, HOUR)
    assert not await store.take_link(b"a" * 32, HOUR)
    assert await store.take_link(b"b" * 32, 3 * HOUR)
    taken = await asyncio.gather(*[store.take_link(b"c" * 32, 3 * HOUR) for _ in range(10)])
    assert sorted(taken) == [False] * 9 + [True]
    ground.forward(2 * HOUR)
    assert (await store.prune({}, 30 * 24 * HOUR)).others == 1
    assert not await store.take_link(b"b" * 32, HOUR)


async def test_after_a_restore_nobody_is_in(store: Store) -> None:
    """Whoever logged out after the backup was made must not be in again."""
    await store.begin_session(session("a"), HOUR)
    await store.invalidate_leases()
    assert await store.get_session(hash_of("a")) is None


async def test_they_outlast_the_process(ground: Ground) -> None:
    async with opened(ground) as store:
        name = await DashboardSessions(store).begin("ann", "operator", hash_of("password"))
        cookie = await DashboardSessions(store).cookie()
    async with opened(ground) as store:
        found = await DashboardSessions(store).of(name)
        assert found is not None
        assert (found.actor, found.role) == ("ann", "operator")
        assert await DashboardSessions(store).cookie() == cookie, "a browser finds it again"


async def test_what_a_browser_holds_is_not_in_the_store(ground: Ground, store: Store) -> None:
    """Nor is anything from which a password could be guessed without it."""
    name = await DashboardSessions(store).begin("ann", "admin", hash_of("secret"))
    [(hash_, proof)] = ground.sql("SELECT hash, proof FROM sessions")
    assert bytes(hash_) == hash_of(name)
    known = {name.encode(), bytes.fromhex(name), b"secret", hash_of("secret"), hash_of(hash_of("secret").hex())}
    assert not known & {bytes(hash_), bytes(proof)}


async def test_each_inbox_has_a_cookie_of_its_own(ground: Ground, store: Store) -> None:
    before = await store.inbox_number()
    ground.sql("UPDATE marks SET value = value + 1 WHERE name = 'inbox'")
    assert await store.inbox_number() == before + 1
    assert before > 0
