-- The inbox: dedup memory, events, later arrivals, the work they cause, and the numbers that are shown.
-- Times are microseconds since 1970, ids and hashes 16 bytes. No foreign keys: keys outlive events,
-- a delivery's event is in its id, and `doctor` checks what they would check.

CREATE TABLE sources (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE destinations (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);

-- What makes two arrivals the same event. A table of its own, so that events can be pruned while their
-- keys are still remembered (R20). A rowid table: the random part is then a narrow index.
CREATE TABLE keys (
  hash       BLOB PRIMARY KEY,
  event_id   BLOB NOT NULL,
  body_hash  BLOB NOT NULL,
  source_id  INTEGER NOT NULL,
  copies     INTEGER NOT NULL,
  first_seen INTEGER NOT NULL,
  last_seen  INTEGER NOT NULL,
  expires_at INTEGER NOT NULL
);

CREATE TABLE events (
  seq         INTEGER PRIMARY KEY,
  id          BLOB NOT NULL UNIQUE,      -- UUIDv7, last two bytes zero
  source_id   INTEGER NOT NULL,
  type        TEXT NOT NULL,
  key         TEXT,
  subject     TEXT,
  received_at INTEGER NOT NULL,
  event_at    INTEGER,                   -- when it happened, by the sender's word
  marks       INTEGER NOT NULL,
  rank        INTEGER,
  rank_scope  TEXT,
  body_hash   BLOB NOT NULL,
  key_hash    BLOB,
  batch_id    BLOB,                      -- the split request it came in
  head        BLOB,                      -- request line and headers; NULL: see its batch
  body        BLOB NOT NULL
);
CREATE INDEX events_source  ON events (source_id, id);
CREATE INDEX events_subject ON events (subject, id) WHERE subject IS NOT NULL;

-- The raw bytes of a request that was split into several events.
CREATE TABLE batches (
  id BLOB PRIMARY KEY, source_id INTEGER NOT NULL, received_at INTEGER NOT NULL, head BLOB NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;

-- Later arrivals of an event that was already there: a small ring per event.
CREATE TABLE arrivals (
  event_id BLOB NOT NULL,
  slot     INTEGER NOT NULL,             -- 0-19 duplicates, 20-39 conflicts
  id       BLOB NOT NULL,
  outcome  TEXT NOT NULL,
  at       INTEGER NOT NULL,
  batch_id BLOB,
  head     BLOB,
  body     BLOB,                         -- only when it differs
  PRIMARY KEY (event_id, slot)
) WITHOUT ROWID;

-- The latest arrivals that were turned away: a ring, without bodies.
CREATE TABLE rejections (
  slot INTEGER PRIMARY KEY, n INTEGER NOT NULL, source TEXT NOT NULL, at INTEGER NOT NULL, code TEXT NOT NULL,
  reason TEXT NOT NULL, peer TEXT NOT NULL, size INTEGER NOT NULL
);

-- One per event and destination: the record of the work.
CREATE TABLE deliveries (
  id             BLOB PRIMARY KEY,       -- event id with the destination's number in the last two bytes
  event_id       BLOB NOT NULL,
  destination_id INTEGER NOT NULL,
  subject_key    BLOB,                   -- NULL: no subject, waits for nobody
  seq            INTEGER NOT NULL,       -- order of commit
  behind         INTEGER NOT NULL DEFAULT 0, -- came while its subject had a head
  status         TEXT NOT NULL DEFAULT 'pending',
  note           TEXT,                   -- stale | coalesced
  run            INTEGER NOT NULL DEFAULT 1,
  attempts       INTEGER NOT NULL DEFAULT 0,
  fence          INTEGER NOT NULL DEFAULT 0,
  finished_by    BLOB,
  replay_id      BLOB,
  settled_at     INTEGER
) WITHOUT ROWID;
CREATE INDEX deliveries_waiting ON deliveries (subject_key, seq) WHERE status = 'pending' AND behind;
CREATE INDEX deliveries_dead    ON deliveries (destination_id, id) WHERE status = 'dead';

-- The work itself: one row for each (destination, source, subject) that has open deliveries, naming the one
-- at its head. Workers lease these rows, never deliveries, so a deep subject costs nothing.
CREATE TABLE heads (
  subject_key    BLOB PRIMARY KEY,       -- deliveries without subject: their own id
  destination_id INTEGER NOT NULL,
  turn           INTEGER NOT NULL DEFAULT 0, -- 0 live, 1 bulk replay
  due_at         INTEGER NOT NULL,       -- the next moment a worker may take this row
  leased         INTEGER NOT NULL DEFAULT 0,
  delivery_id    BLOB NOT NULL,
  event_id       BLOB NOT NULL,
  upto           INTEGER NOT NULL DEFAULT 0,
  fence          INTEGER NOT NULL DEFAULT 0,
  run            INTEGER NOT NULL DEFAULT 1,
  attempts       INTEGER NOT NULL DEFAULT 0,
  crashes        INTEGER NOT NULL DEFAULT 0,
  waiting        INTEGER NOT NULL DEFAULT 0,
  leased_at      INTEGER
);
CREATE INDEX heads_due ON heads (destination_id, turn, due_at);

-- Signed changes per minute; a level is their sum, a chart is its rows (R68).
CREATE TABLE counters (
  minute INTEGER NOT NULL, source_id INTEGER NOT NULL, destination_id INTEGER NOT NULL, what TEXT NOT NULL, n INTEGER NOT NULL,
  PRIMARY KEY (minute, source_id, destination_id, what)
) WITHOUT ROWID;

-- High-water marks, written once per transaction: time never runs backward (R64), no number is given twice.
CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO marks VALUES ('clock', 0), ('seq', 0), ('fence', 0), ('rejection', 0);
