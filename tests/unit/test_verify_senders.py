"""The schemes of single senders: Twilio, PayPal, Mailgun, and credentials in bodies and tokens."""

from __future__ import annotations

import hmac
from dataclasses import replace

import pytest
from verify_cases import BY_NAME, EVOLUTION, JSON, NOW, check, refused, signed

from oncehook import clock
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import Jwt, PayPal, Token, Twilio
from oncehook.verify.readers import put_header


@pytest.fixture(autouse=True)
def held_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: NOW)


# -- Twilio ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "signed_url"),
    [
        ("https://a.example/x", "https://a.example:443/x"),
        ("https://a.example:443/x", "https://a.example/x"),
        ("http://a.example/x?y=1", "http://a.example:80/x?y=1"),
        ("https://a.example:8443/x", "https://a.example/x"),
        ("https://[::1]:8443/x", "https://[::1]/x"),
        ("https://a.example/x#rc=2&rp=5xx", "https://a.example/x"),
    ],
)
def test_twilio_with_and_without_port(configured: str, signed_url: str) -> None:
    draft = Arrival("twilio", [(b"content-type", b"application/x-www-form-urlencoded")], b"A=1")
    arrival = Twilio().sign(draft, b"token", at=NOW, url=signed_url)
    Twilio().verifier([b"token"], url=configured)(arrival)
    with pytest.raises(SignatureInvalid):
        Twilio().verifier([b"token"], url=configured.replace("a.example", "b.example").replace("::1", "::2"))(arrival)


def test_twilio_form_fields_are_signed_whatever_their_order() -> None:
    case = BY_NAME["twilio-form"]
    arrival = signed(case)
    shuffled = b"&".join(reversed(arrival.body.split(b"&")))
    check(case, replace(arrival, body=shuffled))
    refused(case, replace(arrival, body=arrival.body + b"&Extra=1"))
    refused(case, replace(arrival, body=arrival.body.replace(b"Empty=", b"")))


def test_twilio_never_takes_a_body_that_is_not_signed() -> None:
    case = BY_NAME["twilio-get"]
    arrival = signed(case)
    for content_type in (b"application/json", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x"):
        broken = replace(arrival, body=b"&&")
        put_header(broken, "content-type", content_type)
        assert refused(case, broken) == "malformed"
    json_case = BY_NAME["twilio-json"]
    json_arrival = signed(json_case)
    as_form = replace(json_arrival, body=b"")
    put_header(as_form, "content-type", b"application/x-www-form-urlencoded")
    assert refused(json_case, as_form) == "mismatch"
    assert refused(json_case, replace(json_arrival, query=json_arrival.query + b"&bodySHA256=00")) == "repeated"


# -- PayPal ------------------------------------------------------------------------------------

CERT = "https://api.paypal.com/v1/notifications/certs/CERT-development"


def fetched(pem: bytes) -> tuple[PayPal, list[str]]:
    asked: list[str] = []

    def fetch(address: str) -> bytes:
        asked.append(address)
        return pem

    return PayPal(fetch=fetch), asked


def test_paypal_fetches_a_certificate_once() -> None:
    case = BY_NAME["paypal"]
    webhook_id, pem = case.keys().secrets
    scheme, asked = fetched(pem)
    verify = scheme.verifier([webhook_id])
    for _ in range(3):
        verify(signed(case))
    assert asked == [CERT]


@pytest.mark.parametrize(
    "address",
    [
        b"http://api.paypal.com/v1/notifications/certs/CERT-1",
        b"https://api.paypal.com.evil.example/v1/notifications/certs/CERT-1",
        b"https://evil-paypal.com/v1/notifications/certs/CERT-1",
        b"https://evil.example/v1/notifications/certs/CERT-1?x=.paypal.com",
        b"https://api.paypal.com@evil.example/v1/notifications/certs/CERT-1",
        b"https://api.paypal.com:8443/v1/notifications/certs/CERT-1",
        b"https://user@api.paypal.com/v1/notifications/certs/CERT-1",
        b"https://api.paypal.com/v1/notifications/certs/../../x",
        b"https://api.paypal.com/v1/notifications/certs/CERT-1?u=1",
        b"https://api.paypal.com/v1/notifications/certs/CERT-1#x",
        b"https://api.paypal.com/other",
        b"https://[::1/v1/notifications/certs/CERT-1",
        b"\xff\xfe",
        b"file:///etc/passwd",
    ],
)
def test_paypal_fetches_from_paypal_only(address: bytes) -> None:
    case = BY_NAME["paypal"]
    webhook_id, pem = case.keys().secrets
    scheme, asked = fetched(pem)
    arrival = signed(case)
    put_header(arrival, "paypal-cert-url", address)
    with pytest.raises(SignatureInvalid) as refusal:
        scheme.verifier([webhook_id])(arrival)
    assert refusal.value.reason == "malformed"
    assert asked == []


def test_a_stranger_does_not_set_the_pace_of_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["paypal"]
    webhook_id, pem = case.keys().secrets
    asked: list[str] = []

    def fetch(address: str) -> bytes:
        asked.append(address)
        if len(asked) == 1:
            raise OSError("no route")
        return pem

    verify = PayPal(fetch=fetch).verifier([webhook_id])
    for _ in range(5):
        with pytest.raises(SignatureInvalid) as refusal:
            verify(signed(case))
        assert refusal.value.reason == "unavailable"
    assert len(asked) == 1
    later = clock.steady() + 11
    monkeypatch.setattr(clock, "steady", lambda: later)
    verify(signed(case))


def test_paypal_refuses_a_fetched_certificate_that_is_not_its_own() -> None:
    case = BY_NAME["paypal"]
    webhook_id = case.keys().secrets[0]
    broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
    for bad in (b"", broken, certificate_for("paypal.com.evil.example"), certificate_for("evilpaypal.com")):
        scheme, _ = fetched(bad)
        with pytest.raises(SignatureInvalid):
            scheme.verifier([webhook_id])(signed(case))
    scheme, _ = fetched(certificate_for("messageverificationcerts.paypal.com"))
    scheme.verifier([webhook_id])(signed(case))


def test_paypal_refuses_a_fetched_certificate_out_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["paypal"]
    webhook_id, pem = case.keys().secrets
    scheme, _ = fetched(pem)
    verify = scheme.verifier([webhook_id])
    later = NOW + 20 * 365 * 86400
    monkeypatch.setattr(clock, "now", lambda: later)
    with pytest.raises(SignatureInvalid) as refusal:
        verify(signed(case, later))
    assert refusal.value.reason == "stale"


def certificate_for(common_name: str) -> bytes:
    """A certificate for the very key the case signs with, in somebody's name."""
    from datetime import timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    pem = BY_NAME["paypal"].keys().signing
    key = serialization.load_pem_private_key(pem[pem.index(b"-----") :], None)
    assert isinstance(key, rsa.RSAPrivateKey)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(clock.now_utc() - timedelta(days=1))
    certificate = builder.not_valid_after(clock.now_utc() + timedelta(days=9)).sign(key, hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auth-algo", b"MD5withRSA"),
        ("auth-algo", b"none"),
        ("transmission-time", b"2026-09-21T14:13:20"),
        ("transmission-time", b"yesterday"),
        ("transmission-id", b"a|b"),
    ],
)
def test_paypal_headers_that_no_sender_writes(name: str, value: bytes) -> None:
    case = BY_NAME["paypal"]
    arrival = signed(case)
    put_header(arrival, f"paypal-{name}", value)
    assert refused(case, arrival) == "malformed"


# -- body tokens and Mailgun -------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"[]", b"null", b'{"instanceToken":1}', b'{"instanceToken":"\xff"}', b'{"a":' * 50_000, b"[" * 500_000],
)
def test_a_body_that_cannot_be_read_has_no_token(body: bytes) -> None:
    for name in ("evolution-go", "mailgun-json"):
        assert (
            refused(BY_NAME[name], Arrival("s", [JSON], body.replace(b"instanceToken", token_field(name))))
            == "malformed"
        )


def token_field(name: str) -> bytes:
    return b"signature" if name.startswith("mailgun") else b"instanceToken"


def test_mailgun_takes_the_parent_accounts_signature() -> None:
    now = str(int(NOW)).encode()
    parent = hmac.digest(b"parent", now + b"t" * 50, "sha256").hex()
    body = b'{"signature":{"timestamp":"%b","token":"%b","signature":"%b","parent-signature":"%b"}}' % (
        now, b"t" * 50, b"0" * 64, parent.encode())  # fmt: skip
    scheme = BY_NAME["mailgun-json"].scheme
    scheme.verifier([b"parent"])(Arrival("mailgun", [JSON], body))
    with pytest.raises(SignatureInvalid):
        scheme.verifier([b"other"])(Arrival("mailgun", [JSON], body))


def test_mailgun_fields_may_not_repeat_in_a_form() -> None:
    case = BY_NAME["mailgun-form"]
    arrival = signed(case)
    assert refused(case, replace(arrival, body=arrival.body + b"&token=x")) == "repeated"


# -- Jwt ---------------------------------------------------------------------------------------


def test_a_jwt_must_carry_the_claims() -> None:
    draft = Arrival("s", [], b"{}")
    wrong = Jwt(claims={"app": "evolution", "action": "other"}).sign(draft, b"s", at=NOW)
    with pytest.raises(SignatureInvalid) as refusal:
        EVOLUTION.schemes[0].verifier([b"s"])(wrong)
    assert refusal.value.reason == "mismatch"


def test_bearer_is_written_in_any_case() -> None:
    verify = Token(place="header:authorization", prefix="Bearer ").verifier([b"s"])
    for value in (b"Bearer s", b"bearer s", b"BEARER s"):
        verify(Arrival("s", [(b"authorization", value)], b""))
    with pytest.raises(SignatureInvalid):
        verify(Arrival("s", [(b"authorization", b"Basic s")], b""))


def test_a_form_of_very_many_fields_is_refused_before_it_is_sorted() -> None:
    form = (b"content-type", b"application/x-www-form-urlencoded")
    for name, header in (("twilio-form", b"x-twilio-signature"), ("mailgun-form", b"x-other")):
        arrival = Arrival("s", [form, (header, b"A" * 27 + b"=")], b"a=1&" * 100_000)
        assert refused(BY_NAME[name], arrival) == "malformed"
