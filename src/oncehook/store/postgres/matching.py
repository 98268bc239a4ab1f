"""Which deliveries and events a `Filter` means, as constant text and its parameters.

One text for all ways to ask (R76): it is planned anew each time with the values at hand, so that conditions which do
not apply vanish. `show` builds its lists on it, `replay` and `acts` what a replay or a discard means. What bodies must
say is a condition apart: naming its function at all would forbid parallel plans.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from oncehook.errors import QueryTooWide, Undecryptable
from oncehook.model import Asked, Clause, Filter, Id, prepare, says
from oncehook.store.base import MOST_DECRYPTED, MOST_DECRYPTED_BYTES
from oncehook.store.cipher import Cipher
from oncehook.store.postgres.opening import rows
from oncehook.store.postgres.wire import Connection, Ids, Integers, Texts, storable

GIVEN: Final = 17
"""Parameters of a filter: `$1` to `$17`, as `parameters` makes them."""

# An id's own time may differ from the time its event was received, by an hour at most: bounds on ids narrow the search,
# received_at decides. What the store's clock is ahead of the server's is taken off (it is not, outside of tests).
ID_SINCE: Final = """
(lpad(to_hex((extract(epoch FROM greatest($15::timestamptz - (now() - transaction_timestamp()) - interval '1 hour',
  'epoch')) * 1000)::bigint), 12, '0') || '00000000000000000000')::uuid
"""
ID_UNTIL: Final = """
(lpad(to_hex((extract(epoch FROM greatest($16::timestamptz + interval '1 hour', 'epoch')) * 1000)::bigint), 12, '0')
  || 'ffffffffffffffffffff')::uuid
"""
# All deliveries of an event are one range of ids.
LAST_OF: Final = "(left(e.id::text, 30) || 'ffffff')::uuid"

STATUS: Final = """
CASE WHEN d.status = 'pending' AND h.leased AND (h.delivery_id = d.id OR h.carries = d.id)
  THEN 'leased' ELSE d.status END
"""
ATTEMPTS: Final = "CASE WHEN h.delivery_id = d.id THEN h.attempts ELSE d.attempts END"

# Of deliveries `d` with their destination `t` and head `h`.
OF_DELIVERY: Final = (
    """
($1::uuid[] IS NULL OR d.id = ANY($1))
AND ($4::integer IS NULL OR d.destination_id = $4)
AND ($5::text IS NULL OR $5 = """
    + STATUS
    + """)
AND ($9::text IS NULL OR d.category = $9)
AND ($10::text IS NULL OR d.note = $10)
AND ($11::text IS NULL OR d.last_status::text LIKE $11)
AND ($12::integer IS NULL OR """
    + ATTEMPTS
    + """ > $12)
AND ($13::integer IS NULL OR """
    + ATTEMPTS
    + """ < $13)
AND ($14::uuid IS NULL OR d.replay_id = $14 OR $14 = '00000000-0000-0000-0000-000000000000' AND d.replay_id IS NOT NULL)
"""
)

# Of events `e` with their source `s`.
OF_EVENT: Final = """
($2::uuid IS NULL OR e.id = $2)
AND ($3::integer[] IS NULL OR e.source_id = ANY($3))
AND ($6::text IS NULL OR e.type LIKE $6)
AND ($7::text IS NULL OR e.subject = $7)
AND ($8::text IS NULL OR e.key = $8)
AND ($15::timestamptz IS NULL OR e.received_at >= $15)
AND ($16::timestamptz IS NULL OR e.received_at < $16)
"""

IN_EVENT: Final = "e.key ILIKE $17 OR e.subject ILIKE $17 OR e.type ILIKE $17"
IN_DELIVERY: Final = "d.last_error ILIKE $17"

MATCHES: Final = OF_EVENT + "AND" + OF_DELIVERY + "AND ($17::text IS NULL OR " + IN_EVENT + " OR " + IN_DELIVERY + ")\n"
"""A delivery that is meant, where `d`, `e`, `s`, `t` and `h` stand together (TOGETHER)."""

TOGETHER: Final = """
JOIN events e ON e.id = d.event_id JOIN sources s ON s.id = e.source_id JOIN destinations t ON t.id = d.destination_id
LEFT JOIN heads h ON d.status = 'pending' AND h.subject_key = coalesce(d.subject_key, d.id)
"""


IS_ENCRYPTED: Final = "substring(e.body FROM 1 FOR 5) = '\\xff4f484501'::bytea"
_ENCRYPTED: Final = "FROM deliveries d" + TOGETHER + "WHERE " + MATCHES + "AND " + IS_ENCRYPTED
_ENCRYPTED_SIZE: Final = (
    "SELECT count(*), coalesce(sum(size), 0)::bigint FROM (SELECT length(e.body) AS size "
    + _ENCRYPTED
    + " LIMIT $18) e"
)
_NEXT_ENCRYPTED: Final = "SELECT d.id, e.id, e.body " + _ENCRYPTED + " AND d.id > $18 ORDER BY d.id LIMIT $19"
_AT_ONCE: Final = 500
"""Encrypted bodies that are fetched at once."""

_SAYING: Final = (
    "SELECT d.id FROM deliveries d"
    + TOGETHER
    + "WHERE "
    + MATCHES
    + "AND CASE WHEN "
    + IS_ENCRYPTED
    + " THEN false ELSE body_says(e.body, $18::jsonb) END"
)

_ANY_REPLAY: Final = bytes(16)
"""No replay has this id: it asks for those of any."""

_NOBODY: Final = bytes(16)
"""No delivery has this id. An array of none would be sent as NULL, and mean all."""


def means_nothing(filter: Filter) -> bool:
    """Asked for by ids, and there are none."""
    return filter.ids is not None and not any(filter.ids)


async def parameters(connection: Connection, filter: Filter, cipher: Cipher) -> list[object]:
    """`$1` to `$17`, for all that a filter means, however much: what its body must say has become ids."""
    given = await parameters_without_body(connection, filter)
    if filter.body is None:
        return given
    meant = [row[0] for row in await rows(connection, _SAYING, [*given, asked(filter.body)])]
    if cipher.has_keys:
        meant += await _encrypted_saying(connection, given, filter.body, cipher)
    return [Ids(meant or [_NOBODY]), *given[1:]]


async def _encrypted_saying(
    connection: Connection, given: Sequence[object], clauses: Sequence[Clause], cipher: Cipher
) -> list[bytes]:
    """Return the deliveries whose encrypted bodies say this. Raises QueryTooWide."""
    [(count, size)] = await rows(connection, _ENCRYPTED_SIZE, [*given, MOST_DECRYPTED + 1])
    if count > MOST_DECRYPTED or size > MOST_DECRYPTED_BYTES:
        raise QueryTooWide
    meant: list[bytes] = []
    last = _NOBODY
    while found := await rows(connection, _NEXT_ENCRYPTED, [*given, Id(last), _AT_ONCE]):
        says = set(await saying([row[1:] for row in found], clauses, cipher))
        meant += [row[0] for row in found if row[1] in says]
        last = found[-1][0]
    return meant


async def saying(found: Sequence[Sequence[Any]], clauses: Sequence[Clause], cipher: Cipher) -> list[bytes]:
    """Return the ids, of these pairs of ids and encrypted bodies, where the body says what is asked for."""
    wanted = prepare(clauses)

    def read() -> list[bytes]:
        return [id_ for id_, body in found if _says(id_, body, wanted, cipher)]

    return await asyncio.to_thread(read) if found else []


def _says(event_id: bytes, body: bytes, clauses: Sequence[Asked], cipher: Cipher) -> bool:
    try:
        return says(cipher.decrypt(body, "body", event_id), clauses)
    except Undecryptable:
        return False


def asked(clauses: Sequence[Clause]) -> str:
    """Clauses as the one parameter that `body_says` takes."""
    return json.dumps(
        [
            {
                "path": [storable(step) for step in clause.path],
                "sign": clause.sign,
                "value": storable(clause.value),
                "number": clause.number,
            }
            for clause in clauses
        ]
    )


async def parameters_without_body(connection: Connection, filter: Filter) -> list[object]:
    """`$1` to `$17`. Names become numbers first, so that the plan is made for them; an unknown one is nobody's."""
    return [
        None if filter.ids is None else Ids([one for one in filter.ids if len(one) == 16]),
        _id(filter.event_id),
        await _sources(connection, filter),
        await _number(connection, _DESTINATION, filter.destination),
        None if filter.status is None else str(filter.status),
        None if filter.type is None else _escaped(filter.type).replace("*", "%").replace("?", "_"),
        _text(filter.subject),
        _text(filter.key),
        None if filter.category is None else str(filter.category),
        _text(filter.note),
        None if filter.code is None else _escaped(filter.code).replace("x", "_"),
        filter.attempts_above,
        filter.attempts_below,
        _id(filter.replay_id or (_ANY_REPLAY if filter.is_replayed else None)),
        filter.since,
        filter.until,
        None if filter.text is None else f"%{_escaped(filter.text)}%",
    ]


_SOURCES: Final = "SELECT id FROM sources WHERE name = ANY($1::text[])"
_DESTINATION: Final = "SELECT id FROM destinations WHERE name = $1"


async def _sources(connection: Connection, filter: Filter) -> Integers | None:
    """The numbers of the sources that are meant; one that nobody has where none is known: an array of none is NULL."""
    names = filter.sources if filter.source is None else [filter.source]
    if names is None:
        return None
    found = await rows(connection, _SOURCES, [Texts([storable(name) for name in names])])
    return Integers([number for (number,) in found] or [-1])


async def _number(connection: Connection, statement: str, name: str | None) -> int | None:
    if name is None:
        return None
    found = await rows(connection, statement, [storable(name)])
    return found[0][0] if found else -1


def _id(value: bytes | None) -> Id | None:
    return None if value is None else Id(value)


def _text(value: str | None) -> str | None:
    return None if value is None else storable(value)


def _escaped(text: str) -> str:
    return storable(text).replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
