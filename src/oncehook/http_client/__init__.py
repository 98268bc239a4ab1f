"""The answer to an HTTP call, and how a call can fail (S21).

`oncehook.http_client.client` makes the calls. It is imported when a destination is opened, so that whoever only handles
answers need not load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oncehook.errors import OncehookError
from oncehook.model import Category


class CallTimes:
    """Durations of the steps of one call, in seconds; None for a step that was not made or did not end."""

    __slots__ = ("began", "connect", "dns", "first_byte", "tls", "total")

    def __init__(self, began: float) -> None:
        self.began = began
        self.dns: float | None = None
        self.connect: float | None = None
        self.tls: float | None = None
        self.first_byte: float | None = None
        """From the request to the first byte of the answer."""
        self.total: float | None = None


@dataclass(slots=True, frozen=True)
class HttpAnswer:
    """Answer to a call: decided by its status, whatever became of its body."""

    status: int
    body: bytes = field(repr=False)
    """Beginning of the body; never decompressed."""
    retry_after: str | None = None
    headers: Sequence[tuple[bytes, bytes]] = field(default=(), repr=False, compare=False)
    times: CallTimes | None = field(default=None, repr=False, compare=False)
    location: str | None = None
    """Where a redirect leads, which is never followed here."""
    is_complete: bool = True
    """False where the body was cut: too long, too late, or the connection ended."""


class Unanswered(OncehookError):
    """No status line came back."""

    code = "unanswered"
    category = Category.transient

    def __init__(self, message: str = "", *, hint: str = "", reached: bool = True) -> None:
        super().__init__(message, hint=hint)
        self.reached = reached
        """Whether the other end may have received the call; False when there was no connection."""
        self.times: CallTimes | None = None


class AddressForbidden(Unanswered):
    """Every address this name leads to is one that may not be called."""

    code = "address_forbidden"
    category = Category.permanent


class Untrusted(Unanswered):
    """The other end could not prove who it is."""

    code = "certificate_untrusted"
    category = Category.permanent
