"""One reader of settings, for the file, the environment and Python: from settings as written to settings as used.

A table is a TypedDict where Python can write it, too, because only that types keyword arguments; otherwise a msgspec
Struct. `fields_of` reads either; `SettingsReader` notes problems and goes on, so that a person sees all of them at
once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from oncehook.errors import ConfigError
from oncehook.human import nearest, suggest_clause
from oncehook.secret import Environment, OldSecret, Secret, read_secret
from oncehook.settings.origin import SettingPath, SettingsOrigin
from oncehook.settings.values import FLAG, NAME, NAME_FORM, Form, choice


class NotedError(ConfigError):
    """An error that has been noted already."""


class Settings(SimpleNamespace):
    """Settings of one table as attributes: `vars` holds the given ones, the class the other defaults."""


class Default(msgspec.Struct, frozen=True):
    """The default of a setting."""

    value: Any


class Problem(msgspec.Struct, frozen=True):
    """A problem, and where it is."""

    line: int
    place: str
    sentence: str
    setting: str = ""
    """Its name within its table."""

    def __str__(self) -> str:
        text = f"{self.place}: {self.sentence}" if self.place else self.sentence
        # each problem on one line, whatever a key contains
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def raise_all(problems: Sequence[Problem], hint: str = "") -> None:
    """Raise ConfigError with all problems, in the order of the file, if there are any."""
    if problems:
        # A route from several sources is read once for each of them, and written once.
        lines = list(dict.fromkeys(map(str, sorted(problems, key=lambda one: one.line))))
        sum_ = f"{len(lines)} mistakes." if len(lines) > 1 else ""
        raise ConfigError("\n".join(lines), hint=f"{sum_} {hint}".strip())


# -- what a table declares ---------------------------------------------------------------------


class Field(msgspec.Struct, frozen=True):
    """A setting as a table declares it."""

    attribute: str
    form: Form | None
    """None for a table, or several."""
    table: type | None
    shape: type | None
    """dict: tables by name; list: tables in order; None: one value or table."""
    about: str
    default: Any
    required: bool


MORE_TABLES: Final[dict[type, Callable[[str], type | None]]] = {}
"""Functions that find the table of a key, for tables whose keys may name further tables."""


@functools.cache
def fields_of(kind: type) -> Mapping[str, Field]:
    """Return the settings of a table by their names in the file."""
    if typing.is_typeddict(kind):
        hints = {name: (hint, Default(None)) for name, hint in kind.__annotations__.items()}
        required = typing.cast("Any", kind).__required_keys__
    else:
        declared = msgspec.structs.fields(kind)
        typed = typing.get_type_hints(kind, include_extras=True)
        defaults = {one.name: None if one.default is msgspec.NODEFAULT else one.default for one in declared}
        hints = {name: (typed[name], Default(default)) for name, default in defaults.items()}
        required = {one.name for one in declared if one.required}
    return {
        name.rstrip("_"): _field(name, hint, default, required=name in required)
        for name, (hint, default) in hints.items()
    }


def fields_with(kind: type, keys: Iterable[str]) -> Mapping[str, Field]:
    """Return the settings of a table, and the further tables that these keys name."""
    fields, find = fields_of(kind), MORE_TABLES.get(kind)
    if find is None:
        return fields
    more = {key: find(key) for key in keys if key not in fields}
    return {**fields, **{key: further_table(key, table) for key, table in more.items() if table is not None}}


def further_table(key: str, table: type) -> Field:
    """Return a further table as a setting."""
    return Field(key, None, table, None, "", None, required=False)


def _field(name: str, hint: Any, default: Default, *, required: bool) -> Field:
    while typing.get_origin(hint) in (typing.Required, typing.NotRequired):
        (hint,) = typing.get_args(hint)
    notes = getattr(hint, "__metadata__", ())
    hint = typing.get_args(hint)[0] if notes else hint
    table = next((one for one in (*notes, hint, *typing.get_args(hint)) if _is_table(one)), None)
    form = next((note for note in notes if isinstance(note, Form)), None)
    if form is None and table is None:
        form = FLAG if hint is bool else choice(*typing.get_args(hint))
    return Field(
        attribute=name,
        form=form,
        table=table,
        shape=shape if (shape := typing.get_origin(hint)) in (dict, list) else None,
        about=next((note for note in notes if isinstance(note, str)), ""),
        default=next((note for note in notes if isinstance(note, Default)), default).value,
        required=required,
    )


def _is_table(kind: Any) -> bool:
    return typing.is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))


@functools.cache
def settings_class(kind: type) -> type[Settings]:
    """Return the class into which a TypedDict table is read."""
    defaults = {
        field.attribute: settings_class(field.table)() if field.table and field.default == {} else field.default
        for field in fields_of(kind).values()
    }
    return type(kind.__name__, (Settings,), defaults)


# -- reading -----------------------------------------------------------------------------------


def label(path: SettingPath) -> str:
    """Return a table's header in TOML: `[source.orders]`, `[[route]]`."""
    name = ".".join(str(step) for step in path if isinstance(step, str))
    return f"[[{name}]]" if any(isinstance(step, int) for step in path) else f"[{name}]"


class SettingsReader:
    """One reading of settings from a file or a program. A program may also give functions, objects and secrets."""

    def __init__(self, origin: SettingsOrigin, env: Mapping[str, str], *, is_program: bool = False) -> None:
        self.problems: list[Problem] = []
        self.secrets: list[tuple[SettingPath, Secret]] = []
        self.env = env
        self.origin = origin
        self.is_program = is_program
        self._failed: set[SettingPath] = set()

    def note(self, path: SettingPath, sentence: str, missing: str = "") -> None:
        """Note a problem at a place; `missing`: of a setting that should be there."""
        self._failed.add(path)
        self.problems.append(self.problem(path, sentence, missing))

    def problem(self, path: SettingPath, sentence: str, missing: str = "") -> Problem:
        setting = ".".join(map(str, (*path[2:], *([missing] if missing else ()))))
        return Problem(self.origin.line(path), self.origin.place(path), sentence, setting)

    def has_failed(self, path: SettingPath) -> bool:
        """Tell whether this setting was given and is wrong, so that it must not be reported as missing."""
        return path in self._failed

    def table(self, kind: type, value: object, path: SettingPath) -> Any:
        """Read a table. Raises NotedError when not even a partial one can be made."""
        fields = fields_of(kind)
        if self.is_program:
            value = _of_program(fields, value)
        if not isinstance(value, Mapping):
            raise ConfigError("must be a table")
        fields = fields_with(kind, value)
        for key in value:
            if key not in fields:
                self._note_unknown(path, key, list(fields))
        given: dict[str, Any] = {}
        for key, field in fields.items():
            if key in value:
                self._read_into(given, field, value[key], (*path, key))
            elif field.required and not self.has_failed((*path, key)):
                self.note(path, f'{label(path)} needs "{key}"', key)
        if any(field.required and field.attribute not in given for field in fields.values()):
            raise NotedError
        return settings_class(kind)(**given) if typing.is_typeddict(kind) else kind(**given)

    def _note_unknown(self, path: SettingPath, key: str, known: list[str]) -> None:
        inside = f" in {label(path)}" if path else ""
        self.note((*path, key), f'unknown key "{key}"{inside}; {suggest_clause(key, known)}')
        if near := nearest(key, known):
            # The misspelt setting must not be reported as missing, too.
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
            return field.form.read(value, Spot(self, path))
        assert field.table is not None, f"{path} has neither form nor table"
        if field.shape is dict:
            return self._read_tables(field.table, value, path)
        if field.shape is list:
            return self._read_list(field.table, value, path)
        return self.table(field.table, value, path)

    def _read_tables(self, kind: type, value: object, path: SettingPath) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ConfigError(f"must be tables with a name each; write [{path[-1]}.NAME]")
        tables: dict[str, Any] = {}
        for name, table in value.items():
            if not NAME.fullmatch(name):
                self.note((*path, name), f'"{name}" is not a name for a {path[-1]}; use {NAME_FORM}')
            if (read := self.read(kind, table, (*path, name))) is not None:
                tables[name] = read
        return tables

    def _read_list(self, kind: type, value: object, path: SettingPath) -> list[Any]:
        if not isinstance(value, list):
            raise ConfigError(f"must be a list of tables; write [[{'.'.join(map(str, path))}]]")
        tables = (self.read(kind, table, (*path, number)) for number, table in enumerate(value))
        return [table for table in tables if table is not None]

    def read(self, kind: type, value: object, path: SettingPath) -> Any:
        """Read a table and note what is wrong; None when not even a partial one can be made."""
        try:
            return self.table(kind, value, path)
        except NotedError:
            self._failed.add(path)
        except ConfigError as error:
            self.note(path, f"{label(path)} {error}")
        return None


class Spot(msgspec.Struct, frozen=True):
    """The place of one value, for forms that need more than the value."""

    reader: SettingsReader
    path: SettingPath

    @property
    def is_program(self) -> bool:
        """True where Python wrote the value, which may then be a function, an object, or a secret itself."""
        return self.reader.is_program

    def secret(self, value: object, *, may_end: bool = False) -> Secret:
        """Read a reference to a secret, and note that it must be set. `may_end` allows `until`."""
        setting = ".".join(map(str, self.path))
        if self.is_program and isinstance(value, str | bytes | OldSecret):
            secret = Secret.from_program(value, setting)
        else:
            secret = read_secret(value, setting, env=self.reader.env, base=self.reader.origin.base, may_end=may_end)
        self.reader.secrets.append((self.path, secret))
        return secret

    def table(self, kind: type, value: object) -> Any:
        return self.reader.table(kind, value, self.path)

    def file(self, name: str) -> Path:
        """Return a file's path: relative to the folder of the settings."""
        return self.reader.origin.base / name


# -- what a program writes ---------------------------------------------------------------------

_VARIABLE: Final = "_env"


def _of_program(fields: Mapping[str, Field], value: object) -> object:
    """Return Python's settings as a file would have them: without None, `secret_env="X"` as a reference, an object as a
    table."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        return value
    written = {key: one for key, one in value.items() if one is not None}
    for key in [key for key in written if key.endswith(_VARIABLE)]:
        meant = key.removesuffix(_VARIABLE)
        form = fields[meant].form if meant in fields else None
        if form is not None and form.is_secret:
            if meant in written:
                raise ConfigError(f"has both {meant} and {key}; keep one of them")
            written[meant] = {"env": written.pop(key)}
    return written


def program_reader(*, is_program: bool = True) -> SettingsReader:
    """Return a reader for settings that are in no file."""
    return SettingsReader(SettingsOrigin({}, {}, None, "", Path()), Environment(os.environ), is_program=is_program)


def read_program(
    kind: type,
    path: SettingPath,
    given: Mapping[str, object],
    check: Callable[[str, Any, SettingsReader], None] | None = None,
    *,
    is_program: bool = True,
) -> Any:
    """Read a program's settings of one thing, and `check` them as a whole. Raises ConfigError with all problems.

    `is_program=False` allows only what a file could contain.
    """
    reader = program_reader(is_program=is_program)
    read = reader.read(kind, given, path)
    if check is not None and read is not None:
        check(str(path[-1]), read, reader)
    raise_all(reader.problems)
    return read
