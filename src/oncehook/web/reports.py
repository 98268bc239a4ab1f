"""What the API answers about the inbox itself, as shapes: what is set up, how it goes, who did what.

As in `answers`, values of the desk come in. The fields of the stats are part of the public contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from oncehook import model, reports, upkeep
from oncehook.web.access import Identity
from oncehook.web.answers import Answer, fill

# -- what is set up ----------------------------------------------------------------------------


class Source(Answer, frozen=True):
    """A source. `address` is null for a viewer where it is a secret itself; `secrets` says only how many there are."""

    name: str
    preset: str | None
    title: str | None
    address: str | None
    verifier: str
    unverified: bool
    body_authenticated: bool
    key_authenticated: bool
    loopback_only: bool
    secrets: int
    key: str
    subject: str
    type: str
    destinations: Sequence[str]
    last_arrival: datetime | None
    figures: Mapping[str, int]


def source(found: reports.ShownSource, *, with_address: bool) -> Source:
    return fill(Source, found, address=found.address if with_address or not found.hidden else None)


class Destination(Answer, frozen=True):
    """A destination: whom it reaches, on what terms, how it stands. Spans are in seconds."""

    name: str
    kind: str
    address: str
    retry: str
    timeout: float
    lease: float
    concurrency: int
    rate: float | None
    sources: Sequence[str]
    pending: int
    leased: int
    done: int
    dead: int
    discarded: int
    oldest_due: float | None
    state: str
    paused: bool
    paused_at: datetime | None
    paused_by: str | None
    paused_why: str | None
    breaker: str
    failures: int
    open_until: datetime | None
    figures: Mapping[str, int]


def destination(found: reports.ShownDestination) -> Destination:
    level = found.level
    pending, paused = level.pending - level.leased, level.paused_at is not None
    return fill(Destination, found, level, pending=pending, paused=paused)


# -- how it goes ------------------------------------------------------------------------------


class Watermark(Answer, frozen=True):
    """A level and its limit."""

    name: str
    level: float | None
    limit: float
    crossed: bool


def watermark(mark: upkeep.Watermark) -> Watermark:
    return fill(Watermark, mark)


class Stats(Answer, frozen=True):
    """The numbers since a moment."""

    since: datetime
    total: int
    by_status: Mapping[str, int]
    dead: int
    duplicates: int
    conflicts: int
    rejected: int
    retries: int
    replays: int
    last_replay_at: datetime | None
    per_day: Mapping[str, Mapping[str, int]]
    volume_today: int
    watermarks: Sequence[Watermark]
    by: Mapping[str, Mapping[str, int]] | None


def stats_of(counted: reports.Stats) -> Stats:
    return fill(
        Stats,
        counted,
        by_status={str(status): n for status, n in counted.by_status.items()},
        watermarks=[watermark(mark) for mark in counted.watermarks],
    )


class Point(Answer, frozen=True):
    """What was counted in the step that begins at a moment."""

    at: datetime
    count: int


class Series(Answer, frozen=True):
    """Flows by name."""

    since: datetime
    step: float
    series: Mapping[str, Sequence[Point]]


class Rejection(Answer, frozen=True):
    """An arrival that was turned away."""

    source: str
    at: datetime
    code: str
    reason: str
    peer: str
    size: int


def rejection(found: model.Rejection) -> Rejection:
    return fill(Rejection, found)


class Audit(Answer, frozen=True):
    """Something a person or program did."""

    n: int
    at: datetime
    actor: str
    act: str
    target: str
    detail: Mapping[str, Any]


def audit(line: model.Audited) -> Audit:
    return fill(Audit, line)


class Token(Answer, frozen=True):
    """Who holds a token and what it may do; never the token. `sources` is null where it sees all of them, `last_used`
    is to the minute.
    """

    name: str
    role: str
    sources: Sequence[str] | None
    payloads: bool
    expires: datetime | None
    expired: bool
    last_used: datetime | None


def token(holder: Identity, last_used: datetime | None) -> Token:
    return fill(
        Token,
        holder,
        role=holder.role.name,
        sources=None if holder.sources is None else sorted(holder.sources),
        expired=holder.has_expired,
        last_used=last_used,
    )


class Worker(Answer, frozen=True):
    """A worker that has lately been heard of."""

    id: str
    host: str
    pid: int
    started_at: datetime
    seen_at: datetime
    leases: int
    destinations: Sequence[str]


class System(Answer, frozen=True):
    """The whole, from outside."""

    version: str
    store: str
    schema: int
    schema_target: int
    size: int
    workers: Sequence[Worker]
    watermarks: Sequence[Watermark]


def system(found: reports.System) -> System:
    return fill(
        System,
        found,
        store=found.engine,
        schema=found.schema.current,
        schema_target=found.schema.target,
        workers=[fill(Worker, one) for one in found.workers],
        watermarks=[watermark(mark) for mark in found.watermarks],
    )
