"""An event as a handler sees it: what arrived, and which attempt of which run this is.

Made by the handler's destination out of a lease. Over all attempts `idempotency_key` is the same, so that a handler can
hand it on to whoever deduplicates (R50); a replay keeps it too, unless a fresh one was asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from oncehook import payload
from oncehook.errors import ConfigError
from oncehook.ingest import Draft, draft
from oncehook.model import Lease, Mark, Options, StoredEvent, Trigger, hops_of, unpack_head

if TYPE_CHECKING:
    from oncehook.media import KeptMedia
    from oncehook.whatsapp.incoming import IncomingMessage

Effect = Callable[[Any], object]
"""A short function of a connection: it writes what must commit together with the delivery."""


def outward_id(lease: Lease) -> str:
    """Return the id that a receiver sees: the event's own, or this run's where a replay asked for a fresh one."""
    own = str(lease.event.id)
    return f"{own}.{lease.delivery.run}" if Options.fresh_id in lease.delivery.options else own


class Event:
    """One event, handed to a handler for one attempt."""

    __slots__ = (
        "_drafts", "_headers", "_is_over", "_lease", "_media", "_takes_effects", "deadline", "destination", "effect",
    )  # fmt: skip

    def __init__(
        self,
        lease: Lease,
        destination: str,
        deadline: datetime,
        *,
        takes_effects: bool = False,
        media: Callable[[StoredEvent], Awaitable[list[KeptMedia]]] | None = None,
    ) -> None:
        """`media` fetches and keeps the files that an event refers to."""
        self._lease = lease
        self._media = media
        self._takes_effects = takes_effects
        self._headers: list[tuple[str, str]] | None = None
        self.destination = destination
        self.deadline = deadline
        """The end of this attempt's time."""
        self.effect: Effect | None = None
        self._drafts: list[Draft] = []
        self._is_over = False

    # -- what arrived --------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """`evt_…`"""
        return str(self._lease.event.id)

    @property
    def source(self) -> str:
        """Name of the source it came from."""
        return self._lease.event.source

    @property
    def type(self) -> str:
        """Type of the event, in the sender's words."""
        return self._lease.event.type

    @property
    def key(self) -> str | None:
        """Key that makes two arrivals the same event; None: it had none."""
        return self._lease.event.key

    @property
    def subject(self) -> str | None:
        """Object it is about: events of one subject come one at a time, in order."""
        return self._lease.event.subject

    @property
    def account(self) -> str | None:
        """Account that it belongs to; None: nobody's."""
        return self._lease.event.account

    @property
    def received_at(self) -> datetime:
        """Time of its acceptance, by the store's clock."""
        return self._lease.event.received_at

    @property
    def event_at(self) -> datetime | None:
        """Time at which it happened, by the sender's word."""
        return self._lease.event.event_at

    @property
    def marks(self) -> Mark:
        """Marks of anything odd about it."""
        return self._lease.event.marks

    @property
    def body(self) -> bytes:
        """Bytes as received; of a batch, the sender's own envelope around this one item."""
        return self._lease.event.body

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Names in lower case, in the order received, duplicates kept."""
        if self._headers is None:
            self._headers = unpack_head(self._lease.event.request_head)[2]
        return self._headers

    def header(self, name: str) -> str | None:
        """Return the first header of this name, whatever its case."""
        wanted = name.lower()
        return next((value for known, value in self.headers if known == wanted), None)

    def json(self) -> Any:
        """Return the body as JSON, read by the same parser that found the key (S12). Raises ValueError."""
        return payload.parse(self.body)

    def form(self) -> dict[str, list[str]]:
        """Return the body as a form: every value of every field."""
        return payload.parse_form(self.body)

    @property
    def whatsapp(self) -> IncomingMessage:
        """WhatsApp message it holds, read alike from Cloud API, 360dialog, Evolution API and Evolution Go.

        Raises NoMessage where it holds none: a status, a call, anything that is not WhatsApp's.
        """
        from oncehook.whatsapp.incoming import read_incoming

        try:
            data = self.json()
        except ValueError:
            data = None
        return read_incoming(data)

    async def media(self) -> list[KeptMedia]:
        """Return the files that it refers to: what is kept, or else they are fetched from the provider and kept now.

        Empty where it refers to none. Raises MediaFailed, whose category decides whether this attempt is repeated.
        """
        return [] if self._media is None else await self._media(self._lease.event)

    # -- which attempt this is -----------------------------------------------------------------

    @property
    def idempotency_key(self) -> str:
        """Hand this on to whoever deduplicates: it is the same in every attempt."""
        return outward_id(self._lease)

    @property
    def delivery_id(self) -> str:
        """`dlv_…`: this event for this destination."""
        return str(self._lease.delivery.id)

    @property
    def attempt(self) -> int:
        """Number of the attempt within this run, from 1."""
        return self._lease.delivery.attempt

    @property
    def run(self) -> int:
        """1, and one more for each replay."""
        return self._lease.delivery.run

    @property
    def replay(self) -> bool:
        """True for a run that a replay began."""
        return self._lease.delivery.replay_id is not None

    @property
    def replay_id(self) -> str | None:
        """`rpl_…`, when it is a replay."""
        return None if self._lease.delivery.replay_id is None else str(self._lease.delivery.replay_id)

    @property
    def trigger(self) -> Trigger:
        """Reason for this attempt."""
        return self._lease.trigger

    @property
    def fence(self) -> int:
        """Rises with every lease: a store of one's own can refuse a writer that was overtaken."""
        return self._lease.fence

    # -- effects -------------------------------------------------------------------------------

    def commit(self, effect: Effect) -> None:
        """Have a short function write in the very transaction that marks this delivery done (SQLite).

        It is called after the handler has returned, with a connection that has `execute` and `executemany`, and is
        undone when the lease was lost meanwhile: effect and completion happen together, or neither does (R51).
        """
        if not self._takes_effects:
            raise ConfigError(
                "event.commit(…) is for an inbox on SQLite.", hint="On PostgreSQL let the handler take `tx`."
            )
        if self.effect is not None:
            raise ConfigError("event.commit(…) was called twice; write everything in one function.")
        self.effect = effect

    def emit(
        self,
        source: str,
        type: str,
        payload: object,
        *,
        key: str | None = None,
        subject: str | None = None,
        account: str | int | None = None,
    ) -> None:
        """Emit an event that exists if, and only if, this delivery is done: both are one commit (R54).

        It is stored, deduplicated and routed like one of `inbox.emit`. Without a key it gets one made of this event,
        this destination and its position among the events emitted here: the same in every attempt and replay, unless a
        replay asked for a fresh id. It belongs to no account, unless one is given: `account=event.account`.
        """
        if self._is_over:
            raise ConfigError("This attempt is over: nothing can be emitted in it any more.")
        if key is None:
            key = f"{self.idempotency_key}/{self.destination}/{len(self._drafts) + 1}"
        hops = hops_of(self._lease.event.request_head)
        self._drafts.append(draft(source, type, payload, key, subject, hops, account))

    def finish(self) -> list[Draft]:
        """Return what the handler has emitted, and refuse more. Called by the destination when the handler has
        returned."""
        self._is_over = True
        return self._drafts

    def __repr__(self) -> str:
        return f"<Event {self.id} {self.source} {self.type} attempt {self.attempt} of run {self.run}>"
