"""What the backends ask, without a server: constant text, with every value beside it (R76)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from oncehook.claims import client, postgres, redis, sqlite
from oncehook.claims.client import Ask, Backend

VALUE = "'; DROP TABLE oncehook_claims; --"


def asks(backend: Backend) -> list[Any]:
    """One request of each verb."""
    made: list[Ask[Any] | None] = [
        backend.claim(VALUE, VALUE, VALUE, 1.0),
        backend.renew(VALUE, VALUE, 1.0),
        backend.commit(VALUE, VALUE, VALUE.encode(), 1.0),
        backend.abort(VALUE, VALUE),
        backend.look(VALUE),
        backend.forget(VALUE),
        backend.sweep(),
    ]
    return [ask.request for ask in made if ask is not None]


def constants(module: Any) -> list[Any]:
    return [value for name, value in vars(module).items() if name.isupper()]


def test_statements_are_constants() -> None:
    for request in asks(postgres.PostgresBackend(VALUE)):
        assert request.statement in constants(postgres)
    for request in asks(sqlite.SqliteBackend(VALUE)):
        assert all(statement in constants(sqlite) for statement in request.statements)
    for request in asks(redis.RedisBackend(VALUE)):
        assert request.script in constants(redis)


@pytest.mark.parametrize(
    ("key", "same"),
    [
        ("refund:42", True),
        ("k" * client.MAX_KEY, True),
        ("é" * (client.MAX_KEY // 2), True),
        ("é" * (client.MAX_KEY // 2 + 1), False),
        ("a\n", False),
        ("a\x00", False),
        ("\udc80", False),
        ("sha256:" + "0" * 64, False),
    ],
    ids=range(8),
)
def test_keys_are_kept_as_they_are_where_every_backend_can(key: str, same: bool) -> None:
    stored = client.stored_key(key)
    assert (stored == key) is same
    assert len(stored.encode()) <= client.MAX_KEY
    assert same or (stored.startswith(client.HASHED) and client.stored_key(stored) != stored)


def test_redis_reads_what_it_wrote() -> None:
    token, payload = client.new_token(), client.hash_payload("p")
    claimed = f"c{token}{payload}".encode()
    backend: Backend = redis.RedisBackend("n")
    row = backend.claim("k", token, payload, 1.0).read([claimed, 1500])
    assert (row.done, row.token, row.payload, row.result, row.left) == (False, token, payload, None, 1.5)
    done = b"d" + token.encode() + b"-" * 64
    for kept, result in ((b"0", None), (b"1", b""), (b"1r", b"r")):
        found = backend.look("k").read([done + kept, 1])
        assert found is not None
        assert (found.done, found.payload, found.result) == (True, None, result)
    assert backend.look("k").read([None, -2]) is None


@pytest.mark.parametrize(
    ("driver", "url", "extra"), [("redis", "redis://h", "redis"), ("psycopg", "postgres://h", "postgres")]
)
def test_a_missing_driver_is_named(driver: str, url: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules['{driver}'] = None\n"
        "from oncehook.claims import Claims\n"
        "from oncehook.errors import ConfigError\n"
        f"try: Claims('{url}')\nexcept ConfigError as error: print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"Run: pip install 'oncehook[{extra}]'\n"
