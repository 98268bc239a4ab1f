"""The one query language: the same text in the API, the CLI and the dashboard.

`parse` turns `source:stripe status:dead body.amount:>1000 since:2h refund` into a `Filter`; `write_query` writes a
query whose relative times have become fixed ones, for plans and for commands to copy. `WORDS` is the table of words:
errors, completion, help and the reference read it. User text reaches a database as a parameter only (S36).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from oncehook.errors import QueryInvalid
from oncehook.human import moment, nearest, show_moment
from oncehook.model import SIGNS, Category, Clause, DeliveryId, DeliveryStatus, EventId, Filter, IdT, ReplayId
from oncehook.payload import MAX_DEPTH

LONGEST: Final = 32_768
"""Characters of a query at most; some 800 ids fit."""

MOST_CLAUSES: Final = 10
"""Conditions on the body in one query: each is looked up in every body."""

BODY: Final = "body."
"""The start of a word that names a place in the body."""

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
_WITHOUT_VALUE: Final = re.compile(rf"(?:{_PLACE}|[A-Za-z_.]+):")


def parse(text: str, now: datetime) -> Filter:
    """Return the filter that a query means at this moment. Raises QueryInvalid.

    >>> parse("source:stripe status:dead", now).source
    'stripe'
    """
    check_text(text, "The query", LONGEST)
    found: dict[str, Any] = {}
    ids: list[bytes] = []
    clauses: list[Clause] = []
    texts: list[str] = []
    for word, value, is_quoted in _split(text):
        if word is not None and word.startswith(BODY):
            clauses.append(_read_clause(word, value, is_quoted))
        elif word is None and (is_quoted or not _ID.fullmatch(value)):
            texts.append(value)
        else:
            word = word or ("replay" if value.startswith(ReplayId.prefix) else "id")
            for field, wanted in _read(word, value, now).items():
                if field == "ids":
                    ids += wanted
                elif found.setdefault(field, wanted) != wanted:
                    raise QueryInvalid(
                        f"{word}: is given twice, with different values.", hint="A query means all its words."
                    )
    if len(clauses) > MOST_CLAUSES:
        raise QueryInvalid(f"A query asks for {MOST_CLAUSES} places in the body at most.")
    if ids:
        found["ids"] = tuple(dict.fromkeys(ids))
    if clauses:
        found["body"] = tuple(dict.fromkeys(clauses))
    if texts:
        found["text"] = " ".join(texts)
    return Filter(**found)


def check_text(text: str, what: str, longest: int) -> None:
    """Refuse text that is too long or that a database cannot store."""
    if len(text) > longest:
        raise QueryInvalid(f"{what} is longer than {longest} characters.")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise QueryInvalid(f"{what} has a character in it that is none.")


def _split(text: str) -> Iterator[tuple[str | None, str, bool]]:
    """Yield each word, its value, and whether the value was quoted."""
    at, end = 0, len(text.rstrip())
    while at < end:
        part = _PART.match(text, at)
        if part is None:
            raise _unreadable(text[at:].strip())
        at = part.end()
        value = part["quoted"]
        if value is None and part["word"] is None and _WITHOUT_VALUE.fullmatch(part["bare"]):
            raise _unreadable(part["bare"])
        yield part["word"], part["bare"] if value is None else _ESCAPED.sub(r"\1", value), value is not None


def _unreadable(rest: str) -> QueryInvalid:
    start = rest.split()[0]
    if start.endswith(":"):
        return QueryInvalid(f"{start} has no value.", hint=f'Write for example {start}value, or {start}"two words".')
    return QueryInvalid(f"The query cannot be read from {start[:40]!r} on.", hint='Does a quote (") not end?')


def _read(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    if word not in WORDS:
        near = nearest(word, WORDS)
        hint = f'Did you mean "{near}:"?' if near else f"There are: {', '.join(WORDS)} and {BODY}…"
        raise QueryInvalid(
            f'"{word}:" is no word of a query.', hint=f'{hint} Text with a colon is searched for in quotes, as "a:b".'
        )
    if not value:
        raise QueryInvalid(f"{word}: has no value.")
    return WORDS[word].read(word, value, now)


def _read_clause(word: str, value: str, is_quoted: bool) -> Clause:
    """Read `body.a.b:>10`. A quoted sign is text."""
    path = tuple(map(_unquote_step, _STEPS.findall(word))) if _PLACES.fullmatch(word) else ()
    sign = "" if is_quoted else next((one for one in SIGNS if value.startswith(one)), "")
    clause = Clause(path, sign or "=", value.removeprefix(sign))
    if not 0 < len(path) <= MAX_DEPTH:
        raise QueryInvalid(f"{word[:60]}: leads nowhere.", hint="Write for example body.data.items.0.price:>10.")
    if not clause.value:
        raise QueryInvalid(f"{word[:60]}: has no value.")
    if clause.sign != "=" and clause.number is None:
        raise QueryInvalid(
            f"{word[:60]}:{value[:40]} compares with what is no number.",
            hint=f'Write {word[:60]}:{sign}10; text that begins with {sign} is looked for in quotes, as "{sign}a".',
        )
    return clause


def _unquote_step(step: str) -> str:
    return _ESCAPED.sub(r"\1", step[1:-1]) if step.startswith('"') else step


# -- words -------------------------------------------------------------------------------------


Reader = Callable[[str, str, datetime], Mapping[str, Any]]
"""A function from a word, its value and the current time to fields of a Filter."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the language."""

    read: Reader
    example: str
    about: str
    """The meaning, for help and reference, with code in backticks."""
    values: Sequence[str] = ()
    """Values that completion offers; those of sources and destinations are known at run time only."""


def _text(field: str, example: str, about: str) -> Word:
    return Word(lambda word, value, now: {field: value}, example, about)


def _choice(field: str, kind: type[StrEnum] | Sequence[str], example: str, about: str) -> Word:
    choices = [str(one) for one in kind]

    def read(word: str, value: str, now: datetime) -> Mapping[str, Any]:
        if value not in choices:
            near = nearest(value, choices)
            hint = f'Did you mean "{word}:{near}"?' if near else f"There are: {', '.join(choices)}."
            raise QueryInvalid(f'"{value[:40]}" is no {word}.', hint=hint)
        return {field: kind(value) if isinstance(kind, type) else value}

    return Word(read, example, f"{about}: {', '.join(choices)}", choices)


def _time(field: str, example: str, about: str) -> Word:
    times = ("15m", "1h", "2h", "24h", "7d")
    return Word(lambda word, value, now: {field: moment(value, now)}, example, about, times)


def _id(field: str, kind: type[IdT], about: str) -> Word:
    return Word(lambda word, value, now: {field: _known_id(kind, word, value)}, f"{kind.prefix}…", about)


def _known_id(kind: type[IdT], word: str, value: str) -> IdT:
    try:
        return kind.parse(value)
    except ValueError:
        raise QueryInvalid(
            f"{word}:{value[:40]} is no id.", hint=f"It begins with {kind.prefix} and has 32 digits."
        ) from None


def _read_attempts(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    match = _COUNT.fullmatch(value)
    if match is None:
        raise QueryInvalid(f"{word}:{value[:40]} is no number.", hint=f"Write {word}:3, {word}:>3 or {word}:<3.")
    sign, number = match[1] or "=", int(match[2])
    above = {"attempts_above": number if sign == ">" else number - 1}
    below = {"attempts_below": number if sign == "<" else number + 1}
    return {**(above if sign in (">", ">=", "=") else {}), **(below if sign in ("<", "<=", "=") else {})}


def _read_code(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    if not _CODE.fullmatch(value):
        raise QueryInvalid(f"{word}:{value[:40]} is no status code.", hint=f"Write {word}:503, or {word}:5xx.")
    return {"code": value.lower()}


def _read_is(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    _IS.read(word, value, now)
    return {"is_replayed": True}


def _read_delivery_id(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    """Read `id:`, which may be repeated and means any of them; an event's id is accepted, too."""
    if value.startswith(EventId.prefix):
        return {"event_id": _known_id(EventId, word, value)}
    return {"ids": [_known_id(DeliveryId, word, value)]}


_IS: Final = _choice("is_replayed", ("replayed",), "replayed", "run again")
_CODES: Final = ("4xx", "5xx", "404", "429", "500", "502", "503")

WORDS: Final[Mapping[str, Word]] = {
    "source": _text("source", "stripe", "the source"),
    "type": _text("type", "invoice.*", "the type, with `*` and `?`"),
    "status": _choice("status", DeliveryStatus, "dead", "status of the delivery"),
    "subject": _text("subject", "cus_42", "the subject, exactly"),
    "key": _text("key", "evt_1", "the key, exactly"),
    "destination": _text("destination", "crm", "the destination"),
    "to": _text("destination", "crm", "short for `destination:`"),
    "attempts": Word(_read_attempts, ">3", "attempts of its run; also `<3`, `>=3`, `<=3`, `3`", (">1", ">3", ">5")),
    "code": Word(_read_code, "5xx", "status code of the last attempt; also `503`", _CODES),
    "category": _choice("category", Category, "transient", "of the last attempt"),
    "note": _choice("note", ("stale", "coalesced", "erased"), "stale", "of the delivery"),
    "is": Word(_read_is, "replayed", "a replay has run it again", _IS.values),
    "replay": _id("replay_id", ReplayId, "deliveries of this replay"),
    "event": _id("event_id", EventId, "deliveries of this event"),
    "id": Word(_read_delivery_id, "dlv_…", "this delivery; may be repeated; a bare id is enough"),
    "since": _time("since", "2h", "received since: so long ago, or an ISO time (UTC)"),
    "until": _time("until", "2026-11-16T10:00Z", "received before: so long ago, or an ISO time (UTC)"),
}
"""Every word of a query but those of the body (BODY)."""


# -- and back ----------------------------------------------------------------------------------


def write_query(filter: Filter) -> str:
    """Write the filter as a query with fixed times. `parse` reads it back."""
    if filter.ids is not None and not filter.ids:
        raise ValueError("a filter of no ids means nothing; as a query it would mean everything")
    return " ".join(part for name in filter.__struct_fields__ for part in _write(filter, name))


def _write(filter: Filter, field: str) -> Iterator[str]:
    value = getattr(filter, field)
    exactly = filter.attempts_above is not None and filter.attempts_below == filter.attempts_above + 2
    if value is None or field == "sources":
        return
    if field == "ids":
        yield from (f"id:{one}" for one in value)
    elif field == "body":
        yield from map(_write_clause, value)
    elif field == "attempts_above":
        yield f"attempts:{'' if exactly else '>='}{value + 1}"
    elif field == "attempts_below":
        if not exactly:
            yield f"attempts:<{value}"
    elif field == "is_replayed":
        yield "is:replayed"
    elif field in ("event_id", "replay_id"):
        yield f"{field.removesuffix('_id')}:{value}"
    elif field == "text":
        yield value if _is_plain_text(value) else _in_quotes(value)
    else:
        yield f"{field}:{show_moment(value) if isinstance(value, datetime) else quote_value(value)}"


def _write_clause(clause: Clause) -> str:
    place = ".".join(step if _PLAIN_STEP.fullmatch(step) else _in_quotes(step) for step in clause.path)
    if clause.sign != "=":
        return f"{BODY}{place}:{clause.sign}{clause.value}"
    return f"{BODY}{place}:{_in_quotes(clause.value) if clause.value.startswith(SIGNS) else quote_value(clause.value)}"


def _is_plain_text(value: str) -> bool:
    words = value.split(" ")
    return all(_PLAIN.fullmatch(word) and ":" not in word and not _ID.fullmatch(word) for word in words)


def quote_value(value: str) -> str:
    """Return a value as a query takes it, in quotes where it must be."""
    return value if _PLAIN.fullmatch(value) else _in_quotes(value)


def _in_quotes(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
