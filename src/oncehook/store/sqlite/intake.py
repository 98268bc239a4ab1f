"""The arrivals of one transaction: which are new, which are copies, and their rows.

Called by the writer inside its transaction, with everything that waited: a statement a table, run for all its rows.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from oncehook.model import (
    MARKS,
    PRIORITIES,
    ArrivalId,
    EventDetails,
    EventId,
    Intake,
    Item,
    Mark,
    Options,
    Outcome,
    Priority,
    Verdict,
    new_id,
)
from oncehook.store.base import KEPT_ARRIVALS, UNSEEN, Reserved, bind
from oncehook.store.cipher import Cipher
from oncehook.store.sqlite.connection import InsertRows, LookUp, Micros, count, moment, moment_or_none, to_micros

EVENT_COLUMNS: Final = """
       e.id, e.source_id, s.name, e.type, e.key, e.subject, e.received_at, e.event_at, e.marks, e.rank, e.rank_scope,
       coalesce(e.head, b.head, x''), e.body, e.account
"""
DETAIL_COLUMNS: Final = EVENT_COLUMNS + ", e.batch_id, coalesce(c.n, 1), e.same_as"


def convert_event(columns: list[Any]) -> list[Any]:
    """Convert EVENT_COLUMNS, in place, to the fields of a StoredEvent."""
    columns[0] = EventId(columns[0])
    columns[6] = moment(columns[6])
    columns[7] = moment_or_none(columns[7])
    columns[8] = MARKS[columns[8]]
    return columns


def read_details(row: Sequence[Any]) -> EventDetails:
    """Build an event from DETAIL_COLUMNS."""
    *columns, batch_id, copies, same_as = row
    batch_id, same_as = batch_id and ArrivalId(batch_id), same_as and EventId(same_as)
    return EventDetails(*convert_event(columns), batch_id=batch_id, copies=copies, same_as=same_as)


CHAINS: Final = """
WITH RECURSIVE chain(n, nth) AS (
  SELECT duplicate, 1 FROM copies WHERE event_id = ?1
  UNION ALL
  SELECT conflict, 1 FROM copies WHERE event_id = ?1
  UNION ALL
  SELECT a.before, c.nth + 1 FROM chain c JOIN arrivals a ON a.n = c.n
)
"""
KEPT: Final = (
    CHAINS
    + """
SELECT a.id, a.event_id, a.outcome, a.at, coalesce(a.head, b.head), a.body, a.batch_id
FROM chain c JOIN arrivals a ON a.n = c.n LEFT JOIN batches b ON b.id = a.batch_id
WHERE c.nth <= ?2 ORDER BY a.n
"""
)
CUT: Final = CHAINS + "DELETE FROM arrivals WHERE n IN (SELECT n FROM chain WHERE nth > ?2)"


def outgrows(before: int, after: int) -> bool:
    """Tell whether a chain may be twice its limit: checked at every addition, true at every twentieth."""
    return before // KEPT_ARRIVALS < after // KEPT_ARRIVALS


def cut(connection: sqlite3.Connection, event_id: bytes, keep: int = KEPT_ARRIVALS) -> None:
    """Remove all but the latest of each kind."""
    connection.execute(CUT, (event_id, keep))


def forget_event(connection: sqlite3.Connection, event_id: bytes) -> None:
    """Remove the arrivals of an event that is about to be removed. The count stays as long as its key (R20)."""
    if connection.execute("SELECT 1 FROM copies WHERE event_id = ?", (event_id,)).fetchone() is None:
        return
    cut(connection, event_id, 0)
    connection.execute("UPDATE copies SET duplicate = NULL, conflict = NULL WHERE event_id = ?", (event_id,))
    connection.execute(
        "DELETE FROM copies WHERE event_id = ?1 AND NOT EXISTS (SELECT 1 FROM keys k JOIN events e ON e.id = ?1"
        " WHERE k.hash = e.key_hash AND k.event_id = ?1)",
        (event_id,),
    )


def forget_key(connection: sqlite3.Connection, event_id: bytes) -> None:
    """Remove the arrivals of an event that is gone, and whose key is gone or belongs to another event now."""
    if connection.execute("SELECT 1 FROM events WHERE id = ?", (event_id,)).fetchone() is None:
        cut(connection, event_id, 0)
        connection.execute("DELETE FROM copies WHERE event_id = ?", (event_id,))


_KEY_COLUMNS: Final = "(hash, event_id, body_hash, source_id, copies, first_seen, last_seen, expires_at)"
KNOWN_KEYS: Final = LookUp(
    "SELECT hash, k.event_id, body_hash, expires_at, coalesce(c.n, k.copies), c.duplicate, c.conflict"
    " FROM keys k LEFT JOIN copies c ON c.event_id = k.event_id WHERE hash IN"
)
NEW_KEYS: Final = InsertRows("INSERT INTO keys " + _KEY_COLUMNS, 8, "ON CONFLICT DO NOTHING")
COPIES: Final = InsertRows(
    "INSERT INTO copies (event_id, n, last_seen, duplicate, conflict)",
    5,
    "ON CONFLICT DO UPDATE SET n = excluded.n, last_seen = excluded.last_seen, duplicate = excluded.duplicate,"
    " conflict = excluded.conflict",
)
IMPORTED_KEYS: Final = InsertRows(
    "INSERT INTO keys " + _KEY_COLUMNS,
    8,
    "ON CONFLICT DO UPDATE SET event_id = excluded.event_id, body_hash = excluded.body_hash, copies = 0,"
    " first_seen = excluded.first_seen, last_seen = excluded.last_seen, expires_at = excluded.expires_at"
    " WHERE expires_at <= excluded.first_seen",
)
_INSERT_EVENT: Final = (
    "INSERT INTO events (id, source_id, type, key, subject, received_at, marks, body_hash, key_hash, head, body"
)
EVENTS: Final = InsertRows(_INSERT_EVENT + ", event_at, rank, rank_scope, batch_id, same_as, account)", 17)
PLAIN_EVENTS: Final = InsertRows(_INSERT_EVENT + ")", 11)
NOTHING: Final = (None,) * 6
"""The last six columns of most events, which then are left out: handing over a NULL costs as much as a number."""
KNOWN_PROOFS: Final = LookUp("SELECT hash, event_id, key_hash, expires_at FROM proofs WHERE hash IN")
PROOFS: Final = InsertRows(
    "INSERT INTO proofs (hash, event_id, key_hash, expires_at)",
    4,
    "ON CONFLICT DO UPDATE SET event_id = excluded.event_id, key_hash = excluded.key_hash,"
    " expires_at = excluded.expires_at",
)
ARRIVALS: Final = InsertRows("INSERT INTO arrivals (n, before, event_id, id, outcome, at, batch_id, head, body)", 9)
DELIVERIES: Final = InsertRows(
    "INSERT INTO deliveries (id, event_id, destination_id, subject_key, seq, behind, options)", 7
)
FAIR_DELIVERIES: Final = InsertRows(
    "INSERT INTO deliveries (id, event_id, destination_id, subject_key, seq, behind, options, fair)", 8
)
HEADS: Final = InsertRows(
    "INSERT INTO heads (subject_key, destination_id, delivery_id, event_id, seq, options, due_at, leased, fence,"
    " attempts, leased_at, worker)",
    12,
)
ORDERED_HEADS: Final = InsertRows(
    "INSERT INTO heads (subject_key, destination_id, delivery_id, event_id, seq, options, due_at, leased, fence,"
    " attempts, leased_at, worker, turn, fair)",
    14,
)
"""With the columns of priorities and rounds, which most heads leave out."""
UNLEASED_HEADS: Final = InsertRows(
    "INSERT INTO heads (subject_key, destination_id, delivery_id, event_id, seq, options, due_at)", 7
)
FRONT: Final = "SELECT turn, destination_id FROM heads WHERE subject_key = ?"
ORDERED: Final = int(Options.high | Options.low)
CLOSED: Final = """
SELECT destination_id FROM destination_state WHERE paused_at IS NOT NULL OR open_until IS NOT NULL OR failures
"""


class KnownKey(NamedTuple):
    """The stored row of a key, with the ends of its chains (see `copies`)."""

    event_id: bytes
    body_hash: bytes
    expires_at: Micros
    copies: int
    duplicate: int | None
    conflict: int | None


class Fold(msgspec.Struct):
    """All items of one group with the same key: the first is the candidate, the others are its copies."""

    candidate: Item
    intake: Intake
    copies: list[tuple[Item, Intake]]


def fold(batch: Sequence[Intake]) -> list[Fold]:
    """Group the keyed items of a batch by key, in order of arrival.

    Copies inside a batch are folded into the first one, so that the database sees each key once.
    """
    folds: dict[bytes, Fold] = {}
    for intake in batch:
        for item in intake.items:
            if item.key_hash is None:
                continue
            known = folds.get(item.key_hash)
            if known is None:
                folds[item.key_hash] = Fold(item, intake, [])
            else:
                known.copies.append((item, intake))
    return list(folds.values())


class IntakeGroup:
    """The intakes of one transaction: which are new, which are copies, and their rows."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        now: Micros,
        seq: int,
        batch: Sequence[Intake],
        cipher: Cipher,
        *,
        expects_copies: bool = False,
        reserved: Reserved | None = None,
    ) -> None:
        """`expects_copies`: look keys up before inserting them, which costs more when all of them are new.

        `reserved`: deliveries that are leased in the same commit, where nothing waits before them.
        """
        self.connection = connection
        self.cipher = cipher
        self.met_copies = expects_copies
        """Whether some key was known; then the next group is likely to meet copies too."""
        self.now = now
        self.seq = seq
        self.batch = batch
        self.counts: Counter[tuple[int, int, str]] = Counter()
        self.verdicts: dict[int, Verdict] = {}
        """Verdicts on the items that are not simply accepted, by their identity."""
        self.copied: list[tuple[Any, ...]] = []
        self.arrivals: list[tuple[Any, ...]] = []
        self.outgrown: list[bytes] = []
        """Events whose chains of later arrivals are to be cut."""
        self.reserved = reserved
        self.leased: dict[bytes, int] = {}
        self.made_due: set[int] = set()

    def write(self) -> list[list[Verdict]]:
        """Write everything; return the verdicts on each intake's items."""
        proven = [item for i in self.batch for item in i.items if item.proof is not None]
        firsts = self._firsts(proven) if proven else {}
        if proven:
            bind(self.batch, {proof: key for proof, (_, key) in firsts.items()})
        self._claim_keys(fold(self.batch))
        self._insert_copies()
        if proven:
            self._prove(proven, firsts)
        accepted = [(i, item) for i in self.batch for item in i.items if id(item) not in self.verdicts]
        self._insert_batches()
        self._insert_events(accepted)
        self._insert_deliveries(accepted)
        self._count("received", [i.source_id for i in self.batch for _ in i.items])
        self._count("accepted", [i.source_id for i, _ in accepted])
        count(self.connection, self.now, self.counts)
        return [
            [self.verdicts.get(id(item)) or Verdict(Outcome.accepted, item.event_id) for item in i.items]
            for i in self.batch
        ]

    def _firsts(self, proven: Sequence[Item]) -> dict[bytes, tuple[bytes, bytes | None]]:
        """Return the events, and their keys, that came first with these proofs."""
        rows = KNOWN_PROOFS(self.connection, list({item.proof for item in proven}))
        return {proof: (event_id, key) for proof, event_id, key, expires_at in rows if expires_at > self.now}

    def _prove(self, proven: Sequence[Item], firsts: dict[bytes, tuple[bytes, bytes | None]]) -> None:
        """Store the first event of each proof, and mark items with the same proof under another key."""
        rows: list[tuple[Any, ...]] = []
        for item in proven:
            assert item.proof is not None
            verdict = self.verdicts.get(id(item))
            first = firsts.get(item.proof)
            if first is None:
                event_id = item.event_id if verdict is None else verdict.event_id
                firsts[item.proof] = (event_id, item.key_hash)
                rows.append((item.proof, event_id, item.key_hash, self.now + int(item.keep * 1_000_000)))
            elif verdict is None and (item.key_hash is None or item.key_hash != first[1]):
                item.same_as = EventId(first[0])
                item.marks |= Mark.same_body
        PROOFS(self.connection, rows)

    def _count(self, what: str, sources: Sequence[int]) -> None:
        for source_id, n in Counter(sources).items():
            self.counts[source_id, 0, what] += n

    def _claim_keys(self, folds: Sequence[Fold]) -> None:
        rows: list[tuple[Any, ...]] = [
            (
                f.candidate.key_hash,
                f.candidate.event_id,
                f.candidate.body_hash,
                f.intake.source_id,
                1,
                self.now,
                self.now,
                self.now + int(f.candidate.keep * 1_000_000),
            )
            for f in folds
        ]
        known = self._look_up(rows) if self.met_copies else {}
        new = [row for row in rows if row[0] not in known]
        if NEW_KEYS(self.connection, new) < len(new):
            known = self._look_up(rows)
        self.met_copies = bool(known)
        for f, row in zip(folds, rows, strict=True):
            found = known.get(row[0])
            if found is not None and found.event_id != f.candidate.event_id:
                self._judge(f, row, found)
            elif f.copies:
                self._add_own_copies(f)

    def _look_up(self, rows: Sequence[tuple[Any, ...]]) -> dict[bytes, KnownKey]:
        return {row[0]: KnownKey(*row[1:]) for row in KNOWN_KEYS(self.connection, [row[0] for row in rows])}

    def _judge(self, f: Fold, row: tuple[Any, ...], known: KnownKey) -> None:
        """Take over a known key that has lapsed; otherwise add the items as copies of its event."""
        if known.expires_at <= self.now:
            self.connection.execute(
                "UPDATE keys SET event_id = ?2, body_hash = ?3, source_id = ?4, copies = ?5, first_seen = ?6,"
                " last_seen = ?7, expires_at = ?8 WHERE hash = ?1",
                row,
            )
            forget_key(self.connection, known.event_id)
            if f.copies:
                self._add_own_copies(f)
        else:
            self._add_copies(known, [(f.candidate, f.intake), *f.copies])

    def _add_own_copies(self, f: Fold) -> None:
        """Add the copies of an event that is new in this group."""
        first = KnownKey(f.candidate.event_id, f.candidate.body_hash, 0, 1, None, None)
        self._add_copies(first, f.copies)

    def _add_copies(self, known: KnownKey, later: Sequence[tuple[Item, Intake]]) -> None:
        """Add later arrivals of an event: all are counted, the latest are stored."""
        ends = {Outcome.duplicate: known.duplicate, Outcome.conflict: known.conflict}
        first_id = EventId(known.event_id)
        outcomes = [
            Outcome.conflict if item.body_hash != known.body_hash != UNSEEN else Outcome.duplicate for item, _ in later
        ]
        left = Counter(outcomes)
        for (item, intake), outcome in zip(later, outcomes, strict=True):
            self.verdicts[id(item)] = Verdict(outcome, first_id)
            self.counts[intake.source_id, 0, outcome] += 1
            left[outcome] -= 1
            if left[outcome] >= KEPT_ARRIVALS:  # those that came after it in this very group push it out
                continue
            self.seq += 1
            self.arrivals.append(
                (
                    self.seq,
                    ends[outcome],
                    known.event_id,
                    item.event_id,
                    outcome,
                    self.now,
                    None if intake.raw is None else intake.arrival_id,
                    self.cipher.encrypt_head(intake, item),
                    self.cipher.encrypt_body(item) if outcome is Outcome.conflict else None,
                )
            )
            ends[outcome] = self.seq
        n = known.copies + len(later)
        self.copied.append((known.event_id, n, self.now, *ends.values()))
        if outgrows(known.copies, n):
            self.outgrown.append(known.event_id)

    def _insert_copies(self) -> None:
        COPIES(self.connection, sorted(self.copied))  # sorted, so that neighbours in the table are inserted together
        ARRIVALS(self.connection, self.arrivals)
        for event_id in self.outgrown:
            cut(self.connection, event_id)

    def _insert_batches(self) -> None:
        for i in self.batch:
            if i.raw is not None:
                self.connection.execute(
                    "INSERT INTO batches (id, source_id, received_at, head, body) VALUES (?,?,?,?,?)",
                    (i.arrival_id, i.source_id, self.now, *self.cipher.encrypt_batch(i)),
                )

    def _insert_events(self, accepted: Sequence[tuple[Intake, Item]]) -> None:
        rows = [
            (
                item.event_id,
                i.source_id,
                item.type,
                item.key,
                item.subject,
                self.now,
                int(item.marks),
                item.body_hash,
                item.key_hash,
                self.cipher.encrypt_head(i, item),
                self.cipher.encrypt_body(item),
                None if item.event_at is None else to_micros(item.event_at),
                item.rank,
                item.rank_scope,
                None if i.raw is None else i.arrival_id,
                item.same_as,
                item.account,
            )
            for i, item in accepted
        ]
        if all(row[11:] == NOTHING for row in rows):
            PLAIN_EVENTS(self.connection, [row[:11] for row in rows])
        else:
            EVENTS(self.connection, rows)

    def _insert_deliveries(self, accepted: Sequence[tuple[Intake, Item]]) -> None:
        deliveries, heads = [], []
        fairs: dict[bytes, int | None] = {}
        """Deliveries with a priority or leased in rounds: most groups have none."""
        fronts: dict[bytes, int] = {}
        closed = self._find_closed()
        for _, item in accepted:
            for planned in item.deliveries:
                self.seq += 1
                to, options = planned.destination_id, planned.options
                behind = planned.subject_key is not None and self._has_head(planned.subject_key, options, fronts)
                if planned.fair is not None or options & ORDERED:
                    fairs[planned.id] = planned.fair
                deliveries.append((planned.id, item.event_id, to, planned.subject_key, self.seq, int(behind), options))
                if behind:
                    continue
                lease = None if to in closed else self._lease(planned.id)
                if lease is None:
                    self.made_due.add(to)
                    lease = (self.now, 0, 0, 0, None, None)
                queue_key = planned.subject_key or planned.id
                heads.append((queue_key, to, planned.id, item.event_id, self.seq, options, *lease))
        for to, n in Counter([row[2] for row in deliveries]).items():
            self.counts[0, to, "pending"] += n
        if fairs:
            FAIR_DELIVERIES(self.connection, [(*row, fairs.get(row[0])) for row in deliveries])
            ORDERED_HEADS(
                self.connection, [(*row, fronts.get(row[0], PRIORITIES[row[5]]), fairs.get(row[2])) for row in heads]
            )
        else:
            DELIVERIES(self.connection, deliveries)
            if self.leased:
                HEADS(self.connection, heads)
            else:
                UNLEASED_HEADS(self.connection, [row[:7] for row in heads])
        if self.leased:
            self.connection.execute("UPDATE marks SET value = value + ? WHERE name = 'fence'", (len(self.leased),))

    def _find_closed(self) -> set[int]:
        """Return the destinations for which nothing is leased on arrival: paused, failing, or held back."""
        if self.reserved is None or not self.reserved.seconds:
            return set()
        return {number for (number,) in self.connection.execute(CLOSED)}

    def _lease(self, delivery_id: bytes) -> tuple[Any, ...] | None:
        """Lease a delivery with nothing before it; return columns of its head, or None where no worker has room."""
        if self.reserved is None or (seconds := self.reserved.seconds.get(delivery_id)) is None:
            return None
        if not self.leased:
            (self._fence,) = self.connection.execute("SELECT value FROM marks WHERE name = 'fence'").fetchone()
        fence = self.leased[delivery_id] = self._fence + len(self.leased) + 1
        return (self.now + max(int(seconds * 1_000_000), 1), 1, fence, 1, self.now, self.reserved.who)

    def _has_head(self, subject_key: bytes, options: int, fronts: dict[bytes, int]) -> bool:
        """Tell whether a subject has a head already. One of lower priority is raised, also a bulk replay.

        `fronts`: priorities of the heads that this group has met or makes.
        """
        priority = PRIORITIES[options]
        known = fronts.get(subject_key)
        if known is not None and known <= priority:
            return True
        found = self.connection.execute(FRONT, (subject_key,)).fetchone()
        if found is not None and priority < found[0] < Priority.quarantined:
            self.connection.execute("UPDATE heads SET turn = ? WHERE subject_key = ?", (priority, subject_key))
            self.made_due.add(found[1])
        fronts[subject_key] = priority if found is None else min(priority, found[0])
        return known is not None or found is not None


KEPT_EVENTS: Final = LookUp("SELECT id FROM events WHERE id IN")


def find_kept(connection: sqlite3.Connection, intakes: Sequence[Intake]) -> list[list[Verdict] | None]:
    """Return the verdicts on intakes that were kept before, when whoever asked did not hear of it; None: not kept.

    An intake is kept whole or not at all: one trace of it is enough.
    """
    items = [item for intake in intakes for item in intake.items]
    events = {row[0] for row in KEPT_EVENTS(connection, [item.event_id for item in items])}
    hashes = {item.key_hash for item in items if item.key_hash is not None and item.event_id not in events}
    known = {row[0]: KnownKey(*row[1:]) for row in KNOWN_KEYS(connection, list(hashes))}
    copies: dict[bytes, Outcome] = {}
    for key in known.values():
        for id_, _, outcome, *_ in connection.execute(KEPT, (key.event_id, 2 * KEPT_ARRIVALS)):
            copies[id_] = Outcome(outcome)
    found: list[list[Verdict] | None] = []
    for intake in intakes:
        if any(item.event_id in events or item.event_id in copies for item in intake.items):
            found.append([_recall(item, events, known, copies) for item in intake.items])
        else:
            found.append(None)
    return found


def _recall(
    item: Item, events: Collection[bytes], known: Mapping[bytes, KnownKey], copies: Mapping[bytes, Outcome]
) -> Verdict:
    if item.event_id in events or item.key_hash is None or item.key_hash not in known:
        return Verdict(Outcome.accepted, item.event_id)
    return Verdict(copies.get(item.event_id, Outcome.duplicate), EventId(known[item.key_hash].event_id))


def import_keys(
    connection: sqlite3.Connection, now: Micros, source_id: int, hashes: Sequence[bytes], keep: float
) -> int:
    """Store keys seen elsewhere; return how many were new. They have no arrivals here, so `copies` is 0."""
    until = now + int(keep * 1_000_000)
    rows = [(hash_, new_id(), UNSEEN, source_id, 0, now, now, until) for hash_ in dict.fromkeys(hashes)]
    return IMPORTED_KEYS(connection, rows)
