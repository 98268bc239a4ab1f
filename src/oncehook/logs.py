"""Log records: colour on a terminal, JSON elsewhere, and no way for untrusted text to forge one (S35).

A record is a moment, `log.error("delivery.dead", extra={"fields": {…}})`. `serve` and `worker` render its fields; in a
program with its own logging, a filter puts them into the message. Moments that outsiders can cause go through `ration`:
a few records a second each, then sums.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import IO, Any, Final

from oncehook import clock
from oncehook.human import show_id


def set_up_logging(level: str = "info", stream: IO[str] = sys.stderr, *, for_people: bool | None = None) -> bool:
    """Render every log record of this process on one stream; return whether as text for people, not as JSON."""
    people = stream.isatty() if for_people is None else for_people
    handler = logging.StreamHandler(stream)
    handler.addFilter(_leave_details)
    handler.setFormatter(_TextFormatter(stream) if people else _JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("oncehook").setLevel(level.upper())
    return people


_OWN: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "fields", "moment", "color_message"})


def _read_record(record: logging.LogRecord) -> dict[str, Any]:
    """Return the message and what was logged along: the fields of a moment, or the extra values of a foreign record."""
    at = datetime.fromtimestamp(record.created, UTC)
    event = {
        "event": record.getMessage(),
        "level": record.levelname.lower(),
        "timestamp": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        **{name: value for name, value in vars(record).items() if name not in _OWN and name[0] != "_"},
        **getattr(record, "fields", {}),
    }
    if record.exc_info:
        event["exception"] = _TRACES.formatException(record.exc_info)
    if record.stack_info:
        event["stack"] = record.stack_info
    return event


class _JsonFormatter(logging.Formatter):
    """Formatter for programs: one JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_read_record(record), default=str)


_COLORS: Final = {
    "arrival.accepted": "32", "arrival.duplicate": "34", "arrival.conflict": "35", "arrival.rejected": "31",
    "arrival.error": "31;1", "attempt.done": "32", "attempt.retry": "33", "delivery.dead": "31;1",
    "message.sent": "32", "message.failed": "31;1",
    "warning": "33", "error": "31;1", "critical": "31;1",
}  # fmt: skip
_HIDDEN: Final = frozenset(
    {"event", "level", "timestamp", "exception", "duration_s", "outcome", "type", "source", "destination"}
)
_HIDDEN_OF_ATTEMPTS: Final = _HIDDEN | {
    "delivery_id", "again_in_s", "attempt", "run", "attempts", "final_status", "key", "worker",
}  # fmt: skip
"""Fields that are not shown: the event's id finds its deliveries, and the rest is part of the sentence."""
_FIRST: Final = ("reason", "code")
"""Fields that are shown before all others."""
_LONG: Final = ("key", "subject")
"""Fields of untrusted length, shortened so that a line fits the terminal."""


_TRAFFIC: Final = frozenset({"arrival", "attempt", "delivery", "lease", "breaker", "replay"})
"""Families of moments that a busy inbox repeats: one line each on a terminal, without what there is no room for."""
_LEAST_ERROR: Final = 30
"""Columns below which an error is not cut in favour of the event's id."""


class _TextFormatter(logging.Formatter):
    """Formatter for people: time, moment, event, source and type, the rest. Untrusted text cannot forge a record (S35).

    On a terminal a record about traffic is one line, with the error first: what there is no room for, `oncehook show`
    says. Other records are wrapped.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._terminal = stream if stream.isatty() else None
        self._colored = self._terminal is not None and not os.environ.get("NO_COLOR")

    def format(self, record: logging.LogRecord) -> str:
        event = _read_record(record)
        moment = plain(str(event["event"]).strip())
        ids = event.pop("event_ids", ()) or [event.pop("event_id", None) or event.pop("replay_id", None)]
        width = self._width()
        first = [event["timestamp"][11:19], moment]
        to = [f"→ {plain(str(event['destination']))}"] if "destination" in event else []
        short = plain(show_id(str(ids[0]))) if ids[0] else ""
        if len(ids) > 1:
            short += f" and {len(ids) - 1} more"
        what = plain(" ".join(str(event[name]) for name in ("source", "type") if event.get(name)))
        if width and ids[0] and event.get("error"):
            error = plain(str(event.pop("error")).partition("\n")[0])
            left = width - len("  ".join([*first, *to, ""]))
            beside_id = left - len(short) - len("    …")
            parts = [*first, *to, _cut(error, beside_id if beside_id >= _LEAST_ERROR else left), short, what]
        else:
            if what and (short or not width):
                what = f"{_short(what, 26):<26}"
            parts = [first[0], f"{moment:<17}", short, what, *to]
        line = "  ".join(filter(None, parts))
        if width and moment.partition(".")[0] in _TRAFFIC and "hint" not in event:
            line = _add_fitting(_cut(line, width).removesuffix("  …"), _details(event), width)
        else:
            line = "  ".join([line, *_details(event)])
            if width:
                line = textwrap.fill(
                    line, width, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False
                )
        line = line.replace(moment, self._paint(moment, event["level"]), 1)
        return "\n".join([line, *_indent(str(event.get("exception", "")))])

    def _width(self) -> int:
        """Return the columns of the terminal; 0 where lines are written in full."""
        if self._terminal is None:
            return 0
        try:
            return os.get_terminal_size(self._terminal.fileno()).columns
        except (OSError, ValueError):
            return 0

    def _paint(self, moment: str, level: str) -> str:
        color = _COLORS.get(moment) or _COLORS.get(level)
        return f"\x1b[{color}m{moment}\x1b[0m" if self._colored and color else moment


def _details(event: Mapping[str, Any]) -> list[str]:
    """Return how long it took, which attempt it was, and the fields that have no place of their own."""
    parts = [f"{event['duration_s'] * 1000:6.1f} ms"] if "duration_s" in event else []
    if "attempt" in event:
        parts += _attempt_words(event)
    hidden = _HIDDEN_OF_ATTEMPTS if "attempt" in event else _HIDDEN
    names = sorted((name for name, value in event.items() if name not in hidden and value), key=_rank)
    return parts + [f"{name}={_field(name, event[name])}" for name in names]


def _rank(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def _add_fitting(line: str, details: Iterable[str], width: int) -> str:
    """Add those details that there is room for. One that would be cut is left out: half a value misleads."""
    for one in details:
        if len(line) + 2 + len(one) <= width:
            line += f"  {one}"
    return line.rstrip()


def _field(name: str, value: object) -> str:
    text = plain(_words(value))
    if name.endswith("_id"):
        return show_id(text)
    if name == "until":
        return text[11:19]  # of a breaker, in seconds; the day is that of the record
    return _short(text) if name in _LONG else text


def _attempt_words(event: Mapping[str, Any]) -> list[str]:
    """Describe the attempt where it was not the only one, and when the next one is due."""
    words = []
    if event["attempt"] > 1 or "again_in_s" in event:
        words.append(f"attempt {event['attempt']}")
    if event.get("run", 1) > 1:
        words.append(f"run {event['run']}")
    if "again_in_s" in event:
        words.append(f"again in {event['again_in_s']:.1f} s")
    return words


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{n} {word}" for word, n in value.items())
    return str(value)


def _short(text: str, width: int = 20) -> str:
    """Shorten text in the middle: long keys and subjects differ at their ends."""
    return text if len(text) <= width else f"{text[: width // 2]}…{text[-(width // 2 - 1) :]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def plain(text: str) -> str:
    """Return text without characters that move the cursor or break the line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _indent(trace: str) -> list[str]:
    """Indent a traceback: it may quote untrusted text, which must not look like a record of ours."""
    return [f"    {plain(text)}" for text in trace.splitlines()]


# -- records that an outsider can cause --------------------------------------------------------

FEW: Final = 5
"""Records of one moment that are logged individually between two sums."""
_MOST_KINDS: Final = 40
"""Kinds that one sum tells apart."""
_UNCALLED: Final = 2.0
"""Seconds after which a record triggers the sum itself, in a process without an inbox."""


class Ration:
    """Limit on the records that an outsider can cause, so that a flood of requests does not flood the log.

    The first few of each moment are logged; the others are counted by kind and logged as sums by `sum_up`, once a
    second. May be called from any thread.
    """

    def __init__(self) -> None:
        self.few = FEW
        """Fewer in a process that shares its log with others."""
        self._turn = threading.Lock()
        self._logged: Counter[str] = Counter()
        self._rest: dict[tuple[logging.Logger, int, str], Counter[str]] = {}
        self._since = clock.steady()

    def log(
        self,
        logger: logging.Logger,
        level: int,
        moment: str,
        fields: Mapping[str, object],
        *,
        kind: str,
        exc_info: bool = False,
    ) -> None:
        """Log a moment, or count it as one more of its `kind`: a word of ours, never untrusted text."""
        if not logger.isEnabledFor(level):
            return
        if clock.steady() - self._since > _UNCALLED:
            self.sum_up()
        with self._turn:
            self._logged[moment] += 1
            is_one_of_few = self._logged[moment] <= self.few
            if not is_one_of_few:
                counted = self._rest.setdefault((logger, level, moment), Counter())
                counted[kind if kind in counted or len(counted) < _MOST_KINDS else "other"] += 1
        if is_one_of_few:
            logger.log(level, moment, extra={"fields": fields}, exc_info=exc_info, stacklevel=2)

    def sum_up(self) -> None:
        """Log one record per moment for what was only counted since the last call."""
        with self._turn:
            rest, self._rest = self._rest, {}
            self._logged.clear()
            self._since = clock.steady()
        for (logger, level, moment), counted in rest.items():
            fields = {"count": counted.total(), "kinds": dict(counted.most_common())}
            logger.log(level, f"{moment}.summary", extra={"fields": fields})

    def _unlock(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may hold the old one."""
        self._turn = threading.Lock()


ration: Final = Ration()
"""The one ration of this process, like the loggers themselves."""
os.register_at_fork(after_in_child=ration._unlock)


# -- in a program with a logging of its own ----------------------------------------------------

LOGGERS: Final = (
    "api", "arrival", "attempt", "audit", "bodies", "bridge", "claims", "definitions", "receive", "replay", "settings",
    "source", "store", "sweep", "web", "whatsapp", "worker",
)  # fmt: skip
"""Names after `oncehook.`: a filter on `oncehook` itself would not see their records."""

_TRACES: Final = logging.Formatter()
_WORD: Final = re.compile(r"[\w.:/@+,-]+")


def show_details() -> None:
    """Have the program's own log handlers show the fields of our records."""
    for name in LOGGERS:
        logging.getLogger(f"oncehook.{name}").addFilter(_add_details)


class _Details:
    """Fields of a moment, formatted only when a handler writes them."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={_quote(value)}" for name, value in self._fields.items() if value not in (None, ""))


def _quote(value: object) -> str:
    """Return a single word as is; quote anything else so that untrusted text cannot break out of the quotes."""
    text = ",".join(map(str, value)) if isinstance(value, list) else _words(value)
    if _WORD.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{plain(escaped)}"'


def _add_details(record: logging.LogRecord) -> bool:
    """Put the fields into the message; `moment` keeps the bare word, for counting and filtering."""
    if not hasattr(record, "moment"):  # a record from another process has been through this already
        vars(record)["moment"] = record.msg
        if fields := getattr(record, "fields", None):
            # Fields are an argument, so that tools that group by the unformatted message find one group per moment.
            record.msg, record.args = f"{record.msg} %s", (_Details(fields),)
        if record.exc_info:
            record.exc_text = "\n".join(_indent(_TRACES.formatException(record.exc_info)))
    return True


def _leave_details(record: logging.LogRecord) -> bool:
    """Take the fields out of the message again: our own handler renders them."""
    if moment := getattr(record, "moment", None):
        record.msg, record.args = moment, ()
    return True
