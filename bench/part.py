"""A part of the benchmark as a command: measure, write the figures down, print the report. Exit 1 when it failed."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.engines import BenchError

Found = dict[str, Any]


def run_part(
    words: Sequence[str] | None,
    *,
    name: str,
    about: str,
    seconds: float,
    length: str,
    run: Callable[[float, Path | None], Found],
    render: Callable[[Found], str],
) -> int:
    """`seconds` is the length of what `length` names, unless the command line says otherwise."""
    parser = argparse.ArgumentParser(prog=f"scripts/bench {name}", description=about.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=seconds, help=f"{length} (default: {seconds:g})")
    parser.add_argument("--folder", type=Path, help="where stores are put (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    arguments = parser.parse_args(words)
    return print_report(name, lambda: run(arguments.seconds, arguments.folder), render, arguments.json)


def print_report(name: str, run: Callable[[], Found], render: Callable[[Found], str], record: Path | None) -> int:
    """Measure, write the figures to `record`, print the report and what failed; return the exit status."""
    # So that a stop from outside also runs every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        found = run()
    except BenchError as error:
        print(f"{name} failed: {error}", file=sys.stderr)
        return 1
    if record:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(found, indent=2) + "\n")
        print(f"record: {record}", file=sys.stderr)
    print(render(found))
    failures = found.get("failures", {})
    for what, reason in failures.items():
        print(f"{what} failed: {reason}", file=sys.stderr)
    return 1 if failures else 0
