"""What every stand-in has in common: scripted faults for whoever calls it, and hooks for whoever listens to it.

A stand-in is a real HTTP server that behaves like one provider's API as far as a program can tell: paths,
authorisation, success bodies with ids, error bodies with their own codes. Tests script what goes wrong, and have it
send webhooks as the provider would: signed, in batches, twice, again when it was not answered 2xx.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Final, Generic, TypeVar

from oncehook import clock, presets, samples
from oncehook.errors import ConfigError
from oncehook.model import Arrival
from oncehook.samples import Answer
from oncehook.testing.standins.server import CUT, LoopbackServer, Reply, Request

H = TypeVar("H")

UNANSWERED: Final = 0
"""The status of an `Answer` where nobody answered."""


@dataclass(slots=True, frozen=True)
class SentMessage:
    """A message that the API has taken: somebody's phone would have rung."""

    id: str
    to: str
    type: str
    """`text`, `image`, `template`, `reaction`, …: in the API's own words."""
    body: dict[str, Any]
    """The request's fields."""
    at: datetime

    @property
    def text(self) -> str | None:
        """Its words, if it has any."""
        text = self.body.get("text")
        found = text.get("body") if isinstance(text, dict) else text
        return found if isinstance(found, str) else None


@dataclass(slots=True)
class _Fault:
    """What happens to the next calls instead of, before or after the right answer."""

    act: Callable[[Request], Reply]
    left: int | None
    """Calls that still meet it; None: all of them."""


class StandIn(LoopbackServer, ABC, Generic[H]):
    """A provider's API. `H` is one webhook, or one part of one, before it is put into a request and signed."""

    preset: ClassVar[str]
    """The preset of a source that takes its webhooks."""

    def __init__(self, *, secret: str, port: int = 0) -> None:
        """`secret` is what its webhooks are signed with."""
        super().__init__(port=port)
        self.secret = secret
        self.sent: list[SentMessage] = []
        """What was accepted, in order; also what was accepted without an answer."""
        self._faults: list[_Fault] = []
        self._scripting = threading.Lock()

    # -- what goes wrong -----------------------------------------------------------------------

    @abstractmethod
    def fail(self, status: int | None = None, *, times: int | None = 1) -> None:
        """Answer the next calls with an error as this API writes it, and do nothing. `times=None`: until `recover`."""

    def hang(self, *, times: int | None = 1) -> None:
        """Take the next calls and never answer. Nothing is done."""

        def act(request: Request) -> Reply:
            self.wait(None)
            return CUT

        self.script(act, times)

    def drop_connection(self, *, times: int | None = 1) -> None:
        """End the connection of the next calls without an answer. Nothing is done."""
        self.script(lambda request: CUT, times)

    def accept_and_drop(self, *, times: int | None = 1) -> None:
        """Do what the next calls ask, and end their connection without an answer: the caller cannot know."""

        def act(request: Request) -> Reply:
            self.answer(request)
            return CUT

        self.script(act, times)

    def delay(self, seconds: float, *, times: int | None = 1) -> None:
        """Answer the next calls rightly, but only after so long."""

        def act(request: Request) -> Reply:
            self.wait(seconds)
            return self.answer(request)

        self.script(act, times)

    def recover(self) -> None:
        """Forget every fault that is still to come."""
        with self._scripting:
            self._faults.clear()

    def script(self, act: Callable[[Request], Reply], times: int | None = 1) -> None:
        """Let a function of one's own answer the next calls. Faults are met in the order in which they were said."""
        if times is not None and times < 1:
            raise ConfigError("times must be 1 or more, or None for ever.")
        with self._scripting:
            self._faults.append(_Fault(act, times))

    def reply(self, request: Request) -> Reply:
        """See LoopbackServer."""
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
        """What the API answers when nothing goes wrong, and what it does."""

    def take(self, id: str, to: str, type: str, body: dict[str, Any]) -> SentMessage:
        """Write down a message as sent."""
        self.sent.append(SentMessage(id, to, type, body, clock.now_utc()))
        return self.sent[-1]

    # -- webhooks ------------------------------------------------------------------------------

    @abstractmethod
    def webhooks(self, *hooks: H) -> Sequence[Arrival]:
        """These hooks as requests, not signed yet: one for all where the provider sends batches, else one for each."""

    def signed(self, *hooks: H) -> list[Arrival]:
        """These hooks as the provider would send them."""
        scheme = presets.load(self.preset).scheme
        return [scheme.sign(draft, self.secret.encode(), at=clock.now()) for draft in self.webhooks(*hooks)]

    async def deliver(
        self, url: str, *hooks: H, copies: int = 1, retries: int = 0, pause: float = 0.0, after: float = 0.0
    ) -> list[Answer]:
        """Send hooks to an inbox; returns every answer in order.

        Each request is sent `copies` times, whatever is answered, as when two apps of one account are retried for. What
        is not answered 2xx is sent again up to `retries` times, `pause` seconds apart: the very same bytes, as the
        provider does. `after` lets that many seconds pass before the first. Where nobody answers, the status is 0.

        >>> first, second = await meta.deliver(url, meta.message(from_="5511988880142", text="Hi"), copies=2)
        """
        return await asyncio.to_thread(
            self.deliver_blocking, url, *hooks, copies=copies, retries=retries, pause=pause, after=after
        )

    def deliver_blocking(
        self, url: str, *hooks: H, copies: int = 1, retries: int = 0, pause: float = 0.0, after: float = 0.0
    ) -> list[Answer]:
        """`deliver`, for a test that is a plain function."""
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


def _post(url: str, request: Arrival) -> Answer:
    started = clock.perf()
    try:
        return samples.post(url, request)
    except OSError as error:
        return Answer(UNANSWERED, str(error).encode(), clock.perf() - started)


def json_request(content: bytes) -> Arrival:
    """An unsigned request with a JSON body."""
    return Arrival("", [(b"content-type", b"application/json")], content)


def new_hex(count: int) -> str:
    """So many random digits, as ids of messages have them."""
    return clock.random_bytes((count + 1) // 2).hex().upper()[:count]


def digits(number: str) -> str:
    """A number or a JID as the network knows it: digits only."""
    return "".join(character for character in number.partition("@")[0].partition(":")[0] if character.isdigit())


def jid(number: str) -> str:
    """The address of a number on the network; what is an address already stays."""
    return number if "@" in number else f"{digits(number)}@s.whatsapp.net"
