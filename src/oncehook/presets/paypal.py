"""PayPal: signed with RSA over a transmission's id, time, your webhook's id and a CRC-32 of the body.

The secrets are the webhook's id and PayPal's certificate. A CRC does not protect the body against somebody who holds a
genuine transmission: fetch the object before acting on money.
"""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import PayPal

_AMOUNT: Final = '"amount":{"currency_code":"USD","value":"42.00"}'


def _event(kind: str, about: str, summary: str, resource: str) -> Sample:
    return Sample(
        f'{{"id":"WH-{{id}}","event_version":"1.0","create_time":"{{now_iso}}","resource_type":"{about}",'
        f'"resource_version":"2.0","event_type":"{kind}","summary":"{summary}","resource":{{{resource}}}}}'
    )


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
        "PAYMENT.CAPTURE.COMPLETED": _event(
            "PAYMENT.CAPTURE.COMPLETED",
            "capture",
            "Payment completed for $ 42.00 USD",
            f'"id":"{{number}}","status":"COMPLETED",{_AMOUNT},"final_capture":true,"custom_id":"order-42"',
        ),
        "PAYMENT.CAPTURE.DENIED": _event(
            "PAYMENT.CAPTURE.DENIED", "capture", "Payment denied", f'"id":"{{number}}","status":"DECLINED",{_AMOUNT}'
        ),
        "PAYMENT.CAPTURE.PENDING": _event(
            "PAYMENT.CAPTURE.PENDING", "capture", "Payment pending", f'"id":"{{number}}","status":"PENDING",{_AMOUNT}'
        ),
        "PAYMENT.CAPTURE.REFUNDED": _event(
            "PAYMENT.CAPTURE.REFUNDED",
            "refund",
            "A $ 42.00 USD capture payment was refunded",
            f'"id":"{{number}}","status":"COMPLETED",{_AMOUNT}',
        ),
        "CHECKOUT.ORDER.APPROVED": _event(
            "CHECKOUT.ORDER.APPROVED",
            "checkout-order",
            "An order has been approved by buyer",
            '"id":"{number}","status":"APPROVED","intent":"CAPTURE","purchase_units":[{"reference_id":"order-42"}]',
        ),
        "CHECKOUT.ORDER.COMPLETED": _event(
            "CHECKOUT.ORDER.COMPLETED",
            "checkout-order",
            "Checkout Order Completed",
            '"id":"{number}","status":"COMPLETED","intent":"CAPTURE","purchase_units":[{"reference_id":"order-42"}]',
        ),
        **{
            f"BILLING.SUBSCRIPTION.{word}": _event(
                f"BILLING.SUBSCRIPTION.{word}",
                "subscription",
                f"Subscription {word.lower()}",
                '"id":"I-{number}","plan_id":"P-42","status":"' + status + '","status_update_time":"{now_iso}"',
            )
            for word, status in (
                ("CANCELLED", "CANCELLED"),
                ("CREATED", "APPROVAL_PENDING"),
                ("ACTIVATED", "ACTIVE"),
                ("SUSPENDED", "SUSPENDED"),
                ("EXPIRED", "EXPIRED"),
            )
        },
        "PAYMENT.SALE.COMPLETED": _event(
            "PAYMENT.SALE.COMPLETED",
            "sale",
            "Payment completed for $ 42.00 USD",
            '"id":"{number}","state":"completed","amount":{"total":"42.00","currency":"USD"},'
            '"billing_agreement_id":"I-42"',
        ),
        "CUSTOMER.DISPUTE.CREATED": _event(
            "CUSTOMER.DISPUTE.CREATED",
            "dispute",
            "A new dispute opened with Case # PP-D-42",
            '"dispute_id":"PP-D-{number}","reason":"MERCHANDISE_OR_SERVICE_NOT_RECEIVED","status":"OPEN"',
        ),
    },
)
