"""Settling on PostgreSQL: the end of leases, in one statement, and what it says about their destinations.

Settlements go in as columns, the fences that were still ours come out (`Answer`). First every lease is held against its
head, under lock; what is no longer ours changes nothing at all (R25-R27). The engine runs it in autocommit,
`transactions` as the last statement of a handler's own transaction (R51), hence `statement_timestamp()`. What a handler
emitted is kept by the statement before it (`emitted`, `judge`), under the same fence (R54).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from oncehook.deliveries import Options, Settle, Settlement, Streak, streaks
from oncehook.model import Intake
from oncehook.store.postgres.intake import Rows, verdicts
from oncehook.store.postgres.wire import Bigs, Blobs, Bools, Column, Floats, Ids, Integers, Smalls, Texts, storable

# Arrays 1-11 are the settlements, sorted by line; 12-14 the ranks they raise, 15 the counters' slot. Heads are locked
# first, in the order of lines, as intake does; then rows that belong to them. `over`: the head is finished and its line
# goes on. `carried`: whose attempt it was; coalesced, that is not the head. `tried`: an attempt is written down.
SETTLE: Final = """
WITH l AS MATERIALIZED (
  SELECT h.*, i.what, i.wait, i.category, i.note, i.status, i.error, i.answer, i.duration, i.source_id, i.rank, i.scope,
    i.what = 'done' OR i.what = 'dead' AND h.options & 8 = 0 AS over,
    CASE WHEN i.what = 'dead' AND h.options & 8 <> 0 THEN h.delivery_id ELSE coalesce(h.carries, h.delivery_id) END
      AS carried,
    i.what = 'dead' AND h.deaths >= 3 AS crashed, -- DEATHS
    i.note IS DISTINCT FROM 'stale' AND NOT (i.what = 'dead' AND h.deaths >= 3) AS tried,
    CASE WHEN h.upto > 0 AND h.options & 2 = 0 THEN (SELECT e.type FROM events e WHERE e.id = h.event_id) END AS type
  FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[], $5::float8[], $6::text[], $7::text[], $8::integer[],
      $9::text[], $10::bytea[], $11::float8[], $12::integer[], $13::integer[], $14::text[])
      AS i(line, head, fence, what, wait, category, note, status, error, answer, duration, source_id, rank, scope),
    LATERAL (
      SELECT h.subject_key, h.delivery_id, h.event_id, h.destination_id, h.turn, h.fence, h.run, h.attempts, h.deaths,
        h.waiting, h.upto, h.carries, h.options, h.replay_id
      FROM heads h WHERE h.subject_key = i.line AND h.delivery_id = i.head AND h.fence = i.fence AND h.leased
      LIMIT 1 FOR UPDATE             -- the newest `waiting`, also one committed after our snapshot
    ) h
), co AS (                           -- coalesced: all that waited when the lease began
  UPDATE deliveries d SET status = l.what, note = CASE WHEN d.id = l.carried THEN l.note ELSE 'coalesced' END,
    finished_by = CASE WHEN d.id <> l.carried THEN l.carried END,
    attempts = CASE WHEN d.id = l.carried THEN l.attempts - (NOT l.tried)::integer ELSE d.attempts END, fence = l.fence,
    category = CASE WHEN l.what = 'dead' THEN l.category END, last_status = l.status,
    last_error = CASE WHEN l.what = 'dead' THEN l.error END, reason = CASE WHEN l.crashed THEN 'crash' END,
    settled_at = statement_timestamp()
  FROM l
  WHERE l.over AND l.upto > 0 AND d.subject_key = l.subject_key AND d.behind AND d.status = 'pending'
    AND d.seq <= l.upto AND d.id <> l.delivery_id
    AND (l.type IS NULL OR l.type = (SELECT e.type FROM events e WHERE e.id = d.event_id))
  RETURNING d.subject_key, d.destination_id, d.id, d.replay_id, d.status
), cc AS MATERIALIZED (
  SELECT subject_key, count(*) AS n FROM co GROUP BY 1
), g AS MATERIALIZED (
  SELECT l.*, l.waiting - CASE WHEN l.over AND l.upto > 0
    THEN coalesce((SELECT cc.n FROM cc WHERE cc.subject_key = l.subject_key), 0) ELSE 0 END AS remaining
  FROM l
), x AS (                            -- nothing waits: the row goes; an intake that waits for it then makes a fresh one
  DELETE FROM heads h USING g WHERE h.subject_key = g.subject_key AND g.over AND g.remaining = 0
), n AS MATERIALIZED (               -- the next head. What came while we waited for the lock our snapshot may miss;
  SELECT g.subject_key, g.over, g.what, g.wait, g.turn, g.tried, g.remaining, g.replay_id AS own_replay, n.*
  FROM g LEFT JOIN LATERAL (         -- that can only be later ones
    SELECT d.id, d.event_id, d.run, d.options, d.replay_id FROM deliveries d
    WHERE g.over AND d.subject_key = g.subject_key AND d.behind AND d.status = 'pending' AND d.id <> g.delivery_id
      AND d.seq > CASE WHEN g.options & 2 <> 0 THEN g.upto ELSE 0 END
      AND (g.type IS NULL OR d.seq > g.upto OR g.type <> (SELECT e.type FROM events e WHERE e.id = d.event_id))
    ORDER BY d.seq LIMIT 1
  ) n ON true
  WHERE NOT g.over OR g.remaining > 0
), r AS (                            -- what ran alone and lived is no longer suspect; given back untried it still is
  UPDATE heads h SET leased = false, alone = false, upto = 0, carries = NULL,
    due_at = CASE WHEN n.over THEN statement_timestamp() WHEN n.what = 'dead' THEN 'infinity'
      ELSE statement_timestamp() + make_interval(secs => n.wait) END,
    turn = CASE WHEN NOT n.over AND (n.turn < 2 OR n.what = 'release') THEN h.turn
      WHEN (SELECT b.bulk FROM replays b WHERE b.id = CASE WHEN n.over THEN n.replay_id ELSE n.own_replay END) THEN 1
      ELSE 0 END,
    delivery_id = CASE WHEN n.over THEN n.id ELSE h.delivery_id END,
    event_id = CASE WHEN n.over THEN n.event_id ELSE h.event_id END,
    run = CASE WHEN n.over THEN coalesce(n.run, 1) ELSE h.run END,
    options = CASE WHEN n.over THEN coalesce(n.options, 0) ELSE h.options END,
    replay_id = CASE WHEN n.over THEN n.replay_id ELSE h.replay_id END,
    attempts = CASE WHEN n.over THEN 0 WHEN n.what = 'release' OR NOT n.tried THEN h.attempts - 1 ELSE h.attempts END,
    crashes = CASE WHEN n.over THEN 0 ELSE h.crashes END,
    deaths = CASE WHEN n.over THEN 0 ELSE h.deaths END,
    waiting = CASE WHEN n.over THEN n.remaining - 1 ELSE h.waiting END
  FROM n WHERE h.subject_key = n.subject_key
  RETURNING h.subject_key, h.delivery_id
), d AS (
  UPDATE deliveries d SET status = CASE WHEN z.ends THEN z.what ELSE d.status END,
    note = CASE WHEN NOT z.ends THEN d.note WHEN z.carried = d.id THEN z.note ELSE 'coalesced' END,
    finished_by = CASE WHEN z.ends AND z.carried <> d.id THEN z.carried END,
    attempts = CASE WHEN z.ends AND z.carried <> d.id THEN d.attempts ELSE z.attempts - (NOT z.tried)::integer END,
    fence = z.fence, category = CASE WHEN z.what <> 'done' THEN z.category END, last_status = z.status,
    last_error = CASE WHEN z.what <> 'done' THEN z.error END, reason = CASE WHEN z.crashed THEN 'crash' END,
    settled_at = CASE WHEN z.ends THEN statement_timestamp() ELSE d.settled_at END
  FROM (
    SELECT delivery_id AS id, what <> 'retry' AS ends, l.* FROM l WHERE what <> 'release'
    UNION ALL
    SELECT carries, false, l.* FROM l WHERE what = 'retry' AND carries IS NOT NULL
  ) z
  WHERE d.id = z.id
), t AS (
  INSERT INTO attempts (delivery_id, fence, run, n, started_at, ended_at, outcome, category, status, error, answer)
  SELECT carried, fence,
    CASE WHEN carried = delivery_id THEN run ELSE (SELECT d.run FROM deliveries d WHERE d.id = l.carried) END, attempts,
    statement_timestamp() - make_interval(secs => duration), statement_timestamp(), what, category, status, error,
    answer
  FROM l WHERE what <> 'release' AND tried
), k AS (
  INSERT INTO ranks AS k (destination_id, source_id, scope, rank, seen_at)
  SELECT destination_id, source_id, scope, max(rank), statement_timestamp() FROM l WHERE rank IS NOT NULL
  GROUP BY 1, 2, 3 ORDER BY 1, 2, 3  -- two processes raise them in the same order: no deadlock
  ON CONFLICT (destination_id, source_id, scope)
  DO UPDATE SET rank = greatest(k.rank, excluded.rank), seen_at = excluded.seen_at
), v AS (
  UPDATE replay_items v SET outcome = coalesce(v.outcome, z.status) -- by the primary key, not by what is open
  FROM (
    SELECT replay_id, delivery_id AS id, what AS status FROM l WHERE what IN ('done', 'dead') AND replay_id IS NOT NULL
    UNION ALL
    SELECT replay_id, id, status FROM co WHERE replay_id IS NOT NULL
  ) z
  WHERE v.replay_id = z.replay_id AND v.delivery_id = z.id
), f AS MATERIALIZED (
  SELECT destination_id, what, 1 AS flow FROM l WHERE what <> 'release'
  UNION ALL SELECT destination_id, status, 0 FROM co
), c AS (
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), $15::smallint, 0::smallint, destination_id, what, n FROM (
    SELECT destination_id, what, count(*) FROM f GROUP BY 1, 2
    UNION ALL
    SELECT destination_id, CASE what WHEN 'done' THEN 'succeeded' ELSE 'died' END, sum(flow)
    FROM f WHERE what <> 'retry' GROUP BY destination_id, what
    UNION ALL
    SELECT destination_id, 'pending', -count(*) FROM f WHERE what <> 'retry' GROUP BY 1
  ) AS n(destination_id, what, n)
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
)
SELECT 0, fence, NULL::uuid FROM l
UNION ALL SELECT 1, 0, subject_key FROM r WHERE delivery_id IS NULL
UNION ALL SELECT 2, count(*), NULL FROM r
UNION ALL SELECT 3, destination_id, NULL FROM destination_state
  WHERE destination_id = ANY(ARRAY(SELECT DISTINCT destination_id FROM l WHERE what = 'done'))
    AND (failures <> 0 OR open_until IS NOT NULL)
"""

# A settle that could not see the next head leaves it open. Its caller finds it at once, with a fresh snapshot: what the
# settle missed was committed before it could lock the line. When the caller died in between the sweep does, and waits
# for nobody.
_FOUND: Final = """
UPDATE heads h SET delivery_id = n.id, event_id = n.event_id, run = n.run, options = n.options, replay_id = n.replay_id,
  turn = CASE WHEN (SELECT b.bulk FROM replays b WHERE b.id = n.replay_id) THEN 1 ELSE 0 END, due_at = now()
FROM k, LATERAL (
  SELECT d.id, d.event_id, d.run, d.options, d.replay_id FROM deliveries d
  WHERE d.subject_key = k.subject_key AND d.behind AND d.status = 'pending' ORDER BY d.seq LIMIT 1
) n
WHERE h.subject_key = k.subject_key AND h.delivery_id IS NULL
RETURNING h.subject_key
"""
REFIND: Final = (
    """
WITH k AS MATERIALIZED (
  SELECT subject_key FROM heads WHERE subject_key = ANY($1::uuid[]) AND delivery_id IS NULL
  ORDER BY subject_key FOR UPDATE
)
"""
    + _FOUND
)
RESCUE: Final = (
    """
WITH k AS MATERIALIZED (
  SELECT subject_key FROM heads WHERE delivery_id IS NULL ORDER BY subject_key LIMIT 1000 FOR UPDATE SKIP LOCKED
)
"""
    + _FOUND
)

# What a group says about its destinations' breakers. The same delivery failing again is no further failure.
BREAK: Final = """
WITH i AS MATERIALIZED (
  SELECT * FROM unnest($1::smallint[], $2::boolean[], $3::integer[], $4::uuid[], $5::integer[], $6::float8[])
    AS i(destination_id, reset, failures, last_failed, enough, open)
), u AS (
  UPDATE destination_state s SET
    last_failed = CASE WHEN i.failures > 0 OR i.reset THEN i.last_failed ELSE s.last_failed END,
    failures = i.failures + CASE WHEN i.reset THEN 0
      ELSE s.failures - coalesce(i.failures = 1 AND s.last_failed = i.last_failed, false)::integer END,
    open_until = CASE
      WHEN i.failures > 0 AND i.enough <=
        i.failures + CASE WHEN i.reset THEN 0
          ELSE s.failures - coalesce(i.failures = 1 AND s.last_failed = i.last_failed, false)::integer END
      THEN now() + make_interval(secs => i.open)
      WHEN NOT i.reset THEN s.open_until END
  FROM i WHERE s.destination_id = i.destination_id
  RETURNING s.destination_id
)
INSERT INTO destination_state (destination_id, failures, last_failed, open_until)
SELECT destination_id, failures, last_failed, CASE WHEN failures >= enough THEN now() + make_interval(secs => open) END
FROM i WHERE failures > 0 AND destination_id NOT IN (SELECT destination_id FROM u)
ON CONFLICT (destination_id) DO UPDATE SET failures = destination_state.failures + excluded.failures,
  last_failed = excluded.last_failed, open_until = coalesce(excluded.open_until, destination_state.open_until)
RETURNING destination_id
"""

PAUSE: Final = """
WITH s AS (
  INSERT INTO destination_state AS s (destination_id, paused_at, paused_by, paused_why) VALUES ($1, now(), $2, $3)
  ON CONFLICT (destination_id) DO UPDATE SET paused_at = excluded.paused_at, paused_by = excluded.paused_by,
    paused_why = excluded.paused_why WHERE s.paused_at IS NULL
  RETURNING destination_id
)
INSERT INTO audit (at, actor, act, target, detail)
SELECT now(), $2, 'pause', coalesce((SELECT d.name FROM destinations d WHERE d.id = s.destination_id), $1::text), $4
FROM s
"""


@dataclass(slots=True)
class Answer:
    """What SETTLE said."""

    fences: set[int] = field(default_factory=set)
    lost_heads: list[bytes] = field(default_factory=list)
    """Lines whose next delivery it could not see."""
    made_due: bool = False
    held_back: set[int] = field(default_factory=set)
    """Destinations with failures on their account that a success takes off."""


def settled(settlements: Sequence[Settlement], slot: int) -> list[Column | int]:
    """What SETTLE takes, `$1` to `$15`. A lease that is named twice ends once."""
    rows = sorted({one.lease.fence: one for one in reversed(settlements)}.values(), key=lambda one: one.lease.line)
    leases = [one.lease for one in rows]
    evidence = [one.evidence for one in rows]
    ranked = [_raises_rank(one) for one in rows]
    scopes = [lease.subject if lease.rank_scope is None else lease.rank_scope for lease in leases]
    return [
        Ids([lease.line for lease in leases]),
        Ids([lease.head_id for lease in leases]),
        Bigs([lease.fence for lease in leases]),
        Texts([one.what for one in rows]),
        Floats([one.wait for one in rows]),
        Texts([one.category for one in rows]),
        Texts([one.note for one in rows]),
        Integers([_small(one.status) for one in evidence]),
        Texts([None if one.error is None else storable(one.error) for one in evidence]),
        Blobs([one.answer for one in evidence]),
        Floats([one.duration for one in rows]),
        Integers([lease.source_id if ranks else None for lease, ranks in zip(leases, ranked, strict=True)]),
        Integers([lease.rank if ranks else None for lease, ranks in zip(leases, ranked, strict=True)]),
        Texts([scope if ranks else None for scope, ranks in zip(scopes, ranked, strict=True)]),
        slot,
    ]


def emitted(settlements: Sequence[Settlement], slot: int) -> list[Column | int]:
    """What EMIT takes, right before SETTLE takes the same settlements."""
    leases = [one.lease for one in settlements]
    return Rows(_intakes(settlements)).parameters_beside(leases, slot)


def judge(settlements: Sequence[Settlement], rows: Sequence[tuple[Any, ...]]) -> None:
    """Read what EMIT said; it holds once it is committed."""
    emissions = [emission for one in settlements for emission in one.emits]
    for emission, (verdict,) in zip(emissions, verdicts(_intakes(settlements), rows), strict=True):
        emission.verdict = verdict


def _intakes(settlements: Sequence[Settlement]) -> list[Intake]:
    return [emission.intake for one in settlements for emission in one.emits]


def _small(status: int | None) -> int | None:
    """A status code, unless it is none."""
    return status if status is None or 0 <= status < 1 << 15 else None


def _raises_rank(settlement: Settlement) -> bool:
    lease = settlement.lease
    if lease.rank is None or settlement.what is not Settle.done or settlement.note == "stale":
        return False
    return bool(lease.options & Options.latest_wins) and (lease.rank_scope is not None or lease.subject is not None)


def answered(rows: Sequence[tuple[Any, ...]]) -> Answer:
    """Read what SETTLE said."""
    answer = Answer()
    for kind, number, line in rows:
        if kind == 0:
            answer.fences.add(number)
        elif kind == 1:
            answer.lost_heads.append(line)
        elif kind == 2:
            answer.made_due = number > 0
        else:
            answer.held_back.add(number)
    return answer


def streaks_to_tell(settlements: Sequence[Settlement], answer: Answer) -> dict[int, Streak]:
    """What those that were ours say about their destinations, where that would change anything."""
    ours = [one for one in settlements if one.lease.fence in answer.fences and one.breaker is not None]
    return {
        destination_id: streak
        for destination_id, streak in sorted(streaks(ours).items())
        if streak.failures or destination_id in answer.held_back
    }


def told(found: Mapping[int, Streak]) -> list[Column]:
    """What BREAK takes, `$1` to `$6`."""
    streaks = list(found.values())
    return [
        Smalls(list(found)),
        Bools([one.reset for one in streaks]),
        Integers([one.failures for one in streaks]),
        Ids([one.last_failed for one in streaks]),
        Integers([one.breaker.failures for one in streaks]),
        Floats([one.breaker.open for one in streaks]),
    ]
