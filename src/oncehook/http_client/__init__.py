"""The answer to an HTTP call, and how a call can fail (S21).

`oncehook.http_client.client` makes the calls. It is imported when a destination is opened, so that whoever only handles
answers need not load it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oncehook.errors import OncehookError
from oncehook.model import Category


@dataclass(slots=True, frozen=True)
class HttpAnswer:
    """Answer to a call: decided by its status, whatever became of its body."""

    status: int
    body: bytes = field(repr=False)
    """Beginning of the body; never decompressed."""
    retry_after: str | None = None


class Unanswered(OncehookError):
    """No status line came back."""

    code = "unanswered"
    category = Category.transient

    def __init__(self, message: str = "", *, hint: str = "", reached: bool = True) -> None:
        super().__init__(message, hint=hint)
        self.reached = reached
        """Whether the other end may have received the call; False when there was no connection."""


class AddressForbidden(Unanswered):
    """Every address this name leads to is one that may not be called."""

    code = "address_forbidden"
    category = Category.permanent


class Untrusted(Unanswered):
    """The other end could not prove who it is."""

    code = "certificate_untrusted"
    category = Category.permanent
