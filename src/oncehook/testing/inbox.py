"""Inboxes under test: `TestInbox` for coroutines, `BlockingTestInbox` for plain functions, and signed samples.

The pytest plugin provides the one that fits a test. Nothing reaches the network, and time stands still, from the moment
an inbox under test is made until it is stopped. The loop of the blocking one only runs during its methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from oncehook import clock, human, model, presets, samples
from oncehook.destinations.base import Destination
from oncehook.destinations.handler import HandlerDestination
from oncehook.errors import ConfigError
from oncehook.inbox import Inbox
from oncehook.ingest import Receipt
from oncehook.model import AnyHeaders, Arrival, DeliveryStatus, Engine, Filter, StoredDelivery
from oncehook.samples import Answer
from oncehook.settings import build, development
from oncehook.sources import Source
from oncehook.testing import recorded as recording
from oncehook.testing.recorded import Recorded, RecordedAttempt
from oncehook.worker import Worker

__all__ = ["Answer", "send", "signed"]

NOWHERE: Final = "http://localhost/"


async def send(
    to: Inbox | str,
    source: Source | str,
    type: str | None = None,
    *,
    repeat: int = 1,
    body: object = None,
    forge: bool = False,
) -> list[Answer]:
    """Send the very same hook `repeat` times, one after the other; one answer for each.

    `to` is a running inbox, or the whole address of a source on some server. `source` is its name in that inbox; for
    an address it is a `Source`, or the name of a preset, signed with the development secret. `body` replaces the
    sample's: bytes as they are, anything else as JSON. With `forge` the signature is that of somebody without the
    secret.

    >>> first, second = await send(inbox, "stripe", "invoice.paid", repeat=2)
    >>> assert (first.json()["status"], second.json()["status"]) == ("accepted", "duplicate")
    """
    if isinstance(to, Inbox) and isinstance(source, str):
        source = to.sources[source]
    registered = source.settings.public_url if isinstance(source, Source) else None
    arrival = signed(source, type, body=body, forge=forge, url=to if isinstance(to, str) else registered)
    return [await hand_over(to, arrival) for _ in range(repeat)]


def signed(
    source: Source | str,
    type: str | None = None,
    *,
    body: object = None,
    forge: bool = False,
    url: str | None = None,
) -> Arrival:
    """Build one hook as its provider would send it: `headers`, `body` and `query`, fresh at every call.

    Without a type it is the preset's first sample. `url` is for providers whose signature covers it.

    >>> hook = signed(inbox.sources["stripe"], "invoice.paid")
    >>> client.post("/hooks/stripe", content=hook.body, headers=hook.headers)
    """
    if isinstance(source, str):
        source = development.source(source)
    kind = type or next(iter(source.preset.samples if source.preset else ()), "hello")
    content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
    draft = samples.draft(source, kind, body=content)
    return samples.sign(source, draft, url=samples.signed_url(source, url or NOWHERE), forge=forge)


async def hand_over(to: Inbox | str, arrival: Arrival) -> Answer:
    """Send an arrival to an inbox in this process, or to an address."""
    if isinstance(to, str):
        return await asyncio.to_thread(samples.post, to, arrival)
    started = clock.perf()
    receipt = await to.receive(arrival.source, arrival.headers, arrival.body, query=arrival.query)
    return Answer(receipt.reply.status, receipt.reply.body, clock.perf() - started)


LOOK: Final = 0.002
"""Seconds between two checks whether everything that is due is done."""

UNLIMITED: Final = 3600.0
"""Timeout of senders and of attempts when a worker stops: as long as the test."""


JOINED: Final = (
    "store_url", "cipher", "sources", "destinations", "routes", "classifiers", "limits", "retention", "observer",
    "emitter", "bodies_config", "archive_config", "_keepers", "_parts",
)  # fmt: skip
"""Attributes that a program's inbox shares with the test's inbox."""


class TrialClock:
    """The time of an inbox under test, of its store and of the program: it stands still unless it is moved."""

    def __init__(self, trial: TestInbox) -> None:
        self._trial = trial
        self._moved = 0.0
        self._is_held = False

    def now(self) -> datetime:
        return clock.now_utc()

    def forward(self, span: str | float) -> None:
        """Advance the time by "5m", or by seconds. What becomes due is processed by the next `drain`."""
        seconds = human.seconds(span)
        self._trial.check_movable()
        clock.forward(seconds)
        self._moved += seconds

    def hold(self) -> None:
        """Stop the time, where that is possible: PostgreSQL has a clock of its own."""
        if not self._is_held and build.engine_of(self._trial.store_url) is Engine.sqlite:
            clock.hold()
            self._is_held = True

    def release(self) -> None:
        """Let the time go on."""
        if self._is_held:
            clock.release()
            self._is_held = False

    def take_back(self) -> None:
        """Reset the time to the present, and let it go on."""
        self.release()
        if self._moved:
            clock.forward(-self._moved)
            self._moved = 0.0
            model.start_ids_anew()


class TestInbox(Inbox):
    """An inbox under test, for coroutines.

    >>> async def test_paid(inbox: TestInbox) -> None:
    ...     inbox.use(shop.inbox)
    ...     await inbox.send("stripe", "invoice.paid")
    ...     await inbox.drain()
    ...     assert shop.paid
    """

    __test__ = False  # pytest would collect it by its name

    def __init__(self, store: str) -> None:
        super().__init__(store)
        self.clock = TrialClock(self)
        self._joined: list[tuple[Inbox, list[Any]]] = []
        self._budgets: list[tuple[Source, float]] = []
        self._last: Arrival | None = None
        self._recorded: dict[str, Recorded] = {}
        self._is_network_allowed = False
        self._parts.wrap = self._record
        self._isolate()

    # -- apart from the world ------------------------------------------------------------------

    def allow_network(self) -> None:
        """Send to destinations for real, except to those that `recorded` was called for."""
        self._is_network_allowed = True
        recording.allow_network(self)

    def _isolate(self) -> None:
        self.clock.hold()
        if not self._is_network_allowed:
            recording.keep_off_network(self)

    def _end_isolation(self) -> None:
        self.clock.release()
        recording.allow_network(self)

    def _record(self, destination: Destination) -> Destination:
        """Return a destination for a worker that records what it would send; a handler as it is."""
        own = self.destinations[destination.name]
        if isinstance(own, HandlerDestination):
            return destination
        recorded = self._recorded_of(own)

        def passes(url: str) -> bool:
            return not recorded.is_explicit and (self._is_network_allowed or recording.is_standin(url))

        return recording.record(destination, own, recorded, passes)

    def _recorded_of(self, destination: Destination) -> Recorded:
        if isinstance(destination, HandlerDestination):
            raise ConfigError(
                f'"{destination.name}" is a handler: it is called, and sends nothing that could be recorded.',
                hint="Look at what it did, or at `inbox.deliveries(…)`.",
            )
        return self._recorded.setdefault(destination.name, Recorded())

    # -- setting up ----------------------------------------------------------------------------

    def add(self, source: Source) -> Source:
        """Add a source without a time budget, so that a slow machine does not turn a 200 into a 503."""
        super().add(source)
        self._budgets.append((source, source.settings.budget))
        source.settings.budget = UNLIMITED
        return source

    def use(self, inbox: Inbox) -> None:
        """Test a program's own inbox: its sources, handlers, destinations and routes, on the store of this test.

        Until the test ends the two share everything, so that `inbox.emit` in a handler, or a route that calls
        `inbox.receive`, reach the test's store, too.
        """
        if self.is_started or inbox.is_started:
            raise ConfigError("An inbox can be used for a test only before it is started.")
        for source in inbox.sources.values():
            self.add(source)
        for destination in inbox.destinations.values():
            self.add_destination(self._on_own_store(destination))
        self.routes += map(copy.copy, inbox.routes)
        self.limits, self.retention, self.classifiers = inbox.limits, inbox.retention, inbox.classifiers
        self._joined.append((inbox, [getattr(inbox, name) for name in JOINED]))
        for name in JOINED:
            setattr(inbox, name, getattr(self, name))

    def _on_own_store(self, destination: Any) -> Any:
        if isinstance(destination, HandlerDestination):
            return HandlerDestination(destination.name, destination.handler, destination.terms, self.emitter)
        return copy.copy(destination)

    def recorded(self, name: str) -> Recorded:
        """Return the record of a destination, to script its answers; add an HTTP destination if there is none.

        It is never sent to for real, neither to a stand-in nor after `allow_network`.

        >>> n8n = inbox.recorded("n8n")
        >>> n8n.fail(502)
        """
        if name not in self.destinations:
            self.destination(name, url=f"https://{name}.example/")
        recorded = self._recorded_of(self.destinations[name])
        recorded.is_explicit = True
        return recorded

    def sent(self, name: str) -> list[RecordedAttempt]:
        """Return what a destination was sent, or would have been: requests, messages or tasks, in order.

        >>> [answer] = inbox.sent("answers")
        >>> assert (answer.to, answer.text) == ("5511988880142", "On its way")
        """
        if name not in self.destinations:
            raise ConfigError(f'There is no destination "{name}".', hint=human.suggest(name, self.destinations))
        return self._recorded_of(self.destinations[name]).sent

    # -- starting and stopping -----------------------------------------------------------------

    async def start(self, *, work: bool = True, only: Sequence[str] = (), concurrency: int = 1000) -> None:
        """Begin to receive, unless it has begun. Only `drain` makes attempts."""
        if not self.is_started:
            self._isolate()
            await super().start(work=False)

    async def _open_store(self, *, works: bool) -> None:
        await super()._open_store(works=True)  # `drain` makes attempts even where no worker is started

    async def stop(self, patience: float = UNLIMITED) -> None:
        """Stop, if it was started. Time goes on, and the network can be reached."""
        if self.is_started:
            await super().stop(patience)
        self._end_isolation()

    def take_back(self) -> None:
        """Reset the clock and the inboxes that were used."""
        self._end_isolation()
        self.clock.take_back()
        while self._budgets:
            source, budget = self._budgets.pop()
            source.settings.budget = budget
        while self._joined:
            inbox, own = self._joined.pop()
            for name, value in zip(JOINED, own, strict=True):
                setattr(inbox, name, value)

    def check_movable(self) -> None:
        """Raise ConfigError where time cannot be moved now."""
        if not self.store.embedded:
            raise ConfigError("Only a SQLite store can be moved in time; PostgreSQL has a clock of its own.")
        if self.worker is not None and len(self.worker.heartbeat):
            raise ConfigError(
                "Attempts are under way, and would lose their leases.", hint="Move the clock after `drain`."
            )

    # -- taking in -----------------------------------------------------------------------------

    async def send(self, source: str, type: str | None = None, *, body: object = None, forge: bool = False) -> Answer:
        """Send a signed sample, as the provider of that source would. See `oncehook.testing.send`.

        A missing source is added if its name is that of a preset.

        >>> answer = await inbox.send("stripe", "invoice.paid")
        """
        if source not in self.sources and source in presets.names():
            self.add(development.fleeting(source))
        if source not in self.sources:
            raise ConfigError(f'There is no source "{source}".', hint="Add it with inbox.source(…).")
        sender = self.sources[source]
        self._last = signed(sender, type, body=body, forge=forge, url=sender.settings.public_url)
        return await self.send_again()

    async def send_again(self) -> Answer:
        """Send the last request again, byte for byte: a duplicate."""
        if self._last is None:
            raise ConfigError("Nothing was sent yet.")
        return await hand_over(self, self._last)

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
        await self.start()
        return await super().receive(source, headers, body, query=query, peer=peer, account=account)

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
        await self.start()
        return await super().emit(source, type, payload, key=key, subject=subject, account=account)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Receive over real HTTP; yield the URL to which the name of a source is added.

        >>> async with inbox.served() as url:
        ...     await meta.deliver(f"{url}/whatsapp", meta.message(from_="5511988880142", text="Hi"))
        """
        from oncehook.web.server import listen, serve_on

        await self.start()
        listener = listen("127.0.0.1", 0)
        async with serve_on(listener, self.asgi()):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"

    # -- working -------------------------------------------------------------------------------

    async def drain(self, *, retries: bool = False) -> None:
        """Process everything that is due now. Retries that are due later wait for `clock.forward`.

        With `retries` the clock advances to each retry in turn, until everything is done or dead.
        """
        await self.start()
        numbers = [destination.id for destination in self.destinations.values()]
        if not numbers:
            return
        while True:
            await self._work_off(numbers)
            next_due = await self.store.next_due(numbers)
            if next_due.is_due:
                continue
            if next_due.due_in is None or not retries:
                return
            self.clock.forward(next_due.due_in + 0.001)

    async def _work_off(self, numbers: Sequence[int]) -> None:
        if self.worker is not None:  # a host application has started it, with a worker of its own
            await self._catch_up(self.worker, numbers)
            return
        recorded = map(self._record, self.destinations.values())
        self._parts.worker = worker = Worker(self.store, recorded, self.observer, bodies=self.bodies)
        await worker.start()
        try:
            await self._catch_up(worker, numbers)
        finally:
            await worker.stop(UNLIMITED)
            self._parts.worker = None

    async def _catch_up(self, worker: Worker, numbers: Sequence[int]) -> None:
        """Wait until nothing is under way and nothing is due."""
        while True:
            next_due, levels = await self.store.next_due(numbers), await self.store.levels()
            # A leased delivery may not have begun yet.
            if not (len(worker.heartbeat) or next_due.is_due or any(level.leased for level in levels.values())):
                return
            await asyncio.sleep(LOOK)

    # -- looking -------------------------------------------------------------------------------

    async def deliveries(self, destination: str | None = None, *, status: str | None = None) -> list[StoredDelivery]:
        """List deliveries, oldest first, with `status`, `attempts`, `last_error`, …

        >>> [dead] = await inbox.deliveries("n8n", status="dead")
        """
        await self.start()
        wanted = Filter(destination=destination, status=None if status is None else DeliveryStatus(status))
        found: list[StoredDelivery] = []
        before: bytes | None = None
        while True:
            page = await self.store.find_deliveries(wanted, before=before, limit=200)
            found += page.items
            if page.next is None:
                return found[::-1]
            before = page.next


T = TypeVar("T")


class Blocking:
    """An object whose coroutine functions are run when they are called."""

    def __init__(self, target: object, runner: BlockingTestInbox) -> None:
        self._target, self._runner = target, runner

    def __getattr__(self, name: str) -> Any:
        return self._runner.without_await(getattr(self._target, name))


class BlockingTestInbox:
    """An inbox under test, for plain functions: all of `TestInbox`, without `await`.

    >>> def test_paid(inbox: BlockingTestInbox) -> None:
    ...     inbox.use(shop.inbox)
    ...     inbox.send("stripe", "invoice.paid")
    ...     inbox.drain()
    ...     assert shop.paid
    """

    def __init__(self, store: str) -> None:
        self.trial = TestInbox(store)
        """The inbox itself."""
        self.clock = self.trial.clock
        self.use = self.trial.use
        self.source = self.trial.source
        self.add = self.trial.add
        self.on = self.trial.on
        self.destination = self.trial.destination
        self.sender = self.trial.sender
        self.route = self.trial.route
        self.recorded = self.trial.recorded
        self.sent = self.trial.sent
        self.allow_network = self.trial.allow_network
        self.admin = Blocking(self.trial.admin, self)
        self._runner = asyncio.Runner()
        self._serves = False

    def __getattr__(self, name: str) -> Any:
        return self.without_await(getattr(self.trial, name))

    def without_await(self, value: Any) -> Any:
        """Return a coroutine function as one that is called without `await`; anything else as it is."""
        if not inspect.iscoroutinefunction(value):
            return value

        @functools.wraps(value)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.call(value(*args, **kwargs))

        return run

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the inbox's loop: `inbox.call(shop.refund("42"))`."""
        if self._serves:
            return asyncio.run_coroutine_threadsafe(coroutine, self._runner.get_loop()).result()
        return self._runner.run(coroutine)

    def start(self) -> None:
        """Begin to receive; the first use does so, too."""
        self.call(self.trial.start())

    def stop(self) -> None:
        """Stop."""
        with self._runner:
            self._runner.run(self.trial.stop())

    def send(self, source: str, type: str | None = None, *, body: object = None, forge: bool = False) -> Answer:
        """Send a signed sample, as the provider of that source would."""
        return self.call(self.trial.send(source, type, body=body, forge=forge))

    def send_again(self) -> Answer:
        """Send the last request again, byte for byte: a duplicate."""
        return self.call(self.trial.send_again())

    def emit(
        self, source: str, type: str, payload: object, *, key: str | None = None, subject: str | None = None
    ) -> str:
        return self.call(self.trial.emit(source, type, payload, key=key, subject=subject))

    def drain(self, *, retries: bool = False) -> None:
        """Process everything that is due now; with `retries`, also what is due later."""
        self.call(self.trial.drain(retries=retries))

    def deliveries(self, destination: str | None = None, *, status: str | None = None) -> list[StoredDelivery]:
        """List deliveries, oldest first."""
        return self.call(self.trial.deliveries(destination, status=status))

    @contextlib.contextmanager
    def served(self) -> Iterator[str]:
        """Receive over real HTTP, on a thread meanwhile; yield the URL to which the name of a source is added."""
        self.start()
        loop, serving = self._runner.get_loop(), self.trial.served()
        thread = threading.Thread(target=loop.run_forever, name="oncehook-served")
        thread.start()
        self._serves = True
        try:
            url = self.call(serving.__aenter__())
            try:
                yield url
            finally:
                self.call(serving.__aexit__(None, None, None))
        finally:
            self._serves = False
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
