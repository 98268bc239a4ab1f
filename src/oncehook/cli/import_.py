"""`oncehook import`: take over what was processed elsewhere, so that the first day has no duplicates.

A table of ids comes in (CSV, JSON lines, or one per line); each becomes a key of the source, as if it had arrived
before. Batches go through the API, and a key that is known is left alone: the same file may be imported again.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import IO, Any, Final

import click

from oncehook.cli.api import Api, Misused, at, json_option, speaks
from oncehook.cli.progress import Progress
from oncehook.cli.showing import count, document, say

MOST_KEYS: Final = 1000
MOST_BYTES: Final = 48 * 1024
"""Of one batch: the API takes 64 KB."""

LONGEST: Final = 4096
FORMATS: Final = ("csv", "jsonl", "lines")

Row = tuple[int, Sequence[str]]
"""The number of a line, and the parts of its key; none where one is empty."""


@click.group("import")
def command() -> None:
    """Take over what was processed elsewhere."""


@command.command("keys")
@click.argument("file", type=click.File("rb"))
@click.option("--source", required=True, metavar="NAME", help="Whose keys they are.")
@click.option(
    "--column", "columns", multiple=True, metavar="NAME",
    help="Where the key stands (CSV, JSON lines); repeated for a composite key, in its order.",
)  # fmt: skip
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Instead of what the file's name and start say.")
@click.option("--dry-run", is_flag=True, help="Read it all, show the first keys, and change nothing.")
@json_option
@speaks
def keys(
    api: Api, file: IO[bytes], source: str, columns: tuple[str, ...], kind: str | None, dry_run: bool, as_json: bool
) -> int:
    """Make every id in FILE (- for stdin) a key that SOURCE has seen: what arrives with one is a duplicate.

    For example: oncehook import keys processed.csv --source stripe --column event_id
    """
    counts = {"read": 0, "new": 0, "known": 0, "skipped": 0}
    sample: list[str] = []
    with Progress("importing", _size(file), "bytes") as bar:
        rows = _read(_counted(file, bar), kind or _format_of(file), columns)
        for batch in _batches(rows, counts):
            sample += [" | ".join(parts) for parts in batch[: 5 - len(sample)]]
            if not dry_run:
                answer = api.post(at("sources", source, "keys"), {"keys": batch})
                counts["new"] += answer["new"]
                counts["known"] += answer["known"]
    if dry_run:
        say(["nothing was imported; the first keys:", *(f"  {one}" for one in sample)], err=True)
    say([document({"source": source, **counts})] if as_json else [_summary(counts)])
    return 0


def _summary(counts: dict[str, int]) -> str:
    said = [f"{counts[word]:,} {word}" for word in ("new", "known", "skipped") if counts[word]]
    return f"{count(counts['read'], 'key')} read" + "".join(f", {one}" for one in said)


# -- batches -----------------------------------------------------------------------------------


def _batches(rows: Iterator[Row], counts: dict[str, int]) -> Iterator[list[Sequence[str]]]:
    """Keys, as many together as one request may hold. A row without a key is counted, and left out."""
    batch: list[Sequence[str]] = []
    size = 0
    for number, parts in rows:
        if not parts:
            counts["skipped"] += 1
            continue
        if any(len(part) > LONGEST for part in parts):
            raise Misused(f"Line {number} holds a key of more than {LONGEST:,} characters.")
        counts["read"] += 1
        weight = len(json.dumps(parts)) + 2
        if batch and (len(batch) == MOST_KEYS or size + weight > MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(parts)
        size += weight
    if batch:
        yield batch


# -- reading -----------------------------------------------------------------------------------


def _size(file: IO[bytes]) -> int | None:
    """Bytes of the file, for the bar; of a pipe nobody knows."""
    return None if not file.seekable() else file.seek(0, io.SEEK_END) - file.seek(0)


def _counted(file: IO[bytes], bar: Progress) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        bar.add(len(line))
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise Misused(f"Line {number} is not UTF-8 text.") from None


def _format_of(file: IO[bytes]) -> str | None:
    name = str(getattr(file, "name", ""))
    endings = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines"}
    return next((kind for ending, kind in endings.items() if name.endswith(ending)), None)


def _read(lines: Iterator[str], kind: str | None, columns: Sequence[str]) -> Iterator[Row]:
    first = next(lines, "")
    if kind is None:
        kind = "jsonl" if first.lstrip().startswith("{") else "csv" if columns else "lines"
    if kind != "lines" and not columns:
        raise Misused(
            "Which column holds the key?", hint="Name it with --column; for a composite key, each in its order."
        )
    if kind == "lines" and columns:
        raise Misused("A file of lines has no columns.", hint="Leave --column out, or say --format csv.")
    reading: dict[str, Callable[[Iterator[str], Sequence[str]], Iterator[Row]]] = {
        "csv": _csv, "jsonl": _json_lines, "lines": _lines,
    }  # fmt: skip
    return reading[kind](chain([first] if first else [], lines), columns)


def _lines(lines: Iterator[str], columns: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        yield number, _parts([line.strip()])


def _csv(lines: Iterator[str], columns: Sequence[str]) -> Iterator[Row]:
    table = csv.reader(lines)
    try:
        head = next(table, [])
        places = [_place(head, column) for column in columns]
        for row in table:
            yield table.line_num, _parts([row[place] if place < len(row) else "" for place in places])
    except csv.Error as error:
        raise Misused(f"Line {table.line_num} is no CSV: {error}.") from None


def _place(head: Sequence[str], column: str) -> int:
    if column not in head:
        raise Misused(f'There is no column "{column}".', hint=f"There are: {', '.join(head)}.")
    return head.index(column)


def _json_lines(lines: Iterator[str], columns: Sequence[str]) -> Iterator[Row]:
    from oncehook.payload import text_of

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise Misused(f"Line {number} is no JSON.") from None
        yield number, _parts([text_of(_at(fields, column)) or "" for column in columns])


def _at(fields: Any, column: str) -> object:
    """A field, or one below it: `data.id`."""
    for name in [column] if isinstance(fields, dict) and column in fields else column.split("."):
        fields = fields.get(name) if isinstance(fields, dict) else None
    return fields


def _parts(values: Sequence[str]) -> Sequence[str]:
    return values if all(values) else ()
