"""A replay before it is made: the request, its plan, and the token of a plan.

`Admin` plans and starts replays with these; the store fixes their items and workers process them. A token contains the
whole plan (its query with fixed times, its options, its count, its time), so that no plan is stored. Discarding many
dead letters uses such a plan, too.
"""

from __future__ import annotations

import base64
import binascii
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from oncehook import query
from oncehook.destinations.base import Destination
from oncehook.errors import BadRequest
from oncehook.human import show_moment, show_rate
from oncehook.model import (
    DeliveryId,
    DeliveryPreview,
    DeliveryStatus,
    Filter,
    IdT,
    Level,
    PlannedFor,
    PlanSnapshot,
    ReplayPlan,
    StoredDelivery,
    subject_hash,
)

MOST_IDS: Final = 500
"""Deliveries that may be named one by one."""
BEHIND: Final = "Live traffic goes first; the order within a subject is kept among what is replayed."


class ReplayRequest(msgspec.Struct, frozen=True):
    filter: Filter
    force: bool = False
    fresh_id: bool = False
    rate: float | None = None
    """Deliveries a second at most."""

    def without_subject(self) -> ReplayRequest:
        """Return the request with the subject's hash instead of its text."""
        return replace(self, filter=_without_subject(self.filter))

    def about(self) -> dict[str, object]:
        """Return the request as text, to be stored with the replay."""
        return {
            "query": query.write_query(self.filter),
            "force": self.force,
            "fresh_id": self.fresh_id,
            "rate": None if self.rate is None else show_rate(self.rate),
            "command": command(self),
        }


def _without_subject(filter: Filter) -> Filter:
    def hide(others: Sequence[Filter] | None) -> Sequence[Filter] | None:
        return None if others is None else tuple(map(_without_subject, others))

    hidden = None if filter.subject is None else f"#{subject_hash(filter.subject)}"
    return replace(filter, subject=hidden, without=hide(filter.without), either=hide(filter.either))


class Recipient(msgspec.Struct, frozen=True):
    destination: str
    count: int
    kind: str
    """`handler`, `http` or `sender`; where it is not configured here, `elsewhere` when a worker has it, otherwise
    `gone`."""
    address: str
    paused: bool
    failing: bool
    """True where its breaker is open, or its last deliveries have failed."""
    changed: int
    """Deliveries of the plan that first went to another address."""
    by_status: Mapping[DeliveryStatus, int] = msgspec.field(default_factory=dict)
    left_out: Mapping[DeliveryStatus, int] = msgspec.field(default_factory=dict)
    refused: int = 0
    """Deliveries of the plan that were refused for good when they were tried last."""
    failed_before: datetime | None = None
    """Last failure of a handler whose program has been started again since; None where it may have failed since."""

    def without_details(self) -> Recipient:
        """Return it without its address and its state: for a viewer whose events go there, but whose it is not."""
        return replace(self, address="", paused=False, failing=False, changed=0, failed_before=None)

    @property
    def moved(self) -> str:
        """Sentence about deliveries that go to another address than the first time."""
        many = "This was" if self.changed == self.count == 1 else f"{self.changed:,} of {self.count:,} were"
        return f"{many} first delivered to another address than {self.destination} has now."

    @property
    def warnings(self) -> list[str]:
        """Reasons against replaying to it now."""
        found = []
        if self.kind == "gone":
            found.append(f"{self.destination} is no longer configured: nobody would work these.")
        elif self.paused:
            found.append(f"{self.destination} is paused: nothing is sent before it is resumed.")
        elif self.failed_before is not None:
            at = show_moment(self.failed_before, "seconds")
            found.append(f"{self.destination} failed last at {at}; its program was started since, and may be mended.")
        elif self.failing and self.refused < self.count:  # `doomed` says the same of those that were refused
            unless = "unless that is mended, these may become dead letters again"
            found.append(f"{self.destination} failed its last attempts: {unless}.")
        if self.refused and self.kind != "gone" and self.failed_before is None:
            found.append(self.doomed)
        return [*found, self.moved] if self.changed else found

    @property
    def doomed(self) -> str:
        """Sentence about deliveries that were refused for good, which another attempt rarely changes."""
        if self.refused == self.count == 1:
            return f"{self.destination} refused this for good: it fails again unless the cause is mended."
        many = "these" if self.refused == self.count else f"{self.refused:,} of {self.count:,}"
        return f"{self.destination} refused {many} for good: they fail again unless the cause is mended."


class Plan(msgspec.Struct, frozen=True):
    """The effect of a replay that is not started yet."""

    token: str
    request: ReplayRequest
    total: int
    recipients: Sequence[Recipient]
    by_status: Mapping[DeliveryStatus, int]
    left_out: Mapping[DeliveryStatus, int]
    oldest: datetime | None
    newest: datetime | None
    sample: Sequence[StoredDelivery]
    previews: Mapping[bytes, DeliveryPreview]
    """Recipient and text of the readable deliveries of the sample, by delivery."""
    expected_seconds: float | None
    """Duration at the requested rate; None: as fast as the destinations allow."""

    @property
    def notes(self) -> list[str]:
        """Everything to know before confirming it."""
        return [*self.visible, BEHIND, *self.warnings]

    @property
    def visible(self) -> list[str]:
        """Differences from the first run that receivers see."""
        seen = []
        if any(recipient.kind == "sender" for recipient in self.recipients):
            seen.append("People who already received the message will get it again.")
        return seen if self.goes_only_to("sender") else [*seen, *self._seen_by_receivers()]

    @property
    def visible_to_people(self) -> list[str]:
        """Return the part of it that is not about ids."""
        return self.visible[:1] if any(recipient.kind == "sender" for recipient in self.recipients) else []

    @property
    def warnings(self) -> list[str]:
        return [warning for recipient in self.recipients for warning in recipient.warnings]

    @property
    def can_work(self) -> bool:
        """True where there is something to replay, and a worker for it."""
        return self.total > 0 and not self.goes_only_to("gone")

    def goes_only_to(self, kind: str) -> bool:
        return bool(self.recipients) and all(recipient.kind == kind for recipient in self.recipients)

    def _seen_by_receivers(self) -> list[str]:
        if self.goes_only_to("handler"):
            key = "a new idempotency_key" if self.request.fresh_id else "the same idempotency_key as before"
            seen = [f"The handler gets the same event with {key}; its run tells that it is a replay."]
        else:
            fresh = "a new webhook-id" if self.request.fresh_id else "the same webhook-id and Idempotency-Key as before"
            seen = [f"The receiver sees the same body with {fresh}, and Oncehook-Replay."]
        if not self.request.fresh_id:
            seen.append("If it deduplicates by that, it will ignore these; --fresh-id gives each a new one.")
        return seen


def build_plan(
    request: ReplayRequest,
    counted: ReplayPlan,
    destinations: Mapping[str, Destination],
    levels: Mapping[str, Level],
    previews: Mapping[bytes, DeliveryPreview],
    elsewhere: Collection[str] = (),
    failed_before: Mapping[str, datetime] | None = None,
) -> Plan:
    """Build a plan from the store's counts. `elsewhere`: the destinations of workers in other processes;
    `failed_before`: the last failures of handlers whose program has been started since."""
    counts = counted.by_destination
    return Plan(
        token=encode_token(request, PlanSnapshot(counted.total, counted.at)),
        request=request,
        total=counted.total,
        recipients=[
            _recipient(
                name,
                n,
                destinations.get(name),
                levels.get(name, Level()),
                counted.changed.get(name, 0),
                "elsewhere" if name in elsewhere else "gone",
                counted.parts.get(name, PlannedFor()),
                (failed_before or {}).get(name),
            )
            for name, n in counts.items()
        ],
        by_status=counted.by_status,
        left_out=counted.left_out,
        oldest=counted.oldest,
        newest=counted.newest,
        sample=counted.sample,
        previews=previews,
        expected_seconds=_estimate_seconds(request, counts, destinations),
    )


def _recipient(
    name: str,
    count: int,
    destination: Destination | None,
    level: Level,
    changed: int,
    otherwise: str,
    part: PlannedFor,
    failed_before: datetime | None,
) -> Recipient:
    return Recipient(
        destination=name,
        count=count,
        kind=otherwise if destination is None else destination.kind,
        address="" if destination is None else destination.address,
        paused=level.paused_at is not None,
        failing=failed_before is None and (level.failures > 0 or level.open_until is not None),
        changed=0 if destination is None else changed,
        by_status=part.by_status,
        left_out=part.left_out,
        refused=part.refused,
        failed_before=failed_before,
    )


def _estimate_seconds(
    request: ReplayRequest, counts: Mapping[str, int], destinations: Mapping[str, Destination]
) -> float | None:
    """Return the seconds at the requested rate or at that of the slowest destination, whichever is longer."""
    spans = [] if request.rate is None else [sum(counts.values()) / request.rate]
    for name, count in counts.items():
        destination = destinations.get(name)
        if destination is not None and destination.terms.rate:
            spans.append(count / destination.terms.rate)
    return max(spans, default=None)


def with_end(filter: Filter, now: datetime) -> Filter:
    """Return the filter with an end, so that it excludes what arrives after the plan was made."""
    if filter.until is not None or filter.ids is not None or filter.event_id is not None:
        return filter
    # The store sets received times, and its clock may be a little ahead: better one event more than one too few.
    return replace(filter, until=now.replace(microsecond=0) + timedelta(seconds=2))


def some_ids(ids: Sequence[DeliveryId], filter: Filter) -> tuple[DeliveryId, ...]:
    """Return deliveries that are named one by one, each once. Raises BadRequest for an empty list, which must not mean
    all."""
    if filter.ids is not None:
        raise BadRequest("The deliveries are named twice, in `ids` and in the query.")
    if not ids or len(ids) > MOST_IDS:
        raise BadRequest(f"Name from 1 to {MOST_IDS} deliveries; for more, use a query.")
    return tuple(dict.fromkeys(ids))


def some_id(kind: type[IdT], text: str) -> IdT:
    """Read an id that a person wrote. Raises BadRequest."""
    try:
        return kind.parse(text)
    except ValueError:
        raise BadRequest(f"{text[:40]!r} is no id.", hint="Ids begin with evt_ or dlv_ and have 32 digits.") from None


def command(request: ReplayRequest) -> str:
    words = ["oncehook", "replay", *_subject_of(request.filter)]
    if request.force:
        words.append("--force")
    if request.fresh_id:
        words.append("--fresh-id")
    if request.rate is not None:
        words += ["--rate", show_rate(request.rate)]
    return shlex.join(words)


def _subject_of(filter: Filter) -> list[str]:
    if filter.ids is not None and filter == Filter(ids=filter.ids):
        return [str(one) for one in filter.ids]
    if filter.event_id is not None and filter == Filter(event_id=filter.event_id, destination=filter.destination):
        named = [str(filter.event_id)]
        return named if filter.destination is None else [*named, "--to", filter.destination]
    return ["--query", query.write_query(filter)]


# -- tokens ------------------------------------------------------------------------------------


class _Token(msgspec.Struct, array_like=True, frozen=True):
    version: int
    query: str
    force: bool
    fresh_id: bool
    rate: float | None
    total: int
    at: Annotated[datetime, msgspec.Meta(tz=True)]


def encode_token(request: ReplayRequest, seen: PlanSnapshot) -> str:
    token = _Token(
        2, query.write_query(request.filter), request.force, request.fresh_id, request.rate, seen.count, seen.at
    )
    return base64.urlsafe_b64encode(msgspec.json.encode(token)).decode().rstrip("=")


def decode_token(token: str, now: datetime) -> tuple[ReplayRequest, PlanSnapshot]:
    """Return the request and the plan of a token. A token grants nothing: its holder still needs the role."""
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        held = msgspec.json.decode(raw, type=_Token)
        request = ReplayRequest(query.parse(held.query, now), held.force, held.fresh_id, held.rate)
    except (binascii.Error, ValueError, msgspec.MsgspecError, BadRequest):
        raise _not_a_plan() from None
    if held.version != 2 or held.total < 0 or (held.rate is not None and held.rate <= 0):
        raise _not_a_plan()
    return request, PlanSnapshot(held.total, held.at)


def _not_a_plan() -> BadRequest:
    return BadRequest("This is no plan.", hint="Ask for one with POST replays/plan, and hand its `plan` on as it is.")
