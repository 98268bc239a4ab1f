"""Connectors to a backend of claims: a `Connector` blocks its caller, an `AsyncConnector` its task.

`PerLoop` keeps one client for each event loop and closes it when that loop ends; `survive_forks` keeps the connections
of a process out of its children.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

C = TypeVar("C")


class Connector(Protocol):
    """A blocking connector. Any number of threads may ask at once."""

    def ask(self, request: Any) -> Any:
        """Send a request of this backend and return its reply. Raises StoreUnavailable when there is none."""

    def close(self) -> None:
        """Close all connections; asking again opens new ones."""


class AsyncConnector(Protocol):
    """A connector for event loops. Any number of tasks and loops may ask at once."""

    async def ask(self, request: Any) -> Any:
        """Send a request of this backend and return its reply. Raises StoreUnavailable when there is none."""

    async def close(self) -> None:
        """Close all connections of this loop; asking again opens new ones."""


class PerLoop(Generic[C]):
    """A client for each event loop that asks for one, because connections belong to the loop they were made on."""

    def __init__(self, make: Callable[[], C], close: Callable[[C], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[C, AsyncGenerator[None]]] = (
            WeakKeyDictionary()
        )

    async def get(self) -> C:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = self._make()
            guard = self._until_the_loop_ends(loop, client)
            self._clients[loop] = client, guard
            await anext(guard)
        return self._clients[loop][0]

    async def close(self) -> None:
        if entry := self._clients.get(asyncio.get_running_loop()):
            await entry[1].aclose()

    async def _until_the_loop_ends(self, loop: asyncio.AbstractEventLoop, client: C) -> AsyncGenerator[None]:
        # An event loop that shuts down properly closes every generator that was begun on it. That closes the
        # connections of a decorated function in a module, which nobody closes, when `asyncio.run` returns.
        try:
            yield
        finally:
            self._clients.pop(loop, None)
            await self._close(client)


class Forkable(Protocol):
    """A connector whose connections a forked child must neither use nor close."""

    lock: threading.Lock
    """Held while a connection is in use, so that no fork happens then."""

    def forget(self) -> None:
        """Drop inherited connections in the child, without closing them."""


_forkable: Final[WeakSet[Forkable]] = WeakSet()
_held: Final[list[Forkable]] = []
_changing = threading.Lock()


def survive_forks(connector: Forkable) -> None:
    """Block forks while this connector is at work, and drop its connections in the child."""
    with _changing:
        _forkable.add(connector)


def _before() -> None:
    _changing.acquire()
    for connector in list(_forkable):
        connector.lock.acquire()
        _held.append(connector)


def _in_parent() -> None:
    while _held:
        _held.pop().lock.release()
    _changing.release()


def _in_child() -> None:
    global _changing
    _changing = threading.Lock()
    while _held:
        connector = _held.pop()
        connector.lock = threading.Lock()
        connector.forget()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
