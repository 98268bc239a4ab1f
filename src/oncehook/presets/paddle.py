"""Paddle Billing: one event may be notified several times, so its `event_id` counts and not the `notification_id`."""

from __future__ import annotations

from oncehook.presets import _base
from oncehook.sources import Preset
from oncehook.verify import Fields, Hmac

_EVENT = '{"event_id":"evt_{id}","event_type":"%s","occurred_at":"{now_iso}","notification_id":"ntf_{id}","data":%s}'

PRESET = Preset(
    name="paddle",
    title="Paddle Billing",
    # ts=…;h1=…[;h1=…], with semicolons; the whole pdl_ntfset_… text is the key. Paddle's own library allows 5 s of
    # age only; ours are the usual five minutes, because a replay is a duplicate anyway.
    scheme=Hmac(
        header="Paddle-Signature",
        fields=Fields(signature="h1", separator=";"),
        timestamp="field:ts",
        signed="{timestamp}:{body}",
    ),
    key="$.event_id",
    type="$.event_type",
    subject="$.data.id",
    event_time="$.occurred_at",
    # Differs per destination, and when a notification is resent by hand.
    volatile=("$.notification_id",),
    horizon="3d",
    # Paddle waits 5 s, and accepts only 200, which is our answer anyway.
    budget="2.5s",
    facts={
        "scheme": "github.com/PaddleHQ/paddle-python-sdk paddle_billing/Notifications/PaddleSignature.py",
        "key": "developer.paddle.com/webhooks/about/how-webhooks-work",
        "volatile": "developer.paddle.com/webhooks/about/how-webhooks-work (per destination)",
        "event_time": "developer.paddle.com/webhooks/about/how-webhooks-work",
        "horizon": "developer.paddle.com/webhooks/about/respond-to-webhooks (60 over 3 days, live)",
        "budget": "developer.paddle.com/webhooks/about/respond-to-webhooks (5 s)",
    },
    samples={
        "transaction.completed": _base.fill(
            _EVENT,
            "transaction.completed",
            '{"id":"txn_{id}","status":"completed","customer_id":"ctm_42","currency_code":"EUR","origin":"web",'
            '"details":{"totals":{"total":"4200","currency_code":"EUR"}}}',
        ),
        "subscription.canceled": _base.fill(
            _EVENT,
            "subscription.canceled",
            '{"id":"sub_{id}","status":"canceled","customer_id":"ctm_42","currency_code":"EUR",'
            '"canceled_at":"{now_iso}"}',
        ),
    },
)
