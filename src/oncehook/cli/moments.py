"""What happens in an inbox, as it happens: heard from a running server, or else looked up in its store.

`feed` gives `tail` and `forward` one of two: `Heard` reads the server's stream on a thread of its own and connects
again when it ends; `Looked` compares the latest events and deliveries once a second, where no server is named and the
store is PostgreSQL, or a program writes the SQLite file and serves no API. Both hand out moments when `take` is called.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from oncehook import clock
from oncehook.cli.api import PREFIX, Api, Failed, Unreachable
from oncehook.errors import OncehookError

if TYPE_CHECKING:
    from oncehook.cli.lines import Wire

Moment = tuple[str, dict[str, Any]]
"""What kind it is (arrival, attempt, watermark, dropped; lost, back: the line itself), and its fields."""

PAUSES: Final = (0.5, 1.0, 2.0, 5.0)
"""Seconds before each try to connect again; the last one holds from then on."""

LOOK_EVERY: Final = 1.0
MOST_LOOKED_AT: Final = 1000
"""Events that may have come between two looks; of more, the oldest are passed over."""


class Feed(Protocol):
    """Where moments come from."""

    def take(self, seconds: float) -> list[Moment]:
        """What has happened since the last call; waits so long for the first of it."""


def feed(api: Api) -> Feed:
    """The feed that there is. Raises Unreachable where nobody could tell anything."""
    from oncehook.cli.lines import Wire

    return Heard(api) if isinstance(api.live(or_read=True), Wire) else Looked(api)


# -- from a server -----------------------------------------------------------------------------


class Heard:
    """A server's stream."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._waiting: queue.SimpleQueue[Moment] = queue.SimpleQueue()
        lines = self._listen()  # here, so that a wrong address or token ends the command
        threading.Thread(target=self._hear, args=(lines,), daemon=True).start()

    def take(self, seconds: float) -> list[Moment]:
        found = []
        try:
            found.append(self._waiting.get(timeout=seconds))
            while True:
                found.append(self._waiting.get_nowait())
        except queue.Empty:
            return found

    def _listen(self) -> Iterator[bytes]:
        line: Wire = self._api.line  # type: ignore[assignment]
        try:
            answer, lines = line.listen(PREFIX + "stream")
        except OSError as error:
            raise Unreachable(f"nobody answers at {line} ({error})", hint="Is `oncehook serve` running?") from error
        self._api.checked(answer)
        return lines

    def _hear(self, lines: Iterator[bytes]) -> None:
        while True:
            why = "the server has stopped"
            try:
                for moment in read(lines):
                    self._waiting.put(moment)
            except OSError as error:
                why = str(error)
            self._waiting.put(("lost", {"error": why}))
            lines = self._again()
            self._waiting.put(("back", {}))

    def _again(self) -> Iterator[bytes]:
        tries = 0
        while True:
            threading.Event().wait(PAUSES[min(tries, len(PAUSES) - 1)])
            tries += 1
            try:
                self._api.live()
                return self._listen()
            except (Failed, OncehookError):
                continue


def read(lines: Iterator[bytes]) -> Iterator[Moment]:
    """Moments out of server-sent events. What is no event of ours is passed over."""
    kind, data = "", b""
    for line in lines:
        name, _, value = line.partition(b": ")
        if name == b"event":
            kind = value.decode()
        elif name == b"data":
            data += value
        elif not line and data:
            yield kind, json.loads(data)
        if not line:
            kind, data = "", b""


# -- from the store ----------------------------------------------------------------------------


class Looked:
    """The latest events and deliveries, compared with what they were a moment ago."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._newest = ""
        self._stood: dict[str, tuple[str, int, int]] | None = None
        self._at = clock.steady()
        self._look()

    def take(self, seconds: float) -> list[Moment]:
        due = self._at + LOOK_EVERY - clock.steady()
        self._api.line.rest(max(min(seconds, due), 0.0))
        if due > seconds:
            return []
        self._at = clock.steady()
        return self._look()

    def _look(self) -> list[Moment]:
        return [*self._arrivals(), *self._attempts()]

    def _arrivals(self) -> list[Moment]:
        new = []
        for event in self._api.pages("events", most=MOST_LOOKED_AT if self._newest else 1):
            if event["id"] <= self._newest:
                break
            new.append(event)
        first, self._newest = not self._newest, new[0]["id"] if new else self._newest or "evt_"
        fields = ("source", "type", "key", "subject")
        return [
            ("arrival", {"outcome": "accepted", "event_id": one["id"], **{name: one[name] for name in fields}})
            for one in reversed([] if first else new)
        ]

    def _attempts(self) -> list[Moment]:
        """Deliveries whose last attempt is another one than a moment ago, among the latest."""
        latest = self._api.get("deliveries", limit=200)["items"]
        stands = {one["id"]: (one["status"], one["run"], one["attempts"]) for one in latest}
        before, self._stood = self._stood, stands
        if before is None:
            return []
        told = [one for one in reversed(latest) if one["attempts"] and one["status"] != "leased"]
        return [_attempt(one) for one in told if _was(before, one) != stands[one["id"]][1:]]


def _was(before: dict[str, tuple[str, int, int]], delivery: dict[str, Any]) -> tuple[int, int] | None:
    status, run, attempts = before.get(delivery["id"], ("", 0, 0))
    # While it was leased, that attempt was counted already; it is told when it has ended.
    return None if status == "leased" else (run, attempts)


def _attempt(delivery: dict[str, Any]) -> Moment:
    outcome = {"done": "done", "pending": "retry"}.get(delivery["status"], delivery["status"])
    fields = ("event_id", "source", "destination", "type", "subject", "run", "category", "note")
    told = {name: delivery[name] for name in fields if delivery[name] is not None}
    return "attempt", {
        **told,
        "outcome": outcome,
        "delivery_id": delivery["id"],
        "attempt": delivery["attempts"],
        "status": delivery["last_status"],
        "error": delivery["last_error"],
    }
