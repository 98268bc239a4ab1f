"""Somebody who follows a page with an open shell: types every command, and lets servers run until the page ends.

`Reader` keeps the folder, the environment and what runs in the background; `steps` takes a console block apart. Every
command gets a terminal of its own, because that is what a reader has, and a question is answered with yes. What a page
needs beforehand is in `tests/docs/scenes.py`, what is compared in `tests/docs/test_commands.py`.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.blocks import Block

SECRET = "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

GOES_ON = {
    r"oncehook serve": r"receive +http",
    r"oncehook worker": r"worker ready for",
    r"python manage\.py oncehook worker": r"worker ready for",
    r"oncehook forward": r"forwarding",
    r"uvicorn": r"Uvicorn running on",
    r"gunicorn": r"Booting worker",
}
"""Commands that run until they are stopped, and what says that they are ready."""

SERVERS = ("oncehook serve", "uvicorn", "gunicorn")
"""Of those, the ones of which one runs at a time: a reader stops it before starting the next."""

LOOKS_AGAIN = 25
PATIENCE = 60
"""Seconds, after which something will never be shown."""

_ROWS_AND_COLUMNS = struct.pack("HHHH", 50, 200, 0, 0)
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_QUESTION = re.compile(r"\[y/N\]: ?\Z")


@dataclass(frozen=True)
class Step:
    """One command of a block, and the lines that the page prints beneath it."""

    command: str
    printed: list[str]


def steps(block: Block) -> Iterator[Step]:
    """The commands of a console block: behind `$` or `#` (root's), or every line where there is no such prompt."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompt = lines[0][:2] if lines and lines[0][:2] in ("$ ", "# ") else ""
    commands: list[Step] = []
    for line in lines:
        if line.startswith(prompt):
            if line.strip():
                commands.append(Step(line.removeprefix(prompt), []))
        else:
            commands[-1].printed.append(line)
    return iter(commands)


def pattern(printed: list[str]) -> str:
    """The printed lines, one right below the other, whatever their numbers and wherever they say `…`."""
    return r"\s*\n\s*".join(map(_line_pattern, printed)).replace(r"\s*\n\s*(?s:.*?)\s*\n\s*", r"\s*\n(?s:.*?)\s*")


def _line_pattern(line: str) -> str:
    if line.strip() == "…":
        return "(?s:.*?)"
    words = re.escape(line.strip()).replace(r"\ ", " ")
    words = re.sub(r"\b([a-z]{3}_)[0-9a-f]+…", r"\1…", words)
    return re.sub(r"\d+", r"\\d+", re.sub(r" +", r"\\s+", words)).replace("…", "[^\n]*")


class Terminal:
    """A command on a terminal of its own, and all that it has shown so far."""

    def __init__(self, script: str, folder: Path, env: dict[str, str]) -> None:
        self._shown = ""
        self._keyboard, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, _ROWS_AND_COLUMNS)
        self._process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._eyes = threading.Thread(target=self._read)
        self._eyes.start()

    @property
    def shown(self) -> str:
        return _COLOUR.sub("", self._shown).replace("\r\n", "\n")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        code = self._process.wait()
        self._eyes.join()
        os.close(self._keyboard)
        return code

    def stop(self) -> int:
        """As Ctrl-C does; its exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        return self.wait()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a piece may end in the middle of a character
        while True:
            try:
                piece = os.read(self._keyboard, 65536)
            except OSError:  # the last one who could write has gone
                return
            self._shown += decoder.decode(piece)
            if _QUESTION.search(self.shown):
                os.write(self._keyboard, b"y\n")


def clean_environment(folder: Path) -> dict[str, str]:
    """As if nobody had used oncehook here before; its programs come first."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ONCEHOOK_", "PYTEST", "PG"))}
    return env | {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{env['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class Reader:
    """Somebody with a folder, a shell, and as many terminals as are needed."""

    folder: Path
    env: dict[str, str]
    rewrites: dict[str, str]
    """What is printed, and what is typed in its place."""
    background: list[tuple[str, Terminal]] = field(default_factory=list)
    others: ExitStack = field(default_factory=ExitStack)
    """What runs beside the reader: a database, somebody else's server."""

    def rewritten(self, text: str) -> str:
        for printed, typed in self.rewrites.items():
            text = text.replace(printed, typed)
        return text

    def write(self, name: str, text: str) -> None:
        path = self.folder / self.rewritten(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.rewritten(text))

    def type(self, command: str, printed: list[str], meanwhile: str | None = None) -> str:
        """Type a command and compare what it shows; what it has shown. Raises AssertionError when it differs."""
        typed = self.rewritten(command)
        ready = next((ready for begin, ready in GOES_ON.items() if re.match(begin, command)), None)
        if ready is None:
            return self._run(typed, printed)
        if command.startswith(SERVERS):
            self.stop(SERVERS)
        terminal = self._begin(command, f"exec {typed}")
        _wait_for(ready, terminal, typed)
        if meanwhile is not None:
            self.type(meanwhile, [])
        if printed:
            _wait_for(pattern(printed), terminal, typed)
        return terminal.shown

    def stop(self, begins: tuple[str, ...] = ("",)) -> None:
        """Press Ctrl-C where these run; they end well."""
        for command, terminal in [one for one in self.background if one[0].startswith(begins)]:
            self.background.remove((command, terminal))
            code = terminal.stop()
            assert code in (0, 130, -signal.SIGINT), f"$ {command}\nended with {code}:\n{terminal.shown}"

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        try:
            # Where a command has failed, that is what is told of.
            with nullcontext() if error is None else suppress(AssertionError):
                self.stop()
        finally:
            for one in self.background:
                one[1].stop()
            self.others.close()

    def _run(self, typed: str, printed: list[str]) -> str:
        wanted = pattern(printed)
        # What a reader looks at has happened by the time they look.
        looks = LOOKS_AGAIN if typed.startswith(("oncehook events", "oncehook dead")) else 0
        while True:
            terminal = Terminal(f"{self._opening}\n{typed}\n{self._closing}", self.folder, self.env)
            code = terminal.wait()
            if typed.startswith("oncehook send") and "→ 503" in terminal.shown:
                continue  # the machine was too busy for a sender's patience, who would try again too
            if code == 0 and re.search(wanted, terminal.shown):
                return terminal.shown
            said = f"$ {typed}\nended with {code}:\n{terminal.shown}"
            assert code == 0, said
            assert looks, f"{said}\nThe page prints:\n" + "\n".join(printed)
            looks -= 1
            time.sleep(0.3)

    def _begin(self, command: str, script: str) -> Terminal:
        terminal = Terminal(f"{self._opening}\n{script}", self.folder, self.env)
        self.background.append((command, terminal))
        return terminal

    @property
    def _opening(self) -> str:
        """Where the last command stood, with what it exported."""
        state = shlex.quote(str(self.folder / ".shell"))
        return f"if [ -e {state} ]; then . {state}; fi"

    @property
    def _closing(self) -> str:
        state = shlex.quote(str(self.folder / ".shell"))
        return f'code=$?; {{ export -p; umask -p; printf "cd %q\\n" "$PWD"; }} > {state}; exit $code'


def _wait_for(wanted: str, terminal: Terminal, command: str) -> None:
    until = time.monotonic() + PATIENCE
    while not re.search(wanted, terminal.shown):
        assert not terminal.ended, f"$ {command}\nended:\n{terminal.shown}"
        assert time.monotonic() < until, f"$ {command}\n{terminal.shown}\nThere should be: {wanted}"
        time.sleep(0.05)
