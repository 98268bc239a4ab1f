"""Celery as a destination: a delivery becomes a task. Done means *handed over* to the broker, or *finished*, as chosen.

The task's id is the delivery's id, so that handing over twice after a crash can be told from two events; a replay has
an id of its own. A broker that cannot be reached is transient: the delivery waits here, on disk, and is tried again.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from oncehook import faults
from oncehook.categories import Classify
from oncehook.destinations.base import WELL, Result, Terms
from oncehook.destinations.handler import failure, kept_result
from oncehook.errors import ConfigError
from oncehook.event import outward_id
from oncehook.inbox import Inbox
from oncehook.model import Category, Evidence, Lease
from oncehook.settings import build
from oncehook.settings.tables import TermSettings

if TYPE_CHECKING:
    from celery import Celery  # type: ignore[import-untyped]

T = TypeVar("T")

CRASH_TOLERANCE: Final = 3
"""Crashes of the process that are not held against a delivery: its code runs elsewhere."""

_SOONEST, _LATEST = 0.05, 1.0
"""Seconds between two looks at whether a task has finished."""


def celery_task(
    inbox: Inbox,
    task: str,
    *,
    app: Celery,
    name: str | None = None,
    finished: bool = False,
    classify: Classify | None = None,
    **terms: Unpack[TermSettings],
) -> CeleryDestination:
    """Add a destination that hands events to a task; it is called as the task is, unless `name` says otherwise.

    By default a delivery is done when the broker has its task. With `finished` it is done when the task has succeeded,
    within `timeout` (60 s); what a failed task raised, and `classify`, decide as for a handler. That needs a result
    backend. `terms` are those of `[destination.NAME]`.

    >>> celery_task(inbox, "billing.handle_invoice", app=celery)
    >>> inbox.route("stripe", "billing.handle_invoice", when={"type": "invoice.*"})
    """
    if finished:
        terms.setdefault("timeout", 60.0)
    chosen = build.terms_of(name or task, **terms, classify=classify, shared=inbox.classifiers)
    return inbox.add_destination(CeleryDestination(task, app, name=name, finished=finished, terms=chosen))


class CeleryDestination:
    """See `Destination`."""

    kind = "celery"
    crash_tolerance = CRASH_TOLERANCE

    def __init__(
        self, task: str, app: Celery, *, name: str | None = None, finished: bool = False, terms: Terms | None = None
    ) -> None:
        self.name = name or task
        self.id = 0
        self.terms = terms or Terms()
        self.address = task
        self._app = app
        self._finished = finished
        self._threads: ThreadPoolExecutor | None = None
        self._connections: Any = None

    async def open(self) -> None:
        if self._finished:
            self._check_backend()
        self._threads = ThreadPoolExecutor(self.terms.concurrency, thread_name_prefix=f"oncehook-{self.name}")
        # Connections of our own: Celery's are tried again for ever, and would hand over long after we have given up.
        once = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
        connection = self._app.connection_for_write(transport_options=once)
        self._connections = connection.Pool(self.terms.concurrency)

    def _check_backend(self) -> None:
        from celery.backends.base import DisabledBackend  # type: ignore[import-untyped]

        if isinstance(self._app.backend, DisabledBackend):
            raise ConfigError(
                f'Destination "{self.name}" waits until its tasks have finished, and Celery keeps no results.',
                hint="Give the Celery app a result backend, or leave `finished` out.",
            )

    async def close(self) -> None:
        if self._threads is not None:
            await self._in_thread(self._connections.force_close_all)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def attempt(self, lease: Lease) -> Result:
        task_id = task_id_of(lease)
        try:
            async with asyncio.timeout(self.terms.timeout) as limit:
                if self._finished:
                    return await self._see_it_finish(lease, task_id)
                await self._in_thread(self._send, lease, task_id)
                faults.point("after_effect")
                return WELL
        except TimeoutError as error:
            if not limit.expired():
                return _judge(error)
            what = "task has not finished" if self._finished else "broker did not take the task"
            return _passing(f"The {what} within {self.terms.timeout:g} s.")
        except Exception as error:
            return _judge(error)

    async def _see_it_finish(self, lease: Lease, task_id: str) -> Result:
        if lease.delivery.attempt > 1:
            # Of an attempt whose end nobody saw, or that failed: the result stands under the same id.
            earlier = await self._in_thread(self._app.backend.get_task_meta, task_id)
            if earlier["status"] == "SUCCESS":
                return Result(evidence=kept_result(earlier["result"]))
            await self._in_thread(self._app.backend.forget, task_id)
        await self._in_thread(self._send, lease, task_id)
        wait = _SOONEST
        while True:
            # Asked, not listened for: Celery's listener for results is not made for many threads.
            meta = await self._in_thread(self._app.backend.get_task_meta, task_id)
            if meta["status"] == "SUCCESS":
                return Result(evidence=kept_result(meta["result"]))
            if meta["status"] in ("FAILURE", "REVOKED"):
                return failure(_raised(meta["result"]), self.terms.rules)
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, _LATEST)

    def _send(self, lease: Lease, task_id: str) -> None:
        connection = self._connections.acquire(block=True, timeout=self.terms.timeout)
        try:
            # No retries of Celery's own: ours are on disk.
            self._app.send_task(
                self.address,
                args=[_told(lease)],
                task_id=task_id,
                headers=_headers(lease),
                connection=connection,
                retry=False,
            )
        except BaseException:
            self._connections.replace(connection)
            raise
        connection.release()

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def task_id_of(lease: Lease) -> str:
    """The delivery's id; of a replay, with its run: the result of the first run must not answer for it."""
    own = str(lease.delivery.id)
    return own if lease.delivery.run == 1 else f"{own}.{lease.delivery.run}"


def _told(lease: Lease) -> dict[str, Any]:
    """What the task is called with: plain values, whatever the serializer."""
    told: dict[str, Any] = {
        "id": str(lease.event.id),
        "source": lease.event.source,
        "type": lease.event.type,
        "key": lease.event.key,
        "subject": lease.event.subject,
        "received_at": lease.event.received_at.isoformat(),
        "idempotency_key": outward_id(lease),
        "attempt": lease.delivery.attempt,
        "run": lease.delivery.run,
    }
    try:
        return {**told, "body": lease.event.body.decode()}
    except UnicodeDecodeError:
        return {**told, "body": None, "body_base64": base64.b64encode(lease.event.body).decode()}


def _headers(lease: Lease) -> dict[str, Any]:
    return {
        "oncehook_event_id": str(lease.event.id),
        "oncehook_key": lease.event.key,
        "oncehook_idempotency_key": outward_id(lease),
        "oncehook_source": lease.event.source,
        "oncehook_subject": lease.event.subject,
        "oncehook_attempt": lease.delivery.attempt,
        "oncehook_run": lease.delivery.run,
    }


def _raised(result: object) -> BaseException:
    return result if isinstance(result, BaseException) else RuntimeError(str(result))


def _judge(error: Exception) -> Result:
    """Whatever keeps a task from its broker passes, except what cannot be put into a message."""
    from kombu.exceptions import EncodeError

    return failure(error) if isinstance(error, EncodeError) else _passing(f"{type(error).__name__}: {error}")


def _passing(said: str) -> Result:
    return Result(Category.transient, Evidence(error=said.split("\n")[0][:500]))
