"""Signatures that the senders themselves published, each with its near misses.

Where a sender published none (Shopify, Linear, Calendly, Acuity, Typeform, Zoom, Mailgun, PayPal, Jira, 360dialog,
v1a), test_verify_schemes makes its own, and this file says nothing about them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from verify_cases import HUBSPOT_V1, HUBSPOT_V2, MERCADO_PAGO, META, SLACK, STRIPE

from oncehook import clock
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import Scheme, SendGrid, StandardWebhooks, Twilio
from oncehook.verify.readers import put_header

FORM = "application/x-www-form-urlencoded"
TWILIO_URL = "https://mycompany.com/myapp.php?foo=1&bar=2"
TWILIO_HASH = "0a1ff7634d9ab3b95db5c9a2dfe9416e41502b283a80c7cf19632632f96e6620"
SLACK_BODY = (
    "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar"
    "&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com"
    "%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121."
    "803a0bc887a14d10d2c447fce8b6703c"
)
HUBSPOT_SECRET = "yyyyyyyy-yyyy-yyyy-yyyy-yyyyyyyyyyyy"
HUBSPOT_BODY = (
    '[{"eventId":1,"subscriptionId":12345,"portalId":62515,"occurredAt":1564113600000,'
    '"subscriptionType":"contact.creation","attemptNumber":0,"objectId":123,"changeSource":"CRM","changeFlag":"NEW",'
    '"appId":54321}]'
)
SENDGRID_KEY = (
    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEEDr2LjtURuePQzplybdC+u4CwrqDqBaWjcMMsTbhdbcwHBcepxo7yAQGhHPTnlvFYPAZFceEu/"
    "1FwCM/QmGUhA=="
)
# the base point of the curve: a valid key, and not theirs
OTHER_SENDGRID_KEY = (
    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt6zOg9KE5RdiYwpZP40Li/hp/m47n60p8D54WK84zV2sxXs7L"
    "tkBoN79R9Q=="
)
SENDGRID_BODY = '{"category":"example_payload","event":"test_event","message_id":"message_id"}'


@dataclass(frozen=True)
class Vector:
    """A published signature: what was signed, with what, when, and what came out."""

    name: str
    scheme: Scheme
    secret: str
    signature: tuple[str, str]
    """The header that holds it, and its value."""
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    url: str | None = None
    query: str = ""
    method: str = "POST"
    at: float | None = None
    """When it was signed, where that is part of it."""

    def arrival(self) -> Arrival:
        headers = [(name.lower().encode(), value.encode()) for name, value in (*self.headers, self.signature)]
        return Arrival("vector", headers, self.body.encode(), query=self.query.encode(), method=self.method)


VECTORS = [
    Vector(
        "1 github and meta",
        META,
        "It's a Secret to Everybody",
        ("X-Hub-Signature-256", "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"),
        body="Hello, World!",
    ),
    Vector(
        "2 slack",
        SLACK,
        "8f742231b10e8888abcd99yyyzzz85a5",
        ("X-Slack-Signature", "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503"),
        body=SLACK_BODY,
        headers=(("X-Slack-Request-Timestamp", "1531420618"), ("Content-Type", FORM)),
        at=1531420618,
    ),
    Vector(
        "3 twilio form",
        Twilio(),
        "12345",
        ("X-Twilio-Signature", "RSOYDt4T1cUTdK1PDd93/VVr8B8="),
        body="CallSid=CA1234567890ABCDE&Caller=%2B14158675309&Digits=1234&From=%2B14158675309&To=%2B18005551212",
        headers=(("Content-Type", FORM),),
        url=TWILIO_URL,
        query="foo=1&bar=2",
    ),
    Vector(
        "5 twilio json",
        Twilio(),
        "12345",
        ("X-Twilio-Signature", "a9nBmqA0ju/hNViExpshrM61xv4="),
        body='{"property": "value", "boolean": true}',
        headers=(("Content-Type", "application/json"),),
        url=TWILIO_URL,
        query=f"foo=1&bar=2&bodySHA256={TWILIO_HASH}",
    ),
    Vector(
        "6 standard webhooks",
        StandardWebhooks(),
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
        body='{"test": 2432232314}',
        headers=(("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"), ("webhook-timestamp", "1614265330")),
        at=1614265330,
    ),
    Vector(
        "7 stripe",
        STRIPE,
        "whsec_test_secret",
        ("Stripe-Signature", "t=1600000000,v1=0a7fcf3d3e827f08963bef536165c289a8f2f5d9b6c038e511138255342462e0"),
        body='{"id":"evt_test_webhook","object":"event"}',
        at=1600000000,
    ),
    Vector(
        "10 hubspot v1",
        HUBSPOT_V1,
        HUBSPOT_SECRET,
        ("X-HubSpot-Signature", "232db2615f3d666fe21a8ec971ac7b5402d33b9a925784df3ca654d05f4817de"),
        body=HUBSPOT_BODY,
    ),
    Vector(
        "11 hubspot v2",
        HUBSPOT_V2,
        HUBSPOT_SECRET,
        ("X-HubSpot-Signature", "eee2dddcc73c94d699f5e395f4b9d454a069a6855fbfa152e91e88823087200e"),
        url="https://www.example.com/webhook_uri",
        method="GET",
    ),
    Vector(
        "14 sendgrid",
        SendGrid(),
        SENDGRID_KEY,
        (
            "X-Twilio-Email-Event-Webhook-Signature",
            "MEUCIQCtIHJeH93Y+qpYeWrySphQgpNGNr/U+UyUlBkU6n7RAwIgJTz2C+8a8xonZGi6BpSzoQsbVRamr2nlxFDWYNH2j/0=",
        ),
        body=SENDGRID_BODY,
        headers=(("X-Twilio-Email-Event-Webhook-Timestamp", "1588788367"),),
        at=1588788367,
    ),
    Vector(
        "16 mercado pago, id in lower case",
        MERCADO_PAGO,
        "your_secret_key_here",
        ("x-signature", "ts=1742505638683,v1=633f91233312dd391ec75fa0bea539cfc2d6c4918873305b84a96cc1c58db71c"),
        headers=(("x-request-id", "2066ca19-c6f1-498a-be75-1923005edd06"),),
        query="data.id=ORD01JQ4S4KY8HWQ6NA5PXB65B3D3&type=order",
        at=1742505638.683,
    ),
    Vector(
        "17 mercado pago, id as received",
        MERCADO_PAGO,
        "your_secret_key_here",
        ("x-signature", "ts=1742505638683,v1=fb15ae6472eb449173c556793205d77787d58f384d183bb5bc3b724c27bd103c"),
        headers=(("x-request-id", "2066ca19-c6f1-498a-be75-1923005edd06"),),
        query="data.id=ORD01JQ4S4KY8HWQ6NA5PXB65B3D3&type=order",
        at=1742505638.683,
    ),
]


def vectors(chosen: Sequence[Vector] = VECTORS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", chosen, ids=lambda vector: vector.name)


WITH_BODY = [vector for vector in VECTORS if "body" in vector.scheme.covers]
LISTS = [vector for vector in VECTORS if vector.name.startswith(("6", "7", "16"))]
TIMED = [vector for vector in VECTORS if vector.at is not None]


def verify(vector: Vector, arrival: Arrival, *secrets: str, tolerance: float | None = None) -> None:
    keys = [secret.encode() for secret in secrets or (vector.secret,)]
    vector.scheme.verifier(keys, url=vector.url, tolerance=tolerance)(arrival)


def refused(vector: Vector, arrival: Arrival, *secrets: str, tolerance: float | None = None) -> str:
    with pytest.raises(SignatureInvalid) as refusal:
        verify(vector, arrival, *secrets, tolerance=tolerance)
    return refusal.value.reason


@pytest.fixture(autouse=True)
def at_that_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    callspec = getattr(request.node, "callspec", None)
    vector = callspec.params.get("vector") if callspec else None
    if vector is not None and vector.at is not None:
        monkeypatch.setattr(clock, "now", lambda: vector.at)


@vectors()
def test_the_published_signature_is_genuine(vector: Vector) -> None:
    verify(vector, vector.arrival())


@vectors(WITH_BODY)
def test_a_space_more_is_refused(vector: Vector) -> None:
    arrival = vector.arrival()
    assert refused(vector, replace(arrival, body=arrival.body + b" ")) in ("mismatch", "malformed")


@vectors()
def test_the_wrong_secret_is_refused(vector: Vector) -> None:
    wrong = {"6 standard webhooks": "whsec_" + "A" * 32, "14 sendgrid": OTHER_SENDGRID_KEY}.get(
        vector.name, vector.secret + "x"
    )
    assert refused(vector, vector.arrival(), wrong) == "mismatch"
    verify(vector, vector.arrival(), wrong, vector.secret)


@vectors()
def test_without_the_header_it_is_refused(vector: Vector) -> None:
    arrival = vector.arrival()
    arrival.headers = [pair for pair in arrival.headers if pair[0] != vector.signature[0].lower().encode()]
    assert refused(vector, arrival) == "missing"


@vectors(LISTS)
def test_the_second_of_two_signatures_may_be_the_good_one(vector: Vector) -> None:
    name, value = vector.signature
    separator = " " if "v1," in value[:3] else ","
    good = value if separator == " " else value.rpartition(",")[2]
    bad = good[:-5] + "AAAA" + good[-1] if separator == " " else "v1=" + "0" * 64
    before = value.rpartition(",")[0] + "," if separator == "," else ""
    arrival = vector.arrival()
    put_header(arrival, name, f"{before}{bad}{separator}{good}".encode())
    verify(vector, arrival)
    put_header(arrival, name, f"{before}{bad}{separator}{bad}".encode())
    assert refused(vector, arrival) == "mismatch"


@vectors(TIMED)
def test_just_outside_the_window_it_is_stale(vector: Vector, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vector.at is not None
    tolerance = 300.0
    for skew in (299.0, -299.0):
        monkeypatch.setattr(clock, "now", lambda skew=skew: vector.at + skew)
        verify(vector, vector.arrival(), tolerance=tolerance)
    for skew in (301.0, -301.0):
        monkeypatch.setattr(clock, "now", lambda skew=skew: vector.at + skew)
        assert refused(vector, vector.arrival(), tolerance=tolerance) == "stale"
        verify(vector, vector.arrival(), tolerance=math.inf)


def test_a_body_parsed_and_written_again_is_refused() -> None:
    """Meta escapes what is not ASCII; the same text written as UTF-8 is another body."""
    escaped = b'{"text":"ol\\u00e1 \\ud83d\\ude42"}'
    arrival = META.sign(Arrival("meta", [], escaped), b"s", at=0)
    META.verifier([b"s"])(arrival)
    with pytest.raises(SignatureInvalid):
        META.verifier([b"s"])(replace(arrival, body='{"text":"olá 🙂"}'.encode()))


STANDARD = next(vector for vector in VECTORS if vector.name.startswith("6"))


@pytest.mark.parametrize(
    "value",
    [
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OA=",
        "v1,",
        "v1",
        "v1, ",
        "v1,=",
        ",",
        "v2,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        "v1a,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE",
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=,",
        " ".join(["v1,"] * 5),
    ],
)
def test_near_misses_of_standard_webhooks(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them the empty signature that CVE-2024-21491 let through."""
    monkeypatch.setattr(clock, "now", lambda: STANDARD.at)
    arrival = STANDARD.arrival()
    put_header(arrival, "webhook-signature", value.encode())
    assert refused(STANDARD, arrival) in ("mismatch", "malformed")


@pytest.mark.parametrize("secret", ["MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n"])
def test_a_secret_without_its_prefix_or_with_a_line_end_is_the_same(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "now", lambda: STANDARD.at)
    verify(STANDARD, STANDARD.arrival(), secret)


def test_stripe_secrets_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    stripe = next(vector for vector in VECTORS if vector.name.startswith("7"))
    monkeypatch.setattr(clock, "now", lambda: stripe.at)
    assert refused(stripe, stripe.arrival(), "test_secret") == "mismatch"


def test_other_fields_of_stripe_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    stripe = next(vector for vector in VECTORS if vector.name.startswith("7"))
    monkeypatch.setattr(clock, "now", lambda: stripe.at)
    name, value = stripe.signature
    arrival = stripe.arrival()
    put_header(arrival, name, value.encode() + b",v0=6ffbb59b2300aae63f272406069a9788598b792a944a07aba816edb039989a39")
    verify(stripe, arrival)
    put_header(arrival, name, value.replace("v1=", "v0=").encode())
    assert refused(stripe, arrival) == "malformed"
