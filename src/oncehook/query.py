"""The one query language: the same text in the API, the CLI and the dashboard.

`parse` turns `source:stripe status:dead body.amount:>1000 since:2h refund` into a `Filter`; `write_query` writes a
query whose relative times have become fixed ones, for plans and for commands to copy. `WORDS` is the table of words:
errors, completion, help and the reference read it. User text reaches a database as a parameter only (S36).

All words must hold; `OR` joins groups of words, `-` negates a word, and parentheses group. A query becomes a list of
alternatives without parentheses, of which there are few: each is a search of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from msgspec.structs import replace

from oncehook.errors import QueryInvalid
from oncehook.human import moment, nearest, show_moment
from oncehook.model import (
    SIGNS,
    Category,
    Clause,
    DeliveryId,
    DeliveryStatus,
    EventId,
    Filter,
    IdT,
    Outcome,
    ReplayId,
)
from oncehook.payload import MAX_DEPTH

LONGEST: Final = 32_768
"""Characters of a query at most; some 800 ids fit."""

MOST_CLAUSES: Final = 10
"""Conditions on the body in one alternative: each is looked up in every body."""

MOST_ALTERNATIVES: Final = 8
"""Alternatives that a query may become: each is searched for by itself."""

MOST_EXCLUDED: Final = 20
"""Negated words of one alternative: each is compared with every row."""

MOST_NESTED: Final = 10
"""Parentheses that may be open at once."""

BODY: Final = "body."
"""The start of a word that names a place in the body."""

_STEP: Final = r'(?:"(?:[^"\\]|\\.)*+"|[^\s".:\\]++)'
_PLACE: Final = rf"body(?:\.{_STEP})++"
_PART: Final = re.compile(
    rf"(?P<sign>-(?=[^\s-]))?(?:(?P<word>{_PLACE}|[A-Za-z_.]+):)?"
    r'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s"]+))'
)
_SPACE: Final = re.compile(r"\s*")
_PLACES: Final = re.compile(_PLACE)
_STEPS: Final = re.compile(rf"\.({_STEP})")
_PLAIN_STEP: Final = re.compile(r'[^\s".:\\]+')
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_PLAIN: Final = re.compile(r"(?!-)[^\s\"\\()]+")
_RESERVED: Final = frozenset({"OR", "AND", "NOT"})
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
    found = tuple(dict.fromkeys(_Reader(text, now).read()))
    return found[0] if len(found) == 1 else Filter(either=found)


def narrow(meant: Filter, by: Filter) -> Filter:
    """Return a filter for what matches both. Raises QueryInvalid where they contradict each other."""
    found = _combine([by], meant.alternatives())
    return found[0] if len(found) == 1 else Filter(either=tuple(found))


class _Reader:
    """Reader of one query: alternatives are lists of filters, of which one must hold."""

    def __init__(self, text: str, now: datetime) -> None:
        self._text = text.rstrip()
        self._now = now
        self._at = 0
        self._depth = 0

    def read(self) -> list[Filter]:
        found = self._alternatives()
        if self._at < len(self._text):
            raise QueryInvalid("A parenthesis closes that was never opened.", hint='Text with one is quoted: ")".')
        return found

    def _alternatives(self) -> list[Filter]:
        """Read groups of words with OR between them, up to the end or a closing parenthesis."""
        found: list[Filter] = []
        while True:
            found += self._group()
            _check_alternatives(found)
            if not self._skip("OR"):
                return found

    def _group(self) -> list[Filter]:
        """Read words that must all hold."""
        found, words = [Filter()], _Words(self._now)
        is_empty = True
        while not self._ends():
            is_empty = False
            if self._skip("AND"):
                continue
            if self._text.startswith("-(", self._at):
                raise QueryInvalid("A group in parentheses cannot be negated.", hint="Negate each of its words.")
            if self._text[self._at] == "(":
                found = _combine(found, self._parentheses())
            else:
                alternatives = words.add(*self._part())
                if alternatives:
                    found = _combine(found, alternatives)
        if is_empty and (self._depth or self._at < len(self._text) or self._after_or()):
            raise QueryInvalid(
                "OR and parentheses need a word on each side.", hint='Text like them is quoted: "OR", "()".'
            )
        return _combine([words.filter()], found)

    def _parentheses(self) -> list[Filter]:
        self._at += 1
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise QueryInvalid("The query has too many parentheses inside each other.")
        found = self._alternatives()
        if not self._text.startswith(")", self._at):
            raise QueryInvalid("A parenthesis does not close.", hint='Text with one is quoted: "(a".')
        self._at += 1
        self._depth -= 1
        return found

    def _after_or(self) -> bool:
        return re.search(r"(?:^|[\s(])OR$", self._text) is not None

    def _ends(self) -> bool:
        """Tell whether the group ends here: at the end, a closing parenthesis, or OR."""
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
        rest = self._text[self._at : self._at + 3]
        return not rest or (self._depth > 0 and rest[0] == ")") or rest.rstrip() == "OR" or rest in ("OR(", "OR)")

    def _skip(self, word: str) -> bool:
        end = self._at + len(word)
        if not self._text.startswith(word, self._at) or self._text[end : end + 1].strip(" \t\r\n()"):
            return False
        self._at = end
        return True

    def _part(self) -> tuple[bool, str | None, str, bool]:
        """Read one word: whether it is negated, its name, its value, and whether that was quoted."""
        part = _PART.match(self._text, self._at)
        if part is None:
            raise _unreadable(self._text[self._at :])
        end, value, bare = part.end(), part["quoted"], part["bare"]
        if bare is not None and self._depth:
            # A closing parenthesis that the value has not opened ends the group.
            closing = min(len(bare) - len(bare.rstrip(")")), max(bare.count(")") - bare.count("("), 0))
            bare, end = bare[: len(bare) - closing], end - closing
        after = self._text[end : end + 1]
        if after.strip() and not (self._depth and after == ")"):
            raise _unreadable(self._text[self._at :])
        self._at = end
        if value is not None:
            return part["sign"] is not None, part["word"], _ESCAPED.sub(r"\1", value), True
        if not bare or (part["word"] is None and _WITHOUT_VALUE.fullmatch(bare)):
            raise _unreadable(part[0])
        if part["word"] is None and bare == "NOT":
            raise QueryInvalid("NOT is written as a minus.", hint='Write -status:done. The text is quoted: "NOT".')
        return part["sign"] is not None, part["word"], bare, False


class _Words:
    """The words of one group, which must all hold."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self._found: dict[str, Any] = {}
        self._ids: list[DeliveryId] = []
        self._clauses: list[Clause] = []
        self._texts: list[str] = []
        self._without: list[Filter] = []

    def add(self, is_negated: bool, word: str | None, value: str, is_quoted: bool) -> list[Filter]:
        """Add a word. Return the alternatives that it means, where one filter cannot say it; otherwise nothing."""
        if word is not None and word.startswith(BODY):
            self._clauses.append(_read_clause(word, value, is_quoted, is_negated))
        elif word is None and (is_quoted or not _ID.fullmatch(value)):
            if is_negated:
                self._without.append(Filter(text=value))
            else:
                self._texts.append(value)
        else:
            word = word or ("replay" if value.startswith(ReplayId.prefix) else "id")
            fields = _read(word, value, self._now)
            if not is_negated:
                self._add_fields(word, fields)
            elif "left_of" in fields:
                raise QueryInvalid("`left:` cannot be negated.", hint="`replay:` finds what a replay has begun.")
            elif any(field in _OPPOSITE for field in fields):
                opposites = [_negate(field, wanted) for field, wanted in fields.items()]
                if len(opposites) > 1:
                    return [Filter(**one) for one in opposites]
                self._add_fields(word, opposites[0])
            else:
                self._without.append(Filter(**fields))
        return []

    def _add_fields(self, word: str, fields: Mapping[str, Any]) -> None:
        for field, wanted in fields.items():
            if field == "ids":
                self._ids += wanted
            elif self._found.setdefault(field, wanted) != wanted:
                raise QueryInvalid(
                    f"{word}: is given twice, with different values.",
                    hint=f"A query means all its words. Either of them: {word}:a OR {word}:b.",
                )

    def filter(self) -> Filter:
        if len(self._clauses) > MOST_CLAUSES:
            raise QueryInvalid(f"A query asks for {MOST_CLAUSES} places in the body at most.")
        if len(self._without) > MOST_EXCLUDED:
            raise QueryInvalid(f"A query excludes {MOST_EXCLUDED} words at most.")
        if self._ids:
            self._found["ids"] = tuple(dict.fromkeys(self._ids))
        if self._clauses:
            self._found["body"] = tuple(dict.fromkeys(self._clauses))
        if self._texts:
            self._found["text"] = " ".join(self._texts)
        if self._without:
            self._found["without"] = tuple(dict.fromkeys(self._without))
        return Filter(**self._found)


_OPPOSITE: Final = {
    "since": "until",
    "until": "since",
    "attempts_above": "attempts_below",
    "attempts_below": "attempts_above",
    "arrivals_above": "arrivals_below",
    "arrivals_below": "arrivals_above",
}


def _negate(field: str, value: Any) -> dict[str, Any]:
    """Return the opposite of a bound: not above 3 is below 4."""
    if isinstance(value, datetime):
        return {_OPPOSITE[field]: value}
    return {_OPPOSITE[field]: value + 1 if field.endswith("above") else value - 1}


def _combine(some: Sequence[Filter], others: Sequence[Filter]) -> list[Filter]:
    """Return the alternatives that mean one of each list. Raises QueryInvalid where none of them is possible."""
    made = [each for one in some for each in replace(one, either=tuple(others)).alternatives() if each.ids != ()]
    if not made:
        raise QueryInvalid(
            "The words of the query contradict each other: one is given twice, with different values.",
            hint="A query means all its words; OR means either.",
        )
    _check_alternatives(made)
    return made


def _check_alternatives(found: Sequence[Filter]) -> None:
    if len(found) > MOST_ALTERNATIVES:
        raise QueryInvalid(
            f"The query has more than {MOST_ALTERNATIVES} alternatives.",
            hint="OR inside several parentheses multiplies; ask for fewer at once.",
        )


def with_words(query: str, words: str) -> str:
    """Return the text of a query, narrowed by these words."""
    return f"({query}) {words}" if re.search(r"\bOR\b", query) else f"{query} {words}".strip()


def check_text(text: str, what: str, longest: int) -> None:
    """Refuse text that is too long or that a database cannot store."""
    if len(text) > longest:
        raise QueryInvalid(f"{what} is longer than {longest} characters.")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise QueryInvalid(f"{what} has a character in it that is none.")


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


def _read_clause(word: str, value: str, is_quoted: bool, is_negated: bool) -> Clause:
    """Read `body.a.b:>10`. A quoted sign is text."""
    path = tuple(map(_unquote_step, _STEPS.findall(word))) if _PLACES.fullmatch(word) else ()
    sign = "" if is_quoted else next((one for one in SIGNS if value.startswith(one)), "")
    clause = Clause(path, sign or "=", value.removeprefix(sign), is_negated)
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
        return {field: kind(value) if isinstance(kind, type) else kind[choices.index(value)]}

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


def _count(example: str, about: str) -> Word:
    return Word(_read_count, example, f"{about}; also `<3`, `>=3`, `<=3`, `3`", (">1", ">3", ">5"))


def _read_count(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    match = _COUNT.fullmatch(value)
    if match is None:
        raise QueryInvalid(f"{word}:{value[:40]} is no number.", hint=f"Write {word}:3, {word}:>3 or {word}:<3.")
    sign, number = match[1] or "=", int(match[2])
    above = {f"{word}_above": number if sign == ">" else number - 1}
    below = {f"{word}_below": number if sign == "<" else number + 1}
    return {**(above if sign in (">", ">=", "=") else {}), **(below if sign in ("<", "<=", "=") else {})}


def _read_code(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    if not _CODE.fullmatch(value):
        raise QueryInvalid(f"{word}:{value[:40]} is no status code.", hint=f"Write {word}:503, or {word}:5xx.")
    return {"code": value.lower()}


def _read_is(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    _IS.read(word, value, now)
    return {"is_replayed": True}


def _read_outcome(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    if value == Outcome.rejected:
        raise QueryInvalid(
            "A rejected arrival makes no event.",
            hint="Rejected arrivals have a list of their own: oncehook rejected, or GET rejections.",
        )
    if value == Outcome.accepted:
        raise QueryInvalid("Every event was accepted once.", hint="What never came again: arrivals:1.")
    return _choice("outcome", _OUTCOMES, "", "").read(word, value, now)


def _read_delivery_id(word: str, value: str, now: datetime) -> Mapping[str, Any]:
    """Read `id:`, which may be repeated and means any of them; an event's id is accepted, too."""
    if value.startswith(EventId.prefix):
        return {"event_id": _known_id(EventId, word, value)}
    return {"ids": (_known_id(DeliveryId, word, value),)}


_OUTCOMES: Final = (Outcome.duplicate, Outcome.conflict)
_IS: Final = _choice("is_replayed", ("replayed",), "replayed", "run again")
_CODES: Final = ("4xx", "5xx", "404", "429", "500", "502", "503")

WORDS: Final[Mapping[str, Word]] = {
    "source": _text("source", "stripe", "the source"),
    "type": _text("type", "invoice.*", "the type, with `*` and `?`"),
    "status": _choice("status", DeliveryStatus, "dead", "status of the delivery"),
    "subject": _text("subject", "cus_42", "the subject, exactly"),
    "account": _text("account", "42", "the account, by its id"),
    "key": _text("key", "evt_1", "the key, exactly"),
    "destination": _text("destination", "crm", "the destination"),
    "to": _text("destination", "crm", "short for `destination:`"),
    "attempts": _count(">3", "attempts of its run"),
    "code": Word(_read_code, "5xx", "status code of the last attempt; also `503`", _CODES),
    "category": _choice("category", Category, "transient", "of the last attempt"),
    "note": _choice("note", ("stale", "coalesced", "erased"), "stale", "of the delivery"),
    "arrivals": _count(">1", "how often the event came"),
    "outcome": Word(_read_outcome, "conflict", f"it came again, as a {' or a '.join(_OUTCOMES)}", _OUTCOMES),
    "is": Word(_read_is, "replayed", "a replay has run it again", _IS.values),
    "replay": _id("replay_id", ReplayId, "deliveries of this replay"),
    "left": _id("left_of", ReplayId, "deliveries that this replay has not begun; the rest of an aborted one"),
    "event": _id("event_id", EventId, "deliveries of this event"),
    "id": Word(_read_delivery_id, "dlv_…", "this delivery; may be repeated; a bare id is enough"),
    "since": _time("since", "2h", "received since: so long ago, or an ISO time (UTC)"),
    "until": _time("until", "2026-11-16T10:00Z", "received before: so long ago, or an ISO time (UTC)"),
}
"""Every word of a query but those of the body (BODY)."""


JOINING: Final[Mapping[str, str]] = {
    "-status:done": "not this: a `-` before any word, or before text",
    "status:dead OR status:pending": "either; words beside each other bind tighter than `OR`",
    "(to:crm OR to:mail) since:1h": "parentheses group",
}
"""Ways to join words, with their meaning."""


# -- and back ----------------------------------------------------------------------------------


def write_query(filter: Filter) -> str:
    """Write the filter as a query with fixed times. `parse` reads it back."""
    alternatives = filter.alternatives()
    if not alternatives or any(one.ids is not None and not one.ids for one in alternatives):
        raise ValueError("a filter of no ids means nothing; as a query it would mean everything")
    return " OR ".join(map(_write_alternative, alternatives))


def _write_alternative(filter: Filter) -> str:
    return " ".join(part for name in filter.__struct_fields__ for part in _write(filter, name))


def _write(filter: Filter, field: str) -> Iterator[str]:
    value = getattr(filter, field)
    if value is None or field in ("sources", "accounts", "destinations"):
        return
    if field == "ids":
        yield from (f"id:{one}" for one in value)
    elif field == "body":
        yield from map(_write_clause, value)
    elif field == "without":
        for one in value:
            yield f"-{_write_alternative(one) if one.text is None or _is_one_word(one.text) else _in_quotes(one.text)}"
    elif field.endswith(("_above", "_below")):
        yield from _write_count(filter, field)
    elif field == "is_replayed":
        yield "is:replayed"
    elif field == "left_of":
        yield f"left:{value}"
    elif field in ("event_id", "replay_id"):
        yield f"{field.removesuffix('_id')}:{value}"
    elif field == "text":
        yield value if _is_plain_text(value) else _in_quotes(value)
    else:
        yield f"{field}:{show_moment(value) if isinstance(value, datetime) else quote_value(value)}"


def _write_count(filter: Filter, field: str) -> Iterator[str]:
    word = field.rpartition("_")[0]
    above, below = getattr(filter, f"{word}_above"), getattr(filter, f"{word}_below")
    exactly = above is not None and below == above + 2
    if field.endswith("above"):
        yield f"{word}:{'' if exactly else '>='}{above + 1}"
    elif not exactly:
        yield f"{word}:<{below}"


def _write_clause(clause: Clause) -> str:
    if clause.negated:
        return "-" + _write_clause(replace(clause, negated=False))
    place = ".".join(step if _PLAIN_STEP.fullmatch(step) else _in_quotes(step) for step in clause.path)
    if clause.sign != "=":
        return f"{BODY}{place}:{clause.sign}{clause.value}"
    return f"{BODY}{place}:{_in_quotes(clause.value) if clause.value.startswith(SIGNS) else quote_value(clause.value)}"


def _is_one_word(value: str) -> bool:
    return " " not in value and _is_plain_text(value)


def _is_plain_text(value: str) -> bool:
    words = value.split(" ")
    return all(
        _PLAIN.fullmatch(word) and ":" not in word and not _ID.fullmatch(word) and word not in _RESERVED
        for word in words
    )


def quote_value(value: str) -> str:
    """Return a value as a query takes it, in quotes where it must be."""
    return value if _PLAIN.fullmatch(value) else _in_quotes(value)


def _in_quotes(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
