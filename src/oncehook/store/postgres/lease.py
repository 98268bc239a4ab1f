"""Leasing on PostgreSQL: what a worker may take now, what it may expect, and how long it keeps what it has.

Wants go in as columns, leases come out, by one statement each in autocommit. Workers lease rows of `heads`, never rows
of `deliveries`, so a deep subject costs a lease nothing. The engine runs these on its hot connections, `heartbeat`
runs the last one on a thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from oncehook.deliveries import Expired, Lease, Options, Turn, Want
from oncehook.model import Mark
from oncehook.store.postgres.wire import Bigs, Column, Floats, Ids, Integers, Smalls

# Arrays 1-6 are the wants, 7 is the counters' slot, 8 who asks. `due_at` is the next moment a worker may take a row:
# its due time, the end of its lease, or infinity while it is held. So a lease that has run out is due like anything
# else (R29), and a row that is still leased when it is picked has lost its holder: that is told along with it. A head
# that our snapshot cannot follow to its event is left alone, in every part alike: it is due, the next lease sees it.
LEASE: Final = """
WITH o AS MATERIALIZED (             -- half open: whoever locks the row may send the one probe; rivals go without
  SELECT destination_id FROM destination_state
  WHERE destination_id = ANY($1::smallint[]) AND paused_at IS NULL AND open_until <= now() FOR UPDATE SKIP LOCKED
), w AS MATERIALIZED (
  SELECT w.*, s.open_until IS NOT NULL AS probing,
    CASE WHEN s.open_until IS NULL THEN w.n ELSE least(w.n, 1) END AS room
  FROM unnest($1::smallint[], $2::smallint[], $3::integer[], $4::float8[], $5::integer[], $6::float8[]) WITH ORDINALITY
      AS w(destination_id, turn, n, lease, trust, probe, ord)
    LEFT JOIN LATERAL (SELECT * FROM destination_state s WHERE s.destination_id = w.destination_id LIMIT 1) s ON true
  WHERE s.paused_at IS NULL AND (s.open_until IS NULL OR (w.destination_id IN (SELECT destination_id FROM o)) IS TRUE)
), p AS MATERIALIZED (
  SELECT w.destination_id, w.turn, w.lease, w.trust, w.probe, w.ord, w.probing, h.*
  FROM w, LATERAL (
    SELECT h.subject_key, h.delivery_id, h.event_id, h.leased, h.fence, h.run, h.attempts, h.crashes, h.alone,
      h.carries, h.waiting, h.options, h.leased_at, h.worker
    FROM heads h
    WHERE h.destination_id = w.destination_id AND h.turn = w.turn AND h.due_at <= now() AND h.delivery_id IS NOT NULL
    ORDER BY h.due_at LIMIT w.room FOR UPDATE SKIP LOCKED -- one atomic pick; rivals take other rows (R23, R24)
  ) h
), q AS MATERIALIZED (               -- coalesced: the newest that waits, of the same type or any, carries the attempt.
  SELECT p.*, c.id AS carried, coalesce(c.event_id, p.event_id) AS shown, coalesce(c.seq, 0) AS upto, c.run AS own_run,
    c.replay_id AS own_replay, p.leased AND p.turn <> 2 AND p.crashes + 1 > p.trust AS aside
  FROM p LEFT JOIN LATERAL (         -- What comes later has a higher seq: in a subject that is the order of commit
    SELECT n.id, n.event_id, n.seq, n.run, n.replay_id FROM (
      SELECT f.* FROM (
        SELECT d.id, d.event_id, d.seq, d.run, d.replay_id FROM deliveries d
        WHERE p.options & 3 <> 0 AND p.waiting > 0 AND d.subject_key = p.subject_key AND d.behind
          AND d.status = 'pending' AND d.id <> p.delivery_id
        ORDER BY d.seq LIMIT 5000    -- COVERED
      ) f ORDER BY f.seq DESC
    ) n
    WHERE p.options & 2 <> 0 OR (SELECT e.type FROM events e WHERE e.id = n.event_id)
      = (SELECT e.type FROM events e WHERE e.id = p.event_id)
    ORDER BY n.seq DESC LIMIT 1
  ) c ON true
  WHERE CASE WHEN p.probing THEN p.ord = (SELECT min(r.ord) FROM p r WHERE r.destination_id = p.destination_id)
    ELSE true END
), g AS MATERIALIZED (               -- their holders are gone
  SELECT q.*, coalesce(q.carries, q.delivery_id) AS held,
    CASE WHEN q.carries IS NULL THEN q.run ELSE (SELECT d.run FROM deliveries d WHERE d.id = q.carries) END AS held_run
  FROM q WHERE q.leased AND EXISTS (SELECT FROM events e WHERE e.id = q.shown)
), a AS (
  INSERT INTO attempts (delivery_id, fence, run, n, started_at, ended_at, outcome)
  SELECT held, fence, held_run, attempts, leased_at, now(), 'crashed' FROM g
), y AS (
  UPDATE destination_state s SET open_until = now() + make_interval(secs => q.probe)
  FROM q WHERE q.probing AND NOT q.aside AND s.destination_id = q.destination_id
), c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), $7::smallint, 0::smallint, destination_id, 'crashed', count(*)
  FROM g GROUP BY destination_id
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
-- What crashed too often in company is set aside, to be run alone (DESIGN.md 8.3); all the rest is given out.
UPDATE heads h SET leased = NOT q.aside, alone = q.turn = 2, leased_at = now(), worker = $8::text,
  turn = CASE WHEN q.aside THEN 2 ELSE h.turn END,
  fence = CASE WHEN q.aside THEN h.fence ELSE nextval('fences') END,
  due_at = CASE WHEN q.aside THEN now() ELSE now() + make_interval(secs => q.lease) END,
  attempts = h.attempts + (NOT q.aside)::integer - q.leased::integer, -- counted now (R35); a crash gives its own back
  crashes = h.crashes + q.leased::integer,
  deaths = h.deaths + (q.leased AND q.alone)::integer,          -- only a crash while it ran alone is its own (R36)
  upto = CASE WHEN q.aside THEN 0 ELSE q.upto END, carries = CASE WHEN q.aside THEN NULL ELSE q.carried END
FROM q JOIN events e ON e.id = q.shown
WHERE h.subject_key = q.subject_key
RETURNING h.subject_key, coalesce(h.carries, h.delivery_id), h.delivery_id, h.destination_id, h.fence,
  coalesce(q.own_run, h.run), h.attempts, h.deaths, h.turn, h.options,
  CASE WHEN h.carries IS NULL THEN h.replay_id ELSE q.own_replay END, q.lease, e.id, e.source_id, e.type, e.key,
  e.subject, e.received_at, e.event_at, e.marks, e.rank, e.rank_scope,
  CASE WHEN h.options & 4 <> 0 THEN (
    SELECT r.rank FROM ranks r WHERE r.destination_id = h.destination_id AND r.source_id = e.source_id
      AND r.scope = coalesce(e.rank_scope, e.subject)) END,
  coalesce(e.head, (SELECT b.head FROM batches b WHERE b.id = e.batch_id), ''), e.body, q.aside,
  CASE WHEN q.leased THEN (
    SELECT json_build_array(g.held, g.fence, g.held_run, g.attempts, g.worker)::text FROM g
    WHERE g.subject_key = h.subject_key) END
"""

# When the first of each (destination, turn) may be taken. A head that is to be found again counts when it is found.
OUTLOOK: Final = """
SELECT extract(epoch FROM min(greatest(h.due_at, s.open_until, now()))
    FILTER (WHERE t.turn < 2 OR greatest(h.due_at, s.open_until) > now()) - now())::float8,
  coalesce(bool_or(t.turn = 2 AND greatest(h.due_at, s.open_until) <= now()), false)
FROM unnest($1::smallint[]) AS d(id)
  LEFT JOIN LATERAL (SELECT * FROM destination_state s WHERE s.destination_id = d.id LIMIT 1) s ON true,
  unnest('{0,1,2}'::smallint[]) AS t(turn),
  LATERAL (
    SELECT h.due_at FROM heads h
    WHERE h.destination_id = d.id AND h.turn = t.turn AND h.due_at < 'infinity' AND h.delivery_id IS NOT NULL
    ORDER BY h.due_at LIMIT 1
  ) h
WHERE s.paused_at IS NULL
"""

# A row that is locked is passed by: whoever locks it is about to settle it or to add to its subject, and one such row
# must not hold up the heartbeats of all others. It is still ours as far as can be seen.
RENEW: Final = """
WITH i AS MATERIALIZED (
  SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::float8[]) AS i(line, head, fence, lease)
), p AS MATERIALIZED (
  SELECT h.subject_key, i.lease FROM i, LATERAL (
    SELECT h.subject_key FROM heads h
    WHERE h.subject_key = i.line AND h.delivery_id = i.head AND h.fence = i.fence AND h.leased
    LIMIT 1 FOR UPDATE SKIP LOCKED
  ) h
), u AS (
  UPDATE heads h SET due_at = now() + make_interval(secs => p.lease)
  FROM p WHERE h.subject_key = p.subject_key RETURNING h.fence
)
SELECT fence FROM u
UNION ALL
SELECT h.fence FROM i, LATERAL (
  SELECT h.fence FROM heads h
  WHERE h.subject_key = i.line AND h.delivery_id = i.head AND h.fence = i.fence AND h.leased LIMIT 1
) h WHERE h.fence NOT IN (SELECT fence FROM u)
"""

_ASIDE: Final = 25
_FORMER: Final = 26
_TURNS: Final = tuple(Turn)
_OPTIONS: Final = tuple(Options(number) for number in range(32))
_MARKS: Final = tuple(Mark(number) for number in range(16))


def wanted(wants: Sequence[Want], slot: int, worker: str | None = None) -> list[Column | int | str | None]:
    """What LEASE takes, `$1` to `$8`."""
    return [
        Smalls([want.destination_id for want in wants]),
        Smalls([want.turn for want in wants]),
        Integers([want.limit for want in wants]),
        Floats([want.lease for want in wants]),
        Integers([want.trust for want in wants]),
        Floats([want.probe for want in wants]),
        slot,
        worker,
    ]


def given(rows: Sequence[tuple[Any, ...]], names: Mapping[int, str]) -> list[Lease]:
    """The leases that LEASE gave out; `names` are the sources' by their numbers."""
    return [
        Lease(*(*row[:8], _TURNS[row[8]], _OPTIONS[row[9]], *row[10:14], names[row[13]], *row[14:19], *_rest(row)))
        for row in rows
        if not row[_ASIDE]
    ]


def _rest(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_MARKS[row[19]], *row[20:_ASIDE])


def taken_over(rows: Sequence[tuple[Any, ...]]) -> list[Expired]:
    """The leases that had run out when LEASE came upon them."""
    return [_expired(row[3], *json.loads(row[_FORMER])) for row in rows if row[_FORMER] is not None]


def _expired(destination_id: int, held: str, fence: int, run: int, attempt: int, worker: str | None) -> Expired:
    return Expired(bytes.fromhex(held.replace("-", "")), destination_id, fence, run, attempt, worker)


def prolonged(leases: Sequence[Lease]) -> list[Column]:
    """What RENEW takes, `$1` to `$4`; sorted, so that rows are locked in the order in which everybody locks them."""
    ordered = sorted(leases, key=lambda lease: lease.line)
    return [
        Ids([lease.line for lease in ordered]),
        Ids([lease.head_id for lease in ordered]),
        Bigs([lease.fence for lease in ordered]),
        Floats([lease.seconds for lease in ordered]),
    ]
