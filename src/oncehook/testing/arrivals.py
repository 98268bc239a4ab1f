"""What a provider would send, signed, repeated or forged.

`send` hands a sample to an inbox that runs in the test, or posts it to a server; `signed` gives the request itself,
for a test client of one's own. Both use the samples and the signing of `oncehook send`.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from oncehook import clock, samples
from oncehook.inbox import Inbox
from oncehook.model import Arrival
from oncehook.samples import Answer
from oncehook.settings import development
from oncehook.sources import Source

__all__ = ["Answer", "send", "signed"]

NOWHERE: Final = "http://localhost/"


async def send(
    to: Inbox | str,
    source: Source | str,
    type: str | None = None,
    *,
    repeat: int = 1,
    body: object = None,
    forge: bool = False,
) -> list[Answer]:
    """Send the very same hook `repeat` times, one after the other; one answer for each.

    `to` is a running inbox, or the whole address of a source on some server. `source` is its name in that inbox; for
    an address it is a `Source`, or the name of a preset, signed with the development secret. `body` replaces the
    sample's: bytes as they are, anything else as JSON. With `forge` the signature is that of somebody without the
    secret.

    >>> first, second = await send(inbox, "stripe", "invoice.paid", repeat=2)
    >>> assert (first.json()["status"], second.json()["status"]) == ("accepted", "duplicate")
    """
    if isinstance(to, Inbox) and isinstance(source, str):
        source = to.sources[source]
    registered = source.settings.public_url if isinstance(source, Source) else None
    arrival = signed(source, type, body=body, forge=forge, url=to if isinstance(to, str) else registered)
    return [await hand_over(to, arrival) for _ in range(repeat)]


def signed(
    source: Source | str,
    type: str | None = None,
    *,
    body: object = None,
    forge: bool = False,
    url: str | None = None,
) -> Arrival:
    """One hook as its provider would send it: `headers`, `body` and `query`, fresh at every call.

    Without a type it is the preset's first sample. `url` is where it goes, for providers whose signature covers that.

    >>> hook = signed(inbox.sources["stripe"], "invoice.paid")
    >>> client.post("/hooks/stripe", content=hook.body, headers=hook.headers)
    """
    if isinstance(source, str):
        source = development.source(source)
    kind = type or next(iter(source.preset.samples if source.preset else ()), "hello")
    content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
    draft = samples.draft(source, kind, body=content)
    return samples.sign(source, draft, url=samples.signed_url(source, url or NOWHERE), forge=forge)


async def hand_over(to: Inbox | str, arrival: Arrival) -> Answer:
    """Bring an arrival to an inbox that runs here, or to an address."""
    if isinstance(to, str):
        return await asyncio.to_thread(samples.post, to, arrival)
    started = clock.perf()
    receipt = await to.receive(arrival.source, arrival.headers, arrival.body, query=arrival.query)
    return Answer(receipt.reply.status, receipt.reply.body, clock.perf() - started)
