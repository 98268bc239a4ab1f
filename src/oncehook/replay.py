"""A replay before it is made: what is asked for, its plan, and the token that stands for a plan.

The desk plans and starts replays with these; the store fixes their items and workers work them off. A token holds the
whole plan (its query with fixed times, its options, its number, its moment), so that no plan has to be kept anywhere.
Who discards many dead letters says yes to such a plan, too.
"""

from __future__ import annotations

import base64
import binascii
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Final

import msgspec

from oncehook import query
from oncehook.destinations.base import Destination
from oncehook.errors import BadRequest
from oncehook.human import show_rate
from oncehook.model import (
    DeliveryStatus,
    Filter,
    Kind,
    Level,
    Preview,
    ReplayPlan,
    Seen,
    StoredDelivery,
    read_id,
    show_id,
    subject_hash,
)

MOST_IDS: Final = 500
"""Deliveries that may be named one by one."""
BEHIND: Final = "Live traffic goes first; the order within a subject is kept among what is replayed."


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Which deliveries to replay, and how."""

    filter: Filter
    force: bool = False
    fresh_id: bool = False
    rate: float | None = None
    """Deliveries a second at most."""

    def without_subject(self) -> ReplayRequest:
        """Return it with a hash in the place of the subject's text."""
        subject = self.filter.subject
        hidden = None if subject is None else f"#{subject_hash(subject)}"
        return replace(self, filter=replace(self.filter, subject=hidden))

    def about(self) -> dict[str, object]:
        """The wish in words, to be kept with the replay."""
        return {
            "query": query.fixed(self.filter),
            "force": self.force,
            "fresh_id": self.fresh_id,
            "rate": None if self.rate is None else show_rate(self.rate),
            "command": command(self),
        }


@dataclass(frozen=True, slots=True)
class Recipient:
    """Who would get it."""

    destination: str
    count: int
    kind: str
    """`handler`, `http` or `sender`; where it is not configured here, `elsewhere` when a worker has it, else `gone`."""
    address: str
    paused: bool
    failing: bool
    """Its breaker is open, or its last deliveries have failed."""
    changed: int
    """How many of these were first delivered to another address than this."""

    @property
    def moved(self) -> str:
        """That it goes elsewhere than the first time, as a sentence."""
        many = "This was" if self.changed == self.count == 1 else f"{self.changed:,} of {self.count:,} were"
        return f"{many} first delivered to another address than {self.destination} has now."

    @property
    def warnings(self) -> list[str]:
        """What stands against replaying to it now."""
        said = []
        if self.kind == "gone":
            said.append(f"{self.destination} is no longer configured: nobody would work these.")
        elif self.paused:
            said.append(f"{self.destination} is paused: nothing is sent before it is resumed.")
        elif self.failing:
            said.append(f"{self.destination} is failing right now: these may become dead letters again.")
        return [*said, self.moved] if self.changed else said


@dataclass(frozen=True, slots=True)
class Plan:
    """What a replay would do; nothing has been done yet."""

    token: str
    wish: ReplayRequest
    total: int
    recipients: Sequence[Recipient]
    by_status: Mapping[DeliveryStatus, int]
    left_out: Mapping[DeliveryStatus, int]
    oldest: datetime | None
    newest: datetime | None
    sample: Sequence[StoredDelivery]
    previews: Mapping[bytes, Preview]
    """Of those of the sample that say something to a person: who gets it, and what; by delivery."""
    expected_seconds: float | None
    """How long it takes at the rate; None: as fast as the destinations go."""

    @property
    def notes(self) -> list[str]:
        """What to know before saying yes."""
        return [*self.visible, BEHIND, *self.warnings]

    @property
    def visible(self) -> list[str]:
        """What those who get it see of it."""
        said = []
        if any(recipient.kind == "sender" for recipient in self.recipients):
            said.append("Whoever got a message already gets it a second time: WhatsApp cannot tell.")
        return said if self.goes_only_to("sender") else [*said, *self._what_receivers_see()]

    @property
    def warnings(self) -> list[str]:
        """What stands against it now."""
        return [said for recipient in self.recipients for said in recipient.warnings]

    @property
    def can_work(self) -> bool:
        """Whether there is anything to replay, and somebody who would work it."""
        return self.total > 0 and not self.goes_only_to("gone")

    def goes_only_to(self, kind: str) -> bool:
        """Whether all of it goes to destinations of this kind."""
        return bool(self.recipients) and all(recipient.kind == kind for recipient in self.recipients)

    def _what_receivers_see(self) -> list[str]:
        if self.goes_only_to("handler"):
            key = "a new idempotency_key" if self.wish.fresh_id else "the same idempotency_key as before"
            said = [f"The handler gets the same event with {key}; its run tells that it is a replay."]
        else:
            fresh = "a new webhook-id" if self.wish.fresh_id else "the same webhook-id and Idempotency-Key as before"
            said = [f"The receiver sees the same body with {fresh}, and Oncehook-Replay."]
        if not self.wish.fresh_id:
            said.append("One that deduplicates may leave it out; a fresh id (--fresh-id) would be new to it.")
        return said


def build_plan(
    wish: ReplayRequest,
    counted: ReplayPlan,
    destinations: Mapping[str, Destination],
    levels: Mapping[str, Level],
    previews: Mapping[bytes, Preview],
    elsewhere: Collection[str] = (),
) -> Plan:
    """The plan of a wish: what the store has counted, and whom it would reach. `elsewhere` are the destinations that
    workers of other processes have."""
    counts = counted.by_destination
    return Plan(
        token=encode_token(wish, Seen(counted.total, counted.at)),
        wish=wish,
        total=counted.total,
        recipients=[
            _recipient(
                name,
                n,
                destinations.get(name),
                levels.get(name, Level()),
                counted.changed.get(name, 0),
                "elsewhere" if name in elsewhere else "gone",
            )
            for name, n in counts.items()
        ],
        by_status=counted.by_status,
        left_out=counted.left_out,
        oldest=counted.oldest,
        newest=counted.newest,
        sample=counted.sample,
        previews=previews,
        expected_seconds=_expected(wish, counts, destinations),
    )


def _recipient(
    name: str, count: int, destination: Destination | None, level: Level, changed: int, otherwise: str
) -> Recipient:
    return Recipient(
        destination=name,
        count=count,
        kind=otherwise if destination is None else destination.kind,
        address="" if destination is None else destination.address,
        paused=level.paused_at is not None,
        failing=level.failures > 0 or level.open_until is not None,
        changed=0 if destination is None else changed,
    )


def _expected(wish: ReplayRequest, counts: Mapping[str, int], destinations: Mapping[str, Destination]) -> float | None:
    """At the rate that was asked for, or at that of the slowest destination: whichever takes longer."""
    spans = [] if wish.rate is None else [sum(counts.values()) / wish.rate]
    for name, count in counts.items():
        destination = destinations.get(name)
        if destination is not None and destination.terms.rate:
            spans.append(count / destination.terms.rate)
    return max(spans, default=None)


def ended(filter: Filter, now: datetime) -> Filter:
    """The filter with an end: what arrives after the plan was made is not meant by it."""
    if filter.until is not None or filter.ids is not None or filter.event_id is not None:
        return filter
    # Received times are the store's, which may be a little ahead of ours: better one event more than one too few.
    return replace(filter, until=now.replace(microsecond=0) + timedelta(seconds=2))


def some_ids(ids: Sequence[bytes], filter: Filter) -> tuple[bytes, ...]:
    """Deliveries that are named one by one, each once. None at all is no way of saying "all"."""
    if filter.ids is not None:
        raise BadRequest("The deliveries are named twice, in `ids` and in the query.")
    if not ids or len(ids) > MOST_IDS:
        raise BadRequest(f"Name from 1 to {MOST_IDS} deliveries; for more, use a query.")
    return tuple(dict.fromkeys(ids))


def some_id(kind: Kind, text: str) -> bytes:
    """The id that a person wrote."""
    try:
        return read_id(kind, text)
    except ValueError:
        raise BadRequest(f"{text[:40]!r} is no id.", hint="Ids begin with evt_ or dlv_ and have 32 digits.") from None


def command(wish: ReplayRequest) -> str:
    """The same as a command to copy."""
    words = ["oncehook", "replay", *_subject_of(wish.filter)]
    if wish.force:
        words.append("--force")
    if wish.fresh_id:
        words.append("--fresh-id")
    if wish.rate is not None:
        words += ["--rate", show_rate(wish.rate)]
    return shlex.join(words)


def _subject_of(filter: Filter) -> list[str]:
    if filter.ids is not None and filter == Filter(ids=filter.ids):
        return [show_id(Kind.delivery, one) for one in filter.ids]
    if filter.event_id is not None and filter == Filter(event_id=filter.event_id, destination=filter.destination):
        named = [show_id(Kind.event, filter.event_id)]
        return named if filter.destination is None else [*named, "--to", filter.destination]
    return ["--query", query.fixed(filter)]


# -- tokens ------------------------------------------------------------------------------------


class _Token(msgspec.Struct, array_like=True, frozen=True):
    version: int
    query: str
    force: bool
    fresh_id: bool
    rate: float | None
    total: int
    at: Annotated[datetime, msgspec.Meta(tz=True)]


def encode_token(wish: ReplayRequest, seen: Seen) -> str:
    """The token that stands for a plan."""
    token = _Token(2, query.fixed(wish.filter), wish.force, wish.fresh_id, wish.rate, seen.count, seen.at)
    return base64.urlsafe_b64encode(msgspec.json.encode(token)).decode().rstrip("=")


def decode_token(token: str, now: datetime) -> tuple[ReplayRequest, Seen]:
    """The wish that a token stands for, and what its plan has shown.

    It grants nothing: its holder needs the right all the same.
    """
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        held = msgspec.json.decode(raw, type=_Token)
        wish = ReplayRequest(query.parse(held.query, now), held.force, held.fresh_id, held.rate)
    except (binascii.Error, ValueError, msgspec.MsgspecError, BadRequest):
        raise _not_a_plan() from None
    if held.version != 2 or held.total < 0 or (held.rate is not None and held.rate <= 0):
        raise _not_a_plan()
    return wish, Seen(held.total, held.at)


def _not_a_plan() -> BadRequest:
    return BadRequest("This is no plan.", hint="Ask for one with POST replays/plan, and hand its `plan` on as it is.")
