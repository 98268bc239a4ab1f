"""What people see while it runs: one log line and a few numbers per arrival.

`Observer` is the receiver's witness: it counts for Prometheus, logs the moment, and gathers what was rejected until
the inbox writes it down. `set_up_logging` decides how lines look: colour on a terminal, JSON elsewhere. Bodies and
secrets never appear in either.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import IO, Any, Final

from prometheus_client import generate_latest

from oncehook import __version__, clock
from oncehook.errors import Rejected, SignatureInvalid, StoreUnavailable
from oncehook.metrics import Count, Level, Panel, Spread
from oncehook.model import Arrival, Item, Mark, Rejection
from oncehook.sources import Source
from oncehook.store.base import KEPT_REJECTIONS

log = logging.getLogger("oncehook.arrival")

_FAST: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_SIZES: Final = (256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)


class Observer:
    """Counts and tells. One per inbox."""

    def __init__(self, engine: str) -> None:
        self.verbose = False
        """On a terminal every arrival is worth a line; elsewhere only what somebody may have to act on."""
        self._arrivals = Count("oncehook_arrivals", "Arrivals by outcome", "source", "outcome")
        self._acks = Spread("oncehook_ack_duration_seconds", "From the whole request to its answer", "source", _FAST)
        self._sizes = Spread("oncehook_arrival_size_bytes", "Size of bodies", "source", _SIZES)
        self._unkeyed = Count("oncehook_unkeyed", "Events accepted although no key was found", "source")
        self._unparsed = Count("oncehook_unparsed", "Verified events whose body could not be read", "source")
        self._store_errors = Count("oncehook_store_errors", "Operations the store could not do", "operation")
        self._store_errors.add("record", by=0)
        self._operations = Spread(
            "oncehook_store_operation_duration_seconds", "Time of a store operation", "operation", _FAST
        )
        self._store_size = Level("oncehook_store_size_bytes", "Bytes the store takes on disk")
        info = Level("oncehook_build_info", "Version and store", "version", "store")
        info.set(1, __version__, engine)
        self._panel = Panel()
        for instrument in (
            self._arrivals, self._acks, self._sizes, self._unkeyed, self._unparsed,
            self._store_errors, self._operations, self._store_size, info,
        ):  # fmt: skip
            self._panel.mount(instrument)
        self._rejections: deque[Rejection] = deque(maxlen=KEPT_REJECTIONS)
        self._counts: Counter[tuple[int, str]] = Counter()

    def arrival(
        self, source: str, outcomes: Sequence[str], seconds: float, size: int, items: Sequence[Item], ids: list[str]
    ) -> None:
        for outcome in outcomes:
            self._arrivals.add(source, outcome)
        self._acks.add(source, seconds)
        self._sizes.add(source, size)
        for item in items:
            if item.marks:
                self._count_marks(source, item.marks)
        level = logging.WARNING if "conflict" in outcomes else logging.INFO if self.verbose else logging.DEBUG
        if log.isEnabledFor(level):
            self._tell(level, source, outcomes, seconds, items, ids)

    def operation(self, name: str, seconds: float) -> None:
        """The store did something, and took this long."""
        self._operations.add(name, seconds)

    def _tell(
        self, level: int, source: str, outcomes: Sequence[str], seconds: float, items: Sequence[Item], ids: list[str]
    ) -> None:
        # Of a batch, the line is named by what somebody may have to look at, then by what was new.
        outcome = next((word for word in ("conflict", "accepted") if word in outcomes), outcomes[0])
        fields: dict[str, object] = {"source": source, "outcome": outcome, "duration_s": round(seconds, 6)}
        if len(outcomes) == 1 and items:
            item = items[0]
            fields |= {"type": item.type, "event_id": ids[0], "key": item.key, "subject": item.subject}
            if item.marks:
                fields["marks"] = [mark.name for mark in item.marks]
        elif items:
            fields |= {"outcomes": dict(Counter(map(str, outcomes))), "event_ids": ids}
        log.log(level, "arrival.%s", outcome, extra={"fields": fields})

    def rejected(self, arrival: Arrival, source: Source | None, error: Rejected) -> None:
        # An unknown source's name is a stranger's text: never a label, and never as it came.
        name = "unknown" if source is None else source.name
        self._arrivals.add(name, "rejected")
        if source is not None:
            self._counts[source.number, "rejected"] += 1
        reason = error.reason if isinstance(error, SignatureInvalid) else error.code
        asked, size = plain(arrival.source[:63]), len(arrival.body)
        self._rejections.append(Rejection(asked, clock.now_utc(), error.code, reason, arrival.peer, size))
        fields = {"source": asked, "code": error.code, "reason": reason, "peer": arrival.peer, "size": size}
        log.info("arrival.rejected", extra={"fields": fields})

    def unavailable(self, source: str, error: StoreUnavailable) -> None:
        self._arrivals.add(source, "error")
        self._store_errors.add("record")
        log.warning("arrival.error", extra={"fields": {"source": source, "code": error.code, "error": str(error)}})

    def _count_marks(self, source: str, marks: Mark) -> None:
        if Mark.unkeyed in marks:
            self._unkeyed.add(source)
        if Mark.unparsed in marks:
            self._unparsed.add(source)

    def take_rejections(self) -> tuple[list[Rejection], Counter[tuple[int, str]]]:
        """What was rejected since the last call, to be written down; the ring is bounded, the counts are not."""
        gathered, self._rejections = list(self._rejections), deque(maxlen=KEPT_REJECTIONS)
        counts, self._counts = self._counts, Counter()
        return gathered, counts

    def exposition(self, store_size: int | None) -> bytes:
        """The metrics in Prometheus's text format."""
        if store_size is not None:
            self._store_size.set(store_size)
        return generate_latest(self._panel)


# -- how lines look ----------------------------------------------------------------------------


def set_up_logging(level: str = "info", stream: IO[str] = sys.stderr, *, for_people: bool | None = None) -> bool:
    """Render every log line of this process on one stream: for people on a terminal, as JSON elsewhere.

    Returns whether lines are for people.
    """
    import structlog

    people = stream.isatty() if for_people is None else for_people
    colored = stream.isatty() and not os.environ.get("NO_COLOR")
    renderer: Callable[..., Any] = _Lines(colored) if people else structlog.processors.JSONRenderer(default=str)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _add_fields,
                structlog.processors.format_exc_info,
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("oncehook").setLevel(level.upper())
    return people


_OWN: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "fields", "color_message"})


def _add_fields(logger: object, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """What was logged along with the message: `extra={"fields": {…}}`, or plain extra values."""
    record: logging.LogRecord = event["_record"]
    extra = {name: value for name, value in vars(record).items() if name not in _OWN and name[0] != "_"}
    return {**event, **extra, **getattr(record, "fields", {})}


_COLORS: Final = {
    "arrival.accepted": "32", "arrival.duplicate": "34", "arrival.conflict": "35", "arrival.rejected": "31",
    "arrival.error": "31;1", "warning": "33", "error": "31;1", "critical": "31;1",
}  # fmt: skip
_HIDDEN: Final = frozenset({"event", "level", "timestamp", "exception", "duration_s", "outcome", "type", "source"})


class _Lines:
    """A line for people: time, moment, source and type, then the rest. A stranger's text cannot forge a line (S35)."""

    def __init__(self, colored: bool) -> None:
        self._colored = colored

    def __call__(self, logger: object, method: str, event: MutableMapping[str, Any]) -> str:
        moment = plain(str(event["event"]).strip())
        parts = [event["timestamp"][11:19], self._paint(moment, f"{moment:<18}", event["level"])]
        what = " ".join(str(event[name]) for name in ("source", "type") if event.get(name))
        if what:
            parts.append(f"{plain(what):<32}")
        if "duration_s" in event:
            parts.append(f"{event['duration_s'] * 1000:6.1f} ms")
        rest = {k: v for k, v in event.items() if k not in _HIDDEN and v not in (None, "")}
        ids = rest.pop("event_ids", ())
        # Ids stand last: they are long, and wanted only to be copied.
        rest["event_id"] = f"{ids[0]} and {len(ids) - 1} more" if ids else rest.pop("event_id", "")
        parts += [f"{k}={_short(_words(v)) if k in ('key', 'subject') else _words(v)}" for k, v in rest.items() if v]
        # A traceback may quote a stranger: its lines are set in, so that none can pass for one of ours.
        trace = [f"    {plain(line)}" for line in str(event.get("exception", "")).splitlines()]
        return "\n".join(["  ".join(parts), *trace])

    def _paint(self, moment: str, text: str, level: str) -> str:
        color = _COLORS.get(moment) or _COLORS.get(level)
        return f"\x1b[{color}m{text}\x1b[0m" if self._colored and color else text


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{n} {word}" for word, n in value.items())
    return plain(str(value))


def _short(text: str, width: int = 52) -> str:
    """Cut in the middle: it is their ends that tell long keys and subjects apart."""
    return text if len(text) <= width else f"{text[: width // 2]}…{text[-width // 2 :]}"


def plain(text: str) -> str:
    """Text in which nothing can move the cursor or end the line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
