"""The one parser of bodies, for key rules and for a handler's `event.json()` alike (S12).

Bytes come in, Python values go out; anything unreadable raises `Unreadable` and nothing else (S11).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Final, Protocol, TypedDict
from urllib.parse import unquote_to_bytes

import msgspec

from oncehook.errors import ConfigError
from oncehook.logs import ration

log = logging.getLogger("oncehook.receive")

MAX_DEPTH: Final = 64
MAX_NODES: Final = 250_000
MAX_FIELDS: Final = 1000
MAX_GLANCE: Final = 4096
"""Largest body in bytes that may be built in part. What is not built is checked neither for UTF-8 nor for numbers of
too many digits: so the body must be ASCII, and is too short for such a number."""

MOST_STEPS: Final = 200_000
"""Values that one evaluation of a path may look at. With one `..` and no filter it may look at every value of a body,
several times; with two of them, one below the other, it would need the square of that."""

MISSING: Final = msgspec.UNSET
"""No value. JSON's own null is None."""

Location = tuple[str | int, ...]
"""Names and indexes that lead from the root of a document to one value in it."""


class Unreadable(ValueError):
    """A body that cannot be read as what it should be."""


class OverBudget(Unreadable):
    """A path was abandoned in this body, because it would look at too many values."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} would have to look at too many values")
        self.path = path


# -- the whole body ----------------------------------------------------------------------------

_REFUSED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode: Final = msgspec.json.Decoder().decode


def parse(body: bytes) -> Any:
    """Return the value of a JSON body.

    Raises Unreadable when it is not JSON or not UTF-8, is nested deeper than MAX_DEPTH, has more than MAX_NODES values,
    or a number that is too large. The last of duplicate names counts.
    """
    _check_extent(body)
    try:
        return _decode(body)
    except _REFUSED as error:
        raise Unreadable(f"not readable as JSON: {error}") from error


Parse = Callable[[bytes], Any]


def parser_of(names: Collection[str]) -> Parse:
    """Return a parser that builds only these members of an object; the rest is checked, but not built.

    That takes a quarter of the time. It misses one error: a too large number, like 1e999, in a member that is not
    built.
    """
    if not all(name.isascii() for name in names):  # msgspec cannot decode members with other names
        return parse
    members: Any = TypedDict("members", dict.fromkeys(names, Any), total=False)  # type: ignore[misc]
    decode = msgspec.json.Decoder(members).decode

    def parse_members(body: bytes) -> Any:
        if len(body) > MAX_GLANCE or not body.isascii():
            return parse(body)
        _check_extent(body)
        try:
            return decode(body)
        except _REFUSED:
            return parse(body)  # an array perhaps; otherwise `parse` raises the reason

    return parse_members


def _all_but(kept: bytes) -> bytes:
    return bytes(byte for byte in range(256) if byte not in kept)


_NOT_OPENING: Final = _all_but(b"[{")
_NOT_MARK: Final = _all_but(b'[]{},"')
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")


def _check_extent(body: bytes) -> None:
    """Refuse a body that is too deep or has too many values, before it is built. Cheap counts go first."""
    openings = len(body.translate(None, _NOT_OPENING))
    commas = body.count(b",") if len(body) > MAX_NODES else 0
    if openings <= MAX_DEPTH and openings + commas < MAX_NODES:
        return
    marks = _structure(body)
    # Every value but the first follows a comma or an opening bracket. (An empty container counts as two.)
    if marks.count(b",") + marks.count(b"[") + marks.count(b"{") >= MAX_NODES:
        raise Unreadable(f"more than {MAX_NODES} values")
    if not _is_shallow(marks.translate(_SQUARE, b",")):
        raise Unreadable(f"nested deeper than {MAX_DEPTH}")


def _is_shallow(brackets: bytes) -> bool:
    """Tell whether the brackets nest at most MAX_DEPTH deep: each round removes the innermost pairs, which is one
    level."""
    for _ in range(MAX_DEPTH):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _structure(body: bytes) -> bytes:
    """Return the brackets and commas of a body outside its strings.

    Exact for JSON, where a backslash occurs in strings only; the decoder refuses the rest. The number of quotes before
    a mark tells whether it is inside a string, so quotes may be removed in pairs.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = body.translate(None, _NOT_MARK).replace(b'""', b"")
    if marks.count(b'"') > 4 * MAX_NODES:  # each value has at most two strings: its name and itself
        raise Unreadable(f"more than {MAX_NODES} values")
    return b"".join(marks.split(b'"')[::2])


# -- forms -------------------------------------------------------------------------------------


def parse_form(body: bytes) -> dict[str, list[str]]:
    """Return the fields of an urlencoded body or query, in order. Raises Unreadable for more than MAX_FIELDS.

    Text that is not UTF-8 is read as latin-1, for old senders; ids are ASCII in both.
    """
    if body.count(b"&") >= MAX_FIELDS:
        raise Unreadable(f"more than {MAX_FIELDS} fields")
    pairs = [_pair(piece) for piece in body.split(b"&") if piece]
    try:
        return _gather(pairs, "utf-8")
    except UnicodeDecodeError:
        return _gather(pairs, "latin-1")


def _pair(piece: bytes) -> tuple[bytes, bytes]:
    name, _, value = piece.replace(b"+", b" ").partition(b"=")
    return unquote_to_bytes(name), unquote_to_bytes(value)


def _gather(pairs: Sequence[tuple[bytes, bytes]], encoding: str) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        fields.setdefault(name.decode(encoding), []).append(value.decode(encoding))
    return fields


# -- values ------------------------------------------------------------------------------------


def text_of(value: object) -> str | None:
    """Return a scalar as the text of a key or subject: numbers as decimals without an exponent.

    None for null, for the empty text, for objects, arrays and MISSING.
    """
    if isinstance(value, str):
        return value or None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return _decimal_text(value) if isinstance(value, float) else None


def _decimal_text(number: float) -> str | None:
    if not math.isfinite(number):
        return None
    # repr is the shortest text that reads back as the same number
    text = f"{Decimal(repr(number)):f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def walk(data: Any, location: Sequence[str | int]) -> Any:
    """Return the value at a location, or MISSING."""
    for step in location:
        if isinstance(step, str):
            data = data.get(step, MISSING) if isinstance(data, dict) else MISSING
        else:
            data = data[step] if isinstance(data, list) and -len(data) <= step < len(data) else MISSING
    return data


# -- paths -------------------------------------------------------------------------------------

# These name only ASCII characters: classes that name all others, and not surrogates, take 10 ms to compile.
_STEP: Final = re.compile(
    r"\.(?P<name>[^\x00-@\[-^`{-\x7f][^\x00-/:-@\[-^`{-\x7f]*)"
    r"|\['(?P<single>[^'\"\\\x00-\x1f]*)'\]"
    r"|\[\"(?P<double>[^\"\\\x00-\x1f]*)\"\]"
    r"|\[(?P<index>0|-?[1-9][0-9]{0,14})\]"
    r"|(?P<every>\.\*|\[\*\])"
)
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_PLAIN: Final = re.compile(rf"\$(?:{re.sub('[?]P<[a-z]+>', '?:', _STEP.pattern)})*")


class _Node(Protocol):
    @property
    def location(self) -> Location: ...


class _PathQuery(Protocol):
    def finditer(self, value: Any, /) -> Iterator[_Node]: ...


class Meter:
    """Count of the values that an evaluation looks at."""

    __slots__ = ("_left", "_most", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self._most = MOST_STEPS if descents(path) > 1 or "?" in path else 4 * MAX_NODES
        self._left = 0

    def reset(self) -> None:
        self._left = self._most

    def count(self, value: object) -> None:
        """Count a value and the values inside it. Raises OverBudget above the limit."""
        self._left -= 1 + len(value) if isinstance(value, dict | list) else 1
        if self._left < 0:
            raise OverBudget(self.path)


class Path:
    """A JSONPath (RFC 9535), compiled. Names, indexes and `*` are walked here, the rest by the library.

    An evaluation raises OverBudget rather than hold up everything else.
    """

    __slots__ = ("_meter", "_query", "_steps", "location", "text")

    def __init__(self, text: str) -> None:
        """Raises ConfigError when the text is not a JSONPath."""
        self.text = text
        is_plain = _PLAIN.fullmatch(text) and not _SURROGATE.search(text)
        self._steps = tuple(map(_read_step, _STEP.finditer(text))) if is_plain else None
        self._meter = Meter(text)
        self._query = _compile(text, self._meter) if self._steps is None else None
        self.location: Location | None = None
        """Location of a simple path, made of names and indexes only; None for others."""
        if self._steps is not None and None not in self._steps:
            self.location = tuple(step for step in self._steps if step is not None)

    def first(self, data: Any) -> Any:
        """Return the first value at this path, or MISSING."""
        if self.location is not None:
            return walk(data, self.location)
        return next((walk(data, location) for location in self.locations(data)), MISSING)

    def locations(self, data: Any) -> Iterator[Location]:
        """Return the locations of all values at this path, in order."""
        if self._query is not None:
            self._meter.reset()
            return (node.location for node in self._query.finditer(data))
        return _expand(data, self._steps or (), ())


def _read_step(match: re.Match[str]) -> str | int | None:
    if match["every"]:
        return None
    if match["index"]:
        return int(match["index"])
    return next(name for name in match.group("name", "single", "double") if name is not None)


# Possessive, and up to the end where a quote is not closed: a long path must not cause backtracking.
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\\?\Z)", re.DOTALL)


def descents(text: str) -> int:
    """Return how many `..` a path has."""
    return _QUOTED.sub("", text).count("..")


def _compile(text: str, meter: Meter) -> _PathQuery:
    import jsonpath_rfc9535  # slow to import, and most paths never need it

    from oncehook.metered import meter_query

    try:
        query: _PathQuery = meter_query(jsonpath_rfc9535.compile(text), meter)
        return query
    except (jsonpath_rfc9535.JSONPathError, OverflowError) as error:  # OverflowError: a number like 1e999
        raise ConfigError(
            f'The place "{text}" is not a JSONPath: {error}.',
            hint="A path looks like $.data.id, $.items[0].id or $['event-data'].id (RFC 9535).",
        ) from error


def _expand(data: Any, steps: Sequence[str | int | None], trail: Location) -> Iterator[Location]:
    if data is MISSING:
        return
    if not steps:
        yield trail
        return
    step, rest = steps[0], steps[1:]
    for child in _children(data) if step is None else [step]:
        # -1 and the last index are the same place
        place = child + len(data) if isinstance(child, int) and child < 0 and isinstance(data, list) else child
        yield from _expand(walk(data, (child,)), rest, (*trail, place))


def _children(data: Any) -> list[Any]:
    if isinstance(data, list):
        return list(range(len(data)))
    return list(data) if isinstance(data, dict) else []


def rewrite(data: Any, paths: Sequence[Path], change: Callable[[Any], Any]) -> Any:
    """Return a copy in which each value at a path is replaced by `change(value)`; MISSING removes it.

    The original is not changed, and unchanged parts are shared with it.
    """
    spots: dict[str | int | None, Any] = {}
    for path in paths:
        for location in path.locations(data):
            node = spots
            for step in location:
                node = node.setdefault(step, {})
            node[None] = True
    return _rewrite(data, spots, change)


def _rewrite(data: Any, spots: Mapping[str | int | None, Any], change: Callable[[Any], Any]) -> Any:
    if None in spots:
        return change(data)
    if not spots:
        return data
    copy = data.copy()
    for step, below in spots.items():
        copy[step] = _rewrite(data[step], below, change)
    if isinstance(copy, list):
        return [value for value in copy if value is not MISSING]
    return {name: value for name, value in copy.items() if value is not MISSING}


# -- comparing and redacting --------------------------------------------------------------------

REDACTED: Final = "[redacted]"
_canonical: Final = msgspec.json.Encoder(order="deterministic").encode


class BodyHash:
    """Hash that recognises a repeated body, without the parts that differ between attempts (`volatile`).

    For a source that splits batches, values are compared instead of bytes (`by_meaning`): an item of a batch that comes
    again alone has other bytes.
    """

    __slots__ = ("_by_meaning", "_paths")

    def __init__(self, paths: Sequence[str] = (), *, by_meaning: bool = False) -> None:
        """Raises ConfigError for what is not a JSONPath, or would leave nothing to compare."""
        self._by_meaning = by_meaning or bool(paths)
        self._paths = [Path(path) for path in paths]
        if any(path.location == () for path in self._paths):
            raise ConfigError("`volatile` cannot be the whole body: every body would look the same.")

    def __call__(self, body: bytes, data: Any = MISSING) -> bytes:
        """Return 16 bytes. `data` is the parsed body, if the caller has it. An unreadable body is hashed as bytes.

        So is one in which a path is over its budget.
        """
        if self._by_meaning:
            try:
                data = parse(body) if data is MISSING else data
                body = _canonical(rewrite(data, self._paths, lambda _: MISSING))
            except Unreadable:
                pass
        return blake2b(body, digest_size=16).digest()


class Redaction:
    """Removal of credentials from a body before it is kept: at JSONPaths, and `form:field` in urlencoded bodies."""

    __slots__ = ("_fields", "_paths")

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises ConfigError for a path that is neither."""
        self._fields = {path.removeprefix("form:").encode() for path in paths if path.startswith("form:")}
        self._paths = [Path(path) for path in paths if not path.startswith("form:")]

    def __call__(self, body: bytes, data: Any = MISSING) -> bytes:
        """Return the body with every scalar at those places replaced; the same bytes when there was none to replace."""
        try:
            data = parse(body) if data is MISSING else data
        except Unreadable:
            return self._redact_form(body)
        try:
            redacted = rewrite(data, self._paths, _redact)
        except OverBudget as error:
            # Because it is unknown what the path would have found, every scalar is redacted.
            ration.log(log, logging.WARNING, "redact.over_budget", {"path": error.path}, kind=error.path)
            redacted = _redact(data)
        return body if redacted == data else msgspec.json.encode(redacted)

    def can_read(self, body: bytes) -> bool:
        """Tell whether the paths can be looked for in a body."""
        try:
            return not self._paths or parse(body) is not MISSING
        except Unreadable:
            return False

    def _redact_form(self, body: bytes) -> bytes:
        pieces = body.split(b"&") if self._fields else []
        for number, piece in enumerate(pieces):
            name, equals, _ = piece.partition(b"=")
            if equals and unquote_to_bytes(name.replace(b"+", b" ")) in self._fields:
                pieces[number] = name + b"=%5Bredacted%5D"
        return b"&".join(pieces) if pieces else body


def _redact(value: Any) -> Any:
    """Redact every scalar in a value, except null, which reveals nothing."""
    if isinstance(value, dict):
        return {name: _redact(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_redact(item) for item in value]
    return None if value is None else REDACTED
