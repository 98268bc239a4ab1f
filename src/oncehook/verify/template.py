"""The message that a sender signs, as a template: `{timestamp}.{body}`, `v0:{timestamp}:{body}`, `{method}{url}{body}`.

A template is compiled once, when a scheme is built, and rendered per arrival from the received bytes (S1). Places:
{body} {timestamp} {url} {method} {header:name} {query:name}; a place may end in `|lower` or `|decoded`. A part in
square brackets is left out when a place in it is absent; elsewhere, an absent place rejects the arrival. Literal braces
and brackets are doubled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import readers

PLACES: Final = "{body} {timestamp} {url} {method} {header:name} {query:name}"

_TOKEN: Final = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{([^{}\[\]]*)\}|[\[\]{}]|[^\[\]{}]+")
_DECODED: Final = re.compile(rb"%(?:3A|2F|3F|40|21|24|27|28|29|2A|2C|3B)", re.IGNORECASE)
"""The escapes that HubSpot decodes before signing a URL; others stay encoded."""


class Address:
    """The public URL of a source, which some senders sign.

    It comes from the settings, never from the Host or X-Forwarded headers (S16). Only the query is taken from the
    arrival, so that the signature covers it; without one, that of the settings is used.
    """

    __slots__ = ("base", "whole")

    def __init__(self, url: str | None) -> None:
        text = (url or "").partition("#")[0]  # a fragment is never sent, nor signed
        if not text:
            raise ConfigError(
                "This scheme signs the public URL, and none is configured.",
                hint='Set public_url to the whole address registered with the provider, such as "https://…/in/orders".',
            )
        try:
            parts = urlsplit(text)
            host = parts.hostname
            _ = parts.port  # raises for an invalid port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError(f"public_url {text!r} is not a whole http or https address.")
        self.whole = text.encode()
        self.base = text.partition("?")[0].encode()

    def of(self, arrival: Arrival) -> bytes:
        return self.base + b"?" + arrival.query if arrival.query else self.whole


Place = Callable[[Arrival, bytes, Address | None], bytes | None]
"""A function from an arrival, its timestamp and the source's address to the value at one place; None where it is
absent."""
Part = bytes | Place

_PLAIN: Final[dict[str, Place]] = {
    "body": lambda arrival, timestamp, address: arrival.body,
    "timestamp": lambda arrival, timestamp, address: timestamp,
    "url": lambda arrival, timestamp, address: address.of(arrival) if address else None,
    "method": lambda arrival, timestamp, address: arrival.method.upper().encode("ascii", "replace"),
}
_FILTERS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "lower": bytes.lower,
    "decoded": lambda value: _DECODED.sub(lambda match: bytes.fromhex(match[0][1:].decode()), value),
}


class SignedTemplate:
    """A compiled template."""

    __slots__ = ("_segments", "always", "only_body", "text", "uses")

    def __init__(self, text: str) -> None:
        self.text = text
        self.uses: set[str] = set()
        self.always: set[str] = set()
        """The places outside brackets, which every message contains."""
        self._segments = self._compile(text)
        self.only_body = [parts for _, parts in self._segments] == [[_PLAIN["body"]]]

    def render(self, arrival: Arrival, timestamp: bytes, address: Address | None) -> bytes:
        """Return the message that a genuine sender has signed."""
        if self.only_body:
            return arrival.body  # avoids copying a large body
        pieces: list[bytes] = []
        for optional, parts in self._segments:
            values = [part if isinstance(part, bytes) else part(arrival, timestamp, address) for part in parts]
            present = [value for value in values if value is not None]
            if len(present) == len(values):
                pieces += present
            elif not optional:
                raise SignatureInvalid("missing")
        return b"".join(pieces)

    def _compile(self, text: str) -> Sequence[tuple[bool, list[Part]]]:
        segments: list[tuple[bool, list[Part]]] = [(False, [])]
        for match in _TOKEN.finditer(text):
            mark, place = match[0], match[1]
            optional, parts = segments[-1]
            if place is not None:
                parts.append(self._place(place, optional))
            elif mark in ("[", "]"):
                if optional == (mark == "["):
                    raise self._wrong("its brackets do not match")
                segments.append((mark == "[", []))
            elif mark in ("{", "}"):
                raise self._wrong("its braces do not match")
            else:
                parts.append((mark[0] if len(mark) == 2 and mark[0] in "{}[]" else mark).encode())
        if segments[-1][0]:
            raise self._wrong("its brackets do not match")
        return [segment for segment in segments if segment[1]]

    def _place(self, text: str, optional: bool) -> Part:
        name, _, filter_name = text.partition("|")
        kind, _, detail = name.partition(":")
        if name in _PLAIN:
            part = _PLAIN[name]
        elif kind in ("header", "query") and detail:
            part = _at(readers.header(detail) if kind == "header" else readers.query(detail))
        else:
            raise self._wrong(f"{{{text}}} is no place; there are {PLACES}")
        self.uses.add(name.lower())
        if not optional:
            self.always.add(name.lower())
        if not filter_name:
            return part
        if name in ("body", "timestamp"):
            raise self._wrong(f"{{{name}}} is signed as it came and takes no filter")
        if filter_name not in _FILTERS:
            raise self._wrong(f"|{filter_name} is no filter; there are |lower and |decoded")
        return _filter(part, _FILTERS[filter_name])

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(f"The template {self.text!r} cannot be read: {why}.")


def _at(read: readers.Reader) -> Place:
    return lambda arrival, timestamp, address: read(arrival)


def _filter(part: Place, change: Callable[[bytes], bytes]) -> Place:
    def read(arrival: Arrival, timestamp: bytes, address: Address | None) -> bytes | None:
        value = part(arrival, timestamp, address)
        return None if value is None else change(value)

    return read
