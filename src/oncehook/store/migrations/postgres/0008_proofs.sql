-- What was signed, and the first event that came with it: a captured request that comes back under another key is told
-- from a new event by that. Only for sources whose signature does not cover the key.
CREATE TABLE proofs (
  hash       uuid        PRIMARY KEY,
  event_id   uuid        NOT NULL,
  key_hash   uuid,                   -- the key under which it came first; NULL: it had none
  expires_at timestamptz NOT NULL
);
CREATE INDEX proofs_expiry ON proofs (expires_at);

-- The event in which the same came before, under another key.
ALTER TABLE events ADD COLUMN same_as uuid;

-- `intake`, and then what its candidates ($1) have proven: who came first with a proof is noted, who comes with it under
-- another key is marked (16: Mark.same_body), and told as (NULL, event, the first one, NULL, NULL, NULL). Locks are taken
-- in the order keys, subjects, proofs.
CREATE FUNCTION intake_proven(
  ids uuid[], source_ids integer[], types text[], keys text[], subjects text[], event_ats timestamptz[],
  marks smallint[], ranks integer[], rank_scopes text[], body_hashes uuid[], hashes uuid[], arrival_ids uuid[],
  batch_ids uuid[], heads bytea[], bodies bytea[], copies integer[], keeps float8[],
  split_ids uuid[], split_source_ids integer[], split_heads bytea[], split_bodies bytea[],
  copy_hashes uuid[], copy_source_ids integer[], copy_body_hashes uuid[], copy_arrival_ids uuid[],
  copy_batch_ids uuid[], copy_heads bytea[], copy_bodies bytea[], copy_laters integer[],
  delivery_ids uuid[], delivery_event_ids uuid[], destination_ids integer[], subject_keys uuid[], options smallint[],
  firsts boolean[], seconds float8[], who text, counted_source_ids integer[], counted_destination_ids integer[],
  counted text[], counts bigint[], slot smallint, proven_ids uuid[], proofs uuid[], proof_keys uuid[], proof_keeps float8[]
) RETURNS TABLE (hash uuid, event_id uuid, body_hash uuid, fence bigint, at timestamptz, due integer[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY SELECT * FROM intake($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24,
    $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36, $37, $38, $39, $40, $41, $42);

  INSERT INTO proofs AS p (hash, event_id, key_hash, expires_at)
  SELECT DISTINCT ON (i.hash) i.hash, coalesce(
      (SELECT k.event_id FROM keys k WHERE k.hash = i.key_hash LIMIT 1), i.id
    ), i.key_hash, now() + make_interval(secs => i.keep)
  FROM unnest($43, $44, $45, $46) WITH ORDINALITY AS i(id, hash, key_hash, keep, n)
  ORDER BY i.hash, i.n
  ON CONFLICT (hash) DO UPDATE SET event_id = excluded.event_id, key_hash = excluded.key_hash,
    expires_at = excluded.expires_at
  WHERE p.expires_at <= now();

  RETURN QUERY
    UPDATE events e SET same_as = x.first, marks = e.marks | 16::smallint
    FROM (
      SELECT i.id, p.event_id AS first
      FROM unnest($43, $44, $45) AS i(id, hash, key_hash) CROSS JOIN LATERAL (
        SELECT p.event_id, p.key_hash FROM proofs p WHERE p.hash = i.hash LIMIT 1
      ) p
      WHERE p.event_id <> i.id AND (i.key_hash IS NULL OR p.key_hash IS DISTINCT FROM i.key_hash)
      OFFSET 0
    ) x
    WHERE e.id = ANY(ARRAY[x.id])
    RETURNING NULL::uuid, e.id, e.same_as, NULL::bigint, NULL::timestamptz, NULL::integer[];
END
$$;

DO $$
DECLARE
  f regprocedure;
BEGIN
  SELECT p.oid INTO f FROM pg_proc p
  WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname = 'intake_proven';
  EXECUTE format('ALTER FUNCTION %s SET search_path TO %I, pg_catalog, pg_temp', f, current_schema());
  EXECUTE format('ALTER FUNCTION %s SET plan_cache_mode TO force_generic_plan', f);
  EXECUTE format('ALTER FUNCTION %s SET jit TO off', f);
  EXECUTE format('ALTER FUNCTION %s SET enable_seqscan TO off', f);
  EXECUTE format('ALTER FUNCTION %s SET enable_bitmapscan TO off', f);
  EXECUTE format('ALTER FUNCTION %s SET enable_hashjoin TO off', f);
  EXECUTE format('ALTER FUNCTION %s SET enable_mergejoin TO off', f);
  EXECUTE format('ALTER FUNCTION %s SET enable_sort TO off', f);
END
$$;
