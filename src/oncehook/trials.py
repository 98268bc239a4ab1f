"""Trying things out on purpose: a harmless test to an HTTP destination, a signed sample to a source (S22).

A name comes in, what came of it goes out. A test is one attempt by the guarded client, over a connection of its own; it
makes no event and no delivery. A sample goes through the ordinary way in and is an event like any other. The desk holds
one `Trials`; what of the answer may be shown to whom, faces decide.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from oncehook import clock, sending
from oncehook.deliveries import Lease, Options, Trigger, Turn
from oncehook.destinations.base import Destination
from oncehook.destinations.http import HttpDestination
from oncehook.errors import BadRequest, ConfigError, NotFound, Rejected, TestedTooSoon
from oncehook.model import Arrival, Kind, Mark, new_id, show_id
from oncehook.sources import Source
from oncehook.store.base import Store

if TYPE_CHECKING:
    from oncehook.receive import Receipt

TakeIn = Callable[[Arrival], Awaitable["Receipt"]]
"""The front door."""

PAUSE: Final = 10.0
"""Seconds between two tests of one destination, per server process."""
TYPE: Final = "oncehook.test"
_HEAD: Final = b"POST /\r\ncontent-type: application/json"


async def nobody_home(arrival: Arrival) -> Receipt:
    """Where nothing is received."""
    raise BadRequest("This process takes nothing in.", hint="Ask the one that runs `oncehook serve`.")


@dataclass(frozen=True, slots=True)
class Tested:
    """How a destination answered a test."""

    destination: str
    address: str
    answered: str
    """The class of the status: `2xx` to `5xx`, or `none`. All that anybody but an admin may learn."""
    status: int | None
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """What became of a sample."""

    source: str
    type: str
    status: int
    """Of the answer that its sender would have got."""
    outcome: str
    event_ids: Sequence[str]


class _Test(Lease):
    """What a test hands to a destination; nothing in the store stands behind it."""

    __slots__ = ()

    @property
    def trigger(self) -> Trigger:
        return Trigger.test


class Trials:
    """Tries out what is set up."""

    def __init__(
        self,
        store: Store,
        sources: Mapping[str, Source],
        destinations: Mapping[str, Destination],
        take_in: TakeIn = nobody_home,
    ) -> None:
        self._store = store
        self._sources = sources
        self._destinations = destinations
        self._take_in = take_in
        self._tested: dict[str, float] = {}
        self._signs: dict[str, bool] = {}

    def within(self, sources: Mapping[str, Source], destinations: Mapping[str, Destination]) -> Trials:
        """Return the same for somebody who sees only these."""
        limited = copy(self)
        limited._sources, limited._destinations = sources, destinations
        return limited

    # -- destinations --------------------------------------------------------------------------

    def can_test(self, name: str) -> bool:
        """Whether a test can be sent there: to a function or a person nothing harmless can be sent."""
        return isinstance(self._destinations.get(name), HttpDestination)

    async def test(self, name: str, *, actor: str) -> Tested:
        """Send one signed test, within the destination's own timeout. Raises NotFound, BadRequest or TestedTooSoon."""
        destination = self._destinations.get(name)
        if destination is None:
            raise NotFound(f'There is no destination "{name[:60]}".')
        if not isinstance(destination, HttpDestination):
            raise BadRequest(f"{name} is no web address; only those can be tested.")
        self._wait_turn(name)
        # Before it goes out: whoever hangs up in the middle has tested all the same.
        await self._store.audit(actor, "test", name, {})
        apart = destination.apart()
        await apart.open()
        started = clock.perf()
        try:
            result = await apart.attempt(_lease(name))
        finally:
            await apart.close()
        evidence = result.evidence
        answered = "none" if evidence.status is None else f"{evidence.status // 100}xx"
        took = clock.perf() - started
        return Tested(name, destination.address, answered, evidence.status, evidence.error, took)

    def _wait_turn(self, name: str) -> None:
        now = clock.steady()
        left = self._tested.get(name, now - PAUSE) + PAUSE - now
        if left > 0:
            raise TestedTooSoon(left)
        self._tested[name] = now

    # -- sources -------------------------------------------------------------------------------

    def samples(self, name: str) -> Sequence[str]:
        """Types of which a genuine sample can be made here; none where we only know how to check a signature."""
        source = self._sources.get(name)
        if source is None or source.preset is None or not source.preset.samples:
            return ()
        if name not in self._signs:
            self._signs[name] = _can_sign(source, next(iter(source.preset.samples)))
        return tuple(source.preset.samples) if self._signs[name] else ()

    async def sample(self, name: str, kind: str = "", *, actor: str) -> Sampled:
        """Send one signed sample of the preset through the ordinary way in. Raises NotFound or BadRequest."""
        source, known = self._sources.get(name), self.samples(name)
        if source is None:
            raise NotFound(f'There is no source "{name[:60]}".')
        if not known:
            raise BadRequest(f"No sample can be made for {name}.", hint="It has none, or only its sender can sign.")
        kind = kind or known[0]
        if kind not in known:
            raise BadRequest(f'There is no sample "{kind[:60]}".', hint=f"There are: {', '.join(known)}.")
        await self._store.audit(actor, "sample", name, {"type": kind})
        receipt = await self._take_in(_signed(source, kind))
        return Sampled(name, kind, receipt.reply.status, receipt.outcome, receipt.event_ids)


def _signed(source: Source, kind: str) -> Arrival:
    """What `oncehook send` would send, as a program of ours hands it over."""
    address = f"/in/{source.path}"
    arrival = sending.sign(source, sending.draft(source, kind), url=source.public_url or address)
    return replace(arrival, headers=[*arrival.headers, (b"user-agent", b"oncehook-sample")], path=address)


def _can_sign(source: Source, kind: str) -> bool:
    """Whether what is signed here is taken for genuine: of some senders we hold only the public key."""
    try:
        source.verifier(_signed(source, kind))
    except (Rejected, ConfigError):
        return False
    return True


def _lease(destination: str) -> Lease:
    event_id = new_id()
    said = {
        "type": TYPE,
        "message": "A test from oncehook. Nothing happened, and nothing needs to be done.",
        "destination": destination,
        "id": show_id(Kind.event, event_id),
        "sent_at": clock.now_utc().isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    return _Test(
        line=event_id,
        delivery_id=event_id,
        head_id=event_id,
        destination_id=0,
        fence=0,
        run=1,
        attempt=1,
        deaths=0,
        turn=Turn.live,
        options=Options.none,
        replay_id=None,
        seconds=0.0,
        event_id=event_id,
        source_id=0,
        source="oncehook",
        type=TYPE,
        key=None,
        subject=None,
        received_at=clock.now_utc(),
        event_at=None,
        marks=Mark.none,
        rank=None,
        rank_scope=None,
        highest_rank=None,
        head=_HEAD,
        body=msgspec.json.encode(said),
    )
