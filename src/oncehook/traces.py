"""OpenTelemetry: a span `receive {source}` per arrival, and a span `process {destination}` per attempt, linked to it.

`inbox.traces = Traces()` turns it on; `serve` and `worker` do so by themselves under an SDK (`opentelemetry-instrument
oncehook serve`). Needs the API package only (`pip install 'oncehook[otel]'`); while it is off, none of it is imported.
Receiver and worker may be different processes, so the context of the first span is stored with the event, as one more
header.

All names of attributes are here, because the messaging conventions, which most of them follow, may still change.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from oncehook import __version__
from oncehook.destinations.base import Destination, Result
from oncehook.destinations.http import HttpDestination
from oncehook.errors import ExtraMissing
from oncehook.ingest import NO_ACCOUNTS, Begun, Deferred, Loaded, Receipt, Receiver
from oncehook.model import Arrival, Lease, Verdict, unpack_head
from oncehook.sources import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, TracerProvider

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGE_ID: Final = "messaging.message.id"
MESSAGE_SIZE: Final = "messaging.message.body.size"
BATCH_SIZE: Final = "messaging.batch.message_count"
ERROR_TYPE: Final = "error.type"
STATUS_CODE: Final = "http.response.status_code"
SOURCE: Final = "oncehook.source"
DESTINATION: Final = "oncehook.destination"
EVENT_TYPE: Final = "oncehook.event.type"
DELIVERY_ID: Final = "oncehook.delivery_id"
ATTEMPT: Final = "oncehook.attempt"
RUN: Final = "oncehook.run"
TRIGGER: Final = "oncehook.trigger"
REPLAY_ID: Final = "oncehook.replay_id"
OUTCOME: Final = "oncehook.outcome"

KEPT: Final = "oncehook-traceparent"
"""The header under which the context of `receive` is kept with an event."""


def find_traces() -> Traces | None:
    """Return traces if an OpenTelemetry SDK is set up in this process; otherwise None."""
    return Traces() if "opentelemetry.sdk.trace" in sys.modules else None


class Traces:
    """Spans of one inbox. Set `inbox.traces` before it is started."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """`provider` replaces the process's own. Raises ConfigError when the API package is missing."""
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.context import Context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ExtraMissing("Tracing", "otel") from error
        self._api, self._propagate = trace, propagate
        self._w3c = TraceContextTextMapPropagator()
        self._nothing = Context()
        self._tracer = trace.get_tracer("oncehook", __version__, provider)

    # -- what the inbox calls when it starts ---------------------------------------------------

    def receiver(self, *parts: Any) -> Receiver:
        return _TracedReceiver(self, *parts)

    def destination(self, destination: Destination) -> Destination:
        if isinstance(destination, HttpDestination):
            destination.trace_headers = self._outgoing
        return _TracedDestination(destination, self)

    # -- spans ---------------------------------------------------------------------------------

    def begin_receive(self, source: Source | None, arrival: Arrival) -> Span:
        """Begin the span of an arrival, a child of the sender's where the headers name one."""
        name = "unknown" if source is None else source.name  # an unknown source's name is untrusted text
        about = {SYSTEM: "oncehook", OPERATION_NAME: "receive", OPERATION_TYPE: "receive", SOURCE: name}
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in arrival.headers]
        span = self._tracer.start_span(
            f"receive {name}",
            context=self._context(headers),
            kind=self._api.SpanKind.CONSUMER,
            attributes={**about, MESSAGE_SIZE: len(arrival.body)},
        )
        kept: dict[str, str] = {}
        self._w3c.inject(kept, self._api.set_span_in_context(span))
        if "traceparent" in kept:
            arrival.headers = [*arrival.headers, (KEPT.encode(), kept["traceparent"].encode())]
        return span

    def end_receive(self, span: Span, outcome: str, event_ids: Sequence[str] = (), error: str = "") -> None:
        span.set_attribute(OUTCOME, outcome)
        if event_ids:
            span.set_attribute(MESSAGE_ID, event_ids[0])
        if len(event_ids) > 1:
            span.set_attribute(BATCH_SIZE, len(event_ids))
        if outcome == "error":  # a rejection is the sender's error, not ours
            span.set_attribute(ERROR_TYPE, error or "store_unavailable")
            span.set_status(self._api.StatusCode.ERROR, error or None)
        span.end()

    @contextmanager
    def process(self, destination: Destination, lease: Lease) -> Iterator[Span]:
        """Open the span of one attempt, current while it lasts: what a handler calls becomes its children."""
        about: dict[str, str | int] = {
            SYSTEM: "oncehook",
            OPERATION_NAME: "process",
            OPERATION_TYPE: "process",
            MESSAGE_ID: str(lease.event.id),
            MESSAGE_SIZE: len(lease.event.body),
            SOURCE: lease.event.source,
            EVENT_TYPE: lease.event.type,
            DESTINATION: destination.name,
            DELIVERY_ID: str(lease.delivery.id),
            ATTEMPT: lease.delivery.attempt,
            RUN: lease.delivery.run,
            TRIGGER: lease.trigger.value,
        }
        if lease.delivery.replay_id is not None:
            about[REPLAY_ID] = str(lease.delivery.replay_id)
        span = self._tracer.start_span(
            f"process {destination.name}",
            # A new trace: the attempt may be days after the arrival, and one of many.
            context=self._nothing,
            kind=self._api.SpanKind.CONSUMER,
            attributes=about,
            links=self._links(lease.event.request_head),
        )
        with self._api.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield span

    def judge(self, span: Span, result: Result) -> None:
        if result.evidence.status is not None:
            span.set_attribute(STATUS_CODE, result.evidence.status)
        span.set_attribute(OUTCOME, "done" if result.category is None else "failed")
        if result.category is not None:
            span.set_attribute(ERROR_TYPE, result.category.value)
            span.set_status(self._api.StatusCode.ERROR, result.evidence.error)

    def _links(self, head: bytes) -> list[Link]:
        """Return a link to the arrival's span, or to its sender's where the arrival was not traced."""
        _, _, headers = unpack_head(head)
        kept = [value for name, value in headers if name == KEPT]
        # The last header is ours; a sender may have sent others before it.
        context = self._context([("traceparent", kept[-1])] if kept else headers)
        span = self._api.get_current_span(context).get_span_context()
        return [self._api.Link(span)] if span.is_valid else []

    def _context(self, headers: Iterable[tuple[str, str]]) -> Context:
        """Read the sender's context from W3C's two headers only: untrusted baggage must not reach handlers."""
        carrier = {name: value for name, value in headers if name in ("traceparent", "tracestate")}
        return self._w3c.extract(carrier, self._nothing)

    def _outgoing(self) -> Mapping[str, str]:
        """Return the headers that make the receiver's span a child of the current one."""
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier)
        return carrier


class _TracedReceiver(Receiver):
    """Receiver with a span for each arrival."""

    def __init__(self, traces: Traces, *parts: Any) -> None:
        super().__init__(*parts)
        self._traces = traces

    def begin(
        self, source: Source | None, arrival: Arrival, loaded: Loaded = NO_ACCOUNTS
    ) -> Begun | Receipt | Deferred:
        headers = arrival.headers
        span = self._traces.begin_receive(source, arrival)
        begun = super().begin(source, arrival, loaded)
        if isinstance(begun, Receipt):
            self._traces.end_receive(span, begun.outcome, begun.event_ids)
        elif isinstance(begun, Deferred):
            arrival.headers = headers  # it begins again, with a span of its own
            self._traces.end_receive(span, "deferred")
        else:
            begun.pending.future.add_done_callback(partial(self._end_decided, span))
        return begun

    def _end_decided(self, span: Span, decided: asyncio.Future[list[Verdict]]) -> None:
        if decided.cancelled():
            self._traces.end_receive(span, "abandoned")
        elif error := decided.exception():
            self._traces.end_receive(span, "error", error=getattr(error, "code", type(error).__name__))
        else:
            verdicts = decided.result()
            outcome = next((v.outcome for v in verdicts if v.outcome == "accepted"), verdicts[0].outcome)
            self._traces.end_receive(span, outcome, [str(v.event_id) for v in verdicts])


class _TracedDestination:
    """A destination with a span for each attempt."""

    def __init__(self, destination: Destination, traces: Traces) -> None:
        self._destination = destination
        self._traces = traces
        self.name, self.id = destination.name, destination.id
        self.terms, self.crash_tolerance = destination.terms, destination.crash_tolerance
        self.kind, self.address = destination.kind, destination.address
        self.is_cancellable: bool = getattr(destination, "is_cancellable", True)

    async def open(self) -> None:
        await self._destination.open()

    async def close(self) -> None:
        await self._destination.close()

    async def attempt(self, lease: Lease) -> Result:
        with self._traces.process(self._destination, lease) as span:
            try:
                result = await self._destination.attempt(lease)
            except BaseException:  # the worker must stop, or the lease is lost: this is no outcome of the attempt
                span.set_attribute(OUTCOME, "released")
                raise
            self._traces.judge(span, result)
            return result
