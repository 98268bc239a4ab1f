"""Stored definitions on SQLite: sources, destinations and routes, and the version that every change raises."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any, Final

from oncehook.errors import Exists, InUse
from oncehook.model import DefinitionChange, DefinitionChanges, DefinitionWrite, Noun, StoredDefinition
from oncehook.store.base import MOST_CHANGES, account_in_use, check_expected, name_taken, name_was_anothers
from oncehook.store.sqlite.connection import Micros, clean_text, moment, write_audit

_COLUMNS: Final = """
SELECT d.noun, d.name, d.id, d.account, d.address, d.source, d.destination, d.settings, d.secrets, d.enabled, d.version,
  d.created_at, d.changed_at, d.noun = 'route' AND EXISTS (
    SELECT 1 FROM definitions t WHERE t.noun = 'destination' AND t.name = d.destination AND NOT t.deleted
      AND NOT t.enabled),
  CASE d.noun WHEN 'route' THEN (
    SELECT t.settings FROM definitions t WHERE t.noun = 'destination' AND t.name = d.destination AND NOT t.deleted) END,
  CASE d.noun WHEN 'source' THEN (SELECT t.id FROM destinations t WHERE t.name = d.name || '.media') END
FROM definitions d WHERE NOT d.deleted
"""
_NAMED: Final = _COLUMNS + " AND d.noun = ?1 AND d.name IN (SELECT value FROM json_each(?2)) ORDER BY d.name"
_AT: Final = _COLUMNS + " AND d.address IS NOT NULL AND d.address = ?1"
_FROM: Final = _COLUMNS + " AND d.source IS NOT NULL AND d.source IN (SELECT value FROM json_each(?1)) ORDER BY d.name"
_TO: Final = _COLUMNS + " AND d.destination IS NOT NULL AND d.destination IN (SELECT value FROM json_each(?1)) LIMIT ?2"
_BY_ID: Final = _COLUMNS + " AND d.noun = 'destination' AND d.id IN (SELECT value FROM json_each(?1))"
_NAMES: Final = "SELECT id, name FROM destinations WHERE id IN (SELECT value FROM json_each(?1))"
_LIST: Final = _COLUMNS + " AND d.noun = ?1 AND d.name > ?2 ORDER BY d.name LIMIT ?3"
_LIST_OF: Final = (
    _COLUMNS + " AND d.account IS NOT NULL AND d.account = ?4 AND d.noun = ?1 AND d.name > ?2 ORDER BY d.name LIMIT ?3"
)
_KEPT: Final = _COLUMNS + """ AND d.noun = 'source' AND d.settings LIKE '%"keep_events"%'"""
_STATE: Final = """
SELECT (SELECT value FROM marks WHERE name = 'definitions'), (SELECT value FROM marks WHERE name = 'largest_body')
"""
_CHANGES: Final = """
SELECT version, noun, name, id, address, source, destination, enabled AND NOT deleted FROM definitions
WHERE version > ?1 ORDER BY version LIMIT ?2
"""
_RAISE: Final = "UPDATE marks SET value = value + 1 WHERE name = 'definitions' RETURNING value"
_LARGEST: Final = "UPDATE marks SET value = max(value, ?1) WHERE name = 'largest_body'"
_KEEP: Final = """
INSERT INTO definitions (noun, name, id, account, address, source, destination, settings, secrets, enabled, version,
  created_at, changed_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?12)
ON CONFLICT (noun, name) DO UPDATE SET id = ?3, account = ?4, address = ?5, source = ?6, destination = ?7,
  settings = ?8, secrets = ?9, enabled = ?10, version = ?11, changed_at = ?12, deleted = 0,
  created_at = CASE WHEN deleted THEN ?12 ELSE created_at END
"""
_DELETE: Final = """
UPDATE definitions SET deleted = 1, secrets = NULL, settings = '{}', version = ?3, changed_at = ?4
WHERE noun = ?1 AND name = ?2
"""
_LEADING: Final = """
SELECT name FROM definitions WHERE NOT deleted AND noun = 'route'
  AND (?1 = 'source' AND source = ?2 OR ?1 = 'destination' AND destination = ?2)
"""
_WAITING: Final = "SELECT 1 FROM heads WHERE destination_id = ? LIMIT 1"
_TAKEN: Final = """
SELECT 1 FROM definitions WHERE address IS NOT NULL AND NOT deleted AND address = ?1 AND name <> ?2
"""
_DELETED: Final = "SELECT 1 FROM definitions WHERE noun = ? AND name = ? AND deleted"
_FORGET: Final = "DELETE FROM definitions WHERE deleted AND changed_at < ?1"


_NAME_TAKEN: Final = "SELECT name, account FROM account_names WHERE name = ?1 AND account <> ?2"
_NAME: Final = "INSERT INTO account_names (name, account) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET account = ?2"
_UNNAME: Final = "DELETE FROM account_names WHERE account = ?1 AND name NOT IN (SELECT value FROM json_each(?2))"
_TOUCH: Final = "UPDATE definitions SET version = ?2, changed_at = ?3 WHERE noun = 'account' AND name = ?1"
_OWNED: Final = """
SELECT noun, name FROM definitions WHERE account IS NOT NULL AND NOT deleted AND account = ?1 AND noun <> 'account'
LIMIT 1
"""
_NAMED_ACCOUNTS: Final = """
SELECT n.name, n.account FROM json_each(?1) i CROSS JOIN account_names n ON n.name = i.value
"""
_ALIASES: Final = """
SELECT n.account, n.name FROM json_each(?1) i CROSS JOIN account_names n ON n.account = i.value
WHERE n.name <> n.account ORDER BY n.name
"""


class Defining:
    """One change of a definition, inside one transaction."""

    def __init__(self, connection: sqlite3.Connection, now: Micros, write: DefinitionWrite) -> None:
        self._connection, self._now, self._write = connection, now, write
        self.changed: list[DefinitionChange] = []

    def run(self) -> StoredDefinition | None:
        write = self._write
        (before,) = find_definitions(self._connection, write.noun, [write.name]) or (None,)
        check_expected(write, None if before is None else before.version)
        if write.noun is Noun.account and (write.act == "delete" or not write.is_enabled):
            self._connection.execute("DELETE FROM sessions WHERE account = ?", (write.name,))
        if write.act == "delete":
            assert before is not None
            self._delete(before)
            self._audit()
            return None
        if write.address is not None and self._connection.execute(_TAKEN, (write.address, write.name)).fetchone():
            raise Exists("Another source has this address.")
        id_ = 0 if write.noun is Noun.account else self._id_of(write, is_new=before is None)
        if write.noun is Noun.account:
            self._name(write)
        version = self._raise()
        self._connection.execute(_LARGEST, (write.largest_body,))
        ends = (write.address, write.source, write.destination)
        content = (write.settings, write.secrets, write.is_enabled)
        self._connection.execute(
            _KEEP, (write.noun, write.name, id_, write.account, *ends, *content, version, self._now)
        )
        self.changed.append(DefinitionChange(version, write.noun, write.name, id_, *ends, write.is_enabled))
        self._audit()
        return find_definitions(self._connection, write.noun, [write.name])[0]

    def _id_of(self, write: DefinitionWrite, *, is_new: bool) -> int:
        """Return the id of the definition's name, or of a route's destination; register the name where it is new.

        Raises Exists for a new definition under a name that was another account's.
        """
        if write.noun is Noun.route:
            self._connection.execute("INSERT OR IGNORE INTO destinations (name) VALUES (?)", (write.destination,))
            found = self._connection.execute("SELECT id FROM destinations WHERE name = ?", (write.destination,))
            return int(found.fetchone()[0])
        owned = (write.name, write.account)
        if write.noun is Noun.source:
            self._connection.execute("INSERT OR IGNORE INTO sources (name, account) VALUES (?, ?)", owned)
            found = self._connection.execute("SELECT id, account FROM sources WHERE name = ?", (write.name,))
        else:
            self._connection.execute("INSERT OR IGNORE INTO destinations (name, account) VALUES (?, ?)", owned)
            found = self._connection.execute("SELECT id, account FROM destinations WHERE name = ?", (write.name,))
        id_, owner = found.fetchone()
        if owner != write.account and is_new:
            raise name_was_anothers(write.name)
        if owner != write.account and write.noun is Noun.source:
            self._connection.execute("UPDATE sources SET account = ? WHERE id = ?", (write.account, id_))
        elif owner != write.account:
            self._connection.execute("UPDATE destinations SET account = ? WHERE id = ?", (write.account, id_))
        return int(id_)

    def _delete(self, before: StoredDefinition) -> None:
        is_waited_for = before.noun is Noun.destination and self._write.unless_waiting
        if is_waited_for and self._connection.execute(_WAITING, (before.id,)).fetchone():
            raise InUse(f"Deliveries still wait for {before.name}.")
        if before.noun is Noun.account:
            if found := self._connection.execute(_OWNED, (before.name,)).fetchone():
                raise account_in_use(before.name, *found)
            self._connection.execute(_UNNAME, (before.name, "[]"))
        leading = self._connection.execute(_LEADING, (before.noun, before.name)).fetchall()
        routes = find_definitions(self._connection, Noun.route, [name for (name,) in leading])
        for one in (*routes, before):
            version = self._raise()
            self._connection.execute(_DELETE, (one.noun, one.name, version, self._now))
            ends = (one.address, one.source, one.destination)
            self.changed.append(DefinitionChange(version, one.noun, one.name, one.id, *ends, is_enabled=False))

    def _name(self, write: DefinitionWrite) -> None:
        """Give an account its names. Raises Exists for one of another account, unless aliases are moved."""
        names = [write.name, *write.aliases]
        for name in names:
            for taken, other in self._connection.execute(_NAME_TAKEN, (name, write.name)).fetchall():
                if not write.moves or taken in (write.name, other):
                    raise name_taken(taken, write.name)
                version = self._raise()  # it is told like a change of that account
                self._connection.execute(_TOUCH, (other, version, self._now))
                self.changed.append(
                    DefinitionChange(version, Noun.account, other, 0, None, None, None, is_enabled=True)
                )
            self._connection.execute(_NAME, (name, write.name))
        self._connection.execute(_UNNAME, (write.name, _list(names)))

    def _raise(self) -> int:
        return int(self._connection.execute(_RAISE).fetchone()[0])

    def _audit(self) -> None:
        write = self._write
        target = f"{write.noun} {write.name}"
        write_audit(self._connection, self._now, write.actor, write.act, target, json.loads(write.detail))

    def changes(self) -> DefinitionChanges:
        """Return what this change was, for other processes."""
        version, largest = self._connection.execute(_STATE).fetchone()
        return DefinitionChanges(version, largest, version - len(self.changed), self.changed)


def find_definitions(connection: sqlite3.Connection, noun: Noun, names: Collection[str]) -> list[StoredDefinition]:
    return _read_all(connection, _NAMED, (noun, _list([clean_text(name) for name in names])))


def find_sources(connection: sqlite3.Connection, addresses: Collection[bytes]) -> list[StoredDefinition]:
    found = [one for address in addresses for one in _read_all(connection, _AT, (address,))]
    return found + find_routes(connection, [one.name for one in found])


def find_routes(connection: sqlite3.Connection, sources: Collection[str]) -> list[StoredDefinition]:
    return _read_all(connection, _FROM, (_list(sources),)) if sources else []


def find_routes_to(connection: sqlite3.Connection, destinations: Collection[str]) -> list[StoredDefinition]:
    return _read_all(connection, _TO, (_list(destinations), MOST_CHANGES)) if destinations else []


def find_destinations(connection: sqlite3.Connection, ids: Collection[int]) -> list[StoredDefinition]:
    return _read_all(connection, _BY_ID, (_list(ids),))


def find_destination_names(connection: sqlite3.Connection, ids: Collection[int]) -> dict[int, str]:
    return dict(connection.execute(_NAMES, (_list(ids),)).fetchall())


def list_definitions(
    connection: sqlite3.Connection, noun: Noun, account: str | None, after: str, limit: int
) -> list[StoredDefinition]:
    if account is None:
        return _read_all(connection, _LIST, (noun, after, limit))
    return _read_all(connection, _LIST_OF, (noun, after, limit, account))


def find_accounts(connection: sqlite3.Connection, names: Collection[str]) -> dict[str, StoredDefinition]:
    rows = dict(connection.execute(_NAMED_ACCOUNTS, (_list([clean_text(name) for name in names]),)).fetchall())
    found = {one.name: one for one in find_definitions(connection, Noun.account, sorted(set(rows.values())))}
    return {name: found[account] for name, account in rows.items() if account in found}


def aliases_of(connection: sqlite3.Connection, accounts: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for account, name in connection.execute(_ALIASES, (_list(accounts),)).fetchall():
        found.setdefault(account, []).append(name)
    return found


def was_deleted(connection: sqlite3.Connection, noun: Noun, name: str) -> bool:
    return connection.execute(_DELETED, (noun, clean_text(name))).fetchone() is not None


def find_kept_sources(connection: sqlite3.Connection) -> list[StoredDefinition]:
    return _read_all(connection, _KEPT, ())


def definition_changes(connection: sqlite3.Connection, since: int) -> DefinitionChanges:
    version, largest = connection.execute(_STATE).fetchone()
    rows = connection.execute(_CHANGES, (since, MOST_CHANGES)).fetchall() if 0 <= since < version else []
    if since < 0 or len(rows) == MOST_CHANGES:
        return DefinitionChanges(version, largest, -1)
    changed = [_read_change(row) for row in rows]
    return DefinitionChanges(version, largest, since, changed)


def forget_deleted(connection: sqlite3.Connection, cut: Micros) -> int:
    """Remove the rows of what was deleted so long ago that every process has learnt of it."""
    return connection.execute(_FORGET, (cut,)).rowcount


def _list(values: Collection[object]) -> str:
    return json.dumps(list(values))


def _read_all(connection: sqlite3.Connection, statement: str, asked: Sequence[Any]) -> list[StoredDefinition]:
    return [_read(row) for row in connection.execute(statement, asked).fetchall()]


def _read(row: Sequence[Any]) -> StoredDefinition:
    noun, name, id_, account, address, source, destination, settings, secrets, enabled, version = row[:11]
    return StoredDefinition(
        noun=Noun(noun),
        name=name,
        id=id_,
        account=account,
        address=address,
        source=source,
        destination=destination,
        settings=settings,
        secrets=secrets,
        is_enabled=bool(enabled),
        version=version,
        created_at=moment(row[11]),
        changed_at=moment(row[12]),
        is_led_nowhere=bool(row[13]),
        led_to=row[14],
        media_id=row[15],
    )


def _read_change(row: Sequence[Any]) -> DefinitionChange:
    version, noun, name, id_, address, source, destination, is_enabled = row
    return DefinitionChange(version, Noun(noun), name, id_, address, source, destination, bool(is_enabled))
