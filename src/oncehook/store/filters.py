"""Filters as SQL: the conditions of a `Filter` and their values, written once for all engines.

A condition is constant text with a named parameter, which is NULL where the filter leaves it open; values only ever
travel as parameters (R76). A `Dialect` has the few conditions that an engine words differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from oncehook.model import Clause, DeliveryStatus, Filter

LOOKED_AT: Final = 20_000
"""Rows that one page of a list reads at most; then it returns how far it came."""

LOOKED_INTO: Final = 32 << 20
"""Bytes of bodies that one page searches at most."""

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
    "type": "",
    "subject": "e.subject = :subject",
    "key": "e.key = :key",
    "since": "e.received_at >= :since",
    "until": "e.received_at < :until",
}
"""Conditions on an event `e`, by parameter; empty where each engine has its own."""

_OF_DELIVERY: Final = {
    "ids": "",
    "destination_id": "d.destination_id = :destination_id",
    "status": ":status = " + STATUS,
    "category": "d.category = :category",
    "note": "d.note = :note",
    "lowest_code": "d.last_status BETWEEN :lowest_code AND :highest_code",
    "above": ATTEMPTS + " > :above",
    "below": ATTEMPTS + " < :below",
    "replay_id": "d.replay_id = :replay_id",
    "is_replayed": "d.replay_id IS NOT NULL",
}
"""Conditions on a delivery `d` with its head `h`."""

TYPES: Final = {
    **dict.fromkeys(("type", "subject", "key", "status", "category", "note", "text"), "text"),
    **dict.fromkeys(("source_id", "destination_id", "lowest_code", "highest_code", "above", "below"), "integer"),
    **dict.fromkeys(("event_id", "replay_id"), "uuid"),
    **dict.fromkeys(("since", "until"), "timestamptz"),
    **dict.fromkeys(("is_replayed", "asks_deliveries"), "boolean"),
    "ids": "uuid[]",
    "sources": "integer[]",
    "clauses": "jsonb",
}
"""SQL types of the parameters, for an engine that needs them."""


class Dialect:
    """The conditions of a filter as one engine words them, and the encoding of their values."""

    def __init__(
        self,
        words: Mapping[str, str],
        like: str,
        *,
        encode_id: Callable[[bytes], object],
        encode_text: Callable[[str], str],
        encode_type: Callable[[str], str],
        encode_time: Callable[[Any], object],
    ) -> None:
        self._encode_id = encode_id
        self._encode_text = encode_text
        self._encode_type = encode_type
        self._encode_time = encode_time
        self.OF_EVENT = _join(_OF_EVENT, words)
        self.OF_DELIVERY = _join(_OF_DELIVERY, words)
        self.EVENT_SAYS = "(e.key " + like + " OR e.subject " + like + " OR e.type " + like + ")"
        self.DELIVERY_SAYS = "(:text IS NULL OR d.last_error " + like + " OR " + self.EVENT_SAYS + ")"
        self.MATCHES = self.OF_EVENT + " AND " + self.OF_DELIVERY + " AND " + self.DELIVERY_SAYS

    def values(
        self, filter: Filter, source_id: int | None, sources: object, destination_id: int | None
    ) -> dict[str, Any]:
        """Return the parameters of a filter whose names the engine has looked up; an unknown name has the id -1."""
        id_, text, time = self._encode_id, self._encode_text, self._encode_time
        values = {
            "ids": None,
            "event_id": None if filter.event_id is None else id_(filter.event_id),
            "source_id": source_id,
            "sources": sources,
            "destination_id": destination_id,
            "type": None if filter.type is None else self._encode_type(filter.type),
            "subject": None if filter.subject is None else text(filter.subject),
            "key": None if filter.key is None else text(filter.key),
            "since": None if filter.since is None else time(filter.since),
            "until": None if filter.until is None else time(filter.until),
            "status": None if filter.status is None else str(filter.status),
            "category": None if filter.category is None else str(filter.category),
            "note": None if filter.note is None else text(filter.note),
            "lowest_code": None if filter.code is None else _code(filter.code, "0"),
            "highest_code": None if filter.code is None else _code(filter.code, "9"),
            "above": filter.attempts_above,
            "below": filter.attempts_below,
            "replay_id": None if filter.replay_id is None else id_(filter.replay_id),
            "is_replayed": filter.is_replayed or None,
            "text": None if filter.text is None else f"%{escape_like(text(filter.text))}%",
            "clauses": None if filter.body is None else encode_clauses(filter.body, text),
        }
        values["asks_deliveries"] = filter.ids is not None or any(values[name] is not None for name in _OF_DELIVERY)
        return values


def _join(conditions: Mapping[str, str], words: Mapping[str, str]) -> str:
    return "\nAND ".join(
        "(:" + name + " IS NULL OR " + (test or words[name]) + ")" for name, test in conditions.items()
    )


def _code(code: str, digit: str) -> int:
    """Return the status code of `503`, or of `5xx` with this digit; one that nothing has for any other text."""
    digits = code.lower().replace("x", digit)
    return int(digits) if digits.isdecimal() else -1


def encode_clauses(clauses: Sequence[Clause], text: Callable[[str], str]) -> str:
    """Encode conditions on a body as one parameter."""
    return json.dumps(
        [
            {
                "path": [text(step) for step in clause.path],
                "sign": clause.sign,
                "value": text(clause.value),
                "number": clause.number,
            }
            for clause in clauses
        ]
    )


def escape_like(text: str) -> str:
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")
