"""Definitions as data: from settings as somebody gives them to what is stored, and from there to parts.

The tables, checks and sentences are those of the file. Settings are stored as given, so that they are read anew with
every start; those that hold a secret are kept apart, encrypted under ONCEHOOK_SECRET_KEY (`Vault`).
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from oncehook import clock
from oncehook.destinations.base import Destination, Terms
from oncehook.destinations.event_address import is_event_address
from oncehook.errors import ConfigError, Forbidden, InvalidSettings, SecretKeyMissing, Undecryptable
from oncehook.human import seconds, show_duration, show_size
from oncehook.model import Noun, StoredDefinition
from oncehook.private import open_private
from oncehook.routes import Route, subscription_routes
from oncehook.secret import SHORTEST_SECRET, OldSecret, read_until
from oncehook.settings import build
from oncehook.settings.check import check_destination, check_surroundings, find_gaps, find_kinds, is_unverified
from oncehook.settings.read import Problem, Settings, SettingsReader, label, program_reader
from oncehook.settings.tables import DestinationSettings, RouteTable, SourceSettings, TermSettings
from oncehook.settings.values import NAME, NAME_FORM
from oncehook.sources import Source, scheme_of
from oncehook.store.cipher import Cipher, read_key
from oncehook.verify.development import development_keys
from oncehook.verify.schemes import Scheme, is_public

TABLES: Final = {Noun.source: SourceSettings, Noun.destination: DestinationSettings, Noun.route: RouteTable}
SECRET_OF: Final = {Noun.source: "secret", Noun.destination: "sign"}
"""The setting that is generated and rotated."""
GENERATE: Final = "generate"
HIDDEN: Final = "(set)"
_PLACEHOLDER: Final = re.compile(r"\(set(, until [^)]*)?\)")
VARIABLE: Final = "ONCEHOOK_SECRET_KEY"


# -- secrets at rest ---------------------------------------------------------------------------


class Vault:
    """Encryption of the secrets in stored definitions, and keys derived from theirs. Without a key none is stored."""

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    @property
    def has_key(self) -> bool:
        return self._cipher.encrypts

    def derive_keys(self, purpose: bytes) -> list[bytes]:
        """Return keys to sign with for another purpose: the first one signs, all verify. Raises SecretKeyMissing."""
        if not self._cipher.encrypts:
            raise SecretKeyMissing("There is no key to sign this with.")
        return self._cipher.derive_keys(purpose)

    def encrypt(self, noun: Noun, name: str, secrets: Mapping[str, Any]) -> bytes | None:
        """Encrypt the secret settings of a definition, bound to its name. Raises SecretKeyMissing."""
        if not secrets:
            return None
        if not self._cipher.encrypts:
            raise SecretKeyMissing
        return self._cipher.encrypt(json.dumps(secrets).encode(), "secrets", _row(noun, name))

    def decrypt(self, definition: StoredDefinition) -> dict[str, Any]:
        """Return the secret settings of a definition. Raises Undecryptable."""
        if not definition.secrets:
            return {}
        try:
            plain = self._cipher.decrypt(definition.secrets, "secrets", _row(definition.noun, definition.name))
            read: dict[str, Any] = json.loads(plain)
        except (Undecryptable, ValueError) as error:
            raise Undecryptable(
                f"The secrets of {definition.noun} {definition.name} cannot be read here: {error}",
                hint=f"Add the key that they were stored under to {VARIABLE}; the first one encrypts, all decrypt.",
            ) from None
        return read


def _row(noun: Noun, name: str) -> bytes:
    return f"{noun}\0{name}".encode()


def open_vault(store_url: str, env: Mapping[str, str] = os.environ) -> Vault:
    """Return the vault with the keys of the environment, or else of the file beside a SQLite store.

    Raises ConfigError for what is no key, without repeating it.
    """
    texts = [text for text in re.split(r"[\s,]+", env.get(VARIABLE, "")) if text]
    if not texts and (file := key_file(store_url)) is not None and file.exists():
        with os.fdopen(open_private(file, os.O_RDONLY), encoding="ascii", errors="replace") as opened:
            texts = opened.read().split()
    try:
        return Vault(Cipher([read_key(text.encode()) for text in texts]))
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}: {error}", hint=error.hint) from None


def key_file(store_url: str) -> Path | None:
    """Return the file beside a SQLite store that may hold its key; None for a server's."""
    file = build.file_of(store_url)
    return None if file is None else file.with_name(file.name + ".key")


def make_key_file(store_url: str, env: Mapping[str, str] = os.environ) -> Path | None:
    """Make a key beside a SQLite store, unless one is given: for a demonstration, and a server without settings."""
    file = key_file(store_url)
    if file is None or env.get(VARIABLE):
        return None
    with suppress(OSError):  # there is one, or the folder cannot be written, which the store tells when it opens
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(open_private(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as opened:
            opened.write(base64.b64encode(clock.random_bytes(32)).decode() + "\n")
        return file
    return None


# -- from what is given ------------------------------------------------------------------------


@dataclass(slots=True)
class DefinitionDraft:
    """Settings of one definition, read and checked."""

    noun: Noun
    name: str
    public: dict[str, Any]
    """Settings as given, without those that hold a secret."""
    secret: dict[str, Any] = field(repr=False)
    """Settings that hold a secret."""
    read: Settings
    privileged: Sequence[str]
    """Settings that reach into the server: for unscoped admins only."""
    generated: str | None = field(default=None, repr=False)
    """The secret that was made for it, to be told once."""
    source: Source | None = None

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """Source and destination of a route."""
        return (self.read.from_, self.read.to) if self.noun is Noun.route else (None, None)


def read_draft(noun: Noun, name: str, given: Mapping[str, Any], *, is_scoped: bool = False) -> DefinitionDraft:
    """Read settings as somebody gives them, and check them as a whole. Raises InvalidSettings.

    `is_scoped`: they come from somebody who is limited to one account. What reaches into the server is refused then,
    before any of it is looked at: an error about a variable or a file would tell of it. Raises Forbidden.
    """
    given = {key: value for key, value in given.items() if value is not None}
    _check_data(noun, name, given)
    generated: str | None = None
    if (key := SECRET_OF.get(noun)) is not None and given.get(key) == GENERATE:
        generated = generate_secret(noun, name, given)
        given[key] = generated
    reader = program_reader()
    read = _read(noun, name, given, reader, is_scoped=is_scoped)
    source: Source | None = None
    if read is not None:
        _check_secrets(noun, name, given, read, reader)
    if noun is Noun.destination and not reader.problems:
        check_surroundings(name, read, reader)
    if not reader.problems:
        try:
            source = _try_parts(noun, name, read)
        except ConfigError as error:
            reader.problems.append(Problem(0, "", f"{error}; {error.hint}" if error.hint else str(error)))
    if reader.problems:
        raise InvalidSettings([_show_problem(one) for one in reader.problems])
    secret = set(_find_secret(noun, read, reader))
    return DefinitionDraft(
        noun,
        name,
        {key: value for key, value in given.items() if key not in secret},
        {key: given[key] for key in given if key in secret},
        read,
        find_privileged(noun, read, reader),
        generated,
        source,
    )


def _check_data(noun: Noun, name: str, given: Mapping[str, Any]) -> None:
    """Refuse a name that is none, and what cannot be stored: functions and objects of a program."""
    if noun is not Noun.route and not NAME.fullmatch(name):
        raise InvalidSettings(
            [{"setting": "name", "error": f'"{name}" is not a name for a {noun}', "hint": f"use {NAME_FORM}"}]
        )
    wrong = [key for key, value in given.items() if not _is_data(value)]
    if wrong:
        hint = "functions and objects belong into a program: inbox.source(…), inbox.on(…)"
        raise InvalidSettings([{"setting": key, "error": f"{key} cannot be stored", "hint": hint} for key in wrong])


MOST_OF_ACCOUNTS: Final[Mapping[Noun, Mapping[str, tuple[int, Callable[[int], str]]]]] = {
    Noun.source: {"max_body": (16 << 20, show_size), "budget": (30, show_duration)},
    Noun.destination: {"concurrency": (50, str), "timeout": (60, show_duration), "lease": (600, show_duration)},
}
"""The most that whoever is limited to one account may ask of what all share, and how to print it."""


def _is_data(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_data(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    return value is None or isinstance(value, str | int | float | bool)


def _read(
    noun: Noun, name: str, given: Mapping[str, Any], reader: SettingsReader, *, is_scoped: bool = False
) -> Settings:
    path = ("route", 0) if noun is Noun.route else (noun.value, name)
    given = {key: revive(value) if key in SECRET_OF.values() else value for key, value in given.items()}
    read: Settings = reader.read(TABLES[noun], given, path)
    if is_scoped and read is not None:
        check_scope(find_privileged(noun, read, reader))
        for key, (most, show_value) in MOST_OF_ACCOUNTS.get(noun, {}).items():
            if (getattr(read, key) or 0) > most:
                limit = f"{key} is at most {show_value(most)} here"
                reader.note((*path, key), f"{limit}; only an admin of the whole inbox may give more")
    if read is not None and not reader.problems:
        if noun is Noun.destination:
            check_destination(name, read, reader)
        elif noun is Noun.source:
            for setting, sentence in find_gaps(name, read):
                reader.note((noun.value, name, setting), sentence)
    return read


def _check_secrets(noun: Noun, name: str, given: Mapping[str, Any], read: Settings, reader: SettingsReader) -> None:
    """Note words that stand for a secret where one itself is wanted: everybody knows them; and what is too short."""
    for key in dict.fromkeys(_find_secret(noun, read, reader)):
        for text in _find_texts(given.get(key)):
            if text == GENERATE:
                alone = f'write {key} = "{GENERATE}" alone, or rotate it' if key == SECRET_OF[noun] else "choose one"
                reader.note((noun.value, name, key), f'{key} cannot be "{GENERATE}" here; {alone}')
            elif _PLACEHOLDER.fullmatch(text):
                sentence = f'{key} is "{text}", which only shows that it is set; leave it out to keep it'
                reader.note((noun.value, name, key), sentence)
            elif key == "secret" and len(text) < SHORTEST_SECRET:
                reader.note((noun.value, name, key), f"{key} must have {SHORTEST_SECRET} characters or more")


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _find_texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _find_texts(one)


def _try_parts(noun: Noun, name: str, read: Settings) -> Source | None:
    """Build what the settings describe, because some errors show only then. Raises ConfigError."""
    if noun is Noun.source:
        return Source(name, read)
    if noun is Noun.destination:
        made = build.destination_from(name, read)
        subscription_routes(name, 0, made.terms)
    else:
        Route(read.from_, read.to, **build.route_settings(read))
    return None


def _show_problem(problem: Problem) -> dict[str, str]:
    error, _, hint = problem.sentence.partition("; ")
    return {"setting": problem.setting, "error": error, "hint": hint}


def _find_secret(noun: Noun, read: Settings, reader: SettingsReader) -> Iterator[str]:
    """Yield the settings that hold a secret itself, and not a reference to one."""
    at = 2  # after the noun and the name
    yield from (str(path[at]) for path, secret in reader.secrets if secret.kind == "program")
    if noun is Noun.source:
        yield "path"
    if noun is Noun.destination and read.headers:
        yield "headers"


def find_privileged(noun: Noun, read: Settings, reader: SettingsReader) -> list[str]:
    """Return the settings that reach into the server or past its guards, which only unscoped admins may give."""
    at = 2
    found = [str(path[at]) for path, secret in reader.secrets if secret.kind != "program"]
    if noun is Noun.source:
        found += ["path"] if read.path is not None else []
        found += ["verify"] if is_unverified(read) else []
        found += ["media"] if read.media is not None and read.media.allow_private else []
    if noun is Noun.destination:
        found += [key for key in ("allow_private", "allow_hosts", "ca") if getattr(read, key)]
        found += ["url"] if is_event_address(read.url) else []
        found += ["kind"] if read.kind is not None else find_kinds(read)
    return list(dict.fromkeys(found))


def check_scope(privileged: Sequence[str]) -> None:
    """Refuse settings that reach into the server to whoever is limited to one account. Raises Forbidden."""
    if privileged:
        raise Forbidden(
            f"{', '.join(privileged)}: only an admin of the whole inbox may give {_THIS[len(privileged) > 1]}.",
            hint="Give a secret itself, or have it generated; leave out what reaches into the server.",
        )


_THIS: Final = ("this", "these")

# -- making and rotating secrets -----------------------------------------------------------------


def generate_secret(noun: Noun, name: str, given: Mapping[str, Any]) -> str:
    """Make a secret that fits the verifier of a source, or one that a destination's requests are signed with.

    Raises InvalidSettings where the sender must make it.
    """
    if noun is Noun.destination:
        return "whsec_" + base64.b64encode(clock.random_bytes(32)).decode()
    scheme = _scheme_of(name, given)
    if scheme is None:  # its settings are wrong, and will be refused for that
        return clock.random_bytes(32).hex()
    if is_public(scheme):
        hint = "copy the key from the sender's own pages"
        raise InvalidSettings(
            [{"setting": "secret", "error": "the sender makes this one, it cannot be generated here", "hint": hint}]
        )
    return development_keys(scheme).secrets[0].decode()


def _scheme_of(name: str, given: Mapping[str, Any]) -> Scheme | None:
    reader = program_reader()
    read = reader.read(SourceSettings, {**given, "secret": clock.random_bytes(32).hex()}, ("source", name))
    if reader.problems or read is None:
        return None
    with suppress(ConfigError):
        return scheme_of(read)
    return None


def rotate(old: Any, new: str, overlap: float, now: datetime) -> list[Any]:
    """Return the secrets of which the first is new and the others end after `overlap` seconds, or as they would."""
    ends_at = now + timedelta(seconds=overlap)
    kept: list[Any] = []
    for one in old if isinstance(old, list) else [old]:
        value = one if isinstance(one, dict) else {"value": one}
        until = min(read_until(value["until"]), ends_at) if "until" in value else ends_at
        if until > now and overlap > 0:
            kept.append({**value, "until": until.isoformat()})
    return [new, *kept]


def revive(value: Any) -> Any:
    """Return secrets as a program gives them: `{"value": …, "until": …}` becomes an OldSecret."""
    if isinstance(value, list | tuple):
        return [revive(one) for one in value]
    if isinstance(value, Mapping) and "value" in value:
        return OldSecret(str(value["value"]), value["until"]) if "until" in value else value["value"]
    return value


def ends_at(value: Any) -> list[datetime]:
    """Return when the secrets of a setting end, those that do."""
    listed = value if isinstance(value, list | tuple) else [value]
    return [read_until(one["until"]) for one in listed if isinstance(one, Mapping) and "until" in one]


# -- from what is stored -----------------------------------------------------------------------


def all_settings(vault: Vault, definition: StoredDefinition) -> dict[str, Any]:
    """Return the settings of a definition with its secrets. Raises Undecryptable."""
    return {**public_settings(definition), **vault.decrypt(definition)}


def source_from(vault: Vault, definition: StoredDefinition) -> Source:
    """Build a stored source. Raises ConfigError, Undecryptable."""
    made = Source(definition.name, _read_stored(vault, definition))
    made.id = definition.id
    made.generation = generation_of(definition)
    return made


def read_keep_events(definitions: Iterable[StoredDefinition]) -> dict[int, float]:
    """Return how long events of stored sources are kept, in seconds by source id, where they say it."""
    kept = {}
    for one in definitions:
        with suppress(ConfigError):
            kept[one.id] = seconds(show(one)["keep_events"])
    return kept


def generation_of(definition: StoredDefinition) -> str:
    """Return what tells a definition from an earlier one of the same name, which was deleted."""
    return definition.created_at.astimezone(UTC).isoformat()


def destination_from(vault: Vault, definition: StoredDefinition) -> tuple[Destination, datetime | None]:
    """Build a stored destination; also return when it must be built anew, because a secret ends.

    Raises ConfigError, Undecryptable.
    """
    given = all_settings(vault, definition)
    now = clock.now_utc()
    ends = [end for end in ends_at(given.get("sign")) if end > now]
    if isinstance(given.get("sign"), list):
        given["sign"] = [
            one["value"] if isinstance(one, dict) and "value" in one else one
            for one in given["sign"]
            if not isinstance(one, dict) or "until" not in one or read_until(one["until"]) > now
        ]
    made = build.destination_from(definition.name, _check_read(definition, given))
    made.id = definition.id
    return made, min(ends, default=None)


def route_from(definition: StoredDefinition, coalesce: bool | str) -> Route:
    """Build a stored route. `coalesce`: its source's default. Raises ConfigError."""
    read = _check_read(definition, public_settings(definition))
    made = Route(read.from_, read.to, destination_id=definition.id, **build.route_settings(read))
    made.fix_options(coalesce)
    if definition.led_to is not None:
        made.lead_to(_routing_terms(read.to, definition.led_to))
    return made


def routes_from(definition: StoredDefinition, coalesce: bool | str) -> list[Route]:
    """Build the routes of a stored route, or of a destination that subscribes. Raises ConfigError."""
    if definition.noun is Noun.route:
        return [route_from(definition, coalesce)]
    return subscription_routes(definition.name, definition.id, _routing_terms(definition.name, definition.settings))


def _routing_terms(destination: str, settings: str) -> Terms:
    """Return the terms of a stored destination that decide which events it gets, and how. Raises ConfigError.

    Its address and secrets are not needed for that, and the address may be missing because it is a secret.
    """
    kept = json.loads(settings)["given"]
    given = {key: value for key, value in kept.items() if key in ("account", "fair", "subscribe")}
    reader = program_reader()
    read = reader.read(TermSettings, given, ("destination", destination))
    if reader.problems:
        raise ConfigError("\n".join(map(str, reader.problems)))
    return build.terms_from(read)


def _read_stored(vault: Vault, definition: StoredDefinition) -> Settings:
    return _check_read(definition, all_settings(vault, definition))


def _check_read(definition: StoredDefinition, given: Mapping[str, Any]) -> Settings:
    reader = program_reader()
    read = _read(definition.noun, definition.name, given, reader)
    if reader.problems:
        raise ConfigError("\n".join(map(str, reader.problems)))
    return read


def encode(draft: DefinitionDraft) -> str:
    """Encode the settings of a draft as they are stored in clear: of secrets only that they are set, and their end."""
    return json.dumps({"given": draft.public, "hidden": hide_all(draft.secret)})


def public_settings(definition: StoredDefinition) -> dict[str, Any]:
    """Return the settings of a definition that hold no secret, as given."""
    given: dict[str, Any] = json.loads(definition.settings)["given"]
    return given


def hide_all(secret: Mapping[str, Any]) -> dict[str, Any]:
    return {key: hide(value) for key, value in secret.items()}


def show(definition: StoredDefinition) -> dict[str, Any]:
    """Return the settings of a definition as they may be shown, without a key."""
    kept = json.loads(definition.settings)
    return {**kept["given"], **kept["hidden"]}


def hide(value: Any) -> Any:
    """Return what may be shown of a secret setting."""
    if isinstance(value, list | tuple):
        return [hide(one) for one in value]
    if isinstance(value, Mapping):
        if "value" in value:
            return f"{HIDDEN[:-1]}, until {value['until']})" if "until" in value else HIDDEN
        return {key: hide(one) for key, one in value.items()}
    return HIDDEN


def restore(given: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as somebody gives them back after they were shown: what was hidden is what is kept."""
    return {key: _restore(value, kept[key]) if key in kept else value for key, value in given.items()}


def _restore(value: Any, kept: Any) -> Any:
    if value == hide(kept):
        return kept
    if isinstance(value, Mapping) and isinstance(kept, Mapping):
        return restore(value, kept)
    return value


def title(noun: Noun, name: str) -> str:
    """Return the heading of a definition in TOML."""
    return label(("route", 0) if noun is Noun.route else (noun.value, name))
