"""Common parts of Meta's products: the signature, the handshake, and splitting nested lists.

A splitter is built from `each` and `one_of`; a part without the expected shape becomes `Odd` and does not affect the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

from oncehook.model import Arrival
from oncehook.sources import Odd, Reply, Source
from oncehook.verify import Hmac, same

# Signed over the bytes on the wire, in which Meta escapes non-ASCII text: parsing and re-encoding changes them.
SIGNATURE = Hmac(header="X-Hub-Signature-256", prefix="sha256=")


def handshake(arrival: Arrival, source: Source) -> Reply | None:
    """Answer `GET ?hub.mode=subscribe&hub.verify_token=…&hub.challenge=…` with the challenge if the token is ours."""
    if arrival.method != "GET":
        return None
    query = parse_qs(arrival.query.decode("latin-1"))
    token = query.get("hub.verify_token", [""])[0].encode()
    challenge = query.get("hub.challenge", [""])[0].encode()
    if query.get("hub.mode") != ["subscribe"] or not source.verify_token or not same(token, source.verify_token):
        return None
    # Plain text and nosniff, because the challenge is text chosen by the caller.
    return Reply(200, challenge, ((b"content-type", b"text/plain"), (b"x-content-type-options", b"nosniff")))


Splitter = Callable[[Any], Iterator[Any]]
"""A function from a value to its parts, each a copy that holds one item."""


def each(name: str, below: Splitter) -> Splitter:
    """Build a splitter: an object by its list of this name, then each item by another splitter."""

    def split(whole: Any) -> Iterator[Any]:
        items = whole.get(name) if isinstance(whole, dict) else None
        if not isinstance(items, list) or not items:
            yield Odd(whole)
            return
        for item in items:
            for part in below(item):
                yield put(whole, name, part)

    return split


def itself(item: Any) -> Iterator[Any]:
    """Yield an object as it is."""
    yield item if isinstance(item, dict) else Odd(item)


def one_of(
    whole: dict[str, Any], names: Collection[str], below: Mapping[str, Splitter] = MappingProxyType({})
) -> Iterator[Any]:
    """Yield a copy of the object for every item of the named lists, holding that item alone.

    `below` splits the items of some lists further.
    """
    rest = {name: value for name, value in whole.items() if name not in names}
    for name in names:
        items = whole.get(name)
        for item in items if isinstance(items, list) else ():
            for part in below.get(name, itself)(item):
                yield put(rest, name, part)


def put(whole: dict[str, Any], name: str, part: Any) -> Any:
    """Return a copy of the object with only this part in the named list; an odd part makes it odd."""
    return wrap(part, lambda item: {**whole, name: [item]})


def wrap(part: Any, build: Callable[[Any], Any]) -> Any:
    """Build an envelope around a part; around an odd part it is odd, too."""
    return Odd(build(part.part)) if isinstance(part, Odd) else build(part)
