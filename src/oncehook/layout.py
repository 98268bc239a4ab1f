"""The layout of an inbox: its store, sources, destinations and routes, and the verbs that add them.

Settings or a program's calls come in; which deliveries an event makes goes out. `inbox` brings it to life, and once it
is started nothing can be added. `assembly` makes the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, Unpack

from oncehook import assembly, routes, watermarks
from oncehook.assembly import Encrypt, SecretValue, TermSettings
from oncehook.categories import Classify, check_classify
from oncehook.config import Config, DestinationConfig, Loaded, Names, RetentionConfig, load
from oncehook.config.twice import Twice
from oncehook.destinations.base import Destination
from oncehook.destinations.handler import TIMEOUT, Handler, HandlerDestination
from oncehook.destinations.http import HttpDestination
from oncehook.destinations.receivers import ReceiverName
from oncehook.destinations.sender import SenderDestination, Unsure
from oncehook.emit import Emitter
from oncehook.errors import ConfigError
from oncehook.model import Arrival, Item, Planned
from oncehook.observe import Observer
from oncehook.secret import Secret
from oncehook.sources import Source, Splitter
from oncehook.store.base import Numbers, Store
from oncehook.verify import Verify

if TYPE_CHECKING:
    from oncehook.whatsapp.sender import Sender

D = TypeVar("D", bound=Destination)
F = TypeVar("F", bound=Handler)
C = TypeVar("C", bound=Classify)


class Layout:
    """What an inbox is made of. Programs know it as the part of `Inbox` that comes before the start."""

    takes_settings: ClassVar[bool] = True
    """Whether the settings of a file may count beside what a program says."""

    def __init__(self, store: str, *, migrate: bool = True, encrypt: Encrypt | None = None) -> None:
        """`encrypt`: the key under which payloads are kept, 32 random bytes as base64 or hex; a list while rotating."""
        self.store: Store = assembly.open_store(store, assembly.cipher_of(encrypt))
        self.store_url = store
        self.observer = Observer(self.store.engine.value)
        self.store.watch = self.observer.operation
        self.sources: dict[str, Source] = {}
        self.routes: list[routes.Route] = []
        self.destinations: dict[str, Destination] = {}
        self.classifiers: list[Classify] = []
        """What `classify` was given; shared by all handlers."""
        self.limits = watermarks.Limits()
        self.retention = RetentionConfig()
        self.settings: Loaded | None = None
        """The file that it was made from, or that counts beside what the program says."""
        self._migrate = migrate
        self._emitter = Emitter(self.store, self._deliveries, self.observer)
        self._routes_by_source: dict[str, list[routes.Route]] = {}
        self._numbered = -1
        """How many routes there were when names got their numbers."""

    @property
    def is_started(self) -> bool:
        """Whether it is at work: then nothing can be added any more."""
        return False

    @property
    def migrates(self) -> bool:
        """Whether a start brings the store's schema up to date."""
        return self._migrate

    # -- from settings -------------------------------------------------------------------------

    @classmethod
    def from_toml(cls, path: str | Path | None = None) -> Self:
        """The inbox that a configuration file describes: the given one, ./oncehook.toml, or [tool.oncehook].

        Handlers and whatever else a program adds count beside it; a route of the file may lead to a handler.
        """
        return cls.from_loaded(load(None if path is None else Path(path), whole=False))

    @classmethod
    def from_loaded(cls, loaded: Loaded) -> Self:
        """The inbox that a file describes, which it remembers."""
        inbox = cls.from_config(loaded.config)
        inbox.settings = loaded
        return inbox

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The inbox that checked settings describe."""
        inbox = cls(config.store, migrate=config.migrate, encrypt=config.encrypt)
        inbox._define(config)
        inbox.limits = assembly.limits_of(config.watermark)
        inbox.retention = config.retention
        return inbox

    def add_settings(self, loaded: Loaded, app: str = "the program") -> None:
        """Have a file's settings count beside what the program says. Raises ConfigError for what both say."""
        self._check_in_time("A file of settings")
        twice = Twice(loaded, app)
        twice.names("source", self.sources)
        twice.names("destination", self.destinations)
        twice.store(self.store_url, assembly.is_same_store(self.store_url, loaded.config.store))
        twice.encrypt(self.store.cipher, theirs := assembly.cipher_of(loaded.config.encrypt))
        limits, retention = assembly.both_limits(self.limits, loaded, twice), twice.retention(self.retention)
        twice.end()
        self.store.cipher.take_over(theirs)
        self._define(loaded.config)
        self.limits, self.retention, self.settings = limits, retention, loaded
        self._migrate = self._migrate and loaded.config.migrate

    def _define(self, config: Config) -> None:
        for name, settings in config.source.items():
            self.add(assembly.source_from(name, settings))
        for name, destination in config.destination.items():
            self.add_destination(assembly.destination_from(name, destination))
        self.routes += map(assembly.route_from, config.route)

    def check_names(self) -> None:
        """Raise ConfigError where a route, or a name in the file, leads nowhere."""
        if self.settings is not None:
            emitted = {route.source for route in self.routes}
            self.settings.tie(Names(self.sources, self.destinations, emitted))
        for route in self.routes:
            if route.destination not in self.destinations:
                raise ConfigError(f'A route from "{route.source}" leads to "{route.destination}", which is nowhere.')

    # -- sources -------------------------------------------------------------------------------

    def source(
        self,
        name: str,
        *,
        preset: str | None = None,
        verify: Verify | None = None,
        secret: SecretValue | Sequence[SecretValue] | None = None,
        secret_env: str | None = None,
        verify_token: str | None = None,
        verify_token_env: str | None = None,
        split: str | Splitter | None = None,
        **settings: Any,
    ) -> Source:
        """Add a source. Settings are those of `[source.NAME]`; durations and sizes may be words.

        Functions may stand for settings: `verify` is then given the arrival and a secret and says True for a genuine
        one, `split` is given the parsed body and the arrival and makes its parts, and `key`, `subject`, `type`,
        `event_time` and `preview` are given a `Sight`.

        >>> inbox.source("stripe", preset="stripe", secret_env="STRIPE_SECRET", subject="$.data.object.customer")
        """
        token = assembly.from_env(verify_token_env, name) if verify_token_env else (verify_token or "").encode()
        secrets = assembly.rotated_secrets(assembly.from_env(secret_env, name) if secret_env else secret)
        return self.add(
            assembly.source_of(
                name, preset, verify, secrets=secrets, verify_token=token or None, split=split, **settings
            )
        )

    def add(self, source: Source) -> Source:
        """Add a source that is already built. Raises ConfigError when its name or path is taken."""
        self._check_in_time(f'Source "{source.name}"')
        for other in self.sources.values():
            if source.name == other.name or source.path == other.path:
                raise ConfigError(f'Two sources are called "{source.name}" or share the path "{source.path}".')
        self.sources[source.name] = source
        return source

    def _check_in_time(self, added: str) -> None:
        if self.is_started:
            raise ConfigError(f"{added} comes too late: this inbox has been started.")

    # -- destinations and routes ---------------------------------------------------------------

    def on(
        self,
        source: str,
        type: str | Sequence[str] = "*",
        *,
        name: str | None = None,
        when: Mapping[str, str | Sequence[str]] | None = None,
        coalesce: bool | str | None = None,
        latest_wins: bool = False,
        on_dead: str = "continue",
        classify: Classify | None = None,
        **terms: Unpack[TermSettings],
    ) -> Callable[[F], F]:
        """Have a function handle events of a source: `def` or `async def`, given the `Event`, and `tx` if it takes one.

        The destination is called as the function is, unless `name` says otherwise. `terms` are those of
        `[destination.NAME]`: retry, timeout (60 s), lease, concurrency, rate, breaker, transient, permanent.
        `classify` is given what the function raised, and says which category that has; None: as the table says.

        >>> @inbox.on("whatsapp", "message.*", retry="quick")
        ... async def reply(event: Event) -> None: ...
        """

        def register(handler: F) -> F:
            called = name or name_of(handler)
            if not self._is_handled_by(called, handler):
                terms.setdefault("timeout", TIMEOUT)
                chosen = assembly.terms_of(**terms, classify=classify, shared=self.classifiers)
                self.add_destination(HandlerDestination(called, handler, chosen, self.store, self._emitter))
            self.route(
                source, called, when={"type": type, **(when or {})},
                coalesce=coalesce, latest_wins=latest_wins, on_dead=on_dead,
            )  # fmt: skip
            return handler

        return register

    def _is_handled_by(self, name: str, handler: Handler) -> bool:
        """Whether this very function is there already: one that handles several sources is one destination."""
        known = self.destinations.get(name)
        return isinstance(known, HandlerDestination) and known.handler is handler

    def classify(self, classify: C) -> C:
        """Have a function say which category an error of any handler has: `Category`, its word, or None.

        It is asked after a handler's own `classify`, in the order of adding; where all say None, the table decides.

        >>> @inbox.classify
        ... def by_type(error: Exception) -> Category | None:
        ...     return Category.transient if isinstance(error, StockLocked) else None
        """
        self._check_in_time("This classify function")
        self.classifiers.append(check_classify(classify))
        return classify

    def destination(
        self,
        name: str,
        *,
        url: str = "",
        url_env: str | None = None,
        path_env: str | None = None,
        sign: str | bytes | Sequence[str | bytes] | None = None,
        sign_env: str | None = None,
        headers: Mapping[str, str] | None = None,
        forward_headers: Sequence[str] = (),
        allow_private: bool | Sequence[str] = False,
        ca: Path | None = None,
        preset: ReceiverName | None = None,
        **terms: Unpack[TermSettings],
    ) -> Destination:
        """Add an HTTP destination. Settings are those of `[destination.NAME]`; durations and rates may be words.

        An address that is a secret is named by `url_env`, or by `url` and `path_env`: of such a one only the host is
        ever shown.

        >>> inbox.destination("n8n", url="https://n8n.example/webhook/abc", preset="n8n", permanent=[409])
        """
        secrets = [assembly.from_env(sign_env, name)] if sign_env else assembly.as_secrets(sign)
        if url and url_env:
            raise ConfigError(f'Destination "{name}" has both url and url_env; keep one of them.')
        kept = DestinationConfig(
            url=Secret.from_env(url_env, f"destination.{name}.url") if url_env else url,
            path=Secret.from_env(path_env, f"destination.{name}.path") if path_env else None,
        )
        return self.add_destination(
            HttpDestination(
                name,
                kept.whole_url() or "",
                is_secret=kept.is_secret,
                terms=assembly.terms_of(**terms),
                sign=secrets,
                headers=headers,
                forward_headers=forward_headers,
                allow_private=assembly.networks(allow_private),
                ca=ca,
                preset=preset,
            )
        )

    def sender(
        self, name: str, sender: Sender, *, unsure: Unsure = "retry", **terms: Unpack[TermSettings]
    ) -> SenderDestination:
        """Add a WhatsApp API as a destination: it is sent what is routed to it, and what is emitted under its name.

        `unsure="dead"` leaves a message of which nobody can tell whether it was sent to a person. `terms` are those of
        `[destination.NAME]`.

        >>> inbox.sender("answers", MetaCloud(token, phone_number_id), retry="quick")
        >>> await inbox.send_message("answers", Text(to="+55 11 99999-0001", text="On its way"), key="order-42")
        """
        terms.setdefault("timeout", sender.timeout)
        return self.add_destination(SenderDestination(name, sender, assembly.terms_of(**terms), unsure=unsure))

    def add_destination(self, destination: D) -> D:
        """Add a destination that is already built. Raises ConfigError when its name is taken."""
        self._check_in_time(f'Destination "{destination.name}"')
        if destination.name in self.destinations:
            raise ConfigError(f'Two destinations are called "{destination.name}".', hint="Give one of them a name.")
        self.destinations[destination.name] = destination
        return destination

    def route(
        self,
        source: str,
        to: str,
        *,
        when: Mapping[str, str | Sequence[str]] | None = None,
        coalesce: bool | str | None = None,
        latest_wins: bool = False,
        on_dead: str = "continue",
    ) -> routes.Route:
        """Send events of a source to a destination, if all of `when` holds. Settings are those of `[[route]]`."""
        if on_dead not in ("continue", "hold"):
            raise ConfigError('on_dead must be "continue" or "hold".')
        self.routes.append(routes.Route(source, to, when or {}, coalesce, latest_wins, on_dead))
        return self.routes[-1]

    # -- which deliveries an event makes ---------------------------------------------------------

    def _deliveries(self, arrival: Arrival, item: Item) -> Sequence[Planned]:
        found = self._routes_by_source.get(arrival.source)
        return routes.plan(found, arrival, item) if found else ()

    def _check_routes(self) -> None:
        self.routes += assembly.own_routes(self.destinations.values(), self.sources, self.routes)
        self.check_names()

    def _number(self) -> None:
        """Give every name its number where nobody has started this inbox: in a view, say, beside a worker elsewhere."""
        if not self.is_started and self._numbered != len(self.routes):
            self._check_routes()
            self._take_numbers(self.store.enroll_blocking(self.sources, self.destinations))

    def _take_numbers(self, numbers: Numbers) -> None:
        self._routes_by_source = assembly.numbered(numbers, self.sources, self.destinations, self.routes)
        self._numbered = len(self.routes)
        self.observer.volumes = {
            one.name: (one.number, one.volume) for one in self.sources.values() if one.volume is not None
        }


def name_of(handler: Handler) -> str:
    """What a handler's destination is called where nobody says otherwise."""
    return str(getattr(handler, "__name__", "handler"))
