"""What a rule sees of an arrival: its headers, query, form fields and the JSON in its body.

Each part is read when it is first asked for. `keys` has the rules; one written in Python is called with a `Sight`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Final

from oncehook.logs import ration
from oncehook.model import Arrival, Headers
from oncehook.payload import MISSING, OverBudget, Parse, Path, Unreadable, parse, parse_form

log = logging.getLogger("oncehook.receive")

JSON: Final = (b"content-type", b"application/json")
JSON_UTF8: Final = (b"content-type", b"application/json; charset=utf-8")
FORM: Final = "application/x-www-form-urlencoded"


def header(headers: Headers, name: bytes) -> str | None:
    """The value of a header (its name in lower case); None when it is absent, empty, or there twice and not the same.

    The quotes that the Idempotency-Key draft puts around its value are no part of it.
    """
    values = {value.strip() for key, value in headers if key == name}
    return _header_text(name, values.pop()) if len(values) == 1 else None


def _header_text(name: bytes, value: bytes) -> str | None:
    text = value.strip().decode("latin-1")
    if name == b"idempotency-key" and len(text) > 1 and text[0] == text[-1] == '"':
        text = re.sub(r'\\(["\\])', r"\1", text[1:-1])
    return text or None


class Sight:
    """What a rule sees of an arrival, each part read when it is first asked for.

    A rule written in Python is called with one and returns the value, a tuple of parts, or None. `parse` may give
    less of a body than there is, where no such rule looks and the others need no more.
    """

    __slots__ = ("_data", "_form", "_head", "_loaded", "_parse", "_query", "arrival", "body", "memo", "unparsed")

    def __init__(self, arrival: Arrival, body: bytes, data: Any = MISSING, parse: Parse = parse) -> None:
        self.arrival = arrival
        self.body = body
        """The bytes of the event: the arrival's own, or those of one part of it."""
        self.unparsed = False
        """JSON was asked for, and the body could not be read, or not within a path's budget."""
        self.memo: Any = None
        """What one rule of a preset has read, for the others: all of them are called with the same sight."""
        self._data = data
        self._parse = parse
        self._loaded = data is not MISSING
        self._head: dict[bytes, bytes] | None = None
        self._form: dict[str, list[str]] | None = None
        self._query: dict[str, list[str]] | None = None

    @property
    def data(self) -> Any:
        """The parsed JSON body; None when it cannot be read, or is a form."""
        if not self._loaded:
            self._load()
        return None if self._data is MISSING else self._data

    @property
    def media_type(self) -> str | None:
        """The content type without its parameters."""
        text = self.find_header(b"content-type")
        return None if text is None else text.partition(";")[0].strip().lower()

    def header(self, name: str) -> str | None:
        """The value of a header; None when it is absent, empty, or there twice and not the same."""
        return self.find_header(name.lower().encode("latin-1", "replace"))

    def find_header(self, name: bytes) -> str | None:
        """The same, by its name in lower case."""
        if self._head is None:
            self._head = dict(self.arrival.headers)
        value = self._head.get(name)
        if value is None:
            return None
        if len(self._head) != len(self.arrival.headers):
            return header(self.arrival.headers, name)
        return _header_text(name, value)

    def query(self, name: str) -> str | None:
        """The value of a query parameter; None when it is absent, empty, or there twice and not the same."""
        if self._query is None:
            self._query = _fields_of(self.arrival.query)
        return _single(self._query, name)

    def form(self, name: str) -> str | None:
        """The value of a field of an urlencoded body; None as with `query`, and for every other content type."""
        if self._form is None:
            self._form = _fields_of(self.arrival.body) if self.media_type in (FORM, None) else {}
        return _single(self._form, name)

    def find(self, path: Path) -> Any:
        """The first value a path leads to in the body, or MISSING."""
        if not self._loaded:
            self._load()
        try:
            return MISSING if self._data is MISSING else path.first(self._data)
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
        """Forms and uploads are not ours to look into (S13).

        But what begins like JSON is JSON whatever it is called: `curl -d '{…}'` calls it a form, and who relays a
        captured request could call it an upload, to hide its key.
        """
        if JSON in self.arrival.headers or JSON_UTF8 in self.arrival.headers:  # told without a closer look
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
