"""The configuration: one file and what overrides it, read and checked as a whole.

`load` finds `oncehook.toml` (or `[tool.oncehook]`), has environment variables and flags override it, and returns a
`Loaded`; inbox and CLI call it. Everything wrong is reported at once, each with its place and remedy.
The settings themselves are in `tables.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from oncehook.errors import ConfigError
from oncehook.human import nearest
from oncehook.secret import Environment, Secret
from oncehook.settings.check import AppNames, check, check_bind, check_surroundings, loose_ends, warnings
from oncehook.settings.origin import SettingPath, find, parse_variable
from oncehook.settings.read import Field, Problem, Settings, SettingsReader, fields_with, raise_all
from oncehook.settings.tables import Config, EncryptConfig, RetentionConfig, ServerConfig, TokenConfig, WatermarkConfig
from oncehook.store.cipher import read_key

__all__ = [
    "AppNames",
    "Config",
    "EncryptConfig",
    "Loaded",
    "RetentionConfig",
    "Secret",
    "ServerConfig",
    "Setting",
    "TokenConfig",
    "WatermarkConfig",
    "check_bind",
    "load",
]

# Variables that belong to the CLI, not to the file: its options (ONCEHOOK_SERVE_OPEN) and these.
_OWN: Final = re.compile(
    r"ONCEHOOK_(?:(?:APP|CONFIG|TOKEN|SECRET_KEY|SERVER|FAULT|CLOCK|JSON|WIDE|QUIET|VERBOSE|PROXY|CLAIMS)"
    r"|(?:SERVE|WORKER|DEMO|SEND|FORWARD|TAIL|EVENTS|SHOW|REPLAY|REJECTED|DEAD|ERASE|PAUSE|RESUME|MARK|PORTAL|SOURCES"
    r"|DESTINATIONS|ROUTES|ACCOUNTS|STATS|KEYS|WHATSAPP|S3|PROXY|TOKEN|IMPORT|EXPORT|INIT|CONFIG|DB|DOCTOR|HEALTH|OPEN|BENCH|COMPLETION|VERSION)_(?!_)\w+)"
)

_APP: Final = "What an app defines counts where it is named, as in: oncehook serve app:inbox"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as `config show` prints it."""

    name: str
    value: object
    """As it may be shown: never a secret."""
    origin: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that was read and is valid."""

    config: Config
    origin: Path | None
    """The settings file, if any."""
    warnings: tuple[str, ...]
    _reader: SettingsReader = field(repr=False)

    def where(self, dotted: str) -> str:
        """Return where a setting comes from: `oncehook.toml:31`, `environment ONCEHOOK_STORE`, `flag --port`."""
        return self._reader.origin.where(_path(dotted))

    def place(self, path: SettingPath) -> str:
        """Return where a table was written: `oncehook.toml:31`."""
        return self._reader.origin.place(path)

    def is_from_file(self, dotted: str) -> bool:
        """Tell whether the file itself sets this, and nothing overrides it."""
        return self._reader.origin.line(_path(dotted)) > 0

    def problem(self, dotted: str, sentence: str) -> Problem:
        return self._reader.problem(_path(dotted), sentence)

    def tie(self, app: AppNames) -> None:
        """Raise ConfigError where a name in the file is defined neither there nor in the app."""
        raise_all([self._reader.problem(*finding) for finding in loose_ends(self.config, self._reader, app)])

    def settings(self) -> Iterator[Setting]:
        """Return all settings that have a value, with secrets by name."""
        return self._settings(Config, self.config, ())

    def digests(self) -> dict[str, str]:
        """Return a digest of each setting as shown, to find changes; never of a secret's value."""
        shown = ((setting.name, msgspec.json.encode(setting.value, enc_hook=str)) for setting in self.settings())
        return {name: blake2b(value, digest_size=8).hexdigest() for name, value in shown}

    def _settings(self, kind: type, table: object, path: SettingPath) -> Iterator[Setting]:
        for key, about in fields_with(kind, vars(table) if isinstance(table, Settings) else ()).items():
            value = getattr(table, about.attribute)
            here = (*path, key)
            origin = self._reader.origin.where(here)
            if about.form is None:
                yield from self._inner_settings(about, value, here)
            elif value not in (None, (), {}) or origin != "default":
                yield Setting(_join(here), about.form.show(value), origin)

    def _inner_settings(self, about: Field, value: Any, path: SettingPath) -> Iterator[Setting]:
        assert about.table is not None
        if about.shape is None:
            if value is not None:
                yield from self._settings(about.table, value, path)
            return
        for step, table in value.items() if isinstance(value, dict) else enumerate(value):
            yield from self._settings(about.table, table, (*path, step))


def load(
    path: Path | None = None,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    secrets: bool = True,
    whole: bool = True,
) -> Loaded:
    """Read the configuration. Raises ConfigError with one sentence per problem.

    `flags` come from the CLI, by dotted name (`{"server.port": 4021}`; None: not given). They are read here and not put
    over the result, so that the checks see the address that is really listened on (S28). With `secrets`, a missing or
    empty one is a problem (S4); without, only `reveal` raises. Without `whole`, an app may define more than the file:
    then a route may lead to a handler, and `Loaded.tie` checks names.
    """
    env = Environment(env)
    origin = find(path, cwd or Path.cwd())
    reader = SettingsReader(origin, env)
    variables = _override(reader, env, flags or {})
    config = reader.table(Config, origin.tree, ())
    check(config, reader)
    if secrets:
        _check_secrets(reader)
        _check_secret_key(config, env, reader)
        for name, destination in config.destination.items():
            check_surroundings(name, destination, reader)
    ends = list(loose_ends(config, reader, AppNames())) if whole else []
    for finding in ends:
        reader.note(*finding)
    raise_all(reader.problems, hint=_APP if ends else "")
    odd = [f"{origin.place(path)}: {sentence}" for path, sentence in warnings(config, reader)]
    return Loaded(config, origin.file, (*odd, *_odd_variables(env, variables, reader)), reader)


def _check_secrets(reader: SettingsReader) -> None:
    for path, secret in reader.secrets:
        try:
            value = secret.reveal()
            if path[0] == "encrypt":
                read_key(value)
        except ConfigError as error:
            reader.note(path, f"{error} {error.hint}".rstrip())


def _check_secret_key(config: Config, env: Mapping[str, str], reader: SettingsReader) -> None:
    """Note a key for stored secrets that is none."""
    from oncehook.settings.stored import open_vault

    try:
        open_vault(config.store, env)
    except ConfigError as error:
        reader.note((), f"environment {error} {error.hint}")


# -- what overrides the file -------------------------------------------------------------------


def _override(reader: SettingsReader, env: Mapping[str, str], flags: Mapping[str, object]) -> dict[str, SettingPath]:
    """Override the file by the environment, then by the flags; return the variables that are settings."""
    variables: dict[str, SettingPath] = {}
    for path, about in _reachable(Config, reader.origin.tree, ()):
        variable = "ONCEHOOK_" + "__".join(str(step).upper().replace("-", "_") for step in path)
        other = variables.setdefault(variable, path)
        if variable not in env:
            continue
        if other != path:
            reader.note((), f"environment {variable}: means both {_join(other)} and {_join(path)}")
        # the variable holds the secret itself, so the setting becomes a reference to it
        secret = about.form is not None and about.form.is_secret
        value = {"env": variable} if secret else parse_variable(env[variable])
        reader.origin.override(path, value, f"environment {variable}")
    for dotted, value in flags.items():
        if value is not None:
            reader.origin.override(_path(dotted), value, f"flag --{dotted.rpartition('.')[2].replace('_', '-')}")
    return variables


def _reachable(kind: type, tree: object, path: SettingPath) -> Iterator[tuple[SettingPath, Field]]:
    """Yield the names of all settings that can be overridden; sources and destinations are those of the file."""
    for key, about in fields_with(kind, tree if isinstance(tree, dict) else ()).items():
        here = (*path, key)
        if about.form is not None or about.table is None:
            yield here, about
            continue
        below = tree.get(key) if isinstance(tree, dict) else None
        if about.shape is None and (about.default is not None or below is not None or not path):
            yield from _reachable(about.table, below, here)
        elif isinstance(below, dict) and about.shape is dict:
            for name in below:
                yield from _reachable(about.table, below[name], (*here, name))


def _odd_variables(
    env: Mapping[str, str], variables: Mapping[str, SettingPath], reader: SettingsReader
) -> Iterator[str]:
    referenced = {secret.reference for _, secret in reader.secrets if secret.kind == "env"}
    for name in sorted(env.keys() - variables.keys() - referenced):
        if name.startswith("ONCEHOOK_") and not _OWN.fullmatch(name):
            near = nearest(name, variables)
            hint = f"; did you mean {near}?" if near else ""
            yield f"environment {name}: not a setting, so it changes nothing{hint}"


def _path(dotted: str) -> SettingPath:
    steps = dotted.split(".")
    # a source may be called "42"; only routes and tokens have numbers
    numbered = 1 if steps[0] == "route" else 2 if steps[:2] == ["server", "tokens"] else 0
    return tuple(int(step) if place == numbered and step.isdecimal() else step for place, step in enumerate(steps))


def _join(path: SettingPath) -> str:
    return ".".join(map(str, path))
