"""Base classes of the stand-ins: scripted faults for programs that call one, webhooks for programs that receive.

A stand-in is a real HTTP server that behaves like one provider's API as far as a program can tell: paths,
authorisation, success bodies with ids, error bodies with the provider's codes. Tests script faults, and have it send
webhooks like the provider: signed, in batches, twice, again when the answer was not 2xx.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec

from oncehook import clock, presets, samples
from oncehook.errors import ConfigError
from oncehook.model import Arrival
from oncehook.samples import Answer
from oncehook.testing.standins.server import CUT, LoopbackServer, Reply, Request

H = TypeVar("H")

UNANSWERED: Final = 0
"""Status of an `Answer` where no server answered."""


@dataclass(slots=True, frozen=True)
class SentMessage:
    """A message that the API has accepted."""

    id: str
    to: str
    type: str
    """`text`, `image`, `template`, `reaction`, …: as the API names it."""
    body: dict[str, Any]
    at: datetime

    @property
    def text(self) -> str | None:
        text = self.body.get("text")
        found = text.get("body") if isinstance(text, dict) else text
        return found if isinstance(found, str) else None


@dataclass(slots=True)
class _ScriptedFault:
    act: Callable[[Request], Reply]
    left: int | None
    """Calls that it still answers; None: all of them."""


class StandIn(LoopbackServer, ABC, Generic[H]):
    """A provider's API. `H` is a webhook, or a part of one, before it is put into a request and signed."""

    preset: ClassVar[str]
    """The preset of a source that takes its webhooks."""

    def __init__(self, *, secret: str, port: int = 0) -> None:
        """Sign webhooks with `secret`."""
        super().__init__(port=port)
        self.secret = secret
        self.sent: list[SentMessage] = []
        """Accepted messages in order, including those accepted without an answer."""
        self._faults: list[_ScriptedFault] = []
        self._scripting = threading.Lock()

    # -- what goes wrong -----------------------------------------------------------------------

    def fail(
        self,
        status: int | None = None,
        *,
        message: object = None,
        retry_after: int | None = None,
        times: int | None = 1,
    ) -> None:
        """Answer the next calls with an error of this status (500 by default) in this API's format, and do nothing
        else.

        `times=None`: until `recover`.
        """
        self.script_error(self.error(status or 500, message), retry_after, times)

    def script_error(self, reply: Reply, retry_after: int | None, times: int | None) -> None:
        """Answer the next calls with this error."""
        if retry_after is not None:
            reply = Reply(reply.status, reply.body, {**reply.headers, "retry-after": str(retry_after)})
        self.script(lambda request: reply, times)

    @abstractmethod
    def error(self, status: int, message: object = None) -> Reply:
        """Build an error in this API's format."""

    def hang(self, *, times: int | None = 1) -> None:
        """Receive the next calls, never answer them, and do nothing."""

        def act(request: Request) -> Reply:
            self.wait(None)
            return CUT

        self.script(act, times)

    def drop_connection(self, *, times: int | None = 1) -> None:
        """End the connection of the next calls without an answer, and do nothing."""
        self.script(lambda request: CUT, times)

    def accept_and_drop(self, *, times: int | None = 1) -> None:
        """Carry out the next calls, but close their connection without an answer: the caller cannot know the
        outcome."""

        def act(request: Request) -> Reply:
            self.answer(request)
            return CUT

        self.script(act, times)

    def delay(self, seconds: float, *, times: int | None = 1) -> None:
        """Answer the next calls correctly after `seconds`."""

        def act(request: Request) -> Reply:
            self.wait(seconds)
            return self.answer(request)

        self.script(act, times)

    def recover(self) -> None:
        """Remove every scripted fault that is left."""
        with self._scripting:
            self._faults.clear()

    def script(self, act: Callable[[Request], Reply], times: int | None = 1) -> None:
        """Let a function answer the next calls. Faults apply in the order in which they were scripted."""
        if times is not None and times < 1:
            raise ConfigError("times must be 1 or more, or None for ever.")
        with self._scripting:
            self._faults.append(_ScriptedFault(act, times))

    def reply(self, request: Request) -> Reply:
        act = self._next_fault()
        return self.answer(request) if act is None else act(request)

    def _next_fault(self) -> Callable[[Request], Reply] | None:
        with self._scripting:
            if not self._faults:
                return None
            fault = self._faults[0]
            if fault.left is not None:
                fault.left -= 1
                if not fault.left:
                    self._faults.pop(0)
            return fault.act

    @abstractmethod
    def answer(self, request: Request) -> Reply:
        """Carry out a call like the API, and build its answer."""

    def take(self, id: str, to: str, type: str, body: dict[str, Any]) -> SentMessage:
        """Add a message to `sent`."""
        self.sent.append(SentMessage(id, to, type, body, clock.now_utc()))
        return self.sent[-1]

    # -- webhooks ------------------------------------------------------------------------------

    def webhooks(self, *hooks: H) -> Sequence[Arrival]:
        """Build the unsigned requests of these hooks: one each, or one for all where the provider sends batches."""
        return [json_request(msgspec.json.encode(self.envelope(hook))) for hook in hooks]

    def envelope(self, hook: H) -> object:
        """Build the body that carries one hook."""
        return hook

    def signed(self, *hooks: H) -> list[Arrival]:
        """Build the requests of these hooks, signed as by the provider."""
        scheme = presets.load(self.preset).scheme
        return [scheme.sign(draft, self.secret.encode(), at=clock.now()) for draft in self.webhooks(*hooks)]

    async def deliver(
        self, url: str, *hooks: H, copies: int = 1, retries: int = 0, pause: float = 0.0, after: float = 0.0
    ) -> list[Answer]:
        """Send hooks to an inbox; return every answer in order.

        Each request is sent `copies` times whatever the answer, as when two apps of one account are retried. A request
        not answered 2xx is sent again byte for byte, up to `retries` times, `pause` seconds apart, as by the provider.
        `after` is a delay in seconds before the first. Where no server answers, the status is 0.

        >>> first, second = await meta.deliver(url, meta.message(from_="5511988880142", text="Hi"), copies=2)
        """
        return await asyncio.to_thread(
            self.deliver_blocking, url, *hooks, copies=copies, retries=retries, pause=pause, after=after
        )

    def deliver_blocking(
        self, url: str, *hooks: H, copies: int = 1, retries: int = 0, pause: float = 0.0, after: float = 0.0
    ) -> list[Answer]:
        """Deliver like `deliver`, in a test that is a plain function."""
        if after:
            self.wait(after)
        answers: list[Answer] = []
        for request in self.signed(*hooks):
            for _ in range(copies):
                answers += self._send(url, request, retries, pause)
        return answers

    def _send(self, url: str, request: Arrival, retries: int, pause: float) -> list[Answer]:
        answers = [_post(url, request)]
        while retries and not 200 <= answers[-1].status < 300:
            retries -= 1
            self.wait(pause)
            answers.append(_post(url, request))
        return answers


class WhatsAppStandIn(StandIn[H]):
    """A WhatsApp API: its token can expire, and some numbers are not on WhatsApp."""

    def __init__(self, *, token: str, secret: str, port: int) -> None:
        super().__init__(secret=secret, port=port)
        self.token = token
        self.read: list[str] = []
        """Ids of the messages that were marked as read."""
        self._expired = False
        self._absent: set[str] = set()

    def expire_token(self) -> None:
        """Refuse the token from now on, until `renew_token`."""
        self._expired = True

    def renew_token(self, token: str | None = None) -> None:
        """Accept the token again, or another one instead of it."""
        self._expired, self.token = False, token or self.token

    def not_on_whatsapp(self, number: str) -> None:
        """Treat this number as one that nobody on WhatsApp has."""
        self._absent.add(digits(number))


def _post(url: str, request: Arrival) -> Answer:
    started = clock.perf()
    try:
        return samples.post(url, request)
    except OSError as error:
        return Answer(UNANSWERED, str(error).encode(), clock.perf() - started)


def json_request(content: bytes) -> Arrival:
    return Arrival("", [(b"content-type", b"application/json")], content)


def new_hex(count: int) -> str:
    """Return `count` random hexadecimal digits."""
    return clock.random_bytes((count + 1) // 2).hex().upper()[:count]


def new_message_id() -> str:
    """Return a message id as WhatsApp Web makes them."""
    return f"3EB0{new_hex(18)}"


def new_instance_id() -> str:
    return f"{new_hex(8)}-0000-4000-8000-{new_hex(12)}".lower()


def read_reference(of: object, to: str | None) -> tuple[str, str]:
    """Return id and recipient of a `SentMessage`, or of a plain id that was sent to `to`."""
    return str(getattr(of, "id", of)), str(to or getattr(of, "to", "5511988880142"))


def digits(number: str) -> str:
    """Return the digits of a number or a JID."""
    return "".join(character for character in number.partition("@")[0].partition(":")[0] if character.isdigit())


def jid(number: str) -> str:
    """Return the JID of a number; a JID is returned as is."""
    return number if "@" in number else f"{digits(number)}@s.whatsapp.net"
