"""Keys for development: of a source without settings, and of `oncehook send`."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from oncehook import clock
from oncehook.verify.asymmetric import Ed25519, PayPal, SendGrid, ed25519_public
from oncehook.verify.credentials import Basic
from oncehook.verify.schemes import Either, Hash, Hmac, Scheme
from oncehook.verify.standard import StandardWebhooks

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey


@dataclass(frozen=True, slots=True, repr=False)
class DevelopmentKeys:
    """The secrets of the receiver and the key of the sender, without a repr."""

    secrets: tuple[bytes, ...]
    signing: bytes


def development_keys(scheme: Scheme) -> DevelopmentKeys:
    """Make random keys that fit this scheme, for both sides."""
    if isinstance(scheme, Either):
        return development_keys(scheme.schemes[0])
    if isinstance(scheme, SendGrid):
        return _sendgrid()
    if isinstance(scheme, PayPal):
        return _paypal()
    raw = clock.random_bytes(32)
    text = raw.hex().encode()
    if isinstance(scheme, Basic):
        text = b"dev:" + text
    elif isinstance(scheme, StandardWebhooks):
        text = b"whsec_" + base64.b64encode(raw)
    elif isinstance(scheme, Ed25519):
        return DevelopmentKeys((_write(ed25519_public(raw), scheme.key),), _write(raw, scheme.key))
    elif isinstance(scheme, Hmac | Hash) and scheme.key == "base64":
        text = base64.b64encode(raw)
    return DevelopmentKeys((text,), text)


def _write(key: bytes, form: str) -> bytes:
    return base64.b64encode(key) if form == "base64" else key.hex().encode()


def _sendgrid() -> DevelopmentKeys:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return DevelopmentKeys((base64.b64encode(public),), _pem(key))


def _paypal() -> DevelopmentKeys:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.hashes import SHA256

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "messageverificationcerts.sandbox.paypal.com")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(clock.now_utc() - timedelta(days=1))
        .not_valid_after(clock.now_utc() + timedelta(days=3650))
        .sign(key, SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    webhook_id = b"WH-" + clock.random_bytes(8).hex().upper().encode()
    return DevelopmentKeys((webhook_id, certificate), webhook_id + b"\n" + _pem(key))


def _pem(key: EllipticCurvePrivateKey | RSAPrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
