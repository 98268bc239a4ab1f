"""Common parts of presets: reading and splitting bodies, filling samples, and the signature of simple senders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from oncehook import payload
from oncehook.model import Arrival
from oncehook.sources import Odd, Sample
from oncehook.verify import Either, Hmac


def read_body(arrival: Arrival) -> Any:
    """Return the parsed body; None where it cannot be read."""
    try:
        return payload.parse(arrival.body)
    except payload.Unreadable:
        return None


def fill(envelope: str, *parts: object) -> Sample:
    """Build a sample: an envelope around these parts."""
    return Sample(envelope % parts)


def one_by_one(data: Any, arrival: Arrival) -> Iterator[Any]:
    """Yield the objects of an array; other items in it as `Odd`; a body that is no array as a whole."""
    for item in data if isinstance(data, list) else ():
        yield [item] if isinstance(item, dict) else Odd([item])
    if not isinstance(data, list):
        yield data


BODY_HMAC: Final = Either(
    Hmac(header="X-Signature", prefix="sha256="),
    Hmac(header="X-Signature"),
    Hmac(header="X-Webhook-Signature", prefix="sha256="),
    Hmac(header="X-Webhook-Signature"),
    every=True,
)
"""HMAC-SHA256 of the raw body in hex, bare or after `sha256=`, in one of the two usual headers."""
