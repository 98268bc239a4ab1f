"""Stripe: one event per request, signed with its time; retried for three days, resent by hand for thirty."""

from __future__ import annotations

from oncehook.sources import Preset, Sample
from oncehook.verify import Fields, Hmac

PRESET = Preset(
    name="stripe",
    title="Stripe",
    # t=…,v1=…[,v1=…]: while a secret is rolled there are two; the whole whsec_… text is the key, not base64.
    scheme=Hmac(
        header="Stripe-Signature",
        fields=Fields(signature="v1", separator=","),
        timestamp="field:t",
        signed="{timestamp}.{body}",
    ),
    key="$.id",
    type="$.type",
    # Connect: the same object id may exist in two accounts. A thin event has its object beside the data.
    subject=[
        ["$.account", "$.data.object.id"],
        "$.data.object.id",
        ["$.context", "$.related_object.id"],
        "$.related_object.id",
    ],
    event_time="$.created",
    # The number of endpoints that have not answered yet, so it is lower in later attempts.
    volatile=("$.pending_webhooks",),
    # Resends by hand: 15 days in the dashboard, 30 by the CLI.
    horizon="30d",
    keep_keys="62d",
    facts={
        "scheme": "github.com/stripe/stripe-python stripe/_webhook.py",
        "key": "github.com/stripe/stripe-python stripe/_webhook.py",
        "subject": "github.com/stripe/stripe-python stripe/v2/core/_event.py (thin events)",
        "volatile": "docs.stripe.com/api/events/object (what it counts; that a resend shows it is unverified)",
        "horizon": "docs.stripe.com/webhooks (3 days) and "
        "docs.stripe.com/webhooks/process-undelivered-events (resends)",
    },
    samples={
        "invoice.paid": Sample(
            '{"id":"evt_{id}","object":"event","api_version":"2026-09-30","created":{now},"livemode":false,'
            '"pending_webhooks":1,"type":"invoice.paid","data":{"object":{"id":"in_{id}","object":"invoice",'
            '"customer":"cus_42","amount_paid":4200,"currency":"eur","status":"paid"}}}'
        ),
        "charge.refunded": Sample(
            '{"id":"evt_{id}","object":"event","api_version":"2026-09-30","created":{now},"livemode":false,'
            '"pending_webhooks":1,"type":"charge.refunded","data":{"object":{"id":"ch_{id}","object":"charge",'
            '"customer":"cus_42","amount_refunded":900,"currency":"eur","refunded":false}}}'
        ),
    },
)
