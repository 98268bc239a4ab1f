"""FastAPI, real, under a real uvicorn: the mount, a route of one's own, the dashboard, and two lifespans."""

# Annotations are real here: FastAPI reads them, and some name what only a test knows.

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Response
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount, Route

from oncehook import Inbox
from oncehook.contrib.asgi import Answered, Received, answer, lifespan, received
from oncehook.errors import ConfigError, NotStarted
from oncehook.logs import FEW
from oncehook.testing import signed
from tests.contrib.running import Example, Program, ask, post

SECRET = "whsec_example"
ORDER = {"id": "1", "type": "order.paid", "customer": "c1"}


def payment(secret: str = SECRET, **options: Any) -> tuple[bytes, dict[str, str]]:
    """A hook of Stripe's, signed with this secret."""
    inbox = Inbox("sqlite:unused.db")
    made = signed(inbox.source("payments", preset="stripe", secret=secret), "invoice.paid", **options)
    return made.body, {name.decode(): value.decode() for name, value in made.headers}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with Example("fastapi_app", tmp_path_factory.mktemp("fastapi")) as example:
        program = example.start("STRIPE_SECRET=whsec_example uvicorn app:app --port 8000").wait_for_port()
        yield program
        log = program.stop()
        assert program.process.returncode in (0, -15), log  # uvicorn raises the signal again when it is done
        assert "Traceback" not in log, log


def test_the_readme(program: Program) -> None:
    first, second = (post(f"{program.url}/hooks/orders", ORDER) for _ in range(2))
    assert (first.said, second.said) == ((200, "accepted"), (200, "duplicate"))
    assert first.json["event_id"] == second.json["event_id"]
    while ask("GET", f"{program.url}/shipped").json != ["1"]:
        time.sleep(0.02)


def test_a_route_of_ones_own_runs_for_genuine_requests_only(program: Program) -> None:
    body, headers = payment()
    first, second = (post(f"{program.url}/payments", body, headers) for _ in range(2))
    assert (first.said, second.said) == ((200, "accepted"), (200, "duplicate"))
    forged = post(f"{program.url}/payments", *payment("whsec_another"))
    assert forged.said == (401, "signature_invalid")
    assert forged.headers["content-type"] == "application/json"


def test_what_is_too_large_is_refused_before_it_is_read(program: Program) -> None:
    large = b"x" * (1 << 20) + b"x"
    assert post(f"{program.url}/payments", large).said == (413, "too_large")
    assert post(f"{program.url}/hooks/orders", large).said == (413, "too_large")


def test_a_stranger_at_the_mount_learns_nothing(program: Program) -> None:
    unknown, not_a_post = post(f"{program.url}/hooks/nobody", ORDER), ask("GET", f"{program.url}/hooks/orders")
    assert unknown.said == not_a_post.said == (401, "signature_invalid")
    assert unknown.body == not_a_post.body


def test_the_dashboard_is_for_whom_the_application_lets_in(program: Program) -> None:
    assert ask("GET", f"{program.url}/inbox/", headers={"x-user": "staff"}).status == 200
    assert ask("GET", f"{program.url}/inbox/").status in (401, 403, 303)


# -- in this process ---------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 5000))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://app") as asking,
    ):
        yield asking


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    made = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    made.source("orders", verify="none", key="$.id", ignore=["ping"], max_body="1KiB", budget="60s")
    return made


async def test_the_inbox_lives_around_the_applications_own_lifespan(inbox: Inbox) -> None:
    told = []

    @contextlib.asynccontextmanager
    async def own(app: Any) -> AsyncIterator[dict[str, Any]]:
        told.append(await inbox.emit("app", "started", {}))  # it runs already
        yield {"greeting": "hello"}
        told.append(await inbox.emit("app", "stopping", {}))  # it still does

    async def greet(request: Request) -> Response:
        return Response(request.state.greeting)

    app = Starlette(routes=[Route("/", greet)], lifespan=lifespan(inbox, own))
    async with app.router.lifespan_context(app) as state:
        assert state == {"greeting": "hello"}
    assert len(told) == 2
    assert not inbox.is_started


async def test_a_forgotten_lifespan_is_503_with_a_hint_in_the_log(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    """R1: what cannot be stored is asked for again, genuine or not, at every way in."""
    inbox.source("meta", preset="whatsapp-cloud", secret="s", verify_token="token")
    app = FastAPI()
    app.mount("/hooks", inbox.asgi())
    app.add_exception_handler(Answered, answer)

    @app.post("/orders")
    async def orders(hook: Annotated[Received, Depends(received(inbox, "orders"))]) -> Response:
        return hook.response()

    handshake = "/hooks/meta?hub.mode=subscribe&hub.verify_token=token&hub.challenge=1"
    async with served(app) as client:
        answers = [
            await client.post("/hooks/orders", json={"id": "1"}),
            await client.post("/orders", json={"id": "1"}),
            await client.post("/hooks/orders", json={"id": "1"}, headers={"content-length": "5000"}),
            await client.post("/hooks/nobody", json={"id": "1"}),
            await client.get(handshake),
        ]
    assert [(a.status_code, a.json()["code"], a.headers["retry-after"]) for a in answers] == [
        (503, "not_started", "5")
    ] * len(answers)
    assert (await inbox.receive("orders", {}, b'{"id": "1"}')).reply.status == 503
    assert caplog.text.count("lifespan=inbox.lifespan") == FEW, "of six in a second the last is only counted"
    with pytest.raises(NotStarted) as refused:
        await inbox.emit("app", "started", {})
    assert "lifespan=inbox.lifespan" in refused.value.hint
    async with inbox.running():
        assert (await inbox.receive("orders", {}, b'{"id": "1"}')).outcome == "accepted"
    assert (await inbox.receive("orders", {}, b'{"id": "2"}')).reply.status == 503


async def test_a_dependency_gives_what_was_kept(inbox: Inbox) -> None:
    seen: list[Received] = []
    taken: list[int] = []
    app = FastAPI(lifespan=inbox.lifespan)
    app.add_exception_handler(Answered, answer)

    @app.post("/orders")
    async def orders(hook: Annotated[Received, Depends(received(inbox, "orders"))]) -> Response:
        seen.append(hook)
        return hook.response()

    async with served(app) as client:
        answers = [await client.post("/orders", json=data) for data in (ORDER, ORDER, {**ORDER, "more": 1})]
        ignored = await client.post("/orders", json={"id": "2", "type": "ping"})
        large = await client.post("/orders", content=b" " * 1025)
        streamed = await client.post("/orders", content=_stream(taken))
        encoded = await client.post("/orders", json=ORDER, headers={"content-encoding": "gzip"})
    assert [a.json()["status"] for a in answers] == ["accepted", "duplicate", "conflict"]
    assert [hook.is_new for hook in seen] == [True, False, False]
    assert {tuple(hook.event_ids) for hook in seen} == {(answers[0].json()["event_id"],)}
    assert seen[0].json() == ORDER
    assert (ignored.status_code, ignored.json()) == (200, {"status": "ignored"})
    assert [a.status_code for a in (large, streamed, encoded)] == [413, 413, 415]
    assert sum(taken) < 2048
    assert encoded.json()["code"] == "encoded"


async def _stream(taken: list[int]) -> AsyncIterator[bytes]:
    """A body whose length nobody says, and what was taken of it."""
    for _ in range(100):
        taken.append(200)
        yield b" " * 200


async def test_a_store_that_cannot_write_is_503_with_retry_after(inbox: Inbox) -> None:
    app = FastAPI(lifespan=inbox.lifespan)
    app.add_exception_handler(Answered, answer)

    @app.post("/orders")
    async def orders(hook: Annotated[Received, Depends(received(inbox, "orders"))]) -> Response:
        raise AssertionError("nothing was kept")

    async with served(app) as client:
        await inbox.store.close()
        answered = await client.post("/orders", json=ORDER)
    assert (answered.status_code, answered.json()["code"]) == (503, "store_unavailable")
    assert answered.headers["retry-after"] == "5"


async def test_without_the_exception_handler_the_status_is_right(inbox: Inbox) -> None:
    app = FastAPI(lifespan=inbox.lifespan)

    @app.post("/orders")
    async def orders(hook: Annotated[Received, Depends(received(inbox, "orders"))]) -> None: ...

    async with served(app) as client:
        assert (await client.post("/orders", content=b" " * 1025)).status_code == 413


async def test_a_handshake_is_answered_where_the_route_takes_get(tmp_path: Path) -> None:
    inbox = Inbox(f"sqlite:{tmp_path / 'inbox.db'}")
    inbox.source("whatsapp", preset="whatsapp-cloud", secret="s", verify_token="token")
    app = FastAPI(lifespan=inbox.lifespan)
    app.add_exception_handler(Answered, answer)

    @app.api_route("/whatsapp", methods=["GET", "POST"])
    async def whatsapp(hook: Annotated[Received, Depends(received(inbox, "whatsapp"))]) -> Response:
        return hook.response()

    asked = {"hub.mode": "subscribe", "hub.challenge": "1158", "hub.verify_token": "token"}
    async with served(app) as client:
        right = await client.get("/whatsapp", params=asked)
        wrong = await client.get("/whatsapp", params={**asked, "hub.verify_token": "guess"})
    assert (right.status_code, right.text) == (200, "1158")
    assert wrong.status_code == 403


async def test_starlette_mounts_it_too(inbox: Inbox) -> None:
    app = Starlette(routes=[Mount("/hooks", inbox.asgi())], lifespan=inbox.lifespan)
    async with served(app) as client:
        assert (await client.post("/hooks/orders", json=ORDER)).json()["status"] == "accepted"


def test_an_unknown_source_is_said_at_once(inbox: Inbox) -> None:
    with pytest.raises(ConfigError, match='no source "orderz"'):
        received(inbox, "orderz")
