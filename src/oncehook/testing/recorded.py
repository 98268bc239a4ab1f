"""A recorded destination: an HTTP destination whose requests are recorded instead of sent.

Everything but the network is real: headers, signature, and what an answer means. `TestInbox.recorded` installs one; a
test scripts its answers and inspects its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from oncehook import clock
from oncehook.errors import ConfigError
from oncehook.http_client import HttpAnswer, Unanswered
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
        return self.headers["webhook-id"]

    @property
    def attempt(self) -> int:
        """Return the number of the attempt within its run."""
        return int(self.headers["oncehook-attempt"])

    def json(self) -> Any:
        """Parse the body."""
        return msgspec.json.decode(self.body)


class Recorded:
    """The requests of a destination, and its scripted answers: 200 by default."""

    def __init__(self) -> None:
        self.attempts: list[RecordedAttempt] = []
        """Every request, in order."""
        self._answers: list[Callable[[], HttpAnswer]] = []

    @property
    def deliveries(self) -> list[RecordedAttempt]:
        """Return the requests that were answered 2xx."""
        return [attempt for attempt in self.attempts if attempt.status is not None and 200 <= attempt.status < 300]

    def fail(self, status: int = 500, *, times: int = 1, retry_after: int | None = None, body: bytes = b"") -> None:
        """Answer the next requests with this status."""
        after = None if retry_after is None else str(retry_after)
        self._script(lambda: HttpAnswer(status, body, after), times)

    def drop_connection(self, *, times: int = 1) -> None:
        """Leave the next requests without an answer, as when a connection is lost."""

        def cut() -> HttpAnswer:
            raise Unanswered("the connection was lost")

        self._script(cut, times)

    def _script(self, answer: Callable[[], HttpAnswer], times: int) -> None:
        if times < 1:
            raise ConfigError("times must be 1 or more.")
        self._answers += [answer] * times

    def answer(self, url: str, headers: Mapping[str, str], body: bytes) -> HttpAnswer:
        """Record a request and answer it. Raises Unanswered where that is scripted."""
        answer = self._answers.pop(0) if self._answers else lambda: HttpAnswer(200, b"")
        status: int | None = None
        try:
            scripted = answer()
            status = scripted.status
            return scripted
        finally:
            named = {name.lower(): value for name, value in headers.items()}
            self.attempts.append(RecordedAttempt(url, named, body, status, clock.now_utc()))


class RecordingClient(HttpClient):
    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, within: float) -> HttpAnswer:
        return self._recorded.answer(url, headers, body)
