"""PayPal: signed with RSA over a transmission's id, time, your webhook's id and a CRC-32 of the body.

The secrets are the webhook's id and PayPal's certificate. A CRC does not protect the body against somebody who holds a
genuine transmission: fetch the object before acting on money.
"""

from __future__ import annotations

from oncehook.sources import Preset, Sample
from oncehook.verify import PayPal

PRESET = Preset(
    name="paypal",
    title="PayPal",
    scheme=PayPal(),
    # The signature covers a checksum of the body, for which anybody can make another body.
    body_authenticated=False,
    key_authenticated=False,
    # A captured transmission cannot become another event: another body under its id is a conflict.
    watch_proof=True,
    own="header:PayPal-Transmission-Id",
    key="$.id",
    type="$.event_type",
    # Most resources have an id; disputes and invoices keep it elsewhere.
    subject=[
        ["?$.resource_type", "$.resource.id"],
        ["?$.resource_type", "$.resource.dispute_id"],
        ["?$.resource_type", "$.resource.invoice.id"],
    ],
    event_time="$.create_time",
    horizon="3d",
    facts={
        "scheme": "developer.paypal.com/api/webhooks/v1/definitions/verify_webhook_signature (headers) and "
        "github.com/paypal/PayPal-Python-SDK paypalrestsdk/notifications.py (what is signed)",
        "key": "developer.paypal.com/api/rest/webhooks/rest",
        "subject": "developer.paypal.com/api/rest/webhooks/rest (resource.id; disputes and invoices unverified)",
        "horizon": "developer.paypal.com/api/rest/webhooks/rest (25 times over 3 days)",
    },
    samples={
        "PAYMENT.CAPTURE.COMPLETED": Sample(
            '{"id":"WH-{id}","event_version":"1.0","create_time":"{now_iso}","resource_type":"capture",'
            '"resource_version":"2.0","event_type":"PAYMENT.CAPTURE.COMPLETED",'
            '"summary":"Payment completed for $ 42.00 USD","resource":{"id":"{number}","status":"COMPLETED",'
            '"amount":{"currency_code":"USD","value":"42.00"},"final_capture":true,"custom_id":"order-42"}}'
        ),
        "BILLING.SUBSCRIPTION.CANCELLED": Sample(
            '{"id":"WH-{id}","event_version":"1.0","create_time":"{now_iso}","resource_type":"subscription",'
            '"resource_version":"2.0","event_type":"BILLING.SUBSCRIPTION.CANCELLED","summary":"Subscription cancelled",'
            '"resource":{"id":"I-{number}","plan_id":"P-42","status":"CANCELLED","status_update_time":"{now_iso}"}}'
        ),
    },
)
