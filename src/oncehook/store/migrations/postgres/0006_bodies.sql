-- Whether a body says what a query asks for (`body.amount:>1000`): each clause has a path, a sign, a value as text, and
-- that value as a number where it is one. What is no JSON says nothing. PostgreSQL tells that only by an error, so the
-- error is caught here; a function that catches may not run beside a parallel plan, hence only queries that ask for
-- bodies name it. Dear, so that the planner asks it last.
CREATE FUNCTION body_says(body bytea, clauses jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE STRICT PARALLEL UNSAFE COST 10000 AS $$
DECLARE
  said   text;
  whole  jsonb;
  found  jsonb;
  clause jsonb;
  step   text;
  kind   text;
  low    text;
  high   text;
  diff   integer;
BEGIN
  said := convert_from(body, 'UTF8');
  IF position('\u0000' IN said) > 0 THEN  -- jsonb cannot hold it, a text with it is never asked for
    said := regexp_replace(said, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g');
  END IF;
  whole := said::jsonb;
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
      RETURN false;
    ELSIF kind <> 'number' THEN
      IF clause ->> 'sign' <> '=' OR coalesce(found #>> '{}', 'null') <> clause ->> 'value' THEN
        RETURN false;
      END IF;
    ELSE
      low := found #>> '{}';
      high := clause ->> 'number';
      IF low ~ '^-?[0-9]{1,19}$' AND high ~ '^-?[0-9]{1,19}$' THEN
        diff := sign(low::numeric - high::numeric);
      ELSE
        diff := CASE WHEN low::float8 < high::float8 THEN -1 WHEN low::float8 > high::float8 THEN 1
          WHEN low::float8 = high::float8 THEN 0 END;
      END IF;
      IF (CASE clause ->> 'sign' WHEN '=' THEN diff = 0 WHEN '>' THEN diff > 0 WHEN '>=' THEN diff >= 0
        WHEN '<' THEN diff < 0 WHEN '<=' THEN diff <= 0 END) IS NOT TRUE
      THEN
        RETURN false;
      END IF;
    END IF;
  END LOOP;
  RETURN true;
EXCEPTION WHEN OTHERS THEN
  RETURN false;
END
$$;
