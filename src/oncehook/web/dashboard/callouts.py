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
    from oncehook.web.dashboard.context import PageContext


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
    """A source of callouts."""

    async def callouts(self) -> Sequence[Callout]:
        """Return those that nobody has dismissed."""

    def dismiss(self, name: str) -> None:
        """Show it no more while this process runs."""

    def act(self, name: str) -> None:
        """Do what the button of a callout says."""


async def dismiss(context: PageContext) -> Response:
    """Remove a callout."""
    _guide(context).dismiss(context.request.path_params["name"])
    return context.back(await _place(context))


async def act(context: PageContext) -> Response:
    """Do what its button says."""
    _guide(context).act(context.request.path_params["name"])
    return context.back(await _place(context), "mend")


def _guide(context: PageContext) -> Guide:
    if context.guide is None:
        raise NotFound("There is no such page.")
    return context.guide


async def _place(context: PageContext) -> str:
    return "/dead" if (await context.form()).get("from") == "dead" else "/"
