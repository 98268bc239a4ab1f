"""What the scripts share: they say what takes a while, and are quiet otherwise."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTED = re.compile(r"building … (\d+) s")


def sourced(command: str) -> list[str]:
    return ["bash", "-c", f"source {ROOT}/scripts/env && {command}"]


def seconds_in(said: bytes) -> list[int]:
    return [int(number) for number in COUNTED.findall(said.decode(errors="replace"))]


def on_a_terminal() -> str:
    """What is said about a work that ends once some seconds were counted."""
    ours, theirs = pty.openpty()
    work = subprocess.Popen(sourced('patiently "building" cat'), stdin=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    assert work.stdin is not None
    said = b""
    try:
        while read := os.read(ours, 1024):
            said += read
            if len(set(seconds_in(said))) > 1:
                work.stdin.close()
    except OSError:  # nobody is left at the other end
        pass
    os.close(ours)
    assert work.wait() == 0
    return said.decode()


def test_on_a_terminal_the_seconds_are_counted_in_one_line() -> None:
    said = on_a_terminal()
    seconds = seconds_in(said.encode())
    assert seconds == sorted(seconds)
    assert said == "".join(f"\rbuilding … {n} s" for n in seconds) + "\r\n"


def test_elsewhere_it_is_said_once() -> None:
    slow = sourced('patiently "building" sleep 1.1')
    assert subprocess.run(slow, capture_output=True, check=True).stderr == b"building\n"


def test_what_fails_ends_the_script_and_says_why() -> None:
    ended = subprocess.run(sourced('patiently "building" ls /no-such; echo on'), capture_output=True, text=True)
    assert ended.returncode != 0
    assert "no-such" in ended.stderr
    assert not ended.stdout


def test_nothing_is_said_when_everything_is_there(tmp_path: Path) -> None:
    """A clone whose environment has what it should have."""
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    (clone / "scripts" / "env").write_text((ROOT / "scripts" / "env").read_text())
    for name in ("requirements/run.txt", "pyproject.toml", "package-lock.json"):
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text("as it is")
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # It reads what it is given, as the real one does: whoever writes to a pipe that nobody reads dies of it.
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && cat > /dev/null && echo the-same\nexit 0\n')
    python.chmod(0o755)
    setting_up = ["bash", "-c", f"source {clone}/scripts/env && set_up run"]
    first = subprocess.run(setting_up, capture_output=True, text=True, check=True)
    assert first.stderr == "installing what requirements/run.txt names into .venv\n"
    second = subprocess.run(setting_up, capture_output=True, text=True, check=True)
    assert (second.stdout, second.stderr) == ("", "")
