"""What a query may ask of a body: `body.data.amount:>1000` is a `Clause`.

The query language makes clauses, a `Filter` carries them, and engines answer them. What they mean is said here once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

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
