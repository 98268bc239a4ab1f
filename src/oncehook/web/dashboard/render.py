"""Rendering of pages: the templates, and the formats of times, sizes, ids and states.

`render` makes a page from a template's name and its values. Everything is escaped, and a misspelt name in a template is
an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from oncehook.human import show_ago, show_id, show_span
from oncehook.model import DeliveryStatus, Id, Mark, StoredDelivery
from oncehook.web.language import ENGLISH, LANGUAGES, Labels, plural, speaking, translate, translate_markup

HERE: Final = Path(__file__).parent.parent
CALLERS: Final = HERE.parent / "destinations"
STATIC: Final = HERE / "static"
VENDOR: Final = STATIC / "vendor"

SENTENCES: Final[Mapping[str, str]] = {
    "replay": "Replay started.",
    "retry": "The next attempt is due now.",
    "discard": "Discarded.",
    "pause": "Paused: deliveries wait, nothing is lost.",
    "resume": "Resumed.",
    "create": "Created. It counts from now on.",
    "change": "Changed. It counts from now on.",
    "disable": "Disabled: kept, and as if it were not there.",
    "enable": "Enabled.",
    "delete": "Deleted.",
    "abort": "Aborted. What is done stays done.",
    "try": "One delivery is tried now; its outcome decides.",
    "mend": "Fixed: it answers again.",
    "link": "A new one-time link is in the terminal of the server.",
    "logout": "Logged out.",
}
"""Messages after an act; the address contains only their name."""


def render(template: str, /, language: str = ENGLISH, **shown: Any) -> str:
    with speaking(language):
        return _templates().get_template(template).render(language=language, **shown)


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do", Labels],
    )
    made.filters |= {
        "number": number,
        "cut": cut,
        "span": show_span,
        "stopwatch": stopwatch,
        "size": size,
        "took": took,
        "short": short,
        "percent": percent,
        "utc": utc,
        "as_json": as_json,
        "state": state_of,
        "iso": iso,
        "evidence": evidence,
        "handler": handler_name,
        "lay_out": lay_out,
        "chart_marks": chart_marks,
    }
    made.globals |= {"_": translate, "_label": translate_markup, "plural": plural, "LANGUAGES": LANGUAGES}
    made.globals |= {"runbook": runbook, "when": when, "Mark": Mark, "SENTENCES": SENTENCES}
    return made


def has_scripts() -> bool:
    """Tell whether the build contains the scripts; pages work without them."""
    return (VENDOR / "htmx.min.js").exists()


# -- words -------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Print `4,118`; small fractions with one decimal."""
    if isinstance(value, float) and not value.is_integer() and abs(value) < 100:
        return f"{value:,.1f}"
    return f"{value:,.0f}"


def cut(text: str, longest: int = 24) -> str:
    """Shorten long text in its middle: keys and subjects differ at their ends."""
    if len(text) <= longest:
        return text
    head = max(longest // 3, 3)
    return f"{text[:head]}…{text[-(longest - head - 1) :]}"


def short(value: Id) -> str:
    """Print `rpl_…c18d07`."""
    return show_id(str(value))


def handler_name(address: str) -> str:
    """Print a function inside another one as `module:function`; any other address as it is."""
    outer, inside, function = address.rpartition(".<locals>.")
    return f"{outer.partition('.<locals>.')[0].rpartition('.')[0]}:{function}" if inside else address


def stopwatch(seconds: float) -> str:
    """Print `6:12`, `2:03:40`, `4 d 6 h`."""
    whole = max(int(seconds), 0)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def took(seconds: float) -> str:
    """Print `84 ms`, `1.2 s`, `3.5 min`."""
    return f"{max(seconds, 0) * 1000:.0f} ms" if seconds < 1 else show_span(seconds)


def size(count: int) -> str:
    """Print `689 bytes`, `2.1 MB`."""
    if count < 1000:
        return f"{count} byte{'' if count == 1 else 's'}"
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def percent(part: float, whole: float) -> str:
    """Print `5.3`; `0` where the whole is 0."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f}" if share in (0, 100) else f"{share:.1f}"


def iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def utc(at: datetime, form: str = "clock") -> str:
    """Return a moment in UTC: `clock`, `ms`, `day`, `full` or `date`."""
    forms = {"clock": "%H:%M:%S", "minute": "%H:%M", "day": "%Y-%m-%d %H:%M:%S", "date": "%Y-%m-%d"}
    if form in forms:
        return at.astimezone(UTC).strftime(forms[form])
    text = at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    return text if form == "full" else text.partition(" ")[2]


def ago(at: datetime, now: datetime) -> str:
    """Print `7 s ago`, `4 min ago`, `2 d ago`."""
    text = show_ago(at, now)
    span = text.removesuffix(" ago")
    return translate(text) if span == text else translate("{} ago").format(span)


@pass_context
def when(context: Context, at: datetime, form: str = "ago") -> Markup:
    """Return a moment as `<time>`, exact on hover; in lists `ago`, in details `clock`, `ms`, `day` or `full`."""
    text = ago(at, context["now"]) if form == "ago" else utc(at, form)
    return Markup('<time datetime="{}" data-form="{}" title="{} UTC">{}</time>').format(
        iso(at), form, utc(at, "full"), text
    )


def chart_marks(marks: Sequence[Any]) -> str:
    """Return placed marks as a script reads them: place in percent, and text."""
    return as_json([[one.x, one.mark.text] for one in marks])


def runbook(name: str) -> str:
    """Return the address of a runbook of this version's documents."""
    return f"https://github.com/oncehook/oncehook/blob/main/docs/runbooks/{name}.md"


def as_json(value: object) -> str:
    """Return a small value on one line."""
    return msgspec.json.encode(value, enc_hook=str).decode()


# -- states ------------------------------------------------------------------------------------


def state_of(delivery: StoredDelivery) -> str:
    """Return the stylesheet's word for a delivery's state."""
    if delivery.note == "stale":
        return "stale"
    if delivery.status is DeliveryStatus.pending and delivery.attempts:
        return "retry"
    return str(delivery.status)


def evidence(answer: bytes) -> str:
    """Return a destination's answer; for a traceback, without the frames that called the handler."""
    text = answer.decode("utf-8", "replace")
    if not text.startswith("Traceback "):
        return text
    kept, is_ours = [], False
    for line in text.splitlines():
        if line.startswith('  File "'):
            is_ours = line.startswith(f'  File "{CALLERS}')
        elif not line.startswith("    "):
            is_ours = False
        if not is_ours:
            kept.append(line)
    return "\n".join(kept)


def lay_out(result: bytes) -> str:
    """Indent JSON that a handler returned."""
    return msgspec.json.format(result, indent=2).decode()


def first_line(text: str | None, longest: int = 200) -> str:
    """Return the first line of an error, cut at its end."""
    line = next(iter((text or "").splitlines()), "")
    return line if len(line) <= longest else line[: longest - 1] + "…"


def names(values: Sequence[str]) -> str:
    """Join as `a, b and c`."""
    return f" {translate('and')} ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else list(values))
