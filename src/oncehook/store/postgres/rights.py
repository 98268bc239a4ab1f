"""What the role of a receiver or worker must be allowed to do, and whether it is: asked once, when a store is opened.

A right that is missing would else show hours later, as a 503 at the first arrival that needs it. Which tables,
sequences and functions are ours the migrations say; in a schema that others use too, theirs are none of our business.
"""

from __future__ import annotations

import re
from typing import Final

from oncehook.errors import StoreError
from oncehook.model import Engine
from oncehook.store.migrate import migrations
from oncehook.store.postgres.opening import Place, rows
from oncehook.store.postgres.wire import Connection, Texts

_MADE: Final = re.compile(r"CREATE (?:OR REPLACE )?(?:TABLE|SEQUENCE|FUNCTION) (?:IF NOT EXISTS )?(\w+)", re.IGNORECASE)

# Sequences: nextval needs USAGE; a restore raises the fences, and setval needs UPDATE. A column that is an identity
# needs no right on its sequence. Of `migrations` only the migrator writes.
_MISSING: Final = """
WITH here AS (SELECT oid, nspname FROM pg_namespace WHERE nspname = $1)
SELECT current_user::text, kind, name, string_agg(wanted, ', ' ORDER BY place) FROM (
  SELECT 'schema' AS kind, h.nspname::text AS name, 'USAGE' AS wanted, 1::bigint AS place
  FROM here h WHERE NOT has_schema_privilege(h.oid, 'USAGE')
  UNION ALL
  SELECT 'table', c.relname::text, w.wanted, w.place
  FROM here h JOIN pg_class c ON c.relnamespace = h.oid AND c.relkind IN ('r', 'p'),
    unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) WITH ORDINALITY AS w(wanted, place)
  WHERE (c.relname = ANY($2::text[]) OR (c.relname = 'migrations' AND w.wanted = 'SELECT'))
    AND NOT has_table_privilege(c.oid, w.wanted)
  UNION ALL
  SELECT 'sequence', c.relname::text, w.wanted, w.place
  FROM here h JOIN pg_class c ON c.relnamespace = h.oid AND c.relkind = 'S',
    unnest(ARRAY['USAGE', 'UPDATE']) WITH ORDINALITY AS w(wanted, place)
  WHERE c.relname = ANY($2::text[]) AND NOT has_sequence_privilege(c.oid, w.wanted)
  UNION ALL
  SELECT 'function', p.proname::text, 'EXECUTE', 1
  FROM here h JOIN pg_proc p ON p.pronamespace = h.oid
  WHERE p.proname = ANY($2::text[]) AND NOT has_function_privilege(p.oid, 'EXECUTE')
) AS m
GROUP BY kind, name ORDER BY array_position(ARRAY['schema', 'table', 'sequence', 'function'], kind), name
"""
_SHOWN: Final = 5


async def check_rights(connection: Connection, here: Place) -> None:
    """Raise StoreError where this role may not do what a receiver or a worker does; names the rights that it lacks.

    Where there are no tables yet, nothing is missing: whoever makes them owns them.
    """
    made = {name for step in migrations(Engine.postgres) for name in _MADE.findall(step.sql)}
    missing = await rows(connection, _MISSING, [here.schema, Texts(sorted(made))])
    if missing:
        raise _lacking(missing[0][0], here, [f"{rights} on {kind} {name}" for _, kind, name, rights in missing])


def _lacking(role: str, here: Place, missing: list[str]) -> StoreError:
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    schema = f'"{here.schema}"'
    return StoreError(
        f'The role "{role}" has not all rights that it needs: {"; ".join(missing[:_SHOWN])}{more}.',
        hint=f'As the owner of the tables, run: GRANT USAGE ON SCHEMA {schema} TO "{role}";'
        f' GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO "{role}";'
        f' GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA {schema} TO "{role}";'
        f' GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO "{role}";',
    )
