"""What a store keeps, read back whole: for tests that look at bodies, heads and marks."""

from __future__ import annotations

from oncehook.model import EventDetails, Filter
from oncehook.store.base import Store


async def kept_events(store: Store, source: str | None = None, limit: int = 1000) -> list[EventDetails]:
    """Events as they are kept, newest first."""
    page = await store.find_events(Filter(source=source), limit=limit)
    found = [await store.get_event(listed.id) for listed in page.items]
    return [event for event in found if event is not None]
