"""What senders of JSON arrays share: each element is an event of its own, in an array that holds it alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oncehook.model import Arrival
from oncehook.sources import Odd


def one_by_one(data: Any, arrival: Arrival) -> Iterator[Any]:
    """The objects of an array; whatever else stands among them is odd, and a body that is no array stays whole."""
    for item in data if isinstance(data, list) else ():
        yield [item] if isinstance(item, dict) else Odd([item])
    if not isinstance(data, list):
        yield data
