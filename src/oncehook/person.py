"""The answer of a host application's `authorize`, where a name and a role do not say it all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, get_args

RoleName = Literal["viewer", "operator", "admin"]
ROLES: Final[tuple[RoleName, ...]] = get_args(RoleName)
"""From the least to the most that somebody may do; `web.access.Role` ranks them."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who uses the dashboard or the API of an application of yours."""

    name: str
    """For the audit log."""
    role: RoleName
    sources: Collection[str] | None = None
    """The sources that this person sees and acts on; None: all of them."""
    payloads: bool = True
    """Whether this person sees bodies, header values, previews and answers."""
