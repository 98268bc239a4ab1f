"""The one query language: the same text in API, command line and dashboard.

`parse` turns `source:stripe status:dead body.amount:>1000 since:2h refund` into a `Filter`; `fixed` writes one back as
text in which "two hours ago" has become a moment, for plans and for commands to copy. What cannot be read raises
QueryInvalid, naming the word that was probably meant. No text reaches a database but as a parameter (S36).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Final, TypeVar

from oncehook.errors import ConfigError, QueryInvalid
from oncehook.human import seconds
from oncehook.model import SIGNS, Category, Clause, DeliveryId, DeliveryStatus, EventId, Filter, IdT, ReplayId
from oncehook.payload import MAX_DEPTH

LONGEST: Final = 32_768
"""Characters of a query at most; some 800 ids fit."""

MOST_CLAUSES: Final = 10
"""Places in the body that a query may ask for at once: each is looked up in every body."""

NOTES: Final = ("stale", "coalesced", "erased")

IS: Final = ("replayed",)
"""What a delivery may be asked to be."""

BODY: Final = "body."
"""What a word begins with that names a place in the body."""

_STEP: Final = r'(?:"(?:[^"\\]|\\.)*+"|[^\s".:\\]++)'
_PLACE: Final = rf"body(?:\.{_STEP})++"
_PART: Final = re.compile(
    rf"\s*(?:(?P<word>{_PLACE}|[A-Za-z_.]+):)?"
    r'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s"]+))(?=\s|$)'
)
_PLACES: Final = re.compile(_PLACE)
_STEPS: Final = re.compile(rf"\.({_STEP})")
_PLAIN_STEP: Final = re.compile(r'[^\s".:\\]+')
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_PLAIN: Final = re.compile(r"[^\s\"\\]+")
_COUNT: Final = re.compile(r"(>=|<=|>|<|=)?([0-9]{1,9})")
_CODE: Final = re.compile(r"[1-9](?:[0-9]{2}|xx)", re.IGNORECASE)
_ID: Final = re.compile(r"(?:evt|dlv|rpl)_[0-9a-fA-F-]{32,36}")
_DURATION: Final = re.compile(r"[0-9.]+[a-z]")
_UNSAID: Final = re.compile(rf"(?:{_PLACE}|[A-Za-z_.]+):")

Word = TypeVar("Word", bound=StrEnum)


@dataclass(slots=True)
class _Reading:
    """A query that is being read."""

    now: datetime
    found: dict[str, Any] = field(default_factory=dict)
    ids: list[bytes] = field(default_factory=list)
    clauses: list[Clause] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def put(self, name: str, value: object, word: str) -> None:
        if name in self.found and self.found[name] != value:
            raise QueryInvalid(f"{word}: is given twice, with different values.", hint="A query means all its words.")
        self.found[name] = value


def parse(text: str, now: datetime) -> Filter:
    """The filter that a query means at this moment. Raises QueryInvalid.

    >>> parse("source:stripe status:dead", now).source
    'stripe'
    """
    check_text(text, "The query", LONGEST)
    reading = _Reading(now)
    for word, value, quoted in _parts(text):
        if word is not None and word.startswith(BODY):
            _read_clause(reading, word, value, quoted)
        elif word is not None:
            _read(reading, word, value)
        elif not quoted and _ID.fullmatch(value):
            _read_any_id(reading, value)
        else:
            reading.texts.append(value)
    if reading.ids:
        reading.found["ids"] = tuple(dict.fromkeys(reading.ids))
    if reading.clauses:
        reading.found["body"] = tuple(dict.fromkeys(reading.clauses))
    if reading.texts:
        reading.found["text"] = " ".join(reading.texts)
    return Filter(**reading.found)


def moment(text: str, now: datetime) -> datetime:
    """A moment in UTC: a duration means so long ago (`2h`), everything else is an ISO time, in UTC unless it says."""
    try:
        if _DURATION.match(text):
            return now - timedelta(seconds=seconds(text))
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ConfigError, ValueError, OverflowError):
        raise QueryInvalid(
            f"{text!r} is no moment.", hint='Write a duration such as "2h", or a time such as "2026-11-16T10:00Z".'
        ) from None


def check_text(text: str, what: str, longest: int) -> None:
    """Refuse text that no database would take, or that is too long to be meant."""
    if len(text) > longest:
        raise QueryInvalid(f"{what} is longer than {longest} characters.")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise QueryInvalid(f"{what} has a character in it that is none.")


def _parts(text: str) -> Iterator[tuple[str | None, str, bool]]:
    """Word, value and whether that stood in quotes."""
    at, end = 0, len(text.rstrip())
    while at < end:
        part = _PART.match(text, at)
        if part is None:
            raise _unreadable(text[at:].strip())
        at = part.end()
        quoted = part["quoted"]
        if quoted is None and part["word"] is None and _UNSAID.fullmatch(part["bare"]):
            raise _unreadable(part["bare"])
        yield part["word"], part["bare"] if quoted is None else _ESCAPED.sub(r"\1", quoted), quoted is not None


def _unreadable(rest: str) -> QueryInvalid:
    start = rest.split()[0]
    if start.endswith(":"):
        return QueryInvalid(f"{start} has no value.", hint=f'Write for example {start}value, or {start}"two words".')
    return QueryInvalid(f"The query cannot be read from {start[:40]!r} on.", hint='Does a quote (") not end?')


def _read(reading: _Reading, word: str, value: str) -> None:
    read = _READERS.get(word)
    if read is None:
        near = get_close_matches(word, _READERS, 1)
        hint = f'Did you mean "{near[0]}:"?' if near else f"There are: {', '.join(WORDS)} and {BODY}…"
        raise QueryInvalid(
            f'"{word}:" is no word of a query.', hint=f'{hint} Text with a colon is searched for in quotes, as "a:b".'
        )
    if not value:
        raise QueryInvalid(f"{word}: has no value.")
    read(reading, word, value)


# -- one reader for each kind of word ----------------------------------------------------------


Reader = Callable[[_Reading, str, str], None]


def _text(name: str) -> Reader:
    def read(reading: _Reading, word: str, value: str) -> None:
        reading.put(name, value, word)

    return read


def _choice(name: str, choices: Sequence[str], made: Callable[[str], object] = str) -> Reader:
    def read(reading: _Reading, word: str, value: str) -> None:
        if value not in choices:
            near = get_close_matches(value, choices, 1)
            hint = f'Did you mean "{word}:{near[0]}"?' if near else f"There are: {', '.join(choices)}."
            raise QueryInvalid(f'"{value[:40]}" is no {word}.', hint=hint)
        reading.put(name, made(value), word)

    return read


def _moment(name: str) -> Reader:
    def read(reading: _Reading, word: str, value: str) -> None:
        reading.put(name, moment(value, reading.now), word)

    return read


def _count(reading: _Reading, word: str, value: str) -> None:
    match = _COUNT.fullmatch(value)
    if match is None:
        raise QueryInvalid(f"{word}:{value[:40]} is no number.", hint=f"Write {word}:3, {word}:>3 or {word}:<3.")
    sign, number = match[1] or "=", int(match[2])
    if sign in (">", ">=", "="):
        reading.put("attempts_above", number if sign == ">" else number - 1, word)
    if sign in ("<", "<=", "="):
        reading.put("attempts_below", number if sign == "<" else number + 1, word)


def _code(reading: _Reading, word: str, value: str) -> None:
    if not _CODE.fullmatch(value):
        raise QueryInvalid(f"{word}:{value[:40]} is no status code.", hint=f"Write {word}:503, or {word}:5xx.")
    reading.put("code", value.lower(), word)


def _id(name: str, kind: type[IdT]) -> Reader:
    def read(reading: _Reading, word: str, value: str) -> None:
        reading.put(name, _known_id(kind, word, value), word)

    return read


def _delivery(reading: _Reading, word: str, value: str) -> None:
    """`id:` may be repeated, and means any of them; an event's id is understood too."""
    if value.startswith(EventId.prefix):
        reading.put("event_id", _known_id(EventId, word, value), word)
    else:
        reading.ids.append(_known_id(DeliveryId, word, value))


def _read_any_id(reading: _Reading, value: str) -> None:
    _read(reading, "replay" if value.startswith(ReplayId.prefix) else "id", value)


def _known_id(kind: type[IdT], word: str, value: str) -> IdT:
    try:
        return kind.parse(value)
    except ValueError:
        raise QueryInvalid(
            f"{word}:{value[:40]} is no id.", hint=f"It begins with {kind.prefix} and has 32 digits."
        ) from None


def _read_clause(reading: _Reading, word: str, value: str, quoted: bool) -> None:
    """`body.a.b:` may be repeated, and means all of them. What stands in quotes is no sign."""
    steps = tuple(map(_unquoted, _STEPS.findall(word))) if _PLACES.fullmatch(word) else ()
    sign = "" if quoted else next((one for one in SIGNS if value.startswith(one)), "")
    clause = Clause(steps, sign or "=", value.removeprefix(sign))
    if not 0 < len(steps) <= MAX_DEPTH:
        raise QueryInvalid(f"{word[:60]}: leads nowhere.", hint="Write for example body.data.items.0.price:>10.")
    if not clause.value:
        raise QueryInvalid(f"{word[:60]}: has no value.")
    if clause.sign != "=" and clause.number is None:
        raise QueryInvalid(
            f"{word[:60]}:{value[:40]} compares with what is no number.",
            hint=f'Write {word[:60]}:{sign}10; text that begins with {sign} is looked for in quotes, as "{sign}a".',
        )
    reading.clauses.append(clause)
    if len(reading.clauses) > MOST_CLAUSES:
        raise QueryInvalid(f"A query asks for {MOST_CLAUSES} places in the body at most.")


def _unquoted(step: str) -> str:
    return _ESCAPED.sub(r"\1", step[1:-1]) if step.startswith('"') else step


_READERS: Final[Mapping[str, Reader]] = {
    "source": _text("source"),
    "type": _text("type"),
    "status": _choice("status", list(DeliveryStatus), DeliveryStatus),
    "subject": _text("subject"),
    "key": _text("key"),
    "destination": _text("destination"),
    "to": _text("destination"),
    "attempts": _count,
    "code": _code,
    "category": _choice("category", list(Category), Category),
    "note": _choice("note", NOTES),
    "is": _choice("is_replayed", IS, lambda said: said == "replayed"),
    "replay": _id("replay_id", ReplayId),
    "event": _id("event_id", EventId),
    "id": _delivery,
    "since": _moment("since"),
    "until": _moment("until"),
}
WORDS: Final = tuple(_READERS)
"""Every word of a query but those of the body (BODY), for completion and for documents."""


# -- and back ----------------------------------------------------------------------------------


def fixed(filter: Filter) -> str:
    """The filter as a query that means the same at any time. `parse` reads it back."""
    if filter.ids is not None and not filter.ids:
        raise ValueError("a filter of no ids means nothing; as a query it would mean everything")
    said = [text for entry in fields(filter) for text in _said(filter, entry.name)]
    return " ".join(said)


def _said(filter: Filter, name: str) -> Iterator[str]:
    value = getattr(filter, name)
    if value is None or name in ("attempts_below", "sources"):
        if name == "attempts_below" and value is not None and filter.attempts_above is None:
            yield f"attempts:<{value}"
        return
    if name == "ids":
        yield from (f"id:{one}" for one in value)
    elif name == "body":
        yield from map(_said_clause, value)
    elif name == "attempts_above":
        yield from _said_attempts(value, filter.attempts_below)
    elif name == "is_replayed":
        yield "is:replayed"
    elif name == "event_id":
        yield f"event:{value}"
    elif name == "replay_id":
        yield f"replay:{value}"
    elif name == "text":
        yield value if _is_plain_text(value) else _quoted(value)
    elif isinstance(value, datetime):
        yield f"{name}:{show_moment(value)}"
    else:
        yield f"{name}:{quoted(value)}"


def _said_attempts(above: int, below: int | None) -> Iterator[str]:
    if below == above + 2:
        yield f"attempts:{above + 1}"
        return
    yield f"attempts:>={above + 1}"
    if below is not None:
        yield f"attempts:<{below}"


def _said_clause(clause: Clause) -> str:
    place = ".".join(step if _PLAIN_STEP.fullmatch(step) else _quoted(step) for step in clause.path)
    if clause.sign != "=":
        return f"{BODY}{place}:{clause.sign}{clause.value}"
    return f"{BODY}{place}:{_quoted(clause.value) if clause.value.startswith(SIGNS) else quoted(clause.value)}"


def _is_plain_text(value: str) -> bool:
    words = value.split(" ")
    return all(_PLAIN.fullmatch(word) and ":" not in word and not _ID.fullmatch(word) for word in words)


def quoted(value: str) -> str:
    """A value as it stands in a query, in quotes where it must be."""
    return value if _PLAIN.fullmatch(value) else _quoted(value)


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def show_moment(at: datetime) -> str:
    """A moment as people write it: no shorter than it is, no longer than it must be."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
