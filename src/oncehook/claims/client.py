"""`Claims` and `AsyncClaims`: being first with a key, on the store that an address names.

A verb is a generator that yields an `Ask` (what to send, and how to read the reply) and is sent the answer, or yields a
`Wait`. `Claims` runs it blocking, `AsyncClaims` on an event loop, and a `Backend` words the asks for one kind of store:
the two clients differ in how they wait alone, the backends in the wording alone. `shared` gives the clients that `once`
and `DedupLock` use: one connector for each address in a process, however many keys it is asked about.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeAlias, TypeGuard, TypeVar

from oncehook import clock, human
from oncehook.claims.connection import AsyncConnector, Connector
from oncehook.errors import (
    AlreadyDone,
    ClaimLost,
    ConfigError,
    InProgress,
    KeyMissing,
    OncehookError,
    PayloadMismatch,
    ResultInvalid,
    StoreError,
    StoreUnavailable,
)

log = logging.getLogger("oncehook.claims")

T = TypeVar("T")
Status = Literal["new", "in_progress", "done"]
Step: TypeAlias = "Ask[Any] | Wait"
Steps = Generator[Step, Any, T]
"""A verb: yields what to ask, is sent what was answered, returns its own answer."""

MAX_RESULT: Final = 1 << 20
"""Bytes that a result may have: it is kept in memory by some backends, and sent whole with every later answer."""

MAX_KEY: Final = 200
"""Bytes of a key that is kept as it is."""

HASHED: Final = "sha256:"
SWEEP_CHANCE: Final = 1 / 16
SWEEP_ROWS: Final = 64
"""One new claim in sixteen removes up to this many lapsed ones: more go than come, and no claim pays for a thousand."""

DEGRADED: Final = "degraded-"
"""How the token of a claim begins that no store knows of: it was given because `fail_open` was chosen."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to `claim` and `look`."""

    status: Status
    """`new`: the work is yours. `in_progress`: somebody else's; try again later. `done`: it was done before."""
    token: str | None = None
    """Proves that it is yours: for `renew`, `commit` and `abort`. Only `new` has one."""
    result: bytes | None = None
    """What was committed with it."""
    retry_after: float | None = None
    """With `in_progress`: seconds until that claim lapses, unless it is renewed."""
    degraded: bool = False
    """`new` only because the store did not answer and `fail_open` was chosen: others may have got the same answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a backend knows of a key that has not lapsed."""

    done: bool
    token: str
    payload: str | None
    result: bytes | None
    left: float
    """Seconds until it lapses."""


@dataclass(frozen=True, slots=True)
class Ask(Generic[T]):
    """One question to a backend: what its driver is handed, and what the driver's reply means."""

    request: Any
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Wait:
    """Let some time pass before the next ask."""

    seconds: float


class Backend(Protocol):
    """How the verbs are worded for one kind of store. Spans are seconds by the store's own clock.

    Each ask is atomic. `renew`, `commit` and `abort` answer whether the claim stood and was this token's; if not,
    they have changed nothing.
    """

    def claim(self, key: str, token: str, payload: str | None, ttl: float) -> Ask[Row]:
        """Take the key if nobody has it, or if this very token does; then say who has it."""

    def renew(self, key: str, token: str, ttl: float) -> Ask[bool]:
        """Let it run for `ttl` from now."""

    def commit(self, key: str, token: str, result: bytes | None, keep: float) -> Ask[bool]:
        """Done. A second time with the same token changes nothing, and is fine: the first answer may have been lost."""

    def abort(self, key: str, token: str) -> Ask[bool]:
        """Give it back."""

    def look(self, key: str) -> Ask[Row | None]:
        """Who has it, if anybody."""

    def forget(self, key: str) -> Ask[bool]:
        """Remove whatever stands there, whoever has it."""

    def sweep(self) -> Ask[bool] | None:
        """Remove some of what has lapsed; None where the store does so by itself."""


# -- verbs -------------------------------------------------------------------------------------


class Verbs:
    """The verbs over one backend, with the words of the caller turned into those of the backend."""

    def __init__(self, backend: Backend, *, ttl: str | float, keep: str | float, fail_open: bool) -> None:
        self.backend = backend
        self.ttl = span(ttl, "ttl")
        self.keep = span(keep, "keep")
        self.fail_open = fail_open

    def claim(self, key: str, ttl: str | float | None, payload: bytes | str | None) -> Steps[Claim]:
        """Be first with a key, or learn who was."""
        token, stamp = new_token(), hashed(payload)
        ask = self.backend.claim(stored_key(key), token, stamp, self.ttl_of(ttl))
        try:
            row = yield ask
        except StoreUnavailable as error:
            return self._opened(key, error)
        if row.token == token:
            yield from self._sweep()
            return Claim("new", token)
        _compare(row.payload, stamp)
        return _answer(row)

    def renew(self, key: str, token: str | None, ttl: str | float | None) -> Steps[None]:
        """Hold it for another while."""
        if is_known(token):
            _ours((yield self.backend.renew(stored_key(key), token, self.ttl_of(ttl))))

    def commit(self, key: str, token: str | None, result: bytes | None, keep: str | float | None) -> Steps[None]:
        """It is done, with this result."""
        if result is not None and len(result) > MAX_RESULT:
            raise ResultInvalid(
                f"A result of {len(result):,} bytes is too large; {MAX_RESULT:,} can be kept.",
                hint="Keep the result elsewhere, and commit where it is.",
            )
        kept = self.keep if keep is None else span(keep, "keep")
        if is_known(token):
            _ours((yield self.backend.commit(stored_key(key), token, result, kept)))

    def abort(self, key: str, token: str | None) -> Steps[None]:
        """It was not done; the next one may try."""
        if is_known(token):
            _ours((yield self.backend.abort(stored_key(key), token)))

    def look(self, key: str) -> Steps[Claim | None]:
        """How it stands, without touching it."""
        row = yield self.backend.look(stored_key(key))
        return None if row is None else _answer(row)

    def forget(self, key: str) -> Steps[bool]:
        """Remove whatever stands there."""
        removed: bool = yield self.backend.forget(stored_key(key))
        return removed

    def ttl_of(self, ttl: str | float | None) -> float:
        """The seconds of a claim, as the caller or else the settings say."""
        return self.ttl if ttl is None else span(ttl, "ttl")

    def _opened(self, key: str, error: StoreUnavailable) -> Claim:
        if not self.fail_open:
            raise error
        log.warning("claim.degraded", extra={"fields": {"key": key, "error": str(error)}})
        return Claim("new", DEGRADED + new_token(), degraded=True)

    def _sweep(self) -> Steps[None]:
        ask = self.backend.sweep() if clock.chance.random() < SWEEP_CHANCE else None
        if ask is None:
            return
        try:
            yield ask
        except StoreUnavailable as error:  # the claim stands; what has lapsed can wait for the next one
            log.debug("claims.sweep_failed", extra={"fields": {"error": str(error)}})


def _answer(row: Row) -> Claim:
    return Claim("done", result=row.result) if row.done else Claim("in_progress", retry_after=row.left)


def _ours(stood: bool) -> None:
    if not stood:
        raise ClaimLost


def _compare(kept: str | None, given: str | None) -> None:
    if kept is not None and given is not None and kept != given:
        raise PayloadMismatch


# -- keys, payloads, tokens, spans -------------------------------------------------------------


def stored_key(key: str) -> str:
    """The key as it is kept: as it is if every backend can hold that, else its hash.

    A key that looks like a hash is hashed too, so that no two keys are ever kept alike.
    """
    if not isinstance(key, str) or not key:
        raise KeyMissing(f"A key is text that is not empty, not {key!r}.")
    coded = key.encode("utf-8", "surrogatepass")
    if len(coded) <= MAX_KEY and not key.startswith(HASHED) and key.isprintable():
        return key
    return HASHED + sha256(coded).hexdigest()


def hashed(payload: bytes | str | None) -> str | None:
    """What is kept of a payload: enough to tell it from another."""
    if payload is None:
        return None
    coded = payload.encode("utf-8", "surrogatepass") if isinstance(payload, str) else payload
    return sha256(coded).hexdigest()


def new_token() -> str:
    """An owner's token: 32 characters that nobody can guess."""
    return clock.random_bytes(16).hex()


def is_known(token: str | None) -> TypeGuard[str]:
    """Whether a store may know this token; of a degraded claim there is nothing to renew, commit or abort.

    Raises ClaimLost for None, the token of an answer that was not `new`.
    """
    if token is None:
        raise ClaimLost("Only a new claim has a token; this one is somebody else's.")
    return not token.startswith(DEGRADED)


def checked_namespace(namespace: str) -> str:
    """A namespace that no key can be mistaken for a part of."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"{namespace!r} cannot be a namespace.",
            hint="Write up to 64 letters, digits, dots, dashes and underscores.",
        )
    return namespace


def span(duration: str | float, name: str) -> float:
    """A duration in seconds that is long enough to be measured by every backend."""
    value = human.seconds(duration)
    if value < 0.001:
        raise ConfigError(f"{name} = {duration!r} would be over at once.")
    return value


BEATS: Final = 3
"""Renewals in one ttl: two may fail before it lapses."""

WAITS: Final = (0.2, 1.0, None)
"""Seconds between tries to commit work that is done: a restart of the store need not have it done again."""


class Held:
    """A claim that is being worked on. Set `result` to keep something for those who ask later."""

    def __init__(self, key: str, claim: Claim, ttl: float, asked_at: float) -> None:
        if claim.token is None:
            raise AssertionError("only a new claim can be held")
        self.key = key
        self.token = claim.token
        self.degraded = claim.degraded
        self.result: bytes | None = None
        self.ttl = ttl
        self.renewed_at = asked_at
        """When the last renewal was asked for, by the steady clock: from then on it is surely ours for `ttl`."""
        self._lost = False

    @property
    def lost(self) -> bool:
        """It lapsed, or may have: somebody else may be working on it. Look here before what cannot be undone."""
        return not self.degraded and (self._lost or clock.steady() >= self.renewed_at + self.ttl)

    def not_renewed(self, error: OncehookError) -> None:
        """A renewal failed: it still holds until it lapses, unless it is somebody else's already."""
        self._lost = self._lost or isinstance(error, ClaimLost)
        log.warning("claim.not_renewed", extra=_told(self, error))

    @property
    def needs_beats(self) -> bool:
        """Whether there is still something to renew."""
        return not self.degraded and not self._lost


def begun(key: str, claim: Claim, ttl: float, asked_at: float) -> Held:
    """A new claim as one that is worked on; raises what any other answer means to somebody who wanted to work."""
    if claim.status == "in_progress":
        raise InProgress(retry_after=claim.retry_after)
    if claim.status == "done":
        raise AlreadyDone(result=claim.result)
    return Held(key, claim, ttl, asked_at)


# -- while it goes on, and at its end ----------------------------------------------------------


def renewed(verbs: Verbs, held: Held) -> Steps[None]:
    """Hold it for another ttl; a failure is written down, and never the work's own."""
    asked_at = clock.steady()
    try:
        yield from verbs.renew(held.key, held.token, held.ttl)
    except OncehookError as error:
        held.not_renewed(error)
    else:
        held.renewed_at = asked_at


def given_back(verbs: Verbs, held: Held) -> Steps[None]:
    """The work has failed: abort. Its own error matters more than ours; the claim lapses by itself, or has lapsed."""
    try:
        yield from verbs.abort(held.key, held.token)
    except OncehookError as error:
        log.warning("claim.not_aborted", extra=_told(held, error))


def finished(verbs: Verbs, held: Held, keep: str | float | None) -> Steps[None]:
    """The work is done: commit, and without its result where that cannot be kept, before anything is raised."""
    try:
        yield from _committed(verbs, held, keep)
    except ResultInvalid:
        held.result = None
        yield from _committed(verbs, held, keep)
        raise


def _committed(verbs: Verbs, held: Held, keep: str | float | None) -> Steps[None]:
    for wait in WAITS:
        try:
            yield from verbs.commit(held.key, held.token, held.result, keep)
            return
        except StoreUnavailable as error:
            if wait is None or held.lost:
                # The work is done, and only the store does not know: with `fail_open` that is a warning.
                if not verbs.fail_open:
                    raise
                log.warning("claim.not_committed", extra=_told(held, error))
                return
        yield Wait(wait)


def _told(held: Held, error: OncehookError) -> dict[str, object]:
    return {"fields": {"key": held.key, "code": error.code, "error": str(error)}}


@contextlib.contextmanager
def renewing(held: Held, renew: Callable[[], None]) -> Iterator[None]:
    """Renew by a thread until the block ends: a function that blocks its own thread delays nothing."""
    stop = threading.Event()

    def beat() -> None:
        while held.needs_beats and not stop.wait(held.ttl / BEATS):
            renew()

    thread = threading.Thread(target=beat, name="oncehook-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.asynccontextmanager
async def renewing_async(held: Held, renew: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Renew by a task until the block ends: a coroutine that blocks the event loop for `ttl` loses its claim."""
    stop = asyncio.Event()

    async def beat() -> None:
        while held.needs_beats:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(held.ttl / BEATS):
                    await stop.wait()
            if stop.is_set():
                return
            await renew()

    task = asyncio.create_task(beat(), name="oncehook-claim")
    try:
        yield
    finally:
        stop.set()
        await task


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
        connector: Connector | None = None,
    ) -> None:
        super().__init__(store_url, namespace, ttl, keep, fail_open)
        self._connector: Connector = connector or self._module.Connector(store_url)
        self._owned = connector is None

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
            self._connector.close()

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
        return step.read(self._connector.ask(step.request))


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
        connector: AsyncConnector | None = None,
    ) -> None:
        super().__init__(store_url, namespace, ttl, keep, fail_open)
        self._connector: AsyncConnector = connector or self._module.AsyncConnector(store_url)
        self._owned = connector is None

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
            await self._connector.close()

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
        return step.read(await self._connector.ask(step.request))


# -- shared lines ------------------------------------------------------------------------------

_connectors: Final[dict[str, Connector]] = {}
_async_connectors: Final[dict[str, AsyncConnector]] = {}
_opening: Final = threading.Lock()


def shared(store: str | None, **settings: Any) -> Claims:
    """Return claims on the connector that all users of an address share."""
    url = named_store(store)
    place, module = _place(url), module_of(url)
    with _opening:
        connector = _connectors.get(place) or _connectors.setdefault(place, module.Connector(url))
    return Claims(url, connector=connector, **settings)


def shared_async(store: str | None, **settings: Any) -> AsyncClaims:
    """The same for event loops."""
    url = named_store(store)
    place, module = _place(url), module_of(url)
    with _opening:
        connector = _async_connectors.get(place) or _async_connectors.setdefault(place, module.AsyncConnector(url))
    return AsyncClaims(url, connector=connector, **settings)


def _place(url: str) -> str:
    """What an address means here: that of a file may be relative."""
    return f"{url} in {Path.cwd()}" if url.startswith("sqlite:") else url


@atexit.register
def _close_shared() -> None:
    for connector in _connectors.values():
        connector.close()
