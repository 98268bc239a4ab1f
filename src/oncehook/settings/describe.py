"""Every setting as a page for people and as JSON Schema for editors, both made from the tables themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from oncehook.destinations import registry
from oncehook.settings import tables
from oncehook.settings.read import Field, fields_of, further_table
from oncehook.settings.values import NAME, Form

_TABLES: tuple[tuple[str, type], ...] = (
    ("At the top", tables.Config),
    ("`[server]`", tables.ServerConfig),
    ("`[[server.tokens]]`", tables.TokenConfig),
    ("`[server.oidc]`", tables.OidcConfig),
    ("`[server.portal]`", tables.PortalConfig),
    ("`[source.NAME]`", tables.SourceSettings),
    ("`media = { … }`", tables.MediaSettings),
    ("`[destination.NAME]`", tables.DestinationSettings),
    ("`retry = { … }`", tables.RetrySettings),
    ("`breaker = { … }`", tables.BreakerSettings),
    ("`[[route]]`", tables.RouteTable),
    ("`retention = { … }`", tables.RetentionConfig),
    ("`encrypt = { … }`", tables.EncryptConfig),
    ("`bodies = { … }`", tables.BodiesConfig),
    ("`archive = { … }`", tables.ObjectsConfig),
    ("`[watermark]`", tables.WatermarkConfig),
)

_HEAD = """# Settings

In `oncehook.toml`, or under `[tool.oncehook]` in `pyproject.toml`; one file counts, they are never merged. A flag
comes before the environment (`ONCEHOOK_STORE`, `ONCEHOOK_SERVER__PORT`), the environment before the file. Durations
and sizes are words (`"15s"`, `"1h30m"`, `"1MiB"`); a secret is a reference: `{ env = "NAME" }`, `{ file = "path" }` or
`{ credential = "name" }`. `oncehook config check` finds what is wrong, `oncehook config show` tells where each setting
comes from, `oncehook config schema` prints a JSON Schema for editors. An unset setting of a source comes from its
preset; the default below counts where the preset says nothing.

Where an app is named (`serve app:inbox`, `worker app:inbox`, `config check app:inbox`, `doctor app:inbox`, `--app`),
file and app are one inbox: sources, destinations and routes of both, and a route of one may lead to a destination of
the other. A source or destination that both define is an error that names both places; so is a store, watermark or
retention to which they give different values. `Inbox("…")` always names a store: leave it out of the file, or write the
same there (an `ONCEHOOK_STORE` that differs is not used, with a warning). The store migrates itself unless one of the
two says `migrate = false`. An app that was made with `Inbox.from_toml()` has its file already, and no other counts
beside it. Where something else runs the app (uvicorn, gunicorn, Django), no file is looked for: there
`Inbox.from_toml()`, or Django's `CONFIG`, makes the file count for receivers and workers alike.

What was changed counts from the next start on, or from SIGHUP: then the file is checked, and if it is good `serve` and
`worker` stop as for SIGTERM and begin anew under the same process number. Meanwhile senders are refused, and try again.
If it is not good, the log says why and everything goes on as it was. On a terminal, SIGHUP (closing it) stops them.

This page is written by `oncehook config reference`.
"""


def reference() -> str:
    return _HEAD + "".join(_table(title, kind) for title, kind in _all_tables())


def _all_tables() -> Iterator[tuple[str, type]]:
    """Yield every table with its title; our own kinds of destinations follow the table of destinations."""
    for title, kind in _TABLES:
        yield title, kind
        if kind is tables.DestinationSettings:
            for name, table in _kind_tables(registry.OURS).items():
                yield f"`[destination.NAME.{name}]`", table
                for key, field in fields_of(table).items():
                    if field.table is not None:
                        yield f"`{key} = {{ … }}`", field.table


def _kind_tables(names: Iterable[str]) -> dict[str, type]:
    return {name: kind.settings for name in names if (kind := registry.find(name)) is not None}


def _table(title: str, kind: type) -> str:
    rows = "\n".join(_rows(kind))
    return f"\n## {title}\n\n{kind.__doc__}\n\n| setting | meaning | default |\n| --- | --- | --- |\n{rows}\n"


def _rows(kind: type) -> Iterator[str]:
    defaults = _shared_defaults(kind)
    for name, field in fields_of(kind).items():
        if field.form is not None:
            about = f"{field.about}{_words(field.form)}"
            yield f"| `{name}` | {about} | {_default(field, defaults.get(name, field.default))} |"


def _shared_defaults(kind: type) -> Mapping[str, Any]:
    """Return the defaults that a table leaves to the code that uses it, by setting."""
    from oncehook.sources import PLAIN  # which itself imports settings

    return vars(PLAIN.settings) if kind is tables.SourceSettings else {}


def _words(form: Form) -> str:
    """Return a sentence with the words of a setting that takes nothing else."""
    words = [_code(word) for word in form.schema.get("enum", ())]
    return f" One of {', '.join(words)}." if len(words) > 1 else ""


def _default(field: Field, default: Any) -> str:
    if field.required:
        return "must be said"
    if default is None or default in ((), {}, []):
        return ""
    return _code(field.form.show(default) if field.form else default)


def _code(value: object) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


# -- for editors -------------------------------------------------------------------------------

_WITH_SHORT_FORM = (
    tables.RetrySettings, tables.RetentionConfig, tables.BodiesConfig, tables.ObjectsConfig, tables.MediaSettings,
)  # fmt: skip
"""Tables instead of which a word may stand, to which only that form refers."""


def schema() -> dict[str, Any]:
    defs = {kind.__name__: _table_schema(kind) for kind in _tables(tables.Config)}
    top = defs.pop(tables.Config.__name__)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **top,
        "title": "oncehook.toml",
        "$defs": defs | {kind.__name__: _table_schema(kind) for kind in _WITH_SHORT_FORM},
    }


def _tables(kind: type) -> list[type]:
    below = [field.table for field in _fields(kind).values() if not field.form and field.table]
    return [kind, *(table for inner in below for table in _tables(inner))]


def _fields(kind: type) -> Mapping[str, Field]:
    """Return the settings of a table; for a destination, also the tables of every installed kind."""
    if kind is not tables.DestinationSettings:
        return fields_of(kind)
    kinds = _kind_tables(registry.names())
    return {**fields_of(kind), **{name: further_table(name, table) for name, table in kinds.items()}}


def _table_schema(kind: type) -> dict[str, Any]:
    fields = _fields(kind)
    return {
        "title": kind.__name__,
        "description": (kind.__doc__ or "").strip(),
        "type": "object",
        "properties": {key: _field_schema(field) for key, field in fields.items()},
        "required": [key for key, field in fields.items() if field.required],
        "additionalProperties": False,
    }


def _field_schema(field: Field) -> dict[str, Any]:
    if field.form is None:
        return _nested_schema(field)
    described = dict(field.form.schema)
    if field.about:
        described["description"] = field.about
    default = field.default if field.default is None or _is_plain(field.default) else field.form.show(field.default)
    if _is_plain(default):
        described["default"] = default
    return described


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _nested_schema(field: Field) -> dict[str, Any]:
    reference = {"$ref": f"#/$defs/{field.table.__name__ if field.table else ''}"}
    if field.shape is dict:
        names = {"pattern": f"^{NAME.pattern}$"}
        return {"type": "object", "propertyNames": names, "additionalProperties": reference}
    return {"type": "array", "items": reference} if field.shape is list else reference
