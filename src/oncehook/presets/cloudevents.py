"""CloudEvents over HTTP: one event in the body (structured), in the headers (binary), or many in an array (batched).

The sender shows a token, in the Authorization header or in the query. It may first ask by OPTIONS for permission to
send. It expects 202 for an accepted event that is not processed yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from oncehook.model import Arrival
from oncehook.payload import text_of
from oncehook.presets import _base
from oncehook.rules import Reader, RuleContext, header
from oncehook.sources import Preset, Reply, Sample, Source
from oncehook.verify import Either, Token

STRUCTURED: Final = "application/cloudevents+json"
BATCHED: Final = "application/cloudevents-batch+json"
_ORIGIN: Final = re.compile(r"[A-Za-z0-9.-]{1,253}")
_RATE: Final = re.compile(r"[1-9][0-9]{0,8}")


def split(data: Any, arrival: Arrival) -> Iterator[Any]:
    """Yield each event of a batch; an array in any other mode is the data of one event."""
    if RuleContext(arrival, arrival.body, data).media_type == BATCHED:
        yield from _base.one_by_one(data, arrival)
    else:
        yield data


def attribute(name: str) -> Reader:
    """Build a reader of a context attribute in any of the three modes."""

    def read(context: RuleContext) -> Any:
        if not (context.media_type or "").startswith("application/cloudevents"):
            return _decode(context.header(f"ce-{name}"))
        data = context.data
        return (data[0] if isinstance(data, list) else data)[name]

    return read


def _decode(value: str | None) -> str | None:
    """Decode a header's value: unquote it, then percent-decode it once, to UTF-8."""
    if value is None:
        return None
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    return unquote(value, errors="strict")


_id, _source, _subject, _partition = (attribute(name) for name in ("id", "source", "subject", "partitionkey"))


def key(context: RuleContext) -> tuple[Any, ...] | None:
    """Return source and id: an id alone is unique within its source only."""
    parts = (text_of(_source(context)), text_of(_id(context)))
    return parts if all(parts) else None


def subject(context: RuleContext) -> Any:
    """Return the partition key, which exists for ordering; otherwise source and subject."""
    found = _present(_partition, context)
    if found:
        return found
    about = _present(_subject, context)
    return (_source(context), about) if about else None


def _present(read: Reader, context: RuleContext) -> Any:
    try:
        return read(context)
    except (LookupError, ValueError):
        return None


def handshake(arrival: Arrival, source: Source) -> Reply | None:
    """Consent to `OPTIONS` with `WebHook-Request-Origin` from a sender that has the token.

    Without the token anybody could have a sender flood us. The request goes to the registered address, so a token in
    its query is present.
    """
    origin = header(arrival.headers, b"webhook-request-origin")
    if arrival.method != "OPTIONS" or not origin or not _ORIGIN.fullmatch(origin):
        return None
    source.verifier(arrival)
    rate = header(arrival.headers, b"webhook-request-rate") or ""
    allowed = (
        (b"allow", b"POST"),
        (b"webhook-allowed-origin", origin.encode()),
        (b"webhook-allowed-rate", rate.encode() if _RATE.fullmatch(rate) else b"*"),
    )
    return Reply(200, b"", allowed)


_EVENT: Final = (
    '{"specversion":"1.0","id":"%s{id}","source":"/shops/lisbon","type":"com.example.order.%s",'
    '"subject":"orders/{number}","time":"{now_iso}","datacontenttype":"application/json",'
    '"data":{"order":{number},"customer":"Jos\\u00e9","total":4200}}'
)

PRESET = Preset(
    name="cloudevents",
    title="CloudEvents",
    scheme=Either(Token(place="header:Authorization", prefix="Bearer "), Token(place="query:access_token")),
    # A token says who sends, and nothing about what.
    body_authenticated=False,
    key_authenticated=False,
    handshake=handshake,
    split=split,
    key=key,
    type=attribute("type"),
    subject=subject,
    event_time=attribute("time"),
    accepted=202,
    # The specification leaves retries to the sender: three days is a guess.
    horizon="3d",
    facts={
        "scheme": "github.com/cloudevents/spec cloudevents/http-webhook.md 3",
        "handshake": "github.com/cloudevents/spec cloudevents/http-webhook.md 4",
        "split": "github.com/cloudevents/spec cloudevents/bindings/http-protocol-binding.md 3.3",
        "key": "github.com/cloudevents/spec cloudevents/spec.md (id)",
        "subject": "github.com/cloudevents/spec cloudevents/extensions/partitioning.md, cloudevents/spec.md (subject)",
        "accepted": "github.com/cloudevents/spec cloudevents/http-webhook.md 2.2",
        "horizon": "unverified (each sender has its own)",
    },
    samples={
        "com.example.order.placed": Sample(_EVENT % ("P", "placed"), content_type=f"{STRUCTURED}; charset=utf-8"),
        "com.example.order.shipped": Sample(
            '{"order":{number},"carrier":"Correios"}',
            {
                "ce-specversion": "1.0",
                "ce-id": "S{id}",
                "ce-source": "/shops/S%C3%A3o%20Paulo",
                "ce-type": "com.example.order.shipped",
                "ce-subject": "orders/{number}",
                "ce-time": "{now_iso}",
            },
        ),
        "batch": Sample(
            "[" + ",".join(_EVENT % pair for pair in (("A", "placed"), ("B", "packed"), ("C", "shipped"))) + "]",
            content_type=BATCHED,
        ),
    },
)
