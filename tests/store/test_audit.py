"""S34: the audit log is only ever added to, on both engines, and its chain tells where somebody changed it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

import psycopg
import pytest

from oncehook.model import EraseOrder, subject_hash
from oncehook.store.audit import Ends, check_chain
from oncehook.store.base import Store
from tests.store.conftest import Ground, PostgresGround, SqliteGround
from tests.store.making import DAY, AdminOnly, dead_letters

REFUSED = (sqlite3.IntegrityError, psycopg.errors.RestrictViolation)


async def audited(store: Store) -> str:
    """What `doctor` says of the log."""
    [check] = [check for check in await store.check() if check.name == "audit"]
    assert check.ok == (not check.hint)
    return check.detail


async def lines(store: Store, *acts: str) -> None:
    for act in acts:
        await store.audit("ann", act, "target", {"reason": f"because of {act}"})


def tamper(ground: Ground, statement: str) -> None:
    """Change the log as somebody can who owns the database."""
    if ground.engine == "sqlite":
        assert isinstance(ground, SqliteGround)
        with closing(sqlite3.connect(ground.path, timeout=60, isolation_level=None)) as connection:
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                connection.execute(f"DROP TRIGGER {name}")
            connection.execute(statement)
    else:
        for table in ("audit", "audit_chain"):
            ground.sql(f"ALTER TABLE {table} DISABLE TRIGGER ALL")
        ground.sql(statement)
    ground.damaged = True


# -- append-only -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET detail = '{}'",
        "UPDATE audit SET actor = 'bob' WHERE n = 2",
        "UPDATE audit SET hash = NULL",
        "DELETE FROM audit",
        "DELETE FROM audit WHERE n = 3",
        "UPDATE audit_chain SET n = 1",
        "UPDATE audit_chain SET pruned = 99",
        "UPDATE audit_chain SET since = 99",
        "DELETE FROM audit_chain",
    ],
)
async def test_no_line_is_changed_or_removed(ground: Ground, store: Store, statement: str) -> None:
    await lines(store, "a", "b", "c")
    with pytest.raises(REFUSED, match="append-only"):
        ground.sql(statement)
    assert [line.act for line in await store.audit_log()] == ["c", "b", "a"]


@pytest.mark.parametrize("ground", ["postgres"], indirect=True)
async def test_nor_are_all_of_them_at_once(ground: PostgresGround, store: Store) -> None:
    await lines(store, "a")
    for table in ("audit", "audit_chain"):
        with pytest.raises(REFUSED, match="append-only"):
            ground.sql(f"TRUNCATE {table}")


@pytest.mark.parametrize("ground", ["sqlite"], indirect=True)
async def test_nor_is_one_replaced(ground: SqliteGround, store: Store) -> None:
    """REPLACE removes a row without any trigger on DELETE."""
    await lines(store, "a", "b")
    for n in (1, 9):
        with pytest.raises(REFUSED, match="append-only"):
            ground.sql(f"INSERT OR REPLACE INTO audit VALUES ({n}, 0, 'bob', 'x', 'y', '{{}}', x'00')")


# -- the chain ---------------------------------------------------------------------------------


async def test_the_chain_holds(store: Store) -> None:
    assert await audited(store) == "no lines yet"
    await store.audit("ann", "act", "target", {"text": 'ünï "x" \x00 \ud800 \n', "n": 1.5})
    await store.audit("a\x00nn\ud800", "act", "tar\ngét\x00", {})
    assert (await audited(store)).startswith("2 lines follow one from another; the last is 2")


@pytest.mark.parametrize(
    ("statement", "where"),
    [
        ("UPDATE audit SET detail = '{}' WHERE n = 3", "line 3 was changed"),
        ("UPDATE audit SET actor = 'bob' WHERE n = 1", "line 1 was changed"),
        ("UPDATE audit SET actor = 'a', act = 'nnb' WHERE n = 2", "line 2 was changed"),
        ("UPDATE audit SET target = target || ' ' WHERE n = 5", "line 5 was changed"),
        ("DELETE FROM audit WHERE n = 2", "line 2 is missing"),
        ("DELETE FROM audit WHERE n = 1", "line 1 is missing"),
        ("DELETE FROM audit WHERE n = 5", "line 5 is missing"),
        ("DELETE FROM audit", "line 1 is missing"),
        ("UPDATE audit_chain SET n = 4", "line 5 is not the one that was written last"),
        ("UPDATE audit SET hash = NULL WHERE n = 4", "line 4 was changed"),
    ],
)
async def test_it_tells_where_somebody_changed_the_log(
    ground: Ground, store: Store, statement: str, where: str
) -> None:
    await lines(store, *"abcde")
    tamper(ground, statement)
    assert (await audited(store)).startswith(f"the chain is broken: {where}")


async def test_lines_written_at_once_follow_one_another(ground: Ground, store: Store) -> None:
    """Of two transactions, the second waits for the first; one that is rolled back leaves no gap."""
    others = [ground.make() for _ in range(2)] if ground.engine == "postgres" else []
    for other in others:
        await other.open()
    try:
        written = [one.audit("ann", "act", str(number), {}) for number in range(15) for one in (store, *others)]
        await asyncio.gather(*written)
    finally:
        for other in others:
            await other.close()
    assert [line.n for line in await store.audit_log(limit=200)] == list(range(len(written), 0, -1))
    assert (await audited(store)).startswith(f"{len(written)} lines follow")


async def test_pruning_leaves_a_chain_that_begins_later(ground: Ground, store: Store) -> None:
    await lines(store, "a", "b")
    ground.forward(40 * DAY)
    await lines(store, "c")
    while await store.prune({}, 30 * DAY, 1):
        pass
    assert [(line.n, line.act) for line in await store.audit_log()] == [(3, "c")]
    assert (await audited(store)).startswith("1 line follows one from another; the last is 3")
    ground.forward(40 * DAY)
    while await store.prune({}, 30 * DAY):
        pass
    await lines(store, "d")
    assert [(line.n, line.act) for line in await store.audit_log()] == [(4, "d")]
    tamper(ground, "UPDATE audit SET act = 'e'")
    assert "line 4 was changed" in await audited(store)


async def test_an_old_line_behind_a_younger_one_waits(ground: Ground, store: Store) -> None:
    """A clock that ran ahead must not leave a hole."""
    ground.forward(40 * DAY)
    await lines(store, "young")
    ground.forward(-40 * DAY)
    await lines(store, "old")
    ground.forward(31 * DAY)
    while await store.prune({}, 30 * DAY):
        pass
    assert len(await store.audit_log()) == 2


# -- what is in it -----------------------------------------------------------------------------


async def test_a_replay_of_a_subject_does_not_name_it(ground: Ground, store: Store) -> None:
    """A line cannot be changed when the subject is erased, so it holds a hash from the beginning."""
    await dead_letters(store, "cus_42")
    admin = AdminOnly(store).admin
    await admin.start_replay(admin.build_request("subject:cus_42 status:dead"), actor="ann")
    [line] = [line for line in await store.audit_log() if line.act == "replay"]
    assert "cus_42" not in str(line)
    assert f"#{subject_hash('cus_42')}" in str(line.detail["query"])
    assert f"#{subject_hash('cus_42')}" in str(line.detail["command"])
    [made] = (await store.find_replays()).items
    assert "subject:cus_42" in str(made.about["query"])
    await store.erase(EraseOrder("cus_42", actor="ann", reason="letter 7", spelled="cus_42"))


# -- settings and tokens -----------------------------------------------------------------------


async def test_changed_settings_are_named_without_values(store: Store) -> None:
    first = {"server.port": "aa", "source.orders.secret": "bb", "store": "cc"}
    await store.note_settings("oncehook.toml", first)
    await store.note_settings("oncehook.toml", first)
    await store.note_settings("other.toml", {"store": "dd"})
    assert await store.audit_log() == []
    await store.note_settings("oncehook.toml", {"server.port": "ee", "store": "cc", "migrate": "ff"})
    [line] = await store.audit_log()
    assert (line.actor, line.act, line.target) == ("oncehook", "settings", "oncehook.toml")
    assert line.detail == {"changed": ["server.port"], "added": ["migrate"], "removed": ["source.orders.secret"]}


async def test_a_use_is_written_at_most_once_a_minute(ground: Ground, store: Store) -> None:
    ground.stand_still()
    await store.note_token_use("ci")
    first = await store.token_uses()
    ground.forward(59)
    await store.note_token_use("ci")
    assert await store.token_uses() == first
    ground.forward(1)
    await store.note_token_use("ci")
    await store.note_token_use("ann")
    used = await store.token_uses()
    assert set(used) == {"ci", "ann"}
    assert (used["ci"] - first["ci"]).total_seconds() == 60


def test_a_chain_without_its_ends_is_broken() -> None:
    """As a store may be after its disk has lied: `doctor` says so, and does not fail itself."""
    gone: Any = None
    found = check_chain(Ends(gone, gone, gone, gone, gone), [])
    assert (found.ok, found.detail) == (False, "the chain is broken: its ends are gone")
