"""Credentials in the arrival itself: the secret (Token, Basic), or a token signed with it (Jwt).

They prove the sender, and nothing about the body. Headers that carry them are `masked`, so that they are never stored.
"""

from __future__ import annotations

import base64
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import readers
from oncehook.verify.schemes import NONE, Scheme, SecretError, Verifier, check_tolerance, matches_any, one_of, usable


@dataclass(frozen=True, slots=True, kw_only=True)
class Token(Scheme):
    """The secret itself, in a header, in the query or in a field of the JSON body. It authenticates nothing else.

    `place` is `header:Name`, `query:name` or `body:path`; `prefix` comes before it (`Bearer `), in upper or lower case.
    """

    place: str
    prefix: str = ""

    def __post_init__(self) -> None:
        kind, name = self._place
        one_of(kind, ("header", "query", "body"), "place of a token")
        if not name:
            raise ConfigError(f"{self.place!r} does not say where the token is.")
        self._reader()

    @property
    def _place(self) -> tuple[str, str]:
        kind, _, name = self.place.partition(":")
        return kind, name

    @property
    def masked(self) -> frozenset[bytes]:
        kind, name = self._place
        return frozenset({readers.header_name(name)}) if kind == "header" else NONE

    @property
    def masked_query(self) -> frozenset[bytes]:
        kind, name = self._place
        return frozenset({name.encode()}) if kind == "query" else NONE

    def shows(self, arrival: Arrival) -> bool:
        kind, name = self._place
        if kind == "header":
            return readers.shows_header(name)(arrival)
        if kind == "query":
            return any(key == name.encode() for key, _ in readers.pairs(arrival.query))
        return True

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        tokens, read, prefix = usable(secrets), self._reader(), self.prefix.lower().encode()

        def verify(arrival: Arrival) -> None:
            value = read(arrival)
            if value is None:
                raise SignatureInvalid("missing")
            if value[: len(prefix)].lower() != prefix:
                raise SignatureInvalid("malformed")
            if not matches_any(tokens, [value[len(prefix) :]]):
                raise SignatureInvalid("mismatch")

        return verify

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        kind, name = self._place
        value = self.prefix.encode() + secret
        signed = readers.with_headers(draft)
        if kind == "header":
            readers.put_header(signed, name, value)
        elif kind == "query":
            others = [pair for pair in readers.pairs(draft.query) if pair[0] != name.encode()]
            signed.query = readers.encode_pairs([*others, (name.encode(), value)])
        else:
            signed.body = readers.put_body_field(draft.body, name, value.decode())
        return signed

    def _reader(self) -> readers.Reader:
        kind, name = self._place
        if kind != "body":
            return readers.header(name) if kind == "header" else readers.query(name)
        read = readers.body_field(name, str)

        def from_body(arrival: Arrival) -> bytes | None:
            text: str | None = read(arrival.body)
            return text.encode() if text else None

        return from_body


@dataclass(frozen=True, slots=True, kw_only=True)
class Basic(Scheme):
    """HTTP Basic: the secret is `user:password`, and the whole of it is compared."""

    masked: ClassVar[frozenset[bytes]] = frozenset({b"authorization"})

    def shows(self, arrival: Arrival) -> bool:
        return readers.shows_header("authorization")(arrival)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        credentials, read = usable(secrets), readers.header("authorization")
        if not all(b":" in credential.strip(b":") for credential in credentials):
            raise SecretError("The secret for Basic must be written user:password.")

        def verify(arrival: Arrival) -> None:
            value = read(arrival)
            if value is None:
                raise SignatureInvalid("missing")
            if value[:6].lower() != b"basic ":
                raise SignatureInvalid("malformed")
            if not matches_any(credentials, [readers.base64_strict(value[6:].strip())]):
                raise SignatureInvalid("mismatch")

        return verify

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        signed = readers.with_headers(draft)
        readers.put_header(signed, "authorization", b"Basic " + base64.b64encode(secret))
        return signed


@dataclass(frozen=True, slots=True, kw_only=True)
class Jwt(Scheme):
    """A JSON Web Token in a header, HS256 and nothing else: the token's own `alg` never chooses (S6).

    `exp` is required and, like `nbf` and `iat`, checked with `leeway` seconds of tolerance, which a source's tolerance
    replaces; inf turns the check of times off. `claims` must be present with exactly these values. The token does not
    cover the body.
    """

    header: str = "authorization"
    prefix: str = "Bearer "
    leeway: float = 60.0
    claims: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        readers.header_name(self.header)
        check_tolerance(self.leeway)

    @property
    def masked(self) -> frozenset[bytes]:
        return frozenset({readers.header_name(self.header)})

    def shows(self, arrival: Arrival) -> bool:
        return readers.shows_header(self.header)(arrival)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        keys, read, prefix = usable(secrets), readers.header(self.header), self.prefix.lower().encode()
        grace = self.leeway if tolerance is None else tolerance
        claims = dict(self.claims)

        def verify(arrival: Arrival) -> None:
            value = read(arrival)
            if value is None:
                raise SignatureInvalid("missing")
            message, dot, signature = value[len(prefix) :].rpartition(b".")
            if value[: len(prefix)].lower() != prefix or not dot or message.count(b".") != 1:
                raise SignatureInvalid("malformed")
            if not matches_any([_hs256(key, message) for key in keys], [signature]):
                raise SignatureInvalid("mismatch")
            head, payload = (_read_part(part) for part in message.split(b"."))
            # RFC 7515 4.1.11: a critical header that is not understood makes the token invalid.
            if head.get("alg") != "HS256" or "crit" in head:
                raise SignatureInvalid("malformed")
            if any(payload.get(name) != value for name, value in claims.items()):
                raise SignatureInvalid("mismatch")
            _check_times(payload, grace)

        return verify

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        payload = {"iat": int(at), "exp": int(at) + 600, **self.claims}
        message = b".".join(_base64url(msgspec.json.encode(part)) for part in ({"alg": "HS256", "typ": "JWT"}, payload))
        signed = readers.with_headers(draft)
        readers.put_header(signed, self.header, self.prefix.encode() + message + b"." + _hs256(secret, message))
        return signed


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _hs256(key: bytes, message: bytes) -> bytes:
    return _base64url(hmac.digest(key, message, "sha256"))


def _read_part(part: bytes) -> dict[str, Any]:
    data = readers.base64_key(part.translate(bytes.maketrans(b"-_", b"+/")))
    try:
        return msgspec.json.decode(data or b"", type=dict[str, Any])
    except (ValueError, RecursionError):
        raise SignatureInvalid("malformed") from None


def _check_times(payload: Mapping[str, Any], grace: float) -> None:
    times = {name: payload[name] for name in ("exp", "nbf", "iat") if name in payload}
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in times.values()):
        raise SignatureInvalid("malformed")
    if grace == math.inf:
        return
    if "exp" not in times:
        raise SignatureInvalid("malformed")
    # Compared only, because such a number may be too large for arithmetic.
    begins = max(times.get("nbf", 0), times.get("iat", 0))
    if times["exp"] < clock.now() - grace or begins > clock.now() + grace:
        raise SignatureInvalid("stale")
