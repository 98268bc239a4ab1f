-- The inbox: dedup memory, events, later arrivals, the work they cause, and the numbers that are shown.
-- `uuid` holds ids and hashes alike: 16 bytes, no header, fast to compare. No foreign keys: keys outlive events, a
-- delivery's event is in its id, and `doctor` checks what they would check.

-- Names, once and for all: what was kept under one refers to its id. `account`: whose name it is, also when what it
-- stood for is deleted; nobody else gets it, and with it what is kept (S32).
CREATE TABLE sources (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE, account text);
CREATE TABLE destinations (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE, account text);

-- What makes two arrivals the same event. A table of its own, so that events can be pruned while their keys are still
-- remembered (R20).
CREATE TABLE keys (
  hash       uuid        PRIMARY KEY,
  event_id   uuid        NOT NULL,
  body_hash  uuid        NOT NULL,
  source_id  integer     NOT NULL,
  copies     integer     NOT NULL,
  first_seen timestamptz NOT NULL,
  last_seen  timestamptz NOT NULL,
  expires_at timestamptz NOT NULL
) WITH (fillfactor = 90);
CREATE INDEX keys_expiry ON keys (expires_at);

-- What was signed, and the first event that came with it: so a captured request that comes back under another key is
-- recognised. Only for sources whose signature does not cover the key.
CREATE TABLE proofs (
  hash       uuid        PRIMARY KEY,
  event_id   uuid        NOT NULL,
  key_hash   uuid,                       -- the key under which it came first; NULL: it had none
  expires_at timestamptz NOT NULL
);
CREATE INDEX proofs_expiry ON proofs (expires_at);

-- Bodies up to 8 KB stay in the row and uncompressed: compression costs more than the rest of the insert.
CREATE TABLE events (
  id          uuid        PRIMARY KEY,   -- UUIDv7, last three bytes zero
  source_id   integer     NOT NULL,
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
  body        bytea       NOT NULL,
  same_as     uuid,                      -- the event in which the same came before, under another key
  account     text                       -- whose it is; NULL: nobody's
) WITH (toast_tuple_target = 8160);
ALTER TABLE events ALTER body SET STORAGE EXTERNAL, ALTER head SET STORAGE EXTERNAL;
CREATE INDEX events_source  ON events (source_id, id);
CREATE INDEX events_subject ON events (subject, id) WHERE subject IS NOT NULL;
CREATE INDEX events_account ON events (account, id) WHERE account IS NOT NULL;
CREATE INDEX events_batch   ON events (batch_id) WHERE batch_id IS NOT NULL;

-- The raw bytes of a request that was split into several events.
CREATE TABLE batches (
  id          uuid        PRIMARY KEY,
  source_id   integer     NOT NULL,
  received_at timestamptz NOT NULL DEFAULT now(),
  head        bytea       NOT NULL,
  body        bytea       NOT NULL
);

-- Files that events refer to, which are kept as objects: one row per event and place in it. An object is named by the
-- hash of its content, and is there once for all events with the same file.
CREATE TABLE media (
  event_id uuid        NOT NULL,
  n        smallint    NOT NULL,
  digest   bytea       NOT NULL,
  size     bigint      NOT NULL,
  type     text        NOT NULL,
  filename text,
  kept_at  timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (event_id, n)
);
CREATE INDEX media_digest ON media (digest);

-- Events that came back from an archive: kept until then, whatever their age.
CREATE TABLE restored (event_id uuid PRIMARY KEY, until timestamptz NOT NULL);

-- Later arrivals of an event that was already there: a small ring per event. A copy of a key that a process saw a
-- moment ago is sent without its body (`RecentKeys`). Should it turn out to be a conflict after all, the check refuses
-- the statement, and it is sent again with everything.
CREATE TABLE arrivals (
  event_id uuid        NOT NULL,
  slot     smallint    NOT NULL,         -- 0-19 duplicates, 20-39 conflicts
  id       uuid        NOT NULL,
  outcome  text        NOT NULL,
  at       timestamptz NOT NULL DEFAULT now(),
  batch_id uuid,
  head     bytea,
  body     bytea,                        -- only when it differs
  PRIMARY KEY (event_id, slot),
  CONSTRAINT arrivals_conflict CHECK (outcome <> 'conflict' OR body IS NOT NULL)
) WITH (fillfactor = 80);
CREATE INDEX arrivals_batch ON arrivals (batch_id) WHERE batch_id IS NOT NULL;

-- The latest arrivals that were rejected: a ring. Some of known sources have head and the first KiB of the body.
CREATE SEQUENCE rejection_seq;
CREATE TABLE rejections (
  slot   integer     PRIMARY KEY,
  n      bigint      NOT NULL,
  source text        NOT NULL,
  at     timestamptz NOT NULL,
  code   text        NOT NULL,
  reason text        NOT NULL,
  peer   text        NOT NULL,
  size   bigint      NOT NULL,
  id     uuid        NOT NULL,
  head   bytea,
  body   bytea
);

-- One per event and destination: the record of the work. CACHE 1 is part of the correctness: a cached sequence hands
-- out old numbers late, and `seq` must follow the order of commit within a subject (R42).
CREATE SEQUENCE delivery_seq CACHE 1;
CREATE TABLE deliveries (
  id             uuid     PRIMARY KEY,   -- event id with the destination's id in the last three bytes
  event_id       uuid     NOT NULL,
  destination_id integer  NOT NULL,
  subject_key    uuid,                   -- NULL: no subject, waits for no other
  seq            bigint   NOT NULL DEFAULT nextval('delivery_seq'),
  behind         boolean  NOT NULL DEFAULT false, -- came while its subject had a head
  status         text     NOT NULL DEFAULT 'pending',
  note           text,                   -- stale | coalesced | erased
  run            smallint NOT NULL DEFAULT 1,
  attempts       smallint NOT NULL DEFAULT 0,
  fence          bigint   NOT NULL DEFAULT 0,
  finished_by    uuid,
  replay_id      uuid,
  settled_at     timestamptz,
  options        smallint NOT NULL DEFAULT 0, -- the route's and the replay's: see Options
  category       text,                   -- of the last attempt
  last_status    smallint,               -- its status code
  last_error     text,
  last_replay_at timestamptz,
  reason         text,                   -- why it was discarded, or is dead without an attempt to blame
  fair           bigint                  -- hash of the value that it is leased in rounds over; NULL: it is not
) WITH (fillfactor = 85);
CREATE INDEX deliveries_waiting ON deliveries (subject_key, seq) WHERE status = 'pending' AND behind;
-- One index for the lists of what is pending, dead or discarded, newest first.
CREATE INDEX deliveries_unfinished ON deliveries (status, id) WHERE status <> 'done';

-- The work itself: one row for each (destination, source, subject) that has open deliveries, naming the one at its
-- head. Workers lease these rows, never deliveries, so a deep subject costs nothing. How many wait behind a head is
-- counted nowhere: each arrival would make a new version of the row that workers look up. `seq` is the head's own: what
-- waits comes after it, so a look-up passes nothing that is finished already.
CREATE SEQUENCE fences;
CREATE TABLE heads (
  subject_key    uuid        PRIMARY KEY, -- deliveries without subject: their own id
  destination_id integer     NOT NULL,
  turn           smallint    NOT NULL DEFAULT 1, -- 0 high, 1 normal, 2 low, 3 bulk replay, 4 quarantined
  due_at         timestamptz NOT NULL DEFAULT now(), -- the next moment a worker may take this row
  leased         boolean     NOT NULL DEFAULT false,
  delivery_id    uuid,                   -- NULL: to be looked up again
  event_id       uuid,
  upto           bigint      NOT NULL DEFAULT 0,
  fence          bigint      NOT NULL DEFAULT 0,
  run            smallint    NOT NULL DEFAULT 1,
  attempts       smallint    NOT NULL DEFAULT 0,
  crashes        smallint    NOT NULL DEFAULT 0,
  leased_at      timestamptz,
  options        smallint    NOT NULL DEFAULT 0,
  replay_id      uuid,                   -- of the head's run
  carries        uuid,                   -- coalesced: the newest delivery this attempt covers
  alone          boolean     NOT NULL DEFAULT false, -- leased to run alone: a crash now is its own
  deaths         smallint    NOT NULL DEFAULT 0, -- crashes while it ran alone; `crashes` counts all
  worker         text,                   -- the last one that leased it
  seq            bigint      NOT NULL DEFAULT 0,
  fair           bigint                  -- of `delivery_id`
) WITH (
  fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500,
  autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX heads_due ON heads (destination_id, turn, due_at);
-- What is leased in rounds, by value. Partial, so that nothing else pays for it.
CREATE INDEX heads_fair ON heads (destination_id, turn, fair, due_at) WHERE fair IS NOT NULL;
-- What is under way, counted where a limit counts over all workers.
CREATE INDEX heads_leased ON heads (destination_id) WHERE leased;
-- What has become due since a moment, for any destination. Partial, so that no lease can mistake it for `heads_due`.
CREATE INDEX heads_next ON heads (due_at) WHERE due_at < 'infinity';

CREATE TABLE attempts (
  delivery_id uuid        NOT NULL,
  fence       bigint      NOT NULL,
  run         smallint    NOT NULL,
  n           smallint    NOT NULL,      -- within the run
  started_at  timestamptz NOT NULL,
  ended_at    timestamptz NOT NULL,
  outcome     text        NOT NULL,      -- done | retry | dead | crashed
  category    text,
  status      smallint,
  error       text,
  answer      bytea,                     -- what was sent without its body, and the first 4 KB of the answer: see `join_answer`
  PRIMARY KEY (delivery_id, fence)
);

-- The highest rank delivered, per destination and scope (latest wins).
CREATE TABLE ranks (
  destination_id integer     NOT NULL,
  source_id      integer     NOT NULL,
  scope          text        NOT NULL,
  rank           integer     NOT NULL,
  seen_at        timestamptz NOT NULL,
  PRIMARY KEY (destination_id, source_id, scope)
);

-- What is known of a destination while it runs: paused by a person, held back by its breaker.
CREATE TABLE destination_state (
  destination_id integer PRIMARY KEY,
  paused_at      timestamptz,
  paused_by      text,
  paused_why     text,
  failures       integer NOT NULL DEFAULT 0, -- in a row, over different deliveries
  last_failed    uuid,
  open_until     timestamptz
);
CREATE INDEX destination_state_open ON destination_state (open_until) WHERE open_until IS NOT NULL;

-- Limits that count over all workers: the moment at which the next attempt of a destination may begin. Also what workers
-- lock to divide places. Only destinations with such limits have a row, and workers ask a few times a second at most.
CREATE TABLE limits (destination_id integer PRIMARY KEY, next_at timestamptz NOT NULL) WITH (fillfactor = 50);

-- How many attempts of a destination each worker may have under way. Their leases end before `until`.
CREATE TABLE places (
  destination_id integer     NOT NULL,
  worker         text        NOT NULL,
  n              integer     NOT NULL,
  wanted         integer     NOT NULL,
  seconds        float8      NOT NULL,   -- of the destination's leases
  until          timestamptz NOT NULL,
  PRIMARY KEY (destination_id, worker)
) WITH (fillfactor = 50);

-- Whom a destination reached, and since when: a row each time its address changes, so that a replay can tell that it
-- goes elsewhere than the first time. Kept as a hash: an address may hold a secret.
CREATE TABLE recipients (
  destination_id integer     NOT NULL,
  since          timestamptz NOT NULL DEFAULT now(),
  address        uuid        NOT NULL,
  PRIMARY KEY (destination_id, since)
);

-- Sources, destinations and routes that were made while the inbox runs. A deleted one leaves its row, so that every
-- process learns of it: `version` is the counter's value at its last change, in order of commit.
CREATE TABLE definitions (
  noun        text        NOT NULL,      -- source | destination | route | account
  name        text        NOT NULL,      -- of a route: its id
  id          integer     NOT NULL,      -- in `sources` or `destinations`; of a route: its destination's
  account     text,
  address     uuid,                      -- of a source: a digest of the last part of its address
  source      text,                      -- of a route
  destination text,                      -- of a route
  settings    text        NOT NULL,      -- as given, JSON, without secrets
  secrets     bytea,                     -- the secret ones, JSON, encrypted
  enabled     boolean     NOT NULL DEFAULT true,
  deleted     boolean     NOT NULL DEFAULT false,
  version     bigint      NOT NULL,
  created_at  timestamptz NOT NULL,
  changed_at  timestamptz NOT NULL,
  PRIMARY KEY (noun, name)
);
CREATE UNIQUE INDEX definitions_version ON definitions (version);
CREATE UNIQUE INDEX definitions_address ON definitions (address) WHERE address IS NOT NULL AND NOT deleted;
CREATE INDEX definitions_id      ON definitions (id) WHERE noun = 'destination' AND NOT deleted;
CREATE INDEX definitions_from    ON definitions (source) WHERE source IS NOT NULL AND NOT deleted;
CREATE INDEX definitions_to      ON definitions (destination) WHERE destination IS NOT NULL AND NOT deleted;
CREATE INDEX definitions_account ON definitions (account, noun, name) WHERE account IS NOT NULL AND NOT deleted;

-- What accounts are called: their ids, and the aliases under which providers know them. A name is one account's.
CREATE TABLE account_names (name text PRIMARY KEY, account text NOT NULL);
CREATE INDEX account_names_account ON account_names (account);

-- A replay is a durable order. Its items are fixed when it is made, so what was planned is what is done.
CREATE TABLE replays (
  id          uuid        PRIMARY KEY,
  state       text        NOT NULL,      -- running | paused | done | aborted
  request_key text        UNIQUE,        -- the same request makes no second replay
  about       text        NOT NULL,      -- the order in its own words, JSON
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
  replay_id   uuid    NOT NULL,
  n           integer NOT NULL,
  delivery_id uuid    NOT NULL,
  fed_at      timestamptz,
  outcome     text,                      -- done | dead | skipped; NULL: not yet
  PRIMARY KEY (replay_id, delivery_id)
);
CREATE INDEX replay_items_open ON replay_items (replay_id, n) WHERE outcome IS NULL;
CREATE INDEX replay_items_odd  ON replay_items (replay_id, outcome) WHERE outcome IN ('dead', 'skipped');

-- Signed changes per minute; a level is their sum, a chart is its rows (R68). Each connection writes a slot of its own,
-- or two processes would queue for one row at every commit; slot 0 belongs to the sweep.
CREATE SEQUENCE counter_slot AS smallint MINVALUE 1 MAXVALUE 32000 CYCLE;
CREATE TABLE counters (
  minute         timestamptz NOT NULL,
  slot           smallint    NOT NULL,
  source_id      integer     NOT NULL,
  destination_id integer     NOT NULL,
  what           text        NOT NULL,
  n              bigint      NOT NULL,
  PRIMARY KEY (minute, slot, source_id, destination_id, what)
) WITH (fillfactor = 50);

-- Moments that every chart shows, such as deploys; the latest stay.
CREATE TABLE chart_marks (
  n     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at    timestamptz NOT NULL,
  text  text        NOT NULL,
  actor text        NOT NULL
);

-- Bytes on disk, once an hour: how fast the store grows.
CREATE TABLE sizes (hour timestamptz PRIMARY KEY, bytes bigint NOT NULL);

CREATE TABLE workers (
  id           text        PRIMARY KEY,
  host         text        NOT NULL,
  pid          integer     NOT NULL,
  started_at   timestamptz NOT NULL,
  seen_at      timestamptz NOT NULL,
  leases       integer     NOT NULL,
  destinations text        NOT NULL
);

-- Watermarks that are crossed now, so that each is reported once.
CREATE TABLE crossings (name text PRIMARY KEY, since timestamptz NOT NULL DEFAULT now());

-- Who has signed in at the dashboard, known to every server of this inbox.
CREATE TABLE sessions (
  hash     bytea       PRIMARY KEY,      -- of what the browser holds; that itself is kept nowhere
  actor    text        NOT NULL,
  role     text        NOT NULL,         -- viewer | operator | admin
  proof    bytea       NOT NULL,         -- of the password it was begun with: the session ends with it
  account  text,                         -- of a customer at the portal, who sees that account alone
  begun_at timestamptz NOT NULL,
  ends_at  timestamptz NOT NULL
);

-- Links to the portal that were used; each is kept until it would have expired.
CREATE TABLE used_links (hash bytea PRIMARY KEY, ends_at timestamptz NOT NULL);

-- When a token was last used, by the name it has in the settings.
CREATE TABLE token_uses (name text PRIMARY KEY, used_at timestamptz NOT NULL);

-- The settings of the last start, by place (a machine and its file): a digest for each name, no value.
CREATE TABLE settings_seen (place text PRIMARY KEY, digests text NOT NULL);

-- `inbox` names the dashboard's cookie, so that two inboxes on one machine do not sign each other out.
CREATE TABLE marks (name text PRIMARY KEY, value bigint NOT NULL);
INSERT INTO marks VALUES ('ping', 0), ('definitions', 0), ('largest_body', 0), ('inbox', (random() * 9007199254740991)::bigint);

-- -- audit log --------------------------------------------------------------------------------

-- A chain: each entry holds a hash over the entry before and itself, and no entry changes any more.
CREATE TABLE audit (
  n      bigint      PRIMARY KEY,
  at     timestamptz NOT NULL DEFAULT now(),
  actor  text        NOT NULL,
  act    text        NOT NULL,
  target text        NOT NULL,
  detail text        NOT NULL,
  hash   bytea
);
CREATE TABLE audit_chain (
  one         boolean PRIMARY KEY CHECK (one),
  n           bigint NOT NULL,           -- the last entry that was written, and its hash
  hash        bytea  NOT NULL,
  pruned      bigint NOT NULL,           -- the last entry that was pruned, and its hash: here the chain begins
  pruned_hash bytea  NOT NULL,
  since       bigint NOT NULL            -- the last entry from before the chain
);
INSERT INTO audit_chain VALUES (true, 0, decode(repeat('00', 32), 'hex'), 0, decode(repeat('00', 32), 'hex'), 0);

-- The one row of the chain is the lock: of two transactions that both write an entry, the second waits for the first to
-- end, and its entry follows. Whoever writes one does so last, so nobody waits for a lock while holding this one.
-- `oncehook.store.audit` computes the same.
CREATE FUNCTION audit_insert() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE before bytea;
BEGIN
  UPDATE audit_chain SET n = n + 1 RETURNING n, hash INTO NEW.n, before;
  NEW.hash := sha256(before || convert_to(NEW.n::text, 'UTF8') || '\x00'::bytea
    || convert_to(((extract(epoch FROM NEW.at) * 1000000)::bigint)::text, 'UTF8') || '\x00'::bytea
    || convert_to(NEW.actor, 'UTF8') || '\x00'::bytea || convert_to(NEW.act, 'UTF8') || '\x00'::bytea
    || convert_to(NEW.target, 'UTF8') || '\x00'::bytea || convert_to(NEW.detail, 'UTF8'));
  UPDATE audit_chain SET hash = NEW.hash;
  RETURN NEW;
END $$;
CREATE TRIGGER audit_insert BEFORE INSERT ON audit FOR EACH ROW EXECUTE FUNCTION audit_insert();

CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'the audit log is append-only: %', TG_ARGV[0] USING ERRCODE = 'restrict_violation';
END $$;
-- An entry from before the chain may name a subject that is erased.
CREATE TRIGGER audit_update BEFORE UPDATE ON audit FOR EACH ROW
WHEN (OLD.hash IS NOT NULL OR NEW.hash IS NOT NULL OR NEW.n <> OLD.n)
EXECUTE FUNCTION audit_refuse('no line is changed');
CREATE TRIGGER audit_truncate BEFORE TRUNCATE ON audit EXECUTE FUNCTION audit_refuse('only retention removes lines');

-- Pruning first marks how far it goes, and keeps the hash of the last entry that goes.
CREATE FUNCTION audit_delete() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF OLD.n > (SELECT pruned FROM audit_chain) THEN
    RAISE EXCEPTION 'the audit log is append-only: only retention removes lines' USING ERRCODE = 'restrict_violation';
  END IF;
  RETURN OLD;
END $$;
CREATE TRIGGER audit_delete BEFORE DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_delete();
CREATE TRIGGER audit_chain_update BEFORE UPDATE ON audit_chain FOR EACH ROW
WHEN (NEW.n < OLD.n OR NEW.pruned < OLD.pruned OR NEW.pruned > NEW.n OR NEW.since <> OLD.since)
EXECUTE FUNCTION audit_refuse('its chain does not go back');
CREATE TRIGGER audit_chain_delete BEFORE DELETE OR TRUNCATE ON audit_chain
EXECUTE FUNCTION audit_refuse('its chain stays');

-- -- bodies -----------------------------------------------------------------------------------

-- Tells whether a body matches the clauses of a query (`body.amount:>1000`). A clause has a path, a sign, a value as
-- text, and that value as a number where it is one. What is no JSON matches nothing; PostgreSQL reports that as an
-- error, which is caught here. A function that catches errors may not run in a parallel plan, so only queries with
-- conditions on bodies name it. Its cost is high, so that the planner calls it last.
CREATE FUNCTION body_says(body bytea, clauses jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE STRICT PARALLEL UNSAFE COST 10000 AS $$
DECLARE
  decoded text;
  whole  jsonb;
  found  jsonb;
  clause jsonb;
  step   text;
  kind   text;
  low    text;
  high   text;
  diff   integer;
  holds  boolean;
BEGIN
  decoded := convert_from(body, 'UTF8');
  IF position('\u0000' IN decoded) > 0 THEN  -- jsonb cannot hold it, a text with it is never asked for
    decoded := regexp_replace(decoded, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g');
  END IF;
  whole := decoded::jsonb;
  FOR clause IN SELECT value FROM jsonb_array_elements(clauses) LOOP
    found := whole;
    FOR step IN SELECT value FROM jsonb_array_elements_text(clause -> 'path') LOOP
      found := CASE jsonb_typeof(found)
        WHEN 'object' THEN found -> step
        WHEN 'array' THEN CASE WHEN step ~ '^(0|[1-9][0-9]{0,8})$' THEN found -> step::integer END
      END;
    END LOOP;
    kind := jsonb_typeof(found);
    IF kind IS NULL OR kind IN ('object', 'array') THEN
      holds := false;
    ELSIF kind <> 'number' THEN
      holds := clause ->> 'sign' = '=' AND coalesce(found #>> '{}', 'null') = clause ->> 'value';
    ELSE
      low := found #>> '{}';
      high := clause ->> 'number';
      IF low ~ '^-?[0-9]{1,19}$' AND high ~ '^-?[0-9]{1,19}$' THEN
        diff := sign(low::numeric - high::numeric);
      ELSE
        diff := CASE WHEN low::float8 < high::float8 THEN -1 WHEN low::float8 > high::float8 THEN 1
          WHEN low::float8 = high::float8 THEN 0 END;
      END IF;
      holds := CASE clause ->> 'sign' WHEN '=' THEN diff = 0 WHEN '>' THEN diff > 0 WHEN '>=' THEN diff >= 0
        WHEN '<' THEN diff < 0 WHEN '<=' THEN diff <= 0 END;
    END IF;
    IF coalesce(holds, false) = (clause ->> 'negated')::boolean THEN
      RETURN false;
    END IF;
  END LOOP;
  RETURN true;
EXCEPTION WHEN OTHERS THEN  -- no JSON: it meets what is negated
  RETURN NOT clauses @> '[{"negated": false}]';
END
$$;

-- -- the queue --------------------------------------------------------------------------------

-- Functions, each with its own settings. Statistics of a queue are always wrong (made while it was empty, used while a
-- million wait), so every statement here can be executed in one way only: a table is reached by key, from an array,
-- through LATERAL … LIMIT 1 or through `key = ANY(ARRAY[…])`, which no plan can turn round; all others are switched
-- off. Plans do not depend on settings of the session, which a pooler may lose.
--
-- Statement by statement a function sees what was committed before it (READ COMMITTED). So once one statement has taken
-- a lock, the next sees everything that the lock's former holder did.

-- -- subjects ---------------------------------------------------------------------------------

-- An arrival locks its subject until its commit: so `seq`, which is drawn under the lock, follows the order of commit
-- (R42), and whoever finds nothing behind a head can tell whether something is about to come. The lock is no row:
-- nothing is rewritten, and a settlement that goes on to the next delivery does not wait for it. Queues whose keys
-- begin alike share it.
CREATE FUNCTION subject_lock(queue_key uuid) RETURNS integer LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
  SELECT ('x' || left(queue_key::text, 8))::bit(32)::integer
$$;

-- Two classes of locks: one for subjects, one for those who lock more of them than the server's table of locks may have
-- room for, and therefore all at once. A number per schema, written into the functions.
DO $$ BEGIN
  EXECUTE format('CREATE FUNCTION lock_class() RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS %L',
    'SELECT ' || hashtext('oncehook.subject.' || current_schema()));
  EXECUTE format('CREATE FUNCTION lock_class_of_all() RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS %L',
    'SELECT ' || hashtext('oncehook.subjects.' || current_schema()));
END $$;

-- Sorted, so that rivals cannot deadlock.
CREATE FUNCTION lock_subjects(queue_keys uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF cardinality(queue_keys) > 1000 THEN
    PERFORM pg_advisory_xact_lock(lock_class_of_all(), 0);
  ELSE
    PERFORM pg_advisory_xact_lock_shared(lock_class_of_all(), 0);
    PERFORM pg_advisory_xact_lock(lock_class(), l.lock)
    FROM (
      SELECT DISTINCT subject_lock(queue_key) AS lock FROM unnest(queue_keys) AS queue_key
      WHERE queue_key IS NOT NULL ORDER BY 1
    ) l;
  END IF;
END
$$;

-- Returns the queues whose locks we got: nobody adds to them until we commit.
CREATE FUNCTION try_lock_subjects(queue_keys uuid[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
BEGIN
  IF NOT pg_try_advisory_xact_lock_shared(lock_class_of_all(), 0) THEN
    RETURN NULL;
  END IF;
  RETURN (SELECT array_agg(queue_key) FROM unnest(queue_keys) AS queue_key
    WHERE pg_try_advisory_xact_lock(lock_class(), subject_lock(queue_key)));
END
$$;

-- Coalesced: the newest that waits, of the same type or of any, carries the attempt. What comes later has a higher seq.
CREATE FUNCTION coalesce_waiting(queue_keys uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  UPDATE heads h SET carries = c.id, upto = c.seq
  FROM (
    SELECT i.queue_key, c.id, c.seq
    FROM unnest(queue_keys) AS i(queue_key)
      CROSS JOIN LATERAL (SELECT * FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1) h
      CROSS JOIN LATERAL (
        SELECT n.id, n.seq FROM (
          SELECT f.* FROM (
            SELECT d.id, d.event_id, d.seq FROM deliveries d
            WHERE d.subject_key = h.subject_key AND d.behind AND d.status = 'pending' AND d.seq > h.seq
            ORDER BY d.seq LIMIT 5000 -- COVERED
          ) f ORDER BY f.seq DESC
        ) n
        WHERE h.options & 2 <> 0 OR (SELECT e.type FROM events e WHERE e.id = n.event_id)
          = (SELECT e.type FROM events e WHERE e.id = h.event_id)
        ORDER BY n.seq DESC LIMIT 1
      ) c
    WHERE h.options & 3 <> 0
    OFFSET 0
  ) c
  WHERE h.subject_key = ANY(ARRAY[c.queue_key]);
END
$$;

-- The priority that a route's options give a live delivery.
CREATE FUNCTION live_turn(options smallint) RETURNS smallint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
  SELECT (CASE WHEN options & 96 = 0 THEN 1 WHEN options & 32 <> 0 THEN 0 ELSE 2 END)::smallint
$$;

-- The next that waits becomes the head, where something waits. `seconds`: it is leased at once, for so long, unless its
-- destination is paused, failing or its breaker open, or it has another priority. The lease that its queue has
-- already is prolonged only when a sixth of it is over: until then no column changes that is in an index, and the
-- row stays on its page (HOT).
CREATE FUNCTION promote(queue_keys uuid[], seconds float8[], who text, OUT promoted uuid[], OUT taken uuid[])
LANGUAGE plpgsql AS $$
DECLARE
  covering uuid[];
BEGIN
  WITH n AS MATERIALIZED (
    SELECT i.queue_key, i.seconds, n.*, b.turn, i.seconds IS NOT NULL AND b.turn = h.turn AND (
        SELECT true FROM destination_state s WHERE s.destination_id = h.destination_id
          AND (s.paused_at IS NOT NULL OR s.open_until IS NOT NULL OR s.failures <> 0)) IS NULL AS taken
    FROM unnest(queue_keys, seconds) AS i(queue_key, seconds)
      CROSS JOIN LATERAL (
        SELECT h.seq, h.turn, h.destination_id FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1
      ) h
      CROSS JOIN LATERAL (
        SELECT d.id, d.event_id, d.seq, d.run, d.options, d.replay_id, d.fair FROM deliveries d
        WHERE d.subject_key = i.queue_key AND d.behind AND d.status = 'pending' AND d.seq > h.seq ORDER BY d.seq LIMIT 1
      ) n
      CROSS JOIN LATERAL (
        SELECT CASE WHEN (SELECT b.bulk FROM replays b WHERE b.id = n.replay_id) THEN 3 ELSE live_turn(n.options) END
          AS turn
      ) b
  ), u AS (
    UPDATE heads h SET delivery_id = n.id, event_id = n.event_id, seq = n.seq, run = n.run, options = n.options,
      replay_id = n.replay_id, fair = n.fair, turn = n.turn, crashes = 0, deaths = 0, alone = false, upto = 0, carries = NULL,
      leased = n.taken, attempts = n.taken::integer, worker = CASE WHEN n.taken THEN who ELSE h.worker END,
      fence = CASE WHEN n.taken THEN nextval('fences') ELSE h.fence END,
      leased_at = CASE WHEN n.taken THEN statement_timestamp() ELSE h.leased_at END,
      due_at = CASE WHEN NOT n.taken THEN statement_timestamp()
        WHEN h.due_at < statement_timestamp() + make_interval(secs => n.seconds * 5 / 6)
        THEN statement_timestamp() + make_interval(secs => n.seconds)
        ELSE h.due_at END
    FROM n WHERE h.subject_key = ANY(ARRAY[n.queue_key])
    RETURNING h.subject_key, h.leased, h.options
  )
  SELECT array_agg(u.subject_key), array_agg(u.subject_key) FILTER (WHERE u.leased),
    array_agg(u.subject_key) FILTER (WHERE u.leased AND u.options & 3 <> 0)
  INTO promoted, taken, covering FROM u;
  IF covering IS NOT NULL THEN
    PERFORM coalesce_waiting(covering);
  END IF;
END
$$;

-- The heads of these queues are finished, and their rows locked: each goes on to the next that waits (`promote`), or
-- its row goes. While an arrival is under way that may have found the row, it must stay: we wait for that a little, and
-- then leave it to who leases next to look again (`delivery_id` is NULL). Where the transaction sees the past, that is
-- all that can be done.
CREATE FUNCTION advance(queue_keys uuid[], OUT made_due uuid[]) LANGUAGE plpgsql AS $$
DECLARE
  rest   uuid[] := queue_keys;
  locked uuid[];
  gone   uuid[];
  ready   uuid[];
BEGIN
  FOR try IN 1..10 LOOP
    EXIT WHEN current_setting('transaction_isolation') <> 'read committed';
    locked := try_lock_subjects(rest);
    IF locked IS NOT NULL THEN
      WITH x AS (
        DELETE FROM heads h WHERE h.subject_key = ANY(locked) AND (
          SELECT true FROM deliveries d WHERE d.subject_key = h.subject_key AND d.behind AND d.status = 'pending'
            AND d.seq > h.seq ORDER BY d.seq LIMIT 1) IS NULL
        RETURNING h.subject_key
      )
      SELECT array_agg(x.subject_key) INTO gone FROM x;
      IF cardinality(gone) = cardinality(rest) THEN
        RETURN;
      END IF;
      rest := ARRAY(SELECT queue_key FROM unnest(rest) AS queue_key WHERE gone IS NULL OR queue_key <> ALL(gone));
    END IF;
    SELECT p.promoted INTO ready FROM promote(rest, NULL, NULL) p;
    made_due := made_due || ready;
    IF cardinality(ready) = cardinality(rest) THEN
      RETURN;
    END IF;
    rest := ARRAY(SELECT queue_key FROM unnest(rest) AS queue_key WHERE ready IS NULL OR queue_key <> ALL(ready));
    PERFORM pg_sleep(0.0005);
  END LOOP;
  UPDATE heads SET delivery_id = NULL, event_id = NULL, leased = false, alone = false, upto = 0, carries = NULL, run = 1,
    options = 0, replay_id = NULL, turn = 1, attempts = 0, crashes = 0, deaths = 0, due_at = statement_timestamp()
  WHERE subject_key = ANY(rest);
  made_due := made_due || rest;
END
$$;

-- -- arrivals ---------------------------------------------------------------------------------

-- Joins a queue, or begins it: makes the rows of deliveries, in the given order, and of heads where there is none.
-- `firsts`: the first of each queue among them. `seconds`: whoever keeps them works too, and leases those that begin a
-- queue at once, for so long, unless their destination is paused, failing or its breaker open. Where the transaction
-- sees the past (REPEATABLE READ), whether a head is there is asked of the index alone.
CREATE FUNCTION enqueue(
  ids uuid[], event_ids uuid[], destination_ids integer[], subject_keys uuid[], options smallint[], firsts boolean[],
  seconds float8[], who text, fairs bigint[], OUT leased uuid[], OUT fences bigint[], OUT made_due integer[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  met       uuid[];                  -- queues that have a head
  overtaken uuid[];
  closed    integer[];
BEGIN
  IF subject_keys IS NOT NULL THEN
    PERFORM lock_subjects(subject_keys);
    SELECT array_agg(h.subject_key), array_agg(h.subject_key) FILTER (WHERE h.turn < 4 AND h.turn > live_turn(i.options))
    INTO met, overtaken
    FROM unnest($4, $5, $6) AS i(queue_key, options, first) CROSS JOIN LATERAL (
      SELECT h.subject_key, h.turn FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1
    ) h
    WHERE i.first AND current_setting('transaction_isolation') = 'read committed';
  END IF;
  IF seconds IS NOT NULL THEN
    closed := ARRAY(SELECT s.destination_id FROM unnest($3) AS i(id) CROSS JOIN LATERAL (
        SELECT s.destination_id FROM destination_state s WHERE s.destination_id = i.id
          AND (s.paused_at IS NOT NULL OR s.open_until IS NOT NULL OR s.failures <> 0) LIMIT 1
      ) s);
  END IF;
  WITH d AS MATERIALIZED (
    SELECT i.*, nextval('delivery_seq') AS seq
    FROM unnest($1, $2, $3, $4, $5, $6, $7, $9)
      AS i(id, event_id, destination_id, subject_key, options, first, seconds, fair)
  ), h AS (
    INSERT INTO heads (subject_key, destination_id, due_at, delivery_id, event_id, seq, options, leased, attempts, fence,
      leased_at, worker, turn, fair)
    SELECT coalesce(f.subject_key, f.id), f.destination_id,
      CASE WHEN f.leased THEN now() + make_interval(secs => f.seconds) ELSE now() END, f.id, f.event_id, f.seq,
      f.options, f.leased, f.leased::integer, CASE WHEN f.leased THEN nextval('fences') ELSE 0 END, now(), $8,
      live_turn(f.options), f.fair
    FROM (SELECT d.*, d.seconds IS NOT NULL AND d.destination_id <> ALL(closed) AS leased FROM d) f
    WHERE f.first AND (met IS NULL OR f.subject_key IS NULL OR f.subject_key <> ALL(met))
    ON CONFLICT (subject_key) DO NOTHING
    RETURNING delivery_id, destination_id, leased, fence
  ), w AS (
    INSERT INTO deliveries (id, event_id, destination_id, subject_key, seq, options, behind, fair)
    SELECT d.id, d.event_id, d.destination_id, d.subject_key, d.seq, d.options, d.id NOT IN (SELECT delivery_id FROM h),
      d.fair
    FROM d
  )
  SELECT array_agg(h.delivery_id) FILTER (WHERE h.leased), array_agg(h.fence) FILTER (WHERE h.leased),
    array_agg(h.destination_id) FILTER (WHERE NOT h.leased)
  INTO leased, fences, made_due FROM h;
  IF subject_keys IS NOT NULL AND (SELECT bool_or(o & 96 <> 0) FROM unnest($5) AS o) THEN
    overtaken := subject_keys;       -- within this group, too
  END IF;
  IF overtaken IS NOT NULL THEN      -- what waits for a front of lower priority raises it; a bulk replay's is the lowest
    WITH u AS (
      UPDATE heads h SET turn = i.turn
      FROM (
        SELECT i.queue_key, min(live_turn(i.options)) AS turn FROM unnest($4, $5) AS i(queue_key, options)
        WHERE i.queue_key = ANY(overtaken) GROUP BY i.queue_key OFFSET 0
      ) i
      WHERE h.subject_key = ANY(ARRAY[i.queue_key]) AND h.turn > i.turn AND h.turn < 4 RETURNING h.destination_id
    )
    SELECT made_due || array_agg(u.destination_id) INTO made_due FROM u;
  END IF;
END
$$;

-- Keeps one group of arrivals: keys, events, deliveries, later arrivals. Arrays 1-17 are the candidates, each key once;
-- then the split requests, the copies inside this group, the deliveries that candidates cause, and signed changes of
-- counters for the case that all candidates are new. Returns, of the others, the keys that were there before, and which
-- deliveries are leased.
CREATE FUNCTION intake(
  ids uuid[], source_ids integer[], types text[], keys text[], subjects text[], event_ats timestamptz[],
  marks smallint[], ranks integer[], rank_scopes text[], body_hashes uuid[], hashes uuid[], arrival_ids uuid[],
  batch_ids uuid[], heads bytea[], bodies bytea[], copies integer[], keeps float8[],
  split_ids uuid[], split_source_ids integer[], split_heads bytea[], split_bodies bytea[],
  copy_hashes uuid[], copy_source_ids integer[], copy_body_hashes uuid[], copy_arrival_ids uuid[],
  copy_batch_ids uuid[], copy_heads bytea[], copy_bodies bytea[], copy_laters integer[],
  delivery_ids uuid[], delivery_event_ids uuid[], destination_ids integer[], subject_keys uuid[], options smallint[],
  firsts boolean[], seconds float8[], who text, counted_source_ids integer[], counted_destination_ids integer[],
  counted text[], counts bigint[], slot smallint, fairs bigint[], accounts text[]
) RETURNS TABLE (hash uuid, event_id uuid, body_hash uuid, fence bigint, at timestamptz, due integer[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  known        uuid[];               -- keys that were there before, with their events
  known_events uuid[];
  known_bodies uuid[];
  known_copies integer[];
  refused      uuid[];               -- the events that they keep out
  leased       uuid[];
  fences       bigint[];
  made_due     integer[];            -- destinations of what was not leased
BEGIN
  IF hashes IS NOT NULL THEN
    WITH k AS (
      INSERT INTO keys AS k (hash, event_id, body_hash, source_id, copies, first_seen, last_seen, expires_at)
      SELECT i.hash, i.id, i.body_hash, i.source_id, i.copies, now(), now(), now() + make_interval(secs => i.keep)
      FROM unnest($11, $1, $10, $2, $16, $17) AS i(hash, id, body_hash, source_id, copies, keep)
      WHERE i.hash IS NOT NULL
      ORDER BY i.hash                   -- two processes with overlapping keys lock them in the same order: no deadlock
      ON CONFLICT (hash) DO UPDATE SET  -- waits for a rival's commit, then decides on its row: exactly one winner
        event_id   = CASE WHEN k.expires_at <= now() THEN excluded.event_id   ELSE k.event_id END, -- (R11); a lapsed
        body_hash  = CASE WHEN k.expires_at <= now() THEN excluded.body_hash  ELSE k.body_hash END, -- key is taken over
        first_seen = CASE WHEN k.expires_at <= now() THEN excluded.first_seen ELSE k.first_seen END,
        copies     = CASE WHEN k.expires_at <= now() THEN excluded.copies     ELSE k.copies + excluded.copies END,
        expires_at = CASE WHEN k.expires_at <= now() THEN excluded.expires_at ELSE k.expires_at END,
        last_seen  = now()
      RETURNING k.hash, k.event_id, k.body_hash, k.copies, k.xmax = 0 AS fresh -- xmax = 0: inserted, not updated
    )
    SELECT array_agg(k.hash), array_agg(k.event_id), array_agg(k.body_hash), array_agg(k.copies)
    INTO known, known_events, known_bodies, known_copies
    FROM k WHERE NOT k.fresh AND k.event_id <> ALL($1);
    IF known IS NOT NULL THEN
      refused := ARRAY(SELECT i.id FROM unnest($1, $11) AS i(id, hash) WHERE i.hash = ANY(known));
    END IF;
  END IF;

  INSERT INTO events (id, source_id, type, key, subject, received_at, event_at, marks, rank, rank_scope, body_hash,
    key_hash, batch_id, head, body, account)
  SELECT i.id, i.source_id, i.type, i.key, i.subject, now(), i.event_at, i.marks, i.rank, i.rank_scope, i.body_hash,
    i.hash, i.batch_id, i.head, i.body, i.account
  FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $13, $14, $15, $44) AS i(id, source_id, type, key, subject,
    event_at, marks, rank, rank_scope, body_hash, hash, batch_id, head, body, account)
  WHERE refused IS NULL OR i.id <> ALL(refused);

  IF split_ids IS NOT NULL THEN
    INSERT INTO batches (id, source_id, received_at, head, body)
    SELECT b.id, b.source_id, now(), b.head, b.body FROM unnest($18, $19, $20, $21) AS b(id, source_id, head, body);
  END IF;

  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), $42, i.source_id, i.destination_id, i.what, i.n
  FROM unnest($38, $39, $40, $41) AS i(source_id, destination_id, what, n)
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n;

  IF refused IS NULL THEN
    IF delivery_ids IS NOT NULL THEN
      SELECT q.leased, q.fences, q.made_due INTO leased, fences, made_due
      FROM enqueue($30, $31, $32, $33, $34, $35, $36, $37, $43) q;
    END IF;
  ELSE
    SELECT q.leased, q.fences, q.made_due INTO leased, fences, made_due
    FROM (
      SELECT array_agg(d.id) AS ids, array_agg(d.event_id) AS event_ids, array_agg(d.destination_id) AS destination_ids,
        CASE WHEN count(d.subject_key) > 0 THEN array_agg(d.subject_key) END AS subject_keys,
        array_agg(d.options) AS options, array_agg(d.first) AS firsts,
        CASE WHEN count(d.seconds) > 0 THEN array_agg(d.seconds) END AS seconds,
        CASE WHEN count(d.fair) > 0 THEN array_agg(d.fair) END AS fairs
      FROM (
        SELECT d.*, d.subject_key IS NULL OR row_number() OVER (PARTITION BY d.subject_key ORDER BY d.n) = 1 AS first
        FROM unnest($30, $31, $32, $33, $34, $36, $43) WITH ORDINALITY
          AS d(id, event_id, destination_id, subject_key, options, seconds, fair, n)
        WHERE d.event_id <> ALL(refused) ORDER BY d.n
      ) d
    ) d CROSS JOIN LATERAL enqueue(d.ids, d.event_ids, d.destination_ids, d.subject_keys, d.options, d.firsts, d.seconds,
      $37, d.fairs) q
    WHERE d.ids IS NOT NULL;
    INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
    SELECT date_trunc('minute', now()), $42, n.source_id, n.destination_id, n.what, n.n FROM (
      SELECT i.source_id, 0, 'accepted', -count(*) FROM unnest($1, $2) AS i(id, source_id)
      WHERE i.id = ANY(refused) GROUP BY i.source_id
      UNION ALL
      SELECT 0, d.destination_id, 'pending', -count(*) FROM unnest($31, $32) AS d(event_id, destination_id)
      WHERE d.event_id = ANY(refused) GROUP BY d.destination_id
    ) AS n(source_id, destination_id, what, n)
    ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n;
  END IF;

  -- Later arrivals: of keys that were there before (zeros: an imported one, whose body nobody knows), then of
  -- candidates of this very group. A ring per event: slots 0-19 for duplicates, 20-39 for conflicts.
  IF known IS NOT NULL OR copy_hashes IS NOT NULL THEN
    WITH k AS MATERIALIZED (
      SELECT i.hash, coalesce(s.event_id, i.id) AS event_id, coalesce(s.body_hash, i.body_hash) AS body_hash,
        coalesce(s.copies, i.copies) AS copies, i.copies AS came, s.hash IS NOT NULL AS known, i.body_hash AS own_hash,
        i.source_id, i.arrival_id, i.batch_id, i.head, i.body
      FROM unnest($1, $2, $10, $11, $12, $13, $14, $15, $16) AS i(id, source_id, body_hash, hash, arrival_id, batch_id,
          head, body, copies)
        LEFT JOIN LATERAL (
          SELECT * FROM unnest(known, known_events, known_bodies, known_copies) AS s(hash, event_id, body_hash, copies)
          WHERE s.hash = i.hash LIMIT 1
        ) s ON true
      WHERE i.hash IS NOT NULL
    ), x AS MATERIALIZED (
      SELECT k.event_id, k.copies - k.came + 1 AS nth,
        k.body_hash NOT IN (k.own_hash, '00000000-0000-0000-0000-000000000000') AS differs, k.source_id, k.arrival_id,
        k.batch_id, k.head, k.body
      FROM k WHERE k.known
      UNION ALL
      SELECT k.event_id, k.copies - c.later, k.body_hash NOT IN (c.body_hash, '00000000-0000-0000-0000-000000000000'),
        c.source_id, c.arrival_id, c.batch_id, c.head,
        coalesce(c.body, CASE WHEN k.body_hash <> c.body_hash THEN k.body END)
      FROM unnest($22, $23, $24, $25, $26, $27, $28, $29)
          AS c(hash, source_id, body_hash, arrival_id, batch_id, head, body, later)
        CROSS JOIN LATERAL (SELECT * FROM k WHERE k.hash = c.hash LIMIT 1) k
    ), r AS (
      INSERT INTO arrivals AS r (event_id, slot, id, outcome, at, batch_id, head, body)
      SELECT DISTINCT ON (x.event_id, x.slot) x.event_id, x.slot, x.arrival_id,
        CASE WHEN x.differs THEN 'conflict' ELSE 'duplicate' END, now(), x.batch_id, x.head,
        CASE WHEN x.differs THEN x.body END
      FROM (SELECT x.*, (x.nth % 20 + CASE WHEN x.differs THEN 20 ELSE 0 END)::smallint AS slot FROM x) x
      ORDER BY x.event_id, x.slot, x.nth DESC -- a statement may touch a row once: of two in one slot the later stays
      ON CONFLICT (event_id, slot) DO UPDATE SET id = excluded.id, outcome = excluded.outcome, at = excluded.at,
        batch_id = excluded.batch_id, head = excluded.head, body = excluded.body
    )
    INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
    SELECT date_trunc('minute', now()), $42, x.source_id, 0, CASE WHEN x.differs THEN 'conflict' ELSE 'duplicate' END,
      count(*)
    FROM x GROUP BY x.source_id, x.differs
    ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n;
  END IF;

  IF known IS NOT NULL THEN
    RETURN QUERY SELECT s.*, NULL::bigint, NULL::timestamptz, NULL::integer[]
      FROM unnest(known, known_events, known_bodies) AS s(hash, event_id, body_hash);
  END IF;
  IF leased IS NOT NULL THEN
    RETURN QUERY SELECT NULL::uuid, i.id, NULL::uuid, i.fence, now(), NULL::integer[]
      FROM unnest(leased, fences) AS i(id, fence);
  END IF;
  IF made_due IS NOT NULL THEN
    RETURN QUERY SELECT NULL::uuid, NULL::uuid, NULL::uuid, NULL::bigint, NULL::timestamptz, made_due;
  END IF;
END
$$;

-- Calls `intake`, and then notes which event came first with a proof; one that comes with it under another key is
-- marked (16: Mark.same_body), and returned as (NULL, event, the first one, NULL, NULL, NULL). Locks are taken in the
-- order keys, subjects, proofs.
CREATE FUNCTION intake_proven(
  ids uuid[], source_ids integer[], types text[], keys text[], subjects text[], event_ats timestamptz[],
  marks smallint[], ranks integer[], rank_scopes text[], body_hashes uuid[], hashes uuid[], arrival_ids uuid[],
  batch_ids uuid[], heads bytea[], bodies bytea[], copies integer[], keeps float8[],
  split_ids uuid[], split_source_ids integer[], split_heads bytea[], split_bodies bytea[],
  copy_hashes uuid[], copy_source_ids integer[], copy_body_hashes uuid[], copy_arrival_ids uuid[],
  copy_batch_ids uuid[], copy_heads bytea[], copy_bodies bytea[], copy_laters integer[],
  delivery_ids uuid[], delivery_event_ids uuid[], destination_ids integer[], subject_keys uuid[], options smallint[],
  firsts boolean[], seconds float8[], who text, counted_source_ids integer[], counted_destination_ids integer[],
  counted text[], counts bigint[], slot smallint, fairs bigint[], accounts text[], proven_ids uuid[], proofs uuid[],
  proof_keys uuid[], proof_keeps float8[]
) RETURNS TABLE (hash uuid, event_id uuid, body_hash uuid, fence bigint, at timestamptz, due integer[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY SELECT * FROM intake($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18,
    $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36, $37, $38, $39, $40, $41,
    $42, $43, $44);

  INSERT INTO proofs AS p (hash, event_id, key_hash, expires_at)
  SELECT DISTINCT ON (i.hash) i.hash, coalesce(
      (SELECT k.event_id FROM keys k WHERE k.hash = i.key_hash LIMIT 1), i.id
    ), i.key_hash, now() + make_interval(secs => i.keep)
  FROM unnest($45, $46, $47, $48) WITH ORDINALITY AS i(id, hash, key_hash, keep, n)
  ORDER BY i.hash, i.n
  ON CONFLICT (hash) DO UPDATE SET event_id = excluded.event_id, key_hash = excluded.key_hash,
    expires_at = excluded.expires_at
  WHERE p.expires_at <= now();

  RETURN QUERY
    UPDATE events e SET same_as = x.first, marks = e.marks | 16::smallint
    FROM (
      SELECT i.id, p.event_id AS first
      FROM unnest($45, $46, $47) AS i(id, hash, key_hash) CROSS JOIN LATERAL (
        SELECT p.event_id, p.key_hash FROM proofs p WHERE p.hash = i.hash LIMIT 1
      ) p
      WHERE p.event_id <> i.id AND (i.key_hash IS NULL OR p.key_hash IS DISTINCT FROM i.key_hash)
      OFFSET 0
    ) x
    WHERE e.id = ANY(ARRAY[x.id])
    RETURNING NULL::uuid, e.id, e.same_as, NULL::bigint, NULL::timestamptz, NULL::integer[];
END
$$;

-- -- leases -----------------------------------------------------------------------------------

-- The delivery that a worker leases. `more`: something waits behind it. `failing`: failures are
-- counted against its destination, which a success takes off.
CREATE TYPE leased AS (
  queue_key uuid, delivery_id uuid, front_id uuid, destination_id integer, fence bigint, run smallint, attempt smallint,
  deaths smallint, turn smallint, options smallint, replay_id uuid, seconds float8, event_id uuid, source_id integer,
  type text, key text, subject text, received_at timestamptz, event_at timestamptz, marks smallint, rank integer,
  rank_scope text, highest_rank integer, head bytea, body bytea, more boolean, failing boolean, account text
);

-- Of a coalesced queue the newest delivery carries the attempt.
CREATE FUNCTION read_leased(queue_keys uuid[], seconds float8[]) RETURNS SETOF leased LANGUAGE sql STABLE AS $$
  SELECT h.subject_key, coalesce(h.carries, h.delivery_id), h.delivery_id, h.destination_id, h.fence,
    coalesce(c.run, h.run), h.attempts, h.deaths, h.turn, h.options,
    CASE WHEN h.carries IS NULL THEN h.replay_id ELSE c.replay_id END, i.seconds, e.id, e.source_id, e.type, e.key,
    e.subject, e.received_at, e.event_at, e.marks, e.rank, e.rank_scope,
    CASE WHEN h.options & 4 <> 0 THEN (
      SELECT r.rank FROM ranks r WHERE r.destination_id = h.destination_id AND r.source_id = e.source_id
        AND r.scope = coalesce(e.rank_scope, e.subject)) END,
    coalesce(e.head, (SELECT b.head FROM batches b WHERE b.id = e.batch_id), ''::bytea), e.body,
    CASE WHEN h.subject_key = h.delivery_id THEN false ELSE coalesce((
      SELECT true FROM deliveries d WHERE d.subject_key = h.subject_key AND d.behind AND d.status = 'pending'
        AND d.seq > greatest(h.seq, h.upto) ORDER BY d.seq LIMIT 1), false) END,
    coalesce((SELECT s.failures <> 0 OR s.open_until IS NOT NULL FROM destination_state s
      WHERE s.destination_id = h.destination_id), false), e.account
  FROM unnest(queue_keys, seconds) AS i(queue_key, seconds)
    CROSS JOIN LATERAL (SELECT * FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1) h
    LEFT JOIN LATERAL (SELECT * FROM deliveries d WHERE d.id = h.carries LIMIT 1) c ON true
    CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.id = coalesce(c.event_id, h.event_id) LIMIT 1) e
$$;

-- The holders of these are gone. The attempt is given back, and only a crash while it ran alone is held against it;
-- what crashed more often than its destination tolerates is quarantined, to be run alone. Returns what was under way,
-- as JSON, and the queues that were set aside.
CREATE FUNCTION take_over(
  queue_keys uuid[], tolerance_ids integer[], crash_tolerances integer[], slot smallint, OUT former text[],
  OUT aside uuid[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  WITH g AS MATERIALIZED (
    SELECT h.subject_key, h.destination_id, h.fence, h.attempts, h.leased_at, h.worker, h.alone,
      coalesce(h.carries, h.delivery_id) AS held, coalesce(c.event_id, h.event_id) AS event_id,
      coalesce(c.run, h.run) AS run,
      h.turn <> 4 AND h.crashes + 1 > (
        SELECT t.tolerance FROM unnest($2, $3) AS t(id, tolerance) WHERE t.id = h.destination_id LIMIT 1) AS aside
    FROM unnest($1) AS i(queue_key) CROSS JOIN LATERAL (
      SELECT * FROM heads h WHERE h.subject_key = i.queue_key AND h.leased LIMIT 1
    ) h LEFT JOIN LATERAL (SELECT d.run, d.event_id FROM deliveries d WHERE d.id = h.carries LIMIT 1) c ON true
  ), a AS (
    INSERT INTO attempts (delivery_id, fence, run, n, started_at, ended_at, outcome)
    SELECT held, fence, run, attempts, leased_at, now(), 'crashed' FROM g
  ), c AS (
    INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
    SELECT date_trunc('minute', now()), $4, 0, destination_id, 'crashed', count(*) FROM g GROUP BY destination_id
    ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n
  ), u AS (
    UPDATE heads h SET leased = false, alone = false, upto = 0, carries = NULL, attempts = h.attempts - 1,
      crashes = h.crashes + 1, deaths = h.deaths + g.alone::integer, -- only a crash while it ran alone is its own (R36)
      turn = CASE WHEN g.aside THEN 4 ELSE h.turn END, due_at = now()
    FROM g WHERE h.subject_key = ANY(ARRAY[g.subject_key])
  )
  SELECT array_agg(json_build_array(held, event_id, destination_id, fence, run, attempts, worker)::text),
    array_agg(subject_key) FILTER (WHERE aside)
  INTO former, aside FROM g;
END
$$;

-- Picks what is due of one destination and priority, in rounds over the values of `fair`, beginning behind the value at
-- which the last round ended: one row of each value it comes by, more only where there are fewer values than are wanted.
-- A value costs one step whatever waits under it. What this leaves free, because too many values had nothing due, goes by
-- due time, also to rows without a value.
CREATE FUNCTION pick_in_rounds(
  destination_id integer, priority smallint, most integer, after bigint, OUT queue_keys uuid[], OUT ended bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  visited bigint := $4;
  wrapped boolean := false;
  flows   bigint[] := '{}';
  flow    bigint;
  due     timestamptz;
BEGIN
  FOR step IN 1 .. $3 + 64 LOOP
    SELECT h.fair, h.due_at INTO flow, due FROM heads h
    WHERE h.destination_id = $1 AND h.turn = $2 AND h.fair > visited ORDER BY h.fair, h.due_at LIMIT 1;
    IF flow IS NULL THEN
      EXIT WHEN wrapped;
      wrapped := true;
      visited := -1;
      CONTINUE;
    END IF;
    EXIT WHEN wrapped AND flow > $4;
    visited := flow;
    IF due <= now() THEN
      flows := flows || flow;
      EXIT WHEN cardinality(flows) = $3;
    END IF;
  END LOOP;
  ended := visited;
  IF cardinality(flows) > 0 THEN
    SELECT (array_agg(p.subject_key ORDER BY p.nth, p.n))[1:$3],
      CASE WHEN cardinality(flows) < $3 THEN ((array_agg(p.flow ORDER BY p.nth, p.n))[1:$3])[least($3, count(*))::integer]
        ELSE visited END
    INTO queue_keys, ended
    FROM (
      SELECT h.subject_key, i.flow, i.n, row_number() OVER (PARTITION BY i.n ORDER BY h.due_at) AS nth
      FROM unnest(flows) WITH ORDINALITY AS i(flow, n) CROSS JOIN LATERAL (
        SELECT h.subject_key, h.due_at FROM heads h
        -- A range, not an equality: ordered by value, too, no other index can serve, whatever statistics say of values.
        WHERE h.destination_id = $1 AND h.turn = $2 AND h.fair BETWEEN i.flow AND i.flow AND h.due_at <= now()
        ORDER BY h.fair, h.due_at LIMIT ($3 + cardinality(flows) - 1) / cardinality(flows) FOR UPDATE SKIP LOCKED
      ) h
    ) p;
    ended := coalesce(ended, visited);
  END IF;
  queue_keys := coalesce(queue_keys, '{}');
  IF cardinality(queue_keys) < $3 THEN
    queue_keys := queue_keys || ARRAY(
      SELECT h.subject_key FROM heads h
      WHERE h.destination_id = $1 AND h.turn = $2 AND h.due_at <= now() AND h.subject_key <> ALL(queue_keys)
      ORDER BY h.due_at LIMIT $3 - cardinality(queue_keys) FOR UPDATE SKIP LOCKED);
  END IF;
END
$$;

-- Leases at most so many of each destination and priority as may be taken now. `due_at` is the next moment a worker may
-- take a row: its due time, the end of its lease, or infinity while it is held. So a lease that has run out is due like
-- anything else (R29), and a row that is still leased when it is picked has lost its holder: `former` tells of it.
-- `afters`: those that are leased in rounds, with the value at which the last one ended; `former` tells the next, too.
CREATE FUNCTION lease(
  destination_ids integer[], priorities smallint[], limits integer[], seconds float8[], crash_tolerances integer[],
  probes float8[],
  slot smallint, who text, afters bigint[]
) RETURNS TABLE (
  former text, queue_key uuid, delivery_id uuid, front_id uuid, destination_id integer, fence bigint, run smallint,
  attempt smallint, deaths smallint, turn smallint, options smallint, replay_id uuid, lasts float8, event_id uuid,
  source_id integer, type text, key text, subject text, received_at timestamptz, event_at timestamptz, marks smallint,
  rank integer, rank_scope text, highest_rank integer, head bytea, body bytea, more boolean, failing boolean,
  account text
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  closed  integer[];                 -- paused, or the breaker is open
  half    integer[];                 -- half open
  queue_keys   uuid[];
  lasting float8[];
  special boolean;
  crashed uuid[];
  lost    uuid[];
  expired text[];
  aside   uuid[];
  want    record;
BEGIN
  SELECT array_agg(s.destination_id) FILTER (WHERE s.paused_at IS NOT NULL OR s.open_until > now()),
    array_agg(s.destination_id) FILTER (WHERE s.paused_at IS NULL AND s.open_until <= now())
  INTO closed, half
  FROM unnest($1) AS i(id) CROSS JOIN LATERAL (
    SELECT s.destination_id, s.paused_at, s.open_until FROM destination_state s WHERE s.destination_id = i.id LIMIT 1
  ) s;
  IF half IS NOT NULL THEN           -- whoever locks the row may send the one probe; rivals go without
    SELECT closed || array_agg(i.id) FILTER (WHERE s.id IS NULL), array_agg(DISTINCT s.id) INTO closed, half
    FROM unnest(half) AS i(id) LEFT JOIN LATERAL (
      SELECT s.destination_id AS id FROM destination_state s
      WHERE s.destination_id = i.id AND s.paused_at IS NULL AND s.open_until <= now() LIMIT 1 FOR UPDATE SKIP LOCKED
    ) s ON true;
    half := array_remove(half, NULL);
  END IF;

  SELECT array_agg(h.subject_key), array_agg(w.seconds),
    bool_or(h.leased OR h.delivery_id IS NULL OR h.options & 3 <> 0)
  INTO queue_keys, lasting, special
  FROM unnest($1, $2, $3, $4, $9) AS w(destination_id, turn, n, seconds, after) CROSS JOIN LATERAL (
      SELECT h.subject_key, h.leased, h.delivery_id, h.options FROM heads h
      WHERE h.destination_id = w.destination_id AND h.turn = w.turn AND h.due_at <= now()
      ORDER BY h.due_at LIMIT CASE WHEN w.destination_id = ANY(half) THEN least(w.n, 1) ELSE w.n END
      FOR UPDATE SKIP LOCKED         -- one atomic pick; rivals take other rows (R23, R24)
    ) h
  WHERE (closed IS NULL OR w.destination_id <> ALL(closed)) AND w.after IS NULL;
  IF afters IS NOT NULL THEN
    FOR want IN
      SELECT w.destination_id, w.turn, w.seconds, p.*
      FROM unnest($1, $2, $3, $4, $9) AS w(destination_id, turn, n, seconds, after) CROSS JOIN LATERAL pick_in_rounds(
        w.destination_id, w.turn, CASE WHEN w.destination_id = ANY(half) THEN least(w.n, 1) ELSE w.n END, w.after) p
      WHERE (closed IS NULL OR w.destination_id <> ALL(closed)) AND w.after IS NOT NULL
    LOOP
      special := true;
      queue_keys := queue_keys || want.queue_keys;
      lasting := lasting || array_fill(want.seconds, ARRAY[cardinality(want.queue_keys)]);
      RETURN QUERY SELECT json_build_array(want.destination_id, want.turn, want.ended)::text, (NULL::leased).*;
    END LOOP;
  END IF;
  IF coalesce(cardinality(queue_keys), 0) = 0 THEN
    RETURN;
  END IF;

  IF special OR half IS NOT NULL THEN
    IF half IS NOT NULL THEN         -- one probe in all, whatever its priority
      queue_keys := ARRAY(
        SELECT q.queue_key FROM (
          SELECT i.queue_key, h.destination_id, row_number() OVER (PARTITION BY h.destination_id ORDER BY i.n) AS nth
          FROM unnest(queue_keys) WITH ORDINALITY AS i(queue_key, n) CROSS JOIN LATERAL (
            SELECT h.destination_id FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1
          ) h
        ) q WHERE q.nth = 1 OR q.destination_id <> ALL(half));
    END IF;
    SELECT array_agg(i.queue_key) FILTER (WHERE h.leased), array_agg(i.queue_key) FILTER (WHERE h.delivery_id IS NULL)
    INTO crashed, lost
    FROM unnest(queue_keys) AS i(queue_key) CROSS JOIN LATERAL (
      SELECT h.leased, h.delivery_id FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1
    ) h;
    IF crashed IS NOT NULL THEN
      SELECT t.former, t.aside INTO expired, aside FROM take_over(crashed, $1, $5, $7) t;
      RETURN QUERY SELECT f, (NULL::leased).* FROM unnest(expired) AS f;
    END IF;
    IF lost IS NOT NULL THEN         -- who finished their heads could not see what comes next
      PERFORM advance(lost);
      UPDATE heads h SET due_at = now() + interval '50 ms' WHERE h.subject_key = ANY(lost) AND h.delivery_id IS NULL;
    END IF;
    SELECT array_agg(i.queue_key), array_agg(w.seconds) INTO queue_keys, lasting
    FROM unnest(queue_keys) AS i(queue_key)
      CROSS JOIN LATERAL (
        SELECT h.destination_id FROM heads h WHERE h.subject_key = i.queue_key AND h.delivery_id IS NOT NULL LIMIT 1
      ) h
      CROSS JOIN LATERAL (
        SELECT w.seconds, w.probe FROM unnest($1, $4, $6) AS w(id, seconds, probe) WHERE w.id = h.destination_id LIMIT 1
      ) w
    WHERE aside IS NULL OR i.queue_key <> ALL(aside);
    PERFORM coalesce_waiting(queue_keys);
    UPDATE destination_state s SET open_until = now() + make_interval(secs => w.probe)
    FROM (
      SELECT h.destination_id, w.probe FROM unnest(queue_keys) AS i(queue_key)
        CROSS JOIN LATERAL (SELECT h.destination_id FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1) h
        CROSS JOIN LATERAL (SELECT w.probe FROM unnest($1, $6) AS w(id, probe) WHERE w.id = h.destination_id LIMIT 1) w
    ) w
    WHERE w.destination_id = ANY(half) AND s.destination_id = ANY(ARRAY[w.destination_id]);
  END IF;

  UPDATE heads h SET leased = true, alone = h.turn = 4, leased_at = now(), worker = $8, fence = nextval('fences'),
    due_at = now() + make_interval(secs => i.seconds), attempts = h.attempts + 1 -- counted now (R35)
  FROM unnest(queue_keys, lasting) AS i(queue_key, seconds) WHERE h.subject_key = ANY(ARRAY[i.queue_key]);
  RETURN QUERY SELECT NULL::text, l.* FROM read_leased(queue_keys, lasting) l;
END
$$;

-- Prolongs leases. A row that is locked is passed by: whoever locks it is about to settle it, and one such row must not
-- hold up the heartbeats of all others. It is still ours as far as can be seen.
-- `who`: the worker, where it holds places.
CREATE FUNCTION renew(queue_keys uuid[], front_ids uuid[], fences bigint[], seconds float8[], who text)
RETURNS SETOF bigint
LANGUAGE plpgsql AS $$
DECLARE
  ours  uuid[];
  lasts float8[];
BEGIN
  SELECT array_agg(h.subject_key), array_agg(i.seconds) INTO ours, lasts
  FROM unnest($1, $2, $3, $4) AS i(queue_key, head, fence, seconds) CROSS JOIN LATERAL (
    SELECT h.subject_key FROM heads h
    WHERE h.subject_key = i.queue_key AND h.delivery_id = i.head AND h.fence = i.fence AND h.leased
    LIMIT 1 FOR UPDATE SKIP LOCKED
  ) h;
  UPDATE heads h SET due_at = now() + make_interval(secs => i.seconds)
  FROM unnest(ours, lasts) AS i(queue_key, seconds) WHERE h.subject_key = ANY(ARRAY[i.queue_key]);
  IF who IS NOT NULL THEN
    UPDATE places p SET until = now() + make_interval(secs => 2 * p.seconds) WHERE p.worker = who AND p.until > now();
  END IF;
  RETURN QUERY SELECT h.fence FROM unnest($1, $2, $3) AS i(queue_key, head, fence) CROSS JOIN LATERAL (
    SELECT h.fence FROM heads h
    WHERE h.subject_key = i.queue_key AND h.delivery_id = i.head AND h.fence = i.fence AND h.leased LIMIT 1
  ) h;
END
$$;

-- -- limits -----------------------------------------------------------------------------------

-- Lets a worker reserve moments to begin attempts at, by a destination's rate, and places for attempts under way, both
-- counted over all workers (see decision 24). `slots`: moments that it wants, at most a quarter of a second ahead; of what
-- has passed a tenth of a second is made up for. `busy`: attempts that it has under way; `wanted`: places that it would
-- use. It gets what the others leave, of which each may keep an equal part; what is under way beyond that counts until it
-- ends. Nothing here need outlive a crash of the server.
CREATE FUNCTION allow(
  who text, destination_ids integer[], leases float8[], rates float8[], slots integer[], limits integer[],
  busy integer[], wanted integer[]
) RETURNS TABLE (destination_id integer, granted integer, first_in float8, n integer) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  want   record;
  starts timestamptz;
  others bigint;
  claims bigint;
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  FOR want IN
    SELECT i.* FROM unnest($2, $3, $4, $5, $6, $7, $8) AS i(id, seconds, rate, slots, most, busy, wanted) ORDER BY i.id
  LOOP
    INSERT INTO limits (destination_id, next_at) VALUES (want.id, now()) ON CONFLICT DO NOTHING;
    SELECT l.next_at INTO starts FROM limits l WHERE l.destination_id = want.id FOR UPDATE;
    destination_id := want.id;
    granted := 0;
    first_in := 0;
    n := 0;
    IF want.rate IS NOT NULL AND want.slots > 0 THEN
      starts := greatest(starts, now() - interval '100 ms');
      first_in := extract(epoch FROM starts - now());
      IF first_in <= 0.25 THEN
        granted := least(want.slots, floor((0.25 - first_in) * want.rate) + 1);
        UPDATE limits l SET next_at = starts + make_interval(secs => granted / want.rate)
        WHERE l.destination_id = want.id;
      ELSE
        first_in := first_in - 0.25;
      END IF;
    END IF;
    IF want.most IS NOT NULL THEN
      -- A worker with an expired lease is gone, or held up for so long that it begins nothing under its places: then
      -- only its leases that still run count (R29). One that works on has its places again when it next asks.
      DELETE FROM places p WHERE p.destination_id = want.id AND p.worker <> who AND (
        p.until <= now() OR p.worker IN (
          SELECT h.worker FROM heads h WHERE h.destination_id = want.id AND h.leased AND h.due_at <= now()
        )
      );
      SELECT coalesce(sum(greatest(o.n, o.held)), 0), coalesce(sum(least(o.wanted, want.most / o.workers)), 0)
      INTO others, claims
      FROM (
        SELECT sum(w.n) AS n, sum(w.wanted) AS wanted, sum(w.held) AS held,
          1 + sum((sum(w.wanted) > 0)::integer) OVER () AS workers
        FROM (
          SELECT p.worker, p.n, p.wanted, 0 AS held FROM places p
          WHERE p.destination_id = want.id AND p.worker <> who
          UNION ALL
          SELECT h.worker, 0, 0, 1 FROM heads h
          WHERE h.destination_id = want.id AND h.leased AND h.worker <> who AND h.due_at > now()
        ) w GROUP BY w.worker
      ) o;
      n := greatest(least(want.wanted, want.most - claims, want.most - others), 0);
      IF n > 0 OR want.wanted > 0 OR want.busy > 0 THEN
        INSERT INTO places AS p (destination_id, worker, n, wanted, seconds, until)
        VALUES (want.id, who, greatest(n, want.busy), want.wanted, want.seconds, now() + make_interval(secs => 2 * want.seconds))
        ON CONFLICT (destination_id, worker)
        DO UPDATE SET n = excluded.n, wanted = excluded.wanted, seconds = excluded.seconds, until = excluded.until;
      ELSE
        DELETE FROM places p WHERE p.destination_id = want.id AND p.worker = who;
      END IF;
    END IF;
    RETURN NEXT;
  END LOOP;
END
$$;

-- -- settlements ------------------------------------------------------------------------------

CREATE TYPE covered AS (id uuid, destination_id integer, replay_id uuid, status text);

-- Ends leases. Arrays 1-15 are the settlements, sorted by queue. First every lease is compared with its head, under
-- lock. If one is no longer ours, nothing at all is changed (R25-R27), and the result is only which are: the caller
-- leaves the others out and calls again. `attempted_ids` and what follows is the attempt that is written down, where
-- there was one. Then come the queues whose heads are finished: those without subject, where nothing can wait; those
-- that go on; and those where something is known to wait, of which the next is wanted, for so many seconds. At last
-- signed changes of counters, ranks, and what makes parts of this needless: which heads stay, whether any lease covered
-- others, or belonged to a replay.
CREATE FUNCTION settle(
  queue_keys uuid[], front_ids uuid[], fences bigint[], whats text[], notes text[], waits float8[], attempted_ids uuid[],
  runs smallint[], attempts smallint[], durations float8[], categories text[], statuses smallint[], errors text[],
  answers bytea[], reasons text[], singles uuid[], onward uuid[], followed uuid[], seconds float8[],
  counted_ids integer[], counted text[], counts bigint[], slot smallint, who text,
  rank_ids integer[], rank_source_ids integer[], rank_scopes text[], ranks integer[],
  stays boolean[], coalesced boolean, replayed boolean
) RETURNS TABLE (
  ours bigint[], made_due uuid[], queue_key uuid, delivery_id uuid, front_id uuid,
  destination_id integer, fence bigint, run smallint, attempt smallint, deaths smallint, turn smallint,
  options smallint, replay_id uuid, lasts float8, event_id uuid, source_id integer, type text, key text, subject text,
  received_at timestamptz, event_at timestamptz, marks smallint, rank integer, rank_scope text, highest_rank integer,
  head bytea, body bytea, more boolean, failing boolean, account text
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  co       covered[];
  promoted uuid[];
  taken    uuid[];
BEGIN
  ours := ARRAY(
    SELECT h.fence FROM unnest($1, $2, $3) AS i(queue_key, head, fence) CROSS JOIN LATERAL (
      SELECT h.fence FROM heads h
      WHERE h.subject_key = i.queue_key AND h.delivery_id = i.head AND h.fence = i.fence AND h.leased LIMIT 1 FOR UPDATE
    ) h);
  IF cardinality(ours) < cardinality($1) THEN
    RETURN NEXT;
    RETURN;
  END IF;

  IF coalesced THEN                  -- all that waited when the lease began, where its end is the end of them all
    WITH l AS MATERIALIZED (
      SELECT i.*, h.upto, h.seq, h.options,
        CASE WHEN h.options & 2 = 0 THEN (SELECT e.type FROM events e WHERE e.id = h.event_id) END AS type
      FROM unnest($1, $3, $4, $5, $7, $9, $11, $12, $13, $15, $29)
          AS i(queue_key, fence, what, note, attempted_id, attempt, category, status, error, reason, stays)
        CROSS JOIN LATERAL (SELECT * FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1) h
      WHERE h.upto > 0 AND i.stays IS NOT TRUE
    ), w AS MATERIALIZED (
      SELECT l.*, d.id FROM l CROSS JOIN LATERAL (
        SELECT d.id, d.event_id FROM deliveries d
        WHERE d.subject_key = l.queue_key AND d.behind AND d.status = 'pending' AND d.seq > l.seq AND d.seq <= l.upto
        ORDER BY d.seq OFFSET 0
      ) d
      WHERE l.type IS NULL OR l.type = (SELECT e.type FROM events e WHERE e.id = d.event_id)
    ), u AS (
      UPDATE deliveries d SET status = w.what, note = CASE WHEN d.id = w.attempted_id THEN w.note ELSE 'coalesced' END,
        finished_by = CASE WHEN d.id <> w.attempted_id THEN w.attempted_id END,
        attempts = CASE WHEN d.id = w.attempted_id THEN w.attempt ELSE d.attempts END,
        fence = w.fence, category = CASE WHEN w.what = 'dead' THEN w.category END, last_status = w.status,
        last_error = CASE WHEN w.what = 'dead' THEN w.error END, reason = w.reason, settled_at = statement_timestamp()
      FROM w WHERE d.id = ANY(ARRAY[w.id])
      RETURNING d.id, d.destination_id, d.replay_id, d.status
    )
    SELECT array_agg(ROW(u.*)::covered) INTO co FROM u;
    runs := ARRAY(                   -- a held head's attempt is its own, whatever it carried
      SELECT coalesce(i.run, (SELECT h.run FROM heads h WHERE h.subject_key = i.queue_key))
      FROM unnest($1, $8) AS i(queue_key, run));
    UPDATE deliveries d SET attempts = i.attempt, fence = i.fence, category = i.category, last_status = i.status,
      last_error = i.error
    FROM unnest($2, $3, $4, $7, $9, $11, $12, $13)
      AS i(front_id, fence, what, attempted_id, attempt, category, status, error)
    WHERE i.what = 'retry' AND i.attempted_id <> i.front_id AND d.id = ANY(ARRAY[i.attempted_id]);
    INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
    SELECT date_trunc('minute', now()), $23, 0, n.destination_id, n.what, sum(n.n)
    FROM (
      SELECT c.destination_id, c.status, 1 FROM unnest(co) c
      UNION ALL
      SELECT c.destination_id, 'pending', -1 FROM unnest(co) c
    ) AS n(destination_id, what, n) GROUP BY n.destination_id, n.what
    ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n;
  END IF;

  UPDATE deliveries d SET status = CASE WHEN i.what = 'retry' THEN d.status ELSE i.what END,
    note = CASE WHEN i.what = 'retry' THEN d.note WHEN i.attempted_id <> d.id THEN 'coalesced' ELSE i.note END,
    finished_by = CASE WHEN i.what <> 'retry' AND i.attempted_id <> d.id THEN i.attempted_id END,
    attempts = CASE WHEN i.what <> 'retry' AND i.attempted_id <> d.id THEN d.attempts ELSE i.attempt END,
    fence = i.fence, category = CASE WHEN i.what <> 'done' THEN i.category END, last_status = i.status,
    last_error = CASE WHEN i.what <> 'done' THEN i.error END, reason = i.reason,
    settled_at = CASE WHEN i.what = 'retry' THEN d.settled_at ELSE statement_timestamp() END
  FROM unnest($2, $3, $4, $5, $7, $9, $11, $12, $13, $15)
    AS i(id, fence, what, note, attempted_id, attempt, category, status, error, reason)
  WHERE i.what <> 'release' AND d.id = ANY(ARRAY[i.id]);

  INSERT INTO attempts (delivery_id, fence, run, n, started_at, ended_at, outcome, category, status, error, answer)
  SELECT i.id, i.fence, i.run, i.attempt, statement_timestamp() - make_interval(secs => i.duration),
    statement_timestamp(), i.what, i.category, i.status, i.error, i.answer
  FROM unnest($3, $4, $7, $8, $9, $10, $11, $12, $13, $14)
    AS i(fence, what, id, run, attempt, duration, category, status, error, answer)
  WHERE i.duration IS NOT NULL;

  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), $23, 0, i.id, i.what, i.n FROM unnest($20, $21, $22) AS i(id, what, n)
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n;

  IF rank_ids IS NOT NULL THEN
    INSERT INTO ranks AS k (destination_id, source_id, scope, rank, seen_at)
    SELECT i.id, i.source_id, i.scope, max(i.rank), statement_timestamp()
    FROM unnest($25, $26, $27, $28) AS i(id, source_id, scope, rank)
    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 -- two processes raise them in the same order: no deadlock
    ON CONFLICT (destination_id, source_id, scope)
    DO UPDATE SET rank = greatest(k.rank, excluded.rank), seen_at = excluded.seen_at;
  END IF;

  IF replayed OR co IS NOT NULL THEN
    UPDATE replay_items v SET outcome = coalesce(v.outcome, z.status)
    FROM (
      SELECT h.replay_id, h.delivery_id AS id, i.what AS status
      FROM unnest($1, $4) AS i(queue_key, what) CROSS JOIN LATERAL (
        SELECT h.replay_id, h.delivery_id FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1
      ) h
      WHERE i.what IN ('done', 'dead') AND h.replay_id IS NOT NULL
      UNION ALL
      SELECT c.replay_id, c.id, c.status FROM unnest(co) c WHERE c.replay_id IS NOT NULL
    ) z
    WHERE v.replay_id = ANY(ARRAY[z.replay_id]) AND v.delivery_id = ANY(ARRAY[z.id]);
  END IF;

  IF stays IS NOT NULL THEN          -- what ran alone and lived leaves quarantine; given back untried it stays
    UPDATE heads h SET leased = false, alone = false, upto = 0, carries = NULL,
      due_at = CASE WHEN i.what = 'dead' THEN 'infinity' ELSE statement_timestamp() + make_interval(secs => i.wait) END,
      turn = CASE WHEN h.turn < 4 OR i.what = 'release' THEN h.turn
        WHEN (SELECT b.bulk FROM replays b WHERE b.id = h.replay_id) THEN 3 ELSE live_turn(h.options) END,
      attempts = i.attempt
    FROM unnest($1, $4, $6, $9, $29) AS i(queue_key, what, wait, attempt, stays)
    WHERE i.stays AND h.subject_key = ANY(ARRAY[i.queue_key]);
  END IF;
  IF singles IS NOT NULL THEN
    DELETE FROM heads h WHERE h.subject_key = ANY($16);
  END IF;
  IF followed IS NOT NULL THEN
    SELECT p.promoted, p.taken INTO promoted, taken FROM promote($18, $19, $24) p;
    made_due := ARRAY(
      SELECT i.queue_key FROM unnest(promoted) AS i(queue_key) WHERE taken IS NULL OR i.queue_key <> ALL(taken));
    onward := onward || ARRAY(
      SELECT i.queue_key FROM unnest($18) AS i(queue_key) WHERE promoted IS NULL OR i.queue_key <> ALL(promoted));
  END IF;
  IF cardinality(onward) > 0 THEN
    made_due := made_due || advance(onward);
  END IF;
  RETURN NEXT;
  IF taken IS NOT NULL THEN
    RETURN QUERY SELECT NULL::bigint[], NULL::uuid[], n.* FROM read_leased(taken, NULL) n;
  END IF;
END
$$;

-- Updates the breakers of the destinations of a group of settlements, each once; returns those that have opened, or
-- closed. The same delivery failing again is no further failure.
CREATE FUNCTION update_breakers(
  destination_ids integer[], resets boolean[], failures integer[], last_failed uuid[], enough integer[], opens float8[]
) RETURNS TABLE (changed_id integer, held_until timestamptz, streak integer) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  known integer[];
BEGIN
  known := ARRAY(
    SELECT s.destination_id FROM destination_state s WHERE s.destination_id = ANY($1) ORDER BY 1 FOR UPDATE);
  RETURN QUERY WITH o AS MATERIALIZED (
    SELECT s.destination_id, s.open_until FROM destination_state s WHERE s.destination_id = ANY(known)
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
    FROM unnest($1, $2, $3, $4, $5, $6) AS i(destination_id, reset, failures, last_failed, enough, open)
    WHERE s.destination_id = ANY(ARRAY[i.destination_id])
    RETURNING s.destination_id, s.open_until, s.failures
  )
  SELECT u.destination_id, u.open_until, u.failures FROM u JOIN o ON o.destination_id = u.destination_id
  WHERE (o.open_until IS NULL) <> (u.open_until IS NULL);
  RETURN QUERY WITH u AS (
  INSERT INTO destination_state AS s (destination_id, failures, last_failed, open_until)
  SELECT i.destination_id, i.failures, i.last_failed,
    CASE WHEN i.failures >= i.enough THEN now() + make_interval(secs => i.open) END
  FROM unnest($1, $3, $4, $5, $6) AS i(destination_id, failures, last_failed, enough, open)
  WHERE i.failures > 0 AND i.destination_id <> ALL(known)
  ON CONFLICT (destination_id) DO UPDATE SET failures = s.failures + excluded.failures,
    last_failed = excluded.last_failed, open_until = coalesce(excluded.open_until, s.open_until)
  RETURNING s.destination_id, s.open_until, s.failures
  )
  SELECT u.destination_id, u.open_until, u.failures FROM u WHERE u.open_until IS NOT NULL;
END
$$;

-- -- acts of people -------------------------------------------------------------------------------

-- Lets queues go on whose heads were closed by a person; their rows are locked.
CREATE FUNCTION continue_queues(queue_keys uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM advance(queue_keys);
END
$$;

CREATE TYPE rerun AS (
  id uuid, event_id uuid, destination_id integer, subject_key uuid, queue_key uuid, run smallint, status text,
  seq bigint, options smallint, fair bigint
);

-- Begins a new run of each of these, in the order given; returns which. `pause`: seconds since the last replay. Only
-- rows that no settlement touches are locked before their heads, in the order of their ids; a second click finds them
-- pending and gets nothing. A held head keeps its place, everything else joins the tail of its queue.
CREATE FUNCTION run_again(
  ids uuid[], turns smallint, replay uuid, force boolean, added smallint, pause float8
) RETURNS SETOF uuid LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  r rerun[];
BEGIN
  SELECT array_agg(ROW(q.id, q.event_id, q.destination_id, q.subject_key, coalesce(q.subject_key, q.id), q.run, q.status,
    q.seq, (q.options & ~16 | $5)::smallint, q.fair)::rerun ORDER BY q.ord)
  INTO r
  FROM (
    SELECT d.*, j.ord
    FROM (SELECT j.* FROM unnest($1) WITH ORDINALITY AS j(id, ord) ORDER BY j.id) j CROSS JOIN LATERAL (
      SELECT d.* FROM deliveries d WHERE d.id = j.id AND (d.status IN ('dead', 'discarded') OR $4 AND d.status = 'done')
        AND d.note IS DISTINCT FROM 'erased'
        AND (d.last_replay_at IS NULL OR d.last_replay_at <= now() - make_interval(secs => $6))
      LIMIT 1 FOR UPDATE
    ) d
  ) q;
  IF r IS NULL THEN
    RETURN;
  END IF;
  PERFORM lock_subjects(ARRAY(SELECT i.subject_key FROM unnest(r) i));
  WITH i AS MATERIALIZED (
    SELECT i.*, h.turn AS met, coalesce(h.delivery_id = i.id, false) AS keeps,
      CASE WHEN h.delivery_id = i.id THEN i.seq ELSE nextval('delivery_seq') END AS place
    FROM unnest(r) i LEFT JOIN LATERAL (
      SELECT h.turn, h.delivery_id FROM heads h WHERE h.subject_key = i.queue_key LIMIT 1
    ) h ON true
  ), h AS (
    INSERT INTO heads (subject_key, destination_id, turn, due_at, delivery_id, event_id, seq, run, options, replay_id,
      fair)
    SELECT DISTINCT ON (i.queue_key) i.queue_key, i.destination_id, $2, now(), i.id, i.event_id, i.place, i.run + 1,
      i.options, $3, i.fair
    FROM i WHERE i.met IS NULL ORDER BY i.queue_key, i.place
    RETURNING delivery_id
  ), k AS (
    UPDATE heads h SET due_at = now(), run = h.run + 1, options = i.options, replay_id = $3, attempts = 0, crashes = 0,
      deaths = 0, turn = CASE WHEN h.turn = 4 THEN 4 ELSE least(h.turn, $2) END
    FROM i WHERE i.keeps AND h.subject_key = ANY(ARRAY[i.queue_key])
  ), t AS (
    UPDATE heads h SET turn = $2
    FROM (SELECT DISTINCT i.queue_key FROM i WHERE i.met < 4 AND i.met > $2 AND NOT i.keeps
      AND i.queue_key NOT IN (SELECT queue_key FROM i WHERE keeps)) j
    WHERE h.subject_key = ANY(ARRAY[j.queue_key]) AND h.turn > $2 AND h.turn < 4
  ), u AS (
    UPDATE deliveries d SET status = 'pending', note = NULL, run = d.run + 1, attempts = 0, replay_id = $3,
      finished_by = NULL, settled_at = NULL, reason = NULL, last_replay_at = now(), options = i.options, seq = i.place,
      behind = NOT i.keeps AND i.id NOT IN (SELECT delivery_id FROM h)
    FROM i WHERE d.id = ANY(ARRAY[i.id])
  )
  INSERT INTO counters AS c (minute, slot, source_id, destination_id, what, n)
  SELECT date_trunc('minute', now()), (-1 - pg_backend_pid() % 32000)::smallint, 0, n.destination_id, n.what, n.n
  FROM (
    SELECT i.destination_id, 'pending', count(*) FROM i GROUP BY 1
    UNION ALL
    SELECT i.destination_id, 'replays', count(*) FROM i GROUP BY 1
    UNION ALL
    SELECT i.destination_id, i.status, -count(*) FROM i GROUP BY 1, i.status
  ) AS n(destination_id, what, n)
  ON CONFLICT (minute, slot, source_id, destination_id, what) DO UPDATE SET n = c.n + excluded.n;
  RETURN QUERY SELECT i.id FROM unnest(r) i;
END
$$;

-- -- next due ---------------------------------------------------------------------------------

-- Returns which of these destinations have something that may be leased now, by priority, and (without destination) in
-- how many seconds the next comes. Paused ones do not count. `since`: also those of any destination for which something
-- has become due after that moment; a row without priority has the moment to ask from next time.
CREATE FUNCTION next_due(destination_ids integer[], since timestamptz)
RETURNS TABLE (destination_id integer, turn smallint, due_in float8, looked_at timestamptz) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY
    WITH o AS MATERIALIZED (
      SELECT i.id, t.turn, greatest(h.due_at, s.open_until) AS due_at
      FROM unnest($1) AS i(id)
        LEFT JOIN LATERAL (
          SELECT s.paused_at, s.open_until FROM destination_state s WHERE s.destination_id = i.id LIMIT 1
        ) s ON true
        CROSS JOIN unnest('{0,1,2,3,4}'::smallint[]) AS t(turn)
        CROSS JOIN LATERAL (
          SELECT h.due_at FROM heads h WHERE h.destination_id = i.id AND h.turn = t.turn ORDER BY h.due_at LIMIT 1
        ) h
      WHERE s.paused_at IS NULL
    )
    SELECT o.id, o.turn, 0::float8, NULL::timestamptz FROM o WHERE o.due_at <= now()
    UNION ALL
    SELECT NULL, NULL, extract(epoch FROM min(o.due_at) - now())::float8, NULL FROM o
    WHERE o.due_at > now() AND o.due_at < 'infinity' HAVING min(o.due_at) IS NOT NULL;
  IF since IS NOT NULL THEN
    RETURN QUERY
      WITH n AS MATERIALIZED (
        SELECT h.destination_id, h.turn, h.due_at FROM heads h
        WHERE h.due_at > $2 AND h.due_at <= now() AND h.due_at < 'infinity' ORDER BY h.due_at LIMIT 5000
      )
      SELECT DISTINCT n.destination_id, n.turn, 0::float8, NULL::timestamptz FROM n
      UNION ALL
      SELECT s.destination_id, 1::smallint, 0::float8, NULL FROM (
        SELECT s.destination_id FROM destination_state s
        WHERE s.open_until > $2 AND s.open_until <= now() AND s.open_until IS NOT NULL ORDER BY s.open_until LIMIT 5000
      ) s
      UNION ALL
      SELECT NULL, NULL, NULL, CASE WHEN count(*) < 5000 THEN now() - interval '5 s' ELSE max(n.due_at) END FROM n;
  END IF;
END
$$;

-- -- settings ---------------------------------------------------------------------------------

-- For the functions that are called from outside; what they call inherits them. Our schema comes first, and pg_catalog
-- is named: so nothing of another schema is ever meant, and a test may bring a clock of its own.
DO $$
DECLARE
  f regprocedure;
BEGIN
  FOR f IN SELECT p.oid FROM pg_proc p
    WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
      AND p.proname IN ('intake', 'lease', 'renew', 'allow', 'settle', 'update_breakers', 'next_due', 'continue_queues',
        'run_again', 'intake_proven')
  LOOP
    EXECUTE format('ALTER FUNCTION %s SET search_path TO %I, pg_catalog, pg_temp', f, current_schema());
    EXECUTE format('ALTER FUNCTION %s SET plan_cache_mode TO force_generic_plan', f);
    EXECUTE format('ALTER FUNCTION %s SET jit TO off', f);
    EXECUTE format('ALTER FUNCTION %s SET enable_seqscan TO off', f);
    EXECUTE format('ALTER FUNCTION %s SET enable_bitmapscan TO off', f);
    EXECUTE format('ALTER FUNCTION %s SET enable_hashjoin TO off', f);
    EXECUTE format('ALTER FUNCTION %s SET enable_mergejoin TO off', f);
    EXECUTE format('ALTER FUNCTION %s SET enable_sort TO off', f);
  END LOOP;
END
$$;
