"""Mercado Pago: the signature covers the ids in the URL and headers, not the body, and the body is only a pointer.

Whatever the body says, fetch the payment or order by its id before acting on it.
"""

from __future__ import annotations

from oncehook.rules import RuleContext
from oncehook.sources import Preset, Sample
from oncehook.verify import Fields, Hmac


def kind(context: RuleContext) -> str:
    """Return the action where it names its object (`payment.updated`), else topic and action."""
    data = context.data if isinstance(context.data, dict) else {}
    topic = str(data.get("type") or data.get("topic") or context.query("type") or context.query("topic") or "")
    action = str(data.get("action") or "")
    return action if "." in action else ".".join(filter(None, (topic, action)))


PRESET = Preset(
    name="mercadopago",
    title="Mercado Pago",
    # The documentation lower-cases the id before signing, the library does not: both are accepted.
    scheme=Hmac(
        header="x-signature",
        fields=Fields(signature="v1", separator=","),
        timestamp="field:ts",
        unit="auto",
        signed=(
            "[id:{query:data.id|lower};][request-id:{header:x-request-id};]ts:{timestamp};",
            "[id:{query:data.id};][request-id:{header:x-request-id};]ts:{timestamp};",
        ),
    ),
    # No maximum age is documented and retries come for four days; nothing genuine is older than five.
    tolerance="5d",
    body_authenticated=False,
    key_authenticated=False,
    # The id in the URL is signed: with it in the key, a request captured for one payment cannot use up another's key.
    # Orders have no notification id, but a version that counts up.
    key=[
        ["query:data.id", "$.id", "?$.action"],
        ["$.id", "?$.action"],
        ["query:data.id", "$.action", "$.data.version"],
        ["$.data.id", "$.action", "$.data.version"],
    ],
    # The rest says only "something changed": two of them are not the same event.
    on_missing_key="accept",
    type=kind,
    subject=["query:data.id", "$.data.id", "$.resource"],
    event_time="$.date_created",
    horizon="4d",
    # 22 s for the first delivery, 5 s for retries; 200 or 201.
    budget="2.5s",
    facts={
        "scheme": "github.com/mercadopago/sdk-python mercadopago/webhook/validator.py",
        "key": "mercadopago.com developers documentation, Webhooks (payments) and Orders notifications (version); "
        "that `id` stays the same across retries is unverified",
        "horizon": "mercadopago.com developers documentation, After receiving the notification (96 h)",
        "budget": "mercadopago.com developers documentation, After receiving the notification (22 s, then 5 s)",
        "body_authenticated": "github.com/mercadopago/sdk-python mercadopago/webhook/validator.py",
    },
    samples={
        "payment.updated": Sample(
            '{"id":{number},"live_mode":false,"type":"payment","date_created":"{now_iso}","user_id":44444,'
            '"api_version":"v1","action":"payment.updated","data":{"id":"{number}"}}',
            headers={"x-request-id": "{id}"},
            query="data.id={number}&type=payment",
        ),
        "order.processed": Sample(
            '{"action":"order.processed","api_version":"v1","application_id":"7364289770550796",'
            '"date_created":"{now_iso}","live_mode":false,"type":"order","user_id":"44444","data":{"id":"ORD01{number}",'
            '"external_reference":"cart-42","status":"processed","status_detail":"accredited",'
            '"total_paid_amount":"42.00","version":3}}',
            headers={"x-request-id": "{id}"},
            query="data.id=ORD01{number}&type=order",
        ),
    },
)
