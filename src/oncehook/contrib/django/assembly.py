"""From `settings.ONCEHOOK` to the one inbox of this process, and the bridge that views and the admin go through."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from django.conf import settings

from oncehook.contrib.bridge import Bridge
from oncehook.contrib.django import conf
from oncehook.contrib.django.transactions import DjangoDestination
from oncehook.destinations.handler import TIMEOUT, Handler
from oncehook.errors import ConfigError
from oncehook.inbox import Inbox, name_of
from oncehook.settings import build, load

F = TypeVar("F", bound=Handler)


class DjangoInbox(Inbox):
    """The inbox of a Django project: `@inbox.on(…)` takes `atomic=True`, too."""

    takes_settings = False  # a file counts where CONFIG names it: for views and workers alike
    alias: str | None = None
    """Which of Django's databases its store is in, if it is in one."""
    url: str | None = None
    """That database's address."""

    def on(
        self,
        source: str,
        type: str | Sequence[str] = "*",
        *,
        atomic: bool = False,
        name: str | None = None,
        when: Mapping[str, str | Sequence[str]] | None = None,
        coalesce: bool | str | None = None,
        latest_wins: bool = False,
        on_dead: str = "continue",
        timeout: str | float = TIMEOUT,
        **terms: Any,
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
                chosen = build.terms_of(timeout=timeout, **terms)
                using = self._alias_for(called) if atomic else None
                self.add_destination(
                    DjangoDestination(called, handler, chosen, self.store, self._emitter, atomic=using)
                )
            plain = super(DjangoInbox, self).on(
                source, type, name=called, when=when, coalesce=coalesce, latest_wins=latest_wins, on_dead=on_dead
            )
            return plain(handler)

        return register

    def _alias_for(self, handler: str) -> str:
        if self.alias is None:
            raise ConfigError(
                f'Handler "{handler}" is atomic, and the store is not in a database of Django\'s.',
                hint='Write "STORE": "default" in settings.ONCEHOOK, or leave `atomic` out.',
            )
        return self.alias

    async def start(self, *, work: bool = True, only: Sequence[str] = (), concurrency: int = 1000) -> None:
        """See `Inbox.start`."""
        self._follow_database()
        await super().start(work=work, only=only, concurrency=concurrency)

    def _number(self) -> None:
        if not self.is_started:
            self._follow_database()
        super()._number()

    def _follow_database(self) -> None:
        """Be where Django's database is now: its test runner makes another one, after all apps are loaded."""
        url = None if self.alias is None else conf.store_url()
        if url is None or url == self.url:
            return
        from oncehook.store.postgres import PostgresStore

        assert isinstance(self.store, PostgresStore)
        # the same one to all who know it, at another address
        PostgresStore.__init__(self.store, url, cipher=self.store.cipher)
        self.url = url


@functools.cache
def the_inbox() -> DjangoInbox:
    """The inbox of this process."""
    given, url = conf.said(), conf.store_url()
    if "CONFIG" in given:
        file = beside_manage(given["CONFIG"])
        inbox = DjangoInbox.from_loaded(load(file, flags={"store": url}, whole=False))
    else:
        inbox = DjangoInbox(str(url), migrate=given.get("MIGRATE", True))
    inbox.store.cipher.take_over(build.cipher_of(given.get("ENCRYPT")))
    inbox.alias, inbox.url = conf.alias(), url
    for name, settings_ in given.get("SOURCES", {}).items():
        _said(f"SOURCES: {name}", inbox.source, name, **settings_)
    for name, settings_ in given.get("DESTINATIONS", {}).items():
        _said(f"DESTINATIONS: {name}", inbox.destination, name, **settings_)
    for route in given.get("ROUTES", ()):
        others = {key: value for key, value in route.items() if key != "from"}
        _said("ROUTES", inbox.route, route.get("from"), **others)
    return inbox


@functools.cache
def the_bridge() -> Bridge:
    """The way to it for whoever has no event loop; starts nothing yet."""
    return Bridge(the_inbox(), work=conf.said().get("WORK"))


def beside_manage(path: str | Path) -> Path:
    """Where a path of the settings leads: from BASE_DIR, if the project has one."""
    base = getattr(settings, "BASE_DIR", None)
    return Path(path) if base is None else Path(base) / path


def _said(where: str, take: Callable[..., object], name: object, **given: Any) -> None:
    try:
        take(name, **given)
    except TypeError as error:  # a key that does not exist
        raise ConfigError(f"settings.ONCEHOOK: {where}: {str(error).partition('() ')[2] or error}") from error
