"""Prints how the code is laid out: its size, the walk of one event, and names that the style forbids.

The walk is traced with real events: `oncehook serve` runs in a process of its own with one handler on SQLite, gets an
event over HTTP, and every function of the package that is called between the request and the end of its delivery is
written down. Nothing but the public API is used, so that older trees can be looked at, too:

    .venv/bin/python scripts/house.py --against REVISION
"""

from __future__ import annotations

import argparse
import ast
import http.client
import io
import itertools
import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
EVENTS: Final = 15
"""Events that are traced, each after as long a time in which nothing is sent."""
MOST: Final = 0.8
"""Share of the events whose walks must hold a function; so timers that happen to run meanwhile do not count."""
WINDOW_SECONDS: Final = 0.25
"""How long an event is followed after its handler was called."""
START_SECONDS: Final = 60.0

IRREGULAR: Final = """
begun bent born borne bound bought broken brought built caught chosen dealt done drawn driven dug fed felt
forgotten fought found frozen given gone got grown heard held hidden hung kept known laid led left lent lit
lost made meant met paid proven risen said seen sent sewn shaken shown slept sold sought spent spoken spun
stolen stood struck stuck sung swept sworn taken taught thought thrown told torn understood unseen won worn
woven written
"""
NO_PARTICIPLES: Final = "bleed embed exceed feed heed need proceed red seed shed speed succeed"
FORBIDDEN: Final = "What Who Whom Whose How Whether The A An It Its When Where Which Why Every All"
PROMISE: Final = re.compile(r"\b[RS]\d{1,2}\b")
NO_PROMISES: Final = {"S3"}  # a bucket

Function = ast.FunctionDef | ast.AsyncFunctionDef
Figures = dict[str, Any]
Walk = list[tuple[str, str]]
"""File and name of each function, in the order in which they are first called."""


# -- read off the text -------------------------------------------------------------------------


def read_text(tree: Path) -> Figures:
    """Count what the text of a tree tells."""
    package = tree / "src" / "oncehook"
    files = sorted(package.rglob("*.py"))
    texts = {path: path.read_text() for path in files}
    parsed = [ast.parse(text) for text in texts.values()]
    nodes = [node for module in parsed for node in ast.walk(module)]
    functions = [node for node in nodes if isinstance(node, Function)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    openings = Counter(word for function in functions if (word := read_opening(function)) in FORBIDDEN.split())
    participles = Counter(function.name for function in functions if is_participle(function))
    remarks = [remark for text in texts.values() for remark in list_remarks(text)]
    promises = [found for remark in remarks for found in PROMISE.findall(remark) if found not in NO_PROMISES]
    twice = Counter({name: count for name, count in classes.items() if count > 1})
    contracts = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return {
        "modules": len(files),
        "modules at the top": sum(path.parent == package for path in files),
        "lines of src": sum(text.count("\n") for text in texts.values()),
        "lines of tests": sum(path.read_text().count("\n") for path in (tree / "tests").rglob("*.py")),
        "functions": len(functions),
        "class names defined more than once": len(twice),
        "classes with such a name": twice,
        "import contracts": len(contracts),
        "layers in them": sum(len(one.get("layers", ())) for one in contracts),
        "functions named by a bare participle": participles,
        "docstrings of functions that begin without a verb": openings,
        "references to promises (R1, S1)": len(promises),
        "references to DESIGN.md, STORAGE.md": sum(
            len(re.findall(r"\b(?:DESIGN|STORAGE)\.md", text)) for text in texts.values()
        ),
    }


def read_opening(function: Function) -> str:
    """Return the first word of a docstring."""
    words = (ast.get_docstring(function) or "").split(None, 1)
    return words[0].rstrip(",.:;") if words else ""


def is_participle(function: Function) -> bool:
    """Tell whether a function, not a property, is named by a participle alone."""
    if any("property" in ast.unparse(one) or ast.unparse(one).endswith("setter") for one in function.decorator_list):
        return False
    name = function.name.lstrip("_")
    regular = name.isalpha() and name.endswith("ed") and name not in NO_PARTICIPLES.split()
    return regular or name in IRREGULAR.split()


def list_remarks(text: str) -> Iterator[str]:
    """Yield the comments and strings of a module: promises are named in them."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.string


# -- the walk of one event ---------------------------------------------------------------------


def trace_walks(tree: Path) -> list[Walk]:
    """Return the functions that each of some events calls, without those that only some of them call."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "HOUSE_TOKEN": secrets.token_hex(32)}
    with tempfile.TemporaryDirectory(prefix="oncehook-house-") as folder:
        done = subprocess.run(  # noqa: S603 - this file
            [sys.executable, __file__, "--walk", folder],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        found = Path(folder) / "walks.json"
        if done.returncode or not found.exists():
            raise SystemExit(f"the walk of {tree} could not be traced:\n{done.stderr[-3000:]}")
        walks, pauses = json.loads(found.read_text())
    usual = list_usual(walks) - list_usual(pauses)
    return [[(file, name) for file, name in walk if (file, name) in usual] for walk in walks]


def list_usual(walks: list[list[list[str]]]) -> set[tuple[str, str]]:
    """Return the functions that most walks hold."""
    found = Counter((file, name) for walk in walks for file, name in walk)
    return {function for function, count in found.items() if count >= MOST * len(walks)}


class Recorder:
    """Writes down which functions of the package are called, in all threads that were started after it."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self._calls: list[CodeType] | None = None

    def install(self) -> None:
        """Begin to be told of calls."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def start(self) -> None:
        """Begin to write down."""
        self._calls = []

    def stop(self) -> Walk:
        """Return what was written down."""
        calls, self._calls = self._calls or [], None
        return [
            (code.co_filename, code.co_qualname)
            for code in dict.fromkeys(calls)
            if code.co_filename.startswith(self._package) and not code.co_name.startswith("<")
        ]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._calls is not None and event == "call":
            self._calls.append(frame.f_code)


def walk(folder: Path) -> None:
    """Serve an inbox in this process, send it events from a thread, and write their walks down."""
    import oncehook
    from oncehook import Event, Inbox

    recorder = Recorder(Path(str(oncehook.__file__)).parent)
    handled = threading.Event()
    inbox = Inbox(f"sqlite:{folder / 'house.db'}")
    inbox.source("house", verify="none", key=["$.id"], subject="$.subject", type="$.type")

    @inbox.on("house")
    async def handle(event: Event) -> None:
        handled.set()

    app = ModuleType("house_app")
    app.inbox = inbox  # type: ignore[attr-defined]
    sys.modules["house_app"] = app
    (folder / "oncehook.toml").write_text('[server]\nadmin_token = { env = "HOUSE_TOKEN" }\n')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    sender = threading.Thread(target=send_events, args=(folder, port, recorder, handled), daemon=True)
    recorder.install()
    sender.start()
    sys.argv = ["oncehook", "serve", "house_app:inbox", "--port", str(port)]
    import runpy

    runpy.run_module("oncehook", run_name="__main__")


def send_events(folder: Path, port: int, recorder: Recorder, handled: threading.Event) -> None:
    """Send one event after the other to the server of this process, and end it."""
    sys.setprofile(None)
    try:
        wait_until_ready(port)
        walks, pauses = [], []
        for number in range(EVENTS + 1):
            time.sleep(random.random())  # noqa: S311 - so that no timer runs in step with us
            recorder.start()
            time.sleep(WINDOW_SECONDS)
            pauses.append(recorder.stop())
            handled.clear()
            recorder.start()
            body = json.dumps({"id": f"event-{number}", "subject": "one", "type": "paid"})
            status, answer = ask(port, "POST", "/in/house", body)
            if status != 200 or not handled.wait(10):
                raise RuntimeError(f"event-{number} was answered {status} and not handled: {answer}")
            time.sleep(WINDOW_SECONDS)
            walks.append(recorder.stop())
        _, answer = ask(port, "GET", "/api/v1/deliveries?query=status:done")
        if len(json.loads(answer)["items"]) != EVENTS + 1:
            raise RuntimeError(f"not everything was done: {answer}")
        # Not the first one: it makes the source known to the store.
        (folder / "walks.json").write_text(json.dumps([walks[1:], pauses[1:]]))
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def wait_until_ready(port: int) -> None:
    """Return when the server is ready for arrivals."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if ask(port, "GET", "/readyz")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the server was not ready in time")


def ask(port: int, method: str, target: str, body: str | None = None) -> tuple[int, str]:
    """Return status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, target, body, {"Authorization": f"Bearer {os.environ['HOUSE_TOKEN']}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


# -- the report --------------------------------------------------------------------------------


def read_house(tree: Path) -> Figures:
    """Read everything about one tree."""
    walks = trace_walks(tree)
    walk = max(walks, key=len)
    files = {file for file, _ in walk}
    return {
        **read_text(tree),
        "walk of one event: files": len(files),
        "walk of one event: lines of these files": sum(Path(file).read_text().count("\n") for file in files),
        "walk of one event: functions": len(walk),
        # Threads do not always take turns alike.
        "walk of one event: changes of file": round(statistics.median(map(count_changes, walks))),
        "walk": [(str(Path(file).relative_to(tree / "src")), name) for file, name in walk],
    }


def count_changes(walk: Walk) -> int:
    """Count how often a function is in another file than the one before it."""
    return sum(one[0] != other[0] for one, other in itertools.pairwise(walk))


def render(houses: dict[str, Figures], *, details: bool) -> str:
    """Put the figures of all trees into one table, and with `details` the names behind them below it."""
    names = [name for name in next(iter(houses.values())) if name != "walk"]
    rows = [["", *houses], *[[name, *[show(house[name]) for house in houses.values()]] for name in names]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"| {row[0].ljust(widths[0])} | {' | '.join(map(str.rjust, row[1:], widths[1:]))} |".replace("\n", " ")
        for row in rows
    ]
    lines.insert(1, f"| --- |{' ---: |' * len(houses)}")
    for tree, house in houses.items() if details else ():
        for name in names:
            if isinstance(house[name], Counter):
                found = ", ".join(f"{one} ×{count}" if count > 1 else one for one, count in house[name].most_common())
                lines += ["", f"{tree}, {name}: {found or '–'}"]
        lines += ["", f"{tree}, walk of one event, in the order of the first call:"]
        file = None
        for path, function in house["walk"]:
            if path != file:
                lines.append(f"  {path}")
            file = path
            lines.append(f"    {function}")
    return "\n".join(lines)


def show(value: int | Counter[str]) -> str:
    """Format a figure."""
    return f"{value.total() if isinstance(value, Counter) else value:,}"


def main() -> None:
    """Read the command line, and print the table."""
    parser = argparse.ArgumentParser(prog="scripts/house.py", description=str(__doc__).split("\n")[0])
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--against", metavar="REVISION", help="also look at this revision, and print it first")
    parser.add_argument("--details", action="store_true", help="also print the names, and the walk")
    parser.add_argument("--walk", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.walk:
        walk(arguments.walk)
        return
    sys.path.insert(0, str(ROOT))
    houses = {}
    if arguments.against:
        from bench.trees import check_out

        with check_out(arguments.against) as other:
            houses[arguments.against] = read_house(other)
    tree = arguments.tree.resolve()
    houses["this tree" if tree == ROOT else tree.name] = read_house(tree)
    print(render(houses, details=arguments.details))  # noqa: T201


if __name__ == "__main__":
    main()
