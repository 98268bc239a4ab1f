"""What Meta's products share: the signature, the handshake, and the nesting entry → changes → value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs

from oncehook.model import Arrival
from oncehook.sources import Reply, Source
from oncehook.verify import Hmac, same

# Over the bytes on the wire, where Meta escapes everything outside ASCII: parsing and writing it again breaks it.
SIGNATURE = Hmac(header="X-Hub-Signature-256", prefix="sha256=")


def handshake(arrival: Arrival, source: Source) -> Reply | None:
    """`GET ?hub.mode=subscribe&hub.verify_token=…&hub.challenge=…`: the challenge back when the token is ours."""
    if arrival.method != "GET":
        return None
    asked = parse_qs(arrival.query.decode("latin-1"))
    token = asked.get("hub.verify_token", [""])[0].encode("latin-1")
    challenge = asked.get("hub.challenge", [""])[0].encode("latin-1")
    if asked.get("hub.mode") != ["subscribe"] or not source.verify_token or not same(token, source.verify_token):
        return Reply(403, b"")
    # Plain text and nosniff: the challenge is the caller's own text.
    return Reply(200, challenge, ((b"content-type", b"text/plain"), (b"x-content-type-options", b"nosniff")))


def one_of_each(data: Any, lists: tuple[str, ...]) -> Iterable[Any]:
    """One envelope per item of the named lists in each change's value; a change without any stays whole."""
    for entry in data["entry"]:
        for change in entry["changes"]:
            value = change.get("value")
            known = value if isinstance(value, dict) else {}
            found = [(name, item) for name in lists for item in known.get(name) or ()]
            beside = {name: part for name, part in known.items() if name not in lists}
            for name, item in found:
                yield _envelope(data, entry, {**change, "value": {**beside, name: [item]}})
            if not found:
                yield _envelope(data, entry, change)


def _envelope(data: dict[str, Any], entry: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return {**data, "entry": [{**entry, "changes": [change]}]}
