"""Every question and act of people and programs, for API, command line and dashboard alike.

Takes queries, ids and tokens; returns values of `model`, `replay` and `reports`. API, command line and dashboard never
touch the store, so all three show the same numbers; they check the role that an act needs before they call. Every act
carries its actor, and the store audits it. They use the `Admin` that `seen_by` returns for a viewer: it knows only that
viewer's sources (S32), hides payloads where the viewer may not see them (S33), and audits who has seen one (S34).
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol, TypeGuard, TypeVar

from msgspec.structs import asdict, replace

from oncehook import __version__, clock, human, query, reports, samples, upkeep
from oncehook.account_definitions import account_from, read_secrets
from oncehook.bodies import Bodies
from oncehook.define import Define, NounName
from oncehook.definitions import Definitions
from oncehook.destinations.base import Destination, Result, Terms, TestableDestination
from oncehook.destinations.handler import HandlerDestination, place_of
from oncehook.errors import (
    BadRequest,
    BodyMissing,
    ConfigError,
    Forbidden,
    NotFound,
    NotReplayable,
    NotWaiting,
    ObjectsUnavailable,
    PayloadsHidden,
    ReplayTooSoon,
    StoreError,
    StoreUnavailable,
    TestedTooSoon,
    Undecryptable,
)
from oncehook.ingest import Receiver
from oncehook.logs import ration
from oncehook.media import ERASED_AFTER, read_media, sweep_media
from oncehook.model import (
    ADDRESS,
    ERASED,
    EVERYTHING,
    NOTHING_TO_REPLAY,
    NOTHING_TO_REPLAY_HINT,
    REPLAY_PAUSE,
    ArrivalId,
    Audited,
    Cause,
    ChartMark,
    Check,
    DeliveryId,
    DeliveryPreview,
    DeliveryStatus,
    EraseOrder,
    Erasure,
    EventDetails,
    EventId,
    Figures,
    Filter,
    Lease,
    Level,
    ListedEvent,
    Noun,
    Outcome,
    Page,
    PlanSnapshot,
    Rejection,
    ReplayCommand,
    ReplayId,
    ReplayItem,
    ReplayState,
    Scope,
    StoredArrival,
    StoredAttempt,
    StoredDefinition,
    StoredDelivery,
    StoredEvent,
    StoredMedia,
    StoredReplay,
    StoredWorker,
    Total,
    key_hash,
    media_source,
    new_id,
)
from oncehook.portal import LINK_SECONDS
from oncehook.rejections import diagnose, read_account
from oncehook.replay import Plan, ReplayRequest, build_plan, decode_token, some_id, some_ids, with_end
from oncehook.reports import (
    Health,
    PerDay,
    RunningReceiver,
    ShownArrival,
    ShownDestination,
    ShownEvent,
    ShownRejection,
    ShownRequest,
    ShownRoute,
    ShownSource,
    Stats,
    System,
    request_of,
    show_destination,
    show_route,
    show_source,
    without_values,
)
from oncehook.retry import Policy
from oncehook.routes import Route
from oncehook.rules import bound_text
from oncehook.samples import Sampled, Tested
from oncehook.settings import Loaded, stored
from oncehook.settings.stored import Vault
from oncehook.sources import Source
from oncehook.store.base import KEPT_REJECTIONS, Store
from oncehook.store.cipher import Reference
from oncehook.upkeep import Limits, Watermark

log = logging.getLogger("oncehook.audit")

NOTED_EACH: Final = 20
"""Entries of one actor and act that are written one by one per minute; after that, one whenever their number has
doubled."""
SAME_VIEW: Final = 3600.0
"""Seconds for which viewing the same payload again makes no new entry: an open page reloads."""
MOST_VIEWS: Final = 10_000
LONGEST_TARGET: Final = 300
LONGEST_REASON: Final = 1000
LONGEST_MARK: Final = 60
LONGEST_SUBJECT: Final = 10_000
ERASED_AT_ONCE: Final = 100
DIAGNOSED: Final = 20
"""Rejections of one page for which secrets are tried."""
MOST_STORED: Final = 200
"""Stored destinations of a viewer's accounts that are counted, and stored definitions listed without a limit."""
DAY: Final = timedelta(hours=24)
T = TypeVar("T")
Flows = Mapping[str, Sequence[tuple[datetime, int]]]
ENDED: Final = (DeliveryStatus.dead, DeliveryStatus.discarded, DeliveryStatus.done)


class AdminHost(Protocol):
    """The inbox as `Admin` needs it. Its fields are read at each call, because `start()` builds some of them."""

    sources: dict[str, Source]
    destinations: dict[str, Destination]
    routes: list[Route]
    limits: Limits
    settings: Loaded | None
    places: dict[tuple[str, str], str]
    signing_secrets: dict[str, list[str]]

    @property
    def definitions(self) -> Definitions: ...

    @property
    def store(self) -> Store: ...

    @property
    def bodies(self) -> Bodies: ...

    @property
    def vault(self) -> Vault: ...

    @property
    def define(self) -> Define: ...

    @property
    def receiver(self) -> Receiver: ...

    @property
    def receivers(self) -> Sequence[RunningReceiver]: ...

    def nudge(self) -> None: ...

    def kept_for(self) -> Mapping[str, float]: ...

    async def write_counts(self) -> None: ...

    def portal_link(self, account: str | int, *, name: str, expires: str | float) -> str: ...


class AuditNotes:
    """Audit entries of one process about payloads that were shown and requests that were refused."""

    def __init__(self) -> None:
        self._minute = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._views: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def note_view(self, store: Store, actor: str, target: str) -> None:
        now, seen = clock.steady(), self._views.get((actor, target))
        if seen is not None and now - seen < SAME_VIEW:
            return
        self._views[actor, target] = now
        self._views.move_to_end((actor, target))
        while len(self._views) > MOST_VIEWS:
            self._views.popitem(last=False)
        await self._note(store, actor, "view", target, {})

    async def note_refused(self, store: Store, actor: str, target: str, code: str) -> None:
        await self._note(store, actor, "refused", target[:LONGEST_TARGET], {"code": code})

    async def _note(self, store: Store, actor: str, act: str, target: str, detail: dict[str, object]) -> None:
        minute = int(clock.steady() // 60)
        if minute != self._minute:
            self._minute, self._counts = minute, Counter()
        self._counts[actor, act] += 1
        count = self._counts[actor, act]
        if count > NOTED_EACH:
            times, rest = divmod(count, NOTED_EACH)
            if rest or times & (times - 1):
                return
            detail |= {"so_far_this_minute": count}
        try:
            await store.audit(actor, act, target, detail)
        except StoreError as error:
            # Events must stay readable on a full disk, and in a process that opened the file for reading only.
            fields = {"actor": actor, "act": act, "target": target, "error": str(error)}
            ration.log(log, logging.WARNING, "audit.not_written", fields, kind=act)


class Admin:
    """Every question and act, within what one viewer may see."""

    def __init__(self, inbox: AdminHost) -> None:
        self._inbox = inbox
        self._notes = AuditNotes()
        self._tested: dict[str, float] = {}
        self._signs: dict[tuple[str, str | None], bool] = {}
        self._viewer: str | None = None
        self.scope = EVERYTHING
        """The sources and accounts that this viewer sees and acts on."""
        self.sees_payloads = True
        """Whether this viewer sees bodies, header values, previews and answers."""
        self.erased_at_most = 2000
        """Events that one request erases at most; to erase more, repeat the request."""
        self.test_pause = 10.0
        """Seconds between two tests of one destination."""

    @property
    def _store(self) -> Store:
        return self._inbox.store

    @property
    def _sources(self) -> Mapping[str, Source]:
        known = self._inbox.sources
        return known if not self.scope.is_limited else {n: one for n, one in known.items() if self._sees_source(one)}

    def _sees_source(self, source: Source) -> bool:
        """Tell whether a definition is shown: one of these sources, and an account's own or what has an address for
        each account."""
        if self.scope.accounts is not None and not source.has_accounts_by_address:
            return self.scope.sees(source.name, source.account)
        return self.scope.sources is None or source.name in self.scope.sources

    @property
    def _routes(self) -> Sequence[Route]:
        known = self._inbox.routes
        if not self.scope.is_limited:
            return known
        sources = self._sources
        return [one for one in known if one.source in sources and self._owns_where_limited(one.destination)]

    @property
    def _destinations(self) -> Mapping[str, Destination]:
        """Return the destinations of visible routes, and those of the viewer's accounts. A visible delivery may go to a
        destination that is not among them."""
        known = self._inbox.destinations
        if not self.scope.is_limited:
            return known
        if self.scope.accounts is not None:
            return {name: one for name, one in known.items() if self._owns_where_limited(name)}
        reached = {route.destination for route in self._routes}
        return {name: one for name, one in known.items() if name in reached}

    async def _find_owned(self, names: Collection[str]) -> set[str]:
        """Return those of these destinations that are of the viewer's accounts; all of them where it is not limited to
        some."""
        if self.scope.accounts is None:
            return set(names)
        owned = {name for name in names if self._owns_where_limited(name)}
        found = await self._store.find_definitions(Noun.destination, sorted(set(names) - owned))
        return owned | {one.name for one in found if self._sees_stored(one)}

    def _goes_to_seen(self, destination: str) -> bool:
        """Tell whether this viewer sees deliveries to a destination."""
        return self.scope.destinations is None or destination in self.scope.destinations

    def _owns_where_limited(self, destination: str) -> bool:
        """Tell whether a destination is one of the viewer's accounts', where the viewer is limited to some."""
        if self.scope.accounts is None:
            return True
        known = self._inbox.destinations.get(destination)
        return known is not None and known.terms.account is not None and known.terms.account in self.scope.accounts

    # -- who looks -----------------------------------------------------------------------------

    def seen_by(self, viewer: str, scope: Scope = EVERYTHING, *, payloads: bool = True) -> Admin:
        """Return an `Admin` limited to some sources and accounts, and perhaps without payloads."""
        seen = copy(self)
        seen._viewer, seen.scope, seen.sees_payloads = viewer, scope, payloads
        return seen

    def within_account(self, account: str) -> Admin:
        """Return an `Admin` limited to one account, of those that this viewer sees."""
        narrowed = copy(self)
        narrowed.scope = self.scope.within(account)
        return narrowed

    async def within_own_destinations(self) -> Admin:
        """Return an `Admin` of the same accounts, limited to deliveries to their own destinations.

        What goes to destinations of the server's own is no customer's: its errors tell of the server, and a replay
        would run its handlers again.
        """
        narrowed = copy(self)
        names = frozenset([*self._destinations, *await self._name_stored_destinations()])
        narrowed.scope = dataclasses.replace(self.scope, destinations=names)
        return narrowed

    def _within(self, filter: Filter) -> Filter:
        if filter.reads_bodies and not self.sees_payloads:
            # A viewer who may ask whether a body contains a text can find out the body, question by question.
            raise PayloadsHidden("You may not search in bodies.")
        sources, accounts = self.scope.sources, self.scope.accounts
        changes: dict[str, Any] = {}
        if sources is not None and filter.source is None:
            changes |= {"source": min(sources)} if len(sources) == 1 else {"sources": sorted(sources)}
        if accounts is not None and filter.account is None:
            changes |= {"account": min(accounts)} if len(accounts) == 1 else {"accounts": sorted(accounts)}
        if self.scope.destinations is not None:
            changes |= {"destinations": sorted(self.scope.destinations)}
        is_foreign = (sources is not None and filter.source is not None and filter.source not in sources) or (
            accounts is not None and filter.account is not None and filter.account not in accounts
        )
        return replace(filter, ids=(), either=None) if is_foreign else replace(filter, **changes)

    def _check_payloads(self) -> None:
        if not self.sees_payloads:
            raise PayloadsHidden

    async def _note_view(self, event_id: EventId) -> None:
        if self._viewer is not None and self.sees_payloads:
            await self._notes.note_view(self._store, self._viewer, str(event_id))

    async def note_refused(self, target: str, code: str) -> None:
        if self._viewer is not None:
            await self._notes.note_refused(self._store, self._viewer, target, code)

    async def check_own(self, destination: str) -> None:
        """Raise Forbidden for a destination that also gets events of sources that this viewer does not see."""
        await self._destination(destination)
        sources = self.scope.sources
        if sources is not None and any(
            r.destination == destination and r.source not in sources for r in self._inbox.routes
        ):
            raise Forbidden(
                f"{destination} also gets events of sources that are not yours.",
                hint="Ask somebody who sees all of its sources.",
            )

    # -- queries -------------------------------------------------------------------------------

    def read(self, text: str) -> Filter:
        """Return the filter that a query means now."""
        return query.parse(text, clock.now_utc())

    def moment(self, text: str) -> datetime:
        """Return the moment that `2h` or an ISO time means now."""
        return human.moment(text, clock.now_utc())

    # -- events --------------------------------------------------------------------------------

    async def events(self, filter: Filter, *, before: bytes | None = None, limit: int = 50) -> Page[ListedEvent]:
        page = await self._store.find_events(self._within(filter), before=before, limit=limit)
        return page if self.scope.destinations is None else Page([self._narrow(one) for one in page.items], page.next)

    def _narrow(self, event: ListedEvent) -> ListedEvent:
        return replace(event, deliveries=[one for one in event.deliveries if self._goes_to_seen(one.destination)])

    async def count_events(self, filter: Filter) -> Total:
        """Count matching events, as far as a page goes."""
        return await self._store.count_events(self._within(filter))

    async def event(self, event_id: EventId, *, with_body: bool = False) -> ShownEvent:
        """Return an event; `with_body` loads a body that is kept apart, or says why it cannot."""
        event = await self._event(event_id)
        deliveries = await self._store.find_deliveries(self._within(Filter(event_id=event_id)), limit=1000)
        request = self._show_request(await self._head(event.request_head, event.batch_id))
        source = self._inbox.sources.get(event.source)
        await self._note_view(event_id)
        size = Reference(event.body).size if event.is_apart else len(event.body)
        unreadable = None
        if event.is_apart and with_body and self.sees_payloads:
            try:
                event = await self._inbox.bodies.load(event)
            except (BodyMissing, ObjectsUnavailable) as error:
                unreadable = str(error)
        if event.is_apart:
            event = replace(event, body=b"", is_apart=False)
        if not self.sees_payloads:
            event = event.without_payload()
        return ShownEvent(
            event,
            request,
            deliveries.items,
            None if source is None else source.body_authenticated,
            None if source is None else source.key_authenticated,
            size,
            unreadable,
        )

    async def beside(self, event: EventDetails) -> tuple[EventId | None, EventId | None]:
        """Return the events of the same source before and after this one; none to a viewer of some accounts, since
        those may be another's."""
        if self.scope.accounts is not None:
            return None, None
        return await self._store.events_beside(event.id, event.source)

    async def body(self, event_id: EventId) -> bytes:
        event = await self._event(event_id)
        self._check_payloads()
        await self._note_view(event_id)
        return (await self._inbox.bodies.load(event)).body

    async def media(self, event_id: EventId) -> list[StoredMedia]:
        """Return the files of an event that are kept, in their order."""
        await self._event(event_id)
        self._check_payloads()
        return await self._store.media_of(event_id)

    async def media_content(self, event_id: EventId, n: int) -> bytes:
        """Return the bytes of one of them. Raises NotFound, BodyMissing or ObjectsUnavailable."""
        found = next((one for one in await self.media(event_id) if one.n == n), None)
        if found is None:
            raise NotFound("There is no such file, or it is not kept.")
        await self._note_view(event_id)
        return await read_media(self._store, self._inbox.bodies, found.digest)

    async def arrivals(self, event_id: EventId) -> list[ShownArrival]:
        """Return every arrival of an event that is still known, oldest first: the first one is the event itself."""
        event = await self._event(event_id)
        request = self._show_request(await self._head(event.request_head, event.batch_id))
        first = ShownArrival(event.batch_id or ArrivalId(event.id), Outcome.accepted, event.received_at, request, False)
        return [first, *[await self._arrival(later) for later in await self._store.arrivals_of(event_id)]]

    async def _arrival(self, later: StoredArrival) -> ShownArrival:
        request = self._show_request(await self._head(later.request_head, later.batch_id))
        differs = later.outcome is Outcome.conflict if later.unreadable else later.body is not None
        return ShownArrival(later.id, later.outcome, later.at, request, differs)

    def _show_request(self, head: bytes) -> ShownRequest:
        request = request_of(head)
        return request if self.sees_payloads else without_values(request)

    async def _event(self, event_id: EventId) -> EventDetails:
        event = await self._store.get_event(event_id)
        if event is None or not self.scope.sees(event.source, event.account):
            is_pruned = event is None and not self.scope.is_limited
            copies = await self._store.arrivals_of(event_id) if is_pruned else ()
            raise NotFound("There is no such event, or no longer.", hint=reports.ONLY_A_KEY if copies else "")
        if (
            self.scope.destinations is not None
            and not (await self.deliveries(Filter(event_id=event_id), limit=1)).items
        ):
            raise NotFound("There is no such event, or no longer.")
        return event

    async def _head(self, head: bytes | None, batch_id: ArrivalId | None) -> bytes:
        if head is not None or batch_id is None:
            return head or b""
        batch = await self._store.batch_body(batch_id)
        return b"" if batch is None else batch[0]

    # -- deliveries ----------------------------------------------------------------------------

    async def deliveries(self, filter: Filter, *, before: bytes | None = None, limit: int = 50) -> Page[StoredDelivery]:
        return await self._store.find_deliveries(self._within(filter), before=before, limit=limit)

    async def delivery(self, delivery_id: DeliveryId) -> StoredDelivery:
        delivery = await self._store.get_delivery(delivery_id)
        if (
            delivery is None
            or not self.scope.sees(delivery.source, delivery.account)
            or not self._goes_to_seen(delivery.destination)
        ):
            raise NotFound("There is no such delivery, or no longer.")
        return delivery

    async def attempts(self, delivery_id: DeliveryId) -> list[StoredAttempt]:
        """Return the attempts of a delivery, oldest first."""
        delivery = await self.delivery(delivery_id)
        attempts = await self._store.attempts_of(delivery_id)
        # What a destination of the server's own answered is not for a customer.
        is_shown = self.sees_payloads and await self._find_owned([delivery.destination])
        return attempts if is_shown else [one.without_answer() for one in attempts]

    async def neighbours(self, delivery_id: DeliveryId) -> list[StoredDelivery]:
        """Return deliveries of the same subject around this one, in order."""
        await self.delivery(delivery_id)
        return await self._store.subject_of(delivery_id)

    async def previews(self, deliveries: Iterable[StoredDelivery]) -> dict[bytes, DeliveryPreview]:
        """Return by delivery who would get it and what it says, where a text is found: the message that a sender would
        send, or what a person wrote in what came in."""
        found: dict[bytes, DeliveryPreview] = {}
        if not self.sees_payloads:
            return found
        events: dict[bytes, StoredEvent | None] = {}
        deliveries = list(deliveries)
        names = {one.destination for one in deliveries}
        destinations, owned = await self._find_destinations(names), await self._find_owned(names)
        sources = {name: await self._find_source(name) for name in {one.source for one in deliveries}}
        for delivery in deliveries:
            source = sources[delivery.source]
            destination = destinations.get(delivery.destination)
            read_message = getattr(destination, "preview", None)
            if read_message is None and (source is None or source.preview is None):
                continue
            if delivery.event_id not in events:
                events[delivery.event_id] = None
                with suppress(Undecryptable):  # a plan shows the others
                    found_event = await self._store.get_event(delivery.event_id)
                    # A large body is not fetched for the sake of a preview.
                    events[delivery.event_id] = None if found_event and found_event.is_apart else found_event
            event, seen = events[delivery.event_id], None
            if event is not None and read_message is not None:
                seen = read_message(event.body)
            elif event is not None and source is not None and (text := source.preview_of(event)) is not None:
                known = destination if delivery.destination in owned else None
                to = delivery.destination if known is None else known.address
                seen = DeliveryPreview(to, text, is_incoming=True)
            if seen is not None:
                found[delivery.id] = seen
        return found

    async def replayable(self, deliveries: Iterable[StoredDelivery]) -> set[bytes]:
        """Return the deliveries that a replay would run again now: ended, not erased, not replayed within the last
        minute, and for a destination that is configured here or has a worker."""
        deliveries = list(deliveries)
        found = await self._find_destinations({one.destination for one in deliveries})
        known = {*found, *_worked_for(await self._store.workers())}
        rested = clock.now_utc() - timedelta(seconds=REPLAY_PAUSE)
        return {
            one.id
            for one in deliveries
            if one.status in ENDED
            and one.note != ERASED
            and one.destination in known
            and (one.last_replay_at is None or one.last_replay_at <= rested)
        }

    async def causes(self, destination: str | None = None, source: str | None = None) -> list[Cause]:
        """Return the causes of dead letters, those of most first; on request of one destination and of one source."""
        sources = _list_names(self.scope.sources)
        if source is not None:
            sources = [source] if sources is None or source in sources else []
        found = await self._store.causes(destination, sources, _list_names(self.scope.accounts))
        return [one for one in found if self._goes_to_seen(one.destination)]

    async def retry(self, delivery_id: DeliveryId, *, actor: str) -> StoredDelivery:
        await self._check_seen(delivery_id)
        await self._store.retry_now(delivery_id, actor)
        return await self.delivery(delivery_id)

    async def discard(self, delivery_id: DeliveryId, *, actor: str, reason: str = "") -> StoredDelivery:
        """Close one dead letter without replay; one that is discarded already stays so."""
        _check_reason(reason)
        closed = await self._store.discard(self._within(Filter(ids=(delivery_id,))), actor, reason)
        delivery = await self.delivery(delivery_id)
        if not closed and delivery.status is not DeliveryStatus.discarded:
            raise NotWaiting(f"Only a dead letter can be discarded; this one is {delivery.status}.")
        return delivery

    async def discard_matching(
        self, filter: Filter, *, actor: str, reason: str, seen: PlanSnapshot | None = None
    ) -> int:
        """Close all dead letters that match; with `seen`, only those that were shown."""
        _check_reason(reason)
        if not reason.strip():
            raise BadRequest("Say why: many dead letters are closed only with a reason.")
        _check_meant(filter)
        return await self._store.discard(self._within(filter), actor, reason, seen)

    async def discard_planned(self, token: str, *, actor: str, reason: str) -> int:
        """Close the dead letters that a plan has shown, and none that died since. Raises PlanChanged where these are no
        longer the ones shown."""
        request, seen = self.read_plan(token)
        if any(one.status is not DeliveryStatus.dead for one in request.filter.alternatives()):
            raise BadRequest("Only dead letters can be discarded.", hint="The query must say status:dead.")
        return await self.discard_matching(request.filter, actor=actor, reason=reason, seen=seen)

    # -- replays -------------------------------------------------------------------------------

    async def replay_one(
        self,
        delivery_id: DeliveryId,
        *,
        actor: str,
        force: bool = False,
        fresh_id: bool = False,
        reason: str = "",
        request_key: str | None = None,
    ) -> StoredReplay:
        """Deliver one again, at once. Raises NotFound, NotReplayable or ReplayTooSoon."""
        await self._check_seen(delivery_id)
        request = ReplayRequest(Filter(ids=(delivery_id,)), force, fresh_id)
        return await self._make(request, actor, reason, request_key, bulk=False)

    async def _check_seen(self, delivery_id: DeliveryId) -> None:
        """Raise NotFound for a delivery that this viewer does not see. Skip the query for a viewer who sees
        everything."""
        if self.scope.is_limited:
            await self.delivery(delivery_id)

    async def revive(self, event_id: EventId, *, actor: str, reason: str) -> None:
        """Deliver an event's dead letters again, except those that were replayed a moment ago."""
        page = await self._store.find_deliveries(Filter(event_id=event_id, status=DeliveryStatus.dead))
        for delivery in page.items:
            with suppress(NotReplayable, ReplayTooSoon):
                await self.replay_one(delivery.id, actor=actor, reason=reason)

    def build_request(
        self,
        text: str = "",
        *,
        ids: Sequence[DeliveryId] | None = None,
        destination: str | None = None,
        until: str | None = None,
        force: bool = False,
        fresh_id: bool = False,
        rate: float | None = None,
    ) -> ReplayRequest:
        """Build the request for a replay, with its times fixed: of a query, some deliveries by id, or both."""
        meant = self.read(text)
        if ids is not None:
            meant = query.narrow(meant, Filter(ids=some_ids(ids, meant)))
        if destination is not None:
            if meant.destination not in (None, destination):
                raise BadRequest(f"The query is about {meant.destination}, and not about {destination}.")
            meant = query.narrow(meant, Filter(destination=destination))
        if until is not None:
            at = self.moment(until)
            meant = replace(meant, until=at if meant.until is None else min(at, meant.until))
        _check_meant(meant)
        return ReplayRequest(with_end(meant, clock.now_utc()), force, fresh_id, rate)

    async def find_named(self, texts: Sequence[str]) -> list[DeliveryId]:
        """Return the deliveries that ids of deliveries and events name. Raises NotFound for an event that has none."""
        found: list[DeliveryId] = []
        for text in texts:
            if text.startswith(EventId.prefix):
                deliveries = await self.deliveries(Filter(event_id=some_id(EventId, text)), limit=1000)
                if not deliveries.items:
                    raise NotFound(f"{text[:40]} has no delivery, or is no longer there.")
                found += [delivery.id for delivery in deliveries.items]
            else:
                found.append(some_id(DeliveryId, text))
        return found

    async def check_destination(self, name: str) -> None:
        """Raise NotFound where there is no such destination for this viewer."""
        if name not in self._destinations:
            await self._get_stored("destination", name)

    async def plan(self, request: ReplayRequest) -> Plan:
        planned = await self._store.plan_replay(self._within(request.filter), force=request.force)
        levels, previews = await self._store.levels(), await self.previews(planned.sample)
        destinations = await self._find_destinations(planned.by_destination)
        workers = await self._store.workers()
        handlers = [name for name, one in destinations.items() if one.kind == "handler"]
        failed_before = {name: at for name in handlers if (at := await self._failed_before(name, workers))}
        elsewhere = _worked_for(workers)
        made = build_plan(request, planned, destinations, levels, previews, elsewhere, failed_before)
        owned = await self._find_owned(planned.by_destination)
        shown = [one if one.destination in owned else one.without_details() for one in made.recipients]
        return replace(made, recipients=shown)

    async def _failed_before(self, name: str, workers: Sequence[StoredWorker]) -> datetime | None:
        """Return when a handler failed last, where all of its workers have started since: it may be mended by now."""
        failed_at = max((cause.last_at for cause in await self._store.causes(name)), default=None)
        started = [worker.started_at for worker in workers if name in worker.destinations]
        if failed_at is None or not started or failed_at >= min(started):
            return None
        retried = Filter(status=DeliveryStatus.pending, destination=name, attempts_above=0)
        return None if (await self._store.find_deliveries(retried, limit=1)).items else failed_at

    async def start_replay(
        self,
        request: ReplayRequest,
        *,
        actor: str,
        reason: str = "",
        request_key: str | None = None,
        expected: int | None = None,
    ) -> StoredReplay:
        """Replay deliveries with a lower priority than live ones. Raises PlanChanged when their number is not the
        expected one."""
        if expected == 0:
            raise NotReplayable(NOTHING_TO_REPLAY, hint=NOTHING_TO_REPLAY_HINT)
        return await self._make(request, actor, reason, request_key, expected=expected)

    def read_plan(self, token: str) -> tuple[ReplayRequest, PlanSnapshot]:
        """Return the request that a plan was made for, how many deliveries it has shown, and when."""
        return decode_token(token, clock.now_utc())

    async def _make(
        self,
        request: ReplayRequest,
        actor: str,
        reason: str,
        request_key: str | None,
        *,
        expected: int | None = None,
        bulk: bool = True,
    ) -> StoredReplay:
        _check_reason(reason)
        more = {"to": await self._goes_to(request), **self._comes_from(request)}
        order = ReplayCommand(
            filter=self._within(request.filter),
            actor=actor,
            reason=reason,
            force=request.force,
            fresh_id=request.fresh_id,
            rate=request.rate,
            bulk=bulk,
            request_key=request_key,
            expected=expected,
            about={**request.about(), **more},
            noted={**request.without_subject().about(), **more},
        )
        made = await self._store.make_replay(ReplayId(new_id()), order)
        if bulk:
            self._inbox.nudge()
        return made

    def _comes_from(self, request: ReplayRequest) -> dict[str, object]:
        """Return the sources and accounts that a replay is limited to: viewers of these may see it."""
        found: dict[str, object] = {}
        if request.filter.source is not None:
            found["sources"] = [request.filter.source]
        elif self.scope.sources is not None:
            found["sources"] = sorted(self.scope.sources)
        if request.filter.account is not None:
            found["accounts"] = [request.filter.account]
        elif self.scope.accounts is not None:
            found["accounts"] = sorted(self.scope.accounts)
        return found

    async def _goes_to(self, request: ReplayRequest) -> list[str]:
        if request.filter.destination is not None:
            return [request.filter.destination]
        # The ids contain the destination. No query, because a duplicate that revives its event waits for this.
        if request.filter.ids:
            names = {one.id: one.name for one in self._inbox.destinations.values()}
            numbers = {one.destination_id for one in request.filter.ids}
            if others := numbers - names.keys():
                names |= await self._store.find_destination_names(others)
            return [name for number, name in names.items() if number in numbers]
        return list((await self._store.plan_replay(self._within(request.filter), force=request.force)).by_destination)

    async def replays(self, *, before: bytes | None = None, limit: int = 50) -> Page[StoredReplay]:
        page = await self._store.find_replays(before=before, limit=limit)
        return (
            page
            if not self.scope.is_limited
            else Page([one for one in page.items if self._sees_replay(one)], page.next)
        )

    def _sees_replay(self, replay: StoredReplay) -> bool:
        return all(
            allowed is None or (isinstance(named := replay.about.get(word), list) and allowed.issuperset(named))
            for word, allowed in (
                ("sources", self.scope.sources),
                ("accounts", self.scope.accounts),
                ("to", self.scope.destinations),
            )
        )

    async def replay(self, replay_id: ReplayId) -> StoredReplay:
        replay = await self._store.get_replay(replay_id)
        if replay is None or not self._sees_replay(replay):
            raise NotFound("There is no such replay, or no longer.")
        return replay

    async def set_replay_state(self, replay_id: ReplayId, state: ReplayState, *, actor: str) -> StoredReplay:
        if self.scope.is_limited:
            await self.replay(replay_id)
        steered = await self._store.set_replay_state(replay_id, state, actor)
        self._inbox.nudge()
        return steered

    async def replay_items(self, replay_id: ReplayId, *, after: int = 0, limit: int = 50) -> list[ReplayItem]:
        """Return what became of each delivery of a replay, in its order. Raises NotFound."""
        await self.replay(replay_id)
        return await self._store.replay_items(replay_id, after=after, limit=limit)

    async def replay_outcomes(self, replay_id: ReplayId) -> Mapping[str, Mapping[str, int]]:
        """Count the deliveries of a replay by destination and outcome. Raises NotFound."""
        await self.replay(replay_id)
        return await self._store.replay_outcomes(replay_id)

    # -- what is set up ------------------------------------------------------------------------

    async def sources(self, *, after: str | None = None, limit: int | None = None) -> list[ShownSource]:
        """Return the sources of file and program, then stored ones by name; with `after`, those behind a place
        (`place_behind`). Without a limit: all of the former, and MOST_STORED of the latter."""
        figures = await self._figures(clock.now_utc() - DAY)
        own, definitions = await self._page("source", list(self._sources.values()), after, limit)
        shown = [await self._show_own_source(one, figures) for one in own]
        return shown + [await self._show_stored_source(one, figures) for one in definitions]

    async def source(self, name: str) -> ShownSource:
        figures = await self._figures(clock.now_utc() - DAY)
        if (own := self._sources.get(name)) is not None:
            return await self._show_own_source(own, figures)
        return await self._show_stored_source(await self._get_stored("source", name), figures)

    async def sources_by_account(self, limit: int = 200) -> list[str]:
        """Return the sources that have an address for each account: file and program, then stored ones by name."""
        own = [one.name for one in self._sources.values() if one.has_accounts_by_address]
        others = await self._list_stored("source", "", MOST_STORED)
        return [*own, *(one.name for one in others if stored.show(one).get("account") == ADDRESS)][:limit]

    async def _show_own_source(self, source: Source, figures: Figures) -> ShownSource:
        shown = replace(await self._show_source(source, figures), **self._origin("source", source.name))
        return shown if self._sees_the_server else replace(shown, secret_names=())

    async def _show_stored_source(self, definition: StoredDefinition, figures: Figures) -> ShownSource:
        try:
            source = stored.source_from(self._inbox.vault, definition)
        except (ConfigError, Undecryptable) as error:
            shown = reports.show_unusable_source(definition, str(error))
        else:
            shown = await self._show_source(source, figures)
        return replace(shown, **_stored_origin(definition))

    async def _show_source(self, source: Source, figures: Figures) -> ShownSource:
        leading = await self._store.find_routes([source.name])
        seen = [self._build_route(one) for one in leading if self.scope.sees(one.source, one.account)]
        routes = [*self._routes, *seen]
        latest = await self._store.find_events(self._within(Filter(source=source.name)), limit=1)
        arrived = latest.items[0].received_at if latest.items else None
        return show_source(source, routes, arrived, figures.by_source.get(source.name, {}))

    # -- the portal ----------------------------------------------------------------------------

    async def portal_link(
        self, account: str, *, actor: str, name: str = "", expires: str | float = LINK_SECONDS
    ) -> str:
        """Make a link to the portal of an account, which works once. Raises SecretKeyMissing, BadRequest, NotFound for
        an account that this viewer does not see, and Forbidden to whoever sees less of it than the link would show."""
        if self.scope.accounts is not None and account not in self.scope.accounts:
            raise NotFound(f'There is no account "{account[:60]}", or no longer.')
        if self.scope.sources is not None or not self.sees_payloads:
            raise Forbidden("A link shows all sources of an account and their payloads; you see less.")
        made = self._inbox.portal_link(account, name=name, expires=expires)
        await self._store.audit(actor, "portal", account, {"for": name} if name else {})
        return made

    # -- what is stored ------------------------------------------------------------------------

    def define(self, actor: str) -> Define:
        """Return the acts on stored definitions and accounts, in the name of an actor, within what the viewer sees.
        Raises Forbidden."""
        if self.scope.sources is not None:
            raise Forbidden("Definitions are for who sees all sources.")
        return self._inbox.define.by(actor, self.scope.accounts)

    async def _page(
        self, noun: NounName, own: Sequence[T], after: str | None, limit: int | None
    ) -> tuple[Sequence[T], Sequence[StoredDefinition]]:
        """Return a page of the inbox's own definitions, and then of the stored ones. Raises BadRequest."""
        begin = _read_place(after)
        if begin is None:
            return (), await self._list_stored(noun, after or "", MOST_STORED if limit is None else limit)
        shown = own[begin:] if limit is None else own[begin : begin + limit]
        rest = MOST_STORED if limit is None else limit - len(shown)
        return shown, await self._list_stored(noun, "", rest) if rest else ()

    async def _list_stored(self, noun: NounName, after: str, limit: int) -> list[StoredDefinition]:
        sources = self.scope.sources
        if sources is None:
            meant = self._inbox.define.by(self._viewer or "", self.scope.accounts)
            return await meant.all(noun, after=after, limit=limit)
        if noun != "source":
            return []
        found = await self._store.find_definitions(Noun.source, sources)
        return [one for one in found if one.name > after and self._sees_stored(one)][:limit]

    async def _name_stored_destinations(self) -> list[str]:
        """Return the names of all stored destinations that this viewer sees."""
        names, page = list[str](), [""]
        while page:
            page = [one.name for one in await self._list_stored("destination", page[-1], MOST_STORED)]
            names += page
        return names

    def _sees_stored(self, definition: StoredDefinition) -> bool:
        """Tell whether a stored definition is one of this viewer's accounts', and of its sources."""
        sources, accounts = self.scope.sources, self.scope.accounts
        is_own = accounts is None or definition.account in accounts
        return is_own and (sources is None or (definition.noun is Noun.source and definition.name in sources))

    async def _get_stored(self, noun: NounName, name: str) -> StoredDefinition:
        found = await self._store.find_definitions(Noun(noun), [name])
        if not found or not self._sees_stored(found[0]):
            near = human.nearest(name, self._sources if noun == "source" else self._destinations)
            raise NotFound(f'There is no {noun} "{name[:60]}".', hint=f'Did you mean "{near}"?' if near else "")
        return found[0]

    def _origin(self, noun: NounName, name: str | int | None) -> dict[str, str | None]:
        """Return what defines one of the inbox's own, and where."""
        loaded = self._inbox.settings
        if loaded is None or name is None or (isinstance(name, str) and name not in getattr(loaded.config, noun)):
            origin, place = "program", self._inbox.places.get((noun, str(name)))
        else:
            origin, place = "file", loaded.place((noun, name))
        return {"origin": origin, "place": place if self._sees_the_server else None}

    @property
    def _sees_the_server(self) -> bool:
        """Tell whether this viewer learns of the server's files and variables; a customer does not."""
        return self.scope.accounts is None

    def _build_route(self, definition: StoredDefinition) -> Route:
        return stored.route_from(definition, False)

    async def routes(self, *, after: str | None = None, limit: int | None = None) -> list[ShownRoute]:
        """Return the routes of file and program, then stored ones by id; `after` and `limit` as in `sources`."""
        own, definitions = await self._page("route", self._routes, after, limit)
        shown = [replace(show_route(one), **self._origin("route", one.index)) for one in own]
        return shown + [self._show_stored_route(one) for one in definitions]

    async def route(self, route_id: str) -> ShownRoute:
        return self._show_stored_route(await self._get_stored("route", route_id))

    def _show_stored_route(self, definition: StoredDefinition) -> ShownRoute:
        return replace(show_route(self._build_route(definition), definition.name), **_stored_origin(definition))

    async def _find_source(self, name: str) -> Source | None:
        """Return a source that this viewer sees, also a stored one; None where there is none that can be used here."""
        if self.scope.sources is not None and name not in self.scope.sources:
            return None
        with suppress(StoreUnavailable):
            return await self._inbox.definitions.find_source(name)
        return None

    async def _find_destinations(self, names: Collection[str]) -> dict[str, Destination]:
        return await self._inbox.definitions.find_destinations(names)

    async def import_keys(
        self, source: str, keys: Sequence[Sequence[str]], *, actor: str, account: str | None = None
    ) -> int:
        """Import keys seen elsewhere: an arrival with one of them is a duplicate. Returns how many were new."""
        known = await self._source(source)
        if self.scope.accounts is not None and account not in self.scope.accounts:
            raise NotFound(f'There is no account "{(account or "")[:60]}".', hint="Say whose keys these are.")
        hashes = [key_hash(source, one, account) for one in keys]
        return await self._store.import_keys(known.id, hashes, known.settings.keep_keys, actor)

    async def _source(self, name: str) -> Source:
        found = await self._find_source(name)
        if found is None or not self._sees_source(found):
            raise NotFound(f'There is no source "{name[:60]}".')
        return found

    async def destinations(self, *, after: str | None = None, limit: int | None = None) -> list[ShownDestination]:
        """Return the destinations of file and program, then stored ones by name; `after` and `limit` as in
        `sources`."""
        return await self._show_destinations(
            *await self._page("destination", list(self._destinations.values()), after, limit)
        )

    async def destination(self, name: str) -> ShownDestination:
        if (own := self._destinations.get(name)) is not None:
            (shown,) = await self._show_destinations([own], [])
        elif (media := await self._find_media(name)) is not None:
            (shown,) = await self._show_destinations([media], [])
            shown = replace(shown, origin="store")
        else:
            (shown,) = await self._show_destinations([], [await self._get_stored("destination", name)])
        return shown

    async def _show_destinations(
        self, own: Sequence[Destination], definitions: Sequence[StoredDefinition]
    ) -> list[ShownDestination]:
        figures = await self._figures(clock.now_utc() - DAY)
        levels = await self.levels()
        leading = await self._store.find_routes_to([*(one.name for one in own), *(one.name for one in definitions)])
        seen = [one for one in leading if one.noun is Noun.route and self.scope.sees(one.source, one.account)]
        routes = [*self._routes, *map(self._build_route, seen)]
        now = clock.now_utc()
        shown = []
        for one in own:
            counted = figures.by_destination.get(one.name, {})
            made = show_destination(one, routes, levels.get(one.name, Level()), counted, now)
            origin = self._origin("destination", one.name)
            if self._sees_the_server:
                if isinstance(one, HandlerDestination):
                    origin["place"] = place_of(one.handler)
                made = replace(made, signs_with=self._inbox.signing_secrets.get(one.name, ()))
            shown.append(replace(made, **origin))
        for definition in definitions:
            level, counted = levels.get(definition.name, Level()), figures.by_destination.get(definition.name, {})
            origin = _stored_origin(definition)
            try:
                built, _ = stored.destination_from(self._inbox.vault, definition)
            except (ConfigError, Undecryptable) as error:
                built, origin = UnusableDestination(definition.name), {**origin, "trouble": str(error)}
            shown.append(replace(show_destination(built, routes, level, counted, now), **origin))
        return shown

    async def pause(self, name: str, *, actor: str, reason: str = "") -> ShownDestination:
        """Hold a destination back; its deliveries wait, nothing is lost."""
        _check_reason(reason)
        await self.check_own(name)
        await self._store.pause((await self._destination(name)).id, actor, reason)
        return await self.destination(name)

    async def resume(self, name: str, *, actor: str) -> ShownDestination:
        await self.check_own(name)
        await self._store.resume((await self._destination(name)).id, actor)
        return await self.destination(name)

    async def try_now(self, name: str, *, actor: str) -> ShownDestination:
        """Let a destination that is held back try one delivery now. Raises NotWaiting where it is not held back."""
        await self.check_own(name)
        if not await self._store.try_now((await self._destination(name)).id, actor):
            raise NotWaiting(f"{name} is not held back: its deliveries are tried as they become due.")
        return await self.destination(name)

    async def _find_media(self, name: str) -> Destination | None:
        """Return the destination that keeps the media of a stored source, for whoever sees everything."""
        if media_source(name) is None or self.scope.is_limited:
            return None
        return (await self._find_destinations([name])).get(name)

    async def _destination(self, name: str) -> Destination:
        if (own := self._destinations.get(name) or await self._find_media(name)) is not None:
            return own
        found = await self._get_stored("destination", name)
        destination, _ = stored.destination_from(self._inbox.vault, found)
        return destination

    async def count_erasable(
        self, subject: str | None, source: str | None = None, account: str | None = None
    ) -> Erasure:
        """Count what `erase` would erase, without changing anything."""
        return await self._store.erasable(await self._erase_order(subject, source, account))

    async def erase(
        self,
        subject: str | None,
        source: str | None = None,
        account: str | None = None,
        *,
        actor: str,
        reason: str,
    ) -> tuple[Erasure, int]:
        """Erase the events of a subject, or of a whole account; return also how many are left, which is 0 unless there
        were too many for one call.

        Erases events that arrive meanwhile, too. Called again, it continues where it stopped.
        """
        query.check_text(reason, "The reason", LONGEST_REASON)
        if not reason.strip():
            raise BadRequest("Say why: events are erased only with a reason.")
        if subject is not None and re.search(rf"(?<!\w){re.escape(subject)}(?!\w)", reason):
            raise BadRequest(
                "The reason names the subject, and stays in the audit log.",
                hint="Name the request by its number instead.",
            )
        order = await self._erase_order(subject, source, account, actor, reason)
        total = Erasure()
        while total.events < self.erased_at_most:
            batch = await self._store.erase(order, min(ERASED_AT_ONCE, self.erased_at_most - total.events))
            total += batch
            if not batch.events:
                break
        await self._store.empty_log()
        await self._inbox.bodies.sweep()
        await sweep_media(self._store, self._inbox.bodies, ERASED_AFTER)
        if not total.events:  # a search that found nothing is audited, too
            detail = {"reason": reason, **asdict(total)}
            await self._store.audit(actor, "erase", order.target, detail)
        return total, (await self._store.erasable(order)).events

    async def _erase_order(
        self, subject: str | None, source: str | None, account: str | None, actor: str = "", reason: str = ""
    ) -> EraseOrder:
        query.check_text(subject or "", "The subject", LONGEST_SUBJECT)
        kept = None if subject is None else bound_text(subject)
        if kept == "" or (kept is None and not account):
            raise BadRequest("Whose events? An empty subject means nobody's.", hint="Name a subject, or an account.")
        if source is None and self.scope.sources is not None:
            raise BadRequest(
                "Say of which source: you may not see all of them.", hint=f"One of: {', '.join(self._sources)}."
            )
        if self.scope.accounts is not None and (account is None or account not in self.scope.accounts):
            raise BadRequest("Say of which account: you may not see all of them.")
        source_id = None if source is None else (await self._source(source)).id
        return EraseOrder(kept, source_id, actor, reason, query.quote_value(kept or ""), account)

    # -- tests and samples -----------------------------------------------------------------------

    async def can_test(self, destination: str) -> bool:
        """Tell whether a test can be sent: nothing harmless can be sent to a function or a person."""
        with suppress(NotFound, ConfigError, Undecryptable):
            return _is_testable(await self._destination(destination))
        return False

    async def test_destination(self, name: str, *, actor: str) -> Tested:
        """Send one signed test, within the destination's own timeout. Raises NotFound, BadRequest or TestedTooSoon."""
        destination = await self._destination(name)
        if not _is_testable(destination):
            raise BadRequest(f"{name} has no web address of its own; only those can be tested.")
        now = clock.steady()
        left = self._tested.get(name, now - self.test_pause) + self.test_pause - now
        if left > 0:
            raise TestedTooSoon(left)
        self._tested[name] = now
        # Noted before it is sent: a caller that hangs up meanwhile counts as well.
        await self._store.audit(actor, "test", name, {})
        return await samples.send_test(destination)

    async def sample_types(self, source: str) -> Sequence[str]:
        """Return the types that a sample can be built for; none where we can check a signature but not make one."""
        found = await self._find_source(source)
        if found is None or found.preset is None or not found.preset.samples:
            return ()
        meant = (source, found.generation)
        if meant not in self._signs:
            self._signs[meant] = samples.can_sign(found, next(iter(found.preset.samples)))
        return tuple(found.preset.samples) if self._signs[meant] else ()

    async def sample_body(self, name: str, kind: str) -> bytes:
        """Return the body of a sample, with fresh ids. Raises NotFound or BadRequest."""
        source, kind = await self._check_sample(name, kind)
        return samples.draft(source, kind).body

    async def send_sample(self, name: str, kind: str = "", *, actor: str, body: bytes | None = None) -> Sampled:
        """Send one signed sample of the preset through the receiver, on request with another body. Raises NotFound,
        BadRequest, and Forbidden for a body of a limited viewer's own: it could name another account."""
        if body is not None and self.scope.is_limited:
            raise Forbidden("A sample can only be changed by somebody who sees everything.")
        source, kind = await self._check_sample(name, kind)
        await self._store.audit(actor, "sample", name, {"type": kind} | ({} if body is None else {"changed": True}))
        receipt = await self._inbox.receiver.receive(samples.build_signed(source, kind, body))
        return Sampled(name, kind, receipt.reply.status, receipt.outcome, receipt.event_ids)

    async def _check_sample(self, name: str, kind: str) -> tuple[Source, str]:
        """Return the source, and the type of a sample that it can be sent: the one asked for, or the first."""
        source, known = await self._source(name), await self.sample_types(name)
        if not known:
            raise BadRequest(f"No sample can be made for {name}.", hint="It has none, or only its sender can sign.")
        kind = kind or known[0]
        if kind not in known:
            raise BadRequest(f'There is no sample "{kind[:60]}".', hint=f"There are: {', '.join(known)}.")
        return source, kind

    # -- how it goes ---------------------------------------------------------------------------

    async def stats(
        self, since: datetime, by: Literal["source", "destination"] | None = None, account: str | None = None
    ) -> Stats:
        """Return counts since a moment, on request per source or per destination, and of one account only."""
        if account is not None:
            return await self.within_account(account).stats(since, by)
        today = await self._today()
        levels = await self.levels()
        latest = await self.replays(limit=50 if self.scope.is_limited else 1)
        return reports.gather(
            since,
            await self._figures(since),
            today=today,
            levels=levels,
            statuses=await self._count_since(since),
            marks=self._measure(levels, today),
            by=by,
            per_day=await self._per_day(since),
            last_replay_at=latest.items[0].created_at if latest.items else None,
        )

    async def _today(self) -> dict[str, int]:
        """Return the events accepted since midnight UTC, by source; only of the types that the preset counts as
        volume."""
        await self._inbox.write_counts()
        midnight = clock.now_utc().replace(hour=0, minute=0, second=0, microsecond=0)
        figures = await self._figures(midnight)
        by_type = set() if self.scope.accounts is not None else self._counted_by_type()
        return {
            source: counted.get("volume" if source in by_type else "accepted", 0)
            for source, counted in figures.by_source.items()
        }

    def _counted_by_type(self) -> set[str]:
        return {source.name for source in self._sources.values() if source.volume is not None}

    async def watermarks(self) -> list[Watermark]:
        levels = await self.levels()
        return self._measure(levels, await self._today())

    def _measure(self, levels: Mapping[str, Level], today: Mapping[str, int]) -> list[Watermark]:
        presets = {name: source.preset for name, source in self._sources.items()}
        usual = {name: preset.daily_volume for name, preset in presets.items() if preset and preset.daily_volume}
        marks = upkeep.measure(self._inbox.limits.with_usual(usual), levels, today, self._store.free_disk())
        return [mark for mark in marks if self._sees_watermark(mark.name)]

    def _sees_watermark(self, name: str) -> bool:
        """Tell whether a watermark concerns this viewer's sources: their volume or their dead letters."""
        kind, _, source = name.partition(".")
        if not self.scope.is_limited or kind == "dead":
            return True
        # The daily volume is that of a whole source, whoever's events these are.
        return kind == "daily_volume" and self.scope.accounts is None and self.scope.sees(source, None)

    async def _figures(self, since: datetime) -> Figures:
        sources, accounts = self.scope.sources, self.scope.accounts
        if accounts is not None:
            return await self._store.figures_of(sorted(accounts), since, _list_names(sources))
        figures = await self._store.figures(since)
        if sources is None:
            return figures
        return Figures({name: counts for name, counts in figures.by_source.items() if name in sources}, {})

    async def _count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        if not self.scope.is_limited:
            return await self._store.count_since(since)
        counts: defaultdict[DeliveryStatus, int] = defaultdict(int)
        for by_status in (await self._count_of(since)).values():
            for status, n in by_status.items():
                counts[status] += n
        return dict(counts)

    async def _per_day(self, since: datetime) -> PerDay:
        days: PerDay = {}
        # a limited viewer gets none: these counts are not kept by source and account
        for name in () if self.scope.is_limited else self._destinations:
            flows = await self._store.series(since, DAY.total_seconds(), destination=name)
            days[name] = {f"{at:%Y-%m-%d}": count for at, count in flows.get("succeeded", ())}
        return days

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> Mapping[str, Sequence[tuple[datetime, int]]]:
        """Return counts for charts. A viewer of some sources gets none for a destination, and a viewer of some accounts
        none at all: they are kept by source or by destination."""
        if not self.scope.is_limited:
            return await self._store.series(since, step, source=source, destination=destination)
        sources = self.scope.sources
        sums: defaultdict[str, defaultdict[datetime, int]] = defaultdict(lambda: defaultdict(int))
        if sources is None or self.scope.accounts is not None or destination is not None:
            return {}
        for name in sources if source is None else sources & {source}:
            for what, points in (await self._store.series(since, step, source=name)).items():
                for at, n in points:
                    sums[what][at] += n
        return {what: sorted(points.items()) for what, points in sums.items()}

    async def destination_series(self, since: datetime, step: float) -> Mapping[str, Flows]:
        """Return the counters of every destination, levels as signed changes. A limited viewer gets none: these counts
        are not kept by source."""
        return {} if self.scope.is_limited else await self._store.destination_series(since, step)

    async def mark(self, text: str, *, actor: str) -> ChartMark:
        """Mark this moment in every chart, such as a deploy."""
        query.check_text(text, "The mark", LONGEST_MARK)
        if not text.strip():
            raise BadRequest("Say what is marked.", hint='For example "v1.2".')
        if self.scope.is_limited:
            raise Forbidden("Marks are shown to everybody; you see some sources only.")
        return await self._store.add_mark(text.strip(), actor)

    async def marks(self, since: datetime) -> list[ChartMark]:
        return await self._store.chart_marks(since)

    async def health(self) -> Health:
        """Return how the store grows and what its upkeep does. Raises Forbidden for a viewer of some sources."""
        if self.scope.is_limited:
            raise Forbidden("This is about the whole inbox; you see some sources only.")
        growth = reports.growth(await self._store.sizes(), await self._store.size(), clock.now_utc())
        share, free = self._store.free_disk(), self._store.free_bytes()
        return Health(
            growth=growth,
            free_disk=share,
            free_bytes=free,
            full_in=free / growth if free is not None and growth and growth > 0 else None,
            keep_events=self._inbox.kept_for(),
            keep_keys={name: one.settings.keep_keys for name, one in self._inbox.sources.items()},
            expired={
                name: counts["crashed"]
                for name, counts in (await self._figures(clock.now_utc() - DAY)).by_destination.items()
                if counts.get("crashed")
            },
            findings=await self._findings(),
        )

    async def _findings(self) -> list[Check]:
        schema = await self._store.schema_state()
        found = [Check("schema", not schema.pending, f"version {schema.current} of {schema.target}")]
        for source in self._inbox.sources.values():
            found += [Check("secret", True, *warning, warning=True) for warning in source.secret_warnings()]
        if old := self._store.warning():
            found.append(Check("library", True, old, upkeep.OLD_LIBRARY_HINT, warning=True))
        for name, waiting in (await upkeep.strays(self._store, self._inbox.destinations)).items():
            detail = f'{waiting:,} for "{name}", which nobody here knows'
            found.append(Check("waiting", True, detail, upkeep.STRAY_HINT, warning=True))
        return found

    async def check(self) -> list[Check]:
        """Check the conservation laws over all rows, as `doctor` does; may take a while."""
        if self.scope.is_limited:
            raise Forbidden("This is about the whole inbox; you see some sources only.")
        return await self._store.check()

    async def rejections(
        self,
        limit: int = 50,
        *,
        before: int | None = None,
        source: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> list[ShownRejection]:
        """Return the latest rejected arrivals, newest first, each with a diagnosis for viewers of payloads."""
        await self._inbox.write_counts()  # who looks right after a refusal finds it
        all_of_them = not self.scope.is_limited and (source, reason, since, until) == (None,) * 4
        # Nothing that was rejected belongs to an account: whose name it bears is its sender's word.
        found = await self._store.recent_rejections(limit if all_of_them else KEPT_REJECTIONS, before=before)
        mine = [
            one
            for one in found
            if self.scope.sees(one.source, None)
            and source in (None, one.source)
            and reason in (None, one.reason)
            and (since is None or one.at >= since)
            and (until is None or one.at < until)
        ][:limit]
        if self._viewer is not None and self.sees_payloads and any(one.head is not None for one in mine):
            await self._notes.note_view(self._store, self._viewer, "rejections")
        if not self.sees_payloads:
            return [ShownRejection(replace(one, head=None, body=None), None, None, None) for one in mine]
        sources = {**await self._read_stored_sources({one.source for one in mine}), **self._sources}
        accounts = await self._read_rejecting(mine, sources)
        return [
            _show_rejection(one, diagnose(one, sources, account=accounts.get(one.id), tries_secrets=n < DIAGNOSED))
            for n, one in enumerate(mine)
        ]

    async def _read_stored_sources(self, names: Collection[str]) -> dict[str, Source]:
        """Return those of these sources that are stored and can be used here, as far as this viewer sees them."""
        made: dict[str, Source] = {}
        meant = sorted(name for name in names if name not in self._inbox.sources)
        for one in await self._store.find_definitions(Noun.source, meant) if meant else ():
            if one.is_enabled and self._sees_stored(one):
                with suppress(ConfigError, Undecryptable):
                    made[one.name] = stored.source_from(self._inbox.vault, one)
        return made

    async def _read_rejecting(
        self, rejections: Sequence[Rejection], sources: Mapping[str, Source]
    ) -> dict[ArrivalId, Source]:
        """Return the sources at whose accounts' addresses arrivals were rejected, as they are there now."""
        named: dict[ArrivalId, tuple[Source, str]] = {}
        for one in rejections:
            known = sources.get(one.source)
            if known is not None and (account := read_account(one, known)) is not None:
                named[one.id] = known, account
        found = await self._store.find_accounts({account for _, account in named.values()}) if named else {}
        made: dict[ArrivalId, Source] = {}
        for id_, (source, name) in named.items():
            definition = found.get(name)
            if definition is None or definition.name != name or not definition.is_enabled:
                continue  # an alias is no address
            owner = account_from(self._inbox.vault, definition)
            secrets = read_secrets(owner.secrets.get(source.name, [])) if owner.has_secret(source) else None
            made[id_] = source.of_account(owner.id, source.compile_account(owner.id, secrets))
        return made

    async def rejection_counts(self) -> list[tuple[str, str, str]]:
        """Return source, code and reason of the rejections that are kept, newest first."""
        found = await self._store.recent_rejections(KEPT_REJECTIONS)
        return [(one.source, one.code, one.reason) for one in found if self.scope.sees(one.source, None)]

    async def audit(self, *, before: int | None = None, limit: int = 50) -> list[Audited]:
        """Return the audit log, newest first; a limited viewer gets the entries of that viewer alone."""
        actor = self._viewer if self.scope.is_limited else None
        return await self._store.audit_log(before=before, limit=limit, actor=actor)

    async def token_uses(self) -> Mapping[str, datetime]:
        return await self._store.token_uses()

    async def system(self) -> System:
        return System(
            version=__version__,
            engine=self._store.engine.value,
            schema=await self._store.schema_state(),
            size=await self._store.size(),
            workers=[]
            if self.scope.accounts is not None
            else [self._show_worker(worker) for worker in await self._store.workers()],
            watermarks=await self.watermarks(),
            crossings={n: at for n, at in (await self._store.crossings()).items() if self._sees_watermark(n)},
            counted_by_type=self._counted_by_type(),
            receivers=() if self.scope.is_limited else self._inbox.receivers,
            owner=None if self.scope.is_limited else self._store.owner,
        )

    async def levels(self) -> Mapping[str, Level]:
        """Return the level of every destination, including those no longer configured. A limited viewer gets the
        destinations of what it sees, counted over these deliveries only."""
        levels = await self._store.levels()
        if not self.scope.is_limited:
            return levels
        counts = await self._count_of()
        names = {*self._destinations, *counts}
        if self.scope.accounts is not None:
            names |= {*await self._name_stored_destinations()}
        owned = await self._find_owned(names)
        return {
            name: _only(levels.get(name, Level()) if name in owned else Level(), counts.get(name, {})) for name in names
        }

    async def _count_of(self, since: datetime | None = None) -> Mapping[str, Mapping[DeliveryStatus, int]]:
        """Count the deliveries that a limited viewer sees, by destination and status."""
        counts = await self._store.count_of(_list_names(self.scope.sources), since, _list_names(self.scope.accounts))
        return {name: counted for name, counted in counts.items() if self._goes_to_seen(name)}

    def _show_worker(self, worker: StoredWorker) -> StoredWorker:
        if not self.scope.is_limited:
            return worker
        return replace(worker, leases=0, destinations=[one for one in worker.destinations if one in self._destinations])

    async def policy(self, destination: str) -> Policy | None:
        """Return when a destination's deliveries are tried again; None for one that is no longer configured."""
        found = (await self._find_destinations([destination])).get(destination)
        return None if found is None else found.terms.retry

    async def kinds(self, destinations: Iterable[str]) -> dict[str, str]:
        """Return the kinds of these destinations, without those that are no longer configured."""
        return {name: one.kind for name, one in (await self._find_destinations(list(destinations))).items()}

    async def arrival_body(self, event_id: EventId, arrival_id: ArrivalId) -> bytes | None:
        """Return the body of a later arrival, where it differs from the event's own."""
        await self._event(event_id)
        self._check_payloads()
        await self._note_view(event_id)
        for arrival in await self._store.arrivals_of(event_id):
            if arrival.id == arrival_id:
                if arrival.unreadable is not None:
                    raise arrival.unreadable
                if isinstance(arrival.body, Reference):
                    return await self._inbox.bodies.read(arrival.body, "body", arrival.id)
                return arrival.body
        return None

    async def note(self, actor: str, act: str, target: str, **detail: object) -> None:
        """Audit an act that the store has no verb for, such as logging in (S34)."""
        await self._store.audit(actor, act, target, detail)


def _show_rejection(rejection: Rejection, diagnosis: str | None) -> ShownRejection:
    request = None if rejection.head is None else request_of(rejection.head)
    body = None if rejection.body is None else rejection.body.decode("utf-8", "replace")
    return ShownRejection(rejection, request, body, diagnosis)


def place_behind(stored: str | None, after: str | None, count: int) -> str:
    """Return the place behind the last of `count` definitions that were listed from `after` on: the name of a stored
    one; the number of those of file and program, where it is one of these. No stored name begins with `@`."""
    return f"@{(_read_place(after) or 0) + count}" if stored is None else stored


def _read_place(after: str | None) -> int | None:
    """Return how many definitions of file and program come before a place; None where all do. Raises BadRequest."""
    if after is None or after.startswith("@"):
        number = "0" if after is None else after[1:]
        if not number.isdigit() or len(number) > 9:
            raise BadRequest("This is no place in this list.")
        return int(number)
    return None


def _is_testable(destination: Destination) -> TypeGuard[TestableDestination]:
    return isinstance(destination, TestableDestination) and getattr(destination, "has_one_address", True)


def _list_names(names: frozenset[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)


class UnusableDestination:
    """A stored destination that cannot be built here, as it is shown."""

    kind = "http"
    address = "unknown"
    crash_tolerance = 0
    id = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.terms = Terms()

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def attempt(self, lease: Lease) -> Result:
        raise NotImplementedError


def _stored_origin(definition: StoredDefinition) -> dict[str, Any]:
    return {
        "origin": "store",
        "account": definition.account,
        "is_enabled": definition.is_enabled,
        "settings": stored.show(definition),
    }


def _only(level: Level, counted: Mapping[DeliveryStatus, int]) -> Level:
    """Return a destination's level with the counts of some sources. A pause or an open breaker holds for all
    sources."""
    leased = counted.get(DeliveryStatus.leased, 0)
    return replace(
        level,
        pending=counted.get(DeliveryStatus.pending, 0) + leased,
        leased=leased,
        done=counted.get(DeliveryStatus.done, 0),
        dead=counted.get(DeliveryStatus.dead, 0),
        discarded=counted.get(DeliveryStatus.discarded, 0),
        oldest_due=None,
    )


def _check_meant(filter: Filter) -> None:
    """Refuse an empty filter: an act on everything must not happen because nothing was named."""
    if filter == Filter():
        raise BadRequest("Say what is meant: an empty query means everything.", hint='Try query "status:dead".')


def _worked_for(workers: Iterable[StoredWorker]) -> set[str]:
    """Return the destinations of all workers, in whichever process."""
    return {name for worker in workers for name in worker.destinations}


def _check_reason(reason: str) -> None:
    query.check_text(reason, "The reason", LONGEST_REASON)
