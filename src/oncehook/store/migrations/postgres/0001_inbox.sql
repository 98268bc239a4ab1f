-- The inbox: dedup memory, events, later arrivals, the work they cause, and the numbers that are shown.
-- `uuid` holds ids and hashes alike: 16 bytes, no header, fast to compare. No foreign keys: keys outlive
-- events, a delivery's event is in its id, and `doctor` checks what they would check.

CREATE TABLE sources (id smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE);
CREATE TABLE destinations (id smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE);

-- What makes two arrivals the same event. A table of its own, so that events can be pruned while their
-- keys are still remembered (R20).
CREATE TABLE keys (
  hash       uuid        PRIMARY KEY,
  event_id   uuid        NOT NULL,
  body_hash  uuid        NOT NULL,
  source_id  smallint    NOT NULL,
  copies     integer     NOT NULL,
  first_seen timestamptz NOT NULL,
  last_seen  timestamptz NOT NULL,
  expires_at timestamptz NOT NULL
) WITH (fillfactor = 90);
CREATE INDEX keys_expiry ON keys (expires_at);

-- Bodies up to 8 KB stay in the row and uncompressed: compression costs more than the rest of the insert.
CREATE TABLE events (
  id          uuid        PRIMARY KEY,   -- UUIDv7, last two bytes zero
  source_id   smallint    NOT NULL,
  type        text        NOT NULL,
  key         text,
  subject     text,
  received_at timestamptz NOT NULL DEFAULT now(),
  event_at    timestamptz,               -- when it happened, by the sender's word
  marks       smallint    NOT NULL,
  rank        integer,
  rank_scope  text,
  body_hash   uuid        NOT NULL,
  key_hash    uuid,
  batch_id    uuid,                      -- the split request it came in
  head        bytea,                     -- request line and headers; NULL: see its batch
  body        bytea       NOT NULL
) WITH (toast_tuple_target = 8160);
ALTER TABLE events ALTER body SET STORAGE EXTERNAL, ALTER head SET STORAGE EXTERNAL;
CREATE INDEX events_source  ON events (source_id, id);
CREATE INDEX events_subject ON events (subject, id) WHERE subject IS NOT NULL;

-- The raw bytes of a request that was split into several events.
CREATE TABLE batches (
  id uuid PRIMARY KEY, source_id smallint NOT NULL, received_at timestamptz NOT NULL DEFAULT now(), head bytea NOT NULL, body bytea NOT NULL
);

-- Later arrivals of an event that was already there: a small ring per event.
CREATE TABLE arrivals (
  event_id uuid        NOT NULL,
  slot     smallint    NOT NULL,         -- 0-19 duplicates, 20-39 conflicts
  id       uuid        NOT NULL,
  outcome  text        NOT NULL,
  at       timestamptz NOT NULL DEFAULT now(),
  batch_id uuid,
  head     bytea,
  body     bytea,                        -- only when it differs
  PRIMARY KEY (event_id, slot)
) WITH (fillfactor = 80);

-- The latest arrivals that were turned away: a ring, without bodies.
CREATE SEQUENCE rejection_seq;
CREATE TABLE rejections (
  slot integer PRIMARY KEY, n bigint NOT NULL, source text NOT NULL, at timestamptz NOT NULL, code text NOT NULL,
  reason text NOT NULL, peer text NOT NULL, size bigint NOT NULL
);

-- One per event and destination: the record of the work. CACHE 1 is part of the correctness: a cached
-- sequence hands out old numbers late, and `seq` must follow the order of commit within a subject (R42).
CREATE SEQUENCE delivery_seq CACHE 1;
CREATE TABLE deliveries (
  id             uuid     PRIMARY KEY,   -- event id with the destination's number in the last two bytes
  event_id       uuid     NOT NULL,
  destination_id smallint NOT NULL,
  subject_key    uuid,                   -- NULL: no subject, waits for nobody
  seq            bigint   NOT NULL DEFAULT nextval('delivery_seq'),
  behind         boolean  NOT NULL DEFAULT false, -- came while its subject had a head
  status         text     NOT NULL DEFAULT 'pending',
  note           text,                   -- stale | coalesced
  run            smallint NOT NULL DEFAULT 1,
  attempts       smallint NOT NULL DEFAULT 0,
  fence          bigint   NOT NULL DEFAULT 0,
  finished_by    uuid,
  replay_id      uuid,
  settled_at     timestamptz
) WITH (fillfactor = 85);
CREATE INDEX deliveries_waiting ON deliveries (subject_key, seq) WHERE status = 'pending' AND behind;
CREATE INDEX deliveries_dead    ON deliveries (destination_id, id) WHERE status = 'dead';

-- The work itself: one row for each (destination, source, subject) that has open deliveries, naming the one
-- at its head. Workers lease these rows, never deliveries, so a deep subject costs nothing.
CREATE SEQUENCE fences;
CREATE TABLE heads (
  subject_key    uuid        PRIMARY KEY, -- deliveries without subject: their own id
  destination_id smallint    NOT NULL,
  turn           smallint    NOT NULL DEFAULT 0, -- 0 live, 1 bulk replay
  due_at         timestamptz NOT NULL DEFAULT now(), -- the next moment a worker may take this row
  leased         boolean     NOT NULL DEFAULT false,
  delivery_id    uuid,                    -- NULL: to be looked up again
  event_id       uuid,
  upto           bigint      NOT NULL DEFAULT 0,
  fence          bigint      NOT NULL DEFAULT 0,
  run            smallint    NOT NULL DEFAULT 1,
  attempts       smallint    NOT NULL DEFAULT 0,
  crashes        smallint    NOT NULL DEFAULT 0,
  waiting        integer     NOT NULL DEFAULT 0,
  leased_at      timestamptz
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX heads_due  ON heads (destination_id, turn, due_at);
CREATE INDEX heads_lost ON heads (subject_key) WHERE delivery_id IS NULL;

-- Signed changes per minute; a level is their sum, a chart is its rows (R68). Each connection writes a slot of
-- its own, or two processes would queue for one row at every commit; slot 0 belongs to the sweep.
CREATE SEQUENCE counter_slot AS smallint MINVALUE 1 MAXVALUE 32000 CYCLE;
CREATE TABLE counters (
  minute timestamptz NOT NULL, slot smallint NOT NULL, source_id smallint NOT NULL, destination_id smallint NOT NULL, what text NOT NULL, n bigint NOT NULL,
  PRIMARY KEY (minute, slot, source_id, destination_id, what)
) WITH (fillfactor = 50);

CREATE TABLE marks (name text PRIMARY KEY, value bigint NOT NULL);
INSERT INTO marks VALUES ('ping', 0);
