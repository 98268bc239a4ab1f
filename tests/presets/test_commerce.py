"""Shopify and HubSpot, end to end into a real store. HubSpot's library signs; Shopify's has nothing for webhooks."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubspot.utils.signature import Signature  # type: ignore[import-untyped]

from oncehook import clock, presets
from oncehook.errors import ConfigError
from oncehook.model import Arrival, Mark
from oncehook.sources import build
from tests.presets.trial import URL, Trial, trial, try_sample

SAMPLES = [(name, kind) for name in ("shopify", "hubspot") for kind in presets.load(name).samples]


@pytest.mark.parametrize(("preset", "kind"), SAMPLES)
async def test_every_sample(tmp_path: Path, preset: str, kind: str) -> None:
    for event in await try_sample(tmp_path, preset, kind):
        assert event.subject
        assert event.event_at is not None
        assert abs(event.event_at.timestamp() - clock.now()) < 60


# -- Shopify -----------------------------------------------------------------------------------

SHOP = "tea-and-co.myshopify.com"
ORDER: dict[str, Any] = {"id": 820982911946154508, "name": "#1042", "updated_at": "2026-03-29T14:00:00-04:00"}


def classic(topic: str = "orders/create", **more: str) -> dict[str, str]:
    return {
        "X-Shopify-Topic": topic,
        "X-Shopify-Shop-Domain": SHOP,
        "X-Shopify-Webhook-Id": "b54557e4-bdd9-4b37-8a5f-bf7d70bcd043",
        "X-Shopify-Event-Id": "98880550-7158-44d4-b7cd-2c97c8a091b5",
        "X-Shopify-Triggered-At": "2026-03-29T18:00:27.877041743Z",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }


async def test_a_shopify_webhook(tmp_path: Path) -> None:
    async with trial(tmp_path, "shopify") as on:
        event = await on.keep(ORDER, headers=classic())
        assert (event.key, event.type) == ("b54557e4-bdd9-4b37-8a5f-bf7d70bcd043", "orders/create")
        assert event.subject == f"{SHOP}:820982911946154508"
        assert event.event_at is not None
        assert event.event_at.isoformat() == "2026-03-29T18:00:27.877041+00:00"


async def test_a_shopify_event_of_the_newer_kind(tmp_path: Path) -> None:
    headers = {
        "shopify-topic": "Product",
        "shopify-action": "update",
        "shopify-shop-domain": SHOP,
        "shopify-webhook-id": "w-1",
        "shopify-event-id": "e-1",
        "shopify-resource-id": "gid://shopify/Product/42",
        "shopify-triggered-at": "2026-03-29T18:00:27.8Z",
    }
    async with trial(tmp_path, "shopify", secret=[b"client secret"]) as on:
        body = json.dumps({"product": {"title": "Chá"}}).encode()
        signature = base64.b64encode(hmac.digest(b"client secret", body, "sha256")).decode()
        receipt = await on.take(on.draft(body, headers={**headers, "shopify-hmac-sha256": signature}))
        [event] = await on.kept(receipt)
        assert (event.key, event.type) == ("w-1", "Product.update")
        assert event.subject == f"{SHOP}:gid\\://shopify/Product/42"
        assert event.event_at is not None


@pytest.mark.parametrize(
    ("topic", "body", "subject"),
    [
        (
            "inventory_levels/update",
            {"inventory_item_id": 271878346596884015, "available": 4},
            f"{SHOP}:271878346596884015",
        ),
        ("customers/data_request", {"shop_id": 954889, "customer": {"id": 191167}}, f"{SHOP}:191167"),
        ("shop/redact", {"shop_id": 954889, "shop_domain": SHOP}, SHOP),
        ("carts/update", {"id": "eeafa272cebfd4b22385bc4b645e762c"}, f"{SHOP}:eeafa272cebfd4b22385bc4b645e762c"),
        ("odd", "not json", SHOP),
        ("odd", [1, 2], SHOP),
    ],
)
async def test_shopify_subjects(tmp_path: Path, topic: str, body: object, subject: str) -> None:
    async with trial(tmp_path, "shopify") as on:
        event = await on.keep(body, headers=classic(topic))
        assert (event.type, event.subject) == (topic, subject)


async def test_one_action_that_sets_off_two_webhooks_is_two_events(tmp_path: Path) -> None:
    """They share their Event-Id; a key made of that alone would have lost the second product."""
    async with trial(tmp_path, "shopify") as on:
        assert await on.outcome({"id": 1}, headers=classic("products/update", X_Shopify_Webhook_Id="w-1")) == "accepted"
        assert await on.outcome({"id": 2}, headers=classic("products/update", X_Shopify_Webhook_Id="w-2")) == "accepted"
        assert (
            await on.outcome({"id": 2}, headers=classic("products/update", X_Shopify_Webhook_Id="w-2")) == "duplicate"
        )
        assert await on.outcome({"id": 3}, headers=classic("products/update", X_Shopify_Webhook_Id="w-2")) == "conflict"


async def test_a_shopify_webhook_without_its_id_is_kept(tmp_path: Path) -> None:
    headers = {name: value for name, value in classic().items() if not name.endswith("-Id")}
    async with trial(tmp_path, "shopify") as on:
        for marks in (Mark.unkeyed, Mark.unkeyed | Mark.same_body):
            assert (await on.keep(ORDER, headers=headers)).marks == marks


async def test_which_shopify_signatures_count(tmp_path: Path) -> None:
    async with trial(tmp_path, "shopify", secret=[b"new", b"old"]) as on:
        draft = on.draft({**ORDER, "note": "chá"}, headers=classic())
        signatures = {
            secret: base64.b64encode(hmac.digest(secret, draft.body, "sha256")) for secret in (b"new", b"old", b"other")
        }
        wrong = [
            signatures[b"other"],
            b"",
            signatures[b"new"][:-1],
            signatures[b"new"] + b"=",
            hmac.digest(b"new", draft.body, "sha256").hex().encode(),
        ]
        for signature in wrong:
            assert (await on.take(shopify_signed(draft, signature))).reply.status == 401
        good = shopify_signed(draft, signatures[b"old"])
        twice = replace(good, headers=[*good.headers, (b"x-shopify-hmac-sha256", signatures[b"new"])])
        twin = replace(good, headers=[*good.headers, (b"x_shopify_hmac_sha256", signatures[b"new"])])
        # a wrong signature in one spelling is not rescued by a right one in the other
        both = replace(shopify_signed(draft, wrong[0]), headers=[*shopify_signed(draft, wrong[0]).headers])
        both.headers = [*both.headers, (b"shopify-hmac-sha256", signatures[b"new"])]
        for arrival in (twice, twin, both):
            assert (await on.take(arrival)).reply.status == 401
        assert await on.events() == []
        assert (await on.take(good)).outcome == "accepted"
        assert (await on.take(shopify_signed(draft, signatures[b"new"]))).outcome == "duplicate"


def shopify_signed(draft: Arrival, signature: bytes) -> Arrival:
    return replace(draft, headers=[*draft.headers, (b"x-shopify-hmac-sha256", signature)])


async def test_a_large_shopify_product_is_taken(tmp_path: Path) -> None:
    variants = [{"id": number, "title": "x" * 500} for number in range(4000)]
    async with trial(tmp_path, "shopify") as on:
        event = await on.keep({"id": 1, "variants": variants}, headers=classic("products/update"))
        assert len((await on.inbox.bodies.load(event)).body) > 2 << 20


# -- HubSpot -----------------------------------------------------------------------------------


def change(event_id: int, **fields: Any) -> dict[str, Any]:
    return {
        "eventId": event_id,
        "subscriptionId": 12345,
        "portalId": 62515,
        "appId": 54321,
        "occurredAt": 1_790_000_000_123,
        "subscriptionType": "contact.propertyChange",
        "attemptNumber": 0,
        "objectId": 1246965,
        "propertyName": "firstname",
        "propertyValue": "Zoë",
        "changeSource": "CRM",
        **fields,
    }


async def test_a_hubspot_event_alone(tmp_path: Path) -> None:
    async with trial(tmp_path, "hubspot") as on:
        body = json.dumps([change(1)], indent=1).encode()
        event = await on.keep(body)
        assert event.key == "62515:12345:1:1790000000123:1246965:::firstname"
        assert (event.type, event.subject) == ("contact.propertyChange", "62515:1246965")
        assert event.event_at is not None
        assert event.event_at.timestamp() == 1_790_000_000.123
        assert event.body == body
        assert event.batch_id is None


async def test_a_hubspot_batch_becomes_one_event_each(tmp_path: Path) -> None:
    merge = {"subscriptionType": "contact.merge", "mergedObjectIds": [1, 2], "primaryObjectId": 3}
    link = {
        "subscriptionType": "contact.associationChange",
        "fromObjectId": 7,
        "toObjectId": 8,
        "associationType": "CONTACT_TO_COMPANY",
    }
    association = {name: value for name, value in change(3, **link).items() if name != "objectId"}
    batch = [change(1), change(2, **merge), association]
    async with trial(tmp_path, "hubspot") as on:
        receipt = await on.send(batch)
        assert json.loads(receipt.reply.body)["accepted"] == 3
        made = await on.kept(receipt)
        assert [json.loads(event.body) for event in made] == [[item] for item in batch]
        assert [event.type for event in made] == [
            "contact.propertyChange",
            "contact.merge",
            "contact.associationChange",
        ]
        assert [event.subject for event in made] == ["62515:1246965", "62515:1246965", "62515:7"]
        assert len({event.key for event in made}) == 3
        batch_ids = {event.batch_id for event in made}
        assert len(batch_ids) == 1
        raw = await on.inbox.store.batch_body(next(iter(batch_ids)) or b"")
        assert raw is not None
        assert raw[1] == json.dumps(batch).encode()


async def test_a_partly_repeated_hubspot_batch_adds_only_what_is_new(tmp_path: Path) -> None:
    """A retry counts up `attemptNumber`, and may come in other company."""
    async with trial(tmp_path, "hubspot") as on:
        await on.send([change(1), change(2)])
        receipt = await on.send([change(2, attemptNumber=1), change(3), change(1, attemptNumber=4)])
        answer = json.loads(receipt.reply.body)
        assert (answer["accepted"], answer["duplicates"], answer["conflicts"]) == (1, 2, 0)
        alone = await on.send([change(3, attemptNumber=9)])
        assert alone.outcome == "duplicate"
        assert len(await on.events()) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"eventId": 2},
        {"occurredAt": 1_790_000_000_124},
        {"objectId": 9},
        {"propertyName": "lastname"},
        {"portalId": 9},
        {"subscriptionId": 9},
    ],
)
async def test_what_makes_two_hubspot_events_different(tmp_path: Path, other: dict[str, Any]) -> None:
    async with trial(tmp_path, "hubspot") as on:
        assert await on.outcome([change(1)]) == "accepted"
        assert await on.outcome([change(1, **other)]) == "accepted"


async def test_an_odd_item_does_not_lose_its_neighbours(tmp_path: Path) -> None:
    odd: list[object] = ["text", None, 7, [change(9)], {}, {"eventId": 5}]
    async with trial(tmp_path, "hubspot") as on:
        receipt = await on.send([change(1), *odd, change(2)])
        assert (receipt.outcome, receipt.reply.status) == ("accepted", 200)
        made = await on.kept(receipt)
        assert [json.loads(event.body) for event in made] == [[item] for item in [change(1), *odd, change(2)]]
        assert [event.key is None for event in made] == [False, *[True] * len(odd), False]
        assert [bool(event.marks & Mark.unparsed) for event in made[1:5]] == [True] * 4
        assert (await on.send([change(2), change(1)])).outcome == "duplicate"


@pytest.mark.parametrize("body", [{"vid": 1, "properties": {}}, "not json", "7", '"text"'])
async def test_a_workflows_webhook_is_kept_whole_every_time(tmp_path: Path, body: object) -> None:
    async with trial(tmp_path, "hubspot") as on:
        for _ in range(2):
            event = await on.keep(body)
            assert event.key is None
            assert Mark.unkeyed in event.marks


async def test_an_empty_hubspot_batch_is_acknowledged(tmp_path: Path) -> None:
    async with trial(tmp_path, "hubspot") as on:
        receipt = await on.send([])
        assert (receipt.outcome, receipt.reply.status) == ("ignored", 200)


def hubspot_signed(on: Trial, version: str, body: bytes, secret: str = "secret", at: float | None = None) -> Arrival:
    """As HubSpot's own library signs it."""
    stamp = str(int((clock.now() if at is None else at) * 1000))
    signature = Signature.get_signature(secret, body.decode(), version, URL, "POST", stamp)
    if version == "v3":
        headers = {"X-HubSpot-Signature-v3": signature, "X-HubSpot-Request-Timestamp": stamp}
    else:
        headers = {"X-HubSpot-Signature": signature, "X-HubSpot-Signature-Version": version}
    return on.draft(body, headers=headers)


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
async def test_hubspots_own_library_signs_and_we_accept(tmp_path: Path, version: str) -> None:
    async with trial(tmp_path, "hubspot", secret=[b"secret", b"older"]) as on:
        body = json.dumps([change(1)]).encode()
        assert (await on.take(hubspot_signed(on, version, body))).outcome == "accepted"
        assert (await on.take(hubspot_signed(on, version, body, "older"))).outcome == "duplicate"
        assert (await on.take(hubspot_signed(on, version, body, "wrong"))).reply.status == 401
        spoilt = replace(hubspot_signed(on, version, body), body=body + b" ")
        assert (await on.take(spoilt)).reply.status == 401


async def test_hubspots_own_library_accepts_what_we_sign(tmp_path: Path) -> None:
    async with trial(tmp_path, "hubspot", secret=[b"secret"]) as on:
        ours = on.sign(on.draft([change(1)]))
        headers = {name.decode(): value.decode() for name, value in ours.headers}
        assert Signature.is_valid(
            headers["x-hubspot-signature-v3"],
            "secret",
            ours.body.decode(),
            URL,
            "POST",
            "v3",
            headers["x-hubspot-request-timestamp"],
        )


async def test_a_stale_or_wrong_v3_is_not_rescued_by_an_older_signature(tmp_path: Path) -> None:
    async with trial(tmp_path, "hubspot", secret=[b"secret"]) as on:
        body = json.dumps([change(1)]).encode()
        for age in (-301, 330):
            assert (await on.take(hubspot_signed(on, "v3", body, at=clock.now() + age))).reply.status == 401
        wrong, right = hubspot_signed(on, "v3", body, "wrong"), hubspot_signed(on, "v1", body)
        assert (await on.take(replace(wrong, headers=[*wrong.headers, *right.headers[1:]]))).reply.status == 401
        assert await on.events() == []


async def test_the_published_hubspot_vector(tmp_path: Path) -> None:
    secret = "yyyyyyyy-yyyy-yyyy-yyyy-yyyyyyyyyyyy"
    body = (
        b'[{"eventId":1,"subscriptionId":12345,"portalId":62515,"occurredAt":1564113600000,'
        b'"subscriptionType":"contact.creation","attemptNumber":0,"objectId":123,"changeSource":"CRM",'
        b'"changeFlag":"NEW","appId":54321}]'
    )
    signature = "232db2615f3d666fe21a8ec971ac7b5402d33b9a925784df3ca654d05f4817de"
    assert hashlib.sha256(secret.encode() + body).hexdigest() == signature
    async with trial(tmp_path, "hubspot", secret=[secret.encode()]) as on:
        receipt = await on.take(on.draft(body, headers={"X-HubSpot-Signature": signature}))
        [event] = await on.kept(receipt)
        assert (event.type, event.subject) == ("contact.creation", "62515:123")


def test_hubspot_without_its_url_does_not_start() -> None:
    with pytest.raises(ConfigError, match="public_url"):
        build("hubspot", preset=presets.load("hubspot"), secret=[b"secret"])
