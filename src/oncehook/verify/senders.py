"""Schemes that no template can describe: Twilio signs a form's sorted fields, Mailgun a token inside the body."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final
from urllib.parse import urlsplit

import msgspec

from oncehook import clock
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import readers, schemes
from oncehook.verify.schemes import Scheme, Verifier, check_moment, check_tolerance, digits, matches_any, usable
from oncehook.verify.template import Address

# -- Twilio ------------------------------------------------------------------------------------

_ALGORITHMS: Final = {b"HMAC_SHA1": "sha1", b"HMAC_SHA256": "sha256"}
_BODY_HASH: Final = b"bodySHA256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Twilio(Scheme):
    """The URL and the form's fields, sorted; or the URL alone, with the body's SHA-256 in its query.

    HMAC-SHA1 with the auth token is Twilio's default. Its settings header may name HMAC-SHA256 with a shared key
    instead; only these two are accepted, as in Twilio's own library. The URL is tried with and without its port,
    because Twilio is inconsistent there.
    """

    header: str = "x-twilio-signature"
    settings: str = "x-twilio-webhooks-signature-settings"

    covers: ClassVar[frozenset[str]] = frozenset({"body", "url"})

    def __post_init__(self) -> None:
        readers.header_name(self.header)
        readers.header_name(self.settings)

    def shows(self, arrival: Arrival) -> bool:
        return readers.shows_header(self.header)(arrival)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        tokens, addresses = usable(secrets), _with_and_without_port(url)
        read, read_settings = readers.header(self.header), readers.header(self.settings)

        def verify(arrival: Arrival) -> None:
            value, algorithm = read(arrival), _algorithm(read_settings(arrival))
            if value is None:
                raise SignatureInvalid("missing")
            fields = _signed_fields(arrival)
            expected = [
                base64.b64encode(hmac.digest(token, address.of(arrival) + fields, algorithm))
                for address in addresses
                for token in tokens
            ]
            if len(value) != len(expected[0]):
                raise SignatureInvalid("malformed")
            if not matches_any(expected, [value]):
                raise SignatureInvalid("mismatch")

        return verify

    def proof(self, arrival: Arrival) -> bytes:
        """Return the signed text: names and values joined, so that another split into fields has the same signature."""
        return _signed_fields(arrival) or arrival.body

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        signed = readers.with_headers(draft)
        if draft.body and not readers.is_form(draft):
            others = [pair for pair in readers.pairs(draft.query) if pair[0] != _BODY_HASH]
            body_hash = hashlib.sha256(draft.body).hexdigest().encode()
            signed.query = readers.encode_pairs([*others, (_BODY_HASH, body_hash)])
        message = Address(url).of(signed) + _signed_fields(signed)
        readers.put_header(signed, self.header, base64.b64encode(hmac.digest(secret, message, "sha1")))
        return signed


def _algorithm(settings: bytes | None) -> str:
    """Read which of the two algorithms `key=…,algorithm=…` names."""
    named = [
        value.strip()
        for name, _, value in (part.partition(b"=") for part in (settings or b"").split(b","))
        if name.strip() == b"algorithm"
    ]
    if len(named) > 1:
        raise SignatureInvalid("repeated")
    algorithm = _ALGORITHMS.get(named[0].upper() if named and named[0] else b"HMAC_SHA1")
    if algorithm is None:
        raise SignatureInvalid("malformed")
    return algorithm


def _signed_fields(arrival: Arrival) -> bytes:
    """Return what is signed beside the URL. Raises where that does not cover the body."""
    body_hash = readers.sole(readers.pairs(arrival.query), _BODY_HASH)
    if body_hash is not None:
        # A hash in the URL covers the body, whatever the content type: the URL is signed.
        if not schemes.same(hashlib.sha256(arrival.body).hexdigest().encode(), body_hash.lower()):
            raise SignatureInvalid("mismatch")
        return b""
    if not arrival.body:
        return b""
    found = readers.pairs(arrival.body) if readers.is_form(arrival) else []
    if not found:
        raise SignatureInvalid("malformed")
    # UTF-8 bytes sort in the order of their characters, as Twilio sorts.
    return b"".join(name + value for name, value in sorted(set(found)))


def _with_and_without_port(url: str | None) -> list[Address]:
    text = Address(url).whole.decode()
    parts = urlsplit(text)
    host = parts.netloc.removesuffix(f":{parts.port}") if parts.port else parts.netloc
    port = parts.port or (443 if parts.scheme == "https" else 80)
    scheme, rest = text.split(parts.netloc, 1)
    return [Address(scheme + host + rest), Address(f"{scheme}{host}:{port}{rest}")]


# -- Mailgun -----------------------------------------------------------------------------------


class _Triple(msgspec.Struct):
    timestamp: str | int = ""
    token: str = ""
    signature: str = ""
    parent: str = msgspec.field(name="parent-signature", default="")


class _Envelope(msgspec.Struct):
    signature: _Triple = msgspec.field(default_factory=_Triple)


_envelope: Final = msgspec.json.Decoder(_Envelope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailgun(Scheme):
    """HMAC-SHA256 over timestamp + token, all three inside the body; the event itself is not signed.

    Events are JSON, forwarded messages are forms. Events of a subaccount have the parent account's signature, too, and
    either is accepted. Retries come for eight hours with the first timestamp, so the tolerance is longer.
    """

    tolerance: float = 12 * 3600.0

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        keys = usable(secrets)
        window = check_tolerance(self.tolerance if tolerance is None else tolerance)

        def verify(arrival: Arrival) -> None:
            timestamp, token, signatures = _triple_of(arrival)
            if not timestamp or not token or not signatures:
                raise SignatureInvalid("missing")
            moment = digits(timestamp)
            if all(len(signature) != 64 for signature in signatures):
                raise SignatureInvalid("malformed")
            expected = [hmac.digest(key, timestamp + token, "sha256").hex().encode() for key in keys]
            if not matches_any(expected, signatures):
                raise SignatureInvalid("mismatch")
            check_moment(moment, "seconds", window)

        return verify

    def proof(self, arrival: Arrival) -> bytes:
        """Return the signed part: a time and a token, whatever the rest of the body."""
        timestamp, token, _ = _triple_of(arrival)
        return timestamp + token

    def signed_at(self, arrival: Arrival) -> float | None:
        try:
            return float(digits(_triple_of(arrival)[0]))
        except SignatureInvalid:
            return None

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        timestamp, token = str(int(at)), clock.random_bytes(25).hex()
        signature = hmac.digest(secret, (timestamp + token).encode(), "sha256").hex()
        triple = {"timestamp": timestamp, "token": token, "signature": signature}
        if not readers.is_form(draft):
            return readers.with_headers(draft, body=readers.put_body_field(draft.body, "signature", triple))
        others = [pair for pair in readers.pairs(draft.body) if pair[0].decode("latin-1") not in triple]
        added = [(name.encode(), value.encode()) for name, value in triple.items()]
        return readers.with_headers(draft, body=readers.encode_pairs([*others, *added]))


def _triple_of(arrival: Arrival) -> tuple[bytes, bytes, list[bytes]]:
    if readers.is_form(arrival):
        found = readers.pairs(arrival.body)
        timestamp, token, signature = (readers.sole(found, name) for name in (b"timestamp", b"token", b"signature"))
        return timestamp or b"", token or b"", [signature] if signature else []
    try:
        triple = _envelope.decode(arrival.body).signature
        texts = [str(triple.timestamp).encode(), triple.token.encode()]
        signatures = [text.encode() for text in (triple.signature, triple.parent) if text]
    except (ValueError, RecursionError):
        raise SignatureInvalid("malformed") from None
    return texts[0], texts[1], signatures
