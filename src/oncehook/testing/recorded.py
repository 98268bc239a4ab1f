"""Recorded destinations: what a `TestInbox` would send is recorded instead, whatever the destination's kind.

Of an HTTP destination and a sender everything but the network is real: headers, signature, the API's request, and what
an answer means. Of any other kind (Celery, one of your own) the payload is recorded and the attempt is not made. A test
scripts the answers and inspects what was sent. Stand-ins are called for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from oncehook import clock
from oncehook.destinations import http
from oncehook.destinations.base import WELL, Destination, Result
from oncehook.destinations.http import HttpDestination
from oncehook.errors import ConfigError
from oncehook.http_client import HttpAnswer, Unanswered, client
from oncehook.http_client.client import MOST_KEPT, HttpClient
from oncehook.model import Evidence, Lease
from oncehook.testing.standins import server
from oncehook.whatsapp.destination import SenderDestination
from oncehook.whatsapp.messages import InvalidMessage, Message, read_message
from oncehook.whatsapp.sender import Sender


@dataclass(slots=True, frozen=True)
class RecordedAttempt:
    """One request, message or task as it would have gone out, and the status that it was answered with."""

    url: str
    """Its URL; of a kind that has none, the destination's address (Celery: the task's name)."""
    headers: Mapping[str, str] = field(repr=False)
    """Names in lower case."""
    body: bytes
    """Body of the request; of Celery, the task's argument as JSON."""
    status: int | None
    """None: no answer."""
    at: datetime
    event_id: str = ""
    attempt: int = 0
    """Number of the attempt within its run."""
    message: Message | None = None
    """The message, where a sender would have sent one."""
    to: str | None = None
    """Its recipient, normalised."""

    @property
    def text(self) -> str | None:
        """Return the message's text, if it has one."""
        return getattr(self.message, "text", None)

    def json(self) -> Any:
        """Parse the body."""
        return msgspec.json.decode(self.body)


Answer = Callable[[], HttpAnswer]

_LEASE: ContextVar[dict[str, Any]] = ContextVar("oncehook_recorded")
"""Fields of `RecordedAttempt` that the current attempt's lease determines."""


class Recorded:
    """What a destination would have been sent, and its scripted answers: success by default."""

    def __init__(self) -> None:
        self.attempts: list[RecordedAttempt] = []
        """Every attempt, in order."""
        self.is_explicit = False
        """True where a test asked for it: then nothing is sent, whatever else is allowed."""
        self._answers: list[Answer] = []

    @property
    def sent(self) -> list[RecordedAttempt]:
        """Return the attempts that were answered 2xx."""
        return [attempt for attempt in self.attempts if attempt.status is not None and 200 <= attempt.status < 300]

    deliveries = sent

    def fail(self, status: int = 500, *, times: int = 1, retry_after: int | None = None, body: bytes = b"") -> None:
        """Answer the next attempts with this status."""
        after = None if retry_after is None else str(retry_after)
        self._script(lambda: HttpAnswer(status, body, after), times)

    def drop_connection(self, *, times: int = 1) -> None:
        """Leave the next attempts without an answer, as when a connection is lost."""

        def cut() -> HttpAnswer:
            raise Unanswered("the connection was lost")

        self._script(cut, times)

    def _script(self, answer: Answer, times: int) -> None:
        if times < 1:
            raise ConfigError("times must be 1 or more.")
        self._answers += [answer] * times

    def take_answer(self) -> Answer | None:
        """Return the next scripted answer, or None."""
        return self._answers.pop(0) if self._answers else None

    def note(self, url: str, headers: Mapping[str, str], body: bytes, status: int | None) -> None:
        named = {name.lower(): value for name, value in headers.items()}
        self.attempts.append(RecordedAttempt(url, named, body, status, clock.now_utc(), **_LEASE.get({})))


class RecordingClient(HttpClient):
    """A client that records requests and answers them itself, unless `passes` lets one through to `inner`."""

    def __init__(
        self, inner: HttpClient, recorded: Recorded, passes: Callable[[str], bool], success: Callable[[], bytes]
    ) -> None:
        super().__init__()
        self._inner, self._recorded, self._passes, self._success = inner, recorded, passes, success

    async def open(self) -> None:
        await self._inner.open()

    async def close(self) -> None:
        await self._inner.close()

    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        within: float,
        most: int = MOST_KEPT,
        again: bool = False,
    ) -> HttpAnswer:
        status: int | None = None
        try:
            if (scripted := self._recorded.take_answer()) is not None:
                answer = scripted()
            elif self._passes(url):
                answer = await self._inner.request(method, url, headers, body, within=within, most=most, again=again)
            else:
                answer = HttpAnswer(200, self._success())
            status = answer.status
            return answer
        finally:
            self._recorded.note(url, headers, body or b"", status)


class RecordingDestination:
    """A destination of any kind as a test's worker sees it: the payload is recorded, the attempt is not made."""

    def __init__(self, destination: Destination, own: Any, recorded: Recorded, passes: Callable[[str], bool]) -> None:
        """`own` is the destination itself where `destination` wraps it."""
        self._destination, self._own, self._recorded = destination, own, recorded
        self._passes = partial(passes, destination.address)
        self.name, self.id = destination.name, destination.id
        self.terms, self.crash_tolerance = destination.terms, destination.crash_tolerance
        self.kind, self.address = destination.kind, destination.address
        self.is_cancellable: bool = getattr(destination, "is_cancellable", True)

    async def open(self) -> None:
        if self._passes():
            await self._destination.open()

    async def close(self) -> None:
        if self._passes():
            await self._destination.close()

    async def attempt(self, lease: Lease) -> Result:
        scripted = self._recorded.take_answer()
        if scripted is None:
            result = await self._destination.attempt(lease) if self._passes() else WELL
        else:
            result = self._judge(scripted)
        # Only HTTP has statuses: of other kinds, success is told as 200.
        status = 200 if result.category is None else result.evidence.status
        payload = getattr(self._own, "payload", None)
        with _of_lease(self._own, lease):
            self._recorded.note(self.address, {}, payload(lease) if payload else lease.event.body, status)
        return result

    def _judge(self, scripted: Answer) -> Result:
        try:
            status = scripted().status
        except Unanswered as error:
            return Result(error.category, Evidence(error=str(error)))
        return Result(self.terms.rules.of_status(status), Evidence(status, http.failure(status)))


class RecordingOverHttp(RecordingDestination):
    """A destination that sends by our own client: everything is real but that client."""

    def __init__(self, destination: Destination, own: Any, recorded: Recorded, passes: Callable[[str], bool]) -> None:
        super().__init__(destination, own, recorded, passes)
        self._passes_url = passes
        self._caller = own.sender if isinstance(own, SenderDestination) else own

    async def open(self) -> None:
        await self._destination.open()
        real = self._caller._client
        assert real is not None
        if not isinstance(real, RecordingClient):
            success = partial(_build_success, getattr(self._caller, "message_id_path", ()))
            self._caller._client = RecordingClient(real, self._recorded, self._passes_url, success)

    async def close(self) -> None:
        await self._destination.close()

    async def attempt(self, lease: Lease) -> Result:
        with _of_lease(self._own, lease):
            return await self._destination.attempt(lease)


def record(destination: Destination, own: Any, recorded: Recorded, passes: Callable[[str], bool]) -> Destination:
    """Return a destination for a worker that records what it would send."""
    calls = isinstance(own, HttpDestination) or (
        # A sender with an `attempt` of its own may use another client, which could not be held back.
        isinstance(own, SenderDestination) and type(own.sender).attempt is Sender.attempt
    )
    return (RecordingOverHttp if calls else RecordingDestination)(destination, own, recorded, passes)


@contextmanager
def _of_lease(own: Any, lease: Lease) -> Iterator[None]:
    about: dict[str, Any] = {"event_id": str(lease.event.id), "attempt": lease.delivery.attempt}
    if isinstance(own, SenderDestination):
        try:
            message = read_message(lease.event.body)
            about |= {"message": message, "to": own.subject_of(message)}
        except InvalidMessage:
            """It is not sent either."""
    before = _LEASE.set(about)
    try:
        yield
    finally:
        _LEASE.reset(before)


def _build_success(path: tuple[str | int, ...]) -> bytes:
    """Return an API's answer to a message, with an id where a sender looks for it."""
    if not path:
        return b""
    answer: Any = f"recorded.{clock.random_bytes(8).hex()}"
    for name in reversed(path):
        answer = {name: answer} if isinstance(name, str) else [answer]
    return msgspec.json.encode(answer)


# -- the network -------------------------------------------------------------------------------


def is_standin(url: str) -> bool:
    """Tell whether this is the address of a stand-in, which may have been stopped."""
    return urlsplit(url).netloc in server.ADDRESSES


_KEPT_OFF: Final[list[object]] = []
"""Inboxes under test that do not allow the network."""


def keep_off_network(owner: object) -> None:
    """Let our own client call no host but this machine, until `allow_network` with the same owner."""
    if owner not in _KEPT_OFF:
        _KEPT_OFF.append(owner)
    client.gate = _refuse


def allow_network(owner: object) -> None:
    if owner in _KEPT_OFF:
        _KEPT_OFF.remove(owner)
    if not _KEPT_OFF:
        client.gate = None


def _refuse(host: str) -> str | None:
    try:
        is_here = host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_here = False
    return None if is_here else "this is a test; see inbox.allow_network()"
