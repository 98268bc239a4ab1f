"""Stripe: one event per request, signed with its time; retried for three days, resent by hand for thirty."""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import Fields, Hmac

_SUBSCRIPTION: Final = '"id":"sub_{id}","object":"subscription","customer":"cus_42","currency":"eur",'


def _event(kind: str, about: str, more: str = "") -> Sample:
    return Sample(
        '{"id":"evt_{id}","object":"event","api_version":"2026-09-30","created":{now},"livemode":false,'
        f'"pending_webhooks":1,"type":"{kind}","data":{{"object":{{{about}}}{more}}}}}'
    )


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
        "invoice.paid": _event(
            "invoice.paid",
            '"id":"in_{id}","object":"invoice","customer":"cus_42","amount_paid":4200,"currency":"eur","status":"paid"',
        ),
        "charge.refunded": _event(
            "charge.refunded",
            '"id":"ch_{id}","object":"charge",'
            '"customer":"cus_42","amount_refunded":900,"currency":"eur","refunded":false',
        ),
        "checkout.session.completed": _event(
            "checkout.session.completed",
            '"id":"cs_test_{id}","object":"checkout.session","customer":"cus_42","amount_total":4200,"currency":"eur",'
            '"mode":"payment","payment_intent":"pi_{id}","payment_status":"paid","status":"complete",'
            '"client_reference_id":"order-42"',
        ),
        "payment_intent.succeeded": _event(
            "payment_intent.succeeded",
            '"id":"pi_{id}","object":"payment_intent","customer":"cus_42","amount":4200,"amount_received":4200,'
            '"currency":"eur","latest_charge":"ch_{id}","status":"succeeded"',
        ),
        "payment_intent.payment_failed": _event(
            "payment_intent.payment_failed",
            '"id":"pi_{id}","object":"payment_intent","customer":"cus_42","amount":4200,"currency":"eur",'
            '"status":"requires_payment_method","last_payment_error":{"code":"card_declined",'
            '"decline_code":"insufficient_funds","type":"card_error"}',
        ),
        "invoice.payment_failed": _event(
            "invoice.payment_failed",
            '"id":"in_{id}","object":"invoice","customer":"cus_42","amount_due":4200,"attempt_count":1,'
            '"currency":"eur","status":"open"',
        ),
        "customer.created": _event(
            "customer.created", '"id":"cus_{id}","object":"customer","email":"ana@example.com","name":"Ana"'
        ),
        "customer.subscription.created": _event(
            "customer.subscription.created", _SUBSCRIPTION + '"status":"active","cancel_at_period_end":false'
        ),
        "customer.subscription.updated": _event(
            "customer.subscription.updated",
            _SUBSCRIPTION + '"status":"past_due","cancel_at_period_end":false',
            ',"previous_attributes":{"status":"active"}',
        ),
        "customer.subscription.deleted": _event(
            "customer.subscription.deleted", _SUBSCRIPTION + '"status":"canceled","ended_at":{now}'
        ),
        "charge.dispute.created": _event(
            "charge.dispute.created",
            '"id":"dp_{id}","object":"dispute","charge":"ch_{id}","amount":4200,"currency":"eur",'
            '"reason":"fraudulent","status":"needs_response"',
        ),
        "payout.paid": _event(
            "payout.paid", '"id":"po_{id}","object":"payout","amount":42000,"currency":"eur","status":"paid"'
        ),
    },
)
