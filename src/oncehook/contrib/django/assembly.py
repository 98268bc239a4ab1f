"""From `settings.ONCEHOOK` to the one inbox of this process, and the bridge that views and the admin go through."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack
from urllib.parse import quote, urlencode

from django.conf import settings
from django.db import connections

from oncehook.categories import Classify
from oncehook.contrib.bridge import Bridge
from oncehook.contrib.django.transactions import DjangoDestination
from oncehook.destinations.handler import TakesEvent, TakesTransaction
from oncehook.errors import ConfigError
from oncehook.human import nearest
from oncehook.inbox import Inbox, name_of
from oncehook.settings import build, load
from oncehook.settings.tables import BodiesConfig, HandlerSettings, ObjectsConfig

KEYS: Final = (
    *("STORE", "SCHEMA", "MIGRATE", "ENCRYPT", "BODIES", "ARCHIVE", "CONFIG", "WORK"),
    *("SOURCES", "DESTINATIONS", "ROUTES", "TRUSTED_PROXIES", "DASHBOARD"),
)
DEFAULT_ALIAS: Final = "default"

_SEARCH_PATH: Final = re.compile(r"(?:-c\s*|--)search_path=(?:\\.|\S)*")


def read_settings() -> dict[str, Any]:
    """Return `settings.ONCEHOOK`. Raises ConfigError for an unknown key."""
    given = getattr(settings, "ONCEHOOK", {})
    if not isinstance(given, dict):
        raise ConfigError("settings.ONCEHOOK must be a dict.")
    for key in given:
        if key not in KEYS:
            near = nearest(str(key).upper(), KEYS)
            raise ConfigError(
                f'settings.ONCEHOOK: unknown key "{key}".',
                hint=f'Did you mean "{near}"?' if near else f"Allowed: {', '.join(KEYS)}.",
            )
    return given


def alias() -> str | None:
    """Return the database of Django that holds the store; None where an address or the settings file names it."""
    given = read_settings()
    store = given.get("STORE", None if "CONFIG" in given else DEFAULT_ALIAS)
    if store is None or ":" in store:
        return None
    if store not in settings.DATABASES:
        raise ConfigError(
            f'settings.ONCEHOOK: STORE is "{store}", and DATABASES has none of that name.',
            hint="Name one of DATABASES, or write sqlite:./oncehook.db or postgresql://host/database.",
        )
    return str(store)


def store_url() -> str | None:
    """Return the store's address; None where the settings file has it."""
    name = alias()
    given = read_settings()
    return given.get("STORE") if name is None else database_url(name, given.get("SCHEMA", "oncehook"))


def database_url(alias: str, schema: str) -> str:
    """Return the address of one of Django's databases. Not cached: the test runner replaces the database."""
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ConfigError(
            f'settings.ONCEHOOK: the database "{alias}" is {connection.display_name}; the inbox needs PostgreSQL.',
            hint='Or give it a file of its own: "STORE": "sqlite:./oncehook.db", for one machine.',
        )
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    params = {key: str(value) for key, value in connection.get_connection_params().items() if key in known and value}
    # the search path is meant for the project's tables
    options = _SEARCH_PATH.sub("", params.pop("options", "")).strip()
    if role := connection.settings_dict["OPTIONS"].get("assume_role"):
        options = f"{options} -c role={role}".strip()
    if options:
        params["options"] = options
    user, password = quote(params.pop("user", ""), safe=""), quote(params.pop("password", ""), safe="")
    access = f"{user}:{password}@" if password else f"{user}@" if user else ""
    name = quote(params.pop("dbname", ""), safe="")
    params.pop("client_encoding", None)
    return f"postgresql://{access}/{name}?{urlencode({**params, 'schema': schema}, quote_via=quote)}"


F = TypeVar("F", bound=TakesEvent | TakesTransaction)


class DjangoInbox(Inbox):
    """The inbox of a Django project: `@inbox.on(…)` takes `atomic=True`, too."""

    takes_settings = False  # only a file that CONFIG names is read: the same for views and workers
    alias: str | None = None
    """The Django database that holds its store, if any."""

    def on(
        self,
        source: str,
        type: str | Sequence[str] = "*",
        *,
        atomic: bool = False,
        name: str | None = None,
        classify: Classify | None = None,
        **settings: Unpack[HandlerSettings],
    ) -> Callable[[F], F]:
        """Have a function handle events of a source: see `Inbox.on`.

        With `atomic` a `def` runs inside `transaction.atomic`, and what it writes commits together with the completion
        of its delivery, or not at all. The store must be in Django's own database for it.

        >>> @inbox.on("shop", "order.*", atomic=True)
        ... def keep(event: Event) -> None: ...
        """

        def register(handler: F) -> F:
            called = name or name_of(handler)
            if not self._is_handled_by(called, handler):
                terms = build.terms_from(build.read_handler(called, settings), classify, self.classifiers)
                using = self._alias_for(called) if atomic else None
                self.add_destination(DjangoDestination(called, handler, terms, self.emitter, atomic=using))
            return super(DjangoInbox, self).on(source, type, name=called, **settings)(handler)

        return register

    def _alias_for(self, handler: str) -> str:
        if self.alias is None:
            raise ConfigError(
                f'Handler "{handler}" is atomic, and the store is not in a database of Django\'s.',
                hint='Write "STORE": "default" in settings.ONCEHOOK, or leave `atomic` out.',
            )
        return self.alias

    async def start(self, *, work: bool = True, only: Sequence[str] = (), concurrency: int = 1000) -> None:
        self._follow_database()
        await super().start(work=work, only=only, concurrency=concurrency)

    def _register_names_blocking(self) -> None:
        if not self.is_started:
            self._follow_database()
        super()._register_names_blocking()

    def _follow_database(self) -> None:
        """Follow Django's database, which its test runner replaces after all apps are loaded."""
        url = None if self.alias is None else store_url()
        if url is not None and url != self.store_url:
            self.move_store(url)


@functools.cache
def get_inbox() -> DjangoInbox:
    given, url = read_settings(), store_url()
    if "CONFIG" in given:
        file = beside_manage(given["CONFIG"])
        inbox = DjangoInbox.from_loaded(load(file, flags={"store": url}, whole=False))
    else:
        inbox = DjangoInbox(str(url), migrate=given.get("MIGRATE", True))
    if "ENCRYPT" in given:
        inbox.cipher = build.cipher_of(given["ENCRYPT"])
    if "BODIES" in given:
        inbox.bodies_config = build.read_objects(BodiesConfig, "bodies", given["BODIES"])
    if "ARCHIVE" in given:
        inbox.archive_config = build.read_objects(ObjectsConfig, "archive", given["ARCHIVE"])
    inbox.alias = alias()
    for name, settings_ in given.get("SOURCES", {}).items():
        _apply(f"SOURCES: {name}", inbox.source, name, **settings_)
    for name, settings_ in given.get("DESTINATIONS", {}).items():
        _apply(f"DESTINATIONS: {name}", inbox.destination, name, **settings_)
    for route in given.get("ROUTES", ()):
        others = {key: value for key, value in route.items() if key != "from"}
        _apply("ROUTES", inbox.route, route.get("from"), **others)
    return inbox


@functools.cache
def get_bridge() -> Bridge:
    """Return the bridge to that inbox, for code without an event loop; start nothing yet."""
    return Bridge(get_inbox(), work=read_settings().get("WORK"))


def beside_manage(path: str | Path) -> Path:
    """Resolve a path of the settings, relative to BASE_DIR if the project has one."""
    base = getattr(settings, "BASE_DIR", None)
    return Path(path) if base is None else Path(base) / path


def _apply(where: str, take: Callable[..., object], name: object, **given: Any) -> None:
    try:
        take(name, **given)
    except TypeError as error:  # an unknown key
        raise ConfigError(f"settings.ONCEHOOK: {where}: {str(error).partition('() ')[2] or error}") from error
