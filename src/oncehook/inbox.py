"""The inbox: define sources, destinations and routes, then start, receive, work and stop.

Programs make one with `Inbox(store)` or `Inbox.from_toml()`, start it, and mount `asgi()`; the CLI and the dashboard do
the same and get everything they show from it. Before the start it only keeps the address of its store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar, Unpack

import msgspec

from oncehook import clock, portal, routes, upkeep
from oncehook.account_definitions import account_from, read_secrets
from oncehook.accounts import Account, AccountDirectory
from oncehook.admin import Admin
from oncehook.bodies import Bodies
from oncehook.categories import Classify, check_classify
from oncehook.define import Define
from oncehook.definitions import Definitions
from oncehook.destinations.base import Destination
from oncehook.destinations.handler import (
    Handler,
    HandlerDestination,
    TakesEvent,
    TakesTransaction,
    place_of,
    short_path,
)
from oncehook.errors import ConfigError, NotStarted, StoreUnavailable
from oncehook.human import nearest, suggest
from oncehook.ingest import ClosedReceiver, Emitter, Receipt, Receiver, draft
from oncehook.media import (
    MOST,
    KeptMedia,
    MediaAccess,
    MediaApi,
    MediaDestination,
    MediaFailed,
    MediaKeeper,
    MediaRoute,
    read_token,
    sweep_media,
)
from oncehook.model import (
    AnyHeaders,
    Arrival,
    BreakerChange,
    Category,
    Check,
    DefinitionChanges,
    EventId,
    Expired,
    Item,
    Planned,
    StoredEvent,
    StoredReplay,
    StoredWorker,
    digest,
)
from oncehook.observe import Observer
from oncehook.portal import LINK_SECONDS
from oncehook.reports import RunningReceiver
from oncehook.routes import Subscriptions, subscribers
from oncehook.settings import AppNames, Config, Loaded, RetentionConfig, ServerConfig, build, load
from oncehook.settings.build import Comparison, Encrypt, ObjectsSetting
from oncehook.settings.check import MISSPELT, check_destination
from oncehook.settings.read import Settings, read_program
from oncehook.settings.stored import Vault, open_vault
from oncehook.settings.tables import (
    BodiesConfig,
    DestinationArguments,
    DestinationSettings,
    HandlerSettings,
    MediaSettings,
    ObjectsConfig,
    RouteSettings,
    SourceArguments,
    TermSettings,
)
from oncehook.settings.values import check_origins
from oncehook.sources import Source
from oncehook.sources import build as build_source
from oncehook.store.base import NameIds, Store, StoreObserver, Taker
from oncehook.upkeep import Sweep
from oncehook.worker import Load, Worker

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from oncehook.traces import Traces
    from oncehook.web.asgi import Mount
    from oncehook.web.auth import Authorize
    from oncehook.whatsapp.destination import SenderDestination, Unsure
    from oncehook.whatsapp.messages import Message
    from oncehook.whatsapp.sender import Sender

log = logging.getLogger("oncehook.source")

D = TypeVar("D", bound=Destination)
F = TypeVar("F", bound=TakesEvent | TakesTransaction)
C = TypeVar("C", bound=Classify)


READY_FOR: Final = 1.0
"""Seconds for which one successful write counts for all readiness probes."""

READ_SECONDS: Final = 5.0
"""Seconds that a thread waits for the inbox's loop to read routes."""

DRAIN_SECONDS: Final = 25.0
"""Seconds that running attempts may take to end when the inbox stops."""


@dataclass(slots=True)
class RunningParts:
    """Parts of an inbox that are built on demand and ended by `stop`."""

    store: Store | None = None
    bodies: Bodies | None = None
    vault: Vault | None = None
    definitions: Definitions | None = None
    subscriptions: Subscriptions = field(default_factory=Subscriptions)
    routes_counted: int = -1
    """Number of routes when names got their ids."""
    receiver: Receiver | None = None
    accounts: AccountDirectory | None = None
    receiver_count: int = 0
    """Receivers of the server that this process only receives for; 0: it also does the upkeep."""
    worker: Worker | None = None
    build_worker: Callable[[], Worker] | None = None
    """Builds the worker of an inbox that works, once there is a destination."""
    load_by: Load | None = None
    starting: asyncio.Task[None] | None = None
    """The start of a worker whose first destination was stored while the inbox runs."""
    loop: asyncio.AbstractEventLoop | None = None
    """The loop on which it was started."""
    sweep: Sweep | None = None
    draining: bool = False
    left_behind: int = 0
    wrap: Callable[[Destination], Destination] = lambda destination: destination
    """Called with each destination that a worker is built for; tests record what would be sent."""


class StoreReports(StoreObserver):
    """Reports of a store, passed on to the inbox's observer and to its worker, if there is one."""

    def __init__(self, observer: Observer, parts: RunningParts, *, works: bool) -> None:
        self._observer = observer
        self._parts = parts
        self.works = works
        self.receiver_count = parts.receiver_count or 1

    @property
    def taker(self) -> Taker | None:  # type: ignore[override]
        worker = self._parts.worker
        return worker if worker is not None and worker.takes else None

    def wake(self, destination_ids: Collection[int] | None) -> None:
        if self._parts.worker is not None:
            self._parts.worker.wake(destination_ids)

    def note_commit(self, operation: str, seconds: float) -> None:
        self._observer.operation(operation, seconds)

    def note_finished(self, replay: StoredReplay) -> None:
        self._observer.replay_over(replay)

    def note_expired(self, expired: Expired) -> None:
        if self._parts.worker is not None:
            self._parts.worker.note_expired(expired)

    def note_breaker(self, change: BreakerChange) -> None:
        if self._parts.worker is not None:
            self._parts.worker.note_breaker(change)

    def note_definitions(self, changes: DefinitionChanges) -> None:
        assert self._parts.definitions is not None
        self._parts.definitions.note(changes)


class Inbox:
    """An inbox: sources, a store, destinations, and the routes between them."""

    takes_settings: ClassVar[bool] = True
    """Whether a file's settings are added to what a program defines."""

    def __init__(
        self,
        store: str = "sqlite:./oncehook.db",
        *,
        migrate: bool = True,
        encrypt: Encrypt | None = None,
        bodies: ObjectsSetting | BodiesConfig | None = None,
        archive: ObjectsSetting | ObjectsConfig | None = None,
    ) -> None:
        """`encrypt`: the key under which payloads are kept, 32 random bytes as base64 or hex; a list while rotating.

        `bodies`: where large bodies are kept, a bucket's address or a folder, as in the settings; `archive`: where
        events are written before they are pruned.
        """
        self.store_url = store
        self.cipher = build.cipher_of(encrypt)
        self.bodies_config = build.read_objects(BodiesConfig, "bodies", bodies)
        self.archive_config = build.read_objects(ObjectsConfig, "archive", archive)
        self.observer = Observer(build.engine_of(store).value)
        self.sources: dict[str, Source] = {}
        self.routes: list[routes.Route] = []
        self.destinations: dict[str, Destination] = {}
        self.places: dict[tuple[str, str], str] = {}
        """File and line of the program at which each source and destination was added, by kind and name."""
        self.signing_secrets: dict[str, list[str]] = {}
        """Names of the secrets that requests to a destination are signed with; never their values."""
        self.classifiers: list[Classify] = []
        """Functions given to `classify`, shared by all handlers."""
        self.limits = upkeep.Limits()
        self.retention = RetentionConfig()
        self.settings: Loaded | None = None
        """The file that it was built from, or whose settings were added."""
        self.traces: Traces | None = None
        """OpenTelemetry spans for arrivals and attempts; to be set before the start."""
        self.local_token = clock.random_bytes(32).hex()
        """For commands of the same user on this machine; new at every start, kept in the lock file only."""
        self.address = ""
        """Where the server of this process receives; empty where there is none."""
        self.emitter = Emitter(self)
        self._admin = Admin(self)
        self._parts = RunningParts()
        self._migrate = migrate
        self._ready_until = 0.0
        self._mounts: list[Mount] = []
        self._keepers: dict[str, MediaKeeper] = {}
        self._created_at = clock.now_utc()

    @property
    def store(self) -> Store:
        """Store at `store_url`: built when it is first asked for, opened by `start`."""
        if self._parts.store is None:
            self._parts.store = build.open_store(self.store_url, self.cipher)
        return self._parts.store

    @property
    def vault(self) -> Vault:
        """Encryption of stored secrets, with the keys of ONCEHOOK_SECRET_KEY. Raises ConfigError."""
        if self._parts.vault is None:
            self._parts.vault = open_vault(self.store_url)
        return self._parts.vault

    @property
    def define(self) -> Define:
        """Make, change and delete sources, destinations and routes while the inbox runs.

        >>> made = await inbox.define.source("trigger-4", preset="n8n", secret="generate")
        >>> made.address, made.secret
        """
        return Define(self)

    @property
    def bodies(self) -> Bodies:
        """Place of large bodies."""
        if self._parts.bodies is None:
            self._parts.bodies = build.bodies_of(self.bodies_config, self.store_url, lambda: self.store)
        return self._parts.bodies

    @property
    def admin(self) -> Admin:
        """Questions and acts of people and programs."""
        return self._admin

    def move_store(self, url: str) -> None:
        """Keep events at another address. Raises ConfigError once the inbox is started."""
        self._check_in_time("Another store")
        self.store_url, self._parts.store, self._parts.vault, self._parts.bodies = url, None, None, None

    @property
    def is_started(self) -> bool:
        """True once it can receive, and it is too late to add anything."""
        return self._parts.receiver is not None

    @property
    def migrates(self) -> bool:
        """True where a start migrates the store's schema."""
        return self._migrate

    # -- from settings -------------------------------------------------------------------------

    @classmethod
    def from_toml(cls, path: str | Path | None = None) -> Self:
        """Build the inbox that a configuration file describes: the given one, ./oncehook.toml, or [tool.oncehook].

        A program may add handlers and more; a route in the file may lead to such a handler.
        """
        return cls.from_loaded(load(None if path is None else Path(path), whole=False))

    @classmethod
    def from_loaded(cls, loaded: Loaded) -> Self:
        """Build the inbox that a loaded file describes."""
        inbox = cls.from_config(loaded.config)
        inbox.settings = loaded
        return inbox

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Build the inbox that checked settings describe."""
        inbox = cls(
            config.store, migrate=config.migrate, encrypt=config.encrypt, bodies=config.bodies, archive=config.archive
        )
        inbox._define(config)
        inbox.limits = build.limits_of(config.watermark)
        inbox.retention = config.retention
        return inbox

    def add_settings(self, loaded: Loaded, app: str = "the program") -> None:
        """Add a file's settings to what the program defines. Raises ConfigError where both define the same."""
        self._check_in_time("A file of settings")
        both = Comparison(loaded, app)
        both.names("source", self.sources)
        both.names("destination", self.destinations)
        both.store(self.store_url, build.is_same_store(self.store_url, loaded.config.store))
        both.encrypt(self.cipher, theirs := build.cipher_of(loaded.config.encrypt))
        limits, retention = both.limits(self.limits), both.retention(self.retention)
        bodies = both.one_of("bodies", self.bodies_config, None, loaded.config.bodies)
        archive = both.one_of("archive", self.archive_config, None, loaded.config.archive)
        both.end()
        if theirs.has_keys:
            self.cipher, self._parts.store = theirs, None
        self._define(loaded.config)
        self.limits, self.retention, self.settings = limits, retention, loaded
        self.bodies_config, self.archive_config, self._parts.bodies = bodies, archive, None
        self._migrate = self._migrate and loaded.config.migrate

    def _define(self, config: Config) -> None:
        for name, settings in config.source.items():
            self.add(Source(name, settings))
        for name, destination in config.destination.items():
            self._build_destination(name, destination)
        for index, one in enumerate(config.route):
            self._add_route(one.from_, one.to, **build.route_settings(one)).index = index

    def check_names(self) -> None:
        """Raise ConfigError where a route, or a name in the file, leads nowhere."""
        if self.settings is not None:
            emitted = {route.source for route in self.routes}
            self.settings.tie(AppNames(self.sources, self.destinations, emitted))
        for route in self.routes:
            destination = self.destinations.get(route.destination)
            if destination is None:
                raise ConfigError(
                    f'A route from "{route.source}" leads to "{route.destination}", which is nowhere.',
                    hint=suggest(route.destination, self.destinations),
                )
            # A program may emit under any name, so an unknown one is refused only where it looks misspelt.
            misspelt = route.source not in self.sources and route.source not in self.destinations
            if misspelt and (near := nearest(route.source, self.sources, MISSPELT)):
                place = f" ({place_of(destination.handler)})" if isinstance(destination, HandlerDestination) else ""
                raise ConfigError(
                    f'"{route.destination}" handles events of "{route.source}", and there is no such source{place}.',
                    hint=f'Did you mean "{near}"?',
                )

    # -- sources -------------------------------------------------------------------------------

    def source(self, name: str, **settings: Unpack[SourceArguments]) -> Source:
        """Add a source. Settings are those of `[source.NAME]`; durations and sizes may be words.

        `secret` and `verify_token` are given themselves, or `secret_env` and `verify_token_env` name their variables.
        Functions may replace settings: `verify` is then given the arrival and a secret and returns True for a genuine
        one, `split` is given the parsed body and the arrival and makes its parts, and `key`, `subject`, `type`,
        `event_time` and `preview` are given a `RuleContext`.

        >>> inbox.source("stripe", preset="stripe", secret_env="STRIPE_SECRET", subject="$.data.object.customer")
        """
        return self.add(build_source(name, **settings))

    def add(self, source: Source) -> Source:
        """Add a source that is already built. Raises ConfigError when its name or path is taken."""
        self._check_in_time(f'Source "{source.name}"')
        for other in self.sources.values():
            if source.name == other.name or source.path == other.path:
                raise ConfigError(f'Two sources are called "{source.name}" or share the path "{source.path}".')
        self.sources[source.name] = source
        self.places["source", source.name] = _find_caller()
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
        classify: Classify | None = None,
        **settings: Unpack[HandlerSettings],
    ) -> Callable[[F], F]:
        """Have a function handle events of a source: `def` or `async def`, given the `Event`, and `tx` if it takes one.

        The destination has the function's name, unless `name` is given. Settings are those that `[destination.NAME]`
        has for any kind (timeout: 60 s), and those of `[[route]]`. `classify` takes what the function raised and
        returns its category, or None to leave it to the table.

        >>> @inbox.on("whatsapp", "message.*", retry="quick")
        ... async def reply(event: Event) -> None: ...
        """

        check_source_name(source)

        def register(handler: F) -> F:
            called = name or name_of(handler)
            read = build.read_handler(called, settings)
            if not self._is_handled_by(called, handler):
                terms = build.terms_from(read, classify, self.classifiers)
                self.add_destination(HandlerDestination(called, handler, terms, self.emitter))
            routing = build.route_settings(read)
            routing["when"] = {"type": type, **routing.get("when", {})}
            route = self._add_route(source, called, **routing)
            if any(route.is_same(other) for other in self.routes[:-1]):
                raise ConfigError(
                    f'Handler "{called}" is registered twice for the same events of "{source}" ({place_of(handler)}).',
                    hint="Remove one of the decorators, or narrow one of them: a type, or `when`.",
                )
            return handler

        return register

    def _is_handled_by(self, name: str, handler: Handler) -> bool:
        """Tell whether this function is a destination already: with several sources it is still one destination."""
        known = self.destinations.get(name)
        return isinstance(known, HandlerDestination) and known.handler is handler

    def classify(self, classify: C) -> C:
        """Have a function classify errors of all handlers: it returns a `Category`, its word, or None.

        It is called after a handler's own `classify`, in the order of adding; where all return None, the table decides.

        >>> @inbox.classify
        ... def by_type(error: Exception) -> Category | None:
        ...     return Category.transient if isinstance(error, StockLocked) else None
        """
        self._check_in_time("This classify function")
        self.classifiers.append(check_classify(classify))
        return classify

    def destination(self, name: str, **settings: Unpack[DestinationArguments]) -> Destination:
        """Add an HTTP destination. Settings are those of `[destination.NAME]`; durations and rates may be words.

        A secret address is given by `url_env`, or by `url` and `path_env`: only its host is ever shown. `sign_env`
        names the variable of a key to sign with.

        >>> inbox.destination("n8n", url="https://n8n.example/webhook/abc", preset="n8n", permanent=[409])
        """
        read = read_program(DestinationSettings, ("destination", name), settings, check_destination)
        return self._build_destination(name, read)

    def _build_destination(self, name: str, settings: Settings) -> Destination:
        made = self.add_destination(build.destination_from(name, settings))
        self.signing_secrets[name] = [secret.name for secret in settings.sign]
        return made

    def sender(
        self, name: str, sender: Sender, *, unsure: Unsure = "retry", **terms: Unpack[TermSettings]
    ) -> SenderDestination:
        """Add a WhatsApp API as a destination, for events that are routed to it or emitted under its name.

        With `unsure="dead"`, a message that may or may not have been sent becomes a dead letter, for a person to
        decide. `terms` are those of `[destination.NAME]`.

        >>> inbox.sender("answers", MetaCloud(token, phone_number_id), retry="quick")
        >>> await inbox.send_message("answers", Text(to="+55 11 99999-0001", text="On its way"), key="order-42")
        """
        from oncehook.whatsapp.destination import SenderDestination

        terms.setdefault("timeout", sender.timeout)
        return self.add_destination(SenderDestination(name, sender, build.terms_of(name, **terms), unsure=unsure))

    def add_destination(self, destination: D) -> D:
        """Add a destination that is already built. Raises ConfigError when its name is taken."""
        self._check_in_time(f'Destination "{destination.name}"')
        if (other := self.destinations.get(destination.name)) is not None:
            places = [place_of(d.handler) for d in (other, destination) if isinstance(d, HandlerDestination)]
            where = f" ({', '.join(places)})" if places else ""
            raise ConfigError(
                f'Two destinations are called "{destination.name}"{where}.',
                hint="Give one of them a name of its own: `name=…`.",
            )
        self.destinations[destination.name] = destination
        self.places["destination", destination.name] = _find_caller()
        return destination

    def route(self, source: str | Sequence[str], to: str, **settings: Unpack[RouteSettings]) -> None:
        """Send events of a source, or of several, to a destination, if all of `when` holds. Settings are those of
        `[[route]]`."""
        sources = [source] if isinstance(source, str) else list(source)
        if not sources or not all(isinstance(one, str) for one in sources):
            raise ConfigError(
                "`inbox.route` needs the name of a source, or a list of names.",
                hint=f'Write inbox.route("stripe", "{to}").',
            )
        for one in sources:
            self._add_route(one, to, **settings)

    def _add_route(self, source: str, to: str, **settings: Unpack[RouteSettings]) -> routes.Route:
        self.routes.append(routes.Route(source, to, **settings))
        return self.routes[-1]

    # -- which deliveries an event makes ---------------------------------------------------------

    def plan_deliveries(self, arrival: Arrival, item: Item) -> Sequence[Planned]:
        """Return the deliveries that one event of an arrival makes."""
        definitions = self.definitions
        found = definitions.routes.get(arrival.source)
        if self._parts.subscriptions or definitions.version:
            found = [*(found or ()), *self._find_subscriptions(arrival.source, item)]
        return routes.plan(found, arrival, item) if found else ()

    def _find_subscriptions(self, source: str, item: Item) -> list[routes.Route]:
        """Return the subscriptions that an event may match: of its account, and of destinations without one."""
        found: list[routes.Route] = []
        for account in (None,) if item.account is None else (None, item.account):
            found += self._parts.subscriptions.of(account)
            found += self.definitions.routes.get(subscribers(account), ())
        return [one for one in found if routes.is_meant(one, source, item)]

    def _complete_routes(self) -> None:
        self._route_media()
        self.routes += build.own_routes(self.destinations.values(), self.sources, self.routes)
        self.check_names()

    def _register_names_blocking(self) -> None:
        """Assign the store's ids to all names in an inbox that is not started: in a view, say, beside a worker
        elsewhere."""
        if not self.is_started and self._parts.routes_counted != len(self.routes):
            self._complete_routes()
            self._assign_ids(self.store.register_names_blocking(self.sources, self.destinations))

    def _assign_ids(self, numbers: NameIds) -> None:
        self.definitions.set_own(build.assign_ids(numbers, self.sources, self.destinations, self.routes))
        subscribed = (routes.subscription_routes(one.name, one.id, one.terms) for one in self.destinations.values())
        self._parts.subscriptions = Subscriptions(chain.from_iterable(subscribed))
        self._parts.routes_counted = len(self.routes)
        self.observer.destination_ids = {one.name: one.id for one in self.destinations.values()}
        for source in self.sources.values():
            source.keep_keys_for(self.retention.keep_keys)
        self.observer.source_ids = {one.name: one.id for one in self.sources.values()}
        self.observer.volumes = {
            one.name: (one.id, one.volume) for one in self.sources.values() if one.volume is not None
        }

    async def _load_accounts(self, names: Sequence[str]) -> Mapping[str, Account]:
        """Look accounts up by their names, and load the subscriptions of their destinations."""
        if not self.definitions.version:
            return {}
        found = await self.store.find_accounts(names)
        await self.definitions.load_routes([subscribers(one.name) for one in found.values()])
        return {name: account_from(self.vault, one) for name, one in found.items() if one.is_enabled}

    def _knows_account(self, account: str | None) -> bool:
        """Tell whether what is known of an account can be used: no change is missed, its subscriptions are loaded."""
        return self.definitions.is_current and (account is None or self.definitions.has_routes(subscribers(account)))

    # -- starting and stopping -----------------------------------------------------------------

    async def start(self, *, work: bool = True, only: Sequence[str] = (), concurrency: int = 1000) -> None:
        """Open the store, assign its ids to all names, and be ready to receive and to work.

        Without `work`, deliveries are recorded for a worker elsewhere; `only` names the destinations to work for.
        """
        self._complete_routes()
        at_work = [d for d in self.destinations.values() if work and (not only or d.name in only)]
        parts, store = self._parts, self.store
        await self._open_store(works=work)
        try:
            await self.bodies.open()
            self._assign_ids(await store.register_names(self.sources, self.destinations))
            await self.definitions.start()
            receiver = Receiver if self.traces is None else self.traces.receiver
            parts.accounts = AccountDirectory(self._load_accounts, self._knows_account, read_secrets)
            more = (self._revive, self.definitions, parts.accounts, self.bodies)
            parts.receiver = receiver(self.sources, store, self.plan_deliveries, self.observer, *more)
            parts.sweep = None if parts.receiver_count else self._build_sweep(works=work)
            if work:
                await store.note_recipients({d.id: digest(d.address.encode()) for d in at_work})
                parts.build_worker = lambda: self._build_worker(at_work, only, concurrency)
                if at_work or self.definitions.version:
                    await self._start_worker(parts.build_worker())
        except BaseException:
            await store.close()
            raise
        if parts.sweep is None:
            return
        parts.sweep.start()
        for source in self.sources.values():
            for warning, hint in source.secret_warnings():
                log.warning("source.secret", extra={"fields": {"warning": warning, "hint": hint}})
        for name in sorted({route.source for route in self.routes} - self.sources.keys() - self.destinations.keys()):
            hint = "Only events that the program emits under this name reach its routes."
            log.info("source.emitted_only", extra={"fields": {"source": name, "hint": hint}})

    def _build_worker(self, at_work: Sequence[Destination], only: Sequence[str], concurrency: int) -> Worker:
        async def load(ids: Collection[int]) -> dict[int, Destination]:
            found = await self.definitions.load_destinations(ids)
            found = {id_: one for id_, one in found.items() if not only or one.name in only}
            if found:
                await self.store.note_recipients({id_: digest(d.address.encode()) for id_, d in found.items()})
                self.observer.destination_ids |= {one.name: id_ for id_, one in found.items()}
            return {id_: self._wrap(one) for id_, one in found.items()}

        priorities = routes.priorities_of(self.routes)
        wrapped = map(self._wrap, at_work)
        worker = Worker(
            self.store,
            wrapped,
            self.observer,
            concurrency=concurrency,
            priorities=priorities,
            bodies=self.bodies,
        )
        if self.definitions.version:
            worker.load_by(load)
        self._parts.load_by = load
        return worker

    def _wrap(self, destination: Destination) -> Destination:
        return self._parts.wrap(destination if self.traces is None else self.traces.destination(destination))

    async def _start_worker(self, worker: Worker) -> None:
        self._parts.worker = worker
        self.observer.worker = worker.id
        await worker.start()

    # -- definitions that are stored while it runs ---------------------------------------------

    def note_changed(self, destination_ids: Collection[int] | None) -> None:
        """Have the worker load stored destinations anew; begin to work where there was nothing to work for before."""
        parts = self._parts
        if parts.worker is not None:
            if parts.load_by is not None:
                parts.worker.load_by(parts.load_by)
            parts.worker.forget(destination_ids)
        elif parts.build_worker is not None and destination_ids is not None and not parts.draining:
            worker = parts.worker = parts.build_worker()
            if parts.load_by is not None:
                worker.load_by(parts.load_by)
            parts.starting = asyncio.get_running_loop().create_task(self._start_worker(worker))

    def note_source(self, source: Source) -> None:
        source.keep_keys_for(self.retention.keep_keys)
        self.observer.source_ids[source.name] = source.id
        if source.volume is not None:
            self.observer.volumes[source.name] = (source.id, source.volume)

    async def load_routes(self, sources: Collection[str]) -> None:
        if self.is_started:
            await self.definitions.load_routes(sources)
        elif self.store.lends_transactions:
            await asyncio.to_thread(self.definitions.load_routes_blocking, sources)

    def load_routes_blocking(self, sources: Collection[str]) -> None:
        if not self.is_started:
            self.definitions.load_routes_blocking(sources)
        elif (loop := self._parts.loop) is not None and not all(map(self.definitions.has_routes, sources)):
            # On a thread of a running inbox: its loop alone changes what is loaded.
            asyncio.run_coroutine_threadsafe(self.definitions.load_routes(sources), loop).result(READ_SECONDS)

    async def find_source(self, name: str) -> Source | None:
        """Return a source by its name: the inbox's own, or a stored one."""
        return await self.definitions.find_source(name)

    async def catch_up(self, version: int) -> None:
        if self.is_started:
            await self.definitions.catch_up(version)

    def note_accounts(self, accounts: Collection[str] | None, *, is_over: bool) -> None:
        if self._parts.accounts is not None:
            self._parts.accounts.forget(accounts, is_over=is_over)

    async def _open_store(self, *, works: bool) -> None:
        self._parts.definitions = Definitions(self)
        self._parts.vault = self.vault  # now, because a key that is none must not be found out by each request
        self._parts.loop = asyncio.get_running_loop()
        reports = StoreReports(self.observer, self._parts, works=works)
        await self.store.open(reports, migrate=self._migrate)

    def _build_sweep(self, *, works: bool) -> Sweep:
        return Sweep(
            self.store,
            self.observer,
            keep_events=self.read_keep_events,
            otherwise=self.retention.keep_events,
            measure=self.admin.watermarks,
            works_for=self.destinations if works else None,
            worker=self._describe_worker,
            write_counts=self._write_all_counts,
            sweep_objects=self._sweep_objects,
            archive=build.archive_of(self.archive_config, self.store, self.bodies),
            find_patience=self._find_patience,
        )

    async def _sweep_objects(self) -> None:
        await self.bodies.sweep()
        await sweep_media(self.store, self.bodies)

    async def _find_patience(self, names: Collection[str]) -> dict[str, tuple[int, float]]:
        known = (await self.definitions.find_destinations(names)).values()
        return {one.name: (one.id, after) for one in known if (after := one.terms.disable_after) is not None}

    async def read_keep_events(self) -> dict[int, float]:
        """Return how long events are kept, in seconds by source id, of the sources that say it."""
        kept = {s.id: keep for s in self.sources.values() if (keep := s.settings.keep_events) is not None}
        return {**await self.definitions.read_keep_events(), **kept}

    # -- media ---------------------------------------------------------------------------------

    def media_keeper(self, source: str) -> MediaKeeper | None:
        """Return what fetches and keeps the files of events of one of its own sources; None where the preset knows no
        files."""
        known = self.sources.get(source)
        if known is None or known.base.media_api is None:
            return None
        if source not in self._keepers:
            self._keepers[source] = self._build_keeper(known, known.base.media_api)
        return self._keepers[source]

    def _build_keeper(self, source: Source, api: MediaApi) -> MediaKeeper:
        settings = source.settings.media or read_program(MediaSettings, ("source", source.name, "media"), {})
        is_customers = source.account is not None and source.name not in self.sources
        return MediaKeeper(
            api,
            lambda: self.bodies,
            lambda: self.store,
            lambda account: self._media_access(source, api, settings, account),
            account=source.account,
            # A customer may define it, and a file is read into memory.
            most=min(settings.max_size, MOST) if is_customers else settings.max_size,
            types=settings.types,
            allow_private=settings.allow_private,
        )

    async def _media_access(
        self, source: Source, api: MediaApi, settings: Any, account: str | None = None
    ) -> MediaAccess:
        """Return what a source's files are fetched with: its own settings, or those of a sender of the same API.

        An account's source uses senders of this account alone; any other, those of the event's account, then those of
        nobody.
        """
        token, url = settings.token, settings.url
        # Whoever defines a stored source names any address; only a token that is given with it may go there.
        if token is None and (url is None or source.name in self.sources):
            accounts = [source.account] if source.account is not None else list(dict.fromkeys([account, None]))
            for owner in accounts:
                if (found := await self._find_access(api, owner)) is not None:
                    token, address = found
                    url = url or (address if "url" in api.needs else None)
                    break
        if token is None and api.signs_with_token and source.secrets:
            token = source.secrets[0].decode("ascii", "replace")
        return MediaAccess(read_token(token), url)

    async def _find_access(self, api: MediaApi, account: str | None) -> tuple[Any, str] | None:
        """Return key and address of a sender of an API that belongs to an account; None: to nobody."""
        own = [one for one in self.destinations.values() if one.terms.account == account]
        for destination in chain(own, await self.definitions.find_senders(account)):
            theirs, key, address = getattr(destination, "media_access", ("", None, ""))
            if theirs == api.api and key is not None:
                return key, address
        return None

    async def keep_media(self, event: StoredEvent) -> list[KeptMedia]:
        """Return the files that an event refers to; those that are not kept yet are fetched from their provider."""
        if (keeper := self.media_keeper(event.source)) is not None:
            return await keeper.keep(event)
        source = await self.definitions.find_source(event.source, is_enabled=False)
        return [] if source is None else await self._keep_media(source, event)

    async def keep_stored_media(self, event: StoredEvent) -> None:
        source = await self.definitions.find_source(event.source, is_enabled=False)
        if source is None or source.settings.media is None:
            raise MediaFailed("its source keeps no media any more", Category.permanent)
        await self._keep_media(source, event)

    async def _keep_media(self, source: Source, event: StoredEvent) -> list[KeptMedia]:
        """Keep the files of an event of a source that may change at any time: nothing of it is remembered."""
        if source.base.media_api is None:
            return []
        keeper = self._build_keeper(source, source.base.media_api)
        try:
            return await keeper.keep(event)
        finally:
            await keeper.close()

    def _route_media(self) -> None:
        """Add the destination that keeps media, and its route, for each source that asks for it."""
        for source in self.sources.values():
            name = f"{source.name}-media"
            if source.settings.media is None or isinstance(self.destinations.get(name), MediaDestination):
                continue
            if self.bodies.objects is None:
                raise ConfigError(
                    f'Source "{source.name}" keeps media, and there is no place for them.',
                    hint='Set bodies = "s3://bucket/prefix", or a folder.',
                )
            keeper = self.media_keeper(source.name)
            assert keeper is not None, "its settings were checked"
            self.add_destination(MediaDestination(name, source.name, keeper.keep, keeper.close))
            self.routes.append(MediaRoute(source.name, name, keeper.api))

    def wind_down(self) -> None:
        """Begin to stop: report not ready, and begin no new attempts."""
        self._parts.draining = True
        if self._parts.worker is not None:
            self._parts.worker.quiesce()

    async def stop(self, patience: float = DRAIN_SECONDS) -> None:
        """Receive nothing more, let running attempts end, commit what was received, and close the store."""
        parts = self._parts
        parts.draining = True
        if parts.starting is not None:
            await asyncio.wait([parts.starting])
        parts.build_worker = parts.starting = None
        if parts.worker is not None:
            await parts.worker.stop(patience)
            parts.left_behind = parts.worker.left_behind
            with contextlib.suppress(StoreUnavailable):
                await self.store.dismiss_worker(parts.worker.id)
            parts.worker = None
        if parts.sweep is not None:
            await parts.sweep.stop()
            parts.sweep = None
            self.observer.sum_up()
            await self.write_counts(is_last=True)
            await self._write_refusals(is_last=True)
        if parts.accounts is not None:
            await parts.accounts.close()
        await self.definitions.stop()
        for keeper in self._keepers.values():
            await keeper.close()
        await self.bodies.close()
        await self.store.close()
        parts.receiver = parts.loop = None

    @property
    def definitions(self) -> Definitions:
        """Return its own definitions and those that are stored while it runs."""
        if self._parts.definitions is None:
            self._parts.definitions = Definitions(self)
        return self._parts.definitions

    @property
    def worker(self) -> Worker | None:
        """Worker of this process, while there is one."""
        return self._parts.worker

    @property
    def receivers(self) -> Sequence[RunningReceiver]:
        """Processes that take arrivals in for this one, as they last reported."""
        return [receiver for _, receiver in sorted(self.observer.receivers.items())]

    @property
    def draining(self) -> bool:
        """True from the moment it begins to stop."""
        return self._parts.draining

    @property
    def left_behind(self) -> int:
        """Threads that were at work when it stopped."""
        return self._parts.left_behind

    @contextlib.asynccontextmanager
    async def running(
        self, *, work: bool = True, only: Sequence[str] = (), concurrency: int = 1000
    ) -> AsyncIterator[Inbox]:
        """Start it, and stop it whatever happens: `async with inbox.running():`. See `start`."""
        await self.start(work=work, only=only, concurrency=concurrency)
        try:
            yield self
        finally:
            await self.stop()

    @contextlib.asynccontextmanager
    async def receiving(self, receiver_count: int) -> AsyncIterator[Inbox]:
        """Run it as one of several receivers of a server, whose main process works and does the upkeep."""
        self._parts.receiver_count = receiver_count
        async with self.running(work=False):
            yield self

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """Run it for as long as a host application: `FastAPI(lifespan=inbox.lifespan)`."""
        async with self.running():
            yield

    def announce(self, address: str) -> None:
        """Let commands on this machine find the server that owns a SQLite store."""
        self.store.announce(address, self.local_token)

    # -- working -------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Return when everything is done that this inbox's worker can do, retries included."""
        if self._parts.worker is None:
            raise ConfigError("Nothing works here.", hint="Start the inbox with its worker, and with a destination.")
        await self._parts.worker.wait_until_drained()

    def nudge(self) -> None:
        """Feed bulk replays now, because one was started or resumed."""
        if self._parts.sweep is not None:
            self._parts.sweep.nudge()

    def _describe_worker(self) -> StoredWorker | None:
        return None if self._parts.worker is None else self._parts.worker.describe(self._created_at)

    async def _revive(self, event_id: EventId) -> None:
        """Revive an event's dead letters because a duplicate arrived, where its source asks for that (R22)."""
        await self.admin.revive(event_id, actor="sender", reason="a copy arrived")

    # -- taking in -----------------------------------------------------------------------------

    @property
    def receiver(self) -> Receiver:
        """Receiver of arrivals; while the inbox is not started, one that asks every sender to try again."""
        if self._parts.receiver is None:
            return ClosedReceiver(self.sources, self.store, self.plan_deliveries, self.observer)
        return self._parts.receiver

    def asgi(self) -> Mount:
        """Return an ASGI application to mount: `app.mount("/hooks", inbox.asgi())` gives POST /hooks/{source}."""
        from oncehook.web.asgi import Mount

        self._mounts.append(made := Mount(self))
        return made

    def dashboard(self, *, authorize: Authorize, frame_ancestors: Sequence[str] = ()) -> ASGIApp:
        """Return dashboard and API, to mount in another: `app.mount("/inbox", inbox.dashboard(authorize=staff))`.

        `authorize` is given each request and says who makes it: a name for the audit log and the role "viewer",
        "operator" or "admin", as `("anna", "operator")`; a role alone; or None for nobody. The API is at `api/v1`, the
        portal of customers at `portal`: `inbox.portal_link(42, url="https://app.example.org/inbox")`. The sites of
        `frame_ancestors` may show the portal in a frame.
        """
        sites = check_origins(frame_ancestors)
        from oncehook.web.asgi import WhileStarted
        from oncehook.web.dashboard import dashboard
        from oncehook.web.live import Broadcast

        self.observer.audience = stream = Broadcast()
        app = dashboard(self, stream, authorize=authorize, ways_in=self._mounts, frame_ancestors=sites)
        return WhileStarted(self, app)

    def portal_link(
        self, account: str | int, *, name: str = "", expires: str | float = LINK_SECONDS, url: str = ""
    ) -> str:
        """Return a link to the portal: the dashboard narrowed to an account, for your customer to open, or to be shown
        in a frame. It works once, within `expires`. `name` is that of the person, for the audit log.

        The link begins with `url`, with that of `[server.portal]`, or with the address of the server. Raises
        SecretKeyMissing without ONCEHOOK_SECRET_KEY, which signs it.

        >>> inbox.portal_link(42, url="https://hooks.example.org")
        """
        server = ServerConfig() if self.settings is None else self.settings.config.server
        known = url or (server.portal.url if server.portal is not None else None) or self.address
        if not known:
            known = f"http://{f'[{server.host}]' if ':' in server.host else server.host}:{server.port}"
        return known.rstrip("/") + portal.make_link(self.vault, account, name, expires)

    async def receive(
        self,
        source: str,
        headers: AnyHeaders,
        body: bytes,
        *,
        query: bytes = b"",
        peer: str = "",
        account: str | int = "",
    ) -> Receipt:
        """Receive one arrival from a route of one's own. The receipt holds the reply to send.

        `account` is what would stand in the address, for a source with `account = "address"`. Raises TypeError for a
        body that is not bytes.
        """
        if not isinstance(body, bytes):
            raise TypeError(f"The body must be bytes as they came, not {type(body).__name__}: signatures cover them.")
        arrival = Arrival(source, build.as_headers(headers), body, query, "POST", "", peer, str(account))
        return await self.receiver.receive(arrival)

    async def emit(
        self,
        source: str,
        type: str,
        payload: object,
        *,
        key: str | None = None,
        subject: str | None = None,
        account: str | int | None = None,
    ) -> str:
        """Store an event of one's own and route it like any other; return its id, or that of the first one with its
        key.

        `source` names where it comes from ("app") and need not be configured as a source of arrivals. `account` is the
        id of whom it belongs to: key and subject count within it, and its destinations may subscribe to it.
        """
        if not self.is_started:
            raise NotStarted
        return await self.emitter.emit(draft(source, type, payload, key, subject, account=account))

    async def emit_in(
        self,
        tx: Any,
        source: str,
        type: str,
        payload: object,
        *,
        key: str | None = None,
        subject: str | None = None,
        account: str | int | None = None,
    ) -> str:
        """Emit in a transaction of your own (PostgreSQL): the event exists if, and only if, that commits.

        `tx` is psycopg's `AsyncConnection`, or SQLAlchemy's. The inbox need not be started. Emit last: the rows it
        touches are locked until you commit.
        """
        await asyncio.to_thread(self._register_names_blocking)
        return await self.emitter.emit_in(tx, draft(source, type, payload, key, subject, account=account))

    def emit_in_blocking(
        self,
        tx: Any,
        source: str,
        type: str,
        payload: object,
        *,
        key: str | None = None,
        subject: str | None = None,
        account: str | int | None = None,
    ) -> str:
        """Emit like `emit_in`, in code without `await`: `tx` is psycopg's `Connection`, Django's, or SQLAlchemy's."""
        self._register_names_blocking()
        return self.emitter.emit_in_blocking(tx, draft(source, type, payload, key, subject, account=account))

    async def send_message(self, destination: str, message: Message, *, key: str | None) -> str:
        """Emit a message to a sender: kept, retried, and sent once per key unless a person replays it.

        Messages to one recipient are sent in order. `key=None` must be written out: then nothing prevents sending it
        twice. Returns the event's id, or that of the first one with this key. Raises InvalidMessage for what could
        never be sent.
        """
        from oncehook.whatsapp.destination import SenderDestination
        from oncehook.whatsapp.messages import type_of

        if not self.is_started:
            raise NotStarted
        sender = self.destinations.get(destination)
        there = any(route.destination == destination for route in self.definitions.routes.get(destination, ()))
        if not isinstance(sender, SenderDestination) or not there:
            raise ConfigError(f'Nothing that is emitted as "{destination}" goes to a sender of that name.')
        subject = sender.subject_of(message)
        return await self.emit(destination, type_of(message), msgspec.json.encode(message), key=key, subject=subject)

    # -- looking after itself ------------------------------------------------------------------

    def kept_for(self) -> Mapping[str, float]:
        """Return for how many seconds finished events are kept: by source, and as "" for all others."""
        own = {name: keep for name, one in self.sources.items() if (keep := one.settings.keep_events) is not None}
        return {"": self.retention.keep_events, **own}

    async def write_counts(self, *, is_last: bool = False) -> None:
        """Write the counts of rejections, of volume and of how attempts went, outside the commits of arrivals and
        settlements: a flood of forgeries costs few fsyncs, and charts cost the hot path nothing."""
        rejections, counts = self.observer.take_counts(everything=is_last)
        if not counts:
            return
        with contextlib.suppress(StoreUnavailable):
            await self.store.record_rejections(rejections, counts)

    async def _write_refusals(self, *, is_last: bool = False) -> None:
        """Audit how often somebody used a wrong token or password (S34)."""
        if detail := self.observer.refusals.take(is_last=is_last):
            try:
                await self.store.audit("unknown", "refused", "access", detail)
            except StoreUnavailable:
                self.observer.refusals.put_back(detail)

    async def _write_all_counts(self) -> None:
        await self.write_counts()
        await self._write_refusals()

    async def troubles(self) -> dict[str, str]:
        """Return what keeps this inbox from receiving, by name; empty when it is ready."""
        if self._parts.draining:
            return {"inbox": "stopping"}
        now = asyncio.get_running_loop().time()
        if now < self._ready_until:
            return {}
        try:
            await asyncio.wait_for(self.store.ping(), 2.0)
        except (StoreUnavailable, TimeoutError) as error:
            return {"store": str(error) or "does not answer"}
        self._ready_until = now + READY_FOR
        return {}

    async def metrics(self) -> bytes:
        """Return the metrics for Prometheus."""
        size: int | None = None
        with contextlib.suppress(StoreUnavailable, OSError):
            size = await self.store.size()
            self.observer.levels(await self.store.levels(), len(await self.store.workers()))
        return self.observer.exposition(size)

    async def check(self) -> list[Check]:
        """Check the store's conservation laws and its large bodies, for `doctor`."""
        return [*await self.store.check(), *await self.bodies.check()]


def _find_caller() -> str:
    """Return the line of the program that called this module: `shop.py:18`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def check_source_name(source: object) -> None:
    """Refuse anything but a name, such as the function under a decorator without parentheses."""
    if isinstance(source, str):
        return
    place = f" ({place_of(source)})" if callable(source) else ""
    raise ConfigError(
        f"`inbox.on` needs the name of a source{place}.", hint='Write @inbox.on("stripe"), with parentheses.'
    )


def name_of(handler: Handler) -> str:
    """Return the default name of a handler's destination."""
    return str(getattr(handler, "__name__", "handler"))
