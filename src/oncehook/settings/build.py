"""From settings to parts: store, sources and destinations, as the configuration or a program describes them.

`inbox` calls these with settings that were read. No other module names an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, Unpack

import msgspec

from oncehook.archive import Archive
from oncehook.bodies import Bodies
from oncehook.categories import Classify, FailureRules
from oncehook.destinations import registry
from oncehook.destinations.base import Destination, Terms
from oncehook.destinations.handler import TIMEOUT
from oncehook.destinations.http import HttpDestination
from oncehook.errors import ConfigError
from oncehook.model import AnyHeaders, Breaker, Engine, Headers
from oncehook.objects import FolderObjects, Objects, open_objects
from oncehook.routes import Route
from oncehook.secret import reveal_text
from oncehook.settings import EncryptConfig, Loaded, RetentionConfig, WatermarkConfig
from oncehook.settings.check import find_kinds, has_secret_address, read_address
from oncehook.settings.read import Problem, Settings, fields_of, raise_all, read_program
from oncehook.settings.tables import (
    BodiesConfig,
    BreakerSettings,
    HandlerSettings,
    ObjectsConfig,
    RouteSettings,
    TermSettings,
)
from oncehook.settings.values import hide_password
from oncehook.sources import Source
from oncehook.store.base import NameIds, Store
from oncehook.store.cipher import Cipher, read_key
from oncehook.upkeep import Limits

T = TypeVar("T")


# -- destinations and routes ---------------------------------------------------------------------


def destination_from(name: str, settings: Settings) -> Destination:
    for word in find_kinds(settings):
        kind = registry.find(word)
        assert kind is not None, "it was found when its table was read"
        return kind.build(name, getattr(settings, word), settings, terms_from(settings))
    url = read_address(settings)
    if url is None:
        raise ConfigError(f'Destination "{name}" has no url.', hint="A handler is written in Python: see Inbox.on.")
    return HttpDestination(
        name,
        url,
        is_secret=has_secret_address(settings),
        terms=terms_from(settings),
        sign=[secret.reveal() for secret in settings.sign],
        headers={header: reveal_text(value) for header, value in settings.headers.items()},
        forward_headers=settings.forward_headers,
        allow_private=settings.allow_private,
        allow_hosts=settings.allow_hosts,
        ca=settings.ca,
        preset=settings.preset,
    )


def terms_from(settings: Settings, classify: Classify | None = None, shared: Sequence[Classify] = ()) -> Terms:
    return Terms(
        retry=settings.retry,
        timeout=settings.timeout,
        lease=settings.lease,
        concurrency=settings.concurrency or Terms().concurrency,
        is_shared=settings.concurrency is not None,
        rate=settings.rate,
        fair=settings.fair,
        breaker=Breaker(**{name: getattr(settings.breaker, name) for name in fields_of(BreakerSettings)}),
        rules=FailureRules(frozenset(settings.transient), frozenset(settings.permanent), classify, shared),
        account=settings.account,
        subscribe=settings.subscribe,
        disable_after=settings.disable_after,
    )


def terms_of(
    name: str, *, classify: Classify | None = None, shared: Sequence[Classify] = (), **terms: Unpack[TermSettings]
) -> Terms:
    """Build the terms of a destination that a program defines. Raises ConfigError."""
    return terms_from(read_program(TermSettings, ("destination", name), terms), classify, shared)


def read_handler(name: str, settings: HandlerSettings) -> Settings:
    """Read a program's settings of a handler and of its route. Raises ConfigError."""
    read: Settings = read_program(HandlerSettings, ("destination", name), {"timeout": TIMEOUT, **settings})
    return read


def route_settings(settings: Settings) -> RouteSettings:
    """Return those of the settings that belong to a route."""
    given: Any = {name: value for name, value in vars(settings).items() if name in fields_of(RouteSettings)}
    return given  # type: ignore[no-any-return]


def own_routes(destinations: Iterable[Destination], sources: Collection[str], known: Sequence[Route]) -> list[Route]:
    """Return the routes of kinds that get what is emitted under their name, unless a source has that name."""
    named = [one.name for one in destinations if getattr(one, "has_own_route", False) and one.name not in sources]
    there = {route.source for route in known if route.source == route.destination}
    return [Route(name, name) for name in named if name not in there]


# -- a file beside an app ------------------------------------------------------------------------


class Comparison:
    """A comparison of a file with an app: a name or a setting that both define differently is an error."""

    def __init__(self, loaded: Loaded, app: str) -> None:
        self._loaded = loaded
        self._app = app
        self._problems: list[Problem] = []

    def names(self, kind: str, known: Collection[str]) -> None:
        """Note the names that both the file and the app define."""
        for name in getattr(self._loaded.config, kind):
            if name in known:
                self._note(f"{kind}.{name}", f"[{kind}.{name}] is defined by {self._app} too; give one another name")

    def store(self, mine: str, is_same: bool) -> None:
        """Note that the file names another store. The environment's is ignored: it may be meant for other programs."""
        if not is_same and self._loaded.is_from_file("store"):
            theirs = self._loaded.config.shown_store
            self._note("store", f"store is {theirs}, and {self._app} keeps its events in {hide_password(mine)}")

    def encrypt(self, mine: Cipher, theirs: Cipher) -> None:
        """Note that both set keys, and different ones."""
        if mine.has_keys and theirs.has_keys and mine != theirs:
            self._note("encrypt", f"encrypt is set by {self._app} too, to something else; say it once")

    def one_of(self, setting: str, mine: T, unsaid: T, theirs: T) -> T:
        """Return the value that the file or the app sets; where both do, they must agree."""
        if theirs in (unsaid, mine):
            return mine
        if mine != unsaid:
            self._note(setting, f"{setting} is set by {self._app} too, to something else; say it once")
        return theirs

    def retention(self, mine: RetentionConfig) -> RetentionConfig:
        theirs, unsaid = self._loaded.config.retention, RetentionConfig()
        chosen = {
            name: self.one_of(f"retention.{name}", getattr(mine, name), getattr(unsaid, name), getattr(theirs, name))
            for name in unsaid.__struct_fields__
        }
        return RetentionConfig(**chosen)

    def limits(self, mine: Limits) -> Limits:
        """Return the limits of the file and the app, merged."""
        theirs = limits_of(self._loaded.config.watermark)
        volumes: dict[str, Any] = {
            name: self.one_of(f"watermark.daily_volume.{name}", mine.daily_volume.get(name), None, limit)
            for name, limit in theirs.daily_volume.items()
        }
        single = {
            name: self.one_of(f"watermark.{name}", getattr(mine, name), None, getattr(theirs, name))
            for name in WatermarkConfig.__struct_fields__
            if name != "daily_volume"
        }
        return Limits(**single, daily_volume={**mine.daily_volume, **volumes})

    def end(self) -> None:
        """Raise ConfigError if anything was noted."""
        raise_all(self._problems, hint="File and app count together. Inbox.from_toml() begins with what the file says.")

    def _note(self, setting: str, sentence: str) -> None:
        self._problems.append(self._loaded.problem(setting, sentence))


# -- store and arrivals --------------------------------------------------------------------------


ENGINES: Final = {"sqlite": Engine.sqlite, "postgresql": Engine.postgres, "postgres": Engine.postgres}
"""Engines by the scheme of a store's address."""


def engine_of(url: str) -> Engine:
    """Return the engine that an address names. Raises ConfigError for one that is not known."""
    scheme = url.partition(":")[0]
    if scheme not in ENGINES:
        raise ConfigError(
            f"{scheme!r} is not a store this program knows.",
            hint="Write sqlite:./oncehook.db or postgresql://host/database.",
        )
    return ENGINES[scheme]


def open_store(url: str, cipher: Cipher | None = None) -> Store:
    """Build the store at an address. Nothing is opened yet."""
    if engine_of(url) is Engine.sqlite:
        from oncehook.store.sqlite import SqliteStore

        return SqliteStore(_file(url), cipher=cipher)
    from oncehook.store.postgres import PostgresStore

    return PostgresStore(url, cipher=cipher)


Encrypt: TypeAlias = str | bytes | Sequence[str | bytes] | Mapping[str, Any] | EncryptConfig
"""A key or several, or the settings' table of this name."""


def cipher_of(encrypt: Encrypt | None) -> Cipher:
    """Make the cipher that a program or checked settings describe. Raises ConfigError, without repeating a key."""
    if encrypt is None:
        return Cipher()
    if isinstance(encrypt, Mapping):
        encrypt = read_program(EncryptConfig, ("encrypt",), encrypt, is_program=False)
    if isinstance(encrypt, EncryptConfig):
        keys = [secret.reveal() for secret in encrypt.key]
        return Cipher([read_key(key) for key in keys], decrypt_only=encrypt.decrypt_only)
    if not encrypt:
        raise ConfigError("encrypt names no key.", hint="Leave it out to encrypt nothing.")
    given = [encrypt] if isinstance(encrypt, str | bytes) else encrypt
    return Cipher([read_key(key.encode() if isinstance(key, str) else key) for key in given])


ObjectsSetting: TypeAlias = str | Mapping[str, Any]
"""An address, or the settings' table."""

Place = TypeVar("Place", bound=ObjectsConfig)


def read_objects(kind: type[Place], name: str, given: ObjectsSetting | Place | None) -> Place | None:
    """Read what a program says about a place for objects. Raises ConfigError."""
    if given is None or isinstance(given, kind):
        return given
    table = given if isinstance(given, Mapping) else {"url": given}
    read: Place = read_program(kind, (name,), table, is_program=False)
    return read


def objects_of(config: ObjectsConfig) -> Objects:
    """Build the place that settings describe."""
    if "://" not in config.url:
        return FolderObjects(Path(config.url))
    given = ("endpoint", "region", "access_key", "secret_key", "allow_private")
    return open_objects(config.url, **{name: getattr(config, name) for name in given})


def bodies_of(config: BodiesConfig | None, url: str, store: Callable[[], Store]) -> Bodies:
    """Build the place of a store's large bodies; of a SQLite file, a folder beside it unless the settings name one."""
    if config is not None:
        return Bodies(store, objects_of(config), config.above)
    if engine_of(url) is Engine.sqlite:
        return Bodies(store, FolderObjects(bodies_beside(Path(_file(url)))))
    return Bodies(store, None)


def archive_of(config: ObjectsConfig | None, store: Store, bodies: Bodies) -> Archive | None:
    if config is None:
        return None
    Archive.check_library()
    return Archive(store, bodies, objects_of(config))


def bodies_beside(file: Path) -> Path:
    """Return the folder of the large bodies of a SQLite file."""
    return file.with_name(f"{file.name}-bodies")


def is_same_store(url: str, other: str) -> bool:
    """Tell whether two addresses lead to one store: that of a file can be written in several ways."""
    files = [Path(_file(one)).resolve() for one in (url, other) if one.startswith("sqlite:")]
    return url == other or (len(files) == 2 and files[0] == files[1])


def file_of(url: str) -> Path | None:
    """Return the file of a SQLite store; None for a server."""
    return Path(_file(url)) if engine_of(url) is Engine.sqlite else None


def _file(url: str) -> str:
    return url.partition(":")[2].removeprefix("//") or "./oncehook.db"


def limits_of(mark: WatermarkConfig) -> Limits:
    return Limits(**msgspec.structs.asdict(mark))


def assign_ids(
    numbers: NameIds, sources: Mapping[str, Source], destinations: Mapping[str, Destination], routes: Sequence[Route]
) -> dict[str, list[Route]]:
    """Assign the store's ids to sources and destinations; return the routes by source."""
    for source in sources.values():
        source.id = numbers.sources[source.name]
    for destination in destinations.values():
        destination.id = numbers.destinations[destination.name]
    by_source: dict[str, list[Route]] = {}
    for route in routes:
        route.destination_id = numbers.destinations[route.destination]
        known = sources.get(route.source)
        route.fix_options(known.base.coalesce if known else False)
        if (to := destinations.get(route.destination)) is not None:
            route.lead_to(to.terms)
        by_source.setdefault(route.source, []).append(route)
    return by_source


def as_headers(headers: AnyHeaders) -> Headers:
    """Return headers in an arrival's form: names in lower case, all bytes. Raises TypeError for what are none."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [(_as_bytes(name).lower(), _as_bytes(value)) for name, value in pairs]


def _as_bytes(part: str | bytes) -> bytes:
    if isinstance(part, bytes):
        return part
    if not isinstance(part, str):
        raise TypeError(f"Names and values of headers must be text or bytes, not {type(part).__name__}.")
    return part.encode("latin-1")
