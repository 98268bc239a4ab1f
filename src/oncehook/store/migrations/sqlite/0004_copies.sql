-- An event that comes again costs one small row that is changed and one that is added at the end. Before, every copy
-- changed its key and found its place in a ring by event: two random pages, and more than a new event cost.

-- How often an event came, once it came again. Its later arrivals hang together, latest first: two chains, so that
-- a storm of duplicates cannot push the conflicts out. `keys.copies` and `keys.last_seen` tell only how a key began.
CREATE TABLE copies (
  event_id  BLOB PRIMARY KEY,
  n         INTEGER NOT NULL,             -- arrivals in all, the first one included
  last_seen INTEGER NOT NULL,
  duplicate INTEGER,                      -- the latest of each kind: arrivals.n
  conflict  INTEGER
) WITHOUT ROWID;

ALTER TABLE arrivals RENAME TO arrivals_by_slot;
CREATE TABLE arrivals (
  n        INTEGER PRIMARY KEY,           -- drawn like deliveries.seq: never given twice, so a broken chain just ends
  before   INTEGER,                       -- the one before it of its event and kind
  event_id BLOB NOT NULL,
  id       BLOB NOT NULL,
  outcome  TEXT NOT NULL,
  at       INTEGER NOT NULL,
  batch_id BLOB,
  head     BLOB,
  body     BLOB                           -- only when it differs
);

INSERT INTO arrivals (n, before, event_id, id, outcome, at, batch_id, head, body)
SELECT n, lag(n) OVER (PARTITION BY event_id, outcome ORDER BY n), event_id, id, outcome, at, batch_id, head, body
FROM (
  SELECT *, (SELECT value FROM marks WHERE name = 'seq') + row_number() OVER (ORDER BY at, id) AS n
  FROM arrivals_by_slot
);
UPDATE marks SET value = max(value, coalesce((SELECT max(n) FROM arrivals), 0)) WHERE name = 'seq';

INSERT INTO copies (event_id, n, last_seen, duplicate, conflict)
SELECT event_id, max(n), max(last_seen), max(duplicate), max(conflict) FROM (
  SELECT event_id, copies AS n, last_seen, NULL AS duplicate, NULL AS conflict FROM keys
  WHERE last_seen > first_seen OR copies > 1
  UNION ALL
  SELECT event_id, 1 + count(*), max(at), max(n) FILTER (WHERE outcome = 'duplicate'),
    max(n) FILTER (WHERE outcome = 'conflict')
  FROM arrivals GROUP BY event_id
)
GROUP BY event_id;

DROP TABLE arrivals_by_slot;
CREATE INDEX arrivals_batch ON arrivals (batch_id) WHERE batch_id IS NOT NULL;
