"""Every question and act of people and programs, for API, command line and dashboard alike.

Takes queries, ids and tokens; returns values of `model`, `replay` and `reports`. API, command line and dashboard never
touch the store, so all three show the same numbers; they check the role that an act needs before they call. Every act
carries its actor, and the store audits it. They use the `Admin` that `seen_by` returns for a viewer: it knows only that
viewer's sources (S32), hides payloads where the viewer may not see them (S33), and audits who has seen one (S34).
"""

from __future__ import annotations

import logging
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime, timedelta
from typing import Final, Literal, Protocol

from msgspec.structs import asdict, replace

from oncehook import __version__, clock, human, query, reports, samples, upkeep
from oncehook.destinations.base import Destination, TestableDestination
from oncehook.errors import (
    BadRequest,
    Forbidden,
    NotFound,
    NotReplayable,
    NotWaiting,
    PayloadsHidden,
    ReplayTooSoon,
    StoreError,
    TestedTooSoon,
    Undecryptable,
)
from oncehook.ingest import Receiver
from oncehook.logs import ration
from oncehook.model import (
    ERASED,
    NOTHING_TO_REPLAY,
    NOTHING_TO_REPLAY_HINT,
    REPLAY_PAUSE,
    ArrivalId,
    Audited,
    Cause,
    DeliveryId,
    DeliveryPreview,
    DeliveryStatus,
    EraseOrder,
    Erasure,
    EventDetails,
    EventId,
    Figures,
    Filter,
    Level,
    ListedEvent,
    Outcome,
    Page,
    PlanSnapshot,
    Rejection,
    ReplayCommand,
    ReplayId,
    ReplayState,
    StoredArrival,
    StoredAttempt,
    StoredDelivery,
    StoredEvent,
    StoredReplay,
    StoredWorker,
    key_hash,
    new_id,
    subject_hash,
)
from oncehook.replay import Plan, ReplayRequest, build_plan, decode_token, some_id, some_ids, with_end
from oncehook.reports import (
    PerDay,
    RunningReceiver,
    ShownArrival,
    ShownDestination,
    ShownEvent,
    ShownRequest,
    ShownSource,
    Stats,
    System,
    request_of,
    show_destination,
    show_source,
    without_values,
)
from oncehook.retry import Policy
from oncehook.routes import Route
from oncehook.rules import bound_text
from oncehook.samples import Sampled, Tested
from oncehook.sources import Source
from oncehook.store.base import KEPT_REJECTIONS, Store
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
LONGEST_SUBJECT: Final = 10_000
ERASED_AT_ONCE: Final = 100
DAY: Final = timedelta(hours=24)
ENDED: Final = (DeliveryStatus.dead, DeliveryStatus.discarded, DeliveryStatus.done)


class AdminHost(Protocol):
    """The inbox as `Admin` needs it. Its fields are read at each call, because `start()` builds some of them."""

    sources: dict[str, Source]
    destinations: dict[str, Destination]
    routes: list[Route]
    limits: Limits

    @property
    def store(self) -> Store: ...

    @property
    def receiver(self) -> Receiver: ...

    @property
    def receivers(self) -> Sequence[RunningReceiver]: ...

    def nudge(self) -> None: ...

    async def write_counts(self) -> None: ...


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
        self._signs: dict[str, bool] = {}
        self._viewer: str | None = None
        self.scope: frozenset[str] | None = None
        """The sources that this viewer sees and acts on; None: all."""
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
        return known if self.scope is None else {name: one for name, one in known.items() if name in self.scope}

    @property
    def _routes(self) -> Sequence[Route]:
        known = self._inbox.routes
        return known if self.scope is None else [route for route in known if route.source in self.scope]

    @property
    def _destinations(self) -> Mapping[str, Destination]:
        """Return the destinations of visible routes. A visible delivery may go to a destination that is not among
        them."""
        known = self._inbox.destinations
        if self.scope is None:
            return known
        reached = {route.destination for route in self._routes}
        return {name: one for name, one in known.items() if name in reached}

    # -- who looks -----------------------------------------------------------------------------

    def seen_by(self, viewer: str, scope: frozenset[str] | None = None, *, payloads: bool = True) -> Admin:
        """Return an `Admin` limited to some sources, and perhaps without payloads."""
        seen = copy(self)
        seen._viewer, seen.scope, seen.sees_payloads = viewer, scope, payloads
        return seen

    def _sees(self, source: str) -> bool:
        return self.scope is None or source in self.scope

    def _within(self, filter: Filter) -> Filter:
        if filter.body is not None and not self.sees_payloads:
            # A viewer who may ask whether a body contains a text can find out the body, question by question.
            raise PayloadsHidden("You may not search in bodies.")
        if self.scope is None:
            return filter
        if filter.source is not None:
            return filter if filter.source in self.scope else replace(filter, ids=())
        if len(self.scope) == 1:
            return replace(filter, source=next(iter(self.scope)))
        return replace(filter, sources=sorted(self.scope))

    def _check_payloads(self) -> None:
        if not self.sees_payloads:
            raise PayloadsHidden

    async def _note_view(self, event_id: EventId) -> None:
        if self._viewer is not None and self.sees_payloads:
            await self._notes.note_view(self._store, self._viewer, str(event_id))

    async def note_refused(self, target: str, code: str) -> None:
        if self._viewer is not None:
            await self._notes.note_refused(self._store, self._viewer, target, code)

    def check_own(self, destination: str) -> None:
        """Raise Forbidden for a destination that also gets events of sources that this viewer does not see."""
        self._destination(destination)
        if any(r.destination == destination and not self._sees(r.source) for r in self._inbox.routes):
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
        return await self._store.find_events(self._within(filter), before=before, limit=limit)

    async def event(self, event_id: EventId) -> ShownEvent:
        event = await self._event(event_id)
        deliveries = await self._store.find_deliveries(Filter(event_id=event_id), limit=1000)
        request = self._show_request(await self._head(event.request_head, event.batch_id))
        source = self._sources.get(event.source)
        await self._note_view(event_id)
        size = len(event.body)
        if not self.sees_payloads:
            event = event.without_payload()
        return ShownEvent(
            event,
            request,
            deliveries.items,
            None if source is None else source.body_authenticated,
            None if source is None else source.key_authenticated,
            size,
        )

    async def body(self, event_id: EventId) -> bytes:
        event = await self._event(event_id)
        self._check_payloads()
        await self._note_view(event_id)
        return event.body

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
        if event is None or not self._sees(event.source):
            copies = await self._store.arrivals_of(event_id) if event is None and self.scope is None else ()
            raise NotFound("There is no such event, or no longer.", hint=reports.ONLY_A_KEY if copies else "")
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
        if delivery is None or not self._sees(delivery.source):
            raise NotFound("There is no such delivery, or no longer.")
        return delivery

    async def attempts(self, delivery_id: DeliveryId) -> list[StoredAttempt]:
        """Return the attempts of a delivery, oldest first."""
        await self.delivery(delivery_id)
        attempts = await self._store.attempts_of(delivery_id)
        return attempts if self.sees_payloads else [one.without_answer() for one in attempts]

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
        for delivery in deliveries:
            source = self._sources.get(delivery.source)
            destination = self._inbox.destinations.get(delivery.destination)
            read_message = getattr(destination, "preview", None)
            if read_message is None and (source is None or source.preview is None):
                continue
            if delivery.event_id not in events:
                events[delivery.event_id] = None
                with suppress(Undecryptable):  # a plan shows the others
                    events[delivery.event_id] = await self._store.get_event(delivery.event_id)
            event, seen = events[delivery.event_id], None
            if event is not None and read_message is not None:
                seen = read_message(event.body)
            elif event is not None and source is not None and (text := source.preview_of(event)) is not None:
                seen = DeliveryPreview(
                    destination.address if destination else delivery.destination, text, is_incoming=True
                )
            if seen is not None:
                found[delivery.id] = seen
        return found

    async def replayable(self, deliveries: Iterable[StoredDelivery]) -> set[bytes]:
        """Return the deliveries that a replay would run again now: ended, not erased, not replayed within the last
        minute, and for a destination that is configured here or has a worker."""
        known = {*self._inbox.destinations, *await self._elsewhere()}
        rested = clock.now_utc() - timedelta(seconds=REPLAY_PAUSE)
        return {
            one.id
            for one in deliveries
            if one.status in ENDED
            and one.note != ERASED
            and one.destination in known
            and (one.last_replay_at is None or one.last_replay_at <= rested)
        }

    async def _elsewhere(self) -> set[str]:
        """Return the destinations of all workers, in whichever process."""
        return {name for worker in await self._store.workers() for name in worker.destinations}

    async def causes(self, destination: str | None = None) -> list[Cause]:
        return await self._store.causes(destination, None if self.scope is None else sorted(self.scope))

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
        if request.filter.status is not DeliveryStatus.dead:
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
        if self.scope is not None:
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
            meant = replace(meant, ids=some_ids(ids, meant))
        if destination is not None:
            self._destination(destination)
            if meant.destination not in (None, destination):
                raise BadRequest(f"The query is about {meant.destination}, and not about {destination}.")
            meant = replace(meant, destination=destination)
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

    async def plan(self, request: ReplayRequest) -> Plan:
        planned = await self._store.plan_replay(self._within(request.filter), force=request.force)
        levels, previews = await self._store.levels(), await self.previews(planned.sample)
        return build_plan(request, planned, self._inbox.destinations, levels, previews, await self._elsewhere())

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
        """Return the sources that a replay is limited to: viewers of these may see it."""
        if request.filter.source is not None:
            return {"sources": [request.filter.source]}
        return {} if self.scope is None else {"sources": sorted(self.scope)}

    async def _goes_to(self, request: ReplayRequest) -> list[str]:
        if request.filter.destination is not None:
            return [request.filter.destination]
        # The ids contain the destination. No query, because a duplicate that revives its event waits for this.
        if request.filter.ids:
            names = {one.id: one.name for one in self._inbox.destinations.values()}
            numbers = {one.destination_id for one in request.filter.ids}
            return [name for number, name in names.items() if number in numbers]
        return list((await self._store.plan_replay(self._within(request.filter), force=request.force)).by_destination)

    async def replays(self, *, before: bytes | None = None, limit: int = 50) -> Page[StoredReplay]:
        page = await self._store.find_replays(before=before, limit=limit)
        return page if self.scope is None else Page([one for one in page.items if self._sees_replay(one)], page.next)

    def _sees_replay(self, replay: StoredReplay) -> bool:
        sources = replay.about.get("sources")
        return self.scope is None or (isinstance(sources, list) and self.scope.issuperset(sources))

    async def replay(self, replay_id: ReplayId) -> StoredReplay:
        replay = await self._store.get_replay(replay_id)
        if replay is None or not self._sees_replay(replay):
            raise NotFound("There is no such replay, or no longer.")
        return replay

    async def set_replay_state(self, replay_id: ReplayId, state: ReplayState, *, actor: str) -> StoredReplay:
        if self.scope is not None:
            await self.replay(replay_id)
        steered = await self._store.set_replay_state(replay_id, state, actor)
        self._inbox.nudge()
        return steered

    # -- what is set up ------------------------------------------------------------------------

    async def sources(self) -> list[ShownSource]:
        figures = await self._figures(clock.now_utc() - DAY)
        return [await self._show_source(source, figures) for source in self._sources.values()]

    async def _show_source(self, source: Source, figures: Figures) -> ShownSource:
        latest = await self._store.find_events(Filter(source=source.name), limit=1)
        arrived = latest.items[0].received_at if latest.items else None
        return show_source(source, self._routes, arrived, figures.by_source.get(source.name, {}))

    async def import_keys(self, source: str, keys: Sequence[Sequence[str]], *, actor: str) -> int:
        """Import keys seen elsewhere: an arrival with one of them is a duplicate. Returns how many were new."""
        known = self._source(source)
        return await self._store.import_keys(
            known.id, [key_hash(source, one) for one in keys], known.settings.keep_keys, actor
        )

    def _source(self, name: str) -> Source:
        if (found := self._sources.get(name)) is None:
            raise NotFound(f'There is no source "{name[:60]}".')
        return found

    async def destinations(self) -> list[ShownDestination]:
        figures = await self._figures(clock.now_utc() - DAY)
        levels = await self.levels()
        return [
            show_destination(
                one, self._routes, levels.get(name, Level()), figures.by_destination.get(name, {}), clock.now_utc()
            )
            for name, one in self._destinations.items()
        ]

    async def destination(self, name: str) -> ShownDestination:
        self._destination(name)
        return next(shown for shown in await self.destinations() if shown.name == name)

    async def pause(self, name: str, *, actor: str, reason: str = "") -> ShownDestination:
        """Hold a destination back; its deliveries wait, nothing is lost."""
        _check_reason(reason)
        self.check_own(name)
        await self._store.pause(self._destination(name).id, actor, reason)
        return await self.destination(name)

    async def resume(self, name: str, *, actor: str) -> ShownDestination:
        self.check_own(name)
        await self._store.resume(self._destination(name).id, actor)
        return await self.destination(name)

    def _destination(self, name: str) -> Destination:
        destination = self._destinations.get(name)
        if destination is None:
            near = human.nearest(name, self._destinations)
            raise NotFound(f'There is no destination "{name[:60]}".', hint=f'Did you mean "{near}"?' if near else "")
        return destination

    async def count_erasable(self, subject: str, source: str | None = None) -> Erasure:
        """Count what `erase` would erase, without changing anything."""
        return await self._store.erasable(self._erase_order(subject, source))

    async def erase(self, subject: str, source: str | None = None, *, actor: str, reason: str) -> tuple[Erasure, int]:
        """Erase the events of a subject; return also how many are left, which is 0 unless there were too many for one
        call.

        Erases events that arrive for the subject meanwhile, too. Called again, it continues where it stopped.
        """
        query.check_text(reason, "The reason", LONGEST_REASON)
        if not reason.strip():
            raise BadRequest("Say why: a subject is erased only with a reason.")
        if re.search(rf"(?<!\w){re.escape(subject)}(?!\w)", reason):
            raise BadRequest(
                "The reason names the subject, and stays in the audit log.",
                hint="Name the request by its number instead.",
            )
        order = self._erase_order(subject, source, actor, reason)
        total = Erasure()
        while total.events < self.erased_at_most:
            batch = await self._store.erase(order, min(ERASED_AT_ONCE, self.erased_at_most - total.events))
            total += batch
            if not batch.events:
                break
        await self._store.empty_log()
        if not total.events:  # a search that found nothing is audited, too
            detail = {"reason": reason, **asdict(total)}
            await self._store.audit(actor, "erase", f"subject {subject_hash(order.subject)}", detail)
        return total, (await self._store.erasable(order)).events

    def _erase_order(self, subject: str, source: str | None, actor: str = "", reason: str = "") -> EraseOrder:
        query.check_text(subject, "The subject", LONGEST_SUBJECT)
        kept = bound_text(subject)
        if not kept:
            raise BadRequest("Whose events? An empty subject means nobody's.")
        if source is None and self.scope is not None:
            raise BadRequest(
                "Say of which source: you may not see all of them.", hint=f"One of: {', '.join(self._sources)}."
            )
        source_id = None if source is None else self._source(source).id
        return EraseOrder(kept, source_id, actor, reason, query.quote_value(kept))

    # -- tests and samples -----------------------------------------------------------------------

    def can_test(self, destination: str) -> bool:
        """Tell whether a test can be sent: nothing harmless can be sent to a function or a person."""
        return isinstance(self._destinations.get(destination), TestableDestination)

    async def test_destination(self, name: str, *, actor: str) -> Tested:
        """Send one signed test, within the destination's own timeout. Raises NotFound, BadRequest or TestedTooSoon."""
        destination = self._destination(name)
        if not isinstance(destination, TestableDestination):
            raise BadRequest(f"{name} is no web address; only those can be tested.")
        now = clock.steady()
        left = self._tested.get(name, now - self.test_pause) + self.test_pause - now
        if left > 0:
            raise TestedTooSoon(left)
        self._tested[name] = now
        # Noted before it is sent: a caller that hangs up meanwhile counts as well.
        await self._store.audit(actor, "test", name, {})
        return await samples.send_test(destination)

    def sample_types(self, source: str) -> Sequence[str]:
        """Return the types that a sample can be built for; none where we can check a signature but not make one."""
        found = self._sources.get(source)
        if found is None or found.preset is None or not found.preset.samples:
            return ()
        if source not in self._signs:
            self._signs[source] = samples.can_sign(found, next(iter(found.preset.samples)))
        return tuple(found.preset.samples) if self._signs[source] else ()

    async def send_sample(self, name: str, kind: str = "", *, actor: str) -> Sampled:
        """Send one signed sample of the preset through the receiver. Raises NotFound or BadRequest."""
        source, known = self._source(name), self.sample_types(name)
        if not known:
            raise BadRequest(f"No sample can be made for {name}.", hint="It has none, or only its sender can sign.")
        kind = kind or known[0]
        if kind not in known:
            raise BadRequest(f'There is no sample "{kind[:60]}".', hint=f"There are: {', '.join(known)}.")
        await self._store.audit(actor, "sample", name, {"type": kind})
        receipt = await self._inbox.receiver.receive(samples.build_signed(source, kind))
        return Sampled(name, kind, receipt.reply.status, receipt.outcome, receipt.event_ids)

    # -- how it goes ---------------------------------------------------------------------------

    async def stats(self, since: datetime, by: Literal["source", "destination"] | None = None) -> Stats:
        """Return counts since a moment, on request per source or per destination."""
        today = await self._today()
        levels = await self.levels()
        latest = await self.replays(limit=1 if self.scope is None else 50)
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
        figures, by_type = await self._figures(midnight), self._counted_by_type()
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
        return self.scope is None or kind == "dead" or (kind == "daily_volume" and source in self.scope)

    async def _figures(self, since: datetime) -> Figures:
        figures = await self._store.figures(since)
        if self.scope is None:
            return figures
        return Figures({name: counts for name, counts in figures.by_source.items() if name in self.scope}, {})

    async def _count_since(self, since: datetime) -> dict[DeliveryStatus, int]:
        if self.scope is None:
            return await self._store.count_since(since)
        counts: defaultdict[DeliveryStatus, int] = defaultdict(int)
        for by_status in (await self._store.count_of(self.scope, since)).values():
            for status, n in by_status.items():
                counts[status] += n
        return dict(counts)

    async def _per_day(self, since: datetime) -> PerDay:
        days: PerDay = {}
        # a viewer of some sources gets none: these counts are not kept by source
        for name in self._destinations if self.scope is None else ():
            flows = await self._store.series(since, DAY.total_seconds(), destination=name)
            days[name] = {f"{at:%Y-%m-%d}": count for at, count in flows.get("succeeded", ())}
        return days

    async def series(
        self, since: datetime, step: float, *, source: str | None = None, destination: str | None = None
    ) -> Mapping[str, Sequence[tuple[datetime, int]]]:
        """Return counts for charts. A viewer of some sources gets none for a destination: those are not kept by
        source."""
        if self.scope is None:
            return await self._store.series(since, step, source=source, destination=destination)
        wanted = self.scope if source is None else self.scope & {source}
        sums: defaultdict[str, defaultdict[datetime, int]] = defaultdict(lambda: defaultdict(int))
        for name in wanted if destination is None else ():
            for what, points in (await self._store.series(since, step, source=name)).items():
                for at, n in points:
                    sums[what][at] += n
        return {what: sorted(points.items()) for what, points in sums.items()}

    async def rejections(self, limit: int = 50) -> list[Rejection]:
        if self.scope is None:
            return await self._store.recent_rejections(limit)
        return [one for one in await self._store.recent_rejections(KEPT_REJECTIONS) if self._sees(one.source)][:limit]

    async def audit(self, *, before: int | None = None, limit: int = 50) -> list[Audited]:
        """Return the audit log, newest first; a viewer of some sources gets the entries of that viewer alone."""
        actor = None if self.scope is None else self._viewer
        return await self._store.audit_log(before=before, limit=limit, actor=actor)

    async def token_uses(self) -> Mapping[str, datetime]:
        return await self._store.token_uses()

    async def system(self) -> System:
        return System(
            version=__version__,
            engine=self._store.engine.value,
            schema=await self._store.schema_state(),
            size=await self._store.size(),
            workers=[self._show_worker(worker) for worker in await self._store.workers()],
            watermarks=await self.watermarks(),
            crossings={n: at for n, at in (await self._store.crossings()).items() if self._sees_watermark(n)},
            counted_by_type=self._counted_by_type(),
            receivers=self._inbox.receivers if self.scope is None else (),
            owner=self._store.owner if self.scope is None else None,
        )

    async def levels(self) -> Mapping[str, Level]:
        """Return the level of every destination, including those no longer configured. A viewer of some sources gets
        the destinations of these, counted over their deliveries only."""
        levels = await self._store.levels()
        if self.scope is None:
            return levels
        counts = await self._store.count_of(self.scope)
        return {name: _only(levels.get(name, Level()), counts.get(name, {})) for name in {*self._destinations, *counts}}

    def _show_worker(self, worker: StoredWorker) -> StoredWorker:
        if self.scope is None:
            return worker
        return replace(worker, leases=0, destinations=[one for one in worker.destinations if one in self._destinations])

    def policy(self, destination: str) -> Policy | None:
        """Return when a destination's deliveries are tried again; None for one that is no longer configured."""
        found = self._inbox.destinations.get(destination)
        return None if found is None else found.terms.retry

    def kinds(self, destinations: Iterable[str]) -> dict[str, str]:
        """Return the kinds of these destinations, without those that are no longer configured."""
        known = self._inbox.destinations
        return {name: known[name].kind for name in destinations if name in known}

    async def arrival_body(self, event_id: EventId, arrival_id: ArrivalId) -> bytes | None:
        """Return the body of a later arrival, where it differs from the event's own."""
        await self._event(event_id)
        self._check_payloads()
        await self._note_view(event_id)
        for arrival in await self._store.arrivals_of(event_id):
            if arrival.id == arrival_id:
                if arrival.unreadable is not None:
                    raise arrival.unreadable
                return arrival.body
        return None

    async def note(self, actor: str, act: str, target: str, **detail: object) -> None:
        """Audit an act that the store has no verb for, such as logging in (S34)."""
        await self._store.audit(actor, act, target, detail)


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


def _check_reason(reason: str) -> None:
    query.check_text(reason, "The reason", LONGEST_REASON)
