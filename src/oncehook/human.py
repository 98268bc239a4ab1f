"""Durations, sizes, rates, moments and counts: read as people write them, and shown to people.

`seconds("1h30m")` and other nouns read a value, `show_…` prints one. Text that cannot be read raises an error that
lists the forms. No other module parses or prints such values, makes plurals, or suggests the nearest word.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from oncehook.errors import ConfigError, QueryInvalid

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
_AGO: Final = re.compile(r"[0-9.]+[a-z]")

DURATION_FORMS: Final = 'write for example "500ms", "0.2s", "15s", "5m", "1h30m", "30d" or "1w"'
SIZE_FORMS: Final = 'write for example "64kB", "1MB", "1MiB" or "4MiB", or a number of bytes'
RATE_FORMS: Final = 'write for example "50/s", "100/m" or "1000/h"'

LONGEST: Final = 36_525 * 86_400
"""A hundred years: beyond that a moment in time no longer fits the databases' own types."""

LARGEST: Final = 1 << 40
"""A tebibyte: more than anything that is kept in memory or in a row."""


def seconds(text: str | float) -> float:
    """Read a duration. Text needs its units, largest first; a number is seconds already.

    >>> seconds("1h30m")
    5400.0
    """
    value = _sum_units(text) if isinstance(text, str) else _number(text, "duration", DURATION_FORMS)
    if value > LONGEST:
        raise ConfigError(f"{text!r} is longer than 100 years; {DURATION_FORMS}")
    return value


def _sum_units(text: str) -> float:
    parts = _PART.findall(text) if _DURATION.fullmatch(text) else []
    names = [name for _, name in parts]
    if not parts or names != [name for name in _SECONDS if name in names]:
        raise ConfigError(f"{text!r} is not a duration; {DURATION_FORMS}")
    return float(sum(Decimal(number) * _SECONDS[name] for number, name in parts))


def size(text: str | int) -> int:
    """Read a number of bytes. `kB` and `MB` count in thousands, `KiB` and `MiB` in 1024s; case does not matter.

    >>> size("4MiB")
    4194304
    """
    if not isinstance(text, str):
        exact = Decimal(_number(text, "size", SIZE_FORMS))
    elif (match := _SIZE.fullmatch(text)) and (unit := match[2].lower()) in _BYTES:
        exact = Decimal(match[1]) * _BYTES[unit]
    else:
        raise ConfigError(f"{text!r} is not a size; {SIZE_FORMS}")
    if exact != int(exact):
        raise ConfigError(f"{text!r} is not a whole number of bytes; {SIZE_FORMS}")
    if exact > LARGEST:
        raise ConfigError(f"{text!r} is more than 1 TiB; {SIZE_FORMS}")
    return int(exact)


def rate(text: str) -> float:
    """Read a rate per second.

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


def moment(text: str, now: datetime) -> datetime:
    """Read a moment: a duration counts back from now (`2h`), anything else is an ISO time, in UTC by default."""
    try:
        if _AGO.match(text):
            return now - timedelta(seconds=seconds(text))
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ConfigError, ValueError, OverflowError):
        raise QueryInvalid(
            f"{text!r} is no moment.", hint='Write a duration such as "2h", or a time such as "2026-11-16T10:00Z".'
        ) from None


def _number(value: object, kind: str, forms: str) -> float:
    # bool is an int to Python, and `timeout = true` is not one second
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{value!r} is not a {kind}; {forms}")
    return float(value)


# -- shown to people ---------------------------------------------------------------------------


def show_duration(duration: float) -> str:
    """Print a duration exactly, in days at most: `5m`, `1h 30m`, `200ms`. `seconds` reads it back.

    >>> show_duration(5400)
    '1h 30m'
    """
    if math.isinf(duration):
        return "no limit"
    if duration < 0:
        return "-" + show_duration(-duration)
    if 0 < duration < 1:
        return f"{round(duration * 1000, 3):g}ms"
    left = round(duration, 3)
    parts = []
    for name in ("d", "h", "m"):
        whole, left = divmod(left, float(_SECONDS[name]))
        if whole:
            parts.append(f"{whole:.0f}{name}")
    if round(left, 3) or not parts:
        parts.append(f"{round(left, 3):g}s")
    return " ".join(parts)


def show_span(duration: float) -> str:
    """Print about how long something is, in one unit: `8 s`, `1.5 h`, `3 days`."""
    for name, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if duration >= length * (2 if name == "days" else 1):
            return f"{round(duration / length, 0 if name == 'days' else 1):g} {name}"
    return f"{round(duration, 1):g} s"


def show_elapsed(duration: float) -> str:
    """Print how long something took: `84 ms`, `1.2 s`, `3.5 min`."""
    return f"{max(duration, 0) * 1000:.0f} ms" if duration < 1 else show_span(duration)


def show_size(size: int) -> str:
    """Print a number of bytes exactly: `4MiB`, `64kB`, `1500B`. `size` reads it back."""
    for name in ("GiB", "MiB", "KiB", "GB", "MB", "kB"):
        factor = _BYTES[name.lower()]
        if size and size % factor == 0:
            return f"{size // factor}{name}"
    return f"{size}B"


def show_rate(rate: float) -> str:
    """Print a rate per second in the unit that makes it readable: `20/s`, `1.5/m`. `rate` reads it back."""
    units = (("s", 1), ("m", 60), ("h", 3600), ("d", 86_400))
    unit, length = next((unit for unit in units if rate * unit[1] >= 1), units[-1])
    return f"{round(rate * length, 3):.3f}".rstrip("0").rstrip(".") + f"/{unit}"


def show_moment(at: datetime, precision: str = "auto") -> str:
    """Print a moment in UTC as queries take it; `precision` is that of `isoformat`."""
    return at.astimezone(UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def show_ago(at: datetime, now: datetime) -> str:
    """Print how long ago a moment was: `7 s ago`, `4 min ago`, `2 d ago`."""
    seconds = (now - at).total_seconds()
    if seconds < 1:
        return "now"
    for unit, length, till in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 172_800)):
        if seconds < till:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds // 86_400:.0f} d ago"


def show_id(id: str) -> str:
    """Shorten an id to the digits that tell it from others: `evt_…3a5d2c`, `dlv_…3a5d2c-1`. Commands take it back.

    All ids but those of attempts end in six digits that are zero; a delivery's are the number of its destination.
    """
    kind, _, digits = id.partition("_")
    if len(digits) != 32 or kind == "att":
        return id
    number = digits[26:].lstrip("0")
    return f"{kind}_…{digits[20:26]}{'-' if number else ''}{number}"


def replay_state(state: str, planned: int, dead: int, skipped: int) -> str:
    """Return a replay's state as it is shown: `done` only where nothing failed, otherwise `failed` or `partly`."""
    if state != "done" or not dead:
        return state
    return "failed" if dead + skipped == planned else "partly"


def count(number: int, noun: str) -> str:
    """Print a number of things: `1 delivery`, `1,204 deliveries`."""
    return f"{number:,} {noun if number == 1 else _plural(noun)}"


def show_streak(failures: int) -> str:
    """Print what a breaker counts: different deliveries that failed since the last success."""
    return f"{count(failures, 'delivery')} failed" + (" in a row" if failures > 1 else "")


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


# -- settings ----------------------------------------------------------------------------------


def show_setting(name: str, value: Any) -> str:
    """Print a setting as a line of TOML."""
    return f"{show_key(name)} = {_show_toml(value)}"


def _show_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(show_setting(name, one) for name, one in value.items() if one is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_show_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def show_key(name: str) -> str:
    """Print the name of a setting or table as TOML."""
    return name if _BARE_KEY.fullmatch(name) else _show_toml(name)


_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


# -- did you mean ------------------------------------------------------------------------------


def nearest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Return the known word that was probably meant, or None."""
    from difflib import get_close_matches  # imported here, because only a typo needs it

    return next(iter(get_close_matches(word, list(known), n=1, cutoff=alike)), None)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown word: the nearest known one, or else all of them."""
    names = list(known)
    if near := nearest(word, names):
        return f'Did you mean "{near}"?'
    return f"There are: {', '.join(names)}." if names else ""


def suggest_clause(word: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown word."""
    if near := nearest(word, known):
        return f'did you mean "{near}"?'
    return f"allowed: {', '.join(known)}" if known else "none is defined yet"
