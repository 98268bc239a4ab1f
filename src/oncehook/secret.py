"""Secrets by reference: a setting says where a secret is kept, never what it is (S25).

`read_secret` turns `{ env = "NAME" }`, `{ file = "path" }` or `{ credential = "name" }` (systemd) into a `Secret`; code
that needs the bytes calls `reveal`. A missing or empty secret is an error, never an empty key (S4). `weakness` finds
guessable ones.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError
from oncehook.human import nearest

REFERENCE_FORMS: Final = '{ env = "NAME" }, { file = "path" } or { credential = "name" }'

_LARGEST: Final = 64 * 1024
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CREDENTIAL: Final = re.compile(r"[A-Za-z0-9_.-]+")


class Environment(Mapping[str, str]):
    """Environment variables that do not show their values in a traceback with locals (S26)."""

    __slots__ = ("_variables",)

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __getitem__(self, name: str) -> str:
        return self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def __repr__(self) -> str:
        return f"<Environment of {len(self)} variables>"


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A reference to a secret. Nothing that prints, encodes or copies it can show the value."""

    kind: Literal["env", "file", "credential", "program"]
    reference: str
    setting: str = ""
    """The setting that needs it, for error messages: `source.orders.secret`."""
    _read: Callable[[], bytes] = field(default=bytes, repr=False, compare=False)
    until: datetime | None = None
    """End of a secret that is being rotated out."""

    @classmethod
    def from_env(cls, variable: str, setting: str = "", env: Mapping[str, str] = os.environ) -> Secret:
        quiet = env if isinstance(env, Environment) else Environment(env)
        return cls("env", variable, setting, lambda: _read_variable(quiet, variable))

    @classmethod
    def from_file(cls, path: str, setting: str = "", base: Path | None = None) -> Secret:
        """Refer to a secret in a file, relative to `base`; a final newline is not part of it."""
        return cls("file", path, setting, lambda: _read_path((base or Path()) / path, f'file "{path}"'))

    @classmethod
    def from_credential(cls, name: str, setting: str = "", env: Mapping[str, str] = os.environ) -> Secret:
        """Refer to a secret that systemd hands over (`LoadCredential=`)."""
        quiet = env if isinstance(env, Environment) else Environment(env)
        return cls("credential", name, setting, lambda: _read_credential(quiet, name))

    @classmethod
    def from_program(cls, value: str | bytes | OldSecret, setting: str = "") -> Secret:
        if isinstance(value, OldSecret):
            return replace(cls.from_program(value.value, setting), reference=value.name, until=value.ends_at)
        return cls("program", "", setting, lambda: value.encode() if isinstance(value, str) else value)

    @property
    def name(self) -> str:
        """Name that may be shown: `env:META_APP_SECRET`."""
        return f"{self.kind}:{self.reference}" if self.kind != "program" else self.reference

    def reveal(self) -> bytes:
        """Return the secret itself, read anew at each call. Raises ConfigError when it is missing or empty."""
        try:
            value = self._read()
        except ConfigError as error:
            raise ConfigError(f"{error}{self._purpose()}", hint=error.hint) from None
        if not value.strip():
            raise ConfigError(f"{self.name or 'a secret'} is empty{self._purpose()}")
        return value

    def is_set(self) -> bool:
        """Tell whether `reveal` would return a value."""
        try:
            return bool(self.reveal())
        except ConfigError:
            return False

    def _purpose(self) -> str:
        return f"; {self.setting} needs it" if self.setting else ""

    def __repr__(self) -> str:
        return f"Secret({self.name})"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class OldSecret:
    """A secret that is being rotated out: valid until a moment, or until the end of a date in UTC.

    >>> inbox.source("orders", preset="shopify", secret=[new, OldSecret(old, until="2026-12-01")])
    """

    value: bytes | str = field(repr=False)
    until: date | datetime | str
    name: str = ""
    """Name that may be shown: `env:OLD_SECRET`."""

    @property
    def ends_at(self) -> datetime:
        """Moment at which it ends. Raises ConfigError for what is no date."""
        return read_until(self.until)


def read_until(value: object) -> datetime:
    """Return the moment that ends a secret: the end of a date in UTC, or the moment itself. Raises ConfigError."""
    try:
        read = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(value, str) and len(value) <= 10 and isinstance(read, datetime):
            read = read.date()
        if isinstance(read, datetime):
            return (read if read.tzinfo else read.replace(tzinfo=UTC)).astimezone(UTC)
        if isinstance(read, date):
            return datetime(read.year, read.month, read.day, tzinfo=UTC) + timedelta(days=1)
    except (ValueError, OverflowError):
        pass
    raise ConfigError("until must be a date or a moment; write for example until = 2026-12-01")


def reveal_text(value: str | Secret) -> str:
    """Return a text, or the text that a reference leads to. Raises ConfigError where that is not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return value.reveal().decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{value.name} is not UTF-8 text") from None


def _read_variable(env: Environment, variable: str) -> bytes:
    if variable not in env:
        raise ConfigError(f"environment variable {variable} is not set")
    # the bytes as the operating system gave them
    return env[variable].encode("utf-8", "surrogateescape")


def _read_credential(env: Environment, name: str) -> bytes:
    folder = env.get("CREDENTIALS_DIRECTORY")
    if not folder:
        raise ConfigError(f'credential "{name}" cannot be read: CREDENTIALS_DIRECTORY is not set (systemd sets it)')
    return _read_path(Path(folder) / name, f'credential "{name}"')


def _read_path(path: Path, shown: str) -> bytes:
    try:
        with path.open("rb") as file:
            value = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a usable path"
        raise ConfigError(f"{shown} cannot be read: {reason}") from None
    if len(value) > _LARGEST:
        raise ConfigError(f"{shown} is larger than 64 KiB; that is no secret")
    return value.rstrip(b"\r\n")


def read_secret(value: object, setting: str, *, env: Mapping[str, str], base: Path, may_end: bool = False) -> Secret:
    """Return the secret that a setting refers to. Raises ConfigError, which never repeats the setting.

    `may_end`: it may have an `until`.
    """
    if isinstance(value, Secret):
        return value
    if may_end and isinstance(value, dict) and "until" in value:
        reference = {key: one for key, one in value.items() if key != "until"}
        until = read_until(value["until"])
        return replace(read_secret(reference, setting, env=env, base=base), until=until)
    if isinstance(value, str):
        raise ConfigError(f"must be a reference and never the secret itself; write {REFERENCE_FORMS}")
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError(f"must be one reference; write {REFERENCE_FORMS}")
    kind, reference = next(iter(value.items()))
    if not isinstance(reference, str) or not reference:
        raise ConfigError(f"must name where the secret is kept; write {REFERENCE_FORMS}")
    # text that cannot be a name may be the secret itself, so it is not repeated
    if kind == "env":
        if not _VARIABLE.fullmatch(reference):
            raise ConfigError("env must be the name of an environment variable: letters, digits and underscores")
        return Secret.from_env(reference, setting, env)
    if kind == "file":
        return Secret.from_file(reference, setting, base)
    if kind == "credential":
        if not _CREDENTIAL.fullmatch(reference) or reference in (".", ".."):
            raise ConfigError("credential must be a plain name: letters, digits, dots, dashes and underscores")
        return Secret.from_credential(reference, setting, env)
    # only the known word is told, because a kind that is none may be the secret itself
    near = nearest(kind, ("env", "file", "credential"))
    raise ConfigError(f"must be a reference; write {REFERENCE_FORMS}" + (f'; did you mean "{near}"?' if near else ""))


# -- how hard one is to guess ------------------------------------------------------------------

SHORTEST_TOKEN: Final = 16
"""Least number of characters of a token or password for API and dashboard."""
SHORTEST_SECRET: Final = 8
"""Least number of bytes of a secret that verifies requests. A shorter one can be guessed from one signed request, and
is not masked in stored bodies, because it could be any word or number."""
_DIGITS: Final = re.compile(rb"(?:oht_)?[0-9a-f]{32,}")


def new_token() -> str:
    """Return a fresh bearer token of 256 random bits, with a prefix that scanners for leaked secrets find."""
    return f"oht_{clock.random_bytes(32).hex()}"


def is_random(token: bytes) -> bool:
    """Tell whether a token is plainly random, with 128 bits or more of hexadecimal digits."""
    return _DIGITS.fullmatch(token) is not None and not weakness(token, 32)


def weakness(value: bytes, shortest: int) -> str:
    """Return why a secret is guessable, as the end of a sentence; empty for one that is not.

    A repetition ("abcabcabc") counts as its part, a run ("aaaa", "1234") as its beginning, and the rest must be varied.
    Text made of words passes: this finds what was never meant to be a secret.
    """
    if len(value) < shortest:
        return f"is shorter than {shortest} characters"
    part = _part(value)
    does_repeat = 2 * len(part) <= len(value)
    if does_repeat and len(part) < shortest:
        return "repeats itself"
    steps = [after - before for before, after in pairwise(part)]
    runs = {n + 2: one for n, (one, next_) in enumerate(pairwise(steps)) if one == next_ and one in _RUNS}
    # Two bits per required character; random hexadecimal digits have three and more.
    if _bits(byte for n, byte in enumerate(part) if n not in runs) >= 2 * shortest:
        return ""
    if does_repeat:
        return "repeats itself"
    is_varied = _bits(part) >= 2 * shortest
    return _RUNS[Counter(runs.values()).most_common(1)[0][0]] if is_varied else "has few different characters"


_RUNS: Final = {-1: "counts down", 0: "repeats itself", 1: "counts up"}


def _bits(characters: Iterable[int]) -> float:
    """Return the information in these characters, by how often each of them comes."""
    counts = Counter(characters)
    return sum(count * math.log2(counts.total() / count) for count in counts.values())


def _part(value: bytes) -> bytes:
    """Return the shortest part that a text repeats, also if it ends inside a repetition; mostly the whole text."""
    return next(value[:n] for n in range(1, len(value) + 1) if (value[:n] * (len(value) // n + 1)).startswith(value))


T = TypeVar("T", str, str | None)

MASKED: Final = b"[redacted]"
_NUMBER: Final = re.compile(rb"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# Each pattern begins with plain text, which is found a hundred times faster than a group.
_ESCAPES: Final = re.compile(rb"\\u[0-9a-fA-F]{4}(?:\\u[0-9a-fA-F]{4})*")
_ASCII_ESCAPES: Final = re.compile(rb"\\u00[0-7][0-9a-fA-F](?:\\u00[0-7][0-9a-fA-F])*")
_PERCENTS: Final = re.compile(rb"%[0-9a-fA-F]{2}(?:%[0-9a-fA-F]{2})*")
_SHORT: Final = {'"': b'"', "\\": b"\\", "/": b"/", "\b": b"b", "\f": b"f", "\n": b"n", "\r": b"r", "\t": b"t"}


_SHORT_PAIRS: Final = [(b"\\" + escaped, character.encode()) for character, escaped in _SHORT.items()]
_SHORT_ESCAPED: Final = re.compile(b"[" + re.escape("".join(_SHORT).encode()) + b"]")


class Masking(msgspec.Struct, frozen=True, gc=False):
    """Replacement of secrets in bytes by `[redacted]`, or by nines where it could be a number, so that JSON stays
    valid. Tuples of texts, because every account may have one: the garbage collector need not look at them."""

    _needles: tuple[tuple[bytes, bytes], ...] = ()
    _texts: tuple[tuple[str, str], ...] = ()
    _spelled: re.Pattern[bytes] = _ASCII_ESCAPES
    _short: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def of(cls, secrets: Iterable[bytes]) -> Masking:
        """Build the masking of these secrets. Shorter ones than SHORTEST_SECRET are left alone."""
        found = {secret.strip() for secret in secrets}
        # The longest first: one secret may be part of another.
        ordered = sorted((secret for secret in found if len(secret) >= SHORTEST_SECRET), key=len, reverse=True)
        needles = tuple([(needle, _stand_in(needle)) for needle in ordered])
        texts = tuple([(needle.decode("utf-8", "surrogateescape"), to.decode()) for needle, to in needles])
        joined = b"".join(ordered)
        is_short = _SHORT_ESCAPED.search(joined) is not None
        short = tuple([pair for pair in _SHORT_PAIRS if pair[1] in joined]) if is_short else ()
        return cls(needles, texts, _ASCII_ESCAPES if joined.isascii() else _ESCAPES, short)

    def __bool__(self) -> bool:
        return bool(self._needles)

    def __call__(self, data: bytes) -> bytes:
        """Return the bytes without the secrets: the very same object where none was found."""
        if not self._needles:
            return data
        for needle, stand_in in self._needles:
            if needle in data:
                data = data.replace(needle, stand_in)
        if b"\\" in data:
            data = self._replace_spelled(data, self._unescape(data))
        if b"%" in data:
            data = self._replace_spelled(data, _PERCENTS.sub(_unquote, data.replace(b"+", b" ")))
        return data

    def text(self, text: T) -> T:
        """Return text that was read from an arrival without the secrets; None stays None."""
        if text is not None:
            for needle, stand_in in self._texts:
                if needle in text:
                    text = text.replace(needle, stand_in)
        return text

    def _replace_spelled(self, data: bytes, plain: bytes) -> bytes:
        """Search by pattern only where the unescaped text contains the secret: a pattern is a hundred times slower."""
        for needle, stand_in in self._needles:
            if needle in plain:
                data = _any_spelling(needle).sub(stand_in, data)
        return data

    def _unescape(self, data: bytes) -> bytes:
        """Undo JSON's escapes, and more than those: the result only tells where to search closely."""
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


@lru_cache(maxsize=256)
def _any_spelling(secret: bytes) -> re.Pattern[bytes]:
    """Compile a pattern for this secret in which every character may be escaped as in JSON or in a form.

    Compiled where it is needed, which is hardly ever: it takes a millisecond, and there may be a secret per account.
    """
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
    """Build a pattern for hexadecimal digits in either case."""
    return b"".join(b"[%c%c]" % (d, d - 32) if d > 96 else b"%c" % d for d in digits)
