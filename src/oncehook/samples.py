"""Trying things out on purpose: a harmless test to an HTTP destination, a signed sample to a source (S22).

A name comes in, what came of it goes out. A test is one attempt by the guarded client, over a connection of its own; it
makes no event and no delivery. A sample goes through the ordinary way in and is an event like any other. The desk holds
one `Trials`; what of the answer may be shown to whom, faces decide.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from oncehook import clock
from oncehook.destinations.base import Destination
from oncehook.destinations.http import HttpDestination
from oncehook.errors import BadRequest, ConfigError, NotFound, Rejected, TestedTooSoon
from oncehook.model import Arrival, Kind, Lease, Mark, Options, Trigger, Turn, new_id, show_id
from oncehook.rules import Spec
from oncehook.sources import Sample, Source
from oncehook.store.base import Store
from oncehook.verify import development_keys

if TYPE_CHECKING:
    from oncehook.ingest import Receipt

_SIMPLE: Final = re.compile(r"\$(?:\.[A-Za-z_][\w-]*)+")


@dataclass(slots=True, frozen=True)
class Answer:
    """What came back, and how long it took."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> dict[str, Any]:
        """The answer's fields; empty when it is not a JSON object."""
        try:
            fields = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return {}
        return fields if isinstance(fields, dict) else {}


def draft(source: Source, kind: str, *, body: bytes | None = None) -> Arrival:
    """A fresh, unsigned arrival of this type: the preset's sample, or JSON in which the rules find something.

    A body of one's own goes with the headers of that type's sample, or with those in which the rules look.
    """
    samples = source.preset.samples if source.preset else {}
    if kind in samples:
        made = _from_sample(source, samples[kind])
        return _fit(source, made) if body is None else replace(made, body=body)
    if body is not None:
        content_type = next(iter(samples.values())).content_type if samples else "application/json"
        headers = [(b"content-type", content_type.encode())]
        _put_rules(source, kind, {}, headers)
        return Arrival(source.name, headers, body)
    if samples:
        raise ConfigError(
            f'The preset "{source.preset and source.preset.name}" has no sample "{kind}".',
            hint=f"It has: {', '.join(samples)}.",
        )
    return _plain_draft(source, kind)


def _from_sample(source: Source, sample: Sample) -> Arrival:
    values = _fresh_values()
    headers = [(b"content-type", sample.content_type.encode())]
    headers += [(name.lower().encode(), _fill(text, values).encode()) for name, text in sample.headers.items()]
    return Arrival(source.name, headers, _fill(sample.body, values).encode(), _fill(sample.query, values).encode())


def _fresh_values() -> dict[str, str]:
    now = clock.now()
    moment = clock.now_utc().isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {
        "{id}": clock.random_bytes(8).hex(),
        "{number}": str(clock.chance.randrange(10**11, 10**12)),
        "{now}": str(int(now)),
        "{now_ms}": str(int(now * 1000)),
        "{now_iso}": moment,
    }


def _fill(text: str, values: Mapping[str, str]) -> str:
    for place, value in values.items():
        text = text.replace(place, value)
    return text


def _fit(source: Source, made: Arrival) -> Arrival:
    """A sample in which a key is found also where the settings look for it elsewhere than the preset."""
    if source.preset is None or source.places.get("key") == source.preset.settings.key or source.rules.read(made).key:
        return made
    headers = list(made.headers)
    try:
        data = msgspec.json.decode(made.body, type=dict[str, Any])
    except msgspec.DecodeError:
        return made
    for part in _first_place(source.places.get("key")):
        _put(data, headers, part, clock.random_bytes(8).hex())
    return replace(made, headers=headers, body=msgspec.json.encode(data))


def _plain_draft(source: Source, kind: str) -> Arrival:
    data: dict[str, Any] = {"type": kind, "created_at": clock.now_utc().isoformat(), "data": {"hello": "world"}}
    headers = [(b"content-type", b"application/json")]
    _put_rules(source, kind, data, headers)
    return Arrival(source.name, headers, msgspec.json.encode(data))


def _put_rules(source: Source, kind: str, data: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    """Put something into the first place that each rule looks at."""
    values = {"key": clock.random_bytes(8).hex(), "subject": f"sample-{clock.chance.randrange(1, 4)}", "type": kind}
    for rule, value in values.items():
        for part in _first_place(source.places.get(rule)):
            _put(data, headers, part, value)


def _first_place(spec: Spec) -> list[str]:
    """The parts of the first place a rule looks at."""
    if spec is None or callable(spec) or isinstance(spec, Mapping):
        return []
    place = spec if isinstance(spec, str) else spec[0]
    return [place] if isinstance(place, str) else list(place)


def _put(data: dict[str, Any], headers: list[tuple[bytes, bytes]], part: str, value: str) -> None:
    part = part.removeprefix("?")
    if part.startswith("header:"):
        headers.append((part.removeprefix("header:").lower().encode(), value.encode()))
    elif _SIMPLE.fullmatch(part):
        *above, last = part.removeprefix("$.").split(".")
        for name in above:
            below = data.get(name)
            data[name] = below if isinstance(below, dict) else {}
            data = data[name]
        data[last] = value


def sign(source: Source, arrival: Arrival, *, url: str | None = None, forge: bool = False) -> Arrival:
    """The arrival as its genuine sender would sign it; with `forge`, as somebody who does not know the secret would."""
    secret = development_keys(source.scheme).signing if forge else source.signing
    return source.scheme.sign(arrival, secret, at=clock.now(), url=url)


def signed_url(source: Source, target: str) -> str:
    """The address that a signature must cover: the registered one, whatever leads to it from here.

    A development source is registered at the development server only, on whichever port that listens.
    """
    registered: str | None = source.settings.public_url
    if registered is None or (source.loopback_only and urlsplit(target).path != urlsplit(registered).path):
        return target
    return registered


def post(url: str, arrival: Arrival, *, timeout: float = 10.0) -> Answer:
    """Send it over HTTP. Raises OSError when nobody answers."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url} is not a web address.", hint="It begins with http:// or https://.")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout)
    query = "&".join(text for text in (parts.query, arrival.query.decode()) if text)
    target = (parts.path or "/") + (f"?{query}" if query else "")
    started = clock.perf()
    try:
        says_host = any(name == b"host" for name, _ in arrival.headers)  # twice would be refused by many
        connection.putrequest(arrival.method, target, skip_host=says_host, skip_accept_encoding=True)
        for name, value in arrival.headers:
            connection.putheader(name.decode("latin-1"), value.decode("latin-1"))
        connection.putheader("content-length", str(len(arrival.body)))
        connection.endheaders(arrival.body)
        response = connection.getresponse()
        return Answer(response.status, response.read(), clock.perf() - started)
    except http.client.HTTPException as error:
        raise OSError(f"the answer was cut off ({error!r})") from error
    finally:
        connection.close()


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
    arrival = sign(source, draft(source, kind), url=source.settings.public_url or address)
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
