"""Square: the signature covers the notification URL, as it was registered, and the body; retried for three days."""

from __future__ import annotations

from oncehook.sources import Preset, Sample
from oncehook.verify import Hmac

PRESET = Preset(
    name="square",
    title="Square",
    scheme=Hmac(header="x-square-hmacsha256-signature", encoding="base64", signed="{url}{body}"),
    needs=("secret", "public_url"),
    key="$.event_id",
    type="$.type",
    # catalog.version.updated and the like concern the merchant as a whole.
    subject=[["$.merchant_id", "$.data.type", "$.data.id"], "$.merchant_id"],
    event_time="$.created_at",
    horizon="3d",
    # Square waits 10 s.
    budget="5s",
    facts={
        "scheme": "github.com/square/square-python-sdk square/utils/webhooks_helper.py",
        "key": "developer.squareup.com/docs/webhooks/step4manage",
        "subject": "developer.squareup.com/docs/webhooks/step4manage",
        "horizon": "developer.squareup.com/docs/webhooks-api/delivery-sla (72 hours; 24 in newer material)",
        "budget": "developer.squareup.com/docs/webhooks/step4manage (10 s)",
    },
    samples={
        "payment.updated": Sample(
            '{"merchant_id":"MLN42EXAMPLE","type":"payment.updated","event_id":"{id}","created_at":"{now_iso}",'
            '"data":{"type":"payment","id":"PAY{number}","object":{"payment":{"id":"PAY{number}","status":"COMPLETED",'
            '"amount_money":{"amount":4200,"currency":"USD"},"order_id":"ORD42","version":3}}}}'
        ),
        "booking.created": Sample(
            '{"merchant_id":"MLN42EXAMPLE","type":"booking.created","event_id":"{id}","created_at":"{now_iso}",'
            '"data":{"type":"booking","id":"bkg{number}:0","object":{"booking":{"id":"bkg{number}","version":0,'
            '"status":"PENDING","location_id":"LOC42","customer_id":"CUS42"}}}}'
        ),
    },
)
