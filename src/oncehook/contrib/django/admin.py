"""The admin's lists of events, deliveries and dead letters: read-only, with *replay* and *discard* for those who may.

Everything goes through `Inbox.admin`, so that it is audited under the user's name.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, URLPattern, path, reverse
from django.utils import timezone

from oncehook.contrib.django import assembly
from oncehook.contrib.django.models import DeadLetter, Delivery, Event
from oncehook.errors import BadRequest, OncehookError, Refused
from oncehook.model import DeliveryId, ListedDelivery, ListedEvent, Page, StoredDelivery
from oncehook.query import with_words
from oncehook.replay import some_id

ROWS: Final = 50
PATIENCE: Final = 10.0
"""Seconds for one answer."""

WIDEST: Final = 44
"""Letters of a cell: a table of longer ones would not fit."""
SHORT: Final = 15

REPLAY, DISCARD = "replay", "discard"


def _ask(question: Coroutine[Any, Any, Any]) -> Any:
    return assembly.get_bridge().call(question, timeout=PATIENCE)


def _find_dashboard() -> str:
    """Return the address of the dashboard: as set, or else where the project's URLs have it; empty where it is not."""
    if "DASHBOARD" in (settings := assembly.read_settings()):
        return str(settings["DASHBOARD"] or "")
    with suppress(NoReverseMatch):
        return reverse("oncehook_dashboard:dashboard", kwargs={"rest": ""})
    return ""


def _read_position(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text)[:64] or None
    except ValueError:
        raise BadRequest("This is no place in this list.") from None


def _cut(text: str, longest: int = WIDEST) -> str:
    """Shorten long text in its middle: ids and subjects differ at their ends."""
    return text if len(text) <= longest else f"{text[: longest // 3]}…{text[-(longest - longest // 3 - 1) :]}"


class InboxModelAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """A list that `Inbox.admin` answers, and the actions on its rows."""

    columns: ClassVar[Sequence[str]] = ()
    about: ClassVar[str] = ""
    """The query that everything in this list matches."""
    acts: ClassVar[Sequence[str]] = ()

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False  # only retention deletes

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_changelist"
        return [path("", self.admin_site.admin_view(self.changelist_view), name=name)]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self._act(request)
        if request.method not in ("GET", "HEAD"):
            return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
        rows, further = self._rows(request)
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": str(self.opts.verbose_name_plural).capitalize(),
            "columns": self.columns,
            "rows": rows,
            "query": request.GET.get("q", ""),
            "further": further,
            "acts": [act for act in self.acts if self._may(request, act)],
            "dashboard": _find_dashboard(),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "oncehook/admin_list.html", context)

    # -- looking -------------------------------------------------------------------------------

    def _rows(self, request: HttpRequest) -> tuple[list[dict[str, Any]], str | None]:
        query, before = request.GET.get("q", ""), request.GET.get("before", "")
        try:
            page = _ask(self._page(with_words(query, self.about), _read_position(before)))
        except (OncehookError, TimeoutError) as error:
            self._complain(request, error)
            return [], None
        further = urlencode({"q": query, "before": page.next.hex()}) if page.next else None
        return [self._row(item) for item in page.items], further

    def _row(self, item: ListedEvent | StoredDelivery) -> dict[str, Any]:
        """Return a row that fits: its id cut in the middle, linked to its event in the dashboard where there is one."""
        event_id = item.event_id if isinstance(item, StoredDelivery) else item.id
        dashboard = _find_dashboard()
        link = f"{dashboard.rstrip('/')}/events/{event_id}" if dashboard else None
        cells = [_cut(cell) if isinstance(cell, str) else cell for cell in self._cells(item)]
        return {"id": str(item.id), "short": _cut(str(item.id), SHORT), "link": link, "cells": cells}

    async def _page(self, query: str, before: bytes | None) -> Page[Any]:
        admin = assembly.get_inbox().admin
        return await admin.deliveries(admin.read(query), before=before, limit=ROWS)

    def _cells(self, item: Any) -> list[object]:
        raise NotImplementedError

    def _complain(self, request: HttpRequest, error: BaseException) -> None:
        hint = error.hint if isinstance(error, OncehookError) else ""
        messages.error(request, f"{error} {hint}".strip() or "The store does not answer.")

    # -- acting --------------------------------------------------------------------------------

    def _may(self, request: HttpRequest, act: str) -> bool:
        return bool(request.user.has_perm(f"oncehook.{act}_delivery"))  # type: ignore[union-attr]

    def _act(self, request: HttpRequest) -> HttpResponse:
        act = request.POST.get("action", "")
        if act not in self.acts or not self._may(request, act):
            raise PermissionDenied
        done, chosen = 0, request.POST.getlist("chosen")[:ROWS]
        reason, actor = request.POST.get("reason", ""), request.user.get_username()
        for one in chosen:
            try:
                _ask(self._do(act, some_id(DeliveryId, one), actor, reason))
                done += 1
            except Refused as error:
                messages.warning(request, f"{one}: {error} {error.hint}".strip())
            except (OncehookError, TimeoutError) as error:
                self._complain(request, error)
                break
        messages.info(request, f"{act}: {done} of {len(chosen)}")
        return HttpResponseRedirect(request.get_full_path())

    async def _do(self, act: str, delivery_id: DeliveryId, actor: str, reason: str) -> None:
        admin = assembly.get_inbox().admin
        if act == REPLAY:
            await admin.replay_one(delivery_id, actor=actor, reason=reason)
        else:
            await admin.discard(delivery_id, actor=actor, reason=reason)


@admin.register(Event)
class EventAdmin(InboxModelAdmin):
    columns = ("received", "source", "type", "subject", "key", "arrivals", "deliveries")

    async def _page(self, query: str, before: bytes | None) -> Page[ListedEvent]:
        admin = assembly.get_inbox().admin
        return await admin.events(admin.read(query), before=before, limit=ROWS)

    def _cells(self, item: ListedEvent) -> list[object]:
        states = ", ".join(f"{one.destination}: {_state(one)}" for one in item.deliveries)
        received = timezone.localtime(item.received_at)
        return [received, item.source, item.type, item.subject or "", item.key or "", item.copies, states]


def _state(delivery: ListedDelivery | StoredDelivery) -> str:
    return f"{delivery.note or delivery.status}{', replayed' if delivery.is_replayed else ''}"


@admin.register(Delivery)
class DeliveryAdmin(InboxModelAdmin):
    columns = ("received", "source", "type", "subject", "destination", "status", "attempts", "last error")
    acts = (REPLAY, DISCARD)

    def _cells(self, item: StoredDelivery) -> list[object]:
        received = timezone.localtime(item.received_at)
        error = item.last_error or item.reason or item.last_status or ""
        return [
            *(received, item.source, item.type, item.subject or ""),
            *(item.destination, _state(item), item.attempts, error),
        ]


@admin.register(DeadLetter)
class DeadLetterAdmin(DeliveryAdmin):
    """Deliveries that have failed for good."""

    about = "status:dead"

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        # dead letters are deliveries
        return bool(request.user.has_perm("oncehook.view_delivery"))  # type: ignore[union-attr]

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)
