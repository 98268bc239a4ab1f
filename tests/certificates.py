"""Certificates for tests that speak TLS: one for a name, signing itself, so that a client trusts it by `ca=`.

Modules make a fixture of it for their own name:

    certificate = certificates.fixture("hooks.example")
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Certificate = tuple[Path, Path]
"""The files of a certificate and of its key."""


def fixture(host: str) -> Callable[..., Certificate]:
    """A fixture that makes one certificate for `host` in each module that has it."""

    @pytest.fixture(scope="module")
    def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
        return make(host, tmp_path_factory.mktemp("tls"))

    return certificate


def make(host: str, folder: Path) -> Certificate:
    """A certificate for `host` that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"


def served(certificate: Certificate) -> ssl.SSLContext:
    """How a server shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context
