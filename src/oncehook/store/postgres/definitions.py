"""Stored definitions on PostgreSQL: sources, destinations and routes, and the version that every change raises.

A change takes the row of the version first, so versions are in order of commit, and whoever reads what is newer than
the version it knows misses nothing. Its notification is part of its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import psycopg

from oncehook import clock, faults
from oncehook.errors import Exists, InUse, StoreError
from oncehook.model import DefinitionChange, DefinitionChanges, DefinitionWrite, Id, Noun, StoredDefinition
from oncehook.store.base import (
    MOST_CHANGES,
    StoreObserver,
    account_in_use,
    check_expected,
    name_taken,
    name_was_anothers,
)
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.admin import close_deliveries
from oncehook.store.postgres.connection import (
    AUDIT,
    PRUNING,
    Connection,
    Database,
    Ids,
    Integers,
    StoreConnection,
    StorePart,
    Texts,
    blocking_session,
    clean_text,
    connect,
    cut,
    fetch_all,
    fetch_one,
)
from oncehook.store.postgres.queue import FIRST_WAIT, LISTEN_FOR_DEFINITIONS, LONGEST_WAIT, notify_channel

log = logging.getLogger("oncehook.store")

POLL: Final = 0.4
"""Seconds between two looks for changes, where no notification comes before."""
FRESH: Final = 0.9
"""Seconds after the beginning of a look for which its answer counts: a change that it missed is a second old at most
when an arrival is acknowledged by what it told."""
LONGEST_GAP: Final = 3600.0
"""Seconds without a look after which rows of deleted definitions may have gone unnoticed."""

_COLUMNS: Final = """
SELECT d.noun, d.name, d.id, d.account, d.address, d.source, d.destination, d.settings, d.secrets, d.enabled, d.version,
  d.created_at, d.changed_at, d.noun = 'route' AND EXISTS (
    SELECT FROM definitions t WHERE t.noun = 'destination' AND t.name = d.destination AND NOT t.deleted
      AND NOT t.enabled),
  CASE d.noun WHEN 'route' THEN (
    SELECT t.settings FROM definitions t WHERE t.noun = 'destination' AND t.name = d.destination AND NOT t.deleted) END,
  CASE d.noun WHEN 'source' THEN (SELECT t.id FROM destinations t WHERE t.name = d.name || '.media') END
FROM definitions d WHERE NOT d.deleted
"""
_NAMED: Final = _COLUMNS + " AND d.noun = $1 AND d.name = ANY($2::text[]) ORDER BY d.name"
_AT: Final = _COLUMNS + " AND d.address IS NOT NULL AND d.address = ANY($1::uuid[])"
_FROM: Final = _COLUMNS + " AND d.source IS NOT NULL AND d.source = ANY($1::text[]) ORDER BY d.name"
_TO: Final = _COLUMNS + " AND d.destination IS NOT NULL AND d.destination = ANY($1::text[]) LIMIT $2"
_BY_ID: Final = _COLUMNS + " AND d.noun = 'destination' AND d.id = ANY($1::integer[])"
_DESTINATION_NAMES: Final = "SELECT id, name FROM destinations WHERE id = ANY($1::integer[])"
_LIST: Final = _COLUMNS + " AND d.noun = $1 AND d.name > $2 ORDER BY d.name LIMIT $3"
_LIST_OF: Final = (
    _COLUMNS + " AND d.account IS NOT NULL AND d.account = $4 AND d.noun = $1 AND d.name > $2 ORDER BY d.name LIMIT $3"
)
_DELETED: Final = "SELECT 1 FROM definitions WHERE noun = $1 AND name = $2 AND deleted"
_KEPT: Final = _COLUMNS + """ AND d.noun = 'source' AND d.settings LIKE '%"keep_events"%'"""
STATE: Final = """
SELECT (SELECT value FROM marks WHERE name = 'definitions'), (SELECT value FROM marks WHERE name = 'largest_body')
"""
CHANGES: Final = """
SELECT version, noun, name, id, address, source, destination, enabled AND NOT deleted FROM definitions
WHERE version > $1 ORDER BY version LIMIT $2
"""
_RAISE: Final = "UPDATE marks SET value = value + 1 WHERE name = 'definitions' RETURNING value"
_LARGEST: Final = "UPDATE marks SET value = $1 WHERE name = 'largest_body' AND value < $1"
_VERSION_OF: Final = """
SELECT version FROM definitions WHERE noun = $1 AND name = $2 AND NOT deleted FOR UPDATE
"""
_KEEP: Final = """
INSERT INTO definitions AS d (noun, name, id, account, address, source, destination, settings, secrets, enabled,
  version, created_at, changed_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, now(), now())
ON CONFLICT (noun, name) DO UPDATE SET id = $3, account = $4, address = $5, source = $6, destination = $7,
  settings = $8, secrets = $9, enabled = $10, version = $11, changed_at = now(), deleted = false,
  created_at = CASE WHEN d.deleted THEN now() ELSE d.created_at END
"""
_DELETE: Final = """
UPDATE definitions SET deleted = true, secrets = NULL, settings = '{}', version = $3, changed_at = now()
WHERE noun = $1 AND name = $2
"""
_LEADING: Final = """
SELECT name FROM definitions WHERE NOT deleted AND noun = 'route'
  AND ($1 = 'source' AND source = $2 OR $1 = 'destination' AND destination = $2)
"""
_SOURCE_ID: Final = """
WITH new AS (                            -- an id is not used up by a name that has one
  INSERT INTO sources (name, account) SELECT $1, $2 WHERE NOT EXISTS (SELECT FROM sources WHERE name = $1)
  ON CONFLICT DO NOTHING RETURNING id, account
)
SELECT id, account FROM new UNION ALL SELECT id, account FROM sources WHERE name = $1
"""
_DESTINATION_ID: Final = """
WITH new AS (                            -- an id is not used up by a name that has one
  INSERT INTO destinations (name, account) SELECT $1, $2 WHERE NOT EXISTS (SELECT FROM destinations WHERE name = $1)
  ON CONFLICT DO NOTHING RETURNING id, account
)
SELECT id, account FROM new UNION ALL SELECT id, account FROM destinations WHERE name = $1
"""
_WAITING: Final = "SELECT EXISTS (SELECT FROM heads WHERE destination_id = $1)"
_NOTIFY: Final = "SELECT pg_notify($1, '')"
_OPEN: Final = """
SELECT id FROM deliveries WHERE status <> 'done' AND status IN ('pending', 'dead') AND destination_id = $1 AND id < $2
ORDER BY id LIMIT $3
"""


_NAMES_TAKEN: Final = "SELECT name, account FROM account_names WHERE name = ANY($1::text[]) AND account <> $2"
_NAME: Final = """
INSERT INTO account_names (name, account) SELECT DISTINCT name, $2::text FROM unnest($1::text[]) AS i(name)
ON CONFLICT (name) DO UPDATE SET account = $2
"""
_UNNAME: Final = "DELETE FROM account_names WHERE account = $1 AND ($2::text[] IS NULL OR name <> ALL($2::text[]))"
_TOUCH: Final = "UPDATE definitions SET version = $2, changed_at = now() WHERE noun = 'account' AND name = $1"
_OWNED: Final = """
SELECT noun, name FROM definitions WHERE account IS NOT NULL AND NOT deleted AND account = $1 AND noun <> 'account'
LIMIT 1
"""
_NAMED_ACCOUNTS: Final = "SELECT name, account FROM account_names WHERE name = ANY($1::text[])"
_ALIASES: Final = """
SELECT account, name FROM account_names WHERE account = ANY($1::text[]) AND name <> account ORDER BY name COLLATE "C"
"""


class DefinitionsWatch:
    """Learns of changes of definitions, wherever they are made: by notification, and by a look every POLL seconds.

    A look also proves that this process still reaches the store. Lives on one event loop.
    """

    def __init__(self, database: Database, observer: Callable[[], StoreObserver]) -> None:
        self.channel = notify_channel(database.schema) + "_d"
        self._database = database
        self._observer = observer
        self._task: asyncio.Task[None] | None = None
        self._looked_at = -FRESH
        self._version = -1
        """The last version that was reported."""
        self._looking = asyncio.Lock()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="oncehook-definitions")

    async def close(self) -> None:
        while self._task is not None and not self._task.done():  # repeatedly: the driver can lose a cancellation
            self._task.cancel()
            await asyncio.wait([self._task], timeout=0.5)
        self._task = None

    @property
    def learns_changes(self) -> bool:
        return clock.steady() - self._looked_at < FRESH

    async def look(self, connection: Connection) -> None:
        """Read what has changed, and report it."""
        async with self._looking:
            began = clock.steady()
            is_old = began - self._looked_at > LONGEST_GAP
            changes = await read_changes(connection, -1 if is_old else self._version)
            if changes.version != self._version or changes.since < 0:
                self._version = changes.version
                self._observer().note_definitions(changes)
            self._looked_at = began

    async def _watch(self) -> None:
        wait = FIRST_WAIT
        while True:
            try:
                async with await connect(self._database) as connection:
                    if not connection.is_pooled:
                        await connection.configure({"oncehook.channel": self.channel})
                        await connection.execute(LISTEN_FOR_DEFINITIONS)
                    while True:
                        guard = asyncio.get_running_loop().call_later(1.0, cut, connection)
                        try:
                            await self.look(connection)
                        finally:
                            guard.cancel()
                        wait = FIRST_WAIT
                        await self._rest(connection)
            except (psycopg.Error, OSError, StoreError) as error:
                log.debug("store.watch_failed", extra={"fields": {"error": str(error)}})
            await asyncio.sleep(wait * clock.chance.uniform(0.5, 1.0))
            wait = min(wait * 2, LONGEST_WAIT)

    async def _rest(self, connection: StoreConnection) -> None:
        """Wait for a notification, or for the next look."""
        if connection.is_pooled:  # notifications would go to whoever has that session then
            await asyncio.sleep(POLL)
            return
        async with contextlib.aclosing(connection.notifies(timeout=POLL, stop_after=1)) as notifications:
            async for _ in notifications:
                pass


class PostgresDefinitions(StorePart):
    def __init__(self, database: Database, cipher: Cipher) -> None:
        super().__init__(database, cipher)
        self.watch = DefinitionsWatch(database, lambda: self.observer)

    async def write_definition(self, write: DefinitionWrite) -> StoredDefinition | None:
        try:
            async with self.connection() as connection:
                async with connection.transaction():
                    made = await self._write_definition(connection, write)
                faults.point("before_definition_notice")
                await self.watch.look(connection)  # this process learns of its own change before the answer
        except StoreError as error:
            if isinstance(error.__cause__, psycopg.errors.UniqueViolation):
                raise Exists("Another source has this address.") from None
            raise
        return made

    async def _write_definition(self, connection: Connection, write: DefinitionWrite) -> StoredDefinition | None:
        (version,) = await fetch_one(connection, _RAISE)
        found = await fetch_all(connection, _VERSION_OF, [write.noun.value, write.name])
        check_expected(write, found[0][0] if found else None)
        made: StoredDefinition | None = None
        if write.noun is Noun.account and (write.act == "delete" or not write.is_enabled):
            await connection.execute("DELETE FROM sessions WHERE account = $1", [write.name])
        if write.act == "delete":
            await self._delete(connection, write, version)
        else:
            if write.noun is Noun.account:
                version = await self._name(connection, write, version)
            id_ = 0 if write.noun is Noun.account else await self._id_of(connection, write, is_new=not found)
            await connection.execute(_LARGEST, [write.largest_body])
            address = None if write.address is None else Id(write.address)
            ends = [address, write.source, write.destination]
            content = [write.settings, write.secrets, write.is_enabled]
            keeping = [write.noun.value, write.name, id_, write.account, *ends, *content, version]
            await connection.execute(_KEEP, keeping)
            made = (await _select_definitions(connection, _NAMED, [write.noun.value, Texts([write.name])]))[0]
        target = f"{write.noun} {write.name}"
        await connection.execute(AUDIT, [clean_text(write.actor), write.act, clean_text(target), write.detail])
        await connection.execute(_NOTIFY, [self.watch.channel])
        return made

    async def _name(self, connection: Connection, write: DefinitionWrite, version: int) -> int:
        """Give an account its names. Raises Exists for one of another account, unless aliases are moved."""
        names = Texts([write.name, *write.aliases])
        for taken, other in await fetch_all(connection, _NAMES_TAKEN, [names, write.name]):
            if not write.moves or taken in (write.name, other):
                raise name_taken(taken, write.name)
            await connection.execute(_TOUCH, [other, version])  # it is told like a change of that account
            (version,) = await fetch_one(connection, _RAISE)
        await connection.execute(_NAME, [names, write.name])
        await connection.execute(_UNNAME, [write.name, names])
        return version

    async def _id_of(self, connection: Connection, write: DefinitionWrite, *, is_new: bool) -> int:
        """Return the id of the definition's name, or of a route's destination; register the name where it is new.

        Raises Exists for a new definition under a name that was another account's.
        """
        if write.noun is Noun.route:
            id_, _ = await fetch_one(connection, _DESTINATION_ID, [write.destination, None])
            return int(id_)
        owned = [write.name, write.account]
        if write.noun is Noun.source:
            id_, owner = await fetch_one(connection, _SOURCE_ID, owned)
            self.source_names[id_] = write.name
        else:
            id_, owner = await fetch_one(connection, _DESTINATION_ID, owned)
        if owner != write.account and is_new:
            raise name_was_anothers(write.name)
        if owner != write.account and write.noun is Noun.source:
            await connection.execute("UPDATE sources SET account = $2 WHERE id = $1", [id_, write.account])
        elif owner != write.account:
            await connection.execute("UPDATE destinations SET account = $2 WHERE id = $1", [id_, write.account])
        return int(id_)

    async def _delete(self, connection: Connection, write: DefinitionWrite, version: int) -> None:
        (before,) = await _select_definitions(connection, _NAMED, [write.noun.value, Texts([write.name])])
        if write.noun is Noun.destination and write.unless_waiting:
            (is_waited_for,) = await fetch_one(connection, _WAITING, [before.id])
            if is_waited_for:
                raise InUse(f"Deliveries still wait for {before.name}.")
        if write.noun is Noun.account:
            if found := await fetch_all(connection, _OWNED, [write.name]):
                raise account_in_use(write.name, *found[0])
            await connection.execute(_UNNAME, [write.name, None])
        for (name,) in await fetch_all(connection, _LEADING, [write.noun.value, write.name]):
            await connection.execute(_DELETE, [Noun.route.value, name, version])
            (version,) = await fetch_one(connection, _RAISE)
        await connection.execute(_DELETE, [write.noun.value, write.name, version])

    async def discard_waiting(self, destination_id: int, before: bytes, reason: str, limit: int = 200) -> int:
        async with self.hold_lock(PRUNING) as connection:
            found = await fetch_all(connection, _OPEN, [destination_id, Id(before), limit])
            closed = 0
            if found:
                closed = await close_deliveries(connection, Ids([row[0] for row in found]), clean_text(reason))
        if closed:
            self.notify_due()
        return closed

    async def find_definitions(self, noun: Noun, names: Collection[str]) -> list[StoredDefinition]:
        return await self._ask_definitions(_NAMED, [noun.value, Texts([clean_text(name) for name in names])])

    async def find_sources(self, addresses: Collection[bytes]) -> list[StoredDefinition]:
        found = await self._ask_definitions(_AT, [Ids(list(addresses))])
        self.source_names.update({one.id: one.name for one in found})
        return found + await self.find_routes([one.name for one in found])

    async def find_routes(self, sources: Collection[str]) -> list[StoredDefinition]:
        return await self._ask_definitions(_FROM, [Texts(list(sources))]) if sources else []

    async def find_routes_to(self, destinations: Collection[str]) -> list[StoredDefinition]:
        return await self._ask_definitions(_TO, [Texts(list(destinations)), MOST_CHANGES]) if destinations else []

    def find_routes_blocking(self, sources: Collection[str]) -> list[StoredDefinition]:
        with blocking_session(self.database) as connection:
            found: Any = connection.execute(_FROM, [Texts(list(sources))], binary=True).fetchall()
        return [_read(row) for row in found]

    async def find_destinations(self, ids: Collection[int]) -> list[StoredDefinition]:
        return await self._ask_definitions(_BY_ID, [Integers(list(ids))])

    async def find_destination_names(self, ids: Collection[int]) -> dict[int, str]:
        async with self.connection() as connection:
            return dict(await fetch_all(connection, _DESTINATION_NAMES, [Integers(list(ids))]))

    async def list_definitions(
        self, noun: Noun, *, account: str | None = None, after: str = "", limit: int = 50
    ) -> list[StoredDefinition]:
        if account is None:
            return await self._ask_definitions(_LIST, [noun.value, clean_text(after), limit])
        return await self._ask_definitions(_LIST_OF, [noun.value, clean_text(after), limit, clean_text(account)])

    async def find_accounts(self, names: Collection[str]) -> dict[str, StoredDefinition]:
        async with self.connection() as connection:
            asked = [Texts([clean_text(name) for name in names])]
            rows = dict(await fetch_all(connection, _NAMED_ACCOUNTS, asked)) if names else {}
            meant = [Noun.account.value, Texts(sorted(set(rows.values())))]
            found = {one.name: one for one in await _select_definitions(connection, _NAMED, meant)} if rows else {}
        return {name: found[account] for name, account in rows.items() if account in found}

    async def aliases_of(self, accounts: Collection[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        async with self.connection() as connection:
            rows = await fetch_all(connection, _ALIASES, [Texts(list(accounts))]) if accounts else []
        for account, name in rows:
            found.setdefault(account, []).append(name)
        return found

    async def was_deleted(self, noun: Noun, name: str) -> bool:
        async with self.connection() as connection:
            return bool(await fetch_all(connection, _DELETED, [noun.value, clean_text(name)]))

    async def find_kept_sources(self) -> list[StoredDefinition]:
        return await self._ask_definitions(_KEPT, [])

    async def definition_changes(self, since: int) -> DefinitionChanges:
        async with self.connection() as connection:
            return await read_changes(connection, since)

    async def _ask_definitions(self, statement: str, asked: Sequence[object]) -> list[StoredDefinition]:
        async with self.connection() as connection:
            return await _select_definitions(connection, statement, asked)

    @property
    def learns_changes(self) -> bool:
        return self.watch.learns_changes


async def read_changes(connection: Connection, since: int) -> DefinitionChanges:
    """Return what has changed since a version; the version is read first, so that nothing is left out."""
    version, largest = await fetch_one(connection, STATE)
    rows = await fetch_all(connection, CHANGES, [since, MOST_CHANGES]) if 0 <= since < version else []
    if since < 0 or len(rows) == MOST_CHANGES:
        return DefinitionChanges(version, largest, -1)
    changed = [DefinitionChange(row[0], Noun(row[1]), *row[2:]) for row in rows]
    return DefinitionChanges(max(version, *(one.version for one in changed), 0), largest, since, changed)


async def _select_definitions(
    connection: Connection, statement: str, asked: Sequence[object]
) -> list[StoredDefinition]:
    return [_read(row) for row in await fetch_all(connection, statement, asked)]


def _read(row: Sequence[Any]) -> StoredDefinition:
    return StoredDefinition(Noun(row[0]), *row[1:])
