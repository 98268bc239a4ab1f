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
    subject=[["?$.account", "$.data.object.id"], "$.related_object.id"],
    event_time="$.created",
    horizon="30d",
    keep_keys="62d",
    facts={
        "scheme": "github.com/stripe/stripe-python stripe/_webhook.py",
        "key": "github.com/stripe/stripe-python stripe/_webhook.py",
        "horizon": "docs.stripe.com/webhooks (3 days), …/webhooks/process-undelivered-events (resends by hand)",
    },
    samples={
        "invoice.paid": Sample(
            '{"id":"evt_{id}","object":"event","api_version":"2026-09-30","created":{now},"livemode":false,'
            '"type":"invoice.paid","data":{"object":{"id":"in_{id}","object":"invoice","customer":"cus_42",'
            '"amount_paid":4200,"currency":"eur","status":"paid"}}}'
        ),
        "charge.refunded": Sample(
            '{"id":"evt_{id}","object":"event","api_version":"2026-09-30","created":{now},"livemode":false,'
            '"type":"charge.refunded","data":{"object":{"id":"ch_{id}","object":"charge","customer":"cus_42",'
            '"amount_refunded":900,"currency":"eur","refunded":false}}}'
        ),
    },
)
