"""Mistakes in a program are found when it is written down or started, with their place and what to do."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncehook import Event, Inbox
from oncehook.destinations.handler import failure
from oncehook.errors import ConfigError, ExtraMissing, NotStarted
from oncehook.model import Category, DeliveryStatus, Filter
from oncehook.web.asgi import call_app
from oncehook.whatsapp import MetaCloud, Text

HERE = r"\S*test_guard_rails\.py:\d+"


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    made = Inbox(f"sqlite:{tmp_path}/inbox.db")
    made.source("stripe", preset="stripe", secret="whsec_of_the_tests")
    return made


# -- signatures --------------------------------------------------------------------------------


def no_argument() -> None: ...


def one_too_many(event: Event, foo: int) -> None: ...


async def asynchronous_too(event: Event, foo: int) -> None: ...


def keyword_only(*, event: Event) -> None: ...


def a_word_more(event: Event, *, foo: int) -> None: ...


def tx_alone(tx: Any) -> None: ...


class Shop:
    def method(self, event: Event) -> None: ...


WRONG = [no_argument, one_too_many, asynchronous_too, keyword_only, a_word_more, tx_alone, Shop.method]


@pytest.mark.parametrize("handler", WRONG, ids=lambda handler: str(handler.__name__))
def test_a_handler_that_cannot_be_called_is_refused_where_it_is_written(
    inbox: Inbox, handler: Callable[..., Any]
) -> None:
    line = handler.__code__.co_firstlineno
    with pytest.raises(ConfigError, match=rf"cannot be called with an event: .*test_guard_rails\.py:{line}\)") as found:
        inbox.on("stripe")(handler)
    assert f"Write def {handler.__name__}(event)" in found.value.hint


def with_defaults(event: Event, more: int = 1, *rest: object, word: str = "", **words: object) -> None: ...


@pytest.mark.parametrize("handler", [with_defaults, print, Shop().method, len], ids=lambda one: str(one.__name__))
def test_whatever_can_be_called_is_taken(inbox: Inbox, handler: Callable[..., Any]) -> None:
    inbox.on("stripe", name="handler")(handler)
    assert "handler" in inbox.destinations


def test_a_handler_of_a_postgresql_inbox_may_take_tx() -> None:
    inbox = Inbox("postgresql://nowhere.example/inbox")

    @inbox.on("app")
    def book(event: Event, tx: Any) -> None: ...

    with pytest.raises(ConfigError, match="missing a required argument: 'session'"):

        @inbox.on("app")
        def keep(event: Event, tx: Any, session: Any) -> None: ...


def test_a_decorator_without_parentheses_is_refused(inbox: Inbox) -> None:
    with pytest.raises(ConfigError, match=rf"needs the name of a source \({HERE}\)") as found:

        @inbox.on  # type: ignore[arg-type]
        def book(event: Event) -> None: ...

    assert '@inbox.on("stripe")' in found.value.hint


# -- names -------------------------------------------------------------------------------------


async def test_a_misspelt_source_is_refused_at_the_start(inbox: Inbox) -> None:
    @inbox.on("strip")
    def book(event: Event) -> None: ...

    with pytest.raises(ConfigError, match=rf'events of "strip", and there is no such source \({HERE}\)') as found:
        await inbox.start()
    assert found.value.hint == 'Did you mean "stripe"?'


async def test_another_name_is_that_of_emitted_events_and_said(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oncehook")

    @inbox.on("app")
    def book(event: Event) -> None: ...

    inbox.sender("answers", MetaCloud("a-token", "1065"))
    async with inbox.running():
        pass
    [said] = [record for record in caplog.records if getattr(record, "moment", "") == "source.emitted_only"]
    assert said.fields["source"] == "app"  # type: ignore[attr-defined]


def test_a_route_to_nowhere_names_the_nearest(inbox: Inbox) -> None:
    inbox.destination("n8n", url="https://n8n.example/")
    inbox.route("stripe", "n88n")
    with pytest.raises(ConfigError, match="nowhere") as found:
        inbox.check_names()
    assert found.value.hint == 'Did you mean "n8n"?'


def test_a_handler_is_registered_once_for_the_same_events(inbox: Inbox) -> None:
    def book(event: Event) -> None: ...

    inbox.on("stripe", "invoice.*")(book)
    inbox.on("stripe", "charge.*")(book)
    inbox.on("stripe", "invoice.*", when={"$.amount": ">1000"})(book)
    inbox.on("app", "invoice.*")(book)
    with pytest.raises(ConfigError, match=rf'"book" is registered twice for the same events of "stripe" \({HERE}\)'):
        inbox.on("stripe", "invoice.*")(book)


def test_two_handlers_of_one_name_are_both_named(inbox: Inbox) -> None:
    def make() -> Callable[[Event], None]:
        def book(event: Event) -> None: ...

        return book

    inbox.on("stripe")(make())
    with pytest.raises(ConfigError, match=rf'Two destinations are called "book" \({HERE}, {HERE}\)'):
        inbox.on("stripe")(make())


# -- hints -------------------------------------------------------------------------------------


def test_a_hint_stands_in_the_traceback() -> None:
    with pytest.raises(ConfigError) as raised:
        raise ConfigError("This is wrong.", hint="Write it so.")
    assert str(raised.value) == "This is wrong."
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.endswith("ConfigError: This is wrong.\nWrite it so.\n")


async def test_what_comes_before_the_start_says_how_to_start(inbox: Inbox) -> None:
    inbox.sender("answers", MetaCloud("a-token", "1065"))
    for early in (
        lambda: inbox.emit("app", "paid", {}),
        lambda: inbox.send_message("answers", Text(to="5511988880142", text="Hi"), key="1"),
    ):
        with pytest.raises(NotStarted) as refused:
            await early()
        assert any("lifespan=inbox.lifespan" in note for note in refused.value.__notes__)
    receipt = await inbox.receive("stripe", {}, b"{}")
    assert receipt.reply.status == 503
    assert b'"error":"This inbox is not started; try again."' in receipt.reply.body


async def test_a_dashboard_before_the_start_says_how_to_start(inbox: Inbox) -> None:
    app = inbox.dashboard(authorize=lambda request: "admin")
    for path in ("/", "/api/v1/events"):
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "GET", "path": path}
        scope |= {
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
            "client": ("127.0.0.1", 1),
        }
        reply = await call_app(app, scope, b"")
        told = json.loads(reply.body)
        assert (reply.status, told["code"], dict(reply.headers)[b"retry-after"]) == (503, "not_started", b"5")
        assert "lifespan=inbox.lifespan" in told["hint"]
    async with inbox.running():
        assert (await call_app(app, scope, b"")).status == 200


@pytest.mark.parametrize(
    ("extra", "package", "load"),
    [
        ("postgres", "psycopg", "import oncehook.store.postgres.engine"),
        ("flask", "flask", "import oncehook.contrib.flask"),
        ("sqlalchemy", "sqlalchemy", "import oncehook.contrib.sqlalchemy"),
        (
            "redis",
            "redis",
            "from oncehook.claims import Claims; Claims('redis://nowhere.example').claim('a', ttl='1s')",
        ),
        ("otel", "opentelemetry", "from oncehook.traces import Traces; Traces()"),
        ("oidc", "joserfc", "from oncehook.web.oidc import check_installed; check_installed()"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, extra: str, package: str, load: str) -> None:
    for name in [
        name for name in sys.modules if re.match(rf"{package}\b|oncehook\.(contrib|store\.postgres|claims)", name)
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraMissing, match=rf"needs the extra oncehook\[{extra}\]") as missing:
        exec(load)
    assert missing.value.__notes__ == [f"Run: pip install 'oncehook[{extra}]'"]


# -- while it works ----------------------------------------------------------------------------


async def test_a_handler_that_blocks_the_loop_is_named_once(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    @inbox.on("app", concurrency=1)
    async def slow(event: Event) -> None:
        await asyncio.sleep(0)
        time.sleep(1.1)  # what it must not do

    @inbox.on("app", concurrency=1)
    async def at_once(event: Event) -> None:
        time.sleep(1.1)

    @inbox.on("app")
    async def patient(event: Event) -> None:
        await asyncio.sleep(1.1)

    @inbox.on("app")
    def on_a_thread(event: Event) -> None:
        time.sleep(1.1)

    async with inbox.running():
        for _ in range(2):
            await inbox.emit("app", "paid", {})
        await inbox.drain()
    said = [record.fields for record in caplog.records if getattr(record, "moment", "") == "handler.held_loop"]  # type: ignore[attr-defined]
    assert sorted(fields["destination"] for fields in said) == ["at_once", "slow"]
    for fields in said:
        assert re.fullmatch(rf"handler {fields['destination']} held the event loop for \d\.\d s", fields["warning"])
        assert re.fullmatch(HERE, fields["place"])


async def test_a_watched_coroutine_behaves_as_it_would_unwatched(inbox: Inbox) -> None:
    came: dict[str, object] = {}

    @inbox.on("app", timeout="0.2s", retry=[])
    async def late(event: Event) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            came["cleaned"] = True

    @inbox.on("app", retry=[])
    async def raises(event: Event) -> None:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except TimeoutError:
            raise KeyError("after a wait") from None

    @inbox.on("app")
    async def returns(event: Event) -> dict[str, int]:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(asyncio.sleep(0.01, 1))
        return {"first": first.result()}

    @inbox.on("app")
    async def at_once(event: Event) -> str:
        return "done"

    async with inbox.running():
        await inbox.emit("app", "paid", {})
        await inbox.drain()
        found = {one.destination: one for one in (await inbox.admin.deliveries(Filter())).items}
        answers = {
            name: (await inbox.admin.attempts(one.id))[-1].evidence.answer
            for name, one in found.items()
            if one.status is DeliveryStatus.done
        }
    assert came == {"cleaned": True}
    assert (found["late"].last_error or "").startswith("TimeoutError: The handler took longer than 0.2 s.")
    assert (found["raises"].last_error or "").startswith("KeyError: 'after a wait'   test_guard_rails.py:")
    assert answers == {"returns": b'{"first":1}', "at_once": b'"done"'}


def call_library() -> None:
    re.compile("(")


def test_an_error_in_a_library_names_the_line_that_called_it() -> None:
    try:
        call_library()
    except re.error as error:
        told = failure(error).evidence.error or ""
    assert told.endswith(f"test_guard_rails.py:{call_library.__code__.co_firstlineno + 1}")


async def test_a_type_error_of_the_call_itself_is_permanent(inbox: Inbox) -> None:
    class Fickle:
        __name__ = "fickle"

        def __call__(self, *events: Event) -> None:
            (lambda: None)(*events)  # type: ignore[call-arg]

    inbox.on("app")(Fickle())
    async with inbox.running():
        await inbox.emit("app", "paid", {})
        await inbox.drain()
        [dead] = (await inbox.admin.deliveries(Filter())).items
    assert (dead.status, dead.attempts, dead.category) == (DeliveryStatus.dead, 1, Category.permanent)
