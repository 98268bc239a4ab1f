"""A desk with a real store behind it and the API in front: called as a server would call it, without the socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount

from oncehook.admin import Admin
from oncehook.destinations.base import WELL, Result, Terms
from oncehook.model import Lease
from oncehook.routes import Route
from oncehook.secret import Secret
from oncehook.settings.tables import TokenConfig
from oncehook.sources import Source, build
from oncehook.store.base import Store
from oncehook.store.cipher import Cipher
from oncehook.store.postgres import PostgresStore
from oncehook.store.sqlite import SqliteStore
from oncehook.upkeep import Limits
from oncehook.verify import Hmac, Nothing
from oncehook.web import api
from oncehook.web.auth import Access, Authorize
from oncehook.web.live import Broadcast
from tests.schemas import built_schema
from tests.servers import store_url
from tests.store.making import AdminOnly, enrolled
from tests.wire import Answer

CANARY = "canary-signing-secret-71f0"
PATH = "k7_Qm2ZxN4vT9sLdR1wYhE"
TOKENS = {"admin": "token-of-the-admin", "operator": "token-of-olga", "viewer": "token-of-vera", "oscar": "of-oscar"}
LOCAL = "the-local-token"


@dataclass
class Place:
    """A destination that nobody works here."""

    name: str
    id: int
    address: str
    kind: str = "http"
    terms: Terms = field(default_factory=Terms)
    crash_tolerance: int = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def attempt(self, lease: Lease) -> Result:
        return WELL


def sources() -> dict[str, Source]:
    signed = Hmac(header="X-Signature", prefix="sha256=")
    return {
        "orders": build(
            "orders",
            verify=signed,
            secret=[CANARY.encode()],
            key="$.id",
            subject="$.customer",
            preview=["$.message.text", "$.text"],
        ),
        "payments": build("payments", verify=Nothing(), path=PATH, key="$.id"),
    }


def access(**more: Any) -> Access:
    env = {name.upper(): token for name, token in TOKENS.items()}
    holders = [("olga", "operator", "OPERATOR"), ("vera", "viewer", "VIEWER"), ("oscar", "operator", "OSCAR")]
    tokens = [
        TokenConfig(name=name, role=role, token=Secret.from_env(variable, env=env)) for name, role, variable in holders
    ]
    return Access(Secret.from_env("ADMIN", env=env), tokens, LOCAL, **more)


@dataclass
class House:
    store: Store
    app: Starlette
    stream: Broadcast
    nudges: list[int]
    admin: Admin

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        role: str | None = "operator",
        headers: Mapping[str, str] | None = None,
        peer: str = "203.0.113.7",
        prefix: str = "/api/v1",
    ) -> Answer:
        """One request, and its whole answer."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        named = {"Host": "inbox.example", **(headers or {})}
        if role is not None:
            named["Authorization"] = f"Bearer {TOKENS[role]}"
        return await call(self.app, method, prefix + path, raw, named, peer)

    async def get(self, path: str, **more: Any) -> dict[str, Any]:
        """What is answered to a question that may be asked."""
        answer = await self.ask("GET", path, **more)
        assert answer.status == 200, answer.body
        return answer.json

    async def post(self, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
        """What is answered to an act that may be done."""
        answer = await self.ask("POST", path, body, **more)
        assert answer.status in (200, 202), answer.body
        return answer.json

    async def refused(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, str]:
        """Status and code of a refusal, which has its three fields."""
        answer = await self.ask(method, path, body, **more)
        assert set(answer.json) == {"error", "code", "hint"}, answer.body
        assert answer.json["error"]
        return answer.status, answer.json["code"]


def scope_of(method: str, target: str, headers: Mapping[str, str], peer: str) -> dict[str, Any]:
    path, _, search = target.partition("?")
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "query_string": search.encode(),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
        "client": (peer, 40000), "server": ("127.0.0.1", 4020),
    }  # fmt: skip


async def call(app: Starlette, method: str, target: str, body: bytes, headers: Mapping[str, str], peer: str) -> Answer:
    """Call an application as a server does."""
    asked, sent = [{"type": "http.request", "body": body, "more_body": False}], []

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope_of(method, target, headers, peer), receive, send)
    told = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], told, b"".join(part.get("body", b"") for part in sent[1:]))


@asynccontextmanager
async def admin_house(
    folder: Path,
    *,
    engine: str = "sqlite",
    limits: Limits | None = None,
    authorize: Authorize | None = None,
    free: float | None = None,
    cipher: Cipher | None = None,
) -> AsyncIterator[House]:
    lent = ExitStack()
    store: Store = SqliteStore(folder / "inbox.db", cipher=cipher)
    if engine == "postgres":
        store = PostgresStore(store_url(), schema=lent.enter_context(built_schema()))
    await store.open()
    try:
        await enrolled(store)
        stream = Broadcast()
        host = AdminOnly(
            store,
            sources=sources(),
            destinations={
                "crm": Place("crm", 1, "POST https://crm.example/hooks"),
                "mail": Place("mail", 2, "app.mail:send", "handler", Terms(rate=2.0)),
            },
            routes=[Route("orders", "crm"), Route("orders", "mail"), Route("payments", "crm")],
            limits=limits or Limits(),
            free=free,
        )
        admin, nudges = host.admin, host.nudges
        made = api.routes(admin, access(authorize=authorize), stream)
        yield House(store, Starlette(routes=[*made, Mount("/below/this", routes=made)]), stream, nudges, admin)
        failed = [check.name for check in await store.check() if not check.ok and check.name != "encryption"]
        assert failed == []
    finally:
        await store.close()
        lent.close()
