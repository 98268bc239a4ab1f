"""Completion of names: of the running server where there is one, otherwise of the settings and presets.

Every function is a `shell_complete` of click. Completion never fails and never waits for long: what cannot be read is
left out.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from oncehook.errors import OncehookError
from oncehook.human import show_id

if TYPE_CHECKING:  # --help must not wait for what only completion needs
    from oncehook.cli.api import Api
    from oncehook.settings import Config

PATIENCE: Final = 1.0
"""Seconds for one answer of the server."""
MOST_IDS: Final = 30
MOST_NAMES: Final = 200


@contextlib.contextmanager
def _asking(ctx: click.Context) -> Iterator[Api | None]:
    """Connect to the running server that the options name or the settings lead to; None where there is none."""
    from oncehook.cli.api import Api, Where
    from oncehook.cli.options import voice
    from oncehook.cli.transport import HttpTransport

    voice.quiet = True
    said = {name: ctx.params.get(name) for name in ("config_file", "app", "server", "token_env")}
    with Api(Where(**said)) as api:
        try:
            transport = api.connect_live()
        except (click.ClickException, OncehookError, OSError):
            yield None
            return
        if isinstance(transport, HttpTransport):
            transport.timeout = PATIENCE
        yield api


def _read(ctx: click.Context, path: str, **parameters: object) -> list[dict[str, Any]] | None:
    """Return the items of a list of the server; None where it cannot be asked."""
    # A program that --app names may print and fail as it likes; the shell reads what we print.
    nowhere = io.StringIO()
    with contextlib.suppress(Exception), redirect_stdout(nowhere), redirect_stderr(nowhere), _asking(ctx) as api:
        return None if api is None else list(api.get(path, **parameters)["items"])
    return None


def _config(ctx: click.Context) -> Config | None:
    from oncehook.settings import load

    try:
        loaded = load(ctx.params.get("config_file"), secrets=False, whole=False)
    except (OncehookError, OSError):
        return None
    return loaded.config if loaded.origin is not None else None


def _presets() -> list[str]:
    from oncehook import presets

    return list(presets.names())


def _source_names(ctx: click.Context) -> list[str]:
    if (found := _read(ctx, "sources", limit=MOST_NAMES)) is not None:
        return [one["name"] for one in found]
    config = _config(ctx)
    return [*config.source] if config is not None and config.source else _presets()


def _destination_names(ctx: click.Context) -> list[str]:
    if (found := _read(ctx, "destinations", limit=MOST_NAMES)) is not None:
        return [one["name"] for one in found]
    config = _config(ctx)
    return [] if config is None else [*config.destination]


def _matching(names: Iterable[str], incomplete: str, prefix: str = "") -> list[CompletionItem]:
    return [CompletionItem(prefix + name) for name in names if name.startswith(incomplete)]


# -- for commands ------------------------------------------------------------------------------


def complete_source(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _matching(_source_names(ctx), incomplete)


def complete_sendable(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete sources, and presets, which can be sent to any address."""
    return _matching(dict.fromkeys([*_source_names(ctx), *_presets()]), incomplete)


def complete_sample(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the samples of the source that is named before."""
    from oncehook import presets

    name = str(ctx.params.get("source") or "")
    known = {one["name"]: one["preset"] for one in _read(ctx, "sources", limit=MOST_NAMES) or ()}
    if name not in known and (config := _config(ctx)) is not None and name in config.source:
        known[name] = config.source[name].preset
    preset = known.get(name, name)
    return _matching(presets.load(preset).samples if preset in presets.names() else (), incomplete)


def complete_preset(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _matching(_presets(), incomplete)


def complete_destination(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _matching(_destination_names(ctx), incomplete)


def complete_id(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ids of the newest events, short, with source and type beside them; or of replays."""
    kind = incomplete.partition("_")[0]
    if kind == "rpl":
        found = _read(ctx, "replays", limit=MOST_IDS) or []
        items = [(show_id(one["id"]), one["reason"] or one["query"]) for one in found]
    elif kind == "dlv":
        found = _read(ctx, "deliveries", limit=MOST_IDS) or []
        items = [(show_id(one["id"]), f"{one['destination']} {one['status']}") for one in found]
    else:
        found = _read(ctx, "events", limit=MOST_IDS) or []
        items = [(show_id(one["id"]), f"{one['source']} {one['type']}") for one in found]
    digits = incomplete.partition("_")[2].lstrip("….")
    fitting = [(one, about) for one, about in items if one.startswith(incomplete) or (digits and digits in one)]
    return [CompletionItem(one, help=about[:60]) for one, about in fitting]


def complete_query(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a word of a query, or its value.

    bash takes a colon for the end of a word: of `status:de` it hands in `status`, `:` and `de`, and wants `dead` back.
    """
    from oncehook.query import WORDS

    before = _words_before(ctx, param)
    word, colon, begun = incomplete.partition(":")
    if not word and colon and before:
        return _matching(_values(ctx, before[-1]), begun)
    if len(before) > 1 and before[-1] == ":":
        return _matching(_values(ctx, before[-2]), incomplete)
    if colon:
        return _matching(_values(ctx, word), begun, f"{word}:")
    return [
        CompletionItem(f"{name}:", help=one.about.replace("`", ""))
        for name, one in WORDS.items()
        if name.startswith(word)
    ]


def _words_before(ctx: click.Context, param: click.Parameter) -> Sequence[str]:
    value = ctx.params.get(param.name or "") or ()
    return [value] if isinstance(value, str) else list(value)


def _values(ctx: click.Context, word: str) -> Sequence[str]:
    from oncehook.query import WORDS

    match word:
        case "source":
            return _source_names(ctx)
        case "destination" | "to":
            return _destination_names(ctx)
        case _:
            return WORDS[word].values if word in WORDS else ()
