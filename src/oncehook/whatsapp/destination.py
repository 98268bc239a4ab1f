"""A WhatsApp API as a destination: read the body of a lease as a message, send it once, classify the answer.

Sending is at least once: when no answer came, the message may have been sent all the same. `unsure = "dead"` leaves
such a case to a person. The worker calls it; `oncehook.whatsapp` makes the call.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Literal

from oncehook.destinations.base import Result, Terms
from oncehook.errors import ConfigError
from oncehook.event import outward_id
from oncehook.model import ANSWER_KEPT, Category, DeliveryPreview, Evidence, Lease, Priority, flatten_text
from oncehook.whatsapp.messages import InvalidMessage, Message, check, read_message, summary
from oncehook.whatsapp.numbers import normalise
from oncehook.whatsapp.outcomes import OF_ONE_MESSAGE, SendFailed, Sent

if TYPE_CHECKING:
    from oncehook.whatsapp.sender import Credential, Sender


def read_subject(message: Message, country: str | None = None) -> str | None:
    """Return the normalised recipient, so that messages to one person are sent in order.

    Raises InvalidMessage for what could never be sent, before it becomes a dead letter.
    """
    check(message)
    return None if message.to is None else normalise(message.to, country=country)


def preview_message(body: bytes) -> DeliveryPreview | None:
    """Return recipient and summary of an event's body, in a line each; None when it is no message."""
    try:
        message = read_message(body)
    except InvalidMessage:
        return None
    return DeliveryPreview(flatten_text(message.to or "", 64), flatten_text(summary(message)))


Unsure = Literal["retry", "dead"]

CRASH_TOLERANCE: Final = 3
"""Crashes of the process that do not count against a message; none where a second message must not be risked."""

GRACE: Final = 1.0
"""Seconds beyond the timeout for a sender that exceeds it; less than the worker allows."""

_DIED: Final = "unsure: the worker died during an attempt, and the message may have been sent"
_STOPPED: Final = "unsure: the worker was stopped during the attempt, and the message may have been sent"


class SenderDestination:
    """A WhatsApp API to which messages are sent."""

    kind = "sender"
    has_own_route = True
    """It gets events that are emitted under its name."""

    def __init__(self, name: str, sender: Sender, terms: Terms | None = None, *, unsure: Unsure = "retry") -> None:
        if unsure not in ("retry", "dead"):
            raise ConfigError('unsure must be "retry" or "dead".')
        self.name = name
        self.id = 0
        self.terms = terms or Terms()
        self.sender = sender
        self.unsure = unsure
        self.address = f"{sender.api} {sender.address}"
        self.crash_tolerance = 0 if unsure == "dead" else CRASH_TOLERANCE

    @property
    def media_access(self) -> tuple[str, Credential, str]:
        """API, key and address with which files of the same account can be fetched."""
        return self.sender.api, self.sender.credential, self.sender.base_url

    async def open(self) -> None:
        await self.sender.open()

    async def close(self) -> None:
        """Close the connections, including those to the file storage, which reopens by itself."""
        await self.sender.close()
        if (close := getattr(self.sender.files, "close", None)) is not None:
            await close()

    def subject_of(self, message: Message) -> str | None:
        return read_subject(message, getattr(self.sender, "country", None))

    def preview(self, body: bytes) -> DeliveryPreview | None:
        return preview_message(body)

    async def attempt(self, lease: Lease) -> Result:
        """Send it once, within `terms.timeout`."""
        if self.unsure == "dead" and lease.priority is Priority.quarantined:
            # Without crash tolerance, only deliveries that were under way in a process that died come back quarantined.
            return _permanent(_DIED)
        try:
            message = read_message(lease.event.body)
            # The sender applies its own timeout, because it knows whether an aborted call may have sent the message.
            async with asyncio.timeout(self.terms.timeout + GRACE) as limit:
                sent = await self.sender.attempt(message, id=outward_id(lease))
        except (InvalidMessage, ConfigError) as error:
            return Result(Category.permanent, Evidence(error=_line(f"{error.code}: {error}")), counts=False)
        except SendFailed as error:
            return self._settle_failure(error)
        except TimeoutError as error:
            late = f"no answer within {self.terms.timeout:g} s" if limit.expired() else str(error)
            return self._settle_silence(f"unavailable: {late or 'no answer in time'}")
        except asyncio.CancelledError:
            if self.unsure == "dead":
                return _permanent(_STOPPED)
            raise
        except Exception as error:  # the worker needs a result; the error's text may contain a secret
            found = self.terms.rules.of_error(error)
            return self._settle_silence(f"sending failed: {type(error).__name__}", found.category)
        return Result(evidence=Evidence(sent.status, answer=_answer_of(sent)))

    def _settle_failure(self, error: SendFailed) -> Result:
        text = f"{error.reason.value}{f' {error.api_code}' if error.api_code else ''}: {error}"
        evidence = Evidence(error.status, _line(text), error.answer[:ANSWER_KEPT] or None)
        if error.unsure and self.unsure == "dead":
            return _permanent(_line(f"unsure, {text}"), evidence)
        found = self.terms.rules.of_error(error)
        counts = error.reason not in OF_ONE_MESSAGE
        return Result(found.category, evidence, retry_after=found.retry_after, counts=counts)

    def _settle_silence(self, text: str, category: Category = Category.transient) -> Result:
        """Settle an attempt after which it is unknown whether the message was sent."""
        return _permanent(f"unsure, {text}") if self.unsure == "dead" else Result(category, Evidence(error=text))


def _permanent(text: str, evidence: Evidence | None = None) -> Result:
    status, answer = (evidence.status, evidence.answer) if evidence else (None, None)
    return Result(Category.permanent, Evidence(status, text, answer))


def _answer_of(sent: Sent) -> bytes | None:
    """Return the evidence of a success: the message's id at WhatsApp, then the beginning of the API's answer."""
    id_line = f"message_id: {sent.message_id}\n".encode() if sent.message_id else b""
    return (id_line + sent.answer)[:ANSWER_KEPT] or None


def _line(text: str) -> str:
    return text.split("\n")[0][:500]
