"""From written settings to typed tables, one problem at a time and none of them the last.

A table is a msgspec Struct whose fields carry a `Form` each; `Walk.table` reads one, notes what is wrong or unknown,
and goes on, so that a person sees everything in one go. `load` and `schema` are the callers.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from oncehook.errors import ConfigError
from oncehook.secret import Secret, read_secret
from oncehook.settings.values import NAME, NAME_FORM, Form, nearest
from oncehook.settings.origin import Origin, SettingPath

T = TypeVar("T", bound=msgspec.Struct)


class NotedError(ConfigError):
    """What is wrong here has been noted already."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    line: int
    place: str
    sentence: str

    def __str__(self) -> str:
        text = f"{self.place}: {self.sentence}"
        # one line per problem, whatever a key holds
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def raise_all(problems: Sequence[Problem], hint: str = "") -> None:
    """Raise ConfigError with one line for each, in the order of the file; nothing happens when there is none."""
    if problems:
        told = "\n".join(str(problem) for problem in sorted(problems, key=lambda one: one.line))
        raise ConfigError(told, hint=hint)


@dataclass(frozen=True, slots=True)
class Field:
    """A setting as a table declares it."""

    attribute: str
    hint: Any
    form: Form | None
    """None: a table, or several."""
    about: str
    default: Any
    required: bool


@functools.cache
def fields_of(kind: type[msgspec.Struct]) -> Mapping[str, Field]:
    """The settings of a table, by the name they have in the file."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.encode_name: _field(field, hints[field.name]) for field in msgspec.structs.fields(kind)}


def _field(field: msgspec.structs.FieldInfo, hint: Any) -> Field:
    notes = getattr(hint, "__metadata__", ())
    return Field(
        attribute=field.name,
        hint=typing.get_args(hint)[0] if notes else hint,
        form=next((note for note in notes if isinstance(note, Form)), None),
        about=next((note for note in notes if isinstance(note, str)), ""),
        default=None if field.default is msgspec.NODEFAULT else field.default,
        required=field.required,
    )


def table_of(hint: Any) -> type[msgspec.Struct] | None:
    """The Struct behind `ServerConfig`, `dict[str, SourceConfig]` or `list[RouteConfig]`."""
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


def is_one_table(hint: Any) -> bool:
    """Whether it is a table by itself, and not several of a kind."""
    return table_of(hint) is not None and typing.get_origin(hint) not in (dict, list)


def label(path: SettingPath) -> str:
    """How TOML heads this table: `[source.orders]`, `[[route]]`."""
    name = ".".join(str(step) for step in path if isinstance(step, str))
    return f"[[{name}]]" if any(isinstance(step, int) for step in path) else f"[{name}]"


class Walk:
    """One reading of all settings."""

    def __init__(self, origin: Origin, env: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self.secrets: list[tuple[SettingPath, Secret]] = []
        self.env = env
        self.origin = origin
        self._failed: set[SettingPath] = set()

    def note(self, path: SettingPath, sentence: str) -> None:
        """Remember that something is wrong."""
        self._failed.add(path)
        self.problems.append(self.problem(path, sentence))

    def problem(self, path: SettingPath, sentence: str) -> Problem:
        """What is wrong, with its place."""
        return Problem(self.origin.line(path), self.origin.place(path), sentence)

    def has_failed(self, path: SettingPath) -> bool:
        """Whether this setting was tried and is wrong, so that its absence means nothing."""
        return path in self._failed

    def table(self, kind: type[T], value: object, path: SettingPath) -> T:
        """Read a table. Raises NotedError when not even a partial one can be made."""
        if not isinstance(value, dict):
            raise ConfigError("must be a table")
        fields = fields_of(kind)
        for key in value:
            if key not in fields:
                self._note_unknown(path, key, list(fields))
        given: dict[str, Any] = {}
        for key, field in fields.items():
            if key in value:
                self._read_into(given, field, value[key], (*path, key))
            elif field.required and not self.has_failed((*path, key)):
                self.note(path, f'{label(path)} needs "{key}"')
        if any(field.required and field.attribute not in given for field in fields.values()):
            raise NotedError
        return kind(**given)

    def _note_unknown(self, path: SettingPath, key: str, known: list[str]) -> None:
        near = nearest(key, known)
        remedy = f'did you mean "{near}"?' if near else f"allowed: {', '.join(known)}"
        inside = f" in {label(path)}" if path else ""
        self.note((*path, key), f'unknown key "{key}"{inside}; {remedy}')
        if near:
            # the setting was said, only not well: do not also complain that it is missing
            self._failed.add((*path, near))

    def _read_into(self, given: dict[str, Any], field: Field, value: object, path: SettingPath) -> None:
        try:
            given[field.attribute] = self._value(field, value, path)
        except NotedError:
            self._failed.add(path)
        except ConfigError as error:
            inside = f" in {label(path[:-1])}" if path[:-1] else ""
            self.note(path, f"{path[-1]}{inside}: {error} {error.hint}".rstrip())

    def _value(self, field: Field, value: object, path: SettingPath) -> Any:
        if field.form is not None:
            return field.form.read(value, _Spot(self, path))
        kind = table_of(field.hint)
        assert kind is not None, f"{path} has neither form nor table"
        if typing.get_origin(field.hint) is dict:
            return self._named(kind, value, path)
        if typing.get_origin(field.hint) is list:
            return self._listed(kind, value, path)
        return self.table(kind, value, path)

    def _named(self, kind: type[T], value: object, path: SettingPath) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ConfigError(f"must be tables with a name each; write [{path[-1]}.NAME]")
        tables: dict[str, T] = {}
        for name, table in value.items():
            if not NAME.fullmatch(name):
                self.note((*path, name), f'"{name}" is not a name for a {path[-1]}; use {NAME_FORM}')
            self._keep(tables, name, kind, table, (*path, name))
        return tables

    def _listed(self, kind: type[T], value: object, path: SettingPath) -> list[T]:
        if not isinstance(value, list):
            raise ConfigError(f"must be a list of tables; write [[{'.'.join(map(str, path))}]]")
        tables: dict[int, T] = {}
        for number, table in enumerate(value):
            self._keep(tables, number, kind, table, (*path, number))
        return list(tables.values())

    def _keep(self, tables: dict[Any, T], name: str | int, kind: type[T], value: object, path: SettingPath) -> None:
        try:
            tables[name] = self.table(kind, value, path)
        except NotedError:
            self._failed.add(path)
        except ConfigError as error:
            self.note(path, f"{label(path)} {error}")


@dataclass(frozen=True, slots=True)
class _Spot:
    """The place of one value; see `forms.Place`."""

    walk: Walk
    path: SettingPath

    def secret(self, value: object, *, may_end: bool = False) -> Secret:
        setting = ".".join(map(str, self.path))
        secret = read_secret(value, setting, env=self.walk.env, base=self.walk.origin.base, may_end=may_end)
        self.walk.secrets.append((self.path, secret))
        return secret

    def table(self, kind: type[Any], value: object) -> Any:
        return self.walk.table(kind, value, self.path)

    def file(self, name: str) -> Path:
        return self.walk.origin.base / name
