"""ASGI: arrivals of an inbox that is mounted in an application, and the dashboard behind a proxy's path."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from oncehook.errors import NotStarted, Overloaded, Rejected
from oncehook.ingest import JSON, RETRY_AFTER, Lookup
from oncehook.sources import Network, Reply
from oncehook.web.hooks import HookRequest, Hooks
from oncehook.web.peers import Scope, direct_peer, is_within

if TYPE_CHECKING:
    from oncehook.inbox import Inbox

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[..., Awaitable[Any]]


class HookApp:
    """An ASGI application that answers every request below one prefix."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        raw: bytes | None = scope.get("raw_path")
        hook = self._hooks.open(
            scope["method"],
            scope["path"],
            quote(scope["path"]) if raw is None else raw.decode("latin-1"),
            scope["query_string"],
            scope["headers"],
            scope.get("client"),
            scope.get("root_path", ""),
        )
        try:
            hook.check_head()
            if not await _read(hook, receive):
                return  # the sender went away before the end: nothing was acknowledged, nothing is stored
        except (Rejected, Overloaded) as error:
            await _send(send, hook.refuse(error), closes=hook.closes(error))
            return
        finally:
            hook.release()
        while isinstance(decided := hook.finish(), Lookup):
            await decided.wait()
        if not isinstance(decided, Reply):
            decided = (await self._hooks.receiver.complete(decided)).reply
        await _send(send, decided)


async def _read(hook: HookRequest, receive: Receive) -> bool:
    """Read the whole body; return False where the sender aborted. Raises TooLarge and Overloaded."""
    try:
        async with asyncio.timeout(None) as timeout:
            while (message := await receive())["type"] == "http.request":
                hook.feed(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
                # Another body may use up the budget: then this one is refused while it waits for its next piece.
                hook.count(lambda: timeout.reschedule(0))
                if hook.is_refused:
                    raise Overloaded
    except TimeoutError:
        raise Overloaded from None
    return False


async def _send(send: Send, reply: Reply, *, closes: bool = False) -> None:
    headers = [*reply.framed_headers, *([(b"connection", b"close")] if closes else [])]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


class Mount:
    """The receiver as part of another application; answers 503 until the inbox is started (its lifespan)."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._hooks: Hooks | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; the last part of its path names the source."""
        receiver = self._inbox.receiver
        if self._hooks is None or receiver is not self._hooks.receiver:
            self._hooks = Hooks(receiver, "/", direct_peer)
        await HookApp(self._hooks)(scope, receive, send)


class WhileStarted:
    """Dashboard and API as part of another application; answers 503 with what to do until the inbox is started."""

    def __init__(self, inbox: Inbox, app: App) -> None:
        self._inbox, self._app = inbox, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._inbox.is_started:
            error = NotStarted()
            body = msgspec.json.encode({"error": str(error), "code": error.code, "hint": error.hint})
            await _send(send, Reply(503, body, (JSON, RETRY_AFTER)))
            return
        await self._app(scope, receive, send)


_PREFIX: Final = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")


class Prefixed:
    """An ASGI application behind a proxy that serves it below a path, named in `X-Forwarded-Prefix`.

    The proxy removes the prefix from requests; here it becomes ASGI's `root_path`, which links and cookies use. Only a
    configured proxy is trusted (S16).
    """

    def __init__(self, app: App, trusted: Sequence[Network]) -> None:
        self._app = app
        self._trusted = trusted

    def __call__(self, scope: Scope, receive: Any, send: Any) -> Awaitable[Any]:
        prefix = self._prefix(scope) if self._trusted and scope["type"] == "http" else ""
        if prefix:
            scope = {**scope, "root_path": prefix, "path": prefix + scope["path"]}
        return self._app(scope, receive, send)

    def _prefix(self, scope: Scope) -> str:
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-prefix"]
        prefix = named[0].rstrip("/") if len(named) == 1 else ""
        return prefix if _PREFIX.fullmatch(prefix) and is_within(direct_peer(scope), self._trusted) else ""


class OnDemand:
    """An ASGI application that its first request builds, in a thread: its imports hold up no start and no arrival."""

    def __init__(self, build: Callable[[], App]) -> None:
        self._build = build
        self._building = asyncio.Lock()
        self._app: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            async with self._building:
                if self._app is None:
                    self._app = await asyncio.to_thread(self._build)
        await self._app(scope, receive, send)


async def call_app(app: App, scope: Scope, body: bytes) -> Reply:
    """Make one request to an ASGI application in this process, and return its whole answer.

    The scope must be ASGI 2.4: with an older one Starlette ends a streamed answer at `http.disconnect`.
    """
    coming: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, list[bytes]()
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def receive() -> Message:
        return coming.pop() if len(coming) > 1 else coming[0]

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], tuple(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return Reply(status, b"".join(parts), headers)
