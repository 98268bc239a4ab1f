"""Three things to see in the demo: an event that came twice, a delivery that will be tried again, and dead ones.

The dashboard asks for them on each page that shows them. The tour points at the same event for as long as it still
fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlencode

from oncehook.admin import Admin
from oncehook.demo.shop import Crm
from oncehook.human import count
from oncehook.model import DeliveryId, DeliveryStatus, EventId, Filter, StoredDelivery
from oncehook.web.dashboard.context import Callout

DEAD: Final = "to:crm status:dead"


class Tour:
    """The guide of the demo. See `web.callouts`."""

    def __init__(self, admin: Admin, crm: Crm) -> None:
        self._admin = admin
        self._crm = crm
        self._dismissed: set[str] = set()
        self._twice: EventId | None = None
        self._again: DeliveryId | None = None

    def dismiss(self, name: str) -> None:
        self._dismissed.add(name)

    def act(self, name: str) -> None:
        if name == "replay":
            self._crm.mend()

    async def callouts(self) -> Sequence[Callout]:
        made = {"twice": self._show_duplicate, "again": self._show_retry, "replay": self._show_replay}
        found = [await make() for name, make in made.items() if name not in self._dismissed]
        return [callout for callout in found if callout is not None]

    async def _show_duplicate(self) -> Callout | None:
        if self._twice is None:
            self._twice = await self._find_twin()
        if self._twice is None:
            return None
        event = (await self._admin.event(self._twice)).event
        return Callout(
            "twice",
            "duplicate",
            "This came twice",
            f"Stripe sent {event.type} again. It is the same event, and was handed to the ledger once.",
            link=f"/events/{event.id}?tab=arrivals",
            link_text="See both arrivals",
        )

    async def _find_twin(self) -> EventId | None:
        """Find a done event that arrived again with the same body."""
        for event in (await self._admin.events(Filter(source="stripe"), limit=50)).items:
            is_done = all(one.status is DeliveryStatus.done for one in event.deliveries)
            if event.copies > 1 and is_done:
                arrivals = await self._admin.arrivals(event.id)
                if not any(arrival.body_differs for arrival in arrivals):
                    return event.id
        return None

    async def _show_retry(self) -> Callout | None:
        waiting = await self._find_waiting()
        if waiting is None:
            return None
        return Callout(
            "again",
            "retry",
            "This will be tried again at",
            f"The {waiting.destination} hung up on {waiting.type}. Nothing is lost: attempt {waiting.attempts + 1}"
            " comes by itself.",
            at=waiting.due_at,
            link=f"/events/{waiting.event_id}",
            link_text="See its timeline",
        )

    async def _find_waiting(self) -> StoredDelivery | None:
        """Return the same delivery while it waits; then another, the one that waits longest."""
        waiting = Filter(destination="ledger", status=DeliveryStatus.pending, attempts_above=0)
        found = {one.id: one for one in (await self._admin.deliveries(waiting, limit=50)).items if one.due_at}
        if self._again not in found:
            self._again = max(found, key=lambda one: str(found[one].due_at), default=None)
        return None if self._again is None else found[self._again]

    async def _show_replay(self) -> Callout:
        dead = (await self._admin.levels())["crm"].dead
        them = count(dead, "delivery")
        if self._crm.is_broken:
            return Callout(
                "replay",
                "dead",
                "Replay me",
                f"The CRM refuses our expired key, and {them} to it died. First renew the key; otherwise it is renewed"
                " by itself at",
                until=self._crm.mends_at,
                link="/dead",
                link_text="See them",
                act="Renew the key",
            )
        if dead:
            return Callout(
                "replay",
                "dead",
                "Replay me",
                f"The CRM has a new key. {them} died before; now they get through.",
                link=f"/replays/plan?{urlencode({'query': DEAD})}",
                link_text=f"Replay {dead}…",
                opens_dialog=True,
            )
        return Callout(
            "replay",
            "done",
            "Replayed",
            "The CRM has everything that died. Each delivery got a second run; the first one is kept as evidence.",
            link="/replays",
            link_text="See the replay",
        )
