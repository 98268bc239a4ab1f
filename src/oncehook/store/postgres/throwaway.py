"""A schema for a measurement: its name is new, and everything in it is gone at the end. `oncehook bench` uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg

from oncehook import clock
from oncehook.errors import ConfigError, StoreUnavailable
from oncehook.store.postgres import opening

_DROP: Final = (
    "DO $$ BEGIN EXECUTE format('DROP SCHEMA IF EXISTS %I CASCADE', current_setting('oncehook.schema')); END $$"
)


@contextmanager
def throw_away(url: str) -> Iterator[str]:
    """The address of a store that nobody else knows, on the server of `url`. Raises StoreUnavailable, ConfigError."""
    schema = f"oncehook_bench_{clock.random_bytes(6).hex()}"
    here = opening.place(url, schema, None)
    if here.schema != schema or here.keeps_path:
        raise ConfigError(
            "The address must name neither a schema nor a search_path.", hint="One is made for the measurement."
        )
    try:
        with psycopg.connect(here.conninfo, autocommit=True) as connection:
            try:
                yield f"{url}{'&' if '?' in url else '?'}schema={schema}"
            finally:
                connection.execute("SELECT set_config('oncehook.schema', %s, false)", [schema])
                connection.execute(_DROP)
    except psycopg.Error as error:
        raise StoreUnavailable(f"PostgreSQL: {str(error).strip()}") from error
