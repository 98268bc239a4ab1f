-- Who has come in at the dashboard, known to every server of this inbox; and who holds a lease.

CREATE TABLE sessions (
  hash     bytea       PRIMARY KEY,       -- of what the browser holds; that itself is kept nowhere
  actor    text        NOT NULL,
  role     text        NOT NULL,          -- viewer | operator | admin
  proof    bytea       NOT NULL,          -- of the password it was begun with: the session ends with it
  begun_at timestamptz NOT NULL,
  ends_at  timestamptz NOT NULL
);
-- Names its cookie, so that two inboxes on one machine do not log each other out.
INSERT INTO marks (name, value) VALUES ('inbox', (random() * 9007199254740991)::bigint);

ALTER TABLE heads ADD COLUMN worker text;  -- the last one that leased it
