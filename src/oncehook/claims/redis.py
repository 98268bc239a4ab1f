"""Claims on Redis or Valkey: one value per key, which expires by the server's clock.

`SET NX PX` takes it; the verbs that need the owner's token compare and change it in one script. `client` imports this
module when an address says `redis:` or `valkey:`. The value is, in bytes: `c` or `d` (claimed, done), 32 of token, 64
of payload hash (or dashes), then, once done, `0` for no result or `1` and the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha1
from typing import Any, Final

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from oncehook.claims.client import Ask, Row
from oncehook.claims.connection import PerLoop
from oncehook.errors import ConfigError, StoreError, StoreUnavailable

CONNECTIONS: Final = 16
PATIENCE: Final = 5.0
"""Seconds for a connection and for an answer; `?socket_timeout=` in the address overrides it."""

_NO_PAYLOAD: Final = "-" * 64
_TOKEN: Final = slice(1, 33)
_PAYLOAD: Final = slice(33, 97)


class Script:
    """A script, and the hash by which the server knows it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


# KEYS[1]: the key. `ARGV[1]` of those that compare: the letter and the token that the value must begin with.

CLAIM: Final = Script("""
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return {ARGV[1], tonumber(ARGV[2])} end
return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}
""")

LOOK: Final = Script("return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}")

RENEW: Final = Script("""
local value = redis.call('GET', KEYS[1])
if not value or string.sub(value, 1, 33) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")

COMMIT: Final = Script("""
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
local owner = string.sub(value, 1, 33)
if owner == 'd' .. string.sub(ARGV[1], 2) then return 1 end
if owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], 'd' .. string.sub(value, 2, 97) .. ARGV[2], 'PX', ARGV[3])
return 1
""")

ABORT: Final = Script("""
local value = redis.call('GET', KEYS[1])
if not value or string.sub(value, 1, 33) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
""")

FORGET: Final = Script("return redis.call('DEL', KEYS[1])")


@dataclass(frozen=True, slots=True)
class RedisRequest:
    script: Script
    key: str
    arguments: tuple[str | bytes | int, ...] = ()


class RedisBackend:
    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def claim(self, key: str, token: str, payload: str | None, ttl: float) -> Ask[Row]:
        value = f"c{token}{payload or _NO_PAYLOAD}"
        return Ask(self._request(CLAIM, key, value, _milliseconds(ttl)), _row)

    def renew(self, key: str, token: str, ttl: float) -> Ask[bool]:
        return Ask(self._request(RENEW, key, f"c{token}", _milliseconds(ttl)), bool)

    def commit(self, key: str, token: str, result: bytes | None, keep: float) -> Ask[bool]:
        kept = b"0" if result is None else b"1" + result
        return Ask(self._request(COMMIT, key, f"c{token}", kept, _milliseconds(keep)), bool)

    def abort(self, key: str, token: str) -> Ask[bool]:
        return Ask(self._request(ABORT, key, f"c{token}"), bool)

    def look(self, key: str) -> Ask[Row | None]:
        return Ask(self._request(LOOK, key), lambda reply: _row(reply) if reply[0] is not None else None)

    def forget(self, key: str) -> Ask[bool]:
        return Ask(self._request(FORGET, key), bool)

    def sweep(self) -> None:
        """Do nothing: the server removes what has lapsed."""

    def _request(self, script: Script, key: str, *arguments: str | bytes | int) -> RedisRequest:
        # A namespace holds no colon, so that ("a", "b:c") and ("a:b", "c") cannot meet.
        return RedisRequest(script, f"{self._namespace}:{key}", arguments)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _row(reply: list[Any]) -> Row:
    value, left = reply[0], reply[1]
    kind = value[:1]
    if kind not in (b"c", b"d") or len(value) < 97:
        raise StoreError("Something that is no claim is kept under this key.", hint="Choose another namespace.")
    payload = value[_PAYLOAD].decode()
    return Row(
        done=kind == b"d",
        token=value[_TOKEN].decode(),
        payload=None if payload == _NO_PAYLOAD else payload,
        result=value[98:] if value[97:98] == b"1" else None,
        left=max(0, left) / 1000,
    )


class RedisConnector:
    """A pool of blocking connections. redis-py keeps it apart from that of a forked child by itself."""

    def __init__(self, url: str) -> None:
        # No retries by redis-py: an `abort` whose answer was lost would be sent again and answer ClaimLost. Idle
        # connections that broke are found when they are taken from the pool.
        pool = _pool(redis.BlockingConnectionPool, url, Retry(NoBackoff(), 0))
        self._client = redis.Redis.from_pool(pool)

    def ask(self, request: RedisRequest) -> Any:
        script, key, arguments = request.script, request.key, request.arguments
        try:
            try:
                return self._client.evalsha(script.sha, 1, key, *arguments)
            except NoScriptError:
                return self._client.eval(script.text, 1, key, *arguments)
        except RedisError as error:
            raise _unavailable(error) from error

    def close(self) -> None:
        self._client.connection_pool.disconnect()


class AsyncRedisConnector:
    def __init__(self, url: str) -> None:
        self._url = url
        self._make()  # refuses a wrong address now, not at the first claim
        self._clients = PerLoop(self._make, redis.asyncio.Redis.aclose)

    def _make(self) -> redis.asyncio.Redis:
        pool = _pool(redis.asyncio.BlockingConnectionPool, self._url, AsyncRetry(NoBackoff(), 0))
        return redis.asyncio.Redis.from_pool(pool)

    async def ask(self, request: RedisRequest) -> Any:
        client = await self._clients.get()
        script, key, arguments = request.script, request.key, request.arguments
        try:
            try:
                return await client.evalsha(script.sha, 1, key, *arguments)
            except NoScriptError:
                return await client.eval(script.text, 1, key, *arguments)
        except RedisError as error:
            raise _unavailable(error) from error

    async def close(self) -> None:
        await self._clients.close()


def _pool(kind: Any, url: str, retry: Retry | AsyncRetry) -> Any:
    address = "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url
    try:
        return kind.from_url(
            address,
            max_connections=CONNECTIONS,
            timeout=PATIENCE,
            socket_timeout=PATIENCE,
            socket_connect_timeout=PATIENCE,
            retry=retry,
        )
    except ValueError as error:
        raise ConfigError(f"This is not the address of a Redis server: {error}") from error


def _unavailable(error: RedisError) -> StoreUnavailable:
    return StoreUnavailable(f"Redis did not answer: {error}")


BACKEND, CONNECTOR, ASYNC_CONNECTOR = RedisBackend, RedisConnector, AsyncRedisConnector
