"""Signatures with a private key, checked with the public one: ed25519 (Discord), SendGrid (ECDSA), PayPal (RSA).

The cryptography library is imported when the first key is loaded: most programs never need it, and it is slow to
import. A public key is no secret, so nothing here has to be compared in constant time.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, Final
from urllib.parse import urlsplit

from oncehook import clock
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import readers
from oncehook.verify.schemes import (
    Scheme,
    SecretError,
    Signature,
    Verifier,
    check_age,
    check_moment,
    check_tolerance,
    digits,
    one_of,
    usable,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.x509 import Certificate

Check = Callable[[bytes, bytes], bool]
"""(signature, message) -> True where the signature is valid."""

PEM: Final = b"-----BEGIN "


# -- keys --------------------------------------------------------------------------------------


def ed25519_check(raw: bytes) -> Check:
    """Return the check with this public key of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if len(raw) != 32:
        raise SecretError("A public ed25519 key has 32 bytes.")
    return _check_by(Ed25519PublicKey.from_public_bytes(raw).verify)


def _check_by(verify: Callable[..., None], *arguments: object) -> Check:
    from cryptography.exceptions import InvalidSignature

    def check(signature: bytes, message: bytes) -> bool:
        try:
            verify(signature, message, *arguments)
        except InvalidSignature:
            return False
        return True

    return check


def ed25519_public(raw: bytes) -> bytes:
    return _ed25519_private(raw).public_key().public_bytes_raw()


def ed25519_sign(raw: bytes, message: bytes) -> bytes:
    return _ed25519_private(raw).sign(message)


def _ed25519_private(raw: bytes) -> Ed25519PrivateKey:
    """Load a private key of 32 bytes, or 64 where the public half is appended."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if len(raw) not in (32, 64):
        raise SecretError("A private ed25519 key has 32 or 64 bytes.")
    return Ed25519PrivateKey.from_private_bytes(raw[:32])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ed25519(Signature):
    """An ed25519 signature of a message, in a header (Discord). The secret is the public key; the sender has the
    private one."""

    key: str = "hex"

    has_public_key: ClassVar = True

    def __post_init__(self) -> None:
        one_of(self.key, ("hex", "base64"), "form of a public key")
        Signature.__post_init__(self)

    @property
    def _size(self) -> int:
        return 64

    def _prepare(self, key: bytes) -> Callable[[bytes], bytes]:
        return lambda message: ed25519_sign(key, message)

    def _matcher(self, keys: Sequence[bytes]) -> Callable[[Sequence[bytes], Sequence[bytes]], bool]:
        checks, decode = [ed25519_check(key) for key in keys], self._decode

        def matches(messages: Sequence[bytes], signatures: Sequence[bytes]) -> bool:
            shown = [decode(text) for text in signatures]
            return any(check(raw, message) for raw in shown for message in messages for check in checks)

        return matches

    def _decode(self, text: bytes) -> bytes:
        return readers.hex_strict(text) if self.encoding == "hex" else readers.base64_strict(text)


def _spki(secret: bytes) -> EllipticCurvePublicKey:
    """Load SendGrid's public key: base64 of its DER form, or PEM."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key

    text = secret.strip()
    try:
        if text.startswith(PEM):
            key = load_pem_public_key(text)
        else:
            key = load_der_public_key(readers.base64_key(b"".join(text.split())) or b"")
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise SecretError("The verification key is not a P-256 public key in base64, as SendGrid shows it.")
    return key


# -- SendGrid ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGrid(Scheme):
    """ECDSA P-256 over timestamp + body, in DER; the secret is the public key that SendGrid shows.

    SendGrid retries for 24 hours and does not say whether it signs again, so the tolerance is longer: a captured
    arrival is a duplicate, while a rejected retry would be lost.
    """

    header: str = "x-twilio-email-event-webhook-signature"
    timestamp: str = "x-twilio-email-event-webhook-timestamp"
    tolerance: float = 25 * 3600.0

    has_public_key: ClassVar = True
    covers: ClassVar[frozenset[str]] = frozenset({"body"})

    def __post_init__(self) -> None:
        readers.header_name(self.header)
        readers.header_name(self.timestamp)
        check_tolerance(self.tolerance)

    @property
    def signed_headers(self) -> frozenset[bytes]:
        return frozenset({readers.header_name(self.timestamp)})

    def shows(self, arrival: Arrival) -> bool:
        return readers.shows_header(self.header)(arrival)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        checks = [_ecdsa_check(_spki(secret)) for secret in usable(secrets)]
        window = check_tolerance(self.tolerance if tolerance is None else tolerance)
        read, read_timestamp = readers.header(self.header), readers.header(self.timestamp)

        def verify(arrival: Arrival) -> None:
            value, timestamp = read(arrival), read_timestamp(arrival)
            if value is None or timestamp is None:
                raise SignatureInvalid("missing")
            moment, signature = digits(timestamp), readers.base64_strict(value)
            message = timestamp + arrival.body
            if not any(check(signature, message) for check in checks):
                raise SignatureInvalid("mismatch")
            check_moment(moment, "seconds", window)

        return verify

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256

        key = _private(secret)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SecretError("To sign as SendGrid takes a P-256 private key in PEM.")
        timestamp = str(int(at)).encode()
        signed = readers.with_headers(draft)
        signature = key.sign(timestamp + draft.body, ec.ECDSA(SHA256()))
        readers.put_header(signed, self.timestamp, timestamp)
        readers.put_header(signed, self.header, base64.b64encode(signature))
        return signed


def _ecdsa_check(key: EllipticCurvePublicKey) -> Check:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    return _check_by(key.verify, ec.ECDSA(SHA256()))


def _private(secret: bytes) -> object:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(secret[secret.index(PEM) :], password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise SecretError("The key to sign with is not a private key in PEM.") from None


# -- PayPal ------------------------------------------------------------------------------------

Fetch = Callable[[str], bytes]
"""A function from a certificate's URL to its PEM bytes; raises when it cannot be fetched. Must check TLS."""

_CERTIFICATE_PATH: Final = re.compile(r"/v1/notifications/certs/[A-Za-z0-9_-]{1,200}")
_KEPT_CERTIFICATES: Final = 16
_FETCH_PAUSE: Final = 10.0
"""Seconds between two fetches, because any sender can name a URL and must not set the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayPal(Scheme):
    """RSA-SHA256 over `transmission id|time|webhook id|CRC-32 of the body`, checked without asking PayPal.

    The secrets are the webhook's id and PayPal's certificates in PEM. Without certificates `fetch` is required; it is
    called with PayPal's addresses only, and its result is cached. It runs during verification, so it should be quick or
    return what it fetched ahead.

    A CRC-32 is easily forged by somebody who has a genuine transmission, so the body counts as not authenticated:
    another body under one transmission id is a conflict, and transmissions older than four days (PayPal retries for
    three) are refused. Fetch the object before acting on money.
    """

    fetch: Fetch | None = None
    tolerance: float = 4 * 86400.0

    has_public_key: ClassVar = True
    signed_headers: ClassVar[frozenset[bytes]] = frozenset({b"paypal-transmission-id", b"paypal-transmission-time"})

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)

    def shows(self, arrival: Arrival) -> bool:
        return readers.shows_header("paypal-transmission-sig")(arrival)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        stripped = [secret.strip() for secret in usable(secrets)]
        webhook_ids = [secret for secret in stripped if not secret.startswith(PEM)]
        pinned = [_rsa_check(_certificate_key(secret)) for secret in stripped if secret.startswith(PEM)]
        window = check_tolerance(self.tolerance if tolerance is None else tolerance)
        if not webhook_ids:
            raise SecretError("PayPal's webhook id is missing: it is part of what PayPal signs.")
        if not pinned and self.fetch is None:
            raise SecretError("PayPal's certificate is missing: add it, in PEM, beside the webhook id.")
        read = [readers.header(f"paypal-{name}") for name in _PAYPAL_HEADERS]
        cache = _CertificateCache(self.fetch) if self.fetch and not pinned else None

        def verify(arrival: Arrival) -> None:
            values = [value for value in (reader(arrival) for reader in read) if value is not None]
            if len(values) != len(read):
                raise SignatureInvalid("missing")
            transmission_id, time, text, address, algorithm = values
            # The algorithm is fixed: the header may only name this one (S6).
            if algorithm.lower() != b"sha256withrsa" or b"|" in transmission_id + time:
                raise SignatureInvalid("malformed")
            moment, signature = _iso(time), readers.base64_strict(text)
            checks = [cache.check_at(address)] if cache else pinned
            checksum = zlib.crc32(arrival.body)
            messages = [b"%b|%b|%b|%d" % (transmission_id, time, name, checksum) for name in webhook_ids]
            if not any(check(signature, message) for check in checks for message in messages):
                raise SignatureInvalid("mismatch")
            check_age(moment, window)

        return verify

    def proof(self, arrival: Arrival) -> bytes:
        """Return the id of the transmission."""
        return readers.header("paypal-transmission-id")(arrival) or b""

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        """Sign with a secret that is the webhook's id, a newline, and an RSA private key in PEM."""
        from cryptography.hazmat.primitives.asymmetric import padding, rsa
        from cryptography.hazmat.primitives.hashes import SHA256

        key, webhook_id = _private(secret), secret.partition(b"\n")[0].strip()
        if not isinstance(key, rsa.RSAPrivateKey):
            raise SecretError("To sign as PayPal takes the webhook's id and an RSA private key in PEM.")
        transmission_id = clock.random_bytes(16).hex().encode()
        time = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
        message = b"%b|%b|%b|%d" % (transmission_id, time, webhook_id, zlib.crc32(draft.body))
        signature = base64.b64encode(key.sign(message, padding.PKCS1v15(), SHA256()))
        address = b"https://api.paypal.com/v1/notifications/certs/CERT-development"
        signed = readers.with_headers(draft)
        for name, value in zip(
            _PAYPAL_HEADERS, (transmission_id, time, signature, address, b"SHA256withRSA"), strict=True
        ):
            readers.put_header(signed, f"paypal-{name}", value)
        return signed


_PAYPAL_HEADERS: Final = ("transmission-id", "transmission-time", "transmission-sig", "cert-url", "auth-algo")


class _CertificateCache:
    """A cache of fetched certificates, by their address."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._kept: dict[bytes, tuple[Check, Certificate]] = {}
        self._last = -math.inf

    def check_at(self, address: bytes) -> Check:
        """Return the check with the certificate at this address; refuse an address that is not PayPal's and a
        certificate that is not valid now."""
        _check_address(address)
        kept = self._kept.get(address)
        if kept is None:
            if clock.steady() - self._last < _FETCH_PAUSE:
                raise SignatureInvalid("unavailable")
            self._last = clock.steady()
            kept = self._download(address)
            if len(self._kept) >= _KEPT_CERTIFICATES:
                self._kept.pop(next(iter(self._kept)))
            self._kept[address] = kept
        check, certificate = kept
        if not certificate.not_valid_before_utc <= clock.now_utc() <= certificate.not_valid_after_utc:
            self._kept.pop(address, None)
            raise SignatureInvalid("stale")
        return check

    def _download(self, address: bytes) -> tuple[Check, Certificate]:
        try:
            pem = self._fetch(address.decode())
        except Exception:
            # An arrival whose certificate cannot be fetched is not verified; PayPal will send it again.
            raise SignatureInvalid("unavailable") from None
        try:
            certificate = _certificate(pem)
            if not _names_paypal(certificate):
                raise SignatureInvalid("mismatch")
            return _rsa_check(_certificate_key(pem)), certificate
        except SecretError:
            raise SignatureInvalid("malformed") from None


def _check_address(address: bytes) -> None:
    """Refuse an address that is not one of PayPal's for certificates: a forger would name another."""
    try:
        parts = urlsplit(address.decode("ascii"))
        plain = parts.netloc == parts.hostname and not parts.query and not parts.fragment
    except ValueError:
        raise SignatureInvalid("malformed") from None
    host = parts.hostname or ""
    if parts.scheme != "https" or not plain or not host.endswith(".paypal.com"):
        raise SignatureInvalid("malformed")
    if not _CERTIFICATE_PATH.fullmatch(parts.path):
        raise SignatureInvalid("malformed")


def _certificate(pem: bytes) -> Certificate:
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(pem)
    except ValueError:
        raise SecretError("The certificate is not an X.509 certificate in PEM.") from None


def _certificate_key(pem: bytes) -> RSAPublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

    try:
        key = _certificate(pem).public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise SecretError("The key of the certificate cannot be read.") from None
    if not isinstance(key, RSAPublicKey) or key.key_size < 2048:
        raise SecretError("The certificate does not hold an RSA key of at least 2048 bits.")
    return key


def _names_paypal(certificate: Certificate) -> bool:
    from cryptography.x509.oid import NameOID

    names = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return any(name.endswith(".paypal.com") for name in names)


def _rsa_check(key: RSAPublicKey) -> Check:
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.hazmat.primitives.hashes import SHA256

    return _check_by(key.verify, PKCS1v15(), SHA256())


def _iso(text: bytes) -> float:
    """Parse an RFC 3339 time into seconds since 1970; refuse one without a zone."""
    try:
        moment = datetime.fromisoformat(text.decode("ascii"))
    except ValueError:
        raise SignatureInvalid("malformed") from None
    if moment.tzinfo is None:
        raise SignatureInvalid("malformed")
    return moment.timestamp()
