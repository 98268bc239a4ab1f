-- Who has come in at the dashboard, known to every server of this inbox; and who holds a lease.

CREATE TABLE sessions (
  hash     BLOB    PRIMARY KEY,       -- of what the browser holds; that itself is kept nowhere
  actor    TEXT    NOT NULL,
  role     TEXT    NOT NULL,          -- viewer | operator | admin
  proof    BLOB    NOT NULL,          -- of the password it was begun with: the session ends with it
  begun_at INTEGER NOT NULL,
  ends_at  INTEGER NOT NULL
) WITHOUT ROWID;
-- Names its cookie, so that two inboxes on one machine do not log each other out.
INSERT INTO marks (name, value) VALUES ('inbox', abs(random() % 9007199254740992));

ALTER TABLE heads ADD COLUMN worker TEXT;  -- the last one that leased it
