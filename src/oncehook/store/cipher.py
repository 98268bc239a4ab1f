"""Encryption at rest: everything stored of a payload goes through one `Cipher`, on both engines and in both directions.

A store has one cipher. Engines encrypt bodies, heads and answers where they build rows, and decrypt them where they
read rows; nothing above the store sees an encrypted value. Without keys everything is stored in plain.

An encrypted value describes itself, so rows of any age coexist and no column is needed:

    magic (4) · version (1) · key id (4) · nonce (24) · AES-256-GCM ciphertext and tag (16)

So does the reference to a value that is an object elsewhere (`bodies`), in the same form as it would have here:

    magic (4) · 2 · SHA-256 of the object (32) · size of the plain value, in decimal

The first half of the nonce is random and derives a key for this value alone; the second half is GCM's own. So one key
serves any number of values, while 96 random bits alone would need a new key after some billions (busy inboxes get there
within weeks). Column and row id are authenticated, too, so that a value moved to another row or column is detected.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from oncehook import clock
from oncehook.errors import ConfigError, Undecryptable
from oncehook.model import (
    Evidence,
    Intake,
    Item,
    Lease,
    Rejection,
    StoredArrival,
    StoredAttempt,
    StoredEvent,
    join_answer,
    split_answer,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Column = Literal[
    "body", "head", "batch body", "batch head", "answer", "rejected body", "rejected head", "secrets", "archive",
    "media",
]  # fmt: skip
"""Kind of a value. Events and later arrivals share the first two, because their rows have different ids."""

MAGIC: Final = b"\xffOHE"
"""Neither JSON nor text nor a request line begins like this."""

ENCRYPTED: Final = MAGIC + b"\x01"
PLAIN: Final = MAGIC + b"\x00"
"""Prefix of a plain value that begins with MAGIC itself, so that nobody can send one that looks encrypted."""
REFERENCE: Final = MAGIC + b"\x02"

OVERHEAD: Final = len(ENCRYPTED) + 4 + 24 + 16
"""Bytes by which an encrypted value is longer."""

KEY_BYTES: Final = 32
_KEY_END: Final = len(ENCRYPTED) + 4
_NONCE_END: Final = _KEY_END + 24
_LEAST_DIFFERENT: Final = 12
"""Number of different bytes that a key must exceed: 32 random ones never have fewer than 20; words do."""

_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")

V = TypeVar("V", bytes, bytes | None)
E = TypeVar("E", bound=StoredEvent)


class Reference(bytes):
    """What is kept in place of a value that is an object elsewhere."""

    @classmethod
    def to(cls, kept: bytes, size: int) -> Reference:
        """Refer to an object with this content, whose plain value has this size."""
        return cls(REFERENCE + hashlib.sha256(kept).digest() + b"%d" % size)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the object."""
        return self[len(REFERENCE) : len(REFERENCE) + 32]

    @property
    def size(self) -> int:
        """Bytes of the plain value."""
        return int(self[len(REFERENCE) + 32 :])


def read_key(text: bytes) -> bytes:
    """Read a key as operators write it: 32 random bytes as base64 or hex. Raises ConfigError, without repeating it."""
    text = text.strip()
    try:
        if len(text) == 2 * KEY_BYTES:
            key = binascii.unhexlify(text)
        else:
            key = base64.b64decode(text.translate(_URL_SAFE).rstrip(b"=") + b"=" * (-KEY_BYTES % 3), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES or len(set(key)) <= _LEAST_DIFFERENT:
        raise ConfigError(
            "An encryption key must be 32 random bytes, written as base64 or hex.",
            hint="Make one with `openssl rand -base64 32`.",
        )
    return key


class _Key:
    """One key: its id, which is stored with each value, and what is derived from it."""

    __slots__ = ("_aesgcm", "_secret", "id")

    def __init__(self, secret: bytes) -> None:
        self._aesgcm = _aesgcm()
        self._secret = secret
        self.id = hmac.digest(secret, b"oncehook key id", "sha256")[:4]

    def derive_key(self, purpose: bytes) -> bytes:
        """Return a key for another purpose, from which neither this one nor that of another purpose can be found."""
        return hmac.digest(self._secret, b"oncehook purpose " + purpose, "sha256")

    def derive(self, salt: bytes) -> AESGCM:
        """Return the cipher for the value with this salt."""
        return self._aesgcm(hmac.digest(self._secret, b"oncehook value" + salt, "sha256"))


class Cipher:
    """The keys of a store: the first encrypts, all of them decrypt."""

    def __init__(self, keys: Sequence[bytes] = (), *, decrypt_only: bool = False) -> None:
        """`keys`: 32 bytes each (`read_key`). `decrypt_only`: keep new values plain.

        Raises ConfigError where the library is missing, or a key is given twice.
        """
        made = [_Key(key) for key in keys]
        self._keys = {key.id: key for key in made}
        if len(self._keys) < len(made):
            raise ConfigError("An encryption key is given twice.", hint="Name each key once; the first one encrypts.")
        self._first = None if decrypt_only or not made else made[0]

    def take_over(self, other: Cipher) -> None:
        """Take over the keys of another cipher, if it has any. For code that builds a store, before it is opened."""
        if other.has_keys:
            self._keys, self._first = other._keys, other._first

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cipher):
            return NotImplemented
        return (self.key_ids, self.encrypts) == (other.key_ids, other.encrypts)

    __hash__ = None  # type: ignore[assignment]

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of its keys, the one that encrypts first."""
        return tuple(id_.hex() for id_ in self._keys)

    def derive_keys(self, purpose: bytes) -> list[bytes]:
        """Return keys for another purpose, one from each key; the first from the one that encrypts."""
        return [key.derive_key(purpose) for key in self._keys.values()]

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    @property
    def encrypts(self) -> bool:
        return self._first is not None

    def encrypt(self, value: V, column: Column, row: bytes) -> V:
        """Return a value as stored in this column of the row with this id."""
        if not value:
            return value
        key = self._first
        if key is None:
            return PLAIN + value if value.startswith(MAGIC) else value
        nonce = clock.random_bytes(24)
        begin = ENCRYPTED + key.id
        text = key.derive(nonce[:12]).encrypt(nonce[12:], value, _context(begin, column, row))
        return b"".join((begin, nonce, text))

    def decrypt(self, value: V, column: Column, row: bytes) -> V:
        """Return the plain value of this column and row, or the Reference to it. Raises Undecryptable."""
        if not value or not value.startswith(MAGIC):
            return value
        if value.startswith(REFERENCE) and value[len(REFERENCE) + 32 :].isdigit():
            return Reference(value)
        if value.startswith(PLAIN):
            return value[len(PLAIN) :]
        begin, nonce = value[:_KEY_END], value[_KEY_END:_NONCE_END]
        if not value.startswith(ENCRYPTED) or len(value) < OVERHEAD:
            raise Undecryptable("What is kept here is damaged, or was encrypted by a newer release.")
        key = self._keys.get(begin[len(ENCRYPTED) :])
        if key is None:
            raise Undecryptable(
                f"This was encrypted with the key {begin[len(ENCRYPTED) :].hex()}, which is not given here.",
                hint="Add that key to the end of `encrypt.key`; `oncehook doctor` tells which keys are needed.",
            )
        from cryptography.exceptions import InvalidTag

        try:
            return key.derive(nonce[:12]).decrypt(nonce[12:], value[_NONCE_END:], _context(begin, column, row))
        except InvalidTag:
            raise Undecryptable(
                f"This was encrypted with the key {key.id.hex()}, and was changed or moved here from another row since."
            ) from None

    # -- what is written ---------------------------------------------------------------------------

    def encrypt_body(self, item: Item) -> bytes:
        """Encrypt the body of an item, for its event or for a later arrival; a large one is referred to."""
        return item.reference or self.encrypt(item.body, "body", item.event_id)

    def encrypt_head(self, intake: Intake, item: Item) -> bytes | None:
        """Encrypt the head to be stored with an item; None where the batch's own serves.

        An encrypted head is bound to its row, so the parts of a split request cannot share one.
        """
        if intake.raw is not None and self._first is None:
            return None
        return self.encrypt(intake.headers, "head", item.event_id)

    def encrypt_batch(self, intake: Intake) -> tuple[bytes, bytes | None]:
        """Encrypt head and raw body of a split request; a large body is referred to."""
        id_ = intake.arrival_id
        raw = intake.raw_reference or self.encrypt(intake.raw, "batch body", id_)
        return self.encrypt(intake.headers, "batch head", id_), raw

    def encrypt_answer(self, evidence: Evidence, delivery_id: bytes, fence: int) -> bytes | None:
        """Encrypt what an attempt sent and got."""
        return self.encrypt(join_answer(evidence), "answer", _attempt_row(delivery_id, fence))

    def encrypt_rejection(self, rejection: Rejection) -> tuple[bytes | None, bytes | None]:
        """Encrypt what is kept of a rejected arrival."""
        head = self.encrypt(rejection.head, "rejected head", rejection.id)
        return head, self.encrypt(rejection.body, "rejected body", rejection.id)

    # -- what was read -----------------------------------------------------------------------------

    def read_event(self, event: E) -> E:
        """Decrypt an event that was read. Raises Undecryptable."""
        head, body = self.decrypt(event.request_head, "head", event.id), self.decrypt(event.body, "body", event.id)
        if head is event.request_head and body is event.body:
            return event
        return msgspec.structs.replace(event, request_head=head, body=body, is_apart=isinstance(body, Reference))

    def read_lease(self, lease: Lease) -> Lease:
        """Decrypt a lease in place; one that cannot be decrypted is marked, so that others are not held up."""
        try:
            lease.event = self.read_event(lease.event)
        except Undecryptable as error:
            lease.event = lease.event.without_payload()
            lease.unreadable = f"{error.code}: {error}"
        return lease

    def read_arrival(self, arrival: StoredArrival) -> StoredArrival:
        """Decrypt a later arrival; one that cannot be decrypted is marked, because others in the list can."""
        try:
            head = self.decrypt(arrival.request_head, "head", arrival.id)
            body = self.decrypt(arrival.body, "body", arrival.id)
        except Undecryptable as error:
            return replace(arrival, request_head=b"", body=None, unreadable=error)
        return replace(arrival, request_head=head, body=body)

    def read_rejection(self, rejection: Rejection) -> Rejection:
        """Decrypt what was kept of a rejected arrival, in place; nothing where it cannot be decrypted."""
        try:
            rejection.head = self.decrypt(rejection.head, "rejected head", rejection.id)
            rejection.body = self.decrypt(rejection.body, "rejected body", rejection.id)
        except Undecryptable:
            rejection.head = rejection.body = None
        return rejection

    def read_batch(self, batch_id: bytes, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Decrypt head and raw body of a split request. Raises Undecryptable."""
        return self.decrypt(head, "batch head", batch_id), self.decrypt(body, "batch body", batch_id)

    def read_attempt(self, attempt: StoredAttempt) -> StoredAttempt:
        """Decrypt an attempt. An answer that cannot be decrypted is replaced by the reason."""
        kept = attempt.evidence.answer
        try:
            whole = self.decrypt(kept, "answer", _attempt_row(attempt.delivery_id, attempt.fence))
        except Undecryptable as error:
            whole = f"({error})".encode()
        answer, exchange = split_answer(whole)
        if answer is kept:
            return attempt
        return replace(attempt, evidence=msgspec.structs.replace(attempt.evidence, answer=answer, exchange=exchange))


def _attempt_row(delivery_id: bytes, fence: int) -> bytes:
    return delivery_id + fence.to_bytes(8)


def _context(begin: bytes, column: Column, row: bytes) -> bytes:
    return b"\x00".join((begin, column.encode(), row))


def _aesgcm() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as missing:
        raise ConfigError(
            "`encrypt` needs the package cryptography.", hint="Install it: pip install cryptography."
        ) from missing
    return AESGCM
