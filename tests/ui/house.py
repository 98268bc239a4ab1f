"""A whole inbox with its dashboard, on a thread of its own: real store, real worker, real server, real destinations.

Tests drive it with a browser or a plain client. `lived_in` fills an hour of its past: duplicates, conflicts, forgeries,
retries and dead letters of several causes.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import linecache
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount

from oncehook import clock
from oncehook.inbox import Inbox
from oncehook.model import Level
from oncehook.secret import Secret
from oncehook.settings.tables import TokenConfig
from oncehook.testing import send, signed
from oncehook.upkeep import Limits
from oncehook.web import api, dashboard
from oncehook.web.auth import Access
from oncehook.web.live import Broadcast
from oncehook.web.server import listen, serve_on
from oncehook.web.session import Auth, DashboardSessions

T = TypeVar("T")
TOKENS = {"viewer": "vera-" + "v" * 40, "operator": "otto-" + "o" * 40, "admin": "ana-" + "a" * 40}


HIDDEN = "k7_Qm2ZxN4vT9sLdR1wYhE"
SHOP = """
import asyncio
from oncehook import Event, GiveUp, RetryLater


async def reply(event: Event) -> None:
    await asyncio.sleep(0.002)


async def ship(event: Event) -> None:
    await asyncio.sleep(mood.slow)
    order = event.json()
    if mood.ship == "later":
        raise RetryLater("the warehouse is closed", after="20m")
    if mood.ship == "broken" and order.get("digital"):
        try:
            order["shipping_address"]
        except KeyError as missing:
            raise GiveUp(f"no {missing}") from None
""".lstrip()


class Receiver(BaseHTTPRequestHandler):
    """Somebody else's server, in whatever mood it is told."""

    protocol_version = "HTTP/1.1"
    moods: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        status, body = self.moods.get(self.path, (200, b"thank you"))
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@dataclass
class Mood:
    """What handlers do; tests change it."""

    ship: str = "broken"
    slow: float = 0.0


@dataclass
class Answered:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class House:
    """The inbox, its dashboard, and their addresses."""

    folder: Path
    prefix: str = ""
    store: str = ""
    authorize: Callable[[Any], str | None] | None = None
    mood: Mood = field(default_factory=Mood)
    links: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.theirs = ThreadingHTTPServer(("127.0.0.1", 0), type("Theirs", (Receiver,), {"moods": {}}))
        threading.Thread(target=self.theirs.serve_forever, daemon=True).start()
        self.moods: dict[str, tuple[int, bytes]] = self.theirs.RequestHandlerClass.moods  # type: ignore[attr-defined]
        self.inbox = self._furnish()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.result()

    def _furnish(self) -> Inbox:
        inbox = Inbox(self.store or f"sqlite:{self.folder / 'house.db'}")
        patient = {"budget": "90s"}
        inbox.source("whatsapp", preset="whatsapp-cloud", secret="wa-secret", verify_token="x", **patient)
        inbox.source("stripe", preset="stripe", secret="whsec_house", subject="$.data.object.customer", **patient)
        inbox.source("orders", verify="none", key="$.id", subject="$.order", type="$.type", **patient)
        inbox.source("partner", verify="none", key="$.id", path=HIDDEN, **patient)
        there = f"http://127.0.0.1:{self.theirs.server_port}"
        inbox.destination("n8n", url=f"{there}/webhook/abc", allow_private=True, sign="n8n", breaker={"failures": 50})
        inbox.destination("billing", url=f"{there}/billing", allow_private=True)
        inbox.route("whatsapp", "n8n")
        inbox.route("stripe", "billing")
        # Compiled under the name it would have in a program of one's own: that is what tracebacks and pages show.
        shop: dict[str, Any] = {"__name__": "app.hooks", "mood": self.mood}
        exec(compile(SHOP, "app/hooks.py", "exec"), shop)
        linecache.cache["app/hooks.py"] = (len(SHOP), None, SHOP.splitlines(keepends=True), "app/hooks.py")
        inbox.on("whatsapp")(shop["reply"])
        inbox.on("orders", retry=["10s", "1m", "5m"], breaker={"failures": 1000})(shop["ship"])
        inbox.limits = Limits(dead=100, oldest_due=300.0, daily_volume={"whatsapp": 0}, disk=0.01)
        return inbox

    # -- running -------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.stream = Broadcast()
        self.inbox.observer.audience = self.stream
        try:
            async with self.inbox.running():
                listener = listen("127.0.0.1", 0)
                self.port = listener.getsockname()[1]
                async with serve_on(listener, self._app()):
                    self._ready.set_result(None)
                    await self._over.wait()
                    self.stream.close()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    def _app(self) -> Starlette:
        tokens = [
            TokenConfig(name=role, token=Secret.from_env(role, env={role: text}), role=role)
            for role, text in TOKENS.items()
        ]
        access = Access(None, tokens, self.inbox.local_token)
        self.door = Auth(
            access, DashboardSessions(self.inbox.store), authorize=self.authorize, announce=self.links.append
        )
        admin: Sequence[BaseRoute]
        if self.authorize is not None:
            hosted = dashboard.dashboard(self.inbox, self.stream, authorize=self.authorize)
            return Starlette(routes=[Mount(self.prefix, hosted)])
        admin = [
            *api.routes(self.inbox.admin, access, self.stream),
            *dashboard.routes(self.inbox.admin, self.door, self.stream),
        ]
        return Starlette(routes=[Mount(self.prefix, routes=admin)] if self.prefix else admin)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Have something done on the house's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self.theirs.shutdown()
        self.theirs.server_close()

    # -- using ---------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def receive(self, source: str, kind: str | None = None, **how: Any) -> list[str]:
        """Arrivals through the inbox's front door; the ids of their events."""
        answers = self.do(send(self.inbox, source, kind, **how))
        return [answer.json().get("event_id") or answer.json().get("event_ids", [""])[0] for answer in answers]

    def message(self, contact: str, kind: str = "message.text", *, repeat: int = 1) -> str:
        """A WhatsApp message or status about somebody."""
        sample = signed(self.inbox.sources["whatsapp"], kind).body
        return self.receive("whatsapp", kind, body=sample.replace(b"5511988880142", contact.encode()), repeat=repeat)[0]

    def order(self, key: str, **fields: object) -> str:
        body = {"id": key, "type": "order.paid", "order": f"order/{key}", "digital": False, **fields}
        return self.receive("orders", body=body)[0]

    def levels(self) -> dict[str, Level]:
        return dict(self.do(self.inbox.store.levels()))

    def settle(self) -> None:
        """Wait until nothing is at work and nothing is due, seen twice without a change between.

        What becomes due while one look is taken is not yet due by the time that look began with.
        """
        seen = None
        while True:
            levels = self.levels()
            now = {name: (level.pending, level.done, level.dead, level.failures) for name, level in levels.items()}
            if now == seen and not any(
                level.leased or (level.oldest_due is not None and not level.paused_at) for level in levels.values()
            ):
                return
            seen = now
            self.do(asyncio.sleep(0.005))

    def ask(
        self, method: str, path: str, *, form: dict[str, str] | None = None, headers: dict[str, str] | None = None
    ) -> Answered:
        """A plain request, without any browser."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
        body = None if form is None else urlencode(form).encode()
        sent = {"content-type": "application/x-www-form-urlencoded"} if form is not None else {}
        connection.request(method, self.prefix + path, body, sent | (headers or {}))
        response = connection.getresponse()
        answer = Answered(
            response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        )
        connection.close()
        return answer

    def login(self, role: str = "admin") -> str:
        """A session of this role, as the value of a Cookie header."""
        answer = self.ask("POST", "/login", form={"password": TOKENS[role]}, headers={"sec-fetch-site": "same-origin"})
        assert answer.status == 303, answer.text
        return answer.headers["set-cookie"].partition(";")[0]


HOUR = 3600.0
KINDS = ("message.text", "message.text", "status.delivered")
CONTACTS = ("5511988880142", "5521977770381", "5531966660027", "5541955550993", "5571944440318")


def lived_in(house: House) -> None:
    """An hour in the life of an inbox. The clock must have been set back by as much before the house was opened."""
    steps = 60
    house.moods["/billing"] = (200, b"ok")
    for step in range(steps):
        _step(house, step)
        house.settle()
        clock.forward(HOUR / steps)
    house.settle()
    worker = house.inbox._describe_worker()  # it has not been heard of for an hour, by a clock that ran away
    assert worker is not None
    house.do(house.inbox.store.register_worker(worker))


def _step(house: House, step: int) -> None:
    chance = (step * 7) % 10
    for n in range(2 + chance // 3):
        kind = KINDS[(step * 3 + n) % len(KINDS)]
        house.message(CONTACTS[(step + n * 2) % len(CONTACTS)], kind, repeat=2 if (step + n) % 5 == 0 else 1)
    house.order(f"req_{step:04}", repeat_of=step, digital=step % 9 == 4)
    if step % 6 == 2:
        house.receive("stripe", None, forge=True)
    if step % 3 == 0:
        house.moods["/billing"] = (422, b'{"error":"customer is archived"}') if step % 12 == 9 else (200, b"ok")
        house.receive("stripe", None)
    if step == 30:
        house.moods["/webhook/abc"] = (502, b"<html><head><title>502 Bad Gateway</title></head></html>")
    if step == 33:
        house.moods["/webhook/abc"] = (200, b"ok")
    if step == 30:
        house.order("req_twice", note="first")
        house.order("req_twice", note="changed", extra=[1, 2, 3])
    if step == 54:
        house.moods["/webhook/abc"] = (503, b"busy")


def event_json(house: House, event_id: str) -> dict[str, Any]:
    """An event as the API tells it."""
    answer = house.ask("GET", f"/api/v1/events/{event_id}", headers={"authorization": f"Bearer {TOKENS['admin']}"})
    found: dict[str, Any] = json.loads(answer.body)
    return found
