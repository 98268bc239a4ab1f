-- The audit log as a chain: each line carries a hash over the line before and itself, and no line changes any more.

ALTER TABLE audit ADD COLUMN hash bytea;  -- NULL: written before there was a chain
ALTER TABLE audit ALTER n DROP IDENTITY;
CREATE TABLE audit_chain (
  one         boolean PRIMARY KEY CHECK (one),
  n           bigint NOT NULL,            -- the last line that was written, and its hash
  hash        bytea  NOT NULL,
  pruned      bigint NOT NULL,            -- the last line that was pruned, and its hash: here the chain begins
  pruned_hash bytea  NOT NULL,
  since       bigint NOT NULL             -- the last line from before the chain
);
INSERT INTO audit_chain
SELECT true, coalesce(max(n), 0), decode(repeat('00', 32), 'hex'), 0, decode(repeat('00', 32), 'hex'), coalesce(max(n), 0)
FROM audit;

-- The one row of the chain is the lock: of two transactions that both write a line, the second waits for the first to
-- end, and its line follows. Whoever writes a line does so last, so nobody waits for a lock while holding this one.
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
-- A line from before the chain may name a subject that is erased.
CREATE TRIGGER audit_update BEFORE UPDATE ON audit FOR EACH ROW
WHEN (OLD.hash IS NOT NULL OR NEW.hash IS NOT NULL OR NEW.n <> OLD.n)
EXECUTE FUNCTION audit_refuse('no line is changed');
CREATE TRIGGER audit_truncate BEFORE TRUNCATE ON audit EXECUTE FUNCTION audit_refuse('only retention removes lines');

-- Pruning says first how far it goes, and keeps the hash of the last line that goes.
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

-- When a token was last used, by the name it has in the settings.
CREATE TABLE token_uses (name text PRIMARY KEY, used_at timestamptz NOT NULL);

-- The settings of the last start, by place (a machine and its file): a digest for each name, no value.
CREATE TABLE settings_seen (place text PRIMARY KEY, digests text NOT NULL);
