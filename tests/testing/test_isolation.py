"""A test never reaches the network, whatever it sends to, and its time stands still."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from celery import Celery  # type: ignore[import-untyped]

from oncehook import Event, Inbox, clock, presets
from oncehook.contrib.celery import celery_task
from oncehook.destinations.base import Result, Terms
from oncehook.errors import ConfigError
from oncehook.http_client import client
from oncehook.model import Lease
from oncehook.testing import BlockingTestInbox, TestInbox
from oncehook.testing.standins import MetaStandIn, N8nStandIn
from oncehook.whatsapp import EvolutionApi, EvolutionGo, MetaCloud, Sender, SendFailed, Text
from oncehook.whatsapp.storage import S3Files, StorageFailed

TO = "+55 11 98888-0142"
TO_PLAIN = "5511988880142"


@pytest.fixture(autouse=True)
def no_look_ups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every name that somebody asks the resolver for: it is that of a host on the network."""
    asked: list[str] = []

    real = socket.getaddrinfo

    def look_up(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "127.0.0.1":
            return real(host, *args, **kwargs)
        asked.append(host)
        raise socket.gaierror(f"{host} was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield asked
    assert asked == []


class Sink:
    """Somebody's server on this machine, which is no stand-in."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sink.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Silent."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def sink() -> Iterator[Sink]:
    made = Sink()
    thread = Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def program(folder: Path) -> Inbox:
    """An application as it would be imported, with everything that goes out."""
    inbox = Inbox(f"sqlite:{folder}/production.db")
    inbox.source("whatsapp", preset="whatsapp-cloud", secret="of the app", verify_token="t")
    inbox.destination("n8n", url="https://n8n.example/webhook/abc", sign="whsec_c2VjcmV0")
    inbox.route("whatsapp", "n8n")
    inbox.sender("answers", MetaCloud("a-token-of-the-app", "106540352242922"))
    celery_task(inbox, "billing.handle", app=Celery("shop", broker="amqp://broker.example"), name="billing")
    inbox.route("whatsapp", "billing")

    @inbox.on("whatsapp", "message.*")
    async def reply(event: Event) -> None:
        await inbox.send_message("answers", Text(to=TO, text="On its way"), key=event.id)

    return inbox


# -- recorded by default -----------------------------------------------------------------------


async def test_everything_that_would_go_out_is_recorded(inbox: TestInbox, tmp_path: Path) -> None:
    inbox.use(program(tmp_path))
    await inbox.send("whatsapp", "message.text")
    await inbox.drain()
    [answer] = inbox.sent("answers")
    assert (answer.to, answer.text, answer.attempt) == (TO_PLAIN, "On its way", 1)
    assert answer.message == Text(to=TO, text="On its way")
    assert answer.url == "https://graph.facebook.com/v23.0/106540352242922/messages"
    assert answer.json()["text"]["body"] == "On its way"
    [request] = inbox.sent("n8n")
    assert request.url == "https://n8n.example/webhook/abc"
    assert {"webhook-id", "webhook-signature"} <= set(request.headers)
    [task] = inbox.sent("billing")
    assert (task.url, task.json()["id"], task.json()["source"]) == ("billing.handle", request.event_id, "whatsapp")
    assert {one.status for one in await inbox.deliveries()} == {"done"}


def test_a_plain_function_does_the_same(inbox: BlockingTestInbox, tmp_path: Path) -> None:
    inbox.use(program(tmp_path))
    inbox.send("whatsapp", "message.text")
    inbox.drain()
    assert [answer.text for answer in inbox.sent("answers")] == ["On its way"]
    assert len(inbox.sent("n8n")) == len(inbox.sent("billing")) == 1


SENDERS = [
    MetaCloud("a-token-of-the-app", "106540352242922"),
    EvolutionApi("https://evolution.example", "a-key-of-the-app", "shop"),
    EvolutionGo("https://evolution.example", "a-key-of-the-app"),
]


@pytest.mark.parametrize("sender", SENDERS, ids=lambda sender: sender.api)
async def test_every_sender_is_recorded_and_gets_the_id_of_its_message(inbox: TestInbox, sender: Sender) -> None:
    inbox.sender("answers", sender)
    await inbox.start()
    await inbox.send_message("answers", Text(to=TO, text="Hello"), key="1")
    await inbox.drain()
    [sent] = inbox.sent("answers")
    assert (sent.to, sent.text) == (TO_PLAIN, "Hello")
    [delivery] = await inbox.deliveries("answers", status="done")
    [attempt] = await inbox.store.attempts_of(delivery.id)
    assert (attempt.evidence.answer or b"").startswith(b"message_id: recorded.")


class Elsewhere:
    """A destination of a kind of one's own."""

    kind = "elsewhere"
    address = "queue://orders"
    crash_tolerance = 0

    def __init__(self) -> None:
        self.name, self.id, self.terms = "queue", 0, Terms()
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")

    async def close(self) -> None:
        self.calls.append("close")

    async def attempt(self, lease: Lease) -> Result:
        self.calls.append("attempt")
        return Result()


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_kind_of_ones_own_is_recorded_too(inbox: TestInbox, allowed: bool) -> None:
    queue = inbox.add_destination(Elsewhere())
    inbox.route("app", "queue")
    if allowed:
        inbox.allow_network()
    await inbox.emit("app", "paid", {"n": 1})
    await inbox.drain()
    assert queue.calls == (["open", "attempt", "close"] if allowed else [])
    assert [(one.url, one.json()) for one in inbox.sent("queue")] == [("queue://orders", {"n": 1})]


async def test_answers_of_every_kind_are_scripted(inbox: TestInbox, tmp_path: Path) -> None:
    inbox.use(program(tmp_path))
    inbox.recorded("answers").fail(429, retry_after=7)
    inbox.recorded("billing").drop_connection()
    await inbox.send("whatsapp", "message.text")
    await inbox.drain()
    assert inbox.sent("answers") == inbox.sent("billing") == []
    waiting = {one.destination: one.category for one in await inbox.deliveries(status="pending")}
    assert waiting == {"answers": "transient", "billing": "transient"}
    await inbox.drain(retries=True)
    assert [one.status for one in inbox.recorded("answers").attempts] == [429, 200]
    assert [one.attempt for one in inbox.sent("billing")] == [2]
    inbox.recorded("billing").fail(404)
    await inbox.send("whatsapp", "message.text")
    await inbox.drain()
    [dead] = await inbox.deliveries("billing", status="dead")
    assert dead.last_error == "HTTP 404"


async def test_a_host_applications_own_worker_records_as_well(inbox: TestInbox, tmp_path: Path) -> None:
    own = program(tmp_path)
    inbox.use(own)
    async with own.lifespan(None):
        await inbox.send("whatsapp", "message.text")
        await inbox.drain()
        assert len(inbox.sent("answers")) == len(inbox.sent("n8n")) == len(inbox.sent("billing")) == 1


async def test_what_cannot_be_recorded_is_refused(inbox: TestInbox) -> None:
    inbox.destination("n8n", url="https://n8n.example/")
    inbox.on("app", name="book")(print)
    with pytest.raises(ConfigError, match="is a handler"):
        inbox.sent("book")
    with pytest.raises(ConfigError, match="no destination") as refused:
        inbox.sent("n88n")
    assert refused.value.hint == 'Did you mean "n8n"?'


async def test_what_goes_to_an_address_of_the_event_is_recorded_under_it(inbox: TestInbox) -> None:
    inbox.destination("back", url="{$.callback_url}", allow_hosts=["hooks.example.org"])
    inbox.route("app", "back")
    for number, host in enumerate(("hooks.example.org", "evil.example")):
        await inbox.emit("app", "done", {"callback_url": f"https://{host}/{number}"}, key=host)
    await inbox.drain()
    assert [sent.url for sent in inbox.sent("back")] == ["https://hooks.example.org/0"]


# -- whoever calls by himself ------------------------------------------------------------------


async def test_a_sender_that_a_handler_uses_itself_is_held_back(inbox: TestInbox) -> None:
    raised: list[Exception] = []

    @inbox.on("app")
    async def reply(event: Event) -> None:
        async with MetaCloud("a-token-of-the-app", "106540352242922") as whatsapp:
            try:
                await whatsapp.send_text(TO, "Hi")
            except SendFailed as error:
                raised.append(error)

    await inbox.emit("app", "paid", {})
    await inbox.drain()
    assert "graph.facebook.com is not called: this is a test; see inbox.allow_network()" in str(raised[0])


async def test_files_are_not_stored_elsewhere(inbox: TestInbox) -> None:
    files = S3Files("bucket", access_key="a", secret_key="s", endpoint="https://s3.example")
    with pytest.raises(StorageFailed, match=r"s3\.example is not called"):
        await files.store(b"%PDF-1.4", filename="a.pdf")
    await files.close()


async def test_a_test_of_a_destination_is_held_back(inbox: TestInbox) -> None:
    inbox.destination("n8n", url="https://n8n.example/webhook/abc")
    await inbox.start()
    tested = await inbox.admin.test_destination("n8n", actor="test")
    assert "this is a test" in str(tested)


# -- what is let through -----------------------------------------------------------------------


async def test_a_stand_in_is_called_and_recorded(inbox: TestInbox) -> None:
    async with N8nStandIn() as n8n, MetaStandIn() as meta:
        inbox.destination("n8n", url=n8n.webhook(), allow_private=True)
        inbox.route("app", "n8n")
        inbox.sender("answers", MetaCloud(meta.token, meta.phone_number_id, base_url=meta.url, allow_private=True))
        await inbox.emit("app", "paid", {"n": 1})
        await inbox.send_message("answers", Text(to=TO, text="Hi"), key="1")
        await inbox.drain()
        assert len(n8n.executions) == len(inbox.sent("n8n")) == 1
        assert [one.text for one in meta.sent] == [one.text for one in inbox.sent("answers")] == ["Hi"]


async def test_another_server_of_this_machine_is_not_called(inbox: TestInbox, sink: Sink) -> None:
    inbox.destination("local", url=sink.url, allow_private=True)
    inbox.route("app", "local")
    await inbox.emit("app", "paid", {"n": 1})
    await inbox.drain()
    assert (sink.bodies, len(inbox.sent("local"))) == ([], 1)


async def test_who_allows_the_network_gets_it(inbox: TestInbox, sink: Sink) -> None:
    inbox.allow_network()
    assert client.gate is None
    for name in ("local", "other"):
        inbox.destination(name, url=sink.url, allow_private=True)
        inbox.route("app", name)
    inbox.recorded("other")
    await inbox.emit("app", "paid", {"n": 1})
    await inbox.drain()
    assert sink.bodies == [b'{"n":1}']
    assert len(inbox.sent("local")) == len(inbox.sent("other")) == 1


async def test_the_network_is_back_after_the_test(tmp_path: Path) -> None:
    first, second = TestInbox(f"sqlite:{tmp_path}/1.db"), TestInbox(f"sqlite:{tmp_path}/2.db")
    await first.start()
    await first.stop()
    assert client.gate is not None, "the second test still goes on"
    second.take_back()
    assert client.gate is None


# -- time --------------------------------------------------------------------------------------


async def test_time_stands_still_unless_it_is_moved(inbox: TestInbox) -> None:
    seen: list[Event] = []
    inbox.on("app", name="keep")(seen.append)
    began = inbox.clock.now()
    for _ in range(2):
        await inbox.emit("app", "paid", {})
        await asyncio.sleep(0.05)
        await inbox.drain()
    assert began == inbox.clock.now()
    assert len({event.received_at for event in seen}) == 1
    assert abs(seen[0].received_at - began) < timedelta(milliseconds=1)
    inbox.clock.forward("90m")
    assert (inbox.clock.now() - began).total_seconds() == 5400
    await inbox.emit("app", "paid", {})
    await inbox.drain()
    assert abs(seen[-1].received_at - inbox.clock.now()) < timedelta(milliseconds=1)


async def test_time_goes_on_when_the_inbox_is_stopped(inbox: TestInbox) -> None:
    await inbox.start()
    held = clock.now()
    assert clock.now() == held
    await inbox.stop()
    while clock.now() == held:
        await asyncio.sleep(0)


@pytest.mark.parametrize("preset", presets.names())
async def test_two_samples_of_one_moment_are_two_events(inbox: TestInbox, preset: str) -> None:
    first, second = (await inbox.send(preset)).json(), (await inbox.send(preset)).json()
    assert first.get("status", "accepted") == second.get("status", "accepted") == "accepted"


# -- without await -----------------------------------------------------------------------------


def test_a_plain_function_has_every_verb() -> None:
    """Whatever a coroutine test can call, a function can, too, and gets no coroutine back."""
    import inspect

    blocking = BlockingTestInbox("sqlite:./never-opened.db")
    try:
        for name in (name for name in dir(TestInbox) if not name.startswith("_")):
            assert not inspect.iscoroutinefunction(getattr(blocking, name)), name
    finally:
        blocking.stop()
        blocking.trial.take_back()


def test_a_plain_function_asks_admin_and_is_served(inbox: BlockingTestInbox) -> None:
    from oncehook.samples import post
    from oncehook.testing import signed

    inbox.source("stripe", preset="stripe", secret="whsec_c2VjcmV0")
    inbox.on("stripe", name="book")(lambda event: None)
    inbox.start()
    hook = signed(inbox.trial.sources["stripe"], "invoice.paid")
    with inbox.served() as url:
        assert post(f"{url}/stripe", hook).status == 200
        inbox.drain()
    [done] = inbox.deliveries("book", status="done")
    assert inbox.admin.delivery(done.id).status == "done"
    receipt = inbox.receive("stripe", {}, b"{}")
    assert receipt.reply.status == 401


def test_there_is_a_fixture_for_who_uses_the_name(inbox: BlockingTestInbox, oncehook_inbox: BlockingTestInbox) -> None:
    assert inbox is oncehook_inbox
