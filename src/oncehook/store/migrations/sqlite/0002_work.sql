-- The way out: what routes ask of a delivery, attempts, replays, what people did, and who works.

ALTER TABLE deliveries ADD COLUMN options        INTEGER NOT NULL DEFAULT 0; -- the route's and the replay's: see Options
ALTER TABLE deliveries ADD COLUMN category       TEXT;    -- of the last attempt
ALTER TABLE deliveries ADD COLUMN last_status    INTEGER; -- its status code
ALTER TABLE deliveries ADD COLUMN last_error     TEXT;
ALTER TABLE deliveries ADD COLUMN last_replay_at INTEGER;
ALTER TABLE deliveries ADD COLUMN reason         TEXT;    -- why it was discarded, or is dead without an attempt to blame
-- One index for the lists of what is pending, dead or discarded, newest first.
DROP INDEX deliveries_dead;
CREATE INDEX deliveries_unfinished ON deliveries (status, id) WHERE status <> 'done';

ALTER TABLE heads ADD COLUMN options   INTEGER NOT NULL DEFAULT 0;
ALTER TABLE heads ADD COLUMN replay_id BLOB;                        -- of the head's run
ALTER TABLE heads ADD COLUMN carries   BLOB;                        -- coalesced: the newest delivery this attempt covers
ALTER TABLE heads ADD COLUMN alone     INTEGER NOT NULL DEFAULT 0;  -- leased to run alone: a crash now is its own
ALTER TABLE heads ADD COLUMN deaths    INTEGER NOT NULL DEFAULT 0;  -- crashes while it ran alone; `crashes` counts all
-- What is under way: as small as the workers are few.
CREATE INDEX heads_leased ON heads (destination_id) WHERE leased;

-- For the sweep: whether anything still needs the raw request it came in.
CREATE INDEX events_batch   ON events (batch_id) WHERE batch_id IS NOT NULL;
CREATE INDEX arrivals_batch ON arrivals (batch_id) WHERE batch_id IS NOT NULL;

CREATE TABLE attempts (
  delivery_id BLOB NOT NULL,
  fence       INTEGER NOT NULL,
  run         INTEGER NOT NULL,
  n           INTEGER NOT NULL,           -- within the run
  started_at  INTEGER NOT NULL,
  ended_at    INTEGER NOT NULL,
  outcome     TEXT NOT NULL,              -- done | retry | dead | crashed
  category    TEXT,
  status      INTEGER,
  error       TEXT,
  answer      BLOB,                       -- the first 4 KB of what the destination said
  PRIMARY KEY (delivery_id, fence)
) WITHOUT ROWID;

-- A replay is a durable order. Its items are fixed when it is made, so what was planned is what is done.
CREATE TABLE replays (
  id          BLOB PRIMARY KEY,
  state       TEXT NOT NULL,              -- running | paused | done | aborted
  request_key TEXT UNIQUE,                -- the same request makes no second replay
  about       TEXT NOT NULL,              -- the order in its own words, JSON
  actor       TEXT NOT NULL,
  reason      TEXT NOT NULL,
  options     INTEGER NOT NULL DEFAULT 0, -- of its runs: fresh_id
  force       INTEGER NOT NULL DEFAULT 0,
  rate        REAL,
  bulk        INTEGER NOT NULL,
  planned     INTEGER NOT NULL,
  next_at     INTEGER NOT NULL,           -- when more may be fed (rate)
  created_at  INTEGER NOT NULL,
  finished_at INTEGER
) WITHOUT ROWID;
CREATE INDEX replays_running ON replays (id) WHERE state = 'running';
CREATE TABLE replay_items (
  replay_id BLOB NOT NULL, n INTEGER NOT NULL, delivery_id BLOB NOT NULL,
  fed_at INTEGER, outcome TEXT,           -- done | dead | skipped; NULL: not yet
  PRIMARY KEY (replay_id, delivery_id)
) WITHOUT ROWID;
CREATE INDEX replay_items_open ON replay_items (replay_id, n) WHERE outcome IS NULL;
CREATE INDEX replay_items_odd  ON replay_items (replay_id, outcome) WHERE outcome IN ('dead', 'skipped');

CREATE TABLE audit (
  n INTEGER PRIMARY KEY, at INTEGER NOT NULL, actor TEXT NOT NULL, act TEXT NOT NULL, target TEXT NOT NULL, detail TEXT NOT NULL
);

-- What is known of a destination while it runs: paused by a person, held back by its breaker.
CREATE TABLE destination_state (
  destination_id INTEGER PRIMARY KEY,
  paused_at INTEGER, paused_by TEXT, paused_why TEXT,
  failures INTEGER NOT NULL DEFAULT 0,    -- in a row, over different deliveries
  last_failed BLOB,
  open_until INTEGER
);

CREATE TABLE workers (
  id TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, started_at INTEGER NOT NULL, seen_at INTEGER NOT NULL,
  leases INTEGER NOT NULL, destinations TEXT NOT NULL
) WITHOUT ROWID;

-- The highest rank delivered, per destination and scope (latest wins).
CREATE TABLE ranks (
  destination_id INTEGER NOT NULL, source_id INTEGER NOT NULL, scope TEXT NOT NULL, rank INTEGER NOT NULL, seen_at INTEGER NOT NULL,
  PRIMARY KEY (destination_id, source_id, scope)
) WITHOUT ROWID;

-- Watermarks that are crossed now, so that each is told once.
CREATE TABLE crossings (name TEXT PRIMARY KEY, since INTEGER NOT NULL) WITHOUT ROWID;
