"""A recorded destination: an HTTP destination whose requests are written down instead of sent.

Everything but the network is the real thing: headers, signature, and what an answer means. `TestInbox.recorded` puts
one in place; a test scripts its answers and looks at what it got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError
from oncehook.http_client import Answer, Unanswered
from oncehook.http_client.client import HttpClient


@dataclass(slots=True, frozen=True)
class RecordedAttempt:
    """One request as it would have gone out, and the status that it was answered with."""

    url: str
    headers: Mapping[str, str] = field(repr=False)
    """Names in lower case."""
    body: bytes
    status: int | None
    """None: no answer."""
    at: datetime

    @property
    def event_id(self) -> str:
        """Which event it carries."""
        return self.headers["webhook-id"]

    @property
    def attempt(self) -> int:
        """Which attempt it is, within its run."""
        return int(self.headers["oncehook-attempt"])

    def json(self) -> Any:
        """The body, parsed."""
        return msgspec.json.decode(self.body)


class Recorded:
    """What a destination got, and what it answers: 200 unless a test says otherwise."""

    def __init__(self) -> None:
        self.attempts: list[RecordedAttempt] = []
        """Every request, in order."""
        self._answers: list[Callable[[], Answer]] = []

    @property
    def deliveries(self) -> list[RecordedAttempt]:
        """The requests that were answered 2xx: those that got through."""
        return [attempt for attempt in self.attempts if attempt.status is not None and 200 <= attempt.status < 300]

    def fail(self, status: int = 500, *, times: int = 1, retry_after: int | None = None, body: bytes = b"") -> None:
        """Answer the next requests with this status."""
        after = None if retry_after is None else str(retry_after)
        self._script(lambda: Answer(status, body, after), times)

    def drop_connection(self, *, times: int = 1) -> None:
        """Leave the next requests without an answer, as when a line is cut."""

        def cut() -> Answer:
            raise Unanswered("the connection was lost")

        self._script(cut, times)

    def _script(self, answer: Callable[[], Answer], times: int) -> None:
        if times < 1:
            raise ConfigError("times must be 1 or more.")
        self._answers += [answer] * times

    def answer(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Write a request down and answer it. Raises Unanswered where it was told to."""
        answer = self._answers.pop(0) if self._answers else lambda: Answer(200, b"")
        status: int | None = None
        try:
            said = answer()
            status = said.status
            return said
        finally:
            named = {name.lower(): value for name, value in headers.items()}
            self.attempts.append(RecordedAttempt(url, named, body, status, clock.now_utc()))


class RecordingOutbound(HttpClient):
    """The client that a recorded destination has: it calls nobody."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    async def open(self) -> None:
        """There is nothing to open."""

    async def close(self) -> None:
        """There is nothing to close."""

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, within: float) -> Answer:
        """See HttpClient."""
        return self._recorded.answer(url, headers, body)
