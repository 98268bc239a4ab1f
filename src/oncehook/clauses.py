"""What a query may ask of a body: `body.data.amount:>1000` is a `Clause`.

The query language makes clauses, a `Filter` carries them, and engines answer them. What they mean is said here once.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

SIGNS: Final = (">=", "<=", ">", "<", "=")
"""How a value may be compared; the longer ones first, for whoever reads them off a text."""

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,100})?(?:[eE][+-]?[0-9]{1,4})?")
_LARGEST: Final = 1 << 63


@dataclass(slots=True, frozen=True)
class Clause:
    """What must stand at one place of a JSON body. A body that is no JSON has no places.

    `=` compares with the text of a string, with `true`, `false` and `null`, and with a number as a number; the other
    signs compare numbers only. Two whole numbers of 64 bits are compared exactly, all others as floats.
    """

    path: tuple[str, ...]
    """From the root: names, and indexes of arrays as `0`, `1`, …"""
    sign: str
    value: str

    @property
    def number(self) -> int | float | None:
        """The value as a number, if it is written as JSON writes one."""
        return read_number(self.value)


def read_number(text: str) -> int | float | None:
    """A number as JSON writes it: whole ones exactly, where 64 bits hold them. None: it is none, or too large."""
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    if text.removeprefix("-").isdigit() and -_LARGEST <= int(text) < _LARGEST:
        return int(text)
    return number if math.isfinite(number) else None


# -- read by Python ----------------------------------------------------------------------------

_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Asked(msgspec.Struct):
    """A clause with its number read off."""

    path: list[str]
    sign: str
    value: str
    number: int | float | None


_decode: Final = msgspec.json.Decoder().decode
_MISSING: Final = object()


def prepare(clauses: Sequence[Clause]) -> list[Asked]:
    """Return clauses as `says` takes them."""
    return [Asked(list(clause.path), clause.sign, clause.value, clause.number) for clause in clauses]


def says(body: bytes, clauses: Sequence[Asked]) -> bool:
    """Tell whether a body, read as handlers read it, says all of this."""
    try:
        data = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return all(_holds(clause, _at(data, clause.path)) for clause in clauses)


def _at(data: Any, path: Sequence[str]) -> Any:
    for step in path:
        if isinstance(data, dict):
            data = data.get(step, _MISSING)
        elif isinstance(data, list) and step.isdecimal() and str(int(step)) == step and int(step) < len(data):
            data = data[int(step)]
        else:
            return _MISSING
    return data


def _holds(clause: Asked, found: Any) -> bool:
    if isinstance(found, str):
        return clause.sign == "=" and found == clause.value
    if found is None or isinstance(found, bool):
        return clause.sign == "=" and json.dumps(found) == clause.value
    if not isinstance(found, int | float) or clause.number is None:
        return False
    is_whole = isinstance(found, int) and isinstance(clause.number, int)
    try:
        left, right = (found, clause.number) if is_whole else (float(found), float(clause.number))
    except OverflowError:
        return False
    return _COMPARE[clause.sign](left, right)
