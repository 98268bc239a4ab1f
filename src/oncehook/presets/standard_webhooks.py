"""Standard Webhooks, and Svix, which sends the same under its own header names: id, time and body are signed together.

The secret says what it is: `whsec_…` is shared (v1), `whpk_…` the sender's public key (v1a, ed25519).
"""

from __future__ import annotations

from oncehook.rules import RuleContext
from oncehook.sources import Preset, Sample
from oncehook.verify import Either, StandardWebhooks


def key(context: RuleContext) -> str | None:
    """Return the id from the header set whose signature was verified: any other id is untrusted."""
    return context.header("webhook-id" if context.header("webhook-signature") else "svix-id")


PRESET = Preset(
    name="standard-webhooks",
    title="Standard Webhooks and Svix",
    scheme=Either(StandardWebhooks(), StandardWebhooks(prefix="svix")),
    # The same in every attempt; the timestamp changes.
    key=key,
    type="$.type",
    # A convention only: `data` is the current object, and objects have ids.
    subject="$.data.id",
    event_time="$.timestamp",
    # 5 s, 5 min, 30 min, 2, 5, 10, 14, 20, 24 h.
    horizon="76h",
    facts={
        "scheme": "github.com/standard-webhooks/standard-webhooks spec/standard-webhooks.md; svix-* names: "
        "github.com/svix/svix-webhooks python/svix/webhooks.py",
        "key": "github.com/standard-webhooks/standard-webhooks spec/standard-webhooks.md (webhook-id)",
        "type": "github.com/standard-webhooks/standard-webhooks spec/standard-webhooks.md (type, timestamp, data)",
        "subject": "unverified (each sender decides what `data` holds)",
        "horizon": "github.com/standard-webhooks/standard-webhooks spec/standard-webhooks.md (75 h 35 min)",
    },
    samples={
        "contact.created": Sample(
            '{"type":"contact.created","timestamp":"{now_iso}","data":{"id":"con_{id}","name":"Zo\\u00eb",'
            '"email":"zoe@example.com"}}'
        ),
        "invoice.paid": Sample(
            '{"type":"invoice.paid","timestamp":"{now_iso}","data":{"id":"inv_{number}","amount":4200,'
            '"currency":"EUR"}}'
        ),
    },
)
