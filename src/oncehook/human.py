"""Durations, sizes and rates as people write them, and back again.

Words come in from configuration, command line and decorators; plain numbers go out. Whatever cannot be read
raises ConfigError with the forms that can. Nothing else in the package parses such a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from difflib import get_close_matches
from typing import Final

from oncehook.errors import ConfigError

_SECONDS: Final = {
    "w": Decimal(604_800),
    "d": Decimal(86_400),
    "h": Decimal(3_600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
}
_BYTES: Final = {
    "b": 1,
    "kb": 1_000,
    "mb": 1_000_000,
    "gb": 1_000_000_000,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}

# [0-9] and not \d, which also takes the digits of other scripts
_NUMBER: Final = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_DURATION: Final = re.compile(rf"(?:{_NUMBER}(?:ms|[wdhms])\s*)+")
_PART: Final = re.compile(rf"({_NUMBER})(ms|[wdhms])")
_SIZE: Final = re.compile(rf"({_NUMBER})\s*([kmg]?i?b)", re.IGNORECASE)
_RATE: Final = re.compile(rf"({_NUMBER})/(s|m|h|d)")

DURATION_FORMS: Final = 'write for example "500ms", "0.2s", "15s", "5m", "1h30m", "30d" or "1w"'
SIZE_FORMS: Final = 'write for example "64kB", "1MB", "1MiB" or "4MiB", or a number of bytes'
RATE_FORMS: Final = 'write for example "50/s", "100/m" or "1000/h"'

LONGEST: Final = 36_525 * 86_400
"""A hundred years: beyond that a moment in time no longer fits the databases' own types."""


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str:
    """Return the known word that was probably meant, or nothing."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=alike)), "")


def suggest(word: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about a word that is not known."""
    if near := nearest(word, known):
        return f'did you mean "{near}"?'
    return f"allowed: {', '.join(known)}" if known else "there is none"


def seconds(text: str | float) -> float:
    """A duration in seconds. Text needs its units, largest first; a number is seconds already.

    >>> seconds("1h30m")
    5400.0
    """
    value = _spoken_seconds(text) if isinstance(text, str) else _number(text, "duration", DURATION_FORMS)
    if value > LONGEST:
        raise ConfigError(f"{text!r} is longer than 100 years; {DURATION_FORMS}")
    return value


def _spoken_seconds(text: str) -> float:
    parts = _PART.findall(text) if _DURATION.fullmatch(text) else []
    names = [name for _, name in parts]
    if not parts or names != [name for name in _SECONDS if name in names]:
        raise ConfigError(f"{text!r} is not a duration; {DURATION_FORMS}")
    return float(sum(Decimal(number) * _SECONDS[name] for number, name in parts))


def size(text: str | int) -> int:
    """A number of bytes. `kB` and `MB` count in thousands, `KiB` and `MiB` in 1024s; case does not matter.

    >>> size("4MiB")
    4194304
    """
    if not isinstance(text, str):
        value = _number(text, "size", SIZE_FORMS)
        exact = Decimal(value)
    elif match := _SIZE.fullmatch(text):
        factor = _BYTES.get(match[2].lower())
        if factor is None:
            raise ConfigError(f"{text!r} is not a size; {SIZE_FORMS}")
        exact = Decimal(match[1]) * factor
    else:
        raise ConfigError(f"{text!r} is not a size; {SIZE_FORMS}")
    if exact != int(exact):
        raise ConfigError(f"{text!r} is not a whole number of bytes; {SIZE_FORMS}")
    return int(exact)


def rate(text: str) -> float:
    """How often per second.

    >>> rate("30/m")
    0.5
    """
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{text!r} is not a rate; {RATE_FORMS}")
    value = float(Decimal(match[1]) / _SECONDS[match[2]])
    if value <= 0:
        raise ConfigError(f"{text!r} would let nothing through; {RATE_FORMS}")
    return value


def _number(value: object, kind: str, forms: str) -> float:
    # bool is an int to Python, and `timeout = true` is not one second
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{value!r} is not a {kind}; {forms}")
    return float(value)


def words(duration: float) -> str:
    """A duration for people, in days at most: `5m`, `1h 30m`, `200ms`. `seconds` reads it back.

    >>> words(5400)
    '1h 30m'
    """
    if math.isinf(duration):
        return "no limit"
    if duration < 0:
        return "-" + words(-duration)
    if 0 < duration < 1:
        return f"{round(duration * 1000, 3):g}ms"
    left = round(duration, 3)
    said = []
    for name in ("d", "h", "m"):
        count, left = divmod(left, float(_SECONDS[name]))
        if count:
            said.append(f"{count:.0f}{name}")
    if round(left, 3) or not said:
        said.append(f"{round(left, 3):g}s")
    return " ".join(said)


def bytes_words(count: int) -> str:
    """A size for people, where it comes out even: `4MiB`, `64kB`, `1500B`. `size` reads it back."""
    for name in ("GiB", "MiB", "KiB", "GB", "MB", "kB"):
        factor = _BYTES[name.lower()]
        if count and count % factor == 0:
            return f"{count // factor}{name}"
    return f"{count}B"
