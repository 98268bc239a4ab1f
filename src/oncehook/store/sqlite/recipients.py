"""Whom destinations have reached, on SQLite: noted when a worker starts, asked when a replay is planned.

Addresses come in as hashes; how many of some deliveries were first made to another address than today's goes out.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from oncehook.store.sqlite.intake import Micros

LATEST: Final = "SELECT address FROM recipients WHERE destination_id = ? ORDER BY since DESC LIMIT 1"
HISTORY: Final = """
SELECT t.name, r.since, r.address FROM recipients r JOIN destinations t ON t.id = r.destination_id ORDER BY r.since
"""
FIRST: Final = "SELECT started_at FROM attempts WHERE delivery_id = ? ORDER BY fence LIMIT 1"


def note(connection: sqlite3.Connection, now: Micros, addresses: Mapping[int, bytes]) -> None:
    """These are the addresses now; only what has changed is written."""
    for destination_id, address in addresses.items():
        if connection.execute(LATEST, (destination_id,)).fetchone() != (address,):
            connection.execute(
                "INSERT OR REPLACE INTO recipients (destination_id, since, address) VALUES (?,?,?)",
                (destination_id, now, address),
            )


def changed(connection: sqlite3.Connection, deliveries: Iterable[tuple[bytes, str]]) -> dict[str, int]:
    """Of deliveries with the names of their destinations: how many went elsewhere at first, by destination."""
    history: defaultdict[str, list[tuple[Micros, bytes]]] = defaultdict(list)
    for name, since, address in connection.execute(HISTORY):
        history[name].append((since, address))
    moved = {name: lived for name, lived in history.items() if len(lived) > 1}
    found: Counter[str] = Counter()
    for delivery_id, name in deliveries if moved else ():
        first = connection.execute(FIRST, (delivery_id,)).fetchone() if name in moved else None
        place = 0 if first is None else bisect_right(moved[name], first[0], key=lambda lived: lived[0])
        if place and moved[name][place - 1][1] != moved[name][-1][1]:
            found[name] += 1
    return dict(found)
