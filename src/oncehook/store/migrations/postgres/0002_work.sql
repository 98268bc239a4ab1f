-- The way out: what routes ask of a delivery, attempts, replays, what people did, and who works.

ALTER TABLE deliveries
  ADD COLUMN options        smallint NOT NULL DEFAULT 0, -- the route's and the replay's: see Options
  ADD COLUMN category       text,                        -- of the last attempt
  ADD COLUMN last_status    smallint,                    -- its status code
  ADD COLUMN last_error     text,
  ADD COLUMN last_replay_at timestamptz,
  ADD COLUMN reason         text;                        -- why it was discarded, or is dead without an attempt to blame
-- One index for the lists of what is pending, dead or discarded, newest first.
DROP INDEX deliveries_dead;
CREATE INDEX deliveries_unfinished ON deliveries (status, id) WHERE status <> 'done';

ALTER TABLE heads
  ADD COLUMN options   smallint NOT NULL DEFAULT 0,
  ADD COLUMN replay_id uuid,                             -- of the head's run
  ADD COLUMN carries   uuid,                             -- coalesced: the newest delivery this attempt covers
  ADD COLUMN alone     boolean  NOT NULL DEFAULT false,  -- leased to run alone: a crash now is its own
  ADD COLUMN deaths    smallint NOT NULL DEFAULT 0;      -- crashes while it ran alone; `crashes` counts all

CREATE TABLE attempts (
  delivery_id uuid        NOT NULL,
  fence       bigint      NOT NULL,
  run         smallint    NOT NULL,
  n           smallint    NOT NULL,       -- within the run
  started_at  timestamptz NOT NULL,
  ended_at    timestamptz NOT NULL,
  outcome     text        NOT NULL,       -- done | retry | dead | crashed
  category    text,
  status      smallint,
  error       text,
  answer      bytea,                      -- the first 4 KB of what the destination said
  PRIMARY KEY (delivery_id, fence)
);

-- A replay is a durable order. Its items are fixed when it is made, so what was planned is what is done.
CREATE TABLE replays (
  id          uuid        PRIMARY KEY,
  state       text        NOT NULL,       -- running | paused | done | aborted
  request_key text        UNIQUE,         -- the same request makes no second replay
  about       text        NOT NULL,       -- the order in its own words, JSON
  actor       text        NOT NULL,
  reason      text        NOT NULL,
  options     smallint    NOT NULL DEFAULT 0, -- of its runs: fresh_id
  force       boolean     NOT NULL DEFAULT false,
  rate        float8,
  bulk        boolean     NOT NULL,
  planned     integer     NOT NULL,
  next_at     timestamptz NOT NULL DEFAULT now(), -- when more may be fed (rate)
  created_at  timestamptz NOT NULL DEFAULT now(),
  finished_at timestamptz
);
CREATE INDEX replays_running ON replays (id) WHERE state = 'running';
CREATE TABLE replay_items (
  replay_id uuid NOT NULL, n integer NOT NULL, delivery_id uuid NOT NULL,
  fed_at timestamptz, outcome text,       -- done | dead | skipped; NULL: not yet
  PRIMARY KEY (replay_id, delivery_id)
);
CREATE INDEX replay_items_open ON replay_items (replay_id, n) WHERE outcome IS NULL;
CREATE INDEX replay_items_odd  ON replay_items (replay_id, outcome) WHERE outcome IN ('dead', 'skipped');

CREATE TABLE audit (
  n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at timestamptz NOT NULL DEFAULT now(), actor text NOT NULL,
  act text NOT NULL, target text NOT NULL, detail text NOT NULL
);

-- What is known of a destination while it runs: paused by a person, held back by its breaker.
CREATE TABLE destination_state (
  destination_id smallint PRIMARY KEY,
  paused_at timestamptz, paused_by text, paused_why text,
  failures integer NOT NULL DEFAULT 0,    -- in a row, over different deliveries
  last_failed uuid,
  open_until timestamptz
);

CREATE TABLE workers (
  id text PRIMARY KEY, host text NOT NULL, pid integer NOT NULL, started_at timestamptz NOT NULL, seen_at timestamptz NOT NULL,
  leases integer NOT NULL, destinations text NOT NULL
);

-- The highest rank delivered, per destination and scope (latest wins).
CREATE TABLE ranks (
  destination_id smallint NOT NULL, source_id smallint NOT NULL, scope text NOT NULL, rank integer NOT NULL, seen_at timestamptz NOT NULL,
  PRIMARY KEY (destination_id, source_id, scope)
);

-- Watermarks that are crossed now, so that each is told once.
CREATE TABLE crossings (name text PRIMARY KEY, since timestamptz NOT NULL DEFAULT now());

-- Whether anything still names a split request, for the sweep.
CREATE INDEX events_batch   ON events (batch_id) WHERE batch_id IS NOT NULL;
CREATE INDEX arrivals_batch ON arrivals (batch_id) WHERE batch_id IS NOT NULL;
