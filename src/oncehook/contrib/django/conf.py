"""`settings.ONCEHOOK`, read and checked; `assembly` makes the inbox of it.

The store is an address, or the name of one of Django's databases: then it lives in a schema of its own in that
PostgreSQL database, and handlers can commit together with it.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote, urlencode

from django.conf import settings
from django.db import connections

from oncehook.errors import ConfigError
from oncehook.human import nearest

KEYS: Final = (
    *("STORE", "SCHEMA", "MIGRATE", "ENCRYPT", "CONFIG", "WORK"),
    *("SOURCES", "DESTINATIONS", "ROUTES", "TRUSTED_PROXIES", "DASHBOARD"),
)
DEFAULT_ALIAS: Final = "default"

_SEARCH_PATH: Final = re.compile(r"(?:-c\s*|--)search_path=(?:\\.|\S)*")


def said() -> dict[str, Any]:
    """What the project says. Raises ConfigError for a key that does not exist."""
    given = getattr(settings, "ONCEHOOK", {})
    if not isinstance(given, dict):
        raise ConfigError("settings.ONCEHOOK must be a dict.")
    for key in given:
        if key not in KEYS:
            near = nearest(str(key).upper(), KEYS)
            raise ConfigError(
                f'settings.ONCEHOOK: unknown key "{key}".',
                hint=f'Did you mean "{near}"?' if near else f"Allowed: {', '.join(KEYS)}.",
            )
    return given


def alias() -> str | None:
    """Which of Django's databases the store is in; None: it is said by an address or by the settings file."""
    given = said()
    store = given.get("STORE", None if "CONFIG" in given else DEFAULT_ALIAS)
    if store is None or ":" in store:
        return None
    if store not in settings.DATABASES:
        raise ConfigError(
            f'settings.ONCEHOOK: STORE is "{store}", and DATABASES has none of that name.',
            hint="Name one of DATABASES, or write sqlite:./oncehook.db or postgresql://host/database.",
        )
    return str(store)


def store_url() -> str | None:
    """The store's address; None: the settings file says it."""
    name = alias()
    return said().get("STORE") if name is None else database_url(name, said().get("SCHEMA", "oncehook"))


def database_url(alias: str, schema: str) -> str:
    """The address of one of Django's databases, as the test runner may have changed it by now."""
    connection = connections[alias]
    if connection.vendor != "postgresql":
        raise ConfigError(
            f'settings.ONCEHOOK: the database "{alias}" is {connection.display_name}; the inbox needs PostgreSQL.',
            hint='Or give it a file of its own: "STORE": "sqlite:./oncehook.db", for one process.',
        )
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    params = {key: str(value) for key, value in connection.get_connection_params().items() if key in known and value}
    options = _SEARCH_PATH.sub("", params.pop("options", "")).strip()  # that path is the project's, not ours
    if role := connection.settings_dict["OPTIONS"].get("assume_role"):
        options = f"{options} -c role={role}".strip()
    if options:
        params["options"] = options
    user, password = quote(params.pop("user", ""), safe=""), quote(params.pop("password", ""), safe="")
    access = f"{user}:{password}@" if password else f"{user}@" if user else ""
    name = quote(params.pop("dbname", ""), safe="")
    params.pop("client_encoding", None)
    return f"postgresql://{access}/{name}?{urlencode({**params, 'schema': schema}, quote_via=quote)}"
