"""Callouts: a few words on the dashboard about something that is there to be seen, until somebody dismisses them.

A `Guide` says what they are; the demo has one, and `serve_inbox` hands it to the pages. Everything is a plain form, so
it works without script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from oncehook.errors import NotFound

if TYPE_CHECKING:
    from oncehook.web.dashboard.context import Visit


@dataclass(frozen=True, slots=True)
class Callout:
    """One thing to look at, and what can be done about it."""

    name: str
    shape: str
    """The shape of a state, as pages draw it."""
    title: str
    text: str
    at: datetime | None = None
    """A moment that belongs to the title."""
    until: datetime | None = None
    """A moment that belongs to the text."""
    link: str = ""
    link_text: str = ""
    opens_dialog: bool = False
    act: str = ""
    """What its button says; empty: it has none."""


class Guide(Protocol):
    """Who knows what is worth seeing."""

    async def callouts(self) -> Sequence[Callout]:
        """Those that nobody has dismissed."""

    def dismiss(self, name: str) -> None:
        """Not again while this process runs."""

    def act(self, name: str) -> None:
        """Somebody pressed the button of a callout."""


async def dismiss(visit: Visit) -> Response:
    """It was seen."""
    _guide(visit).dismiss(visit.request.path_params["name"])
    return visit.back(await _place(visit))


async def act(visit: Visit) -> Response:
    """Do what its button says."""
    _guide(visit).act(visit.request.path_params["name"])
    return visit.back(await _place(visit), "mend")


def _guide(visit: Visit) -> Guide:
    if visit.guide is None:
        raise NotFound("There is no such page.")
    return visit.guide


async def _place(visit: Visit) -> str:
    return "/dead" if (await visit.form()).get("from") == "dead" else "/"
