-- The audit log as a chain: each line carries a hash over the line before and itself, and no line changes any more.

ALTER TABLE audit ADD COLUMN hash BLOB;   -- NULL: written before there was a chain
CREATE TABLE audit_chain (
  one         INTEGER PRIMARY KEY CHECK (one = 1),
  n           INTEGER NOT NULL,           -- the last line that was written, and its hash
  hash        BLOB    NOT NULL,
  pruned      INTEGER NOT NULL,           -- the last line that was pruned, and its hash: here the chain begins
  pruned_hash BLOB    NOT NULL,
  since       INTEGER NOT NULL            -- the last line from before the chain
);
INSERT INTO audit_chain
SELECT 1, coalesce(max(n), 0), zeroblob(32), 0, zeroblob(32), coalesce(max(n), 0) FROM audit;

-- With REPLACE a line would go without any trigger on DELETE: so only the next number is taken.
CREATE TRIGGER audit_insert BEFORE INSERT ON audit
WHEN NEW.hash IS NULL OR NEW.n IS NOT (SELECT n + 1 FROM audit_chain)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: this is not its next line'); END;
-- A line from before the chain may name a subject that is erased.
CREATE TRIGGER audit_update BEFORE UPDATE ON audit WHEN OLD.hash IS NOT NULL OR NEW.hash IS NOT NULL OR NEW.n <> OLD.n
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: no line is changed'); END;
-- Pruning says first how far it goes, and keeps the hash of the last line that goes.
CREATE TRIGGER audit_delete BEFORE DELETE ON audit WHEN OLD.n > (SELECT pruned FROM audit_chain)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: only retention removes lines'); END;
CREATE TRIGGER audit_chain_update BEFORE UPDATE ON audit_chain
WHEN NEW.n < OLD.n OR NEW.pruned < OLD.pruned OR NEW.pruned > NEW.n OR NEW.since <> OLD.since
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: its chain does not go back'); END;
CREATE TRIGGER audit_chain_delete BEFORE DELETE ON audit_chain
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only: its chain stays'); END;

-- When a token was last used, by the name it has in the settings.
CREATE TABLE token_uses (name TEXT PRIMARY KEY, used_at INTEGER NOT NULL) WITHOUT ROWID;

-- The settings of the last start, by place (a machine and its file): a digest for each name, no value.
CREATE TABLE settings_seen (place TEXT PRIMARY KEY, digests TEXT NOT NULL) WITHOUT ROWID;
