"""Every label of the dashboard: in templates, in page functions, and in the tables that pages show by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

from jinja2 import nodes

from oncehook.model import AttemptOutcome, DeliveryStatus, Outcome, ReplayState
from oncehook.web import dashboard
from oncehook.web.dashboard import accounts, charts, define, events, replays, setup
from oncehook.web.dashboard.render import SENTENCES, _templates

PAGES = Path(dashboard.__file__).parent
STATS = ("Received", "Duplicates", "Rejected", "Delivered", "Oldest due", "Dead letters")
FIELDS = ("Name", "Send to", "ID", "Aliases")
"""Labels of fields that are no settings."""
SHOWN = (
    *(
        "held back",
        "failing",
        "ready",
        "stale",
        "coalesced",
        "erased",
        "running",
        "left",
        "skipped",
        "closed",
        "paused",
    ),
    *("p50", "p95", "p99", "in total", "watermark of dead letters", "Ack", "Received to done"),
    *(
        "from",
        "search",
        "events",
        "dead letters",
        "open",
        "replays",
        "select",
        "sources",
        "overview",
        "quiet",
        "working",
    ),
    *(
        "replay…",
        "discard…",
        "live or paused",
        "back, close",
        "this list",
        "next row, row before",
        "pending",
        "expired",
    ),
)
"""Words that macros look up: states, columns of charts, and what keys do."""


def labels() -> tuple[set[str], set[tuple[str, str]]]:
    """All texts, and all pairs of a singular and a plural."""
    texts: set[str] = {*SENTENCES.values(), *STATS, *SHOWN, *charts.STEP_WORDS.values(), *setup.KINDS}
    texts |= {page.menu[1] for page in dashboard.PAGES if page.menu}
    texts |= {words for span in charts.SPANS for words in (span.title, span.before)} | {"the time before"}
    texts |= {label for _, label in (*replays.RATES, *events.RANGES)} | set(replays.OUTCOMES)
    texts |= {text for labels in define.LABELS.values() for text in labels.values()} | {*define.ABOUT.values()}
    texts |= {text for words in define.WORDS.values() for text in astuple(words) if text and text != words.example}
    texts |= {label for _, label in (*define.OVERLAPS, *accounts.LINKS)} | {*FIELDS, accounts.MOVE}
    texts |= {str(word) for kind in (AttemptOutcome, DeliveryStatus, Outcome, ReplayState) for word in kind}
    plurals: set[tuple[str, str]] = set()
    for said in (*_in_templates(), *_in_pages()):
        if isinstance(said, tuple):
            plurals.add(said)
        else:
            texts.add(said)
    return texts, plurals


def _in_templates() -> Iterator[str | tuple[str, str]]:
    environment = _templates()
    for name in environment.list_templates():
        source = environment.loader.get_source(environment, name)[0]  # type: ignore[union-attr]
        for call in environment.parse(source).find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in ("_", "_label", "plural"):
                known = [one.value for one in call.args if isinstance(one, nodes.Const) and isinstance(one.value, str)]
                yield from _said(call.node.name, known)


def _in_pages() -> Iterator[str | tuple[str, str]]:
    for path in PAGES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in ("translate", "plural"):
                parts = [one for argument in node.args for one in ast.walk(argument)]
                known = [one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                yield from _said(node.func.id, known)


def _said(function: str, known: list[str]) -> Iterator[str | tuple[str, str]]:
    if function == "plural":
        yield known[-2], known[-1]
    else:
        yield from known
