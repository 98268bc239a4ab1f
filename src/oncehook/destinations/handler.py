"""A Python function as a destination: `def` on a thread, `async def` on the loop, either with the store's transaction.

What a handler raises decides about its delivery: `GiveUp` ends it, `RetryLater` says when, and `categories` classifies
anything else. What it returns is kept with the attempt. A coroutine is cancelled at its timeout; a thread cannot be, so
its lease is renewed until it ends.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from oncehook import clock, faults, human
from oncehook.categories import FailureRules
from oncehook.destinations.base import WELL, Result, Terms, settlement
from oncehook.errors import ConfigError, LeaseLost, RetryLater
from oncehook.event import Event
from oncehook.ingest import Emitter
from oncehook.model import ANSWER_KEPT, NO_EVIDENCE, RESULT_KEPT, Emission, Evidence, Lease

Handler = Callable[..., Any]

_NOT_THEIRS: Final = (str(Path(__file__).parent.parent), str(Path(asyncio.__file__).parent))
"""Frames of ours and of the loop, which do not tell where a handler failed."""

NO_RULES: Final = FailureRules()

TIMEOUT: Final = 60.0
"""Default timeout of a handler, in seconds."""


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
        self._takes_tx = "tx" in inspect.signature(handler).parameters
        self._takes_effects = not emitter.store.lends_transactions
        self._threads: ThreadPoolExecutor | None = None
        if self._takes_tx and self._takes_effects:
            raise ConfigError(
                f'Handler "{name}" takes `tx`, and this inbox is on SQLite, which lends its one writer to nobody.',
                hint="Leave `tx` out and call event.commit(effect): it is run inside the transaction that settles.",
            )
        if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
            raise ConfigError(f'Handler "{name}" has a `yield` in it: calling it would do nothing.')
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
        event = Event(lease, self.name, clock.now_utc() + self._limit, takes_effects=self._takes_effects)
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
        try:
            async with asyncio.timeout(self.terms.timeout) as limit:
                return await attempt
        except TimeoutError as error:
            if limit.expired():
                raise TimeoutError(f"The handler took longer than {self.terms.timeout:g} s.") from error
            raise

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
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    where = f"   {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}" if own else ""
    return text[:500] + where
