"""Celery as a destination: a delivery becomes a task. It is done when the broker has the task, or when it has finished.

The task's id is the delivery's id, so that a task sent twice after a crash does not look like two events; a replay has
an id of its own. An unreachable broker is transient: the delivery stays in the store and is retried.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, Unpack

import msgspec

from oncehook import faults
from oncehook.categories import Classify
from oncehook.destinations.base import WELL, Result, Terms
from oncehook.destinations.handler import failure, kept_result
from oncehook.destinations.registry import DestinationKind
from oncehook.errors import ConfigError
from oncehook.event import outward_id
from oncehook.inbox import Inbox
from oncehook.model import Category, Evidence, Lease
from oncehook.settings import build, values
from oncehook.settings.tables import TermSettings

if TYPE_CHECKING:
    from celery import Celery  # type: ignore[import-untyped]

T = TypeVar("T")

CRASH_TOLERANCE: Final = 3
"""Crashes of the process that do not count against a delivery: its code runs elsewhere."""

_SOONEST, _LATEST = 0.05, 1.0
"""Shortest and longest seconds between two polls of a task."""


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
    """Add a destination that sends events to a task; `name` is the task's by default.

    By default a delivery is done when the broker has its task. With `finished` it is done when the task has succeeded
    within `timeout` (60 s); the error of a failed task is classified as for a handler. That needs a result backend.
    `terms` are those of `[destination.NAME]`.

    >>> celery_task(inbox, "billing.handle_invoice", app=celery)
    >>> inbox.route("stripe", "billing.handle_invoice", when={"type": "invoice.*"})
    """
    if finished:
        terms.setdefault("timeout", 60.0)
    chosen = build.terms_of(name or task, **terms, classify=classify, shared=inbox.classifiers)
    return inbox.add_destination(CeleryDestination(task, app, name=name, finished=finished, terms=chosen))


class CelerySettings(msgspec.Struct, frozen=True, kw_only=True):
    """A task of Celery: a delivery becomes a task."""

    task: Annotated[str, values.TEXT, "The task's name."]
    app: Annotated[str, values.TEXT, 'The Celery app, as "module:name".']
    finished: Annotated[bool, values.FLAG, "Done when the task has succeeded, not when the broker has it."] = False


def _build(name: str, celery: CelerySettings, settings: Any, terms: Terms) -> CeleryDestination:
    module, _, attribute = celery.app.partition(":")
    try:
        app = getattr(importlib.import_module(module), attribute or "app")
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'Destination "{name}": the Celery app "{celery.app}" cannot be loaded: {error}.',
            hint='Write it as "module:name", importable from where oncehook runs.',
        ) from error
    return CeleryDestination(celery.task, app, name=name, finished=celery.finished, terms=terms)


KIND: Final = DestinationKind(settings=CelerySettings, build=_build)


class CeleryDestination:
    """A `Destination` that sends tasks."""

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
        # Own connections: those of Celery retry for ever, and would send the task long after the timeout.
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

    def payload(self, lease: Lease) -> bytes:
        """Return the task's argument as JSON, for tests that record it."""
        return msgspec.json.encode(_build_arguments(lease))

    async def attempt(self, lease: Lease) -> Result:
        task_id = task_id_of(lease)
        try:
            async with asyncio.timeout(self.terms.timeout) as limit:
                if self._finished:
                    return await self._run_task(lease, task_id)
                await self._in_thread(self._send, lease, task_id)
                faults.point("after_effect")
                return WELL
        except TimeoutError as error:
            if not limit.expired():
                return _classify_error(error)
            what = "task has not finished" if self._finished else "broker did not take the task"
            return _build_transient(f"The {what} within {self.terms.timeout:g} s.")
        except Exception as error:
            return _classify_error(error)

    async def _run_task(self, lease: Lease, task_id: str) -> Result:
        if lease.delivery.attempt > 1:
            # An earlier attempt that failed, or whose end nobody saw, has left its result under the same id.
            earlier = await self._in_thread(self._app.backend.get_task_meta, task_id)
            if earlier["status"] == "SUCCESS":
                return Result(evidence=kept_result(earlier["result"]))
            await self._in_thread(self._app.backend.forget, task_id)
        await self._in_thread(self._send, lease, task_id)
        wait = _SOONEST
        while True:
            # Polled, because Celery's listener for results does not support many threads.
            meta = await self._in_thread(self._app.backend.get_task_meta, task_id)
            if meta["status"] == "SUCCESS":
                return Result(evidence=kept_result(meta["result"]))
            if meta["status"] in ("FAILURE", "REVOKED"):
                error = meta["result"]
                error = error if isinstance(error, BaseException) else RuntimeError(str(error))
                return failure(error, self.terms.rules)
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, _LATEST)

    def _send(self, lease: Lease, task_id: str) -> None:
        connection = self._connections.acquire(block=True, timeout=self.terms.timeout)
        try:
            # No retries by Celery: the inbox retries from disk.
            self._app.send_task(
                self.address,
                args=[_build_arguments(lease)],
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
    """Return the delivery's id; for a replay, with the run, so that the first run's result does not count."""
    own = str(lease.delivery.id)
    return own if lease.delivery.run == 1 else f"{own}.{lease.delivery.run}"


def _build_arguments(lease: Lease) -> dict[str, Any]:
    """Build the task's argument from plain values, which any serializer can encode."""
    fields: dict[str, Any] = {
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
        return {**fields, "body": lease.event.body.decode()}
    except UnicodeDecodeError:
        return {**fields, "body": None, "body_base64": base64.b64encode(lease.event.body).decode()}


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


def _classify_error(error: Exception) -> Result:
    """Classify an error of sending: transient, unless the task cannot be encoded."""
    from kombu.exceptions import EncodeError

    return failure(error) if isinstance(error, EncodeError) else _build_transient(f"{type(error).__name__}: {error}")


def _build_transient(text: str) -> Result:
    return Result(Category.transient, Evidence(error=text.split("\n")[0][:500]))
