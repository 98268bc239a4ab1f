"""A Python function as a destination: `def` on a thread, `async def` on the loop, either with the store's transaction.

What a handler raises decides about its delivery: `GiveUp` ends it, `RetryLater` says when, and `categories` classifies
anything else. What it returns is kept with the attempt. A coroutine is cancelled at its timeout; a thread cannot be, so
its lease is renewed until it ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import coroutine
from typing import Any, Final, Protocol

import msgspec

from oncehook import clock, faults, human
from oncehook.categories import FailureRules
from oncehook.destinations.base import WELL, Result, Terms, settlement
from oncehook.errors import ConfigError, LeaseLost, RetryLater
from oncehook.event import Event
from oncehook.ingest import Emitter
from oncehook.model import ANSWER_KEPT, NO_EVIDENCE, RESULT_KEPT, Emission, Evidence, Lease

log = logging.getLogger("oncehook.worker")

Handler = Callable[..., Any]


class TakesEvent(Protocol):
    """A handler's signature."""

    def __call__(self, event: Event, /) -> Any: ...


class TakesTransaction(Protocol):
    """Signature of a handler that commits with the store (PostgreSQL)."""

    def __call__(self, event: Event, /, *, tx: Any) -> Any: ...


_NOT_THEIRS: Final = (
    str(Path(__file__).parent.parent),
    *(str(Path(inspect.getfile(library)).parent) for library in (asyncio, concurrent.futures)),
)
"""Frames of ours, of the loop and of threads, which do not tell where a handler failed."""
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Frames in a library, which tell less than those of the program that called it."""

NO_RULES: Final = FailureRules()

TIMEOUT: Final = 60.0
"""Default timeout of a handler, in seconds."""

HELD: Final = 1.0
"""Seconds for which a handler may hold the event loop before that is logged."""


class HandlerDestination:
    """A Python function that handles events; see `Destination`."""

    kind = "handler"
    crash_tolerance = 0

    def __init__(self, name: str, handler: Handler, terms: Terms, emitter: Emitter) -> None:
        self.name = name
        self.id = 0
        self.terms = terms
        self.handler = handler
        self.address = f"{handler.__module__}.{getattr(handler, '__qualname__', type(handler).__qualname__)}"
        self._emitter = emitter
        self._on_loop = inspect.iscoroutinefunction(inspect.unwrap(handler))
        self._takes_tx = takes_tx(name, handler)
        self._is_told = False
        """True once it was logged that the handler holds the event loop."""
        self._takes_effects = not emitter.store.lends_transactions
        self._threads: ThreadPoolExecutor | None = None
        if self._takes_tx and self._takes_effects:
            raise ConfigError(
                f'Handler "{name}" takes `tx`, and this inbox is on SQLite, which lends its one writer to nobody.',
                hint="Leave `tx` out and call event.commit(effect): it is run inside the transaction that settles.",
            )
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise ConfigError(
                f'Handler "{name}" has a `yield` in it: calling it would do nothing ({place_of(handler)}).'
            )
        self._limit = timedelta(seconds=terms.timeout)
        self._call = {
            (True, False): self._on_the_loop,
            (True, True): self._on_the_loop_with_tx,
            (False, False): self._on_a_thread,
            (False, True): self._on_a_thread_with_tx,
        }[self._on_loop, self._takes_tx]

    @property
    def is_cancellable(self) -> bool:
        return self._on_loop

    async def open(self) -> None:
        if not self._on_loop:
            self._threads = ThreadPoolExecutor(self.terms.concurrency, thread_name_prefix=f"oncehook-{self.name}")

    async def close(self) -> None:
        if self._threads is not None:
            # Not waited for: the worker has already waited for its threads.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def attempt(self, lease: Lease) -> Result:
        deadline = clock.now_utc() + self._limit
        event = Event(lease, self.name, deadline, takes_effects=self._takes_effects, media=self._emitter.keep_media)
        try:
            result = await self._call(lease, event)
        except (LeaseLost, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            # Catches sys.exit() and any other BaseException, too: it ends the attempt, never the worker's task.
            if isinstance(error, asyncio.CancelledError) and _is_called_off():
                raise
            lease.is_settling = False
            return failure(error, self.terms.rules)
        faults.point("after_effect")
        return result

    async def _on_the_loop(self, lease: Lease, event: Event) -> Result:
        return await self._well(event, await self._within_limit(self.handler(event)))

    async def _on_the_loop_with_tx(self, lease: Lease, event: Event) -> Result:
        started = clock.perf()
        async with self._emitter.store.transaction() as tx:
            well = await self._well(event, await self._within_limit(self.handler(event, tx=tx.connection)))
            faults.point("before_tx_settle")
            lease.is_settling = True
            await tx.settle(settlement(self.terms, lease, well, clock.perf() - started))
        return _note_commit(well.emits)

    async def _within_limit(self, attempt: Any) -> Any:
        steps = attempt if inspect.iscoroutine(attempt) else attempt.__await__()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            waits_for = steps.send(None)
        except StopIteration as done:  # it waited for nothing, so that it needs no timer
            return done.value
        finally:
            self._note_held(began, loop.time())
        try:
            async with asyncio.timeout_at(began + self.terms.timeout) as limit:
                return await self._go_on(steps, waits_for, loop)
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"The handler took longer than {self.terms.timeout:g} s.") from error
            raise

    @coroutine
    def _go_on(self, steps: Any, waits_for: Any, loop: asyncio.AbstractEventLoop) -> Generator[Any, Any, Any]:
        """Run a coroutine that has begun to its end, and measure how long each of its steps holds the loop."""
        while True:
            try:
                got = yield waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                step = partial(steps.throw, error)
            else:
                step = partial(steps.send, got)
            began = loop.time()
            try:
                waits_for = step()
            except StopIteration as done:
                return done.value
            finally:
                self._note_held(began, loop.time())

    def _note_held(self, began: float, ended: float) -> None:
        """Log once that an `async def` blocks: neither arrivals nor other attempts go on meanwhile."""
        if ended - began < HELD or self._is_told:
            return
        self._is_told = True
        fields = {
            "destination": self.name,
            "warning": f"handler {self.name} held the event loop for {ended - began:.1f} s",
            "place": place_of(self.handler),
            "hint": "Write it as `def`, which runs on a thread, or await what takes so long.",
        }
        log.warning("handler.held_loop", extra={"fields": fields})

    async def _on_a_thread(self, lease: Lease, event: Event) -> Result:
        return await self._well(event, await self._in_thread(self.handler, event))

    async def _well(self, event: Event, returned: object) -> Result:
        drafts = event.finish()
        if event.effect is None and not drafts and returned is None:
            return WELL
        return Result(evidence=kept_result(returned), commit=event.effect, emits=await self._emitter.emissions(drafts))

    async def _on_a_thread_with_tx(self, lease: Lease, event: Event) -> Result:
        return _note_commit(await self._in_thread(self._call_with_tx, lease, event))

    def _call_with_tx(self, lease: Lease, event: Event) -> Sequence[Emission]:
        started = clock.perf()
        with self._emitter.store.blocking_transaction() as tx:
            returned = self.handler(event, tx=tx.connection)
            well = Result(evidence=kept_result(returned), emits=self._emitter.emissions_blocking(event.finish()))
            faults.point("before_tx_settle")
            lease.is_settling = True
            tx.settle(settlement(self.terms, lease, well, clock.perf() - started))
        return well.emits

    async def _in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        # Copied, so that the handler sees the current trace's span, for example.
        call = partial(copy_context().run, _call_on_thread, function, *arguments)
        result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        if inspect.isawaitable(result):
            return await self._within_limit(result)  # a partial or a callable object that turned out to be asynchronous
        return result


def takes_tx(name: str, handler: Handler) -> bool:
    """Tell whether a handler takes `tx`. Raises ConfigError where it cannot be called with an event."""
    if not callable(handler):
        raise ConfigError(f'Handler "{name}" is no function.')
    try:
        signature = inspect.signature(handler)
    except ValueError:  # a builtin that has none
        return False
    has_tx = "tx" in signature.parameters
    try:
        signature.bind(None, **({"tx": None} if has_tx else {}))
    except TypeError as error:
        raise ConfigError(
            f'Handler "{name}" cannot be called with an event: {error} ({place_of(handler)}).',
            hint=f"Write def {name}(event), or def {name}(event, tx): nothing else is passed.",
        ) from None
    return has_tx


def place_of(handler: Handler) -> str:
    """Return where a function is written: `shop.py:18`, from the current folder where it is below that."""
    code = getattr(inspect.unwrap(handler), "__code__", None)
    if code is None:
        return f"{type(handler).__module__}.{type(handler).__qualname__}"
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}"


def short_path(file: str) -> str:
    """Return a path from the current folder where it is below that."""
    folder = os.getcwd() + os.sep  # noqa: PTH109 - compared as text
    return file.removeprefix(folder)


def _is_called_off() -> bool:
    """Tell whether the worker cancels this attempt. Otherwise something that the handler awaited was cancelled, which
    is a failure."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _call_on_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function; raise RuntimeError for StopIteration, which a future cannot carry: its awaiter would wait for
    ever."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("the handler raised StopIteration").with_traceback(error.__traceback__) from error


def _note_commit(emits: Sequence[Emission]) -> Result:
    """Report the emitted events: the handler's own transaction, which settled the delivery, is committed."""
    for emission in emits:
        emission.report()
    return Result(settled=True)


def kept_result(returned: object) -> Evidence:
    """Return a handler's result as it is kept: JSON, or the name of its type where that is impossible or too long."""
    if returned is None:
        return NO_EVIDENCE
    try:
        kept = msgspec.json.encode(returned)
    except Exception:  # whatever encoding it raises: the handler has done its work
        kept = b""
    if not kept or len(kept) > RESULT_KEPT:
        kind = type(returned)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        kept = msgspec.json.encode(f"<{module}{kind.__qualname__}>")
    return Evidence(answer=kept)


def failure(error: BaseException, rules: FailureRules = NO_RULES) -> Result:
    """Return category and evidence of an exception."""
    found = rules.of_error(error)
    after = error.after if isinstance(error, RetryLater) else None
    trace = "".join(traceback.format_exception(error))
    return Result(
        found.category,
        # The end of the traceback: the error is there.
        Evidence(error=_first_line(error), answer=trace.encode("utf-8", "replace")[-ANSWER_KEPT:]),
        retry_after=found.retry_after,
        wait=None if after is None else human.seconds(after),
    )


def _first_line(error: BaseException) -> str:
    """Return what happened, and where in the handler: `ValueError: no such order   app.py:9`."""
    message = str(error).strip().split("\n")[0]
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    own = [frame for frame in others if not frame.filename.startswith(_LIBRARIES)] or others
    where = f"   {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}" if own else ""
    return text[:500] + where
