"""Every scheme: what it signs it verifies, and nothing else (S1-S7)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from verify_cases import (
    BY_NAME,
    CASES,
    EVOLUTION,
    GITLAB,
    GITLAB_ONLY_SIGNED,
    META,
    NOW,
    STRIPE,
    Case,
    check,
    refused,
    signed,
)

from oncehook import clock
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import (
    Basic,
    Hash,
    Hmac,
    Jwt,
    Nothing,
    PayPal,
    SecretError,
    SendGrid,
    StandardWebhooks,
    Token,
    development_keys,
    schemes,
)
from oncehook.verify.readers import base64_strict, put_header


def cases(chosen: Callable[[Case], bool]) -> pytest.MarkDecorator:
    """Run with each case that this holds for."""
    return pytest.mark.parametrize("case", [case for case in CASES if chosen(case)], ids=lambda case: case.name)


every_case = cases(lambda case: True)
shared_secret = cases(lambda case: not case.public)
timed = cases(lambda case: case.window != math.inf)
timed_by_scheme = cases(lambda case: case.window != math.inf and "jwt" not in case.name)
url_signed = cases(lambda case: case.url is not None)
body_covered = cases(lambda case: "body" in case.scheme.covers and bool(case.body))
url_covered = cases(lambda case: "url" in case.scheme.covers)
in_a_header = cases(lambda case: not case.name.startswith(("mailgun", "evolution-go", "cloudevents-query")))


@pytest.fixture(autouse=True)
def held_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", lambda: NOW)


def added_headers(case: Case, arrival: Arrival) -> list[bytes]:
    before = {name for name, _ in case.draft().headers}
    return [name for name, _ in arrival.headers if name not in before]


# -- round trip --------------------------------------------------------------------------------


@every_case
def test_what_it_signs_it_verifies(case: Case) -> None:
    draft = case.draft()
    arrival = signed(case)
    check(case, arrival)
    assert draft.headers == case.draft().headers, "the draft itself must stay as it was"


@every_case
def test_unsigned_is_refused(case: Case) -> None:
    assert refused(case, case.draft()) == "missing"


@every_case
def test_another_secret_is_refused(case: Case) -> None:
    verify = case.scheme.verifier(case.other_keys().secrets, url=case.url)
    with pytest.raises(SignatureInvalid) as refusal:
        verify(signed(case))
    assert refusal.value.reason == "mismatch"


@every_case
def test_any_of_several_secrets_may_match(case: Case) -> None:
    good, other = case.keys().secrets, case.other_keys().secrets
    for secrets in ((*good, *other), (*other, *good)):
        case.scheme.verifier(secrets, url=case.url)(signed(case))


@body_covered
@pytest.mark.parametrize("change", [lambda body: body + b" ", lambda body: body[:-1], lambda body: b"[" + body[1:]])
def test_one_changed_byte_of_a_covered_body_is_refused(case: Case, change: Callable[[bytes], bytes]) -> None:
    arrival = signed(case)
    refused(case, replace(arrival, body=change(arrival.body)))


@url_covered
def test_a_covered_query_is_covered(case: Case) -> None:
    arrival = signed(case)
    refused(case, replace(arrival, query=arrival.query + b"&x=1"))


@every_case
def test_covered_headers_are_covered(case: Case) -> None:
    for name in case.scheme.signed_headers:
        arrival = signed(case)
        old = dict(arrival.headers)[name]
        put_header(arrival, name.decode(), old[:-1] + (b"0" if old[-1:] != b"0" else b"1"))
        refused(case, arrival)


@in_a_header
def test_each_changed_byte_of_the_signature_is_refused(case: Case) -> None:
    arrival = signed(case)
    names = added_headers(case, arrival)
    for name in names[-1:]:
        value = dict(arrival.headers)[name]
        if case.public and case.name == "paypal":
            name, value = b"paypal-transmission-sig", dict(arrival.headers)[b"paypal-transmission-sig"]
        for place in range(0, len(value) - 3, 5):
            broken = replace(arrival)
            letter = b"x" if value[place : place + 1] != b"x" else b"y"
            put_header(broken, name.decode(), value[:place] + letter + value[place + 1 :])
            refused(case, broken)


MALFORMED = (
    [b"", b" ", b"=", b",", b"sha256=", b"v1,", b"v1=", b"t=,v1=", b"Bearer ", b"Basic ", b"Basic :", b"a" * 10_000,
     b"=" * 10_000, b"v1," * 3000, b"t=1,v1=" + b"a" * 64, b"sha256=" + b"g" * 64, b"\xff\x00\n", "é".encode(), b"..",
     b"e30.e30.", b"Bearer e30.e30.e30", b"AAAA" * 16]
)  # fmt: skip


@in_a_header
def test_a_malformed_signature_is_refused(case: Case) -> None:
    arrival = signed(case)
    names = set(added_headers(case, arrival)) - {b"paypal-cert-url", b"webhook-id", b"svix-id"}
    for name, value in product(names, MALFORMED):
        broken = replace(arrival)
        put_header(broken, name.decode(), value)
        refused(case, broken)


def test_bytes_have_one_spelling_in_base64() -> None:
    assert base64_strict(b"AAE=") == b"\0\1"
    for text in (b"AAF=", b"AAE==", b"AAE", b"AA E=", b"AAE=\n", b"AAE=AAE="):
        with pytest.raises(SignatureInvalid):
            base64_strict(text)


# -- S7: repeated headers and twins ------------------------------------------------------------


@in_a_header
def test_a_repeated_header_is_refused(case: Case) -> None:
    arrival = signed(case)
    for name in added_headers(case, arrival):
        for extra in (dict(arrival.headers)[name], b"other", b""):
            for headers in ([*arrival.headers, (name, extra)], [(name, extra), *arrival.headers]):
                assert refused(case, replace(arrival, headers=headers)) == "repeated"


@in_a_header
def test_an_underscore_twin_is_refused(case: Case) -> None:
    arrival = signed(case)
    for name in added_headers(case, arrival):
        if b"-" in name:
            for twin in (name.replace(b"-", b"_"), name.replace(b"-", b"_", 1), name.replace(b"-", b"_").upper()):
                for headers in ([*arrival.headers, (twin, b"x")], [(twin, b"x"), *arrival.headers]):
                    assert refused(case, replace(arrival, headers=headers)) == "repeated"


def test_a_lone_twin_is_no_signature() -> None:
    case = BY_NAME["github"]
    arrival = signed(case)
    headers = [(name.replace(b"hub-signature", b"hub_signature"), value) for name, value in arrival.headers]
    refused(case, replace(arrival, headers=headers))


def test_signed_headers_and_query_values_may_not_repeat_either() -> None:
    case = BY_NAME["mercadopago"]
    arrival = signed(case)
    assert refused(case, replace(arrival, headers=[*arrival.headers, (b"x_request_id", b"r-1")])) == "repeated"
    assert refused(case, replace(arrival, query=arrival.query + b"&data.id=ABC")) == "repeated"
    stripe = signed(BY_NAME["stripe"])
    value = dict(stripe.headers)[b"stripe-signature"]
    put_header(stripe, "stripe-signature", value + b",t=1")
    assert refused(BY_NAME["stripe"], stripe) == "repeated"


# -- S5: time ----------------------------------------------------------------------------------


@timed
def test_the_window_is_kept_on_both_sides(case: Case) -> None:
    is_jwt = "jwt" in case.name  # a token carries its own end, ten minutes after it was made
    ahead = case.window - 600 if is_jwt else case.window
    for at in (NOW - case.window + 2, NOW + ahead - 2):
        check(case, signed(case, at))
    for at in (NOW - case.window - 2, NOW + ahead + 2):
        assert refused(case, signed(case, at)) == "stale"
        check(case, signed(case, at), tolerance=math.inf)


@timed_by_scheme
def test_the_window_can_be_set(case: Case) -> None:
    check(case, signed(case, NOW - 8), tolerance=10)
    with pytest.raises(SignatureInvalid):
        check(case, signed(case, NOW - 12), tolerance=10)


@pytest.mark.parametrize("tolerance", [0, -1, math.nan])
def test_a_window_of_nothing_is_refused(tolerance: float) -> None:
    with pytest.raises(ConfigError):
        STRIPE.verifier([b"s"], tolerance=tolerance)
    with pytest.raises(ConfigError):
        Hmac(header="X", signed="{timestamp}{body}", timestamp="header:T", tolerance=tolerance)


def test_the_timestamp_must_be_signed() -> None:
    with pytest.raises(ConfigError, match="must be signed"):
        Hmac(header="X-Signature", signed="{body}", timestamp="header:X-Timestamp")
    with pytest.raises(ConfigError, match="must be signed"):
        Hmac(header="X-Signature", signed=("{timestamp}{body}", "{body}"), timestamp="header:X-Timestamp")
    with pytest.raises(ConfigError, match="must be signed"):
        Hmac(header="X-Signature", signed="[{timestamp}]{body}", timestamp="header:X-Timestamp")
    with pytest.raises(ConfigError, match="must be signed"):
        Hmac(header="X-Signature", signed="{url}", timestamp="body:sent_at")


def test_linear_does_not_believe_a_timestamp_outside_the_signed_body() -> None:
    case = BY_NAME["linear"]
    arrival = signed(case, NOW - 3600)
    put_header(arrival, "linear-timestamp", str(int(NOW * 1000)).encode())
    assert refused(case, arrival) == "stale"


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"{}", "missing"), (b"[]", "malformed"), (b"{", "malformed"), (b"\xff", "malformed"),
     (b'{"webhookTimestamp":"x"}', "malformed"), (b'{"webhookTimestamp":true}', "malformed"),
     (b'{"webhookTimestamp":-1}', "malformed"), (b'{"webhookTimestamp":' + b"9" * 4000 + b"}", "malformed"),
     (b'{"webhookTimestamp":null}', "missing"), (b'{"a":' + b"[" * 100_000, "malformed")],
)  # fmt: skip
def test_a_signed_body_without_a_readable_time_is_refused(body: bytes, reason: str) -> None:
    plain = Hmac(header="Linear-Signature")
    arrival = plain.sign(Arrival("linear", [], body), b"s", at=NOW)
    with pytest.raises(SignatureInvalid) as refusal:
        BY_NAME["linear"].scheme.verifier([b"s"])(arrival)
    assert refusal.value.reason == reason


@pytest.mark.parametrize("text", [b"+1790000000", b"1_790_000_000", b"1790000000.0", b"0x6", b"1e9", b"9" * 17, b"-1"])
def test_a_timestamp_is_digits(text: bytes) -> None:
    forged = Hmac(header="X-Slack-Signature", prefix="v0=", signed="v0:{header:x-slack-request-timestamp}:{body}")
    draft = Arrival("slack", [(b"x-slack-request-timestamp", text)], b"{}")
    with pytest.raises(SignatureInvalid) as refusal:
        BY_NAME["slack"].scheme.verifier([b"s"])(forged.sign(draft, b"s", at=NOW))
    assert refusal.value.reason == "malformed"


# -- S3: one comparator ------------------------------------------------------------------------


@shared_secret
def test_every_secret_is_compared_by_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    arrival = signed(case)
    calls: list[tuple[bytes, bytes]] = []

    def never(a: bytes, b: bytes) -> bool:
        calls.append((a, b))
        return False

    monkeypatch.setattr(schemes, "same", never)
    assert refused(case, arrival) == "mismatch"
    assert calls
    assert all(isinstance(a, bytes) and isinstance(b, bytes) for a, b in calls)


@shared_secret
def test_same_alone_decides(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "same", lambda a, b: True)
    case.scheme.verifier(case.other_keys().secrets, url=case.url)(signed(case))


def test_the_hash_of_a_twilio_body_is_compared_by_same_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["twilio-json"]
    calls: list[bytes] = []

    def counted(a: bytes, b: bytes) -> bool:
        calls.append(a)
        return True

    monkeypatch.setattr(schemes, "same", counted)
    check(case, signed(case))
    assert hashlib.sha256(case.body).hexdigest().encode() in calls


def test_same_is_the_constant_time_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        asked.append((a, b))
        return True

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert schemes.same(b"a", b"b")
    assert asked == [(b"a", b"b")]


def test_all_secrets_are_compared_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    def counted(a: bytes, b: bytes) -> bool:
        calls.append(a)
        return a == b

    monkeypatch.setattr(schemes, "same", counted)
    secrets = [b"first", b"second", b"third"]
    arrival = META.sign(Arrival("s", [], b"{}"), b"first", at=NOW)
    META.verifier(secrets)(arrival)
    assert len(calls) == 3


# -- S4: fail closed ---------------------------------------------------------------------------


@every_case
def test_no_secret_no_source(case: Case) -> None:
    for secrets in ((), (b"",), (b" \n",), (*case.keys().secrets, b"")):
        with pytest.raises(ConfigError):
            case.scheme.verifier(secrets, url=case.url)


@url_signed
@pytest.mark.parametrize("url", [None, "", "example.com/x", "ftp://example.com/", "https://", "/in/x", "https://a:b/"])
def test_a_url_that_is_signed_must_be_configured(case: Case, url: str | None) -> None:
    with pytest.raises(ConfigError):
        case.scheme.verifier(case.keys().secrets, url=url)


@pytest.mark.parametrize(
    ("scheme", "secret"),
    [
        (StandardWebhooks(), b"whsec_not base64!"),
        (StandardWebhooks(), b"whsec_"),
        (StandardWebhooks(), b"whpk_AAAA"),
        (StandardWebhooks(), b"whsk_AAAA"),
        (StandardWebhooks(bare=False), b"MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
        (SendGrid(), b"AAAA"),
        (SendGrid(), b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"),
        (PayPal(), b"WH-1"),
        (PayPal(), b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"),
        (Basic(), b"nocolon"),
        (Basic(), b":"),
        (Hmac(header="X", key="base64"), b"not base64!"),
        (Hmac(header="X", key="hex"), b"xyz"),
    ],
)
def test_a_key_that_cannot_be_loaded_is_an_error(scheme: schemes.Scheme, secret: bytes) -> None:
    with pytest.raises(SecretError):
        scheme.verifier([secret])


def test_errors_about_a_secret_do_not_show_it() -> None:
    secret = b"canary-0123456789 ?"
    wants_keys = (StandardWebhooks(), SendGrid(), PayPal(), Basic(), Hmac(header="X", key="hex"), GITLAB_ONLY_SIGNED)
    for scheme in wants_keys:
        with pytest.raises(SecretError) as error:
            scheme.verifier([secret])
        assert "canary" not in f"{error.value} {error.value.hint}"


def test_a_certificate_alone_is_not_enough_for_paypal() -> None:
    webhook_id, certificate = BY_NAME["paypal"].keys().secrets
    with pytest.raises(SecretError, match="webhook id"):
        PayPal().verifier([certificate])
    with pytest.raises(SecretError, match="certificate"):
        PayPal().verifier([webhook_id])


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "md5"},
        {"algorithm": "none"},
        {"encoding": "base32"},
        {"signed": "nothing"},
        {"signed": ()},
        {"signed": "[{body}]"},
        {"signed": "{bdy}"},
        {"signed": "{body|lower}"},
        {"signed": "{url|upper}"},
        {"signed": "{body"},
        {"signed": "{body}]"},
        {"signed": "[[{body}]"},
        {"signed": "[{header:a}[{body}]]"},
        {"signed": "{header:}"},
        {"signed": "{timestamp}{body}"},
        {"timestamp": "header:"},
        {"timestamp": "field:t", "signed": "{timestamp}{body}"},
        {"timestamp": "cookie:t", "signed": "{timestamp}{body}"},
        {"unit": "days"},
        {"key": "rot13"},
        {"header": "a b"},
        {"header": ""},
    ],
)
def test_a_definition_that_cannot_check_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Hmac(**{"header": "X-Signature", **options})


def test_nothing_accepts_anything() -> None:
    draft = Arrival("s", [(b"a", b"b")], b"x")
    assert Nothing().verifier([])(draft) is None
    assert Nothing().sign(draft, b"", at=NOW) == draft


# -- templates ---------------------------------------------------------------------------------


def test_brackets_and_braces_that_are_meant_are_doubled() -> None:
    scheme = Hmac(header="X", signed="{{[[{body}]]}}")
    expected = Hmac(header="X").sign(Arrival("s", [], b"{[x]}"), b"s", at=NOW)
    assert scheme.sign(Arrival("s", [], b"x"), b"s", at=NOW).headers == expected.headers


def test_a_place_that_is_absent_refuses() -> None:
    scheme = Hmac(header="X", signed="{header:x-id}.{body}")
    arrival = scheme.sign(Arrival("s", [(b"x-id", b"1")], b"x"), b"s", at=NOW)
    scheme.verifier([b"s"])(arrival)
    arrival.headers = [pair for pair in arrival.headers if pair[0] != b"x-id"]
    with pytest.raises(SignatureInvalid):
        scheme.verifier([b"s"])(arrival)
    with pytest.raises(ConfigError):
        scheme.sign(Arrival("s", [], b"x"), b"s", at=NOW)


def test_what_is_covered_is_what_every_template_holds() -> None:
    assert Hmac(header="X").covers == {"body"}
    assert Hmac(header="X", signed="{url}{body}").covers == {"body", "url"}
    assert Hmac(header="X", signed=("{url}{body}", "{body}")).covers == {"body"}
    assert Hmac(header="X", signed="{method}[{body}]").covers == frozenset()
    assert Hmac(header="X", signed="{header:A}{body}").signed_headers == {b"a"}
    assert BY_NAME["mercadopago"].scheme.covers == frozenset()
    assert BY_NAME["slack"].scheme.signed_headers == {b"x-slack-request-timestamp"}
    assert StandardWebhooks().signed_headers == {b"webhook-id", b"webhook-timestamp"}


def test_headers_that_carry_the_secret_are_masked() -> None:
    assert Token(place="header:X-Gitlab-Token").masked == {b"x-gitlab-token"}
    assert Token(place="query:access_token").masked_query == {b"access_token"}
    assert Basic().masked == Jwt().masked == {b"authorization"}
    assert GITLAB.masked == {b"x-gitlab-token"}
    assert EVOLUTION.masked == {b"authorization", b"apikey"}
    assert META.masked == StandardWebhooks().masked == frozenset()


@every_case
def test_the_secret_stands_in_nothing_that_is_kept(case: Case) -> None:
    arrival = signed(case)
    secret = case.keys().signing
    for name, value in arrival.headers:
        assert name in case.scheme.masked or secret not in value
    assert secret not in arrival.query or case.scheme.masked_query


# -- Hash --------------------------------------------------------------------------------------


def sha256_padding(length: int) -> bytes:
    return b"\x80" + b"\0" * ((55 - length) % 64) + (length * 8).to_bytes(8)


def test_a_plain_hash_cannot_be_extended() -> None:
    secret, body = b"s" * 36, b"[{}]"
    glue = sha256_padding(len(secret + body))
    longer = body + glue + b"[1]"
    # who extends a hash gets exactly this digest, without knowing the secret
    forged = hashlib.sha256(secret + longer).hexdigest().encode()
    with pytest.raises(SignatureInvalid):
        Hash(header="X-Signature").verifier([secret])(Arrival("s", [(b"x-signature", forged)], longer))


# -- development keys --------------------------------------------------------------------------


def test_development_keys_are_never_printed_and_never_twice_the_same() -> None:
    keys = development_keys(META)
    assert keys.signing.decode() not in repr(keys)
    assert keys.signing != development_keys(META).signing
