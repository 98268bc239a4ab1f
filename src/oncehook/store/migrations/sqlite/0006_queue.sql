-- How many wait behind a head is counted nowhere any more. `seq` is the head's own: what waits comes after it.
ALTER TABLE heads DROP COLUMN waiting;
ALTER TABLE heads ADD COLUMN seq INTEGER NOT NULL DEFAULT 0;
UPDATE heads SET seq = coalesce((SELECT seq FROM deliveries WHERE id = heads.delivery_id), 0);

-- What has become due since a moment, whosoever it is for: an inbox may have many destinations.
CREATE INDEX heads_next ON heads (due_at);
CREATE INDEX destination_state_open ON destination_state (open_until) WHERE open_until IS NOT NULL;
