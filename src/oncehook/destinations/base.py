"""Destinations as the worker sees them, whatever their kind: each makes one attempt and returns its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec

from oncehook.categories import FailureRules
from oncehook.model import NO_EVIDENCE, Breaker, Category, Emission, Evidence, Lease, Settle, Settlement
from oncehook.retry import DURABLE, Policy
from oncehook.rules import Spec


class Subscription(msgspec.Struct, frozen=True):
    """Events that a destination gets without a route: emitted ones, unless it says where from."""

    type: str = "*"
    """A pattern with `*` and `?`."""
    source: str | None = None
    """The only source of these events, of arrivals and of emitted ones; None: any, of emitted ones."""
    when: Mapping[str, str | Sequence[str]] = msgspec.field(default_factory=dict)
    """Conditions like those of a route."""


@dataclass(slots=True, frozen=True)
class Terms:
    """Terms under which a destination is sent to."""

    retry: Policy = DURABLE
    timeout: float = 15.0
    """Seconds that one attempt may take, in all."""
    lease: float = 10.0
    """Seconds of a worker's silence after which its lease ends."""
    concurrency: int = 16
    """Attempts at once in one worker process; with `is_shared`, over all of them."""
    is_shared: bool = False
    """True where somebody has set `concurrency`: the default costs no store a counter."""
    rate: float | None = None
    """Attempts begun per second, over all worker processes."""
    fair: Spec = None
    """Rule for the value over which leases go in rounds."""
    breaker: Breaker = field(default_factory=Breaker)
    rules: FailureRules = field(default_factory=FailureRules)
    """The destination's own rules for categories; the general table decides the rest."""
    account: str | None = None
    """The account that it belongs to: it gets no other account's events. None: the server's own."""
    subscribe: Sequence[Subscription] = ()
    """The events that it gets without a route."""
    disable_after: float | None = None
    """Seconds of failing without a success after which nothing is sent to it until a person resumes it."""


class Result(msgspec.Struct, frozen=True):
    """Outcome of one attempt."""

    category: Category | None = None
    """Category of the failure; None for success."""
    evidence: Evidence = NO_EVIDENCE
    retry_after: float | None = None
    """Seconds after which the destination asks for a retry; never sooner than our own policy."""
    retry: Policy | None = None
    """Policy for this failure, instead of the destination's own."""
    wait: float | None = None
    """Seconds that the handler asks to wait, instead of the policy's, up to its cap."""
    pause: str | None = None
    """Reason for a pause until a person has looked (410)."""
    counts: bool = True
    """False where a failure says nothing about the destination, so that its breaker is not told of it: it was never
    asked, or refused this one message for what it holds."""
    commit: Callable[[Any], object] | None = None
    """An effect to be written in the transaction that settles (SQLite)."""
    emits: Sequence[Emission] = ()
    """Events to be stored in the transaction that settles."""
    settled: bool = False
    """True where the handler's own transaction has settled the delivery (PostgreSQL)."""


WELL = Result()


class Destination(Protocol):
    """One place events are sent to."""

    name: str
    id: int
    """Its id in the store; assigned when the inbox starts."""
    terms: Terms
    crash_tolerance: int
    """Crashes of the process that do not count against a delivery (see LeaseRequest.crash_tolerance)."""
    kind: str
    """`handler`, `http`, `sender`, or an integration's own word (`celery`), as it is shown."""
    address: str
    """Recipient: a function's dotted name, method and URL, or an API and its account; without credentials."""

    async def open(self) -> None:
        """Prepare for attempts, on the running loop."""

    async def close(self) -> None:
        """Let go of what was opened."""

    async def attempt(self, lease: Lease) -> Result:
        """Make one attempt, within `terms.timeout`. Raises nothing but CancelledError, when the worker must stop."""


@runtime_checkable
class TestableDestination(Destination, Protocol):
    """A destination to which a test can be sent."""

    def apart(self) -> Destination:
        """Return a copy under the same rules, with connections of its own."""


def settlement(terms: Terms, lease: Lease, result: Result, duration: float, *, take_next: bool = False) -> Settlement:
    """Decide what becomes of a delivery after this attempt.

    With `take_next`, the next delivery of its subject is leased together with the completion.
    """
    if result.category is None:
        return Settlement(
            lease,
            Settle.done,
            evidence=result.evidence,
            duration=duration,
            breaker=terms.breaker,
            commit=result.commit,
            emits=result.emits,
            take_next=terms.lease if take_next else None,
        )
    policy = result.retry or terms.retry
    wait = None if result.category is Category.permanent else _wait(policy, lease.delivery.attempt, result)
    return Settlement(
        lease,
        Settle.dead if wait is None else Settle.retry,
        wait=wait or 0.0,
        category=result.category,
        evidence=result.evidence,
        duration=duration,
        breaker=terms.breaker if result.counts else None,
        pause=result.pause,
    )


def _wait(policy: Policy, attempt: int, result: Result) -> float | None:
    wait = policy.wait(attempt)
    if wait is None:
        return None
    if result.wait is not None:
        return min(result.wait, policy.cap)
    if result.retry_after is not None:
        # Never sooner than our own policy: a destination that asks for "at once" would use up all attempts in a second.
        return max(wait, min(result.retry_after, policy.cap))
    return wait
