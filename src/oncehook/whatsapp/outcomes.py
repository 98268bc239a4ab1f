"""The outcomes of sending a message, alike for every WhatsApp API.

An API's module reads a `Fault` from an answer, `sender` turns it into a `Sent` or a `SendFailed`, and the caller
handles those: by reason, by category, and by whether the message may have been sent after all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from oncehook.categories import category_of
from oncehook.errors import OncehookError
from oncehook.http_client import Unanswered
from oncehook.model import Category

NOBODY_ANSWERED: Final = frozenset({504, 524})
"""Statuses of a gateway that has forwarded the message and got no answer."""


class Reason(Enum):
    """The reason why a message was not sent, alike for all APIs."""

    rate_limited = "rate_limited"
    window_closed = "window_closed"
    """More than 24 hours since the customer wrote: only a template goes through (Meta)."""
    invalid_number = "invalid_number"
    """Not a number, or nobody on WhatsApp has it."""
    instance_offline = "instance_offline"
    """The phone behind the instance is not connected."""
    unauthorized = "unauthorized"
    """The token has expired, or was never right."""
    too_large = "too_large"
    unsupported = "unsupported"
    """This API cannot send that kind of message."""
    invalid = "invalid"
    unavailable = "unavailable"
    """The API or the way to it is down."""
    unknown = "unknown"


CATEGORY: dict[Reason, Category] = {
    Reason.rate_limited: Category.transient,
    Reason.window_closed: Category.permanent,
    Reason.invalid_number: Category.permanent,
    Reason.instance_offline: Category.transient,
    Reason.unauthorized: Category.permanent,
    Reason.too_large: Category.permanent,
    Reason.unsupported: Category.permanent,
    Reason.invalid: Category.permanent,
    Reason.unavailable: Category.transient,
    Reason.unknown: Category.unknown,
}

OF_ONE_MESSAGE: Final = frozenset({Reason.window_closed, Reason.invalid_number, Reason.too_large, Reason.unsupported})
"""Reasons that lie in a message or its recipient: the API works, and the next message may go through."""

_REASON: Final = {
    Category.transient: Reason.unavailable,
    Category.permanent: Reason.invalid,
    Category.unknown: Reason.unknown,
}
"""The reason where only the category is known."""


@dataclass(slots=True, frozen=True)
class Sent:
    """A message that the API has accepted."""

    message_id: str | None
    status: int
    answer: bytes = field(default=b"", repr=False)
    """The beginning of the API's answer."""
    attempts: int = 1


class SendFailed(OncehookError):
    """The message was not sent."""

    code = "send_failed"

    def __init__(
        self,
        message: str,
        reason: Reason,
        *,
        status: int | None = None,
        api_code: str | None = None,
        answer: bytes = b"",
        retry_after: float | None = None,
        unsure: bool = False,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
        self.category = CATEGORY[reason]
        self.status = status
        self.api_code = api_code
        """The API's own error code, as text."""
        self.answer = answer
        self.retry_after = retry_after
        self.unsure = unsure
        """Whether the message may have been sent all the same, because no answer came."""
        self.attempts = 1


@dataclass(slots=True, frozen=True)
class Fault:
    """The cause of a failure, read from an API's answer."""

    reason: Reason
    text: str = ""
    api_code: str | None = None
    unsure: bool = False


def reason_of(status: int) -> Reason:
    if status in (401, 403):
        return Reason.unauthorized
    if status == 413:
        return Reason.too_large
    if status == 429:
        return Reason.rate_limited
    return _REASON[category_of(status) or Category.unknown]


def build_unsupported(api: str, what: str) -> SendFailed:
    return SendFailed(f"{api} cannot send {what}.", Reason.unsupported)


def build_silence(error: Unanswered) -> SendFailed:
    may_be_sent = error.reached and error.category is Category.transient
    return SendFailed(str(error), _REASON[error.category], unsure=may_be_sent)
