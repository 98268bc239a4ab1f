"""The inbox for programs without an event loop (Flask, Django, scripts): one loop on one thread in each process.

Nothing is started before the first use, so that a server may load its application first and fork afterwards. Views
call `answer` (a sender's request) or `receive` (a route of one's own) and always get a reply, 503 with Retry-After
where the store is unavailable; everything else goes through `call`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # registers its exit function before ours, which therefore runs first
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar
from urllib.parse import quote

from oncehook import clock
from oncehook.errors import ConfigError, Malformed, OncehookError, Rejected, StoreUnavailable, TooLarge
from oncehook.inbox import Inbox
from oncehook.ingest import Receipt, Receiver, try_again
from oncehook.logs import ration
from oncehook.model import AnyHeaders, Arrival, Headers
from oncehook.settings import build
from oncehook.sources import Reply, Source

log = logging.getLogger("oncehook.bridge")
T = TypeVar("T")

PATIENCE: Final = 10.0
"""Seconds that running attempts get when the process ends."""

AGAIN: Final = 1.0
"""Seconds after which a failed start is retried; until then its error is raised at once."""

Read = Callable[[int], bytes]
"""A function that reads at most so many bytes of a request's body; empty at its end."""


class Bridge:
    """Access from threads to an inbox that runs on its own loop."""

    def __init__(self, inbox: Inbox, *, work: bool | None = None) -> None:
        """Run `inbox`; with `work` this process also makes attempts, by default on SQLite only."""
        self.inbox = inbox
        self._work = inbox.store.embedded if work is None else work
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._has_forked = False
        self._has_stopped = False
        self._failure: Exception | None = None
        self._again_at = 0.0
        _bridges.add(self)

    # -- starting and stopping -----------------------------------------------------------------

    def start(self) -> None:
        """Start the inbox in this process, if it is not started yet. Raises what keeps it from starting."""
        if self._loop is not None:
            return
        with self._turn:
            if self._loop is None:
                self._check_startable()
                self._start()

    def _check_startable(self) -> None:
        if self._has_stopped:
            raise StoreUnavailable("This process is about to end.")
        if self._has_forked:
            raise ConfigError(
                "This inbox was started before its process was forked, and cannot be used in both.",
                hint="Use it for the first time in the worker process, or load the application there (no --preload).",
            )
        if self._failure is not None and clock.steady() < self._again_at:
            raise self._failure.with_traceback(None)

    def _start(self) -> None:
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(started)), name="oncehook-bridge", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except Exception as error:
            self._thread.join()
            self._failure, self._again_at = error, clock.steady() + AGAIN
            raise
        self._failure = None

    async def _live(self, started: concurrent.futures.Future[None]) -> None:
        try:
            await self.inbox.start(work=self._work)
        except BaseException as error:
            started.set_exception(error)
            return
        self._end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        started.set_result(None)
        await self._end.wait()
        await self.inbox.stop(PATIENCE)

    def stop(self) -> None:
        """Commit what was received and close the store for good. Runs by itself when the process ends."""
        with self._turn:
            self._has_stopped = True
            loop, self._loop = self._loop, None
            if loop is None or self._thread is None or self._end is None:
                return
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def _forget(self) -> None:
        # a forked child has neither the thread nor the loop, and the lock may be held for ever
        self._turn = threading.Lock()
        self._has_forked = self._has_forked or self._thread is not None
        self._thread = self._loop = self._end = None

    # -- asking --------------------------------------------------------------------------------

    def call(self, coroutine: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
        """Run a coroutine on the inbox's loop and return its result: `bridge.call(inbox.emit("app", "paid", {…}))`.

        Raises StoreUnavailable while the store is unavailable, and what the coroutine raises. After `timeout` seconds
        the coroutine is cancelled and TimeoutError is raised.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ConfigError("This is the inbox's own loop: waiting here would stop it.", hint="Use `await` instead.")
        try:
            self.start()
            loop = self._loop
            if loop is None:
                raise StoreUnavailable("This process is about to end.")
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError as error:
            coroutine.close()
            raise StoreUnavailable("This process is about to end.") from error
        except BaseException:
            coroutine.close()
            raise
        return _result(future, timeout)

    def receive(
        self,
        source: str,
        headers: AnyHeaders,
        body: bytes,
        *,
        query: bytes = b"",
        peer: str = "",
        account: str | int = "",
    ) -> Receipt:
        """Receive like `Inbox.receive`, in a view of one's own. Never raises: the receipt holds the reply."""
        arrival = Arrival(source, build.as_headers(headers), body, query, "POST", "", peer, str(account))

        async def take() -> Receipt:
            return await self.inbox.receiver.receive(arrival)

        return self._receive(self.inbox.sources.get(source), take())

    def answer(self, arrival: Arrival, read: Read) -> Reply:
        """Answer one request at the URL of a source.

        `arrival.source` is that part of the URL, which may name no source. Reads the body, up to the largest that any
        source allows.
        """
        source = next((one for one in self.inbox.sources.values() if one.path == arrival.source), None)
        if source is None:
            try:
                source = self.call(self._find_stored(arrival.source))
            except OncehookError as error:
                return put_off(None, error)
        if source is not None:
            arrival.source = source.name
            if source.path != source.name:  # an unguessable path must not be stored (S25)
                arrival.path = arrival.path.replace(source.path, source.name, 1)
        arrival.path = quote(arrival.path)
        try:
            arrival.body = read_body(arrival.headers, read, self.inbox.receiver.largest_body)
        except Rejected as error:
            refusal = error
            return self._call_receiver(source, lambda receiver: _at_once(receiver.turn_away(source, arrival, refusal)))
        if arrival.method != "POST":
            return self._call_receiver(source, lambda receiver: receiver.answer_handshake(source, arrival))

        async def take() -> Receipt:
            return await self.inbox.receiver.take(source, arrival)

        return self._receive(source, take()).reply

    async def _find_stored(self, path: str) -> Source | None:
        return await self.inbox.definitions.find_source_at(path)

    def _receive(self, source: Source | None, taking: Coroutine[Any, Any, Receipt]) -> Receipt:
        try:
            return self.call(taking)
        except OncehookError as error:
            return Receipt(put_off(source, error), "error", [])

    def _call_receiver(self, source: Source | None, answer: Callable[[Receiver], Awaitable[Reply]]) -> Reply:
        async def call() -> Reply:
            return await answer(
                self.inbox.receiver
            )  # called on the bridge's loop, because `start` replaces the receiver

        try:
            return self.call(call())
        except OncehookError as error:
            return put_off(source, error)


async def _at_once(reply: Reply) -> Reply:
    return reply


def _result(future: concurrent.futures.Future[T], timeout: float | None) -> T:
    try:
        return future.result(timeout)
    except concurrent.futures.CancelledError as error:
        raise StoreUnavailable("This process is about to end.") from error
    except TimeoutError:
        future.cancel()
        raise


def check_length(headers: Headers, cap: int) -> None:
    """Refuse a body whose Content-Length is too large, before any of it is read (R7)."""
    for name, value in headers:
        if name == b"content-length":
            if not value.isdigit():
                raise Malformed("Content-Length is not a number.")
            if len(value) > 18 or int(value) > cap:
                raise TooLarge


def read_body(headers: Headers, read: Read, cap: int) -> bytes:
    """Read the whole body, up to the cap, whatever its Content-Length says."""
    check_length(headers, cap)
    parts: list[bytes] = []
    left = cap + 1
    while left and (part := read(left)):
        parts.append(part)
        left -= len(part)
    if not left:
        raise TooLarge
    return b"".join(parts)


def put_off(source: Source | None, error: OncehookError) -> Reply:
    """Log an error of our own, and return a reply that makes the sender try again."""
    fields = {"code": error.code, "error": str(error), "hint": error.hint}
    ration.log(log, logging.ERROR, "bridge.failed", fields, kind=error.code)
    return try_again(source)


# -- the end of a process, and its forks -------------------------------------------------------

_bridges: weakref.WeakSet[Bridge] = weakref.WeakSet()


def _stop_all() -> None:
    for bridge in list(_bridges):
        bridge.stop()


def _forget_all() -> None:
    for bridge in list(_bridges):
        bridge._forget()


os.register_at_fork(after_in_child=_forget_all)
# `atexit` is too late: by then Python has ended the threads that the store needs for closing.
getattr(threading, "_register_atexit", atexit.register)(_stop_all)
