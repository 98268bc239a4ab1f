# ruff: noqa: E501 - rows of tables are as long as they are
"""Writes those pages of the reference that are read off the code: Python API, errors, metrics.

`scripts/docs` runs it before it builds; a test (`tests/docs/test_reference.py`) fails while a page differs from what is
made here. What only a person can say (advice, meaning of label values) stands in the tables below, and must be complete.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src"
sys.path.insert(0, str(SOURCE))

# -- Python API --------------------------------------------------------------------------------

MODULES: Final = {
    "oncehook": "What most programs need.",
    "oncehook.claims": "Being first with a key, outside the inbox: see [claims](../explanation/claims.md).",
    "oncehook.contrib.asgi": "FastAPI, Starlette and Litestar: see [FastAPI](../how-to/fastapi.md).",
    "oncehook.contrib.celery": "See [Celery](../how-to/celery.md).",
    "oncehook.contrib.django": "See [Django](../how-to/django.md).",
    "oncehook.contrib.django.urls": "What `urls.py` takes: see [Django](../how-to/django.md).",
    "oncehook.contrib.flask": "See [Flask](../how-to/flask.md).",
    "oncehook.contrib.sqlalchemy": "See [SQLAlchemy](../how-to/sqlalchemy.md).",
    "oncehook.contrib.wsgi": "Any other framework under WSGI: see [Flask](../how-to/flask.md).",
    "oncehook.testing": "See [test what you build](../how-to/testing.md).",
    "oncehook.testing.standins": "Servers that answer as providers do: see [test what you build](../how-to/testing.md).",
    "oncehook.verify": "Schemes for `verify=`: see [a source of your own](../how-to/custom-source.md).",
    "oncehook.whatsapp": "See [WhatsApp senders](../how-to/whatsapp-senders.md).",
}
"""Modules whose public names are promised."""

HANDED_OUT: Final = {"Event", "Receipt"}
"""Made by the inbox, never by a program."""

OUR_OWN: Final = re.compile(r" \((?:[RS]\d+(?:[-, ]+[RS]?\d+)*|DESIGN\.md [\d.]+)\)")
"""Pointers of the source text that mean nothing to a reader of these pages."""

FOR_ITS_PARTS: Final = {
    "Inbox": {
        *("draining", "left_behind", "move_store", "nudge", "plan_deliveries", "store"),
        *("receivers", "receiving", "takes_settings", "worker", "write_counts"),
    }
}
"""Members that other parts of oncehook ask for, and programs do not."""

MADE_LATER: Final = {
    "oncehook.contrib.django.inbox": "The project's `Inbox`, made from `settings.ONCEHOOK` when it is first asked for.",
    "oncehook.contrib.django.bridge": "Runs the inbox on a loop of its own for synchronous code: `bridge.call(…)`, `bridge.stop()`.",
}
"""Names that no text defines."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def file_of(module: str) -> Path:
    """Where a module is written."""
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def parsed(module: str) -> ast.Module:
    """A module's own text."""
    return ast.parse(file_of(module).read_text(), str(file_of(module)))


def public_names(module: str) -> list[str]:
    """What a module promises: its `__all__`, or else what it defines without an underscore."""
    tree = parsed(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    defined = [node.name for node in tree.body if isinstance(node, Definition)]
    return [name for name in defined if not name.startswith("_")]


def definition(module: str, name: str) -> ast.stmt | None:
    """Where a public name is defined, followed through imports inside the package."""
    tree = parsed(module)
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return node
        target = _assigned(node)
        if target == name:
            return node
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oncehook"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(str(node.module), alias.name)
    return None


def _assigned(node: ast.stmt) -> str | None:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return ast.unparse(node.targets[0])
    return None


def python_page() -> str:
    """Every public name with its signature and what it says about itself."""
    parts = [
        "# Python API",
        "What is named here is promised; anything else may change without notice. Durations are seconds or words\n"
        '(`"5m"`). This page is written by `scripts/docs --write`.',
    ]
    for module, about in MODULES.items():
        parts += [f"## `{module}`", about]
        for name in public_names(module):
            parts += list(_described(module, name))
    return "\n\n".join(parts) + "\n"


def _described(module: str, name: str) -> Iterator[str]:
    node = definition(module, name)
    yield f"### `{module}.{name}`"
    if isinstance(node, ast.ClassDef):
        yield from _class(node)
    elif isinstance(node, Definition):
        yield _code(_signature(node))
        yield _prose(node)
    elif node is not None:
        yield _code(ast.unparse(node))
    else:
        yield MADE_LATER[f"{module}.{name}"]


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(map(ast.unparse, node.bases))
    made = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    if node.name not in HANDED_OUT:
        made += [_signature(item) for item in node.body if isinstance(item, Definition) and item.name == "__init__"]
    yield _code("\n".join(made))
    yield _prose(node)
    hidden = FOR_ITS_PARTS.get(node.name, set())
    rows = [
        row
        for row in (*_fields(node), *_members(node))
        if re.split(r"\W", row[0].removeprefix("async def "))[0] not in hidden
    ]
    if rows:
        yield "\n".join(f"- `{shown}`{said and ': '}{said}" for shown, said in rows)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield attributes, each with the text below it; of those that `__init__` takes over, the ones that have a text."""
    for item, text in _with_text(node.body):
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            yield f"{ast.unparse(item.target)}: {ast.unparse(item.annotation)}", text
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            given = {one.arg: one.annotation for one in item.args.kwonlyargs if one.annotation is not None}
            for line, about in _with_text(item.body):
                name = (_assigned(line) or "").removeprefix("self.")
                if name in given and about:
                    yield f"{name}: {ast.unparse(given[name])}", about


def _with_text(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    for item, below in zip(body, [*body[1:], None], strict=True):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        yield item, _flat(str(below.value.value)) if is_text else ""


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item in node.body:
        if isinstance(item, Definition) and not item.name.startswith("_"):
            decorators = {ast.unparse(one).split(".")[-1] for one in item.decorator_list}
            is_property = bool(decorators & {"property", "cached_property"})
            shown = item.name if is_property else _signature(item).removeprefix("def ")
            yield shown, _flat(_prose(item, blocks=False))


def _signature(node: Definition) -> str:
    assert not isinstance(node, ast.ClassDef)
    plain = ast.unparse(node.args)
    arguments = ", ".join(one for one in _split(plain) if one not in ("self", "cls"))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    return f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def {node.name}({arguments}){returns}"


def _split(arguments: str) -> list[str]:
    """Arguments apart, at commas that are not inside brackets or quotes."""
    found, depth, quote = [""], 0, ""
    for letter in arguments:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        if letter == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found if one.strip()]


def _prose(node: Definition, *, blocks: bool = True) -> str:
    """A docstring as Markdown: its examples become blocks, or are left out."""
    lines = OUR_OWN.sub("", ast.get_docstring(node) or "").splitlines()
    text = [line for line in lines if not line.startswith((">>>", "..."))]
    prose = "\n".join(text).strip()
    example = [line[4:] for line in lines if line.startswith((">>>", "..."))]
    return f"{prose}\n\n{_code(chr(10).join(example))}" if example and blocks else prose


def _code(text: str) -> str:
    # Not `python`: that would claim to be a program.
    return f"```text\n{text}\n```"


def _flat(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- errors ------------------------------------------------------------------------------------

ACTORS: Final = {
    "Rejected": "The sender",
    "Refused": "Whoever asks: API, command line, dashboard",
    "Steering": "A handler, on purpose",
    "ClaimError": "The caller of `claims` and `once`",
    "StoreError": "The operator: the store",
    "ConfigError": "The operator: a setting",
    "SendFailed": "Whoever sends WhatsApp messages",
    "FileRefused": "Whoever sends WhatsApp messages",
    "StorageFailed": "Whoever sends WhatsApp messages",
    "InvalidMessage": "Whoever sends WhatsApp messages",
    "Unanswered": "The operator: calls to others",
    "LeaseLost": "A worker",
    "OncehookError": "Anybody",
}
"""Who can act, by the base class."""

ADVICE: Final = {
    "BodyTooLarge": "Ask for less in one request.",
    "KeyMissing": "Give the call a key.",
    "SignInUnknown": "Press *Sign in with …* again, in the browser that is to stay signed in, and come back within ten minutes.",
    "NoSuchPage": "Check the address for a typing mistake, or begin at the overview.",
    "LinkUsed": "Log in with the token, or press *Print a one-time link* on the login page.",
    "address_forbidden": "The address is private. If it is meant, list its network in the destination's `allow_private`.",
    "already_done": "Nothing: take the result it carries.",
    "bad_request": "Read the sentence; it names the field or parameter.",
    "certificate_untrusted": "Mend the certificate, or name its authority (`ca`). It cannot be turned off.",
    "claim_error": "A family; see the tree below.",
    "claim_lost": "Undo or leave it: somebody else may be at it by now.",
    "config_invalid": "`oncehook config check` names the line.",
    "extra_missing": "Install the extra that it names: `pip install 'oncehook[…]'`.",
    "encoded": "Have the sender turn compression off.",
    "error": "The root of all; see the tree below.",
    "file_refused": "A family; see the tree below.",
    "file_too_large": "Send a smaller one; each API has its own limit.",
    "file_unreadable": "Check the path or the link.",
    "file_unsupported": "Send it as a document, or convert it.",
    "file_unsafe": "Give the file to the user that oncehook runs as, or move it away; name a file, not a link.",
    "forbidden": "Use a token with a higher role, or one that sees all sources of what you act on.",
    "give_up": "Raised by your handler: the delivery is dead at once. Mend the cause, then replay.",
    "in_progress": "Answer so that the caller tries again (503, `Retry-After`).",
    "key_conflict": 'Look at the conflict: one id was used for two things. Only where `on_conflict = "reject"`.',
    "key_missing": "Send the id that this source looks for, or let it have another `on_missing_key`.",
    "lease_lost": "Nothing: it was taken over, and nothing was written. Often? Raise `lease`, or unblock the machine.",
    "malformed": "Have the sender send a well-formed request.",
    "message_invalid": "Correct the message; trying again does not help.",
    "method_not_allowed": "Use the method that the page of the API names.",
    "migration_needed": "`oncehook db migrate`, or `migrate = true`.",
    "no_role": "Name a group of theirs in `roles` of `[server.oidc]`: see [let people sign in](../how-to/run/sign-in.md).",
    "no_message": "Let the handler take only types that hold a message: `message.*`, `messages.upsert`, `Message`.",
    "not_found": "Check the id; it may have been pruned.",
    "erased": "Its subject was erased, and nothing brings it back: see [erase a subject](../how-to/erase.md).",
    "archive_invalid": "Name a day that is archived, or a file that oncehook wrote.",
    "body_missing": "Check `bodies`, or bring the object back: see [large bodies](../how-to/run/large-bodies.md).",
    "media_failed": "Transient ones are tried again; otherwise read its error: see "
    "[files that come in](../how-to/whatsapp-media.md).",
    "objects_unavailable": "The sender tries again. Look at the place that `bodies` or `archive` names.",
    "undecryptable": "Give the key that it names: see [encryption](../how-to/run/encryption.md).",
    "not_live": "Ask again every few seconds; a stream needs `oncehook serve` or an ASGI server.",
    "not_replayable": "Pending and leased need no replay; for what is done say `force`.",
    "not_started": "Give the inbox's lifespan to your application, or start it with `async with inbox.running():`.",
    "not_waiting": "Look at its state: only pending can be retried, only dead discarded.",
    "overloaded": "The sender tries again. If it lasts: a faster disk, PostgreSQL, or another receiver.",
    "payload_mismatch": "Two different things use one key: make keys distinct.",
    "payloads_hidden": "Use a token without `payloads = false`.",
    "defined_elsewhere": "Change it in the file or in the program that defines it.",
    "definition_changed": "Read it again, and make the change anew.",
    "exists": "Take another name or path, or change the one that is there.",
    "in_use": "Wait until its deliveries are done, or discard them with it (`discard=true`).",
    "invalid_settings": "`errors` names each setting with its remedy; the words are those of [the settings](settings.md).",
    "secret_key_missing": "Set `ONCEHOOK_SECRET_KEY`: see [secrets at rest](../how-to/definitions.md#secrets-at-rest).",
    "plan_changed": "Plan again, and confirm the new number.",
    "query_invalid": "The hint names the nearest word.",
    "query_too_wide": "Narrow the query by status, subject or time: see [encryption](../how-to/run/encryption.md).",
    "refused": "A family; see the tree below.",
    "provider_unavailable": "Try again; the log names what the OpenID provider did. Sessions go on.",
    "rejected": "A family; see the tree below.",
    "too_many_hops": "Look for a destination whose `url` is an address of this inbox: `oncehook config check` names it.",
    "tested_too_soon": "Wait as long as `Retry-After` says.",
    "replay_too_soon": "Wait for the seconds in `Retry-After`.",
    "result_invalid": "Return what JSON can hold.",
    "retry_later": "Raised by your handler: tried again by the policy, or after `after`.",
    "schema_too_new": "Upgrade this machine, or point it at another store.",
    "send_failed": "Its `reason` tells whether trying again helps.",
    "signature_invalid": "Compare secrets and clocks. `oncehook rejected` and the log have the reason, the answer never does.",
    "sign_in_failed": "Start again. The log names what was wrong with the provider's answer.",
    "steering": "A family; see the tree below.",
    "storage_failed": "Check the bucket's address, credentials and rights.",
    "store_error": "Read the sentence and the hint; the store refuses to start, or one write was refused.",
    "store_held": "Stop the process that owns the file, or give both the same version and the same `encrypt.key`.",
    "store_unavailable": "The sender tries again. Look at disk and database; `oncehook doctor`.",
    "token_expired": "Make a new token: `oncehook token NAME --expires 90d`.",
    "too_large": "Raise `max_body` of the source, if that is meant.",
    "too_many_tries": "Wait; then the right token or password.",
    "too_many_watchers": "Close other streams.",
    "unanswered": "Look at the network and at the other side.",
    "unauthorized": "Send the right token, or the right password.",
}
"""What to do next, by class where a code has several, else by code."""


def error_classes() -> list[type[Exception]]:
    """Every class of errors in the package that has a code."""
    from oncehook import errors

    found: set[type[Exception]] = set()
    # By their files: importing every package would ask for every optional driver.
    for path in sorted((SOURCE / "oncehook").rglob("*.py")):
        if '    code = "' in path.read_text():
            module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
            members = vars(importlib.import_module(module)).values()
            found |= {one for one in members if isinstance(one, type) and issubclass(one, errors.OncehookError)}
    return sorted(found, key=lambda one: (code_of(one), one.__module__, one.__name__))


def code_of(error: type[Exception]) -> str:
    """The word for programs."""
    return str(getattr(error, "code", ""))


def actor_of(error: type[Exception]) -> str:
    """Who can act on it, by its nearest base that says so."""
    return next(ACTORS[base.__name__] for base in error.__mro__ if base.__name__ in ACTORS)


def errors_page() -> str:
    """Every code, by who can act."""
    parts = [_ERRORS]
    for actor in dict.fromkeys(ACTORS.values()):
        rows = [_error_row(error) for error in error_classes() if actor_of(error) == actor]
        parts.append(
            "\n".join([f"## {actor}\n", "| code | error | means | what to do |", "| --- | --- | --- | --- |", *rows])
        )
    return "\n\n".join([*parts, _TREE.format(tree=error_tree())])


_ERRORS: Final = """# Errors by code

Every error has a stable `code` (a word for programs) and a `hint` (what to do next). The API answers
`{"error": …, "code": …, "hint": …}`, the command line prints both, the dashboard shows both; in Python the code is
`error.code`. What the receiving side answers carries no hint: a sender learns no more than it must. A number is the HTTP
status. This page is written by `scripts/docs --write`.

The store's own trouble is 503 with `Retry-After` for a sender, whatever its code here. `internal` (500) is a fault of
ours: the log has the traceback."""

_TREE: Final = """## The tree

`except OncehookError` catches them all.

```text
{tree}
```
"""


def error_tree() -> str:
    """The tree as `errors` draws it."""
    from oncehook import errors

    lines = inspect.cleandoc(errors.__doc__ or "").splitlines()
    drawn = [line.removeprefix("    ") for line in lines if "──" in line or "OncehookError" in line]
    return "\n".join(drawn)


def _error_row(error: type[Exception]) -> str:
    means = inspect.cleandoc(error.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    status = f" {status}" if (status := getattr(error, "status", None)) else ""
    advice = ADVICE.get(error.__name__) or ADVICE[code_of(error)]
    return f"| `{code_of(error)}` | `{error.__name__}`{status} | {_cell(means)} | {_cell(advice)} |"


# -- metrics -----------------------------------------------------------------------------------

LABELS: Final = {
    "source": "Name of a source; `unknown` where a stranger named one that is not there.",
    "destination": "Name of a destination.",
    "outcome": "Of arrivals: `accepted`, `duplicate`, `conflict`, `rejected`, `ignored` (a type in `ignore`), `handshake`,"
    " `error` (answered 503). Of attempts and replays: `done`, `retry`, `dead`.",
    "status": "`pending`, `leased`, `done`, `dead`, `discarded`; what is leased counts as pending, too.",
    "operation": "`commit` is the whole group commit; `record` an arrival that could not be stored.",
    "watermark": "Name of a watermark: `dead`, `oldest_due`, `disk`, `daily_volume.SOURCE`.",
    "version": "Of this program.",
    "store": "`sqlite` or `postgresql`.",
}
"""What a label's values mean."""


def metric_families() -> list[Any]:
    """What an inbox shows at `/metrics`, without values."""
    from oncehook.observe import Observer

    return list(Observer("sqlite").registry.collect())


def exposed_name(family: Any) -> str:
    """The name as it is scraped."""
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def metrics_page() -> str:
    """Every metric with its labels."""
    families = metric_families()
    rows = [
        f"| `{exposed_name(one)}` | {one.type} | {', '.join(f'`{label}`' for label in one._labelnames) or '–'} |"
        f" {one.documentation.rstrip('.')}. |"
        for one in families
    ]
    used = [label for label in LABELS if any(label in one._labelnames for one in families)]
    return _METRICS.format(rows="\n".join(rows), labels="\n".join(f"| `{label}` | {LABELS[label]} |" for label in used))


_METRICS: Final = """# Metrics

`GET /metrics` answers in Prometheus's text format. Counters and histograms are of one process since its start; gauges about
deliveries, dead letters and workers come from the store, so every process tells the same: take `max`, not `sum`, over
processes. Keys, subjects, ids and types are never labels. This page is written by `scripts/docs --write`.

The text is made once a second at most, however many ask. It names your sources and tells how busy they are, so it is not for
everybody: `oncehook serve` answers direct requests of this machine (by `localhost` or its address, without a proxy between) and
whoever sends `Authorization: Bearer …` with a viewer's token; others get 401. With `server.admin_bind` it is answered there
only, without a token; so are the metrics of `oncehook worker --listen HOST:PORT`. Both are addresses for operators: keep them inside.

```yaml
scrape_configs:
  - job_name: oncehook
    authorization: {{ credentials_file: /run/secrets/metrics_token }}
    static_configs: [{{ targets: ["inbox.example:4020"] }}]
```

| metric | kind | labels | what |
| --- | --- | --- | --- |
{rows}

A histogram has `_bucket` (with `le`), `_count` and `_sum`.

| label | values |
| --- | --- |
{labels}

## Questions and their answers

| question | expression |
| --- | --- |
| How many events are new, per second? | `sum(rate(oncehook_arrivals_total{{outcome="accepted"}}[5m])) by (source)` |
| How long does a sender wait, at the 99th percentile? | `histogram_quantile(0.99, sum(rate(oncehook_ack_duration_seconds_bucket[5m])) by (le, source))` |
| Are arrivals answered with 503? | `sum(rate(oncehook_arrivals_total{{outcome="error"}}[5m])) by (source) > 0` |
| Does a secret not fit? | `sum(rate(oncehook_arrivals_total{{outcome="rejected"}}[5m])) by (source)` |
| Is a destination behind? | `max(oncehook_oldest_due_seconds) by (destination)` |
| Are there dead letters? | `max(oncehook_dead_letters) by (destination)` |
| Do leases get lost? | `sum(rate(oncehook_leases_lost_total[15m])) by (destination)` |
"""

# -- words of a query --------------------------------------------------------------------------


def query_page(page: Path) -> str:
    """The page as it is, with the table of words anew."""
    from oncehook.query import JOINING, WORDS

    rows = [f"| `{name}:{word.example}` | {word.about} |" for name, word in WORDS.items()]
    rows += [f"| `{example}` | {about} |" for example, about in JOINING.items()]
    table = "\n".join(["| word | finds |", "| --- | --- |", *rows])
    before, _, rest = page.read_text().partition("<!-- words -->")
    return f"{before}<!-- words -->\n{table}\n<!-- end of words -->{rest.partition('<!-- end of words -->')[2]}"


# -- all of it ---------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """What each page should say."""
    folder = ROOT / "docs" / "reference"
    return {
        folder / "python.md": python_page(),
        folder / "errors.md": errors_page(),
        folder / "metrics.md": metrics_page(),
        folder / "query.md": query_page(folder / "query.md"),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")  # noqa: T201
