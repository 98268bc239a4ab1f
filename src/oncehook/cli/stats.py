"""`oncehook stats`: the numbers since a moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from oncehook.cli.api import Api, json_option, speaks
from oncehook.cli.showing import document, fields, moment, say, table, text
from oncehook.human import words

_FLOWS: Final = ("total", "duplicates", "conflicts", "rejected", "retries", "replays")


@click.command("stats")
@click.option("--since", default="24h", show_default=True, metavar="TIME", help="A duration ago, or an ISO time.")
@click.option("--by", type=click.Choice(["source", "destination"]), help="The same for each of them.")
@json_option
@speaks
def command(api: Api, since: str, by: str | None, as_json: bool) -> int:
    """Show what came, what became of it, and every watermark."""
    answer = api.get("stats", since=since, by=by)
    say([document(answer)] if as_json else _lines(answer, by))
    return 0


def _lines(stats: Mapping[str, Any], by: str | None) -> list[str]:
    deliveries = ", ".join(f"{number:,} {word}" for word, number in stats["by_status"].items() if number)
    lines = fields(
        {
            "since": moment(stats["since"]),
            **{word: f"{stats[word]:,}" for word in _FLOWS},
            "deliveries": deliveries or "none",
            "dead now": click.style(f"{stats['dead']:,}", fg="red" if stats["dead"] else None),
            "today": f"{stats['volume_today']:,}",
        }
    )
    lines += [_watermark(mark) for mark in stats["watermarks"]]
    if by and stats["by"]:
        lines += ["", *_groups(by, stats["by"])]
    if by == "destination" and any(stats["per_day"].values()):
        lines += ["", *_days(stats["per_day"])]
    return lines


def _watermark(mark: Mapping[str, Any]) -> str:
    level = "unknown" if mark["level"] is None else _level(mark["name"], mark["level"])
    word = click.style("crossed", fg="red") if mark["crossed"] else click.style("fine", fg="green")
    return f"watermark {text(mark['name'])}: {level}, limit {_level(mark['name'], mark['limit'])}, {word}"


def _level(name: str, level: float) -> str:
    if name.startswith("oldest_due"):
        return words(round(level))
    return f"{level:.1%}" if name.startswith("disk") else f"{level:,g}"


def _days(per_day: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What was delivered, by day and destination."""
    days = sorted({day for counts in per_day.values() for day in counts})
    rows = [[day, *(f"{counts.get(day, 0):,}" for counts in per_day.values())] for day in days]
    return table(("day", *map(text, per_day)), rows)


def _groups(by: str, groups: Mapping[str, Mapping[str, int]]) -> list[str]:
    names = list(dict.fromkeys(word for counts in groups.values() for word in counts))
    rows = [[text(name), *(f"{counts.get(word, 0):,}" for word in names)] for name, counts in groups.items()]
    return table((by, *(word.replace("_", " ") for word in names)), rows)
