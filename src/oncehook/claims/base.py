"""What a claim is, and what each verb asks and answers: nothing here talks to a server.

A verb is a generator that yields an `Ask` (what to send, and how to read the reply) and is sent the answer, or yields a
`Wait`. `faces` runs it, blocking or on an event loop; a `Backend` words the asks for one kind of store. So the two
faces differ in the call alone, and the backends in the wording alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Generic, Literal, Protocol, TypeAlias, TypeGuard, TypeVar

from oncehook import clock, human
from oncehook.errors import ClaimLost, ConfigError, KeyMissing, PayloadMismatch, ResultInvalid, StoreUnavailable

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
