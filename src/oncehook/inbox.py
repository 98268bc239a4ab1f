"""The inbox: what `layout` describes, started, taking in, working, and stopped again.

Programs make one with `Inbox(store)` or `Inbox.from_toml()`, start it, and mount `asgi()`; the command line and the
web faces do the same and ask it for everything they show.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from oncehook import assembly, clock
from oncehook.assembly import Encrypt
from oncehook.config import Loaded
from oncehook.deliveries import StoredWorker
from oncehook.desk import Desk
from oncehook.destinations.sender import SenderDestination
from oncehook.emit import draft
from oncehook.errors import ConfigError, NotStarted, StoreUnavailable
from oncehook.layout import Layout
from oncehook.model import Arrival, Check, Headers, digest
from oncehook.receive import ClosedReceiver, Receipt, Receiver
from oncehook.sweep import Sweep
from oncehook.whatsapp.outgoing import type_of
from oncehook.worker import Worker

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from oncehook.traces import Traces
    from oncehook.web.access import Authorize
    from oncehook.web.ingest import Mount
    from oncehook.whatsapp.messages import Message

log = logging.getLogger("oncehook.source")

READY_FOR = 1.0
"""Seconds for which one proof that the store can write serves every probe."""

DRAIN_SECONDS = 25.0
"""How long attempts under way may take to end when the inbox stops."""


class Inbox(Layout):
    """The whole: what comes in, what is kept, where it goes."""

    def __init__(
        self, store: str = "sqlite:./oncehook.db", *, migrate: bool = True, encrypt: Encrypt | None = None
    ) -> None:
        super().__init__(store, migrate=migrate, encrypt=encrypt)
        self.draining = False
        self.local_token = clock.random_bytes(32).hex()
        """For commands of the same user on this machine; made anew at every start, kept in the lock file only."""
        self.left_behind = 0
        """Threads that were at work when it stopped."""
        self.traces: Traces | None = None
        """OpenTelemetry spans for arrivals and attempts; to be set before the start."""
        self._ready_until = 0.0
        self._receiver: Receiver | None = None
        self._worker: Worker | None = None
        self._mounts: list[Mount] = []
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
            take_in=lambda arrival: self.receiver.receive(arrival),
            write_counts=self._write_counts,
        )

    def add_settings(self, loaded: Loaded, app: str = "the program") -> None:
        """Have a file's settings count beside what the program says. Raises ConfigError for what both say."""
        super().add_settings(loaded, app)
        if "desk" in self.__dict__:  # a dashboard that was mounted before shows the new watermarks, too
            self.desk.limits = self.limits

    # -- starting and stopping -----------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether it can receive, and whether it is too late to add anything."""
        return self._receiver is not None

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
            self._receiver = build(self.sources, self.store, self._deliveries, self.observer, self._revive)
            self._sweep = self._new_sweep(works=work)
            if at_work:
                await self.store.note_recipients({d.number: digest(d.address.encode()) for d in at_work})
                at_work = at_work if self.traces is None else [self.traces.destination(d) for d in at_work]
                self._worker = Worker(self.store, at_work, self.observer, concurrency=concurrency)
                self.observer.worker = self._worker.id
                await self._worker.start()
        except BaseException:
            await self.store.close()
            raise
        self._sweep.start()
        for source in self.sources.values():
            for warning, hint in source.secret_warnings():
                log.warning("source.secret", extra={"fields": {"warning": warning, "hint": hint}})

    def _new_sweep(self, *, works: bool) -> Sweep:
        return Sweep(
            self.store,
            self.observer,
            keep_events={s.number: s.keep_events for s in self.sources.values() if s.keep_events is not None},
            otherwise=self.retention.keep_events,
            measure=self.desk.watermarks,
            works_for=self.destinations if works else None,
            worker=self._as_worker,
            write_counts=self._write_all_counts,
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
            self.observer.sum_up()
            await self._write_counts()
            await self._write_refusals(is_last=True)
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

    def _wake(self, destination_ids: Collection[int] | None) -> None:
        if self._worker is not None:
            self._worker.wake(destination_ids)

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
        """The front door; while the inbox is not started, one that asks every sender to try again."""
        if self._receiver is None:
            return ClosedReceiver(self.sources, self.store, self._deliveries, self.observer)
        return self._receiver

    def asgi(self) -> Mount:
        """An ASGI application to mount in another: `app.mount("/hooks", inbox.asgi())` gives POST /hooks/{source}."""
        from oncehook.web.ingest import Mount

        self._mounts.append(made := Mount(self))
        return made

    def dashboard(self, *, authorize: Authorize) -> ASGIApp:
        """Dashboard and API, to mount in another application: `app.mount("/inbox", inbox.dashboard(authorize=staff))`.

        `authorize` is given each request and says who makes it: a name for the audit log and the role "viewer",
        "operator" or "admin", as `("anna", "operator")`; a role alone; or None for nobody. The API is at `api/v1`.
        """
        from oncehook.web.live import Stream
        from oncehook.web.pages import dashboard

        self.observer.audience = stream = Stream()
        return dashboard(self.desk, stream, authorize=authorize, ways_in=self._mounts)

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
        if not self.is_started:
            raise NotStarted
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

    # -- looking after itself ------------------------------------------------------------------

    async def _write_counts(self) -> None:
        """Write down what was turned away, and what is volume: outside every commit, so a flood of forgeries costs no
        fsync each."""
        rejections, counts = self.observer.take_counts()
        if not counts:
            return
        with contextlib.suppress(StoreUnavailable):
            await self.store.record_rejections(rejections, counts)

    async def _write_refusals(self, *, is_last: bool = False) -> None:
        """Write into the audit log how often somebody came with a wrong token or password (S34)."""
        if detail := self.observer.refusals.take(is_last=is_last):
            try:
                await self.store.audit("unknown", "refused", "access", detail)
            except StoreUnavailable:
                self.observer.refusals.put_back(detail)

    async def _write_all_counts(self) -> None:
        await self._write_counts()
        await self._write_refusals()

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
