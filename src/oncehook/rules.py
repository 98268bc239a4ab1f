"""The rule language: the places of key, subject, type, time and rank in an arrival.

A rule is a place (`header:Name`, `query:name`, `form:field`, `literal:text`, or a JSONPath that begins with `$`), or a
list of places of which the first one present counts. A place that is itself a list is a composite: all of its parts
must be present, except those that begin with `?`. `Rules` compiles a source's rules once, at start, and reads each
arrival into a `Reading`. A missing value is None, never an error: the source's policy decides what happens then.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

import msgspec

from oncehook.errors import ConfigError
from oncehook.human import nearest
from oncehook.logs import ration
from oncehook.model import Arrival, Headers
from oncehook.payload import (
    MISSING,
    OverBudget,
    Parse,
    Path,
    Unreadable,
    parse,
    parse_form,
    parser_of,
    text_of,
    walk,
)

log = logging.getLogger("oncehook.receive")

JSON: Final = (b"content-type", b"application/json")
JSON_UTF8: Final = (b"content-type", b"application/json; charset=utf-8")
FORM: Final = "application/x-www-form-urlencoded"


def header(headers: Headers, name: bytes) -> str | None:
    """Return a header by its name in lower case; None when it is absent, empty, or repeated with different values.

    Quotes around the value, as in the Idempotency-Key draft, are removed.
    """
    values = {value.strip() for key, value in headers if key == name}
    return _header_text(name, values.pop()) if len(values) == 1 else None


def _header_text(name: bytes, value: bytes) -> str | None:
    text = value.strip().decode("latin-1")
    if name == b"idempotency-key" and len(text) > 1 and text[0] == text[-1] == '"':
        text = re.sub(r'\\(["\\])', r"\1", text[1:-1])
    return text or None


class RuleContext:
    """An arrival as rules see it; each part is parsed on first use.

    A rule written in Python is called with one and returns the value, a tuple of parts, or None. Without such rules,
    `parse` may build only the members of the body that the others need.
    """

    __slots__ = ("_data", "_form", "_head", "_loaded", "_parse", "_query", "arrival", "body", "memo", "unparsed")

    def __init__(self, arrival: Arrival, body: bytes, data: Any = MISSING, parse: Parse = parse) -> None:
        self.arrival = arrival
        self.body = body
        """The bytes of the event: the arrival's own, or those of one part of it."""
        self.unparsed = False
        """True where JSON was needed and the body could not be read, or not within a path's budget."""
        self.memo: Any = None
        """Values that one rule of a preset has read, for its other rules: all get the same context."""
        self._data = data
        self._parse = parse
        self._loaded = data is not MISSING
        self._head: dict[bytes, bytes] | None = None
        self._form: dict[str, list[str]] | None = None
        self._query: dict[str, list[str]] | None = None

    @property
    def data(self) -> Any:
        """Parsed JSON body; None when it cannot be read, or is a form."""
        if not self._loaded:
            self._load()
        return None if self._data is MISSING else self._data

    @property
    def media_type(self) -> str | None:
        """Content type without its parameters."""
        text = self.find_header(b"content-type")
        return None if text is None else text.partition(";")[0].strip().lower()

    def header(self, name: str) -> str | None:
        """Return a header; None when it is absent, empty, or repeated with different values."""
        return self.find_header(name.lower().encode("latin-1", "replace"))

    def find_header(self, name: bytes) -> str | None:
        if self._head is None:
            self._head = dict(self.arrival.headers)
        value = self._head.get(name)
        if value is None:
            return None
        if len(self._head) != len(self.arrival.headers):
            return header(self.arrival.headers, name)
        return _header_text(name, value)

    def query(self, name: str) -> str | None:
        """Return a query parameter; None when it is absent, empty, or repeated with different values."""
        if self._query is None:
            self._query = _fields_of(self.arrival.query)
        return _single(self._query, name)

    def form(self, name: str) -> str | None:
        """Return a field of an urlencoded body; None as with `query`, and for every other content type."""
        if self._form is None:
            self._form = _fields_of(self.arrival.body) if self.media_type in (FORM, None) else {}
        return _single(self._form, name)

    def find(self, path: Path) -> Any:
        """Return the first value at a path in the body, or MISSING."""
        if not self._loaded:
            self._load()
        if path.location is not None or self._data is MISSING:
            return walk(self._data, path.location or ())
        try:
            return path.first(self._data)
        except OverBudget:
            self.unparsed = True
            fields = {"source": self.arrival.source, "path": path.text}
            ration.log(log, logging.WARNING, "rule.over_budget", fields, kind=f"{self.arrival.source}: {path.text}")
            return MISSING

    def _load(self) -> None:
        self._loaded = True
        if self._is_opaque():
            return
        try:
            self._data = self._parse(self.body)
        except Unreadable:
            self.unparsed = True

    def _is_opaque(self) -> bool:
        """Tell whether the body is a form or an upload, in which no JSON is looked for (S13).

        A body that begins like JSON is JSON, whatever its content type: `curl -d '{…}'` calls it a form, and somebody
        who relays a captured request could call it an upload, to hide its key.
        """
        # the common case, without parsing the header
        if JSON in self.arrival.headers or JSON_UTF8 in self.arrival.headers:
            return False
        media_type = self.media_type or ""
        is_called_opaque = media_type == FORM or media_type.startswith("multipart/")
        return is_called_opaque and self.body.lstrip()[:1] not in (b"{", b"[")


def _fields_of(text: bytes) -> dict[str, list[str]]:
    try:
        return parse_form(text)
    except Unreadable:
        return {}


def _single(fields: Mapping[str, list[str]], name: str) -> str | None:
    values = fields.get(name, [])
    return values[0] or None if values and values.count(values[0]) == len(values) else None


DEFAULT_KEY: Final = [
    "header:Idempotency-Key",
    "$.idempotency_key",
    "$.messageId",
    "$.data.idempotency_key",
    "$.data.messageId",
]
DEFAULT_TYPE: Final = ["$.type", "$.event"]

ALLOWED: Final = (
    "A place is header:Name, query:name, form:field, literal:text, or a JSONPath such as $.data.id; "
    "a list tries several places in order, and a list inside it joins its parts."
)

Parts = tuple[str, ...]


# -- places ------------------------------------------------------------------------------------


class _Named(msgspec.Struct, frozen=True):
    """A header, a query parameter, or a field of a form."""

    find: Callable[[RuleContext, Any], str | None]
    name: str | bytes

    def read(self, context: RuleContext) -> str | None:
        return self.find(context, self.name)


class _Literal(msgspec.Struct, frozen=True):
    text: str

    def read(self, context: RuleContext) -> str | None:
        return self.text


class _Json(msgspec.Struct, frozen=True):
    path: Path

    def read(self, context: RuleContext) -> str | None:
        value = context.find(self.path)
        return value or None if type(value) is str else text_of(value)  # fast path: most values are texts


_Simple = _Named | _Literal | _Json


class _Composite(msgspec.Struct, frozen=True):
    parts: Sequence[_Simple]
    optional: Sequence[bool]

    def read(self, context: RuleContext) -> Parts | None:
        found = []
        # Literals and absent parts alone would give all arrivals the same value, so they do not count.
        counts = self.is_constant
        for part, optional in zip(self.parts, self.optional, strict=True):
            text = part.read(context)
            if text is None and not optional:
                return None
            counts = counts or (text is not None and not isinstance(part, _Literal))
            found.append(text or "")
        return tuple(found) if counts else None

    @property
    def is_constant(self) -> bool:
        return all(isinstance(part, _Literal) for part in self.parts)


_BARE: Final = re.compile(r"[A-Za-z_][\w.\[\]-]*", re.ASCII)
"""A path that lacks its beginning."""
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def _parse_place(text: object) -> _Simple:
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is not a place.", hint=ALLOWED)
    if text.startswith("$"):
        return _Json(Path(text))
    prefix, _, name = text.partition(":")
    if prefix == "header" and _TOKEN.fullmatch(name):
        return _Named(RuleContext.find_header, name.lower().encode())
    if prefix == "query" and name:
        return _Named(RuleContext.query, name)
    if prefix == "form" and name:
        return _Named(RuleContext.form, name)
    if prefix == "literal" and name:
        return _Literal(name)
    if text.startswith("?"):
        raise ConfigError(f'The place "{text}" cannot be optional: only a part of a composite can.', hint=ALLOWED)
    if prefix in ("header", "query", "form", "literal"):
        raise ConfigError(f'The place "{text}" does not name what to look for after "{prefix}:".', hint=ALLOWED)
    wrong = f'The place "{text}" is of no known kind.' if ":" in text else f'"{text}" is not a valid path.'
    raise ConfigError(wrong, hint=_suggest_place(text))


def _suggest_place(text: str) -> str:
    prefix, colon, name = text.partition(":")
    if colon:
        near = nearest(prefix, ("header", "query", "form", "literal"))
        return f'Did you mean "{near}:{name}"?' if near and name else ALLOWED
    return f'Did you mean "$.{text}"?' if _BARE.fullmatch(text) else ALLOWED


def _parse_composite(parts: Sequence[object]) -> _Composite:
    if not parts:
        raise ConfigError("A composite of no parts can never be found.", hint=ALLOWED)
    nested = next((part for part in parts if isinstance(part, list | tuple)), None)
    if nested is not None:
        raise ConfigError(
            f"The composite {list(nested)!r} stands inside another one; one level is enough.", hint=ALLOWED
        )
    optional = [isinstance(part, str) and part.startswith("?") for part in parts]
    return _Composite(
        [_parse_place(part.removeprefix("?") if isinstance(part, str) else part) for part in parts], optional
    )


# -- rules -------------------------------------------------------------------------------------


class Rule:
    """Places of one value, tried in order; for a rank, also the order of its words."""

    __slots__ = ("order", "places")

    def __init__(self, places: Sequence[_Simple | _Composite], order: Mapping[str, int] | None = None) -> None:
        self.places = places
        self.order = order

    @classmethod
    def parse(cls, spec: object) -> Rule:
        """Compile a rule as written in the settings. Raises ConfigError that names the wrong place."""
        if isinstance(spec, Mapping):
            return cls._parse_order(spec)
        places = spec if isinstance(spec, list | tuple) else [spec]
        if not places:
            raise ConfigError("A rule needs at least one place to look at.", hint=ALLOWED)
        return cls(
            [_parse_composite(place) if isinstance(place, list | tuple) else _parse_place(place) for place in places]
        )

    @classmethod
    def _parse_order(cls, table: Mapping[str, object]) -> Rule:
        words = table.get("order")
        if set(table) != {"of", "order"} or not isinstance(words, list | tuple) or not words:
            raise ConfigError(
                f"{dict(table)!r} is not a rank.",
                hint='Write rank = "$.version", or rank = { of = "$.status", order = ["sent", "delivered", "read"] }.',
            )
        return cls(cls.parse(table["of"]).places, {str(word): number for number, word in enumerate(words)})

    @property
    def paths(self) -> list[Path]:
        """JSONPaths it may look at."""
        parts = [part for place in self.places for part in (place.parts if isinstance(place, _Composite) else [place])]
        return [part.path for part in parts if isinstance(part, _Json)]

    @property
    def constant(self) -> bool:
        """True where some place gives the same value for every arrival."""
        return any(isinstance(place, _Literal) or getattr(place, "is_constant", False) for place in self.places)

    def read(self, context: RuleContext) -> Parts | None:
        """Return the parts at the first place that is present: one, or those of a composite."""
        for place in self.places:
            found = place.read(context)
            if found is not None:
                return (found,) if isinstance(found, str) else found
        return None


Reader = Callable[[RuleContext], str | Parts | None]
Spec = str | Sequence[str | Sequence[str]] | Mapping[str, object] | Reader | None
"""A rule as people write it: places, or a function of the context."""

# Raised by a Python rule that reads what is not there.
_ABSENT: Final = (LookupError, TypeError, AttributeError, ValueError)


class PythonRule(msgspec.Struct, frozen=True):
    """A rule written in Python. Where it fails on an arrival's shape, the value is missing."""

    reader: Reader

    def read(self, context: RuleContext) -> Parts | None:
        try:
            found = self.reader(context)
            parts = tuple(text_of(part) or "" for part in (found if isinstance(found, tuple) else (found,)))
        except _ABSENT:
            return None
        # A lone surrogate cannot be hashed or stored; its escape can.
        return tuple(part.encode("utf-8", "backslashreplace").decode() for part in parts) if any(parts) else None


class Reading(msgspec.Struct, gc=False):
    """Values read from one arrival, or from one part of it."""

    key: Parts | None
    subject: str | None
    type: str | None
    event_at: datetime | None
    rank: int | None
    rank_scope: str | None
    unparsed: bool
    account: str | None = None
    """The value that names its account: an id or an alias."""


class Rules:
    """Rules of one source, compiled together."""

    __slots__ = ("_account", "_event_time", "_key", "_order", "_parse", "_rank", "_rank_scope", "_subject", "_type")

    def __init__(
        self,
        *,
        key: Spec = None,
        subject: Spec = None,
        type: Spec = None,
        event_time: Spec = None,
        rank: Spec = None,
        rank_scope: Spec = None,
        account: Spec = None,
    ) -> None:
        """Raises ConfigError when a rule is wrong, or a key would make all arrivals the same event."""
        self._key = compile_rule("key", key)
        self._subject = compile_rule("subject", subject)
        self._type = compile_rule("type", type)
        self._event_time = compile_rule("event_time", event_time)
        self._rank = compile_rule("rank", rank)
        self._rank_scope = compile_rule("rank_scope", rank_scope)
        self._account = compile_rule("account", account)
        self._order = self._rank.order if isinstance(self._rank, Rule) else None
        read = (self._key, self._subject, self._type, self._event_time, self._rank, self._rank_scope, self._account)
        self._parse = _parser(read)

    def read(self, arrival: Arrival) -> Reading:
        """Read a whole arrival. No bytes make it raise; only a bug in a rule written in Python can."""
        return self._read(RuleContext(arrival, arrival.body, parse=self._parse))

    def read_data(self, arrival: Arrival, data: Any, body: bytes) -> Reading:
        """Read one part of a batch, already parsed; headers and query are those of the arrival it came in."""
        return self._read(RuleContext(arrival, body, data))

    def _read(self, context: RuleContext) -> Reading:
        key = None if self._key is None else self._key.read(context)
        subject = None if self._subject is None else self._subject.read(context)
        kind = None if self._type is None else self._type.read(context)
        event_time = None if self._event_time is None else self._event_time.read(context)
        rank = None if self._rank is None else self._rank.read(context)
        scope = None if self._rank_scope is None else self._rank_scope.read(context)
        account = None if self._account is None else self._account.read(context)
        return Reading(
            key,
            None if subject is None else key_text(subject),
            None if kind is None else bound_text(kind[0] if len(kind) == 1 else ".".join(filter(None, kind)), 200),
            None if event_time is None else _read_time(event_time[0]),
            None if rank is None else _read_rank(rank[0], self._order),
            None if scope is None else key_text(scope),
            context.unparsed,
            None if account is None else key_text(account),
        )


MOST_SHARED: Final = 1000
_shared: Final[dict[Hashable, Rules]] = {}


def shared_rules(places: Mapping[str, Spec]) -> Rules:
    """Return the rules of these places: the same object for every source that has the same ones, as thousands may."""
    try:
        key = _freeze(places)
        found = _shared.get(key)
    except TypeError:  # an object of the program's own that cannot be compared
        return Rules(**places)
    if found is None:
        found = Rules(**places)
        if len(_shared) < MOST_SHARED:
            _shared[key] = found
    return found


def _freeze(spec: Any) -> Hashable:
    if isinstance(spec, Mapping):
        return ("table", *((name, _freeze(one)) for name, one in spec.items()))
    if isinstance(spec, list | tuple):
        return ("list", *map(_freeze, spec))
    hash(spec)
    return type(spec), spec


def compile_rule(name: str, spec: Spec) -> Rule | PythonRule | None:
    """Compile the rule of one setting; raises ConfigError when it is wrong."""
    if spec is None:
        return None
    if callable(spec):
        return PythonRule(spec)
    if isinstance(spec, Mapping) and name != "rank":
        raise ConfigError(f"`{name}` takes places, not a table; only `rank` has one, with an order.", hint=ALLOWED)
    rule = Rule.parse(spec)
    if name == "key" and rule.constant:
        raise ConfigError(
            "A `key` made of literals alone would make every arrival a duplicate of the first.", hint=ALLOWED
        )
    return rule


def _parser(rules: Sequence[Rule | PythonRule | None]) -> Parse:
    """Return the cheapest parser that builds everything these rules may read."""
    names = set()
    for rule in rules:
        if isinstance(rule, PythonRule):
            return parse
        for path in rule.paths if rule is not None else ():
            first = path.location[0] if path.location else None
            if not isinstance(first, str):
                return parse
            names.add(first)
    return parser_of(names)


# -- values ------------------------------------------------------------------------------------

_NUMBER: Final = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}")
_RFC3339: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9:]{8}(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:?[0-9]{2})")
_FIRST_MILLISECONDS: Final = 1e11
"""From here on a number is in milliseconds: as such it is 1973, as seconds the year 5138."""


def _read_time(text: str) -> datetime | None:
    """Read Unix seconds (with or without decimals), milliseconds, or RFC 3339; None for anything else."""
    try:
        if _NUMBER.fullmatch(text):
            number = float(text)
            return datetime.fromtimestamp(number / 1000 if abs(number) >= _FIRST_MILLISECONDS else number, UTC)
        return datetime.fromisoformat(text.upper()).astimezone(UTC) if _RFC3339.fullmatch(text) else None
    except (ValueError, OverflowError, OSError):
        return None


def _read_rank(text: str, order: Mapping[str, int] | None) -> int | None:
    if order is not None:
        return order.get(text)
    number = int(text) if _INTEGER.fullmatch(text) else None
    # A database's integer could not hold it, and the arrival could not be stored.
    return number if number is not None and -(1 << 63) <= number < 1 << 63 else None


def key_text(parts: Sequence[str]) -> str:
    """Join parts into one text to show and sort by: `a:b`, with a backslash before a colon inside a part."""
    if len(parts) == 1:
        return bound_text(parts[0])
    return bound_text(":".join(part.replace("\\", "\\\\").replace(":", "\\:") for part in parts))


def bound_text(text: str, limit: int = 512) -> str:
    """Return text that every store can hold: without NUL and lone surrogates, at most `limit` bytes of UTF-8.

    The end of a longer one is replaced by a digest of the whole, so that different texts stay different.
    """
    if len(text) <= limit and text.isascii() and "\0" not in text:
        return text
    whole = text.encode("utf-8", "surrogatepass")
    encoded = whole.decode("utf-8", "replace").replace("\0", "\\u0000").encode()
    if len(encoded) <= limit:
        return encoded.decode()
    mark = "…" + blake2b(whole, digest_size=16).hexdigest()
    return encoded[: max(0, limit - len(mark.encode()))].decode("utf-8", "ignore") + mark
