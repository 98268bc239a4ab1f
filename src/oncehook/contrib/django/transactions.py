"""Handlers in a Django project: with fresh connections, and on request inside `transaction.atomic`.

An atomic handler writes with the ORM as usual; its delivery is settled last, on Django's own connection, so that both
commit together under the fence, or neither does (R51, R52). `DjangoInbox.on` makes these destinations.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections, transaction

from oncehook import clock, faults
from oncehook.destinations.base import Result, Terms, settlement
from oncehook.destinations.handler import Handler, HandlerDestination, kept_result
from oncehook.errors import ConfigError
from oncehook.event import Event
from oncehook.ingest import Emitter
from oncehook.model import Emission, Lease

if TYPE_CHECKING:
    from oncehook.store.postgres.transactions import JoinedTransaction

log = logging.getLogger("oncehook.worker")


class DjangoDestination(HandlerDestination):
    """A `Destination` for handlers of a Django project; `atomic` names the database of their transaction."""

    def __init__(
        self, name: str, handler: Handler, terms: Terms, emitter: Emitter, *, atomic: str | None = None
    ) -> None:
        super().__init__(name, handler, terms, emitter)
        self._alias = atomic or ""
        self._kept: set[Any] = set()
        """Django's connections, one for each thread and database."""
        if atomic is None:
            return
        if self._on_loop or self._takes_tx:
            raise ConfigError(
                f'Handler "{name}" cannot be atomic: Django has transactions for plain functions only.',
                hint="Write it as `def`, without `tx`, and use the ORM.",
            )
        self._call = self._on_a_thread_atomically

    # -- connections ---------------------------------------------------------------------------
    # Django closes stale ones around requests, and there are none here: a handler would keep one that a restart of the
    # database has broken.

    async def _in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        return await super()._in_thread(self._call_tidily, function, *arguments)

    def _call_tidily(self, function: Callable[..., Any], *arguments: object) -> Any:
        close_old_connections()
        try:
            return function(*arguments)
        finally:
            close_old_connections()
            self._kept.update(connections.all(initialized_only=True))

    async def close(self) -> None:
        """Close it, and the connections of its threads, which end."""
        await super().close()
        while self._kept:
            driver = self._kept.pop().connection
            if driver is not None and getattr(driver, "pgconn", None) and not driver.pgconn.transaction_status:
                driver.close()

    async def _on_the_loop(self, lease: Lease, event: Event) -> Result:
        tidy = sync_to_async(close_old_connections)
        await tidy()
        try:
            return await super()._on_the_loop(lease, event)
        finally:
            await tidy()

    # -- transactions --------------------------------------------------------------------------

    async def _on_a_thread_atomically(self, lease: Lease, event: Event) -> Result:
        for emission in await self._in_thread(self._call_atomically, lease, event):
            emission.report()
        return Result(settled=True)

    def _call_atomically(self, lease: Lease, event: Event) -> Sequence[Emission]:
        started = clock.perf()
        commits: list[bool] = []
        try:
            with transaction.atomic(using=self._alias, durable=True):
                # Registered first, so that it runs even if one of the handler's own on_commit callbacks raises.
                transaction.on_commit(lambda: commits.append(True), using=self._alias)
                returned = self._handle(event)
                well = Result(evidence=kept_result(returned), emits=self._emitter.emissions_blocking(event.finish()))
                faults.point("before_tx_settle")
                lease.is_settling = True
                joined = self._join_transaction()
                joined.settle(settlement(self.terms, lease, well, clock.perf() - started))
        except Exception:
            if not commits:
                raise
            log.exception(
                "handler.on_commit_failed", extra={"fields": {"destination": self.name, "event_id": event.id}}
            )
        if not commits:
            raise transaction.TransactionManagementError("The handler's transaction was rolled back.")
        joined.follow_up()
        return well.emits

    def _handle(self, event: Event) -> object:
        returned = self.handler(event)
        if inspect.isawaitable(returned):
            raise ConfigError(f'Handler "{self.name}" is asynchronous, and cannot be atomic.')
        if transaction.get_rollback(using=self._alias):
            # Django would roll back silently, and undo the settlement with it.
            raise transaction.TransactionManagementError("The handler has marked its transaction to be rolled back.")
        return returned

    def _join_transaction(self) -> JoinedTransaction:
        from oncehook.store.postgres import PostgresStore

        # only a PostgreSQL store can be in a database of Django's
        assert isinstance(self._emitter.store, PostgresStore)
        return self._emitter.store.join_transaction(connections[self._alias].connection)
