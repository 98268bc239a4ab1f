"""`Claims` and `AsyncClaims`: claim a key exactly once, on the store that an address names.

A verb is a generator that yields an `Ask` (a request, and how to read the reply) and is sent the answer, or yields a
`Pause`. `Claims` runs it blocking, `AsyncClaims` on an event loop, and a `Backend` builds the asks for one kind of
store: the two clients differ only in how they wait, the backends only in their requests. `get_shared` returns the
clients that `once` and `DedupLock` use: one connector for each address in a process.
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
from types import ModuleType
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeAlias, TypeGuard, TypeVar

from oncehook import clock, human
from oncehook.claims.connection import AsyncConnector, Connector
from oncehook.errors import (
    AlreadyDone,
    ClaimLost,
    ConfigError,
    ExtraMissing,
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
Step: TypeAlias = "Ask[Any] | Pause"
Steps = Generator[Step, Any, T]
"""A verb: yields asks, is sent their answers, returns its own."""

MAX_RESULT: Final = 1 << 20
"""Largest result in bytes: some backends keep it in memory, and every later answer contains it."""

MAX_KEY: Final = 200
"""Longest key in bytes that is stored as it is."""

HASHED: Final = "sha256:"
SWEEP_CHANCE: Final = 1 / 16
SWEEP_ROWS: Final = 64
"""Lapsed claims that one new claim in sixteen removes at most: more than are added, without a long delay."""

DEGRADED: Final = "degraded-"
"""Prefix of the token of a claim made by `fail_open`, which no store knows."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to `claim` and `look`."""

    status: Status
    """`new`: the work is yours. `in_progress`: another's; try again later. `done`: it was done before."""
    token: str | None = None
    """The owner's proof for `renew`, `commit` and `abort`. Only `new` has one."""
    result: bytes | None = None
    """The committed result."""
    retry_after: float | None = None
    """Seconds until a claim in progress lapses, unless it is renewed."""
    degraded: bool = False
    """Whether it is `new` only because of `fail_open`: the store did not answer, and others may have got the same."""


@dataclass(frozen=True, slots=True)
class Row:
    """The stored state of a key that has not lapsed."""

    done: bool
    token: str
    payload: str | None
    result: bytes | None
    left: float
    """Seconds until it lapses."""


@dataclass(frozen=True, slots=True)
class Ask(Generic[T]):
    """A request for a backend's driver, and how to read its reply."""

    request: Any
    read: Callable[[Any], T]


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause before the next ask."""

    seconds: float


class Backend(Protocol):
    """The requests of one kind of store. Spans are seconds by the store's own clock.

    Each ask is atomic. `renew`, `commit` and `abort` answer whether the claim was held by this token; if not, they
    have changed nothing.
    """

    def claim(self, key: str, token: str, payload: str | None, ttl: float) -> Ask[Row]:
        """Take the key if it is free or held by this token; answer its state."""

    def renew(self, key: str, token: str, ttl: float) -> Ask[bool]:
        """Extend it to `ttl` from now."""

    def commit(self, key: str, token: str, result: bytes | None, keep: float) -> Ask[bool]:
        """Finish it. With the same token again it changes nothing: the first answer may have been lost."""

    def abort(self, key: str, token: str) -> Ask[bool]:
        """Release the key."""

    def look(self, key: str) -> Ask[Row | None]:
        """Read its state, if it is taken."""

    def forget(self, key: str) -> Ask[bool]:
        """Remove it, whoever holds it."""

    def sweep(self) -> Ask[bool] | None:
        """Remove some lapsed claims of any namespace; None where the store does so by itself."""


# -- verbs -------------------------------------------------------------------------------------


class Verbs:
    """The verbs of `Claims` as steps over one backend."""

    def __init__(self, backend: Backend, *, ttl: str | float, keep: str | float, fail_open: bool) -> None:
        self.backend = backend
        self.ttl = span(ttl, "ttl")
        self.keep = span(keep, "keep")
        self.fail_open = fail_open

    def claim(self, key: str, ttl: str | float | None, payload: bytes | str | None) -> Steps[Claim]:
        token, stamp = new_token(), hash_payload(payload)
        ask = self.backend.claim(stored_key(key), token, stamp, self.ttl_of(ttl))
        try:
            row = yield ask
        except StoreUnavailable as error:
            return self._fail_open(key, error)
        if row.token == token:
            yield from self._sweep()
            return Claim("new", token)
        if row.payload is not None and stamp is not None and row.payload != stamp:
            raise PayloadMismatch
        return _answer(row)

    def renew(self, key: str, token: str | None, ttl: str | float | None) -> Steps[None]:
        if is_known(token):
            _require_owner((yield self.backend.renew(stored_key(key), token, self.ttl_of(ttl))))

    def commit(self, key: str, token: str | None, result: bytes | None, keep: str | float | None) -> Steps[None]:
        if result is not None and len(result) > MAX_RESULT:
            raise ResultInvalid(
                f"A result of {len(result):,} bytes is too large; {MAX_RESULT:,} can be kept.",
                hint="Keep the result elsewhere, and commit where it is.",
            )
        kept = self.keep if keep is None else span(keep, "keep")
        if is_known(token):
            _require_owner((yield self.backend.commit(stored_key(key), token, result, kept)))

    def abort(self, key: str, token: str | None) -> Steps[None]:
        if is_known(token):
            _require_owner((yield self.backend.abort(stored_key(key), token)))

    def look(self, key: str) -> Steps[Claim | None]:
        row = yield self.backend.look(stored_key(key))
        return None if row is None else _answer(row)

    def forget(self, key: str) -> Steps[bool]:
        removed: bool = yield self.backend.forget(stored_key(key))
        return removed

    def ttl_of(self, ttl: str | float | None) -> float:
        return self.ttl if ttl is None else span(ttl, "ttl")

    def _fail_open(self, key: str, error: StoreUnavailable) -> Claim:
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
        except StoreUnavailable as error:  # the claim is held; a later one removes lapsed claims
            log.debug("claims.sweep_failed", extra={"fields": {"error": str(error)}})


def _answer(row: Row) -> Claim:
    return Claim("done", result=row.result) if row.done else Claim("in_progress", retry_after=row.left)


def _require_owner(is_owner: bool) -> None:
    if not is_owner:
        raise ClaimLost


# -- keys, payloads, tokens, spans -------------------------------------------------------------


def stored_key(key: str) -> str:
    """Return the key itself if every backend can store it, otherwise its hash.

    A key that looks like a hash is hashed too, so that two keys are never stored alike.
    """
    if not isinstance(key, str) or not key:
        raise KeyMissing(f"A key is text that is not empty, not {key!r}.")
    coded = key.encode("utf-8", "surrogatepass")
    if len(coded) <= MAX_KEY and not key.startswith(HASHED) and key.isprintable():
        return key
    return HASHED + sha256(coded).hexdigest()


def hash_payload(payload: bytes | str | None) -> str | None:
    if payload is None:
        return None
    coded = payload.encode("utf-8", "surrogatepass") if isinstance(payload, str) else payload
    return sha256(coded).hexdigest()


def new_token() -> str:
    """Return an owner's token: 32 characters that cannot be guessed."""
    return clock.random_bytes(16).hex()


def is_known(token: str | None) -> TypeGuard[str]:
    """Return whether a store may know this token: a degraded claim has one that no store knows, and cannot be renewed,
    committed or aborted.

    Raises ClaimLost for None, the token of an answer that was not `new`.
    """
    if token is None:
        raise ClaimLost("Only a new claim has a token; this one is somebody else's.")
    return not token.startswith(DEGRADED)


def check_namespace(namespace: str) -> str:
    """Refuse a namespace that could be mistaken for a part of a key."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"{namespace!r} cannot be a namespace.",
            hint="Write up to 64 letters, digits, dots, dashes and underscores.",
        )
    return namespace


def span(duration: str | float, name: str) -> float:
    value = human.seconds(duration)
    if value < 0.001:
        raise ConfigError(f"{name} = {duration!r} would be over at once.")
    return value


BEATS: Final = 3
"""Renewals in one ttl: two may fail before the claim lapses."""

WAITS: Final = (0.2, 1.0, None)
"""Seconds between tries to commit finished work, so that a restart of the store does not repeat it."""


class Held:
    """A claim during its work. Set `result` to store it for later callers."""

    def __init__(self, key: str, claim: Claim, ttl: float, asked_at: float) -> None:
        if claim.token is None:
            raise AssertionError("only a new claim can be held")
        self.key = key
        self.token = claim.token
        self.degraded = claim.degraded
        self.result: bytes | None = None
        self.ttl = ttl
        self.renewed_at = asked_at
        """The steady clock at the last renewal's request: the claim is surely ours for `ttl` from then."""
        self._lost = False

    @property
    def lost(self) -> bool:
        """Return whether the claim may have lapsed, so that another may work on the key. Check before irreversible
        steps."""
        return not self.degraded and (self._lost or clock.steady() >= self.renewed_at + self.ttl)

    def note_failed_renewal(self, error: OncehookError) -> None:
        """Log a failed renewal: the claim holds until its ttl ends, unless another has it already."""
        self._lost = self._lost or isinstance(error, ClaimLost)
        log.warning("claim.not_renewed", extra=_log_fields(self, error))

    @property
    def needs_beats(self) -> bool:
        return not self.degraded and not self._lost


def begin_work(key: str, claim: Claim, ttl: float, asked_at: float) -> Held:
    if claim.status == "in_progress":
        raise InProgress(retry_after=claim.retry_after)
    if claim.status == "done":
        raise AlreadyDone(result=claim.result)
    return Held(key, claim, ttl, asked_at)


# -- while it goes on, and at its end ----------------------------------------------------------


def renew(verbs: Verbs, held: Held) -> Steps[None]:
    """Hold it for another ttl; a failure is logged, and does not fail the work."""
    asked_at = clock.steady()
    try:
        yield from verbs.renew(held.key, held.token, held.ttl)
    except OncehookError as error:
        held.note_failed_renewal(error)
    else:
        held.renewed_at = asked_at


def give_back(verbs: Verbs, held: Held) -> Steps[None]:
    """Abort after failed work; only log it if that fails, so that the work's own error is raised."""
    try:
        yield from verbs.abort(held.key, held.token)
    except OncehookError as error:
        log.warning("claim.not_aborted", extra=_log_fields(held, error))


def finish(verbs: Verbs, held: Held, keep: str | float | None) -> Steps[None]:
    """Commit finished work. Where its result cannot be stored, commit without it and raise ResultInvalid."""
    try:
        yield from _commit(verbs, held, keep)
    except ResultInvalid:
        held.result = None
        yield from _commit(verbs, held, keep)
        raise


def _commit(verbs: Verbs, held: Held, keep: str | float | None) -> Steps[None]:
    for wait in WAITS:
        try:
            yield from verbs.commit(held.key, held.token, held.result, keep)
            return
        except StoreUnavailable as error:
            if wait is None or held.lost:
                # The work is done, and only the store does not know: with `fail_open` that is a warning.
                if not verbs.fail_open:
                    raise
                log.warning("claim.not_committed", extra=_log_fields(held, error))
                return
        yield Pause(wait)


def _log_fields(held: Held, error: OncehookError) -> dict[str, object]:
    return {"fields": {"key": held.key, "code": error.code, "error": str(error)}}


@contextlib.contextmanager
def renew_on_thread(held: Held, renew: Callable[[], None]) -> Iterator[None]:
    """Renew on a thread until the block ends, so that a function that blocks its own thread keeps the claim."""
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
async def renew_on_task(held: Held, renew: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Renew on a task until the block ends: a coroutine that blocks the event loop for `ttl` loses its claim."""
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
"""The variable with the store's address, where the caller gives none."""

_INBOX_VARIABLES: Final = ("ONCEHOOK_CONFIG", "ONCEHOOK_STORE")
"""Variables that determine the inbox's own store."""

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
        raise ExtraMissing(f"A claims store on {scheme}", name) from error


def resolve_store(store: str | None) -> str:
    """Return the given address, or the environment's, or the one beside the inbox of the settings."""
    return store or os.environ.get(ENVIRONMENT) or _beside_the_inbox(Path.cwd(), *map(os.environ.get, _INBOX_VARIABLES))


@functools.cache
def _beside_the_inbox(folder: Path, config_file: str | None, inbox_store: str | None) -> str:
    """Return the inbox's PostgreSQL database, or a SQLite file of our own beside the inbox's, which allows one writer
    only.

    Cached, so that the settings are read once.
    """
    from oncehook.settings import load

    settings = load(Path(config_file) if config_file else None, cwd=folder, secrets=False, whole=False)
    scheme, _, rest = settings.config.store.partition(":")
    if scheme != "sqlite":
        return settings.config.store
    file = Path(rest.removeprefix("//"))
    return f"sqlite:{file.with_name(f'{file.stem}-claims.db')}"


class _BaseClaims:
    """The settings of both clients."""

    def __init__(self, store_url: str, namespace: str, ttl: str | float, keep: str | float, fail_open: bool) -> None:
        self._module = module_of(store_url)
        backend = self._module.BACKEND(check_namespace(namespace))
        self._verbs = Verbs(backend, ttl=ttl, keep=keep, fail_open=fail_open)


class Claims(_BaseClaims):
    """A client that claims keys. Threads may share one; a forked child may go on with it.

    >>> claims = Claims("redis://localhost/0")
    >>> claim = claims.claim("refund:42")
    >>> if claim.status == "new":
    ...     claims.commit("refund:42", claim.token, result=b"refunded")

    `ttl`: how long a claim holds without being renewed, so how soon a crashed owner's key is free again. `keep`: how
    long a commit is remembered. `fail_open`: when the store does not answer, `claim` answers `new` (and `degraded`)
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
        self._connector: Connector = connector or self._module.CONNECTOR(store_url)
        self._owned = connector is None

    def claim(self, key: str, ttl: str | float | None = None, payload: bytes | str | None = None) -> Claim:
        """Claim a key, or learn its state. Of any number of callers at once exactly one gets `new`.

        With `payload`, raises PayloadMismatch when the key was claimed with another one.
        """
        return self._run(self._verbs.claim(key, ttl, payload))

    def renew(self, key: str, token: str | None, ttl: str | float | None = None) -> None:
        """Hold the claim for another `ttl` from now. Raises ClaimLost when it is no longer this token's."""
        self._run(self._verbs.renew(key, token, ttl))

    def commit(self, key: str, token: str | None, result: bytes | None = None, keep: str | float | None = None) -> None:
        """Finish the work: from now on `claim` answers `done` with this result, for `keep`.

        Raises ClaimLost, and changes nothing, when the claim has lapsed or is another's.
        """
        self._run(self._verbs.commit(key, token, result, keep))

    def abort(self, key: str, token: str | None) -> None:
        """Give up the work: the next caller gets `new`. Raises ClaimLost when the claim is not this token's."""
        self._run(self._verbs.abort(key, token))

    def look(self, key: str) -> Claim | None:
        """Read the state of a key (`in_progress` or `done`, never a token); None when it is free."""
        return self._run(self._verbs.look(key))

    def forget(self, key: str) -> bool:
        """Remove a key, whoever holds it; return whether it was there. For operators."""
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
        held = begin_work(key, self.claim(key, ttl, payload), self._verbs.ttl_of(ttl), asked_at)
        with self.work(held, keep=keep):
            yield held

    @contextlib.contextmanager
    def work(self, held: Held, *, keep: str | float | None = None) -> Iterator[None]:
        """Run the block of `hold` for a claim that was made before."""
        try:
            with renew_on_thread(held, lambda: self._run(renew(self._verbs, held))):
                yield
        except BaseException:
            self._run(give_back(self._verbs, held))
            raise
        self._run(finish(self._verbs, held, keep))

    def close(self) -> None:
        """Close all connections."""
        if self._owned:
            self._connector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        proceed: Callable[[Any], Step] = steps.send
        value: Any = None
        while True:
            try:
                step = proceed(value)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                proceed, value = steps.send, self._take(step)
            except StoreError as error:
                proceed, value = steps.throw, error

    def _take(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return threading.Event().wait(step.seconds)
        return step.read(self._connector.ask(step.request))


class AsyncClaims(_BaseClaims):
    """A client like `Claims` for event loops. Tasks and event loops may share one."""

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
        self._connector: AsyncConnector = connector or self._module.ASYNC_CONNECTOR(store_url)
        self._owned = connector is None

    async def claim(self, key: str, ttl: str | float | None = None, payload: bytes | str | None = None) -> Claim:
        """Claim a key, or learn its state; as `Claims.claim`."""
        return await self._run(self._verbs.claim(key, ttl, payload))

    async def renew(self, key: str, token: str | None, ttl: str | float | None = None) -> None:
        """Hold the claim for another `ttl` from now; as `Claims.renew`."""
        await self._run(self._verbs.renew(key, token, ttl))

    async def commit(
        self, key: str, token: str | None, result: bytes | None = None, keep: str | float | None = None
    ) -> None:
        """Finish the work; as `Claims.commit`."""
        await self._run(self._verbs.commit(key, token, result, keep))

    async def abort(self, key: str, token: str | None) -> None:
        """Give up the work; as `Claims.abort`."""
        await self._run(self._verbs.abort(key, token))

    async def look(self, key: str) -> Claim | None:
        """Read the state of a key; as `Claims.look`."""
        return await self._run(self._verbs.look(key))

    async def forget(self, key: str) -> bool:
        """Remove a key; as `Claims.forget`."""
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
        held = begin_work(key, await self.claim(key, ttl, payload), self._verbs.ttl_of(ttl), asked_at)
        async with self.work(held, keep=keep):
            yield held

    @contextlib.asynccontextmanager
    async def work(self, held: Held, *, keep: str | float | None = None) -> AsyncIterator[None]:
        """Run the block of `hold` for a claim that was made before."""
        try:
            async with renew_on_task(held, lambda: self._run(renew(self._verbs, held))):
                yield
        except BaseException:
            await self._run(give_back(self._verbs, held))
            raise
        await self._run(finish(self._verbs, held, keep))

    async def close(self) -> None:
        """Close all connections of this event loop."""
        if self._owned:
            await self._connector.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, steps: Steps[T]) -> T:
        proceed: Callable[[Any], Step] = steps.send
        value: Any = None
        while True:
            try:
                step = proceed(value)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                proceed, value = steps.send, await self._take(step)
            except StoreError as error:
                proceed, value = steps.throw, error

    async def _take(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        return step.read(await self._connector.ask(step.request))


# -- shared connectors -------------------------------------------------------------------------

_connectors: Final[dict[str, Connector]] = {}
_async_connectors: Final[dict[str, AsyncConnector]] = {}
_opening: Final = threading.Lock()


def get_shared(store: str | None, **settings: Any) -> Claims:
    """Return claims on the connector that all users of an address share."""
    url = resolve_store(store)
    return Claims(url, connector=_share(_connectors, url, module_of(url).CONNECTOR), **settings)


def get_shared_async(store: str | None, **settings: Any) -> AsyncClaims:
    """Return claims for event loops on the connector that all users of an address share."""
    url = resolve_store(store)
    return AsyncClaims(url, connector=_share(_async_connectors, url, module_of(url).ASYNC_CONNECTOR), **settings)


def _share(connectors: dict[str, T], url: str, connect: Callable[[str], T]) -> T:
    place = f"{url} in {Path.cwd()}" if url.startswith("sqlite:") else url  # a file's path may be relative
    with _opening:
        if place not in connectors:
            connectors[place] = connect(url)
        return connectors[place]


@atexit.register
def _close_shared() -> None:
    for connector in _connectors.values():
        connector.close()
