"""ID tokens: what a provider did not say, to us, for this sign-in and now, proves nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA256
from joserfc import jws
from joserfc.jwk import ECKey, Key, RSAKey

from oncehook.web.oidc import InvalidToken, UnknownKey, verify

ISSUER, CLIENT, NONCE = "https://id.example", "inbox", "n-0S6_WzA2Mj"
OURS = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
THEIRS = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
CURVE = ECKey.generate_key("P-256", {"kid": "two"})
with warnings.catch_warnings(action="ignore"):  # of the library, which would not make one either
    SMALL = RSAKey.generate_key(1024, {"kid": "small"})
KEYS: list[dict[str, Any]] = [
    {"kty": "oct", "kid": "hmac", "k": "c2VjcmV0"},
    {"kty": "RSA", "kid": "one", "n": "!", "e": 5},
    *(dict(key.as_dict(private=False)) for key in (OURS, CURVE, SMALL)),
]


def claims(**changed: Any) -> dict[str, Any]:
    now = int(time.time())
    made = {"iss": ISSUER, "aud": CLIENT, "sub": "ana", "exp": now + 60, "iat": now, "nonce": NONCE} | changed
    return {name: value for name, value in made.items() if value is not None}


def signed(payload: dict[str, Any] | bytes, key: Key = OURS, **header: Any) -> str:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    head = {"alg": "RS256", "kid": key.kid} | header
    registry = jws.JWSRegistry(algorithms=[head["alg"]], strict_check_header=False)
    return jws.serialize_compact(head, body, key, registry=registry)


def check(token: str) -> dict[str, Any]:
    return dict(verify(token, KEYS, issuer=ISSUER, client_id=CLIENT, nonce=NONCE))


def part(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def by_hand(header: dict[str, Any], secret: bytes | None) -> str:
    """A token that no library would make."""
    start = f"{part(json.dumps(header).encode())}.{part(json.dumps(claims()).encode())}"
    return f"{start}.{part(hmac.digest(secret, start.encode(), 'sha256')) if secret is not None else ''}"


@pytest.mark.parametrize(
    "token",
    [
        lambda: signed(claims()),
        lambda: signed(claims(), alg="PS384"),
        lambda: signed(claims(), CURVE, alg="ES256"),
        lambda: signed(claims(), x="a header that nobody knows"),
        lambda: signed(claims(aud=[CLIENT])),
        lambda: signed(claims(aud=[CLIENT, "other"], azp=CLIENT)),
    ],
    ids=["plain", "pss", "curve", "header", "list", "azp"],
)
def test_a_good_token_says_who(token: Callable[[], str]) -> None:
    assert check(token())["sub"] == "ana"


def test_without_a_key_id_every_key_is_tried() -> None:
    registry = jws.JWSRegistry(algorithms=["RS256"])
    token = jws.serialize_compact({"alg": "RS256"}, json.dumps(claims()).encode(), OURS, registry=registry)
    assert check(token)["sub"] == "ana"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"iss": "https://evil.example"}, "iss"),
        ({"iss": ISSUER + "/"}, "iss"),
        ({"iss": [ISSUER]}, "iss"),
        ({"iss": None}, "iss"),
        ({"aud": "other"}, "aud"),
        ({"aud": None}, "aud"),
        ({"aud": f"{CLIENT} other"}, "aud"),
        ({"aud": [CLIENT, "other"]}, "azp"),
        ({"aud": [CLIENT, "other"], "azp": "other"}, "azp"),
        ({"azp": "other"}, "azp"),
        ({"exp": int(time.time()) - 1}, "exp"),
        ({"exp": None}, "exp"),
        ({"exp": True}, "exp"),
        ({"exp": "9999999999"}, "exp"),
        ({"iat": int(time.time()) + 3600}, "iat"),
        ({"iat": None}, "iat"),
        ({"nbf": int(time.time()) + 3600}, "nbf"),
        ({"nonce": "another"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"nonce": [NONCE]}, "nonce"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "sub"),
        ({"sub": 7}, "sub"),
        ({"sub": "a\nb"}, "sub"),
        ({"sub": "x" * 256}, "sub"),
    ],
)
def test_a_claim_that_is_not_for_us_here_and_now_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidToken, match=reason) as caught:
        check(signed(claims(**changed)))
    assert not isinstance(caught.value, UnknownKey)


def critical() -> str:
    """A good signature under a header that must be understood, and is not."""
    header = {"alg": "RS256", "kid": "one", "crit": ["x"], "x": 1}
    start = ".".join(part(json.dumps(one).encode()) for one in (header, claims()))
    assert OURS.private_key is not None
    return f"{start}.{part(OURS.private_key.sign(start.encode(), PKCS1v15(), SHA256()))}"


PUBLIC = OURS.as_pem(private=False)
FORGED = {
    "none": lambda: by_hand({"alg": "none"}, None),
    "none with a signature": lambda: by_hand({"alg": "none", "kid": "one"}, b"x"),
    "None": lambda: by_hand({"alg": "None", "kid": "one"}, None),
    "no alg": lambda: by_hand({"kid": "one"}, None),
    "hmac with the public key": lambda: by_hand({"alg": "HS256", "kid": "one"}, PUBLIC),
    "hmac with a key of the set": lambda: by_hand({"alg": "HS256", "kid": "hmac"}, b"secret"),
    "hmac with an empty key": lambda: by_hand({"alg": "HS256", "kid": "one"}, b""),
    "alg of another type": lambda: by_hand({"alg": "ES256", "kid": "one"}, PUBLIC),
    "alg is a list": lambda: by_hand({"alg": ["RS256"], "kid": "one"}, None),
    "another key under our id": lambda: signed(claims(), THEIRS),
    "a key of its own in the header": lambda: signed(claims(), THEIRS, jwk=dict(THEIRS.as_dict(private=False))),
    "an unknown key": lambda: signed(claims(), kid="three"),
    "a small key": lambda: signed(claims(), SMALL),
    "a critical extension": lambda: critical(),
    "altered": lambda: signed(claims()).replace(".", ".e30", 1),
    "cut": lambda: signed(claims()).rpartition(".")[0] + ".",
    "no signature part": lambda: signed(claims()).rpartition(".")[0],
    "five parts": lambda: "a.b.c.d.e",
    "empty": lambda: "",
    "not ascii": lambda: "ä.b.c",
    "header is text": lambda: part(b'"alg"') + ".e30.x",
    "header is deep": lambda: part(b"[" * 5000) + ".e30.x",
    "payload is a list": lambda: signed(b"[]"),
    "payload is deep": lambda: signed(b'{"a":' + b"[" * 20_000),
    "payload is not text": lambda: signed(b"\xff\xfe"),
    "a time beyond all": lambda: signed(json.dumps(claims()).replace('"exp": ', '"exp": 1e999, "x": ').encode()),
    "a long time": lambda: signed(json.dumps(claims()).replace('"exp": ', '"exp": 1' + "0" * 400 + ', "x": ').encode()),
    "a number beyond all": lambda: signed(b'{"exp": 1' + b"0" * 5000 + b"}"),
    "huge": lambda: signed(claims(x="x" * 100_000)),
}


@pytest.mark.filterwarnings("ignore:Key size")
@pytest.mark.parametrize("case", FORGED)
def test_a_forged_token_is_refused(case: str) -> None:
    with pytest.raises(InvalidToken):
        check(FORGED[case]())


def test_whatever_is_altered_is_refused() -> None:
    token = signed(claims())
    good = 0
    for place in range(0, len(token), 7):
        digest = hashlib.sha256(f"{place}".encode()).hexdigest()[0]
        other = token[:place] + ("A" if token[place] != "A" else digest) + token[place + 1 :]
        try:
            check(other)
        except InvalidToken:
            continue
        good += other != token and base64_equal(other, token) is False
    assert good == 0


def base64_equal(a: str, b: str) -> bool:
    """Whether two tokens hold the same bytes: the last letter of a part has bits that mean nothing."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    return all(base64.urlsafe_b64decode(x + "==") == base64.urlsafe_b64decode(y + "==") for x, y in pairs)
