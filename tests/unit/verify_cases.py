"""One case per way that a listed sender proves itself: the scheme as a preset would write it, and a draft to sign."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from functools import cache

import pytest

from oncehook import clock
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import (
    Basic,
    DevelopmentKeys,
    Ed25519,
    Either,
    Fields,
    Hash,
    Hmac,
    Jwt,
    Mailgun,
    PayPal,
    Scheme,
    SendGrid,
    StandardWebhooks,
    Token,
    Twilio,
    development_keys,
)
from oncehook.verify.asymmetric import ed25519_public

NOW = float(int(clock.now()))
REASONS = {"missing", "malformed", "mismatch", "stale", "repeated"}
JSON = (b"content-type", b"application/json")
FORM = (b"content-type", b"application/x-www-form-urlencoded; charset=utf-8")
BODY = b'{"id":"1","text":"ol\\u00e1 \\ud83d\\ude42"}'


@dataclass(frozen=True)
class Case:
    """A scheme with everything that is needed to sign and to verify with it."""

    name: str
    scheme: Scheme
    body: bytes = BODY
    content_type: tuple[bytes, bytes] = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    query: bytes = b""
    url: str | None = None
    window: float = math.inf
    """The tolerance of the scheme, where it has one."""
    public: bool = False
    """Checked with a public key: there is no secret to compare."""
    ed25519: bool = False

    def draft(self) -> Arrival:
        host = (b"host", b"example.com")
        return Arrival("case", [host, self.content_type, *self.headers], self.body, query=self.query)

    def keys(self) -> DevelopmentKeys:
        return _keys(self.name)

    def other_keys(self) -> DevelopmentKeys:
        return _keys(self.name, True)


@cache
def _keys(name: str, other: bool = False) -> DevelopmentKeys:
    case = BY_NAME[name]
    if case.ed25519:
        seed = bytes([7 + other]) * 32
        public = b"whpk_" + base64.b64encode(ed25519_public(seed))
        return DevelopmentKeys((public,), b"whsk_" + base64.b64encode(seed))
    return development_keys(case.scheme)


META = Hmac(header="X-Hub-Signature-256", prefix="sha256=")
BEARER = Token(place="header:Authorization", prefix="Bearer ")
HUBSPOT_V3 = Hmac(
    header="X-HubSpot-Signature-v3",
    encoding="base64",
    signed=("{method}{url}{body}{timestamp}", "{method}{url|decoded}{body}{timestamp}"),
    timestamp="header:X-HubSpot-Request-Timestamp",
    unit="milliseconds",
)
HUBSPOT_V2 = Hash(header="X-HubSpot-Signature", signed="{method}{url}{body}")
HUBSPOT_V1 = Hash(header="X-HubSpot-Signature", signed="{body}")
MERCADO_PAGO = Hmac(
    header="x-signature",
    signed=(
        "[id:{query:data.id|lower};][request-id:{header:x-request-id};]ts:{timestamp};",
        "[id:{query:data.id};][request-id:{header:x-request-id};]ts:{timestamp};",
    ),
    timestamp="field:ts",
    unit="auto",
    fields=Fields(signature="v1"),
    tolerance=math.inf,
)
SLACK = Hmac(
    header="X-Slack-Signature",
    prefix="v0=",
    signed="v0:{timestamp}:{body}",
    timestamp="header:X-Slack-Request-Timestamp",
)
STRIPE = Hmac(header="Stripe-Signature", signed="{timestamp}.{body}", timestamp="field:t", fields=Fields())
ZOOM = Hmac(
    header="x-zm-signature", prefix="v0=", signed="v0:{timestamp}:{body}", timestamp="header:x-zm-request-timestamp"
)
PADDLE = Hmac(
    header="Paddle-Signature",
    signed="{timestamp}:{body}",
    timestamp="field:ts",
    fields=Fields(signature="h1", separator=";"),
)
LINEAR = Hmac(header="Linear-Signature", timestamp="body:webhookTimestamp", unit="milliseconds", tolerance=60.0)
DISCORD = Ed25519(
    header="X-Signature-Ed25519",
    timestamp="header:X-Signature-Timestamp",
    signed="{timestamp}{body}",
    tolerance=900.0,
)
GITLAB_TOKEN = Token(place="header:X-Gitlab-Token")
GITLAB = Either(StandardWebhooks(bare=False), GITLAB_TOKEN)
DIALOG360 = Either(
    Either(Hmac(header="x-360dialog-signature"), Hmac(header="x-360dialog-signature", encoding="base64"), every=True),
    Token(place="header:Authorization"),
)
EVOLUTION = Either(
    Jwt(leeway=3600.0, claims={"app": "evolution", "action": "webhook"}), Token(place="header:apikey"), every=True
)
JIRA = Either(Hmac(header="X-Hub-Signature", prefix="sha256="), Jwt())
CLOUDEVENTS = Either(BEARER, Token(place="query:access_token"))

GITLAB_ONLY_SIGNED = Either(StandardWebhooks(bare=False), StandardWebhooks(prefix="svix", bare=False))

SITE = "https://hooks.example.com/in/case"

CASES = [
    Case("whatsapp-cloud", META),
    Case("messenger", META),
    Case("github", META),
    Case("360dialog", DIALOG360),
    Case("evolution-api-jwt", EVOLUTION, window=3600.0 + 600),
    Case("evolution-api-header", Token(place="header:apikey")),
    Case("evolution-go", Token(place="body:instanceToken")),
    Case("waha", Hmac(header="X-Webhook-Hmac", algorithm="sha512")),
    Case(
        "twilio-form", Twilio(), body=b"Empty=&From=%2B14158675309&Body=ol%C3%A1+voc%C3%AA", content_type=FORM, url=SITE
    ),
    Case("twilio-json", Twilio(), url=SITE + "?foo=1", query=b"foo=1"),
    Case("twilio-get", Twilio(), body=b"", url=SITE),
    Case("telegram", Token(place="header:X-Telegram-Bot-Api-Secret-Token")),
    Case("slack", SLACK, window=300),
    Case("stripe", STRIPE, window=300),
    Case("paypal", PayPal(), window=4 * 86400, public=True),
    Case("square", Hmac(header="x-square-hmacsha256-signature", encoding="base64", signed="{url}{body}"), url=SITE),
    Case("paddle", PADDLE, window=300),
    Case("mercadopago", MERCADO_PAGO, headers=((b"x-request-id", b"r-1"),), query=b"data.id=ABC&type=payment"),
    Case("mercadopago-bare", MERCADO_PAGO),
    Case(
        "shopify",
        Either(*[Hmac(header=name, encoding="base64") for name in ("X-Shopify-Hmac-Sha256", "shopify-hmac-sha256")]),
    ),
    Case("hubspot-v3", HUBSPOT_V3, url=SITE + "?a=%3Ab", query=b"a=%3Ab", window=300),
    Case("hubspot-v2", HUBSPOT_V2, url=SITE),
    Case("hubspot-v1", HUBSPOT_V1),
    Case("hubspot", Either(HUBSPOT_V3, Either(HUBSPOT_V2, HUBSPOT_V1, every=True)), url=SITE, window=300),
    Case(
        "acuity", Hmac(header="x-acuity-signature", encoding="base64"), body=b"action=scheduled&id=1", content_type=FORM
    ),
    Case(
        "calendly",
        Hmac(header="Calendly-Webhook-Signature", signed="{timestamp}.{body}", timestamp="field:t", fields=Fields()),
        window=300,
    ),
    Case("typeform", Hmac(header="Typeform-Signature", prefix="sha256=", encoding="base64")),
    Case("zoom", ZOOM, window=300),
    Case("sendgrid", SendGrid(), window=25 * 3600, public=True),
    Case("mailgun-json", Mailgun(), window=12 * 3600),
    Case("mailgun-form", Mailgun(), body=b"subject=hi+there&sender=a%40b", content_type=FORM, window=12 * 3600),
    Case("gitlab-signing-token", GITLAB, window=300),
    Case("gitlab-token", GITLAB_TOKEN),
    Case("linear", LINEAR, window=60),
    Case("jira-hmac", JIRA),
    Case("jira-jwt", Jwt(), window=60 + 600),
    Case("n8n-bearer", BEARER),
    Case("n8n-basic", Basic()),
    Case("standard-webhooks", StandardWebhooks(), window=300),
    Case("standard-webhooks-v1a", StandardWebhooks(), window=300, public=True, ed25519=True),
    Case("svix", StandardWebhooks(prefix="svix"), window=300),
    Case("cloudevents", CLOUDEVENTS),
    Case("cloudevents-query", Token(place="query:access_token"), query=b"a=1"),
    Case("discord", DISCORD, window=900, public=True),
    Case("ed25519-base64", Ed25519(header="X-Sig", encoding="base64", key="base64"), public=True),
    Case("generic-base64-key", Hmac(header="X-Signature", key="base64", algorithm="sha384", encoding="base64")),
]
BY_NAME = {case.name: case for case in CASES}


def signed(case: Case, at: float = NOW) -> Arrival:
    """The case's draft, as its sender would send it."""
    return case.scheme.sign(case.draft(), case.keys().signing, at=at, url=case.url)


def check(case: Case, arrival: Arrival, *, tolerance: float | None = None) -> None:
    """Verify with the case's own secrets."""
    case.scheme.verifier(case.keys().secrets, url=case.url, tolerance=tolerance)(arrival)


def refused(case: Case, arrival: Arrival) -> str:
    """Assert that it is refused, and say why."""
    with pytest.raises(SignatureInvalid) as refusal:
        check(case, arrival)
    assert refusal.value.reason in REASONS
    return refusal.value.reason
