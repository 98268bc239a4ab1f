"""Languages of the dashboard: which one a visitor reads, and what each label is in it.

Templates are written in English without any marking: `Labels` finds their words when a template is compiled (text
between tags, and the attributes that people read or hear) and has each looked up when a page is rendered. What a
template says inside an expression is marked by hand, with `_("Cancel")` or `plural(n, "delivery", "deliveries")`.
Catalogues are gettext's `.po` files in `languages/`, read at first use: no build step, nothing compiled to ship.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from gettext import NullTranslations
from pathlib import Path
from typing import Final

from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from markupsafe import Markup

HERE: Final = Path(__file__).parent / "languages"
ENGLISH: Final = "en"
LANGUAGES: Final[Mapping[str, str]] = {"en": "English", "pt-BR": "Português", "es": "Español"}
"""Languages by their tag, in their own words."""
COOKIE: Final = "oncehook_language"

_current: ContextVar[str] = ContextVar("oncehook_language", default=ENGLISH)


# -- which one ---------------------------------------------------------------------------------


def choose(chosen: str | None, accepts: str) -> str:
    """Return the language to show: the one chosen before, or the best that the browser accepts, or English.

    >>> choose(None, "pt-PT;q=0.8, fr, es;q=0.5")
    'pt-BR'
    """
    if chosen is not None and chosen in LANGUAGES:
        return chosen
    for tag in _by_weight(accepts[:200]):
        for known in LANGUAGES:
            if tag.partition("-")[0].lower() == known.partition("-")[0]:
                return known
    return ENGLISH


def _by_weight(accepts: str) -> list[str]:
    weighted = []
    for place, part in enumerate(accepts.split(",")):
        tag, _, weight = part.strip().partition(";q=")
        try:
            weighted.append((-float(weight or 1), place, tag.strip()))
        except ValueError:
            continue
    return [tag for weight, _, tag in sorted(weighted) if weight < 0]


@contextmanager
def speaking(language: str) -> Iterator[None]:
    """Render what is inside in this language."""
    token = _current.set(language if language in LANGUAGES else ENGLISH)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> str:
    return _current.get()


# -- what it says ------------------------------------------------------------------------------


def translate(text: str) -> str:
    """Return a text in the current language; as it is where the catalogue has no such text."""
    return catalogue(_current.get()).gettext(text)


def translate_markup(text: str) -> Markup:
    """Return a template's own text in the current language. Both are ours, so neither is escaped."""
    return Markup(catalogue(_current.get()).gettext(text))  # noqa: S704 - the texts are the package's own


def plural(n: float, one: str, many: str) -> str:
    """Return the form of a word that fits a number, in the current language."""
    return catalogue(_current.get()).ngettext(one, many, int(n))


class Catalogue(NullTranslations):
    """Texts of one language, as gettext's functions ask for them."""

    def __init__(self, texts: Mapping[str, str], forms: Mapping[tuple[str, str], tuple[str, str]], one: int) -> None:
        super().__init__()
        self.texts = texts
        self.forms = forms
        self._one = one
        """The greatest number that takes the first form: Portuguese says 0 like 1."""

    def gettext(self, message: str) -> str:
        return self.texts.get(message, message)

    def ngettext(self, msgid1: str, msgid2: str, n: int) -> str:
        one, many = self.forms.get((msgid1, msgid2), (msgid1, msgid2))
        return one if n == 1 or (self._one == 0 and n == 0) else many


@cache
def catalogue(language: str) -> Catalogue:
    """Return the texts of a language; none for English, which the templates are in."""
    if language == ENGLISH:
        return Catalogue({}, {}, 1)
    return read_catalogue((HERE / f"{language}.po").read_text("utf-8"))


_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FIELD: Final = re.compile(r"(msgid|msgid_plural|msgstr(?:\[[01]\])?) ")


def read_catalogue(text: str) -> Catalogue:
    """Read a `.po` file: texts, their plurals, and from the header how Portuguese and Spanish differ."""
    texts: dict[str, str] = {}
    forms: dict[tuple[str, str], tuple[str, str]] = {}
    header = ""
    for entry in re.split(r"\n[ \t]*\n", text):
        fields = _read_entry(entry.splitlines())
        if "msgid_plural" in fields:
            forms[fields["msgid"], fields["msgid_plural"]] = fields["msgstr[0]"], fields["msgstr[1]"]
        elif fields.get("msgid"):
            texts[fields["msgid"]] = fields["msgstr"]
        else:
            header = header or fields.get("msgstr", "")
    return Catalogue(
        {known: said for known, said in texts.items() if said}, forms, 0 if "plural=(n > 1)" in header else 1
    )


def _read_entry(lines: Iterable[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    field = ""
    for line in lines:
        if match := _FIELD.match(line):
            field = match[1]
            fields[field] = ""
        if field and not line.startswith("#") and (quoted := _STRING.search(line)):
            fields[field] += quoted[1].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
    return fields


# -- labels in templates -------------------------------------------------------------------------

READ: Final = frozenset({"aria-label", "title", "placeholder", "alt"})
"""Attributes whose values people read or hear."""
VERBATIM: Final = frozenset({"code", "kbd", "pre", "script", "style"})
"""Elements whose text is no language."""
SILENT: Final = frozenset({"stream", "refresh", "poll"})
"""Blocks that are no text."""
_WORD: Final = re.compile(r"[A-Za-z]{2,}")


class Labels(Extension):
    """A Jinja extension that has every label of a template looked up in the visitor's language."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        scanner, before, is_silent = _Scanner(), "", False
        for token in stream:
            if token.type != "data":
                # Blocks inside attributes of the page around: addresses and what triggers a refresh.
                is_silent = (is_silent or (before == "block" and token.value in SILENT)) and token.value != "endblock"
                before = token.value if token.type == "name" else ""
                yield token
                continue
            for text, is_label in scanner.split(token.value):
                if is_silent or not is_label or '="' in text:  # the last is a macro that makes attributes
                    yield Token(token.lineno, "data", text)
                    continue
                lead, core, tail = _trim(text)
                yield Token(token.lineno, "data", lead)
                yield from _call(token.lineno, core)
                yield Token(token.lineno, "data", tail)


def _trim(text: str) -> tuple[str, str, str]:
    core = text.strip()
    start = text.index(core)
    return text[:start], " ".join(core.split()), text[start + len(core) :]


def _call(line: int, text: str) -> Iterator[Token]:
    for kind, value in (
        ("variable_begin", "{{"), ("name", "_label"), ("lparen", "("), ("string", text), ("rparen", ")"),
        ("variable_end", "}}"),
    ):  # fmt: skip
        yield Token(line, kind, value)


class _Scanner:
    """A reader of HTML in pieces, between which expressions stand: it knows at each place what the text is."""

    def __init__(self) -> None:
        self._place = "text"
        """`text`, `tag`, `value`, or `comment`."""
        self._quote = ""
        self._attribute = ""
        self._verbatim = ""
        self._tag = ""

    def split(self, data: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a piece, and whether each is a label."""
        at = 0
        while at < len(data):
            start, at = at, self._step(data, at)
            part = data[start:at]
            yield part, self._was_label and bool(_WORD.search(_without_entities(part)))

    def _step(self, data: str, at: int) -> int:
        """Return the end of the part that begins here; sets what it was and what comes next."""
        self._was_label = False
        if self._place == "text":
            end = data.find("<", at)
            self._was_label = end != at and not self._verbatim
            if end == at:
                return self._begin_tag(data, at)
            return len(data) if end < 0 else end
        if self._place == "value":
            end = data.find(self._quote, at)
            self._was_label = self._attribute in READ and end != at
            if end == at:
                self._place = "tag"
                return at + 1
            return len(data) if end < 0 else end
        return self._step_tag(data, at)

    def _begin_tag(self, data: str, at: int) -> int:
        match = re.compile(r"<(/?)([a-zA-Z0-9-]*)").match(data, at)
        assert match is not None
        name = match[2].lower()
        if match[1] and name == self._verbatim:
            self._verbatim = ""
        elif not match[1] and name in VERBATIM and not self._verbatim:
            self._verbatim = name
        self._place = "tag"
        return match.end()

    def _step_tag(self, data: str, at: int) -> int:
        for place in range(at, len(data)):
            if data[place] == ">":
                self._place = "text"
                return place + 1
            if data[place] in "\"'":
                named = re.search(r"([a-zA-Z-]+)=$", data[:place])
                self._attribute, self._quote, self._place = (named[1].lower() if named else ""), data[place], "value"
                return place + 1
        return len(data)


def _without_entities(text: str) -> str:
    return re.sub(r"&[a-z]+;", " ", text)
