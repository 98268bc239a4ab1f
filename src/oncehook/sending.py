"""Sending as a genuine sender would: a sample that fits a source, signed by the source's own scheme.

Used by `oncehook send`, by the dashboard's samples, by the demo and by tests.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError
from oncehook.keys import Spec
from oncehook.model import Arrival
from oncehook.sources import Sample, Source
from oncehook.verify import development_keys

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
    if source.preset is None or source.places.get("key") == source.preset.key or source.rules.read(made).key:
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
    registered = source.public_url
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
