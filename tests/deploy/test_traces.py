"""Spans of arrivals and attempts, seen by the real SDK: linked to each other, and passed on to who is called."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from oncehook import Event, GiveUp, Inbox, traces
from oncehook.errors import ConfigError, StoreUnavailable
from oncehook.model import EventId, unpack_head
from oncehook.traces import Traces
from tests.acceptance.conftest import make_engine
from tests.acceptance.sink import Sink

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Spans:
    """What was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def of(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.of(name)
        return span


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.provider.shutdown()


@pytest.fixture(params=["sqlite", "postgres"])
async def inbox(request: pytest.FixtureRequest, tmp_path: Path, spans: Spans) -> AsyncIterator[Inbox]:
    made = Inbox(make_engine(request.param, tmp_path).url)
    made.traces = Traces(spans.provider)
    made.source("orders", verify="none", key=["$.id"], budget="90s")
    yield made
    if not made.draining:
        await made.store.close()


async def receive(inbox: Inbox, key: str = "1", **headers: str) -> str:
    receipt = await inbox.receive("orders", headers, json.dumps({"id": key, "type": "order.paid"}).encode())
    return receipt.event_ids[0]


async def test_an_attempt_is_linked_to_its_arrival(inbox: Inbox, spans: Spans) -> None:
    seen: list[trace.SpanContext] = []

    @inbox.on("orders")
    async def ship(event: Event) -> None:
        seen.append(trace.get_current_span().get_span_context())

    async with inbox.running():
        event_id = await receive(inbox, traceparent=TRACEPARENT, tracestate="shop=1")
        await inbox.drain()
    received, processed = spans.one("receive orders"), spans.one("process ship")
    assert received.parent is not None
    assert format_trace_id(received.context.trace_id) == TRACE
    assert format_span_id(received.parent.span_id) == PARENT
    assert processed.parent is None, "it may be days later: a trace of its own"
    assert processed.context.trace_id != received.context.trace_id
    (link,) = processed.links
    assert (link.context.trace_id, link.context.span_id) == (received.context.trace_id, received.context.span_id)
    assert seen == [processed.context], "what a handler calls becomes a child of its attempt"
    assert received.attributes == {
        "messaging.system": "oncehook", "messaging.operation.name": "receive", "messaging.operation.type": "receive",
        "messaging.message.id": event_id, "messaging.message.body.size": 33,
        "oncehook.source": "orders", "oncehook.outcome": "accepted",
    }  # fmt: skip
    assert processed.attributes is not None
    told = dict(processed.attributes)
    assert str(told.pop("oncehook.delivery_id")).startswith("dlv_")
    assert told == {
        "messaging.system": "oncehook", "messaging.operation.name": "process", "messaging.operation.type": "process",
        "messaging.message.id": event_id, "messaging.message.body.size": 33, "oncehook.source": "orders",
        "oncehook.event.type": "order.paid", "oncehook.destination": "ship", "oncehook.attempt": 1, "oncehook.run": 1,
        "oncehook.trigger": "initial", "oncehook.outcome": "done",
    }  # fmt: skip


async def test_a_handler_on_a_thread_is_inside_its_span_too(inbox: Inbox, spans: Spans) -> None:
    seen: list[tuple[trace.SpanContext, bool]] = []

    @inbox.on("orders")
    def ship(event: Event) -> None:
        here = threading.current_thread() is threading.main_thread()
        seen.append((trace.get_current_span().get_span_context(), here))

    async with inbox.running():
        await receive(inbox)
        await inbox.drain()
    assert seen == [(spans.one("process ship").context, False)]


async def test_every_attempt_is_a_span_and_failures_are_told(inbox: Inbox, spans: Spans) -> None:
    @inbox.on("orders", retry=["0.01s"])
    async def ship(event: Event) -> None:
        if event.attempt == 1:
            raise RuntimeError("no such order")
        raise GiveUp("never")

    async with inbox.running():
        await receive(inbox)
        await inbox.drain()
    first, second = spans.of("process ship")
    assert first.attributes is not None
    assert second.attributes is not None
    assert (first.attributes["oncehook.attempt"], second.attributes["oncehook.attempt"]) == (1, 2)
    assert (first.attributes["error.type"], second.attributes["error.type"]) == ("unknown", "permanent")
    assert first.status.status_code is second.status.status_code is StatusCode.ERROR
    assert "no such order" in str(first.status.description)
    assert [len(span.links) for span in (first, second)] == [1, 1]


async def test_a_destination_is_told_of_the_attempts_span(inbox: Inbox, spans: Spans) -> None:
    async with Sink((502, 200)).open() as sink:
        inbox.destination("shop", url=sink.url, retry=["0.01s"], allow_private=True)
        inbox.route("orders", "shop")
        async with inbox.running():
            await receive(inbox, traceparent=TRACEPARENT)
            await inbox.drain()
    attempts = spans.of("process shop")
    assert [request.headers["traceparent"].rpartition("-")[0] for request in sink.requests] == [
        f"00-{format_trace_id(span.context.trace_id)}-{format_span_id(span.context.span_id)}" for span in attempts
    ]
    assert [span.attributes and span.attributes["http.response.status_code"] for span in attempts] == [502, 200]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]


async def test_duplicates_rejections_and_refusals_are_told_apart(inbox: Inbox, spans: Spans) -> None:
    async with inbox.running():
        first = await receive(inbox)
        assert await receive(inbox) == first
        await inbox.receive("nobody\nhere", {}, b"{}")
        outcomes = [span.attributes and span.attributes["oncehook.outcome"] for span in spans.of("receive orders")]
        assert outcomes == ["accepted", "duplicate"]
        unknown = spans.one("receive unknown")
        assert unknown.attributes is not None
        assert unknown.attributes["oncehook.outcome"] == "rejected"
        assert unknown.status.status_code is StatusCode.UNSET, "a stranger's error is not ours"


async def test_what_cannot_be_stored_is_an_error(inbox: Inbox, spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    async with inbox.running():

        def refused(intake: Any) -> Any:
            raise StoreUnavailable("gone")

        monkeypatch.setattr(inbox.store, "record", refused)
        receipt = await inbox.receive("orders", {}, b'{"id": 1}')
        assert receipt.reply.status == 503
    span = spans.one("receive orders")
    assert span.status.status_code is StatusCode.ERROR


async def test_a_forged_context_does_not_stand_for_ours(inbox: Inbox, spans: Spans) -> None:
    @inbox.on("orders")
    async def ship(event: Event) -> None: ...

    async with inbox.running():
        await receive(inbox, **{traces.KEPT: TRACEPARENT, "baggage": "admin=yes"})
        await inbox.drain()
    (link,) = spans.one("process ship").links
    assert link.context.span_id == spans.one("receive orders").context.span_id


async def test_an_arrival_that_was_not_traced_is_linked_to_its_sender(tmp_path: Path, spans: Spans) -> None:
    inbox = Inbox(f"sqlite:{tmp_path}/inbox.db")
    inbox.source("orders", verify="none", key=["$.id"], budget="90s")

    @inbox.on("orders")
    async def ship(event: Event) -> None: ...

    async with inbox.running(work=False):
        await receive(inbox, traceparent=TRACEPARENT)
    again = Inbox(f"sqlite:{tmp_path}/inbox.db")
    again.on("orders")(ship)
    again.traces = Traces(spans.provider)
    async with again.running():
        await again.drain()
    (link,) = spans.one("process ship").links
    assert format_span_id(link.context.span_id) == PARENT


# -- where nobody traces -----------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path: Path) -> Inbox:
    made = Inbox(f"sqlite:{tmp_path}/inbox.db")
    made.source("orders", verify="none", key=["$.id"], budget="90s")
    return made


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        ({"traceparent": TRACEPARENT, "tracestate": "shop=1"}, {"traceparent": TRACEPARENT, "tracestate": "shop=1"}),
        ({"traceparent": "nonsense", "tracestate": "shop=1"}, {}),
        ({"tracestate": "shop=1", "baggage": "user=1"}, {}),
    ],
)
async def test_the_senders_trace_is_kept_and_passed_on(
    plain: Inbox, sent: dict[str, str], passed_on: dict[str, str]
) -> None:
    async with Sink().open() as sink:
        plain.destination("shop", url=sink.url, allow_private=True)
        plain.route("orders", "shop")
        async with plain.running():
            event_id = await receive(plain, **sent)
            await plain.drain()
            event = await plain.store.get_event(EventId.parse(event_id))
    assert event is not None
    assert dict(unpack_head(event.request_head)[2]) == sent
    headers = sink.requests[0].headers
    assert {name: headers[name] for name in ("traceparent", "tracestate", "baggage") if name in headers} == passed_on


def test_nothing_is_imported_where_it_is_off() -> None:
    code = (
        "import sys, oncehook.cli.run, oncehook.traces as t;"
        "assert t.find_traces() is None;"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_a_missing_package_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError) as told:
        Traces()
    assert "oncehook[otel]" in told.value.hint


PROGRAM = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
exporter = ConsoleSpanExporter(formatter=lambda span: "span " + span.name + chr(10))
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
from oncehook.cli import main
main(["worker", "--drain"])
"""


async def test_a_worker_started_under_an_sdk_traces_by_itself(plain: Inbox, tmp_path: Path) -> None:
    async with Sink().open() as sink:
        plain.destination("shop", url=sink.url, allow_private=True)
        plain.route("orders", "shop")
        async with plain.running(work=False):
            await receive(plain)
        (tmp_path / "oncehook.toml").write_text(
            f'store = "sqlite:{tmp_path}/inbox.db"\n[source.orders]\nverify = "none"\n'
            f'[destination.shop]\nurl = "{sink.url}"\nallow_private = true\n[[route]]\nfrom = "orders"\nto = "shop"\n'
        )
        process = await _run(tmp_path)
    assert "span process shop\n" in process
    assert len(sink.requests) == 1


async def _run(folder: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()
