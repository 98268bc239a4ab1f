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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        found = run(arguments.seconds, arguments.folder)
    except BenchError as error:
        print(f"{name} failed: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    print(render(found))
    return 0
