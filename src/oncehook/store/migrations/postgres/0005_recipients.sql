-- Whom a destination reached, and since when: a row each time its address changes, so that a replay can say that it goes
-- elsewhere than the first time. Kept as a hash: an address may hold what is secret.
CREATE TABLE recipients (
  destination_id smallint    NOT NULL,
  since          timestamptz NOT NULL DEFAULT now(),
  address        uuid        NOT NULL,
  PRIMARY KEY (destination_id, since)
);
