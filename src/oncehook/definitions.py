"""Definitions of a running inbox: those of its file and program, and those that are stored while it runs.

What is stored is loaded when it is first needed, and kept until the store tells of a change (`note`); a bounded number
of sources is kept, so that any number of them costs an inbox nothing. What a file or a program defines comes first. An
arrival at a stored source is taken only while changes are learnt of, and acknowledged only if its source still exists
(decision 26).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Final, Protocol

from msgspec.structs import replace

from oncehook import clock
from oncehook.destinations import registry
from oncehook.destinations.base import Destination
from oncehook.errors import ConfigError, Overloaded, SignatureInvalid, StoreUnavailable, Undecryptable
from oncehook.ingest import Lookup
from oncehook.logs import ration
from oncehook.media import MediaDestination, MediaRoute
from oncehook.model import (
    UNKNOWN_SOURCE,
    DefinitionChange,
    DefinitionChanges,
    Noun,
    StoredDefinition,
    StoredEvent,
    address_hash,
    media_destination,
    media_source,
)
from oncehook.routes import Route, subscribers
from oncehook.settings import stored
from oncehook.settings.stored import Vault
from oncehook.sources import Source
from oncehook.store.base import Store

log = logging.getLogger("oncehook.definitions")

MOST_SOURCES: Final = 5_000
"""Stored sources that are kept compiled; the longest unused one makes way."""
MOST_ROUTED: Final = 200_000
"""Names whose stored routes are kept, most of them accounts without any."""
MOST_UNKNOWN: Final = 20_000
"""Paths that are known to lead nowhere."""
MOST_WAITING: Final = 2_000
"""Look-ups that may wait; who comes with another unknown path then is asked to try again."""
BATCH: Final = 500
"""Look-ups that are read together."""
BUILT_AT_ONCE: Final = 20
"""Sources that are built before other work gets its turn."""
BLOCKING_FRESH: Final = 0.5
"""Seconds for which routes count that were read for a program without a running inbox, which is told of no change."""

CATCH_UP: Final = 1.0
"""Seconds after which a change counts everywhere."""
MOST_SENDERS: Final = 200
"""Stored destinations that are looked through for the credentials of media."""

AGAIN: Final = 0.1
"""Seconds after which the store is asked again, where it did not answer."""

_PATH: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


class DefinitionsHost(Protocol):
    """The inbox as its definitions need it. Its fields are read at each call, because `start()` builds some of them."""

    sources: dict[str, Source]
    destinations: dict[str, Destination]

    @property
    def store(self) -> Store: ...

    @property
    def vault(self) -> Vault: ...

    def note_changed(self, destination_ids: Collection[int] | None) -> None:
        """Build stored destinations anew before their next attempt (None: all), because they have changed."""

    def note_accounts(self, accounts: Collection[str] | None, *, is_over: bool) -> None:
        """Look accounts up anew before they are next needed (None: all), because they have changed; `is_over`: nothing
        is acknowledged for them that was begun before."""

    def note_source(self, source: Source) -> None:
        """Note a stored source that was loaded."""

    async def keep_stored_media(self, event: StoredEvent) -> None:
        """Fetch and keep the files of an event of a stored source, as it is defined now. Raises MediaFailed where it
        keeps none any more."""


class StoredSource:
    """A stored source that is loaded, with its routes."""

    __slots__ = ("_definitions", "error", "is_retired", "media", "name", "source")

    def __init__(
        self, definitions: Definitions, name: str, source: Source | None, error: StoreUnavailable | None = None
    ) -> None:
        self._definitions = definitions
        self.name = name
        self.source = source
        self.media: MediaRoute | None = None
        """The route of its events that refer to files, where it keeps them."""
        self.error = error
        """Why it cannot be used: its key is missing, or its settings do not hold any more."""
        self.is_retired = False
        if source is not None:
            source.guard = self.check

    def check(self) -> None:
        """Raise where an arrival must not be taken, or not be acknowledged any more."""
        if self.is_retired:
            raise SignatureInvalid(UNKNOWN_SOURCE)
        if not self._definitions.is_current:
            raise StoreUnavailable("Changes of definitions cannot be learnt of now.")


class Definitions:
    """Sources by path and name, routes by source, destinations by id: of the inbox itself, then of the store."""

    def __init__(self, host: DefinitionsHost) -> None:
        self._host = host
        self.version = 0
        """The version of stored definitions that is known here; 0: there were none ever."""
        self.largest_body = 0
        self.routes: dict[str, list[Route]] = {}
        """Routes by source: the inbox's own, then stored ones of the sources that are loaded."""
        self._own_routes: Mapping[str, list[Route]] = {}
        self._is_running = False
        self._is_synced = True
        """False from a gap in what was told until the store was asked."""
        self._told = 0
        """The highest version that the store has told of."""
        self._syncing: asyncio.Task[None] | None = None
        self._sources: OrderedDict[str, StoredSource] = OrderedDict()
        """By path, the longest unused first."""
        self._paths: dict[str, str] = {}
        """Paths of the loaded sources, by name."""
        self._unknown: OrderedDict[bytes, None] = OrderedDict()
        self._lookups: dict[str, Lookup] = {}
        self._reads: dict[int, set[bytes | str]] = {}
        """For each read under way, the addresses and sources that have changed since it began."""
        self._loading: asyncio.Task[None] | None = None
        self._routed: OrderedDict[str, None] = OrderedDict()
        """Names whose stored routes are loaded without a stored source: own sources, and those of emitted events."""
        self._reaches: dict[str, set[str]] = {}
        """Sources whose loaded routes lead to a destination, by its name."""
        self._kept_version = 0
        self._kept: dict[int, float] = {}
        """How long events are kept, as of a version."""
        self._read_at: dict[str, float] = {}
        self._to_reload: set[str] = set()
        """The inbox's own sources whose stored routes have changed."""
        self._reloading: asyncio.Task[None] | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}

    # -- starting and stopping -----------------------------------------------------------------

    def set_own(self, routes: Mapping[str, list[Route]]) -> None:
        """Begin with the routes of file and program, once every name has its id."""
        self._own_routes = routes
        self.routes = {source: list(found) for source, found in routes.items()}

    async def start(self) -> None:
        """Learn the version, and load the stored routes of the inbox's own sources."""
        self.note(await self._host.store.definition_changes(-1))
        self._is_running = True
        if self.version:
            await self._load_routes({*self._host.sources, *self._own_routes, subscribers(None)})

    async def stop(self) -> None:
        self._is_synced = False  # nothing is taken any more
        for timer in self._timers.values():
            timer.cancel()
        self._fail_lookups(StoreUnavailable("The inbox is stopping."))
        if tasks := [task for task in (self._loading, self._syncing, self._reloading) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @property
    def is_current(self) -> bool:
        """True while no change can be older than a second without being known here."""
        return self._is_synced and self._host.store.learns_changes

    # -- changes -------------------------------------------------------------------------------

    def note(self, changes: DefinitionChanges) -> None:
        """Note changes that the store tells of, in order of commit."""
        self.largest_body = max(self.largest_body, changes.largest_body)
        self._told = max(self._told, changes.version)
        if changes.since > self.version:
            self._is_synced = False  # something was not told: what is loaded may be old
            if self._syncing is None:
                self._syncing = asyncio.get_running_loop().create_task(self._sync(), name="oncehook-definitions")
            return
        if changes.since < 0:
            self._forget_all()
        for change in changes.changed:
            if change.version > self.version:
                self._forget(change)
        self.version = max(self.version, changes.version)

    async def catch_up(self, version: int) -> None:
        """Wait until a version counts here, but not for long: whoever made a change may act by it at once."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP):
                while self.version < version or self._reloading is not None:  # noqa: ASYNC110 - told of on this loop
                    await asyncio.sleep(0.002)

    async def _sync(self) -> None:
        """Ask the store for what was not told."""
        try:
            while self.version < self._told:  # more may be told meanwhile
                try:
                    self.note(await self._host.store.definition_changes(self.version))
                except StoreUnavailable:
                    await asyncio.sleep(AGAIN)
                except Exception:  # until it is known what has changed, stored sources take nothing
                    log.exception("definitions.failed")
                    await asyncio.sleep(AGAIN)
            self._is_synced = True
        finally:
            self._syncing = None

    def _forget_all(self) -> None:
        for path in list(self._sources):
            # Most of them live: what is under way is acknowledged, within its budget.
            self._drop_source(path, is_over=False)
        self._unknown.clear()
        self._mark(*(address_hash(path) for path in self._lookups), *self._routed)
        self._reload(set(self._routed))
        self._host.note_changed(None)
        self._host.note_accounts(None, is_over=True)

    def _mark(self, *changed: bytes | str) -> None:
        """Have reads under way read these again."""
        for read in self._reads.values():
            read.update(changed)

    @contextmanager
    def _reading(self) -> Iterator[set[bytes | str]]:
        """Gather what changes while something is being read."""
        changed: set[bytes | str] = set()
        self._reads[id(changed)] = changed
        try:
            yield changed
        finally:
            del self._reads[id(changed)]

    def _forget(self, change: DefinitionChange) -> None:
        if change.noun is Noun.source:
            if change.address is not None:
                self._unknown.pop(change.address, None)
                self._mark(change.address)
            if (path := self._paths.get(change.name)) is not None:
                self._drop_source(path, is_over=not change.is_enabled)
            self._host.note_changed([])  # it may be the first one that keeps media, for which somebody must work
        elif change.noun is Noun.destination:
            self._host.note_changed([change.id])
            for source in {*self._reaches.get(change.name, ()), *([change.source] if change.source else [])}:
                self._forget_routes(source)
        elif change.noun is Noun.account:
            self._host.note_accounts([change.name], is_over=not change.is_enabled)
        elif change.source is not None:
            self._forget_routes(change.source)

    def _forget_routes(self, source: str) -> None:
        self._mark(source)
        if (path := self._paths.get(source)) is not None:
            self._drop_source(path, is_over=False)
        if source in self._routed or self._is_own(source):
            self._reload({source})

    def _is_own(self, source: str) -> bool:
        """Tell whether its routes stay loaded, because arrivals do not wait for them."""
        return source in self._host.sources or source in self._own_routes or source == subscribers(None)

    def _reload(self, sources: set[str]) -> None:
        """Load routes of own sources anew; forget those of emitted events until the next one."""
        own = set(filter(self._is_own, sources))
        for source in sources - own:
            self._drop_routes(source)
        self._to_reload |= own
        if self._to_reload and self._reloading is None:
            self._reloading = asyncio.get_running_loop().create_task(self._reload_all(), name="oncehook-routes")

    async def _reload_all(self) -> None:
        try:
            while sources := self._to_reload:
                self._to_reload = set()
                try:
                    await self._load_routes(sources)
                except StoreUnavailable:
                    self._to_reload |= sources
                    await asyncio.sleep(AGAIN)
        finally:
            self._reloading = None

    def _drop_source(self, path: str, *, is_over: bool) -> None:
        found = self._sources.pop(path)
        found.is_retired = found.is_retired or is_over
        self._paths.pop(found.name, None)
        self._drop_routes(found.name)

    def _drop_routes(self, source: str) -> None:
        self._routed.pop(source, None)
        for route in self.routes.pop(source, ()):
            if (reached := self._reaches.get(route.destination)) is not None:
                reached.discard(source)
                if not reached:
                    del self._reaches[route.destination]
        if source in self._own_routes:
            self.routes[source] = list(self._own_routes[source])

    # -- sources -------------------------------------------------------------------------------

    def at(self, path: str) -> Source | Lookup | None:
        """Return the stored source at a path; None where there is none; a look-up where that is not known here."""
        if not self.version or _PATH.fullmatch(path) is None:
            return None
        if self.is_current:
            if (found := self._sources.get(path)) is not None:
                self._sources.move_to_end(path)
                if found.error is None:
                    return found.source
                (failed := Lookup(path)).decide(None, found.error)
                return failed
            if address_hash(path) in self._unknown:
                return None
        return self._look_up(path)

    def _look_up(self, path: str) -> Lookup:
        if (lookup := self._lookups.get(path)) is not None:
            return lookup
        lookup = Lookup(path)
        if len(self._lookups) >= MOST_WAITING:
            lookup.decide(None, Overloaded())
            return lookup
        self._lookups[path] = lookup
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load(), name="oncehook-lookups")
        return lookup

    async def _load(self) -> None:
        """Read what is looked up, in batches: what comes meanwhile gathers for the next one."""
        try:
            while self._lookups:
                if self._syncing is not None:
                    await asyncio.wait([self._syncing], timeout=1.0)
                await self._load_batch([*self._lookups][:BATCH])
        except StoreUnavailable as error:
            self._fail_lookups(error)
        except Exception as error:
            log.exception("definitions.failed")
            self._fail_lookups(StoreUnavailable(str(error)))
        finally:
            self._loading = None

    def _fail_lookups(self, error: StoreUnavailable) -> None:
        lookups, self._lookups = self._lookups, {}
        for lookup in lookups.values():
            lookup.decide(None, error)

    async def _load_batch(self, paths: Sequence[str]) -> None:
        addresses = {address_hash(path): path for path in paths}
        with self._reading() as changed:
            rows = await self._host.store.find_sources(list(addresses))
            if not self.is_current:
                raise StoreUnavailable("Changes of definitions cannot be learnt of now.")
            found = {one.address: one for one in await self._register_media(rows) if one.noun is Noun.source}
            routes: dict[str, list[StoredDefinition]] = {}
            for one in rows:
                if one.source is not None:
                    routes.setdefault(one.source, []).append(one)
            for n, (address, path) in enumerate(addresses.items(), 1):
                if n % BUILT_AT_ONCE == 0:
                    await asyncio.sleep(0)
                definition = found.get(address)
                if changed and (address in changed or (definition is not None and definition.name in changed)):
                    continue  # it changed while it was read: the next batch reads it again
                self._decide(path, address, definition, () if definition is None else routes.get(definition.name, ()))

    async def _register_media(self, rows: Sequence[StoredDefinition]) -> Sequence[StoredDefinition]:
        """Give the destinations that keep media their ids: once for each source, when it is first loaded."""
        new = [one.name for one in rows if one.noun is Noun.source and one.media_id is None and keeps_media(one)]
        if not new:
            return rows
        ids = (await self._host.store.register_names((), map(media_destination, new))).destinations
        return [replace(one, media_id=ids[media_destination(one.name)]) if one.name in new else one for one in rows]

    def _decide(
        self, path: str, address: bytes, definition: StoredDefinition | None, routes: Sequence[StoredDefinition]
    ) -> None:
        """Keep what was read, and answer who waits for it."""
        source: Source | None = None
        error: StoreUnavailable | None = None
        if definition is None or not definition.is_enabled:
            self._unknown[address] = None
            if len(self._unknown) > MOST_UNKNOWN:
                self._unknown.popitem(last=False)
        else:
            kept = self._keep(path, definition, routes)
            source, error = kept.source, kept.error
        if (lookup := self._lookups.pop(path, None)) is not None:
            lookup.decide(source, error)

    def _keep(self, path: str, definition: StoredDefinition, routes: Sequence[StoredDefinition]) -> StoredSource:
        """Keep a source that was read, compiled, with its routes; also that it cannot be used, until it changes."""
        name = definition.name
        try:
            source = stored.source_from(self._host.vault, definition)
        except (ConfigError, Undecryptable) as error:
            fields = {"source": name, "error": str(error), "hint": error.hint}
            ration.log(log, logging.ERROR, "source.unusable", fields, kind=name)
            kept = StoredSource(self, name, None, StoreUnavailable(f"{name} cannot be used now."))
        else:
            kept = StoredSource(self, name, source)
            if source.settings.media is not None and source.base.media_api is not None:
                assert definition.media_id is not None, "it was registered"
                to = media_destination(name)
                kept.media = MediaRoute(name, to, source.base.media_api, destination_id=definition.media_id)
            self._host.note_source(source)
        self._sources[path] = kept
        self._paths[name] = path
        if kept.source is not None:
            self._add_routes(name, routes, kept.source.base.coalesce)
        while len(self._sources) > MOST_SOURCES:
            self._drop_source(next(iter(self._sources)), is_over=False)
        return kept

    async def find_source(self, name: str, *, is_enabled: bool = True) -> Source | None:
        """Return a source by its name: the inbox's own, or a stored one that is enabled; without `is_enabled`, also a
        disabled one. Raises StoreUnavailable."""
        if (own := self._host.sources.get(name)) is not None or (self._is_running and not self.version):
            return own
        if (path := self._paths.get(name)) is not None:
            return await self.find_source_at(path)
        (definition,) = await self._host.store.find_definitions(Noun.source, [name]) or (None,)
        if definition is None or (is_enabled and not definition.is_enabled):
            return None
        try:
            made = stored.source_from(self._host.vault, definition)
        except (ConfigError, Undecryptable) as error:
            raise StoreUnavailable(str(error), hint=error.hint) from None
        return await self.find_source_at(made.path) if self._is_running and definition.is_enabled else made

    async def find_source_at(self, path: str) -> Source | None:
        """Return the stored source at a path. Raises StoreUnavailable."""
        found = self.at(path)
        if isinstance(found, Lookup):
            await found.wait()
            return found.result()
        return found

    async def read_keep_events(self) -> dict[int, float]:
        """Return how long events of stored sources are kept, in seconds by source id, where they say it."""
        if self.version != self._kept_version:
            version, found = self.version, await self._host.store.find_kept_sources()
            self._kept_version, self._kept = version, stored.read_keep_events(found)
        return self._kept

    # -- routes --------------------------------------------------------------------------------

    async def load_routes(self, sources: Collection[str]) -> None:
        """Load the stored routes of names under which events are emitted, and subscriptions of accounts."""
        if not self.version or (self.is_current and all(map(self.has_routes, sources))):
            return
        await self._load_routes(set(sources))
        while len(self._routed) > MOST_ROUTED:
            self._drop_routes(next(iter(self._routed)))

    def has_routes(self, source: str) -> bool:
        """Tell whether the stored routes of a name are loaded, or there are none; on any thread."""
        return not self.version or source in self._routed or source in self._paths

    async def _load_routes(self, sources: set[str]) -> None:
        while sources:
            with self._reading() as changed:
                rows = await self._host.store.find_routes(sorted(sources))
            again = sources & changed
            for source in sources - again:
                self._take_routes(source, [one for one in rows if one.source == source])
            sources = again

    def _take_routes(self, source: str, rows: Iterable[StoredDefinition]) -> None:
        self._drop_routes(source)
        self._routed[source] = None
        known = self._host.sources.get(source)
        self._add_routes(source, rows, known.base.coalesce if known else False)

    def _add_routes(self, source: str, rows: Iterable[StoredDefinition], coalesce: bool | str) -> None:
        made = list(self._own_routes.get(source, ()))
        for one in rows:
            assert one.destination is not None
            self._reaches.setdefault(one.destination, set()).add(source)
            if one.is_enabled and not one.is_led_nowhere:
                try:
                    found = stored.routes_from(one, coalesce)
                    if (to := self._host.destinations.get(one.destination)) is not None:
                        found[0].lead_to(to.terms)
                    made += found
                except ConfigError as error:
                    fields = {"route": one.name, "error": str(error)}
                    ration.log(log, logging.ERROR, "route.unusable", fields, kind=one.name)
        if (path := self._paths.get(source)) is not None and (media := self._sources[path].media) is not None:
            made.append(media)
        if made:
            self.routes[source] = made

    def load_routes_blocking(self, sources: Collection[str]) -> None:
        """Load the stored routes of names on a thread, where the inbox need not run (PostgreSQL)."""
        now = clock.steady()
        stale = [one for one in sources if now - self._read_at.get(one, -BLOCKING_FRESH) >= BLOCKING_FRESH]
        if stale:
            rows = self._host.store.find_routes_blocking(stale)
            if len(self._read_at) > MOST_SOURCES:
                self._read_at.clear()
            for source in stale:
                self._take_routes(source, [one for one in rows if one.source == source])
                self._read_at[source] = now

    # -- destinations --------------------------------------------------------------------------

    async def load_destinations(self, ids: Collection[int]) -> dict[int, Destination]:
        """Build those of these destinations that are stored, enabled, and not the inbox's own."""
        if not self.version:
            return {}
        made: dict[int, Destination] = {}
        for definition in await self._host.store.find_destinations(ids):
            if definition.is_enabled and definition.name not in self._host.destinations:
                built = self._build_destination(definition)
                if built is not None:
                    made[definition.id] = built
        if others := [id_ for id_ in ids if id_ not in made]:
            for id_, name in (await self._host.store.find_destination_names(others)).items():
                if (source := media_source(name)) is not None and name not in self._host.destinations:
                    made[id_] = self._build_media(name, source, id_)
        return made

    def _build_media(self, name: str, source: str, id_: int) -> Destination:
        """Build the destination that keeps the media of a stored source. It has no settings of its own, and reads those
        of the source at each attempt; also for one that is gone, so that what waits ends as a dead letter."""
        made = MediaDestination(name, source, self._host.keep_stored_media)
        made.id = id_
        return made

    async def find_senders(self, account: str | None) -> list[Destination]:
        """Return the stored destinations of an account that are no URLs; None: of those without an account, as far as
        they are among the first MOST_SENDERS destinations by name."""
        if not self.version:
            return []
        found = await self._host.store.list_definitions(Noun.destination, account=account, limit=MOST_SENDERS)
        meant = [one for one in found if one.account == account and one.is_enabled and _is_sender(one)]
        return [made for one in meant if (made := self._build_destination(one)) is not None]

    async def find_destinations(self, names: Collection[str]) -> dict[str, Destination]:
        """Return those of these destinations that are the inbox's own, or stored, disabled ones too."""
        own = {name: self._host.destinations[name] for name in names if name in self._host.destinations}
        others = [name for name in names if name not in own]
        if not others or (self._is_running and not self.version):
            return own
        rows = await self._host.store.find_definitions(Noun.destination, others)
        made = {row.name: self._build_destination(row) for row in rows}
        if keeping := [source for name in others if (source := media_source(name)) is not None]:
            for row in await self._host.store.find_definitions(Noun.source, keeping):
                if row.media_id is not None:
                    to = media_destination(row.name)
                    made[to] = self._build_media(to, row.name, row.media_id)
        return {**own, **{name: one for name, one in made.items() if one is not None}}

    def _build_destination(self, definition: StoredDefinition) -> Destination | None:
        try:
            made, ends_at = stored.destination_from(self._host.vault, definition)
        except (ConfigError, Undecryptable) as error:
            fields = {"destination": definition.name, "error": str(error), "hint": error.hint}
            ration.log(log, logging.ERROR, "destination.unusable", fields, kind=definition.name)
            return None
        if ends_at is not None and self._is_running:
            self._forget_at(definition.id, ends_at)
        return made

    def _forget_at(self, destination_id: int, ends_at: datetime) -> None:
        """Build a destination anew when one of its secrets ends. It is built for many reasons; one timer is enough."""
        wait = min(max((ends_at - clock.now_utc()).total_seconds(), 0.0), 86_400.0)

        def forget() -> None:
            del self._timers[destination_id]
            self._host.note_changed([destination_id])

        before = self._timers.get(destination_id)
        if before is None or before.when() > asyncio.get_running_loop().time() + wait + 1.0:
            if before is not None:
                before.cancel()
            self._timers[destination_id] = asyncio.get_running_loop().call_later(wait, forget)


def keeps_media(definition: StoredDefinition) -> bool:
    """Tell whether a stored source keeps the files that its events refer to."""
    return "media" in stored.show(definition)


def _is_sender(definition: StoredDefinition) -> bool:
    return not stored.show(definition).keys().isdisjoint(registry.names())
