"""`Claims` and `AsyncClaims`: the steps of `base` and `holding`, run over a line to the backend that an address names.

The two differ in how they wait. `shared` gives the ones that `once` and `DedupLock` use: one line for each address in
a process, however many keys it is asked about.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, Self, TypeVar

from oncehook import clock
from oncehook.claims.base import Claim, Step, Steps, Verbs, Wait, checked_namespace
from oncehook.claims.holding import Held, begun, finished, given_back, renewed, renewing, renewing_async
from oncehook.claims.lines import AsyncLine, Line
from oncehook.errors import ConfigError, StoreError

T = TypeVar("T")

ENVIRONMENT: Final = "ONCEHOOK_CLAIMS"
"""The variable that names the store where the caller does not."""

_SAYS_WHERE: Final = ("ONCEHOOK_CONFIG", "ONCEHOOK_STORE")
"""Variables that lead to the inbox's own store."""

NAMESPACE: Final = "oncehook"
TTL: Final = "30s"
KEEP: Final = "24h"

_MODULES: Final = {
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
    "valkey": "redis",
    "valkeys": "redis",
    "postgresql": "postgres",
    "postgres": "postgres",
    "sqlite": "sqlite",
}


def module_of(url: str) -> ModuleType:
    """The backend's module that an address names; raises ConfigError when there is none, or its driver is missing."""
    scheme = url.partition(":")[0]
    if scheme not in _MODULES:
        raise ConfigError(
            f"{scheme!r} is not a store for claims.",
            hint="Write redis://host/0, postgresql://host/database or sqlite:./claims.db.",
        )
    name = _MODULES[scheme]
    try:
        return importlib.import_module(f"oncehook.claims.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("redis", "psycopg"):
            raise
        raise ConfigError(f"Claims on {scheme} need a driver.", hint=f"pip install 'oncehook[{name}]'") from error


def named_store(store: str | None) -> str:
    """The address that was given, or the environment's, or the one beside the inbox that the settings describe."""
    return store or os.environ.get(ENVIRONMENT) or _beside_the_inbox(Path.cwd(), *map(os.environ.get, _SAYS_WHERE))


@functools.cache
def _beside_the_inbox(folder: Path, config_file: str | None, inbox_store: str | None) -> str:
    """PostgreSQL: in the same database. SQLite: a file of its own, since the inbox's has one writer (DESIGN.md 8.7).

    The settings are read once for all calls that find the same ones.
    """
    from oncehook.settings import load

    settings = load(Path(config_file) if config_file else None, cwd=folder, secrets=False, whole=False)
    scheme, _, rest = settings.config.store.partition(":")
    if scheme != "sqlite":
        return settings.config.store
    file = Path(rest.removeprefix("//"))
    return f"sqlite:{file.with_name(f'{file.stem}-claims.db')}"


class _Face:
    """What both faces are made of."""

    def __init__(self, store_url: str, namespace: str, ttl: str | float, keep: str | float, fail_open: bool) -> None:
        self._module = module_of(store_url)
        backend = self._module.Backend(checked_namespace(namespace))
        self._verbs = Verbs(backend, ttl=ttl, keep=keep, fail_open=fail_open)


class Claims(_Face):
    """Being first with a key. Threads may share one; a forked child may go on with it.

    >>> claims = Claims("redis://localhost/0")
    >>> claim = claims.claim("refund:42")
    >>> if claim.status == "new":
    ...     claims.commit("refund:42", claim.token, result=b"refunded")

    `ttl`: how long a claim holds without being renewed, so how soon a crashed owner's key is free again. `keep`: how
    long a commit is remembered. `fail_open`: when the store does not answer, `claim` says `new` (and `degraded`)
    instead of raising StoreUnavailable: rather twice than not at all.
    """

    def __init__(
        self,
        store_url: str,
        *,
        namespace: str = NAMESPACE,
        ttl: str | float = TTL,
        keep: str | float = KEEP,
        fail_open: bool = False,
        line: Line | None = None,
    ) -> None:
        super().__init__(store_url, namespace, ttl, keep, fail_open)
        self._line: Line = line or self._module.Line(store_url)
        self._owned = line is None

    def claim(self, key: str, ttl: str | float | None = None, payload: bytes | str | None = None) -> Claim:
        """Be first with a key, or learn how it stands. Of any number that ask at once exactly one is told `new`.

        With `payload`, raises PayloadMismatch when the key was claimed with another one.
        """
        return self._run(self._verbs.claim(key, ttl, payload))

    def renew(self, key: str, token: str | None, ttl: str | float | None = None) -> None:
        """Hold the claim for another `ttl` from now. Raises ClaimLost when it is no longer this token's."""
        self._run(self._verbs.renew(key, token, ttl))

    def commit(self, key: str, token: str | None, result: bytes | None = None, keep: str | float | None = None) -> None:
        """The work is done: from now on `claim` answers `done` with this result, for `keep`.

        Raises ClaimLost, and changes nothing, when the claim has lapsed or is somebody else's.
        """
        self._run(self._verbs.commit(key, token, result, keep))

    def abort(self, key: str, token: str | None) -> None:
        """The work was not done: the next one to claim is told `new`. Raises ClaimLost when it is not this token's."""
        self._run(self._verbs.abort(key, token))

    def look(self, key: str) -> Claim | None:
        """How a key stands (`in_progress` or `done`, never a token); None when nobody has it."""
        return self._run(self._verbs.look(key))

    def forget(self, key: str) -> bool:
        """Remove whatever stands under a key, whoever has it; says whether there was something. For operators."""
        return self._run(self._verbs.forget(key))

    @contextlib.contextmanager
    def hold(
        self,
        key: str,
        *,
        ttl: str | float | None = None,
        keep: str | float | None = None,
        payload: bytes | str | None = None,
    ) -> Iterator[Held]:
        """Claim, renew while the block runs, then commit; abort when it raises.

        Raises InProgress or AlreadyDone before the block, ClaimLost after it when the claim did not hold that long.
        """
        asked_at = clock.steady()
        held = begun(key, self.claim(key, ttl, payload), self._verbs.ttl_of(ttl), asked_at)
        with self.work(held, keep=keep):
            yield held

    @contextlib.contextmanager
    def work(self, held: Held, *, keep: str | float | None = None) -> Iterator[None]:
        """The block of `hold`, for a claim that was made before."""
        try:
            with renewing(held, lambda: self._run(renewed(self._verbs, held))):
                yield
        except BaseException:
            self._run(given_back(self._verbs, held))
            raise
        self._run(finished(self._verbs, held, keep))

    def close(self) -> None:
        """Let go of all connections."""
        if self._owned:
            self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._take(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value

    def _take(self, step: Step) -> Any:
        if isinstance(step, Wait):
            return threading.Event().wait(step.seconds)
        return step.read(self._line.ask(step.request))


class AsyncClaims(_Face):
    """The same on an event loop. Tasks, and event loops, may share one."""

    def __init__(
        self,
        store_url: str,
        *,
        namespace: str = NAMESPACE,
        ttl: str | float = TTL,
        keep: str | float = KEEP,
        fail_open: bool = False,
        line: AsyncLine | None = None,
    ) -> None:
        super().__init__(store_url, namespace, ttl, keep, fail_open)
        self._line: AsyncLine = line or self._module.AsyncLine(store_url)
        self._owned = line is None

    async def claim(self, key: str, ttl: str | float | None = None, payload: bytes | str | None = None) -> Claim:
        """Be first with a key, or learn how it stands; as `Claims.claim`."""
        return await self._run(self._verbs.claim(key, ttl, payload))

    async def renew(self, key: str, token: str | None, ttl: str | float | None = None) -> None:
        """Hold the claim for another `ttl` from now; as `Claims.renew`."""
        await self._run(self._verbs.renew(key, token, ttl))

    async def commit(
        self, key: str, token: str | None, result: bytes | None = None, keep: str | float | None = None
    ) -> None:
        """The work is done; as `Claims.commit`."""
        await self._run(self._verbs.commit(key, token, result, keep))

    async def abort(self, key: str, token: str | None) -> None:
        """The work was not done; as `Claims.abort`."""
        await self._run(self._verbs.abort(key, token))

    async def look(self, key: str) -> Claim | None:
        """How a key stands; as `Claims.look`."""
        return await self._run(self._verbs.look(key))

    async def forget(self, key: str) -> bool:
        """Remove whatever stands under a key; as `Claims.forget`."""
        return await self._run(self._verbs.forget(key))

    @contextlib.asynccontextmanager
    async def hold(
        self,
        key: str,
        *,
        ttl: str | float | None = None,
        keep: str | float | None = None,
        payload: bytes | str | None = None,
    ) -> AsyncIterator[Held]:
        """Claim, renew while the block runs, then commit, or abort; as `Claims.hold`."""
        asked_at = clock.steady()
        held = begun(key, await self.claim(key, ttl, payload), self._verbs.ttl_of(ttl), asked_at)
        async with self.work(held, keep=keep):
            yield held

    @contextlib.asynccontextmanager
    async def work(self, held: Held, *, keep: str | float | None = None) -> AsyncIterator[None]:
        """The block of `hold`, for a claim that was made before."""
        try:
            async with renewing_async(held, lambda: self._run(renewed(self._verbs, held))):
                yield
        except BaseException:
            await self._run(given_back(self._verbs, held))
            raise
        await self._run(finished(self._verbs, held, keep))

    async def close(self) -> None:
        """Let go of all connections of this event loop."""
        if self._owned:
            await self._line.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._take(step)
                except StoreError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value

    async def _take(self, step: Step) -> Any:
        if isinstance(step, Wait):
            return await asyncio.sleep(step.seconds)
        return step.read(await self._line.ask(step.request))


# -- shared lines ------------------------------------------------------------------------------

_lines: Final[dict[str, Line]] = {}
_async_lines: Final[dict[str, AsyncLine]] = {}
_opening: Final = threading.Lock()


def shared(store: str | None, **settings: Any) -> Claims:
    """Claims on the line that all users of an address share."""
    url = named_store(store)
    place, module = _place(url), module_of(url)
    with _opening:
        line = _lines.get(place) or _lines.setdefault(place, module.Line(url))
    return Claims(url, line=line, **settings)


def shared_async(store: str | None, **settings: Any) -> AsyncClaims:
    """The same for event loops."""
    url = named_store(store)
    place, module = _place(url), module_of(url)
    with _opening:
        line = _async_lines.get(place) or _async_lines.setdefault(place, module.AsyncLine(url))
    return AsyncClaims(url, line=line, **settings)


def _place(url: str) -> str:
    """What an address means here: that of a file may be relative."""
    return f"{url} in {Path.cwd()}" if url.startswith("sqlite:") else url


@atexit.register
def _close_shared() -> None:
    for line in _lines.values():
        line.close()
