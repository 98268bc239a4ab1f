"""The addresses that a name leads to, as far as they may be called; kept for a few seconds.

`direct` asks before it connects, and judges every address once more on the socket (S17); `proxied` asks for a proxy.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from oncehook.outbound.addresses import AddressRefused, Guard

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses a host's name leads to."""

KEPT: Final = 10.0
"""Seconds for which a name is not looked up again. What it led to is judged at every connection all the same."""
_MOST: Final = 1000
"""Names that are kept at a time."""


class Names:
    """What names lead to. Whoever asks for one that is being looked up waits for that answer."""

    def __init__(self, guard: Guard, look_up: LookUp | None = None) -> None:
        self._guard = guard
        self._look_up = look_up or look_up_name
        self._kept: dict[tuple[str, int], tuple[float, deque[str]]] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[Sequence[str]]] = {}

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Those that may be called, each time beginning with another one. Raises OSError, also AddressRefused."""
        now = asyncio.get_running_loop().time()
        kept = self._kept.get((host, port))
        if kept is not None and now < kept[0] + KEPT:
            kept[1].rotate(-1)
            return list(kept[1])
        found = await _outcome(self._ask(host, port))
        self._keep((host, port), now, found)
        return found

    def _ask(self, host: str, port: int) -> asyncio.Task[Sequence[str]]:
        task = self._asking.get((host, port))
        if task is None:
            task = self._asking[host, port] = asyncio.create_task(self.resolve(host, port))
            task.add_done_callback(lambda done: self._asked((host, port), done))
        return task

    def _asked(self, key: tuple[str, int], done: asyncio.Task[Sequence[str]]) -> None:
        self._asking.pop(key, None)
        if not done.cancelled():
            done.exception()  # when nobody waits any more, nobody needs to hear of it

    def _keep(self, key: tuple[str, int], now: float, found: Sequence[str]) -> None:
        if len(self._kept) >= _MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = (now, deque(found))

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """The allowed ones among the addresses of a name; when there are none, the name is refused."""
        refused: list[AddressRefused] = []
        allowed: list[str] = []
        for address in await self._look_up(host, port):
            try:
                self._guard.check(address)
            except AddressRefused as error:
                refused.append(error)
            else:
                allowed.append(address)
        if refused and not allowed:
            raise refused[0]
        if not allowed:
            raise OSError("the name leads to no address")
        return allowed

    def close(self) -> None:
        """Whoever still waits gets an error."""
        for task in self._asking.values():
            task.cancel()


async def _outcome(task: asyncio.Task[Sequence[str]]) -> Sequence[str]:
    """Wait for it and leave it running: others may wait after this one has given up."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        me = asyncio.current_task()
        if task.cancelled() and me is not None and not me.cancelling():
            raise OSError("this client was closed") from None  # not we were called off, but the look-up
        raise


async def look_up_name(host: str, port: int) -> Sequence[str]:
    """Ask the system, on a thread of its own: a name server that hangs must hold up nobody else's work."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Sequence[str]] = loop.create_future()

    def tell(error: OSError | None, addresses: Sequence[str] = ()) -> None:
        if not found.done():
            found.set_exception(error) if error else found.set_result(addresses)

    def ask() -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile: nobody waits
            try:
                infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            except (OSError, UnicodeError) as error:
                reason = error if isinstance(error, OSError) else OSError("the name cannot be written for the DNS")
                loop.call_soon_threadsafe(tell, reason)
            else:
                loop.call_soon_threadsafe(tell, None, list(dict.fromkeys(str(info[4][0]) for info in infos)))

    threading.Thread(target=ask, name="oncehook-dns", daemon=True).start()
    return await found
