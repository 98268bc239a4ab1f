"""n8n, and likewise Zapier and Make: a flow that somebody built, so its author decides what it sends and how.

Only a flow that signs is verified, and only one that sends a key has one: otherwise events are stored as they come,
marked unkeyed, and a run repeated by hand is a new event.
"""

from __future__ import annotations

from oncehook.presets._base import BODY_HMAC
from oncehook.sources import Preset, Sample
from oncehook.verify import Either, Token

PRESET = Preset(
    name="n8n",
    title="n8n, Zapier, Make",
    # A header of one's own is easy in all three; n8n's Crypto node can sign the body as well.
    scheme=Either(BODY_HMAC, Token(place="header:Authorization", prefix="Bearer ")),
    body_authenticated=False,
    key_authenticated=False,
    # The body goes first: a flow's signature covers the body, never a header.
    key=[
        "$.idempotency_key",
        "$.messageId",
        "$.data.idempotency_key",
        "$.data.messageId",
        ["$.eventName", "$.id"],  # log streaming: the only events that n8n sends by itself
        "header:Idempotency-Key",
    ],
    on_missing_key="accept",
    type=["$.type", "$.event", "$.event_type", "$.eventName"],
    event_time=["$.timestamp", "$.created_at", "$.data.timestamp", "$.ts"],
    preview=["$.text", "$.message", "$.command", "$.data.text", "$.data.message", "$.data.command"],
    # The flow's own retries take minutes; people repeat runs days later.
    horizon="7d",
    facts={
        "scheme": "docs.n8n.io/integrations/builtin/core-nodes/n8n-nodes-base.httprequest (credentials; none built in)",
        "key": "the places that flows seen in the field use; n8n's own log streaming has an id per event",
        "horizon": "unverified (retryOnFail, maxTries, waitBetweenTries; runs repeated by hand)",
    },
    samples={
        "lead.created": Sample(
            '{"type":"lead.created","idempotency_key":"{id}","timestamp":"{now_iso}",'
            '"data":{"name":"Jos\\u00e9","email":"jose@example.com"}}'
        ),
        "message.received": Sample(
            '{"event":"message.received","data":{"messageId":"3EB0{id}","from":"5511988880142",'
            '"text":"Ol\\u00e1!","timestamp":{now}}}'
        ),
        "order.paid": Sample(
            '{"type":"order.paid","data":{"idempotency_key":"order-{number}-paid","order":{number},"total":4200}}'
        ),
    },
)
