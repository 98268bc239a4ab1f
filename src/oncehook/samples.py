"""Signed samples for a source, and a harmless test for an HTTP destination (S22).

A test is one attempt by the guarded client, over a connection of its own; it makes no event and no delivery. A sample
is received like any other arrival and becomes an event.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from oncehook import clock
from oncehook.destinations.base import TestableDestination
from oncehook.errors import ConfigError, Rejected
from oncehook.human import suggest
from oncehook.model import (
    Arrival,
    DeliveryId,
    Lease,
    LeasedDelivery,
    Mark,
    Options,
    Priority,
    StoredEvent,
    Trigger,
    new_id,
)
from oncehook.rules import Spec
from oncehook.sources import Sample, Source
from oncehook.verify import development_keys

_SIMPLE: Final = re.compile(r"\$(?:\.[A-Za-z_][\w-]*)+")


@dataclass(slots=True, frozen=True)
class Answer:
    """The answer to a sample, and how long it took."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> dict[str, Any]:
        """Return the fields of the answer; empty when it is not a JSON object."""
        try:
            fields = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return {}
        return fields if isinstance(fields, dict) else {}


def draft(source: Source, kind: str, *, body: bytes | None = None) -> Arrival:
    """Build an unsigned arrival of this type: the preset's sample, or JSON in which the rules find something.

    A body of one's own is sent with the headers of that type's sample, or with those that the rules read.
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
            hint=suggest(kind, samples),
        )
    return _plain_draft(source, kind)


def change(arrival: Arrival, text: str) -> Arrival:
    """Change one value of an unsigned arrival's body: `data.object.amount=5` of JSON, `From=+1555` of a form.

    A value that is JSON is taken as such, anything else as text. Numbers in a path are places in a list. Objects on the
    way are made where they are missing. Raises ConfigError.
    """
    path, sign, value = text.partition("=")
    steps = path.removeprefix("$.").split(".")
    if not sign or not all(steps):
        raise ConfigError(f'"{text[:80]}" changes nothing.', hint="Write PATH=VALUE, as in data.object.amount=5.")
    if any(name == b"content-type" and b"form" in kind for name, kind in arrival.headers):
        pairs = [pair for pair in parse_qsl(arrival.body.decode(), keep_blank_values=True) if pair[0] != path]
        return replace(arrival, body=urlencode([*pairs, (path, value)]).encode())
    try:
        data = msgspec.json.decode(arrival.body)
    except msgspec.DecodeError:
        raise ConfigError("This body is neither JSON nor a form, so no value in it can be changed.") from None
    try:
        new = msgspec.json.decode(value)
    except msgspec.DecodeError:
        new = value
    _put_at(data, steps, new, path)
    return replace(arrival, body=msgspec.json.encode(data))


def _put_at(data: Any, steps: Sequence[str], value: object, path: str) -> None:
    for step, below in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(data, list) and step.isdecimal() and int(step) < len(data):
            place: Any = int(step)
        elif isinstance(data, dict):
            place = step
        else:
            raise ConfigError(f'There is no "{step}" on the way to {path}.', hint="Look at the sample's body first.")
        if below is None:
            data[place] = value
        else:
            data = data.setdefault(place, {}) if isinstance(data, dict) else data[place]


def _from_sample(source: Source, sample: Sample) -> Arrival:
    values = _fresh_values()
    headers = [(b"content-type", sample.content_type.encode())]
    headers += [(name.lower().encode(), _fill(text, values).encode()) for name, text in sample.headers.items()]
    return Arrival(source.name, headers, _fill(sample.body, values).encode(), _fill(sample.query, values).encode())


_drawn: Final = itertools.count()
"""Samples that were made in this process."""


def _fresh_values() -> dict[str, str]:
    now = clock.now()
    moment = clock.now_utc().isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {
        "{id}": clock.random_bytes(8).hex(),
        "{number}": str(clock.chance.randrange(10**11, 10**12)),
        "{now}": str(int(now)),
        # Two samples of one moment differ, because for some senders the time is what tells two events apart.
        "{now_ms}": str(int(now * 1000) + next(_drawn) % 1000),
        "{now_iso}": moment,
    }


def _fill(text: str, values: Mapping[str, str]) -> str:
    for place, value in values.items():
        text = text.replace(place, value)
    return text


def _fit(source: Source, made: Arrival) -> Arrival:
    """Put a key into a sample where the settings look for it in another place than the preset."""
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
    """Put a value into the first place of each rule."""
    values = {"key": clock.random_bytes(8).hex(), "subject": f"sample-{clock.chance.randrange(1, 4)}", "type": kind}
    for rule, value in values.items():
        for part in _first_place(source.places.get(rule)):
            _put(data, headers, part, value)


def _first_place(spec: Spec) -> list[str]:
    """Return the parts of the first place a rule looks at."""
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
    """Sign an arrival as its genuine sender would; with `forge`, as somebody who does not know the secret would."""
    secret = development_keys(source.scheme).signing if forge else source.signing
    return source.scheme.sign(arrival, secret, at=clock.now(), url=url)


def signed_url(source: Source, target: str) -> str:
    """Return the URL that a signature must cover: the registered one, whichever URL it is posted to.

    A development source is registered at the development server, on whichever port that uses.
    """
    registered: str | None = source.settings.public_url
    if registered is None or (source.loopback_only and urlsplit(target).path != urlsplit(registered).path):
        return target
    return registered


def post(url: str, arrival: Arrival, *, timeout: float = 10.0) -> Answer:
    """Send an arrival over HTTP. Raises OSError when nobody answers."""
    import http.client

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url} is not a web address.", hint="It begins with http:// or https://.")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout)
    query = "&".join(text for text in (parts.query, arrival.query.decode()) if text)
    target = (parts.path or "/") + (f"?{query}" if query else "")
    started = clock.perf()
    try:
        says_host = any(name == b"host" for name, _ in arrival.headers)  # many servers refuse two Host headers
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


TEST_TYPE: Final = "oncehook.test"


@dataclass(frozen=True, slots=True)
class Tested:
    """The answer of a destination to a test."""

    destination: str
    address: str
    answered: str
    """The class of the status, `2xx` to `5xx`, or `none`: all that anybody but an admin sees."""
    status: int | None
    error: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of a sample."""

    source: str
    type: str
    status: int
    """Status of the answer that its sender would have got."""
    outcome: str
    event_ids: Sequence[str]


class _TestLease(Lease):
    """The lease of a test, which the store does not know."""

    @property
    def trigger(self) -> Trigger:
        return Trigger.test


async def send_test(destination: TestableDestination) -> Tested:
    """Send one signed test over a connection of its own, within the destination's timeout."""
    apart = destination.apart()
    await apart.open()
    started = clock.perf()
    try:
        evidence = (await apart.attempt(_test_lease(destination.name))).evidence
    finally:
        await apart.close()
    answered = "none" if evidence.status is None else f"{evidence.status // 100}xx"
    took = clock.perf() - started
    return Tested(destination.name, destination.address, answered, evidence.status, evidence.error, took)


def build_signed(source: Source, kind: str, body: bytes | None = None) -> Arrival:
    """Build the arrival that `oncehook send` would send, as a value for `receive`; on request with another body."""
    address = f"/in/{source.path}"
    arrival = sign(source, draft(source, kind, body=body), url=source.settings.public_url or address)
    return replace(arrival, headers=[*arrival.headers, (b"user-agent", b"oncehook-sample")], path=address)


def can_sign(source: Source, kind: str) -> bool:
    """Tell whether we can sign for this source: of some senders we hold only the public key."""
    try:
        source.verifier(build_signed(source, kind))
    except (Rejected, ConfigError):
        return False
    return True


def _test_lease(destination: str) -> Lease:
    event_id = new_id()
    content = {
        "type": TEST_TYPE,
        "message": "A test from oncehook. Nothing happened, and nothing needs to be done.",
        "destination": destination,
        "id": str(event_id),
        "sent_at": clock.now_utc().isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    now, body = clock.now_utc(), msgspec.json.encode(content)
    head = b"POST /\r\ncontent-type: application/json"
    event = StoredEvent(event_id, 0, "oncehook", TEST_TYPE, None, None, now, None, Mark.none, None, None, head, body)
    delivery = LeasedDelivery(DeliveryId(event_id), 0, 1, 1, Options.none, None)
    return _TestLease(delivery, event, event_id, delivery.id, fence=0, deaths=0, priority=Priority.live, seconds=0.0)
