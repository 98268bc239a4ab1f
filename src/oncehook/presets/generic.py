"""Any sender that signs its body with a shared secret: HMAC-SHA256 in hex, in `X-Signature` or `X-Webhook-Signature`.

Another header, encoding or a signed time is a line of `verify`. Only the owner knows what identifies an event, so a
source of this preset does not start without a `key`.
"""

from __future__ import annotations

from oncehook.presets._base import BODY_HMAC
from oncehook.rules import DEFAULT_TYPE
from oncehook.sources import Preset, Sample

PRESET = Preset(
    name="generic",
    title="Generic (HMAC)",
    scheme=BODY_HMAC,
    needs=("secret", "key"),
    type=DEFAULT_TYPE,
    event_time=["$.timestamp", "$.created_at"],
    horizon="7d",
    facts={
        "scheme": "the form that most senders have taken over from docs.github.com/en/webhooks/using-webhooks/"
        "validating-webhook-deliveries; the bare form and X-Webhook-Signature: github.com/EvolutionAPI/evo-nexus "
        "dashboard/backend/routes/triggers.py (source custom)",
        "key": "the sender's own documentation",
        "horizon": "unverified (longer than any sender of the fact sheet retries by itself)",
    },
    samples={
        "order.created": Sample(
            '{"id":"evt_{id}","idempotency_key":"{id}","type":"order.created","created_at":"{now_iso}",'
            '"data":{"id":{number},"customer":"Jos\\u00e9","total":4200}}'
        ),
        "order.paid": Sample(
            '{"id":"evt_{id}","idempotency_key":"{id}","type":"order.paid","created_at":"{now_iso}",'
            '"data":{"id":{number},"customer":"Jos\\u00e9","total":4200}}'
        ),
    },
)
