"""The schemes by which senders prove who they are, as data: a preset names one, and has no code of its own for it.

A scheme and a source's secrets become a `Verifier`, once, at start; it is called with every arrival. The same scheme
signs drafts for `oncehook send` and for tests, so that both sides come from one definition. Here: what all schemes
share, signatures with a shared secret (Hmac, Hash), a check of one's own (Custom), several schemes for one source
(Either), and none (Nothing). `oncehook.verify` has them all.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from oncehook import clock
from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.human import suggest
from oncehook.model import Arrival
from oncehook.verify import readers
from oncehook.verify.template import Address, SignedTemplate

Verifier = Callable[[Arrival], None]
"""Returns None for a genuine arrival and raises SignatureInvalid for any other; never anything else (S2)."""

DEFAULT_TOLERANCE: Final = 300.0
NONE: Final[frozenset[bytes]] = frozenset()
UNCOVERED: Final[frozenset[str]] = frozenset()


class Scheme(Protocol):
    """One way of proving where an arrival comes from. Subclasses name what differs from the defaults here."""

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

    def shows(self, arrival: Arrival) -> bool:
        """Tell whether the arrival carries a signature of this kind, good or bad. `Either` chooses by it."""
        return True

    @abstractmethod
    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        """Compile the check. Any of the secrets may match; `tolerance` None is the scheme's own, inf is off.

        Raises ConfigError when there is no secret or an empty one, when a key cannot be loaded, or when the
        scheme signs the URL and none is given (S4): a source that cannot check does not start.
        """

    @abstractmethod
    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        """Return a copy of the draft as a genuine sender would send it at this moment."""


class SecretError(ConfigError):
    """A secret that cannot be used with this scheme."""


# -- what all schemes share --------------------------------------------------------------------


def same(a: bytes, b: bytes) -> bool:
    """Compare two secrets in a time that does not tell where they differ. No other comparison is used."""
    return hmac.compare_digest(a, b)


def matches_any(expected: Iterable[bytes], presented: Sequence[bytes]) -> bool:
    """Look for one of the presented signatures among the expected. All are compared, so time tells nothing."""
    matched = False
    for good in expected:
        for candidate in presented:
            matched |= same(good, candidate)
    return matched


def usable(secrets: Sequence[bytes]) -> list[bytes]:
    """Return the secrets. Raises ConfigError where there is none or one is empty: no secret, no source (S4)."""
    if not secrets:
        raise ConfigError("There is no secret to verify arrivals with.", hint='Set secret; or say verify = "none".')
    if not all(secret.strip() for secret in secrets):
        raise ConfigError("A secret is empty.", hint="Check the variable or file that it is read from.")
    return list(secrets)


def digits(text: bytes) -> int:
    """Read a timestamp: digits and nothing else, few enough to be a moment."""
    if not text.isdigit() or len(text) > 16:
        raise SignatureInvalid("malformed")
    return int(text)


def check_moment(value: int, unit: str, tolerance: float) -> None:
    """Refuse a moment too far from now, counted in this unit. A tolerance of inf lets every moment through."""
    if not 0 <= value < 10**16:
        raise SignatureInvalid("malformed")
    # no clock shows 10^11 seconds before the year 5138: a number that long counts milliseconds
    check_age(value / 1000 if unit == "milliseconds" or (unit == "auto" and value >= 10**11) else value, tolerance)


def stamp(at: float, unit: str) -> bytes:
    """Write the digits of this moment, as a sender would."""
    return str(int(at) if unit == "seconds" else int(at * 1000)).encode()


def check_age(at: float, tolerance: float) -> None:
    """Refuse what was signed too long ago, or too far ahead (S5)."""
    if abs(clock.now() - at) > tolerance:
        raise SignatureInvalid("stale")


def one_of(value: object, allowed: Sequence[str], what: str) -> None:
    """Refuse a value that is not among those allowed, naming the nearest right one."""
    if value not in allowed:
        raise ConfigError(f"{value!r} is no {what}.", hint=suggest(str(value), allowed))


def check_tolerance(value: object) -> float:
    """Return a tolerance. Raises ConfigError for what is no span of time; `inf` turns the check off, by name."""
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
    """A header made of name=value pairs: the field that holds the signature, and the separator of the pairs."""

    signature: str = "v1"
    separator: str = ","

    def __post_init__(self) -> None:
        if not self.signature or len(self.separator) != 1:
            raise ConfigError("fields needs the name of the signature's field and a separator of one character.")

    def split(self, value: bytes) -> list[tuple[bytes, bytes]]:
        """Split one header value into its pairs; what is no pair is left out."""
        found = [part.partition(b"=") for part in value.split(self.separator.encode())]
        return [(name.strip(), text.strip()) for name, equals, text in found if equals]


_Pairs = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature(Scheme, ABC):
    """A signature in a header, over a message that a template describes. Each kind makes and checks it in its way."""

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
                # Otherwise a sender of an old arrival would just write a new time (S5).
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

    def shows(self, arrival: Arrival) -> bool:
        return readers.shows_header(self.header)(arrival)

    @property
    @abstractmethod
    def _size(self) -> int:
        """Bytes of a raw signature."""

    @abstractmethod
    def _prepare(self, key: bytes) -> Callable[[bytes], bytes]:
        """Return the function from a message to its raw signature with this key, the one that signs."""

    @abstractmethod
    def _matcher(self, keys: Sequence[bytes]) -> Callable[[Sequence[bytes], Sequence[bytes]], bool]:
        """Return the function that tells whether one of these keys made one of the signatures of the messages."""

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        matches = self._matcher([self._load(secret) for secret in usable(secrets)])
        address = self._address(url)
        window = check_tolerance(self.tolerance if tolerance is None else tolerance)
        templates, split = self._templates, self.fields.split if self.fields else lambda value: [(b"", value)]
        read, read_signatures = readers.header(self.header), self._signature_reader()
        read_timestamp, check_time = self._timestamp_reader(), self._time_check(window)

        def verify(arrival: Arrival) -> None:
            value = read(arrival)
            if value is None:
                raise SignatureInvalid("missing")
            pairs = split(value)
            signatures = read_signatures(pairs)
            timestamp = read_timestamp(arrival, pairs)
            messages = [template.render(arrival, timestamp, address) for template in templates]
            if not matches(messages, signatures):
                raise SignatureInvalid("mismatch")
            # Only now, so that "stale" in the log always means: genuine, but late.
            check_time(arrival, timestamp)

        return verify

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
        return digest.hex().encode() if self.encoding == "hex" else base64.b64encode(digest)

    def _signature_reader(self) -> Callable[[_Pairs], list[bytes]]:
        """Return the function from the header's fields to the signatures in it that have the right form."""
        prefix, is_hex = self.prefix.encode(), self.encoding == "hex"
        size = len(prefix) + len(self._encode(bytes(self._size)))
        wanted = self.fields.signature.encode() if self.fields else b""

        def read(pairs: _Pairs) -> list[bytes]:
            texts = [text for name, text in pairs if name == wanted]
            found = [text[len(prefix) :] for text in texts if len(text) == size and text.startswith(prefix)]
            if not found or len(texts) > readers.MOST_SIGNATURES:
                raise SignatureInvalid("malformed")
            return [text.lower() for text in found] if is_hex else found

        return read

    def _timestamp_reader(self) -> Callable[[Arrival, _Pairs], bytes]:
        """Return the function from the arrival and the header's fields to the timestamp as it was written."""
        place, name = self._timestamp_place
        if place not in ("header", "field"):
            return lambda arrival, pairs: b""
        from_header = readers.header(name) if place == "header" else None
        wanted = name.encode()

        def timestamp(arrival: Arrival, pairs: _Pairs) -> bytes:
            text = from_header(arrival) if from_header else readers.sole(pairs, wanted)
            if text is None:
                raise SignatureInvalid("missing")
            return text

        return timestamp

    def _time_check(self, window: float) -> Callable[[Arrival, bytes], None]:
        place, name = self._timestamp_place
        unit = self.unit
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
    """A signature that the receiver makes anew, with the same secret."""

    algorithm: str = "sha256"

    def __post_init__(self) -> None:
        one_of(self.algorithm, ALGORITHMS, "algorithm")
        Signature.__post_init__(self)

    @property
    def _size(self) -> int:
        return hashlib.new(self.algorithm, usedforsecurity=False).digest_size

    def _matcher(self, keys: Sequence[bytes]) -> Callable[[Sequence[bytes], Sequence[bytes]], bool]:
        digests, encode = [self._prepare(key) for key in keys], self._encode

        def matches(messages: Sequence[bytes], signatures: Sequence[bytes]) -> bool:
            return matches_any([encode(digest(message)) for message in messages for digest in digests], signatures)

        return matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Hmac(_Digest):
    """An HMAC of a message in a header: most senders, and every plain scheme of one's own."""

    def _prepare(self, key: bytes) -> Callable[[bytes], bytes]:
        prepared = hmac.new(key, digestmod=self.algorithm)

        def digest(message: bytes) -> bytes:
            copy = prepared.copy()  # cheaper than to look up the algorithm and to take in the key each time
            copy.update(message)
            return copy.digest()

        return digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Hash(_Digest):
    """A plain hash of secret + message (HubSpot v1 and v2).

    Such a hash can be extended: with one genuine arrival, anybody can append to its message without the secret.
    What is appended begins with padding that always holds zero bytes, which no text does; so a message with a
    zero byte is refused.
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

# Raised by reading what is absent or odd in an arrival. Other errors are the check's own: the sender tries again.
_MALFORMED: Final = (LookupError, TypeError, AttributeError, ValueError)


@dataclass(frozen=True, slots=True)
class Custom(Scheme):
    """A check of one's own, called with each of the source's secrets. True, and nothing else, lets the arrival in.

    Compare with `oncehook.verify.same`, so that time tells nothing. `body` says that the check covers the body,
    `headers` names those that carry the secret itself and must not be stored; with a `signer`, `oncehook send` and
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
                # All are tried, so that time does not tell which secret it was. None, the result of a check that
                # forgets to return, is not True.
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

    The first whose signature the arrival shows decides, alone: a wrong signature is not rescued by another
    credential beside it. With `every=True` all may be tried and one match is enough, for alternatives that look
    alike from outside. A scheme that reads the body shows in every arrival: put it last.

    A secret may fit some of the schemes only; one that fits none is an error, and a scheme that no secret fits is
    as good as absent.
    """

    schemes: tuple[Scheme, ...]
    every: bool

    def __init__(self, *schemes: Scheme, every: bool = False) -> None:
        if not schemes:
            raise ConfigError("Either needs schemes to choose from.")
        if len({is_public(scheme) for scheme in schemes}) > 1:
            # Every secret is tried with every scheme that it fits, and anybody can sign with a public key as secret.
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
    """Tell whether a scheme is checked with what is no secret: a public key, a certificate."""
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
        # The reason that came closest says most: a stale signature was genuine once.
        raise SignatureInvalid(
            next((word for word in ("stale", "mismatch") if word in refusals), (refusals or ["missing"])[0])
        )

    return verify


# -- no check ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing(Scheme):
    """No check at all. It must be chosen by name (S4)."""

    def verifier(self, secrets: Sequence[bytes], *, url: str | None = None, tolerance: float | None = None) -> Verifier:
        return lambda arrival: None

    def sign(self, draft: Arrival, secret: bytes, *, at: float, url: str | None = None) -> Arrival:
        return readers.with_headers(draft)
