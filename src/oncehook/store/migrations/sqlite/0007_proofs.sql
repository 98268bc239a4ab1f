-- What was signed, and the first event that came with it: a captured request that comes back under another key is told
-- from a new event by that. Only for sources whose signature does not cover the key. A rowid table, like `keys`.
CREATE TABLE proofs (
  hash       BLOB PRIMARY KEY,
  event_id   BLOB NOT NULL,
  key_hash   BLOB,                        -- the key under which it came first; NULL: it had none
  expires_at INTEGER NOT NULL
);

-- The event in which the same came before, under another key.
ALTER TABLE events ADD COLUMN same_as BLOB;
