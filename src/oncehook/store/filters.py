"""Filters as SQL: the conditions of a `Filter` and their values, written once for all engines.

A condition is constant text with a named parameter, which is NULL where the filter leaves it open; values only ever
travel as parameters (R76). Negated, it is asked for each value of a list (`no_…`). A `Dialect` has the few conditions
that an engine words differently. Alternatives (`OR`) are asked one by one, each by the index that suits it, and their
pages are merged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from oncehook.model import Clause, DeliveryStatus, Filter, ListedEvent, Page, StoredDelivery

Row = TypeVar("Row", ListedEvent, StoredDelivery)

LOOKED_AT: Final = 20_000
"""Rows that one page of a list reads at most; then it returns how far it came."""

LOOKED_INTO: Final = 32 << 20
"""Bytes of bodies that one page searches at most."""

MOST_COUNTED: Final = 10_000
"""Events up to which the matches of a query are counted."""

UNFINISHED: Final = frozenset({DeliveryStatus.pending, DeliveryStatus.dead, DeliveryStatus.discarded})
"""Statuses with an index of their own; `leased` is found through the heads."""

STATUS: Final = """
CASE WHEN d.status = 'pending' AND h.leased AND (h.delivery_id = d.id OR h.carries = d.id)
  THEN 'leased' ELSE d.status END
"""
ATTEMPTS: Final = "CASE WHEN h.delivery_id = d.id THEN h.attempts ELSE d.attempts END"

_OF_EVENT: Final = {
    "event_id": "e.id = :event_id",
    "source_id": "e.source_id = :source_id",
    "sources": "",
    "account": "e.account = :account",
    "accounts": "",
    "type": "",
    "subject": "e.subject = :subject",
    "key": "e.key = :key",
    "since": "e.received_at >= :since",
    "until": "e.received_at < :until",
    "arrivals_above": "",
    "arrivals_below": "",
    "outcome": "",
}
"""Conditions on an event `e`, by parameter; empty where each engine has its own."""

_OF_DELIVERY: Final = {
    "ids": "",
    "destination_id": "d.destination_id = :destination_id",
    "destinations": "",
    "status": ":status = " + STATUS,
    "category": "d.category = :category",
    "note": "d.note = :note",
    "code": "CAST(d.last_status AS text) LIKE :code",
    "above": ATTEMPTS + " > :above",
    "below": ATTEMPTS + " < :below",
    "replay_id": "d.replay_id = :replay_id",
    "left_of": "EXISTS (SELECT 1 FROM replay_items i WHERE i.replay_id = :left_of AND i.delivery_id = d.id"
    " AND i.outcome IS NULL AND i.fed_at IS NULL)",
    "is_replayed": "d.replay_id IS NOT NULL",
}
"""Conditions on a delivery `d` with its head `h`."""

_NEVER_NEGATED: Final = frozenset(
    {
        *("sources", "accounts", "destinations", "since", "until", "above", "below"),
        *("arrivals_above", "arrivals_below", "left_of"),
    }
)
"""Conditions whose opposite is another of them, or that no query negates."""

_SINGLE: Final = {
    **dict.fromkeys(("type", "subject", "key", "account", "outcome", "status", "category", "note", "code"), "text"),
    **dict.fromkeys(("is_replayed", "text"), "text"),
    **dict.fromkeys(("source_id", "destination_id", "above", "below", "arrivals_above", "arrivals_below"), "integer"),
    **dict.fromkeys(("event_id", "replay_id", "left_of"), "uuid"),
    **dict.fromkeys(("since", "until"), "timestamptz"),
    **dict.fromkeys(("asks_deliveries", "denies_deliveries"), "boolean"),
    "clauses": "jsonb",
}
NEGATED: Final = tuple(name for name in (*_OF_EVENT, *_OF_DELIVERY, "text") if name not in _NEVER_NEGATED)
TYPES: Final = {
    **_SINGLE,
    "ids": "uuid[]",
    "sources": "integer[]",
    "destinations": "integer[]",
    "accounts": "text[]",
    **{f"no_{name}": f"{_SINGLE.get(name, 'uuid')}[]" for name in NEGATED},
}
"""SQL types of the parameters, for an engine that needs them."""


class Dialect:
    """The conditions of a filter as one engine words them, and the encoding of their values."""

    def __init__(
        self,
        words: Mapping[str, str],
        like: str,
        each: tuple[str, str],
        *,
        negated_words: Mapping[str, str] | None = None,
        encode_id: Callable[[bytes], object],
        encode_text: Callable[[str], str],
        encode_type: Callable[[str], str],
        encode_time: Callable[[Any], object],
        encode_list: Callable[[Sequence[Any]], object],
        encode_accounts: Callable[[Sequence[str]], object],
    ) -> None:
        """`each` begins and ends a table `n` of the values of a list, whose name comes between.

        `negated_words` are the conditions that read differently with a value `n.value`.
        """
        self._encode_id = encode_id
        self._encode_list = encode_list
        self._encode_text = encode_text
        self._encode_type = encode_type
        self._encode_time = encode_time
        self._encode_accounts = encode_accounts
        self.OF_EVENT = _join(_OF_EVENT, words)
        self.OF_DELIVERY = _join(_OF_DELIVERY, words)
        self.EVENT_SAYS = "(e.key " + like + " OR e.subject " + like + " OR e.type " + like + ")"
        self.DELIVERY_SAYS = "(:text IS NULL OR d.last_error " + like + " OR " + self.EVENT_SAYS + ")"
        self.MATCHES = self.OF_EVENT + " AND " + self.OF_DELIVERY + " AND " + self.DELIVERY_SAYS
        others = {**words, **(negated_words or {})}
        self.NOT_OF_EVENT = _join_negated({**_OF_EVENT, "text": self.EVENT_SAYS}, others, each)
        self.NOT_OF_DELIVERY = _join_negated({**_OF_DELIVERY, "text": "d.last_error " + like}, others, each)

    def values(
        self, filter: Filter, source_id: int | None, sources: object, destination_id: int | None, destinations: object
    ) -> dict[str, Any]:
        """Return the parameters of a filter whose names the engine has looked up; an unknown name has the id -1."""
        id_, text, time = self._encode_id, self._encode_text, self._encode_time
        values = {
            "ids": None,
            "event_id": None if filter.event_id is None else id_(filter.event_id),
            "source_id": source_id,
            "sources": sources,
            "destination_id": destination_id,
            "destinations": destinations,
            "account": None if filter.account is None else text(filter.account),
            "accounts": None if filter.accounts is None else self._encode_accounts(list(map(text, filter.accounts))),
            "type": None if filter.type is None else self._encode_type(filter.type),
            "subject": None if filter.subject is None else text(filter.subject),
            "key": None if filter.key is None else text(filter.key),
            "since": None if filter.since is None else time(filter.since),
            "until": None if filter.until is None else time(filter.until),
            "status": None if filter.status is None else str(filter.status),
            "category": None if filter.category is None else str(filter.category),
            "note": None if filter.note is None else text(filter.note),
            "code": None if filter.code is None else text(filter.code.lower().replace("x", "_")),
            "above": filter.attempts_above,
            "below": filter.attempts_below,
            "replay_id": None if filter.replay_id is None else id_(filter.replay_id),
            "left_of": None if filter.left_of is None else id_(filter.left_of),
            "is_replayed": "yes" if filter.is_replayed else None,
            "text": None if filter.text is None else f"%{escape_like(text(filter.text))}%",
            "clauses": None if filter.body is None else encode_clauses(filter.body, text),
            "arrivals_above": filter.arrivals_above,
            "arrivals_below": filter.arrivals_below,
            "outcome": None if filter.outcome is None else str(filter.outcome),
        }
        values["asks_deliveries"] = filter.ids is not None or any(values[name] is not None for name in _OF_DELIVERY)
        return values

    def exclude(self, excluded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the parameters of negated conditions: those of filters of which none may hold."""
        lists = {name: [values[name] for values in excluded if values[name] is not None] for name in NEGATED}
        values: dict[str, Any] = {
            f"no_{name}": self._encode_list(found) if found else None for name, found in lists.items()
        }
        values["denies_deliveries"] = any(lists[name] for name in ("text", *_OF_DELIVERY) if name in lists)
        return values


def _join(conditions: Mapping[str, str], words: Mapping[str, str]) -> str:
    return "\nAND ".join(
        "(:" + name + " IS NULL OR " + (test or words[name]) + ")" for name, test in conditions.items()
    )


def _join_negated(conditions: Mapping[str, str], words: Mapping[str, str], each: tuple[str, str]) -> str:
    """Join the conditions of which none may hold for any value of its list. What is unknown does not hold."""
    begin, end = each
    return "\nAND ".join(
        "(:no_"
        + name
        + " IS NULL OR NOT EXISTS (SELECT 1 FROM "
        + begin
        + ":no_"
        + name
        + end
        + " WHERE "
        + re.sub(":" + name + r"\b", "n.value", words.get(name) or test)
        + "))"
        for name, test in conditions.items()
        if name not in _NEVER_NEGATED
    )


def merge_pages(pages: Sequence[Page[Row]], limit: int) -> Page[Row]:
    """Merge the pages of alternatives into one, newest first, with each row once.

    A page that has a next one says nothing about rows before its cursor, so the merged page ends at the newest cursor.
    """
    floor = max((page.next for page in pages if page.next is not None), default=b"")
    found = {row.id: row for page in pages for row in page.items if row.id >= floor}
    rows = [found[id_] for id_ in sorted(found, reverse=True)]
    return Page(rows[:limit], rows[limit - 1].id) if len(rows) > limit else Page(rows, floor or None)


def encode_clauses(clauses: Sequence[Clause], text: Callable[[str], str]) -> str:
    """Encode conditions on a body as one parameter."""
    return json.dumps(
        [
            {
                "path": [text(step) for step in clause.path],
                "sign": clause.sign,
                "value": text(clause.value),
                "number": clause.number,
                "negated": clause.negated,
            }
            for clause in clauses
        ]
    )


def escape_like(text: str) -> str:
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")
