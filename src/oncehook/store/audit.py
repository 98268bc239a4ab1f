"""The chain of the audit log (S34): each line carries a hash over the line before and itself.

Both engines keep the chain's ends in `audit_chain` and refuse UPDATE and DELETE by triggers; SQLite's writer computes a
line's hash with `line_hash`, PostgreSQL's trigger `audit_insert` computes the same. `doctor` asks `check_chain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from oncehook.model import Check

_HINT = (
    "Somebody changed the database past oncehook. Keep a copy of the store, and compare this log with a backup from"
    " before that line."
)


class Line(NamedTuple):
    """A line as it is kept; `at` in microseconds since 1970."""

    n: int
    at: int
    actor: str
    act: str
    target: str
    detail: str
    hash: bytes


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of the chain, as the store keeps them apart from the lines."""

    n: int
    hash: bytes
    pruned: int
    pruned_hash: bytes
    since: int
    """The last line from before there was a chain."""

    @property
    def before_first(self) -> int:
        """The number of the line before the first one that can be checked."""
        return max(self.pruned, self.since)


def line_hash(before: bytes, n: int, at: int, actor: str, act: str, target: str, detail: str) -> bytes:
    """Return the hash of a line, given that of the line before. No text of a line holds NUL, which parts them."""
    return sha256(before + b"\0".join(str(part).encode() for part in (n, at, actor, act, target, detail))).digest()


def check_chain(ends: Ends, lines: Iterable[Line]) -> Check:
    """Tell whether every line follows from the one before, and where it breaks. `lines` are those of the chain."""
    before, last = ends.pruned_hash, ends.before_first
    for line in lines:
        if line.n != last + 1:
            return _broken(f"line {last + 1} is missing" if line.n > last + 1 else f"line {line.n} is there twice")
        if line_hash(before, *line[:6]) != line.hash:
            return _broken(f"line {line.n} was changed, or does not follow from the one before")
        before, last = line.hash, line.n
    if last < ends.n:
        return _broken(f"line {last + 1} is missing")
    if last != ends.n or before != ends.hash:
        return _broken(f"line {last} is not the one that was written last")
    count = last - ends.before_first
    said = f"{count:,} {'line follows' if count == 1 else 'lines follow'} one from another; the last is {last:,}"
    return Check("audit", True, f"{said}, {before.hex()[:16]}")


def _broken(where: str) -> Check:
    return Check("audit", False, f"the chain is broken: {where}", _HINT)


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of settings that were changed, added and removed, without those kinds that are empty."""
    found = {
        "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
        "added": sorted(now.keys() - before.keys()),
        "removed": sorted(before.keys() - now.keys()),
    }
    return {what: names for what, names in found.items() if names}
