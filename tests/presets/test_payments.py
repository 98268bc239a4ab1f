"""Stripe, PayPal, Square, Paddle and Mercado Pago, end to end into a real store, and against their own libraries."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate
from mercadopago.webhook import InvalidWebhookSignatureError, WebhookSignatureValidator  # type: ignore[import-untyped]
from paddle_billing.Notifications import Secret, Verifier  # type: ignore[import-untyped]
from paddle_billing.Notifications.PaddleSignature import PaddleSignature  # type: ignore[import-untyped]
from paypalrestsdk.notifications import WebhookEvent  # type: ignore[import-untyped]
from square.utils.webhooks_helper import verify_signature
from stripe import Webhook, WebhookSignature

from oncehook import clock, presets, samples
from oncehook.errors import ConfigError
from oncehook.model import Arrival, Mark
from oncehook.sources import build
from tests.presets.trial import DAY, URL, Trial, trial, try_sample

NAMES = ("stripe", "paypal", "square", "paddle", "mercadopago")
SAMPLES = [(name, kind) for name in NAMES for kind in presets.load(name).samples]


@pytest.mark.parametrize(("preset", "kind"), SAMPLES)
async def test_every_sample(tmp_path: Path, preset: str, kind: str) -> None:
    [event] = await try_sample(tmp_path, preset, kind)
    assert event.subject
    assert event.event_at is not None
    assert abs(event.event_at.timestamp() - clock.now()) < 60


def header(arrival: Arrival, name: str) -> str:
    return dict(arrival.headers)[name.encode()].decode()


def with_header(arrival: Arrival, name: str, value: str) -> Arrival:
    kept = [(key, old) for key, old in arrival.headers if key != name.encode()]
    return replace(arrival, headers=[*kept, (name.encode(), value.encode())])


# -- Stripe ------------------------------------------------------------------------------------


def stripe_event(**fields: Any) -> dict[str, Any]:
    return {
        "id": "evt_1Nabc",
        "object": "event",
        "created": 1_790_000_000,
        "livemode": False,
        "pending_webhooks": 2,
        "type": "invoice.paid",
        "data": {"object": {"id": "in_1", "object": "invoice", "amount_paid": 4200}},
        **fields,
    }


async def test_a_stripe_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "stripe") as on:
        event = await on.keep(stripe_event())
        assert (event.key, event.type, event.subject) == ("evt_1Nabc", "invoice.paid", "in_1")
        assert event.event_at is not None
        assert event.event_at.timestamp() == 1_790_000_000
        assert event.marks is Mark.none


async def test_stripe_connect_keeps_accounts_apart(tmp_path: Path) -> None:
    async with trial(tmp_path, "stripe") as on:
        event = await on.keep(stripe_event(account="acct_7"))
        assert event.subject == "acct_7:in_1"


async def test_a_thin_stripe_event(tmp_path: Path) -> None:
    thin = {
        "id": "evt_test_65RCj",
        "object": "v2.core.event",
        "type": "v1.billing.meter.error_report_triggered",
        "created": "2026-09-30T17:46:22.134Z",
        "related_object": {"id": "mtr_test_61", "type": "billing.meter", "url": "/v1/billing/meters/mtr_test_61"},
    }
    async with trial(tmp_path, "stripe") as on:
        event = await on.keep(thin)
        assert (event.key, event.subject) == ("evt_test_65RCj", "mtr_test_61")
        assert event.event_at is not None
        assert event.event_at.isoformat() == "2026-09-30T17:46:22.134000+00:00"
        of_an_account = await on.keep({**thin, "id": "evt_test_66", "context": "acct_7"})
        assert of_an_account.subject == "acct_7:mtr_test_61"


async def test_a_stripe_resend_is_a_duplicate_and_a_changed_one_a_conflict(tmp_path: Path) -> None:
    async with trial(tmp_path, "stripe") as on:
        assert await on.outcome(stripe_event()) == "accepted"
        assert await on.outcome(stripe_event(pending_webhooks=0)) == "duplicate"
        assert await on.outcome(stripe_event(data={"object": {"id": "in_1", "amount_paid": 1}})) == "conflict"
        assert len(await on.events()) == 1


@pytest.mark.parametrize(
    ("body", "marks"),
    [
        ({"object": "event", "type": "invoice.paid"}, Mark.unkeyed),
        ({"id": None, "type": ["odd"], "data": {"object": "odd"}, "created": "odd"}, Mark.unkeyed),
        ([{"id": "evt_1"}], Mark.unkeyed),
        ("{", Mark.unkeyed | Mark.unparsed),
    ],
)
async def test_an_odd_stripe_body_is_kept_all_the_same(tmp_path: Path, body: object, marks: Mark) -> None:
    async with trial(tmp_path, "stripe") as on:
        event = await on.keep(body)
        assert (event.marks, event.key, event.subject) == (marks, None, None)


async def test_stripes_own_library_and_ours_understand_each_other(tmp_path: Path) -> None:
    async with trial(tmp_path, "stripe", secret=[b"whsec_new", b"whsec_old"]) as on:
        body = json.dumps(stripe_event())
        for secret in ("whsec_new", "whsec_old"):
            theirs = WebhookSignature.generate_signature_header(body, secret)
            receipt = await on.take(on.draft(body, headers={"Stripe-Signature": theirs}))
            assert receipt.reply.status == 200
        ours = samples.sign(on.source, samples.draft(on.source, "invoice.paid"))
        read = Webhook.construct_event(ours.body, header(ours, "stripe-signature"), "whsec_new")
        assert read.type == "invoice.paid"


async def test_which_stripe_signatures_count(tmp_path: Path) -> None:
    async with trial(tmp_path, "stripe") as on:
        body = on.draft(stripe_event())
        good = on.sign(body)
        time, _, v1 = header(good, "stripe-signature").partition(",")
        two = f"{time},v1={'0' * 64},{v1},v0=ignored"
        assert (await on.take(with_header(good, "stripe-signature", two))).outcome == "accepted"
        for value in ("", time, v1, f"{time},v0{v1[2:]}", f"{time};{v1}", f"{time},v1=", f"{time},{v1}0", "x" * 10_000):
            assert (await on.take(with_header(good, "stripe-signature", value))).reply.status == 401
        for age in (-301, 330):
            assert (await on.take(on.sign(body, at=clock.now() + age))).reply.status == 401
        twin = replace(good, headers=[*good.headers, (b"stripe_signature", b"t=1,v1=0")])
        assert (await on.take(twin)).reply.status == 401


# -- PayPal ------------------------------------------------------------------------------------


def paypal_event(**fields: Any) -> dict[str, Any]:
    return {
        "id": "WH-2WR32451HC0233532-67976317FL4543714",
        "create_time": "2026-10-23T17:23:52Z",
        "resource_type": "capture",
        "event_type": "PAYMENT.CAPTURE.COMPLETED",
        "resource": {"id": "80021663DE681814L", "amount": {"value": "1.00", "currency_code": "USD"}},
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({}, "capture:80021663DE681814L"),
        ({"resource_type": "dispute", "resource": {"dispute_id": "PP-D-4012"}}, "dispute:PP-D-4012"),
        ({"resource_type": "invoices", "resource": {"invoice": {"id": "INV2-XFXV"}}}, "invoices:INV2-XFXV"),
        ({"resource": {}}, None),
    ],
)
async def test_a_paypal_event(tmp_path: Path, fields: dict[str, Any], subject: str | None) -> None:
    async with trial(tmp_path, "paypal") as on:
        event = await on.keep(paypal_event(**fields))
        assert (event.key, event.type) == ("WH-2WR32451HC0233532-67976317FL4543714", "PAYMENT.CAPTURE.COMPLETED")
        assert event.subject == subject
        assert event.event_at is not None
        assert event.event_at.isoformat() == "2026-10-23T17:23:52+00:00"


def paypal_secrets(on: Trial) -> tuple[str, RSAPublicKey, RSAPrivateKey]:
    webhook_id, certificate = on.source.secrets
    public = load_pem_x509_certificate(certificate).public_key()
    private = load_pem_private_key(on.source.signing.partition(b"\n")[2], None)
    assert isinstance(public, RSAPublicKey)
    assert isinstance(private, RSAPrivateKey)
    return webhook_id.decode(), public, private


async def test_paypals_own_library_signs_the_same_text(tmp_path: Path) -> None:
    """Its `verify` fetches the certificate from PayPal; what it lets the certificate check is this text."""
    async with trial(tmp_path, "paypal") as on:
        webhook_id, public, private = paypal_secrets(on)
        draft = on.draft({**paypal_event(), "summary": "olá 🙂"})
        ours = on.sign(draft)
        text = WebhookEvent._get_expected_sig(
            header(ours, "paypal-transmission-id"),
            header(ours, "paypal-transmission-time"),
            webhook_id,
            ours.body.decode(),
        )
        signature = base64.b64decode(header(ours, "paypal-transmission-sig"))
        public.verify(signature, text.encode(), PKCS1v15(), SHA256())

        time = clock.now_utc().isoformat(timespec="seconds").replace("+00:00", "Z")
        text = WebhookEvent._get_expected_sig("69cd13f0-d67a", time, webhook_id, draft.body.decode())
        theirs = base64.b64encode(private.sign(text.encode(), PKCS1v15(), SHA256())).decode()
        sent = {
            "paypal-transmission-id": "69cd13f0-d67a",
            "paypal-transmission-time": time,
            "paypal-transmission-sig": theirs,
            "paypal-cert-url": "https://api.paypal.com/v1/notifications/certs/CERT-1",
            "paypal-auth-algo": "SHA256withRSA",
        }
        arrival = replace(draft, headers=[*draft.headers, *((k.encode(), v.encode()) for k, v in sent.items())])
        assert (await on.take(arrival)).outcome == "accepted"
        for name in sent:
            assert (await on.take(with_header(arrival, name, "x"))).reply.status == 401 or name == "paypal-cert-url"


async def test_a_paypal_transmission_for_another_webhook_is_refused(tmp_path: Path) -> None:
    async with trial(tmp_path, "paypal") as on:
        private = on.source.signing.partition(b"\n")[2]
        on.source.signing = b"WH-SOMEBODY-ELSE\n" + private
        assert (await on.send(paypal_event())).reply.status == 401
        assert await on.events() == []


async def test_paypal_retries_of_three_days_still_count(tmp_path: Path) -> None:
    async with trial(tmp_path, "paypal") as on:
        assert await on.outcome(paypal_event()) == "accepted"
        assert await on.outcome(paypal_event(), at=clock.now() - 3 * DAY) == "duplicate"
        assert (await on.send(paypal_event(), at=clock.now() - 5 * DAY)).reply.status == 401


def test_paypal_without_its_certificate_does_not_start() -> None:
    with pytest.raises(ConfigError, match="certificate"):
        build("paypal", preset=presets.load("paypal"), secret=[b"WH-1"])


# -- Square ------------------------------------------------------------------------------------

SQUARE: dict[str, Any] = {
    "merchant_id": "6SSW7HV8K2ST5",
    "type": "payment.updated",
    "event_id": "13b867cf-db3d-4b1c-90b6-2f32a9d78124",
    "created_at": "2026-02-06T21:27:34.308Z",
    "data": {"type": "payment", "id": "hYy9pRFVxpDsO1FB05SunFWUe9JZY", "object": {"payment": {"version": 3}}},
}


async def test_a_square_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "square") as on:
        event = await on.keep(SQUARE)
        assert (event.key, event.type) == (SQUARE["event_id"], "payment.updated")
        assert event.subject == "6SSW7HV8K2ST5:payment:hYy9pRFVxpDsO1FB05SunFWUe9JZY"
        assert event.event_at is not None
        assert event.event_at.isoformat() == "2026-02-06T21:27:34.308000+00:00"
        catalog = {**SQUARE, "event_id": "2", "type": "catalog.version.updated", "data": {"type": "catalog", "id": ""}}
        assert (await on.keep(catalog)).subject == "6SSW7HV8K2ST5"


async def test_squares_retry_headers_decide_nothing(tmp_path: Path) -> None:
    """R10: what says it is a retry may still be the first copy that we see."""
    retry = {"square-retry-number": "3", "square-retry-reason": "http_timeout"}
    async with trial(tmp_path, "square") as on:
        assert await on.outcome(SQUARE, headers=retry) == "accepted"
        assert await on.outcome(SQUARE) == "duplicate"


async def test_squares_own_library_and_ours_understand_each_other(tmp_path: Path) -> None:
    async with trial(tmp_path, "square", secret=[b"key"]) as on:
        draft = on.draft({**SQUARE, "note": "olá"})
        ours = header(on.sign(draft), "x-square-hmacsha256-signature")
        body = draft.body.decode()
        assert verify_signature(request_body=body, signature_header=ours, signature_key="key", notification_url=URL)
        for url in (URL + "/", URL.replace("https", "http"), URL + "?a=1"):
            # the library agrees only with the URL that was signed, and so do we
            there = on.source.scheme.sign(draft, b"key", at=0, url=url)
            signature = header(there, "x-square-hmacsha256-signature")
            assert not verify_signature(
                request_body=body, signature_header=signature, signature_key="key", notification_url=URL
            )
            assert (await on.take(there)).reply.status == 401


def test_square_without_its_url_does_not_start() -> None:
    with pytest.raises(ConfigError, match="public_url"):
        build("square", preset=presets.load("square"), secret=[b"key"])


# -- Paddle ------------------------------------------------------------------------------------

PADDLE: dict[str, Any] = {
    "event_id": "evt_01hv8wptq8987qeep44cyrewp9",
    "event_type": "transaction.completed",
    "occurred_at": "2026-04-12T10:18:49.621022Z",
    "notification_id": "ntf_01hv8wptykt6xfkkz4d7cz7hrz",
    "data": {"id": "txn_01hv8wptq8987qeep44cyrewp9", "status": "completed"},
}


async def test_a_paddle_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "paddle") as on:
        event = await on.keep(PADDLE)
        assert (event.key, event.type) == (PADDLE["event_id"], "transaction.completed")
        assert event.subject == PADDLE["data"]["id"]
        assert event.event_at is not None
        assert event.event_at.isoformat() == "2026-04-12T10:18:49.621022+00:00"


async def test_one_paddle_event_notified_twice_is_one_event(tmp_path: Path) -> None:
    async with trial(tmp_path, "paddle") as on:
        assert await on.outcome(PADDLE) == "accepted"
        assert await on.outcome({**PADDLE, "notification_id": "ntf_other"}) == "duplicate"
        assert await on.outcome({**PADDLE, "data": {**PADDLE["data"], "status": "paid"}}) == "conflict"


async def test_paddles_own_library_and_ours_understand_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEST_MODE", raising=False)
    async with trial(tmp_path, "paddle", secret=[b"pdl_ntfset_new", b"pdl_ntfset_old"]) as on:
        ours = on.sign(on.draft(PADDLE))
        request: Any = SimpleNamespace(
            headers={"Paddle-Signature": header(ours, "paddle-signature")}, body=ours.body, content=None, data=None
        )
        assert Verifier().verify(request, Secret("pdl_ntfset_new"))
        assert not Verifier().verify(request, Secret("pdl_ntfset_none"))
        stamp = str(int(clock.now()))
        hashes = [
            PaddleSignature.calculate_hmac(secret, f"{stamp}:{ours.body.decode()}".encode()).hexdigest()
            for secret in ("pdl_ntfset_unknown", "pdl_ntfset_old")
        ]
        theirs = ";".join([f"ts={stamp}", *(f"h1={one}" for one in hashes)])
        assert (await on.take(with_header(ours, "paddle-signature", theirs))).outcome == "accepted"
        commas = theirs.replace(";", ",")
        assert (await on.take(with_header(ours, "paddle-signature", commas))).reply.status == 401


# -- Mercado Pago ------------------------------------------------------------------------------

PAYMENT: dict[str, Any] = {
    "id": 12345,
    "live_mode": True,
    "type": "payment",
    "date_created": "2026-03-25T10:04:58.396-04:00",
    "user_id": 44444,
    "api_version": "v1",
    "action": "payment.created",
    "data": {"id": "999999999"},
}
ORDER: dict[str, Any] = {
    "action": "order.processed",
    "api_version": "v1",
    "type": "order",
    "user_id": "44444",
    "data": {"id": "ORD01JQ4S4KY8HWQ6NA5PXB65B3D3", "status": "processed", "version": 3},
}
ASKED: dict[str, Any] = {"query": "data.id=999999999&type=payment", "headers": {"x-request-id": "r-1"}}
ASKED_ORDER: dict[str, Any] = {
    "query": "data.id=ORD01JQ4S4KY8HWQ6NA5PXB65B3D3&type=order",
    "headers": {"x-request-id": "r-2"},
}


async def test_a_mercado_pago_payment(tmp_path: Path) -> None:
    async with trial(tmp_path, "mercadopago") as on:
        event = await on.keep(PAYMENT, **ASKED)
        assert (event.key, event.type) == ("999999999:12345:payment.created", "payment.created")
        assert event.subject == "999999999"
        assert event.event_at is not None
        assert event.event_at.isoformat() == "2026-03-25T14:04:58.396000+00:00"
        assert await on.outcome(PAYMENT, **{**ASKED, "headers": {"x-request-id": "r-9"}}) == "duplicate"
        assert await on.outcome({**PAYMENT, "id": 12346}, **ASKED) == "accepted"


async def test_a_mercado_pago_order_has_a_version_instead_of_an_id(tmp_path: Path) -> None:
    async with trial(tmp_path, "mercadopago") as on:
        event = await on.keep(ORDER, **ASKED_ORDER)
        assert event.key == "ORD01JQ4S4KY8HWQ6NA5PXB65B3D3:order.processed:3"
        assert (event.type, event.subject) == ("order.processed", "ORD01JQ4S4KY8HWQ6NA5PXB65B3D3")
        assert await on.outcome(ORDER, **ASKED_ORDER) == "duplicate"
        later = {**ORDER, "data": {**ORDER["data"], "version": 4}}
        assert await on.outcome(later, **ASKED_ORDER) == "accepted"


@pytest.mark.parametrize(
    ("body", "query", "kind"),
    [
        ({"action": "payment.updated", "type": "payment"}, "", "payment.updated"),
        ({"action": "updated", "type": "subscription_preapproval"}, "", "subscription_preapproval.updated"),
        ({"type": "topic_chargebacks_wh"}, "", "topic_chargebacks_wh"),
        (
            {"topic": "merchant_order", "resource": "https://api.mercadolibre.com/merchant_orders/7"},
            "",
            "merchant_order",
        ),
        ({}, "type=payment&data.id=1", "payment"),
        ({"action": ["odd"], "type": {"odd": 1}}, "", None),
        ("not json", "topic=payment", "payment"),
        ([], "", "event"),
    ],
)
async def test_mercado_pago_types(tmp_path: Path, body: object, query: str, kind: str | None) -> None:
    async with trial(tmp_path, "mercadopago") as on:
        event = await on.keep(body, query=query)
        assert kind is None or event.type == kind


async def test_pointers_without_an_id_are_all_kept(tmp_path: Path) -> None:
    pointer = {"topic": "merchant_order", "resource": "https://api.mercadolibre.com/merchant_orders/7"}
    async with trial(tmp_path, "mercadopago") as on:
        for _ in range(2):
            event = await on.keep(pointer)
            assert (event.marks, event.subject) == (Mark.unkeyed, pointer["resource"])


async def test_a_captured_mercado_pago_request_cannot_use_up_the_key_of_another_payment(tmp_path: Path) -> None:
    """The body is not signed, so whoever holds one genuine request may send any body with it."""
    async with trial(tmp_path, "mercadopago") as on:
        assert on.source.preset is not None
        assert not on.source.preset.body_authenticated
        captured = on.sign(on.draft(PAYMENT, **ASKED))
        victim = {**PAYMENT, "id": 777, "data": {"id": "888"}}
        forged = replace(captured, body=json.dumps(victim).encode())
        assert (await on.take(forged)).outcome == "accepted"
        receipt = await on.send(victim, query="data.id=888&type=payment", headers={"x-request-id": "r-3"})
        assert receipt.outcome == "accepted"
        moved = replace(captured, query=b"data.id=888&type=payment")
        assert (await on.take(moved)).reply.status == 401


async def test_mercado_pagos_own_library_and_ours_understand_each_other(tmp_path: Path) -> None:
    async with trial(tmp_path, "mercadopago", secret=[b"your_secret_key_here"]) as on:
        ours = on.sign(on.draft(PAYMENT, **ASKED))
        validate = WebhookSignatureValidator.validate
        validate(header(ours, "x-signature"), "r-1", "999999999", "your_secret_key_here")
        with pytest.raises(InvalidWebhookSignatureError):
            validate(header(ours, "x-signature"), "r-1", "999999998", "your_secret_key_here")


@pytest.mark.parametrize(
    "signature",
    [
        "633f91233312dd391ec75fa0bea539cfc2d6c4918873305b84a96cc1c58db71c",
        "fb15ae6472eb449173c556793205d77787d58f384d183bb5bc3b724c27bd103c",
    ],
    ids=["lowercased", "as received"],
)
async def test_both_readings_of_an_order_id_are_accepted(tmp_path: Path, signature: str) -> None:
    request_id = "2066ca19-c6f1-498a-be75-1923005edd06"
    sent = {"x-request-id": request_id, "x-signature": f"ts=1742505638683,v1={signature}"}
    WebhookSignatureValidator.validate(
        sent["x-signature"],
        request_id,
        "ORD01JQ4S4KY8HWQ6NA5PXB65B3D3" if signature.startswith("fb") else "ord01jq4s4ky8hwq6na5pxb65b3d3",
        "your_secret_key_here",
    )
    secrets = [b"your_secret_key_here"]
    async with trial(tmp_path, "mercadopago", secret=secrets, tolerance="off") as on:
        arrival = on.draft(ORDER, query=ASKED_ORDER["query"], headers=sent)
        assert (await on.take(arrival)).outcome == "accepted"
        assert (await on.take(replace(arrival, query=b"data.id=ORD01JQ4S4"))).reply.status == 401


async def test_mercado_pago_ages_and_unsigned_notices(tmp_path: Path) -> None:
    async with trial(tmp_path, "mercadopago") as on:
        assert await on.outcome(PAYMENT, at=clock.now() - 4.5 * DAY, **ASKED) == "accepted"
        assert (await on.send(PAYMENT, at=clock.now() - 5.5 * DAY, **ASKED)).reply.status == 401
        milliseconds = on.sign(on.draft(PAYMENT, **ASKED))
        assert len(header(milliseconds, "x-signature").partition(",")[0].removeprefix("ts=")) == 13
        old_kind = on.draft({"resource": "1", "topic": "payment"}, query="topic=payment&id=1")
        assert (await on.take(old_kind)).reply.status == 401
