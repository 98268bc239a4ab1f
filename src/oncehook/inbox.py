"""The inbox: define sources, destinations and routes, then start, receive, work and stop.

Programs make one with `Inbox(store)` or `Inbox.from_toml()`, start it, and mount `asgi()`; the CLI and the dashboard do
the same and get everything they show from it. Before the start it only keeps the address of its store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar, Unpack

import msgspec

from oncehook import clock, routes, upkeep
from oncehook.admin import Admin
from oncehook.categories import Classify, check_classify
from oncehook.destinations.base import Destination
from oncehook.destinations.handler import Handler, HandlerDestination
from oncehook.errors import ConfigError, NotStarted, StoreUnavailable
from oncehook.ingest import ClosedReceiver, Emitter, Receipt, Receiver, draft
from oncehook.model import Arrival, Check, EventId, Expired, Headers, Item, Planned, StoredReplay, StoredWorker, digest
from oncehook.observe import Observer
from oncehook.reports import RunningReceiver
from oncehook.settings import AppNames, Config, Loaded, RetentionConfig, build, load
from oncehook.settings.build import Comparison, Encrypt
from oncehook.settings.check import check_destination
from oncehook.settings.read import read_program
from oncehook.settings.tables import (
    DestinationArguments,
    DestinationSettings,
    HandlerSettings,
    RouteSettings,
    SourceArguments,
    TermSettings,
)
from oncehook.sources import Source
from oncehook.sources import build as build_source
from oncehook.store.base import NameIds, Store, StoreObserver, Taker
from oncehook.upkeep import Sweep
from oncehook.worker import Worker

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
F = TypeVar("F", bound=Handler)
C = TypeVar("C", bound=Classify)


READY_FOR: Final = 1.0
"""Seconds for which one successful write counts for all readiness probes."""

DRAIN_SECONDS: Final = 25.0
"""Seconds that running attempts may take to end when the inbox stops."""


@dataclass(slots=True)
class RunningParts:
    """Parts of an inbox that are built on demand and ended by `stop`."""

    store: Store | None = None
    routes: Mapping[str, list[routes.Route]] = field(default_factory=dict)
    """Routes by source, once every name has its id in the store."""
    routes_counted: int = -1
    """Number of routes when names got their ids."""
    receiver: Receiver | None = None
    receiver_count: int = 0
    """Receivers of the server that this process only receives for; 0: it also does the upkeep."""
    worker: Worker | None = None
    sweep: Sweep | None = None
    draining: bool = False
    left_behind: int = 0


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


class Inbox:
    """An inbox: sources, a store, destinations, and the routes between them."""

    takes_settings: ClassVar[bool] = True
    """Whether a file's settings are added to what a program defines."""

    def __init__(
        self, store: str = "sqlite:./oncehook.db", *, migrate: bool = True, encrypt: Encrypt | None = None
    ) -> None:
        """`encrypt`: the key under which payloads are kept, 32 random bytes as base64 or hex; a list while rotating."""
        self.store_url = store
        self.cipher = build.cipher_of(encrypt)
        self.observer = Observer(build.engine_of(store).value)
        self.sources: dict[str, Source] = {}
        self.routes: list[routes.Route] = []
        self.destinations: dict[str, Destination] = {}
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
        self.emitter = Emitter(self)
        self._admin = Admin(self)
        self._parts = RunningParts()
        self._migrate = migrate
        self._ready_until = 0.0
        self._mounts: list[Mount] = []
        self._created_at = clock.now_utc()

    @property
    def store(self) -> Store:
        """Store at `store_url`: built when it is first asked for, opened by `start`."""
        if self._parts.store is None:
            self._parts.store = build.open_store(self.store_url, self.cipher)
        return self._parts.store

    @property
    def admin(self) -> Admin:
        """Questions and acts of people and programs."""
        return self._admin

    def move_store(self, url: str) -> None:
        """Keep events at another address. Raises ConfigError once the inbox is started."""
        self._check_in_time("Another store")
        self.store_url, self._parts.store = url, None

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
        inbox = cls(config.store, migrate=config.migrate, encrypt=config.encrypt)
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
        both.end()
        if theirs.has_keys:
            self.cipher, self._parts.store = theirs, None
        self._define(loaded.config)
        self.limits, self.retention, self.settings = limits, retention, loaded
        self._migrate = self._migrate and loaded.config.migrate

    def _define(self, config: Config) -> None:
        for name, settings in config.source.items():
            self.add(Source(name, settings))
        for name, destination in config.destination.items():
            self.add_destination(build.destination_from(name, destination))
        for one in config.route:
            self.route(one.from_, one.to, **build.route_settings(one))

    def check_names(self) -> None:
        """Raise ConfigError where a route, or a name in the file, leads nowhere."""
        if self.settings is not None:
            emitted = {route.source for route in self.routes}
            self.settings.tie(AppNames(self.sources, self.destinations, emitted))
        for route in self.routes:
            if route.destination not in self.destinations:
                raise ConfigError(f'A route from "{route.source}" leads to "{route.destination}", which is nowhere.')

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

        def register(handler: F) -> F:
            called = name or name_of(handler)
            read = build.read_handler(called, settings)
            if not self._is_handled_by(called, handler):
                terms = build.terms_from(read, classify, self.classifiers)
                self.add_destination(HandlerDestination(called, handler, terms, self.emitter))
            routing = build.route_settings(read)
            routing["when"] = {"type": type, **routing.get("when", {})}
            self.route(source, called, **routing)
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
        return self.add_destination(build.destination_from(name, read))

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
        if destination.name in self.destinations:
            raise ConfigError(f'Two destinations are called "{destination.name}".', hint="Give one of them a name.")
        self.destinations[destination.name] = destination
        return destination

    def route(self, source: str, to: str, **settings: Unpack[RouteSettings]) -> routes.Route:
        """Send events of a source to a destination, if all of `when` holds. Settings are those of `[[route]]`."""
        self.routes.append(routes.Route(source, to, **settings))
        return self.routes[-1]

    # -- which deliveries an event makes ---------------------------------------------------------

    def plan_deliveries(self, arrival: Arrival, item: Item) -> Sequence[Planned]:
        """Return the deliveries that one event of an arrival makes."""
        found = self._parts.routes.get(arrival.source)
        return routes.plan(found, arrival, item) if found else ()

    def _complete_routes(self) -> None:
        self.routes += build.own_routes(self.destinations.values(), self.sources, self.routes)
        self.check_names()

    def _register_names_blocking(self) -> None:
        """Assign the store's ids to all names in an inbox that is not started: in a view, say, beside a worker
        elsewhere."""
        if not self.is_started and self._parts.routes_counted != len(self.routes):
            self._complete_routes()
            self._assign_ids(self.store.register_names_blocking(self.sources, self.destinations))

    def _assign_ids(self, numbers: NameIds) -> None:
        self._parts.routes = build.assign_ids(numbers, self.sources, self.destinations, self.routes)
        self._parts.routes_counted = len(self.routes)
        self.observer.volumes = {
            one.name: (one.id, one.volume) for one in self.sources.values() if one.volume is not None
        }

    # -- starting and stopping -----------------------------------------------------------------

    async def start(self, *, work: bool = True, only: Sequence[str] = (), concurrency: int = 1000) -> None:
        """Open the store, assign its ids to all names, and be ready to receive and to work.

        Without `work`, deliveries are recorded for a worker elsewhere; `only` names the destinations to work for.
        """
        self._complete_routes()
        at_work = [d for d in self.destinations.values() if work and (not only or d.name in only)]
        parts, store = self._parts, self.store
        await self._open_store(works=bool(at_work))
        try:
            self._assign_ids(await store.register_names(self.sources, self.destinations))
            receiver = Receiver if self.traces is None else self.traces.receiver
            parts.receiver = receiver(self.sources, store, self.plan_deliveries, self.observer, self._revive)
            parts.sweep = None if parts.receiver_count else self._build_sweep(works=work)
            if at_work:
                await store.note_recipients({d.id: digest(d.address.encode()) for d in at_work})
                at_work = at_work if self.traces is None else [self.traces.destination(d) for d in at_work]
                parts.worker = Worker(store, at_work, self.observer, concurrency=concurrency)
                self.observer.worker = parts.worker.id
                await parts.worker.start()
        except BaseException:
            await store.close()
            raise
        if parts.sweep is None:
            return
        parts.sweep.start()
        for source in self.sources.values():
            for warning, hint in source.secret_warnings():
                log.warning("source.secret", extra={"fields": {"warning": warning, "hint": hint}})

    async def _open_store(self, *, works: bool) -> None:
        await self.store.open(StoreReports(self.observer, self._parts, works=works), migrate=self._migrate)

    def _build_sweep(self, *, works: bool) -> Sweep:
        return Sweep(
            self.store,
            self.observer,
            keep_events={s.id: keep for s in self.sources.values() if (keep := s.settings.keep_events) is not None},
            otherwise=self.retention.keep_events,
            measure=self.admin.watermarks,
            works_for=self.destinations if works else None,
            worker=self._describe_worker,
            write_counts=self._write_all_counts,
        )

    def wind_down(self) -> None:
        """Begin to stop: report not ready, and begin no new attempts."""
        self._parts.draining = True
        if self._parts.worker is not None:
            self._parts.worker.quiesce()

    async def stop(self, patience: float = DRAIN_SECONDS) -> None:
        """Receive nothing more, let running attempts end, commit what was received, and close the store."""
        parts = self._parts
        parts.draining = True
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
            await self.write_counts()
            await self._write_refusals(is_last=True)
        await self.store.close()
        parts.receiver = None

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

    def dashboard(self, *, authorize: Authorize) -> ASGIApp:
        """Return dashboard and API, to mount in another: `app.mount("/inbox", inbox.dashboard(authorize=staff))`.

        `authorize` is given each request and says who makes it: a name for the audit log and the role "viewer",
        "operator" or "admin", as `("anna", "operator")`; a role alone; or None for nobody. The API is at `api/v1`.
        """
        from oncehook.web.dashboard import dashboard
        from oncehook.web.live import Broadcast

        self.observer.audience = stream = Broadcast()
        return dashboard(self.admin, stream, authorize=authorize, ways_in=self._mounts)

    async def receive(
        self, source: str, headers: Headers | Mapping[str, str], body: bytes, *, query: bytes = b"", peer: str = ""
    ) -> Receipt:
        """Receive one arrival from a route of one's own. The receipt holds the reply to send."""
        return await self.receiver.receive(Arrival(source, build.as_headers(headers), body, query, "POST", "", peer))

    async def emit(
        self, source: str, type: str, payload: object, *, key: str | None = None, subject: str | None = None
    ) -> str:
        """Store an event of one's own and route it like any other; return its id, or that of the first one with its
        key.

        `source` names where it comes from ("app") and need not be configured as a source of arrivals.
        """
        if not self.is_started:
            raise NotStarted
        return await self.emitter.emit(draft(source, type, payload, key, subject))

    async def emit_in(
        self, tx: Any, source: str, type: str, payload: object, *, key: str | None = None, subject: str | None = None
    ) -> str:
        """Emit in a transaction of your own (PostgreSQL): the event exists if, and only if, that commits.

        `tx` is psycopg's `AsyncConnection`, or SQLAlchemy's. The inbox need not be started. Emit last: the rows it
        touches are locked until you commit.
        """
        await asyncio.to_thread(self._register_names_blocking)
        return await self.emitter.emit_in(tx, draft(source, type, payload, key, subject))

    def emit_in_blocking(
        self, tx: Any, source: str, type: str, payload: object, *, key: str | None = None, subject: str | None = None
    ) -> str:
        """Emit like `emit_in`, in code without `await`: `tx` is psycopg's `Connection`, Django's, or SQLAlchemy's."""
        self._register_names_blocking()
        return self.emitter.emit_in_blocking(tx, draft(source, type, payload, key, subject))

    async def send_message(self, destination: str, message: Message, *, key: str | None) -> str:
        """Emit a message to a sender: kept, retried, and sent once per key unless a person replays it.

        Messages to one recipient are sent in order. `key=None` must be written out: then nothing prevents sending it
        twice. Returns the event's id, or that of the first one with this key. Raises InvalidMessage for what could
        never be sent.
        """
        from oncehook.whatsapp.destination import SenderDestination
        from oncehook.whatsapp.messages import type_of

        sender = self.destinations.get(destination)
        there = any(route.destination == destination for route in self._parts.routes.get(destination, ()))
        if not isinstance(sender, SenderDestination) or not there:
            raise ConfigError(f'Nothing that is emitted as "{destination}" goes to a sender of that name.')
        subject = sender.subject_of(message)
        return await self.emit(destination, type_of(message), msgspec.json.encode(message), key=key, subject=subject)

    # -- looking after itself ------------------------------------------------------------------

    async def write_counts(self) -> None:
        """Write the counts of rejections and of volume, outside the commits of arrivals: a flood of forgeries costs few
        fsyncs."""
        rejections, counts = self.observer.take_counts()
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
        """Check the store's conservation laws, for `doctor`."""
        return await self.store.check()


def name_of(handler: Handler) -> str:
    """Return the default name of a handler's destination."""
    return str(getattr(handler, "__name__", "handler"))
