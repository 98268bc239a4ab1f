"""Every scheme: what it signs it verifies, and nothing else (S1-S7)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from verify_cases import BY_NAME, CASES, EVOLUTION, GITLAB, JIRA, META, STRIPE, Case

from oncehook import clock
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import (
    Basic,
    Either,
    Hash,
    Hmac,
    Jwt,
    Nothing,
    PayPal,
    SecretError,
    SendGrid,
    StandardWebhooks,
    Token,
    Twilio,
    development_keys,
    schemes,
)
from oncehook.verify.reading import put_header

NOW = float(int(clock.now()))
REASONS = {"missing", "malformed", "mismatch", "stale", "repeated"}


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


def signed(case: Case, at: float = NOW) -> Arrival:
    return case.scheme.sign(case.draft(), case.keys().signing, at=at, url=case.url)


def check(case: Case, arrival: Arrival, *, tolerance: float | None = None) -> None:
    case.scheme.verifier(case.keys().secrets, url=case.url, tolerance=tolerance)(arrival)


def refused(case: Case, arrival: Arrival) -> str:
    with pytest.raises(SignatureInvalid) as refusal:
        check(case, arrival)
    assert refusal.value.reason in REASONS
    return refusal.value.reason


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


@in_a_header
@pytest.mark.parametrize(
    "value",
    [b"", b" ", b"=", b",", b"sha256=", b"v1,", b"v1=", b"t=,v1=", b"Bearer ", b"Basic ", b"Basic :", b"a" * 10_000,
     b"=" * 10_000, b"v1," * 3000, b"t=1,v1=" + b"a" * 64, b"sha256=" + b"g" * 64, b"\xff\x00\n", "é".encode(), b"..",
     b"e30.e30.", b"Bearer e30.e30.e30", b"AAAA" * 16],
)  # fmt: skip
def test_a_malformed_signature_is_refused(case: Case, value: bytes) -> None:
    arrival = signed(case)
    for name in added_headers(case, arrival):
        if name in (b"paypal-cert-url", b"webhook-id", b"svix-id"):
            continue
        broken = replace(arrival)
        put_header(broken, name.decode(), value)
        refused(case, broken)


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
@pytest.mark.parametrize("secrets", [(), (b"",), (b" \n",)])
def test_no_secret_no_source(case: Case, secrets: tuple[bytes, ...]) -> None:
    with pytest.raises(ConfigError):
        case.scheme.verifier(secrets, url=case.url)
    with pytest.raises(ConfigError):
        case.scheme.verifier([*case.keys().secrets, b""], url=case.url)


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


# -- Either ------------------------------------------------------------------------------------

WHSEC = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_gitlab_takes_either_credential() -> None:
    draft = Arrival("gitlab", [], b"{}")
    verify = GITLAB.verifier([WHSEC, b"plain token"])
    verify(GITLAB.sign(draft, WHSEC, at=NOW))
    verify(GITLAB.sign(draft, b"plain token", at=NOW))
    GITLAB.verifier([b"plain token"])(GITLAB.sign(draft, b"plain token", at=NOW))


def test_a_wrong_signature_is_not_rescued_by_a_token_beside_it() -> None:
    verify = GITLAB.verifier([WHSEC, b"plain token"])
    arrival = GITLAB.sign(Arrival("gitlab", [], b"{}"), WHSEC, at=NOW)
    put_header(arrival, "x-gitlab-token", b"plain token")
    verify(arrival)
    with pytest.raises(SignatureInvalid) as refusal:
        verify(replace(arrival, body=b"{} "))
    assert refusal.value.reason == "mismatch"
    for value in (b"", b"v1,", b"v9,AAAA"):
        broken = replace(arrival)
        put_header(broken, "webhook-signature", value)
        with pytest.raises(SignatureInvalid):
            verify(broken)
    twin = replace(arrival, headers=[(name.replace(b"webhook-sig", b"webhook_sig"), v) for name, v in arrival.headers])
    with pytest.raises(SignatureInvalid):
        verify(twin)


def test_a_signature_that_nobody_can_check_is_as_good_as_absent() -> None:
    # GitLab sends both while people migrate; who configured the token only is not shut out
    arrival = GITLAB.sign(Arrival("gitlab", [], b"{}"), WHSEC, at=NOW)
    put_header(arrival, "x-gitlab-token", b"plain token")
    GITLAB.verifier([b"plain token"])(arrival)


def test_every_tries_all_but_refuses_what_is_repeated() -> None:
    hex_form, base64_form = Hmac(header="X-Signature"), Hmac(header="X-Signature", encoding="base64")
    both = Either(hex_form, base64_form, every=True)
    draft = Arrival("s", [], b"{}")
    for scheme in (hex_form, base64_form):
        arrival = scheme.sign(draft, b"s", at=NOW)
        both.verifier([b"s"])(arrival)
        for headers in ([*arrival.headers, (b"x_signature", b"1")], [*arrival.headers, *arrival.headers]):
            with pytest.raises(SignatureInvalid) as refusal:
                both.verifier([b"s"])(replace(arrival, headers=headers))
            assert refusal.value.reason == "repeated"
        with pytest.raises(SignatureInvalid) as refusal:
            both.verifier([b"s"])(replace(arrival, body=b"{} "))
        assert refusal.value.reason == "mismatch"
        # without `every`, the first that shows decides
    with pytest.raises(SignatureInvalid):
        Either(hex_form, base64_form).verifier([b"s"])(base64_form.sign(draft, b"s", at=NOW))


def test_alternatives_keep_their_errors() -> None:
    with pytest.raises(ConfigError):
        Either()
    with pytest.raises(ConfigError, match="public URL"):
        Either(Hmac(header="X"), Hmac(header="Y", signed="{url}{body}")).verifier([b"s"])
    with pytest.raises(SecretError):
        Either(Basic(), StandardWebhooks(bare=False)).verifier([b"plain"])
    with pytest.raises(SecretError):
        GITLAB_ONLY_SIGNED.verifier([WHSEC, b"plain"])
    with pytest.raises(SecretError):
        GITLAB_ONLY_SIGNED.sign(Arrival("s", [], b""), b"plain", at=NOW)


GITLAB_ONLY_SIGNED = Either(StandardWebhooks(bare=False), StandardWebhooks(prefix="svix", bare=False))


def test_jira_hmac_and_jwt() -> None:
    verify = JIRA.verifier([b"s"])
    draft = Arrival("jira", [], b"{}")
    verify(JIRA.sign(draft, b"s", at=NOW))
    verify(Jwt().sign(draft, b"s", at=NOW))
    assert JIRA.covers == frozenset()


# -- development keys --------------------------------------------------------------------------


def test_development_keys_are_never_printed_and_never_twice_the_same() -> None:
    keys = development_keys(META)
    assert keys.signing.decode() not in repr(keys)
    assert keys.signing != development_keys(META).signing


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


def test_paypal_refuses_a_fetched_certificate_that_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["paypal"]
    webhook_id, pem = case.keys().secrets
    for bad in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", stranger_certificate()):
        scheme, _ = fetched(bad)
        with pytest.raises(SignatureInvalid):
            scheme.verifier([webhook_id])(signed(case))
    scheme, _ = fetched(pem)
    verify = scheme.verifier([webhook_id])
    monkeypatch.setattr(clock, "now", lambda: NOW + 20 * 365 * 86400)
    with pytest.raises(SignatureInvalid) as refusal:
        verify(signed(case))
    assert refusal.value.reason == "stale"


def stranger_certificate() -> bytes:
    from datetime import timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "paypal.com.evil.example")])
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
    assert refused(BY_NAME["evolution-go"], Arrival("s", [JSON], body)) == "malformed"


JSON = (b"content-type", b"application/json")


def test_mailgun_takes_the_parent_accounts_signature() -> None:
    import hmac as reference

    now = str(int(NOW)).encode()
    parent = reference.digest(b"parent", now + b"t" * 50, "sha256").hex()
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
