"""The context of one request to a page: the person, the parameters, and the frame around every answer.

Pages get a `PageContext` and answer with `context.page(...)`. The frame (rail, badges, banners) is the same for all and
is read at most once a second, however many pages are open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from oncehook import clock
from oncehook.admin import Admin, Flows
from oncehook.errors import BadRequest, NotFound
from oncehook.model import Level, ReplayState, Scope
from oncehook.reports import System
from oncehook.upkeep import Watermark
from oncehook.web.api.request import ApiCall, check_characters
from oncehook.web.auth import Role
from oncehook.web.dashboard.charts import Latency, Span, choose_span
from oncehook.web.dashboard.render import has_scripts, render
from oncehook.web.language import COOKIE, choose
from oncehook.web.session import Auth


@dataclass(frozen=True, slots=True)
class Callout:
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
    """Label of its button; empty without one."""


class FlowReader(Protocol):
    """A source of the counters of all destinations."""

    async def get(self, admin: Admin, span: Span, now: datetime) -> Mapping[str, Flows]:
        """Return the counters by destination since the span's beginning."""


class Guide(Protocol):
    """A source of callouts."""

    async def callouts(self) -> Sequence[Callout]:
        """Return the callouts that nobody has dismissed."""

    def dismiss(self, name: str) -> None:
        """Hide a callout while this process runs."""

    def act(self, name: str) -> None:
        """Do what the button of a callout offers."""


async def dismiss(context: PageContext) -> Response:
    _guide(context).dismiss(context.request.path_params["name"])
    return context.back(await _place(context))


async def act(context: PageContext) -> Response:
    _guide(context).act(context.request.path_params["name"])
    return context.back(await _place(context), "mend")


def _guide(context: PageContext) -> Guide:
    if context.guide is None:
        raise NotFound("There is no such page.")
    return context.guide


async def _place(context: PageContext) -> str:
    return "/dead" if (await context.form()).get("from") == "dead" else "/"


NO_FRAMES: Final = "frame-ancestors 'none'"
POLICY: Final = "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; " + NO_FRAMES
SAFE: Final[Mapping[str, str]] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not "no-referrer", with which browsers would hide the origin of our own forms from us.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Vary": "HX-Request, Cookie, Accept-Language",
}
"""Untrusted text is on nearly every page (S30)."""

FRESH: Final = 1.0
WAY_IN: Final = "oncehook.way_in"
"""Key in a request's scope for the path below which the surrounding application receives hooks."""


MenuEntry = tuple[str, str, str]
"""Path, icon and name of a page in the rail."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The parts around every page: rail, badges, banners."""

    menu: Sequence[MenuEntry]
    system: System
    levels: Mapping[str, Level]
    running: int
    """Replays that run or are paused."""

    @property
    def dead(self) -> int:
        return sum(level.dead for level in self.levels.values())

    @property
    def due(self) -> int:
        """Return the number of pending deliveries, for a warning where no worker is there."""
        return sum(level.pending for level in self.levels.values())

    @property
    def crossed(self) -> Sequence[Watermark]:
        return [mark for mark in self.system.watermarks if mark.crossed]

    @property
    def is_alarmed(self) -> bool:
        """Tell whether a watermark is crossed that is an alarm: daily volumes are notices only."""
        return any(mark.source is None for mark in self.crossed)


class Frames:
    """The frame, cached for a second: many open pages query the store no more often than one."""

    def __init__(self, menu: Sequence[MenuEntry]) -> None:
        self._menu = menu
        self._kept: dict[Scope, tuple[Frame, float]] = {}
        """By scope, because a viewer of some sources gets other counts."""

    async def get(self, admin: Admin) -> Frame:
        """Return the frame, at most a second old."""
        now = clock.steady()
        self._kept = {scope: kept for scope, kept in self._kept.items() if kept[1] > now}
        if admin.scope not in self._kept:
            replays = await admin.replays(limit=20)
            # One whose every delivery has ended is over, though nobody has written that down yet.
            open_ = [
                one
                for one in replays.items
                if one.state in (ReplayState.running, ReplayState.paused)
                and one.done + one.dead + one.skipped < one.planned
            ]
            frame = Frame(self._menu, await admin.system(), await admin.levels(), len(open_))
            self._kept[admin.scope] = frame, clock.steady() + FRESH
            return frame
        return self._kept[admin.scope][0]

    def forget(self) -> None:
        """Drop the cached frame, because somebody acted."""
        self._kept.clear()


@dataclass(slots=True)
class PageContext(ApiCall):
    """One request to a page, by somebody who may make it."""

    auth: Auth
    frames: Frames
    latency: Latency
    flows: FlowReader
    guide: Guide | None = None
    now: datetime = field(default_factory=clock.now_utc)

    @property
    def root(self) -> str:
        return root_of(self.request)

    @property
    def origin(self) -> str:
        """Return scheme and host as the visitor addressed us."""
        scheme = "https" if self.auth.is_https(self.request) else "http"
        return f"{scheme}://{self.request.headers.get('host', '')}"

    @property
    def way_in(self) -> str:
        """Return the URL before a source's name. For display only: its host comes from the visitor's request."""
        if not self.auth.is_hosted:
            return f"{self.origin}/in"
        path = self.request.scope.get(WAY_IN)
        return f"{self.origin}/…" if path is None else f"{self.origin}{path}"

    @property
    def is_fragment(self) -> bool:
        """Tell whether a script requests a dialog, not a person a page."""
        return self.request.headers.get("hx-target") == "dialog"

    @property
    def may_act(self) -> bool:
        return self.identity.role >= Role.operator

    @property
    def may_define(self) -> bool:
        """Tell whether this visitor may make, change and delete definitions."""
        return self.identity.role >= Role.admin and self.admin.scope.sources is None

    @property
    def may_define_accounts(self) -> bool:
        return self.may_define and not self.admin.scope.is_limited

    def many(self, name: str) -> list[str]:
        """Return a parameter that may be repeated."""
        return self.request.query_params.getlist(name)

    def span(self) -> Span:
        """Return the time span of a page's charts: a named one, or from one moment to another."""
        ends = [self._moment(name) for name in ("from", "to")]
        return choose_span(self.parameter("since"), ends[0], ends[1], self.now)

    def _moment(self, name: str) -> datetime | None:
        text = self.parameter(name)
        return self.admin.moment(text) if text else None

    def is_on(self, name: str) -> bool:
        return self.parameter(name) in ("1", "on", "true")

    async def form(self) -> dict[str, str]:
        """Return the fields of a form; the last value of a repeated one."""
        raw = await self._raw()
        try:
            fields = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=50)
        except ValueError:
            raise BadRequest("This form cannot be read.") from None
        check_characters(fields)
        return dict(fields)

    async def page(self, template: str, *, status: int = 200, **shown: Any) -> Response:
        frame = await self.frames.get(self.admin)
        return html(self.request, template, status, **self.around, frame=frame, **shown)

    async def dialog(self, template: str, *, status: int = 200, **shown: Any) -> Response:
        """Return a dialog: as a fragment for a script, otherwise as a page of its own."""
        if self.is_fragment:
            return html(self.request, template, status, **self.around, base="_dialog.html", **shown)
        return await self.page(template, status=status, base="dialog.html", **shown)

    async def callouts(self, *names: str) -> Sequence[Callout]:
        """Return the guide's callouts, all or these, if there is a guide."""
        found = () if self.guide is None else await self.guide.callouts()
        return [one for one in found if not names or one.name in names]

    def fragment(self, template: str, **shown: Any) -> Response:
        """Return a part of a page, for a script to insert."""
        return html(self.request, template, 200, **self.around, **shown)

    @property
    def around(self) -> dict[str, Any]:
        return {
            "identity": self.identity,
            "may_act": self.may_act,
            "may_discard": self.may_act and not self.auth.is_portal,
            "may_define": self.may_define,
            "may_define_accounts": self.may_define_accounts,
            "is_portal": self.auth.is_portal,
            "sees_payloads": self.admin.sees_payloads,
            "is_hosted": self.auth.is_hosted,
            "is_live": self.stream.is_live,
            # The page requests this path again: "//evil.example/x" would be another site.
            "here": "/" + quote(self.request.scope["path"].lstrip("/")),
            "sentence": self.request.query_params.get("said", ""),
            "now": self.now,
        }

    def back(self, path: str, sentence: str = "") -> Response:
        """Redirect to a page after an act."""
        self.frames.forget()
        place, mark, anchor = path.partition("#")
        if sentence:
            place += ("&" if "?" in place else "?") + urlencode({"said": sentence})
        return RedirectResponse(self.root + place + mark + anchor, 303, headers=dict(SAFE))


def root_of(request: Request) -> str:
    """Return the path at which this dashboard is mounted, without a final slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def html(request: Request, template: str, status: int, **shown: Any) -> Response:
    """Return a page or a part of one, with headers that keep untrusted text from having any effect."""
    language = language_of(request)
    text = render(template, language, root=root_of(request), scripts=has_scripts(), **shown)
    return HTMLResponse(text, status, headers={**SAFE, "Content-Language": language})


def language_of(request: Request) -> str:
    """Return the language that a visitor has chosen, or that the browser prefers."""
    return choose(request.cookies.get(COOKIE), request.headers.get("accept-language", ""))
