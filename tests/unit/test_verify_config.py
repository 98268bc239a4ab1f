"""The `verify` setting: every scheme by its name, and no way to end up with less than was asked for (S4)."""

from __future__ import annotations

import hmac
import math
import subprocess
import sys
from typing import Any

import pytest

from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import (
    Basic,
    Ed25519,
    Either,
    Fields,
    Hash,
    Hmac,
    Jwt,
    Mailgun,
    Nothing,
    PayPal,
    Scheme,
    SendGrid,
    StandardWebhooks,
    Token,
    Twilio,
    from_config,
)

BEARER = Token(place="header:Authorization", prefix="Bearer ")


@pytest.mark.parametrize(
    ("spec", "scheme"),
    [
        ("none", Nothing()),
        ({"scheme": "none"}, Nothing()),
        ({"scheme": "none", "confirm": "anyone may send"}, Nothing()),
        ("basic", Basic()),
        ({"scheme": "basic"}, Basic()),
        ("bearer", BEARER),
        ({"scheme": "bearer", "header": "X-Auth"}, Token(place="header:X-Auth", prefix="Bearer ")),
        ("standard-webhooks", StandardWebhooks()),
        ({"scheme": "standard-webhooks", "prefix": "svix"}, StandardWebhooks(prefix="svix")),
        ({"scheme": "standard-webhooks", "tolerance": "10m"}, StandardWebhooks(tolerance=600.0)),
        ({"scheme": "standard-webhooks", "bare": False}, StandardWebhooks(bare=False)),
        ({"scheme": "token", "header": "X-Token"}, Token(place="header:X-Token")),
        ({"scheme": "token", "query": "token"}, Token(place="query:token")),
        ({"scheme": "token", "body": "auth.token"}, Token(place="body:auth.token")),
        ({"scheme": "token", "header": "X", "prefix": "Token "}, Token(place="header:X", prefix="Token ")),
        (
            {"scheme": "ed25519", "header": "X-Signature-Ed25519", "timestamp": "header:X-Signature-Timestamp",
             "signed": "{timestamp}{body}"},
            Ed25519(header="X-Signature-Ed25519", timestamp="header:X-Signature-Timestamp",
                    signed="{timestamp}{body}"),
        ),
        (
            [{"scheme": "hmac", "header": "X-Webhook-Signature"}, "bearer"],
            Either(Hmac(header="X-Webhook-Signature"), BEARER, every=True),
        ),
        (["basic"], Basic()),
        (
            {"scheme": "hmac", "header": "X-Signature", "prefix": "sha256=", "algorithm": "sha256", "encoding": "hex"},
            Hmac(header="X-Signature", prefix="sha256="),
        ),
        (
            {"scheme": "hmac", "header": "S", "signed": "{timestamp}.{body}", "timestamp": "field:t", "unit": "auto",
             "fields": {"signature": "h1", "separator": ";"}, "tolerance": "5m", "key": "base64"},
            Hmac(header="S", signed="{timestamp}.{body}", timestamp="field:t", unit="auto", key="base64",
                 fields=Fields(signature="h1", separator=";")),
        ),
        (
            {"scheme": "hmac", "header": "S", "signed": ["{url}", "{body}"]},
            Hmac(header="S", signed=("{url}", "{body}")),
        ),
        ({"scheme": "hmac", "header": "S", "tolerance": "off"}, Hmac(header="S", tolerance=math.inf)),
        ({"scheme": "hmac", "header": "S", "tolerance": 20, "prefix": ""}, Hmac(header="S", tolerance=20.0)),
        ({"scheme": "hash", "header": "S"}, Hash(header="S")),
        ("jwt", Jwt()),
        ({"scheme": "jwt", "claims": {"iss": "x"}, "leeway": "1h"}, Jwt(claims={"iss": "x"}, leeway=3600.0)),
        ("twilio", Twilio()),
        ("mailgun", Mailgun()),
        ("sendgrid", SendGrid()),
        ({"scheme": "paypal", "tolerance": "1h"}, PayPal(tolerance=3600.0)),
    ],
)  # fmt: skip
def test_every_scheme_by_name(spec: Any, scheme: Scheme) -> None:
    assert from_config(spec) == scheme


@pytest.mark.parametrize(
    ("spec", "nearest"),
    [
        ("nonee", "none"),
        ("hmack", "hmac"),
        ("standard_webhooks", "standard-webhooks"),
        ("bearr", "bearer"),
        ({"scheme": "hmac", "heder": "X"}, "header"),
        ({"scheme": "hmac", "header": "X", "algoritm": "sha256"}, "algorithm"),
        ({"scheme": "hmac", "header": "X", "algorithm": "sha-256"}, "sha256"),
        ({"scheme": "hmac", "header": "X", "encoding": "base46"}, "base64"),
        ({"scheme": "hmac", "header": "X", "fields": {"separater": ","}}, "separator"),
        ({"scheme": "basic", "header": "X"}, ""),
        ({"scheme": "none", "secret": "X"}, ""),
    ],
)
def test_a_word_that_is_wrong_is_an_error_that_names_the_nearest(spec: str | dict[str, object], nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_config(spec)
    assert nearest in error.value.hint


@pytest.mark.parametrize(
    "spec",
    [
        "", "None", "off", "false", "hmac", "token", "either", {}, {"scheme": None}, {"scheme": ""}, {"scheme": 1},
        {"scheme": ["none"]}, {"header": "X"}, {"scheme": "hmac"}, {"scheme": "token"},
        {"scheme": "token", "header": "X", "query": "y"}, {"scheme": "token", "header": ""},
        {"scheme": "token", "header": 1}, {"scheme": "token", "header": "a b"}, {"scheme": "hmac", "header": None},
        {"scheme": "hmac", "header": "X", "tolerance": True}, {"scheme": "hmac", "header": "X", "tolerance": "soon"},
        {"scheme": "hmac", "header": "X", "tolerance": 0}, {"scheme": "hmac", "header": "X", "tolerance": []},
        {"scheme": "hmac", "header": "X", "signed": []}, {"scheme": "hmac", "header": "X", "signed": [1]},
        {"scheme": "hmac", "header": "X", "fields": "v1"},
        {"scheme": "hmac", "header": "X", "fields": {"separator": 1}},
        {"scheme": "hmac", "header": "X", "fields": {"separator": ""}},
        {"scheme": "hmac", "header": "X", "_templates": "x"},
        {"scheme": "none", "confirm": "yes"}, {"scheme": "standard-webhooks", "bare": "no"},
        {"scheme": "paypal", "fetch": "x"}, {"scheme": "jwt", "claims": "x"},
        {"scheme": "ed25519"}, {"scheme": "ed25519", "header": "X", "algorithm": "sha256"},
        {"scheme": "ed25519", "header": "X", "key": "text"},
        {"scheme": "ed25519", "header": "X", "timestamp": "header:T"},
        [], [[]], [None], ["hmac"], ["bearer", "none"], ["bearer", {"scheme": "none", "confirm": "anyone may send"}],
        ["none"], ["bearer", ["basic"]],
    ],
)  # fmt: skip
def test_what_cannot_be_read_never_becomes_less(spec: Any) -> None:
    with pytest.raises(ConfigError):
        from_config(spec)


def test_the_partner_of_the_design() -> None:
    spec = {"scheme": "hmac", "header": "X-Signature", "prefix": "sha256=", "algorithm": "sha256", "encoding": "hex"}
    scheme = from_config(spec)
    verify = scheme.verifier([b"new", b"old"])
    draft = Arrival("partner", [], b'{"id":1}')
    for secret in (b"new", b"old"):
        verify(scheme.sign(draft, secret, at=0))
    with pytest.raises(SignatureInvalid):
        verify(scheme.sign(draft, b"else", at=0))


def test_the_cryptography_library_is_only_imported_for_who_needs_it() -> None:
    code = "import sys, oncehook.verify; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_any_of_a_list_will_do_and_nothing_else() -> None:
    header, beside = {"scheme": "hmac", "header": "X-Webhook-Signature"}, {"scheme": "hmac", "header": "X-Signature"}
    verify = from_config([header, {**header, "prefix": "sha256="}, beside, "bearer"]).verifier([b"old", b"new"])
    body = b'{"id":1}'
    for secret in (b"old", b"new"):
        digest = hmac.digest(secret, body, "sha256").hex().encode()
        for name, value in (
            (b"x-webhook-signature", digest),
            (b"x-webhook-signature", b"sha256=" + digest),
            (b"x-signature", digest),
            (b"authorization", b"Bearer " + secret),
        ):
            verify(Arrival("s", [(name, value)], body))
            for wrong in ([(name, value[:-1] + b"!")], [(name, value), (name, value)], [(name, b"")], []):
                with pytest.raises(SignatureInvalid):
                    verify(Arrival("s", wrong, body))
        with pytest.raises(SignatureInvalid):
            verify(Arrival("s", [(b"x-signature", digest)], body + b" "))


def test_ed25519_agrees_with_the_vectors_of_rfc_8032() -> None:
    # 7.1, TEST 2: a message of one byte
    public = b"3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    private = b"4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
    signature = (
        b"92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        b"085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    scheme = from_config({"scheme": "ed25519", "header": "X-Sig"})
    genuine = Arrival("s", [(b"x-sig", signature)], b"\x72")
    scheme.verifier([public])(genuine)
    assert scheme.sign(Arrival("s", [], b"\x72"), private, at=0.0).headers == genuine.headers
    for wrong in (signature[:-2], signature[:-2] + b"zz", signature[::-1], b"", signature + b"00"):
        with pytest.raises(SignatureInvalid):
            scheme.verifier([public])(Arrival("s", [(b"x-sig", wrong)], b"\x72"))
    with pytest.raises(SignatureInvalid):
        scheme.verifier([private])(genuine)  # another 32 bytes
    for secret in (b"short", public[:-2], public + b"00"):
        with pytest.raises(ConfigError):
            scheme.verifier([secret])
