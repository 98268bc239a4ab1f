-- The inbox: keys, events and their later arrivals, the work they cause, what people did, and the numbers that are shown.
-- Times are microseconds since 1970, ids and hashes 16 bytes (see `model.Id`). No foreign keys: keys outlive events, a
-- delivery's event is in its id, and `doctor` checks what they would check.

-- Names, once and for all: what was kept under one refers to its id. `account`: whose name it is, also when what it
-- stood for is deleted; nobody else gets it, and with it what is kept (S32).
CREATE TABLE sources (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, account TEXT);
CREATE TABLE destinations (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, account TEXT);

-- What makes two arrivals the same event. A table of its own, so that events can be pruned while their keys are still
-- remembered (R20). A rowid table: the random part is then a narrow index.
CREATE TABLE keys (
  hash       BLOB PRIMARY KEY,
  event_id   BLOB NOT NULL,
  body_hash  BLOB NOT NULL,
  source_id  INTEGER NOT NULL,
  copies     INTEGER NOT NULL,           -- how the key began; later arrivals are counted in `copies`
  first_seen INTEGER NOT NULL,
  last_seen  INTEGER NOT NULL,
  expires_at INTEGER NOT NULL
);

-- What was signed, and the first event that came with it: so a captured request that comes back under another key is
-- recognised. Only for sources whose signature does not cover the key. A rowid table, like `keys`.
CREATE TABLE proofs (
  hash       BLOB PRIMARY KEY,
  event_id   BLOB NOT NULL,
  key_hash   BLOB,                       -- the key under which it came first; NULL: it had none
  expires_at INTEGER NOT NULL
);

CREATE TABLE events (
  seq         INTEGER PRIMARY KEY,
  id          BLOB NOT NULL UNIQUE,      -- UUIDv7, last three bytes zero
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
  body        BLOB NOT NULL,
  same_as     BLOB,                      -- the event in which the same came before, under another key
  account     TEXT                       -- whose it is; NULL: nobody's
);
CREATE INDEX events_source  ON events (source_id, id);
CREATE INDEX events_subject ON events (subject, id) WHERE subject IS NOT NULL;
CREATE INDEX events_account ON events (account, id) WHERE account IS NOT NULL;
-- For the sweep: whether anything still needs the raw request it came in.
CREATE INDEX events_batch   ON events (batch_id) WHERE batch_id IS NOT NULL;

-- The raw bytes of a request that was split into several events.
CREATE TABLE batches (
  id BLOB PRIMARY KEY, source_id INTEGER NOT NULL, received_at INTEGER NOT NULL, head BLOB NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;

-- Files that events refer to, which are kept as objects: one row per event and place in it. An object is named by the
-- hash of its content, and is there once for all events with the same file.
CREATE TABLE media (
  event_id BLOB    NOT NULL,
  n        INTEGER NOT NULL,
  digest   BLOB    NOT NULL,
  size     INTEGER NOT NULL,
  type     TEXT    NOT NULL,
  filename TEXT,
  kept_at  INTEGER NOT NULL,
  PRIMARY KEY (event_id, n)
) WITHOUT ROWID;
CREATE INDEX media_digest ON media (digest);

-- Events that came back from an archive: kept until then, whatever their age.
CREATE TABLE restored (event_id BLOB PRIMARY KEY, until INTEGER NOT NULL) WITHOUT ROWID;

-- How often an event came, once it came again: one small row that is changed and one in `arrivals` that is added at the
-- end. Later arrivals hang together, latest first, in two chains, so that a storm of duplicates cannot push the
-- conflicts out.
CREATE TABLE copies (
  event_id  BLOB PRIMARY KEY,
  n         INTEGER NOT NULL,            -- arrivals in all, the first one included
  last_seen INTEGER NOT NULL,
  duplicate INTEGER,                     -- the latest of each kind: arrivals.n
  conflict  INTEGER
) WITHOUT ROWID;
CREATE TABLE arrivals (
  n        INTEGER PRIMARY KEY,          -- drawn like deliveries.seq: never given twice, so a broken chain just ends
  before   INTEGER,                      -- the one before it of its event and kind
  event_id BLOB NOT NULL,
  id       BLOB NOT NULL,
  outcome  TEXT NOT NULL,
  at       INTEGER NOT NULL,
  batch_id BLOB,
  head     BLOB,
  body     BLOB                          -- only when it differs
);
CREATE INDEX arrivals_batch ON arrivals (batch_id) WHERE batch_id IS NOT NULL;

-- The latest arrivals that were rejected: a ring. Some of known sources have head and the first KiB of the body.
CREATE TABLE rejections (
  slot INTEGER PRIMARY KEY, n INTEGER NOT NULL, source TEXT NOT NULL, at INTEGER NOT NULL, code TEXT NOT NULL,
  reason TEXT NOT NULL, peer TEXT NOT NULL, size INTEGER NOT NULL, id BLOB NOT NULL, head BLOB, body BLOB
);

-- One per event and destination: the record of the work.
CREATE TABLE deliveries (
  id             BLOB PRIMARY KEY,       -- event id with the destination's id in the last three bytes
  event_id       BLOB NOT NULL,
  destination_id INTEGER NOT NULL,
  subject_key    BLOB,                   -- NULL: no subject, waits for no other
  seq            INTEGER NOT NULL,       -- order of commit
  behind         INTEGER NOT NULL DEFAULT 0, -- came while its subject had a head
  status         TEXT NOT NULL DEFAULT 'pending',
  note           TEXT,                   -- stale | coalesced | erased
  run            INTEGER NOT NULL DEFAULT 1,
  attempts       INTEGER NOT NULL DEFAULT 0,
  fence          INTEGER NOT NULL DEFAULT 0,
  finished_by    BLOB,
  replay_id      BLOB,
  settled_at     INTEGER,
  options        INTEGER NOT NULL DEFAULT 0, -- the route's and the replay's: see Options
  category       TEXT,                   -- of the last attempt
  last_status    INTEGER,                -- its status code
  last_error     TEXT,
  last_replay_at INTEGER,
  reason         TEXT,                   -- why it was discarded, or is dead without an attempt to blame
  fair           INTEGER                 -- hash of the value that it is leased in rounds over; NULL: it is not
) WITHOUT ROWID;
CREATE INDEX deliveries_waiting    ON deliveries (subject_key, seq) WHERE status = 'pending' AND behind;
-- One index for the lists of what is pending, dead or discarded, newest first.
CREATE INDEX deliveries_unfinished ON deliveries (status, id) WHERE status <> 'done';

-- The work itself: one row for each (destination, source, subject) that has open deliveries, naming the one at its
-- front. Workers lease these rows, never deliveries, so a deep subject costs nothing.
CREATE TABLE heads (
  subject_key    BLOB PRIMARY KEY,       -- deliveries without subject: their own id
  destination_id INTEGER NOT NULL,
  turn           INTEGER NOT NULL DEFAULT 1, -- 0 high, 1 normal, 2 low, 3 bulk replay, 4 quarantined
  due_at         INTEGER NOT NULL,       -- the next moment a worker may take this row
  leased         INTEGER NOT NULL DEFAULT 0,
  delivery_id    BLOB NOT NULL,
  event_id       BLOB NOT NULL,
  upto           INTEGER NOT NULL DEFAULT 0, -- coalesced: the last `seq` this attempt covers
  fence          INTEGER NOT NULL DEFAULT 0,
  run            INTEGER NOT NULL DEFAULT 1,
  attempts       INTEGER NOT NULL DEFAULT 0,
  crashes        INTEGER NOT NULL DEFAULT 0,
  leased_at      INTEGER,
  options        INTEGER NOT NULL DEFAULT 0,
  replay_id      BLOB,                   -- of the head's run
  carries        BLOB,                   -- coalesced: the newest delivery this attempt covers
  alone          INTEGER NOT NULL DEFAULT 0, -- leased to run alone: a crash now is its own
  deaths         INTEGER NOT NULL DEFAULT 0, -- crashes while it ran alone; `crashes` counts all
  worker         TEXT,                   -- the last one that leased it
  seq            INTEGER NOT NULL DEFAULT 0, -- of `delivery_id`: what waits comes after it
  fair           INTEGER                 -- of `delivery_id`
);
CREATE INDEX heads_due    ON heads (destination_id, turn, due_at);
-- What is leased in rounds, by value. Partial, so that nothing else pays for it.
CREATE INDEX heads_fair   ON heads (destination_id, turn, fair, due_at) WHERE fair IS NOT NULL;
-- What has become due since a moment, for any destination: an inbox may have many.
CREATE INDEX heads_next   ON heads (due_at);
-- What is under way: as small as the workers are few.
CREATE INDEX heads_leased ON heads (destination_id) WHERE leased;

CREATE TABLE attempts (
  delivery_id BLOB NOT NULL,
  fence       INTEGER NOT NULL,
  run         INTEGER NOT NULL,
  n           INTEGER NOT NULL,          -- within the run
  started_at  INTEGER NOT NULL,
  ended_at    INTEGER NOT NULL,
  outcome     TEXT NOT NULL,             -- done | retry | dead | crashed
  category    TEXT,
  status      INTEGER,
  error       TEXT,
  answer      BLOB,                      -- what was sent without its body, and the first 4 KB of the answer: see `join_answer`
  PRIMARY KEY (delivery_id, fence)
) WITHOUT ROWID;

-- The highest rank delivered, per destination and scope (latest wins).
CREATE TABLE ranks (
  destination_id INTEGER NOT NULL, source_id INTEGER NOT NULL, scope TEXT NOT NULL, rank INTEGER NOT NULL, seen_at INTEGER NOT NULL,
  PRIMARY KEY (destination_id, source_id, scope)
) WITHOUT ROWID;

-- What is known of a destination while it runs: paused by a person, held back by its breaker.
CREATE TABLE destination_state (
  destination_id INTEGER PRIMARY KEY,
  paused_at INTEGER, paused_by TEXT, paused_why TEXT,
  failures INTEGER NOT NULL DEFAULT 0,   -- in a row, over different deliveries
  last_failed BLOB,
  open_until INTEGER
);
CREATE INDEX destination_state_open ON destination_state (open_until) WHERE open_until IS NOT NULL;

-- Limits that count over all workers: the moment at which the next attempt of a destination may begin.
CREATE TABLE limits (destination_id INTEGER PRIMARY KEY, next_at INTEGER NOT NULL);

-- How many attempts of a destination each worker may have under way. Their leases end before `until`.
CREATE TABLE places (
  destination_id INTEGER NOT NULL,
  worker         TEXT    NOT NULL,
  n              INTEGER NOT NULL,
  wanted         INTEGER NOT NULL,
  until          INTEGER NOT NULL,
  PRIMARY KEY (destination_id, worker)
) WITHOUT ROWID;

-- Whom a destination reached, and since when: a row each time its address changes, so that a replay can tell that it
-- goes elsewhere than the first time. Kept as a hash: an address may hold a secret.
CREATE TABLE recipients (
  destination_id INTEGER NOT NULL,
  since          INTEGER NOT NULL,
  address        BLOB    NOT NULL,
  PRIMARY KEY (destination_id, since)
) WITHOUT ROWID;

-- Sources, destinations and routes that were made while the inbox runs. A deleted one leaves its row, so that every
-- process learns of it: `version` is the counter's value at its last change, in order of commit.
CREATE TABLE definitions (
  noun        TEXT    NOT NULL,          -- source | destination | route | account
  name        TEXT    NOT NULL,          -- of a route: its id
  id          INTEGER NOT NULL,          -- in `sources` or `destinations`; of a route: its destination's
  account     TEXT,
  address     BLOB,                      -- of a source: a digest of the last part of its address
  source      TEXT,                      -- of a route
  destination TEXT,                      -- of a route
  settings    TEXT    NOT NULL,          -- as given, JSON, without secrets
  secrets     BLOB,                      -- the secret ones, JSON, encrypted
  enabled     INTEGER NOT NULL DEFAULT 1,
  deleted     INTEGER NOT NULL DEFAULT 0,
  version     INTEGER NOT NULL,
  created_at  INTEGER NOT NULL,
  changed_at  INTEGER NOT NULL,
  PRIMARY KEY (noun, name)
) WITHOUT ROWID;
CREATE UNIQUE INDEX definitions_version ON definitions (version);
CREATE UNIQUE INDEX definitions_address ON definitions (address) WHERE address IS NOT NULL AND NOT deleted;
CREATE INDEX definitions_id      ON definitions (id) WHERE noun = 'destination' AND NOT deleted;
CREATE INDEX definitions_from    ON definitions (source) WHERE source IS NOT NULL AND NOT deleted;
CREATE INDEX definitions_to      ON definitions (destination) WHERE destination IS NOT NULL AND NOT deleted;
CREATE INDEX definitions_account ON definitions (account, noun, name) WHERE account IS NOT NULL AND NOT deleted;

-- What accounts are called: their ids, and the aliases under which providers know them. A name is one account's.
CREATE TABLE account_names (name TEXT PRIMARY KEY, account TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX account_names_account ON account_names (account);

-- A replay is a durable order. Its items are fixed when it is made, so what was planned is what is done.
CREATE TABLE replays (
  id          BLOB PRIMARY KEY,
  state       TEXT NOT NULL,             -- running | paused | done | aborted
  request_key TEXT UNIQUE,               -- the same request makes no second replay
  about       TEXT NOT NULL,             -- the order in its own words, JSON
  actor       TEXT NOT NULL,
  reason      TEXT NOT NULL,
  options     INTEGER NOT NULL DEFAULT 0, -- of its runs: fresh_id
  force       INTEGER NOT NULL DEFAULT 0,
  rate        REAL,
  bulk        INTEGER NOT NULL,
  planned     INTEGER NOT NULL,
  next_at     INTEGER NOT NULL,          -- when more may be fed (rate)
  created_at  INTEGER NOT NULL,
  finished_at INTEGER
) WITHOUT ROWID;
CREATE INDEX replays_running ON replays (id) WHERE state = 'running';
CREATE TABLE replay_items (
  replay_id BLOB NOT NULL, n INTEGER NOT NULL, delivery_id BLOB NOT NULL,
  fed_at INTEGER, outcome TEXT,          -- done | dead | skipped; NULL: not yet
  PRIMARY KEY (replay_id, delivery_id)
) WITHOUT ROWID;
CREATE INDEX replay_items_open ON replay_items (replay_id, n) WHERE outcome IS NULL;
CREATE INDEX replay_items_odd  ON replay_items (replay_id, outcome) WHERE outcome IN ('dead', 'skipped');

-- Signed changes per minute; a level is their sum, a chart is its rows (R68).
CREATE TABLE counters (
  minute INTEGER NOT NULL, source_id INTEGER NOT NULL, destination_id INTEGER NOT NULL, what TEXT NOT NULL, n INTEGER NOT NULL,
  PRIMARY KEY (minute, source_id, destination_id, what)
) WITHOUT ROWID;

-- Moments that every chart shows, such as deploys; the latest stay.
CREATE TABLE chart_marks (n INTEGER PRIMARY KEY, at INTEGER NOT NULL, text TEXT NOT NULL, actor TEXT NOT NULL);

-- Bytes on disk, once an hour: how fast the store grows.
CREATE TABLE sizes (hour INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);

CREATE TABLE workers (
  id TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, started_at INTEGER NOT NULL, seen_at INTEGER NOT NULL,
  leases INTEGER NOT NULL, destinations TEXT NOT NULL
) WITHOUT ROWID;

-- Watermarks that are crossed now, so that each is reported once.
CREATE TABLE crossings (name TEXT PRIMARY KEY, since INTEGER NOT NULL) WITHOUT ROWID;

-- Who has signed in at the dashboard, known to every server of this inbox.
CREATE TABLE sessions (
  hash     BLOB    PRIMARY KEY,          -- of what the browser holds; that itself is kept nowhere
  actor    TEXT    NOT NULL,
  role     TEXT    NOT NULL,             -- viewer | operator | admin
  proof    BLOB    NOT NULL,             -- of the password it was begun with: the session ends with it
  account  TEXT,                         -- of a customer at the portal, who sees that account alone
  begun_at INTEGER NOT NULL,
  ends_at  INTEGER NOT NULL
) WITHOUT ROWID;

-- Links to the portal that were used; each is kept until it would have expired.
CREATE TABLE used_links (hash BLOB PRIMARY KEY, ends_at INTEGER NOT NULL) WITHOUT ROWID;

-- When a token was last used, by the name it has in the settings.
CREATE TABLE token_uses (name TEXT PRIMARY KEY, used_at INTEGER NOT NULL) WITHOUT ROWID;

-- The settings of the last start, by place (a machine and its file): a digest for each name, no value.
CREATE TABLE settings_seen (place TEXT PRIMARY KEY, digests TEXT NOT NULL) WITHOUT ROWID;

-- High-water marks, written once per transaction: time never runs backward (R64), no number is given twice. `inbox`
-- names the dashboard's cookie, so that two inboxes on one machine do not sign each other out.
CREATE TABLE marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO marks VALUES
  ('clock', 0), ('seq', 0), ('fence', 0), ('rejection', 0), ('definitions', 0), ('largest_body', 0),
  ('inbox', abs(random() % 9007199254740992));

-- The audit log as a chain: each entry holds a hash over the entry before and itself, and no entry changes any more.
CREATE TABLE audit (
  n INTEGER PRIMARY KEY, at INTEGER NOT NULL, actor TEXT NOT NULL, act TEXT NOT NULL, target TEXT NOT NULL, detail TEXT NOT NULL,
  hash BLOB
);
CREATE TABLE audit_chain (
  one         INTEGER PRIMARY KEY CHECK (one = 1),
  n           INTEGER NOT NULL,          -- the last entry that was written, and its hash
  hash        BLOB    NOT NULL,
  pruned      INTEGER NOT NULL,          -- the last entry that was pruned, and its hash: here the chain begins
  pruned_hash BLOB    NOT NULL,
  since       INTEGER NOT NULL           -- the last entry from before the chain
);
INSERT INTO audit_chain VALUES (1, 0, zeroblob(32), 0, zeroblob(32), 0);

-- With REPLACE an entry would go without any trigger on DELETE: so only the next number is taken.
CREATE TRIGGER audit_insert BEFORE INSERT ON audit
WHEN NEW.hash IS NULL OR NEW.n IS NOT (SELECT n + 1 FROM audit_chain)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: this is not its next line'); END;
-- An entry from before the chain may name a subject that is erased.
CREATE TRIGGER audit_update BEFORE UPDATE ON audit WHEN OLD.hash IS NOT NULL OR NEW.hash IS NOT NULL OR NEW.n <> OLD.n
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: no line is changed'); END;
-- Pruning first marks how far it goes, and keeps the hash of the last entry that goes.
CREATE TRIGGER audit_delete BEFORE DELETE ON audit WHEN OLD.n > (SELECT pruned FROM audit_chain)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: only retention removes lines'); END;
CREATE TRIGGER audit_chain_update BEFORE UPDATE ON audit_chain
WHEN NEW.n < OLD.n OR NEW.pruned < OLD.pruned OR NEW.pruned > NEW.n OR NEW.since <> OLD.since
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: its chain does not go back'); END;
CREATE TRIGGER audit_chain_delete BEFORE DELETE ON audit_chain
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: its chain stays'); END;
