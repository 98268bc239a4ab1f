-- A copy of a key that is known to stand is sent without its body (see `familiar`). Should it turn out to be a conflict
-- after all, its body is worth keeping: the statement is refused, and sent again with everything.
ALTER TABLE arrivals ADD CONSTRAINT arrivals_conflict CHECK (outcome <> 'conflict' OR body IS NOT NULL) NOT VALID;
