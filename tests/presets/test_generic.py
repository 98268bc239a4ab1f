"""n8n, Standard Webhooks, CloudEvents and the generic preset, end to end into a real store."""

from __future__ import annotations

import base64
import hmac
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import standardwebhooks
import svix
from cloudevents.core.bindings.http import HTTPMessage, from_http_event, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from oncehook import clock, presets, samples
from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.ingest import Receipt
from oncehook.model import Arrival, Mark
from oncehook.sources import build
from oncehook.web.asgi import Mount
from tests.presets.families import n8n
from tests.presets.trial import Trial, trial

# -- n8n ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "key"),
    [
        ({"idempotency_key": "a", "messageId": "b", "data": {"messageId": "c", "idempotency_key": "d"}}, {}, "a"),
        ({"messageId": "b", "data": {"messageId": "c", "idempotency_key": "d"}}, {}, "b"),
        ({"data": {"messageId": "c", "idempotency_key": "d"}}, {}, "d"),
        ({"data": {"messageId": "c"}}, {}, "c"),
        ({"data": {"idempotency_key": "d"}}, {}, "d"),
        ({"data": {"idempotency_key": "d"}}, {"Idempotency-Key": '"e"'}, "d"),
        ({"data": {}}, {"Idempotency-Key": '"e"'}, "e"),
        ({"idempotency_key": None, "messageId": 17}, {}, "17"),
    ],
)
async def test_n8n_key_places_in_order(tmp_path: Path, body: Any, headers: dict[str, str], key: str) -> None:
    async with trial(tmp_path, "n8n") as on:
        event = await on.keep(body, headers=headers)
        assert event.key == key
        assert await on.outcome(body, headers=headers) == "duplicate"


async def test_what_n8n_really_sends_has_its_type_and_its_key(tmp_path: Path) -> None:
    assert len(n8n.PAYLOADS) >= 20
    async with trial(tmp_path, "n8n") as on:
        for name, posted in n8n.PAYLOADS.items():
            event = await on.keep(posted.body)
            assert (event.type, event.key) == (posted.type, posted.key), name
            assert bool(event.marks & Mark.unkeyed) == (posted.key is None), name
            assert await on.outcome(posted.body) == ("accepted" if posted.key is None else "duplicate"), name


@pytest.mark.parametrize(
    "body", ['{"type": "x",  "n": 1}', '{"data":{"nested":{"messageId":"deep"}}}', "[1,2]", "ol\xe1"]
)
async def test_n8n_events_without_a_key_pass_unchanged(tmp_path: Path, body: str) -> None:
    async with trial(tmp_path, "n8n") as on:
        for _ in range(2):
            event = await on.keep(body)
            assert (event.key, event.body) == (None, body.encode())
            assert event.marks & Mark.unkeyed
        assert len(await on.events()) == 2


async def test_n8n_bearer_or_signature(tmp_path: Path) -> None:
    body = '{"type":"x","idempotency_key":"1"}'
    async with trial(tmp_path, "n8n", secret=[b"canary-bearer"]) as on:
        bearer = {"Authorization": "Bearer canary-bearer"}
        signed = {"X-Signature": "sha256=" + hmac.new(b"canary-bearer", body.encode(), "sha256").hexdigest()}
        assert (await on.take(on.draft(body, headers=bearer))).outcome == "accepted"
        assert (await on.take(on.draft(body, headers=signed))).outcome == "duplicate"
        for wrong in (
            {},
            {"Authorization": "Bearer canary-beareR"},
            {"Authorization": "canary-bearer"},
            {"X-Signature": "sha256=" + "0" * 64},
            {**bearer, "X-Signature": "sha256=" + "0" * 64},  # a wrong signature is not rescued by the bearer
        ):
            assert (await on.take(on.draft(body, headers=wrong))).reply.status == 401
        await on.inbox.store.ping()
        assert b"canary-bearer" not in on.bytes_on_disk()


# -- Standard Webhooks -------------------------------------------------------------------------

WHSEC = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = '{"type":"invoice.paid","timestamp":"2026-11-15T20:00:00Z","data":{"id":"inv_1","name":"Zo\\u00eb"}}'


def standard_headers(
    prefix: str, signature: str, *, event_id: str = "msg_1", at: datetime | None = None
) -> dict[str, str]:
    moment = str(int((at or datetime.now(UTC)).timestamp()))
    return {f"{prefix}-id": event_id, f"{prefix}-timestamp": moment, f"{prefix}-signature": signature}


@pytest.mark.parametrize("prefix", ["webhook", "svix"])
@pytest.mark.parametrize("library", [standardwebhooks.Webhook, svix.Webhook])
async def test_standard_signed_by_the_libraries(tmp_path: Path, library: Any, prefix: str) -> None:
    now = datetime.now(UTC)
    headers = standard_headers(prefix, library(WHSEC).sign("msg_1", now, BODY), at=now)
    async with trial(tmp_path, "standard-webhooks", secret=[WHSEC.encode()]) as on:
        [event] = await on.kept(await on.take(on.draft(BODY, headers=headers)))
        assert (event.key, event.type, event.subject) == ("msg_1", "invoice.paid", "inv_1")
        assert event.event_at == datetime(2026, 11, 15, 20, tzinfo=UTC)
        # the retry has another time, hence another signature, and the same id
        later = datetime.fromtimestamp(now.timestamp() + 1, UTC)
        retry = standard_headers(prefix, library(WHSEC).sign("msg_1", later, BODY), at=later)
        assert (await on.take(on.draft(BODY, headers=retry))).outcome == "duplicate"
        for name in headers:
            other = {**headers, name: headers[name][:-1] + ("0" if headers[name][-1] != "0" else "1")}
            assert (await on.take(on.draft(BODY, headers=other))).reply.status == 401, name
        assert (await on.take(on.draft(BODY + " ", headers=headers))).reply.status == 401


@pytest.mark.parametrize("library", [standardwebhooks.Webhook, svix.Webhook])
async def test_standard_verified_by_the_libraries(tmp_path: Path, library: Any) -> None:
    async with trial(tmp_path, "standard-webhooks", secret=[WHSEC.encode()]) as on:
        signed = samples.sign(on.source, samples.draft(on.source, "contact.created"))
        headers = {name.decode(): value.decode() for name, value in signed.headers}
        library(WHSEC).verify(signed.body, headers)
        with pytest.raises((standardwebhooks.WebhookVerificationError, svix.WebhookVerificationError)):
            library(WHSEC).verify(signed.body + b" ", headers)


@pytest.mark.parametrize("prefix", ["webhook", "svix"])
async def test_standard_ed25519(tmp_path: Path, prefix: str) -> None:
    private = Ed25519PrivateKey.generate()
    public = b"whpk_" + base64.b64encode(private.public_key().public_bytes_raw())
    now = datetime.now(UTC)
    message = f"msg_1.{int(now.timestamp())}.{BODY}".encode()
    signature = "v1a," + base64.b64encode(private.sign(message)).decode()
    async with trial(tmp_path, "standard-webhooks", secret=[public]) as on:
        genuine = on.draft(BODY, headers=standard_headers(prefix, f"v1,{'A' * 44} v2,abc {signature}", at=now))
        assert (await on.take(genuine)).outcome == "accepted"
        assert (await on.take(replace(genuine, body=genuine.body + b" "))).reply.status == 401
        shared = standard_headers(prefix, standardwebhooks.Webhook(WHSEC).sign("msg_1", now, BODY), at=now)
        assert (await on.take(on.draft(BODY, headers=shared))).reply.status == 401


async def test_standard_near_misses(tmp_path: Path) -> None:
    published = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    async with trial(tmp_path, "standard-webhooks", secret=[WHSEC.encode()], tolerance="off") as on:
        body = '{"test": 2432232314}'
        for wrong in (
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OA=",
            "v1,",
            "",
            "v2," + published["webhook-signature"][3:],
        ):
            headers = {**published, "webhook-signature": wrong}
            assert (await on.take(on.draft(body, headers=headers))).reply.status == 401, wrong
        assert (await on.take(on.draft(body, headers=published))).outcome == "accepted"


async def test_standard_key_is_the_id_that_was_signed(tmp_path: Path) -> None:
    """A captured request cannot be made a new event by an id of the other family."""
    now = datetime.now(UTC)
    signature = standardwebhooks.Webhook(WHSEC).sign("msg_1", now, BODY)
    async with trial(tmp_path, "standard-webhooks", secret=[WHSEC.encode()]) as on:
        under_svix = standard_headers("svix", signature, at=now)
        assert (await on.take(on.draft(BODY, headers=under_svix))).outcome == "accepted"
        assert (await on.take(on.draft(BODY, headers={**under_svix, "webhook-id": "fresh"}))).outcome == "duplicate"
        as_published = standard_headers("webhook", signature, at=now)
        assert (await on.take(on.draft(BODY, headers={**as_published, "svix-id": "fresh"}))).outcome == "duplicate"
        junk = {**under_svix, "webhook-id": "fresh", "webhook-signature": "junk", "webhook-timestamp": "1"}
        assert (await on.take(on.draft(BODY, headers=junk))).reply.status == 401


async def test_standard_rotation_and_tolerance(tmp_path: Path) -> None:
    old = "whsec_" + base64.b64encode(b"o" * 24).decode()
    async with trial(tmp_path, "standard-webhooks", secret=[WHSEC.encode(), old.encode()]) as on:
        for number, secret in enumerate((WHSEC, old)):
            now = datetime.now(UTC)
            signature = standardwebhooks.Webhook(secret).sign(f"m{number}", now, BODY)
            headers = standard_headers("webhook", signature, event_id=f"m{number}", at=now)
            assert (await on.take(on.draft(BODY, headers=headers))).outcome == "accepted"
        for age, outcome in ((290, "accepted"), (310, "rejected"), (-310, "rejected")):
            assert await on.outcome(BODY, at=clock.now() - age) == outcome


# -- CloudEvents -------------------------------------------------------------------------------

STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"


def event(number: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": f"e{number}",
        "source": "/shops/lisbon",
        "type": "com.example.order",
        "time": "2026-11-15T20:00:00Z",
        "subject": "orders/42",
        "data": {"n": number},
        **fields,
    }


async def keep_cloud(on: Trial, body: object, **how: Any) -> Any:
    receipt = await on.send(body, **how)
    assert (receipt.outcome, receipt.reply.status) == ("accepted", 202), receipt
    [kept] = await on.kept(receipt)
    return kept


async def test_cloudevents_structured(tmp_path: Path) -> None:
    async with trial(tmp_path, "cloudevents") as on:
        kept = await keep_cloud(on, event(), content_type=f"{STRUCTURED}; charset=UTF-8")
        assert (kept.key, kept.type, kept.subject) == (
            "/shops/lisbon:e1",
            "com.example.order",
            "/shops/lisbon:orders/42",
        )
        assert kept.event_at == datetime(2026, 11, 15, 20, tzinfo=UTC)
        other = event(source="/shops/porto")
        assert (await keep_cloud(on, other, content_type=STRUCTURED)).key == "/shops/porto:e1"
        assert await on.outcome(event(), content_type=STRUCTURED) == "duplicate"
        assert await on.outcome(event(data={"n": 9}), content_type=STRUCTURED) == "conflict"
        partitioned = await keep_cloud(on, event(2, partitionkey="customer-7"), content_type=STRUCTURED)
        assert partitioned.subject == "customer-7"
        bare = event(3)
        del bare["subject"]
        assert (await keep_cloud(on, bare, content_type=STRUCTURED)).subject is None


def binary(**attributes: str) -> dict[str, str]:
    names = {"specversion": "1.0", "id": "b1", "source": "/s", "type": "t", **attributes}
    return {f"ce-{name}": value for name, value in names.items()}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ('{"id":"not this one"}', "application/json"),
        ("[1,2,3]", "application/json"),
        ("\0\1binary", "image/png"),
        ("a=b", "text/plain"),
    ],
)
async def test_cloudevents_binary(tmp_path: Path, body: str, content_type: str) -> None:
    async with trial(tmp_path, "cloudevents") as on:
        headers = binary(time="2026-11-15T20:00:00Z", subject="orders/42")
        kept = await keep_cloud(on, body, headers=headers, content_type=content_type)
        assert (kept.key, kept.type, kept.subject) == ("/s:b1", "t", "/s:orders/42")
        assert (kept.body, kept.marks) == (body.encode(), Mark.none)
        assert kept.event_at == datetime(2026, 11, 15, 20, tzinfo=UTC)
        assert await on.outcome(body, headers=headers, content_type=content_type) == "duplicate"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Euro%20%E2%82%AC%20%F0%9F%98%80", "Euro € 😀"),
        ('"quoted \\"id\\""', 'quoted "id"'),
        ('"%E2%82%AC"', "€"),
        ("100%2525", "100%25"),  # one round of decoding
        ("plain", "plain"),
        ("%C0%A0", None),  # not UTF-8
        ("%FF", None),
    ],
)
async def test_cloudevents_header_values(tmp_path: Path, written: str, meant: str | None) -> None:
    async with trial(tmp_path, "cloudevents") as on:
        kept = await keep_cloud(on, "{}", headers=binary(id=written))
        assert kept.key == (None if meant is None else f"/s:{meant}")
        assert kept.type == "t"


async def test_cloudevents_batch(tmp_path: Path) -> None:
    async with trial(tmp_path, "cloudevents") as on:
        receipt = await on.send([event(1), event(2), 17, event(3)], content_type=BATCHED)
        assert receipt.reply.status == 202
        kept = await on.kept(receipt)
        assert [one.key for one in kept] == ["/shops/lisbon:e1", "/shops/lisbon:e2", None, "/shops/lisbon:e3"]
        assert [json.loads(one.body) for one in kept] == [[event(1)], [event(2)], [17], [event(3)]]
        assert [one.marks for one in kept] == [Mark.none, Mark.none, Mark.unparsed | Mark.unkeyed, Mark.none]
        again = await on.send([event(2), event(4)], content_type=BATCHED)
        answer = json.loads(again.reply.body)
        assert (answer["accepted"], answer["duplicates"], answer["conflicts"]) == (1, 1, 0)
        assert await on.outcome([event(4)], content_type=BATCHED) == "duplicate"
        empty = await on.send([], content_type=BATCHED)
        assert (empty.outcome, empty.reply.status) == ("ignored", 202)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("not json", STRUCTURED),
        ("<event/>", "application/cloudevents+xml"),
        ("[[", BATCHED),
        ('{"id":"e1"}', STRUCTURED),
        ('{"id":"e1","source":{"not":"text"}}', STRUCTURED),
        ('{"id":["e1"],"source":"/s"}', STRUCTURED),
        ("5", STRUCTURED),
        ("{}", BATCHED),
        ("{}", "application/json"),
    ],
)
async def test_cloudevents_odd_events_are_kept_unkeyed(tmp_path: Path, body: str, content_type: str) -> None:
    async with trial(tmp_path, "cloudevents") as on:
        kept = await keep_cloud(on, body, content_type=content_type)
        assert (kept.key, kept.body) == (None, body.encode())
        assert kept.marks & Mark.unkeyed


async def test_cloudevents_written_and_read_by_the_library(tmp_path: Path) -> None:
    attributes = {
        "type": "com.example.order",
        "source": "/shops/lisbon",
        "specversion": "1.0",
        "subject": 'a "b"',
    }
    async with trial(tmp_path, "cloudevents") as on:
        for number, write in enumerate((to_structured_event, to_binary_event)):
            message = write(CloudEvent({**attributes, "id": f"ação {number} €"}, {"name": "José"}))
            kept = await keep_cloud(on, message.body, headers=message.headers)
            assert kept.key == f"/shops/lisbon:ação {number} €"
            assert (kept.type, kept.subject) == ("com.example.order", '/shops/lisbon:a "b"')
        for kind in ("com.example.order.placed", "com.example.order.shipped"):
            sample = samples.draft(on.source, kind)
            headers = {name.decode(): value.decode() for name, value in sample.headers}
            assert from_http_event(HTTPMessage(headers, sample.body)).get_type() == kind


async def test_cloudevents_token_in_header_or_query(tmp_path: Path) -> None:
    async with trial(tmp_path, "cloudevents", secret=[b"canary-token"]) as on:

        async def take(query: str = "", **headers: str) -> Receipt:
            return await on.take(on.draft(event(), content_type=STRUCTURED, headers=headers, query=query))

        assert (await take(Authorization="Bearer canary-token")).outcome == "accepted"
        assert (await take("p=q&access_token=canary-token")).outcome == "duplicate"
        for query, headers in (
            ("", {}),
            ("access_token=canary-tokeN", {}),
            ("access_token=canary-token&access_token=canary-token", {}),
            ("access_token=canary-token", {"Authorization": "Bearer wrong"}),
            ("", {"Authorization": "Basic canary-token"}),
        ):
            assert (await take(query, **headers)).reply.status == 401
        await on.inbox.store.ping()
        assert b"canary-token" not in on.bytes_on_disk()


async def ask(inbox: Inbox, method: str, query: str, **headers: str) -> tuple[int, dict[str, str]]:
    """One request through the ASGI face, without a body."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": "/trial",
        "query_string": query.encode(),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        "client": ("203.0.113.7", 5555),
    }
    await Mount(inbox)(scope, receive, send)
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


async def test_cloudevents_consent(tmp_path: Path) -> None:
    async with trial(tmp_path, "cloudevents", secret=[b"token"]) as on:
        origin = {"webhook_request_origin": "eventemitter.example.com"}
        status, headers = await ask(on.inbox, "OPTIONS", "access_token=token", **origin)
        assert status == 200
        assert headers["webhook-allowed-origin"] == "eventemitter.example.com"
        assert (headers["webhook-allowed-rate"], headers["allow"]) == ("*", "POST")
        _, headers = await ask(
            on.inbox, "OPTIONS", "", authorization="Bearer token", webhook_request_rate="120", **origin
        )
        assert headers["webhook-allowed-rate"] == "120"
        for rate in ("0", "-1", "many", "1e9"):
            _, headers = await ask(on.inbox, "OPTIONS", "access_token=token", webhook_request_rate=rate, **origin)
            assert headers["webhook-allowed-rate"] == "*"


async def test_cloudevents_no_consent(tmp_path: Path) -> None:
    async with trial(tmp_path, "cloudevents", secret=[b"token"]) as on:
        origin = {"webhook_request_origin": "eventemitter.example.com"}
        for method, query, headers in (
            ("OPTIONS", "", origin),
            ("OPTIONS", "access_token=wrong", origin),
            ("OPTIONS", "access_token=token", {}),
            ("OPTIONS", "access_token=token", {"webhook_request_origin": "a b\tc"}),
            ("OPTIONS", "access_token=token", {"origin": "https://page.example"}),
            ("GET", "access_token=token", origin),
            ("PUT", "access_token=token", origin),
        ):
            status, answer = await ask(on.inbox, method, query, **headers)
            assert status == 401, (method, query, headers)
            assert not [name for name in answer if name.startswith("webhook-allowed")]
        assert await on.events() == []


# -- generic -----------------------------------------------------------------------------------


async def test_generic_with_a_key(tmp_path: Path) -> None:
    async with trial(tmp_path, "generic", secret=[b"s"], key=[["$.account", "$.n"]], subject="$.account") as on:
        body = '{"account":"a","n":1,"event":"order.paid","created_at":"2026-11-15T20:00:00Z"}'
        signature = "sha256=" + hmac.new(b"s", body.encode(), "sha256").hexdigest()
        genuine: Arrival = on.draft(body, headers={"X-Signature": signature})
        [kept] = await on.kept(await on.take(genuine))
        assert (kept.key, kept.type, kept.subject) == ("a:1", "order.paid", "a")
        assert kept.event_at == datetime(2026, 11, 15, 20, tzinfo=UTC)
        assert (await on.take(genuine)).outcome == "duplicate"
        # a header is no key here, whoever adds it
        headers = {"X-Signature": signature, "Idempotency-Key": "fresh"}
        assert (await on.take(on.draft(body, headers=headers))).outcome == "duplicate"
        for wrong in (signature.upper(), signature[8:], "sha256=", signature + "0", "sha1=" + signature[7:]):
            assert (await on.take(on.draft(body, headers={"X-Signature": wrong}))).reply.status == 401, wrong


@pytest.mark.parametrize("preset", ["generic", "n8n"])
@pytest.mark.parametrize("header", ["X-Webhook-Signature", "X-Signature"])
@pytest.mark.parametrize("prefix", ["", "sha256="])
async def test_the_two_headers_and_forms_of_the_second_story(
    tmp_path: Path, preset: str, header: str, prefix: str
) -> None:
    # Its triggers of source "custom": either header, HMAC-SHA256 of the raw body in hex, with or without the prefix.
    async with trial(tmp_path, preset, secret=[b"s"], key="$.idempotency_key") as on:
        body = '{"event":"message","idempotency_key":"M7:read"}'
        digest = hmac.new(b"s", body.encode(), "sha256").hexdigest()
        for value in (digest[:-1] + "x", digest[1:], "sha1=" + digest, "sha256=", ""):
            assert (await on.take(on.draft(body, headers={header: prefix + value}))).reply.status == 401, value
        receipt = await on.take(on.draft(body, headers={header: prefix + digest}))
        assert receipt.outcome == "accepted"


def test_generic_does_not_start_without_a_key() -> None:
    generic = presets.load("generic")
    with pytest.raises(ConfigError, match="needs key"):
        build("x", preset=generic, secret=[b"s"])
    with pytest.raises(ConfigError, match="needs secret"):
        build("x", preset=generic, key="$.id")
    # a verifier of one's own does not excuse from saying what the key is
    with pytest.raises(ConfigError, match="needs key"):
        build("x", preset=generic, secret=[b"s"], verify=generic.scheme)
    build("x", preset=generic, secret=[b"s"], key="none")


async def test_generic_samples_have_the_key_where_the_settings_look(tmp_path: Path) -> None:
    for number, key in enumerate(("$.id", "$.meta.request.id", "header:X-Request-Id", [["$.account", "$.n"]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with trial(folder, "generic", key=key) as on:
            draft = samples.draft(on.source, "order.paid")
            receipt = await on.take(on.sign(draft))
            [kept] = await on.kept(receipt)
            assert kept.key
            assert kept.type == "order.paid"
