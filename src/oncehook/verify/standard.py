"""Standard Webhooks: `{id}.{timestamp}.{body}` signed with HMAC-SHA256 (v1) or ed25519 (v1a).

Secrets are base64 with a prefix: `whsec_` is a shared secret, `whpk_` a public key, `whsk_` its private key. Svix sends
the same with its own header names.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from oncehook import clock
from oncehook.errors import SignatureInvalid
from oncehook.model import Arrival
from oncehook.verify import readers
from oncehook.verify.asymmetric import ed25519_check, ed25519_public, ed25519_sign
from oncehook.verify.schemes import (
    DEFAULT_TOLERANCE,
    Scheme,
    SecretError,
    Verifier,
    check_moment,
    check_tolerance,
    digits,
    matches_any,
    usable,
)

SHARED: Final = b"whsec_"
PUBLIC: Final = b"whpk_"
PRIVATE: Final = b"whsk_"


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardWebhooks(Scheme):
    """The signature in `webhook-signature`, over id, timestamp and body; of several, any may match.

    `prefix` begins the headers' names (`svix` for Svix). `bare=False` requires secrets with `whsec_`, for senders where
    a secret without it is another kind of credential.
    """

    prefix: str = "webhook"
    tolerance: float = DEFAULT_TOLERANCE
    bare: bool = True

    covers: ClassVar[frozenset[str]] = frozenset({"body"})

    def __post_init__(self) -> None:
        readers.header_name(self.prefix)
        check_tolerance(self.tolerance)

    @property
    def signed_headers(self) -> frozenset[bytes]:
        return frozenset({f"{self.prefix}-id".lower().encode(), f"{self.prefix}-timestamp".lower().encode()})

    @property
    def needed_headers(self) -> tuple[str, ...]:
        return f"{self.prefix}-id", f"{self.prefix}-timestamp", f"{self.prefix}-signature"

    def signed_at(self, arrival: Arrival) -> float | None:
        try:
            return float(digits(readers.header(f"{self.prefix}-timestamp")(arrival) or b""))
        except SignatureInvalid:
            return None

    def shows(self, arrival: Arrival) -> bool:
        return readers.shows_header(f"{self.prefix}-signature")(arrival)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        shared, public = self._load(usable(secrets))
        window = check_tolerance(self.tolerance if tolerance is None else tolerance)
        read_id, read_timestamp, read_signature = (
            readers.header(f"{self.prefix}-{name}") for name in ("id", "timestamp", "signature")
        )

        def verify(arrival: Arrival) -> None:
            event_id, timestamp, value = read_id(arrival), read_timestamp(arrival), read_signature(arrival)
            if event_id is None or timestamp is None or value is None:
                raise SignatureInvalid("missing")
            moment = digits(timestamp)
            v1, v1a = _split(value)
            message = b"%b.%b.%b" % (event_id, timestamp, arrival.body)
            matched = v1 and matches_any([_v1(key, message) for key in shared], v1)
            raw = [readers.base64_strict(signature) for signature in v1a] if public else []
            if not matched and not any(check(signature, message) for signature in raw for check in public):
                raise SignatureInvalid("mismatch")
            check_moment(moment, "seconds", window)

        return verify

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        signed = readers.with_headers(draft)
        event_id = readers.header(f"{self.prefix}-id")(draft) or b"msg_" + clock.random_bytes(12).hex().encode()
        timestamp = str(int(at)).encode()
        if not secret.startswith(PRIVATE):
            self._load_shared(secret)
        value = signer(secret)(event_id, timestamp, draft.body)
        for name, text in (("id", event_id), ("timestamp", timestamp), ("signature", value)):
            readers.put_header(signed, f"{self.prefix}-{name}", text)
        return signed

    def _load(self, secrets: Sequence[bytes]) -> tuple[list[bytes], list[Callable[[bytes, bytes], bool]]]:
        shared: list[bytes] = []
        public: list[Callable[[bytes, bytes], bool]] = []
        for secret in (secret.strip() for secret in secrets):
            if secret.startswith(PUBLIC):
                public.append(ed25519_check(_decode(secret, PUBLIC)))
            elif secret.startswith(PRIVATE):
                public.append(ed25519_check(ed25519_public(_decode(secret, PRIVATE))))
            else:
                shared.append(self._load_shared(secret))
        return shared, public

    def _load_shared(self, secret: bytes) -> bytes:
        if not self.bare and not secret.startswith(SHARED):
            raise SecretError("The secret must begin with whsec_.")
        return _decode(secret, SHARED)


Signer = Callable[[bytes, bytes, bytes], bytes]
"""(id, timestamp, body) -> the value of the signature header."""


def signer(secret: bytes) -> Signer:
    """Return the function that signs with one secret. Raises SecretError for one that cannot sign."""
    secret = secret.strip()
    if secret.startswith(PUBLIC):
        raise SecretError("A public key (whpk_…) cannot sign; give the private one (whsk_…) or a shared secret.")
    if secret.startswith(PRIVATE):
        private = _decode(secret, PRIVATE)
        ed25519_public(private)  # raises here for an invalid key, not at the first attempt
        return lambda *parts: b"v1a," + base64.b64encode(ed25519_sign(private, b"%b.%b.%b" % parts))
    shared = _decode(secret, SHARED)
    return lambda *parts: b"v1," + _v1(shared, b"%b.%b.%b" % parts)


def _decode(secret: bytes, prefix: bytes) -> bytes:
    key = readers.base64_key(secret.strip().removeprefix(prefix))
    if not key:
        raise SecretError("The secret is not base64, as Standard Webhooks wants it (whsec_…).")
    return key


def _split(value: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the signatures of the two known versions; skip others, as the specification says."""
    parts = value.split()
    found = [(version, signature) for version, _, signature in (part.partition(b",") for part in parts)]
    # An empty signature is no signature (CVE-2024-21491).
    v1 = [signature for version, signature in found if version == b"v1" and len(signature) == 44]
    v1a = [signature for version, signature in found if version == b"v1a" and len(signature) == 88]
    if not (v1 or v1a) or len(parts) > readers.MOST_SIGNATURES:
        raise SignatureInvalid("malformed")
    return v1, v1a


def _v1(key: bytes, message: bytes) -> bytes:
    return base64.b64encode(hmac.digest(key, message, "sha256"))
