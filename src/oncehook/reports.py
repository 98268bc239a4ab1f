"""Values that API, command line and dashboard show: requests, sources, destinations, and counts.

`gather` sums what the store has counted. Flows come from counters, which are kept by minute (by day, once they are two
days old); statuses are counted from the deliveries themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from oncehook.destinations.base import Destination
from oncehook.human import show_setting, show_span
from oncehook.model import (
    ArrivalId,
    Breaker,
    Check,
    DeliveryStatus,
    EventDetails,
    Figures,
    Level,
    Outcome,
    Rejection,
    SchemaState,
    StoredAttempt,
    StoredDefinition,
    StoredDelivery,
    StoredWorker,
    unpack_head,
)
from oncehook.retry import Policy
from oncehook.routes import Route
from oncehook.settings.stored import show
from oncehook.sources import Source
from oncehook.upkeep import Watermark
from oncehook.verify import Either, Nothing, Scheme, StandardWebhooks

ONLY_A_KEY: Final = (
    "Its key is known, and copies were answered as duplicates: it was imported, so the event was seen before oncehook;"
    " or the event was pruned, and its key is kept longer."
)
MASK: Final = "[masked]"
# Signatures are shown, because they prove something about this request only; reusable credentials are not.
_CREDENTIAL: Final = re.compile(
    r"(?:.*[-_])?(?:authorization|cookie|token|secret|password|passwd|credentials?|api[-_]?key|apikey)[0-9]?",
    re.IGNORECASE,
)


class ShownRequest(msgspec.Struct, frozen=True):
    method: str
    target: str
    headers: Sequence[tuple[str, str]]


def request_of(head: bytes) -> ShownRequest:
    """Return the request of a stored head, with credentials masked."""
    method, target, headers = unpack_head(head)
    path, mark, search = target.partition("?")
    pairs = [piece.partition("=") for piece in search.split("&")]
    search = "&".join(name + sign + (MASK if sign and _is_credential(name) else value) for name, sign, value in pairs)
    return ShownRequest(
        method, path + mark + search, [(name, MASK if _is_credential(name) else value) for name, value in headers]
    )


HIDDEN: Final = "[hidden]"
"""Shown instead of a header's value to viewers without payloads."""


def without_values(request: ShownRequest) -> ShownRequest:
    """Return a request without the sender's data: no query, and headers by name only."""
    path, mark, _ = request.target.partition("?")
    return ShownRequest(
        request.method, path + mark + (HIDDEN if mark else ""), [(name, HIDDEN) for name, _ in request.headers]
    )


class SentRequest(msgspec.Struct, frozen=True):
    """The request of an attempt, with secrets masked; its body is the event's."""

    method: str
    url: str
    headers: Sequence[tuple[str, str]]
    signed: str | None
    """What the signature is over, with `{body}` for the event's body; None for a request without signature."""


class ReceivedResponse(msgspec.Struct, frozen=True):
    """The answer to an attempt, as far as it is kept."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: str
    """The first bytes, as text."""


class CallSteps(msgspec.Struct, frozen=True):
    """Seconds that the steps of a call took; None for a step that was not needed or did not end."""

    dns: float | None = None
    connect: float | None = None
    tls: float | None = None
    first_byte: float | None = None
    total: float | None = None


def sent_request(attempt: StoredAttempt) -> SentRequest | None:
    exchange = attempt.exchange
    if exchange is None:
        return None
    headers = [(name, MASK if _is_credential(name) else value) for name, value in exchange.headers.items()]
    signed = None
    if "webhook-signature" in exchange.headers:
        signed = f"{exchange.headers.get('webhook-id', '')}.{exchange.headers.get('webhook-timestamp', '')}.{{body}}"
    return SentRequest(exchange.method, exchange.address, headers, signed)


def received_response(attempt: StoredAttempt) -> ReceivedResponse | None:
    if attempt.evidence.status is None:
        return None
    exchange = attempt.exchange
    lines = exchange.received.decode("utf-8", "replace").split("\r\n") if exchange and exchange.received else []
    pairs = [line.partition(": ") for line in lines]
    headers = [(name, MASK if _is_credential(name) else value) for name, _, value in pairs]
    return ReceivedResponse(
        attempt.evidence.status, headers, (attempt.evidence.answer or b"").decode("utf-8", "replace")
    )


def call_steps(attempt: StoredAttempt) -> CallSteps | None:
    exchange = attempt.exchange
    if exchange is None:
        return None
    return CallSteps(*(None if one is None else round(one, 6) for one in exchange.times))


def _is_credential(name: str) -> bool:
    return len(name) <= 200 and _CREDENTIAL.fullmatch(name) is not None


class ShownEvent(msgspec.Struct, frozen=True):
    """An event with everything but its body."""

    event: EventDetails
    request: ShownRequest
    deliveries: Sequence[StoredDelivery]
    body_authenticated: bool | None
    """Whether its source's verification covers the body; None where the source no longer exists."""
    key_authenticated: bool | None
    """Whether it covers the key's place."""
    size: int
    """Bytes of the body; the event itself has none where payloads are hidden."""
    unreadable: str | None = None
    """Reason why a body that is kept apart cannot be shown."""

    @property
    def covers(self) -> str | None:
        """Coverage of its source's check, in words."""
        if self.body_authenticated is None or self.key_authenticated is None:
            return None
        return describe_coverage(self.body_authenticated, self.key_authenticated)


class ShownRejection(msgspec.Struct, frozen=True):
    """A rejected arrival, for its owner."""

    rejection: Rejection
    request: ShownRequest | None
    """None where no head was kept, or payloads are hidden."""
    text: str | None
    """The first bytes of the body as text."""
    diagnosis: str | None


class ShownArrival(msgspec.Struct, frozen=True):
    id: ArrivalId
    outcome: Outcome
    at: datetime
    request: ShownRequest
    body_differs: bool


class ShownSource(msgspec.Struct, frozen=True):
    """A source: its address, verification and counts. Never a secret, only their number."""

    name: str
    preset: str | None
    title: str | None
    address: str
    """The path to give the provider."""
    public_url: str | None
    """The URL that is registered with the provider, where the settings contain it."""
    hidden: bool
    """True where the address is unguessable: viewers do not see it."""
    verifier: str
    unverified: bool
    body_authenticated: bool
    """Whether verification covers the body; if not, the body is a hint."""
    key_authenticated: bool
    """Whether it covers the key's place; if not, a captured request can come back under another key."""
    loopback_only: bool
    secrets: int
    key: str
    subject: str
    type: str
    destinations: Sequence[str]
    last_arrival: datetime | None
    figures: Mapping[str, int]
    """Counts of the last 24 hours."""
    origin: str = "program"
    """What defines it: file, program or store."""
    place: str | None = None
    """Of what a file defines: the file and the line."""
    account: str | None = None
    is_enabled: bool = True
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Of a stored one: its settings as given, of secrets only that they are set."""
    trouble: str | None = None
    """Why a stored one cannot be used here."""
    secret_names: Sequence[str] = ()
    """Where each secret is kept, such as `env:STRIPE_SECRET`; empty for one that the program or the store holds."""
    rules: Mapping[str, Sequence[str]] = msgspec.field(default_factory=dict)
    """The places of key, subject and type in order, each once; parts of one value are joined by ` + `."""

    @property
    def proven(self) -> str:
        return describe_coverage(self.body_authenticated, self.key_authenticated)


class ShownDestination(msgspec.Struct, frozen=True):
    """A destination: its address, terms and state."""

    name: str
    kind: str
    address: str
    retry: str
    timeout: float
    lease: float
    concurrency: int
    rate: float | None
    sources: Sequence[str]
    level: Level
    figures: Mapping[str, int]
    """Counts of the last 24 hours."""
    breaker: str
    """`closed`, `open`, or `half_open` when its time has passed and no probe was made yet."""
    holding: Breaker
    origin: str = "program"
    """What defines it: file, program or store."""
    place: str | None = None
    """File and line of its settings, or of its handler."""
    account: str | None = None
    is_enabled: bool = True
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Of a stored one: its settings as given, of secrets only that they are set."""
    trouble: str | None = None
    """Why a stored one cannot be used here."""
    signs_with: Sequence[str] = ()
    """Where each secret is kept that its requests are signed with, such as `env:N8N_SECRET`."""

    @property
    def state(self) -> str:
        """State as all interfaces name it: `disabled`, `paused`, `held_back`, `failing` or `ready`."""
        if not self.is_enabled:
            return "disabled"
        if self.level.paused_at is not None:
            return "paused"
        if self.breaker != "closed":
            return "held_back"
        return "failing" if self.level.failures else "ready"

    @property
    def streak(self) -> str:
        """Sentence about its failures in a row and what comes next; empty where there are none."""
        failures, held = self.level.failures, show_span(self.holding.open)
        if not failures:
            return ""
        lead = f"{failures:,} {'delivery has' if failures == 1 else 'deliveries have'} failed since the last success."
        if self.breaker != "closed":
            return f"{lead} One trial decides: after a success everything goes on, else it waits for another {held}."
        return f"{lead} At {self.holding.failures:,} nothing is sent for {held}, then one trial decides."


class RunningReceiver(msgspec.Struct, frozen=True):
    """A process that takes arrivals in for a server."""

    number: int
    pid: int
    started_at: datetime
    connections: int
    arrivals: int
    """Arrivals that it has answered after their commit, or acknowledged without one."""
    cpu: float
    """Seconds of CPU time."""
    memory: int
    """Bytes that it has in memory."""


class System(msgspec.Struct, frozen=True):
    version: str
    engine: str
    schema: SchemaState
    size: int
    workers: Sequence[StoredWorker]
    watermarks: Sequence[Watermark]
    crossings: Mapping[str, datetime]
    counted_by_type: Collection[str] = ()
    """Sources of which only messages count for the daily volume."""
    receivers: Sequence[RunningReceiver] = ()
    """Processes that take arrivals in for this one, where there are several."""
    owner: int | None = None
    """The process that owns the store's file; None where the store is a server."""


class Health(msgspec.Struct, frozen=True):
    """The store's growth and upkeep, for those who see the whole inbox."""

    growth: float | None
    """Bytes that the store grows by in a day, over what is known of the last week; None where too little is known."""
    free_disk: float | None
    """The free part of its disk, from 0 to 1; None for a server's."""
    free_bytes: int | None
    """The free bytes of its disk."""
    full_in: float | None
    """Days until the disk is full at this growth; None where it does not grow, or that cannot be told."""
    keep_events: Mapping[str, float]
    """Seconds for which finished events are kept, by source; "" for all others."""
    keep_keys: Mapping[str, float]
    """Seconds for which keys are remembered, by source."""
    expired: Mapping[str, int]
    """Leases that ran out in the last 24 hours, by destination."""
    findings: Sequence[Check]
    """What `doctor` finds that can be told at once."""


def growth(sizes: Sequence[tuple[datetime, int]], size: int, now: datetime) -> float | None:
    """Return the bytes a day by which the store has grown in the last week, from its noted sizes and its size now.

    None where less than an hour is known: a new store grows in leaps.
    """
    week = [(at, n) for at, n in sizes if (now - at).total_seconds() <= 7 * 86_400]
    if not week or (now - week[0][0]).total_seconds() < 3600:
        return None
    return (size - week[0][1]) / (now - week[0][0]).total_seconds() * 86_400


# -- what is set up ----------------------------------------------------------------------------


class ShownRoute(msgspec.Struct, frozen=True):
    """A route: its ends, its conditions and options."""

    id: str | None
    """`rte_…` for a stored one."""
    source: str
    destination: str
    when: Mapping[str, Any]
    coalesce: bool | str | None
    latest_wins: bool
    on_dead: str
    priority: str
    origin: str = "program"
    """What defines it: file, program or store."""
    place: str | None = None
    """Of what a file defines: the file and the line."""
    account: str | None = None
    is_enabled: bool = True
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Of a stored one: its settings as given, of secrets only that they are set."""
    trouble: str | None = None
    """Why a stored one cannot be used here."""

    @property
    def options(self) -> Sequence[str]:
        """Return its options that are not as usual, each as in the file."""
        usual = {"coalesce": (None, False), "latest_wins": (False,), "on_dead": ("continue",), "priority": ("normal",)}
        return [show_setting(name, value) for name, but in usual.items() if (value := getattr(self, name)) not in but]

    @property
    def condition(self) -> str:
        """Return its filter in short, for people; empty where it takes everything."""
        return ", ".join(
            (wanted if isinstance(wanted, str) else " | ".join(wanted))
            if place == "type"
            else f"{place} {wanted if isinstance(wanted, str) else ' | '.join(wanted)}"
            for place, wanted in self.when.items()
            if wanted not in ("*", ["*"])
        )


def show_route(route: Route, id: str | None = None) -> ShownRoute:
    settings = route.settings
    options = (settings.coalesce, settings.latest_wins, settings.on_dead, settings.priority)
    return ShownRoute(id, route.source, route.destination, settings.when, *options)


def show_unusable_source(definition: StoredDefinition, trouble: str) -> ShownSource:
    """Show a stored source that cannot be built here: its key is missing, or its settings do not hold any more."""
    preset = show(definition).get("preset")
    return ShownSource(
        name=definition.name,
        preset=preset if isinstance(preset, str) else None,
        title=None,
        address="/in/" + definition.name,
        public_url=None,
        hidden="path" in show(definition),
        verifier="unknown",
        unverified=False,
        body_authenticated=False,
        key_authenticated=False,
        loopback_only=False,
        secrets=0,
        key="",
        subject="",
        type="",
        destinations=(),
        last_arrival=None,
        figures={},
        trouble=trouble,
    )


def show_source(
    source: Source, routes: Iterable[Route], last_arrival: datetime | None, figures: Mapping[str, int]
) -> ShownSource:
    return ShownSource(
        name=source.name,
        preset=source.preset.name if source.preset else None,
        title=source.preset.title if source.preset else None,
        address=f"/in/{source.path}",
        # A development source is not registered at a provider: its address is the server's own.
        public_url=None if source.loopback_only else source.settings.public_url,
        hidden=source.path != source.name,
        verifier=verifier_name(source.scheme),
        unverified=isinstance(source.scheme, Nothing),
        body_authenticated=source.body_authenticated,
        key_authenticated=source.key_authenticated,
        loopback_only=source.loopback_only,
        secrets=len(source.valid_secrets),
        key=rule(source.places.get("key")),
        subject=rule(source.places.get("subject")),
        type=rule(source.places.get("type")),
        destinations=_names(route.destination for route in routes if route.source == source.name),
        last_arrival=last_arrival,
        figures=figures,
        secret_names=[secret.name for secret in source.settings.secret],
        rules={name: list_places(source.places.get(name)) for name in ("key", "subject", "type")},
    )


def show_destination(
    destination: Destination,
    routes: Iterable[Route],
    level: Level,
    figures: Mapping[str, int],
    now: datetime,
) -> ShownDestination:
    terms = destination.terms
    return ShownDestination(
        name=destination.name,
        kind=destination.kind,
        address=destination.address,
        retry=schedule(terms.retry),
        timeout=terms.timeout,
        lease=terms.lease,
        concurrency=terms.concurrency,
        rate=terms.rate,
        sources=_names(route.source for route in routes if route.destination == destination.name),
        level=level,
        figures=figures,
        breaker=breaker(level, now),
        holding=terms.breaker,
    )


def _names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


# -- in words ----------------------------------------------------------------------------------


def verifier_name(scheme: Scheme) -> str:
    """Return the name of a scheme in the configuration."""
    if isinstance(scheme, Nothing):
        return "none"
    if isinstance(scheme, StandardWebhooks):
        return "standard-webhooks"
    if isinstance(scheme, Either):
        return " or ".join(dict.fromkeys(verifier_name(one) for one in scheme.schemes))
    return type(scheme).__name__.lower()


def describe_coverage(body: bool, key: bool) -> str:
    """Return what a source's verification covers: `body and key`, `body, not the key`, `who sends, not the body`."""
    if not body:
        return "the key, not the body" if key else "who sends, not the body"
    return "body and key" if key else "body, not the key"


def schedule(policy: Policy) -> str:
    """Return the retry schedule as text: `10 s, 1 min, 5 min … 24 h: 10 attempts over 3 days`."""
    waits = list(policy.waits or policy.in_words())
    if not waits:
        return "1 attempt"
    spans = [show_span(wait) for wait in waits]
    shown = ", ".join(spans) if len(spans) <= 5 else f"{', '.join(spans[:3])} … {spans[-1]}"
    chance = "up to " if not policy.waits and policy.jitter == "full" else ""
    return f"{chance}{shown}: {policy.attempts} attempts over {show_span(sum(waits))}"


def rule(places: object) -> str:
    """Return the places of a rule as written; functions by name."""
    if places is None:
        return ""
    if isinstance(places, list | tuple):
        return ", ".join(rule(place) for place in places)
    return getattr(places, "__name__", None) or str(places)


def list_places(places: object) -> list[str]:
    """Return the places of a rule in order, each once; the parts of a composite value joined by ` + `."""
    if places is None:
        return []
    if not isinstance(places, list | tuple):
        return [f"{rule(places)}()" if callable(places) else rule(places)]
    joined = [" + ".join(map(rule, place)) if isinstance(place, list | tuple) else rule(place) for place in places]
    return list(dict.fromkeys(joined))


def breaker(level: Level, now: datetime) -> str:
    if level.open_until is None:
        return "closed"
    return "open" if level.open_until > now else "half_open"


PerDay = dict[str, dict[str, int]]


class Stats(msgspec.Struct, frozen=True):
    since: datetime
    total: int
    """Events accepted."""
    by_status: Mapping[DeliveryStatus, int]
    """Deliveries of events received since, by their status now."""
    dead: int
    """All current dead letters."""
    duplicates: int
    conflicts: int
    rejected: int
    """Includes requests for unknown sources, which are counted for no source."""
    retries: int
    replays: int
    last_replay_at: datetime | None
    per_day: Mapping[str, Mapping[str, int]]
    """Deliveries done, by destination and day (UTC)."""
    volume_today: int
    """Events accepted since midnight UTC; for sources with volume types, only those."""
    watermarks: Sequence[Watermark]
    by: Mapping[str, Mapping[str, int]] | None
    """Numbers per source or per destination."""


def gather(
    since: datetime,
    figures: Figures,
    *,
    today: Mapping[str, int],
    levels: Mapping[str, Level],
    statuses: Mapping[DeliveryStatus, int],
    marks: Sequence[Watermark],
    by: Literal["source", "destination"] | None,
    per_day: PerDay,
    last_replay_at: datetime | None,
) -> Stats:
    sources, destinations = figures.by_source.values(), figures.by_destination.values()
    groups = {"source": lambda: _by_source(figures, today), "destination": lambda: _by_destination(figures, levels)}
    return Stats(
        since=since,
        total=_sum(sources, "accepted"),
        by_status={status: statuses.get(status, 0) for status in DeliveryStatus},
        dead=sum(level.dead for level in levels.values()),
        duplicates=_sum(sources, "duplicate"),
        conflicts=_sum(sources, "conflict"),
        rejected=_sum([*sources, figures.elsewhere], "rejected"),
        retries=_sum(destinations, "retry"),
        replays=_sum(destinations, "replays"),
        last_replay_at=last_replay_at,
        per_day=per_day,
        volume_today=sum(today.values()),
        watermarks=marks,
        by=None if by is None else groups[by](),
    )


def _sum(counted: Iterable[Mapping[str, int]], what: str) -> int:
    return sum(counts.get(what, 0) for counts in counted)


def _by_source(figures: Figures, today: Mapping[str, int]) -> dict[str, dict[str, int]]:
    return {
        name: {
            "total": counts.get("accepted", 0),
            "duplicates": counts.get("duplicate", 0),
            "conflicts": counts.get("conflict", 0),
            "rejected": counts.get("rejected", 0),
            "volume_today": today.get(name, 0),
        }
        for name, counts in figures.by_source.items()
    }


def _by_destination(figures: Figures, levels: Mapping[str, Level]) -> dict[str, dict[str, int]]:
    return {
        name: {
            "pending": level.pending - level.leased,
            "leased": level.leased,
            "done": level.done,
            "dead": level.dead,
            "discarded": level.discarded,
            "delivered": figures.by_destination.get(name, {}).get("succeeded", 0),
            "retries": figures.by_destination.get(name, {}).get("retry", 0),
            "replays": figures.by_destination.get(name, {}).get("replays", 0),
        }
        for name, level in levels.items()
    }
