"""Take a source's own secrets out of bytes before they are kept, whatever those bytes are (S25).

Redaction by path needs a body that can be read; this needs none. It looks for the secrets themselves: as they are, and
in every spelling that JSON and percent-encoding allow. `receive` calls it, after redaction, for bodies, heads and the
texts read from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeVar

from oncehook.secret import SHORTEST_SECRET

T = TypeVar("T", str, str | None)

MASKED: Final = b"[redacted]"
_NUMBER: Final = re.compile(rb"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# Each begins with what is plain text, which is found a hundred times faster than a group.
_ESCAPES: Final = re.compile(rb"\\u[0-9a-fA-F]{4}(?:\\u[0-9a-fA-F]{4})*")
_ASCII_ESCAPES: Final = re.compile(rb"\\u00[0-7][0-9a-fA-F](?:\\u00[0-7][0-9a-fA-F])*")
_PERCENTS: Final = re.compile(rb"%[0-9a-fA-F]{2}(?:%[0-9a-fA-F]{2})*")
_SHORT: Final = {'"': b'"', "\\": b"\\", "/": b"/", "\b": b"b", "\f": b"f", "\n": b"n", "\r": b"r", "\t": b"t"}


class Masking:
    """Replaces secrets in bytes by `[redacted]`; one that could be a number in JSON by nines, so that it stays JSON."""

    __slots__ = ("_needles", "_short", "_spelled", "_texts")

    def __init__(self, secrets: Iterable[bytes]) -> None:
        """Shorter secrets than SHORTEST_SECRET are left alone."""
        found = {secret.strip() for secret in secrets}
        # The longest first: one secret may be part of another.
        needles = sorted((secret for secret in found if len(secret) >= SHORTEST_SECRET), key=len, reverse=True)
        self._needles = [(needle, _stand_in(needle), _any_spelling(needle)) for needle in needles]
        self._texts = [(needle.decode("utf-8", "surrogateescape"), _stand_in(needle).decode()) for needle in needles]
        self._spelled = _ASCII_ESCAPES if all(needle.isascii() for needle in needles) else _ESCAPES
        self._short = [(b"\\" + _SHORT[c], c.encode()) for c in _SHORT if any(c.encode() in n for n in needles)]

    def __bool__(self) -> bool:
        """Tell whether there is anything to look for."""
        return bool(self._needles)

    def __call__(self, data: bytes) -> bytes:
        """Return the bytes without the secrets: the very same object where none was found."""
        if not self:
            return data
        for needle, stand_in, _ in self._needles:
            if needle in data:
                data = data.replace(needle, stand_in)
        if b"\\" in data:
            data = self._replace_spelled(data, self._unescape(data))
        if b"%" in data:
            data = self._replace_spelled(data, _PERCENTS.sub(_unquote, data.replace(b"+", b" ")))
        return data

    def text(self, text: T) -> T:
        """Return a text that was read from an arrival without the secrets; None stays None."""
        if text is not None:
            for needle, stand_in in self._texts:
                if needle in text:
                    text = text.replace(needle, stand_in)
        return text

    def _replace_spelled(self, data: bytes, plain: bytes) -> bytes:
        """Replace by pattern what shows in the plain spelling only: a pattern is a hundred times slower than a look."""
        for needle, stand_in, spelling in self._needles:
            if needle in plain:
                data = spelling.sub(stand_in, data)
        return data

    def _unescape(self, data: bytes) -> bytes:
        """Undo JSON's escapes, more of them than JSON would: this only tells where a closer look is due."""
        for escaped, plain in self._short:
            data = data.replace(escaped, plain)
        return self._spelled.sub(_decode, data) if b"\\u" in data else data


def _decode(escapes: re.Match[bytes]) -> bytes:
    units = bytes.fromhex(escapes[0].replace(b"\\u", b"").decode())
    return units.decode("utf-16-be", "replace").encode()


def _unquote(percents: re.Match[bytes]) -> bytes:
    return bytes.fromhex(percents[0].replace(b"%", b"").decode())


def _stand_in(secret: bytes) -> bytes:
    return b"9" * len(secret) if _NUMBER.fullmatch(secret) else MASKED


def _any_spelling(secret: bytes) -> re.Pattern[bytes]:
    """Compile a pattern of this secret in which every character may be escaped, as JSON or as a form does it."""
    try:
        characters = list(secret.decode())
    except UnicodeDecodeError:
        return re.compile(b"".join(rb"(?:%b|%%%b)" % (re.escape(bytes([b])), _hex(b"%02x" % b)) for b in secret))
    return re.compile(b"".join(map(_spellings, characters)))


def _spellings(character: str) -> bytes:
    encoded, units = character.encode(), character.encode("utf-16-be")
    ways = [
        re.escape(encoded),
        b"".join(rb"\\u" + _hex(units[at : at + 2].hex().encode()) for at in range(0, len(units), 2)),
        b"".join(b"%" + _hex(b"%02x" % byte) for byte in encoded),
    ]
    if character in _SHORT:
        ways.append(re.escape(b"\\" + _SHORT[character]))
    if character == " ":
        ways.append(rb"\+")
    return b"(?:" + b"|".join(ways) + b")"


def _hex(digits: bytes) -> bytes:
    """Write hexadecimal digits as a pattern that takes them in either case."""
    return b"".join(b"[%c%c]" % (d, d - 32) if d > 96 else b"%c" % d for d in digits)
