"""The tutorial is followed to the letter: every file written, every command run, every printed line compared.

Only two things differ from a reader's folder: oncehook is installed already, and ports are whatever is free. A server
runs until the next one is started, as the page says.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/tutorial/first-five-minutes.md"
SERVERS = {"oncehook serve": r"ready on http", "uvicorn": r"Uvicorn running on"}
SHIPPED = r"(?m)^shipped in_"
LOOKS = ("oncehook events", "oncehook dead")
LOOKS_AGAIN = 100


@contextmanager
def port_of_ones_own() -> Iterator[str]:
    """A port that nobody else can take before a server of ours listens to it, or between two of them."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers say the same, and may bind it beside us
        held.bind(("127.0.0.1", 0))
        yield str(held.getsockname()[1])


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Every block of code with its language, in order."""
    return ((found[1], found[2]) for found in re.finditer(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE))


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Every command with the lines that are printed below it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *printed = part.rstrip("\n").split("\n")
        yield command, printed


def as_pattern(line: str) -> str:
    """A printed line, whatever its numbers and wherever it says `…`."""
    line = re.sub(r"…[0-9a-f]{6}\b|\b(in|evt)_[0-9a-f]+…", "…", line)  # digits of ids
    words = re.escape(line.strip()).replace("…", ".*").replace(r"\ ", " ")
    return re.sub(r"\d+", r"\\d+", re.sub(r" +", r"\\s+", words))


@dataclass
class Reader:
    """Somebody with two terminals."""

    folder: Path
    env: dict[str, str]
    ports: dict[str, str]
    server: subprocess.Popen[bytes] | None = None
    logs: list[Path] = field(default_factory=list)

    def write(self, code: str) -> None:
        name = code.partition("\n")[0].removeprefix("# ")
        assert name.endswith(".py"), name
        (self.folder / name).write_text(code)

    def type(self, command: str, printed: list[str]) -> None:
        for port, free in self.ports.items():
            command = command.replace(port, free)
        started = next((ready for name, ready in SERVERS.items() if command.startswith(name)), None)
        if command.startswith("python3 -m venv"):
            return
        if command.startswith("pip install"):
            packages = shlex.split(command, comments=True)[2:]
            assert all(importlib.util.find_spec(package) for package in packages), packages
        elif command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            self.env[name] = value
        elif started is not None:
            self.serve(command, started)
        else:
            self.run(command, printed)

    def run(self, command: str, printed: list[str]) -> None:
        wanted = ".*".join(map(as_pattern, printed))
        # What a reader looks at has happened by the time they look.
        for looks_left in range(LOOKS_AGAIN if command.startswith(LOOKS) else 0, -1, -1):
            code, shown = self.see_at_a_terminal(command) if command.startswith(LOOKS) else self.see_in_a_pipe(command)
            if code == 0 and re.search(wanted, shown, re.DOTALL):
                return
            assert looks_left, f"$ {command}\n{shown}\nThe page prints:\n" + "\n".join(printed)
            time.sleep(0.3)

    def see_in_a_pipe(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def see_at_a_terminal(self, command: str) -> tuple[int, str]:
        """Return what a command prints on a terminal of 80 columns."""
        ours, theirs = pty.openpty()
        env = self.env | {"COLUMNS": "80", "NO_COLOR": "1"}
        with os.fdopen(ours, "rb", buffering=0) as screen:
            process = subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=env, stdout=theirs, stderr=theirs)
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):  # the other end was closed
                while piece := screen.read(4096):
                    shown += piece
            return process.wait(), shown.decode().replace("\r", "")

    def serve(self, command: str, ready: str) -> None:
        self.stop()
        self.logs.append(self.folder / f"server-{len(self.logs)}.log")
        with self.logs[-1].open("wb") as log:
            self.server = subprocess.Popen(shlex.split(command), cwd=self.folder, env=self.env, stdout=log, stderr=log)
        self.see(ready)

    def see(self, wanted: str) -> None:
        """Wait until the server has printed this."""
        assert self.server is not None
        while not re.search(wanted, self.logs[-1].read_text()):
            assert self.server.poll() is None, self.logs[-1].read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            assert self.server.wait(60) in (0, -signal.SIGINT), self.logs[-1].read_text()
            self.server = None


@pytest.mark.timeout(600)
def test_everything_works_as_it_is_printed(tmp_path: Path) -> None:
    with port_of_ones_own() as port, port_of_ones_own() as other:
        follow(tmp_path, port, other)


def follow(tmp_path: Path, port: str, other: str) -> None:
    """Do all that the page says, with oncehook on one port and the application on another."""
    own = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ONCEHOOK_", "PYTEST"))}
    env |= {
        "PATH": f"{own}:{env['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "TMPDIR": str(tmp_path),
        "PYTHONUNBUFFERED": "1",  # as on a terminal: what is printed is seen
        "ONCEHOOK_SERVER__PORT": port,
        "ONCEHOOK_DEMO_PORT": "0",
        "ONCEHOOK_DEMO_SECONDS": "1",
    }
    folder = tmp_path / "five"
    folder.mkdir()
    reader = Reader(folder, env, {"8000": other})
    try:
        for language, block in blocks(PAGE.read_text()):
            if language == "python":
                reader.write(block)
            else:
                assert language == "console", language
                for command, printed in commands(block):
                    reader.type(command, printed)
        reader.see(SHIPPED)  # the answer to the last hook says that it is kept, and no more
    finally:
        reader.stop()
    shipped = [len(re.findall(SHIPPED, log.read_text())) for log in reader.logs]
    assert shipped == [0, 0, 1, 1], "the replay after it was mended, and the hook that FastAPI took"
