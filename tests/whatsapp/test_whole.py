"""Every sender as a destination, against its stand-in: what each failure becomes, and what strangers cannot do.

Real HTTP on both sides. A message is an event with a key here, so beside what a sender says, it counts what was sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oncehook import clock
from oncehook.errors import OncehookError
from oncehook.inbox import Inbox
from oncehook.model import Category, DeliveryStatus, EventId, Filter, StoredDelivery
from oncehook.settings import load
from oncehook.testing import TestInbox
from oncehook.testing.standins import EvolutionApiStandIn, EvolutionGoStandIn, MetaStandIn, Reply, Request, S3StandIn
from oncehook.whatsapp import Media, Message, MetaCloud, SendFailed, Text
from oncehook.whatsapp.destination import preview_message
from oncehook.whatsapp.messages import LONGEST, InvalidMessage, read_message
from oncehook.whatsapp.numbers import normalise
from oncehook.whatsapp.sender import Call
from oncehook.whatsapp.storage import S3Files
from tests.acceptance.conftest import make_engine
from tests.testing.calling import call
from tests.testing.test_standin_senders import KINDS, hang, sender_for

TO = "5511988880142"
HELLO = Text(to=TO, text="Hello")
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 64


@asynccontextmanager
async def sending(store: str, standin: Any, **how: Any) -> AsyncIterator[Inbox]:
    """An inbox with one sender, called `answers`."""
    inbox = Inbox(store)
    sender = sender_for(standin, **{key: how.pop(key) for key in ("files",) if key in how})
    inbox.sender("answers", sender, **{"retry": ["0.05s", "0.05s"], **how})
    async with inbox.running():
        yield inbox


async def delivery(inbox: Inbox, event_id: str) -> StoredDelivery:
    (found,) = (await inbox.admin.deliveries(Filter(event_id=EventId.parse(event_id)))).items
    return found


@pytest.fixture
def place(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'inbox.db'}"


# -- what each failure becomes -----------------------------------------------------------------


@dataclass
class Fault:
    """What goes wrong once, and what is said of it."""

    name: str
    cause: Callable[[Any], object]
    error: str
    dead: bool = False
    only: tuple[type, ...] = tuple(KINDS)


def too_large(standin: Any) -> None:
    if isinstance(standin, MetaStandIn):
        standin.fail(code=131053, details="The file size exceeds the limit.")
    elif isinstance(standin, EvolutionApiStandIn):
        standin.fail(400, message=["AxiosError: maxContentLength size of 104857600 exceeded"])
    else:
        standin.fail(500, message="file too large for this media type")


PHONES = (EvolutionApiStandIn, EvolutionGoStandIn)
FAULTS = [
    Fault("429", lambda standin: standin.fail(429), "rate_limited"),
    Fault("503", lambda standin: standin.fail(503), "unavailable"),
    Fault("502 of a gateway", lambda standin: standin.script(lambda _: Reply(502, b"<html>")), "unavailable"),
    Fault("silence", hang, "unavailable"),
    Fault("the line is cut", lambda standin: standin.drop_connection(), "unavailable"),
    Fault("token expired", lambda standin: standin.expire_token(), "unauthorized", dead=True),
    Fault("unknown number", lambda standin: standin.not_on_whatsapp(TO), "invalid_number", dead=True),
    Fault("media too large", too_large, "too_large", dead=True),
    Fault("window closed", lambda s: s.close_window(TO), "window_closed 131047", dead=True, only=(MetaStandIn,)),
    Fault("instance offline", lambda standin: standin.go_offline(), "instance_offline", only=PHONES),
]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [pytest.param(kind, fault, id=f"{kind.__name__}-{fault.name}") for fault in FAULTS for kind in fault.only],
)
async def test_a_failure_is_tried_again_or_dead(kind: type[Any], fault: Fault, inbox: TestInbox) -> None:
    async with kind() as standin:
        inbox.sender("answers", sender_for(standin), retry=["1h"])
        await inbox.start()
        fault.cause(standin)
        event_id = await inbox.send_message("answers", HELLO, key="k")
        await inbox.drain()
        found = await delivery(inbox, event_id)
        assert str(found.last_error).startswith(fault.error), found.last_error
        assert found.category == (Category.permanent if fault.dead else Category.transient)
        assert standin.sent == []
        if fault.name == "instance offline":
            standin.go_online()
        inbox.clock.forward("2h")
        await inbox.drain()
        found = await delivery(inbox, event_id)
        if fault.dead:
            assert (found.status, found.attempts, standin.sent) == (DeliveryStatus.dead, 1, [])
        else:
            assert (found.status, found.attempts, len(standin.sent)) == (DeliveryStatus.done, 2, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_api_says_when_to_come_again(kind: type[Any], place: str) -> None:
    async with kind() as standin, sending(place, standin, retry=["1s", "10m"]) as inbox:
        standin.script(lambda _: Reply(429, {"error": "rate-overlimit"}, {"retry-after": "120"}))
        event_id = await inbox.send_message("answers", HELLO, key="k")
        while (found := await delivery(inbox, event_id)).last_error is None:
            await asyncio.sleep(0.005)
        assert found.due_at is not None
        assert timedelta(seconds=100) < found.due_at - clock.now_utc() < timedelta(seconds=140)


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_dead_letter_is_replayed_and_arrives_once(kind: type[Any], engine: str, tmp_path: Path) -> None:
    async with kind() as standin, sending(make_engine(engine, tmp_path).url, standin) as inbox:
        standin.expire_token()
        event_id = await inbox.send_message("answers", HELLO, key="order-42")
        await inbox.drain()
        dead = await delivery(inbox, event_id)
        assert (dead.status, standin.sent) == (DeliveryStatus.dead, [])
        [cause] = await inbox.admin.causes()
        assert cause.cause.startswith("unauthorized"), "people look for their causes, and not for statuses"
        standin.renew_token()
        again = [await inbox.send_message("answers", HELLO, key="order-42") for _ in range(3)]
        await inbox.drain()
        assert (set(again), standin.sent) == ({event_id}, []), "a key is used up, also by what has failed"
        await inbox.admin.replay_one(dead.id, actor="ana")
        await inbox.drain()
        assert [(sent.to, sent.text) for sent in standin.sent] == [(TO, "Hello")]
        with pytest.raises(OncehookError):
            await inbox.admin.replay_one(dead.id, actor="ana")
        await inbox.drain()
        assert len(standin.sent) == 1


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_the_same_key_from_everywhere_at_once_is_one_message(engine: str, tmp_path: Path) -> None:
    """By a program, and by plain emits."""
    async with MetaStandIn() as meta, sending(make_engine(engine, tmp_path).url, meta) as inbox:
        plain = [
            inbox.emit("answers", "message.text", {"to": TO, "text": "Hello"}, key="k", subject=TO) for _ in range(10)
        ]
        ids = await asyncio.gather(*plain, *[inbox.send_message("answers", HELLO, key="k") for _ in range(10)])
        await inbox.drain()
        assert (len(set(ids)), len(meta.sent)) == (1, 1)


async def test_where_no_connection_came_about_nothing_was_sent(place: str) -> None:
    """The sender knows that when its time is over, so its own limit comes before the destination's."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(8)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(full.getsockname())
    inbox = Inbox(place)
    url = f"http://127.0.0.1:{full.getsockname()[1]}"
    sender = MetaCloud("token", "1", base_url=url, timeout=0.3, allow_private=True)
    inbox.sender("answers", sender, unsure="dead", retry=["10m"])
    try:
        async with inbox.running():
            event_id = await inbox.send_message("answers", HELLO, key="k")
            while (found := await delivery(inbox, event_id)).last_error is None:
                await asyncio.sleep(0.005)
            assert (found.status, found.category) == (DeliveryStatus.pending, Category.transient)
    finally:
        for one in (full, *waiting):
            one.close()


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_through_the_inbox(kind: type[Any], place: str) -> None:
    """Stored once, kept as an event, sent by a fresh link at each attempt, under a name that a stranger may see."""
    with S3StandIn() as s3:
        files = S3Files.from_env(s3.environ)
        async with kind() as standin, sending(place, standin, files=files) as inbox:
            sender = inbox.destinations["answers"].sender  # type: ignore[attr-defined]
            media = await sender.prepare_file(TO, PNG, filename="../../\u202egnp.exe", caption="Look", kind="document")
            assert (media.filename, media.link, media.stored in s3.objects) == ("gnp.exe", None, True)
            standin.fail(503)
            await inbox.send_message("answers", media, key="k")
            await inbox.drain()
            sent = await sender.send_file(TO, PNG, filename="..\\a.png")
        first, second = standin.sent
        assert (first.type, second.type, second.id) == ("document", "image", sent.message_id)
        assert len(s3.objects) == 1
        link = msgspec.json.encode(first.body).split(b'"http')[1].split(b'"')[0].decode()
        answer = await asyncio.to_thread(call, f"http{link}", method="GET")
        assert (answer.status, answer.body, answer.headers["content-type"]) == (200, PNG, "image/png")


async def test_a_stored_file_and_no_storage_is_a_dead_letter_and_no_riddle(place: str) -> None:
    """Nothing was sent, and nobody need wonder."""
    async with MetaStandIn() as meta, sending(place, meta, unsure="dead") as inbox:
        message = Media(to=TO, kind="image", stored="oncehook/" + "0" * 64 + ".png")
        event_id = await inbox.send_message("answers", message, key="k")
        await inbox.drain()
        found = await delivery(inbox, event_id)
        assert (found.status, found.category) == (DeliveryStatus.dead, Category.permanent)
        assert str(found.last_error) == "config_invalid: This sender has no storage for files."


# -- strangers ---------------------------------------------------------------------------------


async def test_an_unverified_source_is_no_open_relay(inbox: TestInbox) -> None:
    """A program on this machine may send; a web page in its browser and whoever comes through a tunnel may not."""
    async with MetaStandIn() as meta:
        inbox.source("outgoing", verify="none", key="$.id")
        inbox.sender("answers", sender_for(meta))
        inbox.route("outgoing", "answers")
        async with inbox.served() as url:
            body = {"to": TO, "text": "Buy now"}
            for name, value in (
                ("origin", "https://evil.example"),
                ("sec-fetch-site", "cross-site"),
                ("x-forwarded-for", "203.0.113.7"),
                ("forwarded", "for=203.0.113.7"),
                ("via", "1.1 tunnel"),
            ):
                said = await asyncio.to_thread(call, f"{url}/outgoing", {"id": name, **body}, {name: value})
                assert said.status == 401, name
            said = await asyncio.to_thread(call, f"{url}/outgoing", {"id": "mine", **body})
            assert said.status == 200
            await inbox.drain()
        assert [sent.text for sent in meta.sent] == ["Buy now"]


RELAY = """
[source.outgoing]
verify = {{ scheme = "none", confirm = "anyone may send" }}
{path}
[destination.answers.whatsapp]
api = "evolution-go"
base_url = "https://go.example"
token = {{ env = "TOKEN" }}
[[route]]
from = "outgoing"
to = "answers"
"""


@pytest.mark.parametrize(("path", "warns"), [("", True), (f'path = "{"k7_Qm2ZxN4vT9sLdR1wYhE" * 2}"', False)])
def test_who_lets_anyone_send_is_told_what_that_means_here(path: str, warns: bool, tmp_path: Path) -> None:
    (tmp_path / "oncehook.toml").write_text(RELAY.format(path=path))
    said = [text for text in load(tmp_path / "oncehook.toml", {"TOKEN": "t"}).warnings if "WhatsApp" in text]
    assert len(said) == warns


@pytest.mark.parametrize(
    "link",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1:6379/",
        "http://localhost/",
        "http://LOCALHOST./",
        "http://evolution.localhost/",
        "http://[::1]/",
        "http://[::ffff:10.0.0.1]/",
        "http://0x7f.1/",
        "http://2130706433/",
        "http://10.1.2.3./a.png",
        "http://user@files.example/a.png",
        "http://files.example\\@10.0.0.1/a.png",
        "http://files.example/a\r\nhost: 10.0.0.1",
        "http:///etc/passwd",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_no_link_leads_inside(kind: type[Any], link: str) -> None:
    """The API would fetch it, from where it stands, and send what it finds to whoever asked."""
    async with kind() as standin, sender_for(standin) as sender:
        sender._guard = type(sender._guard)(allow_private=False)  # the stand-in itself is on the loopback
        with pytest.raises(SendFailed) as failed:
            await sender.send_media(TO, "image", link=link)
        assert (failed.value.reason.value, standin.requests) == ("invalid", [])
        for good in ("https://files.example/a.png?x=%2F&sig=a+b#page=2", "http://8.8.8.8/a.png"):
            await sender.send_media(TO, "image", link=good)
        assert "https://files.example/a.png?x=%2F&sig=a+b#page=2" in str(standin.sent[0].body), "as it was written"


@pytest.mark.parametrize("name", ["../../etc/passwd", "C:\\x\\passwd", "pass\u202ewd", "pass\x00wd", "pass\r\nwd"])
async def test_a_name_in_a_message_is_cleaned_as_one_of_a_file(name: str) -> None:
    async with MetaStandIn() as meta, sender_for(meta) as sender:
        await sender.send_media(TO, "document", link="https://files.example/a", filename=name)
        assert meta.sent[0].body["document"]["filename"].replace(" ", "") == "passwd"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Text(to=TO, text="a" * (LONGEST + 1)), "65,536"),
        (Media(to=TO, kind="image", link="https://a.example", caption="é" * (LONGEST + 1)), "65,536"),
        (Text(to=TO, text="half a \ud83d"), "half a character"),
        (Text(to="status@broadcast", text="To all my friends"), "everybody"),
        (Text(to="1" * 1_000_000, text="x"), "too long"),
        (Text(to="1." * 500_000 + "a@s.whatsapp.net", text="x"), "too long"),
        (Text(to="1@" + "a" * 1_000_000, text="x"), "too long"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
async def test_what_is_huge_or_broken_is_refused_in_few_words(message: Message, why: str, place: str) -> None:
    async with MetaStandIn() as meta, sending(place, meta) as inbox:
        with pytest.raises(InvalidMessage) as refused:
            await inbox.send_message("answers", message, key="k")
        assert why in str(refused.value)
        assert len(str(refused.value)) < 300


async def test_what_a_stranger_wrote_is_not_repeated_at_length(place: str) -> None:
    async with MetaStandIn() as meta, sending(place, meta) as inbox:
        body = {"type": "x" * 100_000 + "\nfake line", "to": TO}
        event_id = await inbox.emit("answers", "message.text", body, key="k")
        await inbox.drain()
        found = await delivery(inbox, event_id)
        assert found.status is DeliveryStatus.dead
        assert len(str(found.last_error)) < 300
        assert "\n" not in str(found.last_error)


DEEP = b"[" * 100_000 + b"]" * 100_000


async def test_what_is_nested_without_end_stops_nobody(place: str) -> None:
    """Neither in a message, where the desk would stumble over it, nor in the answer to one that has gone out."""
    body = b'{"to": "%s", "name": "x", "components": %s}' % (TO.encode(), DEEP)
    assert preview_message(body) is None
    async with MetaStandIn() as meta, sending(place, meta, unsure="dead") as inbox:
        event_id = await inbox.emit("answers", "message.template", body, key="k")
        await inbox.drain()
        assert str((await delivery(inbox, event_id)).last_error).startswith("message_invalid: ")

        def taken(request: Request) -> Reply:
            meta.answer(request)
            return Reply(200, DEEP)

        meta.script(taken)
        event_id = await inbox.send_message("answers", HELLO, key="k2")
        await inbox.drain()
        assert ((await delivery(inbox, event_id)).status, len(meta.sent)) == (DeliveryStatus.done, 1)


def test_a_preview_shows_what_will_be_sent_and_hides_nothing() -> None:
    """Marks that turn text round would show another number than the one that is called."""
    body = {"to": "+55 11 \u202e1000-99999\u202c", "text": "Pay \u202e100$\u202c \x1b[2Jnow 👨‍👩‍👧"}
    shown = preview_message(msgspec.json.encode(body))
    assert shown is not None
    assert (shown.to, shown.text) == ("+55 11 1000-99999", "Pay 100$ [2Jnow 👨‍👩‍👧")
    assert normalise(shown.to) == normalise(body["to"])


CANARY = "canary-6f1d0c-token"


@pytest.mark.parametrize("kind", KINDS)
async def test_no_secret_shows_itself(kind: type[Any], place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Not in a representation, an error, a log line or what is kept, even when the API repeats it."""
    caplog.set_level(logging.DEBUG)
    given = {"api_key": CANARY} if kind is EvolutionApiStandIn else {"token": CANARY}
    async with kind(**given) as standin, sending(place, standin) as inbox:
        standin.script(lambda request: Reply(401, {"error": f"bad key {CANARY}", "message": dict(request.headers)}))
        event_id = await inbox.send_message("answers", HELLO, key="k")
        await inbox.drain()
        found = await delivery(inbox, event_id)
        assert found.status is DeliveryStatus.dead
        attempts = await inbox.admin.attempts(found.id)
        destination = inbox.destinations["answers"]
        shown = [found, attempts, destination, destination.address, destination.sender, caplog.text]  # type: ignore[attr-defined]
        assert CANARY not in repr(shown)
    assert CANARY not in repr(Call("POST", "/instance/create", {"token": CANARY}, key=CANARY))


def test_a_message_of_a_provider_is_no_message_of_ours() -> None:
    """A source of arrivals that is routed to a sender by mistake echoes nothing."""
    for standin in (MetaStandIn(), EvolutionApiStandIn(), EvolutionGoStandIn()):
        for arrival in standin.webhooks(standin.message(from_=TO, text="Hi")):
            with pytest.raises(InvalidMessage):
                read_message(arrival.body)
