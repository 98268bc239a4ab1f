"""What Meta's products share: the signature, the handshake, and taking nested lists apart.

A splitter is put together from `each` and `one_of`; what does not have the expected shape becomes `Odd` and never
costs its neighbours anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

from oncehook.model import Arrival
from oncehook.sources import Odd, Reply, Source
from oncehook.verify import Hmac, same

# Over the bytes on the wire, where Meta escapes everything outside ASCII: parsing and writing it again breaks it.
SIGNATURE = Hmac(header="X-Hub-Signature-256", prefix="sha256=")


def handshake(arrival: Arrival, source: Source) -> Reply | None:
    """`GET ?hub.mode=subscribe&hub.verify_token=…&hub.challenge=…`: the challenge back when the token is ours."""
    if arrival.method != "GET":
        return None
    asked = parse_qs(arrival.query.decode("latin-1"))
    token = asked.get("hub.verify_token", [""])[0].encode()
    challenge = asked.get("hub.challenge", [""])[0].encode()
    if asked.get("hub.mode") != ["subscribe"] or not source.verify_token or not same(token, source.verify_token):
        return None
    # Plain text and nosniff: the challenge is the caller's own text.
    return Reply(200, challenge, ((b"content-type", b"text/plain"), (b"x-content-type-options", b"nosniff")))


Apart = Callable[[Any], Iterator[Any]]
"""From a value to its parts, each a copy that holds one item."""


def each(name: str, below: Apart) -> Apart:
    """Takes an object apart along its list of this name, and every item of that in turn."""

    def apart(whole: Any) -> Iterator[Any]:
        items = whole.get(name) if isinstance(whole, dict) else None
        if not isinstance(items, list) or not items:
            yield Odd(whole)
            return
        for item in items:
            for part in below(item):
                yield put(whole, name, part)

    return apart


def itself(item: Any) -> Iterator[Any]:
    """Leaves an object as it is."""
    yield item if isinstance(item, dict) else Odd(item)


def one_of(
    whole: dict[str, Any], names: Collection[str], below: Mapping[str, Apart] = MappingProxyType({})
) -> Iterator[Any]:
    """A copy of the object for every item of the named lists, holding that item and no other.

    `below` takes the items of some lists apart in turn.
    """
    rest = {name: value for name, value in whole.items() if name not in names}
    for name in names:
        items = whole.get(name)
        for item in items if isinstance(items, list) else ():
            for part in below.get(name, itself)(item):
                yield put(rest, name, part)


def put(whole: dict[str, Any], name: str, part: Any) -> Any:
    """A copy of the object with a part alone in the named list; around an odd part it is odd as well."""
    return Odd({**whole, name: [part.part]}) if isinstance(part, Odd) else {**whole, name: [part]}
