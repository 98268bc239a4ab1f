"""The intake statement of PostgreSQL, its parameters and its answer.

A group of intakes goes in (`Rows`), one statement keeps all of it in one commit (`INTAKE`), and one verdict per item
comes out (`verdicts`). Locks are taken in the order keys (sorted), heads (sorted), deliveries, and never held across
a round trip: rivals wait for each other and cannot deadlock. `commit` runs it. `EMIT` is the same statement in front of
a settle, in one transaction with it: it locks the lines to be settled in their place among those that it adds to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from oncehook.deliveries import Lease
from oncehook.errors import StoreError
from oncehook.model import Intake, Item, Outcome, Verdict
from oncehook.store.base import UNSEEN
from oncehook.store.postgres.wire import Blobs, Column, Floats, Ids, Integers, Smalls, Texts, Times

# Arrays 1-17 are the candidates, 18-21 the split requests, 22-29 copies inside this group, 30-34 the deliveries that
# candidates would cause, 35 is the counters' slot. Plans are forced (see `opening`), so the statement is written for
# probes: LATERAL … LIMIT 1 where a CTE is looked into, IN (SELECT …) as a hashed set, nothing that needs statistics.
_KEYS_AND_EVENTS: Final = """
WITH i AS MATERIALIZED (
  SELECT * FROM unnest($1::uuid[], $2::smallint[], $3::text[], $4::text[], $5::text[], $6::timestamptz[],
      $7::smallint[], $8::integer[], $9::text[], $10::uuid[], $11::uuid[], $12::uuid[], $13::uuid[], $14::bytea[],
      $15::bytea[], $16::integer[], $17::float8[])
    AS i(id, source_id, type, key, subject, event_at, marks, rank, rank_scope, body_hash, hash, arrival_id, batch_id,
      head, body, copies, keep)
), k AS (
  INSERT INTO keys AS k (hash, event_id, body_hash, source_id, copies, first_seen, last_seen, expires_at)
  SELECT hash, id, body_hash, source_id, copies, now(), now(), now() + make_interval(secs => keep)
  FROM i WHERE hash IS NOT NULL
  ORDER BY hash                     -- two processes with overlapping keys lock them in the same order: no deadlock
  ON CONFLICT (hash) DO UPDATE SET  -- waits for a rival's commit, then decides on its row: exactly one winner (R11);
    event_id   = CASE WHEN k.expires_at <= now() THEN excluded.event_id   ELSE k.event_id END, -- so does a lapsed key
    body_hash  = CASE WHEN k.expires_at <= now() THEN excluded.body_hash  ELSE k.body_hash END,
    first_seen = CASE WHEN k.expires_at <= now() THEN excluded.first_seen ELSE k.first_seen END,
    copies     = CASE WHEN k.expires_at <= now() THEN excluded.copies     ELSE k.copies + excluded.copies END,
    expires_at = CASE WHEN k.expires_at <= now() THEN excluded.expires_at ELSE k.expires_at END,
    last_seen  = now()
  RETURNING k.hash, k.event_id, k.body_hash, k.copies
), e AS (                           -- accepted: no key, or the id we offered is the one that stands
  INSERT INTO events (id, source_id, type, key, subject, received_at, event_at, marks, rank, rank_scope, body_hash,
    key_hash, batch_id, head, body)
  SELECT id, source_id, type, key, subject, now(), event_at, marks, rank, rank_scope, body_hash, hash, batch_id, head,
    body
  FROM i WHERE hash IS NULL OR id IN (SELECT event_id FROM k)
  RETURNING id, source_id
), b AS (
  INSERT INTO batches (id, source_id, received_at, head, body)
  SELECT id, source_id, now(), head, body
  FROM unnest($18::uuid[], $19::smallint[], $20::bytea[], $21::bytea[]) AS b(id, source_id, head, body)
  WHERE $18 IS NOT NULL             -- decided once, before anything is unpacked: a group without any pays nothing
), x AS MATERIALIZED (              -- copies: of keys that stood before (zeros: an imported one, whose body nobody
                                    -- knows), then of candidates of this very group
  SELECT k.event_id, k.copies - i.copies + 1 AS nth,
    k.body_hash NOT IN (i.body_hash, '00000000-0000-0000-0000-000000000000') AS differs, i.source_id, i.arrival_id,
    i.batch_id, i.head, i.body
  FROM i, LATERAL (SELECT * FROM k WHERE k.hash = i.hash LIMIT 1) k
  WHERE i.hash IS NOT NULL AND i.id NOT IN (SELECT id FROM e)
  UNION ALL
  SELECT k.event_id, k.copies - c.later,
    k.body_hash NOT IN (c.body_hash, '00000000-0000-0000-0000-000000000000'), c.source_id, c.arrival_id,
    c.batch_id, c.head,
    coalesce(c.body, CASE WHEN k.body_hash <> c.body_hash THEN (SELECT i.body FROM i WHERE i.hash = c.hash) END)
  FROM unnest($22::uuid[], $23::smallint[], $24::uuid[], $25::uuid[], $26::uuid[], $27::bytea[], $28::bytea[],
      $29::integer[]) AS c(hash, source_id, body_hash, arrival_id, batch_id, head, body, later),
    LATERAL (SELECT * FROM k WHERE k.hash = c.hash LIMIT 1) k
  WHERE $22 IS NOT NULL
), r AS (                           -- a ring per event: slots 0-19 for duplicates, 20-39 for conflicts
  INSERT INTO arrivals AS r (event_id, slot, id, outcome, at, batch_id, head, body)
  SELECT DISTINCT ON (event_id, slot) event_id, slot, arrival_id,
    CASE WHEN differs THEN 'conflict' ELSE 'duplicate' END, now(), batch_id, head, CASE WHEN differs THEN body END
  FROM (SELECT *, (nth % 20 + CASE WHEN differs THEN 20 ELSE 0 END)::smallint AS slot FROM x) x
  ORDER BY event_id, slot, nth DESC -- one statement may touch a row once: of two that share a slot the later stays
  ON CONFLICT (event_id, slot) DO UPDATE SET id = excluded.id, outcome = excluded.outcome, at = excluded.at,
    batch_id = excluded.batch_id, head = excluded.head, body = excluded.body
), d AS MATERIALIZED (
  SELECT * FROM unnest($30::uuid[], $31::uuid[], $32::smallint[], $33::uuid[], $34::smallint[]) WITH ORDINALITY
    AS d(id, event_id, destination_id, subject_key, options, ord)
  WHERE (event_id IN (SELECT id FROM e)) IS TRUE -- a hashed set; without IS TRUE it becomes a quadratic join
), """
_HEADS: Final = """h AS (           -- makes the subject's row or locks it until commit: nobody else adds, settles or
  INSERT INTO heads AS h (subject_key, destination_id, due_at, delivery_id, event_id, options, waiting) -- promotes
  SELECT coalesce(subject_key, id), min(destination_id), now(), (array_agg(id ORDER BY ord))[1],
    (array_agg(event_id ORDER BY ord))[1], (array_agg(options ORDER BY ord))[1], count(*) - 1
  FROM d GROUP BY 1 ORDER BY 1      -- sorted again: the same lock order as settle
  ON CONFLICT (subject_key) DO UPDATE SET waiting = h.waiting + 1 + excluded.waiting,
    turn = CASE WHEN h.turn = 2 THEN 2 ELSE 0 END -- live work waits behind no replay; a suspect stays one
  RETURNING h.delivery_id, h.xmax = 0 AS fresh -- xmax = 0: inserted, not updated
)"""
_DELIVERIES: Final = """, w AS (
  INSERT INTO deliveries (id, event_id, destination_id, subject_key, options, behind)
  SELECT id, event_id, destination_id, subject_key, options, id NOT IN (SELECT delivery_id FROM h WHERE fresh) FROM d
  WHERE (SELECT count(*) FROM h) > 0 -- h is finished first, so seq is drawn under its locks: order of commit (R42)
  ORDER BY ord
), c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), $35::smallint, source_id, destination_id, what, n FROM (
    SELECT source_id, 0::smallint, 'received', sum(copies) FROM i GROUP BY source_id
    UNION ALL
    SELECT source_id, 0::smallint, 'accepted', count(*) FROM e GROUP BY source_id
    UNION ALL
    SELECT source_id, 0::smallint, CASE WHEN differs THEN 'conflict' ELSE 'duplicate' END, count(*)
    FROM x GROUP BY source_id, differs
    UNION ALL
    SELECT 0::smallint, destination_id, 'pending', count(*) FROM d GROUP BY destination_id
  ) AS n(source_id, destination_id, what, n)
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
SELECT count(*), NULL::uuid, NULL::uuid, NULL::uuid FROM e
UNION ALL
SELECT 0, hash, event_id, body_hash FROM k WHERE event_id NOT IN (SELECT id FROM e)
"""
INTAKE: Final = _KEYS_AND_EVENTS + _HEADS + _DELIVERIES

# Arrays 36-39 are the heads of the lines that are settled next in this transaction. They are there, because they are
# leased: nothing of them changes here. One that is not there any more is a lost lease, and then all is rolled back.
_HEADS_AND_LEASED: Final = """h AS (
  INSERT INTO heads AS h (subject_key, destination_id, due_at, delivery_id, event_id, options, waiting)
  SELECT line, min(destination_id), now(), (array_agg(id ORDER BY ord))[1], (array_agg(event_id ORDER BY ord))[1],
    (array_agg(options ORDER BY ord))[1], count(ord) - 1
  FROM (
    SELECT coalesce(subject_key, id), destination_id, id, event_id, options, ord FROM d
    UNION ALL
    SELECT *, 0::smallint, NULL::bigint FROM unnest($36::uuid[], $37::smallint[], $38::uuid[], $39::uuid[])
  ) AS d(line, destination_id, id, event_id, options, ord)
  GROUP BY 1 ORDER BY 1
  ON CONFLICT (subject_key) DO UPDATE SET waiting = h.waiting + 1 + excluded.waiting,
    turn = CASE WHEN h.turn = 2 OR excluded.waiting < 0 THEN h.turn ELSE 0 END
  RETURNING h.delivery_id, h.xmax = 0 AS fresh
)"""
EMIT: Final = _KEYS_AND_EVENTS + _HEADS_AND_LEASED + _DELIVERIES


class Rows:
    """The columns of one group, in order of arrival. A key comes once: later items with it are its copies."""

    def __init__(self, batch: Sequence[Intake], bare: Collection[bytes] = ()) -> None:
        """`bare`: event ids of items that go without body and deliveries, being copies as far as anybody knows."""
        self._bare = bare
        self.items: list[tuple[Item, Intake]] = []
        self.counts: list[int] = []
        self.copies: list[tuple[int, Item, Intake, int]] = []
        """Place of the candidate, the copy, its intake, and which copy it is."""
        self.splits: list[Intake] = []
        places: dict[bytes, int] = {}
        for intake in batch:
            if intake.raw is not None:
                self.splits.append(intake)
            for item in intake.items:
                place = len(self.items)
                if item.key_hash is not None and (first := places.setdefault(item.key_hash, place)) != place:
                    self.copies.append((first, item, intake, self.counts[first]))
                    self.counts[first] += 1
                else:
                    self.items.append((item, intake))
                    self.counts.append(1)

    def parameters(self, slot: int) -> list[Column | int]:
        """What the statement takes, `$1` to `$35`."""
        return [*self._candidates(), *self._splits(), *self._copies(), *self._deliveries(), slot]

    def parameters_beside(self, leases: Sequence[Lease], slot: int) -> list[Column | int]:
        """What EMIT takes, `$1` to `$39`: the leases are those that are settled next."""
        return [
            *self.parameters(slot),
            Ids([lease.line for lease in leases]),
            Smalls([lease.destination_id for lease in leases]),
            Ids([lease.head_id for lease in leases]),
            Ids([lease.event_id for lease in leases]),
        ]

    def _candidates(self) -> list[Column]:
        rows = self.items
        items = [item for item, _ in rows]
        return [
            Ids([item.event_id for item in items]),
            Smalls([intake.source_id for _, intake in rows]),
            Texts([item.type for item in items]),
            Texts([item.key for item in items]),
            Texts([item.subject for item in items]),
            Times([item.event_at for item in items]),
            Smalls([item.marks for item in items]),
            Integers([item.rank for item in items]),
            Texts([item.rank_scope for item in items]),
            Ids([item.body_hash for item in items]),
            Ids([item.key_hash for item in items]),
            Ids([intake.arrival_id for _, intake in rows]),
            Ids([intake.arrival_id if intake.raw is not None else None for _, intake in rows]),
            Blobs([intake.headers if intake.raw is None else None for _, intake in rows]),
            Blobs([None if item.event_id in self._bare else item.body for item in items]),
            Integers(self.counts),
            Floats([item.keep for item in items]),
        ]

    def _splits(self) -> list[Column]:
        splits = self.splits
        return [
            Ids([intake.arrival_id for intake in splits]),
            Smalls([intake.source_id for intake in splits]),
            Blobs([intake.headers for intake in splits]),
            Blobs([intake.raw for intake in splits]),
        ]

    def _copies(self) -> list[Column]:
        rows = self.copies
        return [
            Ids([item.key_hash for _, item, _, _ in rows]),
            Smalls([intake.source_id for _, _, intake, _ in rows]),
            Ids([item.body_hash for _, item, _, _ in rows]),
            Ids([intake.arrival_id for _, _, intake, _ in rows]),
            Ids([intake.arrival_id if intake.raw is not None else None for _, _, intake, _ in rows]),
            Blobs([intake.headers if intake.raw is None else None for _, _, intake, _ in rows]),
            # the candidate's own body serves for a copy that is like it
            Blobs(
                [None if item.body_hash == self.items[place][0].body_hash else item.body for place, item, _, _ in rows]
            ),
            Integers([self.counts[place] - 1 - nth for place, _, _, nth in rows]),
        ]

    def _deliveries(self) -> list[Column]:
        items = [item for item, _ in self.items if item.event_id not in self._bare]
        rows = [(item.event_id, planned) for item in items for planned in item.deliveries]
        return [
            Ids([planned.id for _, planned in rows]),
            Ids([event_id for event_id, _ in rows]),
            Smalls([planned.destination_id for _, planned in rows]),
            Ids([planned.subject_key for _, planned in rows]),
            Smalls([planned.options for _, planned in rows]),
        ]


def verdicts(batch: Sequence[Intake], rows: Sequence[tuple[Any, ...]]) -> list[list[Verdict]]:
    """What became of every item, by what the statement said: how many were accepted, and which keys stood before."""
    (accepted, *_), *stood = rows
    outcome = _judged(batch, {key_hash: (event_id, body_hash) for _, key_hash, event_id, body_hash in stood})
    if accepted != sum(v.outcome is Outcome.accepted for group in outcome for v in group):
        raise StoreError("PostgreSQL kept another number of events than it was given.")
    return outcome


def _judged(batch: Sequence[Intake], first: dict[bytes, tuple[bytes, bytes]]) -> list[list[Verdict]]:
    """`first`: of keys that stood before, event and body hash."""

    def judge(item: Item) -> Verdict:
        if item.key_hash is None:
            return Verdict(Outcome.accepted, item.event_id)
        stands = first.get(item.key_hash)
        if stands is None:
            first[item.key_hash] = (item.event_id, item.body_hash)
            return Verdict(Outcome.accepted, item.event_id)
        event_id, body_hash = stands
        is_copy = body_hash in (item.body_hash, UNSEEN)
        return Verdict(Outcome.duplicate if is_copy else Outcome.conflict, event_id)

    return [[judge(item) for item in intake.items] for intake in batch]
