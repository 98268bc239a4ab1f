"""Readers of an unverified arrival: one header, one query value, one field of a JSON body.

A reader is built once, shared by all sources that read the same place, and called per arrival. It returns None for an
absent value and raises SignatureInvalid for one that is repeated (S7) or unreadable; nothing else, whatever the bytes.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec

from oncehook.errors import ConfigError, SignatureInvalid
from oncehook.model import Arrival

Reader = Callable[[Arrival], bytes | None]

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
FORM: Final = b"application/x-www-form-urlencoded"
MOST_FIELDS: Final = 1000
MOST_SIGNATURES: Final = 20
"""Most signatures in one header: no sender uses more."""


def header_name(name: str) -> bytes:
    """Return the name in lower case, as in arrivals. Raises ConfigError for what cannot be a header."""
    if not _HEADER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a header.")
    return name.lower().encode()


@lru_cache(maxsize=512)
def header(name: str) -> Reader:
    """Return the reader of the header with this name, stripped; None when it is absent or empty.

    Refuses a second one, and a variant with underscores: because servers and proxies disagree about which one counts,
    the verified one need not be the one that is used later (S7).
    """
    wanted = header_name(name)
    folded = wanted.replace(b"_", b"-")
    size = len(wanted)

    def read(arrival: Arrival) -> bytes | None:
        found: bytes | None = None
        for key, value in arrival.headers:
            # The length is compared first, because that excludes most headers at little cost.
            if len(key) == size and (key == wanted or key.lower().replace(b"_", b"-") == folded):
                if found is not None or key.lower() != wanted:
                    raise SignatureInvalid("repeated")
                found = value
        return found.strip() or None if found else None

    return read


@lru_cache
def shows_header(name: str) -> Callable[[Arrival], bool]:
    """Return a test for a header of this name, or its variant with underscores, empty or not."""
    folded = header_name(name).replace(b"_", b"-")

    def shows(arrival: Arrival) -> bool:
        return any(len(key) == len(folded) and key.lower().replace(b"_", b"-") == folded for key, _ in arrival.headers)

    return shows


def with_headers(draft: Arrival, **changes: Any) -> Arrival:
    """Copy the draft, with its own list of headers and these changes."""
    return replace(draft, **{"headers": list(draft.headers), **changes})


def put_header(arrival: Arrival, name: str, value: bytes) -> None:
    """Set a header of a draft, replacing existing ones."""
    wanted = header_name(name)
    folded = wanted.replace(b"_", b"-")
    kept = [(key, old) for key, old in arrival.headers if key.lower().replace(b"_", b"-") != folded]
    arrival.headers = [*kept, (wanted, value)]


# -- query and form ----------------------------------------------------------------------------


def pairs(text: bytes) -> list[tuple[bytes, bytes]]:
    """Return decoded names and values of a query or a form, in order; malformed escapes are kept as text.

    More than MOST_FIELDS are refused: this runs before the sender is verified, while other arrivals wait.
    """
    if text.count(b"&") >= MOST_FIELDS:
        raise SignatureInvalid("malformed")
    found = []
    for part in text.split(b"&"):
        if part:
            name, _, value = part.replace(b"+", b" ").partition(b"=")
            found.append((unquote_to_bytes(name), unquote_to_bytes(value)))
    return found


def sole(found: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the only value of this name; None when there is none or it is empty."""
    values = [value for key, value in found if key == name]
    if len(values) > 1:
        raise SignatureInvalid("repeated")
    return values[0] or None if values else None


@lru_cache(maxsize=512)
def query(name: str) -> Reader:
    wanted = name.encode()

    def read(arrival: Arrival) -> bytes | None:
        return sole(pairs(arrival.query), wanted) if arrival.query else None

    return read


def encode_pairs(found: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode names and values; the inverse of `pairs`."""
    return b"&".join(f"{quote_from_bytes(name)}={quote_from_bytes(value)}".encode() for name, value in found)


_content_type = header("content-type")


def is_form(arrival: Arrival) -> bool:
    return (_content_type(arrival) or b"").partition(b";")[0].strip().lower() == FORM


# -- fields of a JSON body ---------------------------------------------------------------------


@lru_cache(maxsize=512)
def body_field(path: str, kind: Any) -> Callable[[bytes], Any]:
    """Return the reader of one field of a JSON object, by dotted path; None when it is absent or null.

    Decodes only the fields on the path. A body that is no JSON object, or a field of another type, is malformed; so is
    too deep nesting, for which msgspec raises RecursionError.
    """
    names = path.split(".")
    if not all(names):
        raise ConfigError(f"{path!r} is not a path of field names.", hint='Write it like "body:data.token".')
    shape: Any = kind
    for name in reversed(names):
        shape = msgspec.defstruct("Field", [("value", shape | None, None)], rename={"value": name})
    decoder = msgspec.json.Decoder(shape)

    def read(body: bytes) -> Any:
        try:
            value = decoder.decode(body)
        except (ValueError, RecursionError):
            raise SignatureInvalid("malformed") from None
        for _ in names:
            if value is None:
                break
            value = value.value
        return value

    return read


def put_body_field(body: bytes, path: str, value: Any) -> bytes:
    """Set this field of a draft's JSON object, and encode it anew."""
    try:
        data = msgspec.json.decode(body or b"{}")
    except ValueError as error:
        raise ConfigError(f"The body must be JSON: this scheme signs the field {path!r} inside it.") from error
    *parents, last = path.split(".")
    level = data
    for name in parents:
        level = level.setdefault(name, {}) if isinstance(level, dict) else None
    if not isinstance(level, dict):
        raise ConfigError(f"The body must be a JSON object: this scheme signs the field {path!r} inside it.")
    level[last] = value
    return msgspec.json.encode(data)


# -- encodings ---------------------------------------------------------------------------------


def base64_strict(text: bytes) -> bytes:
    """Decode base64; refuse anything that an encoder would not have written."""
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        raise SignatureInvalid("malformed") from None
    if binascii.b2a_base64(data, newline=False) != text:  # the decoder accepts wrong padding and stray last bits
        raise SignatureInvalid("malformed")
    return data


def hex_strict(text: bytes) -> bytes:
    """Decode hex; refuse anything else."""
    try:
        return binascii.unhexlify(text)
    except binascii.Error:
        raise SignatureInvalid("malformed") from None


def base64_key(text: bytes) -> bytes | None:
    """Decode a key from base64, padded or not; None when it is not base64."""
    text = text.strip().rstrip(b"=")
    try:
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
    except binascii.Error:
        return None
