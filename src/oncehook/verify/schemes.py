"""The schemes by which senders prove who they are, as data: a preset names one and needs no code for it.

A scheme and a source's secrets become a `Verifier` once, at start; it is called with every arrival. The same scheme
signs drafts for `oncehook send` and for tests, so that both sides share one definition. Here: what all schemes share,
signatures with a shared secret (Hmac, Hash), user-defined checks (Custom), several schemes for one source (Either), and
none (Nothing). `oncehook.verify` has them all.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.human import suggest
from oncehook.model import Arrival
from oncehook.verify import readers
from oncehook.verify.template import Address, SignedTemplate

Verifier = Callable[[Arrival], None]
"""Returns None for a genuine arrival and raises SignatureInvalid for any other; never anything else (S2)."""

Matcher = Callable[[Sequence[bytes], Sequence[bytes]], bool]
"""Tells whether one of a verifier's keys made one of the signatures of these messages."""

DEFAULT_TOLERANCE: Final = 300.0
NONE: Final[frozenset[bytes]] = frozenset()
UNCOVERED: Final[frozenset[str]] = frozenset()


class Scheme(Protocol):
    """One way to prove where an arrival comes from. Subclasses override what differs from these defaults."""

    __slots__ = ()

    @property
    def masked(self) -> frozenset[bytes]:
        """Headers that carry the secret itself: their values must never be stored."""
        return NONE

    @property
    def masked_query(self) -> frozenset[bytes]:
        """Query values that carry the secret itself, and must never be stored."""
        return NONE

    @property
    def covers(self) -> frozenset[str]:
        """Parts that the check authenticates: "body", "url", or "headers" (all of them; so far no scheme does)."""
        return UNCOVERED

    @property
    def signed_headers(self) -> frozenset[bytes]:
        """Headers, by name, that the check authenticates."""
        return NONE

    @property
    def needed_headers(self) -> tuple[str, ...]:
        """Headers without which no arrival is genuine."""
        return ()

    def signed_at(self, arrival: Arrival) -> float | None:
        """Return the time of signing that an arrival claims, in seconds since 1970; None where it claims none."""
        return None

    def shows(self, arrival: Arrival) -> bool:
        """Tell whether the arrival has a signature of this kind, right or wrong. `Either` uses this to choose."""
        return True

    @abstractmethod
    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        """Compile the check. Any of the secrets may match; `tolerance` None means the scheme's own, inf means off.

        Raises ConfigError when there is no secret or an empty one, a key cannot be loaded, or the scheme signs the URL
        and none is given (S4): a source that cannot verify does not start.
        """

    @abstractmethod
    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        """Return a copy of the draft, signed like a genuine sender's at this moment."""


class SecretError(ConfigError):
    """A secret that cannot be used with this scheme."""


# -- what all schemes share --------------------------------------------------------------------


def same(a: bytes, b: bytes) -> bool:
    """Compare two secrets in constant time. No other comparison is used."""
    return hmac.compare_digest(a, b)


def matches_any(expected: Iterable[bytes], presented: Sequence[bytes]) -> bool:
    """Tell whether a presented signature is among the expected. All are compared, so that timing reveals nothing."""
    matched = False
    for good in expected:
        for candidate in presented:
            matched |= same(good, candidate)
    return matched


def usable(secrets: Sequence[bytes]) -> list[bytes]:
    """Return the secrets. Raises ConfigError where there is none or one is empty: without a secret, no source (S4)."""
    if not secrets:
        raise ConfigError("There is no secret to verify arrivals with.", hint='Set secret; or say verify = "none".')
    if not all(secret.strip() for secret in secrets):
        raise ConfigError("A secret is empty.", hint="Check the variable or file that it is read from.")
    return list(secrets)


def digits(text: bytes) -> int:
    """Parse a timestamp: digits only, and few enough to be a time."""
    if not text.isdigit() or len(text) > 16:
        raise SignatureInvalid("malformed")
    return int(text)


def check_moment(value: int, unit: str, tolerance: float) -> None:
    """Refuse a timestamp too far from now, in this unit. A tolerance of inf accepts all."""
    if not 0 <= value < 10**16:
        raise SignatureInvalid("malformed")
    check_age(in_seconds(value, unit), tolerance)


def in_seconds(value: int, unit: str) -> float:
    # 10^11 seconds is the year 5138, so a larger number is in milliseconds
    return value / 1000 if unit == "milliseconds" or (unit == "auto" and value >= 10**11) else value


def stamp(at: float, unit: str) -> bytes:
    """Return the current timestamp as a sender writes it."""
    return str(int(at) if unit == "seconds" else int(at * 1000)).encode()


def check_age(at: float, tolerance: float) -> None:
    """Refuse a signature that is too old, or too far in the future (S5)."""
    if abs(clock.now() - at) > tolerance:
        raise SignatureInvalid("stale")


def one_of(value: object, allowed: Sequence[str], what: str) -> None:
    """Refuse a value that is not allowed, naming the nearest right one."""
    if value not in allowed:
        raise ConfigError(f"{value!r} is no {what}.", hint=suggest(str(value), allowed))


def check_tolerance(value: object) -> float:
    """Return a tolerance. Raises ConfigError for what is no duration; `inf` turns the check off explicitly."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:
        raise ConfigError(f"tolerance {value!r} is not a span of time.", hint='Write "5m", or "off" by name.')
    return value


# -- signatures with a shared secret -----------------------------------------------------------

ALGORITHMS: Final = ("sha256", "sha512", "sha384", "sha1")
ENCODINGS: Final = ("hex", "base64")
UNITS: Final = ("seconds", "milliseconds", "auto")
KEYS: Final = ("text", "base64", "hex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A header of name=value pairs: the name of the signature's field, and the separator."""

    signature: str = "v1"
    separator: str = ","

    def __post_init__(self) -> None:
        if not self.signature or len(self.separator) != 1:
            raise ConfigError("fields needs the name of the signature's field and a separator of one character.")

    def split(self, value: bytes) -> list[tuple[bytes, bytes]]:
        """Split a header value into its pairs; skip what is no pair."""
        found = [part.partition(b"=") for part in value.split(self.separator.encode())]
        return [(name.strip(), text.strip()) for name, equals, text in found if equals]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature(Scheme, ABC):
    """A signature in a header, over a message that a template describes. Subclasses compute and check it."""

    header: str
    encoding: str = "hex"
    prefix: str = ""
    signed: str | tuple[str, ...] = "{body}"
    """The template of the signed message; of several, any may match."""
    timestamp: str | None = None
    """The place of the time of signing: `header:Name`, `field:t` in the signature's header, or `body:path`."""
    unit: str = "seconds"
    fields: Fields | None = None
    tolerance: float = DEFAULT_TOLERANCE
    key: str = "text"
    """The form of the secret: text is used as it is, base64 and hex are decoded."""
    _templates: tuple[SignedTemplate, ...] = field(init=False, repr=False, compare=False)
    _read: readers.Reader = field(init=False, repr=False, compare=False)
    _read_signatures: Callable[[bytes], list[bytes]] = field(init=False, repr=False, compare=False)
    _read_timestamp: Callable[[Arrival, bytes], bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        readers.header_name(self.header)
        one_of(self.encoding, ENCODINGS, "encoding")
        one_of(self.unit, UNITS, "unit of a timestamp")
        one_of(self.key, KEYS, "form of a key")
        check_tolerance(self.tolerance)
        texts = (self.signed,) if isinstance(self.signed, str) else self.signed
        object.__setattr__(self, "_templates", tuple(SignedTemplate(text) for text in texts))
        if not texts or not all(template.always for template in self._templates):
            raise ConfigError("`signed` may name nothing of the arrival, so any arrival would do.")
        self._check_timestamp()
        # Built once for all secrets: each account may have one, and its verifier then consists of little else.
        object.__setattr__(self, "_read", readers.header(self.header))
        object.__setattr__(self, "_read_signatures", self._signature_reader())
        object.__setattr__(self, "_read_timestamp", self._timestamp_reader())

    @property
    def _timestamp_place(self) -> tuple[str, str]:
        place, _, name = (self.timestamp or "").partition(":")
        return place, name

    def _check_timestamp(self) -> None:
        place, name = self._timestamp_place
        if self.timestamp:
            one_of(place, ("header", "field", "body"), "place of a timestamp")
            if not name or (place == "field" and self.fields is None):
                raise ConfigError(f"timestamp = {self.timestamp!r} does not say where it is.")
            needed = "body" if place == "body" else "timestamp"
            if not all(needed in template.always for template in self._templates):
                # Otherwise the sender of an old arrival could write a new time (S5).
                raise ConfigError(f"The timestamp must be signed: put {{{needed}}} into `signed`.")
        if place in ("", "body") and any("timestamp" in template.uses for template in self._templates):
            raise ConfigError("`signed` uses {timestamp}, but no timestamp in a header is configured.")

    @property
    def covers(self) -> frozenset[str]:
        return frozenset({"body", "url"}).intersection(*[template.always for template in self._templates])

    @property
    def signed_headers(self) -> frozenset[bytes]:
        shared = set.intersection(*[template.always for template in self._templates])
        place, name = self._timestamp_place
        names = {text.removeprefix("header:") for text in shared if text.startswith("header:")}
        return frozenset(text.lower().encode() for text in names | ({name} if place == "header" else set()))

    @property
    def needed_headers(self) -> tuple[str, ...]:
        place, name = self._timestamp_place
        return (self.header, name) if place == "header" else (self.header,)

    def signed_at(self, arrival: Arrival) -> float | None:
        place, name = self._timestamp_place
        try:
            if place == "body":
                value = readers.body_field(name, int)(arrival.body)
            else:
                signature = self._read(arrival) or b""
                value = digits(self._read_timestamp(arrival, signature)) if place else None
        except SignatureInvalid:
            return None
        return None if value is None else in_seconds(value, self.unit)

    def shows(self, arrival: Arrival) -> bool:
        return readers.shows_header(self.header)(arrival)

    @property
    @abstractmethod
    def _size(self) -> int:
        """Bytes of a raw signature."""

    @abstractmethod
    def _prepare(self, key: bytes) -> Callable[[bytes], bytes]:
        """Return a function from a message to its raw signature with this key, the first one."""

    @abstractmethod
    def _matcher(self, keys: Sequence[bytes]) -> Matcher:
        """Return a function that tells whether one of these keys made one of the signatures."""

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        matches = self._matcher([self._load(secret) for secret in usable(secrets)])
        window = check_tolerance(self.tolerance if tolerance is None else tolerance)
        check_time = _time_check(*self._timestamp_place, self.unit, window)
        return _SignatureVerifier(self, matches, check_time, self._address(url))

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        place, name = self._timestamp_place
        timestamp = stamp(at, self.unit)
        signed = readers.with_headers(draft)
        if place == "header":
            readers.put_header(signed, name, timestamp)
        elif place == "body":
            signed.body = readers.put_body_field(draft.body, name, int(timestamp))
        try:
            message = self._templates[0].render(signed, timestamp, self._address(url))
        except SignatureInvalid:
            raise ConfigError(f"The draft lacks something that {self._templates[0].text!r} needs.") from None
        value = self.prefix.encode() + self._encode(self._prepare(self._load(secret))(message))
        if self.fields:
            value = f"{self.fields.signature}=".encode() + value
        if self.fields and place == "field":
            value = name.encode() + b"=" + timestamp + self.fields.separator.encode() + value
        readers.put_header(signed, self.header, value)
        return signed

    def _address(self, url: str | None) -> Address | None:
        needed = any("url" in template.uses for template in self._templates)
        return Address(url) if needed else None

    def _load(self, secret: bytes) -> bytes:
        if self.key == "text":
            return secret
        try:
            loaded = bytes.fromhex(secret.decode()) if self.key == "hex" else readers.base64_key(secret)
        except ValueError:
            loaded = None
        if not loaded:
            raise SecretError(f"The secret is not {self.key}, as this scheme wants it.")
        return loaded

    def _encode(self, digest: bytes) -> bytes:
        return binascii.hexlify(digest) if self.encoding == "hex" else base64.b64encode(digest)

    def _signature_reader(self) -> Callable[[bytes], list[bytes]]:
        """Return the function from the header's value to the signatures in it that have the right form."""
        prefix, is_hex = self.prefix.encode(), self.encoding == "hex"
        size = len(prefix) + len(self._encode(bytes(self._size)))
        fields, wanted = self.fields, self.fields.signature.encode() if self.fields else b""

        def read(value: bytes) -> list[bytes]:
            texts = [value] if fields is None else [text for name, text in fields.split(value) if name == wanted]
            found = [text[len(prefix) :] for text in texts if len(text) == size and text.startswith(prefix)]
            if not found or len(texts) > readers.MOST_SIGNATURES:
                raise SignatureInvalid("malformed")
            return [text.lower() for text in found] if is_hex else found

        return read

    def _timestamp_reader(self) -> Callable[[Arrival, bytes], bytes]:
        """Return the function from the arrival and the header's value to the timestamp as it was written."""
        place, name = self._timestamp_place
        if place not in ("header", "field"):
            return lambda arrival, value: b""
        from_header = readers.header(name) if place == "header" else None
        fields, wanted = self.fields or Fields(), name.encode()

        def timestamp(arrival: Arrival, value: bytes) -> bytes:
            text = from_header(arrival) if from_header else readers.sole(fields.split(value), wanted)
            if text is None:
                raise SignatureInvalid("missing")
            return text

        return timestamp


class _SignatureVerifier(msgspec.Struct, frozen=True, gc=False):
    """The verifier of a signature: the scheme, which all its secrets share, and what a secret makes of it.

    This and its parts are structs, not functions within functions, because every account may have a secret: the garbage
    collector need not look at them.
    """

    scheme: Signature
    matches: Matcher
    check_time: Callable[[Arrival, bytes], None]
    address: Address | None

    def __call__(self, arrival: Arrival) -> None:
        scheme = self.scheme
        value = scheme._read(arrival)
        if value is None:
            raise SignatureInvalid("missing")
        signatures = scheme._read_signatures(value)
        timestamp = scheme._read_timestamp(arrival, value)
        messages = [template.render(arrival, timestamp, self.address) for template in scheme._templates]
        if not self.matches(messages, signatures):
            raise SignatureInvalid("mismatch")
        # Checked last, so that "stale" in the log always means genuine, but late.
        self.check_time(arrival, timestamp)


@lru_cache(maxsize=512)
def _time_check(place: str, name: str, unit: str, window: float) -> Callable[[Arrival, bytes], None]:
    """Return a check of the arrival and its timestamp as it was written."""
    if not place or window == math.inf:
        return lambda arrival, timestamp: None
    if place != "body":
        return lambda arrival, timestamp: check_moment(digits(timestamp), unit, window)
    read = readers.body_field(name, int)

    def check(arrival: Arrival, timestamp: bytes) -> None:
        value = read(arrival.body)
        if value is None:
            raise SignatureInvalid("missing")
        check_moment(value, unit, window)

    return check


@dataclass(frozen=True, slots=True, kw_only=True)
class _Digest(Signature):
    """A signature that the receiver computes, too, with the same secret."""

    algorithm: str = "sha256"

    def __post_init__(self) -> None:
        one_of(self.algorithm, ALGORITHMS, "algorithm")
        Signature.__post_init__(self)

    @property
    def _size(self) -> int:
        return hashlib.new(self.algorithm, usedforsecurity=False).digest_size

    def _matcher(self, keys: Sequence[bytes]) -> Matcher:
        return _DigestMatcher(self, tuple([self._prepare(key) for key in keys]))


class _DigestMatcher(msgspec.Struct, frozen=True, gc=False):
    scheme: _Digest
    digests: tuple[Callable[[bytes], bytes], ...]

    def __call__(self, messages: Sequence[bytes], signatures: Sequence[bytes]) -> bool:
        encode = self.scheme._encode
        return matches_any([encode(digest(message)) for message in messages for digest in self.digests], signatures)


_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hmac(_Digest):
    """An HMAC of a message, in a header: most senders, and most schemes of one's own."""

    def _prepare(self, key: bytes) -> Callable[[bytes], bytes]:
        # The two halves of an HMAC (RFC 2104) with the key taken in: a copy of each is cheaper than one of `hmac.new`,
        # and both are cheaper than to look up the algorithm and to take in the key each time.
        block = hashlib.new(self.algorithm).block_size
        key = (hashlib.new(self.algorithm, key).digest() if len(key) > block else key).ljust(block, b"\0")
        inner = hashlib.new(self.algorithm, key.translate(_INNER))
        outer = hashlib.new(self.algorithm, key.translate(_OUTER))
        return _PreparedHmac(inner, outer)


class _PreparedHmac(msgspec.Struct, frozen=True, gc=False):
    inner: hashlib._Hash
    outer: hashlib._Hash

    def __call__(self, message: bytes) -> bytes:
        within, around = self.inner.copy(), self.outer.copy()
        within.update(message)
        around.update(within.digest())
        return around.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hash(_Digest):
    """A plain hash of secret + message (HubSpot v1 and v2).

    Such a hash can be extended: with one genuine arrival, anybody can append to its message without the secret. The
    appended part begins with padding that always has zero bytes, which no text has; so a message with a zero byte is
    refused.
    """

    def _prepare(self, key: bytes) -> Callable[[bytes], bytes]:
        def digest(message: bytes) -> bytes:
            if b"\0" in message:
                raise SignatureInvalid("malformed")
            return hashlib.new(self.algorithm, key + message, usedforsecurity=True).digest()

        return digest


# -- a check of one's own ------------------------------------------------------------------------

Genuine = Callable[[Arrival, bytes], bool]
"""A check of one's own: (arrival, secret) -> True for a genuine one."""
ArrivalSigner = Callable[[Arrival, bytes], Arrival]
"""(draft, secret) -> the draft as a genuine sender would send it."""

# Raised when a part of an arrival is absent or malformed. Other errors are the check's own, and the sender retries.
_MALFORMED: Final = (LookupError, TypeError, AttributeError, ValueError)


@dataclass(frozen=True, slots=True)
class Custom(Scheme):
    """A user-defined check, called with each of the source's secrets. Only True accepts the arrival.

    Compare with `oncehook.verify.same`, so that timing reveals nothing. `body` says that the check covers the body;
    `headers` names those that contain the secret itself and must not be stored; with a `signer`, `oncehook send` and
    `oncehook.testing` can send samples.
    """

    check: Genuine
    signer: ArrivalSigner | None = None
    body: bool = False
    headers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if inspect.iscoroutinefunction(self.check):
            raise ConfigError("A check must be a plain function: nothing is awaited before an arrival is verified.")

    @property
    def masked(self) -> frozenset[bytes]:
        return frozenset(readers.header_name(name) for name in self.headers)

    @property
    def covers(self) -> frozenset[str]:
        return frozenset({"body"}) if self.body else UNCOVERED

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        kept, check = usable(secrets), self.check

        def verify(arrival: Arrival) -> None:
            try:
                # All are tried, so that timing does not reveal which secret matched. None, from a check that forgets to
                # return, is not True.
                answers = [check(arrival, secret) for secret in kept]
            except _MALFORMED:
                raise SignatureInvalid("malformed") from None
            if not any(answer is True for answer in answers):
                raise SignatureInvalid("mismatch")

        return verify

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        if self.signer is None:
            raise ConfigError(
                "This source has a check of its own, and nothing that signs for it.",
                hint="Give it verify=Custom(check, signer=…).",
            )
        return self.signer(readers.with_headers(draft), secret)


# -- alternatives ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, init=False)
class Either(Scheme):
    """Several schemes for one source. They are tried in order, strongest first.

    The first one whose signature the arrival has decides alone: a wrong signature is not rescued by another credential.
    With `every=True` all are tried and one match is enough, for alternatives that look alike. A scheme that reads the
    body is present in every arrival: put it last.

    A secret may fit only some of the schemes; one that fits none is an error, and a scheme without a fitting secret is
    ignored.
    """

    schemes: tuple[Scheme, ...]
    every: bool

    def __init__(self, *schemes: Scheme, every: bool = False) -> None:
        if not schemes:
            raise ConfigError("Either needs schemes to choose from.")
        if len({is_public(scheme) for scheme in schemes}) > 1:
            # Every secret is tried with every scheme that it fits, and a public key used as an HMAC secret would let
            # anybody sign.
            raise ConfigError(
                "Schemes with a public key and schemes with a secret cannot be alternatives of one source.",
                hint="Make two sources, one for each.",
            )
        object.__setattr__(self, "schemes", schemes)
        object.__setattr__(self, "every", every)

    @property
    def masked(self) -> frozenset[bytes]:
        return NONE.union(*[scheme.masked for scheme in self.schemes])

    @property
    def masked_query(self) -> frozenset[bytes]:
        return NONE.union(*[scheme.masked_query for scheme in self.schemes])

    @property
    def covers(self) -> frozenset[str]:
        return self.schemes[0].covers.intersection(*[scheme.covers for scheme in self.schemes])

    @property
    def signed_headers(self) -> frozenset[bytes]:
        return self.schemes[0].signed_headers.intersection(*[scheme.signed_headers for scheme in self.schemes])

    def shows(self, arrival: Arrival) -> bool:
        return any(scheme.shows(arrival) for scheme in self.schemes)

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        fitting: dict[int, list[bytes]] = {}
        for secret in usable(secrets):
            fits = [i for i, scheme in enumerate(self.schemes) if _fits(scheme, secret, url, tolerance)]
            if not fits:
                raise SecretError("A secret fits none of the schemes of this source.")
            for i in fits:
                fitting.setdefault(i, []).append(secret)
        checks = [
            (self.schemes[i].shows, self.schemes[i].verifier(fitting[i], url=url, tolerance=tolerance))
            for i in sorted(fitting)
        ]
        return _first_that_matches(checks) if self.every else _first_that_shows(checks)

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        for scheme in self.schemes:
            try:
                return scheme.sign(draft, secret, at=at, url=url)
            except SecretError:
                continue
        raise SecretError("The secret fits none of the schemes of this source.")


def is_public(scheme: Scheme) -> bool:
    """Tell whether a scheme verifies with public data: a public key, a certificate."""
    return bool(getattr(scheme.schemes[0] if isinstance(scheme, Either) else scheme, "has_public_key", False))


def _fits(scheme: Scheme, secret: bytes, url: str | None, tolerance: float | None) -> bool:
    try:
        scheme.verifier([secret], url=url, tolerance=tolerance)
    except SecretError:
        return False
    return True


_Checks = Sequence[tuple[Callable[[Arrival], bool], Verifier]]


def _first_that_shows(checks: _Checks) -> Verifier:
    def verify(arrival: Arrival) -> None:
        for shows, check in checks:
            if shows(arrival):
                return check(arrival)
        raise SignatureInvalid("missing")

    return verify


def _first_that_matches(checks: _Checks) -> Verifier:
    def verify(arrival: Arrival) -> None:
        refusals: list[str] = []
        for shows, check in checks:
            if not shows(arrival):
                continue
            try:
                return check(arrival)
            except SignatureInvalid as refusal:
                if refusal.reason == "repeated":
                    raise
                refusals.append(refusal.reason)
        # The reason that came closest is the most useful: a stale signature was genuine.
        raise SignatureInvalid(
            next((word for word in ("stale", "mismatch") if word in refusals), (refusals or ["missing"])[0])
        )

    return verify


# -- no check ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing(Scheme):
    """No verification. It must be chosen explicitly (S4)."""

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        return lambda arrival: None

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        return readers.with_headers(draft)
