"""Shopify: the topic, the shop and the ids are in headers, which the signature does not cover.

Classic webhooks name them `X-Shopify-…`, the newer "events" deliveries `Shopify-…`; both are understood.
"""

from __future__ import annotations

from typing import Final

from oncehook.sources import Preset, Sample
from oncehook.verify import Either, Hmac

PREFIXES: Final = ("X-Shopify-", "Shopify-")


def expand(*parts: str) -> list[list[str]]:
    """Return a composite with both spellings of its headers: `expand("header:Shop-Domain", "$.id")`."""
    return [[part.replace("header:", f"header:{prefix}") for part in parts] for prefix in PREFIXES]


def _headers(topic: str) -> dict[str, str]:
    return {
        "X-Shopify-Topic": topic,
        "X-Shopify-Shop-Domain": "tea-and-co.myshopify.com",
        "X-Shopify-API-Version": "2026-10",
        "X-Shopify-Webhook-Id": "{id}",
        "X-Shopify-Event-Id": "event-{id}",
        "X-Shopify-Triggered-At": "{now_iso}",
    }


def _order(topic: str, about: str) -> Sample:
    return Sample(
        '{"id":{number},"admin_graphql_api_id":"gid://shopify/Order/{number}","name":"#1042","currency":"EUR",'
        '"total_price":"42.00","updated_at":"{now_iso}",' + about + "}",
        headers=_headers(topic),
    )


PRESET = Preset(
    name="shopify",
    title="Shopify",
    scheme=Either(*(Hmac(header=f"{prefix}Hmac-Sha256", encoding="base64") for prefix in PREFIXES)),
    # One id per delivery and subscription, the same in retries. Event-Id, the alternative, is one id for everything
    # that one action of the merchant caused, so as a key it would drop all but the first.
    key=expand("header:Webhook-Id"),
    key_authenticated=False,
    type=expand("header:Topic", "?header:Action"),
    subject=[
        *expand("header:Shop-Domain", "$.id"),
        *expand("header:Shop-Domain", "header:Resource-Id"),
        *expand("header:Shop-Domain", "$.inventory_item_id"),
        *expand("header:Shop-Domain", "$.customer.id"),
        *expand("header:Shop-Domain"),
    ],
    event_time=[*expand("header:Triggered-At"), "$.updated_at"],
    # Four hours of retries, but a webhook may also come a day late.
    horizon="1d",
    # Shopify waits 5 s in all.
    budget="2.5s",
    # No limit is published; a product with two thousand variants is well above 1 MiB.
    max_body="8MiB",
    facts={
        "scheme": "npm @shopify/shopify-api lib/webhooks and lib/types (both spellings)",
        "key": "shopify.dev/docs/api/shopify-app-remix/v4/authenticate/webhook (webhookId is the idempotency key) and "
        "shopify.dev/docs/apps/build/events/verify-deliveries; shopify.dev/apps/build/webhooks/ignore-duplicates names "
        "Event-Id instead",
        "type": "npm @shopify/shopify-api lib/types",
        "horizon": "shopify.dev/changelog/updates-to-webhook-retry-mechanism (8 over 4 h)",
        "budget": "shopify.dev/docs/apps/build/webhooks (5 s; unverified)",
    },
    samples={
        "orders/create": Sample(
            '{"id":{number},"admin_graphql_api_id":"gid://shopify/Order/{number}","name":"#1042","currency":"EUR",'
            '"total_price":"42.00","financial_status":"paid","created_at":"{now_iso}","updated_at":"{now_iso}",'
            '"line_items":[{"id":14242,"title":"Ch\\u00e1 verde","quantity":2,"price":"21.00"}]}',
            headers=_headers("orders/create"),
        ),
        "products/update": Sample(
            '{"id":{number},"admin_graphql_api_id":"gid://shopify/Product/{number}","title":"Green tea",'
            '"status":"active","updated_at":"{now_iso}","variants":[{"id":4242,"price":"21.00","sku":"TEA-1"}]}',
            headers=_headers("products/update"),
        ),
        "app/uninstalled": Sample(
            '{"id":{number},"name":"Tea and Co","domain":"tea-and-co.myshopify.com","updated_at":"{now_iso}"}',
            headers=_headers("app/uninstalled"),
        ),
        "orders/paid": _order("orders/paid", '"financial_status":"paid"'),
        "orders/updated": _order("orders/updated", '"financial_status":"paid","note":"leave it at the door"'),
        "orders/cancelled": _order("orders/cancelled", '"cancelled_at":"{now_iso}","cancel_reason":"customer"'),
        "orders/fulfilled": _order("orders/fulfilled", '"fulfillment_status":"fulfilled"'),
        "products/create": Sample(
            '{"id":{number},"admin_graphql_api_id":"gid://shopify/Product/{number}","title":"White tea",'
            '"status":"draft","created_at":"{now_iso}","updated_at":"{now_iso}"}',
            headers=_headers("products/create"),
        ),
        "customers/create": Sample(
            '{"id":{number},"email":"ana@example.com","first_name":"Ana","state":"disabled",'
            '"created_at":"{now_iso}","updated_at":"{now_iso}"}',
            headers=_headers("customers/create"),
        ),
        "checkouts/create": Sample(
            '{"id":{number},"token":"{id}","email":"ana@example.com","currency":"EUR","total_price":"42.00",'
            '"created_at":"{now_iso}","updated_at":"{now_iso}"}',
            headers=_headers("checkouts/create"),
        ),
        "fulfillments/create": Sample(
            '{"id":{number},"order_id":4242,"status":"success","tracking_company":"DHL",'
            '"tracking_number":"JD0142","created_at":"{now_iso}","updated_at":"{now_iso}"}',
            headers=_headers("fulfillments/create"),
        ),
        "refunds/create": Sample(
            '{"id":{number},"order_id":4242,"created_at":"{now_iso}","note":"arrived broken",'
            '"transactions":[{"id":{number},"kind":"refund","status":"success","amount":"21.00","currency":"EUR"}]}',
            headers=_headers("refunds/create"),
        ),
        "inventory_levels/update": Sample(
            '{"inventory_item_id":{number},"location_id":655441491,"available":7,"updated_at":"{now_iso}"}',
            headers=_headers("inventory_levels/update"),
        ),
    },
)
