"""The origin of settings: the file, what overrides it, and the line number of each.

`find` reads `oncehook.toml` or `[tool.oncehook]`; `override` puts environment variables and flags over it; `where` says
where each setting comes from. `load` is the only caller.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from oncehook.errors import ConfigError

SettingPath: TypeAlias = tuple[str | int, ...]
"""The way to a setting: ("source", "orders", "key"), or ("route", 0, "to")."""

_TOKEN: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|\n"
    r"|[\[\]{}=,.]"
    r"|[^\s\"'\#\[\]{}=,.]+",
    re.DOTALL,
)


class SettingsOrigin:
    """The settings as they were written, and where."""

    def __init__(
        self, tree: Mapping[str, Any], lines: Mapping[SettingPath, int], file: Path | None, label: str, base: Path
    ) -> None:
        spread, self._lines = _spread_routes(tree, lines)
        self.tree = copy.deepcopy(spread)
        self.file = file
        self.label = label
        self.base = base
        """The folder that `{ file = … }` is relative to."""
        self._over: dict[SettingPath, str] = {}

    def override(self, path: SettingPath, value: object, label: str) -> None:
        """Put a value over the file's. A malformed table in the file is left alone, to be reported."""
        table: object = self.tree
        for step in path[:-1]:
            if not isinstance(table, dict):
                return
            table = table.setdefault(step, {})
        if isinstance(table, dict):
            table[path[-1]] = value
            self._over[path] = label

    def line(self, path: SettingPath) -> int:
        """Return the line number of a setting, or of the nearest table around it; 0 when it is not from the file."""
        if self._override(path):
            return 0
        for length in range(len(path), -1, -1):
            if line := self._lines.get(path[:length]):
                return line
        return 0

    def place(self, path: SettingPath) -> str:
        """Return where a setting was written: `oncehook.toml:12`, `environment ONCEHOOK_STORE`, `flag --port`."""
        if label := self._override(path):
            return label
        line = self.line(path)
        return f"{self.label}:{line}" if line else self.label

    def where(self, path: SettingPath) -> str:
        """Return the place of a setting that was given, or `default`."""
        return self.place(path) if self._is_given(path) else "default"

    def _override(self, path: SettingPath) -> str:
        labels = (self._over.get(path[:length]) for length in range(len(path), 0, -1))
        return next((label for label in labels if label), "")

    def _is_given(self, path: SettingPath) -> bool:
        value: object = self.tree
        for step in path:
            # a list is treated as a mapping of its indexes
            table = dict(enumerate(value)) if isinstance(value, list) else value
            if not isinstance(table, dict) or step not in table:
                return False
            value = table[step]
        return True


def find(path: Path | None, cwd: Path) -> SettingsOrigin:
    """Read the settings file: the given one, `oncehook.toml`, or `[tool.oncehook]`; otherwise none."""
    if path is not None:
        return _read(cwd / path, str(path), required=True)
    if (cwd / "oncehook.toml").exists():
        return _read(cwd / "oncehook.toml", "oncehook.toml", required=True)
    if (cwd / "pyproject.toml").exists():
        origin = _read(cwd / "pyproject.toml", "pyproject.toml", required=False)
        if origin.file:
            return origin
    return SettingsOrigin({}, {}, None, "configuration", cwd)


def _read(file: Path, label: str, *, required: bool) -> SettingsOrigin:
    try:
        text = file.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{label}: is not UTF-8 text") from None
    tree, lines = _parse(text, label), scan_lines(text)
    if file.name != "pyproject.toml":
        return SettingsOrigin(tree, lines, file, label, file.parent)
    section = tree.get("tool", {}).get("oncehook")
    if section is None and not required:
        return SettingsOrigin({}, {}, None, "configuration", file.parent)
    if not isinstance(section, dict):
        raise ConfigError(f"{label}: has no table [tool.oncehook]")
    inner = {path[2:]: line for path, line in lines.items() if path[:2] == ("tool", "oncehook")}
    return SettingsOrigin(section, inner, file, label, file.parent)


def _parse(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, spot = str(error).partition(" (at line ")
        line, *column = [int(number) for number in re.findall(r"\d+", spot)] or [0]
        place = f"{label}:{line}" if line else label
        sentence = f"{place}: not valid TOML: {reason[:1].lower()}{reason[1:]}"
        raise ConfigError(sentence, hint=_show_line(text, line, *column) if column else "") from None
    except RecursionError:
        raise ConfigError(f"{label}: not valid TOML: nested too deeply") from None


_ASSIGNED: Final = re.compile(r"\s*([\w-]+)\s*=")
_HEADER: Final = re.compile(r"\[[\w\s.\[\]-]*")
_MAY_HOLD_SECRETS: Final = frozenset({"store", "url", "public_url", "path", "headers", "verify"})


def _show_line(text: str, number: int, column: int) -> str:
    """Return a line that is no TOML, with a caret below the place; of one that may hold a secret, its name only."""
    whole = "".join(char if char.isprintable() else " " for char in text.split("\n")[number - 1])
    line, indent = whole.strip(), len(whole) - len(whole.lstrip())
    if not _HEADER.fullmatch(line):
        from oncehook.settings.tables import Config

        assigned = _ASSIGNED.match(line)
        if assigned is None:
            return ""
        if assigned[1] not in set(_plain_names(Config)) - _MAY_HOLD_SECRETS:
            return f"{assigned[1]} = …\n  {' ' * len(assigned[1])}   ^" if assigned[1] in _all_names(Config) else ""
    return f"{line}\n  {' ' * min(max(column - 1 - indent, 0), len(line))}^"


def _all_names(kind: type) -> Iterator[str]:
    """Yield the names of all settings."""
    from oncehook.settings.read import fields_of

    for name, field in fields_of(kind).items():
        yield name
        if field.table is not None:
            yield from _all_names(field.table)


def _plain_names(kind: type) -> Iterator[str]:
    """Yield the names of all settings that are no secrets."""
    from oncehook.settings.read import fields_of

    for name, field in fields_of(kind).items():
        if field.table is not None:
            yield from _plain_names(field.table)
        elif field.form is not None and not field.form.is_secret:
            yield name


def _spread_routes(
    tree: Mapping[str, Any], lines: Mapping[SettingPath, int]
) -> tuple[dict[str, Any], dict[SettingPath, int]]:
    """Make of a route that comes from several sources one for each, on the same lines."""
    written = tree.get("route")
    if not isinstance(written, list):
        return dict(tree), dict(lines)
    spread: list[tuple[int, Any]] = []
    for number, route in enumerate(written):
        sources = route.get("from") if isinstance(route, dict) else None
        if isinstance(sources, list) and sources:
            spread += [(number, {**route, "from": source}) for source in sources]
        else:
            spread.append((number, route))
    moved = {path: line for path, line in lines.items() if path[:1] != ("route",) or len(path) == 1}
    for new, (old, _) in enumerate(spread):
        moved |= {("route", new, *path[2:]): line for path, line in lines.items() if path[:2] == ("route", old)}
    return {**tree, "route": [route for _, route in spread]}, moved


def parse_variable(text: str) -> object:
    """Parse a variable: true, false, an integer, a TOML list or table; anything else is text."""
    word = text.strip()
    if word in ("true", "false"):
        return word == "true"
    if re.fullmatch(r"-?[0-9]{1,18}", word):
        return int(word)
    if word[:1] in ("[", "{"):
        try:
            return tomllib.loads(f"value = {word}")["value"]
        except tomllib.TOMLDecodeError:
            return text
    return text


# -- lines -------------------------------------------------------------------------------------


def scan_lines(text: str) -> dict[SettingPath, int]:
    """Return the line numbers of tables and keys in a valid TOML text, without those of inline tables."""
    scan = _Scan()
    for match in _TOKEN.finditer(text):
        scan.take(match[0])
    return scan.lines


class _Scan:
    """A scanner of TOML that tells keys from values, and no more: `tomllib` has checked the text."""

    def __init__(self) -> None:
        self.lines: dict[SettingPath, int] = {}
        self._line = 1
        self._table: SettingPath = ()
        self._parts: list[str] = []
        self._counts: dict[SettingPath, int] = {}
        self._state = self._statement
        self._depth = 0

    def take(self, piece: str) -> None:
        if not piece.startswith("#"):
            self._state(piece)
        self._line += piece.count("\n")

    def _statement(self, piece: str) -> None:
        if piece == "\n":
            return
        self._parts = []
        self._depth = 0
        self._state = self._header if piece == "[" else self._key
        if piece != "[":
            self._key(piece)

    def _header(self, piece: str) -> None:
        if piece == "[":
            self._depth = 1
        elif piece == "]":
            self._open_table()
            self._state = self._rest
        elif piece != ".":
            self._parts.append(_unquote(piece))

    def _rest(self, piece: str) -> None:
        if piece == "\n":
            self._state = self._statement

    def _key(self, piece: str) -> None:
        if piece == "=":
            self._remember((*self._table, *self._parts))
            self._state = self._value
        elif piece != ".":
            self._parts.append(_unquote(piece))

    def _value(self, piece: str) -> None:
        if piece in ("[", "{"):
            self._depth += 1
        elif piece in ("]", "}"):
            self._depth -= 1
        elif piece == "\n" and not self._depth:
            self._state = self._statement

    def _open_table(self) -> None:
        path: SettingPath = ()
        for place, part in enumerate(self._parts, 1):
            path = (*path, part)
            if self._depth and place == len(self._parts):
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:  # a header below [[route]] belongs to the last one
                path = (*path, self._counts[path] - 1)
        self._table = path
        self._remember(path)

    def _remember(self, path: SettingPath) -> None:
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], self._line)


def _unquote(piece: str) -> str:
    if piece.startswith('"'):
        return str(tomllib.loads(f"key = {piece}")["key"])
    return piece[1:-1] if piece.startswith("'") else piece
