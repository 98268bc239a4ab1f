"""The inbox: sources, store, routes and destinations wired together.

Programs make one with `Inbox(store)` or `Inbox.from_toml()`, start it, and mount `asgi()`; the command line and the
web faces do the same and ask it for everything they show.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from oncehook import assembly, clock, routes, watermarks
from oncehook.config import Config, RetentionConfig, load
from oncehook.deliveries import StoredWorker
from oncehook.desk import Desk
from oncehook.destinations.base import Destination
from oncehook.destinations.handler import TIMEOUT, Handler, HandlerDestination
from oncehook.destinations.http import HttpDestination
from oncehook.destinations.sender import SenderDestination, Unsure
from oncehook.emit import Emitter, draft
from oncehook.errors import ConfigError, StoreUnavailable
from oncehook.model import Arrival, Check, Headers, Item, Planned
from oncehook.observe import Observer
from oncehook.receive import Receipt, Receiver
from oncehook.sources import Source, Splitter
from oncehook.store.base import Numbers, Store
from oncehook.sweep import Sweep
from oncehook.verify import Genuine, Scheme
from oncehook.whatsapp.outgoing import type_of
from oncehook.worker import Worker

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from oncehook.traces import Traces
    from oncehook.web.access import Authorize
    from oncehook.web.ingest import Mount
    from oncehook.whatsapp.messages import Message
    from oncehook.whatsapp.sender import Sender

log = logging.getLogger("oncehook.inbox")
F = TypeVar("F", bound=Handler)

READY_FOR = 1.0
"""Seconds for which one proof that the store can write serves every probe."""

DRAIN_SECONDS = 25.0
"""How long attempts under way may take to end when the inbox stops."""


class Inbox:
    """The whole: what comes in, what is kept, where it goes."""

    def __init__(self, store: str = "sqlite:./oncehook.db", *, migrate: bool = True) -> None:
        self.store: Store = assembly.open_store(store)
        self.observer = Observer(self.store.engine.value)
        self.store.watch = self.observer.operation
        self.sources: dict[str, Source] = {}
        self.routes: list[routes.Route] = []
        self.destinations: dict[str, Destination] = {}
        self.limits = watermarks.Limits()
        self.retention = RetentionConfig()
        self.draining = False
        self.local_token = clock.random_bytes(32).hex()
        """For commands of the same user on this machine; made anew at every start, kept in the lock file only."""
        self._migrate = migrate
        self._routes_by_source: dict[str, list[routes.Route]] = {}
        self._receiver: Receiver | None = None
        self._ready_until = 0.0
        self._emitter = Emitter(self.store, self._deliveries, self.observer)
        self._numbered = -1
        """How many routes there were when names got their numbers."""
        self.left_behind = 0
        """Threads that were at work when it stopped."""
        self.traces: Traces | None = None
        """OpenTelemetry spans for arrivals and attempts; to be set before the start."""
        self._worker: Worker | None = None
        self._sweep: Sweep | None = None
        self._started_at = clock.now_utc()

    @cached_property
    def desk(self) -> Desk:
        """Every question and act of the faces."""
        return Desk(
            self.store,
            sources=self.sources,
            destinations=self.destinations,
            routes=self.routes,
            limits=self.limits,
            free_disk=lambda: assembly.free_disk(self.store),
            nudge=self._nudge,
        )

    # -- setting up ----------------------------------------------------------------------------

    @classmethod
    def from_toml(cls, path: str | Path | None = None) -> Inbox:
        """The inbox that a configuration file describes: the given one, ./oncehook.toml, or [tool.oncehook]."""
        return cls.from_config(load(None if path is None else Path(path)).config)

    @classmethod
    def from_config(cls, config: Config) -> Inbox:
        """The inbox that checked settings describe."""
        inbox = cls(config.store, migrate=config.migrate)
        for name, settings in config.source.items():
            inbox.add(assembly.source_from(name, settings))
        for name, destination in config.destination.items():
            inbox.destinations[name] = assembly.destination_from(name, destination)
        inbox.routes += map(assembly.route_from, config.route)
        mark = config.watermark
        inbox.limits = watermarks.Limits(mark.dead, mark.oldest_due, mark.daily_volume, mark.disk)
        inbox.retention = config.retention
        return inbox

    def source(
        self,
        name: str,
        *,
        preset: str | None = None,
        verify: str | Mapping[str, object] | Scheme | Genuine | None = None,
        secret: str | bytes | Sequence[str | bytes] | None = None,
        secret_env: str | None = None,
        verify_token: str | None = None,
        verify_token_env: str | None = None,
        split: str | Splitter | None = None,
        **settings: Any,
    ) -> Source:
        """Add a source. Settings are those of `[source.NAME]`; durations and sizes may be words.

        Functions may stand for settings: `verify` is then given the arrival and a secret and says True for a genuine
        one, `split` is given the parsed body and the arrival and makes its parts, and `key`, `subject`, `type` and
        `event_time` are given a `Sight`.

        >>> inbox.source("stripe", preset="stripe", secret_env="STRIPE_SECRET", subject="$.data.object.customer")
        """
        token = assembly.from_env(verify_token_env, name) if verify_token_env else (verify_token or "").encode()
        secrets = [assembly.from_env(secret_env, name)] if secret_env else assembly.as_secrets(secret)
        return self.add(
            assembly.source_of(
                name, preset, verify, secrets=secrets, verify_token=token or None, split=split, **settings
            )
        )

    def add(self, source: Source) -> Source:
        """Add a source that is already built. Raises ConfigError when its name or path is taken."""
        if self._receiver is not None:
            raise ConfigError(f'Source "{source.name}" comes too late: this inbox has been started.')
        for other in self.sources.values():
            if source.name == other.name or source.path == other.path:
                raise ConfigError(f'Two sources are called "{source.name}" or share the path "{source.path}".')
        self.sources[source.name] = source
        return source

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
        timeout: str | float = TIMEOUT,
        **terms: Any,
    ) -> Callable[[F], F]:
        """Have a function handle events of a source: `def` or `async def`, given the `Event`, and `tx` if it takes one.

        The destination is called as the function is, unless `name` says otherwise. `terms` are those of
        `[destination.NAME]`: retry, lease, concurrency, rate, breaker.

        >>> @inbox.on("whatsapp", "message.*", retry="quick")
        ... async def reply(event: Event) -> None: ...
        """

        def register(handler: F) -> F:
            called = name or str(getattr(handler, "__name__", "handler"))
            known = self.destinations.get(called)
            if not (isinstance(known, HandlerDestination) and known.handler is handler):
                chosen = assembly.terms_of(timeout=timeout, **terms)
                self._add_destination(HandlerDestination(called, handler, chosen, self.store, self._emitter))
            self.route(
                source, called, when={"type": type, **(when or {})},
                coalesce=coalesce, latest_wins=latest_wins, on_dead=on_dead,
            )  # fmt: skip
            return handler

        return register

    def destination(
        self,
        name: str,
        *,
        url: str,
        sign: str | bytes | Sequence[str | bytes] | None = None,
        sign_env: str | None = None,
        headers: Mapping[str, str] | None = None,
        forward_headers: Sequence[str] = (),
        allow_private: bool | Sequence[str] = False,
        ca: Path | None = None,
        **terms: Any,
    ) -> Destination:
        """Add an HTTP destination. Settings are those of `[destination.NAME]`; durations and rates may be words."""
        secrets = [assembly.from_env(sign_env, name)] if sign_env else assembly.as_secrets(sign)
        return self._add_destination(
            HttpDestination(
                name,
                url,
                terms=assembly.terms_of(**terms),
                sign=secrets,
                headers=headers,
                forward_headers=forward_headers,
                allow_private=assembly.networks(allow_private),
                ca=ca,
            )
        )

    def sender(self, name: str, sender: Sender, *, unsure: Unsure = "retry", **terms: Any) -> SenderDestination:
        """Add a WhatsApp API as a destination: it is sent what is routed to it, and what is emitted under its name.

        `unsure="dead"` leaves a message of which nobody can tell whether it was sent to a person. `terms` are those of
        `[destination.NAME]`.

        >>> inbox.sender("answers", MetaCloud(token, phone_number_id), retry="quick")
        >>> await inbox.send_message("answers", Text(to="+55 11 99999-0001", text="On its way"), key="order-42")
        """
        made = SenderDestination(name, sender, assembly.terms_of(**{"timeout": sender.timeout, **terms}), unsure=unsure)
        self._add_destination(made)
        return made

    def _add_destination(self, destination: Destination) -> Destination:
        if self._receiver is not None:
            raise ConfigError(f'Destination "{destination.name}" comes too late: this inbox has been started.')
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

    # -- starting and stopping -----------------------------------------------------------------

    async def start(self, *, work: bool = True, only: Sequence[str] = (), concurrency: int = 1000) -> None:
        """Open the store, give every name its number, and be ready to receive and to work.

        Without `work` what routes ask for is recorded, for a worker elsewhere; `only` names whom to work for.
        """
        self._check_routes()
        at_work = [d for d in self.destinations.values() if work and (not only or d.name in only)]
        if at_work:
            self.store.wake = self._wake
        await self.store.open(migrate=self._migrate)
        try:
            self._take_numbers(await self.store.enroll(self.sources, self.destinations))
            build = Receiver if self.traces is None else self.traces.receiver
            self._receiver = build(self.sources, self.store, self._plan, self.observer, self._revive)
            self._sweep = self._new_sweep()
            if at_work:
                at_work = at_work if self.traces is None else [self.traces.destination(d) for d in at_work]
                self._worker = Worker(self.store, at_work, self.observer, concurrency=concurrency)
                self.observer.worker = self._worker.id
                await self._worker.start()
        except BaseException:
            await self.store.close()
            raise
        self._sweep.start()

    def _check_routes(self) -> None:
        self.routes += assembly.own_routes(self.destinations.values(), self.sources, self.routes)
        for route in self.routes:
            if route.destination not in self.destinations:
                raise ConfigError(f'A route from "{route.source}" leads to "{route.destination}", which is nowhere.')

    def _number(self) -> None:
        """Give every name its number where nobody has started this inbox: in a view, say, beside a worker elsewhere."""
        if self._receiver is None and self._numbered != len(self.routes):
            self._check_routes()
            self._take_numbers(self.store.enroll_blocking(self.sources, self.destinations))

    def _take_numbers(self, numbers: Numbers) -> None:
        self._routes_by_source = assembly.numbered(numbers, self.sources, self.destinations, self.routes)
        self._numbered = len(self.routes)

    def _new_sweep(self) -> Sweep:
        return Sweep(
            self.store,
            self.observer,
            keep_events={s.number: s.keep_events for s in self.sources.values() if s.keep_events is not None},
            otherwise=self.retention.keep_events,
            measure=self.desk.watermarks,
            worker=self._as_worker,
            write_rejections=self._write_rejections,
        )

    def wind_down(self) -> None:
        """Stopping has begun: not ready any more, and no new work is begun."""
        self.draining = True
        if self._worker is not None:
            self._worker.quiesce()

    async def stop(self, patience: float = DRAIN_SECONDS) -> None:
        """Take nothing more, let attempts under way end, commit what was taken in, and let go of the store."""
        self.draining = True
        if self._worker is not None:
            await self._worker.stop(patience)
            self.left_behind = self._worker.left_behind
            with contextlib.suppress(StoreUnavailable):
                await self.store.dismiss_worker(self._worker.id)
            self._worker = None
        if self._sweep is not None:
            await self._sweep.stop()
            self._sweep = None
            await self._write_rejections()
        await self.store.close()
        self._receiver = None

    @contextlib.asynccontextmanager
    async def running(
        self, *, work: bool = True, only: Sequence[str] = (), concurrency: int = 1000
    ) -> AsyncIterator[Inbox]:
        """`async with inbox.running():` starts it, and stops it whatever happens. See `start`."""
        await self.start(work=work, only=only, concurrency=concurrency)
        try:
            yield self
        finally:
            await self.stop()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object) -> AsyncIterator[None]:
        """For the host application: `FastAPI(lifespan=inbox.lifespan)`."""
        async with self.running():
            yield

    def announce(self, address: str) -> None:
        """Let commands on this machine find the process that writes a SQLite store (DESIGN.md 8.7)."""
        hold = getattr(self.store, "hold", None)
        if hold is not None:
            hold.announce(address, self.local_token)

    # -- working -------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Return when everything is done that this inbox's worker can do, retries included."""
        if self._worker is None:
            raise ConfigError("Nothing works here.", hint="Start the inbox with its worker, and with a destination.")
        await self._worker.drained()

    def _wake(self) -> None:
        if self._worker is not None:
            self._worker.wake()

    def _nudge(self) -> None:
        """A bulk replay wants to be fed."""
        if self._sweep is not None:
            self._sweep.nudge()

    def _as_worker(self) -> StoredWorker | None:
        return None if self._worker is None else self._worker.as_stored(self._started_at)

    async def _revive(self, event_id: bytes) -> None:
        """A copy of an event came, and its source says that a copy brings dead letters back (R22)."""
        await self.desk.revive(event_id, actor="sender", reason="a copy arrived")

    # -- taking in -----------------------------------------------------------------------------

    @property
    def receiver(self) -> Receiver:
        """The front door; there is one only while the inbox runs."""
        if self._receiver is None:
            raise ConfigError("This inbox is not started.", hint="Use `async with inbox.running():` or its lifespan.")
        return self._receiver

    def asgi(self) -> Mount:
        """An ASGI application to mount in another: `app.mount("/hooks", inbox.asgi())` gives POST /hooks/{source}."""
        from oncehook.web.ingest import Mount

        return Mount(self)

    def dashboard(self, *, authorize: Authorize) -> ASGIApp:
        """The dashboard, to mount in another application: `app.mount("/inbox", inbox.dashboard(authorize=is_staff))`.

        `authorize` is given each request and says "viewer", "operator", "admin", or None for nobody.
        """
        from oncehook.web.live import Stream
        from oncehook.web.pages import dashboard

        self.observer.audience = stream = Stream()
        return dashboard(self.desk, stream, authorize=authorize)

    async def receive(
        self, source: str, headers: Headers | Mapping[str, str], body: bytes, *, query: bytes = b"", peer: str = ""
    ) -> Receipt:
        """Take in one arrival from a route of one's own. The receipt holds the answer to give."""
        return await self.receiver.receive(Arrival(source, assembly.as_headers(headers), body, query, "POST", "", peer))

    async def emit(
        self,
        source: str,
        type: str,
        payload: object,
        *,
        key: str | None = None,
        subject: str | None = None,
    ) -> str:
        """Keep an event of one's own and fan it out like any other; returns its id, or the first one's with that key.

        `source` names where it comes from ("app") and need not be configured as a source of arrivals.
        """
        return await self._emitter.emit(draft(source, type, payload, key, subject))

    async def emit_in(
        self, tx: Any, source: str, type: str, payload: object, *, key: str | None = None, subject: str | None = None
    ) -> str:
        """The same in a transaction of your own (PostgreSQL): the event exists if, and only if, that commits.

        `tx` is psycopg's `AsyncConnection`, or SQLAlchemy's. The inbox need not be started here. Emit last: what the
        event touches is locked until you commit.
        """
        await asyncio.to_thread(self._number)
        return await self._emitter.emit_in(tx, draft(source, type, payload, key, subject))

    def emit_in_blocking(
        self, tx: Any, source: str, type: str, payload: object, *, key: str | None = None, subject: str | None = None
    ) -> str:
        """`emit_in` for code that is not asynchronous: `tx` is psycopg's `Connection`, Django's, or SQLAlchemy's."""
        self._number()
        return self._emitter.emit_in_blocking(tx, draft(source, type, payload, key, subject))

    async def send_message(self, destination: str, message: Message, *, key: str | None) -> str:
        """Emit a message to a sender: kept, retried, and sent once per key unless a person replays it.

        What one recipient gets comes in order. `key=None` must be said: then nothing keeps it from being sent twice.
        Returns the event's id, or the first one's with that key. Raises InvalidMessage for what could never be sent.
        """
        sender = self.destinations.get(destination)
        there = any(route.destination == destination for route in self._routes_by_source.get(destination, ()))
        if not isinstance(sender, SenderDestination) or not there:
            raise ConfigError(f'Nothing that is emitted as "{destination}" goes to a sender of that name.')
        subject = sender.subject_of(message)
        return await self.emit(destination, type_of(message), msgspec.json.encode(message), key=key, subject=subject)

    def _plan(self, source: Source, arrival: Arrival, item: Item) -> Sequence[Planned]:
        return self._deliveries(arrival, item)

    def _deliveries(self, arrival: Arrival, item: Item) -> Sequence[Planned]:
        found = self._routes_by_source.get(arrival.source)
        return routes.plan(found, arrival, item) if found else ()

    # -- looking after itself ------------------------------------------------------------------

    async def _write_rejections(self) -> None:
        """Write down what was turned away: outside every commit, so a flood of forgeries costs no fsync each."""
        rejections, counts = self.observer.take_rejections()
        if not rejections:
            return
        with contextlib.suppress(StoreUnavailable):
            await self.store.record_rejections(rejections, counts)

    async def troubles(self) -> dict[str, str]:
        """What keeps this inbox from receiving, by name; empty when it is ready."""
        if self.draining:
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
        """The numbers for Prometheus."""
        size: int | None = None
        with contextlib.suppress(StoreUnavailable, OSError):
            size = await self.store.size()
            self.observer.levels(await self.store.levels(), len(await self.store.workers()))
        return self.observer.exposition(size)

    async def check(self) -> list[Check]:
        """The store's conservation laws, for `doctor`."""
        return await self.store.check()
