"""The hash chain of the audit log (S34): each entry has a hash over itself and the entry before.

Both engines keep the chain's ends in `audit_chain` and refuse UPDATE and DELETE by triggers; SQLite's writer computes a
hash with `entry_hash`, PostgreSQL's trigger `audit_insert` computes the same. `doctor` asks `check_chain`.
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


class ChainEntry(NamedTuple):
    """An entry as it is kept; `at` in microseconds since 1970."""

    n: int
    at: int
    actor: str
    act: str
    target: str
    detail: str
    hash: bytes


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of the chain, as the store keeps them apart from the entries."""

    n: int
    hash: bytes
    pruned: int
    pruned_hash: bytes
    since: int
    """The last entry from before there was a chain."""

    @property
    def before_first(self) -> int:
        """Number of the entry before the first one that can be checked; of a damaged store anything may be NULL."""
        return max(self.pruned or 0, self.since or 0)


def entry_hash(before: bytes, n: int, at: int, actor: str, act: str, target: str, detail: str) -> bytes:
    """Return the hash of an entry, given the one before. Parts are separated by NUL, which no text of an entry
    contains."""
    return sha256(before + b"\0".join(str(part).encode() for part in (n, at, actor, act, target, detail))).digest()


def check_chain(ends: Ends, entries: Iterable[ChainEntry]) -> Check:
    """Check that every entry follows from the one before; return where the chain breaks."""
    if None in (ends.n, ends.hash, ends.pruned, ends.pruned_hash, ends.since):
        return _report_break("its ends are gone")
    before, last = ends.pruned_hash, ends.before_first
    for entry in entries:
        if entry.n != last + 1:
            where = f"line {last + 1} is missing" if entry.n > last + 1 else f"line {entry.n} is there twice"
            return _report_break(where)
        if entry_hash(before, *entry[:6]) != entry.hash:
            return _report_break(f"line {entry.n} was changed, or does not follow from the one before")
        before, last = entry.hash, entry.n
    if last < ends.n:
        return _report_break(f"line {last + 1} is missing")
    if last != ends.n or before != ends.hash:
        return _report_break(f"line {last} is not the one that was written last")
    if last == 0:
        return Check("audit", True, "no lines yet")
    count = last - ends.before_first
    counted = f"{count:,} {'line follows' if count == 1 else 'lines follow'} one from another; the last is {last:,}"
    return Check("audit", True, f"{counted}, {before.hex()[:16]}")


def _report_break(where: str) -> Check:
    return Check("audit", False, f"the chain is broken: {where}", _HINT)


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of settings that were changed, added and removed; empty groups are left out."""
    found = {
        "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
        "added": sorted(now.keys() - before.keys()),
        "removed": sorted(before.keys() - now.keys()),
    }
    return {what: names for what, names in found.items() if names}
